"""A Failure says in one line what happened, knows what it is by name, and survives being stored."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.errors import ValueRefused
from killick.model.chunks import pack, unpack
from killick.model.failure import LINE_CHARS_MAX, Failure, Frame, type_name
from killick.model.typed import convert

TIMED_OUT = Failure(
    kind="timeout",
    type="httpx.ReadTimeout",
    types=("httpx.ReadTimeout", "httpx.TimeoutException", "httpx.HTTPError", "Exception", "BaseException"),
    message="timed out",
)


def failure_of(kind: type[BaseException], message: str = "", **more: Any) -> Failure:
    types = tuple(map(type_name, kind.__mro__[:-1]))
    return Failure(kind="error", type=types[0], types=types, message=message, **more)


def test_a_failure_is_told_in_one_line() -> None:
    assert str(TIMED_OUT) == "httpx.ReadTimeout: timed out"
    assert str(failure_of(ValueError)) == "ValueError"
    assert str(failure_of(ValueError, "one\n  two\r\n\tthree\u2028four")) == "ValueError: one two three four"


def test_a_group_tells_what_is_inside() -> None:
    members = (failure_of(ValueError, "a"), failure_of(KeyError, "b"))
    assert str(failure_of(ExceptionGroup, "many", members=members)) == (
        "ExceptionGroup: many (2 inside: ValueError: a; KeyError: b)"
    )


def test_a_long_line_is_cut() -> None:
    line = str(failure_of(ValueError, "x" * 10_000))
    assert len(line) == LINE_CHARS_MAX
    assert line.endswith("x…")


class Refused(ConnectionError):
    class Hard(ValueError):
        """Named inside another class."""


def test_a_failure_knows_its_classes_by_their_names() -> None:
    failure = failure_of(Refused)
    assert failure.is_a(Refused)
    assert failure.is_a(ConnectionError)
    assert failure.is_a(OSError)
    assert failure.is_a(Exception)
    assert not failure.is_a(ValueError)
    assert not failure.is_a(ConnectionResetError)
    assert failure_of(Refused.Hard).is_a(Refused.Hard)
    assert not failure_of(Refused.Hard).is_a(Refused)


def test_a_name_may_be_whole_or_its_last_part_or_as_it_is_imported() -> None:
    assert TIMED_OUT.is_a("httpx.TimeoutException")
    assert TIMED_OUT.is_a("TimeoutException")
    assert TIMED_OUT.is_a("Exception")
    assert not TIMED_OUT.is_a("Timeout")
    assert not TIMED_OUT.is_a("httpx")
    assert not TIMED_OUT.is_a("requests.ReadTimeout")
    assert not TIMED_OUT.is_a("")
    cancelled = failure_of(asyncio.CancelledError)
    assert cancelled.type == "asyncio.exceptions.CancelledError"
    assert cancelled.is_a("asyncio.CancelledError")


def test_what_has_no_class_answers_to_its_own_name() -> None:
    died = Failure(kind="died", type="killick.Died", types=(), message="the process died")
    assert died.is_a("Died")
    assert not died.is_a(Exception)


@pytest.mark.parametrize("stored_as", [lambda failure: failure, msgspec.to_builtins])
def test_a_nested_failure_comes_back_from_the_record(stored_as: Any) -> None:
    inner = failure_of(KeyError, "'a'", frames=(Frame("a.py", 3, "f"),), notes=("n",), details={"args": ["a", 1, None]})
    failure = failure_of(ExceptionGroup, "\udcff" * 600, cause=inner, members=(TIMED_OUT, inner), context=TIMED_OUT)
    packed = pack({"failure": stored_as(failure)})
    pieces = {blob.hash: blob for blob in packed.blobs}
    data = unpack(packed.raw, lambda hashes: {each: pieces[each] for each in hashes})
    assert convert(data["failure"], Failure) == failure


def test_builtins_as_json_has_them_are_enough() -> None:
    failure = failure_of(ValueError, "x", cause=failure_of(KeyError, frames=(Frame("a.py", 3, "f"),)))
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(failure)), Failure) == failure


def test_what_a_failure_does_not_have_takes_no_room() -> None:
    assert set(msgspec.to_builtins(failure_of(ValueError))) == {"kind", "type", "types", "message"}


def test_data_that_is_no_failure_is_refused() -> None:
    with pytest.raises(ValueRefused, match="kind"):
        convert({"kind": "bored", "type": "X", "types": [], "message": ""}, Failure)


failures = st.recursive(
    st.builds(Failure, st.sampled_from(["error", "died"]), st.text(), st.tuples(st.text()), st.text()),
    lambda inner: st.builds(
        Failure, st.just("error"), st.text(), st.just(()), st.text(),
        cause=st.none() | inner, context=st.none() | inner, members=st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)  # fmt: skip


@given(failures)
def test_any_failure_has_one_line_and_comes_back(failure: Failure) -> None:
    line = str(failure)
    assert len(line.splitlines()) <= 1
    assert len(line) <= LINE_CHARS_MAX
    packed = pack(failure)
    pieces = {blob.hash: blob for blob in packed.blobs}
    assert unpack(packed.raw, lambda hashes: {each: pieces[each] for each in hashes}, Failure) == failure
