"""The workspaces that are open in this process, and the vaults that hold their snapshots."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Protocol

from killick.engine.steps.workspace_grants import is_granted, is_near, refuse_ungranted
from killick.errors import KeyRefused, WorkspaceRefused
from killick.log.slots import root_of
from killick.log.writer import RunLog
from killick.model.ledger import Ledger, LedgerFacts
from killick.store.memory import MemoryStore
from killick.store.protocol import Store, keys_of, raw_store
from killick.workspace.vault.vault import Vault
from killick.workspace.workspace import RUN, Workspace, default_vault

_SUBJECTS: Final = "subjects-"
"""In a vault: the folder of the vaults of a store's data subjects. The store's id follows. A key names each vault."""

_OPEN_MAX: Final = 8
"""So many folders stay open though no run that is in memory works in them."""


def vault_place(store: Store) -> Path:
    """The vault of a store's runs: in the folder of a store that is a file; temporary for one in memory."""
    if isinstance(raw_store(store), MemoryStore):
        return Path(tempfile.gettempdir(), f"killick-{store.id}")
    place = Path(store.place)
    return place.absolute().with_suffix(".files") if store.proves_life and place.is_file() else default_vault()


def vault_of(key: str | None, facts: LedgerFacts, store: Store, declared: str | None = None) -> Path:
    """The vault of a run: where its record says, or next to its store if both were moved. A data subject's vault is in
    that folder, under a key of its own. Raises WorkspaceRefused for a vault elsewhere that only the record names."""
    name = _vault_name(key, store)
    below = () if name is None else (_SUBJECTS + store.id, name)
    by_store = vault_place(store).joinpath(*below)
    if facts.vault is None:
        return Path(declared).joinpath(*below) if declared is not None else by_store
    recorded = Path(facts.vault)
    if by_store.is_dir() and not (recorded.is_dir() and is_ours(recorded, store)):
        recorded = by_store
    if not is_ours(recorded, store):
        told = "is the vault on record, and no agent loaded here declares it; load its app, or put the vault next to"
        raise WorkspaceRefused(str(recorded), f"{told} {store.place}")
    return recorded


def is_ours(vault: Path, store: Store) -> bool:
    """Whether a vault may be opened for a store: it is below the folder of the store, or was granted."""
    home, own = home_of(vault)[0], vault_place(store)
    return (home == own and not own.is_symlink()) or is_near(store, home) or is_granted(store, home)


def _vault_name(key: str | None, store: Store) -> str | None:
    keys = keys_of(store)
    return None if keys is None or key is None else keys.vault_name(key)


def opened_vault(place: str | Path, store: Store) -> Vault:
    """A vault for the files of a store's runs: encrypted, if the store is. Raises KeyRefused if the key of its data
    subject was destroyed."""
    keys, (home, name) = keys_of(store), home_of(place)
    is_foreign = not is_granted(store, home)
    if keys is None:
        return Vault(place, is_foreign=is_foreign)
    if (cipher := keys.vault(name)) is None:
        raise KeyRefused(str(place), "the key of this data subject was destroyed, and these files with it")
    return Vault(place, cipher=cipher, home=home, is_foreign=is_foreign)


def home_of(place: str | Path) -> tuple[Path, str | None]:
    """The vault that a data subject's is in, and the name of theirs; of any other, the vault itself and None."""
    place = Path(place)
    is_own = place.parent.name.startswith(_SUBJECTS)
    return (place.parent.parent, place.name) if is_own else (place, None)


def subject_vaults(place: Path, store: Store) -> list[Path]:
    """The vaults of a store's data subjects in a vault."""
    return sorted(each for each in (place / (_SUBJECTS + store.id)).glob("*") if each.is_dir())


def is_erased(place: Path, store: Store) -> bool:
    """Returns whether the key of a data subject's vault was destroyed."""
    keys, name = keys_of(store), home_of(place)[1]
    return keys is not None and name is not None and keys.vault(name) is None


