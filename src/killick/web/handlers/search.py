"""Search across runs and time: a form, and its results, with links to the run and the step.

Searches what `kd.find` can search and nothing else. A search first indexes new events. Where that takes long it is
done in parts, and the response has its progress.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from killick.client.client import Client
from killick.clock import Clock
from killick.errors import DurationRefused, StoreFull, StoreReadOnly
from killick.history.search.results import (
    Findings,
    FoundAnswer,
    FoundCall,
    FoundDecision,
    FoundEffect,
    FoundFailure,
    SearchHit,
    Standing,
)
from killick.model.retry import seconds
from killick.web.problems import Problem
from killick.web.routes import Call, get

MARKING_SECONDS: Final = 2.0
"""How long one question marks what is new before it says how far it is."""

WHERE_MAX: Final = 10

What = Literal["calls", "decisions", "failures", "effects", "answers"]
Text = Annotated[str, msgspec.Meta(max_length=500)]


class FindAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A question: what is looked for, and by what. Which of the others count depends on what is looked for."""

    what: Annotated[What | Literal[""], msgspec.Meta(description="Without it, nothing is looked for.")] = ""
    tool: Text = ""
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
    """What was found, newest first. `scanned`: why every log was read instead of the index; `unread`: runs that could
    not be read; `marked`: what is new is still being marked, and so many events are: ask again."""

    what: str
    found: tuple[FoundCall | FoundDecision | FoundFailure | FoundEffect | FoundAnswer, ...] = ()
    scanned: str | None = None
    unread: tuple[str, ...] = ()
    marked: int | None = None
    agents: tuple[str, ...] = ()
    next: str | None = None


F = TypeVar("F", bound=SearchHit)


class _Enough(Exception):
    """As much was marked as one question may."""


def find(call: Call[FindAsked, Any]) -> SearchResults:
    """Look across all runs and time: calls, decisions, failures, effects and answers, newest first."""
    asked, client = call.asked, call.client
    agents = tuple(client.runtime.store.agents())
    if not asked.what:
        return SearchResults(what="", agents=agents)
    if call.context.veil is not None and call.context.veil.fields and (by := _by_content(asked)):
        told = (
            f"{by}: values are redacted here, and asking by them would tell what they are; ask by tool, person or time"
        )
        raise Problem(403, told, code="redacted")
    marked = _mark(client)
    if marked is not None:
        return SearchResults(what=asked.what, marked=marked, agents=agents)
    until_us, passed = _cursor(asked.cursor)
    within: dict[str, Any] = {
        "agent": asked.agent or None,
        "run": asked.run or None,
        "since_us": _since(asked.since, call.now_us),
        "until_us": until_us,
        "limit": asked.limit + passed,
    }
    found = _QUESTIONS[asked.what](client, asked, within)
    shown = tuple(found)[passed:]
    return SearchResults(
        what=asked.what,
        found=shown,
        scanned=found.scanned,
        unread=found.unread,
        agents=agents,
        next=_next(tuple(found)) if found.more and shown else None,
    )


def _by_content(asked: FindAsked) -> str | None:
    """What of a question is about values, of which some are not to be seen."""
    return next((name for name in ("where", "because", "question", "choice") if getattr(asked, name)), None)


def _mark(client: Client) -> int | None:
    """Mark what is new, for a while. Gives back how many events were marked if there are more; None: that was all."""
    try:
        client.find.catch_up(_for_a_while(client.runtime.clock))
    except _Enough as enough:
        return int(enough.args[0])
    except (StoreReadOnly, StoreFull):
        return None  # the question itself says so, and reads every log
    return None


def _for_a_while(clock: Clock) -> Callable[[int], None]:
    began = clock.monotonic()

    def progress(events: int) -> None:
        # What was marked up to here is kept.
        if clock.monotonic() - began > MARKING_SECONDS:
            raise _Enough(events)

    return progress


def _cursor(cursor: str | None) -> tuple[int | None, int]:
    """Where a page begins: before a time, without so many that were shown of the microsecond before it."""
    if cursor is None:
        return None, 0
    at_us, _, passed = cursor.partition("-")
    return min(int(at_us) + 1, 2**63 - 1), min(int(passed), 10_000)


def _next(found: Sequence[SearchHit]) -> str:
    last = found[-1].at_us
    return f"{last}-{sum(each.at_us == last for each in found)}"


def _since(text: str, now_us: int) -> int | None:
    if not text:
        return None
    try:
        return max(now_us - round(seconds(text) * 1_000_000), 0)
    except DurationRefused as error:
        raise Problem(400, f"since: {error}", code="parameter_refused") from None


def _where(conditions: Sequence[str]) -> dict[str, Any]:
    """`name=value` as people write it: a value is compared as text, or as a number; null: nothing is there."""
    found: dict[str, Any] = {}
    for text in filter(None, conditions):
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Problem(400, f"where {text!r}: no name and value; write it as name=value", code="parameter_refused")
        found[name] = None if value == "null" else value
    return found


def _calls(client: Client, asked: FindAsked, within: Any) -> Findings[FoundCall]:
    return client.find.calls(asked.tool or None, where=_where(asked.where), **within)


def _decisions(client: Client, asked: FindAsked, within: Any) -> Findings[FoundDecision]:
    return client.find.decisions(
        question=asked.question or None,
        choice=asked.choice or None,
        by=asked.by or None,
        because=asked.because or None,
        **within,
    )


def _failures(client: Client, asked: FindAsked, within: Any) -> Findings[FoundFailure]:
    return client.find.failures(asked.kind or None, tool=asked.tool or None, **within)


def _effects(client: Client, asked: FindAsked, within: Any) -> Findings[FoundEffect]:
    return client.find.effects(asked.tool or None, status=asked.standing or None, where=_where(asked.where), **within)


def _answers(client: Client, asked: FindAsked, within: Any) -> Findings[FoundAnswer]:
    return client.find.answers(by=asked.by or None, verb=asked.verb or None, to=asked.to or None, **within)


_QUESTIONS: Final[dict[str, Callable[[Client, FindAsked, Any], Findings[Any]]]] = {
    "calls": _calls,
    "decisions": _decisions,
    "failures": _failures,
    "effects": _effects,
    "answers": _answers,
}

ROUTES: Final = (get("/find", find, asks=FindAsked, gives=SearchResults, page="find.html"),)
