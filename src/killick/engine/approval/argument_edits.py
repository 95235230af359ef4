"""A call as text for an approver, and their edit of it: arguments by name, with the types of the tool."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from killick.engine.views import Wait
from killick.errors import AnswerRefused
from killick.model.codec import Secret, plain
from killick.sanitizer import unmixed, visible_line

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list, tuple),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip

_NO_ROOT: Final[Mapping[str, Any]] = {}

ARGUMENT_CHARS: Final = 160
"""How much of one argument is shown, so that a long one hides no other."""


def call(intention: Any, chars: int = ARGUMENT_CHARS) -> str:
    """A call as source text, with every argument, as an approver reads it (`seen`)."""
    call = _table(intention)
    if "tool" not in call:
        return "a call that is no longer on record"
    if "arguments" not in call:
        return f"{call['tool']}(…), step {call.get('step')}"
    inside = (f"{name}={shown(value, chars)}" for name, value in _table(call, "arguments").items())
    return seen(f"{call['tool']}({', '.join(inside)})")


def shown(value: Any, chars: int = ARGUMENT_CHARS) -> str:
    """A value in one line: cut where it is long, and with its size then; a secret stays one."""
    if isinstance(value, Secret):
        return "(a secret)"
    text = msgspec.json.format(msgspec.json.encode(plain(value)), indent=0).decode()
    cut = text if len(text) <= chars else f"{text[:chars]}… ({len(text):,} characters)"
    return seen(cut)


def seen(text: str) -> str:
    """A text in one line for an approver: nothing is invisible, and no letter passes for one of another script."""
    return visible_line(unmixed(text))


def written(wait: Wait, text: str) -> dict[str, Any]:
    """An edit in one line: `amount=100 to=ann`, or JSON."""
    if text.lstrip().startswith("{"):
        try:
            return checked(wait, json.loads(text))
        except ValueError as error:
            raise AnswerRefused(wait.id, f"is not JSON ({error}); write it as {example(wait)}") from None
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise AnswerRefused(wait.id, f"cannot be read ({error}); write it as {example(wait)}") from None
    return by_name(wait, words)


def by_name(wait: Wait, pairs: Sequence[str]) -> dict[str, Any]:
    """An edit from `name=value`, each value as the tool takes it: where it takes text, 100 is one too."""
    schema = _table(wait.schema)
    changes: dict[str, Any] = {}
    for each in pairs:
        name, equals, text = each.partition("=")
        if not equals or not name:
            raise AnswerRefused(wait.id, f"{each!r} is not name=value; write it as {example(wait)}")
        changes[name] = _typed(text, _table(schema, "properties", name), schema)
    return checked(wait, changes)


def checked(wait: Wait, changes: Any) -> dict[str, Any]:
    """An edit that the tool would accept, as far as the question shows. It need not name every argument."""
    if not isinstance(changes, dict) or not changes:
        raise AnswerRefused(wait.id, f"an edit gives arguments by name, as in {example(wait)}")
    found, schema, names = cast("dict[str, Any]", changes), _table(wait.schema), arguments(wait)
    for name, value in found.items():
        if names and name not in names:
            raise AnswerRefused(wait.id, f"{name!r} is not an argument of {_tool(wait)}; it has {', '.join(names)}")
        wanted = _table(schema, "properties", name)
        if not fits(wanted, value, schema):
            kind = wanted.get("type") or "value that it takes"
            given = json.dumps(value, default=str)
            raise AnswerRefused(wait.id, f"{name}={given} does not fit; {_tool(wait)} takes {name} as {kind}")
    return found


def misfit(schema: Any, value: Any) -> str | None:
    """The part of a JSON value that violates a schema, by its path; None if there is none."""
    root = _table(schema)
    return next(_misfits(root, value, root, ""), None)


def _misfits(wanted: Mapping[str, Any], value: Any, root: Mapping[str, Any], at: str) -> Iterator[str]:
    wanted = _named(wanted, root)
    if not fits(wanted, value, root):
        kind = wanted.get("enum") or wanted.get("type") or "what is asked for"
        yield f"{at or 'the value'} takes {kind}, not {shown(value, 40)}"
    elif (bound := _beyond(wanted, value)) is not None:
        yield f"{at or 'the value'} takes {bound}, not {shown(value, 40)}"
    elif isinstance(value, dict):
        given, known = cast("dict[str, Any]", value), _table(wanted, "properties")
        missing = [name for name in wanted.get("required", ()) if name not in given]
        yield from (f"{at}{'.' if at else ''}{name} is missing" for name in missing)
        for name in known.keys() & given.keys():
            yield from _misfits(_table(known, name), given[name], root, f"{at}{'.' if at else ''}{name}")
    elif isinstance(value, list):
        rows: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        for number, each in enumerate(rows):
            yield from _misfits(_table(wanted, "items"), each, root, f"{at}[{number}]")


def _beyond(wanted: Mapping[str, Any], value: Any) -> str | None:
    """The bound that a number or a text is beyond."""
    size: float
    if isinstance(value, str):
        low, high, size, unit = wanted.get("minLength"), wanted.get("maxLength"), len(value), " characters"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high, size, unit = wanted.get("minimum"), wanted.get("maximum"), value, ""
    else:
        return None
    if isinstance(low, int | float) and size < low:
        return f"at least {low}{unit}"
    return f"at most {high}{unit}" if isinstance(high, int | float) and size > high else None


def arguments(wait: Wait) -> list[str]:
    """The names that an edit can give."""
    schema = _table(wait.schema)
    return list(
        _table(schema, "properties")
        if schema.get("additionalProperties") is False
        else _table(wait.intention, "arguments")
    )


def example(wait: Wait) -> str:
    """An edit of the argument that the rule is about, if its name or its reason says so; else of the last number."""
    numbers = [name for name, value in _table(wait.intention, "arguments").items() if type(value) in (int, float)][::-1]
    about = {word.strip(".,:;()'") for word in f"{wait.rule} {wait.reason}".split()}
    name = next(iter(sorted([*numbers, *arguments(wait)], key=lambda each: each not in about)), "amount")
    return f"{name}={100 if name in numbers else 'VALUE'}"


def _tool(wait: Wait) -> str:
    return str(_table(wait.intention).get("tool") or "the call")


def _table(value: Any, *path: str) -> Mapping[str, Any]:
    """The table at a path inside of one; an empty one where there is none, as in a value that was erased."""
    for name in path:
        value = cast("Mapping[str, Any]", value).get(name) if isinstance(value, Mapping) else None
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _typed(text: str, wanted: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """A text as the wanted type: itself, or parsed as JSON."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    first, second = (text, parsed) if _named(wanted, root).get("type") == "string" else (parsed, text)
    return second if not fits(wanted, first, root) and fits(wanted, second, root) else first


def _named(wanted: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The target of a reference inside a schema."""
    reference: Any = wanted.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return wanted
    return _table(root, *reference[2:].split("/"))


def fits(wanted: Mapping[str, Any], value: Any, root: Mapping[str, Any] = _NO_ROOT) -> bool:
    """Whether a value fits a schema, as far as that is certain; the run checks the tool's own types."""
    wanted = _named(wanted, root)
    either: Any = wanted.get("anyOf") or wanted.get("oneOf")
    if isinstance(either, list):
        return any(fits(cast("Mapping[str, Any]", each), value, root) for each in either)  # pyright: ignore
    if "const" in wanted or "enum" in wanted:
        return value in wanted.get("enum", [wanted.get("const")])
    named: Any = wanted.get("type")
    kinds: list[Any] = [named] if isinstance(named, str) else named or []
    if not kinds or any(kind not in _TYPES for kind in kinds):
        return True
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES[kind]) for kind in kinds)
