"""A common step is taken in one coroutine. Whatever it meets, its record is the one that the pipeline writes."""

from __future__ import annotations

from itertools import count as count_from
from pathlib import Path
from typing import Any

import msgspec
import pytest

import killick
from killick import rules
from killick.engine import observers
from killick.engine.steps import fast_path
from killick.errors import RunWaiting
from killick.log import encoding, writer
from killick.log.derived import apply_events
from killick.model import events as e
from killick.model.fold import Fold
from killick.model.ledger import Ledger
from killick.store import MemoryStore

CALLS: list[str] = []


class Bill(msgspec.Struct):
    to: str
    amount: int


@killick.tool
async def pay(to: str, amount: int = 7) -> str:
    CALLS.append(to)
    return f"paid {amount} to {to}"


@killick.tool(effect="reads")
async def look(at: str) -> dict[str, Any]:
    return {"at": at, "found": [1, 2.5, None]}


@killick.tool(effect="idempotent")
async def draft(to: str) -> Bill:
    return Bill(to, 3)


@killick.tool(effect="idempotent", retry=killick.Retry(attempts=3, first=0.001))
async def flaky(key: str) -> int:
    CALLS.append(key)
    if CALLS.count(key) < 3:
        raise ConnectionError("the far side hung up")
    return CALLS.count(key)


@killick.tool(effect="idempotent")
async def keyed(to: str, key: killick.Key = killick.KEY) -> str:
    return f"{to} by {key}"


@killick.tool
async def refuses(reason: str) -> None:
    raise killick.NotDone(reason)


@killick.tool
async def misfit(to: str) -> int:
    return to  # type: ignore[return-value]


@killick.tool
async def reports(to: str) -> str:
    step = killick.ToolStep.here()
    assert step is not None
    step.progress({"half": to})
    return to


@killick.agent
async def everything(run: killick.Run) -> list[Any]:
    found: list[Any] = [await run.call(pay, "ann"), await run.call(pay, to="bob", amount=2**70)]
    found.append(await run.call(look, "é\n$ref"))
    found.append((await run.call(draft, "cid")).amount)
    found.append(await run.call(flaky, "k"))
    found.append(await run.call(reports, "dan"))
    found.append(await run.call(keyed, "hal"))
    try:
        await run.call(refuses, "closed")
    except killick.StepFailed as failed:
        found.append(str(failed))
    found += await run.gather(run.call(pay, "eve"), run.call(pay, "fay"))
    await run.update(seen=3)
    found.append(await run.call(pay, "gil"))
    return found


BOUNDS = killick.Contract(
    "bounds",
    [
        rules.budget(calls=100, scope="run"),
        rules.once("draft", scope="run"),
        rules.after("reports", "look"),
        rules.total("pay", "amount", max=10**30, scope="run"),
        rules.deny("refuses"),
    ],
)

judged = killick.agent(name="judged", contract=BOUNDS)(everything.fn)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (writer, encoding):
        monkeypatch.setattr(module, "salt", lambda: b" ")
    CALLS.clear()


def apart(event: e.Event) -> list[e.Event]:
    """The start of a step as two events, which is how one that waited for an approval is written."""
    if not isinstance(event, e.StepStarted):
        return [event]
    fields = {name: getattr(event, name) for name in e.StepIntended.__struct_fields__}
    intended = e.StepIntended(**{**fields, "verdict": e.Verdict(rule="small")})
    return [intended, e.AttemptStarted(at=event.at, step=event.step, attempt=1, key=event.key, epoch=event.epoch)]


def recorded(kd: killick.Client) -> list[tuple[Any, Any]]:
    """The events of the run with their values, without what no two runs share: times, and the order of
    parallel steps."""
    found = []
    for each in kd.events("r"):
        body = msgspec.to_builtins(each.event)
        for name in ("at", "holder", "build", "retry_at"):
            body.pop(name, None)
        values = kd.runtime.log.data("r", each.seq)
        if "failure" in values:  # its traceback names lines of the engine
            body.pop("data")
            values["failure"] = {name: values["failure"][name] for name in ("kind", "type", "message")}
        found.append((body, values))
    return sorted(found, key=lambda each: repr(each) if "." in each[0].get("step", "") else "")


