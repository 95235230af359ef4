"""Runs one recorded step for real within a replay: which record that needs, and which one comes of it.

Both are copies that were changed on purpose, with a chain of their own; the record itself is left as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from killick.archive.export import Ancestor, Export
from killick.archive.rebuild import Written, chained
from killick.errors import BoundaryUnknown
from killick.log.log import Log
from killick.model import events as e
from killick.model.chunks import pack
from killick.model.failure import Failure
from killick.model.fold import Step
from killick.model.state import State
from killick.model.typed import convert
from killick.replay.sandbox import Outcome

_BY: Final = "killick.replay"
_Change = tuple[e.Event, Mapping[str, Any] | None]


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was run for real: what it gave, and what is on record. Each gives a value or a failure."""

    step: str
    sort: str
    name: str
    recorded: Any = None
    recorded_failure: Failure | None = None
    found: Any = None
    found_failure: Failure | None = None


class Trial(NamedTuple):
    """A record in which a step is yet to be done, and the key that it had."""

    step: str
    key: str | None
    export: Export


def trial(log: Log, state: State, export: Export, run: str, step: str) -> Trial:
    """The record as if the step had been intended, and nothing had come of it."""
    found = may_try(state, run, step)
    mine = _events_of(log, run, found)
    started = next((seq for seq, event in mine if isinstance(event, e.AttemptStarted)), None)
    edits: dict[int, _Change] = {seq: _nothing(event) for seq, event in mine}
    more: list[_Change] = []
    key: str | None = None
    if started is not None:
        del edits[started]
        begun: Any = log.event(run, started)
        key = begun.key
        # Said not to have happened, it may be tried once more, under its key, whatever came of it then.
        again = e.AttemptSettled(at=begun.at, step=step, attempt=1, key=begun.key, settlement="did_not_happen", by=_BY)
        slot = next((seq for seq in edits if seq > started), None)
        if slot is None:
            more.append((again, None))
        else:
            edits[slot] = again, None
    return Trial(step, key, edited(export, run, edits, more))


def may_try(state: State, run: str, step: str) -> Step:
    """The step, if it is one that can be run for real."""
    found = state.fold.step(step)
    if found is None:
        raise BoundaryUnknown(run, step, f"there is no step {step} on record")
    if found.sort not in ("tool", "model") or (found.sort == "tool" and found.name == "send" and not found.attempts):
        raise BoundaryUnknown(run, step, f"step {step} is a {found.sort}; only tools and models can be run for real")
    if found.effect == "transaction":
        told = (
            f"step {step} writes in the store's own database, which is not here; only other tools can be run for real"
        )
        raise BoundaryUnknown(run, step, told)
    if found.asked:
        told = f"people were asked about step {step}, and a replay does not act on their word; fork the run instead"
        raise BoundaryUnknown(run, step, told)
    return found


def lived(log: Log, state: State, export: Export, run: str, step: str, outcome: Outcome) -> tuple[Live, Export]:
    """What came of it beside what is on record, and the record with what came of it."""
    found = may_try(state, run, step)
    event, data = outcome
    before = {**state.data(found.output)} if found.output else {}
    live = Live(
        step=step,
        sort=found.sort,
        name=found.name,
        recorded=before.get("output"),
        recorded_failure=_failure(before),
        found=data.get("output"),
        found_failure=_failure(data),
    )
    mine = _events_of(log, run, found)
    slot = found.ended or (mine[-1][0] if mine else 0)
    last = log.event(run, slot) if slot else None
    returned = event.outcome == "returned"
    if isinstance(last, e.AttemptEnded) and returned:
        ended = msgspec.structs.replace(last, outcome="returned", retry_at=None, limited=False, usage=event.usage)
        return live, edited(export, run, {slot: (ended, data)})
    over: e.Event = (
        e.StepOverridden(at=event.at, step=step, by=_BY)
        if returned
        else e.StepEnded(at=event.at, step=step, outcome="failed")
    )
    edits: dict[int, _Change] = {seq: _nothing(each) for seq, each in mine}
    if slot:
        edits[slot] = over, data
    return live, edited(export, run, edits, () if slot else [(over, data)])


def _failure(data: Mapping[str, Any]) -> Failure | None:
    told = data.get("failure")
    return None if not isinstance(told, dict) else convert(told, Failure, at="failure")


def _nothing(event: e.Event) -> _Change:
    """An event that says nothing, in the place of another."""
    return e.NoteMade(at=event.at, by=_BY), {"note": ""}


def _events_of(log: Log, run: str, step: Step) -> list[tuple[int, e.Event]]:
    """What is on record of a step after its intention."""
    rows = log.rows(run, after=step.intended)
    return [(row.seq, event) for row in rows if getattr(event := e.decode(row.body), "step", None) == step.id]


def edited(export: Export, run: str, edits: Mapping[int, _Change], more: Sequence[_Change] = ()) -> Export:
    """A run of a file with other events in places of its log, and more at its end."""
    changed, lineage = copy.copy(export), export.lineage(run)
    changed.rows, changed.pieces = dict(export.rows), dict(export.pieces)
    hashes: dict[int, bytes] = {}
    parts: list[Ancestor] = []
    for place, part in enumerate(lineage):
        genesis = hashes.get(part.base) or e.from_text(part.genesis)
        later = [each.base for each in lineage[place + 1 :]]
        written = [Written(row.seq, e.decode(row.body), row.data) for row in export.rows[part.run]]
        written = [
            _changed(changed, each.seq, edits[each.seq])
            if each.seq in edits and all(each.seq <= base for base in later)
            else each
            for each in written
        ]
        if not later:
            written += [_changed(changed, written[-1].seq + at, each) for at, each in enumerate(more, 1)]
        rows = changed.rows[part.run] = chained(written, genesis)
        hashes |= {row.seq: row.hash for row in rows}
        parts.append(msgspec.structs.replace(part, genesis=e.to_text(genesis), last=rows[-1].seq))
    header = export.header
    if run == header.run:
        changed.header = msgspec.structs.replace(header, lineage=tuple(parts))
    else:
        known = {part.run: part for part in parts}
        children = tuple(known.get(child.run, child) for child in header.children)
        changed.header = msgspec.structs.replace(header, children=children)
    return changed


def _changed(export: Export, seq: int, change: _Change) -> Written:
    event, data = change
    if data is None:
        return Written(seq, msgspec.structs.replace(event, data=None), None)
    packed = pack(data)
    export.pieces |= {piece.hash: piece for piece in packed.blobs}
    return Written(seq, event, packed.raw)
