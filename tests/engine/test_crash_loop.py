"""R13: what follows when the processes of a run die: back-off, a process of its own, quarantine, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import killick
from killick.clock import ManualClock
from killick.engine.claims import ClaimedRun
from killick.engine.outcome import RunOutcome
from killick.history.listing import Listing
from killick.model import crash_loop
from killick.model import events as e
from killick.store import MemoryStore
from killick.store.records import RunQuery

SECOND = 1_000_000


@killick.tool(effect="reads")
async def crash_read(part: int) -> int:
    return part


@killick.agent
async def crash_reader(run: killick.Run) -> int:
    await run.call(crash_read, 1)
    await run.ask("go on?")
    return await run.call(crash_read, 2)


RAN: list[str] = []


@killick.agent
async def crash_noted(run: killick.Run) -> None:
    RAN.append(run.id)


class Shop:
    """A store in memory, a clock that stands still, and processes that come and die."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(clock=self.clock)
        self.kd = killick.Client(self.store, clock=self.clock, behind=False)

    def die(self, run: str, holder: str = "1-gone", *, alone: bool = False) -> None:
        """A process takes a run and dies at once."""
        head = self.store.lease(run, holder, seconds=1)
        log = self.kd.runtime.log.open(run, head=head)
        log.append(killick_entry(e.RunTaken(at=self.clock.now_us(), epoch=head.epoch, holder=holder, alone=alone)))
        self.clock.advance(2)

    def looked(self, *runs: str) -> list[RunOutcome]:
        """What a worker finds that claims what is due, of these runs."""
        claimed = self.store.claim(self.kd.runtime.engine.holder, now_us=self.clock.now_us(), seconds=30, limit=10)
        found = {each.row.run: each for each in claimed}
        assert sorted(found) == sorted(runs)
        return [self.kd.runtime.blocking(self._advanced(found[run])) for run in runs]

    async def _advanced(self, claimed: Any) -> RunOutcome:
        since = self.clock.monotonic()
        claim = ClaimedRun(claimed.head, since, 30, claimed.left, claimed.left_until_us, backs_off=True)
        advanced = await self.kd.runtime.executor().advance(claimed.row.run, claim=claim)
        if advanced.suspect:
            self.store.release(claimed.row.run, epoch=claimed.head.epoch)
        return advanced

    def dies_again(self, run: str, times: int, *, holder: str = "1-gone", alone: bool = False) -> None:
        for _ in range(times):
            self.die(run, holder, alone=alone)
            self.looked(run)
            crashes = self.crashes(run)
            if not crashes.quarantined:
                self.clock.advance((crashes.until - self.clock.now_us()) / SECOND)

    def crashes(self, run: str) -> Any:
        return self.kd.state(run).fold.facts.crashes


def killick_entry(event: e.Event) -> Any:
    from killick.log.writer import Entry

    return Entry(event)


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    with made.kd:
        yield made


