"""Finds credentials in what a store has on record: values of events, and messages. Read-only; names no value.

Holds a page of events and the values of one, so that its memory does not grow with the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from killick.credentials import Found, find
from killick.errors import KillickError, ValueErased
from killick.log.log import Log
from killick.log.paging import heads, pages
from killick.model import event_codec
from killick.store.records import OWN_AGENTS, Row


class FoundCredential(msgspec.Struct, frozen=True):
    """A credential on record: its run, the event and its step, the field that holds it, and its kind. `field` is a path
    of names, and `kind` what the credential is: `api_key`. An event or a run that cannot be read is of the kind
    `unread`.
    """

    run: str
    seq: int
    step: str | None
    field: str
    kind: str


def scan(log: Log) -> Iterator[FoundCredential]:
    """Yields every place with a credential, in the order of the record. A message has the seq 0."""
    for _, head in heads(log.store):
        row = log.store.index(head.run)
        if row is not None and row.agent.startswith(OWN_AGENTS):
            continue
        try:
            for rows in pages(log.store, head.run, after=head.base):
                for each in rows:
                    yield from _of_event(log, head.run, each)
            for message in log.store.messages(head.run):
                body = log.unpacked(head.run, message.body)
                yield from _places(head.run, 0, None, f"message {message.name}", find(body))
        except KillickError:
            yield FoundCredential(head.run, 0, None, "", "unread")


def _of_event(log: Log, run: str, row: Row) -> Iterator[FoundCredential]:
    event = event_codec.decode(row.body)
    step = getattr(event, "step", None)
    try:
        data: Any = log.values(run, row)
    except ValueErased:
        return
    except KillickError:
        yield FoundCredential(run, row.seq, step, "", "unread")
        return
    tags = getattr(event, "tags", None)
    yield from _places(run, row.seq, step, "", find({"tags": tags, **data} if tags else data))


def _places(run: str, seq: int, step: str | None, within: str, found: Iterator[Found]) -> Iterator[FoundCredential]:
    places = {(".".join([within, *each.path] if within else each.path), each.kind) for each in found}
    yield from (FoundCredential(run, seq, step, field, kind) for field, kind in sorted(places))
