"""The status of workers and store: which worker holds which run, the due runs, the store's health, and metrics.

Reads listings, heads and the ends of logs, never a whole one: it reports nothing about unread parts, and
`killick store verify` proves the record.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Final

import msgspec
from starlette.responses import Response

from killick.audit.seal import SEALS
from killick.client.client import Client
from killick.errors import KillickError
from killick.history.doctor import LATE_US
from killick.history.listing import counted
from killick.history.phrasing import process
from killick.model import events as e
from killick.model import system_events
from killick.presenting.documents import Document
from killick.presenting.limits import LimitQueue, limit_queues
from killick.store.records import OWN_AGENTS, STORE_FORMAT, Condition, RunQuery, RunRow
from killick.triggers import TAG as TRIGGER_TAG
from killick.version import VERSION
from killick.web.handlers.run_list import StatusCounts
from killick.web.handlers.triggers import hook_lines
from killick.web.routes import Call, Nothing, get
from killick.workers import metrics as meters
from killick.workers.hooks import TAG as HOOK_TAG

HELD_MAX: Final = 50
"""The maximum number of held runs that are listed."""

APART_MAX: Final = 50
"""The maximum number of quarantined runs that are listed."""

TAKEN_EVENTS: Final = 200
"""The events at each end of a log that are read for the worker that took its run."""

DUE_MAX: Final = 50
"""Runs that are due of which more is said than that they are."""


# workers ------------------------------------------------------------------------------------------


class HeldRun(Document, frozen=True):
    """A leased run and its current step."""

    run: str
    agent: str
    status: str
    step: str | None
    stage: str | None
    build: str
    since_us: int


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has runs leased. `lease_seconds` is the time left of its first lease to expire, if any expires. A
    worker has its `host`, and its `slots`: how many runs it executes at once.

    `duties` are its triggers and hooks, `agents` those of its runs. A holder that is not alive abandoned its runs.
    """

    holder: str
    name: str
    host: str | None
    slots: int | None
    alive: bool
    lease_seconds: float | None
    runs: int
    held: tuple[HeldRun, ...]
    duties: tuple[str, ...]
    agents: tuple[str, ...]
    builds: tuple[str, ...]


class DueRun(Document, frozen=True):
    """A due run without a holder; `left_by` is the process that abandoned it."""

    run: str
    agent: str
    status: str
    priority: int
    since_us: int
    left_by: str | None = None


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """The holders of runs, the due runs, and the queues of limits. `late`: a run has been due for too long."""

    workers: tuple[Worker, ...]
    due: tuple[DueRun, ...]
    due_more: bool
    abandoned: int
    late: bool
    limits: tuple[LimitQueue, ...]
    advice: str | None = None


@get("/workers", page="workers.html", whole=True)
def workers(call: Call[Nothing, Nothing]) -> Workers:
    """The holders of runs with their runs, and the due runs without a holder."""
    client = call.client
    held = tuple(_workers(client))
    due = tuple(_due(client, call.now_us))
    late = any(call.now_us - each.since_us > LATE_US for each in due)
    return Workers(
        workers=held, due=due, due_more=len(due) == DUE_MAX,
        abandoned=sum(each.left_by is not None for each in due), late=late,
        limits=tuple(limit_queues(client.runtime.log)), advice=_advice(held, due, late=late),
    )  # fmt: skip


def _advice(held: tuple[Worker, ...], due: tuple[DueRun, ...], *, late: bool) -> str | None:
    nobody = not any(each.alive for each in held)
    if not due or not (late or nobody):
        return None
    agents = sorted({each.agent for each in due})
    named = ", ".join(agents[:3]) + (f" and {len(agents) - 3} more" if len(agents) > 3 else "")
    if nobody:
        return f"Runs of {named} are due, and no worker holds a run. Start a worker with the app that declares them."
    return f"Runs of {named} have been due for long. Is a worker for them running, and has it slots to spare?"


def _workers(client: Client) -> Iterator[Worker]:
    """Every holder named by a head, with the runs that are listed."""
    holding: dict[str, list[RunRow]] = {}
    for row in _held_rows(client):
        head = client.runtime.store.head(row.run)
        if head is not None and head.holder is not None:
            holding.setdefault(head.holder, []).append(row)
    now = client.runtime.store.now_us()
    for each in client.runtime.store.holders():
        rows = holding.get(each.holder, [])
        held = tuple(_held(client, row) for row in rows if not row.agent.startswith(OWN_AGENTS))
        duties = tuple(sorted(row.run for row in rows if row.agent.startswith(OWN_AGENTS)))
        taken = next(filter(None, (_taken(client, run.run, each.holder) for run in held)), None)
        host, slots = (taken.host or None, taken.slots or None) if taken is not None else (None, None)
        yield Worker(
            holder=each.holder, name=process(each.holder), host=host, slots=slots, alive=each.lives,
            runs=each.runs - len(duties), held=held, duties=duties,
            lease_seconds=None if each.until_us is None else round((each.until_us - now) / 1_000_000, 1),
            agents=tuple(sorted({run.agent for run in held})),
            builds=tuple(sorted({run.build for run in held if run.build})),
        )  # fmt: skip


