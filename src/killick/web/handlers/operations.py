"""Commands to runs. With `dry_run` each returns its preview and changes nothing.

The record has the caller's name. A command that the run's state rules out is refused with the next move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from killick.client.client import Client
from killick.definitions.agents import AGENTS
from killick.engine import renewals
from killick.engine.effects.fork import UNCHANGED, Conditions
from killick.engine.waits import waits
from killick.errors import KillickError
from killick.model.codec import plain
from killick.model.facts import OUT_OF_BAND
from killick.presenting import previews
from killick.presenting.previews import CommandOutcome, RunPreview, Will
from killick.web.forms import JsonSchema, unmasked
from killick.web.handlers.boundary import StepChoice, choices, own_steps
from killick.web.render import VALUE_CHARS
from killick.web.routes import Call, RunAsked, get, post

STEPS_MAX: Final = 50
MANY_MAX: Final = 500

Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
StepNumber = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="A step's number, as in `6`.")]
Place = Annotated[str, msgspec.Meta(min_length=1, max_length=100, description="`4:before`, `4:after`, `@17`, `start`.")]
Priority = Annotated[int, msgspec.Meta(ge=-1_000_000, le=1_000_000)]


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command: its recorded reason; and whether to return only a preview."""

    because: Text | None = None
    dry_run: bool = False


class CancelRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a run; with `compensate`, undo its effects."""

    compensate: bool = False


class SetRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Change entries of a run's context. `saw` is the version that the change rests on."""

    set: dict[str, Any] = {}
    unset: list[str] = []
    saw: Annotated[int, msgspec.Meta(ge=0)] | None = None


class PriorityRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a run another priority."""

    priority: Priority


class NoteRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A note on the record."""

    note: Any


class SayRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something to say to a run."""

    text: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)]


class StepRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step that is not over."""

    step: StepNumber


class OverrideRequest(StepRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give a step that is not over its result."""

    output: Any


class RetryRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """End a step's delay and retry it now; name the step if several are delayed."""

    step: StepNumber | None = None


class RewindRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Take a run back to a place in its time."""

    to: Place


class ForkRequest(CommandRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Let a new run leave this one at a place, under other conditions."""

    at: Place = "now"
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] | None = None
    output: dict[str, Any] = {}
    set: dict[str, Any] = {}
    unset: list[str] = []
    input: Any = msgspec.UNSET
    model: Name | None = None
    effects: Literal["recorded", "live", "none"] = "recorded"


class UndoRequest(StepRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Undo the effect of one step. `settled` gives the known outcome of an undo that is in doubt."""

    settled: Literal["happened", "not"] | None = None


class BulkRequest(CancelRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command for several runs."""

    runs: Annotated[list[Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]],
                    msgspec.Meta(min_length=1, max_length=MANY_MAX)]  # fmt: skip
    command: Literal["pause", "resume", "cancel"]


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command, or its preview. `made` is a run that it created."""

    run: str
    did: str | None = None
    will: str | None = None
    more: tuple[str, ...] = ()
    made: str | None = None


class BulkResults(msgspec.Struct, frozen=True, kw_only=True):
    """The result for each of several runs."""

    results: tuple[CommandOutcome, ...]
    done: int
    refused: int
    dry_run: bool


class AvailableCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command, and why it cannot be given now, where it cannot."""

    command: str
    why_not: str | None


class AvailableCommands(msgspec.Struct, frozen=True, kw_only=True):
    """A run's available commands. `steps` are its own, the last of them; `pending` are those that are not over,
    `undoable` those whose effects happened."""

    run: str
    goes_on_as: str | None
    agent: str
    status: str
    seq: int
    priority: int
    offers: tuple[AvailableCommand, ...]
    steps: tuple[StepChoice, ...]
    pending: tuple[StepChoice, ...]
    undoable: tuple[StepChoice, ...]
    awaits: tuple[str, ...]
    context: Any
    context_version: int
    context_schema: JsonSchema | None
    input: Any
    input_schema: JsonSchema | None


# available commands -------------------------------------------------------------------------------


def _is_small(value: Any) -> bool:
    """Whether a value is small enough for a form field."""
    return len(msgspec.json.encode(plain(value))) <= VALUE_CHARS


