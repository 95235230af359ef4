"""The commands `fork`, `rewind` and `undo`. Each shows the lasting effects first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import click
from msgspec.structs import asdict
from rich.text import Text

from killick.cli import style as paint
from killick.cli.commands.run import fitting
from killick.cli.context import (
    Shell,
    command,
    dry_run_option,
    pair,
    run_argument,
    value_of,
    who_options,
    yes_option,
)
from killick.cli.exit_codes import CommandFailed, Exit
from killick.definitions.agents import AGENTS
from killick.engine.effects.run_tree import effects_of
from killick.errors import AgentUnknown, TimeRefused
from killick.history.compare_runs import changed_in
from killick.history.phrasing import snapshot
from killick.history.rewind_preview import STANDING, RewindPreview, left, preview_rewind
from killick.history.undo_preview import UndoPreview
from killick.log import boundaries
from killick.model import events as e
from killick.presenting import time_travel as present

COMMAND: Final = "green"
LABEL: Final = 12
"""How wide the labels before the lines of a report are."""

NAMED_MAX: Final = 12
"""How many things of a kind are named before the rest is counted."""


def _report(shell: Shell, label: str, lines: Iterable[Text | str], style: str = "") -> None:
    """Lines of a report under one label; nothing where there are none. A command to type is never broken."""
    found = [Text(line, style=style) if isinstance(line, str) else line for line in lines]
    if len(found) > NAMED_MAX:
        found[NAMED_MAX - 1 :] = [Text(f"and {len(found) - NAMED_MAX + 1} more", style="dim")]
    for number, line in enumerate(found):
        lead = Text(f"  {label if number == 0 else '':<{LABEL}}", style="dim")
        whole = Text().append_text(lead).append_text(line)
        shell.print(*[whole] if style == COMMAND else paint.wrapped(lead, line, shell.out.width))


# fork ---------------------------------------------------------------------------------------------


@command("fork", app=True)
@run_argument
@click.option(
    "--at", metavar="PLACE", help="The place: 5:after, 5:before, @17, start.  [default: after --output, or now]",
)  # fmt: skip
@click.option("--id", "name", metavar="ID", help="The id of the fork.  [default: RUN-fork]")
@click.option("--output", metavar="STEP=VALUE", multiple=True, help="Another result for a step. May be repeated.")
@click.option("--set", "changes", metavar="NAME=VALUE", multiple=True, help="Change an entry of its context.")
@click.option("--unset", metavar="NAME", multiple=True, help="Remove an entry of its context.")
@click.option("--input", "-i", "given", metavar="VALUE", help="Another input: JSON, text, @FILE, or - (stdin).")
@click.option("--model", metavar="NAME", help="The model to call from there on.")
@click.option(
    "--effects", type=click.Choice(get_args(e.ForkEffects)), default="recorded", show_default=True,
    help="New effects: ask a person first, execute them, or fail their step.",
)  # fmt: skip
@click.option("--workspace", metavar="DIR", help="The folder of its files.  [default: next to its parent's folder]")
@who_options
def fork_command(
    shell: Shell, run: str, at: str | None, name: str | None, output: tuple[str, ...], changes: tuple[str, ...],
    given: str | None, effects: e.ForkEffects, workspace: str | None, **conditions: Any,
) -> None:  # fmt: skip
    """Fork a run at a place in its history, under other conditions. The run itself does not change.

    Models and reads are called again. Effects of RUN are reused, not repeated. With a workspace, the fork gets its own
    folder with the files at that place.

    \b
      killick time fork claim_17 --output 8='["c.pdf"]'
      killick time fork claim_17 --at 3:before --model other-model --effects none
      killick time fork claim_17 --at 4:after --set route=manager --because "what if?"
    """
    outputs, given_set = dict(map(pair, output)), dict(map(pair, changes))
    if at is None:
        at = f"{next(iter(outputs))}:after" if len(outputs) == 1 else "now"
    shell.load_app()
    if given is not None:
        conditions["input"] = _input(shell, run, given)
    if workspace is not None:
        conditions["workspace"] = workspace
    place = boundaries.at(shell.log, run, at)
    try:
        made = shell.client.fork(
            run, at, id=name, output=outputs or None, set=given_set or None, effects=effects, **conditions,
        )  # fmt: skip
    except TimeRefused as refused:
        raise CommandFailed(str(refused).replace("with workspace=", "with --workspace DIR")) from refused
    _print_fork(shell, run, made.id, place, effects)
    if shell.json:
        shell.emit(_fork_document(shell, run, made.id, place))
    else:
        moves = [shell.continues(made.id), shell.typed("time", "diff", run, made.id)]
        _report(shell, "next", moves, COMMAND)


def _input(shell: Shell, run: str, given: str) -> Any:
    """Another input, as the agent takes it where the agent is known here."""
    try:
        return fitting(AGENTS.get(shell.client.state(run).agent), given)
    except AgentUnknown:
        return value_of(given, "--input")


def _print_fork(shell: Shell, run: str, fork: str, place: boundaries.RunMoment, effects: e.ForkEffects) -> None:
    log = shell.log
    where = paint.place(place.label, place.seq)
    shell.print(Text.assemble((fork, "bold cyan"), f" branches off {run} at ", (where, "bold")))
    steps = [step for step in log.state(fork).fold.steps if "." not in step.id]
    shared = f"steps 1 to {steps[-1].id}" if len(steps) > 1 else "step 1" if steps else "its start"
    _report(shell, "shares", [Text().append(shared).append(", nothing is copied", style="dim")])
    otherwise = [each.line(max(shell.out.width - 30, 30)) for each in changed_in(log, fork) if each.what != "effects"]
    _report(shell, "differs", otherwise or [Text("in nothing", style="dim")], "yellow")
    forked = log.event(fork, log.head(fork).base + 1)
    if isinstance(forked, e.RunForked) and forked.files is not None:
        text = Text(f"in {forked.workspace}").append(f", a copy of {snapshot(forked.files)}", style="dim")
        _report(shell, "files", [text])
    steps = [step for step in left(log, run, place.seq, place.keep) if step.effect != "workspace"]
    done = effects_of(log, run, steps)
    standing = [f"{step} {each.effect.tool}" for step, each in done.items() if each.effect.status in STANDING]
    named = f" ({paint.brief(', '.join(standing), 60)})" if standing else ""
    _report(shell, "world", [f"adopts the effects of {run}{named}; {present.WORLD[effects]}"])


def _fork_document(shell: Shell, run: str, fork: str, place: boundaries.RunMoment) -> dict[str, Any]:
    log = shell.log
    forked = log.event(fork, log.head(fork).base + 1)
    assert isinstance(forked, e.RunForked)
    conditions = [asdict(each) for each in changed_in(log, fork)]
    return {
        "run": fork, "parent": run, "at": place.label, "cut": forked.cut, "keep": forked.keep,
        "generation": forked.generation, "effects": forked.effects, "conditions": conditions,
        "workspace": forked.workspace, "status": shell.client.info(fork).status,
        "next": shell.continues(fork),
    }  # fmt: skip


# rewind -------------------------------------------------------------------------------------------


@command("rewind")
@run_argument
@click.option("--to", metavar="PLACE", required=True, help="The place: 4:before, 4:after, 4~1:before, @17, start.")
@who_options
@yes_option
@dry_run_option
def rewind_command(shell: Shell, run: str, to: str, yes: bool, dry_run: bool, **who: Any) -> None:
    """Rewind a run to a place in its history; its code runs again from there. Lists the effects that remain first.

    The rewound steps stay on record as an earlier generation. Their effects stay: the same call again gets the recorded
    result.

    \b
      killick time rewind claim_17 --to 4:before --because "the rate was wrong"
      killick time rewind claim_17 --to 4:before --dry-run
    """
    found = preview_rewind(shell.log, run, to)
    place = paint.place(found.to, found.seq)
    shell.print(Text.assemble((run, "bold cyan"), " would be rewound to ", (place, "bold")))
    _print_parts(shell, present.rewind(found, max(shell.out.width - LABEL - 8, 40)))
    done: str | None = None
    if not dry_run:
        if any(effect.status in STANDING for effect in found.effects):
            shell.confirm(f"rewind {run} to {found.to}?", yes=yes)
        done = shell.client.rewind(run, to, **who)
    if _is_printed(shell, found, done, "rewind"):
        _report(shell, "next", [shell.continues(run)], COMMAND)


def _print_parts(shell: Shell, parts: present.Report) -> None:
    for label, lines in parts:
        _report(shell, label, map(paint.text, lines))


def _is_printed(shell: Shell, found: RewindPreview | UndoPreview, done: str | None, verb: str) -> bool:
    """Prints the result of a command after its preview; True if something was done, and more lines may follow."""
    if shell.json:
        shell.emit({**asdict(found), "done": done})
        return False
    if done is None:
        shell.note(f"nothing done; without --dry-run, {verb} does this")
        return False
    shell.print(Text().append(found.run, style="bold cyan").append(f"  {done}", style="green"))
    return True


# undo ---------------------------------------------------------------------------------------------


@command("undo", app=True)
@run_argument
@click.option("--step", metavar="STEP", required=True, help="The step whose effect is to be undone.")
@click.option(
    "--settled", type=click.Choice(("happened", "not")),
    help="The outcome of an undo that is in doubt: it happened, or it did not.",
)  # fmt: skip
@who_options
@yes_option
@dry_run_option
def undo_command(
    shell: Shell, run: str, step: str, settled: Literal["happened", "not"] | None, yes: bool, dry_run: bool, **who: Any
) -> None:
    """Undo the effect of one step by the compensation of its tool. The run itself continues.

    Lists the other steps and runs that share the effect first. The same call again is executed. Give --settled happened
    if you undid it by hand.
    """
    shell.load_app()
    found = shell.client.undoing(run, step)
    if found.refuses is not None and settled is None:
        raise CommandFailed(f"{run}: step {step} cannot be undone: {found.refuses}{_way_out(shell, found)}")
    head = Text().append(run, style="bold cyan").append(f" step {step}: ")
    shell.print(head.append(present.call_line(found.tool, found.arguments, 200), style="bold"))
    _print_parts(shell, present.undo(found, max(shell.out.width - LABEL - 4, 30)))
    done: str | None = None
    if not dry_run:
        shell.confirm(f"undo step {step} of {run}?", yes=yes)
        try:
            done = shell.client.undo(run, step, **who, settled=settled)
        except TimeRefused as refused:
            line = str(refused).replace("settled='happened' or 'not'", "--settled happened, or --settled not")
            raise CommandFailed(line.replace("settled='happened'", "--settled happened"), Exit.BAD) from refused
    if _is_printed(shell, found, done, "undo"):
        state = shell.client.state(run)
        undid = [each for each in state.fold.steps if each.undoes == step and each.status == "done"]
        said = state.output_of(undid[-1]) if undid else None
        _report(shell, "came to", [paint.brief(said, 200)] if said is not None else [])
        if settled != "not":
            _report(shell, "next", ["keep it, or rewind the run to before it:"])
            _report(shell, "", [shell.typed("time", "rewind", run, "--to", f"{step}:before")], COMMAND)


def _way_out(shell: Shell, found: UndoPreview) -> str:
    """The next move for an effect that cannot be undone."""
    refuses = found.refuses or ""
    if found.status in ("open", "in_doubt"):
        return f": {shell.typed('answer', f'{found.run}:{found.step}', 'happened')}, or not"
    if refuses.startswith("undoing it began"):
        return "; check, then say which it is: --settled happened, or --settled not"
    if found.status != "happened" or found.compensated_by is not None:
        return ""
    return "; name its module with --app" if "declared" in refuses else "; undo it by hand, then --settled happened"
