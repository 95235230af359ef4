"""The closed set of event kinds, and their byte encoding.

An event's body is a small JSON object. Values from people and tools are in the event's data; the body holds only their
hash (`data`). So a fold reads bodies alone, and erasing a value does not break the chain. Times are microseconds since
the epoch. Digests are unpadded base64url. Kinds are `noun.past`; a later version of a kind is stored as `noun.past/2`.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode
from binascii import b2a_base64
from typing import ClassVar, Final, Literal, TypeAlias

import msgspec

StepId = str
Digest = str
URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")

Sort = Literal["tool", "model", "decision", "wait", "child", "scope", "undo"]
EffectClass = Literal["reads", "idempotent", "workspace", "transaction", "at_most_once"]
Outcome = Literal["returned", "refused", "unknown"]
NotRetried = Literal[
    "no_attempts_left", "named_in_never", "not_named_in_on", "programming_error", "lasting_error", "may_have_happened",
    "patience_over",
]  # fmt: skip
"""Why no automatic retry follows a failed attempt."""
Ruling = Literal["accept", "reject", "ask"]
Settlement = Literal["happened", "did_not_happen", "stopped"]
WaitFor = Literal["answer", "event", "time", "child", "settlement", "mend"]
WaitEnd = Literal["answered", "expired", "skipped", "cancelled", "voided"]
ForkEffects = Literal["recorded", "live", "none"]
RestoredBecause = Literal["in doubt", "rewound", "forked", "gone", "undone", "asked"]


class Build(msgspec.Struct, frozen=True, omit_defaults=True):
    """The code version that ran and, if known, its commit."""

    version: str = ""
    commit: str = ""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """A contract's verdict on an intention: the deciding rule and the contract's hash."""

    ruling: Ruling = "accept"
    rule: str | None = None
    code: str | None = None
    contract: Digest | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The token usage and cost of a model call. Money is in millionths of a US dollar."""

    model: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost_micros: int = 0


class Doubt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt found in a quarantined part of a log. Its outcome is unknown."""

    step: StepId
    tool: str
    key: str
    attempt: int = 1


class Action(msgspec.Struct, array_like=True, frozen=True):
    """An effect that a step intends. `undoes` is the seq at which the effect that it compensates started."""

    tool: str
    effect: EffectClass
    identity: Digest | None
    intended: int
    undoes: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", gc=False):
    """One immutable fact. `data` is the hash of its values, set on append."""

    at: int
    data: Digest | None = None


# runs ---------------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, tag="run.started"):
    """A run started. `key` names its values' key, `starters` who started the run that started it. Data: `input`."""

    run: str
    agent: str
    build: Build = Build()
    priority: int = 0
    tags: tuple[str, ...] = ()
    parent: str | None = None
    parent_step: StepId | None = None
    follows: str | None = None
    by: str | None = None
    trace: str | None = None
    key: Digest | None = None
    starters: tuple[str, ...] = ()


class RunForked(Event, frozen=True, tag="run.forked"):
    """A run was forked from its parent at a cut. `keep` names later parent events that stay in the timeline. `model`
    replaces other models. `renews_input`: its input is its own. It begins with `files`. Data: `input`, `because`."""

    run: str
    parent: str
    cut: int
    generation: int
    effects: ForkEffects = "recorded"
    by: str | None = None
    keep: tuple[int, ...] = ()
    model: str | None = None
    renews_input: bool = False
    files: Digest | None = None
    workspace: str | None = None

    @property
    def base(self) -> int:
        """The last parent event that the fork shares."""
        return max((self.cut, *self.keep))


class ForkMade(Event, frozen=True, tag="fork.made"):
    """A fork of this run was created at a cut. From here on, effects of either run count for both."""

    run: str
    cut: int
    by: str | None = None


class RunTaken(Event, frozen=True, tag="run.taken"):
    """A process took the lease. `alone`: it holds no other run. A worker has a `host`, and `slots` for so many runs."""

    epoch: int
    holder: str
    build: Build = Build()
    trace: str | None = None
    alone: bool = False
    host: str = ""
    slots: int = 0


class LeaseLapsed(Event, frozen=True, tag="lease.lapsed"):
    """The lease holder died or stopped renewing the lease, without releasing the run. `steps` were open then, under
    this build; `alone` as in the preceding `run.taken`. No worker takes the run before `until`."""

    holder: str
    until: int = 0
    build: Build = Build()
    steps: tuple[StepId, ...] = ()
    alone: bool = False


