"""The server as a process and as sockets: where it may be, who dribbles, how many, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn

import killick
from killick.errors import AccessRefused
from killick.http_server import bind
from killick.store import MemoryStore
from killick.web import render, server
from killick.web.auth.access import OwnerAccess, TokenAccess
from killick.web.middleware import Guard, Limits
from killick.workers.tokens import issue, revoke

SECONDS_MAX: Final = 300.0
APP: Final = """
import killick


@killick.agent
async def greet(run: killick.Run, name: str) -> str:
    return f"hello {name}"
"""


class Serving:
    """`killick serve` in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "killick", "serve", "--store", "killick.db", "--port", "0", *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("KILLICK_")},
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://([\d.]+):(\d+)/", line):
                self.url, self.port = found[0], int(found[2])
                return
        raise AssertionError("".join(self.lines))

    def line(self, start: str) -> str:
        """The first line from here on that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start):
                return line
        raise AssertionError("".join(self.lines))

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(self.url + path.removeprefix("/"), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, refused.read().decode()

    def end(self, how: signal.Signals = signal.SIGTERM) -> str:
        """Tell it to stop; returns what it printed."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        rest, _ = self.process.communicate(timeout=SECONDS_MAX)
        return "".join(self.lines) + rest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with killick.open(str(tmp_path / "killick.db")):
        pass
    return tmp_path


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[Serving]:
    made = Serving(folder, *options)
    try:
        yield made
    finally:
        made.end()


def owner(folder: Path) -> dict[str, str]:
    """What a program of the store's owner sends."""
    return {"Authorization": f"Bearer {(folder / 'killick.db-owner-key').read_text()}"}


# the process --------------------------------------------------------------------------------------


def test_it_says_where_it_is_answers_there_and_ends_with_0_when_it_is_told_to(folder: Path) -> None:
    for how in (signal.SIGTERM, signal.SIGINT):
        with serving(folder) as it:
            assert it.get("/api/v1/health", **owner(folder))[0] == 200
            told = it.end(how)
        assert it.process.returncode == 0
        assert told.count("serving killick.db at http://127.0.0.1:") == 1
        assert "Traceback" not in told


@pytest.mark.slow
def test_the_link_that_is_printed_signs_in_once_and_the_next_one_is_printed(folder: Path) -> None:
    with serving(folder) as it:
        assert it.get("/api/v1/health")[0] == 401
        printed = it.line("sign in, once, by ")
        path = printed.partition(it.url)[2].strip()
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(it.url + path, timeout=SECONDS_MAX) as page:
            assert page.status == 200
        with browser.open(f"{it.url}api/v1/health", timeout=SECONDS_MAX) as answer:
            assert answer.status == 200
        assert it.get(path)[0] == 401
        assert "the next browser signs in by" in it.line("signed in; ")


@pytest.mark.slow
def test_a_token_made_or_revoked_by_another_process_counts_at_the_next_request(folder: Path) -> None:
    with serving(folder) as it, killick.open(str(folder / "killick.db")) as kd:
        assert it.get("/api/v1/health", **owner(folder))[0] == 200
        made, text = issue(kd.runtime.engine, "ann", "viewer")
        assert it.get("/api/v1/health", **owner(folder))[0] == 401
        assert it.get("/api/v1/health", Authorization=f"Bearer {text}")[0] == 200
        revoke(kd.runtime.engine, made.id)
        assert it.get("/api/v1/health", Authorization=f"Bearer {text}")[0] == 401


@pytest.mark.slow
def test_neither_tokens_nor_queries_are_printed_and_a_write_is_one_line(folder: Path) -> None:
    with killick.open(str(folder / "killick.db")) as kd:
        _, text = issue(kd.runtime.engine, "ann", "admin")
    with serving(folder) as it:
        it.get("/api/v1/health?wanted=HUSH", Authorization=f"Bearer {text}")
        body = json.dumps({"name": "bob"}).encode()
        headers = {"Authorization": f"Bearer {text}", "Content-Type": "application/json"}
        request = urllib.request.Request(it.url + "api/v1/events?x=HUSH", body, headers, method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=SECONDS_MAX)
        refused.value.close()
        request = urllib.request.Request(it.url + "api/v1/events", body, headers, method="POST")
        urllib.request.urlopen(request, timeout=SECONDS_MAX).close()
        told = it.end()
    assert "HUSH" not in told
    assert text not in told
    assert re.search(r"wrote +who ann +method POST +path /api/v1/events +status 200", told)


