"""Packs under load: what threads add at once is whole, and everything is synced before the index refers to it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from killick.workspace.vault import pack_writer
from killick.workspace.vault.index import Index
from killick.workspace.vault.vault import Vault
from seeds import draw_seed
from workspace.vaults import add, publish


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vault]:
    monkeypatch.setattr(pack_writer, "_BUFFER_BYTES", 20_000)
    made = Vault(tmp_path / "files")
    made._packs.pack_bytes_max = 100_000
    yield made
    made.close()


def test_threads_that_add_much_at_once_leave_everything_whole(vault: Vault) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    contents = [chance.randbytes(chance.randrange(8_000)) for _ in range(400)]
    with vault.writing() as one:
        with ThreadPoolExecutor(4) as threads:
            refs = list(threads.map(one.add, contents))
        one.publish(add(one, {}), "", 1)
    assert [vault.load(ref) for ref in refs] == contents, seed
    with closing(Vault(vault.path)) as fresh:
        assert [fresh.load(ref) for ref in refs] == contents, seed


def test_everything_is_synced_before_it_is_published(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    written, unsynced = os.pwritev, dict[int, bool]()
    sync, publish_rows = pack_writer._fdatasync, Index.publish

    def pwritev(descriptor: int, chunks: list[bytes], start: int) -> int:
        unsynced[os.fstat(descriptor).st_ino] = True
        return written(descriptor, chunks, start)

    def fdatasync(descriptor: int) -> None:
        unsynced[os.fstat(descriptor).st_ino] = False
        sync(descriptor)

    def published(*arguments: Any) -> None:
        assert len(unsynced) > 5
        assert not any(unsynced.values())
        publish_rows(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(pack_writer, "_fdatasync", fdatasync)
    monkeypatch.setattr(Index, "publish", published)
    chance = random.Random(1)
    publish(vault, {b"%d" % number: chance.randbytes(8_000) for number in range(100)})
