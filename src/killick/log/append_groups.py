"""Pending appends, and which of them a commit joins, because they cannot be refused separately. Touches no store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from killick.errors import LogError
from killick.store.records import Append, Head

if TYPE_CHECKING:
    import asyncio


class Ticket(msgspec.Struct, eq=False):
    """One pending append. The committer fills it in; readers check `done`, then `result()` or `error`."""

    item: Append
    future: asyncio.Future[Head] | None = None
    done: bool = False
    head: Head | None = None
    error: BaseException | None = None
    gate: threading.Lock | None = None
    promoted: bool = False
    size_bytes: int = 0
    due: float = 0.0

    @property
    def is_committed(self) -> bool:
        return self.done and self.error is None

    def result(self) -> Head:
        """Returns the new head, or raises the refusal; only when done."""
        if self.error is not None:
            raise self.error
        assert self.head is not None
        return self.head


@dataclass(slots=True, eq=False)
class Hold:
    """The held-back appends of a run while a transaction is open in which one of its steps ends."""

    fence: Append
    mutex: threading.RLock = field(default_factory=threading.RLock)
    tickets: list[Ticket] = field(default_factory=list[Ticket])
    seq: int | None = None
    """The seq of the step's committed end; None until then."""


def grouped(batch: Sequence[Ticket]) -> list[list[Ticket]]:
    """Groups tickets into single appends: consecutive ones of one run that cannot be refused separately."""
    groups: list[list[Ticket]] = []
    last: dict[str, list[Ticket]] = {}
    for ticket in batch:
        item = ticket.item
        group = last.get(item.run)
        if group is not None and group[-1].item.joins(item):
            group.append(ticket)
        else:
            group = last[item.run] = [ticket]
            groups.append(group)
    return groups


def results_of(groups: Sequence[Sequence[Ticket]], done: Sequence[Head | LogError]) -> list[Head | BaseException]:
    """Returns each ticket's result. After a refusal, the run's later appends are refused for the same reason."""
    refused: dict[str, LogError] = {}
    results: list[Head | BaseException] = []
    for group, result in zip(groups, done, strict=True):
        run = group[0].item.run
        if isinstance(result, LogError):
            refused.setdefault(run, result)
        results += [refused.get(run, result)] * len(group)
    return results


def joined(group: Sequence[Ticket]) -> Append:
    """Joins a group into one append."""
    item = group[0].item
    for ticket in group[1:]:
        item = item.joined(ticket.item)
    return item
