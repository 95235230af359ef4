"""Folds the events of a timeline. Reads no clock, touches no store.

The fold keeps seqs, not values: each record names the event that holds its values, and readers load them on demand. Its
state is scalar facts and vectors of small records, so a snapshot of a long run shares almost everything with the
previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from killick.model import events as e
from killick.model.chunks import Blob, Fetch
from killick.model.crash_loop import Crashes, counted
from killick.model.vector import Saved, Vector

FOLD: Final = 6
"""The version of this fold; snapshots of another version are ignored."""

Status = Literal["queued", "running", "waiting", "paused", "completed", "failed", "cancelled"]
StepStatus = Literal["intended", "running", "delayed", "waiting", "in_doubt", "done", "failed", "cancelled"]

_LIVE: Final = frozenset({"intended", "running"})
_IDLE: Final = frozenset({"delayed", "waiting", "in_doubt"})
_OVER: Final = frozenset({"done", "failed", "cancelled"})

OWN_TAGS: Final = ("input:", "renews:")
"""Prefixes of tags that Killick sets itself."""

OUT_OF_BAND: Final = "0."
"""The numbering prefix of steps outside the agent's code: a person had an effect compensated meanwhile."""


class Attempt(msgspec.Struct, array_like=True, gc=False):
    """One attempt of a step: the seqs where it started and ended (0: not yet), and its outcome."""

    started: int
    at: int
    epoch: int
    ended: int = 0
    ended_at: int = 0
    outcome: e.Outcome | None = None
    retry_at: int | None = None


class Step(msgspec.Struct, array_like=True):
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
    sort: e.TriggerSort
    next: int | None = None
    last: int = 0
    number: int = 0
    fired: int = 0
    run: str | None = None
    holds: bool = False
    resumed: int = 0
    queued: tuple[Queued, ...] = ()


class Hook(msgspec.Struct, array_like=True, frozen=True):
    """A hook's cursor, the seq of its declaration, and the event that it failed on: how often, and the next try."""

    cursor: int
    set: int
    failing: int = 0
    attempts: int = 0
    retry_at: int | None = None


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
    renewed_as: str | None = None
    started_at: int = 0
    changed_at: int = 0
    status: Status = "queued"
    generation: int = 0
    epoch: int = 0
    taken: bool = False
    paused: bool = False
    cancelling: bool = False
    mend: int = 0
    alone: bool = False
    """Whether its last holder held no other run."""
    crashes: Crashes | None = None
    """The consecutive crashes of its holders since a step last ended."""
    ended: int = 0
    ended_as: Status | None = None
    input: int = 0
    plan: tuple[str, ...] = ()
    stage: str | None = None
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


class _Root(msgspec.Struct):
    """A stored snapshot."""

    facts: Facts
    vectors: dict[str, Saved]


# Made here, in one thread: see killick.type_init.
_read_root: Final = msgspec.json.Decoder(_Root).decode


_PARTS: Final[dict[str, type[Any]]] = {
    "steps": Step,
    "tops": int,
    "decisions": int,
    "retried": int,
    "failures": int,
    "trace": int,
    "effects": int,
    "notes": int,
}


