"""The API does what its document says, whatever it is asked: no fault of the server's, no answer that does not fit.

KILLICK_EXAMPLES says how many requests of each kind are made for each operation; a few unless it is given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import killick
from killick.web.addresses import API
from killick.web.app import ROUTES, asgi
from killick.web.openapi import openapi

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("KILLICK_EXAMPLES", "4"))
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
STREAMS = frozenset({f"{API}/live", f"{API}/runs/{{run}}/follow"})
"""Streams do not end by themselves; they have tests of their own."""

OPERATIONS = sorted((route.method, API + route.path) for route in ROUTES if API + route.path not in STREAMS)


@killick.tool(effect="reads")
async def weighed(parcel: str) -> dict[str, Any]:
    return {"parcel": parcel, "grams": 17}


@killick.tool(effect="idempotent")
async def shipped(parcel: str, to: str) -> str:
    if to == "nowhere":
        raise ValueError("there is no such place")
    return f"{parcel} is on its way to {to}"


@killick.agent(name="schema.shipper")
async def shipper(run: killick.Run, order: dict[str, Any]) -> Any:
    await run.plan(["weigh", "agree", "ship"])
    weight = await run.call(weighed, order["parcel"])
    await run.decided("How?", "boat", options=["boat", "train"], because="it is heavy")
    await run.update(grams=weight["grams"])
    if order.get("ask"):
        answer = await run.ask("Ship it?", to="clerks", schema=dict[str, int])
        if not answer.approved:
            return None
    if order.get("wait"):
        await run.wait("paid")
    return await run.call(shipped, order["parcel"], order["to"])


@killick.agent(name="schema.plain")
async def plain(run: killick.Run, number: int) -> int:
    return number


def orders() -> dict[str, dict[str, Any]]:
    return {
        "done": {"parcel": "p1", "to": "Rostock"},
        "failed": {"parcel": "p2", "to": "nowhere"},
        "asks": {"parcel": "p3", "to": "Kiel", "ask": True},
        "waits": {"parcel": "p4", "to": "Kiel", "wait": True},
        "with/slash ü": {"parcel": "p5", "to": "Kiel"},
        "<script>": {"parcel": "<b>p6</b>", "to": "Kiel", "ask": True},
    }


@pytest.fixture(scope="module")
def client() -> Iterator[killick.Client]:
    with killick.open("memory:") as kd:
        for name, order in orders().items():
            with contextlib.suppress(killick.RunWaiting, killick.RunFailed):
                kd.run(shipper, order, id=name)
        kd.start(plain, 1, id="queued")
        kd.start(plain, 2, id="paused")
        kd.pause("paused")
        kd.fork("done", "1:after", id="forked")
        kd.start(plain, 3, id="cancelled")
        kd.cancel("cancelled")
        yield kd


@pytest.fixture(scope="module")
def schema(client: killick.Client) -> Any:
    app = asgi(client, identify=lambda _: ("ada", "admin"), webhooks={"orders": "a secret that is long"})
    made = schemathesis.openapi.from_dict(openapi(ROUTES))
    made.app = app
    return made


def _settings(examples: int) -> Any:
    return settings(
        max_examples=examples,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


KNOWN: dict[str, list[str]] = {
    "run": [*orders(), "queued", "paused", "forked", "cancelled", "nobody"],
    "wait": ["asks:3", "<script>:3", "waits:3", "nobody:1"],
    "name": ["orders", "nothing"],
    "step": ["1", "3", "9"],
    "n": ["0", "3", "99"],
}
"""What is there, for the parameters of paths: generated ones alone would never be found."""


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=[" ".join(each) for each in OPERATIONS])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fit", "misfit"])
@pytest.mark.filterwarnings("ignore")
def test_whatever_is_asked_the_answer_is_as_documented(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]

    @seed(2_026)
    @_settings(EXAMPLES if mode is GenerationMode.POSITIVE else max(1, EXAMPLES // 2))
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def asked(case: Any, data: Any) -> None:
        for name in [name for name in case.path_parameters or {} if name in KNOWN]:
            if mode is GenerationMode.POSITIVE and data.draw(st.integers(0, 4)):
                case.path_parameters[name] = data.draw(st.sampled_from(KNOWN[name]))
        case.call_and_validate(checks=CHECKS)

    with contextlib.suppress(Unsatisfiable):  # nothing about it could be wrong
        asked()
