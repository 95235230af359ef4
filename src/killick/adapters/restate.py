"""Runs on Restate: it owns scheduling, timers, messages and failover. Killick's log owns the state.

Each agent is a virtual object, and each run a key of it, which Restate executes one invocation at a time. A turn of the
run is one invocation, a wait is a delayed invocation, and each outside event is another. So a journal holds only a
turn's outcome, for a run of any length. Callers wait for the result by an awakeable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import restate
from restate.client import create_client
from restate.exceptions import TerminalError

from killick.adapters.engines import commands
from killick.adapters.engines.serving import CallingEngine
from killick.adapters.engines.turns import SLICE_SECONDS, TurnOutcome, name_of
from killick.adapters.engines.wakeups import reason_of
from killick.client.client import AnyClient
from killick.client.start import AsyncHandle
from killick.definitions.agents import AnyAgent
from killick.engine.leases import LEASE_SECONDS
from killick.errors import KillickError, RunUnknown
from killick.store.records import RunRow

WAKE: Final = "wake"
ATTEND: Final = "attend"

_STEP_LONGEST: Final = timedelta(days=1)
"""How long a yielding turn may take for its current step before Restate aborts it."""

_ONCE_FOR: Final = timedelta(hours=1)
"""How long equal reasons are deduplicated."""

_SUSPEND_AFTER: Final = timedelta(seconds=5)
"""How long a call may hold its connection while it only waits for the run."""

_CANCELLED: Final = 409
"""The status of an invocation that Restate cancelled."""

_LOOK_SECONDS: Final = 0.02
_CLOSE_SECONDS: Final = 2.0
_AGAIN: Final = restate.InvocationRetryPolicy(
    initial_interval=timedelta(milliseconds=200),
    exponentiation_factor=2.0,
    max_interval=timedelta(seconds=10),
    max_attempts=1_000_000,
    on_max_attempts="pause",
)


class Restate(CallingEngine):
    """Killick's runs on a Restate server: Restate calls `app`, and an `async with` block watches for runs.

    ingress         Restate's ingress address
    agents          the agents whose runs are Restate's, by name; default: all declared in this process
    concurrency     the maximum number of concurrent runs in this process
    lease_seconds   how long a frozen process keeps a run before another may take it
    slice_seconds   how long a run continues before it yields at its next step
    duties          whether this process also runs triggers and hooks, as a Killick worker does
    """

    def __init__(
        self, client: AnyClient, ingress: str = "http://localhost:8080", *,
        agents: Collection[str] | None = None, concurrency: int = 100, lease_seconds: float = LEASE_SECONDS,
        slice_seconds: float = SLICE_SECONDS, duties: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            client, agents, concurrency=concurrency, lease_seconds=lease_seconds, slice_seconds=slice_seconds,
            duties=duties,
        )  # fmt: skip
        self._ingress = ingress
        self._requests_open = 0
        self._gone = asyncio.Event()
        self._requests: Any = None
        self.objects: Sequence[restate.VirtualObject] = [self._made(name) for name in self._agents]
        """The services for a custom endpoint: `restate.app([…, *engine.objects])`."""

    @property
    def app(self) -> Any:
        """The endpoint, as an ASGI app for an HTTP/2 server, on the loop of the `async with` block."""
        endpoint: Any = restate.app(self.objects)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self._requests_open += 1
            try:
                await endpoint(scope, partial(self._received, receive), send)
            finally:
                self._requests_open -= 1

        return app

    async def _received(self, receive: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Receives the next request event. After shutdown it acts as if Restate had disconnected, which Restate may
        never do."""
        loop = asyncio.get_running_loop()
        coming, gone = loop.create_task(receive()), loop.create_task(self._gone.wait())
        try:
            await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else {"type": "http.disconnect"}
        finally:
            coming.cancel()
            gone.cancel()

    async def _open(self, serving: AsyncExitStack) -> None:
        self._requests = await serving.enter_async_context(create_client(self._ingress))
        await super()._open(serving)

    async def drain(self) -> None:
        """Takes no more turns, and lets every active run yield at its next step.

        Call it before the server of `app` stops, so that Restate receives each turn's outcome.
        """
        await super().drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while self._requests_open:
                    await asyncio.sleep(_LOOK_SECONDS)
        self._gone.set()

    # starting ---------------------------------------------------------------------------------

    async def start(
        self, agent: AnyAgent, input: Any = None, *, id: str | None = None, **options: Any  # noqa: A002
    ) -> AsyncHandle[Any]:  # fmt: skip
        """Creates a run, as `kd.start` does, and makes Restate continue it.

        `kd.start` alone suffices, from anywhere: a serving process notices it.
        """
        handle: AsyncHandle[Any] = await self._client.start(agent, input, id=id, **options)
        row = self._client.runtime.store.index(handle.id)
        if row is not None and row.status == "queued":
            await self.wake(row, reason_of(row, self._client.runtime.store.head(handle.id)))
        return handle

    async def wake(self, row: RunRow, reason: str) -> None:
        """Makes Restate take a turn of a run. A repeated reason does nothing."""
        if self._requests is None:
            raise KillickError("this engine is not open; use it in an `async with` block")
        key, once = quote(name_of(row), safe=""), quote(reason, safe="@+:")
        await self._requests.generic_send(row.agent, WAKE, b"", key=key, idempotency_key=once)

    # handlers ---------------------------------------------------------------------------------

    def _made(self, name: str) -> restate.VirtualObject:
        made = restate.VirtualObject(
            name,
            description=f"Runs of the agent {name}, each under its id",
            # No turn must yield before its slice is over, and none is aborted in a step.
            inactivity_timeout=timedelta(seconds=self._slice_seconds + 60),
            abort_timeout=_STEP_LONGEST,
            idempotency_retention=_ONCE_FOR,
            invocation_retry_policy=_AGAIN,
        )

        @made.handler("run", kind="shared", inactivity_timeout=_SUSPEND_AFTER)
        async def run(ctx: restate.ObjectSharedContext, given: Any) -> Any:
            """Starts the run on an input, unless it exists, and returns its result. Cancelling this cancels the run."""
            await ctx.run_typed("create", self._create, agent=name, run=ctx.key(), given=given)
            caller, ended = ctx.awakeable(type_hint=dict)
            ctx.generic_send(name, ATTEND, json.dumps(caller).encode(), key=ctx.key())
            try:
                outcome = TurnOutcome(**await ended)
                if outcome.error is not None:
                    raise TerminalError(": ".join(outcome.error))
                return outcome.result
            except TerminalError as error:
                if error.status_code == _CANCELLED:
                    because = {"because": "its invocation was cancelled"}
                    await ctx.run_typed(
                        "cancel", self._obey, run=ctx.key(), command="cancel", given=because, request=""
                    )
                raise

        @made.handler(ATTEND, ingress_private=True)
        async def attend(ctx: restate.ObjectContext, caller: str) -> None:
            """Takes a turn, and resolves a caller's awakeable when the run ends."""
            ctx.set("callers", [*(await ctx.get("callers", type_hint=list) or []), caller])
            await self._turned(ctx, name)

        @made.handler(WAKE)
        async def wake(ctx: restate.ObjectContext) -> None:
            """Takes a turn, and schedules the next."""
            await self._turned(ctx, name)

        @made.handler("state", kind="shared")
        async def state(ctx: restate.ObjectSharedContext) -> dict[str, Any] | None:
            """Returns the run's outcome after its last turn, with its open waits."""
            return await ctx.get("outcome", type_hint=dict)

        for command in commands.COMMANDS:
            made.handler(command, kind="shared")(self._commander(command))
        return made

    def _commander(self, command: str) -> Callable[[restate.ObjectSharedContext, dict[str, Any]], Any]:
        async def obeyed(ctx: restate.ObjectSharedContext, given: dict[str, Any]) -> None:
            """Carries out a command for the run; its refusal is the caller's error."""
            request = ctx.request().id
            await ctx.run_typed(command, self._obey, run=ctx.key(), command=command, given=given, request=request)

        return obeyed

    async def _turned(self, ctx: restate.ObjectContext, name: str) -> None:
        outcome: dict[str, Any] = await ctx.run_typed("turn", self._turn, run=ctx.key())
        timer = await ctx.get("timer", type_hint=str)
        if timer is not None and timer != ctx.request().id:
            ctx.cancel_invocation(timer)
        ctx.clear("timer")
        seconds = outcome["wait_seconds"]
        if seconds is not None:
            sent = ctx.generic_send(name, WAKE, b"", key=ctx.key(), send_delay=timedelta(seconds=seconds))
            ctx.set("timer", await sent.invocation_id())
        ctx.set("outcome", outcome)
        if TurnOutcome(**outcome).has_ended:
            for caller in await ctx.get("callers", type_hint=list) or []:
                ctx.resolve_awakeable(caller, outcome)
            ctx.clear("callers")

    def _error(self, refused: Exception) -> Exception:
        status = 404 if isinstance(refused, RunUnknown) else 400
        return TerminalError(f"{type(refused).__name__}: {refused}", status_code=status)
