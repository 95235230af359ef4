"""Encodes channel values: plain data as is, the rest as serializer bytes, deduplicated within a thread.

A checkpoint contains all channel values, so a conversation would be written again at each step. Here a thread has
items, numbered in order of first appearance; lists and dicts of larger values refer to them. References in a packed
value have types that plain values never have:

    (n,)        item n
    (n, count)  in a list: that many items from n on
    bytes       a frame: the serializer's bytes of a small value, or in a list the numbers of many items

A frame starts with a letter for its content, in upper case if deflated: `m` msgpack, `n` numbers, delta-coded; `t` a
length, the name of another type of the serializer, and its bytes.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from hashlib import blake2b
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple

import msgspec
import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel

from killick.errors import ValueRefused


class DataSerializer(JsonPlusSerializer):
    """LangGraph's serializer. Restores its own safe types, and the types that this program has imported and that hold
    data: Pydantic models, dataclasses, enums and named tuples. By any other, a process that can write the store could
    run code here; such a value comes back as its fields."""

    def __init__(self) -> None:
        super().__init__(allowed_msgpack_modules=None)
        self._mutex = threading.Lock()
        self._judged: set[tuple[str, str]] = set()
        self._allows: JsonPlusSerializer | None = None

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        if data[0] == "msgpack" and (fresh := _types_in(data[1]) - self._judged):
            with self._mutex:
                self._allows = (self._allows or self).with_msgpack_allowlist(
                    [each for each in fresh if _holds_data(each)]
                )
                self._judged |= fresh
        return JsonPlusSerializer.loads_typed(self._allows or self, data)


def _types_in(raw: bytes) -> set[tuple[str, str]]:
    """Returns the modules and names of the types in a value, without creating it."""
    found: set[tuple[str, str]] = set()

    def note(code: int, inner: bytes) -> None:
        match ormsgpack.unpackb(inner, ext_hook=note, option=ormsgpack.OPT_NON_STR_KEYS):
            case [str(module), str(name), *_]:
                found.add((module, name))
            case _:
                pass

    ormsgpack.unpackb(raw, ext_hook=note, option=ormsgpack.OPT_NON_STR_KEYS)
    return found


def _holds_data(place: tuple[str, str]) -> bool:
    """Returns whether a name is that of a loaded type that holds data. Imports nothing."""
    kind = getattr(sys.modules.get(place[0]), place[1], None)
    if not isinstance(kind, type):
        return False
    return issubclass(kind, BaseModel | Enum) or is_dataclass(kind) or hasattr(kind, "_fields")


SERDE: Final = DataSerializer()

INLINE_BYTES_MAX: Final = 48
"""A longer value becomes an item, and is stored once."""

PLAIN_BYTES_MAX: Final = 256
"""A list or dict of small values that is longer, as JSON, becomes one item."""

DEPTH_MAX: Final = 16
"""How deep lists and dicts are searched."""

RUNS_MAX: Final = 3
"""How many item ranges a list names one by one."""

_DEFLATED_BYTES_MIN: Final = 96
_FREE_BYTES: Final = 1 << 20
_RATIO_MAX: Final = 100
"""A frame of more bytes is not deflated to less than a hundredth, so that one from another store cannot fill memory."""
_VALUE: Final = "a channel value"
_MESSAGES: Final = "langchain_core.messages."
_PLAIN: Final = (
    ormsgpack.OPT_NON_STR_KEYS | ormsgpack.OPT_PASSTHROUGH_DATACLASS | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM | ormsgpack.OPT_PASSTHROUGH_SUBCLASS | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)  # fmt: skip
"""Values that change their type on the way are errors."""

# Common parts of messages, so that short ones compress well. Never change it: existing frames need it.
_COMMON: Final = (
    b"\x94\xb0langchain_core.documents\xa8Document\x9a\xa7__type\xa8page_content\xa8metadata\xa6source"
    b"\x93\xaflanggraph.types\xa4Send\xa9Interrupt\xa7Command\xa5value\xa2id\xa6resume\xa4goto\xa6update"
    b"\xabinput_tokens\xadoutput_tokens\xactotal_tokens\xb3input_token_details\xb4output_token_details\xaacache_read"
    b"\xaamodel_name\xadfinish_reason\xa4stop\xabstop_reason\xaamodel_provider\xa4text\xa8thinking\xa8tool_use"
    b"\xa4args\xa4type\xa9tool_call\xa8function\xa9arguments\xa4name\xa2id\xa5call_"
    b"\x94\xbflangchain_core.messages.system\xadSystemMessage\x88\xa7content\xb1additional_kwargs\x80"
    b"\x94\xbdlangchain_core.messages.tool\xabToolMessage\x89\xa7content\xb1additional_kwargs\x80"
    b"\xb1response_metadata\x80\xa4type\xa4tool\xa4name\xc0\xa2id\xc0\xactool_call_id\xa8artifact\xc0\xa6status\xa7success"
    b"\xb3model_validate_json"
    b"\x94\xd9\x1dlangchain_core.messages.human\xacHumanMessage\x86\xa7content\xb1additional_kwargs\x80"
    b"\xb1response_metadata\x80\xa4type\xa5human\xa4name\xc0\xa2id\xd9$"
    b"\xb3model_validate_json"
    b"\x94\xbblangchain_core.messages.ai\xa9AIMessage\x89\xa7content\xb1additional_kwargs\x80\xb1response_metadata\x80"
    b"\xa4type\xa2ai\xa4name\xc0\xa2id\xd9-lc_run--\xaatool_calls\x90\xb2invalid_tool_calls\x90\xaeusage_metadata\xc0"
    b"\xb3model_validate_json"
)


class Packer:
    """Packs values for one entry of a thread. `new` are the frames of items new to the thread, and `digests` their
    digests, added to those of earlier entries in the same write."""

    def __init__(
        self, serde: SerializerProtocol, known: Mapping[bytes, int], first: int, digests: dict[bytes, int] | None = None
    ) -> None:
        self.new: list[bytes] = []
        self.digests = {} if digests is None else digests
        self._serde = serde
        self._known = known
        self._first = first
        # A custom serializer may transform plain values too: it may encrypt them.
        self._looks_into = is_readable(serde)

    def pack(self, value: Any, depth: int = 0) -> Any:
        """Returns the packed form of a value."""
        kind = type(value)
        if self._looks_into and depth < DEPTH_MAX:
            if value is None or kind is bool or kind is int or kind is float:
                return value
            if kind is str:
                return value if len(value) <= INLINE_BYTES_MAX else self.whole(value)
            if kind is list:
                return self._unless_small(value, _joined(self.pack(item, depth + 1) for item in value))
            if kind is dict and all(type(key) is str for key in value):
                return self._unless_small(value, {key: self.pack(item, depth + 1) for key, item in value.items()})
        return self._typed(value)

    def _unless_small(self, value: Any, packed: Any) -> Any:
        """Packs a list or dict by its parts; as one item if they are many and small."""
        if any(True for _ in items_of(packed)) or len(msgspec.json.encode(packed)) <= PLAIN_BYTES_MAX:
            return packed
        return self._typed(value)

    def _typed(self, value: Any) -> Any:
        state = state_of(value) if self._looks_into else None
        if state is None:
            return self.whole(value)
        mark = digest_of(state)
        if (number := self._number(mark)) is not None:
            return (number,)
        packed = self.whole(value)
        if type(packed) is tuple:
            self.digests[mark] = packed[0]
        return packed

    def whole(self, value: Any) -> Any:
        """Packs a value without its parts: as an item, or as a frame if it is small."""
        name, data = self._serde.dumps_typed(value)
        kind = name.encode()
        frame = b"m" + data if name == "msgpack" else b"t%c%s%s" % (len(kind), kind, data)
        return frame if len(frame) <= INLINE_BYTES_MAX else (self.item(frame),)

    def item(self, frame: bytes) -> int:
        """Returns a value's item number, by its undeflated frame."""
        digest = digest_of(frame)
        number = self._number(digest)
        if number is None:
            number = self.digests[digest] = self._first + len(self.new)
            self.new.append(_deflated(frame))
        return number

    def _number(self, digest: bytes) -> int | None:
        number = self._known.get(digest)
        return self.digests.get(digest) if number is None else number


