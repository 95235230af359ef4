"""Triggers: what they start, what they pass, and that nobody's death loses or doubles a firing."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import killick
from families import fork_of
from killick.definitions.agents import AGENTS
from killick.definitions.schedules import Cron, in_us, moment, stamp
from killick.errors import (
    AnswerRefused,
    DeclarationRefused,
    EpochStale,
    HandleClosed,
    HeadMoved,
    RunUnknown,
    StoreUnavailable,
)
from killick.model import events as e
from killick.model import system_events
from killick.store import SqliteStore
from killick.store.records import ENDED
from killick.triggers import TRIGGERS
from killick.workers import trigger_runner as firing
from seeds import repeats

World = Any
HOUR = 3_600.0
NINE = in_us(datetime(2026, 11, 16, 9, tzinfo=UTC))
"""A Monday."""


@killick.agent
async def report(run: killick.Run, day: str) -> str:
    return f"report of {day}"


@killick.agent
async def poll(run: killick.Run) -> str:
    return "polled"


@killick.agent
async def asking(run: killick.Run, what: str | None = None) -> str:
    await run.ask(f"{what}?")
    return "asked"


@killick.agent
async def fulfil(run: killick.Run, order: dict[str, int]) -> int:
    return order["number"]


@pytest.fixture(autouse=True)
def declarations() -> Iterator[None]:
    """Nothing that a test declares is there for the next one."""
    before, agents = TRIGGERS.copy(), dict(AGENTS.declared)
    TRIGGERS.clear()
    yield
    TRIGGERS.clear()
    TRIGGERS.update(before)
    AGENTS.declared.clear()
    AGENTS.declared.update(agents)


@pytest.fixture
def clock() -> killick.clock.LeapingClock:
    return killick.clock.LeapingClock(NINE - 3_600_000_000)


class TaskControl:
    """A worker that stops when its attendant has rested so often; meanwhile time passes, and things happen."""

    def __init__(self, clock: Any = None, rests: int = 0, then: Callable[[int], None] | None = None) -> None:
        self.clock = clock
        self.rests = rests
        self.rested: list[float] = []
        self.then = then

    @property
    def stopping(self) -> bool:
        return len(self.rested) > self.rests

    async def rest(self, seconds: float) -> None:
        self.rested.append(seconds)
        if self.clock is not None:
            self.clock.advance(seconds)
        if self.then is not None:
            await asyncio.to_thread(self.then, len(self.rested))


def attend(kd: killick.Client, duty: TaskControl | Callable[[], TaskControl] | None = None) -> list[str]:
    """What a worker does about triggers: see to their logs, and attend to each that is due. Says which those were."""
    agents = firing.ensure(kd.runtime.engine)
    attended: list[str] = []
    holder = kd.runtime.engine.holder
    for _ in range(20):
        claimed = kd.runtime.store.claim(holder, now_us=kd.runtime.clock.now_us(), seconds=60, limit=10, agents=agents)
        for each in claimed:
            attended.append(each.head.run)
            log = kd.runtime.log.open(each.head.run, head=each.head)
            left = True
            try:
                kd.runtime.blocking(
                    firing.attend(
                        kd.runtime.engine, log, duty if isinstance(duty, TaskControl) else (duty or TaskControl)()
                    )
                )
                left = False
            finally:
                kd.runtime.store.release(each.head.run, epoch=each.head.epoch, holder=holder, left=left)
        if not claimed or duty is not None:
            return attended
    raise AssertionError(f"{attended} stay due")


def runs(kd: killick.Client, agent: str | None = None) -> list[str]:
    return [listed.id for listed in reversed(kd.list(agent=agent))]


def told(kd: killick.Client, name: str) -> list[e.Event]:
    """What a trigger's log says, without how it began."""
    return [recorded.event for recorded in kd.events(f"trigger:{name}")][2:]


def input_of(kd: killick.Client, run: str) -> Any:
    return kd.state(run).input


# schedules ----------------------------------------------------------------------------------------


