"""The processes of a soak: workers, the clerk who starts runs and answers them, and who strikes them down.

The conductor holds no store and no thread, so that every other process is forked from it at no cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

import killick
from killick.errors import AlreadyAnswered, AnswerRefused, KillickError
from killick.store.records import RunQuery
from killick.workers import code_versions, worker
from servers import Pair, Server
from soak import errands, farside
from soak.draws import Blow, blow, restarts
from warm import load_client

CONCURRENCY: Final = 12
LEASE_SECONDS: Final = 2.0
GRACE_SECONDS: Final = 0.5
AGAIN_SECONDS: Final = 0.25
DRAIN_SECONDS_MAX: Final = 20.0
AT_ONCE: Final = 100
"""Runs that are started together."""

OPEN: Final = ("queued", "running", "waiting", "code_mismatch", "paused")


class Setting(NamedTuple):
    """A soak: on which store, of how many runs and workers, how many blows and how often, how many restarts."""

    url: str
    folder: Path
    seed: int
    runs: int
    workers: int
    blows: int
    every_seconds: float
    restarts: int
    limit_seconds: float
    pooler_url: str | None = None
    """Where every other worker finds the store."""

    upgrades: bool = False
    """Whether the first workers have the old code, and each that takes the place of one has the new code."""


class Freeze(NamedTuple):
    """A worker that was stopped in its tracks, from when to when by the clock that all processes share."""

    pid: int
    since_ns: int
    until_ns: int


class Played(NamedTuple):
    """What was done to the workers, what they said, and what went wrong with them."""

    kills: int
    freezes: list[Freeze]
    restarts: int
    seconds: float
    told: list[dict[str, Any]]
    errors: str


def fork(task: Callable[[], object], errors: Path) -> int:
    """A process of its own for a task; what goes wrong there is written down."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        task()
        code = 0
    except BaseException as error:
        with errors.open("a") as file:
            file.write(f"{os.getpid()}: {''.join(traceback.format_exception(error))}\n")
    finally:
        os._exit(code)


# a worker -----------------------------------------------------------------------------------------


