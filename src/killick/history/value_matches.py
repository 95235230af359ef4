"""Searches stored values for expected ones: as whole values, as documents, or within a text.

Works on the stored form, each chunk once, so that it costs the stored size and not that of a growing conversation.
Reads no log by itself.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard

import msgspec

from killick.model.chunks import STRING_BYTES_MAX, Blob, Fetch, children, pack, references
from killick.model.codec import Erased, Secret, plain
from killick.model.events import StepId, from_text, to_text
from killick.model.hashing import value_hash

How = Literal["the same value", "within a text", "the same document", "adopted it", "stands on it too"]

TEXT_CHARS_MIN: Final = 4
DIGITS_MIN: Final = 3
DOCUMENT_BYTES_MIN: Final = 32
"""A shorter value may match by chance."""

SEAM_CHARS: Final = 120
"""How much of a text chunk's ends is kept, to search across the seam with the next."""

FINDS_MAX: Final = 8
"""The maximum number of finds listed for one step."""

SHOWN_CHARS: Final = 80
"""The maximum length of a displayed value."""

COMMON: Final = frozenset(
    """accepted active approved cancelled closed complete completed created declined done error failed false finished
    found good high info invalid missing more none null okay open paid passed pending ready refused rejected sent
    success succeeded true unknown updated valid value warning waiting 100 200 201 204 400 404 500 1000""".split()  # noqa: SIM905
)
"""Common status words and numbers of tools: their repetition is no evidence."""

_WORD: Final = re.compile(r"\w+")
_TOKEN: Final = re.compile(r"\w[\w.@:/+#~-]*\w")
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode

Path: TypeAlias = tuple[str | int, ...]


class Needle(NamedTuple):
    """A value from a step; `inside`: it is also evidence as a part of a longer text."""

    text: str
    source: StepId
    inside: bool = False
    document: bytes = b""


class Find(NamedTuple):
    """Where an expected value was found."""

    path: Path
    needle: Needle
    how: How


class _Looked(NamedTuple):
    """A searched chunk: its finds, its number of list items, and a text's two ends."""

    found: tuple[Find, ...] = ()
    items: int = 0
    first: str = ""
    last: str = ""


