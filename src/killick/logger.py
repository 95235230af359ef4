"""The loggers of Killick. A handler that fails never raises into the code that logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any


class HarmlessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls always return, also when a handler or filter raises."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs, and drops the record if a handler raises: logging must not affect a run."""
        kwargs.setdefault("stacklevel", 2)
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Passes everything on unchanged: an adapter would replace `extra`."""
        return msg, kwargs


def get_logger(name: str) -> HarmlessLogger:
    """Returns the logger of this name, for use inside Killick."""
    return HarmlessLogger(logging.getLogger(name), {})