def test_a_schedule_starts_a_run_when_it_is_due_and_not_before(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 9 * * mon-fri", report, input="monday", priority=3, tags=["daily"])
    assert attend(world.kd) == []
    clock.advance(HOUR - 1)
    assert attend(world.kd) == []
    clock.advance(1)
    assert attend(world.kd) == ["trigger:report"]
    assert runs(world.kd) == ["report@2026-11-16T09:00Z"]
    info = world.kd.info("report@2026-11-16T09:00Z")
    assert (info.agent, info.status, info.priority) == ("report", "queued", 3)
    assert set(info.tags) == {"daily", "trigger:report"}
    assert world.kd.run(report, "monday", id="report@2026-11-16T09:00Z") == "report of monday"
    assert attend(world.kd) == []
    [fired] = told(world.kd, "report")
    assert isinstance(fired, system_events.TriggerFired)
    assert (fired.number, fired.due, fired.next) == (1, NINE, NINE + 86_400_000_000)


def test_a_triggers_own_log_is_found_only_by_who_asks_for_it(world: World) -> None:
    killick.triggers.every("10m", poll)
    firing.ensure(world.kd.runtime.engine)
    assert world.kd.list() == []
    [listed] = world.kd.list(agent="killick.trigger:poll")
    assert (listed.id, listed.status) == ("trigger:poll", "waiting")
    assert world.kd.store.verify().problems == []


def test_an_interval_goes_on_from_when_it_was_declared(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.every("10m", poll, overlap="allow")
    attend(world.kd)
    for _ in range(4):
        clock.advance(400)
        attend(world.kd)
    assert runs(world.kd) == ["poll@2026-11-16T08:10Z", "poll@2026-11-16T08:20Z"]


@pytest.mark.parametrize(
    ("missed", "fired", "passed"),
    [("skip", [], 4), ("once", ["12:00"], 3), ("all", ["09:00", "10:00", "11:00", "12:00"], 0)],
)
def test_what_nobody_was_there_for_is_passed_or_made_up_for(
    world: World, clock: killick.clock.LeapingClock, missed: Any, fired: list[str], passed: int
) -> None:
    killick.triggers.cron("0 * * * *", poll, missed=missed, overlap="allow")
    attend(world.kd)
    clock.advance(4 * HOUR + 600)
    attend(world.kd)
    assert runs(world.kd) == [f"poll@2026-11-16T{time}Z" for time in fired]
    left_out = [event for event in told(world.kd, "poll") if isinstance(event, system_events.TriggerPassed)]
    assert sum(event.count for event in left_out) == passed
    assert {event.because for event in left_out} <= {"missed"}
    assert attend(world.kd) == []
    [info] = world.kd.triggers.list()
    assert info.next_us == NINE + 4 * 3_600_000_000


def test_a_clock_that_goes_back_fires_nothing_twice(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 * * * *", poll, overlap="allow")
    attend(world.kd)
    clock.advance(2 * HOUR)
    attend(world.kd)
    before = runs(world.kd)
    clock.set_wall(clock.now_us() - 3_600_000_000)
    for _ in range(3):
        attend(world.kd)
        clock.advance(1_199)
    assert runs(world.kd) == before
    clock.advance(3)
    attend(world.kd)
    assert runs(world.kd) == before
    clock.advance(HOUR)
    attend(world.kd)
    assert runs(world.kd) == [*before, "poll@2026-11-16T11:00Z"]


def test_a_schedule_in_a_time_zone_keeps_its_local_time_and_tells_it(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    seen: list[killick.triggers.Firing] = []

    def day(firing: killick.triggers.Firing) -> str:
        seen.append(firing)
        return firing.due.date().isoformat()

    killick.triggers.cron("30 2 * * *", report, tz="Europe/Berlin", input=day, overlap="allow")
    clock.set_wall(in_us(datetime(2026, 10, 24, 12, tzinfo=UTC)))
    attend(world.kd)
    for _ in range(20):
        clock.advance(2 * HOUR)
        attend(world.kd)
    assert runs(world.kd) == ["report@2026-10-25T00:30Z", "report@2026-10-26T01:30Z"]
    assert [input_of(world.kd, run) for run in runs(world.kd)] == ["2026-10-25", "2026-10-26"]
    assert [each.due.strftime("%H:%M %z") for each in seen] == ["02:30 +0200", "02:30 +0100"]


# overlap ------------------------------------------------------------------------------------------


def overlapping(world: World, clock: killick.clock.LeapingClock, overlap: Any) -> list[str]:
    """Two firings of an agent whose first run waits for a person."""
    killick.triggers.cron("0 * * * *", asking, overlap=overlap)
    attend(world.kd)
    clock.advance(HOUR)
    attend(world.kd)
    world.kd.advance("asking@2026-11-16T09:00Z")
    clock.advance(HOUR)
    attend(world.kd, TaskControl())
    return runs(world.kd)


FIRST, SECOND, THIRD = (f"asking@2026-11-16T{hour}:00Z" for hour in ("09", "10", "11"))


def test_a_firing_is_passed_while_the_run_before_has_not_ended(world: World, clock: killick.clock.LeapingClock) -> None:
    assert overlapping(world, clock, "skip") == [FIRST]
    passed = told(world.kd, "asking")[-1]
    assert isinstance(passed, system_events.TriggerPassed)
    assert passed.because == "overlap"
    world.kd.answer(FIRST, "approve")
    world.kd.advance(FIRST)
    clock.advance(HOUR)
    attend(world.kd)
    assert runs(world.kd) == [FIRST, THIRD]


def test_a_firing_can_be_allowed_beside_the_run_before(world: World, clock: killick.clock.LeapingClock) -> None:
    assert overlapping(world, clock, "allow") == [FIRST, SECOND]


def test_a_firing_can_cancel_the_run_before(world: World, clock: killick.clock.LeapingClock) -> None:
    assert overlapping(world, clock, "cancel") == [FIRST, SECOND]
    assert world.kd.advance(FIRST).status == "cancelled"
    assert world.kd.info(SECOND).status == "queued"


def test_a_paused_run_is_cancelled_all_the_same(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 * * * *", asking, overlap="cancel")
    attend(world.kd)
    clock.advance(HOUR)
    attend(world.kd)
    world.kd.pause(FIRST)
    clock.advance(HOUR)
    attend(world.kd)
    assert world.kd.advance(FIRST).status == "cancelled"


def test_a_firing_that_waits_is_on_record_and_goes_on_when_the_run_before_has_ended(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    assert overlapping(world, clock, "queue") == [FIRST]
    queued = told(world.kd, "asking")[-1]
    assert isinstance(queued, system_events.TriggerQueued)
    assert world.kd.triggers.list()[0].queued == 1
    world.process()
    assert attend(world.kd, TaskControl(clock, rests=3)) == ["trigger:asking"], "it is due for whoever comes"
    assert runs(world.kd) == [FIRST]
    world.kd.answer(FIRST, "approve")
    world.kd.advance(FIRST)
    attend(world.kd)
    assert runs(world.kd) == [FIRST, SECOND]
    assert world.kd.triggers.list()[0].queued == 0
    assert attend(world.kd) == []


def test_who_waits_for_a_run_sees_it_end(world: World, clock: killick.clock.LeapingClock) -> None:
    assert overlapping(world, clock, "queue") == [FIRST]

    def end(rested: int) -> None:
        if rested == 2:
            world.kd.answer(FIRST, "approve")
            world.kd.advance(FIRST)

    duty = TaskControl(clock, rests=9, then=end)
    attend(world.kd, duty)
    assert runs(world.kd) == [FIRST, SECOND]
    assert len(duty.rested) == 2


def test_firings_wait_in_their_order_and_not_without_end(
    world: World, clock: killick.clock.LeapingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(firing, "QUEUED_MAX", 2)
    killick.triggers.cron("0 * * * *", asking, overlap="queue", missed="all")
    attend(world.kd)
    clock.advance(4 * HOUR)
    attend(world.kd, TaskControl())
    assert runs(world.kd) == [FIRST]
    assert [type(event).__name__ for event in told(world.kd, "asking")] == [
        "TriggerFired",
        "TriggerQueued",
        "TriggerQueued",
        "TriggerPassed",
    ]
    for run in (FIRST, SECOND):
        world.kd.cancel(run)
        world.kd.advance(run)
        attend(world.kd, TaskControl())
    assert runs(world.kd) == [FIRST, SECOND, THIRD]


# inputs -------------------------------------------------------------------------------------------


def test_an_input_is_made_from_the_firing_and_the_run_before(world: World, clock: killick.clock.LeapingClock) -> None:
    seen: list[tuple[killick.triggers.Firing, killick.triggers.Previous | None]] = []

    async def make(firing: killick.triggers.Firing, previous: killick.triggers.Previous | None) -> str:
        seen.append((firing, previous))
        return f"{firing.number} after {previous.result if previous else None}"

    killick.triggers.cron("0 9 * * *", report, input=make, overlap="allow")
    attend(world.kd)
    clock.advance(HOUR + 5)
    attend(world.kd)
    first = "report@2026-11-16T09:00Z"
    world.kd.advance(first)
    clock.advance(24 * HOUR)
    attend(world.kd)
    assert input_of(world.kd, "report@2026-11-17T09:00Z") == "2 after report of 1 after None"
    (one, nobody), (two, previous) = seen
    assert nobody is None
    assert (one.trigger, one.number, one.run, in_us(one.due)) == ("report", 1, first, NINE)
    assert in_us(one.at) == NINE + 5_000_000
    assert previous == killick.triggers.Previous(id=first, status="completed", result="report of 1 after None")
    assert two.number == 2


def test_an_input_that_cannot_be_made_is_on_record_and_the_trigger_goes_on(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    def make(firing: killick.triggers.Firing) -> Any:
        if firing.due.hour == 9:
            raise LookupError("the calendar is down")
        return {"no": "text"} if firing.due.hour == 10 else "fine"

    killick.triggers.cron("0 * * * *", report, input=make)
    attend(world.kd)
    for _ in range(3):
        clock.advance(HOUR)
        attend(world.kd)
    assert runs(world.kd) == ["report@2026-11-16T11:00Z"]
    first, second, _ = world.kd.events("trigger:report", after=2)
    assert isinstance(first.event, system_events.TriggerPassed)
    assert first.event.because == "input failed"
    assert world.kd.runtime.log.data("trigger:report", first.seq)["failure"]["message"] == "the calendar is down"
    assert world.kd.runtime.log.data("trigger:report", second.seq)["failure"]["type"].endswith("ValueRefused")


# events -------------------------------------------------------------------------------------------


def test_every_event_starts_one_run_and_the_id_makes_it_count_once(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    assert world.kd.triggers.publish("order.created", {"number": 1}, id="o1", by="shop") == 1
    assert world.kd.triggers.publish("order.created", {"number": 1}, id="o1") == 1
    assert world.kd.triggers.publish("order.created", {"number": 2}) == 1
    assert world.kd.triggers.publish("order.paid", {"number": 2}) == 0
    assert attend(world.kd) == ["trigger:fulfil"]
    assert runs(world.kd) == ["fulfil@1", "fulfil@2"]
    world.kd.triggers.publish("order.created", {"number": 1}, id="o1")
    assert attend(world.kd) == []
    assert [input_of(world.kd, run) for run in runs(world.kd)] == [{"number": 1}, {"number": 2}]
    taken, fired = told(world.kd, "fulfil")[:2]
    assert isinstance(taken, e.MessageTaken)
    assert isinstance(fired, system_events.TriggerFired)
    assert (taken.id, fired.by) == ("o1", "shop")


def test_a_run_of_somebody_else_with_the_id_of_a_firing_takes_nothing_from_it(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    world.kd.run(report, "mine", id="fulfil@1")
    fork_of(world.kd.runtime.log, e.RunForked(at=1, run="fulfil@1.2", parent="fulfil@1", cut=1, generation=1))
    for number in (1, 2):
        world.kd.triggers.publish("order.created", {"number": number})
    attend(world.kd)
    assert runs(world.kd, "fulfil") == ["fulfil@1.3", "fulfil@2"]
    assert [input_of(world.kd, run)["number"] for run in runs(world.kd, "fulfil")] == [1, 2]


def test_an_event_is_heard_by_everybody_who_listens(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    killick.triggers.on_event(
        "order.created", report, name="tell", input=lambda firing: f"order {firing.body['number']}"
    )
    firing.ensure(world.kd.runtime.engine)
    assert world.kd.triggers.publish("order.created", {"number": 7}) == 2
    attend(world.kd)
    assert sorted(runs(world.kd)) == ["fulfil@1", "tell@1"]
    assert input_of(world.kd, "tell@1") == "order 7"


def test_an_event_names_its_run_and_a_second_one_of_that_name_starts_none(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil, id=lambda firing: f"order-{firing.body['number']}")
    firing.ensure(world.kd.runtime.engine)
    for number in (17, 18, 17):
        world.kd.triggers.publish("order.created", {"number": number})
    attend(world.kd)
    assert runs(world.kd) == ["order-17", "order-18"]
    passed = told(world.kd, "fulfil")[-1]
    assert isinstance(passed, system_events.TriggerPassed)
    assert passed.because == "duplicate"
    assert world.kd.triggers.list()[0].fired == 2


@pytest.mark.parametrize(
    "named", [lambda firing: firing.body["no such"], lambda firing: 17, lambda _: "trigger:x", lambda _: ""]
)
def test_an_event_that_cannot_name_its_run_is_passed_with_the_reason(world: World, named: Any) -> None:
    killick.triggers.on_event("order.created", fulfil, id=named)
    firing.ensure(world.kd.runtime.engine)
    world.kd.triggers.publish("order.created", {"number": 17})
    attend(world.kd)
    assert runs(world.kd) == []
    passed = told(world.kd, "fulfil")[-1]
    assert isinstance(passed, system_events.TriggerPassed)
    assert passed.because == "input failed"


def test_the_ids_of_runs_need_no_escaping_in_a_path_or_a_shell(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.on_event("order.created", fulfil)
    killick.triggers.cron("0 9 * * *", report, input="monday", overlap="allow")
    attend(world.kd)
    world.kd.triggers.publish("order.created", {"number": 1})
    world.kd.triggers.fire("report")
    clock.advance(HOUR)
    attend(world.kd)
    assert len(runs(world.kd)) == 3
    for run in runs(world.kd):
        assert shlex.quote(run) == run
        assert quote(run, safe="@:") == run, "@ and : are characters of a path (RFC 3986)"


def test_an_event_for_a_trigger_that_no_worker_has_served_waits_for_the_first_one(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    assert world.kd.triggers.publish("order.created", {"number": 1}) == 1
    assert runs(world.kd) == []
    attend(world.kd)
    assert runs(world.kd) == ["fulfil@1"]


def test_a_body_that_does_not_fit_is_passed_and_holds_up_nobody(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    world.kd.triggers.publish("order.created", "nonsense")
    world.kd.triggers.publish("order.created", {"number": 2})
    attend(world.kd)
    assert runs(world.kd) == ["fulfil@1"]
    kinds = [type(event).__name__ for event in told(world.kd, "fulfil")]
    assert kinds == ["MessageTaken", "TriggerPassed", "MessageTaken", "TriggerFired"]
    assert world.kd.runtime.store.inbox("trigger:fulfil") == []


def test_events_wait_while_the_run_before_has_not_ended(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.on_event("ask", asking, overlap="queue")
    firing.ensure(world.kd.runtime.engine)
    for what in ("a", "b", "c"):
        world.kd.triggers.publish("ask", what)
    attend(world.kd, TaskControl())
    started = []
    for _ in range(3):
        started.append(runs(world.kd)[-1])
        world.kd.cancel(started[-1])
        world.kd.advance(started[-1])
        attend(world.kd, TaskControl())
    assert started == ["asking@1", "asking@2", "asking@3"]
    assert [input_of(world.kd, run) for run in started] == ["a", "b", "c"]


def test_a_message_that_is_none_of_its_business_does_not_keep_a_trigger_busy(world: World) -> None:
    killick.triggers.every("10m", poll)
    firing.ensure(world.kd.runtime.engine)
    world.kd.send("trigger:poll", "hello", "there")
    assert attend(world.kd) == ["trigger:poll"]
    assert isinstance(told(world.kd, "poll")[-1], e.MessageTaken)
    assert attend(world.kd) == []


def test_an_event_has_a_name_of_its_own(world: World) -> None:
    for name in ("", "killick.answer"):
        with pytest.raises(AnswerRefused, match="is not a valid event name"):
            world.kd.triggers.publish(name)


# conditions ---------------------------------------------------------------------------------------


def test_a_condition_fires_when_it_begins_to_hold_and_only_then(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    answers = [0, 0, 5, 6, 0, 7, 7]
    killick.triggers.when(
        lambda: answers.pop(0) if answers else 7,
        asking,
        every="30s",
        overlap="allow",
        name="low",
        input=lambda f: str(f.value),
    )
    duty = TaskControl(clock, rests=20)
    attend(world.kd, duty)
    assert runs(world.kd) == ["low@1", "low@2"]
    assert [input_of(world.kd, run) for run in runs(world.kd)] == ["5", "7"]
    turned = [event.holds for event in told(world.kd, "low") if isinstance(event, system_events.TriggerTurned)]
    assert turned == [True, False, True]
    assert max(duty.rested) <= firing.HEAR_SECONDS


def test_a_condition_is_asked_no_more_often_than_it_says(world: World, clock: killick.clock.LeapingClock) -> None:
    asked: list[float] = []

    async def low() -> bool:
        asked.append(clock.monotonic())
        return False

    killick.triggers.when(low, poll, every="1m")
    attend(world.kd, TaskControl(clock, rests=30))
    assert asked == [60.0 * n for n in range(len(asked))]
    assert len(asked) > 3


def test_a_condition_that_fails_is_no_answer_and_noted_once(world: World, clock: killick.clock.LeapingClock) -> None:
    answers: list[Any] = [OSError("down"), OSError("down"), True, OSError("down"), True, object()]

    def low() -> Any:
        answer = answers.pop(0) if answers else True
        if isinstance(answer, OSError):
            raise answer
        return answer

    killick.triggers.when(low, poll, every="10s")
    attend(world.kd, TaskControl(clock, rests=8))
    assert runs(world.kd) == ["poll@1"]
    kinds = [type(event).__name__ for event in told(world.kd, "poll")]
    assert kinds == ["NoteMade", "TriggerTurned", "TriggerFired", "NoteMade", "NoteMade"]
    assert "down" in world.kd.runtime.log.data("trigger:poll", 3)["note"]


def test_whether_it_held_outlives_who_looked(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.when(lambda: True, poll, every="10s")
    attend(world.kd, TaskControl(clock, rests=3))
    world.process()
    attend(world.kd, TaskControl(clock, rests=3))
    assert runs(world.kd) == ["poll@1"]


def test_a_condition_that_is_looked_at_can_be_paused(world: World, clock: killick.clock.LeapingClock) -> None:
    looked: list[int] = []
    killick.triggers.when(lambda: looked.append(1), poll, every="1s")

    def pause(rested: int) -> None:
        if rested == 2:
            world.kd.pause("trigger:poll", by="ada")

    duty = TaskControl(clock, rests=9, then=pause)
    attend(world.kd, duty)
    assert len(duty.rested) == 2
    assert world.kd.info("trigger:poll").status == "paused"
    assert attend(world.kd) == []
    assert world.kd.resume("trigger:poll") == "resumed"
    assert attend(world.kd, TaskControl(clock)) == ["trigger:poll"]


# declaring ----------------------------------------------------------------------------------------


def low() -> bool:
    return False


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda: killick.triggers.cron("0 9 * *", poll), "poll: cron '0 9 * *': wrong number of fields; write it as"),
        (lambda: killick.triggers.cron("0 25 * * *", poll), "bad hour"),
        (lambda: killick.triggers.cron("0 0 30 2 *", poll), "bad day-of-month"),
        (lambda: killick.triggers.cron("0 0 * 2 mon#5,tue#6", poll), "bad day-of-week"),
        (lambda: killick.triggers.on_event("x", fulfil, id="order-17"), "is not a function of the firing"),  # type: ignore[arg-type]
        (lambda: killick.triggers.on_event("x", fulfil, id=lambda: "x"), "is not a function of the firing"),  # type: ignore[misc, arg-type]
        (lambda: killick.triggers.cron(None, poll), "poll: cron None"),  # type: ignore[arg-type]
        (
            lambda: killick.triggers.cron("* * * * *", poll, tz="Europe/Atlantis"),
            "tz='Europe/Atlantis' is not a time zone",
        ),
        (lambda: killick.triggers.cron("* * * * *", poll, tz="Europe"), "is not a time zone"),
        (
            lambda: killick.triggers.cron("* * * * *", poll, missed="never"),
            "missed='never' is not one of skip, once, all",
        ),  # type: ignore[arg-type]
        (lambda: killick.triggers.every("10m", poll, overlap="wait"), "overlap='wait' is not one of"),  # type: ignore[arg-type]
        (lambda: killick.triggers.every("soon", poll), "poll: 'soon'"),
        (lambda: killick.triggers.every("10ms", poll), "too often"),
        (lambda: killick.triggers.every("10m", low), "low is not an agent; declare it with @killick.agent"),  # type: ignore[arg-type]
        (lambda: killick.triggers.every("10m", poll, name="a b"), "letters, digits"),
        (lambda: killick.triggers.every("10m", poll, input=3), "input=3, but poll takes none"),
        (lambda: killick.triggers.every("10m", report), "give an input that report takes"),
        (lambda: killick.triggers.every("10m", report, input=17), "give an input that report takes"),
        (
            lambda: killick.triggers.every("10m", report, input=lambda: "x"),
            "takes neither (firing) nor (firing, previous)",
        ),
        (lambda: killick.triggers.when(lambda x: x, poll), "is not a function without arguments"),  # type: ignore[arg-type,misc]
        (lambda: killick.triggers.when("low", poll), "is not a function without arguments"),  # type: ignore[arg-type]
        (lambda: killick.triggers.on_event("killick.own", poll), "is not a valid event name"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_declared(declare: Callable[[], Any], says: str) -> None:
    with pytest.raises(DeclarationRefused) as refused:
        declare()
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not TRIGGERS


MODULE = """
import killick

@killick.agent
async def tidy(run: killick.Run) -> None: ...

killick.triggers.every("10m", tidy)
"""


def test_a_module_that_is_loaded_again_declares_again_but_no_module_declares_a_name_twice() -> None:
    exec(compile(MODULE, "tidy.py", "exec"), {})
    exec(compile(MODULE.replace("10m", "20m"), "tidy.py", "exec"), {})
    assert [str(trigger.spec) for trigger in TRIGGERS.values()] == ["every 20m"]
    with pytest.raises(DeclarationRefused, match="tidy: two triggers of this module have this name; give one name="):
        exec(compile(MODULE + 'killick.triggers.cron("0 9 * * *", tidy)\n', "tidy.py", "exec"), {})


# the log says what is declared --------------------------------------------------------------------


def test_who_declares_the_same_again_writes_nothing(world: World) -> None:
    killick.triggers.every("10m", poll)
    assert firing.ensure(world.kd.runtime.engine) == ["killick.trigger:poll"]
    firing.ensure(world.process().runtime.engine)
    assert told(world.kd, "poll") == []


def test_another_schedule_counts_at_once_and_never_goes_back(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 9 * * *", poll)
    attend(world.kd)
    clock.advance(HOUR)
    attend(world.kd)
    clock.set_wall(NINE - 1_800_000_000)
    killick.triggers.cron("*/30 * * * *", poll, overlap="allow")
    firing.ensure(world.kd.runtime.engine)
    assert world.kd.triggers.list()[0].next_us == NINE + 1_800_000_000
    clock.advance(HOUR)
    attend(world.kd)
    assert runs(world.kd) == ["poll@2026-11-16T09:00Z", "poll@2026-11-16T09:30Z"]


def test_a_trigger_that_listens_to_another_event_is_found_by_that(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    killick.triggers.on_event("order.paid", fulfil)
    firing.ensure(world.kd.runtime.engine)
    assert world.kd.triggers.publish("order.created", {"number": 1}) == 0
    assert world.kd.triggers.publish("order.paid", {"number": 1}) == 1
    attend(world.kd)
    assert runs(world.kd) == ["fulfil@1"]


def test_a_worker_with_older_code_obeys_the_schedule_on_record(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 9 * * *", poll, overlap="allow")
    old = TRIGGERS.copy()
    firing.ensure(world.kd.runtime.engine)
    killick.triggers.cron("30 8 * * *", poll, overlap="allow")
    firing.ensure(world.kd.runtime.engine)
    TRIGGERS.clear()
    TRIGGERS.update(old)
    clock.advance(HOUR / 2)
    for claimed in world.kd.runtime.store.claim(
        "old", now_us=clock.now_us(), seconds=60, limit=1, agents=["killick.trigger:poll"]
    ):
        world.kd.runtime.blocking(
            firing.attend(
                world.kd.runtime.engine, world.kd.runtime.log.open(claimed.head.run, head=claimed.head), TaskControl()
            )
        )
    assert runs(world.kd) == ["poll@2026-11-16T08:30Z"]
    assert world.kd.triggers.list()[0].next_us == NINE + (23 * 3600 + 1800) * 1_000_000


def test_somebody_who_looks_at_a_condition_notices_that_it_is_declared_otherwise(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    killick.triggers.when(low, poll, every="1s")

    def redeclare(rested: int) -> None:
        killick.triggers.when(low, poll, every="2s")
        firing.ensure(world.kd.runtime.engine)

    duty = TaskControl(clock, rests=9, then=redeclare)
    attend(world.kd, duty)
    assert len(duty.rested) == 1


def test_a_cancelled_trigger_is_over_until_somebody_declares_it_again(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    TRIGGERS.clear()
    world.kd.cancel("trigger:fulfil", because="nobody orders any more")
    assert world.kd.info("trigger:fulfil").status == "cancelled"
    assert world.kd.triggers.publish("order.created", {"number": 1}) == 0
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    assert world.kd.info("trigger:fulfil").status == "waiting"
    assert world.kd.triggers.publish("order.created", {"number": 1}) == 1
    attend(world.kd)
    assert runs(world.kd) == ["fulfil@1"]


def test_a_trigger_whose_log_is_broken_is_left_out_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    killick.triggers.every("10m", poll)
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    world.store.quarantine("trigger:poll", "somebody looked at it")
    assert firing.ensure(world.kd.runtime.engine) == ["killick.trigger:fulfil"]
    assert "poll: this trigger is out of order" in caplog.text


# pausing ------------------------------------------------------------------------------------------


def test_what_was_due_while_it_was_paused_is_missed(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 * * * *", poll, missed="skip")
    attend(world.kd)
    world.kd.pause("trigger:poll")
    clock.advance(3 * HOUR + 600)
    assert attend(world.kd) == []
    assert world.kd.triggers.list()[0].paused
    world.kd.resume("trigger:poll")
    attend(world.kd)
    [passed] = [event for event in told(world.kd, "poll") if isinstance(event, system_events.TriggerPassed)]
    assert (passed.because, passed.count) == ("paused", 3)
    assert runs(world.kd) == []


def test_events_that_come_while_it_is_paused_wait(world: World) -> None:
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    world.kd.pause("trigger:fulfil")
    for number in (1, 2):
        world.kd.triggers.publish("order.created", {"number": number})
    attend(world.kd)
    assert runs(world.kd) == []
    assert attend(world.kd) == [], "nobody turns round and round about it"
    world.kd.resume("trigger:fulfil")
    attend(world.kd)
    assert [input_of(world.kd, run) for run in runs(world.kd)] == [{"number": 1}, {"number": 2}]


# by hand ------------------------------------------------------------------------------------------


def test_a_trigger_can_be_fired_by_hand_whatever_it_waits_for(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 9 * * *", asking, input="what")
    run = world.kd.triggers.fire("asking", by="ada")
    other = world.kd.triggers.fire("asking", input="else")
    assert run.startswith("asking@hand_")
    assert [input_of(world.kd, each) for each in (run, other)] == ["what", "else"]
    fired = told(world.kd, "asking")[0]
    assert isinstance(fired, system_events.TriggerFired)
    assert (fired.by, fired.due, fired.next) == ("ada", None, NINE)
    clock.advance(HOUR)
    attend(world.kd)
    assert runs(world.kd) == [run, other], "the run before has not ended"


def test_firing_by_hand_goes_through_whoever_attends(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.when(low, report, name="low", every="1s")
    asked: list[str] = []

    def fire(rested: int) -> None:
        if rested == 1:
            asked.append(world.kd.triggers.fire("low", input="by hand", by="ada"))

    attend(world.kd, TaskControl(clock, rests=3, then=fire))
    assert runs(world.kd) == asked
    assert input_of(world.kd, asked[0]) == "by hand"


def test_firing_by_hand_goes_through_whoever_declares_it(world: World) -> None:
    killick.triggers.every("10m", report, input="tuesday")
    firing.ensure(world.kd.runtime.engine)
    declared = TRIGGERS.copy()
    TRIGGERS.clear()
    run = world.kd.triggers.fire("report")
    assert runs(world.kd) == []
    TRIGGERS.clear()
    TRIGGERS.update(declared)
    attend(world.kd)
    assert runs(world.kd) == [run]
    assert input_of(world.kd, run) == "tuesday"


def test_who_fires_by_hand_is_told_what_is_wrong(world: World) -> None:
    killick.triggers.on_event("x", fulfil)
    with pytest.raises(RunUnknown):
        world.kd.triggers.fire("nothing")
    with pytest.raises(killick.KillickError, match="input"):
        world.kd.triggers.fire("fulfil", input="nonsense")
    with pytest.raises(AnswerRefused, match="no input could be made"):
        world.kd.triggers.fire("fulfil")
    assert runs(world.kd) == []


def test_a_run_of_the_trigger_with_the_id_of_a_firing_is_that_firing(
    world: World, clock: killick.clock.LeapingClock
) -> None:
    killick.triggers.cron("0 9 * * *", report, input="monday")
    attend(world.kd)
    world.kd.start(report, "ahead", id="report@2026-11-16T09:00Z", tags=["trigger:report"])
    clock.advance(HOUR)
    attend(world.kd)
    assert runs(world.kd) == ["report@2026-11-16T09:00Z"]
    assert world.kd.triggers.list()[0].fired == 1


# deaths -------------------------------------------------------------------------------------------


def everything(
    world: World, clock: killick.clock.LeapingClock, *, dies: tuple[int, str] | None
) -> tuple[list[str], int]:
    """Hours with triggers of every sort, attended to by processes of which one dies at some commit: the runs that
    were started, and how many commits the first process made."""
    holding = {"low": False}
    killick.triggers.cron("0 * * * *", poll, missed="all", overlap="allow")
    killick.triggers.on_event("order.created", fulfil)
    killick.triggers.on_event("ask", asking, overlap="queue")
    killick.triggers.when(lambda: holding["low"], report, name="low", input="low", every="10s")
    people = world.kd
    firing.ensure(people.runtime.engine)
    world.process()
    world.line.cut_at = dies
    appends = world.line.appends

    def tend() -> None:
        try:
            attend(world.kd, lambda: TaskControl(clock, rests=1))
        except (StoreUnavailable, HandleClosed):
            world.process()

    for hour in range(5):
        holding["low"] = hour in (2, 3)
        if hour:
            people.triggers.publish("order.created", {"number": hour}, id=f"order {hour}")
            people.triggers.publish("ask", str(hour), id=f"question {hour}")
        tend()
        for run in runs(people, "asking"):
            if people.info(run).status not in ENDED:
                people.cancel(run)
                people.advance(run)
        clock.advance(HOUR)
    tend()
    clock.advance(120)  # whoever died has nothing any more
    tend()
    assert world.kd.store.verify().problems == []
    for name in ("poll", "fulfil", "asking", "low"):
        fired = [event.run for event in told(world.kd, name) if isinstance(event, system_events.TriggerFired)]
        listed = [listed.id for listed in reversed(world.kd.list(tag=f"trigger:{name}"))]
        assert fired == listed, "a firing and its run are both there, or neither"
    return sorted(runs(world.kd)), len(appends)


@pytest.mark.slow
def test_whoever_dies_wherever_loses_and_doubles_nothing(
    make_world: Callable[[killick.clock.ManualClock], World],
) -> None:
    def hours(dies: tuple[int, str] | None) -> tuple[list[str], int]:
        TRIGGERS.clear()
        clock = killick.clock.LeapingClock(NINE - 3_600_000_000)
        return everything(make_world(clock), clock, dies=dies)

    undisturbed, commits = hours(None)
    assert commits > 12
    assert [run for run in undisturbed if run.startswith("poll")] == [
        f"poll@2026-11-16T{hour:02}:00Z" for hour in range(9, 14)
    ]
    assert len(undisturbed) == 5 + 4 + 4 + 1
    for number in range(1, commits + 1):
        for when in ("before", "after"):
            assert hours((number, when))[0] == undisturbed, f"died {when} commit {number}"


BEFORE_SPRING = in_us(datetime(2026, 3, 28, 20, tzinfo=UTC))
BEFORE_AUTUMN = in_us(datetime(2026, 10, 24, 20, tzinfo=UTC))


HAPPENING = st.one_of(
    st.tuples(st.just("passes"), st.sampled_from([30, 600, 3_600, 86_400])),
    st.tuples(st.just("goes back"), st.sampled_from([60, 3_600])),
    st.tuples(st.just("dies"), st.sampled_from(["before", "after"])),
)


@pytest.mark.slow
@settings(
    max_examples=repeats(25, 100), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(HAPPENING, max_size=12),
    st.sampled_from([BEFORE_SPRING, BEFORE_AUTUMN]),
    st.sampled_from(["30 2 * * *", "*/30 * * * *", "0 */2 * * *"]),
    st.sampled_from(["skip", "once", "all"]),
)
def test_whatever_clocks_and_workers_do_each_time_is_fired_once_or_passed(
    make_world: Callable[[killick.clock.ManualClock], World],
    happenings: list[tuple[str, Any]],
    begin: int,
    expression: str,
    missed: Any,
) -> None:
    TRIGGERS.clear()
    clock = killick.clock.ManualClock(begin)
    world = make_world(clock)
    killick.triggers.cron(expression, poll, tz="Europe/Berlin", missed=missed, overlap="allow")
    firing.ensure(world.kd.runtime.engine)
    furthest = begin
    for what, how in happenings:
        if what == "dies":
            world.line.cut_at = (len(world.line.appends) + 1, how)
        else:
            if what == "passes":
                clock.advance(how)
            else:
                clock.set_wall(clock.now_us() - how * 1_000_000)
                clock.advance(killick.clock.DOUBT_SECONDS)
            furthest = max(furthest, clock.now_us())
        with contextlib.suppress(StoreUnavailable, HandleClosed):
            attend(world.kd)
        if world.line.is_cut:
            world.process()
            clock.advance(3_600)  # leases end
            furthest = max(furthest, clock.now_us())
    world.process()
    clock.advance((furthest - clock.now_us()) / 1_000_000 + 7_200)
    attend(world.kd)
    events = told(world.kd, "poll")
    fired = [event.due for event in events if isinstance(event, system_events.TriggerFired)]
    passed = sum(event.count for event in events if isinstance(event, system_events.TriggerPassed))
    cron = Cron(expression, "Europe/Berlin")
    first = cron.begin(begin)
    dues = cron.dues(first, clock.now_us()) if first <= clock.now_us() else None
    assert len(fired) == len(set(fired)), "none twice"
    assert len(fired) + passed >= (0 if dues is None else dues.count), "none is lost"
    there = {head.run for _, head in world.store.heads()}
    assert there == {"trigger:poll", *(f"poll@{stamp(due)}" for due in fired if due is not None)}


def test_two_processes_that_attend_at_once_fire_each_once(tmp_path: Path) -> None:
    clock = killick.clock.LeapingClock(NINE - 3_600_000_000)
    killick.triggers.cron("* * * * *", poll, missed="all", overlap="allow")
    killick.triggers.on_event("order.created", fulfil)
    with (
        killick.Client(SqliteStore(tmp_path / "killick.db", clock=clock), clock=clock) as one,
        killick.Client(SqliteStore(tmp_path / "killick.db", clock=clock), clock=clock) as other,
    ):
        firing.ensure(one.runtime.engine)
        failed: list[BaseException] = []

        def work(kd: killick.Client) -> None:
            try:
                for number in range(20):
                    kd.triggers.publish("order.created", {"number": number}, id=f"order {number}")
                    clock.advance(7)
                    # Time flies here: who has a lease may lose it to the other in the middle.
                    with contextlib.suppress(EpochStale, HandleClosed, HeadMoved):
                        attend(kd)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(kd,)) for kd in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert failed == []
        attend(one)
        minutes = (clock.now_us() - (NINE - 3_600_000_000)) // 60_000_000
        assert sorted(runs(one, "poll")) == [f"poll@2026-11-16T08:{n:02}Z" for n in range(1, minutes + 1)]
        assert sorted(input_of(one, run)["number"] for run in runs(one, "fulfil")) == list(range(20))


def test_a_look_at_all_triggers(world: World, clock: killick.clock.LeapingClock) -> None:
    killick.triggers.cron("0 9 * * mon-fri", report, tz="Europe/Berlin", input="x")
    killick.triggers.on_event("order.created", fulfil)
    firing.ensure(world.kd.runtime.engine)
    killick.triggers.every("10m", poll)
    killick.triggers.when(low, poll, name="low", every="90s")
    world.kd.triggers.fire("fulfil", input={"number": 1})
    fulfilled, lowered, polled, reported = world.kd.triggers.list()
    assert (fulfilled.what, fulfilled.fired, fulfilled.status) == ("on order.created", 1, "queued")
    assert (lowered.what, lowered.is_set, lowered.declared) == ("when low, every 90 s", False, True)
    assert polled.what == "every 10m"
    assert reported.what == "cron 0 9 * * mon-fri Europe/Berlin"
    assert reported.next_us is not None
    assert moment(reported.next_us, "Europe/Berlin").hour == 9
