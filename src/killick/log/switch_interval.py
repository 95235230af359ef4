"""The interpreter's thread switch interval: short while a write-behind append is pending."""

from __future__ import annotations

import sys
import threading
from typing import Final

HURRIED_SECONDS: Final = 0.0002

_hurrying = 0
_usual_seconds = 0.0
_hurry_mutex = threading.Lock()


def hurry(change: int) -> None:
    """Shortens the thread switch interval while a write-behind append is pending."""
    global _hurrying, _usual_seconds
    with _hurry_mutex:
        if not _hurrying:
            _usual_seconds = sys.getswitchinterval()
        _hurrying += change
        sys.setswitchinterval(min(_usual_seconds, HURRIED_SECONDS) if _hurrying else _usual_seconds)


def reset_hurry() -> None:
    """Resets the interval in a forked child, which has no committer thread."""
    global _hurrying, _hurry_mutex
    _hurry_mutex = threading.Lock()
    if _hurrying:
        _hurrying = 0
        sys.setswitchinterval(_usual_seconds)
