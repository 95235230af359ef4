"""What was decided so far, folded from events: what is out, what is pinned, and how often something was wanted back.

Knows handles only; the history says what they stand for. The same events in the same order give the same state.
"""

from __future__ import annotations

import re
from typing import Final

from killick.model.events import PageEvent, PageEvicted, PageFaulted, PagePinned
from killick.window.pages import History, Page

_PLACE: Final = re.compile(r"m(\d+)(?:\.\d+)?(?:-m(\d+))?")
_WANTED: Final = frozenset({"recalled", "repeated", "reread"})

GUARD_TURNS: Final = 40
"""How far back faults count for the thrash guard."""

GUARD_RATE: Final = 0.05
"""Faults for each eviction that are borne without holding more."""

GUARD_MAX: Final = 4.0


def places(handle: str) -> tuple[int, int] | None:
    """The first and the last message that a handle covers; None for a schema's."""
    found = _PLACE.fullmatch(handle)
    if found is None:
        return None
    return int(found[1]), int(found[2] or found[1])


class Decided:
    """The fold of a window's decisions."""

    def __init__(self) -> None:
        self.out: dict[str, str] = {}
        """Handles of pages that left, and why."""
        self.folds: list[tuple[int, int]] = []
        """Stretches of messages that left together, in order."""
        self.stubs: frozenset[str] = frozenset()
        self.shown: dict[str, int] = {}
        """Tools whose schemas came after all, and the turn in which they did."""
        self._folded: set[int] = set()
        self._left_at: dict[str | int, int] = {}
        """In which turn pages, by their handles, and messages of whole turns, by their places, left."""
        self._unseen: dict[str, str] = {}
        """What was decided of places that were not looked at since, and what they held then."""
        self._pins: dict[str, tuple[int, str]] = {}
        self._faults: list[tuple[int, str]] = []
        self._left: list[tuple[int, int]] = []

    def apply(self, event: PageEvent) -> None:
        match event:
            case PageEvicted(because="unused"):
                self.stubs |= {handle.removeprefix("tool:") for handle in event.pages}
            case PageEvicted():
                for handle in event.pages:
                    self._evict(handle, event.because, event.turn)
                self._unseen |= {handle: mark for handle, mark in zip(event.pages, event.marks, strict=False) if mark}
                if event.because != "duplicate":
                    self._left.append((event.turn, len(event.pages)))
            case PageFaulted():
                if event.page.startswith("tool:"):
                    self.shown.setdefault(event.page.removeprefix("tool:"), event.turn)
                elif (event.turn, event.page) not in self._faults[-8:]:
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
        """Drops what was decided of places that hold something else now; the first of them, if there is one."""
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
        """A page to its place; turns that it left with come back too."""
        self.out.pop(handle, None)
        covered = places(handle)
        if covered is not None and covered[0] in self._folded:
            self._keep_folds([fold for fold in self.folds if not fold[0] <= covered[0] <= fold[1]])

    def _keep_folds(self, folds: list[tuple[int, int]]) -> None:
        self.folds = folds
        self._folded = {at for first, last in folds for at in range(first, last + 1)}

    def drop_from(self, common: int, recent: int, turn: int) -> None:
        """Forgets what was decided of messages that are others now, and after that turn; and what left of those that
        are the last ones now."""

        def is_before(handle: str, index: int) -> bool:
            covered = places(handle)
            return covered is None or covered[1] < index

        index = min(common, recent)
        self.out = {handle: why for handle, why in self.out.items() if is_before(handle, index)}
        self._pins = {handle: pin for handle, pin in self._pins.items() if is_before(handle, common)}
        self._unseen = {handle: mark for handle, mark in self._unseen.items() if is_before(handle, index)}
        self._keep_folds([fold for fold in self.folds if fold[1] < index])
        self.shown = {name: at for name, at in self.shown.items() if at < turn}
        self._faults = [(at, handle) for at, handle in self._faults if at < turn]
        self._left = [(at, count) for at, count in self._left if at < turn]

    # what follows -----------------------------------------------------------------------------------

    def is_out(self, page: Page) -> bool:
        return page.handle in self.out or page.index in self._folded

    def was_out(self, page: Page, turn: int) -> bool:
        """Whether a page had left before a turn."""
        left = self._left_at.get(page.handle if page.handle in self.out else page.index, turn)
        return self.is_out(page) and left < turn

    def is_folded(self, index: int) -> bool:
        return index in self._folded

    def pinned(self, history: History) -> dict[str, str]:
        """The hashes of what is pinned now, and why: what is pinned is the content, wherever it stands."""
        # Of two pins on the same content the one that was asked for counts.
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

    def counts(self) -> tuple[int, int]:
        """Faults, and pages that left."""
        return len(self._faults), sum(count for _, count in self._left)

    def widened(self, turn: int) -> float:
        """The thrash guard: how much more is held because what left was wanted back."""
        faults = sum(at > turn - GUARD_TURNS for at, _ in self._faults)
        left = sum(count for at, count in self._left if at > turn - GUARD_TURNS)
        return 1.0 + min(GUARD_MAX, faults / max(left, 20) / GUARD_RATE) if faults else 1.0
