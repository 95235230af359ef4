"""Named events: each one fires every trigger that listens to it."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from killick.web.handlers.operations import Name
from killick.web.idempotency import derived
from killick.web.routes import Call, Nothing, post


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event, by its name."""

    name: Annotated[Name, msgspec.Meta(description="What triggers listen to.", examples=["order.created"])]
    body: Annotated[Any, msgspec.Meta(description="Its body; any JSON value.")] = None
    id: Annotated[Name, msgspec.Meta(description="Makes it count once: the same id again is passed over.")] | None = (
        None
    )


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of publishing an event."""

    name: str
    receivers: Annotated[int, msgspec.Meta(description="How many triggers listen to it.")]


def publish(call: Call[Nothing, PublishRequest]) -> PublishResult:
    """Publish an event: every trigger that listens to it fires.

    An event without a listening trigger is not kept. With an id, or an `Idempotency-Key`, it counts once.
    """
    event = call.body
    receivers = call.client.publish(event.name, event.body, id=event.id or derived(call, "event"), by=call.person.name)
    return PublishResult(name=event.name, receivers=receivers)


ROUTES: Final = (post("/events", publish, takes=PublishRequest, gives=PublishResult, natural=True),)
