"""What a database server replies to appends and deliveries, as the records and errors of a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from killick.errors import (
    AlreadyClaimed,
    DeliveryRefused,
    EpochStale,
    HeadMoved,
    InboxMoved,
    LogError,
    MessageGone,
    RunBroken,
    RunExists,
    RunUnknown,
)
from killick.store.records import Append, Delivered, Delivery, Head, Message


def refusal_of(kind: str, run: str, *rest: str) -> LogError:
    """Returns the refusal of an append or a delivery by its name and fields."""
    match kind:
        case "RunExists":
            return RunExists(run)
        case "EpochStale":
            return EpochStale(run, held=int(rest[0]), actual=int(rest[1]))
        case "HeadMoved":
            return HeadMoved(run, expected=int(rest[0]), actual=int(rest[1]))
        case "AlreadyClaimed":
            return AlreadyClaimed(run, space=rest[0], owner=rest[1], seq=int(rest[2]))
        case "MessageGone":
            return MessageGone(run, int(rest[0]))
        case "InboxMoved":
            return InboxMoved(run, int(rest[0]))
        case "DeliveryRefused":
            return DeliveryRefused(run, slot=rest[0], found=rest[1] if len(rest) > 1 else None)
        case "RunBroken":
            return RunBroken(run, seq=int(rest[0]), reason="a row already exists where a new one belongs")
        case _:
            return RunUnknown(run)


def acknowledged(
    items: Sequence[Append], results: Sequence[Head | LogError], committed: Callable[[Append], Head | None]
) -> list[Head | LogError]:
    """In a resent batch, accepts the appends that are in the log, also under later ones of the same batch."""
    return [
        committed(item) or result if isinstance(result, HeadMoved) and item.create is None and item.rows else result
        for item, result in zip(items, results, strict=True)
    ]


def delivered(sent: Delivery, message: Message, *, fresh: bool, again: bool) -> Delivered:
    """Returns the result of a delivery. A resent one owns the stored message if their contents are equal."""
    same = (message.name, message.body, message.by, message.at_us) == (sent.name, sent.body, sent.by, sent.at_us)
    return Delivered(message, fresh=fresh or (again and same))
