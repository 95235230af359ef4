"""One Redis or Valkey server: connections, scripts, and error translation.

Connects, calls and retries. The store decides what is read and written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,  # noqa: A004
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004
)
from redis.retry import Retry

from killick.clock import SystemClock
from killick.errors import StoreBroken, StoreClosed, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from killick.store.lua import scripts
from killick.store.namespace import namespace_of, own_options, root_name

_SCHEMES: Final = {"valkey": "redis", "valkeys": "rediss"}
_FIRST_NAP_SECONDS: Final = 0.01
_LONGEST_NAP_SECONDS: Final = 0.5
_OPENING_SECONDS_MAX: Final = 3.0
"""How long opening a store waits for an absent server: the URL may be mistyped."""

_ANSWER_SECONDS: Final = 30.0
_FLUSH_SECONDS_MAX: Final = 20.0
_COMMITS: Final = ("append", "deliver")
"""Scripts after which the store waits for a flush, if the server does not flush before it answers. Earlier writes are
flushed too, because the server's file is sequential."""

_CONNECT_SECONDS: Final = 10.0
_HEALTH_SECONDS: Final = 20
_TEMPORARY: Final = ("LOADING", "BUSY ", "MASTERDOWN", "TRYAGAIN")
"""Prefixes of temporary errors: the server is loading its file, or runs a script."""

_AUTH_ERRORS: Final = (AuthenticationError, AuthorizationError)

T = TypeVar("T")
Args = dict[str, Any] | list[Any]


class RedisServer:
    """A connection pool for one server."""

    def __init__(self, url: str, *, busy_seconds: float, connections: int) -> None:
        self.place, self.prefix, address = _parts(url)
        self.busy_seconds = busy_seconds
        self.patience_seconds = min(busy_seconds, _OPENING_SECONDS_MAX)
        self.store_id = ""
        self.waits = False
        """Whether a commit waits until the server has flushed it."""
        self._meta = f"{self.prefix}meta"
        self._scripts = scripts()
        self._closed = False
        self._clock = SystemClock()
        self._address = address
        self._most = connections
        self._connect()

    def _connect(self) -> None:
        self._pool: Any = self._connections(self._most)
        self.client: Any = redis.Redis(connection_pool=self._pool)

    def _connections(self, most: int, **options: Any) -> Any:
        try:
            # Retries are decided here, so the client itself does not retry.
            return redis.BlockingConnectionPool.from_url(  # pyright: ignore[reportUnknownMemberType]
                self._address,
                max_connections=most,
                timeout=self.busy_seconds,
                socket_timeout=_ANSWER_SECONDS,
                socket_connect_timeout=_CONNECT_SECONDS,
                client_name="killick",
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                **options,
            )
        except ValueError as error:
            raise StoreUnavailable(
                self.place, f"this URL cannot be read ({error}); write redis://host:6379/0"
            ) from None

    def listener(self) -> Any:
        """Returns a separate client for a listener, which closes it.

        It sends pings, because a mere listener would not notice a lost server.
        """
        return redis.Redis(connection_pool=self._connections(1, health_check_interval=_HEALTH_SECONDS))

    @property
    def channel(self) -> str:
        """The channel for notifications."""
        return f"{self.prefix}bell:{self.store_id}"

    # operations -------------------------------------------------------------------------------

    def ask(self, name: str, args: Args, blobs: Sequence[bytes] = (), *, clock_us: int | None = None) -> Any:
        """Runs a script and returns its reply. Repeated after a lost connection, so the script must be idempotent."""
        return self.run(lambda _: self.once(name, args, blobs, clock_us=clock_us))

    def once(self, name: str, args: Args, blobs: Sequence[bytes] = (), *, clock_us: int | None = None) -> Any:
        """The same, within `run`."""
        digest, text = self._scripts[name]
        clock = "" if clock_us is None else str(clock_us)
        words = (1, self._meta, self.store_id, clock, msgspec.msgpack.encode(args), *blobs)
        send = self._flushed if self.waits and name in _COMMITS else self.client.execute_command
        try:
            return send("EVALSHA", digest, *words)
        except NoScriptError:
            return send("EVAL", text, *words)

    def _flushed(self, *words: Any) -> Any:
        """Runs a script and waits until its writes are on the server's disk."""
        with self.client.pipeline(transaction=False) as both:
            both.execute_command(*words)
            both.execute_command("WAITAOF", 1, 0, int(_FLUSH_SECONDS_MAX * 1_000))
            answer, flushed = both.execute(raise_on_error=False)
        for each in (answer, flushed):
            if isinstance(each, Exception):
                raise each
        if flushed[0] < 1:
            raise TimeoutError("the server has not flushed it yet")
        return answer

    def many(self, commands: Iterable[Sequence[Any]]) -> list[Any]:
        """Sends several commands, each atomic by itself."""
        sent = list(commands)

        def ask(_: int) -> list[Any]:
            with self.client.pipeline(transaction=False) as pipeline:
                for words in sent:
                    pipeline.execute_command(*words)
                return list(pipeline.execute())

        return self.run(ask)

    def run(self, work: Callable[[int], T]) -> T:
        """Runs an idempotent operation, and retries it on lost connections; the argument is the number of retries."""
        until, nap, tries = self._clock.monotonic() + self.patience_seconds, _FIRST_NAP_SECONDS, 0
        while True:
            self.refuse_closed()
            try:
                return work(tries)
            except RedisError as error:
                self.refuse_closed()
                if not _is_transient(error) or self._clock.monotonic() >= until:
                    raise self.explain(error) from error
                if isinstance(error, ReadOnlyError):
                    # The connection leads to a former primary; connect again.
                    self._connect()
            except (AttributeError, TypeError, ValueError, OSError) as error:
                if self._closed:  # meanwhile, by another thread: the client does not say so in words of its own
                    raise StoreClosed(self.place) from None
                if "unexpected keyword argument" in str(error):
                    raise StoreUnavailable(self.place, f"this URL has an invalid setting ({error})") from None
                raise
            time.sleep(nap)
            nap, tries = min(nap * 2, _LONGEST_NAP_SECONDS), tries + 1

    def close(self) -> None:
        self._closed = True
        self._pool.disconnect()

    def refuse_closed(self) -> None:
        if self._closed:
            raise StoreClosed(self.place)

    # errors -----------------------------------------------------------------------------------

    def explain(self, error: RedisError) -> StoreError:
        """Translates a failure into a Killick error."""
        text = _first_line(error)
        if "KILLICKGONE" in text:
            return StoreBroken(self.place, "its data is gone: the server lost it, or it was flushed")
        if "used memory > 'maxmemory'" in text:
            return StoreFull(self.place)
        if isinstance(error, ReadOnlyError) or "READONLY" in text:
            return StoreReadOnly(self.place)
        if "MISCONF" in text:
            return StoreError(f"{self.place}: the server cannot persist and accepts no writes; see its log ({text})")
        if isinstance(error, ConnectionError | TimeoutError | NoPermissionError):
            return StoreUnavailable(self.place, text)
        if text.startswith("MOVED"):
            return StoreUnavailable(self.place, "it is part of a cluster; give Killick a standalone server")
        return StoreError(f"{self.place}: {text}")


