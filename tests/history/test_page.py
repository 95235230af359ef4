"""A section of a run is that stretch of its timeline, and costs what is in it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

import killick
from killick.history.page import LEFT_MAX, STEPS_MAX, PageBuilder, RunPage, bounds
from killick.history.timeline import part_of, timeline
from killick.history.timeline_parts import Entry, Moment, Step, walked
from killick.log import Log
from killick.model.codec import plain
from killick.presenting.explain import why
from killick.store import MemoryStore
from killick.store.records import Row
from processes import Processes

SEEDS = range(24)


def section(log: Log, run: str, *, before: int | None = None, limit: int = STEPS_MAX) -> RunPage:
    fold = log.state(run).fold
    return PageBuilder(log, run, fold).section(*bounds(fold, before, limit))


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


async def unsay(effect: killick.Effect) -> None:
    return None


@killick.tool(effect="reads", name="sec_look", retry=killick.Retry(attempts=3, first=1))
async def look(n: int) -> str:
    return f"saw {n}"


FAILS: dict[int, int] = {}


@killick.tool(effect="idempotent", name="sec_say", retry=killick.Retry(attempts=3, first=1), compensate=unsay)
async def say(n: int) -> str:
    if FAILS.get(n, 0) > 0:
        FAILS[n] -= 1
        raise ConnectionError(f"away at {n}")
    return f"said {n}"


@killick.agent(name="sec_inner")
async def inner(run: killick.Run, n: int) -> str:
    return await run.call(look, n)


@killick.agent(name="sec_any")
async def anything(run: killick.Run, plan: list[str]) -> int:
    """Does what its input says, so that a seed makes a run."""
    await run.plan(["first", "second"])
    await run.at("first")
    for n, what in enumerate(plan):
        if n == len(plan) // 2:
            await run.at("second")
        await _do(run, n, what)
    return len(plan)


async def _do(run: killick.Run, n: int, what: str) -> None:
    match what:
        case "look":
            await run.call(look, n)
        case "say":
            await run.call(say.options(because="it is said"), n)
        case "decide":
            await run.decided(f"What at {n}?", "on", options=["on", "off"], because="it is so")
        case "note":
            await run.note(f"at {n}")
        case "update":
            await run.update(at=n)
        case "sleep":
            await run.sleep(2)
        case "child":
            child = await run.spawn(inner, n)
            await child.result()
        case "ask":
            await run.ask(f"May I, at {n}?", to="mia", timeout="1h", default="approve")
        case "gather":

            async def branch(k: int) -> None:
                await run.note(f"branch {k}")
                await run.call(look, k)
                await run.gather(run.call(say, k), run.call(look, k + 1))

            await run.gather(*(branch(100 * n + k) for k in range(3)))
        case _:
            raise LookupError(what)


KINDS = ("look", "look", "say", "say", "decide", "note", "update", "sleep", "child", "ask", "gather")


def told(entries: Sequence[Entry]) -> list[Any]:
    """Everything that entries say, in plain values that can be compared."""
    return [_told(entry) for entry in entries]


def _told(part: Any) -> Any:
    if isinstance(part, Step | Moment) or type(part).__module__ == "killick.history.timeline_parts":
        if hasattr(part, "all"):
            return (part.seq, plain(dict(part.all)))
        fields = {name: _told(getattr(part, name)) for name in part.__struct_fields__}
        return (type(part).__name__, fields)
    if isinstance(part, tuple):
        return [_told(each) for each in part]  # pyright: ignore[reportUnknownVariableType]
    return part


def a_run(processes: Processes, seed: int) -> tuple[killick.Client, str]:
    """A run of any shape: retried, asked, left and taken up again, rewound, forked, undone, failed or paused."""
    chance = random.Random(seed)
    FAILS.clear()
    FAILS.update({chance.randrange(40): chance.randrange(1, 3) for _ in range(6)})
    plan = [chance.choice(KINDS) for _ in range(chance.randrange(3, 30))]
    if chance.random() < 0.2:
        plan.append("fail")
    kd, run = processes.new(), f"r{seed}"
    _advance(kd, run, plan)
    for _ in range(chance.randrange(4)):
        fold = kd.runtime.log.state(run).fold
        match chance.choice(("rewind", "fork", "undo", "note", "pause")):
            case "rewind" if len(fold.tops):
                _tried(kd.rewind, run, f"{chance.randrange(1, len(fold.tops) + 1)}:before", by="mia")
            case "fork" if len(fold.tops):
                run = kd.fork(run, at=f"{chance.randrange(1, len(fold.tops) + 1)}:after", by="mia").id
            case "undo" if done := [step for step in fold.steps if step.name == "sec_say" and step.status == "done"]:
                _tried(kd.undo, run, chance.choice(done).id, by="mia")
            case "note":
                _tried(kd.edit.note, run, "looked at it", by="mia")
            case "pause":
                _tried(kd.pause, run, by="mia", because="for a while")
            case _:
                pass
        if chance.random() < 0.6:
            kd = processes.new()
            _tried(kd.resume, run, by="mia")
            _advance(kd, run, plan)
    return kd, run


def _tried(act: Any, *args: Any, **options: Any) -> None:
    with contextlib.suppress(killick.KillickError):  # not every run allows everything
        act(*args, **options)


def _advance(kd: killick.Client, run: str, plan: list[str]) -> None:
    try:
        if kd.runtime.store.head(run) is None:
            kd.run(anything, plan, id=run)
        for _ in range(60):
            if kd.advance(run).status in ("completed", "failed", "cancelled", "paused"):
                return
            processes_clock(kd).advance(4_000)
    except killick.KillickError:
        pass  # how it stands is on record


def processes_clock(kd: killick.Client) -> Any:
    return kd.runtime.clock


@pytest.mark.gate(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_sections_one_after_the_other_are_the_timeline(
    processes: Processes, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("killick.history.page.LEFT_MAX", 10_000)
    kd, run = a_run(processes, seed)
    whole = timeline(kd.runtime.log, run)
    for limit in (1, 3, 10, 1_000):
        found: list[Entry] = []
        before: int | None = None
        while True:
            part = section(kd.runtime.log, run, before=before, limit=limit)
            found = [*part.entries, *found]
            before = part.earlier
            if before is None:
                break
        assert told(found) == told(whole.entries), (seed, limit)


def test_a_section_has_no_more_steps_than_its_limit_and_scopes_are_whole(processes: Processes) -> None:
    kd = processes.new()
    kd.run(anything, ["look", "gather", "look", "look"], id="r")
    part = section(kd.runtime.log, "r", limit=3)
    assert [step.number for step in walked(part.entries)] == ["3", "4"]
    assert (part.first, part.last, part.total, part.earlier) == (3, 4, 4, 3)
    scope = section(kd.runtime.log, "r", before=3, limit=3)
    assert scope.first == scope.last == 2
    assert len(list(walked(scope.entries))) > 3
    assert section(kd.runtime.log, "r", before=2, limit=3).earlier is None


class _Counting:
    """A store that counts the events that are read."""

    def __init__(self, store: Any) -> None:
        self._store, self.rows = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, *args: Any, **options: Any) -> list[Row]:
        found: list[Row] = self._store.read(*args, **options)
        self.rows += len(found)
        return found


def _long(store: MemoryStore, steps: int) -> None:
    with killick.Client(store, behind=False) as kd:
        kd.run(anything, ["look"] * steps, id="r")


@pytest.mark.slow
def test_a_section_of_a_long_run_reads_its_own_events() -> None:
    """Beside the events of its own steps no more than lie between two snapshots, twice."""
    counts: Mapping[int, int] = {}
    for steps in (1_500, 3_000):
        store = MemoryStore()
        _keep_open(store)
        _long(store, steps)
        counting = _Counting(store)
        with killick.Client(counting, behind=False) as kd:
            for before in (None, steps // 2, 120):
                counting.rows = 0
                part = section(kd.runtime.log, "r", before=before, limit=100)
                assert len(list(walked(part.entries))) == 100
                assert counting.rows <= 2 * 1_100 + 4 * 100, (steps, before)
            counts = {**counts, steps: counting.rows}
    assert counts[3_000] <= counts[1_500] + 1_100


def _keep_open(store: MemoryStore) -> None:
    store.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.slow
def test_what_a_rewind_left_of_a_long_run_is_passed_over() -> None:
    store = MemoryStore()
    _keep_open(store)
    _long(store, 1_500)
    counting = _Counting(store)
    with killick.Client(counting, behind=False) as kd:
        kd.rewind("r", "10:before", by="mia")
        counting.rows = 0
        part = section(kd.runtime.log, "r", limit=20)
        assert counting.rows < 4_000
        assert [step.number for step in walked(part.entries)] == [str(n) for n in range(1, 10)]
        [rewound] = [entry for entry in part.entries if isinstance(entry, Moment) and entry.kind == "run.rewound"]
        assert len(rewound.left) == LEFT_MAX
        assert rewound.left[0].number == "10"


def test_a_part_of_a_timeline_explains_its_steps_as_the_whole_does(processes: Processes) -> None:
    kd = processes.new()
    kd.run(anything, ["update", "look", "say", "decide", "update", *["look"] * 30, "say"], id="r")
    whole, part = timeline(kd.runtime.log, "r"), part_of(kd.runtime.log, "r", limit=12)
    assert part.skipped == 22
    for number in ("30", "34"):
        assert why(part, number) == why(whole, number)
    assert why(part) == why(whole)


def test_a_redacted_log_shows_no_hidden_value() -> None:
    def hide(run: str, values: dict[str, Any]) -> dict[str, Any]:
        assert run == "r"
        return {name: "hidden" if name == "output" else value for name, value in values.items()}

    with killick.open("memory:") as kd:
        kd.run(anything, ["look"], id="r")
        [step] = walked(section(kd.runtime.log.redacted(hide), "r").entries)
        assert step.output == "hidden"
        assert step.arguments == {"n": 0}
        [step] = walked(section(kd.runtime.log, "r").entries)
        assert step.output != "hidden"


def test_a_run_without_steps_has_a_section_of_moments(processes: Processes) -> None:
    kd = processes.new()
    kd.start(anything, [], id="r")
    part = section(kd.runtime.log, "r")
    assert (part.first, part.last, part.total, part.earlier) == (1, 0, 0, None)
    assert [entry.kind for entry in part.entries if isinstance(entry, Moment)][:1] == ["run.started"]
