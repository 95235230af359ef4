"""A blocking tool stands at a gate while its run goes through every transition that could let it go.

The far side keeps a book of its own: what it says and what the record says must agree, however the run went on.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.engine.steps import attempt as live_calls
from killick.engine.steps.attempt import LiveCall
from killick.model import events as e

DEADLINE_SECONDS = 300.0


class Bank:
    """A far side: what was paid and refunded, in order. It pays only when its gate is open."""

    def __init__(self) -> None:
        self.book: list[str] = []
        self.asked: list[str] = []
        self.expected = 1
        self.arrived: list[int] = []
        self.at_the_gate = threading.Event()
        """Set when as many threads as are expected are at the gate."""
        self.gate = threading.Event()

    def pay(self) -> str:
        self.arrived.append(threading.get_ident())
        if len(self.arrived) >= self.expected:
            self.at_the_gate.set()
        assert self.gate.wait(DEADLINE_SECONDS)
        self.book.append("paid")
        return "receipt"

    def refund(self, effect: killick.Effect) -> None:
        self.book.append("refunded")

    def look(self, effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
        """Right whenever it is asked; and wrong a moment later, if a thread of ours is at it."""
        self.asked.append(effect.step)
        return killick.Happened("receipt") if "paid" in self.book else killick.DidNotHappen()


class Office:
    """A store in a file, the client that runs an agent there, and what came of that."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "killick.db"
        self.bank = Bank()
        self.kd = killick.open(self.path)
        self.next = killick.open(self.path)
        """Another process, as far as the store can tell."""
        self.outcome: list[Any] = []
        self._threads: list[threading.Thread] = []
        options: dict[str, Any] = {"reconcile": self.bank.look, "compensate": self.bank.refund}
        self.pay = killick.tool(name="pay", **options)(lambda: self.bank.pay())
        self.pay_in_time = killick.tool(name="pay_in_time", timeout=0.01, **options)(lambda: self.bank.pay())

        @killick.agent(name="paying")
        async def paying(run: killick.Run, tool: str = "pay") -> Any:
            return await run.call(self.pay if tool == "pay" else self.pay_in_time)

        self.agent = paying

    def beside(self, work: Callable[[], Any]) -> threading.Thread:
        """Do something in a thread, and note what came of it."""

        def go() -> None:
            try:
                self.outcome.append(work())
            except BaseException as error:
                self.outcome.append(error)

        thread = threading.Thread(target=go, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def begin(self, tool: str = "pay") -> threading.Thread:
        thread = self.beside(lambda: self.kd.run(self.agent, tool, id="r"))
        assert self.bank.at_the_gate.wait(DEADLINE_SECONDS)
        return thread

    def serve(self) -> tuple[killick.Worker, asyncio.AbstractEventLoop, threading.Thread]:
        """A worker that has the run in hand."""
        made: list[Any] = []
        ready = threading.Event()

        async def serving() -> None:
            worker = self.kd.worker(concurrency=1, slice_seconds=0.0)
            made.extend((worker, asyncio.get_running_loop()))
            ready.set()
            await worker.serve()

        self.kd.start(self.agent, "pay", id="r")
        thread = self.beside(lambda: asyncio.run(serving()))
        assert ready.wait(DEADLINE_SECONDS)
        assert self.bank.at_the_gate.wait(DEADLINE_SECONDS)
        return made[0], made[1], thread

    def events(self, kind: type[e.Event]) -> list[Any]:
        return [told.event for told in self.next.events("r") if isinstance(told.event, kind)]

    def is_free(self) -> bool:
        """Whether another process could take the run."""
        store, head = self.next.runtime.store, self.next.runtime.log.head("r")
        ran_out = head.lease_until_us is not None and head.lease_until_us <= store.now_us()
        return head.holder is None or ran_out or not store.lives(head.holder)

    def finish(self, deadline: float = DEADLINE_SECONDS) -> None:
        """Another process goes on with the run, as often as it takes."""
        until(self.is_free)
        for _ in range(5):
            row = self.next.runtime.store.index("r")
            if row is not None and row.status in ("completed", "cancelled", "failed"):
                return
            if row is not None and row.status == "paused":
                self.next.resume("r")
            with contextlib.suppress(killick.errors.RunCancelled):
                self.next.run(self.agent, self.next.state("r").fold and "pay", id="r")

    def judge(self, *book: str) -> None:
        """The book, and a record that never says of a payment that it did not happen."""
        assert self.bank.book == list(book)
        assert [settled.settlement for settled in self.events(e.AttemptSettled)] in ([], ["happened"])
        effects = [effect for effect in self.next.runtime.log.ledger("r").effects if not effect.undoes]
        assert [effect.status for effect in effects] == ["undone" if "refunded" in book else "happened"]
        assert self.next.store.verify("r").holds

    def close(self) -> None:
        self.bank.gate.set()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)
        self.kd.close()
        self.next.close()


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    made = Office(tmp_path)
    yield made
    made.close()


