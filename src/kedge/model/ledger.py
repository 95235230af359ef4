"""Folds every event of a log, also those that were rewound, into what the world has seen of it.

Effects, consumed rights, spend and children stay on the ledger whatever happens to the timeline.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

import msgspec

from kedge.model import events as e
from kedge.model.values import Blob, Fetch
from kedge.model.vector import Saved, Vector

EffectStatus = Literal["open", "happened", "did_not_happen", "in_doubt", "undone"]

SENDING: Final = "kedge.send"
"""The name under which a message to another run is on the ledger."""


class Effect(msgspec.Struct, array_like=True, gc=False):
    """One action on the world, by its key: what it was, and whether it happened."""

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
    adopted_at: int = 0
    undoes: int = 0
    claims: tuple[str, ...] = ()


class Consumed(msgspec.Struct, array_like=True, gc=False):
    """A right that was used up, as `space:digest`, unless it was given back."""

    claim: str
    seq: int
    released: bool = False


class Child(msgspec.Struct, array_like=True, gc=False):
    """A run that this one started."""

    run: str
    agent: str
    step: e.StepId
    spawned: int
    on_parent_end: Literal["cancel", "abandon", "wait"]
    status: str = "running"


class Spend(msgspec.Struct, omit_defaults=True):
    """What was used, over every attempt ever made."""

    attempts: int = 0
    model_calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int = 0
    cost_micros: int = 0


class _Intention(msgspec.Struct, array_like=True, frozen=True):
    tool: str
    effect: e.EffectClass
    identity: e.Digest | None
    intended: int
    undoes: int


class LedgerFacts(msgspec.Struct, omit_defaults=True):
    """The scalar part of a ledger, and what is open."""

    seq: int = 0
    generation: int = 0
    spend: Spend = msgspec.field(default_factory=Spend)
    intentions: dict[e.StepId, _Intention] = {}
    open: dict[str, int] = {}
    keys: dict[e.StepId, str] = {}
    children_open: dict[str, int] = {}
    claims_open: dict[str, int] = {}
    forks: tuple[str, ...] = ()


class _Root(msgspec.Struct):
    facts: LedgerFacts
    effects: Saved
    consumed: Saved
    children: Saved


class Ledger:
    """Everything a run did to the world. Grows by `apply`, and never shrinks."""

    __slots__ = ("children", "consumed", "effects", "facts")

    def __init__(self, saved: _Root | None = None, fetch: Fetch | None = None) -> None:
        self.facts = saved.facts if saved else LedgerFacts()
        self.effects: Vector[Effect] = Vector(Effect, saved.effects if saved else None, fetch)
        self.consumed: Vector[Consumed] = Vector(Consumed, saved.consumed if saved else None, fetch)
        self.children: Vector[Child] = Vector(Child, saved.children if saved else None, fetch)

    def apply(self, seq: int, event: e.Event) -> None:
        """Take in the next event of the log."""
        self.facts.seq = seq
        handler = _HANDLERS.get(type(event))
        if handler is not None:
            handler(self, seq, event)

    @property
    def spend(self) -> Spend:
        return self.facts.spend

    def claims(self) -> dict[str, int]:
        """The rights this run has consumed and not given back, as `space:digest`, with the seqs that took them."""
        return {consumed.claim: consumed.seq for consumed in self.consumed if not consumed.released}

    def in_doubt(self) -> list[Effect]:
        """Effects that were started and whose outcome is not known, oldest first."""
        indexes = sorted(set(self.facts.open.values()))
        return [self.effects[index] for index in indexes if self.effects[index].status in ("open", "in_doubt")]

    def save(self, pieces: list[Blob]) -> bytes:
        """As `State.save`."""
        vectors = [vector.save(pieces) for vector in (self.effects, self.consumed, self.children)]
        return msgspec.json.encode(_Root(self.facts, *vectors))

    @classmethod
    def load(cls, root: bytes | msgspec.Raw, fetch: Fetch) -> Ledger:
        """As `State.load`."""
        return cls(msgspec.json.decode(root, type=_Root), fetch)

    def changing(self, key: str | None) -> Effect | None:
        index = self.facts.open.get(key or "")
        if index is None:
            return None
        return self.effects.changing(index)

    def close(self, effect: Effect, status: EffectStatus, seq: int) -> None:
        effect.status, effect.ended = status, seq
        facts = self.facts
        facts.open.pop(effect.key, None)
        # A step of the current timeline may have the number of one that was left.
        if facts.keys.get(effect.step) == effect.key:
            del facts.keys[effect.step]
        intention = facts.intentions.get(effect.step)
        if intention is not None and intention.intended == effect.intended:
            del facts.intentions[effect.step]
        for claim in effect.claims:
            self.facts.claims_open.pop(claim, None)
        if status == "happened" and effect.undoes:
            undone = self.started_at(effect.undoes)
            if undone is not None:
                undone.status = "undone"

    def started_at(self, seq: int) -> Effect | None:
        """The effect whose first attempt started at a seq, about to change."""
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
    ledger.facts.generation = event.generation
    ledger.facts.intentions.clear()
    ledger.facts.forks = ()


def _fork_made(ledger: Ledger, seq: int, event: e.ForkMade) -> None:
    if event.run not in ledger.facts.forks:
        ledger.facts.forks += (event.run,)


def _run_rewound(ledger: Ledger, seq: int, event: e.RunRewound) -> None:
    ledger.facts.generation = event.generation
    ledger.facts.intentions.clear()


def _run_taken(ledger: Ledger, seq: int, event: e.RunTaken) -> None:
    """The holder before is gone. A transaction that it left open never happened, for its outcome would be on record."""
    for index in ledger.facts.open.values():
        effect = ledger.effects[index]
        if effect.effect == "transaction" and effect.status == "open":
            effect = ledger.effects.changing(index)
            effect.status, effect.ended = "did_not_happen", seq


def _run_repaired(ledger: Ledger, seq: int, event: e.RunRepaired) -> None:
    for doubt in event.doubts:
        if doubt.key not in ledger.facts.open:
            effect = Effect(
                doubt.key,
                doubt.step,
                ledger.facts.generation,
                doubt.tool,
                "at_most_once",
                None,
                seq,
                seq,
                doubt.attempt,
            )
            ledger.facts.open[doubt.key] = ledger.effects.append(effect)
            ledger.facts.keys[doubt.step] = doubt.key
        changed = ledger.changing(doubt.key)
        if changed is not None:
            changed.status = "in_doubt"


def _step_intended(ledger: Ledger, seq: int, event: e.StepIntended) -> None:
    if event.effect is None and event.sort == "tool":
        ledger.facts.intentions[event.step] = _Intention(SENDING, "idempotent", event.digest, seq, 0)
    elif event.effect is not None and event.effect != "reads":
        identity = event.identity or event.digest
        intention = _Intention(event.name, event.effect, identity, seq, event.undoes_seq)
        ledger.facts.intentions[event.step] = intention


def _attempt_started(ledger: Ledger, seq: int, event: e.AttemptStarted) -> None:
    facts = ledger.facts
    facts.spend.attempts += 1
    for claim in event.claims:
        facts.claims_open[claim] = ledger.consumed.append(Consumed(claim, seq))
    effect = ledger.changing(event.key)
    if effect is not None:
        effect.attempts, effect.status, effect.claims = event.attempt, "open", event.claims or effect.claims
        if effect.generation != facts.generation:
            effect.adopted_at = seq
        return
    intention = facts.intentions.get(event.step)
    if intention is not None:
        effect = Effect(
            event.key, event.step, facts.generation, intention.tool, intention.effect, intention.identity,
            intention.intended, seq, event.attempt, undoes=intention.undoes, claims=event.claims,
        )  # fmt: skip
        facts.open[event.key] = ledger.effects.append(effect)
        facts.keys[event.step] = event.key


def _attempt_ended(ledger: Ledger, seq: int, event: e.AttemptEnded) -> None:
    facts = ledger.facts
    if event.usage is not None:
        facts.spend.model_calls += 1
        facts.spend.tokens_in += event.usage.tokens_in
        facts.spend.tokens_out += event.usage.tokens_out
        facts.spend.tokens_cached += event.usage.tokens_cached
        facts.spend.cost_micros += event.usage.cost_micros
    ledger.release(event.released)
    effect = ledger.changing(event.key or facts.keys.get(event.step))
    if effect is None:
        return
    if event.outcome == "returned":
        ledger.close(effect, "happened", seq)
    elif event.outcome == "refused" and event.retry_at is None:
        ledger.close(effect, "did_not_happen", seq)
    else:
        effect.status, effect.ended = "in_doubt" if event.outcome == "unknown" else "did_not_happen", seq


def _attempt_settled(ledger: Ledger, seq: int, event: e.AttemptSettled) -> None:
    ledger.release(event.released)
    effect = ledger.changing(event.key)
    if effect is not None and event.settlement == "happened":
        ledger.close(effect, "happened", seq)
    elif effect is not None and event.settlement == "did_not_happen":
        # It may be tried again under the same key, so it stays within reach.
        effect.status, effect.ended = "did_not_happen", seq


def _step_adopted(ledger: Ledger, seq: int, event: e.StepAdopted) -> None:
    for claim in event.claims:
        ledger.facts.claims_open[claim] = ledger.consumed.append(Consumed(claim, seq))
    effect = ledger.started_at(event.seq)
    if effect is not None and effect.key == event.key:
        effect.adopted_at = seq
    ledger.facts.intentions.pop(event.step, None)


def _step_over(ledger: Ledger, seq: int, event: e.StepEnded) -> None:
    ledger.facts.intentions.pop(event.step, None)


def _step_overridden(ledger: Ledger, seq: int, event: e.StepOverridden) -> None:
    """Somebody says what a step came to; of one that undoes, that it is undone."""
    intention = ledger.facts.intentions.pop(event.step, None)
    if intention is not None and intention.undoes:
        undone = ledger.started_at(intention.undoes)
        if undone is not None:
            undone.status = "undone"


def _message_sent(ledger: Ledger, seq: int, event: e.MessageSent) -> None:
    """What other runs were told is done, as any effect is."""
    intention = ledger.facts.intentions.pop(event.step, None)
    if intention is not None:
        effect = Effect(
            event.id, event.step, ledger.facts.generation, SENDING, intention.effect, intention.identity,
            intention.intended, seq, ended=seq, status="happened",
        )  # fmt: skip
        ledger.effects.append(effect)


def _child_spawned(ledger: Ledger, seq: int, event: e.ChildSpawned) -> None:
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
    e.RunRepaired: _run_repaired,
    e.StepIntended: _step_intended,
    e.AttemptStarted: _attempt_started,
    e.AttemptEnded: _attempt_ended,
    e.AttemptSettled: _attempt_settled,
    e.StepAdopted: _step_adopted,
    e.StepEnded: _step_over,
    e.StepOverridden: _step_overridden,
    e.MessageSent: _message_sent,
    e.ChildSpawned: _child_spawned,
    e.ChildEnded: _child_ended,
}


def fold_ledger(log: Iterable[tuple[int, e.Event]], ledger: Ledger | None = None) -> Ledger:
    """The ledger that a whole log adds up to."""
    ledger = ledger or Ledger()
    for seq, event in log:
        ledger.apply(seq, event)
    return ledger
