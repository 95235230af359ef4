"""Writes docs/json.md from the types of the documents: `python tests/document_reference.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import getdoc
from pathlib import Path
from typing import Any, Final

import msgspec

from killick.cli.commands.inbox import CommandQuestion
from killick.cli.commands.ps import ListedRun
from killick.presenting import documents, runs
from killick.presenting.encoder import schemas
from killick.presenting.triggers import Trigger
from killick.web.handlers.run_detail import RunDetail
from killick.web.handlers.step_detail import StepDetail

PAGE: Final = Path("docs/json.md")

_OPENING: Final = f"""\
# Documents in JSON

This page is written by `tests/document_reference.py` from the types of the documents.

`--json` of the command line, the HTTP API and webhooks have one schema. Its version is {documents.SCHEMA_VERSION}. It
changes when a field changes its name, its type or its meaning; a new field does not change it.

- A time is RFC 3339 in UTC, always with microseconds: `2026-11-17T01:47:40.123456Z`. As texts they sort in their order.
- A duration is in seconds, in a field `…_seconds`.
- Money is in millionths of a US dollar, in a field `…_micros`.
- A document about a run has its `id`. A document that refers to a run has `run`; so do `step` and `wait`.
- A field is always there. Where there is nothing to say it is `null`, or an empty list.
- *any* is a value of an agent, as it is in the log. The `fields` of an event are as [Events](events.md) has them: the
  log's own format, with times in microseconds since 1970.

| what | the command line | the HTTP API |
|---|---|---|
| a run of a listing | `killick ps --json` | `GET /runs` |
| a run | `killick show RUN --json` | `GET /runs/{{run}}` |
| a step | in `entries` of `killick show RUN --json` | `GET /runs/{{run}}/steps/{{step}}` |
| an open wait | `killick inbox --json` | `GET /inbox` |
| an event | `killick show RUN --log --json` | `GET /runs/{{run}}/events`, `GET /runs/{{run}}/follow`, webhooks |
| a trigger | `killick trigger list --json` | `GET /triggers` |

A webhook has the fields of an event, and `version`, `id` (its idempotency key), `agent`, `because` and `left_out`; see
[Hooks](hooks.md). The API has further documents: `GET /api/v1/openapi.json` has the schema of each.
"""

_OURS: Final = ("killick.presenting", "killick.web", "killick.cli", "killick.model.events")

_SHOWN: Final = (
    runs.RunSummary, ListedRun, runs.Run, runs.RunTimeline, RunDetail, documents.Step,
    runs.TimelineStep, StepDetail, documents.Moment, documents.Wait, documents.Question, CommandQuestion,
    documents.Event, documents.StepBoundary, Trigger,
)  # fmt: skip


def page() -> str:
    """The page as it has to be."""
    return "\n".join([_OPENING, *_sections()])


def _sections() -> Iterator[str]:
    _, components = schemas(_SHOWN, "#{name}")
    for name in sorted(components):
        kind = next((each for each in _types() if each.__name__ == name and each.__module__.startswith(_OURS)), None)
        if kind is None or "properties" not in components[name]:
            continue
        about = " ".join((getdoc(kind) or "").partition("\n\n    ")[0].split("\n\n")[0].split())
        yield f"## {name}\n\n{about}\n\n| field | type |\n|---|---|"
        yield from (f"| `{field}` | {_type(made)} |" for field, made in components[name]["properties"].items())
        yield ""


def _types() -> list[type[msgspec.Struct]]:
    found: list[type[msgspec.Struct]] = [msgspec.Struct]
    for each in found:
        found += [below for below in each.__subclasses__() if below not in found]
    return found


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#")
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("format") == "date-time":
        return "time"
    return {
        "string": "text",
        "integer": "integer",
        "number": "number",
        "boolean": "true or false",
        "object": "object",
    }.get(str(schema.get("type")), str(schema.get("type", "*any*")))


if __name__ == "__main__":
    if not PAGE.parent.is_dir():
        sys.exit(f"{PAGE.parent}: is not here; run this in the repository")
    PAGE.write_text(page(), encoding="utf-8")
