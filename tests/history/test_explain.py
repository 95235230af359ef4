"""What --why says, text by text: a reader can judge the prose here, and every sentence is on record."""

from __future__ import annotations

from datetime import timedelta, timezone
from typing import Any

import pytest

from killick.errors import KillickError
from killick.history.explain import why
from killick.history.timeline import Timeline, timeline
from killick.log import Entry, Log
from killick.model import events as e
from killick.model.codec import Secret
from killick.model.failure import Failure
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


def paragraphs(tl: Timeline, number: str | None = None, **options: Any) -> str:
    return "\n".join(why(tl, number, **options))


# tools --------------------------------------------------------------------------------------------


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
        "Step 2 called pay on 2 March 2026 at 09:00:03 UTC, with to “Ann” and amount 80. It belongs to the stage "
        "pay of "
        "the plan. It must not happen twice, so it is repeated only when it is known not to have happened.",
        'This was known at that time. The run had been started with the input {"id":17}. Step 1 (fetch_docs) returned '
        '["report.pdf"]. The agent\'s own notes, its context, were {"route":"auto"}.',
        "The agent's code gave this reason: “it is below the limit”.",
        "It returned “paid 80” after 1.5 seconds.",
        "The step is done. It was the last step: the run completed at 09:00:05 with “paid 80”.",
    ]


def test_each_attempt_is_told_with_what_the_far_side_said_and_the_pause_after_it() -> None:
    late = Failure.of("TimeoutError", "no answer", kind="timeout")
    tl = read(
        tool("1", "hold", 0, "idempotent"),
        begun("1", 0),
        failed("1", 0.5, Failure("error", "ConnectionError", (), "the bank is away", cause=BUSY), retry_at=at(2)),
        begun("1", 2, 2),
        failed("1", 2.5, Failure("error", "ConnectionError", (), "the bank is away", cause=BUSY), 2, retry_at=at(5)),
        begun("1", 5, 3),
        failed("1", 35, late, 3, retry_at=at(40)),
        begun("1", 40, 4),
        failed("1", 40.1, Failure.of("RateLimited", "slow down"), 4, "refused", limited=True, retry_at=at(100)),
        begun("1", 100, 5),
        returned("1", 100.012, "held", 5),
    )
    assert why(tl, "1")[-2] == (
        "The first attempt began at 09:00:00 and failed after 500 milliseconds with ConnectionError: “the bank is "
        "away”. "
        "The cause was HTTPStatusError: “503 for https://bank”. The remote service answered with status 503 and said "
        "“busy”. "
        "After a pause of 1.5 seconds, the second attempt began at 09:00:02 and failed after 500 milliseconds in the "
        "same way. After a pause of 2.5 seconds, the third attempt began at 09:00:05 and ran out of time after 30 "
        "seconds with TimeoutError: “no answer”. After a pause of 5 seconds, the fourth attempt began at 09:00:40 and "
        "was turned away by a rate limit after 100 milliseconds with RateLimited: “slow down”. After a pause of 59 "
        "seconds, the fifth attempt began at 09:01:40 and returned “held” after 12 milliseconds."
    )


def test_a_refusal_says_that_nothing_was_done() -> None:
    tl = read(
        tool("1", "pay", 0, "at_most_once"),
        begun("1", 0),
        failed("1", 1, Failure.of("killick.errors.NotDone", "closed"), outcome="refused", retry_at=at(90)),
    )
    assert why(tl, "1")[-2:] == [
        "It was refused after 1 second with NotDone: “closed”. Nothing had been done by it.",
        "It is to be tried again at 09:01:30.",
    ]


def test_a_step_that_failed_the_run_says_how_far_it_got_and_that_somebody_must_act() -> None:
    failure = Failure("error", "ValueError", (), "no VAT id\nsecond line", cause=BUSY)
    tl = read(
        tool("1", "post", 0, "idempotent"),
        begun("1", 0),
        (e.AttemptProgressed(at=at(1), step="1", attempt=1), {"progress": {"sent": 2}}),
        failed("1", 2, failure),
        (e.RunFailed(at=at(3), step="1"), {"failure": failure, "not_undone": ["post at step 1"]}),
    )
    assert why(tl, "1")[-2:] == [
        "It failed after 2 seconds with ValueError: “no VAT id”. The cause was HTTPStatusError: “503 for "
        "https://bank”. "
        'The remote service answered with status 503 and said “busy”. It had got as far as {"sent":2}.',
        "The step failed. The run failed with it at 09:00:03. This could not be undone: post at step 1. Nothing more "
        "happens until a person resumes the run.",
    ]


