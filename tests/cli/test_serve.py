"""`killick serve`: what it is given, and what it refuses; what it does is in tests/web."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

import killick
from claims import call, move_in
from killick.cli import context
from killick.definitions.agents import AGENTS
from killick.web import server

Capture = pytest.CaptureFixture[str]
LINK: Final = "http://127.0.0.1:8300/login?key=k"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move_in(tmp_path, monkeypatch)
    with killick.open("killick.db"):
        pass


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server was told, which says at once that it is ready and ends."""
    told: dict[str, Any] = {}

    async def stand_in(client: killick.Client, **options: Any) -> None:
        await asyncio.sleep(0)
        told.update(options)
        options["ready"]("http://127.0.0.1:8300/", "http://k-1.localhost:8300/", LINK)

    monkeypatch.setattr(server, "serve", stand_in)
    return told


def test_it_prints_its_address_and_the_link_that_signs_in(capsys: Capture, served: dict[str, Any]) -> None:
    said = f"serving killick.db at http://127.0.0.1:8300/\nsign in, once, by {LINK}\n"
    assert call(capsys, "serve") == (0, said, "")
    assert (served["host"], served["port"], served["worker"]) == ("127.0.0.1", 8300, False)
    code, out, _ = call(capsys, "serve", "--json")
    assert code == 0
    assert '"url":"http://127.0.0.1:8300/"' in out
    assert f'"link":"{LINK}"' in out


def test_options_reach_the_server(
    capsys: Capture, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ORDERS_SECRET", "whsec_c2VjcmV0")
    options = ("--redact", "ssn", "--redact", "a.b", "--webhook", "order.created=ORDERS_SECRET", "--host-name", "box")
    code, out, err = call(capsys, "serve", "--host", "::1", "--port", "0", *options)
    assert (code, err) == (0, "")
    place = "http://127.0.0.1:8300/api/v1/hooks/order.created"
    assert f"\nwebhooks of order.created at {place}\n" in out
    assert f'"webhooks":{{"order.created":"{place}"}}' in call(capsys, "serve", "--json", *options)[1]
    assert served["redact"] == ("ssn", "a.b")
    assert served["webhooks"] == {"order.created": "env:ORDERS_SECRET"}, "the secret itself is not handed round"
    assert served["host_names"] == ("box",)


def test_fields_to_redact_may_stand_in_the_settings(capsys: Capture, served: dict[str, Any], tmp_path: Path) -> None:
    Path("pyproject.toml").write_text('[tool.killick]\nstore = "killick.db"\nredact = ["ssn", "card.number"]\n')
    assert call(capsys, "serve")[0] == 0
    assert served["redact"] == ("ssn", "card.number")
    Path("pyproject.toml").write_text('[tool.killick]\nstore = "killick.db"\nredact = "ssn"\n')
    code, _, err = call(capsys, "serve")
    assert code == 2
    assert "[tool.killick] redact is 'ssn'; give a list of fields" in err


def test_without_the_extra_it_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "find_spec", lambda name: None if name == "starlette" else object())
    code, _, err = call(capsys, "serve")
    assert code == 2
    assert err == "killick: the dashboard needs its extra (starlette missing); pip install '.[web]' in a clone\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--webhook", "order.created"), "write it as --webhook order.created=ORDERS_SECRET"),
        (("--webhook", "a=NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE: not in the environment"),
        (("--port", "70000"), "--port"),
        (("--store", "nothing.db"), "no store here"),
        (("--host", "192.0.2.1"), "others can reach this address"),
    ],
)
def test_what_cannot_be_served_is_one_line(capsys: Capture, words: tuple[str, ...], says: str) -> None:
    code, out, err = call(capsys, "serve", *words)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_worker_without_agents_is_refused(capsys: Capture) -> None:
    before = dict(AGENTS.declared)
    AGENTS.declared.clear()
    try:
        code, _, err = call(capsys, "serve", "--worker")
    finally:
        AGENTS.declared.clear()
        AGENTS.declared.update(before)
    assert code == 2
    assert "name the app: `killick serve app.py --worker`" in err
