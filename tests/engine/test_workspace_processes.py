"""Processes that a tool left running, taken with the files and brought back with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import killick
from killick.model import events as e
from killick.workspace import criu

COUNTING = """
import time
count = 0
while True:
    count += 1
    with open("count", "w") as file:
        file.write(str(count))
    time.sleep(0.02)
"""


def count_in(folder: Path) -> int:
    for _ in range(500):
        text = (folder / "count").read_text() if (folder / "count").exists() else ""
        if text:
            return int(text)
        time.sleep(0.01)
    raise AssertionError("nobody counts")


def test_a_process_goes_on_counting_from_where_the_run_went_back_to(tmp_path: Path) -> None:
    if (reason := criu.available()) is not None:
        pytest.skip(reason)
    folder = tmp_path / "work"
    folder.mkdir()

    @killick.tool(effect="workspace")
    def serve(folder: Path = killick.WORKSPACE) -> int:
        command = 'setsid "$0" -c "$1" < /dev/null > /dev/null 2>&1 & echo $!'
        told = subprocess.run(
            ["sh", "-c", command, sys.executable, COUNTING], cwd=folder, check=True, stdout=subprocess.PIPE
        )
        count_in(folder)
        return int(told.stdout)

    @killick.tool(effect="workspace")
    def note(folder: Path = killick.WORKSPACE) -> None:
        (folder / "note").write_text("written")

    @killick.agent(workspace=killick.Workspace(folder, processes="taken"))
    async def serving(run: killick.Run) -> int:
        pid = await run.call(serve)
        await run.call(note)
        return pid

    with killick.open(tmp_path / "killick.db") as kd:
        pid = kd.run(serving, id="r")
        try:
            taken = [each.event for each in kd.events("r") if isinstance(each.event, e.WorkspaceCaptured)]
            assert any(each.images for each in taken)
            while count_in(folder) < 150:
                time.sleep(0.01)
            late = count_in(folder)
            kd.rewind("r", "2:before")
            assert kd.run(serving, id="r") == pid
            assert 0 < count_in(folder) < late  # it goes on from the image, not from one, and not from where it was
            assert Path(f"/proc/{pid}").exists()
        finally:
            os.kill(pid, signal.SIGKILL)