class RunQuarantined(Event, frozen=True, tag="run.quarantined"):
    """The run waits for a person to resume or cancel it, after this many consecutive crashes."""

    deaths: int


class RunPaused(Event, frozen=True, tag="run.paused"):
    """A person paused the run. Data: `because`."""

    by: str | None = None


class RunResumed(Event, frozen=True, tag="run.resumed"):
    """A person, or for a diverged run a worker, resumed a run. Data: `because`; of a worker `builds`, `code`."""

    by: str | None = None


class RunPrioritized(Event, frozen=True, tag="run.prioritized"):
    """The run's priority changed. Data: `because`."""

    priority: int
    by: str | None = None


class RunTagged(Event, frozen=True, tag="run.tagged"):
    """The run's tags were replaced by these."""

    tags: tuple[str, ...]
    by: str | None = None


class RunDiverged(Event, frozen=True, tag="run.diverged"):
    """Code and log diverge at a step; the run waits for corrected code. Data: `recorded`, `found`, `builds`, `code`."""

    step: StepId


class RunRewound(Event, frozen=True, tag="run.rewound"):
    """The timeline was rewound to a cut. `keep` names later events that stay, `returned` the messages put back into the
    inbox, `files` the workspace snapshot to restore. Data: `because`."""

    cut: int
    generation: int
    keep: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    by: str | None = None
    files: Digest | None = None


class RunRepaired(Event, frozen=True, tag="run.repaired"):
    """Events `first` to `last` were damaged and were quarantined; none if `last` is before `first`. The chain continues
    from the head's hash. `messages` were lost from the inbox before the run took them. Data: `because`, `found`."""

    first: int
    last: int
    hash_before: Digest
    hash_head: Digest
    set_aside: int = 0
    doubts: tuple[Doubt, ...] = ()
    messages: tuple[int, ...] = ()
    by: str | None = None


class RunRenewed(Event, frozen=True, tag="run.renewed"):
    """The run continues in a new log under another id. Data: `input`."""

    run: str


class CancelRequested(Event, frozen=True, tag="cancel.requested"):
    """A person or a parent run requested cancellation. Data: `because`."""

    compensate: bool = False
    by: str | None = None


class RunCompleted(Event, frozen=True, tag="run.completed"):
    """The agent returned. Data: `result`."""


class RunFailed(Event, frozen=True, tag="run.failed"):
    """The agent failed with an error. Data: `failure`, `not_undone`."""

    step: StepId | None = None


class RunCancelled(Event, frozen=True, tag="run.cancelled"):
    """The run was cancelled. Data: `not_undone`."""


# steps --------------------------------------------------------------------------------------------


class StepIntended(Event, frozen=True, tag="step.intended"):
    """The agent's next action, with the contract's verdict. `digest` covers all arguments, `identity` those that name
    the action. `undoes_seq` is the seq at which the effect to compensate first started. `claims` are the unique rights
    that a child or a message consumes. `guest` identifies the step to external code that Killick did not start;
    `within` is the step whose attempt ran that code. Data: `arguments`, `because`; the verdict's inputs `paths`,
    `others`, `since`, `adopts`; `failure` if rejected."""

    step: StepId
    sort: Sort
    name: str
    digest: Digest | None = None
    identity: Digest | None = None
    effect: EffectClass | None = None
    verdict: Verdict | None = None
    undoes: StepId | None = None
    undoes_seq: int = 0
    claims: tuple[str, ...] = ()
    guest: str | None = None
    within: StepId | None = None


class StepStarted(StepIntended, frozen=True, tag="step.started"):
    """An intention whose first attempt is about to touch the world: `step.intended` and `attempt.started` in one. It
    claims no rights. Data: as for an intention."""

    attempt: ClassVar[int] = 1
    action: ClassVar[None] = None
    key: str = ""
    epoch: int = 0
    deadline: int | None = None


class StepEdited(Event, frozen=True, tag="step.edited"):
    """A person edited a step's arguments before it ran. The contract evaluates the edited intention; a rejected edit
    changes nothing. Data: `arguments`, `changed`, `comment`; `paths`, `others` and `failure` as for an intention."""

    step: StepId
    by: str
    digest: Digest | None = None
    identity: Digest | None = None
    effect: EffectClass | None = None
    verdict: Verdict | None = None


