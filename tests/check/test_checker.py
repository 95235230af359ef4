"""What `check` rehearses, with what around it, and what it says of agents that are sound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

import killick
from killick.check.checker import Case, case_like, check, interrupt_everywhere
from killick.check.fakes import always, in_order
from killick.check.findings import ALONE, Faulty, Report
from killick.check.stage import TROUBLES


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("killick")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@dataclass
class Order:
    id: str
    lines: list[str]


@dataclass
class Receipt:
    number: int


@killick.tool(effect="reads")
async def fetch(order: str) -> Order:
    raise AssertionError("a rehearsal calls no tool")


def find_charge(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    raise AssertionError("nor what looks for its effect")


@killick.tool(effect="at_most_once", reconcile=find_charge)
async def charge(order: str, amount: int) -> Receipt:
    raise AssertionError("a rehearsal calls no tool")


@killick.tool(effect="idempotent")
def ship(line: str, key: killick.Key = killick.KEY) -> str:
    raise AssertionError("a rehearsal calls no tool")


async def advise(prompt: str) -> str:
    raise AssertionError("nor a model")


@killick.agent
async def sell(run: killick.Run, order: str) -> Receipt:
    found = await run.call(fetch, order)
    advice = await run.model(advise, f"how to ship {found.id}?")
    answer = await run.ask(f"Charge {found.id}?", timeout="24h", default="reject")
    if not answer.approved:
        await run.note(f"no: {advice}")
        return Receipt(0)
    receipt = await run.call(charge, found.id, 5)
    await run.gather(*[run.call(ship, line) for line in found.lines])
    await run.wait("delivered", timeout="30d")
    return receipt


@killick.agent
def sell_blocking(run: killick.SyncRun, order: str) -> Receipt:
    found = run.call(fetch, order)
    if not run.ask("Charge it?", timeout="24h", default="reject").approved:
        return Receipt(0)
    run.sleep("2h")
    return run.call(charge, found.id, 5)


@killick.agent
async def family(run: killick.Run, orders: list[str]) -> int:
    children = [await run.spawn(sell_blocking, order) for order in orders]
    return sum([(await child.result()).number for child in children])


@killick.machine
async def subscription(run: killick.Run, month: int) -> killick.Next | killick.WaitFor | killick.Done:
    if month == 3:
        return killick.Done(month)
    await run.call(ship, f"issue {month}")
    return killick.Next(month + 1)


@cache
def sold() -> Report:
    """What is said of `sell`, everywhere interrupted: rehearsed once for every test that reads it."""
    return check(sell)


SOUND: list[tuple[Any, dict[str, Any]]] = [
    (sell_blocking, {}),
    (subscription, {"input": 0}),
    (sell, {"fakes": {fetch: Order("o1", ["a", "b", "c"])}}),
    (sell, {"answers": {"Charge": "reject"}}),
]


@pytest.mark.gate("subscription-options1")
@pytest.mark.parametrize(("agent", "options"), SOUND)
def test_a_sound_agent_is_blamed_for_nothing(agent: Any, options: dict[str, Any]) -> None:
    report = check(agent, **options)
    assert not report.findings, str(report)
    assert report.left_alone == "completed"
    assert not report.cut_short


@pytest.mark.slow
def test_it_dies_everywhere_and_meets_every_trouble() -> None:
    report = sold()
    assert not report.findings, str(report)
    assert report.left_alone == "completed"
    assert not report.cut_short
    kinds = {"death", "timeout", "lost answer", "rate limit", "failing tool", "pause", "other answer"}
    assert kinds | {"deadline", "second death", ALONE} == report.ways.keys()
    assert report.ways["death"] > 60
    assert report.stories > 120


def test_tools_and_models_are_not_called_and_give_samples_of_their_types() -> None:
    assert sold().sampled == ("advise", "charge", "fetch", "ship")


def test_fakes_are_given_by_tool_by_name_in_order_or_as_a_function() -> None:
    seen: list[str] = []

    def shipped(line: str) -> str:
        seen.append(line)
        return f"parcel with {line}"

    fakes = {fetch: Order("o1", ["x", "y"]), "charge": Receipt(7), ship: shipped, advise: in_order("by boat")}
    report = check(sell, input="o1", fakes=fakes, stories_max=30)
    assert not report.findings, str(report)
    assert report.sampled == ()
    assert set(seen) == {"x", "y"}


def test_a_fake_that_raises_is_what_the_agent_meets() -> None:
    report = check(sell, fakes={charge: ConnectionRefusedError("closed")}, stories_max=30)
    assert report.left_alone == "failed"
    [failing] = [finding for finding in report.findings if finding.kind == "fails"]
    assert "closed" in failing.title
    assert failing is report.findings[0]
    assert (report.ways, report.cut_short) == (
        {"left alone": 1}, "stopped after one rehearsal: it fails without any interruption"
    )  # fmt: skip


def test_a_real_tool_is_called() -> None:
    called: list[int] = []

    @killick.tool(effect="reads")
    async def look(at: int) -> int:
        called.append(at)
        return at

    @killick.agent
    async def looks(run: killick.Run, at: int) -> int:
        return await run.call(look, at)

    assert not check(looks, input=3, real=[look]).findings
    assert set(called) == {3}
    assert len(called) > 10


def test_answers_are_given_by_a_part_of_the_question() -> None:
    approved, rejected = sold(), check(sell, answers={"charge": "reject", "*": "approve"}, stories_max=30)
    assert approved.tools != rejected.tools
    assert "charge" not in rejected.tools


def test_other_answers_lead_to_paths_that_are_interrupted_everywhere_too() -> None:
    @killick.agent
    async def only_when_rejected(run: killick.Run, order: str) -> str:
        answer = await run.ask("Go on?")
        if answer.approved:
            return "yes"
        return await run.call(post, order)

    @killick.tool(effect="idempotent")
    async def post(text: str) -> str:
        return text

    [finding] = check(only_when_rejected).faults
    assert finding.kind == "twice"
    assert "another way" in finding.seen


@pytest.mark.slow
def test_children_are_rehearsed_with_their_parent() -> None:
    report = check(family, input=["a", "b"])
    assert not report.findings, str(report)
    assert report.questions == 2


def test_an_agent_like_a_run_on_record_meets_what_the_run_met() -> None:
    with killick.open("memory:", clock=killick.clock.LeapingClock()) as kd:

        @killick.tool(effect="reads")
        async def recall(name: str) -> Order:
            return Order(f"{name} of old", ["p", "q"])

        @killick.agent
        async def remembering(run: killick.Run, name: str) -> str:
            order = await run.call(recall, name)
            answer = await run.ask(f"Keep {order.id}?")
            return f"{order.id}: {answer.kind}"

        with pytest.raises(killick.RunWaiting):
            kd.run(remembering, "ann", id="r1")
        kd.answer("r1", "reject")
        assert kd.run(remembering, "ann", id="r1") == "ann of old: reject"
        case = case_like(kd.runtime.log, "r1", remembering)
    assert case.input == "ann"
    report = check(case)
    assert not report.findings, str(report)
    assert report.sampled == ()


@pytest.mark.slow
def test_sleeps_in_memory_take_no_time_in_a_rehearsal() -> None:
    @killick.agent
    async def patient(run: killick.Run, order: str) -> str:
        await asyncio.sleep(60)  # killick: ok
        return order

    assert not check(patient).findings


@pytest.mark.slow
def test_an_agent_that_never_ends_is_told_so() -> None:
    @killick.agent
    async def stuck(run: killick.Run, order: str) -> str:
        await asyncio.get_running_loop().create_future()
        return order

    report = check(stuck)
    assert [finding.kind for finding in report.findings] == ["hangs"]
    assert report.stories == 1
    assert "did not end" in report.cut_short


def test_the_number_of_rehearsals_can_be_limited() -> None:
    report = check(sell, stories_max=10)
    assert report.stories == 10
    assert "stopped after 10" in report.cut_short


def test_interrupt_everywhere_raises_what_a_test_prints() -> None:
    @killick.tool(effect="idempotent")
    async def post(text: str) -> str:
        return text

    @killick.agent
    async def posts(run: killick.Run, text: str) -> str:
        return await run.call(post, text)

    with pytest.raises(Faulty, match="post is done twice") as raised:
        interrupt_everywhere(posts, input="x")
    assert raised.value.report.faults
    assert isinstance(raised.value, AssertionError)
    assert interrupt_everywhere(subscription, input=0).holds


def test_a_case_is_an_agent_with_what_is_around_it() -> None:
    case = Case(agent=sell, input="o1", fakes={fetch: Order("o1", [])}, messages={"delivered": True})
    report = check(case, stories_max=30)
    assert not report.findings, str(report)


def test_the_same_value_every_time_may_be_a_list() -> None:
    @killick.tool(effect="reads")
    async def lines(order: str) -> list[str]:
        return []

    @killick.agent
    async def counts(run: killick.Run, order: str) -> int:
        return len(await run.call(lines, order)) + len(await run.call(lines, order))

    assert not check(counts, fakes={lines: always(["a", "b"])}).findings


def test_what_is_declared_while_checking_is_forgotten_after() -> None:
    from killick.definitions.agents import AGENTS
    from killick.definitions.tools import TOOLS

    before = dict(TOOLS), dict(AGENTS.declared)
    check(sell, stories_max=10)
    assert (dict(TOOLS), dict(AGENTS.declared)) == before


def test_every_trouble_has_words() -> None:
    assert all(words and words[0].islower() for words in TROUBLES.values())


def test_what_is_drawn_by_chance_may_be_another_where_nobody_had_heard_of_it() -> None:
    @killick.agent
    async def draws(run: killick.Run) -> str:
        return await run.call(ship, f"{run.uuid()} {run.random()}")

    assert not check(draws).findings


def test_a_tool_that_is_tried_once_is_told_what_a_timeout_does_to_it_and_a_death_does_nothing() -> None:
    @killick.tool(effect="idempotent", retry=killick.Retry(attempts=1))
    async def once(line: str, key: killick.Key = killick.KEY) -> str:
        return line

    @killick.agent
    async def tries_once(run: killick.Run, line: str) -> str:
        return await run.call(once, line)

    report = check(tries_once)
    assert {finding.kind for finding in report.findings} == {"fragile"}
    assert [finding.title for finding in report.findings] == ["one timeout of once fails the run"]
    assert report.findings[0].why.endswith("It was not tried again: no attempt was left.")


ONE_SIDED = killick.Contract("one_sided", [killick.rules.arguments("charge", amount={"max": 500})])


@killick.agent(contract=ONE_SIDED)
async def charging(run: killick.Run, order: str) -> int:
    return (await run.call(charge, order, 5)).number


def test_a_contract_that_limits_a_number_on_one_side_is_advised() -> None:
    report = check(charging, input="o1")
    [advice] = report.advice
    assert (advice.kind, report.holds) == ("one_sided", True)
    assert "amount" in advice.title
    assert "min = 0" in advice.fix
