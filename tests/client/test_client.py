"""The client: running, starting, looking, and being told clearly what is wrong (section 13)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.client import answers, start
from killick.engine import observers
from killick.engine.control.inbox import COMMAND, delivery
from killick.errors import (
    AgentUnknown,
    AnswerRefused,
    BoundaryUnknown,
    CalledDirectly,
    DeclarationRefused,
    DurationRefused,
    RunBusy,
    RunMismatch,
    RunUnknown,
    ValueRefused,
)
from killick.log import Log
from killick.model import events as e
from killick.store import SqliteStore
from killick.store.protocol import raw_store
from processes import Processes, kinds, told


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@dataclass
class Claim:
    id: int
    amount: float = 0.0


@dataclass
class Verdict:
    paid: bool
    why: str = ""


@killick.tool(effect="at_most_once", name="client_does")
async def does(what: Any) -> Any:
    DONE.append(what)
    return what


@killick.agent(name="client_reviews")
async def reviews(run: killick.Run, claim: Claim) -> Verdict:
    await run.call(does, claim.id)
    return Verdict(True, f"{run.input.amount:g} for {claim.id}")


@killick.agent(name="client_asks")
async def asks(run: killick.Run, claim: Claim) -> str:
    await run.call(does, claim.id)
    return (await run.ask("well?")).kind


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "killick"]


# running ------------------------------------------------------------------------------------------


def test_run_returns_the_result_as_the_type_that_the_agent_declares(processes: Processes) -> None:
    assert processes.new().run(reviews, Claim(17, 1250)) == Verdict(True, "1250 for 17")


def test_an_ended_run_gives_its_recorded_result_again_and_says_so(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    kd = processes.new()
    first = kd.run(reviews, Claim(17), id="r")
    assert said(caplog) == []
    before = kinds(kd, "r")
    for again in (kd, processes.new()):
        assert again.run(reviews, Claim(17), id="r") == first
    assert [message.partition(";")[0] for message in said(caplog)] == ["r: completed earlier"] * 2
    assert (DONE, kinds(kd, "r")) == ([17], before)


def test_a_failed_run_raises_its_recorded_failure_again(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    @killick.agent(name="fails")
    async def fails(run: killick.Run) -> None:
        await run.call(does, 1)
        raise LookupError("no such claim")

    kd = processes.new()
    failures: list[Any] = []
    for client in (kd, kd, processes.new()):
        with pytest.raises(killick.RunFailed, match="no such claim") as failed:
            client.run(fails, id="r")
        failures.append(failed.value.failure)
    assert failures[0].is_a(LookupError)
    assert failures[0] == failures[1] == failures[2]
    assert DONE == [1]
    assert any("failed earlier" in message for message in said(caplog))


MISMATCHED: list[tuple[Any, Any]] = [(reviews, Claim(18)), (reviews, Claim(17, 1)), (asks, Claim(17))]


@pytest.mark.parametrize(("agent", "claim"), MISMATCHED)
@pytest.mark.parametrize("how", ["run", "start"])
def test_the_same_id_with_another_agent_or_input_is_refused_and_changes_nothing(
    processes: Processes, agent: Any, claim: Any, how: str
) -> None:
    kd = processes.new()
    kd.run(reviews, Claim(17), id="r")
    before = kinds(kd, "r"), len(kd.list())
    with pytest.raises(RunMismatch) as refused:
        getattr(kd, how)(agent, claim, id="r")
    assert ("agent" if agent is asks else "input") in refused.value.what
    assert (kinds(kd, "r"), len(kd.list())) == before
    assert DONE == [17]


def test_the_same_id_twice_goes_on_with_the_run(processes: Processes) -> None:
    kd = processes.new()
    for _ in range(3):
        with pytest.raises(killick.RunWaiting):
            kd.run(asks, Claim(17), id="r")
    kd.answer("r", "approve")
    assert kd.run(asks, Claim(17), id="r") == "approve"
    assert DONE == [17]


@killick.agent(name="asks_about")
async def asks_about(run: killick.Run, what: str) -> str:
    return f"{what}: {(await run.ask('Do it?')).kind}"


@pytest.mark.parametrize("is_read_before", [True, False])
def test_a_known_run_continues_and_gives_its_result_without_its_input(
    processes: Processes, *, is_read_before: bool
) -> None:
    client = processes.new()
    with pytest.raises(killick.RunWaiting) as waiting:
        client.run(asks_about, "the roof", id="r")
    client.answer(waiting.value.waits[0].id, "approve")
    client = client if is_read_before else processes.new()
    assert client.run(asks_about, id="r") == "the roof: approve"
    assert client.run(asks_about, id="r") == "the roof: approve"
    with pytest.raises(ValueRefused, match="input: Expected `str`, got `null`"):
        client.run(asks_about, id="new")


def test_the_same_id_by_two_threads_at_once_runs_once(processes: Processes) -> None:
    kd = processes.new()
    outcomes: list[Any] = []
    barrier = threading.Barrier(4)

    def go() -> None:
        barrier.wait(300)
        try:
            outcomes.append(kd.run(reviews, Claim(17), id="r").paid)
        except killick.KillickError as error:
            outcomes.append(type(error).__name__)

    threads = [threading.Thread(target=go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(outcomes) == 4
    assert set(outcomes) <= {True, "RunBusy"}
    assert True in outcomes
    assert DONE == [17]


# without an id ------------------------------------------------------------------------------------


def test_resume_continues_the_unfinished_run_of_a_process_that_died(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    dying, life = processes.mortal()

    @killick.tool(effect="idempotent", name="dies_once")
    async def dies_once(n: int) -> int:
        DONE.append(n)
        life.die()
        return n

    @killick.agent(name="dies")
    async def dies(run: killick.Run, claim: Claim) -> int:
        await run.call(does, claim.id)
        return await run.call(dies_once, claim.id)

    with pytest.raises(killick.KillickError):
        dying.run(dies, Claim(17))
    processes.mourn()
    caplog.clear()
    kd = processes.new()
    assert kd.run(dies, Claim(17), resume=True) == 17
    assert len(kd.list()) == 1
    assert DONE == [17, 17, 17]
    assert said(caplog) == []


def test_without_an_id_every_run_is_new(processes: Processes, caplog: pytest.LogCaptureFixture) -> None:
    kd = processes.new()
    for _ in range(2):
        with pytest.raises(killick.RunWaiting):
            kd.run(asks, Claim(17))
    assert len(kd.list()) == 2
    assert said(caplog) == []


def test_resume_starts_a_run_for_another_input_or_after_one_that_ended(processes: Processes) -> None:
    kd = processes.new()
    for claim in (Claim(17), Claim(17), Claim(18)):
        kd.run(reviews, claim, resume=True)
    assert len(kd.list()) == 3
    assert DONE == [17, 17, 18]


def test_resume_leaves_alone_a_run_that_another_living_process_is_at(processes: Processes) -> None:
    started, go = threading.Event(), threading.Event()

    @killick.tool(effect="reads", name="client_holds")
    def holds(n: int) -> int:
        started.set()
        go.wait(300)
        return n

    @killick.agent(name="held_elsewhere")
    async def agent(run: killick.Run, n: int) -> int:
        return await run.call(holds, n)

    one, two = processes.new(), processes.new()
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(one.run(agent, 1)))
    thread.start()
    try:
        assert started.wait(300)
        threading.Timer(0.2, go.set).start()
        assert two.run(agent, 1, resume=True) == 1
    finally:
        go.set()
        thread.join(300)
    assert results == [1]
    assert len(two.list()) == 2


def test_resume_does_not_continue_a_run_that_was_given_an_id(processes: Processes) -> None:
    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, Claim(17), id="mine")
    with pytest.raises(killick.RunWaiting) as waiting:
        processes.new().run(asks, Claim(17), resume=True)
    assert waiting.value.run != "mine"


# starting and following ---------------------------------------------------------------------------


def test_start_creates_a_queued_run_and_runs_nothing(processes: Processes) -> None:
    kd = processes.new()
    handle = kd.start(reviews, Claim(17), id="r", priority=5, tags=["eu"])
    assert (handle.id, DONE) == ("r", [])
    info = handle.info()
    assert (info.status, info.priority, info.agent) == ("queued", 5, "client_reviews")
    assert "eu" in info.tags
    again = kd.start(reviews, Claim(17), id="r")
    assert again.id == "r"
    assert kinds(kd, "r") == ["run.started"]
    assert handle.state().run == "r"


def test_a_handle_gives_the_result_when_somebody_else_has_advanced_the_run(processes: Processes) -> None:
    handle = processes.new().start(reviews, Claim(17), id="r")
    worker = threading.Thread(target=lambda: processes.new().advance("r"))
    worker.start()
    assert handle.result(timeout=3600) == Verdict(True, "0 for 17")
    worker.join()
    followed = [str(recorded.event.__struct_config__.tag) for recorded in handle.follow()]
    assert followed == kinds(processes.new(), "r")
    assert followed[-1] == "run.completed"


def test_a_handle_s_patience_has_an_end(processes: Processes) -> None:
    handle = processes.new().start(reviews, Claim(17), id="r")
    with pytest.raises(TimeoutError, match="queued"):
        handle.result(timeout=1)


def test_runs_are_advanced_by_priority(processes: Processes) -> None:
    kd = processes.new()
    for run, priority in (("low", 1), ("high", 9), ("middle", 5)):
        kd.start(reviews, Claim(17), id=run, priority=priority)
    assert [advanced.run for advanced in kd.advance_due(limit=2)] == ["high", "middle"]


def test_advance_says_ended_or_waiting_until(processes: Processes) -> None:
    @killick.agent(name="sleeps_then_asks")
    async def agent(run: killick.Run) -> int:
        await run.sleep("1h")
        await run.ask("well?")
        return 1

    kd = processes.new()
    kd.start(agent, id="r")
    first = kd.advance("r")
    assert (first.has_ended, first.status) == (False, "waiting")
    assert first.wake_at_us == processes.clock.now_us() + 3600 * 1_000_000
    processes.clock.advance(3601)
    second = kd.advance("r")
    assert (second.status, second.wake_at_us) == ("waiting", None)
    kd.answer("r", "approve")
    third = kd.advance("r")
    assert (third.has_ended, third.status, third.result) == (True, "completed", 1)


def test_list_finds_runs_by_status_agent_and_tag_newest_first(processes: Processes) -> None:
    kd = processes.new()
    kd.run(reviews, Claim(1), id="a", tags=["eu"])
    kd.start(reviews, Claim(2), id="b")
    with pytest.raises(killick.RunWaiting):
        kd.run(asks, Claim(3), id="c", tags=["eu"])
    assert [listed.id for listed in kd.list()] == ["c", "b", "a"]
    assert [listed.id for listed in kd.list(status="queued")] == ["b"]
    assert [listed.id for listed in kd.list(status=["queued", "waiting"])] == ["c", "b"]
    assert [listed.id for listed in kd.list(agent="client_reviews")] == ["b", "a"]
    assert [listed.id for listed in kd.list(tag="eu")] == ["c", "a"]
    newest = kd.list(limit=1)
    assert [listed.id for listed in kd.list(before=newest[0].number)] == ["b", "a"]


def test_the_statuses_are_these_and_no_others(processes: Processes) -> None:
    seen: list[str] = []
    kd = processes.new()

    @killick.tool(effect="reads", name="looks_at_status")
    async def looks() -> None:
        seen.append(processes.new().info("r").status)

    @killick.agent(name="goes_through_statuses")
    async def agent(run: killick.Run, ends: str) -> None:
        await run.call(looks)
        await run.ask("well?")
        if ends == "failed":
            raise LookupError("broken")

    for ends in ("completed", "failed", "cancelled"):
        seen.clear()
        run = "r"
        with Processes() as fresh:
            processes.store = fresh.store
            kd = fresh.new()
            kd.start(agent, ends, id=run)
            seen.append(kd.info(run).status)
            kd.advance(run)
            seen.append(kd.info(run).status)
            kd.pause(run)
            seen.append(kd.info(run).status)
            kd.resume(run)
            if ends == "cancelled":
                kd.cancel(run)
            else:
                kd.answer(run, "approve")
            kd.advance(run)
            seen.append(kd.info(run).status)
            assert seen == ["queued", "running", "waiting", "paused", ends]


# awaitable forms ----------------------------------------------------------------------------------


def test_every_method_has_an_awaitable_form_that_does_not_block_the_loop(processes: Processes) -> None:
    kd = processes.new()

    async def go() -> list[Any]:
        with pytest.raises(killick.RunWaiting):
            await kd.as_async().run(asks, Claim(17), id="r")
        assert (await kd.as_async().info("r")).status == "waiting"
        assert (await kd.as_async().state("r")).run == "r"
        assert await kd.as_async().events("r")
        assert [listed.id for listed in await kd.as_async().list()] == ["r"]
        assert [wait.id for wait in await kd.as_async().inbox()] == ["r:2"]
        await kd.as_async().say("r", "hello")
        await kd.as_async().send("r", "noise", 1)
        await kd.as_async().edit.set("r", x=1)
        await kd.as_async().edit.prioritize("r", 3)
        await kd.as_async().pause("r")
        assert await kd.as_async().resume("r") == "resumed"
        await kd.as_async().answer("r", "approve")
        result = await kd.as_async().run(asks, Claim(17), id="r")
        handle = await kd.as_async().start(reviews, Claim(18), id="s")
        await kd.as_async().cancel("s")
        assert (await kd.as_async().store.verify()).problems == []
        return [result, handle.id]

    assert asyncio.run(go()) == ["approve", "s"]


def test_an_async_client_serves_many_runs_on_the_callers_loop(processes: Processes) -> None:
    meeting: list[int] = []
    everybody = asyncio.Event()

    @killick.tool(effect="reads", name="meets")
    async def meets(n: int) -> int:
        meeting.append(n)
        if len(meeting) == 20:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 300)
        return n

    @killick.agent(name="meets_others")
    async def agent(run: killick.Run, n: int) -> int:
        return await run.call(meets, n)

    async def go() -> list[int]:
        async with killick.open_async("memory:") as kd:
            return list(await asyncio.gather(*(kd.run(agent, n) for n in range(20))))

    assert asyncio.run(go()) == list(range(20))


def test_a_blocking_call_inside_an_agent_is_refused_by_name(processes: Processes) -> None:
    kd = processes.new()

    @killick.agent(name="blocks_itself")
    async def agent(run: killick.Run, claim: Claim) -> None:
        kd.run(reviews, claim)

    with pytest.raises(killick.RunFailed, match=r"as_async\(\)"):
        kd.run(agent, Claim(17))
    assert DONE == []


class Bound:
    """As an `httpx.AsyncClient`: usable only on the loop on which it was used first."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self) -> str:
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        self._loop.call_soon(lambda: None)  # raises where that loop is closed
        assert self._loop is loop
        return "fetched"


