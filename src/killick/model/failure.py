"""The recorded form of an error: type, message, frames and causes.

A Failure is data. It holds no exception object, so it reads the same live, on replay, and in a process without the
error's class.
"""

from __future__ import annotations

from types import FunctionType, TracebackType
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
    def of(cls, type: str, message: str = "", *, kind: FailureKind = "error") -> Failure:  # noqa: A002
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

    def error(self) -> RecordedError:
        """Creates an exception that prints as the recorded one did: its type, its text, its frames and its causes."""
        module, _, name = self.type.rpartition(".")
        made: RecordedError = type(name.replace("\0", "?"), (RecordedError,), {"__module__": module or "builtins"})(
            self.message
        )
        made.__context__ = None if self.context is None else self.context.error()
        if self.cause is not None:
            made.__cause__ = self.cause.error()
        for note in self.notes:
            made.add_note(note)
        return made.with_traceback(_traceback(self.frames))

    def __str__(self) -> str:
        text = f"{self.type}: {self.message}" if self.message else self.type
        if self.members:
            count = len(self.members) + self.details.get("left_out", 0)
            text += f" ({count} inside: {'; '.join(map(str, self.members))})"
        line = " ".join(text.split())
        return line if len(line) <= LINE_CHARS_MAX else line[: LINE_CHARS_MAX - 1] + "…"


class RecordedError(Exception):
    """An error as it is on record: the cause of a `RunFailed`. Its class has the name of the recorded one."""


def _raise() -> None:
    raise RecordedError


def _traceback(frames: tuple[Frame, ...]) -> TracebackType | None:
    """Creates a traceback of recorded frames. A traceback needs live frames, so each one is executed up to a raise."""
    made: TracebackType | None = None
    for frame in reversed(frames):
        file, name = frame.file.replace("\0", "?"), frame.function.rpartition(".")[2]
        code = _raise.__code__.replace(co_filename=file, co_name=name, co_qualname=frame.function)
        try:
            FunctionType(code, {"RecordedError": RecordedError})()
        except RecordedError as error:
            at: Any = error.__traceback__
            # -1: no marks under the source line.
            made = TracebackType(made, at.tb_next.tb_frame, -1, min(frame.line, 2**31 - 1))
    return made
