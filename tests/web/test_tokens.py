"""Tokens: what is on record of them, what opens and what does not; and the page and the API for admins."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import killick
from killick.errors import AccessRefused, ValueRefused
from killick.ids import SeededIds
from killick.model import system_events
from killick.store import MemoryStore
from killick.web.app import asgi
from killick.workers.tokens import AGENT, TOKENS, Person, Tokens, issue, revoke, tokens

SECOND = 1_000_000


@pytest.fixture
def clock() -> killick.clock.ManualClock:
    return killick.clock.ManualClock()


@pytest.fixture
def kd(clock: killick.clock.ManualClock) -> Iterator[killick.Client]:
    with killick.Client(MemoryStore(clock=clock), clock=clock, ids=SeededIds(7), behind=False) as client:
        yield client


# what is on record --------------------------------------------------------------------------------


def test_a_token_opens_what_it_was_issued_for(kd: killick.Client) -> None:
    made, text = issue(kd.runtime.engine, "ann", "operator", by="root")
    assert re.fullmatch(r"killick_[0-9a-z]{8}_[A-Za-z0-9_-]{43}", text)
    found = Tokens(kd.runtime.engine).check(text, kd.runtime.clock.now_us())
    assert found == made
    assert found.person == Person("ann", "operator", made.id)


def test_the_secret_is_nowhere_in_the_store(tmp_path: Path) -> None:
    with killick.open(str(tmp_path / "killick.db")) as kd:
        _, text = issue(kd.runtime.engine, "ann", "admin", by="root")
        revoke(kd.runtime.engine, "ann", by="root", because="lost")
        secret = text.split("_", 2)[2]
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()


@pytest.mark.parametrize("change", [(-1, 1), (0, 0), (6, 14), (15, 30)])
def test_a_token_that_is_changed_anywhere_opens_nothing(kd: killick.Client, change: tuple[int, int]) -> None:
    _, text = issue(kd.runtime.engine, "ann")
    at = change[0] % len(text)
    other = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
    assert Tokens(kd.runtime.engine).check(other, kd.runtime.clock.now_us()) is None
    for wrong in ("", "killick", text[:-1], text + "A", text.upper(), f" {text}", text.replace("_", "-"), "é" * 57):
        assert Tokens(kd.runtime.engine).check(wrong, kd.runtime.clock.now_us()) is None


def test_a_revoked_token_opens_nothing_from_the_next_check_on_in_every_process(tmp_path: Path) -> None:
    place = str(tmp_path / "killick.db")
    with killick.open(place) as here, killick.open(place) as there:
        _, text = issue(here.runtime.engine, "ann")
        known = Tokens(there.runtime.engine)
        assert known.check(text, there.runtime.clock.now_us()) is not None
        revoke(here.runtime.engine, "ann", by="root")
        assert known.check(text, there.runtime.clock.now_us()) is None


def test_an_expired_token_opens_nothing(kd: killick.Client, clock: killick.clock.ManualClock) -> None:
    _, text = issue(kd.runtime.engine, "ann", expires_seconds=60)
    assert Tokens(kd.runtime.engine).check(text, clock.now_us() + 60 * SECOND - 1) is not None
    assert Tokens(kd.runtime.engine).check(text, clock.now_us() + 60 * SECOND) is None


def test_a_name_that_two_tokens_bear_is_revoked_by_id(kd: killick.Client) -> None:
    (first, _), (second, text) = issue(kd.runtime.engine, "ann"), issue(kd.runtime.engine, "ann")
    with pytest.raises(AccessRefused, match=f"2 tokens; give one of their ids: {first.id}, {second.id}"):
        revoke(kd.runtime.engine, "ann")
    assert revoke(kd.runtime.engine, first.id).id == first.id
    assert Tokens(kd.runtime.engine).check(text, kd.runtime.clock.now_us()) is not None
    assert revoke(kd.runtime.engine, "ann").id == second.id


def test_revoking_twice_says_it_once(kd: killick.Client) -> None:
    made, _ = issue(kd.runtime.engine, "ann")
    gone = revoke(kd.runtime.engine, made.id, by="bob")
    assert revoke(kd.runtime.engine, made.id, by="eve") == gone
    assert gone.revoked_by == "bob"
    assert len(kd.events(TOKENS)) == 3


@pytest.mark.parametrize("name", ["", "  ", "x" * 81, "a\nb", "\x1b[31m"])
def test_a_name_that_is_none_is_refused_and_nothing_is_written(kd: killick.Client, name: str) -> None:
    with pytest.raises(AccessRefused, match="not a valid token name"):
        issue(kd.runtime.engine, name)
    assert kd.runtime.store.head(TOKENS) is None


def test_what_cannot_be_revoked_names_the_next_move(kd: killick.Client) -> None:
    with pytest.raises(AccessRefused, match="`killick token list` lists them"):
        revoke(kd.runtime.engine, "nobody")
    with pytest.raises(AccessRefused, match="would have expired already"):
        issue(kd.runtime.engine, "ann", expires_seconds=0)


def test_the_log_of_tokens_verifies_is_never_due_and_is_listed_among_no_runs(
    kd: killick.Client, clock: killick.clock.ManualClock
) -> None:
    issue(kd.runtime.engine, "ann", by="root")
    revoke(kd.runtime.engine, "ann", because="lost")
    clock.advance(10**8)
    assert kd.store.verify().problems == []
    assert kd.runtime.store.due(clock.now_us()) == []
    assert kd.list() == []
    row = kd.runtime.store.index(TOKENS)
    assert row is not None
    assert (row.agent, row.status, row.wake_at_us) == (AGENT, "completed", None)
    assert isinstance(kd.runtime.log.event(TOKENS, 2), system_events.TokenIssued)
    assert kd.runtime.log.data(TOKENS, 3) == {"because": "lost"}


def test_no_run_and_no_fork_can_have_the_name_of_a_log_of_killicks_own(kd: killick.Client) -> None:
    @killick.agent
    async def other(run: killick.Run, given: None) -> None: ...

    kd.run(other, None, id="r1")
    for name in (TOKENS, "killick:http:2026-11-15", "hook:x", "trigger:x", "seal"):
        with pytest.raises(ValueRefused, match="choose another"):
            kd.start(other, None, id=name)
        with pytest.raises(ValueRefused, match="choose another"):
            kd.fork("r1", id=name)
    assert tokens(kd.runtime.engine) == []


# by HTTP ------------------------------------------------------------------------------------------


@pytest.fixture
def web(kd: killick.Client) -> Iterator[TestClient]:
    _, text = issue(kd.runtime.engine, "root", "admin")
    with TestClient(asgi(kd), headers={"Authorization": f"Bearer {text}"}) as client:
        yield client


def test_an_admin_makes_a_token_that_is_told_once(web: TestClient, kd: killick.Client) -> None:
    answer = web.post("/api/v1/tokens", json={"name": "ann", "scope": "operator", "expires": "30d"})
    assert answer.status_code == 201
    told = answer.json()
    found = Tokens(kd.runtime.engine).check(told["token"], kd.runtime.clock.now_us())
    assert found is not None
    assert (found.name, found.scope, found.by) == ("ann", "operator", "root")
    assert found.expires_at_us == kd.runtime.clock.now_us() + 30 * 86_400 * SECOND
    for page in ("/api/v1/tokens", "/tokens"):
        shown = web.get(page).text
        assert "ann" in shown
        assert told["token"] not in shown
        assert told["token"].split("_", 2)[2] not in shown
        assert found.hash not in shown


def test_a_token_made_with_a_key_is_kept_for_no_replay(web: TestClient, kd: killick.Client) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = web.post("/api/v1/tokens", json={"name": "ann"}, headers=headers).json()["token"]
    again = web.post("/api/v1/tokens", json={"name": "ann"}, headers=headers).json()["token"]
    assert first != again
    secret = first.split("_", 2)[2].encode()
    for _, head in kd.runtime.store.heads():
        assert all(secret not in message.body for message in kd.runtime.store.messages(head.run))
        assert all(secret not in (row.data or b"") + row.body for row in kd.runtime.store.read(head.run))


def test_an_admin_revokes_a_token_by_its_id(web: TestClient, kd: killick.Client) -> None:
    made, text = issue(kd.runtime.engine, "ann")
    assert web.delete(f"/api/v1/tokens/{made.id}").status_code == 204
    assert Tokens(kd.runtime.engine).check(text, kd.runtime.clock.now_us()) is None
    assert next(each for each in tokens(kd.runtime.engine) if each.id == made.id).revoked_by == "root"
    assert web.delete("/api/v1/tokens/unknown1").json()["code"] == "token_unknown"


@pytest.mark.parametrize("body", [{}, {"name": ""}, {"name": "x", "scope": "root"}, {"name": "x", "expires": "soon"}])
def test_a_token_that_does_not_fit_is_refused_with_a_problem(web: TestClient, body: dict[str, str]) -> None:
    answer = web.post("/api/v1/tokens", json=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
