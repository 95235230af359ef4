"""A cut inside parallel work is logical: branches beside it keep what they had ended, and nothing else stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from stories import started

import killick
from killick.engine.effects.branch_point import cut
from killick.log import Entry, Log
from killick.model import events as e
from killick.store import MemoryStore
from simulation.travelling import differences, plainly

RUN = "run_1"


# logs told by hand --------------------------------------------------------------------------------


def event(line: str) -> e.Event:
    """An event as these tests write it: `1.2.1 pay`, `1.2.1 tried`, `1.2.1 returned` …"""
    step, what = line.split()
    key = f"{RUN}:step_{step}:pay:f3a9b12c"
    match what:
        case "gather" | "transition":
            return e.StepIntended(at=1, step=step, sort="scope", name=what)
        case "pay":
            return e.StepIntended(at=1, step=step, sort="tool", name="pay", effect="at_most_once")
        case "tried":
            return e.AttemptStarted(at=1, step=step, attempt=1, key=key, epoch=0)
        case "tried-again":
            return e.AttemptStarted(at=1, step=step, attempt=2, key=key, epoch=0)
        case "refused":
            return e.AttemptEnded(at=1, step=step, attempt=1, outcome="refused", retry_at=2)
        case "returned":
            return e.AttemptEnded(at=1, step=step, attempt=1, outcome="returned")
        case "returned-again":
            return e.AttemptEnded(at=1, step=step, attempt=2, outcome="returned")
        case "decided":
            return e.DecisionMade(at=1, step=step)
        case "over":
            return e.StepEnded(at=1, step=step)
        case "waits":
            return e.StepIntended(at=1, step=step, sort="wait", name="news")
        case "opened":
            return e.WaitOpened(at=1, step=step, waits_for="event", name="news")
        case "heard":
            return e.WaitClosed(at=1, step=step, how="answered")
        case _:
            raise AssertionError(line)


class Told:
    """A run as it was told, line by line, and what stands of it."""

    def __init__(self, log: Log, lines: Sequence[str]) -> None:
        self.log = log
        first = started()
        self.run = log.create(first.event, first.values or {})
        self.lines = {1: "start"}
        self.tell(*lines)

    def tell(self, *lines: str) -> None:
        for line in lines:
            self.run.append(Entry(event(line)))
            self.lines[self.run.seq] = line

    def rewind(self, place: str) -> list[str]:
        """What stands after a rewind to a place; the state that is opened there is the fold of just that."""
        found = cut(self.log, RUN, place)
        generation = self.run.ledger.facts.generation + 1
        self.run.append(Entry(e.RunRewound(at=1, cut=found.seq, keep=found.keep, generation=generation)))
        self.lines[self.run.seq] = f"rewound to {place}"
        told = self.standing()
        assert not list(differences(self.log.state(RUN).fold, self.run.fold))
        return told

    def standing(self) -> list[str]:
        line = plainly(self.log.store, RUN).lines[self.run.seq]
        return [self.lines[seq] for seq, _ in line if not self.lines[seq].startswith("rewound")]


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log(MemoryStore(), snapshot_every=3)
    yield made
    made.close()


def rewound(log: Log, lines: Sequence[str], place: str) -> list[str]:
    return Told(log, lines).rewind(place)


# branches beside it -------------------------------------------------------------------------------

ONE = ("1.1.1 pay", "1.1.1 tried", "1.1.1 returned")
TWO = ("1.2.1 pay", "1.2.1 tried", "1.2.1 returned")
MIXED = [
    [ONE[chosen.index(at)] if at in chosen else TWO[sum(other not in chosen for other in range(at))] for at in range(6)]
    for chosen in combinations(range(6), 3)
]
"""Two branches of one step each, in every order that they can have."""


@pytest.mark.parametrize("lines", MIXED, ids=range(len(MIXED)))
@pytest.mark.parametrize("own", ["1.1.1", "1.2.1"])
def test_a_branch_beside_the_cut_keeps_what_it_had_ended_whatever_the_order_was(
    log: Log, lines: list[str], own: str
) -> None:
    told = Told(log, ["1 gather", *lines, "1 over"])
    beside = [line for line in lines if not line.startswith(own)]
    assert told.rewind(f"{own}:before") == ["start", "1 gather", *beside]


@pytest.mark.parametrize("lines", MIXED, ids=range(len(MIXED)))
@pytest.mark.parametrize("own", ["1.1.1", "1.2.1"])
def test_after_a_step_both_branches_stand_and_what_came_after_the_gather_does_not(
    log: Log, lines: list[str], own: str
) -> None:
    told = Told(log, ["1 gather", *lines, "1 over", "2 decided"])
    assert sorted(told.rewind(f"{own}:after")) == sorted(["start", "1 gather", *lines])


@pytest.mark.parametrize("lines", MIXED, ids=range(len(MIXED)))
@pytest.mark.parametrize("seq", range(2, 9))
def test_an_attempt_that_was_open_takes_its_outcome_from_the_later_log(log: Log, lines: list[str], seq: int) -> None:
    told = Told(log, ["1 gather", *lines, "1 over"])
    before = [told.lines[at] for at in range(1, seq + 1)]
    taken = [f"{step} returned" for step in ("1.1.1", "1.2.1") if f"{step} tried" in before]
    expected = [*before, *(line for line in lines if line in taken and line not in before)]
    assert told.rewind(f"@{seq}") == expected


def test_what_a_branch_had_begun_and_never_ended_does_not_stay(log: Log) -> None:
    lines = ["1 gather", "1.1.1 pay", "1.1.1 tried", "1.1.1 returned", "1.2.1 pay", "1.2.1 tried"]
    assert rewound(log, lines, "1.1.1:before") == ["start", "1 gather"]


def test_a_step_that_was_open_at_the_cut_and_has_no_outcome_yet_stays_open(log: Log) -> None:
    lines = ["1 gather", "1.2.1 pay", "1.2.1 tried", "1.1.1 pay", "1.1.1 tried", "1.1.1 returned"]
    told = Told(log, lines)
    assert told.rewind("1.1.1:before") == ["start", "1 gather", "1.2.1 pay", "1.2.1 tried"]
    step = log.state(RUN).fold.step("1.2.1")
    assert step is not None
    assert step.status == "running"


def test_between_two_tries_a_step_takes_the_outcome_of_the_later_one(log: Log) -> None:
    lines = ["1 pay", "1 tried", "1 refused", "1 tried-again", "1 returned-again", "2 decided"]
    for seq in (3, 4, 5):
        told = Told(Log(MemoryStore()), lines)
        assert told.rewind(f"@{seq}") == ["start", *lines[:5]]


def test_a_cut_before_or_after_the_gather_keeps_nothing_of_it_or_all(log: Log) -> None:
    lines = [
        "1 decided",
        "2 gather",
        "2.1.1 pay",
        "2.1.1 tried",
        "2.2.1 decided",
        "2.1.1 returned",
        "2 over",
        "3 decided",
    ]
    for place, left in (("2:before", 1), ("1:after", 1), ("2:after", 7), ("3:before", 7), ("start", 0)):
        told = Told(Log(MemoryStore()), lines)
        assert told.rewind(place) == ["start", *lines[:left]]


def test_the_line_of_the_cut_itself_ends_there_and_a_third_branch_stays_too(log: Log) -> None:
    lines = [
        "1 gather",
        "1.1.1 decided",
        "1.2.1 decided",
        "1.1.2 decided",
        "1.3.1 decided",
        "1.1.3 decided",
        "1.3.2 decided",
    ]
    assert rewound(log, lines, "1.1.2:before") == [
        "start", "1 gather", "1.1.1 decided", "1.2.1 decided", "1.3.1 decided", "1.3.2 decided",
    ]  # fmt: skip


# gathers in gathers -------------------------------------------------------------------------------

NESTED = [
    "1 gather",
    "1.1.1 gather",
    "1.1.1.1.1 decided",
    "1.2.1 decided",
    "1.1.1.2.1 decided",
    "1.1.1.1.2 decided",
    "1.1.1 over",
    "1.1.2 decided",
    "1.2.2 decided",
    "1 over",
    "2 decided",
]


@pytest.mark.parametrize(
    ("place", "gone"),
    [
        ("1.1.1.1.1:before", {"1.1.1.1.1 decided", "1.1.1.1.2 decided", "1.1.1 over", "1.1.2 decided"}),
        ("1.1.1.1.2:before", {"1.1.1.1.2 decided", "1.1.1 over", "1.1.2 decided"}),
        ("1.1.1.2.1:before", {"1.1.1.2.1 decided", "1.1.1 over", "1.1.2 decided"}),
        ("1.1.1:before", {line for line in NESTED if line.startswith(("1.1.1", "1.1.2"))}),
        ("1.1.2:before", {"1.1.2 decided"}),
        ("1.2.1:before", {"1.2.1 decided", "1.2.2 decided"}),
        ("1.2.2:before", {"1.2.2 decided"}),
    ],
)  # fmt: skip
def test_branches_beside_it_at_any_depth_stay_and_what_the_line_did_after_its_inner_gather_goes(
    log: Log, place: str, gone: set[str]
) -> None:
    left = ["start", *(line for line in NESTED if line not in {*gone, "1 over", "2 decided"})]
    assert sorted(rewound(log, NESTED, place)) == sorted(left)


def test_a_scope_beside_it_that_had_not_ended_stays_open_with_what_had_ended_in_it(log: Log) -> None:
    lines = [
        "1 gather", "1.1.1 decided", "1.2.1 gather", "1.2.1.1.1 decided", "1.2.1.2.1 pay", "1.2.1.2.1 tried",
    ]  # fmt: skip
    told = Told(log, lines)
    assert told.rewind("1.1.1:before") == ["start", "1 gather", "1.2.1 gather", "1.2.1.1.1 decided"]
    assert list(log.state(RUN).fold.facts.pending) == ["1", "1.2.1"]


def test_in_a_transition_of_a_machine_steps_come_one_after_the_other_and_branches_below_a_gather(log: Log) -> None:
    lines = [
        "1 transition",
        "1.1 decided",
        "1.2 gather",
        "1.2.1.1 decided",
        "1.2.2.1 decided",
        "1.2 over",
        "1.3 decided",
    ]
    assert rewound(log, lines, "1.2.2.1:before") == ["start", *lines[:4]]
    for place, left in (("1.1:before", 1), ("1.2:before", 2), ("1.3:before", 6)):
        assert Told(Log(MemoryStore()), lines).rewind(place) == ["start", *lines[:left]]


# cuts in what was cut before ----------------------------------------------------------------------


def test_a_cut_inside_what_an_earlier_rewind_had_kept_leaves_what_stood_before_it(log: Log) -> None:
    lines = ["1 gather", "1.1.1 decided", "1.2.1 decided", "1.2.2 decided", "1.3.1 decided"]
    told = Told(log, lines)
    assert told.rewind("1.1.1:before") == ["start", "1 gather", "1.2.1 decided", "1.2.2 decided", "1.3.1 decided"]
    told.tell("1.1.1 decided", "1 over")
    assert sorted(told.rewind("1.2.2:before")) == sorted(
        ["start", "1 gather", "1.2.1 decided", "1.3.1 decided", "1.1.1 decided"]
    )
    told.tell("1.2.2 decided", "1 over", "2 decided")
    assert sorted(told.rewind("1.2.1:before")) == sorted(["start", "1 gather", "1.3.1 decided", "1.1.1 decided"])


def test_after_many_rewinds_every_place_of_the_timeline_can_still_be_cut(log: Log) -> None:
    lines = ["1 gather", "1.1.1 decided", "1.2.1 decided", "1.1.2 decided", "1.2.2 decided", "1 over", "2 decided"]
    for one in ("1.1.1:before", "1.1.2:before", "1.2.1:before", "1.2.2:before"):
        for other in ("1.1.1:before", "1.1.1:after", "1.2.2:before", "2:before"):
            told = Told(Log(MemoryStore(), snapshot_every=3), lines)
            told.rewind(one)
            branch = one[:3]
            told.tell(*(line for line in lines[1:] if line not in told.standing()))
            assert sorted(told.standing()) == sorted(["start", *lines]), branch
            own, side = other.split(":")
            left = [line for line in told.standing() if _stands(line, own, side)]
            assert sorted(told.rewind(other)) == sorted(left)


def _stands(line: str, own: str, side: str) -> bool:
    """Whether a line of those four decisions in two branches stays when the timeline goes back to a place."""
    if line in ("start", "1 gather") or own == "2":
        return line != "2 decided"
    step = line.split()[0]
    if step.count(".") < 2:
        return False
    return step[:3] != own[:3] or step < own or (step == own and side == "after")


def test_a_cut_in_a_generation_that_was_left_brings_back_what_stood_there(log: Log) -> None:
    lines = ["1 decided", "2 gather", "2.1.1 decided", "2.2.1 decided", "2 over", "3 decided"]
    told = Told(log, lines)
    assert told.rewind("2:before") == ["start", "1 decided"]
    told.tell("2 pay", "2 tried", "2 returned")
    assert told.rewind("2.1.1~0:before") == ["start", "1 decided", "2 gather", "2.2.1 decided"]
    told.tell("2.1.1 decided")
    assert told.rewind("2~1:after") == ["start", "1 decided", "2 pay", "2 tried", "2 returned"]
    assert told.rewind("3~0:before") == ["start", "1 decided", "2 gather", "2.1.1 decided", "2.2.1 decided", "2 over"]


# what people and others had said ------------------------------------------------------------------


@killick.agent
async def cut_hears(run: killick.Run) -> list[str]:
    return list(await run.gather(run.wait("left"), run.wait("right")))


@killick.agent
async def cut_asks(run: killick.Run) -> list[str]:
    first = await run.ask("First?")
    both = await run.gather(run.ask("Left?"), run.ask("Right?"))
    return [first.value, *(answer.value for answer in both)]


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    clock = killick.clock.LeapingClock()
    with killick.Client(MemoryStore(clock=clock), clock=clock) as client:
        yield client


def advanced(kd: killick.Client) -> str:
    return kd.advance("r").status


def test_a_message_taken_after_the_cut_returns_and_one_that_a_kept_branch_took_does_not(kd: killick.Client) -> None:
    kd.start(cut_hears, id="r")
    advanced(kd)
    for name in ("left", "right"):
        kd.send("r", name, f"{name} news", id=name)
    assert advanced(kd) == "completed"
    kd.rewind("r", "1.1.1:before")
    assert [message.id for message in kd.runtime.store.inbox("r")] == ["left"]
    assert advanced(kd) == "completed"
    assert kd.state("r").result == ["left news", "right news"]
    kd.rewind("r", "1:before")
    assert [message.id for message in kd.runtime.store.inbox("r")] == ["left", "right"]
    assert advanced(kd) == "completed"
    assert not kd.runtime.store.inbox("r")


def answer(kd: killick.Client, *values: str) -> None:
    """Answer what is open now, in the order of the steps."""
    for wait, value in zip(sorted(kd.info("r").waits, key=lambda wait: wait.step), values, strict=True):
        kd.answer(wait.id, "respond", value=value, by="ann")
    advanced(kd)


def test_answers_do_not_carry_over_but_those_of_kept_branches_and_of_what_is_before_stand(kd: killick.Client) -> None:
    kd.start(cut_asks, id="r")
    advanced(kd)
    answer(kd, "a")
    answer(kd, "b", "c")
    assert kd.state("r").result == ["a", "b", "c"]
    kd.rewind("r", "2.2.1:before")
    assert advanced(kd) == "waiting"
    answer(kd, "c again")
    assert kd.state("r").result == ["a", "b", "c again"]
    kd.rewind("r", "1:before")
    assert advanced(kd) == "waiting"
    answer(kd, "a again")
    answer(kd, "b again", "c once more")
    assert kd.state("r").result == ["a again", "b again", "c once more"]


@pytest.mark.parametrize("step", ["1", "2.1.1", "2.2.1"])
def test_a_question_that_was_open_at_the_cut_can_be_answered_again(kd: killick.Client, step: str) -> None:
    kd.start(cut_asks, id="r")
    advanced(kd)
    answer(kd, "a")
    answer(kd, "b", "c")
    opened = next(r.seq for r in kd.events("r") if isinstance(r.event, e.WaitOpened) and r.event.step == step)
    kd.rewind("r", f"@{opened}")
    for _ in range(3):
        if advanced(kd) == "completed":
            break
        answer(kd, *("again" for _ in kd.info("r").waits))
    assert kd.info("r").status == "completed"
    assert "again" in kd.state("r").result
