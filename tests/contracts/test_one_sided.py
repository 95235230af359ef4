"""Limits of a number that hold in one direction only."""

from __future__ import annotations

import pytest

from killick import rules
from killick.contracts.contract import Contract, Intention, PolicyInput
from killick.contracts.one_sided import open_ends

MAX = rules.arguments("pay", amount={"max": 500})
MIN = rules.arguments("pay", amount={"min": 1})


def named(*several: rules.Rule) -> list[str]:
    return [each.argument for each in open_ends(Contract("c", several).rules)]


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (MAX, ["amount"]),
        (MIN, ["amount"]),
        (rules.arguments("pay", amount={"min": 0, "max": 500}), []),
        (rules.arguments("pay", amount={"max": 5, "one_of": [1, 7]}), []),
        (rules.arguments("pay", to={"matches": "[a-z]+", "length": 9}), []),
        (rules.arguments("pay", {"lines[].price": {"max": 5}}), ["lines[].price"]),
        (rules.arguments("pay", lines={"each": {"fields": {"price": {"max": 5}}}}), ["lines[].price"]),
        (rules.context("pay", score={"min": 0.8}), []),
        (rules.arguments("pay", amount={"max": 5}, ask="mia"), ["amount"]),
    ],
)
def test_a_limit_without_its_other_side_is_found_wherever_it_is(rule: rules.Rule, found: list[str]) -> None:
    assert named(rule) == found


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ([MIN], []),
        ([rules.arguments("p*", amount={"min": 0})], ["amount"]),
        ([rules.total("pay", "amount", max=9000)], []),
        ([rules.arguments("refund", amount={"min": 0, "max": 9})], ["amount"]),
        ([rules.arguments("pay", fee={"min": 0, "max": 9})], ["amount"]),
    ],
)
def test_another_rule_for_the_same_tools_may_complete_it(others: list[rules.Rule], found: list[str]) -> None:
    assert named(MAX, *others) == found


def test_what_is_warned_of_passes_and_what_is_advised_does_not() -> None:
    refund = Intention(name="pay", arguments={"amount": -(10**30)})
    assert Contract("c", [MAX]).judge(refund, PolicyInput()).ruling == "accept"
    [end] = open_ends(Contract("c", [MAX]).rules)
    advised = Contract.parse(f'name = "c"\n[[rules]]\ntools = "pay"\narguments.amount = {end.fix}')
    assert advised.judge(refund, PolicyInput()).ruling == "reject"
    assert named(*advised.rules) == []
