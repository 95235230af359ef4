"""Folds every event of a log, rewound ones included, into the run's effects on the world.

Effects, consumed rights, spend and children stay on the ledger after a rewind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from killick.model import events as e
from killick.model.facts import PERMIT, PlainStep, intended_name
from killick.model.vector import SavedFold, Vector, VectorFold
from killick.type_init import ready

EffectStatus = Literal["open", "happened", "did_not_happen", "in_doubt", "undone"]

_NOT_THERE: Final = ("did_not_happen", "undone")
_ROLLED_BACK: Final = ("workspace", "transaction")
"""The effect classes whose attempts leave nothing behind if they end without an outcome."""

BUDGET: Final = "killick.budget"
"""The claim space that orders counted effects within a budget group."""
_BUDGETED: Final = f"{BUDGET}:"
_PERMIT: Final = f"{PERMIT}:"

SENDING: Final = "killick.send"
"""The ledger name of a message to another run."""


class Effect(msgspec.Struct, array_like=True, gc=False):
    """One effect, by its idempotency key, with its outcome."""

    key: str
    step: e.StepId
    generation: int
    tool: str
    effect: e.EffectClass
    identity: e.Digest | None
    intended: int
    started: int
    attempts: int = 1
    ended: int = 0
    status: EffectStatus = "open"
    adopted: tuple[int, ...] = ()
    """Where later timelines reused it: by an attempt under its key, or by its result."""
    undoes: int = 0
    claims: tuple[str, ...] = ()
    doubted: bool = False
    """Whether an attempt before the last one has an unknown outcome: the last one's refusal does not settle that."""


class Consumed(msgspec.Struct, array_like=True, gc=False):
    """A consumed unique right, as `space:digest`, unless it was returned."""

    claim: str
    seq: int
    released: bool = False


class Child(msgspec.Struct, array_like=True, gc=False):
    """A child run."""

    run: str
    agent: str
    step: e.StepId
    spawned: int
    on_parent_end: Literal["cancel", "abandon", "wait"]
    status: str = "running"


class Capture(msgspec.Struct, array_like=True, gc=False):
    """A workspace snapshot: the files as of seq `after`."""

    after: int
    root: e.Digest
    seq: int


class Spend(msgspec.Struct, omit_defaults=True):
    """The usage of all attempts ever made."""

    attempts: int = 0
    model_calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost_micros: int = 0


class Counts(msgspec.Struct, omit_defaults=True):
    """Call and effect counts, for rules that limit them."""

    calls: dict[str, int] = {}
    """By name, the calls that began, with any outcome."""
    effects: dict[str, int] = {}
    """By tool, the effects that happened or may have, minus compensated ones."""
    spend: Spend = msgspec.field(default_factory=Spend)
    governed: int = 0
    """The number of effects that began in the order of a budget group."""


class LedgerFacts(msgspec.Struct, omit_defaults=True):
    """The scalar part of a ledger, and its open entries."""

    seq: int = 0
    generation: int = 0
    counts: Counts = msgspec.field(default_factory=Counts)
    before: Counts | None = None
    """In a fork, the parent's counts up to the cut."""
    tells: dict[e.StepId, str] = {}
    """Intended children and messages, which are counted at once."""
    begins: dict[e.StepId, str] = {}
    """Intended calls that have not begun, by the name that rules match."""
    intentions: dict[e.StepId, e.Action] = {}
    open: dict[str, int] = {}
    keys: dict[e.StepId, str] = {}
    """By step, the key of its last attempt, while that effect is open."""
    children_open: dict[str, int] = {}
    claims_open: dict[str, int] = {}
    forks: tuple[str, ...] = ()
    taken_back: int = 0
    """How often an effect turned out to be absent or compensated."""
    workspace: str | None = None
    vault: str | None = None
    exclude: tuple[str, ...] = ()
    gitignore: bool = True
    files_due: e.Digest | None = None
    """The snapshot still to be restored to the workspace, after a rewind or a fork."""
    files_changed: int = 0
    """Where a tool that changes the workspace last returned, or was undone."""
    due_because: e.RestoredBecause = "rewound"


