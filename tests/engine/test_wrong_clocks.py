"""R39: a clock that is wrong for a while ends no wait, and what it put off is computed again once it is right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import killick
from killick.clock import DOUBT_SECONDS, ClockWatch, LeapingClock, ManualClock, doubt_seconds
from killick.errors import AlreadyAnswered
from killick.log import verify
from killick.model import events as e
from killick.model import system_events
from killick.store import MemoryStore
from killick.triggers import TRIGGERS
from killick.workers import set_back
from killick.workers import trigger_runner as firing

HOUR = 3_600
DECADE_US = 10 * 365 * 86_400 * 1_000_000


@killick.agent
async def wrong_asks(run: killick.Run, timeout: str) -> bool:
    return (await run.ask("refund?", timeout=timeout, default="no")).expired


@killick.agent
async def wrong_escalates(run: killick.Run) -> bool:
    return (await run.ask("refund?", to="ada", timeout="72h", escalate=[("bo", "72h")], default="no")).expired


@killick.agent
async def wrong_sleeps(run: killick.Run) -> str:
    await run.sleep("72h")
    return "slept"


@killick.agent
async def wrong_waits(run: killick.Run) -> str:
    return str(await run.wait("paid", timeout="72h", default="never"))


@killick.agent
async def wrong_ticks(run: killick.Run) -> None:
    pass


FAILS: list[int] = []


@killick.tool(effect="reads", retry=killick.Retry(attempts=3, first="10m", max="10m"))
async def wrong_fetch() -> str:
    FAILS.append(1)
    if len(FAILS) < 2:
        raise killick.NotDone("down")
    return "up"


@killick.agent
async def wrong_fetches(run: killick.Run) -> str:
    return str(await run.call(wrong_fetch))


class Place:
    """A store, a clock, and the processes there: each watches the clock from its own beginning."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.store = MemoryStore(clock=self.clock)
        self.kd = killick.Client(self.store, clock=self.clock, behind=False)

    def advance(self, run: str) -> str:
        return self.kd.advance(run).status

    def jump(self, us: int) -> None:
        self.clock.set_wall(self.clock.now_us() + us)

    def new_process(self) -> None:
        """Another process, whose watch of the clock begins now."""
        self.clock.watch = ClockWatch()
        self.clock.watch.look(self.clock)
        self.kd = killick.Client(self.store, clock=self.clock, behind=False)

    def claimed(self) -> list[str]:
        """What a worker finds due, as soon as it has looked for times that a wrong clock wrote."""
        set_back.wake(self.kd.runtime.engine, killick.definitions.agents.AGENTS.names())
        rows = self.store.due(self.clock.now_us(), limit=10)
        return [row.run for row in rows]


@pytest.fixture
def place() -> Iterator[Place]:
    TRIGGERS.clear()
    made = Place(ManualClock())
    yield made
    made.kd.close()
    TRIGGERS.clear()


def waiting(place: Place, agent: Any, *given: Any) -> None:
    place.kd.start(agent, *given, id="r")
    assert place.advance("r") == "waiting"


@pytest.mark.parametrize("agent", [wrong_asks, wrong_sleeps, wrong_waits, wrong_escalates])
def test_a_clock_that_is_ahead_for_a_moment_ends_no_wait(place: Place, agent: Any) -> None:
    waiting(place, agent, *(["72h"] if agent is wrong_asks else []))
    [before] = place.kd.info("r").waits
    place.jump(DECADE_US)
    assert place.advance("r") == "waiting"
    place.clock.advance(DOUBT_SECONDS / 2)
    assert place.advance("r") == "waiting"
    place.jump(-DECADE_US)
    assert place.advance("r") == "waiting"
    assert [wait.id for wait in place.kd.info("r").waits] == [before.id]
    place.clock.advance(72 * HOUR)
    assert place.advance("r") == ("waiting" if agent is wrong_escalates else "completed")


def test_a_clock_that_stays_ahead_for_a_minute_is_believed(place: Place) -> None:
    waiting(place, wrong_asks, "72h")
    place.jump(DECADE_US)
    place.clock.advance(DOUBT_SECONDS)
    assert place.advance("r") == "completed"


