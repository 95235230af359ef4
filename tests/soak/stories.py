"""`python -m soak.stories`: random stories over the whole public surface, judged by the books of the far side.

A story: workers whose store fails now and then, people who start, send, answer, cancel, rewind, fork, undo, pause and
close at random, and blows: kill -9 and freezes. Then it is calm, every question is answered truthfully, and every run
has to end. The far side keeps its own books, in its own file, which knows nothing of Killick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import killick
from killick.encryption.store import decrypting
from killick.errors import KillickError, StoreBusy, StoreFull, StoreUnavailable
from killick.model import crash_loop
from killick.store import open_store
from killick.store.protocol import Store
from killick.store.records import ENDED
from servers import server
from soak.conducting import fork
from soak.draws import draw
from warm import load_client

LEASE_SECONDS: Final = 1.0
CALM_SECONDS_MAX: Final = 60.0
PEOPLE: Final = 2
WORKERS: Final = 2
PLANS: Final = 6
OPS: Final = (
    "keyed", "once", "keyed_thread", "once_thread", "twice", "twice_once", "gather", "child", "wait", "ask", "sleep",
    "odd", "hears",
)  # fmt: skip
MORE_OPS: Final = (*OPS, "late", "once_late", "limited", "model", "propose", "booked")
MORE_FROM: Final = 10_000
"""The seed of the first story with more ops: those before found bugs, and stay as they are."""

RENEW_FROM: Final = 20_000
"""The seed of the first story in which runs renew, up to so many times:"""
RENEWALS_MAX: Final = 2

# A run that crashed its process is tried alone, in a process that imports this anew.
FOLDER: Final = {"path": Path(os.environ.get("STORY_FOLDER", ""))}
SEED: Final = {"seed": int(os.environ.get("STORY_SEED", 0))}
STORE: Final = {"store": "sqlite"}
LOCAL: Final = ("sqlite", "encrypted")
KEY: Final = bytes(range(32))
MANY: Final = killick.Retry(attempts=100, first=0.02, max=0.1)


# the far side -------------------------------------------------------------------------------------


@contextlib.contextmanager
def books() -> Generator[sqlite3.Connection, None, None]:
    """The far side's own file. One transaction a request."""
    db = sqlite3.connect(FOLDER["path"] / "books.db", isolation_level=None, timeout=60)
    try:
        db.execute("CREATE TABLE IF NOT EXISTS done (receipt INTEGER PRIMARY KEY, key TEXT, what TEXT, pid INTEGER)")
        db.execute("CREATE TABLE IF NOT EXISTS void (key TEXT, at INTEGER)")
        db.execute("CREATE TABLE IF NOT EXISTS undone (key TEXT)")
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")
    finally:
        db.close()


def perform(what: str, key: str, dated: int, *, honours: bool) -> int:
    """Do it. With `honours` the same key gets the first receipt; without, it is done again, and the books tell."""
    with books() as db:
        there = db.execute("SELECT receipt FROM done WHERE key = ?", (key,)).fetchone()
        if honours and there:
            return int(there[0])
        if not honours and db.execute("SELECT 1 FROM void WHERE key = ? AND at > ?", (key, dated)).fetchone():
            raise killick.NotDone("void: somebody was told that it did not happen")
        made = db.execute("INSERT INTO done (key, what, pid) VALUES (?, ?, ?)", (key, what, os.getpid()))
        return int(made.lastrowid or 0)


def receipt_of(key: str) -> int | None:
    """What became of a key. One that was not done never will be by a request that began before."""
    with books() as db:
        there = db.execute("SELECT receipt FROM done WHERE key = ?", (key,)).fetchone()
        if there is None:
            db.execute("INSERT INTO void VALUES (?, ?)", (key, time.monotonic_ns()))
        return None if there is None else int(there[0])


