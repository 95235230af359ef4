"""Diagnoses a store: the preconditions of its guarantees, and stuck runs with their reasons. Read-only.

Reads listings and the ends of logs, and reports what it skipped, so that it stays fast for any number of runs. It
explains each finding and its remedy; callers format them.
"""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from killick.clock import Clock
from killick.errors import KillickError
from killick.history import vaults
from killick.history.run_info import blocked_by
from killick.log import verification
from killick.log.log import Log
from killick.model import events as e
from killick.model.facts import LIVE
from killick.store.protocol import Store
from killick.store.records import ENDED, OWN_AGENTS, READ_LIMIT, Condition, RunQuery, RunRow
from killick.version import VERSION

COUNTED_MAX: Final = 100_000
"""Beyond this many runs, only the newest are counted."""

LOOKED_MAX: Final = 1_000
"""The number of runs of one status whose heads are read."""

FOLDED_MAX: Final = 200
"""The number of runs whose logs are read, to find what they wait for."""

FILES_MAX: Final = 50
"""The number of runs whose workspaces are checked."""

NAMED_MAX: Final = 3
"""The number of runs that a finding names; the others are counted."""

LATE_US: Final = 60_000_000
"""How long a run may be due before a worker should have taken it."""

SILENT_US: Final = 3_600_000_000
SKEW_US: Final = 1_000_000

VERIFIED_US: Final = 30 * 86_400_000_000
"""After which time a verification is old, where no worker's interval says it."""

Words = tuple[str, ...]


class Named(msgspec.Struct, frozen=True):
    """A run of a finding, since when, and its own details."""

    run: str
    agent: str
    since_us: int
    about: str = ""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Runs with the same problem: its explanation, and the commands to type (after `killick`).

    `wrong` is False if it may be intended. `count` is the total, `runs` names the first.
    """

    reason: str
    wrong: bool
    count: int
    what: str
    means: str
    next: tuple[Words, ...]
    runs: tuple[Named, ...]


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The condition of a store. `unseen` lists what was skipped."""

    store: str
    id: str
    killick: str
    python: str
    conditions: tuple[Condition, ...]
    runs: dict[str, int]
    findings: tuple[Finding, ...]
    unseen: tuple[str, ...]

    @property
    def wrong(self) -> int:
        """The number of problems."""
        return sum(each.wrong is not None for each in self.conditions) + sum(each.wrong for each in self.findings)


class _Reason(msgspec.Struct, frozen=True):
    """A reason to be stuck: its text for one run and for several, and the commands, in which RUN is the first."""

    one: str
    several: str
    means: str
    next: tuple[Words, ...]
    wrong: bool = True


_WORKER: Final = ("worker",)
_BY_HAND: Final = ("run", "--id", "RUN")
_REASONS: Final = {
    "broken": _Reason(
        "run fails verification and is quarantined", "runs fail verification and are quarantined",
        "No process continues it before it is repaired.", (("store", "repair", "RUN"),),
    ),
    "left": _Reason(
        "run is abandoned, and no worker takes it", "runs are abandoned, and no worker takes them",
        "Its process died. Is a worker for {agents} running?", (_WORKER, _BY_HAND),
    ),
    "queued": _Reason(
        "run is queued, and no worker takes it", "runs are queued, and no worker takes them",
        "Is a worker for {agents} running, and has it slots to spare?", (_WORKER, _BY_HAND),
    ),
    "due": _Reason(
        "run is due and not continued", "runs are due and not continued",
        "What was waited for is there, or its time is up. Is a worker for {agents} running, and has it slots to spare?",
        (_WORKER, _BY_HAND),
    ),
    "child": _Reason(
        "run waits for a child that is over", "runs wait for children that are over",
        "Its end was not delivered, or it was removed. A resumed run looks again.", (_BY_HAND,),
    ),
    "doubt": _Reason(
        "effect is in doubt, and waits for a person", "effects are in doubt, and wait for a person",
        "Its process died during it. Look for its idempotency key in the remote system, then answer.", (("inbox",),),
    ),
    "diverged": _Reason(
        "run waits for fixed code", "runs wait for fixed code",
        "The code diverges from the record. Fix it and restart the workers, or resume the run.",
        (("show", "RUN"), ("resume", "RUN")),
    ),
    "quarantined": _Reason(
        "run is quarantined, because its process died again and again",
        "runs are quarantined, because their processes died again and again",
        "See where it died. Fix the code, then resume the run, or cancel it.",
        (("show", "RUN"), ("resume", "RUN")),
    ),
    "repaired": _Reason(
        "run was repaired and waits for a person", "runs were repaired and wait for a person",
        "See what may have happened in the part that was set aside, then resume the run.",
        (("show", "RUN"), ("resume", "RUN")),
    ),
    "endless": _Reason(
        "run is held without end", "runs are held without end",
        "If the holder dies, no other process can detect it and take over. Give such clients lease_seconds.",
        (("show", "RUN"),),
    ),
    "unknown": _Reason(
        "run is of an agent that the app does not declare", "runs are of agents that the app does not declare",
        "No code here runs {agents}: declare it again, or give the name to its successor as an alias.",
        (("ps", "--agent", "AGENT"),),
    ),
    "trigger": _Reason(
        "trigger is behind", "triggers are behind",
        "Its runs were not started. Is a worker running, with the app that declares it?", (_WORKER,),
    ),
    "hook": _Reason(
        "hook is behind", "hooks are behind",
        "Events were not delivered yet. Is a worker running, with the app that declares it and its secret?", (_WORKER,),
    ),
    "silent": _Reason(
        "run is held by a process that lives and says nothing", "runs are held by processes that live and say nothing",
        "A long step, or a process that hangs. When that process ends, another can continue the run.",
        (("show", "RUN"),), wrong=False,
    ),
}  # fmt: skip
"""Every reason to be stuck, the worst first."""


