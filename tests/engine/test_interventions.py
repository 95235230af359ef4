"""People step in at any point: override, skip, retry now, set, note, prioritize; on runs that wait, and on runs that
somebody is at, by the same code on every store. What they did is on record, and comes to the same after any death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

import killick
import servers
from killick.engine.control import commands
from killick.errors import AnswerRefused, InboxMoved, RunBusy, RunUnknown, StoreUnavailable
from killick.model import events as e
from killick.store import MemoryStore, Store
from killick.store.records import Append
from processes import View, kinds, told
from world import World

LATER = killick.Retry(attempts=5, first=5_000, on=(ConnectionError,))
DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.open("memory:") as client:
        yield client


STORES: list[Any] = [
    pytest.param(lambda _: "memory:", id="memory"),
    pytest.param(lambda folder: str(folder / "killick.db"), id="sqlite"),
    pytest.param(lambda _: servers.postgres_store(), id="postgresql", marks=pytest.mark.slow),
]


# what people can step into ------------------------------------------------------------------------


@killick.tool(name="intervened_flaky", effect="idempotent", retry=LATER)
async def flaky(what: str) -> int:
    DONE.append(what)
    if DONE.count(what) == 1:
        raise ConnectionError("try later")
    return len(DONE)


@killick.agent(name="intervened_child")
async def child(run: killick.Run) -> int:
    await run.ask("well?")
    return 1


async def asks(run: killick.Run) -> Any:
    answer = await run.ask("How much?", returns=int)
    return answer.kind, answer.value, answer.by


async def asks_with_default(run: killick.Run) -> Any:
    answer = await run.ask("Well?", timeout="1h", default="reject")
    return answer.kind, answer.expired


async def waits(run: killick.Run) -> Any:
    return await run.wait("paid")


async def waits_with_default(run: killick.Run) -> Any:
    return await run.wait("paid", timeout="1h", default=0)


@killick.tool(name="intervened_stubborn", effect="idempotent", retry=LATER)
async def stubborn() -> int:
    raise ConnectionError("never")


async def calls(run: killick.Run) -> Any:
    return await run.call(flaky, "it")


async def calls_in_vain(run: killick.Run) -> Any:
    return await run.call(stubborn)


async def sleeps(run: killick.Run) -> Any:
    await run.sleep("300d")
    return "awake"


async def has_child(run: killick.Run) -> Any:
    return await (await run.spawn(child, id=f"{run.id}-child")).result()


@dataclass
class Case:
    code: Callable[[killick.Run], Awaitable[Any]]
    act: Callable[[killick.Client, str], Any]
    comes_to: Any
    step: int = 1
    kinds: list[type[e.Event]] = field(default_factory=list[type[e.Event]])


CASES: dict[str, Case] = {
    "override a question": Case(
        asks, lambda kd, step: kd.edit.override("r", step, 7, by="ann"), ("respond", 7, "ann"), kinds=[e.StepOverridden]
    ),
    "override a wait": Case(waits, lambda kd, step: kd.edit.override("r", step, {"sum": 3}, by="ann"), {"sum": 3}),
    "override a backoff": Case(calls_in_vain, lambda kd, step: kd.edit.override("r", step, 42, by="ann"), 42),
    "override a child": Case(has_child, lambda kd, step: kd.edit.override("r", step, 9, by="ann"), 9, step=2),
    "skip a question": Case(
        asks, lambda kd, step: kd.edit.skip("r", step, by="ann"), "skipped by ann", kinds=[e.WaitClosed]
    ),
    "skip one with a default": Case(
        asks_with_default, lambda kd, step: kd.edit.skip("r", step, by="ann"), ("reject", True)
    ),
    "skip a wait": Case(waits, lambda kd, step: kd.edit.skip("r", step, by="ann", because="no"), "skipped by ann: no"),
    "skip a wait with a default": Case(waits_with_default, lambda kd, step: kd.edit.skip("r", step, by="ann"), 0),
    "skip a sleep": Case(sleeps, lambda kd, step: kd.edit.skip("r", step, by="ann"), "awake"),
    "skip a backoff": Case(
        calls_in_vain, lambda kd, step: kd.edit.skip("r", step, by="ann"), "skipped by ann", kinds=[e.StepEnded]
    ),
    "skip a child": Case(has_child, lambda kd, step: kd.edit.skip("r", step, by="ann"), "skipped by ann", step=2),
    "retry now": Case(calls, lambda kd, step: kd.edit.retry("r", step, by="ann"), 2, kinds=[e.StepDelayed]),
}


async def coming_to(code: Callable[[killick.Run], Awaitable[Any]], run: killick.Run) -> Any:
    try:
        return await code(run)
    except killick.StepFailed as failed:
        skipped = (
            failed.is_a(killick.errors.Skipped)
            and failed.is_a("killick.Skipped")
            and isinstance(failed, killick.errors.Skipped)
        )
        return failed.failure.message if skipped and failed.by == "ann" else repr(failed)


def parked_agent(name: str, case: Case) -> killick.Agent[None, Any]:
    @killick.agent(name=f"parked {name}")
    async def agent(run: killick.Run) -> Any:
        found = await coming_to(case.code, run)
        await run.note(found)
        return found

    return agent


def advanced(kd: killick.Client, agent: killick.Agent[None, Any], run: str = "r") -> None:
    """Start a run, and go on with it until it waits, without sitting anything out."""
    kd.start(agent, id=run)
    kd.advance(run)
    assert kd.info(run).status == "waiting"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("url", STORES)
def test_a_run_that_waits_goes_on_as_somebody_said(url: Any, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    with killick.open(url(tmp_path)) as kd:
        agent = parked_agent(name, case)
        advanced(kd, agent)
        assert "will be" not in case.act(kd, str(case.step))
        assert kd.run(agent, id="r") == case.comes_to
        by = [getattr(one.event, "by", None) for one in kd.events("r") if type(one.event) in case.kinds]
        assert by == ["ann"] * len(case.kinds)
        kd.replay("r", agent, check=True)
        assert kd.store.verify("r").problems == []


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("url", STORES)
def test_a_run_that_somebody_is_at_goes_on_as_somebody_said(url: Any, tmp_path: Path, name: str) -> None:
    case, at = CASES[name], f"1.1.{CASES[name].step}"
    with killick.open(url(tmp_path)) as kd:

        @killick.tool(name=f"acts {name}", effect="reads")
        async def acts() -> str:
            await pending(kd, "r", at)
            said: str = await asyncio.to_thread(case.act, kd, at)
            return said

        @killick.agent(name=f"held {name}")
        async def agent(run: killick.Run) -> Any:
            found, said = await run.gather(coming_to(case.code, run), run.call(acts))
            return [found, said]

        [found, said] = kd.run(agent, id="r")
        assert found == case.comes_to
        assert "will be" not in said
        [taken] = [one for one in told(kd, "r", e.MessageTaken) if one.event.name == "killick.command"]
        assert taken.event.by == "ann"
        kd.replay("r", agent, check=True)
        assert kd.store.verify("r").problems == []


async def pending(kd: killick.Client, run: str, step: str) -> None:
    """Until a step is on record and rests, or is over."""
    while True:
        with contextlib.suppress(RunUnknown):
            found = (await kd.as_async().state(run)).fold.step(step)
            if found is not None and found.status not in ("intended", "running"):
                return
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("name", CASES)
def test_a_run_of_which_a_step_was_ended_is_due_whatever_else_it_waits_for(kd: killick.Client, name: str) -> None:
    case = CASES[name]

    @killick.agent(name=f"due {name}")
    async def agent(run: killick.Run) -> Any:
        async def goes_on() -> None:
            DONE.append(await coming_to(case.code, run))

        return await run.gather(goes_on(), run.ask("And you?"))

    advanced(kd, agent)
    case.act(kd, f"1.1.{case.step}")
    assert [moved.run for moved in kd.advance_due()] == ["r"]
    assert DONE[-1] == case.comes_to
    assert kd.info("r").status == "waiting"
    assert kd.advance_due() == []


@pytest.mark.parametrize("name", CASES)
def test_what_came_while_somebody_was_at_it_who_left_is_done_when_the_run_goes_on(
    kd: killick.Client, name: str
) -> None:
    case = CASES[name]
    agent = parked_agent(f"left {name}", case)
    advanced(kd, agent)
    with elsewhere(kd, "r"):
        case.act(kd, str(case.step))
    assert told(kd, "r", e.StepOverridden) == []
    assert kd.run(agent, id="r") == case.comes_to
    kd.replay("r", agent, check=True)


@contextlib.contextmanager
def elsewhere(kd: killick.Client, run: str) -> Iterator[None]:
    """Somebody else has the run, and lets it go without having looked at anything. Whoever is patient is not here."""
    head = kd.runtime.store.lease(run, "somebody else", seconds=60)
    looks, commands.LOOKS = commands.LOOKS, 0  # type: ignore[misc]
    try:
        yield
    finally:
        commands.LOOKS = looks  # type: ignore[misc]
        kd.runtime.store.release(run, epoch=head.epoch)


def test_blocking_agents_are_woken_too(kd: killick.Client) -> None:
    @killick.tool(name="acts_blocking", effect="reads")
    def acts() -> None:
        asyncio.run(pending(kd, "r", "1.1.1"))
        asyncio.run(pending(kd, "r", "1.2.1"))
        kd.edit.override("r", "1.1.1", 3, by="ann")
        kd.edit.skip("r", "1.2.1", by="ann")

    @killick.agent(name="held blocking")
    def agent(run: killick.SyncRun) -> Any:
        def skipped() -> str:
            try:
                run.wait("never")
            except killick.errors.Skipped as error:
                return error.failure.message
            return "not skipped"

        return run.gather(lambda: run.ask("Well?").value, skipped, lambda: run.call(acts))

    assert kd.run(agent, id="r") == (3, "skipped by ann", None)
    kd.replay("r", agent, check=True)


@pytest.mark.parametrize("how", ["parked", "left"])
def test_a_state_machine_goes_on_with_what_it_was_given_and_without_what_was_skipped(
    kd: killick.Client, how: str
) -> None:
    @killick.machine(name=f"intervened machine {how}")
    async def machine(run: killick.Run, state: int) -> Any:
        DONE.append((state, run.received))
        return killick.Done(state) if state == 2 else killick.WaitFor("go", state + 1)

    kd.start(machine, 0, id="r")
    kd.advance("r")
    with elsewhere(kd, "r") if how == "left" else contextlib.nullcontext():
        kd.edit.override("r", "2", {"n": 5}, by="ann")
    kd.advance("r")
    kd.edit.skip("r", "4", by="ann")
    assert kd.advance("r").result == 2
    assert DONE == [(0, None), (1, {"n": 5}), (2, None)]


def test_a_stream_that_sits_out_a_backoff_can_be_given_its_reply(kd: killick.Client) -> None:
    @killick.tool(name="intervened_stream", effect="reads", retry=LATER)
    async def streaming(**_: Any) -> Any:
        raise ConnectionError("later")

    @killick.agent(name="intervened streaming")
    async def agent(run: killick.Run) -> list[Any]:
        return [chunk async for chunk in run.stream(streaming, model="m")]

    advanced(kd, agent)
    kd.edit.override("r", "1", "hello", by="ann")
    assert kd.run(agent, id="r") == ["hello"]
    kd.replay("r", agent, check=True)


def test_a_stream_in_memory_is_given_its_reply_too(kd: killick.Client) -> None:
    @killick.tool(name="intervened_stream_held", effect="reads", retry=LATER)
    async def streaming(**_: Any) -> Any:
        raise ConnectionError("later")

    @killick.tool(name="acts_on_stream", effect="reads")
    async def acts() -> None:
        await pending(kd, "r", "1.1.1")
        await kd.as_async().edit.override("r", "1.1.1", "hello", by="ann")

    @killick.agent(name="intervened streaming held")
    async def agent(run: killick.Run) -> Any:
        async def read() -> list[Any]:
            return [chunk async for chunk in run.stream(streaming, model="m")]

        return await run.gather(read(), run.call(acts))

    assert kd.run(agent, id="r") == (["hello"], None)
    kd.replay("r", agent, check=True)


@pytest.mark.parametrize("how", ["parked", "left", "held"])
@pytest.mark.parametrize("verb", ["override", "skip"])
def test_what_waits_for_approval_can_be_overridden_and_skipped(kd: killick.Client, how: str, verb: str) -> None:
    @killick.tool(name=f"approved {how} {verb}", approve="managers")
    async def pay(amount: int) -> int:
        DONE.append(amount)
        return amount

    async def act(step: str) -> None:
        if verb == "override":
            await kd.as_async().edit.override("r", step, 7, by="ann")
        else:
            await kd.as_async().edit.skip("r", step, by="ann")

    @killick.tool(name=f"acts on approval {how} {verb}", effect="reads")
    async def acts() -> None:
        await pending(kd, "r", "1.1.1")
        await act("1.1.1")

    async def paid(run: killick.Run) -> Any:
        return await coming_to(lambda run: run.call(pay, 5), run)

    @killick.agent(name=f"approving {how} {verb}")
    async def agent(run: killick.Run) -> Any:
        return (await run.gather(paid(run), run.call(acts)))[0] if how == "held" else await paid(run)

    if how != "held":
        advanced(kd, agent)
        with elsewhere(kd, "r") if how == "left" else contextlib.nullcontext():
            asyncio.run(act("1"))
    assert kd.run(agent, id="r") == (7 if verb == "override" else "skipped by ann")
    assert DONE == []
    assert [one.event.how for one in told(kd, "r", e.WaitClosed)] == ["voided"]
    assert kd.inbox() == []
    kd.replay("r", agent, check=True)


@pytest.mark.parametrize("verb", ["override", "skip"])
def test_a_child_or_a_message_that_waits_for_approval_can_be_skipped(kd: killick.Client, verb: str) -> None:
    contract = killick.Contract("asking", [killick.rules.deny("send", "spawn:*", ask="managers")])

    @killick.agent(name=f"asking for others {verb}", contract=contract)
    async def agent(run: killick.Run) -> Any:
        async def sends(run: killick.Run) -> Any:
            return await run.send("nobody", "hello")

        return await coming_to(sends if verb == "override" else has_child, run)

    advanced(kd, agent)
    if verb == "override":
        kd.edit.override("r", "1", None, by="ann")
    else:
        with pytest.raises(AnswerRefused, match="a run cannot be made up; skip it"):
            kd.edit.override("r", "1", None, by="ann")
        kd.edit.skip("r", "1", by="ann")
    assert kd.run(agent, id="r") == (None if verb == "override" else "skipped by ann")
    kd.replay("r", agent, check=True)


# what is refused ----------------------------------------------------------------------------------


def test_a_step_that_is_over_is_not_overridden_and_the_way_back_is_named(kd: killick.Client) -> None:
    @killick.agent(name="over at one")
    async def agent(run: killick.Run) -> Any:
        await run.decided("which?", "this")
        return await run.wait("never")

    advanced(kd, agent)
    for act in (lambda: kd.edit.override("r", "1", 1), lambda: kd.edit.skip("r", "1"), lambda: kd.edit.retry("r", "1")):
        with pytest.raises(
            AnswerRefused, match=r"r: step 1 \(decision\) is over.*rewind the run .to 1:before.*fork it"
        ):
            act()
    with pytest.raises(AnswerRefused, match="step 9 does not exist"):
        kd.edit.skip("r", "9")
    with pytest.raises(AnswerRefused, match="waits for no backoff; it is waiting for event never"):
        kd.edit.retry("r", "2")
    with pytest.raises(AnswerRefused, match="no step waits for a backoff"):
        kd.edit.retry("r")


def test_what_is_being_tried_is_left_alone_and_the_refusal_is_on_record(kd: killick.Client) -> None:
    refusals: list[str] = []

    @killick.tool(name="acts_on_itself", effect="reads")
    async def acts() -> None:
        for act in (
            kd.as_async().edit.skip("r", "1", by="ann"),
            kd.as_async().edit.retry("r", "1"),
            kd.as_async().edit.override("r", "1", None),
        ):
            try:
                await act
            except AnswerRefused as refused:
                refusals.append(refused.reason)

    @killick.agent(name="tried right now")
    async def agent(run: killick.Run) -> None:
        await run.call(acts)

    kd.run(agent, id="r")
    assert [reason.partition("; ")[0] for reason in refusals] == [
        "step 1 (acts_on_itself) has an attempt in progress"
    ] * 3
    notes = [one.data["note"] for one in told(kd, "r", e.NoteMade)]
    assert notes[0].startswith("ann wanted to skip step 1: step 1 (acts_on_itself) has an attempt in progress")
    kd.replay("r", agent, check=True)


def test_what_is_in_doubt_is_for_an_answer(world: World) -> None:
    @killick.tool(name="dies_in_doubt")
    async def dies() -> int:
        world.die()
        return 1

    @killick.agent(name="left in doubt")
    async def agent(run: killick.Run) -> int:
        return await run.call(dies)

    kd = world.killed(agent, run="r")
    with pytest.raises(AnswerRefused, match="has an attempt in progress; wait until it ends"):
        kd.edit.skip("r", "1")
    kd.advance("r")
    for act in (lambda: kd.edit.skip("r", "1"), lambda: kd.edit.override("r", "1", 2), lambda: kd.edit.retry("r", "1")):
        with pytest.raises(AnswerRefused, match="is in doubt; first answer whether it happened"):
            act()
    kd.answer("r", "happened", value=5)
    assert kd.run(agent, id="r") == 5


def test_a_value_that_does_not_fit_is_refused_before_anything_is_written(kd: killick.Client) -> None:
    @killick.agent(name="choosy")
    async def agent(run: killick.Run) -> Any:
        async def chooses() -> Any:
            return (await run.ask("Which?", options=["a", "b"])).value

        async def counts() -> Any:
            return (await run.ask("How many?", returns=list[int])).value

        async def rests() -> None:
            await run.sleep("1d")

        return await run.gather(run.call(flaky, "x"), chooses(), counts(), rests())

    advanced(kd, agent)
    before = len(kd.events("r"))
    for step, value, why in (
        ("1.1.1", "three", "int"),
        ("1.2.1", "c", "not one of 'a', 'b'"),
        ("1.3.1", "c", "not of type array"),
        ("1.4.1", None, "a sleep has no result; skip it"),
        ("1", None, "contains other steps, such as 1.1.1"),
    ):
        with pytest.raises(AnswerRefused, match=why):
            kd.edit.override("r", step, value)
    assert len(kd.events("r")) == before


def test_an_answer_in_memory_is_held_to_its_type(kd: killick.Client) -> None:
    said: list[str] = []

    @killick.tool(name="acts_wrongly", effect="reads")
    async def acts() -> None:
        await pending(kd, "r", "1.1.1")
        with pytest.raises(AnswerRefused) as refused:
            await kd.as_async().edit.override("r", "1.1.1", ["x"], by="ann")
        said.append(refused.value.reason)
        await kd.as_async().edit.override("r", "1.1.1", [1], by="ann")

    @killick.agent(name="typed question")
    async def agent(run: killick.Run) -> Any:
        async def asks() -> Any:
            return (await run.ask("Which?", returns=list[int])).value

        return await run.gather(asks(), run.call(acts))

    assert kd.run(agent, id="r") == ([1], None)
    assert "step 1.1.1: answer[0]" in said[0]


def test_of_several_that_sit_out_a_delay_one_must_be_named(kd: killick.Client) -> None:
    @killick.agent(name="several delayed")
    async def agent(run: killick.Run) -> Any:
        return await run.gather(run.call(flaky, "a"), run.call(flaky, "b"))

    advanced(kd, agent)
    with pytest.raises(AnswerRefused, match=r"several steps wait; name one of 1\.1\.1, 1\.2\.1"):
        kd.edit.retry("r", by="ann")
    assert kd.edit.retry("r", "1.2.1", by="ann", because="the bank is back") == "step 1.2.1 continues now"
    kd.advance("r")
    assert (sorted(DONE[:2]), DONE[2:]) == (["a", "b"], ["b"])
    assert kd.edit.retry("r", by="bob") == "the step that waits continues now"
    assert kd.run(agent, id="r") == (4, 3)
    delays = [one.event for one in told(kd, "r", e.StepDelayed)]
    assert [(delay.step, delay.because, delay.by) for delay in delays] == [
        ("1.2.1", "the bank is back", "ann"),
        ("1.1.1", "bob ended the delay", "bob"),
    ]


def test_a_run_that_is_over_or_ends_is_told_so_in_one_line(kd: killick.Client) -> None:
    @killick.agent(name="soon over")
    async def agent(run: killick.Run) -> None:
        await run.decided("which?", "this")

    kd.run(agent, id="r")
    acts: list[Callable[[], Any]] = [
        lambda: kd.edit.set("r", x=1), lambda: kd.edit.override("r", "1", 1), lambda: kd.edit.skip("r", "1"),
        lambda: kd.edit.retry("r"), lambda: kd.edit.note("r", "x"), lambda: kd.edit.prioritize("r", 1),
        lambda: kd.pause("r"), lambda: kd.cancel("r"),
    ]  # fmt: skip
    for act in acts:
        with pytest.raises(AnswerRefused, match=r"^r: the run is over \(completed\); \w+ does nothing to it$"):
            act()
        with pytest.raises(RunUnknown):
            kd.edit.skip("nobody", "1")


def test_a_command_that_a_run_did_not_take_before_its_end_is_refused(kd: killick.Client) -> None:
    refused: list[str] = []

    def late() -> None:
        try:
            kd.edit.skip("r", "9")
        except AnswerRefused as error:
            refused.append(error.reason)

    @killick.tool(name="acts_late", effect="reads")
    async def acts() -> None:
        thread = threading.Thread(target=late)
        thread.start()
        DONE.append(thread)

    @killick.agent(name="ends at once")
    async def agent(run: killick.Run) -> None:
        await run.call(acts)

    kd.run(agent, id="r")
    DONE[0].join(300)
    assert "does not exist" in refused[0] or "the run is over" in refused[0] or "the run ended" in refused[0]


def test_a_run_takes_no_command_after_its_end_because_another_process_may_lease_it_then() -> None:
    @killick.agent(name="ends beside a command")
    async def agent(run: killick.Run) -> str:
        return "done"

    class LeasedAtItsEnd(View):
        """A command comes just before the end of the run; once that is committed, another process leases it at once."""

        def append(self, items: Sequence[Append]) -> list[Any]:
            if not any(b"run.completed" in row.body for item in items for row in item.rows):
                return store.append(items)
            if not refused:
                other.edit.note("r", "it is at its end")
            done = store.append(items)
            kd.runtime.notify("r")
            asyncio.run_coroutine_threadsafe(looked(), kd.runtime.own_loop).result(300)
            if moved := [each for each in done if isinstance(each, InboxMoved)]:
                refused.extend(moved)
            else:
                store.release("r", epoch=store.lease("r", "another", seconds=30).epoch)
            return done

    async def looked() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    store, refused = MemoryStore(), list[InboxMoved]()
    with killick.Client(cast("Store", LeasedAtItsEnd(store))) as kd, killick.Client(store) as other:
        kd.runtime.log.committer.hold_off(1)  # as on a slow disk: commits are made by their own thread
        kd.start(agent, id="r")
        assert kd.run(agent, id="r") == "done"
        kd.runtime.log.committer.hold_off(-1)
        assert kinds(other, "r")[-3:] == ["message.taken", "note.made", "run.completed"]
        assert len(refused) == 1, "the end that overlooked the command"


# notes, priorities, ids ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["parked", "left"])
def test_who_and_why_are_on_record_of_every_command(kd: killick.Client, how: str) -> None:
    agent = parked_agent(f"told {how}", CASES["skip a wait"])
    advanced(kd, agent)
    with elsewhere(kd, "r") if how == "left" else contextlib.nullcontext():
        kd.edit.note("r", {"seen": "all"}, by="ann")
        kd.edit.prioritize("r", 7, by="bob", because="the customer calls")
        kd.edit.set("r", by="cid", because="was wrong", limit=5)
        kd.edit.override("r", "1", 1, by="dan", because="seen on the statement")
        kd.pause("r", by="eve", because="lunch")
    kd.advance("r")
    if how == "left":
        kd.resume("r", by="fay", because="back")
        kd.run(agent, id="r")
    said = {
        type(one.event).__name__: (one.event.by, kd.runtime.log.data("r", one.seq).get("because"))
        for one in kd.events("r")
        if getattr(one.event, "by", None) in ("ann", "bob", "cid", "dan", "eve", "fay")
        and not isinstance(one.event, e.MessageTaken)
    }
    assert said == {
        "NoteMade": ("ann", None),
        "RunPrioritized": ("bob", "the customer calls"),
        "ContextChanged": ("cid", "was wrong"),
        "StepOverridden": ("dan", "seen on the statement"),
        "RunPaused": ("eve", "lunch"),
        "RunResumed": ("fay", "back") if how == "left" else ("dan", "seen on the statement"),
    }
    assert kd.info("r").priority == 7
    assert [one.data["note"] for one in told(kd, "r", e.NoteMade) if one.event.by == "ann"] == [{"seen": "all"}]


def test_a_note_of_somebody_is_not_taken_for_one_of_the_code(kd: killick.Client) -> None:
    @killick.agent(name="noting")
    async def agent(run: killick.Run) -> Any:
        await run.note("own")
        return await run.wait("go")

    advanced(kd, agent)
    kd.edit.note("r", "theirs", by="ann")
    kd.send("r", "go", 1)
    assert kd.run(agent, id="r") == 1
    assert [one.data["note"] for one in told(kd, "r", e.NoteMade)] == ["own", "theirs"]
    kd.replay("r", agent, check=True)


def test_a_call_from_a_loop_that_the_run_may_need_does_not_block_it(kd: killick.Client) -> None:
    @killick.tool(name="acts_inline", effect="reads")
    async def acts() -> str:
        return kd.edit.set("r", by="ann", x=1)

    @killick.agent(name="acted on inline")
    async def agent(run: killick.Run) -> Any:
        said = await run.call(acts)
        await run.sleep(0.3)
        return said, run.context["x"]

    assert kd.run(agent, id="r") == ("will be changed at its next step boundary, by the worker that holds it", 1)


# the context, with the version that was seen ------------------------------------------------------


@dataclass
class Claim:
    amount: int = 0
    route: str = "auto"
    tags: list[str] = field(default_factory=list[str])


@killick.agent(name="seen_context", context=Claim)
async def seen(run: killick.Run[Claim]) -> Any:
    await run.update(amount=1)
    await run.ask("well?")
    return run.context


def test_a_change_that_rests_on_an_older_version_is_refused_and_shows_what_changed(kd: killick.Client) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(seen, id="r")
    version = kd.state("r").context.version
    assert kd.edit.set("r", saw=version, by="bob", because="too small", amount=9, route="manager") == "changed"
    before = len(kd.events("r"))
    with pytest.raises(killick.errors.ContextStale) as stale:
        kd.edit.set("r", saw=version, by="ann", amount=5)
    assert (stale.value.saw, stale.value.version, len(kd.events("r"))) == (version, version + 1, before)
    assert stale.value.changes == {"amount": "bob", "route": "bob"}
    assert str(stale.value) == (
        "r: the context changed since version 2 (amount by bob, route by bob); read it again, give saw=3"
    )
    kd.edit.set("r", saw=version + 1, by="ann", amount=5)
    kd.answer("r", "approve")
    assert kd.run(seen, id="r")["amount"] == 5
    [_, _, one, two] = told(kd, "r", e.ContextChanged)
    assert (one.event.by, one.event.saw, one.data["because"], two.event.saw) == ("bob", 2, "too small", 3)


def test_a_stale_change_of_a_run_that_somebody_is_at_is_refused_where_it_lands(kd: killick.Client) -> None:
    said: list[Any] = []

    @killick.tool(name="acts_on_context", effect="reads")
    async def acts() -> None:
        said.append(await kd.as_async().edit.set("r", saw=1, by="ann", amount=3))
        try:
            await kd.as_async().edit.set("r", saw=1, by="bob", amount=4)
        except killick.errors.ContextStale as stale:
            said.append((stale.version, stale.changes))

    @killick.agent(name="held_context", context=Claim)
    async def agent(run: killick.Run[Claim]) -> int:
        await run.call(acts)
        return run.context.amount

    assert kd.run(agent, id="r") == 3
    assert said == ["changed", (2, {"amount": "ann"})]
    [refused] = told(kd, "r", e.ContextRefused)
    assert (refused.event.version, refused.event.saw, refused.event.by, refused.data["set"]) == (
        2, 1, "bob", {"amount": 4},
    )  # fmt: skip
    assert refused.event.message is not None
    assert refused.data["failure"]["type"] == "killick.ContextStale"
    kd.replay("r", agent, check=True)


def test_an_entry_that_is_taken_out_is_its_default_again_and_nobody_passes_for_the_agent(kd: killick.Client) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(seen, id="r")
    with pytest.raises(AnswerRefused, match="give your own name"):
        kd.edit.set("r", by="agent", amount=5)
    kd.edit.set("r", unset=["amount"], by="ann")
    kd.answer("r", "approve")
    assert kd.run(seen, id="r") == {"amount": 0, "route": "auto", "tags": []}


@pytest.mark.parametrize("how", ["parked", "held"])
def test_a_change_of_the_context_is_judged_by_the_contract(kd: killick.Client, how: str) -> None:
    contract = killick.Contract("bounds", [killick.rules.arguments("update", amount={"max": 10}, name="small sums")])
    said: list[str] = []

    def change() -> None:
        try:
            kd.edit.set("r", by="ann", amount=11)
        except AnswerRefused as refused:
            said.append(refused.reason)
        kd.edit.set("r", by="ann", amount=7)

    @killick.tool(name=f"changes {how}", effect="reads")
    def changes() -> None:
        change()

    @killick.agent(name=f"bounded {how}", context=Claim, contract=contract)
    async def agent(run: killick.Run[Claim]) -> int:
        if how == "held":
            await run.call(changes)
        else:
            await run.ask("well?")
        return run.context.amount

    if how == "parked":
        advanced(kd, agent)
        change()
        kd.answer("r", "approve")
    assert kd.run(agent, id="r") == 7
    assert said[0].startswith("the contract refuses it (small sums): ")
    [refused] = told(kd, "r", e.ContextRefused)
    assert (refused.event.verdict.ruling, refused.event.verdict.rule) == ("reject", "small sums")
    verdicts = [one.event.verdict for one in told(kd, "r", e.ContextChanged) if one.event.by == "ann"]
    assert [(verdict.ruling, verdict.contract) for verdict in verdicts] == [("accept", contract.digest)]
    kd.replay("r", agent, check=True)


# deaths -------------------------------------------------------------------------------------------


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    "name", ["override a question", "override a backoff", "skip a wait", "skip a backoff", "retry now"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_dies_at_any_commit_leaves_the_same_outcome(
    disk: World, monkeypatch: pytest.MonkeyPatch, name: str, when: str
) -> None:
    case, at = CASES[name], f"1.1.{CASES[name].step}"
    person = disk.beside()
    # Of a process that is really dead, the store knows it.
    living = lambda: [kd.runtime.engine.holder for kd in (disk.kd, person)]  # noqa: E731
    monkeypatch.setattr(disk.store, "lives", lambda holder: holder in living())

    @killick.tool(name=f"acts {name} {when}", effect="reads", retry=killick.Retry(attempts=50))
    async def acts() -> None:
        await pending(person, CURRENT[0], at)
        with contextlib.suppress(AnswerRefused):  # it was done before the process died
            await asyncio.to_thread(case.act, _Renamed(person, CURRENT[0]), at)

    @killick.agent(name=f"dying {name} {when}")
    async def agent(run: killick.Run) -> Any:
        return (await run.gather(coming_to(case.code, run), run.call(acts)))[0]

    for number in range(1, 30):
        DONE.clear()
        CURRENT[0] = f"r{number}"
        disk.process(behind=True, grace_seconds=0.0)
        disk.line.cut_at = (number, when)
        first = disk.line
        while True:
            try:
                found = disk.kd.run(agent, id=CURRENT[0])
                break
            except StoreUnavailable:
                disk.bury(CURRENT[0])
                disk.process(behind=True, grace_seconds=0.0)
            except RunBusy:
                continue  # the person is at it for a moment
        assert found == case.comes_to or (name == "retry now" and found > 1), number
        if not first.is_cut:
            break
    else:
        raise AssertionError("it never came to its end unharmed")
    assert number > 2
    assert disk.kd.store.verify().problems == []


CURRENT = [""]


class _Renamed:
    """A client that says another run's name for `r`."""

    def __init__(self, kd: killick.Client, run: str) -> None:
        self._kd = kd
        self._run = run

    @property
    def edit(self) -> _Renamed:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kd.edit, name)
        return lambda run, *args, **kwargs: method(self._run, *args, **kwargs)


