"""The effects of a run tree as one of its runs sees them: a run, its forks, their forks, and abandoned timelines.

An effect is identified by its key, in all runs. A timeline uses the keys that its steps started, continued or adopted.
Any other effect that happened may be adopted, once by each timeline. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from itertools import chain, pairwise
from typing import Final, NamedTuple

from killick.engine.control.inbox import COMMAND, FORKED
from killick.engine.replay import Record
from killick.errors import KillickError, RunUnknown, StoreError, TimeRefused
from killick.log.ancestry import ancestry
from killick.log.boundaries import at as place_at
from killick.log.log import Log
from killick.log.writer import RunLog
from killick.model import event_codec, facts, ledger
from killick.model import events as e
from killick.store.protocol import is_held
from killick.store.records import ENDED, Head, Owner, UniqueRight


def effect_to_undo(log: Log, run: str, step: e.StepId) -> ledger.Effect:
    """The effect that a step of the current timeline had or reused. TimeRefused if there is none to undo."""
    found = step_of(log, run, step)
    done = effects_of(log, run, [found]).get(step)
    refused = undo_refusal(run, found, done, None)
    if done is None or refused is not None:
        raise TimeRefused(run, f"step {step}: {refused}")
    return done.effect


def undo_refusal(run: str, step: facts.Step, done: RecordedEffect | None, begun: facts.Step | None) -> str | None:
    """Why there is nothing to undo, or not from here."""
    if step.sort == "undo":
        return f"it undoes step {step.undoes} itself"
    if done is None:
        what = "reads" if step.effect == "reads" else "never began" if step.effect else f"is a {step.sort}"
        return f"it did nothing to the world ({step.name} {what})"
    if done.effect.status == "undone":
        return f"it was undone already{f', by step {begun.id}' if begun is not None else ''}"
    if done.effect.status == "did_not_happen":
        return f"{step.name} did not happen"
    if done.effect.status in ("open", "in_doubt"):
        return f"whether {step.name} happened is not known; settle that first"
    if done.run != run:
        return f"it was done by {done.run}; undo it there"
    if begun is not None and begun.status == "in_doubt":
        return f"undoing it began, as step {begun.id}, and whether that happened is not known"
    return None


def effects_of(log: Log, run: str, steps: Iterable[facts.Step]) -> dict[e.StepId, RecordedEffect]:
    """The effects of steps, from the ledgers of their runs: their own effects, and reused ones."""
    books: dict[str, dict[int, ledger.Effect]] = {}
    found: dict[e.StepId, RecordedEffect] = {}
    for step in steps:
        owner, seq = run, step.attempts[0].started if step.attempts and step.effect not in (None, "reads") else 0
        adopted = log.event(run, step.output) if step.output and not step.attempts and step.sort == "tool" else None
        if isinstance(adopted, e.StepAdopted):
            owner, seq = adopted.run, adopted.seq
        owner = _owner(log, owner, seq) if seq else ""
        if owner and owner not in books:
            books[owner] = {effect.started: effect for effect in log.ledger(owner).effects}
        effect = books[owner].get(seq) if owner else None
        if effect is not None:
            found[step.id] = RecordedEffect(owner, effect)
    return found


def _owner(log: Log, run: str, seq: int) -> str:
    """The run of a run tree whose own log holds an event; "" where that is archived."""
    try:
        return log.owner(run, seq)
    except RunUnknown:
        return ""


def step_of(log: Log, run: str, step: e.StepId) -> facts.Step:
    place_at(log, run, f"{step}:after")  # which names the existing steps if there is no such step
    found = log.state(run).fold.step(step)
    if found is None:
        raise TimeRefused(run, f"step {step} was rewound; name a step of the current timeline")
    return found


class RecordedEffect(NamedTuple):
    """One run's record of an effect, with the records of other runs of the run tree under the same key."""

    run: str
    effect: ledger.Effect
    others: tuple[RecordedEffect, ...] = ()

    def is_of(self, run: str) -> bool:
        """Whether a run has it on record itself."""
        return self.run == run or any(each.run == run for each in self.others)


_KNOWN_MAX: Final = 1_000

ACTION: Final = "killick.action"
"""The name space of the rights to act once more in a run tree; no consumed argument can have that name."""


class Member(NamedTuple):
    """A run of the run tree, as of the last read."""

    head: Head
    effects: list[RecordedEffect]
    children: list[ledger.Child]
    forks: tuple[str, ...]
    undone: frozenset[str]


