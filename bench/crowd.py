"""A hundred thousand parked runs beside a thousand: claiming one, listing a page, and waking one, on either store."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median
from typing import Final

import killick
from bench.measure import Measure, interleaved, ratio, seconds
from bench.postgres import server, store_url, version
from bench.serving import asks, hears
from killick.client.client import Client
from killick.clock import SystemClock
from killick.store.protocol import Store
from killick.store.records import Append, CreateRun, Delivery, Row, RunIndex, RunQuery

_now_us: Final = SystemClock().now_us

FEW: Final = 1_000
MANY: Final = 100_000
BATCH: Final = 2_000
DUE: Final = 20
"""Runs that are due beside those that wait."""

ROUNDS: Final = 61
TIMES: Final = 5
"""How often a thing is done in a round, of which the median counts."""

PAGE: Final = 100
HOUR_US: Final = 3_600_000_000
SEED: Final = 20_261_115

_ids: Final = count()


def measure(folder: Path) -> Iterator[Measure]:
    """On SQLite, then on PostgreSQL: two stores each, measured in turn."""
    paths = [f"sqlite:///{folder}/crowd-{size}.db" for size in (FEW, MANY)]
    yield from _on(paths, "SQLite")
    with server(folder) as started:
        yield from _on([store_url(started.url) for _ in (FEW, MANY)], version(started.url))


def _on(urls: list[str], where: str) -> Iterator[Measure]:
    with killick.open(urls[0]) as few, killick.open(urls[1]) as many:
        for kd, size in ((few, FEW), (many, MANY)):
            crowd(kd, size)
        kinds: dict[str, Callable[[Store, int], None]] = {
            "claiming one": _claim,
            f"listing a page of {PAGE}": _list,
            "waking one, sent to and claimed,": _wake,
        }
        for what, do in kinds.items():
            ours, theirs = interleaved(
                ROUNDS, partial(_took, do, many.runtime.store, MANY), partial(_took, do, few.runtime.store, FEW)
            )
            yield Measure(
                name="crowd",
                what=f"time of {what} among {MANY:,} parked runs to among {FEW:,}, on {where}",
                figure=ratio(ours, theirs),
                at_most=1.2,
                beside=f"{median(ours) * 1e6:,.0f} µs to {median(theirs) * 1e6:,.0f} µs",
            )


# the crowd ----------------------------------------------------------------------------------------


def crowd(kd: Client, size: int) -> None:
    """Parked runs as they come: the rows of one that was parked for real, under other names."""
    store = kd.runtime.store
    rows, index = _parked_for_real(kd)
    for first in range(0, size, BATCH):
        born = [_born(number, rows, index) for number in range(first, min(first + BATCH, size))]
        refused = [each for each in store.append(born) if isinstance(each, Exception)]
        assert not refused, refused[0]
    for number in range(DUE):
        kd.start(asks, id=f"due-{number}")


def _parked_for_real(kd: Client) -> tuple[list[Row], RunIndex]:
    kd.start(hears, id="real")
    assert kd.advance("real").status == "waiting"
    row = kd.runtime.store.index("real")
    assert row is not None
    index = RunIndex(
        agent=row.agent, status=row.status, started_at_us=row.started_at_us, changed_at_us=row.changed_at_us
    )
    return kd.runtime.store.read("real"), index


def _born(number: int, rows: list[Row], index: RunIndex) -> Append:
    """Every other one waits for a time as well, days ahead."""
    wake_at_us = index.changed_at_us + (24 + number % 1_000) * HOUR_US if number % 2 else None
    run = _name(number)
    mine = tuple(Row(row.seq, row.body, row.data, sha256(f"{run}:{row.seq}".encode()).digest()) for row in rows)
    placed = RunIndex(
        agent=index.agent,
        status=index.status,
        wake_at_us=wake_at_us,
        started_at_us=index.started_at_us,
        changed_at_us=index.changed_at_us + number,
    )
    return Append(run=run, after=0, before=bytes(32), epoch=0, rows=mine, create=CreateRun(), index=placed)


def _name(number: int) -> str:
    return f"parked-{number}"


# what is done among them --------------------------------------------------------------------------


def _took(do: Callable[[Store, int], None], store: Store, size: int) -> float:
    return median(seconds(partial(do, store, size)) for _ in range(TIMES))


def _claim(store: Store, size: int) -> None:
    [claimed] = store.claim("bench", now_us=_now_us(), seconds=30.0, limit=1, agents=["asks"])
    store.release(claimed.head.run, epoch=claimed.head.epoch, holder="bench")


def _list(store: Store, size: int) -> None:
    assert len(store.runs(RunQuery(status=("waiting",)), limit=PAGE)) == PAGE


def _wake(store: Store, size: int) -> None:
    number = next(_ids)
    run = _name(random.Random(SEED + number).randrange(size))
    message = Delivery(run=run, id=f"go-{number}", name="go", body=b"{}", by="bench", at_us=_now_us())
    store.deliver([message])
    [claimed] = store.claim("bench", now_us=_now_us(), seconds=30.0, limit=1, agents=["hears"])
    assert claimed.head.run == run, f"{run} was woken, and {claimed.head.run} claimed"
    index = RunIndex(agent="hears", status="waiting", changed_at_us=_now_us(), seen=claimed.row.delivered)
    [head] = store.append(
        [Append(run=run, after=claimed.head.seq, before=claimed.head.hash, epoch=claimed.head.epoch, index=index)]
    )
    assert not isinstance(head, Exception), head
    store.release(run, epoch=claimed.head.epoch, holder="bench")


if __name__ == "__main__":
    from bench.population import main

    raise SystemExit(main())
