"""Byte stores for logs. `protocol` defines the interface; each backend has its own module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from killick.errors import StoreUnavailable
from killick.store.memory import MemoryStore
from killick.store.protocol import Store
from killick.store.sqlite.store import SqliteStore

__all__ = ["MemoryStore", "SqliteStore", "Store", "namespaces", "open_store"]


def open_store(url: str, **options: Any) -> Store:
    """Opens the store at a URL. Raises StoreUnavailable, StoreFormat if a newer version wrote the store.

    url      `memory:`, `sqlite:///path` or a path, `postgresql://host/db`, `redis://host/0`, `valkey://host/0`;
             on a server, `?namespace=acme` selects a tenant's store
    options  the options of the store's class
    """
    parts, kind = urlsplit(url), _kind(url)
    if parts.scheme in ("", "sqlite", "memory") and "namespace" in parse_qs(parts.query, keep_blank_values=True):
        raise _without_namespaces(url)
    takes = vars(kind)["__init__"].__kwdefaults__
    if unknown := [name for name in options if name not in takes]:
        raise StoreUnavailable(parts.scheme or url, f"has no option {unknown[0]!r}; it has {', '.join(takes)}")
    if parts.scheme == "sqlite":
        url = unquote(parts.path).removeprefix("/")  # sqlite:////var/killick.db is absolute
    place = () if parts.scheme == "memory" else (url,)
    return kind(*place, **options)


def namespaces(url: str) -> dict[str, int | None]:
    """Returns the namespaces of a server that the role may use, with their bytes, if known. Raises StoreUnavailable.

    url  a store on the server; "" in the result is the store without a namespace
    """
    if (found := getattr(_kind(url), "namespaces", None)) is None:
        raise _without_namespaces(url)
    return dict(found(url))


def _kind(url: str) -> Callable[..., Store]:
    """Returns the class of the store at a URL."""
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        return MemoryStore
    if scheme in ("postgresql", "postgres"):
        try:
            from killick.store.postgres.store import PostgresStore
        except ImportError as error:
            raise StoreUnavailable(
                "postgresql", f"needs psycopg ({error}); pip install '.[postgres]' in a clone"
            ) from None
        return PostgresStore
    if scheme in ("redis", "rediss", "unix", "valkey", "valkeys"):
        try:
            from killick.store.redis.store import RedisStore
        except ImportError as error:
            raise StoreUnavailable("redis", f"needs redis-py ({error}); pip install '.[redis]' in a clone") from None
        return RedisStore
    if "://" in url and scheme != "sqlite":
        known = "use sqlite:///path, a path, postgresql://host/database, redis://host/0, or memory:"
        raise StoreUnavailable(scheme, f"no store has the scheme {scheme!r}; {known}")
    return SqliteStore


def _without_namespaces(url: str) -> StoreUnavailable:
    return StoreUnavailable(url.partition("?")[0], "has no namespaces; give each tenant a file of its own")
