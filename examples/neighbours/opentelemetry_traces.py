"""An agent whose run is a trace: spans by the gen_ai conventions, printed here instead of sent to a collector.

pip install 'killick[opentelemetry]' opentelemetry-sdk
python examples/neighbours/opentelemetry_traces.py
"""

import tempfile
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import killick
from killick.adapters.opentelemetry import instrument


@killick.tool(effect="reads")
async def look_up(name: str) -> str:
    return f"{name} likes tea"


async def scripted(*, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Stands for `client.messages.create`."""
    said = [{"type": "text", "text": "Good morning, tea is ready."}]
    return {"type": "message", "model": model, "content": said, "usage": {"input_tokens": 21, "output_tokens": 7}}


@killick.agent
async def greets(run: killick.Run, name: str) -> str:
    known = await run.call(look_up, name)
    reply = await run.model(scripted, model="some-model", messages=[{"role": "user", "content": known}])
    answer = await run.ask("Send it?", to="people")
    return str(reply["content"][0]["text"]) if answer.approved else "nothing"


def line(span: ReadableSpan) -> str:
    told = dict(span.attributes or {})
    shown = ("killick.run.status", "killick.replayed.steps", "gen_ai.usage.output_tokens", "killick.wait.how")
    more = "  ".join(f"{name}={told[name]}" for name in shown if name in told)
    return f"{span.name:<24} {more}"


spans = InMemorySpanExporter()
provider = TracerProvider()  # in real life with an OTLP exporter, or as `opentelemetry-instrument` sets it up
provider.add_span_processor(SimpleSpanProcessor(spans))

with instrument(tracer_provider=provider), tempfile.TemporaryDirectory() as folder:
    with killick.open(f"{folder}/killick.db") as kd:
        try:
            kd.run(greets, "ann", id="g1")
        except killick.RunWaiting as waiting:
            print(waiting)
    with killick.open(f"{folder}/killick.db") as kd:  # another process, say, and days later
        kd.answer("g1", "approve", by="bob")
        print(kd.run(greets, "ann", id="g1"))

for span in spans.get_finished_spans():
    print(line(span))
