"""Encodes an event as a row of the log: its body, its values as data, the chain hash. Refuses what cannot be stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from killick.errors import ValueRefused
from killick.ids import salt
from killick.model.chunks import Blob, pack
from killick.model.cipher import Cipher, Place
from killick.model.event_codec import chained, check
from killick.model.events import AttemptEnded, AttemptProgressed, AttemptStarted, Event, StepIntended, StepStarted
from killick.store.records import Row
from killick.text import LONE_SURROGATE, printable

STEP_EVENTS: Final = frozenset({StepIntended, StepStarted, AttemptStarted, AttemptProgressed, AttemptEnded})
"""Frequent events of steps, whose fields only the runtime sets: they need no check."""


def row_of(
    place: Place, event: Event, values: Mapping[str, Any] | None, secret_key: bytes, cipher: Cipher | None
) -> tuple[Row, Sequence[Blob]]:
    """Returns an event as its row, with the chunks of its values. Raises ValueRefused, with the step and the path."""
    data, blobs = packed(event, values, secret_key, cipher) if values else NO_VALUES
    try:
        body, data, hash_ = chained(place, event, data, cipher)
        if type(event) not in STEP_EVENTS:
            check(body)
    except (TypeError, msgspec.ValidationError) as error:  # a name or a priority of a wrong type
        raise ValueRefused(_place(event), str(error)) from None
    except UnicodeEncodeError as error:
        raise ValueRefused(f"{_place(event)}: {printable(error.object)}", LONE_SURROGATE) from None
    return Row(place.seq, body, data, hash_), blobs


def packed(
    event: Event, values: Mapping[str, Any] | None, secret_key: bytes, cipher: Cipher | None
) -> tuple[bytes | None, Sequence[Blob]]:
    """Returns an event's data, salted, and its chunks, in an encrypted store encrypted."""
    try:
        form = pack(values, at="", secret_key=cipher.digest_key if cipher else secret_key, cipher=cipher)
    except ValueRefused as refused:
        raise ValueRefused(f"{_place(event)}: {refused.path.lstrip('.')}", refused.reason) from None
    return b"%b%b}" % (form.raw[:-1], salt()), form.blobs


NO_VALUES: Final[tuple[None, tuple[Blob, ...]]] = None, ()


def _place(event: Event) -> str:
    """Names an event's values in errors: by step, if any."""
    step = getattr(event, "step", None)
    kind = event.__struct_config__.tag
    return f"step {step} ({kind})" if step else str(kind)
