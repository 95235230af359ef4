"""Which files are left out: what `.gitignore` and `.killickignore` files say, read as git reads them. Opens no file.

Patterns and names are bytes, compared byte by byte as git does it, so that a name in any encoding is judged as git
judges it. Later patterns win over earlier ones, deeper folders over those above, in one folder `.killickignore` over
`.gitignore`, and what was given to `Rules` over every file.

Two things differ from git, both on purpose. A `.gitignore` says nothing of a folder or file named `.git` and of what is
in it: a rule like `logs/` would take a checkout's own records away. And a file that git tracks although a rule ignores
it is ignored here, because git's index is not asked.
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
"""Files that say what is ignored in their folder and below it; of two in one folder, the later has the last word."""

_GIT: Final = b".git"
_BOM: Final = b"\xef\xbb\xbf"
_SPECIAL: Final = re.compile(rb"[*?[\\]")
_FILES_CACHED: Final = 1024

Test = Callable[[bytes], object]


class Rules:
    """What is to be ignored in a workspace: patterns given for the whole of it, and what its own files say."""

    def __init__(self, exclude: Sequence[str] = (), *, gitignore: bool = True) -> None:
        given = os.fsencode("\n".join(exclude))
        self._above = (_Layer(b"", False, _patterns(given)),) if given else ()
        self._names = IGNORE_FILES if gitignore else (KILLICKIGNORE,)

    def scope(self, above: Scope | None, path: bytes, read: Callable[[bytes], bytes | None]) -> Scope:
        """The rules that hold in a folder. `above` is the scope of the folder it is in, None for the workspace itself,
        whose path is empty; `read` gives what a file of that name in this folder says, or None where there is none."""
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
        given = len(self._above)
        return Scope(path, (*layers[:given], *own, *layers[given:]) if own else layers, above)


class Scope:
    """The rules that hold in one folder. Cheap to make where the folder has no rules of its own, and never changed, so
    that threads may share it."""

    __slots__ = ("_path", "_places", "_quick", "layers")

    def __init__(self, path: bytes, layers: tuple[_Layer, ...], above: Scope | None) -> None:
        self.layers: Final = layers
        self._path: Final = path
        if above is None or above.layers != layers:
            candidates, names = layers, tuple(_names(asked, layers) for asked in _ASKED)
        else:
            # Where a pattern cannot reach a folder, it cannot reach any below it.
            candidates, names = above._places, above._quick
        self._places: Final[tuple[_Layer, ...]] = tuple(
            layer for layer in candidates if layer.patterns.may_reach(self._beside(layer))
        )
        self._quick: Final[tuple[_Quick, ...]] = (
            names
            if not candidates
            else tuple(_Quick(quick.names, self._reaching(asked)) for asked, quick in zip(_ASKED, names, strict=True))
        )

    def ignores(self, name: bytes, *, is_folder: bool) -> bool:
        """Whether an entry of this folder is ignored. Whatever is in an ignored folder is, and is not asked about."""
        # Most names match nothing and most rules take nothing back: both are known without asking one by one.
        ignored, kept = self._quick[2 * is_folder], self._quick[2 * is_folder + 1]
        if not ignored.matches(name):
            return False
        if name != _GIT and not kept.matches(name):
            return True
        for layer in self.layers:
            if layer.is_git and name == _GIT:
                continue
            decided = layer.patterns.decide(name, self._beside(layer) + name, is_folder)
            if decided is not None:
                return decided
        return False

    def _beside(self, layer: _Layer) -> bytes:
        """What comes before a name of this folder where a layer's rules see it."""
        below = self._path[len(layer.folder) :].lstrip(b"/") if layer.folder else self._path
        return below + b"/" if below else b""

    def _reaching(self, asked: tuple[bool, bool]) -> tuple[tuple[bytes, Test], ...]:
        found = [(self._beside(layer), layer.patterns.placed[asked]) for layer in self._places]
        return tuple((before, test) for before, test in found if test is not None)


class _Quick(NamedTuple):
    """Whether any of many patterns matches, when it does not matter which."""

    names: tuple[frozenset[bytes], tuple[bytes, ...], Test | None]
    places: tuple[tuple[bytes, Test], ...]

    def matches(self, name: bytes) -> bool:
        whole, ends, test = self.names
        if name in whole or name.endswith(ends) or (test is not None and test(name)):
            return True
        for before, placed in self.places:  # noqa: SIM110 - any() would take twice as long
            if placed(before + name):
                return True
        return False


_ASKED: Final = ((False, False), (False, True), (True, False), (True, True))
"""Whether a folder is asked about, and whether patterns that take back (`!x`) are meant."""


class _Layer(NamedTuple):
    """The patterns of one file, and the folder in which it stands."""

    folder: bytes
    is_git: bool
    patterns: _Patterns


