"""The command `ps`: runs and where each one is, newest first; once, or live. Reads only what it shows."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any, Final

import click
import msgspec
from rich.console import Group
from rich.live import Live
from rich.text import Text

from kedge.cli import paint
from kedge.cli.exits import Told
from kedge.cli.shell import Shell, command
from kedge.cli.show import is_orphaned, standing
from kedge.cli.showing import asked_of_intention
from kedge.errors import ValueErased
from kedge.model import events as e
from kedge.model.failure import Failure
from kedge.model.fold import Fold
from kedge.model.state import State
from kedge.model.typed import convert
from kedge.runtime.client import Client
from kedge.store.base import RunQuery, RunRow

STATUSES: Final = ("queued", "running", "waiting", "paused", "completed", "failed", "cancelled", "orphaned")
COUNTED_MAX: Final = 20_000
"""Of more runs than this only the newest are counted."""

LOOK_SECONDS: Final = 0.5
MARKED_US: Final = 3_000_000
"""How long what changed stands out."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One run as the table has it. `about` is what it waits for, or what went wrong; `next` a command to type."""

    run: str
    agent: str
    status: str
    where: str
    about: str
    since_us: int | None
    attempts: int
    changed_at_us: int
    started_at_us: int
    priority: int
    tags: tuple[str, ...]
    next: str | None = None


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which runs somebody asked for."""

    status: tuple[str, ...] = ()
    agent: str | None = None
    tag: str | None = None
    since_us: int | None = None
    limit: int = 30

    @property
    def query(self) -> RunQuery:
        statuses = tuple(dict.fromkeys("running" if each == "orphaned" else each for each in self.status))
        return RunQuery(status=statuses, agent=self.agent, tag=self.tag, since_us=self.since_us)

    def has(self, status: str) -> bool:
        if not self.status or status in self.status:
            return True
        return status == "broken" or (status == "orphaned" and "running" in self.status)


@command("ps")
@click.option("--status", "-s", metavar="STATUS", multiple=True, help=f"Only these: {', '.join(STATUSES)}.")
@click.option("--failed", "short", flag_value="failed", multiple=True, help="Only failed ones.")
@click.option("--waiting", "short", flag_value="waiting", multiple=True, help="Only waiting ones.")
@click.option("--running", "short", flag_value="running", multiple=True, help="Only running ones.")
@click.option("--agent", "-a", metavar="NAME", help="Only runs of this agent.")
@click.option("--tag", metavar="TAG", help="Only runs with this tag.")
@click.option("--since", metavar="WHEN", help="Only what changed since: 2h, 3d, 2026-11-14.")
@click.option(
    "--limit", "-n", metavar="N", type=click.IntRange(1), default=30, show_default=True, help="At most so many."
)
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--watch", "-w", is_flag=True, help="Go on showing them as they change, until q or Ctrl-C.")
def ps_command(
    shell: Shell,
    status: tuple[str, ...],
    short: tuple[str, ...],
    agent: str | None,
    tag: str | None,
    since: str | None,
    limit: int,
    everything: bool,
    watch: bool,
) -> None:
    """Runs, and where each one is, newest first.

    \b
      kedge ps
      kedge ps --failed --since 2h
      kedge ps --agent settle --watch
    """
    statuses = tuple(each.strip() for text in (*status, *short) for each in text.split(","))
    if unknown := [each for each in statuses if each not in STATUSES]:
        raise Told(f"{unknown[0]}: no such status; there are {', '.join(STATUSES)}")
    now = shell.client.clock.now_us()
    wanted = Wanted(
        status=statuses,
        agent=agent,
        tag=tag,
        since_us=paint.moment_of(since, now) if since is not None else None,
        limit=sys.maxsize if everything else limit,
    )
    if watch:
        Watching(shell, wanted).go()
        return
    listing = Listing(shell, wanted)
    seen = listing.seen()
    if shell.json:
        shell.emit(seen)
    elif seen:
        for line in (*drawn(seen, now, shell.out.width), listing.last_line(len(seen))):
            shell.out.print(line, soft_wrap=True)
    else:
        shell.note(listing.nothing())


# reading ------------------------------------------------------------------------------------------


class Listing:
    """Reads runs from the index, and of those that are shown what their logs say."""

    def __init__(self, shell: Shell, wanted: Wanted) -> None:
        self.shell = shell
        self.client = shell.client
        self.wanted = wanted
        self._known: dict[str, tuple[int, str, Seen]] = {}

    def rows(self, limit: int) -> list[RunRow]:
        """Newest first, page by page."""
        found: list[RunRow] = []
        before = None
        while len(found) < limit:
            page = self.client.store.runs(self.wanted.query, before=before, limit=min(limit - len(found), 10_000))
            found += page
            if len(page) < 10_000:
                break
            before = page[-1].number
        return found

    def seen(self) -> list[Seen]:
        found = (self.look(row) for row in self.rows(self.wanted.limit))
        return [each for each in found if self.wanted.has(each.status)]

    def look(self, row: RunRow) -> Seen:
        """A run as it stands; what its log says is read again only when that has grown."""
        is_still = row.status in ("queued", "completed", "cancelled")
        head = 0 if is_still else self.client.log.head(row.run).seq
        status = standing(self.client, row.run, row.status)
        known = self._known.get(row.run)
        if known is None or known[:2] != (head, status):
            known = (head, status, self._read(row, head, status))
            self._known[row.run] = known
        due = row.wake_at_us is not None and row.wake_at_us <= self.client.clock.now_us()
        if due and row.status == "waiting":
            return msgspec.structs.replace(known[2], about=f"due; {known[2].about}")
        return known[2]

    def _read(self, row: RunRow, head: int, status: str) -> Seen:
        where, about, since, attempts, changed = "", "", None, 0, row.changed_at_us
        if status == "broken":
            about = f"its record does not hold; {self.shell.typed('verify', row.run)}"
        elif row.status == "failed":
            where, about = _failed(self.client, row.run, head)
        elif row.status in ("running", "waiting", "paused"):
            state = self.client.state(row.run)
            step = state.fold.step(state.fold.facts.current) if state.fold.facts.current is not None else None
            where, attempts = _where(state.fold), len(step.attempts) if step is not None else 0
            about, since = _about(self.client, state)
            changed = self.client.log.event(row.run, state.seq).at
        return Seen(
            run=row.run,
            agent=row.agent,
            status=status,
            where=where,
            about=about,
            since_us=since,
            attempts=attempts,
            changed_at_us=changed,
            started_at_us=row.started_at_us,
            priority=row.priority,
            tags=tuple(tag for tag in row.tags if not tag.startswith("input:")),
            next=self.shell.typed("resume", row.run) if status in ("orphaned", "paused", "failed") else None,
        )

    def counts(self) -> Counter[str]:
        """How many there are of each status, of those that match in all else."""
        anything = Listing(self.shell, msgspec.structs.replace(self.wanted, status=()))
        rows = anything.rows(COUNTED_MAX)
        return Counter("orphaned" if is_orphaned(self.client, row.run, row.status) else row.status for row in rows)

    def last_line(self, shown: int) -> Text:
        counts = self.counts()
        total = sum(counts.values())
        line = Text()
        for name in STATUSES:
            if counts[name]:
                line.append(" · " if line else "").append_text(paint.status(f"{counts[name]} {name}"))
                line.stylize(paint.STYLES[name], len(line) - len(f"{counts[name]} {name}"))
        matching = sum(count for name, count in counts.items() if self.wanted.has(name))
        if shown < matching:
            more = f"{shown} of {matching}{'+' if total >= COUNTED_MAX else ''} shown; --all shows the rest"
            line.append(f"   {more}", style="dim")
        return line

    def nothing(self) -> str:
        counts = self.counts()
        if not counts and not (self.wanted.agent or self.wanted.tag or self.wanted.since_us):
            return f"{self.shell.store}: no runs yet; `kedge run app.py:agent` starts one, `kedge demo` shows one"
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        if not told and self.wanted.agent is not None:
            agents = sorted({row.agent for row in self.client.store.runs(RunQuery(), limit=1_000)})
            told = f"runs of {', '.join(agents)}"
        return f"no run matches{f'; there are {told}' if told else ''}"


def _where(fold: Fold) -> str:
    facts = fold.facts
    step = fold.step(facts.current) if facts.current is not None else None
    name = f"{facts.current} {step.name}" if step is not None and step.sort != "wait" else facts.current
    if facts.stage is None:
        return f"step {name}" if name else ""
    at = f" {facts.plan.index(facts.stage) + 1}/{len(facts.plan)}" if facts.stage in facts.plan else ""
    return f"{facts.stage}{at}"


def _about(client: Client, state: State) -> tuple[str, int | None]:
    """What a run waits for, and since when."""
    facts = state.fold.facts
    told: list[str] = []
    for wait in facts.waits.values():
        data = state.data(wait.opened)
        match wait.waits_for:
            case "time":
                told.append(f"until {paint.moment(wait.deadline or 0)[:16]}")
            case "event":
                told.append(f"message {wait.name}")
            case "child":
                told.append(wait.name)
            case _:
                asked = asked_of_intention(wait.waits_for, data.get("intention")) or str(
                    data.get("prompt") or wait.name
                )
                told.append(f"{', '.join(wait.to)}: {asked}" if wait.to else asked)
    for index in facts.pending.values():
        step = state.fold.steps[index]
        if step.status == "delayed" and step.delayed_until is not None:
            told.append(f"attempt {len(step.attempts) + 1} of {step.name} at {paint.moment(step.delayed_until)[11:]}")
    if facts.mend and isinstance(client.log.event(state.run, facts.mend), e.RunDiverged):
        told.insert(0, "mended code")
    elif facts.paused or facts.mend:
        told.insert(0, "somebody to resume it" + (", for its record was repaired" if facts.mend else ""))
    since = min((wait.at for wait in facts.waits.values()), default=None)
    return "; ".join(told), since


def _failed(client: Client, run: str, head: int) -> tuple[str, str]:
    """Where a run failed, and with what; from its last event, where that says so."""
    seq = head
    event = client.log.event(run, seq)
    if not isinstance(event, e.RunFailed):
        seq = client.state(run).fold.facts.ended
        event = client.log.event(run, seq)
    step = getattr(event, "step", None)
    found: Any = None
    with contextlib.suppress(ValueErased):
        found = client.log.data(run, seq).get("failure")
    if not isinstance(found, dict):
        return f"step {step}" if step else "", ""
    failure = convert(found, Failure, at="failure")
    while failure.type.endswith((".StepFailed", ".ChildFailed")) and failure.cause is not None:
        failure = failure.cause
    return f"step {step}" if step else "", f"{failure.type.rpartition('.')[2]}: {failure.message}"


# drawing ------------------------------------------------------------------------------------------

HEADS: Final = ("RUN", "AGENT", "STATUS", "WHERE", "WAITS FOR", "CHANGED")
_GIVE_WAY: Final = ((4, 24), (3, 12), (1, 8), (4, 4))
"""Which columns become narrower first where there is no room, and how far. A run's id and its status never do."""


