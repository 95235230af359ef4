"""KillickRunner: every call of a model and of a tool once, people asked, and the SDK's own ways kept."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents.mcp import MCPServerStdio
from agents.memory import SQLiteSession
from agents.models.interface import ModelProvider
from agents.retry import ModelRetrySettings
from agents.testing import ModelStep, ScriptedModel, assistant_message, function_call
from agents.usage import Usage
from openai.types.responses.response_usage import InputTokensDetails
from pydantic import BaseModel

import agents
import killick
from agents import (
    Agent,
    CustomTool,
    LocalShellTool,
    ModelSettings,
    RunConfig,
    RunContextWrapper,
    Runner,
    function_tool,
    handoff,
)
from killick.adapters.openai_agents import KillickRunner, KillickSession, attempt
from killick.errors import DeclarationRefused
from neighbours.trying import needs

agents.set_tracing_disabled(True)


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def calls(*wanted: tuple[str, dict[str, Any]], start: int = 1) -> list[Any]:
    return [function_call(name, given, call_id=f"c{n}") for n, (name, given) in enumerate(wanted, start)]


def script(*steps: Any) -> ScriptedModel:
    return ScriptedModel([[assistant_message(step)] if isinstance(step, str) else step for step in steps])


class Till:
    """A tool that can be counted."""

    def __init__(self) -> None:
        self.paid: list[tuple[str, int]] = []
        self.keys: list[str] = []

        @function_tool
        async def pay(to: str, amount: int) -> str:
            """Pay somebody."""
            step = attempt()
            assert step is not None
            self.keys.append(step.key)
            self.paid.append((to, amount))
            return f"paid {amount} to {to}"

        self.pay = pay


PAY: Any = ("pay", {"to": "ann", "amount": 5})


def outputs(result: Any) -> list[Any]:
    return [item.output for item in result.new_items if item.type == "tool_call_output_item"]


def run(runner: KillickRunner, agent: Agent[Any], said: Any = "pay ann 5", **options: Any) -> Any:
    return runner.run_sync(agent, said, **({"turn": "m1"} | options))


# once -------------------------------------------------------------------------------------------


def test_a_turn_that_is_run_again_asks_no_model_and_runs_no_tool(kd: killick.Client) -> None:
    till = Till()
    model = script(calls(PAY), "done")
    first = run(KillickRunner(kd), Agent(name="clerk", tools=[till.pay], model=model))
    again = run(KillickRunner(kd), Agent(name="clerk", tools=[till.pay], model=script()))
    assert first.final_output == again.final_output == "done"
    assert till.paid == [("ann", 5)]
    assert outputs(first) == outputs(again) == ["paid 5 to ann"]
    assert first.to_input_list() == again.to_input_list()


def test_a_tool_s_own_code_can_send_the_key_of_its_step(kd: killick.Client) -> None:
    till = Till()
    run(KillickRunner(kd), Agent(name="clerk", tools=[till.pay], model=script(calls(PAY), "done")))
    [key] = till.keys
    assert key.startswith("m1:step_")
    assert ":pay:" in key


def test_the_same_words_are_another_turn_when_the_last_one_has_ended(kd: killick.Client) -> None:
    till, runner = Till(), KillickRunner(kd)
    for n in (1, 2):
        model = script(calls(PAY, start=n), f"done {n}")
        result = runner.run_sync(Agent(name="clerk", tools=[till.pay], model=model), "pay ann 5", session="thread")
        assert result.final_output == f"done {n}"
    assert len(till.paid) == 2
    assert len(asyncio.run(KillickSession("thread", kd).get_items())) == 8


def test_a_turn_that_waits_is_the_same_turn_after_others_were_said_and_answered(kd: killick.Client) -> None:
    till = Till()

    @function_tool
    async def refund(to: str) -> str:
        """Give it back."""
        till.paid.append((to, -1))
        return f"refunded {to}"

    runner = KillickRunner(kd, tools={"refund": {"approve": "managers"}})

    def said(text: str, *steps: Any) -> Any:
        agent = Agent(name="clerk", tools=[till.pay, refund], model=script(*steps))
        return runner.run_sync(agent, text, session="thread").final_output

    wanted = calls(PAY), calls(("refund", {"to": "ann"}), start=2)
    with pytest.raises(killick.RunWaiting):
        said("pay ann, then refund her", *wanted)
    assert said("hello?", "a manager looks at it") == "a manager looks at it"
    assert said("hello?", "still") == "still"
    kd.answer("thread", "approve", by="kim")
    assert said("pay ann, then refund her", "done") == "done"
    assert till.paid == [("ann", 5), ("ann", -1)]
    assert kd.inbox() == []


def test_a_turn_that_failed_goes_on_where_it_was_and_says_nothing_twice(kd: killick.Client) -> None:
    till, runner = Till(), KillickRunner(kd)
    failing = script(calls(PAY), ConnectionError("the model is down"))
    with pytest.raises(ConnectionError):
        runner.run_sync(Agent(name="clerk", tools=[till.pay], model=failing), "pay ann 5", session="thread")
    model = script("done")
    result = runner.run_sync(Agent(name="clerk", tools=[till.pay], model=model), "pay ann 5", session="thread")
    assert result.final_output == "done"
    assert till.paid == [("ann", 5)]
    kinds = [item.get("type", item.get("role")) for item in asyncio.run(KillickSession("thread", kd).get_items())]
    assert kinds == ["user", "function_call", "function_call_output", "message"]
    assert model.first_call is not None
    assert len(model.first_call.input) == 3


def test_a_provider_that_counts_its_call_ids_anew_in_each_turn_is_paid_each_time(kd: killick.Client) -> None:
    till, runner = Till(), KillickRunner(kd)
    for turn in ("m1", "m2"):
        agent = Agent(name="clerk", tools=[till.pay], model=script(calls(PAY), "done"))
        runner.run_sync(agent, "pay ann 5", session="thread", turn=turn)
    assert till.paid == [("ann", 5), ("ann", 5)]


def test_an_edited_prompt_does_not_ask_again_what_is_on_record(kd: killick.Client) -> None:
    till = Till()
    run(
        KillickRunner(kd),
        Agent(name="clerk", instructions="Be kind.", tools=[till.pay], model=script(calls(PAY), "ok")),
    )
    edited = Agent(name="clerk", instructions="Be very kind.", tools=[till.pay], model=script())
    assert run(KillickRunner(kd), edited).final_output == "ok"
    assert till.paid == [("ann", 5)]


def test_usage_and_words_of_models_are_on_record(kd: killick.Client) -> None:
    cached = InputTokensDetails(cached_tokens=2, cache_write_tokens=0)
    used = Usage(requests=1, input_tokens=7, output_tokens=3, input_tokens_details=cached)
    step = ModelStep(output=[assistant_message("hello")], usage=used)
    agent = Agent(name="clerk", instructions="Greet.", model=ScriptedModel([step]))
    first = run(KillickRunner(kd), agent)
    again = run(KillickRunner(kd), Agent(name="clerk", model=script()))
    assert again.context_wrapper.usage == first.context_wrapper.usage
    assert again.context_wrapper.usage.input_tokens == 7
    [call] = kd.state("m1").trace
    assert call.usage is not None
    assert (call.usage.tokens_in, call.usage.tokens_out, call.usage.tokens_cached) == (7, 3, 2)


# failures ---------------------------------------------------------------------------------------


def test_what_the_model_is_told_of_a_failed_tool_is_the_same_on_record(kd: killick.Client) -> None:
    ran: list[int] = []

    @function_tool(failure_error_function=lambda ctx, error: f"failed: {error}")
    async def look_up(name: str) -> str:
        """Look somebody up."""
        ran.append(1)
        raise killick.NotDone("no such person")

    told: list[Any] = []
    for model in (script(calls(("look_up", {"name": "x"})), "sorry"), script()):
        runner = KillickRunner(kd, tools={"look_up": {"effect": "reads", "retry": killick.Retry(attempts=2, first=0)}})
        told.append(outputs(run(runner, Agent(name="clerk", tools=[look_up], model=model))))
    assert told[0] == told[1]
    assert "no such person" in told[0][0]
    assert len(ran) == 2


def test_an_error_of_a_tool_of_which_nothing_is_said_is_its_answer_and_not_repeated(kd: killick.Client) -> None:
    """The tool's own words for an error are those of its first time, when they had the error itself."""
    ran: list[BaseException] = []

    def words(ctx: Any, error: Exception) -> str:
        ran.append(error)
        return f"failed: {error}"

    @function_tool(failure_error_function=words)
    async def pay(to: str) -> int:
        """Pay somebody."""
        raise ValueError(f"no account of {to}")

    told = []
    for model in (script(calls(("pay", {"to": "ann"})), "sorry"), script()):
        told += outputs(run(KillickRunner(kd), Agent(name="clerk", tools=[pay], model=model)))
    assert told == ["failed: no account of ann"] * 2
    assert [type(error) for error in ran] == [ValueError]
    asking = Agent(name="clerk", tools=[pay], model=script(calls(("pay", {"to": "bob"}))))
    with pytest.raises(killick.RunWaiting, match="Did it happen"):
        run(KillickRunner(kd, errors="ask"), asking, turn="m2")


