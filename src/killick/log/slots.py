"""The conditions of deliveries to a run, as its fold says them: whether it is open, and what its waits still take."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from killick.model import events as e
from killick.model.codec import DigestKey, digest_of
from killick.model.facts import OWN_AGENTS, Facts
from killick.store.slots import ALL_PLACES, ENDED_SLOT, NO_SLOT, RENEWED_SLOT, ROOT_SLOT, Slot

RENEWS: Final = "renews:"
"""The prefix of the tag of every renewal of a run, so that the last is found when those between are archived."""

_OPENED: Final = ("answer", "settlement")


def root_of(run: str, tags: Collection[str]) -> str:
    """The first run in the chain of renewals of a run. The tag of every renewal names it; an id alone says nothing."""
    return next((tag.removeprefix(RENEWS) for tag in tags if tag.startswith(RENEWS)), run)


def of_wait(run: str, step: e.StepId, opened: int, places: int, key: bytes) -> Slot:
    """The slot of an open question. Its token is the event that asked, so that an answer fits no other question; in an
    encrypted store its MAC, by the key of the store's digests."""
    token = str(opened)
    if type(key) is DigestKey:
        token = e.to_text(digest_of(f"slot {step} {opened} {run}".encode(), key))
    return Slot(f"wait:{step}", token, places)


def slots_of(facts: Facts, key: bytes) -> dict[str, Slot]:
    """The slots of a run, by name. A question has one place for each approval that is missing."""
    found = [
        of_wait(facts.run, wait.step, wait.opened, wait.need - len(wait.votes), key)
        for wait in facts.waits.values()
        if wait.waits_for in _OPENED
    ]
    if facts.follows is not None:
        found.append(Slot(ROOT_SLOT, root_of(facts.run, facts.tags)))
    if facts.ended and facts.renewed_as is not None:
        found.append(Slot(RENEWED_SLOT, facts.renewed_as))
    elif facts.ended and (facts.trigger or facts.hook or not facts.agent.startswith(OWN_AGENTS)):
        found.append(Slot(ENDED_SLOT, facts.status))  # Killick's own logs end after each entry, and go on
    return {slot.name: slot for slot in found}


def is_open(slots: Mapping[str, Slot]) -> bool:
    """Whether a run with these slots has not ended."""
    return ENDED_SLOT not in slots and RENEWED_SLOT not in slots


def answer_id(run: str, step: e.StepId, opened: int) -> str:
    """The id of the message that answers a wait. A vote adds `#` and the name of its approver."""
    return f"answer:{run}:{step}@{opened}"


def asked_at(run: str, answer: str) -> int:
    """The event that opened the wait of an answer or a vote, by its id; 0 for the id of another log."""
    asked = answer.removeprefix(f"answer:{run}:").partition("#")[0].rpartition("@")[2]
    return int(asked) if answer.startswith(f"answer:{run}:") else 0


def slots_now(facts: Facts, waiting: Collection[str], key: bytes) -> dict[str, Slot]:
    """The slots of a run whose inbox has these messages, by id: an answer closes its slot, a vote takes a place."""
    found = slots_of(facts, key)
    for wait in facts.waits.values():
        answer = answer_id(facts.run, wait.step, wait.opened)
        taken = ALL_PLACES if answer in waiting else sum(each.startswith(f"{answer}#") for each in waiting)
        if taken and (slot := found.get(f"wait:{wait.step}")) is not None:
            found[slot.name] = slot.with_places(-taken)
    return found


def changed(before: dict[str, Slot], after: dict[str, Slot]) -> tuple[Slot, ...]:
    """What an append writes: new slots, those with another token, and the removal of others.

    Places are only written with a token: after that, deliveries take them.
    """
    written = (slot for name, slot in after.items() if name not in before or before[name].token != slot.token)
    return (*written, *(Slot(name, "", NO_SLOT) for name in before.keys() - after.keys()))
