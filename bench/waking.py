"""From an answer to the next step of the run that waited, and what a worker costs that has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import killick
from bench.measure import Measure
from bench.postgres import server, store_url, version
from bench.serving import Worker, asks, hears, workers
from killick.client.client import Client

ANSWERS: Final = 100
IDLE_SECONDS: Final = 10.0
REST_SECONDS: Final = 0.02
"""Between an answer's run and the next, so that the worker is at rest when it is rung."""


def measure(folder: Path) -> Iterator[Measure]:
    """A worker in another process: on a file, then on a server."""
    yield from _on(f"sqlite:///{folder}/waking.db", "SQLite")
    with server(folder) as started:
        yield from _on(store_url(started.url), version(started.url))


def _on(url: str, where: str) -> Iterator[Measure]:
    with killick.open(url) as kd, workers(url, 1, concurrency=10) as [worker]:
        for what, took in (("an answer", _answered(kd)), ("a message", _heard(kd))):
            yield Measure(
                name="waking",
                what=f"from {what} to the next step, worker in another process, on {where}, median of {ANSWERS}",
                figure=median(took) * 1e3,
                form="{:.1f} ms",
                at_most=50,
                beside=f"95 of 100 within {quantiles(took, n=20)[-1] * 1e3:.1f} ms",
            )
        yield Measure(
            name="waking",
            what=f"processor time of an idle worker on {where}, of one core",
            figure=_idle(worker) * 100,
            form="{:.2f} %",
            at_most=1,
            beside=f"over {IDLE_SECONDS:.0f} s, {2 * ANSWERS} ended runs in the store",
        )


def _answered(kd: Client) -> list[float]:
    took = []
    for number in range(ANSWERS):
        handle = kd.start(asks, id=f"asked-{number}")
        _until_waiting(kd, handle.id)
        began = time.monotonic_ns()
        kd.answer(handle.id, "approve", by="bench")
        took.append((handle.result(timeout=30) - began) / 1e9)
        time.sleep(REST_SECONDS)
    return took


def _heard(kd: Client) -> list[float]:
    took = []
    for number in range(ANSWERS):
        handle = kd.start(hears, id=f"heard-{number}")
        _until_waiting(kd, handle.id)
        began = time.monotonic_ns()
        kd.send(handle.id, "go")
        took.append((handle.result(timeout=30) - began) / 1e9)
        time.sleep(REST_SECONDS)
    return took


def _until_waiting(kd: Client, run: str) -> None:
    """Parked, and let go of: what is measured is a run that nobody has in hand."""
    while True:
        row, head = kd.runtime.store.index(run), kd.runtime.store.head(run)
        if row is not None and row.status == "waiting" and head is not None and head.holder is None:
            return time.sleep(REST_SECONDS)
        time.sleep(0.005)


def _idle(worker: Worker) -> float:
    """The share of a core that it takes while nothing happens."""
    time.sleep(1)
    before = worker.cpu_seconds()
    time.sleep(IDLE_SECONDS)
    return (worker.cpu_seconds() - before) / IDLE_SECONDS
