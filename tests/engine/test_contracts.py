"""Every intention is judged: what the gate does with a verdict, live, on replay, in children and forks (R12, R31)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import killick
from engine.desk import PEOPLE, Desk
from killick import rules
from killick.definitions.agents import AGENTS
from killick.errors import NotAsked
from killick.model import events as e
from killick.testing import call, scripted, turn
from world import World

DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@pytest.fixture(params=["warm", "cold"])
def desk(world: World, request: pytest.FixtureRequest) -> Desk:
    """In one process, and in another one after every answer."""
    return Desk(world, cold=request.param == "cold")


@killick.tool(effect="idempotent", name="contracts.pay")
async def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    DONE.append((to, amount))
    return f"paid {amount}"


@killick.tool(effect="reads", name="contracts.assess")
async def assess(what: str) -> str:
    DONE.append(what)
    return what


@killick.tool(effect="at_most_once", name="contracts.wipe")
async def wipe() -> None:
    DONE.append("wiped")


LARGE = rules.arguments("contracts.pay", amount={"max": 100}, name="large", ask="managers")
LARGE_BY_TWO = rules.arguments(
    "contracts.pay", amount={"max": 100}, name="large", ask=killick.Approval("managers", need=2)
)


def contract(*given: Any, name: str = "c", **options: Any) -> killick.Contract:
    return killick.Contract(name, given, people=PEOPLE, **options)


async def tried(step: Any) -> Any:
    """What a step returns, or why it was rejected."""
    try:
        return await step
    except killick.Rejected as rejected:
        return rejected.code


# rejections ---------------------------------------------------------------------------------------


def test_a_rejection_is_on_record_and_names_rule_code_and_what_is_allowed(desk: Desk) -> None:
    bound = contract(rules.arguments("contracts.pay", amount={"min": 1, "max": 50}, name="bounds"))

    @killick.agent(name="contracts.rejected", contract=bound)
    async def agent(run: killick.Run) -> Any:
        with pytest.raises(killick.Rejected) as found:
            await run.call(pay, "ann", 60)
        rejected = found.value
        assert isinstance(rejected, killick.StepFailed)
        return [str(rejected), rejected.code, rejected.rule, rejected.allowed, rejected.contract, rejected.by]

    said, code, rule, allowed, digest, by = desk.go(agent)
    assert (code, rule, allowed, digest, by) == (
        "argument_refused", "bounds", {"amount": {"min": 1, "max": 50}}, bound.digest, None,
    )  # fmt: skip
    assert "60" in said
    assert "50" in said
    [intended] = desk.told(e.StepIntended)
    assert (intended.event.verdict.ruling, intended.event.verdict.contract) == ("reject", bound.digest)
    [failure] = desk.kd.state("r").failures
    assert failure.step == "1"
    assert not desk.told(e.AttemptStarted)
    assert not DONE
    desk.holds(agent)


def test_the_contract_itself_is_on_record_once(desk: Desk) -> None:
    bound = contract(rules.allow("contracts.*"))

    @killick.agent(name="contracts.bound", contract=bound)
    async def agent(run: killick.Run) -> Any:
        await run.call(assess, "x")
        await run.wait("go")
        return await run.call(pay, "ann", 1)

    desk.go(agent)
    desk.kd.send("r", "go")
    assert desk.go(agent) == "paid 1"
    [told] = desk.told(e.ContractBound)
    assert killick.Contract.from_spec(told.data["contract"]).digest == bound.digest
    assert {intended.event.verdict.contract for intended in desk.told(e.StepIntended) if intended.event.verdict} == {
        bound.digest
    }
    desk.holds(agent)


def test_so_many_rejections_in_a_row_pause_the_run_and_resuming_starts_the_count_anew(desk: Desk) -> None:
    @killick.agent(name="contracts.loops", contract=contract(rules.deny("contracts.wipe"), rejections=3))
    async def agent(run: killick.Run) -> Any:
        seen = [await tried(run.call(wipe)) for _ in range(2)]
        seen.append(await tried(run.call(assess, "x")))
        seen += [await tried(run.call(wipe)) for _ in range(4)]
        return seen

    assert desk.go(agent) is None
    [paused] = desk.told(e.RunPaused)
    assert paused.event.by == "contract"
    assert "3" in paused.data["because"]
    assert len(desk.told(e.StepIntended)) == 6
    assert desk.go(agent) is None
    desk.kd.resume("r", by="mia")
    assert desk.go(agent) == ["tool_denied"] * 2 + ["x"] + ["tool_denied"] * 4
    assert DONE == ["x"]
    desk.holds(agent)


def test_an_accepted_change_of_the_context_ends_the_row_of_rejections_as_any_step_does(desk: Desk) -> None:
    bound = contract(rules.arguments("update", level={"max": 3}), rejections=3)

    @killick.agent(name="contracts.updates", contract=bound, context=dict)
    async def agent(run: killick.Run) -> Any:
        seen = [await tried(run.update(level=level)) for level in (1, 5, 6, 2, 7, 8, 3)]
        return [seen, dict(run.context)]

    assert desk.go(agent) == [
        [None, *["argument_refused"] * 2, None, *["argument_refused"] * 2, None], {"level": 3},
    ]  # fmt: skip
    assert [refused.event.verdict.rule for refused in desk.told(e.ContextRefused)] == ["arguments update"] * 4
    desk.holds(agent)


def test_what_a_model_asks_for_and_may_not_is_its_answer(desk: Desk) -> None:
    @killick.tool(effect="idempotent", name="contracts_pay_model")
    async def give(to: str, amount: int) -> str:
        DONE.append(amount)
        return f"gave {amount}"

    bound = contract(rules.arguments("contracts_pay_model", amount={"max": 10}, name="small"))
    tools = killick.Toolset(give)

    @killick.agent(name="contracts.dispatching", contract=bound)
    async def agent(run: killick.Run) -> Any:
        asked = turn(call("contracts_pay_model", to="ann", amount=50), call("contracts_pay_model", to="ann", amount=5))
        return await run.dispatch(tools, await run.model(scripted(asked).async_call, messages=[]))

    first, second = desk.go(agent)
    assert "small" in first["content"]
    assert "argument_refused" in first["content"]
    assert "10" in first["content"]
    assert second["content"] == "gave 5"
    assert DONE == [5]
    desk.holds(agent)


# an approval is of its moment ---------------------------------------------------------------------


def test_an_agreement_is_to_what_was_asked_though_the_same_people_are_asked_more_by_then(desk: Desk) -> None:
    many = rules.budget("contracts.pay", effects=1, name="many", ask="managers")

    @killick.agent(name="contracts.monday", contract=contract(LARGE, many))
    async def agent(run: killick.Run) -> Any:
        async def small() -> Any:
            await run.wait("tuesday")
            return await tried(run.call(pay, "bob", 1))

        return list(await run.gather(tried(run.call(pay, "ann", 500)), small()))

    desk.go(agent)
    desk.kd.send("r", "tuesday")
    desk.go(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).rule == "many"
    assert DONE == [("bob", 1)]
    desk.say("reject", by="mia")
    assert desk.go(agent) == ["rejected_by_person", "paid 1"]


def test_a_budget_that_a_sibling_spent_meanwhile_is_spent(desk: Desk) -> None:
    bound = contract(LARGE, rules.total("contracts.pay", "amount", max=1000))

    @killick.agent(name="contracts.siblings", contract=bound)
    async def agent(run: killick.Run) -> Any:
        async def other() -> Any:
            await run.wait("go")
            return await tried(run.call(pay, "bob", 90))

        return await run.gather(tried(run.call(pay, "ann", 950)), other())

    desk.go(agent)
    desk.kd.send("r", "go")
    assert desk.go(agent) is None
    desk.say("approve", by="mia", wait="r:1.1.1")
    assert desk.go(agent) == ("total_exceeded", "paid 90")
    assert DONE == [("bob", 90)]
    [ended] = [ended for ended in desk.told(e.StepEnded) if ended.event.step == "1.1.1"]
    assert (ended.event.verdict.ruling, ended.event.verdict.rule) == ("reject", "total contracts.pay")
    desk.holds(agent)


def test_a_context_that_changed_meanwhile_is_judged_as_it_is_then(desk: Desk) -> None:
    bound = contract(LARGE, rules.context("contracts.pay", open={"one_of": [True]}, name="open"))

    @killick.agent(name="contracts.context", contract=bound, context=dict)
    async def agent(run: killick.Run) -> Any:
        await run.update(open=True)
        return await tried(run.call(pay, "ann", 500))

    desk.asked(agent)
    desk.kd.edit.set("r", open=False, by="dan")
    desk.say("approve", by="mia")
    assert desk.go(agent) == "context_not_ready"
    assert not DONE
    desk.holds(agent)


def test_what_nobody_has_seen_of_the_context_is_not_agreed_to(desk: Desk) -> None:
    bound = contract(LARGE, rules.context("contracts.pay", latest=True, name="latest"))

    @killick.agent(name="contracts.latest", contract=bound, context=dict)
    async def agent(run: killick.Run) -> Any:
        await run.update(limit=1)
        return [await tried(run.call(pay, "ann", 500)), await tried(run.call(pay, "ann", 5))]

    desk.asked(agent)
    desk.kd.edit.set("r", limit=2, by="dan")
    desk.say("approve", by="mia")
    assert desk.go(agent)[0] == "context_stale"
    desk.holds(agent)


def test_an_approval_does_not_outlive_the_time_that_the_run_has(
    make_world: Callable[[killick.clock.ManualClock], World],
) -> None:
    clock = killick.clock.ManualClock()
    desk = Desk(make_world(clock), cold=True)

    @killick.agent(name="contracts.time", contract=contract(LARGE, rules.budget(time="2h")))
    async def agent(run: killick.Run) -> Any:
        return await tried(run.call(pay, "ann", 500))

    desk.asked(agent)
    clock.advance(7300)
    desk.say("approve", by="mia")
    assert desk.go(agent) == "budget_spent"
    assert not DONE
    desk.holds(agent)


def changing(name: str) -> Callable[[killick.Contract | None], Any]:
    """An agent whose next release has another contract."""

    def release(bound: killick.Contract | None) -> Any:
        @killick.agent(name=name, contract=bound)
        async def agent(run: killick.Run) -> Any:
            return await tried(run.call(pay, "ann", 500))

        return agent

    return release


def test_a_contract_that_changed_while_people_were_asked_asks_anew_and_voids_their_votes(world: World) -> None:
    desk, release = Desk(world, cold=True), changing("contracts.changed")
    before = release(contract(LARGE_BY_TWO))
    desk.asked(before)
    desk.say("approve", by="mia")
    assert desk.asked(before).votes == ("mia",)
    desk.say("approve", by="max")
    after = release(contract(LARGE_BY_TWO, rules.total("contracts.pay", "amount", max=600)))
    assert desk.asked(after).votes == ()
    assert not DONE
    assert [closed.event.how for closed in desk.told(e.WaitClosed)] == ["voided"]
    for by in ("mia", "max"):
        desk.say("approve", by=by)
    assert desk.go(after) == "paid 500"
    assert len(desk.told(e.ContractBound)) == 2
    desk.holds(after)


@pytest.mark.parametrize(
    "bound", [None, contract(rules.allow("contracts.*")), contract(rules.deny("contracts.*"))], ids=str
)
def test_a_question_that_the_next_contract_does_not_ask_is_closed(world: World, bound: killick.Contract | None) -> None:
    desk, release = Desk(world, cold=True), changing("contracts.relaxed")
    desk.asked(release(contract(LARGE)))
    after = release(bound)
    assert desk.go(after) in ("paid 500", "tool_denied")
    assert [closed.event.how for closed in desk.told(e.WaitClosed)] == ["voided"]
    desk.holds(after)


def test_after_a_rewind_people_are_asked_anew(desk: Desk) -> None:
    @killick.agent(name="contracts.rewound", contract=contract(LARGE_BY_TWO))
    async def agent(run: killick.Run) -> Any:
        return await tried(run.call(pay, "ann", 500))

    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).votes == ("mia",)
    desk.kd.rewind("r", "1:before", by="dan")
    assert desk.asked(agent).votes == ()
    for by in ("mia", "max"):
        desk.say("approve", by=by)
    assert desk.go(agent) == "paid 500"
    assert DONE == [("ann", 500)]


def test_an_agreement_is_of_its_generation_also_where_the_run_is_taken_back_to_just_after_it(desk: Desk) -> None:
    strangers = rules.arguments("contracts.pay", to={"one_of": ["bob"]}, name="strangers", ask="directors")

    @killick.agent(name="contracts.halfway", contract=contract(LARGE, strangers))
    async def agent(run: killick.Run) -> Any:
        return await tried(run.call(pay, "ann", 500))

    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.asked(agent).to == ("directors",)
    [agreed] = desk.told(e.WaitClosed)
    desk.kd.rewind("r", f"@{agreed.seq}", by="dan")
    assert desk.asked(agent).to == ("managers",)
    desk.say("approve", by="max")
    assert desk.asked(agent).to == ("directors",)
    desk.say("approve", by="dora")
    assert desk.go(agent) == "paid 500"
    assert DONE == [("ann", 500)]
    desk.holds(agent)


def test_a_change_of_the_context_that_a_rule_asks_about_is_for_those_whom_it_asks(desk: Desk) -> None:
    bound = contract(rules.arguments("update", limit={"max": 5}, ask="managers", name="limit"))

    @killick.agent(name="contracts.limits", contract=bound, context=dict)
    async def agent(run: killick.Run) -> Any:
        mine = await tried(run.update(limit=9))
        await run.wait("go")
        return [mine, dict(run.context)]

    desk.go(agent)
    for by in ("zoe", "dan", None):
        with pytest.raises(killick.KillickError, match="limit"):
            desk.kd.edit.set("r", limit=9, by=by)
    desk.kd.edit.set("r", limit=8, by="mia")
    desk.kd.send("r", "go")
    assert desk.go(agent) == ["argument_refused", {"limit": 8}]
    desk.holds(agent)


def test_a_fork_is_asked_for_itself_and_what_it_spends_is_spent(desk: Desk) -> None:
    bound = contract(LARGE, rules.total("contracts.pay", "amount", max=1000))

    @killick.agent(name="contracts.forked", contract=bound)
    async def agent(run: killick.Run) -> Any:
        await run.call(pay, "eve", 90)
        which = await run.decided("Who?", "ann" if run.id == "r" else "bob")
        return await tried(run.call(pay, which, 600))

    desk.asked(agent)
    desk.kd.fork("r", "2:before", id="f", effects="live")
    wait = desk.asked(agent, run="f")
    assert wait.votes == ()
    desk.say("approve", by="mia", wait="f")
    assert desk.go(agent, run="f") == "paid 600"
    desk.say("approve", by="max", wait="r")
    assert desk.go(agent) == "total_exceeded"
    assert DONE == [("eve", 90), ("bob", 600)]
    desk.holds(agent, "r", "f")


# children and messages ----------------------------------------------------------------------------


@killick.agent(name="contracts.child")
async def child(run: killick.Run, amounts: list[int]) -> list[Any]:
    return [await tried(run.call(pay, "ann", amount)) for amount in amounts]


def test_a_child_is_judged_by_its_parents_contract_too_and_spends_from_the_same_budget(desk: Desk) -> None:
    bound = contract(
        rules.allow("contracts.pay", "spawn:contracts.child"),
        rules.arguments("contracts.pay", amount={"max": 500}),
        rules.total("contracts.pay", "amount", max=800),
    )

    @killick.agent(name="contracts.parent", contract=bound)
    async def agent(run: killick.Run) -> Any:
        mine = await tried(run.call(pay, "bob", 200))
        below = await run.spawn(child, [600, 400, 300], id="below")
        return [
            mine,
            await below.result(),
            await tried(run.call(pay, "bob", 201)),
            await tried(run.call(pay, "b", 200)),
        ]

    assert desk.go(agent) == [
        "paid 200",
        ["argument_refused", "paid 400", "total_exceeded"],
        "total_exceeded",
        "paid 200",
    ]
    assert DONE == [("bob", 200), ("ann", 400), ("b", 200)]
    bounds = [(told.event.digest, told.event.of) for told in desk.told(e.ContractBound, run="below")]
    assert bounds == [(bound.digest, "r")]
    desk.holds(agent)
    desk.holds(child, "below")


def test_children_side_by_side_do_not_spend_the_same_money_twice(desk: Desk) -> None:
    @killick.agent(name="contracts.many", contract=contract(rules.total("contracts.pay", "amount", max=1000)))
    async def agent(run: killick.Run) -> Any:
        several = [await run.spawn(child, [100] * 4, id=f"c{number}") for number in range(5)]
        return [await each.result() for each in several]

    seen = [code for each in desk.go(agent) for code in each]
    assert sum(amount for _, amount in DONE) == 1000
    assert (seen.count("paid 100"), seen.count("total_exceeded")) == (10, 10)


def test_the_parents_people_are_asked_by_the_parents_rule_whatever_the_child_calls_its_own(desk: Desk) -> None:
    @killick.agent(name="contracts.kid", contract=killick.Contract("kid", [], people={"managers": ["kid"]}))
    async def kid(run: killick.Run) -> Any:
        return await tried(run.call(pay, "ann", 500))

    @killick.agent(name="contracts.boss", contract=contract(LARGE))
    async def agent(run: killick.Run) -> Any:
        return await (await run.spawn(kid, id="kid")).result()

    assert desk.go(agent) is None
    desk.refused(NotAsked, "approve", by="kid", wait="kid")
    desk.say("approve", by="mia", wait="kid")
    assert desk.go(agent) == "paid 500"
    desk.holds(agent)
    desk.holds(kid, "kid")


def test_a_child_is_judged_by_its_parents_contract_where_nobody_knows_the_parents_code(world: World) -> None:
    bound = contract(rules.arguments("contracts.pay", amount={"max": 500}), rules.budget("contracts.pay", effects=1))

    @killick.agent(name="contracts.sleepy")
    async def sleepy(run: killick.Run) -> Any:
        await run.wait("go")
        return [await tried(run.call(pay, "ann", amount)) for amount in (600, 400, 300)]

    @killick.agent(name="contracts.elsewhere", contract=bound)
    async def agent(run: killick.Run) -> str:
        await run.spawn(sleepy, id="below", on_parent_end="abandon")
        return await run.wait("never")

    desk = Desk(world, cold=True)
    desk.go(agent)
    known = dict(AGENTS.declared)
    AGENTS.declared.clear()
    AGENTS.declared.update({name: each for name, each in known.items() if name != "contracts.elsewhere"})
    try:
        desk.kd.send("below", "go")
        assert desk.go(sleepy, run="below") == ["argument_refused", "paid 400", "budget_spent"]
    finally:
        AGENTS.declared.clear()
        AGENTS.declared.update(known)
    assert DONE == [("ann", 400)]


def asks(intention: Any, standing: Any) -> Any:
    return rules.Ask("managers", "careful")


@pytest.mark.parametrize("verb", ["approve", "reject"])
def test_children_and_messages_are_intentions_that_people_may_be_asked_about(desk: Desk, verb: str) -> None:
    @killick.agent(
        name="contracts.spawns", contract=contract(rules.check(asks, tools=["spawn:*", "send"], name="careful"))
    )
    async def agent(run: killick.Run) -> Any:
        seen: list[Any] = []
        try:
            seen.append(await (await run.spawn(child, [1], id="below")).result())
        except killick.Rejected as rejected:
            seen.append([rejected.code, rejected.by])
        seen.append(await tried(run.send("r", "hello", 1)))
        return seen

    for _ in range(2):
        wait = desk.asked(agent)
        assert "edit" not in wait.verbs
        desk.say(verb, by="mia")
    if verb == "approve":
        assert desk.go(agent) == [["paid 1"], None]
    else:
        assert desk.go(agent) == [["rejected_by_person", "mia"], "rejected_by_person"]
        assert desk.kd.runtime.store.head("below") is None
    desk.holds(agent)


@pytest.mark.parametrize("pattern", ["spawn:*", "send", "*"])
def test_a_denied_child_or_message_never_leaves(desk: Desk, pattern: str) -> None:
    @killick.agent(name="contracts.denied", contract=contract(rules.deny(pattern)))
    async def agent(run: killick.Run) -> Any:
        return [str(await tried(run.spawn(child, [1], id="below"))), await tried(run.send("r", "hello", 1))]

    spawned, sent = desk.go(agent)
    assert spawned == "tool_denied" or pattern == "send"
    assert sent == "tool_denied" or pattern == "spawn:*"
    assert (desk.kd.runtime.store.head("below") is None) == (pattern != "send")
    assert bool(desk.kd.runtime.store.inbox("r", name="hello")) == (pattern == "spawn:*")


# models -------------------------------------------------------------------------------------------


def reply(model: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": "hi"}
    return {
        "id": "x", "object": "chat.completion", "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 500, "total_tokens": 1500},
    }  # fmt: skip


async def gpt(*, model: str, messages: Any) -> Any:
    DONE.append(model)
    return reply(model)


@pytest.mark.parametrize(
    ("budget", "asked"), [({"tokens": 4000}, 3), ({"money": "0.003 USD"}, 2), ({"calls": 1}, 1)], ids=str
)
def test_a_model_is_not_asked_when_what_it_may_use_is_used_up(desk: Desk, budget: Any, asked: int) -> None:
    prices = {"toy-*": {"input": 1, "output": 1}}

    @killick.agent(name="contracts.models", contract=contract(rules.budget(**budget), prices=prices))
    async def agent(run: killick.Run) -> Any:
        return [isinstance(await tried(run.model(gpt, model="toy-1", messages=[])), dict) for _ in range(5)]

    assert desk.go(agent) == [True] * asked + [False] * (5 - asked)
    assert len(DONE) == asked
    desk.holds(agent)


def test_a_denied_model_is_neither_asked_nor_streamed(desk: Desk) -> None:
    async def chunks(*, model: str) -> Any:
        DONE.append("streamed")
        yield model

    @killick.agent(name="contracts.streams", contract=contract(rules.deny("model:*")))
    async def agent(run: killick.Run) -> Any:
        async def read() -> Any:
            return [chunk async for chunk in run.stream(chunks, model="x")]

        return [await tried(run.model(gpt, model="x", messages=[])), await tried(read())]

    assert desk.go(agent) == ["tool_denied", "tool_denied"]
    assert not DONE
    desk.holds(agent)


def test_what_is_said_of_a_rejection_is_the_same_word_for_word_on_replay(desk: Desk) -> None:
    which = rules.arguments("model:gpt", model={"one_of": ["y"]}, ask="managers", name="which")
    bound = contract(rules.deny("model:*other", "spawn:*", "send", "contracts.wipe"), which, rejections=20)

    async def other(*, model: str) -> None: ...

    @killick.agent(name="contracts.words", contract=bound)
    async def agent(run: killick.Run) -> Any:
        steps: list[Callable[[], Any]] = [
            lambda: run.model(other, model="x"), lambda: run.spawn(child, [1]), lambda: run.send("r", "x"),
            lambda: run.call(wipe), lambda: run.model(gpt, model="x", messages=[]),
        ]  # fmt: skip
        said: list[str] = []
        for step in steps:
            with pytest.raises(killick.Rejected) as rejected:
                await step()
            said += [str(rejected.value), rejected.value.name, repr(rejected.value.allowed)]
        return said

    desk.asked(agent)
    desk.say("reject", by="mia")
    desk.go(agent)
    desk.holds(agent)


def test_what_a_person_made_less_is_counted_as_that(desk: Desk) -> None:
    bound = contract(LARGE, rules.total("contracts.pay", "amount", max=1000))

    @killick.agent(name="contracts.less", contract=bound)
    async def agent(run: killick.Run) -> Any:
        return [await tried(run.call(pay, "ann", amount)) for amount in (900, 940, 20, 10)]

    desk.asked(agent)
    desk.say("edit", by="mia", value={"amount": 50})
    desk.asked(agent)
    desk.say("approve", by="mia")
    assert desk.go(agent) == ["paid 50", "paid 940", "total_exceeded", "paid 10"]
    assert [traced.input["amount"] for traced in desk.kd.state("r").trace] == [50, 940, 20, 10]
    found = desk.kd.find.failures()
    assert [failure.step for failure in found] == ["3"]
    desk.holds(agent)


# files --------------------------------------------------------------------------------------------


@killick.tool(effect="idempotent", approve="managers", name="contracts.reads_file")
async def reads_file(path: str, lines: int = 1) -> str:
    DONE.append(path)
    return Path(path).read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a file inside, one outside, and a link that leads inside."""
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "inside" / "file")
    return tmp_path


