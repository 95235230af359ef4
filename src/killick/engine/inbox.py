"""The inbox of a run: the names of the engine's own messages, their ids, and their bodies."""

from __future__ import annotations

from typing import Any, Final

from killick.log.log import Log
from killick.model import events as e
from killick.model.chunks import pack, unpack
from killick.store.records import Delivery, Message

COMMAND: Final = "killick.command"
"""The name of a message with a command, to the holder of a run."""

ANSWER: Final = "killick.answer"

VOTE: Final = "killick.vote"
"""The name of an answer that does not end a wait by itself, because several people have to agree."""

CHILD: Final = "killick.child"
SAID: Final = "killick.said"


def answer_id(run: str, step: e.StepId, opened: int) -> str:
    """The id that answers to a wait carry, so that the first one wins."""
    return f"answer:{run}:{step}@{opened}"


def vote_id(answer: str, by: str) -> str:
    """The id of one of several answers that a wait needs: one a person, however often they click."""
    return f"{answer}#{by}"


def child_id(run: str) -> str:
    return f"child:{run}"


def body_of(log: Log, message: Message) -> Any:
    return unpack(message.body, log.store.pieces)


def delivery(run: str, name: str, body: Any, *, id: str, by: str | None, at_us: int) -> Delivery:  # noqa: A002
    """A message on its way."""
    packed = pack(body, at="body")
    return Delivery(run=run, id=id, name=name, body=packed.raw, by=by, at_us=at_us, pieces=tuple(packed.blobs))