class Ledger(VectorFold):
    """All effects of a run on the world. Grows by `apply`, and never shrinks."""

    VECTORS = MappingProxyType({"effects": Effect, "consumed": Consumed, "children": Child, "captures": Capture})
    FACTS, DECODER = LedgerFacts, msgspec.json.Decoder(SavedFold[LedgerFacts])
    OF_STEPS = frozenset({"effects"})
    __slots__ = ("captures", "children", "consumed", "effects", "facts")

    facts: LedgerFacts
    effects: Vector[Effect]
    consumed: Vector[Consumed]
    children: Vector[Child]
    captures: Vector[Capture]

    def apply(self, seq: int, event: e.Event) -> None:
        """Applies the next event of the log."""
        self.facts.seq = seq
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, seq, event)

    def apply_steps(self, plain: Sequence[PlainStep]) -> None:
        """Applies the events of plain steps in a row, as `apply` of each would."""
        counts = self.facts.counts
        for one in plain:
            name, effect = one.intended.name, one.intended.effect
            counts.calls[name] = counts.calls.get(name, 0) + 1
            if effect is not None and effect != "reads":
                counts.effects[name] = counts.effects.get(name, 0) + 1
        counts.spend.attempts += len(plain)
        self.facts.seq = plain[-1].last
        self.keep(plain)

    def add_steps(self, plain: Sequence[PlainStep]) -> None:
        effects = list[Effect]()
        for one in plain:
            intended, started, last = one.intended, one.started, one.last
            name, effect = intended.name, intended.effect
            if effect is not None and effect != "reads":
                identity = intended.identity or intended.digest
                effects.append(
                    Effect(started.key, started.step, 0, name, effect, identity, one.seq, last - 1, 1, last, "happened")
                )
        self.effects.extend(effects)

    @property
    def spend(self) -> Spend:
        return self.facts.counts.spend

    def claims(self) -> dict[str, int]:
        """Returns the unique rights that this run holds, as `space:digest`, with the seqs that consumed them."""
        return {consumed.claim: consumed.seq for consumed in self.consumed if not consumed.released}

    def permits(self) -> dict[str, int]:
        """Returns the permits of limits that attempts of this run hold, with the seqs at which those started."""
        found = {claim: at for claim, at in self.facts.claims_open.items() if claim.startswith(_PERMIT)}
        return {claim: self.consumed[at].seq for claim, at in found.items()}

    def in_doubt(self) -> list[Effect]:
        """Returns the effects with an unknown outcome, oldest first."""
        indexes = sorted(set(self.facts.open.values()))
        return [self.effects[index] for index in indexes if self.effects[index].status in ("open", "in_doubt")]

    def files_at(self, seq: int) -> e.Digest | None:
        """Returns the workspace snapshot as of a seq, or None if there is none that early."""
        found: Capture | None = None
        for capture in self.captures:
            # A snapshot may be recorded late, so the last recorded one is not always the last taken.
            if capture.after <= seq and (found is None or capture.after >= found.after):
                found = capture
        return None if found is None else found.root

    def uncaptured(self) -> int:
        """Returns the last change of the workspace if no snapshot of it is on record yet; otherwise 0."""
        changed = self.facts.files_changed
        return 0 if any(capture.after >= changed for capture in reversed(self.captures)) else changed

    def files_from(self, seq: int) -> e.Digest | None:
        """Returns the snapshot with which a fork from a seq starts: if none is that early, the first."""
        return self.files_at(seq) or (self.captures[0].root if len(self.captures) else None)

    def changing(self, key: str | None) -> Effect | None:
        index = self.facts.open.get(key or "")
        if index is None:
            return None
        return self.effects.changing(index)

    def reopening(self, key: str) -> Effect | None:
        """Reopens a closed effect for another attempt: a rewind may go back to before it closed."""
        found = (index for index in range(len(self.effects) - 1, -1, -1) if self.effects[index].key == key)
        index = next(found, None)
        if index is None:
            return None
        self.facts.open[key] = index
        return self.effects.changing(index)

    def turn(self, effect: Effect, status: EffectStatus, seq: int = 0) -> None:
        """Changes the state of an effect, and the counts with it."""
        counts = self.facts.counts.effects
        self.facts.taken_back += status in _NOT_THERE
        if not effect.undoes:
            change = (effect.status in _NOT_THERE) - (status in _NOT_THERE)
            counts[effect.tool] = counts.get(effect.tool, 0) + change
        effect.status, effect.ended = status, seq or effect.ended

    def begin(self, effect: Effect) -> None:
        """Adds an effect."""
        if not effect.undoes:
            counts = self.facts.counts.effects
            counts[effect.tool] = counts.get(effect.tool, 0) + (effect.status not in _NOT_THERE)
        self.facts.open[effect.key] = self.effects.append(effect)

    def called(self, name: str, count: int = 1) -> None:
        calls = self.facts.counts.calls
        calls[name] = calls.get(name, 0) + count

    def close(self, effect: Effect, status: EffectStatus, seq: int) -> None:
        self.turn(effect, status, seq)
        facts = self.facts
        facts.open.pop(effect.key, None)
        for step in [step for step, key in facts.keys.items() if key == effect.key]:
            del facts.keys[step]
        intention = facts.intentions.get(effect.step)
        if intention is not None and intention.intended == effect.intended:
            del facts.intentions[effect.step]
        for claim in effect.claims:
            self.facts.claims_open.pop(claim, None)
        if status == "happened" and effect.undoes:
            undone = self.started_at(effect.undoes)
            if undone is not None:
                self.turn(undone, "undone")

    def started_at(self, seq: int) -> Effect | None:
        """Returns the effect whose first attempt started at a seq, for mutation."""
        index = bisect_left(self.effects, seq, key=lambda effect: effect.started)
        if index == len(self.effects) or self.effects[index].started != seq:
            return None
        return self.effects.changing(index)

    def release(self, claims: Iterable[str]) -> None:
        for claim in claims:
            index = self.facts.claims_open.pop(claim, None)
            if index is not None:
                self.consumed.changing(index).released = True


