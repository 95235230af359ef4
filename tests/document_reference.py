"""Writes docs/json.md from the types of the documents: `python tests/document_reference.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from killick.cli.commands.inbox import CommandQuestion
from killick.cli.commands.ps import ListedRun
from killick.history.listing import RunSummary
from killick.presenting import documents, runs
from killick.presenting.encoder import schemas
from killick.presenting.limits import LimitQueue
from killick.presenting.triggers import Trigger
from killick.web.handlers.run_detail import RunDetail
from killick.web.handlers.step_detail import StepDetail

PAGE: Final = Path("docs/json.md")

_OPENING: Final = f"""\
# JSON documents

`tests/document_reference.py` writes this page from the types.

The command line (`--json`), the HTTP API and webhooks share one schema. Its version is {documents.SCHEMA_VERSION}.
A new field does not change the version; a changed name, type or meaning does.

- Times are RFC 3339 in UTC with microseconds, `2026-11-17T01:47:40.123456Z`, and sort as text.
- `…_seconds` is a duration in seconds; `…_micros` is money in millionths of a US dollar.
- A document about a run has its `id`. A document that refers to a run has `run`; so do `step` and `wait`.
- Every field is present; an empty one is `null` or an empty list.
- *any* is a value of the agent, as in the log. `fields` of an event are as in [Events](events.md): the log's own
  format, with times in microseconds since 1970.

| | command line | HTTP API, after `/api/v1` |
|---|---|---|
| a list of runs | `killick ps --json`: [ListedRun](#listedrun) | `GET /runs`: [RunSummary](#runsummary) |
| a run | `killick show RUN --json`: [RunTimeline](#runtimeline) | `GET /runs/{{run}}`: [RunDetail](#rundetail) |
| a step | `entries` of a run: [TimelineStep](#timelinestep) | `GET /runs/{{run}}/steps/{{step}}`: \
[StepDetail](#stepdetail) |
| the queues of limits |  | `limits` of `GET /workers`: [LimitQueue](#limitqueue) |
| open questions | `killick inbox --json`: [CommandQuestion](#commandquestion) | `GET /inbox`: [Question](#question) |
| an event | `killick show RUN --log --json`: [Event](#event) | `GET /runs/{{run}}/events`, `GET /runs/{{run}}/follow` |
| triggers | `killick trigger list --json`: [Trigger](#trigger) | `GET /triggers` |

A webhook has the fields of an event, and `version`, `id` (its idempotency key), `agent`, `because` and `left_out`; see
[Hooks](hooks.md). `GET /api/v1/openapi.json` has the schema of these and of the API's other documents.
"""

_OURS: Final = ("killick.presenting", "killick.history", "killick.web", "killick.cli", "killick.model.events")

_SHOWN: Final = (
    RunSummary, ListedRun, runs.Run, runs.RunTimeline, RunDetail, documents.Step,
    runs.TimelineStep, StepDetail, documents.Moment, documents.Wait, documents.Question, CommandQuestion,
    documents.Event, Trigger, LimitQueue,
)  # fmt: skip


def page() -> str:
    """The page as it has to be."""
    return "\n".join([_OPENING, *_sections()])


def _sections() -> Iterator[str]:
    _, components = schemas(_SHOWN, "#{name}")
    shown = {each.__name__: each for each in _SHOWN}
    kinds = {each.__name__: each for each in _types() if each.__module__.startswith(_OURS)} | shown
    for title, names in (("Documents", shown), ("Parts of documents", sorted(components.keys() - shown.keys()))):
        yield f"## {title}\n"
        for name in names:
            if name in kinds and "properties" in components[name]:
                yield from _section(kinds[name], components)


def _section(kind: type[msgspec.Struct], components: dict[str, Any]) -> Iterator[str]:
    """One type: the fields that it adds to the document that it extends."""
    fields = components[kind.__name__]["properties"]
    above = next((each.__name__ for each in kind.__mro__[1:] if each.__name__ in components), None)
    known = components[above]["properties"] if above else {}
    about = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    extends = f"All fields of [{above}](#{above.lower()}), and:" if above else ""
    yield f"### {kind.__name__}\n"
    yield from (f"{text}\n" for text in (about, extends) if text)
    yield "| field | type |\n|---|---|"
    yield from (f"| `{field}` | {_type(made)} |" for field, made in fields.items() if known.get(field) != made)
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
        "string": "string",
        "integer": "integer",
        "number": "number",
        "boolean": "boolean",
        "object": "object",
    }.get(str(schema.get("type")), str(schema.get("type", "*any*")))


if __name__ == "__main__":
    if not PAGE.parent.is_dir():
        sys.exit(f"{PAGE.parent}: is not here; run this in the repository")
    PAGE.write_text(page(), encoding="utf-8")
