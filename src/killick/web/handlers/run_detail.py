"""One run: its position, why it waits and what wakes it; its relatives, its usage, its seal, and its last steps.

Reads the head, a section of the steps and the ledger's sums, however long the run is. Verifies and exports when asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Final

from msgspec import Meta
from starlette.responses import Response

from killick.audit.seal import SEALS
from killick.client.client import Client
from killick.engine.views import Wait
from killick.errors import RunUnknown
from killick.history.explain import why as explained
from killick.history.page import STEPS_MAX
from killick.history.phrasing import process
from killick.history.run_info import waits_of
from killick.history.timeline import Timeline, part_of
from killick.model import events as e
from killick.model import system_events
from killick.model.fold import Fold
from killick.model.ledger import Ledger
from killick.presenting.steps import reply_text
from killick.store.protocol import is_held
from killick.store.records import Head, shown_tags
from killick.web.handlers.step_detail import ErrorSeen, StepId, about, errors_of, unknown
from killick.web.handlers.step_list import Doc, RunAsked, RunId, Steps, found_steps, state_of, through_of
from killick.web.routes import Call, Nothing, Route, get, post, raw

TAIL_STEPS: Final = 12
"""How many of the last steps are read to say where a run is."""

CHILDREN_MAX: Final = 50


class RunPageAsked(Doc, frozen=True):
    """`cursor`, `q` and `step` say which steps the run is shown with; `tab` is what the page has open."""

    run: RunId
    cursor: Annotated[str, Meta(pattern=r"^\d{1,9}$")] | None = None
    step: StepId | None = None
    q: Annotated[str, Meta(max_length=200)] = ""
    tab: Annotated[str, Meta(max_length=20)] = "timeline"


class PositionSeen(Doc, frozen=True):
    """Where a run is, since when, and what happens next."""

    where: str
    since_us: int
    next: str
    step: str | None = None
    place: str | None = None
    at_stage: int | None = None


class WorkerSeen(Doc, frozen=True):
    """Who holds the run; `lives` is whether they are known to be there."""

    holder: str
    name: str
    lives: bool
    until_us: int | None


class FailedSeen(Doc, frozen=True):
    at_us: int
    step: str | None
    errors: tuple[ErrorSeen, ...]
    not_undone: tuple[str, ...] = ()


class UsageSeen(Doc, frozen=True):
    """What was used over every attempt ever made. Money is in millionths of a US dollar."""

    model_calls: int
    tokens_in: int
    tokens_out: int
    tokens_cached: int
    cost_micros: int


WAITS_MAX: Final = 50
"""Of how many things that a run waits for the page tells."""


class CountsSeen(Doc, frozen=True):
    """How much there is. `steps` are the run's own; `all_steps` are those inside scopes as well; `snapshots` are of its
    files, None where it has no workspace."""

    steps: int
    all_steps: int
    done: int
    attempts: int
    retried: int
    waits: int
    decisions: int
    failures: int
    effects: int
    traced: int
    children: int
    events: int
    snapshots: int | None = None


class ChildSeen(Doc, frozen=True):
    run: str
    agent: str
    step: str
    status: str


class SealSeen(Doc, frozen=True):
    """The last seal of the store; `covers` says whether the run's last event is older."""

    number: int
    at_us: int
    covers: bool


class RunSeen(Doc, frozen=True):
    """A run: where it is, what belongs to it, what it was given and gave, and a section of its steps."""

    run: str
    agent: str
    status: str
    position: PositionSeen
    seq: int
    generation: int
    plan: tuple[str, ...]
    stage: str | None
    current: str | None
    priority: int
    tags: tuple[str, ...]
    started_us: int
    changed_us: int
    ended_us: int | None
    wake_us: int | None
    is_cancelling: bool
    worker: WorkerSeen | None
    build: e.Build
    parent: str | None
    parent_step: str | None
    forked_from: str | None
    forks: tuple[str, ...]
    children: tuple[ChildSeen, ...]
    renewed_as: str | None
    follows: str | None
    broken: str | None
    failed: FailedSeen | None
    waits: tuple[Wait, ...]
    usage: UsageSeen
    counts: CountsSeen
    seal: SealSeen | None
    input: Any
    result: Any
    steps: Steps