class Fold:
    """The state of a timeline. Grows by `apply`; users read it as a `State`."""

    __slots__ = ("decisions", "effects", "facts", "failures", "notes", "retried", "steps", "tops", "trace")

    steps: Vector[Step]
    tops: Vector[int]
    decisions: Vector[int]
    retried: Vector[int]
    failures: Vector[int]
    trace: Vector[int]
    effects: Vector[int]
    notes: Vector[int]

    def __init__(
        self, facts: Facts | None = None, saved: dict[str, Saved] | None = None, fetch: Fetch | None = None
    ) -> None:
        self.facts = facts or Facts()
        for name, of in _PARTS.items():
            setattr(self, name, Vector(of, saved.get(name) if saved else None, fetch))

    # the fold ---------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether the run is running and stays so while plain steps begin and return."""
        facts = self.facts
        return facts.status == "running" and not (facts.idle or facts.hosted or facts.crashes)

    def are_quiet(self, events: Iterable[tuple[int, e.Event]]) -> bool:
        """Returns whether these events leave the run's index row unchanged: no wait is open, and they open none."""
        if not self.is_running:
            return False
        for _, event in events:
            if type(event) not in _QUIET and not (isinstance(event, e.AttemptEnded) and event.outcome == "returned"):
                return False
        return True

    def apply(self, seq: int, event: e.Event) -> None:
        """Applies the next event of the timeline."""
        facts = self.facts
        facts.seq = seq
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, seq, event)
        if facts.ended_as is not None:
            status = facts.ended_as
        elif facts.paused:
            status = "paused"
        elif facts.mend or ((facts.idle or facts.hosted) and not self._live) or facts.trigger or facts.hook:
            status = "waiting"
        else:
            status = "running" if facts.taken else "queued"
        if status != facts.status:
            facts.status = status
            facts.changed_at = event.at

    def apply_step(self, seq: int, intended: e.StepIntended, started: e.AttemptStarted, ended: e.AttemptEnded) -> None:
        """Applies the three events of a plain step at once, from the seq of its intention; see `is_plain_step`."""
        facts, name, last = self.facts, intended.name, seq + 2
        attempt = Attempt(seq + 1, started.at, started.epoch, last, ended.at, "returned")
        step = Step(
            intended.step, "tool", name, seq, intended.at, "done", intended.effect, last, ended.at, last, [attempt]
        )
        index = self.steps.append(step)
        self.tops.append(index)
        self.trace.append(index)
        if intended.effect != "reads":
            self.effects.append(index)
        facts.seq, facts.current = last, intended.step
        facts.committed += 1
        facts.done[name] = facts.done.get(name, 0) + 1

    @property
    def wake_at(self) -> int | None:
        """Returns when the run becomes due without outside input; None: never."""
        crashes, found = self.facts.crashes, self._wake_at
        if crashes is None or found is None:
            return found
        return None if crashes.quarantined else max(found, crashes.until)

    @property
    def _wake_at(self) -> int | None:
        facts = self.facts
        if facts.status == "queued" or (facts.cancelling and not facts.ended):
            return facts.changed_at or facts.started_at
        if facts.status != "waiting" or facts.mend or facts.hosted:
            return None
        if facts.hook is not None:
            return facts.started_at  # somebody has to follow the feed, always
        if facts.trigger is not None:
            queued = facts.trigger.queued
            return queued[0].at if queued else facts.trigger.next
        if not facts.taken:
            # The run was resumed, and no worker has checked its wait since.
            return facts.changed_at
        times = [wait.deadline for wait in facts.waits.values()]
        times += [self.steps[index].delayed_until for index in facts.pending.values()]
        return min((time for time in times if time is not None), default=None)

    def with_one_returned(self, at: int) -> Fold:
        """Returns the fold as if a running step had returned. Does not change this fold, so any thread may call it."""
        twin, facts = copy(self), self.facts
        waits = facts.status == "running" and (facts.idle or facts.hosted) and facts.live == 1
        changed = {"status": "waiting", "changed_at": at} if waits else {}
        twin.facts = replace(facts, live=facts.live - 1, crashes=None, **changed)
        return twin

    @property
    def _live(self) -> int:
        """Counts the steps that can progress. An attempt cannot while all steps that it made itself wait."""
        facts = self.facts
        if not facts.live or not facts.nested:
            return facts.live
        pending = [self.steps[index] for index in facts.pending.values()]

        def rests(step: Step) -> bool:
            inner = [each for each in pending if each.within == step.id]
            return step.status in _IDLE or bool(inner and step.status == "running" and all(map(rests, inner)))

        return facts.live - sum(step.status == "running" and rests(step) for step in pending)

    def inside(self, step: e.StepId) -> list[e.StepId]:
        """Returns the open steps that an attempt of a step made."""
        if not self.facts.nested:
            return []
        return [name for name, index in self.facts.pending.items() if self.steps[index].within == step]

    def find(self, step: e.StepId) -> int | None:
        """Returns the index of a step by its id, in the current timeline."""
        index = self.facts.pending.get(step)
        if index is not None:
            return index
        top, _, inner = step.partition(".")
        if step.startswith(OUT_OF_BAND):
            return next((at for at in self.facts.beside if self.steps[at].id == step), None)
        if not top.isdigit() or not 1 <= int(top) <= len(self.tops):
            return None
        number = int(top)
        index = self.tops[number - 1]
        if not inner:
            return index
        after = self.tops[number] if number < len(self.tops) else len(self.steps)
        return next((at for at in range(index + 1, after) if self.steps[at].id == step), None)

    def step(self, step: e.StepId) -> Step | None:
        """Returns a step by its id."""
        index = self.find(step)
        return None if index is None else self.steps[index]

    # snapshots --------------------------------------------------------------------------------

    def save(self, pieces: list[Blob]) -> bytes:
        """Returns the root of a snapshot. Adds the chunks that earlier snapshots did not store to `pieces`."""
        vectors = {name: getattr(self, name).save(pieces) for name in _PARTS}
        return msgspec.json.encode(_Root(self.facts, vectors))

    @classmethod
    def load(cls, root: bytes | msgspec.Raw, fetch: Fetch) -> Fold:
        """Loads a snapshot. Its vectors are read lazily."""
        saved = _read_root(root)
        return cls(saved.facts, saved.vectors, fetch)

    # what handlers share ----------------------------------------------------------------------

    def open_step(self, seq: int, event: e.StepIntended) -> Step:
        step = Step(event.step, event.sort, event.name, seq, event.at, "intended", event.effect, undoes=event.undoes)
        step.undoes_seq, step.within = event.undoes_seq, event.within
        self.facts.nested += event.within is not None
        step.attempts = []
        index = self.steps.append(step)
        facts = self.facts
        facts.pending[event.step] = index
        if event.step.startswith(OUT_OF_BAND):
            facts.beside.append(index)
            return step
        if "." not in event.step:
            self.tops.append(index)
        facts.current = event.step
        if event.sort != "scope":
            facts.live += 1
        if event.sort in ("model", "tool"):
            self.trace.append(index)
        return step

    def changing(self, step: e.StepId) -> Step | None:
        """Returns a pending step for mutation; None for an ended one, which is immutable."""
        index = self.facts.pending.get(step)
        return None if index is None else self.steps.changing(index)

    def move(self, step: Step, status: StepStatus, event: e.Event, seq: int) -> None:
        """Sets a step's status, and closes the step if that ends it."""
        facts = self.facts
        if step.sort != "scope" and not step.id.startswith(OUT_OF_BAND):
            facts.live += (status in _LIVE) - (step.status in _LIVE)
            facts.idle += (status in _IDLE) - (step.status in _IDLE)
        step.status = status
        if status in _OVER:
            if step.sort == "scope" and step.name == "guests":
                facts.hosted = False
            step.ended, step.ended_at = seq, event.at
            facts.nested -= step.id in facts.pending and step.within is not None
            facts.crashes = None
            facts.pending.pop(step.id, None)
            facts.waits.pop(step.id, None)
            facts.committed += status == "done"
            if status == "done" and (step.sort == "tool" or step.sort == "child"):
                name = step.name if step.sort == "tool" else intended_name(step.sort, step.name)
                facts.done[name] = facts.done.get(name, 0) + 1
            if step.undoes is not None and status == "done":
                index = self.find(step.undoes)
                # An abandoned timeline may have made the compensated effect under the same step number.
                if index is not None and _started(self.steps[index], step.undoes_seq):
                    undone = self.steps.changing(index)
                    undone.undone = True
                    facts.done[undone.name] = facts.done.get(undone.name, 1) - 1


