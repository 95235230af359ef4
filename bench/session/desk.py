"""What is in a window, turn by turn, for one who knows the future: what it holds, what could leave, and at what price.

Sizes are in tokens. A turn is a reply and its result; a person's words are a turn of their own that never leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Final

import msgspec

from bench.session.meter import ANTHROPIC
from bench.session.script import Session
from killick.window import Rates

RECENT_TURNS: Final = 3
SAVES_MIN: Final = 40
NOTE_TOKENS: Final = 45
FETCH_TOKENS: Final = 120
"""About what the two messages of a call take by which something is fetched again, without what it fetches."""
FETCH_OUTPUT: Final = 50


class Plan(msgspec.Struct, frozen=True):
    """When batches leave, each from some turn on; how deep to go when the budget forces it; how dear a fault is."""

    batches: dict[int, int]
    """By the move before which it happens: the first turn that may be touched."""
    low: float = 0.7
    dear: float = 1.0


class Turn(msgspec.Struct):
    """One turn in the window."""

    move: int
    key: str
    text: str
    words: int
    """Tokens of everything but the result."""
    tokens: int
    """Tokens of the result."""
    stub: int
    """What stands for the result when it is out."""
    can_fold: bool
    path: str | None = None
    """The file that it changes."""
    is_out: bool = False
    is_folded: bool = False
    is_same: bool = False
    """Out because its text stands before it."""

    @property
    def size(self) -> int:
        return 0 if self.is_folded else self.words + (self.stub if self.is_out else self.tokens)

    @property
    def saves(self) -> int:
        return self.tokens - self.stub


class Future:
    """What will be asked for again, and when."""

    def __init__(self, session: Session) -> None:
        self._events: dict[str, list[tuple[int, bool, str]]] = defaultdict(list)
        self._edit_needed: dict[int, int] = {}
        edits: dict[str, list[int]] = defaultdict(list)
        reads: dict[str, int] = {}
        for at, move in enumerate(session.moves):
            for need in move.needs:
                self._events[need.key].append((at, True, need.now))
                if need.tool == "read_file":
                    for edit in edits[need.arguments["path"]]:
                        if edit > reads.get(need.key, -1):
                            self._edit_needed[edit] = at
            if move.tool is not None and move.tool != "edit_file":
                self._events[move.key].append((at, False, move.result))
                reads[move.key] = at
            if move.writes:
                edits[move.writes].append(at)

    def next(self, key: str, text: str, now: int) -> tuple[int, bool] | None:
        """When a result is wanted next, and whether it is needed or only asked for again; None: never more."""
        events = self._events.get(key, ())
        at = bisect_left(events, (now, False, ""))
        if at == len(events):
            return None
        move, needed, given = events[at]
        return (move, needed) if needed or given == text else None

    def edit_is_needed(self, move: int, now: int) -> bool:
        """Whether a change made in a move must be in the window for something still to come."""
        return self._edit_needed.get(move, -1) >= now


class Desk:
    """The window of one who knows the future and keeps to a plan."""

    def __init__(self, future: Future, plan: Plan, budget: int, fixed: int, rates: Rates = ANTHROPIC) -> None:
        self.turns: list[Turn] = []
        self.total = fixed
        self.changed: int | None = None
        """The first turn that the last decision touched."""
        self._future = future
        self._plan = plan
        self._budget = budget
        self._rates = rates
        self._latest: dict[str, str] = {}
        self._in: dict[str, int] = defaultdict(int)
        self._decided = -1
        self._standing = 0
        """Turns before this one were folded already."""

    def add(self, turn: Turn) -> None:
        """What was just said; what the window holds already is not sent twice."""
        if turn.saves >= SAVES_MIN and self._in[turn.text]:
            turn.is_out = turn.is_same = True
        elif turn.key:
            self._in[turn.text] += 1
        self._latest[turn.key] = turn.text
        self.turns.append(turn)
        self.total += turn.size

    def holds(self, text: str) -> bool:
        """Whether a text is in the window."""
        return self._in[text] > 0

    def decide(self, now: int) -> bool:
        """Before a request: whether something left."""
        self.changed = None
        if now in self._plan.batches and now != self._decided:
            self._decided = now
            self._leave(now, self._plan.batches[now])
        if self.total > self._budget:
            self._leave(now, 0)
            self._fold(now)
            self._force(now)
        return self.changed is not None

    def _leave(self, now: int, first: int) -> None:
        """All that is not worth its place, from some turn on."""
        for at in range(first, len(self.turns) - RECENT_TURNS):
            turn = self.turns[at]
            if not turn.is_out and not turn.is_folded and turn.saves >= SAVES_MIN and self._is_spared(turn, now):
                self._out(at)

    def _is_spared(self, turn: Turn, now: int) -> bool:
        """Whether what it takes to keep a result is more than what it takes to get it back."""
        wanted = self._wanted(turn, now)
        if wanted is None:
            return True
        kept = turn.saves * self._rates.cached * (wanted[0] - now)
        again = turn.tokens * self._rates.written
        if wanted[1]:
            again += self.total * self._rates.cached + FETCH_TOKENS * self._rates.written
            again += FETCH_OUTPUT * self._rates.output
            again *= self._plan.dear
        return kept > again

    def _wanted(self, turn: Turn, now: int) -> tuple[int, bool] | None:
        return self._future.next(turn.key, turn.text, now) if self._latest.get(turn.key) == turn.text else None

    def _fold(self, now: int) -> None:
        """Whole turns, the oldest first, down to the low mark: those that nothing to come depends on."""
        goal = self._budget * self._plan.low
        for at in range(len(self.turns) - RECENT_TURNS):
            if self.total <= goal:
                return
            turn = self.turns[at]
            if turn.is_folded or not turn.can_fold or (turn.path and self._future.edit_is_needed(turn.move, now)):
                continue
            if not turn.is_out and not self._is_spared(turn, now):
                continue
            if not turn.is_out:
                self._out(at)
            self.total -= turn.size
            turn.is_folded = True
            self.total += 0 if at and self.turns[at - 1].is_folded else NOTE_TOKENS
            self.changed = at if self.changed is None else min(self.changed, at)

    def _force(self, now: int) -> None:
        """What is wanted last leaves first, as far as the budget demands."""
        rest = [at for at, turn in enumerate(self.turns[:-1]) if not turn.is_out and turn.saves >= SAVES_MIN]
        rest.sort(key=lambda at: -(self._wanted(self.turns[at], now) or (1 << 40, True))[0])
        for at in rest:
            if self.total <= self._budget:
                return
            self._out(at)

    def _out(self, at: int) -> None:
        turn = self.turns[at]
        self.total -= turn.saves
        turn.is_out = True
        self._in[turn.text] -= 1
        self.changed = at if self.changed is None else min(self.changed, at)
