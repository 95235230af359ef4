"""Whoever looks on is told what runs do here, as they do it; of what is replayed or rehearsed nobody is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import killick
from killick.engine import observers
from killick.engine.observers import Attempt, Observer, RunSpan, Waited
from killick.model import events as e
from killick.workers.metrics import Metrics, prometheus_text
from world import World


class Notes(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.attempts: list[Attempt] = []
        self.stretches: list[RunSpan] = []

    def trace(self) -> str | None:
        return "00-11111111111111111111111111111111-2222222222222222-01"

    def began(self, stretch: RunSpan) -> str | None:
        self.stretches.append(stretch)
        self.lines.append(f"took {stretch.agent}")
        return None

    def ended(self, stretch: RunSpan) -> None:
        self.lines.append(f"let go {stretch.agent}: {stretch.status}")

    def came(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.lines.append(f"{attempt.name} {attempt.number}: {attempt.outcome}")

    def waits(self, wait: Waited) -> None:
        self.lines.append(f"waits for {wait.waits_for}")

    def waited(self, wait: Waited) -> None:
        self.lines.append(f"waited for {wait.waits_for}: {wait.how}")


@pytest.fixture
def notes() -> Iterator[Notes]:
    made = Notes()
    stop = observers.observe(made)
    yield made
    stop()


@killick.tool(effect="reads")
async def look(name: str) -> str:
    return f"{name} is there"


@killick.agent
async def asks(run: killick.Run, name: str) -> str:
    found = await run.call(look, name)
    await run.ask("go on?")
    return found


def test_a_stretch_tells_what_is_done_in_it_and_a_replay_tells_nothing(world: World, notes: Notes) -> None:
    with pytest.raises(killick.RunWaiting):
        world.kd.run(asks, "ann", id="r")
    assert notes.lines == ["took asks", "look 1: returned", "waits for answer", "let go asks: waiting"]
    assert notes.attempts[0].arguments == {"name": "ann"}
    assert notes.attempts[0].output == "ann is there"
    notes.lines.clear()
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    kd.run(asks, "ann", id="r")
    assert notes.lines == ["took asks", "waited for answer: answered", "let go asks: completed"]
    assert [stretch.replayed for stretch in notes.stretches] == [0, 1]
    notes.lines.clear()
    kd.replay("r", asks)
    kd.run(asks, "ann", id="r")
    assert notes.lines == []


def test_an_attempt_that_nobody_heard_the_end_of_is_told_as_such(world: World, notes: Notes) -> None:
    began = asyncio.Event()

    @killick.tool(effect="idempotent")
    async def hangs() -> None:
        began.set()
        await asyncio.Event().wait()

    @killick.agent
    async def risks(run: killick.Run) -> None:
        await run.call(hangs)

    async def cut_off() -> None:
        running = asyncio.ensure_future(world.kd.as_async().run(risks, id="r"))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cut_off())
    assert notes.lines == ["took risks", "hangs 1: None", "let go risks: interrupted"]


def test_the_trace_of_whoever_starts_a_run_is_on_its_record(world: World, notes: Notes) -> None:
    world.kd.start(asks, "ann", id="r")
    [started] = world.told("r", e.RunStarted)
    assert started.trace == notes.trace()
    world.kd.advance("r")
    assert notes.stretches[0].trace == notes.trace()


def test_an_undoing_is_told_as_an_attempt(world: World, notes: Notes) -> None:
    async def unbook(effect: killick.Effect) -> None: ...

    @killick.tool(compensate=unbook)
    async def book() -> str:
        return "room 4"

    @killick.agent
    async def books(run: killick.Run) -> str:
        return await run.call(book)

    world.kd.run(books, id="r")
    world.kd.undo("r", "1", by="ann")
    assert notes.attempts[-1].sort == "undo"
    assert notes.attempts[-1].outcome == "returned"


def test_a_cancelled_run_is_one_stretch(world: World, notes: Notes) -> None:
    with pytest.raises(killick.RunWaiting):
        world.kd.run(asks, "ann", id="r")
    world.kd.cancel("r", by="ann")
    with pytest.raises(killick.errors.RunCancelled):
        world.kd.run(asks, "ann", id="r")
    assert notes.lines[-2:] == ["waited for answer: cancelled", "let go asks: cancelled"]


def test_whoever_stops_looking_is_told_nothing_more(world: World) -> None:
    notes = Notes()
    stop = observers.observe(notes)
    stop()
    stop()
    with pytest.raises(killick.RunWaiting):
        world.kd.run(asks, "ann", id="r")
    assert notes.lines == []
    assert world.told("r", e.RunStarted)[0].trace is None


def test_meters_show_no_value_and_no_run(world: World) -> None:
    meters = Metrics()
    stop = observers.observe(meters)
    try:
        with pytest.raises(killick.RunWaiting):
            world.kd.run(asks, "ann", id="run-of-ann")
    finally:
        stop()
    text = "\n".join(meters.lines())
    assert 'killick_attempts_total{agent="asks",sort="tool",name="look",outcome="returned"} 1' in text
    assert 'killick_attempt_seconds_bucket{agent="asks",sort="tool",name="look",le="+Inf"} 1' in text
    assert "ann" not in text


def test_a_store_that_does_not_answer_is_shown_as_down(world: World) -> None:
    assert "\nkillick_store_up 1\n" in prometheus_text(world.kd.runtime.engine)
    world.line.is_cut = True
    shown = prometheus_text(world.kd.runtime.engine)
    assert "\nkillick_store_up 0\n" in shown
    assert "killick_store_runs" not in shown


def test_names_that_need_quoting_are_quoted() -> None:
    meters = Metrics()
    meters.rejected("r", 'a "b" \\ c\n', "tool", e.Verdict("reject"), None)
    [line] = [line for line in meters.lines() if line.startswith("killick_rejections_total{")]
    assert line == 'killick_rejections_total{agent="a \\"b\\" \\\\ c\\n",name="tool",rule=""} 1'


def test_an_observer_that_fails_costs_the_run_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observer):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("broken")

    stop = observers.observe(Broken())
    try:
        with pytest.raises(killick.RunWaiting):
            world.kd.run(asks, "ann", id="r")
    finally:
        stop()
    assert "an observer failed, and the run continues" in caplog.text
