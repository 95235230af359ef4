"""The runs that a contract counts together: the one whose contract it is, its forks, and their children and renewals.

Reads the effects of the other runs from their logs. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple

from killick.contracts.contract import Others
from killick.contracts.policy_input import own_part, pasts
from killick.errors import KillickError
from killick.log.log import Log, Reader
from killick.model.ledger import BUDGET, Counts, Ledger, Spend
from killick.store.records import UniqueRight


class _Member(NamedTuple):
    """One run as far as it was looked at."""

    seq: int
    counts: Counts
    below: tuple[str, ...]
    past: dict[str, list[dict[str, Any]]]


class Family:
    """The budget group of one contract, as one of its runs sees it."""

    def __init__(self, log: Log, run: str, owner: str, tools: Iterable[str]) -> None:
        self._log = log
        self._run = run
        self._tools = tuple(tools)
        self._known: dict[str, _Member] = {}
        self.root = first_of(log, owner)

    def others(self, own: Ledger) -> Others:
        """The totals of every other run of the group."""
        found = Others(counts=Counts(), past={})
        names, seen = [self.root, self._run], set[str]()
        while names:
            run = names.pop()
            if run in seen:
                continue
            seen.add(run)
            member = None if run == self._run else self._member(run)
            names += _below(own) if run == self._run else member.below if member is not None else ()
            if member is not None:
                add(found.counts, member.counts)
                for tool, calls in member.past.items():
                    found.past.setdefault(tool, []).extend(calls)
        return found

    def slot(self, own: Ledger, others: Others) -> UniqueRight:
        """The right to act next in the budget group. Its holder has seen every earlier action."""
        number = own_part(own).governed + others.counts.governed
        return UniqueRight(BUDGET, sha256(f"{self.root}\0{number}".encode()).digest())

    def _member(self, run: str) -> _Member | None:
        head = self._log.store.head(run)
        if head is None:
            return None
        known = self._known.get(run)
        if known is not None and known.seq == head.seq:
            return known
        try:
            ledger = self._log.ledger(run)
        except KillickError:
            return known  # a broken run does nothing more
        past = pasts(ledger, Reader(self._log, head), self._tools, after=head.base)
        renewed = self._log.state(run).fold.facts.renewed_as
        below = (*_below(ledger), *((renewed,) if renewed else ()))
        member = self._known[run] = _Member(head.seq, own_part(ledger), below, past)
        return member


def _below(ledger: Ledger) -> list[str]:
    return [*(child.run for child in ledger.children), *ledger.facts.forks]


def first_of(log: Log, run: str) -> str:
    """The first run of a chain of forks and renewals, whose contract counts."""
    seen = {run}
    while True:
        head = log.store.head(run)
        if head is None:
            return run
        before = head.parent or log.state(run).fold.facts.follows
        if before is None or before in seen or log.store.head(before) is None:
            return run
        seen.add(before)
        run = before


def add(to: Counts, more: Counts) -> None:
    """Adds two totals."""
    for total, part in ((to.calls, more.calls), (to.effects, more.effects)):
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    for name in Spend.__struct_fields__:
        setattr(to.spend, name, getattr(to.spend, name) + getattr(more.spend, name))
    to.governed += more.governed
