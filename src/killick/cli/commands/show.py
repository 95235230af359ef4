"""The command `show`: a run's position and the next command; then its timeline, or another view of it."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Final

import click
import msgspec
from rich.text import Text

from killick.cli import style
from killick.cli.context import Shell, command, run_argument
from killick.cli.exit_codes import CommandFailed, Exit
from killick.cli.run_view import VALUE_CHARS, WHOLE, Following, Page
from killick.cli.wait_view import details, move_lines, question
from killick.engine import views
from killick.engine.control.inbox import VOTE
from killick.history import listing, run_info
from killick.history.phrasing import build_text, counted, process
from killick.history.timeline import Timeline, timeline
from killick.history.timeline_parts import Moment
from killick.log import boundaries
from killick.log.boundaries import RunMoment
from killick.log.log import Log, Recorded
from killick.model import events as e
from killick.presenting import moments
from killick.presenting.documents import event
from killick.presenting.explain import why
from killick.presenting.runs import display_status, run_now, run_timeline, why_now
from killick.store.records import ENDED, KEY_DESTROYED, shown_tags

LOOK_SECONDS: Final = 0.25
"""How often --follow looks whether something was committed."""

PROSE_COLUMNS: Final = 96
_HIDDEN: Final = frozenset({"digest", "identity"})


@command("show")
@run_argument
@click.argument("path", required=False)
@click.option("--why", "number", metavar="[STEP]", is_flag=False, flag_value="", help="Explain a step, or the run.")
@click.option("--at", metavar="PLACE", help="Show the run at this place: 6:before, 6:after, @17.")
@click.option("--state", is_flag=True, help="The whole state, as JSON.")
@click.option("--log", is_flag=True, help="Every event.")
@click.option("--graph", is_flag=True, help="Its forks, children and rewinds.")
@click.option("--window", is_flag=True, help="The context window: its contents and its evictions.")
@click.option("--files", is_flag=True, help="The files of its workspace; with PATH, a folder or one file's content.")
@click.option("--follow", "-f", is_flag=True, help="Print events as they are committed, until the run ends.")
@click.option("--full", is_flag=True, help="Show whole values, and every entry.")
@click.option("--all", "everything", is_flag=True, help="Every step of a long run.")
def show_command(
    shell: Shell, run: str, path: str | None, number: str | None, at: str | None, full: bool,
    everything: bool, **faces: bool,
) -> Exit | None:  # fmt: skip
    """Show one run: its position, what it waits for and the next command; then what happened and why.

    \b
      killick show claim_17
      killick show claim_17 --why 6
      killick show claim_17 --at 6:before --state
      killick show fix_17 --files --at 6:before src/app.py
    """
    faces |= {"why": number is not None}
    chosen = sorted(f"--{name}" for name, is_asked in faces.items() if is_asked)
    if len(chosen) > 1 or (at and chosen and chosen[0] in ("--follow", "--graph")):
        raise CommandFailed(f"{' and '.join([*chosen, *(['--at'] if at else [])])} do not go together; choose one")
    if path is not None and not faces["files"]:
        raise CommandFailed(f"{path}: a PATH is for --files; {shell.typed('show', run, '--files', path)}")
    place = boundaries.at(shell.log, run, at) if at is not None and not faces["files"] else None
    match chosen:
        case ["--files"]:
            from killick.cli.commands.files import show as show_files

            show_files(shell, run, at, path, everything=everything)
        case ["--follow"]:
            return _follow(shell, run, full=full)
        case ["--state"]:
            _state(shell, run, place)
        case ["--log"]:
            _log(shell, run, place, full=full)
        case ["--graph"]:
            _graph(shell, run)
        case ["--window"]:
            from killick.cli.window import show as show_window

            show_window(shell, run, place, everything=everything)
        case _:
            found = timeline(shell.log, run, place.seq, keep=place.keep) if place else timeline(shell.log, run)
            if number is not None:
                _why(shell, found, number, live=place is None, full=full)
            elif shell.json:
                now = shell.clock.now_us()
                shell.emit(run_now(shell.log, found, now) if place is None else run_timeline(found, found.last_at))
            else:
                _page(shell, found, at, everything=everything, full=full)
    return None


# the page -----------------------------------------------------------------------------------------


def _page(shell: Shell, found: Timeline, at: str | None, *, everything: bool, full: bool) -> None:
    now = shell.clock.now_us() if at is None else found.last_at
    page = Page(found, width=shell.out.width, now_us=now, full=full)
    parts = [heading(shell, page, at), page.timeline_lines(everything=everything), page.failure(), _foot(shell, page)]
    for number, part in enumerate(map(list, parts)):
        shell.print(*[""] * bool(number and part), *part)


def heading(shell: Shell, page: Page, at: str | None = None) -> Iterator[Text]:
    """A run's position, its wait, and the next command; or its position at an earlier time."""
    tl, live = page.timeline, at is None
    status = display_status(shell.log, tl.run, str(tl.status)) if live else str(tl.status)
    head = Text.assemble((tl.run, "bold")).append("  ").append_text(style.status(status)).append(f"  {tl.agent}")
    yield head.append(f"  as it was at {at}, {style.moment(tl.last_at)}" if at is not None else "", style="dim")
    for label, lines in _labelled(shell, page, status, live=live):
        yield from style.labelled(f"  {label:<7} ", lines, page.width)


