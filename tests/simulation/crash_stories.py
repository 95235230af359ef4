"""Scenarios of agents whose tools act on a counting world, and how their stories differ from the uninterrupted one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from killick.check import crashes
from killick.check.crashes import Story, current_process, simulate


class World(crashes.World):
    """Counts effects and visits by name, and remembers the results of effects."""

    def __init__(self) -> None:
        super().__init__()
        self.visits: Counter[str] = Counter()
        self.results: dict[str, Any] = {}
        self._keys: dict[str, Any] = {}

    def do(self, effect: str, result: Any = None, *, key: str | None = None) -> Any:
        """Performs an effect. With a key it is idempotent: a repetition returns the same result."""

        def act() -> Any:
            if key is not None and key in self._keys:
                return self._keys[key]
            self.effects[effect] += 1
            self.results[effect] = result
            if key is not None:
                self._keys[key] = result
            return result

        return current_process().write(effect, act)

    def visit(self, place: str) -> int:
        """Counts visits, this one included. Not an effect."""

        def act() -> int:
            self.visits[place] += 1
            return self.visits[place]

        return current_process().write(place, act)

    def happened(self, effect: str) -> bool:
        return bool(self.effects[effect])


@dataclass(frozen=True, kw_only=True)
class Scenario(crashes.Scenario):
    world: Callable[[], crashes.World] = World
    exact: bool = True
    """False if chance or a race decides states and effects; duplicates are still forbidden."""


def tick() -> None:
    """A crash point in agent code, between steps. Outside a simulation it does nothing."""
    with suppress(LookupError):
        current_process().point("agent code")


def world() -> World:
    """The world of the current simulation."""
    return cast("World", current_process().world)


def killed_everywhere(scenario: crashes.Scenario, *, seed: int = 7) -> Iterator[Story]:
    """Yields the story of every crash point in turn."""
    kill_at = 1
    while (story := simulate(scenario, kill_at, seed=seed)).places:
        yield story
        kill_at += 1


def differences(undisturbed: Story, story: Story, *, exact: bool = True) -> list[str]:
    """Returns how a story's end differs from the uninterrupted one; empty if equal."""
    found = list(story.troubles)
    if not story.status:
        return found
    for name in ("status", "outcome"):
        told, expected = getattr(story, name), getattr(undisturbed, name)
        if told != expected:
            found.append(f"{name} {told!r} instead of {expected!r}")
    happened, expected = story.world.effects, undisturbed.world.effects
    found += [f"{effect} once too often" for effect in (happened - expected).elements()]
    if exact:
        found += [f"{effect} once too little" for effect in (expected - happened).elements()]
        for run in sorted(undisturbed.states.keys() | story.states.keys()):
            found += _parts_differing(run, story.states.get(run, {}), undisturbed.states.get(run, {}))
    return found


def _parts_differing(run: str, told: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    for part in sorted(expected.keys() | told.keys()):
        if told.get(part) != expected.get(part):
            yield f"{run}: {part} {told.get(part)!r} instead of {expected.get(part)!r}"
