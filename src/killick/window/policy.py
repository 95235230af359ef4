"""Eviction policy: a cost model over page sizes, expected turns, and the prices of cached and written tokens.

Pure: a choice depends only on the pages and the situation. Protected pages are never offered to a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import msgspec

from killick.window.pages import Page

OUTPUT_TOKENS: Final = 100
"""The approximate output of a model that asks for a page."""


class Rates(msgspec.Struct, frozen=True):
    """Token prices relative to fresh input: cache read, cache write, output."""

    input: float = 1.0
    cached: float = 0.1
    written: float = 1.25
    output: float = 5.0


class Situation(msgspec.Struct, frozen=True):
    """A policy's inputs besides the pages."""

    turn: int
    """The number of model replies so far."""
    budget: int
    tokens: int
    """The request's tokens without an eviction."""
    cached: int
    """The length of the cached prefix in tokens."""
    rates: Rates
    growth: float = 1_000.0
    """The history's growth in tokens a turn."""
    widened: float = 1.0
    """How much larger the working set is because of faults; 1 without faults."""


class Policy(Protocol):
    """Chooses evictions before a call: usually none, since an eviction invalidates the cache after it."""

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]: ...


_Judged: TypeAlias = tuple[Page, float]
"""A page, and its probability of reuse."""


class WorkingSet(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps likely pages, and evicts the others in batches that pay for themselves.

    A page's probability of reuse decays with the turns since its last use, down to a floor: people and models return to
    old topics. Pages above `risk` stay unless the budget forces them out. For the others, a batch saves its size at the
    cached price for as long as the window then has room to grow. It costs rewriting the cache after its first page, and
    the expected faults. The batch with the best positive balance is evicted. Forced evictions go down to `low` of the
    budget, so that they are rare.
    """

    chance: float = 0.3
    """The probability of reuse of a just used page."""
    half: float = 4.0
    """The number of unused turns after which the probability has fallen halfway."""
    floor: float = 0.05
    """The probability's lower limit."""
    outdated: float = 0.01
    """The factor for pages with a newer version."""
    risk: float = 0.12
    """The probability above which a page is evicted only if forced."""
    caution: float = 2.0
    """How much worse a fault is than its tokens: it takes a turn, and may mislead the model."""
    patience: float = 1.0
    """How much more than its cost a batch must save, as a fraction of the cost."""
    low: float = 0.5
    turns: int = 60
    """The maximum number of turns over which savings are expected."""

    def choose(self, pages: Sequence[Page], now: Situation) -> Sequence[Page]:
        judged = [(page, min(1.0, self.likely(page, now.turn) * now.widened)) for page in pages]
        paying = self._paying(judged, now)
        return paying if now.tokens <= now.budget else self._forced(judged, paying, now)

    def likely(self, page: Page, turn: int) -> float:
        """Returns a page's probability of reuse."""
        chance = self.chance * (self.outdated if page.stale == "superseded" else 1.0)
        return chance * (self.floor + (1 - self.floor) / (1 + ((turn - page.used) / self.half) ** 2))

    def _paying(self, judged: Sequence[_Judged], now: Situation) -> list[Page]:
        """Returns the best batch: from some position on, all eligible pages."""
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
        """Evicts down to the low mark: batches that pay, then the least likely pages. Risky pages stay: old turns go
        first."""
        need = now.tokens - int(now.budget * self.low) - sum(page.saves for page in paying)
        chosen, known = list(paying), set(map(id, paying))
        for page, likely in sorted(judged, key=lambda each: each[1]):
            if need <= 0 or likely > self.risk:
                break
            if id(page) not in known:
                chosen.append(page)
                need -= page.saves
        return chosen