def run_page(call: Call[RunPageAsked, Nothing]) -> RunSeen:
    """A run: its position, why it waits and what wakes it, and its last steps."""
    asked, client, log = call.asked, call.client, call.client.log
    run, head = asked.run, log.head(asked.run)
    state = state_of(call, run)
    fold, ledger = state.fold, log.ledger(run)
    facts = fold.facts
    broken = client.store.quarantined(run)
    worker = _worker(client, head)
    abandoned = facts.status == "running" and (worker is None or not worker.lives)
    status = "broken" if broken is not None else "abandoned" if abandoned else facts.status
    tail = part_of(log, run, limit=TAIL_STEPS, through=through_of(call, run), fold=fold, known=False)
    failed = tail.failed
    return RunSeen.of(
        facts, run=run, status=status, position=_position(tail, status, broken), tags=tuple(shown_tags(facts.tags)),
        ended_us=tail.ended_at, wake_us=fold.wake_at, is_cancelling=facts.cancelling, worker=worker,
        forks=ledger.facts.forks,
        children=tuple(map(ChildSeen.of, ledger.children[-CHILDREN_MAX:])),
        broken=broken, waits=tuple(islice(waits_of(client.store, state), WAITS_MAX)),
        usage=UsageSeen.of(ledger.spend), counts=_counts(fold, ledger),
        failed=None if failed is None else FailedSeen(
            at_us=failed.at, step=failed.step, errors=errors_of(failed.failure), not_undone=tuple(failed.not_undone),
        ),
        seal=_seal(client, tail.last_at), input=state.input, result=tail.result,
        steps=found_steps(call, run, before=_before(asked, fold), q=asked.q, around=asked.step, fold=fold),
    )  # fmt: skip


def _before(asked: RunPageAsked, fold: Fold) -> int | None:
    """The end of the section to show. A requested step is in its middle."""
    if asked.step is None:
        return int(asked.cursor) if asked.cursor is not None else None
    own = int(asked.step.partition(".")[0])
    return None if own + STEPS_MAX // 2 >= len(fold.tops) else own + STEPS_MAX // 2


def _worker(client: Client, head: Head) -> WorkerSeen | None:
    if head.holder is None:
        return None
    lives, until = is_held(client.store, head), head.lease_until_us
    return WorkerSeen(holder=head.holder, name=process(head.holder), lives=lives, until_us=until)


def _position(tl: Timeline, status: str, broken: str | None) -> PositionSeen:
    """The position of a run, why it waits, and what wakes it."""
    step = tl.at_work
    number = step.number if step is not None else tl.failed.step if tl.failed is not None else tl.current
    named = f"step {number} ({step.name})" if step is not None else f"step {number}" if number else ""
    at = tl.plan.index(tl.stage) if tl.stage in tl.plan else None
    paragraphs = explained(tl, text_of=reply_text, abandoned=status == "abandoned")
    following = paragraphs[-1] if paragraphs else ""
    since = tl.waits[0].opened_at if tl.waits else tl.changed_at
    if status == "running" and step is not None:
        since = step.intended_at
    match status:
        case "broken":
            where, following = "The record does not hold", f"{broken}. Verify it to see where; then repair it."
        case "completed" | "cancelled":
            where = status.capitalize()
            following = f"It goes on as {tl.renewed_as}." if tl.renewed_as else "Nothing more will happen."
            since = tl.ended_at or since
        case "failed":
            where, since = f"Failed at {named}" if number else "Failed in the agent's own code", tl.ended_at or since
            following = "Nothing more happens until a person resumes the run."
        case "queued":
            over = step is not None and step.is_over
            where = f"Queued {'after' if over else 'at'} {named}" if named else "Queued"
            following = "No worker has taken the run yet."
        case _:
            where = f"{status.capitalize()} at {named}" if named else status.capitalize()
    return PositionSeen(where=where, since_us=since, next=following, step=number, place=tl.place, at_stage=at)


