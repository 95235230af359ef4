"""`killick store doctor`: what was found, on one screen, with the command to type next. Finds nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.text import Text

from killick.cli import apps
from killick.cli import style as paint
from killick.cli.commands.store.maintenance import say
from killick.cli.context import Shell, command
from killick.cli.exit_codes import Exit
from killick.cli.style import many
from killick.definitions.agents import AGENTS
from killick.errors import AgentUnknown, StoreError
from killick.history.doctor import Diagnosis, Finding, Named, examine
from killick.presenting.encoder import document
from killick.store.records import Condition


@command("doctor", app=True)
def doctor_command(shell: Shell) -> Exit:
    """Diagnose the store, and print the next move for each problem.

    Checks the configuration and lists stuck runs by reason; with an app, also runs of agents that it does not declare.
    Quick for any number of runs: `killick store verify` verifies the log itself. Changes nothing; exits with 1 when it
    finds a problem.
    """
    try:
        kd = shell.client
        shell.load_app()
        found = examine(kd.runtime.log, clock=kd.runtime.clock, knows=_is_declared if shell.app else None)
    except StoreError as error:
        if shell.json:
            shell.emit({"store": shell.url, "wrong": 1, "unreachable": str(error)})
        else:
            say(shell, "✗", (shell.url, "bold"), f"  cannot be looked at: {error}")
        return Exit.BAD
    if shell.json:
        shell.emit(_data(shell, found))
    else:
        _Screen(shell).draw(found)
    return Exit.BAD if found.wrong else Exit.DONE


def _is_declared(agent: str) -> bool:
    try:
        AGENTS.get(agent)
    except AgentUnknown:
        return False
    return True


def _data(shell: Shell, found: Diagnosis) -> dict[str, Any]:
    told: dict[str, Any] = document(found)
    for finding, data in zip(found.findings, told["findings"], strict=True):
        data["next"] = _typed(shell, finding)
    return {"wrong": found.wrong, **told}


def _typed(shell: Shell, finding: Finding) -> list[str]:
    """The commands to type; those that run agents name the app."""
    first = finding.runs[0]
    typed: list[str] = []
    for words in finding.next:
        match words[0]:
            case "run":
                typed.append(shell.goes_on(first.run, first.agent))
            case "worker":
                typed.append(shell.typed("worker", *_app_of(shell, first.agent)))
            case _:
                typed.append(shell.typed(*words))
    return typed


def _app_of(shell: Shell, agent: str) -> tuple[str, ...]:
    """The arguments by which a worker finds an agent: none, where the settings name the app."""
    if shell.app:
        named: str | None = click.get_current_context().params.get("app")
        return (named,) if named else ()
    here = [each for each in apps.declared_here() if each.endswith(f":{agent}")]
    return (here[0].rpartition(":")[0] if here else "APP.py",)


class _Screen:
    """Draws what was found, as wide as there is room."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._now_us = shell.clock.now_us()
        self._label = 0

    def draw(self, found: Diagnosis) -> None:
        self._label = 2 + max(len(name) for name in ("versions", *(each.name for each in found.conditions)))
        self._line("", (found.store, "bold"), (f"  {found.id}", "dim"))
        self._row("versions", f"Killick {found.killick}, Python {found.python}")
        for condition in found.conditions:
            self._condition(condition)
        counts = Text(", ").join(
            Text.assemble(f"{count:,} ", (name, paint.STYLES.get(name, ""))) for name, count in found.runs.items()
        )
        self._row("runs", counts if found.runs else Text("none yet"))
        for finding in found.findings:
            self._finding(finding)
        self._last(found)

    def _condition(self, condition: Condition) -> None:
        if condition.wrong is None:
            self._row(condition.name, condition.value)
            return
        body = Text.assemble((condition.value, "bold"), (f": {condition.wrong}", "red"))
        self._row(condition.name, body, sign="✗")

    def _row(self, name: str, body: str | Text, sign: str = "✓") -> None:
        """A label and its text."""
        style = "bold red" if sign == "✗" else "green"
        lead = Text.assemble((f"{sign} ", style), (f"{name:<{self._label}}", "dim" if sign == "✓" else "bold"))
        text = Text(body) if isinstance(body, str) else body
        for line in paint.wrapped(lead, text, self._shell.out.width):
            self._shell.out.print(line, soft_wrap=True)

    def _finding(self, finding: Finding) -> None:
        out = self._shell.out
        out.print()
        style = "bold red" if finding.wrong else "yellow"
        self._line("", ("✗ " if finding.wrong else "~ ", style), (f"{finding.count:,} {finding.what}", "bold"))
        for line in paint.wrapped(Text("  "), Text(finding.means), out.width):
            out.print(line, soft_wrap=True)
        self._named(finding.runs)
        if finding.count > len(finding.runs):
            self._line("    ", (f"and {finding.count - len(finding.runs):,} more", "dim"))
        for typed in _typed(self._shell, finding):
            self._line("  ", (typed, "green"))

    def _named(self, runs: Sequence[Named]) -> None:
        """A line for each run: which, of what, since when, and what is to be said of it alone."""
        since = [paint.span(max(self._now_us - each.since_us, 0)) for each in runs]
        widths = [
            max(map(len, column)) for column in ([each.run for each in runs], [each.agent for each in runs], since)
        ]
        for each, span in zip(runs, since, strict=True):
            line = Text.assemble("    ", (f"{each.run:<{widths[0]}}", "bold"), f"  {each.agent:<{widths[1]}}")
            line.append(f"  {span:>{widths[2]}}  {paint.brief(each.about, 200)}", style="dim")
            line.rstrip()
            line.truncate(self._shell.out.width, overflow="ellipsis")
            self._shell.out.print(line, soft_wrap=True)

    def _last(self, found: Diagnosis) -> None:
        out = self._shell.out
        out.print()
        if found.unseen:
            lead = Text("  not looked at: ", style="dim")
            for line in paint.wrapped(lead, Text("; ".join(found.unseen), style="dim"), out.width):
                out.print(line, soft_wrap=True)
        if found.wrong:
            told = f"{many(found.wrong, 'thing')} {'is' if found.wrong == 1 else 'are'} wrong"
            self._line("", ("✗ ", "bold red"), told)
        else:
            say(
                self._shell,
                "✓",
                "nothing is wrong; ",
                (self._shell.typed("store", "verify"), "green"),
                " proves the record",
            )

    def _line(self, lead: str, *parts: str | tuple[str, str]) -> None:
        self._shell.out.print(Text.assemble(lead, *parts), soft_wrap=True)
