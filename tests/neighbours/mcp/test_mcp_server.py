"""`killick mcp` under the SDK's own client: a model reads what `--json` prints, and approves for no person."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters, stdio_client

import killick

READS = {"list", "show", "why", "diff", "find", "inbox"}
WRITES = {"answer", "pause", "resume", "fork"}


@killick.tool(approve="managers")
async def pay(amount: int) -> str:
    return f"paid {amount}"


@killick.tool(approve="model:reviewer")
async def publish(text: str) -> str:
    return f"published {text}"


@killick.tool
async def ring(bell: str) -> str:
    raise ConnectionError("the line is dead")


@killick.agent
async def paying(run: killick.Run, amount: int) -> str:
    return await run.call(pay, amount)


@killick.agent
async def publishing(run: killick.Run, text: str) -> str:
    return await run.call(publish, text)


@killick.agent
async def ringing(run: killick.Run, bell: str) -> str:
    return await run.call(ring, bell)


@killick.agent
async def asking(run: killick.Run, _: None) -> str:
    return str((await run.ask("Which color?", options=["red", "blue"])).value)


@killick.agent(contract=killick.Contract("brake", [killick.rules.deny("ring")], rejections=2))
async def looping(run: killick.Run, _: None) -> None:
    for bell in ("front", "back", "side"):
        with contextlib.suppress(killick.Rejected):
            await run.call(ring, bell)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with a run that waits for each kind of answer."""
    file = tmp_path / "killick.db"
    with killick.open(file) as kd:
        for agent, given in ((paying, 5), (publishing, "it"), (ringing, "front"), (asking, None)):
            with pytest.raises(killick.RunWaiting):
                kd.run(agent, given, id=agent.name)
    return file


Call = Callable[..., Awaitable[Any]]


def talk(store: Path, do: Callable[[Client, Call], Awaitable[Any]], *options: str) -> Any:
    """Starts the server as an IDE does, and talks to it."""
    command = ["-m", "killick", "mcp", "--store", str(store), *options]

    async def talking() -> Any:
        async with asyncio.timeout(60), Client(
            stdio_client(StdioServerParameters(command=sys.executable, args=command))
        ) as client:  # fmt: skip

            async def call(name: str, **given: Any) -> Any:
                result = await client.call_tool(name, given)
                text = "".join(part.text for part in result.content)
                return f"error: {text}" if result.is_error else json.loads(text)

            return await do(client, call)

    return asyncio.run(talking())


def printed(store: Path, *command: str) -> Any:
    told = subprocess.run(
        [sys.executable, "-m", "killick", *command, "--store", str(store), "--json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(told.stdout)


def test_a_model_only_reads_unless_the_operator_allows_more(store: Path) -> None:
    async def tools(client: Client, call: Call) -> tuple[set[str], Any]:
        offered = (await client.list_tools()).tools
        reads = {tool.name for tool in offered if tool.annotations and tool.annotations.read_only_hint}
        return {tool.name for tool in offered}, reads

    assert talk(store, tools) == (READS, READS)
    assert talk(store, tools, "--allow", "pause,answer") == (READS | {"pause", "answer"}, READS)
    assert talk(store, tools, "--allow", ",".join(WRITES)) == (READS | WRITES, READS)


def test_its_documents_are_those_of_the_command_line(store: Path) -> None:
    async def read(client: Client, call: Call) -> dict[str, Any]:
        return {
            "list": await call("list"),
            "show": await call("show", run="paying"),
            "diff": await call("diff", run="paying", places=["1:before", "now"]),
            "find": await call("find", kind="calls", tool="pay"),
            "inbox": await call("inbox"),
            "why": await call("why", run="ringing", step="1"),
            "missing": await call("why", run="ringing", step="9"),
        }

    found = talk(store, read)
    listed = [{name: value for name, value in each.items() if name != "next"} for each in printed(store, "ps")]
    assert found["list"] == listed
    shown = printed(store, "show", "paying")
    for each in (found["show"], shown):
        for entry in each["entries"]:
            entry.pop("duration_seconds", None)  # it still waits
    assert found["show"] == shown
    assert found["diff"] == printed(store, "time", "diff", "paying", "1:before", "now")
    assert found["find"] == printed(store, "find", "calls", "pay")
    asked = [{name: value for name, value in each.items() if name != "commands"} for each in printed(store, "inbox")]
    assert found["inbox"] == asked
    assert "ConnectionError" in " ".join(found["why"]["why"])
    assert found["missing"].startswith("error: ")


def test_an_answer_of_a_model_is_marked_and_one_that_a_person_owes_is_refused(store: Path) -> None:
    async def answer(client: Client, call: Call) -> list[Any]:
        return [
            await call("answer", wait="paying", verb="approve"),
            await call("answer", wait="ringing", verb="not"),
            await call("answer", wait="publishing", verb="approve", comment="it is fine"),
            await call("answer", wait="asking", verb="respond", value="red"),
        ]

    personal, doubt, own, open_to_all = talk(store, answer, "--allow", "answer", "--name", "reviewer")
    assert "paying:1: model:reviewer may not answer this; it is asked of managers" in personal
    assert "ringing:1: model:reviewer may not answer this; it is asked of" in doubt
    assert own["by"] == open_to_all["by"] == "model:reviewer"
    with killick.open(store) as kd:
        assert {wait.run for wait in kd.inbox()} == {"paying", "ringing"}
        assert kd.run(publishing, "it", id="publishing") == "published it"
        assert kd.run(asking, None, id="asking") == "red"
        [said] = kd.find.answers(run="publishing")
        assert said.by == "model:reviewer"


def test_a_model_pauses_resumes_and_forks_under_its_name(store: Path) -> None:
    async def operate(client: Client, call: Call) -> list[Any]:
        return [
            await call("pause", run="paying", because="the bank is closed"),
            await call("resume", run="paying", because="it is open"),
            await call("fork", run="paying", at="start", because="to compare"),
            await call("pause", run="nowhere", because="why not"),
            await call("resume", run="looping", because="trust me"),
            await call("fork", run="looping", at="start", because="another way"),
        ]

    with killick.open(store) as kd, pytest.raises(killick.RunWaiting):
        kd.run(looping, None, id="looping")
    paused, resumed, forked, unknown, *braked = talk(store, operate, "--allow", "pause, resume, fork")
    assert (paused["status"], paused["by"]) == ("paused", "model:mcp")
    assert resumed["status"] == "waiting"
    assert (forked["parent"], forked["at"]) == ("paying", "start")
    assert "nowhere: no such run" in unknown
    assert all("looping: it was paused by its contract" in each and "Ask a person" in each for each in braked)
    with killick.open(store) as kd:
        assert kd.info("looping").status == "paused"
        assert forked["run"] in {each.id for each in kd.list()}
