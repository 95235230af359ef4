"""The pages of a history: kind, size, last use and staleness.

Reads messages incrementally; makes no decisions. A page is identified by its position, so its handle is valid as long
as the history only grows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final, Literal, TypeAlias

import msgspec

from killick.window import tombstones
from killick.window.messages import (
    Call,
    Message,
    Part,
    Shape,
    as_json,
    is_list,
    of,
    read,
    same,
    size_of,
    sized,
    text_of,
    unmarked,
)

PageKind: TypeAlias = Literal["result", "file", "document", "message", "schema", "turns"]
Stale: TypeAlias = Literal["superseded", "written"]
Tokens: TypeAlias = Callable[[str], int]
Reads: TypeAlias = Callable[[str, Mapping[str, Any]], bool]

WORDS_CHARS_MAX: Final = 32_768
"""How much of a page is searched for the identifiers by which it is recognized."""

OUTLINED_TOKENS_MAX: Final = 100
"""Longer pages appear in an outline by their handle."""

MARK_CHARS: Final = 10
"""The length of a hash prefix that distinguishes a page's content from that after an edit."""

SUMMARY_CHARS_MAX: Final = 160
"""The maximum summary length of evicted turns."""

ALIKE: Final = 16
"""How many positions with equal content are linked, from the last one back."""

COMMON: Final = 5
"""A word in this many pages identifies none of them."""

_WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./@:-]{3,}[A-Za-z0-9_]")
_PATHS: Final = ("path", "file_path", "filepath", "file", "filename", "target_file", "notebook_path", "uri", "url")
_WRITES: Final = frozenset({
    "add", "append", "apply", "book", "cancel", "commit", "create", "delete", "edit", "insert", "modify", "move",
    "overwrite", "patch", "pay", "post", "push", "put", "remove", "rename", "replace", "save", "send", "set", "update",
    "upload", "write",
})  # fmt: skip
_FETCHES: Final = frozenset({
    "article", "doc", "docs", "document", "fetch", "knowledge", "lookup", "retrieval", "retrieve", "web",
})  # fmt: skip


def estimate(text: str) -> int:
    """Estimates a text's tokens: four characters each, more for non-ASCII letters. For exact counts, pass the model's
    own counter to the window."""
    return (len(text) if text.isascii() else len(text.encode("utf-8", "replace"))) // 4 + 1


