"""Which pages leave, and when: a cost model over sizes, expected turns, and what cached and written tokens cost.

Pure: a choice follows from the pages and the situation alone. What may not leave is not offered to a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from killick.window.pages import Page

OUTPUT_TOKENS: Final = 100
"""About what a model writes to ask for a page."""


class Rates(msgspec.Struct, frozen=True):
    """What a token costs, relative to one of fresh input: read from the provider's cache, written to it, or output."""

    input: float = 1.0
    cached: float = 0.1
    written: float = 1.25
    output: float = 5.0


class Situation(msgspec.Struct, frozen=True):
    """What a policy knows besides the pages."""

    turn: int
    """How many times the model has replied."""
    budget: int
    tokens: int
    """What goes out if nothing leaves."""
    cached: int
    """How many tokens from the start are as they were sent the last time."""
    rates: Rates
    growth: float = 1_000.0
    """By how many tokens the history grows each turn."""
    faults: int = 0
    evictions: int = 0
    widened: float = 1.0
    """How much larger the working set is held because pages were wanted back: 1 where none was."""


class Policy(Protocol):
    """Chooses what leaves before a call: nothing, most of the time, since what is before it must be written again."""

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]: ...


_Judged: TypeAlias = tuple[Page, float]
"""A page, and the chance that it is wanted again."""


class WorkingSet(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps what is likely to be wanted again; lets the rest go in batches that pay for themselves.

    A page's chance to be wanted again falls with the turns since its last use, down to a floor: long after, people and
    models come back to things. Pages above `risk` stay unless the budget forces it. The others are weighed: what a
    batch saves is its size at the cached price, for as long as the window then has room to grow; what it costs is to
    write anew all that stands after its first page, and the faults that it may lead to. The batch with the best balance
    leaves, if that is positive. Whatever the budget forces out, it goes down to `low` of the budget, so that the next
    time is far away.
    """

    chance: float = 0.3
    """The chance to be wanted again of what was just used."""
    half: float = 4.0
    """After so many turns without use the chance is half way down."""
    floor: float = 0.05
    """What is left of the chance for good."""
    outdated: float = 0.01
    """What is left of it when there is a newer version."""
    risk: float = 0.12
    """The chance above which a page leaves only if it must."""
    caution: float = 2.0
    """How much worse a fault is than its tokens: it takes a turn, and may lead a model astray."""
    patience: float = 1.0
    """How much more than its cost a batch must save, as a part of the cost."""
    low: float = 0.5
    turns: int = 60
    """For so many turns at most something is expected to be saved."""

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
        judged = [(page, min(1.0, self.likely(page, now.turn) * now.widened)) for page in pages]
        paying = self._paying(judged, now)
        return paying if now.tokens <= now.budget else self._forced(judged, paying, now)

    def likely(self, page: Page, turn: int) -> float:
        """The chance that a page is wanted again."""
        chance = self.chance * (self.outdated if page.stale == "superseded" else 1.0)
        return chance * (self.floor + (1 - self.floor) / (1 + ((turn - page.used) / self.half) ** 2))

    def _paying(self, judged: Sequence[_Judged], now: Situation) -> list[Page]:
        """The best batch: from some place on, all that may leave."""
        rates, room = now.rates, max(0, now.budget - now.tokens)
        anew, call = rates.written - rates.cached, now.tokens * rates.cached + OUTPUT_TOKENS * rates.output
        best, count, freed, kept, risked = 0.0, 0, 0, 0.0, 0.0
        chosen: list[Page] = []
        for page, likely in reversed(judged):
            if likely > self.risk:
                continue
            chosen.append(page)
            freed += page.saves
            kept += page.saves * (1 - likely)
            risked += likely * (call + page.tokens * rates.written)
            turns = min(self.turns, (room + freed) / now.growth)
            cost = max(0, now.cached - page.offset - freed) * anew
            balance = kept * rates.cached * turns - self.caution * risked - cost * (1 + self.patience)
            if balance > best:
                best, count = balance, len(chosen)
        return chosen[:count]

    def _forced(self, judged: Sequence[_Judged], paying: list[Page], now: Situation) -> list[Page]:
        """Down to the low mark: what pays, and then the least likely. What is risky stays: old turns go before it."""
        need = now.tokens - int(now.budget * self.low) - sum(page.saves for page in paying)
        chosen, known = list(paying), set(map(id, paying))
        for page, likely in sorted(judged, key=lambda each: each[1]):
            if need <= 0 or likely > self.risk:
                break
            if id(page) not in known:
                chosen.append(page)
                need -= page.saves
        return chosen
