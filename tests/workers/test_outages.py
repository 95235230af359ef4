"""R40: an outage of the store is no death. What lapses while it is away counts against no run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import killick
from killick.clock import ManualClock
from killick.engine.claims import ClaimedRun
from killick.errors import StoreUnavailable
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.crash_loop import QUARANTINE_AFTER
from killick.store import MemoryStore
from killick.workers.stale_leases import STALE_SECONDS, StaleLeases
from store_contract.builders import indexed
from store_contract.probes import created, found

LEASE = 1.0


@killick.agent
async def outage_asks(run: killick.Run) -> str:
    return str((await run.ask("go on?")).kind)


class Server(MemoryStore):
    """A store that can be away, and whose leases alone say who lives."""

    away = False

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.proves_life = False  # type: ignore[misc]

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name in ("claim", "renew", "release", "lease", "append", "head") and super().__getattribute__("away"):

            def fails(*_: object, **__: object) -> object:
                raise StoreUnavailable("server", "it is away")

            return fails
        return found


class Place:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Server(self.clock)
        self.workers = [killick.Client(self.store, clock=self.clock, behind=False) for _ in range(2)]

    def takes(self, run: str, holder: str, *, begins: bool) -> None:
        """A worker takes a run, and perhaps begins its code."""
        head = self.store.lease(run, holder, seconds=LEASE)
        if begins:
            log = self.workers[0].runtime.log.open(run, head=head)
            log.append(Entry(e.RunTaken(at=self.clock.now_us(), epoch=head.epoch, holder=holder)))

    def advance(self, run: str, by: int = 0) -> None:
        """A worker claims the run, and advances it until it waits."""
        runtime = self.workers[by].runtime
        since = self.clock.monotonic()
        [claimed] = self.store.claim(runtime.engine.holder, now_us=self.clock.now_us(), seconds=LEASE, limit=1)
        claim = ClaimedRun(claimed.head, since, LEASE, claimed.left, claimed.left_until_us, backs_off=True)

        async def advanced() -> None:
            await runtime.executor().advance(run, claim=claim)

        runtime.blocking(advanced())

    def deaths(self, run: str) -> int:
        return sum(isinstance(each.event, e.LeaseLapsed) for each in self.workers[0].events(run, limit=1_000))


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for each in made.workers:
        each.close()


def test_a_store_that_is_away_longer_than_the_leases_kills_no_run(place: Place) -> None:
    place.workers[0].start(outage_asks, id="r")
    for number in range(QUARANTINE_AFTER * 2):
        place.takes("r", f"{number}-alive", begins=True)
        place.store.away = True
        for each in place.workers:
            lease = each.runtime.engine.leases.hold("x", 1, seconds=LEASE, since=-LEASE, lost=lambda _: None)
            each.runtime.engine.leases.look()
            each.runtime.engine.leases.drop(lease)
        place.clock.advance(2 * LEASE)
        place.store.away = False
        place.advance("r", by=number % 2)
        assert place.deaths("r") == 0
    assert place.workers[0].info("r").status == "waiting"


def test_a_lease_under_which_no_code_began_is_no_death_however_often_it_lapses(place: Place) -> None:
    place.workers[0].start(outage_asks, id="r")
    for number in range(QUARANTINE_AFTER * 2):
        place.takes("r", f"{number}-alive", begins=False)
        place.clock.advance(2 * LEASE)
        place.advance("r")
    assert place.deaths("r") == 0


def test_a_holder_that_renews_another_run_did_not_die(place: Place) -> None:
    place.workers[0].start(outage_asks, id="r")
    place.workers[0].start(outage_asks, id="other")
    place.takes("r", "1-alive", begins=True)
    place.store.lease("other", "1-alive", seconds=600)
    place.clock.advance(2 * LEASE)
    place.advance("r")
    assert place.deaths("r") == 0


def test_a_holder_that_began_the_code_and_renews_nothing_died(place: Place) -> None:
    place.workers[0].start(outage_asks, id="r")
    place.takes("r", "1-gone", begins=True)
    place.clock.advance(2 * LEASE)
    place.advance("r")
    assert place.deaths("r") == 1


def test_a_taking_after_a_lapse_is_on_record_before_the_code_begins(place: Place) -> None:
    @killick.agent(name="outage_dies")
    async def dies(run: killick.Run) -> None:
        [*_, last] = [each.event for each in place.workers[1].events("r")]
        assert isinstance(last, e.RunTaken)
        assert last.holder == place.workers[0].runtime.engine.holder

    place.workers[0].start(dies, id="r")
    place.takes("r", "1-gone", begins=False)
    place.clock.advance(2 * LEASE)
    place.advance("r")
    assert place.workers[0].info("r").status == "completed"


def test_a_store_clock_that_is_slewed_back_frees_no_long_lease() -> None:
    clock, local = ManualClock(), ManualClock()
    clock.advance(10_000)
    store = MemoryStore(clock=clock)
    store.proves_life = False  # type: ignore[misc]
    stale = StaleLeases(store, local)
    created(store, "long", index=indexed(agent="a"))
    store.lease("long", "frozen", seconds=7_200)
    stale.free([])
    clock.advance(-2)
    for _ in range(5):
        local.advance(STALE_SECONDS)
        stale.free([])
    assert found(store, "long").lease_until_us
    clock.advance(-3_600)
    for _ in range(3):
        local.advance(STALE_SECONDS)
        stale.free([])
    assert not found(store, "long").lease_until_us


@pytest.mark.parametrize("what", ["OSError", "SystemExit"])
def test_a_loop_of_blocking_callers_serves_others_after_an_interruption(what: str) -> None:
    async def interrupted() -> None:
        raise {"OSError": OSError, "SystemExit": SystemExit}[what]("planted")

    with killick.open("memory:") as kd:
        with pytest.raises((OSError, SystemExit)):
            kd.runtime.blocking(interrupted())
        kd.runtime.blocking(asyncio.sleep(0))
