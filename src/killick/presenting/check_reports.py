"""The reports of `killick check` for programs: JSON. Writes no file."""

from __future__ import annotations

from typing import Any

import msgspec

from killick.check.findings import Finding, Report


def document(report: Report) -> dict[str, Any]:
    """Returns a report as JSON."""
    data: dict[str, Any] = msgspec.to_builtins(report)
    data["findings"] = [
        {**msgspec.to_builtins(finding), "file": file, "line": line, "weight": finding.weight}
        for finding in report.findings
        for file, line in [place(finding)]
    ]
    return {**data, "verdict": report.verdict, "holds": report.holds}


def place(finding: Finding) -> tuple[str, int | None]:
    """Returns the file and line of a finding; without a line if it has none."""
    file, _, line = finding.where.rpartition(":")
    return (file, int(line)) if file and line.isdigit() else (finding.where, None)