def reads_by_name(name: str, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a tool only reads, judged by its name."""
    return not _WRITES.intersection(_name_words(name))


def _name_words(name: str) -> list[str]:
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().replace("-", "_").split("_")


class Page:
    """A part of the window that can be evicted and recalled."""

    __slots__ = (
        "born", "error", "handle", "hash", "identity", "index", "kind", "media", "offset", "part", "path", "place",
        "read", "result", "saves", "source", "stale", "stub_tokens", "tokens", "used", "uses",
    )  # fmt: skip

    def __init__(self, index: int, part: Part, *, kind: PageKind, source: str, identity: str, tokens: int) -> None:
        self.index = index
        self.part = part.at
        self.place = index, part.at or 0
        self.handle = f"m{index}" if part.at is None else f"m{index}.{part.at}"
        self.kind: PageKind = kind
        self.source = source
        self.identity = identity
        self.hash = fingerprint(part.text)
        self.tokens = tokens
        self.stub_tokens = self.saves = 0
        self.error = part.error
        self.media = part.media
        self.result = part.is_result
        """Whether it is a tool result rather than a message."""
        self.stale: Stale | None = None
        self.path: str | None = None
        self.read = True
        self.born = self.used = 0
        self.uses = 0
        self.offset = 0

    def __repr__(self) -> str:
        return f"<page {self.handle} {self.kind} {self.source} {self.tokens}>"

    def set_saving(self, stub_tokens: int) -> None:
        """Computes its tombstone's size, and so the saving of a call while the page is out."""
        self.stub_tokens = stub_tokens
        self.saves = max(0, self.tokens - stub_tokens)


def fingerprint(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Turn(msgspec.Struct):
    """One model reply and its answers: the messages from `start` up to the next turn."""

    start: int
    replied: int
    """The first message after the reply itself."""


class History:
    """The history so far, parsed once."""

    def __init__(self, shape: Shape, tokens: Tokens, reads: Reads | None, *, smallest: int, recall: str) -> None:
        self._shape: Shape = shape
        self._tokens = tokens
        self._reads = reads or reads_by_name
        self._smallest = smallest
        self.own = recall
        """The name of the window's own tool."""
        self.messages: list[Any] = []
        self.read: list[Message] = []
        self.sizes: list[int] = []
        self._bare: list[int] = [0]
        """The tokens before each message."""
        self.said_tokens = 0
        """The total, without the results of the window's own tool."""
        self.pages: dict[str, Page] = {}
        self.at: list[tuple[Page, ...]] = []
        self.turns: list[Turn] = []
        self.called: dict[str, int] = {}
        """When each tool was last called."""
        self._calls: dict[str, Call] = {}
        self._versions: dict[str, list[Page]] = {}
        self._by_hash: dict[str, list[Page]] = {}
        self._by_path: dict[str, list[Page]] = {}
        self._by_word: dict[str, list[Page]] = {}

    @property
    def turn(self) -> int:
        """The number of replies."""
        return len(self.turns)

    def common(self, messages: Sequence[Any]) -> tuple[int, list[int]]:
        """Returns how many leading messages are unchanged, and which of them have other cache markers."""
        count, seen = min(len(self.messages), len(messages)), self.messages
        remarked: list[int] = []
        # Identical or equal messages are compared without a Python loop.
        if len(seen) == count and messages[:count] == seen:
            return count, remarked
        for at in range(count):
            if seen[at] is messages[at] or seen[at] == messages[at]:
                continue
            if not same(seen[at], messages[at]):
                return at, remarked
            seen[at] = messages[at]
            self.sizes[at] = size_of(messages[at], self._tokens)
            if self.read[at].role == "system":
                self.read[at] = read(messages[at], self._shape)
            remarked.append(at)
        return count, remarked

    def extend(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self._take(message)

    def alike(self, page: Page) -> list[Page]:
        """Returns the positions with the same content, itself included, in order."""
        return self._by_hash.get(page.hash, [])

    def versions(self, identity: str) -> list[Page]:
        """Returns the pages for the same request, in order."""
        return self._versions.get(identity, [])

    def text(self, page: Page) -> str:
        """Returns a page's content, verbatim."""
        return next(part.text for part in self.read[page.index].parts if part.at == page.part)

    def mark(self, handle: str, covered: tuple[int, int]) -> str:
        """Returns the hash prefix of a page or of a range of messages."""
        if "-" not in handle:
            page = self.pages.get(handle)
            return page.hash[:MARK_CHARS] if page is not None else ""
        said = [as_json(unmarked(message)) for message in self.messages[covered[0] : covered[1] + 1]]
        return fingerprint("\n".join(said))[:MARK_CHARS]

    def answers_own(self, page: Page) -> bool:
        """Returns whether it answers a call of the window's own tool."""
        part = next(part for part in self.read[page.index].parts if part.at == page.part)
        call = self._calls.get(part.call)
        return call is not None and call.name == self.own

    def summary(self, first: int, last: int) -> tuple[str, int]:
        """Returns a range of messages in one line, and its size."""
        shown: dict[str, None] = {}
        chars = 0
        for page in (page for pages in self.at[first : last + 1] for page in pages):
            if page.source not in shown:
                shown[page.source] = None
                chars += len(page.source) + 2
            if chars > SUMMARY_CHARS_MAX:
                break
        size = self._bare[last + 1] - self._bare[first]
        if shown:
            return f"earlier turns ({tombstones.shortened(', '.join(shown), SUMMARY_CHARS_MAX)})", size
        words = " ".join(part.text for said in self.read[first : last + 1] for part in said.parts)
        return f"your words “{tombstones.shortened(words, 60)}”", size

    def outline(self, first: int, last: int) -> str:
        """Returns an outline of a range of messages: the short texts, and the handles of long ones."""
        lines: list[str] = []
        for at in range(first, min(last + 1, len(self.messages))):
            said = self.read[at]
            if said.role == "system":
                continue  # always sent, and never recalled
            for part in said.parts:
                handle = f"m{at}" if part.at is None else f"m{at}.{part.at}"
                page = self.pages.get(handle)
                if page is not None and page.tokens > OUTLINED_TOKENS_MAX:
                    lines.append(f"{handle}: {page.source}, {page.tokens:,} tokens")
                elif part.text:
                    lines.append(f"{handle} ({page.source if page else said.role}): {part.text}")
            content = of(self.messages[at], "content")
            refusals = [of(self.messages[at], "refusal")]
            refusals += [of(block, "refusal") for block in content] if is_list(content) else []
            lines += [f"m{at} ({said.role}): {text_of(refusal)}" for refusal in refusals if refusal]
            lines += [f"m{at}: called {call.name} {as_json(call.arguments)}" for call in said.calls]
        return "\n".join(lines)

    # one message ----------------------------------------------------------------------------------

    def _take(self, message: Any) -> None:
        index, said = len(self.messages), read(message, self._shape)
        self.messages.append(message)
        self.read.append(said)
        self.sizes.append(size_of(message, self._tokens))
        self._bare.append(self._bare[-1] + self.sizes[-1])
        self.said_tokens += 0 if self._is_own(said) else self.sizes[-1]
        if said.role == "assistant":
            if not index or self.read[index - 1].role != "assistant":
                self.turns.append(Turn(index, index + 1))
            self.turns[-1].replied = index + 1
            for call in said.calls:
                self._calls[call.id] = call
                self.called[call.name] = self.turn
        self._uses(said)
        pages = tuple(self._page(index, said, part) for part in said.parts if self._is_pageable(said, part))
        self.at.append(pages)
        for page in pages:
            self._settle(page, self._words(said, page))

    def _is_own(self, said: Message) -> bool:
        """Returns whether a message contains only calls or results of the window's own tool."""
        calls = said.calls or [self._calls.get(part.call) for part in said.parts if part.is_result]
        words = any(part.text for part in said.parts if not part.is_result)
        return bool(calls) and not words and all(call is not None and call.name == self.own for call in calls)

    def _is_pageable(self, said: Message, part: Part) -> bool:
        # Model replies are evicted only with their whole turn: a model would imitate their tombstones.
        if said.role in ("system", "assistant"):
            return False
        # Sizes are estimated before they are counted: most parts are small, and counters may be slow.
        return part.is_result or part.media or len(part.text) > self._smallest

    def _page(self, index: int, said: Message, part: Part) -> Page:
        call = self._calls.get(part.call) if part.is_result else None
        kind, source, identity, reads, path = self._origin(index, said, part, call)
        tokens = sized(part.text, self._tokens)
        page = Page(index, part, kind=kind, source=source, identity=identity, tokens=tokens)
        page.read, page.path = reads, path
        page.born = page.used = self.turn
        return page

    def _origin(
        self, index: int, said: Message, part: Part, call: Call | None
    ) -> tuple[PageKind, str, str, bool, str | None]:
        if not part.is_result:
            kind: PageKind = "document" if part.media else "message"
            begins = "something" if part.media else f"“{tombstones.shortened(part.text, 40)}”"
            return kind, f"{begins} from the {said.role}", f"m{index}.{part.at}", True, None
        if call is None:
            return "result", "a tool's result", f"m{index}.{part.at}", False, None
        if recalled := self._recalled(call, part):
            return recalled.kind, recalled.source, recalled.identity, recalled.read, recalled.path
        return about(call, f"m{index}.{part.at}", self._reads)

    def _recalled(self, call: Call, part: Part) -> Page | None:
        """Maps a recall's result to its original page."""
        if call.name != self.own:
            return None
        named = tombstones.named(as_json(call.arguments))
        page = self.pages.get(named[0]) if len(named) == 1 else None
        return page if page is not None and page.hash == fingerprint(part.text) else None

    def _settle(self, page: Page, words: frozenset[str]) -> None:
        """Adds a page and links it to the others."""
        self.pages[page.handle] = page
        versions = self._versions.setdefault(page.identity, [])
        alike = self._by_hash.setdefault(page.hash, [])
        if versions:
            page.uses = versions[-1].uses + 1
            if versions[-1].hash != page.hash:
                self._supersede(versions, alike, page.identity)
        versions.append(page)
        for before in alike[:1] + alike[1:][-ALIKE:]:
            self._use(before)
        alike.append(page)
        if page.path is not None:
            if not page.read:
                for other in self._by_path.get(page.path, ()):
                    other.stale = other.stale or "written"
            else:
                self._by_path.setdefault(page.path, []).append(page)
        for word in words:
            known = self._by_word.setdefault(word, [])
            if len(known) < COMMON:
                known.append(page)

    def _supersede(self, versions: list[Page], alike: list[Page], identity: str) -> None:
        """Marks earlier reads as outdated; content that returns to an earlier version becomes current again."""
        for before in reversed(versions):
            if before.stale == "superseded":
                break
            before.stale = "superseded"
        for before in alike[-ALIKE:]:
            before.stale = None if before.identity == identity else before.stale

    # uses -----------------------------------------------------------------------------------------

    def _words(self, said: Message, page: Page) -> frozenset[str]:
        if page.tokens < self._smallest // 4:
            return frozenset()
        words = set(_identifiers(self.text(page)[:WORDS_CHARS_MAX]))
        if page.path is not None:
            words |= {page.path, page.path.rstrip("/").rpartition("/")[2]}
        return frozenset(words)

    def _uses(self, said: Message) -> None:
        """Marks pages as used that the model, the user or an error mentions."""
        if said.role in ("assistant", "user"):
            untag = [part.text for part in said.parts if not part.is_result and not part.media]
            untag += [f"{call.name} {as_json(call.arguments)}" for call in said.calls]
        else:
            untag = [part.text for part in said.parts if part.error]
        for text in untag:
            for word in set(_identifiers(text[:WORDS_CHARS_MAX])):
                known = self._by_word.get(word, ())
                if len(known) < COMMON:
                    for page in known:
                        self._use(page)

    def _use(self, page: Page) -> None:
        if page.used < self.turn:
            page.used = self.turn
            page.uses += 1


def about(
    call: Call, place: str, reads_only: Reads = reads_by_name
) -> tuple[PageKind, str, str, bool, str | None]:  # fmt: skip
    """Returns a call result's kind, a line that describes it, its identity, whether it was only read, and the path read
    or written. A result that was not only read is unique: its position identifies it."""
    arguments: Mapping[str, Any] = call.arguments if not isinstance(call.arguments, str) else {}
    reads = reads_only(call.name, arguments)
    path = next((value for name in _PATHS if isinstance(value := arguments.get(name), str)), None)
    shown = ", ".join(value if isinstance(value, str) else as_json(value) for value in arguments.values())
    source = tombstones.shortened(f"{call.name} {shown}".strip())
    words = _FETCHES.intersection(_name_words(call.name))
    kind: PageKind = "file" if path is not None and reads and not words else "document" if words else "result"
    return kind, source, identify(call.name, call.arguments) if reads else place, reads, path


def _identifiers(text: str) -> Iterable[str]:
    """Returns the identifier-like words: those that no plain sentence contains."""
    return (word for word in _WORD.findall(text) if not word.isalpha() or not word[1:].islower())


def identify(name: str, arguments: Mapping[str, Any] | str) -> str:
    """Returns the identity of a call: the tool and its arguments, in any order."""
    if isinstance(arguments, str):
        return f"{name} {arguments}"
    try:
        return f"{name} {msgspec.json.encode(arguments, order='sorted', enc_hook=str).decode()}"
    except (TypeError, ValueError):  # Half a letter that no encoding can carry, or keys of other types.
        return f"{name} {json.dumps(arguments, sort_keys=True, default=str, skipkeys=True)}"
