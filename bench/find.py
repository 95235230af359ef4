"""A question across 10,000 runs: what its index costs, and what it saves beside reading every log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

from bench.measure import Measure, seconds
from bench.workload import file_bytes, steps
from killick.history.search.index import Scan
from killick.history.search.query import Finder
from killick.history.search.terms import TermQuery, term, value_wanted
from killick.log import Entry, Log
from killick.model.events import DecisionMade, RunStarted
from killick.store import SqliteStore
from killick.store.records import IndexQuery

RUNS: Final = 10_000
STEPS: Final = 3
EVENTS: Final = 2 + 3 * STEPS
"""Events of a run: it is started, decides, and makes its steps."""

LOOKS: Final = 51
AT: Final = 1_750_000_000_000_000


def measure(folder: Path) -> Iterator[Measure]:
    """The first catch-up, then a question that one call of thirty thousand answers."""
    path = folder / "find.db"
    with closing(SqliteStore(path, durability="process")) as store:
        log = Log(store)
        for number in range(RUNS):
            _tell(log, number)
        before = file_bytes(path)
        find = Finder(log)
        first = seconds(find.catch_up)
        yield Measure(
            name="find",
            what=f"events/s of the first question's catch-up, {RUNS:,} runs of {EVENTS} events",
            figure=RUNS * EVENTS / first,
            form="{:,.0f}/s",
            beside=f"{first:.1f} s",
        )
        asked = f"customer-{RUNS * STEPS // 3}@example.com"
        wanted = TermQuery(asked)
        groups = [value_wanted("argument", "to", wanted) or set(), {term("tool", "send_email")}]

        def ask() -> None:
            assert len(find.calls("send_email", where={"to": asked})) == 1

        def scan() -> None:
            assert len(Scan(log, groups).marked(IndexQuery(groups))) == 1

        asking = median(seconds(ask) for _ in range(LOOKS))
        scanning = seconds(scan)
        yield Measure(
            name="find",
            what=f"time to find one call by an argument among {RUNS * STEPS:,}, to reading all logs",
            figure=asking / scanning,
            form="{:.4f} ×",
            at_most=0.01,
            beside=f"{asking * 1e3:.1f} ms, median of {LOOKS}, to {scanning:.1f} s",
        )
        newest = median(seconds(lambda: find.calls(limit=100)) for _ in range(LOOKS // 5))
        yield Measure(
            name="find",
            what="time to show the newest 100 calls of all",
            figure=newest * 1e3,
            form="{:.0f} ms",
        )
        after = file_bytes(path)
    yield Measure(
        name="find",
        what="the index as a share of the store",
        figure=(after - before) / after * 100,
        form="{:.0f} %",
        beside=f"{(after - before) / 1e6:.1f} MB of {after / 1e6:.1f} MB; "
        f"{(after - before) / (RUNS * EVENTS):.0f} bytes an event",
    )


def _tell(log: Log, number: int) -> None:
    run, at = f"claim-{number}", AT + number * 1_000_000
    handle = log.begin(run)
    decided = {"question": "Which way?", "options": ["auto", "manager"], "choice": "auto", "because": "It is small."}
    handle.append(
        Entry(RunStarted(at=at, run=run, agent="claims"), {"input": {"claim": number}}),
        Entry(DecisionMade(at=at, step="1"), decided),
        *islice(steps(run, first=number * STEPS + 2), 3 * STEPS),
    )
