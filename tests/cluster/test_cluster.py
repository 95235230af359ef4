"""A simulated cluster keeps its promises whatever befalls its processes, its network and its clocks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.planted import BUGS, Bug
from cluster.simulator import Fault, Plan, Story, drawn_plan, rule_of, shrunk, told
from seeds import repeats

SEEDS = range(repeats(10, 20))
SMALL = Plan(
    seed=1, workers=2, runs=3, events=1, minutes=2.0, lease_seconds=5.0, poll_seconds=10.0, latency_us=300,
    timeout_us=2_000_000, lost_effects=0.1,
    faults=(
        Fault(20.0, "crash", "w0", 5.0), Fault(50.0, "deaf", "w1", 8.0), Fault(70.0, "pause", "w0", 9.0),
        Fault(90.0, "clock", "w1", 0.0, 40.0),
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collects the loops of killed processes here: a test that comes later would get their warnings."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def test_a_small_cluster_survives_a_death_a_partition_a_pause_and_a_wrong_clock_and_a_seed_repeats_its_story() -> None:
    assert Story(SMALL).tell().trace == Story(SMALL).tell().trace


def trace_of(*words: str, hash_seed: str = "0") -> str:
    """Tells a story in a process of its own: caches that other tests filled would make it another one."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "cluster", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.partition("trace ")[2].split()[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cluster_keeps_its_promises_under_drawn_faults(seed: int) -> None:
    assert trace_of(str(seed))


@pytest.mark.far
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_fleet_of_two_hundred_workers_keeps_its_promises_for_hours(seed: int) -> None:
    assert trace_of(str(seed), "--fleet")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(repeats(3, 5)))
def test_after_a_failover_that_lost_commits_every_log_is_whole_and_every_run_ends(seed: int) -> None:
    assert trace_of(str(seed), "--failover")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(repeats(4, 12)))
def test_every_call_that_the_store_accepted_is_on_record_though_runs_renew_and_people_vote_at_once(seed: int) -> None:
    assert trace_of(str(seed), "--called")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(repeats(3, 12)))
def test_a_clock_that_is_wrong_for_a_moment_silences_no_trigger_and_holds_up_no_run(seed: int) -> None:
    assert trace_of(str(seed), "--leaps")


@pytest.mark.slow
def test_a_seed_tells_the_same_story_in_another_process_with_other_string_hashes() -> None:
    assert trace_of("4", hash_seed="1") == trace_of("4", hash_seed="2")


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with bug.plant():
        assert any(rule_of(told(drawn_plan(seed, called=bug.is_called))) is not None for seed in bug.seeds)


def test_a_story_that_breaks_is_shrunk_to_the_faults_that_it_takes() -> None:
    [late] = [bug for bug in BUGS if bug.name == "a lease is renewed after its end"]
    stalled = Fault(30.5, "stall", "w0", 9.0)
    faults = (Fault(5.0, "clock", "w0", 0.0, 3.0), stalled, Fault(45.0, "bells", "w0", 4.0))
    plan = replace(SMALL, seed=2, workers=1, runs=0, events=0, minutes=1.0, faults=faults)
    with late.plant():
        assert rule_of(told(plan)) == "no lease is renewed after its end"
        assert shrunk(plan, "no lease is renewed after its end").faults == (stalled,)


def test_an_idle_worker_wakes_its_threads_rarely() -> None:
    plan = replace(SMALL, workers=3, runs=0, events=0, minutes=10.0, lease_seconds=30.0, poll_seconds=60.0, faults=())
    found = Story(plan).tell()
    assert found.switches / found.virtual_seconds < 8
