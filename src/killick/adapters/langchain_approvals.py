"""Converts approvals to and from LangChain's two formats: Killick's waits for LangChain inboxes, and graphs' questions
for Killick. Imports nothing of LangChain: the formats are plain dicts.

    HITLRequest      {"action_requests": […], "review_configs": […]}, answered by {"decisions": […]}
    HumanInterrupt   [{"action_request": …, "config": …, "description": …}, …], answered by [{"type": …, "args": …}, …]

`HumanInTheLoopMiddleware` uses the first, older agent inboxes the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from killick.agents.run import Run
from killick.client import answers
from killick.client.client import AnyClient
from killick.engine.control.inbox import Verb
from killick.engine.views import Wait
from killick.engine.waits.waits import Answer
from killick.errors import AnswerRefused
from killick.llm.external import Host

Shape: TypeAlias = Mapping[str, Any] | Sequence[Any]
"""A question or an answer in one of the two formats."""

_SETTLES: Final[dict[str, Verb]] = {"approve": "not", "reject": "stop", "respond": "happened"}
"""The meaning of a decision on an unknown outcome: retry, leave, or it happened with this result."""

_SETTLING: Final = (
    "Check first, then choose. approve: it did not happen, do it again; reject: leave it; respond: it happened, and "
    "returned this"
)
_OLDER: Final = {"approve": "accept", "reject": "ignore", "edit": "edit", "respond": "response"}
_NEWER: Final = {older: newer for newer, older in _OLDER.items()}


# open waits, in LangChain's form --------------------------------------------------------------------


def hitl_request(waits: Sequence[Wait]) -> dict[str, Any]:
    """Returns open waits as one HITLRequest, with an action for each."""
    asked = [(wait, *_asked(wait)) for wait in waits]
    return {
        "action_requests": [
            {"name": name, "args": arguments, "description": _description(wait)} for wait, name, arguments in asked
        ],
        "review_configs": [
            {"action_name": name, "allowed_decisions": _decisions(wait)} for wait, name, _ in asked
        ],
    }  # fmt: skip


def human_interrupts(waits: Sequence[Wait]) -> list[dict[str, Any]]:
    """Returns open waits, each as a HumanInterrupt."""
    found: list[dict[str, Any]] = []
    for wait in waits:
        (name, arguments), allowed = _asked(wait), [_OLDER[each] for each in _decisions(wait)]
        config = {f"allow_{each}": each in allowed for each in ("accept", "ignore", "edit")}
        config["allow_respond"] = "response" in allowed
        asked = {"action": name, "args": arguments}
        found.append({"action_request": asked, "config": config, "description": _description(wait)})
    return found


def answer(
    client: AnyClient, waits: Sequence[Wait], response: Shape, *, by: str | None = None, via: str | None = None
) -> None:
    """Passes the answers to a `hitl_request` or `human_interrupts` to the waits, in order.

    via   is recorded with the answers, to recognize a repeated response
    """
    decisions = _decided(response)
    if len(decisions) != len(waits):
        raise AnswerRefused(
            waits[0].id if waits else "nothing",
            f"{len(waits)} waits are open and {len(decisions)} decisions came; give one for each",
        )
    for wait, decision in zip(waits, decisions, strict=True):
        verb = _SETTLES.get(decision.kind) if wait.waits_for == "settlement" else decision.kind
        if verb is None:
            allowed = ", ".join(_decisions(wait))
            raise AnswerRefused(wait.id, f"{decision.kind!r} is not a possible decision here; give one of {allowed}")
        given = {"by": by, "comment": decision.comment, "saw": None, "tx": None, "via": via}
        client.runtime.notify(answers.answer(client.runtime.engine, wait, verb, decision.value, **given))


def _asked(wait: Wait) -> tuple[str, dict[str, Any]]:
    """Returns the call to approve; a question is a call of `ask`."""
    intention = wait.intention
    if isinstance(intention, Mapping):
        return str(intention["tool"]), dict(msgspec.to_builtins(intention.get("arguments") or {}))
    return wait.name, {"options": list(wait.options)} if wait.options else {}


def _description(wait: Wait) -> str:
    text = wait.prompt or str(wait)
    if wait.waits_for != "settlement":
        return text
    # LangChain's approve must not read as "yes, it happened", which would do it again.
    return f"{text.removesuffix('Did it happen?')}Do it again? ({_SETTLING})"


def _decisions(wait: Wait) -> list[str]:
    if wait.waits_for == "settlement":
        return list(_SETTLES)
    return [verb for verb in ("approve", "edit", "reject", "respond") if verb in wait.verbs]


class _Decision(NamedTuple):
    """A decision: its kind, its value and its reason."""

    kind: Verb
    value: Any = None
    comment: str | None = None


def _decided(response: Shape) -> list[_Decision]:
    """Parses decisions of either format. A single one needs no list."""
    match response:
        case {"decisions": [*decisions]}:
            return [_decision(each) for each in decisions]
        case {"type": _}:
            return [_decision(response)]
        case [*decisions] if not isinstance(response, str):
            return [_decision(each) for each in decisions]
        case _:
            raise AnswerRefused("approval", f"{response!r} is not a HITLResponse or HumanResponse; give one")


def _decision(given: Any) -> _Decision:
    match given:
        case {"type": "approve" | "accept"}:
            return _Decision("approve")
        case {"type": "edit", "edited_action": {"args": arguments}} | {"type": "edit", "args": {"args": arguments}}:
            return _Decision("edit", arguments)
        case {"type": "respond", "message": said} | {"type": "response", "args": said}:
            return _Decision("respond", said)
        case {"type": "reject" | "ignore"}:
            why = given.get("message") or given.get("args")
            return _Decision("reject", None, why if isinstance(why, str) else None)
        case _:
            raise AnswerRefused("approval", f"{given!r} is not a decision; give type approve, edit, reject or respond")


# LangChain's interrupts, as waits -------------------------------------------------------------------


async def ask(
    asker: Run | Host, request: Shape, *, to: str | Sequence[str] = (), timeout: float | str | None = None,
    key: str = "",
) -> Any:  # fmt: skip
    """Asks a graph's question, in either format, in Killick; returns the graph's response.

    asker   the run, in an agent; or a host, with `key`: the interrupt's id
    """
    actions = _actions(request)
    prompts = [_prompt(action) for action in actions]
    if isinstance(asker, Host):
        places = [f"{key}#{place}" for place in range(len(prompts))]
        waits = [asker.ask(each, key=at, to=to, timeout=timeout) for each, at in zip(prompts, places, strict=True)]
        return response_of(request, await asyncio.gather(*waits))
    return response_of(request, [await asker.ask(each, to=to, timeout=timeout) for each in prompts])


def response_of(request: Shape, answers: Sequence[Answer]) -> Any:
    """Returns Killick's answers in the format of the graph's question."""
    decided = [_shaped(action, answer) for action, answer in zip(_actions(request), answers, strict=True)]
    if not _is_older(request):
        return {"decisions": decided} if "action_requests" in request else decided[0]
    older = [_as_older(each) for each in decided]
    return older[0] if isinstance(request, Mapping) else older


class _Action(NamedTuple):
    """A graph's intended action: name, arguments and description."""

    name: str
    arguments: dict[str, Any]
    description: str
    allowed: Sequence[str]


