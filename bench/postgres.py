"""A PostgreSQL server to measure on: the one that the tests start, on the disk under the figures, flushing as it comes.

Holds what is counted on it besides time: how often it flushes its log, and how often a client waits for it.
"""

# Drivers are a group of their own, so the types are checked with them and without.
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

import psycopg

SERVERS: Final = Path(__file__).parents[1] / "tests" / "servers.py"
"""Where servers for tests are made; a bench needs no second way to do that."""

SETTINGS: Final = {"shared_buffers": "256MB", "max_wal_size": "2GB"}

_schemas: Final = count(1)


class Server(Protocol):
    """What is needed of a server here."""

    url: str
    folder: Path

    def __enter__(self) -> Server: ...

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def server(folder: Path, **settings: str) -> Iterator[Server]:
    """A server for as long as the block lasts. It does not run as root, so the way to its data is opened to it."""
    spec = spec_from_file_location("servers", SERVERS)
    assert spec is not None
    assert spec.loader is not None
    servers = module_from_spec(spec)
    spec.loader.exec_module(servers)
    folder.chmod(0o755)
    with cast(
        "Server", servers.Server(folder / f"postgres-{next(_schemas)}", settings={**SETTINGS, **settings})
    ) as started:
        yield started


def store_url(base: str) -> str:
    """A store of its own on a server."""
    return f"{base}?namespace=bench_{next(_schemas)}"


def version(base: str) -> str:
    """Which PostgreSQL it is."""
    return f"PostgreSQL {_row(base, 'SHOW server_version')[0]}"


def flushes(base: str) -> int:
    """How often the server flushed its write-ahead log, as far as the backends that have ended tell."""
    number = int(_row(base, "SHOW server_version_num")[0])
    if number >= 180_000:
        return int(_row(base, "SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal'")[0])
    return int(_row(base, "SELECT wal_sync FROM pg_stat_wal")[0])


def _row(base: str, query: str) -> Any:
    with psycopg.connect(base) as db:
        row = db.execute(cast("Any", query)).fetchone()
    assert row is not None
    return row


class Wire:
    """A server as seen through a wire that counts round trips: how often a client spoke after it was answered."""

    def __init__(self, base: str) -> None:
        parts = urlsplit(base)
        self._far = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = parts._replace(netloc=f"postgres@127.0.0.1:{self._listening.getsockname()[1]}").geturl()
        self.trips = 0
        self._mutex = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Nobody new gets through."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            far = socket.create_connection(self._far)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            spoke = [False]
            for one, other, client in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass, args=(one, other, client, spoke), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, client: bool, spoke: list[bool]) -> None:
        try:
            while data := one.recv(1 << 16):
                with self._mutex:
                    if client and not spoke[0]:
                        self.trips += 1
                    spoke[0] = client
                other.sendall(data)
        except OSError:
            pass
        finally:
            for end in (one, other):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # what waits on the other end hears of it, too
                end.close()
