"""What is tried with people's answers: to use them for something else, later or in another run; to make them up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import killick
from escape import law, world
from escape.families import dying
from escape.law import Tried
from escape.stage import Stage, go
from escape.world import Plan
from killick import rules
from killick.engine.control.inbox import ANSWER, COMMAND, answer_id, delivery
from killick.engine.steps import step_execution
from killick.errors import AlreadyAnswered, AnswerRefused, NotAsked

_ASSESS: list[Any] = ["call", "assess", {"claim": "17"}]
_PAY: list[Any] = ["call", "pay", {"to": "ann", "amount": 800}]


def _pays(to: str, amount: int, tool: str = "pay") -> list[Any]:
    return ["call", tool, {"to": to, "amount": amount}]


def _question(kd: killick.Client, run: str) -> tuple[str, str, str | None]:
    """The id that answers to an open wait carry, its step, and what they have to be bound to."""
    [wait] = kd.state(run).fold.facts.waits.values()
    event: Any = kd.runtime.log.event(run, wait.opened)
    return answer_id(run, wait.step, wait.opened), wait.step, event.digest


def _slip(kd: killick.Client, run: str, body: Any, *, id: str, by: str | None, name: str = ANSWER) -> None:  # noqa: A002
    """Put a message straight into the inbox, past everything that looks at it."""
    kd.runtime.store.deliver([delivery(kd.runtime.log, run, name, body, id=id, by=by, at_us=kd.runtime.clock.now_us())])


def an_approval_for_something_else(stage: Stage) -> Tried:
    """Somebody agrees to one payment; the model then wants others, the same again, and the same from another run."""
    amount, more = stage.chance.randint(501, 999), stage.chance.choice((1000, 10_000, 501, 800))
    tool = stage.chance.choice(("pay", "pay_strict", "pay_known"))
    to, other = stage.chance.sample(world.RECIPIENTS, 2)
    plan: Plan = [
        _ASSESS, _pays(to, amount, tool), _pays(to, more, tool), _pays(other, amount, tool), _pays(to, amount, tool)
    ]  # fmt: skip
    approved: list[tuple[str, int]] = []
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        kd.answer("r", "approve", by="mia")
        approved.append((to, amount))
        go(kd, "schemer", plan, "r")
        law.lawful(stage.grounds, approved=approved)
        assert len(law.paid(stage.grounds)) == 1
        for number in range(kd.runtime.log.head("r").seq):
            _slip(kd, "r", {"kind": "approve"}, id=answer_id("r", stage.chance.choice("2345"), number), by="mia")
        go(kd, "schemer", [_ASSESS, _pays(to, amount, tool)], "other")
        go(kd, "schemer", plan, "r")
        law.lawful(stage.grounds, approved=approved)
        assert len(law.paid(stage.grounds)) == 1
        return law.on_record(kd, "r", "other")


def an_approval_of_another_time(stage: Stage) -> Tried:
    """An approval of a generation that was left, or of the parent of a fork, authorises nothing."""
    plan: Plan = [_ASSESS, _PAY]
    approved: list[tuple[str, int]] = []
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        if stage.chance.random() < 0.5:
            kd.answer("r", "approve", by="mia")
            kd.rewind("r", "2:before", by="mia")
        else:
            kd.rewind("r", "2:before", by="mia")
            go(kd, "schemer", plan, "r")
        kd.fork("r", stage.chance.choice(("1:after", "now")), id="f", effects="live")
        for run in ("r", "f"):
            assert go(kd, "schemer", plan, run) == "waits"
        assert law.paid(stage.grounds) == []
        kd.answer("f", "approve", by="mia")
        approved.append(("ann", 800))
        go(kd, "schemer", plan, "f")
        go(kd, "schemer", plan, "r")
        law.lawful(stage.grounds, approved=approved, forks={"f": "r"})
        assert len(law.paid(stage.grounds)) == 1
        return law.on_record(kd, "r", "f")


def _forgeries(chance: Any, bound: str | None) -> Iterator[tuple[Any, str | None]]:
    """Bodies and senders of answers that nobody gave who may."""
    yield {"kind": "approve"}, "mia"
    yield {"kind": "approve", "digest": "A" * 43}, "mia"
    yield {"kind": "approve", "digest": bound}, chance.choice(("zoe", None, "", "mia ", "Mia", "managers", "agent"))
    yield {"kind": "edit", "digest": bound, "value": {"amount": 5}}, chance.choice(("zoe", None, "MIA"))
    yield {"kind": chance.choice(("happened", "yes", "accept", "APPROVE", "approved")), "digest": bound}, "zoe"


def forged_answers(stage: Stage) -> Tried:
    """Messages in the form of answers, delivered past everybody, by people who may not or who do not exist."""
    need = stage.chance.choice((1, 2))
    people = rules.arguments("pay", amount={"max": 700}, name="many", ask=killick.Approval("managers", need=need))
    world.declare(stage.grounds, people)
    plan: Plan = [_ASSESS, _PAY]
    tries = 0
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        for number in range(5):
            known, _, bound = _question(kd, "r")
            body, by = list(_forgeries(stage.chance, bound))[number]
            suffix = stage.chance.choice(("", "#mia", "#zoe", "#"))
            _slip(kd, "r", body, id=known + suffix, by=by)
            _slip(kd, "r", {"command": "set", "set": {"x": 1}}, id=f"c{number}", by="agent", name=COMMAND)
            tries += 2
            assert go(kd, "schemer", plan, "r") == "waits", (body, by)
            assert law.paid(stage.grounds) == [], (body, by)
        law.lawful(stage.grounds)
        return law.on_record(kd, "r") + Tried(tries, tries)


def answers_of_the_wrong_people(stage: Stage) -> Tried:
    """Those who may not are told so, one who votes twice counts once, and everybody is told."""
    asks = rules.arguments("pay", amount={"max": 600}, name="two of them", ask=killick.Approval("managers", need=2))
    world.declare(stage.grounds, asks)
    plan: Plan = [_ASSESS, _PAY]
    refused = 0
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        kd.answer("r", "approve", by="moe")  # the rule that asks one of them
        go(kd, "schemer", plan, "r")
        voters = ["mia", "mia", *stage.chance.sample(("mallory", "Mia", "dan", "managers", "", "mia "), 3), "mia"]
        for by in voters:
            try:
                kd.answer("r", "approve", by=by)
            except (NotAsked, AlreadyAnswered, AnswerRefused):
                refused += 1
            assert go(kd, "schemer", plan, "r") == "waits", by
            assert law.paid(stage.grounds) == []
        assert refused == len(voters) - 1
        kd.answer("r", "approve", by="max")
        assert go(kd, "schemer", plan, "r") != "waits"
        law.lawful(stage.grounds, approved=[("ann", 800)])
        assert len(law.paid(stage.grounds)) == 1
        return law.on_record(kd, "r") + Tried(refused, refused)


def edits(stage: Stage) -> Tried:
    """An edit voids the votes of others, is judged as any intention, and is all that is done."""
    asks = rules.arguments("pay", amount={"max": 600}, name="two of them", ask=killick.Approval("managers", need=2))
    world.declare(stage.grounds, asks, people={"managers": ["mia", "max", "moe"]})
    plan: Plan = [_ASSESS, _pays("ann", 900)]
    bad = stage.chance.choice(
        ({"amount": 5000}, {"to": "mallory"}, {"amount": -1}, {"amount": "700"}, {"currency": "X"})
    )
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        kd.answer("r", "approve", by="moe")
        go(kd, "schemer", plan, "r")
        kd.answer("r", "approve", by="mia")
        assert go(kd, "schemer", plan, "r") == "waits"
        for value in (bad, {"amount": 700}):
            kd.answer("r", "edit", value=value, by="max")
            assert go(kd, "schemer", plan, "r") == "waits"
            assert law.paid(stage.grounds) == []
        # Of those who agreed before the edit nobody agreed to this, and nobody is two.
        first, second = stage.chance.sample(("mia", "moe"), 2)
        for _ in range(3):
            with contextlib.suppress(AlreadyAnswered, NotAsked):
                kd.answer("r", "approve", by=first)
            assert go(kd, "schemer", plan, "r") == "waits"
            assert law.paid(stage.grounds) == []
        kd.answer("r", "approve", by=second)
        go(kd, "schemer", plan, "r")
        law.lawful(stage.grounds, approved=[("ann", 700)])
        assert law.paid(stage.grounds) == [("ann", 700, "r")]
        return law.on_record(kd, "r")


def monday_and_tuesday(stage: Stage) -> Tried:
    """Agreed to on Monday; by Tuesday the budget is spent, or the context is another one, or the account is closed."""
    how = stage.chance.choice(("total", "effects", "context"))
    world.declare(stage.grounds, rules.context("pay", {"frozen": {"one_of": [False], "optional": True}}))
    rest = stage.chance.choice((800, 900))
    plan: Plan = [
        _ASSESS,
        ["together", [_pays("ann", rest)], [["wait", "tuesday"], *([_pays("bob", 500), _pays("eve", 300)])]],
    ]
    if how == "effects":
        plan[1][2] = [["wait", "tuesday"], *(_pays("bob", 1) for _ in range(5))]
    if how == "context":
        plan[1][2] = [["wait", "tuesday"], ["update", {"frozen": True}]]
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        kd.send("r", "tuesday")
        go(kd, "schemer", plan, "r")
        kd.answer("r", "approve", by="mia")
        told = go(kd, "schemer", plan, "r")
        law.lawful(stage.grounds, approved=[("ann", rest)])
        assert told[1][0][0].startswith("rejected"), told
        assert all(to != "ann" for to, _, _ in law.paid(stage.grounds))
        return law.on_record(kd, "r")


def an_approval_of_what_was_asked(stage: Stage) -> Tried:
    """A rule that has something to ask only on Tuesday is not covered by what was agreed to on Monday's question."""
    people = {"managers": ["mia", "max", "moe"]}
    world.declare(stage.grounds, rules.budget("pay", effects=2, name="many", ask="managers"), people=people)
    small = [_pays("bob", 1) for _ in range(2)]
    plan: Plan = [_ASSESS, ["together", [_pays("ann", 800)], [["wait", "tuesday"], *small]]]
    with stage.client() as kd:
        go(kd, "schemer", plan, "r")
        kd.send("r", "tuesday")
        go(kd, "schemer", plan, "r")
        kd.answer("r", "approve", by="mia")
        assert go(kd, "schemer", plan, "r") == "waits"
        assert law.paid(stage.grounds) == [("bob", 1, "r")] * 2
        [wait] = kd.inbox()
        assert "used up" in str(wait.prompt)
        kd.answer("r", stage.chance.choice(("approve", "reject")), by="mia")
        assert go(kd, "schemer", plan, "r") != "waits"
        law.lawful(stage.grounds, approved=[("ann", 800)])
        return law.on_record(kd, "r")


