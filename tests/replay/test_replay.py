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

import killick
from killick.agents.runtime import Runtime
from killick.archive.export import export, read
from killick.errors import BoundaryUnknown, ReplayDiverged
from killick.log import Log, verify
from killick.replay.replay import Replay
from killick.replay.result import Replayed, ReplayRequest
from killick.store import SqliteStore, Store
from killick.store.records import RunQuery

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
def kd(store: Store) -> Iterator[killick.Client]:
    with killick.Client(store, clock=killick.clock.LeapingClock()) as client:
        yield client


@killick.tool(effect="reads")
async def again_look(n: int) -> dict[str, Any]:
    world.append(("look", n))
    if "down" in now:
        raise ConnectionError("nobody there")
    return {"n": n, "status": "up" if "other" not in now else "down"}


@killick.tool(effect="at_most_once", compensate=lambda effect: world.append("unpay"))
def again_pay(n: int, key: killick.Key = killick.KEY) -> str:
    world.append(("pay", n, str(key)))
    if "broke" in now:
        raise killick.NotDone("the account is empty")
    return f"paid {n}"


async def again_chat(messages: list[str]) -> dict[str, Any]:
    world.append(("model", messages))
    return {"role": "assistant", "content": "again"}


@killick.agent
async def again_agent(run: killick.Run, n: int) -> list[Any]:
    first = await run.call(again_look, n)
    said = await run.model(again_chat, messages=["hello"])
    paid = await run.call(again_pay, n if first["status"] == "up" else 0)
    both = await run.gather(run.call(again_look, 1), run.call(again_pay, 5))
    word = await run.wait("go")
    return [said["content"], paid, len(both), word, await run.call(again_pay, n + 1)]


@killick.agent
def again_blocking(run: killick.SyncRun, n: int) -> list[Any]:
    first = run.call(again_look, n)
    both = run.gather(lambda: run.call(again_look, 1), lambda: run.call(again_pay, 5))
    return [first["status"], len(both), run.call(again_pay, n)]


def ended(kd: killick.Client, run: str = "r") -> bytes:
    with pytest.raises(killick.RunWaiting):
        kd.run(again_agent, 1, id=run)
    kd.send(run, "go", "now")
    kd.run(again_agent, 1, id=run)
    data = kd.store.export(run)
    world.clear()
    return data


def followed(data: bytes, agent: Any = again_agent, **asked: Any) -> Replayed:
    return Replay(read(data), agent, asked=ReplayRequest(**asked)).outcome()


def agrees(data: bytes, agent: Any = again_agent) -> Replayed:
    replayed = followed(data, agent)
    assert replayed.outcome == "agrees", replayed.divergence or replayed.beyond
    assert world == []
    return replayed


# any timeline -------------------------------------------------------------------------------------


def test_a_run_that_was_rewound_is_replayed_in_its_current_timeline(kd: killick.Client) -> None:
    ended(kd)
    kd.rewind("r", "3:before")
    kd.advance("r")
    world.clear()
    assert agrees(kd.store.export("r")).result == ["again", "paid 1", 2, "now", "paid 2"]


def test_a_fork_is_replayed_with_what_was_changed_in_it(kd: killick.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "1:after", output={"1": {"n": 1, "status": "down"}}, effects="live")
    kd.advance(fork.id)
    world.clear()
    replayed = agrees(kd.store.export(fork.id))
    assert replayed.played[0].output == {"n": 1, "status": "down"}
    assert replayed.result[1] == "paid 0"


def test_a_fork_inside_parallel_work_is_replayed_with_what_its_siblings_keep(kd: killick.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "4.1.1:before", effects="live")
    kd.advance(fork.id)
    world.clear()
    agrees(kd.store.export(fork.id))


def test_a_fork_of_a_fork_that_leaves_it_before_its_own_first_event_is_exported_and_replayed(
    kd: killick.Client,
) -> None:
    ended(kd)
    fork = kd.fork("r", "3:after", effects="live")
    kd.advance(fork.id)
    for place in ("1:before", "3:after"):
        twice = kd.fork(fork.id, place, effects="live")
        assert kd.runtime.log.head(twice.id).base <= kd.runtime.log.head(fork.id).base
        data = kd.store.export(twice.id)
        assert verify(Log(read(data).loaded())).problems == []
        assert followed(data).outcome == "beyond"
        kd.advance(twice.id)
        world.clear()
        agrees(kd.store.export(twice.id))


def test_a_step_that_was_undone_by_hand_does_not_disturb_a_replay(kd: killick.Client) -> None:
    ended(kd)
    kd.undo("r", "3")
    world.clear()
    assert agrees(kd.store.export("r")).result == ["again", "paid 1", 2, "now", "paid 2"]


