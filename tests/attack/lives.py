"""Processes over one store that come, are killed and come again; and what a run was doing when one let it go.

They are forked from a process that holds no store and no thread, so that hundreds of lives take seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import killick
from attack import bank, payer
from warm import load_client

Task = Callable[[killick.Client], Any]
"""What a process does with a store; what it returns is told."""

HANG_SECONDS: Final = 300.0
"""How long a process may take; most take some hundredths of a second."""

Process = tuple[int, int]
"""Its number, and the end of a pipe that it writes to."""


class Told(NamedTuple):
    """How a run stood when a process let it go."""

    status: str
    result: Any = None
    error: str = ""
    message: str = ""
    waits: tuple[str, ...] = ()
    """What it waits for, and the question: `answer: …`, `settlement: …`."""


class Killed(NamedTuple):
    """A process was killed, for real."""


def go_on(kd: killick.Client, run: str, *, patience_seconds: float = 5.0) -> Told:
    """Advance a run as far as it gets without anybody else. What it waits for is waited for, but not for ever."""
    until = time.time() + patience_seconds
    try:
        while (wake_at := kd.advance(run).wake_at_us) is not None and wake_at / 1_000_000 < until:
            time.sleep(max(0.0, wake_at / 1_000_000 - time.time()))
    except killick.errors.RunBusy:
        return Told("busy")
    return look(kd, run)


def begin(kd: killick.Client, agent: str, order: dict[str, Any], run: str) -> Told:
    """Start a run, and go on with it as far as it gets."""
    kd.start(payer.AGENTS[agent], order, id=run)
    return go_on(kd, run)


def run_through(kd: killick.Client, agent: str, order: dict[str, Any], run: str) -> Told:
    """Start a run and keep it in hand, also while it waits for a moment to come."""
    with contextlib.suppress(killick.RunWaiting, killick.RunFailed):
        kd.run(payer.AGENTS[agent], order, id=run)
    return look(kd, run)


def look(kd: killick.Client, run: str) -> Told:
    """How a run stands."""
    info = kd.info(run)
    asked = tuple(f"{wait.waits_for}: {wait.prompt}" for wait in info.waits)
    if info.status == "completed":
        return Told("completed", kd.advance(run).result)
    if info.status == "failed":
        failure = kd.advance(run).failure
        while failure.cause is not None:
            failure = failure.cause
        return Told("failed", error=failure.type, message=failure.message)
    return Told(info.status, waits=asked)


class Starved(Exception):
    """A process got no time for longer than its lease: nothing is known by it, and the next leases are longer."""


class Stage:
    """One store, the processes over it, and what was counted."""

    def __init__(self, url: str, seed: int, *, lease_seconds: float | None = None) -> None:
        self.url = url
        load_client(url)
        self.seed = seed
        self.chance = Random(seed)
        self.lives = self.deaths = 0
        self.lease_seconds = lease_seconds or 0.0

    def live(self, task: Task, **conditions: Any) -> Any:
        """A process does a task: what it returned, or that it was killed."""
        return self.end(self.start(task, **conditions))

    def together(self, *tasks: Task, each: tuple[dict[str, Any], ...] = ()) -> list[Any]:
        """Processes that have opened the store, and begin at the same instant, each under its own conditions."""
        waiting, starting = os.pipe()

        def at_the_sign(task: Task) -> Task:
            def begins(kd: killick.Client) -> Any:
                os.close(starting)
                os.read(waiting, 1)  # until nobody holds the other end
                return task(kd)

            return begins

        begun = [
            self.start(at_the_sign(task), **conditions)
            for task, conditions in zip(tasks, each or ({},) * len(tasks), strict=True)
        ]
        os.close(starting)
        ended = [self.end(process) for process in begun]
        os.close(waiting)
        return ended

    def start(self, task: Task, *, dies: str = "", pays: str = "", lingers: dict[str, float] | None = None) -> Process:
        """Begin a process. It dies at a place, or takes its time there; its model wants to pay somebody else."""

        seconds = self.lease_seconds
        options: dict[str, Any] = {"lease_seconds": seconds, "grace_seconds": seconds / 10} if seconds else {}

        def lived(out: int) -> None:
            logging.disable()
            payer.DIES["at"], payer.TO["payee"] = dies, pays
            payer.LINGERS.update(lingers or {})
            with killick.open(self.url, **options) as kd:
                told = json.dumps(task(kd))
            os.write(out, told.encode())

        self.lives += 1
        return fork(lived)

    def end(self, process: Process, *, after: float | None = None) -> Any:
        """Wait for the end of a process, or bring it about."""
        code, told = ended(process, after=after)
        if code == -signal.SIGKILL:
            self.deaths += 1
            self._mourn()
            return Killed()
        if code and self.lease_seconds and b"LeaseLost" in told:
            self.lease_seconds *= 4
            raise Starved
        assert code == 0, told.decode()
        found = json.loads(told)
        return Told(*found) if isinstance(found, list) and len(found) == len(Told._fields) else found

    def _mourn(self) -> None:
        """Where a dead holder is not noticed, its lease has to run out."""
        time.sleep(self.lease_seconds)


def ended(process: tuple[int, int], *, after: float | None = None) -> tuple[int, bytes]:
    """Wait for the end of a forked process, or kill it after a while: how it ended, and what it wrote."""
    child, reading = process
    if after is not None and not select.select([reading], [], [], after)[0]:
        os.kill(child, signal.SIGKILL)
    told = b""
    while hears := bool(select.select([reading], [], [], HANG_SECONDS)[0]):
        if not (chunk := os.read(reading, 1 << 16)):
            break
        told += chunk
    if not hears:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert hears, f"it hangs, for {HANG_SECONDS:g} seconds by now"
    return code, told


def fork(task: Callable[[int], object]) -> Process:
    """A process of its own for a task, and the end of a pipe that it writes to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        task(writing)
        code = 0
    except BaseException as error:
        os.write(writing, "".join(traceback.format_exception(error)).encode())
    finally:
        os._exit(code)


@contextlib.contextmanager
def the_bank() -> Generator[None]:
    """The bank, in a process of its own."""
    child, reading = fork(bank.serve_for_ever)
    bank.ADDRESS["port"] = int(os.read(reading, 64))
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)


def on_sqlite(folder: Path) -> str:
    """A store that is there already, so that nobody has to make it."""
    url = f"sqlite:///{folder}/killick.db"
    os.waitpid(fork(lambda _: killick.open(url).close())[0], 0)
    return url
