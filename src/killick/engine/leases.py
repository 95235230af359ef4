"""Renews the leases of all runs that this process holds, and reports the lost ones.

Runs in a thread, so that code that blocks a loop loses no lease.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from killick.clock import Clock, SystemClock
from killick.errors import EpochStale, KillickError, LeaseLost, LogError, StoreClosed, StoreError
from killick.logger import get_logger
from killick.store.protocol import Store
from killick.threads import start_thread

logger: Final = get_logger("killick")

LEASE_SECONDS: Final = 30.0
"""The default duration of a lease."""

_SHARE: Final = 3
"""A lease is renewed after a third of its time, so that two failures in a row do not lose it. A long one is renewed as
often as a usual one: by that, others see that its holder lives."""

Lost = Callable[[LogError], None]


@dataclass(slots=True, eq=False)
class Lease:
    """The right to advance one run until `until` on the local monotonic clock."""

    run: str
    epoch: int
    seconds: float
    until: float
    lost: Lost

    @property
    def renewed_after(self) -> float:
        return min(self.seconds, LEASE_SECONDS) / _SHARE


class Leases:
    """The leases of one holder."""

    def __init__(self, store: Store, holder: str, clock: Clock) -> None:
        self._store = store
        self._holder = holder
        self._clock = clock
        self._held: dict[str, Lease] = {}
        self._unreleased: dict[tuple[str, int], bool] = {}
        self._mutex = threading.Lock()
        self._keeping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop, self._last_seconds = threading.Event(), 1.0
        self.unreachable_at = -math.inf
        """When this process last failed to reach the store, by its monotonic clock."""

    def hold(self, run: str, epoch: int, *, seconds: float, since: float, lost: Lost) -> Lease:
        """Renew a lease taken at `since` from now on. `lost` is called, in any thread, when it could not be renewed."""
        lease = Lease(run, epoch, seconds, since + seconds, lost)
        if not math.isinf(seconds):
            with self._mutex:
                self._held[run], self._last_seconds = lease, seconds
                self._begin()
        return lease

    def drop(self, lease: Lease) -> None:
        """Stop renewing a lease."""
        with self._mutex:
            if self._held.get(lease.run) is lease:
                del self._held[lease.run]
        lease.lost = lambda error: None  # it refers to the run, which refers to its lease

    def release(self, run: str, epoch: int, *, left: bool = False) -> None:
        """Release a run in the store. If the store cannot do that now, retry until it can."""
        with self._mutex:
            self._unreleased[run, epoch] = left
        self._release()

    def await_release(self, run: str) -> None:
        """Raise the store's error while the release of a run is still pending."""
        with self._mutex:
            waiting = any(named == run for named, _ in self._unreleased)
        if waiting and (error := self._release()) is not None:
            raise error

    def note_unreachable(self) -> None:
        """The store does not answer: leases that lapse now may be of processes that live."""
        self.unreachable_at = self._clock.monotonic()

    def look(self) -> None:
        """Renew the leases that are due, report the lost ones, and retry the releases that failed."""
        if self._unreleased:
            self._release()
        if (thread := self._thread) and thread is not threading.current_thread() and thread.is_alive():
            return  # that thread renews them; each of many runs would look at the leases of all
        now = self._clock.monotonic()
        with self._mutex:
            wanted = any(now > lease.until - lease.seconds + lease.renewed_after for lease in self._held.values())
        if wanted and self._keeping.acquire(blocking=False):
            try:
                self._keep()
            finally:
                self._keeping.release()

    def close(self) -> None:
        """Stop renewing all leases."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # inside -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        # With a manual clock, the driver of the run renews its leases.
        if self._thread is None and isinstance(self._clock, SystemClock):
            self._thread = start_thread("killick-leases", self._keep_on, died=self._thread_died)

    def _thread_died(self, _: BaseException) -> None:
        """From now on the drivers of the runs renew the leases; the next run starts another thread."""
        self._thread = None

    def _release(self) -> StoreError | None:
        """Releases pending leases. Returns the error of a failed release."""
        failed: StoreError | None = None
        with self._mutex:
            unreleased = list(self._unreleased.items())
        for (run, epoch), left in unreleased:
            try:
                self._store.release(run, epoch=epoch, holder=self._holder, left=left)
            except StoreClosed:
                pass  # its locks are gone with it
            except StoreError as error:
                failed = error
                self.note_unreachable()
                continue
            except KillickError:
                pass  # it is not ours any more
            with self._mutex:
                self._unreleased.pop((run, epoch), None)
        if failed is not None:
            with self._mutex:
                self._begin()
        return failed

    def _keep(self) -> None:
        with self._mutex:
            held = list(self._held.values())
        if not held:
            return
        seconds = max(lease.seconds for lease in held)
        since = self._clock.monotonic()
        try:
            kept = self._store.renew(self._holder, [lease.run for lease in held], seconds=seconds)
            lost = [lease for lease in held if kept.get(lease.run) != lease.epoch]
            heads = {lease.run: self._store.head(lease.run) for lease in lost}
        except Exception as error:  # the thread that renews leases must survive any error of one try
            self.note_unreachable()
            logger.warning("leases of %s could not be kept, and are tried again: %s", self._holder, error)
            return
        for lease in held:
            head = heads.get(lease.run)
            if lease.run not in heads:
                lease.until = since + seconds
            elif head is not None and self._held.get(lease.run) is lease:
                # A run that is not written yet has no head, so no other worker could have leased it.
                taken = head.epoch != lease.epoch
                if not taken and head.holder == self._holder and since < lease.until:
                    continue  # its row was locked; the next look renews it
                report = lease.lost
                self.drop(lease)
                reason: LogError = (
                    EpochStale(lease.run, held=lease.epoch, actual=head.epoch) if taken else LeaseLost(lease.run)
                )
                # A listener that fails, say because its loop was closed, does not stop the others.
                with contextlib.suppress(Exception):
                    report(reason)

    def _keep_on(self) -> None:
        while not self._stop.wait(self._nap_seconds()):
            self.look()

    def _nap_seconds(self) -> float:
        with self._mutex:
            idle = 1.0 if self._unreleased else self._last_seconds
            return min(min((lease.seconds for lease in self._held.values()), default=idle) / _SHARE / 2, 5.0)
