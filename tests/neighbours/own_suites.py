"""A framework's own tests, from the source distribution of its installed version, with a class of ours in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Collection
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from pages import ROOT

TRIES = 4
"""Some of their tests sleep for 10 ms and expect an order: on a busy machine they need another try."""


class Outcome(NamedTuple):
    """What came of a number of tests: the names of those that passed, and why the others failed."""

    passed: set[str]
    failed: dict[str, str]
    known: dict[str, str] = {}  # noqa: RUF012
    """Those that failed because they are of the framework's own class alone."""


class OwnSuite(NamedTuple):
    """The tests of a distribution, and the pytest plugin in `place` that puts our class in the place of theirs."""

    folder: Path
    place: Path
    plugin: str
    chosen: tuple[str, ...] = ()
    mark: str = ""
    """The JUnit property of the tests that count; without it all of them do."""

    def outcome(self, tests: Collection[str], is_theirs: Callable[[str, str], bool]) -> Outcome:
        """With ours. What fails with their own class as well is of no account; the rest is tried again.

        is_theirs   whether a test that fails, by its name and its error, is one of their class alone
        """
        passed, failed, _ = self._played(tests, self.plugin)
        known = {name: why for name, why in failed.items() if is_theirs(name, why)}
        failed = {name: why for name, why in failed.items() if name not in known}
        if failed:
            theirs = self._played(failed, "").failed
            failed = {name: why for name, why in failed.items() if name not in theirs}
        for _ in range(TRIES):
            if failed:
                again = self._played(failed, self.plugin)
                passed, failed = passed | again.passed, again.failed
        return Outcome(passed, failed, known)

    def _played(self, tests: Collection[str], plugin: str) -> Outcome:
        report = self.folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *self.chosen]
        env = os.environ | {"NO_DOCKER": "true", "PYTHONPATH": f"{self.folder}{os.pathsep}{self.place}"}
        with_ours = ["-p", plugin] if plugin else []
        subprocess.run([*command, *with_ours, *sorted(tests)], cwd=self.folder, env=env, capture_output=True)
        passed, failed = set[str](), dict[str, str]()
        for case in ElementTree.parse(report).iter("testcase"):
            trouble = next((part for part in case if part.tag in ("failure", "error")), None)
            counts = not plugin or any(each.get("name") == self.mark for each in case.iter("property"))
            if trouble is not None:
                failed[self._name(case.attrib)] = trouble.attrib.get("message", "")
            elif case.find("skipped") is None and (counts or not self.mark):
                passed.add(self._name(case.attrib))
        return Outcome(passed, failed)

    def _name(self, case: dict[str, str]) -> str:
        """How pytest would be given it: a file's path, a class if there is one, and a test."""
        parts = case["classname"].split(".")
        path = next(n for n in range(len(parts), 0, -1) if (self.folder / f"{'/'.join(parts[:n])}.py").exists())
        return "::".join([f"{'/'.join(parts[:path])}.py", *parts[path:], case["name"]])


def their_tests(package: str, settings: str) -> Path:
    """The folder of the tests of the installed version; their package itself stays out: the installed one is tested."""
    folder = Path(sys.prefix) / "own-tests"
    made = folder / f"{package.replace('-', '_')}-{version(package)}"
    if not (made / "tests").exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(folder), f"{package}=={version(package)}"], check=True)
        with tarfile.open(folder / f"{made.name}.tar.gz") as archive:
            parts = [each for each in archive.getmembers() if each.name.startswith(f"{made.name}/tests/")]
            archive.extractall(folder, parts, filter="data")
    (made / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers -p no:cacheprovider\n{settings}")
    return made


def shown(page: str, pattern: str) -> int:
    """The number that a guide says."""
    text = " ".join((ROOT / "docs" / "neighbours" / f"{page}.md").read_text().split())
    found = re.search(pattern, text)
    assert found is not None, f"docs/neighbours/{page}.md does not have: {pattern}"
    return int(found[1].replace(",", ""))
