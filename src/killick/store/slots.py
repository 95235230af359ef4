"""The conditions of deliveries to a run. A store compares them in the transaction of a delivery. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from killick.errors import DeliveryRefused

ENDED_SLOT: Final = "ended"
"""The slot of a run that has ended: no message is accepted any more. Its token is the status."""

RENEWED_SLOT: Final = "renewed"
"""The slot of a run that continues in another one: messages go there. Its token is that run's id."""

ROOT_SLOT: Final = "root"
"""The slot of a renewed run. Its token is the id of the first run in the chain, by which messages are deduplicated."""

NO_SLOT: Final = -1
"""The places of a slot in an append that removes it."""

ALL_PLACES: Final = 1_000_000
"""The places that a delivery takes which closes a slot."""


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A condition of deliveries to a run, which an append of its log writes.

    A delivery that names a slot is accepted while the slot has this token and places left, and takes places. The store
    compares it in the transaction of the delivery. Names and tokens are opaque to it, but for ENDED, RENEWED and ROOT.
    In a delivery and in `Append.gives`, `places` is how many are taken or given back.
    """

    name: str
    token: str
    places: int = 0

    def with_places(self, more: int) -> Slot:
        """Returns it with more places, or with fewer, but never less than none."""
        return Slot(self.name, self.token, max(0, self.places + more))


def refusal(run: str, expected: Slot | None, slots: Mapping[str, Slot]) -> DeliveryRefused | None:
    """Returns why a run with these slots takes no message that expects one; None where they allow it."""
    if (ended := slots.get(ENDED_SLOT)) is not None:
        return DeliveryRefused(run, slot=ENDED_SLOT, found=ended.token)
    if expected is None:
        return None
    found = slots.get(expected.name)
    if found is None or found.token != expected.token or found.places < 1:
        return DeliveryRefused(run, slot=expected.name, found=None if found is None else found.token)
    return None
