"""A store that has the runs of a grant, and no others.

Everything above a store reads and writes through it, so that one place keeps a caller to its runs: listings, counts,
search, streams, answers, commands and starts. What is not of one run, such as maintenance, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec.structs import replace

from killick.errors import AccessRefused, LogError, RunUnknown
from killick.store.protocol import Store
from killick.store.records import (
    OWN_AGENTS,
    READ_LIMIT,
    Append,
    Delivered,
    Delivery,
    Head,
    IndexQuery,
    RunQuery,
    RunRow,
    RunStatus,
    TermPosition,
    UnindexedRun,
    Urgency,
    urgency_of,
)

T = TypeVar("T", Append, Delivery)
R = TypeVar("R")

_OF_STORE: Final = frozenset({
    "place", "id", "secret_key", "proves_life", "now_us", "lives", "holders", "watch", "pieces", "keys", "opened",
    "opened_piece",
})  # fmt: skip
"""What concerns no run by name. A value is found by its hash alone, which only a reader of its run has."""

_OF_RUN: Final = frozenset({
    "head", "read", "row", "opening", "references", "set_references", "snapshot", "snapshots", "forget_snapshots",
    "lease", "release", "inbox", "message", "messages", "slots", "claimed", "index", "tags", "reindex", "quarantine",
    "quarantined", "displaced",
})  # fmt: skip
"""What takes the id of a run first."""

_NO_RUN: Final = ""
"""The id of no run."""


class Grant(msgspec.Struct, frozen=True):
    """The runs of these agents (none: of all) that have all of these tags. Never Killick's own logs."""

    agents: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    def covers(self, agent: str, tags: Collection[str]) -> bool:
        """Whether it covers a run of this agent with these tags."""
        if agent.startswith(OWN_AGENTS) or (self.agents and agent not in self.agents):
            return False
        return set(self.tags) <= set(tags)

    def __str__(self) -> str:
        named = (*(f"agent {agent}" for agent in self.agents), *(f"tag {tag}" for tag in self.tags))
        return ", ".join(named)


ALL: Final = Grant()
"""Every run of the store."""


