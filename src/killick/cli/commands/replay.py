"""The command that runs an agent's code against a record, with the world shut off: `replay`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from killick.archive import bundle
from killick.archive.export import Export, export, read
from killick.cli import style as paint
from killick.cli.context import Shell, command
from killick.cli.exit_codes import CommandFailed, Exit
from killick.definitions.agents import AnyAgent
from killick.errors import RunUnknown
from killick.history.diff import shown, values
from killick.history.phrasing import counted
from killick.model.codec import plain
from killick.replay.replay import Replay
from killick.replay.result import SECONDS, Played, Replayed, ReplayRequest

_NAME_CHARS: Final = 20
_CHANGES_MAX: Final = 12


@command("replay", app=True)
@click.argument("source", metavar="RUN|FILE")
@click.option("--to", metavar="STEP", help="Stop when this step has its outcome; 6:before stops before it.")
@click.option("--break", "stop_at", metavar="STEP", help="Open the debugger in the agent's code at this step.")
@click.option("--agent", "target", metavar="TARGET", help="The agent: app.py:agent, module:agent, or its name.")
@click.option("--run", metavar="RUN", help="The run, of an archive.")
def replay_command(
    shell: Shell, source: str, to: str | None, stop_at: str | None, target: str | None, run: str | None
) -> Exit:
    """Run the agent's code again on a run's log, without I/O, and report where they diverge.

    Replays a copy in memory, of a run or of an exported file. Recorded steps return their recorded outcomes. A step
    without a record, or I/O outside a step, stops the replay. Exits with 1 at a divergence.

    \b
      killick time replay claim_17
      killick time replay claim_17 --agent app.py:review --to 6
    """
    found, key = _found(shell, source, run)
    agent = _agent(shell, found, target)
    asked = ReplayRequest(to=to, stop_at=stop_at, here=True, seconds=None if stop_at is not None else SECONDS)
    replay = Replay(found, agent, secret_key=key, asked=asked, tell=partial(_print_step, shell))
    state = replay.state
    origin = f", from {source}" if source != replay.run else ""
    summary = f"  {state.agent}, {counted(len(state.fold.steps), 'step')} on record{origin}, "
    _print(shell, (replay.run, "bold"), summary, (state.status, paint.STYLES.get(state.status, "")))
    with contextlib.redirect_stdout(sys.stderr) if shell.json else contextlib.nullcontext():
        replayed = replay.outcome()
    shell.emit(_document(replayed))
    _print_end(shell, replayed)
    if replay.missed is not None:
        shell.note(f"the code never came to step {replay.missed}, so the debugger had nowhere to stop")
    return Exit.BAD if replayed.divergence is not None else Exit.DONE


# the run and its code -----------------------------------------------------------------------------


def _found(shell: Shell, source: str, run: str | None) -> tuple[Export, bytes | None]:
    """A copy of a run of the store, with the key of its secrets; or the export in a file."""
    is_file, is_archive = Path(source).is_file(), bundle.is_archive(source)
    if run is not None and not is_archive:
        raise CommandFailed(f"{source}: is no archive of runs; leave --run out")
    if not is_file or (shell.exists and not is_archive and shell.store.head(source) is not None):
        log = shell.log
        found = read(export(log, shell.run(source))).decrypt(log.store)
        return found, found.secret_key or log.store.secret_key
    if not is_archive:
        found = read(source)
    else:
        archived = next((each for each in bundle.read(source) if run is None or each.header.run == run), None)
        if archived is None:
            raise RunUnknown(run or source)
        found = archived
    # In clear, if it comes from a store that is here and encrypted.
    return found.decrypt(shell.store) if shell.exists else found, None


def _agent(shell: Shell, found: Export, target: str | None) -> AnyAgent:
    """The agent that is named, or the one that the record names, in the app or in a file here."""
    if target is not None:
        return shell.agent(target)
    first = found.rows[found.header.lineage[0].run][0]
    name: str = msgspec.json.decode(first.body).get("agent", "")
    if (agent := shell.agent_of(name)) is not None:
        return agent
    here = shell.targets_of(name)
    which = f"which of them: --agent {' or '.join(here)}?" if here else f"where is it? Name it: --agent app.py:{name}"
    raise CommandFailed(f"{found.header.run}: was a run of {name}; {which}")


# output -------------------------------------------------------------------------------------------


def _print(shell: Shell, *parts: str | tuple[str, str], wrap: bool = True) -> None:
    cut: Any = {"soft_wrap": True} if wrap else {"no_wrap": True, "overflow": "ellipsis"}
    shell.out.print(Text.assemble(*parts), **cut)


def _print_step(shell: Shell, played: Played) -> None:
    """One step that was given its outcome."""
    style = paint.STYLES.get(played.status, "")
    output = paint.brief(_said(played), max(shell.out.width - _NAME_CHARS - 11, 40))
    _print(
        shell, (f"  {paint.SIGNS.get(played.status, '·')} ", style), (f"{played.step:<5} ", "dim"),
        f"{paint.brief(played.name, _NAME_CHARS):<{_NAME_CHARS}} ",
        (output, "red" if played.status == "failed" else "dim"), wrap=False,
    )  # fmt: skip
    if played.drift is not None:
        for line in _changes(played.drift.recorded, played.drift.found):
            _print(shell, ("          ~ ", "yellow"), ("drifts: ", "yellow"), line, wrap=False)


def _print_end(shell: Shell, replayed: Replayed) -> None:
    for stray in replayed.strays:
        _print(shell, ("  ~ ", "yellow"), str(stray))
    if replayed.played:
        _print(shell, "")
    sign, style = {
        "agrees": ("✓", "bold green"), "diverged": ("✗", "bold red"), "beyond": ("→", "bold yellow"),
        "stopped": ("■", "bold cyan"),
    }[replayed.outcome]  # fmt: skip
    _print(shell, (f"{sign} ", style), verdict(replayed))


def verdict(replayed: Replayed) -> str:
    """The result, in one line."""
    called = "nothing was called"
    match replayed.outcome:
        case "diverged":
            assert replayed.divergence is not None
            step, reason = replayed.divergence.step, replayed.divergence.reason
            at = f"at step {step}"
            text = reason.removeprefix(f"{at} ")
            text = text if called in text else f"{text}; {called}"
            return f"diverged{f' {at}' if step is not None else ''}: {text}"
        case "beyond":
            return f"continues beyond the record with {replayed.beyond}; {called}"
        case "stopped" if str(replayed.stopped).startswith("the debugger"):
            return f"stopped: {replayed.stopped}; {called}"
        case "stopped":
            return f"stopped {replayed.stopped}; the code was not run further, and {called}"
        case _:
            ends = {
                "completed": "came to the same result", "failed": "failed with the same error",
                "cancelled": "came to where it was cancelled",
            }.get(replayed.status, f"is {replayed.status} where the record ends")  # fmt: skip
            return f"agrees: the code took {counted(len(replayed.played), 'step')} again and {ends}; {called}"


def _said(played: Played) -> str:
    """The outcome of a step: its error, its status, or its result as JSON."""
    if played.failure is not None or played.status != "done":
        return str(played.failure or played.status)
    return "" if played.output is None else paint.inline(played.output)


def _changes(recorded: Any, found: Any) -> Iterator[str]:
    changes = values(_json(recorded), _json(found))
    for change in changes[:_CHANGES_MAX]:
        yield f"{f'{change.path}: ' if change.path else ''}{shown(change.before, 60)} is now {shown(change.after, 60)}"
    if len(changes) > _CHANGES_MAX:
        yield f"and {len(changes) - _CHANGES_MAX} more"


def _json(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(plain(value)))


def _document(replayed: Replayed) -> dict[str, Any]:
    divergence, strays = replayed.divergence, [stray._asdict() for stray in replayed.strays]
    return {
        "run": replayed.run, "agent": replayed.agent, "outcome": replayed.outcome, "says": verdict(replayed),
        "status": replayed.status, "result": replayed.result, "failure": replayed.failure,
        "divergence": None if divergence is None else {"step": divergence.step, "reason": divergence.reason},
        "beyond": replayed.beyond, "stopped": replayed.stopped,
        "played": replayed.played, "drifts": replayed.drifts, "strays": strays,
    }  # fmt: skip
