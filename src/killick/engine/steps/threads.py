"""Runs blocking code in daemon threads: a tool that hangs holds up neither the loop nor the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import Context
from queue import SimpleQueue
from typing import Any, Final

from killick.engine.steps.live_calls import LiveCall, Work

_KEPT: Final = 32
"""Idle threads that are kept for the next call."""


class Threads:
    """As many threads as there are blocking calls at once."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._idle = 0
        self._closed = False

    def start(self, call: Callable[[], Any], context: Context, live: LiveCall | None = None) -> Work:
        """Begin a blocking call; its outcome comes to the running loop. A live call is over when its thread is."""
        work = Work(asyncio.get_running_loop(), context, call, live)
        with self._mutex:
            spare = self._idle > 0
            self._idle -= spare
        try:
            if not spare:
                threading.Thread(target=self._serve, name="killick-tool", daemon=True).start()
        except BaseException:
            if live is not None:
                live.end()  # there is no room for a thread: nothing began
            raise
        self._queue.put(work)
        return work

    def close(self) -> None:
        """Let the idle threads go."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._queue.put(None)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
            del work
            with self._mutex:
                if self._closed or self._idle >= _KEPT:
                    return
                self._idle += 1
