"""Starts and commands runs at the request of an external engine. An engine may repeat a request: it counts once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from killick.client import answers
from killick.client.client import AnyClient
from killick.engine.control.inbox import ANSWER, VOTE, body_of
from killick.errors import (
    AlreadyAnswered,
    AnswerRefused,
    DeclarationRefused,
    RunMismatch,
    RunUnknown,
    TimeRefused,
    ValueRefused,
)
from killick.store.records import ENDED

REFUSALS: Final = (AnswerRefused, DeclarationRefused, RunMismatch, RunUnknown, TimeRefused, ValueRefused)
"""Errors of a request that would be the same again."""

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "answer": ("verb", "value", "step", "by", "comment"), "send": ("name", "body", "by"),
    "pause": ("by", "because"), "resume": ("by", "because"), "cancel": ("by", "because", "compensate"),
}  # fmt: skip
"""The commands, and the fields of each. An answer needs `step` where several questions are open."""


@contextlib.contextmanager
def final(error: Callable[[Exception], Exception]) -> Iterator[None]:
    """Raises an engine's own error, which it does not retry, in place of a refusal."""
    try:
        yield
    except REFUSALS as refused:
        raise error(refused) from None


def refusal_of(command: str, given: Mapping[str, Any]) -> str | None:
    """Returns why the fields of a command do not fit, or None."""
    needed = {"answer": "verb", "send": "name"}.get(command)
    if unknown := [name for name in given if name not in COMMANDS[command]]:
        return f"{command} takes {', '.join(COMMANDS[command])}, not {', '.join(unknown)}"
    return f"{command} needs a {needed}" if needed is not None and not isinstance(given.get(needed), str) else None


async def obey(client: AnyClient, run: str, command: str, given: Mapping[str, Any] | None, *, request: str) -> None:
    """Carries out a command for a run. `request` identifies it. Raises one of `REFUSALS`."""
    given = dict(given or {})
    if (why := refusal_of(command, given)) is not None:
        raise AnswerRefused(run, why)
    if command == "answer":
        await asyncio.to_thread(_answer, client, run, given, request)
    elif command == "send":
        name, body, by = given["name"], given.get("body"), given.get("by")
        await client.as_async().send(run, name, body, id=request, by=by)
    elif command != "cancel" or (row := client.runtime.store.index(run)) is None or row.status not in ENDED:
        await getattr(client.as_async(), command)(run, **given)


def _answer(client: AnyClient, run: str, given: Mapping[str, Any], request: str) -> None:
    runtime = client.runtime
    wait = f"{run}:{given['step']}" if given.get("step") else run
    try:
        by, comment = given.get("by"), given.get("comment")
        answered = answers.answer(
            runtime.engine, wait, given["verb"], given.get("value"), by=by, comment=comment, saw=None, tx=None,
            via=request,
        )  # fmt: skip
    except AlreadyAnswered:
        recorded = [each for each in runtime.store.messages(run) if each.name in (ANSWER, VOTE)]
        if all(body_of(runtime.log, each).get("via") != request for each in recorded):
            raise
    else:
        runtime.notify(answered)
