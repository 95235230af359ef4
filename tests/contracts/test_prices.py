"""What models cost, and when."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from killick.contracts.prices import AS_OF, KNOWN, Prices
from killick.errors import ContractRefused
from killick.model.events import Usage


def at(day: str) -> int:
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp() * 1_000_000)


NOW = at("2026-11-15")


def test_tokens_cost_what_a_million_of_them_costs() -> None:
    prices = Prices({"m": {"input": 2, "output": "10", "cached": Decimal("0.5")}})
    usage = Usage(model="m", tokens_in=1_000_000, tokens_out=100_000, tokens_cached=400_000)
    assert prices.cost(usage, NOW) == 1_200_000 + 200_000 + 1_000_000


def test_part_of_a_millionth_is_a_whole_one() -> None:
    assert Prices({"m": {"input": 0.5, "output": 0}}).cost(Usage(model="m", tokens_in=1), NOW) == 1


def test_what_a_cache_gave_costs_as_much_where_nobody_says_less() -> None:
    prices = Prices({"m": {"input": 2, "output": 0}})
    assert prices.cost(Usage(model="m", tokens_in=10, tokens_cached=10), NOW) == 20
    assert prices.cost(Usage(model="m", tokens_in=10, tokens_cached=99), NOW) == 20


def test_a_model_that_is_not_known_has_no_price() -> None:
    assert Prices().cost(Usage(model="house-7b", tokens_in=1), NOW) is None
    assert Prices().cost(Usage(tokens_in=1), NOW) is None
    assert Prices().of(None, NOW) is None


def test_a_price_holds_from_its_date_on() -> None:
    prices = Prices(
        {
            "m": [
                {"input": 3, "output": 3, "since": date(2026, 3, 1)},
                {"input": 9, "output": 9, "since": "2025-03-01"},
                {"input": 1, "output": 1, "since": "2026-09-01"},
            ]
        }
    )
    found = {
        day: prices.of("m", at(day)) for day in ("2025-02-28", "2025-03-01", "2026-02-28", "2026-03-01", "2026-10-01")
    }
    assert [price and price.input // 1_000_000 for price in found.values()] == [None, 9, 9, 3, 1]
    latest = prices.latest("m")
    assert latest is not None
    assert latest.since == "2026-09-01"


def test_the_contracts_own_price_goes_first_and_the_closest_pattern_before_wider_ones() -> None:
    own = Prices(
        {
            "gpt-*": {"input": 7, "output": 7},
            "gpt-4o-*": {"input": 8, "output": 8},
            "gpt-4o-x": {"input": 9, "output": 9},
        }
    )
    found = {model: own.of(model, NOW) for model in ("gpt-4o", "gpt-4o-mini", "gpt-4o-x", "claude-opus-5")}
    assert [price and price.input // 1_000_000 for price in found.values()] == [7, 8, 9, 5]


def test_a_known_name_means_its_dated_versions_and_no_later_model() -> None:
    prices = Prices()
    assert prices.of("gpt-5-2025-08-07", NOW) == prices.of("gpt-5", NOW) is not None
    assert (
        prices.of("claude-opus-4-20250514", NOW) == prices.of("claude-opus-4", NOW) != prices.of("claude-opus-4-5", NOW)
    )
    assert prices.of("gpt-5.9", NOW) is None
    assert prices.of("gpt-5-turbo", NOW) is None


def test_what_is_known_has_a_date_and_makes_sense() -> None:
    date.fromisoformat(AS_OF)
    for prices in KNOWN.values():
        for price in prices:
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
        {"input": 1, "output": 1, "since": "soon"},
        {"input": True, "output": 1},
        [{"input": 1, "output": 1}] * 2,
        {"input": 1, "output": float("nan")},
    ],
)
def test_a_price_that_is_none_is_refused_by_its_model(said: Any) -> None:
    with pytest.raises(ContractRefused, match="prices of house"):
        Prices({"house": said})


@given(st.decimals(0, 1000, places=6), st.decimals(0, 1000, places=6), st.sampled_from(["", "2026-01-01"]))
def test_prices_and_their_data_are_the_same_prices(dollars_in: Decimal, dollars_out: Decimal, since: str) -> None:
    said = {"input": dollars_in, "output": dollars_out} | ({"since": since} if since else {})
    prices = Prices({"m": said})
    assert Prices(prices.spec).own == prices.own
    assert Prices(prices.spec).spec == prices.spec
