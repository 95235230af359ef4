"""Search across runs and time: a form, and its results, with links to the run and the step.

Searches the same as `kd.find`. A search first indexes new events. Where that takes long it is
done in parts, and the response has its progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

import msgspec

from killick.client.client import Client
from killick.errors import KillickError, StoreFull, StoreReadOnly
from killick.history.search.results import AnyHit, Findings, SearchHit, Standing
from killick.history.search.terms import mapping
from killick.store.records import RunQuery
from killick.web.problems import Problem
from killick.web.routes import Call, get

MARKING_SECONDS: Final = 2.0
"""How long one query indexes new events before it returns its progress."""

NAMES_AGENTS: Final = 40
NAMES_RUNS: Final = 4
NAMES_STEPS: Final = 200
"""Names are suggested from so many agents, so many of the newest runs of each, and so many last steps of each run."""

WHERE_MAX: Final = 10

What = Literal["calls", "decisions", "failures", "effects", "answers"]
Text = Annotated[str, msgspec.Meta(max_length=500)]


class FindAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A query: the kind of result, and the conditions. Each kind has its own conditions."""

    what: Annotated[What | Literal[""], msgspec.Meta(description="Without it, nothing is looked for.")] = ""
    tool: Annotated[Text, msgspec.Meta(description="A name, as `/find/names` has it.")] = ""
    kind: Annotated[str, msgspec.Meta(max_length=200, description="Of failures: a type's name, or timeout, died …")] = (
        ""
    )
    question: Text = ""
    choice: Text = ""
    because: Text = ""
    by: Text = ""
    verb: Text = ""
    to: Text = ""
    standing: Annotated[Standing | Literal[""], msgspec.Meta(description="Of effects.")] = ""
    where: Annotated[list[Text], msgspec.Meta(max_length=WHERE_MAX, description="Arguments, each as name=value.")] = []
    agent: Text = ""
    run: Annotated[str, msgspec.Meta(max_length=1000)] = ""
    since: Annotated[str, msgspec.Meta(max_length=40, description="How long ago: 90s, 2h, 3d.")] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=200)] = 50
    cursor: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}-[0-9]{1,6}$")] | None = None


class SearchResults(msgspec.Struct, frozen=True, kw_only=True):
    """The results, newest first. `scanned`: why every log was read instead of the index; `unread`: runs that could
    not be read; `marked`: new events are still being indexed, and so many are: ask again."""

    what: str
    found: tuple[AnyHit, ...] = ()
    scanned: str | None = None
    unread: tuple[str, ...] = ()
    marked: int | None = None
    agents: tuple[str, ...] = ()
    next: str | None = None


class _LimitReached(Exception):
    """As much was marked as one question may."""


def _blank(call: Call[FindAsked, Any]) -> SearchResults:
    """The form again, with nothing found."""
    return SearchResults(what=call.asked.what, agents=tuple(call.client.runtime.store.agents()))


@get("/find", page="find.html", blank=_blank)
def find(call: Call[FindAsked, Any]) -> SearchResults:
    """Look across all runs and time: calls, decisions, failures, effects and answers, newest first."""
    asked, client = call.asked, call.client
    agents = tuple(client.runtime.store.agents())
    if not asked.what:
        return SearchResults(what="", agents=agents)
    by_content = [name for name in ("where", "because", "question", "choice") if getattr(asked, name)]
    if call.mask and by_content:
        reason = "values are redacted here, and asking by them would tell what they are; ask by tool, person or time"
        raise Problem(403, f"{by_content[0]}: {reason}", code="redacted")
    until_us, passed = _cursor(asked.cursor)
    within: dict[str, Any] = {
        "agent": asked.agent or None, "run": asked.run or None, "since_us": call.since_us(asked.since),
        "until_us": until_us, "limit": asked.limit + passed,
    }  # fmt: skip
    marked = _mark(call.context.whole.client)
    if marked is not None:
        return SearchResults(what=asked.what, marked=marked, agents=agents)
    found = _ask(client, asked, within)
    shown = tuple(found)[passed:]
    return SearchResults(
        what=asked.what, found=shown, scanned=found.scanned, unread=found.unread, agents=agents,
        next=_next(tuple(found)) if found.more and shown else None,
    )  # fmt: skip


class SearchNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names to ask by, as the newest runs of each agent have them."""

    tools: tuple[str, ...]
    arguments: tuple[str, ...]
    errors: tuple[str, ...]
    agents: tuple[str, ...]


@get("/find/names")
def names(call: Call[Any, Any]) -> SearchNames:
    """The names of tools, arguments, errors and agents, to be suggested. Reads a few of the newest runs."""
    log, agents = call.client.runtime.log, call.client.runtime.store.agents()
    calls, errors = dict[str, tuple[str, int]](), dict[str, None]()
    for agent in agents[:NAMES_AGENTS]:
        for row in log.store.runs(RunQuery(agent=agent), limit=NAMES_RUNS):
            with suppress(KillickError):
                fold = log.state(row.run).fold
                for step in fold.steps[-NAMES_STEPS:]:
                    if step.sort == "tool":
                        calls.setdefault(step.name, (row.run, step.intended))
                for seq in fold.failures[-3:]:
                    failure = mapping(log.data(row.run, seq).get("failure"))
                    errors[str(failure.get("type", "")).rpartition(".")[2]] = None
    arguments = dict[str, None]()
    for run, seq in list(calls.values())[:NAMES_STEPS]:
        with suppress(KillickError):
            arguments |= dict.fromkeys(map(str, mapping(log.data(run, seq).get("arguments"))))
    return SearchNames(
        tools=tuple(sorted(calls)), arguments=tuple(sorted(arguments)), errors=tuple(sorted(filter(None, errors))),
        agents=tuple(agents),
    )  # fmt: skip


def _mark(client: Client) -> int | None:
    """Index new events, for a while. Returns how many were indexed if there are more; None: all are."""
    clock = client.runtime.clock
    began = clock.monotonic()

    def progress(events: int) -> None:
        # Events indexed so far stay indexed.
        if clock.monotonic() - began > MARKING_SECONDS:
            raise _LimitReached(events)

    try:
        with suppress(StoreReadOnly, StoreFull):  # the question itself says so, and reads every log
            client.find.catch_up(progress)
    except _LimitReached as enough:
        return int(enough.args[0])
    return None


def _cursor(cursor: str | None) -> tuple[int | None, int]:
    """Where a page begins: before a time, without so many that were shown of the microsecond before it."""
    if cursor is None:
        return None, 0
    at_us, _, passed = cursor.partition("-")
    return min(int(at_us) + 1, 2**63 - 1), min(int(passed), 10_000)


def _next(found: Sequence[SearchHit]) -> str:
    last = found[-1].at_us
    return f"{last}-{sum(each.at_us == last for each in found)}"


def _where(conditions: Sequence[str]) -> dict[str, Any]:
    """`name=value` as people write it: a value is compared as text, or as a number; null: nothing is there."""
    found: dict[str, Any] = {}
    for text in filter(None, conditions):
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Problem(400, f"where {text!r}: no name and value; write it as name=value", code="parameter_refused")
        found[name] = None if value == "null" else value
    return found


_FILTERS: Final[dict[str, tuple[str, ...]]] = {
    "calls": ("tool", "where"), "decisions": ("question", "choice", "by", "because"), "failures": ("kind", "tool"),
    "effects": ("tool", "standing", "where"), "answers": ("by", "verb", "to"),
}  # fmt: skip
"""The conditions of each kind of result, besides the common ones."""


def _ask(client: Client, asked: FindAsked, within: dict[str, Any]) -> Findings[Any]:
    given = {name: getattr(asked, name) or None for name in _FILTERS[asked.what]}
    if "where" in given:
        given["where"] = _where(asked.where)
    if "standing" in given:
        given["status"] = given.pop("standing")
    found: Findings[Any] = getattr(client.find, asked.what)(**given, **within)
    return found
