"""`killick find`: decisions, calls, failures, effects and answers across all runs, newest first."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from killick.cli import style as paint
from killick.cli.context import Shell, agent_option, command, limit_option, named
from killick.cli.progress import progress
from killick.errors import StoreFull, StoreReadOnly
from killick.history.search.query import Finder
from killick.history.search.results import (
    Findings,
    FoundAnswer,
    FoundCall,
    FoundDecision,
    FoundEffect,
    FoundFailure,
    SearchHit,
    Standing,
)

WHY_LINES_MAX: Final = 3
"""Lines of a reason that are shown; --json has all of it."""

_STANDING: Final = {"stands": ("✓", "green"), "undone": ("↶", "magenta"), "in_doubt": ("?", "bold red")}


def _question(name: str) -> Callable[[Callable[..., Findings[Any]]], click.Command]:
    """Declares a query: a function of a Shell, its own options and the common conditions."""

    def declare(ask: Callable[..., Findings[Any]]) -> click.Command:
        own = {parameter.name for parameter in getattr(ask, "__click_params__", ())}

        @functools.wraps(ask)
        def asked(
            shell: Shell, agent: str | None, run: str | None, since: str | None, until: str | None, limit: int,
            everything: bool, **asking: Any,
        ) -> None:  # fmt: skip
            now = shell.clock.now_us()
            within = {
                "agent": agent,
                "run": None if run is None else shell.run(run),
                "since_us": None if since is None else paint.moment_of(since, now),
                "until_us": None if until is None else paint.moment_of(until, now),
                "limit": None if everything else limit,
            }
            _catch_up(shell)
            _print(shell, name, ask(shell, **asking, **within))

        wrapped: Any = asked
        for option in reversed((
            agent_option,
            click.option("--run", metavar="RUN", help="Only this run."),
            click.option("--since", metavar="WHEN", help="Only events since this time."),
            click.option("--until", metavar="WHEN", help="Only events before this time."),
            limit_option(20),
            click.option("--all", "everything", is_flag=True, help="List all."),
        )):  # fmt: skip
            wrapped = option(wrapped)
        made = command(name)(wrapped)
        # A query's own options come first in its help.
        made.params.sort(key=lambda parameter: parameter.name not in own)
        return made

    return declare


@_question("decisions")
@click.option("--question", metavar="TEXT", help="The question.")
@click.option("--choice", metavar="VALUE", help="The chosen option.")
@click.option("--by", metavar="WHO", help="The decider: agent, model, or a name.")
@click.option("--because", metavar="TEXT", help="A part of the reason.")
def decisions_command(shell: Shell, **asked: Any) -> Findings[FoundDecision]:
    """Find decisions: question, options, choice, decider and reason.

    \b
      killick find decisions --choice refund --by model
    """
    return Finder(shell.log).decisions(**asked)


_where: Final = click.option(
    "--where", "conditions", metavar="NAME=VALUE", multiple=True, help="An argument; a.b=value for a nested one."
)


@_question("calls")
@click.argument("tool", required=False)
@_where
def calls_command(shell: Shell, tool: str | None, conditions: tuple[str, ...], **within: Any) -> Findings[FoundCall]:
    """Find tool calls and their outcomes.

    \b
      killick find calls send_email --where to=ada@x.org
    """
    return Finder(shell.log).calls(tool, where=_conditions(conditions), **within)


@_question("failures")
@click.argument("kind", required=False)
@click.option("--tool", metavar="NAME", help="Only attempts of this tool.")
def failures_command(shell: Shell, kind: str | None, tool: str | None, **within: Any) -> Findings[FoundFailure]:
    """Find failures. KIND is the type of the error or a base of it, or timeout, died, cancelled, expired.

    \b
      killick find failures ConnectionError --since 1d
    """
    return Finder(shell.log).failures(kind, tool=tool, **within)


@_question("effects")
@click.argument("tool", required=False)
@_where
@click.option("--standing", "status", flag_value="stands", help="Only effects in force.")
@click.option("--undone", "status", flag_value="undone", help="Only undone effects.")
@click.option("--in-doubt", "status", flag_value="in_doubt", help="Only effects with an unknown outcome.")
def effects_command(
    shell: Shell, tool: str | None, conditions: tuple[str, ...], status: Standing | None, **within: Any
) -> Findings[FoundEffect]:
    """Find effects. A rewound effect counts until it is undone.

    \b
      killick find effects pay --standing --where iban=DE02
    """
    return Finder(shell.log).effects(tool, status=status, where=_conditions(conditions), **within)


@_question("answers")
@click.option("--by", metavar="WHO", help="The person who answered.")
@click.option("--verb", metavar="VERB", help="approve, reject, edit, respond, happened, not or stop.")
@click.option("--to", metavar="WHO", help="A person or role that was asked.")
def answers_command(shell: Shell, **asked: Any) -> Findings[FoundAnswer]:
    """Find people's answers and comments.

    \b
      killick find answers --by ann --verb approve
    """
    return Finder(shell.log).answers(**asked)


def _conditions(texts: tuple[str, ...]) -> dict[str, Any]:
    """`name=value` as people write it: a value is compared as text, or as a number; null: nothing is there."""
    return {name: None if value == "null" else value for name, value in map(named, texts)}


def _catch_up(shell: Shell) -> None:
    """Indexes new events before the query does, to show the progress. A read-only store is scanned."""
    with contextlib.suppress(StoreReadOnly, StoreFull), progress(shell) as tell:
        Finder(shell.log).catch_up(lambda events: tell("indexing new events", events, 0))


# printing -----------------------------------------------------------------------------------------


def _print(shell: Shell, what: str, found: Findings[Any]) -> None:
    if found.scanned is not None:
        shell.note(f"read every log, since the index cannot be written: {found.scanned}")
    for run in found.unread:
        shell.note(f"{run}: could not be read whole; killick store verify says why")
    shell.emit({"found": list(found), "more": found.more, "scanned": found.scanned, "unread": found.unread})
    for hit in found:
        shell.print(*_lines(hit, shell.out.width))
    if not found:
        shell.out.print(f"no {what} found", style="dim")
    elif found.more and not shell.json:
        shell.note(f"the newest {len(found)} {what}; --limit N or --all shows more")


def _lines(hit: SearchHit, width: int) -> Iterator[Text]:
    """Position and time on the first line, then the content, then the reason."""
    step = "" if hit.step is None else f"  step {hit.step}"
    first = Text.assemble((paint.moment(hit.at_us), "dim"), "  ", (hit.run, "bold"), step, (f"  {hit.agent}", "dim"))
    if hit.rewound:
        first.append("  rewound since", "magenta")
    first.truncate(width, overflow="ellipsis")
    yield first
    what, *why = _SAYS[type(hit)](hit, width - 4)
    what.truncate(width - 2, overflow="ellipsis")
    yield Text("  ").append_text(what)
    for reason in filter(None, why):
        yield from paint.wrapped(Text("    "), reason, max(width, 24), WHY_LINES_MAX)


def _said(label: str, value: Any, style: str = "") -> Text:
    """A reason on its own lines; none where there is none."""
    if value in (None, "", ()):
        return Text("")
    return Text.assemble((label, "dim"), (paint.brief(value, 2_000), style))


def _call(tool: str, arguments: Any, width: int) -> str:
    return f"{tool}({paint.arguments(arguments, max(width - len(tool) - 2, 10))})"


def _decision(hit: FoundDecision, width: int) -> list[Text]:
    half = max(width // 2, 20)
    what = Text.assemble(paint.brief(hit.question, half), " → ", (paint.brief(hit.choice, half), "bold"))
    what.append(f"  by {hit.by}", "dim")
    return [what, _said("because: ", hit.because), _said("of: ", _options(hit.options), "dim")]


def _options(options: Any) -> str | None:
    listed: tuple[Any, ...] = tuple(options) if isinstance(options, list | tuple) else ()  # pyright: ignore
    return " | ".join(paint.brief(each, 30) for each in listed) or None


def _called(hit: FoundCall, width: int) -> list[Text]:
    sign = (f"{paint.SIGNS.get(hit.status, '·')} ", paint.STYLES.get(hit.status, ""))
    tries = f"  {hit.attempts} attempts" if hit.attempts > 1 else ""
    state = "" if hit.status == "done" else f"  {hit.status.replace('_', ' ')}"
    room = width - len(tries) - len(state) - 2
    what = Text.assemble(sign, _call(hit.tool, hit.arguments, room), (state, sign[1]), (tries, "yellow"))
    return [what, _said("→ ", hit.output if hit.status == "done" else None)]


def _failed(hit: FoundFailure, width: int) -> list[Text]:
    place = {"run": "the run failed", "step": str(hit.tool), "attempt": f"{hit.tool}, attempt {hit.attempt}"}[hit.of]
    return [Text.assemble(("✗ ", "red"), place, ": ", (hit.type, "bold red")), _said("", hit.message)]


def _done(hit: FoundEffect, width: int) -> list[Text]:
    sign, style = _STANDING[hit.status]
    state = f"  {hit.status.replace('_', ' ')}"
    call = _call(hit.tool, hit.arguments, width - len(state) - 2)
    return [Text.assemble((f"{sign} ", style), call, (state, style)), Text(hit.key, style="dim")]


def _answered(hit: FoundAnswer, width: int) -> list[Text]:
    what = Text.assemble((hit.by or "a person", "bold"), ": ", (hit.verb, "green" if hit.verb == "approve" else "bold"))
    if hit.value is not None:
        what.append(f"  {paint.brief(hit.value, width // 2)}")
    what.append("" if hit.taken else "  its run has not taken it yet", "yellow")
    who = f" of {', '.join(hit.to)}" if hit.to else ""
    return [what, _said("said: ", hit.comment), _said(f"asked{who}: ", hit.prompt, "dim")]


_SAYS: Final[dict[type[msgspec.Struct], Callable[[Any, int], list[Text]]]] = {
    FoundDecision: _decision,
    FoundCall: _called,
    FoundFailure: _failed,
    FoundEffect: _done,
    FoundAnswer: _answered,
}