def drawn(seen: Sequence[Seen], now_us: int, width: int, marked: Container[str] = ()) -> list[Text]:
    """The table, line by line. Made by hand, for thousands of rows."""
    cells = [_cells(each, now_us) for each in seen]
    widths = [max(len(head), *(cell[at].cell_len for cell in cells)) for at, head in enumerate(HEADS)]
    waits = [cell[4].cell_len + len(_waited(each, now_us)) for cell, each in zip(cells, seen, strict=True)]
    widths[4] = max(len(HEADS[4]), *waits)
    for column, least in _GIVE_WAY:
        over = sum(widths) + 2 * (len(HEADS) - 1) - width
        widths[column] = min(widths[column], max(least, widths[column] - max(over, 0)))
    heads = "  ".join(f"{head[:room]:<{room}}" for head, room in zip(HEADS, widths, strict=True))
    lines = [Text(heads.rstrip(), style="dim")]
    for each, cell in zip(seen, cells, strict=True):
        waited = _waited(each, now_us)
        cell[4].truncate(max(widths[4] - len(waited), 4), overflow="ellipsis")
        cell[4].append(waited, style="dim")
        line = Text()
        for column, (text, room) in enumerate(zip(cell, widths, strict=True)):
            text.truncate(room, overflow="ellipsis", pad=column < len(HEADS) - 1)
            line.append("  " if column else "").append_text(text)
        line.rstrip()
        if each.run in marked:
            line.stylize("reverse")
        lines.append(line)
    return lines


