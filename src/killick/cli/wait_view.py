"""How an open wait looks on a terminal: its question, its addressees, its deadline, and the commands that end it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, Final, cast

from rich.text import Text

from killick.cli import style as paint
from killick.cli.context import Shell
from killick.client.inbox import addressees, agreement
from killick.engine.approval import argument_edits
from killick.engine.views import Wait, key_of, needs_value
from killick.history.timeline import timeline
from killick.presenting import approvals
from killick.sanitizer import unmixed

NEEDS_VALUE: Final = ("edit", "respond")


def commands(shell: Shell, wait: Wait) -> list[str]:
    """The commands that end a wait."""
    return [shell.typed(*words) for words in _commands(wait)]


def _commands(wait: Wait) -> list[tuple[str, ...]]:
    if wait.waits_for == "event":
        return [("message", "send", wait.run, wait.name, "BODY")]
    if wait.waits_for == "child":
        return [("show", wait.name)]
    chosen = [("respond", "--value", str(option)) for option in wait.options if "respond" in wait.verbs]
    verbs = [verb for verb in wait.verbs if verb != "respond" or not chosen]
    takes: list[tuple[str, ...]] = []
    for verb in verbs:
        takes += [(verb,)] if verb not in NEEDS_VALUE else []
        if verb == "edit" and wait.rule is not None:
            takes.append((verb, "--set", argument_edits.example(wait)))
        elif verb in (*NEEDS_VALUE, "happened"):
            takes.append((verb, "--value", "VALUE"))
    if needs_value(wait):
        takes = sorted((words for words in takes if words != ("happened",)), key=lambda words: words[0] != "happened")
    return [("answer", wait.id, *words) for words in (*chosen, *takes)]


def print_wait(shell: Shell, wait: Wait, *, err: bool = False) -> None:
    """A wait: its question, its addressees, its deadline, and the command that answers it."""
    width = (shell.err if err else shell.out).width
    moves = (Text("  ").append_text(line) for line in move_lines(shell, wait, width - 2))
    shell.print(*wait_lines(shell, wait, width), *moves, err=err)


def wait_lines(shell: Shell, wait: Wait, width: int) -> Iterator[Text]:
    """A wait: its question after its id, then its addressees and its deadline."""
    lead = Text(f"{wait.id}  ", style="bold cyan")
    lead.append("" if wait.prompt or wait.rule is not None else "waits ", style="not cyan")
    yield from paint.wrapped(lead, question(wait), width)
    for line in details(shell, wait):
        yield from paint.wrapped(Text("  "), line, width)


def question(wait: Wait) -> Text:
    """The question of a wait; the call that is to be approved; or the event that it waits for."""
    if wait.rule is not None:
        return Text(argument_edits.call(wait.intention), style="bold")
    what = {"event": f"a message {wait.name!r}", "child": f"its child {wait.name}"}.get(wait.waits_for, wait.name)
    return Text(unmixed(wait.prompt or f"for {what}"), style="bold")


def details(shell: Shell, wait: Wait) -> Iterator[Text]:
    """Why a wait asks, who is asked since when and until when, and the approvals so far."""
    now = shell.clock.now_us()
    if wait.rule is not None:
        rule = approvals.by_rule(wait.rule)
        reason = Text(argument_edits.seen(wait.reason or f"{wait.run} wants to do this"))
        yield reason.append(f" ({rule})" if rule else "", style="dim")
        if wait.because is not None:
            yield Text(f"the agent: {argument_edits.seen(str(wait.because))}")
    who = addressees(wait.to, wait.may) if wait.rule is not None else ", ".join(wait.to)
    asked = f"asked of {who}" if who else "asked" if wait.verbs else "began"
    about = Text(f"{asked} {paint.ago(wait.since_us, now)}", style="dim")
    if wait.round:
        about.append(f", {approvals.passed_on(timeline(shell.log, wait.run).step(wait.step))}")
    agreed = (Text(agreement(wait.need, wait.votes), style="yellow"), _until(wait, now))
    ends = Text("; ", style="dim").join(filter(None, agreed))
    if wait.rule is None:
        about.append("; " if ends else "").append_text(ends)
    yield about
    if wait.rule is not None and ends:
        yield ends
    if wait.rule is None and (would := intended(wait)) is not None:
        yield Text(f"about {would}")
    if (key := key_of(wait.intention)) is not None:
        yield Text(f"look for the idempotency key {key} where it would have happened")


def _until(wait: Wait, now: int) -> Text:
    if wait.deadline_us is None:
        return Text()
    left = wait.deadline_us - now
    style = "bold red" if left <= 0 else "yellow" if left < 3_600_000_000 else "dim"
    return Text(f"until {paint.moment(wait.deadline_us)} ({paint.ago(wait.deadline_us, now)})", style=style)


def move_lines(shell: Shell, wait: Wait, width: int) -> list[Text]:
    """The first command on a line to copy, and the alternatives after or below it."""
    first, *others = _commands(wait) or [("store", "verify", wait.run)]
    line = Text().append(shell.typed(*first), style="green")
    or_else = ", ".join(shlex.join(words[2:]) for words in others)
    also = Text(f"(or {or_else})", style="dim") if others else Text()
    if line.cell_len + also.cell_len + 2 <= width:
        return [line.append("  " * bool(others)).append_text(also)]
    return [line, *paint.wrapped(Text(), also, width)]


def intended(wait: Wait) -> str | None:
    """The call that a wait is about, as it would be written, where the question does not say it already."""
    found = wait.intention
    if not isinstance(found, dict):
        return None
    data = cast("dict[str, Any]", found)
    return None if (wait.prompt or "").startswith(f"{data.get('tool')}(") else argument_edits.call(data)
