"""What a value is, what it becomes, how it comes back, and what is refused."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal, localcontext
from enum import Enum, Flag, IntEnum, IntFlag, StrEnum, auto
from hashlib import sha256
from hmac import digest as hmac_digest
from types import SimpleNamespace
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.errors import ValueErased, ValueRefused
from killick.model.chunks import pack, unpack
from killick.model.codec import DEPTH_MAX, PATH_CHARS_MAX, Erased, Secret, canonical, digest, plain
from killick.model.typed import convert

BERLIN = ZoneInfo("Europe/Berlin")
T = TypeVar("T")


def through(obj: object, kind: Any = Any, *, secret_key: bytes | None = None) -> Any:
    """What comes back of an object that was stored."""
    packed = pack(obj, secret_key=secret_key)
    pieces = {blob.hash: blob for blob in packed.blobs}
    return unpack(packed.raw, lambda hashes: {each: pieces[each] for each in hashes}, kind)


def refusal(obj: object, **options: Any) -> ValueRefused:
    with pytest.raises(ValueRefused) as caught:
        pack(obj, **options)
    return caught.value


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mode(StrEnum):
    FAST = auto()


class Rights(Flag):
    READ = auto()
    WRITE = auto()


class Bits(IntFlag):
    ONE = 1
    TWO = 2


class Mixed(Enum):
    NUMBER = 1
    TEXT = "one"
    PAIR = (1, 2)
    HALF = 0.5
    NOTHING = None


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclass
class Node:
    child: Any = None


class Pair(NamedTuple):
    left: int
    right: str = "r"


OldPair = namedtuple("OldPair", ["a", "b"])


# One of everything ---------------------------------------------------------------------------------

EVERYTHING: dict[Any, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, -(2**63), 2**63, -(2**64)],
    "floats": [0.0, -0.0, 1.0, 1e16, 5e-324, 0.1, math.inf, -math.inf, math.nan],
    "strings": ["", "plain", 'quote " \\ \n', "grüße ✓ 🙂", "\ud800 alone", "$text"],
    "bytes": [b"", b"\x00\xff\xfe", bytearray(b"abc")],
    "lists": [[], [[1], {}], (), (1, (2,)), Pair(1), OldPair(1, 2)],
    "sets": [set(), {3, 1, 2}, frozenset({"b", "a"}), {(1, "x"), None}],
    "maps": {1: "one", None: "none", (1, 2): "pair", "$ref": "dollar", "a": "text"},
    "dollars": {"$": 1},
    "enums": [Color.RED, Level.HIGH, Mode.FAST, Rights.READ | Rights.WRITE, Mixed.PAIR],
    "decimals": [Decimal("1.10"), Decimal("-0"), Decimal("NaN"), Decimal("1E+1000")],
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
    "date": date(2026, 11, 15),
    "times": [time(2, 0), time(2, 0, 0, 5, tzinfo=UTC), time(2, 0, tzinfo=BERLIN)],
    "datetimes": [
        datetime(2026, 11, 15, 2, 0),
        datetime(2026, 11, 15, 2, 0, 0, 1, tzinfo=UTC),
        datetime(2026, 11, 15, 2, 0, tzinfo=timezone(timedelta(hours=-3, minutes=-30))),
        datetime(2026, 11, 15, 2, 0, tzinfo=BERLIN),
        datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    ],
    "timedeltas": [timedelta(microseconds=-1), timedelta.max],
    "point": Point(1, 2),
    "secret": Secret("s3cret"),
}
KEY = b"a key of the store"
CANONICAL = rb"""
{"bools":[true,false],
"bytes":[{"$bytes":""},{"$bytes":"AP/+"},{"$bytearray":"YWJj"}],
"date":{"$date":"2026-11-15"},
"datetimes":[{"$datetime":"2026-11-15T02:00:00"},{"$datetime":"2026-11-15T02:00:00.000001+00:00"},
{"$datetime":"2026-11-15T02:00:00-03:30"},{"$datetime":"2026-11-15T02:00:00[Europe/Berlin]"},
{"$datetime":"2026-10-25T02:30:00[Europe/Berlin][_fold=1]"}],
"decimals":[{"$decimal":"1.10"},{"$decimal":"-0"},{"$decimal":"NaN"},{"$decimal":"1E+1000"}],
"dollars":{"$map":[["$",1]]},
"enums":["red",2,"fast",3,{"$tuple":[1,2]}],
"floats":[0.0,-0.0,1.0,1e+16,5e-324,0.1,{"$float":"inf"},{"$float":"-inf"},{"$float":"nan"}],
"ints":[0,-1,9223372036854775807,-9223372036854775808,
{"$int":"8000000000000000"},{"$int":"-10000000000000000"}],
"lists":[[],[[1],{}],{"$tuple":[]},{"$tuple":[1,{"$tuple":[2]}]},{"$tuple":[1,"r"]},{"$tuple":[1,2]}],
"maps":{"$map":[["$ref","dollar"],["a","text"],[1,"one"],[null,"none"],[{"$tuple":[1,2]},"pair"]]},
"none":null,
"point":{"x":1,"y":2},
"secret":{"$secret":"1c00c3da33fa68428620e8031ff7e8b6e5a3033e942873b9a48e80dbe6eff3b1"},
"sets":[{"$set":[]},{"$set":[1,2,3]},{"$frozenset":["a","b"]},{"$set":[null,{"$tuple":[1,"x"]}]}],
"strings":["","plain","quote \" \\ \n","gr\u00fc\u00dfe \u2713 \ud83d\ude42",
{"$str":"ANggAGEAbABvAG4AZQA="},"$text"],
"timedeltas":[{"$timedelta":-1},{"$timedelta":{"$int":"4af0a763bb1bfffff"}}],
"times":[{"$time":"02:00:00"},{"$time":"02:00:00.000005+00:00"},{"$time":"02:00:00[Europe/Berlin]"}],
"uuid":{"$uuid":"12345678-1234-5678-1234-567812345678"}}
""".replace(b"\n", b"")
DIGEST = "44c6c8cb444e0e2dda3c7120053b6857320280411d9acbb058231abc91a32363"


def test_one_of_everything_has_exactly_these_canonical_bytes() -> None:
    assert canonical(EVERYTHING, secret_key=KEY) == CANONICAL
    assert digest(EVERYTHING, secret_key=KEY).hex() == DIGEST == sha256(CANONICAL).hexdigest()


def test_a_digest_does_not_depend_on_the_order_of_keys_or_elements() -> None:
    assert digest({"a": 1, "b": {"x": 1, "y": 2}}) == digest({"b": {"y": 2, "x": 1}, "a": 1})
    assert digest({1: "a", "$": {2, 3}}) == digest({"$": {3, 2}, 1: "a"})
    assert digest([1, 2]) != digest([2, 1])


@pytest.mark.parametrize("seed", ["1", "4242"])
def test_a_digest_is_the_same_in_another_process_with_another_hash_seed(seed: str) -> None:
    words = [f"word{number}" for number in range(50)]
    code = (
        "from killick.model.codec import digest; words = [f'word{n}' for n in range(50)];"
        "print(digest([set(words), {(w, 1): w for w in set(words)}, dict.fromkeys(set(words))]).hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    ours = digest([set(words), {(word, 1): word for word in words}, dict.fromkeys(words)])
    assert told.stdout.decode().strip() == ours.hex()


def test_no_decimal_context_moves_a_digest() -> None:
    expected = digest(Decimal("1E+1000"))
    with localcontext() as context:
        context.capitals = 0
        assert digest(Decimal("1E+1000")) == expected


def test_numbers_that_python_calls_equal_have_different_digests() -> None:
    assert len({digest(number) for number in (1, 1.0, True, Decimal(1), "1")}) == 5
    assert digest(0.0) != digest(-0.0)


LISTS = ["bools", "ints", "floats", "strings", "bytes", "lists", "decimals", "times", "datetimes", "timedeltas"]


# Builtins come back as they were -------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(item for name in LISTS for item in EVERYTHING[name]),
        Decimal("sNaN42"),
        Decimal("0.1000"),
        timedelta.min,
        timedelta(days=1, microseconds=1),
        date.min,
        datetime.min,
        datetime.max,
        datetime(1890, 1, 1, tzinfo=BERLIN),
        datetime(2026, 1, 1, fold=1),
        datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN),
        datetime(2026, 3, 29, 2, 30, tzinfo=BERLIN, fold=1),
        time(1, 2, 3, 4, tzinfo=timezone(timedelta(hours=5, seconds=7)), fold=1),
        {(): (), ((1, b"x"), frozenset({1})): [()], 1.5: None, Decimal(1): 1, date(2026, 1, 1): 2, b"k": 3},
        {"": 0, "grüße": 1, "a b": 2},
        {"\udfff": 1},
        {"$ref": "x" * 43},
        {"$map": [[1, 2]]},
        {"$unknown": {"$tuple": []}},
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_builtin_comes_back_exactly_as_it_was(value: Any) -> None:
    expected = tuple(value) if isinstance(value, tuple) else value
    assert repr(through(value)) == repr(expected)
    assert type(through(value)) is type(expected)


def test_a_set_comes_back_exactly_as_it_was() -> None:
    for value in EVERYTHING["sets"]:
        assert through(value) == value
        assert type(through(value)) is type(value)


def test_an_int_of_any_length_comes_back() -> None:
    for number in (10**5000, -(10**5000), 2**64, -(2**63) - 1):
        assert through([number, {number: number}]) == [number, {number: number}]


def test_a_zone_comes_back_as_the_zone_and_not_as_its_offset() -> None:
    moment = datetime(2026, 11, 15, 2, 0, tzinfo=BERLIN)
    assert pack(moment).raw == b'{"$datetime":"2026-11-15T02:00:00+01:00[Europe/Berlin]"}'
    assert through(moment).tzinfo is BERLIN
    assert through(moment) + timedelta(days=200) == moment + timedelta(days=200)


def test_of_a_time_zone_of_another_kind_the_offset_is_kept() -> None:
    class Fixed(tzinfo):
        def utcoffset(self, _: datetime | None) -> timedelta:
            return timedelta(hours=2)

        def dst(self, _: datetime | None) -> None:
            return None

    moment = datetime(2026, 1, 1, tzinfo=Fixed())
    assert through(moment) == moment
    assert through(moment).tzinfo == timezone(timedelta(hours=2))


def test_subclasses_of_builtins_are_stored_as_the_builtin() -> None:
    class Metres(float):
        def __repr__(self) -> str:
            return "not a number"

    class Name(str):
        def __str__(self) -> str:
            return "not the text"

    class Count(int):
        pass

    class Tags(list[str]):
        pass

    class Late(datetime):
        pass

    value = [
        Metres(1.5),
        Name("ann"),
        Count(3),
        Tags("ab"),
        Late(2026, 1, 1),
        OrderedDict(a=1),
        Counter("aa"),
    ]
    back = through(value)
    assert back == [1.5, "ann", 3, ["a", "b"], datetime(2026, 1, 1), {"a": 1}, {"a": 2}]
    assert [type(item) for item in back] == [float, str, int, list, datetime, dict, dict]
    assert canonical([Name("$x"), {Name("$x"): 1}]) == b'["$x",{"$map":[["$x",1]]}]'


def test_what_comes_back_is_fresh_even_where_it_was_the_same_object() -> None:
    shared = list(range(1000))
    first, second = through([shared, shared])
    first.append("more")
    assert second == shared


def test_without_a_type_objects_come_back_as_what_was_stored_of_them() -> None:
    assert through([Point(1), Color.BLUE, {Point(1)}, {Color.RED: 1}]) == [
        {"x": 1, "y": 0},
        "blue",
        [{"x": 1, "y": 0}],
        {"red": 1},
    ]


# Declared types ------------------------------------------------------------------------------------


@dataclass
class Order:
    lines: list[Point]
    color: Color
    due: datetime | None
    total: Decimal
    blob: bytes = b""
    tags: frozenset[str] = frozenset()
    by_color: dict[Color, tuple[Point, ...]] = field(default_factory=dict)
    note: Any = None


@dataclass
class Box(Generic[T]):
    item: T


class Camel(msgspec.Struct, rename="camel", frozen=True):
    first_name: str
    born: date | msgspec.UnsetType = msgspec.UNSET


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag="sq", tag_field="shape_kind", rename={"side": "$side"}):
    side: Decimal


class Rect(msgspec.Struct, tag="re", tag_field="shape_kind"):
    w: int


class Row(msgspec.Struct, array_like=True):
    key: str
    when: time


class Crate(msgspec.Struct, Generic[T]):
    items: list[T]


class Address(pydantic.BaseModel):
    street: str = pydantic.Field(alias="streetName")
    zip: str = pydantic.Field("?", validation_alias=pydantic.AliasChoices("plz", "zipCode"))


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", alias_generator=str.upper)
    name: str
    home: Address
    others: dict[str, Address] = {}
    color: Color = Color.RED
    raw: bytes = pydantic.Field(b"\xff", exclude=True)


class Open(pydantic.BaseModel, extra="allow"):
    x: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = pydantic.Field("cat", alias="Kind")
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = pydantic.Field("dog", alias="Kind")
    lives: int = 1


class Zoo(pydantic.BaseModel):
    animals: list[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]


class Strict(pydantic.BaseModel, strict=True):
    mode: Mode
    pair: tuple[int, str]
    when: datetime
    point: Point


class Ids(pydantic.RootModel[list[UUID]]):
    pass


class Holder(pydantic.BaseModel, Generic[T]):
    held: T


@pydantic.dataclasses.dataclass
class Checked:
    size: int = pydantic.Field(alias="Size", gt=0)
    homes: list[Address] = pydantic.Field(default_factory=list)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]
    cast: dict[str, Point]


class UserId(str):
    __slots__ = ()


Meters = NewType("Meters", float)
HOME = Address(streetName="Elm", plz="1")
ORDER = Order(
    lines=[Point(1)],
    color=Color.BLUE,
    due=datetime(2026, 1, 1, tzinfo=BERLIN),
    total=Decimal("1.10"),
    blob=b"\xff",
    tags=frozenset({"a"}),
    by_color={Color.RED: (Point(3),)},
    note=(1, {2}),
)
TYPED: list[tuple[Any, Any]] = [
    (Point(1, 2), Point),
    (ORDER, Order),
    (Box(Box(b"x")), Box[Box[bytes]]),
    ([Box(Point(1))], list[Box[Point]]),
    (Camel("Ann"), Camel),
    (Camel("Ann", date(2026, 1, 1)), Camel),
    ([Circle(1.0)], list[Circle]),
    ([Square(Decimal("1.0")), Rect(2)], list[Square | Rect]),
    (Row("k", time(1, 2)), Row),
    (Crate([Point(1)]), Crate[Point]),
    ({Camel("a")}, set[Camel]),
    (frozenset({Point(1), Point(2)}), frozenset[Point]),
    (HOME, Address),
    (Person(NAME="Ann", HOME=HOME, OTHERS={"a": HOME}), Person),
    (Open.model_validate({"x": 1, "y": (1, 2), "$ref": "z"}), Open),
    ([HOME, None], list[Address | None]),
    ([Dog(Kind="dog"), Cat(Kind="cat")], list[Cat | Dog]),
    (Zoo(animals=[Dog(Kind="dog", lives=3), Cat(Kind="cat")]), Zoo),
    (Dog(Kind="dog"), Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]),
    (Strict(mode=Mode.FAST, pair=(1, "a"), when=datetime(2026, 1, 1), point=Point(1)), Strict),
    (Ids([UUID(int=1)]), Ids),
    (Holder[Point](held=Point(1)), Holder[Point]),
    (Checked(Size=1, homes=[HOME]), Checked),
    ({"title": "M", "cast": {"a": Point(1)}}, Movie),
    (Pair(1, "x"), Pair),
    ([OldPair(1, b"2")], list[OldPair]),
    (Color.RED, Color),
    (Level.HIGH, Level),
    (Mode.FAST, Mode),
    (Rights.READ | Rights.WRITE, Rights),
    (Bits.ONE | Bits.TWO, Bits),
    ([*Mixed], list[Mixed]),
    ({Level.LOW: 1}, dict[Level, int]),
    ({(1, 2): Point(1)}, dict[tuple[int, int], Point]),
    ("text", Literal["text", 3] | None),
    (3, Literal["text", 3] | None),
    ([1, "a", None, 1.5, [2]], list[int | str | float | list[int] | None]),
    (["2026-01-01", date(2026, 1, 1), b"x"], list[str | date | bytes]),
    ([{1}, [1], (1,)], list[set[int] | list[int] | tuple[int, ...]]),
    ((Point(1), OldPair(1, 2)), tuple[Point, OldPair]),
    (3, Annotated[int, msgspec.Meta(ge=1), {"unhashable": []}]),
    (UserId("u1"), UserId),
    ([UserId("u1")], list[UserId]),
    (Counter("aab"), Counter),
    (Meters(1.5), Meters),
    (bytearray(b"x"), bytearray),
    (timedelta(days=3), timedelta),
    (None, None),
    (None, Point | None),
    (10**400, int),
    ("\ud800", str),
    ([Point(1)], Sequence[Point]),
    ([Point(1)], Iterable[Point]),
    ((1, {2}), object),
]


@pytest.mark.parametrize(("value", "kind"), TYPED, ids=lambda each: repr(each)[:40])
def test_a_value_comes_back_as_its_declared_type(value: Any, kind: Any) -> None:
    back = through(value, kind)
    assert back == value
    assert type(back) is type(value)


json_types = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
orders = st.builds(
    Order,
    lines=st.lists(st.builds(Point, st.integers(), st.integers())),
    color=st.sampled_from(Color),
    due=st.none() | st.datetimes(timezones=st.none() | st.timezones()),
    total=st.decimals(allow_nan=False),
    blob=st.binary(max_size=2000),
    tags=st.frozensets(st.text()),
    by_color=st.dictionaries(st.sampled_from(Color), st.tuples(st.builds(Point, st.integers()))),
    note=json_types,
)


@given(orders)
def test_a_dataclass_of_anything_comes_back_the_same(order: Order) -> None:
    assert through(order, Order) == order


@given(json_types, st.text())
def test_a_model_of_anything_comes_back_the_same(note: Any, street: str) -> None:
    person = Holder[Any](held=(note, Address(streetName=street)))
    back = through(person, Holder[tuple[Any, Address]])
    assert back.held == person.held


def test_validators_see_names_and_never_aliases() -> None:
    assert pack(Person(NAME="Ann", HOME=HOME)).raw == (
        b'{"name":"Ann","home":{"street":"Elm","zip":"1"},"others":{},"color":"red","raw":{"$bytes":"/w=="}}'
    )


def test_of_two_types_that_fit_the_first_is_made_whatever_was_asked_before() -> None:
    @dataclass
    class Twin:
        x: int
        y: int = 0

    assert type(through(Point(1), Point | Twin)) is Point
    assert type(through(Point(1), Twin | Point)) is Twin


def test_pydantic_is_imported_only_for_those_who_use_it() -> None:
    code = (
        "import sys; from dataclasses import dataclass; from killick.model.chunks import pack, unpack\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "assert unpack(pack([Point(1)]).raw, dict, list[Point]) == [Point(1)]\n"
        "assert 'pydantic' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_an_old_value_takes_the_default_of_a_field_it_never_had() -> None:
    assert through({"x": 1}, Point) == Point(1, 0)
    assert through({"size": 2}, Checked) == Checked(Size=2)
    assert through({"street": "Elm"}, Address).zip == "?"


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        (1, str, "value"),
        (True, int, "value"),
        ({"x": "one"}, Point, "value.x"),
        ({"lines": [{"x": 1}, {"x": None}]}, Order, "value.lines[1].x"),
        ([{"item": {"item": "s"}}], list[Box[Box[bytes]]], "value[0].item.item"),
        ({"street": 1}, Address, "value.street"),
        ([{"street": "a"}, {"street": 1}], list[Address], "value[1].street"),
        ({"animals": [{"kind": "dog", "lives": "x"}]}, Zoo, "value.animals[0].dog.lives"),
        ([{"size": 1}, {"size": 0}], list[Checked] | Checked, "value.list[Checked][1].size"),
        ("green", Color, "value"),
        (3, Mixed, "value"),
        ([1], list[socket.socket], "value[0]"),
        (1, socket.socket | Point, "value"),
        (1, "NoSuchName", "value"),
    ],
)
def test_what_does_not_fit_its_type_is_refused_by_its_path(value: Any, kind: Any, path: str) -> None:
    with pytest.raises(ValueRefused) as caught:
        through(value, kind)
    assert caught.value.path.replace("['list[Checked]']", ".list[Checked]") == path


def test_a_marker_of_erasure_fits_no_declared_type() -> None:
    with pytest.raises(ValueErased):
        convert([{"x": Erased(b"h" * 32)}], list[Point])
    assert convert([Erased(b"h" * 32)], list[Any]) == [Erased(b"h" * 32)]


# What is refused -----------------------------------------------------------------------------------


def test_what_cannot_be_stored_is_refused_by_its_path() -> None:
    with socket.socket() as connection:
        error = refusal({"messages": [0, 1, 2, {"content": connection}]})
    assert error.path == "value.messages[3].content"
    assert error.reason.startswith("cannot store a socket.socket; use one of: JSON types, dataclasses")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "step 6"),
        ([1, object()], "step 6[1]"),
        ({"a b": object()}, "step 6['a b']"),
        ({1: object()}, "step 6[1]"),
        ({(1, 2): {"x": object()}}, "step 6[(1, 2)].x"),
        ({(1, object): 1}, "step 6(key)[1]"),
        ((0, {"$x": object()}), "step 6[1]['$x']"),
        (Node(Node([object()])), "step 6.child.child[0]"),
        (Holder[Any](held=object()), "step 6.held"),
        (Crate([object()]), "step 6.items[0]"),
        (Ids.model_construct(root=object()), "step 6"),
        (Secret([object()]), "step 6[0]"),
        ([msgspec.UNSET], "step 6[0]"),
    ],
)
def test_the_path_leads_through_every_container(value: Any, path: str) -> None:
    assert refusal(value, at="step 6", secret_key=KEY).path == path


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ((item for item in "ab"), "cannot store a generator"),
        (len, "cannot store a builtin_function_or_method"),
        (ValueError("x"), "cannot store a ValueError"),
        (range(3), "cannot store a range"),
        (memoryview(b"x"), "tolist()"),
        (pydantic.SecretStr("hidden"), "use killick.Secret"),
        (Secret("hidden"), "cannot store a Secret here"),
        ({Point(1): 1}, "cannot be a key"),
        ({(1, Point(1)): 1}, "cannot be a key"),
        ({Color.RED: 1, "red": 2}, "two keys that would be stored alike"),
        ({Color.RED, "red"}, "two elements that would be stored alike"),
        (SimpleNamespace(x="hidden"), "cannot store a types.SimpleNamespace"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_a_refusal_says_what_it_met_and_never_what_it_held(value: Any, told: str) -> None:
    error = refusal(value)
    assert told in error.reason
    assert "hidden" not in str(error)


def test_a_time_whose_zone_has_no_offset_is_refused() -> None:
    class Nowhere(tzinfo):
        def utcoffset(self, _: datetime | None) -> None:
            return None

    assert "without an offset" in refusal(datetime(2026, 1, 1, tzinfo=Nowhere())).reason


def test_what_refers_to_itself_is_refused_where_it_does() -> None:
    items: list[Any] = [0]
    items.append(items)
    assert (refusal(items).path, refusal(items).reason[:16]) == ("value[1]", "refers to itself")
    table: dict[Any, Any] = {}
    table["a"] = {1: (table,)}
    assert (refusal(table).path, refusal(table).reason[:16]) == ("value.a[1][0]", "refers to itself")
    node = Node(Node())
    node.child.child = node
    assert (refusal([node]).path, refusal([node]).reason[:16]) == ("value[0].child.child", "refers to itself")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: [inner],
        lambda inner: {"a": inner},
        lambda inner: (inner,),
        lambda inner: {1: inner},
        lambda inner: frozenset([inner]),
        lambda inner: {1: inner} | dict.fromkeys(range(2, 40), "x" * 40),
        lambda inner: ("x" * 500, "y" * 500, inner, "z" * 500),
        lambda inner: {"x": "x" * 500, "y": "y" * 500, "inner": inner},
    ],
    ids=["list", "dict", "tuple", "map", "frozenset", "large map", "large tuple", "large dict"],
)
def test_the_deepest_value_comes_back_and_a_deeper_one_is_refused(wrap: Any) -> None:
    value: Any = 0
    for _ in range(DEPTH_MAX):
        value = wrap(value)
    assert through(value) == value
    assert canonical(value)
    error = refusal(wrap(value))
    assert error.reason == f"is nested deeper than {DEPTH_MAX} levels; flatten it"
    assert len(error.path) <= PATH_CHARS_MAX + 1


def test_a_stack_that_is_nearly_used_up_refuses_and_does_not_crash() -> None:
    value: Any = 0
    for _ in range(DEPTH_MAX):
        value = {1: (value,)} if _ % 2 else [value]

    def deeper() -> None:
        try:
            deeper()
        except RecursionError:
            for attempt in (pack, canonical):
                with pytest.raises(ValueRefused, match="too deeply"):
                    attempt(value)

    deeper()


# Secrets -------------------------------------------------------------------------------------------


def test_of_a_secret_only_its_keyed_digest_is_stored() -> None:
    raw = pack({"token": Secret("s3cret")}, secret_key=KEY).raw
    assert raw == b'{"token":{"$secret":"%b"}}' % hmac_digest(KEY, b'"s3cret"', "sha256").hex().encode()
    assert pack(Secret("s3cret"), secret_key=b"another").raw != pack(Secret("s3cret"), secret_key=KEY).raw


def test_a_secret_comes_back_without_its_value_and_can_be_stored_again() -> None:
    back = through(Secret({"b": 1, "a": 2}), secret_key=KEY)
    assert back.digest == hmac_digest(KEY, b'{"a":2,"b":1}', "sha256")
    with pytest.raises(ValueErased):
        back.reveal()
    assert canonical(back) == canonical(Secret({"a": 2, "b": 1}), secret_key=KEY)


def test_a_secret_shows_its_value_only_when_asked() -> None:
    secret = Secret("s3cret")
    assert secret.reveal() == "s3cret"
    assert "s3cret" not in f"{secret} {secret!r} {[secret]}"
    assert not hasattr(secret, "__dict__")


def test_a_secret_fits_a_field_of_its_type() -> None:
    class Login(pydantic.BaseModel):
        user: str
        token: Secret

    login = through(Login(user="ann", token=Secret("s3cret")), Login, secret_key=KEY)
    assert login.user == "ann"
    assert login.token.digest is not None
    assert isinstance(through([Secret(1)], list[Secret], secret_key=KEY)[0], Secret)


# The plain form ------------------------------------------------------------------------------------


def test_the_order_of_a_dict_is_kept_in_store_and_ignored_in_digests() -> None:
    assert list(through({"b": 1, "a": 2})) == ["b", "a"]
    assert list(through({2: 1, 1: 2})) == [2, 1]


def test_the_plain_form_shares_no_container_with_the_object() -> None:
    inner: list[int] = []
    made = plain({"a": inner})
    inner.append(1)
    assert made == {"a": []}
