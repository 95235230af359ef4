"""R28: agents of the second style. A transition is a scope; only the current one is ever replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import killick
from killick.errors import DeclarationRefused
from killick.model import events as e
from processes import Processes, kinds, steps, told


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes() as made:
        yield made


@dataclass(frozen=True)
class Count:
    n: int = 0
    to: int = 5


CALLS: Counter[Any] = Counter()


@pytest.fixture(autouse=True)
def nothing_called() -> None:
    CALLS.clear()


@killick.tool(effect="at_most_once", name="machine_does")
async def does(n: int) -> int:
    CALLS["tool", n] += 1
    return n


@killick.machine(name="counter")
async def counter(run: killick.Run, state: Count) -> Any:
    CALLS["step", state.n] += 1
    await run.call(does, state.n)
    if state.n == state.to:
        return killick.Done(f"counted to {state.n}")
    return killick.Next(replace(state, n=state.n + 1))


@killick.machine(name="blocking_counter")
def blocking_counter(run: killick.SyncRun, state: Count) -> Any:
    CALLS["step", state.n] += 1
    run.call(does, state.n)
    if state.n == state.to:
        return killick.Done(f"counted to {state.n}")
    return killick.Next(replace(state, n=state.n + 1))


@killick.machine(name="listener")
async def listener(run: killick.Run, state: Count) -> Any:
    CALLS["step", state.n] += 1
    await run.call(does, state.n)
    if run.received == "stop":
        return killick.Done(state.n)
    return killick.WaitFor("more", replace(state, n=state.n + 1))


@killick.machine(name="blocking_listener")
def blocking_listener(run: killick.SyncRun, state: Count) -> Any:
    CALLS["step", state.n] += 1
    run.call(does, state.n)
    if run.received == "stop":
        return killick.Done(state.n)
    return killick.WaitFor("more", replace(state, n=state.n + 1))


@pytest.mark.parametrize("machine", [counter, blocking_counter], ids=["async", "def"])
def test_r28_a_machine_goes_from_state_to_state_until_it_is_done(processes: Processes, machine: Any) -> None:
    kd = processes.new()
    assert kd.run(machine, Count(), id="r") == "counted to 5"
    assert set(CALLS.values()) == {1}
    found = steps(kd, "r")
    assert list(found)[:4] == ["1", "1.1", "2", "2.1"]
    assert found["1"] == "transition"


@pytest.mark.gate(2)
@pytest.mark.parametrize("machine", [listener, blocking_listener], ids=["async", "def"])
@pytest.mark.parametrize("warm", [True, False])
def test_r28_only_the_current_transition_is_replayed(processes: Processes, machine: Any, warm: bool) -> None:
    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(machine, Count(), id="r")
    for _ in range(20):
        kd = kd if warm else processes.new()
        kd.send("r", "more", "go")
        with pytest.raises(killick.RunWaiting):
            kd.run(machine, Count(), id="r")
    kd.send("r", "more", "stop")
    assert processes.new().run(machine, Count(), id="r") == 21
    assert Counter({(what, n): 1 for what in ("step", "tool") for n in range(22)}) == CALLS


@pytest.mark.slow
def test_r28_however_long_a_machine_lives_going_on_reads_the_end_of_its_record(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(listener, Count(), id="r")
    read: list[int] = []
    rows_of = processes.store.read

    def counted(*args: Any, **kwargs: Any) -> Any:
        rows = rows_of(*args, **kwargs)
        read.append(len(rows) if kwargs.get("data", True) else 0)  # a fold reads bodies alone, from a snapshot on
        return rows

    monkeypatch.setattr(processes.store, "read", counted)
    reads: list[int] = []
    for _ in range(100):
        kd = processes.new()
        kd.send("r", "more", "go")
        read.clear()
        kd.advance("r")
        reads.append(sum(read))
    assert len(kinds(kd, "r")) > 700
    assert max(reads[-20:]) <= max(reads[10:30]) < 50


def test_r28_a_transition_that_died_is_run_again_from_its_own_beginning(processes: Processes) -> None:
    dying, life = processes.mortal()

    @killick.tool(effect="idempotent", name="kills")
    async def kills(n: int) -> int:
        CALLS["kills", n] += 1
        if n == 3:
            life.die()
        return n

    @killick.machine(name="dies_in_a_transition")
    async def machine(run: killick.Run, state: Count) -> Any:
        CALLS["step", state.n] += 1
        first = await run.call(does, state.n)
        await run.call(kills, state.n)
        return killick.Done(first) if state.n == state.to else killick.Next(replace(state, n=state.n + 1))

    with pytest.raises(killick.KillickError):
        dying.run(machine, Count(), id="r")
    processes.mourn()
    assert processes.new().run(machine, Count(), id="r") == 5
    assert [CALLS["step", n] for n in range(6)] == [1, 1, 1, 2, 1, 1]
    assert [CALLS["tool", n] for n in range(6)] == [1] * 6
    assert CALLS["kills", 3] == 2


def test_r28_what_a_wait_ended_with_is_there_again_when_its_transition_is_replayed(processes: Processes) -> None:
    seen: list[Any] = []

    @killick.machine(name="receives")
    async def machine(run: killick.Run, state: Count) -> Any:
        seen.append((state.n, run.received))
        if state.n == 0:
            return killick.WaitFor("more", Count(1))
        if state.n == 1:
            await run.ask("well?")
            return killick.Next(Count(2))
        return killick.Done(run.received)

    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(machine, Count(), id="r")
    kd.send("r", "more", {"hello": 1})
    with pytest.raises(killick.RunWaiting):
        kd.run(machine, Count(), id="r")
    kd.answer("r", "approve")
    assert processes.new().run(machine, Count(), id="r") is None
    assert seen == [(0, None), (1, {"hello": 1}), (1, {"hello": 1}), (2, None)]


def test_r28_a_wait_of_a_machine_has_a_deadline_and_a_default(processes: Processes) -> None:
    @killick.machine(name="times_out")
    async def machine(run: killick.Run, state: Count) -> Any:
        if state.n == 0:
            return killick.WaitFor("more", Count(1), timeout="2d", default="nobody")
        return killick.Done(run.received)

    kd = processes.new()
    kd.start(machine, Count(), id="r")
    assert kd.advance("r").status == "waiting"
    started = kd.info("r").started_at_us
    assert kd.info("r").wake_at_us == started + 2 * 24 * 3600 * 1_000_000
    processes.clock.advance(24 * 3600)
    processes.new().advance("r")
    assert kd.info("r").wake_at_us == started + 2 * 24 * 3600 * 1_000_000
    processes.clock.advance(24 * 3600 + 1)
    assert processes.new().run(machine, Count(), id="r") == "nobody"


def test_r28_a_machine_may_use_everything_a_run_has(processes: Processes) -> None:
    @killick.machine(name="uses_everything", context=Count)
    async def machine(run: killick.Run[Count], state: Count) -> Any:
        await run.update(n=run.context.n + 10)
        pair = await run.gather(run.call(does, 100 + state.n), run.decided("which?", "left"))
        assert pair == (100 + state.n, "left")
        if state.n == 2:
            await run.ask("well?")
            return killick.Done(run.context.n)
        return killick.Next(Count(state.n + 1))

    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(machine, Count(), id="r")
    kd.edit.set("r", to=7)
    kd.answer("r", "approve")
    assert processes.new().run(machine, Count(), id="r") == 30
    assert kd.state("r").context.document == {"n": 30, "to": 7}
    assert [CALLS["tool", 100 + n] for n in range(3)] == [1, 1, 1]


def test_r28_code_that_changed_strands_only_what_is_under_way(processes: Processes) -> None:
    def version(renamed: bool) -> killick.Agent[Count, Any]:
        @killick.tool(effect="at_most_once", name="new_tool" if renamed else "old_tool")
        async def tool(n: int) -> int:
            return n

        @killick.machine(name="changed")
        async def machine(run: killick.Run, state: Count) -> Any:
            await run.call(tool, state.n)
            return killick.Done("over") if run.received else killick.WaitFor("more", Count(state.n + 1))

        return machine

    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(version(False), Count(), id="r")
    kd.send("r", "more", "stop")
    assert processes.new().run(version(True), Count(), id="r") == "over"
    assert list(steps(kd, "r").values()) == ["transition", "old_tool", "more", "transition", "new_tool"]


def test_r28_a_transition_that_asks_for_something_else_diverges(processes: Processes) -> None:
    def version(returns: Any) -> killick.Agent[Count, Any]:
        @killick.machine(name="diverges")
        async def machine(run: killick.Run, state: Count) -> Any:
            await run.ask("Pay?", returns=returns)
            return killick.Done("over")

        return machine

    kd = processes.new()
    with pytest.raises(killick.RunWaiting):
        kd.run(version(Any), Count(), id="r")
    with pytest.raises(killick.errors.RunDiverged) as diverged:
        processes.new().run(version(int), Count(), id="r")
    assert diverged.value.step == "1.1"
    kd.answer("r", "approve")
    assert processes.new().run(version(Any), Count(), id="r") == "over"


def test_r28_a_machine_that_fails_is_resumed_at_the_step_that_failed(processes: Processes) -> None:
    broken = [True]

    @killick.tool(effect="reads", retry=killick.Retry(attempts=1), name="breaks_in_machine")
    async def breaks() -> None:
        if broken:
            raise LookupError("broken")

    @killick.machine(name="fails")
    async def machine(run: killick.Run, state: Count) -> Any:
        CALLS["step", state.n] += 1
        await run.call(does, state.n)
        if state.n == 2:
            await run.call(breaks)
            return killick.Done("mended")
        return killick.Next(Count(state.n + 1))

    kd = processes.new()
    with pytest.raises(killick.RunFailed) as failed:
        kd.run(machine, Count(), id="r")
    assert failed.value.step == "3.2"
    broken.clear()
    kd.resume("r")
    assert kd.run(machine, Count(), id="r") == "mended"
    assert [CALLS["step", n] for n in range(3)] == [1, 1, 2]
    assert [CALLS["tool", n] for n in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("returned", [None, 17, Count()])
def test_r28_a_transition_must_say_how_it_goes_on(processes: Processes, returned: Any) -> None:
    @killick.machine(name="says_nothing")
    async def machine(run: killick.Run, state: Count) -> Any:
        return returned

    with pytest.raises(killick.RunFailed, match="Next, WaitFor or Done") as failed:
        processes.new().run(machine, Count(), id="r")
    assert failed.value.failure.is_a(DeclarationRefused)


def test_r28_a_state_that_cannot_be_stored_fails_at_once(processes: Processes) -> None:
    @killick.machine(name="unstorable")
    async def machine(run: killick.Run, state: Any) -> Any:
        return killick.Next(object())

    with pytest.raises(killick.RunFailed) as failed:
        processes.new().run(machine, 1, id="r")
    assert failed.value.failure.is_a("ValueRefused")


def test_r28_a_machine_may_be_a_child_and_a_state_is_on_record(processes: Processes) -> None:
    @killick.agent(name="parent_of_machine")
    async def parent(run: killick.Run) -> Any:
        child = await run.spawn(counter, Count(to=2), id="c")
        return await child.result()

    kd = processes.new()
    assert kd.run(parent, id="r") == "counted to 2"
    ended: list[dict[str, Any]] = [each.data.get("output") or {} for each in told(kd, "c", e.StepEnded)]
    assert [output["state"]["n"] for output in ended if "state" in output] == [1, 2]