BOUND = Bound()


@killick.tool(effect="reads", name="client_fetches")
async def fetches() -> str:
    return await BOUND.get()


@killick.agent(name="client_fetching")
async def fetching(run: killick.Run) -> str:
    return await run.call(fetches)


def test_what_a_module_binds_to_a_loop_serves_every_blocking_client_of_the_process(tmp_path: Path) -> None:
    for number in range(3):
        with killick.open(str(tmp_path / "killick.db")) as kd:
            assert kd.run(fetching, id=f"r{number}") == "fetched"
    assert [thread.name for thread in threading.enumerate()].count("killick-loop") == 1


def test_runs_of_two_blocking_clients_share_the_loop_and_end_with_their_own(processes: Processes) -> None:
    one, two, held = processes.new(), processes.new(), asyncio.Event()

    @killick.agent(name="client_holds")
    async def holds(run: killick.Run) -> None:
        held.set()
        await asyncio.Event().wait()

    def hold() -> None:
        with pytest.raises(killick.KillickError):
            one.run(holds, id="held")

    holding = threading.Thread(target=hold)
    holding.start()
    two.runtime.blocking(held.wait())
    assert two.run(reviews, Claim(17)).paid
    one.close()
    holding.join(300)
    assert two.run(reviews, Claim(18)).paid


