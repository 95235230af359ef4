"""An agent that waits for people, and the people: for tests of what they say. Every turn may be another process."""

from __future__ import annotations

from typing import Any

import pytest

import killick
from killick.model import events as e
from processes import Told, told
from world import World

PEOPLE = {"managers": ["mia", "max", "moe"], "directors": ["dan", "dora"]}


class Desk:
    """Where one run's questions are answered."""

    def __init__(self, world: World, *, cold: bool, **options: Any) -> None:
        self.world = world
        self.cold = cold
        self.options = options
        self.kd = world.process(**options)

    def go(self, agent: Any, value: Any = None, *, run: str = "r") -> Any:
        """What the agent returns; None where it waits for somebody."""
        if self.cold:
            self.kd = self.world.process(**self.options)
        try:
            return self.kd.run(agent, value, id=run)
        except killick.RunWaiting:
            return None

    def asked(self, agent: Any, value: Any = None, *, run: str = "r") -> killick.Wait:
        """The one question that the agent comes to."""
        came_to = self.go(agent, value, run=run)
        waits = [wait for wait in self.kd.inbox() if wait.run == run]
        assert len(waits) == 1, (came_to, waits)
        return waits[0]

    def say(self, verb: Any, *, by: str | None, value: Any = None, wait: str = "r", comment: str | None = None) -> None:
        self.kd.answer(wait, verb, value=value, by=by, comment=comment)

    def refused(self, error: type[Exception], verb: Any, *, by: str | None, value: Any = None, wait: str = "r") -> str:
        """Why an answer is not taken."""
        with pytest.raises(error) as refused:
            self.say(verb, by=by, value=value, wait=wait)
        return str(refused.value)

    def told(self, kind: type[e.Event], *, run: str = "r") -> list[Told]:
        return told(self.kd, run, kind)

    def holds(self, agent: Any, *runs: str) -> None:
        """The record holds, replays to the same result, is the same when loaded elsewhere, and was judged rightly."""
        for run in runs or ("r",):
            assert not self.kd.store.verify(run).problems
            replayed = self.kd.replay(run, agent, check=True)
            assert replayed.result == self.kd.state(run).result
            assert not self.kd.rejudge(run).changes
