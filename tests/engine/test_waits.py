"""Waiting and being told: R25 (signals and parking), R26 (deliverers and commands), R27 (who owns a run), R30 (edits of
the context), R31 (what an answer is bound to)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.engine import executor
from killick.engine.signals import Signal
from killick.errors import (
    AlreadyAnswered,
    AnswerRefused,
    DurationRefused,
    RunBusy,
    RunUnknown,
    StoreUnavailable,
    ValueRefused,
)
from killick.model import events as e
from killick.store import SqliteStore
from processes import Processes, kinds, record, steps, told


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


def park(kd: killick.Client, agent: killick.Agent[None, Any], run: str = "r") -> killick.RunWaiting:
    """Run until the agent waits for somebody."""
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, id=run)
    return waiting.value


DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@killick.tool(effect="at_most_once", name="waits_do")
async def do(what: Any) -> Any:
    DONE.append(what)
    return what


async def taken(processes: Processes, run: str = "r") -> None:
    """Until the run took what came for it."""
    while processes.store.inbox(run):
        await asyncio.sleep(0.01)


# R25: signals -------------------------------------------------------------------------------------


def test_r25_signals_are_no_exceptions() -> None:
    assert issubclass(Signal, BaseException)
    assert not issubclass(Signal, Exception)


class Cleaning:
    """Does a step when its block is left."""

    def __init__(self, run: killick.Run) -> None:
        self.run = run

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None:
        await self.run.call(do, "async with")


@contextlib.asynccontextmanager
async def cleaning(run: killick.Run) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await run.call(do, "asynccontextmanager")


async def goes_on_after_except_exception(run: killick.Run) -> str:
    try:
        await run.ask("well?")
    except Exception:
        await run.call(do, "except Exception")
    return "over"


async def goes_on_after_everything(run: killick.Run) -> str:
    try:
        await run.ask("well?")
    except BaseException:
        DONE.clear()
    with contextlib.suppress(BaseException):
        await run.call(do, "except BaseException")
    with contextlib.suppress(BaseException):
        await run.update(found="nothing")
    with contextlib.suppress(BaseException):
        await run.note("nothing")
    with contextlib.suppress(BaseException):
        run.now()
    with contextlib.suppress(BaseException):
        await run.gather(run.call(do, 1), run.call(do, 2))
    return "over"


async def cleans_in_finally(run: killick.Run) -> str:
    try:
        await run.ask("well?")
    finally:
        await run.call(do, "finally")
    return "over"


async def cleans_in_async_with(run: killick.Run) -> str:
    async with Cleaning(run), cleaning(run):
        await run.ask("well?")
    return "over"


async def returns_in_finally(run: killick.Run) -> str:
    try:
        await run.ask("well?")
    finally:
        return "over"  # noqa: B012


async def tries_again_and_again(run: killick.Run) -> str:
    for _ in range(100):
        try:
            await run.ask("well?")
        except BaseException:
            continue
        else:
            break
    return "over"


CLEANERS = [
    goes_on_after_except_exception, goes_on_after_everything, cleans_in_finally, cleans_in_async_with,
    returns_in_finally, tries_again_and_again,
]  # fmt: skip


def blocking(cleaner: Any) -> Any:
    """The same as blocking code."""

    def goes_on_after_everything(run: killick.SyncRun) -> str:
        try:
            run.ask("well?")
        except BaseException:
            DONE.clear()
        for act in (lambda: run.call(do, 1), lambda: run.update(a=1), lambda: run.note(1), run.now):
            with contextlib.suppress(BaseException):
                act()
        return "over"

    return goes_on_after_everything


@pytest.mark.parametrize("cleaner", [*CLEANERS, blocking], ids=lambda cleaner: str(cleaner.__name__))
@pytest.mark.parametrize("how", ["evicted", "closed", "paused", "cancelled"])
def test_r25_nothing_is_recorded_or_applied_while_code_unwinds(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, cleaner: Any, how: str
) -> None:
    monkeypatch.setattr("killick.engine.execution.UNWIND_SECONDS", 0.1)
    agent = killick.agent(blocking(cleaner) if cleaner is blocking else cleaner)
    kd = processes.new()
    park(kd, agent)
    before = record(kd, "r")
    if how == "closed":
        kd.close()
        kd = processes.new()
    elif how == "paused":
        kd.pause("r")
        kd.advance("r")
        before += ["run.paused"]
    elif how == "cancelled":
        kd.cancel("r")
        with pytest.raises(killick.errors.RunCancelled):
            kd.run(agent, id="r")
        before += ["cancel.requested", "run.cancelled"]
    else:
        other = processes.new()
        other.edit.set("r", x=1)
        before += ["context.changed"]
        kd.advance("r")  # finds that the head moved, and drops what it had in memory
    assert DONE == []
    assert [kind for kind in record(kd, "r") if kind != "wait.closed"] == before
    assert kd.info("r").status == {"paused": "paused", "cancelled": "cancelled"}.get(how, "waiting")


def test_r25_a_run_parks_only_when_every_live_branch_waits(processes: Processes) -> None:
    @killick.tool(effect="reads")
    async def slow(n: int) -> int:
        await asyncio.sleep(0.01)
        DONE.append(n)
        return n

    @killick.agent(name="half_waits")
    async def agent(run: killick.Run) -> list[Any]:
        async def works() -> int:
            for n in range(5):
                await run.call(slow, n)
            return 5

        answer, count = await run.gather(run.ask("well?"), works())
        return [answer.kind, count]

    kd = processes.new()
    park(kd, agent)
    assert DONE == [0, 1, 2, 3, 4]
    kd.answer("r", "approve")
    assert kd.run(agent, id="r") == ["approve", 5]
    assert len(DONE) == 5


def test_r25_blocking_branches_park_only_when_every_one_waits(processes: Processes) -> None:
    @killick.tool(effect="reads")
    def slow_in_thread(n: int) -> int:
        threading.Event().wait(0.01)
        DONE.append(n)
        return n

    @killick.agent(name="half_waits_in_threads")
    def agent(run: killick.SyncRun) -> list[Any]:
        def works() -> Any:
            for n in range(5):
                run.call(slow_in_thread, n)
            return 5

        return [getattr(each, "kind", each) for each in run.gather(lambda: run.ask("well?"), works)]

    kd = processes.new()
    park(kd, agent)
    assert DONE == [0, 1, 2, 3, 4]
    assert kinds(kd, "r").count("run.taken") == 1
    kd.answer("r", "approve")
    assert kd.run(agent, id="r") == ["approve", 5]
    assert len(DONE) == 5


def test_r25_blocking_branches_without_steps_do_not_park_a_run(processes: Processes) -> None:
    @killick.agent(name="only_computes")
    def agent(run: killick.SyncRun) -> list[int]:
        return list(run.gather(*[lambda: 1] * 5))

    assert processes.new().run(agent, id="r") == [1] * 5


def test_r25_woken_soon_it_goes_on_without_replay_and_after_eviction_it_replays(processes: Processes) -> None:
    entered: list[str] = []

    @killick.agent(name="warm")
    async def agent(run: killick.Run) -> str:
        entered.append("top")
        await run.call(do, 1)
        await run.ask("well?")
        await run.ask("sure?")
        return "over"

    kd = processes.new()
    park(kd, agent)
    kd.answer("r", "approve")
    park(kd, agent)
    assert entered == ["top"]
    other = processes.new()
    other.answer("r", "approve")
    assert other.run(agent, id="r") == "over"
    assert entered == ["top", "top"]
    assert DONE == [1]


def test_r25_only_so_many_runs_stay_warm(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(executor, "WARM_MAX", 2)

    @killick.agent(name="evicted")
    async def agent(run: killick.Run) -> str:
        entered.append(run.id)
        await run.ask("well?")
        return run.id

    kd = processes.new()
    runs = ["a", "b", "c", "d"]
    for run in runs:
        park(kd, agent, run)
    for run in reversed(runs):
        kd.answer(run, "approve")
        assert kd.run(agent, id=run) == run
    assert entered == ["a", "b", "c", "d", "b", "a"]


def test_the_code_of_a_warm_run_whose_inbox_cannot_be_read_unwinds(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwound = list[str]()

    @killick.agent(name="warm_waits")
    async def waits(run: killick.Run) -> str:
        try:
            await run.wait("go")
        finally:
            unwound.append(run.id)
        return "done"

    kd = processes.new()
    store, inbox = kd.runtime.store, kd.runtime.store.inbox
    failing = [StoreUnavailable(store.place, "failed on purpose")]

    def fails(*args: Any, **options: Any) -> Any:
        if failing:
            raise failing.pop()
        return inbox(*args, **options)

    async def story() -> None:
        own = kd.as_async()
        await own.start(waits, id="r")
        assert (await own.advance("r")).status == "waiting"
        await own.send("r", "go")
        monkeypatch.setattr(store, "inbox", fails)
        with pytest.raises(StoreUnavailable):
            await own.advance("r")
        while not unwound:
            await asyncio.sleep(0)
        assert (await own.advance("r")).result == "done"

    asyncio.run(asyncio.wait_for(story(), 60))


def test_r25_a_warm_run_that_another_process_went_on_with_is_dropped(processes: Processes) -> None:
    @killick.agent(name="taken_elsewhere")
    async def agent(run: killick.Run) -> str:
        first = await run.ask("well?")
        second = await run.ask("sure?")
        return f"{first.by} {second.by}"

    here, there = processes.new(), processes.new()
    park(here, agent)
    there.answer("r", "approve", by="ann")
    park(there, agent)
    here.answer("r", "approve", by="bob")
    assert here.run(agent, id="r") == "ann bob"
    assert there.run(agent, id="r") == "ann bob"


def test_r25_what_an_agent_returns_after_a_pause_is_discarded(processes: Processes) -> None:
    kd = processes.new()

    @killick.tool(effect="reads")
    async def pauses() -> None:
        kd.pause("r", by="ann", because="lunch")
        await taken(processes)

    @killick.agent(name="pauses_itself")
    async def agent(run: killick.Run) -> str:
        try:
            await run.call(pauses)
            await run.call(do, "after")
        except BaseException:
            return "caught"
        return "over"

    with pytest.raises(killick.errors.RunPaused):
        kd.run(agent, id="r")
    assert (DONE, kd.info("r").status) == ([], "paused")
    [paused] = told(kd, "r", e.RunPaused)
    assert (paused.event.by, paused.data["because"]) == ("ann", "lunch")
    kd.resume("r")
    assert kd.run(agent, id="r") == "over"
    assert DONE == ["after"]


# waits and deadlines ------------------------------------------------------------------------------


def test_r25_a_question_is_told_to_those_who_are_asked(processes: Processes) -> None:
    @killick.agent(name="asks")
    async def agent(run: killick.Run) -> Any:
        answer = await run.ask("Pay 1250?", to=["managers", "cfo"], timeout="72h", options=["now", "later"])
        return [answer.kind, answer.value, answer.by, answer.comment, answer.approved, answer.expired]

    kd = processes.new()
    kd.start(agent, id="r")
    assert kd.advance("r").status == "waiting"
    [wait] = kd.inbox()
    assert (wait.id, wait.run, wait.step, wait.waits_for) == ("r:1", "r", "1", "answer")
    assert (wait.prompt, wait.to, wait.options) == ("Pay 1250?", ("managers", "cfo"), ("now", "later"))
    assert wait.deadline_us == wait.since_us + 72 * 3600 * 1_000_000
    assert (kd.inbox(to="cfo"), kd.inbox(to="nobody")) == ([wait], [])
    assert kd.info("r").waits == (wait,)
    kd.answer("r:1", "respond", value="later", by="ann", comment="not today")
    assert kd.run(agent, id="r") == ["respond", "later", "ann", "not today", False, False]
    assert kd.inbox() == []


def test_r25_run_waiting_says_what_for(processes: Processes) -> None:
    @killick.agent(name="asks_managers")
    async def agent(run: killick.Run) -> None:
        await run.ask("Pay 1250?", to="managers")

    waiting = park(processes.new(), agent)
    assert [wait.prompt for wait in waiting.waits] == ["Pay 1250?"]
    assert "Pay 1250?" in str(waiting)
    assert "managers" in str(waiting)


@pytest.mark.parametrize("blocks", [False, True])
def test_r25_a_question_with_a_deadline_still_parks_kd_run(processes: Processes, blocks: bool) -> None:
    """Whoever calls kd.run learns that a person is asked, instead of hanging for three days."""

    @killick.agent(name="asks_for_days")
    async def agent(run: killick.Run) -> str:
        return (await run.ask("Pay?", timeout="72h", default="reject")).kind

    @killick.agent(name="waits_for_days")
    async def waits(run: killick.Run) -> Any:
        return await run.wait("paid", timeout="72h", default="no")

    chosen: killick.Agent[None, Any] = agent if blocks else waits
    kd = processes.new()
    park(kd, chosen)
    assert kd.info("r").wake_at_us is not None


DEFAULTS: list[tuple[Any, tuple[str, Any]]] = [
    ("reject", ("reject", None)), ("approve", ("approve", None)), (17, ("respond", 17)), (None, ("respond", None)),
]  # fmt: skip


@pytest.mark.parametrize(("default", "expected"), DEFAULTS)
def test_r25_when_nobody_answers_in_time_the_default_counts_and_says_so(
    processes: Processes, default: Any, expected: tuple[str, Any]
) -> None:
    @killick.agent(name="asks_by_default")
    async def agent(run: killick.Run) -> list[Any]:
        answer = await run.ask("well?", timeout="72h", default=default)
        await run.ask("sure?")
        return [answer.kind, answer.value, answer.expired]

    kd = processes.new()
    kd.start(agent, id="r")
    kd.advance("r")
    processes.clock.advance(72 * 3600 + 1)
    kd.advance("r")
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == [*expected, True]


def test_r25_without_a_default_the_deadline_raises_and_so_it_does_on_replay(processes: Processes) -> None:
    seen: list[str] = []

    @killick.agent(name="expires")
    async def agent(run: killick.Run) -> str:
        for wait in (run.ask("well?", timeout="2h"), run.wait("paid", timeout=60)):
            try:
                await wait
            except killick.errors.WaitExpired as expired:
                seen.append(str(expired))
        await run.ask("sure?")
        return "over"

    kd = processes.new()
    kd.start(agent, id="r")
    for _ in range(3):
        kd.advance("r")
        processes.clock.advance(2 * 3600 + 1)
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == "over"
    assert len(seen) == 4
    assert seen[:2] == seen[2:]
    assert "well?" in seen[0]
    assert "paid" in seen[1]


def test_r25_an_answer_at_the_deadline_counts_once(processes: Processes) -> None:
    @killick.agent(name="late")
    async def agent(run: killick.Run) -> str:
        return (await run.ask("well?", timeout="1h", default="reject")).kind

    kd = processes.new()
    kd.start(agent, id="r")
    kd.advance("r")
    processes.clock.advance(3600)
    kd.answer("r", "approve")
    assert kd.run(agent, id="r") in ("approve", "reject")
    assert kinds(kd, "r").count("wait.closed") == 1


def test_r25_sleep_takes_days_on_record_and_no_time_here(processes: Processes) -> None:
    seen: list[timedelta] = []

    @killick.agent(name="sleeps")
    async def agent(run: killick.Run) -> None:
        before = run.now()
        await run.sleep("3d 2h")
        await run.sleep(timedelta(hours=1).total_seconds())
        await run.sleep_until(run.now() + timedelta(days=365))
        await run.sleep_until(datetime(2001, 1, 1, tzinfo=UTC))
        await run.sleep(0)
        seen.append(run.now() - before)

    kd = processes.new()
    kd.run(agent, id="r")
    assert seen[0] >= timedelta(days=368, hours=3)
    assert list(steps(kd, "r").values()) == ["sleep"] * 5


def test_r25_a_sleeping_run_is_due_when_its_time_has_come(processes: Processes) -> None:
    @killick.agent(name="sleeps_once")
    async def agent(run: killick.Run) -> str:
        await run.sleep("1h")
        return "over"

    kd = processes.new()
    kd.start(agent, id="r")
    assert [advanced.status for advanced in kd.advance_due()] == ["waiting"]
    assert kd.advance_due() == []
    assert kd.info("r").wake_at_us == kd.info("r").waits[0].deadline_us
    processes.clock.advance(3601)
    assert [(advanced.status, advanced.result) for advanced in processes.new().advance_due()] == [("completed", "over")]


@pytest.mark.parametrize("text", ["soon", "", "5 parsecs", "-3h", "3", None, float("nan"), -1, True])
def test_r25_a_bad_duration_is_refused_and_no_step_is_taken(processes: Processes, text: Any) -> None:
    @killick.agent(name="bad_duration")
    async def agent(run: killick.Run) -> None:
        await run.sleep(text)

    kd = processes.new()
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id="r")
    assert failed.value.failure.is_a(DurationRefused)
    assert steps(kd, "r") == {}


@pytest.mark.parametrize("text", ["soon", "5 parsecs"])
def test_r25_a_bad_timeout_is_refused_and_no_step_is_taken(processes: Processes, text: Any) -> None:
    @killick.agent(name="bad_timeout")
    async def agent(run: killick.Run) -> None:
        await run.ask("well?", timeout=text)

    kd = processes.new()
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id="r")
    assert failed.value.failure.is_a(DurationRefused)
    assert steps(kd, "r") == {}


# R26: answers -------------------------------------------------------------------------------------


@killick.agent(name="asks_twice")
async def asks_twice(run: killick.Run) -> list[Any]:
    first = await run.ask("well?")
    second = await run.ask("sure?")
    return [first.by, second.by]


def test_r26_the_first_answer_wins_and_the_second_is_told_who_and_when(processes: Processes) -> None:
    kd = processes.new()
    park(kd, asks_twice)
    kd.answer("r:1", "approve", by="ann")
    before = kinds(kd, "r"), len(kd.runtime.store.messages("r"))
    with pytest.raises(AlreadyAnswered, match=r"ann at 20\d\d-\d\d-\d\dT") as refused:
        kd.answer("r:1", "reject", by="bob")
    assert refused.value.by == "ann"
    assert (kinds(kd, "r"), len(kd.runtime.store.messages("r"))) == before
    park(kd, asks_twice)
    with pytest.raises(AlreadyAnswered, match="ann"):
        kd.answer("r:1", "reject", by="bob")
    kd.answer("r:2", "approve", by="cyd")
    assert kd.run(asks_twice, id="r") == ["ann", "cyd"]


def test_r26_of_many_who_answer_at_once_one_wins(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db"), durability="process") as kd:
        park(kd, asks_twice)
        outcomes: list[str] = []

        def answer(by: str) -> None:
            try:
                kd.answer("r:1", "approve", by=by)
                outcomes.append(by)
            except AlreadyAnswered as refused:
                outcomes.append(f"not {refused.by}")

        threads = [threading.Thread(target=answer, args=(f"p{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        [winner] = [outcome for outcome in outcomes if not outcome.startswith("not")]
        assert sorted(outcomes) == sorted([winner, *[f"not {winner}"] * 7])
        park(kd, asks_twice)
        kd.answer("r", "approve", by="last")
        assert kd.run(asks_twice, id="r") == [winner, "last"]


WRONG_ANSWERS: list[tuple[str, str, dict[str, Any], type[Exception]]] = [
    ("nobody", "approve", {}, RunUnknown),
    ("nobody:1", "approve", {}, RunUnknown),
    ("r:9", "approve", {}, AnswerRefused),
    ("r:1", "perhaps", {}, AnswerRefused),
    ("r:1", "happened", {}, AnswerRefused),
    ("r:1", "respond", {}, AnswerRefused),
    ("r:1", "respond", {"value": "never"}, AnswerRefused),
    ("r:1", "reject", {"value": object()}, ValueRefused),
    ("r:1", "reject", {"comment": object()}, ValueRefused),
    ("r:1", "approve", {}, AnswerRefused),
]


@pytest.mark.parametrize(("wait", "verb", "options", "error"), WRONG_ANSWERS)
def test_r26_a_wrong_answer_is_refused_by_one_clear_error_and_changes_nothing(
    processes: Processes, wait: str, verb: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    @killick.agent(name="asks_with_options")
    async def agent(run: killick.Run) -> Any:
        return (await run.ask("When?", options=["now", "later"])).value

    kd = processes.new()
    park(kd, agent)
    before = kinds(kd, "r"), len(kd.runtime.store.messages("r"))
    with pytest.raises(error):
        kd.answer(wait, verb, **options)
    assert (kinds(kd, "r"), len(kd.runtime.store.messages("r"))) == before
    kd.answer("r:1", "respond", value="now")
    assert kd.run(agent, id="r") == "now"


def test_r26_a_run_is_enough_only_where_one_wait_is_open(processes: Processes) -> None:
    @killick.agent(name="asks_two_at_once")
    async def agent(run: killick.Run) -> list[Any]:
        answers = await run.gather(run.ask("one?"), run.ask("two?"))
        return [answer.by for answer in answers]

    kd = processes.new()
    assert len(park(kd, agent).waits) == 2
    with pytest.raises(AnswerRefused, match=r"r:1\.1\.1.*r:1\.2\.1"):
        kd.answer("r", "approve")
    kd.answer("r:1.2.1", "approve", by="two")
    park(kd, agent)
    kd.answer("r", "approve", by="one")
    assert kd.run(agent, id="r") == ["one", "two"]


def test_r26_two_answers_that_came_while_nobody_looked_are_both_taken(processes: Processes) -> None:
    @killick.agent(name="asks_two")
    async def agent(run: killick.Run) -> list[Any]:
        answers = await run.gather(run.ask("one?"), run.ask("two?"))
        return [answer.by for answer in answers]

    park(processes.new(), agent)
    kd = processes.new()
    kd.answer("r:1.2.1", "approve", by="two")
    kd.answer("r:1.1.1", "approve", by="one")
    assert processes.new().run(agent, id="r") == ["one", "two"]


# R26: messages ------------------------------------------------------------------------------------


@killick.agent(name="listens")
async def listens(run: killick.Run) -> list[Any]:
    first = [await run.wait("a") for _ in range(3)]
    return [*first, *[await run.wait("b") for _ in range(2)]]


@pytest.mark.parametrize("warm", [True, False])
def test_r26_messages_are_first_in_first_out_per_name_and_none_is_lost(processes: Processes, warm: bool) -> None:
    kd = processes.new()
    kd.start(listens, id="r")
    kd.send("r", "b", "b1")
    kd.send("r", "a", "a1")
    kd.send("r", "noise", "never asked for")
    kd.advance("r")
    kd.send("r", "a", "a2")
    if not warm:
        kd = processes.new()
    kd.advance("r")
    kd.send("r", "b", "b2")
    kd.send("r", "a", "a3")
    assert kd.run(listens, id="r") == ["a1", "a2", "a3", "b1", "b2"]
    assert [message.name for message in kd.runtime.store.inbox("r")] == ["noise"]


def test_r26_a_message_counts_once_by_its_id(processes: Processes) -> None:
    kd = processes.new()
    kd.start(listens, id="r")
    for body in ("a1", "a1 again", "a1 once more"):
        kd.send("r", "a", body, id="order-17")
    kd.advance("r")
    kd.send("r", "a", "after it was taken", id="order-17")
    kd.send("r", "a", "a2")
    kd.send("r", "a", "a3")
    kd.send("r", "b", "b1")
    kd.send("r", "b", "b2")
    assert kd.run(listens, id="r") == ["a1", "a2", "a3", "b1", "b2"]


def test_r26_two_branches_that_wait_for_the_same_name_get_one_message_each(processes: Processes) -> None:
    @killick.agent(name="listens_twice")
    async def agent(run: killick.Run) -> list[Any]:
        return list(await run.gather(run.wait("a"), run.wait("a")))

    kd = processes.new()
    park(kd, agent)
    kd.send("r", "a", 1)
    park(kd, agent)
    kd.send("r", "a", 2)
    assert processes.new().run(agent, id="r") == [1, 2]


def test_r26_a_wait_reads_the_message_that_it_takes_and_not_the_whole_inbox(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    @killick.agent(name="listens_long")
    async def agent(run: killick.Run) -> list[Any]:
        return [await run.wait("a") for _ in range(50)]

    kd = processes.new()
    kd.start(agent, id="r")
    for number in range(200):
        kd.send("r", "a", number)
    inbox, found = kd.runtime.store.inbox, list[Any]()

    def counting(*args: Any, **options: Any) -> Any:
        found.extend(messages := inbox(*args, **options))
        return messages

    monkeypatch.setattr(kd.runtime.store, "inbox", counting)
    assert kd.run(agent, id="r") == [*range(50)]
    assert len(found) < 50 + 20  # and a few once, on opening


def _after_first_inbox(kd: killick.Client, monkeypatch: pytest.MonkeyPatch, then: Any) -> list[Any]:
    """Calls `then` when the client has read an inbox for the first time; returns what it reads."""
    inbox, reads = kd.runtime.store.inbox, list[Any]()

    def read(*args: Any, **options: Any) -> Any:
        reads.append(inbox(*args, **options))
        if len(reads) == 1:
            then()
        return reads[-1]

    monkeypatch.setattr(kd.runtime.store, "inbox", read)
    return reads


def test_r26_a_woken_run_reads_its_inbox_once(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.agent(name="listens_once")
    async def agent(run: killick.Run) -> Any:
        return await run.wait("a")

    park(processes.new(), agent)
    kd = processes.new()
    kd.send("r", "a", 1)
    reads = _after_first_inbox(kd, monkeypatch, lambda: None)
    assert kd.run(agent, id="r") == 1
    assert len(reads) == 1


@pytest.mark.parametrize("kind", ["answer", "message"])
def test_r26_what_comes_after_a_woken_run_read_its_inbox_wakes_it_as_well(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    @killick.agent(name=f"late_{kind}")
    async def agent(run: killick.Run) -> Any:
        if kind == "answer":
            return (await run.ask("well?", to=("ann", "bo"), need=2)).kind
        return list(await run.gather(run.wait("a"), run.wait("b")))

    def tell(which: int) -> None:
        teller = processes.new()
        if kind == "answer":
            teller.answer("r", "approve", by=("ann", "bo")[which])
        else:
            teller.send("r", "ab"[which], which)

    park(processes.new(), agent)
    tell(0)
    kd = processes.new()
    reads = _after_first_inbox(kd, monkeypatch, lambda: tell(1))
    assert kd.run(agent, id="r") == ("approve" if kind == "answer" else [0, 1])
    assert len(reads[0]) == 1


def test_r26_messages_that_are_there_already_are_taken_in_far_fewer_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @killick.agent(name="waits_takes_many")
    async def takes_many(run: killick.Run, count: int) -> list[int]:
        return [await run.wait("word") for _ in range(count)]

    commits: list[int] = []
    append = SqliteStore.append

    def counted(store: SqliteStore, items: Any, **options: Any) -> Any:
        commits.append(len(items))
        return append(store, items, **options)

    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.start(takes_many, 300, id="r")
        for number in range(300):
            kd.send("r", "word", number)
        monkeypatch.setattr(SqliteStore, "append", counted)
        assert kd.run(takes_many, 300, id="r") == [*range(300)]
        assert kd.runtime.store.inbox("r") == []
        assert kd.store.verify().problems == []
    assert len(commits) < 150


@pytest.mark.slow
def test_r26_a_long_inbox_lets_other_tasks_of_the_loop_run(tmp_path: Path) -> None:
    ticks: list[int] = []

    @killick.agent(name="waits_beside")
    async def beside(run: killick.Run, count: int) -> int:
        for number in range(count):
            await run.wait("word")
            ticks.append(number)
        return count

    async def main() -> int:
        async with killick.open_async(str(tmp_path / "killick.db")) as kd:
            await kd.start(beside, 50, id="r")
            for _ in range(50):
                await kd.send("r", "word", None)
            running = asyncio.ensure_future(kd.run(beside, 50, id="r"))
            seen: set[int] = set()
            while not running.done():
                seen.add(len(ticks))
                await asyncio.sleep(0)
            return len(seen)

    assert asyncio.run(main()) > 25


def test_r26_many_unread_messages_hide_neither_an_answer_nor_a_command(processes: Processes) -> None:
    @killick.agent(name="overrun")
    async def agent(run: killick.Run) -> str:
        return (await run.ask("well?")).kind

    kd = processes.new()
    park(kd, agent)
    from killick.engine.control.inbox import delivery

    at = processes.clock.now_us()
    noise = [delivery(kd.runtime.log, "r", "noise", n, id=f"n{n}", by=None, at_us=at) for n in range(10_050)]
    kd.runtime.store.deliver(noise)
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == "approve"


@dataclass
class Paid:
    amount: int


def test_r26_a_message_comes_as_the_type_that_is_asked_for(processes: Processes) -> None:
    @killick.agent(name="typed_wait")
    async def agent(run: killick.Run) -> list[Any]:
        paid = await run.wait("paid", returns=Paid)
        assert isinstance(paid, Paid)
        answer = await run.ask("how much?", returns=int)
        return [paid.amount, answer.value]

    kd = processes.new()
    park(kd, agent)
    kd.send("r", "paid", Paid(5))
    park(kd, agent)
    kd.answer("r", "respond", value=7)
    assert processes.new().run(agent, id="r") == [5, 7]


def test_r31_an_answer_that_does_not_fit_is_refused_to_whoever_gives_it(processes: Processes) -> None:
    @killick.agent(name="typed_ask")
    async def agent(run: killick.Run) -> Any:
        return (await run.ask("how much?", returns=int)).value

    kd = processes.new()
    park(kd, agent)
    before = kinds(kd, "r"), len(kd.runtime.store.messages("r"))
    with pytest.raises(AnswerRefused):
        kd.answer("r", "respond", value="many")
    assert (kinds(kd, "r"), len(kd.runtime.store.messages("r"))) == before
    kd.answer("r", "respond", value=7)
    assert kd.run(agent, id="r") == 7


def test_r26_a_message_that_does_not_fit_fails_the_step_and_strands_nobody(processes: Processes) -> None:
    seen: list[str] = []

    @killick.agent(name="misfit")
    async def agent(run: killick.Run) -> str:
        try:
            await run.wait("paid", returns=Paid)
        except ValueRefused as refused:
            seen.append(str(refused))
        await run.ask("well?")
        return "over"

    kd = processes.new()
    park(kd, agent)
    kd.send("r", "paid", "nonsense")
    park(kd, agent)
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == "over"
    assert len(seen) == 2
    assert seen[0] == seen[1]


WRONG_MESSAGES: list[tuple[str, str, Any, type[Exception]]] = [
    ("nobody", "a", 1, RunUnknown), ("r", "a", object(), ValueRefused), ("r", "killick.command", {}, AnswerRefused),
]  # fmt: skip


@pytest.mark.parametrize(("run", "name", "body", "error"), WRONG_MESSAGES)
def test_r26_a_wrong_message_is_refused_and_changes_nothing(
    processes: Processes, run: str, name: str, body: Any, error: type[Exception]
) -> None:
    kd = processes.new()
    park(kd, listens)
    with pytest.raises(error):
        kd.send(run, name, body)
    assert kd.runtime.store.messages("r") == []


def test_r26_what_people_say_is_heard_at_the_same_place_on_replay(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.agent(name="hears")
    async def agent(run: killick.Run) -> None:
        heard = [await run.remarks()]
        await run.ask("one?")
        heard.append(await run.remarks())
        heard.append(await run.remarks())
        await run.ask("two?")
        heard.append(await run.remarks())
        await run.ask("three?")
        seen.append(heard)

    kd = processes.new()
    kd.start(agent, id="r")
    kd.say("r", "early", by="ann")
    kd.advance("r")
    kd.say("r", "first")
    kd.say("r", "second")
    for _ in range(3):
        kd = processes.new()
        kd.answer("r", "approve")
        kd.advance("r")
    assert seen == [[["early"], ["first", "second"], [], []]]


def test_r26_an_agent_sends_to_another_run_once(processes: Processes) -> None:
    @killick.agent(name="sends")
    async def sender(run: killick.Run) -> str:
        await run.send("r", "a", {"n": 1})
        await run.ask("well?")
        try:
            await run.send("nobody", "a")
        except killick.StepFailed as failed:
            return str(failed.is_a(RunUnknown))
        return "no error"

    kd = processes.new()
    kd.start(listens, id="r")
    park(kd, sender, "s")
    kd.answer("s", "approve")
    assert processes.new().run(sender, id="s") == "True"
    [message] = kd.runtime.store.messages("r")
    assert (message.name, message.by) == ("a", "s")
    assert steps(kd, "s")["1"] == "send"


# R26: commands ------------------------------------------------------------------------------------


@killick.agent(name="commanded")
async def commanded(run: killick.Run) -> Any:
    answer = await run.ask("well?")
    return [answer.kind, dict(run.context)]


def test_r26_commands_on_a_run_that_nobody_holds_are_appended_at_once(processes: Processes) -> None:
    kd = processes.new()
    park(kd, commanded)
    before = kinds(kd, "r")
    kd.edit.set("r", by="ann", x=1)
    kd.edit.prioritize("r", 7, by="ann")
    kd.pause("r", by="ann", because="lunch")
    assert record(kd, "r")[-3:] == ["context.changed", "run.prioritized", "run.paused"]
    assert len(kinds(kd, "r")) == len(before) + 3
    info = kd.info("r")
    assert (info.status, info.priority, info.holder) == ("paused", 7, None)
    kd.answer("r", "approve")
    with pytest.raises(killick.errors.RunPaused):
        kd.run(commanded, id="r")
    assert kd.resume("r", by="bob") == "resumed"
    assert kd.run(commanded, id="r") == ["approve", {"x": 1}]


def command_of(kd: killick.Client, command: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(kd if command in ("pause", "cancel") else kd.edit, command)
    return found


@pytest.mark.parametrize("command", ["pause", "cancel", "set", "prioritize"])
def test_r26_commands_on_a_held_run_come_through_the_inbox_and_are_obeyed(processes: Processes, command: str) -> None:
    started, go = threading.Event(), threading.Event()

    @killick.tool(effect="reads", name="held_tool")
    def held() -> None:
        started.set()
        go.wait(300)

    @killick.agent(name="held")
    async def agent(run: killick.Run) -> Any:
        await run.call(held)
        await run.decided("and then?", "on")
        return dict(run.context)

    kd = processes.new()
    outcome: list[Any] = []

    def drive() -> None:
        try:
            outcome.append(kd.run(agent, id="r"))
        except killick.KillickError as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=drive)
    thread.start()
    assert started.wait(300)
    commander = processes.new()
    options: dict[str, Any] = {"set": {"x": 1}, "prioritize": {"priority": 7}}.get(command, {})
    command_of(commander, command)("r", by="ann", **options)
    asyncio.run(asyncio.wait_for(taken(processes), 300))
    go.set()
    thread.join(300)
    expected = {"pause": "RunPaused", "cancel": "RunCancelled", "set": {"x": 1}, "prioritize": {}}
    assert outcome == [expected[command]]
    [message] = kd.runtime.store.messages("r")
    assert (message.name, message.by) == ("killick.command", "ann")
    if command == "prioritize":
        assert kd.info("r").priority == 7


@pytest.mark.parametrize("command", ["pause", "cancel", "set", "prioritize"])
def test_r26_commands_on_an_unknown_or_ended_run_are_refused_and_change_nothing(
    processes: Processes, command: str
) -> None:
    @killick.agent(name="over")
    async def agent(run: killick.Run) -> None: ...

    kd = processes.new()
    kd.run(agent, id="r")
    before = kinds(kd, "r")
    options: dict[str, Any] = {"set": {"x": 1}, "prioritize": {"priority": 7}}.get(command, {})
    with pytest.raises(RunUnknown):
        command_of(kd, command)("nobody", **options)
    with pytest.raises(AnswerRefused, match="completed"):
        command_of(kd, command)("r", **options)
    with pytest.raises(RunUnknown):
        kd.resume("nobody")
    with pytest.raises(AnswerRefused):
        kd.resume("r")
    assert kinds(kd, "r") == before


def test_r26_resume_says_what_it_did_and_changes_nothing_where_nothing_holds_a_run_back(processes: Processes) -> None:
    kd = processes.new()
    park(kd, commanded)
    before = kinds(kd, "r")
    assert "nothing" in kd.resume("r")
    assert kinds(kd, "r") == before


def test_r26_resuming_a_failed_run_goes_on_at_the_step_that_failed(processes: Processes) -> None:
    broken = [True]

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1))
    async def fails_once() -> str:
        if broken.pop() if broken else False:
            raise LookupError("broken")
        return "mended"

    @killick.agent(name="fails_and_resumes")
    async def agent(run: killick.Run) -> list[Any]:
        return [await run.call(do, 1), await run.call(fails_once)]

    kd = processes.new()
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id="r")
    assert failed.value.step == "2"
    assert "step 2" in kd.resume("r", by="ann")
    assert kd.run(agent, id="r") == [1, "mended"]
    assert DONE == [1]


def test_r26_a_cancelled_run_is_over_and_its_wait_is_not_to_be_answered(processes: Processes) -> None:
    kd = processes.new()
    park(kd, commanded)
    kd.cancel("r", by="ann", because="obsolete")
    with pytest.raises(killick.errors.RunCancelled):
        kd.run(commanded, id="r")
    assert kd.inbox() == []
    with pytest.raises(AnswerRefused):
        kd.answer("r", "approve")
    with pytest.raises(killick.errors.RunCancelled):
        processes.new().run(commanded, id="r")


# R27: who owns a run ------------------------------------------------------------------------------

HOLDER = """
    import sys, time
    import killick

    @killick.tool(effect="idempotent", name="hangs")
    def hangs(n: int, key: killick.Key = killick.KEY) -> int:
        print("in the tool", flush=True)
        if sys.argv[2] == "hang":
            time.sleep(60)
        return n

    @killick.agent(name="owned")
    async def owned(run: killick.Run) -> list[int]:
        return [await run.call(hangs, n) for n in range(2)]

    if __name__ == "__main__":
        with killick.open(sys.argv[1]) as kd:
            print(kd.run(owned, id="r"), flush=True)
