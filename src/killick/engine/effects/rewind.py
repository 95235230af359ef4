"""Rewinds a run to an earlier position: an event, and nothing else. Its effects stay on its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from killick.engine import renewals
from killick.engine.control.inbox import message_taken
from killick.engine.control.interventions import refuse_model
from killick.engine.effects.branch_point import Cut, cut
from killick.engine.execution import Execution
from killick.engine.signals import Rewinding
from killick.engine.steps import permits
from killick.errors import AnswerRefused, BoundaryUnknown, TimeRefused
from killick.log.log import Log
from killick.log.writer import Entry, RunLog
from killick.model import events as e
from killick.store.records import OWN_AGENTS, Message


class Rewind(msgspec.Struct, frozen=True):
    """A rewind as it is about to be appended."""

    entry: Entry
    rights: dict[str, Any]
    label: str


def rewind(log: Log, run: RunLog, to: str, *, at: int, by: str | None = None, because: str | None = None) -> Rewind:
    """The event that rewinds a run. It must be written at the head."""
    refuse_own(run.fold.facts.agent, run.run)
    refuse_model(run.fold.facts, by, "rewind")
    if run.fold.facts.renewed_as is not None:
        raise TimeRefused(run.run, f"continues as {run.fold.facts.renewed_as}; rewind that, or fork this one")
    found = cut(log, run.run, to, has_undone=bool(run.fold.facts.beside))
    if found.seq <= run.base and run.base:
        problem = f"the events before @{run.base + 1} belong to {run.fold.facts.forked_from}, its fork parent"
        raise TimeRefused(run.run, f"{problem}; fork that at {found.label}")
    messages = tuple(message.number for message in returned(log, run.run, found))
    event = e.RunRewound(
        at=at, cut=found.seq, generation=run.ledger.facts.generation + 1, keep=found.keep, returned=messages, by=by,
        files=run.ledger.files_from(found.files_seq) if run.ledger.facts.workspace is not None else None,
    )  # fmt: skip
    rights = {"returns": messages, **permits.left(run, at)}
    return Rewind(Entry(event, {"because": because} if because else None), rights, found.label)


def refuse_own(agent: str, run: str) -> None:
    """Triggers, hooks and the like are logs of Killick's own, of which no code is run again."""
    if agent.startswith(OWN_AGENTS):
        raise TimeRefused(run, f"is an internal log of Killick ({agent}), not a run of an agent")


def returned(log: Log, run: str, found: Cut) -> Iterator[Message]:
    """The messages that were taken after the cut. Answers and commands belong to dropped steps."""
    for message in log.store.messages(run):
        if message.taken is not None and found.drops(message.taken) and renewals.goes_along(message):
            yield message


async def record_rewind(ex: Execution, wanted: Rewinding) -> None:
    """Record a rewind that came through the inbox, with its message; or a note that says why it is refused."""
    await ex.barrier()
    message, by = wanted.message, wanted.message.by
    try:
        found = rewind(ex.engine.log, ex.log, wanted.to, at=ex.now_us(), by=by, because=wanted.because)
        entry, rights = found.entry, found.rights
    except (AnswerRefused, BoundaryUnknown, TimeRefused) as refused:
        entry, rights = ex.noted(f"{by or 'a person'} wanted the run rewound: {refused.reason}"), {}
    await ex.write(Entry(message_taken(message, ex.now_us())), entry, **rights, takes=(message.number,))
