"""Idempotency keys read like the thing they name, and never differ for the same action."""

import os
import subprocess
import sys

from killick.model.codec import digest as digest_of
from killick.model.hashing import action_key, undo_key


def test_a_key_names_run_step_tool_and_eight_digits_of_the_arguments() -> None:
    digest = digest_of({"to": "ann@example.org", "amount": 3})
    assert action_key("task_abc123", "6", "send_email", digest) == f"task_abc123:step_6:send_email:{digest.hex()[:8]}"


def test_a_key_after_a_rewind_carries_the_generation_and_an_undo_says_so() -> None:
    digest = digest_of({})
    assert ":step_6~1:" in action_key("r", "6", "pay", digest, generation=1)
    assert undo_key(action_key("r", "6", "pay", digest)) == action_key("r", "6", "pay", digest) + ":undo"


def test_the_digest_does_not_depend_on_key_order() -> None:
    assert digest_of({"a": 1, "b": {"c": 2, "d": 3}}) == digest_of({"b": {"d": 3, "c": 2}, "a": 1})


def test_the_digest_is_this_one_in_every_process_and_python_version() -> None:
    arguments = {"to": "ann@example.org", "amount": 12.5, "tags": ["x", None, True], "who": "Ünal 🚢"}
    expected = "111ba377"
    assert digest_of(arguments).hex()[:8] == expected
    code = f"from killick.model.codec import digest as d; print(d({arguments!r}).hex()[:8])"
    for seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True).strip() == expected