def namespaces(url: str) -> dict[str, None]:
    """Returns the namespaces of a server."""
    server = RedisServer(url, busy_seconds=_OPENING_SECONDS_MAX, connections=1)
    try:
        keys = server.run(lambda _: list(server.client.scan_iter(match="{killick*}:meta", count=1_000)))
    finally:
        server.close()
    return dict.fromkeys(sorted(namespace_of(key.decode()[1:].partition("}")[0]) for key in keys))


class BinaryArgs:
    """Binary arguments next to a MessagePack argument, which refers to them by index."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def put(self, blob: bytes) -> int:
        """Adds bytes and returns their index."""
        self.blobs.append(blob)
        return len(self.blobs)

    def put_if(self, blob: bytes | None) -> int | None:
        return None if blob is None else self.put(blob)


def _parts(url: str) -> tuple[str, str, str]:
    """Returns the display name without a password, the key prefix, and the connection parameters."""
    parts = urlsplit(url)
    scheme = _SCHEMES.get(parts.scheme, parts.scheme)
    name, place = root_name(f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}", parts.query)
    _, rest = own_options(parts.query, "namespace")
    # A hash tag, so that a cluster keeps the keys in one slot.
    return place, f"{{{name}}}:", f"{scheme}://{parts.netloc}{parts.path}?{rest}"


def _is_transient(error: RedisError) -> bool:
    """Returns whether a failed operation may succeed later."""
    if isinstance(error, ResponseError):
        return isinstance(error, ReadOnlyError) or str(error).startswith(_TEMPORARY)
    return isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, _AUTH_ERRORS)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no connection"
