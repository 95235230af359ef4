"""The reads that the SQL stores have in common: queries with the same name, parameters and columns in both dialects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any

from killick.store import records
from killick.store.slots import Slot
from killick.store.sql.rows import head_of, message_of, snapshot_of

LOG, SNAPSHOT = 0, 1
"""Whether a run's log and inbox, or its snapshots, keep a chunk alive."""

_KEY_END = b"\xff" * 64
"""Sorts after the rest of any right's key: these are digests."""


class SqlReads(ABC):
    """Reads rows by named queries, and decodes them."""

    @abstractmethod
    def _found(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Returns the rows of a named query. A list is one parameter."""

    _run_row: Callable[[tuple[Any, ...]], records.RunRow]
    """Decodes a row of the index."""

    @abstractmethod
    def _is_intact(self, message: tuple[Any, ...]) -> bool:
        """Returns whether a message fits its checksum, from the columns of a query of the inbox."""

    @abstractmethod
    def _clock_us(self) -> int | None:
        """The time passed to queries; None: the database's."""

    @abstractmethod
    def lives(self, holder: str) -> bool: ...

    def head(self, run: str) -> records.Head | None:
        found = [row for row in self._found("head", run) if not row[9]]
        return head_of(found[0]) if found else None

    def heads(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[tuple[int, records.Head]]:
        return [(found[0], head_of(found)) for found in self._found("heads", after, limit)]

    def row(self, run: str, seq: int) -> records.Row | None:
        found = self._found("row", run, seq)
        return records.Row(*found[0]) if found else None

    def slots(self, run: str) -> list[Slot]:
        return [Slot(*row) for row in self._found("slots_of", run)]

    def references(self, run: str) -> records.References:
        rows = self._found("uses", run)
        return records.References(*({hash_ for kind, hash_ in rows if kind == use} for use in (LOG, SNAPSHOT)))

    def snapshot(self, run: str, *, fold: int, at: int) -> records.Snapshot | None:
        found = self._found("snapshot", run, fold, at)
        return snapshot_of(found[0]) if found else None

    def snapshots(self, run: str) -> list[records.Snapshot]:
        return [snapshot_of(row) for row in self._found("snapshots", run)]

    def unindexed(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[records.UnindexedRun]:
        return [
            records.UnindexedRun(number=number, run=run, base=base, indexed_to=seq)
            for number, run, base, seq in self._found("unindexed", after, limit)
        ]

    def inbox(
        self, run: str, *, name: str | None = None, after: int = 0, limit: int = records.READ_LIMIT
    ) -> list[records.Message]:
        return [self._message(run, row) for row in self._found("inbox", run, after, name, limit)]

    def message(self, run: str, id: str) -> records.Message | None:  # noqa: A002
        found = self._found("message_with_id", run, id)
        return self._message(run, found[0]) if found else None

    def messages(self, run: str) -> list[records.Message]:
        return [self._message(run, row) for row in self._found("messages", run)]

    def _message(self, run: str, row: tuple[Any, ...]) -> records.Message:
        return message_of(run, row[:7], intact=self._is_intact(row))

    def owned(self, space: str, prefix: bytes = b"") -> dict[records.UniqueRight, records.Owner]:
        rows = self._found("owned", space, prefix, prefix + _KEY_END)
        return {records.UniqueRight(space, key): records.Owner(run, seq) for key, run, seq in rows}

    def claimed(self, run: str) -> dict[records.UniqueRight, int]:
        return {records.UniqueRight(space, key): seq for space, key, seq in self._found("claims_of", run)}

    def index(self, run: str) -> records.RunRow | None:
        found = self._found("indexed", run)
        return self._run_row(found[0]) if found else None

    def tags(self, run: str) -> set[str]:
        return {tag for (tag,) in self._found("tags_of", run)}

    def asking(self, now_us: int, *, after: records.Urgency | None = None, limit: int) -> list[records.RunRow]:
        key = after or (-1, 0, 0, 0)
        rows = self._found("asking", records.ASKS, now_us, records.NO_DEADLINE, *key, limit)
        return [self._run_row(row) for row in rows]

    def statuses(self, runs: Collection[str]) -> dict[str, records.RunStatus]:
        rows = self._found("run_statuses", list(runs))
        return {row[1]: records.RunStatus(head_of(row[:10]), *row[10:]) for row in rows}

    def agents(self) -> list[str]:
        return [agent for (agent,) in self._found("agents") if not agent.startswith(records.OWN_AGENTS)]

    def holders(self) -> list[records.Holder]:
        return [
            records.Holder(holder=holder, runs=runs, until_us=until, lives=bool(in_time) and self.lives(holder))
            for holder, runs, until, in_time in self._found("holdings", self._clock_us())
        ]

    def outbox(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = records.READ_LIMIT
    ) -> list[records.OutboxItem]:
        rows = self._found("outbox", after, None if kinds is None else list(kinds), min(limit, records.READ_LIMIT))
        return [records.OutboxItem(position=position, run=run, seq=seq, kind=kind) for position, run, seq, kind in rows]

    def quarantined(self, run: str) -> str | None:
        found = self._found("quarantined", run)
        return found[0][0] if found else None

    def displaced(self, run: str) -> list[records.Row]:
        return [records.Row(*row) for row in self._found("displaced", run)]
