"""Translates operating-system errors of a vault into store errors. Refuses nothing itself."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator
from typing import Final

from killick.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def explain(error: OSError, place: str) -> StoreError:
    """Translates an operating-system error."""
    if error.errno in _FULL:
        return StoreFull(place)
    if error.errno in _READ_ONLY:
        return StoreReadOnly(place)
    if isinstance(error, FileNotFoundError):
        return StoreUnavailable(place, "part of this vault is missing; check its folder, or restore it from a backup")
    if isinstance(error, NotADirectoryError | FileExistsError):
        return StoreUnavailable(place, "is not a folder, so it cannot be a vault; choose another name")
    return StoreUnavailable(place, f"the system says: {error.strerror or error}")


@contextlib.contextmanager
def explained(place: str) -> Generator[None, None, None]:
    """Translates operating-system errors raised in the block."""
    try:
        yield
    except OSError as error:
        raise explain(error, place) from error
