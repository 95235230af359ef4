"""Killed at any moment, and against a far side that stalls: every effect happens, and none happens twice."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import killick
from engine.counting import CountingServer, World, fetched, receipts
from killick.client.client import Client
from killick.store import SqliteStore
from killick.store.records import Append
from seeds import draw_seed, repeats

PROGRAM = Path(__file__).with_name("killing.py")

TOO_SHORT = 0.05
"""How long a tool waits for the far side."""

STALL = "stall_ms=90"
"""How long the far side takes, and then it does what it was asked to."""


def run(mode: str, folder: Path, *arguments: int) -> dict[str, Any]:
    """Let the program kill, in a process that holds no thread."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode, str(folder), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PROGRAM.parent.parent), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# kills --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kills", [8, pytest.param(repeats(18, 300), marks=pytest.mark.slow), pytest.param(2_000, marks=pytest.mark.far)]
)
def test_kills_at_random_moments_lose_no_step_and_repeat_no_effect(tmp_path: Path, kills: int) -> None:
    seed = draw_seed()
    found = run("moments", tmp_path, kills, seed)
    assert found["kills"] >= kills, seed
    assert found["requests"] > found["effects"] > 0, seed


@pytest.mark.slow
def test_two_processes_on_one_run_at_the_same_instant_do_its_effects_once(tmp_path: Path) -> None:
    seed, races = draw_seed(), repeats(6, 40)
    found = run("runs", tmp_path, races, seed)
    assert sum(found.values()) == races, seed


@pytest.mark.slow
def test_two_processes_may_make_one_store_at_the_same_instant(tmp_path: Path) -> None:
    races = repeats(6, 60)
    assert run("stores", tmp_path, races, 1) == {"stores": races}


def test_whoever_loses_the_race_to_create_a_run_does_not_let_the_winner_go(tmp_path: Path) -> None:
    begun: list[str] = []
    at_it, go_on = asyncio.Event(), asyncio.Event()

    @killick.tool(effect="idempotent", name="lasting")
    async def lasting(who: str) -> str:
        begun.append(who)
        at_it.set()
        await go_on.wait()
        return who

    @killick.agent(name="contested")
    async def contested(run: killick.Run) -> str:
        return await run.call(lasting, "x")

    async def race() -> tuple[Any, Any]:
        path = str(tmp_path / "killick.db")
        async with killick.open_async(path) as one, killick.open_async(path) as two:
            both = [asyncio.create_task(kd.as_async().run(contested, id="run")) for kd in (one, two)]
            await at_it.wait()
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # the other one is refused
            held = one.runtime.log.head("run").holder
            go_on.set()
            return held, await asyncio.gather(*both, return_exceptions=True)

    held, outcomes = asyncio.run(race())
    assert held is not None
    assert [type(each).__name__ for each in outcomes] in (["str", "RunBusy"], ["RunBusy", "str"])
    assert begun == ["x"]


@pytest.mark.slow
def test_a_dead_holder_whose_lease_ran_out_is_not_waited_for(tmp_path: Path) -> None:
    assert run("lease", tmp_path) == {"told": ["True"]}


# a loop that ends ---------------------------------------------------------------------------------


def test_a_loop_that_ends_leaves_a_run_that_waits_waiting(tmp_path: Path) -> None:
    @killick.agent(name="asking")
    async def asking(run: killick.Run) -> str:
        return (await run.ask("May I?")).kind

    async def soon(kd: killick.Client) -> str:
        return await kd.as_async().run(asking, id="run")

    with killick.open(str(tmp_path / "killick.db")) as kd:
        with pytest.raises(killick.RunWaiting):
            asyncio.run(soon(kd))
        assert kd.info("run").status == "waiting"
        kd.answer("run", "approve")
        assert asyncio.run(soon(kd)) == "approve"


@pytest.mark.parametrize("number", range(8))
def test_a_loop_that_ends_interrupts_a_run_and_does_not_fail_it(tmp_path: Path, number: int) -> None:
    at_it: list[bool] = []

    @killick.tool(effect="idempotent", name=f"pausing_{number}")
    async def pausing() -> int:
        at_it.append(True)
        if len(at_it) == 1:
            await asyncio.sleep(3_600)
        return 1

    @killick.agent(name=f"interrupted_{number}")
    async def interrupted(run: killick.Run) -> int:
        return await run.call(pausing)

    async def leave(kd: killick.Client) -> None:
        running = asyncio.ensure_future(kd.as_async().run(interrupted, id="run"))
        while not at_it:
            await asyncio.sleep(0)
        for _ in range(number):
            await asyncio.sleep(0)
        assert not running.done()

    with killick.open(str(tmp_path / "killick.db")) as kd:
        asyncio.run(leave(kd))
        assert kd.info("run").status == "running"
        assert kd.run(interrupted, id="run") == 1


