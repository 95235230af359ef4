"""The reports of `killick check` for programs: JSON and SARIF. Writes no file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from killick.check.findings import Finding, FindingKind, Report, weight_of

_LEVELS: Final = {"fault": "error", "advice": "warning"}


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


def sarif(reports: Sequence[Report], version: str) -> dict[str, Any]:
    """Returns a SARIF 2.1.0 log: a result for each finding, at its file and line."""
    kinds: set[FindingKind] = {finding.kind for report in reports for finding in report.findings}
    rules = [{"id": kind, "defaultConfiguration": {"level": _LEVELS[weight_of(kind)]}} for kind in sorted(kinds)]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "killick check", "version": version, "rules": rules}},
                "columnKind": "unicodeCodePoints",
                "results": [_result(report, finding) for report in reports for finding in report.findings],
            }
        ],
    }


def _result(report: Report, finding: Finding) -> dict[str, Any]:
    file, line = place(finding)
    path = Path(file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if line is not None:
        location["region"] = {"startLine": max(line, 1)}
    return {
        "ruleId": finding.kind,
        "level": _LEVELS[finding.weight],
        "message": {"text": f"{report.agent}: {finding}"},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"killickFinding/v1": f"{report.agent} {finding.kind} {finding.title}"},
    }
