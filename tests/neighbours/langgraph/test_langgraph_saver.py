"""The checkpointer keeps LangGraph's contract, and what its conformance suite leaves out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Interrupt, interrupt
from typing_extensions import TypedDict

import killick
from killick.adapters.langgraph import KillickSaver
from killick.errors import DeclarationRefused, ValueErased
from neighbours.trying import needs


@pytest.fixture(params=["memory", "sqlite"])
def saver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KillickSaver]:
    with KillickSaver("memory:" if request.param == "memory" else tmp_path / "killick.db") as made:
        yield made


def config(thread: Any = "1", ns: str = "", at: str | None = None) -> dict[str, Any]:
    more = {} if at is None else {"checkpoint_id": at}
    return {"configurable": {"thread_id": thread, "checkpoint_ns": ns, **more}}


def put(saver: BaseCheckpointSaver[Any], parent: dict[str, Any], step: int = 0, **values: Any) -> dict[str, Any]:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"], checkpoint["channel_versions"] = values, dict.fromkeys(values, step + 1)
    return saver.put(
        parent, checkpoint, {"source": "loop", "step": step, "parents": {}}, checkpoint["channel_versions"]
    )


def ids(found: Any) -> list[str]:
    return [each.checkpoint["id"] for each in found]


@pytest.mark.parametrize("where", ["memory", "sqlite"])
def test_all_of_the_conformance_suite_passes_and_nothing_is_skipped(where: str, tmp_path: Path) -> None:
    @checkpointer_test(name=f"KillickSaver on {where}")
    async def made() -> AsyncGenerator[BaseCheckpointSaver[Any], None]:
        async with KillickSaver("memory:" if where == "memory" else tmp_path / f"{uuid4()}.db") as saver:
            yield saver

    report = asyncio.run(validate(made))
    failures = [each for result in report.results.values() for each in result.failures]
    assert failures == []
    assert report.passed_all_base()
    assert set(report.results) == {each.value for each in Capability}
    assert all(result.detected and not result.tests_skipped for result in report.results.values())
    assert sum(result.tests_passed for result in report.results.values()) == 81


# the blocking methods -------------------------------------------------------------------------------


def test_blocking_and_awaited_methods_give_the_same(saver: KillickSaver) -> None:
    first = put(saver, config(), a=1)
    second = put(saver, first, 1, a=2, b=[HumanMessage("hello", id="h")])
    saver.put_writes(second, [("a", 3), ("b", "more")], "task", "path")

    async def awaited() -> list[Any]:
        return [
            await saver.aget_tuple(config()),
            await saver.aget_tuple(first),
            [each async for each in saver.alist(config())],
            [each async for each in saver.alist(None, filter={"step": 0})],
            [each async for each in saver.alist(config(), before=second, limit=1)],
            await saver.aget_delta_channel_history(config=second, channels=["a"]),
        ]

    assert asyncio.run(awaited()) == [
        saver.get_tuple(config()),
        saver.get_tuple(first),
        list(saver.list(config())),
        list(saver.list(None, filter={"step": 0})),
        list(saver.list(config(), before=second, limit=1)),
        saver.get_delta_channel_history(config=second, channels=["a"]),
    ]
    last = saver.get_tuple(config())
    assert last is not None
    assert last.pending_writes == [("task", "a", 3), ("task", "b", "more")]
    assert (last.config, last.parent_config) == (second, first)
    assert last.checkpoint["channel_values"] == {"a": 2, "b": [HumanMessage("hello", id="h")]}


def test_blocking_methods_drop_copy_and_prune(saver: KillickSaver) -> None:
    first = put(saver, config(), a=1)
    second = put(saver, first, 1, a=2)
    other = put(saver, config(ns="child"), a=3)
    saver.put_writes(second, [("a", 4)], "task")
    saver.copy_thread("1", "2")
    saver.prune(["1"])
    assert ids(saver.list(config())) == [second["configurable"]["checkpoint_id"]]
    assert ids(saver.list(config(ns="child"))) == [other["configurable"]["checkpoint_id"]]
    assert len(list(saver.list({"configurable": {"thread_id": "2"}}))) == 3
    kept = saver.get_tuple(config("2"))
    assert kept is not None
    assert kept.pending_writes == [("task", "a", 4)]
    saver.put(config("2"), empty_checkpoint(), {"run_id": "r"}, {})  # type: ignore[typeddict-item]
    saver.delete_for_runs(["r", "no such run"])
    assert len(list(saver.list(None))) == 5
    saver.prune(["2"], strategy="delete")
    saver.delete_thread("1")
    assert list(saver.list(None)) == []
    with pytest.raises(DeclarationRefused, match="keep_latest"):
        saver.prune(["1"], strategy="keep_some")


def test_a_thread_that_was_deleted_begins_anew(saver: KillickSaver) -> None:
    for turn in range(3):
        put(saver, config("a~1"), a="x" * 1000, turn=turn)
        [found] = saver.list(config("a~1"))
        assert found.checkpoint["channel_values"] == {"a": "x" * 1000, "turn": turn}
        saver.delete_thread("a~1")
        assert saver.get_tuple(config("a~1")) is None


def test_what_is_returned_belongs_to_the_caller(saver: KillickSaver) -> None:
    put(saver, config(), a=[{"x": [1]}], b={"long": ["word " * 50]})
    for _ in range(2):
        found = saver.get_tuple(config())
        assert found is not None
        assert found.checkpoint["channel_values"] == {"a": [{"x": [1]}], "b": {"long": ["word " * 50]}}
        found.checkpoint["channel_values"]["a"][0]["x"].append(2)
        found.checkpoint["channel_values"]["b"]["long"].append(2)
        found.metadata["step"] = 17


def test_unchanged_messages_are_serialized_once_and_a_changed_one_again(
    saver: KillickSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [HumanMessage(f"{number} " * 40, id=str(number)) for number in range(50)]
    first = put(saver, config(), messages=said)
    read: Any = saver.get_tuple(config())
    again = read.checkpoint["channel_values"]["messages"]
    assert again == said
    dumped: list[Any] = []
    plain = JsonPlusSerializer.dumps_typed
    monkeypatch.setattr(JsonPlusSerializer, "dumps_typed", lambda self, it: dumped.append(it) or plain(self, it))
    again[7].additional_kwargs["seen"] = {"by": ["ann"]}
    again[8].content = [{"type": "text", "text": "other " * 40}]
    put(saver, first, messages=again)
    assert [it for it in dumped if isinstance(it, HumanMessage)] == again[7:9]
    for _ in range(2):
        found: Any = saver.get_tuple(config())
        messages = found.checkpoint["channel_values"]["messages"]
        assert messages == again
        assert [message.model_dump() for message in messages] == [message.model_dump() for message in again]
        messages[7].additional_kwargs["seen"]["by"].append("bob")


def test_threads_named_by_numbers_are_found(saver: KillickSaver) -> None:
    stored = put(saver, config(7), a=1)
    assert stored["configurable"]["thread_id"] == 7
    assert saver.get_tuple(config(7)) == saver.get_tuple(config("7"))._replace(  # type: ignore[union-attr]
        config=config(7, at=stored["configurable"]["checkpoint_id"])
    )


def test_versions_go_up_and_those_of_other_checkpointers_stay_what_they_are(saver: KillickSaver) -> None:
    assert [saver.get_next_version(each, None) for each in (None, 1, 41)] == [1, 2, 42]
    theirs = f"{9:032}.0.5"
    assert saver.get_next_version(theirs, None) > theirs
    assert len(saver.get_next_version(theirs, None).partition(".")[0]) == 32
    checkpoint = empty_checkpoint()
    checkpoint["channel_versions"], checkpoint["channel_values"] = {"a": theirs}, {"a": 1}
    checkpoint["versions_seen"] = {"node": {"a": theirs}}
    saver.put(config(), checkpoint, {"source": "input", "step": -1, "parents": {}}, {"a": theirs})
    found = saver.get_tuple(config())
    assert found is not None
    assert found.checkpoint == checkpoint


# order, at once, secrets ----------------------------------------------------------------------------


def test_writes_come_back_in_the_order_in_which_they_are_applied(saver: KillickSaver) -> None:
    stored = put(saver, config())
    saver.put_writes(stored, [("x", 1), ("y", 2)], "z-task", "~a, 1")
    saver.put_writes(stored, [("x", 3)], "a-task", "~b, 2")
    saver.put_writes(stored, [("x", 4)], "m-task")
    expected = [("m-task", "x", 4), ("z-task", "x", 1), ("z-task", "y", 2), ("a-task", "x", 3)]
    for found in (saver.get_tuple(stored), next(saver.list(config()))):
        assert found is not None
        assert found.pending_writes == expected


def test_the_first_write_of_a_task_stands_but_errors_and_interrupts_are_replaced(saver: KillickSaver) -> None:
    stored = put(saver, config())
    for turn in range(2):
        saver.put_writes(stored, [("x", turn), ("__interrupt__", f"i{turn}"), ("__error__", f"e{turn}")], "task")
        saver.put_writes(stored, [("__resume__", [turn])], "task")
    found = saver.get_tuple(stored)
    assert found is not None
    assert sorted(found.pending_writes or [], key=str) == sorted(
        [("task", "x", 0), ("task", "__interrupt__", "i1"), ("task", "__error__", "e1"), ("task", "__resume__", [1])],
        key=str,
    )


def test_many_threads_and_two_checkpointers_lose_nothing(tmp_path: Path) -> None:
    said = [f"{turn} " + "something long enough to be kept once " * 3 for turn in range(10)]
    with KillickSaver(tmp_path / "killick.db") as one, KillickSaver(tmp_path / "killick.db") as two:
        stored = put(one, config(), said=said)

        def write(number: int) -> None:
            saver = (one, two)[number % 2]
            for turn in range(5):
                saver.put_writes(stored, [("said", said[: turn + 1])], f"task-{number}-{turn}")
                put(saver, stored, turn, said=said[:turn], by=number)

        workers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for saver in (one, two):
            found = list(saver.list(config()))
            assert len(found) == 21
            assert len(found[-1].pending_writes or ()) == 20
            for each in found[:-1]:
                assert each.checkpoint["channel_values"]["said"] == said[: each.metadata["step"]]
            for task, _, value in found[-1].pending_writes or ():
                assert value == said[: int(task.rpartition("-")[2]) + 1]


def test_a_serializer_that_encrypts_sees_everything(tmp_path: Path) -> None:
    serde = EncryptedSerializer.from_pycryptodome_aes(key=b"0123456789abcdef")
    with KillickSaver(tmp_path / "killick.db", serde=serde) as saver:
        values = {
            "a": "the secret plan",
            "b": ["the secret plan" * 50, 17],
            "c": HumanMessage("the secret plan", id="h"),
        }
        put(saver, config(), **values)
        found = saver.get_tuple(config())
        assert found is not None
        assert found.checkpoint["channel_values"] == values
        saver.put_writes(found.config, [("a", "the secret plan")], "task")
        saver.copy_thread("1", "2")
        copied = saver.get_tuple(config("2"))
        assert copied is not None
        assert copied.pending_writes == [("task", "a", "the secret plan")]
    assert b"secret plan" not in (tmp_path / "killick.db").read_bytes()


def test_threads_are_nobody_s_runs_and_verification_reads_them(saver: KillickSaver, tmp_path: Path) -> None:
    client = killick.open(str(tmp_path / "mine.db"))
    with client:
        mine = KillickSaver(client)
        put(mine, config(), a="x" * 5000)
        assert client.list() == []
        assert client.store.verify().holds
        mine.close()
        assert mine.get_tuple(config()) is not None  # the client is its owner's to close


def test_what_was_erased_is_told_and_the_thread_goes_on(tmp_path: Path) -> None:
    secret = "a secret that was said " * 50
    with killick.open(str(tmp_path / "killick.db")) as client:
        first = put(KillickSaver(client), config(), said=secret)
        log = client.runtime.log.open("killick:langgraph:1")
        client.runtime.log.erase(
            log, at=1, reason="asked for", seqs=[2], pieces=client.runtime.log.pieces_of("killick:langgraph:1", 2)
        )
        saver = KillickSaver(client)
        second = put(saver, first, 1, said="something else " * 50)
        found = saver.get_tuple(second)
        assert found is not None
        assert found.checkpoint["channel_values"] == {"said": "something else " * 50}
        with pytest.raises(ValueErased):
            saver.get_tuple(first)
        assert client.store.verify().holds


# real graphs ----------------------------------------------------------------------------------------


class State(TypedDict):
    said: Annotated[list[str], lambda before, after: before + after]


def asking() -> StateGraph[Any, Any, Any, Any]:
    def ask(state: State) -> dict[str, Any]:
        return {"said": [f"you said {interrupt('what?')}"]}

    builder = StateGraph(State)
    builder.add_node("think", lambda state: {"said": ["thought"]})
    builder.add_node("ask", ask)
    builder.add_edge(START, "think")
    builder.add_edge("think", "ask")
    return builder


def test_a_graph_is_interrupted_and_resumed_by_another_process_s_checkpointer(tmp_path: Path) -> None:
    with KillickSaver(tmp_path / "killick.db") as saver:
        out = asking().compile(checkpointer=saver).invoke({"said": ["hi"]}, config())
        [asked] = out["__interrupt__"]
        assert isinstance(asked, Interrupt)
    with KillickSaver(tmp_path / "killick.db") as saver:
        graph = asking().compile(checkpointer=saver)
        assert graph.get_state(config()).next == ("ask",)
        assert graph.invoke(Command(resume="yes"), config()) == {"said": ["hi", "thought", "you said yes"]}
        assert graph.get_state(config()).next == ()


def test_a_graph_is_forked_from_its_past_and_both_ways_stay(saver: KillickSaver) -> None:
    graph = asking().compile(checkpointer=saver)
    graph.invoke({"said": ["hi"]}, config())
    graph.invoke(Command(resume="yes"), config())
    before = next(state for state in graph.get_state_history(config()) if state.next == ("think",))
    fork = graph.update_state(before.config, {"said": ["and more"]})
    out = graph.invoke(None, fork)
    assert out["said"] == ["hi", "and more", "thought"]
    assert graph.invoke(Command(resume="no"), config())["said"][-1] == "you said no"
    ends = [state.values["said"][-1] for state in graph.get_state_history(config()) if not state.next]
    assert ends == ["you said no", "you said yes"]


def test_an_awaited_graph_with_a_graph_inside_keeps_both(saver: KillickSaver) -> None:
    inner = asking().compile(checkpointer=True)
    builder = StateGraph(State)
    builder.add_node("inner", inner)
    builder.add_edge(START, "inner")
    graph = builder.compile(checkpointer=saver)

    async def play() -> Any:
        await graph.ainvoke({"said": ["hi"]}, config())
        state = await graph.aget_state(config(), subgraphs=True)
        assert state.tasks[0].state.values["said"] == ["hi", "thought"]
        return await graph.ainvoke(Command(resume="yes"), config())

    assert asyncio.run(play())["said"][-1] == "you said yes"
    found = saver.list({"configurable": {"thread_id": "1"}})
    assert {each.config["configurable"]["checkpoint_ns"] for each in found} == {"", "inner"}


def test_a_conversation_goes_on_with_the_messages_that_it_had(saver: KillickSaver) -> None:
    builder = StateGraph(MessagesState)
    builder.add_node("bot", lambda state: {"messages": [AIMessage(f"heard {len(state['messages'])}")]})
    builder.add_edge(START, "bot")
    graph = builder.compile(checkpointer=saver)
    for turn in range(4):
        out = graph.invoke({"messages": [HumanMessage(f"turn {turn}")]}, config())
    assert [message.content for message in out["messages"]] == [
        "turn 0", "heard 1", "turn 1", "heard 3", "turn 2", "heard 5", "turn 3", "heard 7",
    ]  # fmt: skip
    assert graph.get_state(config()).values == out


def delta_graph(saver: KillickSaver) -> Any:
    from langgraph.channels.delta import DeltaChannel  # older versions have none

    joined = DeltaChannel(lambda before, batches: before + [x for each in batches for x in each])
    builder: Any = StateGraph(TypedDict("Deltas", {"said": Annotated[list[str], joined]}))
    builder.add_node("one", lambda state: {"said": [f"one {len(state['said'])}"]})
    builder.add_node("two", lambda state: {"said": [f"two {len(state['said'])}"]})
    builder.add_edge(START, "one")
    builder.add_edge(START, "two")
    return builder.compile(checkpointer=saver)


@needs("langgraph", 1, 2, 20)
def test_delta_channels_are_put_together_again_also_after_pruning_copying_and_forking(saver: KillickSaver) -> None:
    graph, expected = delta_graph(saver), list[str]()
    for turn in range(4):
        expected += [f"turn {turn}", f"one {len(expected) + 1}", f"two {len(expected) + 1}"]
        assert graph.invoke({"said": [f"turn {turn}"]}, config())["said"] == expected
    assert graph.get_state(config()).values["said"] == expected
    saver.copy_thread("1", "2")
    saver.prune(["1"])
    for thread in ("1", "2"):
        assert graph.get_state(config(thread)).values["said"] == expected
    past = [state for state in graph.get_state_history(config("2")) if len(state.values.get("said", ())) == 3]
    fork = graph.update_state(past[0].config, {"said": ["another way"]}, as_node="one")
    assert graph.get_state(fork).values["said"] == [*expected[:3], "another way"]


@pytest.mark.parametrize("way", ["delete_thread", "prune"])
def test_a_deleted_thread_leaves_no_bytes_in_any_file_of_an_open_store(tmp_path: Path, way: str) -> None:
    path = tmp_path / "killick.db"
    small, large = "sw0rdf1sh", "a long secret " * 2_000
    with KillickSaver(path) as saver:
        first = put(saver, config(), said=[HumanMessage(small, id="h")], large=large)
        put(saver, first, 1, said=[HumanMessage(small, id="h"), AIMessage("noted", id="a")])
        saver.put_writes(first, [("said", small)], "task")
        put(saver, config("2"), kept="kept")
        assert small.encode() in b"".join(each.read_bytes() for each in tmp_path.glob("killick.db*") if each.is_file())
        if way == "prune":
            saver.prune(["1"], strategy="delete")
        else:
            saver.delete_thread("1")
        for each in filter(Path.is_file, tmp_path.glob("killick.db*")):
            assert small.encode() not in each.read_bytes(), each
            assert large[:200].encode() not in each.read_bytes(), each
        assert len(list(saver.list(None))) == 1
