"""One run whose record cannot be read takes no list down: it is listed with its problem, beside the others."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import killick
from killick.cli.main import main


@killick.agent(name="broken_asks")
async def asks(run: killick.Run) -> str:
    return (await run.ask("Pay?", to="managers")).kind


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "killick.db")
    with killick.open(path) as kd:
        for name in ("damaged", "whole"):
            with pytest.raises(killick.RunWaiting):
                kd.run(asks, id=name)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "UPDATE events SET data = x'7b22ff' WHERE data IS NOT NULL"
            " AND number = (SELECT number FROM heads WHERE run = 'damaged')"
        )
    db.close()
    return path


@pytest.mark.parametrize("command", ["inbox", "inbox --json", "ps", "ps --json"])
def test_a_damaged_run_is_listed_with_its_problem(command: str, store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--store", store]) == 0
    told = capsys.readouterr().out
    assert "whole" in told
    assert "damaged" in told
    assert "cannot be read" in told or command == "ps --json"
    assert "1 waiting · 1 broken" in told or command != "ps"
