"""LangGraph threads as logs: current checkpoints and writes, and the positions of their items. Serializes nothing.

An entry is a checkpoint or a task's writes. Each records its number of new items, so that an item's number determines
its position. Deleted entries stay in the log, because others may refer to their items.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

from langgraph.checkpoint.serde.base import SerializerProtocol

from killick.adapters.framework_state import CACHE_BYTES_MAX, Cache, FrameworkState, StateLog
from killick.adapters.langgraph.serialization import Packer, Snapshot, Unpacker, digest_of, inflated
from killick.client.client import AnyClient, Client
from killick.errors import HeadMoved, ValueErased
from killick.log.writer import Entry
from killick.lru import Lru
from killick.model import events as e
from killick.model import system_events
from killick.model.codec import Erased

SPACE: Final = "langgraph"
TRIES: Final = 200
"""How often a write is packed again after a conflict."""


class At(NamedTuple):
    """A checkpoint's id and namespace. Later ones have greater ids."""

    id: str
    ns: str

    @property
    def name(self) -> str:
        """Its entry's name."""
        return f"c:{self.id}@{self.ns}" if self.ns else f"c:{self.id}"


class Written(NamedTuple):
    """The position of a task's writes to a checkpoint."""

    seq: int
    name: str
    task: str


class Standing(NamedTuple):
    """A checkpoint's position, and its LangGraph run, if known."""

    seq: int
    run_id: str | None


class Draft(NamedTuple):
    """An entry before its items have numbers: its value is packed once its position is known. A nameless one gets a
    unique name."""

    name: str
    labels: Mapping[str, str]
    value: Callable[[Packer], Mapping[str, Any]]


