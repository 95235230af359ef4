"""What /metrics shows, read by Prometheus' own parser: from the app, and from a worker's process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import killick
from killick.engine.observers import observe
from killick.web import asgi
from killick.workers.metrics import MEDIA, Metrics, prometheus_text
from killick.workers.tokens import Person

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[metric, frozenset((label.rstrip("_"), value) for label, value in labels.items())]


@killick.tool(effect="reads", retry=killick.Retry(attempts=2, first=0.001, on=(ConnectionRefusedError,)))
async def knock(door: str) -> str:
    if door == "closed":
        raise ConnectionRefusedError("closed")
    return "open"


@killick.agent
async def visitor(run: killick.Run, door: str) -> str:
    found = await run.call(knock, door)
    await run.ask("come in?", to="people")
    return found


APP = """
import killick


@killick.agent
async def naps(run: killick.Run) -> str:
    await run.sleep(0.01)
    return "awake"
"""


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


@pytest.fixture
def meters() -> Iterator[Metrics]:
    made = Metrics()
    stop = observe(made)
    yield made
    stop()


def test_meters_count_attempts_waits_and_runs_as_they_come_to_their_ends(kd: killick.Client, meters: Metrics) -> None:
    with pytest.raises(killick.RunWaiting):
        kd.run(visitor, "front", id="v1")
    with pytest.raises(killick.RunFailed):
        kd.run(visitor, "closed", id="v2")
    seen = read("\n".join(meters.lines()) + "\n")
    knocks = {"agent": "visitor", "sort": "tool", "name": "knock"}
    assert of(seen, "killick_attempts_total", **knocks, outcome="returned") == 1
    assert of(seen, "killick_attempts_total", **knocks, outcome="unknown") == 2
    assert of(seen, "killick_attempt_seconds_count", **knocks) == 3
    assert of(seen, "killick_attempt_seconds_bucket", **knocks, le="+Inf") == 3
    assert of(seen, "killick_waits_opened_total", agent="visitor", for_="answer") == 1
    assert of(seen, "killick_executions_total", agent="visitor", status="waiting") == 1
    assert of(seen, "killick_runs_ended_total", agent="visitor", status="failed") == 1
    assert of(seen, "killick_runs_live", agent="visitor") == 0
    kd.answer("v1", "approve", by="ann")
    kd.run(visitor, "front", id="v1")
    seen = read("\n".join(meters.lines()) + "\n")
    assert of(seen, "killick_wait_seconds_count", agent="visitor", for_="answer", how="answered") == 1
    assert of(seen, "killick_runs_ended_total", agent="visitor", status="completed") == 1
    assert of(seen, "killick_attempts_total", **knocks, outcome="returned") == 1, (
        "what is replayed is not counted again"
    )


def test_the_store_is_shown_as_it_stands(kd: killick.Client) -> None:
    kd.start(visitor, "front", id="v1")
    with pytest.raises(killick.RunWaiting):
        kd.run(visitor, "front", id="v2")
    seen = read(prometheus_text(kd.runtime.engine))
    assert of(seen, "killick_store_up") == 1
    assert of(seen, "killick_store_runs", status="queued") == 1
    assert of(seen, "killick_store_runs", status="waiting") == 1
    assert of(seen, "killick_store_runs_asking") == 1
    assert of(seen, "killick_store_runs_due") == 1
    assert of(seen, "killick_store_due_oldest_seconds") >= 0


def test_the_app_shows_them_to_who_may_look(kd: killick.Client) -> None:
    async def asked(app: object, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    anybody = asgi(kd, lambda request: Person("ann", "viewer"))
    nobody = asgi(kd, lambda request: None)
    for path in ("/metrics", "/api/v1/metrics"):
        shown = asyncio.run(asked(anybody, path))
        assert shown.status_code == 200
        assert shown.headers["content-type"] == MEDIA
        assert of(read(shown.text), "killick_store_up") == 1
        assert asyncio.run(asked(nobody, path)).status_code == 401


def test_a_worker_shows_them_at_a_port_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    environment = {**os.environ, "KILLICK_STORE": str(tmp_path / "killick.db"), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "killick", "worker", "app.py", "--metrics", "0"]
    worker = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        line = next(line for line in worker.stdout if "/metrics" in line)
        url = next(word for word in line.split() if word.startswith("http://"))
        start = [sys.executable, "-m", "killick", "start", "app.py:naps", "--id", "n1"]
        subprocess.run(start, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=600)
        next(line for line in worker.stdout if "completed" in line)
        seen = read(httpx.get(url).text)
        assert of(seen, "killick_runs_ended_total", agent="naps", status="completed") == 1
        assert of(seen, "killick_store_runs", status="completed") == 1
        assert httpx.get(url.replace("/metrics", "/other")).status_code == 404
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=600)


def test_a_port_that_is_taken_or_none_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    for given, told in [("nine", "no port"), ("127.0.0.1:99999", "cannot be served on")]:
        command = [sys.executable, "-m", "killick", "worker", "app.py", "--metrics", given]
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert made.returncode == 2
        assert told in made.stderr
        assert "Traceback" not in made.stderr
