"""OpenTelemetry spans and metrics of runs, by the conventions for generative AI (`gen_ai.*`).

A continuous part of a run is `invoke_agent`, a tool attempt `execute_tool`, a model call `chat`; ours are `killick.*`.
Replayed steps emit nothing. Message content and names are omitted unless enabled.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from killick.adapters.otel_conventions import USAGE, asked_by, asked_with, called_with, maker_of, replied, said_by
from killick.engine.observers import Attempt, Observer, RunSpan, Waited, observe
from killick.model import events as e
from killick.model.failure import Failure

CONTENT: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that enables message content in all instrumentations."""

_SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_LONG_SECONDS: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6)
_WAIT_SECONDS: Final = (1, 10, 60, 600, 3_600, 21_600, 86_400, 259_200, 604_800)
_TOKENS: Final = tuple(4**power for power in range(14))

_RUN_SPAN: Final = contexts.create_key("killick-run-span")
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_FAILED: Final = frozenset({"failed", "interrupted", "diverged"})


class _OpenSpan(NamedTuple):
    """A traced part of a run."""

    span: Span
    context: Context
    token: Any


class Telemetry(Observer):
    """Spans and metrics. `stop()` ends it; so does leaving it as a `with` block."""

    def __init__(
        self, tracers: TracerProvider | None, meters: MeterProvider | None, *, content: bool, usage: bool = True
    ) -> None:
        self._tracer = trace.get_tracer("killick", tracer_provider=tracers)
        self._meters = _Meters(meters, usage)
        self._content = content
        self._usage = usage
        self._stop = observe(self)

    def stop(self) -> None:
        """Stops observing. Open spans are never ended."""
        self._stop()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # runs -------------------------------------------------------------------------------------

    def trace(self) -> str | None:
        """Returns the current trace context when a run is started, if any."""
        return _traceparent(contexts.get_current())

    def began(self, run_span: RunSpan) -> str | None:
        """Starts a span in the trace of the run's starter, in any process."""
        here = contexts.get_current()
        now = trace.get_current_span(here).get_span_context()
        first = _PROPAGATOR.extract({"traceparent": run_span.trace}, context=here) if run_span.trace else here
        links: list[Link] = []
        if now.is_valid and _trace_id(first) == now.trace_id:
            first = here
        elif now.is_valid:
            links = [Link(now)]
        attributes = {
            **_of_run(run_span),
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.version": run_span.build.version,
            "killick.run.parent": run_span.parent,
            "killick.run.epoch": run_span.epoch,
            "killick.replayed.steps": run_span.replayed,
        }
        span = self._start(f"invoke_agent {run_span.agent}", run_span.began_us, first, attributes, links=links)
        within = contexts.set_value(_RUN_SPAN, run_span, trace.set_span_in_context(span, first))
        run_span.kept[self] = _OpenSpan(span, within, contexts.attach(within))
        return _traceparent(within)

    def ended(self, run_span: RunSpan) -> None:
        """Ends the span: a waiting run is no error, a failed one is."""
        spanned: _OpenSpan | None = run_span.kept.pop(self, None)
        self._meters.run_span(run_span)
        if spanned is None:
            return
        if contexts.get_value(_RUN_SPAN) is run_span:
            contexts.detach(spanned.token)
        spanned.span.set_attribute("killick.run.status", run_span.status)
        if run_span.status in _FAILED:
            self._fail(spanned.span, run_span.failure, run_span.status)
        spanned.span.end(end_time=run_span.ended_us * 1_000)

    # attempts ---------------------------------------------------------------------------------

    def attempted(self, attempt: Attempt) -> None:
        """Starts a span for every attempt, so that retries are visible."""
        of_model = attempt.sort == "model"
        verdict = attempt.verdict or e.Verdict()
        attributes = {
            **_of_run(attempt),
            "killick.step.id": attempt.step,
            "killick.step.sort": attempt.sort,
            "killick.attempt.number": attempt.number,
            "killick.attempt.key": attempt.key,
            "killick.effect": attempt.effect,
            "killick.approval.asked": attempt.asked or None,
            "killick.approval.rule": verdict.rule if attempt.asked else None,
        }
        if of_model:
            attributes |= asked_by(attempt)
            name = f"{attributes['gen_ai.operation.name']} {attributes.get('gen_ai.request.model') or attempt.name}"
        else:
            attributes |= {"gen_ai.operation.name": "execute_tool"} | _of_tool(attempt)
            name = f"execute_tool {attempt.name}"
        kind = SpanKind.CLIENT if of_model else SpanKind.INTERNAL
        span = self._start(name, attempt.began_us, self._within(attempt.run_span), attributes, kind=kind)
        if self._content and span.is_recording():
            span.set_attributes(_present(asked_with(attempt) if of_model else called_with(attempt)))
        attempt.kept[self] = span

    @contextmanager
    def applying(self, attempt: Attempt) -> Generator[None]:
        """A tool's own spans are inside its span, also in another thread."""
        span: Span | None = attempt.kept.get(self)
        if span is None:
            yield
            return
        if attempt.sort == "model" and (maker := maker_of(attempt.fn)) is not None:
            span.set_attribute("gen_ai.provider.name", maker)
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield

    def came(self, attempt: Attempt) -> None:
        """Ends an attempt's span. An unknown outcome is its own kind of error."""
        span: Span | None = attempt.kept.pop(self, None)
        self._meters.attempt(attempt)
        if span is None:
            return
        attributes: dict[str, Any] = {
            "killick.attempt.outcome": attempt.outcome or "interrupted",
            "killick.attempt.rate_limited": attempt.limited or None,
        }
        if attempt.retry_at is not None:
            attributes["killick.attempt.retry_in_seconds"] = round((attempt.retry_at - attempt.ended_us) / 1e6, 3)
        if attempt.sort == "model":
            found = replied(attempt)
            attributes |= {name: found[name] for name in found if self._usage or not name.startswith(USAGE)}
        if self._content and span.is_recording():
            attributes |= said_by(attempt)
        span.set_attributes(_present(attributes))
        if attempt.outcome != "returned":
            self._fail(span, attempt.failure, "interrupted")
        span.end(end_time=attempt.ended_us * 1_000)

    def _fail(self, span: Span, failure: Failure | None, otherwise: str) -> None:
        """An error's text may contain message content, so it is included only if enabled."""
        kind = _kind(failure, otherwise)
        span.set_attribute("error.type", kind)
        description = f"{kind}: {failure.message}" if self._content and failure is not None else kind
        span.set_status(Status(StatusCode.ERROR, description))

    # waits and rules --------------------------------------------------------------------------

    def waits(self, wait: Waited) -> None:
        """Adds an event when a wait opens; its span is emitted on close, perhaps by another process."""
        spanned = None if wait.run_span is None else wait.run_span.kept.get(self)
        if spanned is not None:
            spanned.span.add_event("killick.wait.opened", _present(_of_wait(wait)), timestamp=wait.opened_us * 1_000)

    def waited(self, wait: Waited) -> None:
        """Emits a wait's span from its opening, even days ago, to its close."""
        self._meters.wait(wait)
        answer: Any = wait.answer if isinstance(wait.answer, dict) else {}
        asks = wait.waits_for in ("answer", "settlement")
        attributes = {
            **_of_run(wait),
            **_of_wait(wait),
            "killick.wait.how": wait.how,
            "killick.approval.answer": answer.get("kind") if asks else None,
            "killick.approval.by": wait.by if asks and self._content else None,
        }
        name = f"approve {wait.tool}" if wait.tool else f"wait {wait.waits_for}"
        span = self._start(name, wait.opened_us, self._within(wait.run_span), attributes)
        span.end(end_time=wait.closed_us * 1_000)

    def rejected(self, run: str, agent: str, name: str, verdict: e.Verdict, run_span: RunSpan | None) -> None:
        """Adds an event for a rejected call, which is never attempted."""
        attributes = _present({"gen_ai.tool.name": name, "killick.rule": verdict.rule, "killick.code": verdict.code})
        self._meters.rejections.add(1, attributes | {"gen_ai.agent.name": agent})
        spanned = None if run_span is None else run_span.kept.get(self)
        if spanned is not None:
            spanned.span.add_event("killick.rejected", attributes)

    def _start(self, name: str, at_us: int, within: Context, attributes: Mapping[str, Any], **more: Any) -> Span:
        shown = _present(attributes)
        return self._tracer.start_span(name, context=within, attributes=shown, start_time=at_us * 1_000, **more)

    def _within(self, run_span: RunSpan | None) -> Context:
        """Returns the current span as the parent, if it is of this part of the run: resumed code may still be in an
        older one, and framework code in none of ours, though in the same trace."""
        here = contexts.get_current()
        spanned: _OpenSpan | None = None if run_span is None else run_span.kept.get(self)
        if spanned is None:
            return here
        inside = contexts.get_value(_RUN_SPAN, here)
        same = _trace_id(here) == _trace_id(spanned.context)
        return here if inside is run_span or (inside is None and same) else spanned.context


