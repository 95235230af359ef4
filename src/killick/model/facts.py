"""The records of a fold: steps, attempts, waits, and the scalar facts of a run. Seqs, not values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from killick.model import events as e
from killick.model import system_events
from killick.model.crash_loop import Crashes

Status = Literal["queued", "running", "waiting", "code_mismatch", "paused", "completed", "failed", "cancelled"]
LIVE: Final[tuple[Status, ...]] = ("queued", "running", "waiting", "code_mismatch", "paused")
"""The statuses of runs that have not ended."""
StepStatus = Literal["intended", "running", "delayed", "waiting", "in_doubt", "done", "failed", "cancelled"]

PERMIT: Final = "killick.permit"
"""The claim space of the rights to be in flight under a limit."""

OWN_AGENTS: Final = "killick."
"""The name prefix of the agents of system logs."""

OWN_TAGS: Final = ("input:", "renews:")
"""Prefixes of tags that Killick sets itself."""

MODEL: Final = "model:"
"""The prefix of the names under which models act."""

OUT_OF_BAND: Final = "0."
"""The numbering prefix of steps outside the agent's code: compensations that a person requested."""


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One attempt of a step: the seqs where it started and ended (0: not yet), and its outcome."""

    started: int
    at: int
    epoch: int
    ended: int = 0
    ended_at: int = 0
    outcome: e.Outcome | None = None
    retry_at: int | None = None


class Step(msgspec.Struct, array_like=True, gc=False):
    """One step. `intended`, `ended` and `output` are seqs; 0 means absent."""

    id: e.StepId
    sort: e.Sort
    name: str
    intended: int
    at: int
    status: StepStatus = "intended"
    effect: e.EffectClass | None = None
    ended: int = 0
    ended_at: int = 0
    output: int = 0
    attempts: list[Attempt] = []
    delayed_until: int | None = None
    undoes: e.StepId | None = None
    undone: bool = False
    undoes_seq: int = 0
    edited: int = 0
    asked: bool = False
    """Whether it needed an approval."""
    within: e.StepId | None = None
    """The step in whose attempt it was made."""
    queued: tuple[str, ...] = ()
    """While it is delayed: the tags of the limits that it waits for."""
    delayed_at: int = 0
    """When `delayed_until` was computed."""


class Wait(msgspec.Struct, array_like=True, frozen=True):
    """An open wait, and the seq that opened it."""

    step: e.StepId
    waits_for: e.WaitFor
    name: str
    to: tuple[str, ...]
    deadline: int | None
    opened: int
    at: int
    need: int = 1
    votes: tuple[str, ...] = ()
    """The approvals so far, of a quorum."""
    rule: str | None = None
    round: int = 0
    channels: tuple[tuple[str, str], ...] = ()
    """The approvers who answered by link, each with the channel of their link."""


class ContractInForce(msgspec.Struct, array_like=True, frozen=True):
    """A contract in force: its hash, the seq that bound it, and the ancestor run that it comes from, if any."""

    digest: e.Digest
    seq: int
    of: str | None = None


class KeptEvents(msgspec.Struct, array_like=True, frozen=True):
    """Events that survive a rewind: those after a cut, and before the event at `seq`."""

    seq: int
    cut: int
    keep: tuple[int, ...]


class Queued(msgspec.Struct, array_like=True, frozen=True):
    """A firing that waits for the previous run to end, and its seq."""

    number: int
    seq: int
    at: int
    due: int | None = None


class Trigger(msgspec.Struct, frozen=True, omit_defaults=True):
    """A trigger's position. `set` is the seq of its declaration; `next` and `last` are scheduled times."""

    set: int
    digest: e.Digest
    sort: system_events.TriggerSort
    next: int | None = None
    last: int = 0
    number: int = 0
    fired: int = 0
    run: str | None = None
    holds: bool = False
    resumed: int = 0
    queued: tuple[Queued, ...] = ()


class Hook(msgspec.Struct, array_like=True, frozen=True):
    """A hook's cursor, the seq of its declaration, and the event that it failed on: how often, when, the next try."""

    cursor: int
    set: int
    failing: int = 0
    attempts: int = 0
    retry_at: int | None = None
    failed_at: int = 0


