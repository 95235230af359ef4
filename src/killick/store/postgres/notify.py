"""Listens for notifications of other sessions, on a session of its own."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from psycopg import Error

from killick.errors import StoreError, StoreUnavailable
from killick.store.notify import RECONNECT_SECONDS, Listener
from killick.store.postgres.server import PostgresServer
from killick.store.postgres.wire import Failed, Q, Session
from killick.threads import start_thread

_GOODBYE_SECONDS_MAX: Final = 1.0


class PostgresListener(Listener):
    """Through a pooler of transactions nothing can be heard: callers poll."""

    def __init__(self, server: PostgresServer) -> None:
        super().__init__(server.refuse_closed)
        self._server = server

    def _start(self) -> Callable[[], None]:
        if self._server.is_pooled:
            return lambda: None
        session = None
        with contextlib.suppress(StoreUnavailable):  # the thread reconnects
            session = self._listening()
        wakes, asleep = socket.socketpair()
        thread = start_thread("killick-notify", partial(self._listen, session, asleep))

        def end() -> None:
            """Waits until the thread closes its session, unless it is still connecting to an absent server."""
            wakes.close()
            if thread is not threading.current_thread():
                thread.join(_GOODBYE_SECONDS_MAX)

        return end

    def _listening(self) -> Session:
        session = self._server.connect()
        try:
            session.script(self._server.qualified(Q.listen))
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
                if selector.select(RECONNECT_SECONDS):
                    return None
