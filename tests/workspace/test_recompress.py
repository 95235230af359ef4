"""Storing in a hurry: much that is new is stored as it is, and compressed when there is time, with nothing lost."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from killick.clock import ManualClock
from killick.errors import SnapshotBroken
from killick.workspace.vault import pack_writer, snapshot_writer
from killick.workspace.vault.index import Index
from killick.workspace.vault.vault import Vault
from seeds import draw_seed
from workspace.vaults import add, packed_bytes, packs, publish, read, some_files


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    monkeypatch.setattr(snapshot_writer, "_COMPRESSED_BYTES_MAX", 10_000)
    made = Vault(tmp_path / "files")
    made._packs.loose_bytes_max = 100_000
    yield made
    made.close()


def texts(count: int, seed: int = 1) -> dict[bytes, bytes]:
    chance = random.Random(seed)
    return {b"%d" % number: b"%x the same line again\n" % chance.getrandbits(64) * 200 for number in range(count)}


def test_a_little_that_is_new_is_compressed_at_once(vault: Vault) -> None:
    files = texts(1)
    publish(vault, files)
    assert packed_bytes(vault) < 1_000
    assert vault.compress() == 0


def test_much_that_is_new_is_stored_as_it_is_and_compressed_when_there_is_time(vault: Vault) -> None:
    files = texts(100)
    size = sum(map(len, files.values()))
    root = publish(vault, files)
    before = packed_bytes(vault)
    assert size - 10_000 < before < size + 20_000
    assert len(packs(vault)) > 5
    assert read(vault, root) == files
    assert vault.compress() == before - packed_bytes(vault) > 0.9 * size
    assert len(packs(vault)) == 1
    with closing(Vault(vault.path)) as fresh:
        assert read(fresh, root) == files
    assert vault.verify() == []
    assert vault.compress() == 0


def test_what_does_not_compress_is_tried_once(vault: Vault) -> None:
    files = {b"%d" % number: os.urandom(5_000) for number in range(50)}
    root = publish(vault, files)
    assert vault.compress() < 10_000
    before = [(path.name, path.stat().st_mtime_ns) for path in packs(vault)]
    assert vault.compress() == 0
    assert [(path.name, path.stat().st_mtime_ns) for path in packs(vault)] == before
    assert read(vault, root) == files


def test_it_stops_when_its_time_is_over_and_goes_on_another_time(tmp_path: Path, vault: Vault) -> None:
    class Running(ManualClock):
        def monotonic(self) -> float:
            self.advance(1.0)
            return super().monotonic()

    files = texts(200)
    root = publish(vault, files)
    many = len(packs(vault))
    hasty = Vault(vault.path, clock=Running())
    left = [many]
    while hasty.compress(seconds=3.5):
        left.append(len(packs(vault)))
        assert read(vault, root) == files
    assert len(left) > 4
    assert left == sorted(left, reverse=True)
    assert left[-1] == 1
    assert vault.verify() == []
    hasty.close()


def test_nothing_is_appended_to_a_loose_pack_by_others(vault: Vault) -> None:
    publish(vault, texts(30))
    sizes = {path: path.stat().st_size for path in packs(vault)}
    for number in range(20):
        with closing(Vault(vault.path)) as other:
            publish(other, texts(1, seed=number), str(number))
    grown = [path for path in packs(vault) if path.stat().st_size != sizes.get(path)]
    assert [path.name for path in grown] == ["0001.pack"]


def test_what_is_being_written_is_left_alone(vault: Vault) -> None:
    files = texts(50)
    with vault.writing() as one:
        root = add(one, files)
        one.publish(root, "first", 1)
        more = add(one, {**files, **texts(50, seed=2)})
        assert vault.compress() == 0
        one.publish(more, "second", 1)
    assert read(vault, root) == files
    assert read(vault, more) == {**files, **texts(50, seed=2)}
    assert vault.compress() > 0
    assert vault.verify() == []
    assert len(packs(vault)) == 1


def test_one_at_a_time_compresses_and_another_does_not_wait(vault: Vault) -> None:
    publish(vault, texts(100))
    with vault._one_sweeper(busy_seconds=1):
        assert vault.compress() == 0
    assert vault.compress() > 0


def test_garbage_in_a_loose_pack_goes_with_it(vault: Vault) -> None:
    kept, gone = texts(20), texts(100, seed=2)
    publish(vault, gone, "gone")
    root = publish(vault, kept, "kept")
    vault.forget("gone")
    before = packed_bytes(vault)
    swept = vault.sweep()
    assert swept.bytes_freed == before - packed_bytes(vault)
    assert packed_bytes(vault) < 20_000
    assert read(vault, root) == kept
    assert vault.compress() == 0
    assert vault.verify() == []


def test_what_is_damaged_stays_where_it_is_and_is_told(vault: Vault) -> None:
    files = texts(60)
    root = publish(vault, files)
    broken = packs(vault)[2]
    data = broken.read_bytes()
    broken.write_bytes(data[: len(data) // 2])
    vault.compress()
    assert vault.compress() == 0
    assert broken.exists()
    assert any(problem.startswith("pack 3 ") for problem in vault.verify())
    broken.write_bytes(data)
    assert vault.verify() == []
    assert read(vault, root) == files


def test_a_damaged_object_is_found_after_it_was_compressed_too(vault: Vault) -> None:
    root = publish(vault, texts(60))
    broken = packs(vault)[2]
    data = bytearray(broken.read_bytes())
    data[1_000] ^= 1
    broken.write_bytes(data)
    assert len(vault.verify()) == 1
    vault.compress()
    assert len(vault.verify()) == 1
    with closing(Vault(vault.path)) as fresh, pytest.raises(SnapshotBroken, match="is damaged"):
        read(fresh, root)


def test_who_reads_while_it_is_compressed_finds_everything(vault: Vault) -> None:
    files = {**texts(150), **some_files(random.Random(5), 50)}
    root = publish(vault, files)
    over, wrong, reads = threading.Event(), list[str](), 0

    def reader() -> None:
        nonlocal reads
        while not over.is_set():
            own = Vault(vault.path)
            try:
                reads += read(own, root) == files
            except SnapshotBroken as error:
                wrong.append(str(error))
            own.close()

    thread = threading.Thread(target=reader)
    thread.start()
    while not reads and thread.is_alive():
        over.wait(0.01)
    assert vault.compress() > 0
    before = reads
    while reads < before + 2 and not wrong and thread.is_alive():
        over.wait(0.01)
    over.set()
    thread.join()
    assert wrong == []


def test_however_much_is_new_not_too_many_files_are_open(vault: Vault) -> None:
    vault._packs.loose_bytes_max = 5_000
    vault._packs.pack_bytes_max = 1_000_000
    files = {b"%d" % number: os.urandom(2_000) for number in range(1_000)}
    with vault.writing() as one:
        root = add(one, files)
        assert len(packs(vault)) < 70
        one.publish(root, "", 1)
    assert read(vault, root) == files
    vault.compress()
    assert len(packs(vault)) < 10
    assert read(vault, root) == files
    assert vault.verify() == []


def test_threads_that_add_much_at_once_leave_everything_whole(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_writer, "_BUFFER_BYTES", 20_000)
    seed = draw_seed()
    chance = random.Random(seed)
    contents = [chance.randbytes(chance.randrange(8_000)) for _ in range(400)]
    with vault.writing() as one:
        with ThreadPoolExecutor(4) as threads:
            refs = list(threads.map(one.add, contents))
        one.publish(add(one, {}), "", 1)
    assert [vault.load(ref) for ref in refs] == contents, seed
    vault.compress()
    fresh = Vault(vault.path)
    assert [fresh.load(ref) for ref in refs] == contents, seed
    fresh.close()


def test_everything_is_synced_before_it_is_published(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_writer, "_BUFFER_BYTES", 20_000)
    written, unsynced = os.pwritev, dict[int, bool]()
    sync = pack_writer._fdatasync

    def pwritev(descriptor: int, chunks: list[bytes], start: int) -> int:
        unsynced[os.fstat(descriptor).st_ino] = True
        return written(descriptor, chunks, start)

    def fdatasync(descriptor: int) -> None:
        unsynced[os.fstat(descriptor).st_ino] = False
        sync(descriptor)

    publish_rows = Index.publish

    def published(*arguments: Any, **options: Any) -> None:
        assert len(unsynced) > 5
        assert not any(unsynced.values())
        publish_rows(*arguments, **options)
        unsynced.clear()

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(pack_writer, "_fdatasync", fdatasync)
    monkeypatch.setattr(Index, "publish", published)
    publish(vault, texts(200))
    assert unsynced == {}
