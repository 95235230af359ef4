"""Renewed runs: how the log that continues a run is named and found, and which messages move to it."""

from __future__ import annotations

from collections.abc import Iterator

from killick.engine.control.inbox import SAID, body_of, delivery
from killick.log.log import Log
from killick.model import events as e
from killick.store.protocol import is_tagged
from killick.store.records import Delivery, Message, RunQuery, RunRow


def renewals(root: str) -> str:
    """The tag of every renewal of a run, so that the last is found when those between are archived."""
    return f"renews:{root}"


def root_of(run: str) -> tuple[str, int]:
    """The original id of a renewed run, and the number of this log: `name+3`."""
    root, plus, number = run.rpartition("+")
    return (root, int(number)) if plus and number.isdigit() else (run, 1)


def latest(log: Log, run: str) -> str:
    """The latest run in a chain of renewals, also where logs on the way are gone."""
    row = log.store.index(run)
    if row is None and (row := last_renewal(log, run)) is not None:
        run = row.run
    while row is not None and row.status == "completed":
        last = log.event(run, log.head(run).seq)
        if not isinstance(last, e.RunRenewed):
            break
        run = last.run
        row = log.store.index(run)
    return run


def last_renewal(log: Log, run: str) -> RunRow | None:
    """The last renewal of a run whose own log may be archived. Most new runs have none."""
    tag = renewals(root_of(run)[0])
    return next(iter(log.store.runs(RunQuery(tag=tag), limit=1)), None) if is_tagged(log.store, tag) else None


def goes_along(message: Message) -> bool:
    """Whether a message that was not taken belongs to the renewed run."""
    return not message.name.startswith("killick.") or message.name == SAID


def moving(log: Log, run: str) -> Iterator[Message]:
    """The messages that were not taken and belong to the renewed run, in their order."""
    after = 0
    while page := log.store.inbox(run, after=after):
        yield from filter(goes_along, page)
        after = page[-1].number


def forwarded(log: Log, message: Message, run: str) -> Delivery:
    """A message to a run, readdressed to its renewal. It keeps its id, so that it counts once."""
    body, by = body_of(log, message), message.by
    return delivery(log, run, message.name, body, id=message.id, by=by, at_us=message.at_us, key_of=message.run)


def bring_along(log: Log, run: str, follows: str) -> None:
    """The messages that reached a run's inbox while it was being renewed."""
    if late := [forwarded(log, message, run) for message in moving(log, follows)]:
        log.store.deliver(late)
