"""Idempotency keys: `{run}:step_{step}:{tool}:{eight hex digits of the arguments' digest}`.

A key is computed once, when a step's first attempt starts, stored there and never computed again. Its
digits are a label for people; whatever must be exact compares the full digest.
"""

from __future__ import annotations

from killick.model.codec import digest


def arguments_digest(arguments: object, *, secret_key: bytes | None = None) -> bytes:
    """The full digest of canonical arguments: key order, process and Python version make no difference."""
    return digest(arguments, secret_key=secret_key)


def action_key(run: str, step: str, tool: str, arguments: bytes, *, generation: int = 0) -> str:
    """The key of one action, the same for all its attempts; after a rewind its step carries the generation."""
    at = f"{step}~{generation}" if generation else step
    return f"{run}:step_{at}:{tool}:{arguments.hex()[:8]}"


def is_key_of(key: str, run: str) -> bool:
    """Whether an action is a run's own, rather than one of another run that it went on with."""
    return key.startswith(f"{run}:step_")


def undo_key(key: str) -> str:
    """The key under which the action of a key is undone, so that the far side knows which one."""
    return f"{key}:undo"
