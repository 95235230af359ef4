"""Crews whose tools and models go through a host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crewai import Agent, Crew, Task
from crewai.llms.base_llm import BaseLLM
from crewai.tools import tool
from crewai.tools.tool_failure import ToolFailure
from pydantic import BaseModel, Field

import killick
from killick.adapters.crewai import Waiting, gated, recorded
from killick.llm.external import attempt


class ScriptedLLM(BaseLLM):
    """Answers with the nth reply of its script, where n is how often it has spoken in the conversation."""

    script: list[Any]
    asked: list[int] = Field(default_factory=list)
    fails: int = 0

    def call(self, messages: Any, tools: Any = None, *args: Any, response_model: Any = None, **kwargs: Any) -> Any:
        turn = 0 if isinstance(messages, str) else sum(message["role"] == "assistant" for message in messages)
        self.asked.append(turn)
        if self.fails:
            self.fails -= 1
            raise LookupError("no such model")
        self._track_token_usage_internal({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10})
        said = self.script[turn]
        return response_model.model_validate_json(said) if response_model else said

    async def acall(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(messages, *args, **kwargs)

    def supports_function_calling(self) -> bool:
        return isinstance(self.script[0], list)

    def get_input_tokens_count(self, *args: Any, **kwargs: Any) -> int:
        return 10


def wish(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


NATIVE: list[Any] = [[wish("c1", "pay", '{"order": "A7"}'), wish("c2", "pay", '{"order": "A8"}')], "all done"]
REACT: list[Any] = [
    'Thought: pay\nAction: pay\nAction Input: {"order": "A7"}',
    "Thought: I now know the final answer\nFinal Answer: all done",
]


class Receipt(BaseModel):
    amount: int


class World:
    """What happened in it, and crews that make it happen."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fails = False
        self.keys: list[str] = []

    def crew(self, script: list[Any], **options: Any) -> tuple[Crew, list[int]]:
        @tool
        def pay(order: str, amount: int = 5) -> str:
            """Pay for an order."""
            step = attempt()
            self.keys.append(step.key if step is not None else "")
            self.done.append((order, amount))
            if self.fails:
                raise ValueError("no money")
            return f"{amount} paid"

        asked: list[int] = []
        llm = ScriptedLLM(model="scripted/one", script=script)
        llm.asked = asked
        clerk = Agent(role="clerk", goal="pay", backstory="pays", llm=recorded(llm), tools=[gated(pay, **options)])
        paying = Task(description="pay A7", expected_output="a receipt", agent=clerk)
        return Crew(agents=[clerk], tasks=[paying], cache=False), asked


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


KICKOFFS: dict[str, Callable[[Crew], Any]] = {
    "kickoff": lambda crew: crew.kickoff(),
    "akickoff": lambda crew: asyncio.run(crew.akickoff()),
}


@pytest.mark.parametrize("kickoff", KICKOFFS.values(), ids=KICKOFFS)
@pytest.mark.parametrize(("script", "paid"), [(NATIVE, 2), (REACT, 1)], ids=["native", "react"])
def test_a_crew_that_runs_again_asks_no_model_and_calls_no_tool(
    kd: killick.Client, world: World, kickoff: Callable[[Crew], Any], script: list[Any], paid: int
) -> None:
    for first in (True, False):
        crew, asked = world.crew(script)
        with kd.host("order", agent="crew"):
            assert kickoff(crew).raw == "all done"
        assert bool(asked) is first
    assert sorted(world.done) == [("A7", 5), ("A8", 5)][:paid]
    assert all(key.startswith("order:") for key in world.keys)
    assert kd.state("order").trace[0].usage.tokens_in == 7


def test_a_failure_is_told_to_the_model_and_a_model_that_failed_is_asked_again(
    kd: killick.Client, world: World
) -> None:
    world.fails = True
    for _ in range(2):
        crew, _ = world.crew(NATIVE, effect="reads", retry=killick.Retry(attempts=1))
        with kd.host("order", agent="crew"):
            assert crew.kickoff().raw == "all done"
    assert sorted(world.done) == [("A7", 5), ("A8", 5)]

    llm = recorded(ScriptedLLM(model="scripted/one", script=["yes"], fails=1))
    with kd.host("asking", agent="crew"):
        with pytest.raises(LookupError):
            llm.call("well?")
        assert llm.call("well?") == "yes"
    with kd.host("asking", agent="crew"):
        assert llm.call("well?") == "yes"
    assert len(llm.asked) == 2


