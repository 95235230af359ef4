"""Triggers: their actions and reasons, the source of their runs' input, and the refusal of an unknown one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from killick.client.client import Client
from killick.errors import KillickError
from killick.log.log import Recorded
from killick.model import events as e
from killick.model import system_events
from killick.model.failure import Failure
from killick.model.typed import convert
from killick.presenting.documents import Document
from killick.triggers import LOG, TRIGGERS, Spec, TriggerInfo
from killick.workers import trigger_runner

NOT_SET: Final = "no worker has taken it up yet; start one with `killick worker`"
_PAGE: Final = 500
TAIL_EVENTS: Final = 60
"""Events at the end of a trigger's log that are read."""
RECENT_MAX: Final = 8
"""The maximum number of actions listed for a trigger."""
_BETWEEN: Final = (e.RunStarted, e.MessageTaken, e.RunTagged)
"""Events of a trigger's log that come with another one, and say nothing beyond it."""
_DID: Final = {"cancel.requested": "cancelled", "note.made": "noted"}
_PASSED: Final = {
    "missed": "no worker was running", "paused": "it was paused", "overlap": "the run before had not ended",
    "input failed": "no input could be made", "duplicate": "a run with the id that it names exists",
}  # fmt: skip


class TriggerActivity(Document, frozen=True):
    """One action of or on a trigger: its time, the started run, the person and the reason."""

    at_us: int
    did: str
    run: str | None = None
    count: int = 1
    by: str | None = None
    why: str | None = None


class Trigger(Document, frozen=True):
    """The state of a trigger. `what` is its schedule in words; `missed` and `overlap` are its policies.

    `passed` counts the firings among `recent` that were not made. `taken_up` is False until a worker has taken it up.
    """

    name: str
    kind: str
    what: str
    agent: str
    missed: str
    overlap: str
    takes_input: str
    next_us: int | None
    fired: int
    queued: int
    passed: int
    holds: bool
    paused: bool
    run: str | None
    status: str | None
    last_us: int | None
    declared: bool
    taken_up: bool
    recent: tuple[TriggerActivity, ...] = ()


def named(client: Client, name: str) -> TriggerInfo | None:
    """A trigger by its name, or by the id of its log."""
    return next((each for each in client.triggers.list() if each.name == name.removeprefix(LOG)), None)


def history(client: Client, run: str, limit: int) -> Iterator[Recorded]:
    """The events of a trigger's log that say something, the latest first; as many events are read as it takes."""
    seq = client.runtime.log.head(run).seq
    while seq > 0 and limit > 0:
        for recorded in reversed(client.events(run, after=max(seq - _PAGE, 0), limit=min(seq, _PAGE))):
            if not isinstance(recorded.event, _BETWEEN) and limit > 0:
                limit -= 1
                yield recorded
        seq -= _PAGE


def verb(event: e.Event) -> str:
    """The action of an event in a trigger's log."""
    kind = str(event.__struct_config__.tag)
    return _DID.get(kind, kind.partition(".")[2])


def did(client: Client, run: str, recorded: Recorded) -> TriggerActivity:
    """An event of a trigger's log in words."""
    event, data = recorded.event, client.runtime.log.data(run, recorded.seq)
    return TriggerActivity(
        at_us=event.at, did=verb(event), by=getattr(event, "by", None),
        run=event.run if isinstance(event, system_events.TriggerFired) else None, count=getattr(event, "count", 1),
        why=_why(event, data),
    )  # fmt: skip


def _why(event: e.Event, data: Mapping[str, Any]) -> str | None:
    match event:
        case system_events.TriggerPassed():
            why = _PASSED.get(event.because, event.because)
            return f"{why}: {failed(data['failure'])}" if data.get("failure") else why
        case system_events.TriggerQueued():
            return f"number {event.number} waits for the run before it"
        case system_events.TriggerTurned():
            return "holds" if event.holds else "does not hold any more"
        case system_events.TriggerSet():
            spec = convert(data["spec"], Spec, at="spec")
            return f"{spec}, starts {spec.agent}"
        case e.NoteMade():
            return str(data.get("note"))
        case _:
            return data.get("because")


def failed(failure: Any) -> str:
    """A recorded failure on one line."""
    try:
        found = convert(failure, Failure, at="failure")
        return f"{found.type}: {found.message}"
    except KillickError:
        return "the recorded error cannot be read"


def takes(spec: Spec) -> str:
    """Where the input of its runs comes from."""
    if spec.makes_input is not None:
        return f"made by {spec.makes_input}"
    if spec.input is not None:
        return "always the same"
    return {"event": "the event's body", "when": "what the condition returned"}.get(spec.sort, "none")


def trigger(client: Client, info: TriggerInfo) -> Trigger:
    """A trigger with its declaration, and its latest actions."""
    spec = _spec(client, info)
    log = LOG + info.name
    done = [did(client, log, each) for each in history(client, log, TAIL_EVENTS)] if info.is_set else []
    return Trigger.of(
        info, kind=info.sort, missed=spec.missed, overlap=spec.overlap, takes_input=takes(spec),
        passed=sum(each.count for each in done if each.did == "passed"), taken_up=info.is_set,
        last_us=next((each.at_us for each in done if each.did == "fired"), info.last_us),
        recent=tuple(done[:RECENT_MAX]),
    )  # fmt: skip


def _spec(client: Client, info: TriggerInfo) -> Spec:
    """The recorded specification of a trigger, or the declared one if none is recorded."""
    declared = TRIGGERS.get(info.name)
    if not info.is_set and declared is not None:
        return declared.spec
    known = client.runtime.log.state(LOG + info.name).fold.facts.trigger
    assert known is not None
    return trigger_runner.spec_of(client.runtime.log, LOG + info.name, known)
