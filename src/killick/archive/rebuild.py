"""Rebuilds a run's rows in a store in memory: each append as it was made, with its claims and messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from killick.errors import LogError
from killick.model import event_codec
from killick.model import events as e
from killick.model.facts import PERMIT
from killick.store.memory import MemoryStore
from killick.store.records import Append, Head, InboxRow, Row, UniqueRight


class EventClaims(NamedTuple):
    """The claims that an event took and released in its commit."""

    claims: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    takes: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()


_NONE: Final = EventClaims()

LEASES_MAX: Final = 100_000
"""More leases than between any two events of a log."""


def claims_of(event: e.Event) -> EventClaims:
    """The claims that an event names."""
    match event:
        case e.AttemptStarted() | e.StepStarted() | e.StepAdopted():
            return EventClaims(claims=event.claims)
        case e.AttemptEnded() | e.AttemptSettled():
            return EventClaims(releases=event.released)
        case e.MessageTaken():
            return EventClaims(takes=(event.message,))
        case e.WaitClosed() | e.WaitVoted() if event.message is not None:
            return EventClaims(takes=(event.message,))
        case e.RunRepaired():
            return EventClaims(takes=event.messages)
        case e.RunRewound():
            return EventClaims(returns=event.returned)
        case _:
            return _NONE


def append_all(store: MemoryStore, run: str, rows: Sequence[Row]) -> None:
    """Appends rows in order: rows that only add events together, each other row in its own append.

    Only rights that are still claimed at the end are claimed: a released one may belong to another run since.
    """
    held = _unreleased(rows)
    plain: list[Row] = []
    for row in rows:
        event = event_codec.decode(row.body)
        found = claims_of(event)
        claims = tuple(claim for claim in found.claims if held.get(claim) == row.seq)
        found = found._replace(claims=claims, releases=())
        head = store.head(run)
        raises = isinstance(event, e.RunTaken | e.Started) and head is not None and event.epoch > head.epoch
        if found == _NONE and not raises and not isinstance(event, e.RunRepaired):
            plain.append(row)
            continue
        _append(store, store.head(run), plain, _NONE)
        plain = []
        head = _head_with_epoch(store, run, event)
        if isinstance(event, e.RunRepaired):
            moved = msgspec.structs.replace(head, seq=row.seq, hash=row.hash, epoch=head.epoch + 1)
            store.repair(moved, keep=event.first - 1, rows=[row])
            taken = (each for each in store.messages(run) if each.number in event.messages)
            closed = [InboxRow(msgspec.structs.replace(each, taken=row.seq), None) for each in taken]
            store.restore(run, [], [], closed)
        else:
            _append(store, head, [row], found)
    _append(store, store.head(run), plain, _NONE)


def _unreleased(rows: Sequence[Row]) -> dict[str, int]:
    """The claims that were not released, by the event that took them."""
    found: dict[str, int] = {}
    for row in rows:
        event = event_codec.decode(row.body)
        found_rights = claims_of(event)
        found |= dict.fromkeys(found_rights.claims, row.seq)
        for claim in found_rights.releases:
            found.pop(claim, None)
        if isinstance(event, e.RunRewound | e.RunRenewed | e.RunCompleted | e.RunFailed | e.RunCancelled):
            found = {claim: seq for claim, seq in found.items() if not claim.startswith(f"{PERMIT}:")}
    return found


def _append(store: MemoryStore, head: Head | None, rows: list[Row], found: EventClaims) -> None:
    if head is None or not rows:
        return
    item = Append(
        run=head.run,
        after=head.seq,
        before=head.hash,
        epoch=head.epoch,
        rows=tuple(rows),
        takes=found.takes,
        returns=found.returns,
        claims=tuple(map(_claim, found.claims)),
    )
    raise_refused(store.append([item]))


def _head_with_epoch(store: MemoryStore, run: str, event: e.Event) -> Head:
    """The head with the epoch of the lease holder; a compensation takes the lease without an event."""
    head = store.head(run)
    assert head is not None
    if isinstance(event, e.RunTaken | e.Started):
        if event.epoch - head.epoch > LEASES_MAX:
            raise LogError(f"{run}: {event.epoch - head.epoch:,} leases between two events")
        for _ in range(head.epoch, event.epoch):
            head = store.lease(run, getattr(event, "holder", "a person"), seconds=60)
            store.release(run, epoch=head.epoch)
    return head


def _claim(text: str) -> UniqueRight:
    space, _, digest = text.rpartition(":")
    return UniqueRight(space, e.from_text(digest))


def raise_refused(outcomes: Iterable[object]) -> None:
    """Raises the first refusal of a store."""
    for outcome in outcomes:
        if isinstance(outcome, LogError):
            raise outcome