def test_of_many_attempts_the_first_and_the_last_are_told() -> None:
    tries = [
        told for n in range(1, 9) for told in (begun("1", n * 10, n), failed("1", n * 10 + 1, AWAY, n, retry_at=at(0)))
    ]
    told = why(read(tool("1", "fetch", 0), *tries), "1")[-2]
    assert "The first attempt" in told
    assert "After that, 4 more attempts did not succeed either." in told
    assert "the seventh attempt" in told
    assert "the eighth attempt" in told
    assert "third" not in told


def test_of_many_steps_before_the_last_are_told() -> None:
    before = [t for n in range(1, 8) for t in (tool(str(n), "look", n), begun(str(n), n), returned(str(n), n, n))]
    told = why(read(*before, tool("8", "pay", 9)), "8")[1]
    assert told == (
        "This was known at that time. Of the 7 steps before it, these were the last 5. Step 3 (look) returned 3. "
        "Step 4 (look) returned 4. Step 5 (look) returned 5. Step 6 (look) returned 6. Step 7 (look) returned 7."
    )


def test_a_message_to_another_run_is_told_as_such() -> None:
    sent = e.StepIntended(at=at(0), step="1", sort="tool", name="send")
    tl = read(
        (sent, {"arguments": {"run": "other", "name": "go", "body": 5}}),
        (e.MessageSent(at=at(1), step="1", run="other", name="go", id="m"), {"body": 5}),
    )
    assert why(tl, "1")[0] == (
        "Step 1 sent a message on 2 March 2026 at 09:00:00 UTC, with run “other”, name “go” and body 5."
    )


# in doubt -----------------------------------------------------------------------------------------


def test_a_dead_process_leaves_a_doubt_that_a_person_settles() -> None:
    tl = read(
        *DIED_AT_TWO,
        (e.WaitOpened(at=at(61), step="1", **SETTLEMENT), {"prompt": "Did it happen?", "verbs": ["happened", "not"]}),
        closed("1", 90_061, answer("happened", "receipt 5"), by="mia", comment="I see it in the bank"),
        (
            e.AttemptSettled(
                at=at(90_061), step="1", attempt=1, key="claim_17:step_1", settlement="happened", by="mia"
            ),
            {"output": "receipt 5", "because": "I see it in the bank"},
        ),
    )
    assert why(tl, "1")[-2:] == [
        "It was begun at 09:00:01, and its process died before it ended. Whether it had happened was not known. "
        "People were asked at 09:01:01 whether it had happened. This was answered on 3 March 2026 at "
        "10:01:01, after 1 "
        "day and 1 hour: mia said that it had happened and added “I see it in the bank”.",
        "The step is done.",
    ]


def test_a_doubt_that_nobody_settled_yet_says_what_it_waits_for() -> None:
    tl = read(
        *DIED_AT_TWO,
        (e.WaitOpened(at=at(61), step="1", **SETTLEMENT), {"prompt": "Did it happen?", "verbs": ["happened", "not"]}),
    )
    assert why(tl, "1")[-2:] == [
        "It was begun at 09:00:01, and its process died before it ended. Whether it had happened was not known. "
        "People were asked at 09:01:01 whether it had happened.",
        "Nothing happens until a person says whether it happened.",
    ]


def test_a_check_of_the_tool_may_find_that_nothing_happened() -> None:
    settled = e.AttemptSettled(
        at=at(61), step="1", attempt=1, key="claim_17:step_1", settlement="did_not_happen", by="reconcile"
    )
    tl = read(*DIED_AT_TWO, (settled, {}), begun("1", 62, 2, 2), returned("1", 63, "charged", 2))
    assert why(tl, "1")[-2] == (
        "The first attempt began at 09:00:01, and its process died before it ended. Whether it had happened was "
        "not known. It was settled at 09:01:01 that it had not happened: the tool's own check said so. The second "
        "attempt began at 09:01:02 and returned “charged” after 1 second."
    )


@pytest.mark.parametrize(
    ("settlement", "by", "told"),
    [
        ("happened", "late result", "It was settled at 09:01:05 that it had happened: its result came late."),
        ("stopped", "mia", "It was settled at 09:01:05 to stop: mia said so."),
    ],
)
def test_other_ways_to_settle_a_doubt(settlement: Any, by: str, told: str) -> None:
    event = e.AttemptSettled(at=at(65), step="1", attempt=1, key="claim_17:step_1", settlement=settlement, by=by)
    assert told in paragraphs(read(*DIED_AT_TWO, (event, {})), "1")


