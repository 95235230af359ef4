"""What --why says, text by text: a reader can judge the prose here, and every sentence is on record."""

from __future__ import annotations

from datetime import timedelta, timezone
from typing import Any

import pytest

from killick.history.timeline import Timeline, timeline
from killick.log import Entry, Log
from killick.model import events as e
from killick.model.codec import Secret
from killick.model.failure import Failure
from killick.presenting.explain import why
from killick.store import MemoryStore

NINE = 1_772_442_000_000_000
"""2026-03-02 09:00:00 UTC, a Monday."""

Told = tuple[e.Event, dict[str, Any] | None]


def at(seconds: float) -> int:
    return NINE + round(seconds * 1_000_000)


def read(*told: Told, input: Any = None, **started: Any) -> Timeline:  # noqa: A002
    """The timeline of a run to which this happened."""
    log = Log(MemoryStore())
    first = e.RunStarted(at=at(0), run="claim_17", agent="review", **started)
    handle = log.create(first, {} if input is None else {"input": input})
    for event, values in told:
        handle.append(Entry(event, values))
    return timeline(log, "claim_17")


def tool(step: str, name: str, seconds: float, effect: Any = "reads", **arguments: Any) -> Told:
    because = {"because": arguments.pop("because")} if "because" in arguments else {}
    intended = e.StepIntended(at=at(seconds), step=step, sort="tool", name=name, effect=effect)
    return intended, {"arguments": arguments, **because}


def begun(step: str, seconds: float, attempt: int = 1, epoch: int = 1) -> Told:
    return e.AttemptStarted(at=at(seconds), step=step, attempt=attempt, key=f"claim_17:step_{step}", epoch=epoch), None


def returned(step: str, seconds: float, output: Any, attempt: int = 1) -> Told:
    return e.AttemptEnded(at=at(seconds), step=step, attempt=attempt, outcome="returned"), {"output": output}


def failed(
    step: str, seconds: float, failure: Failure, attempt: int = 1, outcome: Any = "unknown", **more: Any
) -> Told:
    ended = e.AttemptEnded(at=at(seconds), step=step, attempt=attempt, outcome=outcome, **more)
    return ended, {"failure": failure}


def taken(seconds: float, epoch: int = 1) -> Told:
    return e.RunTaken(at=at(seconds), epoch=epoch, holder=f"{epoch}-h"), None


def completed(seconds: float, result: Any = None) -> Told:
    return e.RunCompleted(at=at(seconds)), {"result": result}


def wait(step: str, seconds: float, waits_for: Any, name: str = "ask", **more: Any) -> list[Told]:
    values = {key: more.pop(key) for key in ("prompt", "verbs", "options", "default", "intention") if key in more}
    return [
        (e.StepIntended(at=at(seconds), step=step, sort="wait", name=name), None),
        (e.WaitOpened(at=at(seconds), step=step, waits_for=waits_for, name=name, **more), values),
    ]


def closed(
    step: str, seconds: float, answer: Any = None, how: Any = "answered", by: str | None = None, **more: Any
) -> Told:
    return e.WaitClosed(at=at(seconds), step=step, how=how, by=by), {"answer": answer, **more}


def answer(kind: str, value: Any = None) -> dict[str, Any]:
    return {"kind": kind, "value": value}


AWAY = Failure.of("ConnectionError", "the bank is away")
BUSY = Failure("error", "httpx.HTTPStatusError", (), "503 for https://bank", details={"status": 503, "body": "busy"})
DIED_AT_TWO = [taken(0), tool("1", "charge", 1, "at_most_once", amount=990), begun("1", 1), taken(60, 2)]
SETTLEMENT = {"waits_for": "settlement", "name": "settlement"}


# steps --------------------------------------------------------------------------------------------


def test_a_tool_that_returned_is_told_with_what_was_known_and_why() -> None:
    tl = read(
        taken(0),
        (e.PlanMade(at=at(0), stages=("fetch", "pay"), step="1"), None),
        (e.PlanReached(at=at(0), stage="fetch", step="1"), None),
        tool("1", "fetch_docs", 1, claim=17),
        begun("1", 1),
        returned("1", 1.2, ["report.pdf"]),
        (e.ContextChanged(at=at(2), version=1, step="2"), {"set": {"route": "auto"}, "unset": []}),
        (e.PlanReached(at=at(2), stage="pay", step="2"), None),
        tool("2", "pay", 3, "at_most_once", to="Ann", amount=80, because="it is below the limit"),
        begun("2", 3),
        returned("2", 4.5, "paid 80"),
        completed(5, "paid 80"),
        input={"id": 17},
    )
    assert why(tl, "2") == [
        "Step 2, 2026-03-02 09:00:03: pay(to=“Ann”, amount=80), effect at_most_once, stage pay.",
        'Known before: the input {"id": 17}.',
        'Known before: step 1, fetch_docs, returned ["report.pdf"].',
        'Known before: the context {"route": "auto"}.',
        "The agent's code gave this reason: “it is below the limit”.",
        "Attempt 1 began 2026-03-02 09:00:03 and returned after 1.5 s.",
        "It returned “paid 80”.",
        "The step is done.",
        "The run completed 2026-03-02 09:00:05 with “paid 80”.",
    ]


