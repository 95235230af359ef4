"""The lines that a worker logs, for people and for machines: one for each transition of a run."""

from __future__ import annotations

import logging
from typing import Any, Final

from killick.engine.outcome import RunOutcome
from killick.errors import KillickError
from killick.logger import get_logger

logger: Final = get_logger("killick.worker")


def log_transition(what: str, *, level: int = logging.INFO, exc_info: Any = None, **fields: Any) -> None:
    """Logs one line per transition, for people and for machines."""
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.log(level, "%s %s", what, text, exc_info=exc_info, extra={"killick": {"what": what, **fields}})


def log_error(what: str, error: Exception, **fields: Any) -> None:
    """Logs an error, with its traceback if it may be a bug."""
    unknown = None if isinstance(error, KillickError) else error
    text = str(error) or type(error).__name__
    log_transition(what, level=logging.WARNING, **fields, error=text, exc_info=unknown)


def log_outcome(agent: str, advanced: RunOutcome) -> None:
    fields: dict[str, Any] = {"run": advanced.run, "agent": agent}
    if advanced.left:
        log_transition("left", **fields)
    elif advanced.renewed_as is not None:
        log_transition("renewed", **fields, renewed_as=advanced.renewed_as)
    elif advanced.status == "failed":
        log_transition("failed", level=logging.WARNING, **fields, step=advanced.step, failure=str(advanced.failure))
    elif advanced.diverged is not None:
        step, recorded, found, _ = advanced.diverged
        log_transition("diverged", level=logging.WARNING, **fields, step=step, recorded=recorded, found=found)
    else:
        if not advanced.has_ended and advanced.wake_at_us is not None:
            fields["wake_at_us"] = advanced.wake_at_us
        log_transition(advanced.status, **fields)
