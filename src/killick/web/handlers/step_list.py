"""Steps in lines: a page of a run, and the moments between its steps.

A line has a step's call and outcome in brief; its values are in its own document. Reads only the page, however long
the run is, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from killick.history import timeline_parts
from killick.history.page import STEPS_MAX, PageBuilder, bounds
from killick.history.phrasing import cut, short
from killick.history.timeline_parts import Entry, Moment, Step
from killick.model import events as e
from killick.model.fold import Fold
from killick.presenting import moments
from killick.presenting import steps as presented
from killick.presenting.documents import Document, StepReference, duration_us
from killick.presenting.gantt import Scale, Segment, TimeAxis
from killick.presenting.phrase import Briefly
from killick.web.routes import Call, Nothing, RunAsked, get

BRIEF_CHARS: Final = 240
"""How much of a value a line has."""
_BRIEF: Final = Briefly(BRIEF_CHARS)

INSIDE_MAX: Final = 60
"""How many lines a scope has; the last, or those around the step that is asked for."""


class StepsAsked(RunAsked, frozen=True, kw_only=True):
    """`cursor` is `next` of the section after."""

    cursor: Annotated[str, Meta(pattern=r"^\d{1,9}$")] | None = None
    limit: Annotated[int, Meta(ge=1, le=200)] = STEPS_MAX


# lines --------------------------------------------------------------------------------------------


class StepSummary(Document, frozen=True):
    """A step in one line. `whole` and `segments` are its places on the axis of its page, the attempts and waits in
    order; `revision` changes when the line changes."""

    number: str
    kind: e.Sort
    name: str
    status: str
    stage: str | None
    duration_seconds: float | None
    ended_at_us: int | None
    whole: Segment
    segments: tuple[Segment, ...]
    revision: str
    summary: str
    outcome: str | None = None
    error: str | None = None
    because: str | None = None
    effect: str | None = None
    attempts: int = 0
    retry_at_us: int | None = None
    ruling: str | None = None
    rule: str | None = None
    by: str | None = None
    waits_for: str | None = None
    waits_to: tuple[str, ...] = ()
    deadline_us: int | None = None
    child: str | None = None
    undoes: str | None = None
    undone_by: str | None = None
    deduplicated: bool = False
    drifted: bool = False
    edited_by: str | None = None
    overridden_by: str | None = None
    notes: int = 0
    tokens: int | None = None
    nested_steps: int = 0


class MomentSummary(Document, frozen=True):
    """An event between steps in one line."""

    kind: str
    text: str
    by: str | None = None
    stage: str | None = None
    rewound: tuple[StepReference, ...] = ()


class TimelineRow(Document, frozen=True):
    """A step or a moment; `depth` counts the enclosing scopes."""

    seq: int
    at_us: int
    depth: int
    step: StepSummary | None = None
    moment: MomentSummary | None = None


class StepPage(Document, frozen=True):
    """Steps `first` to `last` of `total`. `next`, `later`: cursors of earlier, later steps."""

    run: str
    first: int
    last: int
    total: int
    rows: tuple[TimelineRow, ...]
    axis: TimeAxis
    next: str | None
    later: str | None


@get("/runs/{run}/steps", personal=False)
def steps(call: Call[StepsAsked, Nothing]) -> StepPage:
    """A section of a run's steps, the last ones first asked for."""
    asked = call.asked
    before = int(asked.cursor) if asked.cursor is not None else None
    return step_page(call, asked.run, before=before, limit=asked.limit)


def step_page(
    call: Call[Any, Any],
    run: str,
    *,
    before: int | None,
    limit: int = STEPS_MAX,
    around: str | None = None,
    fold: Fold | None = None,
) -> StepPage:
    """The document of a section."""
    fold = fold or call.log.state(run).fold
    part = PageBuilder(call.log, run, fold).section(*bounds(fold, before, limit))
    scale = Scale(part.entries, fold.facts.started_at, call.now_us)
    rows = lines(part.entries, call.now_us, scale, is_first=part.first == 1, around=around)
    return StepPage(
        run=run, first=part.first, last=part.last, total=part.total, rows=tuple(rows), axis=scale.axis(),
        next=None if part.earlier is None else str(part.earlier),
        later=str(min(part.last + limit, part.total) + 1) if part.last < part.total else None,
    )  # fmt: skip


