"""The vaults of a store's runs: location, recorded snapshots, verification and cleaning.

A vault knows snapshots by owner: the store and the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from killick.engine.steps import workspace_folders
from killick.engine.steps.workspace_folders import (
    home_of,
    is_erased,
    is_ours,
    opened_vault,
    owner_of,
    subject_vaults,
    vault_place,
)
from killick.errors import KillickError, WorkspaceRefused
from killick.history.phrasing import counted
from killick.log.log import Log
from killick.model import event_codec
from killick.model import events as e
from killick.model.ledger import Ledger
from killick.store.records import Condition
from killick.text import size_text
from killick.workspace.inotify import is_trusted
from killick.workspace.tree import Id
from killick.workspace.vault.vault import Vault
from killick.workspace.vault.verify import Progress


def on_record(log: Log, run: str) -> Iterator[Id]:
    """Returns every snapshot that a run's log names, in order: at boundaries, and before restores."""
    for capture in log.ledger(run).captures:
        yield e.from_text(capture.root)
    for row in log.rows(run):
        if row.body.startswith(b'{"kind":"workspace.restored"'):
            event = event_codec.decode(row.body)
            if isinstance(event, e.WorkspaceRestored):
                yield from (e.from_text(root) for root in (event.root, event.before) if root is not None)


def vault_of(log: Log, run: str, ledger: Ledger | None = None) -> Vault:
    """Returns the vault of a run's snapshots. One that moved with its store is found next to it."""
    facts = (ledger or log.ledger(run)).facts
    if facts.workspace is None or facts.vault is None:
        raise WorkspaceRefused(run, "has no workspace, so no files were recorded")
    vault = opened_vault(workspace_folders.vault_of(log.key_of(run), facts, log.store), log.store)
    if vault.path.is_dir():
        return vault
    raise WorkspaceRefused(run, f"the vault of its files, {facts.vault}, is not here; restore it, or look there")


class Vaults:
    """Reads objects from several vaults; closes them together."""

    def __init__(self, vaults: Iterable[Vault]) -> None:
        self._vaults = list({vault.path: vault for vault in vaults}.values())

    def __enter__(self) -> Vaults:
        return self

    def __exit__(self, *_: object) -> None:
        for vault in self._vaults:
            vault.close()

    def load(self, ref: Id) -> bytes:
        for vault in self._vaults[:-1]:
            if vault.has([ref]):
                return vault.load(ref)
        return self._vaults[-1].load(ref)


# verification ---------------------------------------------------------------------------------------


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The result of verifying snapshots: their number, runs and vaults; and the problems, in words."""

    runs: int
    snapshots: int
    vaults: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.broken


def verify(log: Log, runs: Collection[str], progress: Progress | None = None) -> Held:
    """Verifies that every recorded snapshot of these runs is complete in its vault. Those of an erased data subject are
    gone on purpose."""
    kept: dict[Path, tuple[Vault, dict[Id, None]]] = {}
    broken: list[str] = []
    count, snapshots = 0, 0
    for run in runs:
        ledger = log.ledger(run)
        roots = dict.fromkeys(on_record(log, run)) if ledger.facts.workspace is not None else {}
        try:
            if not roots or is_erased(workspace_folders.vault_of(log.key_of(run), ledger.facts, log.store), log.store):
                continue
            count, snapshots = count + 1, snapshots + len(roots)
            vault = vault_of(log, run, ledger)
        except WorkspaceRefused as refused:
            broken.append(str(refused))
            continue
        kept.setdefault(vault.path, (vault, {}))[1].update(roots)
    for vault, wanted in kept.values():
        try:
            with Vaults([vault]):
                broken += vault.verify(list(wanted), progress)
        except KillickError as error:
            broken.append(str(error))
    return Held(runs=count, snapshots=snapshots, vaults=tuple(map(str, kept)), broken=tuple(broken))


# cleaning -------------------------------------------------------------------------------------------


class Cleaned(msgspec.Struct, frozen=True, kw_only=True):
    """The result of cleaning a vault, or its preview: unreferenced snapshots, and the freed bytes. `problem` says why
    it failed."""

    vault: str
    snapshots: int = 0
    bytes_freed: int = 0
    bytes_kept: int = 0
    problem: str | None = None


def of_runs(log: Log, runs: Iterable[str]) -> set[Path]:
    """Returns the vaults of a store: the one next to it, those that these runs name, and the data subjects' in them."""
    homes = {vault_place(log.store), *(home_of(vault)[0] for vault in _recorded(log, runs))}
    ours = {place for place in homes if place.is_dir() and is_ours(place, log.store) and _is_original(log, place)}
    return ours.union(*(subject_vaults(place, log.store) for place in ours))


