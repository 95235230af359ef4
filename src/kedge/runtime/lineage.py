"""What the runs of a lineage did to the world, as one of them sees it: a run, its forks, theirs, and what each left.

An effect belongs to the run in whose own log it started. A timeline stands on those that its steps started or adopted;
any other one that happened may be adopted, once by each timeline. Decides nothing.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

from kedge.errors import KedgeError
from kedge.model import events as e
from kedge.model import ledger
from kedge.store.base import Claim, Head

if TYPE_CHECKING:
    from kedge.runtime.execution import Branch, Execution

ACTION: Final = "kedge.action"
"""The space of the rights to act once more in a lineage; no argument that is consumed can have that name."""

_KNOWN_SECONDS: Final = 0.05


class Done(NamedTuple):
    """An effect, and the run in whose own log it started."""

    run: str
    effect: ledger.Effect

    @property
    def place(self) -> tuple[str, int]:
        return self.run, self.effect.started


class Member(NamedTuple):
    """A run of the lineage as far as it was looked at."""

    head: Head
    effects: list[Done]
    children: list[ledger.Child]
    forks: tuple[str, ...]
    undone: frozenset[tuple[str, int]]


class Lineage:
    """The lineage of a run that is in memory."""

    def __init__(self, ex: Execution) -> None:
        self._ex = ex
        self._log = ex.engine.log
        self._members: dict[str, Member] = {}
        self._heads: dict[str, Head] = {}
        self.own = self._head(ex.run_id)
        fold = ex.log.fold
        self._standing = {self._owned(ex.run_id, attempt.started) for step in fold.steps for attempt in step.attempts}
        self._standing |= {self._owned(ex.run_id, step.output) for step in fold.steps if step.output}
        self._standing |= {self._owned(run, seq) for run, seq in fold.facts.adopted}
        own = [done for done in self._own(self.own) if self._is_stood_on(done)]
        self._keys = {done.effect.key for done in own}
        self._left = [done for done in self._own(self.own) if done.effect.key not in self._keys]
        """What the run itself did and has left. That grows no more while it is in memory: what it does now stands."""
        standing = [
            child for child in ex.log.ledger.children if self._owned(ex.run_id, child.spawned) in self._standing
        ]
        self._children = {child.run for child in standing}
        self._is_known = False

    def _is_stood_on(self, done: Done) -> bool:
        adopted = done.effect.adopted_at
        return done.place in self._standing or (adopted > 0 and (done.run, adopted) in self._standing)

    def stands_on(self, done: Done) -> None:
        """A step of this timeline has adopted it, or goes on under its key."""
        self._standing.add(done.place)

    def leaves(self, done: Done) -> None:
        """It did not happen, so nothing stands on it; at another attempt it may."""
        self._standing.discard(done.place)

    def left(self, tool: str) -> list[Done]:
        """Effects of a tool that happened, or may have, and that this timeline does not stand on, oldest first."""
        undone = self._look()
        ruled_out = self._ex.record.ruled_out
        return [
            done
            for member in self._members.values()
            for done in (member.effects if member.head.run != self._ex.run_id else self._left)
            if done.effect.tool == tool
            and not done.effect.undoes
            and done.effect.status in ("open", "happened", "in_doubt")
            and done.effect.key not in self._keys
            and done.place not in self._standing
            and done.place not in undone
            and done.effect.attempts > ruled_out.get(done.effect.key, 0)
        ]

    def children(self, agent: str) -> list[tuple[str, ledger.Child]]:
        """Runs of an agent that were spawned in the lineage and that this timeline does not have, with who did."""
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

    def slot(self, tool: str, identity: e.Digest) -> Claim | None:
        """The right to do an action once more, which exists once in a lineage; None where there is no other run.

        It is that of the last look: whoever acted since has it.
        """
        if not self.is_shared:
            return None
        root = next(iter(self._members))
        number = sum(
            done.effect.attempts * (done.effect.tool == tool and done.effect.identity == identity)
            for member in self._members.values()
            for done in (member.effects if member.head.run != self._ex.run_id else self._own(member.head))
        )
        while True:
            claim = Claim(ACTION, sha256("\0".join((root, tool, str(identity), str(number))).encode()).digest())
            owner = self._log.store.owner(claim)
            if owner is None or self._log.store.head(owner.run) is not None:
                return claim  # whoever has it is seen at the next look
            number += 1

    @property
    def is_shared(self) -> bool:
        """Whether there are other runs, by the last look."""
        return len(self._members) > 1

    def is_at_work(self, run: str) -> bool:
        """Whether somebody is at a run now: what is open there may still come to an end."""
        store, head = self._log.store, self._log.store.head(run)
        if head is None or head.holder is None:
            return False
        if store.proves_life:
            return store.lives(head.holder)
        return head.lease_until_us is None or head.lease_until_us > store.now_us()

    async def known(self, branch: Branch) -> None:
        """A fork acts only when those that it was forked from know of it: from then on they look at what it did."""
        from kedge.runtime.commands import command

        if self._is_known:
            return
        ex, child = self._ex, self._head(self._ex.run_id)
        while child.parent is not None:
            parent, pause = child.parent, _KNOWN_SECONDS
            body = {"command": "forked", "fork": child.run, "cut": child.base}
            while not self._knows(parent, child.run):
                try:
                    if command(ex.engine, parent, body, by=None, id=f"forked:{child.run}"):
                        break
                except KedgeError:
                    break  # it is gone, or does not hold: it does nothing any more
                await asyncio.sleep(ex.engine.clock.nap_seconds(pause))
                ex.refuse(branch)
                pause = min(pause * 2, 1.0)
            child = self._head(parent)
        self._is_known = True

    def _knows(self, parent: str, fork: str) -> bool:
        try:
            return fork in self._log.ledger(parent).facts.forks
        except KedgeError:
            return True

    # looking ----------------------------------------------------------------------------------

    def _look(self) -> set[tuple[str, int]]:
        """Bring what is known of every member up to date; returns what any of them undid."""
        if self.own.parent is None and not self._ex.log.ledger.facts.forks:
            self._members = {self.own.run: Member(self.own, [], list(self._ex.log.ledger.children), (), frozenset())}
            return set()
        ancestors = [self._head(self._ex.run_id)]
        while (parent := ancestors[-1].parent) is not None:
            ancestors.append(self._head(parent))
        names = [head.run for head in reversed(ancestors)]
        members: dict[str, Member] = {}
        while names:
            run = names.pop(0)
            member = None if run in members else self._member(run)
            if member is not None:
                members[run] = member
                names += [fork for fork in member.forks if fork not in members]
        self._members = members
        return {place for member in members.values() for place in member.undone}

    def _member(self, run: str) -> Member | None:
        if run == self._ex.run_id:
            found = self._ex.log.ledger
            children = [child for child in found.children if child.spawned > self.own.base]
            return Member(self.own, [], children, found.facts.forks, self._undone(self._own(self.own)))
        head = self._log.store.head(run)
        if head is None:
            return None
        known = self._members.get(run)
        if known is not None and known.head.seq == head.seq:
            return known
        found = self._log.ledger(run)
        effects = [Done(run, effect) for effect in found.effects if effect.started > head.base]
        children = [child for child in found.children if child.spawned > head.base]
        return Member(head, effects, children, found.facts.forks, self._undone(effects))

    def _own(self, head: Head) -> list[Done]:
        return [Done(head.run, effect) for effect in self._ex.log.ledger.effects if effect.started > head.base]

    def _undone(self, effects: list[Done]) -> frozenset[tuple[str, int]]:
        own = {done.place for done in effects if done.effect.status == "undone"}
        others = {
            self._owned(done.run, done.effect.undoes)
            for done in effects
            if done.effect.undoes and done.effect.status == "happened"
        }
        return frozenset(own | others)

    def _head(self, run: str) -> Head:
        """A run's head, of which only what never changes is of interest here."""
        if run not in self._heads:
            self._heads[run] = self._log.head(run)
        return self._heads[run]

    def _owned(self, run: str, seq: int) -> tuple[str, int]:
        """Where an event of a run's log is: in its own part, or in that of a run that it was forked from."""
        head = self._head(run)
        while head.parent is not None and seq <= head.base:
            head = self._head(head.parent)
        return head.run, seq