class RunTree:
    """The run tree of a run in memory."""

    def __init__(self, log: Log, run: RunLog, record: Record) -> None:
        self._log = log
        self._run = run
        self._record = record
        self._members: dict[str, Member] = {}
        self._heads: dict[str, Head] = {}
        self._numbers: dict[tuple[str, e.Digest], int] = {}
        # Not from the store: the run's first events may not be committed yet.
        self.own = Head(run=run.run, seq=run.seq, hash=run.hash, epoch=run.epoch, base=run.base, parent=run.parent)
        self._heads[run.run] = self.own
        fold, found = run.fold, run.ledger
        places = {attempt.started: step.id for step in fold.steps for attempt in step.attempts}
        places |= {step.output: step.id for step in fold.steps if step.output}
        self._used: dict[str, e.StepId] = dict.fromkeys(fold.facts.adopted, "")
        """The keys that this timeline uses, with their steps."""
        self._own: dict[str, int] = {}
        """Where on the run's ledger a key is."""
        self._left: list[int] = []
        """The run's own effects on abandoned timelines; constant while the run is in memory."""
        for index, effect in enumerate(found.effects):
            self._own[effect.key] = index
            step = next((places[seq] for seq in (effect.started, *effect.adopted) if seq in places), None)
            if step is not None:
                self._used[effect.key] = step
            elif effect.key not in self._used and self._is_own(self.own, effect):
                self._left.append(index)
        self._noted = len(found.effects)
        self._children = {child.run for child in found.children if child.spawned in places}
        self.is_announced = False
        """Whether all ancestors know of this fork."""

    def adopt(self, done: RecordedEffect, step: e.StepId) -> None:
        """Record that a step of this timeline adopted an effect, or continues under its key."""
        self._used[done.effect.key] = step

    def release(self, done: RecordedEffect) -> None:
        """Record that an effect did not happen: its key is free until another attempt."""
        self._used.pop(done.effect.key, None)

    def _is_used(self, key: str, step: e.StepId) -> bool:
        """Whether another step of this timeline uses a key. A failed step does not use the key of an effect that did
        not happen, even if another run used that key since."""
        by = self._used.get(key)
        if by is None or by == step:
            return False
        found, index = self._run.fold.step(by), self._own.get(key)
        if found is None or found.status not in ("failed", "cancelled"):
            return True
        return index is not None and self._run.ledger.effects[index].status != "did_not_happen"

    def adoptable(self, tool: str, step: e.StepId) -> list[RecordedEffect]:
        """Effects of a tool that happened, or may have, and that no other step of this timeline uses; one a key, oldest
        first."""
        undone = self._look()
        found: dict[str, list[RecordedEffect]] = {}
        for done in self._records():
            effect = done.effect
            if effect.tool == tool and not effect.undoes and effect.key not in undone and self._may_be(effect):
                found.setdefault(effect.key, []).append(done)
        return [_merged(records) for key, records in found.items() if not self._is_used(key, step)]

    def stood(self, tool: str, identity: e.Digest, step: e.StepId) -> RecordedEffect | None:
        """The first effect of an identity that happened and that another step of this timeline uses."""
        undone = self._look()
        own = (RecordedEffect(self._run.run, effect) for effect in self._run.ledger.effects)
        for done in chain(own, self._records()):
            effect = done.effect
            same = effect.tool == tool and effect.identity == identity and not effect.undoes
            if same and effect.status == "happened" and effect.key not in undone and self._is_used(effect.key, step):
                return done
        return None

    def _may_be(self, effect: ledger.Effect) -> bool:
        if effect.status in ("open", "in_doubt"):
            return effect.attempts > self._record.ruled_out.get(effect.key, 0)
        return effect.status == "happened"

    def _records(self) -> Iterator[RecordedEffect]:
        for member in self._members.values():
            if member.head.run == self._run.run:
                yield from (RecordedEffect(self._run.run, self._run.ledger.effects[index]) for index in self._left)
            else:
                yield from member.effects

    def children(self, agent: str) -> list[tuple[str, ledger.Child]]:
        """Runs of an agent that were spawned in the run tree outside of this timeline, with their parents."""
        self._look()
        found = {
            child.run: (member.head.run, child)
            for member in reversed(self._members.values())
            for child in reversed(member.children)
            if child.agent == agent and child.run not in self._children
        }
        return list(found.values())[::-1]

    def has_child(self, run: str) -> None:
        """This timeline has it from now on."""
        self._children.add(run)

    def slot(self, tool: str, identity: e.Digest) -> UniqueRight | None:
        """The right to do an action once more, unique in a run tree; None where there is no other run.

        It is the first right that was free at the last read.
        """
        if not self.is_shared:
            return None
        root, number = next(iter(self._members)), self._numbers.get((tool, identity), 0)
        while True:
            claim = UniqueRight(ACTION, sha256("\0".join((root, tool, str(identity), str(number))).encode()).digest())
            owner = self._log.store.owned(claim.space, claim.key).get(claim)
            if owner is None or not self._is_seen(owner):
                self._numbers[tool, identity] = number
                return claim
            number += 1

    def _is_seen(self, owner: Owner) -> bool:
        if owner.run == self._run.run:
            return True
        member = self._members.get(owner.run)
        if member is None:
            return self._log.store.head(owner.run) is None
        return owner.seq <= member.head.seq

    @property
    def is_shared(self) -> bool:
        """Whether there are other runs, by the last look."""
        return len(self._members) > 1

    def is_at_work(self, done: RecordedEffect) -> str | None:
        """Another run that a worker holds now and whose attempt at an effect is not over."""
        for each in (done, *done.others):
            head = self._log.store.head(each.run) if each.run != self._run.run else None
            if head is not None and each.effect.status in ("open", "in_doubt") and is_held(self._log.store, head):
                return each.run
        return None

    def ancestry(self) -> Iterator[tuple[str, Head]]:
        """The parents of this run up to the root, each with the head of the fork that descends from it."""
        heads = (head for head, _ in ancestry(self.own, self._head))
        return ((parent.run, fork) for fork, parent in pairwise(heads))

    # looking ----------------------------------------------------------------------------------

    def _look(self) -> set[str]:
        """Reads the new events of every member; returns the keys of effects that any of them undid."""
        own = self._run.ledger
        for index in range(self._noted, len(own.effects)):
            self._own[own.effects[index].key] = index
            self._used.setdefault(own.effects[index].key, own.effects[index].step)
        self._noted = len(own.effects)
        if self.own.parent is None and not own.facts.forks:
            self._members = {self.own.run: self._read(self.own, own)}
            return set(self._members[self.own.run].undone)
        names = [head.run for head, _ in ancestry(self.own, self._head)][::-1]
        members: dict[str, Member] = {}
        while names:
            run = names.pop(0)
            member = None if run in members else self._member(run)
            if member is not None:
                members[run] = member
                names += [fork for fork in member.forks if fork not in members]
        self._members = members
        return {key for member in members.values() for key in member.undone}

    def _member(self, run: str) -> Member | None:
        if run == self._run.run:
            return self._read(self.own, self._run.ledger)
        head = self._log.store.head(run)
        if head is None:
            return None
        known = self._members.get(run)
        if known is not None and known.head.seq == head.seq:
            return known
        return self._read(head, self._log.ledger(run))

    def _read(self, head: Head, found: ledger.Ledger) -> Member:
        is_other = head.run != self._run.run
        effects = [
            RecordedEffect(head.run, effect) for effect in found.effects if is_other and self._is_own(head, effect)
        ]
        children = [child for child in found.children if child.spawned > head.base]
        undone = frozenset(effect.key for effect in found.effects if effect.status == "undone")
        return Member(head, effects, children, found.facts.forks, undone)

    def _is_own(self, head: Head, effect: ledger.Effect) -> bool:
        """Whether a run's own log says something of an effect, also of one that began before it was forked."""
        return max(effect.started, effect.ended, *effect.adopted, 0) > head.base

    def _head(self, run: str) -> Head:
        """A run's head, used only for its constant fields."""
        if run not in self._heads:
            self._heads[run] = self._log.head(run)
        return self._heads[run]