class Facts(msgspec.Struct, omit_defaults=True):
    """The scalar part of a fold."""

    seq: int = 0
    run: str = ""
    agent: str = ""
    build: e.Build = e.Build()
    priority: int = 0
    tags: tuple[str, ...] = ()
    parent: str | None = None
    parent_step: e.StepId | None = None
    forked_from: str | None = None
    fork_effects: e.ForkEffects | None = None
    model: str | None = None
    follows: str | None = None
    key: e.Digest | None = None
    renewed_as: str | None = None
    starters: tuple[str, ...] = ()
    """The people who started it: a fork has those of its parent too, a child and a renewal those of the run before."""
    started_at: int = 0
    changed_at: int = 0
    status: Status = "queued"
    generation: int = 0
    epoch: int = 0
    taken: bool = False
    paused: str = ""
    """Who paused the run: a name, `contract` or `a person`; empty: it is not paused."""
    cancelling: bool = False
    cancel_begun: bool = False
    """Whether a worker has taken the run since its cancellation was requested."""
    mend: int = 0
    diverged: int = 0
    alone: bool = False
    """Whether its last holder held no other run."""
    crashes: Crashes | None = None
    """The consecutive crashes of its holders since a step last ended."""
    ended: int = 0
    ended_as: Status | None = None
    input: int = 0
    plan: tuple[str, ...] = ()
    stage: str | None = None
    entered: tuple[str, ...] = ()
    """The stages of the plan that the run entered."""
    deaths: int = 0
    """The number of holders that died."""
    current: e.StepId | None = None
    committed: int = 0
    live: int = 0
    hosted: bool = False
    """Whether the run serves calls from external code: it waits whenever no call is in flight."""
    idle: int = 0
    nested: int = 0
    """The number of pending steps made in another step's attempt."""
    pending: dict[e.StepId, int] = {}
    waits: dict[e.StepId, Wait] = {}
    context_version: int = 0
    context_parts: list[int] = []
    kept: tuple[KeptEvents, ...] = ()
    contracts: tuple[ContractInForce, ...] = ()
    """The contracts in force: the agent's own, and those of its ancestors."""
    rejected: int = 0
    """The number of consecutive intentions that a contract rejected."""
    done: dict[str, int] = {}
    """How often each tool returned, minus the compensated calls."""
    adopted: list[str] = []
    """The keys of effects whose results steps reused."""
    beside: list[int] = []
    """The indexes of the out-of-band steps."""
    hook: Hook | None = None
    trigger: Trigger | None = None


def is_model(by: str | None) -> bool:
    """Returns whether a name is of a model, not of a person."""
    return by is not None and by.startswith(MODEL)


def intended_name(sort: e.Sort, name: str) -> str:
    """Returns the name that rules match: the tool's, or one that names the operation on an agent or a model."""
    return name if sort == "tool" else f"{'spawn' if sort == 'child' else sort}:{name}"


class PlainStep(msgspec.Struct, frozen=True, gc=False):
    """An accepted tool call at the top level that returned at its first attempt."""

    seq: int
    last: int
    intended: e.StepIntended | e.StepStarted
    started: e.Started
    ended: e.AttemptEnded


def plain_step(events: Sequence[tuple[int, e.Event | PlainStep]], at: int) -> PlainStep | None:
    """Returns the plain step that these events begin with, from an index on; None: they begin with another event."""
    seq, first = events[at]
    if isinstance(first, PlainStep):
        return first
    count = _EVENTS.get(type(first), 0)
    if not count or at + count > len(events):
        return None
    intended: Any = first
    started: Any = events[at + count - 2][1]
    ended: Any
    last, ended = events[at + count - 1]
    is_plain = (
        type(ended) is e.AttemptEnded
        and last == seq + count - 1
        and (started is intended or type(started) is e.AttemptStarted)
        and intended.step == started.step == ended.step
        and intended.sort == "tool"
        and intended.effect in _EFFECTS
        and intended.step.isdigit()
        and (intended.verdict is None or intended.verdict.ruling == "accept")
        and not (intended.undoes or intended.within or intended.claims)
        and not (started is not intended and (started.claims or started.action))
        and started.attempt == ended.attempt == 1
        and ended.outcome == "returned"
        and not (ended.usage or ended.released or ended.key)
    )
    return PlainStep(seq, last, intended, started, ended) if is_plain else None


_EVENTS: Final[dict[type[e.Event], int]] = {e.StepStarted: 2, e.StepIntended: 3}
"""The number of events of a plain step, by the first."""

_EFFECTS: Final = frozenset({"reads", "idempotent", "at_most_once"})
