"""Resources that a process made by `os.fork` must not share with its parent: locks, connections, threads.

Their owners register here. They are called before a fork, and after it in the parent or in the child.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # noqa: N801
        """As in `functools`, without the lock that it has in Python 3.11: a thread may hold that during a fork."""

        def __init__(self, make: Callable[[Any], Any]) -> None:
            self._make, self.__doc__ = make, make.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._make(instance)
            return value


class Forked:
    """An owner of such resources. None of these methods may raise."""

    def before_fork(self) -> None:
        """In the parent: pause, so that the child sees a consistent state."""

    def after_fork_in_parent(self) -> None:
        """In the parent: continue."""

    def after_fork_in_child(self) -> None:
        """In the child: drop the parent's resources, without closing them there."""


class ForkedMutex(Forked):
    """An owner that is paused by its mutex. In the child it gets a new one, before `after_fork_in_child`."""

    _mutex: threading.Lock

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_in_parent(self) -> None:
        self._mutex.release()


_known: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
_numbers: Final = count()
_notified: list[Forked] = []
_inherited: list[object] = []
_mutex = threading.Lock()


def register_for_forks(owner: Forked) -> None:
    """Registers an owner, weakly referenced. Owners are called in registration order.

    A lock that is taken while another is held belongs to an owner that registers later, so that no fork can deadlock.
    """
    with _mutex:
        _known[next(_numbers)] = owner


def keep_inherited(*objects: object) -> None:
    """In a child: keeps the parent's resources referenced forever, so that no destructor closes them."""
    _inherited.extend(objects)


def keep_forever(*objects: object) -> None:
    """Keeps resources referenced, also when the interpreter ends, so that no destructor ever closes them."""
    import ctypes

    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def end_child(error: BaseException | None) -> NoReturn:
    """Ends a forked child whose code came back to a thread of its parent: only the parent may record the outcome."""
    code = 0 if error is None else 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _before() -> None:
    paused: list[Forked] = []
    while fresh := [owner for owner in _owners() if owner not in paused]:  # others may register while one is waited for
        for owner in fresh:
            owner.before_fork()
            paused.append(owner)
    _notified[:] = paused


def _owners() -> list[Forked]:
    with _mutex:
        return list(_known.values())


def _in_parent() -> None:
    for owner in _taken():
        owner.after_fork_in_parent()


def _in_child() -> None:
    global _mutex
    _mutex = threading.Lock()
    owners = _taken()
    for owner in owners:
        if isinstance(owner, ForkedMutex):
            owner._mutex = threading.Lock()  # pyright: ignore[reportPrivateUsage]
    failed: Exception | None = None
    for owner in owners:
        try:
            owner.after_fork_in_child()
        except Exception as error:  # the others must be told too
            failed = failed or error
    if failed is not None:
        raise failed


def _taken() -> list[Forked]:
    """Returns the paused owners, before any of them continues and another thread forks."""
    owners, _notified[:] = list(_notified), ()
    return owners


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