class Forks:
    """The forks of runs. A log is read once, and then only its new events: many children may end."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[str, tuple[int, list[str]]] = {}

    def members(self, run: str) -> list[str]:
        """A run and the runs of its tree that are not over. One whose log is broken is no member. Raises StoreError: a
        member that is missed would wait for ever."""
        log, found = self._log, [run]
        try:
            names = [head.run for head, _ in ancestry(log.head(run), log.head)]
            for name in names:
                row = log.store.index(name)
                found += [name] if name != run and row is not None and row.status not in ENDED else []
                names += [fork for fork in [*self._of(name), *self._announced(name)] if fork not in names]
        except StoreError:
            raise
        except KillickError:
            pass
        return found

    def _announced(self, run: str) -> list[str]:
        """Forks that a run has not recorded: it is held elsewhere, or has ended. They have not acted yet."""
        commands = self._log.store.inbox(run, name=COMMAND)
        return [each.id.removeprefix(FORKED) for each in commands if each.id.startswith(FORKED)]

    def _of(self, run: str) -> list[str]:
        if len(self._known) > _KNOWN_MAX:
            self._known.clear()
        seq, forks = self._known.get(run, (None, list[str]()))
        if seq is None:
            facts = self._log.ledger(run).facts
            seq, forks = facts.seq, [*facts.forks]
        for row in self._log.rows(run, after=seq):
            seq, event = row.seq, event_codec.decode(row.body)
            forks += [event.run] if isinstance(event, e.ForkMade) else []
        self._known[run] = seq, forks
        return forks


def _merged(records: list[RecordedEffect]) -> RecordedEffect:
    """The status of one key from all its records: it happened if any of them says so."""
    first, *others = sorted(records, key=lambda done: done.effect.status != "happened")
    return first._replace(others=tuple(others))
