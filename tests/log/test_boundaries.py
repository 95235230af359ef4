"""Places in time are found as people write them, in the timeline that they mean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stories import Story, started

import killick
from families import fork_of
from folded import fold_timeline
from killick.errors import BoundaryUnknown
from killick.log import Entry, Log, boundaries
from killick.model import events as e
from killick.model.fold import timeline
from killick.store import Store

broken = True


@killick.tool(effect="reads")
async def boundary_look(n: int) -> int:
    return n * 10


@killick.tool(effect="at_most_once")
async def boundary_pay(amount: int) -> str:
    if broken:
        raise killick.NotDone("closed")
    return f"paid {amount}"


@killick.agent
async def boundary_agent(run: killick.Run, n: int) -> str:
    await run.call(boundary_look, n)
    await run.decided("How?", "fast")
    await run.gather(run.call(boundary_look, 1), run.call(boundary_look, 2))
    paid = await run.call(boundary_pay, n)
    await run.ask("Right?")
    return paid


@pytest.fixture
def kd(store: Store) -> Iterator[killick.Client]:
    """A run that waits at step 5, after step 4 had failed once and was taken back."""
    global broken
    with killick.Client(store, clock=killick.clock.LeapingClock()) as client:
        broken = True
        with pytest.raises(killick.RunFailed):
            client.run(boundary_agent, 7, id="r")
        broken = False
        assert client.resume("r") == "rewound to step 4, which failed"
        with pytest.raises(killick.RunWaiting):
            client.run(boundary_agent, 7, id="r")
        yield client


def at(kd: killick.Client, text: str) -> boundaries.RunMoment:
    return boundaries.at(kd.runtime.log, "r", text)


def test_a_step_is_not_there_before_it_and_has_ended_after_it(kd: killick.Client) -> None:
    for text in ("1", "2", "3", "3.1.1", "3.2.1", "4"):
        before, after = at(kd, f"{text}:before"), at(kd, f"{text}:after")
        assert kd.state("r", before.seq).fold.step(text) is None
        assert kd.state("r", before.seq + 1).fold.step(text) is not None
        found = kd.state("r", after.seq).fold.step(text)
        assert found is not None
        assert (found.status, found.ended) == ("done", after.seq)
        assert (before.label, after.label) == (f"{text}:before", f"{text}:after")


def test_a_step_alone_is_where_it_ended(kd: killick.Client) -> None:
    assert at(kd, "2") == at(kd, " 2:after ")


def test_a_step_that_has_not_ended_ends_now_and_the_label_says_so(kd: killick.Client) -> None:
    place = at(kd, "5:after")
    assert place.seq == kd.runtime.log.head("r").seq
    assert place.label == "5:after (step 5 has not ended: now)"


def test_events_the_start_and_now_are_places(kd: killick.Client) -> None:
    head = kd.runtime.log.head("r").seq
    assert at(kd, "@9") == boundaries.RunMoment(9, "@9")
    assert at(kd, "@0").seq == 0
    assert at(kd, "start") == boundaries.RunMoment(1, "start")
    assert at(kd, "now") == at(kd, "head") == boundaries.RunMoment(head, "now")


def test_a_step_is_meant_in_the_current_timeline_unless_a_generation_is_named(kd: killick.Client) -> None:
    rewound = next(r.seq for r in kd.events("r") if isinstance(r.event, e.RunRewound))
    assert at(kd, "4:before").seq > rewound > at(kd, "4~0:after").seq > at(kd, "4~0:before").seq
    assert at(kd, "4~1:before") == boundaries.RunMoment(at(kd, "4:before").seq, "4~1:before")
    assert kd.state("r", at(kd, "4~0:after").seq).retries[0].errors
    assert not kd.state("r", at(kd, "4:after").seq).retries
    with pytest.raises(BoundaryUnknown, match="there is no step 5; it has step 1 to 4"):
        at(kd, "5~0")


def test_a_step_that_was_open_when_its_timeline_was_left_ends_there(log: Log) -> None:
    first = started()
    run = log.create(first.event, first.values or {})
    run.append(Entry(e.StepIntended(at=1, step="1", sort="tool", name="pay")))
    run.append(Entry(e.RunRewound(at=2, cut=1, generation=1)))
    run.append(Entry(e.NoteMade(at=3)))
    assert boundaries.at(log, "run_1", "1~0:after") == boundaries.RunMoment(2, "1~0:after (step 1 has not ended: @2)")


def test_a_fork_has_the_steps_before_its_cut_and_starts_with_its_own_first_event(kd: killick.Client) -> None:
    cut = at(kd, "2:after").seq
    fork_of(kd.runtime.log, e.RunForked(at=1, run="f", parent="r", cut=cut, generation=2))
    assert boundaries.at(kd.runtime.log, "f", "2") == at(kd, "2")
    assert boundaries.at(kd.runtime.log, "f", "start").seq == cut + 1
    assert boundaries.at(kd.runtime.log, "f", "2~0:before").seq == at(kd, "2:before").seq
    with pytest.raises(BoundaryUnknown, match="f: there is no step 3; it has step 1 to 2"):
        boundaries.at(kd.runtime.log, "f", "3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("9", "there is no step 9; it has step 1 to 5"),
        ("3.3.1:before", "there is no step 3.3.1; in step 3 there are 3.1.1, 3.2.1"),
        ("2.1", "there is no step 2.1; it has step 1 to 5"),
        ("4~7", "there is no generation 7; it has 0, 1"),
        ("@9999", "there is no event @9999; it has @1 to @"),
        ("@x", "there is no event @x"),
        ("6:during", "'6:during' is not a position; write 6:before, 6:after, @17, start or now"),
        ("", "'' is not a position"),
    ],
)
def test_a_text_that_names_no_place_is_told_what_there_is(kd: killick.Client, text: str, told: str) -> None:
    with pytest.raises(BoundaryUnknown) as error:
        at(kd, text)
    assert str(error.value).startswith(f"r: {told}")
    assert "\n" not in str(error.value)


def test_a_run_without_steps_says_so(log: Log) -> None:
    first = started()
    log.create(first.event, first.values or {})
    with pytest.raises(BoundaryUnknown, match="it has none yet"):
        boundaries.at(log, "run_1", "1")


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", range(6))
def test_the_state_at_every_boundary_is_the_fold_of_its_timeline(log: Log, seed: int) -> None:
    first = started()
    run = log.create(first.event, first.values or {})
    for batch in Story(seed).entries(120):
        run.append(*batch)
    events = [(recorded.seq, recorded.event) for recorded in log.read("run_1")]
    for step in log.state("run_1").fold.steps:
        for text in (f"{step.id}:before", f"{step.id}:after"):
            place = boundaries.at(log, "run_1", text)
            anew = fold_timeline(timeline([(seq, event) for seq, event in events if seq <= place.seq]))
            assert log.state("run_1", place.seq).fold.save([]) == anew.save([])
