"""What a value may be: strictly, and with words that a model can act on."""

from __future__ import annotations

import json
import math
import random
import re
from datetime import date
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from killick.contracts.regex import CHARS_MAX, compiled
from killick.contracts.schema import Bound, bound_of
from killick.contracts.schema_check import as_test, at_path
from killick.errors import ContractRefused


def says(value: Any, **bound: Any) -> str | None:
    """What a bound says of an argument called `x`."""
    kept = Bound(**bound)
    return at_path("x", as_test(kept), kept.optional)({"x": value})


def allows(value: Any, **bound: Any) -> bool:
    return says(value, **bound) is None


# Numbers


@pytest.mark.parametrize(
    "trick",
    [
        "5",
        "5.0",
        True,
        False,
        None,
        math.nan,
        math.inf,
        -math.inf,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("Infinity"),
        [5],
        {"x": 5},
        b"5",
        5 + 0j,
        date(2026, 1, 1),
    ],
)
def test_a_bound_on_a_number_takes_nothing_else_for_one(trick: object) -> None:
    assert not allows(trick, min=-(10**9), max=10**9)
    assert not allows(trick, type="number")


@pytest.mark.parametrize("kind", [int, float, Decimal])
def test_limits_are_themselves_allowed(kind: Any) -> None:
    assert allows(kind(1), min=1, max=5)
    assert allows(kind(5), min=1, max=5)
    assert not allows(kind(6), min=1, max=5)
    assert not allows(kind(0), min=1, max=5)


def test_a_tenth_is_a_tenth_however_it_is_written() -> None:
    for limit in (0.1, Decimal("0.1"), "0.1"):
        for value in (0.1, Decimal("0.1")):
            assert allows(value, min=limit, max=limit)
        assert not allows(0.10000000000000002, max=limit)
        assert not allows(Decimal("0.1000000000000000000000000001"), max=limit)


@given(
    st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.decimals(-(10**20), 10**20)),
    st.one_of(st.integers(-(10**30), 10**30), st.floats(-1e30, 1e30), st.decimals(-(10**20), 10**20)),
)
def test_numbers_compare_as_they_are_written(value: Any, limit: Any) -> None:
    def exactly(number: Any) -> Fraction:
        return Fraction(Decimal(repr(number)) if isinstance(number, float) else number)

    # An int of a float's size is exact in both.
    if isinstance(value, float) and float(limit) == int(limit):
        return
    assert allows(value, max=limit) == (exactly(value) <= exactly(limit))
    assert allows(value, min=limit) == (exactly(value) >= exactly(limit))


def test_a_number_of_very_many_digits_is_refused_in_few_words() -> None:
    assert says(10**10_000, max=5) == "x is a number of very many digits; at most 5 is allowed"


def test_a_whole_number_is_no_float_and_no_truth() -> None:
    assert allows(5, type="integer")
    assert says(5.0, type="integer") == "x is 5.0; a whole number is needed"
    assert says(True, type="integer") == "x is true; a whole number is needed"


def test_the_words_say_what_is_and_what_may_be() -> None:
    assert says(5000, max=1000) == "x is 5000; at most 1000 is allowed"
    assert says(0, min=1) == "x is 0; at least 1 is allowed"
    assert says("EUR", one_of=["USD", "CHF"]) == 'x is "EUR"; allowed is "USD", "CHF"'
    assert says("a" * 500, one_of=["b"]) == f'x is "{"a" * 60}…"; allowed is "b"'


# Presence


def test_what_a_bound_names_has_to_be_there() -> None:
    bound = Bound(max=5)
    assert at_path("x", as_test(bound))({}) == "x is missing; it is needed"
    assert at_path("x", as_test(bound))({"x": None}) == "x is nothing; a number is needed"


def test_what_is_optional_may_be_missing_or_nothing_but_not_wrong() -> None:
    assert at_path("x", as_test(Bound(max=5, optional=True)), True)({}) is None
    assert allows(None, max=5, optional=True)
    assert not allows(6, max=5, optional=True)