def test_a_blocking_client_in_a_running_loop_works_and_warns_once(processes: Processes) -> None:
    kd = processes.new()

    async def go() -> Verdict:
        with pytest.warns(RuntimeWarning, match="open_async") as warned:
            verdict = kd.run(reviews, Claim(17), id="r")
        assert kd.info("r").status == "completed"
        assert [os.path.basename(each.filename) for each in warned] == ["test_client.py"]
        return verdict

    assert asyncio.run(go()).paid


def test_a_client_and_its_groups_warn_once_where_one_is_called(processes: Processes) -> None:
    def use(kd: killick.Client) -> None:
        with contextlib.suppress(RunUnknown):
            kd.triggers.fire("unheard of")  # on the loop of blocking callers
        kd.triggers.list()
        kd.store.verify()
        kd.find.failures()
        kd.list()

    async def go() -> None:
        for first in (use, lambda kd: kd.store.verify(), lambda kd: kd.find.failures()):
            kd = processes.new()
            with pytest.warns(RuntimeWarning, match="open_async") as warned:
                first(kd)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                use(kd)
            assert [os.path.basename(each.filename) for each in warned] == ["test_client.py"]

    asyncio.run(go())


def test_a_notebook_is_not_warned(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    kd = processes.new()
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=object))

    async def cell() -> Verdict:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return kd.run(reviews, Claim(17))

    assert asyncio.run(cell()).paid


