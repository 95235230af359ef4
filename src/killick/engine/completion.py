"""The end of a run: its open children and effects, and the last event."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, NoReturn

from killick.definitions.agents import AGENTS
from killick.definitions.tools import TOOLS
from killick.engine.control import commands
from killick.engine.control.commands import command
from killick.engine.control.inbox import ANSWER, CHILD, COMMAND, VOTE, child_id, delivery
from killick.engine.divergence import diverge
from killick.engine.effects import compensation as undoing
from killick.engine.effects import reconcile
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.observers import trace_here
from killick.engine.renewals import latest
from killick.engine.replay import OVER
from killick.engine.signals import Renewed
from killick.engine.steps import permits
from killick.engine.steps.children import Child, child_result, first_entries
from killick.engine.steps.intention import Intent
from killick.engine.steps.step_execution import StepExecution
from killick.engine.waits.waits import child_outcome
from killick.errors import AnswerRefused, KillickError, StepFailed, StoreError
from killick.log.slots import RENEWS, root_of
from killick.log.writer import Entry
from killick.model import event_codec, ledger
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.store.records import Delivery

_REQUESTED: Final = b'{"kind":"cancel.requested"'


async def finish(ex: Execution, branch: Branch, result: Any, error: BaseException | None) -> None:
    """End the run: children, compensation, and the last event, durable before the caller gets the outcome."""
    if error is None:
        await _await_children(ex, branch)
        _refuse_early_end(ex, branch, "its end")
        await _cancel_children(ex, branch, compensate=False)
        ex.result = result
        await _end(ex, Entry(e.RunCompleted(at=ex.now_us()), {"result": result}))
        return
    failure = describe(error)
    _refuse_early_end(ex, branch, f"an error ({failure})")
    compensates = ex.agent.options.on_failure == "compensate"
    await _cancel_children(ex, branch, compensate=compensates)
    values = {"failure": failure, **(await _compensated(ex, branch) if compensates else {})}
    step = error.step if isinstance(error, StepFailed) else None
    await _end(ex, Entry(e.RunFailed(at=ex.now_us(), step=step), values))


async def _end(ex: Execution, last: Entry) -> None:
    """The last event, and with it the messages that wake the parent and the runs of its tree, which may wait for the
    same child."""
    log, forks, parent = ex.engine.log, ex.engine.forks, ex.log.fold.facts.parent
    message, at = child_id(ex.run_id, ex.log.seq + 1), ex.now_us()
    try:
        runs = forks.members(parent) if parent else []
    except StoreError as error:
        raise ex.interrupted(error) from error

    def wakes(runs: list[str]) -> tuple[Delivery, ...]:
        return tuple(delivery(log, run, CHILD, None, id=message, by=ex.run_id, at_us=at) for run in runs)

    left = permits.left(ex.log, at)
    refusals, taken, read = commands.overtaken(ex, last.event, COMMAND, ANSWER, VOTE)
    releases, sends = left.get("releases", ()), (*wakes(runs), *left.get("sends", ()))
    await ex.write(*refusals, last, takes=taken, releases=releases, sends=sends, inbox_read=read)
    with suppress(StoreError):  # a fork that was made meanwhile looked before this run had ended
        if parent and (late := [run for run in forks.members(parent) if run not in runs]):
            log.store.deliver(wakes(late))


async def renew(ex: Execution, branch: Branch, input: Any) -> NoReturn:  # noqa: A002
    """Close the log and continue in a fresh one, in one write. The store moves untaken messages along."""
    if branch.scope is not None:
        raise KillickError(f"{ex.run_id}: run.renew ends the whole run's log; use it outside of run.gather")
    agent, log, facts = ex.agent, ex.engine.log, ex.log.fold.facts
    input = agent.checked(through_codec(input, at="input"))  # noqa: A001
    _refuse_early_end(ex, branch, "a renewal")
    await ex.await_turn()
    await _await_children(ex, branch)
    await _cancel_children(ex, branch, compensate=False)
    successor = _successor(ex)
    marked = RENEWS + root_of(ex.run_id, facts.tags)
    tags = (*(tag for tag in facts.tags if tag != marked), marked)
    started = e.RunStarted(
        at=ex.now_us(), run=successor, agent=facts.agent, build=ex.engine.build(agent), priority=facts.priority,
        tags=tags, parent=facts.parent, parent_step=facts.parent_step, follows=ex.run_id, trace=trace_here(),
        starters=facts.starters,
    )  # fmt: skip
    born = log.begin(successor).built(first_entries(started, agent, input, document=ex.context.saved()))
    left = permits.left(ex.log, ex.now_us())
    last = Entry(e.RunRenewed(at=ex.now_us(), run=successor), {"input": input})
    refusals, taken, read = commands.overtaken(ex, last.event, ANSWER, VOTE)
    releases, sends = left.get("releases", ()), left.get("sends", ())
    await ex.write(*refusals, last, takes=taken, also=(born,), releases=releases, sends=sends, inbox_read=read)
    signal = Renewed()
    ex.close(signal)
    raise signal


def _successor(ex: Execution) -> str:
    """The id of the run that continues this one: `name`, `name+2`, `name+3` …"""
    root = root_of(ex.run_id, ex.log.fold.facts.tags)
    count = 1 if ex.run_id == root else int(ex.run_id.removeprefix(f"{root}+"))
    while True:
        count += 1
        if ex.engine.log.store.head(f"{root}+{count}") is None:
            return f"{root}+{count}"


def _refuse_early_end(ex: Execution, branch: Branch, found: str) -> None:
    """Code that ends before its record does has diverged, unless only compensation follows."""
    nothing_undone = not ex.record.undoing
    if ex.record.has_more(branch.path, branch.count) and nothing_undone:
        step = ex.record.steps.get(branch.position)
        if step is not None and step.sort == "wait" and any(step.name == child.run for child in ex.log.ledger.children):
            return
        diverge(ex, branch.position, f"{step.sort} {step.name}" if step is not None else "more steps", found)


def _own_children(ex: Execution, policy: str) -> list[ledger.Child]:
    """The children of a policy at the run's end; those that a fork shares with its parent are the parent's."""
    return [each for each in ex.log.ledger.children if each.spawned > ex.log.base and each.on_parent_end == policy]


async def _await_children(ex: Execution, branch: Branch) -> None:
    """Children that the run waits for when it ends."""
    for child in _own_children(ex, "wait"):
        await _until_ended(ex, branch, child)


async def _cancel_children(ex: Execution, branch: Branch, *, compensate: bool) -> None:
    """Children that end with the run; those whose effects are to be undone are waited for."""
    for child in _own_children(ex, "cancel"):
        if child.status == "running" and child_outcome(ex.engine.log, child.run) is None:
            run, body = latest(ex.engine.log, child.run), {"command": "cancel", "compensate": compensate}
            with suppress(AnswerRefused):  # it is over meanwhile
                command(ex.engine, run, body, by=ex.run_id)
            ex.on_message(child.run)
            ex.on_child(ex, child.run)
        if compensate:
            await _until_ended(ex, branch, child)


async def _until_ended(ex: Execution, branch: Branch, child: ledger.Child) -> None:
    """Wait for the end of a child, whatever its outcome. One that had ended before is waited for again only if the
    record has that wait here: the steps of a compensation come after it."""
    past = ex.record.steps.get(branch.position)
    if child.status == "running" or (past is not None and past.name == child.run):
        with suppress(StepFailed):
            await child_result(ex, branch, Child(None, child.run, AGENTS.get(child.agent)))


async def cancel(ex: Execution, branch: Branch) -> None:
    """Carry out a cancellation: cancel children, settle open attempts, then compensate in reverse order."""
    compensate = _compensates(ex)
    _close_waits(ex, keep_settlements=compensate)
    await _cancel_children(ex, branch, compensate=compensate)
    values: dict[str, Any] = {}
    if compensate:
        await _settle_open(ex, branch)
        values = await _compensated(ex, branch)
    await _end(ex, Entry(e.RunCancelled(at=ex.now_us()), values))


async def _compensated(ex: Execution, branch: Branch) -> dict[str, Any]:
    """Undo the effects of the run; returns those that could not be undone, for the record."""
    not_undone = await undoing.compensate(ex, branch)
    return {"not_undone": not_undone} if not_undone else {}


def _close_waits(ex: Execution, *, keep_settlements: bool) -> None:
    """Close the open waits of the run, except those that compensation needs."""
    undoing = {step.id for step in ex.record.steps.values() if step.name.startswith("undo ") or step.sort == "undo"}
    for wait in list(ex.log.fold.facts.waits.values()):
        if wait.step in undoing or (keep_settlements and wait.waits_for == "settlement"):
            continue
        ex.write_behind(ex.wait_closed(wait.step, "cancelled"))


def _compensates(ex: Execution) -> bool:
    """Whether the effects are to be undone, by the last request to cancel the run."""
    rows = (row for row in reversed(ex.engine.log.rows(ex.run_id)) if row.body.startswith(_REQUESTED))
    requested: Any = event_codec.decode(next(rows).body)
    return bool(requested.compensate)


async def _settle_open(ex: Execution, branch: Branch) -> None:
    """Settle the attempts in doubt before anything is undone."""
    for past in list(ex.record.steps.values()):
        tool = TOOLS.get(past.name)
        doubtful = past.sort == "tool" and past.attempts and past.effect in ("at_most_once", "transaction")
        if past.status in OVER or not doubtful or tool is None:
            continue
        arguments = ex.record.data(past.intended)["arguments"]
        intent = Intent(
            "tool", tool.name, tool.fn, tool.shape, tool.shape.restore(arguments, arguments), tool.policy,
            returns=tool.shape.returns, recording=arguments,
        )  # fmt: skip
        attempting = StepExecution(ex, branch, past.id, intent, past)
        if attempting.is_open:
            with suppress(StepFailed):
                await reconcile.settle(attempting, ex.engine.live.work_of(ex.run_id, past.id))
