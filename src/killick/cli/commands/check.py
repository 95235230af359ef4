"""`killick check`: interrupts a user's agent in every way, and prints the findings."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

import click
import msgspec
from rich.text import Text

from killick.check.checker import STORIES_MAX, Case, case_like, check
from killick.check.findings import Finding, Report
from killick.check.isolation import isolated
from killick.cli import apps
from killick.cli import style as paint
from killick.cli.context import Shell, command, pair, value_of
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.progress import progress
from killick.clock import SystemClock
from killick.definitions.agents import Agent
from killick.history.phrasing import counted

PATIENCE_SECONDS: Final = 60
"""How long one rehearsal may compute without ever letting go, before it is taken for one that never ends."""


@command("check", app=True)
@click.argument("target", metavar="APP.PY:AGENT")
@click.option("--input", "-i", "given", metavar="VALUE", help="The agent's input: JSON, @file or text. [a sample]")
@click.option("--fake", "fakes", metavar="NAME=VALUE", multiple=True, help="A tool's or model's result. [a sample]")
@click.option("--answer", "answers", metavar="[QUESTION=]ANSWER", multiple=True, help="A person's answer. [approve]")
@click.option("--message", "messages", metavar="NAME=VALUE", multiple=True, help="A message that a run waits for.")
@click.option("--real", metavar="TOOL", multiple=True, help="Execute this tool for real, hundreds of times; * for all.")
@click.option("--like", metavar="RUN", help="Use this run's input, results and answers.")
@click.option("--max", "most", type=click.IntRange(1), default=STORIES_MAX, show_default=True, help="Maximum of runs.")
@click.option("--isolate", is_flag=True, help="Without network, files read-only. Linux namespaces.")
@click.option("--strict", is_flag=True, help="Exit with 1 on advice, too.")
def check_command(
    shell: Shell, target: str, given: str | None, fakes: Sequence[str], answers: Sequence[str],
    messages: Sequence[str], real: Sequence[str], like: str | None, most: int, isolate: bool, strict: bool,
) -> int:  # fmt: skip
    """Inject every fault into an agent, and report what breaks.

    Runs the agent once for each interruption: a crash before and after every write and effect, timeouts, lost replies,
    rate limits, pauses, late answers, deadlines. Tools and models are not called: each returns a sample of its type, or
    your value. No store is written.

    It is no sandbox: handles opened before, C code and other threads are not seen. --isolate keeps the agent's process
    from the world where the system can.

    \b
    killick check app.py:review
    killick check app.py:review --input '{"id": 17}' --fake fetch_docs='["a.pdf"]' --answer reject
    killick check app.py:review --like claim_17
    """
    if isolate:
        try:
            code = isolated()
        except OSError as error:
            raise CommandFailed(
                f"--isolate: this system isolates no process ({error}); run the check in a container without network, "
                "or without --isolate"
            ) from None
        if code is not None:
            return code
        if like is not None:
            shell.open_read_only()
    cases = _cases(shell, target, like)
    answered = dict(pair(text) if "=" in text else ("*", value_of(text)) for text in answers)

    def joined(case: Case) -> Case:
        """A case, overridden by the options of the command line."""
        return Case(
            agent=case.agent, input=case.input if given is None else value_of(given),
            fakes={**case.fakes, **dict(map(pair, fakes))}, answers={**answered, **case.answers, **answered},
            messages={**case.messages, **dict(map(pair, messages))}, real=[*case.real, *real],
        )  # fmt: skip

    reports = [_checked(shell, joined(case), most) for case in cases]
    if not isolate and any(report.verdict == "sound" for report in reports):
        shell.print(
            Text(
                "  Not a sandbox: of handles opened before, C code and other threads nothing is seen; see --isolate",
                "dim",
            )
        )
    documents = list(map(document, reports))
    shell.emit(documents if len(reports) > 1 else documents[0])
    bad = any(report.faults or (strict and report.findings) for report in reports)
    return Exit.BAD if bad else Exit.DONE


def document(report: Report) -> dict[str, Any]:
    """A report as JSON: each finding with its file, and its line if it has one."""
    findings: list[dict[str, Any]] = []
    for each in report.findings:
        file, _, line = each.where.rpartition(":")
        at = (file, int(line)) if file and line.isdigit() else (each.where, None)
        findings.append({**msgspec.to_builtins(each), "file": at[0], "line": at[1], "weight": each.weight})
    return {**msgspec.to_builtins(report), "findings": findings, "verdict": report.verdict, "holds": report.holds}


def _cases(shell: Shell, target: str, like: str | None) -> list[Case]:
    found = apps.load(target, shell.importable_app)
    listed: list[Any] = list(found) if isinstance(found, list | tuple) else [found]  # pyright: ignore[reportUnknownArgumentType]
    cases = [Case(agent=each) if isinstance(each, Agent) else each for each in listed]  # pyright: ignore[reportUnknownArgumentType]
    for case in cases:
        if not isinstance(case, Case):
            raise CommandFailed(f"{target}: is neither an agent nor a killick.testing.Case but {type(case).__name__}")
    return [case_like(shell.log, shell.run(like), case.agent) for case in cases] if like is not None else cases


def _checked(shell: Shell, case: Case, most: int) -> Report:
    clock = SystemClock()
    begun = clock.monotonic()
    with progress(shell) as show, _with_timeout(case):

        def tell(count: int, expected: int) -> None:
            signal.alarm(PATIENCE_SECONDS)  # another rehearsal begins, and may take its time
            show(f"interrupting {case.agent.name}", count, expected)

        report = check(case, stories_max=most, progress=tell)
    shell.print(*rendered(report, clock.monotonic() - begun, shell.out.width))
    return report


@contextlib.contextmanager
def _with_timeout(case: Case) -> Generator[None]:
    """Only the operating system can stop code that never yields, so the wait is bounded and silent."""

    def ring(number: int, frame: Any) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "somewhere"
        raise CommandFailed(
            f"{case.agent.name}: still computing after {PATIENCE_SECONDS} s, at {where}; does it ever end?"
        )

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE_SECONDS)
    logger = logging.getLogger("killick")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # rehearsals log errors that they cause themselves
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        logger.setLevel(level)


def rendered(report: Report, seconds: float, width: int) -> Iterator[Text]:
    """The report as people read it, in lines."""
    asked = f", {counted(report.questions, 'question')}" if report.questions else ""
    rate = f"\n{paint.span(seconds * 1_000_000)}, {report.stories / max(seconds, 0.001):.0f} a second"
    lines = {
        "agent": Text.assemble((report.agent, "bold"), (f"  {report.where}", "dim")),
        "baseline": Text.assemble(paint.status(report.left_alone), f", {counted(report.steps, 'step')}{asked}"),
        "interrupted": Text.assemble(f"{report.stories} times: {report.ways_text}", (rate, "dim")),
    }
    if tools := report.reached.tools:
        lines["reached"] = Text(f"{tools - len(report.reached.tools_never)} of {counted(tools, 'tool')}")
    if report.sampled:
        sampled = f"{', '.join(report.sampled)} gave samples of their types; --fake NAME=VALUE says better"
        lines["sampled"] = Text(sampled, style="dim")
    yield Text()
    for name, line in lines.items():
        yield from paint.labelled(f"  {name:<{max(map(len, lines))}}  ", line.split("\n"), width)
    for finding in report.findings:
        yield Text()
        yield from _found(finding, width)
    yield Text()
    if report.cut_short:
        yield Text(f"  {report.cut_short}", style="yellow")
    yield from (_verdict(report), Text())


def _found(finding: Finding, width: int) -> Iterator[Text]:
    sign, style = ("✗", "bold red") if finding.weight == "fault" else ("!", "bold yellow")
    title = Text.assemble((f"{sign} ", style), (finding.title, "bold"), "  ", (finding.where, "cyan"))
    lines = [Text(finding.why)]
    if finding.seen:
        times = "once" if finding.times == 1 else f"{finding.times} times"
        lines.append(Text(f"Seen {times}, first when {finding.seen}.", style="dim"))
    lines.append(Text.assemble(("Write: ", "dim"), (finding.fix, "green")))
    yield from paint.wrapped(Text("  "), title, width)
    for line in lines:
        yield from paint.wrapped(Text(" " * 6), line, width)


_VERDICTS: Final = {"faults": "bold red", "warnings": "bold yellow", "incomplete": "bold yellow", "sound": "bold green"}


def _verdict(report: Report) -> Text:
    faults, advice = len(report.faults), len(report.advice)
    style = _VERDICTS[report.verdict]
    if report.verdict == "sound":
        return Text.assemble("  ", ("✓ nothing found", style), ": nothing twice, nothing lost, the same end")
    parts = [counted(faults, "fault")] if faults else []
    parts += [f"{counted(advice, 'thing')} to know"] if advice else []
    return Text.assemble("  ", (" and ".join(parts) or "nothing found so far, and not everything was rehearsed", style))
