"""`killick proxy`: what it is given, and what it refuses; what it does is in the other files here."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

import killick
from claims import call
from killick.cli import context
from killick.proxy import server

Capture = pytest.CaptureFixture[str]
AT = ("--upstream", "https://api.example.com")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KILLICK_STORE", raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server was told, which says at once that it is ready and ends."""
    told: dict[str, Any] = {}

    async def stand_in(client: killick.Client, upstream: str, **options: Any) -> None:
        await asyncio.sleep(0)
        told.update(options, upstream=upstream)
        options["ready"]("http://127.0.0.1:8787")

    monkeypatch.setattr(server, "serve", stand_in)
    return told


def test_it_makes_a_store_and_says_where_to_point_clients(capsys: Capture, served: dict[str, Any]) -> None:
    code, out, err = call(capsys, "proxy", *AT)
    assert (code, err) == (0, "made a new store: killick.db\n")
    assert out.splitlines() == [
        "proxying https://api.example.com at http://127.0.0.1:8787, recording to killick.db",
        "  OPENAI_BASE_URL=http://127.0.0.1:8787/v1",
        "  ANTHROPIC_BASE_URL=http://127.0.0.1:8787",
    ]
    assert (served["port"], served["host"]) == (8787, "127.0.0.1")
    code, out, _ = call(capsys, "proxy", *AT, "--json")
    assert (code, '"url":"http://127.0.0.1:8787"' in out) == (0, True)


def test_options_reach_the_server(capsys: Capture, served: dict[str, Any]) -> None:
    words = ("--agent", "mender", "--timeout", "5", "--body-mb", "1", "--port", "0", "--host", "::1")
    assert call(capsys, "proxy", *AT, *words)[0] == 0
    assert (served["agent"], served["timeout_seconds"], served["body_bytes_max"]) == ("mender", 5, 1 << 20)
    assert (served["port"], served["host"]) == (0, "::1")


def test_without_the_extra_it_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "find_spec", lambda name: None if name == "httpx" else object())
    code, _, err = call(capsys, "proxy", *AT)
    assert (code, err) == (2, "killick: the proxy needs its extra (httpx missing); pip install '.[proxy]' in a clone\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "proxy: needs URL"),
        (("--upstream", "api.openai.com"), "is not the address of a provider; write it as https://api.openai.com"),
        (("--upstream", "ftp://x"), "is not the address of a provider"),
        (("--upstream", "https://me:secret@x.example"), "x.example: has a user or password in its URL"),
        ((*AT, "--body-mb", "0"), "--body-mb: "),
        ((*AT, "--agent", "killick.x"), "no name for these runs"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys: Capture, words: tuple[str, ...], says: str) -> None:
    code, _, err = call(capsys, "proxy", *words, *(("--store", "memory:") if words else ()))
    assert code == 2
    assert says in err
    assert "secret@" not in err
    assert len(err.splitlines()) == 1


def test_a_port_that_is_taken_is_refused_in_one_line(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = call(capsys, "proxy", *AT, "--port", port, "--store", "memory:")
    assert code == 2
    assert err.startswith(f"killick: 127.0.0.1:{port}: cannot be served on (Address already in use")
    assert err.endswith("; name another --host or --port\n")
