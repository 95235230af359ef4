"""Idempotency keys: `{run}:step_{step}:{tool}:{eight hex digits of the arguments' digest}`.

A key is computed once, when a step's first attempt starts, and stored. The hex digits are a label for people; exact
comparisons use the full digest.
"""

from __future__ import annotations

from killick.model.codec import digest


def arguments_digest(arguments: object, *, secret_key: bytes | None = None) -> bytes:
    """Returns the full digest of canonical arguments, independent of key order, process and Python version."""
    return digest(arguments, secret_key=secret_key)


def action_key(run: str, step: str, tool: str, arguments: bytes, *, generation: int = 0) -> str:
    """Returns the key of one action, shared by all its attempts. After a rewind the step id carries the generation."""
    at = f"{step}~{generation}" if generation else step
    return f"{run}:step_{at}:{tool}:{arguments.hex()[:8]}"


def is_key_of(key: str, run: str) -> bool:
    """Returns whether an action is the run's own, rather than one reused from another run."""
    return key.startswith(f"{run}:step_")


def undo_key(key: str) -> str:
    """Returns the key for compensating an action, from which the remote service knows the action."""
    return f"{key}:undo"
