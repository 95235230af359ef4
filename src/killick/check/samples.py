"""Sample values of declared types, for rehearsals without real ones.

Uses the type, its constraints and field names. Refuses if it knows no value.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Final, Literal, get_args, get_origin
from uuid import UUID

import msgspec
import typing_extensions

from killick.errors import FakeRefused, ValueRefused
from killick.model.chunks import through_codec
from killick.model.typed import convert

_SHOWN_CHARS: Final = 80
_MOMENT: Final = datetime(2026, 1, 5, 9, 30, tzinfo=UTC)
_PLAIN: Final[Mapping[Any, Any]] = {
    bool: True, bytes: b"bytes", bytearray: bytearray(b"bytes"), datetime: _MOMENT, date: _MOMENT.date(),
    time: time(9, 30), timedelta: timedelta(hours=1), UUID: UUID(int=1), None: None, type(None): None,
}  # fmt: skip
_HINTS: Final = (
    ("email", "ada@example.org"), ("mail", "ada@example.org"), ("url", "https://example.org/"),
    ("uri", "https://example.org/"), ("link", "https://example.org/"), ("phone", "+15550100"), ("currency", "EUR"),
    ("country", "IT"), ("language", "en"), ("date", "2026-01-05"), ("uuid", str(UUID(int=1))), ("id", "id_1"),
    ("name", "Ada"),
)  # fmt: skip
"""Likely texts, by a word in the field's name."""

_RULES: Final = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length")
_WRAPPERS: Final[tuple[Any, ...]] = (
    typing.Required, typing.NotRequired, typing_extensions.ReadOnly, typing.Final, typing.ClassVar,
)  # fmt: skip


def sample(kind: Any, name: str = "") -> Any:
    """Returns a plausible value of a type. Raises FakeRefused for a type without samples.

    kind  the type
    name  the name of the field, which may hint at the value
    """
    if kind is Any or kind is object:
        reason = "no type is declared, so no sample can be made; declare one, or give a value"
        raise FakeRefused(name or "sample", reason)
    try:
        made = _Sampling().of(kind, name)
    except (_Within, RecursionError):
        raise FakeRefused(name or spelled(kind), "contains itself, so a sample has no end; give a value") from None
    if (misfits := misfit(made, kind)) is not None:
        reason = f"{shown(made)} is not a sample of it ({misfits}); give a value"
        raise FakeRefused(name or spelled(kind), reason)
    return made


class _Within(Exception):
    """A type is needed for a sample of itself."""


# Not by a factory library: its values are random, so a report would differ each time, and check has no extra.
class _Sampling:
    """Makes one sample; tracks enclosing types, so that recursive types end."""

    def __init__(self) -> None:
        self._within: list[Any] = []

    def of(self, kind: Any, name: str = "", rules: Mapping[str, Any] | None = None) -> Any:
        rules = rules or {}
        origin, args = get_origin(kind), get_args(kind)
        if origin is Annotated:
            return self.of(args[0], name, {**rules, **_rules(args[1:])})
        if origin in _WRAPPERS:
            return self.of(args[0], name, rules)
        if hasattr(kind, "__supertype__"):
            return self.of(kind.__supertype__, name, rules)
        if isinstance(kind, typing_extensions.TypeAliasType) or type(kind).__name__ == "TypeAliasType":
            return self.of(kind.__value__, name, rules)
        if isinstance(kind, typing.TypeVar):
            return self.of(kind.__bound__ or (kind.__constraints__ or (str,))[0], name, rules)
        if kind is Any or kind is object:
            return _text(name, rules)
        if origin is Literal:
            return args[0]
        if origin in (typing.Union, types.UnionType):
            likely = sorted(args, key=lambda kind: kind in (None, type(None)))
            return _first(partial(self.of, each, name, rules) for each in likely)
        if isinstance(kind, type | None) and kind in _PLAIN:
            return _PLAIN[kind]
        return self._made(kind, origin, args, name, rules)

    def _made(self, kind: Any, origin: Any, args: Sequence[Any], name: str, rules: Mapping[str, Any]) -> Any:
        cls: Any = origin or kind
        if not inspect.isclass(cls):
            raise FakeRefused(name or spelled(kind), f"no sample of {spelled(kind)} can be made; give a value")
        if issubclass(cls, enum.Enum):
            return next(iter(cls))
        if issubclass(cls, int | float | Decimal):
            return cls(_number(cls, rules))
        if issubclass(cls, str):
            return _text(name, rules) if cls is str else _tried(cls, name, rules)
        if typing_extensions.is_typeddict(cls) or hasattr(cls, "_fields") or _is_record(cls):
            return self._record(kind, cls, args)
        if issubclass(cls, tuple):
            return self._tuple(kind, args, name, rules)
        if issubclass(cls, Mapping):
            key, value = (*args, str, Any)[:2] if args else (str, Any)
            return dict(_some(lambda: (self.of(key, "key"), self.of(value, name)), rules))
        if issubclass(cls, set | frozenset | typing.AbstractSet):
            return (frozenset if cls is frozenset else set)(_some(lambda: self.of(_item(args), name), rules))
        if issubclass(list, cls):
            return list(_some(lambda: self.of(_item(args), name), rules))
        return _tried(kind, name, rules)

    def _tuple(self, kind: Any, args: Sequence[Any], name: str, rules: Mapping[str, Any]) -> Any:
        if kind is tuple or args[1:] == (Ellipsis,):
            return tuple(_some(lambda: self.of(_item(args), name), rules))
        return tuple(self.of(arg, name) for arg in args if arg != ())

    def _record(self, kind: Any, cls: Any, args: Sequence[Any]) -> Any:
        """Makes a value with fields; omits optional ones."""
        if kind in self._within:
            raise _Within
        self._within.append(kind)
        try:
            given = dict(zip(getattr(cls, "__parameters__", ()), args, strict=False))
            values = {name: self.of(given.get(hint, hint), name, rules) for name, hint, rules in _fields(kind, cls)}
        finally:
            self._within.pop()
        try:
            if hasattr(cls, "model_fields"):
                return cls.model_validate(values, by_alias=False, by_name=True)
            return cls(**values)
        except (ValueError, TypeError) as error:
            reason = "; ".join(line.strip() for line in str(error).splitlines()[:3])
            raise FakeRefused(cls.__name__, f"takes no sample: {reason}; give a value") from None


