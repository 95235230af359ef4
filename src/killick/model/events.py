"""The closed set of events: what can be said in a log, and how it is written in bytes.

An event's body is a small JSON object without the values that people and tools produced; those sit in
the event's data, which the body names by its hash (`data`). So a fold reads bodies alone, and a value
can be erased without breaking the chain. Times are microseconds since the epoch; digests are unpadded
base64url. Kinds are `noun.past`; a later version of a kind is stored as `noun.past/2`.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode
from binascii import b2a_base64
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import msgspec

from killick.errors import EventBroken, EventUnknown
from killick.type_init import ready

StepId = str
Digest = str

Sort = Literal["tool", "model", "decision", "wait", "child", "scope", "undo"]
EffectClass = Literal["reads", "idempotent", "workspace", "transaction", "at_most_once"]
Outcome = Literal["returned", "refused", "unknown"]
NotRetried = Literal[
    "no_attempts_left", "named_in_never", "not_named_in_on", "programming_error", "lasting_error", "may_have_happened",
    "patience_over",
]  # fmt: skip
"""Why a failed attempt is not followed by another one by itself."""
Ruling = Literal["accept", "reject", "ask"]
Settlement = Literal["happened", "did_not_happen", "stopped"]
WaitFor = Literal["answer", "event", "time", "child", "settlement", "mend"]
WaitEnd = Literal["answered", "expired", "skipped", "cancelled", "voided"]
ForkEffects = Literal["recorded", "live", "none"]


class Build(msgspec.Struct, frozen=True, omit_defaults=True):
    """The code that ran: its version and, where known, its commit."""

    version: str = ""
    commit: str = ""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a contract said of an intention, by which rule, and the contract's own hash."""

    ruling: Ruling = "accept"
    rule: str | None = None
    code: str | None = None
    contract: Digest | None = None


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model call used. Money is in millionths of a US dollar."""

    model: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost_micros: int = 0


class Doubt(msgspec.Struct, frozen=True, omit_defaults=True):
    """An attempt seen in a part of a log that was set aside: whether it happened is not known."""

    step: StepId
    tool: str
    key: str
    attempt: int = 1


class Action(msgspec.Struct, array_like=True, frozen=True):
    """What a step does to the world, as intended at a seq. `undoes` is where the effect started that it undoes."""

    tool: str
    effect: EffectClass
    identity: Digest | None
    intended: int
    undoes: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", gc=False):
    """One immutable fact. `data` is the hash of its values, written when it is appended."""

    at: int
    data: Digest | None = None


# runs ---------------------------------------------------------------------------------------------


class RunStarted(Event, frozen=True, tag="run.started"):
    """A run began. `trace` is where in a trace that was, in W3C's form, where somebody traces. Data: `input`."""

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


class RunForked(Event, frozen=True, tag="run.forked"):
    """A fork left its parent at a cut; `keep` names later events of the parent that stay. `model` is asked instead of
    others; with `renews_input` the fork has an input of its own. In its `workspace` are to be the files of snapshot
    `files`. Data: `input`, `because`."""

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
        """The last event of the parent that the fork shares."""
        return max((self.cut, *self.keep))


class ForkMade(Event, frozen=True, tag="fork.made"):
    """Another run was forked off this one, at a cut. From now on what either does to the world counts for both."""

    run: str
    cut: int
    by: str | None = None


class RunTaken(Event, frozen=True, tag="run.taken"):
    """A worker took the lease, with this build of the code; in `trace`, where somebody traces. `alone`: in a process
    that runs nothing else."""

    epoch: int
    holder: str
    build: Build = Build()
    trace: str | None = None
    alone: bool = False


class LeaseLapsed(Event, frozen=True, tag="lease.lapsed"):
    """The holder of the lease died, or stopped keeping it, and had not let the run go. `steps` were open then, with
    this build of the code; `alone` as of the taking. No worker takes the run before `until`."""

    holder: str
    until: int = 0
    build: Build = Build()
    steps: tuple[StepId, ...] = ()
    alone: bool = False


class RunQuarantined(Event, frozen=True, tag="run.quarantined"):
    """The run waits for a person to resume or cancel it: so many processes died in a row that held it."""

    deaths: int