def test_what_a_fork_goes_on_with_is_named_and_not_done(kd: killick.Client) -> None:
    ended(kd)
    fork = kd.fork("r", "3:before")
    world.clear()
    replayed = followed(kd.store.export(fork.id))
    assert (replayed.outcome, replayed.beyond) == ("beyond", "step 3: tool again_pay(n=1)")
    assert world == []


@killick.agent
async def again_parent(run: killick.Run) -> list[Any]:
    child = await run.spawn(again_blocking, 7)
    return [await child.result()]


def test_a_parent_is_replayed_without_its_child_and_the_child_by_its_own_file(kd: killick.Client) -> None:
    kd.run(again_parent, id="p")
    world.clear()
    parent, child = kd.store.export("p"), kd.store.export("p/1")
    assert agrees(parent, again_parent).result == [["up", 2, "paid 7"]]
    assert agrees(child, again_blocking).result == ["up", 2, "paid 7"]
    assert world == []


@killick.agent
async def again_renewing(run: killick.Run, n: int) -> str:
    found = await run.call(again_look, n)
    if n < 2 and "stays" not in now:
        await run.renew(n + (2 if "leaps" in now else 1))
    return str(found["n"])


def test_a_run_that_was_renewed_is_replayed_log_by_log(kd: killick.Client) -> None:
    assert kd.run(again_renewing, 0, id="n") == "2"
    logs = [kd.store.export(run) for run in ("n", "n+2", "n+3")]
    world.clear()
    assert [agrees(data, again_renewing).result for data in logs] == [None, None, "2"]
    now.add("leaps")
    assert "the log continues with 1, the code gives 2" in str(followed(logs[0], again_renewing).divergence)
    now.add("stays")
    assert "the log renews it as n+2, the code does not renew it" in str(followed(logs[0], again_renewing).divergence)
    assert world == []


@killick.machine
async def again_machine(run: killick.Run, state: dict[str, Any]) -> Any:
    found = await run.call(again_look, state["n"])
    after = {"n": state["n"] + 1, "seen": [*state["seen"], found["status"]]}
    return killick.Done(after["seen"]) if state["n"] == 2 else killick.Next(after)


def test_a_machine_is_stopped_at_a_transition_or_inside(kd: killick.Client) -> None:
    kd.run(again_machine, {"n": 0, "seen": []}, id="m")
    data = kd.store.export("m")
    world.clear()
    assert agrees(data, again_machine).result == ["up", "up", "up"]
    for to, last in (("2", "2"), ("2.1", "2.1"), ("3:before", "2"), ("3.1:before", "2")):
        replayed = followed(data, again_machine, to=to)
        assert (replayed.outcome, replayed.played[-1].step) == ("stopped", last)
    assert world == []


@killick.tool(effect="transaction")
def again_book(n: int, tx: killick.Tx = killick.TX) -> int:
    world.append(("book", n))
    return n


@killick.agent
async def again_books(run: killick.Run) -> int:
    return await run.call(again_book, 4) + await run.call(again_book, 5)