def test_a_tool_whose_outcome_is_not_known_waits_for_a_person_and_is_not_tried_again(kd: killick.Client) -> None:
    ran: list[int] = []

    @function_tool
    async def pay(to: str) -> str:
        """Pay somebody."""
        ran.append(1)
        raise TimeoutError("no answer from the bank")

    agent = Agent(name="clerk", tools=[pay], model=script(calls(("pay", {"to": "ann"})), "done"))
    with pytest.raises(killick.RunWaiting) as waiting:
        run(KillickRunner(kd), agent)
    assert waiting.value.run == "m1"
    kd.answer("m1", "happened", value="paid", by="kim")
    agent = Agent(name="clerk", tools=[pay], model=script("done"))
    result = run(KillickRunner(kd), agent)
    assert (result.final_output, outputs(result), ran) == ("done", ["paid"], [1])


def test_arguments_that_do_not_fit_are_told_to_the_model_and_nothing_is_in_doubt(kd: killick.Client) -> None:
    till = Till()
    model = script(calls(("pay", {"to": "ann", "amount": "much"})), "sorry")
    result = run(KillickRunner(kd), Agent(name="clerk", tools=[till.pay], model=model))
    assert "error occurred" in outputs(result)[0]
    assert (till.paid, kd.info("m1").waits) == ([], ())
    again = run(KillickRunner(kd), Agent(name="clerk", tools=[till.pay], model=script()))
    assert outputs(again) == outputs(result)


