"""A turn: one message to an agent and everything that follows. Its name identifies its calls."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Final

from killick.adapters.tool_gate import CallGroup
from killick.errors import DeclarationRefused, RunWaiting
from killick.llm.external import Host

_TURN: Final[ContextVar[Turn | None]] = ContextVar("killick_openai_turn", default=None)


def turn_here(who: str) -> Turn:
    """Returns the current turn. Refuses without one, because the call would not be recorded."""
    turn = _TURN.get()
    if turn is None:
        raise DeclarationRefused(who, "goes through Killick; run its agent with KillickRunner.run, not with Runner.run")
    return turn


class Turn:
    """The calls of one SDK run: models in order, tools by call id."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name
        self.waiting: RunWaiting | None = None
        """The waits for people. Also kept here, because the SDK wraps errors in its own."""
        self.has_answer = True
        """Whether the turn is over at the end of its block; an unread stream is not."""
        self._asked = 0
        self._at_work = CallGroup(RunWaiting)

    def model_key(self) -> str:
        """Returns the key of the next model call, for any request."""
        self._asked += 1
        return f"{self.name}/model-{self._asked}"

    def call_key(self, call: str) -> str:
        """Returns the key of a tool call."""
        return f"{self.name}/{call}"

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enters this turn for the code inside, and the tasks that it starts."""
        token = _TURN.set(self)
        try:
            yield
        finally:
            _TURN.reset(token)

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        """One tool call. If it must wait for a person, concurrent calls finish first."""
        async with self._at_work:
            try:
                yield
            except RunWaiting as waiting:
                self.waiting = waiting
                raise
