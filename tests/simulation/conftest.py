"""What dead processes of a simulation leave in memory is nobody's fault, and goes before the next test."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Collected inside a named tuple's constructor, where nothing can be imported, even the warning below fails."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """A coroutine that a dead process had made and not begun, a task of its closed loop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield
        gc.collect()