class RunPaused(Event, frozen=True, tag="run.paused"):
    """Somebody paused the run. Data: `because`."""

    by: str | None = None


class RunResumed(Event, frozen=True, tag="run.resumed"):
    """Somebody let a paused, failed or diverged run go on. Data: `because`."""

    by: str | None = None


class RunPrioritized(Event, frozen=True, tag="run.prioritized"):
    """The run's priority changed. Data: `because`."""

    priority: int
    by: str | None = None


class RunTagged(Event, frozen=True, tag="run.tagged"):
    """The run's tags changed to these."""

    tags: tuple[str, ...]
    by: str | None = None


class RunDiverged(Event, frozen=True, tag="run.diverged"):
    """Code and record disagree at a step; the run waits for mended code. Data: `recorded`, `found`, `builds`."""

    step: StepId


class RunRewound(Event, frozen=True, tag="run.rewound"):
    """The timeline went back to a cut; `keep` names later events that stay, `returned` messages that go back; `files`
    is the snapshot that its workspace is to go back to. Data: `because`."""

    cut: int
    generation: int
    keep: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    by: str | None = None
    files: Digest | None = None


class RunRepaired(Event, frozen=True, tag="run.repaired"):
    """Events `first` to `last` did not hold and were set aside; the chain goes on from the head's hash.
    Data: `because`, `found`."""

    first: int
    last: int
    hash_before: Digest
    hash_head: Digest
    set_aside: int = 0
    doubts: tuple[Doubt, ...] = ()
    by: str | None = None


class RunRenewed(Event, frozen=True, tag="run.renewed"):
    """The run goes on in a fresh log under another id. Data: `input`."""

    run: str


class CancelRequested(Event, frozen=True, tag="cancel.requested"):
    """Somebody asked the run to end. Data: `because`."""

    compensate: bool = False
    by: str | None = None


class RunCompleted(Event, frozen=True, tag="run.completed"):
    """The agent returned. Data: `result`."""


class RunFailed(Event, frozen=True, tag="run.failed"):
    """The agent ended with an error. Data: `failure`, `not_undone`."""

    step: StepId | None = None


class RunCancelled(Event, frozen=True, tag="run.cancelled"):
    """The run was cancelled and is over. Data: `not_undone`."""


# steps --------------------------------------------------------------------------------------------


class StepIntended(Event, frozen=True, tag="step.intended"):
    """What the agent wants to do next, judged. `digest` is of all arguments, `identity` of those that name the action;
    `undoes_seq` is where the effect that it undoes first started; `claims` are rights that a child or a message takes.
    Data: `arguments`, `because`; what the verdict rests on: `paths`, `others`, `since`, `adopts`; `failure` of what was
    rejected. `guest` is by what code that Killick did not start finds it again; `within` is the step in whose attempt
    that code took it."""

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


class StepEdited(Event, frozen=True, tag="step.edited"):
    """A person changed what a step is to do before it was done: the intention is theirs from now on, judged anew. One
    that is rejected changes nothing. Data: `arguments`, `changed`, `comment`; `paths`, `others` and `failure` as of an
    intention."""

    step: StepId
    by: str
    digest: Digest | None = None
    identity: Digest | None = None
    effect: EffectClass | None = None
    verdict: Verdict | None = None


class StepDelayed(Event, frozen=True, tag="step.delayed"):
    """The step goes on at a later time, for backoff or a rate limit, or now, because somebody said so; this is not an
    attempt."""

    step: StepId
    until: int
    because: str = "backoff"
    by: str | None = None


class StepAdopted(Event, frozen=True, tag="step.adopted"):
    """The step took the recorded result of an orphan effect, first started at `seq` of `run`, instead of acting again.
    `claims` is the right to it, which exists once in a lineage, as `space:digest`. Data: `output`."""

    step: StepId
    run: str
    key: str
    seq: int
    claims: tuple[str, ...] = ()


class StepDrifted(Event, frozen=True, tag="step.drifted"):
    """A replayed step's arguments differ from the record in a way that changes nothing; `digest` is of those found.
    Data: `recorded`, `found`."""

    step: StepId
    digest: Digest | None = None


