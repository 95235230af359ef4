"""Where the running code is: in an agent, in a tool, or in neither.

Used by direct tool calls, by logging during replay, and by the checks for I/O outside a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from killick.errors import IORefused
from killick.sanitizer import visible_line


class CurrentCode(Protocol):
    """A branch of an agent's code, or an attempt of a tool."""

    @property
    def in_agent(self) -> bool: ...

    @property
    def replaying(self) -> bool: ...

    def tell(self) -> tuple[str, str | None, int | None]:
        """Run, step and attempt."""
        ...


HERE: Final[ContextVar[CurrentCode | None]] = ContextVar("killick_here", default=None)


def in_agent() -> bool:
    """Whether agent code runs here, outside of any step."""
    place = HERE.get()
    return place is not None and place.in_agent


# logging ------------------------------------------------------------------------------------------

_UNHEARD: Final = -1
"""A level below every handler's: no handler takes such a record."""


def mark_log_records() -> None:
    """Adds run, step and attempt to all later log records, and drops those of replayed agent code.

    Killick's own records become one line without terminal control characters.
    """
    inner = logging.getLogRecordFactory()
    if getattr(inner, "is_killick", False):
        return

    def make(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = inner(*args, **kwargs)
        if record.name == "killick" or record.name.startswith("killick."):
            record.msg, record.args = visible_line(record.getMessage()), None
        place = HERE.get()
        if place is not None:
            record.killick_run, record.killick_step, record.killick_attempt = place.tell()
            if place.in_agent and place.replaying:
                record.levelno = _UNHEARD
        return record

    make.is_killick = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(make)


# I/O outside a step -------------------------------------------------------------------------------

WATCHED: Final = frozenset(
    {"open", "socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo",
     "socket.gethostbyname", "socket.gethostbyaddr", "os.utime", "os.setxattr", "os.removexattr",
     "subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn", "os.exec", "os.fork", "os.forkpty", "os.remove",
     "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.kill",
     "shutil.rmtree", "sqlite3.connect", "urllib.Request"}
)  # fmt: skip
_NOWHERE: Final = frozenset({os.devnull, ":memory:"})
"""Opening these files changes nothing, and is not reported."""
_NETWORK: Final = frozenset({socket.AF_INET, socket.AF_INET6})
_WRITING: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class UnrecordedIO(NamedTuple):
    """Agent code touched the world outside of a step. `reads`: it only opened a file to read it."""

    what: str
    file: str
    line: int
    reads: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what} outside of a step; put it into a tool and use run.call"


_watchers: list[Callable[[UnrecordedIO], None]] = []
_threads: Final[WeakKeyDictionary[threading.Thread, tuple[str, int]]] = WeakKeyDictionary()
"""Threads that agent code started while I/O was watched, and where."""
_hooked = False
_patched: Final[list[tuple[type, str, Any]]] = []
"""The methods that are replaced while I/O is watched, and the originals."""


def watch_io(watcher: Callable[[UnrecordedIO], None]) -> Callable[[], None]:
    """Reports to the watcher all I/O of agent code outside a step, also in tasks and threads that it starts. Returns
    the function that stops watching.

    The watcher may raise, which stops the I/O.
    """
    global _hooked
    if not _hooked:
        # Audit hooks cannot be removed, so one stays installed and checks for watchers.
        _hooked = True
        sys.addaudithook(_audit)
    if not _watchers:
        _patch(threading.Thread, "start", _start_marked)
        _patch(ThreadPoolExecutor, "submit", _submit_marked)
        # Sending over an open connection raises no audit event.
        for cls in (socket.socket, getattr(sys.modules.get("ssl"), "SSLSocket", socket.socket)):
            _patch(cls, "send", _send_watched)
            _patch(cls, "sendall", _send_watched)
    _watchers.append(watcher)
    return lambda: _unwatch(watcher)


def refuse_io(report: Callable[[UnrecordedIO], None] = lambda stray: None) -> Callable[[], None]:
    """As `watch_io`, but any I/O of agent code other than a file read raises IORefused."""

    def refuse(stray: UnrecordedIO) -> None:
        report(stray)
        if not stray.reads:
            raise IORefused(str(stray))

    return watch_io(refuse)


def _unwatch(watcher: Callable[[UnrecordedIO], None]) -> None:
    _watchers.remove(watcher)
    while _patched and not _watchers:
        cls, name, before = _patched.pop()
        if before is None:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


def _patch(cls: type, name: str, made: Callable[[Any], Callable[..., Any]]) -> None:
    inner = getattr(cls, name)
    _patched.append((cls, name, vars(cls).get(name)))
    setattr(cls, name, made(inner))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _watchers or event not in WATCHED or (args and isinstance(args[0], str) and args[0] in _NOWHERE):
        return
    if (place := _place()) is not None:
        _report(place, *_described(event, args))


