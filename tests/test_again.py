"""What fails among others is tried again alone, and nothing else is forgiven."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = """
import os
import sys

AMONG_OTHERS = "PYTEST_XDIST_WORKER" in os.environ

def test_that_passes():
    pass

def test_that_passes_alone():
    assert not AMONG_OTHERS, "the others are in the way"

def test_that_fails_twice():
    assert 1 == 2, "it is wrong"

def test_that_ends_its_worker():
    if AMONG_OTHERS:
        os._exit(3)
"""


def tried(folder: Path, *options: str) -> tuple[int, list[str], str]:
    """Runs the tests in a folder: the exit code, the last lines, and what is said of flaky tests."""
    (folder / "conftest.py").write_text("import again\n\ndef pytest_configure(config):\n    again.register(config)\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:asyncio -p no:schemathesis\n")
    env = {"PYTHONPATH": str(Path(__file__).parent), "KILLICK_FLAKY": str(folder / "flaky")}
    command = [sys.executable, "-m", "pytest", "-n", "2", *options]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    flaky = (folder / "flaky").read_text() if (folder / "flaky").exists() else ""
    return done.returncode, done.stdout.decode().splitlines(), flaky


def test_a_test_that_passes_alone_is_reported_as_flaky_and_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    code, lines, flaky = tried(tmp_path, "-k", "passes")
    assert (code, lines[-1].partition(" in ")[0]) == (0, "1 passed, 1 flaky")
    assert flaky.startswith("-- test_it.py::test_that_passes_alone ")
    assert "the others are in the way" in flaky


def test_a_second_failure_and_a_crashed_worker_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    code, lines, flaky = tried(tmp_path)
    assert (code, lines[-1].partition(" in ")[0]) == (1, "2 failed, 1 passed, 1 flaky")
    failed = {line.split()[1] for line in lines if line.startswith("FAILED ")}
    assert failed == {"test_it.py::test_that_fails_twice", "test_it.py::test_that_ends_its_worker"}
    assert flaky.count("failed among others") == 1


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_other.py").write_text("import nowhere\n")
    code, lines, _ = tried(tmp_path, "-k", "passes")
    assert code != 0
    assert "ERROR test_other.py" in "".join(lines)


def test_an_error_of_the_plugins_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "broken.py").write_text("def pytest_runtest_protocol(item):\n    raise RuntimeError('no')\n")
    code, _, flaky = tried(tmp_path, "-p", "broken", "-k", "passes")
    assert (code != 0, flaky) == (True, "")
