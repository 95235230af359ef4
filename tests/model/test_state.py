"""The nine parts of a state: typed, lazy, and with a JSON form that its schema describes."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from stories import START_US, Story, started

from killick.log import Entry, Log
from killick.model import events as e
from killick.model.codec import Erased
from killick.model.state import STATE_VERSION, State, StateDocument
from killick.store import MemoryStore

SCHEMA = Path(__file__).parent.parent.parent / "docs" / "state.schema.json"


def say(event: e.Event, **values: Any) -> Entry:
    return Entry(event, values)


@pytest.fixture
def state() -> State:
    """Step 1 fetched, step 2 was decided, step 3 failed once and then paid, step 4 asks a manager."""
    log = Log(MemoryStore())
    first = started(tags=("vip",), priority=3)
    handle = log.create(first.event, first.values or {})  # type: ignore[arg-type]
    intended, began, ended = e.StepIntended, e.AttemptStarted, e.AttemptEnded
    usage = e.Usage(model="m", tokens_in=9)
    failure = {"type": "ConnectionRefusedError", "message": "refused", "chain": ["OSError"]}
    handle.append(
        say(e.RunTaken(at=1, epoch=0, holder="w")),
        say(e.PlanMade(at=2, stages=("fetch", "pay", "approve"))),
        say(e.PlanReached(at=2, stage="pay")),
        say(intended(at=3, step="1", sort="model", name="chat"), arguments={"messages": ["hi"]}),
        say(began(at=3, step="1", attempt=1, key="m1", epoch=0)),
        say(ended(at=4, step="1", attempt=1, outcome="returned", usage=usage), output={"text": "hello"}),
        say(
            e.DecisionMade(at=5, step="2", by="model"),
            question="Who?",
            options=["a", "b"],
            choice="a",
            because="small",
        ),
        say(intended(at=6, step="3", sort="tool", name="pay", effect="at_most_once"), arguments={"amount": 3}),
        say(began(at=6, step="3", attempt=1, key="run_1:step_3:pay:f3a9b12c", epoch=0)),
        say(ended(at=7, step="3", attempt=1, outcome="refused", retry_at=9), failure=failure, progress="half"),
        say(began(at=9, step="3", attempt=2, key="run_1:step_3:pay:f3a9b12c", epoch=0)),
        say(ended(at=10, step="3", attempt=2, outcome="returned"), output=("paid", b"\x01")),
        say(e.ContextChanged(at=11, version=1, whole=True), document={"route": "auto", "n": 1}),
        say(e.ContextChanged(at=12, version=2), set={"route": "manager", "x": 2}, unset=["n"]),
        say(intended(at=13, step="4", sort="wait", name="ask")),
        say(
            e.WaitOpened(at=13, step="4", waits_for="answer", name="approve", to=("managers",), deadline=99),
            prompt="Pay 3?",
            schema={"type": "boolean"},
        ),
    )
    return log.state("run_1")


def test_position_says_where_it_is_and_what_is_left(state: State) -> None:
    position = state.position
    assert (position.step, position.stage, position.plan) == ("4", "pay", ("fetch", "pay", "approve"))
    assert (position.committed, position.pending) == (("1", "2", "3"), ("4",))
    assert (state.run, state.agent, state.status, state.input) == (
        "run_1",
        "review",
        "waiting",
        {"claim": 17},
    )


def test_outputs_are_verbatim_and_by_step(state: State) -> None:
    assert dict(state.outputs) == {"1": {"text": "hello"}, "2": "a", "3": ("paid", b"\x01")}
    assert len(state.outputs) == 3
    with pytest.raises(KeyError):
        state.outputs["4"]


def test_a_decision_has_question_options_choice_and_why(state: State) -> None:
    [decision] = state.decisions
    assert (decision.step, decision.by, decision.question) == ("2", "model", "Who?")
    assert (decision.options, decision.choice, decision.because) == (["a", "b"], "a", "small")


def test_retries_remember_every_error(state: State) -> None:
    [retry] = state.retries
    assert (retry.step, retry.name, retry.attempts) == ("3", "pay", 2)
    assert retry.errors[0]["type"] == "ConnectionRefusedError"


def test_a_failure_has_its_context(state: State) -> None:
    [failure] = state.failures
    assert (failure.step, failure.tool, failure.attempt) == ("3", "pay", 1)
    assert (failure.input, failure.progress, failure.error["chain"]) == ({"amount": 3}, "half", ["OSError"])


def test_context_is_the_last_whole_document_and_the_changes_since(state: State) -> None:
    assert (state.context.version, state.context.document) == (2, {"route": "manager", "x": 2})


def test_what_is_pending_can_be_shown_to_a_person(state: State) -> None:
    [pending] = state.pending
    assert (pending.prompt, pending.to, pending.deadline) == ("Pay 3?", ("managers",), 99)


def test_the_trace_has_model_and_tool_calls_in_order(state: State) -> None:
    assert [(call.step, call.sort, call.output) for call in state.trace] == [
        ("1", "model", {"text": "hello"}),
        ("3", "tool", ("paid", b"\x01")),
    ]
    assert state.trace[0].usage == e.Usage(model="m", tokens_in=9)
    assert state.trace[-1].input == {"amount": 3}


def test_effects_carry_their_keys(state: State) -> None:
    [effect] = state.effects
    assert (effect.key, effect.status, effect.attempts) == ("run_1:step_3:pay:f3a9b12c", "done", 2)


def test_looking_at_one_value_reads_one_value() -> None:
    class Counting(MemoryStore):
        reads = 0

        def row(self, run: str, seq: int) -> Any:
            Counting.reads += 1
            return super().row(run, seq)

    log = Log(Counting())
    first = started()
    handle = log.create(first.event, first.values or {})
    for number in range(1, 500):
        handle.append(say(e.DecisionMade(at=number, step=str(number)), choice=number))
    state = log.state("run_1")
    Counting.reads = 0
    assert state.outputs["250"] == 250
    assert Counting.reads <= 2


def test_the_json_form_fits_its_published_schema(state: State) -> None:
    schema = json.loads(SCHEMA.read_text())
    document = json.loads(state.to_json())
    jsonschema.validate(document, schema)
    assert document["version"] == STATE_VERSION
    assert document["outputs"][2]["value"] == {"$tuple": ["paid", {"$bytes": "AQ=="}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "status": "confused"}, schema)


def test_the_published_schema_is_the_one_the_code_has() -> None:
    schema = msgspec.json.schema(StateDocument)
    assert json.loads(SCHEMA.read_text()) == json.loads(msgspec.json.encode(schema)), (
        "docs/state.schema.json is not what the code says; if the change is meant, write it anew"
    )


@pytest.mark.gate(1)
@pytest.mark.parametrize("seed", range(3))
def test_any_state_has_a_json_form(seed: int) -> None:
    log = Log(MemoryStore(), snapshot_every=32)
    first = started()
    handle = log.create(first.event, first.values or {})
    for batch in Story(seed).entries(200):
        handle.append(*batch)
    schema = json.loads(SCHEMA.read_text())
    for seq in range(1, handle.seq, 17):
        jsonschema.validate(json.loads(log.state("run_1", seq).to_json()), schema)


def test_erased_values_show_as_erased() -> None:
    log = Log(MemoryStore())
    first = started()
    handle = log.create(first.event, first.values or {})
    handle.append(say(e.DecisionMade(at=1, step="1"), choice="secret", because="private"))
    log.erase(handle, at=START_US, reason="asked", seqs=[2])
    state = log.state("run_1")
    assert isinstance(state.outputs["1"], Erased)
    assert isinstance(state.decisions[0].because, Erased)
    assert b"secret" not in state.to_json()
    assert json.loads(state.to_json())["outputs"][0]["value"].keys() == {"$erased"}
