"""What changed on the disk while a run waited: it ends as if nothing had changed, or is refused and does nothing."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

import killick
from killick.cli.main import main
from killick.errors import KillickError, RunBroken
from killick.log import Log
from seeds import draw_seed, repeats

FAR: Final[list[str]] = []
"""What reached the far side."""

LONG: Final = "a long quotation " * 400


@killick.tool(effect="reads")
def quote(item: str) -> str:
    return f"price 100 of {item}"


@killick.tool(effect="reads")
def terms(item: str) -> list[str]:
    return [f"{LONG}{item}", "pay 100"]


@killick.tool(effect="idempotent", compensate=lambda effect: FAR.append(f"undo {effect.arguments} {effect.result}"))
def reserve(item: str, note: str) -> str:
    FAR.append(f"reserve {item} {note}")
    return f"reservation of {item}"


@killick.tool(effect="at_most_once")
def pay(price: str, terms: list[str], reservation: str, message: Any) -> str:
    FAR.append(f"pay {price} {terms} {reservation} {message}")
    return price


@killick.agent(name="damage.buyer", on_failure="compensate")
async def buyer(run: killick.Run, item: str) -> str:
    price = await run.call(quote, item)
    conditions = await run.call(terms, item)
    held = await run.call(reserve, item, f"{price} {LONG}")
    await run.update(price=price)
    for _ in range(6):
        await run.call(quote, "another item")
    answer = await run.ask("Pay?")
    message = await run.wait("invoice")
    if not answer.approved:
        raise ValueError("rejected")
    return await run.call(pay, run.context["price"], conditions, held, message)


@pytest.fixture(autouse=True)
def _few_events_to_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FAR.clear()
    assert Log.__init__.__kwdefaults__ is not None
    monkeypatch.setitem(Log.__init__.__kwdefaults__, "snapshot_every", 8)
    yield
    FAR.clear()


def build(path: Path, verb: Any = "approve") -> None:
    """A store with a run that was answered and sent a message, which no process has read yet."""
    with killick.open(str(path)) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(buyer, "a chair", id="r")
        kd.send("r", "invoice", {"amount": 100, "text": LONG})
        kd.answer("r", verb, by="mia")
    FAR.clear()


def changed(path: Path, statement: str, *values: Any) -> int:
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(statement, values).rowcount


def outcome(path: Path) -> list[str] | KillickError:
    """What the far side got of the resumed run, or the refusal."""
    FAR.clear()
    try:
        with killick.open(str(path)) as kd:
            kd.advance("r")
    except KillickError as error:
        refused = error
    else:
        return list(FAR)
    assert FAR == [], refused
    return refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    build(tmp_path / "killick.db")
    return tmp_path / "killick.db"


def quarantined(path: Path) -> str | None:
    with killick.open(str(path)) as kd:
        return kd.runtime.store.quarantined("r")


WHERE: Final = {
    "the data of an event": ("events", "data", b"price 100", b"price 900"),
    "a chunk": ("pieces", "body", b"quotation", b"quotatiom"),
    "the body of an event": ("events", "body", b'"step":"2"', b'"step":"3"'),
    "the arguments of an effect": ("events", "data", b"a chair", b"a chain"),
    "the context": ("events", "data", b'"price":"price 1', b'"price":"price 2'),
    "a message": ("inbox", "body", b'"amount":100', b'"amount":900'),
}


@pytest.mark.parametrize("where", WHERE)
def test_a_value_that_changed_on_the_disk_is_never_used(path: Path, where: str) -> None:
    table, column, was, now = WHERE[where]
    with closing(sqlite3.connect(path)) as db, db:
        key = "number || '.' || message" if table == "inbox" else "rowid"
        found = db.execute(f"SELECT {key}, {column} FROM {table} WHERE instr({column}, ?)", (was,)).fetchall()
        assert found
        for place, value in found:
            new = value.replace(was, now)
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (new, place))
    refused = outcome(path)
    assert isinstance(refused, RunBroken), refused
    assert "store verify" in str(refused)
    reason = quarantined(path)
    assert reason is not None
    assert where == "a message" or " at event " in reason
    with killick.open(str(path)) as kd:
        assert kd.advance_due() == []
        assert not kd.store.verify().holds


def test_a_changed_body_is_damage_and_not_a_divergence(path: Path) -> None:
    assert changed(path, "UPDATE events SET body = CAST(replace(CAST(body AS TEXT), 'terms', 'germs') AS BLOB)")
    refused = outcome(path)
    assert isinstance(refused, RunBroken)
    with killick.open(str(path)) as kd:
        assert kd.info("r").status == "waiting"


def test_a_compensation_gets_no_changed_argument(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    build(path, "reject")
    before = shutil.copy(path, tmp_path / "before.db")
    assert [each.startswith("undo") for each in outcome(Path(before))] == [True]  # type: ignore[union-attr]
    assert changed(path, "UPDATE pieces SET body = CAST(replace(CAST(body AS TEXT), 'price 100', 'price 900') AS BLOB)")
    assert isinstance(outcome(path), RunBroken)
    assert FAR == []


def test_snapshots_that_do_not_match_the_log_are_dropped_and_change_nothing(path: Path, tmp_path: Path) -> None:
    right = outcome(Path(shutil.copy(path, tmp_path / "right.db")))
    assert changed(path, "UPDATE snapshots SET hash = zeroblob(32)")
    assert outcome(path) == right


def test_a_damaged_value_is_shown_as_damaged_and_is_not_exported(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert changed(path, "UPDATE pieces SET body = CAST(replace(CAST(body AS TEXT), 'quotation', 'quotatiom') AS BLOB)")
    assert main(["show", "r", "--why", "2", "--store", str(path)]) == 0
    assert "a damaged value" in capsys.readouterr().out
    assert main(["store", "export", "r", "--store", str(path)]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    assert "r: broken" in written.err


def test_the_same_value_stored_again_restores_a_damaged_chunk(path: Path) -> None:
    assert changed(path, "UPDATE pieces SET body = CAST(replace(CAST(body AS TEXT), 'quotation', 'quotatiom') AS BLOB)")
    with killick.open(str(path)) as kd:
        with pytest.raises(killick.RunWaiting):
            kd.run(buyer, "a chair", id="again")
        kd.send("again", "invoice", {"amount": 100, "text": LONG})
        kd.answer("again", "approve", by="mia")
        assert kd.advance("again").status == "completed"


def flipped(value: Any, chance: random.Random) -> Any:
    """A value with one bit turned over."""
    if isinstance(value, int):
        return value ^ (1 << chance.randrange(8))
    raw = bytearray(value.encode() if isinstance(value, str) else value)
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(7 if isinstance(value, str) else 8)
    return raw.decode(errors="replace") if isinstance(value, str) else bytes(raw)


def cells(path: Path) -> list[tuple[str, str, int, Any]]:
    """Every column of every row of the tables that a resume reads: by table, column and position."""
    found: list[tuple[str, str, int, Any]] = []
    with closing(sqlite3.connect(path)) as db:
        for table in ("heads", "events", "pieces", "inbox", "runs", "tags", "snapshots", "piece_uses"):
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            for position, row in enumerate(db.execute(f"SELECT {', '.join(names)} FROM {table}")):
                found += [(table, name, position, value) for name, value in zip(names, row, strict=True)]
    return [each for each in found if each[3] not in (None, "", b"")]


@pytest.mark.parametrize("times", [60, pytest.param(repeats(600, 3000), marks=pytest.mark.slow)])
def test_a_flipped_bit_in_any_column_changes_nothing_or_is_refused(path: Path, tmp_path: Path, times: int) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    right = outcome(Path(shutil.copy(path, tmp_path / "right.db")))
    assert isinstance(right, list)
    assert len(right) == 1
    every = cells(path)
    columns = sorted({(table, name) for table, name, *_ in every})
    refusals = 0
    for number in range(times):
        table, name = columns[number % len(columns)]
        *_, position, value = chance.choice([each for each in every if each[:2] == (table, name)])
        case = f"seed {seed}, {table}.{name} of row {position}"
        damaged = Path(shutil.copy(path, tmp_path / f"{number}.db"))
        with closing(sqlite3.connect(damaged)) as db, db:
            names = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            row = db.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall()[position]
            same = " AND ".join(f"{column} IS ?" for column in names)
            db.execute(f"UPDATE OR IGNORE {table} SET {name} = ? WHERE {same}", (flipped(value, chance), *row))
        found = outcome(damaged)
        refusals += not isinstance(found, list)
        assert not isinstance(found, list) or found in (right, []), case
        damaged.unlink()
    assert refusals > times / 10
