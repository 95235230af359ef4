"""The command `ps`: runs and their positions, newest first. Reads only the displayed runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import click
from msgspec.structs import asdict, replace
from rich.text import Text

from killick.cli import style
from killick.cli.context import HOSTED, Shell, agent_option, command, limit_option, since_option, tag_option
from killick.cli.exit_codes import CommandFailed
from killick.history import listing
from killick.history.listing import RunReason, RunSummary
from killick.presenting.runs import revived
from killick.store.records import ENDED, KEY_DESTROYED, RunQuery, RunRow

STATUSES: Final = (*listing.STATUSES, "broken")
"""The statuses of the table. A `broken` run has a log that cannot be read, or that failed verification."""


class Seen(NamedTuple):
    """One row of the table. `about` is the run's wait or its failure; `next` is a command to type."""

    line: RunSummary
    about: str
    next: str | None = None

    @property
    def document(self) -> ListedRun:
        return ListedRun(**asdict(self.line), next=None if self.next == HOSTED else self.next)


class ListedRun(RunSummary, frozen=True, kw_only=True):
    """A run of a listing; `next` is the command that resumes it, if a person has to."""

    next: str | None


@command("ps")
@click.option("--status", "-s", metavar="STATUS", multiple=True, help=f"Only runs that are {', '.join(STATUSES)}.")
@click.option("--failed", is_flag=True, help="Only failed runs.")
@agent_option
@tag_option
@since_option
@limit_option(30)
@click.option("--all", "everything", is_flag=True, help="List all runs.")
def ps_command(
    shell: Shell, status: tuple[str, ...], failed: bool, since: str | None, limit: int, everything: bool,
    **only: Any,
) -> None:  # fmt: skip
    """List runs and where each one is, newest first.

    \b
      killick ps
      killick ps --failed --since 2h
      killick ps --agent settle --all
    """
    statuses = tuple(each.strip() for text in (*status, *["failed"] * failed) for each in text.split(","))
    if unknown := [each for each in statuses if each not in STATUSES]:
        raise CommandFailed(f"{unknown[0]}: no such status; there are {', '.join(STATUSES)}")
    now = shell.clock.now_us()
    since_us = style.moment_of(since, now) if since is not None else None
    query = RunQuery(status=statuses, since_us=since_us, **only)
    listing = Listing(shell, query, sys.maxsize if everything else limit)
    seen = listing.seen()
    if shell.json:
        shell.emit([each.document for each in seen])
    elif seen:
        shell.print(*(*drawn(seen, now, shell.out.width), listing.last_line(seen)))
    else:
        shell.print(listing.nothing(), err=True)


# reading ------------------------------------------------------------------------------------------


class Listing:
    """The runs that match the filters, as they are now."""

    def __init__(self, shell: Shell, query: RunQuery, limit: int) -> None:
        self.shell = shell
        self.query = query
        self.limit = limit
        self.lines = listing.Listing(shell.log, whole=shell.json)
        self._unreadable: list[str] = []
        """Runs that could not be read, and are not in quarantine."""

    def rows(self) -> list[RunRow]:
        """Newest first. The index does not know broken runs: their quarantine selects them."""
        query, store = self.query, self.shell.store
        others = tuple(each for each in query.status if each != "broken")
        queries = [replace(query, status=others)] if others or not query.status else []
        queries += [replace(query, status=(), quarantined=True)] if "broken" in query.status else []
        found = {row.number: row for each in queries for row in listing.selected(store, each, limit=self.limit)}
        return [found[number] for number in sorted(found, reverse=True)][: self.limit]

    def seen(self) -> list[Seen]:
        """The newest runs that match."""
        found = [self._seen(line) for line in self.lines.lines(self.rows(), self.shell.clock.now_us())]
        broken = [each.line.run for each in found if each.line.status == "broken"]
        self._unreadable = [run for run in broken if self.shell.store.quarantined(run) is None]
        return [each for each in found if not self.query.status or each.line.status in self.query.status]

    def _seen(self, line: RunSummary) -> Seen:
        about = "; ".join(text for text in map(about_text, line.about) if text)
        if line.status == "broken" and about != KEY_DESTROYED:
            about = f"{about}; {self.shell.typed('store', 'verify', line.run)}"
        hosted = line.hosted and line.status == "abandoned"
        following = self.shell.resumes(line.run, hosted=hosted) if _is_stuck(line) else None
        is_answered = any(each.kind == "answered" for each in line.about)
        return Seen(line, f"due; {about}" if line.due and not is_answered else about, following)

    def counts(self) -> Counter[str]:
        """How many there are of each status, of those that match in all else. The index counts no broken runs: they
        are in quarantine, or were found when they were read."""
        store, query = self.shell.store, self.query
        counts, broken = (listing.counted(store, replace(query, quarantined=only)) for only in (False, True))
        broken.update(row.status for row in map(store.index, self._unreadable) if row is not None)
        return counts - broken + Counter(broken=broken.total())

    def last_line(self, seen: Sequence[Seen]) -> Text:
        """The counts by status, and the next move for abandoned runs."""
        counts = self.counts()
        line = Text()
        for name in STATUSES:
            if counts[name]:
                line.append(" · " if line else "").append(f"{counts[name]} {style.status(name)}", style.STYLES[name])
        if counts["abandoned"]:
            found = [each for each in seen if each.line.status == "abandoned"]
            one = found[0].next if len(found) == counts["abandoned"] == 1 else None
            move = one or self.shell.resumes("RUN", hosted=bool(found) and all(each.line.hosted for each in found))
            then = move if move == HOSTED else f"Run `{move}`, or start a worker"
            line.append(f": {revived(counts['abandoned'], then)}")
        matching = sum(count for name, count in counts.items() if name in (self.query.status or counts))
        if len(seen) < matching:
            line.append(f"   {len(seen)} of {matching} shown; --all shows the rest", style="dim")
        return line

    def nothing(self) -> Text:
        counts, query = self.counts(), self.query
        if not counts and query == RunQuery(status=query.status):
            hint = "`killick run app.py:agent` starts one, `killick demo` shows one"
            return Text(f"{self.shell.place}: no runs yet; {hint}", style="dim")
        existing = ", ".join(f"{counts[name]} {style.status(name)}" for name in STATUSES if counts[name])
        if not existing and query.agent is not None:
            existing = f"runs of {', '.join(self.shell.store.agents())}"
        return Text(f"no run matches{f'; there are {existing}' if existing else ''}", style="dim")


