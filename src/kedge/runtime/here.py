"""Where the code that runs right now stands: in an agent, in a tool, or in neither.

Everything that must know asks here: tools called directly, logging while replaying, I/O outside a step.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol


class Place(Protocol):
    """A branch of an agent's code, or an attempt of a tool."""

    @property
    def in_agent(self) -> bool: ...

    @property
    def replaying(self) -> bool: ...

    def tell(self) -> tuple[str, str | None, int | None]:
        """Run, step and attempt."""
        ...


HERE: Final[ContextVar[Place | None]] = ContextVar("kedge_here", default=None)


def in_agent() -> bool:
    """Whether agent code runs here, outside of any step."""
    place = HERE.get()
    return place is not None and place.in_agent


# logging ------------------------------------------------------------------------------------------

_UNHEARD: Final = -1
"""A level below every handler's: a record of it is made and goes nowhere."""


def mark_log_records() -> None:
    """From now on log records say run, step and attempt, and those of replayed agent code go nowhere."""
    inner = logging.getLogRecordFactory()
    if getattr(inner, "is_kedge", False):
        return

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = inner(*args, **kwargs)
        place = HERE.get()
        if place is not None:
            record.kedge_run, record.kedge_step, record.kedge_attempt = place.tell()
            if place.in_agent and place.replaying:
                record.levelno = _UNHEARD
        return record

    make.is_kedge = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make)


# I/O outside a step -------------------------------------------------------------------------------

WATCHED: Final = frozenset(
    {"open", "socket.connect", "socket.bind", "socket.sendto", "subprocess.Popen", "os.system", "os.posix_spawn",
     "os.remove", "os.rename", "os.mkdir", "os.rmdir", "shutil.rmtree", "sqlite3.connect", "urllib.Request"}
)  # fmt: skip


class Stray(NamedTuple):
    """Agent code touched the world outside of a step."""

    what: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what} outside of a step; put it into a tool and use run.call"


_watchers: list[Callable[[Stray], None]] = []
_hooked = False


def watch_io(watcher: Callable[[Stray], None]) -> Callable[[], None]:
    """Tell the watcher of every I/O that agent code does outside a step; returns how to stop watching.

    The watcher may raise, which stops the I/O.
    """
    global _hooked
    if not _hooked:
        # Audit hooks cannot be taken away again, so there is one, and it looks whether anybody watches.
        _hooked = True
        sys.addaudithook(_audit)
    _watchers.append(watcher)
    return lambda: _watchers.remove(watcher)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watchers or event not in WATCHED or not in_agent():
        return
    frame = _agent_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    if frame is None:
        return
    what = f"{event}({args[0]!r})" if args and isinstance(args[0], str | bytes | int) else event
    stray = Stray(what, frame.f_code.co_filename, frame.f_lineno)
    for watcher in tuple(_watchers):
        watcher(stray)


def _agent_frame(frame: FrameType | None) -> FrameType | None:
    """The nearest frame that is somebody's code; None for imports and for what Kedge does on the agent's behalf."""
    nearest: FrameType | None = None
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(("importlib", "kedge.", "linecache", "tracemalloc")) or module == "kedge":
            return nearest if module.startswith("kedge") and nearest is not None else None
        if nearest is None and not _is_library(frame.f_code.co_filename):
            nearest = frame
        frame = frame.f_back
    return nearest


def _is_library(file: str) -> bool:
    return file.startswith((sys.prefix, sys.base_prefix, "<frozen")) or "site-packages" in file
