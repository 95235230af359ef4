"""Rehearsals leave coroutines that dead processes had made and not begun; that is nobody's fault."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield
        gc.collect()
