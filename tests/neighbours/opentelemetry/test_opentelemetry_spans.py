"""Spans and metrics of runs, through the real SDK and its exporters in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

import killick
from killick.adapters.opentelemetry import instrument
from killick.engine import observers


class Seen:
    """What was exported."""

    def __init__(self, **options: Any) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = instrument(
            tracer_provider=self.tracers, meter_provider=MeterProvider(metric_readers=[self.reader]), **options
        )

    def names(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]

    def all(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.all(name)
        return span

    def metric(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def seen() -> Iterator[Seen]:
    made = Seen()
    yield made
    made.telemetry.stop()


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


tries: list[str] = []


@killick.tool(effect="reads", retry=killick.Retry(attempts=3, first=0.001, on=(ConnectionRefusedError,)))
async def look(name: str) -> str:
    tries.append(name)
    if name == "flaky" and len(tries) < 3:
        raise ConnectionRefusedError("the far side said no to somebody")
    with trace.get_tracer("tool").start_as_current_span("inside"):
        return f"{name} is there"


@killick.tool(effect="idempotent")
def write(text: str) -> str:
    return f"{text} by {threading.current_thread().name[:0]}a thread"


@killick.tool(approve="managers")
async def pay(amount: int) -> str:
    return f"paid {amount}"


async def answers(*, model: str, messages: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """A scripted model, in the form of a provider."""
    return {
        "id": "msg_1", "type": "message", "role": "assistant", "model": f"{model}-0613", "stop_reason": "end_turn",
        "content": [{"type": "text", "text": "Good morning."}],
        "usage": {"input_tokens": 12, "output_tokens": 3, "cache_read_input_tokens": 4},
    }  # fmt: skip


@killick.agent
async def morning(run: killick.Run, name: str) -> str:
    reply = await run.model(answers, model="m", messages=[{"role": "user", "content": "greet ann"}], max_tokens=9)
    found = await run.call(look, name)
    await run.call(write, found)
    return str(reply["content"][0]["text"])


@pytest.fixture(autouse=True)
def _no_tries() -> None:
    tries.clear()


# spans ---------------------------------------------------------------------------------------------


def test_a_run_is_one_trace_of_invoke_agent_chat_and_execute_tool(seen: Seen, kd: killick.Client) -> None:
    kd.run(morning, "ann", id="r1")

    assert seen.names() == ["chat m", "execute_tool look", "execute_tool write", "invoke_agent morning"]
    agent, chat, look_ = seen.one("invoke_agent morning"), seen.one("chat m"), seen.one("execute_tool look")
    assert agent.parent is None
    assert agent.context is not None
    for span in (chat, look_, seen.one("execute_tool write")):
        assert span.parent is not None
        assert span.parent.span_id == agent.context.span_id
    assert told(agent) | {"killick.run.epoch": 1} == told(agent)
    assert told(agent)["gen_ai.conversation.id"] == "r1"
    assert told(agent)["killick.run.status"] == "completed"
    assert (chat.kind, look_.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)
    assert {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.model": "m-0613",
        "gen_ai.request.max_tokens": 9, "gen_ai.usage.input_tokens": 16, "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 4, "gen_ai.response.finish_reasons": ("end_turn",),
        "gen_ai.response.id": "msg_1", "killick.step.id": "1", "killick.attempt.number": 1,
    }.items() <= told(chat).items()  # fmt: skip
    assert {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "look", "gen_ai.tool.type": "function",
        "killick.effect": "reads", "killick.attempt.outcome": "returned", "killick.step.id": "2",
    }.items() <= told(look_).items()  # fmt: skip


def test_nothing_of_what_was_said_is_shown_unless_it_is_asked_for(seen: Seen, kd: killick.Client) -> None:
    kd.run(morning, "ann", id="r1")
    shown = str([(told(span), span.status.description) for span in seen.exporter.get_finished_spans()])
    assert "ann" not in shown.replace("morning", "")
    assert "Good" not in shown


def test_with_content_arguments_results_and_messages_are_shown(kd: killick.Client) -> None:
    seen = Seen(content=True)
    kd.run(morning, "ann", id="r1")
    look_, chat = told(seen.one("execute_tool look")), told(seen.one("chat m"))
    assert look_["gen_ai.tool.call.arguments"] == '{"name":"ann"}'
    assert look_["gen_ai.tool.call.result"] == '"ann is there"'
    assert chat["gen_ai.input.messages"] == '[{"role":"user","parts":[{"type":"text","content":"greet ann"}]}]'
    assert '{"type":"text","content":"Good morning."}' in chat["gen_ai.output.messages"]
    seen.telemetry.stop()


def test_beside_another_instrumentation_of_the_model_no_token_counts_twice(kd: killick.Client) -> None:
    seen = Seen(usage=False)
    tracer = seen.tracers.get_tracer("of the client")

    async def instrumented(**asked: Any) -> dict[str, Any]:
        with tracer.start_as_current_span("chat m, by the client") as span:
            span.set_attributes({"gen_ai.usage.input_tokens": 16, "gen_ai.usage.output_tokens": 3})
            return await answers(**asked)

    @killick.agent(name="greets")
    async def greets(run: killick.Run, _: None) -> str:
        reply = await run.model(instrumented, model="m", messages=[], max_tokens=9)
        return str(reply["content"][0]["text"])

    assert kd.run(greets, None) == "Good morning."
    seen.telemetry.stop()
    spans = seen.exporter.get_finished_spans()
    assert sum(told(span).get("gen_ai.usage.input_tokens", 0) for span in spans) == 16
    assert sum(told(span).get("gen_ai.usage.output_tokens", 0) for span in spans) == 3
    assert told(seen.one("chat m"))["gen_ai.response.model"] == "m-0613"
    assert seen.metric("gen_ai.client.token.usage") == seen.metric("gen_ai.client.operation.duration") == []
    assert len(seen.metric("killick.attempts")) == 1


def test_a_secret_is_shown_to_nobody_even_with_content(kd: killick.Client) -> None:
    @killick.tool(effect="reads")
    async def log_in(password: killick.Secret) -> str:
        return "in"

    @killick.agent
    async def enters(run: killick.Run) -> str:
        return await run.call(log_in, killick.Secret("hunter2"))

    seen = Seen(content=True)
    kd.run(enters, id="r1")
    shown = str([told(span) for span in seen.exporter.get_finished_spans()])
    assert "hunter2" not in shown
    assert "Secret" in shown
    seen.telemetry.stop()


def test_every_attempt_is_a_span_and_those_that_failed_are_errors(seen: Seen, kd: killick.Client) -> None:
    kd.run(morning, "flaky", id="r1")
    first, second, third = seen.all("execute_tool look")
    assert [told(span)["killick.attempt.number"] for span in (first, second, third)] == [1, 2, 3]
    assert told(first)["error.type"] == "ConnectionRefusedError"
    assert told(first)["killick.attempt.outcome"] == "unknown"
    assert told(first)["killick.attempt.retry_in_seconds"] >= 0
    assert first.status.status_code is StatusCode.ERROR
    assert first.status.description == "ConnectionRefusedError", "the words of an error may tell of people"
    assert third.status.status_code is StatusCode.UNSET
    assert len({told(span)["killick.attempt.key"] for span in (first, second, third)}) == 1


def test_what_a_tool_does_is_inside_its_span_and_inside_the_spans_that_agent_code_makes(
    seen: Seen, kd: killick.Client
) -> None:
    mine = seen.tracers.get_tracer("mine")

    @killick.tool(effect="reads")
    def reads() -> str:
        with mine.start_as_current_span("in the tool"):
            return "x"

    @killick.agent
    async def phases(run: killick.Run) -> str:
        with mine.start_as_current_span("phase"):
            return await run.call(reads)

    kd.run(phases, id="r1")
    tool, phase = seen.one("execute_tool reads"), seen.one("phase")
    assert phase.context is not None
    assert tool.context is not None
    assert tool.parent == phase.context
    assert phase.parent == seen.one("invoke_agent phases").context
    assert seen.one("in the tool").parent == tool.context


def test_a_replayed_step_emits_nothing(seen: Seen, tmp_path: Path) -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        await run.call(look, "a")
        await run.model(answers, model="m", messages=[], max_tokens=1)
        await run.ask("go on?")
        return await run.call(look, "b")

    with killick.open(tmp_path / "k.db") as kd, pytest.raises(killick.RunWaiting):
        kd.run(asks, id="r1")
    before = seen.names()
    assert before == ["execute_tool look", "chat m", "invoke_agent asks"]
    with killick.open(tmp_path / "k.db") as kd:
        kd.answer("r1", "approve", by="ann")
        kd.run(asks, id="r1")
        kd.run(asks, id="r1")  # it has ended: nothing more happens
    assert seen.names()[len(before) :] == ["wait answer", "execute_tool look", "invoke_agent asks"]
    first, second = seen.all("invoke_agent asks")
    assert (told(first)["killick.replayed.steps"], told(second)["killick.replayed.steps"]) == (0, 2)
    assert [told(first)["killick.run.status"], told(second)["killick.run.status"]] == ["waiting", "completed"]
    assert first.context is not None
    assert second.parent is not None
    assert second.context is not None
    assert second.context.trace_id == first.context.trace_id, "one trace, whoever goes on with the run"
    assert second.parent.span_id == first.context.span_id


def test_a_replay_with_the_world_shut_off_emits_nothing(seen: Seen, kd: killick.Client) -> None:
    kd.run(morning, "ann", id="r1")
    before = seen.names()
    kd.replay("r1", morning)
    assert seen.names() == before


def test_an_approval_is_a_span_from_the_question_to_the_answer(seen: Seen, kd: killick.Client) -> None:
    @killick.agent
    async def pays(run: killick.Run) -> str:
        return await run.call(pay, 5)

    with pytest.raises(killick.RunWaiting):
        kd.run(pays, id="r1")
    [opened] = seen.one("invoke_agent pays").events
    assert opened.name == "killick.wait.opened"
    assert (opened.attributes or {})["killick.approval.tool"] == "pay"
    kd.answer("r1", "approve", by="ann")
    kd.run(pays, id="r1")
    approved = seen.one("approve pay")
    assert {
        "killick.wait.for": "answer", "killick.wait.how": "answered", "killick.approval.tool": "pay",
        "killick.approval.answer": "approve", "killick.approval.rule": "approve",
    }.items() <= told(approved).items()  # fmt: skip
    assert "killick.approval.by" not in told(approved), "who it was is shown with content only"
    assert approved.start_time is not None
    assert approved.end_time is not None
    assert approved.start_time < approved.end_time
    assert told(seen.one("execute_tool pay"))["killick.approval.asked"] is True


def test_what_a_contract_rejects_is_an_event_and_no_attempt(seen: Seen, kd: killick.Client) -> None:
    @killick.agent(contract=killick.Contract("small", [killick.rules.deny("pay")]))
    async def tries_to_pay(run: killick.Run) -> str:
        try:
            return await run.call(pay, 5)
        except killick.Rejected as rejected:
            return str(rejected.code)

    kd.run(tries_to_pay, id="r1")
    assert seen.names() == ["invoke_agent tries_to_pay"]
    [event] = seen.one("invoke_agent tries_to_pay").events
    assert event.name == "killick.rejected"
    assert (event.attributes or {})["gen_ai.tool.name"] == "pay"
    [point] = seen.metric("killick.rejections")
    assert point.value == 1


def test_a_run_that_fails_is_an_error_of_its_kind(seen: Seen, kd: killick.Client) -> None:
    @killick.agent
    async def breaks(run: killick.Run) -> None:
        raise LookupError("ann is not there")

    with pytest.raises(killick.RunFailed):
        kd.run(breaks, id="r1")
    span = seen.one("invoke_agent breaks")
    assert (span.status.status_code, told(span)["error.type"]) == (StatusCode.ERROR, "LookupError")
    [point] = seen.metric("killick.runs.ended")
    assert dict(point.attributes) == {"gen_ai.agent.name": "breaks", "killick.run.status": "failed"}


def test_a_run_started_inside_a_span_is_part_of_its_trace_also_when_a_worker_runs_it(
    seen: Seen, kd: killick.Client
) -> None:
    mine = seen.tracers.get_tracer("mine")
    with mine.start_as_current_span("request"):
        kd.start(morning, "ann", id="r1")
    kd.advance("r1")
    assert seen.one("invoke_agent morning").parent is not None
    request = seen.one("request").context
    assert request is not None
    parent = seen.one("invoke_agent morning").parent
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (request.trace_id, request.span_id)
    with mine.start_as_current_span("another request"):
        kd.run(morning, "ann", id="r2")
    assert seen.all("invoke_agent morning")[1].parent == seen.one("another request").context


def test_a_child_is_in_the_trace_of_its_parent(seen: Seen, kd: killick.Client) -> None:
    @killick.agent
    async def parents(run: killick.Run) -> str:
        child = await run.spawn(morning, "ann")
        return await child.result()

    kd.run(parents, id="r1")
    parent, child = seen.one("invoke_agent parents"), seen.one("invoke_agent morning")
    assert parent.context is not None
    assert child.context is not None
    assert child.context.trace_id == parent.context.trace_id
    assert told(child)["killick.run.parent"] == "r1"


def test_branches_side_by_side_keep_their_spans_apart(seen: Seen, kd: killick.Client) -> None:
    @killick.agent
    async def both(run: killick.Run) -> Any:
        return await run.gather(run.call(look, "a"), run.call(write, "b"), run.call(look, "c"))

    kd.run(both, id="r1")
    agent = seen.one("invoke_agent both").context
    spans = [*seen.all("execute_tool look"), seen.one("execute_tool write")]
    assert [span.parent for span in spans] == [agent, agent, agent]
    assert sorted(told(span)["killick.step.id"] for span in spans) == ["1.1.1", "1.2.1", "1.3.1"]


def test_what_a_framework_calls_through_a_host_is_traced_too(seen: Seen, kd: killick.Client) -> None:
    mine = seen.tracers.get_tracer("framework")
    with mine.start_as_current_span("request"), kd.host("t1", agent="frame") as host:
        with mine.start_as_current_span("node"):
            assert host.call_sync(look, {"name": "a"}, key="c1") == "a is there"
        assert host.call_sync(look, {"name": "a"}, key="c1") == "a is there"
    assert seen.one("execute_tool look").parent == seen.one("node").context
    assert seen.one("invoke_agent frame").parent == seen.one("request").context


def test_code_that_waited_in_memory_goes_on_under_the_new_stretch(seen: Seen, kd: killick.Client) -> None:
    @killick.agent
    async def hears(run: killick.Run) -> str:
        await run.wait("news")
        return await run.call(look, "a")

    with pytest.raises(killick.RunWaiting):
        kd.run(hears, id="r1")
    kd.send("r1", "news", 1)
    kd.run(hears, id="r1")
    _, second = seen.all("invoke_agent hears")
    assert seen.one("execute_tool look").parent == second.context
    assert told(second)["killick.replayed.steps"] == 0


def test_a_step_that_commits_with_the_application_s_rows_ends_its_span(seen: Seen, kd: killick.Client) -> None:
    @killick.tool(effect="transaction")
    def inserts(tx: killick.Tx = killick.TX) -> int:
        tx.connection.execute("create table if not exists mine (n)")
        return 1

    @killick.agent
    async def rows(run: killick.Run) -> int:
        return await run.call(inserts)

    kd.run(rows, id="r1")
    assert told(seen.one("execute_tool inserts"))["killick.attempt.outcome"] == "returned"


def test_a_sampler_that_takes_nothing_costs_nothing_else(kd: killick.Client) -> None:
    with instrument(tracer_provider=TracerProvider(sampler=ALWAYS_OFF), content=True):
        assert kd.run(morning, "ann", id="r1") == "Good morning."


def test_an_observer_that_fails_costs_the_run_nothing(seen: Seen, kd: killick.Client) -> None:
    class Broken(observers.Observer):
        def attempted(self, attempt: observers.Attempt) -> None:
            raise RuntimeError("broken")

        def applying(self, attempt: observers.Attempt) -> Any:
            raise RuntimeError("broken")

    stop = observers.observe(Broken())
    try:
        assert kd.run(morning, "ann", id="r1") == "Good morning."
    finally:
        stop()
    assert "execute_tool look" in seen.names()


def test_instrumenting_again_takes_the_place_of_what_was_there(seen: Seen, kd: killick.Client) -> None:
    other = Seen()
    kd.run(morning, "ann", id="r1")
    other.telemetry.stop()
    assert seen.names() == []
    assert other.names()
    kd.run(morning, "ann", id="r2")
    assert len(other.all("invoke_agent morning")) == 1


# metrics -------------------------------------------------------------------------------------------


def test_metrics_count_tokens_durations_attempts_and_runs(seen: Seen, kd: killick.Client) -> None:
    kd.run(morning, "flaky", id="r1")
    tokens = {
        dict(point.attributes)["gen_ai.token.type"]: point.sum for point in seen.metric("gen_ai.client.token.usage")
    }
    assert tokens == {"input": 16, "output": 3}
    [chat] = seen.metric("gen_ai.client.operation.duration")
    assert dict(chat.attributes)["gen_ai.request.model"] == "m"
    tools = {
        (dict(point.attributes)["gen_ai.tool.name"], dict(point.attributes).get("error.type")): point.count
        for point in seen.metric("gen_ai.execute_tool.duration")
    }
    assert tools == {("look", "ConnectionRefusedError"): 2, ("look", None): 1, ("write", None): 1}
    attempts = {
        (dict(point.attributes).get("gen_ai.tool.name"), dict(point.attributes)["killick.attempt.outcome"]): point.value
        for point in seen.metric("killick.attempts")
    }
    assert attempts == {
        ("look", "unknown"): 2, ("look", "returned"): 1, ("write", "returned"): 1, (None, "returned"): 1
    }  # fmt: skip
    [agent] = seen.metric("gen_ai.invoke_agent.duration")
    span = seen.one("invoke_agent morning")
    assert span.end_time is not None
    assert span.start_time is not None
    assert agent.sum == pytest.approx((span.end_time - span.start_time) / 1e9)
    assert not any("killick.run.id" in dict(point.attributes) for point in (chat, agent))
