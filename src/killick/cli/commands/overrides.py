"""The commands by which a person steps into one run: `set`, `override`, `skip`, `retry`, `note`, `prioritize`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from killick.cli.commands.control import because_option, by_option, goes_on, is_held
from killick.cli.context import Shell, command, completing, current_user, pair, run_argument, value_of
from killick.cli.exit_codes import CommandFailed


@completing
def complete_pending(shell: Shell, context: click.Context) -> Iterable[tuple[str, str]]:
    """The steps of the run that are not over."""
    fold = shell.client.state(str(context.params.get("run"))).fold
    steps = [fold.steps[index] for index in fold.facts.pending.values()]
    return [(step.id, f"{step.name} ({step.status})") for step in steps if step.sort != "scope"]


_step = click.argument("step", shell_complete=complete_pending)


def _said(shell: Shell, run: str, done: str, **told: Any) -> None:
    if shell.json:
        shell.emit({"run": run, **told, "done": done})
        return
    then = "" if is_held(shell, run) else f"; to continue: {goes_on(shell, run)}"
    shell.note(f"{run}: {done}{then}")


@command("set", app=True)
@run_argument
@click.argument("changes", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--unset", metavar="NAME", multiple=True, help="Take an entry out. May be repeated.")
@click.option("--saw", metavar="N", type=click.IntRange(0), help="The version it rests on; refused if it is another.")
@because_option
@by_option
def set_command(
    shell: Shell,
    run: str,
    changes: tuple[str, ...],
    unset: tuple[str, ...],
    saw: int | None,
    because: str | None,
    by: str | None,
) -> None:
    """Change entries of a run's context; its code sees that when its next step returns.

    \b
      killick set claim_17 route=manager limit=500
      killick set claim_17 limit=500 --saw 0 --because "as agreed"
    """
    given = dict(map(pair, changes))
    if not given and not unset:
        raise CommandFailed(f"{run}: set what? Write name=value, or --unset name")
    if both := [name for name in unset if name in given]:
        raise CommandFailed(f"{both[0]}: is set and unset at once; leave one of them out")
    if own := [name for name in given if name in ("by", "unset", "saw", "because")]:
        raise CommandFailed(f"{own[0]}: cannot be set from here; set it in the agent, with run.update")
    shell.run(run)
    shell.load_app()
    done = shell.client.set(run, saw=saw, because=because, by=by or current_user(), unset=unset, **given)
    names = ", ".join([*given, *unset])
    if shell.json:
        version = shell.client.state(run).context.version
        shell.emit({"run": run, "names": [*given, *unset], "version": version, "done": done})
        return
    shell.note(f"{run}: {names} {done}; its code sees it when its next step returns")


@command("override", app=True)
@run_argument
@_step
@click.argument("value")
@because_option
@by_option
def override_command(shell: Shell, run: str, step: str, value: str, because: str | None, by: str | None) -> None:
    """Give a step that is not over its result, instead of doing it. VALUE is JSON, text, @FILE or -.

    To a question it is a response. What is over is changed by `killick rewind` or `killick fork`.

    \b
      killick override claim_17 9 no --because "they withdrew"
    """
    shell.run(run)
    shell.load_app()
    done = shell.client.override(run, step, value_of(value), because=because, by=by or current_user())
    _said(shell, run, done, step=step)


@command("skip", app=True)
@run_argument
@_step
@because_option
@by_option
def skip_command(shell: Shell, run: str, step: str, because: str | None, by: str | None) -> None:
    """End a step that is not over without doing it.

    A sleep is over, a wait with a default takes that; the code of any other step meets killick.Skipped.

    \b
      killick skip claim_17 9 --because "nobody is there"
    """
    shell.run(run)
    done = shell.client.skip(run, step, because=because, by=by or current_user())
    _said(shell, run, done, step=step)


@command("retry", app=True)
@run_argument
@click.argument("step", required=False, shell_complete=complete_pending)
@because_option
@by_option
def retry_command(shell: Shell, run: str, step: str | None, because: str | None, by: str | None) -> None:
    """Let a step that sits out a backoff or a rate limit go on now. STEP may be left out where only one does."""
    shell.run(run)
    done = shell.client.retry(run, step, because=because, by=by or current_user())
    _said(shell, run, done, step=step)


@command("note")
@run_argument
@click.argument("text")
@by_option
def note_command(shell: Shell, run: str, text: str, by: str | None) -> None:
    """Put a remark into a run's record. TEXT is JSON, text, @FILE or -.

    \b
      killick note claim_17 "called the customer, who is content"
    """
    shell.run(run)
    shell.client.note(run, value_of(text), by=by or current_user())
    if shell.json:
        shell.emit({"run": run, "done": "noted"})
        return
    shell.note(f"{run}: noted; killick show {run} shows it")


@command("prioritize")
@run_argument
@click.argument("priority", type=int)
@because_option
@by_option
def prioritize_command(shell: Shell, run: str, priority: int, because: str | None, by: str | None) -> None:
    """Give a run another priority: of runs that are due, the one with the highest goes first.

    \b
      killick prioritize claim_17 10
    """
    shell.run(run)
    shell.client.prioritize(run, priority, because=because, by=by or current_user())
    if shell.json:
        shell.emit({"run": run, "priority": priority, "done": "prioritized"})
        return
    shell.note(f"{run}: has priority {priority} from its next step on")
