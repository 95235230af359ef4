"""Streams (Server-Sent Events): a run's events as they are committed, and hints for pages that something moved.

Neither keeps state for a client: a client that reconnects sends its position, and reads on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, MutableMapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from starlette.responses import Response

from killick.web.hub import Position, frame
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, Person, RunAsked, get

if TYPE_CHECKING:
    from killick.web.hub import Hub

HEARTBEAT_SECONDS: Final = 15.0
"""The maximum silence of a stream, so that proxies keep it open."""

RETRY_MS: Final = 2_000
HINT_SECONDS: Final = 0.3
"""How long hints are gathered before they are sent."""

SEND_SECONDS: Final = 60.0
"""How long a follower may block a send before it is disconnected."""

KNOWN_SECONDS: Final = 2.0
"""How often the permission of a follower is checked again."""

LIVE_RUNS_MAX: Final = 200
_BEAT: Final = b": still here\n\n"
_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}

Frames = AsyncGenerator[bytes, None]
Message = MutableMapping[str, Any]


class Stream(Response):
    """A streaming response. Ends when its frames end, when the client leaves or stops reading, when its permission
    ends, and when the hub closes."""

    media_type = "text/event-stream"

    def __init__(self, call: Call[Any, Any], frames: Frames) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._call = call
        self._frames = frames

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        ends = (self._sent(send), _left(receive), self._dismissed(), self._call.context.hub.closing.wait())
        tasks = [asyncio.ensure_future(_ignore_disconnect(end)) for end in ends]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._frames.aclose()
        if not tasks[1].cancelled():
            return  # the client disconnected
        with contextlib.suppress(OSError):
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sent(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._frames:
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _dismissed(self) -> None:
        """Until a token was revoked, or its time is up."""
        person: Person | None = self._call.person
        while person is not None and person.name == self._call.person.name:
            await asyncio.sleep(KNOWN_SECONDS)
            person = await self._call.context.access.identify(self._call.request)


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ignore_disconnect(work: Awaitable[Any]) -> None:
    """A client that left or stopped reading is no error of the server."""
    with contextlib.suppress(OSError, TimeoutError):
        await work


# a run's events -----------------------------------------------------------------------------------


class FollowAsked(RunAsked, frozen=True, kw_only=True):
    """Which run, and from where on."""

    after: Annotated[
        int, msgspec.Meta(description="The seq of the last event that is known; `Last-Event-ID` says the same.", ge=0)
    ] = 0


@get("/runs/{run}/follow", media="text/event-stream")
async def follow(call: Call[FollowAsked, Nothing]) -> Response:
    """Follow a run: its events as they are committed.

    A stream of events, in order and without gaps: `id` is the seq, `event` the kind, `data` the event with its values.
    It ends with `event: end` when the run is over, which names the run that continues it, if any. A client that was
    cut off reconnects with `Last-Event-ID`, as browsers do by themselves.
    """
    hub, run = call.context.hub, call.asked.run
    await hub.position(run)
    return Stream(call, await _begun(_events(hub, run, _after(call), by=call.person.name)))


def _after(call: Call[FollowAsked, Nothing]) -> int:
    last = call.request.headers.get("last-event-id")
    if last is not None and last.isascii() and last.isdigit() and len(last) < 16:
        return int(last)
    if last:
        raise Problem(400, "Last-Event-ID is the seq of an event; leave it out to begin anew", code="parameter_refused")
    return call.asked.after


async def _begun(frames: Frames) -> Frames:
    """A stream after its first frame: an error before that is a problem response, not a broken stream."""
    first = await anext(frames)

    async def whole() -> Frames:
        try:
            yield first
            async for chunk in frames:
                yield chunk
        finally:
            await frames.aclose()

    return whole()


async def _events(hub: Hub, run: str, after: int, *, by: str) -> Frames:
    with hub.following(run, by=by) as follower:
        yield b"retry: %d\n\n" % RETRY_MS
        while not hub.closing.is_set():
            position = await hub.position(run)
            if position.seq > after:
                frames, after = await hub.page(run, after)
                yield frames
            elif position.is_over:
                renewed_as = await hub.renewed_as(run, position.seq)
                data = {"run": run, "seq": position.seq, "status": position.status, "renewed_as": renewed_as}
                yield frame("end", data)
                return
            elif not await follower.moved(HEARTBEAT_SECONDS):
                yield _BEAT


# hints for pages ----------------------------------------------------------------------------------


class LiveAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The runs and counts that a page shows."""

    run: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="Runs to follow; repeat it for several.", max_length=LIVE_RUNS_MAX),
    ] = ()
    counts: Annotated[bool, msgspec.Meta(description="Also how many runs there are of each status.")] = False


@get("/live", media="text/event-stream")
async def live(call: Call[LiveAsked, Nothing]) -> Response:
    """Follow changes: hints for pages, a few a second at the most.

    `event: changed` says how far which of the runs are (`runs`: `run`, `seq`, `status`), and how many runs there are of
    each status (`counts`), if they changed. The current values come first. Unknown runs are
    ignored.
    """
    hub = call.context.hub
    hints = _hints(hub, frozenset(call.asked.run), by=call.person.name, counts=call.asked.counts)
    return Stream(call, await _begun(hints))


async def _hints(hub: Hub, runs: frozenset[str], *, by: str, counts: bool) -> Frames:
    reported: dict[str, Position] = {}
    counted = b""
    with hub.following(*runs, by=by, counts=counts) as follower:
        yield b"retry: %d\n\n" % RETRY_MS
        while not hub.closing.is_set():
            if not await follower.moved(HEARTBEAT_SECONDS):
                yield _BEAT
                continue
            fresh = {run: at for run in runs if (at := hub.positions.get(run)) is not None and reported.get(run) != at}
            reported |= fresh
            hints = [b'"runs":[%s]' % b",".join(at.hint for at in fresh.values())] if fresh else []
            if counts and hub.counts_hint != counted:
                hints.append(b'"counts":' + (counted := hub.counts_hint))
            if hints:
                yield frame("changed", b"{%s}" % b",".join(hints))
                await asyncio.sleep(HINT_SECONDS)
