"""A run under test stops where its test says, and nowhere else; what is wrong with the test is told at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import killick
from killick.errors import AnswerRefused, FakeRefused, KillickError, RunElsewhere
from killick.testing import always, in_order, play


@dataclass
class Claim:
    number: int


@dataclass
class Receipt:
    id: str


@killick.tool(effect="reads")
async def played_fetch(number: int) -> list[str]:
    raise NotImplementedError("the real one")


@killick.tool(effect="idempotent", retry=killick.Retry(attempts=4))
def played_pay(amount: int, key: killick.Key = killick.KEY) -> str:
    raise NotImplementedError("the real one")


@killick.tool
async def played_mail(to: str, text: str = "hello") -> Receipt:
    raise NotImplementedError("the real one")


@killick.agent
async def played_review(run: killick.Run, claim: Claim) -> str:
    docs = await run.call(played_fetch, claim.number)
    answer = await run.ask(f"Pay claim {claim.number}?", to="managers", timeout="72h", default="reject")
    if not answer.approved:
        return "rejected"
    await run.sleep("24h")
    paid = await run.call(played_pay, 1250)
    receipt = await run.call(played_mail, "ann@example.org")
    return f"{docs[0]}, {paid}, {receipt.id}"


@killick.agent
def played_blocking(run: killick.SyncRun, claim: Claim) -> str:
    docs = run.call(played_fetch, claim.number)
    answer = run.ask("Go on?")
    run.sleep("1h")
    return f"{docs[0]}, {run.call(played_pay, 5)}, {answer.kind}"


FAKES: dict[Any, Any] = {played_fetch: ["a.pdf"], played_pay: "paid", played_mail: Receipt("r1")}


# where it stops ------------------------------------------------------------------------------------


def test_a_run_is_played_by_what_is_awaited() -> None:
    async def test() -> None:
        async with play(played_review, Claim(17), fakes=FAKES) as t:
            await t.until_waiting()
            assert t.wait.prompt == "Pay claim 17?"
            assert t.waits_for == {"person"}
            t.answer("approve", by="ann")
            assert await t.result() == "a.pdf, paid, r1"
            assert t.calls(played_mail) == [{"to": "ann@example.org", "text": "hello"}]
            assert t.state.outputs["1"] == ["a.pdf"]

    asyncio.run(test())


@pytest.mark.parametrize("agent", [played_review, played_blocking])
def test_a_run_is_played_without_awaiting_anything(agent: killick.Agent[Claim, str]) -> None:
    with play(agent, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("approve", by="ann")
        assert t.result().startswith("a.pdf, paid")
        assert t.info.status == "completed"
        assert t.result().startswith("a.pdf, paid"), "an ended run gives its result again"


def test_both_ways_of_playing_leave_the_same_record() -> None:
    async def awaited() -> list[str]:
        async with play(played_review, Claim(17), fakes=FAKES) as t:
            await t.until_waiting()
            t.answer("approve")
            await t.result()
            return [recorded.event.__class__.__name__ for recorded in t.client.events(t.run)]

    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("approve")
        t.result()
        blocking = [recorded.event.__class__.__name__ for recorded in t.client.events(t.run)]
    assert asyncio.run(awaited()) == blocking


def test_until_waiting_stops_at_time_and_says_so() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("approve")
        t.until_waiting()
        assert t.waits_for == {"time"}
        t.advance("23h")
        t.until_waiting()
        assert t.waits_for == {"time"}
        assert t.calls(played_pay) == []
        t.advance("1h")
        assert t.calls(played_pay) == [], "nothing happens before the run is driven"
        assert t.result() == "a.pdf, paid, r1"


def test_until_waiting_stops_at_a_backoff_and_leaps_over_it_when_told_to() -> None:
    @killick.agent
    async def pays_and_asks(run: killick.Run) -> str:
        await run.call(played_pay, 5)
        return (await run.ask("Well?")).kind

    with play(pays_and_asks, fakes={played_pay: [ConnectionError("down"), "paid"]}) as t:
        t.until_waiting()
        assert (t.waits_for, list(t.waits)) == ({"time"}, [])
        with pytest.raises(RunElsewhere, match="one wait should be open, but the run waits for time"):
            _ = t.wait
        t.until_waiting(leap=True)
        assert (t.waits_for, t.wait.prompt) == ({"person"}, "Well?")
        assert len(t.calls(played_pay)) == 2


def test_a_deadline_passes_only_when_the_test_says_so() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        with pytest.raises(killick.RunWaiting, match="Pay claim 17"):
            t.result()
        t.advance("72h")
        assert t.result() == "rejected"


def test_result_leaps_over_sleeps_by_exactly_their_time() -> None:
    @killick.agent
    async def sleeps(run: killick.Run) -> list[str]:
        seen = []
        for hours in (1, 24, 100):
            await run.sleep(f"{hours}h")
            seen.append(f"{run.now():%d %H}")
        return seen

    with play(sleeps, now=datetime(2026, 3, 1, tzinfo=UTC)) as t:
        assert t.result() == ["01 01", "02 01", "06 05"]
        assert t.clock.now_us() == round(datetime(2026, 3, 6, 5, tzinfo=UTC).timestamp() * 1_000_000)


def test_a_run_that_sleeps_for_ever_is_told_apart_from_one_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.agent
    async def polls(run: killick.Run) -> None:
        while True:
            await run.sleep("1h")

    monkeypatch.setattr("killick.testing.player.LEAPS_MAX", 50)
    with play(polls) as t, pytest.raises(RunElsewhere, match="should end, but the run slept 50 times"):
        t.result()


def test_until_stops_before_a_tool_is_called() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("approve")
        t.until(played_pay)
        assert (t.info.step, t.calls(played_pay)) == ("4", [])
        t.until("played_mail")
        assert (t.calls(played_pay), t.calls(played_mail)) == ([{"amount": 1250}], [])
        t.until("5", returned=True)
        assert len(t.calls(played_mail)) == 1
        assert t.state.position.pending == ("5",)
        assert t.result() == "a.pdf, paid, r1"


def test_until_tells_where_the_run_is_when_it_never_comes_there() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        with pytest.raises(RunElsewhere, match="should reach played_pay, but the run waits for answer at step 2: Pay"):
            t.until(played_pay)
        t.answer("reject")
        with pytest.raises(RunElsewhere, match="should reach 9, but the run has completed with 'rejected'"):
            t.until("9")


def test_until_waiting_on_a_run_that_ends_is_an_error_that_says_how() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("reject")
        with pytest.raises(RunElsewhere, match="should wait, but the run has completed with 'rejected'"):
            t.until_waiting()
    with (
        play(played_review, Claim(17), fakes={played_fetch: ValueError("no such claim")}) as t,
        pytest.raises(killick.RunFailed, match="no such claim"),
    ):
        t.until_waiting()


# crashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [played_review, played_blocking])
def test_a_crash_drops_what_is_in_memory_and_the_run_goes_on_from_the_store(agent: killick.Agent[Claim, str]) -> None:
    with play(agent, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        before = t.client
        t.crash()
        assert t.client is not before
        assert t.wait.to == (("managers",) if agent is played_review else ())
        t.answer("approve")
        t.until(played_pay)
        t.crash()
        assert t.result().startswith("a.pdf, paid")
        assert len(t.calls(played_fetch)) == 1, "what is on record is not called again"
        assert not t.client.store.verify().problems


def test_a_crash_before_the_call_leaves_an_effect_in_doubt() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("approve")
        t.until(played_mail)
        t.crash()
        t.until_waiting()
        assert "Did it happen?" in str(t.wait.prompt)
        t.answer("not", by="ann")
        assert t.result() == "a.pdf, paid, r1"
        assert len(t.calls(played_mail)) == 1


def test_a_crash_after_the_call_leaves_an_effect_in_doubt_that_happened() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.answer("approve")
        t.until(played_mail, returned=True)
        t.crash()
        t.until_waiting()
        t.answer("happened", {"id": "r2"}, by="ann")
        assert t.result() == "a.pdf, paid, r2"
        assert len(t.calls(played_mail)) == 1


def test_a_fake_may_crash_the_process_itself_and_the_drive_goes_on_with_the_next_one() -> None:
    def dies_once(amount: int, key: str) -> str:
        keys.append(key)
        if len(keys) == 1:
            t.crash()
        return "paid"

    keys: list[str] = []
    with play(played_review, Claim(17), fakes={**FAKES, played_pay: dies_once}) as t:
        t.until_waiting()
        t.answer("approve")
        assert t.result() == "a.pdf, paid, r1"
    assert len(keys) == 2
    assert keys[0] == keys[1]
    assert keys[0].startswith("run:step_4:played_pay:")


def test_a_run_may_be_crashed_between_any_two_calls_of_the_test() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.crash()
        t.crash()
        t.until_waiting()
        t.crash()
        t.answer("approve")
        t.crash()
        t.until_waiting()
        t.crash()
        t.advance("24h")
        t.crash()
        assert t.result() == "a.pdf, paid, r1"
        t.crash()
        assert t.result() == "a.pdf, paid, r1"


# what people and other programs do ------------------------------------------------------------------


def test_messages_words_and_edits_reach_the_run() -> None:
    @killick.agent
    async def listens(run: killick.Run) -> list[Any]:
        await run.update(limit=1)
        first = await run.wait("paid")
        return [first, await run.remarks(), run.context.limit]

    with play(listens) as t:
        t.until_waiting()
        assert (t.waits_for, t.wait.name) == ({"event"}, "paid")
        t.client.say(t.run, "hurry", by="ann")
        t.client.edit.set(t.run, limit=5)
        t.client.send(t.run, "paid", {"amount": 7})
        assert t.result() == [{"amount": 7}, ["hurry"], 5]


def test_a_paused_run_says_so_and_goes_on_when_it_is_resumed() -> None:
    with play(played_review, Claim(17), fakes=FAKES) as t:
        t.until_waiting()
        t.client.pause(t.run, by="ann")
        t.answer("approve")
        with pytest.raises(killick.errors.RunPaused):
            t.result()
        t.client.resume(t.run)
        assert t.result() == "a.pdf, paid, r1"


def test_a_cancelled_run_undoes_only_what_is_real_or_faked_to_be_undone() -> None:
    def really_refund(effect: killick.Effect) -> None:
        raise NotImplementedError("the real one")

    @killick.tool(compensate=really_refund)
    async def charges(amount: int) -> str:
        raise NotImplementedError("the real one")

    @killick.agent
    async def charges_and_asks(run: killick.Run) -> None:
        await run.call(charges, 5)
        await run.ask("Well?")

    refunded: list[Any] = []
    for fakes in ({charges: "c1"}, {charges: "c1", really_refund: lambda effect: refunded.append(effect.result)}):
        with play(charges_and_asks, fakes=fakes) as t:
            t.until_waiting()
            t.client.cancel(t.run, compensate=True)
            with pytest.raises(killick.errors.RunCancelled) as raised:
                t.result()
            assert raised.value.not_undone == ()
            assert [call["effect"].arguments for call in t.calls(really_refund)] == [{"amount": 5}]
    assert refunded == ["c1"]


def test_an_answer_goes_to_the_wait_that_is_named_where_there_are_several() -> None:
    @killick.agent
    async def asks_two(run: killick.Run) -> list[str]:
        answers = await run.gather(run.ask("one?"), run.ask("two?"))
        return [answer.kind for answer in answers]

    with play(asks_two) as t:
        t.until_waiting()
        with pytest.raises(RunElsewhere, match="has 2: answer at step"):
            _ = t.wait
        with pytest.raises(AnswerRefused, match="several waits are open"):
            t.answer("approve")
        first, second = t.waits
        t.answer("reject", wait=second)
        t.answer("approve", wait=first.id)
        assert t.result() == ["approve", "reject"]


# children and branches ------------------------------------------------------------------------------


@killick.agent
async def played_child(run: killick.Run, hours: int) -> str:
    await run.sleep(f"{hours}h")
    return f"{run.now():%H}"


def test_children_wake_in_the_order_of_their_times() -> None:
    @killick.agent
    async def parent(run: killick.Run) -> list[str]:
        children = [await run.spawn(played_child, hours) for hours in (5, 2, 3)]
        return [await child.result() for child in children]

    with play(parent, now=datetime(2026, 3, 1, tzinfo=UTC)) as t:
        assert t.result() == ["05", "02", "03"]


def test_until_waiting_stops_when_only_a_child_sleeps() -> None:
    @killick.agent
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(played_child, 5)
        return await child.result()

    with play(parent, now=datetime(2026, 3, 1, tzinfo=UTC)) as t:
        t.until_waiting()
        assert t.waits_for == {"time"}
        t.crash()
        t.advance("4h")
        t.until_waiting()
        assert t.waits_for == {"time"}
        t.advance("1h")
        assert t.result() == "05"


def test_what_a_child_asks_is_answered_through_its_parent() -> None:
    @killick.agent
    async def asking_child(run: killick.Run) -> str:
        return (await run.ask("May I?")).kind

    @killick.agent
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(asking_child)
        return await child.result()

    with play(parent) as t:
        t.until_waiting()
        assert (t.waits_for, t.wait.prompt) == ({"person"}, "May I?")
        assert t.wait.run != t.run
        t.answer("approve")
        assert t.result() == "approve"


def test_branches_beside_a_held_one_go_on() -> None:
    @killick.agent
    async def both(run: killick.Run) -> tuple[str, Receipt]:
        paid, mailed = await run.gather(run.call(played_pay, 1), run.call(played_mail, "ann"))
        return paid, mailed

    with play(both, fakes=FAKES) as t:
        t.until(played_pay)
        assert t.calls(played_pay) == []
        assert t.result() == ("paid", Receipt("r1"))
        assert (len(t.calls(played_mail)), len(t.calls(played_pay))) == (1, 1)


# fakes --------------------------------------------------------------------------------------------


def test_a_list_is_read_by_what_the_tool_returns() -> None:
    with play(played_review, Claim(17), fakes={played_fetch: ["a.pdf"], played_pay: ["paid"]}) as t:
        t.until_waiting()
        assert t.state.outputs["1"] == ["a.pdf"]
    with play(played_review, Claim(17), fakes={played_fetch: [["b.pdf"], ["c.pdf"]]}) as t:
        t.until_waiting()
        assert t.state.outputs["1"] == ["b.pdf"]
    with pytest.raises(FakeRefused, match=r"neither as its value .* nor as one value for each call"):
        play(played_review, Claim(17), fakes={played_fetch: [1, 2]})


def test_a_list_that_could_be_read_in_two_ways_is_refused() -> None:
    @killick.tool(effect="reads")
    def untyped(x: int):  # type: ignore[no-untyped-def]
        return x

    @killick.agent
    async def reads_twice(run: killick.Run) -> Any:
        return [await run.call(untyped, 1), await run.call(untyped, 2)]

    with pytest.raises(FakeRefused, match=r"untyped: a list may be its value .* write always\(\[…\]\) or in_order"):
        play(reads_twice, fakes={untyped: [1, 2]})
    with play(reads_twice, fakes={untyped: always([1, 2])}) as t:
        assert t.result() == [[1, 2], [1, 2]]
    with play(reads_twice, fakes={untyped: in_order(1, 2)}) as t:
        assert t.result() == [1, 2]


def test_a_function_is_given_what_it_names() -> None:
    async def fake(amount: int) -> str:
        return f"paid {amount}"

    for act in (
        fake,
        lambda amount, key: f"paid {amount}",
        lambda **given: f"paid {given['amount']}",
        lambda: "paid 5",
    ):
        with play(played_blocking, Claim(1), fakes={played_fetch: ["a"], played_pay: act}) as t:
            t.until_waiting()
            t.answer("approve")
            assert t.result() == "a, paid 5, approve"
    with pytest.raises(FakeRefused, match="played_pay: its fake takes 'sum', but is given amount, key"):
        play(played_blocking, Claim(1), fakes={played_pay: lambda sum: "paid"})  # noqa: A006


def test_a_fake_is_found_by_the_name_of_its_tool() -> None:
    with play(played_review, Claim(17), fakes={"played_fetch": ["a.pdf"]}) as t:
        t.until_waiting()
        assert t.calls("played_fetch") == [{"number": 17}]


def test_a_fake_that_does_not_fit_is_named_and_nothing_of_it_is_recorded() -> None:
    with play(played_review, Claim(17), fakes={**FAKES, played_mail: lambda to: {"id": 5}}) as t:
        t.until_waiting()
        t.answer("approve")
        with pytest.raises(FakeRefused, match=r"played_mail: its fake gives {'id': 5}.* does not fit Receipt: id: Exp"):
            t.result()
        assert t.info.status != "failed"
        assert "5" not in dict(t.state.outputs)


def test_a_fake_that_runs_out_is_named() -> None:
    @killick.agent
    async def pays_twice(run: killick.Run) -> None:
        try:
            await run.call(played_pay, 1)
            await run.call(played_pay, 2)
        except Exception as error:  # an agent that catches everything hides nothing of it from the test
            await run.note(str(error))

    with (
        play(pays_twice, fakes={played_pay: ["paid"]}) as t,
        pytest.raises(FakeRefused, match="played_pay: is faked for 1 call, and call 2 came"),
    ):
        t.result()


def test_an_assertion_in_a_fake_fails_the_test_and_not_the_tool() -> None:
    def checks(amount: int) -> str:
        assert amount == 5, "the amount is wrong"
        return "paid"

    @killick.agent
    async def pays_all(run: killick.Run) -> None:
        await run.gather(run.call(played_pay, 5), run.call(played_pay, 6))

    with play(pays_all, fakes={played_pay: checks}) as t:
        with pytest.raises(AssertionError, match="the amount is wrong"):
            t.result()
        assert t.info.status == "running"


def test_what_is_not_faked_runs_for_real() -> None:
    closed = []
    pool = killick.Resource(lambda: "pool", close=closed.append)

    @killick.tool
    def really(n: int, pool: str = pool.inject()) -> str:
        return f"{pool} {n}"

    @killick.agent
    async def does_it(run: killick.Run) -> str:
        return await run.call(really, 3)

    with play(does_it) as t:
        assert t.result() == "pool 3"
        assert t.calls(really) == [{"n": 3}]
    assert closed == ["pool"]


def test_a_faked_tool_takes_its_reconciler_and_its_confirmation_along() -> None:
    def never(effect: killick.Effect) -> Any:
        raise NotImplementedError("the real one")

    @killick.tool(reconcile=never, confirm=never)
    async def books(room: str) -> str:
        raise NotImplementedError("the real one")

    @killick.agent
    async def trip(run: killick.Run) -> str:
        return await run.call(books, "101")

    with play(trip, fakes={books: "b1"}) as t:
        assert t.result() == "b1"
    with play(trip, fakes={books: ConnectionError("lost")}) as t:
        t.until_waiting()
        assert t.wait.waits_for == "settlement"
    fakes = {books: ConnectionError("lost"), never: in_order(killick.Happened("b7"), True)}
    with play(trip, fakes=fakes) as t:
        assert t.result() == "b7"


# around it ----------------------------------------------------------------------------------------


def test_playing_with_a_block_where_a_loop_runs_says_what_to_write() -> None:
    async def test() -> None:
        with pytest.raises(KillickError, match="write `async with play"), play(played_child, 1):
            pass

    asyncio.run(test())


def test_the_calls_that_are_remembered_are_as_they_were_made() -> None:
    @killick.tool(effect="reads")
    async def counts(items: list[int]) -> int:
        return len(items)

    @killick.agent
    async def grows(run: killick.Run) -> int:
        items: list[int] = []
        for n in range(3):
            items.append(n)
            await run.call(counts, items)
        return len(items)

    with play(grows) as t:
        t.result()
        assert t.calls(counts) == [{"items": [0]}, {"items": [0, 1]}, {"items": [0, 1, 2]}]


def test_leaving_in_the_middle_lets_everything_go() -> None:
    left: list[str] = []

    @killick.agent
    async def tidies(run: killick.Run) -> None:
        try:
            await run.call(played_pay, 1)
        finally:
            left.append("tidied")

    async def test() -> None:
        async with play(tidies, fakes=FAKES) as t:
            await t.until(played_pay)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others

    asyncio.run(test())
    with play(tidies, fakes=FAKES) as t:
        t.until(played_pay)
        t.crash()
        t.until(played_pay)
    assert left == ["tidied"] * 3


def test_a_machine_is_played_too() -> None:
    @killick.machine
    async def ticks(run: killick.Run, state: int) -> Any:
        if state >= 3:
            return killick.Done(state)
        await run.sleep("1h")
        return killick.Next(state + 1)

    with play(ticks, 0) as t:
        before = t.clock.now_us()
        assert t.result() == 3
        assert timedelta(microseconds=t.clock.now_us() - before) == timedelta(hours=3)
