"""Runs whose files are kept: taken at boundaries, brought back with the run."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.model import events as e
from killick.workspace.scan import Scanner


@killick.tool(effect="workspace")
def write(name: str, text: str, folder: Path = killick.WORKSPACE) -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return text


@killick.tool(effect="workspace")
async def append(name: str, text: str, folder: Path = killick.WORKSPACE) -> str:
    with (folder / name).open("a") as file:
        file.write(text)
    return (folder / name).read_text()


@killick.tool(effect="reads")
def look(name: str, folder: Path = killick.WORKSPACE) -> str:
    return (folder / name).read_text()


@killick.tool(effect="reads")
async def idle() -> None: ...


async def model(text: str) -> str:
    await asyncio.sleep(0)
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    (made / "kept.txt").write_text("kept")
    return made


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(tmp_path / "killick.db") as client:
        yield client


def captured(kd: killick.Client, run: str) -> list[e.WorkspaceCaptured]:
    return [each.event for each in kd.events(run) if isinstance(each.event, e.WorkspaceCaptured)]


def restored(kd: killick.Client, run: str) -> list[e.WorkspaceRestored]:
    return [each.event for each in kd.events(run) if isinstance(each.event, e.WorkspaceRestored)]


def told(folder: Path) -> dict[str, str]:
    files = (each for each in folder.rglob("*") if each.is_file() and "killick." not in str(each.relative_to(folder)))
    return {str(each.relative_to(folder)): each.read_text() for each in files}


def writer(folder: Path, **options: Any) -> Any:
    @killick.agent(name="writer", workspace=folder, **options)
    async def agent(run: killick.Run, words: list[str]) -> dict[str, str]:
        for number, word in enumerate(words):
            await run.model(model, word)
            await run.call(write, f"{number}.txt", word)
            await run.call(look, f"{number}.txt")
        return {name: text for name, text in told(run.workspace).items() if not name.startswith("killick")}

    return agent


def test_a_snapshot_is_on_record_where_something_changed_and_nowhere_else(kd: killick.Client, folder: Path) -> None:
    kd.run(writer(folder), ["a", "b"], id="r")
    steps = [each.files for each in captured(kd, "r")]
    assert steps == [1, 2, 3]  # before anything, and after each of the two tools that wrote
    assert told(folder) == {"kept.txt": "kept", "0.txt": "a", "1.txt": "b"}


def test_a_rewind_brings_the_files_back_and_the_run_writes_them_again(kd: killick.Client, folder: Path) -> None:
    agent = writer(folder)
    kd.run(agent, ["a", "b", "c"], id="r")
    before = kd.rewind("r", "5:before")
    assert "files" in before
    assert told(folder) == {"kept.txt": "kept", "0.txt": "a"}
    assert [each.because for each in restored(kd, "r")] == ["rewound"]
    kd.run(agent, ["a", "b", "c"], id="r")
    assert told(folder) == {"kept.txt": "kept", "0.txt": "a", "1.txt": "b", "2.txt": "c"}


def test_a_fork_has_the_files_of_its_place_in_a_folder_of_its_own(kd: killick.Client, folder: Path) -> None:
    agent = writer(folder)
    kd.run(agent, ["a", "b", "c"], id="r")
    own = folder.parent / "other"
    fork = kd.fork("r", "5:before", workspace=own)
    assert told(own) == {"kept.txt": "kept", "0.txt": "a"}
    assert told(folder) == {"kept.txt": "kept", "0.txt": "a", "1.txt": "b", "2.txt": "c"}
    kd.run(agent, ["a", "b", "c"], id=fork.id)
    assert told(own) == told(folder)
    assert [each.because for each in restored(kd, fork.id)] == ["forked"]
    beside = kd.fork("r", "5:before")
    assert told(folder.with_name(f"work-{beside.id}")) == {"kept.txt": "kept", "0.txt": "a"}


def test_a_fork_is_given_no_folder_that_holds_something(kd: killick.Client, folder: Path) -> None:
    kd.run(writer(folder), ["a"], id="r")
    with pytest.raises(killick.KillickError, match="is not empty"):
        kd.fork("r", "2:before", workspace=folder)


def test_a_workspace_tool_that_is_tried_again_finds_the_files_as_they_were(kd: killick.Client, folder: Path) -> None:
    tries: list[str] = []

    @killick.tool(effect="workspace", retry=killick.Retry(attempts=3, first=0.001))
    def half(folder: Path = killick.WORKSPACE) -> str:
        tries.append("".join(sorted(told(folder))))
        (folder / f"half{len(tries)}").write_text("half")
        (folder / "kept.txt").write_text("spoilt")
        if len(tries) < 3:
            raise ConnectionError("the far side hung up")
        return "done"

    @killick.agent(workspace=folder)
    async def halver(run: killick.Run) -> str:
        return await run.call(half)

    assert kd.run(halver, id="r") == "done"
    assert tries == ["kept.txt"] * 3
    assert told(folder) == {"kept.txt": "spoilt", "half3": "half"}
    assert [each.because for each in restored(kd, "r")] == ["in doubt"] * 2


def test_one_step_is_undone_with_its_files_where_nobody_changed_them_since(kd: killick.Client, folder: Path) -> None:
    agent = writer(folder)
    kd.run(agent, ["a", "b"], id="r")
    kd.undo("r", "2")
    assert told(folder) == {"kept.txt": "kept", "1.txt": "b"}


def test_a_step_whose_files_were_changed_since_is_not_undone(kd: killick.Client, folder: Path) -> None:
    kd.run(writer(folder), ["a", "b"], id="r")
    (folder / "0.txt").write_text("by hand")
    with pytest.raises(killick.KillickError, match=r"0\.txt: changed since"):
        kd.undo("r", "2")
    assert told(folder)["0.txt"] == "by hand"


def test_a_store_that_lies_in_the_workspace_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept")
    agent = writer(tmp_path)
    with killick.open(tmp_path / "killick.db") as kd:
        kd.run(agent, ["a"], id="r")
        kd.rewind("r", "2:before")
        assert [each.files for each in captured(kd, "r")] == [1, 2]
        assert not (tmp_path / "0.txt").exists()
        kd.run(agent, ["a"], id="r")
        assert (tmp_path / "0.txt").read_text() == "a"


def test_what_somebody_changed_during_a_wait_is_taken_when_the_run_goes_on(kd: killick.Client, folder: Path) -> None:
    @killick.agent(workspace=folder)
    async def patient(run: killick.Run) -> str:
        await run.call(write, "0.txt", "a")
        await run.ask("Go on?")
        return await run.call(append, "0.txt", "c")

    with pytest.raises(killick.RunWaiting):
        kd.run(patient, id="r")
    (folder / "0.txt").write_text("by hand ")
    kd.answer("r", "approve")
    assert kd.run(patient, id="r") == "by hand c"
    kd.rewind("r", "3:before")
    assert (folder / "0.txt").read_text() == "by hand "


def test_a_tool_that_works_in_a_workspace_needs_one(kd: killick.Client) -> None:
    @killick.agent
    async def homeless(run: killick.Run) -> str:
        return await run.call(write, "a", "b")

    with pytest.raises(killick.RunFailed, match=r"workspace=…"):
        kd.run(homeless, id="r")


def test_each_run_has_a_folder_of_its_own_where_the_path_says_so(kd: killick.Client, tmp_path: Path) -> None:
    agent = writer(tmp_path / "{run}")
    kd.run(agent, ["a"], id="one")
    kd.run(agent, ["b"], id="two")
    assert (told(tmp_path / "one"), told(tmp_path / "two")) == ({"0.txt": "a"}, {"0.txt": "b"})
    assert os.listdir(tmp_path / "killick.files")


def test_workspace_tools_side_by_side_have_the_folder_one_after_the_other(kd: killick.Client, folder: Path) -> None:
    @killick.agent(workspace=folder)
    async def many(run: killick.Run) -> list[str]:
        return await run.gather(*(run.call(append, "log", f"{each}") for each in range(5)))

    found = sorted(kd.run(many, id="r"), key=len)
    assert [len(each) for each in found] == [1, 2, 3, 4, 5]
    assert all(later.startswith(earlier) for earlier, later in pairwise(found))


def test_a_folder_that_was_taken_away_comes_back_before_the_run_goes_on(kd: killick.Client, folder: Path) -> None:
    @killick.agent(workspace=folder)
    async def patient(run: killick.Run) -> str:
        await run.call(write, "0.txt", "a")
        await run.ask("Go on?")
        return await run.call(append, "0.txt", "b")

    with pytest.raises(killick.RunWaiting):
        kd.run(patient, id="r")
    kd.close()
    shutil.rmtree(folder)
    with killick.open(folder.parent / "killick.db") as later:
        later.answer("r", "approve")
        assert later.run(patient, id="r") == "ab"
        assert [each.because for each in restored(later, "r")] == ["gone"]
    assert told(folder) == {"kept.txt": "kept", "0.txt": "ab"}


@pytest.mark.slow
def test_folders_that_nobody_works_in_are_closed_in_time(kd: killick.Client, tmp_path: Path) -> None:
    agent = writer(tmp_path / "{run}")
    for number in range(20):
        kd.run(agent, ["a"], id=f"run{number}")
        gc.collect()
    assert len(kd.runtime.engine.folders._open) <= 18


class Slow:
    """Snapshots that take until somebody lets them: before the files are read, or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_read, self.may_end, self.began = threading.Event(), threading.Event(), threading.Event()
        self.is_on = False
        scan = Scanner.scan

        def slowly(scanner: Scanner, writing: Any, **options: Any) -> Any:
            if not self.is_on:
                return scan(scanner, writing, **options)
            self.began.set()
            assert self.may_read.wait(300)
            found = scan(scanner, writing, **options)
            assert self.may_end.wait(300)
            return found

        monkeypatch.setattr(Scanner, "scan", slowly)


