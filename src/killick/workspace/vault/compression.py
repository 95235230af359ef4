"""Compression of what a vault holds. Knows where zstd comes from, and nothing of packs."""

from __future__ import annotations

import sys
import threading
from typing import Final

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_LEVEL: Final = 1
_TOO_SHORT_BYTES: Final = 48
"""A frame has a header and hardly anything to gain on so little."""

_HELPS_BELOW: Final = 0.95
_FRAME: Final = zstd.ZstdCompressor.FLUSH_FRAME


class _Own(threading.local):
    """Each thread has a compressor: making one costs more than most files take."""

    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(level=_LEVEL)


_own: Final = _Own()


def compressed(data: bytes | memoryview) -> bytes | memoryview:
    """One frame, or the data as it is where a frame would hardly be shorter."""
    size = len(data)
    if size < _TOO_SHORT_BYTES:
        return data
    frame = _own.compressor.compress(data, _FRAME)
    return frame if len(frame) < size * _HELPS_BELOW else data


def decompressed(stored: bytes, size: int) -> bytes | None:
    """What a frame holds; None where it is no whole frame of that many bytes. Never makes more than was said."""
    reader = zstd.ZstdDecompressor()
    try:
        data = reader.decompress(stored, size + 1)
    except (zstd.ZstdError, MemoryError, OverflowError):
        return None
    return data if reader.eof and len(data) == size and not reader.unused_data else None
