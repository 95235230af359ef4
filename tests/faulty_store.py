"""A store that fails on demand, so that a test can fail every operation in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, Final, Literal, Protocol, cast

from killick.errors import StoreUnavailable
from killick.store.protocol import Store

UNCOUNTED: Final = frozenset({"close"})
"""Operations that never fail: a test must be able to close its store."""


class FaultyStore(Store, Protocol):
    """A store that counts its operations and fails one of them; made by `faulty`."""

    @property
    def operations(self) -> int:
        """The number of operations, the failed one included."""
        ...

    @property
    def failed(self) -> str | None:
        """The name of the failed operation, once it failed."""
        ...


def faulty(
    store: Store,
    *,
    fail_at: int | None = None,
    times: int = 1,
    when: Literal["before", "after"] = "before",
    error: BaseException | None = None,
) -> FaultyStore:
    """Wraps a store so that one operation fails, or `times` consecutive ones.

    Operations are counted from 1. `when="before"`: the operation is not done. `when="after"`: it is done, but its
    caller gets an error. Without `fail_at` operations are only counted, so that a test can count first and then fail
    each:

        for n in range(1, counted.operations + 1):
            scenario(faulty(make(), fail_at=n, when="after"))
    """
    error = error or StoreUnavailable(store.place, "failed on purpose")
    # The cast is correct: __getattr__ supplies every method of the store.
    return cast("FaultyStore", _Counting(store, fail_at, times, when == "after", error))


class _Counting:
    def __init__(self, store: Store, fail_at: int | None, times: int, after: bool, error: BaseException) -> None:
        self.operations = 0
        self.failed: str | None = None
        self._store, self._after, self._error = store, after, error
        self._failing = range(0) if fail_at is None else range(fail_at, fail_at + times)
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._counted(name, found) if callable(found) and name not in UNCOUNTED else found

    def _counted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.operations += 1
                fails = self.operations in self._failing
            if fails:
                self.failed = name
            if fails and not self._after:
                raise self._error
            result = operation(*args, **kwargs)
            if fails:
                raise self._error
            return result

        return counted