# handlers -----------------------------------------------------------------------------------------


def _run_forked(ledger: Ledger, seq: int, event: e.RunForked) -> None:
    facts = ledger.facts
    facts.generation = event.generation
    facts.intentions.clear()
    facts.begins.clear()
    facts.tells.clear()
    facts.forks = ()
    facts.before = msgspec.convert(msgspec.to_builtins(facts.counts), ready(Counts))
    facts.workspace = event.workspace or facts.workspace
    facts.files_due, facts.due_because = event.files, "forked"
    if event.files is not None:
        ledger.captures.append(Capture(seq, event.files, seq))


def _fork_made(ledger: Ledger, seq: int, event: e.ForkMade) -> None:
    if event.run not in ledger.facts.forks:
        ledger.facts.forks += (event.run,)


def _permits_returned(ledger: Ledger, seq: int, event: e.Event) -> None:
    """Returns the permits of open attempts: a run that ended or was rewound makes no more calls."""
    ledger.release(list(ledger.permits()))


def _run_rewound(ledger: Ledger, seq: int, event: e.RunRewound) -> None:
    _permits_returned(ledger, seq, event)
    ledger.facts.generation = event.generation
    ledger.facts.intentions.clear()
    ledger.facts.begins.clear()
    ledger.facts.tells.clear()
    if event.files is not None:
        _files_restored(ledger, seq, event)
        ledger.facts.files_due, ledger.facts.due_because = event.files, "rewound"
        ledger.captures.append(Capture(seq, event.files, seq))


def _files_restored(ledger: Ledger, seq: int, event: e.RunRewound) -> None:
    """Marks file-only effects after the cut as undone, and those before it that were undone later as happened:
    restoring the snapshot does both."""
    for index in range(len(ledger.effects) - 1, -1, -1):
        effect = ledger.effects[index]
        if effect.started <= event.cut:
            return
        if effect.started in event.keep:
            continue
        if effect.undoes and (effect.undoes <= event.cut or effect.undoes in event.keep):
            undone = ledger.started_at(effect.undoes)
            if undone is not None and undone.effect == "workspace" and undone.status == "undone":
                ledger.turn(undone, "happened")
        elif effect.effect == "workspace" and not effect.undoes:
            changed = ledger.effects.changing(index)
            ledger.facts.open.pop(changed.key, None)
            if changed.status not in _NOT_THERE:
                ledger.turn(changed, "undone", seq)


def _workspace_bound(ledger: Ledger, seq: int, event: e.WorkspaceBound) -> None:
    facts = ledger.facts
    facts.workspace, facts.vault = event.path, event.vault
    facts.exclude, facts.gitignore = event.exclude, event.gitignore


def _workspace_captured(ledger: Ledger, seq: int, event: e.WorkspaceCaptured) -> None:
    ledger.captures.append(Capture(event.after, event.root, seq))


def _workspace_restored(ledger: Ledger, seq: int, event: e.WorkspaceRestored) -> None:
    if event.because in ("rewound", "forked"):
        ledger.facts.files_due = None
    elif event.because == "undone":
        ledger.facts.files_changed = seq  # only some paths were restored: no snapshot has all files as they are now


def _run_taken(ledger: Ledger, seq: int, event: e.RunTaken) -> None:
    """Closes the previous holder's open transactions as not done: a commit would be in the log."""
    for index in ledger.facts.open.values():
        effect = ledger.effects[index]
        if effect.effect == "transaction" and effect.status == "open":
            ledger.turn(ledger.effects.changing(index), "did_not_happen", seq)


