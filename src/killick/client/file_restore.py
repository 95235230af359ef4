"""Restores files of a run's workspace on request; the run itself does not move.

The holder of the run's lease owns its folder. So a restore into that folder takes the lease, and records its changes in
the run's log, with a snapshot from before.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from killick.engine.control.commands import leased
from killick.engine.engine import Engine
from killick.engine.leases import LEASE_SECONDS, Leases
from killick.engine.steps.workspace_folders import hidden_of, owner_of
from killick.engine.steps.workspace_grants import grant, refuse_ungranted
from killick.engine.steps.workspace_hook import captured
from killick.engine.steps.workspace_hook import restored as as_entry
from killick.errors import WorkspaceRefused
from killick.history import workspace_files
from killick.history.workspace_files import Files, id_of
from killick.log.writer import RunLog
from killick.model import events as e
from killick.model.ledger import LedgerFacts
from killick.workspace import tree
from killick.workspace.restore import Restored
from killick.workspace.workspace import Snapshot, Workspace


class Restoration(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a restore, or its preview. `before` is the snapshot of the earlier files; `left` lists files that
    could not be restored or removed; `elsewhere` means not in the run's own folder."""

    run: str
    at: str
    snapshot: str
    folder: str
    paths: tuple[str, ...]
    written: int
    removed: int
    left: tuple[str, ...] = ()
    before: str | None = None
    elsewhere: bool = False
    dry_run: bool = False


def restored(
    engine: Engine,
    run: str,
    at: str | None = None,
    *,
    snapshot: str | None = None,
    paths: Sequence[str | os.PathLike[str]] = (),
    to: str | os.PathLike[str] | None = None,
    by: str | None = None,
    dry_run: bool = False,
) -> Restoration:
    """Restores files of a run at a position, or of a snapshot by its id; into its own folder, or into another.

    The own folder is a path on record. It is changed if it was granted; `to` that names it grants it.
    """
    if (at is None) == (snapshot is None):
        raise WorkspaceRefused(run, "name a position or a snapshot to restore, and not both")
    log = engine.log
    found = workspace_files.at(log, run, at) if at is not None else workspace_files.by_id(log, run, str(snapshot))
    with found:
        wanted = [workspace_files.typed(os.fspath(path), found.folder) for path in paths]
        if to is not None and os.path.realpath(to) == os.path.realpath(found.folder):
            grant(engine.store, found.folder)
        elif to is not None:
            return _elsewhere(found, Path(os.path.abspath(to)), wanted, owner_of(engine.store, run), dry_run=dry_run)
        return _in_place(engine, found, wanted, by=by, dry_run=dry_run)


def _elsewhere(found: Files, to: Path, paths: Sequence[bytes], owner: str, *, dry_run: bool) -> Restoration:
    """Restores into another, empty folder."""
    if Path(os.path.realpath(to)).is_relative_to(os.path.realpath(found.folder)):
        raise WorkspaceRefused(str(to), "is inside the run's own folder; name one outside")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise WorkspaceRefused(str(to), "exists and is not empty; name an empty or a new folder")
    for path in paths:
        found.find(os.fsdecode(path))
    if dry_run:
        below = [path for path, _ in tree.walk(found.top, found.vault.load) if _is_wanted(path, paths)]
        return _result(found, to, paths, Restored(len(below), 0), dry_run=True)
    with Workspace(to, gitignore=False, vault=found.vault) as place:
        return _result(found, to, paths, place.restore(found.root, paths or None, owner))


def _in_place(engine: Engine, found: Files, paths: Sequence[bytes], *, by: str | None, dry_run: bool) -> Restoration:
    refuse_ungranted(engine.store, found.folder)
    with _held(engine, found.run) as handle:
        facts = handle.ledger.facts
        if facts.files_due is not None:
            due = id_of(e.from_text(facts.files_due))
            reason = f"resuming it restores snapshot {due}; resume it first, or restore into another folder"
            raise WorkspaceRefused(found.run, reason)
        owner = owner_of(engine.store, found.run)
        with _workspace(engine, found, facts) as place:
            _refuse_unknown(found, place.path, paths)
            if dry_run:
                now = place.capture(owner).root if place.path.is_dir() else None
                return _result(found, place.path, paths, _preview(found, now, paths), dry_run=True)
            done = place.restore(found.root, paths or None, owner)
            if done.written or done.removed or done.left:
                _recorded(engine, handle, found, paths, done, place.capture(owner), by=by)
            return _result(found, place.path, paths, done)


@contextlib.contextmanager
def _held(engine: Engine, run: str) -> Generator[RunLog]:
    """Holds the lease of a run while its files are restored. Raises RunBusy if another process holds it."""
    holder, since = engine.ids.new("command"), engine.clock.monotonic()
    with leased(engine.log, run, holder, seconds=LEASE_SECONDS) as handle:
        leases = Leases(engine.store, holder, engine.clock)
        # The store refuses an append after the lease is lost, so the loss needs no handling.
        leases.hold(run, handle.epoch, seconds=LEASE_SECONDS, since=since, lost=lambda _: None)
        try:
            yield handle
        finally:
            leases.close()


def _workspace(engine: Engine, found: Files, facts: LedgerFacts) -> Workspace:
    """The workspace as the run declares it: excluded paths stay untouched."""
    return Workspace(
        found.folder, exclude=facts.exclude, gitignore=facts.gitignore, vault=found.vault,
        hidden=hidden_of(engine.store), clock=engine.clock,
    )  # fmt: skip


def _refuse_unknown(found: Files, folder: Path, paths: Sequence[bytes]) -> None:
    """Refuses a path that existed neither then nor now; a path that exists only now is removed."""
    for path in paths:
        if not os.path.lexists(os.path.join(os.fsencode(folder), path)):
            found.find(os.fsdecode(path))


def _is_wanted(path: bytes, paths: Sequence[bytes]) -> bool:
    return not paths or any(path == each or path.startswith(each + b"/") or not each for each in paths)


def _preview(found: Files, now: bytes | None, paths: Sequence[bytes]) -> Restored:
    """The preview of a restore."""
    load = found.vault.load
    before = tree.root(now, load) if now is not None else None
    changes = [
        change for change in tree.changes(before, found.top, load)
        if change.path and _is_wanted(change.path, paths)
    ]  # fmt: skip
    gone = sum(change.after is None for change in changes)
    return Restored(len(changes) - gone, gone)


def _recorded(
    engine: Engine,
    handle: RunLog,
    found: Files,
    paths: Sequence[bytes],
    done: Restored,
    now: Snapshot,
    *,
    by: str | None,
) -> None:
    """Records the restore in the run's log, with a snapshot of the files for the next step."""
    at = engine.clock.now_us()
    named = [workspace_files.shown(path) for path in paths] or None
    entries = [as_entry(done, e.to_text(found.root), "asked", at=at, by=by, paths=named)]
    if handle.ledger.files_at(handle.seq) != e.to_text(now.root):
        entries.append(captured(now, handle.seq + 1, at=at, changed=done.written + done.removed))
    handle.append(*entries)


def _result(found: Files, to: Path, paths: Sequence[bytes], done: Restored, *, dry_run: bool = False) -> Restoration:
    elsewhere = os.path.realpath(to) != os.path.realpath(found.folder)
    return Restoration(
        run=found.run, at=found.at, snapshot=found.root.hex(), folder=str(to),
        paths=tuple(map(workspace_files.shown, paths)), written=done.written, removed=done.removed,
        left=tuple(done.left),
        before=None if dry_run or elsewhere or not done.before else done.before.hex(), elsewhere=elsewhere,
        dry_run=dry_run,
    )  # fmt: skip
