"""A graph has every timeline of a family once, each step on one lane, and each lane where it left."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import killick
from families import Family, claim
from killick.history.diff import between
from killick.history.timeline import timeline
from killick.log import Entry, boundaries
from killick.model import events as e
from killick.presenting.graph.graph import Graph, Lane, Node, kept, layout, run_graph


def numbers(lane: Lane) -> list[str]:
    return [node.number for node in lane.nodes]


def lane_of(graph: Graph, run: str, generation: int | None = None) -> Lane:
    """The lane of a run now, or what was left of a generation of it."""
    wanted = [lane for lane in graph.lanes if lane.run == run and (lane.sort == "left") == (generation is not None)]
    [found] = [lane for lane in wanted if generation in (None, lane.generation)]
    return found


def leaves(graph: Graph, lane: Lane) -> tuple[str, str | None]:
    """The run that a lane leaves, and the step after which it does."""
    assert lane.parent is not None
    parent = graph.lanes[lane.parent]
    return parent.run, parent.nodes[lane.after].number if lane.after >= 0 else None


# timelines ----------------------------------------------------------------------------------------


def test_a_run_by_itself_is_one_lane_with_its_steps_in_order() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 3)
    told.complete("r")
    [lane] = run_graph(told.log, "r").lanes
    assert (lane.run, lane.sort, lane.status, lane.asked, lane.parent) == ("r", "run", "completed", True, None)
    assert numbers(lane) == ["1", "2", "3"]


def test_what_a_rewind_left_is_a_lane_that_ends_and_hangs_off_the_step_before_the_cut() -> None:
    graph = run_graph(claim().log, "r")
    left = lane_of(graph, "r", 0)
    assert numbers(left) == ["3", "4"]
    assert leaves(graph, left) == ("r", "2")
    assert (left.status, left.cut, left.by, left.because) == ("left", "3:before", "ann", "the wrong Ann")
    assert numbers(lane_of(graph, "r")) == ["1", "2", "3", "4", "0.1"]


def test_a_rewind_beyond_a_rewind_leaves_a_lane_off_a_lane() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 4)
    told.rewind("r", 7)
    told.steps("r", 3, 5)
    told.rewind("r", 4)
    told.steps("r", 2, 2)
    graph = run_graph(told.log, "r")
    first, second = lane_of(graph, "r", 0), lane_of(graph, "r", 1)
    assert (numbers(first), numbers(second), numbers(lane_of(graph, "r"))) == (
        ["3", "4"],
        ["2", "3", "4", "5"],
        ["1", "2"],
    )
    assert graph.lanes[first.parent or 0] == second
    assert leaves(graph, first) == ("r", "2")
    assert leaves(graph, second) == ("r", "1")


def test_a_rewind_back_into_what_was_left_goes_on_there_and_no_step_is_drawn_twice() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 4)
    told.rewind("r", 4)
    told.steps("r", 2, 3)
    told.rewind("r", 10)
    told.steps("r", 4, 4)
    graph = run_graph(told.log, "r")
    assert numbers(lane_of(graph, "r")) == ["1", "2", "3", "4"]
    assert numbers(lane_of(graph, "r", 1)) == ["2", "3"]
    assert numbers(lane_of(graph, "r", 0)) == ["4"]
    seqs = [node.seq for lane in graph.lanes for node in lane.nodes]
    assert len(seqs) == len(set(seqs))


def test_a_rewind_inside_a_gather_leaves_only_the_branch_that_it_took_back() -> None:
    told = Family()
    told.start()
    told.scope("r", "1", 2)
    told.step("r", "1.1.1", "left_branch")
    cut = told.log.head("r").seq
    told.step("r", "1.2.1", "right_branch")
    told.step("r", "1.1.2", "again")
    told.rewind("r", cut, keep=(cut + 4, cut + 5, cut + 6))
    told.step("r", "1.2.1", "right_branch", "otherwise")
    told.end_scope("r", "1")
    graph = run_graph(told.log, "r")
    [now], [left] = lane_of(graph, "r").nodes, lane_of(graph, "r", 0).nodes
    assert [node.number for node in now.inside] == ["1.1.1", "1.1.2", "1.2.1"]
    assert [node.number for node in left.inside] == ["1.2.1"]
    assert lane_of(graph, "r", 0).cut == "1.2.1:before"


# forks --------------------------------------------------------------------------------------------


def test_a_fork_leaves_its_parent_after_the_step_of_the_cut_with_what_was_changed() -> None:
    graph = run_graph(claim().log, "r")
    fork = lane_of(graph, "r-fork")
    assert (fork.sort, fork.cut, fork.by, fork.status) == ("fork", "3:after", "ann", "waiting")
    assert leaves(graph, fork) == ("r", "3")
    assert [condition.line() for condition in fork.conditions] == ['context route="manager"', "effects none"]
    assert numbers(fork) == ["4", "5"]
    below = lane_of(graph, "r-fork-fork")
    assert (leaves(graph, below), below.cut, numbers(below)) == (("r-fork", "4"), "4:after", [])
    assert [condition.line() for condition in below.conditions] == ["input 18", "model big-one", "effects recorded"]


@pytest.mark.parametrize("asked", ["r", "r-fork", "r-fork-fork", "r-fork-2"])
def test_whichever_member_is_asked_for_the_whole_lineage_is_there_and_that_one_is_marked(asked: str) -> None:
    graph = run_graph(claim().log, asked)
    assert {lane.run for lane in graph.lanes} == {"r", "r/2", "r-fork", "r-fork-fork", "r-fork-2"}
    assert [lane.run for lane in graph.lanes if lane.asked] == [asked]
    assert (graph.run, graph.root, graph.lanes[0].run) == (asked, "r", "r")


def test_a_fork_that_its_parent_has_not_heard_of_is_drawn_when_it_is_asked_for() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 2)
    told.fork("f", "r", 4, told=False)
    assert [lane.run for lane in run_graph(told.log, "r").lanes] == ["r"]
    assert [lane.run for lane in run_graph(told.log, "f").lanes] == ["r", "f"]


def test_a_fork_from_before_the_first_step_leaves_the_lane_at_its_top() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 2)
    told.fork("f", "r", 1)
    fork = lane_of(run_graph(told.log, "f"), "f")
    assert (fork.parent, fork.after, fork.cut) == (0, -1, "1:before")


def test_a_fork_of_what_was_left_hangs_off_the_lane_that_was_left() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 3)
    told.rewind("r", 4)
    told.fork("f", "r", 7)
    graph = run_graph(told.log, "r")
    fork = lane_of(graph, "f")
    assert graph.lanes[fork.parent or 0] == lane_of(graph, "r", 0)
    assert leaves(graph, fork) == ("r", "2")


def test_a_step_that_was_open_at_the_cut_is_on_both_lanes_as_it_came_out_on_each() -> None:
    told = Family()
    told.start()
    asked = told.ask("r", "1", "Pay?")
    told.fork("f", "r", asked)
    told.append("r", Entry(e.WaitClosed(at=told.now(), step="1", how="answered", by="mia"), {"answer": "approve"}))
    graph = run_graph(told.log, "r")
    assert [(node.number, node.status) for node in lane_of(graph, "r").nodes] == [("1", "done")]
    assert [(node.number, node.status) for node in lane_of(graph, "f").nodes] == [("1", "waiting")]


# children, effects --------------------------------------------------------------------------------


def test_a_child_hangs_off_the_step_that_started_it_once_though_a_fork_has_it_too() -> None:
    told = claim()
    told.spawn("r-fork-2", "3", "r/2")
    graph = run_graph(told.log, "r")
    child = lane_of(graph, "r/2")
    assert (child.sort, child.cut, child.child_of) == ("child", "2:after", "r:2")
    assert leaves(graph, child) == ("r", "2")


def test_a_child_that_is_asked_for_is_the_root_and_says_whose_it_is() -> None:
    [lane] = run_graph(claim().log, "r/2").lanes
    assert (lane.sort, lane.child_of, lane.asked) == ("run", "r:2", True)


def test_a_child_whose_record_is_gone_is_only_named_by_its_step() -> None:
    told = Family()
    told.start()
    told.spawn("r", "1", "r/1")
    [lane] = run_graph(told.log, "r").lanes
    assert lane.nodes[0].child == "r/1"


def test_an_adopted_effect_names_where_it_was_done_and_is_undone_with_it() -> None:
    graph = run_graph(claim().log, "r")
    paid = lane_of(graph, "r").nodes[2]
    assert paid.adopted is not None
    assert (paid.adopted.run, paid.adopted.step) == ("r", "3~0")
    left, mail = lane_of(graph, "r", 0).nodes
    assert (paid.stands, left.stands, left.undone, paid.undone) == ("undone", "undone", True, True)
    assert (mail.status, mail.stands) == ("running", "open")
    assert all(node.notable for node in (paid, left, mail))


def test_what_may_have_happened_is_in_doubt_on_the_lane_that_was_left() -> None:
    told = Family()
    told.start()
    told.begin("r", "1", "pay", effect="at_most_once")
    told.append("r", Entry(e.AttemptEnded(at=told.now(), step="1", attempt=1, outcome="unknown"), None))
    told.rewind("r", 1)
    [node] = lane_of(run_graph(told.log, "r"), "r", 0).nodes
    assert node.in_doubt


# limits -------------------------------------------------------------------------------------------


def test_of_very_many_runs_some_are_left_out_and_counted_but_never_the_one_that_was_asked_for() -> None:
    told = Family()
    told.start()
    told.steps("r", 1, 2)
    for number in range(12):
        told.fork(f"f{number}", "r", 4)
    graph = run_graph(told.log, "f11", runs_max=5)
    assert len(graph.lanes) == 5
    assert graph.left_out == 8
    assert any(lane.asked for lane in graph.lanes)


def test_the_document_is_json_without_values() -> None:
    document = json.loads(json.dumps(run_graph(claim().log, "r").document()))
    assert (document["version"], document["run"], document["root"], document["left_out"]) == (1, "r", "r", 0)
    paid = document["lanes"][0]["nodes"][2]
    assert paid["adopted"] == {"run": "r", "step": "3~0", "key": "r:step_3:pay:f3a9b12c"}
    assert "step" not in paid
    assert document["lanes"][0]["nodes"][0]["name"] == "check"


@given(st.integers(0, 300), st.sets(st.integers(0, 299)), st.sets(st.integers(-2, 302)))
def test_folding_hides_or_shows_every_place_once_and_never_an_anchor(
    count: int, notable: set[int], anchors: set[int]
) -> None:
    items = kept(count, {place for place in notable if place < count}, anchors)
    flat = [place for item in items for place in (item if isinstance(item, range) else [item])]
    assert flat == list(range(count))
    hidden = [item for item in items if isinstance(item, range)]
    assert all(len(item) > 2 for item in hidden)
    assert not any(anchor in item for anchor in anchors for item in hidden)


# layout -------------------------------------------------------------------------------------------


def random_family(seed: int, runs: int = 12, steps: int = 30) -> Family:
    """Runs that fork, rewind and start children anywhere."""
    chance, told = random.Random(seed), Family()
    told.start()
    told.steps("r", 1, steps)
    names = ["r"]
    for number in range(runs):
        parent = chance.choice(names)
        head = told.log.head(parent)
        place = chance.randint(1, head.seq)
        if chance.random() < 0.4:
            told.rewind(parent, place)
        else:
            name = f"f{number}"
            told.fork(name, parent, place)
            names.append(name)
            parent = name
        top = len(told.log.state(parent).fold.tops)
        told.steps(parent, top + 1, top + chance.randint(0, steps))
    return told


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", range(12))
def test_no_two_lanes_are_in_each_others_way_and_who_leaves_stands_at_the_right(seed: int) -> None:
    graph = run_graph(random_family(seed).log, "r")
    grid = layout(graph)
    taken: dict[tuple[int, int], int] = {}
    for index, lane in enumerate(graph.lanes):
        for row in range(grid.starts[index], grid.starts[index] + len(lane.nodes) + 1):
            assert taken.setdefault((grid.columns[index], row), index) == index
        if lane.parent is not None:
            assert lane.parent < index
            assert grid.columns[index] > grid.columns[lane.parent]
            assert grid.starts[index] == grid.starts[lane.parent] + lane.after + 1


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", range(12))
def test_every_step_of_every_timeline_is_on_one_lane(seed: int) -> None:
    told = random_family(seed)
    graph = run_graph(told.log, "r", runs_max=100)
    drawn = [
        (node.seq, lane.run if node.ended_at is None else "", node.ended_at)
        for lane in graph.lanes
        for node in lane.nodes
    ]
    assert len(drawn) == len(set(drawn))
    for run in {lane.run for lane in graph.lanes}:
        steps = told.log.state(run).fold.steps
        seen = {(node.number, node.at) for lane in graph.lanes for node in lane.nodes}
        assert {(step.id, step.at) for step in steps} <= seen


def test_steps_of_one_number_stand_in_one_row_as_long_as_they_are_of_one_lineage() -> None:
    graph = run_graph(claim().log, "r")
    grid = layout(graph)
    rows = {
        (index, node.number): grid.starts[index] + place
        for index, lane in enumerate(graph.lanes)
        for place, node in enumerate(lane.nodes)
        if lane.sort != "child"
    }
    for (_, number), row in rows.items():
        assert number == "0.1" or row == int(number) - 1


def gathered() -> Family:
    """A gather whose second branch was taken back, while the first kept what it had done by then and later."""
    told = Family()
    told.start()
    told.scope("r", "1", 2)
    told.step("r", "1.1.1")
    cut = told.log.head("r").seq
    told.step("r", "1.2.1", "other")
    told.step("r", "1.1.2")
    told.rewind("r", cut, keep=(cut + 4, cut + 5, cut + 6))
    told.step("r", "1.2.1", "other", "otherwise")
    told.end_scope("r", "1")
    return told


def test_a_place_before_what_a_rewind_kept_is_read_as_the_timeline_has_it() -> None:
    log = gathered().log
    for number in ("1", "1.1.1", "1.1.2", "1.2.1"):
        for side in ("before", "after"):
            place = boundaries.at(log, "r", f"{number}:{side}")
            tl, state = timeline(log, "r", place.seq, keep=place.keep), log.state("r", place.seq, keep=place.keep)
            assert {step.number: step.status for step in tl.steps()} == {
                step.id: step.status for step in state.fold.steps
            }
    kept_place = boundaries.at(log, "r", "1.1.2:before")
    assert [step.number for step in timeline(log, "r", kept_place.seq, keep=kept_place.keep).steps()] == ["1", "1.1.1"]


def test_the_diff_of_a_step_that_a_rewind_kept_is_what_that_step_did() -> None:
    found = between(gathered().log, "r", "1.1.2")
    assert [line.text for line in found.lines() if line.part == "outputs"] == ['1.1.2 fetch → "ok"']


@killick.tool(effect="at_most_once")
async def graph_pay(amount: int) -> str:
    return f"paid {amount}"


@killick.tool(effect="reads")
async def graph_check(bank: str) -> str:
    return "up"


@killick.agent
async def graph_agent(run: killick.Run, amount: int) -> str:
    if await run.call(graph_check, "DE02") == "up":
        return await run.call(graph_pay, amount)
    return await run.decided("What now?", "nothing", options=["nothing", "wait"], because="it is down")


def test_runs_that_were_really_forked_and_rewound_are_drawn_as_they_went() -> None:
    with killick.open("memory:") as kd:
        kd.run(graph_agent, 5, id="r")
        kd.rewind("r", "2:before", by="ann")
        kd.advance("r")
        fork = kd.fork("r", "1:after", output={"1": "down"}, by="ann")
        kd.advance(fork.id)
        graph = run_graph(kd.runtime.log, fork.id)
    assert [(lane.run, lane.sort, lane.cut, numbers(lane)) for lane in graph.lanes] == [
        ("r", "run", None, ["1", "2"]),
        ("r", "left", "2:before", ["2"]),
        ("r-fork", "fork", "1:after", ["1", "2"]),
    ]
    told: dict[str, Node] = {node.name: node for lane in graph.lanes if lane.sort != "left" for node in lane.nodes}
    assert told["graph_pay"].adopted is not None
    assert told["graph_pay"].adopted.step == "2~0"
    assert (told["graph_check"].given_by, graph.lanes[2].status) == ("ann", "completed")
    [output, effects] = graph.lanes[2].conditions
    assert (output.what, output.step, output.value, output.was) == ("output", "1", "down", "up")
    assert (effects.what, effects.value) == ("effects", "recorded")
