"""Agents and teams of AutoGen whose tools and models go through a host, and whose states are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, ToolCallExecutionEvent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_core.tools import StaticWorkbench, TextResultContent, ToolResult, Workbench
from pydantic import BaseModel

import killick
from killick.adapters.autogen import KillickModelClient, KillickStates, KillickWorkbench, run
from killick.errors import DeclarationRefused
from killick.llm.external import attempt, here
from neighbours.autogen.scripted_client import ScriptedClient, call


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


PAY = call("c1", "pay", order="A7")


class World:
    """What happened in it, and agents that make it happen."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fails = False
        self.keys: list[str] = []

    def agent(
        self, *script: Any, stream: bool = False, errors: Any = "answer", **options: Any
    ) -> tuple[AssistantAgent, ScriptedClient]:
        async def pay(order: str, amount: int = 5) -> str:
            """Pay for an order."""
            step = attempt()
            self.keys.append(step.key if step is not None else "")
            self.done.append((order, amount))
            if self.fails:
                raise ValueError("no money")
            return f"{amount} paid"

        client = ScriptedClient(*script)
        workbench = KillickWorkbench([pay], options={"pay": options} if options else None, errors=errors)
        agent = AssistantAgent(
            "clerk",
            KillickModelClient(client),
            workbench=workbench,
            max_tool_iterations=5,
            model_client_stream=stream,
        )
        return agent, client


@pytest.fixture
def world() -> World:
    return World()


async def said(agent: Any, task: str = "pay A7") -> str:
    return str((await (run(agent, task=task) if here() else agent.run(task=task))).messages[-1].content)


async def test_a_turn_that_runs_again_asks_no_model_and_calls_no_tool(kd: killick.Client, world: World) -> None:
    for _ in range(2):
        agent, client = world.agent(PAY, "done")
        async with kd.host("thread", agent="clerk"):
            assert await said(agent) == "done"
    assert world.done == [("A7", 5)]
    assert client.asked == 0
    assert world.keys[0].startswith("thread:")
    assert kd.state("thread").trace[0].usage.tokens_in == 7


async def test_a_stream_comes_as_it_is_said_and_again_from_the_record(kd: killick.Client, world: World) -> None:
    heard = []
    for _ in range(2):
        agent, client = world.agent(PAY, "one two three", stream=True)
        async with kd.host("thread", agent="clerk"):
            events = [event async for event in agent.run_stream(task="pay A7")]
        heard.append([event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)])
    assert heard == [["one ", "two ", "three "]] * 2
    assert world.done == [("A7", 5)]
    assert client.asked == 0


async def test_a_failure_is_told_to_the_model_in_the_same_words_now_and_later(kd: killick.Client, world: World) -> None:
    world.fails, told = True, []
    for _ in range(2):
        agent, _ = world.agent(PAY, "sorry", effect="reads", retry=killick.Retry(attempts=1))
        async with kd.host("thread", agent="clerk"):
            result = await agent.run(task="pay A7")
        told.append([event.content for event in result.messages if isinstance(event, ToolCallExecutionEvent)])
    assert told[0] == told[1]
    assert told[0][0][0].is_error
    assert told[0][0][0].content == "ValueError: no money"
    assert world.done == [("A7", 5)]


async def test_arguments_that_do_not_fit_are_the_models_to_mend(kd: killick.Client, world: World) -> None:
    agent, _ = world.agent(
        call("c1", "pay", order="A7", amount="lots"), call("c2", "pay", order="A7", amount=6), "done"
    )
    async with kd.host("thread", agent="clerk"):
        assert await said(agent) == "done"
    assert world.done == [("A7", 6)]


async def test_what_a_contract_rejects_is_told_to_the_model_and_not_done(kd: killick.Client, world: World) -> None:
    agent, _ = world.agent(call("c1", "pay", order="A7", amount=500), "too much, then")
    contract = killick.Contract("orders", [killick.rules.arguments("pay", amount={"max": 100})])
    async with kd.host("thread", agent="clerk", contract=contract):
        result = await agent.run(task="pay A7")
    told = next(event for event in result.messages if isinstance(event, ToolCallExecutionEvent)).content[0]
    assert told.is_error
    assert "rejected" in told.content
    assert world.done == []


