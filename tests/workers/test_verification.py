"""A worker verifies its store in the background: throttled, resumable, one worker at a time."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import killick
from killick.cli.main import main
from killick.client.client import Client
from killick.clock import ManualClock
from killick.history.doctor import examine
from killick.log import Report, verification
from killick.log.verification import VERIFICATIONS, Recorder
from killick.store.protocol import raw_store
from killick.workers import metrics
from killick.workers.verification import BackgroundVerification

DAY = 86_400


@killick.agent(name="verified_job")
async def job(run: killick.Run, n: int) -> int:
    return n


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "killick.db"
    with killick.open(str(path)) as kd:
        for number in range(6):
            kd.run(job, number, id=f"run_{number}")
    return path


def break_run(path: Path, run: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "UPDATE events SET body = x'7b7d' WHERE id = (SELECT (number << 32) + 2 FROM heads WHERE run = ?)", (run,)
        )


def due(kd: Client, *, every: float = DAY) -> BackgroundVerification:
    return BackgroundVerification(kd.runtime.engine, every, share=1.0)


def test_a_worker_finds_planted_damage_and_quarantines_that_run_alone(path: Path) -> None:
    break_run(path, "run_3")

    async def serve() -> None:
        async with killick.open_async(str(path)) as kd, kd.worker(verify_seconds=DAY):
            async with asyncio.timeout(60):
                while verification.complete(kd.runtime.log) is None:
                    await asyncio.sleep(0.01)

    asyncio.run(serve())
    with killick.open(str(path)) as kd:
        store = kd.runtime.store
        assert [f"run_{n}" for n in range(6) if store.quarantined(f"run_{n}") is not None] == ["run_3"]
        found = verification.complete(kd.runtime.log)
        assert found is not None
        assert (found.event.problems, found.report(kd.runtime.log).broken) == (1, ["run_3"])


def test_a_verification_is_due_again_after_its_interval_only(path: Path) -> None:
    clock = ManualClock(killick.clock.SystemClock().now_us())
    with killick.open(str(path), clock=clock) as kd:
        assert due(kd).look() is not None
        clock.advance(DAY / 2)
        assert due(kd).look() is None
        clock.advance(DAY)
        assert due(kd).look() is not None


def test_two_workers_do_not_verify_one_store_at_once(path: Path) -> None:
    with killick.open(str(path)) as kd:
        Recorder(kd.runtime.log, kd.runtime.clock, resumed=None, every_us=1).keep(Report(), now=True)
        kd.runtime.store.lease(VERIFICATIONS, "another", seconds=60)
        assert due(kd).look() is None
        assert verification.complete(kd.runtime.log) is None


def test_a_stopped_verification_is_continued_by_the_next_worker(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "KEEP_SECONDS", 0.0)
    break_run(path, "run_1")
    with killick.open(str(path)) as kd:
        first, seen = due(kd), list[str]()
        keep = Recorder.keep

        def stop_after_three(self: Recorder, report: Report, *, now: bool = False) -> None:
            keep(self, report, now=now)
            if report.runs == 3:
                first.stop()

        with monkeypatch.context() as patched:
            patched.setattr(Recorder, "keep", stop_after_three)
            assert first.look() is None
        assert verification.complete(kd.runtime.log) is None
        store, head = raw_store(kd.runtime.store), kd.runtime.store.head
        row = verification.newest(kd.runtime.log)
        assert row is not None
        assert row.event.runs == 3
        read = store.read
        monkeypatch.setattr(store, "read", lambda run, **options: [seen.append(run), read(run, **options)][1])
        report = due(kd).look()
        assert head(VERIFICATIONS) is not None
        assert report is not None
        assert report.broken == ["run_1"]
        assert "run_0" not in seen
        assert "run_5" in seen


def test_the_command_continues_and_begins_again_with_restart(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.open(str(path)) as kd:
        report = Report(runs=4, reached=4, inspected=True)
        Recorder(kd.runtime.log, kd.runtime.clock, resumed=None).keep(report, now=True)
    assert main(["store", "verify", "--store", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "continues after 4 runs" in err
    assert "7 runs" in out
    assert main(["store", "verify", "--store", str(path)]) == 0
    assert "continues" not in capsys.readouterr().err
    with killick.open(str(path)) as kd:
        Recorder(kd.runtime.log, kd.runtime.clock, resumed=None).keep(report, now=True)
    assert main(["store", "verify", "--restart", "--store", str(path)]) == 0
    out, err = capsys.readouterr()
    assert "continues" not in err
    assert "7 runs" in out


KILLED = """
import os, signal, sys
from killick.cli.main import main
from killick.log import verification
verification.KEEP_SECONDS = 0.0
keep = verification.Recorder.keep
def killed(self, report, *, now=False):
    keep(self, report, now=now)
    if report.runs == 4:
        os.kill(os.getpid(), signal.SIGKILL)
verification.Recorder.keep = killed
main(["store", "verify", "--store", sys.argv[1]])
"""


def test_a_killed_verification_continues_where_it_was(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_run(path, "run_1")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    assert main(["store", "verify", "--store", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "continues after 4 runs" in err
    assert "run_1" in out
    assert "1 run of 7 fails" in out


def test_metrics_and_doctor_say_when_it_was_complete_and_what_it_found(path: Path) -> None:
    clock = ManualClock(killick.clock.SystemClock().now_us())
    with killick.open(str(path), clock=clock) as kd:
        engine = kd.runtime.engine
        assert "killick_verify" not in metrics.prometheus_text(engine)
        assert due(kd).look() is not None
        text = metrics.prometheus_text(engine)
        assert "killick_verify_problems 0" in text
        assert f"killick_verify_completed_timestamp_seconds {clock.now_us() / 1e6:.6f}"[:50] in text
        said = {each.name: each for each in examine(kd.runtime.log, clock=clock).conditions}
        assert said["verified"].wrong is None
        clock.advance(3 * DAY)
        said = {each.name: each for each in examine(kd.runtime.log, clock=clock).conditions}
        assert said["verified"].wrong is not None
        break_run(path, "run_2")
        assert due(kd).look() is not None
        said = {each.name: each for each in examine(kd.runtime.log, clock=clock).conditions}
        assert "1 problem" in (said["verified"].wrong or "")
        assert "killick_verify_problems 1" in metrics.prometheus_text(engine)
