"""Acting on runs: every command that a person has. Each says first what it will do, where `dry_run` asks for that.

The name on record is the caller's. What cannot be done as things stand is refused, with the reason and the next move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec

from killick.definitions.agents import AGENTS
from killick.engine import renewals
from killick.engine.effects.fork import UNCHANGED, Conditions
from killick.engine.steps import waits
from killick.errors import KillickError
from killick.model.codec import plain
from killick.model.fold import OUT_OF_BAND
from killick.presenting import previews
from killick.presenting.previews import RunPreview, Will
from killick.web.forms import JsonSchema, unveiled
from killick.web.problems import Problem
from killick.web.render import VALUE_CHARS
from killick.web.routes import Call, get, post

STEPS_MAX: Final = 50
MANY_MAX: Final = 500

Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
StepNumber = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="A step's number, as in `6`.")]
Place = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="`4:before`, `4:after`, `@17`, `start`.")]
Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]


class RunAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A run, by its id."""

    run: Annotated[str, msgspec.Meta(min_length=1, max_length=1000, description="The run's id.")]


class Act(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command: why, for the record; and whether to say only what it would do."""

    because: Text | None = None
    dry_run: bool = False


class Cancel(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a run; with `compensate`, undo what it did."""

    compensate: bool = False


class Change(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change entries of a run's context. `saw` is the version that the change rests on."""

    set: dict[str, Any] = {}
    unset: list[str] = []
    saw: Annotated[int, msgspec.Meta(ge=0)] | None = None


class Prioritize(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a run another priority."""

    priority: Priority


class Note(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A remark for whoever reads the record."""

    note: Any


class OfStep(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that is not over."""

    step: StepNumber


class Override(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a step that is not over its result."""

    step: StepNumber
    output: Any


class Retry(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a step that sits out a delay go on; which, where several do."""

    step: StepNumber | None = None


class Rewind(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a run back to a place in its time."""

    to: Place


class Fork(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a new run leave this one at a place, under other conditions."""

    at: Place = "now"
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    output: dict[str, Any] = {}
    set: dict[str, Any] = {}
    unset: list[str] = []
    input: Any = msgspec.UNSET
    model: Name | None = None
    effects: Literal["recorded", "live", "none"] = "recorded"


class Undo(Act, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Undo the effect of one step. `settled` tells of an undoing that somebody knows the outcome of."""

    step: StepNumber
    settled: Literal["happened", "not"] | None = None


class Many(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command for several runs."""

    runs: Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]],
                    msgspec.Meta(min_length=1, max_length=MANY_MAX)]  # fmt: skip
    command: Literal["pause", "resume", "cancel", "prioritize"]
    because: Text | None = None
    compensate: bool = False
    priority: Priority | None = None
    dry_run: bool = False


class Did(msgspec.Struct, frozen=True, kw_only=True):
    """What was done; or what will be, where only that was asked. `made` is the run that came of it."""

    run: str
    did: str | None = None
    will: str | None = None
    more: tuple[str, ...] = ()
    made: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one run of several, in words."""

    run: str
    done: bool
    said: str


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """What became of each of several runs."""

    results: tuple[Result, ...]
    done: int
    refused: int
    dry_run: bool


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A command, and why it cannot be given now, where it cannot."""

    command: str
    why_not: str | None


class StepChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A step to act on."""

    step: str
    name: str
    status: str


class Acts(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done to a run now. `pending` are steps that are not over, `undoable` effects that happened."""

    run: str
    goes_on_as: str | None
    agent: str
    status: str
    seq: int
    priority: int
    offers: tuple[Offer, ...]
    pending: tuple[StepChoice, ...]
    undoable: tuple[StepChoice, ...]
    awaits: tuple[str, ...]
    context: Any
    context_version: int
    context_schema: JsonSchema | None
    input: Any
    input_schema: JsonSchema | None


# what can be done ---------------------------------------------------------------------------------


def _is_small(value: Any) -> bool:
    """Whether a value may be put into a form: nobody edits a document of that length in a field."""
    return len(msgspec.json.encode(plain(value))) <= VALUE_CHARS


def acts(call: Call[RunAsked, Any]) -> Acts:
    """What a person can do to a run now, and why the rest cannot be done."""
    run = RunPreview(call.client, call.asked.run)
    pending = [run.fold.steps[index] for index in list(run.facts.pending.values())[:STEPS_MAX]]
    steps = [step for step in pending if step.sort not in ("scope", "undo") and not step.id.startswith(OUT_OF_BAND)]
    effects = run.fold.effects
    last = [run.fold.steps[effects[n]] for n in range(max(len(effects) - STEPS_MAX, 0), len(effects))]
    undoable = [step for step in reversed(last) if step.status == "done" and not step.undone and not step.undoes]
    known = AGENTS.get(run.facts.agent) if run.facts.agent in AGENTS.names() else None
    context = run.state.context
    is_small = _is_small(context.document)
    return Acts(
        run=run.run,
        goes_on_as=run.run if run.run != call.asked.run else None,
        agent=run.facts.agent,
        status=run.status,
        seq=run.facts.seq,
        priority=run.facts.priority,
        offers=tuple(_offers(run, len(steps), any(step.status == "delayed" for step in steps), len(undoable))),
        pending=tuple(StepChoice(step=step.id, name=step.name, status=step.status) for step in steps),
        undoable=tuple(StepChoice(step=step.id, name=step.name, status=step.status) for step in undoable),
        awaits=tuple(wait.name for wait in run.facts.waits.values() if wait.waits_for == "event"),
        context=context.document if is_small else None,
        context_version=context.version,
        context_schema=schema_of(known.options.context) if known is not None and is_small else None,
        input=given if _is_small(given := run.state.input) else None,
        input_schema=schema_of(known.input_type) if known is not None and known.takes_input else None,
    )


def schema_of(kind: Any) -> Any:
    """The JSON schema of a type; None where it has none, or none can be told."""
    if kind is None or kind is Any:
        return None
    try:
        return waits.schema_of(kind) or msgspec.json.schema(kind)
    except TypeError:
        return None


def _offers(run: RunPreview, pending: int, delayed: bool, undoable: int) -> list[Offer]:
    over = f"it is over ({run.status})" if run.is_over else None
    broken = "its record does not hold; verify it, then repair it" if run.broken is not None else None
    if run.broken is not None:
        over = broken
    no_step = over or (None if pending else "no step is pending")
    tries: dict[str, Callable[[], Will]] = {
        "pause": lambda: previews.pause(run),
        "resume": lambda: previews.resume(run),
        "cancel": lambda: previews.cancel(run, False),
    }
    own = "it is a log of Killick's own" if run.facts.agent.startswith("killick.") else None
    said = {
        "set": over, "prioritize": over, "note": over, "say": over, "send": over, "override": no_step, "skip": no_step,
        "retry": over or (None if delayed else "no step sits out a delay"), "rewind": own or broken, "fork": own,
        "undo": None if undoable else "it has done nothing that could be undone",
    }  # fmt: skip
    offers = [Offer(command=name, why_not=broken or _why_not(run.run, each)) for name, each in tries.items()]
    return [*offers, *(Offer(command=name, why_not=why) for name, why in said.items())]


def _why_not(run: str, plan: Callable[[], Will]) -> str | None:
    try:
        plan()
    except KillickError as refused:
        return str(refused).removeprefix(f"{run}: ")
    return None


# commands -----------------------------------------------------------------------------------------


def _carried_out(
    call: Call[RunAsked, Any], will: Callable[[RunPreview], Will], do: Callable[[], str | None], done: str = ""
) -> Did:
    """Say what a command will do, or do it and say what it did. What is foretold as refused is refused either way."""
    run = RunPreview(call.client, call.asked.run)
    run.refuse_broken()
    told = will(run)
    if call.body.dry_run:
        return Did(run=run.run, will=told.will, more=told.more)
    said = do()
    later = f"; {run.holder} is at it and takes it up at its next step" if done and run.holder else ""
    return Did(run=run.run, did=f"{said or done}{later}")


def pause(call: Call[RunAsked, Act]) -> Did:
    """Stop a run at its next step, until somebody resumes it."""
    options = {"by": call.person.name, "because": call.body.because}
    return _carried_out(call, previews.pause, lambda: call.client.pause(call.asked.run, **options), "paused")


def resume(call: Call[RunAsked, Act]) -> Did:
    """Let a paused, failed or abandoned run go on."""
    options = {"by": call.person.name, "because": call.body.because}
    return _carried_out(call, previews.resume, lambda: call.client.resume(call.asked.run, **options))


def cancel(call: Call[RunAsked, Cancel]) -> Did:
    """End a run; with `compensate`, undo what it did."""
    body, by = call.body, call.person.name

    def do() -> None:
        call.client.cancel(call.asked.run, compensate=body.compensate, by=by, because=body.because)

    return _carried_out(call, lambda run: previews.cancel(run, body.compensate), do, "cancelled when it is run next")


def change(call: Call[RunAsked, Change]) -> Did:
    """Change entries of a run's context; its code sees that when its next step returns."""
    body, by = call.body, call.person.name
    changes = _shown(call, body.set)

    def will(run: RunPreview) -> Will:
        return previews.change(run, changes, body.unset, body.saw)

    def do() -> str:
        return call.client.set(
            call.asked.run, saw=body.saw, by=by, because=body.because, unset=body.unset, **changes
        )  # fmt: skip

    return _carried_out(call, will, do)


def _shown(call: Call[RunAsked, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a context, with what the page did not show as it was."""
    if call.context.veil is None or not call.context.veil.fields:
        return changes
    document: Any = call.client.state(renewals.latest(call.client.log, call.asked.run)).context.document
    shown: dict[str, Any] = unveiled(changes, document, "set")
    return shown


def prioritize(call: Call[RunAsked, Prioritize]) -> Did:
    """Give a run another priority."""
    body, by = call.body, call.person.name

    def do() -> None:
        call.client.prioritize(call.asked.run, body.priority, by=by, because=body.because)

    done = f"has priority {body.priority} from its next step on"
    return _carried_out(call, lambda run: previews.prioritize(run, body.priority), do, done)


def note(call: Call[RunAsked, Note]) -> Did:
    """Put a remark into a run's record."""
    body, by = call.body, call.person.name
    return _carried_out(call, previews.note, lambda: call.client.note(call.asked.run, body.note, by=by), "noted")


def override(call: Call[RunAsked, Override]) -> Did:
    """Give a step that is not over its result, instead of doing it."""
    body, by = call.body, call.person.name

    def do() -> str:
        return call.client.override(call.asked.run, body.step, body.output, by=by, because=body.because)

    return _carried_out(call, lambda run: previews.override(run, body.step, body.output), do)


def skip(call: Call[RunAsked, OfStep]) -> Did:
    """End a step that is not over, without doing it."""
    body, by = call.body, call.person.name

    def do() -> str:
        return call.client.skip(call.asked.run, body.step, by=by, because=body.because)

    return _carried_out(call, lambda run: previews.skip(run, body.step), do)


def retry(call: Call[RunAsked, Retry]) -> Did:
    """Let a step that sits out a backoff or a rate limit go on now."""
    body, by = call.body, call.person.name

    def do() -> str:
        return call.client.retry(call.asked.run, body.step, by=by, because=body.because)

    return _carried_out(call, lambda run: previews.retry(run, body.step), do)


def rewind(call: Call[RunAsked, Rewind]) -> Did:
    """Take a run back to a place in its time; from there its code runs again."""
    body, by = call.body, call.person.name

    def do() -> str:
        return call.client.rewind(call.asked.run, body.to, by=by, because=body.because)

    return _carried_out(call, lambda run: previews.rewind(run, body.to), do)


def fork(call: Call[RunAsked, Fork]) -> Did:
    """Let a new run leave this one at a place in its time, under other conditions."""
    body, client, given = call.body, call.client, call.asked.run
    client.log.head(given)
    input_ = UNCHANGED if body.input is msgspec.UNSET else body.input
    if input_ is not UNCHANGED and call.context.veil is not None and call.context.veil.fields:
        input_ = unveiled(input_, client.state(given).input, "input")
    conditions = Conditions(
        output=body.output, set=_shown(call, body.set), unset=tuple(body.unset), input=input_, model=body.model,
        effects=body.effects,
    )  # fmt: skip
    told = previews.forked(RunPreview(client, given), body.at, body.id, conditions)
    if body.dry_run:
        return Did(run=given, will=told.will, more=told.more)
    made = client.fork(
        given, body.at, id=body.id, output=conditions.output, set=conditions.set,
        unset=body.unset, input=input_, model=body.model, effects=body.effects, by=call.person.name,
        because=body.because,
    )  # fmt: skip
    return Did(run=given, did=f"{made.id} leaves {given} at {body.at}", made=made.id)


def undo(call: Call[RunAsked, Undo]) -> Did:
    """Undo the effect of one step, and nothing else."""
    body, client, run = call.body, call.client, call.asked.run
    told = previews.undo(client.undoing(run, body.step), body.settled)
    if body.dry_run:
        return Did(run=run, will=told.will, more=told.more)
    said = client.undo(run, body.step, by=call.person.name, because=body.because, settled=body.settled)
    return Did(run=run, did=said)


# several at once ----------------------------------------------------------------------------------


def many(call: Call[Any, Many]) -> Results:
    """Give one command to several runs; says of each what came of it."""
    body = call.body
    if body.command == "prioritize" and body.priority is None:
        raise Problem(422, "prioritize takes `priority`", code="body_refused")
    results = [_one(call, run) for run in dict.fromkeys(body.runs)]
    done = sum(each.done for each in results)
    return Results(results=tuple(results), done=done, refused=len(results) - done, dry_run=body.dry_run)


def _one(call: Call[Any, Many], run: str) -> Result:
    body, client, by, because = call.body, call.client, call.person.name, call.body.because
    try:
        standing = RunPreview(client, run)
        do: Callable[[], str | None]
        if body.command == "pause":
            told, do = previews.pause(standing), partial(client.pause, run, by=by, because=because)
        elif body.command == "resume":
            told, do = previews.resume(standing), partial(client.resume, run, by=by, because=because)
        elif body.command == "cancel":
            told = previews.cancel(standing, body.compensate)
            do = partial(client.cancel, run, compensate=body.compensate, by=by, because=because)
        else:
            told = previews.prioritize(standing, body.priority or 0)
            do = partial(client.prioritize, run, body.priority or 0, by=by, because=because)
        said = told.will if body.dry_run else do() or _DONE[body.command]
        return Result(run=run, done=True, said=said)
    except KillickError as refused:
        return Result(run=run, done=False, said=str(refused).removeprefix(f"{run}: "))


_DONE: Final = {"pause": "paused", "cancel": "cancelled when it is run next", "prioritize": "prioritized"}

ROUTES: Final = (
    get("/runs/{run}/act", acts, asks=RunAsked, gives=Acts, page="act.html"),
    post("/runs/{run}/pause", pause, asks=RunAsked, takes=Act, gives=Did),
    post("/runs/{run}/resume", resume, asks=RunAsked, takes=Act, gives=Did),
    post("/runs/{run}/cancel", cancel, asks=RunAsked, takes=Cancel, gives=Did),
    post("/runs/{run}/set", change, asks=RunAsked, takes=Change, gives=Did),
    post("/runs/{run}/prioritize", prioritize, asks=RunAsked, takes=Prioritize, gives=Did),
    post("/runs/{run}/note", note, asks=RunAsked, takes=Note, gives=Did),
    post("/runs/{run}/override", override, asks=RunAsked, takes=Override, gives=Did),
    post("/runs/{run}/skip", skip, asks=RunAsked, takes=OfStep, gives=Did),
    post("/runs/{run}/retry", retry, asks=RunAsked, takes=Retry, gives=Did),
    post("/runs/{run}/rewind", rewind, asks=RunAsked, takes=Rewind, gives=Did),
    post("/runs/{run}/fork", fork, asks=RunAsked, takes=Fork, gives=Did),
    post("/runs/{run}/undo", undo, asks=RunAsked, takes=Undo, gives=Did),
    post("/runs/act", many, takes=Many, gives=Results),
)
