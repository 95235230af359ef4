"""Tests values against their bounds, strictly: no conversion, and unknown types fail.

A bound is compiled once to a test that returns a complaint or None. A complaint continues after the name of the tested
value: " is 5000; at most 1000 is allowed", or ".iban is missing; it is needed" for a nested value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import isfinite
from typing import Any, Final, TypeAlias

from killick.contracts.lookalikes import folded, kind_of
from killick.contracts.regex import CHARS_MAX, Word, compiled
from killick.contracts.schema import TYPES, Bound, number_of
from killick.errors import ContractRefused
from killick.text import LONE_SURROGATE, is_utf8, printable

Test: TypeAlias = Callable[[Any], "str | None"]

SHOWN_CHARS_MAX: Final = 60
LIKENED_CHARS_MAX: Final = 4096

_NUMBERS: Final[frozenset[type]] = frozenset({int, float, Decimal})

NEEDED: Final = {
    "string": "text", "integer": "a whole number", "number": "a number", "boolean": "true or false", "array": "a list",
    "object": "an object", "null": "nothing", "bytes": "bytes", "date": "a date", "datetime": "a moment",
}  # fmt: skip


def as_test(bound: Bound) -> Test:
    """Compiles a bound to a test."""
    tests = list(_tests(bound))
    is_optional, reads_text = bound.optional, bound.min is None and bound.max is None
    if len(tests) == 1 and not is_optional and not reads_text:
        return tests[0]

    def test(value: Any) -> str | None:
        if value is None and is_optional:
            return None
        if reads_text and type(value) is str and not is_utf8(value):
            return f" {LONE_SURROGATE}"
        for each in tests:
            complaint = each(value)
            if complaint is not None:
                return complaint
        return None

    return test


def shown(value: object) -> str:
    """Returns a value for a message, shortened."""
    if type(value) is int and value.bit_length() > 200:
        return "a number of very many digits"
    if isinstance(value, str):
        text = printable(value[:SHOWN_CHARS_MAX])
        return f'"{text}"' if len(value) <= SHOWN_CHARS_MAX else f'"{text}…"'
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, int | float | Decimal):
        return str(value)[:SHOWN_CHARS_MAX]
    return kind_of(value)


def _tests(bound: Bound) -> Iterator[Test]:
    if bound.type:
        yield _of_type(bound.type)
    if bound.min is not None or bound.max is not None:
        yield _between(bound.min, bound.max)
    if bound.length is not None:
        yield _of_length(*bound.length)
    if bound.matches is not None:
        yield _matching(bound.matches, "matches")
    if bound.excludes is not None:
        yield _matching(bound.excludes, "excludes")
    if bound.one_of is not None:
        yield _among(bound.one_of)
    if bound.none_of is not None:
        yield _unlike(bound.none_of)
    if bound.each is not None:
        yield each_of(as_test(bound.each))
    if bound.fields is not None:
        fields = {name: (as_test(each), each.optional) for name, each in bound.fields.items()}
        yield _having(fields, others=bound.others)


def _of_type(names: tuple[str, ...]) -> Test:
    allowed = frozenset(kind for name in names for kind in TYPES[name])
    needed = " or ".join(NEEDED[name] for name in names)

    def test(value: Any) -> str | None:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind not in allowed:
            return f" is {shown(value)}; {needed} is needed"
        if kind is float or kind is Decimal:
            return _unreal(value)
        return None

    return test


def _unreal(value: Any) -> str | None:
    finite = value.is_finite() if type(value) is Decimal else isfinite(value)
    return None if finite else f" is {value}, which is not a number; a number is needed"


def _between(low: object, high: object) -> Test:
    least = None if low is None else number_of(low)
    most = None if high is None else number_of(high)
    is_whole = not isinstance(least, Decimal) and not isinstance(most, Decimal)

    def test(value: Any) -> str | None:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        number = value
        if kind is not int:
            if kind not in _NUMBERS:
                return f" is {shown(value)}; a number is needed"
            complaint = _unreal(value)
            if complaint is not None:
                return complaint
            if kind is float and not is_whole:
                # A float is compared as written: a tenth is exactly a tenth.
                number = Decimal(repr(value))
        if least is not None and number < least:
            return f" is {shown(value)}; at least {low} is allowed"
        if most is not None and number > most:
            return f" is {shown(value)}; at most {high} is allowed"
        return None

    return test


_SIZED: Final = frozenset({str, bytes, list, tuple, dict, set, frozenset})


def _of_length(least: int, most: int | None) -> Test:
    def test(value: Any) -> str | None:
        if type(value) not in _SIZED:
            return f" is {shown(value)}, which has no length; text, a list or an object is needed"
        if len(value) < least:
            return f" has a length of {len(value)}; at least {least} is allowed"
        if most is not None and len(value) > most:
            return f" has a length of {len(value)}; at most {most} is allowed"
        return None

    return test


def _matching(pattern: str, word: Word) -> Test:
    passes = compiled(pattern, word)
    needed = f"it has to match {pattern}" if word == "matches" else f"nothing in it may match {pattern}"

    def test(value: Any) -> str | None:
        if type(value) is not str:
            return f" is {shown(value)}; text is needed"
        if len(value) > CHARS_MAX:
            return f" is {len(value)} characters long; at most {CHARS_MAX} are compared with a pattern"
        return None if passes(value) else f" is {shown(value)}; {needed}"

    return test


def key_of(value: Any) -> Any:
    """Returns a key that is equal only for equal values of the same type: true is not 1, and "1" is not 1."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is str or value is None:
        return value
    if kind in _NUMBERS:
        if kind is not int and _unreal(value) is not None:
            return "no number", repr(value)
        return "number", Decimal(repr(value)) if kind is float else value
    if kind is list or kind is tuple:
        return "array", tuple(key_of(item) for item in value)
    if kind is dict:
        return "object", frozenset((name, key_of(item)) for name, item in value.items())
    if kind is set or kind is frozenset:
        return "set", frozenset(key_of(item) for item in value)
    return kind.__name__, value


