"""Finds the live worker that continues a run."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

from killick.cli.context import Shell
from killick.errors import KillickError
from killick.log.log import Log
from killick.model import events as e
from killick.store.records import RunQuery

CLAIM_SECONDS: Final = 2.0
"""How long a command waits for a worker that may live to claim a run."""

TAKERS_MAX: Final = 20
LAST_EVENTS: Final = 200
"""The newest runs of an agent, and the last events of each, that are read to find a live worker."""


def claimed_by(shell: Shell, run: str, agent: str, *, since: int | None = None) -> str | None:
    """The worker that claims a due run; None if none does in time. Does not wait where no worker of the agent lives.

    since  the length of the run's log before it became due: a worker may have claimed and released the run already
    """
    store, clock = shell.store, shell.clock
    takers = {_taken_by(shell.log, row.run) for row in store.runs(RunQuery(agent=agent), limit=TAKERS_MAX)}
    may_live = not store.proves_life or any(store.lives(each) for each in takers if each is not None)
    until = clock.monotonic() + (CLAIM_SECONDS if may_live else 0)
    while not shell.is_held(run) and (since is None or shell.log.head(run).seq == since):
        if clock.monotonic() >= until:
            return None
        time.sleep(clock.nap_seconds(0.02))
    return _taken_by(shell.log, run)


def _taken_by(log: Log, run: str) -> str | None:
    """The process that leased a run last, if its head or its latest events say so."""
    with suppress(KillickError):
        head = log.head(run)
        events = log.read(run, after=max(head.seq - LAST_EVENTS, 0), limit=LAST_EVENTS)
        taken = (event.holder for _, event, _ in reversed(events) if isinstance(event, e.RunTaken))
        return head.holder or next(taken, None)
    return None
