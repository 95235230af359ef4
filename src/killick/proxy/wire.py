"""The provider interface: parsing requests and replies, and merging streams.

The providers are in `openai_chat`, `anthropic_messages` and `openai_responses`. Sends nothing and decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from killick.proxy.frames import Frame
from killick.window.messages import Call, Shape, read


class ParsedBody(msgspec.Struct, frozen=True):
    """A parsed request. `unpaged` says why its messages must be sent unchanged, if so."""

    body: dict[str, Any]
    messages: list[Any]
    tools: list[Any]
    system: Any = None
    unpaged: str | None = None
    may_call: bool = True
    """Whether the model may call any tool, and so recall pages."""


def listed(body: Mapping[str, Any]) -> tuple[list[Any], list[Any], str | None]:
    """Returns a request's messages and tools, and why it is not paged, if so."""
    messages, tools = body.get("messages"), body.get("tools")
    given = tools if is_list(tools) else []
    if not is_list(messages) or len(maps(messages)) != len(messages):
        return [], given, "its messages are not a list of objects"
    return messages, given, None if given else "it has no tools, and so the model could ask for nothing back"


class Splice(ABC):
    """Merges one or more upstream streams into one client stream. The end of each round is held back."""

    def __init__(self) -> None:
        self.error: Any = None
        """The provider's error in the middle of the stream, if any."""
        self._own: Collection[str] = ()
        self._rounds = 0
        self._out = 0
        self._changed = False
        self._sent_calls: bool = False
        self._usages: list[Any] = []
        self._tail: list[bytes] = []

    def begin(self, own: Collection[str] = ()) -> None:
        """Starts a reply: the first, or a continuation. Calls of these names do not reach the client."""
        self._own = own
        self._rounds += 1
        self._tail, self._sent_calls = [], False

    @abstractmethod
    def take(self, frame: Frame) -> bytes:
        """Returns what goes to the client at once."""

    @abstractmethod
    def reply(self) -> dict[str, Any] | None:
        """Returns this round's complete reply, as without streaming; None if not understood."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether this round's reply is complete."""

    def over(self) -> None:  # noqa: B027
        """Ends a round that another follows; its usage is added up."""

    def finish(self) -> bytes:
        """Returns the end, once for all rounds."""
        return b"".join(self._tail) if self._rounds == 1 and not self._changed else self._merged_end()

    def _merged_end(self) -> bytes:
        """Returns the end of several rounds, or of one that was changed."""
        return b""


class Wire(ABC):
    """The format of one provider's calls."""

    shape: Shape
    step: str
    """The recorded step name."""

    @abstractmethod
    def asked(self, body: dict[str, Any]) -> ParsedBody:
        """Parses a request's body."""

    def body(self, asked: ParsedBody, messages: Sequence[Any], tools: Sequence[Any]) -> dict[str, Any]:
        """Returns a request's body with other messages and tools."""
        return {**asked.body, "messages": list(messages), "tools": list(tools)}

    def calls(self, reply: Mapping[str, Any]) -> list[Call]:
        """Returns a reply's tool calls."""
        return [call for message in self.said(reply) for call in read(message, self.shape).calls]

    def ends_early(self, reply: Mapping[str, Any]) -> bool:
        """Returns whether a reply was truncated, so that its calls may be incomplete."""
        return False

    @abstractmethod
    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        """Returns a reply as a message of a history."""

    def joined(self, held: Sequence[Any], following: Sequence[Any]) -> list[Any]:
        """Adds held-back results to the client's messages after its own calls."""
        return [*held, *following]

    def visible(self, replies: Sequence[dict[str, Any]], own: Collection[str]) -> dict[str, Any]:
        """Merges the replies of some rounds, without the calls of these ids. Without paging there is one round."""
        return replies[-1]

    @abstractmethod
    def splice(self) -> Splice:
        """Returns what merges the streams of one reply."""

    def error(self, kind: str, message: str) -> dict[str, Any]:
        """Returns an error in the provider's form."""
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}

    @abstractmethod
    def broken(self, error: Mapping[str, Any]) -> bytes:
        """Returns an error inside a stream."""


# shared by all forms ----------------------------------------------------------------------------------


def is_map(thing: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(thing, dict)


def is_list(thing: Any) -> TypeGuard[list[Any]]:
    return isinstance(thing, list)


def maps(thing: Any) -> list[dict[str, Any]]:
    """Returns the objects of a list; none for another value."""
    return [each for each in thing if is_map(each)] if is_list(thing) else []


def text_in(content: Any) -> str:
    """Returns the text of a message's content, a text or parts."""
    if isinstance(content, str):
        return content
    return "".join(text for part in maps(content) if isinstance(text := part.get("text"), str))


def summed(counts: Sequence[Any]) -> dict[str, Any]:
    """Sums the usage of several calls: numbers are added, other fields come from the last."""
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