@pytest.mark.parametrize("agent", [everything, judged])
def test_both_ways_write_the_same_events(
    agent: killick.Agent[None, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with killick.Client(MemoryStore()) as kd:
        fast = kd.run(agent, id="r"), recorded(kd)
    CALLS.clear()
    monkeypatch.setattr(fast_path, "is_common", lambda branch, ex: False)
    with killick.Client(MemoryStore()) as kd:
        assert (kd.run(agent, id="r"), recorded(kd)) == fast


def test_a_call_that_the_contracts_accept_is_taken_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    long: list[str] = []
    real = fast_path.intent_of

    def noted(tool: Any, *args: Any) -> Any:
        long.append(tool.name)
        return real(tool, *args)

    @killick.agent(contract=BOUNDS)
    async def careful(run: killick.Run) -> None:
        for to in "abc":
            await run.call(pay, to)
        with pytest.raises(killick.Rejected):
            await run.call(refuses, "closed")
        await run.call(pay, "d")

    monkeypatch.setattr(fast_path, "intent_of", noted)
    monkeypatch.setattr(observers, "_observers", [])  # another test may have left one
    with killick.Client(MemoryStore()) as kd:
        kd.run(careful, id="r")
    assert long == ["pay", "refuses"]  # the first says which contract is in force


def test_most_steps_are_taken_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    real = fast_path.is_common

    def noted(branch: object, ex: Any) -> bool:
        taken.append(real(branch, ex))
        return taken[-1]

    monkeypatch.setattr(fast_path, "is_common", noted)
    monkeypatch.setattr(observers, "_observers", [])  # another test may have left one
    with killick.Client(MemoryStore()) as kd:
        kd.run(everything, id="r")
    assert taken == [True] * 8 + [False, False, True]
    taken.clear()
    assert killick.testing.check(everything, stories_max=40).stories == 40
    assert sum(taken) > 40


def test_a_result_of_another_type_than_declared_is_in_doubt_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.agent
    async def lying(run: killick.Run) -> int:
        return await run.call(misfit, "ann")

    found = []
    for is_fast in (True, False):
        if not is_fast:
            monkeypatch.setattr(fast_path, "is_common", lambda branch, ex: False)
        with killick.Client(MemoryStore()) as kd:
            kd.start(lying, id="r")
            kd.advance("r")
            found.append(recorded(kd))
    assert found[0] == found[1]


@pytest.mark.parametrize("agent", [everything, judged])
@pytest.mark.parametrize("count", [2, 3])
def test_whole_steps_and_single_events_fold_to_the_same_snapshots(
    agent: killick.Agent[None, list[Any]], tmp_path: Path, count: int
) -> None:
    with killick.open(tmp_path / "killick.db") as kd:
        kd.run(agent, id="r")
        found = [each.event for each in kd.events("r")]
    if count == 3:
        found = [part for event in found for part in apart(event)]
    for far in (1, 3):  # of what a rewind kept, not every seq is there
        events = list(zip(count_from(1, far), found, strict=False))
        whole, alone, single = (Fold(), Ledger()), (Fold(), Ledger()), (Fold(), Ledger())
        apply_events(*whole, events)
        apply_events(alone[0], None, events)
        apply_events(None, alone[1], events)
        for seq, event in events:
            single[0].apply(seq, event)
            single[1].apply(seq, event)
        for each in zip(whole, alone, single, strict=True):
            pieces: tuple[list[Any], ...] = ([], [], [])
            roots = [fold.save(into) for fold, into in zip(each, pieces, strict=True)]
            assert roots[0] == roots[1] == roots[2]
            assert pieces[0] == pieces[1] == pieces[2]
    assert sum(isinstance(event, e.Started) for _, event in events) > 8


async def waits_after(run: killick.Run) -> list[Any]:
    found = await everything.fn(run)
    return [*found, run.call_answer, await run.wait("go")]


replays = killick.agent(name="replays")(waits_after)
replays_judged = killick.agent(name="replays judged", contract=BOUNDS)(waits_after)


@pytest.mark.parametrize("agent", [replays, replays_judged])
def test_both_ways_replay_to_the_same_values(
    agent: killick.Agent[None, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_fast in (True, False):
        CALLS.clear()
        with killick.open(tmp_path / f"{is_fast}.db") as kd, pytest.raises(RunWaiting):
            kd.run(agent, id="r")
        made = list(CALLS)
        if not is_fast:
            monkeypatch.setattr(fast_path, "is_common", lambda branch, ex: False)
        with killick.open(tmp_path / f"{is_fast}.db") as kd:
            kd.send("r", "go", "on")
            found.append((kd.run(agent, id="r"), recorded(kd)))
        assert made == CALLS
    assert found[0] == found[1]


def test_a_recorded_step_is_replayed_without_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long: list[str] = []
    real = fast_path.intent_of

    def noted(tool: Any, *args: Any) -> Any:
        long.append(tool.name)
        return real(tool, *args)

    monkeypatch.setattr(observers, "_observers", [])  # another test may have left one
    with killick.open(tmp_path / "k.db") as kd, pytest.raises(RunWaiting):
        kd.run(replays, id="r")
    monkeypatch.setattr(fast_path, "intent_of", noted)
    with killick.open(tmp_path / "k.db") as kd:
        kd.send("r", "go", "on")
        kd.run(replays, id="r")
    assert long == ["reports", "refuses", "pay", "pay"]  # reported progress, failed, and the two of a gather