class _Pattern(NamedTuple):
    """One line. `lead` is what it begins with for certain; `regex` is what the whole name, or the whole path from the
    folder of its file if it is placed, has to match."""

    negated: bool
    folders_only: bool
    placed: bool
    lead: bytes
    regex: bytes
    whole: bytes | None = None
    end: bytes | None = None


class _Patterns:
    """What one file says."""

    def __init__(self, found: Iterable[_Pattern]) -> None:
        self.ordered: Final = tuple(found)[::-1]
        self._leads: Final = tuple(each.lead for each in self.ordered if each.placed)
        self.placed: Final = {
            asked: _any([each.regex for each in self.chosen(*asked) if each.placed]) for asked in _ASKED
        }

    def chosen(self, is_folder: bool, negated: bool) -> list[_Pattern]:
        return [each for each in self.ordered if each.negated == negated and (is_folder or not each.folders_only)]

    def may_reach(self, before: bytes) -> bool:
        """Whether a path that begins so can match a pattern that is bound to its place."""
        return any(lead.startswith(before) or before.startswith(lead) for lead in self._leads)

    def decide(self, name: bytes, path: bytes, is_folder: bool) -> bool | None:
        """Whether this file's last word is to ignore it; None where it says nothing."""
        for each in self.ordered:
            if (is_folder or not each.folders_only) and _compiled(each.regex)(path if each.placed else name):
                return not each.negated
        return None


def _names(asked: tuple[bool, bool], layers: Sequence[_Layer]) -> _Quick:
    patterns = [each for layer in layers for each in layer.patterns.chosen(*asked) if not each.placed]
    whole = frozenset(each.whole for each in patterns if each.whole is not None)
    ends = tuple(dict.fromkeys(each.end for each in patterns if each.end is not None))
    return _Quick((whole, ends, _any([each.regex for each in patterns if each.whole is None and each.end is None])), ())


def _any(regexes: Sequence[bytes]) -> Test | None:
    return _compiled(b"|".join(b"(?:" + regex + b")" for regex in regexes)) if regexes else None


@lru_cache(maxsize=_FILES_CACHED)
def _compiled(regex: bytes) -> Test:
    return re.compile(regex, re.DOTALL).fullmatch


# reading ------------------------------------------------------------------------------------------


@lru_cache(maxsize=_FILES_CACHED)
def _patterns(text: bytes) -> _Patterns:
    """What a file says; lines that git can make nothing of match nothing."""
    lines = [line.removesuffix(b"\r").partition(b"\0")[0] for line in text.removeprefix(_BOM).split(b"\n")]
    said = [_pattern(_trimmed(line)) for line in lines if not line.startswith(b"#")]
    return _Patterns(each for each in said if each is not None)


def _trimmed(line: bytes) -> bytes:
    """A line without the spaces that it ends with; one after a backslash is kept."""
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
    if special is None:
        return _Pattern(negated, folders_only, placed, glob, re.escape(glob), whole=glob)
    lead, rest = glob[: special.start()], glob[special.start() :]
    regex = _regex(rest)
    if regex is None:
        return None
    end = glob[1:] if glob.startswith(b"*") and not _SPECIAL.search(glob, 1) else None
    return _Pattern(negated, folders_only, placed, lead, re.escape(lead) + regex, end=end)


# patterns as regular expressions ------------------------------------------------------------------
#
# A star takes as little as it can and gives nothing back, except the last one of a name: what comes after it has a
# fixed length, so that the first place where it fits is as good as any, and no pattern takes long however many stars
# it has. The same goes for `**/` and the names that follow it.


def _regex(glob: bytes) -> bytes | None:
    """What is left of a pattern after its lead; None for one that matches nothing."""
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
    """What stands for one byte, and where it ends."""
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
    """Stars and single bytes, between two `**` or at either end."""
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


def _ascii(wanted: Callable[[str], bool]) -> frozenset[int]:
    return frozenset(code for code in range(128) if wanted(chr(code)))


_CLASSES: Final = {
    b"alnum": _ascii(str.isalnum), b"alpha": _ascii(str.isalpha), b"blank": frozenset(b" \t"),
    b"cntrl": frozenset([*range(32), 127]), b"digit": _ascii(str.isdigit), b"graph": frozenset(range(33, 127)),
    b"lower": _ascii(str.islower), b"print": frozenset(range(32, 127)), b"space": frozenset(b" \t\n\r"),
    b"punct": _ascii(lambda char: "!" <= char <= "~" and not char.isalnum()),
    b"upper": _ascii(str.isupper), b"xdigit": frozenset(b"0123456789abcdefABCDEF"),
}  # fmt: skip


def _bracket(glob: bytes, at: int) -> tuple[bytes, int] | None:
    """What a set of characters matches, and where it ends; None where it does not end, or names no known class."""
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