def test_files_are_taken_while_a_model_is_asked_and_a_tool_waits_for_them(
    kd: killick.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    happened: list[str] = []

    async def thinking() -> str:
        while not slow.began.is_set():
            await asyncio.sleep(0.001)
        happened.append("the model is asked while files are being taken")
        asyncio.get_running_loop().call_later(0.05, lambda: (happened.append("files may be read"), slow.may_read.set()))
        slow.may_end.set()
        return "go on"

    @killick.tool(effect="workspace")
    def first(folder: Path = killick.WORKSPACE) -> None:
        (folder / "first").write_text("1")
        slow.is_on = True

    @killick.tool
    def second(folder: Path = killick.WORKSPACE) -> None:
        happened.append("a tool begins")
        (folder / "first").write_text("2")

    @killick.agent(workspace=folder)
    async def agent(run: killick.Run) -> None:
        await run.call(first)
        await run.model(thinking)
        await run.call(second)

    kd.run(agent, id="r")
    assert happened == ["the model is asked while files are being taken", "files may be read", "a tool begins"]
    kd.rewind("r", "3:before")
    assert told(folder) == {"kept.txt": "kept", "first": "1"}


def test_only_a_workspace_effect_waits_until_its_before_is_on_record(
    kd: killick.Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    slow.may_read.set()
    published = threading.Event()
    quiets: list[bool] = []
    begin = killick.Workspace.begin

    def early(workspace: killick.Workspace, owner: str | None = None, *, check: bool = True) -> Any:
        found = begin(workspace, owner, check=check)
        if slow.is_on and not found.quiet.done():
            found.quiet.set_result(None)  # as where the file system made copies
        found.snapshot.add_done_callback(lambda _: published.set() if slow.is_on else None)
        return found

    monkeypatch.setattr(killick.Workspace, "begin", early)

    @killick.tool(effect="workspace")
    def first(folder: Path = killick.WORKSPACE) -> None:
        (folder / "first").write_text("1")
        slow.is_on = True

    @killick.tool
    def elsewhere() -> None:
        quiets.append(published.is_set())
        slow.may_end.set()

    @killick.tool(effect="workspace")
    def second(folder: Path = killick.WORKSPACE) -> None:
        quiets.append(published.is_set())

    @killick.agent(workspace=folder)
    async def agent(run: killick.Run) -> None:
        await run.call(first)
        await run.call(elsewhere)
        await run.call(second)

    kd.run(agent, id="r")
    assert quiets == [False, True]


def test_only_the_vault_and_the_store_are_hidden_and_not_what_is_called_alike(tmp_path: Path) -> None:
    for name in ("v", "video", "killick.db.txt", "killick.dbx"):
        (tmp_path / name).mkdir() if name == "v" else (tmp_path / name).write_text(name)
    with killick.Workspace(tmp_path, vault=tmp_path / "v", hidden=[tmp_path / "killick.db"]) as workspace:
        (tmp_path / "killick.db-wal").write_text("of the store")
        found = workspace.capture()
        assert sorted(path for path, _ in workspace.files(found.root)) == [b"killick.db.txt", b"killick.dbx", b"video"]
