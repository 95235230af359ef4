"""Runs: where every agent is in its process, page by page, and how many there are of each status.

Reads the index, and the logs of the runs of one page; the results are cached for the next request.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Final, Literal, Self

import msgspec
from msgspec.structs import replace

from killick.history.listing import STATUSES, RunSummary, counted, selected
from killick.presenting.needs import Needs
from killick.store.records import OWN_AGENTS, RunQuery
from killick.web.problems import Problem
from killick.web.routes import Call, get

Status = Literal[
    "queued", "running", "waiting", "code_mismatch", "paused", "completed", "failed", "cancelled", "abandoned",
]  # fmt: skip
WaitsFor = Literal["person", "doubt", "time", "message", "child", "backoff"]
LOOK_MAX: Final = 1_000
"""How many runs are read for a page of those that wait for one thing."""

Text = Annotated[str, msgspec.Meta(max_length=200)]


class RunsAsked(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs are wanted, and which page of them. Every parameter that is given must match."""

    agent: Annotated[Text, msgspec.Meta(description="The name of an agent.")] = ""
    tag: Annotated[Text, msgspec.Meta(description="A tag that they have.")] = ""
    q: Annotated[Text, msgspec.Meta(description="A part of their ids, in any case.")] = ""
    since: Annotated[str, msgspec.Meta(max_length=40, description="Changed how long ago at the most: 90s, 2h, 3d.")] = (
        ""
    )
    status: Annotated[
        tuple[Status, ...],
        msgspec.Meta(max_length=20, description="A run whose process died is abandoned, and not running."),
    ] = ()
    waits_for: Annotated[WaitsFor, msgspec.Meta(description="Only runs that wait for this.")] | None = None
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
    """A page of runs, newest first; `next` is the cursor of the page after it. `counts` are of all that match but for
    their status; `agents` are all that have runs; `needs` is of all runs."""

    runs: tuple[RunSummary, ...]
    counts: StatusCounts
    agents: tuple[str, ...]
    needs: Needs
    next: str | None = None


@get("/runs", page="runs.html", at=("/", "/runs"))
def runs(call: Call[RunsAsked, Any]) -> RunList:
    """Runs, newest first: each with its position, and its wait or its failure."""
    store, query, person = call.client.runtime.store, query_of(call), call.person
    lines, following = _page(call, query)
    found = counted(store, query)
    known = found if query == RunQuery() else None
    return RunList(
        runs=tuple(lines), counts=StatusCounts.of(found), next=following,
        agents=tuple(store.agents()),
        needs=call.context.questions.needs(person.name, known, may_answer=person.may("operator")),
    )  # fmt: skip


def _page(call: Call[RunsAsked, Any], query: RunQuery) -> tuple[list[RunSummary], str | None]:
    """The lines of a page, and the cursor of the next. No index has the waits of a run: they are read from its log,
    of `LOOK_MAX` runs a page."""
    asked, found = call.asked, list[RunSummary]()
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
