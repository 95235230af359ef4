"""Puts a run's questions to the person at the terminal. The command line alone asks: a server has a terminal too."""

from __future__ import annotations

import sys
from typing import Any, Final, cast

from killick.cli.context import Shell, Unparsed, current_user, parsed
from killick.cli.wait_view import wait_lines
from killick.engine.approval import argument_edits
from killick.engine.views import Wait
from killick.errors import AlreadyAnswered, AnswerRefused, RunWaiting
from killick.presenting import approvals

_MEANING: Final = {
    "reject": "reject, perhaps with why",
    "edit": "edit VALUE",
    "respond": "respond VALUE",
    "happened": "happened, with its result if known",
    "not": "not, it did not happen",
}


def can_ask() -> bool:
    """Whether standard input and standard error are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(shell: Shell, waiting: RunWaiting) -> bool:
    """Ask the person at the terminal the run's questions. False: they put it off, or may not answer."""
    by = current_user()
    asked: list[Wait] = [wait for wait in waiting.waits if wait.verbs]
    for wait in asked:
        if approvals.why_not(shell.client, wait, by) is not None or not _ask_one(shell, wait, by=by):
            return False
    return bool(asked)


def _ask_one(shell: Shell, wait: Wait, *, by: str | None) -> bool:
    """Put one question, until there is an answer that fits. False: later."""
    shell.print("", *wait_lines(shell, wait, shell.err.width), err=True)
    if wait.options:
        shell.print(f"  options: {', '.join(map(str, wait.options))}", err=True)
    means = _MEANING if wait.rule is None else {**_MEANING, "edit": f"edit {argument_edits.example(wait)}"}
    shell.note(f"  {'; '.join(means.get(verb, verb) for verb in wait.verbs)}; Enter: later")
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return False
        verb, _, rest = line.partition(" ")
        found = [known for known in wait.verbs if known.startswith(verb)]
        if line in map(str, wait.options) and "respond" in wait.verbs:
            found, rest = ["respond"], line
        if len(found) != 1:
            shell.print(f"  {verb!r} is none of {', '.join(wait.verbs)}", err=True)
            continue
        try:
            comment = rest or None if found[0] in ("approve", "reject") else None
            value = None if comment or not rest else typed(wait, rest)
            if found[0] == "edit" and wait.rule is not None:
                value = argument_edits.written(wait, rest)
            shell.client.answer(wait, found[0], value=value, by=by, comment=comment)  # type: ignore[arg-type]  # pyright: ignore
        except AlreadyAnswered as first:
            shell.print(f"  {first}", err=True)
        except AnswerRefused as refused:
            shell.print(f"  {refused}", err=True)
            continue
        return True


def typed(wait: Wait | None, text: str) -> Any:
    """A value as it was asked for: where a text is wanted, 42 is one too."""
    found = parsed(text)
    schema = cast("dict[str, Any]", wait.schema if wait is not None and wait.schema else {})
    options = wait.options if wait is not None else ()
    if isinstance(found, Unparsed) or schema.get("type") == "string" or (found not in options and text in options):
        return text
    return found
