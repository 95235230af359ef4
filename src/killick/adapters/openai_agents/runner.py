"""Runs SDK agents durably: a repeated turn continues where it stopped."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary, ref

from agents import (
    Agent,
    Handoff,
    Model,
    RunConfig,
    RunContextWrapper,
    Runner,
    RunResult,
    RunResultStreaming,
    Tool,
    ToolApprovalItem,
    TResponseInputItem,
)
from killick.adapters.framework_state import FrameworkState, Place, client_of
from killick.adapters.openai_agents.models import RecordedModel, recorded
from killick.adapters.openai_agents.sessions import SPACE, TURNS, KillickSession, Turns
from killick.adapters.openai_agents.tools import Gate, Said
from killick.adapters.openai_agents.turns import Turn
from killick.adapters.tool_gate import Errors
from killick.definitions.current import in_agent
from killick.errors import DeclarationRefused, RunWaiting
from killick.llm.external import Host, attempt, here
from killick.model.codec import digest

A = TypeVar("A", bound=Agent[Any])


class KillickRunner:
    """Runs agents as the SDK's `Runner` does, with recorded steps.

    Every model and tool call is a step of one Killick run: the current host's, or one named after the session. An
    unfinished turn continues when the same input is given again: recorded model and tool calls are not repeated, and
    one with an unknown outcome is reconciled by its effect class.
    """

    def __init__(
        self, store: Place | None = None, *, tools: Mapping[str, Said] | None = None, to: str | Sequence[str] = (),
        contract: Any = None, name: str = "openai-agents", errors: Errors = "answer",
    ) -> None:  # fmt: skip
        """Options.

        store      an open client, which stays open, or a store's location; not needed inside a host
        tools      each tool's effect, by name: {"look_up": "reads"}, or options of `killick.tool`. Others run at most
                   once. None: not recorded, and repeated
        to         the approvers of SDK tools that need approval; default: anyone
        contract   evaluates calls outside hosts that have one
        name       the agent name of such runs in listings
        errors     what an error of a tool that runs at most once becomes: its answer, in the words of the tool's
                   `failure_error_function`, or a question to a person
        """
        self._is_owner = isinstance(store, str | os.PathLike)
        self._client = None if store is None else client_of(store)
        # Shared by the sessions of its turns, so that a conversation is read once.
        self._states = [FrameworkState.of(self._client, space) for space in (SPACE, TURNS) if self._client is not None]
        self._to = (to,) if isinstance(to, str) else tuple(to)
        self._gate = Gate(tools or {}, self._to, errors)
        self._contract = contract
        self._name = name
        self._nth: WeakKeyDictionary[Host, int] = WeakKeyDictionary()

    async def run(
        self,
        starting_agent: Agent[Any],
        input: str | list[TResponseInputItem],  # noqa: A002
        *,
        session: KillickSession | str | None = None,
        turn: str | None = None,
        run_config: RunConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RunResult:
        """Runs an agent as `Runner.run` does; `options` are its.

            session   the conversation, or its id in the runner's store
            turn      this message's id, if any. Without it, the same input is the same turn until that has ended

        Raises RunWaiting if only a person can let it continue: answer, and run it again.
        """
        async with self._begun(input, session, turn) as (begun, seen), _configured(run_config) as config:
            agent = self.agent(starting_agent)
            given: Any = input
            while True:
                try:
                    result = await Runner.run(agent, given, session=seen, run_config=config, **options)
                except Exception:
                    if begun.waiting is not None:
                        raise begun.waiting from None
                    raise
                if not result.interruptions:
                    return result
                state = result.to_state()
                await self._approved(begun, state, result.interruptions)
                given = state

    def run_sync(self, starting_agent: Agent[Any], input: str | list[TResponseInputItem], **options: Any) -> RunResult:  # noqa: A002
        """The same, for code without an event loop."""
        return asyncio.run(self.run(starting_agent, input, **options))

    @asynccontextmanager
    async def streamed(
        self,
        starting_agent: Agent[Any],
        input: str | list[TResponseInputItem],  # noqa: A002
        *,
        session: KillickSession | str | None = None,
        turn: str | None = None,
        run_config: RunConfig | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncIterator[RunResultStreaming]:
        """Runs an agent as `Runner.run_streamed` does, within the block. Recorded replies arrive whole, not in
        parts."""
        async with self._begun(input, session, turn) as (begun, seen), _configured(run_config) as config:
            agent = self.agent(starting_agent)
            result = Runner.run_streamed(agent, input, session=seen, run_config=config, **options)
            try:
                yield result
            except Exception:
                if begun.waiting is not None:
                    raise begun.waiting from None
                raise
            finally:
                begun.has_answer = _has_answer(result)
                if not result.is_complete:
                    result.cancel()

    def agent(self, agent: A) -> A:
        """Returns the same agent with its tools and model recorded, and its handoff agents. For agents that are tools
        of others: `runner.agent(refunds).as_tool(…)`."""
        gated: A = _gated(agent, self._gate, {})
        return gated

    def close(self) -> None:
        """Closes the store, if opened here."""
        if self._is_owner and self._client is not None:
            self._client.close()

    # inside -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _begun(
        self, said: Any, session: KillickSession | str | None, turn: str | None
    ) -> AsyncIterator[tuple[Turn, KillickSession | None]]:
        """Returns the current turn, and the conversation as the SDK sees it."""
        found = self._session(session)
        async with AsyncExitStack() as stack:
            is_inside, counted = in_agent(), None
            around = here()
            host: Host = around if around is not None else await stack.enter_async_context(self._hosted(found, turn))
            if turn is None and (outer := attempt()) is not None and outer.inner is not None and outer.run == host.run:
                # A tool's own code is re-executed from its start, also after some of its turns ended.
                turn = outer.inner.named(f"turn-{digest(said).hex()[:16]}")
            elif turn is None and is_inside:
                self._nth[host] = self._nth.get(host, 0) + 1
                turn = f"{host.run}-{self._nth[host]}"
            elif turn is None and found is not None:
                counted = Turns(found, said)
                turn = await counted.name()
            elif turn is None:
                turn = digest(said).hex()[:8]
            begun = Turn(host, turn)
            with begun.entered():
                yield begun, None if found is None else found.at(turn)
            if counted is not None and begun.has_answer:
                await counted.end()

    def _session(self, session: KillickSession | str | None) -> KillickSession | None:
        if session is None or isinstance(session, KillickSession):
            return session
        if not isinstance(session, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            reason = "does not know a turn that begins again; give a KillickSession, or the id of one"
            raise DeclarationRefused(type(session).__name__, reason)
        if self._client is None:
            raise DeclarationRefused("KillickRunner", f"has no store for session {session!r}; give it one")
        return KillickSession(session, self._client)

    def _hosted(self, session: KillickSession | None, turn: str | None) -> Any:
        """Returns a host outside of any: the run is named after the conversation, or else the turn."""
        run = session.session_id if session is not None else turn
        if self._client is None:
            raise DeclarationRefused("KillickRunner", "has no store; give it one, or run it inside a host")
        if run is None:
            raise DeclarationRefused("KillickRunner", "cannot find this run again; give session= or turn=")
        return self._client.host(run, agent=self._name, contract=self._contract)

    async def _approved(self, turn: Turn, state: Any, asked: Sequence[ToolApprovalItem]) -> None:
        """Asks people about the SDK's own interruptions: calls that do not go through the gate."""

        async def ask(item: ToolApprovalItem) -> None:
            call = item.call_id or item.tool_name or "call"
            prompt = f"{item.agent.name} wants {item.qualified_name or item.tool_name}({item.arguments or ''})"
            answer = await turn.host.ask(prompt, key=turn.call_key(f"approve-{call}"), to=self._to)
            if answer.approved:
                state.approve(item)
            else:
                state.reject(item, rejection_message=answer.comment)

        outcomes = await asyncio.gather(*(ask(item) for item in asked), return_exceptions=True)
        for error in sorted(filter(None, outcomes), key=lambda error: isinstance(error, RunWaiting)):
            raise error


