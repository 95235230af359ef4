"""Namespaces: a store for each tenant in one server, apart by its schema or key prefix. Connects to nothing."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qsl, quote, urlencode

from killick.errors import StoreUnavailable

ROOT: Final = "killick"
"""The schema or prefix of a store without a namespace."""

_NAME: Final = re.compile(r"[a-z0-9_]{1,48}")


def own_options(query: str, *names: str) -> tuple[dict[str, str], str]:
    """Splits the query of a URL into the options with these names and the rest, which is the driver's."""
    options = parse_qsl(query, keep_blank_values=True)
    rest = [(name, value) for name, value in options if name not in names]
    return {name: value for name, value in options if name in names}, urlencode(rest, quote_via=quote)


def root_name(address: str, query: str) -> tuple[str, str]:
    """Returns the schema or prefix of the store that a URL names, and how the store is shown: without a password."""
    shown = {name: value for name, value in parse_qsl(query, keep_blank_values=True) if name in ("db", "namespace")}
    place = f"{address}?{urlencode(shown, quote_via=quote)}" if shown else address
    if "namespace" not in shown:
        return ROOT, place
    namespace = shown["namespace"]
    if _NAME.fullmatch(namespace) is None:
        raise StoreUnavailable(place, "a namespace has 1 to 48 lower case letters, digits and _")
    return f"{ROOT}_{namespace}", place


def namespace_of(root: str) -> str:
    """Returns the namespace of a schema or prefix; "" for the store without one."""
    return root.removeprefix(ROOT).removeprefix("_")