def test_a_tool_that_takes_too_long_is_in_doubt_and_one_that_only_reads_is_told(kd: killick.Client) -> None:
    ended: list[str] = []

    async def slow() -> str:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("slow")
        return "never"

    pay = function_tool(name_override="pay", timeout=0.1)(slow)
    look = function_tool(name_override="look", timeout=0.1, failure_error_function=lambda c, error: f"{error}")(slow)
    runner = KillickRunner(kd, tools={"look": {"effect": "reads", "retry": killick.Retry(attempts=1)}})
    result = run(runner, Agent(name="clerk", tools=[look], model=script(calls(("look", {})), "sorry")))
    assert "TimeoutError" in outputs(result)[0]
    with pytest.raises(killick.RunWaiting, match="outcome is not known"):
        run(runner, Agent(name="clerk", tools=[pay], model=script(calls(("pay", {})))), turn="m2")
    assert ended == ["slow", "slow"]


def test_a_tool_without_words_for_its_failure_raises_it(kd: killick.Client) -> None:
    @function_tool(failure_error_function=None)
    async def look_up() -> str:
        """Look."""
        raise killick.NotDone("closed")

    runner = KillickRunner(kd, tools={"look_up": {"effect": "reads", "retry": killick.Retry(attempts=1)}})
    with pytest.raises(agents.UserError, match="closed"):
        run(runner, Agent(name="clerk", tools=[look_up], model=script(calls(("look_up", {})))))


def test_the_sdk_s_own_retries_of_models_stay_its_own_and_replay_in_order(kd: killick.Client) -> None:
    till = Till()
    settings = ModelSettings(
        retry=ModelRetrySettings(max_retries=2, policy=lambda _: True, backoff={"initial_delay": 0})
    )

    def clerk(model: ScriptedModel) -> Agent[Any]:
        return Agent(name="clerk", tools=[till.pay], model=model, model_settings=settings)

    model = script(calls(PAY), ConnectionError("blip"), "done")
    assert run(KillickRunner(kd), clerk(model)).final_output == "done"
    assert run(KillickRunner(kd), clerk(script())).final_output == "done"
    assert till.paid == [("ann", 5)]


# types ------------------------------------------------------------------------------------------


class Receipt(BaseModel):
    to: str
    amount: int


def test_a_tool_s_output_comes_back_as_what_its_function_returns(kd: killick.Client) -> None:
    @function_tool
    async def pay(to: str, amount: int) -> Receipt:
        """Pay somebody."""
        return Receipt(to=to, amount=amount)

    for model in (script(calls(PAY), "done"), script()):
        [receipt] = outputs(run(KillickRunner(kd), Agent(name="clerk", tools=[pay], model=model)))
        assert receipt == Receipt(to="ann", amount=5)


