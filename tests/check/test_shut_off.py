"""A rehearsal touches nothing: what agent code does outside of a step is refused, and named where it was written."""

from __future__ import annotations

import asyncio
import inspect
import platform
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest

import killick
from killick.check.checker import check
from killick.check.findings import Report
from killick.testing import play


@killick.tool(effect="reads", name="shut_look")
async def look() -> int:
    return 1


class FarSide:
    """Counts who connects to it."""

    def __init__(self) -> None:
        self.reached = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.reached += 1
            connection.close()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def far() -> Iterator[FarSide]:
    made = FarSide()
    yield made
    made.close()


def line_of(fn: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    return first + next(number for number, line in enumerate(lines) if text in line)


def checked(does: Callable[[], Any]) -> Report:
    @killick.agent(name="shut_touches")
    async def agent(run: killick.Run) -> int:
        await run.call(look)
        found = does()  # the call
        if inspect.isawaitable(found):
            await found
        return await run.call(look)

    return check(agent)


def outside(report: Report) -> Any:
    [found] = [each for each in report.findings if each.kind == "outside"]
    return found


def test_a_file_is_not_written_not_even_once(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    file.write_text("")

    def appends() -> None:
        with file.open("a") as log:  # appends
            log.write("x")

    found = outside(checked(appends))
    assert file.read_text() == ""
    assert found.where.endswith(f"test_shut_off.py:{line_of(appends, '# appends')}")
    assert found.title == f"file.open('a') does open({str(file)!r}, 'a') outside of a step"


def test_no_process_is_started_and_its_name_is_not_dev_null(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def starts() -> None:
        subprocess.run([sys.executable, "-c", f"open({str(made)!r}, 'w')"], stdin=subprocess.DEVNULL, check=True)

    found = outside(checked(starts))
    assert not made.exists()
    assert "subprocess.Popen" in found.title


def test_a_plain_openai_client_reaches_nobody_and_is_named_by_its_call(far: FarSide) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{far.port}", api_key="x", max_retries=0)

    def asks() -> None:
        client.chat.completions.create(  # asks
            model="m", messages=[{"role": "user", "content": "a text that takes the call over more than one line"}]
        )

    found = outside(checked(asks))
    assert far.reached == 0
    assert found.title.startswith("client.chat.completions.create(…) does socket.")
    assert found.where.endswith(f"test_shut_off.py:{line_of(asks, '# asks')}")
    assert "socket." in found.title


def test_a_plain_async_openai_client_reaches_nobody_either(far: FarSide) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://localhost:{far.port}", api_key="x", max_retries=0)

    async def asks() -> None:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])  # asks

    report = checked(asks)
    found = outside(report)
    assert far.reached == 0
    assert found.where.endswith(f"test_shut_off.py:{line_of(asks, '# asks')}"), found
    assert "Event loop is closed" not in str(report.findings)


def test_a_socket_of_asyncio_connects_to_nobody(far: FarSide) -> None:
    async def connects() -> None:
        await asyncio.open_connection("127.0.0.1", far.port)  # connects

    found = outside(checked(connects))
    assert far.reached == 0
    assert found.where.endswith(f"test_shut_off.py:{line_of(connects, '# connects')}")


class Counting(BaseHTTPRequestHandler):
    """Answers every request, and keeps the connection."""

    protocol_version = "HTTP/1.1"
    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_a_connection_that_was_open_before_carries_nothing(kind: str) -> None:
    Counting.requests.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", "/before")
        connection.getresponse().read()

        def asks() -> None:
            connection.request("GET", "/rehearsal")  # asks

        async def asks_soon() -> None:
            asks()

        found = outside(checked(asks if kind == "blocking" else asks_soon))
        connection.close()
        server.shutdown()
    assert Counting.requests == ["/before"]
    assert found.where.endswith(f"test_shut_off.py:{line_of(asks, '# asks')}")


def test_a_pool_that_was_there_before_touches_nothing_for_agent_code(tmp_path: Path) -> None:
    async def writes() -> None:
        await asyncio.get_running_loop().run_in_executor(None, (tmp_path / "made").write_text, "x")

    outside(checked(writes))
    assert not (tmp_path / "made").exists()


def test_reading_and_what_is_only_in_memory_go_on_working() -> None:
    def looks() -> None:
        Path(__file__).read_text(encoding="utf-8")
        with closing(sqlite3.connect(":memory:")) as db:
            db.execute("select 1")
        __import__("colorsys")

    report = checked(looks)
    assert report.left_alone == "completed"
    assert not report.cut_short
    assert [each.kind for each in report.findings if each.kind != "outside"] == []


def test_a_library_that_asks_which_platform_it_is_on_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "_uname_cache", None)  # as in a process that never asked

    @killick.agent(name="shut_platform")
    async def asks(run: killick.Run) -> str:
        known = await asyncio.to_thread(lambda: platform.uname().processor)
        await run.call(look)
        return known

    assert not check(asks, stories_max=4).findings


def test_one_rehearsal_is_enough_to_find_it_and_it_is_said_that_the_others_were_left_out(tmp_path: Path) -> None:
    report = checked(lambda: (tmp_path / "made").mkdir())
    assert "outside of a step" in report.cut_short
    assert sum(report.ways.values()) == 1
    assert {each.kind for each in report.findings} == {"outside"}


def test_a_play_refuses_io_outside_of_a_step_and_lets_tools_be(tmp_path: Path) -> None:
    @killick.tool(name="shut_writes")
    def writes() -> None:
        (tmp_path / "by the tool").write_text("x")

    @killick.agent(name="shut_played")
    async def agent(run: killick.Run) -> None:
        await run.call(writes)
        (tmp_path / "by the agent").write_text("x")

    with play(agent) as played, pytest.raises(killick.RunFailed, match="outside of a step"):
        played.result()
    assert [each.name for each in tmp_path.iterdir()] == ["by the tool"]
    (tmp_path / "afterwards").write_text("x")
