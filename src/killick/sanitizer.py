"""Makes characters visible that change how a text is shown: control, bidirectional and zero-width ones.

A prompt comes from a model or from a stranger's data. Its escapes are commands to a terminal, and can replace what the
approver reads. They are written as JSON writes them, so that JSON stays the same document.
"""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and newline, DEL, C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufeff\uffa0\ufff0-\ufffb\U000e0000-\U000e0fff"
)
_IN_TEXT: Final = re.compile(f"[{_HIDDEN}]")
_IN_LINE: Final = re.compile(f"[\t\n{_HIDDEN}]")


def visible(text: str) -> str:
    """A text with every such character written as `\\\\u202e`. Newlines and tabs stay: they are layout."""
    return text if _IN_TEXT.search(text) is None else _IN_TEXT.sub(_written, text)


def visible_line(text: str) -> str:
    """The same on one line, for logs: a newline in a name must not begin a line that looks like another record."""
    return text if _IN_LINE.search(text) is None else _IN_LINE.sub(_written, text)


def _written(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
