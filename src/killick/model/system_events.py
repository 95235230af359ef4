"""The events of logs that Killick keeps for itself: triggers, hooks, seals, API tokens, entries of adapters."""

from __future__ import annotations

from typing import Literal

import msgspec

from killick.model.events import Digest, Event

# triggers -----------------------------------------------------------------------------------------

TriggerSort = Literal["cron", "every", "when", "event"]
PassedBecause = Literal["missed", "paused", "overlap", "input failed", "duplicate"]


class TriggerSet(Event, frozen=True, tag="trigger.set"):
    """A trigger was declared or redeclared: its source, its agent, and its next time. Data: `spec`."""

    digest: Digest
    sort: TriggerSort
    agent: str
    next: int | None = None


class TriggerFired(Event, frozen=True, tag="trigger.fired"):
    """A trigger started a run, in the same commit. `due` is the scheduled time. Data: an event's `body`, or `value`."""

    number: int
    run: str
    due: int | None = None
    next: int | None = None
    by: str | None = None


class TriggerQueued(Event, frozen=True, tag="trigger.queued"):
    """A firing waits until the previous run ends. Data: as for the firing."""

    number: int
    due: int | None = None
    next: int | None = None
    by: str | None = None


class TriggerPassed(Event, frozen=True, tag="trigger.passed"):
    """Firings due from `first` to `last` were skipped, with the reason; at most 10,000 are counted. `number` is that of
    a queued firing. Data: `failure` of the input; the `run` that a duplicate names; `body`, `value`."""

    first: int
    last: int
    because: PassedBecause
    count: int = 1
    number: int = 0
    next: int | None = None
    by: str | None = None


class TriggerTurned(Event, frozen=True, tag="trigger.turned"):
    """A trigger's condition became true, or false again."""

    holds: bool
    next: int | None = None


# hooks --------------------------------------------------------------------------------------------


class HookSet(Event, frozen=True, tag="hook.set"):
    """A hook's subscription. A new hook receives events after `position` of the outbox. Data: `spec`."""

    position: int


class HookCalled(Event, frozen=True, tag="hook.called"):
    """A hook accepted event `seq` of `run`; its cursor is at `position`. Data: `receipt`, the receiver's id of it."""

    position: int
    run: str
    seq: int
    attempt: int = 1


class HookFailed(Event, frozen=True, tag="hook.failed"):
    """A hook failed on an event; it is called again at `retry_at`. Data: `failure`."""

    position: int
    run: str
    seq: int
    attempt: int
    retry_at: int


class HookDropped(Event, frozen=True, tag="hook.dropped"):
    """A hook failed on an event for the last time; its cursor moves on. Data: `failure`."""

    position: int
    run: str
    seq: int
    attempt: int


class HookMoved(Event, frozen=True, tag="hook.moved"):
    """A hook's cursor passed events outside its subscription."""

    position: int


# seals --------------------------------------------------------------------------------------------


class StoreSealed(Event, frozen=True, tag="store.sealed"):
    """The store was sealed: the `size` entries of all seals so far have this `root`, signed with `key`. `number` counts
    the seals. `before` is the seq of the seal that lists the runs which this one omits. Data: `entries`, `peaks`,
    `runs`, `checkpoint`."""

    number: int
    size: int
    root: Digest
    key: str
    before: int = 0
    by: str | None = None


# verification -------------------------------------------------------------------------------------


class StoreVerified(Event, frozen=True, tag="store.verified"):
    """A verification of the store began at `began` and is `done`, or reached the run with the number `reached`. It
    verified `runs` and found `problems`. `last` is the seq of the last complete one; `every` is the interval in
    microseconds of the worker that verifies. Data: `report`."""

    began: int
    reached: int
    runs: int
    problems: int
    done: bool
    last: int = 0
    every: int | None = None


# tokens -------------------------------------------------------------------------------------------

Scope = Literal["viewer", "operator", "admin"]


class TokenIssued(Event, frozen=True, tag="token.issued"):
    """A token grants its scope on the server until `expires_at`, on runs of these agents (none: of all) with all of
    these tags. `hash` is of its secret, which is not stored."""

    id: str
    name: str
    scope: Scope
    hash: Digest
    expires_at: int | None = None
    by: str | None = None
    agents: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


class TokenRevoked(Event, frozen=True, tag="token.revoked"):
    """A token was revoked. Data: `because`."""

    id: str
    by: str | None = None


# framework state --------------------------------------------------------------------------------


class EntryKept(Event, frozen=True, tag="entry.kept"):
    """A framework stored a value under a name, replacing the previous one. Data: `value`."""

    name: str
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class EntryDropped(Event, frozen=True, tag="entry.dropped"):
    """A framework deleted the value under a name."""

    name: str
