"""Reads and damages the tables of a store, past everything that checks it."""

from __future__ import annotations

from typing import Any

from killick.store.protocol import Store


def execute(store: Store, sql: str, *values: Any) -> list[Any]:
    """Runs a statement in a store in memory, or in a file."""
    with store._database.writing() as db:  # type: ignore[attr-defined]
        found: list[Any] = db.execute(sql, values).fetchall()
    return found


def damage_row(store: Store, run: str, seq: int, **columns: bytes) -> None:
    """Overwrites columns of an event."""
    places = ", ".join(f"{name} = ?" for name in columns)
    [(number,)] = execute(store, "SELECT number FROM heads WHERE run = ?", run)
    execute(store, f"UPDATE events SET {places} WHERE id = ?", *columns.values(), (number << 32) + seq)
