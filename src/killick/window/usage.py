"""Breaks a model request down by kind, and tells its size without evictions.

Pure, and independent of the window: it reads sent requests, windowed or not, in all three wire formats. Requests of one
conversation share a prefix, so an unchanged prefix is not analysed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from killick.window import tombstones
from killick.window.messages import (
    Call,
    Message,
    Part,
    Shape,
    as_json,
    is_list,
    is_map,
    of,
    read,
    shape_of,
    size_of,
    sized,
)
from killick.window.pages import about, estimate

Kind: TypeAlias = Literal["system", "schemas", "files", "results", "documents", "user", "assistant", "left"]
"""The kind of a request's tokens: `left` is a tombstone."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

LONG_TOKENS: Final = 512
"""A longer user message counts as a document."""

OWN_TOOLS: Final = frozenset({"recall", "killick_recall"})
"""The names of the window's own tool."""


class EvictedPart(msgspec.Struct, frozen=True):
    """An evicted page, from its event."""

    page: str
    kind: str
    tokens: int


class Piece(NamedTuple):
    """One part of a request. `left` is the handle of a tombstone, `saves` its page's size minus its own."""

    kind: Kind
    tokens: int
    left: str = ""
    saves: int = 0


class RequestUsage(msgspec.Struct, frozen=True):
    """One request: tokens by kind. `without` is its size without evictions."""

    messages: int
    tokens: int
    without: int
    kinds: Mapping[Kind, int]
    counts: Mapping[Kind, int]


class _Entry(NamedTuple):
    said: Message
    pieces: tuple[Piece, ...]
    place: int