def is_plain_step(intended: e.Event, started: e.Event, ended: e.Event) -> bool:
    """Whether three consecutive events are a tool call at the top level that returned at its first attempt, of a run
    that was never rewound: `apply_step` of both folds then does what their `apply` does."""
    return (
        type(intended) is e.StepIntended
        and type(started) is e.AttemptStarted
        and type(ended) is e.AttemptEnded
        and intended.step == started.step == ended.step
        and intended.sort == "tool"
        and intended.effect in _PLAIN_EFFECTS
        and intended.step.isdigit()
        and not (intended.verdict or intended.undoes or intended.within or intended.claims)
        and started.attempt == ended.attempt == 1
        and not (started.claims or started.action)
        and ended.outcome == "returned"
        and not (ended.usage or ended.released or ended.key)
    )


_PLAIN_EFFECTS: Final = frozenset({"reads", "idempotent", "at_most_once"})


def intended_name(sort: e.Sort, name: str) -> str:
    """Returns the name that rules match: the tool's, or one that names the operation on an agent or a model."""
    return name if sort == "tool" else f"{'spawn' if sort == 'child' else sort}:{name}"


def _started(step: Step, seq: int) -> bool:
    """Returns whether the effect that started at a seq is this step's own or reused."""
    return not step.attempts or any(attempt.started == seq for attempt in step.attempts)