def reading(folder: Path) -> Any:
    bound = contract(rules.paths("contracts.reads_file", path=[str(folder / "inside")]))

    @killick.agent(name="contracts.reading", contract=bound)
    async def agent(run: killick.Run) -> Any:
        return [await tried(run.call(reads_file, "link")), str(run.call_answer)]

    return agent


def test_a_link_that_leads_elsewhere_when_it_is_agreed_to_is_not_followed(desk: Desk, folder: Path) -> None:
    agent = reading(folder)
    desk.asked(agent)
    (folder / "inside" / "link").unlink()
    (folder / "inside" / "link").symlink_to(folder / "outside" / "file")
    desk.say("approve", by="mia")
    assert desk.go(agent)[0] == "path_outside"
    assert not DONE


def test_an_edit_of_something_else_leaves_a_path_as_it_was_written(desk: Desk, folder: Path) -> None:
    agent = reading(folder)
    desk.asked(agent)
    desk.say("edit", by="mia", value={"path": "../outside/file"})
    desk.asked(agent)
    desk.say("edit", by="mia", value={"lines": 2})
    assert desk.go(agent) == ["inside", "mia changed lines from 1 to 2"]
    *_, edited = desk.told(e.StepEdited)
    assert edited.data["arguments"] == {"path": "link", "lines": 2}
    assert [str(folder / "inside" / "file")] == DONE
    desk.holds(agent)
