"""What somebody wants of a replay, and what came of it. Data, and nothing is done here."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from killick.definitions.current import UnrecordedIO
from killick.errors import ReplayParted
from killick.model.failure import Failure
from killick.model.state import State
from killick.replay.live_step import Live
from killick.replay.sandbox import Drift

SECONDS: Final = 60.0
"""How long the code may take."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A step whose recorded outcome was given to the code."""

    step: str
    sort: str
    name: str
    status: str
    output: Any = None
    failure: Failure | None = None
    drift: Drift | None = None
    is_live: bool = False


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a replay: how the run stands, by its record and by its code.

    `beyond` is what the code goes on with where the record of an unfinished run ends. `strays` are files that
    the code opened outside of a step. `parted` is where it parts from the record, if it was asked not to raise that.
    `played` are the outcomes that the code was given, in order; `state` is where it brought the run. `stopped` is where
    somebody wanted it to stop, and `live` what came of the step that was run for real.
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
    parted: ReplayParted | None = None
    played: tuple[Played, ...] = ()
    state: State | None = None
    stopped: str | None = None
    live: Live | None = None
    is_redacted: bool = False

    @property
    def outcome(self) -> Literal["agrees", "parted", "beyond", "stopped"]:
        """In one word."""
        if self.parted is not None:
            return "parted"
        return "stopped" if self.stopped is not None else "agrees" if self.beyond is None else "beyond"


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants of a replay, besides that it is one.

    `to` is a step to stop at, before or after it; `stop_at` one to open the debugger at, `live` one to run for real.
    `here`: the code runs in this very thread.
    """

    to: str | None = None
    stop_at: str | None = None
    live: str | None = None
    here: bool = False
    seconds: float | None = SECONDS
