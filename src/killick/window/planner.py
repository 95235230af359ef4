"""What to decide before a call: schemas that nobody uses, what was read again, what is there already, what leaves.

Pure: the same history and the same decisions so far give the same plan, and a plan that was applied is not made again.
What must stay is settled here, before any policy is asked: the last turns, what people said, errors that nothing has
superseded, what is pinned, and what the latest turn speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from killick.model.events import EvictedBecause, FaultedHow, PageEvent, PageEvicted, PageFaulted, PagePinned
from killick.window import tombstones
from killick.window.compaction import ENOUGH, LOW, Stretch, squeezed
from killick.window.pages import MARK_CHARS, History, Page, Tokens
from killick.window.policy import Policy, Rates, Situation
from killick.window.renderer import Rendering
from killick.window.schemas import Schemas
from killick.window.state import Decided

RECENT_TURNS: Final = 3
"""The last turns are sent whole."""

SAVES_MIN: Final = 40
"""What a page must save to be worth a tombstone, in tokens."""

WORTHWHILE: Final = 0.05
"""What must leave at once, as a part of the budget, where it cannot be held anyway."""

PIN_TURNS: Final = 12
PIN_TURNS_MAX: Final = 192
"""For how long a fault pins a page; each further one doubles it."""


class Decision(NamedTuple):
    """What the window decided, as an event without time and place, and the values that go with it."""

    event: PageEvent
    told: dict[str, Any]


class View(msgspec.Struct, frozen=True):
    """All that a plan is made of."""

    history: History
    decided: Decided
    rendering: Rendering
    schemas: Schemas
    tokens: Tokens
    policy: Policy
    rates: Rates
    budget: int
    system_tokens: int

    @property
    def fixed(self) -> int:
        """What stands before the messages."""
        return self.system_tokens + self.schemas.tokens_sent

    @property
    def recent(self) -> int:
        """Where the last turns begin."""
        turns = self.history.turns
        return turns[-RECENT_TURNS].start if len(turns) >= RECENT_TURNS else 0

    def new(self) -> list[Page]:
        """The pages that came since the model last replied: none of them was sent yet."""
        start = self.history.turns[-1].replied if self.history.turns else 0
        return [page for pages in self.history.at[start:] for page in pages]

    def holds(self, page: Page, before: bool = False) -> bool:
        """Whether what a page says stands in the window, or stands there before it."""
        return any(
            (not before or other.place < page.place) and not self.decided.is_out(other)
            for other in self.history.alike(page)
        )

    def saves(self, page: Page) -> bool:
        """Whether a page is larger than its tombstone, so that it is worth one."""
        if not page.stub_tokens:
            page.weigh(self.tokens(tombstones.left(page.source, page.tokens, page.handle)))
        return page.saves >= SAVES_MIN


def planned(view: View) -> list[Decision]:
    """What to decide before the next call."""
    again = _again(view)
    decisions = [*_unused(view), *_reread(view)]
    decisions += [left(again, (), "duplicate", view.history.turn)] if again else []
    return decisions + _evicted(view, again)


def faulted(page: Page, how: FaultedHow, view: View) -> list[Decision]:
    """A page was wanted back: that is said, and it stays for a while."""
    turn, times = view.history.turn, view.decided.faults_of(page.handle)
    until = turn + min(PIN_TURNS << min(times, 8), PIN_TURNS_MAX)
    told = {"source": page.source}
    return [
        Decision(PageFaulted(at=0, page=page.handle, how=how, tokens=page.tokens, turn=turn), told),
        Decision(PagePinned(at=0, page=page.handle, until=until, because="fault", turn=turn), told),
    ]


def left(pages: Sequence[Page], stretches: Sequence[Stretch], because: EvictedBecause, turn: int) -> Decision:
    """Pages, and stretches of whole turns, leave together."""
    told = [_told(page.handle, page.kind, page.source, page.tokens, page.stale or because) for page in pages]
    told += [_told(each.handle, "turns", each.source, each.tokens, because) for each in stretches]
    saved = sum(page.saves for page in pages) + sum(each.freed for each in stretches)
    marks = [page.hash[:MARK_CHARS] for page in pages] + [each.mark for each in stretches]
    event = PageEvicted(
        at=0, pages=tuple(each["page"] for each in told), tokens=saved, because=because, turn=turn, marks=tuple(marks)
    )  # fmt: skip
    return Decision(event, {"pages": told})


def _told(handle: str, kind: str, source: str, tokens: int, why: str) -> dict[str, Any]:
    return {"page": handle, "kind": kind, "source": source, "tokens": tokens, "why": why}


def _unused(view: View) -> list[Decision]:
    """Schemas that are sent as stubs, once."""
    schemas, new = view.schemas, sorted(view.schemas.stubs - view.decided.stubs)
    if not new:
        return []
    told = [_told(f"tool:{name}", "schema", name, schemas.whole_tokens(name), "unused") for name in new]
    saved = sum(schemas.whole_tokens(name) - schemas.stub_tokens(name) for name in new)
    handles = tuple(f"tool:{name}" for name in new)
    event = PageEvicted(at=0, pages=handles, tokens=saved, because="unused", turn=view.history.turn)
    return [Decision(event, {"pages": told})]


def _reread(view: View) -> list[Decision]:
    """What had left, was read again, and is the same."""
    history, decisions = view.history, list[Decision]()
    for page in view.new():
        before = next((old for old in reversed(history.versions(page.identity)) if old.place < page.place), None)
        if before is None or before.hash != page.hash or not page.read or view.holds(page, before=True):
            continue
        if not view.decided.was_out(before, history.turn) or not view.saves(before):
            continue
        # What the window itself answered is on record; it was decided in the turn before.
        if not history.answers_own(page) and not view.decided.has_faulted(before.handle, history.turn - 1):
            decisions += faulted(before, "reread", view)
    return decisions


def _again(view: View) -> list[Page]:
    """New places of what the window holds already: they are never sent whole, so nothing is written anew."""
    return [
        page
        for page in view.new()
        if page.result
        and not page.error
        and not view.decided.is_out(page)
        and view.saves(page)
        and view.holds(page, before=True)
    ]


def _evicted(view: View, again: Sequence[Page]) -> list[Decision]:
    history, rendering = view.history, view.rendering
    turn, offsets, fixed = history.turn, rendering.offsets(), view.fixed
    total = fixed + rendering.tokens - sum(page.saves for page in again)
    pinned = view.decided.pinned(history)
    pointed_at = _pointed_at(view, again)

    def is_kept(page: Page) -> bool:
        # A copy is nothing that anybody could have pinned.
        is_copy = view.decided.out.get(page.handle) == "duplicate"
        return page.handle in pointed_at or (page.hash in pinned and not is_copy)

    offered = list(_offered(view, is_kept, offsets))
    now = Situation(
        turn, view.budget, total, fixed + (offsets[history.turns[-1].start] if turn else 0), view.rates,
        max(1.0, history.said_tokens / max(1, turn)), *view.decided.counts(), view.decided.widened(turn),
    )  # fmt: skip
    may_leave = {id(page) for page in offered}
    chosen = [page for page in view.policy.choose(offered, now) or () if id(page) in may_leave]
    stretches: list[Stretch] = []
    rest = total - sum(page.saves for page in chosen)
    # Where the budget forces it and the policy has no more to give, far enough that it does not go on every turn.
    if total > view.budget and rest > view.budget * ENOUGH:
        gone = {page.handle for page in [*chosen, *again]}
        spare = [page for page in rendering.resident() if page.handle not in gone and view.saves(page)]
        last = history.turns[-1].start if history.turns else len(history.messages)
        pages, stretches = squeezed(
            history, view.decided, rendering, [page for page in spare if page.index < last], gone,
            need=rest - view.budget, low=rest - int(view.budget * LOW), recent=view.recent,
            stays=lambda page: page.handle in pointed_at or pinned.get(page.hash) == "asked", is_kept=is_kept,
        )  # fmt: skip
        chosen += pages
    freed = sum(page.saves for page in chosen) + sum(stretch.freed for stretch in stretches)
    # Where what must stay exceeds the budget, there is no use in a little less with every turn.
    if not freed or (total - freed > view.budget and freed < view.budget * WORTHWHILE):
        return []
    return [left(chosen, stretches, "budget" if total > view.budget else "pays", turn)]


def _pointed_at(view: View, again: Sequence[Page]) -> set[str]:
    """The places that notes in the last turns point at."""
    out = view.decided.out
    recent = [page for pages in view.history.at[view.recent :] for page in pages]
    noted = [page for page in recent if out.get(page.handle) == "duplicate"]
    return {view.rendering.original(page) for page in [*noted, *again]}


def _offered(view: View, is_kept: Callable[[Page], bool], offsets: Sequence[int]) -> Iterable[Page]:
    """The pages of which a policy may choose."""
    turn, recent, fixed = view.history.turn, view.recent, view.fixed
    for page in view.rendering.resident():
        if page.index >= recent:
            return
        if not page.result or is_kept(page) or (page.error and page.stale is None) or not view.saves(page):
            continue
        if page.used >= turn > page.born:
            continue
        page.offset = fixed + offsets[page.index]
        yield page