# Values


@pytest.mark.parametrize(
    ("listed", "other"),
    [
        (1, True),
        (True, 1),
        (0, False),
        (1, "1"),
        ("1", 1),
        (None, "None"),
        ("", None),
        ([1], [True]),
        ({"a": 1}, {"a": True}),
        ("EUR", "eur"),
        ("EUR", "EUR "),
        ("a", b"a"),
        ([], {}),
        ([1, 2], [2, 1]),
    ],
)
def test_one_of_tells_kinds_apart(listed: object, other: object) -> None:
    assert allows(listed, one_of=[listed])
    assert not allows(other, one_of=[listed])


def test_numbers_of_one_size_are_the_same_value() -> None:
    assert allows(1.0, one_of=[1])
    assert allows(Decimal("0.1"), one_of=[0.1])
    assert not allows(math.nan, one_of=[1])


LOOK_ALIKES = [
    "evil",
    "Evil",
    "EVIL",
    " evil ",
    "e\u200bvil",
    "ｅｖｉｌ",
    "𝐞𝐯𝐢𝐥",
    "ev\xadil",
    "ev\ufeffil",
    "ⅇvil",
    "evi\u200dl",
    "ⓔⓥⓘⓛ",
]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_none_of_knows_a_name_under_any_disguise(name: str) -> None:
    assert not allows(name, none_of=["evil"])


@pytest.mark.parametrize("name", ["good", "Jürgen", "Мария", "Σωκράτης", "田中", "live", "evils", "e v i l"])
def test_none_of_leaves_other_names_alone(name: str) -> None:
    assert allows(name, none_of=["evil"])


@pytest.mark.parametrize("trick", [["evil"], {"name": "evil"}, b"evil", 5, None, True])
def test_none_of_takes_no_other_kind_of_value(trick: object) -> None:
    assert not allows(trick, none_of=["evil"])


def test_none_of_numbers_knows_them_in_any_form() -> None:
    assert not allows(7, none_of=[7])
    assert not allows(7.0, none_of=[7])
    assert not allows("7", none_of=[7])
    assert allows(8, none_of=[7])


# Text


def test_a_pattern_matches_the_whole_text() -> None:
    assert allows("EUR", matches="[A-Z]{3}")
    for trick in ("EUR\n", "EURO", " EUR", "EUR; drop", "eur", ""):
        assert not allows(trick, matches="[A-Z]{3}")
    assert not allows(["EUR"], matches="[A-Z]{3}")


def test_a_sign_of_another_script_is_no_digit_and_no_letter_of_a_pattern() -> None:
    assert allows("K7", matches=r"\w\d")
    for trick in ("K٧", "К7", "\u212a7"):
        assert not allows(trick, matches=r"\w\d")
        assert not allows(trick, matches="(?i)[a-z][0-9]")
    assert allows("Jürgen", matches=r"(?u:\w+)")


def test_a_text_may_exclude_what_a_pattern_finds_anywhere_in_it() -> None:
    told = says("git commit\ngit push", excludes=r"\b(push|curl)\b")
    assert told is not None
    assert told.endswith(r"nothing in it may match \b(push|curl)\b")
    assert allows("git pushy", excludes=r"\bpush\b")
    assert Bound(excludes="x").spec == {"excludes": "x"}


def test_a_text_too_long_for_its_pattern_is_refused_before_it_is_tried() -> None:
    told = says("a" * 5000, matches="[a-z]+")
    assert told == "x is 5000 characters long; at most 4096 are compared with a pattern"


@pytest.mark.parametrize("pattern", ["(?:[a-z]++)*b", "(?>a+)+b", "(?=a)a", "(?<!b)a", r"(a+)\1", "(a)?(?(1)b|c)"])
def test_a_pattern_that_only_backtracking_can_match_is_refused(pattern: str) -> None:
    with pytest.raises(ContractRefused, match="exponential"):
        Bound(matches=pattern)


