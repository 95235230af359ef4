"""Overview: runs over time by status, their durations, failures and usage, and the response times of people.

Reads the index of the runs that started in a period, and the new events of their logs, for a bounded time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from killick.store.protocol import Store
from killick.store.records import ENDED, RunQuery, RunRow
from killick.web.handlers.run_list import StatusCounts, Text, agent_of
from killick.web.routes import Call, get
from killick.web.tallies import READ_SECONDS, RunTally, RunUsage

RUNS_MAX: Final = 6_000
"""The number of runs that are looked at, the newest ones."""

FAILURES_MAX: Final = 12
_PAGE: Final = 1_000
_HOUR_US: Final = 3_600_000_000
_DAY_US: Final = 24 * _HOUR_US

Period = Literal["24h", "7d", "28d"]
_SLOTS: Final[dict[Period, tuple[int, int]]] = {
    "24h": (_HOUR_US, 24), "7d": (6 * _HOUR_US, 28), "28d": (_DAY_US, 28),
}  # fmt: skip


class OverviewAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs are counted: those that started in the period."""

    period: Period = "24h"
    agent: Annotated[Text, msgspec.Meta(description="The name of an agent.")] = ""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """How long some things took; null where there were none."""

    count: int
    p50_seconds: float | None
    p95_seconds: float | None


class OverviewSlot(msgspec.Struct, frozen=True, kw_only=True):
    """The runs that started in one slot of time: `durations` of those that ended, and `answers` of people."""

    at_us: int
    runs: StatusCounts
    durations: Percentiles
    answers: Percentiles


class FailureGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The failed runs of one agent with one error; `run` is the newest of them."""

    agent: str
    error: str
    count: int
    run: str
    at_us: int


class AgentUsage(RunUsage, frozen=True):
    """The usage of an agent's runs, by the day on which they started (UTC)."""

    agent: str
    day_us: int
    runs: int


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that started in a period, the newest first where there are more than one request counts (`more`).

    Failures, usage and answers are of the `read` runs whose logs were read so far. `slots` divide the period; `total`
    is all of it. `open_questions` are those of all runs, the oldest asked at `asked_at`.
    """

    period: str
    until_us: int
    slot_seconds: int
    slots: tuple[OverviewSlot, ...]
    total: OverviewSlot
    failures: tuple[FailureGroup, ...]
    usage: tuple[AgentUsage, ...]
    open_questions: int
    questions_more: bool
    asked_at_us: int | None
    agents: tuple[str, ...]
    read: int
    more: bool


class _Slot:
    """The figures of a time slot."""

    def __init__(self) -> None:
        self.statuses = Counter[str]()
        self.durations: list[float] = []
        self.answers: list[float] = []

    def document(self, at_us: int) -> OverviewSlot:
        counts, durations, answers = StatusCounts.of(self.statuses), self.durations, self.answers
        return OverviewSlot(at_us=at_us, runs=counts, durations=_percentiles(durations), answers=_percentiles(answers))


@get("/overview", page="overview.html")
def overview(call: Call[OverviewAsked, Any]) -> Overview:
    """Runs over time by status, durations, failures, tokens and cost by agent and day, and how long people take."""
    size, count = _SLOTS[call.asked.period]
    since_us = call.now_us // size * size - (count - 1) * size
    store, query = call.client.runtime.store, RunQuery(agent=agent_of(call))
    rows, more = _started(store, query, since_us)
    read = call.context.tallies.of(rows, seconds=READ_SECONDS)
    slots, total = [_Slot() for _ in range(count)], _Slot()
    dead = {each.holder for each in store.holders() if not each.lives}
    heads = store.statuses([row.run for row in rows if row.status == "running"])
    left = {run for run, each in heads.items() if each.head.holder in dead}
    for row in rows:
        of = slots[min((row.started_at_us - since_us) // size, count - 1)], total
        for slot in of:
            slot.statuses["abandoned" if row.run in left else row.status] += 1
            if row.status in ENDED:
                slot.durations.append((row.changed_at_us - row.started_at_us) / 1_000_000)
        for at_us, seconds in read[row.run].answers if row.run in read else ():
            for slot in slots[min((at_us - since_us) // size, count - 1)], total:
                slot.answers.append(seconds)
    waits, asking = call.context.questions.now()
    return Overview(
        period=call.asked.period, until_us=call.now_us, slot_seconds=size // 1_000_000, total=total.document(since_us),
        slots=tuple(slot.document(since_us + n * size) for n, slot in enumerate(slots)),
        failures=_failures(rows, read), usage=_usage(rows, read), open_questions=len(waits), questions_more=asking,
        asked_at_us=min((wait.since_us for wait in waits), default=None), agents=tuple(store.agents()),
        read=len(read), more=more,
    )  # fmt: skip


def _started(store: Store, query: RunQuery, since_us: int) -> tuple[list[RunRow], bool]:
    """The runs that started since, newest first, and whether there are more. Runs are numbered as they start, but for
    those that were imported: so the end is where most are older."""
    rows, before = list[RunRow](), None
    for _ in range(0, RUNS_MAX, _PAGE):
        page = store.runs(query, before=before, limit=_PAGE)
        recent = [row for row in page if row.started_at_us >= since_us]
        rows += recent
        if len(page) < _PAGE or len(recent) * 2 < len(page):
            return rows, False
        before = page[-1].number
    return rows, True


def _percentiles(seconds: list[float]) -> Percentiles:
    ranked = sorted(seconds)
    p50, p95 = (ranked[max(-(-len(ranked) * part // 100) - 1, 0)] if ranked else None for part in (50, 95))
    return Percentiles(count=len(ranked), p50_seconds=p50, p95_seconds=p95)


def _failures(rows: Sequence[RunRow], read: dict[str, RunTally]) -> tuple[FailureGroup, ...]:
    """Failed runs by agent and error, the most first."""
    found: dict[tuple[str, str], list[RunRow]] = defaultdict(list)
    for row in rows:
        if row.run in read and (error := read[row.run].error) is not None:
            found[row.agent, error].append(row)
    most = sorted(found.items(), key=lambda each: (-len(each[1]), each[0]))[:FAILURES_MAX]
    return tuple(
        FailureGroup(agent=agent, error=error, count=len(of), run=of[0].run, at_us=of[0].changed_at_us)
        for (agent, error), of in most
    )


def _usage(rows: Sequence[RunRow], read: dict[str, RunTally]) -> tuple[AgentUsage, ...]:
    """Usage by agent and day, for recorded model calls."""
    found: dict[tuple[str, int], list[RunTally]] = defaultdict(list)
    for row in rows:
        if row.run in read and read[row.run].model_calls:
            found[row.agent, row.started_at_us // _DAY_US * _DAY_US].append(read[row.run])
    names = RunUsage.__struct_fields__
    return tuple(
        AgentUsage(agent=agent, day_us=day, runs=len(of), **{n: sum(getattr(each, n) for each in of) for n in names})
        for (agent, day), of in sorted(found.items())
    )
