"""Judging again: by the contract on record every verdict is the same, by another it says what that would change."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Awaitable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import killick
from families import fork_of
from killick import rules
from killick.contracts.contract import Contract, Intention, PolicyInput, Ruling
from killick.history.backtest import Rejudged, rejudge
from killick.log import Entry, Log, RunLog
from killick.model import events as e
from killick.store import MemoryStore

SECOND = 1_000_000


def small(most: int = 1_000, **options: Any) -> Contract:
    return Contract(
        "small",
        [
            rules.deny("delete_*", name="never"),
            rules.arguments("pay", amount={"max": most}, name="sums"),
            rules.arguments("pay", amount={"max": 500}, name="large sums", ask="managers"),
            rules.budget("pay", effects=3, scope="run", name="few"),
        ],
        people={"managers": ["mia"]},
        **options,
    )


class Told:
    """A run told event by event, with verdicts as a test gives them."""

    def __init__(self, *contracts: Contract, log: Log | None = None, of: str | None = None) -> None:
        self.log = log or Log(MemoryStore())
        self.run: RunLog = self.log.create(e.RunStarted(at=1, run="r", agent="desk"), {"input": None})
        self.at = 1
        self.count = 0
        self.bind(*contracts, of=of)

    def bind(self, *contracts: Contract, of: str | None = None) -> None:
        for contract in contracts:
            self.event(
                e.ContractBound(at=self.at, digest=contract.digest, name=contract.name, of=of), contract=contract.spec
            )

    def event(self, event: e.Event, **values: Any) -> None:
        self.run.append(Entry(event, values))

    def intend(
        self,
        name: str,
        verdict: e.Verdict | None = None,
        *,
        sort: Any = "tool",
        effect: Any = "at_most_once",
        data: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> str:
        self.count += 1
        self.at += SECOND
        effect = effect if sort == "tool" else None
        intended = e.StepIntended(
            at=self.at, step=str(self.count), sort=sort, name=name, effect=effect, verdict=verdict
        )
        self.event(intended, arguments=arguments, **(data or {}))
        return intended.step

    def begin(self, step: str) -> None:
        self.event(e.AttemptStarted(at=self.at, step=step, attempt=1, key=f"r:step_{step}~{self.run.seq}", epoch=0))

    def end(self, step: str, usage: e.Usage | None = None) -> None:
        ended = e.AttemptEnded(at=self.at, step=step, attempt=1, outcome="returned", usage=usage)
        self.event(ended, output=None)

    def call(self, name: str, verdict: e.Verdict | None = None, usage: e.Usage | None = None, **options: Any) -> str:
        step = self.intend(name, verdict, **options)
        self.begin(step)
        self.end(step, usage)
        return step

    def rewind(self, cut: int) -> None:
        self.event(e.RunRewound(at=self.at, cut=cut, generation=self.run.fold.facts.generation + 1))
        self.count = len(self.run.fold.tops)

    def again(self, contract: Contract | None = None, run: str = "r") -> Rejudged:
        return rejudge(self.log, run, contract)


def said(contract: Contract, ruling: Any = "accept", rule: str | None = None, code: str | None = None) -> e.Verdict:
    return e.Verdict(ruling=ruling, rule=rule, code=code, contract=contract.digest)


def changes(found: Rejudged) -> list[tuple[str, str, str]]:
    return [(each.step, each.name, each.change) for each in found.changes]


# the contract on record ---------------------------------------------------------------------------


def test_by_the_contract_on_record_every_verdict_comes_out_the_same() -> None:
    contract = small()
    told = Told(contract)
    told.call("pay", said(contract), amount=20)
    told.intend("delete_all", said(contract, "reject", "never", "tool_denied"))
    told.intend("pay", said(contract, "reject", "sums", "argument_refused"), amount=5_000)
    told.intend("pay", said(contract, "ask", "large sums", "argument_refused"), amount=800)
    found = told.again()
    assert found.agrees, found.changes
    assert [(each.step, each.name) for each in found.judged] == [
        ("1", "pay"),
        ("2", "delete_all"),
        ("3", "pay"),
        ("4", "pay"),
    ]
    assert (found.run, found.agent, found.contract, found.hypothetical_from) == ("r", "desk", None, None)


@pytest.mark.parametrize("stranger", [False, True])
def test_a_verdict_that_the_contract_does_not_give_is_found(stranger: bool) -> None:
    contract = small()
    wrong = said(small(9_999)) if stranger else said(contract, "accept", "sums")
    told = Told(contract)
    told.call("pay", said(contract), amount=20)
    told.call("pay", wrong, amount=30)
    [found] = told.again().changes
    assert (found.step, found.change, found.then) == ("2", "differs", wrong)
    assert found.now == Ruling()


def test_a_verdict_without_a_contract_in_force_is_found() -> None:
    told = Told()
    told.call("pay", amount=1)
    told.call("pay", said(small()), amount=1)
    assert changes(told.again()) == [("2", "pay", "differs")]


def test_an_answer_grants_the_rule_that_asked_and_the_rest_is_judged_as_it_is_then() -> None:
    contract = small()
    told = Told(contract)
    step = told.intend("pay", said(contract, "ask", "large sums", "argument_refused"), amount=800)
    told.event(e.WaitOpened(at=told.at, step=step, waits_for="answer", name="pay", rule="large sums"), prompt="Pay?")
    for _ in range(3):
        told.call("pay", said(contract), amount=1)
    told.event(e.WaitClosed(at=told.at, step=step, how="answered", by="mia"), answer={"kind": "approve"})
    spent = said(contract, "reject", "few", "budget_spent")
    told.event(e.StepEnded(at=told.at, step=step, outcome="failed", verdict=spent), failure=None)
    found = told.again()
    assert found.agrees, found.changes
    assert (found.judged[-1].step, found.judged[-1].then) == (step, spent)


def test_an_edit_is_judged_as_its_editors_own() -> None:
    contract = small()
    told = Told(contract)
    step = told.intend("pay", said(contract, "ask", "large sums", "argument_refused"), amount=800)
    told.event(
        e.StepEdited(at=told.at, step=step, by="mia", effect="at_most_once", verdict=said(contract)),
        arguments={"amount": 400},
    )
    found = told.again()
    assert found.agrees
    assert (found.judged[-1].by, found.judged[-1].arguments) == ("mia", {"amount": 400})


def test_what_undoes_is_not_judged() -> None:
    told = Told(small())
    told.event(
        e.StepIntended(at=2, step="1", sort="undo", name="delete_all", effect="idempotent", undoes="1", undoes_seq=1),
        arguments={},
    )
    told.event(e.StepIntended(at=2, step="2", sort="wait", name="ask"))
    assert told.again().judged == ()


# another contract ---------------------------------------------------------------------------------


def test_another_contract_says_what_it_would_have_stopped_asked_and_let_pass() -> None:
    contract = small()
    told = Told(contract)
    told.call("pay", said(contract), amount=450)
    told.intend("delete_all", said(contract, "reject", "never", "tool_denied"))
    told.call("look", said(contract), effect="reads")
    told.intend("pay", said(contract, "ask", "large sums", "argument_refused"), amount=800)
    told.call("call", said(contract), sort="model", model="m")
    other = Contract(
        "other",
        [rules.deny("look"), rules.arguments("pay", amount={"max": 100}, name="sums", ask="managers")],
        people={"managers": ["mia"]},
    )
    found = told.again(other)
    assert changes(found) == [("1", "pay", "asked"), ("2", "delete_all", "passed"), ("3", "look", "stopped")]
    assert found.contract == other.digest
    assert found.changes[2].now == Ruling(
        ruling="reject", rule="deny", code="tool_denied", message="look is not allowed"
    )


def test_what_comes_after_what_would_have_been_stopped_is_only_what_might_have_been() -> None:
    told = Told()
    for amount in (10, 2_000, 3_000, 20):
        told.call("pay", amount=amount)
    found = told.again(small())
    assert found.hypothetical_from == "2"
    assert [each.if_so for each in found.judged] == [False, False, True, True]
    assert [each.change for each in found.judged] == ["same", "stopped", "stopped", "stopped"]
    assert [each.now.rule for each in found.changes if each.now] == ["sums", "sums", "few"]  # which goes on as it went


def test_a_contract_of_a_run_above_stays_in_force() -> None:
    above = small(100)
    told = Told(small())
    told.bind(above, of="parent")
    told.intend("pay", said(above, "reject", "sums", "argument_refused"), amount=450)
    assert told.again().agrees
    assert told.again(Contract("lax", [rules.deny("nothing")])).agrees


def test_time_and_spend_count_as_they_were_then() -> None:
    told = Told()
    told.call("call", sort="model", usage=e.Usage(model="m", tokens_in=60, tokens_out=40), model="m")
    told.call("call", sort="model", usage=e.Usage(model="m", tokens_in=60, tokens_out=40), model="m")
    told.call("call", sort="model", model="m")
    tokens = Contract("tokens", [rules.budget(tokens=150, scope="run")])
    assert changes(told.again(tokens)) == [("3", "model:call", "stopped")]
    brief = Contract("brief", [rules.budget(time="3s", scope="run")])
    assert [each.step for each in told.again(brief).changes] == ["3"]


def test_another_contract_counts_money_by_its_own_prices() -> None:
    told = Told()
    for _ in range(3):
        told.call("call", sort="model", usage=e.Usage(model="m", tokens_in=1_000_000), model="m")
    dear = Contract("dear", [rules.budget(money="5 USD", scope="run")], prices={"m": {"input": 3, "output": 0}})
    assert changes(told.again(dear)) == [("3", "model:call", "stopped")]


# rewinds and forks --------------------------------------------------------------------------------


def test_a_rewind_takes_the_timeline_back_and_not_what_was_done() -> None:
    told = Told()
    cut = told.run.seq
    told.call("assess")
    told.call("pay", amount=1)
    told.rewind(cut)
    told.call("pay", amount=2)
    order = Contract("order", [rules.after("pay", "assess")])
    assert [(each.seq > cut + 6, each.change) for each in told.again(order).changes] == [(True, "stopped")]
    few = Contract("few", [rules.budget("pay", effects=1, scope="run")])
    assert [each.arguments for each in told.again(few).changes] == [{"amount": 2}]


def test_a_fork_is_judged_for_its_own_part_on_top_of_its_parents() -> None:
    contract = small()
    told = Told(contract)
    told.call("assess", said(contract))
    for _ in range(3):
        told.call("pay", said(contract), amount=1)
    cut = told.run.seq
    told.intend("pay", said(contract, "reject", "few", "budget_spent"), amount=1)
    fork = fork_of(told.log, e.RunForked(at=9, run="f", parent="r", cut=cut, generation=1))
    fork.append(
        Entry(
            e.StepIntended(at=10, step="5", sort="tool", name="pay", effect="at_most_once", verdict=said(contract)),
            {"arguments": {"amount": 7}},
        )
    )
    found = told.again(run="f")
    assert found.agrees, found.changes
    assert [each.arguments for each in found.judged] == [{"amount": 7}]
    order = Contract("order", [rules.after("pay", "assess")])
    assert told.again(order, run="f").agrees


def test_what_the_family_had_done_is_taken_from_the_record() -> None:
    contract = Contract("one", [rules.once("pay", name="once")])
    others = {"": {"counts": {"effects": {"pay": 1}}, "past": {}}}
    told = Told(contract)
    told.intend("pay", said(contract, "reject", "once", "budget_spent"), data={"others": others}, amount=1)
    assert told.again().agrees


# the context --------------------------------------------------------------------------------------


def changed(told: Told, version: int, by: str, verdict: e.Verdict | None = None, **values: Any) -> None:
    step = str(told.count + 1) if by == "agent" else None
    event = e.ContextChanged(at=told.at, version=version, saw=version - 1, by=by, step=step, verdict=verdict)
    told.event(event, set=values, unset=[])


def test_a_change_of_the_context_is_judged_and_counts_for_what_comes_after() -> None:
    contract = Contract(
        "ready",
        [rules.context("pay", approved={"one_of": [True]}), rules.arguments("update", approved={"one_of": [True]})],
    )
    told = Told(contract)
    told.intend("pay", said(contract, "reject", "context pay", "context_not_ready"), amount=1)
    event = e.ContextRefused(
        at=told.at,
        version=0,
        by="agent",
        step="2",
        verdict=said(contract, "reject", "arguments update", "argument_refused"),
    )
    told.event(event, set={"approved": "maybe"}, unset=[])
    changed(told, 1, "agent", said(contract), approved=True)
    told.call("pay", said(contract), amount=1)
    found = told.again()
    assert [each.name for each in found.judged] == ["pay", "update", "update", "pay"]
    assert found.agrees, [(each.then, each.now) for each in found.changes]


def test_code_has_seen_what_came_from_outside_once_a_step_returned() -> None:
    contract = Contract("latest", [rules.context("pay", latest=True, name="latest")])
    told = Told(contract)
    changed(told, 1, "agent", said(contract), amount=1)
    told.call("pay", said(contract), amount=1)
    changed(told, 2, "mia", said(contract), amount=2)
    told.intend("pay", said(contract, "reject", "latest", "context_stale"), amount=1)
    told.call("pay", said(contract), amount=2)
    found = told.again()
    assert found.agrees, [(each.step, each.then, each.now) for each in found.changes]


# what is gone -------------------------------------------------------------------------------------


def test_what_was_erased_cannot_be_judged_any_more_and_says_so() -> None:
    told = Told()
    told.call("pay", amount=1)
    seq = told.run.seq - 2
    told.call("pay", amount=2)
    told.log.erase(told.run, at=9, reason="asked for", seqs=[seq])
    total = Contract("total", [rules.total("pay", "amount", max=10, scope="run")])
    assert [(each.step, each.change) for each in told.again(total).judged] == [("1", "unknown"), ("2", "unknown")]


# real runs ----------------------------------------------------------------------------------------

DESK = Contract(
    "desk",
    [
        rules.allow("assess", "pay", "gift", "spawn:*", "send"),
        rules.arguments("pay", amount={"type": "integer", "max": 1_000}),
        rules.arguments("pay", amount={"max": 500}, name="large sums", ask="managers"),
        rules.arguments("gift", amount={"max": 10}, name="gifts", ask=killick.Approval("board", need=2)),
        rules.after("pay", "assess"),
        rules.budget("pay", effects=6),
        rules.budget(calls=40),
        rules.total("pay", "amount", max=1_800, by="to"),
        rules.context("pay", ready={"one_of": [True]}, latest=True),
        rules.arguments("update", ready={"type": "boolean", "optional": True}),
        rules.arguments("update", note={"max": 5, "optional": True}, ask="managers", name="notes"),
    ],
    people={"managers": ["mia", "max"], "board": ["mia", "max", "ann"]},
    rejections=100,
)
BELOW = Contract("below", [rules.budget("pay", effects=2, scope="run"), rules.once("gift")])


@killick.tool(effect="reads")
async def assess(number: int) -> int:
    return number


@killick.tool
async def pay(to: str, amount: int) -> str:
    return f"{amount} to {to}"


@killick.tool(approve="managers")
async def gift(to: str, amount: int) -> str:
    return f"{amount} to {to}"


async def tried(step: Awaitable[Any]) -> Any:
    try:
        return await step
    except killick.StepFailed as failed:
        return str(failed)


@killick.agent(name="rejudged_child", contract=BELOW)
async def helper(run: killick.Run, seed: int) -> list[Any]:
    draw = Random(seed)
    await run.update(ready=True)
    await run.call(assess, 1)
    said = [await tried(run.call(pay, draw.choice("abc"), draw.randint(1, 700))) for _ in range(3)]
    return [*said, await tried(run.call(gift, "z", 1))]


@killick.agent(name="rejudged_desk", contract=DESK)
async def desk(run: killick.Run, seed: int) -> list[Any]:
    draw = Random(seed)
    said: list[Any] = [await tried(run.update(ready="yes"))]
    for number in range(8):
        match draw.randint(0, 8):
            case 0:
                said.append(await tried(run.call(assess, number)))
            case 1 | 2:
                said.append(await tried(run.call(pay, draw.choice("abc"), draw.randint(1, 1_200))))
            case 3:
                said.append(await tried(run.update(ready=draw.random() < 0.8)))
            case 4:
                said.append(await tried(run.update(note=draw.randint(0, 10))))
            case 5:
                sums = [draw.randint(1, 300) for _ in "ab"]
                calls = [run.call(pay, to, amount) for to, amount in zip("ab", sums, strict=True)]
                said.append(await tried(run.gather(*calls, run.call(assess, 3))))
            case 6:
                child = await tried(run.spawn(helper, seed * 10 + number))
                said.append(child if isinstance(child, str) else await tried(child.result()))
            case 7:
                said.append(await tried(run.call(gift, "z", draw.choice([1, 20]))))
            case _:
                await run.sleep(1)
    return said


class Office:
    """People who answer what a run asks, at random, and change its context meanwhile."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.kd = killick.open("memory:", clock=killick.clock.LeapingClock())

    def work(self, run: str, seed: int) -> None:
        for _ in range(100):
            try:
                self.kd.run(desk, seed, id=run)
                return
            except killick.RunWaiting:
                self.answer(self.draw.choice(self.kd.inbox()), run)
        pytest.fail(f"seed {seed}: {run} came to no end")

    def answer(self, wait: killick.Wait, run: str) -> None:
        verb = self.draw.choice([verb for verb in wait.verbs if verb in ("approve", "reject", "edit", "respond")])
        value = {"amount": self.draw.randint(1, 900)} if verb == "edit" else "no" if verb == "respond" else None
        with contextlib.suppress(killick.KillickError):
            self.kd.answer(wait.id, verb, value=value, by=self.draw.choice(wait.may or ("mia",)))
        if self.draw.random() < 0.3:
            with contextlib.suppress(killick.KillickError):
                self.kd.edit.set(run, ready=self.draw.random() < 0.7, note=self.draw.randint(1, 9), by="mia")
        if wait.run != run:
            self.kd.advance(wait.run)