class Sight:
    """Searches stored values in order for expected ones, and remembers every seen word. The first source of a value
    takes precedence over derived ones.

    Until `is_after` is set, a found value was known before, and is no longer expected.
    """

    def __init__(self, fetch: Fetch, first: StepId) -> None:
        self._fetch = fetch
        self._first = first
        self._texts: dict[str, list[Needle]] = {}
        self._documents: dict[bytes, Needle] = {}
        self._looked: dict[tuple[str, bool], _Looked] = {}
        self._bodies: dict[str, Blob] = {}
        self.words: set[str] = set()
        self.is_after = False

    # expecting --------------------------------------------------------------------------------

    def expect(self, value: Any, source: StepId, *, known: Set[str] = frozenset[str]()) -> bool:
        """Expects a value and its parts, except known words. Returns whether it expects any."""
        if value is None or isinstance(value, bool | Secret | Erased):
            return False
        parts = _parts(value)
        if parts is not None:
            new = sum(self.expect(part, source, known=known) for part in parts) > 0
        else:
            text = _leaf(value)
            new = self._expect_text(text, source, known)
            if len(text) <= STRING_BYTES_MAX // 2:
                return new  # a short text stands inline wherever it is
        raw = pack(value).raw if new or not known else b""
        if len(raw) >= DOCUMENT_BYTES_MIN:
            shown = value if isinstance(value, str) else _encode(plain(value)).decode()
            needle = Needle(shown[:SHOWN_CHARS], source, document=raw)
            self._documents.setdefault(raw, needle)
            self._documents.setdefault(value_hash("json", raw), needle)
        return new

    def _expect_text(self, text: str, source: StepId, known: Set[str]) -> bool:
        new = False
        for part in dict.fromkeys((text, *_TOKEN.findall(text))):
            words = _WORD.findall(part)
            if not words or not _is_worth(part, whole=part is text) or known >= set(words):
                continue
            inside = not (part.isalpha() and part.islower())
            self._texts.setdefault(max(words, key=len), []).append(Needle(part, source, inside))
            new = True
        return new

    def _forget(self, needle: Needle) -> None:
        if needle.document:
            self._documents.pop(needle.document, None)
            self._documents.pop(value_hash("json", needle.document), None)
            return
        word = max(_WORD.findall(needle.text), key=len)
        self._texts[word] = [each for each in self._texts[word] if each != needle]

    # looking ----------------------------------------------------------------------------------

    def look(self, raw: bytes | None) -> list[Find]:
        """Returns the finds in an event's stored values, each with its path."""
        if raw is None:
            return []
        self._gather(raw)
        found = self._node(_decode(raw), ())
        self._bodies.clear()
        if not self.is_after:
            for find in found:
                self._forget(find.needle)
        return found

    def _gather(self, raw: bytes) -> None:
        """Fetches the unsearched chunks below, level by level."""
        wanted = references(raw)
        while wanted := [name for name in wanted if not self._is_known(to_text(name))]:
            level = self._fetch(wanted)
            self._bodies |= {to_text(name): blob for name, blob in level.items()}
            wanted = [name for blob in level.values() for name in children(blob)]

    def _is_known(self, name: str) -> bool:
        return name in self._bodies or (name, False) in self._looked or (name, True) in self._looked

    def _node(self, node: Any, path: Path, *, pairs: bool = False) -> list[Find]:
        """Searches a node of stored JSON. `pairs`: it lists the entries of an object."""
        tag, payload = _tagged(node)
        if tag in ("$secret", "$erased"):
            return []
        if tag == "$ref":
            needle = self._documents.get(from_text(payload))
            return [Find(path, needle, "the same document")] if needle else _below(path, self._piece(payload).found)
        if (_is_object(node) or _is_list(node)) and self._documents and (needle := self._documents.get(_encode(node))):
            return [Find(path, needle, "the same value" if tag == "$text" else "the same document")]
        if tag == "$list":
            return self._list(payload, path, pairs=pairs)[0]
        if tag == "$text":
            return self._text_pieces(payload, path)
        if tag == "$blob":
            return []
        if tag is not None:
            return self._node(payload, path, pairs=tag == "$map")
        if _is_list(node):
            return self._items(node, path, pairs=pairs)
        if _is_object(node):
            found: list[Find] = []
            for name, part in node.items():
                found += self._text(name, (*path, name)) + self._node(part, (*path, name))
            return found
        return [] if node is None or isinstance(node, bool) else self._text(str(node), path)

    def _items(self, items: list[Any], path: Path, first: int = 0, *, pairs: bool) -> list[Find]:
        found: list[Find] = []
        for number, item in enumerate(items, first):
            if pairs and _is_list(item) and len(item) == 2:
                found += self._text(str(item[0]), (*path, str(item[0]))) + self._node(item[1], (*path, str(item[0])))
            else:
                found += self._node(item, (*path, number))
        return found

    def _list(self, names: list[str], path: Path, first: int = 0, *, pairs: bool) -> tuple[list[Find], int]:
        """Searches consecutive chunks of a list; counts their items."""
        found: list[Find] = []
        begin = first
        for name in names:
            looked = self._piece(name, pairs=pairs)
            moved = [find if pairs else find._replace(path=_later(find.path, first)) for find in looked.found]
            found += _below(path, moved)
            first += looked.items
        return found, first - begin

    def _text_pieces(self, names: list[str], path: Path) -> list[Find]:
        """Searches the chunks of a long text, and across their seams."""
        found: list[Find] = []
        last = ""
        for name in names:
            looked = self._piece(name)
            seam = self._text(last + looked.first, ()) if last and looked.first else []
            found += _below(path, (*seam, *looked.found))
            last = looked.last
        return list(dict.fromkeys(found))

    def _piece(self, name: str, *, pairs: bool = False) -> _Looked:
        """Searches a chunk once. One searched before contains nothing new."""
        looked = self._looked.get((name, pairs)) or self._looked.get((name, not pairs))
        if looked is None:
            looked = self._look_at(self._bodies.get(name), pairs=pairs)
            known = looked._replace(found=self._few(looked.found) if self.is_after else ())
            self._looked[name, pairs] = known
        return looked

    def _few(self, found: tuple[Find, ...]) -> tuple[Find, ...]:
        """Returns at most the listed number of finds, the first source's first."""
        if len(found) <= FINDS_MAX:
            return found
        return tuple(sorted(found, key=lambda find: find.needle.source != self._first)[:FINDS_MAX])

    def _look_at(self, blob: Blob | None, *, pairs: bool) -> _Looked:
        if blob is None or blob.body is None or blob.codec == "bytes":
            return _Looked()
        if blob.codec == "text":
            text = blob.body.decode(errors="replace")
            found = [find._replace(how="within a text") for find in self._text(text, ())]
            return _Looked(tuple(found), 0, text[:SEAM_CHARS], text[-SEAM_CHARS:])
        node = _decode(blob.body)
        tag, payload = _tagged(node)
        if tag == "$list":
            found, count = self._list(payload, (), pairs=pairs)
            return _Looked(tuple(found), count)
        if tag == "$text":
            pieces = [self._piece(name) for name in payload]
            return _Looked(tuple(self._text_pieces(payload, ())), 0, pieces[0].first, pieces[-1].last)
        if _is_list(node):
            return _Looked(tuple(self._items(node, (), pairs=pairs)), len(node))
        return _Looked(tuple(self._node(node, ())))

    def _text(self, text: str, path: Path) -> list[Find]:
        words = set(_WORD.findall(text))
        self.words |= words
        found: list[Find] = []
        for word in words & self._texts.keys():
            for needle in self._texts[word]:
                if needle.text == text:
                    found.append(Find(path, needle, "the same value"))
                elif needle.inside and _stands_in(needle.text, text):
                    found.append(Find(path, needle, "within a text"))
        if self.is_after and len(found) > 1:
            found = [find for find in found if not any(_covers(more, find) for more in found)]
            found.sort(key=lambda find: (text.find(find.needle.text), find.needle.text))
        return found


