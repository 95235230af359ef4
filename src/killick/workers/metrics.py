"""Metrics of this process and its store, in Prometheus' text format.

No metric is labelled by run: there are too many. Store metrics cover all processes on the store, the rest this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Final

from killick.engine.engine import Engine
from killick.engine.observers import Attempt, Observer, RunSpan, Waited, observe
from killick.errors import AccessRefused, KillickError
from killick.log import verification
from killick.model import events as e
from killick.store.records import ASKS, ENDED, OWN_AGENTS, RunQuery
from killick.threads import start_thread
from killick.version import VERSION

MEDIA: Final = "text/plain; version=0.0.4; charset=utf-8"

DUE_MAX: Final = 1_000
"""The maximum of due runs that are counted; there may be more."""

HEAD_BYTES_MAX: Final = 16_384
SCRAPES_MAX: Final = 32
"""How many connections may be open; the oldest gives way to another one."""
SCRAPE_SECONDS: Final = 10.0

_QUICK: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG: Final = (1.0, 10.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0, 259_200.0, 604_800.0)

Labels = tuple[tuple[str, str], ...]
"""Names and values, in output order."""


def _labels(**values: str | None) -> Labels:
    # `for` and `by` cannot be parameter names.
    return tuple((name.rstrip("_"), value or "") for name, value in values.items())


# counters -----------------------------------------------------------------------------------------
# Not by prometheus-client: it would make an extra of `worker --metrics`, and its settings are global to the process.


class Count:
    """A counter, or a gauge."""

    def __init__(self, name: str, description: str, sort: str = "counter") -> None:
        self.name, self.description, self.sort = name, description, sort
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        self.values[labels] = self.values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.description, self.sort)
        for labels, value in sorted(self.values.items()):
            yield _line(self.name, labels, value)


class Histogram:
    """A histogram of observed values."""

    sort = "histogram"

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self.name, self.description, self.bounds = name, description, bounds
        self.values: dict[Labels, tuple[list[int], list[float]]] = {}

    def add(self, labels: Labels, measured: float) -> None:
        buckets, total = self.values.setdefault(labels, ([0] * (len(self.bounds) + 1), [0.0]))
        buckets[bisect_left(self.bounds, measured)] += 1
        total[0] += measured

    def lines(self) -> Iterator[str]:
        yield from _head(self.name, self.description, self.sort)
        for labels, (buckets, total) in sorted(self.values.items()):
            seen = 0
            for bound, count in zip((*self.bounds, None), buckets, strict=True):
                seen += count
                yield _line(f"{self.name}_bucket", (*labels, ("le", "+Inf" if bound is None else f"{bound:g}")), seen)
            yield _line(f"{self.name}_sum", labels, total[0])
            yield _line(f"{self.name}_count", labels, seen)


class Metrics(Observer):
    """The metrics of runs in this process, since counting started."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.live = Count("killick_runs_live", "Runs that are being advanced here now.", "gauge")
        self.open = Count("killick_attempts_open", "Attempts that are under way here now.", "gauge")
        self.spans = Count("killick_executions_total", "Executions of runs in this process, by their outcome.")
        self.span_seconds = Histogram("killick_execution_seconds", "How long one execution of a run took.", _QUICK)
        self.ended_runs = Count("killick_runs_ended_total", "Runs that ended here.")
        self.replayed = Count("killick_steps_replayed_total", "Steps that came from the record.")
        self.attempts = Count("killick_attempts_total", "Ended attempts, by outcome.")
        self.attempt_seconds = Histogram("killick_attempt_seconds", "How long attempts took.", _QUICK)
        self.limited = Count("killick_rate_limited_total", "Attempts that a rate limit refused.")
        self.opened = Count("killick_waits_opened_total", "Waits that were opened here.")
        self.wait_seconds = Histogram("killick_wait_seconds", "From a wait's opening to its close here.", _LONG)
        self.rejections = Count("killick_rejections_total", "Intentions that a contract rejected.")
        self.tokens = Count("killick_tokens_total", "Tokens that model calls used.")
        self.cost = Count("killick_cost_usd_total", "What model calls cost, by the prices that are known.")

    def began(self, run_span: RunSpan) -> None:
        run_span.kept[self] = True
        with self._mutex:
            self.live.add(_labels(agent=run_span.agent))
            for status in ENDED:  # a series that begins at its first failure would hide that from `increase()`
                self.ended_runs.add(_labels(agent=run_span.agent, status=status), 0)
            if run_span.replayed:
                self.replayed.add(_labels(agent=run_span.agent), run_span.replayed)

    def ended(self, run_span: RunSpan) -> None:
        agent = _labels(agent=run_span.agent)
        labels = _labels(agent=run_span.agent, status=run_span.status)
        with self._mutex:
            self.live.add(agent, -1 if run_span.kept.pop(self, False) else 0)  # it may have begun before we counted
            self.spans.add(labels)
            self.span_seconds.add(agent, _seconds(run_span.began_us, run_span.ended_us))
            if run_span.status in ENDED:
                self.ended_runs.add(labels)

    def attempted(self, attempt: Attempt) -> None:
        attempt.kept[self] = True
        with self._mutex:
            self.open.add(_labels(sort=attempt.sort))

    def came(self, attempt: Attempt) -> None:
        named = _labels(agent=attempt.agent, sort=attempt.sort, name=attempt.name)
        with self._mutex:
            self.open.add(_labels(sort=attempt.sort), -1 if attempt.kept.pop(self, False) else 0)
            self.attempts.add((*named, ("outcome", attempt.outcome or "interrupted")))
            self.attempt_seconds.add(named, _seconds(attempt.began_us, attempt.ended_us))
            if attempt.limited:
                self.limited.add(named)
            if (usage := attempt.usage) is not None:
                asked = _labels(agent=attempt.agent, model=usage.model)
                self.tokens.add((*asked, ("way", "in")), usage.tokens_in)
                self.tokens.add((*asked, ("way", "out")), usage.tokens_out)
                self.cost.add(asked, usage.cost_micros / 1_000_000)

    def waits(self, wait: Waited) -> None:
        with self._mutex:
            self.opened.add(_labels(agent=wait.agent, for_=wait.waits_for))

    def waited(self, wait: Waited) -> None:
        with self._mutex:
            labels = _labels(agent=wait.agent, for_=wait.waits_for, how=wait.how)
            self.wait_seconds.add(labels, _seconds(wait.opened_us, wait.closed_us))

    def rejected(self, run: str, agent: str, name: str, verdict: e.Verdict, run_span: RunSpan | None) -> None:
        with self._mutex:
            self.rejections.add(_labels(agent=agent, name=name, rule=verdict.rule))

    def lines(self) -> list[str]:
        with self._mutex:
            counted = (each for each in vars(self).values() if isinstance(each, Count | Histogram))
            return [line for each in counted for line in each.lines()]