def test_an_error_whose_outcome_is_unknown_says_so() -> None:
    tl = read(tool("1", "pay", 0, "at_most_once"), begun("1", 0), failed("1", 1, AWAY))
    assert "Whether it had happened was not known. " not in why(tl, "1")[-1]
    assert why(tl, "1")[-2:] == [
        "It failed after 1 second with ConnectionError: “the bank is away”. Whether it had happened was not known.",
        "Nothing happens until a person says whether it happened.",
    ]


# models and decisions -----------------------------------------------------------------------------


def test_a_model_and_what_it_chose() -> None:
    model = e.StepIntended(at=at(0), step="1", sort="model", name="create")
    usage = e.Usage(model="claude-x", tokens_in=10, tokens_out=5)
    reply = {"text": "I look up the rate."}
    tl = read(
        (
            model,
            {"arguments": {"model": "claude", "messages": [{"role": "user", "content": "A ferry to Oslo, please."}]}},
        ),
        begun("1", 0),
        (
            e.AttemptEnded(at=at(2), step="1", attempt=1, outcome="returned", usage=usage),
            {"output": reply, "reasoning": "Kroner need a rate."},
        ),
        (
            e.DecisionMade(at=at(2), step="2", by="model"),
            {
                "question": "Which tool?",
                "options": ["rate", "book"],
                "choice": "rate",
                "because": "I look up the rate.",
            },
        ),
        tool("3", "rate", 2, currency="NOK"),
        begun("3", 2),
        returned("3", 3, 11.7),
        input="A ferry to Oslo, please.",
    )

    def text_of(reply: Any) -> str:
        return str(reply["text"])

    assert why(tl, "1", text_of=text_of) == [
        "Step 1 asked the model claude-x on 2 March 2026 at 09:00:00 UTC. It was sent 1 message, the last from the "
        "user: "
        "“A ferry to Oslo, please.”",
        "This was known at that time. The run had been started with the input “A ferry to Oslo, please.”",
        "It answered “I look up the rate.” after 2 seconds. The model's own reasoning was “Kroner need a rate.”",
        "The step is done. The run continued with step 2.",
    ]
    assert why(tl, "3", text_of=text_of)[1:3] == [
        "This was known at that time. The run had been started with the input “A ferry to Oslo, please.” Step 1 (the "
        "model claude-x) answered “I look up the rate.” Step 2 (the decision “Which tool?”) chose “rate”.",
        "It was chosen in step 2. The question was “Which tool?” The choice was “rate”, out of “rate” and “book”; "
        "it was "
        "made by the model. The model claude-x had been asked just before, in step 1. The reason given was: “I look up "
        "the rate.”",
    ]


def test_a_reply_that_cannot_be_read_is_told_as_it_is() -> None:
    def refuse(reply: Any) -> str:
        raise KillickError("what is this?")

    model = e.StepIntended(at=at(0), step="1", sort="model", name="create")
    tl = read((model, {"arguments": {}}), begun("1", 0), returned("1", 1, {"odd": 1}))
    assert 'It answered {"odd":1} after 1 second.' in why(tl, "1", text_of=refuse)


def test_a_decision_is_told_with_its_rationale_whole() -> None:
    long = "It is large. " * 40
    values = {"question": "Who decides?", "options": ["auto", "manager"], "choice": "manager", "because": long}
    told = why(read(taken(0), (e.DecisionMade(at=at(1), step="1"), values)), "1")
    assert told == [
        "Step 1 was a decision, made on 2 March 2026 at 09:00:01 UTC.",
        "The question was “Who decides?” The choice was “manager”, out of “auto” and “manager”; it was made by the "
        f"agent's code. The reason given was: “{long.strip()}”",
        "The step is done.",
    ]


def test_a_decision_without_a_reason_says_so() -> None:
    values = {"question": "Useful", "options": None, "choice": True, "because": None}
    told = paragraphs(read((e.DecisionMade(at=at(1), step="1", by="mia"), values)), "1")
    assert "The question was “Useful”. The choice was true; it was made by mia. No reason is on record." in told


# waits --------------------------------------------------------------------------------------------

ASKED = {"prompt": "Pay 1250 to Ann?", "to": ("managers",), "deadline": at(72 * 3600), "default": "reject"}


