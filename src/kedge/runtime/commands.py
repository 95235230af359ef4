"""What people and other runs tell a run to do: on record at once, or through the inbox of whoever is at it."""

from __future__ import annotations

import contextlib
from typing import Any

from kedge.errors import EpochStale, HeadMoved, KedgeError, RunBusy
from kedge.runtime import waits
from kedge.runtime.execution import Engine
from kedge.runtime.steps import delivery


def request_cancel(engine: Engine, run: str, *, compensate: bool, by: str | None, because: str | None = None) -> None:
    """Put a cancellation on record, through the inbox if somebody holds the run."""
    run = waits.latest(engine.log, run)
    command(engine, run, {"command": "cancel", "compensate": compensate, "because": because}, by=by)


def command(
    engine: Engine,
    run: str,
    body: dict[str, Any],
    *,
    by: str | None,
    id: str | None = None,  # noqa: A002
) -> bool:
    """Append a command to a run that nobody holds, or deliver it to whoever does. True: it holds already."""
    store = engine.log.store
    left = engine.log.head(run).holder is not None
    try:
        log = engine.log.open(run, holder=engine.ids.new("command"), seconds=30)
    except RunBusy:
        name = id or engine.ids.new("command")
        message = delivery(run, waits.COMMAND, body, id=name, by=by, at_us=engine.clock.now_us())
        [outcome] = store.deliver([message])
        if isinstance(outcome, KedgeError):
            raise outcome from None
        return False
    try:
        version = log.fold.facts.context_version
        entries = waits.command_entries(body, by=by, at=engine.clock.now_us(), version=version)
        if body["command"] == "forked":
            if body["fork"] not in log.ledger.facts.forks:
                log.append(*entries)  # also to one that is over: somebody may take it back
        elif not log.fold.facts.ended:
            log.append(*entries)
    except (HeadMoved, EpochStale):
        return command(engine, run, body, by=by, id=id)
    finally:
        with contextlib.suppress(KedgeError):
            # A run that was found left in the middle stays so.
            store.release(run, epoch=log.epoch, left=left)
    return True
