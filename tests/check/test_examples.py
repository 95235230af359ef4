"""`check` finds nothing in what we show people: the examples, and the demo's agent."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import killick
from killick.check.checker import check

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("killick")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


KNOWN = {
    # A sample model calls what the example's own script leads up to: tools that overwrite a file need no key, and the
    # contract rejects the sample's hosts.
    "infrastructure": {"plan is done twice", "notify would wake a person", "2 of 3 tools called"},
    "long_session": {"replace is done twice"},
}


def given(module: ModuleType) -> dict[str, Any]:
    """A subscription begins with its last month: the eleven before it go the same way."""
    return {"input": module.Subscription("ann", months_paid=11)} if hasattr(module, "Subscription") else {}


def look(module: ModuleType) -> None:
    agents = [value for value in vars(module).values() if isinstance(value, killick.Agent)]
    assert agents
    for agent in agents:
        report = check(agent, **given(module))
        known = KNOWN.get(module.__name__.removeprefix("example_"), set())
        assert not [each for each in report.findings if not each.title.startswith(tuple(known))], str(report)
        assert report.left_alone == "completed"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.name)
def test_nothing_is_found_in_an_example(example: Path) -> None:
    look(imported(example))


def test_nothing_is_found_in_the_agent_of_the_demo(tmp_path: Path) -> None:
    file = tmp_path / "meeting.py"
    shutil.copy(ROOT / "src/killick/cli/demo/meeting.py.txt", file)
    look(imported(file))
