"""Request coalescing: equal reads that come at once are answered by one document. Caches nothing.

Of equal requests one is made at a time. Those that come while it is made share the next one, which is begun after all
of them: no response is older than its request, and a crowd costs as much as one client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from killick.web.routes import Call

Make = Callable[["Call[Any, Any]"], Awaitable[Response]]
_Asked = tuple[bytes | str, ...]


class RequestCoalescer:
    """The reads of one app that are under way, all on one loop."""

    def __init__(self) -> None:
        self._waiting: dict[_Asked, asyncio.Task[Response]] = {}
        self._making: dict[_Asked, asyncio.Task[Response]] = {}

    async def given(self, call: Call[Any, Any], make: Make, *, personal: bool = True) -> Response:
        """The answer to a read, which is begun after this call.

        A `personal` answer is for one person, and any other for all of one scope; their access was checked before.
        """
        person = call.person
        asked = (call.written, call.request.scope.get("root_path", ""), person.name if personal else "", person.scope)
        waiting = self._waiting.get(asked)
        if waiting is None or waiting.done():  # done: its loop was closed
            waiting = self._waiting[asked] = asyncio.create_task(self._answer(asked, call, make))
        return await asyncio.shield(waiting)

    async def _answer(self, asked: _Asked, call: Call[Any, Any], make: Make) -> Response:
        if (before := self._making.get(asked)) is not None:
            await asyncio.wait([before])
        self._making[asked] = self._waiting.pop(asked)  # who asks from now on gets the next one
        try:
            return await make(call)
        finally:
            del self._making[asked]
