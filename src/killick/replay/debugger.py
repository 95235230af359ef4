"""Opens the debugger inside the agent's own code, where it waits for a step. Independent of logs."""

from __future__ import annotations

import asyncio
import os
import pdb
import sys
from types import FrameType, FunctionType
from typing import Any

from killick.definitions.current import HERE, is_user_code
from killick.engine.execution import Branch


class _Debugger(pdb.Pdb):
    """A debugger that steps through user code and skips Killick's frames."""

    def stop_here(self, frame: FrameType) -> bool:
        return is_user_code(frame) and super().stop_here(frame)


def frame_here() -> FrameType | None:
    """The frame of user code at the current step: the caller, or the code that gathers its branch."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and not is_user_code(frame):
        frame = frame.f_back
    branch = HERE.get()
    while frame is None and isinstance(branch, Branch) and branch.scope is not None:
        branch = branch.scope.branch
        frame = None if branch.task is None else _waiting(branch.task)
    return frame


def _waiting(task: asyncio.Task[Any]) -> FrameType | None:
    """The innermost frame of user code in a waiting task."""
    found: FrameType | None = None
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None and is_user_code(frame):
            found = frame
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return found


def stop_in(frame: FrameType) -> bool:
    """Opens the debugger in a frame, at its current line. Returns False if the user quit."""
    named = os.environ.get("PYTHONBREAKPOINT", "")
    if sys.breakpointhook is not sys.__breakpointhook__ or named not in ("", "pdb.set_trace"):
        _call_hook(frame)
        return True
    debugger = _Debugger(nosigint=True)
    debugger.reset()
    outer: FrameType | None = frame
    while outer is not None:
        outer.f_trace = debugger.trace_dispatch
        debugger.botframe = outer
        outer = outer.f_back
    debugger.interaction(frame, None)
    is_continued = debugger.stoplineno == -1 and not debugger.breaks  # which is how it says `continue`
    if not debugger.quitting and not is_continued:
        sys.settrace(debugger.trace_dispatch)
    return not debugger.quitting


def _call_hook(frame: FrameType) -> None:
    """A user's own debugger stops in its caller: this makes a function at the agent's line, with its variables."""
    names = tuple(frame.f_locals)
    code = _calling.__code__.replace(
        co_filename=frame.f_code.co_filename, co_name=frame.f_code.co_name, co_firstlineno=frame.f_lineno - 1,
        co_argcount=len(names), co_nlocals=len(names), co_varnames=names,
    )  # fmt: skip
    FunctionType(code, {**frame.f_globals, "killick_hook": sys.breakpointhook})(*frame.f_locals.values())


def _calling() -> None:
    killick_hook()  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore
