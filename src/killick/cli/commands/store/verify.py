"""`killick store verify`: proves the record of a run, of the store, or of a file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

import click
import msgspec

from killick.archive import bundle
from killick.archive.export import export, read
from killick.audit import access_log as access_logs
from killick.audit.seal import SEALS, recorded_prunes
from killick.audit.seal_check import verify
from killick.cli.commands.store.maintenance import LISTED_MAX, open_damaged, some
from killick.cli.commands.store.seal import found_in, verify_file
from killick.cli.context import Shell, command
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.progress import progress
from killick.cli.secret_files import FILE
from killick.errors import ExportBroken, KillickError, ProofBroken, StoreBroken
from killick.history.phrasing import counted
from killick.history.vaults import Held
from killick.history.vaults import verify as verify_files
from killick.log import Log, Report, verification
from killick.log.paging import heads
from killick.permissions import open_input
from killick.store import open_store
from killick.store.memory import MemoryStore
from killick.store.records import Problem


@command("verify")
@click.argument("run", required=False)
@click.option("--checkpoint", type=FILE, help="Compare with a checkpoint that was kept elsewhere; needs --key.")
@click.option("--key", type=FILE, help="The public key that the seals are signed with, in PEM.")
@click.option("--proof", type=FILE, help="Verify a proof of one event instead; needs --key, and no store.")
@click.option("--archive", "archives", type=FILE, multiple=True,
              help="A file that pruned runs went into; with --checkpoint each is needed. May be repeated.")  # fmt: skip
@click.option("--access-log", type=FILE, help="Verify the access log of a server instead.")
@click.option("--files", is_flag=True, help="Also verify that the vault has every file of the recorded snapshots.")
@click.option("--restart", is_flag=True, help="Begin again, where an interrupted verification would continue.")
@click.option("--accept-loss", is_flag=True,
              help="Open a SQLite file whose -wal file is missing, without the commits that it had.")  # fmt: skip
def verify_command(
    shell: Shell, run: str | None, checkpoint: Path | None, key: Path | None, proof: Path | None,
    archives: tuple[Path, ...], access_log: Path | None, files: bool, restart: bool, accept_loss: bool,
) -> Exit:  # fmt: skip
    """Verify the log of one run, of the whole store, or of an exported or archived file.

    Recomputes the hash chain and the state, and compares the seals. Rebuilds wrong derived data. Quarantines a run
    whose log fails; other runs are not affected. A damaged page stops nothing, unless it has the schema of a SQLite
    file: each run is whole, damaged but exportable, or lost. Exits with 1 when something fails.

    A verification of the whole store that was interrupted continues where it was.

    A process that can write the store can also rewrite its seals, but not a checkpoint kept elsewhere: verify against
    one.
    """
    if accept_loss:
        open_store(shell.url, create=False, accept_loss=True).close()
    if access_log is not None:
        return _verify_access_log(shell, access_log)
    if proof is not None:
        return verify_file(shell, proof, key, checkpoint)
    if checkpoint is not None and key is None:
        raise CommandFailed("--checkpoint: needs --key PUB, the public key of the seals")
    if run is not None and Path(run).is_file():
        is_run = not bundle.is_archive(run) and shell.exists and shell.store.head(run) is not None
        if not is_run:
            return _verify_file(shell, run)
    damaged = open_damaged(shell)
    resumed = None if run or restart else verification.resume(shell.log)
    recorder = verification.Recorder(shell.log, shell.clock, resumed=resumed)
    before = None if resumed is None else resumed.report(shell.log)
    if before is not None:
        shell.note(f"continues after {counted(before.runs, 'run')} that were verified; --restart begins again")
    kept, public = (None if each is None else found_in(each) for each in (checkpoint, key))
    with _progress(shell, run, before) as seen:
        try:
            report = verify(
                shell.log, run, checkpoint=kept, key=public, progress=seen, resumed=before,
                keep=recorder.keep if run is None else lambda _: None,
            )  # fmt: skip
        except ProofBroken as error:
            place, code = (key, Exit.MISTYPED) if error.subject == "key" else (checkpoint, Exit.BAD)
            raise CommandFailed(f"{place}: {error.reason}", code) from None
    report.problems[:0] = damaged
    if run is None:
        recorder.finish(report)
    broken = _first_breaks(report)
    if checkpoint is not None and run is None:
        broken += _unproved(shell.log, archives)
    held: Held | None = None
    if files:
        with progress(shell) as tell:
            runs = [run] if run else [head.run for _, head in heads(shell.store)]
            held = verify_files(shell.log, runs, lambda done, total: tell("files", done, total))
    result = {"holds": report.holds and not broken}
    result |= {name: getattr(report, name) for name in ("runs", "events", "erased", "repaired", "seals")}
    found = {name: _fields(getattr(report, name)) for name in ("problems", "explained")}
    also = {} if held is None else {"files": msgspec.structs.asdict(held)}
    outcome = _outcome(shell.log, report)
    shell.emit({**result, **msgspec.structs.asdict(outcome), "broken": _fields(broken), **found, **also})
    by_key = ", the last signed with this key" if key is not None else ""
    _print_report(
        shell, report, broken, outcome, f"{by_key}{', as the checkpoint says' if checkpoint is not None else ''}"
    )
    if held is not None:
        _print_files(shell, held)
    return Exit.DONE if report.holds and not broken and (held is None or held.holds) else Exit.BAD


def _unproved(log: Log, archives: Sequence[Path]) -> list[Problem]:
    """Runs that were pruned, and whose archive was not given or is not the one on record."""
    given = set[str]()
    for path in archives:
        with contextlib.suppress(OSError), open_input(path) as file:
            given.add(file_digest(file, "sha256").hexdigest())
    what = "was pruned by {} into {}, which proves it no longer unless it is given: --archive FILE"
    return [
        Problem(run=run, seq=None, where="seals", what=what.format(pruned.by or "an unnamed user", pruned.file))
        for run, (pruned, _, _) in recorded_prunes(log).items()
        if pruned.sha256 not in given
    ]


def _print_files(shell: Shell, held: Held) -> None:
    for each in some(shell, held.broken):
        shell.say("✗", each)
    counts = f"{counted(held.snapshots, 'snapshot')} of {counted(held.runs, 'run')}"
    if held.holds and held.snapshots:
        shell.say("✓", f"their files are whole: {counts} in {', '.join(held.vaults)}")
    elif held.holds:
        shell.say("✓", "no files are on record")
    else:
        shell.say("", f"of {counts} not all files are whole")


def _verify_file(shell: Shell, path: str) -> Exit:
    """Prove every run of an export or an archive."""
    found, broken = bundle.Held(0, 0), None
    try:
        if bundle.is_archive(path):
            with progress(shell) as tell:
                found = bundle.verify(path, progress=tell)
        else:
            exported = read(path)
            exported.verify(exported.store(MemoryStore))
            found = bundle.Held(1, exported.header.events)
    except ExportBroken as error:
        broken = error.reason
    shell.emit({"holds": broken is None, "runs": found.runs, "events": found.events, "broken": broken})
    if broken is not None:
        shell.say("✗", (path, "bold"), f"  {broken}")
    else:
        shell.say("✓", "the file is intact: ", f"{counted(found.runs, 'run')}, {counted(found.events, 'event')}")
    return Exit.DONE if broken is None else Exit.BAD


def _first_breaks(report: Report) -> list[Problem]:
    """The first problem of each run that fails verification, and the problems of the store itself."""
    names = dict.fromkeys(problem.run for problem in report.problems if problem.run and not problem.healed)
    firsts = [report.first(name) for name in names]
    loose = [problem for problem in report.problems if problem.run is None and not problem.healed]
    return [problem for problem in firsts if problem is not None] + loose


def _fields(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(problem) for problem in problems]


class Outcome(msgspec.Struct, frozen=True):
    """How many runs are whole, and which of the others can still be exported or not."""

    whole: int
    exportable: tuple[str, ...]
    lost: tuple[str, ...]


def _outcome(log: Log, report: Report) -> Outcome:
    names = {each.run for each in report.problems if each.run and not each.healed and each.where != "seals"}
    failing = [run for run in report.broken if run in names]
    exportable = tuple(run for run in failing if _is_exportable(log, run))
    return Outcome(
        whole=max(report.runs - sum(_has_head(log, run) for run in failing), 0),
        exportable=exportable,
        lost=tuple(run for run in failing if run not in exportable),
    )


def _has_head(log: Log, run: str) -> bool:
    with contextlib.suppress(StoreBroken):
        return log.store.head(run) is not None
    return False


def _is_exportable(log: Log, run: str) -> bool:
    try:
        export(log, run)
    except (KillickError, msgspec.MsgspecError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _progress(shell: Shell, run: str | None, before: Report | None) -> Generator[Callable[[str, int], None]]:
    """Yields a function of a run and how many of its events were verified."""
    done: Counter[str] = Counter() if before is None else Counter({"": before.events})
    total = 0
    with contextlib.suppress(StoreBroken):  # then the total is unknown
        found = [shell.log.head(shell.run(run))] if run else [head for _, head in heads(shell.store)]
        # Sealed events are read once more.
        total = sum(head.seq - head.base for head in found) * (1 if shell.store.head(SEALS) is None else 2)
    with progress(shell) as tell:

        def seen(name: str, events: int) -> None:
            done[""] += events - done[name]
            done[name] = events
            tell("verifying", done[""], total)

        yield seen


def _print_report(shell: Shell, report: Report, broken: Sequence[Problem], outcome: Outcome, proved: str) -> None:
    for problem in broken:
        at = f"breaks at event {problem.seq}: " if problem.seq is not None else ""
        shell.say("✗", (problem.run or shell.store.place, "bold"), f"  {at}{problem.what} ({problem.where})")
        if problem.run and problem.where != "seals":
            shell.say_next("store", "repair", problem.run)
    healed = {(problem.run or shell.store.place, problem.where) for problem in report.problems if problem.healed}
    for name, where in sorted(healed):
        shell.say("~", (name, "bold"), f"  {where} differed from the log: rebuilt")
    for problem in report.explained:
        shell.say("~", (problem.run or "", "bold"), f"  {problem.what}")
    if report.holds and not broken:
        erased = f", {counted(report.erased, 'value')} erased on purpose" if report.erased else ""
        repaired = f", {counted(report.repaired, 'repair')} on record" if report.repaired else ""
        counts = f"{counted(report.runs, 'run')}, {counted(report.events, 'event')}"
        shell.say("✓", f"the record is intact: {counts}{erased}{repaired}")
        if report.seals:
            shell.say("✓", f"and matches its seals: {counted(report.seals, 'seal')}{proved}")
    else:
        _print_outcome(shell, report, broken, outcome)


def _print_outcome(shell: Shell, report: Report, broken: Sequence[Problem], outcome: Outcome) -> None:
    """What fails, what of that can still be exported, and the next move."""
    differ = {problem.run for problem in broken if problem.run and problem.where == "seals"}
    runs = len(outcome.exportable) + len(outcome.lost)
    if runs or not differ:
        total = outcome.whole + runs
        shell.say("", f"{counted(runs, 'run')} of {total:,} {'fails' if runs == 1 else 'fail'} verification")
    for what, names in (("can still be exported", outcome.exportable), ("cannot be exported", outcome.lost)):
        if names:
            more = f" and {len(names) - LISTED_MAX:,} more" if len(names) > LISTED_MAX else ""
            shell.say("", f"{counted(len(names), 'run')} {what}: {', '.join(names[:LISTED_MAX])}{more}")
    if differ:
        shell.say("", f"{counted(len(differ), 'run')} {'does' if len(differ) == 1 else 'do'} not match the seals")
    if runs or any(problem.run is None and problem.where != "seals" for problem in broken):
        shell.say("", "Fetch what is damaged from a backup, an archive or an export, or from other runs here:")
        shell.say_next("store", "repair", "--from", "BACKUP")


def _verify_access_log(shell: Shell, path: Path) -> Exit:
    with path.open("rb") as file:
        count, broken = access_logs.first_broken(shell.store, file)
    shell.emit({"lines": count, "broken": broken})
    if not shell.json:
        told = "each follows the one before" if broken is None else f"line {broken} was changed, or follows another one"
        shell.print(f"{path}: {counted(count, 'line')} read; {told}")
    return Exit.DONE if broken is None else Exit.BAD
