"""The checkpointer: LangGraph's threads on any Killick store. Every method, sync and async.

A checkpoint, or a task's writes, is one atomic append, durable on return. A thread stores each message once, in any
number of checkpoints.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from killick.adapters.framework_state import in_thread
from killick.adapters.langgraph.serialization import SERDE, Packer, items_of, renumbered
from killick.adapters.langgraph.threads import At, Draft, Thread, Threads, labels_of
from killick.client.client import AnyClient
from killick.errors import DeclarationRefused, RunUnknown

Writes: TypeAlias = list[PendingWrite]  # in the class, `list` is a method

_DELTAS: Final = "counters_since_delta_snapshot"
_STRATEGIES: Final = ("keep_latest", "delete")
_SHAPE: Final = ("v", "channel_versions", "versions_seen", "updated_channels")
"""The parts of a checkpoint that hardly change between turns, with versions relative to the last."""


class KillickSaver(BaseCheckpointSaver[Any]):
    """A checkpointer on a Killick store: `builder.compile(checkpointer=KillickSaver("killick.db"))`.

    store   an open client, or a store's location, which `close` closes
    serde   LangGraph's serializer for non-plain values; a custom one, such as an encrypting one, gets everything

    Each method has an async form: `aput` for `put`.
    """

    def __init__(
        self, store: AnyClient | str | os.PathLike[str] = "killick.db", *, serde: SerializerProtocol | None = None
    ) -> None:
        super().__init__(serde=serde or SERDE)
        self._threads = Threads(store)

    def close(self) -> None:
        """Closes the store, if opened here."""
        self._threads.close()

    def __enter__(self) -> KillickSaver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    __aenter__, __aexit__ = in_thread(__enter__), in_thread(__exit__)

    # reading ----------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Returns the checkpoint that a config names, or the last of its thread and namespace."""
        asked, id_ = config["configurable"], get_checkpoint_id(config)
        ns = asked.get("checkpoint_ns", "")
        with self._thread(asked["thread_id"]) as thread:
            at = At(id_, ns) if id_ else thread.latest(ns)
            found = None if at is None else self._tuple(thread, asked["thread_id"], at)
        return found._replace(config=config) if found is not None and id_ else found

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Yields checkpoints of a thread, or of all, the newest first, each read on demand."""
        wanted = [] if config is None else [config["configurable"]["thread_id"]]
        ns = None if config is None else config["configurable"].get("checkpoint_ns")
        id_ = None if config is None else get_checkpoint_id(config)
        earlier = None if before is None else get_checkpoint_id(before)
        places: list[tuple[At, Any]] = []
        for id in wanted or self._threads.ids():  # noqa: A001
            with self._thread(id) as thread:
                places += [(at, id) for at in thread.checkpoints]
        for at, id in sorted(places, key=lambda place: place[0], reverse=True):  # noqa: A001
            if (ns is not None and at.ns != ns) or (id_ and at.id != id_) or (earlier and at.id >= earlier):
                continue
            if limit is not None and limit <= 0:
                return
            with self._thread(id) as thread:
                found = self._tuple(thread, id, at, filter)
            if found is not None:
                yield found
                limit = None if limit is None else limit - 1

    def _tuple(
        self, thread: Thread, id: Any, at: At, filter: Mapping[str, Any] | None = None  # noqa: A002
    ) -> CheckpointTuple | None:  # fmt: skip
        """Returns a checkpoint with its writes; None if a filter rejects it, or it was removed since."""
        standing, written = thread.checkpoints.get(at), thread.written.get(at, {}).values()
        if standing is None:
            return None
        try:
            values = thread.values({standing.seq, *(each.seq for each in written)})
            saved = values.pop(standing.seq)
            metadata = self._unpacked(thread, saved["metadata"])
            if any(metadata.get(key) != value for key, value in (filter or {}).items()):
                return None
            unpack = thread.unpacker(self.serde, _items(saved, values)).unpack
        except RunUnknown:
            return None
        parent = saved["parent"]
        return CheckpointTuple(
            config=_config(id, at.ns, at.id),
            checkpoint=_checkpoint(at.id, saved, unpack),
            metadata=metadata,
            parent_config=None if parent is None else _config(id, at.ns, parent),
            pending_writes=_ordered([(each.task, values[each.seq]) for each in written], unpack),
        )

    def _unpacked(self, thread: Thread, packed: Any) -> Any:
        return thread.unpacker(self.serde, items_of(packed)).unpack(packed)

    def _thread(self, id: Any) -> AbstractContextManager[Thread]:  # noqa: A002
        return cast("AbstractContextManager[Thread]", self._threads.current(str(id)))

    # writing ----------------------------------------------------------------------------------

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:  # fmt: skip
        """Saves a checkpoint; its parent is the one that the config names."""
        asked = config["configurable"]
        at = At(checkpoint["id"], asked.get("checkpoint_ns", ""))
        recorded = get_checkpoint_metadata(config, metadata)
        parent, run_id = asked.get("checkpoint_id"), recorded.get("run_id")

        def value(packer: Packer) -> Mapping[str, Any]:
            packed = {name: packer.pack(part) for name, part in recorded.items()}
            return {"parent": parent, **_saved(packer, checkpoint), "metadata": packed}

        draft = Draft(at.name, labels_of(at, run=None if run_id is None else str(run_id)), value)
        with self._thread(asked["thread_id"]) as thread:
            thread.keep(self.serde, lambda _: [draft])
        return _config(asked["thread_id"], at.ns, at.id)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Saves a task's writes after a checkpoint. Earlier writes stay, except errors and interrupts."""
        asked = config["configurable"]
        at = At(asked["checkpoint_id"], asked.get("checkpoint_ns", ""))
        placed = {WRITES_IDX_MAP.get(channel, place): (channel, value) for place, (channel, value) in enumerate(writes)}

        def drafts(thread: Thread) -> Sequence[Draft]:
            there = thread.written.get(at, {}).values()
            known = thread.values([each.seq for each in there if each.task == task_id]).values()
            stands = {place for value in known for place, _, _ in value["writes"] if place >= 0}
            fresh = {place: write for place, write in placed.items() if place not in stands}
            if not fresh:
                return []
            return [Draft("", labels_of(at, of=at.id, task=task_id), _writes(task_path, fresh))]

        with self._thread(asked["thread_id"]) as thread:
            thread.keep(self.serde, drafts)

    def delete_thread(self, thread_id: str) -> None:
        """Removes a thread from the store with all its messages."""
        self._threads.forget(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Deletes the checkpoints of some LangGraph runs in all threads, with their writes."""
        wanted = set(map(str, run_ids))
        for id in self._threads.ids() if wanted else ():  # noqa: A001
            with self._thread(id) as thread:
                thread.remove([at for at, standing in thread.checkpoints.items() if standing.run_id in wanted])

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keeps the last checkpoint of each namespace, and the ancestors that its delta channels need; or nothing."""
        if strategy not in _STRATEGIES:
            raise DeclarationRefused(f"strategy {strategy!r}", f"is not known; use one of {', '.join(_STRATEGIES)}")
        if strategy == "delete" and thread_ids:
            self._threads.forget(*map(str, thread_ids))
            return
        for id in thread_ids:  # noqa: A001
            with self._thread(id) as thread:
                kept = {at for ns in {at.ns for at in thread.checkpoints} for at in self._needed(thread, ns)}
                thread.remove([at for at in thread.checkpoints if at not in kept])

    def _needed(self, thread: Thread, ns: str) -> Iterator[At]:
        """Returns the last checkpoint, and the ancestors with its delta channels' changes since they were whole."""
        last = thread.latest(ns)
        wanted: set[str] | None = None
        for at, saved in self._lineage(thread, last):
            yield at
            if wanted is None:
                wanted = set(self._unpacked(thread, saved["metadata"].get(_DELTAS, {})))
            wanted -= set(saved["values"])
            if not wanted:
                return

    def _lineage(self, thread: Thread, at: At | None) -> Iterator[tuple[At, Any]]:
        """Returns a stored checkpoint and its ancestors."""
        while at is not None and (standing := thread.checkpoints.get(at)) is not None:
            saved = thread.values([standing.seq])[standing.seq]
            yield at, saved
            at = None if saved["parent"] is None else At(saved["parent"], at.ns)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copies a thread to another id atomically. Shared values are stored once."""
        with self._thread(source_thread_id) as source:
            entries = source.standing_entries()
            values = source.values([seq for seq, _, _ in entries])
            frames = source.frames({number for value in values.values() for number in items_of(value)})
        drafts = [Draft(name, labels, _copied(values[seq], frames)) for seq, name, labels in entries]
        with self._thread(target_thread_id) as target:
            target.keep(self.serde, lambda _: drafts)

    # versions ---------------------------------------------------------------------------------

    def get_next_version(self, current: Any, channel: None) -> Any:
        """Returns the next version. A thread from another checkpointer keeps its version format."""
        if isinstance(current, str):
            number, dot, _ = current.partition(".")
            return f"{int(number) + 1:0{len(number)}}{dot}{0 if dot else ''}"
        return 1 if current is None else current + 1

    aget_tuple = in_thread(get_tuple)
    aput = in_thread(put)
    aput_writes = in_thread(put_writes)
    adelete_thread = in_thread(delete_thread)
    adelete_for_runs = in_thread(delete_for_runs)
    acopy_thread = in_thread(copy_thread)
    aprune = in_thread(prune)

    async def alist(self, config: RunnableConfig | None, **options: Any) -> AsyncIterator[CheckpointTuple]:
        """As `list`."""
        found = self.list(config, **options)
        while (each := await asyncio.to_thread(next, found, None)) is not None:
            yield each


def _config(thread_id: Any, ns: str, id: str) -> RunnableConfig:  # noqa: A002
    return {"configurable": {"thread_id": thread_id, "checkpoint_ns": ns, "checkpoint_id": id}}


def _saved(packer: Packer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns a checkpoint for storage: its channels separately, its shape, and the rest."""
    shape = {name: value for name, value in checkpoint.items() if name in _SHAPE}
    versions = checkpoint["channel_versions"].values()
    last = max(versions, default=0) if all(type(version) is int for version in versions) else 0
    rest = {name: value for name, value in checkpoint.items() if name not in (*_SHAPE, "id", "ts", "channel_values")}
    return {
        "ts": checkpoint["ts"],
        "last": last,
        "shape": packer.whole(_relative_to(last, shape)),
        "values": {name: packer.pack(value) for name, value in checkpoint["channel_values"].items()},
        **({"rest": packer.pack(rest)} if rest else {}),
    }


def _checkpoint(id: str, saved: Mapping[str, Any], unpack: Callable[[Any], Any]) -> Checkpoint:  # noqa: A002
    shape = _relative_to(saved["last"], unpack(saved["shape"]))
    made = {
        "id": id,
        "ts": saved["ts"],
        **shape,
        "channel_values": unpack(saved["values"]),
        **unpack(saved.get("rest", {})),
    }
    return cast("Checkpoint", made)


def _relative_to(last: Any, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a shape's versions to offsets from the last one, and back. Other versions stay."""
    versions, seen = shape["channel_versions"], shape["versions_seen"]
    return {
        **shape,
        "channel_versions": _behind(last, versions),
        "versions_seen": {node: _behind(last, found) for node, found in seen.items()},
    }


def _behind(last: int, versions: Mapping[str, Any]) -> dict[str, Any]:
    return {name: last - version if last else version for name, version in versions.items()}


def _writes(path: str, placed: Mapping[int, tuple[str, Any]]) -> Callable[[Packer], Mapping[str, Any]]:
    def value(packer: Packer) -> Mapping[str, Any]:
        return {"path": path, "writes": [[place, channel, packer.pack(it)] for place, (channel, it) in placed.items()]}

    return value


def _copied(value: Any, frame_of: Callable[[int], bytes]) -> Callable[[Packer], Mapping[str, Any]]:
    """Returns an entry for another thread, with renumbered items."""

    def copied(packer: Packer) -> Mapping[str, Any]:
        kept = {name: part for name, part in value.items() if name != "new"}
        numbers = {number: packer.item(frame_of(number)) for number in items_of(kept)}
        return cast("Mapping[str, Any]", renumbered(kept, numbers))

    return copied


def _items(saved: Any, written: Mapping[int, Any]) -> Iterator[int]:
    """Returns the items that a checkpoint and its writes refer to."""
    writes = [write[2] for value in written.values() for write in value["writes"]]
    return items_of([saved["shape"], saved["values"], saved.get("rest"), writes])


def _ordered(written: Sequence[tuple[str, Any]], unpack: Callable[[Any], Any]) -> Writes:
    """Returns a checkpoint's writes, the last for each index, in LangGraph's order of application."""
    found: dict[tuple[str, str, int], tuple[str, Any]] = {}
    for task, value in written:
        for place, channel, packed in value["writes"]:
            found[writes_sort_key(value["path"], task, place)] = (channel, packed)
    return [(key[1], channel, unpack(packed)) for key, (channel, packed) in sorted(found.items())]
