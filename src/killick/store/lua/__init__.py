"""Lua in files, by name. A script is what stands under `-- name: …`, after what its file and all files share."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

_NAME: Final = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)
_SHARED: Final = ("rows.lua", "writes.lua")
_THEMES: Final = ("logs.lua", "leases.lua", "finding.lua", "keeping.lua", "looking.lua")


class Script(NamedTuple):
    """A script as the server is given it, and the digest by which it knows it then."""

    digest: str
    text: str


@cache
def scripts() -> dict[str, Script]:
    """Every script by its name."""
    shared = "".join(map(_text, _SHARED))
    made: dict[str, Script] = {}
    for theme in _THEMES:
        head, *parts = _NAME.split(_text(theme))
        for name, body in zip(parts[::2], parts[1::2], strict=True):
            text = shared + head + body
            made[name] = Script(hashlib.sha1(text.encode()).hexdigest(), text)
    return made


def _text(name: str) -> str:
    return (files(__name__) / name).read_text(encoding="utf-8")
