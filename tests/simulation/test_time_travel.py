"""Random agents that die, are rewound, forked and undone: the record stays whole, and nothing is done twice or lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import killick
from folded import fold_ledger, fold_timeline
from killick.store import MemoryStore, SqliteStore, Store
from seeds import repeats
from simulation.random_agents import Program, Touched, agents, another_world
from simulation.travelling import RUN, Journey, Leap, differences, ended, plainly

STORIES = int(os.environ.get("KILLICK_JOURNEYS", repeats(14, 60)))
"""How many stories are drawn; the same ones each time, so that a longer run begins with those of a shorter one."""

drawn = settings(
    max_examples=STORIES,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,),  # a failing story is told as it was drawn: each takes too long to make hundreds smaller
    report_multiple_bugs=False,
)

kills = st.lists(st.integers(1, 40), max_size=2)
"""At which of the points where it touches what outlives it each process dies; the last one lives."""

behinds = st.booleans() if "KILLICK_JOURNEYS" in os.environ else st.just(False)
"""Whether what the world cannot see is written behind, by a thread: then one story dies at other points each time."""

leaps = st.builds(
    Leap,
    st.sampled_from(("rewind", "rewind", "fork", "fork", "undo")),
    st.integers(0, 3),
    st.integers(0, 200),
    st.sampled_from(("", "output", "set", "input")),
    st.sampled_from(("recorded", "live", "none")),
)


def check(journey: Journey, happened: list[str]) -> None:
    wrong = list(journey.wrong())
    assert not wrong, "\n".join([*wrong, "after:", *happened])


def told(
    store: Store, clock: killick.clock.LeapingClock, agent: str, program: Program, *, first: list[int],
    then: list[tuple[Leap, list[int]]], behind: bool = False,
) -> None:  # fmt: skip
    """One story; after everything that happens in it, everything must hold."""
    with another_world() as world:
        journey = Journey(store, clock, world, agent, program, behind=behind)
        try:
            journey.go_on(first)
            check(journey, happened := ["it came to rest"])
            for leap, more in then:
                happened.append(journey.travel(leap))
                journey.go_on(more)
                check(journey, happened)
            assert ended(journey), [(run, journey.kd.info(run).status) for run in journey.runs()]
        finally:
            journey.close()


@pytest.mark.slow
@given(agents(), kills, behinds, st.lists(st.tuples(leaps, kills), max_size=3))
@drawn
def test_whatever_is_done_to_its_time_the_record_is_whole_and_nothing_is_done_twice_or_lost(
    drawn_agent: tuple[str, Program], first: list[int], behind: bool, then: list[tuple[Leap, list[int]]]
) -> None:
    clock = killick.clock.LeapingClock()
    told(MemoryStore(clock=clock), clock, *drawn_agent, first=first, then=then, behind=behind)


@pytest.mark.slow
@given(agents(), kills, st.lists(st.tuples(leaps, kills), min_size=1, max_size=2))
@settings(drawn, max_examples=max(STORIES // 8, 3))
def test_it_is_so_on_a_disk_too(
    drawn_agent: tuple[str, Program], first: list[int], then: list[tuple[Leap, list[int]]]
) -> None:
    clock = killick.clock.LeapingClock()
    with TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "killick.db", clock=clock, durability="process")
        try:
            told(store, clock, *drawn_agent, first=first, then=then)
        finally:
            store.close()


# what the checks see ------------------------------------------------------------------------------

PROGRAM: Program = [
    {"do": "look", "what": "ale"},
    {
        "do": "gather",
        "branches": [[{"do": "pay", "what": "ale"}, {"do": "hear", "what": "bun"}], [{"do": "rent", "what": "ale"}]],
    },
    {"do": "ask", "what": "bun"},
    {"do": "decide", "what": "ale"},
]


@pytest.fixture
def journey() -> Iterator[Journey]:
    """A run that came to its end, was taken back into a gather, forked and undone in part; all is well."""
    clock = killick.clock.LeapingClock()
    with another_world() as world:
        made = Journey(MemoryStore(clock=clock), clock, world, "walks", PROGRAM, behind=False)
        made.go_on()
        made.kd.rewind(RUN, "2.1.1:before")
        made.go_on([9])
        made.kd.fork(RUN, "2.2.1:after", effects="live", set={"ale": 1})
        made.kd.undo(RUN, "2.2.1")
        made.go_on()
        assert not list(made.wrong())
        assert ended(made)
        yield made
        made.close()


def test_an_action_that_was_done_twice_is_told(journey: Journey) -> None:
    key, action = next(done for done in journey.far.done if done[1] == "pay ale")
    journey.far.done.append((f"{key}-again", action))
    assert list(journey.wrong()) == [f"{RUN}: {action} once too often"]
    journey.far.done[-1] = (key, action)
    assert list(journey.wrong()) == [f"{key} was done 2 times", f"{RUN}: {action} once too often"]


def test_an_action_that_is_on_record_and_was_never_done_is_told(journey: Journey) -> None:
    key, _ = journey.far.done[0]
    del journey.far.requests[key]
    told = list(journey.wrong())
    assert told
    assert all("the far side says None" in each for each in told)


def test_a_state_that_is_not_the_fold_of_its_timeline_is_told(journey: Journey) -> None:
    plain = plainly(journey.store, RUN)
    line = plain.lines[max(plain.lines)]
    fold = journey.kd.state(RUN).fold
    assert not list(differences(fold, fold_timeline(line)))
    assert list(differences(fold, fold_timeline(plain.log)))
    assert list(differences(journey.kd.runtime.log.ledger(RUN), fold_ledger(line)))


def test_a_replay_that_reaches_the_world_is_told(journey: Journey) -> None:
    journey.far.is_shut = True
    with pytest.raises(Touched):
        journey.far.look("anything")