class Thread(StateLog):
    """One thread."""

    def __init__(self, client: Client, id: str, frames: Cache[bytes], snapshots: Cache[Snapshot]) -> None:  # noqa: A002
        super().__init__(client, SPACE, id)
        self._frames = frames
        self._snapshots = snapshots
        self.clear()

    # the current state --------------------------------------------------------------------------

    def clear(self) -> None:
        self.checkpoints: dict[At, Standing] = {}
        self.written: dict[At, dict[str, Written]] = {}
        self._names: dict[str, At] = {}
        self._count = 0
        self._firsts: list[int] = []
        self._brought: list[tuple[int, int]] = []
        self._known: dict[bytes, int] = {}
        self._digested = 0

    def apply_event(self, seq: int, event: e.Event) -> None:
        match event:
            case system_events.EntryKept():
                labels = event.labels
                if new := int(labels.get("new", 0)):
                    self._firsts.append(self._count)
                    self._brought.append((seq, new))
                    self._count += new
                if (of := labels.get("of")) is not None:
                    at = At(of, labels.get("ns", ""))
                    self.written.setdefault(at, {})[event.name] = Written(seq, event.name, labels["task"])
                else:
                    ns = labels.get("ns", "")
                    at = At(event.name.removeprefix("c:").removesuffix(f"@{ns}" if ns else ""), ns)
                    self.checkpoints[at] = Standing(seq, labels.get("run"))
                self._names[event.name] = at
            case system_events.EntryDropped():
                at = self._names.pop(event.name, At("", ""))
                if event.name == at.name:
                    self.checkpoints.pop(at, None)
                elif self.written.get(at, {}).pop(event.name, None) and not self.written[at]:
                    del self.written[at]
            case _:
                pass

    def standing_entries(self) -> list[tuple[int, str, dict[str, str]]]:
        """Returns the seq, name and labels of current entries in order, for another thread: writes have no name there
        yet."""
        found = [(each.seq, at.name, labels_of(at, run=each.run_id)) for at, each in self.checkpoints.items()]
        for at, written in self.written.items():
            found += [(each.seq, "", labels_of(at, of=at.id, task=each.task)) for each in written.values()]
        return sorted(found)

    def latest(self, ns: str) -> At | None:
        """Returns the last checkpoint of a namespace."""
        return max((at for at in self.checkpoints if at.ns == ns), default=None)

    # items ------------------------------------------------------------------------------------

    def unpacker(self, serde: SerializerProtocol, numbers: Iterable[int]) -> Unpacker:
        """Returns an unpacker for some items."""
        wanted = set(numbers)
        cached = {number: found for number in wanted if (found := self._snapshots.get((self._run, number)))}
        frame_of = self.frames(wanted - cached.keys())
        return Unpacker(serde, lambda number: cached.get(number) or frame_of(number), self._keep_snapshot)

    def _keep_snapshot(self, number: int, snapshot: Snapshot) -> None:
        self._snapshots.put((self._run, number), snapshot, len(snapshot.state))
        self._known.setdefault(digest_of(snapshot.state), number)

    def frames(self, numbers: Iterable[int]) -> Callable[[int], bytes]:
        """Returns a lookup for the inflated frames of some items. Uncached ones are read at once."""
        known = {number: self._frames.get((self._run, number)) for number in numbers}
        places = {number: self._place(number) for number, frame in known.items() if frame is None}
        values = self.values({seq for seq, _ in places.values()})
        for number, (seq, nth) in places.items():
            known[number] = self._remember(number, values[seq]["new"][nth])
        return cast("dict[int, bytes]", known).__getitem__

    def _remember(self, number: int, frame: bytes | Erased) -> bytes:
        if isinstance(frame, Erased):
            raise ValueErased(frame.hash)
        frame = inflated(frame)
        self._frames.put((self._run, number), frame, len(frame))
        return frame

    def _place(self, number: int) -> tuple[int, int]:
        """Returns an item's event, and its index there."""
        brought = bisect_right(self._firsts, number) - 1
        return self._brought[brought][0], number - self._firsts[brought]

    def _digest(self) -> None:
        """Reads the digests of items from other processes, so that none is stored twice."""
        place = bisect_right(self._brought, self._digested, key=itemgetter(0))
        fresh = {seq: self._firsts[index] for index, (seq, _) in enumerate(self._brought[place:], place)}
        for seq, value in self._readable(fresh).items():
            for number, frame in enumerate(value["new"], fresh[seq]):
                if isinstance(frame, bytes):
                    self._known.setdefault(digest_of(inflated(frame)), number)
        self._digested = self.seq

    def _readable(self, seqs: Collection[int]) -> dict[int, Any]:
        """Returns the values at some events, without erased ones."""
        try:
            return self.values(seqs)
        except ValueErased:
            found: dict[int, Any] = {}
            for seq in seqs:
                with suppress(ValueErased):
                    found |= self.values([seq])
            return found

    # writing ----------------------------------------------------------------------------------

    def keep(self, serde: SerializerProtocol, drafts: Callable[[Thread], Sequence[Draft]]) -> None:
        """Appends entries atomically, decided and numbered for the thread's current state."""
        for tried in range(1, TRIES + 1):
            self._digest()
            first = self._count
            entries, digests = self._packed(serde, drafts(self))
            try:
                if entries:
                    self.append(entries, self.seq)
            except HeadMoved:
                if tried == TRIES:
                    raise
                self.refresh()
                continue
            self._known |= digests
            self._digested = self.seq
            for entry in entries:
                for frame in (entry.values or {})["value"].get("new", ()):
                    self._remember(first, frame)
                    first += 1
            return

    def remove(self, places: Sequence[At]) -> None:
        """Deletes checkpoints with their writes."""
        self.drop([at.name for at in places] + [name for at in places for name in self.written.get(at, {})])

    def _packed(self, serde: SerializerProtocol, drafts: Sequence[Draft]) -> tuple[list[Entry], dict[bytes, int]]:
        at, entries, digests = self._client.runtime.clock.now_us(), list[Entry](), dict[bytes, int]()
        first = self._count
        for place, draft in enumerate(drafts):
            packing = Packer(serde, self._known, first, digests)
            value = draft.value(packing)
            labels = dict(draft.labels)
            if packing.new:
                value, labels["new"] = {**value, "new": packing.new}, str(len(packing.new))
            entries.append(
                Entry(
                    system_events.EntryKept(at=at, name=draft.name or f"w:{self.seq}.{place}", labels=labels),
                    {"value": value},
                )
            )
            first += len(packing.new)
        return entries, digests


def labels_of(at: At, **more: str | None) -> dict[str, str]:
    """Returns the labels of a checkpoint's entry, without those that have no value."""
    labels = {**more, "ns": at.ns or None}
    return {name: value for name, value in labels.items() if value is not None}


class Threads(FrameworkState):
    """The threads of one store."""

    def __init__(self, store: AnyClient | str | os.PathLike[str]) -> None:
        super().__init__(store, SPACE)
        self._frames: Cache[bytes] = Lru(CACHE_BYTES_MAX)
        self._snapshots: Cache[Snapshot] = Lru(CACHE_BYTES_MAX)

    def opened(self, id: str) -> Thread:  # noqa: A002
        return Thread(self.client, id, self._frames, self._snapshots)
