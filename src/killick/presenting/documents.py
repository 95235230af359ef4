"""The documents of a run, a step, an attempt, a wait, an event and a moment: one schema for every surface.

`--json` and the HTTP API print these; a webhook has the fields of an event. Each type has one function that builds it
from the history's views. `killick.presenting.encoder` turns them into JSON.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Self

import msgspec

from killick.engine import views
from killick.engine.control.inbox import APPROVE
from killick.errors import ValueErased
from killick.history import timeline_parts as parts
from killick.history.phrasing import chain
from killick.log.log import Log, Recorded
from killick.model import events as e
from killick.model.failure import Failure
from killick.model.typed import convert
from killick.presenting import moments
from killick.presenting.phrase import Briefly

SCHEMA_VERSION: Final = 1
"""The version of these documents. It changes when a field changes its name, its type or its meaning."""

_TEXT: Final = Briefly(240)
_OPEN: Final = ("running", "intended", "waiting", "delayed", "in_doubt")
_ABSENT: Final = object()
_IN_THE_LOG: Final = frozenset({"kind", "at", "data"})


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A document. A field `…_us` is a time in JSON, without `_us`."""

    @classmethod
    def of(cls, source: Any, **given: Any) -> Self:
        """A document with the fields that `source` has by the same name, and those of `given`."""
        for name in cls.__struct_fields__:
            if name not in given:
                value = getattr(source, name, getattr(source, name.removesuffix("_us"), _ABSENT))
                if value is not _ABSENT:
                    given[name] = value
        return cls(**given)


# errors -------------------------------------------------------------------------------------------


class Frame(Document, frozen=True):
    """One line of a traceback."""

    file: str
    line: int
    function: str


class Error(Document, frozen=True):
    """An error. `details` has its other data, such as a service's response; `members` are a group's errors."""

    type: str
    message: str
    kind: str
    notes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    members: tuple[str, ...] = ()
    details: Any = None


def errors(failure: Failure | None) -> tuple[Error, ...]:
    """An error, and those that caused it, each after its effect."""
    return tuple(
        Error.of(
            each, details=each.details or None, frames=tuple(map(Frame.of, each.frames)),
            members=tuple(map(str, each.members)),
        )
        for each in (chain(failure) if failure is not None else ())
    )  # fmt: skip


def recorded_failure(value: Any) -> Failure | None:
    """A failure as a value of an event has it."""
    return convert(value, Failure, at="failure") if isinstance(value, dict) else None


# waits --------------------------------------------------------------------------------------------


class Vote(Document, frozen=True):
    """One approval of a quorum."""

    at_us: int
    by: str
    answer: Any = None
    comment: Any = None


class Wait(Document, frozen=True):
    """An open or closed wait of a step. An answer names its `id`.

    `kind` is `answer`, `settlement`, `event`, `child` or `time`. `asks` is what a person is asked: `approval` (may this
    call be made), `question`, or `doubt` (did this call happen). `approved_by` names the approvers so far, of `need`.
    `reason` says why a person is asked, `because` why the agent wants it. `digest` is the version of the question that
    an answer is bound to. Open: `outcome` is null.
    """

    id: str
    run: str
    step: str
    kind: e.WaitFor
    name: str
    asks: str | None
    prompt: Any
    to: tuple[str, ...]
    may: tuple[str, ...] | None
    need: int
    approved_by: tuple[str, ...]
    verbs: tuple[str, ...]
    options: Any
    schema: Any
    intention: Any
    rule: str | None
    reason: Any
    digest: str | None
    round: int
    opened_at_us: int
    deadline_us: int | None
    closed_at_us: int | None = None
    outcome: e.WaitEnd | None = None
    by: str | None = None
    answer: Any = None
    comment: Any = None
    default: Any = None
    because: Any = None
    votes: tuple[Vote, ...] = ()


def _asks(kind: str, rule: str | None) -> str | None:
    if rule is not None:
        return "approval"
    return {"answer": "question", "settlement": "doubt"}.get(kind)