@get("/runs/{run}/act", page="act.html")
def acts(call: Call[RunAsked, Any]) -> AvailableCommands:
    """The commands that a run accepts now, and why it refuses the others."""
    run = RunPreview(call.client, call.asked.run)
    pending = [run.fold.steps[index] for index in list(run.facts.pending.values())[:STEPS_MAX]]
    steps = [step for step in pending if step.sort not in ("scope", "undo") and not step.id.startswith(OUT_OF_BAND)]
    effects = run.fold.effects
    last = [run.fold.steps[effects[n]] for n in range(max(len(effects) - STEPS_MAX, 0), len(effects))]
    undoable = [step for step in reversed(last) if step.status == "done" and not step.undone and not step.undoes]
    known = AGENTS.get(run.facts.agent) if run.facts.agent in AGENTS.names() else None
    context = run.state.context
    is_small = _is_small(context.document)
    return AvailableCommands(
        run=run.run, goes_on_as=run.run if run.run != call.asked.run else None, agent=run.facts.agent,
        status=run.status, seq=run.facts.seq, priority=run.facts.priority,
        offers=tuple(_offers(run, len(steps), any(step.status == "delayed" for step in steps), len(undoable))),
        steps=own_steps(run.fold), pending=choices(steps), undoable=choices(undoable),
        awaits=tuple(wait.name for wait in run.facts.waits.values() if wait.waits_for == "event"),
        context=context.document if is_small else None, context_version=context.version,
        context_schema=schema_of(known.options.context) if known is not None and is_small else None,
        input=given if _is_small(given := run.state.input) else None,
        input_schema=schema_of(known.input_type) if known is not None and known.takes_input else None,
    )  # fmt: skip


def schema_of(kind: Any) -> Any:
    """The JSON schema of a type; None where it has none."""
    if kind is None or kind is Any:
        return None
    try:
        return waits.schema_of(kind) or msgspec.json.schema(kind)
    except TypeError:
        return None


def _offers(run: RunPreview, pending: int, delayed: bool, undoable: int) -> list[AvailableCommand]:
    over = f"it is over ({run.status})" if run.is_over else None
    broken = "its event log fails verification; verify it, then repair it" if run.broken is not None else None
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
    offers = [AvailableCommand(command=name, why_not=broken or _why_not(run.run, each)) for name, each in tries.items()]
    return [*offers, *(AvailableCommand(command=name, why_not=why) for name, why in said.items())]


def _why_not(run: str, plan: Callable[[], Will]) -> str | None:
    try:
        plan()
    except KillickError as refused:
        return str(refused).removeprefix(f"{run}: ")
    return None


# commands -----------------------------------------------------------------------------------------

By = dict[str, str | None]
"""The name of the caller and the reason, for the record."""


@dataclass(frozen=True)
class Command:
    """A command to a run: its body, its preview, how it is carried out, and its outcome where that says none."""

    summary: str
    takes: type[CommandRequest]
    will: Callable[[RunPreview, Any], Will]
    do: Callable[[Client, str, Any, By], str | None]
    done: str = ""


COMMANDS: Final[dict[str, Command]] = {
    "pause": Command(
        "Stop a run at its next step, until it is resumed.", CommandRequest,
        lambda run, _: previews.pause(run), lambda client, run, _, by: client.pause(run, **by), "paused",
    ),
    "resume": Command(
        "Continue a paused, failed or abandoned run.", CommandRequest,
        lambda run, _: previews.resume(run), lambda client, run, _, by: client.resume(run, **by),
    ),
    "cancel": Command(
        "End a run; with `compensate`, undo its effects.", CancelRequest,
        lambda run, body: previews.cancel(run, body.compensate),
        lambda client, run, body, by: client.cancel(run, compensate=body.compensate, **by),
        "cancelled when it is run next",
    ),
    "set": Command(
        "Change entries of a run's context; its code sees the change when its next step returns.", SetRequest,
        lambda run, body: previews.change(run, body.set, body.unset, body.saw),
        lambda client, run, body, by: client.edit.set(run, saw=body.saw, unset=body.unset, **by, **body.set),
    ),
    "prioritize": Command(
        "Give a run another priority.", PriorityRequest, lambda run, body: previews.prioritize(run, body.priority),
        lambda client, run, body, by: client.edit.prioritize(run, body.priority, **by),
        "has the new priority from its next step on",
    ),
    "note": Command(
        "Add a note to a run's record.", NoteRequest, lambda run, _: previews.note(run),
        lambda client, run, body, by: client.edit.note(run, body.note, by=by["by"]), "noted",
    ),
    "say": Command(
        "Send a text to a run; its loop reads it before the next model call.", SayRequest,
        lambda run, body: previews.say(run, body.text),
        lambda client, run, body, by: client.say(run, body.text, by=by["by"]), "message sent",
    ),
    "override": Command(
        "Give a pending step its result, instead of executing it.", OverrideRequest,
        lambda run, body: previews.override(run, body.step, body.output),
        lambda client, run, body, by: client.edit.override(run, body.step, body.output, **by),
    ),
    "skip": Command(
        "End a pending step without executing it.", StepRequest, lambda run, body: previews.skip(run, body.step),
        lambda client, run, body, by: client.edit.skip(run, body.step, **by),
    ),
    "retry": Command(
        "Retry a step now that waits for a backoff or a rate limit.", RetryRequest,
        lambda run, body: previews.retry(run, body.step),
        lambda client, run, body, by: client.edit.retry(run, body.step, **by),
    ),
    "rewind": Command(
        "Rewind a run to a place in its history; its code runs again from there.", RewindRequest,
        lambda run, body: previews.rewind(run, body.to),
        lambda client, run, body, by: client.rewind(run, body.to, **by),
    ),
    "undo": Command(
        "Undo the effect of one step, and nothing else.", UndoRequest,
        lambda run, body: previews.undo(run.client.undoing(run.given, body.step), body.settled),
        lambda client, run, body, by: client.undo(run, body.step, settled=body.settled, **by),
    ),
}  # fmt: skip


