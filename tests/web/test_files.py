"""The files of a run on the dashboard: its snapshots, and what changed from one to the next."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import killick
from killick.web.app import asgi
from killick.web.handlers.files import LINES_MAX, SNAPSHOTS_MAX

XSS = "<img src=x onerror=alert(1)>\"'{{7*7}}"


@killick.tool(effect="workspace", name="web_write")
async def write(name: str, text: str, folder: Path = killick.WORKSPACE) -> None:
    (folder / name).write_text(text)


@killick.agent(name="web_files", workspace="{run}.files")
async def writer(run: killick.Run, texts: list[str]) -> str:
    for text in texts:
        await run.call(write, XSS.replace("/", "_"), text)
    await run.call(write, "long.txt", "line\n" * (LINES_MAX + 100))
    return "done"


@killick.agent(name="web_none")
async def none(run: killick.Run) -> str:
    return "done"


@pytest.fixture
def kd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[killick.Client]:
    monkeypatch.chdir(tmp_path)
    with killick.open("killick.db") as made:
        made.run(writer, [f"{XSS}\n", "two\n"], id="r")
        yield made


def web(kd: killick.Client, **options: Any) -> TestClient:
    return TestClient(asgi(kd, identify=lambda request: ("mia", "viewer"), **options), base_url="http://127.0.0.1")


def api(kd: killick.Client, path: str, **options: Any) -> Any:
    answer = web(kd, **options).get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def page(kd: killick.Client, path: str) -> str:
    answer = web(kd).get(path)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_snapshots_are_told_from_the_last_with_what_changed(kd: killick.Client) -> None:
    doc = api(kd, "/runs/r/files")
    assert [each["place"] for each in doc["snapshots"]] == ["3:after", "2:after", "1:after", "@3"]
    assert (doc["total"], doc["at"], doc["since"]) == (4, "now", "2:after")
    doc = api(kd, "/runs/r/files?at=2:after")
    [change] = doc["changes"]
    assert (change["how"], doc["since"], doc["counts"]) == ("changed", "2:before", {"changed": 1})
    assert change["lines"] == ["@@ -1 +1 @@", f"-{XSS}", "+two"]
    assert doc["snapshot"] == doc["snapshots"][1]["snapshot"]


def test_the_page_has_it_all_and_escapes_what_files_hold(kd: killick.Client) -> None:
    text = page(kd, "/runs/r/files?at=2:after")
    assert "From 2:before to 2:after" in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert "<img src=x" not in text
    assert "{{7*7}}" in text
    assert '<span class="plus">+two</span>' in text
    assert "data-fragment" in text
    for each in api(kd, "/runs/r/files")["snapshots"]:
        assert web(kd).get("/runs/r/files", params={"at": each["place"]}).status_code == 200


def test_what_is_long_is_cut(kd: killick.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    doc = api(kd, "/runs/r/files?at=3:after")
    [change] = doc["changes"]
    assert (change["path"], change["plus"], len(change["lines"])) == ("long.txt", LINES_MAX + 100, LINES_MAX)
    monkeypatch.setattr("killick.web.handlers.files.SNAPSHOTS_MAX", 2)
    doc = api(kd, "/runs/r/files")
    assert (doc["total"], len(doc["snapshots"])) == (4, 2)
    assert "and 2 before" in page(kd, "/runs/r/files")
    assert SNAPSHOTS_MAX > 2


def test_only_a_run_with_a_workspace_has_the_tab(kd: killick.Client) -> None:
    kd.run(none, id="n")
    assert 'data-tab="files"' in page(kd, "/runs/r")
    assert 'data-load="/runs/r/files"' in page(kd, "/runs/r?tab=files")
    assert 'data-tab="files"' not in page(kd, "/runs/n")
    assert "No workspace" in page(kd, "/runs/n/files")
    assert api(kd, "/runs/n/files")["folder"] is None
    assert web(kd).get("/api/v1/runs/x/files").json()["code"] == "run_unknown"
    assert web(kd).get("/api/v1/runs/r/files?at=9").status_code == 404


def test_without_its_vault_the_page_says_why_nothing_is_told(kd: killick.Client) -> None:
    assert "no snapshot of its files as early as start" in page(kd, "/runs/r/files?at=start")
    shutil.move("killick.files", "away")
    doc = api(kd, "/runs/r/files")
    assert "is not here" in doc["problem"]
    assert len(doc["snapshots"]) == 4
    assert "is not here" in page(kd, "/runs/r/files")


def test_where_anything_is_hidden_no_content_is_shown(kd: killick.Client) -> None:
    doc = api(kd, "/runs/r/files?at=2:after", redact=["text"])
    [change] = doc["changes"]
    assert change["lines"] == []
    assert change["how"] == "changed"