class StepOverridden(Event, frozen=True, tag="step.overridden"):
    """A person gave a pending step its result. Data: `output`, `because`."""

    step: StepId
    by: str | None = None


class StepEnded(Event, frozen=True, tag="step.ended"):
    """A step without attempts of its own ended: a scope, a rejection by a person or by a verdict that came later than
    the intention, a step that somebody skipped. Data: `output` or `failure`; `winner` of a `first`; `others`, `paths`
    of a verdict."""

    step: StepId
    outcome: Literal["returned", "failed", "cancelled"] = "returned"
    verdict: Verdict | None = None
    by: str | None = None


class AttemptStarted(Event, frozen=True, tag="attempt.started"):
    """One try is about to touch the world. `claims` are the rights it consumes, as `space:digest`. `action` is what it
    does, where the run was rewound to a place at which the step was intended already."""

    step: StepId
    attempt: int
    key: str
    epoch: int
    deadline: int | None = None
    claims: tuple[str, ...] = ()
    action: Action | None = None


class AttemptProgressed(Event, frozen=True, tag="attempt.progressed"):
    """How far a long tool got. Data: `progress`."""

    step: StepId
    attempt: int


class AttemptEnded(Event, frozen=True, tag="attempt.ended"):
    """One try is over. `retry_at`: it will be tried again then; `limited`: for a rate limit, which does not count.
    `not_retried`: why no other attempt follows a failure by itself. `key` is given when it ended late, after a rewind.
    Data: `output`, with `reply` and `reasoning` of a model's; or `failure`."""

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
    """What was in doubt is known now, from a reconciler or a person. `started` is where it first started, for one that
    another timeline did under the number of the step. Data: `output`, `because`."""

    step: StepId
    attempt: int
    key: str
    settlement: Settlement
    by: str | None = None
    released: tuple[str, ...] = ()
    started: int = 0


class EffectConfirmed(Event, frozen=True, tag="effect.confirmed"):
    """The world was looked at after the effect, and showed it or did not."""

    step: StepId
    key: str
    confirmed: bool


class DecisionMade(Event, frozen=True, tag="decision.made"):
    """A choice, with who chose. Data: `question`, `options`, `choice`, `because`."""

    step: StepId
    by: str = "agent"


# waits, messages, children ------------------------------------------------------------------------


class WaitOpened(Event, frozen=True, tag="wait.opened"):
    """A step now waits. `digest` binds what is asked, so that an answer authorises nothing else. `need` people have to
    agree; `round` counts how often it was passed on to others. Data: `prompt`, `schema`, `default`, `intention`,
    `verbs`, `options`; `may`, who may answer, by name, where that is known."""

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
    """One of several people agreed. Data: `answer`, `comment`."""

    step: StepId
    by: str
    message: int | None = None


class WaitClosed(Event, frozen=True, tag="wait.closed"):
    """A wait ended, and how. Data: `answer`, `comment`."""

    step: StepId
    how: WaitEnd
    by: str | None = None
    message: int | None = None


class MessageTaken(Event, frozen=True, tag="message.taken"):
    """A message left the inbox for the run. Data: `body`."""

    message: int
    name: str
    id: str
    step: StepId | None = None
    by: str | None = None


class MessageSent(Event, frozen=True, tag="message.sent"):
    """The run sent a message to another. Data: `body`."""

    step: StepId
    run: str
    name: str
    id: str


class ChildSpawned(Event, frozen=True, tag="child.spawned"):
    """The run started another run. Data: `input`."""

    step: StepId
    run: str
    agent: str
    on_parent_end: Literal["cancel", "abandon", "wait"] = "cancel"


class ChildEnded(Event, frozen=True, tag="child.ended"):
    """A child ended, and how. Data: `result` or `failure`."""

    step: StepId
    run: str
    status: Literal["completed", "failed", "cancelled"]


# the agent's own record ---------------------------------------------------------------------------


class ContextChanged(Event, frozen=True, tag="context.changed"):
    """The agent's document changed from the version that was seen. Data: `document` and its `form` when whole,
    otherwise `set` and `unset`; `because`."""

    version: int
    saw: int = 0
    whole: bool = False
    by: str = "agent"
    step: StepId | None = None
    verdict: Verdict | None = None


