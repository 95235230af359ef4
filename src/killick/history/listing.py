"""One line about a run: its position, and its wait or failure, in the same words on every surface.

Reads only the displayed runs, and each again only when it changed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from killick.errors import KillickError, ValueErased
from killick.history.phrasing import arguments, build_text, crash_summary, cut, entries_of, inline, short
from killick.history.run_info import paused_because, pending_answer
from killick.log.log import Log
from killick.lru import Lru
from killick.model import events as e
from killick.model.crash_loop import Crashes
from killick.model.facts import LIVE, Wait
from killick.model.failure import Failure
from killick.model.fold import Fold
from killick.model.state import State
from killick.model.typed import convert
from killick.store.limits import limit_of
from killick.store.protocol import Store
from killick.store.records import CRASHING, KEY_DESTROYED, Head, RunQuery, RunRow, RunStatus, shown_tags

STATUSES: Final = (*LIVE, "completed", "failed", "cancelled", "abandoned")
"""The statuses of listings; a quarantined run is also broken. `abandoned` runs are not `running`: their holder died."""

KEPT_MAX: Final = 4_096
"""The number of cached lines."""

ABOUT_MAX: Final = 20
"""The maximum number of waits listed for one run."""

CHARS_MAX: Final = 400
"""The maximum length of a wait's or a failure's text."""

IDLE: Final = "idle: waits for your program's next call"
_STILL: Final = ("queued", "cancelled")

Kind = Literal[
    "person", "doubt", "time", "message", "child", "backoff", "crash", "failure", "code", "worker", "record", "more",
    "result", "answered", "program",
]  # fmt: skip


class RunReason(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for a wait, or the failure. `at` is the end of the wait."""

    kind: Kind
    text: str
    at_us: int | None = None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True, rename={"run": "id", "about": "reasons"}):
    """A run in one line. `stage` is number `stage_number` of `stages`; `entered` lists the stages reached, from 0.

    `attempts` are those of its current step. `seq` is 0 if the log was not read; then only the index fields are set.
    `cursor` continues a listing after it. `hosted`: external code makes the run's calls, and no worker continues it.
    """

    run: str
    agent: str
    status: str
    priority: int
    tags: tuple[str, ...]
    started_at_us: int
    changed_at_us: int
    ended_at_us: int | None = None
    cursor: str
    seq: int = 0
    stage: str | None = None
    stage_number: int | None = None
    stages: int = 0
    entered: tuple[int, ...] = ()
    step: str | None = None
    step_name: str | None = None
    attempts: int = 0
    about: tuple[RunReason, ...] = ()
    since_us: int | None = None
    due: bool = False
    worker: str | None = None
    build: str | None = None
    parent: str | None = None
    forked_from: str | None = None
    hosted: bool = False

    @property
    def where(self) -> str:
        """The stage, or the step, in a few words."""
        if self.stage is not None:
            at = f" {self.stage_number}/{self.stages}" if self.stage_number is not None else ""
            return f"{self.stage}{at}"
        return f"step {self.step} {self.step_name or ''}".rstrip() if self.step is not None else ""