def _labelled(shell: Shell, page: Page, status: str, *, live: bool) -> Iterator[tuple[str, list[Text]]]:
    tl, now = page.timeline, page.now_us
    yield "at", [Text(" · ".join(_where(tl, now)))]
    if tl.status == "completed" and tl.result is not None:
        yield "result", [Text(style.brief(tl.result, WHOLE if page.full else 300))]
    if tl.failed is not None:
        failure = tl.failed.failure
        cause = failure.cause if failure.type.endswith(".StepFailed") and failure.cause is not None else failure
        text = Text(f"step {tl.failed.step}: " if tl.failed.step is not None else "")
        text.append(f"{cause.type.rpartition('.')[2]}: ", style="bold red")
        yield "failed", [text.append(style.brief(cause.message, 300))]
    crashes = tl.state.fold.facts.crashes
    if crashes is not None and tl.ended_at is None:
        about = listing.crash(shell.log, tl.run, crashes)
        again = "" if about.at_us is None else f"; a worker tries again {style.moment(about.at_us)}"
        yield "crashed", [Text(f"{about.text.removeprefix('crashed: ')}{again}", style="red")]
    if tl.held_back is not None:
        yield "held", [style.text(moments.line(tl.held_back, page))]
    waits = list(_waits(shell, tl.run, now) if live else map(page.waits_for, tl.waits))
    for step in tl.steps() if tl.ended_at is None else ():
        if step.status == "delayed" and step.delayed_until is not None:
            what = f"attempt {len(step.attempts) + 1} of step {step.number}, {step.name}"
            waits.append(Text(f"{_until(step.delayed_until, now)}, for {what}"))
    if not waits and tl.status == "waiting" and tl.state.fold.facts.hosted:
        waits.append(Text(listing.IDLE))
    if waits:
        yield "waits", waits
    if status == "broken":
        yield "broken", [Text(str(shell.store.quarantined(tl.run)), style="red")]
    if status == "abandoned":
        holder = shell.log.head(tl.run).holder or tl.holder
        yield "dead", [Text(f"{process(holder) if holder else 'its process'} died", style="red")]
    if live and (lines := _next(shell, tl, status, now)):
        yield "next", lines


def _where(tl: Timeline, now_us: int) -> list[str]:
    place = [tl.place] if tl.place else []
    if tl.ended_at is not None:
        took = style.span(tl.ended_at - tl.started_at)
        return [*place, f"ended {style.moment(tl.ended_at)} ({style.ago(tl.ended_at, now_us)}), after {took}"]
    step = tl.at_work
    since = step.intended_at if step is not None else tl.changed_at
    named = f"step {step.number} " if step is not None else ""
    return [*place, f"{named}since {style.moment(since)} ({style.ago(since, now_us)})"]


def _waits(shell: Shell, run: str, now_us: int) -> Iterator[Text]:
    """The open waits of a run: each with its answer, if the run has not taken it yet; else with who is asked."""
    answers = run_info.pending_answers(shell.log, run)
    for wait in run_info.info(shell.log, run).waits:
        if wait.waits_for == "time":
            yield Text(_until(wait.deadline_us or 0, now_us))
        elif wait.step in answers:
            yield question(wait).append(f": {answers[wait.step]}", style="not bold green")
        else:
            yield question(wait).append_text(_child(shell, wait.name) if wait.waits_for == "child" else Text())
            yield from details(shell, wait)


