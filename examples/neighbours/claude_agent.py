"""A session of the Claude Agent SDK that outlives its machine, and a tool of one's own that pays once.

No model is asked here: what Claude Code would send is sent by hand. To ask Claude, hand the same store and the same
tools to `ClaudeAgentOptions(session_store=…, session_store_flush="eager", mcp_servers={"till": server})`.

python examples/neighbours/claude_agent.py
"""

from __future__ import annotations

import asyncio
from typing import Any

from claude_agent_sdk import create_sdk_mcp_server, list_sessions_from_store, project_key_for_directory, tool

import killick
from killick.adapters.claude_agent import KillickSessionStore, attempt, gated

SESSION = "6f9c1f3e-2d9f-4c60-8a5e-2a5c3f6f3b11"


@tool("pay", "Pay somebody.", {"to": str, "amount": int})
async def pay(arguments: dict[str, Any]) -> dict[str, Any]:
    step = attempt()
    print(f"paying {arguments['amount']} to {arguments['to']}, key {step.key if step else 'none'}")
    return {"content": [{"type": "text", "text": "paid"}]}


async def message(kd: killick.Client) -> None:
    """One message, as Claude Code takes it: it writes its transcript, and wants the tool."""
    store, [till] = KillickSessionStore(kd), gated([pay], tools={"pay": "idempotent"})
    create_sdk_mcp_server("till", tools=[till])
    said = {"type": "user", "uuid": "b2f1", "timestamp": "2026-01-01T08:00:00.000Z"}
    said |= {"message": {"role": "user", "content": "Pay ann 5."}}
    where = {"project_key": project_key_for_directory("/srv/claims"), "session_id": SESSION}
    async with kd.host("message-1", agent="claude"):
        await store.append(where, [said])
        await till.handler({"to": "ann", "amount": 5})


async def main() -> None:
    for _ in ("the first machine", "another one, after that died"):
        with killick.open("killick.db") as kd:
            await message(kd)
            found = await list_sessions_from_store(KillickSessionStore(kd), directory="/srv/claims")
            print([session.first_prompt for session in found])


if __name__ == "__main__":
    asyncio.run(main())
