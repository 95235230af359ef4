"""Kills processes that run agents against a server that counts, for real. Run as a program; prints JSON.

It forks from a process that holds no store and no thread, so that hundreds of deaths take seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import select
import signal
import ssl
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

import killick
from engine.counting import fetched, receipts, serve_for_ever
from killick.errors import RunBusy
from warm import load_client

MANY: Final = killick.Retry(attempts=200, first=0.002, max=0.01)
"""A step may be killed again and again: how often is not what these tests are about."""

FAR: Final = {"url": ""}
"""Where the server is, known before any tool runs."""

_TLS: Final = ssl.create_default_context()  # made once, because making it takes longer than many of the lives below


class NotYet(Exception):
    """The far side said that it did nothing."""


def _receipt(status: int, body: Any) -> int:
    if status == 409:
        raise NotYet(body["error"])
    assert status == 200, (status, body)
    return int(body["receipt"])


# the far side, from async code --------------------------------------------------------------------

CLIENT: Final = killick.Resource(lambda: httpx.AsyncClient(verify=_TLS, timeout=30), lambda it: it.aclose()).inject()


async def _ask(client: httpx.AsyncClient, what: str, key: str, **options: int) -> int:
    reply = await client.post(
        f"{FAR['url']}/effects", params=options, headers={"Idempotency-Key": key}, json={"what": what}
    )
    return _receipt(reply.status_code, reply.json())


async def look_there(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    """What the server says became of a key. It has read all that a dead process had sent, so that no means never."""
    async with httpx.AsyncClient(verify=_TLS) as client:
        while True:
            found = (await client.get(f"{FAR['url']}/effects", params={"key": effect.key})).json()
            if not found["under_way"]:
                return _known(found["receipts"])
            await asyncio.sleep(0.005)


def _known(done: list[int]) -> killick.Happened | killick.DidNotHappen:
    return killick.Happened(done[0]) if done else killick.DidNotHappen()


@killick.tool(effect="reads", retry=MANY)
async def count(client: httpx.AsyncClient = CLIENT) -> bool:
    """Whether the server counts."""
    return "effects" in (await client.get(f"{FAR['url']}/count")).json()


@killick.tool(reconcile=look_there, retry=MANY)
async def invite(what: str, key: killick.Key = killick.KEY, client: httpx.AsyncClient = CLIENT) -> int:
    """Invites; asking twice invites twice."""
    return await _ask(client, what, key)


@killick.tool(effect="idempotent", retry=MANY)
async def reserve(what: str, key: killick.Key = killick.KEY, client: httpx.AsyncClient = CLIENT) -> int:
    """Reserves; the far side honours the key."""
    return await _ask(client, what, key, honour=1)


@killick.tool(reconcile=look_there, nothing_happened=NotYet, retry=killick.Retry(attempts=200, first=0.01, max=0.01))
async def book(what: str, key: killick.Key = killick.KEY, client: httpx.AsyncClient = CLIENT) -> int:
    """Books at the third asking, and is not done before."""
    return await _ask(client, what, key, refuse=2)


# the same, blocking -------------------------------------------------------------------------------


def _ask_blocking(what: str, key: str, options: str = "") -> int:
    return _receipt(*fetched(f"{FAR['url']}/effects{options}", what, key))


def look_there_blocking(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return _known(receipts(FAR["url"], effect.key))


@killick.tool(effect="reads", retry=MANY)
def count_blocking() -> bool:
    return "effects" in fetched(f"{FAR['url']}/count")[1]


@killick.tool(reconcile=look_there_blocking, retry=MANY)
def invite_blocking(what: str, key: killick.Key = killick.KEY) -> int:
    return _ask_blocking(what, key)


@killick.tool(effect="idempotent", retry=MANY)
def reserve_blocking(what: str, key: killick.Key = killick.KEY) -> int:
    return _ask_blocking(what, key, "?honour=1")


@killick.tool(
    reconcile=look_there_blocking, nothing_happened=NotYet, retry=killick.Retry(attempts=200, first=0.01, max=0.01)
)
def book_blocking(what: str, key: killick.Key = killick.KEY) -> int:
    return _ask_blocking(what, key, "?refuse=2")


# the agents ---------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What an agent asked for, and the receipt it was given."""

    what: str
    receipt: int


