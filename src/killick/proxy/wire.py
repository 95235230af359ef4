"""The provider interface: the messages of a request, the reply of a response, and a reply from its stream.

The providers are in `openai_chat`, `anthropic_messages` and `openai_responses`. Sends nothing and decides nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeGuard

from killick.proxy.frames import Frame
from killick.window.messages import Shape


class StreamedReply(ABC):
    """Assembles a reply from its stream. The end of the stream is held back until the reply is on record."""

    def __init__(self) -> None:
        self.error: Any = None
        """The provider's error in the middle of the stream, if any."""
        self._tail: list[bytes] = []

    @abstractmethod
    def take(self, frame: Frame) -> bytes:
        """Returns what goes to the client at once."""

    @abstractmethod
    def reply(self) -> dict[str, Any] | None:
        """Returns the reply, as without streaming; None if not understood."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether the reply is complete."""

    def _held(self, frame: Frame) -> bytes:
        self._tail.append(frame.raw)
        return b""

    def finish(self) -> bytes:
        """Returns the end that was held back."""
        return b"".join(self._tail)


class Wire(ABC):
    """The format of one provider's calls."""

    shape: Shape
    step: str
    """The recorded step name."""
    streamed: type[StreamedReply]

    def messages(self, body: Mapping[str, Any]) -> list[Any]:
        """Returns the messages of a request; none if it has no list of objects."""
        found = body.get("messages")
        return found if is_list(found) and len(maps(found)) == len(found) else []

    @abstractmethod
    def said(self, reply: Mapping[str, Any]) -> list[Any]:
        """Returns a reply as messages of a history."""

    def error(self, kind: str, message: str) -> dict[str, Any]:
        """Returns an error in the provider's form."""
        return {"error": {"message": message, "type": kind, "param": None, "code": None}}


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
