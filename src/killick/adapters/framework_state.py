"""The shelf: what a framework keeps (checkpoints, sessions, states), on any store. Knows no framework.

Each id of a space is a log of Killick's own, `killick:SPACE:ID`, in which an entry is kept or dropped by its name. A
write
is atomic and names the head that it follows, so that any number of processes may keep things under one id. Values share
structure as all values do: one that grew costs what is new.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from killick.audit import seal
from killick.client.client import Client
from killick.client.client import open as open_client
from killick.errors import EpochStale, HandleClosed, HeadMoved, RunExists, RunUnknown, ValueErased
from killick.log.log import Log
from killick.log.writer import Entry, RunLog
from killick.model import events as e
from killick.model.chunks import Sharing
from killick.store.protocol import OWN_AGENTS, OWN_RUNS, Head, Row, RunQuery

OPEN_MAX: Final = 256
"""Logs whose entries are remembered, of those that were used last."""

TRIES: Final = 200
"""How often an append is tried that others were faster than."""

_PAUSE_SECONDS: Final = 0.002
_ROWS: Final = 500
_GAP: Final = 16
"""Events between two that are wanted, for which another read is not worth it."""
_GENERATION: Final = re.compile(r"(?<!~)(?:~~)*~(\d+)\Z")


class StateEntry:
    """Something that is kept under a name. `seq` and `at_us` say where and when it was; its value is read when it is
    looked at, each time anew, so that whoever gets it may change it."""

    __slots__ = ("_log", "_run", "_value", "at_us", "labels", "name", "seq")

    def __init__(
        self, name: str, value: Any = None, labels: Mapping[str, str] | None = None, seq: int = 0, at_us: int = 0
    ) -> None:
        self.name = name
        self.labels: dict[str, str] = dict(labels or {})
        self.seq = seq
        self.at_us = at_us
        self._value = value
        self._log: Log | None = None
        self._run = ""

    @classmethod
    def on_record(cls, log: Log, run: str, seq: int, event: e.EntryKept) -> StateEntry:
        """An entry as it is in a log."""
        kept = cls(event.name, None, event.labels, seq, event.at)
        kept._log, kept._run = log, run
        return kept

    @property
    def value(self) -> Any:
        """What is kept. RunUnknown where its log was forgotten since."""
        return self._value if self._log is None else self._log.data(self._run, self.seq)["value"]

    def __repr__(self) -> str:
        return f"Kept({self.name!r}, labels={self.labels!r}, seq={self.seq})"


class FrameworkState:
    """The entries of one space in one store. Safe to share between threads, and with any number of processes."""

    def __init__(self, store: Client | str | os.PathLike[str], space: str) -> None:
        """On a client that is open, and stays so; or where the store is: then it is opened here, and closed here."""
        self.client = store if isinstance(store, Client) else open_client(os.fspath(store))
        self.space = space
        self._is_owner = not isinstance(store, Client)
        self._logs: OrderedDict[str, ShelfLog] = OrderedDict()
        self._mutex = threading.Lock()

    def put(self, id: str, *kept: StateEntry, expect: int | None = None) -> int:  # noqa: A002
        """Keep entries under an id, all of them or none, each instead of the one of its name; returns the head's seq.

        With `expect`, only if the head is there (0: nothing is kept yet); HeadMoved says where it is.
        """
        at = self.client.clock.now_us()
        entries = [Entry(e.EntryKept(at=at, name=one.name, labels=one.labels), {"value": one.value}) for one in kept]
        log = self.log(id)
        with log.lock:
            return log.append(entries, expect)

    def entries(self, id: str) -> Sequence[StateEntry]:  # noqa: A002
        """What is kept under an id now, in the order in which it was; whoever put it there."""
        log = self.log(id)
        with log.lock:
            log.refresh()
            return list(log.standing.values())

    def get(self, id: str, name: str) -> StateEntry | None:  # noqa: A002
        """The entry of this name."""
        log = self.log(id)
        with log.lock:
            log.refresh()
            return log.standing.get(name)

    def head(self, id: str) -> int:  # noqa: A002
        """The seq to `expect`, for what is decided by the entries as they are now; 0 where nothing is kept."""
        log = self.log(id)
        with log.lock:
            log.refresh()
            return log.seq

    def drop(self, id: str, *names: str) -> None:  # noqa: A002
        """Keep nothing under these names any more. The log still knows what was there."""
        at, log = self.client.clock.now_us(), self.log(id)
        with log.lock:
            log.refresh()
            entries = [Entry(e.EntryDropped(at=at, name=name)) for name in dict.fromkeys(names) if name in log.standing]
            if entries:
                log.append(entries, None)

    def forget(self, id: str, *more: str) -> None:  # noqa: A002
        """Take everything that was ever kept under some ids out of the store, values too, unless others share them."""
        for each in (id, *more):
            log = self.log(each)
            with log.lock:
                log.forget()
        while self.client.store.sweep():
            pass

    def ids(self) -> Iterator[str]:
        """Every id under which something was kept, the newest first."""
        query, before = RunQuery(agent=_agent(self.space)), None
        while rows := self.client.store.runs(query, before=before, limit=_ROWS):
            for row in rows:
                yield _id_of(self.space, row.run)
            before = rows[-1].number

    def close(self) -> None:
        """Let the store go, if it was opened here."""
        if self._is_owner:
            self.client.close()

    def opened(self, id: str) -> ShelfLog:  # noqa: A002
        """A log of which nothing is known here yet. Whoever makes more of it than what stands gives another kind."""
        return ShelfLog(self.client, self.space, id)

    def log(self, id: str) -> ShelfLog:  # noqa: A002
        """What is known here of an id, for whoever holds its lock."""
        with self._mutex:
            log = self._logs.get(id)
            if log is None:
                log = self._logs[id] = self.opened(id)
            self._logs.move_to_end(id)
            while len(self._logs) > OPEN_MAX:
                self._logs.popitem(last=False)
            return log


class ShelfLog:
    """The log of one id as far as it is known here. Whoever uses it holds its `lock`; `seq` is where it was read to.

    A log that was forgotten leaves its name behind for good, so that the next one of the same id has another: which
    is there now is found by a tag.
    """

    def __init__(self, client: Client, space: str, id: str) -> None:  # noqa: A002
        self.lock = threading.RLock()
        self.standing: dict[str, StateEntry] = {}
        self.seq = 0
        self._client = client
        self._space = space
        self._id = id
        self._run = ""
        self._handle: RunLog | None = None

    # what it adds up to -------------------------------------------------------------------------

    def clear(self) -> None:
        """Nothing was taken in yet, or it is another log now."""
        self.standing = {}

    def take_in(self, seq: int, event: e.Event) -> None:
        """Take in the next event."""
        match event:
            case e.EntryKept():
                self.standing.pop(event.name, None)  # what is kept again comes last
                self.standing[event.name] = StateEntry.on_record(self._client.log, self._run, seq, event)
            case e.EntryDropped():
                self.standing.pop(event.name, None)
            case _:
                pass

    # reading ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in what was added since, by anybody."""
        store = self._client.store
        head = self._head()
        while head is not None and self.seq < head.seq:
            rows = store.read(self._run, after=self.seq, limit=min(_ROWS, head.seq - self.seq), data=False)
            if not rows:
                break
            for row in rows:
                self._apply(row.seq, e.decode(row.body))

    def _head(self) -> Head | None:
        """Where the log ends; None where there is none."""
        head = self._client.store.head(self._run) if self._run else None
        if head is None:
            found = self._found()
            self._turn_to(found)
            head = self._client.store.head(found) if found else None
        return head

    def _found(self) -> str:
        rows = self._client.store.runs(RunQuery(tag=_tag(self._space, self._id)), limit=1)
        return rows[0].run if rows else ""

    def _turn_to(self, run: str) -> None:
        self._run, self._handle, self.seq = run, None, 0
        self.clear()

    def _apply(self, seq: int, event: e.Event) -> None:
        self.take_in(seq, event)
        self.seq = seq

    def values(self, seqs: Collection[int]) -> dict[int, Any]:
        """What was kept at some events, read at once. They share what is alike: whoever gets them only reads them.

        RunUnknown where the log was forgotten since.
        """
        store, raws = self._client.store, dict[int, bytes]()
        for first, last in _stretches(seqs):
            after = first - 1
            while after < last and (rows := store.read(self._run, after=after, limit=min(_ROWS, last - after))):
                raws |= {row.seq: _data(row) for row in rows if row.seq in seqs}
                after = rows[-1].seq
        if len(raws) < len(seqs):
            raise RunUnknown(self._run)
        sharing = Sharing(store.pieces)
        sharing.expect(raws.values())
        return {seq: sharing.unpack(raw)["value"] for seq, raw in raws.items()}

    # writing ----------------------------------------------------------------------------------

    def append(self, entries: Sequence[Entry], expect: int | None) -> int:
        """Add to the log, which is created where there is none; returns the seq of the last event."""
        for tried in range(1, TRIES + 1):
            try:
                return self._appended(entries, expect)
            except (RunExists, RunUnknown, HeadMoved, EpochStale, HandleClosed):
                self._handle = None
                if expect is not None:
                    self._check(expect)
                if tried == TRIES:
                    raise
            except BaseException:
                self._handle = None
                raise
            time.sleep(self._client.ids.fraction() * _PAUSE_SECONDS * min(tried, 20))
        raise AssertionError

    def _check(self, expect: int) -> None:
        head = self._head()
        if (actual := head.seq if head is not None else 0) != expect:
            raise HeadMoved(f"{OWN_RUNS}{self._space}:{self._id}", expected=expect, actual=actual)

    def _appended(self, entries: Sequence[Entry], expect: int | None) -> int:
        handle = self._handle
        if handle is None:
            if self._head() is None:
                if expect:
                    self._check(expect)
                return self._created(entries)
            handle = self._handle = self._client.log.open(self._run)
            handle.rows = None  # what it was opened with is not needed here
        before = handle.seq
        if expect is not None and before != expect:
            raise HeadMoved(self._run, expected=expect, actual=before)
        after = handle.append(*entries).seq if entries else before
        self._applied(before, entries)
        return after

    def _created(self, entries: Sequence[Entry]) -> int:
        if not entries:
            return 0
        at, generation = entries[0].event.at, 0
        while True:
            run = _named(self._space, self._id, generation)
            tags = (_tag(self._space, self._id),)
            started = Entry(e.RunStarted(at=at, run=run, agent=_agent(self._space), tags=tags))
            handle = self._client.log.begin(run)
            try:
                head = handle.append(started, *entries)
            except RunExists:
                if self._found():
                    raise
                generation += 1
                continue
            self._turn_to(run)
            self._handle, self.seq = handle, 1
            self._applied(1, entries)
            return head.seq

    def _applied(self, before: int, entries: Sequence[Entry]) -> None:
        """What was just written needs not be read, unless others wrote before it."""
        if self.seq == before:
            for seq, entry in enumerate(entries, before + 1):
                self._apply(seq, entry.event)

    def forget(self) -> None:
        """Remove the log. The next seal is told, so that none misses it without a reason."""
        store, log = self._client.store, self._client.log
        while (head := self._head()) is not None:
            named = sha256(f"{head.run}\0{head.hash.hex()}".encode()).hexdigest()
            gone = seal.Pruned("nowhere: it was forgotten", named, [(head.run, head.seq, e.to_text(head.hash))])
            seal.tell_pruned(log, gone, at_us=self._client.clock.now_us())
            try:
                store.remove(head.run)
            except RunUnknown:
                continue  # somebody else forgot it
        self._turn_to("")


def _data(row: Row) -> bytes:
    if row.data is None:
        raise ValueErased(e.from_text(e.decode(row.body).data or ""))
    return row.data


def _stretches(seqs: Collection[int]) -> Iterator[tuple[int, int]]:
    """What to read for some events: those that are close together, and what is between them, in one go."""
    first = last = 0
    for seq in sorted(seqs):
        if first and seq - last > _GAP:
            yield first, last
            first = 0
        first, last = first or seq, seq
    if first:
        yield first, last


def _agent(space: str) -> str:
    return f"{OWN_AGENTS}shelf.{space}"


def _tag(space: str, id: str) -> str:  # noqa: A002
    return f"{OWN_RUNS}shelf:{space}:{id}"


def _named(space: str, id: str, generation: int) -> str:  # noqa: A002
    """How a log is called. A tilde of the id is written twice, so that one alone begins the generation."""
    again = f"~{generation}" if generation else ""
    return f"{OWN_RUNS}{space}:{id.replace('~', '~~')}{again}"


def _id_of(space: str, run: str) -> str:
    named = run.removeprefix(f"{OWN_RUNS}{space}:")
    again = _GENERATION.search(named)
    return (named[: again.start(1) - 1] if again else named).replace("~~", "~")