def test_an_open_question_says_who_may_answer_and_until_when() -> None:
    tl = read(*wait("1", 5, "answer", **ASKED))
    assert why(tl, "1") == [
        "Step 1 put a question to managers on 2 March 2026 at 09:00:05 UTC: “Pay 1250 to Ann?” It can be answered "
        "until "
        "09:00:00 on 5 March 2026; after that, “reject” counts.",
        "Nothing happens until there is an answer from managers, or until its time is up.",
    ]


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (
            closed("1", 7205, answer("approve"), by="mia", comment="photos match"),
            "It was answered at 11:00:05, after 2 hours: mia approved it and added “photos match”.",
        ),
        (closed("1", 7205, answer("reject")), "It was answered at 11:00:05, after 2 hours: a person rejected it."),
        (
            closed("1", 7205, answer("edit", {"amount": 80}), by="mia"),
            'It was answered at 11:00:05, after 2 hours: mia changed it to {"amount":80}.',
        ),
        (
            closed("1", 7205, answer("respond", "later"), by="mia"),
            "It was answered at 11:00:05, after 2 hours: mia answered “later”.",
        ),
        (
            closed("1", 72 * 3600, how="expired"),
            "It ran out unanswered on 5 March 2026 at 09:00:00, after 2 days and 23 hours, so “reject” counted.",
        ),
        (closed("1", 7205, how="cancelled"), "It was cancelled at 11:00:05, after 2 hours."),
    ],
)
def test_how_a_question_ended(ended: Told, told: str) -> None:
    assert told in why(read(*wait("1", 5, "answer", **ASKED), ended), "1")


def test_a_question_with_options_names_them() -> None:
    tl = read(*wait("1", 0, "answer", prompt="Which day?", options=["Monday", "Friday"]))
    assert "put a question to people" in why(tl, "1")[0]
    assert "“Which day?” The options were “Monday” and “Friday”." in why(tl, "1")[0]
    assert why(tl, "1")[-1] == "Nothing happens until there is an answer."


@pytest.mark.parametrize(
    ("opened", "first", "last"),
    [
        (
            wait("1", 0, "time", "sleep", deadline=at(86_400)),
            "Step 1 began to wait on 2 March 2026 at 09:00:00 UTC, until 09:00:00 on 3 March 2026.",
            "It continues on 3 March 2026 at 09:00:00.",
        ),
        (
            wait("1", 0, "event", "paid", deadline=at(3600)),
            "Step 1 began to wait on 2 March 2026 at 09:00:00 UTC for a message named paid, until 10:00:00 at the "
            "latest.",
            "It continues when a caller sends the message paid.",
        ),
        (
            wait("1", 0, "child", "other/2"),
            "Step 1 began to wait on 2 March 2026 at 09:00:00 UTC for the run other/2 to end.",
            "It continues when the run other/2 has ended.",
        ),
    ],
)
def test_waits_that_no_person_answers(opened: list[Told], first: str, last: str) -> None:
    assert why(read(*opened), "1") == [first, last]


@pytest.mark.parametrize(
    ("opened", "ended", "told"),
    [
        (wait("1", 0, "time", "sleep", deadline=at(60)), closed("1", 60, how="expired"), "It was over at 09:01:00."),
        (
            wait("1", 0, "event", "paid"),
            closed("1", 60, {"amount": 5}, by="bank"),
            'It was over at 09:01:00, after 1 minute: bank sent {"amount":5}.',
        ),
        (
            wait("1", 0, "child", "other/2"),
            closed("1", 60, {"status": "failed", "result": None, "failure": None}),
            "It was over at 09:01:00, after 1 minute: the run other/2 ended as failed.",
        ),
    ],
)
def test_how_such_waits_ended(opened: list[Told], ended: Told, told: str) -> None:
    assert why(read(*opened, ended), "1")[1] == told


def test_a_question_inside_a_step_is_told_with_its_answer() -> None:
    asked = (e.WaitOpened(at=at(1), step="1", waits_for="answer", name="answer"), {"prompt": "Do it again?"})
    tl = read(
        tool("1", "pay", 0), asked, closed("1", 61, answer("approve"), by="mia"), begun("1", 61), returned("1", 62, 1)
    )
    assert why(tl, "1")[-2] == (
        "It returned 1 after 1 second. People were asked at 09:00:01: “Do it again?” This was answered at 09:01:01, "
        "after 1 minute: mia approved it."
    )


# children, scopes, undoing ------------------------------------------------------------------------


