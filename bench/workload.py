"""What is measured with: steps as an agent takes them, a bare SQLite table, a long run."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from hashlib import sha256
from itertools import count, cycle, islice
from pathlib import Path
from typing import Final, NamedTuple

from bench.measure import seconds
from killick.log import Entry, Log, RunLog
from killick.model.events import (
    AttemptEnded,
    AttemptStarted,
    RunStarted,
    RunTaken,
    StepIntended,
    Verdict,
    to_text,
)
from killick.store import SqliteStore
from killick.store.sqlite.file import WAL_PAGES_MAX

LONG: Final = 100_000
"""Events of a long run."""

BATCH: Final = 1_024
"""Events in one append while a long run is built: as many as lie between two snapshots."""

ROWS: Final = 30
"""Rows that a bare table takes from a run: whole steps, again and again."""

PRELUDE: Final = 2
"""Events before the first step: the run is started, and taken."""

NEVER: Final = 1 << 40


def steps(run: str, *, first: int = 1) -> Iterator[Entry]:
    """Tool calls without end, each intended, started and ended, with small arguments and a small output."""
    for number in count(first):
        at, step = time.time_ns() // 1_000, str(number)
        arguments = {
            "to": f"customer-{number}@example.com",
            "subject": f"Your claim {number}",
            "body": "We have looked at your claim and will come back to you within three days.",
        }
        digest = sha256(step.encode()).digest()
        yield Entry(
            StepIntended(
                at=at, step=step, sort="tool", name="send_email", digest=to_text(digest),
                effect="idempotent", verdict=Verdict(rule="small"),
            ),
            {"arguments": arguments},
        )  # fmt: skip
        key = f"{run}:step_{step}:send_email:{digest.hex()[:8]}"
        yield Entry(AttemptStarted(at=at, step=step, attempt=1, key=key, epoch=1, deadline=at + 30_000_000))
        yield Entry(
            AttemptEnded(at=at, step=step, attempt=1, outcome="returned"),
            {"output": {"id": digest.hex(), "status": "queued", "accepted": [arguments["to"]]}},
        )


class Agent:
    """A run that a worker holds, and the steps it takes from where it stands."""

    def __init__(self, log: RunLog) -> None:
        self.log = log
        done = log.seq - PRELUDE
        self._steps = islice(steps(log.run, first=done // 3 + 1), done % 3, None)

    @classmethod
    def started(cls, log: Log, run: str) -> Agent:
        """A new run, taken and about to make its first step."""
        at = time.time_ns() // 1_000
        handle = log.create(RunStarted(at=at, run=run, agent="claims"), {"input": {"claim": 17}}, holder="bench")
        handle.append(Entry(RunTaken(at=at, epoch=1, holder="bench")))
        return cls(handle)

    def next(self, events: int) -> list[Entry]:
        """The next events, made before the clock starts."""
        return list(islice(self._steps, events))

    def append(self, events: int) -> float:
        """The seconds that the next events take, one durable commit each."""
        entries, append = self.next(events), self.log.append

        def work() -> None:
            for entry in entries:
                append(entry)

        return seconds(work)

    def grow(self, up_to: int) -> None:
        """Reach a seq quickly, many events a commit."""
        while (missing := up_to - self.log.seq) > 0:
            self.log.append(*self.next(min(missing, BATCH)))


class BareTable:
    """A table of a run's rows under the same PRAGMAs, and nothing else: one INSERT, one commit."""

    def __init__(self, path: Path, store: SqliteStore, run: str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)
        for pragma in (
            f"page_size = {pragma_of(Path(store.place), 'page_size')}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "fullfsync = ON",
            f"wal_autocheckpoint = {WAL_PAGES_MAX}",
        ):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, body BLOB, data BLOB, hash BLOB)")
        rows = [(row.body, row.data, row.hash) for row in store.read(run, after=PRELUDE, limit=ROWS)]
        assert rows, f"{run} has made no step yet"
        self._next = zip(count(1), cycle(rows), strict=False)

    def insert(self, rows: int) -> None:
        """Commit that many rows, one by one."""
        for number, row in islice(self._next, rows):
            self.db.execute("INSERT INTO rows VALUES (?, ?, ?, ?)", (number, *row))


class LongRun(NamedTuple):
    """A closed store with one long run in it, and how large its file was on the way."""

    path: Path
    run: str
    bytes_at: dict[int, int]


@cache
def long_run(folder: Path, *, snapshots: bool) -> LongRun:
    """Built once; whoever changes it makes a copy."""
    path = folder / f"long-{'with' if snapshots else 'without'}.db"
    store = SqliteStore(path)
    log = Log(store) if snapshots else Log(store, snapshot_every=NEVER)
    agent, bytes_at = Agent.started(log, "long"), {}
    for events in (LONG // 2, LONG):
        agent.grow(events)
        bytes_at[events] = file_bytes(path)
    log.close()
    store.close()
    return LongRun(path, "long", bytes_at)


def file_bytes(path: Path) -> int:
    """How large a SQLite file is once what it committed so far is folded into it."""
    return pragma_of(path, "page_count") * pragma_of(path, "page_size")


def pragma_of(path: Path, name: str) -> int:
    """What a SQLite file says of itself."""
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute(f"PRAGMA {name}").fetchone()[0])
