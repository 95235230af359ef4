"""A program that pays, dies in the middle, and is run again: traced by hand, or with Killick. Spans go to a file."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

import killick
from killick.adapters.opentelemetry import instrument

folder, how = Path(sys.argv[1]), sys.argv[2]
spans = (folder / f"{how}.jsonl").open("a")
provider = TracerProvider()
provider.add_span_processor(
    SimpleSpanProcessor(ConsoleSpanExporter(out=spans, formatter=lambda span: span.to_json(indent=None) + "\n"))
)
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("by hand")


def paid(amount: int) -> str:
    with (folder / f"{how}.paid").open("a") as book:
        book.write(f"{amount}\n")
    return f"paid {amount}"


def looked() -> str:
    first = folder / f"{how}.died"
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "looked"


async def alone() -> None:
    with tracer.start_as_current_span("invoke_agent pays"):
        with tracer.start_as_current_span("execute_tool pay"):
            paid(5)
        with tracer.start_as_current_span("execute_tool look"):
            looked()


@killick.tool
async def pay(amount: int) -> str:
    return paid(amount)


@killick.tool(effect="idempotent")  # so that it begins when all before it is on disk
async def look() -> str:
    return looked()


@killick.agent
async def pays(run: killick.Run) -> str:
    await run.call(pay, 5)
    return await run.call(look)


if how == "alone":
    asyncio.run(alone())
else:
    instrument()
    with killick.open(folder / "killick.db") as kd:
        kd.run(pays, id="r1")
spans.close()
