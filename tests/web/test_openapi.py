"""The OpenAPI document says what the route table does, all of it and nothing else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

import killick
from killick.web.addresses import API
from killick.web.app import ROUTES, asgi
from killick.web.openapi import openapi
from killick.web.routes import Nothing, Route

DOCUMENT: dict[str, Any] = openapi(ROUTES)


def operations() -> Iterator[tuple[Route, dict[str, Any]]]:
    for route in ROUTES:
        yield route, DOCUMENT["paths"][API + route.path][route.method.lower()]


def schemas(found: Any) -> Iterator[dict[str, Any]]:
    """Every schema of the document, wherever it stands."""
    if isinstance(found, dict):
        if isinstance(found.get("schema"), dict):
            yield found["schema"]
        for value in found.values():
            yield from schemas(value)
    elif isinstance(found, list):
        for value in found:
            yield from schemas(value)


def test_the_document_covers_exactly_the_route_table() -> None:
    described = {(method, path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == {(route.method.lower(), API + route.path) for route in ROUTES}


def test_every_operation_has_a_name_of_its_own_a_summary_and_answers() -> None:
    names = [operation["operationId"] for _, operation in operations()]
    assert len(set(names)) == len(names)
    for route, operation in operations():
        assert operation["summary"], f"{route.method} {route.path}: its handler needs a docstring"
        assert str(route.status) in operation["responses"]
        assert "default" in operation["responses"]
        assert set(operation["tags"]) <= {tag["name"] for tag in DOCUMENT["tags"]}


def test_the_parameters_of_a_path_are_those_that_it_names() -> None:
    for route, operation in operations():
        given = [each for each in operation["parameters"] if each.get("in") == "path"]
        assert {each["name"] for each in given} == set(re.findall(r"{(\w+)}", route.path)), route.path
        assert all(each["required"] for each in given)


def test_scopes_and_keys_are_said_where_they_count() -> None:
    for route, operation in operations():
        assert operation["x-scope"] == route.scope
        assert (operation.get("security") == []) is (route.scope is None)
        refs = [each.get("$ref") for each in operation["parameters"]]
        takes_key = "#/components/parameters/IdempotencyKey" in refs
        assert takes_key is (route.writes and not route.path.startswith("/hooks/"))
        assert ("requestBody" in operation) is (route.takes is not Nothing or route.path.startswith("/hooks/"))


def test_every_reference_leads_somewhere_and_every_type_is_used() -> None:
    found = set(re.findall(r"'\$ref': '#/components/schemas/([^']+)'", repr(DOCUMENT)))
    assert found == set(DOCUMENT["components"]["schemas"])


@pytest.mark.slow
def test_every_schema_is_one() -> None:
    for schema in [*DOCUMENT["components"]["schemas"].values(), *schemas(DOCUMENT)]:
        Draft202012Validator.check_schema(schema)


def test_documents_say_what_is_always_there() -> None:
    schema = DOCUMENT["components"]["schemas"]["PublishResult"]
    assert schema["required"] == ["name", "receivers"]
    assert DOCUMENT["components"]["schemas"]["PublishRequest"]["required"] == ["name"]


def test_parameters_are_never_null() -> None:
    for _, operation in operations():
        for each in operation["parameters"]:
            assert "null" not in repr(each.get("schema")), each


@pytest.mark.parametrize("root", ["", "/agents"])
def test_it_is_served_as_json_and_as_a_page(root: str) -> None:
    async def story() -> None:
        with killick.open("memory:") as kd:
            app = asgi(kd, identify=lambda _: ("ada", "viewer"))
            transport = httpx.ASGITransport(app, root_path=root)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                document = (await http.get(f"{root}/api/v1/openapi.json")).json()
                page = await http.get(f"{root}/api")
        assert document["paths"] == DOCUMENT["paths"]
        assert document["servers"] == [{"url": root or "/"}]
        assert page.status_code == 200
        for _, operation in operations():
            assert f'id="{operation["operationId"]}"' in page.text

    asyncio.run(story())
