"""A worker at full speed beside a server that is asked a lot: 200 streams and 500 reads a second, each in a process of
its own, on one SQLite file. What does the worker lose?

Half of the streams follow runs event by event, the others hear hints, as pages do. Stretches with and without all of it
alternate, and the ratio is the median of neighbours, for whatever else the machine does falls on both alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import IO, Any, Final, NamedTuple

import msgspec

import killick
from bench.measure import Measure, ratio
from bench.serving import ROOT

STREAMS: Final = 200
PEOPLE: Final = 4
"""Whose the streams and the reads are: one person may open a hundred streams."""
READS_PER_SECOND: Final = 500
READERS: Final = 25
"""Connections that the reads share."""

PAIRS: Final = 5
STRETCH_SECONDS: Final = 4.0
SETTLE_SECONDS: Final = 1.5
"""How long what was switched on or off is left alone before the next stretch begins."""

BRISK_RUNS: Final = 4_000
BRISK_STEPS: Final = 200
SLOW_RUNS: Final = 20
SLOW_SECONDS: Final = 0.1
CONCURRENCY: Final = 40

_LOOKED_AT: Final = ("slow-0", "slow-1", *(f"asking-{number}" for number in range(8)))
"""The runs whose pages are open: some go on, and most wait for somebody."""

_done: int = 0


@killick.tool(effect="idempotent")
async def stamp(number: int) -> int:
    """Something that takes no time at all, so that only Killick counts."""
    global _done
    _done += 1
    return number


@killick.tool(effect="idempotent")
async def ponder(number: int) -> dict[str, Any]:
    """Something that takes as long as a quick call over the network."""
    await asyncio.sleep(SLOW_SECONDS)
    return {"number": number, "said": "a sentence or two, as tools say them, of about this length"}


@killick.agent
async def brisk(run: killick.Run, count: int) -> int:
    """One step after the other."""
    for number in range(count):
        await run.call(stamp, number)
    return count


@killick.agent
async def slow(run: killick.Run, count: int) -> int:
    """What people follow."""
    for number in range(count):
        await run.call(ponder, number)
    return count


@killick.agent
async def asking(run: killick.Run, number: int) -> str:
    """What waits in the inbox."""
    return str(await run.ask(f"Is {number} enough?", to="clerks"))


class Load(msgspec.Struct, frozen=True):
    """What the clients saw in one stretch."""

    reads: int
    frames: int
    errors: list[str]
    p50_ms: float
    p99_ms: float


def measure(folder: Path) -> Iterator[Measure]:
    """The worker's steps a second with the load to those without it."""
    url = f"sqlite:///{folder}/followers.db"
    _filled(url)
    idle: list[_Stretch] = []
    loaded: list[_Stretch] = []
    loads: list[Load] = []
    served = 0.0
    with _process("work", url) as worker, _process("serve", url) as server:
        address = server.readline()
        with _process("ask", address) as clients:
            for _ in range(PAIRS):
                idle.append(_stretch(worker))
                clients.tell("go")
                time.sleep(SETTLE_SECONDS)
                clients.tell("begin")
                before = server.cpu_seconds()
                loaded.append(_stretch(worker))
                served += server.cpu_seconds() - before
                loads.append(msgspec.json.decode(clients.ask("end"), type=Load))
                clients.ask("stop")
                time.sleep(SETTLE_SECONDS)
    errors = [error for load in loads for error in load.errors]
    reads, frames = (median(getattr(load, name) / STRETCH_SECONDS for load in loads) for name in ("reads", "frames"))
    rates, per_cpu = ([[getattr(each, name) for each in part] for part in (loaded, idle)] for name in _Stretch._fields)
    beside = (
        f"{median(rates[0]):,.0f} to {median(rates[1]):,.0f} steps/s, {ratio(*per_cpu):.2f} × for each second of "
        f"processor time; the server takes {served / PAIRS / STRETCH_SECONDS:.0%} of a core; {reads:,.0f} reads/s in "
        f"{median(load.p50_ms for load in loads):.1f} ms, 99 % in {median(load.p99_ms for load in loads):.0f} ms; "
        f"{frames:,.0f} frames/s to {STREAMS} streams; {len(errors)} errors{f': {errors[0]}' if errors else ''}"
    )
    yield Measure(
        name="followers",
        what=f"a worker's steps/s beside {STREAMS} streams and {READS_PER_SECOND} reads/s, to those without",
        figure=0.0 if errors else ratio(*rates),
        at_least=0.9,
        beside=beside,
    )
    yield Measure(
        name="followers",
        what=f"reads/s that are served, of {READS_PER_SECOND} asked for",
        figure=0.0 if errors else reads,
        form="{:,.0f}/s",
        at_least=0.98 * READS_PER_SECOND,
    )