def refuse_shared(declared: Workspace | None, subject: str | None) -> None:
    """Refuses a data subject for runs that share a folder: one person's files could not be erased."""
    if subject is not None and declared is not None and RUN not in declared.declared:
        told = (
            f"runs of several people would share it; with subject=, give each run a folder: {declared.declared}/{RUN}"
        )
        raise WorkspaceRefused(declared.declared, told)


def owner_of(store: Store, run: str) -> str:
    """The owner of a run's snapshots."""
    return f"{store.id}/{run}"


_Key = tuple[str, Path, tuple[str, ...], bool]


def _key(workspace: Workspace) -> _Key:
    """The identity of a workspace."""
    return str(workspace.path), workspace.vault.path, workspace.exclude, workspace.gitignore


class WorkspaceUser(Protocol):
    """A run that works in a folder."""

    workspace: Workspace


class Folders:
    """The workspaces that are open in this process, each folder once, whichever runs work in it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._temporary = vault_place(store) if isinstance(raw_store(store), MemoryStore) else None
        self._open: dict[_Key, Workspace] = {}
        self._users: defaultdict[_Key, set[WorkspaceUser]] = defaultdict(set)
        self._vaults: dict[str, Vault] = {}
        self._closing: ThreadPoolExecutor | None = None
        self._mutex = threading.Lock()

    def of(self, declared: Workspace, log: RunLog) -> Workspace:
        """The workspace of a run: where its record says, or as it is declared."""
        facts = log.ledger.facts
        if facts.workspace is None:
            refuse_shared(declared, _vault_name(log.key, self._store))
        root = root_of(log.run, log.fold.facts.tags)
        with self._mutex:
            place = str(vault_of(log.key, facts, self._store, declared.configured_vault))
            vault = self._vaults.setdefault(place, opened_vault(place, self._store))
            found = declared.of(root, path=facts.workspace, vault=vault, hidden=hidden_of(self._store))
            key = _key(found)
            found = self._open.pop(key, found)
            self._open[key] = found
            idle = [each for each in self._open if not self._users[each] and each != key]
            for each in idle[: max(0, len(self._open) - _OPEN_MAX)]:
                self._closing = self._closing or ThreadPoolExecutor(1, thread_name_prefix="killick-close")
                self._closing.submit(self._open.pop(each).close)
                del self._users[each]
        return found

    def use(self, files: WorkspaceUser, *, ends: bool = False) -> None:
        """A run works in a folder, or does no longer: so long it stays open."""
        with self._mutex:
            key = _key(files.workspace)
            (self._users[key].discard if ends else self._users[key].add)(files)
            if not ends:
                files.workspace = self._open.setdefault(key, files.workspace)  # it may have been closed meanwhile

    def close(self) -> None:
        """Finishes captures in progress."""
        with self._mutex:
            opened, self._open = list(self._open.values()), {}
        if self._closing is not None:
            self._closing.shutdown()
        for workspace in opened:
            workspace.close()
        for vault in self._vaults.values():
            vault.close()
        if self._temporary is not None and opened:
            shutil.rmtree(self._temporary, ignore_errors=True)


def hidden_of(store: Store) -> tuple[str, ...]:
    """The prefixes of a store's files in a folder: no snapshot contains them, and no restore touches them."""
    return (store.place,) if store.proves_life else ()


@contextlib.contextmanager
def workspace_of(key: str | None, ledger: Ledger, store: Store) -> Generator[Workspace]:
    """The workspace of a run as its record has it, whether or not its agent is known here. Closes its vault too."""
    facts = ledger.facts
    if facts.workspace is None:
        raise WorkspaceRefused("the run", "has no workspace on record")
    refuse_ungranted(store, facts.workspace)
    with (
        contextlib.closing(opened_vault(vault_of(key, facts, store), store)) as vault,
        Workspace(
            facts.workspace, exclude=facts.exclude, gitignore=facts.gitignore, vault=vault, hidden=hidden_of(store)
        ) as workspace,
    ):  # fmt: skip
        yield workspace
