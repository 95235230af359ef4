"""What the system refuses is told in one line that says what to do, and costs nothing but the snapshot being made."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from killick import permissions
from killick.errors import KillickError, StoreBroken, StoreBusy, StoreError, StoreFormat, StoreUnavailable
from killick.workspace.vault import locks, pack_writer, sweep
from killick.workspace.vault import packs as packs_module
from killick.workspace.vault import snapshot_writer as writing
from killick.workspace.vault.index import Index
from killick.workspace.vault.vault import Vault
from workspace.vaults import add, packed_bytes, packs, publish, read

TESTS = Path(__file__).parent.parent


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path / "files")
    yield made
    made.close()


def told_by(program: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        check=False,
        timeout=300,
    )
    return done.stdout.strip() or done.stderr[-2_000:]


FILL = """
import os, pathlib, sys
from killick.errors import StoreFull
from killick.workspace.vault.vault import Vault
from workspace.vaults import add, packed_bytes, publish, read

folder = pathlib.Path(sys.argv[1])
vault = Vault(folder / "files")
first = {b"a": os.urandom(100_000)}
root = publish(vault, first)
before = packed_bytes(vault)
for size in (100, 4_000, 3_000_000):
    try:
        with vault.writing() as writing:
            for _ in range(3_000_000 // size):
                writing.add(os.urandom(size))
            writing.publish(add(writing, {}), "never", 1)
        raise SystemExit("the disk never filled up")
    except StoreFull as error:
        assert str(error) == f"{vault.path}: the disk is full; free some space and try again, nothing was lost", error
    # What there was no room for takes none.
    assert packed_bytes(vault) == before, (size, packed_bytes(vault), before)
    assert vault.verify() == [] and len(vault.references()) == 1
more = {b"b": os.urandom(300_000)}
assert read(vault, publish(vault, more)) == more
assert read(vault, root) == first

# When packs cannot be copied for want of room, what is only deleted still goes, and nothing is lost.
kept = [os.urandom(20_000) for _ in range(10)]
vault._packs.pack_bytes_max = 100_000
for number, data in enumerate(kept):
    publish(vault, {b"k": data, b"g": os.urandom(60_000)}, "gone")
root = publish(vault, {b"%d" % number: data for number, data in enumerate(kept)}, "kept")
vault.forget("gone")
(folder / "ballast").write_bytes(b"")
with (folder / "ballast").open("ab", buffering=0) as ballast:
    try:
        while ballast.write(bytes(1_000)): pass
    except OSError: pass
try:
    vault.sweep()
except StoreFull:
    pass
assert vault.verify() == []
(folder / "ballast").unlink()
vault.sweep()
assert vault.verify() == []
assert sorted(read(vault, root).values()) == sorted(kept)
vault.close()
print("held")
"""


@pytest.mark.slow
def test_a_full_disk_is_a_clear_error_and_everything_works_again_when_there_is_room(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec "$@"'
    inside = ("unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh")
    allowed = subprocess.run([*inside, "true"], capture_output=True, check=False)
    if allowed.returncode:
        pytest.skip(f"this machine lets nobody mount a small disk: {allowed.stderr.decode().strip()}")
    assert told_by(FILL, tmp_path, prefix=inside) == "held"


NOT_WRITABLE = """
import os, sys
import killick, encodings.idna
from killick.errors import StoreReadOnly
from killick.workspace.vault.vault import Vault
from workspace.vaults import publish
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    publish(Vault(sys.argv[1]), {})
except StoreReadOnly as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["files", "files/below"])
def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.mktemp("closed")
    with closing(Vault(folder / "files")) as vault:
        publish(vault, {})
    assert f"{folder / name}" in told_by(NOT_WRITABLE, folder / name)
    assert "cannot be written; check the permissions" in told_by(NOT_WRITABLE, folder / name)


