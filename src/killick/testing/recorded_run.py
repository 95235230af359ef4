"""A run of production as a test: its code does again what is on record, with the world shut off, or parts from it."""

from __future__ import annotations

import os

from killick.archive.export import read
from killick.definitions.agents import AnyAgent
from killick.replay.replay import Replay
from killick.replay.result import SECONDS, Replayed, ReplayRequest

__all__ = ["Replayed", "replay"]


def replay(
    source: str | os.PathLike[str] | bytes,
    agent: AnyAgent,
    *,
    check: bool = True,
    run: str | None = None,
    secret_key: bytes | None = None,
    seconds: float = SECONDS,
) -> Replayed:
    """Run an agent's code again against an exported run. ReplayParted, or with `check=False` in the outcome, if it
    does not do again what is on record.

    `run` is a child that is in the file. `secret_key` is that of the store it comes from, where arguments are Secrets;
    `seconds` is how long the code may take.
    """
    return Replay(read(source), agent, run=run, secret_key=secret_key, asked=ReplayRequest(seconds=seconds)).outcome(
        check
    )
