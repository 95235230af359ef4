"""Documents: what handlers return, as plain JSON. The API sends them as they are, and pages are drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from killick.model.codec import plain
from killick.text import printable, printable_json


def document(data: Any) -> Any:
    """Structs become objects. What a field says may be anything is a value of an agent: tagged as it is in the log."""
    if isinstance(data, msgspec.Struct):
        if not holds_values(type(data)):
            return printable_json(msgspec.to_builtins(data))
        given = {name: (getattr(data, field), free) for field, name, free in _fields(type(data))}
        made = {name: _value(value) if free else document(value) for name, (value, free) in given.items()}
        config = type(data).__struct_config__
        return made if config.tag is None else {str(config.tag_field): config.tag, **made}
    if isinstance(data, Mapping):
        return {printable(str(name)): document(value) for name, value in data.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(data, list | tuple):
        return [document(value) for value in data]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, str):
        return printable(data)
    if data is None or type(data) in (int, float, bool):
        return data
    return _value(data)


def _value(value: Any) -> Any:
    """Bytes are written as text, as they are in JSON."""
    if isinstance(value, tuple):
        return [_value(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return msgspec.to_builtins(plain(value))


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, bool], ...]:
    """The fields of a document, what they are called in it, and whether each holds values of agents."""
    return tuple((each.name, each.encode_name, _is_free(each.type)) for each in msgspec.structs.fields(kind))


@cache
def holds_values(kind: type[msgspec.Struct]) -> bool:
    """Whether a document may hold values of agents, or of the record, however deep."""
    parts: list[type[msgspec.Struct]] = [kind]
    for part in parts:
        if part.__struct_config__.omit_defaults:
            return True  # what a record leaves out, a document says
        for field in msgspec.structs.fields(part):
            if _is_free(field.type):
                return True
            parts += [each for each in _structs(field.type) if each not in parts]
    return False


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in get_args(kind):
        yield from _structs(each)


def words_of(kinds: Iterable[Any]) -> frozenset[str]:
    """What documents of these types are made of, apart from values: names of fields, and what those may say."""
    words: set[str] = set()
    parts = [part for kind in kinds for part in _structs(kind)]
    for part in parts:
        config = part.__struct_config__
        words.update(filter(None, (str(config.tag or ""), str(config.tag_field or ""))))
        for field in msgspec.structs.fields(part):
            words |= {field.name, field.encode_name, *_literals(field.type)}
            parts += [each for each in _structs(field.type) if each not in parts]
    return frozenset(words)


def _literals(kind: Any) -> Iterator[str]:
    if get_origin(kind) is Literal:
        yield from (each for each in get_args(kind) if isinstance(each, str))
    else:
        for each in get_args(kind):
            yield from _literals(each)


def _is_free(kind: Any) -> bool:
    return kind is Any or any(_is_free(each) for each in get_args(kind) if each is not ...)
