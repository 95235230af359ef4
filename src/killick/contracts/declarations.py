"""Parses user-written declarations: tables, lists, names. Returns None, or nothing, for a value of another shape."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from killick.errors import ContractRefused
from killick.text import meant


def table(value: object) -> dict[str, Any] | None:
    """Returns a mapping with string keys."""
    if not isinstance(value, Mapping):
        return None
    found: dict[Any, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
    return found if all(type(name) is str for name in found) else None


def items(value: object) -> list[Any] | None:
    """Returns a list; a set in a fixed order."""
    if isinstance(value, list | tuple):
        return list(cast("list[Any]", value))
    if isinstance(value, set | frozenset):
        return sorted(cast("set[Any]", value), key=lambda item: (type(item).__name__, repr(item)))
    return None


def texts(value: object) -> tuple[str, ...]:
    """Returns one or several texts, deduplicated; nothing if an item is blank or no text."""
    several = [value] if isinstance(value, str) else items(value) or []
    if not all(isinstance(text, str) and text and text == text.strip() for text in several):
        return ()
    return tuple(dict.fromkeys(cast("list[str]", several)))


def refuse_unknown(where: str, words: Iterable[str], known: Collection[str]) -> None:
    """Raises ContractRefused for a word that is not known."""
    for word in words:
        if word not in known:
            way = meant(word, known, otherwise=f"give {', '.join(sorted(known))}")
            raise ContractRefused(where, f"{word} is not known; {way}")
