"""Tools of LangGraph that went through the gate happen once, however often their node runs again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt
from pydantic import BaseModel

import killick
from killick import rules
from killick.adapters.langgraph import Gate, KillickSaver, Stopped, Waiting
from killick.adapters.langgraph.middleware import KillickMiddleware
from killick.errors import AnswerRefused, DeclarationRefused
from neighbours.trying import needs, try_example, try_page

THREAD = {"configurable": {"thread_id": "1"}}


class Scripted(GenericFakeChatModel):
    """A model that says what it is told to, whatever tools it is given."""

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self


def calls(*named: tuple[str, dict[str, Any]], id: str = "m1") -> AIMessage:  # noqa: A002
    found = [
        {"name": name, "args": args, "id": f"call_{n}", "type": "tool_call"} for n, (name, args) in enumerate(named)
    ]
    return AIMessage("", tool_calls=found, id=id)


class World:
    """What tools did."""

    def __init__(self) -> None:
        self.paid: list[int] = []
        self.looked = 0
        self.broken = False

    def tools(self) -> list[Any]:
        @tool
        def pay(amount: int) -> str:
            """Pay somebody."""
            self.paid.append(amount)
            if self.broken:
                raise ConnectionError("the line went dead")
            return f"paid {amount}"

        @tool
        def look(what: str = "it") -> str:
            """Look at something."""
            self.looked += 1
            if self.broken:
                raise ConnectionError("nothing to be seen")
            return f"saw {what} {self.looked}"

        @tool
        def ask(question: str) -> str:
            """Ask the user."""
            return f"they said {interrupt(question)}"

        return [pay, look, ask]


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(str(tmp_path / "killick.db")) as made:
        yield made


@pytest.fixture
def world() -> World:
    return World()


def tool_graph(world: World, message: AIMessage, saver: Any, **wrapped: Any) -> Any:
    """A plain graph: a node that calls what a message says, all in one node."""
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [message]})
    builder.add_node("tools", ToolNode(world.tools(), **wrapped))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    return builder.compile(checkpointer=saver)


def gated(gate: Gate) -> dict[str, Any]:
    return {"wrap_tool_call": gate.wrap_tool_call, "awrap_tool_call": gate.awrap_tool_call}


def heard(out: Any) -> list[str]:
    return [message.content for message in out["messages"] if isinstance(message, ToolMessage)]


def agent(world: World, kd: killick.Client, *messages: AIMessage, **options: Any) -> Any:
    model = Scripted(messages=iter([*messages, AIMessage("done")]))
    return create_agent(
        model, world.tools(), middleware=[KillickMiddleware(kd, **options)], checkpointer=KillickSaver(kd)
    )


# pause and resume -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["blocking", "awaited"])
def test_pay_beside_ask_pays_once_across_pause_and_resume(kd: killick.Client, how: str) -> None:
    message = calls(("pay", {"amount": 5}), ("ask", {"question": "sure?"}))

    def play(graph: Any) -> Any:
        async def awaited() -> Any:
            await graph.ainvoke({"messages": []}, THREAD)
            return await graph.ainvoke(Command(resume="yes"), THREAD)

        if how == "awaited":
            return asyncio.run(awaited())
        graph.invoke({"messages": []}, THREAD)
        return graph.invoke(Command(resume="yes"), THREAD)

    theirs, ours = World(), World()
    play(tool_graph(theirs, message, InMemorySaver()))
    out = play(tool_graph(ours, message, KillickSaver(kd), **gated(Gate(kd))))
    print(f"paid across pause and resume, {how}: {len(theirs.paid)} times alone, {len(ours.paid)} with Killick")
    assert (theirs.paid, ours.paid) == ([5, 5], [5])
    assert heard(out) == ["paid 5", "they said yes"]
    [run] = kd.list()
    assert (run.id, run.agent) == ("langgraph:1", "langgraph")


def test_going_back_in_time_does_nothing_twice(kd: killick.Client, world: World) -> None:
    graph = tool_graph(world, calls(("pay", {"amount": 5})), KillickSaver(kd), **gated(Gate(kd)))
    first = graph.invoke({"messages": []}, THREAD)
    before = next(state for state in graph.get_state_history(THREAD) if state.next == ("tools",))
    again = graph.invoke(None, before.config)
    assert heard(first) == heard(again) == ["paid 5"]
    assert world.paid == [5]


def test_the_same_call_id_in_another_message_is_another_call(kd: killick.Client, world: World) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), calls(("pay", {"amount": 5}), id="m2"))
    out = made.invoke({"messages": [HumanMessage("pay twice")]}, THREAD)
    assert world.paid == [5, 5]
    assert heard(out) == ["paid 5", "paid 5"]


def test_a_tool_that_is_not_there_is_told_to_the_model(kd: killick.Client, world: World) -> None:
    out = agent(world, kd, calls(("fly", {}))).invoke({"messages": [HumanMessage("fly")]}, THREAD)
    assert "fly is not a valid tool" in heard(out)[0]


def test_messages_with_artifacts_and_commands_come_back_as_they_were(kd: killick.Client) -> None:
    ran: list[str] = []

    @tool(response_format="content_and_artifact")
    def chart() -> tuple[str, Any]:
        """Draw."""
        ran.append("chart")
        return "a chart", {"points": (1, 2)}

    @tool
    def go(tool_call_id: str = "") -> Any:
        """Go on."""
        ran.append("go")
        return Command(update={"messages": [ToolMessage("went", tool_call_id="call_1", id="w")]})

    @tool
    def ask() -> str:
        """Ask."""
        return str(interrupt("?"))

    gate = Gate(kd)
    node = ToolNode([chart, go, ask], **gated(gate))
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [calls(("chart", {}), ("go", {}), ("ask", {}))]})
    builder.add_node("tools", node)
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    graph = builder.compile(checkpointer=KillickSaver(kd))
    graph.invoke({"messages": []}, THREAD)
    out = graph.invoke(Command(resume="yes"), THREAD)
    assert sorted(ran) == ["chart", "go"]
    found = {message.content: message for message in out["messages"] if isinstance(message, ToolMessage)}
    assert set(found) == {"a chart", "went", "yes"}
    assert found["a chart"].artifact == {"points": [1, 2]}  # as LangGraph's serializer has it


# failures -------------------------------------------------------------------------------------------


def test_a_tool_that_only_reads_fails_as_it_does_alone_and_is_tried_again_when_the_graph_is(
    kd: killick.Client, world: World
) -> None:
    made = agent(
        world, kd, calls(("look", {})), tools={"look": {"effect": "reads", "retry": killick.Retry(attempts=1)}}
    )
    world.broken = True
    for _ in range(2):
        with pytest.raises(ConnectionError, match="nothing to be seen"):
            made.invoke({"messages": [HumanMessage("look")]} if not world.looked else None, THREAD)
    world.broken = False
    assert heard(made.invoke(None, THREAD)) == ["saw it 3"]


def test_a_payment_whose_outcome_nobody_knows_is_asked_about_and_not_made_again(
    kd: killick.Client, world: World
) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})))
    world.broken = True
    for message in ({"messages": [HumanMessage("pay")]}, None, None):
        out = made.invoke(message, THREAD)
        [asked] = out["__interrupt__"]
        assert asked.value["action_requests"][0]["name"] == "pay"
        assert "its outcome is not known" in asked.value["action_requests"][0]["description"]
    assert world.paid == [5]
    out = made.invoke(Command(resume={"decisions": [{"type": "respond", "message": "paid, says the bank"}]}), THREAD)
    assert world.paid == [5]
    assert heard(out) == ["paid, says the bank"]


def test_an_error_can_be_the_tools_answer_to_the_model_and_a_lost_connection_cannot(
    kd: killick.Client, world: World
) -> None:
    @tool
    def book(room: int) -> str:
        """Book a room."""
        world.paid.append(room)
        raise ValueError(f"there is no room {room}")

    for _ in range(2):
        model = Scripted(messages=iter([calls(("book", {"room": 7})), AIMessage("done")]))
        gate = KillickMiddleware(kd, errors="answer")
        out = create_agent(model, [book], middleware=[gate], checkpointer=InMemorySaver()).invoke(
            {"messages": [HumanMessage("book", id="h1")]}, THREAD
        )
        [said] = [message for message in out["messages"] if isinstance(message, ToolMessage)]
        assert (said.status, said.content) == ("error", "ValueError: there is no room 7")
    assert world.paid == [7]
    world.broken = True
    made = agent(world, kd, calls(("pay", {"amount": 5}), id="m2"), errors="answer")
    [asked] = made.invoke({"messages": [HumanMessage("pay")]}, THREAD)["__interrupt__"]
    assert "its outcome is not known" in asked.value["action_requests"][0]["description"]


# people ---------------------------------------------------------------------------------------------

APPROVED = {"pay": {"approve": "ann"}}


@pytest.mark.parametrize(
    ("decision", "paid", "said"),
    [
        ({"type": "approve"}, [5], "paid 5"),
        ({"type": "edit", "edited_action": {"name": "pay", "args": {"amount": 3}}}, [3], "paid 3"),
        ({"type": "reject", "message": "too much"}, [], "ann said no: too much"),
        ({"type": "respond", "message": "I did it"}, [], "I did it"),
    ],
)
def test_an_approval_is_asked_for_in_the_graph_and_given_there(
    kd: killick.Client, world: World, decision: dict[str, Any], paid: list[int], said: str
) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), tools=APPROVED, by="ann")
    [asked] = made.invoke({"messages": [HumanMessage("pay")]}, THREAD)["__interrupt__"]
    assert asked.value["action_requests"][0]["args"] == {"amount": 5}
    assert asked.value["review_configs"] == [
        {"action_name": "pay", "allowed_decisions": ["approve", "edit", "reject", "respond"]}
    ]
    assert world.paid == []
    out = made.invoke(Command(resume={"decisions": [decision]}), THREAD)
    assert world.paid == paid
    assert said in heard(out)[0]
    assert out["messages"][-1].content == "done"


def test_an_approval_that_is_given_here_lets_the_graph_go_on(kd: killick.Client, world: World) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), tools=APPROVED)
    made.invoke({"messages": [HumanMessage("pay")]}, THREAD)
    [wait] = kd.inbox()
    kd.answer(wait, "approve", by="ann")
    assert heard(made.invoke(None, THREAD)) == ["paid 5"]


def test_two_calls_that_wait_are_each_asked_for(kd: killick.Client, world: World) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5}), ("pay", {"amount": 6})), tools=APPROVED, by="ann")
    asked = made.invoke({"messages": [HumanMessage("pay")]}, THREAD)["__interrupt__"]
    amounts = {each.value["action_requests"][0]["args"]["amount"]: each.id for each in asked}
    decisions = {5: {"type": "approve"}, 6: {"type": "reject"}}
    out = made.invoke(Command(resume={amounts[n]: {"decisions": [decisions[n]]} for n in amounts}), THREAD)
    assert world.paid == [5]
    assert [text[:10] for text in heard(out)] == ["paid 5", "pay was re"]


def invoked(graph: Any, given: Any, is_async: bool) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await graph.ainvoke(given, THREAD)

    return asyncio.run(bounded()) if is_async else graph.invoke(given, THREAD)


def questions(out: Any) -> list[tuple[str, dict[str, Any]]]:
    """The ids of a graph's interrupts, each with the arguments that it asks about."""
    return [(each.id, each.value["action_requests"][0]["args"]) for each in out.get("__interrupt__", ())]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("amounts", [(5, 500), (5, 5)])
