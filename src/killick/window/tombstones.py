"""What stands where a page was: a short text that names what left, its size and its handle."""

from __future__ import annotations

import re
from typing import Final

_HANDLE: Final = r"m\d+(?:\.\d+)?(?:-m\d+)?|tool:[A-Za-z0-9_.-]+"
_TOMBSTONE: Final = re.compile(r'\A\[(?:left the window: .*|unchanged: .*)\("(' + _HANDLE + r')"\).*\]\Z', re.DOTALL)
_NAMED: Final = re.compile(rf"(?<![\w.:-])({_HANDLE})(?![\w-])", re.IGNORECASE)

SOURCE_CHARS_MAX: Final = 80


def left(source: str, tokens: int, handle: str, recall: str = "recall") -> str:
    """In place of a page that left."""
    return f'[left the window: {source}, {tokens:,} tokens; {recall}("{handle}") brings it back]'


def unchanged(handle: str, recall: str = "recall") -> str:
    """In place of content that stands elsewhere already."""
    return f'[unchanged: the same as {handle} above; {recall}("{handle}") if it is not]'


def handle_in(text: str) -> str | None:
    """The handle that a tombstone names; None where the text is none."""
    if not text.startswith("["):
        return None
    found = _TOMBSTONE.match(text)
    return found[1] if found else None


def named(text: str) -> list[str]:
    """The handles in what a model wrote where it should write one, each once."""
    found = (handle if handle.lower().startswith("tool:") else handle.lower() for handle in _NAMED.findall(text))
    return list(dict.fromkeys(found))


def shortened(text: str, chars_max: int = SOURCE_CHARS_MAX) -> str:
    """One line of it."""
    line = " ".join(text.split())
    if len(line) <= chars_max:
        return line
    # Between words, where there are some: half of a name would be taken for another, and is not known as a secret.
    kept = line[: chars_max - 1]
    return (kept[: kept.rfind(" ")] if " " in kept[chars_max // 2 :] else kept) + "…"