def test_a_child_run_is_told_with_its_input() -> None:
    intended = e.StepIntended(at=at(0), step="1", sort="child", name="review")
    spawned = e.ChildSpawned(at=at(1), step="1", run="claim_17/1", agent="review")
    tl = read((intended, {"arguments": {"input": {"id": 9}}}), (spawned, {"input": {"id": 9}}), tool("2", "pay", 2))
    assert why(tl, "1") == [
        'Step 1 started a run of the agent review as claim_17/1 on 2 March 2026 at 09:00:00 UTC, with input {"id":9}.',
        "The agent's code took this step, and gave no reason for it.",
        "The step is done. The run continued with step 2.",
    ]


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
        (e.StepEnded(at=at(4), step="1.1.2", outcome="cancelled"), None),
        (e.StepEnded(at=at(4), step="1", outcome="failed"), None),
    )
    assert why(tl, "1") == [
        "Step 1 began 2 branches of work side by side on 2 March 2026 at 09:00:00 UTC.",
        "Branch 1 got to step 1.1.2 (read), which was cancelled. Branch 2 got to step 1.2.1 (look), which failed with "
        "ConnectionError: “the bank is away”.",
        "The step failed.",
    ]
    assert why(tl, "1.1.2")[1] == "This was known at that time. Step 1.1.1 (look) returned “a”."


def test_a_choice_of_another_branch_is_not_taken_for_its_own() -> None:
    scope = e.StepIntended(at=at(0), step="1", sort="scope", name="gather")
    chosen = {"question": "Which tool?", "options": ["look"], "choice": "look", "because": "I must see"}
    tl = read(
        (scope, {"arguments": {"branches": 2}}),
        (e.DecisionMade(at=at(1), step="1.1.1", by="model"), chosen),
        tool("1.2.1", "look", 2),
        tool("1.1.2", "look", 3),
    )
    assert "I must see" not in paragraphs(tl, "1.2.1")
    assert "It was chosen in step 1.1.1." in paragraphs(tl, "1.1.2")


def test_a_race_and_a_transition_are_told_as_such() -> None:
    first = e.StepIntended(at=at(0), step="1", sort="scope", name="first")
    move = e.StepIntended(at=at(1), step="2", sort="scope", name="transition")
    tl = read((first, {"arguments": {"branches": 1}}), (move, {"state": "open"}), tool("2.1", "look", 2))
    assert why(tl, "1")[0] == (
        "Step 1 began 1 branch of work side by side on 2 March 2026 at 09:00:00 UTC, until one of them was done."
    )
    assert why(tl, "2")[:2] == [
        "Step 2 was a transition of the state machine, begun on 2 March 2026 at 09:00:01 UTC in the state “open”.",
        "It got to step 2.1 (look), which is not over yet.",
    ]


UNDONE = [
    tool("1", "hold", 0, "idempotent", amount=5),
    begun("1", 0),
    returned("1", 1, "held"),
]
UNDO: list[Told] = [
    (
        e.StepIntended(at=at(3), step="2", sort="undo", name="hold", effect="at_most_once", undoes="1", undoes_seq=3),
        {"arguments": {"key": "claim_17:step_1"}},
    ),
    begun("2", 3),
    returned("2", 4, None),
]


def test_what_was_undone_says_by_which_step_and_why() -> None:
    failure = Failure.of("app.Full", "the hotel is full")
    tl = read(*UNDONE, *UNDO, (e.RunFailed(at=at(5)), {"failure": failure}))
    assert why(tl, "1")[-1] == "The step is done. It was undone by step 2, at 09:00:04. The run continued with step 2."
    assert why(tl, "2") == [
        "Step 2 began on 2 March 2026 at 09:00:03 UTC to undo step 1, hold with amount 5.",
        "This was known at that time. Step 1 (hold) returned “held”.",
        "The run had failed with Full: “the hotel is full”.",
        "It was done after 1 second.",
        "The step is done. It was the last step: the run failed at 09:00:05 with Full: “the hotel is full”. What "
        "had been "
        "done in step 1 was undone. Nothing more happens until a person resumes the run.",
    ]


def test_what_was_undone_because_somebody_cancelled_names_them() -> None:
    asked = e.CancelRequested(at=at(2), compensate=True, by="mia")
    tl = read(*UNDONE, (asked, {"because": "wrong customer"}), *UNDO, (e.RunCancelled(at=at(5)), {}))
    told = paragraphs(tl, "2")
    assert "was the wish of mia, who said “wrong customer”." in told
    assert "It was the last step: the run was cancelled at 09:00:05." in told


