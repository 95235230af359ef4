"""What failed runs once more, alone in one process. A test that then passes is flaky: reported to be mended, never a
failure.

`.ci/run` turns it on: KILLICK_FLAKY names the file that collects the flaky tests. A worker that crashed, an error of
collection and an internal error fail the run as ever.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import pytest
from _pytest.terminal import TerminalReporter

PLACE: Final = "KILLICK_FLAKY"
TESTS_MAX: Final = 20
"""With more failures, the change is wrong and not the tests."""


def register(config: pytest.Config) -> None:
    """In the process that collects the results, if it is wanted."""
    if (place := os.environ.get(PLACE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(Path(place)), "again")


class Again:
    """Runs failed tests again, and takes those that pass out of the failures."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._output = ""
        self._is_broken = False

    def pytest_internalerror(self) -> None:
        self._is_broken = True

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_broken:  # of a worker: xdist forgets it if the other workers end well
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not isinstance(terminal, TerminalReporter):
            return
        reports = [report for kind in ("failed", "error") for report in terminal.stats.get(kind, ())]
        # xdist reports a crashed worker as the failure of its test, in a phase of its own.
        tests = {report.nodeid for report in reports if report.when in ("setup", "call", "teardown")}
        tests -= {report.nodeid for report in reports if report.when not in ("setup", "call", "teardown")}
        if not tests or len(tests) > TESTS_MAX:
            return
        flaky = tests - self._failing(sorted(tests), session.config.rootpath)
        for kind in ("failed", "error"):
            found = terminal.stats.pop(kind, [])
            terminal.stats.setdefault("flaky", []).extend(each for each in found if each.nodeid in flaky)
            if left := [each for each in found if each.nodeid not in flaky]:
                terminal.stats[kind] = left
        if not terminal.stats["flaky"]:
            del terminal.stats["flaky"]
        if not {"failed", "error"} & terminal.stats.keys():
            session.exitstatus = pytest.ExitCode.OK

    def _failing(self, tests: list[str], root: Path) -> set[str]:
        """Runs these tests, and returns those that fail."""
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", "", "-o", f"cache_dir={cache}", *tests]
            env = {name: value for name, value in os.environ.items() if name != PLACE}
            done = subprocess.run(
                command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
            )
            if done.returncode == pytest.ExitCode.OK:
                return set()
            self._output = done.stdout.decode(errors="replace")
            recorded = Path(cache, "v/cache/lastfailed")
            if done.returncode != pytest.ExitCode.TESTS_FAILED or not recorded.exists():
                return set(tests)
            return set(json.loads(recorded.read_text(encoding="utf-8")))

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        reports = terminalreporter.stats.get("flaky", [])
        told = "".join(
            f"-- {report.nodeid} failed among others and passes alone\n{report.longreprtext}\n\n" for report in reports
        )
        if told:
            with self._place.open("a", encoding="utf-8") as file:
                file.write(told)
            terminalreporter.section("flaky")
            terminalreporter.write(told)
        if self._output:
            terminalreporter.section("what failed again, alone")
            # Without the closing line: only the last one of the whole run has its counts.
            terminalreporter.write("".join(f"    {line}\n" for line in self._output.splitlines()[:-1]))
