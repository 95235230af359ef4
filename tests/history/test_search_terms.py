"""The terms of events, without a store: what is promised, what is left open, and that nothing is missed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.history.search.terms import (
    LEAVES_MAX,
    TEXT_CHARS_MAX,
    Marker,
    TermQuery,
    failure_names,
    folded,
    leaves,
    term,
    value_wanted,
    values_terms,
    verb_of,
)
from killick.log import Entry
from killick.model import events as e
from killick.model.chunks import pack
from killick.model.codec import Secret, plain
from killick.model.failure import Failure
from killick.model.ledger import Ledger


class Nothing:
    """Nothing came before."""

    def name(self, step: str) -> str:
        return ""

    def opened(self, step: str) -> e.WaitOpened | None:
        return None

    def event(self, seq: int) -> e.Event:
        raise AssertionError(seq)

    def data(self, seq: int) -> Mapping[str, Any]:
        raise AssertionError(seq)

    def owner(self, seq: int) -> str:
        raise AssertionError(seq)


def marked(*entries: Entry) -> dict[int, set[int]]:
    """The terms at each event of a run that is told like this."""
    marker = Marker("run_1", "clerk", 0, Ledger(), Nothing())
    for seq, (event, values) in enumerate(entries, 1):
        marker.take(seq, event, pack(values).raw if values is not None else None)
    marker.finish()
    found: dict[int, set[int]] = {}
    for mark in marker.drain():
        found.setdefault(mark.seq, set()).add(mark.term)
    return found


def call(arguments: Any, *, effect: e.EffectClass = "at_most_once", step: str = "1", tool: str = "pay") -> Entry:
    intended = e.StepIntended(at=1, step=step, sort="tool", name=tool, effect=effect)
    return Entry(intended, {"arguments": arguments})


def test_terms_are_what_stores_keep() -> None:
    # Whoever changes these empties every index there is: with a migration that says so.
    assert term("call") == 5704532265358634087
    assert term("argument", "is", "to", "ada@x.org") == 3023708353395422868


def test_a_call_is_found_by_its_tool_its_agent_and_its_arguments() -> None:
    [terms] = marked(call({"to": ["a@x", "b@x"], "amount": Decimal("12.50"), "by": {"name": "ann"}})).values()
    promised = {term("call"), term("effect"), term("tool", "pay"), term("in", "clerk")}
    named = (("to", "a@x"), ("to", "b@x"), ("amount", "12.5"), ("by.name", "ann"))
    assert terms == promised | {term("argument", "is", path, text) for path, text in named}


def test_what_only_reads_is_no_effect_and_a_model_is_no_call() -> None:
    asked = e.StepIntended(at=1, step="2", sort="model", name="chat")
    found = marked(call({}, effect="reads"), Entry(asked, {"arguments": {"messages": "hello"}}))
    assert term("effect") not in found[1]
    assert found.keys() == {1}


def test_secrets_and_bytes_leave_no_term() -> None:
    [terms] = marked(Entry(call({}).event, {"arguments": {"blob": b"abc", "none": None}})).values()
    assert len(terms) == 4
    assert leaves({"token": {"$secret": "ab12"}, "gone": {"$erased": "cd"}}) == []
    assert leaves(plain({"token": Secret("x")}, secret_key=b"k" * 32)) == []


def test_what_is_too_long_or_lies_elsewhere_is_left_open() -> None:
    long = "x" * (TEXT_CHARS_MAX + 1)
    [terms] = marked(call({"body": long, "page": "y" * 5_000, "to": "ada"})).values()
    assert {term("argument", "open", "body"), term("argument", "open", "page")} <= terms
    assert term("argument", "is", "to", "ada") in terms
    many = values_terms("argument", {f"n{number}": number for number in range(LEAVES_MAX + 1)})
    assert term("argument", "open", "") in many
    assert len(many) == LEAVES_MAX + 1


@pytest.mark.parametrize(
    ("asked", "value", "fits"),
    [
        (17, 17, True), ("17", 17, True), (17, "17", True), ("17", "17", True), ("0017", 17, True),
        ("0017", "17", False),
        (12.5, Decimal("12.50"), True), ("12.50", 12.5, True), ("12.50", "12.50", True), ("12.50", "12.5", False),
        (5, 5.0, True), ("1e3", 1000, True), (0, -0.0, True), (True, True, True), ("true", True, True),
        (True, 1, False),
        (1, True, False), ("ada", ["bob", "ada"], True), ("ada", {"bob", "ada"}, True), ("ada", "Ada", False),
        (date(2026, 11, 14), date(2026, 11, 14), True), ("2026-11-14", date(2026, 11, 14), True),
        (UUID(int=7), UUID(int=7), True), (str(UUID(int=7)), UUID(int=7), True), (2**70, 2**70, True),
        (None, None, True), (None, "x", False), ("null", None, False), ("x", {"y": "x"}, False), ("", "", True),
        ("nan", float("nan"), False), ("x" * 300, "x" * 300, True),
    ],
)  # fmt: skip
def test_a_value_is_asked_for_as_people_write_it(asked: Any, value: Any, fits: bool) -> None:
    wanted, stored = TermQuery(asked), plain({"a": value})
    assert wanted.fits_at("a", leaves(stored)) == fits
    group = value_wanted("argument", "a", wanted)
    assert group is None or not fits or group & values_terms("argument", stored)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=300) | st.decimals(
    allow_nan=False, allow_infinity=False
) | st.uuids() | st.dates()  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
)


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1, max_size=8), VALUES, max_size=6))
def test_every_scalar_that_fits_is_promised_by_a_term(arguments: dict[str, Any]) -> None:
    terms = values_terms("argument", msgspec_tree(arguments))
    for leaf in leaves(plain(arguments)):
        wanted = TermQuery(leaf.text)
        if leaf.text is not None and wanted.fits_at(leaf.path, leaves(plain(arguments))):
            assert (value_wanted("argument", leaf.path, wanted) or set()) & terms, leaf


def msgspec_tree(value: Any) -> Any:
    """A value as it stands in a row, with its long parts elsewhere."""
    return msgspec.json.decode(pack(value).raw)


# decisions, failures, answers ---------------------------------------------------------------------


def test_a_decision_is_found_by_question_choice_and_decider_whatever_their_case() -> None:
    told = {"question": "Which  Way?", "options": ["a"], "choice": {"go": "Left"}, "because": "so"}
    [terms] = marked(Entry(e.DecisionMade(at=1, step="1", by="Model"), told)).values()
    assert terms == {
        term("decision"), term("in", "clerk"), term("by", "model"), term("question", "is", "which way?"),
        term("choice", "is", "", "left"),
    }  # fmt: skip


@pytest.mark.parametrize("types", [("a.b.TimeoutError", "OSError"), tuple(f"pack{n}.x.{'E' * 40}" for n in range(20))])
def test_a_failure_is_found_by_every_name_it_answers_to(types: tuple[str, ...]) -> None:
    failure = Failure("timeout", types[0], types, "too late")

    class Known(Nothing):
        def data(self, seq: int) -> Mapping[str, Any]:
            return {"failure": plain(failure)}

    marker = Marker("run_1", "clerk", 0, Ledger(), Known())
    ended = e.AttemptEnded(at=1, step="1", attempt=1, outcome="unknown")
    marker.take(1, call({}).event, b"{}")
    marker.take(2, ended, pack({"failure": failure}).raw)
    terms = {mark.term for mark in marker.drain() if mark.seq == 2}
    names = {name for whole in types for name in (whole, whole.rpartition(".")[2])} | {"timeout"}
    assert all(failure.is_a(name) for name in names - {"timeout"})
    assert terms == {term("failure"), term("in", "clerk"), term("tool", "pay")} | {
        term("is", name)
        for name in failure_names(plain(failure))  # type: ignore[arg-type]
    }
    assert {folded(name) for name in names} <= failure_names({"kind": "timeout", "type": types[0], "types": types})


def test_what_returned_is_no_failure() -> None:
    ended = e.AttemptEnded(at=1, step="1", attempt=1, outcome="returned")
    assert 2 not in marked(call({}), Entry(ended, {"output": {"failure": "no"}}))


def test_only_what_a_person_answered_is_an_answer() -> None:
    def wait(waits_for: e.WaitFor, how: e.WaitEnd) -> dict[int, set[int]]:
        opened = e.WaitOpened(at=1, step="1", waits_for=waits_for, to=("Managers", "ops"))
        closed = e.WaitClosed(at=2, step="1", how=how, by="Ann")
        return marked(Entry(opened, {"prompt": "?"}), Entry(closed, {"answer": {"kind": "approve"}}))

    [terms] = wait("answer", "answered").values()
    assert terms == {
        term("answer"), term("in", "clerk"), term("verb", "approve"), term("by", "ann"), term("to", "managers"),
        term("to", "ops"),
    }  # fmt: skip
    assert wait("settlement", "answered")
    assert not wait("answer", "expired")
    assert not wait("event", "answered")
    assert not wait("child", "answered")
    assert [verb_of(each) for each in ({"kind": "not"}, "approve", None, 3)] == ["not", "approve", "", ""]


# effects ------------------------------------------------------------------------------------------


def attempt(step: str, key: str) -> Entry:
    return Entry(e.AttemptStarted(at=2, step=step, attempt=1, key=key, epoch=0))


def returned(step: str) -> Entry:
    return Entry(e.AttemptEnded(at=3, step=step, attempt=1, outcome="returned"), {"output": 1})


def test_what_is_open_at_the_end_is_in_doubt_and_what_ended_is_not() -> None:
    open_ = marked(call({}), attempt("1", "k"))
    assert term("in doubt") in open_[1]
    assert term("in doubt") not in marked(call({}), attempt("1", "k"), returned("1"))[1]
    unknown = Entry(e.AttemptEnded(at=3, step="1", attempt=1, outcome="unknown"), {"failure": {"type": "OSError"}})
    assert term("in doubt") in marked(call({}), attempt("1", "k"), unknown)[1]


def test_undoing_marks_what_was_undone_once_it_is() -> None:
    undo = e.StepIntended(at=4, step="2", sort="undo", name="pay", effect="at_most_once", undoes="1", undoes_seq=2)
    begun = [
        call({}),
        attempt("1", "k"),
        returned("1"),
        Entry(undo, {"arguments": {"key": "k"}}),
        attempt("2", "k:undo"),
    ]
    assert term("undone") not in marked(*begun)[1]
    assert term("undone") in marked(*begun, returned("2"))[1]
    assert 4 not in marked(*begun, returned("2"))


def test_data_that_was_erased_leaves_the_event_without_its_values() -> None:
    marker = Marker("run_1", "clerk", 0, Ledger(), Nothing())
    marker.take(1, call({"to": "ada"}).event, None)
    assert len(marker.drain()) == 4