class ContextRefused(Event, frozen=True, tag="context.refused"):
    """A change of the agent's document was refused: by the contract, or because somebody saw an older version.
    Data: `set`, `unset`, `failure`."""

    version: int
    saw: int = 0
    by: str = "agent"
    step: StepId | None = None
    verdict: Verdict | None = None
    message: int | None = None


class ContractBound(Event, frozen=True, tag="contract.bound"):
    """From now on intentions are judged by this contract: the agent's own, or that of a run above, `of`; without a
    digest, by none any more. Data: `contract`."""

    digest: Digest
    name: str
    of: str | None = None


class PlanMade(Event, frozen=True, tag="plan.made"):
    """The agent said which stages it will go through, before the step that is named."""

    stages: tuple[str, ...]
    step: StepId | None = None


class PlanReached(Event, frozen=True, tag="plan.reached"):
    """The agent is at a stage of its plan, before the step that is named."""

    stage: str
    step: StepId | None = None


class NoteMade(Event, frozen=True, tag="note.made"):
    """A remark for whoever reads the record. Data: `note`."""

    step: StepId | None = None
    by: str = "agent"


class FactDrawn(Event, frozen=True, tag="fact.drawn"):
    """Something from outside that takes no number: the time, a random number, an id, a patch marker; drawn before the
    step that is named. Data: `value`."""

    name: str
    step: StepId | None = None


# the window ---------------------------------------------------------------------------------------

EvictedBecause = Literal["pays", "budget", "duplicate", "unused"]
FaultedHow = Literal["recalled", "repeated", "reread", "found", "called"]
PinnedBecause = Literal["fault", "asked"]


class PageEvicted(Event, frozen=True, tag="page.evicted"):
    """Pages left what a model is sent, all at once: these handles, from the call after `turn` others on. `tokens` is
    what each call saves; `marks` are how the hashes begin of what they held, since a place in a history that was edited
    may hold something else. Data: `pages`, each with `page`, `kind`, `source`, `tokens`, `why`; `budget`; `window`,
    where several decide before the same step, is which."""

    pages: tuple[str, ...]
    tokens: int
    because: EvictedBecause
    turn: int
    step: StepId | None = None
    marks: tuple[str, ...] = ()


class PageFaulted(Event, frozen=True, tag="page.faulted"):
    """A page that had left was wanted after all, and how it came back: recalled by its handle; the same read repeated
    and answered from the record; read again and found the same; a tool's schema found, or its stub called.
    Data: `source`, `window`; `text` and `failed`, where a tool call was answered so."""

    page: str
    how: FaultedHow
    tokens: int
    turn: int
    step: StepId | None = None


class PagePinned(Event, frozen=True, tag="page.pinned"):
    """A page stays in what a model is sent until a turn; one that is over lets it go. Data: `source`,
    `window`."""

    page: str
    until: int
    because: PinnedBecause
    turn: int
    step: StepId | None = None


PageEvent = PageEvicted | PageFaulted | PagePinned

# the workspace ------------------------------------------------------------------------------------

RestoredBecause = Literal["in doubt", "rewound", "forked", "gone", "undone", "asked"]


class WorkspaceBound(Event, frozen=True, tag="workspace.bound"):
    """From now on the run works in this folder, whose snapshots are kept in this vault; what of it is left out."""

    path: str
    vault: str
    exclude: tuple[str, ...] = ()
    gitignore: bool = True


class WorkspaceCaptured(Event, frozen=True, tag="workspace.captured"):
    """The files of the workspace as they were when the log was at `after`: snapshot `root`. Where nothing changed
    nothing is said. `changed` counts the paths that are other than in the snapshot before; `processes` those that were
    alive, of which only the files were taken, unless `images` is a snapshot of themselves. Data: `processes`,
    `left_out`."""

    after: int
    root: Digest
    files: int = 0
    size_bytes: int = 0
    changed: int = 0
    processes: int = 0
    images: Digest | None = None


class WorkspaceRestored(Event, frozen=True, tag="workspace.restored"):
    """The files of the workspace went back to snapshot `root`; what was there before is snapshot `before`. `step` is
    the step that is tried again, or was undone. Data: `paths`, where not all did; `written`, `removed`, `left`,
    `ended`."""

    root: Digest
    because: RestoredBecause
    before: Digest | None = None
    step: StepId | None = None
    by: str | None = None