class _Lines(logging.Handler):
    """What a worker says, a line of JSON each, written at once: it may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, record: logging.LogRecord) -> None:
        told = dict(getattr(record, "killick", None) or {"what": "log", "text": record.getMessage()})
        if record.exc_info:
            told["trace"] = "".join(traceback.format_exception(*record.exc_info))
        told |= {"pid": os.getpid(), "at_ns": time.monotonic_ns()}
        os.write(self._fd, json.dumps(told, default=str).encode() + b"\n")


def work(setting: Setting, url: str, version: int) -> None:
    """Be a worker, with this version of the code, until somebody says to stop."""
    errands.CODE["version"] = version
    os.environ.update(KILLICK_BUILD=f"soak.{version}", SOAK_CODE=str(version))
    # Workers look for runs that diverged, and try them again, as often as a soak has time for.
    worker.TRIM_SECONDS, code_versions.AGAIN_US = 1.0, 1_000_000  # type: ignore[misc]
    logger = logging.getLogger("killick")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Lines(setting.folder / "told"))

    async def serve() -> None:
        async with killick.open_async(url, grace_seconds=GRACE_SECONDS) as kd:
            serving = kd.worker(concurrency=CONCURRENCY, lease_seconds=LEASE_SECONDS)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.drain)
            await serving.serve()

    asyncio.run(serve())


# the clerk ----------------------------------------------------------------------------------------


class Clerk:
    """Starts the runs, sends them what they wait for, and answers what they ask; says when all are over."""

    def __init__(self, kd: killick.Client, setting: Setting) -> None:
        self._kd = kd
        self._setting = setting
        self._answered: set[str] = set()
        self._since_us = 0

    async def start_all(self) -> None:
        """Every other run gets its message before it asks for it."""
        for first in range(0, self._setting.runs, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, self._setting.runs))
            await asyncio.gather(*(self._start(number) for number in numbers))

    async def _start(self, number: int) -> None:
        run = name_of(number)
        await self._surely(lambda: self._kd.as_async().start(errands.errand, number, id=run))
        for label in ("pause", "hear"):
            if number % 2 and errands.wait_of(number, label) == "message":
                await self._surely(lambda label=label: self._send(run, label))

    async def _send(self, run: str, label: str) -> None:
        await self._kd.as_async().send(run, label, f"{run}/{label}", id=f"{run}/{label}")

    async def _surely(self, do: Callable[[], Any]) -> None:
        """Again and again, because the server under the store may be away."""
        while True:
            try:
                await do()
                return
            except (AlreadyAnswered, AnswerRefused):
                return
            except KillickError:
                await asyncio.sleep(0.1)

    async def attend(self) -> None:
        """Until every run is over: look who waits, and give them what they wait for."""
        starting = asyncio.get_running_loop().create_task(self.start_all())
        while True:
            with contextlib.suppress(KillickError):
                await self._look()
                if starting.done() and not await asyncio.to_thread(
                    self._kd.runtime.store.runs, RunQuery(status=OPEN), limit=1
                ):
                    return await starting
            await asyncio.sleep(0.05)

    async def _look(self) -> None:
        waiting = await self._kd.as_async().list(status="waiting", since_us=self._since_us, limit=10_000)
        for row in waiting:
            for wait in (await self._kd.as_async().info(row.id)).waits:
                if wait.id not in self._answered and await self._reply(row.id, wait):
                    self._answered.add(wait.id)
        # Clocks of processes agree, commits come a little later.
        self._since_us = max((row.changed_at_us for row in waiting), default=self._since_us + 5_000_000) - 5_000_000

    async def _reply(self, run: str, wait: Any) -> bool:
        if wait.waits_for == "event":
            await self._surely(lambda: self._send(run, wait.name))
        elif wait.waits_for == "answer":
            await self._surely(lambda: self._kd.as_async().answer(wait.id, "approve", by="clerk"))
        return True


def attend(setting: Setting, done: int) -> None:
    """Be the clerk; a byte says that all is over."""

    async def serve() -> None:
        logging.getLogger("killick").setLevel(logging.CRITICAL)
        async with killick.open_async(setting.url) as kd:
            await Clerk(kd, setting).attend()

    asyncio.run(serve())
    os.write(done, b".")


def name_of(number: int) -> str:
    return f"errand_{number}"


# the conductor ------------------------------------------------------------------------------------


class Conductor:
    """Keeps so many workers at work, and strikes one of them every second."""

    def __init__(self, setting: Setting, server: Server | Pair | None) -> None:
        self._setting = setting
        self._server = server
        self._urls = cycle((setting.url, setting.pooler_url or setting.url))
        self._errors = setting.folder / "errors"
        self._slots = [self._worker(1) for _ in range(setting.workers)]
        self._old = set(self._slots) if setting.upgrades else set[int]()
        self._frozen: list[tuple[int, int, int]] = []
        self._leaving: dict[int, float] = {}
        self.kills = self.restarted = 0
        self.freezes: list[Freeze] = []

    def _worker(self, version: int | None = None) -> int:
        url, version = next(self._urls), version or 1 + self._setting.upgrades
        return fork(lambda: work(self._setting, url, version), self._errors)

    def play(self, over: int) -> float:
        """Until the clerk says that all is over, and every restart was made, or the time is up. Returns how long."""
        setting, began = self._setting, time.monotonic()
        when = restarts(setting.seed, setting.restarts, first=2.3, apart=6.0)
        number, struck = 0, self._blow(0)
        while (passed := time.monotonic() - began) < setting.limit_seconds:
            if select.select([over], [], [], 0.02)[0] and not when:
                break
            if passed >= struck.at_seconds and number < setting.blows:
                self._strike(struck.slot, struck.frozen_seconds)
                number += 1
                struck = self._blow(number)
            if when and passed >= when[0] and self._server is not None:
                when.pop(0)
                self._server.restart(immediate=True)
                self.restarted += 1
            if number == setting.blows:
                self._upgrade()
            self._thaw()
            self._look_after()
        return time.monotonic() - began

    def _blow(self, number: int) -> Blow:
        setting = self._setting
        return blow(
            setting.seed, number, workers=setting.workers, every_seconds=setting.every_seconds,
            lease_seconds=LEASE_SECONDS,
        )  # fmt: skip

    def _strike(self, slot: int, frozen_seconds: float | None) -> None:
        pid = self._slots[slot]
        if frozen_seconds is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.kills += 1
        else:
            os.kill(pid, signal.SIGSTOP)
            now = time.monotonic_ns()
            self._frozen.append((pid, now, now + round(frozen_seconds * 1e9)))
        self._slots[slot] = self._worker()

    def _upgrade(self) -> None:
        """Who still has the old code when the blows are over drains, one after the other, and is replaced."""
        for slot, pid in enumerate(self._slots):
            if pid in self._old and not self._leaving:
                self._leaving[pid] = time.monotonic()
                self._slots[slot] = self._worker()

    def _thaw(self, *, all_of_them: bool = False) -> None:
        """Who was frozen comes back, works on for a second beside its replacement, and is told to go."""
        now = time.monotonic_ns()
        for pid, since, until in list(self._frozen):
            if now >= until or all_of_them:
                os.kill(pid, signal.SIGCONT)
                self._frozen.remove((pid, since, until))
                self.freezes.append(Freeze(pid, since, time.monotonic_ns()))
                self._leaving[pid] = time.monotonic() + 1.0

    def _look_after(self) -> None:
        for slot, pid in enumerate(self._slots):
            if os.waitpid(pid, os.WNOHANG)[0]:
                self._complain(f"worker {pid} ended by itself")
                self._slots[slot] = self._worker()
        for pid, at in list(self._leaving.items()):
            if time.monotonic() >= at:
                # Again and again: one that is only just beginning does not hear it.
                os.kill(pid, signal.SIGTERM)
                self._leaving[pid] = time.monotonic() + AGAIN_SECONDS
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._leaving[pid]
                # One that has said that it stopped hears no more of us, and our next word only ends it sooner.
                if status not in (0, signal.SIGTERM):
                    self._complain(f"worker {pid}, once frozen, ended with {status}")

    def _complain(self, what: str) -> None:
        with self._errors.open("a") as file:
            file.write(f"{what}\n")

    def close(self) -> None:
        """Everybody thaws and drains; who does not within a while is killed, and complained of."""
        self._thaw(all_of_them=True)
        everybody = {*self._slots, *self._leaving}
        end = time.monotonic() + DRAIN_SECONDS_MAX
        while everybody and time.monotonic() < end:
            for pid in everybody:
                os.kill(pid, signal.SIGTERM)
            time.sleep(AGAIN_SECONDS)
            everybody -= {pid for pid in everybody if os.waitpid(pid, os.WNOHANG)[0]}
        for pid in everybody:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._complain(f"worker {pid} did not drain")


def _make(setting: Setting) -> None:
    with killick.open(setting.url) as kd:
        errands.make_entries(kd)


def play(setting: Setting, server: Server | Pair | None) -> Played:
    """All of it, and afterwards only the far side is left."""
    load_client(setting.url)
    os.waitpid(fork(lambda: _make(setting), setting.folder / "errors"), 0)
    reading, writing = os.pipe()
    clerk = fork(lambda: attend(setting, writing), setting.folder / "errors")
    conductor = Conductor(setting, server)
    try:
        seconds = conductor.play(reading)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(clerk, signal.SIGKILL)
        os.waitpid(clerk, 0)
        conductor.close()
        os.close(reading)
        os.close(writing)
    told = [json.loads(line) for line in (setting.folder / "told").read_text().splitlines()]
    errors = setting.folder / "errors"
    went_wrong = errors.read_text() if errors.exists() else ""
    return Played(conductor.kills, conductor.freezes, conductor.restarted, seconds, told, went_wrong)


@contextlib.contextmanager
def far_side(folder: Path, seed: int) -> Any:
    """The far side, for as long as the block lasts."""
    path = folder / "far"
    errands.FAR["path"] = str(path)
    errands.SEED["seed"] = seed
    os.environ.update(SOAK_FAR=str(path), SOAK_SEED=str(seed))
    reading, writing = os.pipe()
    child = fork(lambda: farside.serve(path, seed, writing), folder / "errors")
    assert os.read(reading, 1) == b".", "the far side did not begin"
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
