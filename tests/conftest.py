"""What every test may ask for."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import again
import killick
from killick.definitions.agents import AGENTS
from killick.definitions.tools import TOOLS
from killick.log import Log
from killick.store import MemoryStore, SqliteStore, Store
from seeds import FIXED, repeats
from world import World

# Before a test imports it, so that its failed assertions show their values.
pytest.register_assert_rewrite("store_contract")

# Processes that tests start read the package from bytecode, and write it the first time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What Killick keeps for a user outside a store is not shared with other tests, nor with the person who runs them.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="killick-state-")

# A slow example is no failure: neither `deadline` nor `too_slow` may decide what a busy machine is told.
# Adapters are tested in environments that have no Hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    for profile, derandomize in (("gate", True), ("soak", False)):
        settings.register_profile(
            profile,
            max_examples=repeats(30, 100),
            deadline=None,
            derandomize=derandomize,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile("gate" if FIXED else "soak")


def pytest_configure(config: pytest.Config) -> None:
    again.register(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file unread whose tests are all slow or far, if none of them is to run."""
    if config.option.markexpr != "not slow and not far" or collection_path.suffix != ".py":
        return None
    text = collection_path.read_bytes()
    return any(b"\npytestmark = pytest.mark.%b\n" % mark in text for mark in (b"slow", b"far")) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that `gate` leaves out: it names by their ids, or counts, those that run in the gate."""
    cases: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        is_left_out = "slow" in item.keywords or "far" in item.keywords
        has_cases = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if has_cases and item.get_closest_marker("gate") and not is_left_out:
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, each in cases.items():
        chosen = each[0].get_closest_marker("gate").args  # type: ignore[union-attr]
        ids = [item.callspec.id for item in each]
        # Not the first ones: parameters that vary slowest would have one value in the gate.
        few = random.Random(name).sample(ids, min(chosen[0], len(ids))) if isinstance(chosen[0], int) else chosen
        for item in each:
            if item.callspec.id not in few:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not walk through it after every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store of each kind that comes with Killick."""
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "killick.db")
    yield made
    made.close()


@pytest.fixture
def log(store: Store) -> Iterator[Log]:
    """A log that makes snapshots often, so that short stories cross many."""
    made = Log(store, snapshot_every=16)
    yield made
    made.close()


@pytest.fixture
def clock() -> killick.clock.LeapingClock:
    return killick.clock.LeapingClock()


@pytest.fixture
def make_world() -> Iterator[Callable[[killick.clock.ManualClock], World]]:
    """Makes worlds in memory, by a clock of the test's own."""
    made: list[World] = []

    def make(clock: killick.clock.ManualClock) -> World:
        made.append(World(MemoryStore(clock=clock), clock))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def world(clock: killick.clock.LeapingClock) -> Iterator[World]:
    """In memory, where days pass in no time."""
    made = World(MemoryStore(clock=clock), clock)
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[World]:
    """On a disk, by the machine's own clock."""
    made = World(SqliteStore(tmp_path / "killick.db"), killick.clock.SystemClock())
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that an agent works in."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "kept").write_text("kept")
    return made


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


@pytest.fixture(autouse=True)
def _declared_here(request: pytest.FixtureRequest) -> None:
    """Agents and tools are found by name, and the last one declared counts: a test's own come last."""
    for value in _declarations(request.module):
        if isinstance(value, killick.Agent):
            AGENTS.add(value)
        else:
            TOOLS[value.name] = value


@functools.cache
def _declarations(module: ModuleType) -> list[killick.Agent[..., Any] | killick.Tool[..., Any]]:
    """The agents and tools of a module of tests, after those of the simulations that it shares."""
    shared = [each for name, each in sys.modules.items() if name.startswith("simulation.")]
    modules = [*(shared if "simulation" in module.__name__ else ()), module]
    return [
        value for each in modules for value in vars(each).values() if isinstance(value, (killick.Agent, killick.Tool))
    ]


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Iterator[Any]:
    """A failing test's report may hold half an emoji, which the channel between test processes cannot carry."""
    report = yield
    is_quiet = report is None or (report.get("outcome") == "passed" and not report.get("sections"))
    return report if is_quiet else _encodable(report)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value
    return value
