"""Triggers and hooks: what sets off which agent and when next, how far hooks are, and fire, pause and resume.

Reads the ends of their logs, never a whole one. Declares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from killick.client.client import Client
from killick.model import system_events
from killick.presenting import triggers as present
from killick.presenting.triggers import Did
from killick.store.records import OWN_AGENTS, RunQuery, RunRow
from killick.triggers import LOG, TRIGGERS, Spec, TriggerInfo
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, get, post
from killick.workers import trigger_runner
from killick.workers.hooks import HOOKS, TAG

RECENT_MAX: Final = 8
"""The maximum number of actions listed for a trigger or a hook."""

TAIL_EVENTS: Final = 60
"""Events at the end of a log of a trigger or a hook that are read."""

HOOKS_MAX: Final = 100


class TriggerAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger by its name."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200, description="The trigger's name.")]


class TriggerLine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trigger is. `what` is its schedule in words; `missed` and `overlap` are its policies.

    `passed` counts the firings among `recent` that were not made. `is_set` is False until a worker has taken it up.
    """

    name: str
    sort: str
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
    is_set: bool
    recent: tuple[Did, ...] = ()


class Undelivered(msgspec.Struct, frozen=True, kw_only=True):
    """A failed delivery to a hook: the event, the number of attempts, and the error. Without `retry_at_us` there is
    no further attempt."""

    run: str
    seq: int
    at_us: int
    attempt: int
    retry_at_us: int | None
    why: str


class HookLine(msgspec.Struct, frozen=True, kw_only=True):
    """A hook's progress along the feed: `behind` counts the entries after its cursor, also those it does not listen
    to. `failing` are deliveries that are retried; `undelivered` the latest that were given up."""

    name: str
    to: str
    kinds: tuple[str, ...]
    agents: tuple[str, ...]
    status: str
    behind: int
    failing: bool
    attempts: int
    retry_at_us: int | None
    last_us: int | None
    undelivered: tuple[Undelivered, ...] = ()
    declared: bool = False


class Triggers(msgspec.Struct, frozen=True, kw_only=True):
    """Every trigger and every hook, by name."""

    triggers: tuple[TriggerLine, ...]
    hooks: tuple[HookLine, ...]


class Fire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Starts what a trigger starts, now. With an `input` the run is given that instead of what is declared."""

    input: Any = msgspec.UNSET


class Because(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, for the record."""

    because: Annotated[str, msgspec.Meta(max_length=2000)] | None = None


