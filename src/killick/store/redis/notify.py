"""Listens for notifications of other processes in a thread, and calls the watchers. Knows nothing of runs.

After a lost connection it reconnects, and notifies with "" because notifications may have been missed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

from redis.exceptions import RedisError

from killick.errors import StoreError
from killick.store.redis.server import RedisServer

Callback = Callable[[str], None]
_RECONNECT_SECONDS: Final = 1.0
_CHECK_SECONDS: Final = 0.5
"""How often the thread checks whether there is still a watcher."""

_ANSWER_SECONDS: Final = 10.0


class Listener:
    """Listens while there is a watcher."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._watchers: list[Callback] = []
        self._stopped: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def watch(self, callback: Callback) -> Callable[[], None]:
        watcher: Callback = lambda run: callback(run)  # noqa: E731  one callback may watch twice; each is stopped separately
        with self._lock:
            self._server.refuse_closed()
            if self._thread is None:
                self._start()
            self._watchers.append(watcher)

        def stop() -> None:
            with self._lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)
                if not self._watchers:
                    self._end()

        return stop

    def close(self) -> None:
        with self._lock:
            self._watchers.clear()
            self._end()

    def _start(self) -> None:
        listening = None
        with contextlib.suppress(RedisError):  # the thread reconnects
            listening = self._listening()
        stopped = self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._listen, args=(listening, stopped), name="killick-notify", daemon=True
        )
        self._thread.start()

    def _end(self) -> None:
        """Stops notifying; the thread closes its connection at its next check."""
        self._thread = None
        if self._stopped is not None:
            self._stopped.set()

    def _listening(self) -> Any:
        listening = self._server.listener().pubsub()
        try:
            listening.subscribe(self._server.channel)
            # After this reply, no notification is missed.
            listening.get_message(timeout=_ANSWER_SECONDS)
        except BaseException:
            _close(listening)
            raise
        return listening

    def _listen(self, listening: Any, stopped: threading.Event) -> None:
        while not stopped.is_set():
            if listening is None:
                try:
                    listening = self._listening()
                except (RedisError, StoreError):
                    stopped.wait(_RECONNECT_SECONDS)
                    continue
                self._notify("", stopped)
            try:
                received = listening.get_message(timeout=_CHECK_SECONDS)
                if received is not None and received["type"] == "message":
                    self._notify(received["data"].decode(), stopped)
            except (RedisError, OSError):
                _close(listening)
                listening = None
        if listening is not None:
            _close(listening)

    def _notify(self, run: str, stopped: threading.Event) -> None:
        with self._lock:
            watchers = [] if stopped.is_set() else list(self._watchers)
        for watcher in watchers:
            # A failing callback, say of a closed loop, must not affect the other watchers.
            with contextlib.suppress(Exception):
                watcher(run)


def _close(listening: Any) -> None:
    with contextlib.suppress(RedisError, OSError):
        listening.close()
        listening.connection_pool.disconnect()