WorkspaceEvent = WorkspaceBound | WorkspaceCaptured | WorkspaceRestored


class ValueErasedOnPurpose(Event, frozen=True, tag="value.erased"):
    """Values left the store for good: the data of these events, and these stored pieces."""

    reason: str
    seqs: tuple[int, ...] = ()
    pieces: tuple[Digest, ...] = ()
    by: str | None = None


# triggers -----------------------------------------------------------------------------------------

TriggerSort = Literal["cron", "every", "when", "event"]
PassedBecause = Literal["missed", "paused", "overlap", "input failed"]


class TriggerSet(Event, frozen=True, tag="trigger.set"):
    """A trigger was declared, or declared otherwise: what sets off which agent, and when next. Data: `spec`."""

    digest: Digest
    sort: TriggerSort
    agent: str
    next: int | None = None


class TriggerFired(Event, frozen=True, tag="trigger.fired"):
    """A trigger started a run, in the same commit. `due` is when a schedule wanted it.
    Data: `body` of an event, `value` of a condition."""

    number: int
    run: str
    due: int | None = None
    next: int | None = None
    by: str | None = None


class TriggerQueued(Event, frozen=True, tag="trigger.queued"):
    """A firing waits until the run before it has ended. Data: as of the firing."""

    number: int
    due: int | None = None
    next: int | None = None
    by: str | None = None


class TriggerPassed(Event, frozen=True, tag="trigger.passed"):
    """Firings that were due from `first` to `last` are not made, and why; no more than 10,000 are counted.
    `number` is of one that was queued. Data: `failure` of the input; `body`, `value`."""

    first: int
    last: int
    because: PassedBecause
    count: int = 1
    number: int = 0
    next: int | None = None
    by: str | None = None


class TriggerTurned(Event, frozen=True, tag="trigger.turned"):
    """What a trigger looks at holds now, or does not hold any more."""

    holds: bool
    next: int | None = None


# hooks --------------------------------------------------------------------------------------------


class HookSet(Event, frozen=True, tag="hook.set"):
    """What a hook listens to; a new one hears what comes after `position` of the feed. Data: `spec`."""

    position: int


class HookCalled(Event, frozen=True, tag="hook.called"):
    """A hook was told of event `seq` of `run` and took it: its cursor is at `position` now."""

    position: int
    run: str
    seq: int
    attempt: int = 1


class HookFailed(Event, frozen=True, tag="hook.failed"):
    """A hook did not take what it was told of, and is told again at `retry_at`. Data: `failure`."""

    position: int
    run: str
    seq: int
    attempt: int
    retry_at: int


class HookDropped(Event, frozen=True, tag="hook.dropped"):
    """A hook did not take what it was told of and is not told again; its cursor moves on. Data: `failure`."""

    position: int
    run: str
    seq: int
    attempt: int


class HookMoved(Event, frozen=True, tag="hook.moved"):
    """A hook's cursor passed events that it does not listen to."""

    position: int


# seals --------------------------------------------------------------------------------------------


class StoreSealed(Event, frozen=True, tag="store.sealed"):
    """The store was sealed: `size` entries of all seals so far have this `root`, signed with `key`. `number` counts the
    seals; at `before` stands the one that knows the runs which this one does not. Data: `entries`, `peaks`, `runs`,
    `checkpoint`."""

    number: int
    size: int
    root: Digest
    key: str
    before: int = 0
    by: str | None = None


# tokens -------------------------------------------------------------------------------------------

Scope = Literal["viewer", "operator", "admin"]


class TokenIssued(Event, frozen=True, tag="token.issued"):
    """Somebody may ask the server for what the scope allows, until `expires_at`; `hash` is of the token's secret, which
    is kept nowhere."""

    id: str
    name: str
    scope: Scope
    hash: Digest
    expires_at: int | None = None
    by: str | None = None


class TokenRevoked(Event, frozen=True, tag="token.revoked"):
    """A token opens nothing any more. Data: `because`."""

    id: str
    by: str | None = None


