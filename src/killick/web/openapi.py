"""The OpenAPI document, made from the route table and the types of its documents, so that it is always correct."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from http import HTTPStatus
from inspect import getdoc
from typing import Any, Final

import msgspec

from killick.presenting.documents import SCHEMA_VERSION
from killick.presenting.encoder import schemas
from killick.version import VERSION
from killick.web.addresses import API
from killick.web.problems import ProblemDocument
from killick.web.routes import Call, Nothing, Route, get

_MODULE: Final = re.compile(r"killick\.web\.(\w+)\.(\w+)")
_REF: Final = "#/components/schemas/{name}"
_PROBLEM: Final = {"$ref": "#/components/schemas/ProblemDocument"}

_ABOUT: Final = """\
Killick runs agents whose every step holds before the next one starts. This is all that its dashboard can do, for
programs of any language.

Times are RFC 3339 in UTC with microseconds; durations are in seconds (`…_seconds`). `--json` of the command line
prints the same documents. A run's id may have any character in it: percent-encode it in paths, a slash as `%2F`.
Lists give `next`, which is the `cursor` of what follows; null: that was all. Errors are
`application/problem+json`; tell them by their `code`. Writes take an `Idempotency-Key`: with the same key again the
same answer comes back, and nothing is done twice.
"""

_KEY: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "Makes the request count once, for a day at the least: the same key with the same request gives "
    "the recorded answer (`Idempotency-Replayed: true`), with another one 422 `key_reused`.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]([ -~]*[!-~])?$"},
}

_LAST_EVENT: Final[dict[str, Any]] = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The seq of the last event that arrived; goes before `after`.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
}

_SIGNED: Final[tuple[dict[str, Any], ...]] = tuple(
    {"name": name, "in": "header", "required": True, "description": description, "schema": {"type": "string"}}
    for name, description in {
        "webhook-id": "Identifies the event; a redelivery has the same id.",
        "webhook-timestamp": "When it was sent, in seconds since 1970.",
        "webhook-signature": "`v1,` and the base64 of HMAC-SHA256 over `id.timestamp.body`; several with spaces.",
    }.items()
)

_SECURITY: Final[dict[str, Any]] = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of `killick token create`, with the scope viewer, operator or admin.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "killick_session_ID",
        "description": "What the login page gives a browser. Each store has its `ID`. Writes need `X-Killick-CSRF`.",
    },
}

_SCOPES: Final = {
    "viewer": "Every signed-in user may.",
    "operator": "Takes an operator.",
}


@get("/openapi.json", page="api.html", at=("/api",), veils=False)
def described(call: Call[Nothing, Nothing]) -> dict[str, Any]:
    """This document: everything that can be asked for, as OpenAPI 3.1 describes it."""
    return {
        **openapi(call.request.app.state.routes),
        "servers": [{"url": call.request.scope.get("root_path", "") or "/"}],
    }


@cache
def openapi(routes: tuple[Route, ...]) -> dict[str, Any]:
    """The document of a route table."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in sorted(routes, key=lambda route: (route.path, route.method)):
        paths.setdefault(API + route.path, {})[route.method.lower()] = _operation(route, _operation_id(route), schemas)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Killick",
            "version": VERSION,
            "description": _ABOUT,
            "x-schema-version": SCHEMA_VERSION,
        },
        "servers": [{"url": "/"}],
        "security": [{name: []} for name in _SECURITY],
        "tags": [{"name": name, "description": description} for name, description in sorted(_tags(routes))],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "parameters": {"IdempotencyKey": _KEY},
            "responses": {"Problem": _refused("A problem, as defined by RFC 9457")},
            "securitySchemes": _SECURITY,
        },
    }
    # Types of two modules that share a name are distinguished by their modules, which clients need not know.
    text = _MODULE.sub(lambda found: found[1].capitalize() + found[2], msgspec.json.encode(made).decode())
    # Client generators need the items of an array, and treat fields with a default as required.
    text = text.replace('{"type":"array"}', '{"type":"array","items":{}}')
    text = text.replace(',"default":null', "").replace('{"default":null}', "{}")
    plain: dict[str, Any] = msgspec.json.decode(text)
    return plain


