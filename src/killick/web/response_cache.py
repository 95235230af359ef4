"""Request coalescing: a document that many clients request at once is made once. Caches nothing on an idle server.

A document is made from a store that other processes write to, so it is always slightly stale. When more are in progress
than this process can make in parallel, a request that equals a recent one gets the same response: many equal requests
cost about as much as one. A write through this server is visible to every later request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from killick.lru import Lru
from killick.web.routes import Call

if TYPE_CHECKING:
    from killick.clock import Clock

BUSY: Final = 3
"""How many answers are being made before others are shared."""

KEPT_SECONDS: Final = 0.5
"""How old a shared answer may be. Pages wait for longer than this before they ask for an announced change."""

KEPT_SECONDS_MAX: Final = 2.0
KEPT_TIMES: Final = 40
"""A shared answer that took long to make may be so many times as old as that, up to `KEPT_SECONDS_MAX`: then making one
of the dear documents takes a fortieth of the time, however often it is asked for."""

ANSWERS_MAX: Final = 256
ANSWER_BYTES_MAX: Final = 262_144

Make = Callable[["Call[Any, Any]"], Awaitable[Response]]


class _Entry:
    """An answer, since when it is being made (None: its turn has not come), and how old it may become."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.seconds = KEPT_SECONDS
        self.answer: asyncio.Task[Response]


class ResponseCache:
    """The answers of one app, all on one loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._made: Lru[tuple[object, ...], _Entry] = Lru(ANSWERS_MAX)
        self._making = 0
        self.shared = 0
        """How many requests got a response that was made for another one."""

    async def given(self, call: Call[Any, Any], make: Make, *, personal: bool = True) -> Response:
        """The answer to a read: a fresh one, or while there is no time for that, one from a moment ago.

        Of those who ask for the same meanwhile, all who come too late for the one in the making share the next. A
        `personal` answer is for one person, any other for all of one scope and grant; their access was checked before.
        """
        person = call.person
        asked = (call.written, call.request.scope.get("root_path", ""), person.name if personal else "", person.scope,
                 person.grant)  # fmt: skip
        known = self._made.get(asked) if self._making >= BUSY else None
        if known is not None and (known.at is None or self._clock.monotonic() - known.at <= known.seconds):
            self.shared += 1
            return await asyncio.shield(known.answer)
        made = _Entry()
        made.answer = asyncio.create_task(self._answer(made, known, call, make))
        made.answer.add_done_callback(lambda _: self._unkept(asked, made))
        self._made.put(asked, made)
        return await asyncio.shield(made.answer)

    def forget(self) -> None:
        """Something was written here."""
        self._made.clear()

    async def _answer(self, made: _Entry, before: _Entry | None, call: Call[Any, Any], make: Make) -> Response:
        self._making += 1
        try:
            if before is not None:
                await asyncio.wait([before.answer])
            made.at = self._clock.monotonic()
            return await make(call)
        finally:
            self._making -= 1
            took = 0.0 if made.at is None else self._clock.monotonic() - made.at
            made.seconds = min(max(KEPT_SECONDS, took * KEPT_TIMES), KEPT_SECONDS_MAX)

    def _unkept(self, asked: tuple[object, ...], made: _Entry) -> None:
        """A failed or large response is not kept."""
        answer = made.answer
        failed = answer.cancelled() or answer.exception() is not None
        if self._made.get(asked) is made and (failed or len(answer.result().body) > ANSWER_BYTES_MAX):
            self._made.pop(asked)
