"""Nothing happens twice: R14 (settling), R15 (at most once), R16 (a new holder), R17 (repeats), R18 (adoption after a
rewind), R19 (what can be used once), R20 (undoing)."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import killick
from families import fork_of
from killick.engine.steps import attempt as calls
from killick.errors import AnswerRefused, KillickError, RunBusy, ValueRefused
from killick.log import Entry, repair
from killick.model import events as e
from killick.store import MemoryStore

SECOND = 1_000_000


@dataclass
class Receipt:
    """What a payment gives back."""

    number: int
    to: str = ""


@killick.agent(name="calls_each")
async def calls_each(run: killick.Run) -> list[Any]:
    """Makes the calls that a test plans, one after the other."""
    return [await run.call(tool, *arguments) for tool, *arguments in PLAN]


PLAN: list[tuple[Any, ...]] = []


@pytest.fixture(autouse=True)
def _no_plan() -> None:
    PLAN.clear()


def plan(*calls: tuple[Any, ...]) -> None:
    PLAN[:] = calls


def parks(kd: killick.Client, agent: Any = calls_each, run: str = "r") -> killick.RunWaiting:
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, id=run)
    assert not isinstance(waiting.value, killick.errors.RunDiverged), waiting.value
    return waiting.value


def fails(kd: killick.Client, agent: Any = calls_each, run: str = "r") -> killick.RunFailed:
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id=run)
    return failed.value


def says(found: Any) -> Callable[[killick.Effect], Any]:
    """A reconciler that always says the same."""
    return lambda effect: found


class Bank:
    """What was really paid, outside of any record."""

    def __init__(self) -> None:
        self.paid: list[Any] = []
        self.taken_back: list[Any] = []

    def tool(self, name: str = "pay", **options: Any) -> Any:
        @killick.tool(name=name, **options)
        async def pay(to: str, note: str = "") -> Receipt:
            self.paid.append(to)
            return Receipt(len(self.paid), to)

        return pay

    def failing(self, error: BaseException, name: str = "pay", **options: Any) -> Any:
        """Pays, and does not know it."""

        @killick.tool(name=name, **options)
        async def pay(to: str, note: str = "") -> Receipt:
            self.paid.append(to)
            raise error

        return pay


@pytest.fixture
def bank() -> Bank:
    return Bank()


# R14: settling ------------------------------------------------------------------------------------


def test_r14_a_reconciler_that_finds_the_effect_gives_its_result(world: Any, bank: Bank) -> None:
    asked: list[killick.Effect] = []

    async def look(effect: killick.Effect) -> Any:
        asked.append(effect)
        return killick.Happened(Receipt(7, "ann"))

    plan((bank.failing(ConnectionResetError("half way"), reconcile=look), "ann"))
    assert world.kd.run(calls_each, id="r") == [{"number": 7, "to": "ann"}]
    assert bank.paid == ["ann"]
    [effect] = asked
    assert (effect.tool, effect.step, effect.arguments["to"]) == ("pay", "1", "ann")
    assert effect.key == world.started("r")[0].key
    assert effect.failure.message == "half way"
    assert [settled.settlement for settled in world.told("r", e.AttemptSettled)] == ["happened"]
    world.process().run(calls_each, id="r")
    assert len(asked) == 1


def test_r14_a_reconciler_that_finds_nothing_lets_it_be_tried_again(world: Any) -> None:
    made: list[str] = []

    @killick.tool(reconcile=lambda effect: killick.DidNotHappen())
    def pay(key: killick.Key = killick.KEY) -> int:
        made.append(str(key))
        if len(made) == 1:
            world.die()
        if len(made) == 2:
            raise ValueError("again")
        return len(made)

    plan((pay,))
    kd = world.killed(calls_each, run="r")
    assert kd.run(calls_each, id="r") == [3]
    assert len(set(made)) == 1


@pytest.mark.parametrize("answer", [killick.Unknown(), None, "yes", ValueError("cannot look")], ids=repr)
def test_r14_a_reconciler_that_does_not_know_leaves_it_to_a_person(world: Any, bank: Bank, answer: Any) -> None:
    def look(effect: killick.Effect) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    plan((bank.failing(ValueError("?"), reconcile=look), "ann"))
    waiting = parks(world.kd)
    assert waiting.waits[0].verbs == ("happened", "not", "stop")
    assert "pay" in str(waiting)


def test_r14_a_reconciler_whose_result_does_not_fit_leaves_it_to_a_person(world: Any, bank: Bank) -> None:
    plan((bank.failing(ValueError("?"), reconcile=says(killick.Happened("no receipt at all"))), "ann"))
    parks(world.kd)
    world.kd.answer("r", "happened", value={"number": 5, "to": "ann"})
    assert world.kd.run(calls_each, id="r") == [{"number": 5, "to": "ann"}]


def test_r14_a_person_says_it_happened_and_what_it_returned(world: Any, bank: Bank) -> None:
    plan((bank.failing(ValueError("?")), "ann"), (bank.tool("pay_on"), "bob"))
    parks(world.kd)
    world.process().answer("r", "happened", value={"number": 5, "to": "ann"}, by="eve", comment="I saw it")
    assert world.kd.run(calls_each, id="r")[0] == {"number": 5, "to": "ann"}
    assert bank.paid == ["ann", "bob"]
    [settled] = world.told("r", e.AttemptSettled)
    assert (settled.settlement, settled.by) == ("happened", "eve")


def test_r14_a_person_says_it_did_not_happen_and_it_is_tried_again(world: Any) -> None:
    made: list[str] = []

    @killick.tool
    async def pay(key: killick.Key = killick.KEY) -> int:
        made.append(str(key))
        if len(made) < 3:
            raise ValueError("?")
        return len(made)

    plan((pay,))
    for _ in range(2):
        parks(world.kd)
        world.kd.answer("r", "not")
        world.process()
    assert world.kd.run(calls_each, id="r") == [3]
    assert len(set(made)) == 1


def test_r14_a_person_says_stop_and_the_step_fails_the_same_on_replay(world: Any, bank: Bank) -> None:
    seen: list[str] = []
    pay = bank.failing(ValueError("?"))

    @killick.agent
    async def agent(run: killick.Run) -> None:
        try:
            await run.call(pay, "ann")
        except killick.StepFailed as failed:
            seen.append(str(failed.failure))
        await run.ask("go on?")

    parks(world.kd, agent)
    world.kd.answer("r", "stop", by="eve", comment="too risky")
    parks(world.kd, agent)
    parks(world.process(), agent)
    assert bank.paid == ["ann"]
    assert seen[0] == seen[1]
    assert "eve" in seen[0]
    assert "too risky" in seen[0]


def test_r14_a_value_that_does_not_fit_is_refused_and_can_be_given_again(world: Any, bank: Bank) -> None:
    plan((bank.failing(ValueError("?")), "ann"))
    parks(world.kd)
    with contextlib.suppress(ValueRefused, AnswerRefused):
        world.kd.answer("r", "happened", value="no receipt at all")
    parks(world.kd)
    world.kd.answer("r", "happened", value={"number": 5, "to": "ann"})
    assert world.kd.run(calls_each, id="r") == [{"number": 5, "to": "ann"}]


def test_r14_what_is_asked_of_a_person_survives_the_process_that_asked(world: Any, bank: Bank) -> None:
    plan((bank.failing(ValueError("?")), "ann"))
    parks(world.kd)
    first = world.kd.info("r").waits
    parks(world.process())
    assert world.kd.info("r").waits == first
    assert [wait.run for wait in world.kd.inbox()] == ["r"]


@pytest.mark.parametrize("dies", [False, True], ids=["raised", "died"])
def test_r14_a_question_that_a_cancel_closed_is_asked_again_when_the_run_goes_on(
    world: Any, bank: Bank, dies: bool
) -> None:
    """Also after the death of its process. Nobody said that it did not happen."""

    @killick.tool(name="cancelled_in_doubt")
    async def pay(to: str) -> Receipt:
        bank.paid.append(to)
        if dies:
            world.die()
        raise OSError("the line is dead")

    plan((pay, "ann"))
    if dies:
        world.killed(calls_each, run="r")
    parks(world.kd)
    world.kd.cancel("r", by="eve")
    assert world.kd.advance("r").status == "cancelled"
    world.kd.rewind("r", "1:after", by="eve")
    assert parks(world.kd).waits[0].waits_for == "settlement"
    assert bank.paid == ["ann"]
    world.kd.answer("r", "happened", value={"number": 7}, by="eve")
    assert world.kd.run(calls_each, id="r") == [{"number": 7, "to": ""}]


# R15: at most once --------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["rewind", "cancel", "failure"])
def test_r14_a_refusal_says_nothing_about_an_earlier_attempt_whose_outcome_is_not_known(world: Any, then: str) -> None:
    """The connection breaks after the payment, and the next attempt is refused: the payment is neither repeated under
    another key nor left out when the run is undone."""
    keys: list[str] = []
    undone: list[str] = []

    @killick.tool(
        effect="idempotent", retry=killick.Retry(attempts=2 if then == "failure" else 9, first=0),
        compensate=lambda effect: undone.append(effect.key),
    )  # fmt: skip
    async def pay(amount: int, key: str = killick.KEY) -> str:
        keys.append(key)
        if len(keys) == 1:
            raise ConnectionResetError("after the payment")
        if len(keys) == 2:
            raise killick.NotDone("closed") if then == "failure" else killick.errors.RateLimited("429", retry_after=900)
        return "paid"

    @killick.agent(on_failure="compensate")
    async def payer(run: killick.Run) -> str:
        return await run.call(pay, 7)

    kd = world.kd
    kd.start(payer, id="r")
    kd.advance("r")
    if then == "rewind":
        kd.rewind("r", "1:before")
    elif then == "cancel":
        kd.cancel("r", compensate=True)
    assert kd.advance("r").status == {"rewind": "completed", "cancel": "cancelled", "failure": "failed"}[then]
    assert keys == [keys[0]] * (3 if then == "rewind" else 2)
    assert undone == ([] if then == "rewind" else [keys[0]])


@pytest.mark.parametrize("transient", [ConnectionResetError("?"), TimeoutError("?"), OSError("?"), KeyError("?")])
def test_r15_at_most_once_is_never_tried_again_by_itself(world: Any, bank: Bank, transient: Exception) -> None:
    plan((bank.failing(transient, retry=killick.Retry(attempts=9)), "ann"))
    parks(world.kd)
    parks(world.process())
    assert bank.paid == ["ann"]


def test_r15_at_most_once_is_tried_again_after_it_was_refused(world: Any) -> None:
    made: list[int] = []

    @killick.tool(retry=3, nothing_happened=ConnectionRefusedError)
    async def pay() -> int:
        made.append(1)
        if len(made) == 1:
            raise killick.NotDone
        if len(made) == 2:
            raise ConnectionRefusedError
        return len(made)

    plan((pay,))
    assert world.kd.run(calls_each, id="r") == [3]


def test_r13_a_reconciler_does_not_make_more_attempts_than_are_allowed(world: Any, bank: Bank) -> None:
    pay = bank.failing(ValueError("?"), reconcile=says(killick.DidNotHappen()), retry=killick.Retry(attempts=2))
    plan((pay, "ann"))
    with pytest.raises((killick.RunWaiting, killick.RunFailed)):
        world.kd.run(calls_each, id="r")
    assert len(bank.paid) == 2


class Slow:
    """A blocking tool that says when it may end, and counts how many of it run side by side."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.running = 0
        self.most = 0
        self.made = 0

    def __call__(self) -> int:
        self.made += 1
        made = self.made
        self.running += 1
        self.most = max(self.most, self.running)
        if made == 1:
            self.release.wait(300)
        self.running -= 1
        return made


