"""Asks a person at the terminal what a run waits for, so that a first try needs no second window."""

from __future__ import annotations

import contextlib
import getpass
import json
import sys
from typing import TYPE_CHECKING, Any

from kedge.errors import AnswerRefused, RunWaiting

if TYPE_CHECKING:
    from kedge.runtime.client import Client
    from kedge.runtime.views import Wait


def can_ask() -> bool:
    """Whether somebody sits at both ends."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def ask(client: Client, waiting: RunWaiting) -> bool:
    """Put the run's questions to whoever sits here. False: they would rather not answer now."""
    asked: list[Wait] = [wait for wait in waiting.waits if wait.verbs]
    for wait in asked:
        if not _ask(client, wait):
            return False
    return bool(asked)


def _ask(client: Client, wait: Wait) -> bool:
    sys.stderr.write(f"\n{wait.run}, step {wait.step}: {wait.prompt}\n")
    if wait.options:
        sys.stderr.write(f"  options: {', '.join(map(str, wait.options))}\n")
    while True:
        sys.stderr.write(f"  [{' / '.join(wait.verbs)}; empty: later] ")
        sys.stderr.flush()
        line = sys.stdin.readline().strip()
        if not line:
            return False
        verb, _, rest = line.partition(" ")
        found = [known for known in wait.verbs if known.startswith(verb)]
        if len(found) != 1:
            sys.stderr.write(f"  {verb!r} is none of {', '.join(wait.verbs)}\n")
            continue
        try:
            client.answer(wait.id, found[0], value=_value(rest), by=_somebody())  # type: ignore[arg-type]  # pyright: ignore
        except AnswerRefused as refused:
            sys.stderr.write(f"  {refused}\n")
            continue
        return True


def _value(text: str) -> Any:
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text) if text else None
    return text


def _somebody() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None
