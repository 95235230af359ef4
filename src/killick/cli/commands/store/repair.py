"""`killick store repair`: fetches what is damaged from other copies, or sets the damaged part of a log aside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from killick.archive import bundle
from killick.archive.export import ExportSource, read
from killick.cli.commands.store.maintenance import open_damaged, some
from killick.cli.context import Shell, command, current_user, dry_run_option, yes_option
from killick.cli.exit_codes import CommandFailed, Exit
from killick.errors import LogError, StoreBroken
from killick.history.phrasing import counted
from killick.log import repair
from killick.log.paging import heads
from killick.log.repair import damage
from killick.log.restore import Restored, Source, restore
from killick.log.verify import verify
from killick.store import open_store
from killick.store.protocol import raw_store, rebuild
from killick.store.records import Problem


@command("repair")
@click.argument("run", required=False)
@click.option("--from", "places", metavar="PLACE", multiple=True,
              help="Another copy: a store, an archive or an export. May be repeated.")  # fmt: skip
@click.option("--reason", metavar="WHY", default="repaired on the command line", help="Why, for the record.")
@dry_run_option
@yes_option
def repair_command(
    shell: Shell, run: str | None, places: tuple[str, ...], reason: str, dry_run: bool, yes: bool
) -> Exit:
    """Repair a run whose log fails verification.

    With --from, fetches each damaged or missing event and value from another copy, of one run or of all quarantined
    runs, and writes it back only if it matches the hash that the log names. A run that verifies then leaves quarantine.
    The other copy is not changed.

    Without --from, sets the failing part of its log aside, without deleting it. Effects in that part are in doubt. Lost
    messages are recorded as lost. The run then waits for a person.

    \b
      killick store repair --from backup.db
      killick store repair claim_17 --from claim_17.killick
    """
    if run is None and not places:
        raise CommandFailed("store repair: needs RUN, or --from PLACE; `killick store verify` names the damaged runs")
    open_damaged(shell)
    run = None if run is None else shell.run(run)
    if places:
        return _fetch(shell, run, places, dry_run=dry_run, yes=yes)
    assert run is not None
    _set_aside(shell, run, reason, dry_run=dry_run, yes=yes)
    return Exit.DONE


# from another copy --------------------------------------------------------------------------------


def _fetch(shell: Shell, only: str | None, places: Sequence[str], *, dry_run: bool, yes: bool) -> Exit:
    lost: list[Problem] = []
    if not dry_run:
        shell.confirm("Write what is damaged again? Copy the store away first.", yes=yes)
        lost = _rebuild(shell)
    quarantined = [head.run for _, head in heads(shell.store) if shell.store.quarantined(head.run) is not None]
    wanted = [only] if only else quarantined
    done: dict[str, Restored] = {}
    for place in places:
        for source in _sources(shell, place):
            for run in wanted:
                if run not in done or not done[run].holds:
                    found = restore(shell.log, run, source, dry_run=dry_run)
                    before = done[run].fetched if run in done else ()
                    done[run] = msgspec.structs.replace(found, fetched=(*before, *found.fetched))
    lost = [each for each in lost if each.run not in done]
    shell.emit({
        "runs": [msgspec.structs.asdict(each) for each in done.values()],
        "lost": [msgspec.structs.asdict(each) for each in lost],
        "dry_run": dry_run,
    })  # fmt: skip
    for each in done.values():
        _print_restored(shell, each, dry_run=dry_run)
    for problem in some(shell, lost):
        shell.say("✗", str(problem))
    if not wanted and not lost:
        shell.say("", "no run is quarantined; `killick store verify` looks for damage")
    return Exit.DONE if dry_run or (not lost and all(each.holds for each in done.values())) else Exit.BAD


def _rebuild(shell: Shell) -> list[Problem]:
    """Writes the damaged tables again. Verifies all runs then, because what was lost quarantines a run; returns what
    fails, and the runs that are gone."""
    found = rebuild(raw_store(shell.store))
    for problem in found:
        if problem.run is None:
            shell.say("~", (problem.where, "bold"), f"  {problem.what}")
    if not found:
        return []
    failed = [each for each in verify(shell.log).problems if not each.healed]
    return [each for each in found if each.run is not None] + failed


def _print_restored(shell: Shell, found: Restored, *, dry_run: bool) -> None:
    for name in some(shell, found.fetched):
        shell.say("+", f"{found.run}: {name} {'can be' if dry_run else 'was'} fetched")
    for name in some(shell, found.missing):
        shell.say("✗", f"{found.run}: {name} is still missing")
    if found.holds:
        shell.say("✓", (found.run, "bold"), f"  verifies again, with {counted(len(found.fetched), 'value')} fetched")
    elif not dry_run:
        shell.say("✗", (found.run, "bold"), "  still fails; give another --from, or set its damaged part aside:")
        shell.say_next("store", "repair", found.run)


def _sources(shell: Shell, place: str) -> Iterator[Source]:
    """Yields another copy; of an archive each run in turn. Nothing of it is trusted, and nothing there is changed."""
    path = Path(place)
    if path.is_file() and Path(shell.store.place).exists() and path.samefile(shell.store.place):
        raise CommandFailed(f"--from {place}: is the damaged store itself; name another copy")
    if path.is_file() and bundle.is_archive(path):
        yield from map(ExportSource, bundle.read(path))
    elif path.is_file() and _is_export(path):
        yield ExportSource(read(path))
    else:
        options = {} if "://" in place and not place.startswith("sqlite:") else {"read_only": True}
        with contextlib.closing(open_store(place, create=False, **options)) as store:
            yield store


def _is_export(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1) == b"{"


# set aside ----------------------------------------------------------------------------------------


def _set_aside(shell: Shell, run: str, reason: str, *, dry_run: bool, yes: bool) -> None:
    kept, _, lost, what = damage(shell.log.unchecked(), shell.log.head(run))
    report: dict[str, Any] = {"run": run, "kept": kept, "found": what, "dry_run": dry_run}
    if dry_run:
        shell.emit(report)
        shell.say("", f"{run} is intact up to event {kept}; then: {what or 'nothing'}")
        return
    if what:
        shell.confirm(f"{run} is intact up to event {kept}; then: {what}. Set aside what comes after it?", yes=yes)
    was_apart = shell.store.quarantined(run) is not None
    try:
        event = repair(shell.log, run, at=shell.clock.now_us(), reason=reason, by=current_user())
    except StoreBroken:
        rebuild(raw_store(shell.store))
        event = repair(shell.log, run, at=shell.clock.now_us(), reason=reason, by=current_user())
    except LogError as said:
        if what or not was_apart:
            raise
        shell.emit(report)
        shell.say("✓", str(said))
        return
    shell.emit(report | msgspec.to_builtins(event))
    for number in lost:
        shell.say("✗", f"message {number} is lost, and that is on record")
    found = f"set aside {counted(event.set_aside, 'event')} of {event.first} to {event.last}"
    shell.say("✓", (run, "bold"), f"  kept events up to {kept}{f', {found}' if event.first <= event.last else ''}")
    for doubt in event.doubts:
        shell.say("?", f"{doubt.tool} at step {doubt.step} may have happened")
    shell.say("", "It waits for a person now. Look at it, then resume it:")
    shell.say_next("show", run)
    shell.say_next("resume", run)
