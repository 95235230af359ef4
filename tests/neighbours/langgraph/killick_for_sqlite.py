"""A pytest plugin for LangGraph's own tests: for a SqliteSaver they get a KillickSaver on a SQLite file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory

from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

import killick
from killick.adapters.langgraph import KillickSaver


@contextmanager
def _made(_: str) -> Iterator[KillickSaver]:
    with TemporaryDirectory() as folder, killick.open(f"{folder}/killick.db", durability="process") as kd:
        yield KillickSaver(kd)


@asynccontextmanager
async def _made_async(_: str) -> AsyncIterator[KillickSaver]:
    with _made(_) as saver:
        yield saver


SqliteSaver.from_conn_string = staticmethod(_made)  # type: ignore[method-assign, assignment]
AsyncSqliteSaver.from_conn_string = staticmethod(_made_async)  # type: ignore[method-assign, assignment]
