"""A far side that counts: a real HTTP server that does effects, late if it is asked to, and remembers every request.

It knows nothing of Killick. One loop handles requests whole and in the order in which they came, so that whoever asks
after somebody died learns of everything that the dead had sent.

    POST /effects?honour=1&stall_ms=80&refuse=2    does what the body names; an Idempotency-Key header goes with it
    GET /effects?key=…                             what became of a key: receipts, and how many are still under way
    GET /effects                                   every effect, in order: key, what, receipt
    GET /count                                     how many requests and effects there were
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

Reply = Callable[[int, Any], None]


class Effect(NamedTuple):
    """Something that was done, for good. Its receipt is its number."""

    key: str
    what: str
    receipt: int


class World:
    """What was asked for and what was done."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.effects: list[Effect] = []
        self.connections: set[asyncio.Transport] = set()
        self._waiting: defaultdict[str, list[Reply]] = defaultdict(list)

    def asked(self, key: str, what: str, options: dict[str, str], reply: Reply) -> None:
        """A request for an effect, which is done after the stall whoever is still there to hear of it."""
        self.requests[key] += 1
        if self.requests[key] <= int(options.get("refuse", 0)):
            reply(409, {"error": "not yet; nothing was done"})
            return
        if options.get("honour") == "1":
            before = self.done(key)
            if before:
                reply(200, {"receipt": before[0].receipt})
                return
            if self._waiting[key]:
                self._waiting[key].append(reply)
                return
        self._waiting[key].append(reply)
        stall_seconds = int(options.get("stall_ms", 0)) / 1_000
        if stall_seconds:
            asyncio.get_running_loop().call_later(stall_seconds, self._do, key, what, options.get("honour") == "1")
        else:
            self._do(key, what, options.get("honour") == "1")

    def _do(self, key: str, what: str, honour: bool) -> None:
        effect = Effect(key, what, len(self.effects) + 1)
        self.effects.append(effect)
        waiting = self._waiting[key]
        for reply in [waiting.pop(0) for _ in range(len(waiting) if honour else 1)]:
            reply(200, {"receipt": effect.receipt})

    def done(self, key: str) -> list[Effect]:
        return [effect for effect in self.effects if effect.key == key]

    def under_way(self, key: str) -> int:
        return len(self._waiting[key])


class _Connection(asyncio.Protocol):
    def __init__(self, world: World) -> None:
        self._world = world
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._world.connections.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._world.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, rest = self._received.split(b"\r\n\r\n", 1)
            first, *lines = head.decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            size = int(headers.get("content-length", 0))
            if len(rest) < size:
                return
            self._received = rest[size:]
            method, target, _ = first.split(" ")
            self._answer(method, target, headers, rest[:size])

    def _answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        world, parts = self._world, urlsplit(target)
        options = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if method == "POST":
            world.asked(headers.get("idempotency-key", ""), json.loads(body)["what"], options, self._reply)
        elif parts.path == "/count":
            self._reply(200, {"requests": world.requests.total(), "effects": len(world.effects)})
        elif "key" in options:
            key = options["key"]
            receipts = [effect.receipt for effect in world.done(key)]
            self._reply(200, {"receipts": receipts, "under_way": world.under_way(key)})
        else:
            self._reply(200, world.effects)

    def _reply(self, status: int, body: Any) -> None:
        if self._transport.is_closing():
            return
        raw = json.dumps(body).encode()
        told = f"HTTP/1.1 {status} Told\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
        self._transport.write(told.encode() + raw)


def fetched(url: str, what: str = "", key: str = "", *, seconds: float = 300) -> tuple[int, Any]:
    """Ask the server, blocking: for an effect, or a question. Its status and its reply."""
    data = json.dumps({"what": what}).encode() if what else None
    request = urllib.request.Request(url, data=data, headers={"Idempotency-Key": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def receipts(url: str, key: str) -> list[int]:
    """What was done under a key, once nothing is under way any more: what is not there then never will be."""
    while (found := fetched(f"{url}/effects?key={quote(key)}")[1])["under_way"]:
        time.sleep(0.005)
    there: list[int] = found["receipts"]
    return there


async def listening(world: World) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(lambda: _Connection(world), "127.0.0.1", 0, backlog=512)


def serve_for_ever(told: int) -> None:
    """Be the server, in this process; the port is written to a pipe."""

    async def serve() -> None:
        server = await listening(World())
        os.write(told, f"{server.sockets[0].getsockname()[1]}\n".encode())
        await server.serve_forever()

    asyncio.run(serve())


class CountingServer:
    """The server in a thread of this process, whose world may be looked at directly."""

    def __init__(self) -> None:
        self.world = World()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> CountingServer:
        self._thread.start()
        server = asyncio.run_coroutine_threadsafe(listening(self.world), self._loop).result(300)
        self._server = server
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def end() -> None:
            self._server.close()
            for transport in self.world.connections:
                transport.abort()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(300)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(300)
        self._loop.close()