def _seconds(began_us: int, ended_us: int) -> float:
    return max(ended_us - began_us, 0) / 1_000_000


@cache
def counting() -> Metrics:
    """The metrics of this process; counting starts at the first call."""
    meters = Metrics()
    observe(meters)
    return meters


# metrics of the store -----------------------------------------------------------------------------


def stored(engine: Engine) -> Iterator[str]:
    """The current metrics of the store, for all its processes."""
    store, now = engine.store, engine.clock.now_us()
    runs = Count("killick_store_runs", "Runs in the store, by status.", "gauge")
    for status, count in store.counts(RunQuery()).items():
        runs.add(_labels(status=status), count)
    yield from runs.lines()
    asking = store.counts(RunQuery(tag=ASKS))
    waiting = sum(count for status, count in asking.items() if status in ("waiting", "running"))
    yield from _one("killick_store_runs_asking", "Runs that wait for a person.", waiting)
    due = [row for row in store.due(now, limit=DUE_MAX) if not row.agent.startswith(OWN_AGENTS)]
    yield from _one("killick_store_runs_due", f"Due runs without a worker; at most {DUE_MAX} are seen.", len(due))
    since = min((row.changed_at_us if row.wake_at_us is None else row.wake_at_us for row in due), default=now)
    oldest = _seconds(since, now)
    yield from _one("killick_store_due_oldest_seconds", "For how long the one that waits longest has been due.", oldest)
    holders = Count("killick_store_holders", "Who holds runs, and whether they live.", "gauge")
    for lives in (True, False):
        holders.add(_labels(alive=str(lives).lower()), 0)
    for holder in store.holders():
        holders.add(_labels(alive=str(holder.lives).lower()))
    yield from holders.lines()
    yield from _verified(engine)


