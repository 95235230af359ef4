"""The inbox: what waits for people, the most urgent first, at a cost that does not grow with the number of runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.client import inbox
from killick.client.client import Client
from killick.clock import ManualClock
from killick.errors import ValueRefused

HOUR = 3_600_000_000


@killick.agent(name="inbox-asks")
async def asks(run: killick.Run, timeout: str | None) -> Any:
    return (await run.ask("May I?", to="mia", timeout=timeout)).kind


@killick.agent(name="inbox-done")
async def done(run: killick.Run) -> None:
    return None


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_794_819_600_000_000)


@pytest.fixture
def kd(tmp_path: Path, clock: ManualClock) -> Iterator[Client]:
    with killick.open(str(tmp_path / "killick.db"), clock=clock) as made:
        yield made


def ask(kd: Client, run: str, timeout: str | None = None, priority: int = 0) -> None:
    kd.start(asks, timeout, id=run, priority=priority)
    assert kd.advance(run).status == "waiting"


def test_what_is_due_first_comes_first_then_what_matters_then_what_waits_longest(
    kd: Client, clock: ManualClock
) -> None:
    for run, timeout, priority in [("young", None, 0), ("later", "8h", 0), ("urgent", None, 5), ("soon", "1h", 0)]:
        clock.advance(60)
        ask(kd, run, timeout, priority)
    clock.advance(60)
    ask(kd, "youngest")
    assert [wait.run for wait in kd.inbox()] == ["soon", "later", "urgent", "young", "youngest"]
    assert [wait.run for wait in kd.inbox(limit=2)] == ["soon", "later"]


def test_a_listing_opens_only_the_runs_that_it_shows(kd: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(30):
        ask(kd, f"r{n:02}", f"{n + 1}h")
        kd.run(done, id=f"done-{n}")
    opened: list[str] = []
    real = kd.runtime.log.state

    def counted(run: str, *given: Any, **options: Any) -> Any:
        opened.append(run)
        return real(run, *given, **options)

    monkeypatch.setattr(kd.runtime.log, "state", counted)
    assert [wait.run for wait in kd.inbox(limit=3)] == ["r00", "r01", "r02"]
    assert set(opened) == {"r00", "r01", "r02"}


def test_what_nobody_can_answer_any_more_comes_last(kd: Client, clock: ManualClock) -> None:
    ask(kd, "late", "1m")
    ask(kd, "soon", "1h")
    ask(kd, "open")
    clock.advance(120)
    assert [wait.run for wait in kd.inbox()] == ["soon", "open", "late"]


def test_pages_follow_each_other_and_end(kd: Client) -> None:
    for n in range(5):
        ask(kd, f"r{n}", f"{n + 1}h")
    now_us = kd.runtime.clock.now_us()
    first = inbox.page(kd.runtime.log, lambda wait: True, now_us=now_us, limit=2)
    second = inbox.page(kd.runtime.log, lambda wait: True, now_us=now_us, limit=2, after=first.next)
    third = inbox.page(kd.runtime.log, lambda wait: True, now_us=now_us, limit=2, after=second.next)
    assert [[wait.run for wait in each.waits] for each in (first, second, third)] == [
        ["r0", "r1"],
        ["r2", "r3"],
        ["r4"],
    ]
    assert third.next is None
    with pytest.raises(ValueRefused, match="cursor"):
        inbox.page(kd.runtime.log, lambda wait: True, now_us=now_us, limit=2, after="nonsense")


def test_a_question_of_one_branch_is_there_while_another_branch_works(tmp_path: Path) -> None:
    free = asyncio.Event()

    @killick.tool(name="inbox-works", effect="reads")
    async def works() -> None:
        await free.wait()

    @killick.agent(name="inbox-branches")
    async def branches(run: killick.Run) -> Any:
        return await run.gather(run.ask("May I?"), run.call(works))

    async def play() -> None:
        async with killick.open_async(str(tmp_path / "killick.db")) as kd:
            run = asyncio.ensure_future(kd.run(branches, id="r"))
            while not await kd.inbox() or (await kd.info("r")).status != "running":
                assert not run.done()
                await asyncio.sleep(0.01)
            [wait] = await kd.inbox()
            await kd.answer(wait, "approve", by="mia")
            free.set()
            assert (await run)[0]["by"] == "mia"
            assert not (await kd.inbox())

    asyncio.run(asyncio.wait_for(play(), 300))


def test_what_is_answered_leaves_and_is_found_among_the_answered(kd: Client) -> None:
    ask(kd, "r")
    ask(kd, "other")
    kd.answer("r", "approve", by="mia")
    assert [wait.run for wait in kd.inbox()] == ["other"]
    assert [wait.run for wait in kd.inbox(answered=True)] == ["r"]
    kd.advance("r")
    assert not kd.inbox(answered=True)


@killick.tool(name="inbox-pays", approve="mia")
async def pays(amount: int) -> str:
    return f"paid {amount}"


@pytest.mark.parametrize("given", [True, False], ids=["with the call", "by the model that decided it"])
def test_an_approval_carries_the_reason_of_the_agent(kd: Client, *, given: bool) -> None:
    @killick.agent(name=f"inbox-reasons-{given}")
    async def agent(run: killick.Run) -> Any:
        await run.decided("Which tool?", "inbox-pays", options=["inbox-pays"], because="the invoice is due", by="model")
        return await run.call(pays.options(because="it is urgent") if given else pays, 450)

    kd.start(agent, id="r")
    kd.advance("r")
    [wait] = kd.inbox()
    assert wait.because == ("it is urgent" if given else "the invoice is due")
    assert next(iter(kd.info("r").waits)).because == wait.because
