"""A turn: one message to an agent and all that comes of it. By its name its calls are found again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from killick.errors import DeclarationRefused, RunWaiting
from killick.llm.external import Host

_TURN: Final[ContextVar[Turn | None]] = ContextVar("killick_openai_turn", default=None)


def turn_here(who: str) -> Turn:
    """The turn in which this code is. Without one nothing runs: it would not be on record."""
    turn = _TURN.get()
    if turn is None:
        raise DeclarationRefused(who, "goes through Killick; run its agent with KillickRunner.run, not with Runner.run")
    return turn


class Turn:
    """The calls of one run of the SDK: its models in their order, its tools by the ids of their calls."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name
        self.waiting: RunWaiting | None = None
        """What only people can let go on. The SDK puts errors into others of its own, so it is kept here, too."""
        self.has_answer = True
        """Whether the turn is over when its block is; a stream that nobody read to its end is not."""
        self._asked = 0
        self._under_way = 0
        self._idle = asyncio.Event()

    def model_key(self) -> str:
        """By what the next call of a model is found again, in whatever words it asks."""
        self._asked += 1
        return f"{self.name}/model-{self._asked}"

    def call_key(self, call: str) -> str:
        """By what a call of a tool is found again."""
        return f"{self.name}/{call}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The code inside belongs to this turn, and what it starts."""
        token = _TURN.set(self)
        try:
            yield
        finally:
            _TURN.reset(token)

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """One call of a tool. If it must wait for a person, the calls beside it come to their ends first: the SDK
        cancels them when one raises, and what is cancelled in the middle is in doubt."""
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        except RunWaiting as waiting:
            self.waiting = waiting
            self._landed()
            await self._idle.wait()
            raise
        except BaseException:
            self._landed()
            raise
        else:
            self._landed()

    def _landed(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()
