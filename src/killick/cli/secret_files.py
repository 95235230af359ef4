"""Files with keys and secrets: made for their owner alone, and examined."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Final

import click

from killick.cli.exit_codes import CommandFailed
from killick.encryption import master_key
from killick.permissions import LINK_SECRET, SECRET_FILE, create_private, exposure
from killick.store.records import Condition

FILE: Final = click.Path(dir_okay=False, path_type=Path)
SEAL_KEY: Final = "KILLICK_SEAL_KEY"
"""The variable that names the private key of seals."""


@contextlib.contextmanager
def new_secret(path: Path) -> Generator[IO[bytes]]:
    """A new file that only this user may read; removed if the block raises. A secret is never overwritten."""
    try:
        with create_private(path) as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                path.unlink()
                raise
    except FileExistsError:
        raise CommandFailed(f"{path}: is there already, and a key is never overwritten; name another file") from None
    except OSError as error:
        raise CommandFailed(f"{path}: cannot be written ({error.strerror}); name another file") from None


def condition() -> Condition:
    """Whether the files of secrets that this environment names are this user's alone."""
    wrong = [f"{path}: {reason}" for path in _named() if (reason := _exposed(path)) is not None]
    return Condition("secrets", ", ".join(map(str, _named())) or "in no file", "; ".join(wrong) or None)


def _named() -> Iterator[Path]:
    keys = [each for each in os.environ.get(master_key.VARIABLE, "").split(",") if not each.startswith("env:")]
    links = [each for each in os.environ.get(LINK_SECRET, "").split() if each.startswith(SECRET_FILE)]
    named = *keys, os.environ.get(SEAL_KEY, ""), *(each.removeprefix(SECRET_FILE) for each in links)
    yield from map(Path, filter(None, named))


def _exposed(path: Path) -> str | None:
    try:
        return exposure(path.stat())
    except OSError as error:
        return f"cannot be read ({error.strerror})"
