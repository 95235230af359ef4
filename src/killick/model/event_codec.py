"""Encodes and decodes events, and knows every kind. Older versions of an event are upcast."""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final, Union

import msgspec

from killick.errors import EventBroken, EventUnknown
from killick.model import events as e
from killick.model import page_events as p
from killick.model import system_events as s
from killick.model.cipher import Cipher, Place
from killick.model.hashing import DATA, LINK
from killick.type_init import ready

KINDS: Final[dict[str, type[e.Event]]] = {
    str(kind.__struct_config__.tag): kind
    for module in (e, p, s)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, e.Event) and kind is not e.Event
}
"""Every stored kind and its type: the events that these modules declare."""

OUTBOX_EVENTS: Final[frozenset[type[e.Event]]] = frozenset(
    {
        e.LeaseLapsed, e.RunQuarantined, e.RunStarted, e.RunForked, e.RunPaused, e.RunResumed, e.RunDiverged,
        e.RunRewound, e.RunRepaired, e.RunRenewed, e.CancelRequested, e.RunCompleted, e.RunFailed, e.RunCancelled,
        e.WaitOpened, e.WaitClosed, e.AttemptSettled, e.ChildSpawned,
    }
)  # fmt: skip
"""The events that hooks can receive. Each enters the store's outbox in the commit that appends it."""

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Final[dict[str, Upcaster]] = {}
"""Maps a retired kind to a function that returns its successor's body (with the successor's `kind`)."""
_encode: Final = msgspec.json.Encoder().encode
_decode: Final[Callable[[bytes], e.Event]] = msgspec.json.Decoder(Union[tuple(KINDS.values())]).decode  # noqa: UP007


def chained(
    place: Place, event: e.Event, data: bytes | None = None, cipher: Cipher | None = None
) -> tuple[bytes, bytes | None, bytes]:
    """Returns an event as it is stored at a place: its body with the hash of its data, its data, and the chain hash
    there. A cipher encrypts the data, and seals the body."""
    body = _encode(event)
    if data is not None:
        if cipher is not None:
            data = cipher.encrypt_json(data, place.data)
        digest = b2a_base64(sha256(DATA + data).digest(), newline=False)[:43].translate(e.URL_SAFE)
        body = b'%b,"data":"%b"}' % (body[:-1], digest)
    if cipher is not None:
        body = cipher.sealed(place, body)
    return body, data, sha256(LINK + place.hash + body).digest()


def encode(event: e.Event, data: bytes | None = None) -> bytes:
    """Returns the body of an event, with the hash of its data."""
    return chained(Place("", 0, b""), event, data)[0]


check: Final = _decode
"""Raises msgspec's ValidationError for the body of an event that could not be decoded again."""


def decode(body: bytes) -> e.Event:
    """Decodes a body. An older version is upcast."""
    try:
        return _decode(body)
    except msgspec.ValidationError:
        return _upcast(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EventBroken(str(error)) from error


def _upcast(body: bytes) -> e.Event:
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        kind = str(fields.get("kind"))
        while kind in UPCASTERS:
            fields = UPCASTERS[kind](fields)
            kind = str(fields["kind"])
        if kind in KINDS:
            return msgspec.convert(fields, ready(KINDS[kind]))
    except msgspec.DecodeError as error:
        raise EventBroken(str(error)) from error
    name, _, version = kind.partition("/")
    raise EventUnknown(name, int(version) if version.isdigit() else 1)