def _verified(engine: Engine) -> Iterator[str]:
    """The verification of the store, if any was recorded."""
    newest, complete = verification.newest(engine.log), verification.complete(engine.log)
    if newest is None:
        return
    ended = 0 if complete is None else complete.event.at / 1_000_000
    yield from _one("killick_verify_completed_timestamp_seconds", "When the last complete verification ended.", ended)
    yield from _one("killick_verify_runs", "Runs that the current or last verification read.", newest.event.runs)
    problems = max(each.event.problems for each in (newest, complete or newest))
    yield from _one("killick_verify_problems", "Problems that the current and the last verification found.", problems)


# as text ------------------------------------------------------------------------------------------


def prometheus_text(engine: Engine) -> str:
    """All metrics in Prometheus' text format. If the store is unreachable, that is a metric, with those of this
    process."""
    built = Count("killick_build_info", "Which Killick this is.", "gauge")
    built.add(_labels(version=VERSION))
    lines = [*built.lines(), *counting().lines()]
    try:
        lines += [*stored(engine), *_one("killick_store_up", "Whether the store answers.", 1)]
    except KillickError:
        lines += _one("killick_store_up", "Whether the store answers.", 0)
    return "\n".join(lines) + "\n"


def _one(name: str, description: str, value: float) -> Iterable[str]:
    count = Count(name, description, "gauge")
    count.add((), value)
    return count.lines()


def _head(name: str, description: str, sort: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {sort}"


def _line(name: str, labels: Labels, value: float) -> str:
    shown = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels)
    number = str(value) if isinstance(value, int) else repr(round(value, 9))
    return f"{name}{{{shown}}} {number}" if shown else f"{name} {number}"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# shown by a worker ----------------------------------------------------------------------------------


class MetricsServer:
    """Serves the metrics at `/metrics` of its own address, from one thread, until it is closed.

    Reads of a request its head, within limits of bytes and seconds, and answers one request per connection.
    """

    def __init__(self, engine: Engine, host: str, port: int) -> None:
        counting()
        self._engine = engine
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        try:
            listening = asyncio.start_server(self._answer, host, port, limit=HEAD_BYTES_MAX)
            self._server = self._loop.run_until_complete(listening)
        except (OSError, OverflowError) as error:
            self._loop.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise AccessRefused(f"{host}:{port}", f"cannot be served on ({reason}); name another port") from None
        bound = self._server.sockets[0].getsockname()
        self.url = f"http://{bound[0]!s}:{bound[1]}/metrics"
        self._thread = start_thread("killick-metrics", self._serve)

    def close(self) -> None:
        """Stops serving."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        self._loop.run_forever()
        self._server.close()
        for each in self._open:
            each.cancel()
        self._loop.run_until_complete(asyncio.wait({*self._open, self._loop.create_task(asyncio.sleep(0))}))
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        while len(self._open) >= SCRAPES_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        try:
            with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError, TimeoutError):
                async with asyncio.timeout(SCRAPE_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(head.split(b"\r\n", 1)[0]))
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._open.pop(task, None)
            writer.transport.abort()

    def _response(self, line: bytes) -> bytes:
        method, _, rest = line.partition(b" ")
        found = method == b"GET" and rest.partition(b" ")[0].partition(b"?")[0] == b"/metrics"
        body = (prometheus_text(self._engine) if found else "there is only GET /metrics here\n").encode()
        status, media = ("200 OK", MEDIA) if found else ("404 Not Found", "text/plain; charset=utf-8")
        head = f"HTTP/1.1 {status}\r\nContent-Type: {media}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + body
