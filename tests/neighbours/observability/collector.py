"""A platform as its exporter sees it: an OTLP collector that keeps spans."""

from __future__ import annotations

import gzip
import json
from typing import Any, Final, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

INPUT: Final = ("gen_ai.usage.input_tokens", "llm.token_count.prompt")
OUTPUT: Final = ("gen_ai.usage.output_tokens", "llm.token_count.completion")
DETAILS: Final = "langfuse.observation.usage_details"
PENDING: Final = "pending_span"
"""Logfire announces a span when it begins, and replaces it by the ended one."""
PROJECT: Final = b'{"project_name": "p", "project_url": "http://127.0.0.1/p"}'
"""The answer to every request: Logfire asks which project its token is of."""


class Sent(NamedTuple):
    """A span as a platform gets it."""

    name: str
    scope: str
    trace: bytes
    attributes: dict[str, Any]

    @property
    def tokens(self) -> tuple[int, int]:
        """Input and output, by any of the names that the three platforms read; each platform adds them up by span."""
        told = self.attributes
        if DETAILS in told:
            usage = json.loads(told[DETAILS])
            return usage["prompt_tokens"], usage["completion_tokens"]
        asked, said = (next((int(told[name]) for name in names if name in told), 0) for names in (INPUT, OUTPUT))
        return asked, said


class Collector:
    """An ASGI app."""

    def __init__(self) -> None:
        self.spans: list[Sent] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                told = (await receive())["type"]
                await send({"type": f"{told}.complete"})
                if told == "lifespan.shutdown":
                    return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        if scope["path"].endswith("/v1/traces"):
            zipped = (b"content-encoding", b"gzip") in scope["headers"]
            self._keep(gzip.decompress(raw) if zipped else raw)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": PROJECT})

    def _keep(self, raw: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    told = {each.key: _value(each.value) for each in span.attributes}
                    if told.get("logfire.span_type") != PENDING:
                        self.spans.append(Sent(span.name, scope.scope.name, span.trace_id, told))


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
