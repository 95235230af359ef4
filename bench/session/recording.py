"""Makes the sessions, and keeps them for a while: a session takes half a minute of real tools and is the same again."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import msgspec

from bench.session import coder, workshop
from bench.session.coder import SYSTEM, Coder
from bench.session.script import Session

GUIDE: Final = workshop.CHECKOUT / "CONTRIBUTING.md"
STDLIB_SEEDS: Final = 100
"""Seeds from here on work on Python's own library."""


def recorded(seed: int, turns: int = coder.TURNS) -> Session:
    """A session made now, by running the tools."""
    with tempfile.TemporaryDirectory(prefix="killick-session-") as name:
        own = seed < STDLIB_SEEDS
        shop = (workshop.own if own else workshop.stdlib)(Path(name))
        guide = GUIDE.read_text(encoding="utf-8") if own else "Python's own library: the habits of the code hold.\n"
        repository = "this project" if own else "Python's library"
        return Coder(seed, shop, turns).session(f"coding on {repository}, seed {seed}", seed, SYSTEM + guide)


def kept(seed: int, turns: int = coder.TURNS) -> Session:
    """The same, from before where the script has not changed since."""
    folder = Path(tempfile.gettempdir()) / "killick-bench-sessions"
    file = folder / f"{coder.EDITION}-{seed}-{turns}.json"
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Session)
    made = recorded(seed, turns)
    folder.mkdir(exist_ok=True)
    file.write_bytes(msgspec.json.encode(made))
    return made
