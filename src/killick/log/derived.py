"""Both folds of a log together, and what is stored of them: the index entry of a run, and snapshots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import structs

from killick.log.slots import slots_now
from killick.model import hashing
from killick.model.chunks import Blob
from killick.model.cipher import Cipher, Place
from killick.model.events import Event, StepIntended, StepStarted
from killick.model.facts import PlainStep, plain_step
from killick.model.fold import FOLD, JUMPS, Fold, goes_back
from killick.model.ledger import Ledger
from killick.store.protocol import Store
from killick.store.records import ASKS, CRASHING, DIED_ALONE, STORE_OWNER, SUBJECT, Message, RunIndex, RunRow, Snapshot
from killick.store.slots import ROOT_SLOT

_BEGIN_STEPS: Final = frozenset({StepStarted, StepIntended, PlainStep})
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
        # A time that was computed while the clock was ahead shows, whatever was recorded since.
        changed_at_us=max(facts.changed_at, fold.timed_at),
        tags=tags,
        seen=seen,
    )


def missing_messages(row: RunRow | None, messages: Sequence[Message], taken: Collection[int] = ()) -> list[int]:
    """Returns the numbers of the messages that a run received, as its index entry and its log say, and that are not in
    its inbox. The entry is to be read first, because a message may come."""
    there = {message.number for message in messages}
    last = max(0 if row is None else row.delivered, *there, *taken, 0)
    return [] if last == len(there) else [number for number in range(1, last + 1) if number not in there]


def lost_reason(numbers: Sequence[int]) -> str:
    """Says which messages of an inbox were lost."""
    many = f"messages {', '.join(map(str, numbers[:5]))}{' and more' if len(numbers) > 5 else ''} are"
    return f"{many if len(numbers) > 1 else f'message {numbers[0]} is'} missing in its inbox"


def indexed_again(store: Store, run: str, fold: Fold, *, at: int) -> bool:
    """Rewrites a run's index entry and its slots from its log at that seq. False: the head moved, a message came, or a
    message is missing, of which the entry may be the only evidence."""
    row, messages = store.index(run), store.messages(run)
    if missing_messages(row, messages):
        return False
    slots = slots_now(fold.facts, untaken(messages), store.secret_key).values()
    return store.reindex(run, index_of(fold), at=at, slots=tuple(slots), delivered=len(messages))


def index_fits(store: Store, run: str, fold: Fold) -> bool:
    """Returns whether a run's stored index entry is that of its log."""
    row, messages, said = store.index(run), store.messages(run), index_of(fold)
    return (
        row is not None
        and (row.agent, row.status, row.priority, row.tags) == (said.agent, said.status, said.priority, said.tags)
        and (row.started_at_us, row.changed_at_us) == (said.started_at_us, said.changed_at_us)
        and row.delivered >= len(messages)  # that some are missing is no fault of the entry
        and set(said.tags) == store.tags(run)
        # A message makes the run due earlier than its log says.
        and row.wake_at_us in {said.wake_at_us, *(min(each.at_us, row.changed_at_us) for each in messages)}
    )


def slots_fit(store: Store, run: str, fold: Fold) -> bool:
    """Returns whether a run accepts what its log and its inbox say."""
    said = slots_now(fold.facts, untaken(store.messages(run)), store.secret_key)
    return {slot.name: slot for slot in store.slots(run)} == said


def root_token(store: Store, run: str) -> str | None:
    """Returns the first run of a chain of renewals, by which the messages of a later one are deduplicated."""
    return next((slot.token for slot in store.slots(run) if slot.name == ROOT_SLOT), None)


def untaken(messages: Iterable[Message]) -> set[str]:
    """Returns the ids of the messages that are in the inbox."""
    return {message.id for message in messages if message.taken is None}


def apply_events(
    fold: Fold | None, ledger: Ledger | None, events: Sequence[tuple[int, Event | PlainStep]], at: int = 0
) -> int:
    """Applies events to both folds, or to one, plain steps in a row at once. Stops where the timeline goes back, which
    a ledger alone does not; returns the index of that."""
    end, facts = len(events), None if ledger is None else ledger.facts
    while at < end:
        event: Any
        seq, event = events[at]
        kind = type(event)  # pyright: ignore[reportUnknownVariableType]
        if kind not in _BEGIN_STEPS:
            if fold is not None:
                if kind in JUMPS and goes_back(event):
                    return at
                fold.apply(seq, event)
            if ledger is not None:
                ledger.apply(seq, event)
            at += 1
            continue
        steps = list[PlainStep]()
        is_plain = (fold is None or fold.is_running) and not (facts and facts.generation)
        while at < end and is_plain:
            step = plain_step(events, at)
            if step is None or (facts and (step.started.key in facts.open or step.intended.step in facts.keys)):
                break
            steps.append(step)
            at += 1 if events[at][1] is step else step.last - step.seq + 1
        for one in (fold, ledger):
            if one is not None and steps:
                one.apply_steps(steps)
            elif one is not None:
                for number, each in events_of(seq, event):
                    one.apply(number, each)
        at += not steps
    return at


def events_of(seq: int, event: Event | PlainStep) -> Sequence[tuple[int, Event]]:
    """Returns the events of a plain step, or the one event."""
    return ((seq, event.intended), (event.last, event.ended)) if isinstance(event, PlainStep) else ((seq, event),)


class SnapshotRoot(msgspec.Struct, omit_defaults=True):
    """A stored snapshot: both folds at one seq. In an encrypted store it has a MAC."""

    fold: msgspec.Raw
    ledger: msgspec.Raw
    mac: str = ""

    def sealed(self, place: Place, cipher: Cipher | None) -> SnapshotRoot:
        """Returns it with the MAC of the event at which it was taken."""
        if cipher is None:
            return self
        mac = cipher.mac(msgspec.json.encode(("snapshot", place, FOLD, self.fold, self.ledger)))
        return structs.replace(self, mac=mac.decode())


def snapshot_of(fold: Fold, ledger: Ledger, place: Place, cipher: Cipher | None) -> Snapshot:
    """Returns a snapshot of both folds after an event, with only the chunks that changed."""
    pieces: list[Blob] = []
    root = SnapshotRoot(msgspec.Raw(fold.save(pieces)), msgspec.Raw(ledger.save(pieces)))
    body = msgspec.json.encode(root.sealed(place, cipher))
    digest = hashing.value_hash("json", body)
    pieces.append(Blob(digest, "json", body))
    return Snapshot(seq=place.seq, fold=FOLD, hash=place.hash, root=digest, pieces=tuple(pieces))
