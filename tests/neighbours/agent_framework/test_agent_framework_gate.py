"""Agents of the framework whose tools and models go through a host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_framework import (
    Agent,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    MiddlewareFailure,
    MiddlewareTermination,
    ResponseStream,
    tool,
)
from pydantic import BaseModel

import killick
from killick.adapters.agent_framework import KillickChat, KillickTools
from killick.errors import DeclarationRefused
from killick.llm.external import attempt
from neighbours.agent_framework.scripted_chat import ScriptedChat, call


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


class World:
    """What happened in it, and an agent that makes it happen."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fails = False

    def pay(self, order: str, amount: int = 5) -> str:
        """Pay for an order."""
        self.done.append((order, amount))
        if self.fails:
            raise ValueError("no money")
        return f"{amount} paid"

    def agent(self, *script: Any, fn: Any = None, middleware: Any = (), **options: Any) -> tuple[Agent, ScriptedChat]:
        chat = ScriptedChat(*script)
        paying = tool(fn or self.pay, name="pay")
        gates = [*middleware, KillickChat(), KillickTools(tools={"pay": options} if options else None)]
        return Agent(client=chat, tools=[paying], middleware=gates), chat


@pytest.fixture
def world() -> World:
    return World()


PAY = call("c1", "pay", order="A7")


async def test_a_turn_that_runs_again_asks_no_model_and_calls_no_tool(kd: killick.Client, world: World) -> None:
    for _ in range(2):
        agent, chat = world.agent(PAY, "done")
        async with kd.host("thread", agent="clerk"):
            assert (await agent.run("pay A7")).text == "done"
    assert world.done == [("A7", 5)]
    assert chat.asked == 0
    assert kd.state("thread").trace[0].usage.tokens_in == 7


async def test_a_stream_comes_as_it_is_said_and_again_from_the_record(kd: killick.Client, world: World) -> None:
    said = []
    for _ in range(2):
        agent, chat = world.agent(PAY, "one two three")
        async with kd.host("thread", agent="clerk"):
            stream = agent.run("pay A7", stream=True)
            said.append([update.text async for update in stream if update.text])
            final = await stream.get_final_response()
        assert final.text.strip() == "one two three"
    assert said == [["one ", "two ", "three "]] * 2
    assert world.done == [("A7", 5)]
    assert chat.asked == 0


async def test_an_answer_in_a_declared_form_comes_back_in_it(kd: killick.Client) -> None:
    class Verdict(BaseModel):
        pays: bool

    for _ in range(2):
        agent = Agent(client=ScriptedChat('{"pays": true}'), middleware=[KillickChat()])
        async with kd.host("thread", agent="clerk"):
            reply = await agent.run("pay?", options={"response_format": Verdict})
        assert reply.value == Verdict(pays=True)


async def test_contents_other_than_text_come_back_as_they_were(kd: killick.Client, world: World) -> None:
    seen: list[Any] = []

    class Looks(FunctionMiddleware):
        async def process(self, context: FunctionInvocationContext, call_next: Any) -> None:
            await call_next()
            seen.append(context.result)

    def picture(order: str) -> list[Content]:
        """Show an order."""
        return [Content.from_text("here"), Content.from_data(b"\x89PNG", "image/png")]

    for _ in range(2):
        agent, _ = world.agent(PAY, "done", fn=picture, middleware=[Looks()])
        async with kd.host("thread", agent="clerk"):
            await agent.run("show A7")
    first, again = seen
    assert [part.to_dict() for part in first] == [part.to_dict() for part in again]
    assert [part.type for part in again] == ["text", "data"]


async def test_a_tool_that_ends_the_loop_ends_it_again_from_the_record(kd: killick.Client, world: World) -> None:
    def pay(order: str) -> str:
        """Pay for an order, which is all there is to do."""
        world.pay(order)
        raise MiddlewareTermination("enough", result="paid, and that is all")

    for _ in range(2):
        agent, chat = world.agent(PAY, "never said", fn=pay)
        async with kd.host("thread", agent="clerk"):
            reply = await agent.run("pay A7")
        assert "never said" not in reply.text
        assert reply.messages[-1].contents[0].result == "paid, and that is all"
    assert world.done == [("A7", 5)]
    assert chat.asked == 0


