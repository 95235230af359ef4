"""Looks that come to nothing: the next one makes up for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from killick.workspace import Workspace, batch_reader
from killick.workspace.vault.snapshot_writer import SnapshotWriter


def test_what_a_look_that_failed_had_heard_of_is_found_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "a").write_text("one")
    with Workspace(folder, vault=tmp_path / "vault") as workspace:
        first = workspace.capture()
        (folder / "deep" / "er" / "a").write_text("two")

        def full(writing: SnapshotWriter, data: object) -> bytes:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(SnapshotWriter, "add", full)
            with pytest.raises(OSError, match="No space"):
                workspace.capture()
        later = workspace.capture()
        assert workspace.read(first.root, "deep/er/a") == b"one"
        assert workspace.read(later.root, "deep/er/a") == b"two"


def test_long_files_that_are_read_beside_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reader, "_LONG_BYTES", 10)
    monkeypatch.setattr(batch_reader, "_ALONE_BYTES", 30)
    folder = tmp_path / "work"
    for number in range(40):
        (folder / f"{number % 4}").mkdir(parents=True, exist_ok=True)
        (folder / f"{number % 4}" / f"{number}").write_text(f"{number}" * (number + 1))
    with Workspace(folder, vault=tmp_path / "vault") as workspace:
        found = workspace.capture()
        for number in range(40):
            assert workspace.read(found.root, f"{number % 4}/{number}") == (f"{number}" * (number + 1)).encode()


def test_what_was_stored_for_a_snapshot_that_was_not_published_is_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a").write_text("one")
    with Workspace(folder, vault=tmp_path / "vault") as workspace:
        workspace.capture()
        (folder / "a").write_text("two")
        (folder / "b").mkdir()

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(SnapshotWriter, "publish", full)
            with pytest.raises(OSError, match="No space"):
                workspace.capture()
        later = workspace.capture()
        assert workspace.read(later.root, "a") == b"two"
        assert workspace.vault.verify() == []
        assert sorted(path for path, _ in workspace.files(later.root)) == [b"a", b"b"]


def test_what_was_swept_away_meanwhile_is_stored_again(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a").write_text("one")
    (folder / "b").write_text("two")
    with Workspace(folder, vault=tmp_path / "vault") as workspace:
        workspace.capture("first")
        assert workspace.vault.forget("first") == 1
        workspace.vault.sweep()
        later = workspace.capture("second")
        assert workspace.vault.verify() == []
        assert sorted(path for path, _ in workspace.files(later.root)) == [b"b", b"deep", b"deep/a"]
        assert workspace.read(later.root, "deep/a") == b"one"
