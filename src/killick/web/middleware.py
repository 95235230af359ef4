"""Limits requests by length, size, time and rate before the app, and sets the headers of every response.

Pure ASGI. Knows no routes and no permissions. Reads a request's body before the app sees it, so that no handler waits
for one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, Final

import msgspec

from killick.clock import Clock
from killick.logger import get_logger
from killick.lru import Lru
from killick.web.problems import Problem

if TYPE_CHECKING:
    from killick.audit.access_log import AccessLog
    from killick.workers.tokens import Person

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger: Final = get_logger("killick.web")

CSP: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = tuple(
    (name.encode(), value.encode())
    for name, value in {
        "content-security-policy": CSP,
        "x-frame-options": "DENY",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
    }.items()
)
"""The headers of every response."""
_OURS: Final = frozenset({*(name for name, _ in HEADERS), b"server"})

PERSON: Final = "killick_person"
"""Where in a request's state the access check records the caller."""

ASKED: Final = "killick_asked"
"""Where in a request's state the endpoint records the route and its parameters, for the access log."""

_LOOKS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_BUCKETS_MAX: Final = 10_000
_DIGITS_MAX: Final = 15
_MANY: Final = "too many bodies are sent from this address at once; send them one after the other"
_SLOW: Final = "the request's body did not come within {:g} s; send it again at once"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much may be asked at once."""

    body_bytes: int = 1 << 20
    body_seconds: float = 10.0
    """Within which a request's body has to be there."""
    unread_bytes: int = 32 << 20
    """How much of the bodies of one address may be in memory at once."""
    url_bytes: int = 8_192
    rate: float = 200.0
    """Requests a second, of one person or one address."""
    burst: int = 400
    """How many may come at once before the rate counts."""


class Buckets:
    """A token bucket for each key. The oldest are dropped, so that new keys cannot fill the memory."""

    def __init__(self, clock: Clock, rate: float, burst: int) -> None:
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._levels: Lru[object, tuple[float, float]] = Lru(_BUCKETS_MAX)

    def wait_seconds(self, key: object) -> float:
        """Take one; returns 0, or how long it is until there is one."""
        now = self._clock.monotonic()
        level, at = self._levels.get(key) or (float(self._burst), now)
        level = min(self._burst, level + (now - at) * self._rate)
        taken = level >= 1
        self._levels.put(key, (level - 1 if taken else level, now))
        return 0.0 if taken else (1 - level) / self._rate

    def forgive(self, key: object) -> None:
        """Refund the tokens of a key."""
        self._levels.pop(key)