@pytest.mark.slow
def test_a_blocking_tool_that_an_interrupted_run_left_is_not_begun_again_while_its_thread_lives(tmp_path: Path) -> None:
    done: list[int] = []
    give_up: list[Callable[[], object]] = []
    gone = threading.Event()

    def look(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
        return killick.Happened(done[0]) if done else killick.DidNotHappen()

    @killick.tool(name="writing", reconcile=look)
    def writing() -> int:
        give_up[0]()
        gone.wait(300)
        time.sleep(0.2)  # so long its thread lives on
        done.append(len(done) + 1)
        return done[-1]

    @killick.agent(name="impatient")
    async def impatient(run: killick.Run) -> int:
        return await run.call(writing)

    async def twice(kd: killick.Client) -> int:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                give_up.append(lambda: loop.call_soon_threadsafe(limit.reschedule, 0.0))
                await kd.as_async().run(impatient, id="run")
        gone.set()
        return await kd.as_async().run(impatient, id="run")

    with killick.open(str(tmp_path / "killick.db")) as kd:
        assert asyncio.run(twice(kd)) == 1
    assert done == [1]


# a far side that stalls ---------------------------------------------------------------------------


@pytest.fixture
def far() -> Iterator[CountingServer]:
    with CountingServer() as server:
        yield server


def looking(far: CountingServer) -> Callable[[killick.Effect], killick.Happened | killick.DidNotHappen]:
    def look(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
        done = receipts(far.url, effect.key)
        return killick.Happened(done[0]) if done else killick.DidNotHappen()

    return look


def a_hundred(path: Path, tool: Any) -> dict[str, int]:
    """A hundred calls, twenty at a time: what each asked for, and the receipt it got."""

    @killick.agent(name=f"hundred_{tool.name}")
    async def hundred(run: killick.Run) -> dict[str, int]:
        given: dict[str, int] = {}
        for first in range(0, 100, 20):
            names = [f"call {n}" for n in range(first, first + 20)]
            given |= dict(zip(names, await run.gather(run.call(tool, name) for name in names), strict=True))
        return given

    with killick.open(str(path)) as kd:
        given = kd.run(hundred, id="run")
        assert kd.store.verify().problems == []
    return given


def check_each_once(world: World, given: dict[str, int]) -> None:
    counted = Counter(effect.what for effect in world.effects)
    assert [what for what, times in counted.items() if times > 1] == []
    assert {effect.what: effect.receipt for effect in world.effects} == given
    assert len(given) == 100


MANY = killick.Retry(attempts=1_000, first=0.01, max=0.02)


def posting(far: CountingServer, options: str) -> Callable[[str, str], Awaitable[int]]:
    async def post(what: str, key: str) -> int:
        """Send the request before the first await, so that no timeout comes before it, however busy the machine is."""
        address = urlsplit(far.url)
        body = json.dumps({"what": what}).encode()
        head = f"POST /effects?{options} HTTP/1.1\r\nIdempotency-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(head.encode() + body)
            connection.setblocking(False)
            reply = await asyncio.get_running_loop().sock_recv(connection, 4096)
        return int(json.loads(reply.partition(b"\r\n\r\n")[2])["receipt"])

    return post


@pytest.mark.slow
def test_a_hundred_stalled_calls_that_are_cancelled_and_looked_up_are_a_hundred_effects(
    tmp_path: Path, far: CountingServer
) -> None:
    post = posting(far, STALL)

    @killick.tool(name="pay_soon", timeout=TOO_SHORT, reconcile=looking(far), retry=MANY)
    async def pay(what: str, key: killick.Key = killick.KEY) -> int:
        return await post(what, key)

    check_each_once(far.world, a_hundred(tmp_path / "killick.db", pay))


@pytest.mark.slow
def test_a_hundred_stalled_calls_whose_own_client_gives_up_are_a_hundred_effects(
    tmp_path: Path, far: CountingServer
) -> None:
    @killick.tool(name="pay_giving_up", reconcile=looking(far), retry=MANY)
    def pay(what: str, key: killick.Key = killick.KEY) -> int:
        return int(fetched(f"{far.url}/effects?{STALL}", what, key, seconds=TOO_SHORT)[1]["receipt"])

    check_each_once(far.world, a_hundred(tmp_path / "killick.db", pay))


def test_a_hundred_stalled_calls_of_a_blocking_tool_are_waited_for_and_not_repeated(
    tmp_path: Path, far: CountingServer
) -> None:
    @killick.tool(name="pay_blocking", timeout=TOO_SHORT, reconcile=looking(far), retry=MANY)
    def pay(what: str, key: killick.Key = killick.KEY) -> int:
        return int(fetched(f"{far.url}/effects?{STALL}", what, key)[1]["receipt"])

    check_each_once(far.world, a_hundred(tmp_path / "killick.db", pay))
    assert set(far.world.requests.values()) == {1}


@pytest.mark.slow
def test_a_hundred_stalled_calls_under_a_key_are_asked_for_again_and_are_a_hundred_effects(
    tmp_path: Path, far: CountingServer
) -> None:
    post = posting(far, f"honour=1&{STALL}")

    @killick.tool(name="order_soon", effect="idempotent", timeout=TOO_SHORT, retry=MANY)
    async def order(what: str, key: killick.Key = killick.KEY) -> int:
        return await post(what, key)

    check_each_once(far.world, a_hundred(tmp_path / "killick.db", order))
    assert far.world.requests.total() > 100
    assert len(far.world.requests) == 100


def test_a_hundred_stalled_calls_of_a_blocking_tool_under_a_key_are_a_hundred_effects(
    tmp_path: Path, far: CountingServer
) -> None:
    @killick.tool(name="order_blocking", effect="idempotent", timeout=TOO_SHORT, retry=MANY)
    def order(what: str, key: killick.Key = killick.KEY) -> int:
        return int(fetched(f"{far.url}/effects?honour=1&{STALL}", what, key)[1]["receipt"])

    check_each_once(far.world, a_hundred(tmp_path / "killick.db", order))
    assert len(far.world.requests) == 100


# how long an effect is in doubt -------------------------------------------------------------------


class Watching:
    """A store that notes when outcomes of attempts were committed."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.committed: list[float] = []
        self.appends = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, items: list[Append]) -> Any:
        results = self._store.append(items)
        self.appends += 1
        ended = [row for item in items for row in item.rows if row.body.startswith(b'{"kind":"attempt.ended"')]
        self.committed += [time.perf_counter()] * len(ended)
        return results


@pytest.mark.parametrize("computes", [True, False])
def test_an_outcome_is_committed_by_itself_while_the_agent_takes_no_further_step(
    tmp_path: Path, computes: bool
) -> None:
    store: Any = Watching(SqliteStore(tmp_path / "killick.db"))
    returned: list[float] = []

    @killick.tool(name=f"touching_{computes}")
    async def touching(n: int) -> int:
        returned.append(time.perf_counter())
        return n

    @killick.agent(name=f"thinking_{computes}")
    async def thinking(run: killick.Run) -> list[int]:
        seen: list[int] = []
        for n in range(60):
            await run.call(touching, n)
            until = time.perf_counter() + 600
            while len(store.committed) <= n and time.perf_counter() < until:
                if not computes:
                    time.sleep(0.0002)
            seen.append(len(store.committed))
        return seen

    with Client(store) as kd:
        assert kd.run(thinking, id="run") == list(range(1, 61))
    # One commit for each intention, one for each outcome, and one each for how the run began and ended.
    assert store.appends <= 122
    delays = sorted((there - back) * 1_000 for back, there in zip(returned, store.committed, strict=True))
    sys.stdout.write(
        f"in doubt for {delays[0]:.1f} ms at least, {delays[30]:.1f} in the middle, {delays[-1]:.1f} at most\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("holding", [0, 1])
def test_an_effect_is_in_doubt_for_some_milliseconds_whatever_the_agent_does_meanwhile(
    tmp_path: Path, holding: int
) -> None:
    # Two milliseconds to look for company, and two for the disk.
    found = run("computing", tmp_path, 3, 16, 4_000, holding)
    assert found["kept"] == 3, found