@pytest.mark.parametrize("pattern", ["(.{1,60}x?){1,70}", "a{1,1001}", "((a{30}){30}){30}"])
def test_a_pattern_that_is_too_large_is_refused(pattern: str) -> None:
    with pytest.raises(ContractRefused, match="repeats written out"):
        Bound(matches=pattern)


HARD = [
    *("(a+)+b", "(a|aa)+", "(a|a)*b", "(.*)*", r"(\w+\s?)*", "(x+x+)+y", "(a*)*", "((a+)|b)+", "(a?){30}a{30}"),
    *("([A-Z0-9]{1,8}-?){1,8}", "(a{1,9}){1,9}", "(.*,){9}x", "(a|b)*a(a|b){450}", "(.{1,30}x?){1,30}"),
    *(r"[\w.+-]+@([\w-]+\.)+[a-z]{2,}", r"(?:[a-z]+\.)*[a-z]+", ".*a.*b.*c", "[a-z]+[a-z]+[a-z]+[a-z]+x"),
]


@pytest.mark.parametrize("pattern", HARD)
def test_no_text_makes_a_pattern_run_for_ever(pattern: str) -> None:
    for piece in ("a", "A", "1", "a.", "ab", "a@", "x", "1-", ","):
        text = (piece * CHARS_MAX)[: CHARS_MAX - 1] + "!"
        assert compiled(pattern)(text) is (pattern == "(.*)*")  # backtracking would run into the test's timeout


def test_a_pattern_means_what_it_means_to_python() -> None:
    chance = random.Random(7)
    atoms = ["a", "[ab]", "[^a]", ".", r"\d", r"\w", r"\W", r"\s", "-", "[a-c1-3]", r"\b", "^", r"[\d-]", r"[\S]", "K"]
    atoms += ["(?i:k)", "(?i:[^a-f])", "(?s:.)", "ü", r"(?u:\w)", "[&a]", "[.a]", r"\.", "(?m:^a$)", r"\Z", "(?-i:a)"]

    def drawn(depth: int) -> str:
        match chance.randrange(5) if depth else 0:
            case 0:
                return chance.choice(atoms)
            case 1:
                return drawn(depth - 1) + drawn(depth - 1)
            case 2:
                return f"(?:{drawn(depth - 1)}|{drawn(depth - 1)})"
            case _:
                return f"({drawn(depth - 1)}){chance.choice(['*', '+', '?', '{1,3}', '{2}', '*?', ''])}"

    for _ in range(500):
        pattern = drawn(4)
        for _ in range(8):
            text = "".join(chance.choices("abcK\u212ak12 -\n.ü&", k=chance.randrange(6)))
            assert compiled(pattern)(text) == bool(re.fullmatch(pattern, text, re.ASCII)), (pattern, text)


def test_length_counts_what_there_is_of_a_thing() -> None:
    assert allows("abc", length=3)
    assert not allows("abcd", length=3)
    assert allows([1, 2], length=[2, 3])
    assert says([1], length=[2, 3]) == "x has a length of 1; at least 2 is allowed"
    assert allows("x" * 99, length=[2, None])
    assert not allows(12, length=3)


# Inside


def test_each_item_of_a_list_is_as_test_and_named() -> None:
    assert allows([1, 2], each={"max": 2})
    assert allows([], each={"max": 2})
    assert says([1, 3], each={"max": 2}) == "x[1] is 3; at most 2 is allowed"
    assert says("12", each={"max": 2}) == 'x is "12"; a list is needed'


def test_an_object_has_its_fields_and_no_others() -> None:
    bound = {"fields": {"iban": {"length": 4}, "note": {"type": "string", "optional": True}}}
    assert allows({"iban": "DE12"}, **bound)
    assert says({"iban": "DE123"}, **bound) == "x.iban has a length of 5; at most 4 is allowed"
    assert says({}, **bound) == "x.iban is missing; it is needed"
    assert says({"iban": "DE12", "to": 1}, **bound) == 'x has "to"; allowed is "iban", "note"'
    assert allows({"iban": "DE12", "to": 1}, **bound, others=True)
    assert says([("iban", "DE12")], **bound) == "x is a list; an object is needed"


