"""The server as a process and as sockets: where it may be, who dribbles, how many, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
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
from typing import Any, Final, NamedTuple

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import killick
from killick.errors import AccessRefused
from killick.http_server import HttpServer, bind
from killick.store import MemoryStore
from killick.web import render, server
from killick.web.app import asgi
from killick.web.auth.access import OwnerAccess, TokenAccess
from killick.web.middleware import Guard, Limits
from killick.workers.tokens import issue, revoke
from web.cookies import browser_with_jar

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
        link = printed.partition("by ")[2].strip()
        browser = browser_with_jar()
        with browser.open(link, timeout=SECONDS_MAX) as page:
            assert page.status == 200
        with browser.open(f"{link.partition('login')[0]}api/v1/health", timeout=SECONDS_MAX) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            browser_with_jar().open(link, timeout=SECONDS_MAX)
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


class Counting(HttpToolsProtocol):
    """Counts the bytes that reach the parser."""

    parsed_bytes = 0

    def data_received(self, data: bytes) -> None:
        type(self).parsed_bytes += len(data)
        super().data_received(data)


class Hurried(NamedTuple):
    port: int
    protocol: type[Counting]


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@contextlib.contextmanager
def counted(app: Any = hello, *, limits: Limits | None = None, **bounds: Any) -> Iterator[Hurried]:
    """A server in a thread; yields its port, and its protocol, which counts."""
    made: Any = type("Tried", (server.Protocol, Counting), {"head_seconds": 60.0, **bounds})
    guard = app if isinstance(app, Guard) else Guard(app, killick.clock.SystemClock(), limits)
    it = HttpServer(guard, http=made, lifespan="off", timeout_keep_alive=3600)
    bound = bind("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(it.serve([bound])))
    thread.start()
    try:
        while not it.started:
            time.sleep(0.005)
        yield Hurried(bound.getsockname()[1], made)
    finally:
        it.stop()
        thread.join(SECONDS_MAX)


@contextlib.contextmanager
def hurried(*, head_seconds: float = 0.3, **options: Any) -> Iterator[int]:
    with counted(head_seconds=head_seconds, **options) as made:
        yield made.port


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


def test_whoever_says_nothing_is_cut_off() -> None:
    with hurried() as port, connect(port) as silent:
        assert read(silent) == b""


def test_whoever_dribbles_a_head_is_cut_off_however_steadily() -> None:
    with hurried() as port, connect(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        with pytest.raises(ConnectionError):
            for number in range(10_000):
                slow.sendall(b"x-%d: y\r\n" % number)
                time.sleep(0.02)


def test_whoever_dribbles_the_second_head_is_cut_off_too() -> None:
    with hurried() as port, connect(port) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answered(slow)
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert read(slow) == b""


def test_a_head_without_end_is_cut_off() -> None:
    with hurried(head_seconds=60) as port, connect(port) as long, contextlib.suppress(ConnectionError):
        long.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
        for _ in range(100):
            long.sendall(b"x: " + b"y" * 4_000 + b"\r\n")
        assert b"200" not in read(long)


def test_whoever_is_quick_is_served_again_and_again() -> None:
    def served(head_seconds: float) -> bool:
        """Whether requests are answered that take longer in all than a head may take."""
        with hurried(head_seconds=head_seconds) as port, connect(port) as quick:
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


def test_whoever_dribbles_a_body_is_told_so_and_cut_off() -> None:
    with hurried(limits=Limits(body_seconds=0.3)) as port, connect(port) as slow:
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
def test_a_body_that_is_too_large_is_refused_unread_and_the_connection_closed(rest: bytes) -> None:
    with hurried(limits=Limits(body_bytes=1_000)) as port, connect(port) as large:
        large.sendall(HEAD + rest)
        assert read(large).startswith(b"HTTP/1.1 413")


def test_a_flood_from_one_address_is_told_to_slow_down() -> None:
    with hurried(limits=Limits(rate=1, burst=5)) as port, connect(port) as flood:
        flood.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 6)
        found = read(flood)
        assert found.count(b"HTTP/1.1 200") == 5
        assert found.count(b"HTTP/1.1 429") == 1
        assert b"retry-after: 1" in found.lower()


def test_one_address_cannot_take_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Protocol, "address_max", 2)
    with hurried(head_seconds=60) as port, connect(port), connect(port), connect(port) as more:
        assert read(more).startswith(b"HTTP/1.1 503")


def test_one_connection_too_many_is_told_to_come_again() -> None:
    with hurried(connections_max=2, head_seconds=60) as port, connect(port), connect(port), connect(port) as more:
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


# bytes --------------------------------------------------------------------------------------------

CHUNKED: Final = HEAD + b"transfer-encoding: chunked\r\n\r\n"
SLACK: Final = 2 * server.SLICE_BYTES
"""A limit is checked at each slice."""


def poured(port: int, *parts: bytes) -> bytes:
    """The response to parts that are sent as long as the server reads them."""
    with connect(port) as connection:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        return read(connection)


@pytest.mark.parametrize(
    ("head", "flood", "status"),
    [
        (CHUNKED, b"1\r\na\r\n" * 300_000, b"413"),
        (CHUNKED, (b"1;" + b"x" * 60_000 + b"\r\na\r\n") * 50, b"413"),
        (CHUNKED + b"0\r\n", b"t: x\r\n" * 300_000, b"413"),
        (HEAD, b"a: b\r\n" * 300_000, b"431"),
        (HEAD + b"a: ", b"b" * 2_000_000, b"431"),
        (b"GET /", b"x" * 2_000_000, b"431"),
    ],
    ids=["chunks of one byte", "chunk extensions", "trailers", "headers", "a header", "an address"],
)
def test_a_flood_of_framing_is_refused_before_it_is_parsed(head: bytes, flood: bytes, status: bytes) -> None:
    with counted() as it:
        found = poured(it.port, head, flood)
        assert it.protocol.parsed_bytes <= len(head) + server.FRAMING_BYTES_MAX * 6 // 5 + SLACK
    assert not found or found.split()[1] == status


def test_the_content_of_a_chunked_body_counts_as_content() -> None:
    size = 1 << 20
    chunks = (b"%x\r\n" % 4_096 + b"x" * 4_096 + b"\r\n") * (size // 4_096)
    with counted() as it:
        assert poured(it.port, CHUNKED, chunks, b"0\r\n\r\n" + HEAD + b"connection: close\r\n\r\n").count(b" 200 ") == 2
        assert it.protocol.parsed_bytes > size


def test_requests_that_are_sent_before_their_turn_are_counted() -> None:
    with counted() as it:
        poured(it.port, b"GET / HTTP/1.1\r\n\r\n" * 100_000)
        assert it.protocol.parsed_bytes <= 20 * server.PIPELINED_MAX + SLACK


def test_a_request_with_two_lengths_is_answered_once_and_its_connection_closed() -> None:
    smuggled = b"GET /api/v1/alive HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for length in (b"content-length: 5", b"content-length: 100"):
        with counted() as it:
            head = HEAD + length + b"\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
            assert poured(it.port, head + smuggled).count(b"HTTP/1.1 ") == 1


def test_bodies_of_one_address_that_nobody_reads_are_bounded_and_others_are_served() -> None:
    limits = Limits(unread_bytes=100_000, body_seconds=SECONDS_MAX)
    length = b"content-length: 60000\r\n\r\n"
    with counted(limits=limits) as it, connect(it.port) as first:
        first.sendall(HEAD + length + b"x" * 59_999)
        while it.protocol.parsed_bytes < 59_999:
            time.sleep(0.005)
        found = poured(it.port, HEAD + length + b"x" * 59_999)
        assert found.startswith(b"HTTP/1.1 429")
        assert b"retry-after" in found.lower()
        first.sendall(b"x" + HEAD + b"connection: close\r\n\r\n")
        assert read(first).count(b" 200 ") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000 + b"]" * 200_000, b"9" * 900_000, b"0." + b"9" * 900_000, b"9e" + b"9" * 900_000,
     b"{" + b",".join(b'"%d":1' % number for number in range(90_000)) + b"}"],
    ids=["deep", "a number", "a fraction", "an exponent", "keys"],
)  # fmt: skip
@pytest.mark.parametrize("path", [b"/api/v1/answer?link=x", b"/api/v1/hooks/paid", b"/slack/desk", b"/login"])
def test_a_large_body_without_credentials_is_refused_and_read_once(tmp_path: Path, path: bytes, body: bytes) -> None:
    body = b'{"verb":"respond","value":' + body + b"}"
    head = b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    with killick.open(str(tmp_path / "killick.db")) as kd, counted(asgi(kd)) as it:
        found = poured(it.port, head + b"content-length: %d\r\n\r\n" % len(body), body)
        assert found.split()[1][:1] == b"4"
        assert it.protocol.parsed_bytes <= len(head) + 40 + len(body)


@pytest.mark.slow
def test_a_client_cannot_name_its_own_address_unless_the_operator_trusts_its_proxy(folder: Path) -> None:
    def statuses(*options: str) -> set[int]:
        """The answers to wrong tokens, each from an address of its own, says a header."""
        with serving(folder, *options) as it:
            login = it.line("browsers sign in at").partition("at ")[2].strip() + "login"
            browser = browser_with_jar()
            with browser.open(login) as page:
                csrf = re.search(r'name="csrf" value="([^"]+)"', page.read().decode())
            assert csrf is not None
            form, found = f"token=wrong&csrf={csrf[1]}".encode(), set()
            for number in range(40):
                request = urllib.request.Request(login, form, {"X-Forwarded-For": f"10.0.0.{number}"})
                with pytest.raises(urllib.error.HTTPError) as refused:
                    browser.open(request)
                refused.value.close()
                found.add(refused.value.code)
            return found

    with killick.open(str(folder / "killick.db")) as kd:
        issue(kd.runtime.engine, "ann", "viewer")
    assert statuses() == {401, 429}
    assert statuses("--trusted-proxy", "127.0.0.1") == {401}
