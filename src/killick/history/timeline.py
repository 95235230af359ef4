"""A run for readers: its position, its waits, and its steps in order with their parts.

Built from the log alone. Values are read lazily; writes nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from killick.history.page import STEPS_MAX, PageBuilder, bounds
from killick.history.timeline_parts import Entry, Failed, Moment, Part, Step, Wait, walked
from killick.log.log import Log
from killick.model import events as e
from killick.model.facts import Status
from killick.model.fold import Fold
from killick.model.state import State


class Timeline(Part, frozen=True):
    """A run at its head, or as of an event. `held_back`: since when it waits for a person to resume it.

    For a long run it may contain one page; then `skipped` counts the top-level steps before it.
    """

    run: str
    agent: str
    status: Status
    seq: int
    generation: int
    plan: tuple[str, ...]
    stage: str | None
    current: str | None
    started_at: int
    changed_at: int
    last_at: int
    ended_at: int | None
    wake_at: int | None
    cancelling: bool
    priority: int
    tags: tuple[str, ...]
    parent: str | None
    parent_step: str | None
    forked_from: str | None
    renewed_as: str | None
    holder: str | None
    build: e.Build
    held_back: Moment | None
    waits: tuple[Wait, ...]
    entries: tuple[Entry, ...]
    failed: Failed | None
    state: State
    skipped: int = 0

    @property
    def input(self) -> Any:
        return self.state.input

    @property
    def result(self) -> Any:
        return self.state.result if self.status == "completed" else None

    @property
    def context(self) -> Any:
        """The agent's context."""
        return self.state.context.document

    @property
    def place(self) -> str | None:
        """The position in its plan: `approve: step 6 of 9`."""
        if self.stage is None or self.stage not in self.plan:
            return self.stage
        return f"{self.stage}: step {self.plan.index(self.stage) + 1} of {len(self.plan)}"

    def steps(self) -> Iterator[Step]:
        """Yields every step, nested ones after their scope."""
        return walked(self.entries)

    def step(self, number: str) -> Step | None:
        """Returns a step by its number."""
        return next((step for step in self.steps() if step.number == number), None)

    @property
    def at_work(self) -> Step | None:
        """The step of interest: the failed one, else the waiting one, else the last."""
        failed = self.failed.step if self.failed is not None else None
        waits = self.waits[0].step if self.waits and self.failed is None else None
        number = failed or waits or self.current
        return self.step(number) if number is not None else None


# making one ---------------------------------------------------------------------------------------


def timeline(log: Log, run: str, at: int | None = None, *, keep: Sequence[int] = ()) -> Timeline:
    """Returns a run's timeline at its head, or as of an event and those of `keep`."""
    making = PageBuilder(log, run, log.state(run, at, keep=keep).fold, at, keep)
    return _around(making, run, making.everything())


def part_of(
    log: Log,
    run: str,
    *,
    before: int | None = None,
    limit: int = STEPS_MAX,
    fold: Fold | None = None,
    known: bool = True,
) -> Timeline:
    """Returns the run at its head with a page of its steps: the last ones, or the last before a top-level step.

    If requested, the contracts and the context at the page's start precede it; that reads every context change.
    """
    fold = fold or log.state(run).fold
    making = PageBuilder(log, run, fold)
    found = making.section(*bounds(fold, before, limit))
    before_it = making.known_before(found) if known else ()
    return _around(making, run, (*before_it, *found.entries), skipped=found.first - 1)


_HOLDS_BACK: Final = (e.RunPaused, e.RunDiverged, e.RunRepaired, e.RunQuarantined)


def _around(making: PageBuilder, run: str, entries: tuple[Entry, ...], skipped: int = 0) -> Timeline:
    facts = making.fold.facts
    taken = making.last(entries, e.RunTaken)
    held = making.last(entries, *_HOLDS_BACK) if facts.paused or facts.mend else None
    by_number = {step.number: step for step in walked(entries)}
    waits = (by_number[wait].waits[-1] for wait in facts.waits if wait in by_number and by_number[wait].waits)
    failed, ended = None, making.event(facts.ended) if facts.ended else None
    if ended is not None and facts.ended_as == "failed":
        failed = Failed(at=ended.at, step=getattr(ended, "step", None), values=making.values(facts.ended))
    return Timeline(
        run=run, agent=facts.agent, status=facts.status, seq=facts.seq, generation=facts.generation,
        plan=facts.plan, stage=facts.stage, current=facts.current, started_at=facts.started_at,
        changed_at=facts.changed_at, ended_at=None if ended is None else ended.at,
        last_at=making.event(facts.seq).at if facts.seq else 0, wake_at=making.fold.wake_at,
        cancelling=facts.cancelling, priority=facts.priority, tags=facts.tags, parent=facts.parent,
        parent_step=facts.parent_step, forked_from=facts.forked_from, renewed_as=facts.renewed_as,
        holder=getattr(taken.event, "holder", None) if taken is not None else None, build=facts.build,
        held_back=held, waits=tuple(waits), entries=entries,
        failed=failed, state=making.state(), skipped=skipped,
    )  # fmt: skip
