"""`killick contract`: explains contracts, and judges recorded intentions again. Read-only."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
from msgspec.structs import asdict
from rich.text import Text

from killick.cli import apps
from killick.cli import style as paint
from killick.cli.context import Shell, agent_option, command, since_option, tag_option
from killick.cli.exit_codes import CommandFailed, Exit, nearest
from killick.cli.selection import STATUSES, Selection, select
from killick.contracts.contract import Contract
from killick.contracts.one_sided import open_ends
from killick.contracts.rules import Rule
from killick.definitions.agents import AGENTS, Agent, read_contract
from killick.definitions.tools import TOOLS
from killick.errors import AgentUnknown, ContractRefused
from killick.history.backtest import Change, Judged, Rejudged, rejudge
from killick.history.phrasing import counted, listed

_RULE_CHARS: Final = 2_000
_STYLES: Final = {"accept": "green", "ask": "yellow", "reject": "red"}
_CHANGES: Final[dict[Change, str]] = {
    "stopped": "would be stopped", "asked": "asked", "passed": "accepted", "differs": "different from the record",
    "unknown": "not known any more",
}  # fmt: skip


# showing ------------------------------------------------------------------------------------------


@command("show", app=True)
@click.argument("target", metavar="FILE|AGENT|RUN")
def show_command(shell: Shell, target: str) -> None:
    """Show a contract, rule by rule: of a file, of an agent, or as a run recorded it.

    \b
    killick contract show claims.toml
    """
    found = list(_found(shell, target))
    shell.emit(
        [
            {
                "of": of,
                "digest": contract.digest,
                **contract.spec,
                "warnings": list(map(str, open_ends(contract.rules))),
            }
            for of, contract in found
        ]
    )
    for number, (of, contract) in enumerate(found):
        if number:
            shell.out.print()
        _show_contract(shell, contract, of)


def _show_contract(shell: Shell, contract: Contract, of: str) -> None:
    head = Text.assemble((contract.name, "bold"), f"  {counted(len(contract.rules), 'rule')}", (f"{of}", "dim"))
    head.append(f"\n  sha256 {contract.digest}", style="dim")
    shell.print(head)
    ends = open_ends(contract.rules)
    wide = min(max((len(rule.name) for rule in contract.rules), default=0), 24)
    for number, rule in enumerate(contract.rules, 1):
        lead = Text.assemble((f"{number:>4}  ", "dim"), (f"{paint.brief(rule.name, wide):<{wide}}  ", "cyan"))
        shell.row(
            lead, Text(paint.arguments({name: each for name, each in rule.spec.items() if name != "name"}, _RULE_CHARS))
        )
        for warning in (*_unknown_tools(rule), *(str(each) for each in ends if each.rule == rule.name)):
            shell.row(Text("      ~ ", style="yellow"), Text(warning))
    for role, names in contract.people.items():
        shell.print(Text.assemble((f"      {role}", "bold"), f" are {listed(names)}"))
    stops = f"      {contract.rejections} rejections in a row pause a run"
    shell.print(Text(stops, style="dim"))


def _unknown_tools(rule: Rule) -> Iterator[str]:
    """Warns of tools that a rule names and the app does not have. Without an app nothing is known of them."""
    named: list[str] = [*rule.tools, *(rule.terms if rule.kind in ("allow", "once", "after") else ())]
    for name in dict.fromkeys(named) if TOOLS else ():
        if name.isidentifier() and name not in (*TOOLS, "send", "update"):
            yield f"no tool is called {name}; {nearest(name, TOOLS, 'declare it, or mend the rule')}"


def _found(shell: Shell, target: str) -> Iterator[tuple[str, Contract]]:
    """The contracts that TARGET names, each with the agent or tool that it belongs to."""
    if _is_file(target):
        yield "", _read(target)
    elif ":" in target and not (shell.exists and shell.store.head(target) is not None):
        yield "", _declared(target)
    elif shell.exists and shell.store.head(target) is not None:
        bound = shell.log.state(target).fold.facts.contracts
        if not bound:
            raise CommandFailed(
                f"{target}: no contract is on record of it; `killick contract rejudge --contract FILE` tries one"
            )
        for each in sorted(bound, key=lambda each: each.of is not None):
            above = f", that of {each.of} above" if each.of is not None else ""
            contract = Contract.from_spec(shell.log.data(target, each.seq)["contract"])
            yield f", in force since event {each.seq}{above}", contract
    else:
        yield "", _of_agent(shell, target)


def _of_agent(shell: Shell, name: str) -> Contract:
    shell.load_app()
    try:
        return _contract_of(name, AGENTS.get(name))
    except AgentUnknown:
        if not shell.exists:
            raise CommandFailed(
                f"{name}: no such file, agent or run; name a TOML file, app.py:agent, or a run"
            ) from None
        shell.refuse_run(name)


def _declared(target: str) -> Contract:
    return _contract_of(target, apps.load(target))


def _contract_of(target: str, found: Any) -> Contract:
    contract = found.options.contract if isinstance(found, Agent) else found
    if contract is None:
        raise CommandFailed(f"{target}: the agent has no contract; give it one with @killick.agent(contract=…)")
    if not isinstance(contract, Contract):
        raise CommandFailed(f"{target}: is neither a contract nor an agent but {type(contract).__name__}")
    return contract


def _read(target: str) -> Contract:
    """The contract of a file. Functions that it names are also looked for in the file's folder."""
    path = Path(target)
    if not path.is_file():
        raise CommandFailed(f"{target}: no such file; name a contract in TOML, or app.py:name")
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return read_contract(path)
    except ContractRefused as refused:
        raise CommandFailed(f"{target}: {refused}") from None


