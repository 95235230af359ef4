"""The queues of limits: which calls are in flight, and which runs wait, for each value of a limit's argument."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any, Final

from killick.errors import KillickError
from killick.log.log import Log
from killick.model.facts import PERMIT
from killick.presenting.documents import Document
from killick.store.limits import PermitPool, pool_names
from killick.store.records import Owner, RunQuery

_WAITING_MAX: Final = 10_000
_RUNS_MAX: Final = 20


class LimitQueue(Document, frozen=True):
    """The calls in flight under a limit, for one value of its argument, and the runs that wait for one to end.

    `arguments` has that argument; it is empty if the limit has none, and where its value was erased. `runs` are some
    of those with a call in flight, and `in_flight` counts the calls. `first` is the oldest run that waits; its step
    has waited since `since`.
    """

    limit: str
    arguments: dict[str, Any]
    in_flight: int
    runs: tuple[str, ...]
    waiting: int
    first: str | None
    since_us: int | None


def limit_queues(log: Log) -> list[LimitQueue]:
    """Returns the queues of all limits with calls in flight, the longest first."""
    held: defaultdict[bytes, list[Owner]] = defaultdict(list)
    for right, owner in log.store.owned(PERMIT).items():
        held[right.key[:-2]].append(owner)
    return sorted((_queue(log, *each) for each in held.items()), key=lambda one: (-one.waiting, one.limit))


def _queue(log: Log, prefix: bytes, owners: list[Owner]) -> LimitQueue:
    limit, by, _ = pool_names(prefix)
    tag = PermitPool(prefix, 0).tag
    waiting = log.store.runs(RunQuery(tag=tag), limit=_WAITING_MAX)
    first, since = (waiting[-1].run if waiting else None), None
    arguments: dict[str, Any] = {}
    with suppress(KillickError):
        if by:
            arguments = {by: _argument(log, owners[0], by)}
    with suppress(KillickError):
        if first is not None:
            fold = log.state(first).fold
            steps = [fold.steps[at] for at in fold.facts.pending.values()]
            since = min((step.at for step in steps if tag in step.queued), default=None)
    runs = tuple(dict.fromkeys(owner.run for owner in owners))[:_RUNS_MAX]
    return LimitQueue(
        limit=limit, arguments=arguments, in_flight=len(owners), runs=runs, waiting=len(waiting), first=first,
        since_us=since,
    )  # fmt: skip


def _argument(log: Log, owner: Owner, by: str) -> Any:
    """The value of a limit's argument, from the intention of a call in flight."""
    started: Any = log.event(owner.run, owner.seq)
    step = log.state(owner.run).fold.step(started.step)
    return None if step is None else log.data(owner.run, step.edited or step.intended)["arguments"].get(by)
