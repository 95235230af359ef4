"""A far side that fails in every way: a process behind a socket that does effects, and remembers every request.

It knows nothing of Killick. A request is one line of JSON on a connection of its own, and so is the reply:

    {"do": "read" | "keyed" | "once", "what": …, "key": …, "attempt": …, "pid": …, "dated": …}
    {"do": "settle", "key": …}       what became of a key; one that was not done never will be by an older request
    {"do": "tell"}                   all effects and all requests

"keyed" honours the key: the same one again gets the first receipt. "once" does not: a key that was done is refused,
and so is a request that is dated before somebody was told that nothing happened. Dates are of the clock that all
processes of a machine share, and are read where a tool begins.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, Final

from soak.draws import draw, fate

LATE_SECONDS: Final = (0.03, 0.15)
TOO_LATE_SECONDS: Final = 1.2
"""Longer than any tool waits."""


class Refused(Exception):
    """Nothing was done, and the far side says so."""


class FarSide:
    """What was asked for, and what was done."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._receipts: dict[str, int] = {}
        self._voided_at: dict[str, int] = {}
        self._under_way: dict[str, asyncio.Future[None]] = {}
        self.effects: list[tuple[str, str, int]] = []
        self.requests: list[dict[str, Any]] = []

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """The reply; None is a connection that breaks."""
        if asked["do"] == "tell":
            return {"effects": self.effects, "requests": self.requests}
        if asked["do"] == "settle":
            return self._settle(asked["key"])
        asked["came"] = time.monotonic_ns()
        self.requests.append(asked)
        drawn = asked["fate"] = fate(self._seed, asked["what"], asked["attempt"])
        try:
            return await self._met(asked, drawn)
        except Refused as refused:
            asked["came to"] = str(refused)
            return {"refused": str(refused)}

    async def _met(self, asked: dict[str, Any], drawn: str) -> dict[str, Any] | None:
        if drawn == "drop before":
            asked["came to"] = "nothing"
            return None
        if drawn == "refuse":
            raise Refused("not now")
        if drawn == "too late":
            await self._stall(asked["key"])
        receipt = self._do(asked)
        if drawn == "late":
            least, most = LATE_SECONDS
            await asyncio.sleep(least + (most - least) * draw(self._seed, asked["what"], "late"))
        return None if drawn == "drop after" else {"receipt": receipt}

    async def _stall(self, key: str) -> None:
        """A long time, which ends at once when somebody is told that nothing happened."""
        stalled = self._under_way.setdefault(key, asyncio.get_running_loop().create_future())
        await asyncio.wait({stalled}, timeout=TOO_LATE_SECONDS)

    def _do(self, asked: dict[str, Any]) -> int:
        key, what = asked["key"], asked["what"]
        if asked["do"] == "read":
            asked["came to"] = "read"
            return len(what)
        if asked["do"] == "once":
            if asked["dated"] < self._voided_at.get(key, 0):
                raise Refused("void")
            if key in self._receipts:
                raise Refused("done already")
        elif key in self._receipts:
            asked["came to"] = "honoured"
            return self._receipts[key]
        receipt = self._receipts[key] = len(self.effects) + 1
        self.effects.append((key, what, receipt))
        asked["came to"] = "done"
        return receipt

    def _settle(self, key: str) -> dict[str, Any]:
        if key in self._receipts:
            return {"receipt": self._receipts[key]}
        self._voided_at[key] = time.monotonic_ns()
        if (stalled := self._under_way.pop(key, None)) is not None and not stalled.done():
            stalled.set_result(None)
        return {}


def serve(path: Path, seed: int, ready: int) -> None:
    """Be the far side, in this process, until it is killed. A byte says that it listens."""

    async def for_ever() -> None:
        far = FarSide(seed)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                line = await reader.readline()
                if line and (reply := await far.answer(json.loads(line))) is not None:
                    writer.write(json.dumps(reply).encode() + b"\n")
                    await writer.drain()
            except ConnectionError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_unix_server(connected, path, backlog=1_024, limit=1 << 26)
        os.write(ready, b".")
        await server.serve_forever()

    asyncio.run(for_ever())
