"""Regular expressions in contracts, matched in linear time: a model chooses the text, and must not choose the time.

Python's parser reads a pattern, and its tree is written again for the automaton of pydantic-core, which never
backtracks. What only backtracking can match is refused. Python itself says which characters each part of a pattern
matches, so that both engines agree on letters, digits, case and the ends of words.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

from killick.errors import ContractRefused
from killick.text import is_utf8

Word = Literal["matches", "excludes"]
Passes: TypeAlias = Callable[[str], bool]
Signs: TypeAlias = "tuple[tuple[bool, ...], ...]"
"""For each kind of character beyond ASCII in a text, which atoms of a pattern match it."""

CHARS_MAX: Final = 4096
"""The longest text that is compared with a pattern."""

SIZE_MAX: Final = 1000
"""The most signs of a pattern with its bounded repeats written out: time grows with their product."""

_PARSER: Any = importlib.import_module("re._parser")
_COMPILER: Any = importlib.import_module("re._compiler")
_FLAGS: Final = re.IGNORECASE | re.DOTALL | re.ASCII | re.UNICODE
_EDGES: Final = {
    "AT_BEGINNING": r"\A", "AT_BEGINNING_STRING": r"\A", "AT_END_STRING": r"\z", "AT_BOUNDARY": r"\b",
    "AT_NON_BOUNDARY": r"\B",
}  # fmt: skip
_END: Final = -1
_LETTERS: Final = 0x4E00
_MARKS: Final = 0xE000
"""Where the automaton's stand-ins begin: for characters that are part of a word, and for others."""


@lru_cache(maxsize=1024)
def compiled(pattern: str, word: Word = "matches") -> Passes:
    """Returns a test that a text passes: its whole matches the pattern; for `excludes`, no part of it does.

    A pattern reads letters, digits and case as ASCII. `excludes` also reads them as Unicode: what either reading finds
    fails. Text that UTF-8 cannot hold fails both words.
    """
    if type(pattern) is not str:
        raise ContractRefused("bound", f"{word}={pattern!r}; give a regular expression as text")
    try:
        re.compile(pattern, re.ASCII)
        readings = [_Reading(pattern, flags) for flags in ((re.ASCII,) if word == "matches" else (re.ASCII, 0))]
        size = max(reading.size for reading in readings)
        if size > SIZE_MAX:
            raise ValueError(f"it has {size} signs with its repeats written out, and {SIZE_MAX} are the most")
        plain = tuple(dict.fromkeys(_automaton(reading.written(word)) for reading in readings))
    except (re.error, RecursionError, OverflowError, ValueError, Warning) as error:
        raise ContractRefused("bound", f"{word}: {pattern} does not compile ({error}); correct it") from None
    expected = word == "matches"
    has_end = not expected and any(_END in reading.parts for reading in readings)

    def passes(text: str) -> bool:
        if text.isascii() and not (has_end and text.endswith("\n")):
            return all(match(text) is expected for match in plain)
        return is_utf8(text) and all(reading.match(text, word) is expected for reading in readings)

    return passes