def settle(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    found = receipt_of(effect.key)
    return killick.DidNotHappen() if found is None else killick.Happened(found)


def take_back(effect: killick.Effect) -> None:
    with books() as db:
        db.execute("INSERT INTO undone VALUES (?)", (effect.key,))


def _dawdle(step: killick.ToolStep, when: str) -> float:
    drawn = draw(SEED["seed"], step.key, step.attempt, when)
    return 0.6 * drawn**4


# tools --------------------------------------------------------------------------------------------


async def _act(what: str, step: killick.ToolStep, *, honours: bool) -> int:
    dated = time.monotonic_ns()
    await asyncio.sleep(_dawdle(step, "before"))
    receipt = perform(what, step.key, dated, honours=honours)
    await asyncio.sleep(_dawdle(step, "after"))
    if draw(SEED["seed"], step.key, step.attempt, "breaks") < 0.1:
        raise ConnectionResetError("the far side hung up, \ud83d")
    return receipt


def _act_blocking(what: str, step: killick.ToolStep, *, honours: bool) -> int:
    dated = time.monotonic_ns()
    time.sleep(_dawdle(step, "before"))
    receipt = perform(what, step.key, dated, honours=honours)
    time.sleep(_dawdle(step, "after"))
    if draw(SEED["seed"], step.key, step.attempt, "breaks") < 0.1:
        raise ConnectionResetError("the far side hung up, \ud83d")
    return receipt


@killick.tool(name="story_keyed", effect="idempotent", retry=MANY, compensate=take_back)
async def keyed(what: str, step: killick.ToolStep = killick.STEP) -> int:
    return await _act(what, step, honours=True)


@killick.tool(name="story_once", reconcile=settle, retry=killick.Retry(attempts=100), compensate=take_back)
async def once(what: str, step: killick.ToolStep = killick.STEP) -> int:
    return await _act(what, step, honours=False)


@killick.tool(name="story_keyed_thread", effect="idempotent", retry=MANY, compensate=take_back)
def keyed_thread(what: str, step: killick.ToolStep = killick.STEP) -> int:
    return _act_blocking(what, step, honours=True)


@killick.tool(name="story_once_thread", reconcile=settle, retry=killick.Retry(attempts=100), compensate=take_back)
def once_thread(what: str, step: killick.ToolStep = killick.STEP) -> int:
    return _act_blocking(what, step, honours=False)


@killick.tool(name="story_asked", compensate=take_back)
def asked(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """Only a person can say what became of it."""
    return _act_blocking(what, step, honours=False)


@killick.tool(name="story_late", effect="idempotent", timeout=0.15, retry=MANY, compensate=take_back)
def late(what: str, step: killick.ToolStep = killick.STEP) -> int:
    """Its thread may outlive its attempt."""
    return _act_blocking(what, step, honours=True)


@killick.tool(name="story_once_late", reconcile=settle, timeout=0.15, retry=MANY, compensate=take_back)
async def once_late(what: str, step: killick.ToolStep = killick.STEP) -> int:
    return await _act(what, step, honours=False)


@killick.tool(name="story_limited", effect="idempotent", retry=MANY, compensate=take_back)
async def limited(what: str, step: killick.ToolStep = killick.STEP) -> int:
    if draw(SEED["seed"], step.key, step.attempt, "limited") < 0.5:
        raise killick.errors.RateLimited("429", retry_after=0.1)
    return await _act(what, step, honours=True)


@killick.tool(name="story_booked", effect="transaction", retry=MANY)
def booked(what: str, tx: killick.Tx = killick.TX, step: killick.ToolStep = killick.STEP) -> None:
    """Its books are in the store's own file."""
    tx.execute("CREATE TABLE IF NOT EXISTS story_booked (key TEXT)")
    tx.execute("INSERT INTO story_booked VALUES (?)", (step.key,))
    time.sleep(_dawdle(step, "before") / 10)
    if draw(SEED["seed"], step.key, step.attempt, "breaks") < 0.1:
        raise ConnectionResetError("the line broke")


@killick.tool(name="story_writes", effect="workspace", retry=MANY)
def writes(what: str, folder: Path = killick.WORKSPACE, step: killick.ToolStep = killick.STEP) -> None:
    with (folder / "lines").open("a") as file:
        file.write(f"{step.id} {what}\n")
        file.flush()
        time.sleep(_dawdle(step, "before") / 4)
        file.write(f"{step.id}.\n")
    if draw(SEED["seed"], step.key, step.attempt, "breaks") < 0.1:
        raise ConnectionResetError("the disk hung up")


async def think(what: str) -> str:
    await asyncio.sleep(0.05 * draw(SEED["seed"], what, "think"))
    return f"about {what} \N{PARTY POPPER}"


@killick.tool(name="story_odd", effect="reads")
def odd(what: str) -> str:
    raise ValueError(f"{what}: \udce4\ud83d")


TOOLS: Final = {
    "keyed": keyed, "once": once, "keyed_thread": keyed_thread, "once_thread": once_thread, "asked": asked,
    "late": late, "once_late": once_late, "limited": limited,
}  # fmt: skip


# agents -------------------------------------------------------------------------------------------


def plan(number: int, depth: int) -> list[tuple[str, str]]:
    """The steps of an agent, and what each is about; equal actions are frequent."""
    place = (SEED["seed"], "plan", number, depth)
    known = OPS if SEED["seed"] < MORE_FROM else MORE_OPS
    ops = [*known, "asked"] if depth == 0 else [op for op in known if op != "child"]
    count = 2 + int(5 * draw(*place, "count"))
    return [
        (ops[int(len(ops) * draw(*place, at, "op"))], f"{number}/{depth}/{int(2 * draw(*place, at, 'what'))}")
        for at in range(count)
    ]


@killick.agent(name="story", on_failure="compensate")
async def story(run: killick.Run, told: list[int]) -> list[int]:
    receipts = await follow(run, told)
    number, depth, *logs = told
    past = logs[0] if logs else 0
    if SEED["seed"] >= RENEW_FROM and depth == 0 and past < RENEWALS_MAX and draw(SEED["seed"], "renew", number) < 0.5:
        return await run.renew([number, depth, past + 1])
    return receipts


AGENTS: Final = {"story": story}
"""The agents by name. In stories with files one of them has a folder for each of its runs."""


def has_files(seed: int) -> bool:
    """Whether runs have files, and nobody is frozen: the tool of a frozen process writes on when that goes on."""
    return seed >= MORE_FROM and seed % 2 == 1 and STORE["store"] in LOCAL


async def follow_with_files(run: killick.Run, told: list[int]) -> list[int]:
    return await follow(run, told, files=True)


async def follow(run: killick.Run, told: list[int], *, files: bool = False) -> list[int]:
    """Follow a plan; return the receipts."""
    number, depth, *_ = told
    receipts: list[int] = []
    for op, what in plan(number, depth):
        if files:
            await run.call(writes, what)
        if op in TOOLS:
            receipts.append(await run.call(TOOLS[op], what))
        elif op in ("twice", "twice_once"):
            tool = keyed if op == "twice" else once_thread
            receipts += [await run.call(tool, what), await run.call(tool, what)]
        elif op == "gather":
            calls = (run.call(keyed, what), run.call(once_thread, what), run.call(keyed, what))
            receipts += await run.gather(*calls)
        elif op == "child":
            receipts += await (await run.spawn(story, [number, depth + 1])).result()
        elif op == "propose":
            if (made := await run.propose(once, what)).result is not None:
                receipts.append(made.result)
        elif op == "model":
            await run.model(think, what)
        elif op == "booked":
            if STORE["store"] in LOCAL:  # the transactions of other stores are another database's
                await run.call(booked, what)
        elif op == "wait":
            await run.wait(what)
        elif op == "ask":
            await run.ask(f"May {what} go on? \N{PARTY POPPER}")
        elif op == "sleep":
            await run.sleep(0.3 * draw(what))
        elif op == "hears":
            await run.remarks()
        else:
            with contextlib.suppress(killick.StepFailed):
                await run.call(odd, what)
    return receipts


# a store that fails now and then ------------------------------------------------------------------


class Failing:
    """A store whose operations fail in bursts, before or after they are done."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self._store, self._chance = store, chance
        self.share, self._burst = 0.0, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._risked(found) if callable(found) and name not in ("close", "now_us", "watch") else found

    def _risked(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def risked(*args: Any, **options: Any) -> Any:
            if self._burst == 0 and self._chance.random() < self.share:
                self._burst = self._chance.choice((1, 1, 1, 3, 10))
            fails = self._burst > 0
            self._burst -= fails
            place = self._store.place
            errors = (StoreFull(place), StoreUnavailable(place, "disk I/O error"), StoreBusy(place, 1.0))
            if fails and self._chance.random() < 0.5:
                raise self._chance.choice(errors)
            result = operation(*args, **options)
            if fails:
                raise self._chance.choice(errors)
            return result

        return risked


def _client(share: float, seed: int) -> killick.Client:
    """A client of the story's store, which begins to fail once it is open."""
    kind = STORE["store"]
    if kind in LOCAL:
        options: dict[str, Any] = {"durability": "process"}
        url, lease = f"sqlite:///{FOLDER['path']}/killick.db", {}
    else:
        options, url = {}, f"{kind}{'&' if '?' in kind else '?'}namespace=story_{SEED['seed']}"
        lease = {"lease_seconds": LEASE_SECONDS}
    store: Any = Failing(open_store(url, **options), random.Random(seed))
    kd = killick.Client(decrypting(store, KEY) if kind == "encrypted" else store, grace_seconds=0.3, **lease)
    store.share = share
    return kd


# who takes part -----------------------------------------------------------------------------------


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with (FOLDER["path"] / "log").open("a", errors="backslashreplace") as file:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            file.write(f"{os.getpid()} {time.monotonic():.3f} {record.getMessage()} {trace}\n")


def _begin() -> None:
    os.environ.update(STORY_FOLDER=str(FOLDER["path"]), STORY_SEED=str(SEED["seed"]))
    crash_loop.BACKOFF_SECONDS = (0.05, 0.3)  # type: ignore[misc]
    logger = logging.getLogger("killick")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Lines())


def work(share: float, seed: int) -> None:
    """Be a worker until told to drain."""
    _begin()

    async def serve() -> None:
        kd = _client(share, seed)
        worker = kd.worker(concurrency=6, lease_seconds=LEASE_SECONDS)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
        await worker.serve()
        await kd.as_async().close()

    asyncio.run(serve())


def meddle(seed: int) -> None:
    """Be a person who does anything that the surface offers, again and again, with clients of their own."""
    _begin()
    chance = random.Random(seed)
    while True:
        kd = _client(0.01, chance.randrange(10**9))
        try:
            for _ in range(chance.randrange(1, 12)):
                with contextlib.suppress(KillickError):
                    _meddled(kd, chance)
                time.sleep(0.1 * chance.random())
        finally:
            kd.close()


def _meddled(kd: killick.Client, chance: random.Random) -> None:
    runs = [row.id for row in kd.list(limit=200) if row.agent in AGENTS]
    if len(runs) < 3 or (len(runs) < 14 and chance.random() < 0.15):
        number, agent = chance.randrange(PLANS), chance.choice([*AGENTS.values()])
        kd.start(agent, [number, 0], id=f"s{number}_{chance.randrange(10**6)}")
        return
    run = chance.choice(runs)
    info = kd.info(run)
    steps = [step.id for step in kd.state(run).fold.steps if "." not in step.id] or ["1"]
    step = chance.choice(steps)
    act = chance.random()
    if act < 0.30:
        for wait in info.waits:
            reply(kd, wait, stop=chance.random() < 0.05)
    elif act < 0.40:
        kd.send(run, f"{info.id[1:2]}/0/{chance.randrange(2)}", "word", id=f"m{chance.randrange(10**9)}")
    elif act < 0.45:
        kd.say(run, "half of \N{PARTY POPPER}")
    elif act < 0.50:
        kd.cancel(run, compensate=chance.random() < 0.5, by="ann")
    elif act < 0.60:
        kd.rewind(run, f"{step}:{chance.choice(('before', 'after'))}", by="ann")
    elif act < 0.70 and len(runs) < 20:
        at = chance.choice(("now", f"{step}:before", f"{step}:after"))
        kd.fork(run, at, effects=chance.choice(("live", "recorded")), by="ann")
    elif act < 0.76:
        kd.undo(run, step, by="ann")
    elif act < 0.82:
        kd.pause(run)
    elif act < 0.90:
        kd.resume(run)
    elif act < 0.95:
        kd.advance(run)
    elif SEED["seed"] < MORE_FROM or chance.random() < 0.3:
        kd.edit.retry(run, step)
    elif chance.random() < 0.3:
        kd.edit.skip(run, step, by="ann")
    else:
        kd.edit.note(run, {"seen": "by ann \ud83d"}, by="ann")
        kd.edit.prioritize(run, chance.randrange(9), by="ann")
        kd.edit.set(run, mood=chance.choice(("calm", "hurry")), by="ann")


def reply(kd: killick.Client, wait: Any, *, stop: bool = False) -> None:
    """Answer a wait truthfully: a settlement by the books."""
    if wait.waits_for == "event":
        kd.send(wait.run, wait.name, "word")
    elif wait.waits_for == "settlement":
        found = None if (key := _key_of(kd, wait)) is None else receipt_of(key)
        if found is None and stop:
            kd.answer(wait.id, "stop", by="bob")
        elif found is None:
            kd.answer(wait.id, "not", by="bob")
        else:
            kd.answer(wait.id, "happened", value=found, by="bob")
    elif wait.waits_for == "answer":
        mood = draw(SEED["seed"], wait.id)
        if "edit" in wait.verbs and mood < 0.4:
            kd.answer(wait.id, "edit", value={"what": "9/9/9"}, by="bob")
        else:
            kd.answer(wait.id, "reject" if "edit" in wait.verbs and mood < 0.6 else "approve", by="bob")


def _key_of(kd: killick.Client, wait: Any) -> str | None:
    return key if (key := getattr(wait, "key", None)) else _ledger(kd, wait.run).facts.keys.get(wait.step)


def _ledger(kd: killick.Client, run: str) -> Any:
    return kd.runtime.log.folds(run, kd.runtime.log.head(run).seq)[1]


# a story ------------------------------------------------------------------------------------------


class Stage:
    """The processes of a story, and the blows that they get."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.kills = self.freezes = 0
        self._errors = FOLDER["path"] / "errors"
        self._share = self.chance.choice((0.0, 0.002, 0.01))
        self.makers = [self._worker] * WORKERS + [self._person] * PEOPLE
        self.slots = [make() for make in self.makers]
        self.frozen: list[tuple[int, float]] = []

    def _worker(self) -> int:
        seed = self.chance.randrange(10**9)
        return fork(lambda: work(self._share, seed), self._errors)

    def _person(self) -> int:
        seed = self.chance.randrange(10**9)
        return fork(lambda: meddle(seed), self._errors)

    def play(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.1 + 0.5 * self.chance.random())
            slot = self.chance.randrange(len(self.slots))
            pid = self.slots[slot]
            blow = self.chance.random()
            if blow < 0.5:
                self.end(pid)
                self.kills += 1
            elif blow < 0.8 and not has_files(SEED["seed"]):
                os.kill(pid, signal.SIGSTOP)
                self.frozen.append((pid, time.monotonic() + 3 * self.chance.random()))
                self.freezes += 1
            else:
                continue
            self.slots[slot] = self.makers[slot]()
            for one, until in [*self.frozen]:
                if time.monotonic() > until:
                    os.kill(one, signal.SIGCONT)
                    self.frozen.remove((one, until))
                    # It works on beside its replacement until the next blow to that slot, or the end.
                    self.slots.append(one)
                    self.makers.append(self.makers[0])
            self._look_after()

    def _look_after(self) -> None:
        """Replace those that ended by themselves; `fork` has noted why."""
        for slot, pid in enumerate(self.slots):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self.slots[slot] = self.makers[slot]()

    def end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def close(self) -> None:
        for pid in {*self.slots, *(one for one, _ in self.frozen)}:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                self.end(pid)


def calm() -> None:
    """One worker that nothing happens to; every wait gets its answer, until every run has ended."""
    worker = fork(lambda: work(0.0, 1), FOLDER["path"] / "errors")
    try:
        with _client(0.0, 1) as kd:
            last, since = "", time.monotonic()
            while rows := [row for row in kd.list(limit=1_000) if row.status not in ENDED]:
                for row in rows:
                    _calmed(kd, row)
                now = repr([(row.id, row.status, kd.runtime.log.head(row.id).seq) for row in rows])
                if now != last:
                    last, since = now, time.monotonic()
                if time.monotonic() - since > CALM_SECONDS_MAX:
                    waits = [str(wait) for row in rows for wait in kd.info(row.id).waits]
                    told = [(row.id, row.status, repr(kd.runtime.log.head(row.id))) for row in rows]
                    raise AssertionError(f"nothing moves any more: {told}, waits {waits}")
                time.sleep(0.1)
    finally:
        end = time.monotonic() + 300
        while not os.waitpid(worker, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(worker, signal.SIGKILL)
                os.waitpid(worker, 0)
                raise AssertionError("the worker did not drain")
            os.kill(worker, signal.SIGTERM)  # again: until it serves, it ignores them
            time.sleep(0.05)


def _calmed(kd: killick.Client, row: Any) -> None:
    with contextlib.suppress(KillickError):
        crashes = kd.state(row.id).fold.facts.crashes
        if row.status == "paused" or (crashes is not None and crashes.quarantined):
            kd.resume(row.id)
    for wait in kd.info(row.id).waits:
        with contextlib.suppress(KillickError):  # one that was answered stays open until its branch comes to it
            reply(kd, wait)


# the verdict --------------------------------------------------------------------------------------


def judged(counts: Counter[str]) -> Iterator[str]:
    with books() as db:
        done = db.execute("SELECT receipt, key, what FROM done").fetchall()
        undone = Counter(key for (key,) in db.execute("SELECT key FROM undone"))
    done += [(0, key, "") for key in _booked()]
    counts["effects"] += len(done)
    by_key = Counter(key for _, key, _ in done)
    yield from (f"{key}: done {count} times" for key, count in by_key.items() if count > 1)
    what_of = {receipt: what for receipt, _, what in done}
    said = defaultdict[str, set[str]](set)
    with _client(0.0, 1) as kd:
        for row in kd.list(limit=1_000):
            counts["runs"] += 1
            counts[row.status] += 1
            state = kd.state(row.id)
            for effect in _ledger(kd, row.id).effects:
                said[effect.key].add(effect.status)
            if row.agent not in AGENTS:
                continue
            if row.status == "completed":
                yield from _lines(row.id, state.fold, _ledger(kd, row.id))
                ended = state.data(state.fold.facts.ended)
                if "result" in ended:  # one that was renewed has none
                    yield from _receipts(row.id, ended["result"], what_of)
            elif row.status == "failed":
                failure = state.data(state.fold.facts.ended)["failure"]
                counts[f"failed: {json.dumps(failure)[:120]}"] += 1
        yield from map(str, kd.store.verify().problems)
    for key in by_key:
        if not said[key] - {"did_not_happen"}:
            yield f"{key}: done, and the record says {said[key] or 'nothing'}"
    for key, statuses in said.items():
        tool = key.partition(":step_")[2].partition(":")[2].rpartition(":")[0]
        if "undo" in key or not tool.startswith("story_") or tool == writes.name:
            continue
        if "happened" in statuses and key not in by_key:
            yield f"{key}: on record as done, and the books have nothing"
        if "undone" in statuses and not undone[key]:
            yield f"{key}: on record as undone, and the books have nothing"


def _booked() -> list[str]:
    """The keys of what tools wrote into the store's own file."""
    if STORE["store"] not in LOCAL:
        return []
    with contextlib.closing(sqlite3.connect(FOLDER["path"] / "killick.db")) as db:
        try:
            return [key for (key,) in db.execute("SELECT key FROM story_booked")]
        except sqlite3.OperationalError:
            return []


def _lines(run: str, fold: Any, ledger: Any) -> Iterator[str]:
    """The files of a run are as its steps left them: those that were rewound, undone or cut short left nothing.

    An undo whose process died leaves its step in doubt: the run has ended, so only a person can repeat it.
    """
    if (folder := ledger.facts.workspace) is not None:
        begun = {each.undoes for each in ledger.effects if each.undoes and each.status in ("open", "in_doubt")}
        doubted = {each.step for each in ledger.effects if each.started in begun}
        steps = [step for step in fold.steps if step.name == writes.name and step.sort == "tool"]
        kept = [step.id for step in steps if step.status == "done" and not step.undone and step.id not in doubted]
        file = Path(folder) / "lines"
        found = [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []
        found = [line for line in found if line.rstrip(".") not in doubted]
        if found != [each for step in kept for each in (step, f"{step}.")]:
            yield f"{run}: steps {kept} wrote {found} in {folder}"


def _receipts(run: str, receipts: list[int], what_of: dict[int, str]) -> Iterator[str]:
    for receipt, count in Counter(receipts).items():
        if count > 1:
            yield f"{run}: has receipt {receipt} ({what_of.get(receipt)}) {count} times: two payments became one"
        if receipt not in what_of:
            yield f"{run}: has receipt {receipt}, which the books do not"


def tell(seed: int, seconds: float, folder: Path) -> tuple[list[str], Counter[str]]:
    """One story, and what is wrong after it."""
    FOLDER["path"], SEED["seed"] = folder, seed
    counts: Counter[str] = Counter()
    pid = fork(lambda: _told(seed, seconds, folder), folder / "errors")
    os.waitpid(pid, 0)
    wrong: list[str] = []
    if (folder / "verdict").exists():
        found = json.loads((folder / "verdict").read_text())
        wrong, counts = found["wrong"], Counter(found["counts"])
    if (folder / "errors").exists():
        wrong.append((folder / "errors").read_text(errors="backslashreplace")[-6_000:])
    return wrong, counts


def _told(seed: int, seconds: float, folder: Path) -> None:
    counts: Counter[str] = Counter(stories=1)
    with books():
        pass
    if has_files(seed):
        with_files = killick.agent(name="story_files", on_failure="compensate", workspace=f"{folder}/work/{{run}}")
        AGENTS["story_files"] = with_files(follow_with_files)
    stage = Stage(seed)
    try:
        stage.play(seconds)
    finally:
        stage.close()
    counts["kills"], counts["freezes"] = stage.kills, stage.freezes
    os.waitpid(fork(calm, folder / "errors"), 0)
    wrong = [*judged(counts)]
    (folder / "verdict").write_text(json.dumps({"wrong": wrong, "counts": counts}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.stories", description=__doc__)
    parser.add_argument("--store", default="sqlite", help="sqlite, encrypted, postgres, or the URL of a server")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9), help="of the first story")
    parser.add_argument("--stories", type=int, default=1_000_000)
    parser.add_argument("--story-seconds", type=float, default=6.0)
    parser.add_argument("--limit-seconds", type=float, default=600.0, help="after which no further story begins")
    given = parser.parse_args()
    load_client()
    STORE["store"] = server().url if given.store == "postgres" else given.store
    began, total, failed = time.monotonic(), Counter[str](), 0
    for seed in range(given.seed, given.seed + given.stories):
        if time.monotonic() - began > given.limit_seconds:
            break
        folder = Path(tempfile.mkdtemp(prefix=f"story-{seed}-"))
        wrong, counts = tell(seed, given.story_seconds, folder)
        total += counts
        sys.stderr.write(f"{seed} {dict(total)}\n")  # what was counted so far, whenever this is ended
        if wrong:
            failed += 1
            sys.stdout.writelines(f"WRONG, seed {seed}, {folder}: {each}\n" for each in wrong[:20])
            sys.stdout.flush()
        else:
            shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"{round(time.monotonic() - began)} s from seed {given.seed}: {dict(total)}, {failed} wrong\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
