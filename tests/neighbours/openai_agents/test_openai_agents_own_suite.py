"""The SDK's own tests that make a SQLiteSession pass with our session, but for those of SQLiteSession's own parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from neighbours.own_suites import OwnSuite, shown, their_tests
from neighbours.results import result
from neighbours.trying import needs

MARKERS = ("allow_call_model_methods", "requires_native_macos_sandbox", "review_optional", "serial")
SETTINGS = f"""asyncio_mode = auto
asyncio_default_fixture_loop_scope = session
markers =
{"".join(f"    {marker}{chr(10)}" for marker in MARKERS)}"""
MAKES_ONE = re.compile(r"(?<!\w)SQLiteSession\(")
INSIDE = re.compile(r"has no attribute '_\w+'|no such table: agent_")
"""They look into its connections, locks and tables."""
OWN = {
    "test_sqlite_session_closed_rejects_empty_add_items": "a closed session raises an error of its own",
    "test_encrypted_pop_cancellation_waits_for_authentication_rollback": "popping for an EncryptedSession is private",
    # Compacting a part of the history takes a private method, which Redis' and MongoDB's sessions lack too: without
    # it nothing is compacted unless the whole history was read.
    "test_encrypted_compaction_skips_unencrypted_stored_history": "compaction",
    "test_expired_read_overhead_does_not_authorize_hidden_history": "compaction",
    "test_backend_read_limit_cannot_hide_retained_history_from_compaction": "compaction",
    "test_automatic_compaction_rollback_budget": "compaction",
}
"""What else is of SQLiteSession alone, and why."""


@needs("openai-agents", 0, 24)
@pytest.mark.timeout(1800)
def test_their_tests_that_pass_with_their_session_pass_with_ours() -> None:
    folder = their_tests("openai-agents", SETTINGS)
    takers = [path for path in folder.glob("tests/**/test_*.py") if MAKES_ONE.search(path.read_text())]
    suite = OwnSuite(folder, Path(__file__).parent, "killick_for_sqlite", mark="session")
    came = suite.outcome([str(path.relative_to(folder)) for path in takers], is_theirs)
    assert came.failed == {}
    assert shown("openai-agents", r"([\d,]+) of the SDK's own tests") == len(came.passed)
    result("openai_agents", own=str(len(came.passed)))
    assert shown("openai-agents", r"The other ([\d,]+) tests") == len(came.known)


def is_theirs(test: str, why: str) -> bool:
    return bool(INSIDE.search(why)) or test.partition("[")[0].rpartition("::")[2] in OWN
