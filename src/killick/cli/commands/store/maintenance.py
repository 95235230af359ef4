"""`killick store`: erase, rotate and export; and the helpers of the maintenance commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, TypeVar

import click
import msgspec
from rich.filesize import decimal

from killick.archive.export import export
from killick.audit.seal import SEALS
from killick.cli.context import Shell, command, current_user, dry_run_option, run_argument, yes_option
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.secret_files import FILE, new_secret
from killick.engine.control.commands import leased
from killick.errors import StoreBroken
from killick.history.phrasing import counted
from killick.log.log import Log
from killick.log.paging import heads
from killick.model import event_codec, page_events
from killick.model import events as e
from killick.store import open_store
from killick.store.records import ENDED, Problem

T = TypeVar("T")

LISTED_MAX: Final = 20
"""Runs and places of one sort that are listed; of the rest only the number."""


def some(shell: Shell, found: Collection[T]) -> Iterator[T]:
    """The first of the found ones, for a line each; says how many more there are."""
    yield from islice(found, LISTED_MAX)
    if len(found) > LISTED_MAX:
        shell.say("", (f"  and {len(found) - LISTED_MAX:,} more; --json lists them", "dim"))


def open_damaged(shell: Shell) -> list[Problem]:
    """Opens the store, and rebuilds its indexes first where a damaged one prevents that. Returns what was damaged."""
    found: list[Problem] = []
    try:
        try:
            shell.store  # noqa: B018
        except StoreBroken:
            with contextlib.closing(open_store(shell.url, create=False)) as raw:
                found = [each for each in raw.inspect(heal=True) if each.healed]
            shell.store  # noqa: B018
    except StoreBroken as error:
        why = f"{error.reason}: no run can be read; copy the file away and restore a backup"
        raise CommandFailed(f"{error.place}: {why}", Exit.BAD) from None
    return found


# erase --------------------------------------------------------------------------------------------


@command("erase")
@click.argument("run", required=False)
@click.option("--subject", metavar="NAME", help="Everything of a data subject, by destroying their key.")
@click.option("--step", metavar="N", help="The arguments, results and texts of a step.")
@click.option("--seq", metavar="N", type=int, help="The values of one event.")
@click.option("--reason", metavar="WHY", help="Why, for the record.")
@dry_run_option
@yes_option
def erase_command(
    shell: Shell,
    run: str | None,
    subject: str | None,
    step: str | None,
    seq: int | None,
    reason: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Erase values from the store for good.

    For personal data, or a secret that leaked. Their hashes and your reason stay, so that the record can still be
    verified and shows the erasure. A value that occurs in several places is erased in all of them.

    In an encrypted store, --subject destroys the key of a person: all their values are unreadable, in archives too.
    """
    if subject is not None:
        if run is not None or step is not None or seq is not None or reason is not None or dry_run:
            raise CommandFailed("--subject erases everything of one person; give it alone")
        erase_subject(shell, subject, yes=yes)
        return
    if run is None or reason is None:
        needs = "RUN, or --subject NAME" if run is None else "WHY"
        raise CommandFailed(f"store erase: needs {needs}; see killick store erase --help")
    run = shell.run(run)
    if (step is None) == (seq is None):
        raise CommandFailed("name what to erase: --step N or --seq N")
    if run == SEALS:
        raise CommandFailed(
            f"{run}: without its values nothing that was sealed could be proved; erase in the runs themselves"
        )
    seqs = _seqs(shell.log, run, step, seq)
    pieces = {digest for each in seqs for digest in shell.log.pieces_of(run, each)}
    others = _sharing(shell.log, run, seqs, pieces)
    what = f"the values of {counted(len(seqs), 'event')}: {_listed(seqs)}"
    purged = True
    if not dry_run:
        also = f" Parts of them are in {_listed(others)} too, and go from there." if others else ""
        row = shell.store.index(run)
        stuck = "" if row is not None and row.status in ENDED else " The run has not ended, and cannot pass them."
        shell.confirm(f"Erase {what} for good?{also}{stuck}", yes=yes)
        with leased(shell.log, run, shell.ids.new("command")) as log:
            purged = shell.log.erase(
                log, at=shell.clock.now_us(), reason=reason, seqs=seqs, pieces=sorted(pieces), by=current_user()
            )
    shell.emit({"run": run, "seqs": seqs, "values": len(pieces), "shared_with": others, "dry_run": dry_run}
               | {"purged": purged})  # fmt: skip
    shell.say("" if dry_run else "✓", f"would erase {what}" if dry_run else f"erased {what}; their hashes stay")
    if not purged:
        shell.say("~", "another process is reading: the bytes stay in the write-ahead log until it ends")