class Listing:
    """Runs in lines, thread-safe. `whole` also reads runs whose index suffices for a short table."""

    def __init__(self, log: Log, *, whole: bool = False) -> None:
        self._log = log
        self._whole = whole
        self._kept: Lru[str, tuple[tuple[int, str, int], RunSummary]] = Lru(KEPT_MAX)

    def lines(self, rows: Sequence[RunRow], now_us: int) -> list[RunSummary]:
        """Returns the lines of a listing's runs, without those removed meanwhile."""
        store = self._log.store
        standings = store.statuses([row.run for row in rows])
        clock_us, lives = store.now_us(), cache(store.lives)

        def is_abandoned(head: Head) -> bool:
            has_ended = head.lease_until_us is not None and head.lease_until_us <= clock_us
            return head.holder is None or has_ended or not lives(head.holder)

        return [self._line(row, standings[row.run], is_abandoned, now_us) for row in rows if row.run in standings]

    def _line(self, row: RunRow, standing: RunStatus, is_abandoned: Callable[[Head], bool], now_us: int) -> RunSummary:
        is_read = self._whole or row.status not in _STILL or CRASHING in row.tags
        seq, status = standing.head.seq if is_read else 0, row.status
        if standing.quarantined is not None:
            status = "broken"
        elif status == "running" and is_abandoned(standing.head):
            status = "abandoned"
        kept = self._kept.get(row.run)
        if kept is None or kept[0] != (seq, status, row.delivered):
            kept = (seq, status, row.delivered), self._read(row, seq, status, standing.quarantined)
            self._kept.put(row.run, kept)
        due = row.status == "waiting" and row.wake_at_us is not None and row.wake_at_us <= now_us
        return replace(kept[1], due=due, worker=standing.head.holder, priority=row.priority, tags=shown_tags(row.tags))

    # reading ----------------------------------------------------------------------------------

    def _read(self, row: RunRow, seq: int, status: str, broken: str | None) -> RunSummary:
        line = RunSummary(
            run=row.run, agent=row.agent, status=status, priority=row.priority, tags=shown_tags(row.tags), seq=seq,
            started_at_us=row.started_at_us, changed_at_us=row.changed_at_us, cursor=str(row.number),
        )  # fmt: skip
        if status == "broken":
            text = KEY_DESTROYED if broken == KEY_DESTROYED else "its event log fails verification"
            return replace(line, about=(RunReason(kind="record", text=text),))
        try:
            if not self._whole and row.status == "failed":
                step, about = self._failed(row.run, seq, None)
                return replace(line, step=step, about=about)
            if not self._whole and row.status == "completed":
                return replace(line, about=self._result(row.run, seq))
            return line if not seq else self._standing(line, row)
        except KillickError as error:
            # One unreadable log must not hide the other runs.
            text = cut(f"cannot be read: {error}", CHARS_MAX)
            return replace(line, status="broken", about=(RunReason(kind="record", text=text),))

    def _standing(self, line: RunSummary, row: RunRow) -> RunSummary:
        state, status = self._log.state(line.run, line.seq), row.status
        facts = state.fold.facts
        step, about = self._failed(line.run, line.seq, state.fold) if status == "failed" else (facts.current, ())
        if status == "code_mismatch":
            step = getattr(self._log.event(line.run, facts.mend), "step", step)
        elif status == "waiting" and facts.waits and step not in facts.waits:
            step = next(iter(facts.waits))
        known = state.fold.step(step) if step is not None else None
        at = facts.plan.index(facts.stage) + 1 if facts.stage in facts.plan else None
        entered = tuple(n for n, stage in enumerate(facts.plan) if stage in facts.entered)
        line = replace(
            line, stage=facts.stage, stage_number=at, stages=len(facts.plan), step=step, about=about, entered=entered,
            step_name=known.name if known is not None and known.sort != "wait" else None,
            attempts=len(known.attempts) if known is not None else 0,
            build=build_text(facts.build) or None,
            parent=facts.parent, forked_from=facts.forked_from, hosted=facts.hosted,
            ended_at_us=self._log.event(line.run, facts.ended).at if facts.ended else None,
        )  # fmt: skip
        if status == "completed":
            return replace(line, about=self._result(line.run, facts.ended))
        if status not in ("running", "waiting", "code_mismatch", "paused") and facts.crashes is None:
            return line
        about = tuple(islice(self._about(state, row), ABOUT_MAX + 1))
        if len(about) > ABOUT_MAX:
            about = (*about[:-1], RunReason(kind="more", text=f"and {len(facts.waits) - ABOUT_MAX + 1} more"))
        if line.status == "abandoned":
            about = (RunReason(kind="worker", text="its process died"), *about)
        since = min((wait.at for wait in facts.waits.values()), default=None)
        return replace(line, about=about, since_us=since, changed_at_us=self._log.event(line.run, state.seq).at)

    def _about(self, state: State, row: RunRow) -> Iterator[RunReason]:
        """Returns a run's waits. One that was answered says so."""
        facts = state.fold.facts
        # Questions with an answer that the run has not taken.
        answered = {
            step: RunReason(kind="answered", text=found.text(state))
            for step, wait in (facts.waits.items() if row.delivered else ())
            if (found := pending_answer(self._log, state.run, wait)) is not None
        }
        asks = any(wait.waits_for == "settlement" for wait in facts.waits.values())  # then no worker tries again
        if facts.crashes is not None and not facts.ended and (facts.crashes.quarantined or not asks):
            yield crash(self._log, state.run, facts.crashes)
        if facts.crashes is not None and facts.crashes.quarantined:
            yield RunReason(kind="person", text="a person to resume or cancel it")
        elif facts.status == "code_mismatch":
            data = self._data(state.run, facts.mend)
            mismatch = f"fixed code: the log has {data.get('recorded')}, and the code has {data.get('found')}"
            yield RunReason(kind="code", text=cut(mismatch, CHARS_MAX))
            yield from answered.values()
            return  # no answer helps until then
        elif facts.paused or facts.mend:
            why = paused_because(self._log, state.run)
            because = ", because its record was repaired" if facts.mend else f" ({why})" if why else ""
            yield RunReason(kind="person", text=f"a person to resume it{because}")
        for wait in facts.waits.values():
            yield answered.get(wait.step) or self._waits(state.run, wait)
        if state.status == "waiting" and facts.hosted and not facts.waits:
            yield RunReason(kind="program", text=IDLE)
        for index in facts.pending.values():
            step = state.fold.steps[index]
            if step.status == "delayed" and step.queued:
                names = ", ".join(map(limit_of, step.queued))
                yield RunReason(kind="backoff", text=f"another call under limit {names} to end")
            elif step.status == "delayed" and step.delayed_until is not None:
                text = f"attempt {len(step.attempts) + 1} of {step.name}"
                yield RunReason(kind="backoff", text=text, at_us=step.delayed_until)

    def _waits(self, run: str, wait: Wait) -> RunReason:
        match wait.waits_for:
            case "time":
                return RunReason(kind="time", text="", at_us=wait.deadline or 0)
            case "event":
                return RunReason(kind="message", text=f"message {wait.name}")
            case "child":
                return RunReason(kind="child", text=wait.name)
            case _:
                data = self._data(run, wait.opened)
                asked, prompt = asked_of_intention(wait.waits_for, data.get("intention")), data.get("prompt")
                asked = asked or (prompt if isinstance(prompt, str) and prompt else wait.name)
                kind: Kind = "doubt" if wait.waits_for == "settlement" else "person"
                return RunReason(kind=kind, text=cut(f"{', '.join(wait.to)}: {asked}" if wait.to else asked, CHARS_MAX))

    def _failed(self, run: str, seq: int, fold: Fold | None) -> tuple[str | None, tuple[RunReason, ...]]:
        """Returns where and how a run failed; from its last event, if that says so."""
        event = self._log.event(run, seq)
        if not isinstance(event, e.RunFailed):
            seq = (fold or self._log.state(run).fold).facts.ended
            event = self._log.event(run, seq)
        step: str | None = getattr(event, "step", None)
        if not isinstance(found := self._data(run, seq).get("failure"), dict):
            return step, ()
        failure = convert(found, Failure, at="failure")
        while failure.type.endswith((".StepFailed", ".ChildFailed")) and failure.cause is not None:
            failure = failure.cause
        return step, (RunReason(kind="failure", text=cut(short(failure), CHARS_MAX)),)

    def _result(self, run: str, seq: int) -> tuple[RunReason, ...]:
        """Returns a run's result; from its last event, unless more was recorded since, such as a fork."""
        if not isinstance(self._log.event(run, seq), e.RunCompleted):
            seq = self._log.state(run).fold.facts.ended
        result = self._data(run, seq).get("result")
        text = result if isinstance(result, str) else inline(result)
        return (RunReason(kind="result", text=cut(text, CHARS_MAX)),) if result is not None else ()

    def _data(self, run: str, seq: int) -> Mapping[str, Any]:
        with contextlib.suppress(ValueErased):
            return self._log.data(run, seq)
        return {}


