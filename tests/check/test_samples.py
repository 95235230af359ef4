"""Every declared type has a sample that fits it, or a refusal that names it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypeVar
from uuid import UUID

import annotated_types
import msgspec
import pydantic
import pytest
from typing_extensions import TypedDict

from killick.check.samples import misfit, sample
from killick.errors import FakeRefused

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Node:
    email: str
    age: Annotated[int, annotated_types.Ge(18), annotated_types.Lt(20)]
    children: list[Node]
    parent: Node | None
    weight: float = 2.0
    tags: list[str] = field(default_factory=list)


class Packed(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=10)]
    node: Node
    when: datetime
    note: str = "none"


class Known(TypedDict):
    name: str
    age: NotRequired[int]


class Point(NamedTuple):
    x: int
    label: str = "here"


class Claim(pydantic.BaseModel):
    id: str
    amount: Decimal = pydantic.Field(gt=0, decimal_places=2)
    share: float = pydantic.Field(gt=0, lt=1)
    debt: float = pydantic.Field(lt=-5)
    step: int = pydantic.Field(lt=-5, multiple_of=4)
    ten: int = pydantic.Field(multiple_of=10, gt=10)
    names: Annotated[list[str], pydantic.Field(min_length=3)]
    short: Annotated[str, pydantic.StringConstraints(max_length=2)]
    number: pydantic.PositiveInt
    by_alias: int = pydantic.Field(alias="byAlias")


class Plain(pydantic.BaseModel):
    url: str
    color: Color
    claims: dict[str, set[int]]


@dataclass
class Holding(Generic[T]):
    held: T


TYPES: list[Any] = [
    str, int, float, bool, None, bytes, list, dict, list[int], tuple[int, str], tuple[int, ...], tuple[()], set[str],
    frozenset[int], dict[str, int], dict[str, Any], int | None, str | int, Literal["a", "b"], Color, Node, Packed,
    Known, Point, Plain, datetime, date, time, timedelta, UUID, Decimal, Holding[int], list[Plain], Sequence[int],
    Mapping[str, Node], Iterable[int], NewType("Id", str), Annotated[str, annotated_types.Len(3, 3)],
    Annotated[list[int], annotated_types.Len(2, 4)], Annotated[int, annotated_types.Interval(ge=3, lt=4)],
]  # fmt: skip


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_sample_fits_its_type(kind: Any) -> None:
    assert misfit(sample(kind), kind) is None


def test_samples_are_the_same_every_time_and_look_like_what_they_are_called() -> None:
    assert sample(Node) == Node("ada@example.org", 18, [], None)
    assert sample(Known) == {"name": "Ada"}
    assert sample(str, "customer_id") == "id_1"
    assert sample(str, "replyUrl") == "https://example.org/"
    assert sample(Plain) == Plain(url="https://example.org/", color=Color.RED, claims={"key": {1}})


def test_a_sample_keeps_what_a_model_demands() -> None:
    claim = sample(Claim)
    assert 0 < claim.share < 1
    assert claim.debt < -5
    assert (claim.step, claim.ten, len(claim.names)) == (-8, 20, 3)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Any, "no type is declared"),
        (type, "no sample of type can be made"),
        (Annotated[str, msgspec.Meta(pattern="^[A-Z]{2}$")], "is not a sample of it .*matching regex.*; give a value"),
    ],
)
def test_what_has_no_sample_is_refused_by_name(kind: Any, told: str) -> None:
    with pytest.raises(FakeRefused, match=told):
        sample(kind)


class Endless(msgspec.Struct):
    inner: Endless


class Picky(pydantic.BaseModel):
    word: str

    @pydantic.field_validator("word")
    @classmethod
    def check(cls, word: str) -> str:
        raise ValueError("not the magic word")


def test_a_type_that_needs_itself_is_refused() -> None:
    with pytest.raises(FakeRefused, match="Endless: contains itself"):
        sample(Endless)


def test_what_a_validator_refuses_is_told() -> None:
    with pytest.raises(FakeRefused, match=r"Picky: takes no sample: .*not the magic word"):
        sample(Picky)
    assert sample(Picky | int) == 1
