"""Redaction: what rules name is seen nowhere, and without rules nothing is looked at."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from starlette.testclient import TestClient

import killick
from killick.errors import RunWaiting
from killick.model.events import from_text, to_text
from killick.store import MemoryStore
from killick.web.app import ROUTES, asgi
from killick.web.redaction import HIDDEN, Redaction, _Finder
from killick.workers.tokens import issue

SSN = "123-45-6789"


@killick.tool(effect="reads")
async def look_up(ssn: str, pin: int) -> dict[str, Any]:
    return {"found": f"{ssn} is known", "again": {"of": [ssn]}, "code": pin, "age": 41}


@killick.agent
async def clerk(run: killick.Run, person: dict[str, Any]) -> str:
    await run.call(look_up, person["ssn"], person["pin"])
    await run.update(seen=person["ssn"])
    answer = await run.ask(f"Is {person['ssn']} right?", to="managers")
    return str(answer.value)


@pytest.fixture
def kd() -> Iterator[killick.Client]:
    with killick.Client(MemoryStore(), behind=False) as client:
        with pytest.raises(RunWaiting):
            client.run(clerk, {"ssn": SSN, "pin": 90_210, "age": 41}, id="r1")
        yield client


def test_a_named_field_is_hidden_in_any_document(kd: killick.Client) -> None:
    mask = Redaction(kd, ["ssn", "person.age"])
    shown = mask.over({"steps": [{"arguments": {"ssn": ["a", {"b": 1}], "age": 41}}], "person": {"age": 41}}, run="r1")
    assert shown == {
        "steps": [{"arguments": {"ssn": [HIDDEN, {"b": HIDDEN}], "age": 41}}],
        "person": {"age": HIDDEN},
    }


def test_its_values_are_hidden_wherever_else_they_stand_in_texts_of_the_run(kd: killick.Client) -> None:
    mask = Redaction(kd, ["ssn"])
    document = {
        "run": "r1",
        "prompt": f"Is {SSN} right?",
        "call": f'{{"who": "{SSN}", "n": 1}}',
        SSN: "as a name",
        "error": f"ValueError: <{SSN}>",
        "part": f"x{SSN}",
    }
    shown = mask.over(document)
    assert shown["prompt"] == f"Is {HIDDEN} right?"
    assert shown["call"] == '{"who":"(redacted)","n":1}'
    assert shown[HIDDEN] == "as a name"
    assert shown["error"] == f"ValueError: <{HIDDEN}>"
    assert shown["part"] == f"x{SSN}", "a longer word is another word"


def test_a_number_is_hidden_where_it_is_long_enough_to_be_one_and_no_time(kd: killick.Client) -> None:
    shown = Redaction(kd, ["pin", "age"]).over({"run": "r1", "code": 90_210, "count": 41_000, "seq": 41, "yes": True})
    assert shown == {"run": "r1", "code": HIDDEN, "count": 41_000, "seq": 41, "yes": True}


def test_thousands_of_values_are_found_as_one_pattern_would_find_them() -> None:
    seed = random.Random(17)
    signs = "ab1-_ .@é/"

    def text(chars: int) -> str:
        return "".join(seed.choices(signs, k=chars))

    for _ in range(300):
        values = sorted({text(seed.randint(3, 6)) for _ in range(20)}, key=len, reverse=True)
        as_words = rf"(?<!\w)(?:{'|'.join(map(re.escape, values))})(?!\w)"
        document = text(200)
        assert _Finder(frozenset(values)).hidden(document) == re.sub(as_words, HIDDEN, document)


def test_what_a_run_says_later_is_hidden_as_soon_as_it_is_on_record(kd: killick.Client) -> None:
    mask = Redaction(kd, ["secret_word"])
    assert mask.over({"run": "r1", "text": "it is swordfish"})["text"] == "it is swordfish"
    kd.send("r1", "hint", {"secret_word": "swordfish"})
    assert mask.over({"run": "r1", "text": "it is swordfish"})["text"] == f"it is {HIDDEN}"


def test_ids_of_runs_stay_for_everything_is_found_by_them(kd: killick.Client) -> None:
    with pytest.raises(RunWaiting):
        kd.run(clerk, {"ssn": "r2", "pin": 1}, id="r2")
    shown = Redaction(kd, ["ssn"]).over({"run": "r2", "parent": "r2", "text": "r2"})
    assert shown["run"] == "r2"
    assert shown["parent"] == "r2"


def test_without_rules_the_very_same_document_comes_back_and_no_store_is_read(kd: killick.Client) -> None:
    kd.close()
    document = {"run": "r1", "ssn": SSN}
    assert Redaction(kd).over(document) is document


def test_a_log_is_read_once_however_often_it_is_shown(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, read = Redaction(kd, ["ssn"]), []
    monkeypatch.setattr(
        kd.runtime.log,
        "read",
        lambda run, **asked: read.append(asked) or killick.log.Log.read(kd.runtime.log, run, **asked),
    )
    for _ in range(5):
        assert mask.over({"run": "r1", "text": SSN})["text"] == HIDDEN
    assert len(read) == 1
    kd.edit.note("r1", "more", by="ann")
    assert mask.over({"run": "r1", "text": SSN})["text"] == HIDDEN
    assert len(read) == 2
    assert read[1]["after"] > 0


@killick.agent
async def assistant(run: killick.Run, word: str) -> str:
    return f"{word} is filed"


@killick.agent
async def chief(run: killick.Run, person: dict[str, str]) -> None:
    if "ssn" in person:
        await (await run.spawn(assistant, person["ssn"], id="below")).result()
        await run.renew({"named": person["ssn"]})


def test_what_a_run_gave_to_its_children_and_to_what_it_goes_on_as_is_hidden_there_too(kd: killick.Client) -> None:
    kd.run(chief, {"ssn": SSN}, id="above")
    mask = Redaction(kd, ["ssn"])
    for run in ("below", "above+2"):
        assert mask.over({"run": run, "text": f"of {SSN}"})["text"] == f"of {HIDDEN}"


@pytest.mark.parametrize("word", ["run", "next", "status", "waiting", "arguments", "number", "steps", "kind"])
def test_a_value_that_is_a_word_of_ours_breaks_no_document(kd: killick.Client, word: str) -> None:
    with pytest.raises(RunWaiting):
        kd.run(clerk, {"ssn": word, "pin": 1}, id="odd")
    _, text = issue(kd.runtime.engine, "root", "admin")
    with TestClient(asgi(kd, redact=["ssn"]), headers={"Authorization": f"Bearer {text}"}) as web:
        for path in ("/inbox", "/runs", "/runs/odd", "/api/v1/runs/odd/steps/1", "/runs/odd/act"):
            assert web.get(path).status_code == 200, path
        told = web.get("/api/v1/runs/odd").json()
        assert (told["id"], told["status"]) == ("odd", "waiting")
        assert web.get("/api/v1/runs/odd/steps/1").json()["arguments"]["ssn"] == HIDDEN


def test_nobody_learns_by_asking_whether_they_guessed_right(kd: killick.Client) -> None:
    _, text = issue(kd.runtime.engine, "root", "admin")
    with TestClient(asgi(kd, redact=["ssn"]), headers={"Authorization": f"Bearer {text}"}) as web:
        for guess in (SSN, "123-45-6780"):
            assert web.get("/api/v1/inbox", params={"to": guess}).json()["to"] == guess
            for asked in ({"because": guess}, {"question": guess}, {"choice": guess}, {"where": f"ssn={guess}"}):
                answer = web.get("/api/v1/find", params={"what": "decisions", **asked})
                assert (answer.status_code, answer.json()["code"]) == (403, "redacted")


PLACES: Final = {"{run}": "r1", "{step}": "1", "{seq}": "3", "{name}": "arguments", "{n}": "1", "{wait}": "r1:2"}


def guessable(kd: killick.Client) -> set[str]:
    """Everything by which a reader who guesses a value would know that it was right, in each form that is written."""
    rows = [row for run in ("r1",) for row in kd.runtime.log.rows(run)]
    bodies = [msgspec.json.decode(row.body) for row in rows]
    for body in bodies:
        if body.get("sort") == "wait":
            del body["identity"]  # of the form of the answer, which is code
    named = {body[name] for body in bodies for name in ("digest", "identity", "data") if body.get(name)}
    found = {to_text(row.hash) for row in rows} | named
    digits = {body["key"].rpartition(":")[2] for body in bodies if "key" in body}
    assert named
    assert digits
    return found | {from_text(each).hex() for each in found} | digits


@pytest.mark.slow
def test_no_page_no_document_and_no_stream_shows_a_hash_of_what_is_redacted(kd: killick.Client) -> None:
    _, text = issue(kd.runtime.engine, "root", "admin")
    told = guessable(kd)

    def showing(*redact: str) -> list[str]:
        app = asgi(kd, redact=redact)
        with TestClient(app, headers={"Authorization": f"Bearer {text}"}) as web:
            pages = {path: web.get(path).text for path in asked()}
            found = [path for path, page in pages.items() if any(each in page for each in told)]
            stream = app.app.app.state.context.hub._paged("r1", 0).frames.decode()
            return found + ["follow"] * any(each in stream for each in told)

    assert len(showing()) > 5, "what is not redacted is there to be seen"
    assert showing("ssn") == []


def test_who_may_answer_does_so_by_the_digest_that_they_were_shown(kd: killick.Client) -> None:
    _, text = issue(kd.runtime.engine, "root", "admin")
    with TestClient(asgi(kd, redact=["ssn"]), headers={"Authorization": f"Bearer {text}"}) as web:
        [question] = web.get("/api/v1/inbox").json()["questions"]
        assert question["digest"] not in guessable(kd)
        old = {"verb": "approve", "digest": "A" * 43}
        assert web.post("/api/v1/inbox/r1:2", json=old).status_code == 409
        answer = web.post("/api/v1/inbox/r1:2", json={"verb": "approve", "digest": question["digest"]})
        assert answer.status_code == 200, answer.text


def test_hashes_in_values_of_agents_stay_for_they_are_sent_back_as_they_were_shown(kd: killick.Client) -> None:
    document = {"run": "r1", "arguments": {"image": "a" * 64}, "hash": "a" * 64, "seal": {"root": "b" * 64}}
    shown = Redaction(kd, ["ssn"]).over(document)
    assert (shown["arguments"], shown["seal"]) == (document["arguments"], document["seal"])
    assert shown["hash"] != document["hash"]
    assert len(shown["hash"]) == 64
    assert Redaction(kd, ["ssn"]).over(document) == shown, "the same for the same, in every server of the store"


def asked() -> list[str]:
    """Every page and every document about the run."""
    found = [
        path
        for route in ROUTES
        if route.method == "GET" and route.media != "text/event-stream"
        for path in (f"/api/v1{route.path}", *route.pages)
    ]
    for name, place in PLACES.items():
        found = [path.replace(name, place) for path in found]
    return found


@pytest.mark.slow
def test_no_page_and_no_document_shows_what_is_redacted(kd: killick.Client) -> None:
    _, text = issue(kd.runtime.engine, "root", "admin")

    def showing(*redact: str) -> list[str]:
        with TestClient(asgi(kd, redact=redact), headers={"Authorization": f"Bearer {text}"}) as web:
            return [path for path in asked() if SSN in web.get(path).text]

    assert len(showing()) > 15, "what is not redacted is there to be seen"
    assert showing("ssn") == []


def test_a_hidden_value_that_is_a_part_of_a_time_breaks_no_time(kd: killick.Client) -> None:
    at = "2025-06-15T15:06:40.000000Z"
    with pytest.raises(RunWaiting):
        kd.run(clerk, {"ssn": "2025", "pin": 1, "at": at}, id="r2")
    shown = Redaction(kd, ["ssn", "at"]).over({"run": "r2", "started_at": at, "said": at, "value": {"since": at}})
    assert shown == {"run": "r2", "started_at": at, "said": HIDDEN, "value": {"since": HIDDEN}}
