"""Named Lua scripts in files. A script is the text under `-- name: …`, after its file's and the common prelude."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_NAME: Final = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_SHARED: Final = ("rows.lua", "writes.lua")
_THEMES: Final = ("logs.lua", "leases.lua", "finding.lua", "keeping.lua", "looking.lua")


class Script(NamedTuple):
    """A script's source, and the digest by which the server knows it."""

    digest: str
    text: str


@cache
def scripts() -> dict[str, Script]:
    """Returns every script by its name."""
    shared = "".join(map(_text, _SHARED))
    made: dict[str, Script] = {}
    for theme in _THEMES:
        head, *parts = _NAME.split(_text(theme))
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            text = shared + head + body
            made[name] = Script(hashlib.sha1(text.encode()).hexdigest(), text)
    return made


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