def test_two_waiting_calls_of_one_task_are_two_questions_each_answered_by_its_id(
    kd: killick.Client, world: World, amounts: tuple[int, int], is_async: bool
) -> None:
    message = calls(*(("pay", {"amount": amount}) for amount in amounts))
    graph = tool_graph(world, message, KillickSaver(kd), **gated(Gate(kd, tools=APPROVED, by="ann")))
    first, second = questions(invoked(graph, {"messages": []}, is_async))
    assert [first[1]["amount"], second[1]["amount"]] == list(amounts)
    given = {first[0]: {"decisions": [{"type": "approve"}]}, second[0]: {"decisions": [{"type": "reject"}]}}
    out = invoked(graph, Command(resume=given), is_async)
    assert world.paid == [5]
    assert [text[:10] for text in heard(out)] == ["paid 5", "pay was re"]


@pytest.mark.parametrize("is_async", [False, True])
def test_of_two_questions_of_one_task_one_can_be_answered_before_the_other(
    kd: killick.Client, world: World, is_async: bool
) -> None:
    message = calls(("pay", {"amount": 5}), ("pay", {"amount": 6}))
    graph = tool_graph(world, message, KillickSaver(kd), **gated(Gate(kd, tools=APPROVED, by="ann")))
    _, second = questions(invoked(graph, {"messages": []}, is_async))
    [first] = questions(invoked(graph, Command(resume={second[0]: {"type": "approve"}}), is_async))
    assert (world.paid, first[1]) == ([6], {"amount": 5})
    # No other call of the task is open, so the answer needs no id.
    assert heard(invoked(graph, Command(resume={"type": "reject"}), is_async))[1] == "paid 6"
    assert world.paid == [6]


