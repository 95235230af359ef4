"""The stored folds of a log: the index entry of a run, and snapshots. Rebuilt when wrong."""

from __future__ import annotations

from typing import Final

import msgspec

from killick.model import hashing
from killick.model.chunks import Blob
from killick.model.fold import FOLD, Fold
from killick.model.ledger import Ledger
from killick.store.records import ASKS, CRASHING, DIED_ALONE, STORE_OWNER, SUBJECT, RunIndex, Snapshot

_OF_PEOPLE: Final = ("answer", "settlement")


def index_of(fold: Fold, *, seen: int = 0) -> RunIndex:
    """Returns a run's index entry."""
    facts = fold.facts
    tags = facts.tags
    if not facts.ended and any(wait.waits_for in _OF_PEOPLE for wait in facts.waits.values()):
        tags += (ASKS,)
    if facts.crashes is not None and not facts.ended:
        tags += (CRASHING, DIED_ALONE) if facts.crashes.alone else (CRASHING,)
    if facts.status in ("running", "waiting") and not (facts.mend or facts.cancelling):
        delayed = (
            step for at in facts.pending.values() if (step := fold.steps[at]).queued and step.status == "delayed"
        )
        tags += tuple(dict.fromkeys(tag for step in delayed for tag in step.queued))
    if facts.key is not None and not facts.key.startswith(STORE_OWNER):
        tags += (SUBJECT + facts.key[: len(STORE_OWNER)],)
    return RunIndex(
        agent=facts.agent,
        status=facts.status,
        priority=facts.priority,
        wake_at_us=fold.wake_at,
        started_at_us=facts.started_at,
        changed_at_us=facts.changed_at,
        tags=tags,
        seen=seen,
    )


class SnapshotRoot(msgspec.Struct):
    """A stored snapshot: both folds at one seq."""

    fold: msgspec.Raw
    ledger: msgspec.Raw


def snapshot_of(fold: Fold, ledger: Ledger, seq: int, hash_: bytes) -> Snapshot:
    """Returns a snapshot of both folds, with only the chunks that changed."""
    pieces: list[Blob] = []
    root = SnapshotRoot(msgspec.Raw(fold.save(pieces)), msgspec.Raw(ledger.save(pieces)))
    body = msgspec.json.encode(root)
    digest = hashing.value_hash("json", body)
    pieces.append(Blob(digest, "json", body))
    return Snapshot(seq=seq, fold=FOLD, hash=hash_, root=digest, pieces=tuple(pieces))
