"""How long work on a whole store reports its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of the stage, how much of it is done, and how much there is (0: unknown)."""


def silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
