"""The loggers of Killick. A handler that fails never raises into the code that logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import MutableMapping
from typing import Any


class HarmlessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls return whatever its handlers and filters do: closed pipes and full disks included."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log, and drop the record where a handler raises: the application's logging is not the run's concern."""
        kwargs.setdefault("stacklevel", 2)
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Pass everything on as it is: an adapter would replace `extra`."""
        return msg, kwargs


def get_logger(name: str) -> HarmlessLogger:
    """The logger of this name, for use inside Killick."""
    return HarmlessLogger(logging.getLogger(name), {})