@lru_cache(maxsize=256)
def _automaton(written: str) -> Passes:
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # slow to import

    try:
        schema = core_schema.str_schema(pattern=written, strict=True, regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except SchemaError as error:
        raise ValueError(str(error)) from None


class _Reading:
    """A pattern under one set of flags: its syntax, and its atoms, which match one character each.

    The automaton sees ASCII as it is. Of the characters beyond, those that no atom tells apart are one character to it.
    """

    __slots__ = ("_ascii", "_numbers", "atoms", "parts", "size")

    def __init__(self, pattern: str, flags: int) -> None:
        self.atoms: list[Callable[[str], object]] = []
        self._ascii: list[list[int]] = []
        self._numbers: dict[str, int] = {}
        self._add(re.compile(r"\w").match)
        self.parts: list[str | int] = []
        """Syntax of the automaton, numbers of atoms, and `_END`."""
        tree = _PARSER.parse(pattern, flags)
        self.size = self._sequence(tree, tree.state.flags)

    def match(self, text: str, word: Word) -> bool:
        """Returns whether the automaton matches a text that UTF-8 can hold."""
        signs = {char: tuple([atom(char) is not None for atom in self.atoms]) for char in set(text) if char > "\x7f"}
        kinds = tuple(sorted(set(signs.values())))
        stand_ins = {kind: _stand_in(number, kind) for number, kind in enumerate(kinds)}
        # Python's $ matches before a newline at the end too. The automaton's then does so before each newline.
        end = r"(?m:$)" if word == "excludes" and text.endswith("\n") else r"\z"
        translated = text.translate({ord(char): stand_ins[kind] for char, kind in signs.items()})
        return _automaton(self.written(word, kinds, end))(translated)

    def written(self, word: Word, kinds: Signs = (), end: str = r"\z") -> str:
        """Returns the pattern in the automaton's syntax."""
        sets = [self._set(number, kinds) for number in range(len(self.atoms))]
        parts = [part if isinstance(part, str) else end if part == _END else sets[part] for part in self.parts]
        return rf"\A(?:{''.join(parts)})\z" if word == "matches" else "".join(parts)

    def _set(self, number: int, kinds: Signs) -> str:
        beyond = [ord(_stand_in(place, kind)) for place, kind in enumerate(kinds) if kind[number]]
        codes = [*self._ascii[number], *beyond]
        return f"[{''.join(_ranges(codes))}]" if codes else _NONE

    def _sequence(self, nodes: Iterable[Any], flags: int) -> int:
        """Adds the parts of these nodes, and returns their size."""
        return sum([self._node(str(op), op, operand, flags) for op, operand in nodes])

    def _group(self, nodes: Iterable[Any], flags: int, after: str = "") -> int:
        self.parts.append("(?:")
        size = self._sequence(nodes, flags)
        self.parts.append(f"){after}")
        return size

    def _node(self, name: str, op: Any, operand: Any, flags: int) -> int:
        match name:
            case "LITERAL" | "NOT_LITERAL" | "IN" | "ANY":
                self.parts.append(self._atom(op, operand, flags & _FLAGS))
                return 1
            case "AT":
                self.parts.append(_edge(str(operand), flags))
                return 1
            case "SUBPATTERN":
                return self._group(operand[3], _inner(flags, operand[1], operand[2]))
            case "BRANCH":
                size = 0
                for number, branch in enumerate(operand[1]):
                    self.parts.append("|" if number else "(?:")
                    size += self._sequence(branch, flags)
                self.parts.append(")")
                return size
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high = int(operand[0]), int(operand[1])
                endless = high == _PARSER.MAXREPEAT
                size = self._group(operand[2], flags, f"{{{low},{'' if endless else high}}}")
                return max(size, 1) * (low + 1 if endless else high)
            case _:
                raise ValueError("look-around, possessive repeats and back-references are exponential; see excludes=")

    def _atom(self, op: Any, operand: Any, flags: int) -> int:
        """Returns the number of an atom, which Python compiles alone."""
        key = f"{flags} {op} {operand}"
        if key not in self._numbers:
            state = _PARSER.State()
            state.flags = flags
            alone: re.Pattern[str] = _COMPILER.compile(_PARSER.SubPattern(state, [(op, operand)]), flags)
            self._numbers[key] = self._add(alone.match)
        return self._numbers[key]

    def _add(self, atom: Callable[[str], object]) -> int:
        self.atoms.append(atom)
        self._ascii.append([code for code in range(128) if atom(chr(code)) is not None])
        return len(self.atoms) - 1


_NONE: Final = r"[^\x{0}-\x{10ffff}]"


def _ranges(codes: list[int]) -> Iterator[str]:
    first = codes[0]
    for code, following in zip(codes, [*codes[1:], None], strict=True):
        if following != code + 1:
            yield rf"\x{{{first:x}}}-\x{{{code:x}}}"
            first = following or 0


def _stand_in(number: int, kind: tuple[bool, ...]) -> str:
    """Returns the character that stands for a kind. To both engines it is part of a word, or to neither."""
    return chr((_LETTERS if kind[0] else _MARKS) + number)


def _inner(flags: int, added: int, removed: int) -> int:
    """Returns the flags inside of a group. It is either of ASCII or of Unicode."""
    scripts = re.ASCII | re.UNICODE
    return (flags & ~scripts if added & scripts else flags) & ~removed | added


def _edge(name: str, flags: int) -> str | int:
    if flags & re.MULTILINE and name in ("AT_BEGINNING", "AT_END"):
        return "(?m:^)" if name == "AT_BEGINNING" else "(?m:$)"
    if name == "AT_END":
        return _END
    edge = _EDGES[name]
    return f"(?-u:{edge})" if edge in (r"\b", r"\B") and flags & re.ASCII else edge
