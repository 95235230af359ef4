"""Tombstones: a short text in place of a page, with its description, size and handle."""

from __future__ import annotations

import re
from typing import Final

_HANDLE: Final = r"m\d+(?:\.\d+)?(?:-m\d+)?"
_TOMBSTONE: Final = re.compile(r'\A\[(?:left the window: .*|unchanged: .*)\("(' + _HANDLE + r')"\).*\]\Z', re.DOTALL)
_NAMED: Final = re.compile(rf"(?<![\w.:-])({_HANDLE})(?![\w-])", re.IGNORECASE)

SOURCE_CHARS_MAX: Final = 80


def for_page(source: str, tokens: int, handle: str, recall: str = "recall") -> str:
    """The tombstone of an evicted page."""
    return f'[left the window: {source}, {tokens:,} tokens; {recall}("{handle}") brings it back]'


def unchanged(handle: str, recall: str = "recall") -> str:
    """The tombstone of content that occurs elsewhere."""
    return f'[unchanged: the same as {handle} above; {recall}("{handle}") if it is not]'


def handle_in(text: str) -> str | None:
    """Returns a tombstone's handle; None for other texts."""
    if not text.startswith("["):
        return None
    found = _TOMBSTONE.match(text)
    return found[1] if found else None


def named(text: str) -> list[str]:
    """Returns the handles in a model's argument, each once."""
    return list(dict.fromkeys(handle.lower() for handle in _NAMED.findall(text)))


def shortened(text: str, chars_max: int = SOURCE_CHARS_MAX) -> str:
    """Shortens a text to one line."""
    line = " ".join(text.split())
    if len(line) <= chars_max:
        return line
    # Cut between words if possible: half a name could be mistaken for another, and would escape secret redaction.
    kept = line[: chars_max - 1]
    return (kept[: kept.rfind(" ")] if " " in kept[chars_max // 2 :] else kept) + "…"