# what else can be on record of a step -------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            [(e.StepDelayed(at=at(1), step="1", until=at(30), because="limit crm"), None)],
            "It was delayed until 09:00:30: limit crm.",
        ),
        (
            [(e.StepAdopted(at=at(1), step="1", run="claim_16", key="k", seq=3), {"output": "sent"})],
            "It was not done again, because the run claim_16 had done the same before. What that had returned was "
            "taken: "
            "“sent”.",
        ),
        (
            [(e.StepOverridden(at=at(1), step="1", by="mia"), {"output": 5})],
            "Its result was given by hand, by mia: 5.",
        ),
        (
            [
                begun("1", 1),
                returned("1", 2, 1),
                (e.EffectConfirmed(at=at(3), step="1", key="k", confirmed=False), None),
            ],
            "The world was looked at afterwards, and did not show it.",
        ),
        (
            [begun("1", 1), returned("1", 2, 1), (e.StepDrifted(at=at(3), step="1"), {"recorded": {}, "found": {}})],
            "Later the code asked for this step with other arguments; the result on record was kept.",
        ),
        (
            [(e.NoteMade(at=at(1), step="1", by="killick"), {"note": "reconcile failed"})],
            "A note of Killick says: “reconcile failed”.",
        ),
    ],
)
def test_what_else_happened_to_a_step_is_told(more: list[Told], told: str) -> None:
    assert told in paragraphs(read(tool("1", "send_email", 0, "idempotent"), *more), "1")


def test_secrets_and_what_was_erased_are_not_told() -> None:
    log = Log(MemoryStore())
    handle = log.create(e.RunStarted(at=at(0), run="r", agent="a"), {"input": "private"})
    handle.append(Entry(*tool("1", "sign", 1, token=Secret("hunter2"))))
    log.erase(handle, at=at(2), reason="asked to", seqs=[1])
    told = paragraphs(timeline(log, "r"), "1")
    assert "with token a secret." in told
    assert "the input a value that was erased on purpose." in told
    assert "hunter2" not in told


def test_long_values_are_cut_and_whole_ones_can_be_had() -> None:
    tl = read(tool("1", "send", 0, "reads", body="x" * 500))
    assert f"“{'x' * 159}…”" in why(tl, "1")[0]
    assert f"“{'x' * 500}”" in why(tl, "1", chars=1_000)[0]


def test_times_are_told_in_the_zone_that_is_asked_for() -> None:
    tl = read(tool("1", "look", 0))
    assert "at 14:30:00 IST" in why(tl, "1", zone=timezone(timedelta(hours=5.5), "IST"))[0]


# the run as a whole -------------------------------------------------------------------------------


def test_without_a_number_the_run_is_told_and_the_step_it_is_at() -> None:
    tl = read(
        (e.PlanMade(at=at(0), stages=("ask", "pay"), step="1"), None),
        (e.PlanReached(at=at(0), stage="ask", step="1"), None),
        *wait("1", 5, "answer", **ASKED),
        input={"id": 17},
    )
    told = why(tl)
    assert told[0] == (
        'The run claim_17 of the agent review was started on 2 March 2026 at 09:00:00 UTC with the input {"id":17}. In '
        "its plan it is at ask: step 1 of 2."
    )
    assert told[1].startswith("Step 1 put a question to managers at 09:00:05:")
    assert "had been started with" not in "".join(told[1:]), "the input is told once"


def test_a_run_that_failed_in_its_own_code_says_so() -> None:
    failure = Failure("error", "app.Full", (), "the hotel is full", cause=BUSY)
    told = why(read(*UNDONE, *UNDO, (e.RunFailed(at=at(5)), {"failure": failure, "not_undone": ["mail at step 3"]})))
    assert told == [
        "The run claim_17 of the agent review was started on 2 March 2026 at 09:00:00 UTC. It failed at 09:00:05, "
        "in the "
        "agent's own code, with Full: “the hotel is full”. The cause was HTTPStatusError: “503 for https://bank”. The "
        "remote service answered with status 503 and said “busy”.",
        "What had been done in step 1 was undone. This could not be undone: mail at step 3. Nothing more happens until "
        "a person resumes the run.",
    ]


def test_a_run_that_failed_at_a_step_explains_that_step() -> None:
    tl = read(
        tool("1", "pay", 0), begun("1", 0), failed("1", 1, AWAY), (e.RunFailed(at=at(2), step="1"), {"failure": AWAY})
    )
    assert "The run failed with it at 09:00:02." in why(tl)[-1]


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ([], {}, "No worker has taken the run yet."),
        ([taken(0)], {}, "It has taken no step yet."),
        ([taken(0)], {"abandoned": True}, "The run's process died. Nothing happens until a worker"),
        (
            [(e.RunPaused(at=at(9), by="ops"), {"because": "the month is closing"})],
            {},
            "The run was paused at 09:00:09 by ops, who said “the month is closing”. Nothing happens until a person "
            "resumes it.",
        ),
        (
            [
                taken(0),
                (e.RunDiverged(at=at(9), step="2"), {"recorded": "tool pay(1)", "found": "tool mail(2)", "builds": []}),
            ],
            {},
            "The code no longer fits the record, as was found at 09:00:09. At step 2 the log has tool pay(1), "
            "and the "
            "code has tool mail(2). Nothing happens until the code is fixed and a person resumes the run.",
        ),
        (
            [(e.RunRepaired(at=at(9), first=1, last=1, hash_before="", hash_head=""), {"because": "torn"})],
            {},
            "Its record was repaired. Nothing happens until a person has looked at it and resumes the run.",
        ),
        ([taken(0), (e.CancelRequested(at=at(9)), None)], {}, "The run is being cancelled."),
    ],
)
def test_what_holds_a_run_up_is_told(more: list[Told], options: dict[str, Any], told: str) -> None:
    assert told in why(read(*more), **options)[0]