"""


def owned_agent() -> killick.Agent[None, list[int]]:
    @killick.tool(effect="idempotent", name="hangs")
    def hangs(n: int, key: killick.Key = killick.KEY) -> int:
        DONE.append(n)
        return n

    @killick.agent(name="owned")
    async def owned(run: killick.Run) -> list[int]:
        return [await run.call(hangs, n) for n in range(2)]

    return owned


def test_r27_a_run_is_busy_while_its_holder_lives_and_is_taken_over_at_once_when_it_was_killed(tmp_path: Path) -> None:
    script, place = tmp_path / "holder.py", str(tmp_path / "killick.db")
    script.write_text(textwrap.dedent(HOLDER))
    holder = subprocess.Popen([sys.executable, str(script), place, "hang"], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == "in the tool\n"
        agent = owned_agent()
        with killick.open(place) as kd:
            before = kinds(kd, "r")
            with pytest.raises(RunBusy):
                kd.run(agent, id="r")
            assert kinds(kd, "r") == before
            assert kd.info("r").holder is not None
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert kd.run(agent, id="r") == [0, 1]
            assert DONE == [0, 1]
            assert [taken.event.epoch for taken in told(kd, "r", e.RunTaken)] == [1, 2]
            assert kd.store.verify().problems == []


def test_r27_two_clients_of_one_file_do_not_share_a_run(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    @killick.tool(effect="reads", name="holds_the_run")
    def holds() -> None:
        started.set()
        go.wait(300)

    @killick.agent(name="held_by_one")
    async def agent(run: killick.Run) -> str:
        await run.call(holds)
        return "over"

    place = str(tmp_path / "killick.db")
    with killick.open(place) as one, killick.open(place) as two:
        results: list[str] = []
        thread = threading.Thread(target=lambda: results.append(one.run(agent, id="r")))
        thread.start()
        assert started.wait(300)
        for kd in (one, two):
            with pytest.raises(RunBusy):
                kd.run(agent, id="r")
        go.set()
        thread.join(300)
        assert results == ["over"]
        assert two.run(agent, id="r") == "over"


# R30: the context ---------------------------------------------------------------------------------


@dataclass
class Claim:
    amount: int = 0
    tags: list[str] = field(default_factory=list[str])
    note: str | None = None


def test_r30_an_edit_becomes_visible_when_a_step_returns_and_there_again_on_replay(processes: Processes) -> None:
    seen: list[list[Any]] = []

    @killick.tool(effect="reads", name="edits_meanwhile")
    async def edits() -> None:
        processes.new().edit.set("r", by="ann", amount=7)
        await taken(processes)

    @killick.agent(name="edited_meanwhile", context=Claim)
    async def agent(run: killick.Run[Claim]) -> int:
        path: list[Any] = [run.context.amount]
        seen.append(path)
        await run.update(amount=1)
        path.append(run.context.amount)
        await run.call(edits)
        path.append(run.context.amount)
        await run.update(note="noted")
        path.append((run.context.amount, run.context.note))
        await run.ask("well?")
        path.append(run.context.amount)
        return run.context.amount

    kd = processes.new()
    park(kd, agent)
    kd.edit.set("r", by="bob", amount=9)
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == 9
    assert seen[1][:4] == seen[0][:4]
    assert seen[1] == [0, 1, 7, (7, "noted"), 9]


def test_r30_an_edit_of_a_run_that_waits_is_not_visible_before_the_wait_returns(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.agent(name="edited_while_waiting")
    async def agent(run: killick.Run) -> Any:
        await run.update(a=1)
        seen.append(run.context.a)
        await run.ask("one?")
        seen.append(run.context.a)
        await run.ask("two?")
        return run.context.a

    kd = processes.new()
    park(kd, agent)
    kd.edit.set("r", a=2)
    kd.answer("r", "approve")
    park(processes.new(), agent)
    kd.edit.set("r", a=3)
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == 3
    assert seen == [1, 1, 2, 1, 2]


def test_r30_update_names_the_version_it_saw(processes: Processes) -> None:
    @killick.agent(name="versions", context=Claim)
    async def agent(run: killick.Run[Claim]) -> None:
        await run.update(amount=1)
        await run.ask("well?")
        await run.update(amount=run.context.amount + 1)

    kd = processes.new()
    park(kd, agent)
    kd.edit.set("r", by="ann", amount=10)
    kd.answer("r", "approve")
    processes.new().run(agent, id="r")
    changes = [(change.event.version, change.event.saw, change.event.by) for change in told(kd, "r", e.ContextChanged)]
    assert changes == [(1, 0, "agent"), (2, 1, "agent"), (3, 2, "ann"), (4, 3, "agent")]
    assert kd.state("r").context.document["amount"] == 11
    assert kd.state("r").context.version == 4


def test_r30_an_update_made_before_an_edit_was_seen_names_the_older_version(processes: Processes) -> None:
    edited = asyncio.Event()

    @killick.tool(effect="reads", name="edits_by_another")
    async def edits() -> None:
        processes.new().edit.set("r", by="ann", amount=10)
        await taken(processes)
        edited.set()
        await asyncio.sleep(0.02)

    @killick.agent(name="versions_at_once", context=Claim)
    async def agent(run: killick.Run[Claim]) -> None:
        async def updates() -> None:
            await edited.wait()
            await run.update(note="in between")

        await run.gather(run.call(edits), updates())

    kd = processes.new()
    kd.run(agent, id="r")
    changes = [(change.event.version, change.event.saw, change.event.by) for change in told(kd, "r", e.ContextChanged)]
    assert changes == [(1, 0, "agent"), (2, 1, "ann"), (3, 1, "agent")]
    document = kd.state("r").context.document
    assert (document["amount"], document["note"]) == (10, "in between")


def test_r30_a_context_has_its_declared_type_and_refuses_what_does_not_fit(processes: Processes) -> None:
    @killick.agent(name="typed_context", context=Claim)
    async def agent(run: killick.Run[Claim]) -> Any:
        assert isinstance(run.context, Claim)
        await run.update(amount=5, tags=["a"])
        for wrong in ({"amount": "many"}, {"colour": "red"}, {"amount": object()}):
            with pytest.raises(ValueRefused):
                await run.update(**wrong)
        await run.ask("well?")
        return [run.context.amount, run.context.tags, run.context.note]

    kd = processes.new()
    park(kd, agent)
    assert kinds(kd, "r").count("context.changed") == 2
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == [5, ["a"], None]


@pytest.mark.parametrize("wrong", [{"amount": "many"}, {"colour": "red"}, {"amount": object()}])
def test_r30_an_edit_that_does_not_fit_is_refused_to_whoever_makes_it(
    processes: Processes, wrong: dict[str, Any]
) -> None:
    @killick.agent(name="edited_wrongly", context=Claim)
    async def agent(run: killick.Run[Claim]) -> Any:
        await run.ask("well?")
        return run.context.amount

    kd = processes.new()
    park(kd, agent)
    before = kinds(kd, "r")
    with pytest.raises(ValueRefused):
        kd.edit.set("r", **wrong)
    assert kinds(kd, "r") == before
    kd.answer("r", "approve")
    assert processes.new().run(agent, id="r") == 0


def test_r30_an_untyped_context_is_a_document_with_attributes(processes: Processes) -> None:
    @killick.agent(name="untyped_context")
    async def agent(run: killick.Run) -> Any:
        with pytest.raises(AttributeError, match=r"run\.update"):
            run.context.missing  # noqa: B018
        await run.update(a=1, b={"c": [1, 2]})
        await run.ask("well?")
        return [run.context.a, run.context["b"], sorted(run.context)]

    kd = processes.new()
    park(kd, agent)
    kd.edit.set("r", unset=["a"], z=26)
    kd.answer("r", "approve")
    with pytest.raises(killick.RunFailed, match="'a'"):
        processes.new().run(agent, id="r")


def test_r30_an_older_context_is_migrated_before_code_sees_it(processes: Processes) -> None:
    @dataclass
    class Renamed:
        sum: int = 0
        currency: str = "EUR"

    def rename(document: dict[str, Any]) -> dict[str, Any]:
        return {"sum": document["amount"]}

    def add_currency(document: dict[str, Any]) -> dict[str, Any]:
        return document | {"currency": "USD"}

    @killick.agent(name="migrated", context=Claim)
    async def old(run: killick.Run[Claim]) -> Any:
        await run.ask("well?")
        return run.context.amount

    kd = processes.new()
    park(kd, old)
    kd.answer("r", "approve")

    @killick.agent(name="migrated", context=Renamed, migrations=[rename, add_currency])
    async def new(run: killick.Run[Renamed]) -> Any:
        await run.ask("well?")
        return [run.context.sum, run.context.currency]

    assert processes.new().run(new, id="r") == [0, "USD"]


def test_r30_migrations_reach_what_old_code_and_people_changed(processes: Processes) -> None:
    @dataclass
    class Renamed:
        sum: int = 0

    @killick.agent(name="migrated_changes", context=Claim)
    async def old(run: killick.Run[Claim]) -> Any:
        await run.update(amount=5)
        await run.ask("well?")
        return run.context.amount

    kd = processes.new()
    park(kd, old)
    kd.edit.set("r", amount=6)
    kd.answer("r", "approve")

    def rename(document: dict[str, Any]) -> dict[str, Any]:
        return {"sum": document["amount"]} if "amount" in document else document

    @killick.agent(name="migrated_changes", context=Renamed, migrations=[rename])
    async def new(run: killick.Run[Renamed]) -> Any:
        await run.update(sum=5)
        await run.ask("well?")
        return run.context.sum

    assert processes.new().run(new, id="r") == 6


# R31: what an answer is bound to ------------------------------------------------------------------


def test_r31_an_answer_is_bound_to_what_was_asked(processes: Processes) -> None:
    @killick.agent(name="bound")
    async def agent(run: killick.Run, amount: int) -> str:
        return (await run.ask(f"Pay {amount}?")).kind

    kd = processes.new()
    digests: set[str | None] = set()
    for run, amount in (("a", 1), ("b", 1), ("c", 2)):
        with pytest.raises(killick.RunWaiting):
            kd.run(agent, amount, id=run)
        [opened] = told(kd, run, e.WaitOpened)
        digests.add(opened.event.digest)
    assert None not in digests
    assert len(digests) == 3


def test_r31_an_answer_to_another_question_is_set_aside(processes: Processes) -> None:
    from killick.engine.control.inbox import delivery

    kd = processes.new()
    park(kd, asks_twice)
    [opened] = told(kd, "r", e.WaitOpened)
    forged = {"kind": "approve", "value": None, "comment": None, "digest": "AAAA"}
    where = f"answer:r:1@{opened.seq}"
    kd.runtime.store.deliver(
        [delivery(kd.runtime.log, "r", "killick.answer", forged, id=where, by="eve", at_us=processes.clock.now_us())]
    )
    waiting = park(kd, asks_twice)
    assert [wait.step for wait in waiting.waits] == ["1"]
    kd.answer("r:1", "approve", by="ann")
    park(kd, asks_twice)
    [closed] = told(kd, "r", e.WaitClosed)
    assert closed.event.by == "ann"


def test_r31_the_same_question_again_needs_an_answer_of_its_own(processes: Processes) -> None:
    @killick.agent(name="asks_the_same")
    async def agent(run: killick.Run) -> list[Any]:
        return [(await run.ask("Pay?")).by for _ in range(2)]

    kd = processes.new()
    park(kd, agent)
    kd.answer("r", "approve", by="ann")
    assert [wait.step for wait in park(kd, agent).waits] == ["2"]
    kd.answer("r", "approve", by="bob")
    assert kd.run(agent, id="r") == ["ann", "bob"]


def test_r31_after_a_rewind_old_answers_authorise_nothing(processes: Processes) -> None:
    broken = [True]

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1), name="breaks_after_approval")
    async def breaks() -> None:
        if broken:
            raise LookupError("broken")

    @killick.agent(name="approved_then_rewound")
    async def agent(run: killick.Run) -> Any:
        async def approved() -> Any:
            answer = await run.ask("Pay?")
            return answer.by

        return (await run.gather(approved(), run.call(breaks)))[0]

    kd = processes.new()
    with pytest.raises(killick.RunFailed):
        kd.run(agent, id="r")
    broken.clear()
    kd.resume("r")
    park(kd, agent)
    kd.answer("r", "approve", by="ann")
    assert kd.run(agent, id="r") == "ann"


def test_an_answer_that_came_before_the_code_diverged_wakes_the_run_when_it_is_resumed(tmp_path: Path) -> None:
    wanted: list[str] = []

    @killick.tool(effect="at_most_once")
    async def paid_meanwhile(amount: int) -> int:
        return amount

    @killick.agent
    async def mended(run: killick.Run) -> str:
        if wanted:
            await run.call(paid_meanwhile, 1)
        return (await run.ask("ok?")).kind

    path = str(tmp_path / "killick.db")
    with killick.open(path) as kd:
        kd.start(mended, id="r")
        kd.advance("r")
    wanted.append("another step")
    with killick.open(path) as kd:
        kd.answer("r", "approve")
        assert kd.advance("r").diverged is not None
        wanted.clear()
        kd.resume("r")
        [advanced] = kd.advance_due()
        assert (advanced.status, advanced.result) == ("completed", "approve")


def test_a_run_that_is_over_refuses_what_it_cannot_hear_and_takes_no_offence_at_a_message_it_had() -> None:
    @killick.agent
    async def listens(run: killick.Run) -> str:
        return str(await run.wait("word"))

    with killick.open("memory:") as kd:
        kd.start(listens, id="r")
        kd.send("r", "word", "hi", id="m1")
        kd.advance("r")
        kd.send("r", "word", "hi", id="m1")
        for speak in (lambda: kd.send("r", "word", "again"), lambda: kd.say("r", "hello?")):
            with pytest.raises(killick.KillickError, match=r"over .completed. and accepts no messages"):
                speak()
        assert kd.advance("r").result == "hi", "an ended run is told of, and not taken"


def test_resuming_a_paused_run_does_not_take_back_the_wish_to_end_it() -> None:
    @killick.agent
    async def patient(run: killick.Run) -> str:
        await run.wait("never")
        return "never"

    with killick.open("memory:") as kd:
        kd.start(patient, id="r")
        kd.advance("r")
        kd.pause("r")
        kd.cancel("r")
        kd.resume("r")
        assert kd.advance("r").status == "cancelled"


def test_a_wait_whose_words_were_erased_can_still_be_seen_and_answered() -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        return (await run.ask("A secret?")).kind

    with killick.open("memory:") as kd:
        kd.start(asks, id="r")
        kd.advance("r")
        opened = kd.state("r").fold.facts.waits["1"].opened
        kd.runtime.log.erase(kd.runtime.log.open("r"), at=1, reason="private", seqs=[opened])
        [wait] = kd.inbox()
        assert "erased" in str(wait.prompt)
        kd.answer(wait.id, "approve")
        assert not kd.inbox()
        assert [each.id for each in kd.inbox(answered=True)] == ["r:1"]
        assert kd.advance("r").result == "approve"


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_cancellation_that_waits_for_a_person_is_due_once_and_goes_on_when_answered(
    processes: Processes, *, is_paused: bool
) -> None:
    undone: list[str] = []

    @killick.tool(name="cancelled_in_doubt", compensate=lambda effect: undone.append(effect.key))
    async def pay() -> None:
        raise OSError("gone")

    @killick.agent(name="cancelled_child")
    async def child(run: killick.Run) -> None:
        await run.call(pay)

    @killick.agent(name="cancelled_parent")
    async def parent(run: killick.Run) -> None:
        await (await run.spawn(child)).result()

    kd = processes.new()
    park(kd, parent)
    if is_paused:
        kd.pause("r")
    kd.cancel("r", compensate=True)
    for _ in range(3):
        processes.new().advance_due()
    before = [len(kd.events(run)) for run in ("r", "r/1")]
    assert processes.new().advance_due() == []
    assert [len(kd.events(run)) for run in ("r", "r/1")] == before
    kd.answer("r/1", "happened")
    for _ in range(3):
        processes.new().advance_due()
    assert [kd.info(run).status for run in ("r", "r/1")] == ["cancelled", "cancelled"]
    assert len(undone) == 1
    with pytest.raises(AnswerRefused, match="the run is over"):
        kd.resume("r")


# messages that no wait takes -------------------------------------------------------------------------


def due(kd: killick.Client) -> list[str]:
    return [head.run for head in kd.runtime.store.due(kd.runtime.clock.now_us())]


def test_a_message_that_nothing_waits_for_wakes_a_run_once(kd: killick.Client) -> None:
    @killick.agent(name="waits_stray")
    async def waiting(run: killick.Run) -> Any:
        return await run.wait("go")

    park(kd, waiting)
    kd.send("r", "stray", 1)
    with killick.open(kd.runtime.store.place) as other:
        park(other, waiting)
        assert due(other) == []
        other.send("r", "go", 2)
        assert other.run(waiting, id="r") == 2
    assert len(told(kd, "r", e.RunTaken)) == 3


def test_a_message_that_nothing_waits_for_wakes_a_run_that_is_being_cancelled_once(kd: killick.Client) -> None:
    def stays(effect: killick.Effect) -> None:
        raise killick.NotDone("it was sent")

    @killick.tool(effect="idempotent", name="waits_sent", compensate=stays, retry=killick.Retry(attempts=1))
    async def sent() -> str:
        return "sent"

    @killick.agent(name="waits_cancelled")
    async def waiting(run: killick.Run) -> Any:
        await run.call(sent)
        return await run.wait("go")

    park(kd, waiting)
    kd.send("r", "stray", 1)
    kd.cancel("r", compensate=True)
    for _ in range(2):
        with killick.open(kd.runtime.store.place) as other:
            park(other, waiting)
            assert due(other) == []