def test_an_output_that_cannot_be_stored_is_kept_as_the_model_sees_it(kd: killick.Client) -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    @function_tool
    async def pay(to: str, amount: int) -> Any:
        """Pay somebody."""
        return Odd()

    for model in (script(calls(PAY), "done"), script()):
        assert outputs(run(KillickRunner(kd), Agent(name="clerk", tools=[pay], model=model))) == ["odd"]


def test_a_picture_reaches_the_model_as_a_picture_on_record_too(kd: killick.Client) -> None:
    @function_tool
    async def draw() -> Any:
        """Draw."""
        return agents.ToolOutputImage(image_url="https://example.org/a.png")

    for model in (script(calls(("draw", {})), "done"), script()):
        result = run(KillickRunner(kd), Agent(name="clerk", tools=[draw], model=model))
        [item] = [item for item in result.to_input_list() if item.get("type") == "function_call_output"]
        assert item["output"][0]["type"] == "input_image"


def test_a_blocking_tool_and_a_context_work_as_ever(kd: killick.Client) -> None:
    @function_tool
    def pay(ctx: RunContextWrapper[dict[str, str]], amount: int) -> str:
        """Pay."""
        return f"{ctx.context['who']} paid {amount}"

    agent = Agent[dict[str, str]](name="clerk", tools=[pay], model=script(calls(("pay", {"amount": 5})), "done"))
    assert outputs(run(KillickRunner(kd), agent, context={"who": "kim"})) == ["kim paid 5"]


def test_a_killick_tool_can_be_said_for_a_tool_and_is_given_its_key(kd: killick.Client) -> None:
    keys: list[str] = []

    @killick.tool(effect="idempotent")
    async def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
        keys.append(key)
        return f"paid {amount} to {to}"

    runner = KillickRunner(kd, tools={"pay": pay})
    result = run(runner, Agent(name="clerk", tools=[Till().pay], model=script(calls(PAY), "done")))
    assert outputs(result) == ["paid 5 to ann"]
    assert len(keys) == 1


def test_a_custom_tool_goes_through_the_gate(kd: killick.Client) -> None:
    from openai.types.responses import ResponseCustomToolCall

    ran: list[str] = []

    async def invoke(ctx: Any, given: str) -> str:
        ran.append(given)
        return f"did {given}"

    tool = CustomTool(name="shout", description="Shout.", on_invoke_tool=invoke)
    wanted = ResponseCustomToolCall(type="custom_tool_call", name="shout", call_id="c1", id="x1", input="hey")
    for model in (script([wanted], "done"), script()):
        result = run(KillickRunner(kd), Agent(name="clerk", tools=[tool], model=model))
        assert result.final_output == "done"
    assert ran == ["hey"]


# people and rules -------------------------------------------------------------------------------


def test_a_tool_that_needs_approval_waits_for_a_person_and_is_done_once(kd: killick.Client) -> None:
    paid: list[str] = []

    @function_tool(needs_approval=True)
    async def pay(to: str) -> str:
        """Pay."""
        paid.append(to)
        return f"paid {to}"

    runner = KillickRunner(kd, to="managers")
    with pytest.raises(killick.RunWaiting) as waiting:
        run(runner, Agent(name="clerk", tools=[pay], model=script(calls(("pay", {"to": "ann"})))))
    [wait] = waiting.value.waits
    assert "pay" in str(wait)
    assert paid == []
    kd.answer("m1", "approve", by="kim")
    result = run(runner, Agent(name="clerk", tools=[pay], model=script("done")))
    assert (result.final_output, paid) == ("done", ["ann"])


def test_the_model_is_told_why_a_person_refused(kd: killick.Client) -> None:
    @function_tool(needs_approval=True)
    async def pay(to: str) -> str:
        """Pay."""
        raise AssertionError

    agent = Agent(name="clerk", tools=[pay], model=script(calls(("pay", {"to": "ann"}))))
    with pytest.raises(killick.RunWaiting):
        run(KillickRunner(kd), agent)
    kd.answer("m1", "reject", by="kim", comment="not this month")
    result = run(KillickRunner(kd), Agent(name="clerk", tools=[pay], model=script("sorry")))
    assert result.final_output == "sorry"
    assert "not this month" in outputs(result)[0]


def test_a_person_may_change_the_arguments(kd: killick.Client) -> None:
    till = Till()
    runner = KillickRunner(kd, tools={"pay": {"approve": "managers"}})
    with pytest.raises(killick.RunWaiting):
        run(runner, Agent(name="clerk", tools=[till.pay], model=script(calls(PAY))))
    kd.answer("m1", "edit", value={"amount": 3}, by="kim")
    result = run(runner, Agent(name="clerk", tools=[till.pay], model=script("done")))
    assert till.paid == [("ann", 3)]
    assert outputs(result) == ["paid 3 to ann"]


