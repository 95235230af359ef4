"""Writes that count once by their `Idempotency-Key`, for as many processes as share the store. Decides nothing else.

The request is recorded before its effect, and the response after it: as messages in a log of Killick's own, one for
each day, where the first of an id wins. A client that lost the response repeats the request with the same key. A
process that dies in between leaves a key whose outcome is known to be unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from killick.engine.control.inbox import delivery
from killick.errors import KillickError, RunExists
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import unpack
from killick.store.records import OWN_AGENTS, Delivery, Message
from killick.type_init import ready
from killick.web.problems import Problem
from killick.web.routes import Call, Route

if TYPE_CHECKING:
    from killick.client.client import Client

AGENT: Final = f"{OWN_AGENTS}http"
DAY: Final = "killick:http:"
"""How the logs of the keys are called, before the day."""

REPLAYED: Final = "Idempotency-Replayed"

_KEPT_HEADERS: Final = ("location",)

CarryOut = Callable[["Call[Any, Any]"], Awaitable[Response]]


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as it is on record."""

    status: int
    media: str | None
    body: str
    headers: dict[str, str] = {}

    @classmethod
    def of(cls, response: Response) -> StoredResponse:
        headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
        return cls(response.status_code, response.media_type, bytes(response.body).decode(), headers)

    def response(self) -> Response:
        """The same once more, and that it is."""
        return Response(self.body, self.status, {**self.headers, REPLAYED: "true"}, media_type=self.media)


class _Known(msgspec.Struct, frozen=True):
    """The record of a key: its log, its request, its time, and the response."""

    log: str
    digest: str
    at_us: int
    kept: StoredResponse | None = None


def derived(call: Call[Any, Any], prefix: str) -> str | None:
    """The message id of a key; None without a key."""
    return None if call.key is None else f"{prefix}_{_named(call)[:16]}"


