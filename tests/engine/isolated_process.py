"""A payment in a process of its own that waits at a gate, and an agent that makes it: to be killed and run again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import killick

SHELL = "while [ ! -e gate ]; do sleep 0.01; done; echo grandchild >> book"


def paid(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return killick.Happened(None) if Path("book").exists() else killick.DidNotHappen()


def _at_the_gate() -> None:
    number = len(list(Path().glob("pid.*"))) + 1
    half = Path(f"half.{number}")
    half.write_text(str(os.getpid()))
    half.rename(f"pid.{number}")
    while not Path("gate").exists():
        time.sleep(0.002)


@killick.tool(isolate="process", reconcile=paid)
def pay() -> None:
    _at_the_gate()
    with Path("book").open("a") as book:
        book.write("paid\n")


@killick.tool(isolate="process", reconcile=paid)
def pay_by_shell() -> None:
    shell = subprocess.Popen(["sh", "-c", SHELL])
    Path("shell").write_text(str(shell.pid))
    _at_the_gate()
    shell.wait()


@killick.tool(isolate="process", effect="reads")
def talk() -> str:
    """Answers although a program that it starts writes to the standard output, and one stays behind."""
    subprocess.run(["echo", "hello"], check=True)
    assert sys.stdin.read() == ""
    return "answered"


@killick.agent
async def paying(run: killick.Run, tool: str) -> str | None:
    tools = {"pay": pay, "pay_by_shell": pay_by_shell, "talk": talk}
    return await run.call(tools[tool])


def main() -> None:
    with killick.open("killick.db") as kd:
        sys.stdout.write(str(kd.run(paying, sys.argv[1], id="r")))
