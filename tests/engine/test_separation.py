"""Separation of duties: who started a run, or edited a call, does not approve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import killick
from engine.desk import PEOPLE, Desk
from killick import rules
from killick.contracts.contract import Contract
from killick.engine.control.inbox import VOTE, answer_id
from killick.errors import AnswerRefused, ContractRefused
from killick.model import events as e
from killick.triggers import TRIGGERS, every
from world import World


@pytest.fixture(params=["warm", "cold"])
def desk(world: World, request: pytest.FixtureRequest) -> Desk:
    """In one process, and in another one after every answer."""
    return Desk(world, cold=request.param == "cold")


@killick.tool(effect="idempotent", name="separation.pay")
async def pay(to: str, amount: int) -> str:
    return f"paid {amount}"


def paying(name: str, *given: Any) -> Any:
    @killick.agent(name=f"separation.{name}", contract=killick.Contract(name, given, people=PEOPLE))
    async def agent(run: killick.Run) -> str:
        return await run.call(pay, "ann", 500)

    return agent


def large(**options: Any) -> Any:
    ask = killick.Approval("managers", separate=True, **options)
    return rules.arguments("separation.pay", amount={"max": 100}, name="large", ask=ask)


ALONE = paying("alone", large())
BY_TWO = paying("by two", large(need=2))


@killick.agent(name="separation.asks")
async def asks(run: killick.Run) -> str:
    return (await run.ask("Pay?", to=["mia", "max"], separate=True)).kind


@killick.agent(name="separation.parent")
async def parent(run: killick.Run) -> str:
    return await (await run.spawn(asks, id="child")).result()


@killick.agent(name="separation.renews")
async def renews(run: killick.Run, n: int) -> str:
    if n:
        await run.renew(n - 1)
    return (await run.ask("Pay?", separate=True)).kind


def test_who_started_a_run_does_not_approve_its_call(desk: Desk) -> None:
    desk.kd.start(ALONE, id="r", by="mia")
    desk.asked(ALONE)
    assert "mia started this run; another person" in desk.refused(AnswerRefused, "approve", by="mia")
    assert "mia started this run" in desk.refused(AnswerRefused, "respond", by="mia", value="yes")
    desk.say("approve", by="max")
    assert desk.go(ALONE) == "paid 500"
    desk.holds(ALONE)


def test_who_started_a_run_may_reject(desk: Desk) -> None:
    desk.kd.start(asks, id="r", by="mia")
    desk.asked(asks)
    assert "mia started this run" in desk.refused(AnswerRefused, "approve", by="mia")
    desk.say("reject", by="mia")
    assert desk.go(asks) == "reject"


def test_without_separation_they_approve(desk: Desk) -> None:
    agent = paying("usual", rules.arguments("separation.pay", amount={"max": 100}, name="large", ask="managers"))
    desk.kd.start(agent, id="r", by="mia")
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.go(agent) == "paid 500"


def test_who_edited_a_call_does_not_approve_it(desk: Desk) -> None:
    desk.asked(ALONE)
    desk.say("edit", by="mia", value={"amount": 900})
    wait = desk.asked(ALONE)
    assert wait.votes == ()
    assert wait.apart == {"mia": "edited this call"}
    assert "mia edited this call; another person" in desk.refused(AnswerRefused, "approve", by="mia")
    desk.say("approve", by="max")
    assert desk.go(ALONE) == "paid 900"
    desk.holds(ALONE)


def test_every_editor_of_a_call_stays_apart(desk: Desk) -> None:
    desk.asked(BY_TWO)
    for by, amount in (("mia", 900), ("max", 800)):
        desk.say("edit", by=by, value={"amount": amount})
        desk.asked(BY_TWO)
    for by in ("mia", "max"):
        assert "edited this call" in desk.refused(AnswerRefused, "approve", by=by)
    desk.say("approve", by="moe")
    assert desk.asked(BY_TWO).votes == ("moe",)


def test_a_quorum_counts_neither_the_starter_nor_the_editor(desk: Desk) -> None:
    desk.kd.start(BY_TWO, id="r", by="mia")
    desk.asked(BY_TWO)
    desk.say("approve", by="max")
    assert "mia started this run" in desk.refused(AnswerRefused, "approve", by="mia")
    desk.say("approve", by="moe")
    assert desk.go(BY_TWO) == "paid 500"
    assert [each.event.by for each in desk.told(e.WaitVoted)] == ["max", "moe"]


def test_the_run_itself_counts_no_vote_that_came_past_the_client(desk: Desk) -> None:
    desk.kd.start(BY_TWO, id="r", by="mia")
    wait = desk.asked(BY_TWO)
    body = {"kind": "approve", "value": None, "comment": None, "digest": wait.digest}
    engine = desk.kd.runtime.engine
    id_ = f"{answer_id('r', wait.step, wait.opened)}#mia"
    killick.client.answers.deliver(engine, "r", VOTE, body, id=id_, by="mia")
    assert desk.asked(BY_TWO).votes == ()
    assert desk.told(e.WaitVoted) == []


def test_nobody_answers_without_a_name(desk: Desk) -> None:
    desk.kd.start(renews, 0, id="r", by="mia")
    desk.asked(renews, 0)
    assert "say who you are" in desk.refused(AnswerRefused, "approve", by=None)


def test_a_child_a_renewal_and_a_fork_have_the_starters_of_the_run_before(desk: Desk) -> None:
    desk.kd.start(parent, id="r", by="mia")
    desk.go(parent)
    desk.go(asks, run="child")
    assert "mia started this run" in desk.refused(AnswerRefused, "approve", by="mia", wait="child")
    desk.kd.start(renews, 1, id="long", by="mia")
    desk.go(renews, 1, run="long")
    assert "mia started this run" in desk.refused(AnswerRefused, "approve", by="mia", wait="long")
    fork = desk.kd.fork("long+2", "start", id="forked", by="max")
    desk.go(renews, 0, run=fork.id)
    for by in ("mia", "max"):
        assert "started this run" in desk.refused(AnswerRefused, "approve", by=by, wait=fork.id)
    desk.say("approve", by="moe", wait=fork.id)


def test_a_separate_rule_is_not_satisfied_by_an_approval_that_was_not() -> None:
    loose = rules.arguments("separation.pay", to={"one_of": ["bob"]}, name="strangers", ask="managers")
    agent = paying("two rules", loose, large())
    with killick.open("memory:") as kd:
        kd.start(agent, id="r", by="mia")
        for by in ("mia", "max"):
            with pytest.raises(killick.RunWaiting):
                kd.run(agent, id="r")
            kd.answer("r", "approve", by=by)
        assert kd.run(agent, id="r") == "paid 500"


def test_a_trigger_that_a_person_fires_records_who_started(tmp_path: Path) -> None:
    every("1d", asks, name="separation_daily")
    try:
        with killick.open(str(tmp_path / "killick.db")) as kd:
            run = kd.triggers.fire("separation_daily", by="mia")
            assert kd.state(run).fold.facts.starters == ("mia",)
    finally:
        del TRIGGERS["separation_daily"]


@pytest.mark.parametrize("how", ["run", "start"])
def test_a_start_by_the_client_records_who_started(how: str) -> None:
    with killick.open("memory:") as kd:
        if how == "start":
            kd.start(asks, id="r", by="mia")
        with pytest.raises(killick.RunWaiting):
            kd.run(asks, id="r", **({"by": "mia"} if how == "run" else {}))
        assert kd.state("r").fold.facts.starters == ("mia",)


def test_separation_is_written_in_toml_and_survives_the_record() -> None:
    text = """
    name = "c"
    [[rules]]
    tools = "separation.pay"
    arguments.amount = {max = 100}
    ask = {to = "managers", separate = true}
    """
    contract = Contract.parse(text)
    assert Contract.from_spec(contract.spec) == contract
    assert contract.spec["rules"][0]["ask"]["separate"] is True
    with pytest.raises(ContractRefused, match="separate='yes'; give true or false"):
        killick.Approval("managers", separate="yes")  # type: ignore[arg-type]


def test_a_start_without_a_name_keeps_nobody_apart(desk: Desk) -> None:
    desk.kd.start(asks, id="r")
    desk.asked(asks)
    assert desk.asked(asks).apart == {}
    desk.say("approve", by="mia")
    assert desk.go(asks) == "approve"
