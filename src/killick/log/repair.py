"""Repairs a broken run: moves its damaged events aside, and lets it wait for a person. Deletes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from killick.errors import EventBroken, EventUnknown, LogError
from killick.log.derived import indexed_again
from killick.log.log import Log
from killick.log.paging import pages
from killick.log.verify import last_good
from killick.model import event_codec
from killick.model import events as e
from killick.model.chunks import pack
from killick.model.cipher import Place
from killick.store.records import Head, Row


def repair(log: Log, run: str, *, at: int, reason: str, by: str | None = None) -> e.RunRepaired:
    """Keeps the valid prefix, moves the rest aside and lets the run wait for a person.

    The head only moves forward: the repair follows the last event that the log ever had, and chains to the head's own
    hash. Readable attempts of the removed part enter the ledger with an unknown outcome.
    """
    log = log.unchecked()
    head = log.head(run)
    kept, kept_hash, what = last_good(log, head)
    if not what:
        if log.store.quarantined(run) is None:
            raise LogError(f"{run}: its log is intact; there is nothing to repair")
        log.store.quarantine(run, None)
        indexed_again(log.store, run, log.state(run).fold, at=head.seq)
        raise LogError(f"{run}: its log is intact again; it left quarantine, and nothing was changed")
    lost = [row for rows in pages(log.store, run, after=kept) for row in rows]
    last = max([head.seq, *(row.seq for row in lost)])
    event = e.RunRepaired(
        at=at,
        first=kept + 1,
        last=last,
        hash_before=e.to_text(kept_hash),
        hash_head=e.to_text(head.hash),
        set_aside=len(lost),
        doubts=tuple(_doubts(lost)),
        by=by,
    )
    data, place = pack({"because": reason, "found": what}).raw, Place(run, last + 1, head.hash)
    row = Row(last + 1, *event_codec.chained(place, event, data, log.cipher(run)))
    # The epoch rises, so that a current holder appends nothing more.
    moved = Head(run=run, seq=row.seq, hash=row.hash, epoch=head.epoch + 1, base=head.base, parent=head.parent)
    log.store.repair(moved, keep=kept, rows=[row])
    log.store.forget_snapshots(run)
    log.store.quarantine(run, None)
    indexed_again(log.store, run, log.state(run).fold, at=moved.seq)
    return event


_KEY: Final = re.compile(rb'"key":"([^"]+):step_([^":]+):([^"]+):([0-9a-f]{8})"')
"""An idempotency key in the body of an event."""


def _doubts(rows: Sequence[Row]) -> list[e.Doubt]:
    """Returns every attempt whose key is still readable, with any recorded outcome."""
    tools: dict[str, str] = {}
    doubts: dict[str, e.Doubt] = {}
    for row in rows:
        try:
            event = event_codec.decode(row.body)
        except (EventBroken, EventUnknown):
            for run, step, tool, digest in _KEY.findall(row.body):
                key = b":".join((run, b"step_" + step, tool, digest)).decode(errors="replace")
                doubts[key] = e.Doubt(step.decode(errors="replace"), tool.decode(errors="replace"), key)
            continue
        if isinstance(event, e.StepIntended) and event.effect in (None, "reads"):
            continue
        if isinstance(event, e.StepIntended):
            tools[event.step] = event.name
        if isinstance(event, e.Started) and (event.step in tools or ":step_" in event.key):
            tool = tools.get(event.step) or event.key.split(":")[-2]
            doubts[event.key] = e.Doubt(event.step, tool, event.key, event.attempt)
    return list(doubts.values())
