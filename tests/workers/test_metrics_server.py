"""The metrics of a worker over sockets: how much a client may send, hold open, and for how long."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

import killick
from killick.store import MemoryStore
from killick.workers import metrics
from killick.workers.metrics import MetricsServer

REQUEST = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextlib.contextmanager
def scraped() -> Iterator[int]:
    with killick.Client(MemoryStore(), behind=False) as kd:
        server = MetricsServer(kd.runtime.engine, "127.0.0.1", 0)
        try:
            yield int(server.url.split(":")[2].partition("/")[0])
        finally:
            server.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=300)


def read(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            found += part
    return found


def test_a_scrape_gets_the_metrics_and_every_other_request_nothing() -> None:
    with scraped() as port:
        for request, status in [(REQUEST, b"200"), (REQUEST.replace(b"metrics", b"other"), b"404"),
                                (b"POST" + REQUEST[3:], b"404"), (b"nonsense\r\n\r\n", b"404")]:  # fmt: skip
            with connect(port) as connection:
                connection.sendall(request)
                found = read(connection)
                assert found.split()[1] == status
                assert (b"killick_store_up 1" in found) is (status == b"200")


def test_connections_that_send_nothing_take_no_threads_and_the_oldest_gives_way() -> None:
    with scraped() as port, contextlib.ExitStack() as held:
        before = threading.active_count()
        silent = [held.enter_context(connect(port)) for _ in range(3 * metrics.SCRAPES_MAX)]
        with connect(port) as connection:
            connection.sendall(REQUEST)
            assert b" 200 " in read(connection)
        assert threading.active_count() == before
        assert read(silent[0]) == b""


def test_a_head_without_end_is_cut_off_and_so_is_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with scraped() as port, connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            for _ in range(1_000):
                connection.sendall(b"x: " + b"y" * 4_000 + b"\r\n")
        assert read(connection) == b""
    monkeypatch.setattr(metrics, "SCRAPE_SECONDS", 0.05)
    with scraped() as port, connect(port) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert read(connection) == b""
