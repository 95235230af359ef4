"""The recorded form of an error: type, message, frames and causes.

A Failure is data. It is never raised and holds no exception object, so it reads the same live, on replay, and in a
process without the error's class.
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
    """Returns a type's recorded name: module and name; for builtins the name alone."""
    return printable(kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback."""

    file: str
    line: int
    function: str


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One error, with its causes and group members."""

    kind: FailureKind
    type: str
    types: tuple[str, ...]
    """The type and its base classes, so that `is_a` needs no classes."""
    message: str
    notes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    """The outermost first."""
    cause: Failure | None = None
    context: Failure | None = None
    """The error being handled, unless a cause was given or it was suppressed."""
    members: tuple[Failure, ...] = ()
    """The members of an exception group."""
    details: dict[str, Any] = {}
    """Other attributes of the error, such as `status`, `headers` and `body` of an HTTP response."""

    @classmethod
    def told(cls, type: str, message: str = "", *, kind: FailureKind = "error") -> Failure:  # noqa: A002
        """Creates a failure that no exception caused."""
        return cls(kind, type, (type,), message)

    def is_a(self, kind: _Class | str) -> bool:
        """Returns whether the error is of this type or of a derived one.

        The name may be complete ("aiohttp.client_exceptions.ClientError"), as exported by its package
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
