"""One conversation as a run: its log and its position.

Every request is recorded before it is sent, and a reply before its client receives the end. The proxy holds the run's
lease while the conversation is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from killick.contracts.prices import Prices
from killick.engine.leases import Lease
from killick.engine.steps.model_reply import reasoning_of, text_of, usage_of
from killick.errors import LeaseLost, LogError
from killick.log.writer import Entry, RunLog
from killick.logger import get_logger
from killick.model import codec
from killick.model import events as e
from killick.model.failure import Failure
from killick.model.hashing import action_key
from killick.proxy.conversation_match import ROOT_TAG, TIP_TAG
from killick.proxy.wire import Wire
from killick.version import VERSION

if TYPE_CHECKING:
    from killick.client.client import Client

logger: Final = get_logger("killick.proxy")

BY: Final = "proxy"
_PRICES: Final = Prices()
_DIED: Final = Failure.of("killick.proxy", "the proxy ended before the reply did", kind="died")
GONE: Final = Failure.of("killick.proxy", "the client went away before the reply was over", kind="cancelled")


class Conversation:
    """An open conversation. One request at a time holds it."""

    def __init__(self, client: Client, log: RunLog, wire: Wire) -> None:
        self.client = client
        self.log = log
        self.wire = wire
        self.root: str | None = None
        self.tip = ""
        self.at: str | None = None
        """The fingerprint of the request that holds it."""
        self.freed = asyncio.Event()
        self.used = client.runtime.clock.monotonic()
        self.lease: Lease | None = None
        self.said: str = ""
        self.is_lost = False
        self._steps = len(log.fold.tops)
        self._first: list[Entry] = []

    @property
    def run(self) -> str:
        return self.log.run

    @property
    def is_sound(self) -> bool:
        """Whether it can still be written to."""
        return not self.is_lost and self.log.failure is None

    # opening ----------------------------------------------------------------------------------

    @classmethod
    def begun(
        cls, client: Client, run: str, agent: str, wire: Wire, *, root: str | None, tip: str, left: str | None,
        origin: Mapping[str, Any],
    ) -> Conversation:  # fmt: skip
        """Prepares a new one; its first call writes it."""
        engine, now = client.runtime.engine, client.runtime.clock.now_us()
        since = client.runtime.clock.monotonic()
        log = client.runtime.log.begin(run, holder=engine.holder, seconds=engine.lease_seconds)
        made = cls(client, log, wire)
        made.root, made.tip = root, tip
        build = e.Build(version=VERSION)
        started = e.RunStarted(at=now, run=run, agent=agent, build=build, tags=made.tags, follows=left)
        taken = e.RunTaken(at=now, epoch=1, holder=engine.holder, build=build)
        made._first = [Entry(started, {"input": dict(origin)}), Entry(taken)]
        made._leased(1, since)
        return made

    @classmethod
    def opened(cls, client: Client, run: str, wire: Wire) -> Conversation:
        """Opens one from its log. RunBusy if another worker holds it."""
        engine, clock = client.runtime.engine, client.runtime.clock
        since = clock.monotonic()
        head = client.runtime.store.lease(run, engine.holder, seconds=engine.lease_seconds)
        try:
            log = client.runtime.log.open(run, head=head)
            made = cls(client, log, wire)
            made._read_tags()
            made._take_over(log.epoch)
        except BaseException:
            client.runtime.store.release(run, epoch=head.epoch, holder=engine.holder)
            raise
        made._leased(log.epoch, since)
        return made

    def _read_tags(self) -> None:
        for tag in self.log.fold.facts.tags:
            if tag.startswith(ROOT_TAG):
                self.root = tag.removeprefix(ROOT_TAG)
            elif tag.startswith(TIP_TAG):
                self.tip = tag.removeprefix(TIP_TAG)

    def _take_over(self, epoch: int) -> None:
        """Takes the run over: reopens an ended one, and fails a call that the previous holder left open."""
        now, facts = self.client.runtime.clock.now_us(), self.log.fold.facts
        entries: list[Entry] = []
        if facts.ended:
            entries.append(Entry(e.RunResumed(at=now, by=BY), {"because": "its client came back"}))
        holder, build = self.client.runtime.engine.holder, e.Build(version=VERSION)
        entries.append(Entry(e.RunTaken(at=now, epoch=epoch, holder=holder, build=build)))
        for index in facts.pending.values():
            step = self.log.fold.steps[index]
            if step.attempts and not step.attempts[-1].ended:
                ended = e.AttemptEnded(at=now, step=step.id, attempt=len(step.attempts), outcome="unknown")
                entries.append(Entry(ended, {"failure": _DIED}))
        self.log.append(*entries)

    def _leased(self, epoch: int, since: float) -> None:
        engine = self.client.runtime.engine

        def lost(error: LogError) -> None:
            logger.warning("%s: %s; its next request is recorded separately", self.run, error)
            self.is_lost = True

        self.lease = engine.leases.hold(self.run, epoch, seconds=engine.lease_seconds, since=since, lost=lost)

    def let_go(self) -> None:
        """Completes the run while its client is away, and releases it."""
        if self.lease is not None:
            self.client.runtime.engine.leases.drop(self.lease)
        if not self._first and self.is_sound:
            now = self.client.runtime.clock.now_us()
            self.log.append(Entry(e.RunCompleted(at=now), {"result": self.said}))

    @property
    def tags(self) -> tuple[str, ...]:
        return ((f"{ROOT_TAG}{self.root}",) if self.root else ()) + ((f"{TIP_TAG}{self.tip}",) if self.tip else ())

    # writing ----------------------------------------------------------------------------------

    async def intend(self, arguments: Mapping[str, Any]) -> str:
        """Records an outgoing call; returns the step's id."""
        if self.is_lost:
            raise LeaseLost(self.run)
        step = str(self._steps + 1)
        if await self._written(partial(self._intention, step, arguments)):
            self.failed(step, GONE)
            raise asyncio.CancelledError
        return step

    def _intention(self, step: str, arguments: Mapping[str, Any]) -> None:
        now = self.client.runtime.clock.now_us()
        digest = codec.digest(arguments, secret_key=self.client.runtime.store.secret_key)
        key = action_key(self.run, step, self.wire.step, digest, generation=self.log.fold.facts.generation)
        epoch = 1 if self._first else self.log.epoch
        name, digest_text = self.wire.step, e.to_text(digest)
        started = e.StepStarted(at=now, step=step, sort="model", name=name, digest=digest_text, key=key, epoch=epoch)
        self.log.append(*self._first, Entry(started, {"arguments": dict(arguments)}))
        self._steps, self._first = self._steps + 1, []

    async def replied(self, step: str, reply: Mapping[str, Any], tip: str) -> None:
        """Records a call's reply, and the conversation's new position."""
        now = self.client.runtime.clock.now_us()
        ended = e.AttemptEnded(at=now, step=step, attempt=1, outcome="returned", usage=_priced(reply))
        values: dict[str, Any] = {"output": dict(reply)}
        if reasoning := reasoning_of(reply):
            values["reasoning"] = reasoning
        self.tip, self.said = tip, text_of(reply)
        tagged = Entry(e.RunTagged(at=now, tags=self.tags, by=BY))
        if await self._written(partial(self.log.append, Entry(ended, values), tagged)):
            raise asyncio.CancelledError

    async def _written(self, write: Callable[[], object]) -> bool:
        """Writes in a thread, so that other streams continue, and despite cancellation; True: it was cancelled."""
        writing = asyncio.ensure_future(asyncio.to_thread(write))
        cancelled = False
        while not writing.done():
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                cancelled = True
        writing.result()
        return cancelled

    def failed(self, step: str, failure: Failure, *, refused: bool = False, partial: Any = None) -> None:
        """Records a failed or truncated call; `partial` is the received part."""
        now = self.client.runtime.clock.now_us()
        ended = e.AttemptEnded(at=now, step=step, attempt=1, outcome="refused" if refused else "unknown")
        self.log.append_behind(Entry(ended, {"failure": failure} | ({"progress": partial} if partial else {})))


def _priced(reply: Mapping[str, Any]) -> e.Usage | None:
    usage = usage_of(reply)
    cost = None if usage is None else _PRICES.cost(usage)
    return usage if usage is None or not cost else msgspec.structs.replace(usage, cost_micros=cost)
