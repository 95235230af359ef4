"""Resources that a process made by `os.fork` must not share with its parent: locks, connections, threads.

Their owners register here. They are called before a fork, and after it in the parent or in the child.
"""

from __future__ import annotations

import os
import threading
import weakref
from itertools import count
from typing import Any, Final, Protocol


class Forked(Protocol):
    """An owner of such resources. None of these may raise."""

    def before_fork(self) -> None:
        """In the parent: pause, so that the child sees a consistent state."""
        ...

    def after_fork_in_parent(self) -> None:
        """In the parent: continue."""
        ...

    def after_fork_in_child(self) -> None:
        """In the child: drop the parent's resources, without closing them there."""
        ...


_known: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
_numbers: Final = count()
_told: list[Forked] = []
_inherited: list[object] = []
_mutex = threading.Lock()


def hears_of_forks(owner: Forked) -> None:
    """Registers an owner, weakly referenced. Owners are called in registration order.

    A lock that is taken while another is held belongs to an owner that registers later, so that no fork can deadlock.
    """
    with _mutex:
        _known[next(_numbers)] = owner


def keep_inherited(*objects: object) -> None:
    """In a child: keeps the parent's resources referenced forever, so that no destructor closes them."""
    _inherited.extend(objects)


def _before() -> None:
    with _mutex:
        _told[:] = _known.values()
    for owner in _told:
        owner.before_fork()


def _in_parent() -> None:
    for owner in _told:
        owner.after_fork_in_parent()
    _told.clear()


def _in_child() -> None:
    global _mutex
    _mutex = threading.Lock()
    for owner in _told:
        owner.after_fork_in_child()
    _told.clear()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
