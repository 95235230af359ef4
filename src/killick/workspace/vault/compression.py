"""Compression for vaults. Finds a zstd implementation; knows nothing of packs."""

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
"""A shorter input gains nothing, because a frame has a header."""

_HELPS_BELOW: Final = 0.95
_FRAME: Final = zstd.ZstdCompressor.FLUSH_FRAME


class _Own(threading.local):
    """A compressor for each thread: creating one costs more than compressing most files."""

    def __init__(self) -> None:
        self.compressor = zstd.ZstdCompressor(level=_LEVEL)


_own: Final = _Own()


def compressed(data: bytes | memoryview) -> bytes | memoryview:
    """Returns one frame, or the data itself if a frame would hardly be shorter."""
    size = len(data)
    if size < _TOO_SHORT_BYTES:
        return data
    frame = _own.compressor.compress(data, _FRAME)
    return frame if len(frame) < size * _HELPS_BELOW else data


def decompressed(stored: bytes, size: int) -> bytes | None:
    """Decompresses a frame; None if it is not a complete frame of that size. Never produces more than that size."""
    reader = zstd.ZstdDecompressor()
    try:
        data = reader.decompress(stored, size + 1)
    except (zstd.ZstdError, MemoryError, OverflowError):
        return None
    return data if reader.eof and len(data) == size and not reader.unused_data else None