def test_handles_and_searches_are_of_the_clients_kind(tmp_path: Path) -> None:
    async def go() -> tuple[Verdict, int]:
        async with killick.open_async(str(tmp_path / "killick.db")) as kd, kd.worker():
            handle = await kd.start(reviews, Claim(17), id="r")
            seen = [recorded.seq async for recorded in handle.follow()]
            assert seen == list(range(1, len(seen) + 1))
            assert (await handle.info()).status == (await kd.state("r")).status == "completed"
            assert (await kd.fork("r", "1:before")).id == "r-fork"
            return await handle.result(timeout=300), len(await kd.find.calls("client_does", run="r"))

    assert asyncio.run(go()) == (Verdict(True, "0 for 17"), 1)


def test_both_kinds_of_client_share_one_store_and_its_closing(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        assert kd.as_sync() is kd
        assert kd.as_async().as_async().runtime.engine is kd.runtime.engine
        assert asyncio.run(kd.as_async().run(reviews, Claim(17), id="r")).paid
        asyncio.run(kd.as_async().close())
        with pytest.raises(killick.KillickError, match="closed"):
            kd.run(reviews, Claim(17), id="r")


# bad input ----------------------------------------------------------------------------------------


def test_an_unknown_run_is_one_clear_error_everywhere(processes: Processes) -> None:
    kd = processes.new()
    asked: list[Any] = [kd.info, kd.state, kd.events, kd.advance, kd.pause, kd.cancel, kd.resume]
    for ask in asked:
        with pytest.raises(RunUnknown, match="nobody"):
            ask("nobody")
    with pytest.raises(RunUnknown):
        kd.say("nobody", "hello")
    assert kd.list() == []


def test_an_unknown_agent_is_one_clear_error_and_creates_nothing(processes: Processes) -> None:
    kd = processes.new()
    name: Any = "no_such_agent"
    for call in (kd.run, kd.start):
        with pytest.raises(AgentUnknown, match="no_such_agent"):
            call(name, Claim(17), id="r")
    assert kd.list() == []


def test_an_agent_that_this_process_does_not_know_leaves_the_run_as_it_is(processes: Processes) -> None:
    @killick.agent(name="known_elsewhere")
    async def agent(run: killick.Run) -> None:
        await run.ask("well?")

    kd = processes.new()
    kd.start(agent, id="r")
    from killick.definitions.agents import AGENTS

    agents: dict[str, Any] = AGENTS.declared
    known = agents.pop("known_elsewhere")
    before = kinds(kd, "r")
    with pytest.raises(AgentUnknown, match="known_elsewhere"):
        kd.advance("r")
    assert kinds(kd, "r") == before
    assert kd.info("r").holder is None
    agents["known_elsewhere"] = known
    assert kd.advance("r").status == "waiting"


BAD_INPUTS: dict[str, Any] = {
    "an object": object(), "a field of another type": {"id": "x"}, "another class": Verdict(True), "a number": 17,
    "nothing": None, "a function": lambda: 1,
}  # fmt: skip


@pytest.mark.parametrize("claim", BAD_INPUTS.values(), ids=BAD_INPUTS)
@pytest.mark.parametrize("how", ["run", "start"])
def test_an_input_that_does_not_fit_or_cannot_be_stored_is_refused_and_creates_nothing(
    processes: Processes, claim: Any, how: str
) -> None:
    kd = processes.new()
    with pytest.raises(ValueRefused, match="input"):
        getattr(kd, how)(reviews, claim, id="r")
    assert kd.list() == []
    assert kd.runtime.store.head("r") is None


def test_an_argument_that_cannot_be_stored_fails_at_once_naming_step_and_path(processes: Processes) -> None:
    @killick.agent(name="passes_an_object")
    async def agent(run: killick.Run) -> None:
        await run.decided("first", 1)
        await run.call(does, {"list": [1, object()]})

    kd = processes.new()
    with pytest.raises(killick.RunFailed, match=r"step 2 \(client_does\).*what.*list.*1") as failed:
        kd.run(agent, id="r")
    assert failed.value.failure.is_a(ValueRefused)
    assert DONE == []
    assert {"step.started", "attempt.started"}.isdisjoint(kinds(kd, "r"))


def test_a_result_that_cannot_be_stored_fails_the_run_naming_it(processes: Processes) -> None:
    @killick.agent(name="returns_an_object")
    async def agent(run: killick.Run) -> Any:
        return {"deep": [object()]}

    with pytest.raises(killick.RunFailed, match=r"returns_an_object.*deep"):
        processes.new().run(agent, id="r")


def test_a_result_of_another_type_than_declared_fails_the_run(processes: Processes) -> None:
    @killick.agent(name="returns_another_type")
    async def agent(run: killick.Run) -> int:
        wrong: Any = "many"
        return wrong  # type: ignore[no-any-return]

    kd = processes.new()
    with pytest.raises(killick.RunFailed):
        kd.run(agent, id="r")
    assert kd.info("r").status == "failed"


def test_calling_a_tool_directly_inside_an_agent_names_run_call_and_outside_it_is_the_function(
    processes: Processes,
) -> None:
    @killick.agent(name="calls_directly")
    async def agent(run: killick.Run) -> None:
        await does(1)

    with pytest.raises(killick.RunFailed, match=r"run\.call\(client_does") as failed:
        processes.new().run(agent, id="r")
    assert failed.value.failure.is_a(CalledDirectly)
    assert DONE == []
    assert asyncio.run(does(2)) == 2


def test_something_that_is_no_tool_is_refused_by_name(processes: Processes) -> None:
    def plain(n: int) -> int:
        return n

    @killick.agent(name="calls_a_function")
    async def agent(run: killick.Run) -> None:
        no_tool: Any = plain
        await run.call(no_tool, 1)

    with pytest.raises(killick.RunFailed, match=r"plain.*@killick\.tool"):
        processes.new().run(agent, id="r")


def test_arguments_that_a_tool_does_not_take_are_refused_before_anything_is_recorded(processes: Processes) -> None:
    @killick.agent(name="calls_wrongly")
    async def agent(run: killick.Run) -> None:
        call: Any = run.call
        await call(does, 1, 2, colour="red")

    kd = processes.new()
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id="r")
    assert failed.value.failure.is_a(TypeError)
    assert {"step.intended", "step.started"}.isdisjoint(kinds(kd, "r"))