@pytest.mark.slow
def test_a_stream_that_somebody_follows_does_not_keep_it_from_stopping(folder: Path) -> None:
    with serving(folder) as it, socket.create_connection(("127.0.0.1", it.port), timeout=SECONDS_MAX) as follower:
        key = owner(folder)["Authorization"]
        follower.sendall(f"GET /api/v1/live HTTP/1.1\r\nhost: localhost\r\nauthorization: {key}\r\n\r\n".encode())
        first = follower.recv(4096)
        assert first.startswith(b"HTTP/1.1 200"), first
        told = it.end()
        assert it.process.returncode == 0
        assert "Traceback" not in told
        assert "without completing" not in told


@pytest.mark.slow
def test_a_stream_ends_when_the_token_that_it_was_opened_with_is_revoked(folder: Path) -> None:
    with killick.open(str(folder / "killick.db")) as kd:
        made, text = issue(kd.runtime.engine, "ann", "viewer")
        with serving(folder) as it, socket.create_connection(("127.0.0.1", it.port), timeout=SECONDS_MAX) as follower:
            head = f"GET /api/v1/live HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {text}\r\n"
            follower.sendall(f"{head}connection: close\r\n\r\n".encode())
            assert follower.recv(4096).startswith(b"HTTP/1.1 200")
            revoke(kd.runtime.engine, made.id)
            read(follower)
            told = it.end()
    assert "Traceback" not in told
    assert "without completing" not in told


@pytest.mark.slow
def test_with_a_worker_it_also_serves_the_runs_that_are_due(folder: Path) -> None:
    (folder / "app.py").write_text(APP)
    words = ("start", "app.py:greet", "--input", '"ann"', "--id", "g1", "--store", "killick.db")
    started = subprocess.run(
        [sys.executable, "-m", "killick", *words],
        cwd=folder, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr
    with serving(folder, "app.py", "--worker") as it, killick.open(str(folder / "killick.db")) as kd:
        until = time.monotonic() + SECONDS_MAX
        while kd.info("g1").status != "completed" and time.monotonic() < until:
            time.sleep(0.02)
        assert kd.info("g1").status == "completed"
        assert "completed" in it.end()
        assert it.process.returncode == 0


def refused(folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "killick", "serve", "--store", "killick.db", *options],
        cwd=folder, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.slow
def test_an_address_that_others_reach_is_refused_without_a_token_and_names_the_next_move(folder: Path) -> None:
    line = refused(folder, "--host", "0.0.0.0")
    assert line.startswith("killick: 0.0.0.0: others can reach this address")
    assert "`killick token create NAME`" in line


@pytest.mark.slow
def test_with_a_token_it_serves_others_and_lets_nobody_else_in(folder: Path) -> None:
    with killick.open(str(folder / "killick.db")) as kd:
        made, text = issue(kd.runtime.engine, "ann", "viewer")
    with serving(folder, "--host", "0.0.0.0") as it:
        it.url = f"http://127.0.0.1:{it.port}/"
        assert it.get("/api/v1/health")[0] == 401
        assert it.get("/api/v1/health", Authorization=f"Bearer {text}", Host="killick.example")[0] == 200
    with killick.open(str(folder / "killick.db")) as kd:
        revoke(kd.runtime.engine, made.id)
    assert "`killick token create NAME`" in refused(folder, "--host", "0.0.0.0")


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "name another --host or --port" in refused(folder, "--port", port)


# addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("169.254.0.1", False), ("", False)],
)  # fmt: skip
def test_only_what_this_machine_alone_reaches_is_its_own(host: str, is_local: bool) -> None:
    assert server.is_loopback(host) is is_local


def test_how_people_are_known_goes_by_the_address() -> None:
    with killick.Client(MemoryStore(), behind=False) as kd:
        assert isinstance(server.access_at(kd, "127.0.0.1"), OwnerAccess)
        with pytest.raises(AccessRefused, match="others can reach"):
            server.access_at(kd, "10.0.0.1")
        issue(kd.runtime.engine, "ann", expires_seconds=1_000)
        assert type(server.access_at(kd, "10.0.0.1")) is TokenAccess


# slow and many ------------------------------------------------------------------------------------


@contextlib.contextmanager
def hurried(
    kind: type[Any], *, head_seconds: float = 0.3, connections_max: int = 800, limits: Limits | None = None
) -> Iterator[int]:
    """A server on one of uvicorn's protocols, in a thread; yields its port."""

    async def hello(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"hi"})

    made = type(
        "Tried", (server._HeadTimeout, kind), {"head_seconds": head_seconds, "connections_max": connections_max}
    )
    guard = Guard(hello, killick.clock.SystemClock(), limits)
    config = uvicorn.Config(
        guard, http=made, ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=3600
    )
    it = uvicorn.Server(config)
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(it.serve([bound])))
    thread.start()
    try:
        while not it.started:
            time.sleep(0.005)
        yield bound.getsockname()[1]
    finally:
        it.should_exit = True
        thread.join(SECONDS_MAX)