def test_attempts_are_told_with_their_errors_and_what_the_far_side_said() -> None:
    away = Failure("error", "ConnectionError", (), "the bank is away", cause=BUSY)
    tl = read(
        tool("1", "hold", 0, "idempotent"),
        begun("1", 0),
        failed("1", 0.5, away, retry_at=at(2)),
        begun("1", 2, 2),
        (e.AttemptProgressed(at=at(2), step="1", attempt=2), {"progress": {"sent": 2}}),
        failed("1", 2.5, away, 2, retry_at=at(5)),
        begun("1", 5, 3),
        returned("1", 5.012, "held", 3),
    )
    assert why(tl, "1")[1:-2] == [
        "Attempt 1 began 2026-03-02 09:00:00 and failed after 500 ms.",
        "Attempt 2 began 2026-03-02 09:00:02 and failed after 500 ms.",
        'Attempt 2 had got as far as {"sent": 2}.',
        "Attempt 3 began 2026-03-02 09:00:05 and returned after 12 ms.",
        "Attempts 1–2 ConnectionError: the bank is away (500 ms, 500 ms).",
        "Answered 503 busy.",
        "It returned “held”.",
    ]


def test_of_many_attempts_and_steps_the_last_are_told() -> None:
    tries = [
        told for n in range(1, 9) for told in (begun("8", n * 10, n), failed("8", n * 10 + 1, AWAY, n, retry_at=at(0)))
    ]
    before = [t for n in range(1, 8) for t in (tool(str(n), "look", n), begun(str(n), n), returned(str(n), n, n))]
    told = why(read(*before, tool("8", "pay", 9), *tries), "8")
    assert told[1:3] == [
        "Known before: 7 steps, of which these are the last 5.",
        "Known before: step 3, look, returned 3.",
    ]
    assert [line.split()[1] for line in told if line.startswith("Attempt ")] == ["1", "2", "7", "8"]
    assert any(line.startswith("Attempts 1–8 ConnectionError") for line in told)


def test_a_dead_process_leaves_a_doubt_that_a_person_settles() -> None:
    asked: Told = (
        e.WaitOpened(at=at(61), step="1", **SETTLEMENT),
        {"prompt": "Did it happen?", "verbs": ["happened", "not"]},
    )
    begins = [
        "Attempt 1 began 2026-03-02 09:00:01.",
        "Whether attempt 1 had happened was not known.",
        "Attempt 1: the process died while it was open.",
        "Asked 2026-03-02 09:01:01: “Did it happen?”",
    ]
    assert why(read(*DIED_AT_TWO, asked), "1")[1:] == [
        *begins,
        "Nothing happens until a person says whether it happened.",
    ]
    settled = e.AttemptSettled(at=at(91), step="1", attempt=1, key="claim_17:step_1", settlement="happened", by="mia")
    tl = read(
        *DIED_AT_TWO,
        asked,
        closed("1", 91, answer("happened", "receipt 5"), by="mia", comment="I see it"),
        (settled, {"output": "receipt 5"}),
    )
    assert why(tl, "1")[1:] == [
        *begins,
        "Its end 2026-03-02 09:01:31: mia: happened “receipt 5” “I see it”.",
        "It returned “receipt 5”.",
        "The step is done.",
    ]


