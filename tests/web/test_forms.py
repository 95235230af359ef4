"""Forms: a schema and a value become fields, and what nobody touched comes back as it was."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter
from pydantic import Field as Given

from killick.web.forms import NOTHING, Field, form_of, unmasked
from killick.web.problems import Problem


def sent(field: Field) -> Any:
    """What a page sends of a form that nobody touched: forms.js, in Python. Nothing where it leaves it out."""
    if field.kind == "object":
        inside = {each.name: sent(each) for each in field.fields}
        inside = {name: value for name, value in inside.items() if value is not NOTHING}
        return inside if field.required or field.was is not None or inside else NOTHING
    if field.kind == "list":
        return [sent(row) for row in field.rows] if field.required or field.was is not None else NOTHING
    return NOTHING if field.was is None else json.loads(field.was)


class Line(BaseModel):
    sku: str = Given(description="The stock number", pattern=r"^[A-Z]{2}-\d+$")
    count: int = Given(ge=1, le=99)


class Order(BaseModel):
    customer: str
    due: dt.date | None
    express: bool
    carrier: Literal["post", "bike"]
    lines: list[Line]
    weight: float | None
    extra: dict[str, int]
    note: str = Given(max_length=2000)


SCHEMA = TypeAdapter(Order).json_schema()
LOOSE = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": SCHEMA}}}

lines = st.builds(dict, sku=st.from_regex(r"^[A-Z]{2}-[0-9]+\Z"), count=st.integers(1, 99))
orders = st.fixed_dictionaries({
    "customer": st.text(), "due": st.none() | st.dates().map(str), "express": st.booleans(),
    "carrier": st.sampled_from(["post", "bike"]), "lines": st.lists(lines, max_size=4),
    "weight": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    "extra": st.dictionaries(st.text(), st.integers(-(2**63), 2**64 - 1), max_size=3), "note": st.text(),
})  # fmt: skip
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=15,
)


@given(orders)
def test_a_value_that_fits_its_schema_comes_back_as_it_was(order: dict[str, Any]) -> None:
    field = form_of(SCHEMA, order)
    assert field.kind == "object"
    assert {each.kind for each in field.fields} >= {"boolean", "choice", "list"}
    assert sent(field) == order


@given(anything, st.sampled_from([LOOSE, {}, {"type": "object"}, {"type": "array", "items": {"type": "string"}}]))
def test_a_value_that_does_not_fit_is_kept_all_the_same(value: Any, schema: dict[str, Any]) -> None:
    assert sent(form_of(schema, value)) == value


@given(anything)
def test_whatever_is_said_to_be_a_schema_makes_a_form(schema: Any) -> None:
    assert form_of(schema).kind
    [field] = form_of({"type": "object", "properties": {"a": schema}, "$defs": schema}, {"a": 1}).fields
    assert field.name == "a"


def test_fields_are_what_the_schema_says() -> None:
    field = form_of(SCHEMA)
    found = {each.name: each for each in field.fields}
    assert {name: each.kind for name, each in found.items()} == {
        "customer": "text", "due": "date", "express": "boolean", "carrier": "choice", "lines": "list",
        "weight": "number", "extra": "json", "note": "long",
    }  # fmt: skip
    assert found["due"].nullable
    assert [(choice.label, choice.json) for choice in found["carrier"].choices] == [
        ("post", '"post"'),
        ("bike", '"bike"'),
    ]
    blank = found["lines"].blank
    assert blank is not None
    sku, count = blank.fields
    assert sku.help == "The stock number"
    assert count.takes == "from 1 to 99"
    assert found["note"].length_max == 2000


def test_a_schema_that_leads_into_itself_ends() -> None:
    tree: Any = {
        "$ref": "#/$defs/T",
        "$defs": {"T": {"type": "object", "properties": {"below": {"$ref": "#/$defs/T"}}}},
    }
    depth, field = 0, form_of(tree)
    while field.fields:
        field, depth = field.fields[0], depth + 1
    assert field.kind == "json"
    assert depth < 10


def test_what_is_hidden_has_an_empty_control_and_is_known_as_hidden() -> None:
    [card] = form_of({"type": "object", "properties": {"card": {"type": "string"}}}, {"card": "(redacted)"}).fields
    assert (card.hidden, card.shown) == (True, "")


def test_what_a_page_did_not_show_comes_back_as_it_was() -> None:
    original = {"card": "4111", "to": {"iban": "DE1", "name": "ann"}, "rows": [1, "2"]}
    edit = {"card": "(redacted)", "to": {"iban": "(redacted)", "name": "bob"}, "rows": [7, "(redacted)"]}
    assert unmasked(edit, original) == {"card": "4111", "to": {"iban": "DE1", "name": "bob"}, "rows": [7, "2"]}
    with pytest.raises(Problem, match=r"value.new"):
        unmasked({"new": "(redacted)"}, original)