def test_a_child_says_who_started_it() -> None:
    assert "The run claim_9 started it, in its step 4." in why(read(parent="claim_9", parent_step="4"))[0]


def test_a_step_at_work_says_that_it_is_not_over_or_that_its_process_is_gone() -> None:
    tl = read(taken(0), tool("1", "pay", 0, "at_most_once"), begun("1", 0))
    assert why(tl, "1")[-2:] == ["It was begun at 09:00:00.", "It is not over yet."]
    assert why(tl, "1", abandoned=True)[-1] == (
        "The run's process died. Nothing happens until a worker takes the run or a person resumes it."
    )


def test_a_step_that_there_is_not_has_no_story() -> None:
    assert why(read(), "7") == []


# what was judged ----------------------------------------------------------------------------------

BOUND: Told = e.ContractBound(at=at(0), digest="f9LOXogF-rest", name="claims"), {"contract": {"rules": []}}
BEGUN = (taken(0), BOUND)


def verdict(ruling: Any, rule: str | None = "large sums", code: str | None = None) -> e.Verdict:
    return e.Verdict(ruling=ruling, rule=rule, code=code, contract="f9LOXogF-rest")


def intended(seconds: float, judged: e.Verdict | None, amount: int = 5000, failure: Failure | None = None) -> Told:
    event = e.StepIntended(at=at(seconds), step="1", sort="tool", name="pay", effect="at_most_once", verdict=judged)
    return event, {"arguments": {"amount": amount}, **({} if failure is None else {"failure": failure})}


def put(seconds: float, to: str = "managers", amount: int = 5000, **more: Any) -> Told:
    event = e.WaitOpened(
        at=at(seconds), step="1", waits_for="answer", name="approve", to=(to,), rule="large sums",
        digest=f"{to}{amount}{seconds}", **more,
    )  # fmt: skip
    reason = f"amount is {amount}; at most 1000 is allowed"
    may = {"managers": ["max", "mia"], "directors": ["dora"]}[to]
    return event, {
        "reason": reason,
        "may": may,
        "contract": "f9LOXogF-rest",
        "prompt": f"pay({amount}): {reason}. Do it?",
    }


def rejection(message: str, **details: Any) -> Failure:
    return Failure("error", "killick.Rejected", (), message, details=details)


def test_a_rejection_is_told_with_its_rule_its_contract_and_what_would_be_allowed() -> None:
    failure = rejection("amount is 5000; at most 1000 is allowed", allowed={"amount": {"max": 1000}})
    tl = read(*BEGUN, intended(1, verdict("reject", "small sums", "argument_refused"), failure=failure))
    assert why(tl, "1")[-2:] == [
        "The contract claims (f9LOXogF) rejected it by its rule “small sums” (argument_refused): “amount is 5000; at "
        'most 1000 is allowed”. What it would allow is {"amount":{"max":1000}}.',
        "Nothing was done.",
    ]
    assert why(tl, "1")[0].startswith("Step 1 was to call pay on 2 March 2026")


def test_what_was_accepted_says_by_which_contract() -> None:
    tl = read(*BEGUN, intended(1, verdict("accept", None)), begun("1", 1), returned("1", 2, "paid"))
    assert "The contract claims (f9LOXogF) accepted it." in why(tl, "1")


