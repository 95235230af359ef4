"""Listens for notifications of other sessions in a thread, and calls the watchers. Knows nothing of runs.

After a lost session it reconnects, and notifies with "" because notifications may have been missed.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from typing import Final

from psycopg import Error

from killick.errors import StoreError, StoreUnavailable
from killick.store.postgres.server import PostgresServer
from killick.store.postgres.wire import Failed, Q, Session

Callback = Callable[[str], None]
_RECONNECT_SECONDS: Final = 1.0
_GOODBYE_SECONDS_MAX: Final = 1.0


class Listener:
    """Listens while there is a watcher. Through a pooler of transactions nothing can be heard: callers poll."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._watchers: list[Callback] = []
        self._wakes: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def watch(self, callback: Callback) -> Callable[[], None]:
        watcher: Callback = lambda run: callback(run)  # noqa: E731  one callback may watch twice; each is stopped separately
        with self._lock:
            self._server.refuse_closed()
            if self._thread is None and not self._server.is_pooled:
                self._start()
            self._watchers.append(watcher)

        def stop() -> None:
            with self._lock:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)
                thread = self._end() if not self._watchers else None
            _await(thread)

        return stop

    def close(self) -> None:
        with self._lock:
            self._watchers.clear()
            thread = self._end()
        _await(thread)

    def _start(self) -> None:
        session = None
        with contextlib.suppress(StoreUnavailable):  # the thread reconnects
            session = self._listening()
        self._wakes, asleep = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, args=(session, asleep), name="killick-notify", daemon=True)
        self._thread.start()

    def _end(self) -> threading.Thread | None:
        thread, self._thread = self._thread, None
        if self._wakes is not None:
            self._wakes.close()
            self._wakes = None
        return thread

    def _listening(self) -> Session:
        session = self._server.connect()
        try:
            session.script(Q.listen.format(channel='"' + self._server.channel.replace('"', '""') + '"'))
        except Failed as failed:
            session.close()
            raise self._server.explain(failed) from failed
        return session

    def _listen(self, session: Session | None, stopped: socket.socket) -> None:
        with stopped:
            while session is None or not self._forward_until_lost(session, stopped):
                session = self._reconnect(stopped)
                if session is None:
                    return
                self._notify([""])

    def _forward_until_lost(self, session: Session, stopped: socket.socket) -> bool:
        """Forwards notifications; returns True when stopped, and False when the session is lost."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(stopped, selectors.EVENT_READ)
                selector.register(session.pg.socket, selectors.EVENT_READ)
                while True:
                    received = list[str]()
                    while (note := session.pg.notifies()) is not None:
                        received.append(note.extra.decode())
                    self._notify(list(dict.fromkeys(received)))
                    if any(key.fileobj is stopped for key, _ in selector.select()):
                        return True
                    session.pg.consume_input()
        except (Error, OSError):
            return False
        finally:
            session.close()

    def _reconnect(self, stopped: socket.socket) -> Session | None:
        """Reconnects, for as long as it takes; returns None when stopped."""
        while True:
            with contextlib.suppress(StoreError):
                return self._listening()
            with selectors.DefaultSelector() as selector:
                selector.register(stopped, selectors.EVENT_READ)
                if selector.select(_RECONNECT_SECONDS):
                    return None

    def _notify(self, runs: list[str]) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for run in runs:
            for watcher in watchers:
                # A failing callback, say of a closed loop, must not affect the other watchers.
                with contextlib.suppress(Exception):
                    watcher(run)


def _await(thread: threading.Thread | None) -> None:
    """Waits until the thread closes its session, unless it is still connecting to an absent server."""
    if thread is not None and thread is not threading.current_thread():
        thread.join(_GOODBYE_SECONDS_MAX)
