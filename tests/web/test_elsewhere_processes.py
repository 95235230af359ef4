"""A worker, a server, a mail server and Slack, each on its own: a question leaves by both, and is answered once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

import killick
from web.elsewhere import SECRET, SIGNING, TOKEN, Slack, Smtp, slack, smtp

pytestmark = pytest.mark.slow

APP = """
import os
import killick

@killick.tool(effect="idempotent", approve=killick.Approval("mia"))
async def refund(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    with open("paid.txt", "a") as paid:
        paid.write(f"{to} {amount}\\n")
    return f"gave {amount} back to {to}"

@killick.agent
async def give_back(run: killick.Run, amount: int) -> str:
    return await run.call(refund, "ann", amount)

killick.email(os.environ["SMTP"], sender="killick@example.org", people={"mia": "mia@example.org"})
killick.slack("C1", token="env:SLACK_TOKEN", signing_secret="env:SLACK_SIGNING", people={"U1": "mia"},
              api=os.environ["SLACK_API"])
"""
FIRST = "17000.000001"


@pytest.fixture
def post() -> Iterator[Smtp]:
    with smtp() as made:
        yield made


@pytest.fixture
def far() -> Iterator[Slack]:
    with slack() as made:
        yield made


@contextlib.contextmanager
def running(folder: Path, post: Smtp, far: Slack, words: str) -> Iterator[subprocess.Popen[str]]:
    """A command of Killick's in a process of its own; gone when this ends."""
    environment = os.environ | {
        "SMTP": f"smtp://127.0.0.1:{post.port}", "SLACK_API": far.api, "SLACK_TOKEN": TOKEN, "SLACK_SIGNING": SIGNING,
        "KILLICK_PUBLIC_URL": "https://killick.example.org", "KILLICK_LINK_SECRET": SECRET,
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "killick", *words.split(), "--store", "killick.db"], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(holds: Callable[[], bool], seconds: float = 300) -> None:
    late = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < late, "it never came to that"
        time.sleep(0.02)


def killed(process: subprocess.Popen[str]) -> bool:
    process.send_signal(signal.SIGKILL)
    return True


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    found = re.search(r"http://\S+/", server.stdout.readline())
    assert found is not None
    return found[0]


def test_a_server_that_is_killed_after_the_answer_leaves_no_stale_message(
    tmp_path: Path, post: Smtp, far: Slack
) -> None:
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    with running(tmp_path, post, far, "worker app.py"), killick.open(str(tmp_path / "killick.db")) as kd:
        until(lambda: all(kd.runtime.store.head(f"hook:{name}") is not None for name in ("email", "slack")))
        with running(tmp_path, post, far, "start app.py:give_back --input 900 --id r1") as started:
            assert started.wait(300) == 0
        until(lambda: len(post.mail) == 1 and len(far.messages) == 1)
        with running(tmp_path, post, far, "serve app.py --port 0") as server:
            url = url_of(server)
            far.on_respond = partial(killed, server)  # before the message is updated
            request = far.pressed(FIRST, "approve", at_us=time.time_ns() // 1_000)
            httpx.post(f"{url}slack/slack", content=request.body, headers=request.headers).raise_for_status()
            server.wait(300)
        until(lambda: far.texts(FIRST)[-1].startswith("Approved by mia at "))
        assert "/api/chat.update" in [path for path, _ in far.calls]
        until(lambda: kd.info("r1").status == "completed")
        far.on_respond = lambda: False
        [token] = re.findall(r"answer#(\S+)", post.text())
        with running(tmp_path, post, far, "serve app.py --port 0") as server:
            url = url_of(server)
            late = httpx.post(f"{url}api/v1/answer", json={"link": token, "verb": "reject"})
            again = httpx.post(f"{url}slack/slack", content=request.body, headers=request.headers)
        assert (late.status_code, late.json()["code"]) == (409, "already_answered")
        assert (again.status_code, again.json()["code"]) == (401, "webhook_refused")
    assert (tmp_path / "paid.txt").read_text() == "ann 900\n"
