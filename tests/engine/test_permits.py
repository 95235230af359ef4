"""So many calls at once under a limit: never more, in turn, and no death or way back keeps a permit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import killick
from killick.archive.rebuild import append_all
from killick.engine.steps import permits
from killick.log import Log, verify
from killick.model import events as e
from killick.model import hashing
from killick.model.facts import PERMIT
from killick.presenting.limits import limit_queues
from killick.store import MemoryStore
from killick.store.records import Append, CreateRun, RunQuery

ONE = killick.Limit("one", at_once=1)


@killick.agent(name="permits_one")
async def calls_one(run: killick.Run, name: str) -> Any:
    """Calls the tool of that name, which each test declares anew."""
    from killick.definitions.tools import TOOLS

    return await run.call(TOOLS[name])


def held(store: Any) -> list[str]:
    return [owner.run for owner in store.owned(PERMIT).values()]


def in_order(store: Any) -> None:
    """Every log agrees with the store, and no permit is held."""
    log = Log(store)
    assert (verify(log).problems, held(store)) == ([], [])


def test_branches_of_a_run_are_in_flight_together_up_to_the_limit_of_each_value(world: Any) -> None:
    live: dict[str, int] = {}
    most: dict[str, int] = {}

    @killick.tool(effect="reads", limit=killick.Limit("crm", at_once=2, by="tenant"))
    async def look(tenant: str, number: int) -> int:
        live[tenant] = live.get(tenant, 0) + 1
        most[tenant] = max(most.get(tenant, 0), live[tenant])
        await asyncio.sleep(0.001)
        live[tenant] -= 1
        return number

    @killick.agent
    async def calls(run: killick.Run) -> list[int]:
        return list(await run.gather(*(run.call(look, "ab"[number % 2], number) for number in range(12))))

    assert world.kd.run(calls, id="r") == list(range(12))
    assert most == {"a": 2, "b": 2}
    in_order(world.store)


def test_every_outcome_returns_the_permit_and_a_rate_of_the_same_limit_holds_too(world: Any, clock: Any) -> None:
    both = killick.Limit("both", "1/min", at_once=1)
    story = [ConnectionResetError(), killick.NotDone("no"), killick.RateLimited(retry_after=1), None]
    seen: list[tuple[int, int]] = []

    @killick.tool(effect="idempotent", limit=both, retry=killick.Retry(attempts=4))
    def act() -> str:
        seen.append((round(clock.monotonic() / 60), len(held(world.store))))
        error = story[len(seen) - 1]
        if error is not None:
            raise error
        return "done"

    assert world.kd.run(calls_one, "act", id="r") == "done"
    assert seen == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [len(ended.released) for ended in world.told("r", e.AttemptEnded)] == [1, 1, 1, 1]
    in_order(world.store)


def test_a_dead_process_keeps_its_permit_until_another_takes_the_run_and_repeats_the_call(world: Any) -> None:
    made: list[str] = []

    @killick.tool(effect="idempotent", limit=ONE, patience="5m")
    async def act() -> str:
        made.append("act")
        if len(made) == 1:
            world.die()
        return "done"

    @killick.tool(effect="reads", limit=ONE, patience="5m")
    async def look() -> str:
        return "seen"

    kd = world.killed(calls_one, "act", run="r")
    assert held(world.store) == ["r"]
    with pytest.raises(killick.RunFailed, match="no turn within 300 s"):
        kd.run(calls_one, "look", id="other")
    assert kd.run(calls_one, "act", id="r") == "done"
    assert (made, [started.attempt for started in world.started("r")]) == (["act", "act"], [1, 2])
    assert kd.run(calls_one, "look", id="after") == "seen"
    in_order(world.store)


def test_a_call_in_which_several_processes_died_keeps_its_own_permit(world: Any) -> None:
    made: list[str] = []

    @killick.tool(effect="idempotent", limit=ONE)
    async def act() -> str:
        made.append("act")
        if len(made) < 4:
            world.die()
        return "done"

    assert world.outlived(calls_one, "act", run="r") == "done"
    assert [started.attempt for started in world.started("r")] == [1, 2, 3, 4]
    assert held(world.store) == []
    in_order(world.store)


@pytest.mark.parametrize("verb", ["happened", "not"])
def test_a_call_in_doubt_keeps_its_permit_until_a_person_settles_it(world: Any, verb: str) -> None:
    made: list[str] = []

    @killick.tool(limit=ONE)
    async def act() -> None:
        made.append("act")
        if len(made) == 1:
            world.die()

    kd = world.killed(calls_one, "act", run="r")
    with pytest.raises(killick.RunWaiting):
        kd.run(calls_one, "act", id="r")
    assert held(world.store) == ["r"]
    kd.answer("r", verb, by="ann")
    assert kd.run(calls_one, "act", id="r") is None
    assert len(made) == (1 if verb == "happened" else 2)
    in_order(world.store)


@pytest.mark.parametrize("way", ["rewind", "cancel"])
def test_a_run_that_goes_back_or_is_cancelled_returns_the_permit_of_a_call_it_left_open(world: Any, way: str) -> None:
    made: list[str] = []

    @killick.tool(effect="idempotent", limit=ONE)
    async def act() -> str:
        made.append("act")
        if len(made) == 1:
            world.die()
        return "done"

    kd = world.killed(calls_one, "act", run="r")
    if way == "rewind":
        kd.rewind("r", "1:before")
        assert held(world.store) == []
        assert kd.run(calls_one, "act", id="r") == "done"
    else:
        kd.cancel("r")
        with pytest.raises(killick.errors.RunCancelled):
            kd.run(calls_one, "act", id="r")
    in_order(world.store)


def test_a_transaction_returns_the_permit_with_its_rows(disk: Any) -> None:
    seen: list[list[str]] = []

    @killick.tool(effect="transaction", limit=ONE)
    def act(tx: killick.Tx = killick.TX) -> str:
        seen.append(held(disk.store))
        tx.execute("CREATE TABLE IF NOT EXISTS paid (who TEXT)")
        return "done"

    assert disk.kd.run(calls_one, "act", id="r") == "done"
    assert seen == [["r"]]
    in_order(disk.store)


def test_a_call_that_waits_for_its_turn_takes_an_inner_one_of_another_limit(world: Any) -> None:
    @killick.tool(effect="idempotent", limit=[ONE, killick.Limit("two", at_once=2)])
    async def act() -> int:
        return len(held(world.store))

    assert world.kd.run(calls_one, "act", id="r") == 2
    in_order(world.store)


def test_the_log_of_a_run_with_permits_makes_the_same_store_again(world: Any) -> None:
    made: list[str] = []

    @killick.tool(effect="idempotent", limit=ONE)
    async def act() -> None:
        made.append("act")
        if len(made) == 2:
            world.die()

    @killick.agent
    async def twice(run: killick.Run) -> None:
        await run.call(act)
        await run.call(act)

    world.killed(twice, run="r")
    copy, rows = MemoryStore(), world.store.read("r")
    before = hashing.genesis(world.store.id, "r")
    copy.append([Append(run="r", after=0, before=before, epoch=0, rows=(rows[0],), create=CreateRun())])
    append_all(copy, "r", rows[1:])
    assert copy.claimed("r") == world.store.claimed("r")
    assert len(copy.claimed("r")) == 1


# several runs --------------------------------------------------------------------------------------


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not holds():
            await asyncio.sleep(0.005)


class Line:
    """A worker that serves a tool which one call at a time may enter, and stays in until it is let out."""

    def __init__(self, kd: killick.Client) -> None:
        self.kd, self.store = kd, kd.runtime.store
        self.entered: list[str] = []
        self.out = asyncio.Semaphore(0)

        @killick.tool(name="permits_gated", effect="idempotent", limit=ONE)
        async def gated(who: str, key: killick.Key = killick.KEY) -> str:
            self.entered.append(who)
            await self.out.acquire()
            return who

        @killick.agent(name="permits_visit")
        async def visit(run: killick.Run, who: str) -> str:
            return await run.call(gated, who)

        self.visit = visit

    def waiting(self) -> int:
        return len([row for row in self.store.runs(RunQuery(status=("waiting",))) if row.tags])

    async def queue(self, *runs: str) -> None:
        """Starts runs one after the other: the first enters, the others wait in this order."""
        for number, run in enumerate(runs):
            self.kd.start(self.visit, run, id=run)
            await until(lambda number=number: len(self.entered) + self.waiting() == number + 1)  # type: ignore[misc]

    async def ended(self, *runs: str) -> None:
        await until(lambda: all(self.kd.info(run).status == "completed" for run in runs))


def on_worker(story: Callable[[Line], Awaitable[None]], kd: killick.Client) -> None:
    async def whole() -> None:
        line = Line(kd)
        async with kd.worker():
            try:
                await story(line)
            finally:
                for _ in range(20):
                    line.out.release()

    asyncio.run(whole())


def test_runs_that_wait_hold_no_slot_of_a_worker_are_woken_by_a_return_and_come_in_their_order(
    kd: killick.Client,
) -> None:
    async def story(line: Line) -> None:
        await line.queue("a", "b", "c", "d")
        assert line.entered == ["a"]
        await until(lambda: all(line.store.head(run).holder is None for run in "bcd"))  # type: ignore[union-attr]
        assert line.store.head("a").holder is not None  # type: ignore[union-attr]
        [queue] = limit_queues(Log(line.store))
        assert (queue.limit, queue.in_flight, queue.waiting, queue.first) == ("one", 1, 3, "b")
        for _ in "abcd":
            line.out.release()
        await line.ended(*"abcd")
        assert line.entered == ["a", "b", "c", "d"]

    on_worker(story, kd)
    assert [len([r for r in kd.events(run) if isinstance(r.event, e.MessageTaken)]) for run in "abcd"] == [0, 1, 1, 1]
    in_order(kd.runtime.store)


def test_a_paused_run_at_the_head_of_the_line_holds_up_nobody(kd: killick.Client) -> None:
    async def story(line: Line) -> None:
        await line.queue("a", "b", "c")
        line.kd.pause("b")
        await until(lambda: line.kd.info("b").status == "paused")
        line.out.release()
        line.out.release()
        await line.ended("a", "c")
        line.kd.resume("b")
        line.out.release()
        await line.ended("b")
        assert line.entered == ["a", "c", "b"]

    on_worker(story, kd)
    in_order(kd.runtime.store)


def test_a_new_run_does_not_go_ahead_of_one_that_waits_and_wakes_it(
    kd: killick.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(line: Line) -> None:
        await line.queue("a", "b")
        with monkeypatch.context() as lost:
            lost.setattr(permits, "wake", lambda *_: ())
            line.out.release()
            await line.ended("a")
        assert (held(line.store), line.waiting()) == ([], 1)
        line.kd.start(line.visit, "c", id="c")
        line.out.release()
        line.out.release()
        await line.ended("b", "c")
        assert line.entered == ["a", "b", "c"]

    on_worker(story, kd)


@pytest.mark.parametrize(
    "options", [{}, {"at_once": 0}, {"at_once": True}, {"at_once": 2.0}, {"at_once": 1001}, {"rate": "1/s", "burst": 0}]
)
def test_a_limit_of_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(killick.errors.DeclarationRefused):
        killick.Limit("crm", **options)


def test_a_child_has_the_fairness_key_of_its_parent_and_no_other_tag(world: Any) -> None:
    @killick.agent(name="permits_child")
    async def child(run: killick.Run) -> str:
        return run.id

    @killick.agent(name="permits_parent")
    async def parent(run: killick.Run) -> str:
        return await (await run.spawn(child)).result()

    made = world.kd.run(parent, id="r", tags=["fair:acme", "eu"])
    assert world.store.tags(made) == {"fair:acme"}
