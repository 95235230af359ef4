"""The access log: each read and write of a run is a line before it is answered; no value or token is in one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from claims import call, move_in
from killick.audit.access_log import AccessLog, first_broken
from killick.client.client import Client
from killick.errors import AccessRefused
from killick.web.app import ROUTES, asgi
from killick.web.middleware import Limits
from killick.workers.tokens import issue
from web.desk import ask, asks

SECRET = "the secret question"


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[Client]:
    with killick.open(str(tmp_path / "killick.db")) as client:
        client.start(asks, SECRET, id="r1")
        client.advance("r1")
        yield client


@contextlib.contextmanager
def looking(kd: Client, path: Path) -> Iterator[tuple[TestClient, str]]:
    """A signed-in client of a server with an access log, and its token."""
    token = issue(kd.runtime.engine, "mia", "operator")[1]
    app = asgi(kd, access_log=path, limits=Limits(rate=1e6, burst=1_000_000))
    with TestClient(app, headers={"Authorization": f"Bearer {token}"}, raise_server_exceptions=False) as web:
        yield web, token


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_who_looked_at_which_run_and_value_is_a_line_without_the_value(kd: Client, tmp_path: Path) -> None:
    log = tmp_path / "access.ndjson"
    with looking(kd, log) as (web, token):
        assert SECRET in web.get("/api/v1/inbox").text
        assert SECRET in web.get("/api/v1/runs/r1/events/1/input").text
        assert web.get("/runs/r1").status_code == 200
        web.get("/api/v1/compare?a=r1&b=r2")
        web.get("/api/v1/find", params={"what": "calls", "where": f'{{"x": "{SECRET}"}}'})
        web.post("/api/v1/inbox/r1:1", json={"verb": "respond", "value": "now", "comment": SECRET})
        web.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"})
    found = lines(log)
    assert [(line["who"], line["method"], line["route"], line["status"]) for line in found] == [
        ("mia", "GET", "/inbox", 200),
        ("mia", "GET", "/runs/{run}/events/{seq}/{name}", 200),
        ("mia", "GET", "/runs/{run}", 200),
        ("mia", "GET", "/compare", 404),
        ("mia", "GET", "/find", found[4]["status"]),
        ("mia", "POST", "/inbox/{wait}", 200),
        (None, "GET", "/runs", 401),
    ]
    assert found[0]["runs"] == ["r1"], "a list names the runs that it showed"
    assert (found[1]["run"], found[1]["seq"], found[1]["name"]) == ("r1", "1", "input")
    assert (found[3]["a"], found[3]["b"]) == ("r1", "r2")
    assert SECRET not in log.read_text()
    assert token not in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_every_route_has_a_line(kd: Client, tmp_path: Path) -> None:
    log = tmp_path / "access.ndjson"
    token = issue(kd.runtime.engine, "mia", "admin")[1]
    app = asgi(kd, access_log=log, limits=Limits(rate=1e6, burst=1_000_000))
    for count, route in enumerate(ROUTES, 1):
        ask(app, route.method, f"/api/v1{route.path}", token, run="r1")
        found = lines(log)
        assert (len(found), found[-1]["route"]) == (count, route.path)
        assert "{run}" not in route.path or found[-1]["run"] == "r1"
    assert app.access_log is not None
    app.access_log.close()


def test_what_cannot_be_logged_is_not_answered(kd: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with looking(kd, tmp_path / "access.ndjson") as (web, _):
        assert SECRET in web.get("/api/v1/inbox").text

        def full(file: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("killick.audit.access_log.os.write", full)
            answer = web.get("/api/v1/inbox")
        assert answer.status_code == 500
        assert SECRET not in answer.text


def test_a_line_that_is_changed_removed_or_inserted_is_found(kd: Client, tmp_path: Path) -> None:
    path, store, clock = tmp_path / "a.ndjson", kd.runtime.store, kd.runtime.clock
    for part in range(2):
        log = AccessLog(path, store, clock)
        for number in range(3):
            log.write({"who": "mia", "run": f"r{part}{number}"})
        log.close()
    whole = path.read_bytes().splitlines(keepends=True)
    assert first_broken(store, whole) == (6, None), "a server that starts again continues the chain"
    assert first_broken(store, [whole[0], whole[1].replace(b"mia", b"max"), *whole[2:]])[1] == 2
    assert first_broken(store, [whole[0], *whole[2:]])[1] == 2
    assert first_broken(store, [whole[0], whole[0], *whole[1:]])[1] == 2
    assert first_broken(store, [b"{}\n", *whole])[1] == 1
    with killick.open(str(tmp_path / "other.db")) as other:
        assert first_broken(other.runtime.store, whole)[1] == 1, "the key is the store's"


def test_the_chain_continues_over_a_file_that_is_rotated_or_torn(kd: Client, tmp_path: Path) -> None:
    path, old, store, clock = tmp_path / "a.ndjson", tmp_path / "a.1", kd.runtime.store, kd.runtime.clock
    log = AccessLog(path, store, clock)
    log.write({"run": "r1"})
    shutil.move(path, old)
    log.write({"run": "r2"})
    assert first_broken(store, [*old.read_bytes().splitlines(), *path.read_bytes().splitlines()]) == (2, None)
    log.close()
    with path.open("ab") as file:
        file.write(b'{"at":"2026')
    log = AccessLog(path, store, clock)
    log.write({"run": "r3"})
    log.close()
    torn = path.read_bytes().splitlines()
    assert json.loads(torn[2])["before"] == json.loads(torn[0])["mac"]


def test_a_file_that_others_may_open_or_that_another_server_writes_is_refused(kd: Client, tmp_path: Path) -> None:
    path, store, clock = tmp_path / "a.ndjson", kd.runtime.store, kd.runtime.clock
    log = AccessLog(path, store, clock)
    with pytest.raises(AccessRefused, match="another server"):
        AccessLog(path, store, clock)
    log.close()
    path.chmod(0o644)
    with pytest.raises(AccessRefused, match="chmod 600"):
        AccessLog(path, store, clock)
    os.symlink(path, tmp_path / "link")
    with pytest.raises(killick.errors.KillickError, match="a link"):
        AccessLog(tmp_path / "link", store, clock)


def test_the_command_verifies_an_access_log(
    kd: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    move_in(tmp_path, monkeypatch)
    log = AccessLog("a.ndjson", kd.runtime.store, kd.runtime.clock)
    for run in ("r1", "r2"):
        log.write({"run": run})
    log.close()
    code, out, _ = call(capsys, "store", "verify", "--access-log", "a.ndjson", "--store", "killick.db")
    assert code == 0
    assert "2 lines" in out
    Path("a.ndjson").write_bytes(Path("a.ndjson").read_bytes().replace(b"r2", b"r3"))
    code, out, _ = call(capsys, "store", "verify", "--access-log", "a.ndjson", "--store", "killick.db")
    assert code == 1
    assert "line 2" in out