# every transition ---------------------------------------------------------------------------------


def cancel(office: Office) -> threading.Thread:
    driving = office.begin()
    office.kd.cancel("r", compensate=True)
    until(lambda: office.events(e.CancelRequested))
    return driving


def close(office: Office) -> threading.Thread:
    office.begin()
    closing = office.beside(office.kd.close)
    until(lambda: office.kd.runtime.is_closed)
    return closing


def pause(office: Office) -> threading.Thread:
    driving = office.begin()
    office.kd.pause("r")
    until(lambda: office.events(e.RunPaused))
    return driving


def rewind(office: Office) -> threading.Thread:
    driving = office.begin()
    office.beside(lambda: office.next.rewind("r", "1:before"))
    return driving


def drain(office: Office) -> threading.Thread:
    worker, loop, serving = office.serve()
    loop.call_soon_threadsafe(worker.drain)
    until(lambda: worker.stopping)
    return serving


def stop(office: Office) -> threading.Thread:
    worker, loop, serving = office.serve()
    loop.call_soon_threadsafe(worker.stop)
    until(lambda: worker.stopping)
    return serving


def give_way(office: Office) -> threading.Thread:
    worker, loop, serving = office.serve()
    office.bank.at_the_gate.clear()

    @killick.agent(name="urgent")
    async def urgent(run: killick.Run) -> None: ...

    office.next.start(urgent, id="urgent", priority=9)
    until(lambda: any(slot.leaves for slot in list(worker._slots.values())))
    loop.call_soon_threadsafe(worker.drain)
    return serving


def cancelled_task(office: Office) -> threading.Thread:
    """The caller's own loop ends: `asyncio.run` cancels what is under way."""

    async def main() -> None:
        task = asyncio.ensure_future(office.kd.as_async().run(office.agent, "pay", id="r"))
        await asyncio.to_thread(office.bank.at_the_gate.wait, DEADLINE_SECONDS)
        task.cancel()
        await task

    driving = office.beside(lambda: asyncio.run(main()))
    assert office.bank.at_the_gate.wait(DEADLINE_SECONDS)
    return driving


def closed_loop(office: Office) -> threading.Thread:
    """A loop is closed under its tasks, which never hear of it."""
    loop = asyncio.new_event_loop()
    left: list[Any] = []

    async def main() -> None:
        left.append(asyncio.ensure_future(office.kd.as_async().run(office.agent, "pay", id="r")))
        await asyncio.to_thread(office.bank.at_the_gate.wait, DEADLINE_SECONDS)

    def go() -> None:
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        office.kd.close()

    closing = office.beside(go)
    assert office.bank.at_the_gate.wait(DEADLINE_SECONDS)
    return closing


def closed_loop_after_it_ended(office: Office) -> threading.Thread:
    """The thread ends while its loop stands still, and the loop is closed before it can take the result."""
    loop = asyncio.new_event_loop()
    left: list[Any] = []

    async def main() -> None:
        left.append(asyncio.ensure_future(office.kd.as_async().run(office.agent, "pay", id="r")))
        await asyncio.to_thread(office.bank.at_the_gate.wait, DEADLINE_SECONDS)

    def go() -> None:
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_default_executor())
        standing.set()
        until(lambda: not office.kd.runtime.engine.live.of("r"))
        loop.close()
        office.kd.close()

    standing = threading.Event()
    closing = office.beside(go)
    assert standing.wait(DEADLINE_SECONDS)
    return closing


