"""What somebody tried who wanted to break the server; each of it worked once."""

from __future__ import annotations

import hmac
import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from starlette.testclient import TestClient

import killick
from killick.client.client import Client
from killick.log import Entry
from killick.model import events as e
from killick.web import idempotency
from killick.web.app import asgi
from killick.web.auth.access import OwnerAccess
from killick.web.hub import FOLLOWERS_MAX
from killick.web.server import CONNECTIONS_MAX
from killick.workers import tokens
from killick.workers.tokens import Person
from web import desk
from web.desk import Desk

SECRET = "123-45-6789"
NOW_US = 1_794_819_600_000_000


@pytest.fixture
def at_desk(tmp_path: Path) -> Iterator[Desk]:
    with desk.desk(tmp_path) as made:
        yield made


@contextmanager
def masked(tmp_path: Path) -> Iterator[Desk]:
    with desk.desk(tmp_path, redact=["ssn"]) as made:
        yield made


def own_logs(kd: Client) -> list[str]:
    """The logs in which answers are kept for keys."""
    days = [idempotency.DAY + day for day in ("2026-11-15", "2026-11-16")]
    return [day for day in days if kd.runtime.store.head(day) is not None]


# whose is what ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "/events", "/export", "/steps", "/state", "/follow"])
def test_a_viewer_does_not_read_the_log_of_the_tokens(tmp_path: Path, path: str) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        _, viewer = tokens.issue(kd.runtime.engine, "vic", "viewer")
        with TestClient(asgi(kd)) as web:
            shows = {"Authorization": f"Bearer {viewer}"}
            answer = web.get(f"/api/v1/runs/killick%3Atokens{path}", headers=shows)
            assert answer.status_code in (403, 404)
            assert "hash" not in answer.text


