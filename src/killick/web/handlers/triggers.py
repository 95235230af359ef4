"""Triggers and hooks: which trigger starts which agent and when, how far hooks are, and fire, pause, resume, publish.

Reads the ends of their logs, never a whole one. Declares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from killick.client.client import Client
from killick.history.run_info import blocked_by
from killick.model import system_events
from killick.model.facts import Hook as Cursor
from killick.presenting import triggers as present
from killick.presenting.documents import Document
from killick.presenting.triggers import RECENT_MAX, TAIL_EVENTS
from killick.store.records import OWN_AGENTS, RunQuery, RunRow
from killick.triggers import LOG, TriggerInfo
from killick.web.handlers.operations import Name
from killick.web.idempotency import derived
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, get, post
from killick.workers.hooks import HOOKS, TAG

HOOKS_MAX: Final = 100


class TriggerAsked(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger by its name."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200, description="The trigger's name.")]


class FailedDelivery(Document, frozen=True):
    """A failed delivery to a hook: the event, the number of attempts, and the error. Without `retry_at_us` there is
    no further attempt."""

    run: str
    seq: int
    at_us: int
    attempt: int
    retry_at_us: int | None
    why: str


class HookStatus(Document, frozen=True):
    """A hook's progress along the feed: `behind` counts the entries after its cursor, also those it does not listen
    to. `failing` are deliveries that are retried; `undelivered` those given up lately. `blocked` names a thing that
    the workers lack to serve it, such as a secret."""

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
    undelivered: tuple[FailedDelivery, ...] = ()
    declared: bool = False
    blocked: str | None = None


class Triggers(msgspec.Struct, frozen=True, kw_only=True):
    """Every trigger and every hook, by name."""

    triggers: tuple[present.Trigger, ...]
    hooks: tuple[HookStatus, ...]


class FireRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fires a trigger now. An `input` replaces the declared one."""

    input: Any = msgspec.UNSET


class TriggerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, for the record."""

    because: Annotated[str, msgspec.Meta(max_length=2000)] | None = None


class FireResult(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a trigger starts. Where `started` is False, a worker starts it."""

    trigger: str
    run: str
    started: bool


class TriggerResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a command to a trigger."""

    trigger: str
    did: str


@get("/triggers", page="triggers.html", whole=True)
def triggers(call: Call[Nothing, Nothing]) -> Triggers:
    """Every trigger: its source, its next time and its last run; and how far every hook is."""
    found = tuple(present.trigger(call.client, each) for each in call.client.triggers.list())
    return Triggers(triggers=found, hooks=tuple(hook_lines(call.client)))


def hook_lines(client: Client) -> Iterator[HookStatus]:
    """Every hook that the store knows, by name."""
    end = client.runtime.store.outbox_end()
    rows = client.runtime.store.runs(RunQuery(tag=TAG), limit=HOOKS_MAX)
    for row in sorted(rows, key=lambda row: row.run):
        if row.agent.startswith(f"{OWN_AGENTS}hook:"):
            yield _hook_line(client, row, end)


def _hook_line(client: Client, row: RunRow, end: int) -> HookStatus:
    log = client.runtime.log
    facts, head, name = log.state(row.run).fold.facts, log.head(row.run), row.run.removeprefix("hook:")
    cursor = facts.hook or Cursor(end, 0)
    spec: dict[str, Any] = log.data(row.run, cursor.set).get("spec", {}) if cursor.set else {}
    tail = client.events(row.run, after=max(head.seq - TAIL_EVENTS, 0), limit=TAIL_EVENTS)
    took = [each.event.at for each in tail if isinstance(each.event, system_events.HookCalled)]
    refused = [
        each for each in reversed(tail) if isinstance(each.event, system_events.HookFailed | system_events.HookDropped)
    ]
    return HookStatus(
        name=name, to=str(spec.get("to", "")), kinds=tuple(spec.get("kinds", ())),
        agents=tuple(spec.get("agents", ())), status="paused" if facts.paused else row.status,
        behind=max(end - cursor.cursor, 0), failing=cursor.failing > cursor.cursor, attempts=cursor.attempts,
        retry_at_us=cursor.retry_at, last_us=took[-1] if took else None,
        undelivered=tuple(_undelivered(client, row.run, each) for each in refused[:RECENT_MAX]),
        declared=name in HOOKS, blocked=blocked_by(log, head),
    )  # fmt: skip


def _undelivered(client: Client, run: str, recorded: Any) -> FailedDelivery:
    event = recorded.event
    why = present.failed(client.runtime.log.data(run, recorded.seq).get("failure"))
    return FailedDelivery.of(event, retry_at_us=getattr(event, "retry_at", None), why=why)


# acting -----------------------------------------------------------------------------------------


@post("/triggers/{name}/fire", whole=True)
def fire(call: Call[TriggerAsked, FireRequest]) -> FireResult:
    """Fire a trigger now. Where its code is not loaded here, a worker fires it."""
    name = _known(call.client, call.asked.name).name
    options = {} if call.body.input is msgspec.UNSET else {"input": call.body.input}
    run = call.client.triggers.fire(name, by=call.person.name, **options)
    return FireResult(trigger=name, run=run, started=call.client.runtime.store.head(run) is not None)


@post("/triggers/{name}/pause", whole=True)
def pause(call: Call[TriggerAsked, TriggerRequest]) -> TriggerResult:
    """Pause a trigger until it is resumed: it misses its times meanwhile, and events wait."""
    name = _on_record(call.client, call.asked.name)
    call.client.pause(LOG + name, by=call.person.name, because=call.body.because)
    return TriggerResult(trigger=name, did="paused")


@post("/triggers/{name}/resume", whole=True)
def resume(call: Call[TriggerAsked, TriggerRequest]) -> TriggerResult:
    """Resume a paused trigger; its policy decides about the firings that it missed."""
    name = _on_record(call.client, call.asked.name)
    did = call.client.resume(LOG + name, by=call.person.name, because=call.body.because)
    return TriggerResult(trigger=name, did=did)


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


# named events -------------------------------------------------------------------------------------


class PublishRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An event, by its name."""

    name: Annotated[Name, msgspec.Meta(description="What triggers listen to.", examples=["order.created"])]
    body: Annotated[Any, msgspec.Meta(description="Its body; any JSON value.")] = None
    id: Annotated[Name, msgspec.Meta(description="Makes it count once: the same id again is passed over.")] | None = (
        None
    )


class PublishResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of publishing an event."""

    name: str
    receivers: Annotated[int, msgspec.Meta(description="How many triggers listen to it.")]


@post("/events", natural=True, whole=True)
def publish(call: Call[Nothing, PublishRequest]) -> PublishResult:
    """Publish an event: every trigger that listens to it fires.

    An event without a listening trigger is not kept. With an id, or an `Idempotency-Key`, it counts once.
    """
    event = call.body
    message = event.id or derived(call, "event")
    receivers = call.client.triggers.publish(event.name, event.body, id=message, by=call.person.name)
    return PublishResult(name=event.name, receivers=receivers)
