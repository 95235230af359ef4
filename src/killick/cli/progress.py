"""The progress of a command that may take long, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

from killick.cli.context import Shell

REMARK_SECONDS: Final = 5.0
"""How often progress is a line on stderr, where that is no terminal."""


@contextmanager
def progress(shell: Shell) -> Generator[Callable[[str, int, int], None]]:
    """Progress on stderr: bars on a terminal, else a line now and then. Yields a function of phase, count and total."""
    if not shell.err.is_terminal:
        said = shell.clock.monotonic()

        def remark(what: str, done: int, total: int) -> None:
            nonlocal said
            if shell.clock.monotonic() - said >= REMARK_SECONDS:
                said = shell.clock.monotonic()
                shell.note(f"{what}: {done:,}{f' of {total:,}' if total else ''}")

        yield remark
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f}"), TimeRemainingColumn()
    with Progress(*columns, console=shell.err, transient=True) as bars:
        known: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in known:
                known[what] = bars.add_task(what)
            bars.update(known[what], completed=done, total=total or None)

        yield tell