def test_a_call_that_needs_two_approvers_is_asked_about_again_after_the_first(kd: killick.Client, world: World) -> None:
    both = {"pay": {"approve": killick.Approval(["ann", "bob"], need=2)}}
    made = agent(world, kd, calls(("pay", {"amount": 5})), tools=both, by="ann")
    [(first, _)] = questions(made.invoke({"messages": [HumanMessage("pay")]}, THREAD))
    assert questions(made.invoke(Command(resume={first: {"decisions": [{"type": "approve"}]}}), THREAD))
    assert world.paid == []
    kd.answer(kd.inbox()[0], "approve", by="bob")
    assert heard(made.invoke(None, THREAD)) == ["paid 5"]


def test_an_answer_to_a_tools_own_interrupt_approves_no_other_call(kd: killick.Client, world: World) -> None:
    message = calls(("pay", {"amount": 5}), ("ask", {"question": "sure?"}))
    graph = tool_graph(world, message, KillickSaver(kd), **gated(Gate(kd, tools=APPROVED, by="ann")))
    graph.invoke({"messages": []}, THREAD)
    approve = {"decisions": [{"type": "approve"}]}
    for _ in range(2):
        out = graph.invoke(Command(resume=approve), THREAD)
        if questions(out):
            break
    assert world.paid == []
    [(asked, _)] = questions(out)
    out = graph.invoke(Command(resume={asked: approve}), THREAD)
    assert world.paid == [5]
    assert heard(out) == ["paid 5", f"they said {approve}"]


