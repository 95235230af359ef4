"""Text that UTF-8 can hold: a lone surrogate, half of a pair, is written as its escape (`\\ud83d`). And sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

LONE_SURROGATE: Final = "holds a lone surrogate, which UTF-8 cannot; write the whole character, or leave it out"
"""Why a name is refused that no store could hold."""


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold the text: it has no lone surrogate."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return True


def printable(text: str) -> str:
    """The text itself where UTF-8 can hold it, else with each lone surrogate as its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def meant(word: str, known: Iterable[str], *, otherwise: str, sign: str = "") -> str:
    """The known word that a misspelt one is close to, as a question; else another hint."""
    from difflib import get_close_matches

    close = get_close_matches(word, sorted(known), 1)
    return f"did you mean {close[0]}{sign}?" if close else otherwise


def size_text(count: int) -> str:
    """A number of bytes: 640 B, 1.2 kB, 3.4 GB."""
    if count < 1_000:
        return f"{count} B"
    amount, units = float(count), iter(("kB", "MB", "GB", "TB", "PB"))
    unit = ""
    while amount >= 999.5 and (larger := next(units, None)) is not None:
        amount, unit = amount / 1_000, larger
    return f"{amount:.0f} {unit}" if amount >= 99.95 else f"{amount:.1f} {unit}"


def printable_json(data: Any) -> Any:
    """JSON types with every text printable, keys included."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, Mapping):
        return {printable_json(name): printable_json(value) for name, value in data.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, list | tuple):
        return [printable_json(each) for each in data]  # pyright: ignore[reportUnknownVariableType]
    return data