def test_a_process_that_watched_the_clock_ends_a_wait_at_its_deadline(place: Place) -> None:
    waiting(place, wrong_asks, "5s")
    place.clock.advance(5)
    assert place.advance("r") == "completed"


def test_a_new_process_doubts_a_deadline_before_its_beginning_for_a_minute(place: Place) -> None:
    waiting(place, wrong_asks, "72h")
    place.clock.advance(73 * HOUR)
    place.new_process()
    place.clock.advance(DOUBT_SECONDS - 1)
    assert place.advance("r") == "waiting"
    place.clock.advance(1)
    assert place.advance("r") == "completed"


def test_a_deadline_is_doubted_no_longer_than_its_wait_lasts(place: Place) -> None:
    waiting(place, wrong_asks, "5s")
    place.clock.advance(6)
    place.new_process()
    assert place.advance("r") == "waiting"
    place.clock.advance(5)
    assert place.advance("r") == "completed"


def test_a_caller_that_sits_timers_out_sits_the_doubt_out() -> None:
    place = Place(LeapingClock())
    waiting(place, wrong_asks, "72h")
    place.clock.advance(73 * HOUR)
    place.new_process()
    before = place.clock.monotonic()
    assert place.kd.run(wrong_asks, "72h", id="r") is True
    assert place.clock.monotonic() - before >= DOUBT_SECONDS
    place.kd.close()


