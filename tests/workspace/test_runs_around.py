"""What is around a workspace: other runs, processes, places that are not there, and stores that are elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import killick
import servers
from killick.errors import KillickError, WorkspaceRefused
from killick.model import events as e
from workspace.runs_isolated import LINES
from workspace.test_runs_branches import QUICK, after, files_at, told, write
from world import World

TESTS = Path(__file__).parents[1]


# processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tool_in_a_process_of_its_own_does_not_write_on_after_its_agent_died(folder: Path) -> None:
    command = [sys.executable, "-c", "from workspace.runs_isolated import main; main()"]
    options = {"cwd": folder.parent, "env": {**os.environ, "PYTHONPATH": str(TESTS)}}
    agent = subprocess.Popen(command, **options)  # type: ignore[call-overload]
    while not (folder / "log").exists():
        assert agent.poll() is None
        time.sleep(0.01)
    agent.kill()
    agent.wait()
    subprocess.run(command, **options, check=True)  # type: ignore[call-overload]
    assert (folder / "log").read_text().split() == [str(number) for number in range(LINES)]


def test_what_an_earlier_step_left_running_outlives_a_retry_and_is_told_of(kd: killick.Client, folder: Path) -> None:
    left: list[subprocess.Popen[bytes]] = []
    tries: list[int] = []

    @killick.tool(effect="workspace")
    def serve(folder: Path = killick.WORKSPACE) -> None:
        left.append(subprocess.Popen(["sleep", "100"], cwd=folder))

    @killick.tool(effect="workspace", retry=QUICK)
    def flaky(folder: Path = killick.WORKSPACE) -> None:
        tries.append(1)
        if len(tries) < 2:
            raise ConnectionError("the far side hung up")

    @killick.agent(workspace=folder)
    async def serving(run: killick.Run) -> None:
        await run.call(serve)
        await run.call(flaky)

    try:
        kd.run(serving, id="r")
        assert left[0].poll() is None
    finally:
        left[0].kill()
        left[0].wait()
    ended = kd.state("r").fold.step("1")
    assert ended is not None
    taken = [each.event for each in kd.events("r") if isinstance(each.event, e.WorkspaceCaptured)]
    assert [each.processes for each in taken if each.after == ended.ended] == [1]


# other runs ---------------------------------------------------------------------------------------


def test_runs_that_share_a_folder_get_along_while_nothing_is_in_doubt(kd: killick.Client, folder: Path) -> None:
    @killick.agent(workspace=folder)
    async def sharing(run: killick.Run, name: str) -> str:
        for number in range(5):
            await run.call(write, f"{name}{number}", name)
        return name

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(kd.as_async().run(sharing, name, id=name) for name in "abcd"))

    assert kd.runtime.blocking(all_of_them()) == list("abcd")
    assert len(told(folder)) == 21
    assert after(kd, "a", "5").items() >= {"a0": "a", "a4": "a", "kept": "kept"}.items()


@pytest.mark.slow
def test_many_runs_in_folders_of_their_own_leave_nothing_open(kd: killick.Client, tmp_path: Path) -> None:
    @killick.agent(workspace=tmp_path / "of" / "{run}")
    async def one(run: killick.Run) -> str:
        return await run.call(write, "a", "1")

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for number in range(12):
        kd.run(one, id=f"r{number}")
    threads, files = held()
    for number in range(12, 40):
        kd.run(one, id=f"r{number}")
    assert held()[0] <= threads + 4
    assert held()[1] <= files + 16


def test_what_a_child_did_in_the_folder_of_its_parent_is_in_a_snapshot_of_both(
    kd: killick.Client, folder: Path
) -> None:
    @killick.agent(workspace=folder)
    async def child(run: killick.Run) -> str:
        return await run.call(write, "child", "x")

    @killick.agent(workspace=folder)
    async def parent(run: killick.Run) -> str:
        await run.call(write, "a", "1")
        return str(await (await run.spawn(child)).result())

    kd.run(parent, id="r")
    assert files_at(kd, "r", kd.runtime.log.open("r").seq) == {"kept": "kept", "a": "1", "child": "x"}


# in the middle of it ------------------------------------------------------------------------------


def test_going_back_into_the_middle_of_a_tool_that_changes_the_workspace_does_it_again(
    kd: killick.Client, folder: Path
) -> None:
    inside = threading.Event()

    @killick.tool(effect="workspace")
    def long(folder: Path = killick.WORKSPACE) -> str:
        inside.set()
        while not any(step.id == "1.2.1" and step.status == "done" for step in kd.state("r").fold.steps):
            time.sleep(0.005)
        (folder / "long").write_text("x")
        return "long"

    @killick.tool(effect="reads")
    async def quick() -> str:
        while not inside.is_set():
            await asyncio.sleep(0.005)
        return "quick"

    @killick.agent(workspace=folder)
    async def both(run: killick.Run) -> None:
        await run.gather(run.call(long), run.call(quick))
        await run.call(write, "last", "1")

    kd.run(both, id="r")
    kd.rewind("r", "1.2.1:after")
    assert told(folder) == {"kept": "kept"}
    kd.run(both, id="r")
    assert told(folder) == {"kept": "kept", "long": "x", "last": "1"}


def test_a_fork_that_leaves_in_the_middle_of_a_tool_does_that_from_its_beginning(
    kd: killick.Client, folder: Path, tmp_path: Path
) -> None:
    forks: list[str] = []

    @killick.tool(effect="workspace")
    def long(folder: Path = killick.WORKSPACE) -> None:
        (folder / "log").open("a").close()
        if not forks:
            forks.append(kd.fork("r", "now", workspace=tmp_path / "own").id)
        (folder / "log").write_text((folder / "log").read_text() + "x")

    @killick.agent(workspace=folder)
    async def one(run: killick.Run) -> None:
        await run.call(long)
        await run.call(write, "last", "1")

    kd.run(one, id="r")
    kd.run(one, id=forks[0])
    assert told(tmp_path / "own") == told(folder) == {"kept": "kept", "log": "x", "last": "1"}


def test_what_a_person_settled_is_followed_by_a_snapshot(disk: World, folder: Path) -> None:
    tries: list[int] = []

    @killick.tool
    def pay(folder: Path = killick.WORKSPACE) -> str:
        tries.append(1)
        (folder / "paid").write_text("half")
        if len(tries) == 1:
            disk.die()
        return "never"

    @killick.agent(workspace=folder)
    async def payer(run: killick.Run) -> str:
        return await run.call(pay)

    disk.killed(payer, run="r")
    with pytest.raises(killick.RunWaiting):
        disk.kd.run(payer, id="r")
    assert told(folder) == {"kept": "kept", "paid": "half"}  # nothing goes back by itself
    disk.kd.answer("r", "happened", value="receipt")
    assert disk.kd.run(payer, id="r") == "receipt"
    assert after(disk.kd, "r", "1") == {"kept": "kept", "paid": "half"}


# places -------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_fails_no_run(kd: killick.Client, tmp_path: Path) -> None:
    @killick.agent(workspace=tmp_path / "later")
    async def one(run: killick.Run) -> str:
        return await run.call(write, "a", "1")

    with pytest.raises(WorkspaceRefused, match="create it"):
        kd.run(one, id="r")
    (tmp_path / "later").mkdir()
    assert kd.run(one, id="r") == "1"


def test_a_folder_that_a_tool_removed_is_brought_back_and_the_run_goes_on(kd: killick.Client, folder: Path) -> None:
    @killick.tool(effect="workspace")
    def wipe(folder: Path = killick.WORKSPACE) -> None:
        shutil.rmtree(folder)

    @killick.agent(workspace=folder)
    async def wiping(run: killick.Run) -> str:
        await run.call(wipe)
        return await run.call(write, "a", "1")

    with pytest.raises(WorkspaceRefused, match="restore it"):
        kd.run(wiping, id="r")
    kd.restore("r", "1:before")
    assert kd.run(wiping, id="r") == "1"
    assert told(folder) == {"kept": "kept", "a": "1"}


def test_a_tool_does_not_begin_before_its_before_is_kept(kd: killick.Client, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vault").write_text("in the way")
    began: list[int] = []

    @killick.tool(effect="workspace")
    def begin() -> None:
        began.append(1)

    @killick.agent(workspace=killick.Workspace(folder, vault=tmp_path / "vault"))
    async def one(run: killick.Run) -> None:
        await run.call(begin)

    with pytest.raises(KillickError, match="vault"):
        kd.run(one, id="r")
    assert not began
    (tmp_path / "vault").unlink()
    kd.run(one, id="r")
    assert began


def test_a_folder_may_be_named_by_a_link_or_from_where_one_is(
    kd: killick.Client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)

    @killick.agent(workspace="link")
    async def one(run: killick.Run) -> str:
        await run.call(write, "a", "1")
        return str(run.workspace)

    assert kd.run(one, id="r") == str(folder)
    kd.rewind("r", "1:before")
    assert told(folder) == {"kept": "kept"}
    assert (tmp_path / "link").is_symlink()


@pytest.mark.slow
def test_the_store_may_be_a_server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    tries: list[int] = []

    @killick.tool(effect="workspace", retry=QUICK)
    def flaky(folder: Path = killick.WORKSPACE) -> None:
        tries.append(1)
        with (folder / "log").open("a") as file:
            file.write("x")
        if len(tries) == 1:
            raise ConnectionError("the far side hung up")

    @killick.agent(workspace=folder)
    async def one(run: killick.Run) -> None:
        await run.call(flaky)
        await run.call(write, "a", "1")

    with killick.open(servers.postgres_store()) as kd:
        kd.run(one, id="r")
        assert told(folder) == {"kept": "kept", "log": "x", "a": "1"}
        kd.rewind("r", "2:before")
        assert told(folder) == {"kept": "kept", "log": "x"}
        assert (tmp_path / "data" / "killick" / "files" / "index.db").exists()


def test_a_store_in_memory_leaves_nothing_behind(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))

    @killick.agent(workspace=folder)
    async def one(run: killick.Run) -> None:
        await run.call(write, "a", "1")

    with killick.open("memory:") as kd:
        kd.run(one, id="r")
        kd.rewind("r", "1:before")
        assert told(folder) == {"kept": "kept"}
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_folders_that_were_closed_meanwhile_are_opened_again_for_the_run_that_goes_on(
    kd: killick.Client, tmp_path: Path
) -> None:  # fmt: skip
    @killick.tool(effect="workspace")
    def put(name: str, folder: Path = killick.WORKSPACE) -> None:
        (folder / name).write_text(name)

    @killick.agent(workspace=str(tmp_path / "{run}"))
    async def waiting(run: killick.Run) -> list[str]:
        await run.call(put, "before")
        await run.ask("Go on?")
        await run.call(put, "after")
        return sorted(each.name for each in run.workspace.iterdir())

    for number in range(20):
        with pytest.raises(killick.RunWaiting):
            kd.run(waiting, id=f"r{number}")
    for number in range(20):
        kd.answer(f"r{number}", "approve", by="ann")
        assert kd.run(waiting, id=f"r{number}") == ["after", "before"]
