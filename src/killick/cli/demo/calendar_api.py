"""A small calendar API over HTTP, and a flaky one: it is overloaded, it stalls, and it sends every invite it is given.

  GET  /people               who works on it
  GET  /slots                when they are free; 503 the first two times
  POST /rooms    {"slot"}    books a room; the first answer comes late. Honours Idempotency-Key
  POST /invites  {"to", …}   sends an invite; the first answer never comes. Knows the key, and does not honour it
  GET  /invites?key=…        the invites that were sent under a key
  GET  /calendar             all of it, and the count of each request

    python calendar_api.py [PORT]

Uses the standard library alone, and keeps everything in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, urlsplit

PORT: Final = 8700
PEOPLE: Final = ["ann", "bob", "cyd"]
SLOTS: Final = ["Tue 10:00", "Wed 15:00"]
OVERLOADED: Final = 2
"""So many times /slots is too busy to answer."""
LATE_SECONDS: Final = 1.0
NEVER_SECONDS: Final = 3600.0


class Calendar(BaseHTTPRequestHandler):
    """Handles one request."""

    protocol_version = "HTTP/1.1"
    lock: ClassVar = threading.Lock()
    asked: ClassVar[Counter[str]] = Counter()
    rooms: ClassVar[dict[str, str]] = {}
    invites: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        count = self._count(url.path)
        if url.path == "/people":
            self._answer(200, PEOPLE)
        elif url.path == "/slots" and count <= OVERLOADED:
            self._answer(503, {"error": "overloaded", "queue": 70 - 30 * count})
        elif url.path == "/slots":
            self._answer(200, SLOTS)
        elif url.path == "/invites":
            key = parse_qs(url.query).get("key", [""])[0]
            self._answer(200, [invite for invite in self.invites if invite["key"] == key])
        elif url.path == "/calendar":
            self._answer(200, {"rooms": self.rooms, "invites": self.invites, "asked": self.asked})
        else:
            self._answer(404, {"error": f"there is no {url.path}"})

    def do_POST(self) -> None:
        count = self._count(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        key = self.headers.get("Idempotency-Key", "")
        if self.path == "/rooms":
            with self.lock:
                room = self.rooms.setdefault(key, f"room {4 + len(self.rooms)}")
            time.sleep(LATE_SECONDS if count == 1 else 0)
            self._answer(200, {"room": room, "slot": body["slot"]})
        elif self.path == "/invites":
            with self.lock:
                invite = {"id": f"invite_{len(self.invites) + 1}", "key": key, **body}
                self.invites.append(invite)
            time.sleep(NEVER_SECONDS if count == 1 else 0)
            self._answer(200, invite)
        else:
            self._answer(404, {"error": f"there is no {self.path}"})

    def _count(self, path: str) -> int:
        name = f"{self.command} {path}"
        with self.lock:
            self.asked[name] += path != "/calendar"
            return self.asked[name]

    def _answer(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        # The client may have given up, or died.
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: /calendar counts the requests."""


def _end_with_stdin() -> None:
    """The parent process holds this process's stdin; when the parent ends, this process exits."""
    sys.stdin.buffer.read()
    os._exit(0)


def main(port: int = PORT, *, bound: bool = False) -> None:
    """Serve until an interrupt; with `bound`, also until stdin ends."""
    with ThreadingHTTPServer(("127.0.0.1", port), Calendar) as server:
        sys.stdout.write(f"127.0.0.1:{server.server_port}\n")
        sys.stdout.flush()
        if bound:
            threading.Thread(target=_end_with_stdin, daemon=True).start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.05)
        os._exit(0)  # without waiting for the answers that never come


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else PORT, bound="--bound" in sys.argv)