def test_the_clock_of_the_server_can_say_that_a_deadline_is_not_past(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(place, wrong_asks, "72h")
    right = place.clock.now_us()
    place.jump(DECADE_US)
    place.clock.advance(DOUBT_SECONDS)
    monkeypatch.setattr(place.store, "proves_life", False)  # as on a server
    monkeypatch.setattr(place.store, "now_us", lambda: right)
    assert place.advance("r") == "waiting"
    monkeypatch.undo()
    assert place.advance("r") == "completed"


def test_a_run_in_doubt_takes_no_slot_of_its_worker_and_ends_once_it_is_certain(place: Place) -> None:
    waiting(place, wrong_asks, "72h")
    place.clock.advance(73 * HOUR)
    place.new_process()

    async def story() -> None:
        kd = place.kd.as_async()
        async with kd.worker(concurrency=1):
            while place.store.head("r").holder is None:  # type: ignore[union-attr]
                await asyncio.sleep(0.001)
            for number in range(3):
                await (await kd.start(wrong_ticks, id=f"tick{number}")).result()
            assert (await kd.info("r")).status == "waiting"
            place.clock.advance(DOUBT_SECONDS)
            while (await kd.info("r")).status != "completed":
                await asyncio.sleep(0.01)
            taken = [each for each in await kd.events("r") if isinstance(each.event, e.RunTaken)]
            assert len(taken) < 6

    asyncio.run(asyncio.wait_for(story(), 60))


# what a wrong clock wrote ---------------------------------------------------------------------------


def test_a_run_that_was_started_while_the_clock_was_ahead_is_due_once_it_is_right(place: Place) -> None:
    place.jump(DECADE_US)
    place.kd.start(wrong_ticks, id="r")
    place.jump(-DECADE_US)
    assert place.store.due(place.clock.now_us(), limit=10) == []
    assert place.claimed() == ["r"]
    assert place.advance("r") == "completed"


@pytest.mark.parametrize("agent", [wrong_asks, wrong_sleeps, wrong_waits])
def test_a_wait_that_began_while_the_clock_was_ahead_lasts_as_long_once_it_is_right(place: Place, agent: Any) -> None:
    place.jump(DECADE_US)
    waiting(place, agent, *(["72h"] if agent is wrong_asks else []))
    place.jump(-DECADE_US)
    assert place.claimed() == ["r"]
    assert place.advance("r") == "waiting"
    assert place.claimed() == []
    place.clock.advance(72 * HOUR)
    assert place.claimed() == ["r"]
    assert place.advance("r") == "completed"


@pytest.mark.parametrize("act", ["note", "prioritize", "fork"])
def test_what_is_recorded_by_a_right_clock_hides_no_time_that_a_wrong_one_wrote(place: Place, act: str) -> None:
    place.jump(DECADE_US)
    waiting(place, wrong_sleeps)
    place.jump(-DECADE_US)
    if act == "note":
        place.kd.edit.note("r", "looked at")
    elif act == "prioritize":
        place.kd.edit.prioritize("r", 1)
    else:
        place.kd.fork("r", "start", id="f")
    assert "r" in place.claimed()
    assert place.advance("r") == "waiting"
    place.clock.advance(72 * HOUR)
    assert place.advance("r") == "completed"


def test_advance_due_computes_times_again_without_a_worker(place: Place) -> None:
    place.jump(DECADE_US)
    waiting(place, wrong_sleeps)
    place.jump(-DECADE_US)
    assert [outcome.run for outcome in place.kd.advance_due()] == ["r"]
    place.clock.advance(72 * HOUR)
    place.kd.advance_due()
    assert place.kd.info("r").status == "completed"


@pytest.mark.parametrize("is_answer", [False, True])
def test_a_message_of_a_sender_whose_clock_is_ahead_makes_its_run_due_at_once(place: Place, is_answer: bool) -> None:
    waiting(place, wrong_asks if is_answer else wrong_waits, *(["72h"] if is_answer else []))
    place.jump(DECADE_US)
    if is_answer:
        place.kd.answer("r", "approve", by="ada")
    else:
        place.kd.send("r", "paid", 9)
    place.jump(-DECADE_US)
    assert [row.run for row in place.store.due(place.clock.now_us(), limit=10)] == ["r"]
    assert place.advance("r") == "completed"


def test_a_question_that_began_anew_is_answered(place: Place) -> None:
    place.jump(DECADE_US)
    waiting(place, wrong_asks, "72h")
    place.jump(-DECADE_US)
    place.claimed()
    place.advance("r")
    place.kd.answer("r", "approve", by="ada")
    assert place.advance("r") == "completed"


def test_a_sleep_until_a_date_ends_on_that_date_whatever_the_clock_was_when_it_began(place: Place) -> None:
    date_us = place.clock.now_us() + 2 * DECADE_US

    @killick.agent(name="wrong_dates")
    async def dates(run: killick.Run) -> None:
        await run.sleep_until(datetime.fromtimestamp(date_us / 1_000_000, UTC))

    place.jump(DECADE_US)
    waiting(place, dates)
    place.jump(-DECADE_US)
    assert place.claimed() == ["r"]
    place.advance("r")
    assert place.claimed() == []
    assert place.store.index("r").wake_at_us == pytest.approx(date_us, abs=1_000_000)  # type: ignore[union-attr]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_backoff_that_began_while_the_clock_was_ahead_is_over_in_its_time(place: Place, is_new: bool) -> None:
    FAILS.clear()
    place.jump(DECADE_US)
    waiting(place, wrong_fetches)
    place.jump(-DECADE_US)
    if is_new:
        place.new_process()
    assert place.claimed() == ["r"]
    assert place.advance("r") == "waiting"
    assert place.claimed() == []
    place.clock.advance(600)
    assert place.claimed() == ["r"]
    assert place.advance("r") == "completed"


# triggers -------------------------------------------------------------------------------------------


def fired(place: Place) -> int:
    """Attends the trigger as a worker does, and counts its firings so far."""

    class Control:
        stopping = False

        async def rest(self, seconds: float) -> None:
            self.stopping = True

    engine = place.kd.runtime.engine
    place.claimed()
    for each in place.store.claim(
        engine.holder, now_us=place.clock.now_us(), seconds=60, limit=10, agents=firing.ensure(engine)
    ):
        log = engine.log.open(each.head.run, head=each.head)
        place.kd.runtime.blocking(firing.attend(engine, log, Control()))  # type: ignore[arg-type]
        place.store.release(each.head.run, epoch=each.head.epoch, holder=engine.holder)
    events = [each.event for each in place.kd.events("trigger:wrong_ticks", limit=1_000)]
    return sum(isinstance(event, system_events.TriggerFired) for event in events)


@pytest.mark.parametrize("declare", ["every", "cron"])
@pytest.mark.parametrize("ahead_us", [DECADE_US, HOUR * 1_000_000 * 3])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_schedule_goes_on_once_a_clock_that_was_ahead_is_right(
    place: Place, declare: str, ahead_us: int, is_new: bool
) -> None:
    if declare == "every":
        killick.triggers.every("10m", wrong_ticks, overlap="allow")
    else:
        killick.triggers.cron("*/10 * * * *", wrong_ticks, overlap="allow")
    fired(place)
    place.clock.advance(600)
    assert fired(place) == 1
    place.jump(ahead_us)
    assert fired(place) == 1, "nothing is made up for on the word of a clock that jumped"
    place.clock.advance(DOUBT_SECONDS)
    assert fired(place) == 2, "it stayed ahead"
    place.jump(-ahead_us)
    if is_new:
        place.new_process()
    assert fired(place) == 2
    for count in (3, 4, 5):
        place.clock.advance(600)
        assert fired(place) == count


def test_a_time_that_fired_while_the_clock_was_ahead_does_not_fire_again(place: Place) -> None:
    killick.triggers.cron("*/10 * * * *", wrong_ticks, overlap="allow", missed="all")
    fired(place)
    place.jump(HOUR * 1_000_000)
    place.clock.advance(DOUBT_SECONDS)
    before = fired(place)
    assert before > 3
    place.jump(-HOUR * 1_000_000)
    for _ in range(before + 2):
        place.clock.advance(600)
        fired(place)
    runs = [row.id for row in place.kd.list(agent="wrong_ticks", limit=100)]
    assert len(runs) == len(set(runs))
    assert len(runs) == fired(place)


def test_a_condition_that_was_declared_while_the_clock_was_ahead_is_looked_at(place: Place) -> None:
    looked: list[int] = []
    killick.triggers.when(lambda: looked.append(1), wrong_ticks, every="30s")
    place.jump(DECADE_US)
    firing.ensure(place.kd.runtime.engine)
    place.jump(-DECADE_US)
    fired(place)
    assert looked


# the watch ------------------------------------------------------------------------------------------


def test_a_clock_is_watched_by_what_it_and_monotonic_time_say() -> None:
    clock = ManualClock()
    begun = clock.now_us()
    assert doubt_seconds(clock, begun - 1) == DOUBT_SECONDS
    assert doubt_seconds(clock, begun - 1, 5) == 5
    assert doubt_seconds(clock, begun) == 0
    clock.advance(59)
    assert doubt_seconds(clock, begun - 1) == 1
    clock.advance(1)
    assert doubt_seconds(clock, begun - 1) == 0
    for _ in range(100):
        clock.set_wall(clock.now_us() + 500)  # it is kept exact
        clock.advance(1)
    assert doubt_seconds(clock, begun - 1) == 0
    clock.set_wall(clock.now_us() - 5_000_000)
    assert (doubt_seconds(clock, begun), clock.watch.set_backs) == (DOUBT_SECONDS, 1)


@killick.agent
async def wrong_pays(run: killick.Run) -> str:
    return (await run.ask("pay?", need=2, timeout="72h")).kind


def test_a_question_that_begins_anew_keeps_its_votes_and_needs_no_more(place: Place) -> None:
    place.jump(DECADE_US)
    waiting(place, wrong_pays)
    place.kd.answer("r", "approve", by="ann")
    assert place.advance("r") == "waiting"
    place.jump(-DECADE_US)
    assert place.advance("r") == "waiting"
    assert verify(place.kd.runtime.log).problems == []
    [wait] = place.kd.inbox()
    place.kd.answer(wait, "approve", by="bo")
    with pytest.raises(AlreadyAnswered):
        place.kd.answer(wait, "reject", by="cy")
    assert place.advance("r") == "completed"