TRANSITIONS = [cancel, close, pause, rewind, drain, stop, give_way, cancelled_task, closed_loop]


@pytest.mark.parametrize("transition", [*TRANSITIONS, closed_loop_after_it_ended])
def test_r15_a_blocking_tool_is_waited_for_and_its_result_recorded(office: Office, transition: Any) -> None:
    thread = transition(office)
    assert not office.is_free()
    assert office.bank.asked == []
    office.bank.gate.set()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    office.finish()
    assert office.bank.asked == []
    office.judge("paid", *(["refunded"] if transition is cancel else []))


UNBOUNDED = {drain, give_way, pause, rewind}
"""These let an open attempt finish, however long that takes."""


@pytest.mark.parametrize("transition", [each for each in TRANSITIONS if each not in UNBOUNDED])
def test_r15_a_run_stays_leased_while_a_thread_lives_that_was_waited_for_in_vain(
    office: Office, transition: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_calls, "ABANDON_SECONDS", 0.05)
    thread = transition(office)
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()
    assert not office.is_free()
    with pytest.raises(killick.errors.RunBusy):
        office.next.run(office.agent, "pay", id="r")
    assert (office.bank.asked, office.bank.book) == ([], [])
    office.bank.gate.set()
    office.finish()
    assert office.bank.asked == []
    office.judge("paid", *(["refunded"] if transition is cancel else []))


COLLECTED = """
import asyncio, gc
import killick

@killick.tool(effect="reads")
async def quick(number: int) -> None: ...

@killick.tool(effect="reads")
async def hang() -> None:
    begun.set()
    await asyncio.Event().wait()

@killick.agent
async def agent(run: killick.Run) -> None:
    for number in range(20):  # so that a commit needs no loop
        await run.call(quick, number)
    await run.call(hang)

async def begin() -> None:
    driven.append(asyncio.ensure_future(kd.as_async().run(agent, id="r")))
    await begun.wait()
    kd.runtime.executor().notify("r")
    loop.stop()

def coroutine(task, name):
    found = task.get_coro()
    while found.__name__ != name:
        found = found.cr_await
    return found

begun, driven = asyncio.Event(), []
with killick.open("memory:") as kd:
    gc.disable()
    loop = asyncio.new_event_loop()
    first = loop.create_task(begin())
    loop.run_forever()
    # The collector closes coroutines in any order, and nothing else refers to their tasks.
    [main] = asyncio.all_tasks(loop) - {first, *driven}
    coroutines = coroutine(main, "run_agent"), coroutine(driven[0], "until_idle")
    del main
    driven.clear()
    loop.close()
    kd.run(killick.agent(name="next")(lambda run: None), id="next")  # another loop: what the closed one had is released
    for each in coroutines:
        each.close()
    gc.collect()
    print(kd.info("r").status, kd.events("r")[-1].event.__struct_config__.tag)
"""


def test_the_code_of_a_closed_loop_is_collected_without_a_crash_and_without_an_end_of_its_run() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "running step.started\n"), done.stderr


# time is up ---------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that were given up are waited for a moment only."""
    monkeypatch.setattr(live_calls, "ABANDON_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_r15_a_run_that_waits_for_a_person_stays_leased_while_the_thread_that_they_are_asked_about_lives(
    office: Office,
) -> None:
    office.begin("pay_in_time").join(DEADLINE_SECONDS)
    assert isinstance(office.outcome[0], killick.RunWaiting)
    assert not office.is_free()
    office.next.answer("r", "not")  # it is wrong a moment later
    with pytest.raises(killick.errors.RunBusy):
        office.next.advance("r")
    office.bank.gate.set()
    until(office.is_free)
    office.next.advance("r")
    assert office.bank.asked == []
    office.judge("paid")


@pytest.mark.usefixtures("impatient")
def test_r15_the_same_process_goes_on_with_a_run_that_it_keeps_for_a_thread(office: Office) -> None:
    office.begin("pay_in_time").join(DEADLINE_SECONDS)
    office.kd.answer("r", "happened", value="by hand")
    assert office.kd.run(office.agent, "pay_in_time", id="r") == "by hand"
    office.bank.gate.set()
    assert office.kd.runtime.engine.live.wait(DEADLINE_SECONDS)
    assert office.next.runtime.log.head("r").holder is None


