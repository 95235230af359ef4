"""A death of the process is not an outcome: it uses up no attempt, fails no run and compensates nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import killick
import servers
from killick.engine.claims import ClaimedRun, idle_outcome
from killick.engine.control.commands import leased
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.crash_loop import SUSPECT_AFTER

AGENTS = '''
import importlib.metadata, os, sys
from pathlib import Path
import killick.client.client  # here, and not in every child

HERE = Path(__file__).parent
DEATHS = int(os.environ.get("DEATHS", "0"))


def maybe_die() -> None:
    """Die, as often as the test wants."""
    made = HERE / "made"
    with made.open("a") as file:
        file.write("x")
    if len(made.read_text()) <= DEATHS:
        os._exit(9)


def refund(effect) -> None:
    (HERE / "refunded").touch()


@killick.tool(effect="idempotent", compensate=refund)
def pay(amount: int) -> str:
    return f"paid {amount}"


@killick.tool(effect="reads")
def look() -> str:
    maybe_die()
    return "seen"


@killick.tool(effect="idempotent")
def put() -> str:
    maybe_die()
    return "there"


def ask(prompt: str) -> str:
    maybe_die()
    return "reply"


@killick.agent(on_failure="compensate")
def reads(run) -> str:
    run.call(pay, 5)
    return run.call(look)


@killick.agent(on_failure="compensate")
def puts(run) -> str:
    run.call(pay, 5)
    return run.call(put)


@killick.agent(on_failure="compensate")
def asks(run) -> str:
    run.call(pay, 5)
    return run.model(ask, prompt="hello")


@killick.agent(on_failure="compensate")
def between(run) -> str:
    run.call(pay, 5)
    maybe_die()
    return "gone on"


def live(agent) -> None:
    with killick.open(str(HERE / "killick.db")) as kd:
        kd.start(agent, id="r")
        kd.run(agent, id="r")


if __name__ == "__main__":
    ended = []
    for _ in range(DEATHS + 1):
        # A process has opened nothing when it is forked.
        if not (child := os.fork()):
            live(globals()[sys.argv[1]])
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(ended)
'''


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "deaths", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("agent", ["asks", "reads", "puts", "between"])
def test_r13_a_run_whose_processes_die_completes_when_the_deaths_stop(tmp_path: Path, agent: str, deaths: int) -> None:
    program = tmp_path / "deadly.py"
    program.write_text(AGENTS)
    command = [sys.executable, program, agent]
    done = subprocess.run(command, env={"DEATHS": str(deaths)}, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str([9] * deaths + [0]), done.stderr
    assert not (tmp_path / "refunded").exists()
    with killick.open(str(tmp_path / "killick.db")) as kd:
        assert kd.info("r").status == "completed"
        assert not kd.state("r").fold.failures


@pytest.mark.parametrize("effect", ["reads", "idempotent"])
def test_r13_four_allowed_and_answered_means_four_made_across_crashes(world: Any, effect: Any) -> None:
    made: list[int] = []
    answered: list[int] = []

    @killick.tool(effect=effect, retry=killick.Retry(attempts=4))
    async def act(step: killick.ToolStep = killick.STEP) -> None:
        made.append(step.attempt)
        if len(made) in (2, 3, 5, 6, 7):
            world.die()
        else:
            answered.append(step.attempt)
        raise ConnectionResetError(f"try {step.attempt}")

    @killick.agent
    async def agent(run: killick.Run) -> None:
        await run.ask("begin?")
        await run.call(act)

    with pytest.raises(killick.RunWaiting):
        world.kd.run(agent, id="r")
    world.kd.answer("r", "approve")
    kd = world.kd
    for _ in range(5):
        kd = world.killed(agent, run="r")
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(agent, id="r")
    assert answered == [1, 4, 8, 9]
    assert failed.value.failure.cause.is_a(ConnectionResetError)
    assert len(world.told("r", e.AttemptEnded)) == 4


def test_r13_a_worker_whose_clock_is_behind_continues_a_run_that_was_taken_after_its_death(kd: killick.Client) -> None:
    @killick.agent
    async def agent(run: killick.Run) -> str:
        return (await run.ask("begin?")).kind

    kd.start(agent, id="r")
    engine = kd.runtime.engine
    ahead = engine.clock.now_us() + 40_000_000
    with leased(kd.log, "r", "a worker that died") as log:
        log.append(Entry(e.LeaseLapsed(at=ahead, holder="w", until=ahead)))
        assert idle_outcome(engine, log, ClaimedRun(kd.log.head("r"), 0, 0, backs_off=True)) is not None
    kd.advance("r")
    log = kd.log.open("r")
    assert log.fold.facts.crashes is not None
    assert idle_outcome(engine, log, ClaimedRun(kd.log.head("r"), 0, 0, backs_off=True)) is None


# beside others ------------------------------------------------------------------------------------

APP = """
import os, time
from pathlib import Path
import killick

HERE = Path(__file__).parent


def die() -> None:
    with (HERE / "deaths").open("a") as file:
        file.write("x")
    os._exit(9)


@killick.tool(effect="reads")
def work(part: int) -> int:
    time.sleep(0.02)
    return part


@killick.tool(effect="{effect}", reconcile=lambda effect: killick.DidNotHappen())
def poison() -> None:
    die()


@killick.agent
def innocent(run, parts: int) -> int:
    return sum(run.call(work, part) for part in range(parts))