def test_what_was_done_in_transactions_is_replayed_and_not_done_again(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.run(again_books, id="t")
        world.clear()
        assert agrees(kd.store.export("t"), again_books).result == 9
    assert world == []


# on a copy ----------------------------------------------------------------------------------------


def test_the_store_is_read_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    with killick.Client(SqliteStore(path), clock=killick.clock.LeapingClock()) as kd:
        ended(kd)

    def digest() -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    before = digest()
    with killick.Client(SqliteStore(path), clock=killick.clock.LeapingClock()) as kd:
        assert kd.replay("r", again_agent).outcome == "agrees"
        head = kd.runtime.log.head("r")
    assert digest() == before
    with killick.Client(SqliteStore(path)) as kd:
        assert kd.runtime.log.head("r") == head


def test_the_client_replays_a_run_or_a_file_by_the_agent_of_its_name(kd: killick.Client, tmp_path: Path) -> None:
    (tmp_path / "r.killick").write_bytes(ended(kd))
    for source in ("r", tmp_path / "r.killick", str(tmp_path / "r.killick")):
        assert kd.replay(source).outcome == "agrees"
    assert asyncio.run(kd.as_async().replay("r", to="3:before")).stopped == "before step 3"
    now.add("other")
    assert kd.replay("r", "again_agent").outcome == "agrees", "what the world is like now is of no interest"


def test_secrets_of_a_run_in_the_store_are_compared_under_its_key(kd: killick.Client) -> None:
    @killick.tool(effect="at_most_once")
    async def again_login(password: killick.Secret) -> str:
        return "in"

    @killick.agent
    async def again_secretive(run: killick.Run) -> str:
        return await run.call(again_login, killick.Secret("hunter2"))

    kd.run(again_secretive, id="s")
    assert kd.replay("s", again_secretive, check=True).result == "in"


# stopping -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [again_agent, again_blocking])
@pytest.mark.parametrize(("to", "last"), [("1", "1"), ("1:before", None), ("2:before", "1"), ("2:after", "2")])
def test_it_stops_at_a_step_before_or_after_its_outcome(
    kd: killick.Client, agent: Any, to: str, last: str | None
) -> None:
    data = ended(kd) if agent is again_agent else b""
    if agent is again_blocking:
        kd.run(again_blocking, 3, id="b")
        data = kd.store.export("b")
        world.clear()
    replayed = followed(data, agent, to=to)
    assert replayed.outcome == "stopped"
    assert replayed.stopped == f"{'before' if to.endswith('before') else 'after'} step {to.partition(':')[0]}"
    assert (replayed.played[-1].step if replayed.played else None) == last
    assert world == []


def test_it_stops_inside_parallel_work_too(kd: killick.Client) -> None:
    replayed = followed(ended(kd), to="4.1.1")
    assert [played.step for played in replayed.played] == ["1", "2", "3", "4.1.1"]


def test_a_step_that_is_not_on_record_is_no_place_to_stop_at(kd: killick.Client) -> None:
    data = ended(kd)
    for place in ("99", "4.9.1", "@3", "now", "soon"):
        with pytest.raises(BoundaryUnknown):
            followed(data, to=place)


def test_what_was_given_is_told_in_order_with_its_outcome(kd: killick.Client) -> None:
    told: list[Any] = []
    Replay(read(ended(kd)), again_agent, tell=told.append).outcome()
    assert [(each.step, each.name, each.status) for each in told] == [
        ("1", "again_look", "done"), ("2", "again_chat", "done"), ("3", "again_pay", "done"),
        ("4.1.1", "again_look", "done"), ("4.2.1", "again_pay", "done"), ("4", "gather", "done"),
        ("5", "go", "done"), ("6", "again_pay", "done"),
    ]  # fmt: skip
    assert [each.output for each in told[2:4]] == ["paid 1", {"n": 1, "status": "up"}]


# stray I/O ----------------------------------------------------------------------------------------


@killick.agent
async def again_strays(run: killick.Run, path: str) -> str:
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
    kd: killick.Client, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "stray"
    kd.run(again_strays, str(path), id="s")
    data = kd.store.export("s")
    assert followed(data, again_strays).outcome == "agrees"
    now.add(how)
    replayed = followed(data, again_strays)
    assert not path.exists()
    assert replayed.divergence is not None
    assert f"{__file__}:" in str(replayed.divergence)
    assert f"open('{path}', 'w') outside of a step" in str(replayed.divergence)


def test_reading_a_file_is_told_and_does_not_stop_the_code(kd: killick.Client) -> None:
    @killick.agent
    async def again_reader(run: killick.Run) -> int:
        return len(Path(__file__).read_text()) * 0 + await run.call(again_count)

    @killick.tool(effect="reads")
    async def again_count() -> int:
        return 3

    kd.run(again_reader, id="s")
    replayed = followed(kd.store.export("s"), again_reader)
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


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", ["claim_review", "infrastructure", "research", "saga", "subscription", "tool_loop"])
def test_every_run_of_the_examples_is_followed_with_its_tools_out_of_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    records: dict[str, tuple[str, bytes]] = {}
    closing = Runtime.close

    def close(runtime: Runtime) -> None:
        if not runtime.is_closed:
            for row in runtime.store.runs(RunQuery()):
                if not row.agent.startswith("killick."):
                    records[row.run] = row.agent, export(runtime.log, row.run)
        closing(runtime)

    monkeypatch.setattr(Runtime, "close", close)
    module = imported(EXAMPLES / f"{name}.py")
    main = module.main()
    if asyncio.iscoroutine(main):
        asyncio.run(main)
    agents = {value.name: value for value in vars(module).values() if isinstance(value, killick.Agent)}
    for value in vars(module).values():
        if isinstance(value, killick.Tool):
            monkeypatch.setattr(value, "fn", out_of_order(value.fn))
    assert records
    for run, (agent, data) in records.items():
        replayed = followed(data, agents[agent])
        assert replayed.outcome == "agrees", (run, replayed.divergence, replayed.beyond)


def test_parted_is_an_error_where_a_test_wants_one(kd: killick.Client) -> None:
    ended(kd)
    with pytest.raises(ReplayDiverged):
        kd.replay("r", killick.agent(name="again_agent")(_nothing), check=True)


async def _nothing(run: killick.Run, n: int) -> None:
    pass