class StepDelayed(Event, frozen=True, tag="step.delayed"):
    """The step continues later, or now if asked to. Not an attempt. `queued` are the tags of limits it waits for."""

    step: StepId
    until: int
    because: str = "backoff"
    by: str | None = None
    queued: tuple[str, ...] = ()


class StepAdopted(Event, frozen=True, tag="step.adopted"):
    """The step reused the recorded result of an effect of an abandoned timeline instead of acting again. The effect
    first started at `seq` of `run`. `claims` is the right to it, unique in the run tree, as `space:digest`. Data:
    `output`."""

    step: StepId
    run: str
    key: str
    seq: int
    claims: tuple[str, ...] = ()


class StepDrifted(Event, frozen=True, tag="step.drifted"):
    """A replayed step's arguments differ harmlessly from the log; `digest` is of the new. Data: `recorded`, `found`."""

    step: StepId
    digest: Digest | None = None


class StepOverridden(Event, frozen=True, tag="step.overridden"):
    """A person supplied the result of a pending step. Data: `output`, `because`."""

    step: StepId
    by: str | None = None


class StepEnded(Event, frozen=True, tag="step.ended"):
    """A step without own attempts ended: a scope, a rejection by a person or by a verdict after the intention, or a
    skipped step. Data: `output` or `failure`; `winner` of a `first`; `others`, `paths` of a verdict."""

    step: StepId
    outcome: Literal["returned", "failed", "cancelled"] = "returned"
    verdict: Verdict | None = None
    by: str | None = None


class AttemptStarted(Event, frozen=True, tag="attempt.started"):
    """An attempt is about to touch the world. `claims` are the rights it consumes, as `space:digest`. `action` is its
    effect, if a rewind went back to after the step's intention."""

    step: StepId
    attempt: int
    key: str
    epoch: int
    deadline: int | None = None
    claims: tuple[str, ...] = ()
    action: Action | None = None


class AttemptProgressed(Event, frozen=True, tag="attempt.progressed"):
    """A progress report of a long tool. Data: `progress`."""

    step: StepId
    attempt: int


class AttemptEnded(Event, frozen=True, tag="attempt.ended"):
    """An attempt ended. `retry_at`: the time of the next attempt. `limited`: a rate limit, which uses no attempt.
    `not_retried`: why no automatic retry follows. `key`: set if it ended late, after a rewind. Data: `output`, with a
    model's `reply` and `reasoning`; or `failure`."""

    step: StepId
    attempt: int
    outcome: Outcome
    retry_at: int | None = None
    limited: bool = False
    usage: Usage | None = None
    key: str | None = None
    released: tuple[str, ...] = ()
    not_retried: NotRetried | None = None


class AttemptSettled(Event, frozen=True, tag="attempt.settled"):
    """A reconciler or a person resolved an attempt with an unknown outcome. `started` is the seq at which it started,
    if another timeline made it under the same step number. Data: `output`, `because`."""

    step: StepId
    attempt: int
    key: str
    settlement: Settlement
    by: str | None = None
    released: tuple[str, ...] = ()
    started: int = 0


class EffectConfirmed(Event, frozen=True, tag="effect.confirmed"):
    """A reconciler checked the world after the effect and found it, or did not."""

    step: StepId
    key: str
    confirmed: bool


class DecisionMade(Event, frozen=True, tag="decision.made"):
    """A decision and its author. Data: `question`, `options`, `choice`, `because`."""

    step: StepId
    by: str = "agent"


# waits, messages, children ------------------------------------------------------------------------


class WaitOpened(Event, frozen=True, tag="wait.opened"):
    """A step waits. `digest` binds an answer to this request. `need` is the quorum. `round` counts escalations. Data:
    `prompt`, `schema`, `default`, `intention`, `verbs`, `options`; `may` and `apart`: who may approve, who not."""

    step: StepId
    waits_for: WaitFor
    name: str = ""
    to: tuple[str, ...] = ()
    deadline: int | None = None
    digest: Digest | None = None
    need: int = 1
    rule: str | None = None
    round: int = 0


class WaitVoted(Event, frozen=True, tag="wait.voted"):
    """One approver of a quorum agreed, by a link of `channel`, if any. Data: `answer`, `comment`."""

    step: StepId
    by: str
    message: int | None = None
    channel: str | None = None


class WaitClosed(Event, frozen=True, tag="wait.closed"):
    """A wait closed, with its outcome. Data: `answer`, `comment`."""

    step: StepId
    how: WaitEnd
    by: str | None = None
    message: int | None = None