def test_a_declaration_that_cannot_work_is_refused_when_it_is_made() -> None:
    def tool(**options: Any) -> None:
        @killick.tool(name="badly_declared", **options)
        async def declared(n: int) -> None: ...

    for options in ({"effect": "perhaps"}, {"identity": ("m",)}, {"consumes": "m"}, {"isolate": "process"}):
        with pytest.raises(DeclarationRefused, match="badly_declared"):
            tool(**options)
    for options in ({"timeout": "soon"}, {"patience": "never"}):
        with pytest.raises(DurationRefused):
            tool(**options)
    with pytest.raises((TypeError, DeclarationRefused)):
        tool(colour="red")
    with pytest.raises(DeclarationRefused):

        @killick.agent(name="takes_too_much")  # type: ignore[arg-type]  # pyright: ignore
        async def agent(run: killick.Run, one: int, two: int) -> None: ...


def test_a_closed_client_says_so(processes: Processes) -> None:
    kd = processes.new()
    kd.run(reviews, Claim(17), id="r")
    kd.close()
    kd.close()
    with pytest.raises(killick.KillickError, match="closed"):
        kd.run(reviews, Claim(17), id="r")


def test_closing_a_client_parks_what_runs_and_another_goes_on(processes: Processes) -> None:
    started = threading.Event()

    @killick.tool(effect="idempotent", name="interrupted_by_close")
    async def hangs(key: killick.Key = killick.KEY) -> str:
        DONE.append(str(key))
        if len(DONE) == 1:
            started.set()
            await asyncio.Event().wait()
        return "over"

    @killick.agent(name="interrupted")
    async def agent(run: killick.Run) -> str:
        return await run.call(hangs)

    kd = processes.new()
    raised: list[BaseException] = []

    def drive() -> None:
        try:
            kd.run(agent, id="r")
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    assert started.wait(300)
    kd.close()
    thread.join(300)
    assert not thread.is_alive()
    assert len(raised) == 1
    assert processes.new().run(agent, id="r") == "over"
    assert len(set(DONE)) == 1