def _of_run(of: RunSpan | Attempt | Waited) -> dict[str, Any]:
    return {"gen_ai.agent.name": of.agent, "gen_ai.conversation.id": of.run, "killick.run.id": of.run}


def _of_tool(attempt: Attempt) -> dict[str, Any]:
    return {"gen_ai.tool.name": attempt.name, "gen_ai.tool.type": "function"}


def _of_wait(wait: Waited) -> dict[str, Any]:
    return {
        "killick.step.id": wait.step,
        "killick.wait.for": wait.waits_for,
        "killick.wait.name": wait.name,
        "killick.approval.tool": wait.tool,
        "killick.approval.rule": wait.rule,
    }


def _kind(failure: Failure | None, otherwise: str) -> str:
    if failure is None:
        return f"killick.{otherwise}"
    return "timeout" if failure.kind == "timeout" else failure.type


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}


def _trace_id(context: Context) -> int:
    return trace.get_current_span(context).get_span_context().trace_id


def _traceparent(context: Context) -> str | None:
    """Returns a context's current span in W3C form."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return carrier.get("traceparent")


# metrics ------------------------------------------------------------------------------------------


class _Meters:
    """The metrics. They contain no run names, to bound cardinality."""

    def __init__(self, provider: MeterProvider | None, usage: bool) -> None:
        self._usage = usage
        meter = metrics.get_meter("killick", meter_provider=provider)

        def histogram(name: str, unit: str, description: str, bounds: tuple[float, ...]) -> metrics.Histogram:
            return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)

        self._calls = histogram("gen_ai.client.operation.duration", "s", "GenAI operation duration.", _SECONDS)
        self._tokens = histogram(
            "gen_ai.client.token.usage", "{token}", "Number of input and output tokens used.", _TOKENS
        )
        self._tools = histogram(
            "gen_ai.execute_tool.duration", "s", "The duration of a single tool execution.", _SECONDS
        )
        self._run_seconds = histogram(
            "gen_ai.invoke_agent.duration", "s", "How long one execution of a run took.", _LONG_SECONDS
        )
        self._waits = histogram("killick.wait.duration", "s", "From a wait's opening to its close.", _WAIT_SECONDS)
        self._attempts = meter.create_counter("killick.attempts", "{attempt}", "Attempts that are over.")
        self._ended = meter.create_counter("killick.runs.ended", "{run}", "Runs that ended.")
        self._replayed = meter.create_counter("killick.steps.replayed", "{step}", "Steps that came from the record.")
        self._cost = meter.create_counter("killick.cost", "USD", "What model calls cost, by the prices that are known.")
        self.rejections = meter.create_counter("killick.rejections", "{intention}", "Intentions that were rejected.")

    def run_span(self, run_span: RunSpan) -> None:
        agent = {"gen_ai.agent.name": run_span.agent}
        failed = {"error.type": _kind(run_span.failure, run_span.status)} if run_span.status in _FAILED else {}
        self._run_seconds.record((run_span.ended_us - run_span.began_us) / 1e6, agent | failed)
        if run_span.replayed:
            self._replayed.add(run_span.replayed, agent)
        if run_span.status in ("completed", "failed", "cancelled"):
            self._ended.add(1, {**agent, "killick.run.status": run_span.status})

    def attempt(self, attempt: Attempt) -> None:
        seconds = (attempt.ended_us - attempt.began_us) / 1e6
        failed = {} if attempt.outcome == "returned" else {"error.type": _kind(attempt.failure, "interrupted")}
        agent = {"gen_ai.agent.name": attempt.agent}
        outcome: dict[str, Any] = {
            "killick.step.sort": attempt.sort,
            "killick.attempt.outcome": attempt.outcome or "interrupted",
        }
        if attempt.sort != "model":
            self._tools.record(seconds, agent | _of_tool(attempt) | failed)
            self._attempts.add(1, {**agent, "gen_ai.tool.name": attempt.name} | outcome)
            return
        attributes = asked_by(attempt) | replied(attempt)
        names = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
        asked = _present({name: attributes.get(name) for name in names})
        self._attempts.add(1, agent | outcome)
        if self._usage:
            self._calls.record(seconds, asked | failed)
        if (usage := attempt.usage) is not None:
            if self._usage:
                self._tokens.record(usage.tokens_in, {**asked, "gen_ai.token.type": "input"})
                self._tokens.record(usage.tokens_out, {**asked, "gen_ai.token.type": "output"})
            if usage.cost_micros:
                self._cost.add(usage.cost_micros / 1e6, agent | asked)

    def wait(self, wait: Waited) -> None:
        attributes = {"gen_ai.agent.name": wait.agent, "killick.wait.for": wait.waits_for, "killick.wait.how": wait.how}
        self._waits.record(
            (wait.closed_us - wait.opened_us) / 1e6, _present({**attributes, "killick.approval.tool": wait.tool})
        )


# switching it on ----------------------------------------------------------------------------------

_on: list[Telemetry] = []


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    content: bool | None = None,
    usage: bool = True,
) -> Telemetry:
    """Traces and measures every run in this process, from now on.

        tracer_provider  for spans, and meter_provider for metrics; default: OpenTelemetry's global ones
        content          also include arguments, results, messages, error texts and approvers. Default: the variable
                         OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT; else off
        usage            whether spans of model calls have `gen_ai.usage.*`, and `gen_ai.client.*` is measured. False if
                         another instrumentation of the model's client reports them, so that no token counts twice

    A second call replaces the first.
    """
    while _on:
        _on.pop().stop()
    if content is None:
        content = os.environ.get(CONTENT, "").lower() in ("1", "true", "span_only", "span_and_event")
    _on.append(Telemetry(tracer_provider, meter_provider, content=content, usage=usage))
    return _on[-1]
