"""Ignore rules: `.gitignore` and `.killickignore` files, with git's semantics. Opens no file.

Patterns and names are bytes, compared bytewise as git does, so that names in any encoding match as in git. Later
patterns override earlier ones, deeper folders override their parents, in one folder `.killickignore` overrides
`.gitignore`, and patterns given to `Rules` override every file.

Two deliberate differences from git: a `.gitignore` does not apply to an entry named `.git` or its contents, because a
rule like `logs/` would drop a checkout's own records. And a file that git tracks despite a rule is ignored here,
because git's index is not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

GITIGNORE: Final = b".gitignore"
KILLICKIGNORE: Final = b".killickignore"
IGNORE_FILES: Final = (GITIGNORE, KILLICKIGNORE)
"""Files with ignore rules for their folder and below; of two in one folder, the later one decides."""

_GIT: Final = b".git"
_BOM: Final = b"\xef\xbb\xbf"
_SPECIAL: Final = re.compile(rb"[*?[\\]")
_FILES_CACHED: Final = 1024

Test = Callable[[bytes], object]


class Rules:
    """A workspace's ignore rules: patterns for all of it, and its own ignore files."""

    def __init__(self, exclude: Sequence[str] = (), *, gitignore: bool = True) -> None:
        text = os.fsencode("\n".join(exclude))
        self._above = (_Layer(b"", False, _patterns(text)),) if text else ()
        self._names = IGNORE_FILES if gitignore else (KILLICKIGNORE,)

    def scope(self, above: Scope | None, path: bytes, read: Callable[[bytes], bytes | None]) -> Scope:
        """Returns the rules of a folder. `above` is the parent folder's scope, None for the workspace root, whose path
        is empty; `read` returns the text of a file of that name in this folder, or None."""
        layers = self._above if above is None else above.layers
        in_git = _GIT in path.split(b"/")
        if in_git:
            layers = tuple(layer for layer in layers if not layer.is_git)
        own: list[_Layer] = []
        for name in self._names:
            is_git = name == GITIGNORE
            if is_git and in_git:
                continue
            text = read(name)
            if text is not None and (patterns := _patterns(text)).ordered:
                own.insert(0, _Layer(path, is_git, patterns))
        first = len(self._above)
        return Scope(path, (*layers[:first], *own, *layers[first:]) if own else layers)


class Scope:
    """The rules of one folder: its own layers first, then those of its parents. Immutable, so that threads may share
    it."""

    __slots__ = ("_path", "layers")

    def __init__(self, path: bytes, layers: tuple[_Layer, ...]) -> None:
        self.layers: Final = layers
        self._path: Final = path

    def ignores(self, name: bytes, *, is_folder: bool) -> bool:
        """Returns whether an entry of this folder is ignored. Callers do not descend into ignored folders."""
        for layer in self.layers:
            if layer.is_git and name == _GIT:
                continue
            below = self._path[len(layer.folder) :].lstrip(b"/") if layer.folder else self._path
            decided = layer.patterns.decide(name, below + b"/" + name if below else name, is_folder)
            if decided is not None:
                return decided
        return False


class _Layer(NamedTuple):
    """The patterns of one file, and that file's folder."""

    folder: bytes
    is_git: bool
    patterns: _Patterns


class _Pattern(NamedTuple):
    """One line. `regex` matches the whole name, or, for an anchored pattern, the whole path from its file's folder."""

    negated: bool
    folders_only: bool
    placed: bool
    regex: bytes


class _Patterns:
    """One file's patterns."""

    def __init__(self, found: Iterable[_Pattern]) -> None:
        self.ordered: Final = tuple(found)[::-1]
        # Most names match nothing: two regexes of all patterns decide that.
        self._names: Final = _any([each.regex for each in self.ordered if not each.placed])
        self._paths: Final = _any([each.regex for each in self.ordered if each.placed])

    def decide(self, name: bytes, path: bytes, is_folder: bool) -> bool | None:
        """Returns this file's decision; None if no pattern matches."""
        if not self._names(name) and not self._paths(path):
            return None
        for each in self.ordered:
            if (is_folder or not each.folders_only) and _compiled(each.regex)(path if each.placed else name):
                return not each.negated
        return None


def _any(regexes: Sequence[bytes]) -> Test:
    return _compiled(b"|".join(b"(?:" + regex + b")" for regex in regexes) or b"(?!)")


@lru_cache(maxsize=_FILES_CACHED)
def _compiled(regex: bytes) -> Test:
    return re.compile(regex, re.DOTALL).fullmatch


# reading ------------------------------------------------------------------------------------------


@lru_cache(maxsize=_FILES_CACHED)
def _patterns(text: bytes) -> _Patterns:
    """Parses a file; lines that git cannot parse match nothing."""
    lines = [line.removesuffix(b"\r").partition(b"\0")[0] for line in text.removeprefix(_BOM).split(b"\n")]
    parsed = [_pattern(_trimmed(line)) for line in lines if not line.startswith(b"#")]
    return _Patterns(each for each in parsed if each is not None)


def _trimmed(line: bytes) -> bytes:
    """Strips trailing spaces from a line, except an escaped one."""
    bare = line.rstrip(b" ")
    backslashes = len(bare) - len(bare.rstrip(b"\\"))
    return line[: len(bare) + 1] if backslashes % 2 and len(bare) < len(line) else bare


