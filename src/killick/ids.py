"""The only module that draws random numbers: ids, keys and jitter. All others take an Ids."""

from __future__ import annotations

import os
import random
from typing import Final, Protocol

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_ID_CHARS: Final = 16
_SALT_BITS: Final = 64
_SALTS_DRAWN: Final = 64
_BLANKS: Final = bytes.maketrans(b"01", b" \t")


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
    """Returns 64 unguessable bits, each as a blank: a space or a tab, which readers of JSON skip."""
    while True:
        try:
            return _salts.pop()
        except IndexError:
            bits = int.from_bytes(os.urandom(_SALT_BITS * _SALTS_DRAWN // 8))
            blanks = f"{bits:0{_SALT_BITS * _SALTS_DRAWN}b}".encode().translate(_BLANKS)
            _salts.extend(blanks[at : at + _SALT_BITS] for at in range(0, len(blanks), _SALT_BITS))


_salts: Final[list[bytes]] = []
"""Salts drawn in advance, because the system call of each would cost as much as a hash."""
os.register_at_fork(after_in_child=_salts.clear)


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
