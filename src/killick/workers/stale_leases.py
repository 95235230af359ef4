"""Frees runs of a holder that stopped renewing while its leases end far ahead, because the store's clock was set back.

A lease ends by the store's clock. This worker's own clock, which only grows, tells for how long it saw no renewal. It
does so only while the store's clock is behind what this worker saw: otherwise a lease that ends late is just long, and
its holder, if it is frozen, counts on all of it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Final

from killick.clock import Clock
from killick.engine.leases import LEASE_SECONDS
from killick.store.protocol import Store
from killick.store.records import READ_LIMIT, RunQuery

STALE_SECONDS: Final = LEASE_SECONDS
"""A live holder renews its leases more than twice in this time, however long they last."""

_SLACK_US: Final = 5_000_000
"""How far a clock may go back by being kept exact."""


class StaleLeases:
    """What one worker saw of the leases that end later than a usual one could."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._latest_us = 0
        self._seen: dict[tuple[str, int | None], float] = {}

    def free(self, own_agents: Collection[str]) -> None:
        """Releases the runs of every holder whose leases did not change for `STALE_SECONDS`, as if it had died."""
        if self._store.proves_life:
            return
        now_us, now = self._store.now_us(), self._clock.monotonic()
        self._latest_us = max(self._latest_us, now_us)
        if now_us > self._latest_us - _SLACK_US:
            return
        usual_us = now_us + round(STALE_SECONDS * 1_000_000)
        ahead = [(each.holder, each.until_us) for each in self._store.holders() if (each.until_us or 0) > usual_us]
        self._seen = {lease: self._seen.get(lease, now) for lease in ahead}
        stale = [holder for (holder, _), since in self._seen.items() if now - since > STALE_SECONDS]
        for holder, agent in product(stale, (None, *own_agents)):
            for row in self._store.runs(RunQuery(holders=(holder,), agent=agent), limit=READ_LIMIT):
                if (head := self._store.head(row.run)) is not None and head.holder == holder:
                    self._store.release(row.run, epoch=head.epoch, holder=holder, left=True)