def _pattern(line: bytes) -> _Pattern | None:
    negated = line.startswith(b"!")
    glob = line[1:] if negated else line
    folders_only = glob.endswith(b"/")
    if folders_only:
        glob = glob[:-1]
    placed = b"/" in glob
    if glob.startswith(b"/"):
        glob = glob[1:]
    if not glob:
        return None
    special = _SPECIAL.search(glob)
    literal = len(glob) if special is None else special.start()
    regex = _regex(glob[literal:])
    return None if regex is None else _Pattern(negated, folders_only, placed, re.escape(glob[:literal]) + regex)


# patterns as regular expressions ------------------------------------------------------------------
#
# A star is lazy and does not backtrack, except the last one of a name: the rest after it has a fixed length, so its
# first match is as good as any, and matching is fast for any number of stars. The same holds for `**/`.


def _regex(glob: bytes) -> bytes | None:
    """Returns the regex after a pattern's literal prefix; None if it matches nothing."""
    stretches: list[tuple[bytes, list[bytes]]] = [(b"", [])]
    tail = b""
    at = 0
    while at < len(glob):
        char = glob[at : at + 1]
        if char == b"*":
            stars = len(glob) - at - len(glob[at:].lstrip(b"*"))
            after = glob[at + stars :]
            is_deep = stars > 1 and (at == 0 or glob[at - 1 : at] == b"/")
            at += stars
            if is_deep and after.startswith((b"/", b"\\/")):
                stretches.append((b"?" if after.startswith(b"/") else b"", []))
                at += 1 if after.startswith(b"/") else 2
            elif is_deep and not after:
                tail = b".*"
            else:
                stretches[-1][1].append(b"*")
            continue
        found = _one(glob, at)
        if found is None:
            return None
        stretches[-1][1].append(found[0])
        at = found[1]
    (_, first), *deeper = stretches
    regex = _names_regex(first)
    for optional, tokens in deeper[:-1]:
        regex += b"(?>(?:.*?/)" + (b"??" if optional else b"") + _names_regex(tokens) + b")"
    for optional, tokens in deeper[-1:]:
        regex += b"(?:.*/)" + optional + _names_regex(tokens)
    return regex + tail


def _one(glob: bytes, at: int) -> tuple[bytes, int] | None:
    """Returns the regex for one byte, and its end."""
    char = glob[at : at + 1]
    if char == b"?":
        return b"[^/]", at + 1
    if char == b"[":
        return _bracket(glob, at + 1)
    if char == b"\\":
        at += 1
        char = glob[at : at + 1]
    return (re.escape(char), at + 1) if char else None


def _names_regex(tokens: list[bytes]) -> bytes:
    """Translates stars and single bytes, between two `**` or at either end."""
    names = b"".join(tokens) if b"*" not in tokens else None
    if names is not None:
        return names
    made: list[bytes] = []
    for name in _split(tokens, b"/"):
        first, *others = _split(name, b"*")
        middle = [b"(?>[^/]*?" + b"".join(each) + b")" for each in others[:-1]]
        last = [b"[^/]*" + b"".join(each) for each in others[-1:]]
        made.append(b"".join([*first, *middle, *last]))
    return b"/".join(made)


def _split(tokens: Iterable[bytes], separator: bytes) -> list[list[bytes]]:
    parts: list[list[bytes]] = [[]]
    for token in tokens:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _ascii(accepts: Callable[[str], bool]) -> frozenset[int]:
    return frozenset(code for code in range(128) if accepts(chr(code)))


_CLASSES: Final = {
    b"alnum": _ascii(str.isalnum), b"alpha": _ascii(str.isalpha), b"blank": frozenset(b" \t"),
    b"cntrl": frozenset([*range(32), 127]), b"digit": _ascii(str.isdigit), b"graph": frozenset(range(33, 127)),
    b"lower": _ascii(str.islower), b"print": frozenset(range(32, 127)), b"space": frozenset(b" \t\n\r"),
    b"punct": _ascii(lambda char: "!" <= char <= "~" and not char.isalnum()),
    b"upper": _ascii(str.isupper), b"xdigit": frozenset(b"0123456789abcdefABCDEF"),
}  # fmt: skip


def _bracket(glob: bytes, at: int) -> tuple[bytes, int] | None:
    """Translates a bracket expression, and returns its end; None if it is unterminated, or names an unknown class."""
    negated = glob[at : at + 1] in (b"!", b"^")
    start = at = at + negated
    chosen: set[int] = set()
    previous = 0
    while glob[at : at + 1] != b"]" or at == start:
        if at >= len(glob):
            return None
        char = glob[at]
        is_range = char == ord("-") and previous and glob[at + 1 : at + 2] not in (b"", b"]")
        if is_range:
            at += 1
            char = glob[at]
        elif char == ord("[") and glob[at + 1 : at + 2] == b":":
            end = glob.find(b"]", at + 2)
            if end < 0:
                return None
            word = glob[at + 2 : end]
            if word.endswith(b":"):
                if word[:-1] not in _CLASSES:
                    return None
                chosen |= _CLASSES[word[:-1]]
                at, previous = end + 1, 0
                continue
        if char == ord("\\"):
            at += 1
            if at >= len(glob):
                return None
            char = glob[at]
        chosen.update(range(previous, char + 1) if is_range else (char,))
        previous = 0 if is_range else char
        at += 1
    codes = (set(range(256)) - chosen if negated else chosen) - {ord("/")}
    return (b"[" + b"".join(b"\\x%02x" % code for code in sorted(codes)) + b"]" if codes else b"(?!)"), at + 1