def open_wait(view: views.Wait) -> Wait:
    """An open wait, with the votes that the run is yet to take."""
    return Wait.of(
        view, kind=view.waits_for, asks=_asks(view.waits_for, view.rule), approved_by=view.votes,
        options=list(view.options), rule=view.rule if view.rule != APPROVE else None, opened_at_us=view.since_us,
        votes=(),
    )  # fmt: skip


def recorded_wait(run: str, part: parts.Wait) -> Wait:
    """A wait as it is on record of a step."""
    return Wait.of(
        part, id=f"{run}:{part.step}", run=run, kind=part.waits_for, asks=_asks(part.waits_for, part.rule),
        may=part.may or None, approved_by=tuple(vote.by for vote in part.votes), options=list(part.options),
        rule=part.rule if part.rule != APPROVE else None, outcome=part.how, votes=tuple(map(Vote.of, part.votes)),
    )  # fmt: skip


class Question(Wait, frozen=True, kw_only=True):
    """A wait for a person, in its run's context."""

    agent: str
    stage: str | None
    plan: tuple[str, ...]
    priority: int


# steps --------------------------------------------------------------------------------------------


class Settlement(Document, frozen=True):
    """An outcome in doubt was settled: by a reconciler, a late result, or a person."""

    at_us: int
    how: e.Settlement
    by: str | None
    because: Any = None


class Attempt(Document, frozen=True):
    """One attempt of a step. `died`: its process died before it recorded an outcome."""

    number: int
    idempotency_key: str
    started_at_us: int
    ended_at_us: int | None
    outcome: e.Outcome | None
    died: bool
    retry_at_us: int | None
    rate_limited: bool
    not_retried: e.NotRetried | None
    usage: e.Usage | None
    errors: tuple[Error, ...] = ()
    reasoning: Any = None
    progress: Any = None
    settlement: Settlement | None = None


def attempt(part: parts.Attempt) -> Attempt:
    """An attempt as it is on record."""
    return Attempt.of(
        part, idempotency_key=part.key, rate_limited=part.limited, errors=errors(part.failure),
        settlement=None if part.settled is None else Settlement.of(part.settled),
    )  # fmt: skip


class Decision(Document, frozen=True):
    """A decision: its options, its choice, its author and its reason."""

    by: str
    question: Any = None
    options: Any = None
    choice: Any = None
    because: Any = None


class Edit(Document, frozen=True):
    """An edit of a step's arguments. `changed` has the old and the new value of each; a rejected edit has no effect."""

    at_us: int
    by: str
    accepted: bool
    rule: str | None
    arguments: Any = None
    changed: Any = None
    comment: Any = None


class Note(Document, frozen=True):
    """A note on a step."""

    at_us: int
    by: str
    note: Any = None


class Delay(Document, frozen=True):
    """The step was delayed, by a rate limit or because the previous holder might still be active."""

    at_us: int
    until_us: int
    because: str


class Drift(Document, frozen=True):
    """Later code made the same call with other arguments. The recorded result was kept."""

    at_us: int
    recorded: Any = None
    found: Any = None


class Deduplicated(Document, frozen=True):
    """The effect whose result was reused."""

    run: str
    idempotency_key: str
    seq: int


class Child(Document, frozen=True):
    """A run that a step started or waited for."""

    run: str
    agent: str = ""
    status: str | None = None


