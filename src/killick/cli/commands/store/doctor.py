"""`killick store doctor`: prints the findings on one screen, with the next command. `namespaces` lists the tenants."""

from __future__ import annotations

from typing import Any

import click
from msgspec.structs import replace
from rich.filesize import decimal
from rich.text import Text

from killick.cli import secret_files
from killick.cli import style as paint
from killick.cli.context import Shell, command
from killick.cli.exit_codes import Exit
from killick.errors import StoreError, StoreFull
from killick.history.doctor import Diagnosis, Finding, examine
from killick.history.phrasing import counted
from killick.presenting.encoder import document
from killick.store import namespaces


@command("namespaces")
def namespaces_command(shell: Shell) -> None:
    """List the namespaces of a server: the stores of its tenants, and how large each is.

    \b
      killick store namespaces --store postgresql://db.internal/killick
    """
    found = namespaces(shell.url)
    shell.emit([{"namespace": name, "bytes": size} for name, size in found.items()])
    for name, size in found.items():
        shell.print(Text(f"{name or '(none)':<24}", "bold").append(decimal(size) if size else "", "dim"))


@command("doctor", app=True)
@click.option("--secrets", is_flag=True, help="List the credentials on record instead. Reads every event.")
def doctor_command(shell: Shell, secrets: bool) -> Exit:
    """Diagnose the store, and print the next move for each problem.

    Checks the configuration and lists stuck runs by reason; with an app, also runs of agents that it does not declare.
    Quick for any number of runs: `killick store verify` verifies the log itself. Changes nothing; exits with 1 when it
    finds a problem.

    With --secrets: lists run, step, field and kind of each credential that is on record, and never its value. With
    --json, a document in each line.
    """
    if secrets:
        return _list_credentials(shell)
    try:
        shell.load_app()
        try:
            _ = shell.store
        except StoreFull:
            shell.open_read_only()
        found = examine(shell.log, clock=shell.clock, knows=_is_declared if shell.app else None)
        found = replace(found, conditions=(*found.conditions, secret_files.condition()))
    except (StoreError, OSError) as error:
        shell.emit({"store": shell.shown_url, "wrong": 1, "unreachable": str(error)})
        shell.say("✗", (shell.shown_url, "bold"), f"  cannot be examined: {error}")
        return Exit.BAD
    report: dict[str, Any] = document(found)
    for finding, data in zip(found.findings, report["findings"], strict=True):
        data["next"] = _typed(shell, finding)
    shell.emit({"wrong": found.wrong, **report})
    _draw(shell, found)
    return Exit.BAD if found.wrong else Exit.DONE


def _list_credentials(shell: Shell) -> Exit:
    from killick.history.credential_scan import scan

    runs: set[str] = set()
    count = 0
    for each in scan(shell.log):
        shell.emit_line(each)
        at = f"step {each.step}" if each.step else f"@{each.seq}" if each.seq else ""
        if not shell.json:
            shell.print(Text.assemble((each.run, "bold"), f"  {at}  {each.field}  ", (each.kind, "red")))
        runs.add(each.run)
        count += 1
    if count:
        remedy = f"rotate them; {shell.typed('store', 'erase')} removes their values from the record"
        shell.note(f"{counted(count, 'credential')} in {counted(len(runs), 'run')}: {remedy}")
        return Exit.BAD
    shell.note("no credential was found")
    return Exit.DONE


def _is_declared(agent: str) -> bool:
    from killick.definitions.agents import AGENTS

    return agent in AGENTS.names()


def _typed(shell: Shell, finding: Finding) -> list[str]:
    """The commands to type; those that run agents name the app."""
    first = finding.runs[0]
    typed: list[str] = []
    for words in finding.next:
        match words[0]:
            case "run":
                typed.append(shell.continue_command(first.run, first.agent))
            case "worker":
                typed.append(shell.worker_for(first.agent))
            case _:
                typed.append(shell.typed(*words))
    return typed


def _draw(shell: Shell, found: Diagnosis) -> None:
    wide = 2 + max(len(name) for name in ("versions", *(each.name for each in found.conditions)))
    good, bad = Text("✓ ", "green"), Text("✗ ", "bold red")

    def row(name: str, body: str | Text) -> None:
        shell.row(Text.assemble(good, (f"{name:<{wide}}", "dim")), body)

    shell.print(Text.assemble((shell.place, "bold"), (f"  {found.id}", "dim")))
    row("versions", f"Killick {found.killick}, Python {found.python}")
    for each in found.conditions:
        if each.wrong is None:
            row(each.name, each.value)
        else:
            body = Text.assemble((each.value, "bold"), (f": {each.wrong}", "red"))
            shell.row(Text.assemble(bad, (f"{each.name:<{wide}}", "bold")), body)
    counts = [Text.assemble(f"{count:,} ", (name, paint.STYLES.get(name, ""))) for name, count in found.runs.items()]
    row("runs", Text(", ").join(counts) if counts else "none yet")
    for finding in found.findings:
        _draw_finding(shell, finding)
    shell.print("")
    if found.unseen:
        shell.row("  not checked: ", Text("; ".join(found.unseen), style="dim"))
    if found.wrong:
        shell.print(Text.assemble(bad, f"{counted(found.wrong, 'thing')} {'is' if found.wrong == 1 else 'are'} wrong"))
    else:
        verify = shell.typed("store", "verify")
        shell.say("✓", "nothing is wrong; ", (verify, "green"), " proves the record")


def _draw_finding(shell: Shell, finding: Finding) -> None:
    sign = ("✗ ", "bold red") if finding.wrong else ("~ ", "yellow")
    shell.print("", Text.assemble(sign, (f"{finding.count:,} {finding.what}", "bold")))
    shell.row("  ", finding.means)
    runs, agents = (max(len(getattr(each, name)) for each in finding.runs) for name in ("run", "agent"))
    for each in finding.runs:
        since = paint.span(max(shell.clock.now_us() - each.since_us, 0))
        line = Text.assemble("    ", (f"{each.run:<{runs}}", "bold"), f"  {each.agent:<{agents}}")
        line.append(f"  {since:>7}  {paint.brief(each.about, 200)}".rstrip(), style="dim")
        line.truncate(shell.out.width, overflow="ellipsis")
        shell.print(line)
    if finding.count > len(finding.runs):
        shell.print(Text(f"    and {finding.count - len(finding.runs):,} more", "dim"))
    shell.print(*(Text(f"  {typed}", "green") for typed in _typed(shell, finding)))