@pytest.mark.parametrize("seed", [2, 6, 11, 38])
def test_whatever_happened_is_judged_the_same_again(seed: int) -> None:
    office = Office(seed)
    with office.kd as kd:
        office.work("run", seed)
        steps = len(kd.state("run").fold.tops)
        kd.rewind("run", f"{office.draw.randint(1, steps)}:before")
        office.work("run", seed)
        kd.fork("run", f"{office.draw.randint(1, len(kd.state('run').fold.tops))}:before", id="fork")
        office.work("fork", seed)
        found = [kd.rejudge(listed.id) for listed in kd.list(limit=100)]
    assert sum(len(each.judged) for each in found) > 10
    assert [(each.run, one.seq, one.then, one.now) for each in found for one in each.changes] == []


def test_code_with_another_contract_is_on_record_from_there_on(tmp_path: Path) -> None:
    def declared(most: int) -> killick.Agent[int, str]:
        @killick.agent(name="rejudged_anew", contract=small(most))
        async def anew(run: killick.Run, amount: int) -> str:
            await run.call(pay, "ann", amount)
            await run.wait("go")
            return await tried(run.call(pay, "ann", amount))

        return anew

    with killick.open(str(tmp_path / "killick.db")) as kd, pytest.raises(killick.RunWaiting):
        kd.run(declared(1_000), 400, id="run")
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.send("run", "go")
        assert "at most 300 is allowed" in kd.run(declared(300), 400, id="run")
        found = kd.rejudge("run")
        assert found.agrees
        assert [each.contract for each in found.judged] == [small(1_000).digest, small(300).digest]
        assert [each.change for each in kd.rejudge("run", small(300)).judged] == ["stopped", "same"]


def lenient(intention: Intention, standing: PolicyInput) -> str | None:
    return None


def strict(intention: Intention, standing: PolicyInput) -> str | None:
    return f"{intention.name} was done {standing.done.get('pay', 0)} times"


def test_a_function_that_has_changed_since_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = Contract("own", [rules.check(lenient, tools="pay", name="own")])
    told = Told(contract)
    told.call("pay", said(contract), amount=1)
    assert told.again().changed == ()
    monkeypatch.setattr(sys.modules[__name__], "lenient", strict)
    found = told.again()
    assert (found.changed, changes(found)) == (("own",), [("1", "pay", "differs")])