@pytest.fixture
def slow() -> Slow:
    return Slow()


def abandoned_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "ABANDON_SECONDS", seconds)


@pytest.mark.parametrize("effect", ["at_most_once", "idempotent", "reads"])
def test_r15_the_late_result_of_a_blocking_tool_whose_time_was_up_is_recorded(
    world: Any, slow: Slow, effect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned_after(300, monkeypatch)
    plan((killick.tool(name="slow", effect=effect, timeout=0.05)(lambda: slow()),))
    threading.Timer(0.15, slow.release.set).start()
    assert world.kd.run(calls_each, id="r") == [1]
    assert slow.made == 1


def test_r15_no_further_attempt_starts_while_the_thread_of_the_last_one_lives(
    world: Any, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned_after(0.3, monkeypatch)
    tool = killick.tool(name="slow", effect="idempotent", timeout=0.05, retry=killick.Retry(attempts=3, first=0))
    plan((tool(lambda: slow()),))
    with pytest.raises(killick.KillickError):
        world.kd.run(calls_each, id="r")
    assert (slow.made, slow.most) == (1, 1)
    slow.release.set()


def test_r15_not_even_when_a_person_says_that_it_did_not_happen(
    world: Any, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned_after(0.3, monkeypatch)
    plan((killick.tool(name="slow", timeout=0.05)(lambda: slow()),))
    parks(world.kd)
    world.kd.answer("r", "not")
    abandoned_after(300, monkeypatch)
    threading.Timer(0.2, slow.release.set).start()
    world.kd.run(calls_each, id="r")
    assert slow.most == 1


def test_r15_a_step_that_was_given_up_while_its_thread_lives_ends_the_same_on_replay(
    world: Any, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned_after(0.3, monkeypatch)
    seen: list[str] = []
    declare = killick.tool(name="slow", effect="idempotent", timeout=0.05, retry=killick.Retry(attempts=3, first=0))
    tool = declare(lambda: slow())

    @killick.agent
    async def agent(run: killick.Run) -> None:
        try:
            made = await run.call(tool)
            seen.append(f"returned {made}")
        except killick.StepFailed as failed:
            seen.append(failed.failure.kind)
        await run.ask("go on?")

    parks(world.kd, agent)
    slow.release.set()
    assert world.kd.runtime.engine.live.wait(300)  # while its thread lived, the run was leased
    parks(world.process(), agent)
    assert seen[0] == seen[1]


def test_r15_a_late_refusal_says_that_nothing_happened(world: Any, slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned_after(300, monkeypatch)

    @killick.tool(timeout=1, retry=killick.Retry(attempts=2))
    def pay() -> int:
        if slow() == 1:
            raise killick.NotDone("it was full")
        return slow.made

    plan((pay,))
    threading.Timer(1.2, slow.release.set).start()
    assert world.kd.run(calls_each, id="r") == [2]


# R16: a new holder --------------------------------------------------------------------------------


class Frozen:
    """A worker that stopped in the middle of a tool, and may wake again. Leases last a minute, grace ten seconds."""

    def __init__(
        self,
        world: Any,
        clock: killick.clock.ManualClock,
        *,
        timeout: float | None,
        effect: Any = "at_most_once",
        found: Any = None,
    ) -> None:
        self.world, self.clock = world, clock
        self.reconciled: list[int] = []
        self.started = threading.Event()
        self.release = threading.Event()
        self.kd = self.worker()

        def look(_: killick.Effect) -> Any:
            self.reconciled.append(clock.now_us())
            return found or killick.Happened("found")

        @killick.tool(name="frozen", effect=effect, timeout=timeout, reconcile=look)
        def frozen() -> str:
            self.started.set()
            self.release.wait(300)
            return "late"

        plan((frozen,))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.started.wait(300)
        self.world.line.is_cut = True  # frozen: it renews nothing and writes nothing

    def worker(self) -> killick.Client:
        made: killick.Client = self.world.process(lease_seconds=60.0, grace_seconds=10.0)
        return made

    def _run(self) -> None:
        with pytest.raises(BaseException):  # noqa: B017, PT011
            self.kd.run(calls_each, id="r")

    def wake(self) -> None:
        self.release.set()
        self.thread.join(300)


@pytest.fixture
def manual() -> killick.clock.ManualClock:
    return killick.clock.ManualClock()


@pytest.fixture
def still(manual: killick.clock.ManualClock, make_world: Any) -> Any:
    """A world whose clock stands still until it is moved."""
    return make_world(manual)


def test_r16_a_run_whose_holder_may_live_is_not_taken(still: Any, manual: killick.clock.ManualClock) -> None:
    frozen = Frozen(still, manual, timeout=300)
    manual.advance(59)
    with pytest.raises(RunBusy):
        frozen.worker().advance("r")
    frozen.wake()


@pytest.mark.parametrize(("timeout", "free_after"), [(300, 310), (None, 70)])
def test_r16_a_new_holder_touches_an_open_attempt_only_after_its_deadline_and_a_grace(
    still: Any, manual: killick.clock.ManualClock, timeout: float | None, free_after: int
) -> None:
    began = manual.now_us()
    frozen = Frozen(still, manual, timeout=timeout)
    manual.advance(61)
    kd = frozen.worker()
    advanced = kd.advance("r")
    assert (advanced.status, advanced.wake_at_us) == ("waiting", began + free_after * SECOND)
    assert frozen.reconciled == []
    manual.advance(free_after - 61 + 1)
    [advanced] = kd.advance_due()
    assert advanced.result == ["found"]
    assert frozen.reconciled == [manual.now_us()]
    frozen.wake()


def test_r16_a_second_new_holder_waits_as_long_as_the_first(still: Any, manual: killick.clock.ManualClock) -> None:
    frozen = Frozen(still, manual, timeout=300)
    manual.advance(61)
    frozen.worker().advance("r")
    frozen.worker().advance("r")
    assert frozen.reconciled == []
    frozen.wake()


def test_r16_workers_that_take_a_run_one_after_another_wait_for_its_dead_holder_only_once(
    still: Any, manual: killick.clock.ManualClock
) -> None:
    began = manual.now_us()
    frozen = Frozen(still, manual, timeout=None)
    for seconds in (61, 4, 4):
        manual.advance(seconds)
        assert frozen.worker().advance("r").wake_at_us == began + 70 * SECOND
    manual.advance(2)
    assert frozen.worker().advance("r").result == ["found"]
    frozen.wake()


@pytest.mark.parametrize("effect", ["at_most_once", "idempotent"])
def test_r16_once_the_old_holder_is_known_to_be_dead_nobody_waits_for_it_any_longer(
    still: Any, manual: killick.clock.ManualClock, effect: Any
) -> None:
    frozen = Frozen(still, manual, timeout=300, effect=effect, found=killick.DidNotHappen())
    manual.advance(61)
    assert frozen.worker().advance("r").status == "waiting"
    assert [event.because for event in still.told("r", e.StepDelayed)] == ["the last holder may still be at it"]
    frozen.wake()
    still.store.lives = lambda holder: False
    advanced = frozen.worker().advance("r")
    assert (advanced.status, advanced.result) == ("completed", ["late"])
    assert len(still.started("r")) == 2


def test_r16_a_step_that_only_reads_waits_for_no_old_holder(still: Any, manual: killick.ManualClock) -> None:
    frozen = Frozen(still, manual, timeout=300, effect="reads")
    manual.advance(61)
    frozen.wake()
    advanced = frozen.worker().advance("r")
    assert (advanced.status, advanced.result) == ("completed", ["late"])
    assert not still.told("r", e.StepDelayed)


def test_r16_a_command_in_between_does_not_prove_the_old_holder_dead(
    still: Any, manual: killick.clock.ManualClock
) -> None:
    frozen = Frozen(still, manual, timeout=300)
    manual.advance(61)
    kd = frozen.worker()
    kd.edit.prioritize("r", 5)
    kd.advance("r")
    assert frozen.reconciled == []
    frozen.wake()


def test_r16_a_holder_whose_lease_ran_out_while_it_wrote_does_not_apply(
    still: Any, manual: killick.clock.ManualClock
) -> None:
    touched: list[int] = []

    @killick.tool
    async def act() -> None:
        touched.append(1)

    plan((act,))
    kd = still.process(lease_seconds=60.0)
    append = still.store.append

    def slowly(items: Any) -> Any:
        written = append(items)
        if any(b"step.started" in row.body for item in items for row in item.rows):
            manual.advance(61)
        return written

    still.store.append = slowly
    with pytest.raises(KillickError, match="lease"):
        kd.run(calls_each, id="r")
    assert touched == []


def test_r16_a_holder_whose_lease_ran_out_before_its_thread_began_does_not_apply(
    still: Any, manual: killick.clock.ManualClock
) -> None:
    touched: list[int] = []

    @killick.tool
    def act() -> None:
        touched.append(1)

    plan((act,))
    kd = still.process(lease_seconds=60.0)
    threads = kd.runtime.engine.threads
    start = threads.start

    def late(*args: Any) -> Any:
        manual.advance(61)
        return start(*args)

    threads.start = late
    with pytest.raises(KillickError, match="lease"):
        kd.run(calls_each, id="r")
    assert touched == []
    assert still.told("r", e.AttemptEnded) == []


@pytest.mark.slow
def test_r16_on_sqlite_a_dead_holder_is_taken_over_from_at_once(tmp_path: Path) -> None:
    program = """
import os, sys, time, killick

@killick.tool(timeout=3600, reconcile=lambda effect: killick.Happened("found"))
def act() -> str:
    os._exit(9)

@killick.agent
def agent(run) -> str:
    return run.call(act)

with killick.open(sys.argv[1], lease_seconds=3600.0, grace_seconds=3600.0) as kd:
    print(kd.run(agent, id="r"))
"""
    command = [sys.executable, "-c", program, str(tmp_path / "killick.db")]
    first = subprocess.run(command, capture_output=True, check=False, timeout=300)
    assert first.returncode == 9
    second = subprocess.run(command, capture_output=True, check=False, timeout=300)
    assert second.stdout.split() == [b"found"], second


def test_r16_the_old_holder_that_wakes_after_all_writes_nothing(still: Any, manual: killick.clock.ManualClock) -> None:
    frozen = Frozen(still, manual, timeout=300)
    line: Any = frozen.kd.runtime.store
    manual.advance(400)
    assert frozen.worker().run(calls_each, id="r") == ["found"]
    before = [recorded.seq for recorded in still.kd.events("r")]
    line.is_cut = False
    frozen.wake()
    assert [recorded.seq for recorded in still.kd.events("r")] == before


# R17: the same action twice -----------------------------------------------------------------------


def test_r17_the_same_action_twice_is_done_twice_unless_it_says_otherwise(world: Any, bank: Bank) -> None:
    pay = bank.tool()
    plan((pay, "ann"), (pay, "ann"))
    assert [receipt["number"] for receipt in world.kd.run(calls_each, id="r")] == [1, 2]


@pytest.mark.parametrize("effect", ["at_most_once", "idempotent"])
def test_r17_recorded_gives_the_recorded_result_by_identity(world: Any, bank: Bank, effect: Any) -> None:
    pay = bank.tool(repeat="recorded", identity=("to",), effect=effect)
    plan((pay, "ann", "for lunch"), (pay, "bob"), (pay, "ann", "for the lunch"))
    assert [receipt["number"] for receipt in world.kd.run(calls_each, id="r")] == [1, 2, 1]
    assert bank.paid == ["ann", "bob"]
    assert world.told("r", e.StepAdopted)[0].step == "3"


def test_r17_without_an_identity_all_arguments_count(world: Any, bank: Bank) -> None:
    pay = bank.tool(repeat="recorded")
    plan((pay, "ann", "a"), (pay, "ann", "b"), (pay, "ann", "a"))
    world.kd.run(calls_each, id="r")
    assert bank.paid == ["ann", "ann"]


def test_r17_what_did_not_happen_is_not_repeated_by_its_record(world: Any, bank: Bank) -> None:
    fails_once = [killick.NotDone("no")]

    @killick.tool(repeat="recorded", retry=killick.Retry(attempts=1))
    async def pay(to: str) -> str:
        if fails_once:
            raise fails_once.pop()
        return f"paid {to}"

    @killick.agent
    async def agent(run: killick.Run) -> str:
        with pytest.raises(killick.StepFailed):
            await run.call(pay, "ann")
        return await run.call(pay, "ann")

    assert world.kd.run(agent, id="r") == "paid ann"


@pytest.mark.parametrize(("answer", "paid"), [("approve", ["ann", "ann"]), ("reject", ["ann"])])
@pytest.mark.parametrize("cold", [False, True])
def test_r17_ask_asks_a_person(world: Any, bank: Bank, answer: Any, paid: list[str], cold: bool) -> None:
    pay = bank.tool(repeat="ask", identity=("to",))
    plan((pay, "ann"), (pay, "ann", "again"))
    waiting = parks(world.kd)
    assert waiting.waits[0].verbs == ("approve", "reject")
    assert bank.paid == ["ann"]
    kd = world.process() if cold else world.kd
    kd.answer("r", answer)
    numbers = [receipt["number"] for receipt in kd.run(calls_each, id="r")]
    assert bank.paid == paid
    assert numbers == ([1, 2] if answer == "approve" else [1, 1])


def test_r17_the_same_action_side_by_side_is_a_repeat_too(world: Any, bank: Bank) -> None:
    pay = bank.tool(repeat="recorded")

    @killick.agent
    async def agent(run: killick.Run) -> Any:
        return await run.gather(run.call(pay, "ann"), run.call(pay, "ann"))

    assert world.kd.run(agent, id="r") == ({"number": 1, "to": "ann"},) * 2
    assert bank.paid == ["ann"]


def test_r17_a_repeat_of_what_was_adopted_is_a_repeat_too(world: Any, bank: Bank) -> None:
    pay = bank.tool(repeat="recorded")
    plan((pay, "ann"), (pay, "ann"))
    world.kd.run(calls_each, id="r")
    world.rewind_to("r", "1")
    assert [receipt["number"] for receipt in world.kd.run(calls_each, id="r")] == [1, 1]
    assert bank.paid == ["ann"]


# R18: adoption ------------------------------------------------------------------------------------


def test_r18_after_a_rewind_the_same_action_is_adopted_whatever_the_wording(world: Any, bank: Bank) -> None:
    pay = bank.tool(identity=("to",))
    plan((pay, "ann", "for lunch"), (pay, "bob", "for tea"))
    first = world.kd.run(calls_each, id="r")
    plan((pay, "ann", "for the lunch"), (pay, "bob", "for some tea"))
    world.rewind_to("r", "1")
    assert world.kd.run(calls_each, id="r") == first
    assert bank.paid == ["ann", "bob"]
    adopted = world.told("r", e.StepAdopted)
    assert [each.step for each in adopted] == ["1", "2"]
    assert [each.key.split(":")[1] for each in adopted] == ["step_1", "step_2"]
    assert world.process().run(calls_each, id="r") == first


def test_r18_the_oldest_unclaimed_one_is_adopted_each_once_and_then_it_runs_normally(world: Any, bank: Bank) -> None:
    pay = bank.tool()
    plan((pay, "ann"), (pay, "ann"))
    world.kd.run(calls_each, id="r")
    plan((pay, "ann"), (pay, "ann"), (pay, "ann"))
    world.rewind_to("r", "1")
    assert [receipt["number"] for receipt in world.kd.run(calls_each, id="r")] == [1, 2, 3]


def test_r18_what_stands_before_the_cut_is_not_adopted(world: Any, bank: Bank) -> None:
    pay = bank.tool()
    plan((pay, "ann"), (pay, "ann"))
    world.kd.run(calls_each, id="r")
    plan((pay, "ann"), (pay, "ann"), (pay, "ann"))
    world.rewind_to("r", "2")
    assert [receipt["number"] for receipt in world.kd.run(calls_each, id="r")] == [1, 2, 3]
    assert [each.step for each in world.told("r", e.StepAdopted)] == ["2"]


def test_r18_reads_are_real_again_after_a_rewind(world: Any) -> None:
    looked: list[int] = []

    @killick.tool(effect="reads")
    async def look() -> int:
        looked.append(1)
        return len(looked)

    plan((look,))
    assert world.kd.run(calls_each, id="r") == [1]
    world.rewind_to("r", "1")
    assert world.kd.run(calls_each, id="r") == [2]


def test_r18_a_second_rewind_adopts_again_what_the_first_one_adopted(world: Any, bank: Bank) -> None:
    plan((bank.tool(), "ann"))
    first = world.kd.run(calls_each, id="r")
    for generation in (1, 2, 3):
        world.rewind_to("r", "1", generation=generation)
        assert world.kd.run(calls_each, id="r") == first
    assert bank.paid == ["ann"]


@pytest.mark.parametrize("how", ["died", "unknown"])
@pytest.mark.parametrize("by", ["reconcile", "person"])
def test_r18_one_in_doubt_is_settled_first_and_its_result_adopted(world: Any, bank: Bank, how: str, by: str) -> None:
    found = [killick.Unknown()]
    bank_paid = bank.paid

    @killick.tool(reconcile=lambda effect: found[0])
    async def pay(to: str) -> Receipt:
        bank_paid.append(to)
        if how == "died":
            world.die()
        raise ValueError("?")

    plan((pay, "ann"))
    if how == "died":
        world.killed(calls_each, run="r")
    else:
        parks(world.kd)
    world.rewind_to("r", "1")
    if by == "reconcile":
        found[0] = killick.Happened(Receipt(7, "ann"))  # type: ignore[call-overload]
    else:
        parks(world.kd)
        world.kd.answer("r", "happened", value={"number": 7, "to": "ann"})
    assert world.kd.run(calls_each, id="r") == [{"number": 7, "to": "ann"}]
    assert bank.paid == ["ann"]
    assert world.process().run(calls_each, id="r") == [{"number": 7, "to": "ann"}]


def test_r18_a_reconciler_that_fails_leaves_an_orphan_in_doubt_to_a_person(world: Any, bank: Bank) -> None:
    def look(effect: killick.Effect) -> Any:
        raise ConnectionResetError("cannot look")

    plan((bank.failing(ValueError("?"), reconcile=look), "ann"))
    parks(world.kd)
    world.rewind_to("r", "1")
    waiting = parks(world.kd)
    assert waiting.waits[0].waits_for == "settlement"
    assert bank.paid == ["ann"]


def test_r18_stop_at_an_orphan_in_doubt_ends_the_step_the_same_on_replay(world: Any, bank: Bank) -> None:
    seen: list[str] = []
    pay = bank.failing(ValueError("?"))

    @killick.agent
    async def agent(run: killick.Run) -> None:
        try:
            await run.call(pay, "ann")
        except killick.StepFailed as failed:
            seen.append(str(failed.failure))
        await run.ask("go on?")

    parks(world.kd, agent)
    world.rewind_to("r", "1")
    parks(world.kd, agent)
    world.kd.answer("r", "stop", by="eve")
    assert [wait.name for wait in parks(world.kd, agent).waits] != ["settlement"]
    assert [wait.name for wait in parks(world.process(), agent).waits] != ["settlement"]
    assert len(seen) == 2
    assert seen[0] == seen[1]


@pytest.mark.parametrize("by", ["reconcile", "person"])
def test_r18_one_in_doubt_that_did_not_happen_never_matches(world: Any, bank: Bank, by: str) -> None:
    found: list[Any] = [killick.Unknown()]
    broken = [True]

    @killick.tool(reconcile=lambda effect: found[0])
    async def pay(to: str) -> str:
        if broken.pop() if broken else False:
            raise ValueError("?")
        bank.paid.append(to)
        return f"paid {to}"

    plan((pay, "ann"), (pay, "bob"))
    parks(world.kd)
    world.rewind_to("r", "1")
    if by == "reconcile":
        found[0] = killick.DidNotHappen()
    else:
        parks(world.kd)
        world.kd.answer("r", "not")
    assert world.kd.run(calls_each, id="r") == ["paid ann", "paid bob"]
    assert bank.paid == ["ann", "bob"]


def test_r18_one_that_was_refused_never_matches(world: Any, bank: Bank) -> None:
    refuses = [True]

    @killick.tool(retry=killick.Retry(attempts=1))
    async def pay(to: str) -> str:
        if refuses.pop() if refuses else False:
            raise killick.NotDone
        return f"paid {to}"

    plan((pay, "ann"))
    fails(world.kd)
    plan((pay, "bob"))
    world.rewind_to("r", "1")
    assert world.kd.run(calls_each, id="r") == ["paid bob"]


def test_r18_one_that_was_undone_never_matches(world: Any, bank: Bank) -> None:
    def take_back(effect: killick.Effect) -> None:
        bank.taken_back.append(effect.arguments["to"])

    pay = bank.tool(compensate=take_back)
    broken = [True]

    @killick.agent(on_failure="compensate")
    async def agent(run: killick.Run) -> Receipt:
        receipt: Receipt = await run.call(pay, "ann")
        if broken:
            raise ValueError("no")
        return receipt

    fails(world.kd, agent)
    assert bank.taken_back == ["ann"]
    broken.clear()
    world.rewind_to("r", "1")
    assert world.kd.run(agent, id="r") == Receipt(2, "ann")
    assert bank.paid == ["ann", "ann"]


@pytest.mark.parametrize(("answer", "paid"), [("approve", ["ann", "bob"]), ("reject", ["ann"])])
@pytest.mark.parametrize("cold", [False, True])
def test_r18_no_match_while_orphans_of_the_tool_remain_asks(
    world: Any, bank: Bank, answer: Any, paid: list[str], cold: bool
) -> None:
    pay = bank.tool()
    plan((pay, "ann"))
    world.kd.run(calls_each, id="r")
    plan((pay, "bob"))
    world.rewind_to("r", "1")
    waiting = parks(world.kd)
    assert waiting.waits[0].verbs == ("approve", "reject")
    kd = world.process() if cold else world.kd
    kd.answer("r", answer)
    with (
        contextlib.nullcontext() if answer == "approve" else pytest.raises(killick.RunFailed, match="a person declined")
    ):
        kd.run(calls_each, id="r")
    assert bank.paid == paid


def test_r18_orphans_of_other_tools_are_no_reason_to_ask(world: Any, bank: Bank) -> None:
    plan((bank.tool("pay"), "ann"))
    world.kd.run(calls_each, id="r")
    plan((bank.tool("pay_on"), "bob"))
    world.rewind_to("r", "1")
    world.kd.run(calls_each, id="r")
    assert bank.paid == ["ann", "bob"]


def test_r18_an_idempotent_one_in_doubt_goes_on_under_its_key_and_is_an_orphan_no_more(world: Any) -> None:
    made: list[tuple[str, str]] = []

    @killick.tool(effect="idempotent")
    async def pay(to: str, key: killick.Key = killick.KEY) -> str:
        made.append((to, str(key)))
        if len(made) == 1:
            world.die()
        return f"paid {to}"

    plan((pay, "ann"), (pay, "bob"), (pay, "ann"))
    world.killed(calls_each, run="r")
    world.rewind_to("r", "1")
    assert world.kd.run(calls_each, id="r") == ["paid ann", "paid bob", "paid ann"]
    assert [to for to, _ in made] == ["ann", "ann", "bob", "ann"]
    assert made[0] == made[1]
    assert len({key for _, key in made}) == 3


def test_r31_an_approval_to_repeat_does_not_approve_acting_beside_what_was_left(world: Any, bank: Bank) -> None:
    pay = bank.tool(repeat="ask")
    plan((pay, "ann"), (pay, "bob"))
    world.kd.run(calls_each, id="r")
    plan((pay, "ann"), (pay, "ann"))
    world.rewind_to("r", "2")
    assert "step 1 already" in str(parks(world.kd))
    kd = world.process()
    kd.answer("r", "approve")
    assert "before the rewind" in str(parks(kd))
    kd = world.process()
    kd.answer("r", "reject")
    fails(kd)
    assert bank.paid == ["ann", "bob"]


def forked(world: Any, cut: int, run: str = "fork", parent: str = "r") -> None:
    event = e.RunForked(at=world.clock.now_us(), run=run, parent=parent, cut=cut, generation=0, effects="live")
    fork_of(world.kd.runtime.log, event)


def cut_before(world: Any, step: str, run: str = "r") -> int:
    found = world.kd.state(run).fold.step(step)
    return int(found.intended) - 1


def test_r18_a_fork_adopts_what_its_parent_did_after_the_cut(world: Any, bank: Bank) -> None:
    pay = bank.tool()
    plan((pay, "ann"), (pay, "bob"))
    first = world.kd.run(calls_each, id="r")
    forked(world, cut_before(world, "2"))
    advanced = world.kd.advance("fork")
    assert advanced.result == first
    assert bank.paid == ["ann", "bob"]
    [adopted] = world.told("fork", e.StepAdopted)
    assert (adopted.step, adopted.run) == ("2", "r")


def test_r18_a_fork_and_its_parent_that_was_taken_back_pay_once_between_them(world: Any, bank: Bank) -> None:
    plan((bank.tool(), "ann"))
    world.kd.run(calls_each, id="r")
    cut = cut_before(world, "1")
    forked(world, cut)
    world.rewind("r", cut)
    one = world.kd.advance("fork").result
    two = world.kd.run(calls_each, id="r")
    assert one == two
    adopted = [*world.told("fork", e.StepAdopted), *world.told("r", e.StepAdopted)]
    assert [(event.run, event.seq) for event in adopted] == [("r", adopted[0].seq)] * 2
    assert bank.paid == ["ann"]


def test_r18_forks_that_race_pay_once_between_them(world: Any, bank: Bank) -> None:
    plan((bank.tool(), "ann"))
    world.kd.run(calls_each, id="r")
    cut = cut_before(world, "1")
    names = [f"fork_{n}" for n in range(4)]
    for name in names:
        forked(world, cut, name)
    results: list[Any] = []

    def advance(kd: killick.Client, name: str) -> None:
        results.append(kd.advance(name).result)

    threads = [threading.Thread(target=advance, args=(world.process(), name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [result[0]["number"] for result in results] == [1, 1, 1, 1]
    assert bank.paid == ["ann"]


@pytest.mark.parametrize("answer", ["happened", "not"])
def test_r18_what_a_fork_settled_of_its_parent_stays_settled_there(world: Any, bank: Bank, answer: Any) -> None:
    broken = [True]

    @killick.tool
    async def pay(to: str) -> str:
        if broken.pop() if broken else False:
            raise ValueError("?")
        bank.paid.append(to)
        return f"paid {to}"

    plan((pay, "ann"), (pay, "bob"))
    parks(world.kd)
    forked(world, cut_before(world, "1"))
    assert world.kd.advance("fork").status == "waiting"
    world.kd.answer("fork", answer, value="paid ann" if answer == "happened" else None)
    assert world.kd.advance("fork").result == ["paid ann", "paid bob"]
    assert bank.paid == (["bob"] if answer == "happened" else ["ann", "bob"])


# R19: what can be used once -----------------------------------------------------------------------


class Till:
    """Takes tokens, each once."""

    def __init__(self, world: Any, **options: Any) -> None:
        self.story: list[Any] = []
        self.taken: list[str] = []

        @killick.tool(name="redeem", consumes=("token",), **options)
        async def redeem(token: str, who: str = "") -> str:
            self.taken.append(token)
            told = self.story.pop(0) if self.story else None
            if told == "dies":
                world.die()
            if isinstance(told, Exception):
                raise told
            return f"redeemed {token}"

        self.redeem = redeem


def test_r19_a_token_is_used_once_in_the_whole_store(world: Any) -> None:
    till = Till(world)
    plan((till.redeem, "t1"))
    assert world.kd.run(calls_each, id="one") == ["redeemed t1"]
    failed = fails(world.process(), run="two")
    assert "one" in str(failed.failure)
    assert "token" in str(failed.failure)
    plan((till.redeem, "t2"), (till.redeem, "t1"))
    fails(world.kd, run="three")
    assert till.taken == ["t1", "t2"]


def test_r19_a_token_in_doubt_is_used(world: Any) -> None:
    till = Till(world)
    till.story = [ValueError("?")]
    plan((till.redeem, "t1"))
    parks(world.kd, run="one")
    fails(world.process(), run="two")
    assert till.taken == ["t1"]


def test_r19_a_token_of_a_process_that_died_is_used(world: Any) -> None:
    till = Till(world)
    till.story = ["dies"]
    plan((till.redeem, "t1"))
    world.killed(calls_each, run="one")
    fails(world.kd, run="two")
    assert "redeemed" not in str(world.kd.state("two").outputs.get("1"))


@pytest.mark.parametrize("error", [killick.NotDone("no"), killick.RateLimited(retry_after=1)], ids=repr)
def test_r19_a_refusal_gives_a_token_back(world: Any, error: Exception) -> None:
    till = Till(world, patience=0, retry=killick.Retry(attempts=1))
    till.story = [error]
    plan((till.redeem, "t1"))
    fails(world.kd, run="one")
    assert world.kd.run(calls_each, id="two") == ["redeemed t1"]


@pytest.mark.parametrize("by", ["reconcile", "person"])
def test_r19_what_did_not_happen_gives_a_token_back_and_may_take_it_again(world: Any, by: str) -> None:
    till = Till(world, reconcile=says(killick.DidNotHappen()) if by == "reconcile" else None)
    till.story = [ValueError("?")]
    plan((till.redeem, "t1"))
    if by == "person":
        parks(world.kd, run="one")
        world.kd.answer("one", "not")
    assert world.kd.run(calls_each, id="one") == ["redeemed t1"]
    fails(world.kd, run="two")


@pytest.mark.parametrize("told", ["dies", ConnectionResetError("?")], ids=repr)
def test_r19_further_attempts_of_a_step_go_on_with_the_token_it_has(world: Any, told: Any) -> None:
    till = Till(world, effect="idempotent")
    till.story = [told]
    plan((till.redeem, "t1"))
    kd = world.killed(calls_each, run="one") if told == "dies" else world.kd
    assert kd.run(calls_each, id="one") == ["redeemed t1"]
    assert till.taken == ["t1", "t1"]
    fails(kd, run="two")


def test_r19_two_runs_that_race_for_a_token_cannot_both_have_it(world: Any) -> None:
    till = Till(world)
    plan((till.redeem, "t1"))

    async def race() -> list[Any]:
        both = (world.kd.as_async().run(calls_each, id=name) for name in ("one", "two", "three"))
        return await asyncio.gather(*both, return_exceptions=True)

    outcomes = asyncio.run(race())
    assert till.taken == ["t1"]
    assert [isinstance(outcome, killick.RunFailed) for outcome in outcomes].count(True) == 2


def test_r19_a_rewind_does_not_give_a_token_back(world: Any) -> None:
    till = Till(world)
    plan((till.redeem, "t1"))
    world.kd.run(calls_each, id="one")
    plan((till.redeem, "t1", "somebody else"))
    world.rewind_to("one", "1")
    fails(world.kd, run="one")
    assert till.taken == ["t1"]


# R20: undoing -------------------------------------------------------------------------------------


class Shop:
    """Does things that can be undone, and writes down what it was told of each when it is."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.done: list[str] = []
        self.undone: list[killick.Effect] = []
        self.story: dict[str, Any] = {}

    def tool(self, name: str, **options: Any) -> Any:
        options = {"compensate": self.undo} | options

        @killick.tool(name=name, **options)
        async def act(what: str, step: killick.ToolStep = killick.STEP) -> str:
            self.done.append(what)
            told = self.story.get(what)
            if told == "dies":
                self.world.die()
            if isinstance(told, Exception):
                step.progress({"half": what})
                raise told
            return f"did {what}"

        return act

    async def undo(self, effect: killick.Effect, key: killick.Key = killick.KEY) -> None:
        assert key == f"{effect.key}:undo" or key.endswith(":undo"), key
        what = effect.arguments["what"]
        told = self.story.get(f"undo {what}")
        if told == "dies":
            self.story.pop(f"undo {what}")
            self.world.die()
        if isinstance(told, Exception):
            raise told
        self.undone.append(effect)

    @property
    def order(self) -> list[str]:
        return [effect.arguments["what"] for effect in self.undone]


@pytest.fixture
def shop(world: Any) -> Shop:
    return Shop(world)


@killick.agent(name="saga", on_failure="compensate")
async def saga(run: killick.Run) -> None:
    """Makes the calls of the plan, then fails."""
    for tool, *arguments in PLAN:
        await run.call(tool, *arguments)
    raise ValueError("the last straw")


def not_undone(world: Any, run: str = "r") -> list[str]:
    state = world.kd.state(run)
    return list(state.data(state.fold.facts.ended).get("not_undone") or ())


def test_r20_a_failed_run_is_undone_in_reverse_order_under_keys_of_its_own(world: Any, shop: Shop) -> None:
    plan((shop.tool("book"), "hotel"), (shop.tool("book"), "flight"), (shop.tool("pay"), "both"))
    failed = fails(world.kd, saga)
    assert failed.failure.is_a(ValueError)
    assert shop.order == ["both", "flight", "hotel"]
    first = shop.undone[-1]
    assert (first.tool, first.step, first.result) == ("book", "1", "did hotel")
    started = {each.step: each.key for each in world.started("r")}
    assert first.key == started["1"]
    undoing = [each for each in world.told("r", e.StepIntended) if each.sort == "undo"]
    assert [each.undoes for each in undoing] == ["3", "2", "1"]
    assert all(started[each.step].endswith(":undo") for each in undoing)
    assert [effect.undone for effect in world.kd.state("r").effects][:3] == [True, True, True]
    assert not_undone(world) == []


def test_r20_a_run_that_does_not_ask_for_it_is_not_undone(world: Any, shop: Shop) -> None:
    act = shop.tool("book")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        raise ValueError("no")

    fails(world.kd, agent)
    assert shop.undone == []


def test_r20_what_did_not_happen_and_reads_need_no_undoing(world: Any, shop: Shop) -> None:
    shop.story["refused"] = killick.NotDone("no")
    act, look = shop.tool("book", retry=killick.Retry(attempts=1)), shop.tool("look", effect="reads")

    @killick.agent(on_failure="compensate")
    async def agent(run: killick.Run) -> None:
        await run.call(look, "price")
        await run.call(act, "hotel")
        await run.call(act, "refused")

    fails(world.kd, agent)
    assert shop.order == ["hotel"]
    assert not_undone(world) == []


def test_r20_half_done_work_is_undone_with_its_progress_and_its_failure(world: Any, shop: Shop) -> None:
    shop.story["hotel"] = ValueError("half way")
    plan((shop.tool("book", effect="idempotent"), "hotel"))
    fails(world.kd, saga)
    [effect] = shop.undone
    assert effect.progress == {"half": "hotel"}
    assert effect.failure.message == "half way"
    assert effect.result is None


def test_r20_the_last_progress_counts_also_after_a_crash(world: Any) -> None:
    seen: list[Any] = []
    made: list[int] = []

    def undo(effect: killick.Effect) -> None:
        seen.append(effect.progress)

    @killick.tool(effect="idempotent", compensate=undo)
    async def copy(step: killick.ToolStep = killick.STEP) -> None:
        made.append(1)
        step.progress(10 * len(made))
        if len(made) == 1:
            world.die()
        raise ValueError("no")

    plan((copy,))
    kd = world.killed(saga, run="r")
    fails(kd, saga)
    assert seen == [20]


def test_r20_what_was_adopted_is_undone_too(world: Any, shop: Shop) -> None:
    plan((shop.tool("book"), "hotel"))
    world.kd.run(calls_each, id="r")

    @killick.agent(name="calls_each", on_failure="compensate")
    async def fails_now(run: killick.Run) -> None:
        for tool, *arguments in PLAN:
            await run.call(tool, *arguments)
        raise ValueError("no")

    try:
        world.rewind_to("r", "1")
        fails(world.kd, fails_now)
    finally:
        killick.agent(name="calls_each")(calls_each.fn)
    assert shop.done == ["hotel"]
    assert shop.order == ["hotel"]


def test_r20_what_a_left_timeline_did_and_nobody_adopted_is_undone_or_listed(world: Any, shop: Shop) -> None:
    act = shop.tool("book")
    plan((act, "hotel"))
    wanted = {"fail": False}

    @killick.agent(on_failure="compensate")
    async def agent(run: killick.Run) -> None:
        for tool, *arguments in PLAN:
            await run.call(tool, *arguments)
        if wanted["fail"]:
            raise ValueError("no")

    world.kd.run(agent, id="r")
    plan((act, "inn"))
    wanted["fail"] = True
    world.rewind_to("r", "1")
    parks(world.kd, agent)
    world.kd.answer("r", "approve")
    fails(world.kd, agent)
    assert "inn" in shop.order
    assert "hotel" in shop.order or not_undone(world) != []


def test_r20_a_run_that_was_undone_and_goes_on_does_not_count_on_what_is_gone(world: Any, shop: Shop) -> None:
    shop.story["flight"] = killick.NotDone("full")
    act = shop.tool("book", retry=killick.Retry(attempts=1))

    @killick.agent(on_failure="compensate")
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        await run.call(act, "flight")

    fails(world.kd, agent)
    assert shop.order == ["hotel"]
    del shop.story["flight"]
    try:
        world.kd.resume("r")
    except AnswerRefused:
        return
    world.kd.run(agent, id="r")
    assert shop.done == ["hotel", "flight", "hotel", "flight"]


def test_r20_a_blocking_agent_is_undone_as_well(world: Any, shop: Shop) -> None:
    act = shop.tool("book")

    @killick.agent(on_failure="compensate")
    def agent(run: killick.SyncRun) -> None:
        run.gather(lambda: run.call(act, "hotel"), lambda: run.call(act, "flight"))
        run.call(act, "car")
        raise ValueError("no")

    fails(world.kd, agent)
    assert shop.order == ["car", "flight", "hotel"]


def test_r20_what_has_no_compensation_is_listed_when_the_run_ends(world: Any, shop: Shop) -> None:
    plan((shop.tool("book"), "hotel"), (shop.tool("mail", compensate=None), "ann"))
    with pytest.raises(killick.RunFailed):
        try:
            world.kd.run(saga, id="r")
        except killick.RunWaiting:
            world.kd.answer("r", "stop")
            world.kd.run(saga, id="r")
    assert shop.order == ["hotel"]
    assert not_undone(world) == ["mail at step 2"]


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize(("answer", "left"), [("happened", []), ("stop", ["book at step 2"])])
def test_r20_what_could_not_be_undone_waits_for_a_person(
    world: Any, shop: Shop, answer: Any, left: list[str], cold: bool
) -> None:
    shop.story["undo flight"] = killick.NotDone("closed")
    plan((shop.tool("book"), "hotel"), (shop.tool("book"), "flight"))
    waiting = parks(world.kd, saga)
    assert "flight" in str(waiting) or "book" in str(waiting)
    kd = world.process() if cold else world.kd
    if cold:
        parks(kd, saga)
    kd.answer("r", answer)
    fails(kd, saga)
    assert shop.order == ["hotel"]
    assert not_undone(world) == left


def test_r20_an_undoing_in_doubt_is_settled_like_any_other(world: Any, shop: Shop) -> None:
    shop.story["undo hotel"] = ValueError("?")
    plan((shop.tool("book"), "hotel"))
    waiting = parks(world.kd, saga)
    assert waiting.waits[0].waits_for == "settlement"
    world.process().answer("r", "happened")
    fails(world.kd, saga)
    assert not_undone(world) == []


def test_r20_undoing_goes_on_where_a_dead_process_left_it(world: Any, shop: Shop) -> None:
    shop.story["undo flight"] = "dies"
    undo = killick.tool(name="undo_book", effect="idempotent")(shop.undo)
    plan(*((shop.tool("book", compensate=undo), what) for what in ("hotel", "flight", "car")))
    kd = world.killed(saga, run="r")
    assert shop.order == ["car"]
    fails(kd, saga)
    assert shop.order == ["car", "flight", "hotel"]
    assert not_undone(world) == []


@pytest.mark.parametrize("cold", [False, True])
def test_r20_a_cancelled_run_is_undone_when_that_is_asked_for(world: Any, shop: Shop, cold: bool) -> None:
    act = shop.tool("book")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        await run.call(act, "flight")
        await run.ask("go on?")

    parks(world.kd, agent)
    kd = world.process() if cold else world.kd
    kd.cancel("r", compensate=True, by="eve")
    with pytest.raises(killick.errors.RunCancelled) as cancelled:
        kd.run(agent, id="r")
    assert shop.order == ["flight", "hotel"]
    assert cancelled.value.not_undone == ()


def test_r20_a_cancelled_run_is_not_undone_unless_that_is_asked_for(world: Any, shop: Shop) -> None:
    act = shop.tool("book")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        await run.ask("go on?")

    parks(world.kd, agent)
    world.kd.cancel("r")
    with pytest.raises(killick.errors.RunCancelled):
        world.kd.run(agent, id="r")
    assert shop.undone == []


@pytest.mark.parametrize("settled", ["happened", "not"])
def test_r20_an_attempt_in_doubt_is_settled_before_a_cancelled_run_is_undone(
    world: Any, shop: Shop, settled: Any
) -> None:
    shop.story["flight"] = ValueError("?")
    act = shop.tool("book")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        await run.call(act, "flight")

    parks(world.kd, agent)
    world.kd.cancel("r", compensate=True)
    parks(world.kd, agent)
    assert shop.undone == []
    world.kd.answer("r", settled, value="did flight" if settled == "happened" else None)
    with pytest.raises(killick.errors.RunCancelled):
        world.kd.run(agent, id="r")
    assert shop.order == (["flight", "hotel"] if settled == "happened" else ["hotel"])


@pytest.mark.parametrize(("answer", "left"), [("happened", ()), ("stop", ("book at step 1",))])
def test_r20_what_a_cancelled_run_could_not_undo_waits_for_a_person(
    world: Any, shop: Shop, answer: Any, left: tuple[str, ...]
) -> None:
    shop.story["undo hotel"] = killick.NotDone("closed")
    act = shop.tool("book")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        await run.ask("go on?")

    parks(world.kd, agent)
    world.kd.cancel("r", compensate=True)
    parks(world.kd, agent)
    world.kd.answer("r", answer)
    with pytest.raises(killick.errors.RunCancelled) as cancelled:
        world.kd.run(agent, id="r")
    assert cancelled.value.not_undone == left


def test_r20_a_running_tool_is_stopped_settled_and_undone_when_the_run_is_cancelled(world: Any) -> None:
    begun = threading.Event()
    undone: list[tuple[Any, Any]] = []

    def undo(effect: killick.Effect) -> None:
        undone.append((effect.result, effect.progress))

    @killick.tool(reconcile=says(killick.Happened("found")), compensate=undo)
    async def act(step: killick.ToolStep = killick.STEP) -> str:
        step.progress("half")
        begun.set()
        await asyncio.sleep(30)
        return "done"

    plan((act,))
    ended: list[BaseException] = []

    def go() -> None:
        try:
            world.kd.run(calls_each, id="r")
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    assert begun.wait(300)
    world.kd.cancel("r", compensate=True)
    thread.join(300)
    assert isinstance(ended[0], killick.errors.RunCancelled)
    assert undone == [("found", "half")]


def test_r20_children_are_undone_first(world: Any, shop: Shop) -> None:
    act = shop.tool("book")

    @killick.agent
    async def child(run: killick.Run) -> None:
        await run.call(act, "of the child")
        await run.ask("go on?")

    @killick.agent(on_failure="compensate")
    async def parent(run: killick.Run) -> None:
        await run.call(act, "before")
        spawned = await run.spawn(child, id="c")
        await run.call(act, "after")
        await run.wait("fail now")
        await spawned.result()

    parks(world.kd, parent)
    parks(world.kd, parent)
    world.kd.cancel("r", compensate=True)
    with pytest.raises(killick.errors.RunCancelled):
        world.kd.run(parent, id="r")
    assert shop.order == ["of the child", "after", "before"]
    assert world.kd.info("c").status == "cancelled"


def test_r20_what_a_finished_child_did_is_undone_or_listed(world: Any, shop: Shop) -> None:
    act = shop.tool("book")

    @killick.agent
    async def child(run: killick.Run) -> None:
        await run.call(act, "of the child")

    @killick.agent(on_failure="compensate")
    async def parent(run: killick.Run) -> None:
        spawned = await run.spawn(child, id="c")
        await spawned.result()
        raise ValueError("no")

    fails(world.kd, parent)
    assert shop.order == ["of the child"] or not_undone(world) != []


def test_r20_a_long_run_can_be_cancelled(world: Any, shop: Shop) -> None:
    act = shop.tool("book")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.call(act, "hotel")
        await run.ask("go on?")

    parks(world.kd, agent)
    log = world.kd.runtime.log.open("r")
    log.append(*(Entry(e.NoteMade(at=1, by="somebody")) for _ in range(10_001)))
    kd = world.process()
    kd.cancel("r", compensate=True)
    with pytest.raises(killick.errors.RunCancelled):
        kd.run(agent, id="r")
    assert shop.order == ["hotel"]


# confirm ------------------------------------------------------------------------------------------


def test_r20_confirm_sees_the_effect_with_its_result_and_lets_it_pass(world: Any) -> None:
    seen: list[killick.Effect] = []

    def look(effect: killick.Effect) -> bool:
        seen.append(effect)
        return True

    @killick.tool(confirm=look)
    async def pay(to: str) -> Receipt:
        return Receipt(1, to)

    plan((pay, "ann"))
    assert world.kd.run(calls_each, id="r") == [{"number": 1, "to": "ann"}]
    [effect] = seen
    assert (effect.result, effect.arguments["to"]) == (Receipt(1, "ann"), "ann")
    assert effect.key == world.started("r")[0].key
    assert [each.confirmed for each in world.told("r", e.EffectConfirmed)] == [True]


@pytest.mark.parametrize("shows", [False, ConnectionResetError("cannot look")], ids=repr)
def test_r20_an_effect_that_the_world_does_not_show_fails_the_step_live_and_on_replay(world: Any, shows: Any) -> None:
    seen: list[str] = []

    async def look(effect: killick.Effect) -> bool:
        if isinstance(shows, Exception):
            raise shows
        return bool(shows)

    @killick.tool(confirm=look)
    async def pay() -> int:
        return 1

    @killick.agent
    async def agent(run: killick.Run) -> None:
        try:
            paid = await run.call(pay)
            seen.append(f"returned {paid}")
        except Exception as error:
            seen.append(type(error).__name__)
        await run.ask("go on?")

    parks(world.kd, agent)
    parks(world.process(), agent)
    assert seen == ["StepFailed", "StepFailed"]


def test_r20_an_effect_is_confirmed_although_the_process_died_in_between(world: Any) -> None:
    looked: list[int] = []

    async def look(effect: killick.Effect) -> bool:
        looked.append(1)
        if len(looked) == 1:
            world.die()
        return False

    @killick.tool(confirm=look)
    async def pay() -> int:
        return 1

    plan((pay,))
    kd = world.killed(calls_each, run="r")
    fails(kd)
    assert len(looked) == 2


def test_r20_confirm_knows_the_key_of_what_was_adopted(world: Any) -> None:
    seen: list[str] = []

    def look(effect: killick.Effect) -> bool:
        seen.append(effect.key)
        return True

    @killick.tool(confirm=look)
    async def pay() -> int:
        return 1

    plan((pay,))
    world.kd.run(calls_each, id="r")
    world.rewind_to("r", "1")
    world.kd.run(calls_each, id="r")
    assert set(seen) == {world.started("r")[0].key}


# dying at every commit in turn --------------------------------------------------------------------


class Honest:
    """A far side that remembers what was done under which key, and can be asked."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.keys: dict[str, str] = {}

    def do(self, key: str, what: str) -> str:
        self.done.append(what)
        self.keys[key] = f"did {what}"
        return self.keys[key]

    def look(self, effect: killick.Effect) -> Any:
        return killick.Happened(self.keys[effect.key]) if effect.key in self.keys else killick.DidNotHappen()

    def tools(self) -> tuple[Any, Any, Any]:
        """One that can be asked about, one that honours its key, one that uses up what it is given."""

        @killick.tool(effect="idempotent", name="undo")
        async def undo(effect: killick.Effect, key: killick.Key = killick.KEY) -> None:
            if key not in self.keys:
                self.do(key, f"undo {effect.arguments['what']}")

        @killick.tool(name="asked", reconcile=self.look, compensate=undo)
        async def asked(what: str, key: killick.Key = killick.KEY) -> str:
            return self.do(key, what)

        @killick.tool(name="keyed", effect="idempotent", compensate=undo)
        async def keyed(what: str, key: killick.Key = killick.KEY) -> str:
            return self.keys[key] if key in self.keys else self.do(key, what)

        @killick.tool(name="once", consumes="what", reconcile=self.look, compensate=undo)
        async def once(what: str, key: killick.Key = killick.KEY) -> str:
            return self.do(key, what)

        return asked, keyed, once


DONE = ["a", "b", "c", "d"]


def dying(story: Callable[[str, int, str], int], check: Callable[[str, Honest], None]) -> None:
    """Tell a story once for every commit it makes, with a process that dies before it or after it."""

    def told(run: str, number: int, when: str) -> int:
        far = Honest()
        asked, keyed, once = far.tools()
        plan((asked, "a"), (keyed, "b"), (once, f"c {run}"), (asked, "d"))
        commits = story(run, number, when)
        far.done = [what.replace(f"c {run}", "c") for what in far.done]
        check(run, far)
        return commits

    commits = told("whole", 0, "never")
    assert commits > 4
    for number in range(1, commits + 1):
        for when in ("before", "after"):
            try:
                told(f"{when}_{number}", number, when)
            except (AssertionError, KillickError) as wrong:
                raise AssertionError(f"died {when} commit {number} of {commits}: {wrong!r}") from wrong


def test_r15_whichever_commit_a_process_dies_at_everything_is_done_once(world: Any) -> None:
    def story(run: str, number: int, when: str) -> int:
        world.process()
        line = world.line
        line.cut_at = (number, when)
        world.outlived(calls_each, run=run)
        return len(line.appends)

    def check(run: str, far: Honest) -> None:
        assert far.done == DONE

    dying(story, check)


def test_r18_whichever_commit_a_process_dies_at_after_a_rewind_everything_is_adopted_once(world: Any) -> None:
    def story(run: str, number: int, when: str) -> int:
        world.process().run(calls_each, id=run)
        world.rewind_to(run, "1")
        world.process()
        line = world.line
        line.cut_at = (number, when)
        world.outlived(calls_each, run=run)
        return len(line.appends)

    def check(run: str, far: Honest) -> None:
        assert far.done == DONE
        adopted = world.told(run, e.StepAdopted)
        assert [each.step for each in adopted] == ["1", "2", "3", "4"]

    dying(story, check)


@pytest.mark.slow
def test_r20_whichever_commit_a_process_dies_at_everything_is_undone_once(world: Any) -> None:
    def story(run: str, number: int, when: str) -> int:
        world.process()
        line = world.line
        line.cut_at = (number, when)
        with pytest.raises(killick.RunFailed, match="last straw"):
            world.outlived(saga, run=run)
        return len(line.appends)

    def check(run: str, far: Honest) -> None:
        undone = [what.split()[1] for what in far.done[4:]]
        assert far.done[:4] == DONE
        assert undone == DONE[::-1]
        assert not_undone(world, run) == []

    dying(story, check)


def test_a_run_that_adopted_an_orphan_verifies() -> None:
    @killick.tool(effect="at_most_once")
    async def paid_before(amount: int) -> int:
        return amount

    @killick.agent
    async def pays_once(run: killick.Run) -> str:
        await run.call(paid_before, 3)
        return (await run.ask("Right?")).kind

    with killick.open("memory:") as kd:
        kd.start(pays_once, id="r")
        kd.advance("r")
        first = kd.state("r").fold.step("1")
        assert first is not None
        kd.runtime.log.open("r").append(Entry(e.RunRewound(at=1, cut=first.intended - 1, generation=1)))
        kd.advance("r")
        assert any(isinstance(each.event, e.StepAdopted) for each in kd.events("r"))
        assert kd.store.verify().problems == []


@pytest.mark.parametrize(("verb", "calls"), [("happened", 1), ("not", 2)])
def test_what_a_repair_left_in_doubt_is_asked_about_before_it_is_done_again(verb: Any, calls: int) -> None:
    paid: list[int] = []

    @killick.tool(effect="at_most_once")
    async def paid_out(amount: int) -> int:
        paid.append(amount)
        return amount

    @killick.agent
    async def pays_out(run: killick.Run) -> int:
        return await run.call(paid_out, 5)

    store = MemoryStore()
    with killick.Client(store) as kd:
        kd.run(pays_out, id="r")
        intended = next(each.seq for each in kd.events("r") if isinstance(each.event, e.StepIntended))
        rows = store._runs["r"].rows
        rows[intended] = replace(rows[intended], hash=bytes(32))
        assert not kd.store.verify().holds
        with pytest.raises(killick.KillickError, match="broken"):
            kd.run(pays_out, id="r")
        repair(kd.runtime.log, "r", at=1, reason="a flipped bit")
        kd.resume("r")
        with pytest.raises(killick.RunWaiting, match="in a part of the record that did not hold"):
            kd.run(pays_out, id="r")
        kd.answer("r", verb, value=5 if verb == "happened" else None)
        assert kd.run(pays_out, id="r") == 5
        assert paid == [5] * calls
        assert kd.store.verify().holds


def test_an_answer_after_the_deadline_is_refused_though_nobody_has_looked_yet() -> None:
    @killick.agent
    async def asks_in_time(run: killick.Run) -> str:
        return (await run.ask("Now?", timeout="1h", default="reject")).kind

    clock = killick.clock.ManualClock()
    with killick.Client(MemoryStore(clock=clock), clock=clock) as kd:
        kd.start(asks_in_time, id="r")
        kd.advance("r")
        clock.advance(3_601)
        with pytest.raises(killick.KillickError, match="expired at"):
            kd.answer("r", "approve")
        assert kd.advance("r").result == "reject"
