"""The access log of a server: who read or wrote which run, when, as lines of JSON in a file of the owner's alone.

Has names and ids, and neither values nor tokens. Each line has the code of the line before it (`before`) and a code of
its own (`mac`) under a key of the store: a line that is changed, removed or inserted is found. Lines cut off at the end
are not: send the lines elsewhere. The chain continues over a file that was moved away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import threading
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from killick.clock import Clock, timestamp
from killick.errors import AccessRefused
from killick.permissions import OTHERS, open_private
from killick.store.protocol import Store

LINE_BYTES_MAX: Final = 1 << 20
FIRST: Final = ""
"""What the first line has before it."""

_MAC: Final = b',"mac":"'
_CHARS: Final = 64


def _key(store: Store) -> bytes:
    return hmac.digest(store.secret_key, b"killick access log 1", sha256)


class AccessLog:
    """Appends to the access log of a store. One process writes a file. Thread-safe."""

    def __init__(self, path: str | Path, store: Store, clock: Clock) -> None:
        self._path, self._key, self._clock = Path(path), _key(store), clock
        self._mutex = threading.Lock()
        self._before = FIRST
        self._file = self._opened()
        self._before = _last_of(self._file) or FIRST

    def write(self, fields: dict[str, Any]) -> None:
        """Appends a line. OSError where it cannot: then nothing may be read or written."""
        with self._mutex:
            self._follow()
            line = {"at": timestamp(self._clock.now_us()), **fields, "before": self._before}
            body = msgspec.json.encode(line)
            mac = hmac.digest(self._key, body, sha256).hex()
            text = b'%s%s%s"}\n' % (body[:-1], _MAC, mac.encode())
            if os.write(self._file, text) != len(text):
                raise OSError(errno.ENOSPC, "no room for the access log")
            self._before = mac

    def close(self) -> None:
        os.close(self._file)

    def _follow(self) -> None:
        """Opens the file again where it was moved away."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path), os.fstat(self._file)):
                return
        os.close(self._file)
        self._file = self._opened()

    def _opened(self) -> int:
        file = open_private(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            if os.fstat(file).st_mode & OTHERS:
                raise AccessRefused(str(self._path), "others may open this file; chmod 600 it")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                os.write(file, b"\n")  # a crash tore the last line
        except BlockingIOError:
            os.close(file)
            raise AccessRefused(str(self._path), "another server writes this access log; name another file") from None
        except BaseException:
            os.close(file)
            raise
        return file


def _last_of(file: int) -> str | None:
    """The code of the last whole line."""
    size = os.fstat(file).st_size
    end = os.pread(file, LINE_BYTES_MAX, max(size - LINE_BYTES_MAX, 0))
    macs = (_parted(line)[1] for line in reversed(end.split(b"\n")))
    return next((mac for mac in macs if mac), None)


def _parted(line: bytes) -> tuple[bytes, str]:
    """The body of a line, and its code; "" where it has none."""
    body, _, rest = line.rstrip(b"\n").rpartition(_MAC)
    mac = rest.removesuffix(b'"}')
    return body + b"}", mac.decode() if len(mac) == _CHARS and mac.isalnum() else ""


def first_broken(store: Store, lines: Iterable[bytes], before: str | None = None) -> tuple[int, int | None]:
    """Reads lines of an access log; returns how many there are, and the number of the first that is not as the server
    wrote it, or does not follow the one before. `before` is the code before the first, if that is known."""
    key, count = _key(store), 0
    for count, line in enumerate(lines, 1):
        body, mac = _parted(line)
        whole = mac and hmac.compare_digest(hmac.digest(key, body, sha256).hex(), mac)
        if not whole or (before is not None and msgspec.json.decode(body)["before"] != before):
            return count, count
        before = mac
    return count, None