STEPPED = """
import asyncio, os, sys
import killick

@killick.tool(name="stepped_busy", effect="reads", retry=killick.Retry(attempts=9))
async def busy() -> int:
    print("up", flush=True)
    await asyncio.sleep(float(os.environ.get("BUSY", "0")))
    return 1

@killick.agent(name="stepped")
async def stepped(run: killick.Run):
    return await run.gather(run.wait("never"), run.call(busy))

if __name__ == "__main__":
    with killick.open(sys.argv[1]) as kd:
        kd.run(stepped, id="r")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it landed", "after"])
def test_a_killed_process_leaves_what_somebody_gave_a_step(tmp_path: Path, when: str) -> None:
    program, store = tmp_path / "stepped.py", str(tmp_path / "killick.db")
    program.write_text(STEPPED)
    command = [sys.executable, str(program), store]
    environment = {**os.environ, "BUSY": "60"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process, killick.open(store) as kd:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        asyncio.run(pending(kd, "r", "1.1.1"))
        if when != "after":
            process.send_signal(signal.SIGSTOP)  # so that it is at the run, and takes nothing any more
        said = kd.edit.override("r", "1.1.1", "given", by="ann")
        assert ("will be" in said) == (when != "after")
        process.kill()
        process.wait()
    done = subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert done.stdout == b"up\n"
    with killick.open(store) as kd:
        assert kd.state("r").outputs["1.1.1"] == "given"
        assert kd.info("r").status == "completed"
        assert kd.store.verify().problems == []


def test_a_resume_right_after_a_pause_waits_for_the_tool_under_way() -> None:
    began, ends = threading.Event(), threading.Event()

    @killick.tool(name="paused_under_way")
    def slow() -> str:
        began.set()
        assert ends.wait(300)
        return "done"

    @killick.agent(name="paused_and_resumed")
    def agent(run: killick.SyncRun) -> str:
        return run.call(slow)

    with killick.open("memory:") as kd, ThreadPoolExecutor(2) as pool:
        running = pool.submit(kd.run, agent, id="r")
        assert began.wait(300)
        kd.pause("r")
        resuming = pool.submit(kd.resume, "r")
        assert not resuming.done()
        ends.set()
        assert resuming.result(60) == "resumed"
        with contextlib.suppress(killick.errors.KillickError):
            running.result(60)
        assert kd.run(agent, id="r") == "done"


def test_a_resume_that_finds_the_run_cancelled_meanwhile_leaves_it_over(monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.agent(name="cancelled_meanwhile")
    async def agent(run: killick.Run) -> None:
        await run.wait("word")

    with killick.open("memory:") as kd:
        kd.start(agent, id="r")
        kd.advance("r")
        kd.pause("r")
        stale = kd.runtime.store.index("r")
        kd.cancel("r")
        kd.advance("r")
        monkeypatch.setattr(kd.runtime.store, "index", lambda run: stale)
        with pytest.raises(AnswerRefused, match="the run is over"):
            kd.resume("r")
        monkeypatch.undo()
        assert kd.info("r").status == "cancelled"


def test_the_answer_to_a_step_that_was_skipped_is_refused_with_the_reason(kd: killick.Client) -> None:
    with kd.host("r") as host, pytest.raises(killick.RunWaiting):
        host.call_sync(killick.open_tool("pay", approve="ann"), {}, key="c1", fn=lambda: "paid")
    [asked] = kd.inbox()
    kd.edit.skip("r", asked.step, by="bob", because="they went on")
    for wait in (asked, asked.id):
        with pytest.raises(AnswerRefused, match=r"step 1\.1\.1 ended: skipped by bob: they went on"):
            kd.answer(wait, "approve", by="ann")
