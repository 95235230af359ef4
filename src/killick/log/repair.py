"""Repairs a broken run: moves its damaged events aside, and lets it wait for a person. Deletes nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from killick.errors import EventBroken, EventUnknown, LogError
from killick.log.derived import indexed_again, lost_reason, root_token
from killick.log.log import Log
from killick.log.paging import pages
from killick.log.verify import last_good, lost_messages
from killick.model import event_codec
from killick.model import events as e
from killick.model.chunks import pack
from killick.model.cipher import Place
from killick.store.records import ERASED_BODY, Head, InboxRow, Message, Row


class Damage(NamedTuple):
    """The last valid event of a run and its hash, the lost messages with the events that took them, and what is wrong;
    "": nothing."""

    kept: int
    kept_hash: bytes
    messages: dict[int, int | None]
    what: str


def damage(log: Log, head: Head) -> Damage:
    """Returns what a repair of a run accepts as lost."""
    kept, kept_hash, what = last_good(log, head)
    lost = lost_messages(log, head)
    return Damage(kept, kept_hash, lost, "; ".join(filter(None, (what, lost_reason([*lost]) if lost else ""))))


def repair(log: Log, run: str, *, at: int, reason: str, by: str | None = None) -> e.RunRepaired:
    """Keeps the valid prefix, moves the rest aside, accepts the loss of messages, and lets the run wait for a person.

    The head only moves forward: the repair follows the last event that the log ever had, and chains to the head's own
    hash. Readable attempts of the removed part enter the ledger with an unknown outcome.
    """
    log = log.unchecked()
    head = log.head(run)
    kept, kept_hash, lost, what = damage(log, head)
    if not what:
        if log.store.quarantined(run) is None:
            raise LogError(f"{run}: its log is intact; there is nothing to repair")
        log.store.quarantine(run, None)
        indexed_again(log.store, run, log.state(run).fold, at=head.seq)
        raise LogError(f"{run}: its log is intact again; it left quarantine, and nothing was changed")
    aside = [row for rows in pages(log.store, run, after=kept) for row in rows]
    last = max([head.seq, *(row.seq for row in aside)])
    seq, dropped = last + 1, tuple(number for number, taken in lost.items() if taken is None)
    event = e.RunRepaired(
        at=at,
        first=kept + 1,
        last=last,
        hash_before=e.to_text(kept_hash),
        hash_head=e.to_text(head.hash),
        set_aside=len(aside),
        doubts=tuple(_doubts(aside)),
        messages=dropped,
        by=by,
    )
    data, place = pack({"because": reason, "found": what}).raw, Place(run, seq, head.hash)
    row = Row(seq, *event_codec.chained(place, event, data, log.cipher(run)))
    # The epoch rises, so that a current holder appends nothing more.
    moved = Head(run=run, seq=row.seq, hash=row.hash, epoch=head.epoch + 1, base=head.base, parent=head.parent)
    log.store.repair(moved, keep=kept, rows=[row])
    log.store.restore(run, [], [], [_closed(log, run, number, taken or seq, at) for number, taken in lost.items()])
    log.store.forget_snapshots(run)
    log.store.quarantine(run, None)
    indexed_again(log.store, run, log.state(run).fold, at=moved.seq)
    return event


def _closed(log: Log, run: str, number: int, seq: int, at: int) -> InboxRow:
    """Returns what stays of a lost message, taken by an event. A message that the run took keeps its id, so that a
    delivery with that id is not accepted again."""
    event = log.event(run, seq)
    id_, name = (event.id, event.name) if isinstance(event, e.MessageTaken) else (f"lost:{number}", "")
    message = Message(run=run, number=number, id=id_, name=name, body=ERASED_BODY, by=None, at_us=at, taken=seq)
    return InboxRow(message, root_token(log.store, run))


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