@pytest.mark.usefixtures("impatient")
def test_r15_a_late_refusal_settles_what_a_person_was_asked(office: Office) -> None:
    def refuse() -> None:
        office.bank.pay()
        office.bank.book.clear()
        raise killick.NotDone("the account is closed")

    office.pay_in_time = killick.tool(name="pay_in_time", timeout=0.01)(refuse)
    office.begin("pay_in_time").join(DEADLINE_SECONDS)
    office.bank.gate.set()
    until(office.is_free)
    [settled] = office.events(e.AttemptSettled)
    assert (settled.settlement, settled.by) == ("did_not_happen", "late result")
    assert office.next.inbox() == []


# other threads than a tool's ----------------------------------------------------------------------


class Gate:
    """Stands before a reconciler or a compensation."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.gate = threading.Event()
        self.passed = 0

    def wait(self) -> None:
        self.reached.set()
        assert self.gate.wait(DEADLINE_SECONDS)
        self.passed += 1


@pytest.mark.usefixtures("impatient")
def test_r15_a_run_stays_leased_while_a_reconciler_of_it_is_at_work(office: Office) -> None:
    gate = Gate()

    def look(effect: killick.Effect) -> killick.Happened:
        gate.wait()
        return killick.Happened("found")

    def fail() -> str:
        office.bank.at_the_gate.set()
        raise RuntimeError("the line went dead")

    office.pay = killick.tool(name="pay", reconcile=look)(fail)
    driving = office.begin()
    assert gate.reached.wait(DEADLINE_SECONDS)
    office.kd.close()
    driving.join(DEADLINE_SECONDS)
    assert not office.is_free()
    gate.gate.set()
    until(office.is_free)
    assert office.next.run(office.agent, "pay", id="r") == "found"


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.usefixtures("impatient")
def test_r15_a_run_stays_leased_while_a_compensation_of_it_is_at_work(office: Office, beside: bool) -> None:
    gate = Gate()

    @killick.tool(name="refund", reconcile=office.bank.look)
    def refund(effect: killick.Effect) -> None:
        gate.wait()
        office.bank.refund(effect)

    office.pay = killick.tool(name="pay", compensate=refund)(office.bank.pay)
    office.bank.gate.set()
    if beside:
        office.kd.run(office.agent, "pay", id="r")
        driving = office.beside(lambda: office.kd.undo("r", "1"))
    else:

        @killick.agent(name="paying", on_failure="compensate")
        async def paying(run: killick.Run, tool: str = "pay") -> Any:
            await run.call(office.pay)
            raise LookupError("no")

        office.agent = paying
        driving = office.begin()
    assert gate.reached.wait(DEADLINE_SECONDS)
    office.kd.close()
    driving.join(DEADLINE_SECONDS)
    assert not office.is_free()
    assert office.bank.asked == []
    gate.gate.set()
    until(office.is_free)
    if not beside:
        with contextlib.suppress(killick.RunFailed):
            office.next.run(office.agent, "pay", id="r")
    assert (gate.passed, office.bank.asked) == (1, [])
    office.judge("paid", "refunded")


@pytest.mark.usefixtures("impatient")
def test_r15_nothing_is_undone_while_a_thread_is_still_at_it(office: Office) -> None:
    options: dict[str, Any] = {"effect": "idempotent", "timeout": 0.01, "retry": killick.Retry(attempts=1)}
    office.pay_in_time = killick.tool(name="pay_in_time", compensate=office.bank.refund, **options)(office.bank.pay)

    @killick.agent(name="paying", on_failure="compensate")
    async def paying(run: killick.Run, tool: str = "pay") -> Any:
        return await run.call(office.pay_in_time)

    office.agent = paying
    office.begin("pay_in_time").join(DEADLINE_SECONDS)
    assert isinstance(office.outcome[0], killick.errors.StillRunning)
    assert not office.is_free()
    assert office.bank.book == []
    office.bank.gate.set()
    until(office.is_free)
    with contextlib.suppress(killick.RunFailed):
        office.next.run(office.agent, "pay_in_time", id="r")
    assert office.bank.book == ["paid", "refunded"]


# parallel branches, blocking agents, hosts --------------------------------------------------------


@pytest.mark.parametrize("ended", [cancel, close])
def test_r15_threads_of_all_branches_are_waited_for(office: Office, ended: Any) -> None:
    @killick.agent(name="paying")
    async def paying(run: killick.Run, tool: str = "pay") -> Any:
        return await run.gather(run.call(office.pay), run.call(office.pay))

    office.agent, office.bank.expected = paying, 2
    thread = ended(office)
    office.bank.gate.set()
    thread.join(DEADLINE_SECONDS)
    office.finish()
    assert office.bank.book == ["paid", "paid", *(["refunded"] * 2 if ended is cancel else [])]


def test_r15_a_branch_whose_sibling_failed_is_waited_for(office: Office) -> None:
    failing = threading.Event()

    @killick.tool(effect="reads")
    def fail() -> None:
        assert office.bank.at_the_gate.wait(DEADLINE_SECONDS)
        failing.set()
        raise LookupError("no")

    @killick.agent(name="paying", on_failure="compensate")
    async def paying(run: killick.Run, tool: str = "pay") -> Any:
        return await run.gather(run.call(office.pay), run.call(fail))

    office.agent = paying
    driving = office.begin()
    assert failing.wait(DEADLINE_SECONDS)
    assert not office.is_free()
    office.bank.gate.set()
    driving.join(DEADLINE_SECONDS)
    assert office.bank.asked == []
    office.judge("paid", "refunded")


@pytest.mark.parametrize("ended", [cancel, close])
@pytest.mark.parametrize("within", [True, False])
def test_r15_a_blocking_agent_is_no_different(
    office: Office, ended: Any, within: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @killick.agent(name="paying")
    def paying(run: killick.SyncRun, tool: str = "pay") -> Any:
        return run.call(office.pay)

    office.agent = paying
    if not within:
        monkeypatch.setattr(live_calls, "ABANDON_SECONDS", 0.05)
    thread = ended(office)
    if not within:
        thread.join(DEADLINE_SECONDS)
    assert not office.is_free()
    office.bank.gate.set()
    thread.join(DEADLINE_SECONDS)
    office.finish()
    assert office.bank.asked == []
    office.judge("paid", *(["refunded"] if ended is cancel else []))


@pytest.mark.parametrize("within", [True, False])
def test_r15_a_hosted_call_is_no_different(office: Office, within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not within:
        monkeypatch.setattr(live_calls, "ABANDON_SECONDS", 0.05)

    def calls(kd: killick.Client) -> Any:
        with kd.host("r") as host:
            return host.call_sync(office.pay, {}, key="one")

    driving = office.beside(lambda: calls(office.kd))
    assert office.bank.at_the_gate.wait(DEADLINE_SECONDS)
    closing = office.beside(office.kd.close)
    until(lambda: office.kd.runtime.is_closed)
    if not within:
        closing.join(DEADLINE_SECONDS)
    assert not office.is_free()
    office.bank.gate.set()
    closing.join(DEADLINE_SECONDS)
    driving.join(DEADLINE_SECONDS)
    until(office.is_free)
    assert calls(office.next) == "receipt"
    assert office.bank.asked == []
    office.judge("paid")


def test_r15_a_hosted_coroutine_on_the_callers_loop_is_over_before_its_outcome_is_looked_for(office: Office) -> None:
    """The caller's loop cancels it, and it takes its time to leave."""
    left = threading.Event()

    @killick.tool(name="pay_there", reconcile=office.bank.look)
    async def pay_there() -> str:
        office.bank.at_the_gate.set()
        try:
            await asyncio.sleep(DEADLINE_SECONDS)
        finally:
            await asyncio.to_thread(office.bank.gate.wait, DEADLINE_SECONDS)
            office.bank.book.append("paid")
            left.set()
        return "receipt"

    async def calls() -> Any:
        async with office.kd.host("r") as host:
            call = asyncio.ensure_future(host.call(pay_there, {}, key="one"))
            await asyncio.to_thread(office.bank.at_the_gate.wait, DEADLINE_SECONDS)
            call.cancel()
            await asyncio.sleep(0.05)
            assert office.bank.asked == []
            office.bank.gate.set()
            return await asyncio.gather(call, return_exceptions=True)

    asyncio.run(calls())
    assert left.is_set()
    assert [settled.settlement for settled in office.events(e.AttemptSettled)] == ["happened"]