def test_an_approval_that_langgraph_delivers_again_does_not_repeat_a_call_in_doubt(
    kd: killick.Client, world: World
) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), tools=APPROVED, by="ann")
    approve = Command(resume={"decisions": [{"type": "approve"}]})
    made.invoke({"messages": [HumanMessage("pay")]}, THREAD)
    world.broken = True
    for given in (approve, None, approve):
        out = made.invoke(given, THREAD)
        assert "its outcome is not known" in out["__interrupt__"][0].value["action_requests"][0]["description"]
        assert world.paid == [5]
    [(asked, _)] = questions(out)
    world.broken = False
    out = made.invoke(Command(resume={asked: {"decisions": [{"type": "approve"}]}}), THREAD)
    assert world.paid == [5, 5]
    assert heard(out) == ["paid 5"]


def test_an_interrupt_inside_of_an_approved_tool_gets_its_own_answer(kd: killick.Client, world: World) -> None:
    graph = tool_graph(
        world, calls(("ask", {"question": "sure?"})), KillickSaver(kd),
        **gated(Gate(kd, tools={"ask": {"approve": "ann"}}, by="ann")),
    )  # fmt: skip
    assert questions(graph.invoke({"messages": []}, THREAD))
    out = graph.invoke(Command(resume={"decisions": [{"type": "approve"}]}), THREAD)
    assert [each.value for each in out["__interrupt__"]] == ["sure?"]
    assert heard(graph.invoke(Command(resume="yes"), THREAD)) == ["they said yes"]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_model_reads_what_an_approver_changed(kd: killick.Client, world: World, is_async: bool) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), tools=APPROVED, by="ann")
    invoked(made, {"messages": [HumanMessage("pay")]}, is_async)
    edit = {"type": "edit", "edited_action": {"name": "pay", "args": {"amount": 3}}}
    out = invoked(made, Command(resume={"decisions": [edit]}), is_async)
    assert heard(out) == ["paid 3\n(a person changed amount from 5 to 3 before it was called)"]


def test_one_call_in_a_plain_node_is_asked_for_in_the_graph(kd: killick.Client, world: World) -> None:
    gate = Gate(kd, tools=APPROVED, by="ann")
    graph = tool_graph(world, calls(("pay", {"amount": 5})), KillickSaver(kd), **gated(gate))
    assert graph.invoke({"messages": []}, THREAD)["__interrupt__"]
    assert heard(graph.invoke(Command(resume=[{"type": "approve"}]), THREAD)) == ["paid 5"]


