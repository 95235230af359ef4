"""Kills processes that loop with a window, for real, at every append in turn; prints JSON. Run as a program.

It forks from a process that holds no store and no thread, so that many deaths take seconds.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import killick
from killick.store import SqliteStore, Store
from llm.paged_session import BUDGET, SCRIPT, THERE, TOOLS, Far, answer, as_bytes
from warm import load_client

TURNS: Final = 14
PLACE: Final = {"path": Path()}
_WHOLE: Final = "\x03"


class Files(Far):
    """A far side that outlives the process: what was done is lines of a file."""

    def look(self, what: str) -> None:
        _line("looks", what)

    def do(self, what: str, key: str) -> None:
        if f"{what} {key}" not in lines("done"):
            _line("done", f"{what} {key}")

    def written(self, path: str) -> int:
        return sum(line.startswith(f"write {path} ") for line in lines("done"))


def _line(name: str, text: str) -> None:
    """Write a line with a mark at its end: a kill may interrupt even one write of several pages."""
    with (PLACE["path"] / name).open("ab", buffering=0) as file:
        file.write(f"\n{text}{_WHOLE}".encode())


def lines(name: str) -> list[str]:
    """The whole lines in a file of the far side."""
    path = PLACE["path"] / name
    found = path.read_text().splitlines() if path.exists() else []
    return [line.removesuffix(_WHOLE) for line in found if line.endswith(_WHOLE)]


async def model(**request: Any) -> Any:
    _line("asked", as_bytes(request).decode())
    return answer(request, "anthropic", SCRIPT[:TURNS])


@killick.agent(name="paged_mortal")
async def mortal(run: killick.Run) -> str:
    told = await killick.loop(run, model, TOOLS, messages="Go.", provider="anthropic", budget=BUDGET)
    return told.text


class Deadly:
    """A store whose process dies at its so-many-th append: before it is made when that is odd, after it when even."""

    def __init__(self, store: Store, at: int) -> None:
        self._store, self._at, self._count = store, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, *args: Any, **kwargs: Any) -> Any:
        self._dies()
        done = self._store.append(*args, **kwargs)
        self._dies()
        return done

    def _dies(self) -> None:
        self._count += 1
        if self._count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def lived(at: int) -> bool:
    """In a child, run the agent or go on with it; False: it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            logging.disable()
            THERE.far = Files()
            store = SqliteStore(PLACE["path"] / "killick.db")
            with killick.Client(cast("Store", Deadly(store, at))) as kd:
                kd.run(mortal, id="r")
                kinds = [str(recorded.event.__struct_config__.tag) for recorded in kd.events("r")]
            _line("kinds", json.dumps(kinds))
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert ended == 0 or os.WIFSIGNALED(ended), f"the process failed at {at}: {ended}"
    return ended == 0


def told(at: int) -> dict[str, Any]:
    """What the world saw of a run whose process died there, and of the one that went on."""
    place = PLACE["path"] = PLACE["path"].parent / f"at_{at}"
    place.mkdir()
    killed = not lived(at)
    if killed:
        assert lived(0)
    seen = {"killed": killed, "asked": lines("asked"), "looks": lines("looks"), "done": lines("done"),
            "kinds": json.loads(lines("kinds")[0])}  # fmt: skip
    shutil.rmtree(place)
    return seen


def main(path: str, tell: Callable[[str], object]) -> None:
    load_client("", "killick.llm.loop", "pydantic")
    PLACE["path"] = Path(path) / "none"
    stories = [told(0)]
    while len(stories) == 1 or stories[-1]["killed"]:
        stories.append(told(len(stories)))
    tell(json.dumps(stories))


if __name__ == "__main__":
    main(sys.argv[1], sys.stdout.write)
