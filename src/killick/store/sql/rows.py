"""Decodes and checks the rows that the SQL stores have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from killick.store.records import Head, Message, Snapshot, row_check


def head_of(found: tuple[Any, ...]) -> Head:
    _, run, seq, hash_, epoch, base, parent, holder, until, _ = found
    return Head(
        run=run, seq=seq, hash=hash_, epoch=epoch, base=base, parent=parent, holder=holder, lease_until_us=until
    )


def message_of(run: str, found: tuple[Any, ...]) -> Message:
    number, id_, name, body, by, at_us, taken = found
    return Message(run=run, number=number, id=id_, name=name, body=body, by=by, at_us=at_us, taken=taken)


def snapshot_of(found: tuple[Any, ...]) -> Snapshot:
    seq, fold, hash_, root = found
    return Snapshot(seq=seq, fold=fold, hash=hash_, root=root)


def damaged_terms(
    terms: Iterable[tuple[Any, ...]], positions: Iterable[tuple[Any, ...]], names: Mapping[int, str]
) -> dict[int, str]:
    """Returns the runs, by number, whose search terms are damaged, with the message."""
    totals: Counter[int] = Counter()
    for number, term, at_us, seq in terms:
        totals[number] += row_check(term, at_us, number, seq)
    wrong: dict[int, str] = {}
    for number, seq, total, checksum in positions:
        if row_check(number, seq, total) != checksum or totals[number] != total or number not in names:
            wrong[number] = "the search terms are not as they were written"
        totals.pop(number, None)
    return wrong | dict.fromkeys(totals, "has search terms that no writer indexed")