def _report(place: tuple[str, int], what: str, reads: bool) -> None:
    stray = UnrecordedIO(what, *place, reads)
    for watcher in tuple(_watchers):
        watcher(stray)


def _place() -> tuple[str, int] | None:
    """The position of the active agent code; in a thread that agent code started, at least where it was started."""
    here = HERE.get()
    started = _threads.get(threading.current_thread())
    if (here is None and started is None) or (here is not None and not here.in_agent):
        return None
    is_ours, frame = _agent_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    if frame is not None:
        return frame.f_code.co_filename, frame.f_lineno
    return None if is_ours else started or _awaiting(here)


def _awaiting(here: CurrentCode | None) -> tuple[str, int]:
    """The line at which agent code awaits the current task of a library, whose own stack does not show it."""
    tasks: set[asyncio.Task[Any]] = set()
    with contextlib.suppress(RuntimeError):  # no loop runs here
        tasks = asyncio.all_tasks()
    for task in tasks:
        coroutine: Any = task.get_coro()
        within, found = False, None
        while coroutine is not None:
            frame: FrameType | None = getattr(coroutine, "cr_frame", None)
            if frame is not None:
                ours = str(frame.f_globals.get("__name__", "")).startswith("killick.")
                found = frame if within and is_user_code(frame) else found
                within = within or ours
            coroutine = getattr(coroutine, "cr_await", None)
        if found is not None:
            return found.f_code.co_filename, found.f_lineno
    return f"<{here.tell()[0] if here is not None else 'agent'}>", 0


def _submit_marked(submit: Callable[..., Any]) -> Callable[..., Any]:
    """The threads of a pool are shared: while one works for agent code, it is registered here."""

    def submit_marked(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        place = _place()
        if place is None:
            return submit(self, fn, *args, **kwargs)

        def marked() -> Any:
            thread = threading.current_thread()
            before = _threads.get(thread)
            _threads[thread] = place
            try:
                return fn(*args, **kwargs)
            finally:
                _threads.pop(thread, None)
                if before is not None:
                    _threads[thread] = before

        return submit(self, marked)

    return submit_marked


def _start_marked(start: Callable[..., None]) -> Callable[..., None]:
    """A thread does not know its starter: one that agent code starts is registered here."""

    def start_marked(self: threading.Thread) -> None:
        if (place := _place()) is not None:
            _threads[self] = place
        start(self)

    return start_marked


def _send_watched(send: Callable[..., Any]) -> Callable[..., Any]:
    """Watches network traffic, except the sockets by which a loop wakes itself."""

    def send_watched(self: socket.socket, *args: Any) -> Any:
        if self.family in _NETWORK and (place := _place()) is not None:
            _report(place, "socket.send", False)
        return send(self, *args)

    return send_watched


def _described(event: str, args: tuple[Any, ...]) -> tuple[str, bool]:
    """Returns an I/O as source text, and whether it only reads."""
    target = repr(args[0]) if args and isinstance(args[0], str | bytes | int) else ""
    if event == "open":
        mode, flags = (*args[1:3], None, None)[:2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (mode is None and (flags or 0) & _WRITING):
            return f"open({target}, {mode or 'for writing'!r})", False
        return f"open({target})", True
    return f"{event}({target})" if target else event, False


def _agent_frame(frame: FrameType | None) -> tuple[bool, FrameType | None]:
    """Whether Killick, an import or a debugger does the I/O; otherwise the nearest frame of user code, if any."""
    nearest: FrameType | None = None
    while frame is not None:
        if frame.f_globals is globals():
            frame = frame.f_back
            continue
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(_INTERNAL_READERS) or module == "platform":
            return True, None
        if module.startswith("killick.") or module == "killick":
            return nearest is None, nearest
        if module == "asyncio.events" and frame.f_code.co_name == "_run":
            return False, nearest  # the frames below run the loop; they did not request this
        if nearest is None and not _is_library(frame.f_code.co_filename):
            nearest = frame
        frame = frame.f_back
    return False, nearest


_INTERNAL_READERS: Final = ("importlib", "linecache", "tracemalloc", "pdb", "bdb")
"""Modules that read for the interpreter or a debugger. So does `platform`, which starts `uname` once a process."""


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame is user code: neither Python's, nor a library's, nor Killick's."""
    module = str(frame.f_globals.get("__name__", ""))
    return not (module.startswith("killick.") or module == "killick" or _is_library(frame.f_code.co_filename))


def _is_library(file: str) -> bool:
    return file.startswith((sys.prefix, sys.base_prefix, "<frozen")) or "site-packages" in file
