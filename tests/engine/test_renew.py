"""A run closes its log and goes on in a fresh one: linked, exactly once, and nothing that was sent to it is lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import killick
from killick.errors import ChildFailed, KillickError
from killick.model import events as e

CALLS: list[int] = []


@pytest.fixture(autouse=True)
def _fresh() -> None:
    CALLS.clear()


@killick.tool(name="renew_noted", effect="idempotent")
async def noted(n: int, key: killick.Key = killick.KEY) -> int:
    CALLS.append(n)
    return n


@killick.agent(name="renew_counts")
async def counts(run: killick.Run, n: int) -> int:
    await run.call(noted, n)
    if n < 3:
        await run.renew(n + 1)
    return n


def kinds(kd: killick.Client, run: str) -> list[str]:
    return [type(recorded.event).__name__ for recorded in kd.events(run)]


def test_a_renewed_run_goes_on_from_the_top_and_its_caller_gets_the_last_result(world: Any) -> None:
    assert world.kd.run(counts, 1, id="r") == 3
    assert CALLS == [1, 2, 3]
    assert [listed.id for listed in world.kd.list()] == ["r+3", "r+2", "r"]
    assert kinds(world.kd, "r")[-1] == "RunRenewed"
    assert world.kd.state("r+2").fold.facts.follows == "r"
    assert not world.kd.store.verify().problems


def test_asking_again_for_the_first_gives_the_last_ones_result(world: Any) -> None:
    world.kd.run(counts, 1, id="r")
    assert world.kd.run(counts, 1, id="r") == 3
    assert CALLS == [1, 2, 3]


def test_a_plain_function_renews_as_well(world: Any) -> None:
    @killick.agent(name="renew_plain")
    def plain(run: killick.SyncRun, n: int) -> int:
        if n < 2:
            run.renew(n + 1)
        return n

    assert world.kd.run(plain, 1, id="r") == 2


def test_context_tags_and_priority_go_along(world: Any) -> None:
    @killick.agent(name="renew_context")
    async def remembers(run: killick.Run, n: int) -> int:
        if n == 1:
            await run.update(seen=41)
            await run.renew(2)
        return int(run.context.seen) + 1

    assert world.kd.run(remembers, 1, id="r", priority=7, tags=["vip"]) == 42
    info = world.kd.info("r+2")
    assert (info.priority, "vip" in info.tags) == (7, True)


def test_messages_that_were_not_taken_go_along_in_their_order(world: Any) -> None:
    @killick.agent(name="renew_hears")
    async def hears(run: killick.Run, n: int) -> list[str]:
        if n == 1:
            await run.renew(2)
        return [await run.wait("word"), await run.wait("word")]

    handle = world.kd.start(hears, 1, id="r")
    world.kd.send("r", "word", "a" * 5_000)
    world.kd.send("r", "word", "b")
    world.kd.advance("r")
    world.kd.advance("r+2")
    assert handle.result(timeout=0) == ["a" * 5_000, "b"]
    assert not world.kd.store.verify().problems


def test_a_message_that_was_just_taken_stays_behind_and_the_renewal_is_made_at_once(world: Any) -> None:
    @killick.agent(name="renew_hears_one")
    async def hears(run: killick.Run, n: int) -> str:
        word = await run.wait("word")
        return word if n == 3 else await run.renew(n + 1)

    world.process(behind=True)
    handle = world.kd.start(hears, 1, id="r")
    for word in ("a", "b", "c"):
        world.kd.send("r", "word", word)
    for run in ("r", "r+2", "r+3"):
        world.kd.advance(run)
        assert len([each for each in world.kd.events(run) if isinstance(each.event, e.RunTaken)]) == 1
    assert handle.result(timeout=0) == "c"


def test_more_messages_than_one_read_returns_go_along(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.agent(name="renew_hears_many")
    async def hears(run: killick.Run, n: int) -> list[int]:
        if n == 1:
            await run.renew(2)
        return [await run.wait("word") for _ in range(7)]

    handle = world.kd.start(hears, 1, id="r")
    for number in range(7):
        world.kd.send("r", "word", number)
    inbox = world.kd.runtime.store.inbox
    monkeypatch.setattr(
        world.kd.runtime.store, "inbox",
        lambda *args, limit=3, **options: inbox(*args, limit=min(limit, 3), **options),
    )  # fmt: skip
    world.kd.advance("r")
    world.kd.advance("r+2")
    assert handle.result(timeout=0) == [*range(7)]


def test_what_is_sent_to_a_renewed_run_reaches_the_one_it_goes_on_as(world: Any) -> None:
    @killick.agent(name="renew_waits")
    async def waits(run: killick.Run, n: int) -> str:
        if n == 1:
            await run.renew(2)
        answer = await run.ask("Well?", to="ann")
        return f"{await run.wait('word')} {answer.kind}"

    handle = world.kd.start(waits, 1, id="r")
    world.kd.advance("r")
    world.kd.advance("r+2")
    world.kd.send("r", "word", "hello")
    world.kd.answer("r", "approve", by="ann")
    world.kd.advance("r+2")
    assert handle.result(timeout=0) == "hello approve"


def test_a_parent_waits_for_the_last_of_its_childs_logs(world: Any) -> None:
    @killick.agent(name="renew_parent")
    async def parent(run: killick.Run) -> int:
        child = await run.spawn(counts, 1)
        return await child.result()

    assert world.kd.run(parent, id="p") == 3
    assert CALLS == [1, 2, 3]


def test_a_child_that_fails_after_it_was_renewed_fails_for_its_parent(world: Any) -> None:
    @killick.agent(name="renew_fails")
    async def fails(run: killick.Run, n: int) -> None:
        if n == 1:
            await run.renew(2)
        raise ValueError("late")

    @killick.agent(name="renew_parent_of_failing")
    async def parent(run: killick.Run) -> str:
        child = await run.spawn(fails, 1)
        try:
            await child.result()
        except ChildFailed as failed:
            return str(failed)
        return "?"

    assert "late" in world.kd.run(parent, id="p")


def test_nothing_is_recorded_or_done_while_the_code_unwinds(world: Any) -> None:
    @killick.agent(name="renew_unwinds")
    async def unwinds(run: killick.Run, n: int) -> int:
        try:
            if n == 1:
                await run.renew(2)
        finally:
            if n == 1:
                await run.call(noted, 99)
        return n

    assert world.kd.run(unwinds, 1, id="r") == 2
    assert CALLS == []


def test_a_branch_of_a_gather_cannot_renew(world: Any) -> None:
    @killick.agent(name="renew_gathers")
    async def gathers(run: killick.Run, n: int) -> None:
        async def branch() -> None:
            await run.renew(2)

        await run.gather(branch(), branch())

    with pytest.raises(killick.RunFailed, match=r"outside of run\.gather"):
        world.kd.run(gathers, 1, id="r")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 9))
def test_a_death_at_any_commit_leaves_one_line_of_logs(world: Any, number: int, when: str) -> None:
    """The renewal and the run that follows are one write: a death leaves both or neither."""
    world.line.cut_at = (number, when)
    with contextlib.suppress(KillickError):
        world.kd.run(counts, 1, id="r")
    for _, head in world.store.heads():
        world.bury(head.run)
    kd = world.process()
    assert kd.run(counts, 1, id="r") == 3
    assert sorted(listed.id for listed in kd.list()) == ["r", "r+2", "r+3"]
    follows: dict[str, Any] = {run: kd.state(run).fold.facts.follows for run in ("r+2", "r+3")}
    assert follows == {"r+2": "r", "r+3": "r+2"}
    assert not kd.store.verify().problems
    started = [
        event.key for run in ("r", "r+2", "r+3") for _, event, _ in kd.events(run) if isinstance(event, e.Started)
    ]
    assert len(set(started)) == 3
