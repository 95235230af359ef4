"""Logging and printing never raise into the engine: a handler that fails, or a pipe that closed, costs no run."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from killick.engine.leases import Leases
from killick.errors import LogError
from killick.logger import get_logger
from killick.store import MemoryStore

APP = """
import killick

@killick.agent(name="logged_fails")
async def fails(run: killick.Run, text: str) -> str:
    raise ValueError("half \\ud83d an emoji")

@killick.agent(name="logged_echoes")
async def echoes(run: killick.Run, text: str) -> str:
    return text

if __name__ == "__main__":
    with killick.open("killick.db") as kd:
        for number in range(3):
            kd.start(fails, "x", id=f"fails_{number}")
        for number in range(12):
            kd.start(echoes, "x", id=f"echoes_{number}")
"""


@killick.agent(name="logged_here")
async def here(run: killick.Run, text: str) -> str:
    if text == "fail":
        raise ValueError(text)
    return text


class Broken(logging.Handler):
    """A handler of an application that raises from wherever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.called += 1
        raise BrokenPipeError("the log is gone")


@pytest.fixture
def broken() -> Iterator[Broken]:
    handler, logger = Broken(), logging.getLogger("killick")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_worker_whose_log_handler_raises_serves_every_run(broken: Broken, tmp_path: Path) -> None:
    async def serve(kd: killick.Client) -> None:
        async with kd.worker() as worker:
            async with asyncio.timeout(300):
                await worker.until_idle()

    with killick.open(str(tmp_path / "killick.db")) as kd:
        for number in range(6):
            kd.start(here, "fail" if number % 2 else "echo", id=f"run_{number}")
        asyncio.run(serve(kd))
        assert [kd.info(f"run_{number}").status for number in range(6)] == ["completed", "failed"] * 3
    assert broken.called


def test_a_log_record_names_the_code_that_logged(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("killick.somewhere").warning("said", extra={"killick": {"what": "said"}})
    [record] = caplog.records
    assert record.filename == Path(__file__).name
    assert record.killick == {"what": "said"}  # type: ignore[attr-defined]


def test_a_listener_that_raises_keeps_no_other_lease_from_hearing() -> None:
    clock = killick.clock.ManualClock()
    store = MemoryStore(clock=clock)
    leases, heard = Leases(store, "us", clock), list[str]()

    def closed(error: LogError) -> None:
        heard.append(str(error))
        raise RuntimeError("Event loop is closed")

    kd = killick.Client(store, clock=clock, behind=False)
    for run in ("one", "two"):
        kd.start(here, "x", id=run)
        head = store.lease(run, "us", seconds=30)
        leases.hold(run, head.epoch, seconds=30, since=clock.monotonic(), lost=closed)
        store.release(run, epoch=head.epoch, holder="us")
    clock.advance(20)
    leases.look()
    assert len(heard) == 2
    kd.close()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    subprocess.run([sys.executable, "app.py"], cwd=tmp_path, check=True, timeout=600)
    return tmp_path


def statuses(folder: Path) -> set[str]:
    with killick.open(str(folder / "killick.db")) as kd:
        return {kd.info(listed.id).status for listed in kd.list(limit=100)}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "killick", *words]


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["lines", "json"])
def test_a_worker_prints_half_an_emoji_and_goes_on(app: Path, form: tuple[str, ...]) -> None:
    done = subprocess.run(
        command("worker", "app.py", "--until-idle", *form), cwd=app, capture_output=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "ud83d" in done.stdout.decode()
    assert statuses(app) == {"completed", "failed"}


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)], ids=["lines", "json"])
def test_a_worker_whose_reader_went_away_goes_on_with_its_work(app: Path, form: tuple[str, ...]) -> None:
    with subprocess.Popen(
        command("worker", "app.py", "--until-idle", "--concurrency", "1", *form),
        cwd=app, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as worker:  # fmt: skip
        assert worker.stdout is not None
        assert worker.stderr is not None
        worker.stdout.readline()
        worker.stdout.close()
        said = worker.stderr.read().decode()
        assert worker.wait(300) == 0, said
    assert "Traceback" not in said, said
    assert statuses(app) == {"completed", "failed"}


@pytest.mark.slow
def test_a_command_whose_reader_went_away_ends_quietly(app: Path) -> None:
    with subprocess.Popen(
        command("ps", "--json"), cwd=app, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as ps:  # fmt: skip
        assert ps.stdout is not None
        assert ps.stderr is not None
        ps.stdout.close()
        assert ps.stderr.read() == b""
        assert ps.wait(300) == 0
