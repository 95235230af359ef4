"""What the proxy must know of a provider's form: how a request asks, how a reply says, how a stream is put together.

The forms themselves are in `chat`, `messages` and `responses`. Sends nothing and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard

import msgspec

from killick.proxy.sse_frames import Frame
from killick.window.messages import Shape


class Asked(msgspec.Struct, frozen=True):
    """What a request asks. `unpaged` says why its messages are to be sent as they are, if they are."""

    body: dict[str, Any]
    messages: list[Any]
    tools: list[Any]
    system: Any = None
    streams: bool = False
    unpaged: str | None = None
    may_call: bool = True
    """Whether the model is free to call what it wants, and so to ask for pages."""


def listed(body: Mapping[str, Any]) -> tuple[list[Any], list[Any], str | None]:
    """A request's messages and tools, and why it is not to be paged, if that is so."""
    messages, tools = body.get("messages"), body.get("tools")
    given = tools if is_list(tools) else []
    if not is_list(messages) or len(maps(messages)) != len(messages):
        return [], given, "its messages are no list of objects"
    return messages, given, None if given else "it has no tools, and so the model could ask for nothing back"


class Call(NamedTuple):
    """A tool that a reply wants called."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


class Answered(NamedTuple):
    """A call that the window answered itself."""

    call: Call
    text: str
    failed: bool


class Splice(Protocol):
    """One stream to the client made of one or more from upstream.

    Calls of `held` names are kept back until it is known whose they are, and so is the end of each round; calls of
    `own` names never reach the client.
    """

    def begin(self) -> None:
        """A reply begins: the first, or another that goes on where the last one stopped."""
        ...

    def take(self, frame: Frame) -> bytes:
        """What goes to the client at once."""
        ...

    def reply(self) -> dict[str, Any] | None:
        """The whole reply of this round, as if it had not been streamed; None where it was not understood."""
        ...

    def release(self, own: Collection[str]) -> bytes:
        """What was kept back of calls that are the client's after all."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the reply of this round came to its end."""
        ...

    @property
    def error(self) -> Any:
        """What the provider told to be wrong in the middle of it, if it did."""
        ...

    def over(self) -> None:
        """Another round follows this one."""
        ...

    def finish(self) -> bytes:
        """The end, once for all rounds."""
        ...


class Wire(Protocol):
    """The form of one provider's calls."""

    shape: Shape
    step: str
    """What the steps are called on record."""

    def asked(self, body: dict[str, Any]) -> Asked: ...

    def body(self, asked: Asked, messages: Sequence[Any], tools: Sequence[Any]) -> dict[str, Any]:
        """A request's body with other messages and tools."""
        ...

    def calls(self, reply: Mapping[str, Any]) -> list[Call]:
        """The tools that a reply wants called."""
        ...

    def ends_early(self, reply: Mapping[str, Any]) -> bool:
        """Whether a reply was cut off, so that its calls may not be whole."""
        ...

    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        """A reply as it stands in a history."""
        ...

    def answers(self, answered: Sequence[Answered]) -> list[Any]:
        """Results as they stand in a history."""
        ...

    def joined(self, held: Sequence[Any], following: Sequence[Any]) -> list[Any]:
        """Results that were held back, with what the client sent after its own calls."""
        ...

    def visible(self, replies: Sequence[dict[str, Any]], own: Collection[str]) -> dict[str, Any]:
        """The replies of some rounds as one, without the calls of these ids."""
        ...

    def splice(self, held: Collection[str] = (), own: Collection[str] = ()) -> Splice: ...

    def error(self, kind: str, message: str) -> dict[str, Any]:
        """An error as the provider would tell it."""
        ...

    def broken(self, error: Mapping[str, Any]) -> bytes:
        """An error inside a stream."""
        ...


# what all forms share ---------------------------------------------------------------------------------


def is_map(thing: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(thing, dict)


def is_list(thing: Any) -> TypeGuard[list[Any]]:
    return isinstance(thing, list)


def maps(thing: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where it is no list."""
    return [each for each in thing if is_map(each)] if is_list(thing) else []


def text_in(content: Any) -> str:
    """The text of a message's content, whether it is a text or parts."""
    if isinstance(content, str):
        return content
    return "".join(text for part in maps(content) if isinstance(text := part.get("text"), str))


def summed(counts: Sequence[Any]) -> dict[str, Any]:
    """What several calls used together: numbers are added, whatever else the last one says stands."""
    total: dict[str, Any] = {}
    for one in filter(is_map, counts):
        for name, value in one.items():
            old = total.get(name)
            if is_map(value):
                total[name] = summed([old, value])
            elif isinstance(value, int | float) and not isinstance(value, bool) and isinstance(old, int | float):
                total[name] = old + value
            elif value is not None or name not in total:
                total[name] = value
    return total