def test_an_answer_in_a_declared_form_comes_back_in_it(kd: killick.Client) -> None:
    class Verdict(BaseModel):
        pays: bool

    llm = recorded(ScriptedLLM(model="scripted/one", script=['{"pays": true}']))
    for _ in range(2):
        with kd.host("order", agent="crew"):
            assert llm.call("pay?", response_model=Verdict) == Verdict(pays=True)
    assert isinstance(llm, ScriptedLLM)


def test_what_a_contract_rejects_is_told_to_the_model_and_not_done(kd: killick.Client, world: World) -> None:
    contract = killick.Contract("orders", [killick.rules.arguments("pay", order={"one_of": ["A7"]})])
    crew, _ = world.crew(NATIVE)
    with kd.host("order", agent="crew", contract=contract):
        done = crew.kickoff()
    assert done.raw == "all done"
    assert world.done == [("A7", 5)]
    assert [told.failure.code for told in done.tasks_output[0].tool_failures] == ["argument_refused"]


def test_a_person_is_asked_and_may_change_what_is_done(kd: killick.Client, world: World) -> None:
    script = [NATIVE[0][:1], "all done"]
    crew, _ = world.crew(script, approve="managers")
    with kd.host("order", agent="crew"), pytest.raises(Waiting) as waiting:
        crew.kickoff()
    assert waiting.value.waits
    assert world.done == []
    kd.answer("order", "edit", value={"order": "A7", "amount": 4}, by="managers")
    crew, _ = world.crew(script, approve="managers")
    with kd.host("order", agent="crew"):
        assert crew.kickoff().raw == "all done"
    assert world.done == [("A7", 4)]


def test_inside_a_killick_agent_the_whole_crew_replays(kd: killick.Client, world: World) -> None:
    @killick.agent(name="crew_of_killick")
    def orders(run: killick.SyncRun, order: str) -> str:
        crew, _ = world.crew([NATIVE[0][:1], "all done"], approve="managers")
        with run.hosting():
            return str(crew.kickoff().raw)

    with pytest.raises(killick.RunWaiting):
        kd.run(orders, "A7", id="r")
    kd.answer("r", "approve", by="managers")
    assert kd.run(orders, "A7", id="r") == "all done"
    assert world.done == [("A7", 5)]


def test_what_a_tool_returns_comes_back_in_its_form(kd: killick.Client) -> None:
    @tool
    def pay(order: str) -> Receipt:
        """Pay for an order."""
        return Receipt(amount=5)

    @tool
    async def refuse(order: str) -> Any:
        """Refuse an order."""
        return ToolFailure(message="closed on Sundays", code="closed")

    for _ in range(2):
        with kd.host("order", agent="crew"):
            assert gated(pay).run(order="A7") == Receipt(amount=5)
            assert gated(refuse).run(order="A7") == ToolFailure(message="closed on Sundays", code="closed")


def test_without_a_host_nothing_runs(world: World) -> None:
    @tool
    def pay(order: str) -> str:
        """Pay for an order."""
        world.done.append(order)
        return "paid"

    with pytest.raises(BaseException, match=r"kd\.host"):
        gated(pay).run(order="A7")
    assert world.done == []


@pytest.mark.parametrize("script", [NATIVE, REACT], ids=["native", "react"])
def test_an_error_of_a_tool_of_which_nothing_is_said_is_its_answer_and_not_repeated(
    kd: killick.Client, world: World, script: list[Any]
) -> None:
    """CrewAI itself calls a tool that raises up to three times."""
    world.fails = True
    for _ in range(2):
        crew, _ = world.crew(script)
        with kd.host("order", agent="crew"):
            assert crew.kickoff().raw == "all done"
    assert sorted(world.done) == [("A7", 5), ("A8", 5)][: 2 if script is NATIVE else 1]
    with kd.host("asked", agent="crew"), pytest.raises(Waiting, match="Did it happen"):
        world.crew(script, errors="ask")[0].kickoff()
