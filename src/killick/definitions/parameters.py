"""The parameters of a tool: their JSON schema, their descriptions, and the conversion of JSON arguments to types."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, cast

import msgspec

from killick.definitions.open_tools import OpenShape
from killick.definitions.tools import AnyTool
from killick.errors import DeclarationRefused, ValueRefused
from killick.model.codec import Plain, plain, step_of
from killick.model.typed import convert

HINT_CHARS_MAX: Final = 300
PROBLEMS_MAX: Final = 4

_Fit: TypeAlias = Callable[[Any], Any]
"""Gives a value its declared type, or raises ValueRefused."""


class Parameters:
    """The parameters of a tool: their JSON schema, and the conversion of arguments to them. A framework's own schema is
    validated by the framework: only missing arguments are refused here."""

    schema: dict[str, Any]

    def __init__(self, tool: AnyTool) -> None:
        self._given = dict(tool.shape.signature.parameters)
        self._open = isinstance(tool.shape, OpenShape)
        if isinstance(tool.shape, OpenShape):
            self.description = tool.shape.doc
            self.schema = tool.shape.schema or {"type": "object", "additionalProperties": True}
            return
        for parameter in self._given.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise DeclarationRefused(tool.name, f"a model cannot give {parameter}; take it by name")
        self.description, about = described(tool.shape.doc)
        hints = {name: tool.shape.hints[name] for name in self._given}
        properties, definitions, self._fits = _schemas(tool.name, hints)
        for name, schema in properties.items():
            if name in about:
                schema.setdefault("description", about[name])
            if (default := _default(self._given[name])) is not None:
                schema.setdefault("default", default)
        self.schema = {
            "type": "object",
            "properties": properties,
            "required": [name for name, given in self._given.items() if given.default is given.empty],
            "additionalProperties": False,
        }
        if definitions:
            self.schema["$defs"] = definitions

    def bind(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """The arguments as the declared types. All misfits are refused at once."""
        given, bound, problems = _object(arguments), dict[str, Any](), list[str]()
        if self._open:
            missing = [f"{name}: is missing" for name in self.schema.get("required", ()) if name not in given]
            if missing:
                raise ValueRefused("arguments", "\n".join(["do not fit", *missing]))
            return dict(given)
        for name, parameter in self._given.items():
            is_optional = parameter.default is not parameter.empty
            if name not in given and not is_optional:
                problems.append(f"{name}: is missing{self._takes(name)}")
            elif name in given:
                try:
                    bound[name] = self.fitted(name, given[name])
                except ValueRefused as refused:
                    # Models often write null for omitted arguments.
                    if given[name] is not None or not is_optional:
                        problems.append(f"{refused}{self._takes(name)}")
        names = ", ".join(self._given) or "it takes none"
        problems += [f"{name}: is not an argument of this tool ({names})" for name in given if name not in self._given]
        if problems:
            raise ValueRefused("arguments", "\n".join(["do not fit", *problems]))
        return bound

    def fitted(self, name: str, value: Any) -> Any:
        """One argument as the declared type."""
        if self._open:
            return value
        try:
            return self._fits[name](value)
        except ValueRefused:
            for other in _lenient_readings(value):
                try:
                    return self._fits[name](other)
                except ValueRefused:
                    pass
            raise

    def _takes(self, name: str) -> str:
        schema = dict(self.schema["properties"][name])
        schema |= self.schema.get("$defs", {}).get(schema.pop("$ref", "").rpartition("/")[2], {})
        schema.pop("description", None)
        text = json.dumps(schema, ensure_ascii=False)
        return f"; it takes {text}" if len(text) <= HINT_CHARS_MAX else ""


def _object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if not isinstance(arguments, str):
        return arguments
    try:
        read: Any = json.loads(arguments.strip() or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueRefused("arguments", f"are not JSON ({error}); write one JSON object") from None
    if isinstance(read, str):
        return _object(read)
    if not isinstance(read, dict):
        raise ValueRefused("arguments", f"are {arguments[:HINT_CHARS_MAX]}; write one JSON object")
    return cast("dict[str, Any]", read)


def _lenient_readings(value: Any) -> Iterator[Any]:
    """Alternative readings of a model's value: text parsed as JSON, or JSON written as text."""
    if isinstance(value, str):
        try:
            yield json.loads(value)
        except (ValueError, RecursionError):
            return
    elif value is not None and not isinstance(value, bool):
        try:
            yield json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return


def _default(parameter: inspect.Parameter) -> Any:
    """A default as JSON; None if there is none, or JSON cannot hold it."""
    try:
        return None if parameter.default is parameter.empty else untag(plain(parameter.default))
    except ValueRefused:
        return None


