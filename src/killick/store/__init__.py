"""Byte stores for logs. `protocol` defines the interface; each backend has its own module."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from killick.errors import StoreUnavailable
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from killick.store.sqlite.store import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store", "open_store"]


def open_store(url: str, **options: Any) -> Store:
    """Opens the store at a URL. Raises StoreUnavailable, StoreFormat if a newer version wrote the store.

    url      `memory:`, `sqlite:///path` or a path, `postgresql://host/db`, `redis://host/0`, `valkey://host/0`
    options  the options of the store's class
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return MemoryStore(**options)
    if parts.scheme == "sqlite":
        path = unquote(parts.path)
        # sqlite:///killick.db is relative, sqlite:////var/killick.db is absolute.
        return SqliteStore(path.removeprefix("/"), **options)
    if parts.scheme in ("postgresql", "postgres"):
        try:
            from killick.store.postgres.store import PostgresStore
        except ImportError as error:
            reason = f"a store in PostgreSQL needs psycopg ({error}); pip install 'killick[postgres]'"
            raise StoreUnavailable("postgresql:", reason) from None
        return PostgresStore(url, **options)
    if parts.scheme in ("redis", "rediss", "unix", "valkey", "valkeys"):
        try:
            from killick.store.redis.store import RedisStore
        except ImportError as error:
            reason = f"a store on Redis or Valkey needs the redis package ({error}); pip install 'killick[redis]'"
            raise StoreUnavailable("redis:", reason) from None
        return RedisStore(url, **options)
    if "://" in url:
        known = "use sqlite:///path, a path, postgresql://host/database, redis://host/0, or memory:"
        raise StoreUnavailable(f"{parts.scheme}:", f"no store has the scheme {parts.scheme!r}; {known}")
    return SqliteStore(url, **options)
