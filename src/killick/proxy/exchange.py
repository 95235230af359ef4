"""One client request, from its intention to the last byte of its reply: recorded, sent, relayed, recorded.

A request and its reply pass unchanged. The client gets the end of a reply when the reply is on record.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import httpx
import msgspec

from killick.engine.failures import describe
from killick.errors import KillickError
from killick.logger import get_logger
from killick.model.failure import Failure
from killick.proxy.conversation import GONE, Conversation
from killick.proxy.conversation_match import Digests, print_of_messages, tip_of
from killick.proxy.credentials import without, without_secrets
from killick.proxy.frames import Frames
from killick.proxy.upstream import Headers, Upstream, answering, asking
from killick.proxy.wire import StreamedReply, Wire, is_map

logger: Final = get_logger("killick.proxy")

Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class Caller:
    """The client's side of the connection."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def start(self, status: int, headers: Headers) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete response."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, wire: Wire, status: int, kind: str, message: str) -> None:
        """Sends our own error in the provider's form."""
        body = msgspec.json.encode(wire.error(kind, message))
        await self.answer(status, [(b"content-type", b"application/json")], body)


class ProxyRequest:
    """A request in progress."""

    def __init__(
        self, upstream: Upstream, wire: Wire, body: Mapping[str, Any], hashes: Digests, *, url: httpx.URL,
        headers: Headers, content: bytes, caller: Caller,
    ) -> None:  # fmt: skip
        self._upstream = upstream
        self._wire = wire
        self._body = body
        self._hashes = hashes
        self._url = url
        self._headers = headers
        self._content = content
        self._caller = caller
        self._conversation: Conversation
        self._step: str | None = None
        """The step, while it is open."""
        self._stream: StreamedReply | None = None

    async def go(self, conversation: Conversation) -> None:
        """Runs it. An error means that it was not sent, or not recorded."""
        self._conversation = conversation
        try:
            self._step = await conversation.intend(without_secrets(self._body))
            await self._sent()
        except asyncio.CancelledError:
            if self._step is not None:
                self._fail(GONE)
            raise
        except Exception:
            conversation.is_lost = True
            raise

    async def _sent(self) -> None:
        try:
            headers = asking(self._headers, whole=True)
            response = await self._upstream.send("POST", self._url, headers, self._content)
        except httpx.HTTPError as error:
            await self._unreachable(error)
            return
        try:
            is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
            await (self._streamed(response) if is_stream and response.status_code < 400 else self._whole(response))
        finally:
            await response.aclose()

    async def _unreachable(self, error: httpx.HTTPError) -> None:
        self._fail(describe(error))
        await self._caller.refuse(self._wire, *unreachable(error, self._upstream))

    async def _whole(self, response: httpx.Response) -> None:
        try:
            body = await response.aread()
        except httpx.HTTPError as error:
            await self._unreachable(error)
            return
        reply = _json(body)
        if response.status_code >= 400:
            said = httpx.HTTPStatusError(f"HTTP {response.status_code}", request=response.request, response=response)
            self._fail(describe(said), refused=response.status_code < 500)
        elif is_map(reply):
            await self._replied(reply)
        else:
            self._fail(Failure.of("killick.proxy", "the answer is not a JSON object"))
        await self._caller.answer(response.status_code, answering(response.headers.raw, whole=True), body)

    async def _streamed(self, response: httpx.Response) -> None:
        caller, frames = self._caller, Frames()
        stream = self._stream = self._wire.streamed()
        await caller.start(response.status_code, answering(response.headers.raw, whole=True))
        try:
            async for data in response.aiter_bytes():
                await caller.write(b"".join(map(stream.take, frames.feed(data))))
            await caller.write(b"".join(map(stream.take, frames.end())))
        except httpx.HTTPError as error:
            # Left unfinished, so that the client sees the truncation too.
            self._fail(describe(error))
            return
        reply = stream.reply()
        if reply is None or not stream.is_whole:
            self._fail(Failure.of("killick.proxy", f"{_CUT}: {_line(stream.error)}" if stream.error else _CUT))
        else:
            await self._replied(reply)
        await caller.write(stream.finish())
        await caller.end()

    async def _replied(self, reply: dict[str, Any]) -> None:
        """Records a complete reply."""
        step, self._step = self._step, None
        tip = tip_of(self._hashes.chain, print_of_messages(self._wire.said(reply)))
        try:
            await self._conversation.replied(str(step), reply, tip)
        except KillickError as error:
            # The client must get the received reply.
            logger.warning("%s: a reply is not on record: %s", self._conversation.run, error)
            self._conversation.is_lost = True

    def _fail(self, failure: Failure, *, refused: bool = False) -> None:
        step, self._step = self._step, None
        partial = self._stream.reply() if self._stream is not None and not self._stream.is_whole else None
        with contextlib.suppress(KillickError):
            found = without(failure, self._headers)
            self._conversation.failed(str(step), found, refused=refused, partial=partial)


_CUT: Final = "the stream ended before the reply did"


async def relay(
    upstream: Upstream, method: str, url: httpx.URL, headers: Headers, content: Any, caller: Caller, wire: Wire
) -> None:
    """Passes a request and its response on unchanged."""
    try:
        # A passed-on body keeps its length: some servers require it.
        length = [pair for pair in headers if pair[0].lower() == b"content-length"] if content is not None else []
        response = await upstream.send(method, url, [*asking(headers), *length], content)
    except httpx.HTTPError as error:
        await caller.refuse(wire, *unreachable(error, upstream))
        return
    try:
        await caller.start(response.status_code, answering(response.headers.raw))
        async for data in response.aiter_raw():
            await caller.write(data)
    except httpx.HTTPError:
        return  # cut, as it was for us
    finally:
        await response.aclose()
    await caller.end()


def unreachable(error: httpx.HTTPError, upstream: Upstream) -> tuple[int, str, str]:
    """Returns the error for an unreachable provider: status, kind, one line."""
    host = upstream.url.host
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return 504, "timeout_error", f"killick proxy: {host} did not answer in time ({type(error).__name__})"
    return 502, "api_error", f"killick proxy: {host} cannot be reached ({reason})"


def _json(body: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(body)
    return None


def _line(error: Any) -> str:
    message = error.get("message") if is_map(error) else error
    return " ".join(str(message or error).split())[:500]
