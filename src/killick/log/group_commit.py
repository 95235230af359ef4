"""Group commit: batches the appends of all runs of a process. Owns no data and reads no events.

With one active run and a fast disk, the waiting caller commits inline. When several wait, one of them commits for all.
When commits are slow, a thread commits, so that no event loop blocks. Measured latency decides at run time. Appends of
one run commit in submission order.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from killick.clock import Clock, SystemClock
from killick.errors import LogError
from killick.fork_safety import ForkedMutex, register_for_forks
from killick.log.append_groups import Ticket, grouped, joined, results_of
from killick.log.switch_interval import hurry, reset_hurry
from killick.store.protocol import Store
from killick.store.records import Append, Head, Row
from killick.threads import start_thread

if TYPE_CHECKING:
    import asyncio

GROUP_MAX: Final = 512
"""The maximum number of appends in one commit."""

QUEUE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The limit of uncommitted bytes; beyond it a submitter must commit first."""

BEHIND_SECONDS_MAX: Final = 0.001
"""How long a write-behind append may wait for others to join its commit."""

TURN_SECONDS_MAX: Final = 0.01
"""How long appends wait for the end of the loop's turn, which commits those of all its tasks at once."""

AGAIN_SECONDS_MAX: Final = 0.1
"""How long an append may wait that another process would make again after a crash."""

SLOW_COMMIT_SECONDS: Final = 0.001
_IDLE_ROUNDS: Final = 40
_MIXED: Final = 8
_MEASURED: Final = 16
_TRIED_AGAIN: Final = 64
"""After so many commits by the thread, a loop commits again: the disk may be quick now."""


class Tail:
    """The write-behind events of one run that are in no append yet. The committer's mutex guards it."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.start: tuple[int, bytes, int] = (0, b"", 0)
        """The head before its first event, and the epoch."""
        self.rows: list[Row] = []
        self.size_bytes = 0
        self.last: Ticket | None = None
        """The run's newest write-behind append that was queued."""

    def detached(self) -> Ticket:
        """Returns its events as an append."""
        after, before, epoch = self.start
        item = Append(run=self.run, after=after, before=before, epoch=epoch, rows=tuple(self.rows))
        self.last = ticket = Ticket(item)
        ticket.size_bytes, self.rows, self.size_bytes = self.size_bytes, [], 0
        return ticket