def _first(makes: Iterable[Callable[[], Any]]) -> Any:
    """Returns the first alternative that can be made."""
    refused: Exception = _Within()
    for make in makes:
        try:
            return make()
        except (_Within, FakeRefused) as error:
            refused = error if isinstance(refused, _Within) else refused
    raise refused


def _some(make: Callable[[], Any], rules: Mapping[str, Any]) -> Iterator[Any]:
    """Returns the minimum number of items, or one if allowed; none for a recursive type."""
    try:
        for _ in range(max(rules.get("min_length", 1), min(1, rules.get("max_length", 1)))):
            yield make()
    except _Within:
        if rules.get("min_length"):
            raise


def _item(args: Sequence[Any]) -> Any:
    return args[0] if args else str


def _is_record(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct) or hasattr(cls, "model_fields")


def _fields(kind: Any, cls: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Returns name, type and constraints of every required field."""
    if hasattr(cls, "model_fields"):
        for name, field in cls.model_fields.items():
            if field.is_required():
                yield name, field.annotation, _rules(field.metadata)
    elif issubclass(cls, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            if field.required:
                yield field.name, field.type, {}
    else:
        hints = typing_extensions.get_type_hints(cls, include_extras=True)
        for name in _required(cls, hints):
            yield name, hints[name], {}


def _required(cls: Any, hints: Mapping[str, Any]) -> Iterable[str]:
    if typing_extensions.is_typeddict(cls):
        # With string annotations, Python itself ignores NotRequired.
        said = {name: get_origin(hint) for name, hint in hints.items()}
        return [name for name in hints if name in cls.__required_keys__ and said[name] is not typing.NotRequired]
    if hasattr(cls, "_fields"):
        return [name for name in cls._fields if name not in cls._field_defaults]
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is missing and field.default_factory is missing
    ]


def _rules(metadata: Iterable[Any]) -> dict[str, Any]:
    """Returns the constraints in a type's metadata, from any library."""
    found: dict[str, Any] = {}
    for each in metadata:
        found |= _rules(getattr(each, "metadata", ()))
        found |= {rule: value for rule in _RULES if (value := getattr(each, rule, None)) is not None}
    return found


def _number(cls: Any, rules: Mapping[str, Any]) -> Any:
    """Returns a small number within its bounds."""
    of: Any = int if issubclass(cls, int) else Decimal
    step = of(str(rules.get("multiple_of", 1)))
    bounds = {rule: of(str(rules[rule])) for rule in ("ge", "gt", "le", "lt") if rule in rules}
    low = bounds.get("ge", bounds.get("gt"))
    high = bounds.get("le", bounds.get("lt"))
    if low is None:
        low = min(of(1), high) if high is not None else of(1)
    found = -(-low // step) * step
    if "gt" in bounds and found <= bounds["gt"]:
        found += step
    if high is not None and (found > high or ("lt" in bounds and found >= high)):
        found = (high // step) * step if low is None or issubclass(cls, int) else (low + high) / 2
        found -= step if "lt" in bounds and found >= high else 0
    return found


def _text(name: str, rules: Mapping[str, Any]) -> str:
    words = re.split(r"[^a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    text = next((text for word, text in _HINTS if word in words), name or "text")
    least: int = rules.get("min_length", 0)
    most: int | None = rules.get("max_length")
    return (text + "x" * (least - len(text)))[:most]


def _tried(kind: Any, name: str, rules: Mapping[str, Any]) -> Any:
    """For a type that only pydantic knows, returns the first likely value that it accepts."""
    likely: list[Any] = [_text(name, rules), _MOMENT, *(text for _, text in _HINTS)]
    for value in [*likely, "1.5", "09:30:00", "PT1H", "127.0.0.1", "/", 1, True]:
        try:
            return convert(value, kind)
        except (ValueRefused, TypeError):
            pass
    raise FakeRefused(name or spelled(kind), f"no sample of {spelled(kind)} can be made; give a value")


# judging values -----------------------------------------------------------------------------------


def misfit(value: Any, returns: Any) -> str | None:
    """Returns why a tool cannot have returned a value."""
    try:
        convert(through_codec(value, at="value"), returns)
    except ValueRefused as refused:
        return f"{refused.path.removeprefix('value').lstrip('.') or 'it'}: {refused.reason}"
    return None


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"


def spelled(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")
