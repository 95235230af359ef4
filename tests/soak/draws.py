"""What chance decides in a soak, drawn from a seed and a place, never from time: which fate, which blow, and when."""

from __future__ import annotations

from hashlib import sha256
from typing import Final, Literal, NamedTuple

Fate = Literal["ok", "late", "too late", "refuse", "drop before", "drop after"]

FATES: Final[tuple[tuple[float, Fate], ...]] = (
    (0.58, "ok"),
    (0.68, "late"),
    (0.72, "too late"),
    (0.82, "refuse"),
    (0.91, "drop before"),
    (1.00, "drop after"),
)
"""Which share of first requests meets which fate, added up."""

FATEFUL_ATTEMPTS: Final = 4
"""Attempts that may meet a bad fate; a far side that never gets better would prove nothing."""

_WHOLE: Final = float(1 << 64)


class Blow(NamedTuple):
    """What is done to a worker: when, in seconds after the start, to which, and for how long it is frozen, if it is."""

    at_seconds: float
    slot: int
    frozen_seconds: float | None


def draw(*place: object) -> float:
    """A number from 0 to 1 that belongs to a place."""
    digest = sha256("\x1f".join(map(str, place)).encode()).digest()
    return int.from_bytes(digest[:8]) / _WHOLE


def fate(seed: int, what: str, attempt: int) -> Fate:
    """What the far side does with a request."""
    if attempt > FATEFUL_ATTEMPTS:
        return "ok"
    drawn = draw(seed, what, attempt)
    return next(name for share, name in FATES if drawn < share)


def blow(seed: int, number: int, *, workers: int, every_seconds: float, lease_seconds: float) -> Blow:
    """The blows, one after the other: a kill and a freeze in turn. A freeze outlasts the lease."""
    place = (seed, "blow", number)
    frozen = None if (seed + number) % 2 else lease_seconds + 0.5 + 1.5 * draw(*place, "how long")
    return Blow(every_seconds * (number + draw(*place, "when")), int(workers * draw(*place, "who")), frozen)


def restarts(seed: int, count: int, *, first: float, apart: float) -> list[float]:
    """When the server under the store is restarted, in seconds after the start."""
    return [first + apart * (number + 0.5 * draw(seed, "restart", number)) for number in range(count)]
