"""Breaks a model request down by kind, and finds waste: stale and duplicate content.

Pure, and independent of the window: it reads sent requests, windowed or not, in all three wire formats. Requests of one
conversation share a prefix, so an unchanged prefix is not analysed again.
"""

from __future__ import annotations

from collections import defaultdict
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
from killick.window.pages import about, estimate, fingerprint

Kind: TypeAlias = Literal["system", "schemas", "files", "results", "documents", "user", "assistant", "left"]
"""The kind of a request's tokens: `left` is a tombstone."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

LONG_TOKENS: Final = 512
"""A longer user message counts as a document."""

WASTE_TOKENS_MIN: Final = 32
"""Smaller waste is not reported."""

OWN_TOOLS: Final = frozenset({"recall", "find_tools", "killick_recall", "killick_find_tools"})
"""The window's own tools, which are never waste."""


class EvictedPart(msgspec.Struct, frozen=True):
    """An evicted page, from its event."""

    page: str
    kind: str
    source: str
    tokens: int


class Piece(NamedTuple):
    """One part of a request. `saves`: the size elsewhere, minus that of its tombstone."""

    kind: Kind
    tokens: int
    handle: str
    source: str = ""
    digest: str = ""
    identity: str = ""
    path: str | None = None
    writes: bool = False
    left: str | None = None
    saves: int = 0


class Seen(NamedTuple):
    """A part in its position: its message, role, first and last mentioned turn, its text, and the related tool
    calls."""

    at: int
    role: str
    turn: int
    used: int
    piece: Piece
    text: str
    calls: tuple[Call, ...]


class RequestUsage(msgspec.Struct, frozen=True):
    """One request: tokens by kind, and how many of them are stale or duplicate. `without` is its size without
    evictions."""

    messages: int
    tokens: int
    without: int
    kinds: Mapping[Kind, int]
    counts: Mapping[Kind, int]
    stale: int
    duplicate: int


class Schema(NamedTuple):
    """A tool in a request; `saves` is its stub's saving, or the window's own cost."""

    name: str
    tokens: int
    saves: int


class _Entry(NamedTuple):
    said: Message
    pieces: tuple[Piece, ...]
    turn: int
    place: int


