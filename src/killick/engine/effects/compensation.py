"""Compensation: undoes all effects of a run, or one, each under a key of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from killick.definitions.policy import Effect, Policy
from killick.definitions.tools import TOOLS, AnyTool, Shape, Tool
from killick.engine.control.interventions import refuse_model
from killick.engine.effects.reconcile import ask_person
from killick.engine.effects.run_tree import effect_to_undo
from killick.engine.execution import Branch, Execution
from killick.engine.replay import OVER
from killick.engine.steps.intention import Intent
from killick.engine.steps.pipeline import execute_step, recorded_failure
from killick.engine.steps.workspace_hook import reverting
from killick.errors import StepFailed, TimeRefused
from killick.log.writer import Entry
from killick.model import events as e
from killick.model import ledger
from killick.model.facts import OUT_OF_BAND, Step
from killick.model.failure import Failure
from killick.model.hashing import is_key_of
from killick.model.typed import convert


async def compensate(ex: Execution, branch: Branch) -> list[str]:
    """Undoes effects, the last first. Returns those that could not be undone."""
    left: list[str] = []
    await ex.barrier()
    if ex.files is not None:
        await ex.files.restore_due()
    doubted = ("happened", "undone", "in_doubt", "open")
    # A fork undoes neither effects that it shares with its parent nor those under another run's key.
    did = [each for each in ex.log.ledger.effects if each.started > ex.log.base and each.tool != ledger.SENDING]
    own = [each for each in did if not each.undoes and is_key_of(each.key, ex.run_id)]
    for effect in reversed([each for each in own if each.status in doubted]):
        tool = TOOLS.get(effect.tool)
        if effect.status == "undone" and effect.started not in ex.record.undoing:
            continue
        if tool is None or compensation(ex, tool, effect) is None or not await _undone(ex, branch, tool, effect):
            left.append(f"{effect.tool} at step {effect.step}")
    return left + [f"child {child.run}" for child in ex.log.ledger.children if _has_effects(ex, child)]


def _has_effects(ex: Execution, child: ledger.Child) -> bool:
    """Whether a child completed with effects, which are its own and stay."""
    row = ex.engine.log.store.index(child.run)
    if row is None or row.status != "completed" or child.on_parent_end == "abandon":
        return False
    effects = ex.engine.log.ledger(child.run).effects
    return any(effect.status == "happened" and not effect.undoes for effect in effects)


def compensation(ex: Execution, tool: AnyTool, effect: ledger.Effect) -> Callable[..., Any] | None:
    """The compensation of an effect, by its tool; files are restored."""
    if tool.policy.compensate is None and effect.effect == "workspace":
        return reverting(ex)
    return tool.policy.compensate


def _undoing(ex: Execution, tool: AnyTool, effect: ledger.Effect, step: e.StepId) -> Intent:
    """The intention to undo an effect, under a key of its own."""
    undo = compensation(ex, tool, effect)
    assert undo is not None
    fn = undo.fn if isinstance(undo, Tool) else undo
    # Files that went back, or half of them, go back again as well.
    by_itself = Policy(effect="idempotent") if effect.effect == "workspace" else Policy()
    policy: Policy = undo.policy if isinstance(undo, Tool) else by_itself
    shape = Shape(fn, tool.name)
    arguments = {next(iter(shape.hints), "effect"): _input_of(ex, tool, effect)}
    key = {"key": effect.key}
    return Intent(
        "undo", tool.name, fn, shape, arguments, policy, given=key, recording=key, undoes=(step, effect.started)
    )


async def _undone(ex: Execution, branch: Branch, tool: AnyTool, effect: ledger.Effect) -> bool:
    """One effect through its own compensation, as a step like any other."""
    intent = _undoing(ex, tool, effect, effect.step)
    step = _again(branch, ex.record.undoing.get(effect.started))
    past = ex.record.steps.get(step)
    try:
        if past is None or past.status not in OVER:
            await execute_step(ex, branch, intent, step)
        elif past.status != "done":
            data = ex.record.data(past.output) if past.output else {}
            raise StepFailed(step, tool.name, recorded_failure(ex, past, data))
    except StepFailed as failed:
        return await _ask_person(ex, branch, step, tool, effect, failed)
    return True


async def undo(
    ex: Execution, branch: Branch, step: e.StepId, *, by: str | None, because: str | None, settled: str | None
) -> str:
    """Undo one effect of the current timeline; returns the outcome.

    `settled` is a person's word: the outcome of a compensation in doubt, or that they undid the effect by hand.
    """
    if settled is not None:
        refuse_model(ex.log.fold.facts, by, "settle", also="only a person finds out whether it happened")
    if ex.files is not None:
        await ex.files.restore_due()
    effect = effect_to_undo(ex.engine.log, ex.run_id, step)
    tool = TOOLS.get(effect.tool)
    begun = ex.record.undoing_beside.get(effect.started)
    past = ex.record.steps.get(begun) if begun is not None else None
    past = past if past is not None and past.status not in OVER else None
    if past is not None and past.attempts and settled is not None:
        return _settled_undo(ex, past, effect, settled, by, because)
    if past is None and settled == "happened":
        return _undone_by_hand(ex, branch, effect, step, by, because)
    if tool is None or compensation(ex, tool, effect) is None:
        why = "is not known here; load the app" if tool is None else "has no compensate; undo it by hand"
        raise TimeRefused(ex.run_id, f"step {step}: {effect.tool} {why}, and say so with settled='happened'")
    if past is not None and past.status == "in_doubt":
        raise TimeRefused(ex.run_id, f"undoing step {step}: its outcome is not known; say settled='happened' or 'not'")
    if because:
        note = e.NoteMade(at=ex.now_us(), step=step, by=by or "a person")
        ex.write_behind(Entry(note, {"note": f"undone: {because}"}))
    intent = _undoing(ex, tool, effect, step)
    try:
        await execute_step(ex, branch, intent, past.id if past is not None else None)
    except StepFailed as failed:
        raise TimeRefused(ex.run_id, f"step {step}: {effect.tool} could not be undone: {failed.failure}") from None
    return f"undid step {step}, {effect.tool}"


def _settled_undo(
    ex: Execution, past: Step, effect: ledger.Effect, settled: str, by: str | None, because: str | None
) -> str:
    started: e.Started = ex.record.event(past.attempts[-1].started)
    event = e.AttemptSettled(
        at=ex.now_us(), step=past.id, attempt=len(past.attempts), key=started.key,
        settlement="happened" if settled == "happened" else "did_not_happen", by=by,
    )  # fmt: skip
    ex.write_behind(Entry(event, {"because": because} if because else None))
    if settled == "happened":
        return f"step {effect.step}, {effect.tool}, is undone"
    return f"undoing step {effect.step}, {effect.tool}, did not happen; undo it again"


def _undone_by_hand(
    ex: Execution, branch: Branch, effect: ledger.Effect, step: e.StepId, by: str | None, because: str | None
) -> str:
    """A person undid it by hand."""
    now, at = ex.now_us(), branch.number()
    intended = e.StepIntended(
        at=now, step=at, sort="undo", name=effect.tool, effect=effect.effect, undoes=step,
        undoes_seq=effect.started,
    )  # fmt: skip
    overridden = e.StepOverridden(at=now, step=at, by=by or "a person")
    ex.write_behind(Entry(intended), Entry(overridden, {"output": None, **({"because": because} if because else {})}))
    return f"step {step}, {effect.tool}, is undone by hand"


def out_of_band(ex: Execution) -> Branch:
    """The branch of the steps that a person takes, apart from those of the agent's code."""
    return Branch(ex, path=OUT_OF_BAND[:-1], count=len(ex.log.fold.facts.beside))