def in_team(agent: AssistantAgent) -> RoundRobinGroupChat:
    return RoundRobinGroupChat([agent], termination_condition=TextMentionTermination("done"))


@pytest.mark.parametrize("made", [lambda agent: agent, in_team], ids=["agent", "team"])
async def test_a_person_is_asked_and_may_change_what_is_done(kd: killick.Client, world: World, made: Any) -> None:
    async def turn() -> str:
        agent, _ = world.agent(PAY, "done", approve="managers")
        async with kd.host("thread", agent="clerk"):
            return await said(made(agent))

    with pytest.raises(killick.RunWaiting) as waiting:
        await turn()
    assert waiting.value.waits
    assert world.done == []
    kd.answer("thread", "edit", value={"order": "A7", "amount": 4}, by="managers")
    assert await turn() == "done"
    assert world.done == [("A7", 4)]


async def test_an_agent_that_asks_no_model_after_its_tools_waits_too_and_its_state_is_not_kept(
    kd: killick.Client, world: World
) -> None:
    async def turn(run_it: Any) -> Any:
        agent, _ = world.agent(PAY, approve="managers")
        agent._max_tool_iterations = 1
        async with kd.host("thread", agent="clerk"):
            done = await run_it(agent, task="pay A7")
            await KillickStates(kd).save("thread", agent)
            return done.messages[-1].content

    with pytest.raises(killick.RunWaiting):
        await turn(run)
    with pytest.raises(killick.RunWaiting):
        await turn(AssistantAgent.run)
    kd.answer("thread", "approve", by="managers")
    assert await turn(run) == "5 paid"


@pytest.mark.parametrize("made", [lambda agent: agent, in_team], ids=["agent", "team"])
async def test_inside_a_killick_agent_the_whole_loop_replays(kd: killick.Client, world: World, made: Any) -> None:
    @killick.agent(name="autogen_clerk")
    async def clerk(run: killick.Run, order: str) -> str:
        agent, _ = world.agent(PAY, "done", approve="managers")
        async with run.hosting():
            return await said(made(agent), f"pay {order}")

    with pytest.raises(killick.RunWaiting):
        await kd.as_async().run(clerk, "A7", id="r")
    kd.answer("r", "approve", by="managers")
    assert await kd.as_async().run(clerk, "A7", id="r") == "done"
    assert world.done == [("A7", 5)]


async def test_another_workbench_goes_through_the_gate_with_what_it_answers(kd: killick.Client) -> None:
    class Far(StaticWorkbench):
        calls = 0

        async def call_tool(
            self,
            name: str,
            arguments: Mapping[str, Any] | None = None,
            cancellation_token: CancellationToken | None = None,
            call_id: str | None = None,
        ) -> ToolResult:
            self.calls += 1
            wrong = (arguments or {}).get("order") != "A7"
            return ToolResult(name=name, result=[TextResultContent(content="here")], is_error=wrong)

    async def look_up(order: str) -> str:
        """Look an order up."""
        return "never called"

    inner: Workbench = Far(KillickWorkbench([look_up])._tools.values())
    gated = KillickWorkbench(inner, options={"look_up": {"effect": "reads"}})
    assert [tool["name"] for tool in await gated.list_tools()] == ["look_up"]
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            found = await gated.call_tool("look_up", {"order": "A7"}, call_id="c1")
            missed = await gated.call_tool("look_up", {"order": "B8"}, call_id="c2")
        assert (found.to_text(), found.is_error, missed.to_text(), missed.is_error) == ("here", False, "here", True)
    assert inner.calls == 2
    assert (await gated.call_tool("nothing", {})).is_error