QUITS = """
    import sys
    import killick

    @killick.tool(effect="idempotent")
    async def quits() -> None:
        raise {error}("bye")

    @killick.tool(effect="idempotent")
    def quits_in_thread() -> None:
        raise {error}("bye")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        if "{where}" == "agent":
            raise {error}("bye")
        await run.call(quits if "{where}" == "tool" else quits_in_thread)

    with killick.open("memory:") as kd:
        try:
            kd.run(agent, id="r")
        except BaseException as error:
            print(type(error).__name__)
"""


@pytest.mark.gate(1)
@pytest.mark.parametrize("where", ["agent", "tool", "thread"])
@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
def test_code_that_ends_the_process_ends_the_call_and_does_not_hang(tmp_path: Path, error: str, where: str) -> None:
    script = tmp_path / "quits.py"
    script.write_text(textwrap.dedent(QUITS.format(error=error, where=where)))
    outcome = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert outcome.stdout.split() != [], outcome.stderr
    assert outcome.returncode == 0, outcome.stderr


UNCLOSED = """
    import asyncio, killick

    @killick.agent
    async def asks(run: killick.Run) -> None:
        asyncio.create_task(asyncio.sleep(1000))
        await run.ask("well?")

    async def main() -> None:
        await killick.open_async("killick.db").run(asks)

    try:
        {call}
    except killick.RunWaiting:
        print("waits")
"""


