"""An archive of many runs in one file: written atomically, never over another file, and verified on reading.

The file is gzip of JSON lines: a header, then each run as `export` writes it, then a line with the count and the hash
of everything before. Each run is self-contained, with its fork parents. docs/file-formats.md describes it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from killick.archive.export import UNREADABLE, Export, bounded, refuse_other
from killick.errors import ArchiveRefused, ExportBroken, RunUnknown
from killick.log.progress import Progress, silent
from killick.model import events as e
from killick.model import hashing
from killick.permissions import create_private, open_input, refuse_database
from killick.store.memory import MemoryStore
from killick.store.records import ENDED
from killick.workspace.vault.packs import sync_folder

FORMAT: Final = "killick.archive"
VERSION: Final = 1
"""The newest version of the file that this build writes and reads."""

_COMPRESSION: Final = 6
_RATIO_MAX: Final = 32
"""How much longer the content may be than the file. A hash in every line keeps real files far below."""

_UNPACKED_FLOOR: Final = 16 << 20
"""A file may always unpack to this many bytes."""

_UNREADABLE: Final = (EOFError, zlib.error, gzip.BadGzipFile)

Place = str | os.PathLike[str]

# the file -----------------------------------------------------------------------------------------


class Header(msgspec.Struct, frozen=True, tag_field="is", tag=FORMAT):
    """The first line: the format, the store, and the time."""

    version: int
    format: int
    store: str
    at: int


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="is", tag="end"):
    """The last line: the number of runs and the hash of all lines before, so that truncation is detected."""

    runs: int
    events: int
    hash: e.Digest


class Held(msgspec.Struct, frozen=True):
    """The verified content of a file."""

    runs: int
    events: int


_end: Final = msgspec.json.Decoder(End).decode


def read(path: Place) -> Iterator[Export]:
    """Every run of an archive, in order, not verified yet.

    Raises ExportBroken if the file is not an archive, or was changed or truncated, which shows only at its end.
    """
    place = os.fspath(path)
    digest, runs, events = sha256(), 0, 0
    with _lines(place) as lines:
        line = next(lines, b"")
        refuse_other(place, line, FORMAT, "an archive of runs", VERSION)
        digest.update(line)
        for line in lines:
            if line.startswith(b'{"is":"end"'):
                _check_end(place, line, End(runs, events, e.to_text(digest.digest())))
                if next(lines, b""):
                    raise ExportBroken(place, "has data after its last line")
                return
            found = Export(place, _seen(chain([line], lines), digest.update))
            runs, events = runs + 1, events + found.header.events
            yield found
            del found  # before the next one is read
    raise ExportBroken(place, f"ends after {runs:,} runs without its last line; it was truncated")


def load(path: Place, run: str) -> MemoryStore:
    """One run of an archive, in a new store in memory. Raises RunUnknown if it is not in the file."""
    for found in read(path):
        if found.header.run == run:
            return found.loaded()
    raise RunUnknown(run)


def verify(path: Place, *, progress: Progress = silent) -> Held:
    """Verifies every run of an archive, and the file's completeness. Raises ExportBroken with the reason."""
    runs = events = 0
    for found in read(path):
        found.loaded()
        runs, events = runs + 1, events + found.header.events
        progress("proving", runs, 0)
        del found
    return Held(runs, events)


def is_archive(path: Place) -> bool:
    """Whether a file may be an archive, by its first bytes."""
    refuse_database(path)
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"
    return False


def name_at(at_us: int) -> str:
    """The default file name of an archive of that time."""
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).strftime("killick-pruned-%Y%m%d-%H%M%SZ.jsonl.gz")


