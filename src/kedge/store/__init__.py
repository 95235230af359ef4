"""Stores hold bytes. `base` says what one is; each backend is a module of its own."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from kedge.errors import StoreUnavailable
from kedge.store.base import Store
from kedge.store.memory import MemoryStore
from kedge.store.sqlite import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store", "open_store"]


def open_store(url: str, **options: Any) -> Store:
    """The store at a URL: `memory:`, `sqlite:///path`, or the plain path of a SQLite file."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return MemoryStore(**options)
    if parts.scheme == "sqlite":
        path = unquote(parts.path)
        # sqlite:///kedge.db is beside us, sqlite:////var/kedge.db is not.
        return SqliteStore(path.removeprefix("/"), **options)
    if "://" in url:
        raise StoreUnavailable(url, f"no store is known by {parts.scheme!r}; use sqlite:///path, a path, or memory:")
    return SqliteStore(url, **options)
