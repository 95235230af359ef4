"""`killick store doctor` says on one screen what is wrong and what to type, and its exit code says whether."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import killick
from killick.cli.main import main
from killick.store import SqliteStore
from killick.store.sqlite.file import SqliteFile

Capture = pytest.CaptureFixture[str]
APP = """
import killick

@killick.agent(name="doctored")
async def doctored(run: killick.Run, n: int) -> int:
    await run.ask("Right?")
    return n
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an app and a store, in which `r` waits for an answer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "app.py").write_text(APP)
    assert main(["run", "app.py:doctored", "--input", "1", "--id", "r"]) == 3
    return tmp_path


def did(capsys: Capture, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["store", "doctor", *words]) == code, capsys.readouterr()
    out, err = capsys.readouterr()
    assert err == ""
    return out


def data(capsys: Capture, *words: str, code: int = 0) -> Any:
    return json.loads(did(capsys, *words, "--json", code=code))


def test_the_doctor_names_a_file_of_secrets_that_others_may_read(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["store", "new-key", "link.secret"]) == 0
    monkeypatch.setenv("KILLICK_LINK_SECRET", "file:link.secret")
    assert "secrets" in did(capsys)
    (here / "link.secret").chmod(0o644)
    [wrong] = [each for each in data(capsys, code=1)["conditions"] if each["wrong"]]
    assert wrong["name"] == "secrets"
    assert "chmod 600" in wrong["wrong"]
    assert main(["store", "new-key", "master.key"]) == 0
    (here / "master.key").chmod(0o644)
    monkeypatch.setenv("KILLICK_KEYS", "master.key")
    capsys.readouterr()
    assert main(["store", "doctor"]) == 1
    assert "chmod 600" in capsys.readouterr().out


def test_a_new_key_is_random_private_and_never_overwritten(here: Path, capsys: Capture) -> None:
    keys = set[bytes]()
    for name in ("one.key", "two.key"):
        assert main(["store", "new-key", name]) == 0
        assert (here / name).stat().st_mode & 0o777 == 0o600
        keys.add(bytes.fromhex((here / name).read_text()))
    assert [len(each) for each in keys] == [32, 32]
    before = (here / "one.key").read_text()
    (here / "link.key").symlink_to(here / "nowhere")
    for name in ("one.key", "link.key"):
        assert main(["store", "new-key", name]) == 2
    assert (here / "one.key").read_text() == before
    assert not (here / "nowhere").exists()


def test_a_healthy_store_is_told_on_one_screen(capsys: Capture) -> None:
    out = did(capsys)
    assert out.startswith("killick.db  store_")
    assert "✓ journal      WAL\n" in out
    assert "✓ runs         1 waiting\n" in out
    assert out.splitlines()[-1] == "✓ nothing is wrong; killick store verify proves the record"
    assert len(out.splitlines()) < 24
    assert all(len(line) <= 80 for line in out.splitlines())
    found = data(capsys)
    assert (found["wrong"], found["runs"], found["findings"]) == (0, {"waiting": 1}, [])
    assert {each["name"] for each in found["conditions"]} >= {"engine", "durability", "file system", "clock"}


def test_a_run_that_was_left_is_told_with_what_to_type(capsys: Capture) -> None:
    store = SqliteStore("killick.db", clock=killick.clock.ManualClock())
    store.lease("r", "worker-1", seconds=float("inf"))
    assert "nothing is wrong" in did(capsys), "its process lives: this one"
    store.close()
    with killick.open(
        "killick.db", clock=killick.clock.ManualClock(killick.clock.SystemClock().now_us() + 90_000_000)
    ) as kd:
        assert [row.run for row in kd.runtime.store.due(kd.runtime.clock.now_us())] == ["r"]


def test_a_run_that_was_set_apart_is_told_with_its_reason_and_the_next_move(capsys: Capture) -> None:
    with killick.open("killick.db") as kd:
        kd.runtime.store.quarantine(
            "r", "at event 3 somebody touched it, and it is long since anybody " + "looked " * 20
        )
    out = did(capsys, code=1)
    assert "✗ 1 run fails verification and is quarantined\n" in out
    assert "    r  doctored  " in out
    assert "\n  killick store repair r\n" in out
    assert out.splitlines()[-1] == "✗ 1 thing is wrong"
    assert all(len(line) <= 80 for line in out.splitlines())
    [finding] = data(capsys, code=1)["findings"]
    assert (finding["reason"], finding["next"]) == ("broken", ["killick store repair r"])