@contextlib.contextmanager
def _lines(place: str) -> Generator[Iterator[bytes]]:
    try:
        with open_input(place) as packed, gzip.open(packed, "rb") as file:
            most = max(_UNPACKED_FLOOR, _RATIO_MAX * os.fstat(packed.fileno()).st_size)
            yield bounded(place, BufferedReader(cast("Any", file), 1 << 20), most)
    except _UNREADABLE as error:
        raise ExportBroken(place, f"was truncated or changed ({error})") from None
    except OSError as error:
        raise ExportBroken(place, f"cannot be read ({error.strerror})") from None


def _seen(lines: Iterable[bytes], see: Callable[[bytes], object]) -> Iterator[bytes]:
    for line in lines:
        see(line)
        yield line


def _packed(data: bytes, at_s: int) -> bytes:
    """A gzip member. What compresses better than a reader accepts is stored as it is."""
    packed = gzip.compress(data, _COMPRESSION, mtime=at_s)
    return packed if len(data) <= _RATIO_MAX * len(packed) else gzip.compress(data, 0, mtime=at_s)


def _check_end(place: str, line: bytes, found: End) -> None:
    try:
        fits = _end(line) == found
    except UNREADABLE:
        fits = False
    if not fits:
        raise ExportBroken(place, "its last line does not fit the lines before it; it was truncated or changed")


class Writer:
    """Writes an archive to a temporary file, one run at a time. `finish` renames it; without that nothing remains."""

    def __init__(self, to: Place, *, store: str, at_us: int) -> None:
        self.path = Path(to)
        self.part = self.path.with_name(f"{self.path.name}.part")
        self.runs = self.events = 0
        self._digest = sha256()
        self._opened = contextlib.ExitStack()
        self._header = Header(VERSION, hashing.FORMAT, store, at_us)

    def __enter__(self) -> Writer:
        try:
            if self.path.exists():
                raise self._exists_error()
            self._raw = self._opened.enter_context(create_private(self.part))
            self._opened.callback(self.part.unlink, missing_ok=True)
        except FileExistsError:
            why = f"{self.part.name} exists: another process writes it, or died; remove it, or name another file"
            raise ArchiveRefused(str(self.path), why) from None
        except OSError as error:
            raise ArchiveRefused(str(self.path), f"cannot be written ({error.strerror}); name another file") from None
        self._opened.enter_context(contextlib.suppress(OSError))  # a full disk may refuse the end of an abandoned file
        self._write(msgspec.json.encode(self._header) + b"\n")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._opened.close()

    def add(self, section: bytes) -> None:
        """Writes an exported run. Raises ExportBroken, and writes nothing, if its end cannot be verified."""
        found = Export(str(self.path), BytesIO(section))
        row = found.loaded().index(found.header.run)
        if row is None or row.status not in ENDED:
            raise ExportBroken(str(self.path), "its log has no end; `killick store verify` corrects the index")
        self._write(section)
        self.runs, self.events = self.runs + 1, self.events + found.header.events

    def finish(self, progress: Progress = silent) -> int:
        """Syncs the file to the device, reads it back, and only then renames it; returns its size.

        The runs were verified before they were written; reading back compares the hash.
        """
        self._write(msgspec.json.encode(End(self.runs, self.events, e.to_text(self._digest.digest()))) + b"\n")
        with self._explained():
            self._raw.flush()
            os.fsync(self._raw.fileno())
        for count, _ in enumerate(read(self.part), 1):
            progress("reading it back", count, self.runs)
        with self._explained():
            size = self.part.stat().st_size
            self._name()
        return size

    def _name(self) -> None:
        """Renames the file unless the name exists, and syncs the folder."""
        try:
            os.link(self.part, self.path)
        except FileExistsError:
            raise self._exists_error() from None
        except OSError:  # a file system without links
            self.part.rename(self.path)
        sync_folder(self.path.parent)

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        with self._explained():
            self._raw.write(_packed(data, self._header.at // 1_000_000))

    def _exists_error(self) -> ArchiveRefused:
        return ArchiveRefused(str(self.path), "exists, and is never overwritten; name another file")

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ArchiveRefused(str(self.path), f"could not be written ({error.strerror}); free some space") from error
