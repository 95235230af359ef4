"""Runs: the next move for those that do not continue by themselves."""

from __future__ import annotations


def revived(count: int, resume: str) -> str:
    """Why abandoned runs stopped, and the command that continues them."""
    died = "its process died" if count == 1 else "their processes died"
    return f"{died}. Run `{resume}`, or start a worker"