class Step(Document, frozen=True, tag_field="type", tag="step"):
    """A step with everything that the log has of it. Values are verbatim.

    arguments            the agent's arguments
    effective_arguments  the same after a person's edit
    seq                  the event that recorded the intention
    verdict              the contract's verdict; `last_verdict` the one after an approval request
    ended_by             the person who rejected or skipped it
    """

    run: str
    number: str
    kind: e.Sort
    name: str
    status: str
    stage: str | None
    effect: e.EffectClass | None
    seq: int
    started_at_us: int
    ended_at_us: int | None
    duration_seconds: float | None
    retry_at_us: int | None
    arguments: Any
    effective_arguments: Any
    because: Any
    output: Any
    errors: tuple[Error, ...]
    attempts: tuple[Attempt, ...]
    waits: tuple[Wait, ...]
    decision: Decision | None
    verdict: e.Verdict | None
    last_verdict: e.Verdict | None
    ended_by: str | None
    edits: tuple[Edit, ...]
    delays: tuple[Delay, ...]
    drifts: tuple[Drift, ...]
    notes: tuple[Note, ...]
    deduplicated: Deduplicated | None
    overridden_by: str | None
    override_reason: Any
    confirmed: bool | None
    undoes: str | None
    undone_by: str | None
    child: Child | None
    sent_to: str | None


def duration_us(part: parts.Step, now_us: int) -> int | None:
    """How long a step took, or has taken so far; None for a decision."""
    end = part.ended_at or (now_us if part.status in _OPEN else 0)
    return max(end - part.intended_at, 0) if end and part.sort != "decision" else None


def step_fields(run: str, part: parts.Step, now_us: int) -> dict[str, Any]:
    """The fields of a step that its type does not take over by name."""
    took, decision, adopted = duration_us(part, now_us), part.decision, part.adopted
    return {
        "run": run, "kind": part.sort, "started_at_us": part.intended_at,
        "duration_seconds": None if took is None else took / 1_000_000, "retry_at_us": part.delayed_until,
        "effective_arguments": part.given, "errors": errors(part.failure),
        "attempts": tuple(map(attempt, part.attempts)),
        "waits": tuple(recorded_wait(run, each) for each in part.waits),
        "decision": None if decision is None else Decision.of(decision, options=list(decision.options)),
        "edits": tuple(
            Edit.of(each, accepted=each.stands, rule=None if each.verdict is None else each.verdict.rule)
            for each in part.edits
        ),
        "delays": tuple(map(Delay.of, part.delays)), "drifts": tuple(map(Drift.of, part.drifts)),
        "notes": tuple(map(Note.of, part.notes)),
        "deduplicated": None if adopted is None else Deduplicated.of(adopted, idempotency_key=adopted.key),
        "override_reason": part.overriding.get("because"),
        "child": None if part.child is None else Child.of(part.child),
    }  # fmt: skip


# moments and events -------------------------------------------------------------------------------


class StepReference(Document, frozen=True):
    """A step that a rewind dropped."""

    number: str
    name: str
    status: str


class Moment(Document, frozen=True, tag_field="type", tag="moment"):
    """An event between steps. `text` is a line for people; `fields` and `data` are those of an event."""

    seq: int
    at_us: int
    kind: str
    text: str
    fields: Any
    data: Any
    rewound: tuple[StepReference, ...] = ()


def moment(part: parts.Moment) -> Moment:
    """An event between steps."""
    return Moment.of(
        part, text=str(moments.line(part, _TEXT)), fields=fields_of(msgspec.to_builtins(part.event)),
        rewound=tuple(map(StepReference.of, part.left)),
    )  # fmt: skip


class Event(Document, frozen=True):
    """A recorded event. `fields` is the event itself, `data` its values, `hash` its link of the chain."""

    run: str
    seq: int
    at_us: int
    kind: str
    hash: str
    erased: bool
    fields: Any
    data: Any


def event(log: Log, run: str, recorded: Recorded) -> Event:
    """An event with its values; None if they were erased."""
    seq, found, row = recorded
    data: Any = None
    with suppress(ValueErased):
        data = log.values(run, row)
    return Event(
        run=run, seq=seq, at_us=found.at, kind=str(type(found).__struct_config__.tag), hash=row.hash.hex(),
        erased=data is None, fields=fields_of(msgspec.json.decode(row.body)), data=data,
    )  # fmt: skip


def fields_of(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event as the log has them, without those that every event has."""
    return {name: value for name, value in body.items() if name not in _IN_THE_LOG}