def _again(branch: Branch, step: e.StepId | None) -> e.StepId:
    """A step of an earlier process, or the next number; either way later numbers come after it."""
    if step is None:
        return branch.number()
    branch.count = max(branch.count, int(step))
    return step


async def _ask_person(
    ex: Execution, branch: Branch, step: e.StepId, tool: AnyTool, effect: ledger.Effect, failed: StepFailed
) -> bool:
    """Asks a person about an effect that could not be undone: it was undone by hand, or stays."""
    if failed.is_a("killick.Stopped"):
        return False
    name = f"undo {step}"
    past = next((each for each in ex.record.steps.values() if each.sort == "wait" and each.name == name), None)
    at = _again(branch, past.id if past is not None else None)
    if past is not None and past.status in OVER:
        return bool(ex.record.data(past.output)["answer"]["kind"] == "happened")
    prompt = f"{tool.name} could not be undone ({failed.failure}). Undo it by hand and say so, or leave it."
    intended = e.StepIntended(at=ex.now_us(), step=at, sort="wait", name=name)
    before = [] if past is not None else [Entry(intended, {"arguments": {"step": step}})]
    closed = await ask_person(
        ex, at, "settlement", prompt, intention={"tool": tool.name, "step": step, "key": effect.key},
        verbs=("happened", "stop"), before=before,
    )  # fmt: skip
    if closed.answer["kind"] != "happened":
        return False
    _undone_by_hand(ex, out_of_band(ex), effect, effect.step, closed.by, closed.comment)
    return True


def _input_of(ex: Execution, tool: AnyTool, effect: ledger.Effect) -> Effect:
    """The input of a compensation: the arguments and, where recorded, result, progress and failure."""
    log = ex.engine.log
    arguments = log.data(ex.run_id, effect.intended).get("arguments", {})
    data = log.data(ex.run_id, effect.ended) if effect.ended else {}
    failure = data.get("failure") if effect.status == "in_doubt" else None
    progress = ex.progress.get(effect.step)
    if progress is None and (progressed := ex.record.of(effect.step, e.AttemptProgressed)):
        progress = log.data(ex.run_id, progressed[-1][0]).get("progress")
    result, returns = data.get("output"), tool.shape.returns
    return Effect(
        tool=tool.name, step=effect.step, key=effect.key, arguments=tool.shape.restore(arguments, arguments),
        result=convert(result, returns, at="result") if "output" in data and returns is not Any else result,
        progress=progress, failure=None if failure is None else convert(failure, Failure, at="failure"),
    )  # fmt: skip