async def test_a_failure_is_told_to_the_model_in_the_same_words_now_and_later(kd: killick.Client, world: World) -> None:
    world.fails, told = True, []
    for _ in range(2):
        agent, chat = world.agent(PAY, "sorry", effect="reads", retry=killick.Retry(attempts=1))
        chat.function_invocation_configuration["include_detailed_errors"] = True
        async with kd.host("thread", agent="clerk"):
            reply = await agent.run("pay A7")
        told.append([content.result for message in reply.messages for content in message.contents if content.result])
    assert told[0] == told[1]
    assert "ValueError: no money" in told[0][0]
    assert world.done == [("A7", 5)]


async def test_arguments_that_do_not_fit_are_the_models_to_mend(kd: killick.Client, world: World) -> None:
    agent, _ = world.agent(
        call("c1", "pay", order="A7", amount="lots"), call("c2", "pay", order="A7", amount=6), "done"
    )
    async with kd.host("thread", agent="clerk"):
        assert (await agent.run("pay A7")).text == "done"
    assert world.done == [("A7", 6)]


async def test_what_a_contract_rejects_is_told_to_the_model_and_not_done(kd: killick.Client, world: World) -> None:
    agent, chat = world.agent(call("c1", "pay", order="A7", amount=500), "too much, then")
    contract = killick.Contract("orders", [killick.rules.arguments("pay", amount={"max": 100})])
    async with kd.host("thread", agent="clerk", contract=contract):
        reply = await agent.run("pay A7")
    assert reply.text == "too much, then"
    assert "rejected" in reply.messages[1].contents[0].result
    assert world.done == []


async def test_a_person_is_asked_and_may_change_what_is_done(kd: killick.Client, world: World) -> None:
    async def turn() -> str:
        agent, _ = world.agent(PAY, "done", approve="managers")
        async with kd.host("thread", agent="clerk"):
            return (await agent.run("pay A7")).text

    with pytest.raises(killick.RunWaiting) as waiting:
        await turn()
    assert waiting.value.waits
    assert world.done == []
    kd.answer("thread", "edit", value={"order": "A7", "amount": 4}, by="managers")
    assert await turn() == "done"
    assert world.done == [("A7", 4)]


async def test_what_runs_beside_a_call_that_waits_comes_to_its_end_and_is_done_once(
    kd: killick.Client, world: World
) -> None:
    asked = asyncio.Event()

    async def notify(order: str) -> str:
        """Tell somebody of an order."""
        await asked.wait()
        world.done.append("told")
        return "told"

    def managers(**_: Any) -> str:
        # Loops differ: the host judges on its own.
        loop.call_soon_threadsafe(asked.set)
        return "managers"

    async def turn() -> str:
        # The call that waits comes second, so that the other one is under way when the approval is asked for.
        chat = ScriptedChat([call("c2", "notify", order="A7"), PAY], "done")
        gates = [KillickChat(), KillickTools(tools={"pay": {"approve": managers}})]
        agent = Agent(client=chat, tools=[tool(world.pay), tool(notify)], middleware=gates)
        async with kd.host("thread", agent="clerk"):
            return (await agent.run("pay A7")).text

    loop = asyncio.get_running_loop()
    with pytest.raises(killick.RunWaiting):
        await turn()
    assert world.done == ["told"]
    kd.answer("thread", "approve", by="managers")
    assert await turn() == "done"
    assert world.done == ["told", ("A7", 5)]


async def test_inside_a_killick_agent_the_whole_loop_replays(kd: killick.Client, world: World) -> None:
    @killick.agent(name="clerk_of_killick")
    async def clerk(run: killick.Run, order: str) -> str:
        agent, _ = world.agent(PAY, "done", approve="managers")
        async with run.hosting():
            reply = await agent.run(f"pay {order}")
        return reply.text

    with pytest.raises(killick.RunWaiting):
        await kd.as_async().run(clerk, "A7", id="r")
    kd.answer("r", "approve", by="managers")
    assert await kd.as_async().run(clerk, "A7", id="r") == "done"
    assert world.done == [("A7", 5)]


async def test_without_a_host_nothing_runs(world: World) -> None:
    agent, _ = world.agent(PAY, "done")
    with pytest.raises(DeclarationRefused, match=r"kd\.host"):
        await agent.run("pay A7")
    ungated = Agent(client=ScriptedChat(PAY, "done"), tools=[tool(world.pay)], middleware=[KillickTools()])
    with pytest.raises(MiddlewareFailure, match=r"kd\.host"):
        await ungated.run("pay A7")
    assert world.done == []