def test_approval_by_the_arguments_asks_only_for_what_needs_it(kd: killick.Client) -> None:
    paid: list[int] = []

    async def is_much(ctx: Any, given: dict[str, Any], call: str) -> bool:
        return bool(given["amount"] > 100)

    @function_tool(needs_approval=is_much)
    async def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    wanted = calls(("pay", {"amount": 5}), ("pay", {"amount": 500}))
    with pytest.raises(killick.RunWaiting):
        run(KillickRunner(kd), Agent(name="clerk", tools=[pay], model=script(wanted)))
    assert paid == [5]
    kd.answer("m1", "approve", by="kim")
    run(KillickRunner(kd), Agent(name="clerk", tools=[pay], model=script("done")))
    assert paid == [5, 500]


def test_a_call_beside_one_that_waits_comes_to_its_end(kd: killick.Client) -> None:
    paid: list[str] = []

    @function_tool
    async def pay(to: str) -> str:
        """Pay."""
        await asyncio.sleep(0.2)
        paid.append(to)
        return f"paid {to}"

    @function_tool(needs_approval=True)
    async def ask() -> str:
        """Ask."""
        return "yes"

    wanted = calls(("pay", {"to": "ann"}), ("ask", {}))
    with pytest.raises(killick.RunWaiting):
        run(KillickRunner(kd), Agent(name="clerk", tools=[pay, ask], model=script(wanted)))
    assert paid == ["ann"]
    kd.answer("m1", "approve", by="kim")
    result = run(KillickRunner(kd), Agent(name="clerk", tools=[pay, ask], model=script("done")))
    assert (result.final_output, paid) == ("done", ["ann"])


def test_a_contract_says_no_before_anything_is_done_and_the_model_learns_why(kd: killick.Client) -> None:
    till = Till()
    contract = killick.Contract("small", [killick.rules.arguments("pay", amount={"max": 3})])
    runner = KillickRunner(kd, contract=contract)
    result = run(runner, Agent(name="clerk", tools=[till.pay], model=script(calls(PAY), "sorry")))
    assert till.paid == []
    assert "at most 3 is allowed" in outputs(result)[0]


def test_a_model_call_that_a_contract_rejects_is_not_tried_again(kd: killick.Client) -> None:
    till = Till()
    runner = KillickRunner(kd, contract=killick.Contract("small", [killick.rules.budget(calls=2)]))
    with pytest.raises(killick.Rejected, match="calls"):
        run(runner, Agent(name="clerk", tools=[till.pay], model=script(calls(PAY), "over the budget")))
    assert till.paid == [("ann", 5)]


def test_what_the_sdk_interrupts_for_itself_becomes_a_question_to_people(kd: killick.Client) -> None:
    ran: list[str] = []

    @function_tool(needs_approval=True)
    async def shout(what: str) -> str:
        """Shout."""
        ran.append(what)
        return "shouted"

    runner = KillickRunner(kd, tools={"shout": None}, to="managers")
    wanted = calls(("shout", {"what": "hey"}))
    with pytest.raises(killick.RunWaiting):
        run(runner, Agent(name="clerk", tools=[shout], model=script(wanted)))
    kd.answer("m1", "approve", by="kim")
    result = run(runner, Agent(name="clerk", tools=[shout], model=script("done")))
    assert (result.final_output, ran) == ("done", ["hey"])


# many agents ------------------------------------------------------------------------------------


def test_agents_that_are_handed_to_go_through_the_gate_and_may_hand_back(kd: killick.Client) -> None:
    for form in ("agent", "handoff"):
        till = Till()

        def agents_of(first: ScriptedModel, second: ScriptedModel) -> Agent[Any]:
            triage: Agent[Any] = Agent(name="triage", model=first)
            refunds: Agent[Any] = Agent(name="refunds", model=second, tools=[till.pay], handoffs=[triage])
            triage.handoffs = [refunds if form == "agent" else handoff(refunds)]
            return triage

        first, second = script(calls(("transfer_to_refunds", {}))), script(calls(PAY, start=2), "done")
        result = run(KillickRunner(kd), agents_of(first, second), turn=form)
        assert (result.final_output, result.last_agent.name) == ("done", "refunds")
        again = run(KillickRunner(kd), agents_of(script(), script()), turn=form)
        assert (again.final_output, again.last_agent.name) == ("done", "refunds")
        assert till.paid == [("ann", 5)]


