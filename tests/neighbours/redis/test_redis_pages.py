"""What the page of Redis shows is so, on a real Valkey server."""

from __future__ import annotations

from pathlib import Path

import pytest

from neighbours.redis import valkeys
from neighbours.trying import try_page


def test_what_the_page_shows_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", valkeys.emptied())
    try_page("redis", tmp_path)
