"""Killed at any moment: what was published is whole, nothing is half there, and the next process goes on at once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from killick.workspace.vault.index import Index
from killick.workspace.vault.vault import Vault
from seeds import draw_seed, repeats
from workspace.vaults import add, publish, read

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("killing_vaults.py")


def run(mode: str, folder: Path, *numbers: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), mode, str(folder), *map(str, numbers)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(PROGRAM.parent.parent), "PATH": ""},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("scene", "step", "points"),
    [
        ("publishing", 9, 40),
        ("abandoning", 15, 25),
        ("restoring", 3, 12),
        ("sweeping", 30, 40),
        ("compressing", 40, 25),
    ],
)
def test_dying_before_any_call_leaves_every_snapshot_whole(tmp_path: Path, scene: str, step: int, points: int) -> None:
    seed, apart = draw_seed(), repeats(2, 1)
    found = run(scene, tmp_path, step * apart, seed)
    assert found["points"] >= points // apart, seed
    assert (found["new"] > 0) == (scene == "publishing"), seed


def test_kills_at_random_moments_lose_no_snapshot_that_was_published(tmp_path: Path) -> None:
    seed, kills = draw_seed(), repeats(40, 100)
    found = run("moments", tmp_path, kills, seed)
    assert found["published"] > kills // 10, seed


def ghost(vault: Vault, files: dict[bytes, bytes]) -> None:
    """Publish in a process that dies when its transaction is on the disk and nobody has been told of it yet: what
    processes share in memory still says that it is not there, and whoever has to recover the index will find it."""
    shared = vault.path / "index.db-shm"
    before = shared.read_bytes()
    # Not by a fork, before which this process would close its connections.
    program = (
        "import os, signal, sys; from pathlib import Path; from killick.workspace.vault.vault import Vault; "
        "from workspace.vaults import publish; "
        "publish(Vault(Path(sys.argv[1])), {bytes.fromhex(sys.argv[2]): bytes.fromhex(sys.argv[3])}, 'ghost'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    [(name, content)] = files.items()
    died = subprocess.run(
        [sys.executable, "-c", program, str(vault.path), name.hex(), content.hex()],
        env={"PYTHONPATH": str(PROGRAM.parent.parent), "PATH": ""},
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    with shared.open("r+b") as file:
        file.write(before)


def recovered(vault: Vault, to: Path) -> Vault:
    """The vault as it is found when every process is dead."""
    shutil.copytree(vault.path, to, ignore=shutil.ignore_patterns("*-shm"))
    return Vault(to)


def test_a_snapshot_whose_process_died_while_it_committed_is_whole_if_it_comes_to_light(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "files")
    publish(vault, {b"a": b"1" * 500}, "first")
    ghost(vault, {b"b": os.urandom(3_000)})
    assert [reference.owner for reference in vault.references()] == ["first"]
    # So it does come to light: otherwise this would prove nothing.
    found = recovered(vault, tmp_path / "at once")
    assert {reference.owner for reference in found.references()} == {"first", "ghost"}
    assert found.verify() == []
    found.close()
    # Somebody appends to the same pack, and dies before publishing.
    with vault.writing() as unfinished:
        add(unfinished, {b"c": os.urandom(2_500_000)})
        found = recovered(vault, tmp_path / "later")
        assert {reference.owner for reference in found.references()} == {"first"}
        assert found.verify() == []
        found.close()
    vault.close()


def test_without_a_commit_before_the_cut_it_would_not_be_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(tmp_path / "files")
    publish(vault, {b"a": b"1" * 500}, "first")
    ghost(vault, {b"b": os.urandom(3_000)})
    monkeypatch.setattr(Index, "supersede", lambda index: None)
    with vault.writing() as unfinished:
        add(unfinished, {b"c": os.urandom(2_500_000)})
        found = recovered(vault, tmp_path / "later")
        assert {reference.owner for reference in found.references()} == {"first", "ghost"}
        assert found.verify() != []
        found.close()
    vault.close()


def test_a_sweep_deletes_no_pack_that_a_transaction_still_to_come_to_light_needs(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "files")
    publish(vault, {b"a": b"1" * 500}, "first")
    with vault.writing() as has_the_first:
        has_the_first.add(b"x")
        ghost(vault, {b"b": os.urandom(3_000)})
    assert len(list((vault.path / "packs").iterdir())) == 2
    vault.sweep()
    assert len(list((vault.path / "packs").iterdir())) == 1
    found = recovered(vault, tmp_path / "later")
    assert {reference.owner for reference in found.references()} == {"first"}
    assert found.verify() == []
    assert list(read(found, found.references()[0].root)) == [b"a"]
    found.close()
    vault.close()