def _covers(more: Find, find: Find) -> bool:
    """Returns whether a longer value of the same source covers it."""
    longer, shorter = more.needle, find.needle
    return longer.source == shorter.source and len(longer.text) > len(shorter.text) and shorter.text in longer.text


def _parts(value: Any) -> Collection[Any] | None:
    """Returns a container's parts; None for another value."""
    if isinstance(value, Mapping):
        return value.values()  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
    return value if isinstance(value, list | tuple | set | frozenset) else None  # pyright: ignore[reportUnknownVariableType]


def _leaf(value: Any) -> str:
    """Returns a value in its stored form, without the tag."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return b64encode(value).decode()
    _, payload = _tagged(written := plain(value))
    return str(written if payload is None else payload)


def _is_object(node: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(node, dict)


def _is_list(node: Any) -> TypeGuard[list[Any]]:
    return isinstance(node, list)


def _tagged(node: Any) -> tuple[str | None, Any]:
    if _is_object(node) and len(node) == 1:
        [(tag, payload)] = node.items()
        if tag[:1] == "$":
            return tag, payload
    return None, None


def _is_worth(text: str, *, whole: bool) -> bool:
    """Returns whether a value's reappearance is evidence. Within a longer text, only if it looks like an id."""
    digits = sum(map(str.isdigit, text))
    if text.casefold() in COMMON or (len(text) < TEXT_CHARS_MIN and digits < DIGITS_MIN):
        return False
    if text.replace(".", "", 1).lstrip("-").isdigit():
        return digits >= DIGITS_MIN
    return whole or digits > 0 or "@" in text


def _stands_in(part: str, text: str) -> bool:
    """Returns whether a text contains another at word boundaries."""
    at = text.find(part)
    while at >= 0:
        before, after = text[at - 1 : at] if at else "", text[at + len(part) : at + len(part) + 1]
        if not (_WORD.match(before) and _WORD.match(part)) and not (_WORD.match(after) and _WORD.match(part[-1])):
            return True
        at = text.find(part, at + 1)
    return False


def _below(path: Path, found: Iterable[Find]) -> list[Find]:
    return [find._replace(path=path + find.path) for find in found]


def _later(path: Path, first: int) -> Path:
    return (path[0] + first, *path[1:]) if path and isinstance(path[0], int) else path


def written(path: Path) -> str:
    """Returns a path as users write it: arguments.messages[3].content."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