def _is_stuck(line: RunSummary) -> bool:
    """Whether a person has to resume it."""
    quarantined = any(about.kind == "crash" and about.at_us is None for about in line.about)
    return quarantined or line.status in ("abandoned", "code_mismatch", "paused", "failed")


def about_text(about: RunReason) -> str:
    """A run's wait, in the terminal's time zone."""
    match about.kind:
        case "worker":
            return ""  # the next command is printed instead
        case "time":
            return f"until {style.moment(about.at_us or 0)[:16]}"
        case "crash" if about.at_us is not None:
            return f"again at {style.moment(about.at_us, date=False)}; {about.text}"
        case "backoff" if about.at_us is not None:
            return f"{about.text} at {style.moment(about.at_us)[11:]}"
        case _:
            return about.text


# drawing ------------------------------------------------------------------------------------------

HEADS: Final = ("RUN", "AGENT", "STATUS", "WHERE", "DETAILS", "CHANGED")
ABOUT: Final = HEADS.index("DETAILS")
_GIVE_WAY: Final = ((ABOUT, 24), (3, 12), (1, 8))
"""Which columns become narrower first where there is no room, and how far. A run's id and its status never do."""


def drawn(seen: Sequence[Seen], now_us: int, width: int) -> list[Text]:
    """The table, line by line, made by hand for thousands of rows. Where there is no room for a run's wait,
    that is on a line of its own."""
    cells = [_cells(each, now_us) for each in seen]
    tails = [_duration(each, now_us) for each in seen]
    widths = [max(len(head), *(cell[at].cell_len for cell in cells)) for at, head in enumerate(HEADS)]
    abouts = [cell[ABOUT].cell_len + len(tail) for cell, tail in zip(cells, tails, strict=True)]
    widths[ABOUT] = max(widths[ABOUT], *abouts)
    for column, least in _GIVE_WAY:
        over = sum(widths) + 2 * (len(HEADS) - 1) - width
        widths[column] = min(widths[column], max(least, widths[column] - max(over, 0)))
    shown, room = list(range(len(HEADS))), widths[ABOUT]
    if sum(widths) + 2 * (len(HEADS) - 1) > width:
        shown.remove(ABOUT)
        room = width - 4
    lines = [Text("  ".join(f"{HEADS[at][: widths[at]]:<{widths[at]}}" for at in shown).rstrip(), style="dim")]
    for cell, tail in zip(cells, tails, strict=True):
        about = cell[ABOUT]
        about.truncate(max(room - len(tail), 4), overflow="ellipsis")
        about.append(tail, style="dim")
        for at in shown:
            cell[at].truncate(widths[at], overflow="ellipsis", pad=True)
        parts = [Text("  ").join(cell[at] for at in shown)]
        parts += [Text("    ").append_text(about)] if ABOUT not in shown and about else []
        for part in parts:
            part.rstrip()
        lines += parts
    return lines


def _cells(seen: Seen, now_us: int) -> list[Text]:
    line = seen.line
    about = Text(
        style.brief(seen.about, 400), style="red" if line.status in ("broken", "code_mismatch", "failed") else ""
    )
    if line.status == "abandoned":
        about = Text(str(seen.next), style="green")
    tries = f" ×{line.attempts}" if line.attempts > 1 else ""
    return [
        Text(line.run, style="bold"), Text(line.agent), style.status(line.status), Text(line.where + tries), about,
        Text(_coarse(now_us - line.changed_at_us), style="dim"),
    ]  # fmt: skip


def _duration(seen: Seen, now_us: int) -> str:
    """How long an ended run took; since when one waits, where that is not since it last changed."""
    line, since = seen.line, seen.line.since_us
    if line.status in ENDED:
        took = style.span((line.ended_at_us or line.changed_at_us) - line.started_at_us)
        return f" ({took})" if seen.about else f"({took})"
    if since is None or not seen.about or seen.line.changed_at_us - since < 60_000_000:
        return ""
    return f" ({_coarse(now_us - since)})"


def _coarse(us: int) -> str:
    """How long, by its largest unit."""
    text = style.span(max(us, 0))
    return text if text[-2:] in (" s", "ms", "µs") else text.partition(" ")[0]