class Snapshot(NamedTuple):
    """A message's state, from which an equal one is made without the serializer."""

    kind: type[Any]
    fields: frozenset[str]
    state: bytes

    def made(self) -> Any:
        """Returns a new message."""
        _, fields, extra = ormsgpack.unpackb(self.state, option=ormsgpack.OPT_NON_STR_KEYS)
        made: Any = object.__new__(self.kind)
        made.__setstate__({
            "__dict__": fields, "__pydantic_extra__": extra, "__pydantic_fields_set__": set(self.fields),
            "__pydantic_private__": None,
        })  # fmt: skip
        return made


class Unpacker:
    """Unpacks values. `frame_of` finds items by number; `keep` gets snapshots of them."""

    def __init__(
        self, serde: SerializerProtocol, frame_of: Callable[[int], bytes | Snapshot],
        keep: Callable[[int, Snapshot], None],
    ) -> None:  # fmt: skip
        self._serde = serde
        self._frame_of = frame_of
        self._keep = keep

    def unpack(self, packed: Any) -> Any:
        """Returns the value, newly created."""
        match packed:
            case bytes():
                return self._value(packed)
            case tuple():
                return self._item(packed[0])
            case list():
                return [item for part in packed for item in self._items(part)]
            case dict():
                return {key: self.unpack(item) for key, item in packed.items()}
            case _:
                return packed

    def _items(self, part: Any) -> Iterator[Any]:
        if _names_items(part):
            yield from map(self._item, items_of(part))
        else:
            yield self.unpack(part)

    def _item(self, number: int) -> Any:
        found = self._frame_of(number)
        if isinstance(found, Snapshot):
            return found.made()
        value = self._value(found)
        if is_readable(self._serde) and (state := state_of(value)) is not None:
            self._keep(number, Snapshot(type(value), frozenset(value.model_fields_set), state))
        return value

    def _value(self, frame: bytes) -> Any:
        frame = inflated(frame)
        try:
            if frame[:1] == b"m":
                return self._serde.loads_typed(("msgpack", frame[1:]))
            end = 2 + frame[1]
            return self._serde.loads_typed((frame[2:end].decode(), frame[end:]))
        except (ValueError, LookupError, TypeError, NotImplementedError, RecursionError) as error:
            if not is_readable(self._serde):
                raise
            raise _damaged(error) from error