def an_approval_under_other_terms(stage: Stage) -> Tried:
    """Agreed to, or asked, under terms that are others when the process comes again: other people, more of them."""
    plan: Plan = [_ASSESS, _PAY]
    how = stage.chance.choice(("people", "limit", "need"))
    is_answered = stage.chance.random() < 0.5

    def first(kd: killick.Client) -> Any:
        go(kd, "schemer", plan, "r")
        if is_answered:
            kd.answer("r", "approve", by="mia")
            step_execution.StepExecution._attempt = dying(step_execution.StepExecution._attempt)  # type: ignore[method-assign]
            go(kd, "schemer", plan, "r")
        return None

    def then(kd: killick.Client) -> Any:
        if not is_answered:
            kd.answer("r", "approve", by="mia")
        told = go(kd, "schemer", plan, "r")
        return [told, *law.on_record(kd, "r")]

    asks: Any = "managers"
    world.declare(stage.grounds, rules.arguments("pay", amount={"max": 700}, name="more", ask=asks))
    stage.live(first)
    people, limit = {"managers": ["max", "moe"]}, 700
    if how != "people":
        people = {"managers": ["mia", "max", "moe"]}
    if how == "limit":
        limit = 600
    if how == "need":
        asks = killick.Approval("managers", need=2)
    more = rules.arguments("pay", amount={"max": limit}, name="more", ask=asks)
    world.declare(stage.grounds, more, people=people)
    told, *found = stage.live(then)
    assert told == "waits", (how, is_answered, told)
    assert law.paid(stage.grounds) == []
    return Tried(*found)


