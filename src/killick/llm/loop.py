"""The tool-calling loop: calls the model, executes its tool calls, and returns their results, until it calls none.

Its only state are the messages, and all effects go through the run, so a replay repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from killick.definitions.parameters import untag
from killick.definitions.tools import AnyTool
from killick.engine.steps.model_reply import Provider, assistant_messages, is_paused, provider_of, text_of
from killick.errors import KillickError
from killick.llm.toolset import AnyRun, Toolset, dispatch, driven, settled
from killick.model.codec import plain
from killick.window import Window

TURNS_MAX: Final = 50
ANTHROPIC_TOKENS_MAX: Final = 4096
"""The reply limit for a provider without a default."""


class LoopResult(msgspec.Struct, frozen=True):
    """The end of a loop.

    text   the model's last text
    reply  the model's last reply
    turns  the number of model calls
    """

    text: str
    messages: list[Any]
    """The whole history, with the model's last reply: pass it to another loop to continue."""
    reply: Any
    turns: int


async def loop(
    run: AnyRun,
    model: Callable[..., Any],
    tools: Toolset | Iterable[AnyTool] = (),
    /,
    *,
    messages: str | Sequence[Any],
    turns_max: int = TURNS_MAX,
    system: str | None = None,
    provider: Provider | None = None,
    budget: int | None = None,
    window: Window | None = None,
    **params: Any,
) -> LoopResult:
    """Calls a model with tools until it calls none. Messages that people send to the run join the next model call.
    Raises KillickError after `turns_max` calls.

    run        the Run
    model      a method of a client, such as `client.messages.create`, or a function with the same form
    tools      a Toolset, or tools
    messages   the history to begin with; text is the user's message
    turns_max  the maximum number of model calls
    system     the system prompt
    provider   the form of messages and tools, if `model` is not a method of an official client
    budget     the maximum tokens of a call: unused content is evicted, and returns when the model asks for it
    window     a Window in place of `budget`; give it to the next loop to continue with its content
    params     for the model: `model="…"`, `max_tokens=…`; `tools=[…]` are further tools of the provider

        result = await killick.loop(run, client.messages.create, [search], messages="…", model="…")
    """
    toolset = tools if isinstance(tools, Toolset) else Toolset(*tools)
    provider = provider or provider_of(model)
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    request = _request(provider, toolset, system, params)
    if budget is not None:
        if window is not None:
            raise KillickError("a loop takes budget= or window=, not both; remove one")
        window = Window(budget, shape=provider, reads=toolset.reads)
    said += await _received(run)
    for turn in range(1, turns_max + 1):
        asked = request(said)
        if window is not None:
            asked |= await _fitted(run, window, asked)
        reply = await settled(run.model(model, **asked))
        answers = await dispatch(run, toolset, reply, window=window)
        received = await _received(run)
        said += assistant_messages(reply) + answers + received
        if not answers and not received and not is_paused(reply):
            return LoopResult(text_of(reply), said, reply, turn)
    raise KillickError(
        f"after {turns_max} turns the model still calls tools; check what it repeats, or raise turns_max"
    )


def loop_sync(
    run: AnyRun,
    model: Callable[..., Any],
    tools: Toolset | Iterable[AnyTool] = (),
    /,
    *,
    messages: str | Sequence[Any],
    **options: Any,
) -> LoopResult:
    """The same as `loop`, for a SyncRun.

    options  the other options of `loop`
    """
    return driven(loop(run, model, tools, messages=messages, **options))


def _request(
    provider: Provider, tools: Toolset, system: str | None, params: Mapping[str, Any]
) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """The arguments of the next call, from the messages so far."""
    schemas = [*tools.schemas(provider), *params.get("tools", ())]
    fixed = dict(params) | ({"tools": schemas} if schemas else {})
    if provider == "anthropic":
        fixed.setdefault("max_tokens", ANTHROPIC_TOKENS_MAX)
    name = "input" if provider == "openai-responses" else "messages"
    first: list[Any] = []
    if system is not None and provider == "openai":
        first.append({"role": "system", "content": system})
    elif system is not None:
        fixed["instructions" if provider == "openai-responses" else "system"] = system
    return lambda said: fixed | {name: [*first, *said]}


async def _fitted(run: AnyRun, window: Window, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The messages and tools to send, fitted to the window."""
    name = "messages" if "messages" in asked else "input"
    system = asked.get("system", asked.get("instructions"))
    sent = await settled(run.fit(window, asked[name], asked.get("tools", ()), system=system))
    return {name: sent.messages} | ({"tools": sent.tools} if sent.tools else {})


async def _received(run: AnyRun) -> list[Any]:
    """The messages from people since the last call, as the user's messages."""
    return [_message(each) for each in await settled(run.remarks())]


def _message(message: Any) -> Any:
    if message.__class__ is dict and "role" in message:
        return message
    text = message if isinstance(message, str) else json.dumps(untag(plain(message)), ensure_ascii=False)
    return {"role": "user", "content": text}
