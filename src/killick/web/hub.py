"""The hub: one poller that knows how far every watched run is, for all who follow. Pushes nothing and keeps no queues.

A follower asks for the events after its position. Followers at the same position share one read. A slow one reads the
log by itself, so it delays no other, and memory is bounded by the number of followers. Everything that
touches the store happens off the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec

from killick.errors import RunUnknown
from killick.log.log import Recorded
from killick.logger import get_logger
from killick.lru import Lru
from killick.model import events as e
from killick.presenting import documents
from killick.presenting.encoder import document
from killick.store.records import ENDED, RunQuery, RunStatus
from killick.web.problems import Problem
from killick.web.redaction import Redaction

if TYPE_CHECKING:
    from killick.client.client import Client

TICK_SECONDS: Final = 0.2
"""How often the watched runs are looked at."""

SHARE: Final = 0.1
"""How much of the time looking may take at the most: when it takes long, it is done less often."""

COUNT_SECONDS: Final = 1.0
"""How often runs are counted at the most."""

FOLLOWERS_MAX: Final = 500
"""Fewer than the server has connections, so that plain requests are served while streams are open."""
FOLLOWERS_EACH_MAX: Final = 100
"""How many streams one person may have open, so that the others get one."""

PAGE_EVENTS: Final = 100
PAGE_BYTES: Final = 262_144
"""The most bytes of one read; a single event may be larger."""

_PAGES_KEPT: Final = 64
_READERS: Final = 4
logger: Final = get_logger("killick.web")
_encode: Final = msgspec.json.Encoder().encode


class Position(NamedTuple):
    """How far a run is, read at one time: a run that is over has all its events by this seq. `hint` is that in JSON,
    encoded once for all who follow it. A message that no worker has taken moves it too."""

    seq: int
    status: str
    delivered: int
    hint: bytes

    @classmethod
    def of(cls, run: str, found: RunStatus) -> Self:
        seq, status = found.head.seq, found.status or ""
        return cls(seq, status, found.delivered, _encode({"run": run, "seq": seq, "status": status}))

    @property
    def is_over(self) -> bool:
        return self.status in ENDED


class Page(NamedTuple):
    """Events as they are sent, and the seq of the last of them."""

    frames: bytes
    seq: int


class Follower:
    """A follower; woken when one of its runs changed, to read for itself."""

    def __init__(self) -> None:
        self._bell = asyncio.Event()

    def notify(self) -> None:
        self._bell.set()

    async def moved(self, seconds: float) -> bool:
        """Wait until something moved since this was last asked, or for so long; says whether it did."""
        try:
            async with asyncio.timeout(seconds):
                await self._bell.wait()
        except TimeoutError:
            return False
        self._bell.clear()
        return True


class Hub:
    """The followers of runs. All of it belongs to one loop."""

    def __init__(self, client: Client, *, followers_max: int = FOLLOWERS_MAX, mask: Redaction | None = None) -> None:
        self._client = client
        self._mask = mask
        self._followers_max = followers_max
        self._followers: set[Follower] = set()
        self._of_person: Counter[str] = Counter()
        self._watched: dict[str, set[Follower]] = {}
        self._counting: set[Follower] = set()
        self.positions: dict[str, Position] = {}  # of the watched runs, as the poller last read them
        self.counts: dict[str, int] = {}  # how many runs there are of each status, as last counted
        self.counts_hint = b""
        self._counted_at = 0.0
        self._pages: Lru[tuple[str, int], asyncio.Task[Page]] = Lru(_PAGES_KEPT)
        self._reading = asyncio.Semaphore(_READERS)
        self._poller: asyncio.Task[None] | None = None
        self.closing = asyncio.Event()

    @property
    def followers(self) -> int:
        """How many follow at this moment."""
        return len(self._followers)

    async def close(self) -> None:
        """End every stream, at once."""
        self.closing.set()
        _notify_all(self._followers)
        if self._poller is not None:
            self._poller.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._poller

    @contextlib.contextmanager
    def following(self, *runs: str, by: str, counts: bool = False) -> Generator[Follower]:
        """Watch some runs, and how many there are, for one follower of a person."""
        if self._of_person[by] >= FOLLOWERS_EACH_MAX:
            reason = f"{by} has {FOLLOWERS_EACH_MAX} streams open; close one first"
            raise Problem(429, reason, code="too_many_followers", headers={"Retry-After": "10"})
        if len(self._followers) >= self._followers_max or self.closing.is_set():
            reason = "this server takes no more followers now; ask again later"
            raise Problem(503, reason, code="too_many_followers", headers={"Retry-After": "10"})
        follower = Follower()
        follower.notify()  # a new follower gets the known state at once
        self._followers.add(follower)
        self._of_person[by] += 1
        if counts:
            self._counting.add(follower)
        for run in runs:
            self._watched.setdefault(run, set()).add(follower)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield follower
        finally:
            self._followers.discard(follower)
            self._of_person -= Counter([by])
            self._counting.discard(follower)
            for run in set(runs):
                self._watched[run].discard(follower)
                if not self._watched[run]:
                    del self._watched[run]
                    self.positions.pop(run, None)

    # queries of followers ---------------------------------------------------------------------

    async def position(self, run: str) -> Position:
        """How far a run is, as far as is known; RunUnknown where there is none."""
        if (known := self.positions.get(run)) is not None:
            return known
        looked = await asyncio.to_thread(self._look, (run,))
        if run not in looked:
            raise RunUnknown(run)
        return looked[run]  # only the poller stores positions, since it notifies the followers

    async def page(self, run: str, after: int) -> Page:
        """The events after a seq, which there have to be; read once for all who are there."""
        place = (run, after)
        task = self._pages.get(place)
        if task is None:
            task = asyncio.create_task(self._read(run, after))
            self._pages.put(place, task)
        try:
            return await asyncio.shield(task)
        except Exception:
            self._pages.pop(place)
            raise

    async def renewed_as(self, run: str, seq: int) -> str | None:
        """The run that continues an ended one."""
        last = await asyncio.to_thread(self._client.runtime.log.event, run, seq)
        return last.run if isinstance(last, e.RunRenewed) else None

    # the poller -------------------------------------------------------------------------------

    async def _poll(self) -> None:
        now = asyncio.get_running_loop().time  # its sleeps are real, also where the client's clock is not
        while self._followers:
            begun = now()
            try:
                await self._look_once(begun)
            except Exception as error:  # followers stay connected after any error
                logger.warning("cannot read the followed runs: %s", error)
            took = now() - begun
            await asyncio.sleep(max(TICK_SECONDS, took / SHARE))

    async def _look_once(self, now: float) -> None:
        looked = await asyncio.to_thread(self._look, tuple(self._watched))
        for run, position in looked.items():
            if run in self._watched and self.positions.get(run) != position:
                self.positions[run] = position
                _notify_all(self._watched[run])
        if self._counting and now - self._counted_at >= COUNT_SECONDS:
            self._counted_at = now
            counts = dict(await asyncio.to_thread(self._client.runtime.store.counts, RunQuery()))
            if counts != self.counts:
                self.counts = counts
                self.counts_hint = _encode(counts)
                _notify_all(self._counting)

    # off the loop -----------------------------------------------------------------------------

    def _look(self, runs: tuple[str, ...]) -> dict[str, Position]:
        standings = self._client.runtime.store.statuses(runs) if runs else {}
        return {run: Position.of(run, found) for run, found in standings.items()}

    async def _read(self, run: str, after: int) -> Page:
        async with self._reading:
            return await asyncio.to_thread(self._paged, run, after)

    def _paged(self, run: str, after: int) -> Page:
        frames, seq = bytearray(), after
        for recorded in self._client.runtime.log.read(run, after=after, limit=PAGE_EVENTS):
            if len(frames) > PAGE_BYTES:
                break
            frames += self._frame(run, recorded)
            seq = recorded.seq
        return Page(bytes(frames), seq)

    def _frame(self, run: str, recorded: Recorded) -> bytes:
        """One event as it is sent: with its values, as they are in the log."""
        event = documents.event(self._client.runtime.log, run, recorded)
        data: Any = document(event)
        return frame(event.kind, data if self._mask is None else self._mask.over(data, run=run), id=event.seq)


def _notify_all(followers: Iterable[Follower]) -> None:
    for follower in followers:
        follower.notify()


def frame(event: str, data: Any, *, id: int | None = None) -> bytes:  # noqa: A002
    """One event of a stream; bytes are JSON already. JSON has no line breaks of its own, so one line is enough."""
    numbered = b"" if id is None else b"id: %d\n" % id
    return b"%sevent: %s\ndata: %s\n\n" % (numbered, event.encode(), data if type(data) is bytes else _encode(data))