def _until(at_us: int, now_us: int) -> str:
    return f"{'until' if at_us > now_us else 'no more, since'} {style.moment(at_us)} ({style.ago(at_us, now_us)})"


def _child(shell: Shell, run: str) -> Text:
    """The status of a child run, and its wait."""
    if shell.store.head(run) is None:
        return Text()
    child = run_info.info(shell.log, run)
    below = "; ".join(each.prompt or f"{each.waits_for} {each.name}" for each in child.waits)
    return Text(", which is ").append_text(style.status(child.status)).append(f": {below}" if below else "")


def _next(shell: Shell, tl: Timeline, status: str, now_us: int) -> list[Text]:
    """The commands to type: the first one whole, then its alternatives."""
    if status == "broken" and shell.store.quarantined(tl.run) == KEY_DESTROYED:
        return []
    if status == "broken":
        verify, repair = shell.typed("store", "verify", tl.run), shell.typed("store", "repair", tl.run)
        return [Text.assemble((verify, "bold green"), ("  says where; then  ", "dim"), (repair, "bold green"))]
    if tl.held_back is not None and isinstance(tl.held_back.event, e.RunDiverged):
        return [Text.assemble("fix the code, then  ", (shell.continue_command(tl.run, tl.agent), "bold green"))]
    if status in ("failed", "paused", "abandoned") or tl.held_back is not None:
        hosted = status == "abandoned" and tl.state.fold.facts.hosted
        worker = ("  or start a worker", "dim") if status == "abandoned" and not hosted else ""
        return [Text.assemble((shell.resumes(tl.run, hosted=hosted), "bold green"), worker)]
    index = shell.store.index(tl.run)
    is_due = index is not None and index.wake_at_us is not None and index.wake_at_us <= now_us
    if is_due and not _is_only_voted(shell, tl, now_us):
        # Its time has come, or something came for it that it has not taken yet.
        due = "" if status == "queued" else "  it is due, and continues when a worker takes it"
        return [Text.assemble((shell.continue_command(tl.run, tl.agent), "bold green"), (due, "dim"))]
    if status == "running":
        return [Text(shell.typed("show", tl.run, "--follow"), style="bold green")]
    waits = _waits_below(shell.log, tl.run) if status == "waiting" else ()
    return [line for wait in waits for line in move_lines(shell, wait, shell.out.width - 10)]


def _is_only_voted(shell: Shell, tl: Timeline, now_us: int) -> bool:
    """Whether nothing came but votes where others have to agree as well, which change nothing by themselves."""
    came = shell.store.inbox(tl.run)
    is_late = any(wait.deadline is not None and wait.deadline <= now_us for wait in tl.waits)
    return bool(came) and not is_late and all(each.name == VOTE for each in came)


def _waits_below(log: Log, run: str) -> Iterator[views.Wait]:
    """The waits that a person can end, including those of child runs."""
    for wait in run_info.info(log, run).waits:
        is_there = wait.waits_for == "child" and log.store.head(wait.name) is not None
        below = list(_waits_below(log, wait.name)) if is_there else []
        yield from below or ([wait] if wait.waits_for != "time" else [])


def _foot(shell: Shell, page: Page) -> Iterator[Text]:
    tl = page.timeline
    tags = shown_tags(tl.tags)
    facts = {
        "parent": tl.parent and f"{tl.parent}, step {tl.parent_step}", "forked from": tl.forked_from,
        "continued as": tl.renewed_as, "priority": tl.priority or None, "tags": ", ".join(tags),
        "build": build_text(tl.build),
        "last held by": process(tl.holder) if tl.holder else None,
        "generation": tl.generation or None, "events": tl.seq,
    }  # fmt: skip
    text = " · ".join(f"{name} {value}" for name, value in facts.items() if value)
    yield from style.wrapped(Text(), Text(text, style="dim"), page.width)
    step = tl.at_work if tl.failed is None or tl.failed.step is not None else None
    about = [f"--why {step.number}" if step is not None else "--why", "--state", "--log"]
    forks = (isinstance(entry.event, e.ForkMade) for entry in tl.entries if isinstance(entry, Moment))
    more = ["--graph"] * bool(tl.generation or any(forks)) + ["--window"] * any(s.sort == "model" for s in tl.steps())
    more += ["--files"] * (shell.log.ledger(tl.run).facts.workspace is not None)
    more += [] if page.full else ["--full"]
    yield from style.wrapped(
        Text(), Text(f"more: {shell.typed('show', tl.run)}  {'  '.join(about + more)}", style="dim"), page.width
    )