def erase_subject(shell: Shell, subject: str, *, yes: bool) -> None:
    """Destroys the key of a data subject."""
    shell.confirm(f"Destroy the key of {subject}? Nothing of theirs can be read again.", yes=yes)
    found = shell.client.store.erase(subject, by=current_user())
    shell.emit(msgspec.structs.asdict(found))
    shell.say("✓", f"destroyed the key of {subject}: {counted(found.runs, 'run')} unreadable, their logs still verify")
    if not found.in_backups:
        shell.say("~", "a backup of this store from before has the key: remove it, or it reads them again")
    if not found.purged:
        shell.say("~", "another process is reading: the wrapped key stays in the write-ahead log until it ends")


@command("rotate")
def rotate_command(shell: Shell) -> None:
    """Wrap the data keys of an encrypted store by a new master key.

    KILLICK_KEYS names the new key first, then the old one. Values are not rewritten, and workers need not stop.
    Afterwards the old key opens nothing, except a backup from before.

    \b
      KILLICK_KEYS=new.key,old.key killick store rotate
    """
    count = shell.client.store.rotate_keys(by=current_user())
    shell.emit({"keys": count})
    shell.say("✓", f"wrapped {counted(count, 'data key')} by the first master key; take the old one away")


@command("new-key", json=False)
@click.argument("file", type=FILE)
def new_key_command(shell: Shell, file: Path) -> None:
    """Make a master key, or another secret, in a new file that only you may read: 32 random bytes, as hexadecimal.

    \b
      killick store new-key master.key
    """
    with new_secret(file) as made:
        made.write(f"{shell.ids.key().hex()}\n".encode())
    shell.note(f"made a new key: {file}, keep it private; what is encrypted with it is lost with it")


def _listed(places: Sequence[int | str]) -> str:
    named = [f"@{place}" if isinstance(place, int) else place for place in places]
    more = [f"{len(named) - LISTED_MAX:,} more"] if len(named) > LISTED_MAX else []
    return ", ".join(named[:LISTED_MAX] + more)


_BETWEEN: Final = (
    e.FactDrawn, e.NoteMade, e.PlanMade, e.PlanReached, e.ContextChanged, e.MessageTaken,
    page_events.PageEvicted, page_events.PageFaulted, page_events.PagePinned,
)  # fmt: skip
"""Events that name the step after them, and do not belong to it."""


def _seqs(log: Log, run: str, step: str | None, seq: int | None) -> list[int]:
    """The events whose values are to go: in every generation, for a step that was rewound holds them still."""
    base = log.head(run).base
    rows = {row.seq: row for row in log.rows(run)}
    if seq is not None:
        found = [seq] if seq in rows else []
    else:
        events = ((each, event_codec.decode(row.body)) for each, row in rows.items())
        of_step = ((each, event) for each, event in events if getattr(event, "step", None) == step)
        found = [each for each, event in of_step if not isinstance(event, _BETWEEN)]
    if not found:
        raise CommandFailed(
            f"{run}: has no {f'event {seq}' if seq is not None else f'step {step}'}; killick show {run} lists them"
        )
    theirs = [each for each in found if each <= base]
    if theirs:
        raise CommandFailed(f"{run}: event {theirs[0]} is of the run that it was forked from; erase it there")
    found = [each for each in found if rows[each].data is not None]
    if not found:
        raise CommandFailed(f"{run}: there are no values to erase there, or they are erased already")
    return found


def _sharing(log: Log, run: str, seqs: Sequence[int], pieces: set[bytes]) -> list[int | str]:
    """Where else the same stored pieces are used: in other events of the run, and in other runs."""
    if not pieces:
        return []
    others = (row.seq for row in log.rows(run) if row.data is not None and row.seq not in seqs)
    found: list[int | str] = [seq for seq in others if not pieces.isdisjoint(log.pieces_of(run, seq))]
    names = (head.run for _, head in heads(log.store) if head.run != run)
    return found + [name for name in names if not pieces.isdisjoint(log.store.references(name).log)]


# export -------------------------------------------------------------------------------------------


@command("export", json=False)
@run_argument
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The file.  [default: stdout]")
def export_command(shell: Shell, run: str, output: Path | None) -> None:
    """Write a run to one file of JSON lines: its events, their values, and the hash chain that proves them.

    `killick time replay` and killick.testing.replay read the file without a store. It holds the data of the run:
    protect it.

    \b
      killick store export claim_17 -o claim_17.killick
    """
    data = export(shell.log, run)
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    shell.save(output, data)
    header = msgspec.json.decode(data.split(b"\n", 1)[0])
    shell.note(f"{output}: {counted(header['events'], 'event')}, {decimal(len(data))}")
