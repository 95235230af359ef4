"""The frames of server-sent events, read with their raw bytes."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import msgspec

# Atomic, so that CRLF is never taken for two line ends.
_END: Final = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINES: Final = re.compile(r"\r\n|\n|\r")
DONE: Final = "[DONE]"


class Frame(NamedTuple):
    """One event: its raw bytes and its data."""

    raw: bytes
    data: str

    def read(self) -> dict[str, Any] | None:
        """Returns its data as a JSON object, or None."""
        try:
            found: Any = msgspec.json.decode(self.data)
        except (msgspec.DecodeError, UnicodeEncodeError):
            return None
        return found if isinstance(found, dict) else None  # pyright: ignore[reportUnknownVariableType]


class Frames:
    """Parses bytes incrementally, and returns each complete event. Keeps the raw bytes, which client libraries drop."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the newly completed events."""
        searched = max(len(self._rest) - 3, 0)
        self._rest += data
        found: list[Frame] = []
        start = 0
        while (end := _END.search(self._rest, max(start, searched))) is not None:
            if end.end() == len(self._rest) and self._rest.endswith(b"\r"):
                break  # the other half of this line's end may be on its way
            found.append(_frame(bytes(self._rest[start : end.end()])))
            start = end.end()
        del self._rest[:start]
        return found

    def end(self) -> list[Frame]:
        """Returns the last event: some servers omit the final blank line."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [_frame(rest)] if rest.strip() else []


def _frame(raw: bytes) -> Frame:
    fields = [line.partition(":") for line in _LINES.split(raw.decode("utf-8", "replace"))]
    return Frame(raw, "\n".join(value.removeprefix(" ") for name, _, value in fields if name == "data"))
