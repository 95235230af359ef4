"""`killick store export`: a file that holds one run, and a run of an archive."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from claims import call

APP = """
import killick


@killick.tool(effect="reads")
async def fetch(name: str) -> dict:
    return {"name": name, "email": f"{name}@example.org"}


@killick.agent
async def below(run: killick.Run, name: str) -> dict:
    return await run.call(fetch, name)


@killick.agent
async def above(run: killick.Run, name: str) -> str:
    child = await run.spawn(below, name)
    found = await child.result()
    return found["email"]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "app", raising=False)
    Path("app.py").write_text(APP, encoding="utf-8")
    assert call(capsys, "run", "app.py:above", "-q", "-i", "annabel", "--id", "a").code == 0
    return tmp_path


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[bytes, str]:
    found = call(capsys, "store", "export", "a", *words, "-o", "a.killick")
    assert (found.code, found.out) == (0, ""), found
    return Path("a.killick").read_bytes(), found.err


def test_a_file_holds_one_run_and_can_be_verified_and_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    data, told = exported(capsys)
    assert told.startswith("a.killick: ")
    assert json.loads(data.splitlines()[0])["version"] == 1
    assert "the file is intact: 1 run, " in call(capsys, "store", "verify", "a.killick").out
    assert call(capsys, "time", "replay", "a.killick", "--agent", "app.py:above").code == 0
    refused = call(capsys, "time", "replay", "a.killick", "--run", "b", "--agent", "app.py:below")
    assert (refused.code, refused.err) == (2, "killick: a.killick: is no archive of runs; leave --run out\n")


def test_a_run_of_an_archive_is_replayed_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "store", "prune", "--older", "0s", "--to", "old.killick.gz", "--yes").code == 0
    found = call(capsys, "time", "replay", "old.killick.gz", "--run", "a", "--agent", "app.py:above")
    assert (found.code, "✓ agrees" in found.out) == (0, True), found
    assert (
        "b: no such run"
        in call(capsys, "time", "replay", "old.killick.gz", "--run", "b", "--agent", "app.py:above").err
    )
