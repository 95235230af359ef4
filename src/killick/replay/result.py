"""The request for a replay, and its result. Data only."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from killick.definitions.current import UnrecordedIO
from killick.errors import ReplayDiverged
from killick.model.failure import Failure
from killick.model.state import State
from killick.replay.sandbox import Drift

SECONDS: Final = 60.0
"""How long the code may take."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose recorded outcome the code received."""

    step: str
    sort: str
    name: str
    status: str
    output: Any = None
    failure: Failure | None = None
    drift: Drift | None = None


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    run, agent   the run and its agent
    status       the status of the run
    result       the result of the code
    failure      the failure of the code
    steps        the number of replayed steps
    drifts       steps whose arguments differ from the log without a change in effect
    strays       files that the code opened outside a step
    beyond       the next call of the code after the end of an unfinished log
    divergence   the divergence, if it was not raised
    played       the outcomes that the code received, in order
    state        the state of the run at the end of the replay
    stopped      the position at which the caller asked to stop
    """

    run: str
    agent: str
    status: str
    result: Any = None
    failure: Failure | None = None
    steps: int = 0
    drifts: tuple[Drift, ...] = ()
    strays: tuple[UnrecordedIO, ...] = ()
    beyond: str | None = None
    divergence: ReplayDiverged | None = None
    played: tuple[Played, ...] = ()
    state: State | None = None
    stopped: str | None = None

    @property
    def outcome(self) -> Literal["agrees", "diverged", "beyond", "stopped"]:
        """The result in one word."""
        if self.divergence is not None:
            return "diverged"
        return "stopped" if self.stopped is not None else "agrees" if self.beyond is None else "beyond"


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a replay.

    `to` is a step to stop at, before or after it; `stop_at` one to open the debugger at. `here`: the code runs in this
    very thread.
    """

    to: str | None = None
    stop_at: str | None = None
    here: bool = False
    seconds: float | None = SECONDS
