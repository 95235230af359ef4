"""A diff says what is different, all of it, and reads no more than it must."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import killick
from families import fork_of
from killick.history.diff import Diff, across, between, diff, shown, values
from killick.log import Entry, Log, boundaries
from killick.model import events as e
from killick.store import Store
from seeds import repeats

LETTER = "Dear Madam or Sir, " * 80
attempts = 0


@killick.tool(effect="reads")
async def diff_fetch(claim: int) -> dict[str, Any]:
    return {"claim": claim, "size": (3, claim), "letter": LETTER, "raw": b"\x00" * claim}


@killick.tool(effect="at_most_once", retry=2, nothing_happened=(ConnectionRefusedError,))
async def diff_pay(amount: int) -> str:
    global attempts
    attempts += 1
    if attempts % 2:
        raise ConnectionRefusedError("the bank is closed")
    return f"paid {amount}"


@killick.agent
async def diff_agent(run: killick.Run, claim: int) -> str:
    await run.plan(["fetch", "pay"])
    docs = await run.call(diff_fetch, claim)
    route = await run.decided("Who?", "manager", options=["auto", "manager"], because="it is large")
    await run.update(route=route, letter=docs["letter"].replace("Sir", "Lord", claim % 2))
    await run.gather(*(run.call(diff_fetch, n) for n in range(1, 3 + claim % 2)))
    paid = await run.call(diff_pay, claim)
    await run.update(paid=paid)
    await run.ask("Was it right?", to="managers", timeout="3d")
    return paid


def finished(kd: killick.Client, claim: int, run: str) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(diff_agent, claim, id=run)
    kd.answer(run, "approve", by="ann")
    kd.run(diff_agent, claim, id=run)


@pytest.fixture
def kd(store: Store) -> Iterator[killick.Client]:
    global attempts
    attempts = 0
    with killick.Client(store, clock=killick.clock.LeapingClock()) as client:
        finished(client, 4, "r")
        yield client


def patched(document: Any, patch: list[dict[str, Any]]) -> Any:
    """RFC 6902, as far as add, remove and replace go."""
    root = {"": deepcopy(document)}
    for op in patch:
        names = [name.replace("~1", "/").replace("~0", "~") for name in op["path"].split("/")]
        inside: Any = root
        for name in names[:-1]:
            inside = inside[int(name) if isinstance(inside, list) else name]
        name = int(names[-1]) if isinstance(inside, list) else names[-1]
        if op["op"] == "remove":
            del inside[name]
        elif op["op"] == "add" and isinstance(inside, list):
            assert name <= len(inside)
            inside.insert(name, op["value"])
        else:
            assert op["op"] == "add" or name in inside or isinstance(inside, list)
            inside[name] = op["value"]
    return root[""]


def same(one: Any, two: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def told(found: Diff, width: int = 100) -> list[str]:
    return [f"{line.part} {line.sign} {line.text}" for line in found.lines(width)]


# patches ------------------------------------------------------------------------------------------


def test_the_patch_between_any_two_boundaries_gives_the_second_state(kd: killick.Client) -> None:
    log = kd.runtime.log
    steps = log.state("r").fold.steps
    places = [boundaries.at(log, "r", f"{step.id}:before").seq for step in steps] + [log.head("r").seq]
    documents = {seq: json.loads(kd.state("r", seq).to_json()) for seq in places}
    for one, two in permutations(places, 2):
        found = kd.diff("r", f"@{one}", f"@{two}")
        assert same(patched(documents[one], found.patch()), documents[two])
        assert found.patch() == diff(kd.state("r", one), kd.state("r", two)).patch()


def test_the_patch_between_two_runs_and_a_fork_gives_the_other_state(kd: killick.Client) -> None:
    finished(kd, 5, "other")
    cut = boundaries.at(kd.runtime.log, "r", "3:before").seq
    fork = fork_of(kd.runtime.log, e.RunForked(at=1, run="fork", parent="r", cut=cut, generation=1))
    fork.append(Entry(e.DecisionMade(at=2, step="3"), {"question": "Fork?", "choice": 1.0}))
    for one, two in permutations(("r", "other", "fork"), 2):
        document, wanted = (json.loads(kd.state(run).to_json()) for run in (one, two))
        found = across(kd.runtime.log, one, two)
        assert same(patched(document, found.patch()), wanted)
        assert found.patch() == diff(kd.state(one), kd.state(two)).patch()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.floats(0, 3, width=16) | st.text("ab/~$", max_size=3),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text("ab/~$.", max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=repeats(75, 300))
@given(JSON, JSON)
def test_the_patch_of_any_two_documents_gives_the_second(one: Any, two: Any) -> None:
    changes = values(one, two)
    assert same(patched(one, [change.patch() for change in changes]), two)
    assert bool(changes) != same(one, two)


def test_one_and_true_and_one_point_nought_are_different() -> None:
    assert len(values([1], [True])) == len(values([1], [1.0])) == len(values({"a": 0}, {"a": False})) == 1


def test_an_element_that_came_in_front_is_one_element_more() -> None:
    [change] = values({"m": [{"n": n} for n in range(50)]}, {"m": [{"n": n} for n in range(-1, 50)]})
    assert (change.op, change.pointer, change.path, change.after) == ("add", "/m/0", "m[0]", {"n": -1})


def test_an_element_that_changed_is_taken_apart() -> None:
    [change] = values([{"a": 1, "b": 2}, {"a": 3, "b": 4}], [{"a": 1, "b": 2}, {"a": 3, "b": 5}])
    assert (change.pointer, change.path, change.before, change.after) == ("/1/b", "[1].b", 4, 5)


def test_long_lists_with_nothing_in_common_are_still_compared_soon() -> None:
    one, two = ([{"n": n, "side": side} for n in range(5_000)] for side in "ab")
    assert len(values(one, two)) == 5_000


# what is told -------------------------------------------------------------------------------------


def test_a_step_is_told_part_by_part(kd: killick.Client) -> None:
    assert told(kd.diff("r", "4")) == [
        "position ~ step  3.2.1 → 4",
        "position + committed  4",
        'outputs + 4 diff_pay → "paid 4"',
        "retries + 4 diff_pay: 2 attempts, the last: ConnectionRefusedError: the bank is closed",
        "failures + 4 diff_pay attempt 1: ConnectionRefusedError: the bank is closed",
        'trace + 4 tool diff_pay {"amount":4} → "paid 4"',
        "effects + 4 diff_pay (at_most_once): done, key r:step_4:diff_pay:"
        + kd.state("r").effects[0].key.rpartition(":")[2],
    ]
    assert told(kd.diff("r", "2"))[-1] == 'decisions + 2 "Who?" → "manager" because "it is large"'
    opened = next(r.seq for r in kd.events("r") if isinstance(r.event, e.WaitOpened))
    assert "pending - 5 answer from managers: Was it right?" in told(kd.diff("r", f"@{opened}", "now"))


def test_what_came_to_the_context_is_told_by_its_name(kd: killick.Client) -> None:
    found = told(kd.diff("r", "4:after", "5:before"))
    assert found == ["context ~ version  1 → 2", 'context + document.paid  "paid 4"']


def test_one_place_means_its_step_its_event_or_all_since_it(kd: killick.Client) -> None:
    head = kd.runtime.log.head("r").seq
    places = [(found.before.label, found.after.label) for found in map(between_r(kd), ["3", "3.1.1", "@9", "4:before"])]
    assert places == [
        ("3:before", "3:after"),
        ("3.1.1:before", "3.1.1:after"),
        ("@8", "@9"),
        ("4:before", "now"),
    ]
    assert between(kd.runtime.log, "r", "@1").before.seq == 0
    assert between(kd.runtime.log, "r", "start").after.seq == head


def between_r(kd: killick.Client) -> Any:
    return lambda place: kd.diff("r", place)


def test_events_that_change_nothing_make_no_difference(kd: killick.Client) -> None:
    assert not kd.diff("r", "now", "now")
    assert not kd.diff("r", "now", "now").patch()
    started = next(r.seq for r in kd.events("r") if isinstance(r.event, e.Started))
    noted = kd.runtime.log.open("r")
    noted.append(Entry(e.NoteMade(at=1), {"note": "nothing"}))
    found = kd.diff("r", f"@{kd.runtime.log.head('r').seq}")
    assert not found
    assert found.lines() == []
    assert [op["path"] for op in found.patch()] == ["/seq"]
    assert kd.diff("r", f"@{started}")


def test_items_are_matched_by_their_step_and_not_by_their_place(kd: killick.Client) -> None:
    finished(kd, 5, "five")
    found = kd.diff("r", against="five")
    gone = [change for change in found.visible_changes() if change.op in ("add", "remove") and change.step]
    assert {(change.part, change.step) for change in gone} == {("outputs", "3.3.1"), ("trace", "3.3.1")}
    assert 'outputs ~ 4 value  "paid 4" → "paid 5"' in told(found)


def test_two_runs_are_told_without_what_only_names_the_run_or_the_time(kd: killick.Client) -> None:
    finished(kd, 4, "again")
    found = kd.diff("r", against="again")
    assert found.changes
    assert not found
    assert found.lines() == []


def test_two_runs_are_compared_at_the_same_place(kd: killick.Client) -> None:
    finished(kd, 6, "six")
    found = kd.diff("r", "2:after", against="six")
    assert [change.step for change in found.visible_changes() if change.part == "outputs"] == ["1", "1", "1"]
    assert (found.before.run, found.after.run) == ("r", "six")


def test_a_fork_is_told_from_its_parent_by_what_it_did_since(kd: killick.Client) -> None:
    cut = boundaries.at(kd.runtime.log, "r", "2:after").seq
    fork_of(kd.runtime.log, e.RunForked(at=1, run="fork", parent="r", cut=cut, generation=1))
    found = kd.diff("r", "2", against="fork")
    assert not found
    lines = told(kd.diff("fork", "2", "now"))
    assert lines == ["run ~ status  running → queued", "run ~ generation  0 → 1", "run ~ forked_from  none → r"]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_long_values_are_folded_to_their_ends_and_their_size(kd: killick.Client, width: int) -> None:
    lines = told(kd.diff("r", "start", "now"), width)
    assert max(map(len, lines)) <= width + len("decisions + ") + 20
    output = next(line for line in lines if line.startswith("outputs + 1 "))
    assert output.startswith('outputs + 1 diff_fetch → {"claim":4')
    assert output.endswith("characters)")


def test_a_folded_text_says_how_long_it_is() -> None:
    assert shown("a" * 30 + "z" * 30, 40) == '"aaaaaaaaaaaaaa…zzzzzzz" (60 characters)'
    assert shown("short", 40) == '"short"'
    assert shown({"$erased": "00ff"}, 40) == "(erased)"
    assert len(shown(list(range(10_000)), 50)) <= 50


def test_a_long_text_that_changed_shows_where(kd: killick.Client) -> None:
    finished(kd, 5, "five")
    line = next(line for line in told(kd.diff("r", against="five"), 80) if "document.letter" in line)
    assert line == 'context ~ document.letter  "…Madam or Sir, Dear Ma…" → "…Madam or Lord, Dear Ma…"'


# what it costs ------------------------------------------------------------------------------------


@killick.agent
async def diff_long(run: killick.Run, n: int) -> None:
    for k in range(n):
        await run.call(diff_fetch, k)


def test_one_step_of_a_long_run_is_compared_without_reading_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.Client(store) as kd:
        kd.run(diff_long, 200, id="long")
        read: list[int] = []
        values = Log.values
        monkeypatch.setattr(Log, "values", lambda self, run, row: read.append(row.seq) or values(self, run, row))
        found = kd.diff("long", "150")
        assert [change.step for change in found.visible_changes() if change.part == "outputs"] == ["150"]
        assert len(set(read)) <= 3
        read.clear()
        assert len(diff(kd.state("long", found.before.seq), kd.state("long", found.after.seq)).changes) == len(
            found.changes
        )
        assert len(set(read)) > 150, "states that are not known to share anything are read"