@killick.agent(name="errand")
async def errand(run: killick.Run, trip: str) -> list[Asked]:
    gift, card = f"{trip}/gift", f"{trip}/card"
    return [Asked(gift, await run.call(invite, gift)), Asked(card, await run.call(reserve, card))]


@killick.agent(name="planner")
async def planner(run: killick.Run, trip: str) -> list[Asked]:
    asked: list[Asked] = []

    async def does(tool: Any, what: str) -> Asked:
        asked.append(Asked(f"{trip}/{what}", await run.call(tool, f"{trip}/{what}")))
        return asked[-1]

    async def guest(name: str) -> None:
        await run.call(count)
        await does(invite, name)
        await does(reserve, f"chair of {name}")

    await run.call(count)
    how = await run.decided("How do we go?", "train", options=["train", "car"], because="it is far")
    await does(invite, f"ann by {how}")
    await does(reserve, "room")
    await run.gather(guest("bob"), guest("cleo"), does(book, "guide"))
    await does(book, "flight")
    await run.sleep(0.01)
    child = await run.spawn(errand, trip)
    await run.update(errand=child.id)
    await does(invite, f"dan with {run.uuid()}")
    asked += await child.result()
    await does(reserve, "table")
    await does(invite, "eve")
    return asked


@killick.agent(name="errand_blocking")
def errand_blocking(run: killick.SyncRun, trip: str) -> list[Asked]:
    gift, card = f"{trip}/gift", f"{trip}/card"
    return [Asked(gift, run.call(invite_blocking, gift)), Asked(card, run.call(reserve_blocking, card))]


@killick.agent(name="planner_blocking")
def planner_blocking(run: killick.SyncRun, trip: str) -> list[Asked]:
    asked: list[Asked] = []

    def does(tool: Any, what: str) -> Asked:
        asked.append(Asked(f"{trip}/{what}", run.call(tool, f"{trip}/{what}")))
        return asked[-1]

    def guest(name: str) -> None:
        run.call(count_blocking)
        does(invite_blocking, name)
        does(reserve_blocking, f"chair of {name}")

    run.call(count_blocking)
    how = run.decided("How do we go?", "train", options=["train", "car"], because="it is far")
    does(invite_blocking, f"ann by {how}")
    does(reserve_blocking, "room")
    run.gather(lambda: guest("bob"), lambda: guest("cleo"), lambda: does(book_blocking, "guide"))
    does(book_blocking, "flight")
    run.sleep(0.01)
    child = run.spawn(errand_blocking, trip)
    run.update(errand=child.id)
    does(invite_blocking, f"dan with {run.uuid()}")
    given = run.result(child)
    asked += given
    does(reserve_blocking, "table")
    does(invite_blocking, "eve")
    return asked


AGENTS: Final = (planner, planner_blocking)
EFFECTS: Final = 13
"""What one trip asks for, its errand included."""


# processes ----------------------------------------------------------------------------------------


class Life(NamedTuple):
    """How a process ended: by itself, with what it told, or killed."""

    killed: bool
    told: list[str]
    seconds: float


def fork(task: Callable[[int], object]) -> tuple[int, int]:
    """Run a task in a child; returns its pid and the end of a pipe it writes to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            task(writing)
        except BaseException as error:
            told = "".join(traceback.format_exception(error)).replace("\n", " | ")
            os.write(writing, f"error {told}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    return child, reading


def live(task: Callable[[int], object], kill_after: float | None = None) -> Life:
    """A life that ends by itself, or is ended."""
    began = time.monotonic()
    child, reading = fork(task)
    killed = kill_after is not None and not select.select([reading], [], [], kill_after)[0]
    if killed:
        os.kill(child, signal.SIGKILL)
    told = end_of(child, reading)
    return Life(killed, told, time.monotonic() - began)


def end_of(child: int, reading: int) -> list[str]:
    """What a process told until it ended."""
    told = b""
    while chunk := os.read(reading, 1 << 16):
        told += chunk
    os.close(reading)
    os.waitpid(child, 0)
    return told.decode().splitlines()


@contextlib.contextmanager
def far_side() -> Any:
    """The server, in a process of its own."""
    child, reading = fork(serve_for_ever)
    FAR["url"] = f"http://127.0.0.1:{os.read(reading, 64).decode().strip()}"
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def go_on(path: Path, number: int, run: str, *, soon: bool = False) -> Callable[[int], None]:
    """In a child: run an agent, or go on with it. A lease that had to be waited for would take an hour."""

    def task(out: int) -> None:
        logging.disable()
        with killick.open(
            str(path), lease_seconds=3600.0 if number % 4 < 2 else float("inf"), grace_seconds=3600.0
        ) as kd:
            agent = AGENTS[number % 2]
            try:
                result = asyncio.run(_soon(kd, agent, run)) if soon else kd.run(agent, run, id=run)
            except RunBusy:
                os.write(out, b"busy\n")
            else:
                os.write(out, f"done {json.dumps(result)}\n".encode())

    return task


async def _soon(kd: killick.Client, agent: Any, run: str) -> Any:
    return await kd.as_async().run(agent, run, id=run)


def look_at(path: Path, *, verified: bool) -> Callable[[int], None]:
    """In a child: every run's steps as they stand, and whether the record holds."""

    def task(out: int) -> None:
        with killick.open(str(path)) as kd:
            for listed in kd.list(limit=10_000):
                steps = [(s.id, s.sort, s.name, s.status) for s in kd.state(listed.id).fold.steps]
                os.write(out, f"run {json.dumps([listed.id, listed.status, sorted(steps)])}\n".encode())
            if verified:
                os.write(out, f"problems {json.dumps([str(p) for p in kd.store.verify().problems])}\n".encode())

    return task


