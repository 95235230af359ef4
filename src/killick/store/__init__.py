"""Byte stores for logs. `protocol` defines the interface; each backend has its own module."""

from __future__ import annotations

from collections.abc import Callable
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
    kind: Callable[..., Store] = SqliteStore
    if parts.scheme == "sqlite":
        url = unquote(parts.path).removeprefix("/")  # sqlite:////var/killick.db is absolute
    elif parts.scheme == "memory":
        kind = MemoryStore
    elif parts.scheme in ("postgresql", "postgres"):
        try:
            from killick.store.postgres.store import PostgresStore
        except ImportError as error:
            raise StoreUnavailable("postgresql", f"needs psycopg ({error}); pip install 'killick[postgres]'") from None
        kind = PostgresStore
    elif parts.scheme in ("redis", "rediss", "unix", "valkey", "valkeys"):
        try:
            from killick.store.redis.store import RedisStore
        except ImportError as error:
            raise StoreUnavailable("redis", f"needs redis-py ({error}); pip install 'killick[redis]'") from None
        kind = RedisStore
    elif "://" in url:
        known = "use sqlite:///path, a path, postgresql://host/database, redis://host/0, or memory:"
        raise StoreUnavailable(f"{parts.scheme}:", f"no store has the scheme {parts.scheme!r}; {known}")
    takes = vars(kind)["__init__"].__kwdefaults__
    if unknown := [name for name in options if name not in takes]:
        raise StoreUnavailable(parts.scheme or url, f"has no option {unknown[0]!r}; it has {', '.join(takes)}")
    place = () if parts.scheme == "memory" else (url,)
    return kind(*place, **options)