def test_the_last_agent_of_a_result_can_go_on(kd: killick.Client) -> None:
    till, runner = Till(), KillickRunner(kd)
    agent = Agent(name="clerk", tools=[till.pay], model=script(calls(PAY), "one", calls(PAY, start=2), "two"))
    first = run(runner, agent)
    second = run(runner, first.last_agent, turn="m2")
    assert (first.final_output, second.final_output, len(till.paid)) == ("one", "two", 2)


def test_an_agent_as_a_tool_is_no_step_but_its_calls_are(kd: killick.Client) -> None:
    till, runner = Till(), KillickRunner(kd)

    def boss(outer: ScriptedModel, inner: ScriptedModel) -> Agent[Any]:
        clerk = runner.agent(Agent(name="clerk", tools=[till.pay], model=inner))
        return Agent(name="boss", model=outer, tools=[clerk.as_tool("clerk", "Pays people.")])

    wanted = calls(("clerk", {"input": "pay ann"}), ("clerk", {"input": "pay ann again"}))
    inner = script(calls(PAY), calls(PAY), "one", "two")
    result = run(runner, boss(script(wanted, "done"), inner))
    assert result.final_output == "done"
    assert len(till.paid) == 2
    again = run(runner, boss(script(), script()))
    assert (again.final_output, len(till.paid)) == ("done", 2)
    assert outputs(again) == outputs(result)


def test_a_wait_inside_an_agent_that_is_a_tool_reaches_whoever_runs_the_outer_one(kd: killick.Client) -> None:
    till = Till()
    runner = KillickRunner(kd, tools={"pay": {"approve": "managers"}})

    def boss(outer: ScriptedModel, inner: ScriptedModel) -> Agent[Any]:
        clerk = runner.agent(Agent(name="clerk", tools=[till.pay], model=inner))
        return Agent(name="boss", model=outer, tools=[clerk.as_tool("clerk", "Pays people.")])

    with pytest.raises(killick.RunWaiting):
        run(runner, boss(script(calls(("clerk", {"input": "pay ann"}))), script(calls(PAY))))
    kd.answer("m1", "approve", by="kim")
    assert run(runner, boss(script("done"), script("paid"))).final_output == "done"
    assert till.paid == [("ann", 5)]


@pytest.mark.parametrize("session", [None, "inner"])
def test_a_run_inside_a_tool_waits_with_it_and_ends_no_turn_twice(kd: killick.Client, session: str | None) -> None:
    """The tool is entered again from its top; the run in it that has ended is found again, and pays nobody."""
    till = Till()

    @function_tool
    async def refund(to: str) -> str:
        """Give it back."""
        till.paid.append((to, -1))
        return f"refunded {to}"

    runner = KillickRunner(kd, tools={"refund": {"approve": "managers"}, "delegate": "reads"})

    def boss(outer: ScriptedModel, pays: ScriptedModel, refunds: ScriptedModel) -> Agent[Any]:
        @function_tool(failure_error_function=None)
        async def delegate(task: str) -> str:
            """Have others do it."""
            said = []
            for model in (pays, refunds):
                agent = Agent(name="clerk", tools=[till.pay, refund], model=model)
                said.append((await runner.run(agent, task, session=session)).final_output)
            return ", ".join(said)

        return Agent(name="boss", model=outer, tools=[delegate])

    def bounded(agent: Agent[Any]) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(60):
                return await runner.run(agent, "go", turn="m1")

        return asyncio.run(within()).final_output

    wanted = script(calls(("delegate", {"task": "do it"})))
    refunds = script(calls(("refund", {"to": "ann"})))
    with pytest.raises(killick.RunWaiting, match="refund"):
        bounded(boss(wanted, script(calls(PAY), "paid"), refunds))
    with pytest.raises(killick.RunWaiting, match="refund"):
        bounded(boss(script(), script(), script()))
    kd.answer("m1", "approve", by="kim")
    assert bounded(boss(script("done"), script(), script("refunded"))) == "done"
    assert till.paid == [("ann", 5), ("ann", -1)]


def test_an_agent_as_a_tool_can_be_one_step_as_a_whole(kd: killick.Client) -> None:
    runner = KillickRunner(kd, tools={"clerk": "idempotent"})
    found = []
    for outer, inner in ((script(calls(("clerk", {"input": "?"})), "done"), script("it is 17")), (script(), script())):
        tool = Agent(name="clerk", model="inner").as_tool("clerk", "Knows.")
        config = RunConfig(model_provider=Named(inner))
        result = run(runner, Agent(name="boss", model=outer, tools=[tool]), run_config=config)
        found.append((result.final_output, outputs(result)))
    assert found == [("done", ["it is 17"])] * 2


