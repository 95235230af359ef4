"""How things look: times, spans, values on one line, statuses, tables. Knows nothing of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from killick.errors import DurationRefused
from killick.history.phrasing import span as span
from killick.model.codec import plain
from killick.model.retry import seconds

STYLES: Final = {
    "queued": "cyan", "running": "blue", "waiting": "yellow", "paused": "magenta",
    "orphaned": "bold red", "broken": "bold red", "completed": "green", "failed": "red", "cancelled": "dim",
    "intended": "dim", "delayed": "yellow", "in_doubt": "bold red", "done": "green",
}  # fmt: skip
"""The colour of every status, of runs and of steps."""

SIGNS: Final = {
    "intended": "·", "running": "▸", "delayed": "↻", "waiting": "…", "in_doubt": "?", "done": "✓", "failed": "✗",
    "cancelled": "⊘",
}  # fmt: skip
"""The sign before a step."""


def status(name: str) -> Text:
    """A status in its colour."""
    return Text(name.replace("_", " "), style=STYLES.get(name, ""))


def ago(at_us: int, now_us: int) -> str:
    """How long since, or until."""
    return f"{span(now_us - at_us)} ago" if at_us <= now_us else f"in {span(at_us - now_us)}"


def moment(at_us: int, *, date: bool = True) -> str:
    """A time as the person at the terminal reads clocks."""
    local = datetime.fromtimestamp(at_us / 1_000_000, UTC).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")


def moment_of(text: str, now_us: int) -> int:
    """A time that somebody wrote: how long ago (2h, 3d), a day (2026-11-14), or a moment (2026-11-14T09:30)."""
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


def inline(value: Any) -> str:
    """A value as one line of JSON, with air between its parts."""
    return msgspec.json.format(msgspec.json.encode(plain(value)), indent=0).decode()


def brief(value: Any, width: int = 60) -> str:
    """A value on one line: text as it is, the rest as JSON, cut with … where it is longer."""
    line = " ".join((value if isinstance(value, str) else inline(value)).split())
    return line if len(line) <= width else f"{line[: max(width - 1, 1)]}…"


def arguments(given: Any, width: int = 60) -> str:
    """The arguments of a call as they would be written: to="ada", amount=5."""
    if not isinstance(given, Mapping):
        return brief(given, width)
    return brief(", ".join(f"{name}={inline(each)}" for name, each in given.items()), width)  # pyright: ignore[reportUnknownVariableType]


def table(columns: Sequence[str]) -> Table:
    """A table without lines; columns give way from the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for name in columns:
        made.add_column(name, no_wrap=True, overflow="ellipsis")
    return made


def wrapped(lead: Text, body: Text, width: int, lines: int | None = None) -> list[Text]:
    """A body beside its label, on as many lines as it takes or may take."""
    room = max(width - lead.cell_len, 20)
    found = list(body.wrap(Console(width=room), room))
    if lines is not None and len(found) > lines:
        found[lines - 1].append("…").truncate(room)
        del found[lines:]
    blank = Text(" " * lead.cell_len)
    for each in found:
        each.rstrip()
    return [Text().append_text(blank if at else lead).append_text(each) for at, each in enumerate(found)] or [lead]
