"""The in-memory store: dicts under one lock. The reference implementation, so simple comes before fast."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from itertools import count
from threading import Lock
from typing import Any, Final

from msgspec.structs import replace

from killick import errors
from killick.clock import Clock, SystemClock
from killick.ids import Ids, RandomIds
from killick.model.chunks import Blob
from killick.store import limits, records
from killick.store.memory_runs import Runs, StoredRun, indexed_to, lease_end_us
from killick.store.protocol import Transaction, holders_of, lease_clock_us
from killick.store.slots import Slot


class MemoryStore(Runs):
    """A store in the memory of this process."""

    is_checked: Final = True
    """Its rows are on no disk, where they could be damaged."""

    def __init__(self, *, clock: Clock | None = None, ids: Ids | None = None) -> None:
        ids = ids or RandomIds()
        self.place: Final = "memory:"
        self.id: Final = ids.new("store")
        self.secret_key: Final = ids.key()
        self.proves_life: Final = True
        self._lock, self._closed = Lock(), False
        super().__init__(clock or SystemClock())
        self._watchers: list[Callable[[str], None]] = []
        self._full_at_us: dict[bytes, int] = {}
        self._lane = 0

    def now_us(self) -> int:
        return lease_clock_us(self._clock)

    def copied(self, clock: Clock) -> MemoryStore:
        """Returns an independent copy with another clock."""
        with self._open():
            twin = copy(self)
            for name, value in vars(self).items():
                vars(twin)[name] = value.copy() if isinstance(value, (dict, list, set)) else value
            twin._lock, twin._clock, twin._numbers = Lock(), clock, count(len(self._runs) + 1)
            twin._watchers = []
            twin._runs = defaultdict(StoredRun, {name: run.copied() for name, run in self._runs.items()})
        return twin

    # the log ----------------------------------------------------------------------------------
    def append(self, items: Sequence[records.Append]) -> list[records.Head | errors.LogError]:
        records.refuse_misnumbered(items)
        with self._open():
            return [self._append(item) for item in items]

    def head(self, run: str) -> records.Head | None:
        with self._open():
            return self._runs[run].head

    def heads(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[tuple[int, records.Head]]:
        with self._open():
            return [(run.number, head) for run, head in self._present() if run.number > after][:limit]

    def read(
        self, run: str, *, after: int = 0, limit: int = records.READ_LIMIT, data: bool = True
    ) -> list[records.Row]:
        with self._open():
            rows = [row for row in self._runs[run].rows.values() if row.seq > after]
        return [row if data else replace(row, data=None) for row in rows[: min(limit, records.READ_LIMIT)]]

    def row(self, run: str, seq: int) -> records.Row | None:
        with self._open():
            return self._runs[run].rows.get(seq)

    def opening(self, run: str, *, fold: int) -> records.Opening | None:
        with self._open():
            stored = self._runs[run]
            if stored.head is None:
                return None
            cached = [one for (seq, made), one in stored.snapshots.items() if made == fold and seq <= stored.head.seq]
            newest = max(cached, key=lambda one: one.seq, default=None)
            rows = [row for row in stored.rows.values() if newest is None or row.seq > newest.seq]
            return records.Opening(head=stored.head, quarantined=stored.quarantined, snapshot=newest, rows=rows)

    # transactions of others -------------------------------------------------------------------
    def transaction(self) -> AbstractContextManager[Transaction]:
        raise errors.StoreError("memory: cannot join a transaction of yours; use a SQLite file or PostgreSQL")

    def join(self, connection: Any) -> Transaction:
        raise errors.StoreError("memory: cannot join a transaction of yours; use a SQLite file or PostgreSQL")

    # values -----------------------------------------------------------------------------------
    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        with self._open():
            return {digest: self._pieces[digest] for digest in hashes if digest in self._pieces}

    def references(self, run: str) -> records.References:
        with self._open():
            references = self._runs[run].references
            return records.References(set(references.log), set(references.snapshots))

    def set_references(self, run: str, hashes: Collection[bytes], *, at: int, delivered: int) -> bool:
        with self._open():
            stored = self._runs[run]
            if stored.head is None or stored.head.seq != at or len(stored.inbox) != delivered:
                return False
            stored.references = replace(stored.references, log=set(hashes))
            return True

    def sweep(self, *, limit: int = records.READ_LIMIT) -> int:
        with self._open():
            references = [run.references for run in self._runs.values()]
            alive = {digest for one in references for digest in one.log | one.snapshots}
            dead = [digest for digest in self._pieces if digest not in alive][:limit]
            for digest in dead:
                del self._pieces[digest]
            self._full_at_us = {bucket: at for bucket, at in self._full_at_us.items() if at > self.now_us()}
            return len(dead)

    # snapshots --------------------------------------------------------------------------------
    def snapshot(self, run: str, *, fold: int, at: int) -> records.Snapshot | None:
        newest = reversed([one for one in self.snapshots(run) if one.fold == fold and one.seq <= at])
        return next(newest, None)

    def snapshots(self, run: str) -> list[records.Snapshot]:
        with self._open():
            return [one for _, one in sorted(self._runs[run].snapshots.items())]

    def forget_snapshots(self, run: str) -> None:
        with self._open():
            self._runs[run].snapshots.clear()
            self._runs[run].references.snapshots.clear()

    # search terms -----------------------------------------------------------------------------
    def unindexed(self, *, after: int = 0, limit: int = records.READ_LIMIT) -> list[records.UnindexedRun]:
        with self._open():
            found = [
                records.UnindexedRun(number=run.number, run=head.run, base=head.base, indexed_to=indexed_to(run, head))
                for run, head in self._present()
                if run.number > after and indexed_to(run, head) < head.seq
            ]
        return found[:limit]

    def index_terms(self, items: Sequence[records.TermBatch]) -> None:
        with self._open():
            for item in items:
                run = self._runs[item.run]
                if item.reset:
                    run.terms, run.indexed_to = set(), None
                if run.head is not None and indexed_to(run, run.head) == item.after:
                    run.terms |= set(item.terms)
                    run.indexed_to = item.up_to

    def search(self, query: records.IndexQuery) -> list[records.TermPosition]:
        since, until, before = query.since_us, query.until_us, query.before
        with self._open():
            bearing: defaultdict[records.TermPosition, set[int]] = defaultdict(set)
            for run, head in self._present():
                for term in run.terms:
                    bearing[records.TermPosition(term.at_us, run.number, term.seq, head.run)].add(term.term)
        found = [place for place, terms in bearing.items() if all(terms & set(group) for group in query.all_of)]
        found = [place for place in found if since is None or place.at_us >= since]
        found = [place for place in found if until is None or place.at_us < until]
        return sorted((place for place in found if before is None or place < before), reverse=True)[: query.limit]

    # leases -----------------------------------------------------------------------------------
    def lease(self, run: str, holder: str, *, seconds: float, handed: int | None = None) -> records.Head:
        with self._open():
            head = self._known(run)
            if head.epoch != handed and lease_end_us(head) > self.now_us():
                raise errors.RunBusy(run, holder=str(head.holder))
            return self._take(head, holder, seconds)

    def claim(
        self,
        holder: str,
        *,
        now_us: int,
        seconds: float,
        limit: int,
        agents: Collection[str] | None = None,
        room: Mapping[str, int] | None = None,
    ) -> list[records.Claimed]:
        left, taken = dict(room or {}), list[records.Claimed]()
        with self._open():
            for row in self._due(now_us, agents, self._lane):
                if len(taken) >= limit:
                    break
                if left.get(row.agent, 1) > 0:
                    left[row.agent] = left.get(row.agent, limit + 1) - 1
                    self._lane, was = row.lane, self._known(row.run)
                    head = self._take(was, holder, seconds)
                    taken.append(records.Claimed(head=head, row=row, left=was.holder, left_until_us=was.lease_until_us))
        return taken

    def renew(self, holder: str, runs: Collection[str], *, seconds: float) -> dict[str, int]:
        with self._open():
            now_us = self.now_us()
            held = [(run, head) for run, head in self._present() if head.holder == holder and head.run in runs]
            held = [(run, head) for run, head in held if lease_end_us(head) > now_us]
            for run, head in held:
                run.head = self._with_lease(head, holder, head.epoch, seconds)
            return {head.run: head.epoch for _, head in held}

    def release(self, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        with self._open():
            stored = self._runs[run]
            head, line = stored.head, stored.index
            if head is None or head.holder is None or head.epoch != epoch or holder not in (None, head.holder):
                return
            stored.head = replace(head, lease_until_us=0) if left else self._without_lease(head)
            if left or (line is not None and line.wake_at_us is not None and line.status not in records.ENDED):
                self._to_notify.append(run)

    def lives(self, holder: str) -> bool:
        # All holders live in this process; a holder without leases is not listed.
        with self._open():
            return holder not in self._released or any(
                run.head is not None and run.head.holder == holder for run in self._runs.values()
            )

    def holders(self) -> list[records.Holder]:
        with self._open():
            leases = [(head.holder, head.lease_until_us) for _, head in self._present() if head.holder is not None]
            return holders_of(leases, self.now_us())

    def take_tokens(self, buckets: Sequence[limits.TokenBucket]) -> int:
        with self._open():
            now_us = self.now_us()
            taken = {each.id: each.taken(self._full_at_us.get(each.id), now_us) for each in buckets}
            wait_us = max((wait_us for _, wait_us in taken.values()), default=0)
            if wait_us <= 0:
                self._full_at_us |= {bucket: full_at_us for bucket, (full_at_us, _) in taken.items()}
            return max(wait_us, 0)

    # the inbox --------------------------------------------------------------------------------
    def deliver(self, deliveries: Sequence[records.Delivery]) -> list[records.Delivered | errors.LogError]:
        with self._open():
            return [self._deliver(delivery) for delivery in deliveries]

    def inbox(
        self, run: str, *, name: str | None = None, after: int = 0, limit: int = records.READ_LIMIT
    ) -> list[records.Message]:
        waiting = [one for one in self.messages(run) if one.taken is None and one.number > after]
        return [one for one in waiting if name is None or one.name == name][:limit]

    def message(self, run: str, id: str) -> records.Message | None:  # noqa: A002
        return next((one for one in self.messages(run) if one.id == id), None)

    def messages(self, run: str) -> list[records.Message]:
        with self._open():
            return list(self._runs[run].inbox.values())

    def slots(self, run: str) -> list[Slot]:
        with self._open():
            return sorted(self._runs[run].slots.values(), key=lambda slot: slot.name)

    # finding ----------------------------------------------------------------------------------
    def owned(self, space: str, prefix: bytes = b"") -> dict[records.UniqueRight, records.Owner]:
        with self._open():
            found = [one for one in self._claims.items() if one[0].space == space and one[0].key.startswith(prefix)]
        return dict(sorted(found, key=lambda one: one[0].key))

    def claimed(self, run: str) -> dict[records.UniqueRight, int]:
        with self._open():
            if self._runs[run].head is None:
                return {}
            return {claim: owner.seq for claim, owner in self._claims.items() if owner.run == run}

    def index(self, run: str) -> records.RunRow | None:
        with self._open():
            return self._runs[run].index

    def tags(self, run: str) -> set[str]:
        return set() if (line := self.index(run)) is None else set(line.tags)

    def reindex(
        self, run: str, index: records.RunIndex, *, at: int, slots: Collection[Slot] | None = None,
        delivered: int | None = None,
    ) -> bool:  # fmt: skip
        with self._open():
            head = self._runs[run].head
            if head is None or head.seq != at or delivered not in (None, len(self._runs[run].inbox)):
                return False
            self._runs[run].index = None
            self._write_index(run, index)
            if slots is not None:
                self._runs[run].slots = {slot.name: slot for slot in slots}
            self._notify_if_sooner(run, None)
            return True

    def runs(self, query: records.RunQuery, *, before: int | None = None, limit: int = 100) -> list[records.RunRow]:
        lines = self._matching(query)
        lines = [line for line in lines if before is None or line.number < before]
        return [line for line in lines if not query.status or line.status in query.status][:limit]

    def asking(self, now_us: int, *, after: records.Urgency | None = None, limit: int) -> list[records.RunRow]:
        found = {
            records.urgency_of(row, now_us): row
            for row in self._matching(records.RunQuery(tag=records.ASKS))
            if row.status in records.ASKING
        }
        return [found[key] for key in sorted(found) if after is None or key > after][:limit]

    def statuses(self, runs: Collection[str]) -> dict[str, records.RunStatus]:
        with self._open():
            return {
                run.head.run: records.RunStatus(
                    run.head, getattr(run.index, "status", None), run.quarantined, len(run.inbox)
                )
                for run in (self._runs[name] for name in runs)
                if run.head is not None
            }

    def counts(self, query: records.RunQuery) -> dict[str, int]:
        return dict(Counter(line.status for line in self._matching(query)))

    def agents(self) -> list[str]:
        return sorted({line.agent for line in self._matching(records.RunQuery())})

    def _matching(self, query: records.RunQuery) -> list[records.RunRow]:
        """Returns the runs that match in all but their status, newest first."""
        with self._open():
            matching = [
                run for run, head in reversed(self._present()) if not query.holders or head.holder in query.holders
            ]
            matching = [run for run in matching if run.quarantined is not None or not query.quarantined]
            lines = [run.index for run in matching if run.index is not None]
        if query.agent is None and query.tag is None:
            lines = [line for line in lines if not line.agent.startswith(records.OWN_AGENTS)]
        lines = [line for line in lines if query.agent is None or line.agent == query.agent]
        lines = [line for line in lines if query.since_us is None or line.changed_at_us >= query.since_us]
        lines = [line for line in lines if query.until_us is None or line.changed_at_us < query.until_us]
        if query.contains is not None:
            part = query.contains.encode().lower()  # of bytes only ASCII has cases
            lines = [line for line in lines if part in line.run.encode().lower()]
        return [line for line in lines if query.tag is None or query.tag in line.tags]

    def due(self, now_us: int, *, limit: int = 100, agents: Collection[str] | None = None) -> list[records.RunRow]:
        with self._open():
            return self._due(now_us, agents, records.LANES - 1)[:limit]

    def _due(self, now_us: int, agents: Collection[str] | None, after: int) -> list[records.RunRow]:
        found: list[tuple[records.RunRow, int, None]] = []
        for _, head, line in self._active():
            if lease_end_us(head) > self.now_us() or (agents is not None and line.agent not in agents):
                continue
            left = head.holder is not None and line.status != "paused"
            since = line.changed_at_us if left else line.wake_at_us
            if left or (since is not None and since <= now_us):
                found.append((line, since or 0, None))
        return [line for line, *_ in records.in_turns(found, after)]

    def soonest_us(self, *, agents: Collection[str] | None = None) -> int | None:
        with self._open():
            free = [
                line.wake_at_us
                for _, head, line in self._active()
                if head.holder is None and (agents is None or line.agent in agents)
            ]
        return min((at for at in free if at is not None), default=None)

    def _active(self) -> Iterator[tuple[StoredRun, records.Head, records.RunRow]]:
        """Returns the runs that may become due, with their index."""
        for run, head in self._present():
            if run.index is not None and run.quarantined is None and run.index.status not in records.ENDED:
                yield run, head, run.index

    def watch(self, callback: Callable[[str], None]) -> Callable[[], None]:
        with self._open():
            self._watchers.append(callback)

        def stop() -> None:
            with self._lock:
                if callback in self._watchers:
                    self._watchers.remove(callback)

        return stop

    # the outbox -------------------------------------------------------------------------------
    def outbox(
        self, *, after: int = 0, kinds: Collection[str] | None = None, limit: int = records.READ_LIMIT
    ) -> list[records.OutboxItem]:
        with self._open():
            items = [one for one in self._outbox if one.position > after]
        return [one for one in items if kinds is None or one.kind in kinds][: min(limit, records.READ_LIMIT)]

    def outbox_end(self) -> int:
        with self._open():
            return self._outbox_end

    def trim_outbox(self, up_to: int) -> int:
        with self._open():
            before = len(self._outbox)
            self._outbox = [one for one in self._outbox if one.position > up_to]
            return before - len(self._outbox)

    # maintenance ------------------------------------------------------------------------------
    def quarantine(self, run: str, reason: str | None) -> None:
        with self._open():
            self._runs[run].quarantined = reason
            if reason is None:
                self._to_notify.append(run)

    def quarantined(self, run: str) -> str | None:
        with self._open():
            return self._runs[run].quarantined

    def repair(self, head: records.Head, *, keep: int, rows: Sequence[records.Row]) -> None:
        with self._open():
            run, old = self._runs[head.run], self._runs[head.run].head
            if old is not None and any(seq <= old.seq for seq in (head.seq, *(row.seq for row in rows))):
                raise ValueError(f"{head.run}: a repair must move the head forward from event {old.seq}")
            run.number = run.number or next(self._numbers)
            run.displaced += [row for seq, row in run.rows.items() if seq > keep]
            run.rows = {seq: row for seq, row in run.rows.items() if seq <= keep}
            run.rows |= {row.seq: row for row in rows}
            run.head, run.terms, run.indexed_to = head, set(), None

    def restore(
        self, run: str, rows: Sequence[records.Row], pieces: Sequence[Blob], messages: Sequence[records.InboxRow] = ()
    ) -> None:
        with self._open():
            self._known(run)
            stored = self._runs[run]
            stored.rows = dict(sorted((stored.rows | {row.seq: row for row in rows}).items()))
            self._pieces |= {piece.hash: piece for piece in pieces}
            for row in messages:
                number = row.message.number
                stored.inbox = dict(sorted((stored.inbox | {number: row.message}).items()))
                stored.numbers[row.message.id], stored.message_pieces[number] = number, frozenset(row.pieces)

    def displaced(self, run: str) -> list[records.Row]:
        with self._open():
            return list(self._runs[run].displaced)

    def remove(self, run: str, *, at: int | None = None, delivered: int | None = None) -> bool:
        with self._open():
            head, messages = self._known(run), len(self._runs[run].inbox)
            if at not in (None, head.seq) or delivered not in (None, messages):
                return False
            for _, other in self._present():
                if other.parent == run:
                    raise errors.StoreError(f"{run}: {other.run} is a fork of it; remove that run first")
            # Its claims stay: removing a run does not return its consumed rights.
            self._runs[run] = StoredRun(removed=True)
            self._outbox = [one for one in self._outbox if one.run != run]
            return True

    def purge(self) -> bool:
        return True

    def inspect(self, *, heal: bool = False) -> list[records.Problem]:
        with self._open():
            wrong = [head for run, head in self._present() if run.rows and max(run.rows) != head.seq]
        return [records.Problem(where="rows", what="end elsewhere", run=one.run, seq=one.seq) for one in wrong]

    def conditions(self) -> list[records.Condition]:
        return [records.Condition("place", self.place)]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._watchers.clear()

    @contextmanager
    def _open(self) -> Generator[None]:
        with self._lock:
            if self._closed:
                raise errors.StoreClosed(self.place)
            yield
            to_notify, self._to_notify = self._to_notify, []
            watchers = list(self._watchers) if to_notify else []
        for callback in watchers:
            for run in to_notify:
                callback(run)
