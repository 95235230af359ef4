"""Renewed runs: how the log that continues a run is named and found, and which messages a fork takes along."""

from __future__ import annotations

from killick.engine.control.inbox import SAID, body_of, delivery
from killick.log.log import Log
from killick.log.slots import root_of
from killick.store.protocol import is_tagged
from killick.store.records import Delivery, Message, RunQuery, RunRow
from killick.store.slots import RENEWED_SLOT


def renewals(root: str) -> str:
    """The tag of every renewal of a run, so that the last is found when those between are archived."""
    return f"renews:{root}"


def latest(log: Log, run: str) -> str:
    """The last run in a chain of renewals, also where logs on the way are gone: for readers. The store itself decides
    where a message goes."""
    row = log.store.index(run)
    if row is None or (row.status == "completed" and successor(log, run) is not None):
        found = last_renewal(log, run)
        return found.run if found is not None else successor(log, run) or run
    return run


def successor(log: Log, run: str) -> str | None:
    """The run that continues a renewed one."""
    return next((slot.token for slot in log.store.slots(run) if slot.name == RENEWED_SLOT), None)


def last_renewal(log: Log, run: str) -> RunRow | None:
    """The last renewal of a run whose own log may be archived. Most new runs have none."""
    tag = renewals(root_of(run)[0])
    return next(iter(log.store.runs(RunQuery(tag=tag), limit=1)), None) if is_tagged(log.store, tag) else None


def goes_along(message: Message) -> bool:
    """Whether a message that was not taken belongs to the renewed run."""
    return not message.name.startswith("killick.") or message.name == SAID


def forwarded(log: Log, message: Message, run: str) -> Delivery:
    """A message to a run, readdressed to its renewal. It keeps its id, so that it counts once."""
    body, by = body_of(log, message), message.by
    return delivery(log, run, message.name, body, id=message.id, by=by, at_us=message.at_us, key_of=message.run)