class Guard:
    """The outermost part of the app."""

    def __init__(
        self, app: App, clock: Clock, limits: Limits | None = None, access_log: AccessLog | None = None
    ) -> None:
        self.app = app
        self.access_log = access_log
        self.limits = limits or Limits()
        self._buckets = Buckets(clock, self.limits.rate, self.limits.burst)
        self._known: Lru[bytes, str] = Lru(_BUCKETS_MAX)
        self.held: Counter[str] = Counter()
        """How many bytes of bodies are in memory, by the address that sent them."""
        self.closing = False
        self.streams: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """End every stream that is still open, for the server is about to stop. Called on its loop."""
        self.closing = True
        for stream in self.streams:
            if not stream.done():
                stream.set_result(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _RequestCycle(self, scope, receive, send).handle()
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self.app(scope, receive, send)

    # who comes how often ----------------------------------------------------------------------

    def refuse_often(self, scope: Scope, shown: bytes | None) -> None:
        """Counts requests with known credentials by their person, and all others by their address."""
        key = self._known.get(shown) if shown is not None else None
        wait = self._buckets.wait_seconds(key or client_address(scope))
        if wait:
            after = {"Retry-After": str(max(1, round(wait + 0.5)))}
            reason = f"more than {self.limits.rate:g} requests a second; slow down"
            raise Problem(429, reason, code="too_many_requests", headers=after)

    def remember(self, shown: bytes | None, person: Person | None) -> None:
        """Bind the shown credentials to this person; None: to no one."""
        if shown is None or person is None:
            self._known.pop(shown or b"")
        else:
            self._known.put(shown, f"person:{person.name}")


def client_address(scope: Scope) -> str:
    """Who sends, for limits: the address; of IPv6 its network, for each machine has a whole one."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    try:
        found = ip_address(host)
    except ValueError:
        return host
    if found.version == 6 and found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return host if found.version == 4 else str(ip_network((int(found) >> 64 << 64, 64)))


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for given, value in scope["headers"] if given == name), None)


def _shown(scope: Scope) -> bytes | None:
    """A digest of the request's token or cookies, which identifies the caller without storing them."""
    given = _header(scope, b"authorization") or _header(scope, b"cookie")
    return sha256(given).digest() if given else None


class _RequestCycle:
    """One request, from the server to the app and back."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self.guard = guard
        self.limits = guard.limits
        self.scope = scope
        self._state: dict[str, Any] = scope.setdefault("state", {})
        self._shown = _shown(scope)
        self._receive = receive
        self._send = send
        self._address = client_address(scope)
        self._body: list[Message] = []
        self._size = 0
        self.status = 0
        self.ended = False

    async def handle(self) -> None:
        try:
            await self._handle()
        finally:
            held = self.guard.held
            held[self._address] -= self._size
            if not held[self._address]:
                del held[self._address]

    async def _handle(self) -> None:
        self._state[PERSON] = None
        # By this version a stream listens for who goes; later ones find out when they send.
        self.scope["asgi"] = {**self.scope.get("asgi", {}), "spec_version": "2.3"}
        try:
            self._refuse_early()
            await self._read()
        except Problem as problem:
            await self._refuse(problem)
            return
        except ConnectionError:
            return  # the client has disconnected
        try:
            await self.guard.app(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("a request failed")
            if not self.status:
                await self._refuse(Problem(500, "internal server error; see the server's log", code="internal"))
        if self.status and not self.ended and self.guard.closing:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self._note()

    def _refuse_early(self) -> None:
        scope, limits = self.scope, self.limits
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > limits.url_bytes:
            raise Problem(414, f"the address is longer than {limits.url_bytes} bytes", code="address_too_long")
        self.guard.refuse_often(scope, self._shown)
        length = _header(scope, b"content-length") or b"0"
        if not length.isdigit() or len(length) > _DIGITS_MAX or int(length) > limits.body_bytes:
            raise self._too_large()

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than {self.limits.body_bytes} bytes", code="too_large")

    async def _read(self) -> None:
        held, more = self.guard.held, True
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    size = len(message.get("body", b""))
                    self._size += size
                    held[self._address] += size
                    if self._size > self.limits.body_bytes:
                        raise self._too_large()
                    if held[self._address] > self.limits.unread_bytes:
                        raise Problem(429, _MANY, code="too_many_requests", headers={"Retry-After": "1"})
                    more = bool(message.get("more_body"))
                    self._body.append(message)
        except TimeoutError:
            raise Problem(408, _SLOW.format(self.limits.body_seconds), code="too_slow") from None
        self._body.reverse()

    async def receive(self) -> Message:
        """The body, then a disconnect: of the client, or of the server."""
        if self._body:
            return self._body.pop()
        closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone: asyncio.Future[Any] = asyncio.ensure_future(self._receive())
        self.guard.streams.add(closing)
        try:
            if not self.guard.closing:
                await asyncio.wait({gone, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.guard.streams.discard(closing)
            gone.cancel()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._log_access(message["status"])
            self.status = message["status"]
            message = {**message, "headers": self._response_headers(message.get("headers", ()))}
            person = self._state[PERSON]
            if person is not None or self.status == 401:
                self.guard.remember(self._shown, person)
        elif message["type"] == "http.response.body" and not message.get("more_body"):
            self.ended = True
        await self._send(message)

    def _response_headers(self, given: Any) -> list[tuple[bytes, bytes]]:
        headers = [(name, value) for name, value in given if name.lower() not in _OURS]
        if not any(name.lower() == b"cache-control" for name, _ in headers):
            headers.append((b"cache-control", b"no-store"))
        return [*headers, *HEADERS]

    async def _refuse(self, problem: Problem) -> None:
        # The unread rest of the body would be parsed as the next request.
        response = problem.response()
        response.headers["connection"] = "close"
        await response(self.scope, self._receive, self.send)  # pyright: ignore[reportArgumentType]
        self._note()

    def _log_access(self, status: int) -> None:
        """One line of the access log, before anything is sent: without it nothing is."""
        log, asked, person = self.guard.access_log, self._state.pop(ASKED, None), self._state.get(PERSON)
        if log is None or asked is None:
            return
        who = {"who": None} if person is None else {"who": person.name, "scope": person.scope}
        log.write({**who, "from": self._address, "method": self.scope["method"], **asked, "status": status})

    def _note(self) -> None:
        """One line for each write: the person, the request and the status. No query and no body."""
        if self.scope["method"] in _LOOKS:
            return
        person = self._state[PERSON]
        path = (self.scope.get("raw_path") or str(self.scope["path"]).encode()).partition(b"?")[0]
        fields = {
            "what": "wrote" if self.status < 400 else "refused",
            "who": person.name if person is not None else None,
            "method": self.scope["method"],
            "path": path.decode("latin-1").encode("ascii", "backslashreplace").decode(),
            "status": self.status,
        }
        logger.info(" ".join(f"{name}={value}" for name, value in fields.items()), extra={"killick": fields})
