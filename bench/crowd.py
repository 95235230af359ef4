"""Many runs beside a thousand: claiming one, listing a page, waking one, and a step.

A hundred thousand parked runs on either store; on PostgreSQL also a million ended ones, and many steps that no vacuum
cleaned up after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import psycopg

import killick
from bench.measure import Measure, interleaved, ratio, seconds
from bench.postgres import server, store_url, version
from bench.serving import asks, hears
from killick.client.client import Client
from killick.clock import SystemClock
from killick.store.protocol import Store
from killick.store.records import Append, CreateRun, Delivery, Head, Row, RunIndex, RunQuery

_now_us: Final = SystemClock().now_us

FEW: Final = 1_000
MANY: Final = 100_000
ENDED: Final = 1_000_000
UNVACUUMED_STEPS: Final = 50_000
UNVACUUMED_WAKES: Final = 2_000
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
    yield from _parked(paths, "SQLite")
    with server(folder) as started:
        yield from _parked([store_url(started.url) for _ in (FEW, MANY)], version(started.url))
        yield from _ended(started.url)
    with server(folder, autovacuum="off") as started:
        yield from _unvacuumed(started.url)


def _parked(urls: list[str], where: str) -> Iterator[Measure]:
    with killick.open(urls[0]) as few, killick.open(urls[1]) as many:
        for kd, size in ((few, FEW), (many, MANY)):
            crowd(kd, size)
        kinds = {what: do for what, do in _KINDS.items() if do is not _step}
        yield from _compared(
            (many, MANY), (few, FEW), kinds, f"among {MANY:,} parked runs to among {FEW:,}, on {where}"
        )


def _ended(base: str) -> Iterator[Measure]:
    """The same runs wait in both stores; the ended ones are copies of one that ended for real."""
    urls = [store_url(base) for _ in (FEW, ENDED)]
    with killick.open(urls[0]) as few, killick.open(urls[1]) as many:
        for kd, url, size in ((few, urls[0], FEW), (many, urls[1], ENDED)):
            crowd(kd, FEW)
            kd.run(ends, id="over")
            _copy_over(url, size)
        where = f"among {ENDED:,} ended runs to among {FEW:,}, on {version(base)}"
        yield from _compared((many, FEW), (few, FEW), _KINDS, where)


def _unvacuumed(base: str) -> Iterator[Measure]:
    urls = [store_url(base) for _ in range(2)]
    with killick.open(urls[0]) as fresh, killick.open(urls[1]) as used:
        for kd in (fresh, used):
            crowd(kd, FEW)
        _steps(used.runtime.store, UNVACUUMED_STEPS)
        for _ in range(UNVACUUMED_WAKES):
            _wake(used.runtime.store, FEW)
        since = f"{UNVACUUMED_STEPS:,} steps and {UNVACUUMED_WAKES:,} wake-ups"
        where = f"after {since} without a vacuum to before, on {version(base)}"
        yield from _compared((used, FEW), (fresh, FEW), _KINDS, where)


def _compared(
    ours: tuple[Client, int], theirs: tuple[Client, int], kinds: dict[str, Callable[[Store, int], None]], where: str
) -> Iterator[Measure]:
    """Each kind of thing, done in two stores whose parked runs are so many."""
    for what, do in kinds.items():
        one, other = interleaved(ROUNDS, *(partial(_took, do, kd.runtime.store, size) for kd, size in (ours, theirs)))
        yield Measure(
            name="crowd",
            what=f"time of {what} {where}",
            figure=ratio(one, other),
            at_most=1.2,
            beside=f"{median(one) * 1e6:,.0f} µs to {median(other) * 1e6:,.0f} µs",
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


@killick.agent(name="ends")
async def ends(run: killick.Run) -> str:
    return "over"


_COPY: Final = """
    CREATE TEMP TABLE copies AS SELECT nextval('numbers') AS number, n FROM generate_series(1, {size}) AS n;
    INSERT INTO heads (
        number, run, base, seq, hash, epoch, checksum, agent, status, priority, started_at_us, changed_at_us, tags,
        delivered_checksum
    )
    SELECT copies.number, 'over-' || n, base, seq, hash, epoch,
        head_check(copies.number, 'over-' || n, seq, hash, epoch, base, NULL, false), agent, status, priority,
        started_at_us + n, changed_at_us + n, tags, count_check(copies.number, 0)
    FROM heads, copies WHERE run = 'over';
    INSERT INTO events SELECT copies.number, events.seq, body, events.hash, data
    FROM heads JOIN events USING (number), copies WHERE run = 'over';
    DROP TABLE copies
"""


def _copy_over(url: str, size: int) -> None:
    base, _, namespace = url.partition("?namespace=")
    with psycopg.connect(base, autocommit=True) as sql:
        sql.execute(cast("Any", f"SET search_path = killick_{namespace}; SET synchronous_commit = off"))
        sql.execute(cast("Any", _COPY.format(size=size)))
        for table in ("heads", "events"):
            sql.execute(cast("Any", f"VACUUM ANALYZE {table}"))


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


def _step(store: Store, size: int) -> None:
    """One durable append to one of many runs, in turn."""
    number = next(_ids)
    head = store.head(_name(number % size))
    assert head is not None
    row = Row(head.seq + 1, b"{}", None, sha256(f"{number}".encode()).digest())
    [done] = store.append([Append(run=head.run, after=head.seq, before=head.hash, epoch=head.epoch, rows=(row,))])
    assert not isinstance(done, Exception), done


def _steps(store: Store, count_: int) -> None:
    """So many steps of a hundred runs, one of each in a commit."""
    heads = [head for number in range(100) if (head := store.head(_name(number))) is not None]
    for turn in range(count_ // len(heads)):
        row = (b"{}", None, sha256(f"{turn}".encode()).digest())
        items = [
            Append(run=head.run, after=head.seq, before=head.hash, epoch=head.epoch, rows=(Row(head.seq + 1, *row),))
            for head in heads
        ]
        heads = [head for head in store.append(items) if isinstance(head, Head)]


_KINDS: Final[dict[str, Callable[[Store, int], None]]] = {
    "claiming one": _claim,
    f"listing a page of {PAGE}": _list,
    "waking one, sent to and claimed,": _wake,
    "a step": _step,
}


if __name__ == "__main__":
    from bench.population import main

    raise SystemExit(main())