@pytest.fixture(params=["h11_impl:H11Protocol", "httptools_impl:HttpToolsProtocol"])
def kind(request: pytest.FixtureRequest) -> Any:
    module, _, name = request.param.partition(":")
    return getattr(importlib.import_module(f"uvicorn.protocols.http.{module}"), name)


def read(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            found += part
    return found


def answered(connection: socket.socket) -> None:
    found = b""
    while not found.endswith(b"hi"):
        part = connection.recv(4096)
        assert part, found
        found += part


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX)


def test_whoever_says_nothing_is_cut_off(kind: Any) -> None:
    with hurried(kind) as port, connect(port) as silent:
        assert read(silent) == b""


def test_whoever_dribbles_a_head_is_cut_off_however_steadily(kind: Any) -> None:
    with hurried(kind) as port, connect(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        with pytest.raises(ConnectionError):
            for number in range(10_000):
                slow.sendall(b"x-%d: y\r\n" % number)
                time.sleep(0.02)


def test_whoever_dribbles_the_second_head_is_cut_off_too(kind: Any) -> None:
    with hurried(kind) as port, connect(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answered(slow)
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert read(slow) == b""


def test_a_head_without_end_is_cut_off(kind: Any) -> None:
    with hurried(kind, head_seconds=60) as port, connect(port) as long, contextlib.suppress(ConnectionError):
        long.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        for _ in range(100):
            long.sendall(b"x: " + b"y" * 4_000 + b"\r\n")
        assert b"200" not in read(long)


def test_whoever_is_quick_is_served_again_and_again(kind: Any) -> None:
    def served(head_seconds: float) -> bool:
        """Whether requests are answered that take longer in all than a head may take."""
        with hurried(kind, head_seconds=head_seconds) as port, connect(port) as quick:
            try:
                for _ in range(5):
                    quick.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    answered(quick)
                    time.sleep(head_seconds / 4)
            except (AssertionError, ConnectionError):
                return False
        return True

    # A machine may be too busy for a head in two seconds, but not in more and more of them.
    assert any(map(served, (2, 8, 32)))


HEAD: Final = b"POST /api/v1/runs HTTP/1.1\r\nhost: localhost\r\n"


def test_whoever_dribbles_a_body_is_told_so_and_cut_off(kind: Any) -> None:
    with hurried(kind, limits=Limits(body_seconds=0.3)) as port, connect(port) as slow:
        slow.sendall(HEAD + b"content-length: 100000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(50):
                slow.sendall(b"x")
                time.sleep(0.02)
        assert read(slow).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: 1000000000\r\n\r\n",
        b"content-length: 1000000000\r\nexpect: 100-continue\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n" + b"200\r\n" + b"x" * 512 + b"\r\n200\r\n" + b"x" * 512 + b"\r\n",
    ],
)
def test_a_body_that_is_too_large_is_refused_unread_and_the_connection_closed(kind: Any, rest: bytes) -> None:
    with hurried(kind, limits=Limits(body_bytes=1_000)) as port, connect(port) as large:
        large.sendall(HEAD + rest)
        assert read(large).startswith(b"HTTP/1.1 413")


def test_a_flood_from_one_address_is_told_to_slow_down(kind: Any) -> None:
    with hurried(kind, limits=Limits(rate=1, burst=5)) as port, connect(port) as flood:
        flood.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 6)
        found = read(flood)
        assert found.count(b"HTTP/1.1 200") == 5
        assert found.count(b"HTTP/1.1 429") == 1
        assert b"retry-after: 1" in found.lower()


def test_one_address_cannot_take_every_connection(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._HeadTimeout, "address_max", 2)
    with hurried(kind, head_seconds=60) as port, connect(port), connect(port), connect(port) as more:
        assert read(more).startswith(b"HTTP/1.1 503")


def test_one_connection_too_many_is_told_to_come_again(kind: Any) -> None:
    with hurried(kind, connections_max=2, head_seconds=60) as port, connect(port), connect(port), connect(port) as more:
        assert read(more).startswith(b"HTTP/1.1 503")


def test_a_server_compiles_every_template_before_a_page_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = render.environment.__wrapped__()
    monkeypatch.setattr(render, "environment", lambda: environment)
    monkeypatch.setattr(server, "_lower_priority", lambda: None)

    async def compiled() -> int:
        with killick.open(str(tmp_path / "killick.db")) as kd:
            serving = asyncio.ensure_future(server.serve(kd, port=0))
            while len(environment.cache) < len(environment.list_templates()) and not serving.done():
                await asyncio.sleep(0.01)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        return len(environment.cache)

    assert asyncio.run(compiled()) == len(environment.list_templates())
