"""A turn's journal is a few lines, however large the conversation is."""

from __future__ import annotations

import asyncio

import httpx

import killick
from killick.adapters.restate import Restate
from neighbours import engine_agents as agents
from neighbours.restate import plain
from neighbours.restate.restate_server import RestateServer, free_port
from neighbours.restate.serve import served

CALLS = 300
PLAIN_CALLS = 20


def journals(server: RestateServer, where: str) -> tuple[int, int]:
    """How many entries the journals of some invocations hold together, and of how many bytes."""
    query = (
        "SELECT count(1) AS entries, sum(raw_length) AS bytes FROM sys_journal "
        f"WHERE id IN (SELECT id FROM sys_invocation WHERE {where})"
    )
    [row] = server.query(query)
    return row["entries"], row["bytes"]


def test_three_hundred_calls_over_a_large_conversation_leave_less_in_restate_than_one_plain_call(
    server: RestateServer, store: str, port: int
) -> None:
    async def plainly() -> None:
        there = free_port()
        async with served(plain.app, there):
            await asyncio.to_thread(server.register, there)
            told = await asyncio.to_thread(httpx.post, f"{server.ingress}/plain/talk", json=PLAIN_CALLS, timeout=60)
            assert told.json() == 200 + PLAIN_CALLS

    async def with_killick() -> None:
        async with killick.open_async(store) as kd, Restate(kd, server.ingress) as engine, served(engine.app, port):
            await asyncio.to_thread(server.register, port)
            handle = await engine.start(agents.talker, CALLS, id="talk-1")
            assert await handle.result(900) == 200 + CALLS
            await engine.drain()

    asyncio.run(plainly())
    asyncio.run(with_killick())
    alone = journals(server, "target_service_name = 'plain' AND target_handler_name = 'talk'")
    ours = journals(server, "target_service_key = 'talk-1'")
    print(
        f"over 200 KB: {PLAIN_CALLS} calls of Restate's alone leave {alone[0]} entries of {alone[1]} bytes; "
        f"{CALLS} calls with Killick {ours[0]} entries of {ours[1]} bytes"
    )
    assert alone[1] > PLAIN_CALLS * 200_000
    assert ours[1] < 4_096
