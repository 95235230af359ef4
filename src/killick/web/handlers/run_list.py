"""Runs: where every agent is in its process, page by page, and how many there are of each status.

Reads the index, and the logs of the runs of one page; the results are cached for the next request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec.structs import replace

from killick.history.listing import STATUSES, Line, counted, selected
from killick.presenting.needs import Needs
from killick.presenting.runs import RunSummary, run_summary
from killick.store.records import ENDED, OWN_AGENTS, RunQuery, RunRow
from killick.web.problems import Problem
from killick.web.routes import Call, get
from killick.web.tallies import READ_SECONDS, RunTally, RunUsage

Status = Literal[
    "queued", "running", "waiting", "code_mismatch", "paused", "completed", "failed", "cancelled", "abandoned",
]  # fmt: skip
WaitsFor = Literal["person", "doubt", "time", "message", "child", "backoff"]
Column = Literal["where", "started", "took", "changed", "tokens", "cost"]
Order = Annotated[
    str,
    msgspec.Meta(
        pattern="^-?(started|took|changed|tokens|cost)$", description="Sorts 2,000 runs; `-`: the most first."
    ),
]
COLUMNS: Final[tuple[Column, ...]] = ("where", "started", "took", "changed")
LOOK_MAX: Final = 1_000
"""How many runs are read for a page of those that wait for one thing."""

SORTED_MAX: Final = 2_000
"""How many runs are sorted, the newest that match: the index has them by their start alone."""

_STILL: Final = (*ENDED, "queued")
Text = Annotated[str, msgspec.Meta(max_length=200)]


class CountsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs are meant. Every parameter that is given must match."""

    agent: Annotated[Text, msgspec.Meta(description="The name of an agent.")] = ""
    tag: Annotated[Text, msgspec.Meta(description="A tag that they have.")] = ""
    q: Annotated[Text, msgspec.Meta(description="A part of their ids, in any case.")] = ""
    since: Annotated[str, msgspec.Meta(max_length=40, description="Changed how long ago at the most: 90s, 2h, 3d.")] = (
        ""
    )


class RunsAsked(CountsAsked, frozen=True, kw_only=True):
    """Which runs are wanted, and which page of them, newest first or sorted."""

    status: Annotated[
        tuple[Status, ...],
        msgspec.Meta(max_length=20, description="A run whose process died is abandoned, and not running."),
    ] = ()
    waits_for: Annotated[WaitsFor, msgspec.Meta(description="Only runs that wait for this.")] | None = None
    sort: Order | None = None
    columns: Annotated[
        tuple[Column, ...], msgspec.Meta(max_length=6, description="Of the page; `usage` is there for tokens or cost.")
    ] = COLUMNS
    cursor: (
        Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,17}$", description="From `next` of the page before.")]
        | None
    ) = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class StatusCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs there are of each status, of those that match in all else."""

    queued: int = 0
    running: int = 0
    waiting: int = 0
    code_mismatch: int = 0
    paused: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    abandoned: int = 0
    total: int = 0

    @classmethod
    def of(cls, found: Counter[str]) -> Self:
        """Every page and the API take their numbers from here."""
        return cls(**{name: found[name] for name in STATUSES}, total=found.total())


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of runs, newest first or sorted; `next` is the cursor of the page after it. `counts` are of all that match
    but for their status; `agents` are all that have runs; `needs` is of all runs. `usage` is of each of `runs`, where
    their columns were asked for. `sorted` is how many were sorted, and `partly`: the usage of some is not read yet."""

    runs: tuple[RunSummary, ...]
    counts: StatusCounts
    agents: tuple[str, ...]
    needs: Needs
    usage: tuple[RunUsage | None, ...] = ()
    sorted: int | None = None
    partly: bool = False
    next: str | None = None


def runs(call: Call[RunsAsked, Any]) -> RunList:
    """Runs, newest first: each with its position, and its wait or its failure."""
    store, query, person = call.client.runtime.store, query_of(call), call.person
    lines, following, order = _sorted(call, query) if call.asked.sort is not None else (*_page(call, query), {})
    found = counted(store, query)
    known = found if query == RunQuery() else None
    return RunList(
        runs=tuple(map(run_summary, lines)), counts=StatusCounts.of(found), next=following,
        agents=tuple(store.agents()), usage=_usage(call, lines), **order,
        needs=call.context.questions.needs(person.name, known, may_answer=person.may("operator")),
    )  # fmt: skip


