"""A tool's arguments are bound as Python binds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.definitions.tools import Shape


def none() -> None: ...
def two(a: Any, b: Any) -> None: ...
def with_default(a: Any, b: Any = 7) -> None: ...
def keyword_only(a: Any, *, b: Any = 7) -> None: ...
def open_ended(a: Any, *b: Any, **c: Any) -> None: ...


FUNCTIONS = (none, two, with_default, keyword_only, open_ended)


@given(
    fn=st.sampled_from(FUNCTIONS),
    args=st.lists(st.integers(0, 3), max_size=3),
    kwargs=st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
)
def test_arguments_are_bound_as_python_binds_them(
    fn: Callable[..., None], args: list[int], kwargs: dict[str, int]
) -> None:
    shape = Shape(fn, fn.__name__)
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match=fn.__name__):
            shape.bind(args, kwargs)
        return
    given_ones = dict(bound.arguments)
    bound.apply_defaults()
    arguments, given_by_name = shape.bind(args, kwargs)
    assert list(arguments.items()) == list(bound.arguments.items())
    assert given_by_name == given_ones
