"""pytest fixtures for testing agents. Imports nothing before one of them is used.

Agents and tools declared in a test are unregistered when it ends; those of imported modules stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from killick.client.client import Client
    from killick.clock import LeapingClock
    from killick.testing.player import BlockingPlay


@pytest.fixture
def killick_clock() -> LeapingClock:
    """A clock that moves only by the test, or when `kd.run` would sleep."""
    from killick.clock import LeapingClock

    return LeapingClock()


@pytest.fixture
def killick_client(killick_clock: LeapingClock) -> Generator[Client]:
    """A client with an in-memory store and `killick_clock`; closed when the test ends."""
    from killick.client.client import Client
    from killick.ids import SeededIds
    from killick.store.memory import MemoryStore

    with Client(MemoryStore(clock=killick_clock, ids=SeededIds(7)), clock=killick_clock, ids=SeededIds(8)) as client:
        yield client


@pytest.fixture
def killick_play() -> Generator[Callable[..., BlockingPlay[Any]]]:
    """`killick_play(agent, input, fakes=…)` returns what `with play(…) as t` gives, without the block."""
    from killick.testing.player import play

    with ExitStack() as plays:
        yield lambda *args, **options: plays.enter_context(play(*args, **options))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Unregisters a test's declarations, except those of modules that it imported."""
    before = {name: registry.copy() for name, registry in _registries()}
    try:
        return (yield)
    finally:
        for name, registry in _registries():
            kept = _kept(registry, before.get(name, {}))
            registry.clear()
            registry.update(kept)


REGISTRIES = {
    "definitions.agents": "AGENTS.declared", "definitions.tools": "TOOLS", "workers.hooks": "HOOKS",
    "triggers": "TRIGGERS",
}  # fmt: skip


def _registries() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the registries of the modules that are imported already."""
    for module, name in REGISTRIES.items():
        if found := sys.modules.get(f"killick.{module}"):
            yield name, attrgetter(name)(found)


def _kept(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Returns module-level declarations, and earlier ones."""
    return before | {name: each for name, each in now.items() if not _is_local(each)}


def _is_local(declared: Any) -> bool:
    """Returns whether a declaration is inside a function, or, for a trigger, for such an agent."""
    fn = getattr(declared, "fn", None) or declared.agent.fn
    return "<locals>" in getattr(fn, "__qualname__", "")
