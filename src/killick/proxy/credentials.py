"""Keeps a request's credentials out of the log: they go only upstream."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Final

import msgspec

from killick.model.failure import Failure
from killick.proxy.wire import is_list, is_map
from killick.type_init import ready

CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"})
"""The headers with credentials."""

HIDDEN: Final = "(not on record)"
_OPENS: Final = frozenset({"authorization", "authorization_token", "headers", "api_key"})
_LOGIN: Final = re.compile(r"(?<=://)[^/@\s]+@")
_CHARS_MIN: Final = 6


def credentials_digest(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns a digest of the client's credentials."""
    shown = sorted((name.lower(), value) for name, value in headers if name.lower() in CREDENTIALS)
    return sha256(b"\x00".join(part for pair in shown for part in pair)).digest()


def without_secrets(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a request for recording, without credentials for servers that the provider calls."""
    copy = dict(body)
    for name in ("mcp_servers", "tools"):
        if is_list(copy.get(name)):
            copy[name] = [
                _hidden(each) if is_map(each) and (name == "mcp_servers" or each.get("type") == "mcp") else each
                for each in copy[name]
            ]
    return copy


def _hidden(server: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: HIDDEN if name in _OPENS else _LOGIN.sub("", value) if isinstance(value, str) else value
        for name, value in server.items()
    }


def without(failure: Failure, headers: Iterable[tuple[bytes, bytes]]) -> Failure:
    """Returns a failure without the request's credentials, which some providers repeat in errors."""
    encoded = msgspec.json.encode(failure)
    for name, value in headers:
        secret = value.split()[-1] if name.lower() in CREDENTIALS and value.split() else b""
        if len(secret) >= _CHARS_MIN:
            encoded = encoded.replace(secret, HIDDEN.encode())
    return msgspec.json.decode(encoded, type=ready(Failure))
