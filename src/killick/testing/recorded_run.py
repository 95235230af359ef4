"""A production run as a test: replays its code against its log, without the world."""

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
    """Replays an agent's code against an exported run. Raises ReplayParted on a divergence, or returns it with
    `check=False`.

    `run` selects a child in the file. `secret_key` is that of the original store, if arguments are Secrets; `seconds`
    is the time limit.
    """
    return Replay(read(source), agent, run=run, secret_key=secret_key, asked=ReplayRequest(seconds=seconds)).outcome(
        check
    )
