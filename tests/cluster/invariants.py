"""What must hold after every operation of the store, and at every effect: checked from outside the code under test.

The checker keeps its own copy of every head. So it knows the state before an operation without asking the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from cluster.fibers import Process
from killick.errors import LogError
from killick.model import event_codec, hashing, system_events
from killick.model import events as e
from killick.store import MemoryStore
from killick.store.memory_runs import lease_end_us
from killick.store.records import ENDED, Append, Head, is_own

KILLICKS_OWN: Final = ("killick.child", "killick.command")
"""Messages that a run may get after its end: a child's end, and the word of a fork."""

LIMITED: Final = "cluster_mail"
AT_ONCE: Final = 2
"""So many calls of that tool may be in flight at once."""


class Broken(AssertionError):
    """An invariant does not hold. `rule` names it, the same for every seed that breaks it."""

    def __init__(self, rule: str, story: str) -> None:
        super().__init__(f"{rule}: {story}")
        self.rule = rule


class Invariants:
    """The rules of the log, of leases, waits, messages and firings."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self.checks = 0
        self.intended: set[str] = set()
        """The keys of the attempts whose start is on record."""
        self.completed: set[tuple[str, int]] = set()
        """The events for which hooks are declared."""
        self._fail = fail
        self._heads: dict[str, Head] = {}
        self._epochs: dict[str, int] = {}
        self._owners: dict[str, Process] = {}
        self._waits: dict[tuple[str, str], bool] = {}
        self._messages: set[tuple[str, int]] = set()
        self._firings: set[tuple[str, str, int]] = set()
        self._fired_runs: set[str] = set()
        self._limited: set[tuple[str, str]] = set()
        self._in_flight: dict[tuple[str, str], None] = {}

    def broken(self, rule: str, story: str) -> None:
        self._fail(Broken(rule, story))

    def failed_over(self, store: MemoryStore) -> None:
        """The store lost its last commits: what is on record now is what counts."""
        self._heads = {head.run: head for _, head in store.heads(limit=1_000_000)}
        self._epochs = {run: head.epoch for run, head in self._heads.items()}
        intended, self.intended, self.completed = self.intended, set(), set()
        self._waits, self._messages, self._firings, self._fired_runs = {}, set(), set(), set()
        self._limited, self._in_flight = set(), {}
        for run in self._heads:
            for row in store.read(run, limit=1_000_000):
                self._event(run, row.seq, event_codec.decode(row.body))
        self.intended |= intended  # what was on record when its effect began

    # operations ---------------------------------------------------------------------------------

    def check(self, process: Process, store: MemoryStore, name: str, args: Any, options: Any, result: Any) -> None:
        """Checks an operation that was done. One that the store refused must have changed nothing."""
        self.checks += 1
        match name:
            case "append":
                self._appended(process, store, args[0], result or [None] * len(args[0]))
            case "lease":
                self._own(process, args[1])
                if result is not None:
                    self._taken(process, store, result, handed=options.get("handed"))
            case "claim":
                self._own(process, args[0])
                for each in result or ():
                    self._taken(process, store, each.head)
            case "renew":
                self._renewed(process, store, args[0], result or {})
            case "release":
                self._released(process, store, args[0], options)
            case "deliver":
                self._delivered(process, store, result or ())
            case _:
                pass

    def _own(self, process: Process, holder: str) -> None:
        if self._owners.setdefault(holder, process) is not process:
            self.broken("one process per holder name", f"{holder} is {self._owners[holder].name} and {process.name}")

    def _taken(self, process: Process, store: MemoryStore, head: Head, handed: int | None = None) -> None:
        was = self._heads.get(head.run)
        if was is None:
            self.broken("a lease is of a known run", f"{process.name} got {head.run}")
            return
        if was.epoch != handed and lease_end_us(was) > store.now_us():
            left = (lease_end_us(was) - store.now_us()) / 1e6
            told = f"{process.name} took {head.run} from {was.holder}, whose lease lasts {left:.3f} s more"
            self.broken("no lease is taken before it ends by the store's clock", told)
        if head.epoch <= self._epochs[head.run]:
            told = f"{process.name} took {head.run} at epoch {head.epoch}, and {self._epochs[head.run]} was given"
            self.broken("every lease has an epoch of its own", told)
        self._epochs[head.run] = head.epoch
        self._heads[head.run] = head

    def _renewed(self, process: Process, store: MemoryStore, holder: str, result: dict[str, int]) -> None:
        for run, epoch in result.items():
            was, now = self._heads[run], store.head(run)
            assert now is not None
            if was.holder != holder or was.epoch != epoch:
                self.broken("only its holder renews a lease", f"{holder} renewed {run}, held by {was.holder}")
            if lease_end_us(was) <= store.now_us():
                late = (store.now_us() - lease_end_us(was)) / 1e6
                told = f"{process.name} renewed {run} {late:.3f} s after its lease ended"
                self.broken("no lease is renewed after its end", told)
            self._heads[run] = now

    def _released(self, process: Process, store: MemoryStore, run: str, options: dict[str, Any]) -> None:
        was, now = self._heads.get(run), store.head(run)
        if was is None or now is None or was == now:
            return
        if was.epoch != options["epoch"]:
            told = f"{process.name} released {run} at epoch {options['epoch']}, and it is {was.epoch}"
            self.broken("a stale epoch releases nothing", told)
        self._heads[run] = now

    def _delivered(self, process: Process, store: MemoryStore, results: Sequence[Any]) -> None:
        """A caller's message is for a run that goes on."""
        for result in results:
            if isinstance(result, LogError) or not result.fresh or result.message.name in KILLICKS_OWN:
                continue
            row = store.index(result.message.run)
            if row is not None and row.status in ENDED and not is_own(row.run):
                told = f"{process.name} sent {result.message.name} to {row.run}, which is {row.status}"
                self.broken("no message is accepted by a run that is over", told)

    def _appended(self, process: Process, store: MemoryStore, items: Sequence[Append], results: Sequence[Any]) -> None:
        touched: dict[str, None] = {}
        for item, result in zip(items, results, strict=True):
            for one in item.group:
                touched[one.run] = None
                was = self._heads.get(one.run)
                if isinstance(result, LogError | None) or was is None or one.last[0] <= was.seq or not one.rows:
                    continue
                if one.epoch != was.epoch:
                    told = (
                        f"{process.name} appended {one.after + 1}… to {one.run} at epoch {one.epoch}, not {was.epoch}"
                    )
                    self.broken("a stale epoch appends nothing", told)
                if was.holder is not None and not is_own(one.run) and self._owners.get(was.holder) is not process:
                    told = f"{process.name} appended to {one.run}, held by {was.holder}"
                    self.broken("one writer per epoch", told)
        for run in touched:
            self._extended(process, store, run)

    def _extended(self, process: Process, store: MemoryStore, run: str) -> None:
        """A log only grows, and every event links to the one before."""
        was, now = self._heads.get(run), store.head(run)
        if now is None:
            return
        seq, hash_ = (was.seq, was.hash) if was is not None else (0, hashing.genesis(store.id, run))
        if now.seq < seq:
            self.broken("no acknowledged event is lost", f"{run} had {seq} events and has {now.seq}")
        for at in range(seq + 1, now.seq + 1):
            row = store.row(run, at)
            if row is None or hashing.link(hash_, row.body) != row.hash:
                self.broken(
                    "the chain is intact", f"{run}: event {at} by {process.name} does not link to the one before"
                )
                return
            hash_ = row.hash
            self._event(run, at, event_codec.decode(row.body))
        if hash_ != now.hash:
            self.broken("the chain is intact", f"{run}: its head is not its last event")
        self._heads[run] = now
        self._epochs[run] = max(self._epochs.get(run, 0), now.epoch)

    def _event(self, run: str, seq: int, event: e.Event) -> None:
        match event:
            case e.StepStarted() | e.AttemptStarted():
                self.intended.add(event.key)
                self._called(run, event)
            case e.StepIntended() if event.name == LIMITED:
                self._limited.add((run, event.step))
            case e.AttemptEnded() | e.AttemptSettled():
                self._in_flight.pop((run, event.step), None)
            case e.WaitOpened():
                self._waits[run, event.step] = True
            case e.WaitClosed():
                if not self._waits.get((run, event.step)):
                    self.broken("every wait is answered at most once", f"{run}: event {seq} closes {event.step} again")
                self._waits[run, event.step] = False
            case e.MessageTaken():
                if (run, event.message) in self._messages:
                    self.broken("every message is taken at most once", f"{run}: message {event.message} at {seq}")
                self._messages.add((run, event.message))
            case system_events.TriggerFired():
                for place in ((run, "number", event.number), (run, "due", event.due or -event.number)):
                    if place in self._firings:
                        self.broken("every firing happens once", f"{run}: {place[1]} {place[2]} again at {seq}")
                    self._firings.add(place)
                if event.run in self._fired_runs:
                    self.broken("every firing happens once", f"{run}: {event.run} again at {seq}")
                self._fired_runs.add(event.run)
            case e.RunCompleted() | e.RunFailed():
                if not is_own(run):
                    self.completed.add((run, seq))
            case _:
                pass

    def _called(self, run: str, event: e.StepStarted | e.AttemptStarted) -> None:
        """An attempt is in flight from its start to its outcome, and one that a death left open until that is settled:
        judged by the logs alone, without regard to permits."""
        if isinstance(event, e.StepStarted) and event.name == LIMITED:
            self._limited.add((run, event.step))
        if (run, event.step) in self._limited:
            self._in_flight[run, event.step] = None
            if len(self._in_flight) > AT_ONCE:
                told = ", ".join(f"{run}:{step}" for run, step in self._in_flight)
                self.broken("never more calls at once than a limit allows", told)


# the external system --------------------------------------------------------------------------------

ONCE: Final = ("pay", "book")


class Books:
    """The external system's own record of what tools did. A label names one effect that may happen once."""

    def __init__(self, invariants: Invariants) -> None:
        self._invariants = invariants
        self.done: Counter[str] = Counter()
        self.keys: dict[str, str] = {}
        """The label of each key that was done."""
        self.requests = 0
        self.tolerates_twice = False
        """After a fail-over that lost commits, only effects under a key that the system honours happen once."""

    def do(self, tool: str, label: str, key: str) -> str:
        self.requests += 1
        if key not in self._invariants.intended:
            self._invariants.broken("no effect without its intention on record", f"{tool} of {label}")
        if tool == "mail" and key in self.keys:
            return f"{label} done"  # the system honours the key
        if self.done[label] and not self.tolerates_twice:
            self._invariants.broken("no effect happens twice", f"{tool} of {label}")
        self.done[label] += 1
        self.keys[key] = label
        return f"{label} done"