def _filled(url: str) -> None:
    """Runs for the worker to be busy with, some that go slowly, and some that wait for people."""
    with killick.open(url, durability="process") as kd:
        for number in range(30):
            kd.start(asking, number, id=f"asking-{number}")
        for number in range(SLOW_RUNS):
            kd.start(slow, 100_000, id=f"slow-{number}", priority=1)
        for number in range(BRISK_RUNS):
            kd.start(brisk, BRISK_STEPS, id=f"brisk-{number}")


class _Stretch(NamedTuple):
    """What a worker did: steps for each second, and for each second of processor time that it was given."""

    per_second: float
    per_cpu_second: float


def _stretch(worker: _Process) -> _Stretch:
    before, began, cpu = int(worker.ask("count")), time.perf_counter(), worker.cpu_seconds()
    time.sleep(STRETCH_SECONDS)
    steps = int(worker.ask("count")) - before
    return _Stretch(steps / (time.perf_counter() - began), steps / (worker.cpu_seconds() - cpu))


class _Process:
    """A process that is told things in lines, and answers in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def cpu_seconds(self) -> float:
        """Processor time that it has used so far, by the kernel."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def tell(self, line: str) -> None:
        _end(self._process.stdin).write(f"{line}\n")
        _end(self._process.stdin).flush()

    def readline(self) -> str:
        line = _end(self._process.stdout).readline()
        assert line, "a process ended before its time"
        return line.strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.readline()


@contextlib.contextmanager
def _process(*told: str) -> Iterator[_Process]:
    command = [sys.executable, "-m", "bench.followers", *told]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Process(process)
    finally:
        _end(process.stdin).close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _end(process.stdout).close()


def _end(of: IO[str] | None) -> IO[str]:
    assert of is not None
    return of


