"""Normalizes text for rules: lookalike names, and lexical paths.

Does not read the file system. The caller resolves symlinks and passes the results in.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from typing import Final

PATH_CHARS_MAX: Final = 4096


_UNSEEN: Final = frozenset({"Cf", "Cc", "Cn", "Co", "Cs"})
# Fillers, joiners and selectors: invisible, although Unicode classes them as letters or marks.
_BLANK: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | {
    chr(code)
    for first, last in ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))
    for code in range(first, last + 1)
}


def folded(text: str) -> str:
    """Returns the text as names are compared: without case, width, invisible characters and outer spaces."""
    if not (text.isascii() and text.isprintable()):
        text = "".join([char for char in text if char.isspace() or _is_seen(char)])
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(text.split()).casefold()


def _is_seen(char: str) -> bool:
    return char not in _BLANK and unicodedata.category(char) not in _UNSEEN


# Patterns of names ---------------------------------------------------------------------------------


WILD: Final = frozenset("*?[")


class Names:
    """Patterns of tool names."""

    __slots__ = ("_match", "literal")

    def __init__(self, patterns: Iterable[str]) -> None:
        names = tuple(patterns)
        self.literal = frozenset(pattern for pattern in names if WILD.isdisjoint(pattern))
        wild = [translate(pattern) for pattern in names if pattern not in self.literal]
        self._match = re.compile("|".join(wild)).match if wild else None

    @property
    def is_literal(self) -> bool:
        """Whether they contain no wildcard."""
        return self._match is None

    def match(self, name: str) -> bool:
        return name in self.literal or (self._match is not None and self._match(name) is not None)


# Paths --------------------------------------------------------------------------------------------

_ENCODED: Final = re.compile(r"%(?:25)*(?:2e|2f|5c|7e|[01][0-9a-f]|[89a-f][0-9a-f])|\A%(?:25)*20", re.IGNORECASE)
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_SLASHED: Final = frozenset("/\\.~%")

# Characters that resemble a slash, a backslash or a dot, and that no Unicode normal form maps to one.
_DOTS_AND_SLASHES: Final = frozenset("∕⁄⧸⧹∖⧵╱╲⟋⟍\u0337\u0338。｡۔ꓸ")


def path_refused(text: object) -> str | None:
    """Returns why a value cannot be evaluated as a path. The text continues after the argument's name."""
    if type(text) is not str:
        return f"is {kind_of(text)}; a path as text is needed"
    if not text:
        return "is empty; a path is needed"
    if len(text) > PATH_CHARS_MAX:
        return f"is {len(text)} characters long; at most {PATH_CHARS_MAX} are allowed in a path"
    if not text.isprintable():
        return "has signs that cannot be seen; write the path without them"
    if text != text.strip():
        return "begins or ends with a space; write the path without it"
    if not text.isascii() and (found := _look_alike(text)):
        return f"has {found}, which is drawn as a dot or a slash; write the path in plain signs"
    if "\\" in text:
        return "has a backslash; write the path with slashes"
    if "%" in text and _ENCODED.search(text):
        return "has encoded signs; write the path as it is"
    if text[0] == "~":
        return "begins with ~; write the path out"
    if _SCHEME.match(text):
        return "begins like an address or a drive; write a plain path"
    for part in text.split("/"):
        if part[:1] in ". " and part not in ("", ".") and not part.strip(". "):
            return f"goes through {part!r}; write the path without it"
    return None


def _look_alike(text: str) -> str | None:
    for char in text:
        if not char.isascii():
            normal = unicodedata.normalize("NFKC", char)
            if char in _DOTS_AND_SLASHES or not _SLASHED.isdisjoint(normal):
                return f"U+{ord(char):04X}"
    return None


def root_of(text: str) -> str:
    """Returns a root with a trailing slash, so that it never equals an argument's name."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    lead = "/" if text.startswith("/") else ""
    return lead + "".join(f"{part}/" for part in parts) or "./"


def lies_inside(text: str, roots: Sequence[str], real: str | None, real_roots: Mapping[str, str]) -> bool:
    """Returns whether a path is inside one of the roots: by its resolved form, or lexically if that is unknown. A
    relative path is resolved against the first root."""
    for root in roots:
        found = real_roots.get(root)
        if real is not None and found is not None:
            if _is_under(real, found):
                return True
        elif text[0] == "/":
            if root[0] == "/" and _is_under(text, root):
                return True
        elif root is roots[0]:
            return True
    return False


def _is_under(path: str, root: str) -> bool:
    if path[:1] != "/" or root[:1] != "/":
        return False
    parts = path.split("/")
    if ".." in parts:
        return False
    above = [part for part in root.split("/") if part not in ("", ".")]
    return [part for part in parts if part not in ("", ".")][: len(above)] == above


# Words --------------------------------------------------------------------------------------------

_KINDS: Final = {
    "NoneType": "nothing", "bool": "true or false", "int": "a whole number", "float": "a number", "Decimal": "a number",
    "str": "text", "bytes": "bytes", "bytearray": "bytes", "list": "a list", "tuple": "a list", "set": "a set",
    "frozenset": "a set", "dict": "an object",
}  # fmt: skip


def kind_of(value: object) -> str:
    """Returns the kind of a value, for messages."""
    name = type(value).__name__
    return _KINDS.get(name, f"a {name}")