class GrantedStore:
    """A store with the runs of a grant. All others are as if they did not exist."""

    is_checked = True
    """By the store that it wraps."""

    def __init__(self, store: Store, grant: Grant) -> None:
        self._whole, self._grant = store, grant

    def __getattr__(self, name: str) -> Any:
        if name in _OF_STORE:
            return getattr(self._whole, name)
        if name in _OF_RUN:
            return partial(self._of_run, getattr(self._whole, name))
        if name in vars(Store):
            raise AccessRefused(name, f"takes a token for the whole store, and this one is for {self._grant}")
        raise AttributeError(name)

    def _of_run(self, method: Callable[..., R], run: str, *args: Any, **options: Any) -> R:
        return method(run if self._has(run) else _NO_RUN, *args, **options)

    def _has(self, run: str) -> bool:
        row = self._whole.index(run)
        return row is not None and self._grant.covers(row.agent, row.tags)

    def _shown(self, rows: Sequence[RunRow]) -> list[RunRow]:
        return [row for row in rows if self._grant.covers(row.agent, row.tags)]

    def close(self) -> None:
        """The whole store stays open."""

    # writing ----------------------------------------------------------------------------------

    def append(self, items: Sequence[Append]) -> list[Head | LogError]:
        return self._allowed(self._whole.append, items, self._may_append)

    def deliver(self, deliveries: Sequence[Delivery]) -> list[Delivered | LogError]:
        return self._allowed(self._whole.deliver, deliveries, lambda sent: self._has(sent.run))

    def _allowed(
        self, write: Callable[[Sequence[T]], list[R | LogError]], items: Sequence[T], may: Callable[[T], bool]
    ) -> list[R | LogError]:
        allowed = [may(item) for item in items]
        done = iter(write([item for item, is_allowed in zip(items, allowed, strict=True) if is_allowed]))
        return [
            next(done) if is_allowed else RunUnknown(item.run)
            for item, is_allowed in zip(items, allowed, strict=True)
        ]  # fmt: skip

    def _may_append(self, item: Append) -> bool:
        return all(self._may_write(one) and all(map(self._may_send, one.sends)) for one in item.group)

    def _may_write(self, one: Append) -> bool:
        if one.create is not None:
            return one.index is not None and self._grant.covers(one.index.agent, one.index.tags)
        # A companion without rows is a condition on another log, such as that of a key.
        return not one.rows or self._has(one.run)

    def _may_send(self, sent: Delivery) -> bool:
        return sent.waits_for is not None or self._has(sent.run)

    # finding ----------------------------------------------------------------------------------

    def statuses(self, runs: Collection[str]) -> dict[str, RunStatus]:
        return {run: found for run, found in self._whole.statuses(runs).items() if self._has(run)}

    def runs(self, query: RunQuery, *, before: int | None = None, limit: int = 100) -> list[RunRow]:
        found = list[RunRow]()
        for each in self._narrowed(query):
            cursor, wanted = before, limit
            while wanted > 0 and (rows := self._whole.runs(each, before=cursor, limit=limit)):
                found += (shown := self._shown(rows)[:wanted])
                cursor, wanted = rows[-1].number, wanted - len(shown)
                if len(rows) < limit:
                    break
        return sorted(found, key=lambda row: -row.number)[:limit]

    def counts(self, query: RunQuery) -> dict[str, int]:
        counted = Counter[str]()
        for each in self._narrowed(query):
            if set(self._grant.tags) <= {each.tag}:
                counted.update(self._whole.counts(each))
            else:
                counted.update(row.status for row in self._every(replace(each, status=())))
        return dict(counted)

    def _narrowed(self, query: RunQuery) -> list[RunQuery]:
        """The query for each agent of the grant, by its first tag where the query has none."""
        if query.tag is None and self._grant.tags:
            query = replace(query, tag=self._grant.tags[0])
        if not self._grant.agents:
            return [query]
        return [replace(query, agent=agent) for agent in self._grant.agents if query.agent in (None, agent)]

    def _every(self, query: RunQuery) -> Iterator[RunRow]:
        before: int | None = None
        while rows := self._whole.runs(query, before=before, limit=READ_LIMIT):
            yield from self._shown(rows)
            before = rows[-1].number

    def asking(self, now_us: int, *, after: Urgency | None = None, limit: int) -> list[RunRow]:
        found = list[RunRow]()
        while len(found) < limit and (rows := self._whole.asking(now_us, after=after, limit=limit)):
            found += self._shown(rows)
            after = urgency_of(rows[-1], now_us)
        return found[:limit]

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[RunRow]:
        named = self._grant.agents or None
        if agents is not None:
            named = tuple(agent for agent in agents if named is None or agent in named)
        return self._shown(self._whole.due(now_us, limit=READ_LIMIT, agents=named))[:limit]

    def agents(self) -> list[str]:
        return [agent for agent in self._whole.agents() if self.runs(RunQuery(agent=agent), limit=1)]

    def search(self, query: IndexQuery) -> list[TermPosition]:
        found, known = list[TermPosition](), dict[str, bool]()
        while len(found) < query.limit and (rows := self._whole.search(query)):
            for each in rows:
                if each.run not in known:
                    known[each.run] = self._has(each.run)
                if known[each.run]:
                    found.append(each)
            query = replace(query, before=rows[-1])
        return found[: query.limit]

    def unindexed(self, *, after: int = 0, limit: int = READ_LIMIT) -> list[UnindexedRun]:
        """None: a reader of the whole store writes the index."""
        return []


def granted(store: Store, grant: Grant) -> Store:
    """Returns the store with the runs of a grant alone."""
    return cast("Store", GrantedStore(store, grant))
