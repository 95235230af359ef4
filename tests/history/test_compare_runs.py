"""Two runs are told where they part, why, and how they went on; and the patch makes one state of the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

import killick
from families import Family, claim
from killick.history.compare_runs import RunComparison, compare, place_of
from killick.log import Entry
from killick.model import events as e


@killick.tool(effect="reads")
async def part_check(bank: str) -> dict[str, Any]:
    return {"bank": bank, "status": "up"}


@killick.tool(effect="at_most_once")
async def part_pay(to: str, amount: int) -> str:
    return f"paid {amount} to {to}"


@killick.tool(effect="reads")
async def part_wait() -> str:
    return "waited"


@killick.agent
async def part_agent(run: killick.Run, amount: int) -> str:
    found = await run.call(part_check, "DE02")
    if found["status"] == "down":
        await run.call(part_wait)
        return "later"
    route = await run.decided("Who decides?", "auto" if amount < 10 else "manager", options=["auto", "manager"])
    await run.update(route=route)
    return await run.call(part_pay, run.context.get("to", "Ann"), amount)


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.open("memory:") as client:
        client.run(part_agent, 5, id="r")
        yield client


def forked(kd: killick.Client, at: str, **conditions: Any) -> RunComparison:
    fork = kd.fork("r", at, **conditions)
    kd.advance(fork.id)
    return compare(kd.runtime.log, "r", fork.id)


def patched(document: Any, patch: list[dict[str, Any]]) -> Any:
    """RFC 6902, as far as add, remove and replace go."""
    root = {"": deepcopy(document)}
    for op in patch:
        names = [name.replace("~1", "/").replace("~0", "~") for name in op["path"].split("/")]
        inside: Any = root
        for name in names[:-1]:
            inside = inside[int(name) if isinstance(inside, list) else name]
        if isinstance(inside, list):
            place = int(names[-1])
            inside[place : place + (op["op"] != "add")] = [op["value"]] if op["op"] != "remove" else []
        elif op["op"] == "remove":
            del inside[names[-1]]
        else:
            inside[names[-1]] = op["value"]
    return root[""]


# a fork -------------------------------------------------------------------------------------------


def test_a_fork_with_another_output_diverges_at_that_step_and_goes_another_way(kd: killick.Client) -> None:
    found = forked(kd, "1:after", output={"1": {"bank": "DE02", "status": "down"}}, by="ann")
    assert found.shared is not None
    assert (found.shared.place, found.shared.steps) == ("start", 0)
    output, effects = found.conditions
    assert (output.step, output.value["status"], output.was["status"]) == ("1", "down", "up")
    assert (effects.what, effects.value) == ("effects", "recorded")
    assert [(pair.step, pair.how) for pair in found.pairs] == [("1", "output"), ("2", "call"), ("3", "absent")]
    assert found.why() == "step 1: the same call with another outcome"


def test_a_fork_with_another_context_parts_where_that_is_first_seen(kd: killick.Client) -> None:
    found = forked(kd, "1:after", set={"to": "Bob"}, effects="live")
    assert found.shared is not None
    assert (found.shared.run, found.shared.place, found.shared.steps) == ("r", "1:after", 1)
    assert [condition.line() for condition in found.conditions] == ['context to="Bob"', "effects live"]
    first = found.diverges_at
    assert first is not None
    assert (first.step, first.how) == ("3", "arguments")
    assert first.one is not None
    assert first.two is not None
    assert (first.one.arguments["to"], first.two.arguments["to"]) == ("Ann", "Bob")
    assert [first.one.line(60), first.two.line(60)] == [
        f'part_pay(to="{to}", amount=5) → "paid 5 to {to}"' for to in ("Ann", "Bob")
    ]


def test_a_fork_with_another_input_says_so_though_the_state_has_no_word_for_it(kd: killick.Client) -> None:
    found = forked(kd, "1:after", input=50, effects="live")
    [given, _] = found.conditions
    assert (given.what, given.value, given.was) == ("input", 50, 5)
    assert found.diverges_at is not None
    assert (found.diverges_at.step, found.diverges_at.how) == ("2", "output")


def test_a_fork_that_did_the_same_parts_nowhere(kd: killick.Client) -> None:
    found = forked(kd, "1:after")
    assert (found.pairs, found.diverges_at) == ((), None)
    assert found.why() == "every step is the same so far"


def test_a_fork_that_has_not_gone_on_yet_says_which_has_not_come_so_far(kd: killick.Client) -> None:
    found = compare(kd.runtime.log, "r", kd.fork("r", "2:after").id)
    assert found.why() == "step 3: r took it, r-fork has not come so far (queued)"


def test_two_forks_of_one_run_are_told_with_what_each_was_given() -> None:
    found = compare(claim().log, "r-fork-2", "r-fork-fork")
    assert found.shared is not None
    assert (found.shared.run, found.shared.place) == ("r", "1:after")
    assert [(condition.run, condition.what) for condition in found.conditions] == [
        ("r-fork-2", "effects"),
        ("r-fork", "context"),
        ("r-fork", "effects"),
        ("r-fork-fork", "input"),
        ("r-fork-fork", "model"),
        ("r-fork-fork", "effects"),
    ]
    assert found.why() == "step 2: check in the one, child in the other"


def test_a_fork_that_left_a_fork_before_that_one_began_has_nothing_of_what_it_was_given() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 3)
    told.fork("f", "r", 7, model="big-one")
    told.steps("f", 3, 4)
    told.fork("g", "f", 4)
    found = compare(told.log, "r", "g")
    assert [(condition.run, condition.what) for condition in found.conditions] == [("g", "effects")]
    assert found.shared is not None
    assert (found.shared.run, found.shared.place) == ("r", "1:after")


def test_what_was_rewound_since_the_fork_is_not_shared_any_more() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 3)
    told.fork("f", "r", 10)
    told.rewind("r", 4)
    told.step("r", "2", "other")
    found = compare(told.log, "r", "f")
    assert found.shared is not None
    assert (found.shared.place, found.shared.steps) == ("1:after", 1)
    assert found.why() == "step 2: other in the one, fetch in the other"


def test_the_document_has_all_of_it_and_its_patch_makes_the_one_state_of_the_other(kd: killick.Client) -> None:
    found = forked(kd, "1:after", output={"1": {"bank": "DE02", "status": "down"}}, set={"x": [1, {"y": 2}]})
    document = json.loads(json.dumps(found.document()))
    assert list(document) == ["shared", "conditions", "diverges_at", "steps", "patch"]
    assert [condition["unset"] for condition in document["conditions"]] == [[], [], []]
    assert document["diverges_at"] == document["steps"][0]
    assert document["diverges_at"]["one"]["output"] == {"bank": "DE02", "status": "up"}
    one, two = (json.loads(kd.state(run).to_json()) for run in ("r", "r-fork"))
    assert patched(one, document["patch"]) == two


# strangers ----------------------------------------------------------------------------------------


def test_two_runs_of_one_agent_that_share_nothing_part_at_the_first_step_that_differs(kd: killick.Client) -> None:
    kd.run(part_agent, 50, id="other")
    found = compare(kd.runtime.log, "r", "other")
    assert (found.shared, found.conditions) == (None, ())
    assert found.why() == "step 2: the same call with another outcome"
    assert [(pair.step, pair.how) for pair in found.pairs] == [("2", "output"), ("3", "arguments")]


def test_an_error_and_a_result_of_one_call_are_two_outcomes() -> None:
    told = Family()
    for run in ("a", "b"):
        told.start(run)
        told.begin(run, "1")
    told.append("a", Entry(e.AttemptEnded(at=told.now(), step="1", attempt=1, outcome="returned"), {"output": 1}))
    found = compare(told.log, "a", "b")
    assert found.why() == "step 1: one is done, the other running"


def test_steps_inside_a_gather_are_compared_by_their_numbers_whatever_their_order() -> None:
    told = Family()
    for run, order in (("a", (1, 2)), ("b", (2, 1))):
        told.start(run)
        told.scope(run, "1", 2)
        for branch in order:
            told.step(run, f"1.{branch}.1", output=f"{branch}")
        told.end_scope(run, "1")
    told.step("a", "2", output="x")
    told.step("b", "2", output="y")
    found = compare(told.log, "a", "b")
    assert [(pair.step, pair.how) for pair in found.pairs] == [("2", "output")]
    parts = {(line.part, line.text) for line in found.diff.lines()}
    assert not any("1.1.1" in text or "1.2.1" in text for _, text in parts), "order alone is no news"


# pages, places ------------------------------------------------------------------------------------


def test_an_event_is_called_by_the_step_that_it_ends_or_stands_before() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 2)
    assert [place_of(told.log, "r", seq) for seq in (1, 2, 4, 7)] == ["1:before", "@2", "1:after", "2:after"]
    assert place_of(told.log, "r", 4, "before") == "2:before"
    assert place_of(told.log, "r", 7, "before") == "2:after"
