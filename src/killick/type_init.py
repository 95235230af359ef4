"""Readies types for reading, each once, whichever threads want it first.

msgspec builds what it knows of a type when that is first read, and two threads that do so at the same moment, for the
same type, end the process. So nothing is read as a type before one thread has had it built.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_ready: Final[set[Any]] = set()
_mutex: Final = threading.Lock()


def ready(kind: T) -> T:
    """The type, which any number of threads may read from now on."""
    try:
        if kind in _ready:
            return kind
    except TypeError:  # metadata inside Annotated need not be hashable
        return kind
    with _mutex:
        with suppress(Exception):  # what msgspec cannot read, it says when it is asked to
            msgspec.json.Decoder(kind)
        _ready.add(kind)
    return kind