class Committer(ForkedMutex):
    """The only path from a process into its store."""

    def __init__(
        self, store: Store, clock: Clock, *, queue_bytes_max: int = QUEUE_BYTES_MAX, behind: bool = True
    ) -> None:
        self._store = store
        self._clock = clock
        self._behind = behind
        self._queue_bytes_max = queue_bytes_max
        self._mutex = threading.Lock()
        self._queue: deque[Ticket] = deque()
        self._tails: dict[Tail, float] = {}
        self._behind_bytes = 0
        self._leading = False
        self._slow_disk = False
        self._suspected = False
        self._commits = -1
        self.live = 0
        """How many runs a loop of this process advances now: a single one commits in line from its first append on."""
        self._last_run = ""
        self._mixed = _MIXED
        self._flush_due = 0.0
        self._flush_loop: asyncio.AbstractEventLoop | None = None
        self._urgent = False
        self._thread: threading.Thread | None = None
        self._thread_id = 0
        self._wake = threading.Event()
        self._closed = False
        self._broken: BaseException | None = None
        self._open = 0
        register_for_forks(self)

    def after_fork_in_child(self) -> None:
        """Pending appends belong to the parent, which commits them."""
        self._closed, self._thread = True, None
        self._queue.clear()
        self._tails.clear()
        reset_hurry()

    # three ways in ----------------------------------------------------------------------------

    def commit(self, item: Append) -> Head:
        """Commits now and returns the new head. Threads that arrive meanwhile share the next commit."""
        behind = self._lead_alone(item.run)
        if behind is not None:
            return self._commit_alone(item, behind)
        ticket = Ticket(item)
        self.wait(ticket, lead=self._enqueue(ticket, waits=True))
        return ticket.result()

    def begin(self, item: Append) -> Ticket:
        """Commits together with the appends of other tasks in this turn of the loop; never blocks the loop on a slow
        disk.

        The ticket is done already, or has a future to await.
        """
        if item.run != self._last_run:
            self._last_run, self._mixed = item.run, _MIXED
        if self._mixed and self.live != 1:
            self._mixed -= 1
        elif not self._is_slow and (behind := self._lead_alone(item.run)) is not None:
            return Ticket(item, done=True, head=self._commit_alone(item, behind))
        loop = running_loop()
        ticket = Ticket(item, loop.create_future())
        self._enqueue(ticket, waits=False, lead=False)
        self._flush_soon(loop, loop.call_soon)
        return ticket

    def submit(self, *tickets: Ticket, urgent: bool = False, happens_again: bool = False) -> None:
        """Write-behind: commits with the next commit of any run, or by itself within two milliseconds. What another
        process would do again, such as taking a run or its message, is no loss: it waits longer for the next commit."""
        with self._mutex:
            for ticket in tickets:
                self._refuse_closed(ticket.item.run)
                again = TURN_SECONDS_MAX if ticket.item.create else AGAIN_SECONDS_MAX
                seconds = again if happens_again else BEHIND_SECONDS_MAX
                ticket.size_bytes, ticket.due = ticket.item.size_bytes, SystemClock.monotonic() + seconds
                self._behind_bytes += ticket.size_bytes
            self._queue.extend(tickets)
        self._added(urgent=urgent)

    def add_behind(self, tail: Tail, start: tuple[int, bytes, int], rows: Sequence[Row]) -> None:
        """As `submit`, for events alone. The run's next append may take them along."""
        if not self._behind and (queued := self._lead_alone(tail.run)) is not None:
            after, before, epoch = start
            item = Append(run=tail.run, after=after, before=before, epoch=epoch, rows=tuple(rows))
            try:
                self._commit_alone(item, queued)
            except Exception as refusal:
                tail.last = Ticket(item, done=True, error=refusal)
            return
        size_bytes = 0
        for row in rows:
            size_bytes += len(row.body) + len(row.data or b"")
        with self._mutex:
            self._refuse_closed(tail.run)
            if not tail.rows:
                tail.start = start
                self._tails[tail] = SystemClock.monotonic() + BEHIND_SECONDS_MAX
            tail.rows += rows
            tail.size_bytes += size_bytes
            self._behind_bytes += size_bytes
        self._added(urgent=False)

    def _added(self, *, urgent: bool) -> None:
        if not self._behind or self._behind_bytes > self._queue_bytes_max:
            self._lead_if_free()
        elif urgent or self._thread is None or not self._wake.is_set():
            self._stir(urgent=urgent)

    def take(self, tail: Tail) -> list[Row]:
        """Takes a tail's events for the run's next append; none if their commit has begun."""
        with self._mutex:
            if self._tails.pop(tail, None) is None:
                return []
            self._behind_bytes -= tail.size_bytes
            rows, tail.rows, tail.size_bytes = tail.rows, [], 0
            return rows

    def detach(self, tail: Tail) -> None:
        """Queues a tail as an append of its own."""
        with self._mutex:
            if self._tails.pop(tail, None) is not None:
                self._queue.append(tail.detached())

    def _detach_all(self) -> None:
        """Queues all tails. Called under the mutex."""
        self._queue.extend([tail.detached() for tail in self._tails])
        self._tails.clear()

    def hold_off(self, change: int) -> None:
        """Marks the start or the end of a step's transaction, which may block all writers: no loop commits
        meanwhile."""
        with self._mutex:
            self._open += change

    def finish(self, tickets: Sequence[Ticket], results: Sequence[Head | BaseException]) -> None:
        """Resolves each ticket and wakes its waiters."""
        with self._mutex:
            for ticket, result in zip(tickets, results, strict=True):
                if isinstance(result, BaseException):
                    ticket.error = result
                else:
                    ticket.head = result
                ticket.done = True
        waiting: dict[asyncio.AbstractEventLoop, list[Ticket]] = {}
        for ticket in tickets:
            if ticket.gate is not None:
                ticket.gate.release()
            if ticket.future is not None:
                waiting.setdefault(ticket.future.get_loop(), []).append(ticket)
        here = current_loop() if waiting else None
        for loop, done in waiting.items():
            if loop is here:
                _resolve(done)
            else:
                with contextlib.suppress(RuntimeError):  # a closed loop has no waiters
                    loop.call_soon_threadsafe(_resolve, done)

    # waiting ----------------------------------------------------------------------------------

    def wait(self, ticket: Ticket, *, lead: bool = False) -> None:
        """Waits until the ticket is done; commits it here if no other thread does."""
        while not ticket.done:
            if not lead:
                with self._mutex:
                    if ticket.done:
                        return
                    lead = not self._leading
                    self._leading = True
                    if not lead:
                        ticket.gate = ticket.gate or _shut()
            if lead:
                self._drain(ticket)
            else:
                assert ticket.gate is not None
                ticket.gate.acquire()
                lead = ticket.promoted
                ticket.promoted = False

    async def wait_soon(self, ticket: Ticket) -> None:
        """As `wait`, from a loop. Several tasks may wait for one ticket; cancelling one does not affect the others."""
        import asyncio

        loop = asyncio.get_running_loop()
        while True:
            with self._mutex:
                if ticket.done:
                    return
                if ticket.future is None or ticket.future.done():
                    ticket.future = loop.create_future()
                future = ticket.future
            self._flush_soon(loop, loop.call_soon)
            await asyncio.wait({future})

    def close(self) -> None:
        """Commits pending appends, then stops."""
        with self._mutex:
            self._closed = True
            self._detach_all()
            last = self._queue[-1] if self._queue else None
        if last is not None:
            self.wait(last)
        if self._thread is not None:
            self._wake.set()
            self._thread.join()

    # inside -----------------------------------------------------------------------------------

    def _enqueue(self, ticket: Ticket, *, waits: bool, lead: bool = True) -> bool:
        """Queues a ticket. True: the caller is the leader and must drain the queue."""
        with self._mutex:
            self._refuse_closed(ticket.item.run)
            self._queue.append(ticket)
            self._behind_bytes += ticket.size_bytes
            if lead and not self._leading:
                self._leading = True
                return True
            if waits:
                ticket.gate = _shut()
            return False

    def _refuse_closed(self, run: str) -> None:
        self.refuse_broken()
        if self._closed:
            raise LogError(f"{run}: the log is closed; open it again")

    def refuse_broken(self) -> None:
        """Raises LogError once the thread has ended by an error: nothing that was queued since is written."""
        if (error := self._broken) is not None:
            why = f"{type(error).__name__}: {error}"
            raise LogError(f"the thread that commits has ended ({why}); restart this process") from error

    def _give_up(self, error: BaseException) -> None:
        """The thread has ended. Refuses every append, and those that are queued, so that no caller waits for ever."""
        with self._mutex:
            self._closed, self._broken = True, error
        pause = threading.Event()
        while self._leading:  # a caller commits, which takes a part of the queue
            pause.wait(BEHIND_SECONDS_MAX)
        with self._mutex:
            self._detach_all()
            pending = list(self._queue)
            self._queue.clear()
            self._behind_bytes = 0
        try:
            self.refuse_broken()
        except LogError as refusal:
            self.finish(pending, [refusal] * len(pending))

    def _lead_alone(self, run: str) -> list[Ticket] | None:
        """The fast path: leads at once if no commit is running and only this run's write-behind appends are queued.

        Returns those tickets, to be committed first; None: other runs are queued.
        """
        with self._mutex:
            if self._leading or self._closed or self._tails:
                return None
            for ticket in self._queue:
                if ticket.item.run != run or ticket.future is not None or ticket.gate is not None:
                    return None
            self._leading = True
            behind = list(self._queue)
            if behind:
                self._queue.clear()
                self._behind_bytes = 0
            return behind

    def _commit_alone(self, item: Append, behind: list[Ticket]) -> Head:
        try:
            if behind:
                ticket = Ticket(item)
                self._commit([*behind, ticket], hand_on=False)
            else:
                result = self._append((item,))[0]
                if isinstance(result, LogError):
                    raise result
                return result
        finally:
            with self._mutex:
                if self._queue:
                    self._hand_on()
                else:
                    self._leading = False
        return ticket.result()

    def _append(self, items: Sequence[Append]) -> list[Head | LogError]:
        """Appends to the store, and samples its wait time: two waits in a row, not CPU work, indicate a slow disk.

        The thread's own commits also wait for the interpreter's lock, so they tell nothing about the disk.
        """
        self._commits += 1
        if threading.get_ident() == self._thread_id:
            if not self._commits % _TRIED_AGAIN:
                self._slow_disk = False
            return self._store.append(items)
        if self._commits % _MEASURED and not self._suspected:
            return self._store.append(items)
        clock = self._clock
        began, worked = clock.monotonic(), clock.thread_seconds()
        results = self._store.append(items)
        waited = clock.monotonic() - began - (clock.thread_seconds() - worked)
        slow = waited > SLOW_COMMIT_SECONDS
        self._slow_disk, self._suspected = slow and self._suspected, slow
        return results

    @property
    def _is_slow(self) -> bool:
        return self._open > 0 or self._slow_disk

    def _flush_soon(self, loop: asyncio.AbstractEventLoop, schedule: Callable[[Callable[[], None]], object]) -> None:
        """Lets a loop commit at the end of its turn."""
        now = SystemClock.monotonic()
        if now >= self._flush_due or loop is not self._flush_loop:
            self._flush_due, self._flush_loop = now + TURN_SECONDS_MAX, loop
            schedule(self._flush)

    def _flush(self) -> None:
        """Commits what the loop's turn wrote, or lets the thread do it where the loop must not block."""
        self._flush_due = 0.0
        if self._is_slow:
            self._stir(urgent=True)
        else:
            self._lead_if_free()

    def _lead_if_free(self) -> None:
        """Commits the queue, unless a leader is active, which takes new tickets or hands them on."""
        with self._mutex:
            self._detach_all()
            if self._leading or not self._queue:
                return
            self._leading = True
            last = self._queue[-1]
        self._drain(last)

    def _drain(self, ticket: Ticket) -> None:
        """Leads until its own ticket is done, then hands the queue on."""
        while True:
            with self._mutex:
                self._detach_all()
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), GROUP_MAX))]
                self._behind_bytes -= sum([each.size_bytes for each in batch])
            if batch:
                self._commit(batch)
            with self._mutex:
                if ticket.done or not self._queue:
                    self._hand_on()
                    return

    def _hand_on(self) -> None:
        """Called under the mutex by a resigning leader."""
        self._leading = False
        if not self._queue:
            return
        heir = next((each for each in self._queue if each.gate is not None), None)
        if heir is not None and heir.gate is not None:
            self._leading = True
            heir.promoted = True
            heir.gate.release()
        else:
            future = self._queue[0].future
            self._stir(urgent=future is None)
            if future is not None:
                loop = future.get_loop()
                with contextlib.suppress(RuntimeError):  # a closed loop leaves it to the thread
                    self._flush_soon(loop, loop.call_soon_threadsafe)

    def _commit(self, batch: list[Ticket], *, hand_on: bool = True) -> None:
        results: Sequence[Head | BaseException]
        try:
            groups = grouped(batch)
            batch = [ticket for group in groups for ticket in group]
            results = results_of(groups, self._append([joined(group) for group in groups]))
        except BaseException as error:
            results = self._fail(batch, error)
            if not isinstance(error, Exception):
                self.finish(batch, results)
                if hand_on:
                    with self._mutex:
                        self._hand_on()  # other waiters must not wait for a leader that was interrupted
                raise
        self.finish(batch, results)

    def _fail(self, batch: list[Ticket], error: BaseException) -> Sequence[Head | BaseException]:
        """Nothing was written. Tickets that the error does not concern are committed one by one."""
        if len(batch) == 1 or not isinstance(error, Exception):
            return [error] * len(batch)
        results: list[Head | BaseException] = []
        for ticket in batch:
            try:
                results += self._append((ticket.item,))
            except Exception as own:
                results.append(own)
        return results

    # the thread -------------------------------------------------------------------------------

    def _stir(self, *, urgent: bool) -> None:
        self._urgent = self._urgent or urgent
        if self._thread is None:
            self._thread = start_thread("killick-committer", self._write_behind, died=self._give_up)
        if not self._wake.is_set():
            self._wake.set()

    def _write_behind(self) -> None:
        self._thread_id = threading.get_ident()
        hurry(+1)
        try:
            self._commit_behind()
        finally:
            hurry(-1)

    def _commit_behind(self) -> None:
        idle = 0
        while True:
            oldest = self._oldest()
            if oldest is None and self._closed:
                return
            if oldest is None and idle >= _IDLE_ROUNDS:
                self._sleep_until_stirred()
                idle = 0
                continue
            idle = 0 if oldest is not None else idle + 1
            if not self._urgent:
                due = SystemClock.monotonic() + BEHIND_SECONDS_MAX if oldest is None else oldest[1]
                time.sleep(min(max(due - SystemClock.monotonic(), 0.0), BEHIND_SECONDS_MAX))  # another may be sooner
            is_due = oldest is not None and oldest[1] <= SystemClock.monotonic() and self._oldest() == oldest
            if self._urgent or is_due:
                self._urgent = False
                self._lead_if_free()

    def _sleep_until_stirred(self) -> None:
        hurry(-1)
        try:
            self._wake.clear()
            if not self._queue and not self._tails and not self._closed:
                self._wake.wait()
        finally:
            hurry(+1)

    def _oldest(self) -> tuple[Ticket | Tail, float] | None:
        """Returns what is due first, and when: not before the loop's turn has had its time to end."""
        with self._mutex:
            waiting = [(each, each.due) for each in self._queue] + [*islice(self._tails.items(), 1)]
            first = min(waiting, key=itemgetter(1), default=None)
            return first and (first[0], max(first[1], self._flush_due))


def _shut() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


def running_loop() -> asyncio.AbstractEventLoop:
    """The loop of the caller. Imports asyncio here: a command that only reads logs starts without it."""
    import asyncio

    return asyncio.get_running_loop()


def current_loop() -> asyncio.AbstractEventLoop | None:
    """The loop of the caller; None where no loop runs."""
    try:
        return running_loop()
    except RuntimeError:
        return None


def _resolve(tickets: Sequence[Ticket]) -> None:
    """Ends the waits of tasks, in their loop."""
    for ticket in tickets:
        if (future := ticket.future) is None or future.done():
            continue
        if ticket.error is None:
            future.set_result(ticket.result())
        else:
            future.set_exception(ticket.error)
            future.exception()  # retrieved here: the ticket keeps it, and its task may be gone
