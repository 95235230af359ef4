"""Approvals in LangChain's two shapes: what waits here is answered there, and what is asked there is answered here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

import killick
from killick.adapters import langchain_approvals as approvals
from killick.errors import AnswerRefused
from neighbours.trying import needs

ALL = ["approve", "edit", "reject", "respond"]
OLDER = {"allow_accept": True, "allow_ignore": True, "allow_edit": True, "allow_respond": True}


@killick.tool(approve="ann")
async def pay(amount: int) -> str:
    return f"paid {amount}"


@killick.tool
async def ring(bell: str) -> str:
    raise ConnectionError("the line went dead")


@killick.agent
async def paying(run: killick.Run, amount: int) -> str:
    try:
        return await run.call(pay, amount)
    except killick.Rejected as no:
        return str(no.response or no.message)


@killick.agent
async def ringing(run: killick.Run, bell: str) -> str:
    return await run.call(ring, bell)


@killick.agent
async def asking(run: killick.Run, _: None) -> Any:
    answer = await run.ask("Which way?", options=["left", "right"])
    return [answer.kind, answer.value]


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(str(tmp_path / "killick.db")) as made:
        yield made


def waiting(kd: killick.Client, agent: Any, given: Any) -> Any:
    with pytest.raises(killick.RunWaiting) as found:
        kd.run(agent, given, id="r")
    return found.value.waits


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ({"decisions": [{"type": "approve"}]}, "paid 5"),
        ({"decisions": [{"type": "edit", "edited_action": {"name": "pay", "args": {"amount": 3}}}]}, "paid 3"),
        ({"decisions": [{"type": "reject", "message": "too much"}]}, "ann said no: too much"),
        ({"decisions": [{"type": "respond", "message": "done by hand"}]}, "done by hand"),
        ({"type": "approve"}, "paid 5"),
        ([{"type": "accept", "args": None}], "paid 5"),
        ([{"type": "edit", "args": {"action": "pay", "args": {"amount": 3}}}], "paid 3"),
        ([{"type": "ignore", "args": None}], "ann said no"),
        ({"type": "response", "args": "done by hand"}, "done by hand"),
    ],
)
def test_what_waits_here_is_asked_and_answered_in_either_shape(kd: killick.Client, response: Any, result: str) -> None:
    waits = waiting(kd, paying, 5)
    request = approvals.hitl_request(waits)
    assert request["action_requests"][0]["name"] == "pay"
    assert request["action_requests"][0]["args"] == {"amount": 5}
    assert request["review_configs"] == [{"action_name": "pay", "allowed_decisions": ALL}]
    [older] = approvals.human_interrupts(waits)
    assert older["action_request"] == {"action": "pay", "args": {"amount": 5}}
    assert older["config"] == OLDER
    assert older["description"] == request["action_requests"][0]["description"]
    approvals.answer(kd, waits, response, by="ann")
    assert result in kd.run(paying, 5, id="r")


@pytest.mark.parametrize(
    "response", ["yes", {"decisions": []}, [{"type": "shrug"}], {"decisions": [{"type": "approve"}] * 2}]
)
def test_an_answer_of_no_shape_is_refused_and_nothing_is_done(kd: killick.Client, response: Any) -> None:
    waits = waiting(kd, paying, 5)
    with pytest.raises(AnswerRefused):
        approvals.answer(kd, waits, response, by="ann")
    assert len(kd.inbox()) == 1


def test_an_effect_in_doubt_is_settled_by_a_decision(kd: killick.Client) -> None:
    waits = waiting(kd, ringing, "front door")
    request = approvals.hitl_request(waits)
    assert request["review_configs"][0]["allowed_decisions"] == ["approve", "reject", "respond"]
    description = request["action_requests"][0]["description"]
    assert "Do it again? (Check first, then choose. approve: it did not happen, do it again" in description
    assert "Did it happen?" not in description
    approvals.answer(kd, waits, {"decisions": [{"type": "respond", "message": "it rang"}]})
    assert kd.run(ringing, "front door", id="r") == "it rang"


def test_a_question_is_an_action_that_is_answered(kd: killick.Client) -> None:
    waits = waiting(kd, asking, None)
    assert approvals.hitl_request(waits)["action_requests"][0]["args"] == {"options": ["left", "right"]}
    assert approvals.hitl_request(waits)["review_configs"][0]["allowed_decisions"] == ["reject", "respond"]
    with pytest.raises(AnswerRefused, match="'left', 'right'"):
        approvals.answer(kd, waits, {"decisions": [{"type": "approve"}]})
    approvals.answer(kd, waits, {"decisions": [{"type": "respond", "message": "left"}]})
    assert kd.run(asking, None, id="r") == ["respond", "left"]


# what graphs ask, asked here ------------------------------------------------------------------------


class Scripted(GenericFakeChatModel):
    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def graph_that_asks(mode: Any = "batched") -> Any:
    @tool
    def send(to: str) -> str:
        """Send something."""
        return f"sent to {to}"

    calls = [{"name": "send", "args": {"to": name}, "id": name, "type": "tool_call"} for name in ("ann", "bob")]
    model = Scripted(messages=iter([AIMessage("", tool_calls=calls), AIMessage("done")]))
    # The oldest LangChain has no modes.
    modes = {} if mode == "batched" else {"interrupt_mode": mode}
    middleware = HumanInTheLoopMiddleware(interrupt_on={"send": True}, **modes)
    return create_agent(model, [send], middleware=[middleware], checkpointer=InMemorySaver())


def heard(out: Any) -> list[str]:
    return [str(message.content) for message in out["messages"] if isinstance(message, ToolMessage)]


def test_what_a_graph_asks_inside_an_agent_is_asked_here(kd: killick.Client) -> None:
    thread = {"configurable": {"thread_id": "1"}}

    @killick.agent(name="asks_here")
    async def agent(run: killick.Run, _: None) -> list[str]:
        graph = graph_that_asks()
        out = await graph.ainvoke({"messages": [HumanMessage("send")]}, thread)
        response = await approvals.ask(run, out["__interrupt__"][0].value, to="ann")
        return heard(await graph.ainvoke(Command(resume=response), thread))

    for answer in ({"verb": "edit", "value": {"to": "carl"}}, {"verb": "reject", "comment": "not bob"}):
        waiting(kd, agent, None)
        kd.answer("r", by="ann", **answer)  # type: ignore[arg-type]
    said = kd.run(agent, None, id="r")
    assert any("sent to carl" in each for each in said)
    assert any("not bob" in each for each in said)


@pytest.mark.parametrize(
    ("kind", "value", "newer", "older"),
    [
        ("approve", None, {"type": "approve"}, {"type": "accept", "args": None}),
        (
            "edit",
            {"to": "carl"},
            {"type": "edit", "edited_action": {"name": "send", "args": {"to": "carl", "cc": 1}}},
            {"type": "edit", "args": {"action": "send", "args": {"to": "carl", "cc": 1}}},
        ),
        ("reject", None, {"type": "reject"}, {"type": "ignore", "args": None}),
        ("respond", "sent it", {"type": "respond", "message": "sent it"}, {"type": "response", "args": "sent it"}),
    ],
)
def test_answers_from_here_have_the_shape_of_the_question(kind: str, value: Any, newer: Any, older: Any) -> None:
    asked = {"name": "send", "args": {"to": "ann", "cc": 1}}
    answer = killick.Answer(kind=kind, value=value)
    request = {"action_requests": [asked], "review_configs": [{"action_name": "send", "allowed_decisions": ALL}]}
    assert approvals.response_of(request, [answer]) == {"decisions": [newer]}
    assert approvals.response_of({"type": "tool_approval", "tool_call_id": "x", **asked}, [answer]) == newer
    before = {"action_request": {"action": "send", "args": asked["args"]}, "config": OLDER, "description": "?"}
    assert approvals.response_of([before], [answer]) == [older]
    assert approvals.response_of(before, [answer]) == older


def test_what_the_graph_does_not_take_is_no_answer() -> None:
    request = {
        "action_requests": [{"name": "send", "args": {}}],
        "review_configs": [{"action_name": "send", "allowed_decisions": ["approve", "reject"]}],
    }
    with pytest.raises(AnswerRefused, match="give one of approve, reject"):
        approvals.response_of(request, [killick.Answer(kind="respond", value="x")])
    with pytest.raises(AnswerRefused, match="is not a HITLRequest"):
        approvals.response_of({"something": "else"}, [])


@pytest.mark.parametrize("mode", ["batched", pytest.param("per_call", marks=needs("langchain", 1, 4))])
def test_a_graph_outside_of_any_agent_asks_through_a_host(kd: killick.Client, mode: str) -> None:
    graph, thread = graph_that_asks(mode), {"configurable": {"thread_id": "1"}}
    out = graph.invoke({"messages": [HumanMessage("send")]}, thread)

    async def answered() -> Any:
        async with kd.host("conversation-1") as host:
            found = {}
            for each in out["__interrupt__"]:
                found[each.id] = await approvals.ask(host, each.value, key=each.id)
            return found

    for _ in out["__interrupt__"]:
        with pytest.raises(killick.RunWaiting):
            asyncio.run(answered())
        for wait in kd.inbox():
            kd.answer(wait, "approve", by="ann")
    responses = asyncio.run(answered())
    done = graph.invoke(Command(resume=responses), thread)
    assert heard(done) == ["sent to ann", "sent to bob"]
