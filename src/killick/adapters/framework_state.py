"""A key-value store for framework state (checkpoints, sessions) on any Killick store. Knows no framework.

Each id of a space is a system log, `killick:SPACE:ID`, in which entries are put or deleted by name. A write is atomic
and names its expected head, so that processes may share an id. Values share structure: a grown value costs only its new
part.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from typing import Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import msgspec

from killick.audit import seal
from killick.client.client import AnyClient, Client
from killick.client.client import open as open_client
from killick.errors import EpochStale, HandleClosed, HeadMoved, RunExists, RunUnknown, ValueErased
from killick.log.log import Log
from killick.log.writer import Entry, RunLog
from killick.lru import Lru
from killick.model import event_codec, system_events
from killick.model import events as e
from killick.model.chunks import REFERENCE, SharedReader
from killick.store.records import OWN_AGENTS, OWN_RUNS, Head, Row, RunQuery

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Place: TypeAlias = AnyClient | str | os.PathLike[str]
"""An open client, or a store's location."""

Cache: TypeAlias = Lru[tuple[str, int], T]
"""A cache by log and number, limited in bytes."""

OPEN_MAX: Final = 256
"""The number of recently used logs whose entries are cached."""

TRIES: Final = 200
"""How often an append is retried after a conflict."""

CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
"""The size of a cache of values in this process."""

_PAUSE_SECONDS: Final = 0.002
_ROWS: Final = 500
_GAP: Final = 16
"""The maximum gap between two wanted events that are read together."""
_GENERATION: Final = re.compile(r"(?<!~)(?:~~)*~(\d+)\Z")


