"""One client request, from parsing to the last byte of its reply: planned, recorded, sent, relayed, recorded.

Calls of the window's own tools are answered here, and the model is called again, within one reply to the client. If
paging fails, the request is sent unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import httpx
import msgspec

from killick.engine.failures import describe
from killick.errors import KillickError
from killick.llm.toolset import ToolAnswer, answer_messages
from killick.logger import get_logger
from killick.model.events import to_text
from killick.model.failure import Failure
from killick.model.page_events import PageFaulted
from killick.proxy.conversation import GONE, Conversation, Exchange
from killick.proxy.conversation_match import Digests, print_of_messages, shown_of, tip_of
from killick.proxy.credentials import without, without_secrets
from killick.proxy.frames import Frames
from killick.proxy.upstream import Headers, Upstream, answering, asking
from killick.proxy.wire import ParsedBody, Splice, Wire, is_map
from killick.window import Answer, Decision, Window
from killick.window.messages import Call

logger: Final = get_logger("killick.proxy")

ROUNDS_MAX: Final = 8
"""How often a model is called again, within one reply, after a call of the window's tools."""

_UNFIT: Final = (400, 413, 422)
"""Error statuses for a request that the provider does not understand."""

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
        """Sends our own error in the provider's form; inside a started stream, as part of it."""
        error = wire.error(kind, message)
        if self.started:
            await self.write(wire.broken(error))
            await self.end()
        else:
            await self.answer(status, [(b"content-type", b"application/json")], msgspec.json.encode(error))


class OutgoingRequest(msgspec.Struct):
    """The outgoing request. Without `body` it is unchanged."""

    arguments: dict[str, Any]
    body: bytes | None = None
    decisions: Sequence[Decision] = ()
    own: frozenset[str] = frozenset()
    """The tools whose calls the window answers: its own, and stubs."""
    note: str = ""


class Round(msgspec.Struct):
    """One upstream response: the reply, the window's answers, and the calls hidden from the client."""

    reply: dict[str, Any]
    answered: list[ToolAnswer]
    own: set[str]
    again: bool
    decisions: list[Decision]


