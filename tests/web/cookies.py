"""A client that keeps cookies as RFC 6265 says, by host and without ports, and resolves names as browsers do."""

from __future__ import annotations

import http.client
import http.cookiejar
import socket
import urllib.request
from typing import Any


class _Connection(http.client.HTTPConnection):
    """To this machine, whatever the name of a host below `localhost`."""

    def connect(self) -> None:
        assert self.host == "127.0.0.1" or self.host.endswith("localhost")
        self.sock = socket.create_connection(("127.0.0.1", self.port), timeout=300)


class _Resolving(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Connection, req)


def browser_with_jar() -> urllib.request.OpenerDirector:
    jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
    return urllib.request.build_opener(_Resolving, jar, urllib.request.ProxyHandler({}))
