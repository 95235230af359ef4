"""Nobody but the owner reads what the project writes, and nothing that another process planted is written to."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import killick
from claims import call, move_in
from killick import permissions
from killick.cli.demo import prepare
from killick.errors import StoreUnavailable
from killick.store import SqliteStore
from killick.store.liveness import Holders
from killick.workspace import Workspace

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes no right from anybody."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    move_in(tmp_path, monkeypatch)
    return tmp_path


def seen_by_others(folder: Path) -> list[str]:
    """What the group or everybody may touch, by its path in the folder."""
    found = [path for path in folder.rglob("*") if not path.is_symlink() and path.stat().st_mode & permissions.OTHERS]
    return sorted(f"{stat.filemode(path.stat().st_mode)} {path.relative_to(folder)}" for path in found)


@killick.tool(effect="idempotent")
def kept(text: str) -> str:
    return text


@killick.agent(name="permissions_kept")
async def keeps(run: killick.Run, text: str) -> str:
    return await run.call(kept, text)


@pytest.mark.usefixtures("open_umask")
def test_every_file_of_a_store_and_every_output_is_the_owners_alone(capsys: Capture, here: Path) -> None:
    before = set(here.rglob("*"))
    with killick.open("killick.db") as kd:
        stop = kd.runtime.store.watch(lambda run: None)
        assert kd.run(keeps, "secret", id="r") == "secret"
        assert Path("killick.db-wal").exists()
        assert Path("killick.db-shm").exists()
        assert [path.name for path in here.iterdir() if path.is_dir() and path not in before] == ["killick.db-bells"]
        for words in (
            ("store", "export", "r", "-o", "r.killick"),
            ("store", "seal", "--new-key", "key.pem", "--out", "seal.txt"),
            ("store", "prove", "r", "1", "--out", "r.proof"),
            ("store", "prune", "--older", "0s", "--to", "old.jsonl.gz", "--yes"),
        ):
            code, out, err = call(capsys, *words)
            assert code == 0, (words, out, err)
        made = set(here.rglob("*")) - before
        assert {
            "killick.db",
            "killick.db-wal",
            "killick.db-shm",
            "r.killick",
            "key.pem",
            "seal.txt",
            "old.jsonl.gz",
        } <= {path.name for path in made}
        assert not [found for found in seen_by_others(here) if here / found.split(" ", 1)[1] in made]
        stop()


@pytest.mark.usefixtures("open_umask")
def test_a_vault_and_what_is_remembered_of_a_folder_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("mine")
    with Workspace(folder, vault=tmp_path / "deep" / "vault") as workspace:
        workspace.capture()
    assert (tmp_path / "deep" / "vault" / "packs").is_dir()
    assert seen_by_others(tmp_path / "deep") == []
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700


@pytest.mark.usefixtures("open_umask")
def test_the_demos_folder_is_the_owners_alone(tmp_path: Path) -> None:
    prepare(tmp_path / "demo")
    assert seen_by_others(tmp_path) == []


@pytest.mark.usefixtures("open_umask")
def test_output_into_a_file_that_is_there_keeps_its_mode(capsys: Capture, here: Path) -> None:
    with killick.open("killick.db") as kd:
        kd.run(keeps, "secret", id="r")
    Path("shared.killick").touch(0o640)
    assert call(capsys, "store", "export", "r", "-o", "shared.killick")[0] == 0
    assert stat.S_IMODE(Path("shared.killick").stat().st_mode) == 0o640


def test_the_doctor_fails_on_a_store_that_others_may_read_and_its_command_mends_it(capsys: Capture, here: Path) -> None:
    with killick.open("killick.db"):
        pass
    Path("killick.db").chmod(0o644)
    code, out, _ = call(capsys, "store", "doctor")
    assert code == 1
    found = [line for line in out.splitlines() if f"chmod go= {Path('killick.db').resolve()}" in line]
    assert found, out
    assert os.system("chmod go= killick.db") == 0
    assert call(capsys, "store", "doctor")[0] == 0


# what another process planted ---------------------------------------------------------------------


def test_a_link_among_the_bells_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("as it was")
    with contextlib.closing(SqliteStore(tmp_path / "killick.db")) as store:
        bells = tmp_path / "killick.db-bells"
        bells.mkdir(0o700)
        (bells / "1-0").symlink_to(target)
        (bells / "2-0").write_text("a file")
        store._notifier.notify(["r"])
        assert target.read_text() == "as it was"
        assert (bells / "2-0").read_text() == "a file"


def test_a_bells_folder_that_others_may_write_to_is_neither_rung_nor_hung_into(tmp_path: Path) -> None:
    with contextlib.closing(SqliteStore(tmp_path / "killick.db")) as store:
        bells = tmp_path / "killick.db-bells"
        bells.mkdir()
        bells.chmod(0o777)
        stop = store.watch(lambda run: None)
        assert list(bells.iterdir()) == []
        stop()


@pytest.mark.parametrize("planted", ["link", "pipe"])
def test_a_planted_holder_file_is_refused_in_one_line(tmp_path: Path, planted: str) -> None:
    holders = Holders(tmp_path / "killick.db", named=tuple)
    file = holders._file("me")
    if planted == "link":
        file.symlink_to(tmp_path / "made")
    else:
        os.mkfifo(file)
    with pytest.raises(StoreUnavailable, match="remove it"):
        holders.lock("me")
    assert not (tmp_path / "made").exists()


def test_a_planted_link_in_a_vault_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("mine")
    vault = tmp_path / "vault"
    vault.mkdir(0o700)
    (vault / "writing.lock").symlink_to(tmp_path / "made")
    with pytest.raises(killick.KillickError), Workspace(folder, vault=vault) as workspace:
        workspace.capture()
    assert not (tmp_path / "made").exists()


def test_a_kept_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert permissions.keep(key, "first") == "first"
    assert permissions.keep(key, "second") == "first"
    key.chmod(0o640)
    with pytest.raises(StoreUnavailable, match="remove the file"):
        permissions.keep(key, "third")
    key.unlink()
    key.symlink_to(tmp_path / "theirs")
    with pytest.raises(StoreUnavailable, match="remove it"):
        permissions.keep(key, "third")