# handlers: one a kind of event, for those that change a state --------------------------------------------


def _run_started(fold: Fold, seq: int, event: e.RunStarted) -> None:
    facts = fold.facts
    facts.run, facts.agent, facts.build = event.run, event.agent, event.build
    facts.priority, facts.tags = event.priority, event.tags
    facts.parent, facts.parent_step, facts.follows = event.parent, event.parent_step, event.follows
    facts.started_at = facts.changed_at = event.at
    facts.input = seq


def _kept(fold: Fold, seq: int, event: e.RunForked | e.RunRewound) -> None:
    if event.keep:
        fold.facts.kept += (KeptEvents(seq, event.cut, event.keep),)


def _go_on(fold: Fold, seq: int, event: e.Event) -> None:
    """Clears holds and the holder: after a rewind, in a fork, or on resume."""
    facts = fold.facts
    facts.paused = facts.cancelling = False
    facts.mend = facts.ended = facts.rejected = 0
    facts.ended_as = facts.crashes = None


def _run_resumed(fold: Fold, seq: int, event: e.RunResumed) -> None:
    """Resuming does not take the lease; a holder that resumes its own run keeps it.

    A cancellation request stays in force unless the run ended.
    """
    facts = fold.facts
    cancelling = facts.cancelling and not facts.ended
    _go_on(fold, seq, event)
    facts.cancelling = cancelling
    facts.taken = facts.taken and event.by == "killick"
    if facts.trigger is not None:
        facts.trigger = replace(facts.trigger, resumed=event.at)


def _run_forked(fold: Fold, seq: int, event: e.RunForked) -> None:
    _go_on(fold, seq, event)
    _kept(fold, seq, event)
    facts = fold.facts
    facts.run, facts.forked_from, facts.generation = event.run, event.parent, event.generation
    facts.fork_effects, facts.model = event.effects, event.model or facts.model
    # No parent waits for a fork of a child, and a fork does not inherit its parent's trigger tags.
    facts.parent = facts.parent_step = facts.follows = facts.renewed_as = None
    facts.tags = tuple(tag for tag in facts.tags if not tag.startswith(OWN_TAGS))
    facts.started_at = facts.changed_at = event.at
    facts.taken = False
    if event.renews_input:
        facts.input = seq


def _run_rewound(fold: Fold, seq: int, event: e.RunRewound) -> None:
    _go_on(fold, seq, event)
    _kept(fold, seq, event)
    fold.facts.generation = event.generation
    fold.facts.taken = False


def _run_taken(fold: Fold, seq: int, event: e.RunTaken) -> None:
    facts = fold.facts
    facts.epoch, facts.build, facts.taken, facts.alone = event.epoch, event.build, True, event.alone
    for index in facts.pending.values():
        step = fold.steps[index]
        # The previous holder is gone; whether its open attempt took effect is unknown.
        if step.status == "running" and step.effect == "at_most_once":
            fold.move(fold.steps.changing(index), "in_doubt", event, seq)