def test_only_an_admin_lists_the_logs_that_killick_keeps_for_itself(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        cards = {scope: tokens.issue(kd.runtime.engine, scope, scope)[1] for scope in ("viewer", "operator", "admin")}
        with TestClient(asgi(kd)) as web:
            for scope, status in (("viewer", 403), ("operator", 403), ("admin", 200)):
                shows = {"Authorization": f"Bearer {cards[scope]}"}
                answer = web.get("/api/v1/runs?agent=killick.tokens", headers=shows)
                assert answer.status_code == status
                assert ("killick:tokens" in answer.text) == (status == 200)


@pytest.mark.parametrize("name", ["killick:http:2026-11-17", "killick:tokens", "hook:x", "trigger:x"])
def test_a_fork_cannot_take_the_name_of_a_log_of_our_own(at_desk: Desk, name: str) -> None:
    run = at_desk.at(desk.asks, "now or later?")
    at_desk.post(f"/runs/{run}/fork", 422, at="now", id=name)
    at_desk.post(f"/runs/{run}/fork", 422, at="now", id=name, dry_run=True)
    assert at_desk.kd.runtime.store.head(name) is None


def test_a_static_file_of_an_endless_name_is_not_there(at_desk: Desk) -> None:
    for name in ("x" * 300, "%00", "..", "%2e%2e%2fapp.py", "a%5c..%5c..%5capp.py", "killick.css%00"):
        assert at_desk.web.get(f"/static/v/{name}").status_code == 404


NONSENSE: list[Any] = [
    msgspec.structs.replace(Person("x"), scope="root"), Person("", "admin"),
    Person("a\nb", "admin"),
    msgspec.structs.replace(Person("x"), name=5), ("x", "root"), "", 7,
]  # fmt: skip


@pytest.mark.parametrize("told", NONSENSE)
def test_an_app_that_says_nonsense_of_who_asks_lets_nobody_in(told: Any) -> None:
    with (
        killick.open("memory:") as kd,
        TestClient(asgi(kd, identify=lambda request: told), raise_server_exceptions=False) as web,
    ):
        assert web.get("/api/v1/runs").status_code >= 400
        assert web.get("/runs").status_code >= 400


def test_a_server_without_tokens_serves_no_other_site(tmp_path: Path) -> None:
    with (
        killick.open(str(tmp_path / "killick.db")) as kd,
        TestClient(asgi(kd, access=(access := OwnerAccess(kd))), base_url="http://localhost") as web,
    ):
        web.get(str(access.link("http://localhost/")))
        assert web.get("/api/v1/runs").status_code == 200
        for site, mode in (("cross-site", "no-cors"), ("cross-site", "cors"), ("same-site", "cors")):
            other = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
            assert web.get("/api/v1/runs", headers=other).status_code == 403
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert web.get("/runs", headers=link).status_code == 200


# keys ---------------------------------------------------------------------------------------------


def signed(secret: str, name: str, body: bytes, at_us: int = NOW_US) -> dict[str, str]:
    at = str(at_us // 1_000_000)
    signature = hmac.digest(secret.encode(), f"{name}.{at}.".encode() + body, sha256)
    return {
        "webhook-id": name,
        "webhook-timestamp": at,
        "webhook-signature": f"v1,{b64encode(signature).decode()}",
        "Idempotency-Key": "k",
    }


def test_a_stranger_with_a_key_writes_nothing_and_swallows_no_webhook(tmp_path: Path) -> None:
    secret, body = "a-secret-that-the-shop-has-too", b'{"n": 1}'
    with desk.desk(tmp_path, webhooks={"paid": secret}) as at:
        run = at.at(desk.waits)
        hook = f"/api/v1/hooks/paid/runs/{run}"
        assert at.web.post(hook, content=body, headers={"Idempotency-Key": "k"}).status_code == 401
        assert own_logs(at.kd) == []
        for name in ("first", "second"):
            answer = at.web.post(hook, content=body, headers=signed(secret, name, body))
            assert (answer.status_code, answer.json()["id"]) == (200, name)
        assert len(at.kd.runtime.store.inbox(run, name="paid")) == 2
        [bound] = own_logs(at.kd)  # to which address each webhook was sent, and nothing of the key
        assert {each.id for each in at.kd.runtime.store.messages(bound)} == {
            "webhook:paid:first",
            "webhook:paid:second",
        }


def test_a_signed_webhook_may_be_as_deep_as_it_likes(tmp_path: Path) -> None:
    secret, body = "a-secret-that-the-shop-has-too", b'{"a":' * 5_000
    with desk.desk(tmp_path, webhooks={"paid": secret}) as at:
        assert at.web.post("/api/v1/hooks/paid", content=body, headers=signed(secret, "x", body)).status_code == 401


@pytest.mark.parametrize(("one", "other"), [("\uff41b", "ab"), ("a?b", "a%3Fb"), ("a#1", "a#2"), ("a/b", "a\u2044b")])
def test_runs_of_similar_names_have_keys_and_answers_of_their_own(at_desk: Desk, one: str, other: str) -> None:
    for run in (one, other):
        at_desk.at(desk.asks, "?", run=run)
    for run in (one, other):
        path = f"/api/v1/runs/{quoted(run)}/note"
        answer = at_desk.web.post(path, json={"note": "n"}, headers={"Idempotency-Key": f"{one}-key".encode().hex()})
        if answer.status_code == 200:
            assert answer.json()["run"] == run
        else:
            assert answer.json()["code"] in ("key_reused", "run_unknown")


def quoted(run: str) -> str:
    return quote(run, safe="")


# what is not to be seen ---------------------------------------------------------------------------


@killick.agent(name="adversary_child")
async def child(run: killick.Run, what: str) -> str:
    await run.decided("who?", what, options=[what, "nobody"], because=f"since {what}")
    await run.ask(f"Is {what} known?", to="mia")
    return what


@killick.agent(name="adversary_parent")
async def parent(run: killick.Run, person: dict[str, str]) -> str:
    await run.spawn(child, person["ssn"])
    await run.ask("Go on?", to="mia")
    return "x"


@killick.agent(name="adversary_renews")
async def renews(run: killick.Run, person: dict[str, str]) -> str:
    if "ssn" in person:
        await run.renew({"plain": person["ssn"]})
    await run.ask(f"Is {person['plain']} known?", to="mia")
    return "x"


@killick.agent(name="adversary_options")
async def chooses(run: killick.Run, person: dict[str, str]) -> Any:
    return (await run.ask("Which?", to="mia", options=[person["ssn"], "other"])).value


READ = (
    "",
    "/steps",
    "/steps/1",
    "/state",
    "/events",
    "/decisions",
    "/act",
    "/moments",
    "/graph.svg",
    "/export",
)


@pytest.mark.parametrize(("agent", "run"), [(parent, "r/1"), (renews, "r+2")])
def test_what_a_run_handed_on_is_hidden_where_it_went(tmp_path: Path, agent: Any, run: str) -> None:
    with masked(tmp_path) as at:
        at.kd.start(agent, {"ssn": SECRET}, id="r")
        for _ in range(4):
            at.kd.advance_due()
        assert at.kd.runtime.store.head(run) is not None
        for path in READ:
            answer = at.web.get(f"/api/v1/runs/{quoted(run)}{path}")
            assert SECRET not in answer.text, path
        for path in ("/api/v1/inbox", "/inbox", "/api/v1/runs", "/runs"):
            assert SECRET not in at.web.get(path).text, path


def test_one_field_to_redact_may_be_given_as_a_text(tmp_path: Path) -> None:
    with desk.desk(tmp_path, redact="ssn") as at:
        run = at.at(chooses, {"ssn": SECRET})
        assert SECRET not in at.web.get(f"/runs/{run}").text


def test_a_refused_answer_does_not_tell_the_hidden_options(tmp_path: Path) -> None:
    with masked(tmp_path) as at:
        run = at.at(chooses, {"ssn": SECRET})
        refused = at.web.post(f"/api/v1/inbox/{run}:1", json={"verb": "respond", "value": 5},
                              headers={"Idempotency-Key": "k"})  # fmt: skip
        assert refused.status_code == 409
        assert SECRET not in refused.text
        for log in own_logs(at.kd):
            assert SECRET not in at.web.get(f"/api/v1/runs/{log}/export").text


def test_a_question_across_runs_does_not_spell_out_what_is_hidden(tmp_path: Path) -> None:
    with masked(tmp_path) as at:
        at.kd.start(parent, {"ssn": SECRET}, id="r")
        for _ in range(4):
            at.kd.advance_due()

        def found(**asked: str) -> int:
            answer = at.web.get("/api/v1/find", params={"what": "decisions", **asked})
            return len(answer.json()["found"]) if answer.status_code == 200 else 0

        assert found() == 1
        assert found(because=f"since {SECRET[:4]}") == found(because="since 9999") == 0
        assert found(choice=SECRET) == found(choice="999-99-9999") == 0


def test_a_guess_is_said_back_in_the_same_way_right_or_wrong(tmp_path: Path) -> None:
    with masked(tmp_path) as at:
        at.at(chooses, {"ssn": SECRET})
        for guess in (SECRET, "999-99-9999"):
            assert at.get(f"/inbox?to={guess}")["to"] == guess


@pytest.mark.gate(3)
@pytest.mark.parametrize("word", ["run", "runs", "next", "agent", "status", "number", "kind", "counts", "waiting"])
def test_a_hidden_value_that_is_a_word_of_ours_breaks_no_page(tmp_path: Path, word: str) -> None:
    with masked(tmp_path) as at:
        at.at(chooses, {"ssn": SECRET}, run="innocent")
        at.at(chooses, {"ssn": word}, run="evil")
        for path in ("/runs", "/inbox", "/runs/evil", "/runs/innocent", "/runs/evil/act", "/inbox/evil%3A1"):
            assert at.web.get(path).status_code == 200, path
        told = at.get("/runs/evil")
        assert (told["id"], told["status"]) == ("evil", "waiting")
        assert at.get("/inbox")["next"] is None


# what is odd --------------------------------------------------------------------------------------

LENIENT = killick.Contract("lenient", [killick.rules.deny("another_tool", name="never", message="never")])


@killick.agent(name="adversary_accepted", contract=LENIENT)
async def accepted(run: killick.Run) -> str:
    return await run.call(desk.book, "tower")


def test_a_step_that_its_contract_accepts_is_shown(at_desk: Desk) -> None:
    run = at_desk.at(accepted)
    assert at_desk.get(f"/runs/{run}/steps/1")["verdict"]["ruling"] == "accept"
    assert "accept" in at_desk.page(f"/runs/{run}/steps/1")


# what is too much ---------------------------------------------------------------------------------


def opened_many(kd: Client, count: int) -> None:
    """A run that asks so many things at once."""
    opened = [
        (
            Entry(e.StepIntended(at=NOW_US, step=f"{n}", sort="wait", name="ask", digest=f"w{n}")),
            Entry(
                e.WaitOpened(at=NOW_US, step=f"{n}", waits_for="answer", name="ask", to=("mia",), digest=f"w{n}"),
                {"prompt": f"question {n}", "verbs": ["approve", "reject"]},
            ),
        )
        for n in range(1, count + 1)
    ]
    began = Entry(e.RunStarted(at=NOW_US, run="many", agent="desk_asks"), {"input": None})
    kd.runtime.log.begin("many").append(began, *(entry for both in opened for entry in both))


def test_a_step_beside_many_open_questions_does_not_read_each_for_each(
    at_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_many(at_desk.kd, 500)
    reads: list[Any] = []
    row = at_desk.kd.runtime.store.row

    def counted(*given: Any) -> Any:
        reads.append(given)
        return row(*given)

    monkeypatch.setattr(at_desk.kd.runtime.store, "row", counted)
    at_desk.get("/runs/many/steps/1")
    assert len(reads) < 5_000


@pytest.mark.slow
def test_a_run_with_thousands_of_open_questions_is_shown_in_part(at_desk: Desk) -> None:
    opened_many(at_desk.kd, 2_000)
    assert len(at_desk.page("/runs/many")) < 500_000
    assert len(json.dumps(at_desk.get("/runs"))) < 50_000


def test_a_huge_value_makes_no_huge_page(at_desk: Desk) -> None:
    run = at_desk.at(desk.asks, "?")
    at_desk.kd.edit.set(run, big="x" * 3_000_000, by="mia")
    for path in ("", "/act", "/moments", "/events"):
        assert len(at_desk.page(f"/runs/{run}{path}")) < 500_000, path


def test_a_time_beyond_all_calendars_is_shown_somehow(at_desk: Desk) -> None:
    at_desk.kd.runtime.log.begin("far").append(
        Entry(e.RunStarted(at=NOW_US, run="far", agent="desk_asks"), {"input": None}),
        Entry(e.StepIntended(at=NOW_US, step="1", sort="wait", name="ask", digest="w")),
        Entry(
            e.WaitOpened(at=NOW_US, step="1", waits_for="answer", name="ask", to=("mia",), digest="w", deadline=2**62),
            {"prompt": "p", "verbs": ["approve"]},
        ),
    )
    for path in ("/runs/far", "/runs/far/moments", "/runs/far/events", "/inbox"):
        assert at_desk.web.get(path).status_code == 200, path


def test_followers_are_refused_before_the_server_is_full() -> None:
    assert FOLLOWERS_MAX < CONNECTIONS_MAX


# what is said and done ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("set", {"set": {"by": 1}}),
        ("fork", {"at": "now", "id": "r"}),
        ("fork", {"at": "start", "input": 5}),
        ("override", {"step": "1", "output": 5}),
        ("undo", {"step": "1", "settled": "happened"}),
    ],
)
def test_what_is_going_to_be_refused_is_not_foretold(at_desk: Desk, path: str, body: dict[str, Any]) -> None:
    run = at_desk.at(desk.asks, "?")
    dry = at_desk.web.post(f"/api/v1/runs/{run}/{path}", json={**body, "dry_run": True})
    real = at_desk.web.post(f"/api/v1/runs/{run}/{path}", json=body)
    assert dry.status_code == real.status_code >= 400


@pytest.mark.parametrize(
    ("path", "body"),
    [("pause", {}), ("cancel", {}), ("set", {"set": {"a": 1}}), ("note", {"note": 1}), ("rewind", {"to": "start"})],
)
def test_a_quarantined_run_is_foretold_nothing(at_desk: Desk, path: str, body: dict[str, Any]) -> None:
    run = at_desk.at(desk.asks, "?")
    at_desk.kd.runtime.store.quarantine(run, "broken")
    at_desk.post(f"/runs/{run}/{path}", 409, **body)
    at_desk.post(f"/runs/{run}/{path}", 409, **body, dry_run=True)


def test_a_fork_is_not_foretold_to_go_back_beyond_its_own_beginning(at_desk: Desk) -> None:
    run = at_desk.at(desk.asks, "?")
    at_desk.post(f"/runs/{run}/fork", at="now", id="f")
    at_desk.post("/runs/f/rewind", 409, to="@2")
    at_desk.post("/runs/f/rewind", 409, to="@2", dry_run=True)


def test_a_run_that_goes_on_as_another_is_not_foretold_to_be_rewound(at_desk: Desk) -> None:
    at_desk.kd.start(renews, {"ssn": "x"}, id="r")
    for _ in range(3):
        at_desk.kd.advance_due()
    at_desk.post("/runs/r/rewind", 409, to="start")
    at_desk.post("/runs/r/rewind", 409, to="start", dry_run=True)


def test_nobody_is_told_that_they_approved_what_they_rejected(at_desk: Desk) -> None:
    run = at_desk.at(desk.claim, {"name": "ann", "amount": 5})
    at_desk.post(f"/inbox/{run}:1", key="one", verb="reject")
    at_desk.post(f"/inbox/{run}:1", 409, key="two", verb="approve")
    at_desk.kd.advance(run)
    at_desk.post(f"/inbox/{run}:1", 409, key="three", verb="approve")
    other = at_desk.at(desk.asks, "?", run="other")
    at_desk.post(f"/inbox/{other}:1", key="four", verb="respond", value="now")
    at_desk.post(f"/inbox/{other}:1", 409, key="five", verb="respond", value="later")


def test_whoever_starts_a_run_is_on_its_record(at_desk: Desk) -> None:
    at_desk.be("max").post("/runs", 201, agent="desk_asks", input="?", id="r")
    assert "max" in json.dumps(at_desk.get("/runs/r/events"))


def test_the_same_key_after_a_busy_store_is_carried_out(at_desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = at_desk.at(desk.asks, "?")
    at_desk.post(f"/runs/{run}/note", key="other", note=0)

    def busy(*args: Any, **kwargs: Any) -> Any:
        raise killick.errors.StoreBusy("killick.db", 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(at_desk.kd.runtime.store, "append", busy)
        at_desk.post(f"/runs/{run}/note", 503, key="k", note=1)
    at_desk.post(f"/runs/{run}/note", key="k", note=1)
    notes = [each for each in at_desk.kd.events(run) if isinstance(each.event, e.NoteMade)]
    assert len(notes) == 2
