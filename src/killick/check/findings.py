"""The findings of a check: the problem, its cause, its line, and its fix."""

from __future__ import annotations

import os
from typing import Final, Literal

import msgspec

FindingKind = Literal[
    "twice", "lost", "differs", "hangs", "fails", "outside", "keeps", "swallows", "sleeps", "tasks", "undeclared",
    "not_undone", "fragile", "wakes", "expires", "unreached", "one_sided",
]  # fmt: skip
Weight = Literal["fault", "advice"]
Verdict = Literal["faults", "warnings", "incomplete", "sound"]

ADVICE: Final[frozenset[FindingKind]] = frozenset(
    {"undeclared", "fragile", "wakes", "expires", "unreached", "one_sided"}
)
"""The findings that only inform. All others break something."""


def weight_of(kind: FindingKind) -> Weight:
    return "advice" if kind in ADVICE else "fault"


ALONE: Final = "left alone"
"""The name of an uninterrupted rehearsal."""


def relative(file: str) -> str:
    """Returns a path relative to the working directory, if shorter."""
    try:
        near = os.path.relpath(file)
    except ValueError:
        return file
    return near if not near.startswith("..") else file


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem or remark."""

    kind: FindingKind
    title: str
    where: str
    """The file and line to change."""
    why: str
    fix: str
    """The code to write."""
    seen: str = ""
    """The first rehearsal that showed it; empty if static analysis found it."""
    times: int = 0

    @property
    def weight(self) -> Weight:
        # Process state may be a counter that no decision depends on.
        return "advice" if self.kind == "keeps" and not self.seen else weight_of(self.kind)

    def __str__(self) -> str:
        lines = [f"{self.title}  [{self.where}]", self.why, f"write: {self.fix}"]
        if self.seen:
            lines.append(f"seen {self.times} {'time' if self.times == 1 else 'times'}, first when {self.seen}")
        return "\n    ".join(lines)


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """How many tools an agent names, and those that no rehearsal called."""

    tools: int = 0
    tools_never: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check."""

    agent: str
    where: str
    left_alone: str
    """The outcome without an interruption."""
    steps: int
    questions: int
    tools: tuple[str, ...]
    ways: dict[str, int]
    """The number of rehearsals by interruption."""
    findings: tuple[Finding, ...]
    sampled: tuple[str, ...] = ()
    """Tools and models that returned samples of their declared types, for lack of a fake."""
    reached: Reached = Reached()
    """Which of the agent's tools the rehearsals called."""
    cut_short: str = ""
    """Why the check is incomplete, if it is."""

    @property
    def stories(self) -> int:
        return sum(self.ways.values())

    @property
    def ways_text(self) -> str:
        """The interruptions and their counts, in words."""
        counts = ((way, count) for way, count in self.ways.items() if way != ALONE)
        return ", ".join(f"{count} {way}{'s' * (count != 1)}" for way, count in counts)

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.weight == "fault")

    @property
    def advice(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.weight == "advice")

    @property
    def verdict(self) -> Verdict:
        """Sound only if nothing was found, all rehearsals were made, and every tool was called."""
        if self.findings:
            return "faults" if self.faults else "warnings"
        return "incomplete" if self.cut_short else "sound"

    @property
    def holds(self) -> bool:
        """Whether nothing broke."""
        return not self.faults

    def __str__(self) -> str:
        head = f"{self.agent}: interrupted in {self.stories} ways ({self.ways_text})"
        lines = [f"  {finding.weight}: {finding}" for finding in self.findings]
        return "\n".join([head, *(lines or ["  nothing found"]), *([self.cut_short] if self.cut_short else [])])


class Faulty(AssertionError):
    """An agent fails when interrupted. `report` has the details."""

    def __init__(self, report: Report) -> None:
        super().__init__(f"{len(report.faults)} found\n{report}")
        self.report = report