def test_whoever_wants_no_interrupts_is_told_what_waits(kd: killick.Client, world: World) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), tools=APPROVED, approvals="raise")
    with pytest.raises(Waiting) as waiting:
        made.invoke({"messages": [HumanMessage("pay")]}, THREAD)
    kd.answer(waiting.value.waits[0], "approve", by="ann")
    assert heard(made.invoke(None, THREAD)) == ["paid 5"]
    assert world.paid == [5]


def test_a_contract_says_no_before_anything_is_done(kd: killick.Client, world: World) -> None:
    contract = killick.Contract("small sums", [rules.arguments("pay", amount={"max": 100})])
    made = agent(world, kd, calls(("pay", {"amount": 500})), contract=contract)
    out = made.invoke({"messages": [HumanMessage("pay")]}, THREAD)
    assert world.paid == []
    assert "at most 100 is allowed" in heard(out)[0]


def test_a_thread_that_another_process_is_at_stops_the_graph_and_not_the_model(
    kd: killick.Client, world: World
) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})))
    with killick.open(kd.runtime.store.place) as other:
        block = other.host("langgraph:1", agent="langgraph")
        copy_context().run(block.__enter__)  # elsewhere: here it would be the host to call
        with pytest.raises(Stopped, match="langgraph:1"):
            made.invoke({"messages": [HumanMessage("pay")]}, THREAD)
        copy_context().run(block.__exit__, None, None, None)
    assert heard(made.invoke(None, THREAD)) == ["paid 5"]


# hosts and nodes ------------------------------------------------------------------------------------


def test_without_a_client_a_host_is_needed_and_enough(kd: killick.Client, world: World) -> None:
    graph = tool_graph(world, calls(("pay", {"amount": 5})), KillickSaver(kd), **gated(Gate()))
    with pytest.raises(Stopped, match=r"kd\.host"):
        graph.invoke({"messages": []}, THREAD)
    with kd.host("conversation-1"):
        assert heard(graph.invoke(None, THREAD)) == ["paid 5"]
    assert [run.id for run in kd.list()] == ["conversation-1"]


def test_a_graph_inside_an_agent_is_played_again_from_the_record(kd: killick.Client, world: World) -> None:
    message = calls(("pay", {"amount": 5}))

    @killick.agent(name="outer")
    async def outer(run: killick.Run, given: None) -> list[str]:
        graph = tool_graph(world, message, None, **gated(Gate()))
        async with run.hosting():
            out = await graph.ainvoke({"messages": []})
        await run.ask("Go on?")
        return heard(out)

    with pytest.raises(killick.RunWaiting):
        kd.run(outer, None, id="outer-1")
    kd.answer("outer-1", "approve")
    with killick.open(kd.runtime.store.place) as other:
        assert other.run(outer, None, id="outer-1") == ["paid 5"]
    assert world.paid == [5]