def test_votes_an_edit_and_the_votes_after_it_are_told_in_order() -> None:
    edited = e.StepEdited(at=at(60), step="1", by="max", verdict=verdict("ask"))
    tl = read(
        *BEGUN, intended(1, verdict("ask")), put(1, need=2, deadline=at(3600)),
        (e.WaitVoted(at=at(30), step="1", by="mia"), {"comment": "a roof is a roof"}),
        closed("1", 60, answer("edit", {"amount": 2000}), by="max"),
        (edited, {"arguments": {"amount": 2000}, "changed": {"amount": [5000, 2000]}, "comment": "too much"}),
        put(60, amount=2000, need=2), (e.WaitVoted(at=at(60), step="1", by="max"), None),
        (e.WaitVoted(at=at(90), step="1", by="mia"), None), closed("1", 90, answer("approve"), by="mia"),
        begun("1", 90), returned("1", 91, "paid 2000"),
    )  # fmt: skip
    assert why(tl, "1")[2:4] == [
        "The contract claims (f9LOXogF) wanted people to be asked, by its rule “large sums”: “amount is 5000; at most "
        "1000 is allowed”. It was put to managers (max and mia) at 09:00:01, until 10:00:00; 2 of them had to agree. "
        "Mia agreed at 09:00:30, with the words “a roof is a roof”. Max changed amount from 5000 to 2000 at 09:01:00, "
        "with the words “too much”. The earlier approvals no longer counted. The contract claims (f9LOXogF) "
        "wanted people to be asked, by its rule “large sums”: “amount is 2000; at most 1000 is allowed”. It was put to "
        "managers (max and mia) at 09:01:00; 2 of them had to agree. Max agreed at 09:01:00. Mia agreed at 09:01:30.",
        "It returned “paid 2000” after 1 second.",
    ]


def test_a_question_that_was_passed_on_says_to_whom_and_who_said_no() -> None:
    failure = rejection("dora said no: too much", by="dora")
    tl = read(
        *BEGUN, intended(1, verdict("ask")), put(1, deadline=at(3600)), put(3600, "directors", round=1),
        closed("1", 3700, answer("reject"), by="dora", comment="too much"),
        (e.StepEnded(at=at(3700), step="1", outcome="failed", by="dora"), {"failure": failure}),
    )  # fmt: skip
    assert why(tl, "1")[-2:] == [
        "The contract claims (f9LOXogF) wanted people to be asked, by its rule “large sums”: “amount is 5000; at most "
        "1000 is allowed”. It was put to managers (max and mia) at 09:00:01, until 10:00:00. None of them had answered "
        "at 10:00:00, after 59 minutes and 59 seconds. So it was passed on to directors (dora) at 10:00:00. Dora said "
        "no at 10:01:40, after 1 minute and 40 seconds, with the words “too much”.",
        "Nothing was done.",
    ]


def test_an_edit_that_was_rejected_leaves_the_question_open() -> None:
    edited = e.StepEdited(at=at(60), step="1", by="mia", verdict=verdict("reject", "the most", "argument_refused"))
    values = {"arguments": {"amount": 9000}, "changed": {"amount": [5000, 9000]}, "failure": rejection("at most 6000")}
    tl = read(*BEGUN, intended(1, verdict("ask")), put(1, need=2), (edited, values))
    assert why(tl, "1")[-2].endswith(
        "Mia changed amount from 5000 to 9000 at 09:01:00. That was rejected by the rule “the most”: “at most 6000”; "
        "the question is open."
    )
    assert why(tl, "1")[-1] == "Nothing is done until 2 of managers agree."


def test_a_verdict_that_came_after_the_answer_is_told_after_it() -> None:
    tl = read(
        *BEGUN, intended(1, verdict("ask")), put(1), closed("1", 60, answer("approve"), by="mia"),
        (
            e.StepEnded(at=at(60), step="1", outcome="failed", verdict=verdict("reject", "budget", "budget_spent")),
            {"failure": rejection("the budget is spent")},
        ),
    )  # fmt: skip
    assert why(tl, "1")[-2].endswith(
        "Mia agreed at 09:01:00, after 59 seconds. After that, the contract claims (f9LOXogF) rejected it by its rule "
        "“budget” (budget_spent): “the budget is spent”."
    )


def test_a_step_that_was_skipped_or_overridden_says_who_and_why() -> None:
    skipped = Failure("error", "killick.Skipped", (), "skipped by ops: it is late", details={"by": "ops"})
    ended = e.StepEnded(at=at(2), step="1", outcome="failed", by="ops")
    tl = read(taken(0), tool("1", "pay", 1), (ended, {"failure": skipped}))
    assert why(tl, "1")[-2:] == ["It was skipped by ops: it is late.", "Nothing was done."]
    tl = read(
        tool("1", "pay", 1), (e.StepOverridden(at=at(2), step="1", by="ops"), {"output": 7, "because": "by phone"})
    )
    assert "Its result was given by hand, by ops: 7, with the words “by phone”." in why(tl, "1")


def test_a_run_that_its_contract_paused_says_so() -> None:
    tl = read((e.RunPaused(at=at(9), by="contract"), {"because": "10 in a row"}))
    assert "The run was paused at 09:00:09 by its contract, because “10 in a row”." in why(tl)[0]
