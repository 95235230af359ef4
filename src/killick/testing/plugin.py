"""pytest fixtures for testing agents. Imports nothing before one of them is used.

Agents and tools declared in a test are unregistered when it ends; those of imported modules stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

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
    before = _declared()
    try:
        return (yield)
    finally:
        _forget(before)


class _Declared(NamedTuple):
    """The registries: agents and their aliases, tools, hooks, triggers."""

    agents: tuple[dict[str, Any], dict[str, Any]]
    tools: dict[str, Any]
    hooks: dict[str, Any]
    triggers: dict[str, Any]


def _declared() -> _Declared:
    """Returns the current registries. A registry whose module is not imported yet is empty."""
    agents, tools, hooks, triggers = _registries()
    return _Declared(
        agents.AGENTS.copy() if agents else ({}, {}),
        dict(tools.TOOLS) if tools else {},
        dict(hooks.HOOKS) if hooks else {},
        triggers.TRIGGERS.copy() if triggers else {},
    )


REGISTRIES = ("definitions.agents", "definitions.tools", "workers.hooks", "triggers")


def _registries() -> list[Any]:
    return [sys.modules.get(f"killick.{name}") for name in REGISTRIES]


def _forget(before: _Declared) -> None:
    agents, tools, hooks, triggers = _registries()
    (agents_before, aliases_before), tools_before, hooks_before, triggers_before = before
    if agents:
        declared, aliases = agents.AGENTS.copy()
        kept = _kept(declared, agents_before)
        stay = {alias: name for alias, name in aliases.items() if kept.get(name) is declared.get(name)}
        agents.AGENTS.restore((kept, aliases_before | stay))
    if tools:
        _restore(tools.TOOLS, tools_before)
    if hooks:
        _restore(hooks.HOOKS, hooks_before)
    if triggers:
        triggers.TRIGGERS.restore(_kept(triggers.TRIGGERS.copy(), triggers_before))


def _restore(declared: dict[str, Any], before: dict[str, Any]) -> None:
    kept = _kept(declared, before)
    declared.clear()
    declared.update(kept)


def _kept(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Returns module-level declarations, and earlier ones."""
    return before | {name: each for name, each in now.items() if not _is_local(each)}


def _is_local(declared: Any) -> bool:
    """Returns whether a declaration is inside a function, or, for a trigger, for such an agent."""
    fn = getattr(declared, "fn", None) or declared.agent.fn
    return "<locals>" in getattr(fn, "__qualname__", "")
