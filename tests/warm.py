"""Imports in a parent what its forked children would each import again: two thirds of what a short life costs."""

from __future__ import annotations

import importlib


def load_client(url: str = "", *more: str) -> None:
    """Import what a client loads when it opens a store and runs an agent, and more. Starts no thread."""
    for name in ("importlib.metadata", "killick.client.client", *(["psycopg"] if "://" in url else []), *more):
        importlib.import_module(name)