# calls that are no threads ------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_r15_a_coroutine_that_cannot_be_cancelled_keeps_its_run_leased_too(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("killick.engine.execution.UNWIND_SECONDS", 0.05)

    async def stubborn() -> str:
        waiting = asyncio.ensure_future(asyncio.to_thread(office.bank.pay))
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(waiting)
        return waiting.result()

    office.pay = killick.tool(name="pay", reconcile=office.bank.look)(stubborn)

    async def main() -> None:
        task = asyncio.ensure_future(office.kd.as_async().run(office.agent, "pay", id="r"))
        await asyncio.to_thread(office.bank.at_the_gate.wait, DEADLINE_SECONDS)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, killick.KillickError):
            await task
        assert not office.is_free()
        with pytest.raises(killick.errors.RunBusy):
            await office.next.as_async().advance("r")
        office.bank.gate.set()
        while not office.is_free():
            await asyncio.sleep(0.002)

    asyncio.run(main())
    # The outcome of a cancelled coroutine may be lost with its loop: the bank is asked when it has had time to pay.
    while office.next.advance("r").status == "waiting":
        time.sleep(0.05)
    office.judge("paid")


def test_r15_a_read_is_waited_for_by_nobody(office: Office) -> None:
    """It changes nothing, and may hang: the run is free at once."""
    office.pay = killick.tool(name="pay", effect="reads")(office.bank.pay)
    office.begin().join(0)
    office.kd.close()
    assert office.is_free()