@asynccontextmanager
async def _configured(config: RunConfig | Mapping[str, Any] | None) -> AsyncIterator[RunConfig]:
    """Returns a run configuration with recorded models. A default provider is closed, as the SDK does."""
    changed = recorded(config)
    try:
        yield changed
    finally:
        if config is None:
            await changed.model_provider.aclose()


def _has_answer(result: RunResultStreaming) -> bool:
    """Returns whether a stream reached its turn's end. A cancelled one claims to be complete, too."""
    if not result.is_complete or result.run_loop_exception is not None or result.interruptions:
        return False
    return result.final_output is not None or getattr(result, "_cancel_mode", "none") == "none"


class _GatedAgent:
    """An agent whose tools go through the gate, including those added while it runs."""

    _killick_gate: ClassVar[Gate]
    _killick_kind: ClassVar[type[Any]]

    async def get_all_tools(self, run_context: RunContextWrapper[Any]) -> list[Tool]:
        found: list[Tool] = await super().get_all_tools(run_context)  # type: ignore[misc]
        return [self._killick_gate.of(tool) for tool in found]


def _gated(agent: Any, gate: Gate, known: dict[int, Any]) -> Any:
    """Returns a copy of an agent with its handoff agents: they may hand back."""
    if getattr(agent, "_killick_gate", None) is gate:
        return agent
    if id(agent) in known:
        return known[id(agent)]
    # Its own class, because the SDK copies agents by class and fields.
    kind = getattr(agent, "_killick_kind", type(agent))
    own: Any = type(kind.__name__, (_GatedAgent, kind), {"_killick_gate": gate, "_killick_kind": kind})
    gated = known[id(agent)] = object.__new__(own)
    gated.__dict__.update(agent.__dict__)
    if isinstance(agent.model, Model):
        gated.model = RecordedModel.of(agent.model)
    gated.handoffs = [
        _handing(each, gate, known) if isinstance(each, Handoff) else _gated(each, gate, known)
        for each in agent.handoffs
    ]
    return gated


def _handing(handoff: Any, gate: Gate, known: dict[int, Any]) -> Any:
    changed, own = copy.copy(handoff), handoff.on_invoke_handoff

    async def invoke(ctx: RunContextWrapper[Any], given: str) -> Any:
        return _gated(await own(ctx, given), gate, known)

    changed.on_invoke_handoff = invoke
    target = handoff._agent_ref() if handoff._agent_ref is not None else None
    if target is not None:
        changed._agent_ref = ref(_gated(target, gate, known))
    return changed