def _lease_lapsed(fold: Fold, seq: int, event: e.LeaseLapsed) -> None:
    facts = fold.facts
    facts.taken = False
    facts.crashes = counted(facts.crashes, seq, event.holder, event.until, alone=event.alone)


def _run_quarantined(fold: Fold, seq: int, event: e.RunQuarantined) -> None:
    facts = fold.facts
    facts.mend = seq
    if facts.crashes is not None:
        facts.crashes = replace(facts.crashes, quarantined=True)


def _run_paused(fold: Fold, seq: int, event: e.RunPaused) -> None:
    fold.facts.paused = True


def _run_prioritized(fold: Fold, seq: int, event: e.RunPrioritized) -> None:
    fold.facts.priority = event.priority


def _run_tagged(fold: Fold, seq: int, event: e.RunTagged) -> None:
    fold.facts.tags = event.tags


def _blocked(fold: Fold, seq: int, event: e.Event) -> None:
    fold.facts.mend = seq


def _run_renewed(fold: Fold, seq: int, event: e.RunRenewed) -> None:
    fold.facts.renewed_as = event.run
    fold.facts.ended, fold.facts.ended_as = seq, "completed"


def _cancel_requested(fold: Fold, seq: int, event: e.CancelRequested) -> None:
    if fold.facts.crashes is not None:
        # A person intervened: the quarantine ends, and the crash count restarts.
        fold.facts.mend = 0 if fold.facts.crashes.quarantined else fold.facts.mend
        fold.facts.crashes = None
    fold.facts.cancelling = True
    if fold.facts.trigger is not None or fold.facts.hook is not None:
        # Nothing to unwind: a trigger or a hook ends on request.
        fold.facts.ended, fold.facts.ended_as = seq, "cancelled"


def _run_completed(fold: Fold, seq: int, event: e.RunCompleted) -> None:
    fold.facts.ended, fold.facts.ended_as = seq, "completed"


def _run_failed(fold: Fold, seq: int, event: e.RunFailed) -> None:
    fold.facts.ended, fold.facts.ended_as = seq, "failed"
    fold.failures.append(seq)


def _run_cancelled(fold: Fold, seq: int, event: e.RunCancelled) -> None:
    fold.facts.ended, fold.facts.ended_as = seq, "cancelled"


def _step_intended(fold: Fold, seq: int, event: e.StepIntended) -> None:
    step = fold.open_step(seq, event)
    if event.sort == "scope" and event.name == "guests":
        fold.facts.hosted = True
    if event.verdict is not None:
        _judged(fold, step, event, seq, event.verdict)


def _judged(fold: Fold, step: Step, event: e.Event, seq: int, verdict: e.Verdict) -> None:
    """A rejection ends the step. Consecutive rejections are counted, to stop a model that does not learn."""
    if verdict.ruling == "reject":
        fold.facts.rejected += 1
        step.output = seq
        fold.failures.append(seq)
        fold.move(step, "failed", event, seq)
    elif step.sort != "model":
        fold.facts.rejected = 0


def _step_edited(fold: Fold, seq: int, event: e.StepEdited) -> None:
    """Applies an edit, unless the contract rejected it."""
    step = fold.changing(event.step)
    if step is not None and (event.verdict is None or event.verdict.ruling != "reject"):
        step.edited, step.effect = seq, event.effect


def _step_delayed(fold: Fold, seq: int, event: e.StepDelayed) -> None:
    step = fold.changing(event.step)
    if step is not None:
        step.delayed_until = event.until
        fold.move(step, "delayed", event, seq)


def _step_settled(fold: Fold, seq: int, event: e.StepAdopted | e.StepOverridden) -> None:
    step = fold.changing(event.step)
    if isinstance(event, e.StepAdopted):
        fold.facts.adopted.append(event.key)
    if step is not None:
        step.output = seq
        fold.move(step, "done", event, seq)


