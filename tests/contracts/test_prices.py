"""What models cost."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.contracts.prices import AS_OF, KNOWN, Prices
from killick.errors import ContractRefused
from killick.model.events import Usage


def test_tokens_cost_what_a_million_of_them_costs() -> None:
    prices = Prices({"m": {"input": 2, "output": "10", "cached": Decimal("0.5")}})
    usage = Usage(model="m", tokens_in=1_000_000, tokens_out=100_000, tokens_cached=400_000)
    assert prices.cost(usage) == 1_200_000 + 200_000 + 1_000_000


def test_part_of_a_millionth_is_a_whole_one() -> None:
    assert Prices({"m": {"input": 0.5, "output": 0}}).cost(Usage(model="m", tokens_in=1)) == 1


def test_what_a_cache_gave_costs_as_much_where_nobody_says_less() -> None:
    prices = Prices({"m": {"input": 2, "output": 0}})
    assert prices.cost(Usage(model="m", tokens_in=10, tokens_cached=10)) == 20
    assert prices.cost(Usage(model="m", tokens_in=10, tokens_cached=99)) == 20


def test_a_model_that_is_not_known_has_no_price() -> None:
    assert Prices().cost(Usage(model="house-7b", tokens_in=1)) is None
    assert Prices().cost(Usage(tokens_in=1)) is None
    assert Prices().of(None) is None


def test_the_contracts_own_price_goes_first_and_the_closest_pattern_before_wider_ones() -> None:
    own = Prices(
        {
            "gpt-*": {"input": 7, "output": 7},
            "gpt-4o-*": {"input": 8, "output": 8},
            "gpt-4o-x": {"input": 9, "output": 9},
        }
    )
    found = {model: own.of(model) for model in ("gpt-4o", "gpt-4o-mini", "gpt-4o-x", "claude-opus-5")}
    assert [price and price.input // 1_000_000 for price in found.values()] == [7, 8, 9, 5]


def test_a_known_name_means_its_dated_versions_and_no_later_model() -> None:
    prices = Prices()
    assert prices.of("gpt-5-2025-08-07") == prices.of("gpt-5") is not None
    assert prices.of("claude-opus-4-20250514") == prices.of("claude-opus-4") != prices.of("claude-opus-4-5")
    assert prices.of("gpt-5.9") is None
    assert prices.of("gpt-5-turbo") is None


def test_what_is_known_has_a_date_and_makes_sense() -> None:
    date.fromisoformat(AS_OF)
    for price in KNOWN.values():
        assert 0 < price.cached <= price.input < price.output


@pytest.mark.parametrize(
    "said",
    [
        {"input": 1},
        {"input": 1, "output": 1, "in": 1},
        {"input": -1, "output": 1},
        {"input": "much", "output": 1},
        5,
        [],
        {"input": True, "output": 1},
        {"input": 1, "output": float("nan")},
    ],
)
def test_a_price_that_is_none_is_refused_by_its_model(said: Any) -> None:
    with pytest.raises(ContractRefused, match="prices of house"):
        Prices({"house": said})


@given(st.decimals(0, 1000, places=6), st.decimals(0, 1000, places=6))
def test_prices_and_their_data_are_the_same_prices(dollars_in: Decimal, dollars_out: Decimal) -> None:
    prices = Prices({"m": {"input": dollars_in, "output": dollars_out}})
    assert Prices(prices.spec).own == prices.own
    assert Prices(prices.spec).spec == prices.spec
