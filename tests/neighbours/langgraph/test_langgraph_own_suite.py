"""LangGraph's own tests that take a checkpointer pass with ours, as far as they pass with its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from neighbours.own_suites import OwnSuite, shown, their_tests
from neighbours.results import result
from neighbours.trying import needs


@needs("langgraph", 1, 2, 20)
@pytest.mark.timeout(900)
def test_their_tests_that_pass_with_their_checkpointer_pass_with_ours() -> None:
    folder = their_tests("langgraph", "")
    takers = [path for path in folder.glob("tests/test_*.py") if "sync_checkpointer" in path.read_text()]
    suite = OwnSuite(folder, Path(__file__).parent, "killick_for_sqlite", ("-k", "sqlite and not aes"))
    came = suite.outcome([str(path.relative_to(folder)) for path in takers], lambda name, why: False)
    assert came.failed == {}
    # A few of theirs measure time: on a busy machine they fail with their own checkpointer too, and do not count.
    count = shown("langgraph", r"([\d,]+) of LangGraph's own tests")
    assert count - 5 <= len(came.passed) <= count
    result("langgraph", own=str(len(came.passed)))