def lines(
    entries: Sequence[Entry],
    now_us: int,
    scale: Scale,
    *,
    is_first: bool = True,
    around: str | None = None,
) -> Iterator[TimelineRow]:
    """Entries as rows, those inside scopes deeper."""
    quiet = moments.trivial(entries, is_first=is_first)

    def of(entries: Sequence[Entry], depth: int) -> Iterator[TimelineRow]:
        for entry in entries:
            if isinstance(entry, Step):
                line = _line(entry, now_us, scale)
                yield TimelineRow(seq=entry.seq, at_us=entry.intended_at, depth=depth, step=line)
                yield from inside(entry, depth + 1)
            elif not quiet(entry):
                yield TimelineRow(seq=entry.seq, at_us=entry.at, depth=depth, moment=_moment(entry))

    def inside(scope: Step, depth: int) -> Iterator[TimelineRow]:
        found = scope.entries
        wanted = "" if around is None else f"{around}."
        near = [at for at, each in enumerate(found) if isinstance(each, Step) and wanted.startswith(f"{each.number}.")]
        end = min(max(near[0] + INSIDE_MAX // 2, INSIDE_MAX), len(found)) if near else len(found)
        start = max(end - INSIDE_MAX, 0)
        yield from _more(scope, depth, start, "before these")
        yield from of(found[start:end], depth)
        yield from _more(scope, depth, len(found) - end, "after these")

    return of(entries, 0)


def _more(scope: Step, depth: int, count: int, where: str) -> Iterator[TimelineRow]:
    """Says how many lines a scope has that are not shown."""
    if count:
        text = f"{count:,} more in step {scope.number} {where}; go to one by its number, or search"
        more = MomentSummary(kind="more", text=text)
        yield TimelineRow(seq=scope.seq, at_us=scope.intended_at, depth=depth, moment=more)


def _moment(moment: Moment) -> MomentSummary:
    event = moment.event
    rewound = tuple(map(StepReference.of, moment.left))
    stage = event.stage if isinstance(event, e.PlanReached) else None
    text = str(moments.line(moment, _BRIEF))
    return MomentSummary(kind=moment.kind, text=text, by=getattr(event, "by", None), stage=stage, rewound=rewound)


def _line(step: Step, now_us: int, scale: Scale) -> StepSummary:
    took, usage, verdict = duration_us(step, now_us), step.usage, step.rejected or step.verdict
    wait = next((wait for wait in reversed(step.waits) if wait.how is None), None)
    failure = step.failure or next((each.failure for each in reversed(step.attempts) if each.failure is not None), None)
    edits = [edit.by for edit in step.edits if edit.stands]
    because = step.decision.because if step.decision is not None else step.because
    came = presented.outcome(step, _BRIEF)
    return StepSummary.of(
        step, kind=step.sort, duration_seconds=None if took is None else took / 1_000_000,
        whole=scale.whole(step), segments=scale.segments(step),
        revision=f"{step.status}.{len(step.attempts)}.{len(step.waits)}.{len(step.notes)}.{step.undone_by or ''}",
        summary=presented.given(step, _BRIEF), outcome=str(came) if came is not None else None,
        error=cut(short(failure), BRIEF_CHARS) if step.status != "done" and failure is not None else None,
        because=_BRIEF.value(because) if because else None, attempts=len(step.attempts),
        retry_at_us=step.delayed_until, ruling=verdict.ruling if verdict is not None else None,
        rule=verdict.rule if verdict is not None else None, by=step.decision.by if step.decision else step.ended_by,
        waits_for=wait.waits_for if wait is not None and step.status in ("waiting", "in_doubt") else None,
        waits_to=wait.to if wait is not None else (), deadline_us=wait.deadline if wait is not None else None,
        child=step.child.run if step.child is not None else None, deduplicated=step.adopted is not None,
        drifted=bool(step.drifts), edited_by=edits[-1] if edits else None, notes=len(step.notes),
        tokens=usage.tokens_in + usage.tokens_out if usage is not None else None,
        nested_steps=sum(1 for _ in timeline_parts.walked(step.entries)),
    )  # fmt: skip
