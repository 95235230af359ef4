"""A real `killick proxy` process: started, killed in the middle of a session, started again; and what is seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from killick.model import events as e
from killick.workers.tokens import Person
from processes import kinds, told
from proxy.agents import KEY, Loop, only_run
from proxy.provider import Desk, Says, desk

pytestmark = pytest.mark.slow


class Process:
    """The command, as somebody would run it."""

    def __init__(self, here: Desk, *options: str) -> None:
        words = ["proxy", "--upstream", here.upstream, "--port", "0", "--store", str(here.store), "--json", *options]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "killick", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        self.told = json.loads(self.popen.stdout.readline())
        self.url = self.told["url"]

    def end(self, number: int) -> str:
        self.popen.send_signal(number)
        _, err = self.popen.communicate(timeout=300)
        return err


@contextlib.contextmanager
def process(here: Desk, *options: str) -> Iterator[Process]:
    made = Process(here, *options)
    try:
        yield made
    finally:
        if made.popen.poll() is None:
            made.end(signal.SIGKILL)


def killick_says(here: Desk, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "killick", *words, "--store", str(here.store)],
        capture_output=True, text=True, check=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "160"},
    )  # fmt: skip
    return done.stdout


def reading(count: int) -> list[Says]:
    calls = [[("read_file", {"path": f"f{number}.py"})] for number in range(count)]
    return [Says(f"Now {number}. ", call, thinking="hm") for number, call in enumerate(calls)]


def session(here: Desk, shape: str, streams: bool, *, kills: bool) -> list[bytes]:
    """What upstream gets in a session of thirty calls, in which the proxy is killed between calls and inside them."""
    here.provider.replies(*reading(30), Says("All read."))
    asked = threading.Event()
    holding: list[bool] = [False]

    async def hold() -> bool:
        held = holding[0]
        while holding[0]:
            asked.set()
            await asyncio.sleep(0.01)
        return not held

    here.provider.before = hold
    with contextlib.ExitStack() as stack:
        agent = Loop("http://127.0.0.1:9", shape, streams=streams)
        agent.messages.append({"role": "user", "content": "Read everything."})
        proxy = stack.enter_context(process(here))
        turn = 0
        while True:
            agent.client.base_url = proxy.url if shape == "anthropic" else f"{proxy.url}/v1"
            if kills and turn in (4, 9, 17):
                proxy.end(signal.SIGKILL)
                proxy = stack.enter_context(process(here))
                agent.client.base_url = proxy.url if shape == "anthropic" else f"{proxy.url}/v1"
            if kills and turn in (6, 13, 22):
                holding[0] = True
                asked.clear()
                killer = threading.Thread(target=lambda gone=proxy: (asked.wait(300), gone.end(signal.SIGKILL)))
                killer.start()
                with pytest.raises(Exception, match=r"onnection error|disconnected|reset"):
                    agent.step()
                killer.join()
                holding[0] = False
                proxy = stack.enter_context(process(here))
                agent.client.base_url = proxy.url if shape == "anthropic" else f"{proxy.url}/v1"
            calls = agent.step()
            turn += 1
            if not calls:
                break
            agent.answer(calls)
        agent.client.close()
        err = proxy.end(signal.SIGTERM)
        assert err == ("" if kills else f"made a new store: {here.store}\n")
        assert proxy.popen.returncode == 0
    return [body for body, _ in groupby(request.raw for request in here.provider.requests)]


@pytest.mark.parametrize(("shape", "streams"), [("openai", True), ("anthropic", False)], ids=["chat", "messages"])
def test_a_killed_proxy_goes_on_with_the_same_run_and_the_same_bytes(tmp_path: Path, shape: str, streams: bool) -> None:
    (tmp_path / "calm").mkdir()
    with desk(tmp_path / "calm") as calm:
        expected = session(calm, shape, streams, kills=False)
    with desk(tmp_path) as here:
        assert session(here, shape, streams, kills=True) == expected
        with here.record() as kd:
            run = only_run(kd)
            outcomes = [event.outcome for _, event, _ in told(kd, run, e.AttemptEnded)]
            assert outcomes.count("returned") == 31
            assert outcomes.count("unknown") == 3
            assert kinds(kd, run)[-1] == "run.completed"
            assert not kd.store.verify(run).problems


def test_what_was_recorded_can_be_looked_at_like_any_run(tmp_path: Path) -> None:
    with desk(tmp_path) as here:
        here.provider.replies(*reading(3), Says("There it is."))
        with process(here, "--agent", "mender") as proxy:
            assert proxy.told["store"] == str(here.store)
            with Loop(proxy.url, "anthropic", streams=True, headers={"X-Killick-Run": "mend-17"}) as agent:
                agent.tell("Read.")
            listed = killick_says(here, "ps")
            assert "mend-17" in listed
            assert "mender" in listed
            assert "running" in listed
            proxy.end(signal.SIGINT)
            assert proxy.popen.returncode == 0
        shown = killick_says(here, "show", "mend-17")
        assert "model claude-sonnet-5" in shown
        assert "Now 2." in shown
        assert "killick:tip" not in shown
        assert "completed" in shown
        window = killick_says(here, "show", "mend-17", "--window")
        assert "file reads" in window
        assert "the record is intact" in killick_says(here, "store", "verify", "mend-17")
        files = [file for file in tmp_path.iterdir() if file.is_file()]
        assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_the_dashboard_traces_it(tmp_path: Path) -> None:
    with desk(tmp_path) as here:
        here.provider.replies(*reading(3), Says("There it is."))
        with here.proxied() as url, Loop(url, "anthropic", streams=True) as agent:
            agent.tell("Read.")
        with here.record() as kd, TestClient(kd.asgi(identify=lambda request: Person("ann"))) as web:
            traced = web.get(f"/api/v1/runs/{only_run(kd)}/trace").json()["traced"]
            assert web.get(f"/runs/{only_run(kd)}").status_code == 200
    assert [call["name"] for call in traced[-2]["calls"]] == ["read_file"]
    assert (traced[-2]["said"], traced[-2]["reasoning"]) == ("Now 2. ", "hm")
    assert traced[-1]["said"] == "There it is."
    assert all(call["usage"]["cost_micros"] for call in traced)


def test_it_says_where_to_point_clients(tmp_path: Path) -> None:
    with desk(tmp_path) as here:
        words = ["proxy", "--upstream", here.upstream, "--port", "0", "--store", str(here.store)]
        with subprocess.Popen(
            [sys.executable, "-m", "killick", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as popen:
            assert popen.stdout is not None
            first, chat, messages = (popen.stdout.readline() for _ in range(3))
            popen.send_signal(signal.SIGTERM)
            assert popen.wait(300) == 0
        url = first.partition(" at ")[2].partition(",")[0]
        assert first == f"proxying {here.upstream} at {url}, recording to {here.store}\n"
        assert (chat, messages) == (f"  OPENAI_BASE_URL={url}/v1\n", f"  ANTHROPIC_BASE_URL={url}\n")