def test_after_each_death_the_run_is_due_later_from_one_second_doubling_to_five_minutes(shop: Shop) -> None:
    assert [crash_loop.backoff_us(deaths) // SECOND for deaths in (1, 2, 3, 9, 10, 2000)] == [1, 2, 4, 256, 300, 300]
    shop.kd.start(crash_reader, id="r")
    for deaths in (1, 2, 3):
        shop.die("r")
        [advanced] = shop.looked("r")
        until = shop.clock.now_us() + crash_loop.backoff_us(deaths)
        assert (advanced.status, advanced.wake_at_us, shop.crashes("r").deaths) == ("queued", until, deaths)
        shop.clock.advance(crash_loop.backoff_us(deaths) / SECOND - 0.001)
        assert shop.looked() == []
        shop.clock.advance(0.001)


def test_a_message_does_not_end_a_back_off(shop: Shop) -> None:
    shop.kd.start(crash_reader, id="r")
    shop.dies_again("r", 2)
    shop.die("r")
    shop.looked("r")
    shop.kd.send("r", "hello")
    [advanced] = shop.looked("r")
    assert advanced.status == "queued"
    assert shop.looked() == []


def test_a_run_that_was_let_go_in_the_middle_did_not_die(shop: Shop) -> None:
    shop.kd.start(crash_reader, id="r")
    shop.store.release("r", epoch=shop.store.lease("r", "1-drained", seconds=30).epoch, left=True)
    [advanced] = shop.looked("r")
    assert advanced.status == "waiting"
    assert shop.crashes("r") is None


def test_after_three_deaths_the_run_is_given_back_to_be_run_alone(shop: Shop) -> None:
    shop.kd.start(crash_reader, id="r")
    shop.dies_again("r", 3)
    [advanced] = shop.looked("r")
    assert advanced.suspect


def test_a_step_that_ends_sets_the_count_to_zero(shop: Shop) -> None:
    shop.kd.start(crash_reader, id="r")
    shop.dies_again("r", 2)
    [advanced] = shop.looked("r")
    assert (advanced.status, shop.crashes("r")) == ("waiting", None)


def test_a_caller_in_the_foreground_goes_on_at_once_and_quarantines_nothing(shop: Shop) -> None:
    shop.kd.start(crash_noted, id="many")
    for _ in range(crash_loop.QUARANTINE_AFTER + 2):
        shop.die("many")
        head = shop.store.lease("many", "2-other", seconds=1)
        log = shop.kd.runtime.log.open("many", head=head)
        from killick.engine.claims import record_death

        record_death(log, "1-gone", shop.clock.now_us(), quarantines=False)
        shop.store.release("many", epoch=head.epoch)
    RAN.clear()
    shop.kd.run(crash_noted, id="many")
    assert RAN == ["many"]
    assert shop.kd.info("many").status == "completed"


def quarantined(shop: Shop, agent: Any) -> None:
    shop.kd.start(agent, id="r")
    shop.dies_again("r", crash_loop.SUSPECT_AFTER)
    shop.dies_again("r", 5, alone=True)
    assert shop.crashes("r").quarantined


def test_after_five_deaths_alone_the_run_waits_for_a_person_and_says_why(shop: Shop) -> None:
    quarantined(shop, crash_reader)
    assert shop.kd.info("r").status == "waiting"
    shop.clock.advance(86_400)
    shop.kd.send("r", "hello")
    assert all(not advanced.suspect for advanced in shop.looked("r"))
    assert shop.looked() == []
    with pytest.raises(killick.RunWaiting, match=r"died 8 times in a row.*killick resume r"):
        shop.kd.run(crash_reader, id="r")
    [line] = Listing(shop.kd.runtime.log).lines(shop.store.runs(RunQuery()), shop.clock.now_us())
    assert [about.kind for about in line.about] == ["crash", "person"]
    assert line.about[0].text.startswith("quarantined: its process died 8 times in a row; the last was process 1")
    assert not shop.kd.state("r").fold.failures


def test_a_person_who_resumes_lets_it_go_on_and_deaths_are_counted_anew(shop: Shop) -> None:
    quarantined(shop, crash_reader)
    assert shop.kd.resume("r") == "resumed"
    assert shop.crashes("r") is None
    [advanced] = shop.looked("r")
    assert advanced.status == "waiting"
    shop.kd.answer("r", "approve")
    assert shop.kd.run(crash_reader, id="r") == 2


def test_a_quarantined_run_is_cancelled_without_running_its_code(shop: Shop) -> None:
    quarantined(shop, crash_noted)
    RAN.clear()
    shop.kd.cancel("r")
    [advanced] = shop.looked("r")
    assert (advanced.status, RAN) == ("cancelled", [])


def test_a_run_that_was_beside_one_that_dies_alone_is_cleared(shop: Shop) -> None:
    shop.kd.start(crash_noted, id="culprit")
    shop.kd.start(crash_noted, id="beside")
    shop.kd.start(crash_noted, id="elsewhere")
    for number in range(crash_loop.SUSPECT_AFTER):
        shop.die("culprit", f"{number}-shared")
        shop.die("beside", f"{number}-shared")
        shop.die("elsewhere", f"{number}-own")
        shop.looked("culprit", "beside", "elsewhere")
        shop.clock.advance(10)
    assert [advanced.suspect for advanced in shop.looked("culprit", "beside", "elsewhere")] == [True] * 3
    shop.die("culprit", "9-alone", alone=True)
    shop.store.release("beside", epoch=shop.store.lease("beside", "x", seconds=1).epoch)
    [_, beside, elsewhere] = shop.looked("culprit", "beside", "elsewhere")
    assert (beside.status, elsewhere.suspect) == ("completed", True)
    assert shop.crashes("beside") is None
