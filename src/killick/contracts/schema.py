"""Parses user-written value bounds into canonical form. `schema_check` tests values against them."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime, time
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, Final, TypeAlias

import msgspec

from killick.contracts import declarations
from killick.contracts.regex import compiled
from killick.errors import ContractRefused

Number: TypeAlias = int | float | Decimal

TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float, Decimal),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
    "bytes": (bytes,),
    "date": (date,),
    "datetime": (datetime,),
}
"""The type names, matched exactly: true is no number, and a subclass is not its base."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of one value. All of them must hold.

    type      one JSON type or several, such as "string"
    min, max  the least and the greatest number
    one_of    the permitted values
    each      the bounds of every item of a list
    fields    the bounds of an object, by field
    """

    type: tuple[str, ...] = ()
    min: int | float | str | None = None
    max: int | float | str | None = None
    length: tuple[int, int | None] | None = None
    """The minimum and maximum length of a text, bytes, list or object."""
    matches: str | None = None
    """A regular expression for the whole text; \\w, \\d and \\s are ASCII only."""
    excludes: str | None = None
    """A regular expression that matches no part of the text."""
    one_of: tuple[Any, ...] | None = None
    none_of: tuple[Any, ...] | None = None
    """Forbidden values, also in another case or width, or with invisible characters."""
    each: Bound | None = None
    fields: dict[str, Bound] | None = None
    others: bool = False
    """Whether an object may have other fields."""
    optional: bool = False
    """Whether it may be absent or null."""

    def __post_init__(self) -> None:
        normalized: dict[str, Any] = {
            "type": _types(self.type),
            "min": _limit("min", self.min),
            "max": _limit("max", self.max),
            "length": _length(self.length),
            "one_of": _values("one_of", self.one_of),
            "none_of": _values("none_of", self.none_of),
            "each": None if self.each is None else bound_of(self.each),
            "fields": None if self.fields is None else bounds_of(self.fields, "fields="),
        }
        for name, value in normalized.items():
            msgspec.structs.force_setattr(self, name, value)
        for word in ("matches", "excludes"):
            if getattr(self, word) is not None:
                compiled(getattr(self, word), word)
        for name in ("others", "optional"):
            if type(getattr(self, name)) is not bool:
                raise ContractRefused("bound", f"{name}={getattr(self, name)!r}; give true or false")
        if self.others and self.fields is None:
            raise ContractRefused("bound", "others= without fields= has no effect; name the fields, or leave it out")
        if self.min is not None and self.max is not None and number_of(self.min) > number_of(self.max):
            raise ContractRefused("bound", f"min {self.min} is above max {self.max}; nothing would be allowed")

    @property
    def spec(self) -> dict[str, Any]:
        """Returns plain data without defaults."""
        names = ("min", "max", "matches", "excludes")
        spec = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.type:
            spec["type"] = self.type[0] if len(self.type) == 1 else list(self.type)
        if self.length is not None:
            spec["length"] = self.length[1] if not self.length[0] else list(self.length)
        for name in ("one_of", "none_of"):
            if getattr(self, name) is not None:
                spec[name] = list(getattr(self, name))
        if self.each is not None:
            spec["each"] = self.each.spec
        if self.fields is not None:
            spec["fields"] = {name: bound.spec for name, bound in self.fields.items()}
        return spec | {name: True for name in ("others", "optional") if getattr(self, name)}


def bound_of(value: object) -> Bound:
    """Parses the table of a bound."""
    table = declarations.table(value)
    if table is None:
        raise ContractRefused("bound", f"{value!r}; give a table such as {{min = 0, max = 1000}}")
    declarations.refuse_unknown("bound", table, Bound.__struct_fields__)
    return Bound(**table)


# Parsing ------------------------------------------------------------------------------------------


def number_of(value: object) -> int | Decimal:
    """Parses an exact number: 0.1 is a tenth."""
    if type(value) is int:
        return value
    number = None
    if isinstance(value, float | Decimal | str):
        with suppress(ArithmeticError):
            number = Decimal(repr(value) if isinstance(value, float) else value)
    if number is None or not number.is_finite() or abs(number.adjusted()) > 400:
        raise ContractRefused("bound", f"{value!r} is not a number; give one such as 1000 or 0.5")
    return int(number) if number == number.to_integral_value() else number


def plain_number(value: object) -> int | float | str:
    """Returns a number in canonical form."""
    number = number_of(value)
    if isinstance(number, int):
        return number
    near = float(number)
    return near if Decimal(repr(near)) == number else format(number, "f").rstrip("0")


def decimal_of(number: int | Decimal | Fraction) -> Decimal:
    """Returns a sum as text, independent of the thread's decimal context."""
    exact = Fraction(number)
    return _WRITING.divide(Decimal(exact.numerator), Decimal(exact.denominator))


_WRITING: Final = Context(prec=120)


def _limit(name: str, value: object) -> int | float | str | None:
    try:
        return None if value is None else plain_number(value)
    except ContractRefused as refused:
        raise ContractRefused("bound", f"{name}: {refused.reason}") from None


def _types(value: object) -> tuple[str, ...]:
    types = declarations.texts(value)
    unknown = [name for name in types if name not in TYPES]
    if unknown or (value and not types):
        raise ContractRefused("bound", f"type={value!r} is not known; give one of {', '.join(TYPES)}")
    return tuple(sorted(set(types)))


def _length(value: object) -> tuple[int, int | None] | None:
    if value is None:
        return None
    pair = [0, value] if type(value) is int else declarations.items(value) or []
    if len(pair) != 2 or not all(type(end) is int and end >= 0 for end in pair if end is not None) or pair[0] is None:
        raise ContractRefused("bound", f"length={value!r}; give the most there may be, or [least, most]")
    if pair[1] is not None and pair[0] > pair[1]:
        raise ContractRefused("bound", f"length={value!r}; the least is above the most")
    return pair[0], pair[1]


def _values(name: str, value: object) -> tuple[Any, ...] | None:
    values = declarations.items(value)
    if value is not None and not values:
        raise ContractRefused("bound", f"{name}={value!r}; give a list of values")
    return None if values is None else tuple(_plain(name, value) for value in values)


def _plain(name: str, value: Any) -> Any:
    """Returns a value in the form shared by all equal values."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is float or kind is Decimal:
        number = plain_number(value)
        if isinstance(number, str):
            raise ContractRefused("bound", f"{name}: {value} has more digits than can be compared; give fewer")
        return number
    if kind is list or kind is tuple:
        return [_plain(name, item) for item in value]
    if kind is dict:
        return {key: _plain(name, item) for key, item in value.items()}
    if kind not in _LISTED:
        raise ContractRefused("bound", f"{name}: a {kind.__name__} cannot be compared; give plain values")
    return value


_LISTED: Final = frozenset({str, int, bool, type(None), bytes, date, datetime, time})


def bounds_of(value: object, what: str = "") -> dict[str, Bound]:
    """Parses a table of bounds by name."""
    table = declarations.table(value)
    if table is None:
        raise ContractRefused("bound", f"{what}{value!r}; give a table of names and what each may be")
    found: dict[str, Bound] = {}
    for name, bound in table.items():
        try:
            found[name] = bound_of(bound)
        except ContractRefused as refused:
            raise ContractRefused("bound", f"{name}: {refused.reason}") from None
    return found
