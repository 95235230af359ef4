"""Forms from JSON Schema: a schema and a current value become fields. Pure: reads no store, checks no answer.

A schema without a specific form gets a field of raw JSON, so that every value can be given; a value that misfits
its schema is shown so too. Only the runtime validates the submitted values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import msgspec
from msgspec.structs import replace

from killick.definitions.parameters import untag
from killick.history.phrasing import entries_of
from killick.model.codec import plain
from killick.web.problems import Problem
from killick.web.redaction import HIDDEN

if TYPE_CHECKING:
    JsonSchema = Mapping[str, Any]
else:
    JsonSchema = dict
"""A schema in a document: sent as it is. It is no value of an agent's, whose `$` would be a tag."""


DEPTH_MAX: Final = 5
FIELDS_MAX: Final = 200
LONG_CHARS: Final = 80

Kind = Literal["text", "long", "integer", "number", "boolean", "choice", "date", "list", "object", "json"]
_TYPES: Final[dict[Kind, Any]] = {
    "boolean": bool, "integer": int, "number": int | float, "list": list, "object": dict, "json": object,
}  # fmt: skip
"""The types of the values that each kind of field shows; all others show texts."""

NOTHING: Final[Any] = msgspec.UNSET
"""Nothing is given yet."""


class Choice(msgspec.Struct, frozen=True):
    """One of several values: how it reads, and the value as JSON."""

    label: str
    json: str


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """One field. `was` is its current value as JSON, None where it has none; `shown` is how its control shows that.

    An object has `fields`; a list has a field for each of its `rows`, and a blank one for those to come.
    """

    name: str
    kind: Kind
    label: str
    help: str = ""
    required: bool = False
    nullable: bool = False
    hidden: bool = False
    was: str | None = None
    shown: str = ""
    takes: str = ""
    """The accepted values, in words: `from 1 to 20`."""
    length_max: int | None = None
    choices: tuple[Choice, ...] = ()
    fields: tuple[Field, ...] = ()
    rows: tuple[Field, ...] = ()
    blank: Field | None = None


def form_of(schema: Any, value: Any = NOTHING, *, name: str = "", label: str = "", required: bool = True) -> Field:
    """A form for a value of a schema. Tags of stored values are left away, as people read and write them."""
    given = value if value is NOTHING else untag(plain(value))
    root = entries_of(schema)
    return _FormBuilder(root).field(root, given, name=name, label=label, required=required, depth=0)


