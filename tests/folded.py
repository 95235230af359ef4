"""Whole logs as folds, event by event."""

from __future__ import annotations

from collections.abc import Iterable

from killick.model import events as e
from killick.model.fold import Fold
from killick.model.ledger import Ledger


def fold_timeline(timeline: Iterable[tuple[int, e.Event]], fold: Fold | None = None) -> Fold:
    """Folds a timeline."""
    fold = fold or Fold()
    for seq, event in timeline:
        fold.apply(seq, event)
    return fold


def fold_ledger(log: Iterable[tuple[int, e.Event]], ledger: Ledger | None = None) -> Ledger:
    """Folds a whole log."""
    ledger = ledger or Ledger()
    for seq, event in log:
        ledger.apply(seq, event)
    return ledger