def check_done(run: str, told: list[str]) -> None:
    """The run says what it asked for: the server did all of it, once, and nothing else."""
    assert [line[:5] for line in told] == ["done "], f"{run}: {told}"
    asked = [tuple(each) for each in json.loads(told[0].removeprefix("done "))]
    done = [(what, receipt) for _, what, receipt in fetched(f"{FAR['url']}/effects")[1] if what.startswith(f"{run}/")]
    assert sorted(done) == sorted(asked), f"{run}: the server did {done}, the run asked for {asked}"
    assert len(done) == len(dict(done)) == EFFECTS, f"{run}: {sorted(done)}"


def steps_of(told: list[str], run: str) -> list[list[str]]:
    found = [json.loads(line.removeprefix("run ")) for line in told if line.startswith("run ")]
    [(_, status, steps)] = [each for each in found if each[0] == run]
    assert status == "completed", f"{run}: {status}"
    return [[part.removeprefix(run) for part in step] for step in steps]


# what is tried ------------------------------------------------------------------------------------


def at_random_moments(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Kill a run again and again until it has completed, then another."""
    chance = random.Random(seed)
    whole: list[tuple[float, list[list[str]]]] = []
    for number in range(len(AGENTS)):
        path, run = folder / "whole.db", f"whole_{number}"
        life = live(go_on(path, number, run))
        check_done(run, life.told)
        seen = live(look_at(path, verified=True)).told
        assert seen[-1] == "problems []", seen[-1]
        whole.append((life.seconds, steps_of(seen, run)))
    killed = number = 0
    while killed < kills:
        number += 1
        path, run = folder / f"killick_{number % 4}.db", f"run_{number}"
        where = f"seed {seed}, {run}, {killed} kills so far"
        seconds, steps = whole[number % 2]
        while True:
            reach = seconds * chance.choice([0.3, 0.6, 1.2])
            life = live(go_on(path, number, run, soon=chance.random() < 0.3), chance.uniform(0, reach))
            killed += life.killed
            if not life.killed:
                break
            assert not any(line.startswith(("error", "busy")) for line in life.told), f"{where}: {life.told}"
        check_done(run, life.told)
        seen = live(look_at(path, verified=number % 5 == 0 or killed >= kills)).told
        assert steps_of(seen, run) == steps, f"{where}: a step is lost: {steps_of(seen, run)}"
        assert seen[-1] == "problems []" or seen[-1].startswith("run "), f"{where}: {seen[-1]}"
    return {"kills": killed, "runs": number, **fetched(f"{FAR['url']}/count")[1]}


def at_the_same_instant(task: Callable[[int], object]) -> list[list[str]]:
    """Two processes that begin together; what each of them told."""
    waiting, starting = os.pipe()

    def together(out: int) -> None:
        os.close(starting)
        os.read(waiting, 1)  # until nobody holds the other end
        task(out)

    twins = [fork(together), fork(together)]
    os.close(starting)
    told = [end_of(*twin) for twin in twins]
    os.close(waiting)
    return told


def two_on_one_run(folder: Path, times: int, seed: int) -> dict[str, object]:
    """Two processes go on with one run at the same instant: a new one, or one whose process was killed."""
    chance = random.Random(seed)
    path = folder / "killick.db"
    killick.open(str(path)).close()
    ended = Counter[str]()
    for number in range(times):
        run = f"run_{number}"
        if number % 4 >= 2:
            live(go_on(path, number, run), chance.uniform(0.02, 0.1))
        told = at_the_same_instant(go_on(path, number, run))
        where = f"seed {seed}, {run}: {told}"
        assert all(len(lines) == 1 and lines[0].startswith(("done", "busy")) for lines in told), where
        done = [lines for lines in told if lines[0] != "busy"]
        assert done, where
        for lines in done:
            check_done(run, lines)
        ended["both" if len(done) == 2 else "one"] += 1
    seen = live(look_at(path, verified=True)).told
    assert seen[-1] == "problems []", seen[-1]
    return dict(ended)


def two_on_one_store(folder: Path, times: int, seed: int) -> dict[str, object]:
    """Two processes open a store that is not there yet at the same instant, and both use it."""
    for number in range(times):
        path, run = folder / f"killick_{number}.db", f"run_{seed}_{number}"

        def begin(out: int, path: Path = path, run: str = run) -> None:
            with killick.open(str(path)) as kd:
                kd.start(errand, run, id=f"{run}_{os.getpid()}")
                os.write(out, b"begun\n")

        told = at_the_same_instant(begin)
        assert told == [["begun"], ["begun"]], f"{path.name}: {told}"
        seen = live(look_at(path, verified=True)).told
        assert [line[:11] for line in seen] == [seen[0][:11], seen[1][:11], "problems []"], seen
    return {"stores": times}


@killick.tool
async def touch(n: int) -> int:
    """Something that nobody could look up afterwards."""
    return n


def after_computing(folder: Path, wanted: int, lives_max: int, micros: int, holding: int) -> dict[str, object]:
    """Die while the agent computes after a tool returned, until so many lives had the outcome on record by then. A busy
    machine gets ever more time: an outcome that waits for the agent's code would never be on record."""

    @killick.agent(name="computing")
    async def computing(run: killick.Run, lasts: int) -> None:
        for n in range(lasts + 1):
            await run.call(touch, n)
        until = time.perf_counter() + micros / 1_000_000
        while time.perf_counter() < until:
            if not holding:
                time.sleep(0.0002)
        os._exit(0)

    lives = kept = 0
    while kept < wanted and lives < lives_max:
        lives += 1
        path = folder / f"killick_{lives}.db"

        def begin(out: int, path: Path = path) -> None:
            with killick.open(str(path)) as kd:
                kd.run(computing, 5, id="run")

        def look(out: int, path: Path = path) -> None:
            with killick.open(str(path)) as kd:
                os.write(out, f"{kd.state('run').fold.steps[-1].status}\n".encode())

        assert live(begin).told == []
        [status] = live(look).told
        kept += status == "done"
        micros *= 1 if status == "done" else 2
    return {"lives": lives, "kept": kept}


def after_the_lease_ran_out(folder: Path) -> dict[str, object]:
    """Killed within a tool that had an hour, and gone on with when its lease is over: nobody holds its lock."""
    path, begun, there = folder / "killick.db", folder / "begun", folder / "there"

    @killick.tool(effect="idempotent", timeout=3600)
    def linger() -> bool:
        begun.touch()
        while not there.exists():
            time.sleep(0.01)
        return True

    @killick.agent(name="lingering")
    async def lingering(run: killick.Run) -> bool:
        return await run.call(linger)

    def begin(out: int, **options: float) -> None:
        with killick.open(str(path), **options) as kd:
            os.write(out, f"{kd.run(lingering, id='run')}\n".encode())

    child, reading = fork(partial(begin, lease_seconds=0.2))
    while not begun.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    end_of(child, reading)
    there.touch()
    time.sleep(0.3)
    return {"told": live(begin, kill_after=1_000).told}


if __name__ == "__main__":
    mode, folder, *rest = sys.argv[1:]
    known: dict[str, Callable[..., dict[str, object]]] = {
        "moments": at_random_moments,
        "runs": two_on_one_run,
        "stores": two_on_one_store,
        "computing": after_computing,
        "lease": after_the_lease_ran_out,
    }
    load_client()
    with far_side():
        sys.stdout.write(json.dumps(known[mode](Path(folder), *map(int, rest))))