def _declare(name: str, command: Command) -> None:
    """Declares the route of a command: it returns its preview, or carries it out. A refusal is the same either way."""

    def handler(call: Call[RunAsked, Any]) -> CommandResult:
        client, body = call.client, call.body
        run = RunPreview(client, call.asked.run)
        run.refuse_broken()
        if isinstance(body, SetRequest):
            body = msgspec.structs.replace(body, set=_shown(call, body.set))
        preview = command.will(run, body)
        if body.dry_run:
            return CommandResult(run=run.run, will=preview.will, more=preview.more)
        said = command.do(client, call.asked.run, body, {"by": call.person.name, "because": body.because})
        later = f"; {run.holder} has the run, and takes it at its next step" if command.done and run.holder else ""
        return CommandResult(run=run.run, did=f"{said or command.done}{later}")

    handler.__name__, handler.__doc__ = name, command.summary
    post(f"/runs/{{run}}/{name}", takes=command.takes)(handler)


for _name, _command in COMMANDS.items():
    _declare(_name, _command)


def _shown(call: Call[RunAsked, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a context, in which values that the page redacted are unchanged."""
    if not call.mask:
        return changes
    document: Any = call.client.state(renewals.latest(call.client.runtime.log, call.asked.run)).context.document
    shown: dict[str, Any] = unmasked(changes, document, "set")
    return shown


@post("/runs/{run}/fork")
def fork(call: Call[RunAsked, ForkRequest]) -> CommandResult:
    """Let a new run leave this one at a place in its time, under other conditions."""
    body, client, given = call.body, call.client, call.asked.run
    client.runtime.log.head(given)
    input_ = UNCHANGED if body.input is msgspec.UNSET else body.input
    output = body.output
    if call.mask:
        state = client.state(given)
        input_ = input_ if input_ is UNCHANGED else unmasked(input_, state.input, "input")
        known = {number: state.fold.step(number) for number in output}
        recorded = {number: state.output_of(step) for number, step in known.items() if step is not None and step.output}
        output = {n: unmasked(value, recorded[n], "output") if n in recorded else value for n, value in output.items()}
    conditions = Conditions(
        output=output, set=_shown(call, body.set), unset=tuple(body.unset), input=input_, model=body.model,
        effects=body.effects,
    )  # fmt: skip
    preview = previews.forked(RunPreview(client, given), body.at, body.id, conditions)
    if body.dry_run:
        return CommandResult(run=given, will=preview.will, more=preview.more)
    made = client.fork(
        given, body.at, id=body.id, output=conditions.output, set=conditions.set,
        unset=body.unset, input=input_, model=body.model, effects=body.effects, by=call.person.name,
        because=body.because,
    )  # fmt: skip
    return CommandResult(run=given, did=f"{made.id} leaves {given} at {body.at}", made=made.id)


# several at once ----------------------------------------------------------------------------------


@post("/runs/act")
def act(call: Call[Any, BulkRequest]) -> BulkResults:
    """Give one command to several runs; returns the result for each."""
    results = [_one(call, run) for run in dict.fromkeys(call.body.runs)]
    done = sum(each.refused is None for each in results)
    return BulkResults(results=tuple(results), done=done, refused=len(results) - done, dry_run=call.body.dry_run)


def _one(call: Call[Any, BulkRequest], run: str) -> CommandOutcome:
    body, command = call.body, COMMANDS[call.body.command]

    def does() -> str:
        preview = command.will(RunPreview(call.client, run), body)
        if body.dry_run:
            return preview.will
        return command.do(call.client, run, body, {"by": call.person.name, "because": body.because}) or command.done

    return previews.outcome(run, does)
