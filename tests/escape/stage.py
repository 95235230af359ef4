"""Where a story is played: grounds of its own, a watcher over what lies outside, clients and processes over a store."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import killick
from attack.lives import ended, fork
from escape import law, world
from escape.far import Grounds, Watcher

Task = Callable[[killick.Client], Any]


class Stage:
    """One story: what is there, and what must be so when it is over."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.chance = Random(seed)
        self.grounds = Grounds(folder)
        self.url = f"sqlite:///{folder}/killick.db"
        self.lives = self.deaths = 0
        world.forget()
        world.declare(self.grounds)
        self._picture = self.grounds.picture()
        self._watcher = Watcher(self.grounds.outside, self.grounds.beside)

    def over(self) -> None:
        """Nothing outside of the root was touched, by the word of the kernel and by what is there."""
        seen = self._watcher.seen()
        self._watcher.close()
        assert seen == [], f"outside of the root: {seen}"
        for made in ("killick.db", "killick.db-wal", "killick.db-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.grounds.folder / made)
        for held in self.grounds.folder.glob("killick.db-*"):
            held.unlink()
        assert self.grounds.picture() == self._picture

    # clients and processes ----------------------------------------------------------------------

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[killick.Client]:
        """A client of a store in memory, for which days pass in no time."""
        logging.disable()
        try:
            with killick.open("memory:", clock=killick.clock.LeapingClock(), **options) as kd:
                yield kd
        finally:
            logging.disable(logging.NOTSET)

    def live(self, task: Task, *, dies_in: str = "", after: float | None = None) -> Any:
        """A process of its own does a task over the file; None if it was killed, in a tool or after so many seconds."""
        return self._end(self._start(task, dies_in), after)

    def together(self, *tasks: Task) -> list[Any]:
        """Processes that have opened the file, and begin at the same instant."""
        waiting, starting = os.pipe()

        def at_the_sign(task: Task) -> Task:
            def begins(kd: killick.Client) -> Any:
                os.close(starting)
                os.read(waiting, 1)  # until nobody holds the other end
                return task(kd)

            return begins

        begun = [self._start(at_the_sign(task), "") for task in tasks]
        os.close(starting)
        ended = [self._end(each) for each in begun]
        os.close(waiting)
        return ended

    def _start(self, task: Task, dies_in: str) -> tuple[int, int]:
        def lived(out: int) -> None:
            logging.disable()
            world.HERE.dies_in = dies_in
            with killick.open(self.url) as kd:
                os.write(out, json.dumps(task(kd)).encode())

        self.lives += 1
        return fork(lived)

    def _end(self, process: tuple[int, int], after: float | None = None) -> Any:
        code, told = ended(process, after=after)
        if code == -signal.SIGKILL:
            self.deaths += 1
            return None
        assert code == 0, told.decode()
        return json.loads(told)


@contextlib.contextmanager
def stage(seed: str) -> Iterator[Stage]:
    """A story, in a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="escape-"))
    try:
        made = Stage(folder, seed)
        yield made
        made.over()
    finally:
        world.forget()
        shutil.rmtree(folder, ignore_errors=True)


def go(kd: killick.Client, agent: str, given: Any, run: str) -> Any:
    """Advance a run until it ends or waits; its result, if it has one."""
    try:
        return kd.run(world.AGENTS[agent], given, id=run)
    except killick.RunWaiting:
        return "waits"
    except killick.RunFailed as failed:
        return f"failed: {failed}"


def followed(stage: Stage, kd: killick.Client, calls: list[world.Call], run: str = "r") -> tuple[Any, law.Tried]:
    """A model goes through its calls: what it was told, and what is on record of that."""
    provider = stage.chance.choice(("openai", "openai-responses", "anthropic"))
    world.HERE.scripts[run] = calls
    while (told := go(kd, "clerk", provider, run)) == "waits":
        for wait in kd.inbox():
            kd.answer(wait.id, "reject", by="mia")
    law.unread(told)
    assert law.decisions(kd, run) == [name for name, _ in calls], told
    return told, law.on_record(kd, run)
