"""A run as its holder has it: leased, and its log open."""

from __future__ import annotations

import math

from killick.log.log import Log
from killick.log.writer import RunLog


def leased_by(holder: str, log: Log, run: str, *, seconds: float = math.inf) -> RunLog:
    """Leases a run and opens its log; nobody renews the lease."""
    return log.open(run, head=log.lease(run, holder, seconds=seconds).head)