def test_what_is_wrong_with_the_file_is_told_beside_it(capsys: Capture, here: Path) -> None:
    (here / "killick.db").chmod(0o666)
    out = did(capsys, code=1)
    assert "✗ permissions  -rw-rw-rw-: other users may read or change it; chmod" in out


def test_commands_to_type_name_the_store_and_the_app(capsys: Capture, here: Path) -> None:
    (here / "killick.db").rename(here / "other.db")
    with killick.open("other.db", clock=killick.clock.ManualClock()) as kd:
        kd.runtime.log.create(killick.model.events.RunStarted(at=1, run="q", agent="doctored"), {"input": 1})
    [finding] = data(capsys, "--store", "other.db", "--app", "app.py", code=1)["findings"]
    assert finding["next"] == [
        "killick worker app.py --store other.db",
        "killick run --id q --app app.py --store other.db",
    ]

    [finding] = data(capsys, "--store", "other.db", code=1)["findings"]
    assert finding["next"] == [
        "killick worker app.py --store other.db",
        "killick run app.py:doctored --id q --store other.db",
    ], "where no app is named, it is looked for here"


@pytest.mark.slow
def test_runs_of_agents_that_the_app_does_not_declare_are_told(capsys: Capture, here: Path) -> None:
    (here / "other.py").write_text(APP.replace("doctored", "another"))
    done = subprocess.run(
        [sys.executable, "-m", "killick", "store", "doctor", "--app", "other.py"],
        env={**os.environ, "COLUMNS": "200"}, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "✗ 1 run is of an agent that the app does not declare\n" in done.stdout
    assert "  killick ps --agent doctored\n" in done.stdout


def test_a_store_on_a_full_disk_is_examined_as_it_is(
    capsys: Capture, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a process that has it open, SQLite needs room for its shared memory, and there is none."""

    def full(*_: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    before = (here / "killick.db").read_bytes()
    monkeypatch.setattr(SqliteFile, "_tune", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    out = did(capsys, code=1)
    assert "✓ journal      unknown\n" in out
    assert "✓ file         whole, by a quick check\n" in out
    assert "✗ free         0 B on its device" in out
    assert "✓ runs         1 waiting\n" in out
    assert {each["name"] for each in data(capsys, code=1)["conditions"] if each["wrong"]} == {"durability", "free"}
    assert (here / "killick.db").read_bytes() == before


def test_a_store_that_cannot_be_looked_at_is_wrong(capsys: Capture, here: Path) -> None:
    (here / "killick.db").write_bytes(b"SQLite format 3\x00" + b"\xff" * 4_000)
    assert did(capsys, code=1).startswith("✗ killick.db  cannot be examined: ")
    assert data(capsys, code=1)["wrong"] == 1


def test_an_effect_in_doubt_is_named_while_it_waits_for_a_person(capsys: Capture, here: Path) -> None:
    (here / "doubt.py").write_text(
        "import os\nimport killick\n\n@killick.tool\nasync def pay() -> None:\n    os._exit(1)\n\n"
        "@killick.agent\nasync def doubtful(run: killick.Run) -> None:\n    await run.call(pay)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "killick", "run", "doubt.py", "--id", "d"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    assert main(["run", "doubt.py", "--id", "d"]) == 3
    out = did(capsys, code=1)
    assert "✗ 1 effect is in doubt, and waits for a person\n" in out
    assert "\n  killick inbox\n" in out
    [finding] = data(capsys, code=1)["findings"]
    assert (finding["reason"], finding["runs"][0]["about"]) == ("doubt", "step 1")


def test_secrets_lists_the_credentials_on_record_without_their_values(capsys: Capture, here: Path) -> None:
    capsys.readouterr()
    assert main(["store", "doctor", "--secrets"]) == 0
    with killick.open(str(here / "killick.db")) as kd:
        kd.send("r", "login", {"headers": {"Authorization": "Bearer HDRTOKEN0002"}})
    capsys.readouterr()
    assert main(["store", "doctor", "--secrets"]) == 1
    printed = capsys.readouterr()
    assert "HDRTOKEN" not in printed.out + printed.err
    assert printed.out.split() == ["r", "message", "login.headers.Authorization", "authorization"]
    assert main(["store", "doctor", "--secrets", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "run": "r", "seq": 0, "step": None, "field": "message login.headers.Authorization", "kind": "authorization"
    }  # fmt: skip
