"""Folds window decisions: evicted pages, pins and fault counts.

Knows handles only; the history resolves them. The same events in the same order give the same state.
"""

from __future__ import annotations

import re
from typing import Final

from killick.model.page_events import PageEvent, PageEvicted, PageFaulted, PagePinned
from killick.window.pages import History, Page

_PLACE: Final = re.compile(r"m(\d+)(?:\.\d+)?(?:-m(\d+))?")

GUARD_TURNS: Final = 40
"""The number of recent turns whose faults count for the thrash guard."""

GUARD_RATE: Final = 0.05
"""The rate of faults to evictions that is tolerated without a larger working set."""

GUARD_MAX: Final = 4.0


def places(handle: str) -> tuple[int, int] | None:
    """Returns the first and the last message of a handle; None if it is not a handle."""
    found = _PLACE.fullmatch(handle)
    if found is None:
        return None
    return int(found[1]), int(found[2] or found[1])


class WindowState:
    """The fold of a window's decisions."""

    def __init__(self) -> None:
        self.out: dict[str, str] = {}
        """Handles of evicted pages, with the reason."""
        self.folds: list[tuple[int, int]] = []
        """Ranges of messages that were evicted together, in order."""
        self._folded: set[int] = set()
        self._left_at: dict[str | int, int] = {}
        """The turns in which pages, by handle, and messages of whole turns, by position, were evicted."""
        self._unseen: dict[str, str] = {}
        """Decisions about positions not checked since, and their content then."""
        self._pins: dict[str, tuple[int, str]] = {}
        self._faults: list[tuple[int, str]] = []
        self._left: list[tuple[int, int]] = []

    def apply(self, event: PageEvent) -> None:
        match event:
            case PageEvicted():
                for handle in event.pages:
                    self._evict(handle, event.because, event.turn)
                self._unseen |= {handle: mark for handle, mark in zip(event.pages, event.marks, strict=False) if mark}
                if event.because != "duplicate":
                    self._left.append((event.turn, len(event.pages)))
            case PageFaulted():
                if (event.turn, event.page) not in self._faults[-8:]:
                    self._faults.append((event.turn, event.page))
            case PagePinned():
                self._pins[event.page] = event.until, event.because
                if event.because == "asked" and event.until > event.turn:
                    self._bring_back(event.page)

    def _evict(self, handle: str, because: str, turn: int) -> None:
        covered = places(handle)
        if covered is None or "-" not in handle:
            self.out[handle] = because
            self._left_at[handle] = turn
            return
        first, last = covered
        self._left_at |= {at: turn for at in range(first, last + 1) if at not in self._folded}
        self.folds = sorted([fold for fold in self.folds if not first <= fold[0] <= last] + [covered])
        self._folded.update(range(first, last + 1))

    def look(self, history: History) -> int | None:
        """Drops decisions about positions whose content changed; returns the first of them, if any."""
        first: int | None = None
        for handle, mark in list(self._unseen.items()):
            covered = places(handle)
            if covered is None or covered[1] >= len(history.messages):
                continue
            del self._unseen[handle]
            if history.mark(handle, covered) != mark:
                self._bring_back(handle)
                first = covered[0] if first is None else min(first, covered[0])
        return first

    def _bring_back(self, handle: str) -> None:
        """Restores a page to its position, with the turns evicted with it."""
        self.out.pop(handle, None)
        covered = places(handle)
        if covered is not None and covered[0] in self._folded:
            self._keep_folds([fold for fold in self.folds if not fold[0] <= covered[0] <= fold[1]])

    def _keep_folds(self, folds: list[tuple[int, int]]) -> None:
        self.folds = folds
        self._folded = {at for first, last in folds for at in range(first, last + 1)}

    def drop_from(self, common: int, recent: int, turn: int) -> None:
        """Drops decisions about messages that changed and about later turns, and evictions of messages that are now the
        last."""

        def is_before(handle: str, index: int) -> bool:
            covered = places(handle)
            return covered is None or covered[1] < index

        index = min(common, recent)
        self.out = {handle: why for handle, why in self.out.items() if is_before(handle, index)}
        self._pins = {handle: pin for handle, pin in self._pins.items() if is_before(handle, common)}
        self._unseen = {handle: mark for handle, mark in self._unseen.items() if is_before(handle, index)}
        self._keep_folds([fold for fold in self.folds if fold[1] < index])
        self._faults = [(at, handle) for at, handle in self._faults if at < turn]
        self._left = [(at, count) for at, count in self._left if at < turn]

    # derived state ----------------------------------------------------------------------------------

    def is_out(self, page: Page) -> bool:
        return page.handle in self.out or page.index in self._folded

    def was_out(self, page: Page, turn: int) -> bool:
        """Returns whether a page was out before a turn."""
        left = self._left_at.get(page.handle if page.handle in self.out else page.index, turn)
        return self.is_out(page) and left < turn

    def is_folded(self, index: int) -> bool:
        return index in self._folded

    def pinned(self, history: History) -> dict[str, str]:
        """Returns the hashes of pinned contents, with reasons: a pin follows the content, at any position."""
        # Of two pins on the same content, the requested one counts.
        pins = sorted(self._pins.items(), key=lambda pin: pin[1][1] == "asked")
        return {
            history.pages[handle].hash: because
            for handle, (until, because) in pins
            if until > history.turn and handle in history.pages
        }

    def faults_of(self, handle: str) -> int:
        return sum(page == handle for _, page in self._faults)

    def has_faulted(self, handle: str, since: int) -> bool:
        return any(turn >= since and page == handle for turn, page in reversed(self._faults))

    def widened(self, turn: int) -> float:
        """The thrash guard: how much larger the working set is because of faults."""
        faults = sum(at > turn - GUARD_TURNS for at, _ in self._faults)
        left = sum(count for at, count in self._left if at > turn - GUARD_TURNS)
        return 1.0 + min(GUARD_MAX, faults / max(left, 20) / GUARD_RATE) if faults else 1.0
