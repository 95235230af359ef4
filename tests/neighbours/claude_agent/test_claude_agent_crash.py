"""The real Claude Code program, with a script for a model: killed in the middle, or on a machine whose disk is gone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import project_key_for_directory

import killick
from killick.adapters.claude_agent import KillickSessionStore

sys.path.insert(0, str(Path(__file__).parent))
from claude_api import Api, serving
from killed_claude_agent import SESSION

from neighbours.results import result

Clerk = Callable[..., int]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with serving() as api:
        yield api


@pytest.fixture(scope="module")
def clerk(api: Api) -> Iterator[Clerk]:
    program = [sys.executable, str(Path(__file__).with_name("killed_claude_agent.py"))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None

        def serve(way: str, folder: Path, home: str, dies: str = "no") -> int:
            serving.stdin.write(f"{way} {folder} {folder / home} {api.server_address[1]} {dies}\n")
            serving.stdin.flush()
            return int(serving.stdout.readline())

        yield serve
        serving.stdin.close()


def paid(clerk: Clerk, way: str, folder: Path, then: str) -> int:
    """How often it pays for one message that is sent again, because its process was killed when the money was gone."""
    folder.mkdir()
    assert clerk(way, folder, "disk-1", "yes") == -signal.SIGKILL
    assert clerk(way, folder, then) == 0
    assert (folder / "said.txt").read_text() == "Done."
    return (folder / "ledger.txt").read_text().count("pay ann 5")


def test_a_killed_clerk_pays_twice_alone_and_once_with_killick_where_it_also_remembers(
    clerk: Clerk, api: Api, tmp_path: Path
) -> None:
    # Alone, it finds what is on the disk of the process that died; with Killick it has nothing but the store.
    alone = paid(clerk, "alone", tmp_path / "alone", "disk-1")
    ours = paid(clerk, "killick", tmp_path / "killick", "disk-2")
    result("claude_agent", killed="inside a payment", alone=f"{alone} payments", ours=f"{ours} payment")
    assert (alone, ours) == (2, 1)
    heard = len(api.heard)
    assert clerk("killick", tmp_path / "killick", "disk-3") == 0
    assert "Done." in str(api.heard[heard][:-1])
    with killick.open(tmp_path / "killick" / "killick.db") as kd:
        key: Any = {"project_key": project_key_for_directory(tmp_path / "killick"), "session_id": SESSION}
        entries = asyncio.run(KillickSessionStore(kd).load(key))
    assert entries is not None
    uuids = [entry["uuid"] for entry in entries if "uuid" in entry]
    assert len(uuids) == len(set(uuids))