def _usage(call: Call[RunsAsked, Any], lines: Sequence[Line]) -> tuple[RunUsage | None, ...]:
    """The usage of each run of a page; null if its log could not be read in time."""
    if not {"tokens", "cost"} & set(call.asked.columns):
        return ()
    rows = [row for line in lines if (row := call.client.runtime.store.index(line.run)) is not None]
    read = call.context.tallies.of(rows, seconds=READ_SECONDS)
    return tuple(RunUsage.of(read[line.run]) if line.run in read else None for line in lines)


def _sorted(call: Call[RunsAsked, Any], query: RunQuery) -> tuple[list[Line], str | None, dict[str, Any]]:
    """The lines of a page of sorted runs, the cursor of the next, and how many were sorted. The cursor is a place."""
    asked, at, name = call.asked, int(call.asked.cursor or 0), str(call.asked.sort).removeprefix("-")
    status = asked.status or (("waiting",) if asked.waits_for is not None else ())
    rows = selected(call.client.runtime.store, replace(query, status=status), limit=SORTED_MAX)
    if asked.waits_for is not None:
        waiting = call.context.listing.lines(rows[:LOOK_MAX], call.now_us)
        found = {line.run for line in waiting if any(one.kind == asked.waits_for for one in line.about)}
        rows = [row for row in rows if row.run in found]
    reads = name in ("tokens", "cost")
    read = call.context.tallies.of(rows, seconds=READ_SECONDS) if reads else {}

    def key(row: RunRow) -> tuple[int, int]:
        used, until = read.get(row.run) or RunTally(), row.changed_at_us if row.status in _STILL else call.now_us
        return {
            "started": row.started_at_us, "changed": row.changed_at_us, "took": until - row.started_at_us,
            "tokens": used.tokens_in + used.tokens_out, "cost": used.cost_micros,
        }[name], row.number  # fmt: skip

    page = sorted(rows, key=key, reverse=asked.sort != name)[at : at + asked.limit]
    following = str(at + asked.limit) if at + asked.limit < len(rows) else None
    order = {"sorted": len(rows), "partly": reads and len(read) < len(rows)}
    return call.context.listing.lines(page, call.now_us), following, order


def _page(call: Call[RunsAsked, Any], query: RunQuery) -> tuple[list[Line], str | None]:
    """The lines of a page, and the cursor of the next. No index has the waits of a run: they are read from its log,
    of `LOOK_MAX` runs a page."""
    asked, found = call.asked, list[Line]()
    status = asked.status or (("waiting",) if asked.waits_for is not None else ())
    before, looked = None if asked.cursor is None else int(asked.cursor), 0
    while True:
        room = asked.limit - len(found)
        rows = selected(call.client.runtime.store, replace(query, status=status), before=before, limit=room + 1)
        for line in call.context.listing.lines(rows[:room], call.now_us):
            if asked.waits_for is None or any(one.kind == asked.waits_for for one in line.about):
                found.append(line)
        if len(rows) <= room:
            return found, None
        before, looked = rows[room - 1].number, looked + room
        if len(found) == asked.limit or asked.waits_for is None or looked >= LOOK_MAX:
            return found, str(before)


def counts(call: Call[CountsAsked, Any]) -> StatusCounts:
    """How many runs there are of each status."""
    return StatusCounts.of(counted(call.client.runtime.store, query_of(call)))


def query_of(call: Call[Any, Any]) -> RunQuery:
    """The filter of a request. Raises a Problem for a system log, or for no duration."""
    tag, part, since = call.asked.tag, call.asked.q, call.since_us(call.asked.since)
    return RunQuery(agent=agent_of(call), tag=tag or None, contains=part or None, since_us=since)


def agent_of(call: Call[Any, Any]) -> str | None:
    """The agent of a request, if any. Raises a Problem where it is one of Killick's own."""
    agent = call.asked.agent
    if agent.startswith(OWN_AGENTS) and call.person.scope != "admin":
        raise Problem(403, f"{agent}: Killick keeps these logs for itself; an admin may list them", code="scope")
    return agent or None


ROUTES: Final = (
    get("/runs", runs, asks=RunsAsked, gives=RunList, page="runs.html", at=("/", "/runs")),
    get("/counts", counts, asks=CountsAsked, gives=StatusCounts, personal=False),
)