class _Sums:
    """The sums of a request's parts."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.kinds: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.counts: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.saves = 0
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        self.kinds[piece.kind] += piece.tokens
        self.counts[piece.kind] += 1
        self.saves += piece.saves


class UsageTracker:
    """Follows the requests of one conversation; `left` are its evicted pages, by handle."""

    def __init__(self, tokens: Callable[[str], int] = estimate) -> None:
        self.left: dict[str, EvictedPart] = {}
        self._tokens = tokens
        self._messages: list[Any] = []
        self._entries: list[_Entry] = []
        self._sums = _Sums()
        self._calls: dict[str, Call] = {}
        self._schemas: tuple[Any, tuple[Piece, ...]] = ((), ())
        self._system: tuple[Any, int] = (None, 0)
        self._shape: Shape | None = None
        self._offset = 0
        self._own: dict[int, int] = {}
        """The positions and sizes of the window's own answers."""

    def fill(self, messages: Sequence[Any], tools: Sequence[Any] = (), system: Any = None) -> RequestUsage:
        """Analyses the next request."""
        given = list(messages)
        # Until the wire format is known, messages are simple enough for any.
        self._shape = self._shape or shape_of(given, tools)
        kept = _common(self._messages, given)
        if not kept:
            self._own.clear()
        if kept < len(self._entries):
            for entry in self._entries[kept:]:
                for call in entry.said.calls:
                    self._calls.pop(call.id, None)
            del self._entries[kept:]
            self._sums = _Sums(piece for entry in self._entries for piece in entry.pieces)
        for message in given[kept:]:
            self._take(message)
        self._messages = given
        if self._schemas[0] != tools:
            self._schemas = (tools, tuple(map(self._schema, tools)))
        if self._system[0] is not system:
            self._system = (system, self._tokens(system if isinstance(system, str) else as_json(system)))
        whole = _Sums(self._schemas[1])
        if system:
            whole.add(Piece("system", self._system[1]))
        kinds: dict[Kind, int] = {kind: tokens + self._sums.kinds[kind] for kind, tokens in whole.kinds.items()}
        counts: dict[Kind, int] = {kind: count + self._sums.counts[kind] for kind, count in whole.counts.items()}
        tokens = sum(kinds.values())
        return RequestUsage(len(given), tokens, tokens + self._sums.saves + whole.saves, kinds, counts)

    def _schema(self, tool: Any) -> Piece:
        """A tool of the request; the window's own would not be there without it."""
        function, tokens = of(tool, "function") or tool, size_of(tool, self._tokens)
        is_own = of(function, "name") in OWN_TOOLS and _takes(function) == {"handle"}
        return Piece("schemas", tokens, saves=-tokens if is_own else 0)

    # one message --------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        said = read(message, self._shape or "openai")
        place = self._entries[-1].place + 1 if self._entries else 0
        self._calls |= {call.id: call for call in said.calls}
        pieces = tuple(self._read(message, said, place))
        for piece in pieces:
            if "-m" in piece.left:
                # A folded range is one message here, so that later positions are unchanged.
                place = int(piece.left.rpartition("-m")[2])
        self._entries.append(_Entry(said, pieces, place))
        for piece in pieces:
            self._sums.add(piece)

    def _read(self, message: Any, said: Message, place: int) -> Iterator[Piece]:
        """Returns a message's parts; its overhead counts as the last part, or as its role's."""
        whole, known = size_of(message, self._tokens), 0
        found: list[Piece] = []
        for part in said.parts:
            piece = self._piece(said, part, place)
            known += piece.tokens
            found.append(piece)
        rest = max(whole - known, 0)
        if said.role == "assistant" or not found:
            found.append(Piece(_of_role(said.role), rest))
        else:
            found[-1] = found[-1]._replace(tokens=found[-1].tokens + rest)
        yield from found

    def _piece(self, said: Message, part: Part, place: int) -> Piece:
        tokens, named = sized(part.text, self._tokens), tombstones.handle_in(part.text)
        call = self._calls.get(part.call) if part.is_result else None
        # The window's own answers would not exist without it.
        is_own = bool(self.left) and call is not None and call.name in OWN_TOOLS
        if named is not None:
            piece = self._tombstone(part, named, place, tokens)
            return piece._replace(saves=-tokens) if is_own else piece
        if said.role in ("system", "assistant"):
            return Piece(_of_role(said.role), tokens)
        if call is not None:
            back = next((self.left[handle] for handle in _handles(call) if handle in self.left), None)
            if is_own:
                self._own[place + self._offset] = tokens
            kind = _OF_PAGES.get(back.kind if back else about(call, "")[0], "results")
            return Piece(kind, tokens, saves=-tokens if is_own else 0)
        if part.is_result:
            return Piece("results", tokens)
        return Piece("documents" if part.media or tokens >= LONG_TOKENS else "user", tokens)

    def _tombstone(self, part: Part, named: str, place: int, tokens: int) -> Piece:
        is_copy = part.text.startswith("[unchanged")
        if not is_copy and (index := named[1:].partition(".")[0]).isdecimal():
            # Whether a system message counts depends on the history's owner; evicted pages show it.
            self._offset = int(index) - place
        handle = f"m{place + self._offset}" + ("" if part.at is None else f".{part.at}")
        here = (self.left.get(handle) if is_copy else None) or self.left.get(named)
        saves = max(here.tokens - tokens, 0) if here else 0
        if "-m" in named:
            first, last = (int(end.lstrip("m")) for end in named.split("-"))
            saves -= sum(size for at, size in self._own.items() if first <= at <= last)
        return Piece("left", tokens, named, saves)


_OF_PAGES: Final[Mapping[str, Kind]] = {"file": "files", "document": "documents", "message": "documents"}


def _of_role(role: str) -> Kind:
    return "system" if role == "system" else "assistant" if role == "assistant" else "user"


def _takes(function: Any) -> set[str]:
    """Returns a tool's parameters."""
    schema = of(function, "input_schema") or of(function, "parameters")
    properties = of(schema, "properties")
    return set(properties) if is_map(properties) else set()


def _handles(call: Call) -> list[str]:
    """Returns the handles in a call of recall."""
    return tombstones.named(as_json(call.arguments)) if call.name in OWN_TOOLS else []


def _common(old: list[Any], new: list[Any]) -> int:
    """Returns the number of equal leading messages; usually all old ones."""
    most = min(len(old), len(new))
    if old[:most] == new[:most]:
        return most
    return next(at for at in range(most) if old[at] != new[at])


def request_of(arguments: Any) -> tuple[Sequence[Any], Sequence[Any], Any] | None:
    """Returns the messages, tools and instructions of a model call; None if it has no messages."""
    if not is_map(arguments):
        return None
    for name in ("messages", "input"):
        said = arguments.get(name)
        if isinstance(said, str):
            said = [{"role": "user", "content": said}]
        if is_list(said):
            tools = arguments.get("tools")
            system = arguments.get("system") or arguments.get("instructions")
            return said, tools if is_list(tools) else (), system
    return None
