"""Fuzzing of the MCP server: what a model calls is answered, or refused in Killick's words or by the SDK's checks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import ValidationError

import killick
from fuzz.fuzzing import Target, hunt, known, tried
from killick.adapters.mcp_server import server
from killick.errors import KillickError
from killick.store import MemoryStore
from seeds import repeats


@killick.tool(effect="idempotent")
async def fuzz_call(text: str) -> str:
    if text == "fails":
        raise ValueError(text)
    return text


@killick.agent
async def fuzzed(run: killick.Run, text: str) -> str:
    await run.call(fuzz_call, text)
    await run.update(said=text)
    return str((await run.ask("Which color?", options=["red", "blue"])).value)


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("list", {"status": "waiting,failed", "agent": "fuzzed", "limit": 5}),
    ("show", {"run": "r1", "step": "1"}),
    ("why", {"run": "r2", "step": "1"}),
    ("diff", {"run": "r1", "places": ["1:before", "now"]}),
    ("diff", {"run": "r1", "against": "r2"}),
    ("find", {"kind": "calls", "tool": "fuzz_call", "where": {"text": "hello"}, "run": "r1", "limit": 3}),
    ("find", {"kind": "answers", "limit": 1}),
    ("inbox", {"to": "mia", "limit": 2}),
    ("answer", {"wait": "r1", "verb": "respond", "value": "red", "comment": "é"}),
    ("pause", {"run": "r1", "because": "x"}),
    ("resume", {"run": "r2", "because": "x"}),
    ("fork", {"run": "r1", "because": "x", "at": "1:before", "set": {"said": [1]}}),
]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with killick.Client(MemoryStore()) as kd:
        for run, text in (("r1", "hello"), ("r2", "fails")):
            with pytest.raises((killick.RunWaiting, killick.RunFailed)):
                kd.run(fuzzed, text, id=run)
        made = server(kd, allow=("answer", "pause", "resume", "fork"))

        def call(data: bytes) -> None:
            try:
                asked = json.loads(data)
            except (ValueError, RecursionError):
                return
            if not isinstance(asked, dict) or not isinstance(asked.get("arguments"), dict):
                return
            try:
                asyncio.run(made.call_tool(str(asked.get("tool")), asked["arguments"]))
            except ToolError as error:
                cause: BaseException | None = error
                while isinstance(cause, ToolError) and cause.__cause__ is not None:
                    cause = cause.__cause__
                if not isinstance(cause, ToolError | KillickError | ValidationError):
                    raise cause from None

        yield Target(
            "mcp", call, lambda: [json.dumps({"tool": name, "arguments": given}).encode() for name, given in CALLS]
        )


def test_what_failed_once_is_answered(target: Target) -> None:
    for data in (*target.seeds(), *(path.read_bytes() for path in known(target.name))):
        assert tried(target, data) is None, data


def test_what_a_seed_makes_of_calls_is_answered(target: Target) -> None:
    hunt(target, repeats(400, 10_000))