class _FormBuilder:
    """Makes the fields of one form. References lead into its root; it ends where a form would be too large."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.left = FIELDS_MAX

    def field(
        self, schema: Mapping[str, Any], value: Any, *, name: str, label: str = "", required: bool, depth: int
    ) -> Field:
        self.left -= 1
        wanted, nullable = self._resolved(schema)
        hidden = value == HIDDEN
        kind = self._kind(wanted, NOTHING if hidden else value, depth, nullable)
        if hidden and kind in ("list", "object", "choice"):
            kind = "json"
        made = Field(
            name=name, kind=kind, label=label or str(wanted.get("title") or name.replace("_", " ")),
            help=str(schema.get("description") or wanted.get("description") or ""), required=required,
            nullable=nullable, hidden=hidden, was=None if value is NOTHING else written(value), takes=_takes(wanted),
            shown="" if hidden else _shown(kind, value),
            length_max=_int(wanted.get("maxLength")) if kind in ("text", "long") else None,
        )  # fmt: skip
        if kind == "object":
            return replace(made, fields=tuple(self._members(wanted, value, depth)))
        if kind == "list":
            return replace(made, **self._rows(entries_of(wanted.get("items")), value, depth + 1))
        if kind == "choice":
            return replace(made, choices=tuple(Choice(_label(each), written(each)) for each in _choices(wanted)))
        return made

    def _rows(self, item: Mapping[str, Any], value: Any, depth: int) -> dict[str, Any]:
        rows = [] if value is NOTHING else cast("list[Any]", value)
        made = [
            self.field(item, row, name="", label=f"{n}", required=True, depth=depth) for n, row in enumerate(rows, 1)
        ]
        return {
            "rows": tuple(made),
            "blank": self.field(item, NOTHING, name="", label="new", required=True, depth=depth),
        }

    def _members(self, wanted: Mapping[str, Any], value: Any, depth: int) -> Iterator[Field]:
        properties, needed = entries_of(wanted.get("properties")), _list(wanted.get("required"))
        given = {} if value is NOTHING else cast("dict[str, Any]", value)
        for name, each in properties.items():
            schema = entries_of(each)
            default = schema.get("default", NOTHING) if value is NOTHING else NOTHING
            yield self.field(schema, given.get(name, default), name=name, required=name in needed, depth=depth + 1)
        for name in [name for name in given if name not in properties]:
            yield self.field(_like(given[name]), given[name], name=name, required=True, depth=depth + 1)

    def _resolved(self, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
        """A schema with its references followed, and whether null is one of its values."""
        wanted, nullable = schema, False
        for _ in range(DEPTH_MAX):
            either = [entries_of(each) for each in _list(wanted.get("anyOf") or wanted.get("oneOf"))]
            rest = [each for each in either if each.get("type") != "null"]
            every = _list(wanted.get("allOf"))
            if isinstance(reference := wanted.get("$ref"), str):
                wanted = {**self._named(reference), **_about(wanted)}
            elif either and len(rest) == 1:
                nullable = nullable or len(rest) < len(either)
                wanted = {**rest[0], **_about(wanted)}
            elif len(every) == 1:
                wanted = {**entries_of(every[0]), **_about(wanted)}
            else:
                break
        kinds = _list(wanted.get("type"))
        if "null" in kinds:
            others = [each for each in kinds if each != "null"]
            wanted, nullable = {**wanted, "type": others[0] if len(others) == 1 else others}, True
        return wanted, nullable

    def _named(self, reference: str) -> Mapping[str, Any]:
        found = self.root
        for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
            found = entries_of(found.get(part.replace("~1", "/").replace("~0", "~")))
        return {} if found is self.root else found

    def _kind(self, wanted: Mapping[str, Any], value: Any, depth: int, nullable: bool) -> Kind:
        kind = self._kind_by_schema(wanted, value, depth)
        if value is NOTHING or (value is None and nullable and kind not in ("list", "object", "choice")):
            return kind
        if kind == "choice":
            fits = any(written(value) == written(each) for each in _choices(wanted))
        else:
            fits = isinstance(value, _TYPES.get(kind, str)) and (kind != "list" or len(_list(value)) <= self.left)
        if not fits or (isinstance(value, bool) and kind in ("integer", "number")):
            return "json"
        is_long = kind == "text" and isinstance(value, str) and ("\n" in value or len(value) > LONG_CHARS)
        return "long" if is_long else kind

    def _kind_by_schema(self, wanted: Mapping[str, Any], value: Any, depth: int) -> Kind:
        if _choices(wanted):
            return "choice"
        kind = wanted.get("type")
        if kind in ("integer", "number", "boolean"):
            return cast("Kind", kind)
        if kind == "string":
            if wanted.get("format") == "date":
                return "date"
            return "long" if (_int(wanted.get("maxLength")) or 0) > 400 else "text"
        if depth >= DEPTH_MAX or self.left <= 0:
            return "json"
        if kind == "array" and entries_of(wanted.get("items")) and not wanted.get("prefixItems"):
            return "list"
        if kind == "object" and (entries_of(wanted.get("properties")) or (isinstance(value, dict) and value)):
            return "object"
        return "json"


def unmasked(value: Any, original: Any, at: str = "value") -> Any:
    """A submitted value, with hidden parts restored from the original. Raises Problem if the original has none."""
    if value == HIDDEN:
        if original is NOTHING:
            raise Problem(422, f"{at}: {HIDDEN} marks a hidden value; give a value", code="value_hidden")
        return original
    if isinstance(value, dict):
        known = entries_of(original)
        given = cast("dict[str, Any]", value)
        return {name: unmasked(each, known.get(name, NOTHING), f"{at}.{name}") for name, each in given.items()}
    if isinstance(value, list):
        row, rows = _list(value), _list(original)
        same = rows if len(rows) == len(row) else [NOTHING] * len(row)
        return [unmasked(each, was, f"{at}[{n}]") for n, (each, was) in enumerate(zip(row, same, strict=True))]
    return value


# small things -------------------------------------------------------------------------------------


def _shown(kind: Kind, value: Any) -> str:
    if value is NOTHING or (value is None and kind != "json"):
        return ""
    if kind == "json":
        return msgspec.json.format(written(value), indent=2)
    return value if isinstance(value, str) else written(value)


def _takes(wanted: Mapping[str, Any]) -> str:
    """The bounds that a schema gives, in words."""
    low, high = wanted.get("minimum"), wanted.get("maximum")
    above, below = wanted.get("exclusiveMinimum"), wanted.get("exclusiveMaximum")
    parts = [f"{word} {each}" for word, each in (("from", low), ("above", above), ("to", high), ("below", below))
             if isinstance(each, int | float) and not isinstance(each, bool)]  # fmt: skip
    if (chars := _int(wanted.get("maxLength"))) is not None:
        parts.append(f"up to {chars} characters")
    written = {"date-time": "2026-01-31T12:00:00Z", "time": "12:00:00", "uuid": "a UUID", "email": "an address"}
    if (format_ := wanted.get("format")) in written:
        parts.append(f"as {written[format_]}" if format_ in ("date-time", "time") else written[format_])
    return " ".join(parts)


def _choices(wanted: Mapping[str, Any]) -> list[Any]:
    if "const" in wanted:
        return [wanted["const"]]
    either = [entries_of(each) for each in _list(wanted.get("anyOf") or wanted.get("oneOf"))]
    if either and all("const" in each for each in either):
        return [each["const"] for each in either]
    return _list(wanted.get("enum"))


def _label(value: Any) -> str:
    return value if isinstance(value, str) else "yes" if value is True else "no" if value is False else written(value)


def _like(value: Any) -> Mapping[str, Any]:
    """The likely schema of a value without one."""
    kinds = {bool: "boolean", int: "number", float: "number", str: "string"}
    return {"type": kinds[type(value)]} if type(value) in kinds else {}


def _about(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("title", "description", "default") if name in schema}


def written(value: Any) -> str:
    """A value as JSON, to be sent back as it is."""
    return msgspec.json.encode(value).decode()


def _int(value: Any) -> int | None:
    return value if type(value) is int else None


def _list(value: Any) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, list | tuple) else []
