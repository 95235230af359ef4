"""A store that another person sent is data: it changes nothing outside its folder without a word on this machine."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from claims import call
from killick.definitions.agents import AGENTS
from killick.errors import TimeRefused, WorkspaceRefused

Sent = Callable[..., Path]


@killick.tool(effect="workspace")
def plant(number: int, folder: Path = killick.WORKSPACE) -> None:
    (folder / "authorized_keys").write_text(f"the sender's, {number}\n")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipient's folder of keys, and a current folder that is another one."""
    keys = tmp_path / "home" / ".ssh"
    keys.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")
    return keys


@pytest.fixture
def sent(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Makes a store on the sender's machine, whose run waits after it changed a folder there, and sends it.

    The folder is gone then, the recipient has a folder of that name with other files, and no agent is loaded.
    """

    def make(folder: Path, *, workspace: Any = None, tool: Any = plant) -> Path:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "the sender's state"))
        folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sender").mkdir()

        @killick.agent(name="theirs", workspace=workspace or folder)
        async def theirs(run: killick.Run) -> None:
            await run.call(tool, 1)
            await run.call(tool, 2)
            await run.wait("go")

        with killick.open(str(tmp_path / "sender" / "sent.db")) as kd, pytest.raises(killick.RunWaiting):
            kd.run(theirs, id="r")
        del AGENTS.declared["theirs"]
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "the recipient's state"))
        (tmp_path / "download").mkdir(exist_ok=True)
        for each in (tmp_path / "sender").iterdir():
            shutil.move(each, tmp_path / "download")
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "id_rsa").write_text("mine\n")
        (folder / "authorized_keys").write_text("mine\n")
        return tmp_path / "download" / "sent.db"

    return make


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Later tests know none of the agents."""
    yield
    for name in ("mine", "theirs"):
        AGENTS.declared.pop(name, None)


def names(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for each in folder.iterdir() if each.is_file()}


MINE = {"id_rsa": "mine\n", "authorized_keys": "mine\n"}


def test_a_restore_changes_no_folder_that_only_the_record_names(
    home: Path, sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(sent(home))
    for more in ([], ["--yes"], ["--dry-run"]):
        refused = call(capsys, "time", "restore", "r", "--at", "1:after", "--store", store, *more)
        assert refused.code != 0
        assert refused.err.count("\n") == 1
        assert "--to" in refused.err
        assert names(home) == MINE
    assert call(capsys, "time", "restore", "r", "--at", "1:after", "--to", "look", "--store", store).code == 0
    assert names(tmp_path / "here" / "look") == {"authorized_keys": "the sender's, 1\n"}


def test_a_folder_that_a_person_names_is_restored_and_stays_granted(home: Path, sent: Sent) -> None:
    with killick.open(str(sent(home))) as kd:
        kd.restore("r", "1:after", to=home)
        assert names(home) == {"authorized_keys": "the sender's, 1\n"}
        kd.restore("r", "2:after")
        assert names(home) == {"authorized_keys": "the sender's, 2\n"}


def test_a_grant_for_a_store_is_none_for_its_copy(home: Path, sent: Sent, tmp_path: Path) -> None:
    store = sent(home)
    with killick.open(str(store)) as kd:
        kd.restore("r", "1:after", to=home)
    shutil.copytree(tmp_path / "download", tmp_path / "again")
    with killick.open(str(tmp_path / "again" / "sent.db")) as kd, pytest.raises(WorkspaceRefused):
        kd.restore("r", "2:after")


@pytest.mark.parametrize("declared", ["site", "{run}.site"])
def test_the_folder_that_a_loaded_agent_declares_is_restored_in_place(
    sent: Sent, tmp_path: Path, declared: str
) -> None:
    folder = tmp_path / "here" / declared.replace("{run}", "r")
    with killick.open(str(sent(folder, workspace=declared))) as kd:
        with pytest.raises(WorkspaceRefused):
            kd.restore("r", "1:after")
        killick.agent(name="mine", workspace=declared)(_nothing)
        kd.restore("r", "1:after")
    assert names(folder) == {"authorized_keys": "the sender's, 1\n"}


async def _nothing(run: killick.Run) -> None:
    """An agent that is only declared."""


def test_a_link_in_the_place_of_a_declared_folder_is_not_followed(home: Path, sent: Sent, tmp_path: Path) -> None:
    site = tmp_path / "here" / "work" / "r"
    site.parent.mkdir()
    store = sent(site, workspace="work/{run}")
    shutil.rmtree(site)
    site.symlink_to(home)
    (home / "id_rsa").write_text("mine\n")
    killick.agent(name="theirs", workspace="work/{run}")(_nothing)
    with killick.open(str(store)) as kd, pytest.raises(WorkspaceRefused):
        kd.restore("r", "1:after")
    assert names(home) == {"id_rsa": "mine\n"}


def test_in_the_folder_of_the_store_a_person_is_asked(
    sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "download" / "site"
    store = str(sent(folder))
    restoring = ("time", "restore", "r", "--at", "1:after", "--store", store)
    asked = call(capsys, *restoring)
    assert asked.code == 2
    assert str(folder) in asked.err
    assert names(folder) == MINE
    assert call(capsys, *restoring, "--yes").code == 0
    assert names(folder) == {"authorized_keys": "the sender's, 1\n"}
    with killick.open(str(store)) as kd:  # other programs have no terminal; the word is kept
        kd.restore("r", "2:after")


def test_a_rewind_leaves_the_files_to_the_worker_that_has_the_agent(home: Path, sent: Sent) -> None:
    with killick.open(str(sent(home))) as kd:
        assert "restored when it is resumed" in kd.rewind("r", "1:after")
    assert names(home) == MINE


def test_a_fork_writes_next_to_no_folder_that_only_the_record_names(home: Path, sent: Sent, tmp_path: Path) -> None:
    with killick.open(str(sent(home))) as kd:
        with pytest.raises(TimeRefused):
            kd.fork("r", "1:after")
        assert sorted(os.listdir(home.parent)) == [".ssh"]
        kd.fork("r", "1:after", workspace=tmp_path / "fork")
    assert names(tmp_path / "fork") == {"authorized_keys": "the sender's, 1\n"}
    assert names(home) == MINE


def test_an_agent_that_is_loaded_works_in_no_folder_that_only_the_record_names(home: Path, sent: Sent) -> None:
    store, called = sent(home), list[Path]()

    @killick.agent(name="theirs", workspace="site")
    async def mine(run: killick.Run) -> None:
        await run.call(plant, 1)
        await run.call(plant, 2)
        await run.wait("go")
        called.append(run.workspace)

    with killick.open(str(store)) as kd:
        kd.rewind("r", "1:after")
        kd.send("r", "go")
        with pytest.raises(WorkspaceRefused):
            kd.run(mine, id="r")
    assert not called
    assert names(home) == MINE


def test_a_vault_that_only_the_record_names_is_neither_read_nor_cleaned(
    home: Path, sent: Sent, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vault = tmp_path / "vault"
    store = str(sent(tmp_path / "site", workspace=killick.Workspace(tmp_path / "site", vault=vault)))
    before = {each: each.stat().st_mtime_ns for each in vault.rglob("*")}
    for words in (
        ["show", "r", "--files"],
        ["store", "verify", "--files"],
        ["time", "restore", "r", "--at", "1:after"],
    ):
        assert call(capsys, *words, "--store", store).code != 0
    call(capsys, "cancel", "r", "--store", store)
    call(capsys, "store", "prune", "--older", "0s", "--yes", "--store", store)
    assert {each: each.stat().st_mtime_ns for each in vault.rglob("*")} == before


def test_set_id_bits_of_a_sent_snapshot_are_not_restored(home: Path, sent: Sent, tmp_path: Path) -> None:
    @killick.tool(effect="workspace", name="armed")
    def armed(number: int, folder: Path = killick.WORKSPACE) -> None:
        (folder / "run").write_text(str(number))
        (folder / "run").chmod(0o6755)

    with killick.open(str(sent(home, tool=armed))) as kd:
        done = kd.restore("r", "1:after", to=tmp_path / "look")
    assert stat.S_IMODE((tmp_path / "look" / "run").stat().st_mode) == 0o755
    assert done.left
