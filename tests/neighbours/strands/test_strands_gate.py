"""Agents of Strands: what goes through the gate happens once, and what was said is not asked again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from strands import Agent, tool

import killick
from killick.adapters.strands import KillickSessions, gated, run
from killick.errors import DeclarationRefused
from killick.llm.external import attempt
from neighbours.strands.orders import ScriptedModel, call, said
from neighbours.trying import try_example, try_page

PAY = call("c1", "pay", order="A7")


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


class World:
    """What happened in it, and agents that make it happen."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fails = False
        self.keys: list[str] = []
        self.asked = 0

    def plain(self, *script: Any, tools: Any = (), **given: Any) -> Agent:
        @tool
        async def pay(order: str, amount: int = 5) -> str:
            """Pay for an order."""
            step = attempt()
            self.keys.append(step.key if step is not None else "")
            self.done.append((order, amount))
            if self.fails:
                raise LookupError("no money")
            return f"{amount} paid"

        def count(turn: int) -> None:
            self.asked += 1

        model = ScriptedModel(*script, before=count)
        return Agent(model=model, tools=[pay, *tools], callback_handler=None, agent_id="clerk", **given)

    def agent(self, *script: Any, errors: Any = "answer", **options: Any) -> Agent:
        return gated(self.plain(*script), tools={"pay": options} if options else None, errors=errors)


@pytest.fixture
def world() -> World:
    return World()


def results(agent: Agent) -> list[Any]:
    found = [part["toolResult"] for each in agent.messages for part in each["content"] if "toolResult" in part]
    return [(each["status"], each["content"]) for each in found]


async def test_a_turn_that_runs_again_asks_no_model_and_calls_no_tool(kd: killick.Client, world: World) -> None:
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            assert said(await run(world.agent(PAY, "done"), "pay A7")) == "done"
    assert world.done == [("A7", 5)]
    assert world.asked == 2
    assert world.keys[0].startswith("thread:")
    assert kd.state("thread").trace[0].usage.tokens_in == 7


async def test_a_stream_comes_as_it_is_said_and_again_from_the_record(kd: killick.Client, world: World) -> None:
    heard = []
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            events = [event async for event in world.agent(PAY, "one two three").stream_async("pay A7")]
        heard.append([event["data"] for event in events if "data" in event])
    assert heard == [["one ", "two ", "three "]] * 2
    assert world.asked == 2


@pytest.mark.parametrize("errors", ["answer", "ask"])
async def test_a_tools_error_is_its_answer_or_a_question_and_not_repeated(
    kd: killick.Client, world: World, errors: Any
) -> None:
    world.fails, told = True, []
    for _ in range(2):
        agent = world.agent(PAY, "sorry", errors=errors)
        async with kd.host("thread", agent="clerk"):
            if errors == "ask":
                with pytest.raises(killick.RunWaiting, match="Did it happen"):
                    await run(agent, "pay A7")
                assert agent.messages == []
                continue
            await run(agent, "pay A7")
        told += results(agent)
    assert told == [("error", [{"text": "LookupError: no money"}])] * len(told)
    assert len(told) == (2 if errors == "answer" else 0)
    assert world.done == [("A7", 5)]


async def test_what_a_contract_rejects_is_told_to_the_model_and_not_done(kd: killick.Client, world: World) -> None:
    contract = killick.Contract("orders", [killick.rules.arguments("pay", amount={"max": 100})])
    agent = world.agent(call("c1", "pay", order="A7", amount=500), "too much")
    async with kd.host("thread", agent="clerk", contract=contract):
        await run(agent, "pay A7")
    [(status, content)] = results(agent)
    assert status == "error"
    assert "rejected" in content[0]["text"]
    assert world.done == []


@pytest.mark.parametrize("parallel", [1, 3])
async def test_a_person_is_asked_and_may_change_what_is_done(kd: killick.Client, world: World, parallel: int) -> None:
    looked: list[str] = []

    @tool
    async def look(what: str) -> str:
        """Look at something."""
        looked.append(what)
        return what

    async def turn(agent: Agent) -> str:
        async with kd.host("thread", agent="clerk"):
            return said(await run(agent, "pay A7"))

    wishes = [PAY, *(call(f"l{n}", "look", what=f"{n}") for n in range(1, parallel))]
    agent = gated(world.plain(wishes, "done", tools=[look]), tools={"pay": {"approve": "managers"}})
    with pytest.raises(killick.RunWaiting) as waiting:
        await turn(agent)
    assert waiting.value.waits
    assert world.done == []
    kd.answer("thread", "edit", value={"order": "A7", "amount": 4}, by="managers")
    assert await turn(agent) == "done"
    assert world.done == [("A7", 4)]
    assert len(looked) == parallel - 1


async def test_inside_a_killick_agent_the_whole_loop_replays(kd: killick.Client, world: World) -> None:
    @killick.agent(name="strands_clerk")
    async def clerk(task: killick.Run, order: str) -> str:
        async with task.hosting():
            return said(await run(world.agent(PAY, "done", approve="managers"), f"pay {order}"))

    with pytest.raises(killick.RunWaiting):
        await kd.as_async().run(clerk, "A7", id="r")
    kd.answer("r", "approve", by="managers")
    assert await kd.as_async().run(clerk, "A7", id="r") == "done"
    assert world.done == [("A7", 5)]


async def test_an_agent_as_a_tool_and_a_call_in_code_go_through_the_gate(kd: killick.Client, world: World) -> None:
    for _ in range(2):
        inner = world.plain(call("c1", "pay", order="inner"), "inner done", name="inner", description="Pays.")
        boss = gated(world.plain(call("c2", "inner", input="pay"), "boss done", tools=[inner.as_tool()]))
        async with kd.host("thread", agent="clerk"):
            assert said(await run(boss, "pay inner")) == "boss done"
    assert world.done == [("inner", 5)]
    assert world.asked == 4


async def test_a_conversation_goes_on_in_another_process(tmp_path: Path, world: World) -> None:
    for turn in range(2):
        sessions, agent = KillickSessions(tmp_path / "killick.db"), world.plain("hello")
        assert await sessions.load("ann", agent) is (turn > 0)
        assert len(agent.messages) == 2 * turn
        assert agent.state.get("turn") == (None if turn == 0 else 0)
        await agent.invoke_async("hi")
        agent.state.set("turn", turn)
        await sessions.save("ann", agent)
        sessions.close()
    sessions = KillickSessions(tmp_path / "killick.db")
    await sessions.forget("ann")
    assert not await sessions.load("ann", world.plain("hello"))
    sessions.close()


async def test_gating_twice_is_gating_once_and_without_a_host_nothing_runs(kd: killick.Client, world: World) -> None:
    async with kd.host("thread", agent="clerk"):
        assert said(await run(gated(world.agent(PAY, "done")), "pay A7")) == "done"
    assert [step.name for step in kd.state("thread").fold.steps].count("pay") == 1
    with pytest.raises(DeclarationRefused, match=r"kd\.host"):
        await run(world.agent(PAY, "done"), "pay A7")
    assert world.done == [("A7", 5)]


def test_the_page_shows_it(tmp_path: Path) -> None:
    try_page("strands", tmp_path)


def test_the_example_pays_once_however_often_it_runs(tmp_path: Path) -> None:
    assert [try_example("strands_agent", tmp_path).count("paying 5 for A7") for _ in range(2)] == [1, 0]
