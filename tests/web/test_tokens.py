"""Tokens: what is on record of them, what opens and what does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from killick.errors import AccessRefused, ValueRefused
from killick.ids import SeededIds
from killick.model import system_events
from killick.store import MemoryStore
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
    assert found.person == Person("ann", "operator")


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