def _run_repaired(ledger: Ledger, seq: int, event: e.RunRepaired) -> None:
    for doubt in event.doubts:
        if doubt.key not in ledger.facts.open:
            generation = ledger.facts.generation
            effect = Effect(
                doubt.key, doubt.step, generation, doubt.tool, "at_most_once", None, seq, seq, doubt.attempt
            )
            ledger.begin(effect)
            ledger.facts.keys[doubt.step] = doubt.key
        changed = ledger.changing(doubt.key)
        if changed is not None:
            ledger.turn(changed, "in_doubt")


def _step_intended(ledger: Ledger, seq: int, event: e.StepIntended) -> None:
    if event.verdict is not None and event.verdict.ruling == "reject":
        return
    sort = event.sort
    if sort == "tool" and event.effect is not None:
        ledger.facts.begins[event.step] = event.name
    elif sort == "model":
        ledger.facts.begins[event.step] = intended_name(sort, event.name)
    elif sort in ("tool", "child"):
        # Counted on intention, because no later event marks their start.
        name = ledger.facts.tells[event.step] = intended_name(sort, event.name)
        ledger.called(name)
    if event.claims:
        ledger.facts.counts.governed += any(claim.startswith(_BUDGETED) for claim in event.claims)
        for claim in event.claims:
            ledger.consumed.append(Consumed(claim, seq))
    if event.effect is None and event.sort == "tool":
        ledger.facts.intentions[event.step] = e.Action(SENDING, "idempotent", event.digest, seq, 0)
    elif event.effect is not None and event.effect != "reads":
        identity = event.identity or event.digest
        intention = e.Action(event.name, event.effect, identity, seq, event.undoes_seq)
        ledger.facts.intentions[event.step] = intention


def _step_edited(ledger: Ledger, seq: int, event: e.StepEdited) -> None:
    """Uses the edited arguments, whose values are at the edit's seq."""
    if event.verdict is not None and event.verdict.ruling == "reject":
        return
    ledger.facts.intentions.pop(event.step, None)
    if event.effect is not None and event.effect != "reads":
        tool, identity = ledger.facts.begins.get(event.step, ""), event.identity or event.digest
        ledger.facts.intentions[event.step] = e.Action(tool, event.effect, identity, seq, 0)


def _step_started(ledger: Ledger, seq: int, event: e.StepStarted) -> None:
    _step_intended(ledger, seq, event)
    _attempt_started(ledger, seq, event)


def _attempt_started(ledger: Ledger, seq: int, event: e.Started) -> None:
    facts = ledger.facts
    counts = facts.counts
    counts.spend.attempts += 1
    action = event.action or facts.intentions.get(event.step)
    name = facts.begins.pop(event.step, None)
    if name is None and event.action is not None and event.attempt == 1 and not event.action.undoes:
        name = event.action.tool
    if name is not None:
        counts.calls[name] = counts.calls.get(name, 0) + 1
    if event.claims:
        facts.counts.governed += any(claim.startswith(_BUDGETED) for claim in event.claims)
    for claim in event.claims:
        facts.claims_open[claim] = ledger.consumed.append(Consumed(claim, seq))
    rights = tuple(claim for claim in event.claims if not claim.startswith(_PERMIT))
    # A step of an abandoned timeline may have had this number.
    facts.keys.pop(event.step, None)
    effect = ledger.changing(event.key) or (None if event.action is None else ledger.reopening(event.key))
    if effect is not None:
        if effect.status in ("open", "in_doubt") and effect.effect not in _ROLLED_BACK:
            effect.doubted = True
        ledger.turn(effect, "open")
        effect.attempts, effect.claims = event.attempt, rights or effect.claims
        if effect.generation != facts.generation:
            effect.adopted += (seq,)
    elif action is not None:
        effect = Effect(
            event.key, event.step, facts.generation, action.tool, action.effect, action.identity,
            action.intended, seq, event.attempt, undoes=action.undoes, claims=rights,
        )  # fmt: skip
        ledger.begin(effect)
    if effect is not None:
        facts.keys[event.step] = event.key


