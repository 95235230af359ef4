"""An office that handles claims, for tests of the command line: an app, and a folder with a store of its runs."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from killick.cli.main import main

APP: Final = '''
"""Agents of an office that handles claims."""

import datetime
from pathlib import Path

import msgspec

import killick
from killick import rules


class Claim(msgspec.Struct):
    id: int
    name: str = "Ann"
    amount: int = 80
    on: datetime.date | None = None


@killick.tool(effect="reads")
async def fetch_docs(claim: int) -> list[str]:
    return ["a.pdf", "b.pdf"]


@killick.tool(effect="reads")
async def note(text: str) -> str:
    return text


@killick.tool
async def pay(claim: int, to: str, amount: int) -> str:
    if Path("bank-closed").exists():
        raise killick.NotDone("the bank is closed")
    return f"paid {amount} to {to}"


@killick.agent
async def review(run: killick.Run, claim: Claim) -> str:
    """Eight steps, then a question, then money."""
    for number in range(1, 8):
        await run.call(note, f"page {number}")
    await run.call(fetch_docs, claim.id)
    answer = await run.ask(f"Pay {claim.amount} to {claim.name}?", to="managers", timeout="72h", default="reject")
    if not answer.approved:
        return f"not paid: {answer.comment}"
    return await run.call(pay, claim.id, claim.name, claim.amount)


@killick.agent
async def pay_out(run: killick.Run, amount: int) -> str:
    """Fails while there is a file bank-closed."""
    return await run.call(pay, 0, "Ann", amount)


@killick.tool(effect="idempotent")
async def refund(to: str, amount: int, note: str | None = None) -> str:
    return f"gave {amount} back to {to}"


refunds = killick.Contract(
    "refunds",
    [
        rules.arguments("refund", amount={"max": 5000}),
        rules.arguments(
            "refund", amount={"max": 100}, name="large sums",
            ask=killick.Approval("managers", need=2, timeout="72h", escalate=[("directors", "72h")]),
        ),
    ],
    people={"managers": ["mia", "max", "moe"], "directors": ["dan", "dora"]},
)  # fmt: skip


@killick.agent(contract=refunds)
async def give_back(run: killick.Run, amount: int) -> str:
    """Money back, to which two managers have to agree where it is much."""
    try:
        return await run.call(refund, "Ann", amount)
    except killick.Rejected as rejected:
        return str(rejected)


@killick.agent
async def greet(run: killick.Run, name: str) -> str:
    return f"hello {name}"


@killick.agent
async def choose(run: killick.Run) -> str:
    first = await run.ask("Which way?", options=["left", "right"])
    second = await run.ask("How far?", returns=int)
    return f"{first.value} {second.value}"


@killick.agent
async def listen(run: killick.Run) -> object:
    return await run.wait("paid")


@killick.tool
async def lose() -> None:
    raise OSError("the line went dead")


@killick.agent
async def doubt(run: killick.Run) -> str:
    await run.call(lose)
    return "known"


killick.triggers.cron("0 9 * * *", greet, name="report", input="Ann")
killick.triggers.on_event("order.created", greet, name="order", input="Bob")
'''


def plain_environment(**more: str) -> dict[str, str]:
    """An environment that says nothing about Killick, in which `killick` is this interpreter's."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("KILLICK", "_KILLICK", "COLUMNS"))
    }
    return kept | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"} | more


def run_killick(*args: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "killick", *args],
        cwd=cwd, env=plain_environment(**more), capture_output=True, text=True, timeout=300, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def on_terminal(
    command: list[str],
    *,
    cwd: Path,
    env: dict[str, str],
    types: Mapping[str, str] | None = None,
    columns: int = 100,
    shades: bool = False,
) -> tuple[int, str]:
    """Run a command on a terminal of its own, typing what `types` has for what appears. Exit code and screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(command[0], command, {**env, "TERM": "xterm-256color"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    left, seen, until = dict(types or {}), "", time.monotonic() + 300
    while time.monotonic() < until:
        ready, _, _ = select.select([terminal], [], [], 1)
        try:
            seen += os.read(terminal, 65_536).decode() if ready else ""
        except OSError:
            break
        for prompt in [prompt for prompt in left if prompt in seen]:
            os.write(terminal, left.pop(prompt).encode())
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    seen = seen.replace("\r\n", "\n")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen if shades else re.sub(r"\x1b\[[0-9;]*m", "", seen)


def furnish(folder: Path) -> None:
    """Put the app, an input and a setting of the app into a folder."""
    (folder / "app.py").write_text(APP, encoding="utf-8")
    (folder / "claim.json").write_text('{"id": 20, "name": "Cyd", "amount": 400}', encoding="utf-8")


def move_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder the current one, as it would be for a process of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    for name in ("KILLICK_STORE", "KILLICK_DEBUG", "NO_COLOR", "COLUMNS", "_KILLICK_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    furnish(folder)
    return folder


class Called(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *args: str) -> Called:
    """One command, in this process."""
    capsys.readouterr()
    code = main(args)
    return Called(code, *capsys.readouterr())


def open_office() -> None:
    """Runs of every kind, in killick.db of the current folder."""
    for number in (17, 18, 19):
        assert main(["run", "app.py:review", "-q", "-i", f'{{"id": {number}}}', "--id", f"claim_{number}"]) == 3
    closed = Path("bank-closed")
    closed.touch()
    assert main(["run", "app.py:pay_out", "-q", "-i", "13", "--id", "claim_16", "--tag", "small"]) == 1
    closed.unlink()
    assert main(["run", "app.py:greet", "-q", "-i", "Ann", "--id", "done_1"]) == 0
    assert main(["pause", "claim_19"]) == 0
