"""`kd.run` and `kd.start`: a run from its id and input to its outcome, or to a handle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, overload

from killick.definitions.registry import Agent, AnyAgent
from killick.engine.outcome import ended
from killick.engine.steps.kinds import first_entries
from killick.engine.steps.transaction import joining
from killick.engine.steps.waits import latest
from killick.engine.views import RunInfo
from killick.errors import LogError, RunExists
from killick.log import Recorded
from killick.logger import get_logger
from killick.model.state import State
from killick.store.protocol import ENDED

if TYPE_CHECKING:
    from killick.client.client import Client

I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741

logger: Final = get_logger("killick")
_FOLLOW_SECONDS: Final = 0.1


class RunMethod:
    """`kd.run(agent, input, id=…)` and `await kd.run.soon(…)`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    @overload
    def __call__(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        fresh: bool = False,
    ) -> O: ...  # fmt: skip
    @overload
    def __call__(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), fresh: bool = False,
    ) -> O: ...  # fmt: skip
    def __call__(self, agent: AnyAgent, input: Any = None, **options: Any) -> Any:  # noqa: A002
        """Run an agent here and now, and return its result.

        An id that is known is gone on with; one that has ended gives its recorded result again. Timers, backoffs and
        rate limits are sat out. Raises RunWaiting when only a person or an outside event can wake it, RunFailed with
        the failure.
        """
        return self._client.blocking(self._soon(agent, input, **options))

    @overload
    def soon(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        fresh: bool = False,
    ) -> Awaitable[O]: ...  # fmt: skip
    @overload
    def soon(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), fresh: bool = False,
    ) -> Awaitable[O]: ...  # fmt: skip
    def soon(self, agent: AnyAgent, input: Any = None, **options: Any) -> Awaitable[Any]:  # noqa: A002
        """The same, on the caller's own loop."""
        return self._soon(agent, input, **options)

    async def _soon(
        self, agent: AnyAgent, input: Any, *, id: str | None = None, priority: int | None = None,  # noqa: A002
        tags: Sequence[str] = (), fresh: bool = False,
    ) -> Any:  # fmt: skip
        client = self._client
        agent = client.named(agent)
        run, start = client.begin(agent, input, id, priority, tags, fresh)
        if start is None:
            row = client.store.index(run)
            if row is not None and row.status in ENDED:
                logger.warning("%s: %s earlier; this is its recorded outcome", run, row.status)
                return client.outcome(agent, ended(client.engine, run))
        executor = client.executor()
        advanced = await executor.advance(run, start=start, agent=agent, sit_out=True)
        while advanced.renewed_as is not None:
            advanced = await executor.advance(advanced.renewed_as, agent=agent, sit_out=True)
        return client.outcome(agent, advanced)


class StartMethod:
    """`kd.start(agent, input, id=…)` and `await kd.start.soon(…)`."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    @overload
    def __call__(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        by: str | None = None, tx: Any = None,
    ) -> Handle[O]: ...  # fmt: skip
    @overload
    def __call__(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None,
    ) -> Handle[O]: ...  # fmt: skip
    def __call__(
        self, agent: AnyAgent, input: Any = None, *, id: str | None = None, priority: int | None = None,  # noqa: A002
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None,
    ) -> Handle[Any]:  # fmt: skip
        """Create a run, durably, for whoever advances it; the same id again gives the same run.

        `by` is who starts it, for the record. With `tx`, the caller's own connection to the store's database, it is
        there when they commit.
        """
        client = self._client
        agent = client.named(agent)
        run, start = client.begin(agent, input, id, priority, tags, True, by)
        if start is not None:
            log = client.log.begin(run)
            if tx is None:
                try:
                    log.append(*first_entries(*start))
                except RunExists:
                    # Somebody was quicker, or it was us and the answer was lost: the same is the same run.
                    run, _ = client.begin(agent, input, run, priority, tags, True, by)
            else:
                [made] = joining(client.store, tx).append([log.built(*first_entries(*start))])
                if isinstance(made, LogError):
                    raise made
        return Handle(client, agent, run)

    @overload
    def soon(
        self, agent: Agent[None, O], *, id: str | None = None, priority: int | None = None, tags: Sequence[str] = (),
        by: str | None = None, tx: Any = None,
    ) -> Awaitable[Handle[O]]: ...  # fmt: skip
    @overload
    def soon(
        self, agent: Agent[I, O], input: I, *, id: str | None = None, priority: int | None = None,
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None,
    ) -> Awaitable[Handle[O]]: ...  # fmt: skip
    def soon(self, agent: AnyAgent, input: Any = None, **options: Any) -> Awaitable[Handle[Any]]:  # noqa: A002
        """The same, without blocking the loop."""
        return asyncio.to_thread(lambda: self(agent, input, **options))


class Handle(Generic[O]):
    """A run that was started, to be looked at and waited for."""

    def __init__(self, client: Client, agent: AnyAgent | str, run: str) -> None:
        self._client = client
        self._agent = agent
        self.id = run

    def info(self) -> RunInfo:
        """Where it is."""
        return self._client.info(self.id)

    def state(self) -> State:
        """Its state."""
        return self._client.state(self.id)

    def result(self, timeout: float | None = None) -> O:
        """What it returns, when somebody has advanced it to its end. TimeoutError when the time is up."""
        client = self._client
        until = None if timeout is None else client.clock.monotonic() + timeout
        while True:
            run = latest(client.log, self.id)
            row = client.store.index(run)
            if row is not None and row.status in ENDED and (advanced := ended(client.engine, run)).renewed_as is None:
                outcome: O = client.outcome(client.named(self._agent), advanced)
                return outcome
            if until is not None and client.clock.monotonic() >= until:
                raise TimeoutError(f"{self.id}: has not ended within {timeout:g} s; it is {row and row.status}")
            time.sleep(client.clock.nap_seconds(_FOLLOW_SECONDS))

    def follow(self, after: int = 0) -> Iterator[Recorded]:
        """Its events as they are committed, until it has ended."""
        client = self._client
        while True:
            row = client.store.index(self.id)
            recorded = client.events(self.id, after=after)
            yield from recorded
            after = recorded[-1].seq if recorded else after
            if not recorded:
                if row is not None and row.status in ENDED:
                    return
                time.sleep(client.clock.nap_seconds(_FOLLOW_SECONDS))
