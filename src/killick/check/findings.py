"""What rehearsals found, in words that a person can act on: what goes wrong, why, at which line, and what to write."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

FindingKind = Literal[
    "twice", "lost", "differs", "hangs", "fails", "outside", "keeps", "swallows", "sleeps", "tasks", "undeclared",
    "not_undone", "fragile", "writes", "wakes", "expires",
]  # fmt: skip
Weight = Literal["fault", "advice"]

WEIGHTS: dict[FindingKind, Weight] = {
    "twice": "fault", "lost": "fault", "differs": "fault", "hangs": "fault", "fails": "fault", "outside": "fault",
    "keeps": "fault", "swallows": "fault", "sleeps": "fault", "tasks": "fault", "not_undone": "fault",
    "undeclared": "advice", "fragile": "advice", "writes": "advice", "wakes": "advice", "expires": "advice",
}  # fmt: skip
"""Whether a finding breaks something, or is only worth knowing."""


ALONE: Final = "left alone"
"""What a rehearsal that nothing befell is counted as."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to mend, or to know."""

    kind: FindingKind
    title: str
    where: str
    """File and line of what to change."""
    why: str
    fix: str
    """What to write."""
    seen: str = ""
    """The first rehearsal that showed it; empty where reading the code was enough."""
    times: int = 0

    @property
    def weight(self) -> Weight:
        # What is kept in the process may be a count that nobody decides by.
        return "advice" if self.kind == "keeps" and not self.seen else WEIGHTS[self.kind]

    def __str__(self) -> str:
        lines = [f"{self.title}  [{self.where}]", self.why, f"write: {self.fix}"]
        if self.seen:
            lines.append(f"seen {self.times} {'time' if self.times == 1 else 'times'}, first when {self.seen}")
        return "\n    ".join(lines)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of interrupting an agent in every way."""

    agent: str
    where: str
    left_alone: str
    """How it ends when nothing interrupts it."""
    steps: int
    questions: int
    tools: tuple[str, ...]
    ways: dict[str, int]
    """How many rehearsals there were, by what befell them."""
    findings: tuple[Finding, ...]
    sampled: tuple[str, ...] = ()
    """Tools and models that gave samples of their declared types, for nobody said what they give."""
    cut_short: str = ""
    """Why not everything was rehearsed, if so."""

    @property
    def stories(self) -> int:
        return sum(self.ways.values())

    @property
    def told_ways(self) -> str:
        """What befell the rehearsals, and how many of each there were."""
        told = ((way, count) for way, count in self.ways.items() if way != ALONE)
        return ", ".join(f"{count} {way}{'s' * (count != 1)}" for way, count in told)

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.weight == "fault")

    @property
    def advice(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.weight == "advice")

    @property
    def holds(self) -> bool:
        """Whether nothing broke."""
        return not self.faults

    def __str__(self) -> str:
        head = f"{self.agent}: interrupted in {self.stories} ways ({self.told_ways})"
        told = [f"  {finding.weight}: {finding}" for finding in self.findings]
        return "\n".join([head, *(told or ["  nothing found"]), *([self.cut_short] if self.cut_short else [])])


class Faulty(AssertionError):
    """An agent does not stand being interrupted. `report` says how."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"{len(report.faults)} found\n{report}")
        self.report = report