def _counts(fold: Fold, ledger: Ledger) -> CountsSeen:
    return CountsSeen(
        steps=len(fold.tops), all_steps=len(fold.steps), done=fold.facts.committed, attempts=ledger.spend.attempts,
        retried=len(fold.retried), decisions=len(fold.decisions), failures=len(fold.failures),
        waits=len(fold.facts.waits), effects=len(ledger.effects), traced=len(fold.trace),
        children=len(ledger.children), events=fold.facts.seq,
        snapshots=len(ledger.captures) if ledger.facts.workspace is not None else None,
    )  # fmt: skip


def _seal(client: Client, last_us: int) -> SealSeen | None:
    """The last seal, by its event alone."""
    head = client.store.head(SEALS)
    for seq in range(head.seq if head is not None else 0, 0, -1):
        event = client.log.event(SEALS, seq)
        if isinstance(event, system_events.StoreSealed):
            return SealSeen(number=event.number, at_us=event.at, covers=last_us <= event.at)
    return None


# asked for ----------------------------------------------------------------------------------------


class WhyAsked(Doc, frozen=True):
    run: RunId
    step: StepId | None = None


class WhySeen(Doc, frozen=True):
    """Paragraphs in plain words, made of what is on record and of nothing else."""

    run: str
    step: str | None
    why: tuple[str, ...]


def why(call: Call[WhyAsked, Nothing]) -> WhySeen:
    """Why a step happened and how it went; without a step, where the run is and why."""
    run, number, log = call.asked.run, call.asked.step, call.client.log
    through = through_of(call, run)
    if number is None:
        found = part_of(log, run, limit=TAIL_STEPS, through=through)
        return WhySeen(run=run, step=None, why=tuple(explained(found, text_of=reply_text)))
    fold = log.state(run).fold
    near = about(log, run, fold, number, through)
    if near is None:
        raise unknown(run, fold, number)
    return WhySeen(run=run, step=number, why=tuple(explained(near, number, text_of=reply_text)))


class ProblemFound(Doc, frozen=True):
    where: str
    what: str
    seq: int | None
    is_healed: bool


class Verified(Doc, frozen=True):
    """What a verification found. `explained` is what is not as it was sealed, and why that is no fault."""

    run: str
    at_us: int
    holds: bool
    events: int
    erased: int
    repaired: int
    seals: int
    problems: tuple[ProblemFound, ...]
    explained: tuple[ProblemFound, ...]


def verify(call: Call[RunAsked, Nothing]) -> Verified:
    """Read a run's whole record again, prove it, and say where it breaks if it does."""
    report = call.client.verify(call.asked.run)

    def found(problems: list[Any]) -> Iterator[ProblemFound]:
        for each in problems:
            yield ProblemFound(where=each.where, what=each.what, seq=each.seq, is_healed=each.healed)

    return Verified(
        run=call.asked.run, at_us=call.now_us, holds=report.holds, events=report.events, erased=report.erased,
        repaired=report.repaired, seals=report.seals, problems=tuple(found(report.problems)),
        explained=tuple(found(report.explained)),
    )  # fmt: skip


class ExportAsked(Doc, frozen=True):
    run: RunId
    children: bool = False


def export(call: Call[ExportAsked, Nothing]) -> Response:
    """A run as one file that can be loaded, verified and replayed anywhere; less what is not to be seen."""
    run, veil = call.asked.run, call.context.veil
    if call.client.store.head(run) is None:
        raise RunUnknown(run)
    redact = veil.redaction(run) if veil is not None and veil.fields else False
    body = call.client.export(run, children=call.asked.children, redact=redact)
    name = "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "_" for each in run)[:80]
    headers = {"Content-Disposition": f'attachment; filename="{name}.killick"'}
    return Response(body, headers=headers, media_type="application/octet-stream")


ROUTES: Final[tuple[Route, ...]] = (
    get("/runs/{run}", run_page, asks=RunPageAsked, gives=RunSeen, page="run.html"),
    get("/runs/{run}/why", why, asks=WhyAsked, gives=WhySeen),
    post("/runs/{run}/verify", verify, asks=RunAsked, gives=Verified, scope="operator", natural=True),
    raw("/runs/{run}/export", export, asks=ExportAsked, media="application/octet-stream"),
)
