"""A clerk on the real Claude Code program that pays, and dies when the money is gone: alone, or with Killick.

Reads lines `WAY FOLDER HOME PORT DIES` and takes each in a process of its own, forked from here, because importing the
SDK takes seconds; answers with how that process ended. WAY is alone or killick; HOME is the machine's own disk, where
Claude Code keeps its transcripts; DIES is yes or no.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool
from claude_agent_sdk import project_key_for_directory as project

import killick
from killick.adapters.claude_agent import KillickSessionStore, attempt, gated

SESSION = "6f9c1f3e-2d9f-4c60-8a5e-2a5c3f6f3b11"


async def serve(way: str, folder: Path, home: Path, port: str, *, dies: bool) -> str:
    """One message to the clerk, to its end or to that of the process."""
    ledger = folder / "ledger.txt"
    home.mkdir(exist_ok=True)

    @tool("pay", "Pay somebody.", {"to": str, "amount": int})
    async def pay(arguments: Any) -> dict[str, Any]:
        step = attempt()
        with ledger.open("a") as out:
            out.write(f"pay {arguments['to']} {arguments['amount']} {step.key if step else '-'}\n")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"content": [{"type": "text", "text": "paid"}]}

    def look_in_the_ledger(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
        there = ledger.exists() and effect.key in ledger.read_text()
        return killick.Happened({"content": [{"type": "text", "text": "paid"}]}) if there else killick.DidNotHappen()

    async def ask(tools: Sequence[Any], is_known: bool, **more: Any) -> str:
        options = ClaudeAgentOptions(
            cwd=folder, model="claude-scripted", system_prompt="You pay.", setting_sources=[], tools=[],
            mcp_servers={"till": create_sdk_mcp_server("till", tools=list(tools))}, allowed_tools=["mcp__till__pay"],
            env=surroundings(home, port), **{"resume" if is_known else "session_id": SESSION}, **more,
        )  # fmt: skip
        said = [message async for message in query(prompt="pay ann 5", options=options)]
        return str([message.result for message in said if isinstance(message, ResultMessage)][-1])

    if way == "alone":
        return await ask([pay], any(home.rglob(f"{SESSION}.jsonl")))
    async with AsyncExitStack() as stack:
        kd = stack.enter_context(killick.open(folder / "killick.db"))
        store = KillickSessionStore(kd)
        known = await store.load({"project_key": project(folder), "session_id": SESSION})
        await stack.enter_async_context(kd.host("message-1", agent="claude"))
        tools = gated([pay], tools={"pay": {"reconcile": look_in_the_ledger}})
        return await ask(tools, known is not None, session_store=store, session_store_flush="eager")


def surroundings(home: Path, port: str) -> dict[str, str]:
    quiet = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "DISABLE_AUTOUPDATER",
        "DISABLE_TELEMETRY",
        "DISABLE_ERROR_REPORTING",
    )
    there = {"ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}", "ANTHROPIC_API_KEY": "none"}
    return {**there, "HOME": str(home), "CLAUDE_CONFIG_DIR": str(home), **dict.fromkeys(quiet, "1")}


def main() -> None:
    for line in sys.stdin:
        way, folder, home, port, dies = line.split()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # a machine that dies takes Claude Code along
            sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
            sys.stdout.flush()
            continue
        os.setpgid(0, 0)
        try:
            said = asyncio.run(serve(way, Path(folder), Path(home), port, dies=dies == "yes"))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        (Path(folder) / "said.txt").write_text(said)
        os._exit(0)


if __name__ == "__main__":
    main()
