"""Everything at once, by chance: plans of any make, people who answer this and that, and others who take runs back,
fork them, undo what they did and change what they know, while the contract stays what it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import killick
from escape import law, tricks, world
from escape.families import kin
from escape.law import Tried
from escape.stage import Stage, go
from escape.world import Plan
from killick import rules

_AMOUNTS = (1, 100, 400, 500, 501, 700, 1000, 1001, 5000, -1)


def anything_at_all(stage: Stage) -> Tried:
    """A family of runs, and people around it."""
    world.declare(stage.grounds, rules.context("close", {"frozen": {"one_of": [False], "optional": True}}))
    return _Around(stage).told()


class _Around:
    """What happens around a run."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.chance = stage.chance
        self.approved: list[tuple[str, int]] = []
        self.forks: dict[str, str] = {}
        self.plan = _plan(stage.chance, stage, 2)
        if stage.chance.random() < 0.3:
            self.plan.append(["renew", _plan(stage.chance, stage, 1)])

    def told(self) -> Tried:
        with self.stage.client() as kd:
            go(kd, "schemer", self.plan, "r")
            for _ in range(8):
                runs = kin(kd, "r")
                act: Callable[[killick.Client, str], object] = self.chance.choice(
                    (self.answer, self.answer, self.answer, self.rewind, self.fork, self.undo, self.know)
                )
                with contextlib.suppress(killick.KillickError):
                    act(kd, self.chance.choice(runs))
                for run in kin(kd, "r"):
                    self.go_on(kd, run)
                law.lawful(self.stage.grounds, approved=self.approved, forks=self.forks)
            return law.on_record(kd, *kin(kd, "r"))

    def go_on(self, kd: killick.Client, run: str) -> None:
        """As far as it gets; days pass meanwhile."""
        clock: Any = kd.runtime.clock
        for _ in range(20):
            if kd.info(run).status in ("completed", "failed", "cancelled", "paused"):
                return
            advanced = kd.advance(run)
            if advanced.wake_at_us is None:
                return
            clock.advance(max(0.0, (advanced.wake_at_us - clock.now_us()) / 1_000_000))

    # people -------------------------------------------------------------------------------------

    def answer(self, kd: killick.Client, run: str) -> None:
        waits = [wait for wait in kd.inbox() if wait.intention is not None]
        if not waits:
            return
        wait = self.chance.choice(waits)
        asked: Any = wait.intention
        given = asked["arguments"]
        verb: Any = self.chance.choice(("approve", "approve", "edit", "reject", "happened", "not"))
        if verb not in wait.verbs:
            verb = self.chance.choice(wait.verbs)
        by = self.chance.choice(("mia", "max", "mallory"))
        value: Any = None
        if verb == "edit":
            value = {"amount": self.chance.choice(_AMOUNTS)}
        kd.answer(wait.id, verb, value=value if verb != "respond" else "no", by=by)
        if verb in ("approve", "edit") and by != "mallory" and "amount" in given:
            self.approved.append((given["to"], (value or given)["amount"]))

    def rewind(self, kd: killick.Client, run: str) -> None:
        kd.rewind(run, f"{self.chance.randint(1, 4)}:before", by="mia")

    def fork(self, kd: killick.Client, run: str) -> None:
        name = f"f{len(self.forks)}"
        place = self.chance.choice(("now", "1:after", "2:before", "3:before"))
        kd.fork(run, place, id=name, effects=self.chance.choice(("live", "recorded", "none")))
        self.forks[name] = self.forks.get(run, run)

    def undo(self, kd: killick.Client, run: str) -> None:
        kd.undo(run, str(self.chance.randint(1, 4)), by="mia")

    def know(self, kd: killick.Client, run: str) -> None:
        kd.edit.set(run, by="mia", frozen=self.chance.random() < 0.5)


def _plan(chance: Random, stage: Stage, depth: int) -> Plan:
    plan: Plan = [["call", "assess", {"claim": chance.choice(("17", "broken", "18"))}]] if chance.random() < 0.8 else []
    return plan + [_move(chance, stage, depth) for _ in range(chance.randint(2, 4))]


def _move(chance: Random, stage: Stage, depth: int) -> list[Any]:
    kind = chance.randrange(10)
    if depth and kind < 2:
        return ["together", *(_plan(chance, stage, depth - 1) for _ in range(2))]
    if depth and kind == 2:
        return ["spawn", chance.choice(("helper", "weak", "schemer")), _plan(chance, stage, depth - 1)]
    if kind == 3:
        return ["call", "close", {"account": chance.choice("ab")}]
    if kind == 4:
        return ["update", {"frozen": chance.random() < 0.5}]
    if kind == 5:
        path = chance.choice((tricks.honest_path(chance), str(tricks.bad_path(chance, stage.grounds))))
        return ["call", chance.choice(("read_file", "write_file")), {"path": path}]
    if kind == 6:
        return ["sleep", chance.randint(1, 9)]
    tool = chance.choice(("pay", "pay", "pay_strict", "pay_known"))
    how = "propose" if kind == 7 else "call"
    return [how, tool, {"to": chance.choice((*world.RECIPIENTS, "mallory")), "amount": chance.choice(_AMOUNTS)}]
