"""The commands that prove a record and hand it on: `verify` and `export`; `store` is in a module of its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.filesize import decimal

from kedge.cli.doctor import doctor_command
from kedge.cli.exits import Exit, Told
from kedge.cli.pruning import prune_command
from kedge.cli.shell import Shell, command, complete_run, run_argument
from kedge.cli.store import erase_command, heads, many, progress, repair_command, say, say_next, store_command
from kedge.errors import ExportBroken
from kedge.history import archive
from kedge.history.export import read
from kedge.log import Report
from kedge.store.base import Problem
from kedge.store.memory import MemoryStore

__all__ = ["export_command", "store_command", "verify_command"]

for _part in (doctor_command, repair_command, prune_command, erase_command):
    store_command.add_command(_part)


@command("verify")
@click.argument("run", required=False, shell_complete=complete_run)
def verify_command(shell: Shell, run: str | None) -> Exit:
    """Re-read the record and prove it: of one run, of the whole store, or of a file.

    Recomputes the chain of hashes, compares every copy, folds everything again. What is derived and wrong is
    rebuilt; a run whose log does not hold is set apart, alone. Exits with 1 when something does not hold.
    A file is what `kedge export` or `kedge store prune` wrote; for it no store is needed.
    """
    if run is not None and Path(run).is_file():
        is_run = not archive.is_archive(run) and shell.exists and shell.client.store.head(run) is not None
        if not is_run:
            return _verify_file(shell, run)
    kd = shell.client
    looked_at = [kd.log.head(shell.run(run))] if run else list(heads(kd.store))
    done: Counter[str] = Counter()
    total = sum(head.seq - head.base for head in looked_at)
    with progress(shell) as tell:

        def seen(name: str, events: int) -> None:
            done[""] += events - done[name]
            done[name] = events
            tell("verifying", done[""], total)

        report = kd.verify(run, progress=seen)
    broken = _first_breaks(report)
    if shell.json:
        told = {name: getattr(report, name) for name in ("holds", "runs", "events", "erased", "repaired")}
        shell.emit({**told, "broken": _fields(broken), "problems": _fields(report.problems)})
    else:
        _print_report(shell, report, broken)
    return Exit.DONE if report.holds else Exit.BAD


def _verify_file(shell: Shell, path: str) -> Exit:
    """Prove every run of an export or an archive."""
    found, broken = archive.Held(0, 0), None
    try:
        if archive.is_archive(path):
            with progress(shell) as tell:
                found = archive.verify(path, progress=tell)
        else:
            exported = read(path)
            exported.verify(exported.store(MemoryStore))
            found = archive.Held(1, exported.header.events)
    except ExportBroken as error:
        broken = error.reason
    if shell.json:
        shell.emit({"holds": broken is None, "runs": found.runs, "events": found.events, "broken": broken})
    elif broken is not None:
        say(shell, "✗", (path, "bold"), f"  {broken}")
    else:
        say(shell, "✓", "the file holds: ", f"{many(found.runs, 'run')}, {many(found.events, 'event')}")
    return Exit.DONE if broken is None else Exit.BAD


def _first_breaks(report: Report) -> list[Problem]:
    """For each run that does not hold its first break, and whatever else is wrong with the store itself."""
    names = dict.fromkeys(problem.run for problem in report.problems if problem.run and not problem.healed)
    firsts = [report.first(name) for name in names]
    loose = [problem for problem in report.problems if problem.run is None and not problem.healed]
    return [problem for problem in firsts if problem is not None] + loose


def _fields(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(problem) for problem in problems]


def _print_report(shell: Shell, report: Report, broken: Sequence[Problem]) -> None:
    for problem in broken:
        at = f"breaks at event {problem.seq}: " if problem.seq is not None else ""
        say(shell, "✗", (problem.run or shell.store, "bold"), f"  {at}{problem.what} ({problem.where})")
        if problem.run:
            say_next(shell, "store", "repair", problem.run)
    healed = {(problem.run or shell.store, problem.where) for problem in report.problems if problem.healed}
    for name, where in sorted(healed):
        say(shell, "~", (name, "bold"), f"  {where} did not say what the log says: rebuilt")
    if report.holds:
        erased = f", {many(report.erased, 'value')} erased on purpose" if report.erased else ""
        repaired = f", {many(report.repaired, 'repair')} on record" if report.repaired else ""
        counts = f"{many(report.runs, 'run')}, {many(report.events, 'event')}"
        say(shell, "✓", f"the record holds: {counts}{erased}{repaired}")
    else:
        runs = len({problem.run for problem in broken if problem.run})
        say(shell, "", f"{many(runs, 'run')} of {report.runs:,} {'does' if runs == 1 else 'do'} not hold")


@command("export", json=False)
@run_argument
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="A file.  [default: stdout]")
def export_command(shell: Shell, run: str, output: Path | None) -> None:
    """A run as one file of JSON lines: its events, their values, and the chain that proves them.

    A test replays it with kedge.testing.replay("run.kedge", agent). The file holds what the run saw and did:
    treat it as you treat that.
    """
    data = shell.client.export(shell.run(run))
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise Told(f"{output}: cannot be written ({error.strerror}); name another file") from None
    header = msgspec.json.decode(data.split(b"\n", 1)[0])
    shell.note(f"{output}: {many(header['events'], 'event')}, {decimal(len(data))}")
