"""Chooses evictions under budget pressure: whole old turns first, then other expendable pages.

Never evicts the system prompt, the last turn, pages that people pinned, or pages that notes in the last turns refer to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from killick.window.messages import Message
from killick.window.pages import History, Page
from killick.window.renderer import Renderer
from killick.window.state import WindowState

NOTE_TOKENS: Final = 80
"""The approximate minimum size of the note that replaces a range of turns."""

ENOUGH: Final = 0.6
"""If pages alone reduce the request to this fraction of the budget, turns stay."""

LOW: Final = 0.5
"""Turns are evicted down to this fraction of the budget, so that eviction does not recur every turn."""


class TurnRange(NamedTuple):
    """Whole turns that are evicted together."""

    first: int
    last: int
    source: str
    tokens: int
    freed: int
    mark: str

    @property
    def handle(self) -> str:
        return f"m{self.first}-m{self.last}"


def compact(
    history: History,
    decided: WindowState,
    rendering: Renderer,
    pages: Sequence[Page],
    gone: set[str],
    *,
    need: int,
    low: int,
    recent: int,
    stays: Callable[[Page], bool],
    is_kept: Callable[[Page], bool],
) -> tuple[list[Page], list[TurnRange]]:
    """Returns pages and turn ranges that free the needed tokens, as far as possible. `gone` is already being
    evicted."""
    ranges = _folded(history, decided, rendering, _foldable(history, decided, is_kept, recent), gone, need=low)
    need -= sum(turn_range.freed for turn_range in ranges)
    covered = {at for turn_range in ranges for at in range(turn_range.first, turn_range.last + 1)}
    people = [page.index for page in pages if not page.result]
    chosen: list[Page] = []

    def rank(page: Page) -> tuple[int, int]:
        """Ranks results before messages, the task last; errors and previously faulted pages after the others."""
        if is_kept(page):
            return 4, page.index
        if page.error:
            return 3, page.index
        if not page.result:
            return (5 if page.index in people[:1] + people[-1:] else 2), page.index
        return int(page.index >= recent), page.index

    for page in sorted(pages, key=rank):
        if need <= 0:
            break
        if page.index not in covered and not stays(page):
            chosen.append(page)
            need -= page.saves
    return chosen, ranges


def _is_from_person(said: Message) -> bool:
    """Returns whether a message is from a person and answers no call."""
    return said.role == "user" and not any(part.is_result for part in said.parts)


def _foldable(
    history: History, decided: WindowState, is_kept: Callable[[Page], bool], recent: int
) -> list[tuple[int, int]]:
    """Returns the turns that can be evicted whole, oldest first: a reply and its results, with no protected page. Later
    user messages stay."""
    found: list[tuple[int, int]] = []
    for number, turn in enumerate(history.turns):
        if turn.start >= recent:
            break
        last = history.turns[number + 1].start - 1
        while last > turn.start and _is_from_person(history.read[last]):
            last -= 1
        if turn.start == 0 or decided.is_folded(turn.start):
            continue
        said = range(turn.start, last + 1)
        if any(history.read[at].role not in ("assistant", "result") for at in said):
            continue
        pages = [page for at in said for page in history.at[at]]
        # An answer outside its turn would remain without its call.
        called = {call.id for at in said for call in history.read[at].calls}
        answered = {part.call for at in said for part in history.read[at].parts if part.is_result}
        if called != answered:
            continue
        if not any(is_kept(page) or page.media or (page.error and page.stale is None) for page in pages):
            found.append((turn.start, last))
    return found


def _folded(
    history: History,
    decided: WindowState,
    rendering: Renderer,
    turns: Sequence[tuple[int, int]],
    gone: set[str],
    *,
    need: int,
) -> list[TurnRange]:
    runs: list[list[int]] = []
    total = 0
    before = {last + 1: first for first, last in decided.folds}
    for first, last in turns:
        if total >= need:
            break
        said = range(first, last + 1)
        size = sum(map(rendering.size, said))
        size -= sum(page.saves for at in said for page in history.at[at] if page.handle in gone)
        if runs and runs[-1][1] + 1 == first:
            runs[-1][1] = last
            runs[-1][2] += size
        else:
            # An earlier eviction continues here, and has its note.
            size -= 0 if first in before else NOTE_TOKENS
            runs.append([before.get(first, first), last, size])
        total += size
    # A short range is no larger than its note.
    return [
        TurnRange(first, last, *history.summary(first, last), freed, history.mark("-", (first, last)))
        for first, last, freed in runs
        if freed > 0
    ]
