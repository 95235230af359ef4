"""R31: people are asked about what is intended, and what they agree to is that and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pytest

import killick
from engine.desk import PEOPLE, Desk
from killick import rules
from killick.definitions.tools import TOOLS
from killick.errors import AlreadyAnswered, AnswerRefused, NotAsked
from killick.model import events as e
from killick.workers import hooks
from world import World

DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@pytest.fixture(params=["warm", "cold"])
def desk(world: World, request: pytest.FixtureRequest) -> Desk:
    """In one process, and in another one after every answer."""
    return Desk(world, cold=request.param == "cold")


@pytest.fixture
def late(make_world: Callable[[killick.clock.ManualClock], World]) -> tuple[Desk, killick.clock.ManualClock]:
    """By a clock that the test moves."""
    clock = killick.clock.ManualClock()
    return Desk(make_world(clock), cold=True), clock


@killick.tool(effect="idempotent", name="approvals.pay")
async def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    DONE.append((to, amount, str(key)))
    return f"paid {amount}"


def paying(name: str, *given: Any, to: str = "ann", amount: int = 500, **options: Any) -> Any:
    """An agent that pays once, and tells what it was told."""
    contract = killick.Contract(name, given, people=PEOPLE, **options)

    @killick.agent(name=f"approvals.{name}", contract=contract)
    async def agent(run: killick.Run) -> Any:
        try:
            return [await run.call(pay, to, amount), str(run.call_answer)]
        except killick.Rejected as rejected:
            return [rejected.code, rejected.rule, rejected.by, rejected.response, rejected.message]

    return agent


LARGE = rules.arguments("approvals.pay", amount={"max": 100}, name="large", ask="managers")
LARGE_BY_TWO = rules.arguments(
    "approvals.pay", amount={"max": 100}, name="large", ask=killick.Approval("managers", need=2)
)
STRANGERS = rules.arguments("approvals.pay", to={"one_of": ["bob"]}, name="strangers", ask="directors")
AT_MOST = rules.arguments("approvals.pay", amount={"max": 1000}, name="at most")


# four answers -------------------------------------------------------------------------------------


def test_what_is_approved_is_done_under_the_key_of_its_arguments(desk: Desk) -> None:
    agent = paying("approved", LARGE)
    wait = desk.asked(agent)
    assert (wait.rule, wait.may, wait.need) == ("large", ("max", "mia", "moe"), 1)
    assert wait.intention == {"tool": "approvals.pay", "arguments": {"to": "ann", "amount": 500}}
    desk.say("approve", by="mia", comment="fine")
    assert desk.go(agent) == ["paid 500", "mia agreed (fine)"]
    assert [done[:2] for done in DONE] == [("ann", 500)]
    desk.holds(agent)


def test_what_is_rejected_is_not_done_and_says_who_and_by_which_rule(desk: Desk) -> None:
    agent = paying("rejected", LARGE)
    desk.asked(agent)
    desk.say("reject", by="max", comment="no receipt")
    assert desk.go(agent) == ["rejected_by_person", "large", "max", None, "max said no: no receipt"]
    assert not DONE
    desk.holds(agent)


def test_an_answer_instead_reaches_the_agent_as_it_was_given(desk: Desk) -> None:
    agent = paying("instead", LARGE)
    desk.asked(agent)
    desk.say("respond", by="moe", value={"call": ["me", 17]})
    code, rule, by, response, _ = desk.go(agent)
    assert (code, rule, by, response) == ("answered_instead", "large", "moe", {"call": ["me", 17]})
    assert not DONE
    desk.holds(agent)


def test_an_edit_is_done_in_its_own_arguments_and_under_their_key(desk: Desk) -> None:
    agent = paying("edited", LARGE)
    asked_key = desk.asked(agent).prompt
    desk.say("edit", by="mia", value={"amount": 70}, comment="less")
    assert desk.go(agent) == ["paid 70", "mia changed amount from 500 to 70 (less)"]
    [(to, amount, key)] = DONE
    assert (to, amount) == ("ann", 70)
    [started] = desk.told(e.AttemptStarted)
    [edited] = desk.told(e.StepEdited)
    assert started.event.key == key
    assert key.rpartition(":")[2] == e.from_text(edited.event.digest).hex()[:8]
    assert (edited.event.by, edited.data["changed"]) == ("mia", {"amount": (500, 70)})
    assert asked_key is not None
    desk.holds(agent)


def test_an_edit_that_a_rule_rejects_leaves_the_question_and_the_step_as_they_were(desk: Desk) -> None:
    agent = paying("rejected edit", AT_MOST, LARGE)
    desk.asked(agent)
    desk.say("edit", by="mia", value={"amount": 3000})
    wait = desk.asked(agent)
    assert wait.intention["arguments"] == {"to": "ann", "amount": 500}
    [edited] = desk.told(e.StepEdited)
    assert (edited.event.by, edited.event.verdict.ruling, edited.event.verdict.rule) == ("mia", "reject", "at most")
    assert edited.data["arguments"] == {"to": "ann", "amount": 3000}
    assert any("mia" in note.data["note"] and "at most" in note.data["note"] for note in desk.told(e.NoteMade))
    desk.say("approve", by="max")
    assert desk.go(agent) == ["paid 500", "max agreed"]
    assert [done[:2] for done in DONE] == [("ann", 500)]
    desk.holds(agent)


def test_an_edit_may_be_for_others_to_agree_to_and_stays_the_editors(desk: Desk) -> None:
    agent = paying("others", LARGE, STRANGERS, to="bob")
    desk.asked(agent)
    desk.say("edit", by="mia", value={"to": "carl"}, comment="he moved")
    assert desk.asked(agent).to == ("directors",)
    desk.say("approve", by="dan", comment="fine")
    said = desk.go(agent)
    assert said[0] == "paid 500"
    assert said[1].startswith("mia changed to from 'bob' to 'carl'")
    desk.holds(agent)


def test_of_two_edits_the_agent_is_told_both(desk: Desk) -> None:
    agent = paying("two edits", LARGE, STRANGERS)
    desk.asked(agent)
    desk.say("edit", by="mia", value={"amount": 400})
    assert desk.asked(agent).to == ("directors",)
    desk.say("edit", by="dan", value={"to": "carl"})
    while desk.go(agent) is None:
        [wait] = desk.kd.inbox()
        desk.say("approve", by=wait.may[0] if wait.may else None)
    said = desk.go(agent)[1]
    assert "amount from 500 to 400" in said
    assert "to from 'ann' to 'carl'" in said
    assert [done[:2] for done in DONE] == [("carl", 400)]
    desk.holds(agent)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"amount": "many"}, "amount"),
        ({"sum": 1}, "sum"),
        ({"key": "k"}, "key"),
        (7, "by name"),
        ({"amount": None}, "int"),
    ],
    ids=str,
)
def test_an_edit_that_the_tool_would_not_take_is_refused_where_it_can_be_mended(
    desk: Desk, value: Any, why: str
) -> None:
    agent = paying("misfit", LARGE)
    desk.asked(agent)
    assert why in desk.refused(AnswerRefused, "edit", by="mia", value=value)


@pytest.mark.parametrize("value", [{"amount": "many"}, {"sum": 1}, {"amount": None}], ids=str)
def test_an_edit_that_only_the_run_can_see_to_be_wrong_is_set_aside_on_record(
    desk: Desk, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = paying("set aside", LARGE)
    desk.asked(agent)
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(TOOLS, "approvals.pay")  # whoever answers does not know the tool
        desk.say("edit", by="mia", value=value)
    assert desk.asked(agent).intention["arguments"]["amount"] == 500
    assert any("mia" in note.data["note"] and "was ignored" in note.data["note"] for note in desk.told(e.NoteMade))
    desk.say("approve", by="mia")
    assert desk.go(agent) == ["paid 500", "mia agreed"]
    desk.holds(agent)


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


@pytest.mark.parametrize(
    ("edit", "done"),
    [
        ({"total": "2.25"}, ["2.25", "2020-01-01", "small"]),
        ({"total": 3}, ["3", "2020-01-01", "small"]),
        ({"total": Decimal("4.5")}, ["4.5", "2020-01-01", "small"]),
        ({"day": "2021-02-03"}, ["1.5", "2021-02-03", "small"]),
        ({"size": "large", "total": "1"}, ["1", "2020-01-01", "large"]),
    ],
    ids=str,
)
def test_an_edit_may_be_written_in_json_whatever_the_arguments_are(desk: Desk, edit: Any, done: list[str]) -> None:
    @killick.tool(effect="idempotent", approve="managers", name="approvals.typed")
    async def typed(total: Decimal, day: date, size: Size = Size.SMALL) -> list[str]:
        assert (type(total), type(day), type(size)) == (Decimal, date, Size)
        return [str(total), str(day), size.value]

    @killick.agent(name="approvals.typing", contract=killick.Contract("who", [], people=PEOPLE))
    async def agent(run: killick.Run) -> Any:
        return await run.call(typed, Decimal("1.5"), date(2020, 1, 1))

    desk.asked(agent)
    desk.say("edit", by="mia", value=edit)
    assert desk.go(agent) == done
    desk.holds(agent)


@pytest.mark.parametrize("which", ["approve", "effect"])
def test_an_edit_with_which_the_tools_own_functions_fail_is_set_aside(desk: Desk, which: str) -> None:
    def whom(amount: int) -> str:
        return {500: "managers"}[amount]

    def what(amount: int) -> Any:
        return {500: "idempotent"}[amount]

    given: Any = {"approve": whom} if which == "approve" else {"approve": "managers", "effect": what}

    @killick.tool(name=f"approvals.failing_{which}", **({"effect": "idempotent"} | given))
    async def failing(amount: int) -> int:
        return amount

    @killick.agent(name=f"approvals.fails_{which}", contract=killick.Contract("who", [], people=PEOPLE))
    async def agent(run: killick.Run) -> int:
        return await run.call(failing, 500)

    desk.asked(agent)
    desk.say("edit", by="mia", value={"amount": 6})
    assert desk.asked(agent).intention["arguments"] == {"amount": 500}
    assert any("was ignored" in note.data["note"] for note in desk.told(e.NoteMade))
    desk.say("approve", by="max")
    assert desk.go(agent) == 500
    desk.holds(agent)


# what an agreement is for -------------------------------------------------------------------------


def test_an_editor_cannot_agree_to_what_others_would_have_to(desk: Desk) -> None:
    def by_size(intention: Any, standing: Any) -> Any:
        to = "managers" if intention.arguments["amount"] < 1000 else "directors"
        return rules.Ask(to, "by size")

    agent = paying("by size", rules.check(by_size, tools="approvals.pay", name="size"))
    assert desk.asked(agent).to == ("managers",)
    desk.say("edit", by="mia", value={"amount": 50_000})
    assert desk.asked(agent).to == ("directors",)
    assert not DONE
    desk.say("approve", by="dora")
    assert desk.go(agent)[0] == "paid 50000"


@pytest.mark.parametrize("need", [1, 2])
def test_a_tool_that_chooses_by_its_arguments_whom_to_ask_chooses_again_after_an_edit(desk: Desk, need: int) -> None:
    def whom(to: str, amount: int) -> killick.Approval | None:
        if amount < 10:
            return None
        return killick.Approval("managers", need=need) if amount < 1000 else killick.Approval("directors")

    @killick.tool(effect="idempotent", name=f"approvals.chosen_{need}", approve=whom)
    async def chosen(to: str, amount: int) -> str:
        DONE.append(amount)
        return f"paid {amount}"

    @killick.agent(name=f"approvals.choosing_{need}", contract=killick.Contract("who", [], people=PEOPLE))
    async def agent(run: killick.Run, amount: int) -> str:
        return await run.call(chosen, "ann", amount)

    assert desk.asked(agent, 500).to == ("managers",)
    desk.say("edit", by="mia", value={"amount": 50_000})
    assert desk.asked(agent, 500).may == ("dan", "dora")
    desk.say("edit", by="dan", value={"amount": 5})
    assert desk.go(agent, 500) == "paid 5"
    assert desk.go(agent, 9, run="s") == "paid 9"


def test_two_rules_that_ask_the_same_people_ask_once(desk: Desk) -> None:
    other = rules.arguments("approvals.pay", to={"one_of": ["bob"]}, name="strangers", ask="managers")
    agent = paying("covered", LARGE, other)
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.go(agent) == ["paid 500", "mia agreed"]
    assert len(desk.told(e.WaitOpened)) == 1
    desk.holds(agent)


def test_two_rules_that_ask_different_people_ask_in_turn(desk: Desk) -> None:
    agent = paying("in turn", LARGE, STRANGERS)
    assert desk.asked(agent).to == ("managers",)
    desk.say("approve", by="mia")
    assert desk.asked(agent).to == ("directors",)
    assert not DONE
    desk.say("approve", by="dan")
    assert desk.go(agent)[0] == "paid 500"
    desk.holds(agent)


def test_one_that_agreed_for_themselves_does_not_cover_a_rule_that_needs_two(desk: Desk) -> None:
    two = rules.arguments(
        "approvals.pay", to={"one_of": ["bob"]}, name="strangers", ask=killick.Approval("managers", need=2)
    )
    agent = paying("not covered", LARGE, two)
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).need == 2
    assert not DONE


def test_people_are_never_asked_about_what_would_be_rejected_anyway(desk: Desk) -> None:
    agent = paying("anyway", LARGE, AT_MOST, amount=2000)
    assert desk.go(agent)[:2] == ["argument_refused", "at most"]
    assert not desk.told(e.WaitOpened)


# who may answer -----------------------------------------------------------------------------------


def test_only_those_who_are_asked_may_answer_and_a_stranger_is_told_who_they_are(desk: Desk) -> None:
    agent = paying("asked", LARGE)
    desk.asked(agent)
    for by in ("zoe", "managers", "Mia", "dan", None):
        assert "max, mia, moe" in desk.refused(NotAsked, "approve", by=by)
    desk.say("approve", by="mia")
    assert desk.go(agent)[0] == "paid 500"


def roles(who: str) -> list[str]:
    held = {"ann": ["managers"], "abe": ["managers", "directors"]}
    return held.get(who, [])


def test_who_has_a_role_may_answer_though_no_contract_names_them(world: World) -> None:
    desk = Desk(world, cold=False, roles=roles)

    @killick.tool(effect="idempotent", approve=killick.Approval("managers", need=2), name="approvals.roles")
    async def seal() -> str:
        return "sealed"

    @killick.agent(name="approvals.by_roles")
    async def agent(run: killick.Run) -> str:
        return await run.call(seal)

    desk.asked(agent)
    for by in ("zoe", "mia", None):
        desk.refused(NotAsked, "approve", by=by)
    desk.say("approve", by="ann")
    assert desk.go(agent) is None
    desk.say("approve", by="abe")
    assert desk.go(agent) == "sealed"


def test_whom_the_contract_names_and_who_has_the_role_may_both_answer(world: World) -> None:
    desk = Desk(world, cold=False, roles=roles)
    agent = paying("both", LARGE_BY_TWO)
    desk.asked(agent)
    desk.refused(NotAsked, "approve", by="zoe")
    desk.say("approve", by="abe")
    desk.say("approve", by="max")
    assert desk.go(agent)[0] == "paid 500"


def test_where_nobody_says_who_is_who_anybody_may_answer_but_several_need_names(desk: Desk) -> None:
    @killick.tool(effect="idempotent", approve="managers", name="approvals.anybody")
    async def one() -> str:
        return "one"

    @killick.tool(effect="idempotent", approve=killick.Approval("managers", need=2), name="approvals.any_two")
    async def two() -> str:
        return "two"

    @killick.agent(name="approvals.nobody_knows")
    async def agent(run: killick.Run) -> list[str]:
        return [await run.call(one), await run.call(two)]

    desk.asked(agent)
    desk.say("approve", by=None)
    desk.asked(agent)
    assert "by=" in desk.refused(NotAsked, "approve", by=None)
    desk.say("approve", by="x")
    desk.say("approve", by="y")
    assert desk.go(agent) == ["one", "two"]


# n of m -------------------------------------------------------------------------------------------


def test_people_are_counted_and_not_clicks(desk: Desk) -> None:
    agent = paying("clicks", LARGE_BY_TWO)
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert "mia" in desk.refused(AlreadyAnswered, "approve", by="mia")
    assert desk.asked(agent).votes == ("mia",)
    assert "mia" in desk.refused(AlreadyAnswered, "approve", by="mia")
    assert not DONE
    desk.say("approve", by="moe")
    assert desk.go(agent) == ["paid 500", "moe agreed"]
    assert [voted.event.by for voted in desk.told(e.WaitVoted)] == ["mia", "moe"]
    desk.holds(agent)


@pytest.mark.parametrize("verb", ["reject", "respond"])
def test_one_who_is_against_it_ends_it_whoever_agreed(desk: Desk, verb: str) -> None:
    agent = paying("against", LARGE_BY_TWO)
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).votes == ("mia",)
    desk.say(verb, by="max", value="later" if verb == "respond" else None)
    assert "max" in desk.refused(AlreadyAnswered, "approve", by="moe")
    assert desk.go(agent)[2] == "max"
    assert not DONE
    desk.holds(agent)


def test_an_edit_voids_the_votes_of_others_and_is_the_editors_own_vote(desk: Desk) -> None:
    agent = paying("void", LARGE_BY_TWO)
    desk.asked(agent)
    desk.say("approve", by="mia")
    desk.asked(agent)
    desk.say("edit", by="max", value={"amount": 400})
    wait = desk.asked(agent)
    assert (wait.votes, wait.intention["arguments"]["amount"]) == (("max",), 400)
    desk.say("edit", by="moe", value={"amount": 300})
    wait = desk.asked(agent)
    assert (wait.votes, wait.intention["arguments"]["amount"]) == (("moe",), 300)
    desk.say("approve", by="mia")
    said = desk.go(agent)
    assert said[0] == "paid 300"
    assert "from 500 to 300" in said[1]
    assert [done[:2] for done in DONE] == [("ann", 300)]
    desk.holds(agent)


@pytest.mark.parametrize("verb", ["reject", "edit", "respond", "approve"])
def test_whatever_is_said_after_enough_agreed_is_told_that_they_did(desk: Desk, verb: str) -> None:
    agent = paying("enough", LARGE_BY_TWO)
    desk.asked(agent)
    desk.say("approve", by="mia")
    desk.say("approve", by="max")
    value = {"edit": {"amount": 1}, "respond": "no"}.get(verb)
    assert "max" in desk.refused(AlreadyAnswered, verb, by="moe", value=value)
    assert desk.go(agent)[0] == "paid 500"
    desk.holds(agent)


def test_an_edit_that_a_rule_rejects_is_nobodys_vote(desk: Desk) -> None:
    agent = paying("nobodys", AT_MOST, LARGE_BY_TWO)
    desk.asked(agent)
    desk.say("approve", by="mia")
    desk.asked(agent)
    desk.say("edit", by="max", value={"amount": 3000})
    assert "max" not in desk.asked(agent).votes
    desk.say("approve", by="moe")
    if desk.go(agent) is None:  # an edit, also one that came to nothing, may void what was said before it
        assert desk.asked(agent).votes == ("moe",)
        desk.say("approve", by="mia")
    assert desk.go(agent) == ["paid 500", f"{desk.told(e.WaitClosed)[-1].event.by} agreed"]
    assert {voted.event.by for voted in desk.told(e.WaitVoted)} == {"mia", "moe"}
    desk.holds(agent)


def test_an_edit_below_what_is_asked_about_needs_nobody_else(desk: Desk) -> None:
    agent = paying("below", LARGE_BY_TWO)
    desk.asked(agent)
    desk.say("edit", by="max", value={"amount": 40})
    assert desk.go(agent)[0] == "paid 40"


@pytest.mark.parametrize("need", [1, 2])
def test_of_people_who_answer_at_once_so_many_as_are_needed_win_and_the_others_are_told_who(
    world: World, need: int
) -> None:
    ask = killick.Approval("managers", need=need)
    agent = paying(f"at once {need}", rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask))
    for number in range(5):
        desk, said = Desk(world, cold=True), dict[str, str]()
        desk.asked(agent, run=f"r{number}")
        together = threading.Barrier(3)

        def click(by: str, desk: Desk = desk, said: Any = said, together: Any = together, number: int = number) -> None:
            together.wait()
            try:
                desk.say("approve", by=by, wait=f"r{number}")
                said[by] = "ok"
            except AlreadyAnswered as late:
                said[by] = str(late)

        clicks = [threading.Thread(target=click, args=(by,)) for by in PEOPLE["managers"]]
        for each in clicks:
            each.start()
        for each in clicks:
            each.join()
        assert desk.go(agent, run=f"r{number}")[0] == "paid 500"
        winners = {by for by, what in said.items() if what == "ok"}
        assert len(winners) >= need
        if need == 1:
            assert len(winners) == 1
            assert all(next(iter(winners)) in what for what in said.values() if what != "ok")
    assert len(DONE) == 5


# in time ------------------------------------------------------------------------------------------

Late = tuple[Desk, killick.clock.ManualClock]
IN_ROUNDS = killick.Approval("managers", need=2, timeout="1h", escalate=[("directors", "2h"), ("dora", None)])


def test_others_are_asked_when_nobody_answered_in_time_and_votes_start_anew(late: Late) -> None:
    desk, clock = late
    agent = paying("rounds", rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=IN_ROUNDS))
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).votes == ("mia",)
    clock.advance(3601)
    desk.refused(AnswerRefused, "approve", by="max")
    wait = desk.asked(agent)
    assert (wait.to, wait.may, wait.round, wait.votes, wait.need) == (("directors",), ("dan", "dora"), 1, (), 2)
    assert "dan, dora" in desk.refused(NotAsked, "approve", by="max")
    desk.say("approve", by="dan")
    assert desk.asked(agent).votes == ("dan",)
    desk.say("approve", by="dora")
    assert desk.go(agent) == ["paid 500", "dora agreed"]
    desk.holds(agent)


def test_when_everybodys_time_is_up_it_is_not_done_and_says_so(late: Late) -> None:
    desk, clock = late
    ask = killick.Approval("managers", timeout="1h", escalate=[("directors", "2h")])
    agent = paying("expiry", rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask))
    desk.asked(agent)
    clock.advance(3601)
    desk.asked(agent)
    clock.advance(7201)
    code, rule, by, response, message = desk.go(agent)
    assert (code, rule, by, response) == ("expired", "large", None, None)
    assert "in time" in message
    assert not DONE
    desk.refused(AnswerRefused, "approve", by="dan")
    desk.holds(agent)


def test_the_last_round_may_take_as_long_as_it_takes(late: Late) -> None:
    desk, clock = late
    agent = paying("patient", rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=IN_ROUNDS))
    desk.asked(agent)
    for seconds in (3601, 7201, 10_000_000):
        clock.advance(seconds)
        wait = desk.asked(agent)
    assert (wait.to, wait.round, wait.deadline_us) == (("dora",), 2, None)


def test_an_answer_in_time_counts_though_the_run_looks_late(late: Late) -> None:
    desk, clock = late
    ask = killick.Approval("managers", timeout="1h", escalate=[("directors", "2h")])
    agent = paying("in time", rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask))
    desk.asked(agent)
    desk.say("approve", by="mia")
    clock.advance(100_000)
    assert desk.go(agent) == ["paid 500", "mia agreed"]


def test_a_rejected_edit_puts_off_no_deadline_and_goes_back_to_nobody(late: Late) -> None:
    desk, clock = late
    ask = killick.Approval("managers", timeout="1h", escalate=[("directors", "2h")])
    agent = paying("stands", AT_MOST, rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask))
    desk.asked(agent)
    clock.advance(3601)
    before = desk.asked(agent)
    clock.advance(3000)
    desk.say("edit", by="dan", value={"amount": 5000})
    after = desk.asked(agent)
    assert (after.to, after.round, after.deadline_us) == (before.to, 1, before.deadline_us)
    clock.advance(4300)
    assert desk.go(agent)[0] == "expired"
    desk.holds(agent)


def test_whoever_edits_in_a_later_round_agrees_for_their_round(late: Late) -> None:
    desk, clock = late
    ask = killick.Approval("managers", timeout="1h", escalate=[("directors", "2h")])
    agent = paying("late edit", AT_MOST, rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask))
    desk.asked(agent)
    clock.advance(3601)
    desk.asked(agent)
    desk.say("edit", by="dan", value={"amount": 5})
    said = desk.go(agent)
    assert said is None or said[0] == "paid 5"
    if said is not None:
        assert [done[:2] for done in DONE] == [("ann", 5)]


def test_a_question_of_the_agents_own_is_passed_on_and_counted_in_the_same_way(late: Late) -> None:
    desk, clock = late

    @killick.agent(name="approvals.asks", contract=killick.Contract("who", [], people=PEOPLE))
    async def agent(run: killick.Run) -> Any:
        answer = await run.ask(
            "Now?", to="managers", need=2, timeout="1h", escalate=[("directors", "1h")], default="reject"
        )
        return [answer.kind, answer.by, answer.expired]

    desk.asked(agent)
    desk.refused(NotAsked, "approve", by="zoe")
    desk.say("approve", by="mia")
    assert "mia" in desk.refused(AlreadyAnswered, "approve", by="mia")
    assert desk.asked(agent).votes == ("mia",)
    clock.advance(3601)
    wait = desk.asked(agent)
    assert (wait.round, wait.votes) == (1, ())
    desk.refused(NotAsked, "approve", by="max")
    desk.say("approve", by="dan")
    desk.say("approve", by="dora")
    assert desk.go(agent) == ["approve", "dora", False]
    desk.asked(agent, run="s")
    clock.advance(3601)
    desk.asked(agent, run="s")
    clock.advance(3601)
    assert desk.go(agent, run="s") == ["reject", None, True]
    desk.holds(agent, "r", "s")


def test_hooks_hear_every_round(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "HOOKS", {})
    desk, clock = late
    heard: list[tuple[Any, ...]] = []

    @killick.on("wait.opened", name="approvals.hears")
    def hears(event: hooks.HookEvent) -> None:
        heard.append((event.run, event.event.to, event.event.round, event.data["may"]))

    assert hears is not None
    hooks.ensure(desk.kd.runtime.engine)
    ask = killick.Approval("managers", timeout="1h", escalate=[("directors", "2h")])
    agent = paying("heard", rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask))
    desk.asked(agent)
    clock.advance(3601)
    desk.asked(agent)
    hook = f"hook:{'approvals.hears'}"
    head = desk.kd.runtime.store.lease(hook, desk.kd.runtime.engine.holder, seconds=60)
    asyncio.run(hooks.attend(desk.kd.runtime.engine, desk.kd.runtime.log.open(hook), _Once()))
    desk.kd.runtime.store.release(hook, epoch=head.epoch)
    managers, directors = sorted(PEOPLE["managers"]), PEOPLE["directors"]
    assert heard == [("r", ("managers",), 0, managers), ("r", ("directors",), 1, directors)]


class _Once:
    """A worker that goes when there is nothing more to tell."""

    stopping = False

    async def rest(self, seconds: float) -> None:
        self.stopping = True


@pytest.mark.parametrize("run", ["claim#17", "a:1@2#x", "r#mia"])
def test_a_run_may_be_called_anything_and_still_be_answered(desk: Desk, run: str) -> None:
    agent = paying("names", LARGE_BY_TWO)
    wait = desk.asked(agent, run=run)
    desk.say("approve", by="mia", wait=wait.id)
    assert desk.asked(agent, run=run).votes == ("mia",)
    desk.say("approve", by="max", wait=wait.id)
    assert desk.go(agent, run=run) == ["paid 500", "max agreed"]


def test_those_who_were_asked_instead_do_not_agree_for_those_who_were_not_there(late: Late) -> None:
    desk, clock = late
    ask = killick.Approval("managers", timeout="1h", escalate=[("directors", None)])
    agent = paying(
        "instead of others",
        rules.arguments("approvals.pay", amount={"max": 1}, name="large", ask=ask),
        rules.arguments("approvals.pay", to={"one_of": ["bob"]}, name="strangers", ask="managers"),
    )
    desk.asked(agent)
    clock.advance(3601)
    assert desk.asked(agent).to == ("directors",)
    desk.say("approve", by="dan")
    assert desk.asked(agent).to == ("managers",)
    desk.say("approve", by="mia")
    assert desk.go(agent)[0] == "paid 500"
    desk.holds(agent)


@pytest.mark.parametrize("by", ["", " ", 5, b"mia"], ids=repr)
def test_nobody_agrees_without_a_name_that_can_be_read(desk: Desk, by: Any) -> None:
    @killick.tool(effect="idempotent", approve=killick.Approval("managers", need=2), name="approvals.blank")
    async def seal() -> str:
        return "sealed"

    @killick.agent(name="approvals.blanks")
    async def agent(run: killick.Run) -> str:
        return await run.call(seal)

    desk.asked(agent)
    desk.refused(killick.KillickError, "approve", by=by)
    desk.say("approve", by="mia")
    assert desk.asked(agent).votes == ("mia",)
    desk.say("approve", by="max")
    assert desk.go(agent) == "sealed"
    desk.holds(agent)


def test_an_answer_never_goes_to_a_run_that_is_called_like_a_question_of_another(desk: Desk) -> None:
    agent = paying("called alike", LARGE)
    wait = desk.asked(agent, run="a")
    desk.asked(agent, run=wait.id)
    with contextlib.suppress(AnswerRefused):
        desk.say("approve", by="mia", wait=wait.id)
    assert desk.go(agent, run=wait.id) is None
    desk.say("approve", by="mia", wait=f"{wait.id}:1")
    assert desk.go(agent, run=wait.id)[0] == "paid 500"
