"""Converts builtins to declared types: with msgspec where it supports the type, else with pydantic. Never guesses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from typing import Any, Final, get_args, get_origin
from uuid import UUID

import msgspec

from killick.errors import ValueErased, ValueRefused
from killick.model.codec import TYPES_MAX, Erased, shortened, step_of
from killick.type_init import ready


def convert(value: Any, kind: Any, *, at: str = "value") -> Any:
    """Converts restored builtins to the declared type. Raises `ValueRefused`, with the path, on a mismatch."""
    if kind in _SCALARS and value.__class__ is kind:
        return value
    try:
        return _converter(kind)(value)
    except _Misfit as misfit:
        if erased := next(_erased_in(value), None):
            raise ValueErased(erased.hash) from None
        raise ValueRefused(shortened(at + misfit.path), misfit.reason) from None


def fit(value: Any, kind: Any, *, at: str) -> Any:
    """Converts a live value to the declared type. Raises `ValueRefused` if that would lose data."""
    try:
        return convert(value, kind, at=at)
    except ValueRefused as refused:
        if refused.reason.startswith(_UNSUPPORTED):
            return value
        try:
            return msgspec.convert(value, ready(kind), builtin_types=(bytes, bytearray))  # not base64
        except (msgspec.ValidationError, TypeError):
            raise refused from None


_SCALARS: Final = (str, int, float, bool)
_UNSUPPORTED: Final = "cannot be restored as"


class _Misfit(ValueError):
    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path
        self.reason = reason


def _erased_in(value: Any) -> Iterator[Erased]:
    kind = value.__class__
    if kind is Erased:
        yield value
    elif kind in (dict, list, tuple, set, frozenset):
        for item in value.values() if kind is dict else value:
            yield from _erased_in(item)


def _converter(kind: Any) -> Callable[[Any], Any]:
    # A | B equals B | A, but a value that fits both must become the first. So the cache key includes the spelling.
    spelling = "" if isinstance(kind, type) else repr(kind)
    try:
        return _converter_cached(kind, spelling)
    except TypeError:
        # Metadata inside Annotated need not be hashable.
        return _converter_cached.__wrapped__(kind, spelling)


@lru_cache(maxsize=TYPES_MAX)
def _converter_cached(kind: Any, spelling: str) -> Callable[[Any], Any]:
    if kind is Any or kind is object:
        return lambda value: value
    if not _holds_pydantic_dataclass(kind):
        try:
            msgspec.msgpack.Decoder(ready(kind))
            return partial(_by_msgspec, kind)
        except (TypeError, NameError):
            pass
    return _by_pydantic(kind)


def _holds_pydantic_dataclass(kind: Any) -> bool:
    """msgspec would treat it as a plain dataclass and misread its defaults."""
    if hasattr(get_origin(kind) or kind, "__is_pydantic_dataclass__"):
        return True
    return any(map(_holds_pydantic_dataclass, get_args(kind)))


_PASSED: Final = (bytes, bytearray, datetime, date, time, timedelta, Decimal, UUID)
_MSGSPEC_PATH: Final = re.compile(r" - at `(?:key` in `)?\$(.*)`$")


def _by_msgspec(kind: Any, value: Any) -> Any:
    try:
        return msgspec.convert(value, ready(kind), builtin_types=_PASSED, dec_hook=_other)
    except msgspec.ValidationError as error:
        reason, inner = str(error), error.__cause__
        found = _MSGSPEC_PATH.search(reason)
        path = found[1] if found else ""
        if isinstance(inner, _Misfit):
            raise _Misfit(path + inner.path, inner.reason) from None
        raise _Misfit(path, _MSGSPEC_PATH.sub("", reason)) from None


def _other(kind: Any, value: Any) -> Any:
    """Converts types that msgspec does not support: pydantic models, subclasses of builtins, Iterable."""
    if isinstance(kind, type):
        if isinstance(value, kind):
            return value
        if issubclass(kind, type(value)):
            return kind(value)
    if get_origin(kind) is Iterable:
        return _converter(list[get_args(kind)])(value)  # type: ignore[misc]
    return _by_pydantic_cached(kind)(value)


def _by_pydantic(kind: Any) -> Callable[[Any], Any]:
    import pydantic

    try:
        adapter = pydantic.TypeAdapter(kind)
        adapter.rebuild()
    except (pydantic.PydanticUserError, NameError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise _Misfit("", f"{_UNSUPPORTED} {kind!r}: {reason}") from None

    def by_pydantic(value: Any) -> Any:
        # Lax mode: strict mode could not build an enum or a dataclass from its stored form.
        try:
            return adapter.validate_python(value, strict=False, by_alias=False, by_name=True)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise _Misfit("".join(map(step_of, first["loc"])), first["msg"]) from None

    return by_pydantic


_by_pydantic_cached = lru_cache(maxsize=TYPES_MAX)(_by_pydantic)
