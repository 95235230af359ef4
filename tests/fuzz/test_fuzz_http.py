"""Fuzzing of HTTP framing: requests as bytes, against the real application on a server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
import uvicorn

import killick
from fuzz.fuzzing import changed, keep, known
from killick.http_server import bind
from killick.store import MemoryStore
from killick.web import server
from killick.web.app import asgi
from killick.web.middleware import Limits
from seeds import draw_seed, repeats

NAME: Final = "http"
HEAD: Final = b"host: 127.0.0.1\r\ncontent-type: application/json\r\n"
SEEDS: Final = [
    b"GET /api/v1/runs HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /runs?status=failed&limit=5 HTTP/1.1\r\n" + HEAD + b"connection: close\r\n\r\n",
    b"POST /api/v1/runs HTTP/1.1\r\n" + HEAD + b'content-length: 34\r\n\r\n{"agent":"a","input":1,"id":"r00"}',
    b"POST /api/v1/runs/r1/send HTTP/1.1\r\n"
    + HEAD
    + b'transfer-encoding: chunked\r\n\r\n8;x=y\r\n{"name":\r\n4\r\n"n"}\r\n0\r\n\r\n',
    b"POST /api/v1/runs HTTP/1.1\r\n" + HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"HEAD /runs HTTP/1.1\r\n" + HEAD + b"\r\nGET /inbox HTTP/1.0\r\n\r\n",
]


class Errors(logging.Handler):
    """The errors that the server logs: an exception that no handler took."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[int, Errors]]:
    """The port of a server of the real application, and the errors that it logs."""
    errors, logger = Errors(), logging.getLogger("uvicorn.error")
    made: Any = type("Hurried", (server.Protocol,), {"head_seconds": 0.2})
    with killick.Client(MemoryStore()) as kd:
        limits = Limits(body_seconds=0.2, rate=1e6, burst=1_000_000)
        app = asgi(kd, identify=lambda _: "ann", limits=limits)
        short: Any = 0.2
        config = uvicorn.Config(
            app, http=made, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=short
        )
        serving, bound = uvicorn.Server(config), bind("127.0.0.1", 0)
        thread = threading.Thread(target=lambda: asyncio.run(serving.serve([bound])))
        logger.addHandler(errors)
        thread.start()
        try:
            while not serving.started:
                time.sleep(0.005)
            yield bound.getsockname()[1], errors
        finally:
            serving.should_exit = True
            thread.join()
            logger.removeHandler(errors)


def talk(port: int, data: bytes) -> bytes:
    """What the server sends until it closes: it waits for the rest of a request for a moment only."""
    found = b""
    with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        while part := connection.recv(65536):
            found += part
    return found


def wrong(place: tuple[int, Errors], data: bytes) -> str:
    """Returns what is wrong with the server on one input."""
    port, errors = place
    errors.lines.clear()
    answer = talk(port, data)
    statuses = [int(status) for status in re.findall(rb"(?:\A|\n)HTTP/1\.1 (\d{3}) ", answer)]
    other = talk(port, b"GET /api/v1/runs HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    if not other.startswith(b"HTTP/1.1 200 "):
        return f"another client is answered {other[:80]!r}"
    if any(status >= 500 for status in statuses):
        return f"answers {statuses}"
    if answer and not answer.startswith(b"HTTP/1.1 "):
        return f"answers {answer[:80]!r}"
    return errors.lines[0][-500:] if errors.lines else ""


def test_the_server_answers_what_failed_once_and_another_client_after_it(place: tuple[int, Errors]) -> None:
    for data in (*SEEDS[:2], *(path.read_bytes() for path in known(NAME))):
        assert not wrong(place, data), data


@pytest.mark.slow
def test_the_server_answers_what_a_seed_makes_of_requests_and_another_client_after_it(
    place: tuple[int, Errors],
) -> None:
    seed = draw_seed()
    chance = random.Random(f"{seed} {NAME}")
    for _ in range(repeats(100, 2_000)):
        data = changed(chance, SEEDS)
        if found := wrong(place, data):
            raise AssertionError(f"seed {seed}: {found}; see {keep(NAME, data)}")