class Fired(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a trigger starts. Where `started` is False, a worker starts it."""

    trigger: str
    run: str
    started: bool


class Turned(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a trigger."""

    trigger: str
    did: str


def triggers(call: Call[Nothing, Nothing]) -> Triggers:
    """Every trigger: what sets it off, when next and its last run; and how far every hook is."""
    client = call.client
    return Triggers(
        triggers=tuple(_trigger_line(client, each) for each in client.triggers()), hooks=tuple(hook_lines(client))
    )


def _trigger_line(client: Client, info: TriggerInfo) -> TriggerLine:
    spec = _spec(client, info)
    log = LOG + info.name
    did = [present.did(client, log, each) for each in present.history(client, log, TAIL_EVENTS)] if info.is_set else []
    return TriggerLine(
        name=info.name,
        sort=info.sort,
        what=info.what,
        agent=info.agent,
        missed=spec.missed,
        overlap=spec.overlap,
        takes_input=present.takes(spec),
        next_us=info.next_us,
        fired=info.fired,
        queued=info.queued,
        passed=sum(each.count for each in did if each.did == "passed"),
        holds=info.holds,
        paused=info.paused,
        run=info.run,
        status=info.status,
        last_us=next((each.at_us for each in did if each.did == "fired"), info.last_us),
        declared=info.declared,
        is_set=info.is_set,
        recent=tuple(did[:RECENT_MAX]),
    )


def _spec(client: Client, info: TriggerInfo) -> Spec:
    """What is on record of a trigger, or what is declared where nothing is."""
    declared = TRIGGERS.get(info.name)
    if not info.is_set and declared is not None:
        return declared.spec
    known = client.log.state(LOG + info.name).fold.facts.trigger
    assert known is not None
    return trigger_runner.spec_of(client.log, LOG + info.name, known)


def hook_lines(client: Client) -> Iterator[HookLine]:
    """Every hook that the store knows, by name."""
    end = client.store.feed_end()
    rows = client.store.runs(RunQuery(tag=TAG), limit=HOOKS_MAX)
    for row in sorted(rows, key=lambda row: row.run):
        if row.agent.startswith(f"{OWN_AGENTS}hook:"):
            yield _hook_line(client, row, end)


def _hook_line(client: Client, row: RunRow, end: int) -> HookLine:
    facts = client.log.state(row.run).fold.facts
    cursor, name = facts.hook, row.run.removeprefix("hook:")
    spec: dict[str, Any] = client.log.data(row.run, cursor.set).get("spec", {}) if cursor is not None else {}
    tail = client.events(row.run, after=max(client.log.head(row.run).seq - TAIL_EVENTS, 0), limit=TAIL_EVENTS)
    took = [each.event.at for each in tail if isinstance(each.event, system_events.HookCalled)]
    refused = [
        each for each in reversed(tail) if isinstance(each.event, system_events.HookFailed | system_events.HookDropped)
    ]
    return HookLine(
        name=name,
        to=str(spec.get("to", "")),
        kinds=tuple(spec.get("kinds", ())),
        agents=tuple(spec.get("agents", ())),
        status="paused" if facts.paused else row.status,
        behind=max(end - cursor.cursor, 0) if cursor is not None else 0,
        failing=cursor is not None and cursor.failing > cursor.cursor,
        attempts=cursor.attempts if cursor is not None else 0,
        retry_at_us=cursor.retry_at if cursor is not None else None,
        last_us=took[-1] if took else None,
        undelivered=tuple(_undelivered(client, row.run, each) for each in refused[:RECENT_MAX]),
        declared=name in HOOKS,
    )


def _undelivered(client: Client, run: str, recorded: Any) -> Undelivered:
    event = recorded.event
    return Undelivered(
        run=event.run,
        seq=event.seq,
        at_us=event.at,
        attempt=event.attempt,
        retry_at_us=getattr(event, "retry_at", None),
        why=present.failed(client.log.data(run, recorded.seq).get("failure")),
    )


# acting -----------------------------------------------------------------------------------------


def fire(call: Call[TriggerAsked, Fire]) -> Fired:
    """Fire a trigger now. Where its code is not loaded here, a worker fires it."""
    name = _known(call.client, call.asked.name).name
    options = {} if call.body.input is msgspec.UNSET else {"input": call.body.input}
    run = call.client.fire(name, by=call.person.name, **options)
    return Fired(trigger=name, run=run, started=call.client.store.head(run) is not None)


def pause(call: Call[TriggerAsked, Because]) -> Turned:
    """Let a trigger start nothing until it is resumed; what comes meanwhile is missed, and events wait."""
    name = _on_record(call.client, call.asked.name)
    call.client.pause(LOG + name, by=call.person.name, because=call.body.because)
    return Turned(trigger=name, did="paused")


def resume(call: Call[TriggerAsked, Because]) -> Turned:
    """Let a paused trigger go on; its policy says what becomes of what it missed."""
    name = _on_record(call.client, call.asked.name)
    return Turned(trigger=name, did=call.client.resume(LOG + name, by=call.person.name, because=call.body.because))


def _known(client: Client, name: str) -> TriggerInfo:
    found = present.named(client, name)
    if found is None:
        raise Problem(404, f"{name}: no such trigger; /api/v1/triggers lists them", code="trigger_unknown")
    return found


def _on_record(client: Client, name: str) -> str:
    found = _known(client, name)
    if not found.is_set:
        raise Problem(409, f"{name}: {present.NOT_SET}", code="trigger_not_set")
    return found.name


ROUTES: Final = (
    get("/triggers", triggers, gives=Triggers, page="triggers.html"),
    post("/triggers/{name}/fire", fire, asks=TriggerAsked, takes=Fire, gives=Fired),
    post("/triggers/{name}/pause", pause, asks=TriggerAsked, takes=Because, gives=Turned),
    post("/triggers/{name}/resume", resume, asks=TriggerAsked, takes=Because, gives=Turned),
)