class _Schemas:
    """The types of all routes as JSON schemas, under names that no two of them share."""

    def __init__(self, routes: Sequence[Route]) -> None:
        bodies = [route.takes for route in routes if route.takes is not Nothing]
        given = [route.gives for route in routes if route.gives is not None]
        self._refs, components = schemas([*bodies, *given, ProblemDocument], _REF)
        _, taken = schemas(bodies, _REF)
        # Documents are sent whole: fields with a default are included.
        self.components = dict(sorted(components.items()))
        for name, made in components.items():
            if name not in taken and made.get("properties"):
                self.components[name] = {**made, "required": sorted(made["properties"])}

    def of(self, kind: Any) -> dict[str, Any]:
        ref: dict[str, Any] = self._refs[kind]
        return ref


def _asked(kind: type[msgspec.Struct]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """The parameters of a request: name, schema, whether it has to be there."""
    refs, components = schemas([kind], _REF)
    made = components[refs[kind]["$ref"].rpartition("/")[2]]
    for name, schema in made.get("properties", {}).items():
        yield name, _without_null(schema), name in made.get("required", [])


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter is there or it is not; nothing in an address is null."""
    kept = {name: value for name, value in schema.items() if name != "default" or value is not None}
    if "anyOf" in kept:
        options = [each for each in kept.pop("anyOf") if each.get("type") != "null"]
        kept = {**options[0], **kept} if len(options) == 1 else {**kept, "anyOf": options}
    return kept


def _operation_id(route: Route) -> str:
    """The name of an operation in generated clients: `get_run_steps`, `start_run`, `pause_run`, `fire_trigger`."""
    parts = re.split(r"[/.]", route.path.strip("/"))
    nouns: list[str] = []
    for part, after in zip(parts, [*parts[1:], ""], strict=True):
        is_one = after.startswith("{") or (route.method == "POST" and not after)
        if not part.startswith("{"):
            nouns.append(part.removesuffix("s") if is_one else part)
            nouns += [after.strip("{}")] if after.startswith("{") and not part.endswith("s") else []
    verb = "get" if route.method == "GET" else route.handler.__name__
    if nouns[-1] in verb:
        nouns.pop()
    return "_".join([verb, *nouns]) if nouns and nouns[-1] not in verb else verb


def _operation(route: Route, name: str, schemas: _Schemas) -> dict[str, Any]:
    about = (getdoc(route.handler) or "").partition("\n")[2].strip()
    allowed = _SCOPES[route.scope] if route.scope else "Open to all."
    spec: dict[str, Any] = {
        "operationId": name,
        "tags": [_tag(route)],
        "summary": route.summary,
        "description": f"{about}\n\n{allowed}".strip(),
        "parameters": list(_parameters(route)),
        "responses": _responses(route, schemas),
        "x-scope": route.scope,
    }
    if route.takes is not Nothing:
        spec["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas.of(route.takes)}}}
    elif _is_hook(route):
        spec["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    if route.scope is None:
        spec["security"] = []
    return spec


def _is_hook(route: Route) -> bool:
    return route.path.startswith("/hooks/")


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name, schema, required in _asked(route.asks):
        inside = f"{{{name}}}" in route.path
        made = {"name": name, "in": "path" if inside else "query", "required": inside or required}
        about = schema.pop("description", None)
        yield {**made, **({"description": about} if about else {}), "schema": schema}
    if _is_hook(route):
        yield from _SIGNED
    elif route.writes:
        yield {"$ref": "#/components/parameters/IdempotencyKey"}
    if route.path.endswith("/follow"):
        yield _LAST_EVENT


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "As asked."}
    if route.gives is not None:
        done["content"] = {route.media: {"schema": schemas.of(route.gives)}}
    else:
        done["content"] = {route.media: {"schema": {} if route.media == "application/json" else {"type": "string"}}}
    statuses = [400, 404, *((401, 403) if route.scope else (401,) if _is_hook(route) else ()), 429]
    if route.writes:
        statuses += [409, 413, 415, 422]
    refused = {str(status): _refused(HTTPStatus(status).phrase) for status in sorted(statuses)}
    return {str(route.status): done, **refused, "default": {"$ref": "#/components/responses/Problem"}}


def _refused(description: str) -> dict[str, Any]:
    return {"description": f"{description}.", "content": {"application/problem+json": {"schema": _PROBLEM}}}


def _tag(route: Route) -> str:
    return route.handler.__module__.rpartition(".")[2]


def _tags(routes: Sequence[Route]) -> set[tuple[str, str]]:
    """The modules of a table, and their descriptions."""
    modules = {_tag(route): route.handler.__module__ for route in routes}
    return {(tag, (sys.modules[name].__doc__ or "").strip().partition("\n")[0]) for tag, name in modules.items()}