def _is_file(target: str) -> bool:
    return target.endswith(".toml") or Path(target).is_file()


# judging again ------------------------------------------------------------------------------------


@command("rejudge", app=True)
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--contract", "target", metavar="FILE",
              help="Evaluate this contract: a TOML file or module:name. [those on record]")  # fmt: skip
@agent_option
@tag_option
@since_option
@click.option("--all", is_flag=True, help="All runs.")
def rejudge_command(shell: Shell, runs: tuple[str, ...], target: str | None, **limits: Any) -> Exit:
    """Evaluate contracts on the calls of recorded runs, and report each verdict that differs.

    Evaluates each call with the facts known just before it; calls nothing. With the recorded contracts this is an
    audit. A call marked with ? follows one that would have been stopped. Exits with 1 when a verdict differs.

    \b
    killick contract rejudge claim_17 --contract claims.toml
    killick contract rejudge --agent review --since 30d --contract claims.toml
    killick contract rejudge --all
    """
    shell.load_app()
    contract = None if target is None else _read(target) if _is_file(target) else _declared(target)
    selection = Selection(runs=runs, **limits)
    if not (runs or any(limits.values())):
        raise CommandFailed("rejudge what? Name runs, or select them with --all, --agent NAME, --tag TAG, --since 30d")
    chosen = select(shell, selection, "rejudge", STATUSES)
    found: list[Rejudged] = []
    refused: list[tuple[str, str]] = []
    for each in chosen:
        try:
            found.append(rejudge(shell.log, each.id, contract))
        except ContractRefused as error:
            refused.append((each.id, str(error)))
    if shell.json:
        documents = [{**asdict(each), "judged": each.changes, "intentions": len(each.judged)} for each in found]
        shell.emit({"runs": documents, "refused": [{"run": run, "reason": reason} for run, reason in refused]})
    else:
        _show_rejudged(shell, found, refused, contract)
    return Exit.DONE if all_agree(found) and not refused else Exit.BAD


def all_agree(found: Sequence[Rejudged]) -> bool:
    return all(each.agrees for each in found)


def _show_rejudged(
    shell: Shell, found: Sequence[Rejudged], refused: Sequence[tuple[str, str]], contract: Contract | None
) -> None:
    if not all_agree(found):
        table = paint.table(["RUN", "STEP", "THEN → NOW", "RULE", "CALL"])
        table.columns[-1].no_wrap, table.columns[-1].overflow = False, "fold"
        for each in found:
            for judged in each.changes:
                table.add_row(*_row(each, judged, shell.out.width))
        shell.out.print(table)
        shell.out.print()
        if any(judged.if_so for each in found for judged in each.changes):
            shell.note("? comes after something that would have been stopped, and might never have been")
    for each in found:
        for name in each.changed:
            shell.note(f"{each.run}: functions of the contract {name} have changed since; their current code is used")
    for run, reason in refused:
        shell.print(Text.assemble(("✗ ", "bold red"), f"{run}: {reason}"))
    sign, style = ("✓", "bold green") if all_agree(found) and not refused else ("✗", "bold red")
    shell.print(Text.assemble((f"{sign} ", style), summary(found, contract)))


def _row(found: Rejudged, judged: Judged, width: int) -> tuple[Text | str, ...]:
    then = "accept" if judged.then is None else judged.then.ruling
    now = "unknown" if judged.now is None else judged.now.ruling
    verdicts = Text.assemble((then, _STYLES.get(then, "dim")), " → ", (now, _STYLES.get(now, "dim")))
    rule, message = (judged.now.rule, judged.now.message) if judged.now is not None else (None, None)
    if judged.change == "unknown":
        message = "values that the rules look at were erased"
    elif judged.change == "differs" and judged.then is not None:
        message = f"{message or ''} (on record: {judged.then.rule or judged.then.ruling})".strip()
    step = Text(judged.step or "-").append("?" if judged.if_so else "", style="yellow")
    call = Text(paint.brief(f"{judged.name}({paint.arguments(judged.arguments, 200)})", max(width // 2, 30)))
    if message:
        call.append(f"\n{message}", style="dim")
    return found.run, step, verdicts, Text(rule or ""), call


def summary(found: Sequence[Rejudged], contract: Contract | None) -> str:
    """The result, in one line."""
    count = Counter(judged.change for each in found for judged in each.judged)
    of = f"of {counted(count.total(), 'intention')} in {counted(len(found), 'run')}"
    said = [f"{count[change]} {word}" for change, word in _CHANGES.items() if count[change]]
    if not said:
        return f"{of}: " + ("all verdicts are as recorded" if contract is None else "nothing would be different")
    first, *rest = said
    if contract is not None and not count["stopped"] and not count["unknown"]:
        first = first.replace(" ", " would be ", 1)
    return f"{of}: {', '.join([first, *rest])}"