def _attempt_ended(ledger: Ledger, seq: int, event: e.AttemptEnded) -> None:
    facts = ledger.facts
    if event.usage is not None:
        spend = facts.counts.spend
        spend.model_calls += 1
        spend.tokens_in += event.usage.tokens_in
        spend.tokens_out += event.usage.tokens_out
        spend.tokens_cached += event.usage.tokens_cached
        spend.cost_micros += event.usage.cost_micros
    ledger.release(event.released)
    effect = ledger.changing(event.key or facts.keys.get(event.step))
    if effect is None:
        return
    if event.outcome == "returned":
        facts.files_changed = seq if effect.effect == "workspace" else facts.files_changed
        ledger.close(effect, "happened", seq)
    elif event.outcome == "unknown" or effect.doubted:
        ledger.turn(effect, "in_doubt", seq)
    else:
        (ledger.close if event.retry_at is None else ledger.turn)(effect, "did_not_happen", seq)


def _attempt_settled(ledger: Ledger, seq: int, event: e.AttemptSettled) -> None:
    ledger.release(event.released)
    effect = ledger.changing(event.key)
    if effect is not None and event.settlement == "happened":
        ledger.close(effect, "happened", seq)
    elif effect is not None and event.settlement == "did_not_happen":
        # It may be retried under the same key, so it stays accessible.
        effect.doubted = False
        ledger.turn(effect, "did_not_happen", seq)


def _step_adopted(ledger: Ledger, seq: int, event: e.StepAdopted) -> None:
    for claim in event.claims:
        ledger.facts.claims_open[claim] = ledger.consumed.append(Consumed(claim, seq))
    effect = ledger.started_at(event.seq)
    if effect is not None and effect.key == event.key:
        effect.adopted += (seq,)
    _step_over(ledger, seq, event)


def _step_over(ledger: Ledger, seq: int, event: e.StepEnded | e.StepAdopted) -> None:
    ledger.facts.intentions.pop(event.step, None)
    ledger.facts.begins.pop(event.step, None)
    if (name := ledger.facts.tells.pop(event.step, None)) is not None:
        ledger.called(name, -1)


def _step_overridden(ledger: Ledger, seq: int, event: e.StepOverridden) -> None:
    """Applies a person's result; for a compensating step it means that the effect is undone."""
    ledger.facts.begins.pop(event.step, None)
    intention = ledger.facts.intentions.pop(event.step, None)
    if intention is not None and intention.undoes:
        undone = ledger.started_at(intention.undoes)
        if undone is not None:
            ledger.turn(undone, "undone")


def _message_sent(ledger: Ledger, seq: int, event: e.MessageSent) -> None:
    """Counts a sent message as a completed effect."""
    ledger.facts.tells.pop(event.step, None)
    intention = ledger.facts.intentions.pop(event.step, None)
    if intention is not None:
        effect = Effect(
            event.id, event.step, ledger.facts.generation, SENDING, intention.effect, intention.identity,
            intention.intended, seq, ended=seq, status="happened",
        )  # fmt: skip
        ledger.effects.append(effect)


def _child_spawned(ledger: Ledger, seq: int, event: e.ChildSpawned) -> None:
    name = ledger.facts.tells.pop(event.step, None)
    if name is not None and any(child.run == event.run for child in ledger.children):
        ledger.called(name, -1)  # the child existed before
    child = Child(event.run, event.agent, event.step, seq, event.on_parent_end)
    ledger.facts.children_open[event.run] = ledger.children.append(child)


def _child_ended(ledger: Ledger, seq: int, event: e.ChildEnded) -> None:
    index = ledger.facts.children_open.pop(event.run, None)
    if index is not None:
        ledger.children.changing(index).status = event.status


_HANDLERS: Final[dict[type[e.Event], Callable[[Ledger, int, Any], None]]] = {
    e.RunForked: _run_forked,
    e.ForkMade: _fork_made,
    e.RunTaken: _run_taken,
    e.RunRewound: _run_rewound,
    e.RunRenewed: _permits_returned,
    e.RunCompleted: _permits_returned,
    e.RunFailed: _permits_returned,
    e.RunCancelled: _permits_returned,
    e.RunRepaired: _run_repaired,
    e.StepIntended: _step_intended,
    e.StepStarted: _step_started,
    e.StepEdited: _step_edited,
    e.AttemptStarted: _attempt_started,
    e.AttemptEnded: _attempt_ended,
    e.AttemptSettled: _attempt_settled,
    e.StepAdopted: _step_adopted,
    e.StepEnded: _step_over,
    e.StepOverridden: _step_overridden,
    e.MessageSent: _message_sent,
    e.ChildSpawned: _child_spawned,
    e.ChildEnded: _child_ended,
    e.WorkspaceBound: _workspace_bound,
    e.WorkspaceCaptured: _workspace_captured,
    e.WorkspaceRestored: _workspace_restored,
}