def _step_ended(fold: Fold, seq: int, event: e.StepEnded) -> None:
    step = fold.changing(event.step)
    if step is not None and event.verdict is not None:
        _judged(fold, step, event, seq, event.verdict)
    elif step is not None:
        step.output = seq
        fold.move(step, "done" if event.outcome == "returned" else event.outcome, event, seq)
        if event.outcome == "failed":
            fold.failures.append(seq)


def _attempt_started(fold: Fold, seq: int, event: e.AttemptStarted) -> None:
    step = fold.changing(event.step)
    if step is None:
        return
    if not step.attempts and step.effect not in (None, "reads"):
        fold.effects.append(fold.facts.pending[event.step])
    step.attempts.append(Attempt(seq, event.at, event.epoch))
    step.delayed_until = None
    fold.move(step, "running", event, seq)


def _attempt_ended(fold: Fold, seq: int, event: e.AttemptEnded) -> None:
    step = fold.changing(event.step)
    if step is None or not 0 < event.attempt <= len(step.attempts) or event.key is not None:
        return
    attempt = step.attempts[event.attempt - 1]
    attempt.ended, attempt.ended_at = seq, event.at
    attempt.outcome, attempt.retry_at = event.outcome, event.retry_at
    if event.outcome == "returned":
        step.output = seq
        fold.move(step, "done", event, seq)
        return
    fold.failures.append(seq)
    if sum(tried.outcome not in (None, "returned") for tried in step.attempts) == 1:
        fold.retried.append(fold.facts.pending[event.step])
    if event.retry_at is not None:
        step.delayed_until = event.retry_at
        fold.move(step, "delayed", event, seq)
    elif event.outcome == "unknown" and step.effect in ("at_most_once", "transaction"):
        fold.move(step, "in_doubt", event, seq)
    else:
        step.output = seq
        fold.move(step, "failed", event, seq)


def _attempt_settled(fold: Fold, seq: int, event: e.AttemptSettled) -> None:
    step = fold.changing(event.step)
    if step is None or not step.attempts or (event.started and not _started(step, event.started)):
        return  # what another timeline did was settled, whose step had the same number
    step.delayed_until = None
    if event.settlement == "did_not_happen":
        fold.move(step, "intended", event, seq)
    else:
        step.output = seq
        fold.move(step, "done" if event.settlement == "happened" else "failed", event, seq)


def _decision_made(fold: Fold, seq: int, event: e.DecisionMade) -> None:
    step = fold.open_step(seq, e.StepIntended(at=event.at, step=event.step, sort="decision", name="decision"))
    step.output = seq
    fold.decisions.append(fold.facts.pending[event.step])
    fold.move(step, "done", event, seq)


def _wait_opened(fold: Fold, seq: int, event: e.WaitOpened) -> None:
    facts = fold.facts
    facts.waits[event.step] = Wait(
        event.step, event.waits_for, event.name, event.to, event.deadline, seq, event.at, event.need,
        rule=event.rule, round=event.round,
    )  # fmt: skip
    step = fold.changing(event.step)
    if step is not None:
        step.delayed_until = None
        step.asked = step.asked or event.rule is not None
        fold.move(step, "waiting", event, seq)


def _wait_voted(fold: Fold, seq: int, event: e.WaitVoted) -> None:
    wait = fold.facts.waits.get(event.step)
    if wait is not None and event.by not in wait.votes:
        fold.facts.waits[event.step] = replace(wait, votes=(*wait.votes, event.by))


def _wait_closed(fold: Fold, seq: int, event: e.WaitClosed) -> None:
    fold.facts.waits.pop(event.step, None)
    step = fold.changing(event.step)
    if step is None:
        return
    if step.sort == "wait":
        step.output = seq
        fold.move(step, "cancelled" if event.how in ("cancelled", "voided") else "done", event, seq)
    elif step.status == "waiting":
        fold.move(step, "intended", event, seq)


def _child_spawned(fold: Fold, seq: int, event: e.ChildSpawned) -> None:
    step = fold.changing(event.step)
    if step is not None:
        step.output = seq
        fold.move(step, "done", event, seq)


