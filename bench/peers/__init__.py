"""Durable runs beside peers: each peer is asked in a process of its own, and answers one line of JSON.

A step is the same everywhere: it appends a number to a list. Every process warms up before its clock starts,
and those who are compared take turns. Holds what both ends need; imports no peer.
"""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from bench.machine import Flushes
from bench.measure import interleaved, seconds

ROOT: Final = Path(__file__).parents[2]

ROUNDS: Final = 3
"""Of which the best counts, for us and for them."""

DBOS: Final = "bench.peers.dbos_steps"
LANGGRAPH: Final = "bench.peers.langgraph_steps"

Answer = TypeVar("Answer", bound=msgspec.Struct)


class Took(msgspec.Struct, frozen=True):
    """What a step took: wall clock, processor time of its process, and flushes of the disk if it counts them."""

    seconds: float
    cpu_seconds: float
    flushes: float | None

    @property
    def rate(self) -> float:
        """Steps a second."""
        return 1 / self.seconds

    @classmethod
    def best(cls, rounds: list[Took]) -> Took:
        """The least of each figure: what others take of the machine belongs to nobody here."""
        flushes = (took.flushes for took in rounds if took.flushes is not None)
        return cls(
            min(took.seconds for took in rounds), min(took.cpu_seconds for took in rounds), min(flushes, default=None)
        )


class Recovered(msgspec.Struct, frozen=True):
    """How long after the store was opened the agent's code ran again, and passed the last recorded step."""

    again_seconds: float
    past_seconds: float
    repeated: int
    """Recorded steps whose body ran once more."""


# asking -------------------------------------------------------------------------------------------


def ask(module: str, *arguments: object, answer: type[Answer]) -> Answer:
    """Run a module in a process of its own, and read its answer."""
    done = _run(module, *arguments)
    if done.returncode:
        sys.exit(f"bench: {module} failed; peers come with the group `bench` of pyproject.toml\n{done.stderr}")
    return msgspec.json.decode(done.stdout, type=answer)


def let_die(module: str, *arguments: object) -> None:
    """Run a module that is to kill its own process."""
    done = _run(module, "die", *arguments)
    if done.returncode != -signal.SIGKILL:
        sys.exit(f"bench: {module} was to die and ended with {done.returncode}\n{done.stderr}")


def _run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def in_turn(*contenders: Callable[[], Took]) -> list[Took]:
    """The best of each, round by round."""
    rounds: list[list[Took]] = [[] for _ in contenders]

    def keep(took: list[Took], contender: Callable[[], Took]) -> float:
        took.append(contender())
        return took[-1].seconds

    interleaved(ROUNDS, *(partial(keep, *pair) for pair in zip(rounds, contenders, strict=True)))
    return [Took.best(took) for took in rounds]


def fresh(path: Path) -> Path:
    """A place for a file that is new in every round."""
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()
    return path


def set_to_wal(path: Path) -> Path:
    """A SQLite file that keeps a write-ahead log, whoever opens it later."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    return path


def release(package: str) -> str:
    """A peer by name and version."""
    return {"dbos": "DBOS", "langgraph": "LangGraph"}[package] + f" {version(package)}"


# answering ----------------------------------------------------------------------------------------


def timed(flushes: Flushes, steps: int, work: Callable[[], object]) -> Took:
    """Do some steps once, and say what each took."""
    flushed, cpu = flushes.count(), time.process_time()
    took = seconds(work)
    cpu, flushed = time.process_time() - cpu, flushes.count() - flushed
    return Took(took / steps, cpu / steps, flushed / steps if flushes.counted else None)


def say(answer: msgspec.Struct) -> None:
    """Print what was measured, for whoever asked."""
    print(msgspec.json.encode(answer).decode(), flush=True)
