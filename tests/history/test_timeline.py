"""A timeline has all that the log has of a run, in order, and reads a value only when somebody looks."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest

import killick
from families import fork_of
from killick.errors import LogError, RunUnknown
from killick.history.timeline import Timeline, timeline
from killick.history.timeline_parts import Moment, Step
from killick.log import Entry, Log
from killick.model import events as e
from killick.model.chunks import Blob
from killick.presenting.encoder import document
from killick.presenting.runs import run_timeline
from killick.store import MemoryStore
from processes import Processes

LETTER = "Dear Madam or Sir, " * 500
TRIED: list[str] = []


@pytest.fixture(autouse=True)
def nothing_tried() -> None:
    TRIED.clear()


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


@killick.tool(effect="reads", name="tl_letter")
async def letter(number: int) -> str:
    return f"{number} {LETTER}"


@killick.tool(effect="idempotent", name="tl_hold", retry=killick.Retry(attempts=3, first=1))
async def hold(amount: int, step: killick.ToolStep = killick.STEP) -> str:
    TRIED.append("hold")
    step.progress({"held": len(TRIED)})
    if len(TRIED) < 3:
        raise ConnectionError(f"the bank is away, {len(TRIED)}")
    return f"held {amount}"


async def release(effect: killick.Effect) -> None:
    TRIED.append("release")


@killick.tool(effect="at_most_once", name="tl_pay", compensate=release)
async def pay(amount: int) -> str:
    TRIED.append("pay")
    return f"paid {amount}"


@killick.tool(effect="at_most_once", name="tl_die")
async def die() -> str:
    TRIED.append("die")
    raise killick.KillickError("never reached the end")


@killick.agent(name="tl_review")
async def review(run: killick.Run, claim: int) -> str:
    await run.plan(["hold", "ask", "pay"])
    await run.at("hold")
    await run.call(hold.options(because="it is due"), claim)
    who = await run.decided("Who?", "manager", options=["auto", "manager"], because="it is large")
    await run.update(route=who)
    await run.note("asked a manager")
    await run.at("ask")
    answer = await run.ask("Pay?", to="managers", timeout="3d", default="reject")
    await run.at("pay")
    return await run.call(pay, claim) if answer.approved else "rejected"


@killick.agent(name="tl_side")
async def side(run: killick.Run, n: int) -> int:
    async def branch(k: int) -> int:
        await run.note(f"branch {k}")
        await run.call(letter, k)
        inner = await run.gather(run.call(letter, k * 10), run.call(letter, k * 10 + 1))
        return len(inner)

    done = await run.gather(*(branch(k) for k in range(1, n + 1)))
    return sum(done)


@killick.agent(name="tl_broken", on_failure="compensate")
async def broken(run: killick.Run, amount: int) -> None:
    await run.call(pay, amount)
    raise LookupError("no such account")


def numbers(tl: Timeline) -> list[str]:
    return [step.number for step in tl.steps()]


def found(tl: Timeline, number: str) -> Step:
    step = tl.step(number)
    assert step is not None
    return step


def kinds(tl: Timeline) -> list[str]:
    return [entry.kind for entry in tl.entries if isinstance(entry, Moment)]


def reviewed(processes: Processes) -> killick.Client:
    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(review, 80, id="r")
    kd.answer("r", "approve", by="mia", comment="fine")
    kd.advance("r")
    return kd


# where it is --------------------------------------------------------------------------------------


def test_a_waiting_run_says_where_it_is_and_what_it_waits_for(processes: Processes) -> None:
    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(review, 80, id="r")
    tl = timeline(kd.runtime.log, "r")
    assert (tl.run, tl.agent, tl.status, tl.place) == ("r", "tl_review", "waiting", "ask: step 2 of 3")
    [wait] = tl.waits
    assert (wait.step, wait.waits_for, wait.to, wait.prompt) == ("3", "answer", ("managers",), "Pay?")
    assert (wait.verbs[:2], wait.default, wait.how) == (("approve", "reject"), "reject", None)
    assert wait.deadline is not None
    assert wait.deadline > wait.opened_at
    assert tl.at_work == tl.step("3")


def test_a_completed_run_has_its_result_and_its_steps_in_order(processes: Processes) -> None:
    tl = timeline(reviewed(processes).runtime.log, "r")
    assert (tl.status, tl.result, tl.input, tl.context) == ("completed", "paid 80", 80, {"route": "manager"})
    assert numbers(tl) == ["1", "2", "3", "4"]
    assert [step.sort for step in tl.steps()] == ["tool", "decision", "wait", "tool"]
    assert [step.stage for step in tl.steps()] == ["hold", "hold", "ask", "pay"]
    assert tl.ended_at == tl.last_at
    assert tl.waits == ()


def test_attempts_have_their_errors_and_their_progress(processes: Processes) -> None:
    step = found(timeline(reviewed(processes).runtime.log, "r"), "1")
    assert [each.outcome for each in step.attempts] == ["unknown", "unknown", "returned"]
    assert [str(each.failure) for each in step.attempts[:2]] == [
        "ConnectionError: the bank is away, 1",
        "ConnectionError: the bank is away, 2",
    ]
    assert [each.progress for each in step.attempts] == [{"held": 1}, {"held": 2}, {"held": 3}]
    assert step.attempts[0].retry_at is not None
    assert step.attempts[2].failure is None
    assert (step.arguments, step.because, step.output) == ({"amount": 80}, "it is due", "held 80")
    assert step.effect == "idempotent"
    assert len({each.key for each in step.attempts}) == 1


def test_decisions_and_answers_say_who(processes: Processes) -> None:
    tl = timeline(reviewed(processes).runtime.log, "r")
    decision, asked = found(tl, "2").decision, found(tl, "3").waits[0]
    assert decision is not None
    assert (decision.question, decision.options, decision.choice) == ("Who?", ("auto", "manager"), "manager")
    assert (decision.because, decision.by) == ("it is large", "agent")
    assert (asked.how, asked.by, asked.comment, asked.answer["kind"]) == ("answered", "mia", "fine", "approve")


def test_what_happens_between_steps_stands_between_them(processes: Processes) -> None:
    tl = timeline(reviewed(processes).runtime.log, "r")
    order = [entry.number if isinstance(entry, Step) else entry.kind for entry in tl.entries]
    assert order[order.index("2") + 1 : order.index("3")] == ["context.changed", "note.made", "plan.reached"]
    assert order[-1] == "run.completed"


def test_people_and_processes_are_moments_of_the_run(processes: Processes) -> None:
    kd = processes.new()
    kd.start(review, 80, id="r")
    kd.pause("r", by="ops", because="closing")
    paused = timeline(kd.runtime.log, "r")
    assert paused.held_back is not None
    assert paused.held_back.data == {"because": "closing"}
    kd.resume("r", by="ops")
    kd.edit.prioritize("r", 5, by="ops")
    kd.edit.set("r", by="ops", limit=9)
    kd.advance("r")
    tl = timeline(kd.runtime.log, "r")
    assert tl.held_back is None
    assert tl.priority == 5
    assert {"run.paused", "run.resumed", "run.prioritized", "context.changed", "run.taken"} <= set(kinds(tl))
    assert tl.holder is not None


# scopes, children, undoing ------------------------------------------------------------------------


def test_branches_stand_inside_their_scope_however_deep(processes: Processes) -> None:
    kd = processes.new()
    kd.run(side, 2, id="r")
    tl = timeline(kd.runtime.log, "r")
    assert [entry.number for entry in tl.entries if isinstance(entry, Step)] == ["1"]
    inside = [entry.number for entry in found(tl, "1").entries if isinstance(entry, Step)]
    assert sorted(inside) == ["1.1.1", "1.1.2", "1.2.1", "1.2.2"]
    deeper = [entry.number for entry in found(tl, "1.2.2").entries if isinstance(entry, Step)]
    assert deeper == ["1.2.2.1.1", "1.2.2.2.1"]
    notes = [entry for entry in found(tl, "1").entries if isinstance(entry, Moment)]
    assert [note.data["note"] for note in notes] == ["branch 1", "branch 2"]


def test_what_was_undone_names_the_step_that_did(processes: Processes) -> None:
    kd = processes.new()
    with pytest.raises(killick.RunFailed):
        kd.run(broken, 7, id="r")
    tl = timeline(kd.runtime.log, "r")
    assert found(tl, "1").undone_by == "2"
    assert found(tl, "2").undoes == "1"
    assert tl.failed is not None
    assert tl.failed.step is None
    assert tl.failed.failure.is_a(LookupError)
    assert kinds(tl)[-1] == "run.failed"


def test_a_child_is_named_where_it_is_started_and_where_it_is_waited_for(processes: Processes) -> None:
    @killick.agent(name="tl_parent")
    async def parent(run: killick.Run, n: int) -> int:
        child = await run.spawn(side, n)
        return await child.result()

    kd = processes.new()
    kd.run(parent, 1, id="r")
    tl = timeline(kd.runtime.log, "r")
    started, waited = found(tl, "1").child, found(tl, "2").child
    assert started is not None
    assert (started.run, started.agent) == ("r/1", "tl_side")
    assert waited is not None
    assert (waited.run, waited.status) == ("r/1", "completed")
    child = timeline(kd.runtime.log, "r/1")
    assert (child.parent, child.parent_step) == ("r", "1")


# dying, settling, going back ----------------------------------------------------------------------


def test_an_attempt_whose_process_died_says_so_once_another_took_the_run() -> None:
    log = Log(MemoryStore())
    handle = log.create(e.RunStarted(at=1, run="r", agent="a"), {})
    handle.append(
        Entry(e.RunTaken(at=1, epoch=1, holder="1-h")),
        Entry(e.StepIntended(at=2, step="1", sort="tool", name="pay", effect="at_most_once"), {"arguments": {}}),
        Entry(e.AttemptStarted(at=3, step="1", attempt=1, key="k", epoch=1)),
    )
    assert not found(timeline(log, "r"), "1").attempts[0].died, "nobody knows yet"
    handle.append(Entry(e.RunTaken(at=4, epoch=2, holder="2-h")))
    assert found(timeline(log, "r"), "1").attempts[0].died
    settled = e.AttemptSettled(at=5, step="1", attempt=1, key="k", settlement="happened", by="mia")
    handle.append(Entry(settled, {"output": "paid", "because": "seen"}))
    step = found(timeline(log, "r"), "1")
    last = step.attempts[0].settled
    assert last is not None
    assert (last.how, last.by, last.because) == ("happened", "mia", "seen")
    assert (step.status, step.output) == ("done", "paid")


def test_a_rewind_keeps_what_it_left_behind(processes: Processes) -> None:
    log = reviewed(processes).runtime.log
    step = found(timeline(log, "r"), "3")
    handle = log.open("r")
    handle.append(Entry(e.RunRewound(at=9, cut=step.seq - 1, generation=1, by="mia"), {"because": "wrong"}))
    tl = timeline(log, "r")
    assert numbers(tl) == ["1", "2"]
    assert tl.generation == 1
    assert tl.status == "queued"
    [rewound] = [entry for entry in tl.entries if isinstance(entry, Moment) and entry.kind == "run.rewound"]
    assert [(left.number, left.status) for left in rewound.left] == [("3", "done"), ("4", "done")]
    assert rewound.left[1].output == "paid 80"
    assert rewound.data == {"because": "wrong"}


def test_what_a_timeline_left_in_doubt_is_not_settled_on_a_later_step_of_its_number() -> None:
    log = Log(MemoryStore())
    handle = log.create(e.RunStarted(at=1, run="r", agent="a"), {})
    tool = e.StepIntended(at=2, step="1", sort="tool", name="pay", effect="at_most_once")
    handle.append(Entry(tool, {"arguments": {}}), Entry(e.AttemptStarted(at=3, step="1", attempt=1, key="k", epoch=1)))
    handle.append(Entry(e.RunRewound(at=4, cut=1, generation=1)))
    handle.append(Entry(tool, {"arguments": {}}))
    handle.append(Entry(e.AttemptStarted(at=5, step="1", attempt=1, key="k~1", epoch=1)))
    handle.append(Entry(e.AttemptSettled(at=6, step="1", attempt=1, key="k", settlement="did_not_happen")))
    tl = timeline(log, "r")
    assert found(tl, "1").attempts[0].settled is None
    assert kinds(tl)[-1] == "attempt.settled"


def test_a_fork_reads_on_from_its_parent(processes: Processes) -> None:
    log = reviewed(processes).runtime.log
    cut = found(timeline(log, "r"), "3").seq - 1
    fork_of(log, e.RunForked(at=9, run="f", parent="r", cut=cut, generation=1, by="mia"))
    tl = timeline(log, "f")
    assert (tl.run, tl.forked_from, tl.status) == ("f", "r", "queued")
    assert numbers(tl) == ["1", "2"]
    assert found(tl, "1").output == "held 80"
    assert kinds(tl)[-1] == "run.forked"


# at any place, and lazily -------------------------------------------------------------------------


def test_at_every_event_it_is_what_the_fold_says_there(processes: Processes) -> None:
    log = reviewed(processes).runtime.log
    for seq in range(1, log.head("r").seq + 1):
        tl, state = timeline(log, "r", seq), log.state("r", seq)
        assert (tl.seq, tl.status, tl.current) == (seq, state.status, state.position.step)
        assert {step.number: step.status for step in tl.steps()} == {step.id: step.status for step in state.fold.steps}
        assert {wait.step for wait in tl.waits} == set(state.fold.facts.waits)
        json.dumps(document(run_timeline(tl, 0)))


def test_before_its_first_event_there_is_nothing(processes: Processes) -> None:
    log = reviewed(processes).runtime.log
    tl = timeline(log, "r", 0)
    assert (tl.entries, tl.waits, tl.current, tl.input) == ((), (), None, None)


def test_what_is_not_there_is_refused(processes: Processes) -> None:
    log = reviewed(processes).runtime.log
    with pytest.raises(RunUnknown):
        timeline(log, "nobody")
    with pytest.raises(LogError):
        timeline(log, "r", 10_000)
    assert timeline(log, "r").step("99") is None


class Counting(MemoryStore):
    """Counts the reads of stored pieces."""

    looks = 0

    def pieces(self, hashes: Collection[bytes]) -> Mapping[bytes, Blob]:
        self.looks += 1
        return super().pieces(hashes)


def test_a_value_is_read_when_somebody_looks() -> None:
    store = Counting()
    with killick.Client(store) as kd:
        kd.run(side, 3, id="r")
        store.looks = 0
        tl = timeline(kd.runtime.log, "r")
        assert len(numbers(tl)) == 1 + 3 * 4
        assert store.looks <= 1, "at most a snapshot"
        assert found(tl, "1.2.1").output.startswith("2 Dear")
        before = store.looks
        assert before >= 1
        assert found(tl, "1.2.1").output.startswith("2 Dear")
        assert store.looks == before, "it is kept"


def test_the_document_is_plain_json_with_everything_in_it(processes: Processes) -> None:
    kd = reviewed(processes)
    told: dict[str, Any] = json.loads(json.dumps(document(run_timeline(timeline(kd.runtime.log, "r"), 0))))
    assert (told["version"], told["position"]["place"], told["result"]) == (1, "pay: step 3 of 3", "paid 80")
    steps = [entry for entry in told["entries"] if entry["type"] == "step"]
    assert [step["number"] for step in steps] == ["1", "2", "3", "4"]
    assert steps[0]["attempts"][0]["errors"][0]["type"] == "ConnectionError"
    assert steps[0]["attempts"][0]["progress"] == {"held": 1}
    assert steps[1]["decision"]["because"] == "it is large"
    assert steps[2]["waits"][0]["answer"] == {"kind": "approve", "value": None}
    assert told["entries"][0]["data"] == {"input": 80}
    assert "state" not in told


# what was judged ----------------------------------------------------------------------------------


@killick.tool(effect="idempotent", name="tl_transfer")
async def transfer(to: str, amount: int) -> str:
    return f"{amount} to {to}"


@killick.agent(
    name="tl_judged",
    contract=killick.Contract(
        "judged",
        [
            killick.rules.arguments("tl_transfer", amount={"max": 5000}),
            killick.rules.arguments(
                "tl_transfer",
                amount={"max": 100},
                name="large sums",
                ask=killick.Approval("managers", need=2, timeout="1h", escalate=[("directors", "2h")]),
            ),
        ],
        people={"managers": ["mia", "max"], "directors": ["dan", "dora"]},
    ),
)
async def judged(run: killick.Run, amount: int) -> str:
    try:
        return await run.call(transfer, "ann", amount)
    except killick.StepFailed as failed:
        return str(failed)


def asked(processes: Processes, amount: int = 400) -> killick.Client:
    kd = processes.new()
    kd.start(judged, amount, id="r")
    kd.advance("r")
    return kd


def test_a_rejection_has_the_verdict_of_its_contract_and_its_words(processes: Processes) -> None:
    kd = asked(processes, 9000)
    step = found(timeline(kd.runtime.log, "r"), "1")
    assert step.rejected is not None
    assert (step.rejected.rule, step.rejected.code) == ("arguments tl_transfer", "argument_refused")
    assert (step.status, step.ended_by, step.is_skipped) == ("failed", None, False)
    assert step.failure is not None
    assert step.failure.message == "amount is 9000; at most 5000 is allowed"


def test_what_people_changed_is_a_part_of_the_step_and_counts(processes: Processes) -> None:
    kd = asked(processes)
    for verb, by, value in (("approve", "mia", None), ("edit", "max", {"amount": 300}), ("approve", "mia", None)):
        kd.answer("r", verb, by=by, value=value, comment=f"{by} says so")  # type: ignore[arg-type]
        kd.advance("r")
    step = found(timeline(kd.runtime.log, "r"), "1")
    assert (step.status, step.output) == ("done", "300 to ann")
    assert (step.arguments, step.given) == ({"to": "ann", "amount": 400}, {"to": "ann", "amount": 300})
    [edit] = step.edits
    assert (edit.by, edit.comment, edit.stands) == ("max", "max says so", True)
    assert {name: tuple(pair) for name, pair in edit.changed.items()} == {"amount": (400, 300)}
    first, second = step.waits
    assert ([vote.by for vote in first.votes], first.how, first.by) == (["mia"], "answered", "max")
    assert [vote.by for vote in second.votes] == ["max", "mia"]
    assert (second.need, second.rule, second.may) == (2, "large sums", ("max", "mia"))
    assert second.reason == "amount is 300; at most 100 is allowed"
    [told] = [
        each for each in document(run_timeline(timeline(kd.runtime.log, "r"), 0))["entries"] if each["type"] == "step"
    ]
    assert (told["edits"][0]["by"], told["edits"][0]["arguments"]) == ("max", {"to": "ann", "amount": 300})
    assert [vote["by"] for vote in told["waits"][1]["votes"]] == ["max", "mia"]
    assert told["verdict"]["ruling"] == "ask"


def test_an_edit_that_the_contract_rejects_changes_nothing(processes: Processes) -> None:
    kd = asked(processes)
    kd.answer("r", "edit", by="mia", value={"amount": 9000})
    kd.advance("r")
    step = found(timeline(kd.runtime.log, "r"), "1")
    [edit] = step.edits
    assert (edit.stands, edit.failure.message) == (False, "amount is 9000; at most 5000 is allowed")
    assert step.given == {"to": "ann", "amount": 400}
    assert step.waits[-1].how is None, "the question stands"


def test_a_question_that_is_passed_on_is_a_wait_for_each_who_were_asked(processes: Processes) -> None:
    kd = asked(processes)
    processes.clock.advance(3600)
    kd.advance("r")
    tl = timeline(kd.runtime.log, "r")
    rounds = [(wait.to, wait.how, wait.round) for wait in found(tl, "1").waits]
    assert rounds == [(("managers",), "expired", 0), (("directors",), None, 1)]
    assert [wait.to for wait in tl.waits] == [("directors",)]


def test_a_step_that_somebody_skipped_says_who(processes: Processes) -> None:
    kd = asked(processes)
    kd.edit.skip("r", "1", by="ops", because="it is late")
    kd.advance("r")
    step = found(timeline(kd.runtime.log, "r"), "1")
    assert (step.is_skipped, step.ended_by, step.waits[-1].how) == (True, "ops", "voided")
