"""A turn drives one run until it ends, waits or has to leave, and says so in a few words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from killick.adapters.engines.turns import RESULT_BYTES_MAX, ToolQueues, Turn, TurnOutcome, name_of
from killick.errors import RunBusy, RunUnknown


@killick.tool(effect="reads")
async def look(seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return "seen"


@killick.agent
async def sleeper(run: killick.Run, seconds: float) -> str:
    await run.sleep(seconds)
    return await run.call(look)


@killick.agent
async def walker(run: killick.Run) -> str:
    for _ in range(1_000):
        await run.call(look, 0.005)
    return "there"


@killick.agent
async def asker(run: killick.Run) -> bool:
    return (await run.ask("Go on?", to="anybody")).approved


@killick.agent
async def parent(run: killick.Run) -> str:
    child = await run.spawn(sleeper, 0.0, id="child")
    return await child.result()


@killick.agent
async def renewing(run: killick.Run, left: int) -> str:
    if left:
        await run.renew(left - 1)
    return "done"


@killick.agent
async def writer(run: killick.Run, length: int) -> str:
    return "x" * length


@killick.agent
async def failing(run: killick.Run) -> None:
    raise ValueError("no such account")


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as made:
        yield made


def taken(kd: killick.Client, run: str, **options: float) -> TurnOutcome:
    async def turn() -> TurnOutcome:
        return await Turn(kd, run, **options).take()

    return kd.runtime.blocking(turn())


def test_a_wait_that_lasts_is_given_back_with_its_seconds_and_a_short_one_is_sat_out(kd: killick.Client) -> None:
    kd.start(sleeper, 3600.0, id="long")
    kd.start(sleeper, 0.05, id="short")
    standing = taken(kd, "long")
    assert standing.status == "waiting"
    assert standing.wait_seconds is not None
    assert 0 < standing.wait_seconds <= 3600
    assert taken(kd, "short") == TurnOutcome("short", "completed", result="seen")


def test_a_run_that_waits_for_people_is_to_be_left_alone_until_something_comes(kd: killick.Client) -> None:
    kd.start(asker, id="asking")
    asking = taken(kd, "asking")
    assert (asking.status, asking.wait_seconds, asking.step) == ("waiting", None, "1")
    assert [each["kind"] for each in asking.waits] == ["answer"]
    kd.answer("asking", "approve", by="ann")
    assert taken(kd, "asking") == TurnOutcome("asking", "completed", result=True)
    assert taken(kd, "asking").has_ended


def test_a_paused_run_is_not_gone_on_with(kd: killick.Client) -> None:
    kd.start(sleeper, 0.0, id="paused")
    kd.pause("paused")
    assert taken(kd, "paused") == TurnOutcome("paused", "paused", None)
    kd.resume("paused")
    assert taken(kd, "paused").status == "completed"


def test_a_run_that_somebody_else_has_is_busy_and_one_that_is_not_there_unknown(kd: killick.Client) -> None:
    kd.start(sleeper, 0.0, id="held")
    held = kd.runtime.store.lease("held", "somebody", seconds=30)
    with pytest.raises(RunBusy):
        taken(kd, "held")
    kd.runtime.store.release("held", epoch=held.epoch, holder="somebody")
    assert taken(kd, "held").status == "completed"
    with pytest.raises(RunUnknown):
        taken(kd, "nobody")


def test_a_turn_that_leaves_finishes_its_step_and_the_run_is_due_at_once(kd: killick.Client) -> None:
    kd.start(walker, id="walking")
    standing = taken(kd, "walking", slice_seconds=0.1)
    assert (standing.wait_seconds, standing.has_ended) == (0.0, False)
    steps = kd.state("walking").position
    assert not steps.pending
    assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["walking"]


def test_children_are_for_the_engine_as_all_other_runs_are(kd: killick.Client) -> None:
    kd.start(parent, id="parent")
    waiting = taken(kd, "parent")
    assert (waiting.status, waiting.wait_seconds) == ("waiting", None)
    assert [each["kind"] for each in waiting.waits] == ["child"]
    assert taken(kd, "child") == TurnOutcome("child", "completed", result="seen")
    assert taken(kd, "parent") == TurnOutcome("parent", "completed", result="seen")


def test_a_renewed_run_keeps_its_name_and_is_gone_on_with_as_what_it_is_now(kd: killick.Client) -> None:
    kd.start(renewing, 2, id="again")
    kd.start(renewing, 0, id="other+2")
    assert taken(kd, "again") == TurnOutcome("again+3", "completed", result="done")
    names = {
        row.run: name_of(row) for row in (kd.runtime.store.index("again+3"), kd.runtime.store.index("other+2")) if row
    }
    assert names == {"again+3": "again", "other+2": "other+2"}


def test_a_large_result_stays_in_the_store_and_a_failure_is_a_line(kd: killick.Client) -> None:
    kd.start(writer, RESULT_BYTES_MAX, id="large")
    kd.start(failing, id="failing")
    large = taken(kd, "large")
    assert large.status == "completed"
    assert large.result == {"killick_run": "large", "bytes": RESULT_BYTES_MAX + 2}
    failed = taken(kd, "failing")
    assert failed.status == "failed"
    assert "no such account" in str(failed.failure)


@killick.tool(effect="idempotent", name="turns_paint")
async def paint(wall: int) -> str:
    PAINTED.append(wall)
    return "blue"


@killick.agent
async def house(run: killick.Run) -> list[str]:
    first = await run.call(look)
    walls = await run.gather(run.call(paint, 1), run.call(paint, 2))
    return [first, *walls, await run.call(look)]


PAINTED: list[int] = []


def test_a_turn_leaves_the_run_before_a_step_of_another_queue(kd: killick.Client) -> None:
    PAINTED.clear()
    kd.start(house, id="house")
    home, painters = (ToolQueues(own, {"turns_paint": "painters"}) for own in ("home", "painters"))

    async def turn(queues: ToolQueues) -> TurnOutcome:
        return await Turn(kd.as_async(), "house", queues=queues).take()

    async def story() -> None:
        left = await turn(home)
        assert (left.status, left.wait_seconds, left.queue) == ("running", 0.0, "painters")
        assert PAINTED == []
        assert await turn(home) == left
        back = await turn(painters)
        assert (back.status, back.queue, sorted(PAINTED)) == ("running", None, [1, 2])
        assert (await turn(home)).result == ["seen", "blue", "blue", "seen"]

    asyncio.run(story())
    assert sorted(PAINTED) == [1, 2]
