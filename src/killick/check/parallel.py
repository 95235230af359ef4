"""Rehearses in forked processes, which say only whether a rehearsal has something to report.

The parent repeats those that have, and those of a child that died. So findings never cross a process.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

FEW: Final = 32
"""Fewer rehearsals than this take less time than to fork."""
STALL_SECONDS: Final = 25.0
"""How long the parent waits for the next rehearsal of any child, before it rehearses itself."""
_BYTES: Final = 4
_THREADS: Final = Path("/proc/self/task")


def quiet_ones(rehearsals: Sequence[Callable[[], bool]], processes: int, tell: Callable[[int], None]) -> set[int]:
    """Calls every rehearsal in a child; returns the numbers of those that were true. `tell` gets the count so far.

    Forks only where no other thread runs, not even one of a library: its locks would stay locked in a child.
    """
    is_alone = threading.active_count() == 1 and _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1
    quiet: set[int] = set()
    if len(rehearsals) < FEW or not is_alone:
        return quiet
    _flush()  # a child would write what waits there again
    gc.collect()
    children: list[int] = []
    reader, writer = os.pipe()
    try:
        for first in range(processes):
            if (child := os.fork()) == 0:
                _rehearse(rehearsals, range(first, len(rehearsals), processes), writer)
            children.append(child)
        os.close(writer)
        done = 0
        while select.select([reader], [], [], STALL_SECONDS)[0] and (read := os.read(reader, 1024 * _BYTES)):
            numbers = [int.from_bytes(read[at : at + _BYTES]) for at in range(0, len(read), _BYTES)]
            quiet.update(number >> 1 for number in numbers if number & 1)
            tell(done := done + len(numbers))
    finally:
        os.close(reader)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return quiet


def _rehearse(rehearsals: Sequence[Callable[[], bool]], numbers: Sequence[int], writer: int) -> None:
    """A child's whole life."""
    try:
        for number in numbers:
            try:
                is_quiet = rehearsals[number]()
            except Exception:  # the parent meets it again, and reports it
                is_quiet = False
            os.write(writer, (number << 1 | is_quiet).to_bytes(_BYTES))
        _flush()
    finally:
        os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
