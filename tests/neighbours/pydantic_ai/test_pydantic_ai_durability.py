"""Agents of Pydantic AI in a host of Killick: what they do is on record, by key, and is not done again."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic_ai import Agent, ApprovalRequired, DeferredToolRequests, ModelRetry, RunContext
from pydantic_ai.exceptions import ModelHTTPError, UserError
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.toolsets import DynamicToolset, FunctionToolset, WrapperToolset

import killick
from killick.adapters.pydantic_ai import GatedToolset, KillickDurability
from killick.errors import DeclarationRefused, StepFailed
from killick.model import events as e

Say = str | list[ToolCallPart]


class Script:
    """A model that says its lines in order, by how often the conversation has heard it; and counts how often it was
    asked."""

    def __init__(self, *lines: Say | Callable[[list[ModelMessage]], Say]) -> None:
        self.lines = lines
        self.asked = 0
        self.heard: list[Any] = []

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.asked += 1
        last = messages[-1].parts[-1]
        self.heard.append(last.content if isinstance(last, ToolReturnPart) else getattr(last, "content", None))
        line = self.lines[sum(isinstance(each, ModelResponse) for each in messages)]
        said = line(messages) if callable(line) else line
        return ModelResponse(parts=[TextPart(said)] if isinstance(said, str) else said)

    @property
    def model(self) -> FunctionModel:
        return FunctionModel(self, model_name="scripted")


def pay(to: str = "ann", amount: int = 5, id: str = "call_pay") -> ToolCallPart:  # noqa: A002
    return ToolCallPart("pay", {"to": to, "amount": amount}, tool_call_id=id)


class Desk:
    """A paying agent, and what it did."""

    def __init__(self, script: Script, *, capability: KillickDurability[Any] | None = None, **tool: Any) -> None:
        self.done: list[str] = []
        self.script = script
        self.agent: Agent[None, Any] = Agent(
            script.model,
            name="desk",
            output_type=[str, DeferredToolRequests],
            capabilities=[capability or KillickDurability(tools={"look_up": {"effect": "reads"}})],
        )

        @self.agent.tool_plain(**tool)
        def pay(to: str, amount: int) -> str:
            """Pay somebody."""
            self.done.append(f"paid {amount} to {to}")
            return f"paid {amount}"

        @self.agent.tool_plain
        def look_up(name: str) -> dict[str, str]:
            self.done.append(f"looked up {name}")
            return {"mail": f"{name}@harbour"}


def kept(desk: Desk, name: str = "paying", **options: Any) -> Any:
    """An agent that goes on only when somebody says so: another process then has to replay it."""

    @killick.agent(name=name, **options)
    async def paying(run: killick.Run, wish: str) -> str:
        async with run.hosting():
            result = await desk.agent.run(wish)
        answer = await run.ask("Done?")
        return f"{result.output} {answer.approved}"

    return paying


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def waits(kd: killick.Client, agent: Any, wish: str = "Pay ann.") -> killick.Wait:
    with pytest.raises(killick.RunWaiting) as waiting:
        kd.run(agent, wish, id="r")
    (wait,) = waiting.value.waits
    return wait


def steps(kd: killick.Client) -> list[tuple[str, str]]:
    return [(each.step, each.name) for each in kd.state("r").trace]


# what is on record --------------------------------------------------------------------------------


def test_requests_and_calls_are_steps_and_a_replay_asks_and_does_nothing_again(
    kd: killick.Client, tmp_path: Path
) -> None:
    script = Script([ToolCallPart("look_up", {"name": "ann"}), pay()], "Paid.")
    desk = Desk(script)
    waits(kd, kept(desk))
    assert steps(kd)[:4] == [("1.1.1", "scripted"), ("1.2.1", "look_up"), ("1.3.1", "pay"), ("1.4.1", "scripted")]
    assert script.asked == 2
    assert [each.output for each in kd.state("r").trace[1:3]] == [{"mail": "ann@harbour"}, "paid 5"]
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(kept(desk), "Pay ann.", id="r") == "Paid. True"
        told = [type(each.event) for each in other.runtime.log.read("r")]
    assert script.asked == 2
    assert sorted(desk.done) == ["looked up ann", "paid 5 to ann"]
    assert e.StepDrifted not in told


def test_a_request_is_on_record_with_what_was_sent_and_what_it_used(kd: killick.Client) -> None:
    waits(kd, kept(Desk(Script("Hello."))), "Hi.")
    (request,) = kd.state("r").trace
    assert request.input["messages"] == [
        {"parts": [{"content": "Hi.", "part_kind": "user-prompt"}], "kind": "request", "state": "complete"}
    ]
    assert [each["name"] for each in request.input["parameters"]["function_tools"]] == ["pay", "look_up"]
    assert request.output["parts"][0]["content"] == "Hello."
    (usage,) = [each.event.usage for each in kd.runtime.log.read("r") if isinstance(each.event, e.AttemptEnded)]
    assert usage is not None
    assert (usage.tokens_in, usage.tokens_out) == (52, 2)


def test_what_nobody_named_is_done_at_most_once_and_left_to_a_person_when_it_breaks(kd: killick.Client) -> None:
    desk = Desk(Script([ToolCallPart("break_", {})], "Well."))

    @desk.agent.tool_plain
    def break_() -> str:
        desk.done.append("broke")
        raise OSError("the line is dead")

    assert waits(kd, kept(desk)).verbs == ("happened", "not", "stop")
    kd.answer("r", "happened", value="fine", by="eve")
    with pytest.raises(killick.RunWaiting, match=r"Done\?"):
        kd.run(kept(desk), "Pay ann.", id="r")
    assert desk.done == ["broke"]
    assert desk.script.heard[-1] == "fine"


def test_an_error_can_be_the_tools_answer_to_the_model(kd: killick.Client) -> None:
    desk = Desk(Script([ToolCallPart("break_", {})], "Well."), capability=KillickDurability(errors="answer"))

    @desk.agent.tool_plain
    def break_() -> str:
        desk.done.append("broke")
        raise ValueError("no such account")

    for _ in range(2):
        assert waits(kd, kept(desk)).prompt == "Done?"
    assert desk.done == ["broke"]
    assert "ValueError: no such account" in str(desk.script.heard)


def test_a_tool_that_only_reads_fails_for_the_agent_as_any_step_does(kd: killick.Client) -> None:
    desk = Desk(Script([ToolCallPart("break_", {})], "Well."))

    @desk.agent.tool_plain(metadata={"killick": {"effect": "reads"}})
    def break_() -> str:
        raise LookupError("no such page")

    @killick.agent
    async def reading(run: killick.Run) -> str:
        try:
            async with run.hosting():
                await desk.agent.run("Look.")
        except StepFailed as failed:
            return str(failed.failure)
        return "read"

    assert "no such page" in kd.run(reading, id="r")


def test_what_a_tool_tells_the_model_to_do_better_is_on_record(kd: killick.Client) -> None:
    desk = Desk(Script([pay(amount=500)], [pay(amount=5, id="call_2")], "Paid 5."))
    calls: list[int] = []

    async def careful(to: str, amount: int) -> str:
        calls.append(amount)
        if amount > 50:
            raise ModelRetry("at most 50")
        return "paid"

    desk.agent = Agent(desk.script.model, name="desk", output_type=str, capabilities=[KillickDurability()], retries=2)
    desk.agent.tool_plain(name="pay")(careful)
    waits(kd, kept(desk))
    assert calls == [500, 5]
    assert "at most 50" in str(desk.script.heard[1])
    kd.answer("r", "approve", by="eve")
    assert kd.run(kept(desk), "Pay ann.", id="r") == "Paid 5. True"
    assert calls == [500, 5]


def test_a_model_that_fails_raises_the_same_now_and_from_the_record(kd: killick.Client, tmp_path: Path) -> None:
    def refuses(messages: list[ModelMessage]) -> Say:
        raise ModelHTTPError(418, "scripted", {"error": "short and stout"})

    desk = Desk(Script(refuses))
    seen: list[str] = []

    @killick.agent
    async def trying(run: killick.Run) -> str:
        async with run.hosting():
            try:
                await desk.agent.run("Tea?")
            except ModelHTTPError as error:
                seen.append(f"{error.status_code}")
        await run.ask("Go on?")
        return "over"

    with pytest.raises(killick.RunWaiting):
        kd.run(trying, id="r")
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(trying, id="r") == "over"
    assert seen == ["418", "418"]
    assert desk.script.asked == 1


# rules and people ---------------------------------------------------------------------------------


def test_a_contract_says_no_and_the_model_hears_why(kd: killick.Client) -> None:
    desk = Desk(Script([pay(amount=500)], lambda _: "I could not."))
    contract = killick.Contract("house", [killick.rules.arguments("pay", amount={"max": 50}, name="small")])
    waits(kd, kept(desk, contract=contract))
    assert desk.done == []
    assert "small" in desk.script.heard[-1]


@pytest.mark.parametrize(
    ("verb", "value", "done", "heard"),
    [
        ("approve", None, ["paid 5 to ann"], "paid 5"),
        ("edit", {"to": "ann", "amount": 2}, ["paid 2 to ann"], "paid 2"),
        ("reject", None, [], "rejected"),
    ],
)
def test_an_approval_that_pydantic_ai_wants_is_a_wait_about_this_very_call(
    kd: killick.Client, tmp_path: Path, verb: Any, value: Any, done: list[str], heard: str
) -> None:
    desk = Desk(Script([pay()], "Over."), capability=KillickDurability(approvers="treasurer"), requires_approval=True)
    asked = waits(kd, kept(desk))
    assert (asked.to, asked.verbs) == (("treasurer",), ("approve", "reject", "edit", "respond"))
    assert desk.done == []
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        other.answer("r", verb, value=value, by="treasurer")
        with pytest.raises(killick.RunWaiting, match=r"Done\?"):
            other.run(kept(desk), "Pay ann.", id="r")
    assert desk.done == done
    assert heard in desk.script.heard[-1]
    assert desk.script.asked == 2


def test_a_tool_that_asks_for_approval_itself_is_called_again_once_somebody_agreed(kd: killick.Client) -> None:
    desk = Desk(Script([ToolCallPart("wire", {"amount": 5}, tool_call_id="w")], "Over."))

    @desk.agent.tool
    def wire(ctx: RunContext[None], amount: int) -> str:
        if not ctx.tool_call_approved:
            raise ApprovalRequired
        desk.done.append(f"wired {amount}")
        return "wired"

    assert waits(kd, kept(desk)).verbs == ("approve", "reject", "edit", "respond")
    kd.answer("r", "approve", by="eve")
    with pytest.raises(killick.RunWaiting, match=r"Done\?"):
        kd.run(kept(desk), "Pay ann.", id="r")
    assert desk.done == ["wired 5"]


def test_without_approvers_the_agent_ends_with_what_is_deferred(kd: killick.Client) -> None:
    desk = Desk(Script([pay()], "Over."), capability=KillickDurability(approvers=None), requires_approval=True)
    seen: list[str] = []

    @killick.agent
    async def deferring(run: killick.Run) -> str:
        async with run.hosting():
            first = await desk.agent.run("Pay ann.")
            requests = first.output
            assert isinstance(requests, DeferredToolRequests)
            seen.append(requests.approvals[0].tool_name)
            results = requests.build_results(approve_all=True)
            second = await desk.agent.run(message_history=first.all_messages(), deferred_tool_results=results)
        return str(second.output)

    assert kd.run(deferring, id="r") == "Over."
    assert seen == ["pay"]
    assert desk.done == ["paid 5 to ann"]


def test_a_call_that_waits_for_people_leaves_alone_what_was_done_beside_it(kd: killick.Client, tmp_path: Path) -> None:
    beside = [ToolCallPart("look_up", {"name": "ann"}), pay(), pay(to="bob", id="call_2")]
    capability: KillickDurability[Any] = KillickDurability(tools={"pay": {"approve": approve_ann}})
    desk = Desk(Script(beside, "Over."), capability=capability)
    waits(kd, kept(desk))
    assert sorted(desk.done) == ["looked up ann", "paid 5 to bob"]
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other, pytest.raises(killick.RunWaiting, match=r"Done\?"):
        other.run(kept(desk), "Pay ann.", id="r")
    assert sorted(desk.done) == ["looked up ann", "paid 5 to ann", "paid 5 to bob"]


def approve_ann(**arguments: Any) -> str | None:
    return "treasurer" if arguments["to"] == "ann" else None


# the ways an agent is run --------------------------------------------------------------------------


def test_several_turns_and_runs_in_one_block_are_told_apart_though_ids_repeat(
    kd: killick.Client, tmp_path: Path
) -> None:
    script = Script([pay()], "First.", [pay(to="bob")], "Second.")
    desk = Desk(script)

    @killick.agent
    async def talking(run: killick.Run) -> list[str]:
        async with run.hosting():
            first = await desk.agent.run("Pay ann.")
            second = await desk.agent.run("And bob.", message_history=first.all_messages())
        await run.ask("Done?")
        return [first.output, second.output]

    with pytest.raises(killick.RunWaiting):
        kd.run(talking, id="r")
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(talking, id="r") == ["First.", "Second."]
    assert desk.done == ["paid 5 to ann", "paid 5 to bob"]
    assert script.asked == 4


def test_a_plain_def_agent_uses_run_sync(kd: killick.Client) -> None:
    desk = Desk(Script([pay()], "Paid."))

    @killick.agent
    def paying(run: killick.SyncRun) -> str:
        with run.hosting():
            told: str = desk.agent.run_sync("Pay ann.").output
        asyncio.get_event_loop().close()  # which Pydantic AI made for this thread, and leaves open
        return told

    assert kd.run(paying, id="r") == "Paid."
    assert [name for _, name in steps(kd)] == ["scripted", "pay", "scripted"]


def test_streams_and_events_reach_their_handler_once(kd: killick.Client, tmp_path: Path) -> None:
    events: list[str] = []

    async def handler(ctx: RunContext[None], stream: AsyncIterable[Any]) -> None:
        events.extend([event.event_kind async for event in stream])

    async def speak(messages: list[ModelMessage], info: AgentInfo) -> Any:
        if len(messages) == 1:
            yield {0: DeltaToolCall(name="note", json_args='{"text": "x"}', tool_call_id="n")}
        else:
            yield "All "
            yield "done."

    agent = Agent(
        FunctionModel(stream_function=speak, model_name="streamed"),
        name="streams",
        capabilities=[KillickDurability(event_stream_handler=handler)],
    )

    @agent.tool_plain
    def note(text: str) -> str:
        return text

    @killick.agent
    async def streaming(run: killick.Run) -> str:
        async with run.hosting():
            result = await agent.run("Go.")
        await run.ask("Done?")
        return result.output

    with pytest.raises(killick.RunWaiting):
        kd.run(streaming, id="r")
    before = list(events)
    assert "function_tool_call" in before
    assert before.count("part_delta") >= 1
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(streaming, id="r") == "All done."
    assert events == before


def test_an_agent_that_a_tool_runs_has_steps_of_its_own_where_the_tool_has_none(kd: killick.Client) -> None:
    expert = Desk(Script([pay(to="cyd")], "Expertly paid."))
    desk = Desk(
        Script([ToolCallPart("delegate", {})], "Delegated."), capability=KillickDurability(tools={"delegate": False})
    )

    @desk.agent.tool_plain
    async def delegate() -> str:
        told: str = (await expert.agent.run("Pay cyd.")).output
        return told

    waits(kd, kept(desk))
    assert [name for _, name in steps(kd)] == ["scripted", "scripted", "pay", "scripted", "scripted"]
    assert expert.done == ["paid 5 to cyd"]


def test_tools_that_are_added_for_one_run_would_pass_by_the_gate_and_are_refused(kd: killick.Client) -> None:
    desk = Desk(Script("Hello."))

    @killick.agent
    async def adding(run: killick.Run) -> str:
        async with run.hosting():
            try:
                await desk.agent.run("Hi.", toolsets=[FunctionToolset([lambda: "x"], id="late")])
            except UserError as error:
                return str(error)
        return "ran"

    assert "Killick" in kd.run(adding, id="r")


def test_without_a_host_nothing_changes() -> None:
    desk = Desk(Script([pay()], "Paid."))
    assert asyncio.run(desk.agent.run("Pay ann.")).output == "Paid."
    assert desk.done == ["paid 5 to ann"]


def test_tools_that_are_made_for_each_run_go_through_the_gate(kd: killick.Client, tmp_path: Path) -> None:
    script, done = Script([ToolCallPart("greet", {"name": "ann"})], "Over."), list[str]()

    def greet(name: str) -> str:
        done.append(name)
        return f"hello {name}"

    agent = Agent(
        script.model,
        name="dynamic",
        toolsets=[DynamicToolset(lambda ctx: FunctionToolset([greet]), id="made")],
        capabilities=[KillickDurability()],
    )

    @killick.agent
    async def greeting(run: killick.Run) -> str:
        async with run.hosting():
            result = await agent.run("Greet ann.")
        await run.ask("Done?")
        return result.output

    with pytest.raises(killick.RunWaiting):
        kd.run(greeting, id="r")
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(greeting, id="r") == "Over."
    assert done == ["ann"]
    assert script.heard[-1] == "hello ann"


class Own(WrapperToolset[None]):
    """A toolset of a class that nobody knows."""

    @property
    def id(self) -> str:
        return "own"

    def visit_and_replace(self, visitor: Any) -> Any:
        return visitor(self)


def test_a_toolset_of_a_class_of_ones_own_goes_through_the_gate_where_there_is_a_host(kd: killick.Client) -> None:
    script, done = Script([pay()], "Paid."), list[str]()
    functions: FunctionToolset[None] = FunctionToolset(id="bank")
    functions.add_function(lambda to, amount: done.append(to), name="pay")
    agent = Agent(script.model, name="own", toolsets=[Own(functions)], capabilities=[KillickDurability()])

    @killick.agent
    async def paying(run: killick.Run) -> str:
        async with run.hosting():
            return (await agent.run("Pay ann.")).output

    assert kd.run(paying, id="r") == "Paid."
    assert [name for _, name in steps(kd)] == ["scripted", "pay", "scripted"]
    assert asyncio.run(agent.run("Pay ann.")).output == "Paid."
    assert done == ["ann", "ann"]


# outside of an agent -------------------------------------------------------------------------------


def test_outside_of_an_agent_the_same_turn_again_is_on_record_and_the_next_is_asked(
    kd: killick.Client, tmp_path: Path
) -> None:
    script = Script([pay()], "First.", [pay(to="bob", id="call_2")], "Second.")
    desk = Desk(script)

    async def turns(client: killick.Client, *wishes: str) -> list[str]:
        history: list[ModelMessage] = []
        said = []
        async with client.host("thread-1", agent="desk"):
            for wish in wishes:
                result = await desk.agent.run(wish, message_history=history)
                history = result.all_messages()
                said.append(result.output)
        return said

    assert asyncio.run(turns(kd, "Pay ann.")) == ["First."]
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert asyncio.run(turns(other, "Pay ann.", "And bob.")) == ["First.", "Second."]
    assert desk.done == ["paid 5 to ann", "paid 5 to bob"]
    assert script.asked == 4


class Completions(BaseHTTPRequestHandler):
    """Answers every request as a model does, and keeps the connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hello."}}
        reply = {"id": "r", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing."""


class Completing(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client whose loop was closed resets its connection."""


def greeted(kd: killick.Client, port: int) -> list[str]:
    """What an agent says on one loop after the other."""
    provider = OpenAIProvider(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    agent = Agent(OpenAIChatModel("m", provider=provider), name="desk", capabilities=[KillickDurability()])

    async def turn(thread: str) -> str:
        async with kd.host(thread):
            return (await agent.run("Hi.")).output

    return [asyncio.run(turn(f"t{n}")) for n in range(3)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_agent_runs_on_one_loop_after_the_other(tmp_path: Path) -> None:
    with Completing(("127.0.0.1", 0), Completions) as server, killick.open(tmp_path / "killick.db") as kd:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert greeted(kd, server.server_port) == ["Hello."] * 3
        server.shutdown()
    gc.collect()  # connections of loops that were closed cannot be closed in another way


def test_a_gated_toolset_alone_calls_each_tool_once_and_leaves_models_as_they_are(kd: killick.Client) -> None:
    script, done = Script([pay()], "Paid."), list[str]()

    def pay_(to: str, amount: int) -> str:
        done.append(to)
        return "paid"

    tools: FunctionToolset[None] = FunctionToolset(id="bank")
    tools.add_function(pay_, name="pay")
    agent = Agent(script.model, toolsets=[GatedToolset(tools, tools={"pay": {"effect": "idempotent"}})])
    with pytest.raises(DeclarationRefused, match="no host is active here"):
        asyncio.run(agent.run("Pay ann."))

    async def ask() -> str:
        async with kd.host("thread-1"):
            return (await agent.run("Pay ann.")).output

    assert [asyncio.run(ask()), asyncio.run(ask())] == ["Paid.", "Paid."]
    assert done == ["ann"]
    assert script.asked == 5
    (intended,) = [each.event for each in kd.runtime.log.read("thread-1") if getattr(each.event, "name", "") == "pay"]
    assert intended.effect == "idempotent"


def test_a_gated_tool_that_asks_for_approval_is_done_once_somebody_agreed(kd: killick.Client) -> None:
    script, done = Script([ToolCallPart("wire", {}, tool_call_id="w")], "Wired."), list[str]()

    def wire(ctx: RunContext[None]) -> str:
        if not ctx.tool_call_approved:
            raise ApprovalRequired
        done.append("wired")
        return "done"

    tools = GatedToolset(FunctionToolset([wire], id="bank"))
    agent = Agent(script.model, toolsets=[tools], output_type=[str, DeferredToolRequests])

    async def ask(times: int) -> Any:
        async with kd.host("thread-1"):
            first = await agent.run("Wire it.")
            assert isinstance(first.output, DeferredToolRequests)
            results = first.output.build_results(approve_all=True)
            for _ in range(times):
                last = await agent.run(message_history=first.all_messages(), deferred_tool_results=results)
            return last.output

    assert asyncio.run(ask(2)) == "Wired."
    assert done == ["wired"]


# a server's tools -----------------------------------------------------------------------------------


def test_tools_of_an_mcp_server_do_what_it_says_of_them(kd: killick.Client, tmp_path: Path) -> None:
    from mcp.server.mcpserver import MCPServer
    from mcp.types import ToolAnnotations
    from pydantic_ai.mcp import MCPToolset

    done: list[str] = []
    server = MCPServer("harbour")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def berths() -> list[int]:
        done.append("looked")
        return [4, 7]

    @server.tool()
    def reserve(berth: int) -> str:
        done.append(f"reserved {berth}")
        return f"berth {berth} is yours"

    script = Script([ToolCallPart("berths", {})], [ToolCallPart("reserve", {"berth": 7})], "Berth 7.")
    agent = Agent(
        script.model, name="docking", toolsets=[MCPToolset(server, id="harbour")], capabilities=[KillickDurability()]
    )

    @killick.agent
    async def docking(run: killick.Run) -> str:
        async with run.hosting():
            result = await agent.run("A berth.")
        await run.ask("Done?")
        return result.output

    with pytest.raises(killick.RunWaiting):
        kd.run(docking, id="r")
    kd.answer("r", "approve", by="eve")
    kd.close()
    with killick.open(tmp_path / "killick.db") as other:
        assert other.run(docking, id="r") == "Berth 7."
        effects = {
            each.event.name: each.event.effect
            for each in other.runtime.log.read("r")
            if isinstance(each.event, e.StepIntended)
        }
    assert done == ["looked", "reserved 7"]
    assert (effects["berths"], effects["reserve"]) == ("reads", "at_most_once")
