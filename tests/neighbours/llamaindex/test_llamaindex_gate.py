"""Agents of LlamaIndex: what goes through the gate happens once, and what was said is not asked again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.react.formatter import ReActChatFormatter
from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import Memory
from llama_index.core.tools import FunctionTool
from workflows import Context
from workflows.events import HumanResponseEvent, InputRequiredEvent

import killick
from killick.adapters.llamaindex import KillickRuntime, gated
from killick.errors import DeclarationRefused
from killick.llm.external import attempt
from neighbours.llamaindex.orders import ScriptedModel, call
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

    def plain(self, *script: Any, tools: Any = (), kind: Any = FunctionAgent, **given: Any) -> Any:
        async def pay(order: str, amount: int = 5) -> str:
            """Pay for an order."""
            step = attempt()
            self.keys.append(step.key if step is not None else "")
            self.done.append((order, amount))
            if self.fails:
                raise LookupError("no money")
            return f"{amount} paid"

        return kind(**{"name": "clerk", **given}, tools=[pay, *tools], llm=self.model(*script))

    def model(self, *script: Any) -> ScriptedModel:
        def count(turn: int) -> None:
            self.asked += 1

        return ScriptedModel(script=list(script), before=count)

    def agent(self, *script: Any, errors: Any = "answer", **options: Any) -> Any:
        return gated(self.plain(*script), tools={"pay": options} if options else None, errors=errors)


@pytest.fixture
def world() -> World:
    return World()


async def turn(kd: killick.Client, make: Any, asked: str = "pay A7", **given: Any) -> str:
    """Runs an agent that is made anew, as another process would."""
    with KillickRuntime(kd).registering():
        return str(await make().run(asked, **{"run_id": "thread", **given}))


async def test_a_run_that_ended_is_not_done_again_and_its_result_is_the_same(kd: killick.Client, world: World) -> None:
    results = [await turn(kd, lambda: world.agent(PAY, "all done")) for _ in range(2)]
    assert results == ["all done", "all done"]
    assert (world.done, world.asked) == ([("A7", 5)], 2)
    [key] = world.keys
    assert key.startswith("thread:step_1.2.1:pay:")
    steps = kd.state("thread").fold.steps
    assert [(step.sort, step.name) for step in steps if step.sort in ("model", "tool")] == [
        ("model", "ScriptedModel.chat"), ("tool", "pay"), ("model", "ScriptedModel.chat"),
    ]  # fmt: skip
    assert [each.usage and each.usage.tokens_in for each in kd.state("thread").trace] == [7, None, 7]


async def test_a_tools_results_keep_their_form(kd: killick.Client, world: World) -> None:
    def count(order: str) -> dict[str, int]:
        """Count the parts of an order."""
        world.done.append(order)
        return {"parts": 3}

    tool = gated(FunctionTool.from_defaults(count))
    for _ in range(2):
        async with kd.host("thread"):
            output = await tool.acall("A7")
        assert (output.raw_output, output.content, output.is_error) == ({"parts": 3}, "{'parts': 3}", False)
    assert world.done == ["A7"]


@pytest.mark.parametrize("errors", ["answer", "ask"])
async def test_a_tools_error_is_its_answer_or_a_question_and_not_repeated(
    kd: killick.Client, world: World, errors: Any
) -> None:
    world.fails = True
    for _ in range(2):
        if errors == "ask":
            with pytest.raises(killick.RunWaiting, match="Did it happen"):
                await turn(kd, lambda: world.agent(PAY, "sorry", errors=errors))
            continue
        with KillickRuntime(kd).registering():
            handler = world.agent(PAY, "sorry", errors=errors).run("pay A7", run_id="thread")
        told = [event.tool_output async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        assert str(await handler) == "sorry"
        assert [(each.is_error, each.content) for each in told] in ([(True, "LookupError: no money")], [])
    assert world.done == [("A7", 5)]


async def test_what_a_contract_rejects_is_told_to_the_model_and_not_done(kd: killick.Client, world: World) -> None:
    contract = killick.Contract("orders", [killick.rules.arguments("pay", amount={"max": 100})])
    async with kd.host("thread", agent="clerk", contract=contract):
        assert await turn(kd, lambda: world.agent(call("c1", "pay", order="A7", amount=500), "too much")) == "too much"
    assert "rejected" in str((await KillickRuntime(kd).messages("thread"))[2].content)
    assert world.done == []


@pytest.mark.parametrize("parallel", [1, 3])
async def test_a_person_is_asked_and_may_change_what_is_done(kd: killick.Client, world: World, parallel: int) -> None:
    looked: list[str] = []

    async def look(what: str) -> str:
        """Look at something."""
        looked.append(what)
        return what

    wishes = [PAY, *(call(f"l{n}", "look", what=f"{n}") for n in range(1, parallel))]

    def make() -> Any:
        return gated(world.plain(wishes, "done", tools=[look]), tools={"pay": {"approve": "managers"}})

    with pytest.raises(killick.RunWaiting) as waiting:
        await turn(kd, make)
    assert waiting.value.waits
    assert world.done == []
    kd.answer("thread", "edit", value={"order": "A7", "amount": 4}, by="managers")
    assert await turn(kd, make) == "done"
    assert (world.done, world.asked) == ([("A7", 4)], 2)
    assert len(looked) == parallel - 1


async def test_equal_calls_are_different_calls_in_different_steps_of_a_run(kd: killick.Client, world: World) -> None:
    again = call("pay", "pay", order="A7")  # some integrations have the tool's name for an id
    for _ in range(2):
        assert await turn(kd, lambda: world.agent(again, again, "done")) == "done"
    assert world.done == [("A7", 5)] * 2


async def test_an_agent_whose_calls_have_random_ids_pays_once(kd: killick.Client, world: World) -> None:
    wish = 'Thought: I pay.\nAction: pay\nAction Input: {"order": "A7"}'
    script = (wish, "Thought: I can answer without using any more tools.\nAnswer: done")

    def make() -> Any:
        agent = world.plain(*script, kind=ReActAgent, formatter=ReActChatFormatter(observation_role="tool"))
        return gated(agent, tools={"pay": {"approve": "managers"}})

    with pytest.raises(killick.RunWaiting):
        await turn(kd, make)
    kd.answer("thread", "approve", by="managers")
    assert await turn(kd, make) == "done"
    assert (world.done, world.asked) == ([("A7", 5)], 2)


async def test_agents_hand_over_and_go_on_from_there(kd: killick.Client, world: World) -> None:
    def make() -> Any:
        given = {"description": "Works.", "system_prompt": "Work."}
        to_till = call("h1", "handoff", to_agent="till", reason="it pays")
        desk = FunctionAgent(name="desk", llm=world.model(to_till, "unused"), can_handoff_to=["till"], **given)
        till = world.plain("unused", PAY, "paid", name="till", **given)
        return gated(AgentWorkflow([desk, till], root_agent="desk"), tools={"pay": {"approve": "managers"}})

    with pytest.raises(killick.RunWaiting):
        await turn(kd, make)
    kd.answer("thread", "approve", by="managers")
    assert await turn(kd, make) == "paid"
    assert (world.done, world.asked) == ([("A7", 5)], 3)


async def test_inside_a_killick_agent_the_whole_loop_replays(kd: killick.Client, world: World) -> None:
    @killick.agent(name="llamaindex_clerk")
    async def clerk(task: killick.Run, order: str) -> str:
        async with task.hosting():
            return await turn(kd, lambda: world.agent(PAY, "done", approve="managers"))

    with pytest.raises(killick.RunWaiting):
        await kd.as_async().run(clerk, "A7", id="r")
    kd.answer("r", "approve", by="managers")
    assert await kd.as_async().run(clerk, "A7", id="r") == "done"
    assert world.done == [("A7", 5)]


async def test_an_agent_as_a_tool_goes_through_the_gate(kd: killick.Client, world: World) -> None:
    def make() -> Any:
        inner = world.agent(call("c1", "pay", order="inner"), "inner done", approve="managers")

        async def clerk(task: str) -> str:
            """Give a task to the clerk."""
            return str(await inner.run(task))

        boss = world.plain(call("c2", "clerk", task="pay"), "boss done", tools=[clerk])
        return gated(boss, tools={"clerk": {"effect": "reads"}})

    with pytest.raises(killick.RunWaiting):
        await turn(kd, make)
    kd.answer("thread", "approve", by="managers")
    assert await turn(kd, make) == "boss done"
    assert (world.done, world.asked) == ([("inner", 5)], 4)


def refunding(world: World) -> Any:
    """An agent whose tool asks its user before it acts."""

    async def refund(ctx: Context, order: str) -> str:
        """Refund an order."""
        asked = InputRequiredEvent(prefix=f"Refund {order}?")
        said = await ctx.wait_for_event(HumanResponseEvent, waiter_id=order, waiter_event=asked)
        world.done.append(f"refunded {order}: {said.response}")
        return "refunded"

    refund.__annotations__["ctx"] = Context  # LlamaIndex reads no text
    return gated(world.plain(call("c1", "refund", order="A7"), "done", tools=[refund]))


async def test_a_tool_may_wait_for_an_event_before_it_acts(kd: killick.Client, world: World) -> None:
    with KillickRuntime(kd).registering():
        handler = refunding(world).run("refund A7", run_id="thread")
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            await handler.cancel_run()  # the process may end here
    with KillickRuntime(kd).registering():
        handler = refunding(world).run("refund A7", run_id="thread")
    await handler.send_event(HumanResponseEvent(response="yes"))
    assert str(await handler) == "done"
    assert (world.done, world.asked) == (["refunded A7: yes"], 2)


async def test_what_a_tool_asks_is_answered_in_the_inbox(kd: killick.Client, world: World) -> None:
    async def refunded() -> str:
        with KillickRuntime(kd, respond=lambda _, value: HumanResponseEvent(response=value)).registering():
            return str(await refunding(world).run("refund A7", run_id="thread"))

    with pytest.raises(killick.RunWaiting, match=r"Refund A7\?"):
        await refunded()
    kd.answer("thread", "respond", value="yes", by="ann")
    assert await refunded() == "done"
    assert (world.done, world.asked) == (["refunded A7: yes"], 2)


async def test_a_streamed_reply_passes_through_and_comes_whole_from_the_record(
    kd: killick.Client, world: World
) -> None:
    told = []
    for _ in range(2):
        llm = gated(world.model("all is done"))
        async with kd.host("thread"):
            told.append([part async for part in await llm.astream_chat([ChatMessage(content="hi")])])
    assert [part.delta for part in told[0]] == ["all ", "is ", "done", ""]
    assert [part.delta for part in told[1]] == ["all is done"]
    assert told[0][-1].message == told[1][-1].message
    assert world.asked == 1


async def test_an_agents_reply_is_streamed(kd: killick.Client, world: World) -> None:
    with KillickRuntime(kd).registering():
        handler = world.agent("all is done").run("hi", run_id="thread")
    said = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    assert "".join(said).strip() == str(await handler) == "all is done"


def test_blocking_code_is_recorded_too(kd: killick.Client, world: World) -> None:
    pay = world.plain("done").tools[0]
    for _ in range(2):
        llm, tool = gated(world.model("all is done")), gated(pay, tools={"pay": {"effect": "reads"}})
        with kd.host("thread"):
            assert llm.chat([ChatMessage(content="hi")]).message.content == "all is done"
            assert llm.complete("hey").text == "all is done"
            assert [part.delta for part in llm.stream_complete("ho")] == ["all is done"]
            assert tool.call(order="A7").content == "5 paid"
    assert (world.done, world.asked) == ([("A7", 5)], 3)


@pytest.mark.parametrize("own", [False, True])
async def test_a_conversation_goes_on_in_another_run(kd: killick.Client, world: World, own: bool) -> None:
    for number in range(2):
        history = await KillickRuntime(kd).messages(f"ann-{number - 1}")
        assert len(history) == 2 * number
        memory = Memory.from_defaults()
        given = {"chat_history": history, **({"memory": memory} if own else {})}
        assert await turn(kd, lambda: world.agent("hello"), "hi", run_id=f"ann-{number}", **given) == "hello"
        if (engine := memory.sql_store._async_engine) is not None:
            await engine.dispose()  # or its connection would be closed without a loop
    await KillickRuntime(kd).forget("ann-1")
    assert await KillickRuntime(kd).messages("ann-1") == []
    assert [each.content for each in await KillickRuntime(kd).messages("ann-0")] == ["hi", "hello"]


async def test_gating_twice_is_gating_once_and_without_a_host_nothing_runs(kd: killick.Client, world: World) -> None:
    assert await turn(kd, lambda: gated(world.agent(PAY, "done"))) == "done"
    assert [step.name for step in kd.state("thread").fold.steps].count("pay") == 1
    with pytest.raises(DeclarationRefused, match=r"kd\.host"):
        await world.agent(PAY, "done").run("pay A7")
    with pytest.raises(DeclarationRefused, match="no agent, model or tool"):
        gated(KillickRuntime(kd))  # type: ignore[type-var]
    assert world.done == [("A7", 5)]


def test_the_page_shows_it(tmp_path: Path) -> None:
    try_page("llamaindex", tmp_path)


def test_the_example_pays_once_however_often_it_runs(tmp_path: Path) -> None:
    assert [try_example("llamaindex_agent", tmp_path).count("paying 5 for A7") for _ in range(2)] == [1, 0]
