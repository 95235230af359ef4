"""Starts the threads that live as long as their owner. None of them ends unnoticed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from killick.logger import get_logger

logger: Final = get_logger("killick")


def start_thread(
    name: str, work: Callable[[], object], *, died: Callable[[BaseException], object] = lambda _: None
) -> threading.Thread:
    """Starts a daemon thread. If an error ends it, that is logged, and `died` is called in it with the error: it frees
    what waits for the thread, or starts another."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            logger.exception("the thread %s ended by an error", name)
            died(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
