"""Bugs that are planted to see whether the simulator finds them. Each is a patch of the code under test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from sqlite3 import Cursor
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from cluster.fibers import START_US
from killick.engine.effects import reconcile
from killick.engine.steps import permits
from killick.errors import LogError
from killick.log.writer import RunLog
from killick.store.records import Append, Delivered, Delivery, Head, Message
from killick.store.sqlite import store
from killick.store.sqlite.due import DueQuery
from killick.store.sqlite.rows import HeadRow, number_of, run_row, with_lease
from killick.store.sqlite.store import Tables
from killick.store.sqlite.writes import Writes
from killick.workers.trigger_runner import _LeasedTrigger
from killick.workers.worker import Worker


class Bug(NamedTuple):
    """A bug, and the seeds within which the simulator must find it."""

    name: str
    seeds: range
    plant: Callable[[], contextlib.AbstractContextManager[Any]]


BUGS: Final[list[Bug]] = []


def bug(name: str, seeds: int) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    def add(plant: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        BUGS.append(Bug(name, range(seeds), contextlib.contextmanager(plant)))
        return plant

    return add


@bug("an append is fenced neither by epoch nor by head", 20)
def unfenced() -> Iterator[None]:
    real = Writes._refuse

    def refuse(self: Writes, db: Cursor, item: Append, found: HeadRow | None, claimed: Any) -> LogError | None:
        if found is not None and item.create is None:
            item = replace(item, after=found[2], before=found[3], epoch=found[4])
        return real(self, db, item, found, claimed)

    with patch.object(Writes, "_refuse", refuse), patch.object(store, "bare", lambda *_: None):
        yield


@bug("a take-over keeps the epoch", 5)
def kept_epoch() -> Iterator[None]:
    real = Tables._take

    def take(self: Tables, db: Cursor, found: HeadRow, holder: str, seconds: float) -> HeadRow:
        return real(self, db, with_lease(found, None, None, epoch=max(found[4] - 1, 0)), holder, seconds)

    with patch.object(Tables, "_take", take):
        yield


@bug("a worker waits for bells and does not poll", 5)
def no_polling() -> Iterator[None]:
    async def rest(self: Worker, *, calm: bool) -> None:
        await self._bell.wait()

    with patch.object(Worker, "_rest", rest):
        yield


@bug("a message that comes before its wait is dropped", 5)
def dropped_early() -> Iterator[None]:
    real = Writes.deliver

    def deliver(self: Writes, db: Cursor, sent: Delivery, to_notify: list[str]) -> Any:
        number = number_of(db, sent.run)
        index = None if number is None else run_row(db, number)
        if sent.name == "word" and index is not None and index.status != "waiting":
            fields = {name: getattr(sent, name) for name in sent.__struct_fields__ if name != "pieces"}
            return Delivered(Message(number=1, **fields), fresh=True)
        return real(self, db, sent, to_notify)

    with patch.object(Writes, "deliver", deliver):
        yield


@bug("leases end by the worker's clock", 20)
def workers_clock() -> Iterator[None]:
    real = Tables._due_query

    def due_query(self: Tables, now_us: int, *rest: Any) -> DueQuery:
        return replace(real(self, now_us, *rest), clock_us=now_us - START_US)

    with patch.object(Tables, "_due_query", due_query):
        yield


@bug("a lease is renewed after its end", 20)
def late_renewal() -> Iterator[None]:
    real = Tables.renew

    def renew(self: Tables, holder: str, runs: Any, *, seconds: float) -> dict[str, int]:
        with patch.object(Tables, "now_us", lambda _: 0):
            return real(self, holder, runs, seconds=seconds)

    with patch.object(Tables, "renew", renew):
        yield


@bug("a worker does not see which permits others hold", 10)
def blind_to_permits() -> Iterator[None]:
    real = Writes._refuse_rights

    def refuse(self: Writes, db: Cursor, item: Append, found: HeadRow | None, claimed: Any) -> LogError | None:
        for claim in item.claims:
            db.execute("DELETE FROM claims WHERE space = ? AND key = ?", (claim.space, claim.key))
        return real(self, db, item, found, claimed)

    with patch.object(Writes, "_refuse_rights", refuse), patch.object(Tables, "owned", lambda *_: {}):
        yield


@bug("a returned permit wakes no run", 20)
def silent_permits() -> Iterator[None]:
    with patch.object(permits, "wake", lambda *_: ()), patch.object(permits, "LOOK_AGAIN_US", 10**12):
        yield


@bug("a worker that takes a run over forgets the permit of its open attempt", 20)
def leaked_permits() -> Iterator[None]:
    with patch.object(permits, "held", lambda *_, **__: ()):
        yield


@bug("a message that was taken stays in the inbox", 5)
def taken_twice() -> Iterator[None]:
    real = Writes._write

    def write(self: Writes, db: Cursor, head: HeadRow, item: Append, to_notify: list[str]) -> Head:
        return real(self, db, head, replace(item, takes=()), to_notify)

    with patch.object(Writes, "_write", write):
        yield


@bug("a firing does not move its trigger on", 5)
def fires_again() -> Iterator[None]:
    real = _LeasedTrigger.set_off

    async def set_off(self: _LeasedTrigger, cause: Any, *first: Any) -> Any:
        return await real(self, cause._replace(next=cause.due or cause.next), *first)

    with patch.object(_LeasedTrigger, "set_off", set_off):
        yield


@bug("an effect does not wait until its intention is durable", 10)
def effect_first() -> Iterator[None]:
    async def settled(self: RunLog, ticket: Any) -> bool:
        return False

    with patch.object(RunLog, "settled", settled):
        yield


@bug("a payment in doubt is repeated", 20)
def repeated_in_doubt() -> Iterator[None]:
    async def settle(a: Any, work: Any) -> Any:
        return reconcile._settled(a, reconcile.DidNotHappen(), by="reconcile")

    with patch.object(reconcile, "settle", settle):
        yield


@bug("a stale epoch releases a run", 60)
def stale_release() -> Iterator[None]:
    real = Tables.release

    def release(self: Tables, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        head = self.head(run)
        real(self, run, epoch=epoch if head is None else head.epoch, holder=None, left=left)

    with patch.object(Tables, "release", release):
        yield
