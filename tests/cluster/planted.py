"""Bugs that are planted to see whether the simulator finds them. Each is a patch of the code under test."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace

from cluster.fibers import START_US
from killick.engine.control import commands, inbox
from killick.engine.effects import reconcile
from killick.engine.steps import permits
from killick.log.writer import RunLog
from killick.store import MemoryStore
from killick.store.memory_runs import Runs, StoredRun
from killick.store.records import Append, Delivered, Delivery, Head, Message
from killick.store.slots import ENDED_SLOT
from killick.workers.trigger_runner import _LeasedTrigger
from killick.workers.worker import Worker


class Bug(NamedTuple):
    """A bug, and the seeds within which the simulator must find it."""

    name: str
    seeds: range
    plant: Callable[[], contextlib.AbstractContextManager[Any]]
    is_called: bool = False
    """Whether it takes stories with callers."""


BUGS: Final[list[Bug]] = []


def bug(
    name: str, seeds: int, *, called: bool = False
) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    def add(plant: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        BUGS.append(Bug(name, range(seeds), contextlib.contextmanager(plant), called))
        return plant

    return add


@bug("an append is fenced neither by epoch nor by head", 20)
def unfenced() -> Iterator[None]:
    real = Runs._checked_head

    def checked(self: Runs, item: Append, head: Head | None) -> Head:
        return real(self, item, head) if head is None or item.create is not None else head

    with patch.object(Runs, "_checked_head", checked):
        yield


@bug("a take-over keeps the epoch", 5)
def kept_epoch() -> Iterator[None]:
    def take(self: Runs, head: Head, holder: str, seconds: float) -> Head:
        self._runs[head.run].head = head = self._with_lease(head, holder, max(head.epoch, 1), seconds)
        return head

    with patch.object(Runs, "_take", take):
        yield


@bug("a worker waits for bells and does not poll", 5)
def no_polling() -> Iterator[None]:
    async def rest(self: Worker, *, calm: bool) -> None:
        await self._bell.wait()

    with patch.object(Worker, "_rest", rest):
        yield


@bug("a message that comes before its wait is dropped", 5)
def dropped_early() -> Iterator[None]:
    real = Runs._deliver

    def deliver(self: Runs, sent: Delivery) -> Any:
        index = self._runs[sent.run].index
        if sent.name == "word" and index is not None and index.status != "waiting":
            fields = {name: getattr(sent, name) for name in sent.__struct_fields__ if name != "pieces"}
            return Delivered(Message(number=1, **fields), fresh=True)
        return real(self, sent)

    with patch.object(Runs, "_deliver", deliver):
        yield


@bug("leases end by the worker's clock", 20)
def workers_clock() -> Iterator[None]:
    def due(self: MemoryStore, now_us: int, agents: Any, after: int) -> Any:
        theirs = now_us - START_US
        with patch.object(MemoryStore, "now_us", lambda _: theirs):
            return real(self, now_us, agents, after)

    real = MemoryStore._due
    with patch.object(MemoryStore, "_due", due):
        yield


@bug("a lease is renewed after its end", 20)
def late_renewal() -> Iterator[None]:
    def renew(self: MemoryStore, holder: str, runs: Any, *, seconds: float) -> dict[str, int]:
        held = [(run, head) for run, head in self._present() if head.holder == holder and head.run in runs]
        for run, head in held:
            run.head = self._with_lease(head, holder, head.epoch, seconds)
        return {head.run: head.epoch for _, head in held}

    with patch.object(MemoryStore, "renew", renew):
        yield


@bug("a worker does not see which permits others hold", 10)
def blind_to_permits() -> Iterator[None]:
    real = Runs._check_rights

    def check(self: Runs, item: Append, claimed: Any) -> None:
        real(self, replace(item, claims=()), claimed)

    with patch.object(Runs, "_check_rights", check), patch.object(MemoryStore, "owned", lambda *_: {}):
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
    real = Runs._write

    def write(self: Runs, item: Append, head: Head) -> Head:
        return real(self, replace(item, takes=()), head)

    with patch.object(Runs, "_write", write):
        yield


@bug("a firing does not move its trigger on, and starts a run under a new id", 5)
def fires_again() -> Iterator[None]:
    real, run_of, ids = _LeasedTrigger.set_off, _LeasedTrigger._run_of, itertools.count()

    async def set_off(self: _LeasedTrigger, cause: Any, *first: Any) -> Any:
        return await real(self, cause._replace(next=cause.due or cause.next), *first)

    def new_run_of(self: _LeasedTrigger, due: int) -> str:
        return f"{run_of(self, due)}-{next(ids)}"

    with patch.object(_LeasedTrigger, "set_off", set_off), patch.object(_LeasedTrigger, "_run_of", new_run_of):
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
    real = MemoryStore.release

    def release(self: MemoryStore, run: str, *, epoch: int, holder: str | None = None, left: bool = False) -> None:
        stored: StoredRun = self._runs[run]
        real(self, run, epoch=epoch if stored.head is None else stored.head.epoch, holder=None, left=left)

    with patch.object(MemoryStore, "release", release):
        yield


def _delivering(changed: Callable[[Runs, Delivery], Delivery]) -> Any:
    """The store delivers what becomes of each message."""
    real = Runs._deliver
    return patch.object(Runs, "_deliver", lambda self, sent: real(self, changed(self, sent)))


@bug("a log that has ended accepts messages and commands", 20, called=True)
def accepted_too_late() -> Iterator[None]:
    def changed(self: Runs, sent: Delivery) -> Delivery:
        return replace(sent, exact=True, slot=None) if ENDED_SLOT in self._runs[sent.run].slots else sent

    with _delivering(changed):
        yield


@bug("a message to a run that was renewed stays with its old log", 20, called=True)
def not_forwarded() -> Iterator[None]:
    with _delivering(lambda self, sent: replace(sent, exact=True) if sent.name == "order" else sent):
        yield


@bug("a command to a run that was renewed stays with its old log", 20, called=True)
def command_not_forwarded() -> Iterator[None]:
    with _delivering(lambda self, sent: replace(sent, exact=True) if sent.name == inbox.COMMAND else sent):
        yield


@bug("a run that is renewed leaves its inbox behind", 20, called=True)
def left_behind() -> Iterator[None]:
    with patch.object(Runs, "_move_messages", lambda *_: None):
        yield


@bug("a vote takes no place", 20, called=True)
def uncounted_votes() -> Iterator[None]:
    def changed(self: Runs, sent: Delivery) -> Delivery:
        slot = sent.slot if sent.name == inbox.VOTE else None
        return sent if slot is None else replace(sent, slot=replace(slot, places=0))

    with _delivering(changed):
        yield


@bug("a reject is accepted after the quorum", 20, called=True)
def late_reject() -> Iterator[None]:
    with _delivering(lambda self, sent: replace(sent, slot=None) if sent.name == inbox.ANSWER else sent):
        yield


@bug("a message is counted once in each log of a run, and not in all", 20, called=True)
def taken_by_both() -> Iterator[None]:
    with patch.object(Runs, "_chain", lambda self, run: [run]):
        yield


@bug("a run that ends leaves the answers in its inbox", 20, called=True)
def overtaken_answers() -> Iterator[None]:
    real = commands.overtaken

    def overtaken(ex: Any, last: Any, *names: str) -> Any:
        return real(ex, last, *(name for name in names if name == inbox.COMMAND))

    with patch.object(commands, "overtaken", overtaken):
        yield


@bug("a run that ends does not compare its inbox", 40, called=True)
def uncompared_end() -> Iterator[None]:
    real = Runs._check_rights

    def check(self: Runs, item: Append, claimed: Any) -> None:
        real(self, replace(item, inbox_read=None), claimed)

    with patch.object(Runs, "_check_rights", check):
        yield
