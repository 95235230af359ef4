"""Encodes documents for programs: structs become plain JSON, the same for `--json` and for the HTTP API.

A struct's field in microseconds (`started_at_us`) is a time in JSON: `started_at`, RFC 3339 in UTC. Durations are
fields in seconds (`duration_seconds`). Values of agents are tagged as they are in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from killick.clock import timestamp
from killick.model.codec import plain
from killick.text import printable

_POINTS: Final = frozenset({"at", "since", "until", "deadline"})
"""Times whose names need no `_at`."""

_SCALARS: Final = frozenset({int, float, bool})


def json_name(field: str) -> str:
    """The name of a field in JSON: `next_us` is `next_at`, `since_us` is `since`."""
    stem = field.removesuffix("_us")
    return stem if stem == field or stem in _POINTS or stem.endswith("_at") else f"{stem}_at"


def document(data: Any) -> Any:
    """Plain JSON. A field of type Any is a value of an agent: tagged as it is in the log."""
    if data is None or type(data) in _SCALARS:
        return data
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, msgspec.Struct):
        config = type(data).__struct_config__
        made: dict[str, Any] = {} if config.tag is None else {str(config.tag_field): config.tag}
        for field, name, kind in _fields(type(data)):
            value = getattr(data, field)
            if value is None or (not kind and type(value) in _SCALARS):
                made[name] = value
            else:
                made[name] = (
                    _value(value) if kind == "value" else timestamp(value) if kind == "time" else document(value)
                )
        return made
    if isinstance(data, list | tuple):
        return [document(value) for value in data]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(data, Mapping):
        return {printable(str(name)): document(value) for name, value in data.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    return _value(data)


def _value(value: Any) -> Any:
    """Bytes are written as text, as they are in JSON."""
    if isinstance(value, tuple):
        return [_value(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return msgspec.to_builtins(plain(value))


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, str, str], ...]:
    """The fields of a struct, their names in JSON, and whether each is a time, a value of an agent, or neither."""
    fields = msgspec.structs.fields(kind)
    kinds = ("time" if each.name.endswith("_us") else "value" if _is_free(each.type) else "" for each in fields)
    return tuple((each.name, json_name(each.encode_name), role) for each, role in zip(fields, kinds, strict=True))


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for each in get_args(kind):
        yield from _structs(each)


def words_of(kinds: Iterable[Any]) -> frozenset[str]:
    """The words of documents of these types, without values: names of fields, and their literals."""
    words: set[str] = set()
    parts = [part for kind in kinds for part in _structs(kind)]
    for part in parts:
        config = part.__struct_config__
        words.update(filter(None, (str(config.tag or ""), str(config.tag_field or ""))))
        for field in msgspec.structs.fields(part):
            words |= {field.name, json_name(field.encode_name), *_literals(field.type)}
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


# schemas ------------------------------------------------------------------------------------------


def schemas(kinds: Iterable[Any], ref: str) -> tuple[dict[Any, Any], dict[str, Any]]:
    """The JSON schemas of documents: a reference for each type, and the schemas by their names."""
    wanted = list(dict.fromkeys(kinds))
    refs, components = msgspec.json.schema_components(wanted, ref_template=ref)
    return dict(zip(wanted, refs, strict=True)), {name: _as_encoded(made) for name, made in components.items()}


def _as_encoded(schema: dict[str, Any]) -> dict[str, Any]:
    """A struct's schema with its times as they are in JSON."""
    if "properties" not in schema:
        return schema
    properties = {
        json_name(name): _dated(made) if name.endswith("_us") else made for name, made in schema["properties"].items()
    }
    return {**schema, "properties": properties, "required": [json_name(name) for name in schema.get("required", ())]}


def _dated(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [_dated(each) for each in schema["anyOf"]]}
    return {**schema, "type": "string", "format": "date-time"} if schema.get("type") == "integer" else schema
