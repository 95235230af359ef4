"""Signals that end the execution of a run and are no errors. Agent code may see them pass; it cannot act on them.

They derive from BaseException, so that `except Exception` lets them through. Once one was raised the run's
handle is closed: the steps of agent code that unwinds are neither recorded nor applied.
"""

from __future__ import annotations

from killick.errors import HandleClosed, KillickError
from killick.store.records import Message


class Signal(BaseException):
    """The execution of the run ends here; the run itself may continue later."""


class Parked(Signal):
    """The run leaves memory. It is woken by its time, a message or a person."""


class Released(Signal):
    """The external session of the run has ended; the run waits for the next one."""


class Paused(Signal):
    """The run was paused."""


class Cancelling(Signal):
    """The run was cancelled."""


class Renewed(Signal):
    """The run continues in a fresh log."""


class Rewinding(Signal):
    """A message in the inbox asks for a rewind of the run."""

    def __init__(self, message: Message, to: str, because: str | None) -> None:
        super().__init__(to)
        self.message = message
        self.to = to
        self.because = because


class Diverging(Signal):
    """Code and record disagree."""


class Interrupted(Signal):
    """The lease, the store or this process is gone; nothing more may be written by this execution."""

    def __init__(self, cause: BaseException | None = None) -> None:
        super().__init__(str(cause) if cause is not None else "interrupted")
        self.cause = cause

    def error(self, run: str) -> BaseException:
        """The error that a caller who advances the run gets."""
        cause = self.cause.cause if isinstance(self.cause, HandleClosed) else self.cause
        return cause or KillickError(f"{run}: was interrupted; run it again to continue")


class Stopped(Signal):
    """A branch stops because a sibling failed or finished first; the run continues."""
