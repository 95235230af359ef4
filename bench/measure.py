"""What was measured, against which bar, and how it is written down. Measures nothing itself.

Machines are shared and their disks differ, so a claim about speed is a ratio to a raw store that was
measured in the same rounds: A B, B A, A B … and the median of the rounds' ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final

import msgspec

COLUMNS: Final = ("name", "what", "figure", "bar", "verdict", "beside it")


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. A figure of None could not be measured on this machine."""

    name: str
    what: str
    figure: float | None
    form: str = "{:.2f} ×"
    at_least: float | None = None
    at_most: float | None = None
    beside: str = ""

    @property
    def bar(self) -> str:
        """The bar as people read it."""
        if self.at_least is not None:
            return f"≥ {self.form.format(self.at_least)}"
        return "" if self.at_most is None else f"≤ {self.form.format(self.at_most)}"

    @property
    def verdict(self) -> str:
        """PASS, or by how much it falls short."""
        if not self.bar:
            return ""
        if self.figure is None:
            return "not measurable here"
        if self.at_least is not None:
            missing = 1 - self.figure / self.at_least
        else:
            assert self.at_most is not None
            missing = self.figure / self.at_most - 1
        return "PASS" if missing <= 0 else f"SHORT by {missing:.1%}"

    @property
    def cells(self) -> tuple[str, ...]:
        """The row, in the order of the columns."""
        figure = "—" if self.figure is None else self.form.format(self.figure)
        return (self.name, self.what, figure, self.bar, self.verdict, self.beside)


def table(measures: Iterable[Measure]) -> str:
    """The rows as a Markdown table."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(measure.cells for measure in measures)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def seconds(work: Callable[[], object]) -> float:
    """How long it takes to do this once."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def interleaved(rounds: int, *tasks: Callable[[], float]) -> list[list[float]]:
    """The figures of each task, one a round. Every other round goes backwards: none is always first."""
    figures: list[list[float]] = [[] for _ in tasks]
    for number in range(rounds):
        order = range(len(tasks))
        for task in order if number % 2 == 0 else reversed(order):
            figures[task].append(tasks[task]())
    return figures


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return median(one / other for one, other in zip(ours, theirs, strict=True))
