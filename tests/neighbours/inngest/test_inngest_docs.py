"""The page runs as it stands, against the server of these tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from neighbours.inngest.inngest_server import InngestServer, free_port
from neighbours.trying import try_page


def test_what_the_page_shows_is_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with InngestServer() as server:
            monkeypatch.setenv("INNGEST_BASE_URL", server.url)
            monkeypatch.setenv("PORT", str(port := free_port()))
            await asyncio.to_thread(try_page, "inngest", tmp_path, {8000: port})

    asyncio.run(story())