def _list_of(values: Sequence[Any]) -> str:
    return ", ".join(shown(value) for value in values[:10]) + (", …" if len(values) > 10 else "")


def _among(values: tuple[Any, ...]) -> Test:
    keys = frozenset(key_of(value) for value in values)

    def test(value: Any) -> str | None:
        if (value if type(value) is str else key_of(value)) in keys:
            return None
        return f" is {shown(value)}; allowed is {_list_of(values)}"

    return test


def _unlike(values: tuple[Any, ...]) -> Test:
    keys = frozenset(key_of(value) for value in values)
    seen = frozenset(folded(value) for value in values if isinstance(value, str))
    allowed: set[type] = {type(value) for value in values}
    if not allowed.isdisjoint(_NUMBERS):
        allowed |= _NUMBERS

    def test(value: Any) -> str | None:
        if type(value) not in allowed:
            return f" is {shown(value)}; it has to be of the kind of {_list_of(values)}"
        if type(value) is not str:
            return f" is {shown(value)}, which is not allowed" if key_of(value) in keys else None
        if value in keys:
            return f" is {shown(value)}, which is not allowed"
        if len(value) > LIKENED_CHARS_MAX:
            most = LIKENED_CHARS_MAX
            return f" is {len(value)} characters long; at most {most} are compared with what is not allowed"
        return f" is {shown(value)}, which looks like what is not allowed" if folded(value) in seen else None

    return test


def each_of(test_item: Test) -> Test:
    """Tests every item of a list."""

    def test(value: Any) -> str | None:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is not list and kind is not tuple:
            return f" is {shown(value)}; a list is needed"
        for number, item in enumerate(value):
            complaint = test_item(item)
            if complaint is not None:
                return f"[{number}]{complaint}"
        return None

    return test


def _having(fields: Mapping[str, tuple[Test, bool]], *, others: bool, is_optional: bool = False) -> Test:
    """Tests the fields of an object, each with whether it is optional; and the object itself, if it is not."""

    def test(value: Any) -> str | None:
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is not dict:
            return None if is_optional and value is None else f" is {shown(value)}; an object is needed"
        for name, (test_field, field_is_optional) in fields.items():
            if name in value:
                complaint = test_field(value[name])
                if complaint is not None:
                    return f".{name}{complaint}"
            elif not field_is_optional:
                return f".{name} is missing; it is needed"
        unknown = None if others else next((name for name in value if name not in fields), None)
        return None if unknown is None else f" has {shown(unknown)}; allowed is {_list_of(list(fields))}"

    return test


# Nested names -------------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[^.\[\]]+(?:\[\])*(?:\.[^.\[\]]+(?:\[\])*)*")
_STEP: Final = re.compile(r"[^.\[\]]+|\[\]")


def steps_of(name: object) -> list[str]:
    """Returns the steps of a name such as `customer.iban` or `items[].price`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ContractRefused("argument", f"{name!r}; give a name such as amount, customer.iban or items[].price")
    return _STEP.findall(name)


def at_path(name: str, test: Test, optional: bool = False) -> Test:
    """Tests the values at a name in a mapping. Its complaint is a complete sentence."""
    first, *inner = steps_of(name)
    for step in reversed(inner):
        is_list = step == "[]"
        test = each_of(test) if is_list else _having({step: (test, optional)}, others=True, is_optional=optional)

    def checked(values: Mapping[str, Any]) -> str | None:
        if first not in values:
            return None if optional else f"{first} is missing; it is needed"
        complaint = test(values[first])
        return None if complaint is None else f"{first}{complaint}"

    return checked


def values_at(name: str) -> Callable[[Mapping[str, Any]], tuple[str | None, list[Any]]]:
    """Returns a finder for the values at a name; it returns a complaint, or all values."""
    if len(steps_of(name)) == 1:
        complaint = f"{name} is missing; it is needed"
        return lambda values: (None, [values[name]]) if name in values else (complaint, [])

    def find(values: Mapping[str, Any]) -> tuple[str | None, list[Any]]:
        found: list[Any] = []
        return at_path(name, found.append)(values), found

    return find
