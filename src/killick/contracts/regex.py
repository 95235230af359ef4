"""Regular expressions in contracts: which are refused, and the longest text that each may match.

A failing match may backtrack through every division of the text among the repeats. A model chooses the text, so
patterns with exponential backtracking are refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from killick.errors import ContractRefused

CHARS_MAX: Final = (4096, 4096, 1500, 200, 80, 50, 32)
"""Indexed by the number of repeats that can backtrack: matching time grows with that power of the length."""

_OFTEN: Final = 9
_PARSER: Any = importlib.import_module("re._parser")


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compiles the pattern for full matches."""
    if type(pattern) is not str:
        raise ContractRefused("bound", f"matches={pattern!r}; give a regular expression as text")
    try:
        # ASCII, so that no character of another script counts as a digit or a letter.
        found = re.compile(pattern, re.ASCII)
    except (re.error, RecursionError, OverflowError) as error:
        raise ContractRefused("bound", f"matches: {pattern} does not compile ({error}); correct it") from None
    if _weighed(_PARSER.parse(pattern, re.ASCII))[1]:
        raise ContractRefused(
            "bound",
            f"matches: {pattern} nests repeats, which can take exponential time; make the inner repeat possessive,"
            " as in [a-z]++, or separate the repeats by a character that occurs nowhere else",
        )
    return found


@lru_cache(maxsize=1024)
def chars_max(pattern: str) -> int:
    """Returns the longest text that is matched with the pattern."""
    count = _weighed(_PARSER.parse(pattern, re.ASCII))[0]
    return CHARS_MAX[min(count, len(CHARS_MAX) - 1)]


def _weighed(nodes: Iterable[Any]) -> tuple[int, bool]:
    """Returns how many repeats can backtrack, and whether one of them is nested in another."""
    count, is_tangled, items = 0, False, list(nodes)
    for number, (op, said) in enumerate(items):
        word = str(op)
        if word in ("MAX_REPEAT", "MIN_REPEAT"):
            low, high, body = said
            inner, tangled = _weighed(body)
            is_divided = _is_divided(list(body))
            is_tangled |= tangled or (high > _OFTEN and _varies(body) and not is_divided)
            following = items[number + 1] if number + 1 < len(items) else None
            if high > _OFTEN and low != high and not _stops(body, following):
                count += 1
            count += inner if is_divided else inner * min(high, _OFTEN)
        else:
            weights = [_weighed(body) for body in _bodies(word, said)]
            is_tangled |= any(tangled for _, tangled in weights)
            if word not in ("POSSESSIVE_REPEAT", "ATOMIC_GROUP"):
                count += max((inner for inner, _ in weights), default=0)
    return count, is_tangled


def _bodies(word: str, said: Any) -> list[Any]:
    """Returns the subpatterns of a node."""
    match word:
        case "SUBPATTERN":
            return [said[-1]]
        case "BRANCH":
            return list(said[1])
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return [said[2]]
        case "ATOMIC_GROUP":
            return [said]
        case "ASSERT" | "ASSERT_NOT":
            return [said[1]]
        case "GROUPREF_EXISTS":
            return [part for part in said[1:] if part is not None]
        case _:
            return []


def _varies(nodes: Iterable[Any]) -> bool:
    """Returns whether the same text can match in more than one length or way."""
    for op, said in nodes:
        word = str(op)
        if word in ("MAX_REPEAT", "MIN_REPEAT") and said[0] != said[1]:
            return True
        if word == "BRANCH":
            firsts = [branch[0] if len(branch) else None for branch in said[1]]
            literals = {first[1] for first in firsts if first is not None and str(first[0]) == "LITERAL"}
            if len(literals) < len(firsts):
                return True
        if word not in ("POSSESSIVE_REPEAT", "ATOMIC_GROUP") and any(_varies(body) for body in _bodies(word, said)):
            return True
    return False


def _is_divided(items: list[Any]) -> bool:
    """Returns whether each round starts or ends with a delimiter that occurs nowhere else in it."""
    while len(items) == 1 and str(items[0][0]) == "SUBPATTERN":
        items = list(items[0][1][-1])
    for edge, rest in ((items[0], items[1:]), (items[-1], items[:-1])) if items else ():
        if str(edge[0]) == "LITERAL" and not chr(edge[1]).isalpha() and not _may_take(rest, edge[1]):
            return True
    return False


def _stops(body: Iterable[Any], following: Any) -> bool:
    """Returns whether a repeat ends at the next character, and nowhere else."""
    if following is None or str(following[0]) != "LITERAL":
        return False
    return not chr(following[1]).isalpha() and not _may_take(body, following[1])


def _may_take(nodes: Iterable[Any], sign: int) -> bool:
    for op, said in nodes:
        word = str(op)
        if word == "LITERAL":
            takes = said == sign
        elif word == "NOT_LITERAL":
            takes = said != sign
        elif word == "IN":
            takes = _has(said, sign)
        elif word == "AT":
            takes = False
        else:
            bodies = _bodies(word, said)
            takes = not bodies or any(_may_take(body, sign) for body in bodies)
        if takes:
            return True
    return False


def _has(members: Iterable[Any], sign: int) -> bool:
    is_negated, has = False, False
    for op, said in members:
        match str(op):
            case "NEGATE":
                is_negated = True
            case "LITERAL":
                has |= said == sign
            case "RANGE":
                has |= said[0] <= sign <= said[1]
            case _:
                has |= _is_of(str(said), chr(sign))
    return has != is_negated


def _is_of(category: str, sign: str) -> bool:
    word = category.removeprefix("CATEGORY_").removeprefix("UNI_")
    is_not, word = word.startswith("NOT_"), word.removeprefix("NOT_")
    tests = {"DIGIT": sign.isdigit(), "WORD": sign.isalnum() or sign == "_", "SPACE": sign.isspace()}
    # An unknown class is assumed to match everything.
    return True if word not in tests else tests[word] != is_not