def _schemas(tool: str, hints: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, _Fit]]:
    """The schema of each parameter, the definitions that they share, and how a value is given its type.

    By pydantic, which reads constraints and descriptions, wherever it knows the type; a Struct only msgspec knows.
    """
    import pydantic

    adapters, others = dict[str, pydantic.TypeAdapter[Any]](), dict[str, Any]()
    for name, hint in hints.items():
        try:
            adapters[name] = pydantic.TypeAdapter(hint)
            adapters[name].rebuild()
        except (pydantic.PydanticUserError, NameError, TypeError):
            adapters.pop(name, None)
            others[name] = hint
    try:
        # By field name, as values are stored: an alias for reading need not be the one for writing.
        by_key, rest = pydantic.TypeAdapter.json_schemas(
            [(name, "validation", adapter) for name, adapter in adapters.items()], by_alias=False
        )
        schemas, named = msgspec.json.schema_components(list(others.values()), ref_template="#/$defs/{name}")
    except (pydantic.PydanticUserError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise DeclarationRefused(tool, f"its parameters cannot be described to a model: {reason}") from None
    definitions: dict[str, Any] = rest.get("$defs", {})
    if clash := definitions.keys() & named.keys():
        raise DeclarationRefused(tool, f"two types of its parameters are called {min(clash)}; rename one")
    known: dict[str, Any] = {name: schema for (name, _), schema in by_key.items()} | dict(
        zip(others, schemas, strict=True)
    )
    fits: dict[str, _Fit] = {name: partial(_by_pydantic, name, adapter) for name, adapter in adapters.items()}
    fits |= {name: partial(convert, kind=hint, at=name) for name, hint in others.items()}
    return {name: without_titles(known[name]) for name in hints}, without_titles(definitions | named, names=True), fits


def _by_pydantic(name: str, adapter: Any, value: Any) -> Any:
    from pydantic import ValidationError

    try:
        return adapter.validate_python(value, strict=False, by_alias=False, by_name=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)[:PROBLEMS_MAX]
        problems = [f"{''.join(map(step_of, each['loc']))} {each['msg']}".strip() for each in found]
        raise ValueRefused(name, ", ".join(problems)) from None


def without_titles(schema: Any, *, names: bool = False) -> Any:
    """A schema without the titles that pydantic derives from names: they repeat the names and cost tokens."""
    kind = schema.__class__
    if kind is list:
        return [without_titles(each) for each in schema]
    if kind is not dict:
        return schema
    return {
        key: part if key in ("default", "const", "enum", "examples") and not names
        else without_titles(part, names=not names and key in ("properties", "$defs"))
        for key, part in schema.items()
        if names or key != "title"
    }  # fmt: skip


_GOOGLE: Final = re.compile(r"(Args|Arguments|Parameters|Params|Keyword Arg(ument)?s|Other Parameters):\s*")
_GOOGLE_ENTRY: Final = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:(?:\s+(.*)|$)")
_NUMPY: Final = re.compile(r"(Other )?Parameters\s*")
_RULE: Final = re.compile(r"-{3,}\s*")
_FIELD: Final = re.compile(r":(param|parameter|arg|argument|key|keyword|type)\b([^:]*):\s*(.*)")


def described(doc: str) -> tuple[str, dict[str, str]]:
    """A docstring without its parameters, and their texts by name; in Google, NumPy or Sphinx style."""
    lines, kept, about = doc.splitlines(), list[str](), dict[str, str]()
    while lines:
        line = lines.pop(0)
        if _GOOGLE.fullmatch(line):
            for head, *rest in _entries(_block(lines, lambda at: _indented(lines[at]))):
                if entry := _GOOGLE_ENTRY.fullmatch(head):
                    about[entry[1]] = " ".join(filter(None, [entry[2], *rest]))
        elif _NUMPY.fullmatch(line) and lines and _RULE.fullmatch(lines[0]):
            lines.pop(0)
            for head, *rest in _entries(_block(lines, lambda at: not _RULE.fullmatch("".join(lines[at + 1 : at + 2])))):
                about |= {name.strip(" *"): " ".join(rest) for name in head.partition(":")[0].split(",")}
        elif field := _FIELD.fullmatch(line):
            rest = [each.strip() for each in _block(lines, lambda at: bool(lines[at].strip()) and _indented(lines[at]))]
            if field[1] != "type" and field[2].strip():
                about[field[2].split()[-1].strip("*")] = " ".join(filter(None, [field[3], *rest]))
        else:
            kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip(), {name: text for name, text in about.items() if text}


def _indented(line: str) -> bool:
    return not line.strip() or line[0].isspace()


def _block(lines: list[str], continues: Callable[[int], bool]) -> list[str]:
    """Removes and returns the leading lines of a block."""
    count = next((at for at in range(len(lines)) if not continues(at)), len(lines))
    taken = lines[:count]
    del lines[:count]
    return taken


def _entries(block: Sequence[str]) -> Iterator[list[str]]:
    """The entries of a section: an unindented line, and the indented lines under it."""
    entry: list[str] = []
    for line in textwrap.dedent("\n".join(block)).splitlines():
        if line.strip() and not line[0].isspace():
            if entry:
                yield entry
            entry = []
        if line.strip():
            entry.append(line.strip())
    if entry:
        yield entry


def untag(node: Plain) -> Any:
    """A stored value as a model reads it: JSON without tags."""
    if isinstance(node, list):
        return [untag(item) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if len(node) != 1 or tag[:1] != "$":
        return {name: untag(item) for name, item in node.items()}
    payload: Any = node[tag]
    match tag:
        case "$map":
            return {key if isinstance(key, str) else json.dumps(untag(key)): untag(item) for key, item in payload}
        case "$int":
            return int(payload, 16)
        case "$timedelta":
            return f"PT{untag(payload) / 1_000_000}S"
        case "$str":
            return payload.decode("utf-16-le", "replace")
        case _:
            return b64encode(payload).decode() if isinstance(payload, bytes) else untag(payload)
