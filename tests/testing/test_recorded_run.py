"""A run of production is a test: its code does again what is on record, or is told where it parts; nothing goes out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import killick
from families import fork_of
from killick.errors import ExportBroken, NotOnRecord, ReplayDiverged, RunDiverged, RunMismatch
from killick.log import Entry
from killick.model import events as e
from killick.store import Store
from killick.testing import replay
from leasing import leased_by

world: list[Any] = []
"""Everything that reached the world."""

now: set[str] = set()
"""How the code is changed since the run was recorded."""


@pytest.fixture(autouse=True)
def _as_it_was() -> None:
    world.clear()
    now.clear()


@pytest.fixture
def kd(store: Store) -> Iterator[killick.Client]:
    with killick.Client(store, clock=killick.clock.LeapingClock()) as client:
        yield client


@killick.tool(effect="reads")
async def replay_fetch(n: int) -> int:
    world.append(("fetch", n))
    return n * 10


@killick.tool(effect="at_most_once")
def replay_pay(amount: int) -> str:
    world.append(("pay", amount))
    if amount == 13:
        raise killick.NotDone("the bank is closed")
    return f"paid {amount}"


async def chat(messages: list[str]) -> dict[str, Any]:
    world.append(("model", messages))
    return {"role": "assistant", "content": "manager"}


async def chat_in_chunks(messages: list[str]) -> AsyncIterator[str]:
    world.append(("stream", messages))
    for word in ("one", "two"):
        yield word


@killick.agent
async def replay_child(run: killick.Run, n: int) -> int:
    return await run.call(replay_fetch, n)


@dataclass
class Verdict:
    paid: str
    by: str | None
    extra: int = 0


@killick.agent
async def replay_review(run: killick.Run, n: int) -> Verdict:
    first = await run.call(replay_fetch, n)
    reply = await run.model(chat, messages=["Who decides?" if "reworded" not in now else "Who decides now?"])
    await run.decided("Who?", reply["content"], options=["auto", "manager"])
    if "noted" in now:
        await run.note("a remark more")
        run.random()
    words = [word async for word in run.stream(chat_in_chunks, messages=["hi"])]
    if "new call" in now:
        with contextlib.suppress(BaseException):
            await run.call(replay_fetch, 77)
    both = await run.gather(run.call(replay_fetch, 1), run.call(replay_fetch, 2))
    raced = await run.first(run.wait("never"), run.call(replay_fetch, 3))
    child = await run.spawn(replay_child, 4)
    below = await child.result()
    await run.spawn(replay_child, 5)
    await run.sleep("3d")
    paid = await run.call(replay_pay, sum(both) + raced.value + below + len("".join(words)) + ("amount" in now))
    answer = await run.ask("Right?", to="managers")
    if "late call" in now:
        try:
            await run.call(replay_fetch, 99)
        except BaseException:
            await run.call(replay_pay, 99)
    if "fails" in now:
        raise ValueError("now it fails")
    return Verdict(paid, answer.by, extra=1 if "extra" in now else first - n * 10)


def reviewed(kd: killick.Client, *, to_its_end: bool = True) -> bytes:
    with pytest.raises(killick.RunWaiting):
        kd.run(replay_review, 7, id="r")
    if to_its_end:
        kd.answer("r", "approve", by="ann")
        kd.run(replay_review, 7, id="r")
    data = kd.store.export("r")
    world.clear()
    return data


def parted(data: bytes, agent: Any = replay_review) -> ReplayDiverged:
    with pytest.raises(ReplayDiverged) as found:
        replay(data, agent)
    assert isinstance(found.value, AssertionError)
    assert "\n" not in str(found.value)
    assert world == []
    unraised = replay(data, agent, check=False).divergence
    assert unraised is not None
    assert str(unraised) == str(found.value)
    return found.value


# the same -----------------------------------------------------------------------------------------


def test_code_that_is_as_it_was_does_all_of_it_again_and_touches_nothing(kd: killick.Client) -> None:
    replayed = replay(reviewed(kd), replay_review)
    assert (replayed.status, replayed.result) == ("completed", Verdict("paid 106", "ann"))
    assert replayed.steps == len(kd.state("r").fold.steps)
    assert (replayed.drifts, replayed.strays, replayed.beyond, replayed.divergence) == ((), (), None, None)
    assert world == []


def test_a_run_that_waits_is_replayed_to_its_wait(kd: killick.Client) -> None:
    replayed = replay(reviewed(kd, to_its_end=False), replay_review)
    assert (replayed.status, replayed.result, replayed.beyond) == ("waiting", None, None)


def test_an_answer_that_the_run_has_not_taken_is_not_given_to_it(kd: killick.Client) -> None:
    reviewed(kd, to_its_end=False)
    kd.answer("r", "approve", by="ann")
    assert replay(kd.store.export("r"), replay_review).status == "waiting"


def test_a_file_is_replayed_by_its_path_and_a_broken_one_refused(kd: killick.Client, tmp_path: Path) -> None:
    file = tmp_path / "r.killick"
    data = reviewed(kd)
    file.write_bytes(data)
    assert replay(file, replay_review).status == "completed"
    file.write_bytes(data[:-200])
    with pytest.raises(ExportBroken, match=r"r\.killick"):
        replay(str(file), replay_review)


def test_replaying_works_where_a_loop_is_running(kd: killick.Client) -> None:
    data = reviewed(kd)

    async def test() -> str:
        return replay(data, replay_review).status

    assert asyncio.run(test()) == "completed"


@killick.agent
def replay_blocking(run: killick.SyncRun, n: int) -> str:
    both = run.gather(lambda: run.call(replay_fetch, 1), lambda: run.call(replay_fetch, n))
    if "new call" in now:
        with contextlib.suppress(BaseException):
            run.call(replay_fetch, 77)
    run.sleep("1h")
    paid = run.call(replay_pay, both[1])
    return paid + ("!" if "extra" in now else "")


def test_blocking_agents_are_replayed_too(kd: killick.Client) -> None:
    kd.run(replay_blocking, 5, id="b")
    data = kd.store.export("b")
    world.clear()
    assert replay(data, replay_blocking).result == "paid 50"
    now.add("extra")
    assert 'returned "paid 50", the code gives "paid 50!"' in str(parted(data, replay_blocking))
    now.add("new call")
    assert "at step 2 the log has wait sleep" in str(parted(data, replay_blocking))


# where code parts from its record -----------------------------------------------------------------


def test_a_call_of_another_sort_parts_with_both_calls_named(kd: killick.Client) -> None:
    data = reviewed(kd)
    now.add("new call")
    error = parted(data)
    assert error.step == "5"
    assert "at step 5 the log has scope gather(branches=2), the code has tool replay_fetch(n=77)" in str(error)
    assert isinstance(error.__cause__, RunDiverged)


def test_an_effect_with_other_arguments_parts(kd: killick.Client) -> None:
    data = reviewed(kd)
    now.add("amount")
    assert "the log has tool replay_pay(amount=106), the code has tool replay_pay(amount=107)" in str(parted(data))


def test_a_call_after_the_last_one_on_record_never_goes_out_whatever_the_code_does_about_it(kd: killick.Client) -> None:
    data = reviewed(kd)
    now.add("late call")
    error = parted(data)
    assert isinstance(error, NotOnRecord)
    assert (error.step, error.call) == ("13", "tool replay_fetch(n=99)")
    assert str(error) == ("r: step 13: tool replay_fetch(n=99) is not in the log, and was not called")


def test_another_result_parts_and_is_told_by_what_is_different(kd: killick.Client) -> None:
    data = reviewed(kd)
    now.add("extra")
    assert str(parted(data)).endswith("(extra: 0 is now 1)")


def test_a_failure_instead_of_a_result_parts(kd: killick.Client) -> None:
    data = reviewed(kd)
    now.add("fails")
    assert "the code fails with ValueError: now it fails" in str(parted(data))


def test_words_of_a_prompt_only_drift_and_remarks_are_free(kd: killick.Client) -> None:
    data = reviewed(kd)
    now.update(("reworded", "noted"))
    replayed = replay(data, replay_review)
    [drift] = replayed.drifts
    assert drift.step == "2"
    assert drift.recorded["messages"] == ["Who decides?"]
    assert drift.found["messages"] == ["Who decides now?"]


@killick.agent
async def replay_ends(run: killick.Run) -> str:
    await run.call(replay_fetch, 1)
    match next(iter(now), ""):
        case "decides":
            await run.decided("More?", "yes")
        case "asks":
            await run.ask("More?")
        case "sleeps":
            await run.sleep(5)
        case "spawns":
            await run.spawn(replay_child, 1)
        case "sends":
            await run.send("somebody", "hello", 1)
        case "gathers":
            await run.gather(run.call(replay_fetch, 5), run.call(replay_fetch, 6))
        case "asks a model":
            await run.model(chat, messages=[])
        case _:
            pass
    return "done"


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("decides", 'decision "More?"'),
        ("asks", "wait ask"),
        ("sleeps", "wait sleep"),
        ("spawns", "child replay_child(input=1)"),
        ("sends", "tool send(run='somebody', name='hello', body=1)"),
        ("gathers", "scope gather(branches=2)"),
        ("asks a model", "model chat(messages=[])"),
    ],
)
def test_every_sort_of_step_that_is_not_on_record_is_refused(kd: killick.Client, what: str, call: str) -> None:
    kd.run(replay_ends, id="r")
    data = kd.store.export("r")
    world.clear()
    now.add(what)
    error = parted(data, replay_ends)
    assert isinstance(error, NotOnRecord)
    assert (error.step, error.call) == ("2", call)


def test_code_that_ends_early_parts(kd: killick.Client) -> None:
    now.add("decides")
    kd.run(replay_ends, id="r")
    data = kd.store.export("r")
    world.clear()
    now.clear()
    assert "at step 2 the log has decision" in str(parted(data, replay_ends))


def test_code_that_never_comes_to_its_end_is_given_up(kd: killick.Client) -> None:
    kd.run(replay_ends, id="r")

    @killick.agent(name="replay_ends")
    async def hangs(run: killick.Run) -> str:
        await asyncio.get_running_loop().create_future()
        return "done"

    with pytest.raises(ReplayDiverged, match=r"did not end within 0\.2 s"):
        replay(kd.store.export("r"), hangs, seconds=0.2)


def test_code_that_touches_the_world_by_itself_is_stopped_and_named(kd: killick.Client, tmp_path: Path) -> None:
    kd.run(replay_ends, id="r")
    data = kd.store.export("r")

    @killick.agent(name="replay_ends")
    async def strays(run: killick.Run) -> str:
        (tmp_path / "notes.txt").read_text()
        await run.call(replay_fetch, 1)
        if "writes" in now:
            (tmp_path / "notes.txt").write_text("mine")
        if "connects" in now:
            with socket.socket() as link, contextlib.suppress(AssertionError):
                link.connect(("127.0.0.1", 9))
        return "done"

    (tmp_path / "notes.txt").write_text("read me")
    [stray] = replay(data, strays).strays
    assert stray.file == __file__
    assert "notes.txt" in stray.what
    now.add("writes")
    with pytest.raises(ReplayDiverged, match=r"unrecorded I/O: .*test_recorded_run\.py:\d+: open\(.*notes.txt', 'w'\)"):
        replay(data, strays)
    assert (tmp_path / "notes.txt").read_text() == "read me"
    now.clear()
    now.add("connects")
    with pytest.raises(ReplayDiverged, match=r"does unrecorded I/O: .*test_recorded_run\.py:\d+: socket\.connect"):
        replay(data, strays)


def test_another_agent_is_refused(kd: killick.Client) -> None:
    kd.run(replay_ends, id="r")
    with pytest.raises(RunMismatch):
        replay(kd.store.export("r"), replay_child)


# failures -----------------------------------------------------------------------------------------


@killick.tool(effect="at_most_once", compensate=lambda effect: world.append(("undo", effect.key)))
async def replay_book(n: int) -> str:
    world.append(("book", n))
    return f"booked {n}"


@killick.agent(on_failure="compensate")
async def replay_fails(run: killick.Run, n: int) -> str:
    await run.call(replay_book, n)
    await run.spawn(replay_child, 2)
    total = await run.call(replay_fetch, n)
    if "mended" in now:
        return f"{total}"
    if "other" in now:
        raise LookupError("another one")
    return f"{total / (n - 7)}"


def failed(kd: killick.Client) -> bytes:
    with pytest.raises(killick.RunFailed):
        kd.run(replay_fails, 7, id="f")
    data = kd.store.export("f")
    world.clear()
    return data


def test_a_failed_run_fails_again_in_the_same_way_and_undoes_nothing_again(kd: killick.Client) -> None:
    replayed = replay(failed(kd), replay_fails)
    assert replayed.status == "failed"
    assert replayed.failure is not None
    assert replayed.failure.is_a(ZeroDivisionError)
    assert world == []


def test_mended_code_parts_from_the_failure_and_says_what_it_does_now(kd: killick.Client) -> None:
    data = failed(kd)
    now.add("mended")
    assert str(parted(data, replay_fails)) == (
        'f: the record failed with ZeroDivisionError: division by zero, the code returns "70"'
    )
    replayed = replay(data, replay_fails, check=False)
    assert (replayed.status, replayed.divergence is not None) == ("failed", True)


def test_another_failure_parts(kd: killick.Client) -> None:
    data = failed(kd)
    now.add("other")
    assert "failed with ZeroDivisionError: division by zero, the code fails with LookupError: another one" in str(
        parted(data, replay_fails)
    )


def test_a_step_that_failed_fails_again(kd: killick.Client) -> None:
    @killick.agent
    async def replay_unpaid(run: killick.Run) -> str:
        return await run.call(replay_pay, 13)

    with pytest.raises(killick.RunFailed):
        kd.run(replay_unpaid, id="u")
    data = kd.store.export("u")
    world.clear()
    replayed = replay(data, replay_unpaid)
    assert replayed.failure is not None
    assert "the bank is closed" in replayed.failure.message
    assert world == []


# state machines -----------------------------------------------------------------------------------


@dataclass
class Count:
    n: int = 0
    doubled: int = 0


@killick.machine
async def replay_counter(run: killick.Run, state: Count) -> Any:
    value = await run.call(replay_fetch, state.n)
    if state.n == 3:
        if "fails" in now:
            raise ValueError("at the end")
        return killick.Done(state.doubled)
    if state.n == 1 and "new call" in now:
        await run.call(replay_pay, 1)
    step = 3 if state.n == 1 and "other" in now else 2
    after = replace(state, n=state.n + 1, doubled=state.doubled + value * step)
    return killick.WaitFor("go", after) if state.n == 2 else killick.Next(after)


def counted(kd: killick.Client) -> bytes:
    with contextlib.suppress(killick.RunWaiting):
        kd.run(replay_counter, Count(), id="m")
    kd.send("m", "go")
    with contextlib.suppress(killick.RunFailed):
        kd.run(replay_counter, Count(), id="m")
    data = kd.store.export("m")
    world.clear()
    return data


def test_every_transition_of_a_machine_is_run_again(kd: killick.Client) -> None:
    data = counted(kd)
    assert replay(data, replay_counter).result == 60
    now.add("other")
    error = parted(data, replay_counter)
    assert "transition 2 led to" in str(error)
    assert "(state.doubled: 20 is now 30)" in str(error)
    now.add("new call")
    assert str(parted(data, replay_counter)) == (
        "m: step 2.2: tool replay_pay(amount=1) is not in the log, and was not called"
    )


def test_a_machine_that_failed_fails_again(kd: killick.Client) -> None:
    now.add("fails")
    data = counted(kd)
    replayed = replay(data, replay_counter)
    assert (replayed.status, str(replayed.failure)) == ("failed", "ValueError: at the end")
    now.clear()
    assert "failed with ValueError: at the end, the code returns 60" in str(parted(data, replay_counter))


# runs that are not over ---------------------------------------------------------------------------


def test_a_paused_run_is_replayed_as_far_as_it_came(kd: killick.Client) -> None:
    reviewed(kd, to_its_end=False)
    kd.pause("r", by="ann")
    assert replay(kd.store.export("r"), replay_review).status == "paused"
    now.add("amount")
    parted(kd.store.export("r"))


def test_a_cancelled_run_is_replayed_up_to_where_it_was_cancelled(kd: killick.Client) -> None:
    reviewed(kd, to_its_end=False)
    kd.cancel("r", by="ann")
    with pytest.raises(killick.errors.RunCancelled):
        kd.run(replay_review, 7, id="r")
    data = kd.store.export("r")
    assert replay(data, replay_review).status == "cancelled"
    now.add("amount")
    parted(data)


def test_a_run_that_diverged_is_replayed_with_the_code_that_is_mended(kd: killick.Client) -> None:
    reviewed(kd, to_its_end=False)
    now.add("amount")
    with pytest.raises(RunDiverged):
        killick.Client(kd.runtime.store, clock=kd.runtime.clock).run(replay_review, 7, id="r")
    data = kd.store.export("r")
    parted(data)
    now.clear()
    assert replay(data, replay_review).beyond is None


def test_a_run_whose_process_died_is_replayed_to_the_end_of_its_record(store: Store) -> None:
    @killick.tool(effect="at_most_once", reconcile=lambda effect: world.append("reconciled") or killick.Unknown())
    async def replay_dies(n: int) -> int:
        raise AssertionError

    @killick.agent
    async def replay_died(run: killick.Run) -> int:
        await run.call(replay_fetch, 1)
        return await run.call(replay_dies, 2)

    with killick.Client(store) as kd:
        kd.start(replay_died, id="d")
        log = leased_by("gone", kd.runtime.log, "d")
        log.append(
            Entry(e.RunTaken(at=1, epoch=log.epoch, holder="gone")),
            Entry(
                e.StepIntended(at=1, step="1", sort="tool", name="replay_fetch", effect="reads"),
                {"arguments": {"n": 1}},
            ),
            Entry(e.AttemptStarted(at=1, step="1", attempt=1, key="k1", epoch=log.epoch)),
            Entry(e.AttemptEnded(at=1, step="1", attempt=1, outcome="returned"), {"output": 10}),
        )
        replayed = replay(kd.store.export("d"), replay_died)
        assert (replayed.status, replayed.beyond) == ("running", "step 2: tool replay_dies(n=2)")
        assert world == []


def test_an_attempt_in_doubt_is_neither_made_again_nor_looked_into(store: Store) -> None:
    @killick.tool(effect="at_most_once", reconcile=lambda effect: world.append("reconciled") or killick.Unknown())
    async def replay_doubts(n: int) -> int:
        raise RuntimeError("who knows")

    @killick.agent
    async def replay_doubted(run: killick.Run) -> int:
        return await run.call(replay_doubts, 2)

    with killick.Client(store) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(replay_doubted, id="d")
        asked = next(r.seq for r in kd.events("d") if isinstance(r.event, e.WaitOpened))
        world.clear()
        assert replay(kd.store.export("d"), replay_doubted).status == "waiting"
        cut = fork_of(kd.runtime.log, e.RunForked(at=1, run="f", parent="d", cut=asked - 1, generation=1))
        assert cut.seq == asked
        replayed = replay(kd.store.export("f"), replay_doubted)
        assert replayed.beyond is not None
        assert world == []


def test_a_run_in_backoff_is_replayed_without_waiting(store: Store) -> None:
    @killick.tool(effect="reads", retry=killick.Retry(attempts=3, on=(ConnectionError,)))
    async def replay_flaky() -> int:
        raise ConnectionError("not now")

    @killick.agent
    async def replay_patient(run: killick.Run) -> int:
        return await run.call(replay_flaky)

    with killick.Client(store, clock=killick.clock.ManualClock()) as kd:
        kd.start(replay_patient, id="p")
        kd.advance("p")
        assert kd.info("p").status == "waiting"
        assert replay(kd.store.export("p"), replay_patient, seconds=5).status == "waiting"


# other timelines, secrets -------------------------------------------------------------------------


def test_a_run_that_was_taken_back_is_replayed_in_its_last_timeline(kd: killick.Client) -> None:
    broken = [True]

    @killick.tool(effect="at_most_once")
    async def replay_mends() -> str:
        world.append("mends")
        if broken:
            raise killick.NotDone("closed")
        return "open"

    @killick.agent
    async def replay_rewound(run: killick.Run) -> str:
        await run.call(replay_book, 1)
        return await run.call(replay_mends)

    with pytest.raises(killick.RunFailed):
        kd.run(replay_rewound, id="w")
    broken.clear()
    kd.resume("w")
    assert kd.run(replay_rewound, id="w") == "open"
    data = kd.store.export("w")
    world.clear()
    assert replay(data, replay_rewound).result == "open"
    assert world == []


def test_a_fork_is_replayed_from_the_beginning_of_what_it_stands_on(kd: killick.Client) -> None:
    reviewed(kd)
    cut = next(r.seq for r in kd.events("r") if isinstance(r.event, e.WaitClosed) and r.event.by == "ann") - 1
    fork_of(kd.runtime.log, e.RunForked(at=1, run="f", parent="r", cut=cut, generation=1))
    replayed = replay(kd.store.export("f"), replay_review)
    assert replayed.divergence is None
    now.add("amount")
    assert "replay_pay(amount=107)" in str(parted(kd.store.export("f")))


def test_secrets_are_the_same_under_the_key_of_their_store(kd: killick.Client) -> None:
    @killick.tool(effect="at_most_once")
    async def replay_login(password: killick.Secret) -> str:
        return "in"

    @killick.agent
    async def replay_secretive(run: killick.Run) -> str:
        return await run.call(replay_login, killick.Secret("hunter2"))

    kd.run(replay_secretive, id="s")
    data = kd.store.export("s")
    assert b"hunter2" not in data
    assert replay(data, replay_secretive, secret_key=kd.runtime.store.secret_key).result == "in"
    with pytest.raises(ReplayDiverged):
        replay(data, replay_secretive)


def test_the_store_that_a_run_comes_from_is_not_needed_any_more(kd: killick.Client) -> None:
    data = reviewed(kd)
    kd.close()
    assert replay(data, replay_review).status == "completed"
