"""Initializes msgspec types once, before concurrent use.

msgspec builds a type's metadata on first use, and two threads that do so at once for one type crash the process. So one
thread builds it first.
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
    """Returns the type, which any number of threads may decode from now on."""
    with suppress(TypeError):  # metadata inside Annotated need not be hashable: such a type is built at each use
        if kind in _ready:
            return kind
    with _mutex, suppress(Exception):  # msgspec reports an unsupported type when it is used
        try:
            msgspec.json.Decoder(kind)
        finally:
            _ready.add(kind)
    return kind
