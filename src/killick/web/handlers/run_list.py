"""Runs: where every agent is in its process, page by page, and how many there are of each status.

Reads the index, and of the runs of one page what their logs say; what it read is kept for the next who looks.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from killick.errors import DurationRefused
from killick.history.listing import STATUSES, Listing, counted, gone
from killick.model.retry import seconds
from killick.presenting.runs import RunSummary, run_summary
from killick.store.protocol import Store
from killick.store.records import OWN_AGENTS, RunQuery, RunRow
from killick.web.app_context import AppContext
from killick.web.problems import Problem
from killick.web.routes import Call, get

Status = Literal["queued", "running", "waiting", "paused", "completed", "failed", "cancelled", "abandoned"]
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
    """Which runs are wanted, and which page of them, newest first."""

    status: Annotated[
        tuple[Status, ...],
        msgspec.Meta(max_length=20, description="Runs that nobody is at any more are abandoned, and running as well."),
    ] = ()
    cursor: (
        Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,17}$", description="From `next` of the page before.")]
        | None
    ) = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50


class StatusCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many runs there are of each status, of those that match in all else. Abandoned ones are not running."""

    queued: int = 0
    running: int = 0
    waiting: int = 0
    paused: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    abandoned: int = 0
    total: int = 0


class RunList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of runs, newest first; `next` is the cursor of the page after it. `counts` are of all that match but for
    their status; `agents` are all that have runs."""

    runs: tuple[RunSummary, ...]
    counts: StatusCounts
    agents: tuple[str, ...]
    next: str | None = None


def runs(call: Call[RunsAsked, Any]) -> RunList:
    """Runs, newest first: where each one is, and what it waits for or what went wrong."""
    asked, client = call.asked, call.client
    query = _query(call)
    before = None if asked.cursor is None else int(asked.cursor)
    found = _page(client.runtime.store, asked, query, before)
    rows = found[: asked.limit]
    return RunList(
        runs=tuple(map(run_summary, _listing(call.context).lines(rows, call.now_us))),
        counts=_counted(client.runtime.store, query),
        agents=tuple(client.runtime.store.agents()),
        next=str(rows[-1].number) if len(found) > len(rows) else None,
    )


def counts(call: Call[CountsAsked, Any]) -> StatusCounts:
    """How many runs there are of each status."""
    return _counted(call.client.runtime.store, _query(call))


# inside -------------------------------------------------------------------------------------------

_listings: Final[WeakKeyDictionary[AppContext, Listing]] = WeakKeyDictionary()


def _listing(context: AppContext) -> Listing:
    """The lines that are kept for everybody who looks through one app."""
    found = _listings.get(context)
    if found is None:
        veil = context.veil

        def veiled(run: str, values: dict[str, Any]) -> dict[str, Any]:
            assert veil is not None
            hidden: dict[str, Any] = veil.over(values, run=run)
            return hidden

        hides = veil is not None and bool(veil.fields)
        found = _listings.setdefault(
            context, Listing(context.client.runtime.log, whole=True, through=veiled if hides else None)
        )
    return found


def _query(call: Call[Any, Any]) -> RunQuery:
    asked = call.asked
    if asked.agent and asked.agent.startswith(OWN_AGENTS) and call.person.scope != "admin":
        raise Problem(403, f"{asked.agent}: Killick keeps these logs for itself; an admin may list them", code="scope")
    try:
        since = max(call.now_us - round(seconds(asked.since) * 1_000_000), 0) if asked.since else None
    except DurationRefused as error:
        raise Problem(400, f"since: {error}", code="parameter_refused") from None
    return RunQuery(agent=asked.agent or None, tag=asked.tag or None, contains=asked.q or None, since_us=since)


def _page(store: Store, asked: RunsAsked, query: RunQuery, before: int | None) -> list[RunRow]:
    """The rows of a page, and one more where there are more. No index has abandoned runs: they are found by holder."""
    statuses = tuple(dict.fromkeys("running" if each == "abandoned" else each for each in asked.status))
    query = replace(query, status=statuses)
    if "abandoned" not in asked.status or "running" in asked.status:
        return store.runs(query, before=before, limit=asked.limit + 1)
    holders = gone(store)
    left = replace(query, status=("running",), holders=holders)
    rows = store.runs(left, before=before, limit=asked.limit + 1) if holders else []
    others = tuple(status for status in statuses if status != "running")
    if others:
        rows += store.runs(replace(query, status=others), before=before, limit=asked.limit + 1)
    return sorted(rows, key=lambda row: -row.number)[: asked.limit + 1]


def _counted(store: Store, query: RunQuery) -> StatusCounts:
    found = counted(store, query)
    return StatusCounts(**{name: found[name] for name in STATUSES}, total=found.total())


ROUTES: Final = (
    get("/runs", runs, asks=RunsAsked, gives=RunList, page="runs.html", at=("/", "/runs")),
    get("/counts", counts, asks=CountsAsked, gives=StatusCounts),
)
