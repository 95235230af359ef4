"""What the examples say beyond running: the options they offer, and that importing one does nothing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_importing_an_example_prints_nothing_and_makes_no_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert imported(file).__doc__
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_every_example_has_a_line_in_the_readme() -> None:
    page = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.glob("*.py"):
        assert f"| [{file.name}]({file.name}) |" in page
        assert len(file.read_text().splitlines()) <= 130


class Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint, with the example's own script for a model."""

    asked: ClassVar[list[Any]] = []
    chat: ClassVar[Any]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, request["model"]))
        reply = Endpoint.chat(messages=request["messages"], tools=request["tools"])
        body = json.dumps({"id": "chat_1", "created": 1, "model": request["model"], **reply}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002


@pytest.mark.slow
def test_the_tool_loop_goes_the_same_way_with_a_model_behind_an_endpoint(tmp_path: Path) -> None:
    file = EXAMPLES / "tool_loop.py"
    Endpoint.chat = staticmethod(imported(file).chat)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        options = ["--base-url", f"http://127.0.0.1:{server.server_port}/v1", "--model", "any"]
        said = [
            subprocess.run([sys.executable, file, *more], cwd=tmp_path, capture_output=True, text=True, check=True)
            for more in ([], options)
        ]
        server.shutdown()
    assert said[0].stdout == said[1].stdout
    assert Endpoint.asked == [("/v1/chat/completions", "any")] * 5