def _cells(seen: Seen, now_us: int) -> list[Text]:
    about = Text(paint.brief(seen.about, 400), style="red" if seen.status in ("broken", "failed") else "")
    if seen.status == "orphaned":
        about = Text(str(seen.next), style="green")
    tries = f" ×{seen.attempts}" if seen.attempts > 1 else ""
    return [
        Text(seen.run, style="bold"), Text(seen.agent), paint.status(seen.status), Text(seen.where + tries), about,
        Text(_coarse(now_us - seen.changed_at_us), style="dim"),
    ]  # fmt: skip


def _waited(seen: Seen, now_us: int) -> str:
    """Since when it waits, where that is not since it last changed."""
    if seen.since_us is None or not seen.about or seen.changed_at_us - seen.since_us < 60_000_000:
        return ""
    return f" ({_coarse(now_us - seen.since_us)})"


def _coarse(us: int) -> str:
    """How long, by its largest unit."""
    told = paint.span(max(us, 0))
    return told if told[-2:] in (" s", "ms", "µs") else told.partition(" ")[0]


# watching -----------------------------------------------------------------------------------------


class Watching:
    """Shows runs again whenever something changed."""

    def __init__(self, shell: Shell, wanted: Wanted) -> None:
        self.shell = shell
        self.wanted = wanted
        self.listing = Listing(shell, wanted)
        self.clock = shell.client.clock
        self.last: dict[str, Seen] = {}
        self.changed: dict[str, int] = {}

    def go(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            if self.shell.out.is_terminal and not self.shell.json:
                self._table()
            else:
                self._lines()

    def _look(self) -> tuple[list[Seen], list[Seen]]:
        """What there is now, and what of it is news."""
        seen = self.listing.seen()
        news = [each for each in seen if self.last.get(each.run) != each]
        now = self.clock.now_us()
        if self.last:
            self.changed.update({each.run: now for each in news})
        self.last.update({each.run: each for each in news})
        return seen, news

    def _table(self) -> None:
        out = self.shell.out
        counts, shown = Text(), list[Text]()
        with keys() as pressed, Live(console=out, auto_refresh=False, transient=False) as live:
            while True:
                room = max(out.height - 3, 1)
                seen, news = self._look()
                now = self.clock.now_us()
                marked = frozenset(run for run, at in self.changed.items() if now - at < MARKED_US)
                if news or not counts:
                    counts = self.listing.last_line(min(len(seen), room))
                hint = Text("  q leaves", style="dim")
                lines = (
                    drawn(seen[:room], now, out.width, marked) if seen else [Text(self.listing.nothing(), style="dim")]
                )
                lines.append(Text().append_text(counts).append_text(hint))
                if lines != shown:
                    shown = lines
                    live.update(Group(*lines), refresh=True)
                if pressed(self.clock.nap_seconds(LOOK_SECONDS)):
                    return

    def _lines(self) -> None:
        """One line a change, for a pipe."""
        first = True
        pause = threading.Event()
        while True:
            _, news = self._look()
            for each in reversed(news[:0] if first else news):
                if self.shell.json:
                    self.shell.emit_line(each)
                else:
                    told = [
                        paint.moment(self.clock.now_us()),
                        each.run,
                        each.agent,
                        each.status,
                        each.where,
                        each.about,
                    ]
                    self.shell.out.print(Text("  ".join(filter(None, told))), soft_wrap=True)
            sys.stdout.flush()
            first = False
            pause.wait(self.clock.nap_seconds(LOOK_SECONDS))


@contextlib.contextmanager
def keys() -> Generator[Callable[[float], bool]]:
    """A function that waits so long and says whether somebody pressed q; where nobody can, it only waits."""
    try:
        import select
        import termios
        import tty

        before = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, AttributeError):  # no terminal, or not one of these
        yield threading.Event().wait
        return

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and sys.stdin.read(1) in ("q", "Q", "")

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