def _taken(client: Client, run: str, holder: str) -> e.RunTaken | None:
    """How a run was last taken by this holder, as far as one of the ends of its log has it."""
    head = client.runtime.store.head(run)
    for after in dict.fromkeys((max(head.seq - TAKEN_EVENTS, 0), 0)) if head is not None else ():
        for _, event, _ in reversed(client.runtime.log.read(run, after=after, limit=TAKEN_EVENTS)):
            if isinstance(event, e.RunTaken) and event.holder == holder:
                return event
    return None


def _held_rows(client: Client) -> Iterator[RunRow]:
    """Rows of runs that may be leased: running ones, and the logs of triggers and hooks."""
    yield from client.runtime.store.runs(RunQuery(status=("running",)), limit=HELD_MAX)
    for tag in (TRIGGER_TAG, HOOK_TAG):
        yield from client.runtime.store.runs(RunQuery(tag=tag), limit=HELD_MAX)


def _held(client: Client, row: RunRow) -> HeldRun:
    try:
        facts = client.runtime.log.state(row.run).fold.facts
    except KillickError:
        return HeldRun.of(row, status="broken", step=None, stage=None, build="", since_us=row.changed_at_us)
    build = " ".join(filter(None, (facts.build.version, facts.build.commit)))
    return HeldRun.of(facts, run=row.run, step=facts.current, build=build, since_us=facts.changed_at)


def _due(client: Client, now_us: int) -> Iterator[DueRun]:
    """The due runs in the order in which workers take them: by priority, then by how long they have been due."""
    for row in client.runtime.store.due(now_us, limit=DUE_MAX):
        head = client.runtime.store.head(row.run)
        since = row.wake_at_us if row.wake_at_us is not None else row.changed_at_us
        yield DueRun.of(row, since_us=since, left_by=head.holder if head is not None else None)


# health -------------------------------------------------------------------------------------------


class Seal(Document, frozen=True):
    """The last seal of the store: its number, its time, its author, how many entries all seals have, and their root."""

    number: int
    at_us: int
    by: str | None
    entries: int
    root: str
    key: str


class QuarantinedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A quarantined run: its log fails verification, and why."""

    run: str
    agent: str
    why: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The health of a store, by quick checks. `wrong` counts the problems."""

    store: str
    id: str
    wrong: int
    conditions: tuple[Condition, ...]
    counts: StatusCounts
    due: int
    due_more: bool
    oldest_due: DueRun | None
    late: bool
    questions: int
    questions_more: bool
    quarantined: tuple[QuarantinedRun, ...]
    feed_end: int
    feed_behind: int
    seal: Seal | None
    killick: str
    python: str
    store_format: int


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """The server answers."""

    alive: bool = True


@get("/health", page="health.html", whole=True)
def health(call: Call[Nothing, Nothing]) -> Health:
    """The store's durability settings, the due and waiting runs, the quarantined ones, and the last seal."""
    client, store = call.client, call.client.runtime.store
    due = tuple(_due(client, call.now_us))
    oldest = min(due, key=lambda each: each.since_us, default=None)
    late = oldest is not None and call.now_us - oldest.since_us > LATE_US
    conditions = tuple(store.conditions())
    apart = tuple(_quarantined(client))
    questions, more = call.context.questions.now()
    return Health(
        store=store.place, id=store.id, wrong=sum(each.wrong is not None for each in conditions) + len(apart) + late,
        conditions=conditions, counts=StatusCounts.of(counted(store, RunQuery())), due=len(due),
        due_more=len(due) == DUE_MAX, oldest_due=oldest, late=late, questions=len(questions), questions_more=more,
        quarantined=apart, feed_end=store.outbox_end(),
        feed_behind=max((each.behind for each in hook_lines(client)), default=0), seal=last_seal(client),
        killick=VERSION, python=platform.python_version(), store_format=STORE_FORMAT,
    )  # fmt: skip


def _quarantined(client: Client) -> Iterator[QuarantinedRun]:
    """The newest of the quarantined runs."""
    store = client.runtime.store
    for row in store.runs(RunQuery(quarantined=True), limit=APART_MAX):
        yield QuarantinedRun(run=row.run, agent=row.agent, why=store.quarantined(row.run) or "")


def last_seal(client: Client) -> Seal | None:
    """The last seal, by its event alone: its entries may be very many."""
    head, log = client.runtime.store.head(SEALS), client.runtime.log
    events = (log.event(SEALS, seq) for seq in range(head.seq if head is not None else 0, 0, -1))
    sealed = next((event for event in events if isinstance(event, system_events.StoreSealed)), None)
    return None if sealed is None else Seal.of(sealed, entries=sealed.size)


@get("/alive", scope=None)
async def alive(call: Call[Nothing, Nothing]) -> Alive:
    """Whether the server answers. Needs no sign-in, and returns nothing else."""
    return Alive()


@get("/metrics", media="text/plain", also=("/metrics",), whole=True)
def metrics(call: Call[Nothing, Nothing]) -> Response:
    """Metrics of the runs in this process and of the store, in Prometheus' text format; also at `/metrics`."""
    return Response(meters.prometheus_text(call.client.runtime.engine), media_type=meters.MEDIA)
