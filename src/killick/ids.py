"""The only module that draws random numbers: ids, keys and jitter. All others take an Ids."""

from __future__ import annotations

import os
import random
from typing import Final, Protocol

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_CHARS: Final = 16


class Ids(Protocol):
    """A source of ids and randomness."""

    def new(self, prefix: str) -> str:
        """Returns a new id, `prefix_…`."""
        ...

    def key(self) -> bytes:
        """Returns 32 unguessable bytes."""
        ...

    def fraction(self) -> float:
        """Returns a number in [0, 1), for jitter."""
        ...


def salt() -> bytes:
    """Returns eight unguessable bytes."""
    return os.urandom(8)


class RandomIds:
    """Ids from the operating system's randomness."""

    def new(self, prefix: str) -> str:
        return f"{prefix}_{''.join(_ALPHABET[b & 31] for b in os.urandom(_ID_CHARS))}"

    def key(self) -> bytes:
        return os.urandom(32)

    def fraction(self) -> float:
        return int.from_bytes(os.urandom(7), "big") / (1 << 56)


class SeededIds:
    """Ids that a seed reproduces, for tests and simulation."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, prefix: str) -> str:
        return f"{prefix}_{''.join(self._random.choices(_ALPHABET, k=_ID_CHARS))}"

    def key(self) -> bytes:
        return self._random.randbytes(32)

    def fraction(self) -> float:
        return self._random.random()