def test_a_file_is_no_vault(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("notes")
    vault = Vault(tmp_path / "files")
    with pytest.raises(StoreUnavailable, match="is not a folder, so it cannot be a vault; choose another name"):
        publish(vault, {})
    with pytest.raises(StoreUnavailable, match="is not a folder"):
        publish(Vault(tmp_path / "files" / "below"), {})
    assert (tmp_path / "files").read_text() == "notes"


def test_an_index_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    other = sqlite3.connect(tmp_path / "files" / "index.db")
    other.execute("CREATE TABLE notes (x)")
    other.close()
    with pytest.raises(StoreUnavailable, match="is not the index of a vault; choose another name"):
        publish(Vault(tmp_path / "files"), {})


def test_an_index_of_a_later_format_is_refused_by_name(vault: Vault) -> None:
    publish(vault, {})
    vault.close()
    index = sqlite3.connect(vault.path / "index.db")
    index.execute("PRAGMA user_version = 2")
    index.close()
    with closing(Vault(vault.path)) as later, pytest.raises(StoreFormat, match="upgrade killick"):
        later.references()


@pytest.mark.parametrize("how", ["gone", "empty", "garbage"])
def test_a_lost_index_is_told_and_the_packs_are_left_as_they_are(vault: Vault, how: str) -> None:
    root = publish(vault, {b"a": os.urandom(5_000)})
    vault.close()
    before = packs(vault)[0].read_bytes()
    index = vault.path / "index.db"
    shutil.copy(index, vault.path.parent / "kept.db")
    if how == "gone":
        index.unlink()
    else:
        index.write_bytes(b"" if how == "empty" else b"garbage" * 1_000)
    for _ in range(2):
        with closing(Vault(vault.path)) as again:
            with pytest.raises(StoreBroken):
                publish(again, {})
            with pytest.raises(StoreBroken):
                again.load(root)
    assert packs(vault)[0].read_bytes() == before
    shutil.copy(vault.path.parent / "kept.db", index)
    with closing(Vault(vault.path)) as mended:
        assert mended.verify() == []


def test_a_vault_that_was_removed_under_us_is_a_clear_error(vault: Vault) -> None:
    publish(vault, {})
    shutil.rmtree(vault.path)
    with pytest.raises(StoreError) as caught:
        publish(vault, {b"a": b"1"})
    assert str(vault.path) in str(caught.value)


def test_a_damaged_index_is_told_by_verification(vault: Vault) -> None:
    publish(vault, {b"%d" % number: b"%d" % number for number in range(2_000)})
    vault.close()
    index = vault.path / "index.db"
    data = bytearray(index.read_bytes())
    for at in range(len(data) // 2, len(data) - 2_048, 2_048):
        data[at : at + 100] = bytes(100)
    index.write_bytes(data)
    with closing(Vault(vault.path)) as again:
        problems = again.verify()
    assert problems[0].startswith(f"the index of the vault {vault.path} is damaged: ")
    assert all(str(vault.path) in problem for problem in problems)


def test_a_write_lock_that_is_never_given_back_is_busy_not_locked(tmp_path: Path) -> None:
    vault = Vault(tmp_path / "files", busy_seconds=0.05)
    publish(vault, {})
    other = sqlite3.connect(vault.path / "index.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="write lock"):
        publish(vault, {b"a": b"1" * 100})
    other.execute("ROLLBACK")
    other.close()
    root = publish(vault, {b"a": b"1" * 100})
    assert read(vault, root) == {b"a": b"1" * 100}
    assert len(packs(vault)) == 1
    vault.close()


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_an_interruption_while_it_is_published_leaves_a_snapshot_whole_or_not_at_all(
    vault: Vault, monkeypatch: pytest.MonkeyPatch, committed: bool, is_first: bool
) -> None:
    if not is_first:
        publish(vault, {b"z": b"1" * 100}, "before")
    real = Index.publish

    def interrupted(*arguments: Any, **options: Any) -> None:
        if committed:
            real(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Index, "publish", interrupted)
    files = {b"a": os.urandom(5_000)}
    with pytest.raises(KeyboardInterrupt):
        publish(vault, files, "new")
    monkeypatch.undo()
    assert [read(vault, each.root) for each in vault.references("new")] == [files] * committed
    assert (packed_bytes(vault) > 5_000) == committed
    more = publish(vault, {b"b": os.urandom(100)}, "after")
    assert len(read(vault, more)[b"b"]) == 100
    assert vault.verify() == []
    assert len(packs(vault)) == 1


# the nth operation fails --------------------------------------------------------------------------


class Failing:
    """The operating system, whose nth call that touches a file fails."""

    TOUCHING = frozenset(
        {"open", "pwrite", "pwritev", "fdatasync", "fsync", "ftruncate", "unlink", "fstat", "stat", "listdir", "pread"}
    )

    def __init__(self, count: int, number: int) -> None:
        self.left = count
        self.number = number

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self.counted(real) if name in self.TOUCHING else real

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **options)

        return call


def publish_more(vault: Vault) -> None:
    publish(vault, {b"a": os.urandom(50_000), b"b": os.urandom(50_000)}, "more")


def abandon(vault: Vault) -> None:
    with vault.writing() as writing:
        add(writing, {b"a": os.urandom(50_000)})


@pytest.mark.gate(3)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("do", [publish_more, abandon, Vault.sweep, Vault.compress])
def test_whichever_call_of_the_system_fails_nothing_is_lost_and_the_next_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, do: Callable[[Vault], object], number: int
) -> None:
    failures = 0
    monkeypatch.setattr(writing, "_COMPRESSED_BYTES_MAX", 20_000)
    monkeypatch.setattr(pack_writer, "_BUFFER_BYTES", 10_000)
    for count in range(1, 200):
        vault = Vault(tmp_path / f"files {count}")
        vault._packs.pack_bytes_max = 60_000
        files = {b"k": os.urandom(5_000)}
        publish(vault, {**files, b"g": os.urandom(40_000)}, "gone")
        root = publish(vault, files, "kept")
        vault.forget("gone")
        with packs(vault)[0].open("ab") as torn:
            torn.write(b"torn")
        system = Failing(count, number)
        failed: BaseException | None = None
        with monkeypatch.context() as failing:
            for module in (packs_module, pack_writer, sweep, locks, permissions):
                failing.setattr(module, "os", system)
            failing.setattr(pack_writer, "_fdatasync", system.fdatasync)
            try:
                do(vault)
            except KillickError as error:
                failed = error
        assert failed is None or str(vault.path) in str(failed), (count, failed)
        failures += failed is not None
        assert vault.verify() == [], count
        assert read(vault, root) == files, count
        more = publish(vault, {b"c": os.urandom(1_000)}, "after")
        vault.sweep()
        assert vault.verify() == [], count
        assert len(read(vault, more)[b"c"]) == 1_000
        vault.close()
        if system.left > 0:
            break
    assert failures > 3
