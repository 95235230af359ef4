"""The terminal style of presented data: colours of roles and statuses, local times, tables, wrapped lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from killick.errors import DurationRefused
from killick.history.phrasing import SIGNS as SIGNS
from killick.history.phrasing import arguments as arguments
from killick.history.phrasing import brief as brief
from killick.history.phrasing import inline as inline
from killick.history.phrasing import span as span
from killick.model.retry import seconds
from killick.presenting.phrase import Phrase

STYLES: Final = {
    "queued": "cyan", "running": "blue", "waiting": "yellow", "code_mismatch": "bold red", "paused": "magenta",
    "abandoned": "bold red", "broken": "bold red", "completed": "green", "failed": "red", "cancelled": "dim",
    "intended": "dim", "delayed": "yellow", "in_doubt": "bold red", "done": "green",
}  # fmt: skip
"""The colour of every status, of runs and of steps."""

_ROLES: Final = {
    "strong": "bold", "quiet": "dim", "quote": "italic", "good": "green", "bad": "red", "warning": "yellow",
    "change": "magenta", "notice": "cyan", "busy": "blue",
}  # fmt: skip


def text(phrase: Phrase) -> Text:
    """A phrase in the colours of its roles."""
    return Text.assemble(*((part, " ".join(_ROLES[each] for each in roles.split())) for part, roles in phrase.parts))


def status(name: str) -> Text:
    """A status in its colour."""
    return Text(name.replace("_", " "), style=STYLES.get(name, ""))


def ago(at_us: int, now_us: int) -> str:
    """How long since, or until."""
    return f"{span(now_us - at_us)} ago" if at_us <= now_us else f"in {span(at_us - now_us)}"


def place(label: str, seq: int) -> str:
    """A place in a run's history with its event, once: 6:after @17."""
    return label if label == f"@{seq}" or label.startswith("snapshot") else f"{label} @{seq}"


def moment(at_us: int, *, date: bool = True) -> str:
    """A time as the person at the terminal reads clocks."""
    local = datetime.fromtimestamp(at_us / 1_000_000, UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")


def moment_of(text: str, now_us: int) -> int:
    """A time that a person typed: how long ago (2h, 3d), a day (2026-11-14), or a moment (2026-11-14T09:30)."""
    try:
        return now_us - round(seconds(text) * 1_000_000)
    except DurationRefused:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise DurationRefused(text, expected="how long ago (90s, 2h, 3d), a day (2026-11-14) or a moment") from None
    local = found if found.tzinfo else found.astimezone()
    return (local - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def labelled(label: str, lines: Iterable[Text], width: int) -> Iterator[Text]:
    """Lines under one label, which is before the first of them; each is wrapped next to it."""
    for number, line in enumerate(lines):
        yield from wrapped(Text(label if number == 0 else " " * len(label), style="dim"), line, width)


def table(columns: Sequence[str]) -> Table:
    """A table without lines; columns give way from the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for name in columns:
        made.add_column(name, no_wrap=True, overflow="ellipsis")
    return made


def wrapped(lead: Text, body: Text, width: int, lines: int | None = None) -> list[Text]:
    """A label and its body, wrapped next to it onto at most so many lines."""
    room = max(width - lead.cell_len, 20)
    found = list(body.wrap(Console(width=room), room))
    if lines is not None and len(found) > lines:
        del found[lines:]
        found[-1].rstrip()
        found[-1].truncate(room - 1)
        found[-1].append("…")
    blank = Text(" " * lead.cell_len)
    for each in found:
        each.rstrip()
    return [Text().append_text(blank if at else lead).append_text(each) for at, each in enumerate(found)] or [lead]