async def test_an_answer_in_a_declared_form_and_a_model_that_failed(kd: killick.Client) -> None:
    class Verdict(BaseModel):
        pays: bool

    def refused(turn: int) -> None:
        raise LookupError("no such model")

    inner = ScriptedClient('{"pays": true}', before=refused)
    client, asked = KillickModelClient(inner), [UserMessage(content="pay?", source="ann")]
    async with kd.host("thread", agent="clerk"):
        with pytest.raises(LookupError, match="no such model"):
            await client.create(asked, json_output=Verdict)
    inner.before = lambda turn: None
    for _ in range(2):
        async with kd.host("thread", agent="clerk"):
            reply = await client.create(asked, json_output=Verdict)
        assert Verdict.model_validate_json(str(reply.content)) == Verdict(pays=True)
    assert inner.asked == 1


async def test_without_a_host_nothing_runs(world: World) -> None:
    async def pay(order: str) -> str:
        """Pay for an order."""
        world.done.append(order)
        return "paid"

    gates = KillickWorkbench([pay])
    with pytest.raises(DeclarationRefused, match=r"kd\.host"):
        await said(AssistantAgent("clerk", KillickModelClient(ScriptedClient(PAY)), workbench=gates))
    told = await said(AssistantAgent("clerk", ScriptedClient(PAY), workbench=gates))
    assert "kd.host" in told
    assert world.done == []


async def test_a_team_goes_on_with_the_state_that_was_kept_in_another_process(tmp_path: Path) -> None:
    def team() -> RoundRobinGroupChat:
        agent = AssistantAgent("clerk", ScriptedClient("one", "two"))
        return RoundRobinGroupChat([agent], max_turns=1)

    for turn, expected in enumerate(["one", "two"]):
        states, orders = KillickStates(tmp_path / "killick.db"), team()
        assert await states.load("ann", orders) is (turn > 0)
        assert await said(orders, f"turn {turn}") == expected
        await states.save("ann", orders)
        states.close()
    states = KillickStates(tmp_path / "killick.db")
    await states.forget("ann")
    assert not await states.load("ann", team())
    states.close()


@pytest.mark.parametrize("effect", ["reads", "at_most_once"])
async def test_an_agent_as_a_tool_waits_with_the_tool_inside_of_it(
    kd: killick.Client, world: World, effect: str
) -> None:
    """Entered again, the inner agent's calls come from the record: by itself, or when a person says so."""

    async def boss() -> str:
        clerk, _ = world.agent(call("inner", "pay", order="A7"), "it is paid", approve="managers")
        workbench = KillickWorkbench([AgentTool(clerk)], options={"clerk": {"effect": effect}})
        script = ScriptedClient(call("outer", "clerk", task="pay A7"), "all done")
        agent = AssistantAgent("boss", KillickModelClient(script), workbench=workbench, max_tool_iterations=5)
        async with asyncio.timeout(60), kd.host("thread", agent="boss"):
            return await said(agent)

    for _ in range(2 if effect == "reads" else 1):
        with pytest.raises(killick.RunWaiting, match="pay"):
            await boss()
    await kd.as_async().answer(kd.inbox()[0], "approve", by="ann")
    if effect == "at_most_once":
        with pytest.raises(killick.RunWaiting, match=r"clerk.*left while step"):
            await boss()
        await kd.as_async().answer(kd.inbox()[0], "not", by="ann")
    assert await boss() == "all done"
    assert world.done == [("A7", 5)]


@pytest.mark.parametrize("errors", ["answer", "ask"])
async def test_an_error_of_a_tool_of_which_nothing_is_said_is_its_answer_and_not_repeated(
    kd: killick.Client, world: World, errors: Any
) -> None:
    world.fails, told = True, []
    for _ in range(2):
        agent, _ = world.agent(PAY, "sorry", errors=errors)
        async with kd.host("thread", agent="clerk"):
            if errors == "ask":
                with pytest.raises(killick.RunWaiting, match="Did it happen"):
                    await run(agent, task="pay A7")
                continue
            result = await run(agent, task="pay A7")
        told += [event.content[0] for event in result.messages if isinstance(event, ToolCallExecutionEvent)]
    assert [(each.is_error, each.content) for each in told] == [(True, "ValueError: no money")] * len(told)
    assert len(told) == (2 if errors == "answer" else 0)
    assert world.done == [("A7", 5)]
