"""Plans decisions before a model call: repeated reads, duplicates, evictions.

Pure: the same history and decisions give the same plan, and an applied plan is not repeated. It fixes the protected
pages before it asks a policy: the last turns, people's messages, current errors, pinned pages, and pages that the
latest turn mentions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from killick.model.page_events import EvictedBecause, FaultedHow, PageEvent, PageEvicted, PageFaulted, PagePinned
from killick.window import tombstones
from killick.window.compaction import ENOUGH, LOW, TurnRange, compact
from killick.window.pages import MARK_CHARS, History, Page, Tokens
from killick.window.policy import Policy, Rates, Situation
from killick.window.renderer import Renderer
from killick.window.schemas import Schemas
from killick.window.state import WindowState

RECENT_TURNS: Final = 3
"""The last turns are sent whole."""

SAVES_MIN: Final = 40
"""The minimum saving of a tombstone, in tokens."""

WORTHWHILE: Final = 0.05
"""The minimum eviction, as a fraction of the budget, if the budget cannot be met anyway."""

PIN_TURNS: Final = 12
PIN_TURNS_MAX: Final = 192
"""How long a fault pins a page; each further fault doubles it."""


class Decision(NamedTuple):
    """A decision of the window: an event without time and seq, and its values."""

    event: PageEvent
    data: dict[str, Any]


class View(msgspec.Struct, frozen=True):
    """The inputs of a plan."""

    history: History
    decided: WindowState
    rendering: Renderer
    schemas: Schemas
    tokens: Tokens
    policy: Policy
    rates: Rates
    budget: int
    system_tokens: int

    @property
    def fixed(self) -> int:
        """The tokens before the messages."""
        return self.system_tokens + self.schemas.tokens_sent

    @property
    def recent(self) -> int:
        """The start of the last turns."""
        turns = self.history.turns
        return turns[-RECENT_TURNS].start if len(turns) >= RECENT_TURNS else 0

    def new(self) -> list[Page]:
        """The pages since the last reply, which were not sent yet."""
        start = self.history.turns[-1].replied if self.history.turns else 0
        return [page for pages in self.history.at[start:] for page in pages]

    def holds(self, page: Page, before: bool = False) -> bool:
        """Returns whether a page's content is in the window, at or before its position."""
        return any(
            (not before or other.place < page.place) and not self.decided.is_out(other)
            for other in self.history.alike(page)
        )

    def saves(self, page: Page) -> bool:
        """Returns whether a page is sufficiently larger than its tombstone."""
        if not page.stub_tokens:
            page.set_saving(self.tokens(tombstones.for_page(page.source, page.tokens, page.handle)))
        return page.saves >= SAVES_MIN


def planned(view: View) -> list[Decision]:
    """Returns the decisions before the next call."""
    again = _again(view)
    decisions = _reread(view)
    decisions += [evict(again, (), "duplicate", view.history.turn)] if again else []
    return decisions + _evicted(view, again)


def faulted(page: Page, how: FaultedHow, view: View) -> list[Decision]:
    """Records a fault and pins the page for a while."""
    turn, times = view.history.turn, view.decided.faults_of(page.handle)
    until = turn + min(PIN_TURNS << min(times, 8), PIN_TURNS_MAX)
    data = {"source": page.source}
    return [
        Decision(PageFaulted(at=0, page=page.handle, how=how, tokens=page.tokens, turn=turn), data),
        Decision(PagePinned(at=0, page=page.handle, until=until, because="fault", turn=turn), data),
    ]


def evict(pages: Sequence[Page], ranges: Sequence[TurnRange], because: EvictedBecause, turn: int) -> Decision:
    """Evicts pages and ranges of whole turns together."""
    data = [_page_data(page.handle, page.kind, page.source, page.tokens, page.stale or because) for page in pages]
    data += [_page_data(each.handle, "turns", each.source, each.tokens, because) for each in ranges]
    saved = sum(page.saves for page in pages) + sum(each.freed for each in ranges)
    marks = [page.hash[:MARK_CHARS] for page in pages] + [each.mark for each in ranges]
    event = PageEvicted(
        at=0, pages=tuple(each["page"] for each in data), tokens=saved, because=because, turn=turn, marks=tuple(marks)
    )  # fmt: skip
    return Decision(event, {"pages": data})


def _page_data(handle: str, kind: str, source: str, tokens: int, why: str) -> dict[str, Any]:
    return {"page": handle, "kind": kind, "source": source, "tokens": tokens, "why": why}


def _reread(view: View) -> list[Decision]:
    """Finds evicted pages that were read again and are unchanged."""
    history, decisions = view.history, list[Decision]()
    for page in view.new():
        before = next((old for old in reversed(history.versions(page.identity)) if old.place < page.place), None)
        if before is None or before.hash != page.hash or not page.read or view.holds(page, before=True):
            continue
        if not view.decided.was_out(before, history.turn) or not view.saves(before):
            continue
        # The window's own answers are already recorded, in the previous turn.
        if not history.answers_own(page) and not view.decided.has_faulted(before.handle, history.turn - 1):
            decisions += faulted(before, "reread", view)
    return decisions


def _again(view: View) -> list[Page]:
    """Finds new copies of content that the window already holds: they are never sent whole."""
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
        # Nobody can have pinned a copy.
        is_copy = view.decided.out.get(page.handle) == "duplicate"
        return page.handle in pointed_at or (page.hash in pinned and not is_copy)

    offered = list(_offered(view, is_kept, offsets))
    now = Situation(
        turn, view.budget, total, fixed + (offsets[history.turns[-1].start] if turn else 0), view.rates,
        max(1.0, history.said_tokens / max(1, turn)), view.decided.widened(turn),
    )  # fmt: skip
    may_leave = {id(page) for page in offered}
    chosen = [page for page in view.policy.choose(offered, now) or () if id(page) in may_leave]
    ranges: list[TurnRange] = []
    rest = total - sum(page.saves for page in chosen)
    # If the budget forces it and the policy offers no more, evict enough that it does not recur every turn.
    if total > view.budget and rest > view.budget * ENOUGH:
        gone = {page.handle for page in [*chosen, *again]}
        spare = [page for page in rendering.resident() if page.handle not in gone and view.saves(page)]
        last = history.turns[-1].start if history.turns else len(history.messages)
        pages, ranges = compact(
            history, view.decided, rendering, [page for page in spare if page.index < last], gone,
            need=rest - view.budget, low=rest - int(view.budget * LOW), recent=view.recent,
            stays=lambda page: page.handle in pointed_at or pinned.get(page.hash) == "asked", is_kept=is_kept,
        )  # fmt: skip
        chosen += pages
    freed = sum(page.saves for page in chosen) + sum(turn_range.freed for turn_range in ranges)
    # If the protected pages alone exceed the budget, small evictions every turn do not help.
    if not freed or (total - freed > view.budget and freed < view.budget * WORTHWHILE):
        return []
    return [evict(chosen, ranges, "budget" if total > view.budget else "pays", turn)]


def _pointed_at(view: View, again: Sequence[Page]) -> set[str]:
    """Returns the positions that notes in the last turns refer to."""
    out = view.decided.out
    recent = [page for pages in view.history.at[view.recent :] for page in pages]
    noted = [page for page in recent if out.get(page.handle) == "duplicate"]
    return {view.rendering.original(page) for page in [*noted, *again]}


def _offered(view: View, is_kept: Callable[[Page], bool], offsets: Sequence[int]) -> Iterable[Page]:
    """Returns the pages that a policy may choose from."""
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
