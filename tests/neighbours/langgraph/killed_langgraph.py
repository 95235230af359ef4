"""Graphs that are killed: `python killed_langgraph.py FOLDER` imports once, and forks a process for each life."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

import killick
from killick.adapters.langgraph import Gate, KillickSaver
from killick.adapters.langgraph.middleware import KillickMiddleware

THREAD: Any = {"configurable": {"thread_id": "1"}}
NODES = 12


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Scripted(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def theirs(folder: Path, name: str) -> SqliteSaver:
    return SqliteSaver(sqlite3.connect(folder / f"theirs-{name}.db", check_same_thread=False))


class Count(TypedDict):
    count: int


def fast_nodes(folder: Path, mode: Any, *, with_killick: bool) -> None:
    """A node that does something quick, over and over; the process dies in the middle, then another goes on."""
    done, marker = folder / f"done-{with_killick}-{mode}", folder / f"died-{with_killick}-{mode}"
    kd = killick.open(str(folder / f"{mode}.db")) if with_killick else None

    def effect(number: int) -> int:
        with done.open("a") as file:
            file.write(f"{number}\n")
        return number

    act = Gate(kd).step(effect) if with_killick else effect

    def node(state: Count) -> Count:
        if state["count"] == NODES // 2 and not marker.exists():
            marker.touch()
            die()
        return {"count": act(state["count"]) + 1}

    builder = StateGraph(Count)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_conditional_edges("node", lambda state: END if state["count"] >= NODES else "node")
    saver = KillickSaver(kd) if kd is not None else theirs(folder, mode)
    graph, begun = builder.compile(checkpointer=saver), saver.get_tuple(THREAD) is not None
    out = graph.invoke(None if begun else {"count": 0}, {**THREAD, "recursion_limit": 100}, durability=mode)
    assert out == {"count": NODES}


def parallel_tools(folder: Path, mode: Any, *, with_killick: bool) -> None:
    """An agent calls two tools at once: one pays and is done, then the process dies in the other.

    Nothing is saved before the end, so that the model is asked again; it pays under other ids then.
    """
    paid, marker = folder / f"paid-{with_killick}-{mode}", folder / f"died-paid-{with_killick}-{mode}"

    @tool
    def pay(amount: int) -> str:
        """Pay somebody."""
        with paid.open("a") as file:
            file.write(f"{amount}\n")
        return "paid"

    @tool
    def look() -> str:
        """Look whether it was paid."""
        if marker.exists():
            return "seen"
        while not is_paid():
            pass
        marker.touch()
        die()
        return ""

    def is_paid() -> bool:
        if kd is None:
            return paid.exists() and paid.stat().st_size > 0
        return any("paid" in str(output) for output in kd.state("langgraph:1").outputs.values())

    kd = killick.open(str(folder / "tools.db")) if with_killick else None
    calls = [
        {"name": "pay", "args": {"amount": 5}, "id": f"a-{os.getpid()}", "type": "tool_call"},
        {"name": "look", "args": {}, "id": f"b-{os.getpid()}", "type": "tool_call"},
    ]
    # With Killick the first reply is on record in the second life, and the model is asked for the next one alone.
    replies = [AIMessage("", tool_calls=calls), AIMessage("done")]
    model = Scripted(messages=iter(replies[1:] if with_killick and marker.exists() else replies))
    saver = KillickSaver(kd) if kd is not None else theirs(folder, "tools")
    middleware = [KillickMiddleware(kd, models=True, tools={"look": {"effect": "reads"}})] if kd is not None else []
    agent = create_agent(model, [pay, look], middleware=middleware, checkpointer=saver)
    out = agent.invoke({"messages": [HumanMessage("pay")]}, THREAD, durability=mode)
    assert [message.content for message in out["messages"] if isinstance(message, ToolMessage)] == ["paid", "seen"]


def torn_checkpoints(folder: Path, mode: Any, *, with_killick: bool) -> None:
    """Checkpoints and writes are put one after the other; the process dies in the midst of the nth commit."""
    saver = KillickSaver(folder / "torn.db")
    store = saver._threads.client.runtime.store
    append, left = store.append, [int(mode)]

    def dying(items: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            die()
        return append(items)

    store.append = dying  # type: ignore[method-assign]
    config = {"configurable": {"thread_id": "1", "checkpoint_ns": ""}}
    found = saver.get_tuple(config)
    said = [] if found is None else found.checkpoint["channel_values"]["said"]
    for turn in range(len(said), 6):
        said = [*said, f"{turn} " + "said something " * 20]
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"], checkpoint["channel_versions"] = {"said": said}, {"said": turn + 1}
        config = saver.put(config, checkpoint, {"source": "loop", "step": turn, "parents": {}}, {"said": turn + 1})
        saver.put_writes(config, [("said", said), ("more", turn)], f"task-{turn}")


def once(scenario: Callable[..., None], folder: Path, mode: str, *, with_killick: bool) -> int:
    """Run a scenario in a process of its own; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            scenario(folder, mode, with_killick=with_killick)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    folder = Path(sys.argv[1])
    for scenario, mode, name in (
        (fast_nodes, "exit", "done"), (fast_nodes, "async", "done"), (parallel_tools, "exit", "paid"),
    ):  # fmt: skip
        for with_killick in (False, True):
            ends = [once(scenario, folder, mode, with_killick=with_killick) for _ in range(2)]
            done = (folder / f"{name}-{with_killick}-{mode}").read_text().split()
            print("seen", scenario.__name__, mode, with_killick, *ends, len(done), len(set(done)), flush=True)
    for nth in (1, 2, 3, 5, 4, 99):
        print("torn", once(torn_checkpoints, folder, str(nth), with_killick=True), flush=True)


if __name__ == "__main__":
    main()
