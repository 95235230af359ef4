"""What was erased is in no byte of any file, and cannot be guessed from what stays."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import killick
from killick.cli.main import main
from killick.model import event_codec
from killick.model.events import to_text
from killick.model.hashing import data_hash

SECRET = "ssn-078-05-1120"
LONG = f"letter to {SECRET}: " + "all is well, and nothing is owed. " * 60


@killick.tool(effect="idempotent")
async def look_up(ssn: str, letter: str) -> dict[str, str]:
    return {"found": ssn, "answered": letter[::1]}


@killick.agent
async def clerk(run: killick.Run, _: None) -> str:
    said = await run.wait("order")
    await run.call(look_up, said["ssn"], said["letter"])
    answer = await run.ask("Go on?", to="ann")
    return "done" if answer.approved else "left"


def files_with(folder: Path, *texts: str) -> list[str]:
    """The files with one of these texts in any byte."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in found if any(text.encode() in path.read_bytes() for text in texts)]


def story(store: Path) -> killick.Client:
    """A run that got a secret by message, argument, result and comment; searched, and its client still open."""
    kd = killick.open(str(store))
    with pytest.raises(killick.errors.RunWaiting):
        kd.run(clerk, None, id="r")
    kd.send("r", "order", {"ssn": SECRET, "letter": LONG})
    with pytest.raises(killick.errors.RunWaiting):
        kd.run(clerk, None, id="r")
    kd.answer("r", "approve", comment=f"she is {SECRET}", by="ann")
    kd.run(clerk, None, id="r")
    assert list(kd.find.calls("look_up", where={"ssn": SECRET}))
    return kd


def erase(store: Path, seq: int) -> int:
    return main(["store", "erase", "r", "--seq", str(seq), "--reason", "asked", "--yes", "--store", str(store)])


def erase_all(kd: killick.Client, store: Path) -> None:
    for row in list(kd.runtime.log.rows("r")):
        if row.data is not None:
            assert erase(store, row.seq) == 0


def test_no_byte_of_an_erased_value_stays_in_any_file_while_a_client_is_open(tmp_path: Path) -> None:
    store = tmp_path / "killick.db"
    with story(store) as kd:
        assert files_with(tmp_path, SECRET)
        erase_all(kd, store)
        assert files_with(tmp_path, SECRET, SECRET[4:], "she is") == []
        with closing(sqlite3.connect(store)) as db:
            terms = db.execute("SELECT count(*) FROM marks").fetchone()
        assert terms == (0,), "terms of erased words are hashes, and can be guessed"
        assert kd.store.verify().holds
    assert files_with(tmp_path, SECRET) == []


def test_an_erase_says_when_a_reader_keeps_the_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "killick.db"
    with story(store) as kd:
        seq = next(row.seq for row in kd.runtime.log.rows("r") if row.data is not None and SECRET.encode() in row.data)
        with closing(sqlite3.connect(store, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM events").fetchone()
            assert erase(store, seq) == 0
        assert "until it ends" in capsys.readouterr().out


def test_a_short_erased_value_cannot_be_guessed_from_the_hash_that_stays(tmp_path: Path) -> None:
    @killick.tool(effect="reads")
    async def pin() -> int:
        return 4711

    @killick.agent
    async def asker(run: killick.Run, _: None) -> int:
        return await run.call(pin)

    with killick.open(str(tmp_path / "killick.db")) as kd:
        kd.run(asker, None, id="r")
        ended = next(row for row in kd.runtime.log.rows("r") if row.data is not None and b"4711" in row.data)
        kept = event_codec.decode(ended.body).data
        guessed = (ended.data or b"").rstrip(b" \t}").replace(b"\t", b"").replace(b" ", b"") + b"}"
        assert json.loads(guessed) == json.loads(ended.data or b"")
        assert to_text(data_hash(guessed)) != kept
        assert to_text(data_hash(ended.data or b"")) == kept