def test_an_agent_as_a_tool_that_does_not_go_through_the_gate_is_refused(kd: killick.Client) -> None:
    tool = Agent(name="clerk", model=script()).as_tool("clerk", "Pays people.")
    with pytest.raises(DeclarationRefused, match=r"runner\.agent\(clerk\)\.as_tool"):
        run(KillickRunner(kd), Agent(name="boss", model=script(), tools=[tool]))


# ways to run ------------------------------------------------------------------------------------


def test_a_stream_is_on_record_and_comes_whole_the_next_time(kd: killick.Client) -> None:
    till = Till()

    async def stream(model: ScriptedModel) -> tuple[Any, int]:
        runner, count = KillickRunner(kd), 0
        agent = Agent(name="clerk", tools=[till.pay], model=model)
        async with runner.streamed(agent, "pay ann 5", session="thread", turn="m1") as result:
            async for event in result.stream_events():
                count += event.type == "raw_response_event"
        return result.final_output, count

    live = asyncio.run(stream(script(calls(PAY), "done")))
    again = asyncio.run(stream(script()))
    assert (live[0], again[0]) == ("done", "done")
    assert live[1] > again[1] == 2
    assert till.paid == [("ann", 5)]
    assert len(asyncio.run(KillickSession("thread", kd).get_items())) == 4


def test_a_stream_that_waits_for_a_person_says_so(kd: killick.Client) -> None:
    till = Till()
    runner = KillickRunner(kd, tools={"pay": {"approve": "managers"}})

    async def stream(model: ScriptedModel) -> Any:
        async with runner.streamed(
            Agent(name="clerk", tools=[till.pay], model=model), "pay ann 5", turn="m1"
        ) as result:
            async for _ in result.stream_events():
                pass
        return result.final_output

    with pytest.raises(killick.RunWaiting):
        asyncio.run(stream(script(calls(PAY))))
    kd.answer("m1", "approve", by="kim")
    assert asyncio.run(stream(script("done"))) == "done"


def test_a_stream_that_nobody_reads_to_its_end_leaves_its_turn_open(kd: killick.Client) -> None:
    till, runner = Till(), KillickRunner(kd)

    async def stream(model: ScriptedModel, *, stops: bool) -> Any:
        agent = Agent(name="clerk", tools=[till.pay], model=model)
        async with runner.streamed(agent, "pay ann 5", session="thread") as result:
            async for event in result.stream_events():
                if stops and getattr(event, "name", "") == "tool_output":
                    break
        return result.final_output

    asyncio.run(stream(script(calls(PAY), "never heard"), stops=True))
    assert asyncio.run(stream(script("done"), stops=False)) in ("done", "never heard")
    assert till.paid == [("ann", 5)]
    asyncio.run(stream(script(calls(PAY, start=2), "done again"), stops=False))
    assert len(till.paid) == 2


@pytest.mark.parametrize("mode", ["immediate", "after_turn"])
def test_a_stream_that_is_cancelled_leaves_its_turn_open(kd: killick.Client, mode: Any) -> None:
    till, runner = Till(), KillickRunner(kd)

    async def stream(model: ScriptedModel, *, cancels: bool) -> Any:
        agent = Agent(name="clerk", tools=[till.pay], model=model)
        async with asyncio.timeout(60), runner.streamed(agent, "pay ann 5", session="thread") as result:
            async for event in result.stream_events():
                if cancels and getattr(event, "name", "") == "tool_output":
                    result.cancel(mode)
        return result.final_output

    assert asyncio.run(stream(script(calls(PAY)), cancels=True)) is None
    model = script("done")
    assert asyncio.run(stream(model, cancels=False)) == "done"
    assert model.first_call is not None
    told: Any = model.first_call.input[-1]
    assert told["type"] == "function_call_output", "the model is asked what comes after the payment, not to pay"
    assert till.paid == [("ann", 5)]
    assert asyncio.run(stream(script(calls(PAY, start=2), "done again"), cancels=False)) == "done again"
    assert len(till.paid) == 2


class Named(ModelProvider):
    def __init__(self, model: ScriptedModel) -> None:
        self.model = model

    def get_model(self, model_name: str | None) -> ScriptedModel:
        return self.model


def test_models_by_name_are_on_record_too(kd: killick.Client) -> None:
    till = Till()
    for model in (script(calls(PAY), "done"), script()):
        config = RunConfig(model_provider=Named(model))
        agent = Agent(name="clerk", tools=[till.pay], model="some-model")
        assert run(KillickRunner(kd), agent, run_config=config).final_output == "done"
    assert till.paid == [("ann", 5)]