def _message_sent(fold: Fold, seq: int, event: e.MessageSent) -> None:
    step = fold.changing(event.step)
    if step is not None:
        step.output = seq
        fold.move(step, "done", event, seq)


def _context_changed(fold: Fold, seq: int, event: e.ContextChanged) -> None:
    facts = fold.facts
    facts.context_version = event.version
    if event.verdict is not None and event.by == "agent":
        facts.rejected = 0
    if event.whole:
        facts.context_parts = []
    facts.context_parts.append(seq)


def _context_refused(fold: Fold, seq: int, event: e.ContextRefused) -> None:
    fold.facts.rejected += event.verdict is not None and event.by == "agent"


def _contract_bound(fold: Fold, seq: int, event: e.ContractBound) -> None:
    facts = fold.facts
    others = tuple(bound for bound in facts.contracts if bound.of != event.of)
    facts.contracts = (*others, ContractInForce(event.digest, seq, event.of)) if event.digest else others


def _plan_made(fold: Fold, seq: int, event: e.PlanMade) -> None:
    fold.facts.plan, fold.facts.stage = event.stages, None


def _plan_reached(fold: Fold, seq: int, event: e.PlanReached) -> None:
    fold.facts.stage = event.stage


def _note_made(fold: Fold, seq: int, event: e.NoteMade) -> None:
    fold.notes.append(seq)


def _trigger_set(fold: Fold, seq: int, event: e.TriggerSet) -> None:
    """Keeps firings, queue and condition state across a redeclaration."""
    known = fold.facts.trigger or Trigger(seq, event.digest, event.sort)
    fold.facts.trigger = replace(known, set=seq, digest=event.digest, sort=event.sort, next=event.next)


def _trigger_fired(fold: Fold, seq: int, event: e.TriggerFired) -> None:
    known = fold.facts.trigger
    if known is not None:
        fold.facts.trigger = replace(
            known,
            next=event.next,
            last=max(known.last, event.due or 0),
            number=max(known.number, event.number),
            fired=known.fired + 1,
            run=event.run,
            queued=tuple(one for one in known.queued if one.number != event.number),
        )


def _trigger_queued(fold: Fold, seq: int, event: e.TriggerQueued) -> None:
    known = fold.facts.trigger
    if known is not None:
        waits = (*known.queued, Queued(event.number, seq, event.at, event.due))
        last = max(known.last, event.due or 0)
        fold.facts.trigger = replace(known, next=event.next, last=last, number=event.number, queued=waits)


def _trigger_passed(fold: Fold, seq: int, event: e.TriggerPassed) -> None:
    known = fold.facts.trigger
    if known is not None:
        waits = tuple(one for one in known.queued if one.number != event.number)
        # Only scheduled firings set the last time; conditions are skipped when they are evaluated.
        last = max(known.last, event.last) if known.sort in ("cron", "every") else known.last
        fold.facts.trigger = replace(known, next=event.next, last=last, queued=waits)


def _trigger_turned(fold: Fold, seq: int, event: e.TriggerTurned) -> None:
    known = fold.facts.trigger
    if known is not None:
        fold.facts.trigger = replace(known, next=event.next, holds=event.holds)


def _hook_set(fold: Fold, seq: int, event: e.HookSet) -> None:
    """A redeclared hook keeps its cursor."""
    hook = fold.facts.hook
    fold.facts.hook = Hook(event.position if hook is None else hook.cursor, seq)


def _hook_moved(fold: Fold, seq: int, event: e.HookCalled | e.HookDropped | e.HookMoved) -> None:
    hook = fold.facts.hook
    if hook is not None:
        fold.facts.hook = Hook(event.position, hook.set)


def _hook_failed(fold: Fold, seq: int, event: e.HookFailed) -> None:
    hook = fold.facts.hook
    if hook is not None:
        fold.facts.hook = Hook(hook.cursor, hook.set, event.position, event.attempt, event.retry_at)


