"""Decodes and checks the rows that the SQL stores have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from killick.store.records import Head, Message, Problem, Snapshot, row_check


def head_of(found: tuple[Any, ...]) -> Head:
    _, run, seq, hash_, epoch, base, parent, holder, until, _ = found
    return Head(
        run=run, seq=seq, hash=hash_, epoch=epoch, base=base, parent=parent, holder=holder, lease_until_us=until
    )


def message_of(run: str, found: tuple[Any, ...], *, intact: bool = True) -> Message:
    number, id_, name, body, by, at_us, taken = found
    return Message(run=run, number=number, id=id_, name=name, body=body, by=by, at_us=at_us, taken=taken, intact=intact)


def snapshot_of(found: tuple[Any, ...]) -> Snapshot:
    seq, fold, hash_, root = found
    return Snapshot(seq=seq, fold=fold, hash=hash_, root=root)


def problems_of(
    strays: Iterable[tuple[Any, ...]], terms: Mapping[int, str], names: Mapping[int, str], derived: Sequence[str],
    *, heal: bool,
) -> Iterator[Problem]:  # fmt: skip
    """Reports rows without an owner, by table, and runs whose search terms are damaged."""

    def run_of(number: int) -> str:
        return names.get(number) or f"run number {number}"

    for table, number, rows in strays:
        what = f"{rows} rows belong to nothing that exists"
        yield Problem(where=table, what=what, run=run_of(number), healed=heal and table in derived)
    for number, what in terms.items():
        yield Problem(where="marks", what=what, run=run_of(number), healed=heal)


def damaged_values(damaged: tuple[list[Any], list[Any]], *, heal: bool) -> Iterator[Problem]:
    """Reports damaged chunks: those that logs use, and those that only snapshots use, which can be healed."""
    for hashes, healed in zip(damaged, (False, heal), strict=True):
        for hash_ in hashes:
            short = hash_.hex()[:12] if isinstance(hash_, bytes) else repr(hash_)[:12]  # a damaged one is any value
            yield Problem(where="pieces", what=f"value {short} does not match its hash", healed=healed)


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
