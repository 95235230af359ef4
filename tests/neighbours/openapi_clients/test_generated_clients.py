"""Clients in Python and TypeScript, generated from our OpenAPI document, reach a real server."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import killick
from killick.web.app import ROUTES
from killick.web.openapi import openapi

HERE = Path(__file__).parent
KILLICK = [sys.executable, "-m", "killick"]


class Served(NamedTuple):
    """A server of a store with one run that asks a question, and a token of an operator."""

    url: str
    token: str
    store: Path


@killick.agent(name="generated_asks")
async def asks(run: killick.Run) -> str:
    return (await run.ask("Pay 20?")).kind


def did(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    store = tmp_path / "killick.db"
    with killick.open(str(store)) as kd, pytest.raises(killick.RunWaiting):
        kd.run(asks, id="r")
    create = [*KILLICK, "token", "create", "ann", "--scope", "operator", "--store", str(store)]
    [token, *_] = re.findall(r"killick_[\w-]+", did(create, tmp_path))
    command = [*KILLICK, "serve", "--port", "0", "--json", "--store", str(store)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield Served(json.loads(server.stdout.readline())["url"], token, store)
        server.terminate()


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(openapi(ROUTES)), encoding="utf-8")
    return file


def is_answered(served: Served) -> bool:
    with killick.open(str(served.store)) as kd:
        return not kd.inbox() and bool(kd.inbox(answered=True))


def test_a_generated_python_client_lists_shows_and_answers(
    served: Served, document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = [sys.executable, "-m", "openapi_python_client", "generate", "--path", str(document)]
    said = did([*generator, "--output-path", "generated", "--meta", "none"], tmp_path)
    # A picture is no document; every other operation is understood.
    assert (said.count("WARNING"), "graph.svg" in said) == (1, True), said
    assert "Unable to process schema" not in said
    monkeypatch.syspath_prepend(str(tmp_path))
    made: Any = importlib.import_module("generated")
    called = {
        name: importlib.import_module(f"generated.api.{name}").sync
        for name in ("run_list.get_runs", "run_detail.get_run", "inbox.get_inbox", "inbox.answer_inbox_wait")
    }
    models: Any = importlib.import_module("generated.models")
    with made.AuthenticatedClient(base_url=served.url, token=served.token) as client:
        [listed] = called["run_list.get_runs"](client=client).runs
        assert called["run_detail.get_run"](listed.id, client=client).status == "waiting"
        [question] = called["inbox.get_inbox"](client=client).questions
        assert (question.run, question.prompt) == ("r", "Pay 20?")
        body = models.AnswerRequest(verb=models.AnswerRequestVerb.APPROVE, digest=question.digest)
        called["inbox.answer_inbox_wait"](question.id, client=client, body=body)
    assert is_answered(served)


def test_a_generated_typescript_client_lists_shows_and_answers(
    served: Served, document: Path, tmp_path: Path
) -> None:  # fmt: skip
    npm = shutil.which("npm")
    assert npm, "npm is missing; install Node.js 20 or later, which brings it: https://nodejs.org"
    place = tmp_path / "ts"
    place.mkdir()
    for name in ("package.json", "smoke.ts"):
        shutil.copy(HERE / name, place)
    did([npm, "install", "--no-audit", "--no-fund"], place)
    did([npm, "exec", "--", "openapi-typescript", str(document), "-o", "api.ts"], place)
    options = ["--strict", "--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
    did([npm, "exec", "--", "tsc", *options, "smoke.ts"], place)
    told = did(["node", "smoke.js", served.url.rstrip("/"), served.token], place)
    assert json.loads(told) == ["r", "waiting", "Pay 20?"]
    assert is_answered(served)
