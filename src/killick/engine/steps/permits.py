"""Permits: so many calls under a limit may be in flight at once, in all processes of a store.

A permit is a unique right of the store. The event that starts an attempt claims it, and the event with the outcome
returns it, each in its own append: what a dead process held is on record, and the worker that takes the run settles it.
The append that returns a permit sends a message to the oldest run that waits for one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from killick.engine.control.inbox import COMMAND
from killick.engine.execution import Execution
from killick.log.writer import AppendExtras, RunLog
from killick.model import events as e
from killick.model.chunks import pack
from killick.model.facts import PERMIT
from killick.store.limits import PermitPool
from killick.store.records import Delivery, RunQuery, UniqueRight

LOOK_AGAIN_US: Final = 10_000_000
"""After this time a waiting step looks again without a message, and then ever less often: the run that was to go first
may be paused meanwhile, or declared by no worker."""


def choose(ex: Execution, pools: Sequence[PermitPool], *, in_turn: bool) -> tuple[tuple[UniqueRight, ...], list[str]]:
    """Chooses a free permit of each pool; or none, and returns the tags of free ones that older runs wait for.

    A step whose turn it is goes ahead of those that wait. The append decides: it is refused if another process was
    first.
    """
    engine, store = ex.engine, ex.engine.log.store
    chosen, passed_on, is_full = list[UniqueRight](), list[str](), False
    for pool in pools:
        held = engine.permits | store.owned(PERMIT, pool.prefix).keys()
        free = [right for right in pool.rights() if right not in held]
        if free and sum(right.key.startswith(pool.prefix) for right in held) < pool.count:
            # At random, so that two processes seldom choose the same one.
            chosen.append(free[int(engine.ids.fraction() * len(free))])
            if not in_turn and store.runs(RunQuery(tag=pool.tag), limit=1):
                passed_on.append(pool.tag)
        else:
            is_full = True
    if is_full or passed_on:
        return (), passed_on
    engine.permits.update(chosen)
    return tuple(chosen), []


def wake(log: RunLog, tags: Sequence[str], at_us: int) -> tuple[Delivery, ...]:
    """Returns the messages that an append sends to the oldest runs with these tags."""
    return tuple(
        Delivery(
            run="", id=f"permit:{log.run}@{log.seq}:{number}", name=COMMAND, by="killick", at_us=at_us, waits_for=tag,
            body=bytes(pack({"command": "permit", "tag": tag}, at="body").raw),
        )
        for number, tag in enumerate(tags)
    )  # fmt: skip


def returned(log: RunLog, rights: Sequence[UniqueRight], at_us: int) -> AppendExtras:
    """Returns the parts of an append that returns rights, and wakes runs for the permits among them."""
    tags = [PermitPool(right.key[:-2], 0).tag for right in rights if right.space == PERMIT]
    return {"releases": tuple(rights), "sends": wake(log, tags, at_us)}


def held(log: RunLog, *, by: Collection[int] | None = None) -> tuple[UniqueRight, ...]:
    """Returns the permits that a run holds, or those that the attempts claimed that started at these seqs."""
    found = log.ledger.permits().items() if log.ledger.facts.claims_open else ()
    texts = [claim for claim, seq in found if seq > log.base and (by is None or seq in by)]
    return tuple(UniqueRight(PERMIT, e.from_text(text.rpartition(":")[2])) for text in texts)


def left(log: RunLog, at_us: int) -> AppendExtras:
    """Returns the parts of an append with which a run returns all its permits: its end, or a rewind."""
    rights = held(log)
    return returned(log, rights, at_us) if rights else {}