async def _lines() -> str:
    """The next line that this process is told; empty at the end."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


# the processes ------------------------------------------------------------------------------------


async def _work(url: str) -> None:
    async with killick.open_async(url) as kd, kd.worker(concurrency=CONCURRENCY) as worker:
        while await _lines():
            print(_done, flush=True)
        worker.stop()


async def _serve(url: str) -> None:
    from killick.web.middleware import Limits
    from killick.web.server import serve
    from killick.workers.tokens import issue

    with killick.open(url) as kd:
        # All of it comes from one address here, and from many elsewhere.
        limits = Limits(rate=100_000, burst=100_000)
        texts = [issue(kd.runtime.engine, f"person-{number}", "operator")[1] for number in range(PEOPLE)]

        def ready(at: str, pages: str, link: str | None) -> None:
            print(at, *texts, flush=True)

        serving = asyncio.ensure_future(serve(kd, port=0, limits=limits, ready=ready))
        ended = asyncio.ensure_future(_lines())
        await asyncio.wait([serving, ended], return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


class _Clients:
    """Many who ask, in as little time of their own as can be."""

    def __init__(self, address: str) -> None:
        address, *self._keys = address.split(" ")
        host, _, port = address.removeprefix("http://").rstrip("/").partition(":")
        self._host, self._port = host, int(port)
        self.errors: list[str] = []
        self.took: list[float] = []
        self.frames = 0
        self._last: dict[int, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def go(self) -> None:
        followed = [f"/runs/slow-{number % SLOW_RUNS}/follow" for number in range(STREAMS // 2)]
        runs = "&".join(f"run=slow-{number}" for number in range(SLOW_RUNS))
        brisk = "&".join(f"run=brisk-{number}" for number in range(30))
        heard = [f"/live?counts=true&{runs if number % 2 else brisk}" for number in range(STREAMS // 2)]
        reads = ("/runs", "/runs/{}", "/runs/{}/steps", "/inbox")
        self.errors = []
        self._tasks = [asyncio.create_task(self._kept(self._followed(*each))) for each in enumerate(followed + heard)]
        self._tasks += [asyncio.create_task(self._kept(self._read(reads, number))) for number in range(READERS)]

    def begin(self) -> None:
        # An error before this is kept: a stream that was refused is not there to be served.
        self.took, self.frames = [], 0

    def end(self) -> Load:
        took = sorted(self.took) or [0.0]
        p50, p99 = (took[int(len(took) * share)] * 1_000 for share in (0.5, 0.99))
        return Load(len(self.took), self.frames, self.errors[:5], p50, p99)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _kept(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    async def _asked(self, path: str, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 22)
        writer.write(self._request(path, number))
        return reader, writer

    def _request(self, path: str, number: int) -> bytes:
        """The request of a connection, which is one person's."""
        head = f"Host: localhost:{self._port}\r\nAuthorization: Bearer {self._keys[number % len(self._keys)]}"
        return f"GET /api/v1{path} HTTP/1.1\r\n{head}\r\n\r\n".encode()

    async def _followed(self, number: int, path: str) -> None:
        last = self._last.get(number)
        reader, writer = await self._asked(path if last is None else f"{path}?after={last}", number)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise RuntimeError(f"{path}: {head[:60]!r}")
            while chunk := await reader.read(1 << 16):
                self.frames += chunk.count(b"\n\n")
                if (at := chunk.rfind(b"\nid: ")) >= 0:
                    self._last[number] = int(chunk[at + 5 : at + 20].partition(b"\n")[0])
            raise RuntimeError(f"{path}: the stream ended")
        finally:
            writer.close()

    async def _read(self, paths: tuple[str, ...], reading: int) -> None:
        reader, writer = await self._asked(paths[0], reading)
        pause, number = READERS / READS_PER_SECOND, reading
        due = time.perf_counter() + reading / READS_PER_SECOND
        try:
            await _body(reader)
            for path in cycle(paths):
                due += pause
                await asyncio.sleep(due - time.perf_counter())
                number += 1
                writer.write(self._request(path.format(_LOOKED_AT[number % len(_LOOKED_AT)]), reading))
                head = await _body(reader)
                # From when it was due, so that waiting for the answer before counts.
                self.took.append(time.perf_counter() - due)
                if b" 200 " not in head.partition(b"\r\n")[0]:
                    self.errors.append(f"{path}: {head[:60]!r}")
        finally:
            writer.close()


async def _body(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.partition(b":")[2]))
    return head


async def _ask(address: str) -> None:
    clients = _Clients(address)
    while line := await _lines():
        if line == "go":
            clients.go()
        elif line == "begin":
            clients.begin()
        elif line == "end":
            print(json.dumps(msgspec.to_builtins(clients.end())), flush=True)
        else:
            await clients.stop()
            print("stopped", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        role, given = sys.argv[1:]
        asyncio.run({"work": _work, "serve": _serve, "ask": _ask}[role](given))
    else:
        from tempfile import TemporaryDirectory

        from bench.measure import table

        with TemporaryDirectory() as made:
            print(table(measure(Path(made))))