def a_link_changed_after_the_approval(stage: Stage) -> Tried:
    """Somebody agrees to a file outside; where its name leads is changed before it is read."""
    reads = rules.paths("read_file", path=[str(stage.grounds.root)], ask="managers", name="elsewhere")
    binding = killick.Contract("files", [reads], people={"managers": ["mia"]})
    world.AGENTS["schemer"] = killick.agent(name="schemer", contract=binding)(world.schemer_body)
    place = stage.grounds.folder / "shared"
    place.mkdir()
    (place / "harmless").write_text("harmless")
    name = place / "name"
    name.symlink_to("harmless")
    plan: Plan = [["call", "read_file", {"path": str(name)}]]
    with stage.client() as kd:
        assert go(kd, "schemer", plan, "r") == "waits"
        kd.answer("r", "approve", by="mia")
        name.unlink()
        name.symlink_to(stage.grounds.outside / "file.txt")
        told = go(kd, "schemer", plan, "r")
        law.unread(told)
        assert stage.grounds.books.lines("read") == []
        found = law.on_record(kd, "r")
    for each in (name, place / "harmless"):
        os.unlink(each)
    place.rmdir()
    return found


def other_runs(stage: Stage) -> Tried:
    """A run that sends Killick's own messages to another, or to itself, commands nobody."""
    target = stage.chance.choice(("r", "box"))
    body = stage.chance.choice((
        {"command": "set", "set": {"approved": True}, "unset": []}, {"command": "cancel", "compensate": True},
        {"command": "override", "step": "2", "output": "paid"}, {"command": "skip", "step": "1"}, {"kind": "approve"},
        {"command": "rewind", "to": "1:before"},
    ))  # fmt: skip
    name = stage.chance.choice((COMMAND, ANSWER, "killick.said", "killick.child"))
    plan: Plan = [_ASSESS, ["send", target, name, body], ["send", "nobody", "x", 1], _pays("ann", 5)]
    waiting: Plan = [["wait", "never"], _pays("bob", 5)]
    with stage.client() as kd:
        go(kd, "schemer", waiting, "box")
        before = kd.runtime.log.head("box").seq
        told = go(kd, "schemer", plan, "r")
        assert told[1].startswith(("failed", "rejected")), told
        assert go(kd, "schemer", waiting, "box") == "waits"
        assert kd.info("box").status == "waiting"
        assert kd.runtime.log.head("box").seq - before <= 2
        law.lawful(stage.grounds)
        return law.on_record(kd, "r", "box")
