"""The reasoning trace of a run: model calls and tool calls in order, each with its input, output and usage.

A conversation grows by a few messages a call: only those are returned, and the number of earlier ones. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta

from killick.engine.steps.model_reply import reasoning_of, tool_calls_of
from killick.history.phrasing import entries_of
from killick.model import events as e
from killick.model.state import State, Traced
from killick.presenting.documents import Document, Error, errors, recorded_failure
from killick.presenting.steps import reply_text
from killick.web.handlers.record import PageAsked, paged
from killick.web.routes import Call, Nothing, get
from killick.window.messages import is_list
from killick.window.usage import request_of

TRACED_MAX: Final = 30

T = TypeVar("T")


class TraceAsked(PageAsked, frozen=True):
    """`cursor` is `next` of the page after."""

    limit: Annotated[int, Meta(ge=1, le=100)] = TRACED_MAX


class Message(Document, frozen=True):
    """A message that a model was sent: its role, its text if it has one, and its other parts."""

    role: str
    text: str | None
    content: Any = None


class ToolCall(Document, frozen=True):
    """A tool that a model wanted called."""

    name: str
    arguments: Any


class TracedCall(Document, frozen=True):
    """A model or tool call. Has the messages that the call before did not have; `before` counts the others.

    `rest` is the rest of the request, such as the model's name and its tools.
    """

    step: str
    kind: str
    name: str
    at_us: int
    status: str
    before: int = 0
    messages: tuple[Message, ...] = ()
    rest: Any = None
    input: Any = None
    said: str | None = None
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    output: Any = None
    usage: e.Usage | None = None
    errors: tuple[Error, ...] = ()


class Trace(Document, frozen=True):
    """Model and tool calls in order, of `total`; `next` is the cursor of those before."""

    run: str
    total: int
    first: int
    traced: tuple[TracedCall, ...]
    next: str | None


@get("/runs/{run}/trace", page="_trace.html")
def trace(call: Call[TraceAsked, Nothing]) -> Trace:
    """The reasoning trace: messages, reasoning, tool calls and usage, in order."""
    asked = call.asked
    state = call.log.state(asked.run)
    indexes, following = paged(state.fold.trace, asked)
    start = int(following or 0)
    sent = _sent_before(state, start)
    calls: list[TracedCall] = []
    for at, index in enumerate(indexes):
        each = state.trace[start + at]
        if each.sort != "model":
            calls.append(TracedCall.of(each, kind=each.sort, reasoning=None, errors=_errors(state, index)))
            continue
        messages = _messages(each.input)
        calls.append(_model(each, messages, sent, _errors(state, index)))
        sent = messages
    return Trace(run=asked.run, total=len(state.fold.trace), first=start + 1, traced=tuple(calls), next=following)


def _sent_before(state: State, start: int) -> Sequence[Any]:
    """The messages of the preceding model call, if it is near."""
    for place in range(start - 1, max(start - TRACED_MAX, 0) - 1, -1):
        step = state.fold.steps[state.fold.trace[place]]
        if step.sort == "model":
            return _messages(state.data(step.edited or step.intended).get("arguments"))
    return ()


def _messages(arguments: Any) -> Sequence[Any]:
    request = request_of(arguments)
    return request[0] if request is not None else ()


def _model(traced: Traced, messages: Sequence[Any], sent: Sequence[Any], errors: tuple[Error, ...]) -> TracedCall:
    shared = 0
    while shared < min(len(messages), len(sent)) and messages[shared] == sent[shared]:
        shared += 1
    if shared == len(sent) and shared:
        # The model's replies appear at their own calls.
        while shared < len(messages) and entries_of(messages[shared]).get("role") == "assistant":
            shared += 1
    reply = traced.output
    rest = {name: value for name, value in entries_of(traced.input).items() if name not in ("messages", "input")}
    said = reply_text(reply)
    calls = tuple(map(ToolCall.of, _read(tool_calls_of, reply) or ()))
    return TracedCall.of(
        traced, kind=traced.sort, before=shared, messages=tuple(map(_message, messages[shared:])), rest=rest or None,
        input=None if messages else traced.input, said=said, reasoning=traced.reasoning or _read(reasoning_of, reply),
        calls=calls, errors=errors,
    )  # fmt: skip


def _message(message: Any) -> Message:
    said = entries_of(message)
    content = said.get("content", message if not said else None)
    role = str(said.get("role") or said.get("type") or "message")
    if isinstance(content, str):
        more = {name: value for name, value in said.items() if name not in ("role", "content") and value is not None}
        return Message(role=role, text=content, content=more or None)
    if is_list(content) and len(content) == 1 and isinstance(text := entries_of(content[0]).get("text"), str):
        return Message(role=role, text=text)
    return Message(role=role, text=None, content=message if content is None else content)


def _read(read: Callable[[Any], T], reply: Any) -> T | None:
    try:
        return read(reply)
    except Exception:  # a reply may be anything
        return None


def _errors(state: State, index: int) -> tuple[Error, ...]:
    """Why a call did not return."""
    step = state.fold.steps[index]
    found: Any = state.data(step.output).get("failure") if step.status == "failed" and step.output else None
    return errors(recorded_failure(found))