class MessageTaken(Event, frozen=True, tag="message.taken"):
    """The run received a message from its inbox. Data: `body`."""

    message: int
    name: str
    id: str
    step: StepId | None = None
    by: str | None = None


class MessageSent(Event, frozen=True, tag="message.sent"):
    """The run sent a message to another run. Data: `body`."""

    step: StepId
    run: str
    name: str
    id: str


class ChildSpawned(Event, frozen=True, tag="child.spawned"):
    """The run started a child run. Data: `input`."""

    step: StepId
    run: str
    agent: str
    on_parent_end: Literal["cancel", "abandon", "wait"] = "cancel"


class ChildEnded(Event, frozen=True, tag="child.ended"):
    """A child run ended. Data: `result` or `failure`."""

    step: StepId
    run: str
    status: Literal["completed", "failed", "cancelled"]


# the agent's own record ---------------------------------------------------------------------------


class ContextChanged(Event, frozen=True, tag="context.changed"):
    """The agent's context changed from version `saw`. Data: `document` and its `form` if replaced whole, else `set`
    and `unset`; `because`."""

    version: int
    saw: int = 0
    whole: bool = False
    by: str = "agent"
    step: StepId | None = None
    verdict: Verdict | None = None


class ContextRefused(Event, frozen=True, tag="context.refused"):
    """A context change was refused, by the contract or as outdated. Data: `set`, `unset`, `failure`."""

    version: int
    saw: int = 0
    by: str = "agent"
    step: StepId | None = None
    verdict: Verdict | None = None
    message: int | None = None


class ContractBound(Event, frozen=True, tag="contract.bound"):
    """From here on this contract evaluates intentions: the agent's own, or the one of ancestor run `of`. No digest: the
    contract is removed. Data: `contract`."""

    digest: Digest
    name: str
    of: str | None = None


class PlanMade(Event, frozen=True, tag="plan.made"):
    """The agent declared the stages of its plan, before the named step."""

    stages: tuple[str, ...]
    step: StepId | None = None


class PlanReached(Event, frozen=True, tag="plan.reached"):
    """The agent reached a stage of its plan, before the named step."""

    stage: str
    step: StepId | None = None


class NoteMade(Event, frozen=True, tag="note.made"):
    """A remark for readers of the log. Data: `note`."""

    step: StepId | None = None
    by: str = "agent"


class FactDrawn(Event, frozen=True, tag="fact.drawn"):
    """A recorded nondeterministic value without a step number: the time, a random number, an id, a patch marker. Drawn
    before the named step. Data: `value`."""

    name: str
    step: StepId | None = None


# the workspace ------------------------------------------------------------------------------------


class WorkspaceBound(Event, frozen=True, tag="workspace.bound"):
    """From here on the run works in this folder. Its snapshots go into this vault, without the ignored paths."""

    path: str
    vault: str
    exclude: tuple[str, ...] = ()
    gitignore: bool = True


class WorkspaceCaptured(Event, frozen=True, tag="workspace.captured"):
    """Snapshot `root` holds the workspace's files as of seq `after`. `changed` counts the paths that differ from the
    previous snapshot, `processes` the live processes. Data: `processes`, `left_out`."""

    after: int
    root: Digest
    files: int = 0
    size_bytes: int = 0
    changed: int = 0
    processes: int = 0


class WorkspaceRestored(Event, frozen=True, tag="workspace.restored"):
    """The workspace was restored to snapshot `root`; snapshot `before` holds the previous files. `step` is the step
    being retried or compensated. Data: `paths`, for a partial restore; `written`, `removed`, `left`, `ended`."""

    root: Digest
    because: RestoredBecause
    before: Digest | None = None
    step: StepId | None = None
    by: str | None = None


Started: TypeAlias = AttemptStarted | StepStarted
WorkspaceEvent: TypeAlias = WorkspaceBound | WorkspaceCaptured | WorkspaceRestored


class ValueErasedOnPurpose(Event, frozen=True, tag="value.erased"):
    """Values were erased from the store: the data of these events, and these chunks."""

    reason: str
    seqs: tuple[int, ...] = ()
    pieces: tuple[Digest, ...] = ()
    by: str | None = None


def to_text(digest: bytes) -> Digest:
    """Returns a hash in its written form."""
    return b2a_base64(digest, newline=False).translate(URL_SAFE, b"=").decode()


def from_text(digest: Digest) -> bytes:
    """Parses a hash in its written form."""
    return urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