@pytest.mark.parametrize("call", ['killick.open("killick.db").run(asks)', "asyncio.run(main())"])
def test_a_script_that_never_closes_its_client_ends_quietly_and_leaves_the_store_alone(
    tmp_path: Path, call: str
) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(UNCLOSED).format(call=call))
    # Python 3.12.0 to 3.12.3 take `?3` for a named parameter.
    command = [sys.executable, "-W", "default", "-W", "ignore:Binding", "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("waits\n", "", 0)
    assert {file.name for file in tmp_path.iterdir()} == {"script.py", "killick.db"}


def test_a_run_on_sqlite_is_verified_and_found_again_by_another_process(tmp_path: Path) -> None:
    place = str(tmp_path / "killick.db")
    with killick.open(place) as kd, pytest.raises(killick.RunWaiting):
        kd.run(asks, Claim(17), id="r")
    with killick.open(f"sqlite:///{place}") as kd:
        kd.answer("r", "approve", by="ann")
        assert kd.run(asks, Claim(17), id="r") == "approve"
        assert kd.store.verify().problems == []
        [closed] = told(kd, "r", e.WaitClosed)
        assert closed.event.by == "ann"
    assert DONE == [17]


def test_logging_of_killick_is_silent_for_an_ordinary_run(
    processes: Processes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    processes.new().run(reviews, Claim(17))
    assert said(caplog) == []


def run_in_child(agent: killick.Agent[Any, Any], path: str) -> None:
    """Run an agent in a process of its own, which may die in it."""

    def run() -> None:
        with killick.open(path) as kd:
            kd.run(agent, id="r")

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_whose_process_died_is_due_by_itself_or_for_whoever_resumes_it(tmp_path: Path, resumed: bool) -> None:
    path, lives = str(tmp_path / "killick.db"), tmp_path / "lives"

    @killick.tool(effect="reads")
    async def dies_at_first() -> str:
        if not lives.exists():
            lives.write_text("one")
            os._exit(1)
        return "done"

    @killick.agent
    async def mortal(run: killick.Run) -> str:
        return await run.call(dies_at_first)

    run_in_child(mortal, path)
    with killick.open(path) as kd:
        assert kd.info("r").status == "running"
        if resumed:
            assert kd.resume("r", by="ann") == "taken over from a dead process"
            assert kd.info("r").status == "queued"
        [advanced] = kd.advance_due()
        assert advanced.result == "done"


def test_resuming_a_run_outweighs_a_pause_that_its_dead_process_did_not_take(tmp_path: Path) -> None:
    path, lives = str(tmp_path / "killick.db"), tmp_path / "lives"

    @killick.tool(effect="idempotent")
    async def is_paused_and_dies() -> str:
        if not lives.exists():
            lives.write_text("one")
            store = SqliteStore(path)
            body = delivery(Log(store), "r", COMMAND, {"command": "pause"}, id="p", by="mia", at_us=1)
            store.deliver([body])
            os._exit(1)
        return "done"

    @killick.agent
    async def mortal_and_paused(run: killick.Run) -> str:
        return await run.call(is_paused_and_dies)

    run_in_child(mortal_and_paused, path)
    with killick.open(path) as kd:
        kd.resume("r", by="ann")
        [advanced] = kd.advance_due()
        assert (advanced.result, kd.runtime.store.inbox("r")) == ("done", [])


def test_of_two_who_start_the_same_id_at_once_both_get_the_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @killick.agent(name="started_twice")
    async def agent(run: killick.Run, n: int) -> int:
        return n

    path = str(tmp_path / "killick.db")
    with killick.open(path) as one, killick.open(path) as other:
        looked = start.begin

        def overtaken(*args: Any, **options: Any) -> Any:
            found = looked(*args, **options)
            monkeypatch.undo()
            other.start(agent, 7, id="r")
            return found

        monkeypatch.setattr(start, "begin", overtaken)
        assert one.start(agent, 7, id="r").id == "r"
        assert len(one.list()) == 1
        with pytest.raises(RunMismatch):
            one.start(agent, 8, id="r")


@killick.agent(name="raises_generator_exit")
async def raises_generator_exit(run: killick.Run) -> None:
    raise GeneratorExit("of its own")


def test_an_agent_that_raises_generator_exit_fails_like_any_other() -> None:
    with killick.open("memory:") as kd:
        with pytest.raises(killick.RunFailed, match="GeneratorExit: of its own"):
            kd.run(raises_generator_exit, id="r")
        assert kd.info("r").status == "failed"


# waking -------------------------------------------------------------------------------------------


@killick.agent(name="woken")
async def woken(run: killick.Run, number: int) -> int:
    await run.wait("go")
    return number


def test_a_parked_run_is_opened_with_one_read_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "killick.db")
    with killick.open(path) as kd, pytest.raises(killick.RunWaiting):
        kd.run(woken, 17, id="r")
    read: list[str] = []
    monkeypatch.setattr(observers, "_observers", [])  # another test may have left one
    with killick.open(path) as kd:
        kd.send("r", "go")
        for name in ("opening", "head", "read", "row"):
            method = getattr(kd.runtime.store, name)
            monkeypatch.setattr(
                kd.runtime.store, name, lambda *args, n=name, m=method, **more: (read.append(n), m(*args, **more))[1]
            )
        assert kd.run(woken, 17, id="r") == 17
    assert read == ["opening"]


def test_a_run_that_another_process_changed_since_it_was_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "killick.db")
    with killick.open(path) as kd, pytest.raises(killick.RunWaiting):
        kd.run(woken, 17, id="r")
    with killick.open(path) as kd, killick.open(path) as other:
        lease = kd.runtime.store.lease

        def late(*args: Any, **more: Any) -> Any:
            monkeypatch.undo()
            other.edit.note("r", "between the read and the lease")
            return lease(*args, **more)

        kd.send("r", "go")
        monkeypatch.setattr(kd.runtime.store, "lease", late)
        assert kd.run(woken, 17, id="r") == 17
        assert kd.store.verify().problems == []
        assert any(isinstance(each.event, e.NoteMade) for each in kd.events("r"))


