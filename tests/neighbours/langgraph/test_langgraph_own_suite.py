"""LangGraph's own tests that take a checkpointer pass with ours, as far as they pass with its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from neighbours.trying import needs
from pages import ROOT

HERE = Path(__file__).resolve().parent
SETTINGS = "[pytest]\naddopts = --strict-markers -p no:cacheprovider\n"
TRIES = 4
"""Some of their tests sleep for 10 ms and expect an order: on a busy machine they need another try."""


class Outcome(NamedTuple):
    """What came of a number of tests, by name."""

    passed: set[str]
    failed: set[str]


@needs("langgraph", 1, 2, 20)
@pytest.mark.timeout(900)
def test_their_tests_that_pass_with_their_checkpointer_pass_with_ours() -> None:
    tests = their_tests()
    takers = [path for path in tests.glob("tests/test_*.py") if "sync_checkpointer" in path.read_text()]
    ours = played(tests, [str(path.relative_to(tests)) for path in takers], has_ours=True)
    passed, failed = ours.passed, ours.failed
    failed -= played(tests, failed, has_ours=False).failed if failed else set()
    for _ in range(TRIES):
        if failed:
            again = played(tests, failed, has_ours=True)
            passed, failed = passed | again.passed, again.failed
    assert failed == set()
    page = (ROOT / "docs" / "neighbours" / "langgraph.md").read_text()
    assert re.search(r"(\d+) of LangGraph's own tests", page)[1] == str(len(passed))  # type: ignore[index]


def their_tests() -> Path:
    """The folder of the tests of the installed version, from its source distribution."""
    folder = Path(sys.prefix) / "langgraph-tests"
    made = folder / f"langgraph-{version('langgraph')}"
    if not (made / "pytest.ini").exists():
        wanted = f"langgraph=={version('langgraph')}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), wanted], check=True)
        with tarfile.open(folder / f"{made.name}.tar.gz") as archive:
            # Their package itself stays out: the installed one is tested.
            parts = [each for each in archive.getmembers() if each.name.startswith(f"{made.name}/tests/")]
            archive.extractall(folder, parts, filter="data")
        (made / "pytest.ini").write_text(SETTINGS)
    return made


def played(folder: Path, tests: Collection[str], *, has_ours: bool) -> Outcome:
    """Runs those that make a SqliteSaver."""
    report = folder / "report.xml"
    plugin = ["-p", "killick_for_sqlite"] if has_ours else []
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *plugin]
    env = os.environ | {"NO_DOCKER": "true", "PYTHONPATH": f"{folder}{os.pathsep}{HERE}"}
    subprocess.run([*command, "-k", "sqlite and not aes", *sorted(tests)], cwd=folder, env=env, capture_output=True)
    passed, failed = set[str](), set[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        if case.find("skipped") is None:
            (passed if case.find("failure") is None and case.find("error") is None else failed).add(name)
    return Outcome(passed, failed)
