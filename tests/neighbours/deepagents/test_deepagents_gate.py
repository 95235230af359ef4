"""Deep agents: the tools of an agent and of every subagent go through the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepagents
import pytest
from deepagents.backends import FilesystemBackend
from langgraph.types import Command

import killick
from killick import rules
from killick.adapters.langgraph import KillickSaver
from killick.adapters.langgraph.deepagents import create_deep_agent
from killick.adapters.langgraph.middleware import KillickMiddleware
from neighbours.deepagents.orders import THREAD, Scripted, alone, answered, call, delegate, model, on_killick
from neighbours.killed import KILLED, World, ended
from neighbours.trying import try_example, try_page

WISH: Any = {"messages": [("user", "See to order A7.")]}


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


class Till:
    """A tool that pays, and what it paid."""

    def __init__(self) -> None:
        self.paid: list[int] = []

    def pay(self, order: str, amount: int) -> str:
        """Pay for an order."""
        self.paid.append(amount)
        return f"{amount} paid"


def names(kd: killick.Client) -> list[str]:
    return [step.name for step in kd.state("langgraph:A7").fold.steps if step.name not in ("Scripted", "guests")]


@pytest.mark.parametrize("to", ["general-purpose", "payer"])
def test_a_tool_in_any_subagent_is_a_step_and_so_is_its_model(kd: killick.Client, to: str) -> None:
    till, script = Till(), model()
    script.boss[0] = delegate(to)
    payer = {"name": "payer", "description": "Pays.", "system_prompt": "You pay.", "tools": [till.pay]}
    gate = KillickMiddleware(kd, models=True)
    agent = create_deep_agent(script, [till.pay], gate=gate, subagents=[payer], checkpointer=KillickSaver(kd))
    assert agent.invoke(WISH, THREAD)["messages"][-1].content == "A7 is paid."
    assert till.paid == [5]
    assert sorted(names(kd)) == ["pay", "task"]
    assert script.asked == 4
    assert sum(each.usage.tokens_in for each in kd.state("langgraph:A7").trace if each.usage) == 28


def test_a_graph_that_starts_over_asks_no_model_and_pays_nothing_again(kd: killick.Client) -> None:
    till, asked = Till(), []
    for is_async in (False, True):
        script = model()
        agent = create_deep_agent(script, [till.pay], gate=KillickMiddleware(kd, models=True))
        out = asyncio.run(agent.ainvoke(WISH, THREAD)) if is_async else agent.invoke(WISH, THREAD)
        assert out["messages"][-1].content == "A7 is paid."
        asked.append(script.asked)
    assert (till.paid, asked) == ([5], [4, 0])


@pytest.mark.parametrize("how", ["graph", "killick"])
def test_an_approval_in_a_subagent_interrupts_the_agent_and_the_call_happens_once(kd: killick.Client, how: str) -> None:
    till = Till()

    def agent() -> Any:
        gate = KillickMiddleware(kd, models=True, tools={"pay": {"approve": "mia"}}, by="mia")
        return create_deep_agent(model(), [till.pay], gate=gate, checkpointer=KillickSaver(kd))

    out = agent().invoke(WISH, THREAD)
    assert out["__interrupt__"][0].value["action_requests"][0]["name"] == "pay"
    assert till.paid == []
    if how == "killick":
        kd.answer("langgraph:A7", "edit", value={"order": "A7", "amount": 4}, by="mia")
    resumed = Command(resume={"decisions": [{"type": "approve"}]}) if how == "graph" else None
    assert agent().invoke(resumed, THREAD)["messages"][-1].content == "A7 is paid."
    assert till.paid == [5 if how == "graph" else 4]


def test_two_subagents_at_once_that_do_the_same_are_two(kd: killick.Client) -> None:
    till, script = Till(), model()
    both = [*delegate(call_id="one").tool_calls, *delegate(call_id="two").tool_calls]
    script.boss[0] = script.boss[0].model_copy(update={"tool_calls": both})
    for _ in range(2):
        agent = create_deep_agent(script, [till.pay], gate=KillickMiddleware(kd, models=True))
        assert agent.invoke(WISH, THREAD)["messages"][-1].content == "A7 is paid."
    assert till.paid == [5, 5]
    assert script.asked == 6


def test_a_contract_rejects_calls_in_a_subagent(kd: killick.Client) -> None:
    till = Till()
    contract = killick.Contract("orders", [rules.arguments("pay", amount={"max": 4})])
    gate = KillickMiddleware(kd, models=True, contract=contract)
    create_deep_agent(model(), [till.pay], gate=gate).invoke(WISH, THREAD)
    assert till.paid == []
    assert kd.state("langgraph:A7").fold.steps


def test_its_own_tools_are_steps_too_and_those_that_read_may_run_again(kd: killick.Client, tmp_path: Path) -> None:
    script = Scripted(
        boss=[
            call("write_file", file_path="/note.txt", content="A7"),
            call("read_file", file_path="/note.txt"),
            "written",
        ],
        clerk=[],
    )
    files = FilesystemBackend(root_dir=tmp_path / "files", virtual_mode=True)
    agent = create_deep_agent(script, gate=KillickMiddleware(kd, models=True), backend=files)
    assert agent.invoke(WISH, THREAD)["messages"][-1].content == "written"
    assert (tmp_path / "files" / "note.txt").read_text() == "A7"
    assert names(kd) == ["write_file", "read_file"]


def test_without_it_the_general_purpose_subagent_passes_by_the_gate(kd: killick.Client) -> None:
    """When Deep Agents gives its middleware to subagents itself, the adapter can go."""
    till = Till()
    gate = KillickMiddleware(kd, models=True)
    deepagents.create_deep_agent(model(), [till.pay], middleware=[gate]).invoke(WISH, THREAD)
    assert names(kd) == ["task"]


# in processes that are killed ---------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["sync", "exit"])
def test_a_kill_inside_a_subagents_tool_pays_twice_alone_and_asks_a_person_on_killick(
    tmp_path: Path, durability: Any
) -> None:
    theirs, ours = tmp_path / "alone", tmp_path / "on_killick"
    for run, folder in ((alone, theirs), (on_killick, ours)):
        folder.mkdir()
        assert ended(run, folder, durability, "after-paying") == KILLED
    assert ended(alone, theirs, durability) == "A7 is paid."
    assert "its outcome is not known" in ended(on_killick, ours, durability)
    assert ended(answered, ours) == "answered"
    assert ended(on_killick, ours, durability) == "A7 is paid."
    twice, once = World(theirs).done, World(ours).done
    print(f"killed inside a subagent's tool: Deep Agents alone paid {len(twice)} times, with Killick {len(once)}")
    assert (twice, once) == (["paid", "paid"], ["paid"])


def test_the_page_shows_it(tmp_path: Path) -> None:
    try_page("deepagents", tmp_path)


def test_the_example_pays_once_however_often_it_runs(tmp_path: Path) -> None:
    assert [try_example("deep_agent", tmp_path).count("paying 5 for A7") for _ in range(2)] == [1, 0]
