"""The page of threats names tests that exist, and every command."""

from __future__ import annotations

import re
from pathlib import Path

from killick.cli.main import COMMANDS, GROUPS

ROOT = Path(__file__).parents[2]


def test_every_statement_about_a_threat_names_a_test() -> None:
    known = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    rows = [line for line in (ROOT / "docs/threats.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= known, row


def test_the_page_says_of_every_command_what_it_does_with_what_another_person_sent() -> None:
    page = (ROOT / "docs/threats.md").read_text()
    section = page.partition("## What a command does with what another person sent")[2].partition("\n## ")[0]
    bullets = re.findall(r"^- .*(?:\n  .*)*", section, re.MULTILINE)
    known = {*COMMANDS, *(f"{group} {word}" for group, (_, words) in GROUPS.items() for word in words)}
    listed = [found for bullet in bullets for found in re.findall(r"`([a-z][a-z -]+)`", bullet)]
    first = set(listed)
    assert first == known, f"missing: {sorted(known - first)}, unknown: {sorted(first - known)}"
