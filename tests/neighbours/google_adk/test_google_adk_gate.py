"""Agents of Google ADK: what goes through the gate happens once, and what was said is not asked again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, ParallelAgent, RunConfig, SequentialAgent
from google.adk.agents.run_config import StreamingMode
from google.adk.runners import InMemoryRunner
from google.adk.tools import ToolContext
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.base_toolset import BaseToolset
from google.adk.tools.function_tool import FunctionTool
from google.genai import types

import killick
from killick.adapters.google_adk import gated, run
from killick.errors import DeclarationRefused
from killick.llm.external import attempt, here
from neighbours.google_adk.orders import ScriptedLlm, call, said
from neighbours.trying import try_example, try_page

pytestmark = pytest.mark.filterwarnings("ignore")  # of experiments and deprecations of its own

PAY = call("pay", order="A7")


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
        self.asked: list[int] = []

    def llm(self, *script: Any) -> ScriptedLlm:
        return ScriptedLlm(script=list(script), before=self.asked.append)

    def plain(self, *script: Any, name: str = "clerk", **given: Any) -> LlmAgent:
        async def pay(order: str, tool_context: ToolContext, amount: int = 5) -> str:
            """Pay for an order."""
            step = attempt()
            self.keys.append(step.key if step is not None else "")
            self.done.append((order, amount))
            if self.fails:
                raise ValueError("no money")
            tool_context.state["paid"] = amount
            return f"{amount} paid"

        return LlmAgent(name=name, model=self.llm(*script), **{"tools": [pay], **given})

    def agent(self, *script: Any, errors: Any = "answer", **options: Any) -> LlmAgent:
        return gated(self.plain(*script), tools={"pay": options} if options else None, errors=errors)


@pytest.fixture
def world() -> World:
    return World()


async def events(agent: BaseAgent, **given: Any) -> list[Any]:
    runner = InMemoryRunner(agent, app_name="orders")
    await runner.session_service.create_session(app_name="orders", user_id="ann", session_id="s")
    turn = {"user_id": "ann", "session_id": "s", "new_message": said("pay A7"), **given}
    return [event async for event in (run(runner, **turn) if here() else runner.run_async(**turn))]


async def text(agent: BaseAgent) -> str:
    return str((await events(agent))[-1].content.parts[0].text)


def responses(found: list[Any]) -> list[Any]:
    return [each.response for event in found for each in event.get_function_responses()]


async def test_a_turn_that_runs_again_asks_no_model_and_calls_no_tool(kd: killick.Client, world: World) -> None:
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            assert await text(world.agent(PAY, "done")) == "done"
    assert world.done == [("A7", 5)]
    assert len(world.asked) == 2
    assert world.keys[0].startswith("thread:")
    assert kd.state("thread").trace[0].usage.tokens_in == 7


async def test_the_state_that_a_tool_changed_is_changed_from_the_record_too(kd: killick.Client, world: World) -> None:
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            found = await events(world.agent(PAY, "done"))
        assert [event.actions.state_delta for event in found if event.actions.state_delta] == [{"paid": 5}]
    assert world.done == [("A7", 5)]


async def test_a_stream_comes_as_it_is_said_and_whole_from_the_record(kd: killick.Client, world: World) -> None:
    heard = []
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            found = await events(
                world.agent(PAY, "one two three"), run_config=RunConfig(streaming_mode=StreamingMode.SSE)
            )
        heard.append([e.content.parts[0].text for e in found if e.content.parts[0].text])
    assert heard == [["one", "two", "three", "one two three"], ["one two three"]]
    assert world.done == [("A7", 5)]
    assert len(world.asked) == 2


async def test_a_tools_error_is_its_answer_in_the_same_words_now_and_later(kd: killick.Client, world: World) -> None:
    world.fails, told = True, []
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            told += responses(await events(world.agent(PAY, "sorry")))
    assert told == [{"error": "ValueError: no money"}] * 2
    assert world.done == [("A7", 5)]


async def test_an_error_may_be_a_question_to_a_person(kd: killick.Client, world: World) -> None:
    world.fails = True
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            with pytest.raises(killick.RunWaiting, match="Did it happen"):
                await events(world.agent(PAY, "sorry", errors="ask"))
    assert world.done == [("A7", 5)]


async def test_what_a_contract_rejects_is_told_to_the_model_and_not_done(kd: killick.Client, world: World) -> None:
    contract = killick.Contract("orders", [killick.rules.arguments("pay", amount={"max": 100})])
    async with kd.host("thread", agent="clerk", contract=contract):
        [told] = responses(await events(world.agent(call("pay", order="A7", amount=500), "too much")))
    assert "rejected" in told["error"]
    assert world.done == []


@pytest.mark.parametrize("parallel", [1, 3])
async def test_a_person_is_asked_and_may_change_what_is_done(kd: killick.Client, world: World, parallel: int) -> None:
    """Calls that need no person are done and on record, before the turn ends."""
    looked: list[str] = []

    async def look(what: str) -> str:
        """Look at something."""
        looked.append(what)
        return what

    async def turn() -> str:
        wishes = [PAY, *(call("look", what=f"{n}") for n in range(1, parallel))]
        agent = world.plain(wishes, "done")
        agent.tools.append(look)
        async with kd.host("thread", agent="clerk"):
            return await text(gated(agent, tools={"pay": {"approve": "managers"}}))

    with pytest.raises(killick.RunWaiting) as waiting:
        await turn()
    assert waiting.value.waits
    assert world.done == []
    kd.answer("thread", "edit", value={"order": "A7", "amount": 4}, by="managers")
    assert await turn() == "done"
    assert world.done == [("A7", 4)]
    assert len(looked) == parallel - 1


async def test_inside_a_killick_agent_the_whole_loop_replays(kd: killick.Client, world: World) -> None:
    @killick.agent(name="adk_clerk")
    async def clerk(run: killick.Run, order: str) -> str:
        async with run.hosting():
            return await text(world.agent(PAY, "done", approve="managers"))

    with pytest.raises(killick.RunWaiting):
        await kd.as_async().run(clerk, "A7", id="r")
    kd.answer("r", "approve", by="managers")
    assert await kd.as_async().run(clerk, "A7", id="r") == "done"
    assert world.done == [("A7", 5)]


@pytest.mark.filterwarnings("ignore")  # workflows are to replace two of these kinds
async def test_sub_agents_agents_as_tools_and_toolsets_go_through_the_gate(kd: killick.Client, world: World) -> None:
    class Box(BaseToolset):
        async def get_tools(self, readonly_context: Any = None) -> list[Any]:
            async def look(order: str) -> str:
                """Look at an order."""
                world.done.append("looked")
                return "seen"

            return [FunctionTool(look)]

    def tree() -> BaseAgent:
        inner = world.plain(call("pay", order="inner"), "inner done", name="inner")
        boss = world.plain(call("inner", request="pay inner"), "boss done", name="boss", tools=[AgentTool(inner)])
        boxed = world.plain(call("look", order="A7"), "seen", name="boxed", tools=[Box()])
        last = ParallelAgent(name="last", sub_agents=[world.plain(PAY, "last done", name="one"), boxed])
        return gated(SequentialAgent(name="all", sub_agents=[boss, last]))

    asked = []
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            assert await text(tree()) in ("last done", "seen")
        asked.append(len(world.asked))
    assert sorted(map(str, world.done)) == ["('A7', 5)", "('inner', 5)", "looked"]
    assert asked[0] == asked[1] == 8


async def test_a_confirmation_of_adks_own_is_not_the_tools_result(kd: killick.Client, world: World) -> None:
    """It answers a call with the demand for a confirmation, and calls it once that came."""

    def agent() -> LlmAgent:
        pays = world.plain().tools[0]
        tool = FunctionTool(pays, require_confirmation=True)
        return gated(world.plain(PAY, "done", "done", tools=[tool]))

    runner = InMemoryRunner(agent(), app_name="orders")
    await runner.session_service.create_session(app_name="orders", user_id="ann", session_id="s")
    async with kd.host("thread", agent="clerk"):
        given = {"user_id": "ann", "session_id": "s"}
        found = [each async for each in run(runner, **given, new_message=said("pay A7"))]
        [asked] = [c for e in found for c in e.get_function_calls() if c.name == "adk_request_confirmation"]
        assert world.done == []
        yes = types.FunctionResponse(id=asked.id, name=asked.name, response={"confirmed": True})
        answer = types.Content(role="user", parts=[types.Part(function_response=yes)])
        assert [each async for each in run(runner, **given, new_message=answer)]
    assert world.done == [("A7", 5)]


async def test_gating_twice_is_gating_once_and_what_cannot_be_gated_is_refused(
    kd: killick.Client, world: World
) -> None:
    async with kd.host("thread", agent="clerk"):
        assert await text(gated(world.agent(PAY, "done"))) == "done"
    assert [step.name for step in kd.state("thread").fold.steps if step.name != "guests"].count("pay") == 1

    class Own(BaseAgent):
        pass

    with pytest.raises(DeclarationRefused, match="one by one"):
        gated(Own(name="own"))


async def test_without_a_host_nothing_runs(world: World) -> None:
    with pytest.raises(BaseException, match=r"kd\.host"):
        await events(world.agent(PAY, "done"))
    assert world.done == []
    assert world.asked == []


def test_the_page_shows_it(tmp_path: Path) -> None:
    try_page("google-adk", tmp_path)


def test_the_example_pays_once_however_often_it_runs(tmp_path: Path) -> None:
    assert [try_example("google_adk_agent", tmp_path).count("paying 5 for A7") for _ in range(2)] == [1, 0]