def crash(log: Log, run: str, crashes: Crashes) -> RunReason:
    """Describes a run's crashes: how many consecutive ones, where, and when a worker retries."""
    last = log.event(run, crashes.last)
    text = crash_summary(crashes, last if isinstance(last, e.LeaseLapsed) else None)
    return RunReason(kind="crash", text=text, at_us=None if crashes.quarantined else crashes.until)


def _holders(store: Store, *, lives: bool) -> tuple[str, ...]:
    return tuple(each.holder for each in store.holders() if each.lives == lives)


def selected(store: Store, query: RunQuery, *, before: int | None = None, limit: int) -> list[RunRow]:
    """Returns the rows of a listing, newest first. The index knows no abandoned runs: their holders tell them apart."""
    statuses = tuple(dict.fromkeys("running" if each == "abandoned" else each for each in query.status))
    if ("running" in query.status) == ("abandoned" in query.status):
        return store.runs(replace(query, status=statuses), before=before, limit=limit)
    others = tuple(status for status in statuses if status != "running")
    rows = store.runs(replace(query, status=others), before=before, limit=limit) if others else []
    if holders := _holders(store, lives="running" in query.status):
        rows += store.runs(replace(query, status=("running",), holders=holders), before=before, limit=limit)
    return sorted(rows, key=lambda row: -row.number)[:limit]


def counted(store: Store, query: RunQuery) -> Counter[str]:
    """Counts runs by status, of those that match in all else. Abandoned runs do not count as running."""
    counts = Counter(store.counts(query))
    if counts["running"] and (holders := _holders(store, lives=False)):
        counts["abandoned"] = store.counts(replace(query, holders=holders)).get("running", 0)
        counts["running"] -= counts["abandoned"]
    return +counts


def asked_of_intention(waits_for: str, intention: Any) -> str | None:
    """Returns an unknown outcome's question, which names the call."""
    entries = entries_of(intention)
    if waits_for != "settlement" or "arguments" not in entries:
        return None
    return f"Did {entries.get('tool')}({arguments(entries['arguments'], 200)}) happen?"
