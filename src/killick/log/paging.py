"""Reads all heads of a store, and all rows of a run, page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from killick.store.protocol import Store
from killick.store.records import Head, Row

_ROWS: Final = 2_000


def heads(store: Store, *, after: int = 0) -> Iterator[tuple[int, Head]]:
    """Yields the number and head of every run after a number, in order of creation: a fork comes after its parent."""
    while found := store.heads(after=after):
        yield from found
        after = found[-1][0]


def pages(
    store: Store, run: str, *, after: int = 0, up_to: int | None = None, data: bool = True
) -> Iterator[Sequence[Row]]:
    """Yields a run's own rows after a seq, up to another or to the last."""
    while (limit := _ROWS if up_to is None else min(_ROWS, up_to - after)) > 0:
        rows = store.read(run, after=after, limit=limit, data=data)
        if up_to is not None and rows and rows[-1].seq > up_to:  # a repair left a gap
            rows = [row for row in rows if row.seq <= up_to]
        if rows:
            yield rows
        if len(rows) < limit:
            return
        after = rows[-1].seq