def test_steps_of_nodes_are_not_taken_again_with_their_node(kd: killick.Client) -> None:
    gate, sent = Gate(kd), list[str]()

    @gate.step(effect="at_most_once")
    def send(to: str) -> str:
        sent.append(to)
        return f"{to} #{len(sent)}"

    @gate.step
    async def send_soon(to: str) -> str:
        return f"soon {to} {len(sent)}"

    def node(state: Any) -> Any:
        found = [send("ann"), send(to="bob"), send("ann")]
        found.append(str(interrupt("go on?")))
        return {"messages": [*found, send("ann")]}

    async def last(state: Any) -> Any:
        return {"messages": [await send_soon("eve")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_node("last", last)
    builder.add_edge(START, "node")
    builder.add_edge("node", "last")
    graph = builder.compile(checkpointer=KillickSaver(kd))

    async def play() -> Any:
        await graph.ainvoke({"messages": []}, THREAD)
        return await graph.ainvoke(Command(resume="yes"), THREAD)

    said = [message.content for message in asyncio.run(play())["messages"]]
    assert said == ["ann #1", "bob #2", "ann #3", "yes", "ann #4", "soon eve 4"]
    assert sent == ["ann", "bob", "ann", "ann"]
    with pytest.raises(DeclarationRefused, match="by its name"):
        gate.step(lambda *many: None)


def test_replies_on_record_are_not_asked_for_again(kd: killick.Client, world: World) -> None:
    used = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    reply = calls(("pay", {"amount": 5}), ("ask", {"question": "sure?"}))
    reply.usage_metadata = used  # type: ignore[assignment]
    made = agent(world, kd, reply, models=True)
    asked = [HumanMessage("pay")]
    made.invoke({"messages": asked}, THREAD, durability="exit")
    kd_saver = KillickSaver(kd)
    kd_saver.delete_thread("1")  # as if nothing had been saved
    again = agent(world, kd, models=True)
    made_again = again.invoke({"messages": [HumanMessage("pay")]}, THREAD)
    assert made_again["__interrupt__"]
    out = again.invoke(Command(resume="yes"), THREAD)
    assert out["messages"][-1].content == "done"
    assert out["messages"][1].usage_metadata == used
    assert heard(out) == ["paid 5", "they said yes"]
    assert world.paid == [5]


def test_another_question_is_asked_though_it_is_in_the_same_place(kd: killick.Client, world: World) -> None:
    first = agent(world, kd, models=True).invoke({"messages": [HumanMessage("one")]}, THREAD)
    KillickSaver(kd).delete_thread("1")
    other = agent(world, kd, AIMessage("something else"), models=True)

    async def play() -> Any:
        return await other.ainvoke({"messages": [HumanMessage("two")]}, THREAD)

    second = asyncio.run(play())
    assert [out["messages"][-1].content for out in (first, second)] == ["done", "something else"]


@pytest.mark.parametrize("page", ["langgraph", "start-langgraph"])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    try_page(page, tmp_path)


def test_the_example_pays_once_it_was_agreed_to(tmp_path: Path) -> None:
    said = try_example("langgraph_agent", tmp_path)
    assert said.splitlines()[1:] == ["paying 45 for A7", "A7 is paid for."]
    assert said.startswith("pay(order='A7', amount=45)")


class Ship(BaseModel):
    """What an agent answers with."""

    name: str


def test_a_recorded_reply_keeps_the_type_of_a_structured_answer(kd: killick.Client) -> None:
    def made(*messages: AIMessage) -> Any:
        middleware = [KillickMiddleware(kd, models=True)]
        return create_agent(
            Scripted(messages=iter(messages)), [], middleware=middleware, response_format=ToolStrategy(Ship)
        )

    said = {"messages": [HumanMessage("which one?", id="h")]}
    for messages in ((calls(("Ship", {"name": "Ada"})),), ()):  # called, and then taken from the record
        assert made(*messages).invoke(said, THREAD)["structured_response"] == Ship(name="Ada")


# agents inside of agents ----------------------------------------------------------------------------


def boss(world: World, kd: killick.Client, saver: Any, *, is_async: bool = False, **options: Any) -> Any:
    """An agent with a tool that runs another agent, whose payments must be agreed to."""
    tools = {"pay": {"approve": "managers"}}

    def clerk() -> Any:
        model = Scripted(messages=iter([calls(("pay", {"amount": 5}), id="inner"), AIMessage("it is paid")]))
        return create_agent(model, world.tools(), middleware=[KillickMiddleware(kd, tools=tools, **options)])

    said = {"messages": [HumanMessage("pay 5", id="h2")]}

    @tool
    def delegate(task: str) -> str:
        """Have another do it."""
        world.looked += 1
        return str(clerk().invoke(said)["messages"][-1].content)

    @tool
    async def adelegate(task: str) -> str:
        """Have another do it."""
        world.looked += 1
        return str((await clerk().ainvoke(said))["messages"][-1].content)

    used = adelegate if is_async else delegate
    model = Scripted(messages=iter([calls((used.name, {"task": "pay"}), id="outer"), AIMessage("done")]))
    return create_agent(model, [used], middleware=[KillickMiddleware(kd, **options)], checkpointer=saver)


@needs("langgraph", 1, 2, 20)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_inside_of_an_agent_in_a_tool_interrupts_the_graph_and_is_answered_there(
    kd: killick.Client, world: World, is_async: bool
) -> None:
    saver = KillickSaver(kd)

    def invoke(given: Any) -> Any:
        async def bounded() -> Any:
            graph = boss(world, kd, saver, is_async=is_async)
            async with asyncio.timeout(60):
                if is_async:
                    return await graph.ainvoke(given, THREAD)
                return await asyncio.to_thread(graph.invoke, given, THREAD)

        return asyncio.run(bounded())

    out = invoke({"messages": [HumanMessage("go", id="h1")]})
    [asked] = out["__interrupt__"]
    assert asked.value["action_requests"][0]["name"] == "pay"
    out = invoke(Command(resume={"decisions": [{"type": "approve"}]}))
    assert heard(out) == ["it is paid"]
    assert world.paid == [5]
    assert world.looked == 2
    assert kd.inbox() == []


def test_an_error_inside_of_an_agent_in_a_tool_is_asked_about_and_does_not_hang(
    kd: killick.Client, world: World
) -> None:
    world.broken = True
    saver = KillickSaver(kd)

    def invoke(given: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(60):
                graph = boss(world, kd, saver, approvals="raise")
                return await asyncio.to_thread(graph.invoke, given, THREAD)

        return asyncio.run(bounded())

    with pytest.raises(Waiting, match="pay"):
        invoke({"messages": [HumanMessage("go", id="h1")]})
    kd.answer("langgraph:1", "approve", by="ann")
    with pytest.raises(Waiting, match=r"delegate.*left while"):
        invoke(None)
    assert world.paid == []
    kd.answer(next(wait for wait in kd.inbox() if wait.waits_for == "settlement"), "not", by="ann")
    with pytest.raises(Waiting, match=r"pay.*Did it happen"):
        invoke(None)
    assert world.paid == [5]


# conversations that go on ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_conversation_that_goes_on_retires_its_questions_and_their_approval_says_so(
    kd: killick.Client, world: World, is_async: bool
) -> None:
    made = agent(world, kd, calls(("pay", {"amount": 5})), AIMessage("never mind"), tools=APPROVED)

    def invoke(said: str) -> Any:
        given = {"messages": [HumanMessage(said)]}
        return asyncio.run(made.ainvoke(given, THREAD)) if is_async else made.invoke(given, THREAD)

    assert "__interrupt__" in invoke("pay 5")
    [asked] = kd.inbox()
    before = made.get_state(THREAD)
    assert invoke("no, wait")["messages"][-1].content == "never mind"
    assert kd.inbox() == []
    for wait in (asked, asked.id):
        with pytest.raises(AnswerRefused, match="the conversation continued without it"):
            kd.answer(wait, "approve", by="ann")
    assert world.paid == []
    # Back in time, the same call is asked about again.
    [again] = made.invoke(None, before.config)["__interrupt__"]
    assert again.value["action_requests"][0]["name"] == "pay"
    kd.answer(kd.inbox()[0], "approve", by="ann")
    assert heard(made.invoke(None, before.config)) == ["paid 5"]


def test_calls_of_the_same_message_stay_open_while_others_of_it_are_made(kd: killick.Client, world: World) -> None:
    made = agent(
        world, kd, calls(("pay", {"amount": 5}), ("look", {})), tools={**APPROVED, "look": {"effect": "reads"}}
    )
    assert "__interrupt__" in made.invoke({"messages": [HumanMessage("pay and look")]}, THREAD)
    [asked] = kd.inbox()
    kd.answer(asked, "approve", by="ann")
    assert made.invoke(None, THREAD)["messages"][-1].content == "done"
    assert world.paid == [5]


@pytest.mark.parametrize("is_async", [False, True])
def test_in_a_plain_graph_the_next_tool_call_retires_what_was_left(
    kd: killick.Client, world: World, is_async: bool
) -> None:
    wanted = iter([calls(("pay", {"amount": 5}), id="m1"), calls(("look", {}), id="m2")])
    gate = Gate(kd, tools={**APPROVED, "look": {"effect": "reads"}})
    builder = StateGraph(MessagesState)
    builder.add_node("model", lambda state: {"messages": [next(wanted)]})
    builder.add_node("tools", ToolNode(world.tools(), **gated(gate)))
    builder.add_edge(START, "model")
    builder.add_edge("model", "tools")
    graph = builder.compile(checkpointer=KillickSaver(kd))
    for said in ("pay 5", "no, look"):
        given = {"messages": [HumanMessage(said)]}
        out = asyncio.run(graph.ainvoke(given, THREAD)) if is_async else graph.invoke(given, THREAD)
    assert heard(out) == ["saw it 1"]
    assert kd.inbox() == []
