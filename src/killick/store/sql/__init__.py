"""Named SQL queries in files. A query is the text under `-- name: …`; its comment says why."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def queries(dialect: str) -> SimpleNamespace:
    """Returns the named queries of a dialect, as attributes."""
    parts = _NAME.split(_text(dialect, "queries.sql"))
    return SimpleNamespace(**{name: _bare(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)})


def schema(dialect: str) -> str:
    """Returns the full schema of the newest format."""
    return _text(dialect, "schema.sql")


def migration(dialect: str, to_format: int) -> str:
    """Returns the migration from the previous format to this one."""
    return _text(dialect, f"to_{to_format:04}.sql")


def _text(dialect: str, name: str) -> str:
    return (Path(__file__).parent / dialect / name).read_text(encoding="utf-8")


def _bare(text: str) -> str:
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("--"))
