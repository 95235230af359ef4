"""Records that the process of a run died, and clears runs that only were beside one that dies alone.

What counts, and what follows from it, is decided in `killick.model.crash_loop`. Callers hold the run.
"""

from __future__ import annotations

from killick.log.log import Log
from killick.log.writer import Entry, RunLog
from killick.model import events as e
from killick.model.crash_loop import QUARANTINE_AFTER, backoff_us
from killick.store.protocol import DIED_ALONE, RunQuery

_CULPRITS_MAX = 100


def record(log: RunLog, holder: str, at: int, *, quarantines: bool) -> None:
    """Put a death on record, durably. With `quarantines`, one too many leaves the run to a person."""
    fold, facts = log.fold, log.fold.facts
    deaths = 1 if facts.crashes is None else facts.crashes.deaths + 1
    pending = (fold.steps[index] for index in facts.pending.values())
    lapsed = e.LeaseLapsed(
        at=at,
        holder=holder,
        until=at + backoff_us(deaths),
        build=facts.build,
        steps=tuple(step.id for step in pending if step.status in ("running", "in_doubt")),
        # A taking that is not on record was in company: one alone is durable before its code begins.
        alone=facts.alone and facts.epoch == log.epoch - 1,
    )
    entries: list[Entry] = [Entry(lapsed)]
    if quarantines and deaths >= QUARANTINE_AFTER:
        entries.append(Entry(e.RunQuarantined(at=at, deaths=deaths)))
    log.append(*entries)


def clear(store_log: Log, log: RunLog, at: int) -> bool:
    """Clear a suspect all of whose deaths were shared with runs that have died alone since."""
    crashes = log.fold.facts.crashes
    if crashes is None or crashes.alone or not crashes.holders:
        return False
    unexplained, culprits = set(crashes.holders), list[str]()
    for row in store_log.store.runs(RunQuery(tag=DIED_ALONE), limit=_CULPRITS_MAX):
        found = store_log.state(row.run).fold.facts.crashes
        if found is not None and unexplained.intersection(found.holders):
            unexplained.difference_update(found.holders)
            culprits.append(row.run)
    if unexplained:
        return False
    because = f"it only was beside {', '.join(culprits)}, which died alone"
    log.append(Entry(e.RunResumed(at=at, by="killick"), {"because": because}))
    return True