def examine(log: Log, *, clock: Clock, knows: Callable[[str], bool] | None = None) -> Diagnosis:
    """Diagnoses a store. `knows` tests whether an agent's code is available."""
    store = log.store
    look = _Scan(log, clock.now_us())
    look.check_all(knows)
    conditions = tuple(store.conditions())
    if all(each.name != "clock" for each in conditions):
        conditions += (_clocks(store, clock),)
    files = vaults.condition(log, [row.run for row in store.runs(RunQuery(status=LIVE), limit=FILES_MAX)])
    conditions += tuple(each for each in (files, _verified(log, clock.now_us())) if each is not None)
    return Diagnosis(
        store=store.place, id=store.id, killick=VERSION, python=platform.python_version(),
        conditions=conditions, runs=dict(look.counts), findings=tuple(look.findings()), unseen=tuple(look.unseen),
    )  # fmt: skip


def _clocks(store: Store, clock: Clock) -> Condition:
    """Compares clocks: leases end by the store's clock, and deadlines by the worker's."""
    if store.proves_life:
        return Condition("clock", "leases end by the machine's own, whatever its wall clock says")
    before = clock.now_us()
    there = store.now_us()
    ahead_us = there - (before + clock.now_us()) // 2
    apart = f"{abs(ahead_us) / 1_000_000:.1f} s {'behind' if ahead_us > 0 else 'ahead of'} the store's"
    if abs(ahead_us) < SKEW_US:
        return Condition("clock", "as the store's" if abs(ahead_us) < SKEW_US // 10 else apart)
    return Condition("clock", apart, "deadlines and leases pass at the wrong time; let both keep time, with NTP")


def _verified(log: Log, now_us: int) -> Condition | None:
    """The last complete verification, where one was recorded."""
    try:
        newest, found = verification.newest(log), verification.complete(log)
    except KillickError:
        return None
    if newest is None:
        return None
    late_us = 2 * newest.event.every if newest.event.every else VERIFIED_US
    if found is None:
        is_late = now_us - newest.event.began > late_us
        return Condition("verified", "never completely", "killick store verify continues" if is_late else None)
    days = (now_us - found.event.at) // 86_400_000_000
    value = f"{found.event.runs:,} runs, {days} days ago" if days else f"{found.event.runs:,} runs, within a day"
    if found.event.problems:
        return Condition("verified", value, f"{found.event.problems} problems; killick store verify names them")
    wrong = "long ago; is a worker with --verify-every running? killick store verify does it now"
    return Condition("verified", value, wrong if now_us - found.event.at > late_us else None)


class _Scan:
    """One pass over a store's runs."""

    def __init__(self, log: Log, now_us: int) -> None:
        self._log, self._store, self._now_us = log, log.store, now_us
        self._found: defaultdict[str, list[Named]] = defaultdict(list)
        self._known: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.unseen: list[str] = []

    def findings(self) -> Iterator[Finding]:
        """Returns all findings, the worst first, and within each the oldest first."""
        for name, reason in _REASONS.items():
            if not (runs := sorted(self._found[name], key=lambda named: named.since_us)):
                continue
            agents = list(dict.fromkeys(named.agent for named in runs))
            stands_for = {"RUN": runs[0].run, "AGENT": runs[0].agent}
            yield Finding(
                reason=name, wrong=reason.wrong, count=len(runs), runs=tuple(runs[:NAMED_MAX]),
                what=reason.several if runs[1:] else reason.one, means=reason.means.format(agents=_listed(agents)),
                next=tuple(tuple(stands_for.get(word, word) for word in words) for words in reason.next),
            )  # fmt: skip

    def check_all(self, knows: Callable[[str], bool] | None) -> None:
        """Checks each run that may be stuck, and files it under the first matching reason."""
        rows = self._rows()
        self._broken(rows)
        self._due()
        for row in self._first(rows["running"], LOOKED_MAX, "running"):
            self._running(row)
        waiting = sorted(rows["waiting"] + rows["code_mismatch"], key=lambda row: row.changed_at_us)
        for row in self._first(waiting, FOLDED_MAX, "waiting"):
            self._waiting(row)
        if knows is not None:
            agents = {row.agent for status in LIVE for row in rows[status]}
            strange = {agent for agent in agents if not knows(agent)}
            for row in (row for status in LIVE for row in rows[status] if row.agent in strange):
                self._found["unknown"].append(Named(row.run, row.agent, row.changed_at_us))

    def _say(self, reason: str, row: RunRow, since_us: int, about: str = "") -> None:
        """Reports a run once, under its first reason."""
        if row.run not in self._known:
            self._known.add(row.run)
            self._found[reason].append(Named(row.run, row.agent, since_us, about))

    def _rows(self) -> dict[str, list[RunRow]]:
        """Returns runs by status, newest first, and their counts; of ended runs only the newest."""
        found: dict[str, list[RunRow]] = {}
        room = COUNTED_MAX
        for status in (*LIVE, *ENDED):
            rows: list[RunRow] = []
            before: int | None = None
            while room > 0:
                page = self._store.runs(RunQuery(status=(status,)), before=before, limit=min(room, READ_LIMIT))
                room -= len(page)
                self.counts[status] += len(page)
                rows += page if status in LIVE else page[: max(LOOKED_MAX - len(rows), 0)]
                if len(page) < READ_LIMIT:
                    break
                before = page[-1].number
            found[status] = rows
        if room <= 0:
            self.unseen.append(f"runs beyond the newest {COUNTED_MAX:,}, if there are more")
        self.counts += Counter()  # without those of which there are none
        return found

    def _first(self, rows: Sequence[RunRow], limit: int, status: str) -> Iterable[RunRow]:
        fresh = [row for row in rows if row.run not in self._known]
        if len(fresh) > limit:
            self.unseen.append(f"{len(fresh) - limit:,} of {len(fresh):,} {status} runs")
        return fresh[:limit]

    def _broken(self, rows: dict[str, list[RunRow]]) -> None:
        """Quarantine is stored with each run, so the newest of each status are checked."""
        passed_over = 0
        for status, listed in rows.items():
            passed_over += self.counts[status] - len(listed[:LOOKED_MAX])
            for row in listed[:LOOKED_MAX]:
                reason = self._store.quarantined(row.run)
                if reason is not None:
                    self._say("broken", row, row.changed_at_us, reason)
        if passed_over:
            self.unseen.append(f"whether {passed_over:,} older runs hold (killick store verify proves all)")

    def _due(self) -> None:
        """Finds unheld runs that a worker should have taken."""
        due = self._store.due(self._now_us, limit=READ_LIMIT)
        if len(due) == READ_LIMIT:
            self.unseen.append(f"runs that are due, beyond the first {READ_LIMIT:,}")
        for count, row in enumerate(due):
            since = row.wake_at_us if row.wake_at_us is not None else row.changed_at_us
            if self._now_us - since < LATE_US:
                continue
            head = self._store.head(row.run) if count < LOOKED_MAX else None
            if row.agent.startswith(OWN_AGENTS):
                about = (head and self._event(row.run, head.seq) and blocked_by(self._log, head)) or ""
                self._say("hook" if row.agent.startswith(f"{OWN_AGENTS}hook:") else "trigger", row, since, about)
            elif head is not None and head.holder is not None:
                self._say("left", row, since, f"by {head.holder}")
            elif row.status in ("queued", "running"):
                self._say("queued" if row.status == "queued" else "left", row, since)
            else:
                self._say("due", row, since)

    def _running(self, row: RunRow) -> None:
        head = self._store.head(row.run)
        if head is None:
            return
        if head.holder is None:
            if row.wake_at_us is None:
                self._say("left", row, row.changed_at_us, "by an unknown process")
        elif head.lease_until_us is None and self._store.lives(head.holder):
            if not self._store.proves_life:
                self._say("endless", row, row.changed_at_us, f"by {head.holder}")
            elif (last := self._event(row.run, head.seq)) is not None and self._now_us - last.at > SILENT_US:
                self._say("silent", row, last.at, f"by {head.holder}")

    def _waiting(self, row: RunRow) -> None:
        try:
            facts = self._log.state(row.run).fold.facts
        except KillickError:
            return  # `verify` reports it
        if facts.mend:
            what = self._event(row.run, facts.mend)
            at = f"at step {what.step}" if isinstance(what, e.RunDiverged) else ""
            if isinstance(what, e.RunQuarantined):
                self._say("quarantined", row, row.changed_at_us, f"after {what.deaths} deaths")
            else:
                self._say("diverged" if at else "repaired", row, row.changed_at_us, at)
            return
        for wait in facts.waits.values():
            if wait.waits_for == "child" and self._is_over(wait.name) and self._now_us - wait.at > LATE_US:
                self._say("child", row, wait.at, wait.name)
            elif wait.waits_for == "settlement":
                self._say("doubt", row, wait.at, f"step {wait.step}")

    def _is_over(self, run: str) -> bool:
        """Returns whether a run and its continuations have ended or are gone."""
        row = self._store.index(run)
        if row is None:
            return True
        if row.status not in ENDED:
            return False
        head = self._store.head(run)
        last = self._event(run, head.seq) if head is not None else None
        return self._is_over(last.run) if isinstance(last, e.RunRenewed) else True

    def _event(self, run: str, seq: int) -> e.Event | None:
        with suppress(KillickError):
            return self._log.event(run, seq)
        return None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX:,} others" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more
