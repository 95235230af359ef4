"""A clerk that pays and writes, and dies on the way: with the SDK alone, or with Killick.

Reads lines `WAY FOLDER DIES` and takes each in a process of its own, forked from here, because importing the SDK takes
seconds; answers with how that process ended. WAY is alone or killick; it dies in `pay`, when the money is gone and
nobody knows, or in `mail`, after it; or at `-`, not at all.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from agents.memory import SQLiteSession
from agents.testing import assistant_message, function_call

import agents
import killick
from agents import Agent, Model, ModelResponse, Runner, Usage, function_tool
from killick.adapters.openai_agents import KillickRunner, attempt


class Clerk(Model):
    """Pays, then writes, then says so: by what has happened since it was last spoken to."""

    def __init__(self, folder: Path) -> None:
        self.asked = folder / "asked.txt"

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:  # noqa: A002
        number = len(self.asked.read_text().splitlines()) if self.asked.exists() else 0
        _write(self.asked, "asked")
        spoken = max(n for n, item in enumerate(input) if item.get("role") == "user")
        done = sum(item.get("type") == "function_call_output" for item in input[spoken:])
        said: Any = (
            function_call("pay", {"to": "ann", "amount": 5}, call_id=f"call_{number}"),
            function_call("mail", {"to": "ann"}, call_id=f"call_{number}"),
            assistant_message("done", item_id=f"msg_{number}"),
        )[done]
        return ModelResponse(output=[said], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def _write(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(f"{line}\n")


async def serve(way: str, folder: Path, dies: str) -> str:
    """One turn of the clerk's, to its end or to that of the process."""
    ledger = folder / "ledger.txt"

    @function_tool
    async def pay(to: str, amount: int) -> str:
        """Pay somebody."""
        step = attempt()
        _write(ledger, f"pay {to} {amount} {step.key if step else '-'}")
        if dies == "pay":
            os.kill(os.getpid(), signal.SIGKILL)
        return f"paid {amount} to {to}"

    @function_tool
    async def mail(to: str) -> str:
        """Write to somebody."""
        if dies == "mail":
            os.kill(os.getpid(), signal.SIGKILL)
        _write(ledger, f"mail {to}")
        return f"wrote to {to}"

    def look_in_the_ledger(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
        """The bank's own list, by the key that was sent along."""
        there = ledger.exists() and effect.key in ledger.read_text()
        return killick.Happened("paid 5 to ann") if there else killick.DidNotHappen()

    agents.set_tracing_disabled(True)
    clerk = Agent(name="clerk", tools=[pay, mail], model=Clerk(folder))
    if way == "alone":
        result = await Runner.run(clerk, "pay ann 5", session=SQLiteSession("thread-1", folder / "session.db"))
    else:
        with killick.open(folder / "killick.db") as kd:
            runner = KillickRunner(kd, tools={"pay": {"reconcile": look_in_the_ledger}, "mail": "idempotent"})
            result = await runner.run(clerk, "pay ann 5", session="thread-1")
    return str(result.final_output)


def main() -> None:
    for line in sys.stdin:
        way, folder, dies = line.split()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
            sys.stdout.flush()
        else:
            said = asyncio.run(serve(way, Path(folder), dies))
            (Path(folder) / "said.txt").write_text(said)
            os._exit(0)


if __name__ == "__main__":
    main()
