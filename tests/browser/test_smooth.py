"""With thousands of runs, and one of thousands of steps, every page stays small enough to scroll smoothly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

import killick
from browser.browsing import Watch, Watched, bridge
from browser.places import places
from killick.client.client import Client
from killick.log import Entry
from killick.model import events as e

pytestmark = pytest.mark.slow

RUNS: Final = 2_000
STEPS: Final = 2_000
ELEMENTS_MAX: Final = 8_000
"""A browser lays out about 10,000 elements in 100 ms on one slow core."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path = tmp_path_factory.mktemp("crowd") / "killick.db"
    with killick.open(str(path), durability="process") as kd:
        at = kd.runtime.clock.now_us()
        for number in range(RUNS):
            run = f"run-{number:05}"
            ends = [Entry(e.RunCompleted(at=at), {"result": number})] if number % 3 else []
            kd.runtime.log.begin(run).append(
                Entry(e.RunStarted(at=at, run=run, agent=f"agent-{number % 7}"), {"input": number}), *ends
            )
        handle = kd.runtime.log.begin("long")
        handle.append(Entry(e.RunStarted(at=at, run="long", agent="agent-0"), {"input": {"claim": 17}}))
        for first in range(1, STEPS, 100):
            handle.append(
                *(entry for step in range(first, first + 100) for entry in _step(at + step * 1_000, str(step)))
            )
        yield kd


def _step(at: int, step: str) -> list[Entry]:
    intended = e.StepIntended(at=at, step=step, sort="tool", name="fetch", digest=f"d{step}", effect="reads")
    return [
        Entry(intended, {"arguments": {"page": int(step)}, "because": "the plan says so"}),
        Entry(e.AttemptStarted(at=at, step=step, attempt=1, key=f"long:step_{step}:fetch", epoch=0)),
        Entry(
            e.AttemptEnded(at=at + 500, step=step, attempt=1, outcome="returned"), {"output": {"text": "word " * 40}}
        ),
    ]


def test_no_page_of_a_crowd_grows_with_it(crowd: Client, watch: Watch) -> None:
    with bridge(crowd) as server, watch(server) as window:
        sizes = {path: _elements(window, path) for path in places(["long"])}
        assert {path: size for path, size in sizes.items() if size > ELEMENTS_MAX} == {}


def _elements(window: Watched, path: str) -> int:
    """How many elements a page has after somebody scrolled down it and moved through its rows."""
    page = window.goto(path)
    page.mouse.wheel(0, 4_000)
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    return int(page.evaluate("document.getElementsByTagName('*').length"))
