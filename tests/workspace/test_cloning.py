"""Copies that share their blocks, on a file system that has them: the files are quiet before they are read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from killick.workspace import Workspace, file_reader
from killick.workspace.file_reader import Cloning

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on a file system of its own, in a file, that shares blocks between files."""
    if os.geteuid() != 0 or which("mkfs.xfs") is None:
        pytest.skip("only root can mount a file system, and mkfs.xfs makes it (apt-get install xfsprogs)")
    home = tmp_path_factory.mktemp("sharing")
    image, mounted = home / "image", home / "mounted"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(400 * MEGABYTE)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_a_long_file_may_change_as_soon_as_its_copy_is_made(sharing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharing / "work"
    folder.mkdir()
    before = os.urandom(20 * MEGABYTE)
    (folder / "long").write_bytes(before)
    (folder / "short").write_bytes(b"short")
    with Workspace(folder, vault=sharing / "vault") as workspace:
        read_from_copy: list[int] = []
        read = file_reader.Cloned.read

        def changed_first(self: file_reader.Cloned, name: str, add: object) -> object:
            read_from_copy.append(self.copy)
            (folder / "long").write_bytes(b"changed while the copy is read")
            return read(self, name, add)  # type: ignore[arg-type]

        monkeypatch.setattr(file_reader.Cloned, "read", changed_first)
        taken = workspace.capture()
        assert len(read_from_copy) == 1
        monkeypatch.undo()
        assert workspace.read(taken.root, "long") == before
        later = workspace.capture()
        assert workspace.read(later.root, "long") == b"changed while the copy is read"
        workspace.restore(taken)
    assert (folder / "long").read_bytes() == before


def test_where_nothing_can_be_shared_files_are_read_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * MEGABYTE)
    cloning = Cloning(Path("/proc"))
    with (tmp_path / "long").open("rb") as file:
        assert cloning.copy(file.fileno()) is None
    cloning.begin()
    with (tmp_path / "long").open("rb") as file:
        assert cloning.copy(file.fileno()) is None