def test_inside_a_killick_agent_the_whole_turn_is_part_of_its_run(tmp_path: Path) -> None:
    till, runner = Till(), KillickRunner(tools={"pay": {"approve": "managers"}})
    model = script(calls(PAY), "done", "twice")
    begun: list[str] = []

    @killick.agent
    async def desk(run: killick.Run, said: str) -> str:
        begun.append(run.id)
        async with run.hosting():
            first = await runner.run(Agent(name="clerk", tools=[till.pay], model=model), said)
            second = await runner.run(Agent(name="clerk", model=model), said)
        return f"{first.final_output} {second.final_output}"

    with killick.open(tmp_path / "killick.db") as kd, pytest.raises(killick.RunWaiting):
        kd.run(desk, "pay ann 5", id="d1")
    assert till.paid == []
    with killick.open(tmp_path / "killick.db") as kd:  # nothing of it is in memory any more
        kd.answer("d1", "approve", by="kim")
        assert kd.run(desk, "pay ann 5", id="d1") == "done twice"
    assert (till.paid, begun) == ([("ann", 5)], ["d1", "d1"])


def test_inside_somebody_s_host_calls_are_its_steps(kd: killick.Client) -> None:
    till = Till()

    async def main(model: ScriptedModel) -> Any:
        async with kd.host("h1"):
            agent = Agent(name="clerk", tools=[till.pay], model=model)
            return (await KillickRunner(kd).run(agent, "pay ann 5", session="thread", turn="m1")).final_output

    assert asyncio.run(main(script(calls(PAY), "done"))) == "done"
    assert asyncio.run(main(script())) == "done"
    assert till.keys[0].startswith("h1:")


# refused ----------------------------------------------------------------------------------------


def test_a_tool_that_acts_here_past_the_gate_is_refused_unless_somebody_says_so(kd: killick.Client) -> None:
    shell = LocalShellTool(executor=lambda request: "ran")
    with pytest.raises(DeclarationRefused, match="without being recorded"):
        run(KillickRunner(kd), Agent(name="clerk", tools=[shell], model=script()))
    left = KillickRunner(kd, tools={"local_shell": None})
    assert run(left, Agent(name="clerk", tools=[shell], model=script("done"))).final_output == "done"


def test_a_turn_that_could_not_be_found_again_is_refused(kd: killick.Client) -> None:
    with pytest.raises(DeclarationRefused, match="session= or turn="):
        KillickRunner(kd).run_sync(Agent(name="clerk", model=script()), "hi")
    with pytest.raises(DeclarationRefused, match="has no store"):
        KillickRunner().run_sync(Agent(name="clerk", model=script()), "hi", turn="m1")


def test_a_session_that_does_not_know_turns_is_refused(kd: killick.Client) -> None:
    with pytest.raises(DeclarationRefused, match="SQLiteSession: does not know a turn"):
        KillickRunner(kd).run_sync(Agent(name="clerk", model=script()), "hi", session=SQLiteSession("x"))  # type: ignore[arg-type]


def test_an_agent_made_for_killick_does_not_run_past_it() -> None:
    agent = KillickRunner().agent(Agent(name="clerk", model=script("done")))
    with pytest.raises(DeclarationRefused, match=r"KillickRunner\.run"):
        asyncio.run(Runner.run(agent, "hi"))


@needs("openai-agents", 0, 24)
def test_tools_of_an_mcp_server_go_through_the_gate_and_its_hints_are_heard(kd: killick.Client, tmp_path: Path) -> None:
    counted = tmp_path / "counted.txt"
    command: Any = {"command": sys.executable, "args": [str(Path(__file__).with_name("till_server.py")), str(counted)]}

    async def main() -> list[Any]:
        async with MCPServerStdio(command, client_session_timeout_seconds=60) as server:
            found = []
            for model in (script(calls(PAY, ("balance", {})), "done"), script()):
                agent = Agent(name="clerk", mcp_servers=[server], model=model)
                found.append(outputs(await KillickRunner(kd).run(agent, "pay ann 5", turn="m1")))
            return found

    first, again = asyncio.run(main())
    assert first == again
    assert sorted(counted.read_text().splitlines()) == ["looked", "paid 5 to ann"]
    effects = {effect.tool: effect.effect for effect in kd.state("m1").effects}
    assert effects["pay"] == "at_most_once"
    assert effects.get("balance", "reads") == "reads"