# the end of the process ---------------------------------------------------------------------------

EXITING = """
import pathlib, threading, killick

@killick.tool
def pay():
    pathlib.Path("at_the_gate").touch()
    while not pathlib.Path("gate").exists():
        threading.Event().wait(0.001)
    pathlib.Path("book").write_text("paid")

@killick.agent
async def paying(run: killick.Run) -> None:
    await run.call(pay)

kd = killick.open("killick.db")
threading.Thread(target=lambda: kd.run(paying, id="r"), daemon=True).start()
while not pathlib.Path("at_the_gate").exists():
    threading.Event().wait(0.001)
"""


@pytest.mark.slow
def test_r15_a_process_that_exits_takes_its_threads_along_before_its_run_is_free(tmp_path: Path) -> None:
    exiting = subprocess.run([sys.executable, "-c", EXITING], cwd=tmp_path, check=False, timeout=DEADLINE_SECONDS)
    assert exiting.returncode == 0
    with killick.open(tmp_path / "killick.db") as kd:
        head = kd.runtime.log.head("r")
        assert head.holder is not None
        assert not kd.runtime.store.lives(head.holder)
        (tmp_path / "gate").touch()
        assert [effect.status for effect in kd.runtime.log.ledger("r").effects] == ["open"]
    assert not (tmp_path / "book").exists()


def test_a_call_that_returned_keeps_no_run_leased_while_its_thread_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone, end = threading.Event(), LiveCall.end

    def late(self: LiveCall) -> None:
        if threading.current_thread().name != "killick-loop":
            gone.wait(60)
        end(self)

    @killick.tool(name="returns_early")
    def returns_early() -> str:
        return "done"

    @killick.agent(name="waits_after_a_thread")
    async def waits(run: killick.Run) -> Any:
        await run.call(returns_early)
        return await run.wait("go")

    monkeypatch.setattr(LiveCall, "end", late)
    with killick.open(str(tmp_path / "killick.db")) as kd, killick.open(str(tmp_path / "killick.db")) as other:
        try:
            with pytest.raises(killick.RunWaiting):
                kd.run(waits, id="r")
            with pytest.raises(killick.RunWaiting):
                other.run(waits, id="r")
        finally:
            gone.set()
