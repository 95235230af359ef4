"""A run, a step, a wait and an event have one schema, on the command line, over HTTP and in webhooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from starlette.testclient import TestClient

import document_reference as reference
import killick
from claims import call, move_in, open_office
from killick.clock import microseconds, timestamp
from killick.history.listing import RunSummary
from killick.presenting import documents, runs
from killick.presenting.encoder import json_name
from killick.web.app import asgi
from killick.web.auth.access import Identified
from killick.workers.hooks import HookEvent
from killick.workers.webhooks import document as webhook_document

ROOT: Final = Path(__file__).resolve().parents[2]
TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    move_in(tmp_path, monkeypatch)
    open_office()
    return tmp_path


@pytest.fixture
def api(office: Path) -> Iterator[TestClient]:
    with killick.open("killick.db") as kd:
        yield TestClient(
            asgi(kd, access=Identified(kd, lambda request: ("mia", "operator"))), base_url="http://localhost"
        )


def printed(capsys: Capture, *words: str) -> Any:
    found = call(capsys, *words, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def given(api: TestClient, path: str) -> Any:
    answer = api.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def names(kind: type[msgspec.Struct]) -> list[str]:
    return [json_name(field.encode_name) for field in msgspec.structs.fields(kind)]


def alike(kind: type[msgspec.Struct], one: Any, other: Any, *, but: str = "") -> None:
    """Both documents have every field of a type, with the same value."""
    fields = [name for name in names(kind) if name != but]
    assert {name: one[name] for name in fields} == {name: other[name] for name in fields}


def steps_of(entries: list[Any]) -> Iterator[Any]:
    for entry in entries:
        if entry["type"] == "step":
            yield entry
            yield from steps_of(entry["entries"])


RUNS: Final = ("claim_17", "claim_18")


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_the_same_document_on_the_command_line_and_over_http(
    api: TestClient, capsys: Capture, run: str
) -> None:
    alike(runs.Run, printed(capsys, "show", run), given(api, f"/runs/{run}"))


@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_the_same_document_on_the_command_line_and_over_http(
    api: TestClient, capsys: Capture, run: str
) -> None:
    steps = list(steps_of(printed(capsys, "show", run)["entries"]))
    assert len(steps) > 8
    for step in steps:
        is_open = step["ended_at"] is None
        told = given(api, f"/runs/{run}/steps/{step['number']}")
        alike(documents.Step, step, told, but="duration_seconds" if is_open else "")
        assert told["type"] == step["type"] == "step"


def test_a_run_of_a_listing_is_the_same_document_on_the_command_line_and_over_http(
    api: TestClient, capsys: Capture
) -> None:
    listed, given_ = printed(capsys, "ps"), given(api, "/runs")["runs"]
    assert [each["id"] for each in listed] == [each["id"] for each in given_]
    for one, other in zip(listed, given_, strict=True):
        alike(RunSummary, one, other)


def test_a_wait_is_the_same_document_in_the_inbox_in_its_run_and_over_http(api: TestClient, capsys: Capture) -> None:
    listed, given_ = printed(capsys, "inbox"), given(api, "/inbox")["questions"]
    assert [each["id"] for each in listed] == [each["id"] for each in given_] != []
    for one, other in zip(listed, given_, strict=True):
        alike(documents.Question, one, other)
        [of_run] = given(api, f"/runs/{one['run']}")["waits"]
        alike(documents.Wait, one, of_run)
        [of_step] = given(api, f"/runs/{one['run']}/steps/{one['step']}")["waits"]
        alike(documents.Wait, of_run, {**of_step, "default": None})


def test_an_event_is_the_same_document_on_the_command_line_over_http_and_in_a_webhook(
    api: TestClient, capsys: Capture
) -> None:
    lines = call(capsys, "show", "claim_17", "--log", "--json").out.splitlines()
    printed_ = [json.loads(line) for line in lines]
    assert printed_ == given(api, "/runs/claim_17/events?after=0&limit=1000")["events"]
    with killick.open("killick.db") as kd:
        for one in printed_:
            told = _Told(one)
            event = HookEvent(kd.runtime.engine, told, agent="review", hook="ops", attempt=1, sent_at=0)  # type: ignore[arg-type]
            alike(documents.Event, one, json.loads(msgspec.json.encode(webhook_document(event))))


class _Told:
    def __init__(self, event: Any) -> None:
        self.kind, self.run, self.seq = event["kind"], event["run"], event["seq"]


def test_every_time_is_rfc_3339_with_microseconds_and_no_field_is_in_microseconds(
    api: TestClient, capsys: Capture
) -> None:
    found = [printed(capsys, "show", "claim_17"), printed(capsys, "ps"), printed(capsys, "inbox")]
    found += [
        given(api, path) for path in ("/runs/claim_17", "/runs", "/inbox", "/workers", "/health", "/compare?a=claim_17")
    ]
    for name, value in _fields(found):
        assert not name.endswith("_us")
        if name.endswith("_at") or name in ("since", "until", "deadline"):
            assert value is None or TIME.fullmatch(value), (name, value)


def _fields(node: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list):
        for each in node:
            yield from _fields(each)
    if isinstance(node, dict):
        for name, value in node.items():
            if name not in ("fields", "data", "input", "arguments", "output", "context"):
                yield name, value
                yield from _fields(value)


@pytest.mark.parametrize("at_us", [0, 1, 1_750_000_000_000_000, 253_402_300_799_999_999])
def test_a_timestamp_is_read_back(at_us: int) -> None:
    assert TIME.fullmatch(timestamp(at_us))
    assert microseconds(timestamp(at_us)) == at_us


def test_a_time_beyond_all_calendars_is_the_last_that_can_be_written() -> None:
    assert timestamp(10**18) == "9999-12-31T23:59:59.999999Z"
    assert timestamp(-1) == "1970-01-01T00:00:00.000000Z"


def test_the_page_of_the_documents_is_what_their_types_say() -> None:
    written = (ROOT / reference.PAGE).read_text(encoding="utf-8")
    if written != reference.page():
        pytest.fail(f"{reference.PAGE} is stale; write it again with python tests/document_reference.py", pytrace=False)
