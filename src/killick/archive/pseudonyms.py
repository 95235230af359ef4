"""Pseudonyms for redacted values: of the same type and shape, equal for equal values, one-way.

Empty values, zero, true, false and null are kept: they only say whether there is a value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from hashlib import shake_256
from typing import Any, Final
from uuid import UUID

from killick.model.codec import Erased, canonical

_TRIES: Final = 32
"""How often another pseudonym is tried after a collision with another value."""

_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}(?=$|[T ])")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_WHOLE: Final = re.compile(r"[1-9]\d{0,17}")

LEAVES: Final = (str, int, float, bytes, bytearray, Decimal, UUID, date, time, timedelta, Erased)
"""The types that get a pseudonym. A bool is an int but not one of these; a Secret is already a digest."""


class Pseudonyms:
    """The pseudonyms of one file, by a random key that is discarded."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._known: dict[tuple[type, Any], Any] = {}
        self._taken: set[tuple[type, Any]] = set()

    def of(self, value: Any) -> Any:
        """The pseudonym of a value that is not a container."""
        if isinstance(value, bool) or not isinstance(value, LEAVES) or not value:
            return value
        name = _name(value)
        if name not in self._known:
            self._known[name] = self._made(value)
        return self._known[name]

    def hash(self, value: bytes) -> bytes:
        """The pseudonym of a hash."""
        return self._noise(b"hash", value, 32)

    def _made(self, value: Any) -> Any:
        if isinstance(value, str) and _WHOLE.fullmatch(value):
            return str(self.of(int(value)))  # a number that became a text stays that number
        make, found = next(make for kind, make in _MAKERS if isinstance(value, kind)), value
        written = value.hash if isinstance(value, Erased) else canonical(value)
        for attempt in range(_TRIES):
            found = make(value, partial(self._noise, b"%d" % attempt, written))
            name = _name(found)
            if name not in self._taken and found != value:
                self._taken.add(name)
                break
        return found

    def _noise(self, salt: bytes, value: bytes, length: int) -> bytes:
        return shake_256(b"\0".join((self._key, salt, value))).digest(length)


_Noise = Callable[[int], bytes]


def _name(value: Any) -> tuple[type, Any]:
    kind: type = value.__class__
    return kind, bytes(value) if isinstance(value, bytearray) else value


def _text(text: str, noise: _Noise) -> str:
    if _UUID.fullmatch(text):
        return str(UUID(bytes=noise(16), version=4))
    day = _DAY.match(text)
    if day is not None:
        return _date(date(2000, 1, 1), noise).isoformat() + text[day.end() :]
    return "".join(map(_character, text, noise(len(text))))


def _character(char: str, byte: int) -> str:
    """Replaces a letter by a letter, a digit by a digit; other characters separate words, and stay."""
    if char.isdigit():
        return chr(48 + byte % 10)
    if char.isalpha():
        return chr((65 if char.isupper() else 97) + byte % 26)
    return char


def _digits(text: str, noise: bytes) -> str:
    """The same number of other digits, without a new leading zero."""
    found = [chr(48 + byte % 10) if char.isdigit() else char for char, byte in zip(text, noise, strict=False)]
    first = next((place for place, char in enumerate(text) if char.isdigit() and char != "0"), None)
    if first is not None:
        found[: first + 1] = [*text[:first], chr(49 + noise[first] % 9)]
    return "".join(found)


def _int(value: int, noise: _Noise) -> int:
    text = format(abs(value), "d") if abs(value) < 10**1000 else "1" + "0" * 1000
    return int(_digits(text, noise(len(text)))) * (-1 if value < 0 else 1)


def _float(value: float, noise: _Noise) -> float:
    if not math.isfinite(value):
        return value
    digits, exponent, power = repr(value).partition("e")
    whole, _, part = digits.partition(".")
    if part == "0" and whole.lstrip("-") != "0":
        return float(f"{_digits(whole, noise(len(whole)))}.0{exponent}{power}")
    return float(_digits(digits, noise(len(digits))) + exponent + power)


def _decimal(value: Decimal, noise: _Noise) -> Decimal:
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits))
    found = _digits(text, noise(len(text)))
    return value if not isinstance(exponent, int) else Decimal((sign, tuple(map(int, found)), exponent))


def _date(value: date, noise: _Noise) -> date:
    one, two, three = noise(3)
    return value.replace(year=1960 + one % 60, month=1 + two % 12, day=1 + three % 28)


def _time(value: Any, noise: _Noise) -> Any:
    one, two, three = noise(6)[3:]
    return value.replace(hour=one % 24, minute=two % 60, second=three % 60)


def _timedelta(value: timedelta, noise: _Noise) -> timedelta:
    return timedelta(microseconds=_int(value // timedelta(microseconds=1), noise))


_MAKERS: Final[tuple[tuple[Any, Callable[[Any, _Noise], Any]], ...]] = (
    (str, _text),
    (int, _int),
    (float, _float),
    (bytes, lambda value, noise: noise(len(value))),
    (bytearray, lambda value, noise: bytearray(noise(len(value)))),
    (Decimal, _decimal),
    (UUID, lambda value, noise: UUID(bytes=noise(16), version=value.version)),
    (datetime, lambda value, noise: _time(_date(value, noise), noise)),
    (date, _date),
    (time, _time),
    (timedelta, _timedelta),
    (Erased, lambda value, noise: Erased(noise(32))),
)
