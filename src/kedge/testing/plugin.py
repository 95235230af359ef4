"""Fixtures for people who test their agents with pytest. Costs nothing before one of them is used.

Agents and tools that a test declares are forgotten when it ends; those of modules that it imports stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kedge.clock import LeapingClock
    from kedge.runtime.client import Client
    from kedge.testing.playing import BlockingPlay


@pytest.fixture
def kedge_clock() -> LeapingClock:
    """A clock that stands still until the test moves it, or until `kd.run` would sleep."""
    from kedge.clock import LeapingClock

    return LeapingClock()


@pytest.fixture
def kedge_client(kedge_clock: LeapingClock) -> Generator[Client]:
    """A client with a store in memory, by `kedge_clock`; closed when the test ends."""
    from kedge.ids import SeededIds
    from kedge.runtime.client import Client
    from kedge.store.memory import MemoryStore

    with Client(MemoryStore(clock=kedge_clock, ids=SeededIds(7)), clock=kedge_clock, ids=SeededIds(8)) as client:
        yield client


@pytest.fixture
def kedge_play() -> Generator[Callable[..., BlockingPlay[Any]]]:
    """`kedge_play(agent, input, fakes=…)` is what `with play(…) as t` gives, without the block."""
    from kedge.testing.playing import play

    with ExitStack() as plays:
        yield lambda *args, **options: plays.enter_context(play(*args, **options))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Forget what a test declared. Whatever the test imported was declared there, not in the test."""
    before = _declared()
    try:
        return (yield)
    finally:
        _forget(before)


def _declared() -> tuple[Any, dict[str, Any]]:
    registry = sys.modules.get("kedge.runtime.registry")
    return (({}, {}), {}) if registry is None else (registry.AGENTS.copy(), dict(registry.TOOLS))


def _forget(before: tuple[Any, dict[str, Any]]) -> None:
    registry = sys.modules.get("kedge.runtime.registry")
    if registry is None:
        return
    (agents_before, aliases_before), tools_before = before
    agents, aliases = registry.AGENTS.copy()
    kept = _kept(agents, agents_before)
    stay = {alias: name for alias, name in aliases.items() if kept.get(name) is agents.get(name)}
    registry.AGENTS.restore((kept, aliases_before | stay))
    tools = _kept(registry.TOOLS, tools_before)
    registry.TOOLS.clear()
    registry.TOOLS.update(tools)


def _kept(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What is declared at the top of a module, and what was declared before."""
    return before | {name: each for name, each in now.items() if "<locals>" not in each.fn.__qualname__}
