"""Named SQL queries in files. A query is the text under `-- name: …`; its comment says why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from killick.errors import StoreUnavailable

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def queries(dialect: str) -> SimpleNamespace:
    """Returns the named queries of a dialect, as attributes."""
    parts = _NAME.split(_text(dialect, "queries.sql"))
    return SimpleNamespace(**{name: _bare(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)})


def schema(dialect: str) -> str:
    """Returns the full schema of the newest format."""
    return _text(dialect, "schema.sql")


def migrations(dialect: str, place: str, *, found: int, newest: int) -> Iterator[tuple[int, str]]:
    """Yields each format after the found one and the script that leads to it from the one before.

    Raises StoreUnavailable without such a script: no release wrote that format.
    """
    for step in range(found + 1, newest + 1):
        try:
            yield step, _text(dialect, f"to_{step:04}.sql")
        except FileNotFoundError:
            way = "export its runs with the version that wrote it"
            raise StoreUnavailable(place, f"format {found} is from before the first release; {way}") from None


def _text(dialect: str, name: str) -> str:
    return (Path(__file__).parent / dialect / name).read_text(encoding="utf-8")


def _bare(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("--"))
