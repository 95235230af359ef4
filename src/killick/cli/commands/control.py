"""The commands `pause`, `resume` and `cancel`, on one run or on many, and `send` on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
from msgspec.structs import asdict
from rich.text import Text

from killick.cli.commands.inbox import refuse_ended
from killick.cli.commands.run import RunTarget, drive
from killick.cli.context import HOSTED, Shell, by_option, command, grace_option, run_argument, value_of, who_options
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.live_worker import claimed_by
from killick.cli.selection import Selection, select, selecting
from killick.engine import renewals
from killick.errors import RunBusy
from killick.history.phrasing import counted, process
from killick.model.facts import LIVE
from killick.presenting import previews
from killick.presenting.previews import CommandOutcome, RunPreview, Will
from killick.store.records import OWN_AGENTS


@dataclass(frozen=True)
class Act:
    """A command on one run: `plan` previews it, or raises why it is refused; `do` runs it, and returns the result."""

    verb: str
    usual: tuple[str, ...]
    plan: Callable[[RunPreview], Will]
    do: Callable[[str], str]


def _act(shell: Shell, act: Act, selection: Selection) -> Exit | None:
    """Give a command to every selected run, and report the outcome of each."""
    found = select(shell, selection, act.verb, act.usual)
    outcomes, dry_run = [_planned(shell, act, run.id) for run in found], selection.dry_run
    if not selection.is_named:
        outcomes = [plan for plan in outcomes if plan.refused is None or selection.status]
    if not outcomes:
        raise CommandFailed(f"nothing to {act.verb}: no run matches ({selection}); `killick ps` lists them")
    if not dry_run:
        named = ", ".join(plan.run for plan in outcomes[:3]) + (", …" if len(outcomes) > 3 else "")
        question = f"{act.verb} {counted(len(outcomes), 'run')} ({named})?"
        if not selection.is_named:
            shell.confirm(question, yes=selection.yes)
        outcomes = [_done(act, plan) for plan in outcomes]
    _report(shell, act, outcomes, dry_run=dry_run)
    return Exit.BAD if any(outcome.refused for outcome in outcomes) and not dry_run else None


def _planned(shell: Shell, act: Act, run: str) -> CommandOutcome:
    return previews.outcome(run, lambda: act.plan(RunPreview(shell.client, run)).will)


def _done(act: Act, planned: CommandOutcome) -> CommandOutcome:
    return planned if planned.refused is not None else previews.outcome(planned.run, lambda: act.do(planned.run))


def _report(shell: Shell, act: Act, outcomes: list[CommandOutcome], *, dry_run: bool) -> None:
    shell.emit([{**asdict(outcome), "dry_run": dry_run} for outcome in outcomes])
    wide = max(len(outcome.run) for outcome in outcomes)
    for outcome in outcomes:
        line = Text().append(f"{outcome.run:<{wide}}  ", style="bold cyan")
        if outcome.refused:
            line.append("refused: ", style="red").append(outcome.refused)
        else:
            line.append(outcome.done or "", style="green")
        shell.print(line)
    if dry_run and not shell.json:
        shell.note(f"nothing done; without --dry-run, {act.verb} does this")


# pause, cancel ------------------------------------------------------------------------------------


@command("pause")
@selecting
@who_options
def pause_command(shell: Shell, selection: Selection, **who: Any) -> Exit | None:
    """Stop runs at their next step, until they are resumed.

    \b
      killick pause claim_17 --because "the bank is closed"
      killick pause --agent review --status waiting --dry-run
    """

    def do(run: str) -> str:
        shell.client.pause(run, **who)
        return "paused, at its next step" if shell.is_held(run) else "paused"

    return _act(shell, Act("pause", LIVE[:4], previews.pause, do), selection)


@command("cancel")
@selecting
@click.option("--compensate", is_flag=True, help="Undo their effects, in reverse order.")
@who_options
def cancel_command(shell: Shell, selection: Selection, compensate: bool, **who: Any) -> Exit | None:
    """End runs. With --compensate their effects are undone, where the tools declare how.

    \b
      killick cancel claim_18 --compensate
      killick cancel --status paused --since 7d --dry-run
    """

    def do(run: str) -> str:
        shell.client.cancel(run, compensate=compensate, **who)
        if shell.is_held(run):
            return "cancelled, at its next step"
        return f"cancelled when it is run next: {shell.continues(run)}"

    return _act(shell, Act("cancel", LIVE, lambda run: previews.cancel(run, compensate), do), selection)


# resume -------------------------------------------------------------------------------------------


@command("resume", app=True)
@selecting
@grace_option
@who_options
def resume_command(shell: Shell, selection: Selection, grace: float, **who: Any) -> Exit | None:
    """Resume runs that are paused, failed, abandoned (their process died), quarantined or diverged from their code.

    A failed run is rewound to the step that failed. A live worker continues the runs. If none takes it, one named run
    is executed here, where its agent's code is found. Several runs, or --json, are only queued for workers.

    \b
      killick resume claim_16
      killick resume --failed --agent review --since 2d --dry-run
    """
    found: list[RunTarget] = []

    def do(run: str) -> str:
        said = shell.client.resume(run, **who)
        if shell.json or len(selection.runs) != 1:
            return f"{said}; to continue: {shell.continues(run)}"
        run_target, then = _continued(shell, run)
        found.extend(run_target)
        return f"{said}; {then}"

    act = Act("resume", ("paused", "failed", "running", "waiting", "code_mismatch"), previews.resume, do)
    code = _act(shell, act, selection)
    try:
        return drive(shell, found[0], grace) if found else code
    except RunBusy as busy:
        shell.note(f"{busy.run}: {process(busy.holder)} was faster, and continues it")
        return None


def _continued(shell: Shell, run: str) -> tuple[list[RunTarget], str]:
    """Where a resumed run continues: here, if no worker takes it and its agent's code is found. And that in words."""
    run = renewals.latest(shell.log, run)
    state = shell.log.state(run)
    if state.fold.facts.hosted:
        return [], f"to continue: {HOSTED}"
    if (holder := claimed_by(shell, run, state.agent)) is not None:
        return [], f"{process(holder)} continues it"
    why = "no live worker takes it"
    try:
        agent = None if state.agent.startswith(OWN_AGENTS) else shell.agent_of(state.agent)
    except CommandFailed as failed:
        agent, why = None, f"{why}, and {failed}"
    if agent is not None:
        return [RunTarget(agent, None, state.input, run)], "continues here"
    return [], f"queued: {why}; start one with the code of {state.agent}: {shell.worker_for(state.agent)}"


# send -------------------------------------------------------------------------------------------


@command("send", json=False)
@run_argument
@click.argument("name")
@click.argument("body", required=False)
@click.option("--id", "message", metavar="ID", help="The idempotency key: the same id again counts once.")
@by_option
def send_command(shell: Shell, run: str, name: str, body: str | None, message: str | None, by: str | None) -> None:
    """Send a run a message. The inbox keeps it until the run waits for its name. BODY is JSON, text, @FILE or -.

    \b
      killick message send claim_17 paid '{"amount": 80}'
    """
    refuse_ended(shell, run)
    shell.client.send(run, name, value_of(body), id=message, by=by)
    said = "the process that has the run takes it" if shell.is_held(run) else f"to continue: {shell.continues(run)}"
    shell.note(f"{run}: {name} sent; {said}")