# the other faces ----------------------------------------------------------------------------------


def _why(shell: Shell, found: Timeline, number: str, *, live: bool, full: bool) -> None:
    zone = datetime.fromtimestamp(found.started_at / 1_000_000, UTC).astimezone().tzinfo or UTC
    explained = partial(why_now, shell.log) if live else why
    text = explained(found, number or None, zone=zone, chars=WHOLE if full else 160)
    if not text:
        steps = [step.number for step in found.steps()]
        there = f"it has {steps[0]} to {steps[-1]}" if steps else "it has taken none yet"
        raise CommandFailed(f"{found.run}: has no step {number}; {there}")
    shell.emit({"run": found.run, "step": number or None, "why": text})
    for line in text:
        columns = min(shell.out.width, PROSE_COLUMNS)
        shell.print(Text(textwrap.fill(line, columns, subsequent_indent="  ", break_on_hyphens=False)))


def _state(shell: Shell, run: str, place: RunMoment | None) -> None:
    log = shell.log
    raw = (log.state(run, place.seq, keep=place.keep) if place is not None else log.state(run)).to_json()
    if shell.json:
        shell.write(raw.decode())
        return
    text = msgspec.json.format(raw, indent=2).decode()
    if not shell.out.is_terminal:
        shell.write(text)
        return
    from rich.json import JSON

    shell.out.print(JSON(text), soft_wrap=True)


def _log(shell: Shell, run: str, place: RunMoment | None, *, full: bool) -> None:
    last = shell.log.head(run).seq if place is None else place.seq
    after = 0
    while after < last:
        events = shell.log.read(run, after=after, limit=min(1_000, last - after))
        if not events:
            return
        for recorded in events:
            _event(shell, run, recorded, digits=len(str(last)), full=full)
        after = events[-1].seq


def _event(shell: Shell, run: str, recorded: Recorded, *, digits: int, full: bool) -> None:
    """One event, for --log and for --follow with --json."""
    found = event(shell.log, run, recorded)
    if shell.json:
        shell.emit_line(found)
        return
    line = Text.assemble((f"{found.seq:>{digits}}  {style.moment(found.at_us)}  ", "dim"))
    line.append(f"{found.kind:<18}", style="cyan")
    fields = {name: value for name, value in found.fields.items() if name not in _HIDDEN}
    data = {"erased": True} if found.erased else found.data
    values = "  ".join(
        filter(None, (style.arguments(fields, WHOLE), style.arguments(data, WHOLE if full else VALUE_CHARS)))
    )
    line.append(f"  {values}")
    if not full:
        line.truncate(shell.out.width, overflow="ellipsis")
    shell.print(line)


def _graph(shell: Shell, run: str) -> None:
    from killick.presenting.graph.graph import run_graph
    from killick.presenting.graph.text import ending, heading

    found = run_graph(shell.log, run)
    shell.emit(found.document())
    table = style.table(("RUN", "OF", "STEPS", "STATUS", "ORIGIN"))
    table.columns[-1].no_wrap = False
    for lane in found.lanes:
        name, *origin = heading(lane)
        parent = "" if lane.parent is None else found.lanes[lane.parent].run
        run_style = "bold" if lane.asked else "dim" if lane.sort == "left" else ""
        table.add_row(Text(name, style=run_style), parent, str(lane.steps), ending(lane), ", ".join(origin))
    shell.out.print(table)
    if found.left_out and not shell.json:
        shell.note(f"{counted(found.left_out, 'more timeline')} left out")


# following ----------------------------------------------------------------------------------------


def _follow(shell: Shell, run: str, *, full: bool) -> Exit | None:
    log, seen, pause = shell.log, 0, threading.Event()
    if not shell.json:
        shell.print(*heading(shell, Page.of(shell, timeline(log, run), full=full)), "")
    following = Following(shell, run, full=full)
    try:
        while True:
            index, head = log.store.index(run), log.head(run).seq
            if head > seen and shell.json:
                for recorded in log.read(run, after=seen, limit=100_000):
                    _event(shell, run, recorded, digits=1, full=full)
            elif head > seen:
                following.look()
            seen = head
            if index is not None and index.status in ENDED and log.head(run).seq == seen:
                return Exit.BAD if index.status != "completed" else None
            pause.wait(shell.clock.nap_seconds(LOOK_SECONDS))
    except KeyboardInterrupt:
        return None
