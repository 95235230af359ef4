"""Effects of a run tree are known by their key: equal payments of a run and its forks stay as many as each one owes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

import killick
from faulty_store import faulty
from killick.errors import StepFailed, StoreUnavailable
from killick.log.group_commit import Committer
from killick.model import events as e
from killick.store import MemoryStore, Store
from world import World

WAIT_SECONDS = 300.0

FAR: dict[str, str] = {}
"""The far side's books: the receipt of each payment, by the key that it came under."""
WORDS: dict[str, str] = {}
INSIDE: dict[str, Callable[[], None]] = {}
"""What happens inside the next payment of a run, before the far side hears of it; and after, as `run:after`."""

CLOSED: list[bool] = []
"""Whether the far side is closed, visit by visit; after the last it is open."""


@pytest.fixture(autouse=True)
def _clean() -> None:
    FAR.clear()
    INSIDE.clear()
    CLOSED.clear()


def _nothing() -> None: ...


def _met(moment: str) -> None:
    INSIDE.pop(moment, _nothing)()


def _paid(key: str, step: killick.ToolStep) -> str:
    _met(step.run)
    FAR.setdefault(key, f"receipt {len(FAR) + 1}")
    _met(f"{step.run}:after")
    return FAR[key]


@killick.tool(effect="idempotent", name="lineage_pay")
def pay(to: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    return _paid(key, step)


@killick.tool(effect="idempotent", name="lineage_pay_at_once", retry=killick.Retry(attempts=1))
def pay_at_once(to: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    return _paid(key, step)


@killick.agent(name="pays_twice")
async def pays_twice(run: killick.Run) -> list[str]:
    return [await run.call(pay, "ann"), await run.call(pay, "ann")]


class Held:
    """A run in a thread of its own, which waits inside its next payment until it is let go."""

    def __init__(
        self, kd: killick.Client, run: str, moment: str | None = None, then: Callable[[], None] = _nothing
    ) -> None:
        self._at_it, self._go_on, self._then = threading.Event(), threading.Event(), then
        self.outcome: Any = None
        INSIDE[moment or run] = self._hold
        self._thread = threading.Thread(target=lambda: setattr(self, "outcome", kd.advance(run)))
        self._thread.start()
        assert self._at_it.wait(WAIT_SECONDS)

    def _hold(self) -> None:
        self._at_it.set()
        assert self._go_on.wait(WAIT_SECONDS)
        self._then()

    def let_go(self) -> Any:
        self._go_on.set()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        return self.outcome.result


def refuses() -> None:
    raise killick.NotDone("the far side is closed")


# two equal payments stay two ----------------------------------------------------------------------


def forked(world: World, agent: Any, forks: int = 1) -> list[str]:
    """A run that has done nothing yet, and forks of it that may act."""
    world.kd.start(agent, id="r")
    return ["r", *(world.kd.fork("r", "start", effects="live").id for _ in range(forks))]


def test_a_run_and_its_live_fork_that_owe_two_equal_payments_each_pay_two(world: World) -> None:
    run, fork = forked(world, pays_twice)
    parent = Held(world.kd, run)
    assert world.beside().advance(fork).result == ["receipt 1", "receipt 2"]
    assert parent.let_go() == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2
    assert world.kd.store.verify().holds


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_it_is_so_while_all_are_inside_the_payment(world: World, order: tuple[int, ...]) -> None:
    held = [Held(world.beside(), run) for run in forked(world, pays_twice, 2)]
    assert [held[place].let_go() for place in order] == [["receipt 1", "receipt 2"]] * 3
    assert len(FAR) == 2


def test_a_fork_that_is_made_while_its_parent_is_inside_the_payment_pays_two(world: World) -> None:
    world.kd.start(pays_twice, id="r")
    parent = Held(world.kd, "r")
    other = world.beside()
    fork = Held(other, other.fork("r", "start", effects="live").id)
    assert parent.let_go() == fork.let_go() == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2


@killick.agent(name="pays_to")
async def pays_to(run: killick.Run, to: str) -> str:
    return await run.call(pay, to)


def test_forks_of_an_ended_run_see_each_other_whichever_operation_of_the_store_failed() -> None:
    number = 1
    while _siblings_paid(number):
        number += 1
    assert number > 10


def _siblings_paid(fail_at: int) -> bool:
    """Two forks, made while their parent was held, owe the same payment. False: the first needs fewer operations."""
    FAR.clear()
    clock = killick.clock.LeapingClock()
    world = World(MemoryStore(clock=clock), clock)
    try:
        world.kd.start(pays_to, "ann", id="r")
        parent = Held(world.kd, "r")
        forks = [world.beside().fork("r", "start", input="bob", effects="live").id for _ in range(2)]
        assert parent.let_go() == "receipt 1"
        store = faulty(cast("Store", world.line), fail_at=fail_at)
        with contextlib.suppress(StoreUnavailable), killick.Client(store, clock=clock, behind=False) as other:
            other.advance(forks[0])
        assert [world.bury(fork).advance(fork).result for fork in forks] == ["receipt 2"] * 2, fail_at
        assert len(FAR) == 2
        return store.failed is not None
    finally:
        world.close()


def test_two_forks_of_a_run_that_died_in_doubt_each_pay_two(world: World) -> None:
    INSIDE["r:after"] = world.die
    world.killed(pays_twice, run="r")
    forks = [world.kd.fork("r", "start", effects="live").id for _ in range(2)]
    held = [Held(world.beside(), run) for run in forks]
    assert [each.let_go() for each in held] == [["receipt 1", "receipt 2"]] * 2
    assert world.kd.advance("r").result == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2


def test_a_rewind_and_a_fork_each_pay_two(world: World) -> None:
    INSIDE["r:after"] = world.die
    world.killed(pays_twice, run="r")
    fork = world.kd.fork("r", "start", effects="live").id
    world.kd.rewind("r", "start")
    held = [Held(world.beside(), run) for run in ("r", fork)]
    assert [each.let_go() for each in held] == [["receipt 1", "receipt 2"]] * 2
    assert len(FAR) == 2


@pytest.mark.parametrize("at", ["start", "now"])
def test_a_fork_that_dies_under_its_parents_key_still_pays_two(world: World, at: str) -> None:
    INSIDE["r:after"] = world.die
    world.killed(pays_twice, run="r")
    fork = world.kd.fork("r", at, effects="live").id
    INSIDE[f"{fork}:after"] = world.die
    with pytest.raises(StoreUnavailable):
        world.kd.advance(fork)
    world.bury(fork)
    assert world.kd.advance(fork).result == ["receipt 1", "receipt 2"]
    assert world.kd.advance("r").result == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2


def test_a_run_taken_back_to_a_timeline_it_had_left_stands_on_what_that_one_stood_on(world: World) -> None:
    INSIDE["r:after"] = world.die
    world.killed(pays_twice, run="r")
    world.kd.rewind("r", "start")
    assert world.kd.advance("r").result == ["receipt 1", "receipt 2"]
    world.kd.rewind("r", "start")
    assert world.kd.advance("r").result == ["receipt 1", "receipt 2"]
    world.kd.rewind("r", "1~1:after")
    assert world.kd.advance("r").result == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2


def test_what_a_fork_did_under_a_key_counts_for_a_parent_to_which_it_was_refused(world: World) -> None:
    @killick.agent(name="pays_when_refused")
    async def agent(run: killick.Run) -> list[str]:
        paid = []
        for _ in range(3 if run.id == "r" else 2):
            try:
                paid.append(await run.call(pay_at_once, "ann"))
            except StepFailed:
                paid.append("refused")
        return paid

    run, fork = forked(world, agent)
    parent = Held(world.kd, run, then=refuses)
    assert world.beside().advance(fork).result == ["receipt 1", "receipt 2"]
    assert parent.let_go() == ["refused", "receipt 2", "receipt 1"]
    assert len(FAR) == 2


# a run waits for no lease that is not live --------------------------------------------------------


def seen(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    return killick.Happened(FAR[effect.key]) if effect.key in FAR else killick.DidNotHappen()


@killick.tool(name="lineage_send", reconcile=seen)
def send(to: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    return _paid(key, step)


@killick.agent(name="sends_twice")
async def sends_twice(run: killick.Run) -> list[str]:
    return [await run.call(send, "ann"), await run.call(send, "ann")]


@pytest.mark.parametrize("moment", ["r", "r:after"])
def test_a_fork_of_a_run_that_died_in_a_tool_with_a_reconciler_does_not_wait_for_itself(
    disk: World, moment: str
) -> None:
    INSIDE[moment] = disk.die
    with pytest.raises(StoreUnavailable, match="dead"):
        disk.kd.run(sends_twice, id="r")
    head = disk.store.head("r")
    assert head is not None
    disk.store.release("r", epoch=head.epoch, left=True)  # as a lease is whose holder died
    disk.process()
    fork = disk.kd.fork("r", "start", effects="live").id
    assert disk.kd.advance(fork).result == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2


# a fork that comes between a look and an act ------------------------------------------------------


@killick.tool(effect="reads", name="lineage_look")
def look(step: killick.ToolStep = killick.STEP) -> str:
    _met(f"{step.run}:looks")
    return "seen"


def test_a_fork_that_pays_while_its_parent_is_asked_is_not_paid_beside(world: World) -> None:
    @killick.agent(name="pays_beside_a_look")
    async def agent(run: killick.Run) -> list[str]:
        await run.call(look)
        return list(await run.gather(run.call(pay, WORDS["to"]), run.call(look)))

    WORDS["to"] = "ann"
    assert world.kd.run(agent, id="r") == ["receipt 1", "seen"]
    world.kd.rewind("r", "2:before")
    WORDS["to"] = "bob"
    parent = Held(world.kd, "r", "r:looks")  # asked whether to pay bob as well as ann, and in memory meanwhile
    other = world.beside()
    fork = other.fork("r", "1:after", effects="live").id
    assert other.advance(fork).result == ["receipt 2", "seen"]
    other.answer("r", "approve")
    while world.kd.info("r").waits:
        threading.Event().wait(0.01)
    assert parent.let_go() == ["receipt 2", "seen"]
    assert len(FAR) == 2


# what else is known by its key --------------------------------------------------------------------


@killick.tool(name="lineage_order", repeat="recorded", reconcile=seen)
def order(what: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    return _paid(key, step)


def test_what_a_timeline_adopted_counts_as_done_for_repeat_recorded(world: World) -> None:
    @killick.agent(name="orders_twice")
    async def agent(run: killick.Run) -> list[str]:
        return [await run.call(order, "ale"), await run.call(order, "ale")]

    assert world.kd.run(agent, id="r") == ["receipt 1", "receipt 1"]
    fork = world.kd.fork("r", "start", effects="live").id
    assert world.kd.advance(fork).result == ["receipt 1", "receipt 1"]
    assert len(FAR) == 1


def give_back(effect: killick.Effect) -> str:
    WORDS["given back"] = effect.key
    return "given back"


@killick.tool(name="lineage_rent", effect="idempotent", compensate=give_back)
def rent(what: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    return _paid(key, step)


def test_a_fork_that_fails_does_not_undo_what_it_did_under_its_parents_key(world: World) -> None:
    @killick.agent(name="rents_or_fails", on_failure="compensate")
    async def agent(run: killick.Run) -> str:
        rented = await run.call(rent, "hall")
        if run.id != "r":
            raise LookupError("no")
        return rented

    run, fork = forked(world, agent)
    parent = Held(world.kd, run)
    assert world.beside().advance(fork).status == "failed"
    assert parent.let_go() == "receipt 1"
    assert "given back" not in WORDS


@killick.tool(name="lineage_redeem", effect="idempotent", consumes=("token",))
def redeem(token: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    return _paid(key, step)


@killick.agent(name="redeems_once")
async def redeems(run: killick.Run) -> str:
    return await run.call(redeem, "ale")


@pytest.mark.parametrize("dies", [False, True])
def test_a_rewound_run_goes_on_with_what_consumed_a_right_in_doubt(world: World, dies: bool) -> None:
    INSIDE["r:after"] = world.die
    world.killed(redeems, run="r")
    world.kd.rewind("r", "start")
    if dies:
        INSIDE["r:after"] = world.die
        with pytest.raises(StoreUnavailable):
            world.kd.advance("r")
        world.bury("r")
    assert world.kd.advance("r").result == "receipt 1"
    assert len(FAR) == 1


@pytest.mark.parametrize("dies", [False, True])
def test_a_fork_goes_on_with_what_consumed_a_right_in_doubt(world: World, dies: bool) -> None:
    INSIDE["r:after"] = world.die
    world.killed(redeems, run="r")
    fork = world.kd.fork("r", "start", effects="live").id
    if dies:
        INSIDE[f"{fork}:after"] = world.die
        with pytest.raises(StoreUnavailable):
            world.kd.advance(fork)
        world.bury(fork)
    assert world.kd.advance(fork).result == "receipt 1"
    assert world.kd.advance("r").result == "receipt 1"
    assert len(FAR) == 1


def test_an_attempt_that_was_refused_before_anyone_waited_for_it_is_not_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committer's thread may be done with a commit before the step looks at it."""
    monkeypatch.setattr(Committer, "_lead_alone", lambda self, run: None)
    monkeypatch.setattr(Committer, "_flush_soon", lambda self, loop, slow: self._flush())
    world.kd.start(redeems, id="r")
    world.line.appends.clear()
    world.line.cut_at = (2, "before")
    with pytest.raises(StoreUnavailable):
        world.kd.advance("r")
    assert "attempt.started" in world.line.appends[1]
    assert FAR == {}


@killick.tool(
    name="lineage_pay_when_open",
    retry=killick.Retry(attempts=1),
    nothing_happened=ConnectionRefusedError,
    consumes=("to",),
)
def pay_when_open(to: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    if CLOSED and CLOSED.pop():
        raise ConnectionRefusedError("closed")
    return _paid(key, step)


@killick.tool(
    name="lineage_insist", nothing_happened=ConnectionRefusedError, retry=killick.Retry(attempts=9, first="1h")
)
def insist(to: str, key: killick.Key = killick.KEY, step: killick.ToolStep = killick.STEP) -> str:
    if CLOSED and CLOSED.pop():
        raise ConnectionRefusedError("closed")
    return _paid(key, step)


@killick.agent(name="pays_when_open")
async def pays_when_open(run: killick.Run) -> str:
    return await run.call(pay_when_open, "ann")


@killick.agent(name="insists_twice")
async def insists_twice(run: killick.Run) -> list[str]:
    return [await run.call(insist, "ann"), await run.call(insist, "ann")]


def _seq_of(world: World, run: str, kind: type[e.Event]) -> int:
    """The seq of a run's first event of a kind."""
    events = (world.kd.runtime.log.event(run, seq) for seq in range(1, world.kd.runtime.log.head(run).seq + 1))
    return next(seq for seq, event in enumerate(events, 1) if isinstance(event, kind))


def test_what_was_intended_before_a_rewind_and_done_after_it_is_not_done_again(world: World) -> None:
    CLOSED[:] = [True]
    world.kd.start(pays_when_open, id="r")
    assert world.kd.advance("r").status == "failed"
    world.kd.rewind("r", f"@{_seq_of(world, 'r', e.StepIntended)}")
    assert world.kd.advance("r").result == "receipt 1"
    assert [effect.status for effect in world.kd.runtime.log.ledger("r").effects] == ["did_not_happen", "happened"]
    assert world.kd.runtime.log.ledger("r").facts.counts.calls == {"lineage_pay_when_open": 2}
    world.kd.rewind("r", "start")
    assert world.kd.advance("r").result == "receipt 1"
    assert len(FAR) == 1


def test_a_payment_refused_in_a_timeline_that_was_left_is_not_taken_for_one_that_was_made(
    world: World,
) -> None:
    CLOSED[:] = [True, True]
    world.kd.start(insists_twice, id="r")
    world.kd.advance("r")
    refused = _seq_of(world, "r", e.AttemptEnded)
    world.kd.rewind("r", "start")
    world.kd.advance("r")
    assert not CLOSED
    world.kd.rewind("r", f"@{refused}")
    world.clock.advance(7200)
    assert world.kd.advance("r").result == ["receipt 1", "receipt 2"]
    assert len(FAR) == 2