def _system_log(fold: Fold, seq: int, event: e.Event) -> None:
    # The seal log and the token log end after each entry, so that they are never due. Later entries are still appended.
    fold.facts.ended, fold.facts.ended_as = seq, "completed"


_HANDLERS: Final[dict[type[e.Event], Callable[[Fold, int, Any], None]]] = {
    e.RunStarted: _run_started,
    e.RunForked: _run_forked,
    e.RunTaken: _run_taken,
    e.LeaseLapsed: _lease_lapsed,
    e.RunQuarantined: _run_quarantined,
    e.RunPaused: _run_paused,
    e.RunResumed: _run_resumed,
    e.RunPrioritized: _run_prioritized,
    e.RunTagged: _run_tagged,
    e.RunDiverged: _blocked,
    e.RunRewound: _run_rewound,
    e.RunRepaired: _blocked,
    e.RunRenewed: _run_renewed,
    e.CancelRequested: _cancel_requested,
    e.RunCompleted: _run_completed,
    e.RunFailed: _run_failed,
    e.RunCancelled: _run_cancelled,
    e.StepIntended: _step_intended,
    e.StepEdited: _step_edited,
    e.StepDelayed: _step_delayed,
    e.StepAdopted: _step_settled,
    e.StepOverridden: _step_settled,
    e.StepEnded: _step_ended,
    e.AttemptStarted: _attempt_started,
    e.AttemptEnded: _attempt_ended,
    e.AttemptSettled: _attempt_settled,
    e.DecisionMade: _decision_made,
    e.WaitOpened: _wait_opened,
    e.WaitVoted: _wait_voted,
    e.WaitClosed: _wait_closed,
    e.ChildSpawned: _child_spawned,
    e.MessageSent: _message_sent,
    e.ContextChanged: _context_changed,
    e.ContextRefused: _context_refused,
    e.ContractBound: _contract_bound,
    e.PlanMade: _plan_made,
    e.PlanReached: _plan_reached,
    e.NoteMade: _note_made,
    e.TriggerSet: _trigger_set,
    e.TriggerFired: _trigger_fired,
    e.TriggerQueued: _trigger_queued,
    e.TriggerPassed: _trigger_passed,
    e.TriggerTurned: _trigger_turned,
    e.HookSet: _hook_set,
    e.HookCalled: _hook_moved,
    e.HookFailed: _hook_failed,
    e.HookDropped: _hook_moved,
    e.HookMoved: _hook_moved,
    e.StoreSealed: _system_log,
    e.TokenIssued: _system_log,
    e.EntryKept: _system_log,
    e.EntryDropped: _system_log,
    e.TokenRevoked: _system_log,
}


_QUIET: Final = frozenset(
    {
        e.ContractBound,
        e.StepIntended,
        e.AttemptStarted,
        e.AttemptProgressed,
        e.DecisionMade,
        e.ContextChanged,
        e.PlanMade,
        e.PlanReached,
        e.NoteMade,
        e.FactDrawn,
        e.PageEvicted,
        e.PageFaulted,
        e.PagePinned,
        e.WorkspaceBound,
        e.WorkspaceCaptured,
        e.WorkspaceRestored,
    }
)


def goes_back(event: e.Event) -> bool:
    """Returns whether the timeline jumps at this event: a rewind, or a fork that kept later events."""
    return isinstance(event, e.RunRewound) or (isinstance(event, e.RunForked) and bool(event.keep))


def timeline(log: Sequence[tuple[int, e.Event]]) -> list[tuple[int, e.Event]]:
    """Removes rewound events from a log: keeps the events before each cut, the kept ones, and the rewind itself."""
    events = dict(log)
    end = max(events, default=0)
    later: list[tuple[int, e.Event]] = []
    for seq in sorted(events, reverse=True):
        event = events[seq]
        if seq > end:
            continue
        later.append((seq, event))
        if isinstance(event, e.RunRewound | e.RunForked):
            later += [(kept, events[kept]) for kept in reversed(event.keep) if kept in events]
            end = event.cut
    return later[::-1]
