"""The page and the example run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from neighbours.restate.restate_server import RestateServer
from neighbours.trying import try_page
from pages import ROOT


def test_what_the_page_shows_is_so(server: RestateServer, port: int, tmp_path: Path) -> None:
    ingress, admin = (int(url.rpartition(":")[2]) for url in (server.ingress, server.admin))
    try_page("restate", tmp_path, {8080: ingress, 9070: admin, 9080: port})


def test_the_example_runs(server: RestateServer, port: int) -> None:
    env = {**os.environ, "INGRESS": server.ingress, "ADMIN": server.admin, "PORT": str(port)}
    command = [sys.executable, str(ROOT / "examples/neighbours/restate_engine.py")]
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=True).stdout
    assert told == "40 to ann\n"
