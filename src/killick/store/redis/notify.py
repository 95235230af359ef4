"""Listens for notifications of other processes, on a connection of its own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from redis.exceptions import RedisError

from killick.errors import StoreError
from killick.store.notify import RECONNECT_SECONDS, Listener
from killick.store.redis.server import RedisServer
from killick.threads import start_thread

_CHECK_SECONDS: Final = 0.5
"""How often the thread checks whether there is still a watcher."""

_ANSWER_SECONDS: Final = 10.0


class RedisListener(Listener):
    """Its thread closes the connection at its next check after the last watcher stopped."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__(server.refuse_closed)
        self._server = server

    def _start(self) -> Callable[[], None]:
        listening = None
        with contextlib.suppress(RedisError):  # the thread reconnects
            listening = self._listening()
        stopped = threading.Event()
        start_thread("killick-notify", partial(self._listen, listening, stopped))
        return stopped.set

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
                    stopped.wait(RECONNECT_SECONDS)
                    continue
                self._notify([""])
            try:
                received = listening.get_message(timeout=_CHECK_SECONDS)
                if received is not None and received["type"] == "message":
                    self._notify([received["data"].decode()])
            except (RedisError, OSError):
                _close(listening)
                listening = None
        if listening is not None:
            _close(listening)


def _close(listening: Any) -> None:
    with contextlib.suppress(RedisError, OSError):
        listening.close()
        listening.connection_pool.disconnect()
