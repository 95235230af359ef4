"""What rules may know of a run: its own part of what was done, and intentions as they are on record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from folded import fold_ledger
from killick.contracts.contract import Ruling
from killick.contracts.policy_input import model_arguments, of_change, of_step, of_the_context, own_part, past_of, pasts
from killick.model import events as e
from killick.model.ledger import Counts, Ledger


def paid(number: int, tool: str = "pay", outcome: e.Outcome = "returned") -> list[tuple[int, e.Event]]:
    """Three events of a step, the first of them at ten times its number."""
    at, step = number * 10, str(number)
    return [
        (at, e.StepIntended(at=at, step=step, sort="tool", name=tool, effect="at_most_once", digest=step)),
        (at + 1, e.AttemptStarted(at=at, step=step, attempt=1, key=f"r:step_{step}", epoch=0)),
        (at + 2, e.AttemptEnded(at=at, step=step, attempt=1, outcome=outcome)),
    ]


class Reads:
    """The values of an event: its seq."""

    def event(self, seq: int) -> e.Event:
        raise NotImplementedError

    def data(self, seq: int) -> Mapping[str, Any]:
        return {"arguments": {"seq": seq}}


def forked() -> Ledger:
    before = [*paid(1), *paid(2, "pay_later"), *paid(3, outcome="refused")]
    cut = e.RunForked(at=1, run="f", parent="r", cut=32, generation=1)
    return fold_ledger([*before, (33, cut), *paid(4), *paid(5, "give")])


def test_what_a_forks_parent_had_done_is_not_the_forks_own() -> None:
    assert own_part(forked()) == Counts(
        calls={"pay": 1, "pay_later": 0, "give": 1},
        effects={"pay": 1, "pay_later": 0, "give": 1},
        spend=own_part(forked()).spend,
    )
    assert own_part(forked()).spend.attempts == 2
    alone = fold_ledger(paid(1))
    assert own_part(alone) is alone.facts.counts


def test_past_effects_are_those_that_happened_or_may_have_after_a_place() -> None:
    assert past_of(forked(), Reads(), "pay") == [{"seq": 10}, {"seq": 40}]
    assert past_of(forked(), Reads(), "pay", after=32) == [{"seq": 40}]
    assert past_of(forked(), Reads(), "pay*") == []


def test_patterns_find_each_effect_once_by_its_tools_own_name() -> None:
    found = pasts(forked(), Reads(), ["pay*", "pay", "p*"])
    assert found == {"pay": [{"seq": 10}, {"seq": 40}], "pay_later": [{"seq": 20}]}
    assert pasts(forked(), Reads(), []) == {}


@pytest.mark.parametrize(
    ("sort", "name", "effect", "known_as"),
    [
        ("tool", "pay", "at_most_once", ("pay", "tool")),
        ("tool", "send", None, ("send", "send")),
        ("child", "helper", None, ("spawn:helper", "child")),
        ("model", "create", None, ("model:create", "model")),
    ],
)
def test_an_intention_is_known_by_what_is_done_with_whom(
    sort: Any, name: str, effect: Any, known_as: tuple[str, str]
) -> None:
    event = e.StepIntended(at=1, step="1", sort=sort, name=name, effect=effect)
    found = of_step(event, {"arguments": {"model": "m"}, "because": "why"})
    assert (found.name, found.sort) == known_as
    assert (found.model, found.because) == ("m" if sort == "model" else None, "why")


def test_of_a_model_call_rules_see_what_is_not_the_conversation() -> None:
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user"}], "system": None}
    assert model_arguments(asked) == {"model": "m", "max_tokens": 5, "system": None}


def test_what_leaves_the_context_is_nothing_afterwards() -> None:
    event = e.ContextChanged(at=1, version=2, by="mia")
    found = of_change(event, {"set": {"a": 1}, "unset": ["b"]})
    assert (found.name, found.by, found.arguments) == ("update", "mia", {"a": 1, "b": None})


def test_where_people_would_be_asked_a_person_may_change_the_context_and_the_agent_may_not() -> None:
    asks = Ruling(ruling="ask", rule="notes", message="too long")
    assert of_the_context(asks, "mia").ruling == "accept"
    refused = of_the_context(asks, "agent")
    assert (refused.ruling, refused.message) == ("reject", "too long; let a person set it")
    assert of_the_context(Ruling(), "agent") == Ruling()