def in_thread(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """Returns the async form of a method."""

    @functools.wraps(method)
    async def awaited(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.to_thread(method, self, *args, **kwargs)

    return awaited


class StateEntry:
    """A named entry. `seq` and `at_us` are its position and time; its value is read anew on each access, so that the
    caller may mutate it."""

    __slots__ = ("_log", "_run", "_value", "at_us", "labels", "name", "seq")

    def __init__(self, name: str, value: Any = None, labels: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.labels: Mapping[str, str] = labels or {}
        self.seq = self.at_us = 0
        self._value = value
        self._log: Log | None = None
        self._run = ""

    @classmethod
    def on_record(cls, log: Log, run: str, seq: int, event: system_events.EntryKept) -> StateEntry:
        """Returns an entry from a log's event."""
        kept = cls(event.name, labels=event.labels)
        kept.seq, kept.at_us, kept._log, kept._run = seq, event.at, log, run
        return kept

    @property
    def value(self) -> Any:
        """The value. RunUnknown if its log was removed since."""
        return self._value if self._log is None else self._log.data(self._run, self.seq)["value"]

    def __repr__(self) -> str:
        return f"StateEntry({self.name!r}, labels={self.labels!r}, seq={self.seq})"


def client_of(store: Place) -> Client:
    """The blocking client of an open client, or of a store that is opened here."""
    return store.as_sync() if isinstance(store, AnyClient) else open_client(os.fspath(store))


class FrameworkState:
    """The entries of one space in one store. Thread-safe, and shared by any number of processes."""

    def __init__(self, store: Place, space: str) -> None:
        """Takes an open client, which stays open, or a store's location, which `close` closes."""
        self.client = client_of(store)
        self.space = space
        self._is_owner = not isinstance(store, AnyClient)
        self._logs: Lru[str, StateLog] = Lru(OPEN_MAX)
        self._copies: Cache[bytes] = Lru(CACHE_BYTES_MAX)
        self._mutex = threading.Lock()

    @classmethod
    def of(cls, store: Place, space: str) -> FrameworkState:
        """Returns the state of a space, which all users of an open client share."""
        if not isinstance(store, AnyClient):
            return cls(store, space)
        with _SHARING:
            return _SHARED.setdefault((id(store.runtime), space), cls(store, space))

    def put(self, id: str, *kept: StateEntry, expect: int | None = None) -> int:  # noqa: A002
        """Puts entries under an id atomically, each replacing the one of its name; returns the head's seq.

        With `expect`, only if the head is there (0: empty); else raises HeadMoved.
        """
        at = self.client.runtime.clock.now_us()
        entries = [
            Entry(system_events.EntryKept(at=at, name=one.name, labels=dict(one.labels)), {"value": one.value})
            for one in kept
        ]
        log = self.log(id)
        with log.lock:
            return log.append(entries, expect)

    def entries(self, id: str) -> Sequence[StateEntry]:  # noqa: A002
        """Returns an id's current entries in order, by any writer."""
        with self.current(id) as log:
            return list(log.standing.values())

    def values(self, id: str, choose: Callable[[Sequence[StateEntry]], Sequence[StateEntry]] = list) -> list[Any]:  # noqa: A002
        """Returns the values of an id's current entries, or of the chosen ones, in one read. The caller may mutate
        them."""
        fresh = dict[int, bytes]()
        with self.current(id, fresh) as log:
            return log.copies([each.seq for each in choose(list(log.standing.values()))], self._copies, fresh)

    def get(self, id: str, name: str) -> StateEntry | None:  # noqa: A002
        """Returns the entry of this name."""
        with self.current(id) as log:
            return log.standing.get(name)

    def head(self, id: str) -> int:  # noqa: A002
        """Returns the seq to `expect` for a decision on the current entries; 0 if empty."""
        with self.current(id) as log:
            return log.seq

    def drop(self, id: str, *names: str) -> None:  # noqa: A002
        """Deletes these names. The log keeps their history."""
        with self.current(id) as log:
            log.drop([name for name in dict.fromkeys(names) if name in log.standing])

    def forget(self, id: str, *more: str) -> None:  # noqa: A002
        """Removes some ids from the store with all their values, unless shared, and from its write-ahead log."""
        for each in (id, *more):
            log = self.log(each)
            with log.lock:
                log.forget()
        while self.client.runtime.store.sweep():
            pass
        self.client.runtime.store.purge()

    def ids(self) -> Iterator[str]:
        """Returns every id with entries, the newest first."""
        query, before = RunQuery(agent=_agent(self.space)), None
        while rows := self.client.runtime.store.runs(query, before=before, limit=_ROWS):
            for row in rows:
                yield _id_of(self.space, row.run)
            before = rows[-1].number

    def close(self) -> None:
        """Closes the store, if opened here."""
        if self._is_owner:
            self.client.close()

    def opened(self, id: str) -> StateLog:  # noqa: A002
        """Returns an uncached log. A subclass returns its own kind of log."""
        return StateLog(self.client, self.space, id)

    @contextmanager
    def current(self, id: str, fresh: dict[int, bytes] | None = None) -> Iterator[StateLog]:  # noqa: A002
        """Locks the log of an id, with all entries so far."""
        log = self.log(id)
        with log.lock:
            log.refresh(fresh)
            yield log

    def log(self, id: str) -> StateLog:  # noqa: A002
        """Returns the cached log of an id; the caller holds its lock."""
        with self._mutex:
            log = self._logs.get(id)
            if log is None:
                log = self.opened(id)
                self._logs.put(id, log)
            return log


class StateOwner:
    """Keeps its entries in a store."""

    _shelf: FrameworkState

    def close(self) -> None:
        """Closes the store, if opened here."""
        self._shelf.close()


class StateLog:
    """The log of one id as cached here. Its user holds its `lock`; `seq` is the last read event.

    A removed log's name stays reserved, so that its successor has another: a tag finds the current one.
    """

    def __init__(self, client: AnyClient, space: str, id: str) -> None:  # noqa: A002
        self.lock = threading.RLock()
        self.standing: dict[str, StateEntry] = {}
        self.seq = 0
        self._client = client
        self._space = space
        self._id = id
        self._run = ""
        self._handle: RunLog | None = None

    # the current state --------------------------------------------------------------------------

    def clear(self) -> None:
        """Clears the cache: nothing was read yet, or the log was replaced."""
        self.standing = {}

    def apply_event(self, seq: int, event: e.Event) -> None:
        """Applies the next event."""
        match event:
            case system_events.EntryKept():
                self.standing.pop(event.name, None)  # an entry stored again comes last
                self.standing[event.name] = StateEntry.on_record(self._client.runtime.log, self._run, seq, event)
            case system_events.EntryDropped():
                self.standing.pop(event.name, None)
            case _:
                pass

    # reading ----------------------------------------------------------------------------------

    def refresh(self, fresh: dict[int, bytes] | None = None) -> None:
        """Reads new events of any writer, and their data into `fresh`, if given."""
        store = self._client.runtime.store
        head = self._head()
        while head is not None and self.seq < head.seq:
            limit = min(_ROWS, head.seq - self.seq)
            rows = store.read(self._run, after=self.seq, limit=limit, data=fresh is not None)
            if not rows:
                break
            if fresh is not None:
                fresh |= {row.seq: row.data for row in rows if row.data is not None}
            for row in rows:
                self._apply(row.seq, event_codec.decode(row.body))

    def _head(self) -> Head | None:
        head = self._client.runtime.store.head(self._run) if self._run else None
        if head is None:
            found = self._found()
            self._turn_to(found)
            head = self._client.runtime.store.head(found) if found else None
        return head

    def _found(self) -> str:
        rows = self._client.runtime.store.runs(RunQuery(tag=_tag(self._space, self._id)), limit=1)
        return rows[0].run if rows else ""

    def _turn_to(self, run: str) -> None:
        self._run, self._handle, self.seq = run, None, 0
        self.clear()

    def _apply(self, seq: int, event: e.Event) -> None:
        self.apply_event(seq, event)
        self.seq = seq

    def values(self, seqs: Collection[int]) -> dict[int, Any]:
        """Returns the values at some events in one read. They share structure: the caller must not mutate them.

        RunUnknown if the log was removed since.
        """
        raws = self._raws(seqs)
        sharing = self._sharing(raws)
        return {seq: sharing.unpack(raw, expected=True)["value"] for seq, raw in raws.items()}

    def copies(self, seqs: Sequence[int], cache: Cache[bytes], fresh: Mapping[int, bytes]) -> list[Any]:
        """Returns the values at some events, for the caller to mutate; `fresh` has data that was just read.

        JSON without references is cached. A reference is replaced in it by the JSON that it names.
        """
        known = {seq: None if seq in fresh else cache.get((self._run, seq)) for seq in seqs}
        raws = {seq: fresh[seq] for seq in known if seq in fresh}
        raws |= self._raws({seq for seq, raw in known.items() if raw is None and seq not in fresh})
        odd: dict[int, Any] = {}
        sharing, parts = self._sharing(raws), dict[bytes, bytes]()

        def part(ref: re.Match[bytes]) -> bytes:
            if ref[0] not in parts:
                parts[ref[0]] = _as_json(sharing.unpack(ref[0], expected=True)) or ref[0]
            return parts[ref[0]]

        for seq, raw in raws.items():
            plain = REFERENCE.sub(part, raw) if raw.find(_TAG) >= 0 else raw
            if plain.find(_TAG) >= 0:
                value = sharing.unpack(raw, expected=True)
                if (json := _as_json(value)) is None:
                    odd[seq] = deepcopy(value["value"])
                    continue
                plain = json
            known[seq] = plain
            cache.put((self._run, seq), plain, len(plain))
        return [odd[seq] if raw is None else _DECODE(raw)["value"] for seq, raw in known.items()]

    def _raws(self, seqs: Collection[int]) -> dict[int, bytes]:
        store, raws = self._client.runtime.store, dict[int, bytes]()
        for first, last in _ranges(seqs):
            after = first - 1
            while after < last and (rows := store.read(self._run, after=after, limit=min(_ROWS, last - after))):
                raws |= {row.seq: _data(row) for row in rows if row.seq in seqs}
                after = rows[-1].seq
        if len(raws) < len(seqs):
            raise RunUnknown(self._run)
        return raws

    def _sharing(self, raws: Mapping[int, bytes]) -> SharedReader:
        sharing = SharedReader(self._client.runtime.store.pieces)
        sharing.expect(raws.values())
        return sharing

    # writing ----------------------------------------------------------------------------------

    def drop(self, names: Collection[str]) -> None:
        """Deletes these names."""
        at = self._client.runtime.clock.now_us()
        if names:
            self.append([Entry(system_events.EntryDropped(at=at, name=name)) for name in names], None)

    def append(self, entries: Sequence[Entry], expect: int | None) -> int:
        """Appends to the log, creating it if needed; returns the last event's seq."""
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
            time.sleep(self._client.runtime.ids.fraction() * _PAUSE_SECONDS * min(tried, 20))
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
            handle = self._handle = self._client.runtime.log.open(self._run)
            handle.rows = None  # the rows of the open are not needed here
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
            handle = self._client.runtime.log.begin(run)
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
        """Applies own writes without reading, unless others wrote first."""
        if self.seq == before:
            for seq, entry in enumerate(entries, before + 1):
                self._apply(seq, entry.event)

    def forget(self) -> None:
        """Removes the log. The next seal records it, so that no seal misses it without a reason."""
        store, log = self._client.runtime.store, self._client.runtime.log
        while (head := self._head()) is not None:
            named = sha256(f"{head.run}\0{head.hash.hex()}".encode()).hexdigest()
            gone = seal.Pruned("nowhere: it was forgotten", named, [(head.run, head.seq, e.to_text(head.hash))])
            seal.announce_prune(log, gone, at_us=self._client.runtime.clock.now_us())
            try:
                store.remove(head.run)
            except RunUnknown:
                continue  # another process forgot it
        self._turn_to("")


def _as_json(value: Any) -> bytes | None:
    """Returns a value as JSON, if that has all of it."""
    try:
        raw = _ENCODE(value)
        return raw if _DECODE(raw) == value else None
    except (TypeError, ValueError, OverflowError):
        return None


_TAG: Final = b'"$'
"""In JSON without it, nothing is a reference or of another type."""
_ENCODE: Final = msgspec.json.Encoder().encode
_DECODE: Final = msgspec.json.Decoder().decode
_SHARED: Final[WeakValueDictionary[tuple[int, str], FrameworkState]] = WeakValueDictionary()
_SHARING: Final = threading.Lock()


def _data(row: Row) -> bytes:
    if row.data is None:
        raise ValueErased(e.from_text(event_codec.decode(row.body).data or ""))
    return row.data


def _ranges(seqs: Collection[int]) -> Iterator[tuple[int, int]]:
    """Groups events that are close together into single reads."""
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
    """Returns a log's name. A tilde in the id is doubled, so that a single one starts the generation."""
    again = f"~{generation}" if generation else ""
    return f"{OWN_RUNS}{space}:{id.replace('~', '~~')}{again}"


def _id_of(space: str, run: str) -> str:
    named = run.removeprefix(f"{OWN_RUNS}{space}:")
    again = _GENERATION.search(named)
    return (named[: again.start(1) - 1] if again else named).replace("~~", "~")