class IdempotencyKeys:
    """The keys of one app. Requests of this process that have the same key wait for each other."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._at_work: dict[str, asyncio.Task[Response]] = {}
        self._days: set[str] = set()

    async def around(self, call: Call[Any, Any], route: Route, carry_out: CarryOut) -> Response:
        """Carry a write out, unless its key says that it was."""
        named, digest = _named(call), sha256(b"%s\0%s" % (call.written, await call.request.body()))
        digest.update(str(call.person.grant or "").encode())
        while (other := self._at_work.get(named)) is not None:
            await asyncio.wait([other])
        # A request whose client disconnects is still executed to its end: half of it would help no client.
        work = asyncio.create_task(self._first(named, digest.hexdigest(), call, route, carry_out))
        self._at_work[named] = work
        work.add_done_callback(lambda _: self._at_work.pop(named, None))
        return await asyncio.shield(work)

    async def _first(
        self, named: str, digest: str, call: Call[Any, Any], route: Route, carry_out: CarryOut
    ) -> Response:
        named = await asyncio.to_thread(self._not_let_go, named)
        known = await asyncio.to_thread(self._intended, named, digest, call)
        if known.digest != digest:
            raise Problem(422, "this Idempotency-Key was used for another request; take a new one", code="key_reused")
        if known.kept is not None:
            return known.kept.response()
        if known.at_us and not route.natural:
            begun = datetime.fromtimestamp(known.at_us / 1_000_000, UTC).isoformat(timespec="seconds")
            reason = f"a request with this key was begun at {begun} and may have been carried out"
            raise Problem(409, f"{reason}; check whether it took effect, then use a new key", code="in_doubt")
        response = await carry_out(call)
        if response.status_code == 503:
            # The store was busy or away, so nothing was written: the key is as if it had not been used.
            with contextlib.suppress(KillickError):
                await asyncio.to_thread(self._deliver, known.log, {}, call, id=f"{named}#let-go")
        if response.status_code >= 500:
            return response
        first = await asyncio.to_thread(self._done, known.log, named, StoredResponse.of(response), call)
        return response if first is None else first.response()

    def bind(self, id: str, to: str) -> bool:  # noqa: A002
        """Binds an id to the first request that it is used for; returns whether this is that one."""
        logs, body = self._logs(), {"did": to}
        known = next(
            (found for log in logs if (found := self._client.runtime.store.message(log, id)) is not None), None
        )
        known = known or self._record(logs[0], body, id=id, by=None, at_us=self._client.runtime.clock.now_us())
        return known is None or self._body(known) == body

    # the record -------------------------------------------------------------------------------

    def _intended(self, named: str, digest: str, call: Call[Any, Any]) -> _Known:
        """The record of a key. For a new key the intention is recorded now, and `at_us` is 0."""
        today, yesterday = self._logs()
        for log in (today, yesterday):
            if (known := self._known(log, named)) is not None:
                return known
        request = call.request
        body = {"digest": digest, "did": f"{request.method} {request.url.path}"}
        message = self._deliver(today, body, call, id=named)
        if message is None:
            return _Known(today, digest, 0)
        known = self._known(today, named)
        assert known is not None, "a message that kept ours out is there"
        return known

    def _not_let_go(self, named: str) -> str:
        """A key as it is on record now: those of its requests that were let go count no more."""
        store, logs, key, number = self._client.runtime.store, self._logs(), named, 0
        while any(store.message(log, f"{named}#let-go") for log in logs):
            number += 1
            named = f"{key}~{number}"
        return named

    def _known(self, log: str, named: str) -> _Known | None:
        store = self._client.runtime.store
        intended = store.message(log, named)
        if intended is None or intended.name != AGENT:
            return None
        done = store.message(log, f"{named}#done")
        digest = self._body(intended)["digest"]
        kept = None if done is None else msgspec.convert(self._body(done), ready(StoredResponse))
        return _Known(log, digest, intended.at_us, kept)

    def _done(self, log: str, named: str, kept: StoredResponse, call: Call[Any, Any]) -> StoredResponse | None:
        """Record a response. Returns the recorded one, if another process was first."""
        message = self._deliver(log, msgspec.to_builtins(kept), call, id=f"{named}#done")
        return None if message is None else msgspec.convert(self._body(message), ready(StoredResponse))

    def _deliver(self, log: str, body: Any, call: Call[Any, Any], *, id: str) -> Message | None:  # noqa: A002
        return self._record(log, body, id=id, by=call.person.name, at_us=call.now_us)

    def _record(self, log: str, body: Any, *, id: str, by: str | None, at_us: int) -> Message | None:  # noqa: A002
        """None: it is the first of its id. Otherwise, the first."""
        self._ensure(log)
        sent: Delivery = delivery(self._client.runtime.log, log, AGENT, body, id=id, by=by, at_us=at_us)
        [outcome] = self._client.runtime.store.deliver([sent])
        if isinstance(outcome, KillickError):
            raise outcome
        return None if outcome.fresh else outcome.message

    def _body(self, message: Message) -> Any:
        return unpack(message.body, self._client.runtime.store.pieces)

    def _logs(self) -> tuple[str, str]:
        """Today's log and yesterday's: a key lives for a day at the least, and for two at the most."""
        today = datetime.fromtimestamp(self._client.runtime.clock.now_us() / 1_000_000, UTC).date()
        return DAY + today.isoformat(), DAY + (today - timedelta(days=1)).isoformat()

    def _ensure(self, log: str) -> None:
        """Create a day's log if it is missing. It is ended from the start, so no worker takes it."""
        if log in self._days:
            return
        client = self._client
        if client.runtime.store.head(log) is None:
            at = client.runtime.clock.now_us()
            started = Entry(e.RunStarted(at=at, run=log, agent=AGENT), {"input": None})
            with contextlib.suppress(RunExists):
                client.runtime.log.begin(log).append(started, Entry(e.RunCompleted(at=at), {"result": None}))
        self._days.add(log)


def _named(call: Call[Any, Any]) -> str:
    """A key as it is on record: everybody has their own."""
    return sha256(f"{call.person.name}\0{call.key}".encode()).hexdigest()[:40]
