"""Puts a run's questions to the person at the terminal. The command line alone asks: a server has a terminal too."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from killick.cli import style
from killick.cli.context import current_user
from killick.client.inbox import agreement
from killick.engine.approval import argument_edits
from killick.errors import AlreadyAnswered, AnswerRefused, RunWaiting
from killick.presenting import approvals
from killick.sanitizer import visible

if TYPE_CHECKING:
    from killick.client.client import Client
    from killick.engine.views import Wait

_MEANING: Final = {
    "reject": "reject, perhaps with why",
    "edit": "edit VALUE",
    "respond": "respond VALUE",
    "happened": "happened, with its result if known",
    "not": "not, it did not happen",
}
_BOLD, _DIM = "1", "2"


def can_ask() -> bool:
    """Whether standard input and standard error are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(client: Client, waiting: RunWaiting) -> bool:
    """Ask the person at the terminal the run's questions. False: they put it off, or may not answer."""
    by = current_user()
    asked: list[Wait] = [wait for wait in waiting.waits if wait.verbs]
    for wait in asked:
        if approvals.why_not(client, wait, by) is not None or not ask_one(client, wait, by=by):
            return False
    return bool(asked)


class Given(NamedTuple):
    """An answer, and the length of the run's log before it. Without a verb another person answered first."""

    verb: str | None
    value: Any
    since: int


def ask_one(client: Client, wait: Wait, *, by: str | None) -> Given | None:
    """Put one question, until there is an answer that fits. None: later."""
    asked = argument_edits.call(wait.intention) if wait.rule is not None else wait.prompt or wait.name
    _tell(f"\n{_shade(visible(asked), _BOLD)}\n")
    rule = approvals.by_rule(wait.rule)
    if wait.rule is not None and (reason := " ".join(filter(None, (wait.reason, f"({rule})" * bool(rule))))):
        _tell(f"  {argument_edits.visible(reason)}\n")
    if wait.because is not None:
        _tell(f"  the agent: {argument_edits.visible(str(wait.because))}\n")
    about = f"{wait.run}, step {wait.step}" + (f", asked of {', '.join(wait.to)}" if wait.to else "")
    if wait.need > 1:
        about += f", {agreement(wait.need, wait.votes)}"
    if wait.deadline_us is not None:
        left = style.ago(wait.deadline_us, client.runtime.clock.now_us())
        about += f", until {style.moment(wait.deadline_us)} ({left})"
    _tell(_shade(f"  {visible(about)}\n", _DIM))
    intention = cast("dict[str, Any] | None", wait.intention)
    # The question about an effect in doubt already contains the call.
    if wait.rule is None and intention and not (wait.prompt or "").startswith(f"{intention.get('tool')}("):
        _tell(f"  {argument_edits.call(intention)}\n")
    if wait.options:
        _tell(visible(f"  options: {', '.join(map(str, wait.options))}\n"))
    means = _MEANING if wait.rule is None else {**_MEANING, "edit": f"edit {argument_edits.example(wait)}"}
    _tell(_shade(f"  {'; '.join(means.get(verb, verb) for verb in wait.verbs)}; Enter: later\n", _DIM))
    while True:
        _tell("> ")
        line = sys.stdin.readline().strip()
        if not line:
            return None
        verb, _, rest = line.partition(" ")
        found = [known for known in wait.verbs if known.startswith(verb)]
        if line in map(str, wait.options) and "respond" in wait.verbs:
            found, rest = ["respond"], line
        if len(found) != 1:
            _tell(f"  {verb!r} is none of {', '.join(wait.verbs)}\n")
            continue
        given = Given(found[0], None, client.runtime.log.head(wait.run).seq)
        try:
            comment = rest or None if found[0] in ("approve", "reject") else None
            value = None if comment else _value(rest, wait)
            if found[0] == "edit" and wait.rule is not None:
                value = argument_edits.written(wait, rest)
            client.answer(wait, found[0], value=value, by=by, comment=comment)  # type: ignore[arg-type]  # pyright: ignore
        except AlreadyAnswered as first:
            _tell(visible(f"  {first}\n"))
            return given._replace(verb=None)
        except AnswerRefused as refused:
            _tell(visible(f"  {refused}\n"))
            continue
        return given._replace(value=value)


def _value(text: str, wait: Wait) -> Any:
    if text and text not in wait.options:
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)
    return text or None


def _tell(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _shade(text: str, style: str) -> str:
    return text if os.environ.get("NO_COLOR") else f"\x1b[{style}m{text}\x1b[0m"
