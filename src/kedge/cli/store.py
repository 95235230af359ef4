"""`kedge store`: doctor, repair, prune and erase; and what the commands that look after the record share."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kedge.cli import paint
from kedge.cli.exits import Exit, Told
from kedge.cli.shell import Shell, command, run_argument, somebody
from kedge.errors import LogError, StoreError
from kedge.log import repair
from kedge.log.log import Log
from kedge.log.verify import last_good
from kedge.model import events as e
from kedge.store.base import ENDED, READ_LIMIT, STORE_FORMAT, Head, RunQuery, RunRow, Store

LISTED_MAX: Final = 20
"""Troubles of one sort that are listed; of the rest only the number."""

WAL_BYTES_MAX: Final = 64_000_000
FREE_BYTES_MIN: Final = 200_000_000

yes_option: Final = click.option("--yes", is_flag=True, help="Do it without asking.")
dry_run_option: Final = click.option("--dry-run", is_flag=True, help="Only say what would be done.")


@contextmanager
def progress(shell: Shell, what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """A bar on stderr where somebody sees it; a function that says how much is done."""
    if not shell.err.is_terminal:
        yield lambda done: None
        return
    columns = TextColumn(what), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeRemainingColumn()
    with Progress(*columns, console=shell.err, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def say(shell: Shell, sign: str, *parts: str | tuple[str, str]) -> None:
    """A line with a sign before it, in the colour of what the sign says."""
    style = {"✓": "bold green", "✗": "bold red", "?": "bold red", "~": "yellow"}.get(sign, "")
    shell.out.print(Text.assemble((f"{sign} " if sign else "", style), *parts), soft_wrap=True)


def say_next(shell: Shell, *words: str) -> None:
    """The command to type next."""
    say(shell, "", (f"    {shell.typed(*words)}", "green"))


def many(count: int, what: str) -> str:
    """So many of something: 1 run, 2 runs."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def heads(store: Store) -> Iterator[Head]:
    """Every run's head, in order of creation."""
    after = 0
    while found := store.heads(after=after):
        yield from (head for _, head in found)
        after = found[-1][0]


# the store ----------------------------------------------------------------------------------------


