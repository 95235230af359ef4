"""The provider behind the proxy: URLs, forwarded headers, and sending. Records nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import httpx

from killick.browser_guard import is_loopback
from killick.errors import AccessRefused

Headers = Sequence[tuple[bytes, bytes]]

CONNECT_SECONDS: Final = 10.0
WRITE_SECONDS: Final = 60.0

RUN_HEADER: Final = b"x-killick-run"
"""The header in which a client names its conversation's run; not forwarded."""

_HOP: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
})  # fmt: skip
_FRESH: Final = frozenset({b"host", b"content-length", b"expect", RUN_HEADER})
_CODED: Final = frozenset({b"accept-encoding"})
_NONE: Final[frozenset[bytes]] = frozenset()
_BODY: Final = frozenset({b"content-length", b"content-encoding"})


class Upstream:
    """One provider. Follows no redirect and does not retry: the client decides that."""

    def __init__(self, url: str, *, timeout_seconds: float, transport: httpx.AsyncBaseTransport | None = None) -> None:
        try:
            found = httpx.URL(url)
        except httpx.InvalidURL:
            found = httpx.URL("")
        if found.scheme not in ("http", "https") or not found.host or found.query:
            raise AccessRefused(repr(url), "is not the address of a provider; write it as https://api.openai.com")
        if found.userinfo:
            raise AccessRefused(found.host, "has a user or password in its URL; let clients send them as headers")
        self.url = found.copy_with(fragment=None)
        self._base = found.raw_path.rstrip(b"/")
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS, write=WRITE_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100),
            trust_env=not is_loopback(found.host),
            transport=transport,
        )

    def at(self, path: bytes, query: bytes) -> httpx.URL:
        """Returns the upstream URL of a path. A base that ends in /v1 does not repeat it."""
        base = self._base
        if base.endswith(b"/v1") and (path == b"/v1" or path.startswith(b"/v1/")):
            base = base[:-3]
        return self.url.copy_with(raw_path=(base + path or b"/") + (b"?" + query if query else b""))

    async def send(
        self, method: str, url: httpx.URL, headers: Headers, content: bytes | AsyncIterator[bytes] | None
    ) -> httpx.Response:
        """Sends, and returns when the response's head has arrived; the caller reads and closes its body."""
        # Built by hand, because the client would add its own headers.
        request = httpx.Request(method, url, headers=list(headers), content=content)
        request.extensions["timeout"] = self._client.timeout.as_dict()
        return await self._client.send(request, stream=True)

    async def close(self) -> None:
        await self._client.aclose()


def asking(headers: Iterable[tuple[bytes, bytes]], *, whole: bool = False) -> list[tuple[bytes, bytes]]:
    """Returns the request headers to forward. With `whole` the reply is read by us."""
    given = list(headers)
    gone = _HOP | _FRESH | _named(given) | (_CODED if whole else _NONE)
    kept = [(name, value) for name, value in given if name.lower() not in gone]
    return [*kept, (b"accept-encoding", b"identity")] if whole else kept


def answering(headers: Iterable[tuple[bytes, bytes]], *, whole: bool = False) -> list[tuple[bytes, bytes]]:
    """Returns the response headers to forward. With `whole` the body was unpacked."""
    given = list(headers)
    gone = _HOP | _named(given) | (_BODY if whole else _NONE)
    return [(name, value) for name, value in given if name.lower() not in gone]


def _named(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Returns the hop-by-hop headers that a Connection header names."""
    named = [value for name, value in headers if name.lower() == b"connection"]
    return frozenset(each.strip().lower() for value in named for each in value.split(b","))
