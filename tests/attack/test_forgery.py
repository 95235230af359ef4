"""A writer of an encrypted store without its keys approves nothing: a forgery is refused, and verification finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import servers
from encryption.forging import FORGERIES, forge, forge_a_snapshot
from killick.store import Store

forgeries = pytest.mark.parametrize("forgery", FORGERIES, ids=lambda each: each.__name__)


@forgeries
def test_a_writer_without_keys_forges_no_approval_and_is_found(
    forgery: Callable[[Store], None], tmp_path: Path
) -> None:
    forge(str(tmp_path / "killick.db"), forgery)


@forgeries
def test_a_writer_without_keys_forges_no_approval_in_memory(forgery: Callable[[Store], None]) -> None:
    forge("memory:", forgery)


@pytest.mark.slow
@forgeries
def test_a_writer_without_keys_forges_no_approval_on_postgresql(forgery: Callable[[Store], None]) -> None:
    forge(servers.postgres_store(), forgery)


@pytest.mark.parametrize("url", ["killick.db", "memory:"])
def test_a_forged_snapshot_is_not_read(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forge_a_snapshot(url)