def test_runs_that_are_woken_in_one_turn_are_leased_in_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = str(tmp_path / "killick.db"), [f"r{number}" for number in range(12)]
    for name in names:
        with killick.open(path) as kd, pytest.raises(killick.RunWaiting):
            kd.run(woken, 17, id=name)
    with killick.open(path) as kd, killick.open(path) as other:
        store, sizes = raw_store(kd.runtime.store), list[int]()
        assert isinstance(store, SqliteStore)
        lease_all = store.lease_all

        def late(runs: Any, *args: Any, **more: Any) -> Any:
            sizes.append(len(runs))
            other.edit.note("r1", "between the read and the lease")
            other.runtime.store.lease("r2", "another", seconds=30)
            return lease_all(runs, *args, **more)

        monkeypatch.setattr(store, "lease_all", late)

        async def wake() -> list[Any]:
            for name in names:
                await kd.as_async().send(name, "go")
            wakes = [asyncio.create_task(kd.as_async().run(woken, 17, id=name)) for name in names]
            await asyncio.sleep(0)
            wakes[3].cancel()
            return await asyncio.gather(*wakes, return_exceptions=True)

        ended = asyncio.run(wake())
        assert sizes == [10]  # the first was alone, and one was cancelled
        assert [type(each) for each in ended[2:4]] == [RunBusy, asyncio.CancelledError]
        assert [*ended[:2], *ended[4:]] == [17] * 10
        assert kd.run(woken, 17, id="r3") == 17


def eight_queued(kd: killick.Client) -> list[str]:
    return [kd.start(woken, 17, id=f"r{number}").id for number in range(8)]


def test_messages_of_concurrent_callers_share_a_commit_and_one_that_is_refused_refuses_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        names = eight_queued(kd)
        deliver, sizes = kd.runtime.store.deliver, list[int]()
        began, proceed = threading.Event(), threading.Event()

        def slow(messages: Any) -> Any:
            sizes.append(len(messages))
            if len(sizes) == 1:
                began.set()
                assert proceed.wait(300)
            if len(messages) > 1 and any(message.run == "r7" for message in messages):
                raise ValueRefused("r7", "cannot be stored")
            if messages[0].run == "r7":
                raise ValueRefused("r7", "cannot be stored")
            return deliver(messages)

        monkeypatch.setattr(kd.runtime.store, "deliver", slow)
        refused: list[str] = []

        def send(name: str) -> None:
            try:
                kd.send(name, "go")
            except ValueRefused:
                refused.append(name)

        threads = [threading.Thread(target=send, args=(name,)) for name in names]
        threads[0].start()
        assert began.wait(300)
        for thread in threads[1:]:
            thread.start()
        outgoing = answers._OUTGOING[kd.runtime.engine]
        while len(outgoing._waiting) < 7:
            threading.Event().wait(0.005)
        proceed.set()
        for thread in threads:
            thread.join()
        assert sizes == [1, 7, *[1] * 7]
        assert refused == ["r7"]
        assert all(len(kd.runtime.store.messages(name)) == 1 for name in names[:7])


def test_messages_that_tasks_send_in_one_turn_share_a_commit_and_each_task_gets_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        names = eight_queued(kd)
        deliver, sizes = kd.runtime.store.deliver, list[int]()
        monkeypatch.setattr(kd.runtime.store, "deliver", lambda sent: (sizes.append(len(sent)), deliver(sent))[1])

        async def send() -> list[Any]:
            to = [*names[:4], "no", *names[4:]]
            sends = [kd.as_async().send(name, "go", number) for number, name in enumerate(to)]
            own = kd.as_async().send("r0", "killick.answer")
            return await asyncio.gather(*sends, own, return_exceptions=True)

        outcomes = asyncio.run(send())
        assert sizes == [9]
        assert [type(each) for each in outcomes if each is not None] == [RunUnknown, AnswerRefused]
        assert isinstance(outcomes[4], RunUnknown)
        assert all(len(kd.runtime.store.messages(name)) == 1 for name in names)


def test_a_diff_of_more_than_two_places_is_refused_in_one_line() -> None:
    with killick.open("memory:") as kd:
        for places, against in ((("start", "now", "now"), None), (("start", "now"), "other")):
            with pytest.raises(BoundaryUnknown, match="too many places"):
                kd.diff("r", *places, against=against)


def test_a_search_takes_any_limit() -> None:
    with killick.open("memory:") as kd:
        for limit in (-2, 0, 1 << 80, None):
            assert list(kd.find.answers(limit=limit)) == []
