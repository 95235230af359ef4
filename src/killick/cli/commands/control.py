"""The commands `pause`, `resume` and `cancel`, on one run or on many, and `send` on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import click
from rich.text import Text

from killick.cli.commands.inbox import refuse_deaf
from killick.cli.context import Shell, because_option, by_option, command, run_argument, value_of
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.selection import Selection, select, selecting
from killick.engine.views import Listed
from killick.errors import KillickError
from killick.history.phrasing import counted
from killick.model.facts import LIVE
from killick.presenting import previews
from killick.presenting.previews import RunPreview, Will
from killick.store import protocol as store


@dataclass(frozen=True)
class Act:
    """A command on one run: `plan` previews it, or raises why it is refused; `do` gives it, and returns what it did."""

    verb: str
    usual: tuple[str, ...]
    plan: Callable[[RunPreview], Will]
    do: Callable[[str], str]


class Outcome(NamedTuple):
    """What became of one run."""

    run: str
    status: str
    done: str | None = None
    refused: str | None = None


def _act(shell: Shell, act: Act, selection: Selection, *, dry_run: bool, yes: bool) -> Exit | None:
    """Give a command to every selected run, and report the outcome of each."""
    found = select(shell, selection, act.verb, act.usual)
    planned = [(run, _planned(shell, act, run)) for run in found]
    if not selection.is_named:
        planned = [(run, plan) for run, plan in planned if plan.refused is None or selection.status]
    if not planned:
        raise CommandFailed(f"nothing to {act.verb}: no run matches ({selection}); `killick ps` lists them")
    outcomes = [plan for _, plan in planned]
    if not dry_run:
        named = ", ".join(run.id for run, _ in planned[:3]) + (", …" if len(planned) > 3 else "")
        question = f"{act.verb} {counted(len(planned), 'run')} ({named})?"
        if not selection.is_named and not shell.confirm(question, yes=yes):
            raise CommandFailed("nothing done", Exit.BAD)
        outcomes = [_done(act, plan) for plan in outcomes]
    _report(shell, act, outcomes, dry_run=dry_run)
    return Exit.BAD if any(outcome.refused for outcome in outcomes) and not dry_run else None


def _planned(shell: Shell, act: Act, run: Listed) -> Outcome:
    try:
        will = act.plan(RunPreview(shell.client, run.id)).will
        return Outcome(run.id, run.status, done=will.removeprefix(f"{run.id} "))
    except KillickError as error:
        return Outcome(run.id, run.status, refused=str(error).removeprefix(f"{run.id}: "))


def _done(act: Act, planned: Outcome) -> Outcome:
    if planned.refused is not None:
        return planned
    try:
        return planned._replace(done=act.do(planned.run))
    except KillickError as error:
        return planned._replace(done=None, refused=str(error).removeprefix(f"{planned.run}: "))


def _report(shell: Shell, act: Act, outcomes: list[Outcome], *, dry_run: bool) -> None:
    if shell.json:
        shell.emit([{**outcome._asdict(), "dry_run": dry_run} for outcome in outcomes])
        return
    wide = max(len(outcome.run) for outcome in outcomes)
    for outcome in outcomes:
        line = Text().append(f"{outcome.run:<{wide}}  ", style="bold cyan")
        if outcome.refused:
            line.append("refused: ", style="red").append(outcome.refused)
        else:
            line.append(outcome.done or "", style="green")
        shell.out.print(line, soft_wrap=True)
    if dry_run:
        shell.note(f"nothing done; without --dry-run, {act.verb} does this")


# pause, cancel ------------------------------------------------------------------------------------


@command("pause")
@selecting
@because_option
@by_option
def pause_command(
    shell: Shell, selection: Selection, dry_run: bool, yes: bool, because: str | None, by: str | None
) -> Exit | None:
    """Stop runs at their next step, until they are resumed.

    \b
      killick pause claim_17 --because "the bank is closed"
      killick pause --agent review --waiting --dry-run
    """

    def do(run: str) -> str:
        shell.client.pause(run, because=because, by=by)
        return "paused, at its next step" if is_held(shell, run) else "paused"

    return _act(shell, Act("pause", LIVE[:4], previews.pause, do), selection, dry_run=dry_run, yes=yes)


@command("cancel")
@selecting
@click.option("--compensate", is_flag=True, help="Undo their effects, in reverse order.")
@because_option
@by_option
def cancel_command(
    shell: Shell,
    selection: Selection,
    dry_run: bool,
    yes: bool,
    compensate: bool,
    because: str | None,
    by: str | None,
) -> Exit | None:
    """End runs. With --compensate their effects are undone, where the tools declare how.

    \b
      killick cancel claim_18 --compensate
      killick cancel --paused --since 7d --dry-run
    """

    def do(run: str) -> str:
        shell.client.cancel(run, compensate=compensate, because=because, by=by)
        if is_held(shell, run):
            return "cancelled, at its next step"
        return f"cancelled when it is run next: {shell.continues(run)}"

    return _act(
        shell,
        Act("cancel", LIVE, lambda run: previews.cancel(run, compensate), do),
        selection,
        dry_run=dry_run,
        yes=yes,
    )


def is_held(shell: Shell, run: str) -> bool:
    """Whether a process has the run leased."""
    head = shell.store.head(run)
    return head is not None and store.is_held(shell.store, head)


# resume -------------------------------------------------------------------------------------------


@command("resume", app=True)
@selecting
@because_option
@by_option
def resume_command(
    shell: Shell, selection: Selection, dry_run: bool, yes: bool, because: str | None, by: str | None
) -> Exit | None:
    """Resume runs that are paused, failed, abandoned (their process died), quarantined or diverged from their code.

    Prints what it did to each. A failed run is rewound to the step that failed.

    \b
      killick resume claim_16
      killick resume --failed --agent review --since 2d --dry-run
    """

    def do(run: str) -> str:
        said = shell.client.resume(run, because=because, by=by)
        return f"{said}; to continue: {shell.continues(run)}"

    act = Act("resume", ("paused", "failed", "running", "waiting", "code_mismatch"), previews.resume, do)
    return _act(shell, act, selection, dry_run=dry_run, yes=yes)


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
    refuse_deaf(shell, shell.run(run))
    shell.client.send(run, name, value_of(body), id=message, by=by)
    said = "the process that has the run takes it" if is_held(shell, run) else f"to continue: {shell.continues(run)}"
    shell.note(f"{run}: {name} sent; {said}")
