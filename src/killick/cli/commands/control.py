"""The commands that act on runs: `pause`, `resume`, `cancel` on one or on many, `send` on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import click
from rich.text import Text

from killick.cli.commands.inbox import refuse_deaf
from killick.cli.context import Shell, command, run_argument, somebody, value_of
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.selection import Selection, select, selecting
from killick.engine.views import Listed
from killick.errors import KillickError
from killick.model import events as e
from killick.store import protocol as store
from killick.store.protocol import ENDED

LIVE: Final = ("queued", "running", "waiting", "paused")


class Act(NamedTuple):
    """What a command does to one run. `plan` says it in advance, or raises Told; `do` does it and says what it did."""

    verb: str
    usual: tuple[str, ...]
    plan: Callable[[Listed], str]
    do: Callable[[str], str]


class Outcome(NamedTuple):
    """What became of one run."""

    run: str
    status: str
    done: str | None = None
    refused: str | None = None


because_option: Final = click.option("--because", metavar="TEXT", help="Why, for the record.")
by_option: Final = click.option("--by", metavar="WHO", help="Who does it, for the record.  [default: you]")


def _act(shell: Shell, act: Act, selection: Selection, *, dry_run: bool, yes: bool) -> Exit | None:
    """Do it to every run that was meant, and say of each what came of it."""
    found = select(shell, selection, act.verb, act.usual)
    planned: list[tuple[Listed, str | CommandFailed]] = [(run, _planned(act, run)) for run in found]
    if not selection.is_named:
        planned = [(run, plan) for run, plan in planned if isinstance(plan, str) or selection.status]
    if not planned:
        raise CommandFailed(f"nothing to {act.verb}: no run fits ({selection}); `killick ps` lists them")
    if dry_run:
        outcomes = [_foretold(run, plan) for run, plan in planned]
    else:
        count = "1 run" if len(planned) == 1 else f"{len(planned)} runs"
        named = ", ".join(run.run for run, _ in planned[:3]) + (", …" if len(planned) > 3 else "")
        if not selection.is_named and not shell.confirm(f"{act.verb} {count} ({named})?", yes=yes):
            raise CommandFailed("nothing done", Exit.BAD)
        outcomes = [_done(act, run, plan) for run, plan in planned]
    _report(shell, act, outcomes, dry_run=dry_run)
    return Exit.BAD if any(outcome.refused for outcome in outcomes) and not dry_run else None


def _planned(act: Act, run: Listed) -> str | CommandFailed:
    try:
        return act.plan(run)
    except CommandFailed as told:
        return told


def _foretold(run: Listed, plan: str | CommandFailed) -> Outcome:
    if isinstance(plan, CommandFailed):
        return Outcome(run.run, run.status, refused=str(plan))
    return Outcome(run.run, run.status, done=plan)


def _done(act: Act, run: Listed, plan: str | CommandFailed) -> Outcome:
    if isinstance(plan, CommandFailed):
        return Outcome(run.run, run.status, refused=str(plan))
    try:
        return Outcome(run.run, run.status, done=act.do(run.run))
    except KillickError as error:
        return Outcome(run.run, run.status, refused=str(error).removeprefix(f"{run.run}: "))


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
            line.append("would be " if dry_run else "", style="dim").append(outcome.done or "", style="green")
        shell.out.print(line, soft_wrap=True)
    if dry_run:
        shell.note(f"nothing done; without --dry-run, {act.verb} does this")


def _refuse_ended(run: Listed) -> None:
    if run.status in ENDED:
        raise CommandFailed(f"is over ({run.status})")


# pause, cancel ------------------------------------------------------------------------------------


@command("pause")
@selecting
@because_option
@by_option
def pause_command(
    shell: Shell, selection: Selection, dry_run: bool, yes: bool, because: str | None, by: str | None
) -> Exit | None:
    """Stop runs at their next step, until somebody resumes them.

    \b
      killick pause claim_17 --because "the bank is closed"
      killick pause --agent review --waiting --dry-run
    """

    def plan(run: Listed) -> str:
        _refuse_ended(run)
        if run.status == "paused":
            raise CommandFailed("is paused already")
        return "paused"

    def do(run: str) -> str:
        shell.client.pause(run, because=because, by=by or somebody())
        return "paused, at its next step" if is_held(shell, run) else "paused"

    return _act(shell, Act("pause", LIVE[:3], plan, do), selection, dry_run=dry_run, yes=yes)


@command("cancel")
@selecting
@click.option("--compensate", is_flag=True, help="Undo what they did, in reverse order.")
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
    """End runs. With --compensate, what they did is undone, where the tools say how.

    \b
      killick cancel claim_18 --compensate
      killick cancel --paused --since 7d --dry-run
    """

    def plan(run: Listed) -> str:
        _refuse_ended(run)
        if shell.client.state(run.run).fold.facts.cancelling:
            raise CommandFailed("is being cancelled already")
        return "cancelled, and what it did undone" if compensate else "cancelled"

    def do(run: str) -> str:
        shell.client.cancel(run, compensate=compensate, because=because, by=by or somebody())
        if is_held(shell, run):
            return "cancelled, at its next step"
        return f"cancelled when it is run next: {goes_on(shell, run)}"

    return _act(shell, Act("cancel", LIVE, plan, do), selection, dry_run=dry_run, yes=yes)


def is_held(shell: Shell, run: str) -> bool:
    """Whether somebody is at it right now."""
    head = shell.client.store.head(run)
    return head is not None and store.is_held(shell.client.store, head)


def goes_on(shell: Shell, run: str) -> str:
    """What to type to let a run go on."""
    return shell.goes_on(run, shell.client.state(run).agent)


# resume -------------------------------------------------------------------------------------------


@command("resume", app=True)
@selecting
@because_option
@by_option
def resume_command(
    shell: Shell, selection: Selection, dry_run: bool, yes: bool, because: str | None, by: str | None
) -> Exit | None:
    """Let runs go on that are paused, failed, orphaned by a process that is gone, or at odds with their code.

    Does what each one needs and says which. A run that failed goes back to the step that failed.

    \b
      killick resume claim_16
      killick resume --failed --agent review --since 2d --dry-run
    """

    def plan(run: Listed) -> str:
        return f"resumed: {_need(shell, run)}"

    def do(run: str) -> str:
        said = shell.client.resume(run, because=because, by=by or somebody())
        return f"{said}; to go on: {goes_on(shell, run)}"

    act = Act("resume", ("paused", "failed", "running", "waiting"), plan, do)
    return _act(shell, act, selection, dry_run=dry_run, yes=yes)


def _need(shell: Shell, run: Listed) -> str:
    """Why a run does not go on by itself; Told where nothing keeps it, or nothing can be done."""
    client = shell.client
    if run.status in ("completed", "cancelled"):
        raise CommandFailed(f"is over ({run.status}); start another")
    facts = client.state(run.run).fold.facts
    if facts.cancelling:
        raise CommandFailed(f"is being cancelled; to let it end: {goes_on(shell, run.run)}")
    if run.status in ("paused", "failed"):
        return f"it {'is paused' if run.status == 'paused' else 'failed'}"
    if facts.mend:
        held = client.log.event(run.run, facts.mend)
        if isinstance(held, e.RunQuarantined):
            return f"its process died {held.deaths} times in a row"
        return "its code and its record disagreed" if isinstance(held, e.RunDiverged) else "its record was repaired"
    if run.status == "running":
        if is_held(shell, run.run):
            raise CommandFailed("is being run right now; nothing holds it back")
        return "its process is gone"
    if run.status == "queued":
        raise CommandFailed(f"is queued and nothing holds it back; to run it: {goes_on(shell, run.run)}")
    what = ", ".join(f"{wait.waits_for} {wait.id}" for wait in client.info(run.run).waits) or "its time"
    raise CommandFailed(f"waits for {what}; `killick inbox` says how to answer")


# send -------------------------------------------------------------------------------------------


@command("send", json=False)
@run_argument
@click.argument("name")
@click.argument("body", required=False)
@click.option("--id", "message", metavar="ID", help="Its id: the same id again counts once.")
@by_option
def send_command(shell: Shell, run: str, name: str, body: str | None, message: str | None, by: str | None) -> None:
    """Send a run a message. It waits there until the run asks for its name. BODY is JSON, text, @FILE or -.

    \b
      killick send claim_17 paid '{"amount": 80}'
    """
    refuse_deaf(shell, shell.run(run))
    shell.client.send(run, name, value_of(body), id=message, by=by or somebody())
    said = "taken by whoever runs it" if is_held(shell, run) else f"to go on: {goes_on(shell, run)}"
    shell.note(f"{run}: {name} sent; {said}")
