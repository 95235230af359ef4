"""Regular expressions in contracts, matched in linear time: a model chooses the text, and must not choose the time.

Python's parser reads a pattern, and its tree is written again for the automaton of pydantic-core, which never
backtracks. What only backtracking can match is refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, Literal

from killick.errors import ContractRefused

Word = Literal["matches", "excludes"]

CHARS_MAX: Final = 4096
"""The longest text that is compared with a pattern."""

SIZE_MAX: Final = 1000
"""The most signs of a pattern with its bounded repeats written out: time grows with their product."""

_PARSER: Any = importlib.import_module("re._parser")
_EDGES: Final = {
    "AT_BEGINNING": r"\A", "AT_BEGINNING_STRING": r"\A", "AT_END": r"\z", "AT_END_STRING": r"\z",
    "AT_BOUNDARY": r"\b", "AT_NON_BOUNDARY": r"\B",
}  # fmt: skip
_ASCII: Final = {"DIGIT": "0-9", "WORD": "0-9A-Z_a-z", "SPACE": r"\t-\r\x20"}
_UNICODE: Final = {"DIGIT": r"\p{Nd}", "WORD": r"\p{L}\p{N}_", "SPACE": r"\s\x1c-\x1f"}
_LETTERS: Final = ((0x41, 0x5A, 0x20), (0x61, 0x7A, -0x20))


@lru_cache(maxsize=1024)
def compiled(pattern: str, word: Word = "matches") -> Callable[[str], bool]:
    """Returns a test that the whole of a text matches the pattern; for `excludes`, that a part of it does."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # slow to import

    if type(pattern) is not str:
        raise ContractRefused("bound", f"{word}={pattern!r}; give a regular expression as text")
    try:
        # ASCII, so that no character of another script counts as a digit or a letter.
        re.compile(pattern, re.ASCII)
        tree = _PARSER.parse(pattern, re.ASCII)
        written, size = _written(tree, tree.state.flags)
        if size > SIZE_MAX:
            raise ValueError(f"it has {size} signs with its repeats written out, and {SIZE_MAX} are the most")
        anchored = rf"\A(?:{written})\z" if word == "matches" else written
        schema = core_schema.str_schema(pattern=anchored, strict=True, regex_engine="rust-regex")
        return SchemaValidator(schema).isinstance_python
    except (re.error, RecursionError, OverflowError, SchemaError, ValueError) as error:
        raise ContractRefused("bound", f"{word}: {pattern} does not compile ({error}); correct it") from None


def _written(nodes: Iterable[Any], flags: int) -> tuple[str, int]:
    """Returns the pattern of these nodes and its size."""
    parts = [_node(str(op), operand, flags) for op, operand in nodes]
    return "".join(text for text, _ in parts), sum(size for _, size in parts)


def _node(word: str, operand: Any, flags: int) -> tuple[str, int]:
    match word:
        case "LITERAL" | "NOT_LITERAL":
            return _class([("LITERAL", operand)], flags, negated=word == "NOT_LITERAL"), 1
        case "IN":
            negated = str(operand[0][0]) == "NEGATE"
            return _class([(str(op), value) for op, value in operand[negated:]], flags, negated=negated), 1
        case "ANY":
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]", 1
        case "AT":
            return _edge(str(operand), flags), 1
        case "SUBPATTERN":
            text, size = _written(operand[3], _inner(flags, operand[1], operand[2]))
            return f"(?:{text})", size
        case "BRANCH":
            branches = [_written(branch, flags) for branch in operand[1]]
            return f"(?:{'|'.join(text for text, _ in branches)})", sum(size for _, size in branches)
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, (text, size) = operand[0], operand[1], _written(operand[2], flags)
            endless = high == _PARSER.MAXREPEAT
            return f"(?:{text}){{{low},{'' if endless else high}}}", max(size, 1) * (low + 1 if endless else high)
        case _:
            raise ValueError("look-around, possessive repeats and back-references are exponential; see excludes=")


def _inner(flags: int, added: int, removed: int) -> int:
    """Returns the flags inside of a group. It is either of ASCII or of Unicode."""
    scripts = re.ASCII | re.UNICODE
    return (flags & ~scripts if added & scripts else flags) & ~removed | added


def _edge(word: str, flags: int) -> str:
    if flags & re.MULTILINE and word in ("AT_BEGINNING", "AT_END"):
        return "(?m:^)" if word == "AT_BEGINNING" else "(?m:$)"
    edge = _EDGES[word]
    return f"(?-u:{edge})" if edge in (r"\b", r"\B") and flags & re.ASCII else edge


def _class(members: Iterable[tuple[str, Any]], flags: int, *, negated: bool) -> str:
    text = "".join(part for op, operand in members for part in _member(op, operand, flags))
    folded = "i:" if flags & re.IGNORECASE and not flags & re.ASCII else ":"
    return f"(?{folded}[{'^' * negated}{text}])"


def _member(op: str, operand: Any, flags: int) -> Iterator[str]:
    if op == "CATEGORY":
        word = str(operand).removeprefix("CATEGORY_")
        signs = (_ASCII if flags & re.ASCII else _UNICODE)[word.removeprefix("NOT_")]
        yield f"[^{signs}]" if word.startswith("NOT_") else signs
        return
    low, high = (operand, operand) if op == "LITERAL" else operand
    yield rf"\x{{{low:x}}}-\x{{{high:x}}}"
    if flags & re.IGNORECASE and flags & re.ASCII:
        for first, last, other in _LETTERS:
            if (start := max(low, first)) <= (end := min(high, last)):
                yield rf"\x{{{start + other:x}}}-\x{{{end + other:x}}}"