def test_a_name_reaches_inside_and_misses_nothing_on_its_way() -> None:
    test = at_path("order.items[].price", as_test(Bound(max=10)))
    assert test({"order": {"items": [{"price": 1}, {"price": 10}]}}) is None
    assert test({"order": {"items": []}}) is None
    assert test({"order": {"items": [{"price": 1}, {"price": 11}]}}) == (
        "order.items[1].price is 11; at most 10 is allowed"
    )
    assert test({"order": {"items": [{}]}}) == "order.items[0].price is missing; it is needed"
    assert test({"order": {"items": {"price": 1}}}) == "order.items is an object; a list is needed"
    assert test({"order": []}) == "order is a list; an object is needed"
    assert test({}) == "order is missing; it is needed"


# What cannot be said


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"min": 5, "max": 1}, "min 5 is above max 1"),
        ({"max": math.inf}, "is not a number"),
        ({"max": True}, "is not a number"),
        ({"max": "many"}, "is not a number"),
        ({"maxx": 5}, "did you mean max"),
        ({"type": "numbr"}, "is not known"),
        ({"one_of": []}, "give a list"),
        ({"one_of": "EUR"}, "give a list"),
        ({"one_of": [math.nan]}, "is not a number"),
        ({"length": [3, 1]}, "least is above"),
        ({"length": -1}, "give the most"),
        ({"matches": "("}, "does not compile"),
        ({"matches": 5}, "as text"),
        ({"each": {"lenght": 5}}, "did you mean length"),
        ({"others": True}, "others= without"),
        ({"fields": {"a": {"maxi": 1}}}, "a: maxi is not known"),
        ({"optional": 1}, "true or false"),
        ({"one_of": [object()]}, "cannot be compared"),
    ],
)
def test_a_bound_that_says_what_cannot_be_is_refused(said: dict[str, Any], told: str) -> None:
    with pytest.raises(ContractRefused, match=told):
        bound_of(said)


@given(
    st.recursive(
        st.fixed_dictionaries(
            {},
            optional={
                "type": st.sampled_from(["string", "integer", "number", ["array", "null"]]),
                "max": st.one_of(st.integers(5, 9), st.floats(5, 9), st.decimals(5, 9)),
                "min": st.integers(0, 4),
                "length": st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 3), st.integers(3, 9)).map(list)),
                "matches": st.sampled_from(["a+", "[A-Z]{3}"]),
                "optional": st.booleans(),
                "one_of": st.lists(
                    st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none()), min_size=1, max_size=3
                ),
            },
        ),
        lambda inner: st.fixed_dictionaries(
            {},
            optional={
                "each": inner,
                "fields": st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=2),
            },
        ),
        max_leaves=4,
    )
)
@settings(max_examples=60)
def test_a_bound_and_its_data_are_the_same_bound(said: dict[str, Any]) -> None:
    spec = bound_of(said).spec
    assert bound_of(spec) == bound_of(said)
    assert bound_of(json.loads(json.dumps(spec))).spec == spec


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=5), st.decimals()
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)


@given(VALUES)
def test_no_value_makes_a_bound_raise_and_none_passes_by_being_strange(value: Any) -> None:
    bounds: list[dict[str, Any]] = [
        {"min": 1, "max": 5},
        {"max": 0.5},
        {"matches": "[a-z]+"},
        {"length": 3},
        {"one_of": ["a", 1, None]},
        {"none_of": ["a", 2]},
        {"each": {"max": 1}},
        {"fields": {"a": {"max": 1}}},
        {"type": ["string", "null"]},
    ]
    complaints = [says(value, **bound) for bound in bounds]
    for complaint in complaints:
        assert complaint is None or (complaint.startswith("x") and "\n" not in complaint.replace(str(value), ""))
    if type(value) not in (int, float, Decimal):
        assert complaints[0]
        assert complaints[1]
    if type(value) is not str:
        assert complaints[2]
