"""What is on record of an error: its type, its words, where it came from and what led to it.

A Failure is data. It is never raised and holds no object of the error's own, so it reads the same live, on
replay and in a process that does not have the error's class.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from killick.text import printable

FailureKind: TypeAlias = Literal["error", "timeout", "cancelled", "died", "expired"]

# Inside Failure the name `type` is a field.
_Class: TypeAlias = type[BaseException]

LINE_CHARS_MAX: Final = 500


def type_name(kind: type) -> str:
    """How a type is named on record: by its module and name, and builtins by their name alone."""
    return printable(kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback."""

    file: str
    line: int
    function: str


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One error, and those that led to it or are inside it."""

    kind: FailureKind
    type: str
    types: tuple[str, ...]
    """The type and all it derives from, so that `is_a` can tell without the classes."""
    message: str
    notes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    """The outermost first."""
    cause: Failure | None = None
    context: Failure | None = None
    """The error that was being handled, unless a cause was named or it was suppressed."""
    members: tuple[Failure, ...] = ()
    """What is inside an exception group."""
    details: dict[str, Any] = {}
    """What else the error carried, such as `status`, `headers` and `body` of an HTTP response."""

    @classmethod
    def told(cls, type: str, message: str = "", *, kind: FailureKind = "error") -> Failure:  # noqa: A002
        """A failure that no exception stands for."""
        return cls(kind, type, (type,), message)

    def is_a(self, kind: _Class | str) -> bool:
        """Whether the error is of this type, or of one derived from it.

        A name may be whole ("aiohttp.client_exceptions.ClientError"), as it is imported from its package
        ("aiohttp.ClientError"), or the last part alone ("ClientError").
        """
        names = (self.type, *self.types)
        if not isinstance(kind, str):
            return type_name(kind) in names
        for name in names:
            package, last = name.partition(".")[0], name.rpartition(".")[2]
            if kind in (name, last, f"{package}.{last}"):
                return True
        return False

    def __str__(self) -> str:
        told = f"{self.type}: {self.message}" if self.message else self.type
        if self.members:
            count = len(self.members) + self.details.get("left_out", 0)
            told += f" ({count} inside: {'; '.join(map(str, self.members))})"
        line = " ".join(told.split())
        return line if len(line) <= LINE_CHARS_MAX else line[: LINE_CHARS_MAX - 1] + "…"