async def test_a_model_that_failed_is_asked_again_by_whoever_comes_next(kd: killick.Client, world: World) -> None:
    def refused(turn: int) -> None:
        raise LookupError("no such model")

    agent, chat = world.agent(PAY, "done")
    chat.before = refused
    async with kd.host("thread", agent="clerk"):
        with pytest.raises(LookupError, match="no such model"):
            await agent.run("pay A7")
    for asked in (2, 0):
        agent, chat = world.agent(PAY, "done")
        async with kd.host("thread", agent="clerk"):
            assert (await agent.run("pay A7")).text == "done"
        assert chat.asked == asked
    assert world.done == [("A7", 5)]


async def test_a_tools_own_code_can_tell_the_far_side_its_key(kd: killick.Client, world: World) -> None:
    keys: list[str] = []

    def pay(order: str) -> str:
        """Pay for an order."""
        step = attempt()
        assert step is not None
        keys.append(step.key)
        return "paid"

    agent, _ = world.agent(PAY, "done", fn=pay, effect="idempotent")
    async with kd.host("thread", agent="clerk"):
        await agent.run("pay A7")
    assert keys[0].startswith("thread:")
    assert ":pay:" in keys[0]


async def test_a_stream_that_breaks_off_is_not_begun_again_behind_what_was_heard(kd: killick.Client) -> None:
    class Breaks(ScriptedChat):
        def _inner_get_response(self, **request: Any) -> Any:
            async def parts() -> Any:
                self.asked += 1
                yield ChatResponseUpdate(role="assistant", contents=[Content.from_text("one ")])
                raise ConnectionError("gone")

            return ResponseStream(parts(), finalizer=ChatResponse.from_updates)

    heard: list[str] = []
    chat = Breaks()
    agent = Agent(client=chat, middleware=[KillickChat()])
    async with kd.host("thread", agent="clerk"):
        with pytest.raises(ConnectionError, match="gone"):
            async for update in agent.run("count", stream=True):
                heard += [update.text]
    assert heard == ["one "]
    assert chat.asked == 1
    agent = Agent(client=ScriptedChat("one two"), middleware=[KillickChat()])
    async with kd.host("thread", agent="clerk"):
        assert [update.text async for update in agent.run("count", stream=True)] == ["one ", "two "]


async def test_a_contract_that_lets_no_model_be_asked_says_so_once(kd: killick.Client, world: World) -> None:
    agent, chat = world.agent(PAY, "done")
    contract = killick.Contract("orders", [killick.rules.budget(tokens=8)])
    async with kd.host("thread", agent="clerk", contract=contract):
        with pytest.raises(killick.Rejected):
            await agent.run("pay A7")
    assert chat.asked == 1
    assert world.done == [("A7", 5)]


@pytest.mark.parametrize("effect", ["reads", "at_most_once"])
async def test_an_agent_as_a_tool_waits_with_the_tool_inside_of_it(
    kd: killick.Client, world: World, effect: str
) -> None:
    """Entered again, the inner agent's calls come from the record: by itself, or when a person says so."""

    async def boss() -> str:
        clerk, _ = world.agent(call("inner", "pay", order="A7"), "it is paid", approve="managers")
        delegate = clerk.as_tool(name="clerk", description="Pays for orders.")
        gates = [KillickChat(), KillickTools(tools={"clerk": {"effect": effect}})]
        chat = ScriptedChat(call("outer", "clerk", task="pay A7"), "all done")
        async with asyncio.timeout(60), kd.host("thread", agent="boss"):
            return str((await Agent(client=chat, tools=[delegate], middleware=gates).run("see to A7")).text)

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


async def test_an_error_of_a_tool_of_which_nothing_is_said_is_its_answer_and_not_repeated(
    kd: killick.Client, world: World
) -> None:
    world.fails, told = True, []
    for _ in range(2):
        agent, chat = world.agent(PAY, "sorry")
        chat.function_invocation_configuration["include_detailed_errors"] = True
        async with kd.host("thread", agent="clerk"):
            reply = await agent.run("pay A7")
        told.append([content.result for message in reply.messages for content in message.contents if content.result])
    assert told[0] == told[1]
    assert "ValueError: no money" in told[0][0]
    assert world.done == [("A7", 5)]
