"""Addresses: where a thing is below the path that the app is mounted at, and paths whose ids contain slashes."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

from starlette.requests import Request

API: Final = "/api/v1"

SLASH: Final = "\x1f"
"""Replaces a slash inside of a run's id while a path is matched."""


def address(request: Request, path: str, **parameters: Any) -> str:
    """A URL below the app's mount point: fills in `{name}`; the other parameters become the query."""
    for name in [name for name in parameters if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", quote(str(parameters.pop(name)), safe=""))
    given = {name: value for name, value in parameters.items() if value not in (None, "", (), [])}
    query = f"?{urlencode(given, doseq=True)}" if given else ""
    return f"{request.scope.get('root_path', '')}{path}{query}"


class Paths:
    """ASGI middleware that matches paths as they were sent: an encoded slash in a run's id separates nothing."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and b"%" in (written := scope.get("raw_path") or b""):
            parts = written.partition(b"?")[0].decode("latin-1").split("/")
            scope = dict(scope, path="/".join(_unquoted(part) for part in parts))
        await self.app(scope, receive, send)


def _unquoted(part: str) -> str:
    # A separator that the client sent itself must not turn into a slash.
    return unquote(part).replace(SLASH, "\N{REPLACEMENT CHARACTER}").replace("/", SLASH)