class ProxyRequest:
    """A request in progress."""

    def __init__(
        self, upstream: Upstream, wire: Wire, asked: ParsedBody, hashes: Digests, *, url: httpx.URL, headers: Headers,
        content: bytes, caller: Caller,
    ) -> None:  # fmt: skip
        self._upstream = upstream
        self._wire = wire
        self._asked = asked
        self._hashes = hashes
        self._url = url
        self._headers = headers
        self._content = content
        self._caller = caller
        self._conversation: Conversation
        self._rounds: list[Round] = []
        self._splice: Splice | None = None
        self._doubted = False
        self._open: str | None = None
        """The open step."""
        self._said: list[Any] = []
        """The messages added to the client's in this request so far."""

    async def go(self, conversation: Conversation) -> None:
        """Runs it. An error means that it was not sent, or not recorded."""
        self._conversation = conversation
        try:
            while True:
                sending = self._planned()
                recorded = without_secrets(sending.arguments)
                self._open = await conversation.intend(recorded, sending.decisions, note=sending.note)
                if not await self._sent(self._open, sending):
                    return
        except asyncio.CancelledError:
            if self._open is not None:
                self._fail(self._open, GONE)
            raise
        except Exception:
            conversation.is_lost = True
            raise

    # planning -----------------------------------------------------------------------------------

    def _planned(self) -> OutgoingRequest:
        asked, conversation = self._asked, self._conversation
        window = conversation.window
        if window is None:
            return OutgoingRequest(asked.body)
        if why := asked.unpaged or conversation.unpaged:
            return OutgoingRequest(asked.body, note=f"not paged: {why}")
        try:
            history = [*conversation.history(asked.messages), *self._said]
            decisions: list[Decision] = []
            sent = None
            if not asked.may_call:
                # The model could not recall pages, so evict only if forced.
                sent = window.render(history, asked.tools, system=asked.system)
            if sent is None or sent.over:
                decisions = window.plan(history, asked.tools, system=asked.system)
                window.apply(decisions)
                sent = window.render(history, asked.tools, system=asked.system)
            body = self._wire.body(asked, sent.messages, sent.tools)
            given = {_tool_name(tool) for tool in asked.tools}
            own = {name for tool in sent.tools if (name := _tool_name(tool)) not in given or window.is_stub(name)}
            return OutgoingRequest(body, msgspec.json.encode(body), decisions, frozenset(own))
        except Exception as error:
            logger.warning(
                "%s: is not paged: %s", conversation.run, error, exc_info=not isinstance(error, KillickError)
            )
            conversation.unpaged = f"paging failed ({type(error).__name__}: {error})"
            return OutgoingRequest(asked.body, note=f"not paged: {conversation.unpaged}")

    # sending ------------------------------------------------------------------------------------

    async def _sent(self, step: str, sending: OutgoingRequest) -> bool:
        """Sends, and relays the response; True: there is another round."""
        fresh = sending.body is not None
        content = sending.body if sending.body is not None else self._content
        try:
            headers = asking(self._headers, whole=True)
            if not fresh:
                headers += [pair for pair in self._headers if pair[0].lower() == b"content-encoding"]
            response = await self._upstream.send("POST", self._url, headers, content)
        except httpx.HTTPError as error:
            await self._unreachable(step, error)
            return False
        try:
            if response.status_code >= 400:
                return await self._refused(step, response, fresh=fresh)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return await self._streamed(step, sending, response)
            return await self._whole(step, sending, response)
        finally:
            await response.aclose()

    async def _refused(self, step: str, response: httpx.Response, *, fresh: bool) -> bool:
        """The provider refused. If our changes may be the cause, sends the request again unchanged."""
        body = await self._read(step, response)
        if body is None:
            return False
        error = httpx.HTTPStatusError(f"HTTP {response.status_code}", request=response.request, response=response)
        self._fail(step, describe(error), refused=response.status_code < 500)
        if fresh and response.status_code in _UNFIT:
            self._conversation.unpaged = f"{self._upstream.url.host} said {response.status_code} to what was sent"
            self._doubted = True
            if not self._caller.started:
                self._rounds, self._said = [], []
            return True
        if self._doubted:
            self._conversation.unpaged = None  # it takes it no better as it came
        if self._caller.started:
            parsed = _json(body)
            await self._caller.write(self._wire.broken(parsed if is_map(parsed) else self._wire.error("api_error", "")))
            await self._caller.end()
        else:
            await self._caller.answer(response.status_code, answering(response.headers.raw, whole=True), body)
        return False

    async def _read(self, step: str, response: httpx.Response) -> bytes | None:
        """Reads a whole body; None if it broke off, which the client is informed of."""
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            await self._unreachable(step, error)
            return None

    async def _unreachable(self, step: str, error: httpx.HTTPError) -> None:
        self._fail(step, describe(error))
        await self._caller.refuse(self._wire, *unreachable(error, self._upstream))

    async def _whole(self, step: str, sending: OutgoingRequest, response: httpx.Response) -> bool:
        body = await self._read(step, response)
        if body is None:
            return False
        reply = _json(body)
        if not is_map(reply):
            self._fail(step, Failure.of("killick.proxy", "the answer is not a JSON object"))
            await self._caller.answer(response.status_code, answering(response.headers.raw, whole=True), body)
            return False
        if await self._ended(step, sending, reply):
            return True
        visible = self._wire.visible([each.reply for each in self._rounds], self._own())
        body = msgspec.json.encode(visible) if visible is not reply else body
        await self._caller.answer(response.status_code, answering(response.headers.raw, whole=True), body)
        return False

    async def _streamed(self, step: str, sending: OutgoingRequest, response: httpx.Response) -> bool:
        caller = self._caller
        if self._splice is None:
            self._splice = self._wire.splice()
        splice, frames = self._splice, Frames()
        splice.begin(sending.own)
        if not caller.started:
            await caller.start(response.status_code, answering(response.headers.raw, whole=True))
        try:
            async for data in response.aiter_bytes():
                await caller.write(b"".join(map(splice.take, frames.feed(data))))
            await caller.write(b"".join(map(splice.take, frames.end())))
        except httpx.HTTPError as error:
            # Left unfinished, so that the client sees the truncation too.
            self._fail(step, describe(error))
            return False
        reply = splice.reply()
        if reply is None or not splice.is_whole:
            message = f"{_CUT}: {_line(splice.error)}" if splice.error else _CUT
            self._fail(step, Failure.of("killick.proxy", message))
            await caller.write(splice.finish())
            await caller.end()
            return False
        if await self._ended(step, sending, reply):
            splice.over()
            return True
        await caller.write(splice.finish())
        await caller.end()
        return False

    # responses ----------------------------------------------------------------------------------

    async def _ended(self, step: str, sending: OutgoingRequest, reply: dict[str, Any]) -> bool:
        """Records a complete reply with the window's answers; True: call the model again."""
        conversation, done = self._conversation, self._judged(sending, reply)
        self._rounds.append(done)
        self._open = None
        answers = answer_messages(self._wire.shape, done.answered)
        if done.again:
            self._said += [*self._wire.said(reply), *answers]
            await conversation.replied(step, reply, done.decisions)
            return True
        visible = self._wire.visible([each.reply for each in self._rounds], self._own())
        seen = self._wire.said(visible)
        said = print_of_messages(seen)
        exchange = None
        if len(self._rounds) > 1 or done.own:
            last = self._wire.said(reply) if done.answered else self._wire.said(self._wire.visible([reply], done.own))
            exchange = Exchange(len(self._asked.messages), to_text(shown_of(seen)), [*self._said, *last], answers)
        tip = tip_of(self._hashes.chain, said)
        try:
            await conversation.replied(step, reply, done.decisions, exchange=exchange, tip=tip)
        except KillickError as error:
            # The client must get the received reply.
            logger.warning("%s: a reply is not on record: %s", conversation.run, error)
            conversation.is_lost = True
        return False

    def _judged(self, sending: OutgoingRequest, reply: dict[str, Any]) -> Round:
        """Returns a reply's calls that the window answers, and its answers."""
        calls, window = self._wire.calls(reply), self._conversation.window
        asked = [call for call in calls if call.name in sending.own]
        if window is None or not asked:
            return Round(reply, [], set(), False, [])
        if self._wire.ends_early(reply):
            return Round(reply, [], {call.id for call in asked}, False, [])
        answered: list[ToolAnswer] = []
        decisions: list[Decision] = []
        for call in asked:
            answer = _answer(window, call)
            if answer is not None:
                said = {"text": answer.text, "failed": answer.failed}
                decisions += [
                    Decision(each.event, {**each.data, **said}) if isinstance(each.event, PageFaulted) else each
                    for each in answer.decisions
                ]
                answered.append(ToolAnswer(call.id, answer.text, answer.failed))
            else:
                answered.append(ToolAnswer(call.id, "this cannot be answered; continue without it", True))
        own = {each.id for each in answered}
        again = len(own) == len(calls) and len(self._rounds) + 1 < ROUNDS_MAX
        if len(own) == len(calls) and not again:
            answered = []  # it asked often enough: the client gets what there is
        return Round(reply, answered, own, again, decisions)

    def _own(self) -> set[str]:
        return {id for each in self._rounds for id in each.own}  # noqa: A001

    def _fail(self, step: str, failure: Failure, *, refused: bool = False) -> None:
        self._open = None
        partial = self._splice.reply() if self._splice is not None and not self._splice.is_whole else None
        failure = without(failure, self._headers)
        with contextlib.suppress(KillickError):
            self._conversation.failed(step, failure, refused=refused, partial=partial)


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


def _answer(window: Window, call: Call) -> Answer | None:
    """Returns the window's answer to a call. Errors are returned to the model."""
    try:
        answer = window.answering(call.name, call.arguments)
        if answer is not None:
            window.apply(answer.decisions)
    except Exception as error:
        logger.warning("a call of %s could not be answered: %s", call.name, error, exc_info=True)
        return None
    return answer


def _json(body: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(body)
    return None


def _line(error: Any) -> str:
    message = error.get("message") if is_map(error) else error
    return " ".join(str(message or error).split())[:500]


def _tool_name(tool: Any) -> str:
    if not is_map(tool):
        return ""
    function = tool.get("function")
    return str(tool.get("name") or (function.get("name") if is_map(function) else "") or tool.get("type") or "")
