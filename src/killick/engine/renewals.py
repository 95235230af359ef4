"""Renewed runs: how the log that continues a run is named and found, and which messages a fork takes along."""

from __future__ import annotations

from killick.engine.control.inbox import SAID, body_of, delivery
from killick.log.log import Log
from killick.log.slots import RENEWS, root_of
from killick.store.protocol import is_tagged
from killick.store.records import Delivery, Message, RunQuery, RunRow
from killick.store.slots import RENEWED_SLOT


def latest(log: Log, run: str) -> str:
    """The last run in a chain of renewals, also where logs on the way are gone: for readers. The store itself decides
    where a message goes."""
    row = log.store.index(run)
    if row is None:
        return archived(log, run) or run
    if row.status == "completed" and (following := successor(log, run)) is not None:
        found = last_renewal(log, root_of(run, row.tags))
        return found.run if found is not None else following
    return run


def archived(log: Log, run: str) -> str | None:
    """The last renewal of a run whose own log is gone; None if no chain can have had that log."""
    if (found := last_renewal(log, run)) is not None:
        return found.run
    root, plus, number = run.rpartition("+")
    if not plus or not number.isdigit() or (found := last_renewal(log, root)) is None:
        return None
    return found.run if int(number) < int(found.run.removeprefix(f"{root}+")) else None


def successor(log: Log, run: str) -> str | None:
    """The run that continues a renewed one."""
    return next((slot.token for slot in log.store.slots(run) if slot.name == RENEWED_SLOT), None)


def last_renewal(log: Log, root: str) -> RunRow | None:
    """The last renewal of a run. Most have none."""
    tag = RENEWS + root
    return next(iter(log.store.runs(RunQuery(tag=tag), limit=1)), None) if is_tagged(log.store, tag) else None


def goes_along(message: Message) -> bool:
    """Whether a message that was not taken belongs to the renewed run."""
    return not message.name.startswith("killick.") or message.name == SAID


def forwarded(log: Log, message: Message, run: str) -> Delivery:
    """A message to a run, readdressed to its renewal. It keeps its id, so that it counts once."""
    body, by = body_of(log, message), message.by
    return delivery(log, run, message.name, body, id=message.id, by=by, at_us=message.at_us, key_of=message.run)