@killick.agent
def in_a_tool(run) -> None:
    run.call(work, 1)
    run.call(poison)


@killick.agent
def in_its_code(run) -> None:
    run.call(work, 1)
    die()


@killick.agent
async def before_any_step(run) -> None:
    die()
"""

SERVE = """
import asyncio, importlib.metadata, os, signal, sys
import killick.client.client  # here, and not in every worker
from killick.model import crash_loop
import app

crash_loop.BACKOFF_SECONDS = (0.05, 0.2)
url, lease_seconds, workers = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
if "://" in url:
    import psycopg


async def serve() -> None:
    with killick.open(url) as kd:
        worker = kd.worker(lease_seconds=lease_seconds)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.drain)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        await worker.serve()


def started() -> int:
    # A process has opened nothing when it is forked.
    if not (child := os.fork()):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        asyncio.run(serve())
        os._exit(0)
    return child


# What comes meanwhile waits until a worker listens, or the supervisor looks.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
living = {started() for _ in range(workers)}
while signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) != signal.SIGTERM:
    for child in list(living):
        if os.waitpid(child, os.WNOHANG)[0]:
            print("died", flush=True)
            living.remove(child)
            living.add(started())
for child in living:
    os.kill(child, signal.SIGTERM)
sys.exit(any(os.waitpid(child, 0)[1] for child in living))
"""


class Supervisor:
    """Starts workers again whenever they die, until the runs are where they should be."""

    def __init__(self, folder: Path, url: str, *, workers: int = 1, lease_seconds: float = 30) -> None:
        command = [sys.executable, str(folder / "serve.py"), url, str(lease_seconds), str(workers)]
        self._process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)

    def until(self, done: Callable[[], bool], *, seconds: float = 500) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert self._process.poll() is None
            assert time.monotonic() < deadline, "not there"
            time.sleep(0.05)

    def stop(self) -> int:
        """Let the workers drain. How many died before."""
        self._process.send_signal(signal.SIGTERM)
        told, _ = self._process.communicate(timeout=500)
        assert self._process.returncode == 0
        return told.split().count("died")


def poisoned(folder: Path, url: str, poison: str, *, innocents: int, effect: str = "reads", **options: Any) -> None:
    """One run that kills its process beside innocent ones: they complete, and it is left to a person."""
    (folder / "app.py").write_text(APP.replace("{effect}", effect))
    (folder / "serve.py").write_text(SERVE)
    names = [f"innocent_{number}" for number in range(innocents)]
    with killick.open(url) as kd:
        start(kd, "poison", poison)
        for name in names:
            start(kd, name, "innocent", 5)
        supervisor = Supervisor(folder, url, **options)
        supervisor.until(
            lambda: (
                all(kd.info(name).status == "completed" for name in names)
                and kd.state("poison").fold.facts.crashes is not None
                and kd.state("poison").fold.facts.crashes.quarantined
            )
        )
        deaths = supervisor.stop()
        # One more where the first death came before the steps before it were on record.
        assert SUSPECT_AFTER <= deaths <= SUSPECT_AFTER + 1
        assert len((folder / "deaths").read_text()) == deaths + 5
        told = [each.event for each in kd.events("poison")]
        lapsed = [event for event in told if isinstance(event, e.LeaseLapsed)]
        # A death that came before the taking was on record is none of the run's.
        in_company = len(lapsed) - 5
        assert SUSPECT_AFTER <= in_company <= deaths
        assert [event.alone for event in lapsed] == [False] * in_company + [True] * 5
        assert isinstance(told[-1], e.RunQuarantined)
        assert not any(kd.state(name).fold.failures for name in [*names, "poison"])
        assert kd.store.verify().holds
        # A person lets it go on, and deaths are counted anew.
        kd.resume("poison")
        assert kd.state("poison").fold.facts.crashes is None


def start(kd: killick.Client, run: str, agent: str, value: Any = None) -> None:
    """Create a run of an agent that only the workers know."""
    at = kd.runtime.clock.now_us()
    log = kd.runtime.log.begin(run)
    log.append(Entry(e.RunStarted(at=at, run=run, agent=agent), {"input": value} if value is not None else None))


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["in_a_tool", "in_its_code", "before_any_step"])
def test_r13_a_run_that_kills_its_workers_is_quarantined_and_takes_no_neighbour_along(
    tmp_path: Path, poison: str
) -> None:
    poisoned(tmp_path, str(tmp_path / "killick.db"), poison, innocents=9)


@pytest.mark.slow
def test_r13_a_poison_tool_that_may_happen_once_is_reconciled_and_quarantined_all_the_same(tmp_path: Path) -> None:
    poisoned(tmp_path, str(tmp_path / "killick.db"), "in_a_tool", innocents=3, effect="at_most_once")


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["in_a_tool", "in_its_code"])
def test_r13_fifty_innocent_runs_on_two_workers_outlive_a_poison_one(tmp_path: Path, poison: str) -> None:
    poisoned(tmp_path, str(tmp_path / "killick.db"), poison, innocents=50, workers=2)


@pytest.mark.slow
def test_r13_on_postgresql_a_poison_run_is_quarantined_and_its_neighbours_complete(tmp_path: Path) -> None:
    poisoned(tmp_path, servers.postgres_store(), "in_its_code", innocents=3, lease_seconds=5)
