"""Refuses requests that a page of another site makes a browser send to a server on this machine.

A page can point a name of its own at this machine (DNS rebinding), and can send requests whose answer it cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from typing import Final, NamedTuple

LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names of this machine; any other name may be a page's that points here."""


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its address or its usual name. Resolves nothing."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(headers: Mapping[str, str]) -> str:
    """Returns the name that a request was sent to, without the port. `headers` have lower-case names."""
    return re.sub(r":\d*$", "", headers.get("host", "").lower())


class Refusal(NamedTuple):
    """Why a request is refused: the HTTP status, a code for programs, and a text."""

    status: int
    code: str
    text: str


def refusal(headers: Mapping[str, str], names: Collection[str]) -> Refusal | None:
    """Returns why a request may come from another site's page; None if it does not. `headers` have lower-case names."""
    host = host_of(headers)
    if host not in names:
        detail = f"{host[:100] or 'no name'}: not a name of this machine; serve with --host-name if it is one"
        return Refusal(421, "host_unknown", detail)
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
        return Refusal(403, "cross_site", "another site's page asked for this; open the dashboard itself")
    return None
