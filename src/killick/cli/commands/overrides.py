"""`killick edit`: the commands by which a person intervenes in one run."""

from __future__ import annotations

from typing import Any

import click

from killick.cli.context import Shell, by_option, command, pair, run_argument, value_of, who_options
from killick.cli.exit_codes import CommandFailed

_step = click.argument("step")


def _said(shell: Shell, run: str, done: str, line: str = "", **fields: Any) -> None:
    """Reports the result: as `line` if given, else with the command that continues the run."""
    if shell.json:
        shell.emit({"run": run, **fields, "done": done})
        return
    then = "" if shell.is_held(run) else f"; to continue: {shell.continues(run)}"
    shell.note(f"{run}: {line or f'{done}{then}'}")


@command("set", app=True)
@run_argument
@click.argument("changes", nargs=-1, metavar="[NAME=VALUE]...")
@click.option("--unset", metavar="NAME", multiple=True, help="Remove an entry. May be repeated.")
@click.option("--saw", metavar="N", type=click.IntRange(0), help="The context version that you saw; refuses another.")
@who_options
def set_command(shell: Shell, run: str, changes: tuple[str, ...], unset: tuple[str, ...], **how: Any) -> None:
    """Change entries of a run's context; its code sees the change when its next step returns.

    \b
      killick edit set claim_17 route=manager limit=500
      killick edit set claim_17 limit=500 --saw 0 --because "as agreed"
    """
    given = dict(map(pair, changes))
    if not given and not unset:
        raise CommandFailed(f"{run}: set what? Write name=value, or --unset name")
    if both := [name for name in unset if name in given]:
        raise CommandFailed(f"{both[0]}: is set and unset at once; leave one of them out")
    if own := [name for name in given if name in ("by", "unset", "saw", "because")]:
        raise CommandFailed(f"{own[0]}: cannot be set from here; set it in the agent, with run.update")
    shell.load_app()
    done = shell.client.edit.set(run, unset=unset, **how, **given)
    names, version = [*given, *unset], shell.client.state(run).context.version
    line = f"{', '.join(names)} {done}; its code sees it when its next step returns"
    _said(shell, run, done, line, names=names, version=version)


@command("override", app=True)
@run_argument
@_step
@click.argument("value")
@who_options
def override_command(shell: Shell, run: str, step: str, value: str, **who: Any) -> None:
    """Give a pending step its result, instead of executing it. VALUE is JSON, text, @FILE or -.

    For a question the value is the response. A step that has ended is changed by `killick time rewind` or
    `killick time fork`.

    \b
      killick edit override claim_17 9 no --because "they withdrew"
    """
    shell.load_app()
    _said(shell, run, shell.client.edit.override(run, step, value_of(value), **who), step=step)


@command("skip", app=True)
@run_argument
@_step
@who_options
def skip_command(shell: Shell, run: str, step: str, **who: Any) -> None:
    """End a pending step without executing it.

    A sleep ends. A wait with a default takes it. Any other step raises killick.errors.Skipped in the agent's code.

    \b
      killick edit skip claim_17 9 --because "the office is closed"
    """
    _said(shell, run, shell.client.edit.skip(run, step, **who), step=step)


@command("retry", app=True)
@run_argument
@click.argument("step", required=False)
@who_options
def retry_command(shell: Shell, run: str, step: str | None, **who: Any) -> None:
    """Retry a step now that waits for a backoff or a rate limit. STEP is optional where only one does."""
    _said(shell, run, shell.client.edit.retry(run, step, **who), step=step)


@command("note")
@run_argument
@click.argument("text")
@by_option
def note_command(shell: Shell, run: str, text: str, by: str | None) -> None:
    """Add a note to a run's record. TEXT is JSON, text, @FILE or -.

    \b
      killick edit note claim_17 "called the customer, who is content"
    """
    shell.client.edit.note(run, value_of(text), by=by)
    _said(shell, run, "noted", f"noted; killick show {run} shows it")


@command("priority")
@run_argument
@click.argument("priority", type=int)
@who_options
def priority_command(shell: Shell, run: str, priority: int, **who: Any) -> None:
    """Give a run another priority: workers take the due run with the highest one first.

    \b
      killick edit priority claim_17 10
    """
    shell.client.edit.prioritize(run, priority, **who)
    line = f"has priority {priority} from its next step on"
    _said(shell, run, "prioritized", line, priority=priority)