def test_a_model_and_what_it_chose() -> None:
    model = e.StepIntended(at=at(0), step="1", sort="model", name="create")
    usage = e.Usage(model="claude-x", tokens_in=10, tokens_out=5)
    ended = e.AttemptEnded(at=at(2), step="1", attempt=1, outcome="returned", usage=usage)
    chosen = {"question": "Which tool?", "options": ["rate", "book"], "choice": "rate", "because": "Kroner."}
    tl = read(
        (model, {"arguments": {"model": "claude", "messages": []}}),
        begun("1", 0),
        (ended, {"output": {"odd": 1}, "reasoning": "Kroner need a rate."}),
        (e.DecisionMade(at=at(2), step="2", by="model"), chosen),
        tool("3", "rate", 2, currency="NOK"),
    )
    assert "The model's own reasoning was “Kroner need a rate.”" in why(tl, "1")
    assert 'Known before: step 1, the model claude-x, returned {"odd": 1}.' in why(tl, "3")
    decided = "on “Which tool?”: “rate”, out of “rate” and “book”, because “Kroner.”"
    assert f"Decided by the model in step 2 {decided}" in why(tl, "3")
    assert f"Decided by the model {decided}" in why(tl, "2")


def test_a_question_says_of_whom_and_until_when_and_how_it_ended() -> None:
    asked = {"prompt": "Pay?", "to": ("managers",), "deadline": at(3600), "options": ["yes", "no"], "default": "no"}
    opened = wait("1", 5, "answer", **asked)
    assert why(read(*opened), "1")[1:] == [
        "Asked 2026-03-02 09:00:05 of managers: “Pay?”, with the options “yes” and “no”, until 2026-03-02 10:00:00.",
        "Nothing happens until there is an answer from managers, or until 2026-03-02 10:00:00.",
    ]
    tl = read(*opened, closed("1", 3600, how="expired"))
    assert "Its end 2026-03-02 10:00:00: no answer in time, so “no”." in why(tl, "1")


@pytest.mark.parametrize(
    ("opened", "last"),
    [
        (wait("1", 0, "time", "sleep", deadline=at(86_400)), "It continues 2026-03-03 09:00:00."),
        (wait("1", 0, "event", "paid"), "It continues when a caller sends the message paid."),
        (wait("1", 0, "child", "other/2"), "It continues when the run other/2 has ended."),
    ],
)
def test_waits_that_no_person_answers_say_what_ends_them(opened: list[Told], last: str) -> None:
    assert why(read(*opened), "1")[-1] == last


def test_branches_are_told_one_by_one_and_each_knows_its_own_past() -> None:
    scope = e.StepIntended(at=at(0), step="1", sort="scope", name="gather")
    tl = read(
        taken(0),
        (scope, {"arguments": {"branches": 2}}),
        tool("1.1.1", "look", 1),
        begun("1.1.1", 1),
        tool("1.2.1", "look", 1),
        begun("1.2.1", 1),
        returned("1.1.1", 2, "a"),
        failed("1.2.1", 2, AWAY),
        tool("1.1.2", "read", 3),
    )
    assert why(tl, "1")[1:3] == [
        "Branch 1 got to step 1.1.2, read, is not over yet.",
        "Branch 2 got to step 1.2.1, look, failed with ConnectionError: the bank is away.",
    ]
    assert why(tl, "1.1.2")[1] == "Known before: step 1.1.1, look, returned “a”."


def test_what_was_undone_says_why_and_what_is_left() -> None:
    undo = e.StepIntended(at=at(3), step="2", sort="undo", name="hold", effect="at_most_once", undoes="1", undoes_seq=3)
    cancel = e.CancelRequested(at=at(2), compensate=True, by="mia")
    tl = read(
        tool("1", "hold", 0, "idempotent", amount=5), begun("1", 0), returned("1", 1, "held"),
        (cancel, {"because": "wrong customer"}), (undo, {"arguments": {}}), begun("2", 3), returned("2", 4, None),
        (e.RunFailed(at=at(5)), {"failure": AWAY, "not_undone": ["mail at step 3"]}),
    )  # fmt: skip
    assert "Undone by step 2." in why(tl, "1")
    assert "Mia cancelled the run and had it undone, and said “wrong customer”." in why(tl, "2")
    assert why(tl)[1:] == [
        "The run failed 2026-03-02 09:00:05 with ConnectionError: the bank is away; undone: step 1; not undone: mail "
        "at step 3.",
        "Nothing more happens until a person resumes the run.",
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            [(e.StepDelayed(at=at(1), step="1", until=at(30), because="limit crm"), None)],
            "It was delayed until 2026-03-02 09:00:30: limit crm.",
        ),
        ([(e.StepOverridden(at=at(1), step="1", by="mia"), {"output": 5})], "Result given by mia.\nThe step is done."),
        ([(e.NoteMade(at=at(1), step="1", by="killick"), {"note": "look"})], "Note “look”"),
    ],
)
def test_what_else_happened_to_a_step_is_told(more: list[Told], told: str) -> None:
    assert told in "\n".join(why(read(tool("1", "send_email", 0, "idempotent"), *more), "1"))


