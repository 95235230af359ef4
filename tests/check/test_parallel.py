"""Rehearsals in forked processes report what they would in one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from killick.check.parallel import FEW, quiet_ones

HERE = Path(__file__).parent

FORKING = """
import json, os, sys
from killick.check.parallel import quiet_ones
parent, counts = os.getpid(), []

def rehearsal(number):
    assert os.getpid() != parent
    if number == 7:
        raise ValueError("one that breaks off")
    if number == 20:
        os._exit(9)  # with it dies the child of all even numbers
    return number % 3 != 0

quiet = quiet_ones([lambda number=number: rehearsal(number) for number in range(40)], 2, counts.append)
print(json.dumps([sorted(quiet), counts[-1]]))
"""

CHECKING = """
import logging, os, sys
import broken
from killick.check.checker import check

logging.disable()
forks = []
os.register_at_fork(after_in_parent=lambda: forks.append(1))
for case in list(vars(broken).values()):
    if type(case).__name__ == "Agent":
        print(check(case, stories_max=400, processes=int(sys.argv[1])))
sys.exit(bool(forks) != (sys.argv[1] == "2"))
"""


def ran(code: str, *args: str) -> str:
    """What a process of its own prints: one with threads, as this one has, does not fork."""
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return re.sub(r"random\.\w+\(\)", "random", done.stdout)  # which of two calls differs first is chance


def test_the_parent_is_left_what_has_something_to_report_and_what_a_dead_child_did_not_do() -> None:
    quiet, count = json.loads(ran(FORKING))
    odd = [number for number in range(1, 40, 2) if number % 3 and number != 7]
    even = [number for number in range(0, 20, 2) if number % 3]
    assert quiet == sorted(odd + even)
    assert count == 20 + 10


def test_a_process_with_threads_rehearses_alone() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        assert quiet_ones([lambda: True] * FEW, 2, lambda count: None) == set()
    finally:
        over.set()
        other.join()


@pytest.mark.slow
def test_two_processes_report_of_every_broken_agent_what_one_does() -> None:
    said = ran(CHECKING, "1")
    assert said.count("interrupted in") > 5
    assert ran(CHECKING, "2") == said
