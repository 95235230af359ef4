"""Recorded nondeterminism: time, ids, random numbers and patch markers, drawn once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from killick.engine.execution import Branch, Execution
from killick.engine.waits.questions import EPOCH
from killick.log.writer import Entry
from killick.model import events as e


def _drawn(ex: Execution, branch: Branch, name: str, draw: Callable[[], Any]) -> Any:
    seq = ex.record.take(branch.position, "fact.drawn", name)
    if seq is not None:
        return ex.record.data(seq)["value"]
    value = draw()
    ex.write_behind(Entry(e.FactDrawn(at=ex.now_us(), name=name, step=branch.position), {"value": value}))
    return value


def now(ex: Execution, branch: Branch) -> datetime:
    us: int = _drawn(ex, branch, "now", ex.now_us)
    return EPOCH + timedelta(microseconds=us)


def uuid(ex: Execution, branch: Branch) -> UUID:
    drawn: UUID = _drawn(ex, branch, "uuid", lambda: UUID(bytes=ex.engine.ids.key()[:16], version=4))
    return drawn


def random(ex: Execution, branch: Branch) -> float:
    drawn: float = _drawn(ex, branch, "random", ex.engine.ids.fraction)
    return drawn


def patched(ex: Execution, branch: Branch, name: str) -> bool:
    """The first answer counts for the whole run: code before and after must agree on which way it went."""
    known = ex.patches.get(name)
    if known is None:
        marked = ex.record.take(branch.position, "fact.drawn", f"patched:{name}") is not None
        if not marked and not ex.record.has_more(branch.path, branch.count):
            ex.write_behind(Entry(e.FactDrawn(at=ex.now_us(), name=f"patched:{name}", step=branch.position)))
            marked = True
        known = ex.patches[name] = marked
    return known
