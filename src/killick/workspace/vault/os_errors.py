"""What the system's refusals mean for a vault: the same errors as a store has. Refuses nothing itself."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator
from typing import Final

from killick.errors import StoreError, StoreFull, StoreReadOnly, StoreUnavailable

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def explain(error: OSError, place: str) -> StoreError:
    """An error of the system in our words."""
    if error.errno in _FULL:
        return StoreFull(place)
    if error.errno in _READ_ONLY:
        return StoreReadOnly(place)
    if isinstance(error, FileNotFoundError):
        return StoreUnavailable(place, "something of this vault is not there any more; check that its folder is whole")
    if isinstance(error, NotADirectoryError | FileExistsError):
        return StoreUnavailable(place, "is no folder, so it cannot be a vault; choose another name")
    return StoreUnavailable(place, f"the system says: {error.strerror or error}")


@contextlib.contextmanager
def explained(place: str) -> Generator[None, None, None]:
    """Turns the system's errors into ours."""
    try:
        yield
    except OSError as error:
        raise explain(error, place) from error