# what frameworks keep ---------------------------------------------------------------------------


class EntryKept(Event, frozen=True, tag="entry.kept"):
    """A framework keeps something under a name, instead of what it kept there before. Data: `value`."""

    name: str
    labels: dict[str, str] = {}


class EntryDropped(Event, frozen=True, tag="entry.dropped"):
    """A framework keeps nothing under a name any more."""

    name: str


AnyEvent = (
    RunStarted | RunForked | ForkMade | RunTaken | LeaseLapsed | RunQuarantined
    | RunPaused | RunResumed | RunPrioritized | RunTagged | RunDiverged
    | RunRewound | RunRepaired | RunRenewed | CancelRequested | RunCompleted | RunFailed | RunCancelled
    | StepIntended | StepEdited | StepDelayed | StepAdopted | StepDrifted | StepOverridden | StepEnded
    | AttemptStarted | AttemptProgressed | AttemptEnded | AttemptSettled | EffectConfirmed | DecisionMade
    | WaitOpened | WaitVoted | WaitClosed | MessageTaken | MessageSent | ChildSpawned | ChildEnded
    | ContextChanged | ContextRefused | ContractBound | PlanMade | PlanReached | NoteMade | FactDrawn
    | ValueErasedOnPurpose
    | TriggerSet | TriggerFired | TriggerQueued | TriggerPassed | TriggerTurned
    | HookSet | HookCalled | HookFailed | HookDropped | HookMoved | StoreSealed
    | TokenIssued | TokenRevoked | PageEvicted | PageFaulted | PagePinned
    | WorkspaceBound | WorkspaceCaptured | WorkspaceRestored | EntryKept | EntryDropped
)  # fmt: skip

KINDS: Final[dict[str, type[Event]]] = {str(event.__struct_config__.tag): event for event in get_args(AnyEvent)}
"""Every stored kind and its type."""

TOLD: Final[frozenset[type[Event]]] = frozenset(
    {
        LeaseLapsed, RunQuarantined,
        RunStarted, RunForked, RunPaused, RunResumed, RunDiverged, RunRewound, RunRepaired, RunRenewed, CancelRequested,
        RunCompleted, RunFailed, RunCancelled, WaitOpened, WaitClosed, AttemptSettled, ChildSpawned,
    }
)  # fmt: skip
"""What hooks can hear of: these events enter the store's feed in the commit that makes them."""

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Final[dict[str, Upcaster]] = {}
"""From a kind no longer written, to the body of its successor (with `kind` set to the successor's)."""

_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")
_encode: Final = msgspec.json.Encoder().encode
_decode: Final[Callable[[bytes], Event]] = msgspec.json.Decoder(AnyEvent).decode


def encode(event: Event, data: bytes | None = None) -> bytes:
    """The body of an event, naming the hash of its data."""
    body = _encode(event)
    if data is None:
        return body
    return body[:-1] + b',"data":"' + b2a_base64(data, newline=False)[:43].translate(_URL_SAFE) + b'"}'


def check(event: Event) -> None:
    """Whether an event can be read again as it is; msgspec's ValidationError, or TypeError, where it cannot."""
    _decode(_encode(event))


def decode(body: bytes) -> Event:
    """The event in a body; an older version is brought up to date."""
    try:
        return _decode(body)
    except msgspec.ValidationError:
        return _upcast(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EventBroken(str(error)) from error


def _upcast(body: bytes) -> Event:
    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        kind = str(fields.get("kind"))
        while kind in UPCASTERS:
            fields = UPCASTERS[kind](fields)
            kind = str(fields["kind"])
        if kind in KINDS:
            return msgspec.convert(fields, ready(KINDS[kind]))
    except msgspec.DecodeError as error:
        raise EventBroken(str(error)) from error
    name, _, version = kind.partition("/")
    raise EventUnknown(name, int(version) if version.isdigit() else 1)


def to_text(digest: bytes) -> Digest:
    """A hash as events and references write it."""
    return b2a_base64(digest, newline=False).rstrip(b"=").translate(_URL_SAFE).decode("ascii")


def from_text(digest: Digest) -> bytes:
    """A hash from its written form."""
    return urlsafe_b64decode(digest + "=" * (-len(digest) % 4))