def _is_older(request: Shape) -> bool:
    first: Any = request if isinstance(request, Mapping) else request[0] if len(request) else {}
    return isinstance(first, Mapping) and "action_request" in first


def _actions(request: Shape) -> list[_Action]:
    match request:
        case {"action_requests": [*asked], "review_configs": [*configs]}:
            allowed = {config["action_name"]: config["allowed_decisions"] for config in configs}
            return [
                _Action(each["name"], dict(each["args"]), each.get("description") or "", allowed.get(each["name"], ()))
                for each in asked
            ]
        case {"type": "tool_approval", "name": name, "args": arguments, **rest}:
            return [_Action(name, dict(arguments), str(rest.get("description") or ""), ())]
        case {"action_request": {"action": name, "args": arguments}, "config": config, **rest}:
            rights = {
                "allow_accept": "approve",
                "allow_ignore": "reject",
                "allow_edit": "edit",
                "allow_respond": "respond",
            }
            allowed_here = [decision for right, decision in rights.items() if config.get(right)]
            return [_Action(name, dict(arguments or {}), str(rest.get("description") or ""), allowed_here)]
        case [*asked] if asked and not isinstance(request, str):
            return [action for each in asked for action in _actions(each)]
        case _:
            raise AnswerRefused("approval", f"{request!r} is not a HITLRequest or HumanInterrupt; give one")


def _prompt(action: _Action) -> str:
    shown = ", ".join(f"{name}={value!r}" for name, value in action.arguments.items())
    text = f"{action.name}({shown}): {action.description or 'the graph wants to do this. Do it?'}"
    return f"{text} ({', '.join(action.allowed)})" if action.allowed else text


def _shaped(action: _Action, answer: Answer) -> dict[str, Any]:
    """Returns an answer as a decision of the newer format. An edit contains all or only the changed arguments."""
    if action.allowed and answer.kind not in action.allowed:
        allowed = ", ".join(action.allowed)
        raise AnswerRefused(action.name, f"{answer.kind!r} is not a decision of this graph; give one of {allowed}")
    match answer.kind:
        case "approve":
            return {"type": "approve"}
        case "edit":
            edited = {**action.arguments, **answer.value}
            return {"type": "edit", "edited_action": {"name": action.name, "args": edited}}
        case "reject":
            why = answer.comment or (answer.value if isinstance(answer.value, str) else None)
            return {"type": "reject", **({"message": why} if why else {})}
        case _:
            return {"type": "respond", "message": str(answer.value)}


def _as_older(decision: Mapping[str, Any]) -> dict[str, Any]:
    match decision:
        case {"type": "edit", "edited_action": {"name": name, "args": arguments}}:
            return {"type": "edit", "args": {"action": name, "args": arguments}}
        case {"type": "respond", "message": said}:
            return {"type": "response", "args": said}
        case {"type": "reject", "message": said}:
            return {"type": "ignore", "args": said}
        case _:
            return {"type": _OLDER[decision["type"]], "args": None}