class _Sums:
    """The sums of a request's parts. A read is stale after a later read of the same with other content, or a write."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.kinds = dict.fromkeys(KINDS, 0)
        self.counts = dict.fromkeys(KINDS, 0)
        self.saves = self.stale = self.duplicate = 0
        self._digests: set[str] = set()
        self._latest: dict[str, Piece] = {}
        self._of_path: defaultdict[str | None, set[str]] = defaultdict(set)
        for piece in pieces:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        self.kinds[piece.kind] += piece.tokens
        self.counts[piece.kind] += 1
        self.saves += piece.saves
        if piece.digest:
            self.duplicate += piece.tokens if piece.digest in self._digests else 0
            self._digests.add(piece.digest)
        latest = self._latest
        if piece.writes:
            self.stale += sum(latest.pop(read).tokens for read in self._of_path[piece.path] if read in latest)
        elif piece.identity and piece.digest:
            self._of_path[piece.path].add(piece.identity)
            before = latest.setdefault(piece.identity, piece)
            if before.digest != piece.digest:
                self.stale += before.tokens
                latest[piece.identity] = piece


class UsageTracker:
    """Follows the requests of one conversation; `left` are its evicted pages, by handle."""

    def __init__(self, tokens: Callable[[str], int] = estimate) -> None:
        self.left: dict[str, EvictedPart] = {}
        self.called: set[str] = set()
        """The tools that the model called, as far as later requests show."""
        self._tokens = tokens
        self._messages: list[Any] = []
        self._entries: list[_Entry] = []
        self._sums = _Sums()
        self._calls: dict[str, Call] = {}
        self._origins: dict[str, tuple[str, str, str, bool, str | None]] = {}
        self._schemas: tuple[Any, tuple[Schema, ...]] = ((), ())
        self._system: tuple[Any, int] = (None, 0)
        self._shape: Shape | None = None
        self._offset = 0
        self._own: dict[int, int] = {}
        """The positions and sizes of the window's own answers."""
        self._turns: dict[int, int] = {}
        """The turn of each position: after turns are folded they cannot be counted."""

    def fill(self, messages: Sequence[Any], tools: Sequence[Any] = (), system: Any = None) -> RequestUsage:
        """Analyses the next request."""
        given = list(messages)
        # Until the wire format is known, messages are simple enough for any.
        self._shape = self._shape or shape_of(given, tools)
        kept = _common(self._messages, given)
        if not kept:
            self._turns.clear()
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
        schemas = self.schemas(tools)
        if self._system[0] is not system:
            self._system = (system, self._tokens(system if isinstance(system, str) else as_json(system)))
        sums, instructed = self._sums, self._system[1] if system else 0
        kinds, counts = dict(sums.kinds), dict(sums.counts)
        kinds["schemas"] += sum(each.tokens for each in schemas)
        counts["schemas"] += len(schemas)
        kinds["system"] += instructed
        counts["system"] += 1 if instructed else 0
        tokens = sum(kinds.values())
        without = tokens + sums.saves + sum(each.saves for each in schemas)
        return RequestUsage(len(given), tokens, without, kinds, counts, sums.stale, sums.duplicate)

    def schemas(self, tools: Sequence[Any]) -> tuple[Schema, ...]:
        """Returns the tools of a request with their sizes; for a stub, its saving."""
        if self._schemas[0] != tools:
            self._schemas = (tools, tuple(map(self._schema, tools)))
        return self._schemas[1]

    def _schema(self, tool: Any) -> Schema:
        function = of(tool, "function") or tool
        name = str(of(function, "name") or of(tool, "type") or "a tool")
        tokens, left = size_of(tool, self._tokens), self.left.get(f"tool:{name}")
        if name in OWN_TOOLS and _takes(function) in ({"handle"}, {"query"}):
            return Schema(name, tokens, -tokens)  # without a window it would not be there
        return Schema(name, tokens, max(left.tokens - tokens, 0) if left else 0)

    # current pieces -----------------------------------------------------------------------------

    def pieces(self) -> Iterator[Seen]:
        """Returns every part of the last request, in order."""
        used: dict[str, int] = {}
        for entry in self._entries:
            for call in entry.said.calls:
                _, _, identity, _, path = self._origins[call.id]
                used |= dict.fromkeys((identity, path or "", *_handles(call)), entry.turn)
        for at, entry in enumerate(self._entries):
            texts = [part.text for part in entry.said.parts]
            for number, piece in enumerate(entry.pieces):
                names = (piece.identity, piece.path or "", piece.left or piece.handle)
                last = max([entry.turn, *(used.get(name, 0) for name in names if name)])
                text = texts[number] if number < len(texts) else ""
                calls = entry.said.calls if number + 1 == len(entry.pieces) else ()
                yield Seen(at, entry.said.role, entry.turn, last, piece, text, calls)

    # one message --------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        said = read(message, self._shape or "openai")
        before = self._entries[-1] if self._entries else None
        turn = before.turn if before else 0
        if said.role == "assistant" and not (before and before.said.role == "assistant"):
            turn += 1
        place = before.place + 1 if before else 0
        turn = self._turns.setdefault(place, turn)
        self._calls |= {call.id: call for call in said.calls}
        self._origins |= {call.id: about(call, "") for call in said.calls}
        self.called.update(call.name for call in said.calls)
        pieces = tuple(self._read(message, said, place))
        for piece in pieces:
            if piece.left and "-m" in piece.left:
                # A folded range is one message here, so that later positions are unchanged.
                place = int(piece.left.rpartition("-m")[2])
        self._entries.append(_Entry(said, pieces, turn, place))
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
            found.append(Piece(_of_role(said.role), rest, f"m{place + self._offset}"))
        else:
            found[-1] = found[-1]._replace(tokens=found[-1].tokens + rest)
        yield from found

    def _piece(self, said: Message, part: Part, place: int) -> Piece:
        handle = f"m{place + self._offset}" + ("" if part.at is None else f".{part.at}")
        tokens, named = sized(part.text, self._tokens), tombstones.handle_in(part.text)
        call = self._calls.get(part.call) if part.is_result else None
        # The window's own answers would not exist without it.
        is_own = bool(self.left) and call is not None and call.name in OWN_TOOLS
        if named is not None:
            piece = self._tombstone(part.text, named, handle, place, tokens)
            return piece._replace(saves=-tokens) if is_own else piece
        if said.role in ("system", "assistant"):
            return Piece(_of_role(said.role), tokens, handle)
        digest = fingerprint(part.text) if tokens >= WASTE_TOKENS_MIN else ""
        if call is not None:
            sort, source, identity, reads, path = self._origins[call.id]
            if back := next((self.left[named] for named in _handles(call) if named in self.left), None):
                sort, source, identity = back.kind, back.source, ""
            kind, writes = _OF_PAGES.get(sort, "results"), not reads and path is not None
            saves = -tokens if is_own else 0
            if is_own:
                self._own[place + self._offset] = tokens
            return Piece(kind, tokens, handle, source, digest, identity, path, writes, saves=saves)
        if part.is_result:
            return Piece("results", tokens, handle, "a tool's result", digest)
        source = f"“{tombstones.shortened(part.text, 48)}”"
        is_long = part.media or tokens >= LONG_TOKENS
        return Piece("documents" if is_long else "user", tokens, handle, source, digest)

    def _tombstone(self, text: str, named: str, handle: str, place: int, tokens: int) -> Piece:
        is_copy = text.startswith("[unchanged")
        if not is_copy and (index := named[1:].partition(".")[0]).isdecimal():
            # Whether a system message counts depends on the history's owner; evicted pages show it.
            self._offset = int(index) - place
        here = (self.left.get(handle) or self.left.get(named)) if is_copy else self.left.get(named)
        saves = max(here.tokens - tokens, 0) if here else 0
        if "-m" in named:
            first, last = (int(end.lstrip("m")) for end in named.split("-"))
            saves -= sum(size for at, size in self._own.items() if first <= at <= last)
        source = here.source if here else ""
        return Piece("left", tokens, handle if is_copy else named, source, left=named, saves=saves)


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
