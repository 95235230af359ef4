"""Runs on Inngest: it owns scheduling, timers, events and failover. Killick's log owns the state.

Each agent is an Inngest function, each run a function run, and a turn of the run a step. A wait is a wait for the event
that Killick sends when something came for the run. So a function run holds only the outcomes of turns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from datetime import timedelta
from typing import Any, Final

import inngest

from killick.adapters.engines import commands
from killick.adapters.engines.serving import CallingEngine
from killick.adapters.engines.turns import SLICE_SECONDS, TurnOutcome, name_of
from killick.client.client import AnyClient
from killick.engine.leases import LEASE_SECONDS
from killick.store.records import RunRow

EVENTS: Final = "killick/"
WAKE: Final = f"{EVENTS}run.wake"

_RETRIES: Final = 20
"""The most that Inngest allows. A function run that failed so often starts again when its run is next due."""

_LONGEST: Final = timedelta(days=365)
_GRACE_SECONDS: Final = 5.0
"""How long a run may be due before it is woken again: Inngest forgets an event that comes before the wait for it."""

_PRECISE_SECONDS: Final = 2.0
"""Shorter waits are sleeps: Inngest waits for events in whole seconds."""


class Inngest(CallingEngine):
    """Killick's runs on Inngest: serve its `functions`, and enter an `async with` block, which watches for runs.

    inngest         the app's Inngest client
    agents          the agents whose runs are Inngest's, by name; default: all declared in this process
    concurrency     the maximum number of concurrent runs in this process
    lease_seconds   how long a frozen process keeps a run before another may take it
    slice_seconds   how long a run continues before it yields at its next step
    duties          whether this process also runs triggers and hooks, as a Killick worker does
    """

    def __init__(
        self, client: AnyClient, inngest: inngest.Inngest, *, agents: Collection[str] | None = None,
        concurrency: int = 100, lease_seconds: float = LEASE_SECONDS, slice_seconds: float = SLICE_SECONDS,
        duties: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            client, agents, concurrency=concurrency, lease_seconds=lease_seconds, slice_seconds=slice_seconds,
            duties=duties, grace_seconds=_GRACE_SECONDS,
        )  # fmt: skip
        self._inngest = inngest
        self.functions = [*map(self._function, self._agents), self._commands()]
        """The functions to serve: one for each agent, and one for commands."""

    async def wake(self, row: RunRow, reason: str) -> None:
        """Sends what makes Inngest continue a run: as a singleton, its function starts only where none is active."""
        data = {"run": name_of(row)}
        start = inngest.Event(name=f"{EVENTS}{row.agent}", id=f"{reason}:start", data=data)
        await self._inngest.send([start, inngest.Event(name=WAKE, id=reason, data=data)])

    # functions --------------------------------------------------------------------------------

    def _function(self, name: str) -> inngest.Function[Any]:
        async def advance(ctx: inngest.Context) -> Any:
            run = _run_of(ctx)
            await ctx.step.run("create", self._create, name, run, ctx.event.data.get("input"))
            while not (outcome := TurnOutcome(**await ctx.step.run("turn", self._turn, run))).has_ended:
                seconds = outcome.wait_seconds
                if seconds is None or seconds > _PRECISE_SECONDS:
                    longest = _LONGEST if seconds is None else min(_LONGEST, timedelta(seconds=math.ceil(seconds)))
                    wanted = f"async.data.run == {json.dumps(run)}"
                    await ctx.step.wait_for_event("wait", event=WAKE, if_exp=wanted, timeout=longest)
                elif seconds > 0:
                    await ctx.step.sleep("sleep", timedelta(seconds=seconds))
            if outcome.error is not None:
                raise inngest.NonRetriableError(": ".join(outcome.error))
            return outcome.result

        started = inngest.TriggerEvent(event=f"{EVENTS}{name}")
        one = inngest.Singleton(key="event.data.run", mode="skip")
        return self._inngest.create_function(fn_id=name, trigger=started, retries=_RETRIES, singleton=one)(advance)

    def _commands(self) -> inngest.Function[Any]:
        async def command(ctx: inngest.Context) -> None:
            given = {name: value for name, value in ctx.event.data.items() if name != "run"}
            await ctx.step.run(
                "command", self._obey, _run_of(ctx), ctx.event.name.rpartition(".")[2], given, ctx.run_id
            )

        triggers: list[Any] = [inngest.TriggerEvent(event=f"{EVENTS}run.{name}") for name in commands.COMMANDS]
        return self._inngest.create_function(fn_id="killick-commands", trigger=triggers, retries=_RETRIES)(command)

    def _error(self, refused: Exception) -> Exception:
        return inngest.NonRetriableError(f"{type(refused).__name__}: {refused}")


def _run_of(ctx: inngest.Context) -> str:
    run = ctx.event.data.get("run")
    if not isinstance(run, str):
        raise inngest.NonRetriableError(f"{ctx.event.name} needs the id of the run, as data.run")
    return run
