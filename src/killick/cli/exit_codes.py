"""How the command line ends: exit codes, and the one line that goes with each. Prints nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from enum import IntEnum
from typing import Final

from killick import errors


class Exit(IntEnum):
    """The exit codes for scripts."""

    means: str

    def __new__(cls, value: int, means: str) -> Exit:
        made = int.__new__(cls, value)
        made._value_ = value
        made.means = means
        return made

    DONE = 0, "done"
    BAD = 1, "done, with a problem: a run failed, verification failed, or a check found a fault"
    MISTYPED = 2, "not done: an unknown name or an invalid request; nothing changed"
    WAITING = 3, "the run waits for a person, an event or corrected code, or is paused"
    BUSY = 4, "not done: another process holds the run; try again"
    BUG = 70, "not done: a bug in Killick"
    INTERRUPTED = 130, "interrupted by a person"


class CommandFailed(Exception):
    """Ends a command with one line for the person, and an exit code."""

    def __init__(self, line: str, code: Exit = Exit.MISTYPED) -> None:
        super().__init__(line)
        self.code = code


_CODES: Final[dict[Exit, tuple[type[errors.KillickError], ...]]] = {
    Exit.WAITING: (errors.RunWaiting,),
    Exit.BUSY: (errors.RunBusy, errors.StoreBusy),
    Exit.BAD: (errors.RunFailed, errors.RunCancelled, errors.RunBroken, errors.StoreBroken, errors.StoreFull,
               errors.StoreGone, errors.StoreReadOnly, errors.SnapshotBroken),
}  # fmt: skip
"""Every other error of Killick means a bad request."""


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """A suggestion for a mistyped name, for the end of an error's line; else the next move."""
    close = get_close_matches(word, list(known), 1, 0.5)
    return f"did you mean {close[0]}?" if close else otherwise


def code_of(error: errors.KillickError) -> Exit:
    """The exit code of an error."""
    return next((code for code, kinds in _CODES.items() if isinstance(error, kinds)), Exit.MISTYPED)


def drop_output() -> None:
    """Redirects the remaining output to nowhere, so that neither Killick nor Python writes to a closed pipe again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
