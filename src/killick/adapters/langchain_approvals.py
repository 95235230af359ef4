"""Converts Killick's waits to the format of LangChain's `HumanInTheLoopMiddleware`, and its answers back.

A request is `{"action_requests": […], "review_configs": […]}`, answered by `{"decisions": […]}`. Imports nothing of
LangChain: both are plain dicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from killick.client import answers
from killick.client.client import AnyClient
from killick.engine.control.inbox import Verb
from killick.engine.views import Wait
from killick.errors import AnswerRefused

_SETTLES: Final[dict[str, Verb]] = {"approve": "not", "reject": "stop", "respond": "happened"}
"""The meaning of a decision on an unknown outcome: retry, leave, or it happened with this result."""

_SETTLING: Final = (
    "Check first, then choose. approve: it did not happen, do it again; reject: leave it; respond: it happened, and "
    "returned this"
)


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


def answer(
    client: AnyClient, waits: Sequence[Wait], response: Any, *, by: str | None = None, via: str | None = None
) -> None:
    """Passes the answers to a `hitl_request` to the waits, in order.

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


def _decided(response: Any) -> list[_Decision]:
    """Parses the decisions of a response. A single one needs no list."""
    match response:
        case {"decisions": [*decisions]}:
            return [_decision(each) for each in decisions]
        case {"type": _}:
            return [_decision(response)]
        case [*decisions]:
            return [_decision(each) for each in decisions]
        case _:
            raise AnswerRefused("approval", f"{response!r} is not a HITLResponse; give one")


def _decision(given: Any) -> _Decision:
    match given:
        case {"type": "approve"}:
            return _Decision("approve")
        case {"type": "edit", "edited_action": {"args": arguments}}:
            return _Decision("edit", arguments)
        case {"type": "respond", "message": said}:
            return _Decision("respond", said)
        case {"type": "reject"}:
            why = given.get("message")
            return _Decision("reject", None, why if isinstance(why, str) else None)
        case _:
            raise AnswerRefused("approval", f"{given!r} is not a decision; give type approve, edit, reject or respond")
