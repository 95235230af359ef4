"""Which folders a store's runs may change. A path on record is data: the store may have been sent by another person.

A folder is granted by code or by a person of this machine: a loaded agent declares it, or an agent or a command of this
user named it for this store before. A file under the user's home keeps what was named.
"""

from __future__ import annotations

import contextlib
import os
import re
from hashlib import sha256
from pathlib import Path
from typing import Final

from killick.definitions.agents import AGENTS
from killick.errors import WorkspaceRefused
from killick.permissions import make_folder, open_private, state_folder
from killick.store.memory import MemoryStore
from killick.store.protocol import Store, raw_store
from killick.workspace.workspace import RUN, default_vault

_RUN: Final = re.compile(re.escape(re.escape(RUN)))


def grant(store: Store, *paths: str | Path) -> None:
    """Keeps folders that code or a person named for a store; `{run}` in one stands for any run."""
    if new := {_real(path) for path in paths} - {*_kept(store)}:
        # A home that cannot be written grants nothing: a later command asks again.
        with contextlib.suppress(OSError):
            make_folder(state_folder())
            with os.fdopen(open_private(_file(store), os.O_WRONLY | os.O_APPEND | os.O_CREAT), "wb") as file:
                file.write(b"".join(os.fsencode(path) + b"\0" for path in sorted(new)))


def is_granted(store: Store, path: str | Path) -> bool:
    """Whether code or a person of this machine named a folder. A fork's folder may be next to a declared one."""
    real = _real(path)
    if isinstance(raw_store(store), MemoryStore) or (not store.proves_life and real == _real(default_vault())):
        return True
    return any(_fits(each, real) for each in (*_declared(store), *_kept(store)))


def is_near(store: Store, path: str | Path) -> bool:
    """Whether a folder is below the folder of a store's file."""
    home = _folder(store)
    return home is not None and Path(_real(path)).is_relative_to(home) and _real(path) != str(home)


def refuse_ungranted(store: Store, path: str | Path) -> None:
    """Raises WorkspaceRefused for a folder that only the record names."""
    if not is_granted(store, path):
        reason = "is the folder on record, and no agent loaded here declares it; load its app, or name a folder"
        raise WorkspaceRefused(str(path), f"{reason}: --to PATH in a command, to=PATH in Python")


def _declared(store: Store) -> list[str]:
    """The folders and vaults that loaded agents declare, relative to the current folder and to that of the store."""
    found = [each.options.workspace for each in AGENTS.declared.values()]
    named = [path for each in found if each is not None for path in (each.declared, each.configured_vault) if path]
    bases = [base for base in (Path.cwd(), _folder(store)) if base is not None]
    return [_real(base / os.path.expanduser(path)) for path in named for base in bases]


def _kept(store: Store) -> list[str]:
    with contextlib.suppress(OSError), os.fdopen(open_private(_file(store), os.O_RDONLY), "rb") as file:
        return [os.fsdecode(each) for each in file.read().split(b"\0") if each]
    return []


def _file(store: Store) -> Path:
    """A copy under another name has none of the original's grants."""
    name = f"{store.id}\n{_real(store.place) if store.proves_life else store.place}"
    return state_folder() / f"{sha256(os.fsencode(name)).hexdigest()[:32]}-folders"


def _folder(store: Store) -> Path | None:
    return Path(_real(store.place)).parent if store.proves_life else None


def _fits(named: str, real: str) -> bool:
    pattern = _RUN.sub("[^/]+", re.escape(named))
    return re.fullmatch(f"{pattern}(-[^/]+)?", real) is not None


def _real(path: str | Path) -> str:
    return os.path.realpath(os.path.expanduser(path))
