"""Replay works on a copy: it follows any timeline, stops where it is told to, tries one step, touches nothing else."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kedge
from kedge.errors import BoundaryUnknown, ReplayParted, RunUnknown
from kedge.history.export import export, load, read
from kedge.history.replayed import Asked, Replayed
from kedge.history.replaying import Replay
from kedge.log import Log, verify
from kedge.store import SqliteStore, Store
from kedge.testing import replay

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

world: list[Any] = []
"""Everything that reached the world."""

now: set[str] = set()
"""How the world, or the code, is changed since the run was recorded."""


@pytest.fixture(autouse=True)
def _as_it_was() -> None:
    world.clear()
    now.clear()


@pytest.fixture
def kd(store: Store) -> Iterator[kedge.Client]:
    with kedge.Client(store, clock=kedge.LeapingClock()) as client:
        yield client


@kedge.tool(effect="reads")
async def again_look(n: int) -> dict[str, Any]:
    world.append(("look", n))
    if "down" in now:
        raise ConnectionError("nobody there")
    return {"n": n, "status": "up" if "other" not in now else "down"}


@kedge.tool(effect="at_most_once", compensate=lambda effect: world.append("unpay"))
def again_pay(n: int, key: kedge.Key = kedge.KEY) -> str:
    world.append(("pay", n, str(key)))
    if "broke" in now:
        raise kedge.NotDone("the account is empty")
    return f"paid {n}"


async def again_chat(messages: list[str]) -> dict[str, Any]:
    world.append(("model", messages))
    return {"role": "assistant", "content": "again"}


@kedge.agent
async def again_agent(run: kedge.Run, n: int) -> list[Any]:
    first = await run.call(again_look, n)
    said = await run.model(again_chat, messages=["hello"])
    paid = await run.call(again_pay, n if first["status"] == "up" else 0)
    both = await run.gather(run.call(again_look, 1), run.call(again_pay, 5))
    word = await run.wait("go")
    return [said["content"], paid, len(both), word, await run.call(again_pay, n + 1)]


@kedge.agent
def again_blocking(run: kedge.SyncRun, n: int) -> list[Any]:
    first = run.call(again_look, n)
    both = run.gather(lambda: run.call(again_look, 1), lambda: run.call(again_pay, 5))
    return [first["status"], len(both), run.call(again_pay, n)]


def ended(kd: kedge.Client, run: str = "r") -> bytes:
    with pytest.raises(kedge.RunWaiting):
        kd.run(again_agent, 1, id=run)
    kd.send(run, "go", "now")
    kd.run(again_agent, 1, id=run)
    data = kd.export(run)
    world.clear()
    return data


def followed(data: bytes, agent: Any = again_agent, **asked: Any) -> Replayed:
    return Replay(read(data), agent, asked=Asked(**asked)).outcome()


def agrees(data: bytes, agent: Any = again_agent) -> Replayed:
    replayed = followed(data, agent)
    assert replayed.outcome == "agrees", replayed.parted or replayed.beyond
    assert world == []
    return replayed


# any timeline -------------------------------------------------------------------------------------


def test_a_run_that_was_rewound_is_replayed_in_its_current_timeline(kd: kedge.Client) -> None:
    ended(kd)
    kd.rewind("r", "3:before")
    kd.advance("r")
    world.clear()
    assert agrees(kd.export("r")).result == ["again", "paid 1", 2, "now", "paid 2"]


def test_a_fork_is_replayed_with_what_was_changed_in_it(kd: kedge.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "1:after", output={"1": {"n": 1, "status": "down"}}, effects="live")
    kd.advance(fork.id)
    world.clear()
    replayed = agrees(kd.export(fork.id))
    assert replayed.played[0].output == {"n": 1, "status": "down"}
    assert replayed.result[1] == "paid 0"


def test_a_fork_inside_parallel_work_is_replayed_with_what_its_siblings_keep(kd: kedge.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "4.1.1:before", effects="live")
    kd.advance(fork.id)
    world.clear()
    agrees(kd.export(fork.id))


def test_a_fork_of_a_fork_that_leaves_it_before_its_own_first_event_is_exported_and_replayed(kd: kedge.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "3:after", effects="live")
    kd.advance(fork.id)
    for place in ("1:before", "3:after"):
        twice = kd.fork(fork.id, place, effects="live")
        assert kd.log.head(twice.id).base <= kd.log.head(fork.id).base
        for data in (kd.export(twice.id), kd.export(twice.id, redact=True)):
            assert verify(Log(load(data).store)).problems == []
            assert followed(data).outcome == "beyond"
        kd.advance(twice.id)
        world.clear()
        agrees(kd.export(twice.id))


def test_a_step_that_was_undone_by_hand_does_not_disturb_a_replay(kd: kedge.Client) -> None:
    ended(kd)
    kd.undo("r", "3")
    world.clear()
    assert agrees(kd.export("r")).result == ["again", "paid 1", 2, "now", "paid 2"]


def test_what_a_fork_goes_on_with_is_named_and_not_done(kd: kedge.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "3:before")
    world.clear()
    replayed = followed(kd.export(fork.id))
    assert (replayed.outcome, replayed.beyond) == ("beyond", "step 3: tool again_pay(n=1)")
    assert world == []


@kedge.agent
async def again_parent(run: kedge.Run) -> list[Any]:
    child = await run.spawn(again_blocking, 7)
    return [await child.result()]


def test_a_child_is_in_the_file_if_asked_for_and_replayed_by_its_name(kd: kedge.Client) -> None:
    kd.run(again_parent, id="p")
    world.clear()
    alone, family = kd.export("p"), kd.export("p", children=True)
    assert (read(alone).runs, read(family).runs) == (("p",), ("p", "p/1"))
    assert (read(alone).header.version, read(family).header.version) == (1, 2)
    assert verify(Log(load(family).store)).runs == 2
    assert agrees(family, again_parent).result == [["up", 2, "paid 7"]]
    child = replay(family, again_blocking, run="p/1")
    assert child.result == ["up", 2, "paid 7"]
    with pytest.raises(RunUnknown):
        replay(alone, again_blocking, run="p/1")
    assert world == []


@kedge.agent
async def again_renewing(run: kedge.Run, n: int) -> str:
    found = await run.call(again_look, n)
    if n < 2 and "stays" not in now:
        await run.renew(n + (2 if "leaps" in now else 1))
    return str(found["n"])


def test_a_run_that_was_renewed_is_replayed_log_by_log(kd: kedge.Client) -> None:
    assert kd.run(again_renewing, 0, id="n") == "2"
    logs = [kd.export(run) for run in ("n", "n+2", "n+3")]
    world.clear()
    assert [agrees(data, again_renewing).result for data in logs] == [None, None, "2"]
    now.add("leaps")
    assert "the record goes on with 1, the code gives 2" in str(followed(logs[0], again_renewing).parted)
    now.add("stays")
    assert "the record goes on as n+2, the code in no other run" in str(followed(logs[0], again_renewing).parted)
    assert world == []


@kedge.machine
async def again_machine(run: kedge.Run, state: dict[str, Any]) -> Any:
    found = await run.call(again_look, state["n"])
    after = {"n": state["n"] + 1, "seen": [*state["seen"], found["status"]]}
    return kedge.Done(after["seen"]) if state["n"] == 2 else kedge.Next(after)


def test_a_machine_is_stopped_at_a_transition_or_inside_and_one_of_its_steps_tried(kd: kedge.Client) -> None:
    kd.run(again_machine, {"n": 0, "seen": []}, id="m")
    data = kd.export("m")
    world.clear()
    assert agrees(data, again_machine).result == ["up", "up", "up"]
    for to, last in (("2", "2"), ("2.1", "2.1"), ("3:before", "2"), ("3.1:before", "2")):
        replayed = followed(data, again_machine, to=to)
        assert (replayed.outcome, replayed.played[-1].step) == ("stopped", last)
    assert world == []
    now.add("other")
    replayed = followed(data, again_machine, live="2.1")
    assert world == [("look", 1)]
    assert "the transition at step 2 led to" in str(replayed.parted)


@kedge.tool(effect="transaction")
def again_book(n: int, tx: kedge.Tx = kedge.TX) -> int:
    world.append(("book", n))
    return n


@kedge.agent
async def again_books(run: kedge.Run) -> int:
    return await run.call(again_book, 4) + await run.call(again_book, 5)


def test_what_was_done_in_transactions_is_replayed_and_not_run_for_real(tmp_path: Path) -> None:
    with kedge.open(str(tmp_path / "kedge.db")) as kd:
        kd.run(again_books, id="t")
        world.clear()
        assert agrees(kd.export("t"), again_books).result == 9
        with pytest.raises(BoundaryUnknown, match="writes in the store's own database"):
            followed(kd.export("t"), again_books, live="1")
    assert world == []


# on a copy ----------------------------------------------------------------------------------------


def test_the_store_is_read_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "kedge.db"
    with kedge.Client(SqliteStore(path), clock=kedge.LeapingClock()) as kd:
        ended(kd)

    def digest() -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    before = digest()
    with kedge.Client(SqliteStore(path), clock=kedge.LeapingClock()) as kd:
        assert kd.replay("r", again_agent).outcome == "agrees"
        now.add("other")
        assert Replay(read(kd.export("r")), again_agent, asked=Asked(live="1")).outcome().outcome == "parted"
        head = kd.log.head("r")
    assert digest() == before
    with kedge.Client(SqliteStore(path)) as kd:
        assert kd.log.head("r") == head


def test_the_client_replays_a_run_or_a_file_by_the_agent_of_its_name(kd: kedge.Client, tmp_path: Path) -> None:
    (tmp_path / "r.kedge").write_bytes(ended(kd))
    for source in ("r", tmp_path / "r.kedge", str(tmp_path / "r.kedge")):
        assert kd.replay(source).outcome == "agrees"
    assert asyncio.run(kd.replay.soon("r", to="3:before")).stopped == "before step 3"
    now.add("other")
    assert kd.replay("r", "again_agent").outcome == "agrees", "what the world is like now is of no interest"


def test_secrets_of_a_run_in_the_store_are_compared_under_its_key(kd: kedge.Client) -> None:
    @kedge.tool(effect="at_most_once")
    async def again_login(password: kedge.Secret) -> str:
        return "in"

    @kedge.agent
    async def again_secretive(run: kedge.Run) -> str:
        return await run.call(again_login, kedge.Secret("hunter2"))

    kd.run(again_secretive, id="s")
    assert kd.replay("s", again_secretive, check=True).result == "in"


# stopping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [again_agent, again_blocking])
@pytest.mark.parametrize(("to", "last"), [("1", "1"), ("1:before", None), ("2:before", "1"), ("2:after", "2")])
def test_it_stops_at_a_step_before_or_after_its_outcome(
    kd: kedge.Client, agent: Any, to: str, last: str | None
) -> None:
    data = ended(kd) if agent is again_agent else b""
    if agent is again_blocking:
        kd.run(again_blocking, 3, id="b")
        data = kd.export("b")
        world.clear()
    replayed = followed(data, agent, to=to)
    assert replayed.outcome == "stopped"
    assert replayed.stopped == f"{'before' if to.endswith('before') else 'after'} step {to.partition(':')[0]}"
    assert (replayed.played[-1].step if replayed.played else None) == last
    assert world == []


def test_it_stops_inside_parallel_work_too(kd: kedge.Client) -> None:
    replayed = followed(ended(kd), to="4.1.1")
    assert [played.step for played in replayed.played] == ["1", "2", "3", "4.1.1"]


def test_a_step_that_is_not_on_record_is_no_place_to_stop_at(kd: kedge.Client) -> None:
    data = ended(kd)
    for place in ("99", "4.9.1", "@3", "now", "soon"):
        with pytest.raises(BoundaryUnknown):
            followed(data, to=place)


def test_what_was_given_is_told_in_order_with_its_outcome(kd: kedge.Client) -> None:
    told: list[Any] = []
    Replay(read(ended(kd)), again_agent, tell=told.append).outcome()
    assert [(each.step, each.name, each.status) for each in told] == [
        ("1", "again_look", "done"), ("2", "again_chat", "done"), ("3", "again_pay", "done"),
        ("4.1.1", "again_look", "done"), ("4.2.1", "again_pay", "done"), ("4", "gather", "done"),
        ("5", "go", "done"), ("6", "again_pay", "done"),
    ]  # fmt: skip
    assert [each.output for each in told[2:4]] == ["paid 1", {"n": 1, "status": "up"}]


# one step for real --------------------------------------------------------------------------------


def test_one_step_is_run_for_real_and_its_outcome_is_what_the_code_goes_on_with(kd: kedge.Client) -> None:
    data = ended(kd)
    now.add("other")
    replayed = followed(data, live="1")
    assert world == [("look", 1)]
    assert replayed.live is not None
    assert (replayed.live.recorded, replayed.live.found) == ({"n": 1, "status": "up"}, {"n": 1, "status": "down"})
    assert replayed.played[0].is_live
    assert replayed.played[0].output == {"n": 1, "status": "down"}
    assert replayed.parted is not None
    assert "the record has tool again_pay(n=1), the code asks for tool again_pay(n=0)" in str(replayed.parted)


def test_what_gives_the_same_for_real_agrees_and_an_effect_has_its_key(kd: kedge.Client) -> None:
    data = ended(kd)
    [key] = [effect.key for effect in kd.state("r").effects if effect.step == "6"]
    assert followed(data, live="6").outcome == "agrees"
    assert world == [("pay", 2, key)]


@pytest.mark.parametrize(("step", "did"), [("2", ("model", ["hello"])), ("4.1.1", ("look", 1))])
def test_models_and_steps_of_a_branch_are_run_for_real_too(kd: kedge.Client, step: str, did: Any) -> None:
    assert followed(ended(kd), live=step).outcome == "agrees"
    assert world == [did]


def test_a_step_of_a_fork_is_run_for_real_wherever_it_was_recorded(kd: kedge.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "3:after", effects="live")
    kd.advance(fork.id)
    data = kd.export(fork.id)
    for step in ("1", "3", "6"):
        world.clear()
        replayed = followed(data, live=step)
        assert replayed.outcome == "agrees", replayed.parted
        assert len(world) == 1


def test_a_blocking_agents_step_is_run_for_real(kd: kedge.Client) -> None:
    kd.run(again_blocking, 3, id="b")
    data = kd.export("b")
    world.clear()
    now.add("other")
    replayed = followed(data, again_blocking, live="1")
    assert "the record returned" in str(replayed.parted)
    assert world == [("look", 3)]


def test_a_step_that_failed_is_tried_again_and_one_that_fails_now_is_told(kd: kedge.Client) -> None:
    now.add("broke")
    with pytest.raises(kedge.RunFailed):
        kd.run(again_agent, 1, id="f")
    data = kd.export("f")
    now.clear()
    world.clear()
    replayed = followed(data, live="3")
    assert replayed.live is not None
    assert "the account is empty" in str(replayed.live.recorded_failure)
    assert (replayed.live.found, replayed.live.found_failure) == ("paid 1", None)
    assert [each[0] for each in world] == ["pay"]
    assert "scope gather" in str(replayed.parted), "it goes on where the record has its failure"
    whole = ended(kd, "w")
    now.add("down")
    failing = followed(whole, live="1")
    assert failing.live is not None
    assert "nobody there" in str(failing.live.found_failure)
    assert "the code fails with" in str(failing.parted) or "an error" in str(failing.parted)


def test_a_step_of_a_run_that_was_called_off_is_run_for_real(kd: kedge.Client) -> None:
    with pytest.raises(kedge.RunWaiting):
        kd.run(again_agent, 1, id="c")
    kd.cancel("c")
    kd.advance("c")
    world.clear()
    data = kd.export("c")
    assert agrees(data).status == "cancelled"
    assert followed(data, live="1").outcome == "agrees"
    assert world == [("look", 1)]


def test_a_model_is_asked_what_the_code_asks_it_now(kd: kedge.Client) -> None:
    data = ended(kd)

    @kedge.agent(name="again_agent")
    async def again_reworded(run: kedge.Run, n: int) -> Any:
        await run.call(again_look, n)
        return await run.model(again_chat, messages=["good evening"])

    replayed = followed(data, again_reworded, live="2")
    assert world == [("model", ["good evening"])]
    assert replayed.played[1].drift is not None


def test_only_tools_and_models_are_run_for_real(kd: kedge.Client) -> None:
    data = ended(kd)
    for step, sort in (("4", "scope"), ("5", "wait")):
        with pytest.raises(BoundaryUnknown, match=f"is a {sort}; only tools and models can be run for real"):
            followed(data, live=step)
    assert world == []


# stray I/O ----------------------------------------------------------------------------------------


@kedge.agent
async def again_strays(run: kedge.Run, path: str) -> str:
    found = await run.call(again_look, 1)
    if "thread" in now:
        thread = threading.Thread(target=write, args=(path,))
        thread.start()
        thread.join()
    if "library" in now:
        thread = threading.Thread(target=Path(path).write_text, args=("stray",))
        thread.start()
        thread.join()
    if "task" in now:
        await asyncio.gather(asyncio.create_task(asyncio.to_thread(write, path)), return_exceptions=True)
    if "executor" in now:
        await asyncio.gather(asyncio.get_running_loop().run_in_executor(None, write, path), return_exceptions=True)
    return str(found["status"])


def write(path: str) -> None:
    Path(path).write_text("stray")  # here


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["thread", "task", "executor", "library"])
def test_threads_and_tasks_that_the_code_starts_are_stopped_and_named(
    kd: kedge.Client, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "stray"
    kd.run(again_strays, str(path), id="s")
    data = kd.export("s")
    assert followed(data, again_strays).outcome == "agrees"
    now.add(how)
    replayed = followed(data, again_strays)
    assert not path.exists()
    assert replayed.parted is not None
    assert f"{__file__}:" in str(replayed.parted)
    assert f"open('{path}', 'w') outside of a step" in str(replayed.parted)


def test_reading_a_file_is_told_and_does_not_stop_the_code(kd: kedge.Client) -> None:
    @kedge.agent
    async def again_reader(run: kedge.Run) -> int:
        return len(Path(__file__).read_text()) * 0 + await run.call(again_count)

    @kedge.tool(effect="reads")
    async def again_count() -> int:
        return 3

    kd.run(again_reader, id="s")
    replayed = followed(kd.export("s"), again_reader)
    assert replayed.outcome == "agrees"
    assert [(stray.reads, stray.file) for stray in replayed.strays] == [(True, __file__)]


# the examples -------------------------------------------------------------------------------------


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"replayed_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def out_of_order(fn: Any) -> Any:
    @functools.wraps(fn)
    def raises(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{fn.__name__} was called")

    return raises


@pytest.mark.parametrize("name", ["claim_review", "infrastructure", "research", "saga", "subscription", "tool_loop"])
def test_every_run_of_the_examples_is_followed_with_its_tools_out_of_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    records: dict[str, tuple[str, bytes]] = {}
    closing = kedge.Client.close

    def close(client: kedge.Client) -> None:
        if not client._closed:
            for row in client.list():
                if not row.agent.startswith("kedge."):
                    records[row.run] = row.agent, export(client.log, row.run)
        closing(client)

    monkeypatch.setattr(kedge.Client, "close", close)
    module = imported(EXAMPLES / f"{name}.py")
    main = module.main()
    if asyncio.iscoroutine(main):
        asyncio.run(main)
    agents = {value.name: value for value in vars(module).values() if isinstance(value, kedge.Agent)}
    for value in vars(module).values():
        if isinstance(value, kedge.Tool):
            monkeypatch.setattr(value, "fn", out_of_order(value.fn))
    assert records
    for run, (agent, data) in records.items():
        replayed = followed(data, agents[agent])
        assert replayed.outcome == "agrees", (run, replayed.parted, replayed.beyond)


def test_parted_is_an_error_where_a_test_wants_one(kd: kedge.Client) -> None:
    ended(kd)
    with pytest.raises(ReplayParted):
        kd.replay("r", kedge.agent(name="again_agent")(_nothing), check=True)


async def _nothing(run: kedge.Run, n: int) -> None:
    pass