def remove_erased(log: Log, vaults: Iterable[Path]) -> None:
    """Deletes the vaults of data subjects whose key was destroyed."""
    for place in vaults:
        if is_erased(place, log.store):
            shutil.rmtree(place, ignore_errors=True)


def _recorded(log: Log, runs: Iterable[str]) -> set[Path]:
    return {Path(vault) for run in runs if (vault := log.ledger(run).facts.vault) is not None}


def _is_original(log: Log, vault: Path) -> bool:
    """A copied store has the original's id, but must not clean the original's vault."""
    other = vault.with_suffix(".db")
    return vault == vault_place(log.store) or not other.exists() or other.resolve() == Path(log.store.place).resolve()


def clean(log: Log, vaults: Collection[Path], *, going: Collection[str] = (), dry_run: bool = False) -> list[Cleaned]:
    """Drops the snapshots of runs that are not in the store, and frees their space; `going` count as removed."""
    prefix, kept = owner_of(log.store, ""), [path for path in sorted(vaults) if not is_erased(path, log.store)]

    def stays(owner: str) -> bool:
        run = owner.removeprefix(prefix)
        return run not in going and log.store.head(run) is not None

    if not dry_run:
        remove_erased(log, vaults)
    return [_cleaned(opened_vault(path, log.store), prefix, stays, dry_run=dry_run) for path in kept]


def _cleaned(vault: Vault, prefix: str, stays: Callable[[str], bool], *, dry_run: bool) -> Cleaned:
    path = vault.path
    try:
        with Vaults([vault]):
            if dry_run:
                wanted = [each.owner for each in vault.references() if each.owner.startswith(prefix)]
                gone = {owner for owner in set(wanted) if not stays(owner)}
                count = sum(owner in gone for owner in wanted)
                swept = vault.sweep(dry_run=True, without=gone.__contains__)
            else:
                count = vault.forget_owners(prefix, stays)
                swept = vault.sweep()
    except KillickError as error:
        return Cleaned(vault=str(path), problem=str(error))
    return Cleaned(vault=str(path), snapshots=count, bytes_freed=swept.bytes_freed, bytes_kept=swept.bytes_kept)


# how it is ------------------------------------------------------------------------------------------


def condition(log: Log, runs: Iterable[str]) -> Condition | None:
    """Returns the condition of a store's vaults; None if there are none."""
    places = _recorded(log, runs)
    if (own := vault_place(log.store)).is_dir():
        places.add(own)
    if not places:
        return None
    described: list[str] = []
    wrong: list[str] = []
    for place in sorted(places):
        if not place.is_dir() or not is_ours(place, log.store):
            wrong.append(f"{place} is not here, and runs have their files there; bring it back")
            continue
        try:
            with Vaults([vault := opened_vault(place, log.store)]):
                kept = len({each.root for each in vault.references()})
                described.append(f"{place}, {counted(kept, 'snapshot')}, {size_text(vault.size_bytes())}")
                wrong += [
                    f"a restore of {each.workspace} was interrupted; the next operation there finishes it"
                    for each in vault.unfinished()
                ]
        except KillickError as error:
            wrong.append(str(error))
            continue
        if not is_trusted(str(place).encode()):
            wrong.append(
                f"{place} is on a file system of another machine, or of a kind that is not known; use a disk here"
            )
    return Condition("files", "; ".join(described) or "not here", "; ".join(wrong) or None)
