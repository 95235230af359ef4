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

from killick.engine.renewals import root_of
from killick.errors import WorkspaceRefused
from killick.model.ledger import Ledger, LedgerFacts
from killick.store.memory import MemoryStore
from killick.store.protocol import Store, keys_of, raw_store
from killick.store.records import STORE_OWNER
from killick.workspace.vault.vault import Vault
from killick.workspace.workspace import Workspace, default_vault

OF_THE_STORE: Final = "files go under the store's key, which no erasure destroys; start it without subject="

_OPEN_MAX: Final = 8
"""So many folders stay open though no run that is in memory works in them."""


def vault_place(store: Store) -> Path:
    """The vault of a store's runs: in the folder of a store that is a file; temporary for one in memory."""
    if isinstance(raw_store(store), MemoryStore):
        return Path(tempfile.gettempdir(), f"killick-{store.id}")
    place = Path(store.place)
    return place.absolute().with_suffix(".files") if store.proves_life and place.is_file() else default_vault()


def vault_of(facts: LedgerFacts, store: Store, declared: str | None = None) -> Path:
    """The vault of a run: where its record says, or next to its store if both were moved."""
    by_store = vault_place(store)
    if facts.vault is None:
        return Path(declared) if declared is not None else by_store
    recorded = Path(facts.vault)
    return by_store if by_store.is_dir() and not recorded.is_dir() else recorded


def opened_vault(place: str | Path, store: Store) -> Vault:
    """A vault for the files of a store's runs: encrypted, if the store is."""
    keys = keys_of(store)
    return Vault(place, cipher=None if keys is None else keys.vault)


def owner_of(store: Store, run: str) -> str:
    """The owner of a run's snapshots."""
    return f"{store.id}/{run}"


_Key = tuple[str, tuple[str, ...], bool]


def _key(workspace: Workspace) -> _Key:
    """The identity of a workspace."""
    return str(workspace.path), workspace.exclude, workspace.gitignore


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

    def of(self, declared: Workspace, run: str, ledger: Ledger) -> Workspace:
        """The workspace of a run: where its record says, or as it is declared."""
        keys = keys_of(self._store)
        if keys is not None and not keys.key_of(run).startswith(STORE_OWNER):
            raise WorkspaceRefused(run, OF_THE_STORE)
        facts = ledger.facts
        with self._mutex:
            place = str(vault_of(facts, self._store, declared.configured_vault))
            vault = self._vaults.setdefault(place, opened_vault(place, self._store))
            found = declared.of(root_of(run)[0], path=facts.workspace, vault=vault, hidden=hidden_of(self._store))
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
def workspace_of(ledger: Ledger, store: Store) -> Generator[Workspace]:
    """The workspace of a run as its record has it, whether or not its agent is known here. Closes its vault too."""
    facts = ledger.facts
    if facts.workspace is None:
        raise WorkspaceRefused("the run", "has no workspace on record")
    with (
        contextlib.closing(opened_vault(vault_of(facts, store), store)) as vault,
        Workspace(
            facts.workspace, exclude=facts.exclude, gitignore=facts.gitignore, vault=vault, hidden=hidden_of(store)
        ) as workspace,
    ):  # fmt: skip
        yield workspace