@click.group("store", invoke_without_command=True, context_settings={"max_content_width": 100})
@click.pass_context
def store_command(context: click.Context) -> None:
    """Look after the store."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


class Trouble(msgspec.Struct, frozen=True):
    """Something that wants to be looked at: what is wrong, and what to type or do."""

    what: str
    next: str
    run: str | None = None


class Health(msgspec.Struct, kw_only=True):
    """How a store is. Sizes are None where there is no file."""

    place: str
    id: str
    format: int
    size_bytes: int | None = None
    wal_bytes: int | None = None
    free_bytes: int | None = None
    runs: dict[str, int]
    events: int
    values: int
    troubles: list[Trouble]


@command("doctor")
def doctor_command(shell: Shell) -> Exit:
    """How the store is, and what to do about it.

    Looks at sizes, statuses, runs that were set apart and runs whose process is gone; `kedge verify` proves the
    record itself. Changes nothing, and exits with 1 when there is something to do.
    """
    store = shell.client.store
    statuses: Counter[str] = Counter()
    values: set[bytes] = set()
    events = 0
    troubles: list[Trouble] = []
    found = list(heads(store))
    with progress(shell, "looking", len(found)) as tell:
        for count, head in enumerate(found, 1):
            row = store.index(head.run)
            statuses[row.status if row is not None else "unlisted"] += 1
            events += head.seq - head.base
            kept = store.references(head.run)
            values |= kept.log | kept.snapshots
            troubles += _troubles(shell, head, row)
            tell(count)
    health = Health(
        place=store.place, id=store.id, format=STORE_FORMAT, runs=dict(statuses), events=events, values=len(values),
        troubles=troubles,
    )  # fmt: skip
    _measure(shell, health)
    if shell.json:
        shell.emit(msgspec.to_builtins(health))
    else:
        _print_health(shell, health)
    return Exit.BAD if health.troubles else Exit.DONE


def _troubles(shell: Shell, head: Head, row: RunRow | None) -> Iterator[Trouble]:
    store, run = shell.client.store, head.run
    reason = store.quarantined(run)
    if reason is not None:
        yield Trouble(f"set apart: {reason}", shell.typed("store", "repair", run), run)
    if row is None:
        yield Trouble("is in no list", shell.typed("verify", run), run)
    elif head.holder is not None and row.status not in ENDED and reason is None:
        ran_out = head.lease_until_us is not None and head.lease_until_us <= shell.client.clock.now_us()
        if ran_out or not store.lives(head.holder):
            gone = f"left at event {head.seq} by {head.holder}, which is gone"
            yield Trouble(gone, shell.typed("resume", run), run)


def _measure(shell: Shell, health: Health) -> None:
    """Sizes, and what is wrong with them."""
    path = Path(health.place)
    if not path.is_file():
        return
    wal = path.with_name(f"{path.name}-wal")
    health.size_bytes = path.stat().st_size
    health.wal_bytes = wal.stat().st_size if wal.exists() else 0
    health.free_bytes = shutil.disk_usage(path.parent).free
    if health.wal_bytes > WAL_BYTES_MAX:
        told = f"the write-ahead log has grown to {decimal(health.wal_bytes)}"
        health.troubles.append(
            Trouble(told, "end whatever reads the store for long; it shrinks when all have closed it")
        )
    if health.free_bytes < FREE_BYTES_MIN:
        told = f"only {decimal(health.free_bytes)} are free on the device"
        health.troubles.append(Trouble(told, f"make room; {shell.typed('store', 'prune')} forgets old runs"))


def _print_health(shell: Shell, health: Health) -> None:
    sizes = [(health.size_bytes, ""), (health.wal_bytes, " in the write-ahead log"), (health.free_bytes, " free")]
    rows = {
        "store": health.place,
        "id": health.id,
        "format": str(health.format),
        "size": ", ".join(f"{decimal(size)}{what}" for size, what in sizes if size),
        "runs": ", ".join(f"{count:,} {status}" for status, count in sorted(health.runs.items())) or "none",
        "events": f"{health.events:,}",
        "values": f"{health.values:,}",
    }
    for name, told in rows.items():
        if told:
            say(shell, "", (f"{name:<8}", "dim"), told)
    shell.out.print()
    for trouble in health.troubles[:LISTED_MAX]:
        say(shell, "✗", (f"{trouble.run}  " if trouble.run else "", "bold"), trouble.what)
        say(shell, "", (f"    {trouble.next}", "green"))
    if len(health.troubles) > LISTED_MAX:
        say(shell, "", f"and {len(health.troubles) - LISTED_MAX:,} more; --json lists them all")
    if not health.troubles:
        say(shell, "✓", "nothing to do; ", (shell.typed("verify"), "green"), " proves the record")


@command("repair")
@run_argument
@click.option("--reason", metavar="WHY", default="repaired on the command line", help="Why, for the record.")
@dry_run_option
@yes_option
def repair_command(shell: Shell, run: str, reason: str, dry_run: bool, yes: bool) -> None:
    """Set aside what does not hold of a run.

    The run then waits for a person. Nothing is deleted: what is set aside stays in the store, and every effect in it
    is in doubt from then on.
    """
    run = shell.run(run)
    kd = shell.client
    kept, _, what = last_good(kd.log, kd.log.head(run))
    told: dict[str, Any] = {"run": run, "kept": kept, "found": what, "dry_run": dry_run}
    if dry_run:
        shell.emit(told) if shell.json else say(shell, "", f"{run} holds up to event {kept}; then: {what or 'nothing'}")
        return
    if what:
        _agreed(shell, f"{run} holds up to event {kept}; then: {what}. Set aside what comes after it?", yes=yes)
    was_apart = kd.store.quarantined(run) is not None
    try:
        event = repair(kd.log, run, at=kd.clock.now_us(), reason=reason, by=somebody())
    except LogError as said:
        if what or not was_apart:
            raise
        shell.emit(told) if shell.json else say(shell, "✓", str(said))
        return
    if shell.json:
        shell.emit(told | msgspec.to_builtins(event))
        return
    found = f"set aside {many(event.set_aside, 'event')} of {event.first} to {event.last}"
    say(shell, "✓", (run, "bold"), f"  kept events up to {kept}, {found}")
    for doubt in event.doubts:
        say(shell, "?", f"{doubt.tool} at step {doubt.step} may have happened")
    say(shell, "", "It waits for a person now. Look at it, then let it go on:")
    say_next(shell, "show", run)
    say_next(shell, "resume", run)


def _agreed(shell: Shell, question: str, *, yes: bool) -> None:
    if not shell.confirm(question, yes=yes):
        raise Told("nothing was changed", Exit.BAD)


# prune --------------------------------------------------------------------------------------------


@command("prune")
@click.option("--ended-before", metavar="WHEN", default="30d", show_default=True, help="How long ago, or a date.")
@dry_run_option
@yes_option
def prune_command(shell: Shell, ended_before: str, dry_run: bool, yes: bool) -> None:
    """Forget runs that ended long ago.

    With them go the values that nothing needs any more. A run stays while a fork stands on it, a parent may still look
    at it, or others may need what it says was erased. Ids stay taken, and rights that were
    used up stay used. The file keeps its size: later runs use the room.
    """
    kd = shell.client
    cut = paint.moment_of(ended_before, kd.clock.now_us())
    going, staying = _prunable(kd.log, cut)
    if not shell.json:
        _print_prunable(shell, cut, going, staying)
    if going and not dry_run:
        _agreed(shell, f"Forget {many(len(going), 'run')} for good?", yes=yes)
    removed: list[str] = []
    with progress(shell, "pruning", len(going)) as tell:
        for row in () if dry_run else going:
            why = _removed(kd.store, row)
            if why is None:
                removed.append(row.run)
            else:
                staying[row.run] = why
            tell(len(removed))
    swept = 0 if dry_run else _swept(shell)
    if shell.json:
        gone = [row.run for row in going] if dry_run else removed
        shell.emit({"removed": gone, "kept": staying, "values": swept, "dry_run": dry_run})
    elif not dry_run:
        told = f"forgot {many(len(removed), 'run')} and {many(swept, 'value')} that nothing needed"
        say(shell, "✓", told)


def _prunable(log: Log, cut: int) -> tuple[list[RunRow], dict[str, str]]:
    """Runs that may go, forks before what they stand on; and of the old ones that may not, why."""
    store = log.store
    forks: defaultdict[str, set[str]] = defaultdict(set)
    for head in heads(store):
        if head.parent is not None:
            forks[head.parent].add(head.run)
    going: list[RunRow] = []
    staying: dict[str, str] = {}
    before: int | None = None
    while rows := store.runs(RunQuery(status=ENDED, until_us=cut), before=before, limit=1_000):
        before = rows[-1].number
        for row in rows:
            standing = forks[row.run] - {gone.run for gone in going}
            why = f"{min(standing)} is a fork of it" if standing else _needed(log, row.run)
            if why is None:
                going.append(row)
            else:
                staying[row.run] = why
    return going, staying


def _needed(log: Log, run: str) -> str | None:
    """Why a run that has ended is still needed."""
    if log.store.quarantined(run) is not None:
        return "it is set apart; repair it first"
    erased = [row for row in log.rows(run) if row.body.startswith(b'{"kind":"value.erased"')]
    if any(getattr(e.decode(row.body), "pieces", ()) for row in erased):
        return "it says which values were erased, and others may have shared them"
    parent = log.state(run).fold.facts.parent
    above = log.store.index(parent) if parent is not None else None
    return f"its parent {parent} has not ended" if above is not None and above.status not in ENDED else None


def _removed(store: Store, row: RunRow) -> str | None:
    """Take a run out, if it is still as it was when it was chosen; otherwise say why not."""
    now = store.index(row.run)
    if now is None or (now.status, now.changed_at_us) != (row.status, row.changed_at_us):
        return "somebody went on with it"
    try:
        store.remove(row.run)
    except StoreError as refused:
        return str(refused)
    return None


def _swept(shell: Shell) -> int:
    total = 0
    with progress(shell, "sweeping values", None) as tell:
        while swept := shell.client.store.sweep(limit=READ_LIMIT):
            total += swept
            tell(total)
    return total


def _print_prunable(shell: Shell, cut: int, going: Sequence[RunRow], staying: dict[str, str]) -> None:
    say(shell, "", f"{many(len(going), 'run')} ended before {paint.moment(cut)} and can go")
    for row in going[:LISTED_MAX]:
        ended = paint.ago(row.changed_at_us, shell.client.clock.now_us())
        say(shell, "", "  ", (row.run, "bold"), f"  {row.agent}, {row.status} {ended}")
    if len(going) > LISTED_MAX:
        say(shell, "", f"  and {len(going) - LISTED_MAX:,} more")
    for run, why in list(staying.items())[:LISTED_MAX]:
        say(shell, "", ("  stays: ", "dim"), (run, "bold"), f"  {why}")


# erase --------------------------------------------------------------------------------------------


@command("erase")
@run_argument
@click.option("--step", metavar="N", help="Everything that a step was given, returned and said.")
@click.option("--seq", metavar="N", type=int, help="The values of one event.")
@click.option("--reason", metavar="WHY", required=True, help="Why, for the record.")
@dry_run_option
@yes_option
def erase_command(
    shell: Shell, run: str, step: str | None, seq: int | None, reason: str, dry_run: bool, yes: bool
) -> None:
    """Take values out of the store for good.

    For personal data, or a secret that leaked. Their hashes and your reason stay, so that the record still proves
    itself and says that they were erased. A value that is used in several places goes from all of them.
    """
    run = shell.run(run)
    kd = shell.client
    if (step is None) == (seq is None):
        raise Told("name what to erase: --step N or --seq N")
    seqs = _seqs(kd.log, run, step, seq)
    pieces = {digest for each in seqs for digest in kd.log.pieces_of(run, each)}
    others = _sharing(kd.log, run, seqs, pieces)
    what = f"the values of {many(len(seqs), 'event')}: {_listed(seqs)}"
    if not dry_run:
        also = f" Parts of them are in {_listed(others)} too, and go from there." if others else ""
        row = kd.store.index(run)
        stuck = "" if row is not None and row.status in ENDED else " The run has not ended, and cannot go on past them."
        _agreed(shell, f"Erase {what} for good?{also}{stuck}", yes=yes)
        _erase(shell, run, seqs, pieces, reason)
    if shell.json:
        shell.emit({"run": run, "seqs": seqs, "values": len(pieces), "shared_with": others, "dry_run": dry_run})
    else:
        say(shell, "" if dry_run else "✓", f"would erase {what}" if dry_run else f"erased {what}; their hashes stay")


def _listed(places: Sequence[int | str]) -> str:
    named = [f"@{place}" if isinstance(place, int) else place for place in places]
    more = [f"{len(named) - LISTED_MAX:,} more"] if len(named) > LISTED_MAX else []
    return ", ".join(named[:LISTED_MAX] + more)


def _erase(shell: Shell, run: str, seqs: list[int], pieces: set[bytes], reason: str) -> None:
    kd = shell.client
    log = kd.log.open(run, holder=kd.ids.new("command"), seconds=30)
    try:
        kd.log.erase(log, at=kd.clock.now_us(), reason=reason, seqs=seqs, pieces=sorted(pieces), by=somebody())
    finally:
        kd.store.release(run, epoch=log.epoch)


_BETWEEN: Final = (e.FactDrawn, e.NoteMade, e.PlanMade, e.PlanReached, e.ContextChanged, e.MessageTaken)
"""Events that name the step they stand before, and are not of it."""


def _seqs(log: Log, run: str, step: str | None, seq: int | None) -> list[int]:
    """The events whose values are to go: in every generation, for a step that was rewound holds them still."""
    base = log.head(run).base
    rows = {row.seq: row for row in log.rows(run)}
    if seq is not None:
        found = [seq] if seq in rows else []
    else:
        events = ((each, e.decode(row.body)) for each, row in rows.items())
        of_step = ((each, event) for each, event in events if getattr(event, "step", None) == step)
        found = [each for each, event in of_step if not isinstance(event, _BETWEEN)]
    if not found:
        raise Told(
            f"{run}: has no {f'event {seq}' if seq is not None else f'step {step}'}; kedge show {run} lists them"
        )
    theirs = [each for each in found if each <= base]
    if theirs:
        raise Told(f"{run}: event {theirs[0]} is of the run that it was forked from; erase it there")
    found = [each for each in found if rows[each].data is not None]
    if not found:
        raise Told(f"{run}: there are no values to erase there, or they are erased already")
    return found


def _sharing(log: Log, run: str, seqs: Sequence[int], pieces: set[bytes]) -> list[int | str]:
    """Where else the same stored pieces are used: in other events of the run, and in other runs."""
    if not pieces:
        return []
    others = (row.seq for row in log.rows(run) if row.data is not None and row.seq not in seqs)
    found: list[int | str] = [seq for seq in others if not pieces.isdisjoint(log.pieces_of(run, seq))]
    names = (head.run for head in heads(log.store) if head.run != run)
    return found + [name for name in names if not pieces.isdisjoint(log.store.references(name).log)]


for _part in (doctor_command, repair_command, prune_command, erase_command):
    store_command.add_command(_part)