def test_a_contract_is_told_with_its_verdicts_its_approvals_and_what_it_would_allow() -> None:
    bound: Told = e.ContractBound(at=at(0), digest="f9LOXogF-rest", name="claims"), {"contract": {"rules": []}}
    failure = Failure("error", "killick.Rejected", (), "too much", details={"allowed": {"amount": {"max": 1000}}})

    def intended(ruling: Any, **values: Any) -> Told:
        verdict = e.Verdict(ruling=ruling, rule="sums", code="refused", contract="f9LOXogF-rest")
        event = e.StepIntended(at=at(1), step="1", sort="tool", name="pay", effect="at_most_once", verdict=verdict)
        return event, {"arguments": {"amount": 5000}, **values}

    assert why(read(bound, intended("reject", failure=failure)), "1")[1:4] == [
        "The contract claims f9LOXogF said reject, by its rule “sums” (refused); it would allow "
        '{"amount": {"max": 1000}}.',
        "Rejected by rule sums: too much.",
        "The step failed.",
    ]
    put = e.WaitOpened(
        at=at(1), step="1", waits_for="answer", name="approve", to=("managers",), rule="sums", digest="d", need=2
    )
    voted = e.WaitVoted(at=at(30), step="1", by="mia")
    tl = read(bound, intended("ask"), (put, {"reason": "amount is 5000", "may": ["max", "mia"]}), (voted, {}))
    assert why(tl, "1")[2:] == [
        "An approval was needed, because “amount is 5000”.",
        "Asks managers by rule sums: 1 of 2 approved (mia).",
        "Nothing is done until 1 of managers agree.",
    ]


def test_secrets_and_what_was_erased_are_not_told() -> None:
    log = Log(MemoryStore())
    handle = log.create(e.RunStarted(at=at(0), run="r", agent="a"), {"input": "private"})
    handle.append(Entry(*tool("1", "sign", 1, token=Secret("hunter2"))))
    log.erase(handle, at=at(2), reason="asked to", seqs=[1])
    told = "\n".join(why(timeline(log, "r"), "1"))
    assert "sign(token=a secret)" in told
    assert "the input a value that was erased on purpose." in told
    assert "hunter2" not in told


def test_long_values_are_cut_and_times_have_the_zone_that_is_asked_for() -> None:
    tl = read(tool("1", "send", 0, "reads", body="x" * 500))
    assert f"“{'x' * 159}…”" in why(tl, "1")[0]
    assert f"“{'x' * 500}”" in why(tl, "1", chars=1_000)[0]
    assert "14:30:00:" in why(tl, "1", zone=timezone(timedelta(hours=5.5), "IST"))[0]
    assert "09:00:00 UTC:" in why(tl, "1", zone=None)[0]
    assert why(tl, "7") == []


# the run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ([], {}, "No worker has taken the run yet."),
        ([taken(0)], {}, "It has taken no step yet."),
        ([taken(0)], {"abandoned": True}, "The run's process died. Nothing happens until a worker"),
        (
            [(e.RunPaused(at=at(9), by="ops"), {"because": "the month is closing"})],
            {},
            "The run was paused at 2026-03-02 09:00:09 by ops: “the month is closing”. Nothing happens until a person",
        ),
        (
            [taken(0), (e.RunDiverged(at=at(9), step="2"), {"recorded": "pay(1)", "found": "mail(2)", "builds": []})],
            {},
            "at step 2: the log has pay(1), and the code has mail(2). Nothing happens until the code is fixed",
        ),
        (
            [(e.RunRepaired(at=at(9), first=1, last=1, hash_before="", hash_head=""), {"because": "torn"})],
            {},
            "Its record was repaired. Nothing happens until a person has looked at it",
        ),
        ([taken(0), (e.CancelRequested(at=at(9)), None)], {}, "The run is being cancelled."),
    ],
)
def test_what_holds_a_run_up_is_told(more: list[Told], options: dict[str, Any], told: str) -> None:
    assert told in why(read(*more), **options)[-1]


def test_a_run_is_told_with_its_input_its_parent_and_its_step() -> None:
    tl = read(tool("1", "pay", 0), input={"id": 17}, parent="claim_9", parent_step="4")
    assert why(tl)[:3] == [
        'Run claim_17 of the agent review, started 2026-03-02 09:00:00, with the input {"id": 17}.',
        "The run claim_9 started it, in its step 4.",
        "Step 1, 2026-03-02 09:00:00: pay(), effect reads.",
    ]
