"""The reports of `killick check` for programs: JSON, JUnit XML and SARIF. Writes no file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from xml.etree import ElementTree

import msgspec

from killick.check.findings import Finding, FindingKind, Report, weight_of

_LEVELS: Final = {"fault": "error", "advice": "warning"}
_NOT_XML: Final = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


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


def junit(reports: Sequence[Report]) -> bytes:
    """Returns a suite for each agent. A finding is a test case: a fault fails it, advice is its output."""
    root = ElementTree.Element("testsuites", name="killick check")
    for report in reports:
        suite = ElementTree.SubElement(root, "testsuite", name=_xml(report.agent), errors="0", skipped="0")
        suite.set("tests", str(max(len(report.findings), 1)))
        suite.set("failures", str(len(report.faults)))
        for finding in report.findings:
            case = ElementTree.SubElement(suite, "testcase", classname=_xml(report.agent), name=_xml(finding.title))
            title = f"{finding.where}: {finding.title}"
            if finding.weight == "fault":
                ElementTree.SubElement(case, "failure", message=_xml(title), type=finding.kind).text = _xml(finding)
            else:
                ElementTree.SubElement(case, "system-out").text = _xml(finding)
        if not report.findings:
            name = f"interrupted {report.stories} times"
            ElementTree.SubElement(suite, "testcase", classname=_xml(report.agent), name=name)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _xml(text: object) -> str:
    """Replaces characters that XML cannot hold."""
    return _NOT_XML.sub("\ufffd", str(text))


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