def items_of(packed: Any) -> Iterator[int]:
    """Returns the item numbers in a packed value."""
    match packed:
        case tuple():
            yield from range(packed[0], packed[0] + (packed[1] if len(packed) == 2 else 1))
        case bytes() if packed[:1] in (b"n", b"N"):
            try:
                steps = msgspec.msgpack.decode(inflated(packed)[1:], type=list[int])
            except msgspec.DecodeError as error:
                raise _damaged(error) from error
            yield from accumulate(steps)
        case list():
            for part in packed:
                yield from items_of(part)
        case dict():
            for part in packed.values():
                yield from items_of(part)
        case _:
            pass


def renumbered(packed: Any, numbers: Mapping[int, int]) -> Any:
    """Renumbers a packed value for another thread."""
    match packed:
        case tuple():
            return (numbers[packed[0]],)
        case list():
            return _joined(renumbered(part, numbers) for part in _apart(packed))
        case dict():
            return {key: renumbered(part, numbers) for key, part in packed.items()}
        case _:
            return packed


def is_readable(serde: SerializerProtocol) -> bool:
    """Whether a serializer's bytes are of known content; a custom one, such as an encrypting one, gets everything."""
    return type(serde) in (JsonPlusSerializer, DataSerializer)


def state_of(value: Any) -> bytes | None:
    """Returns a message's state as bytes for this process; None for any other value. Messages of equal bytes are equal.
    It costs a fraction of the serializer's time."""
    if not type(value).__module__.startswith(_MESSAGES) or getattr(value, "__pydantic_private__", value) is not None:
        return None
    try:
        return ormsgpack.packb([type(value).__name__, value.__dict__, value.__pydantic_extra__], option=_PLAIN)
    except TypeError:  # a value of another type in it; its errors derive from this
        return None


def digest_of(frame: bytes) -> bytes:
    """Returns a value's digest for deduplication in a thread."""
    return blake2b(frame, digest_size=16).digest()


def inflated(frame: bytes) -> bytes:
    """Returns an undeflated frame."""
    if not frame[:1].isupper():
        return frame
    most = max(_FREE_BYTES, _RATIO_MAX * len(frame))
    work = zlib.decompressobj(-15, zdict=_COMMON)
    try:
        body = work.decompress(frame[1:], most)
    except zlib.error as error:
        raise _damaged(error) from error
    if work.unconsumed_tail:
        raise ValueRefused(
            _VALUE, f"inflates to over {most:,} bytes, which none does that Killick wrote; verify the store"
        )
    return frame[:1].lower() + body


def _deflated(frame: bytes) -> bytes:
    if len(frame) < _DEFLATED_BYTES_MIN:
        return frame
    work = zlib.compressobj(6, zlib.DEFLATED, -15, zdict=_COMMON)
    small = frame[:1].upper() + work.compress(frame[1:]) + work.flush()
    fits = len(frame) <= max(_FREE_BYTES, _RATIO_MAX * len(small))
    return small if fits and len(small) < len(frame) else frame


def _damaged(error: Exception) -> ValueRefused:
    return ValueRefused(_VALUE, f"is damaged ({error}); run killick store verify")


def _names_items(part: Any) -> bool:
    return type(part) is tuple or (type(part) is bytes and part[:1] in (b"n", b"N"))


def _joined(parts: Iterable[Any]) -> list[Any]:
    """Merges consecutive items of a list into ranges."""
    joined: list[Any] = []
    for is_item, group in groupby(parts, key=lambda part: type(part) is tuple):
        found = list(group)
        joined += _named([part[0] for part in found]) if is_item else found
    return joined


def _named(numbers: list[int]) -> list[Any]:
    """Encodes item numbers: as ranges if most are consecutive, else as a frame."""
    steps = [number - before for before, number in zip([0, *numbers], numbers, strict=False)]
    runs = [place for place, step in enumerate(steps) if step != 1 or not place]
    if len(runs) > RUNS_MAX:
        return [_deflated(b"n" + msgspec.msgpack.encode(steps))]
    ends = [*runs[1:], len(numbers)]
    return [(numbers[first], end - first) for first, end in zip(runs, ends, strict=True)]


def _apart(packed: list[Any]) -> Iterator[Any]:
    for part in packed:
        if _names_items(part):
            yield from ((number,) for number in items_of(part))
        else:
            yield part
