"""An archive of many runs in one file: written atomically, never over another file, and verified on reading.

The file is gzip of JSON lines: a header, then each run as `export` writes it, then a line with the count and the hash
of everything before. Each run is self-contained, with its fork parents. docs/file-formats.md describes it.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from killick.archive.export import Export, refuse_other
from killick.archive.export import Header as RunHeader
from killick.errors import ArchiveRefused, ExportBroken, RunUnknown
from killick.log.progress import Progress, silent
from killick.model import events as e
from killick.model import hashing
from killick.permissions import create_private, refuse_database
from killick.store.memory import MemoryStore
from killick.store.records import ENDED
from killick.workspace.vault.packs import sync_folder

FORMAT: Final = "killick.archive"
VERSION: Final = 1
"""The newest version of the file that this build writes and reads."""

_COMPRESSION: Final = 6
LINE_BYTES_MAX: Final = 64 << 20
RUN_BYTES_MAX: Final = 2 << 30
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


_header: Final = msgspec.json.Decoder(RunHeader).decode
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
            section = _section(place, line, lines)
            digest.update(section)
            found = Export(place, section)
            runs, events = runs + 1, events + found.header.events
            yield found
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
        refuse_database(place)
        with gzip.open(place, "rb") as file:
            yield _bounded(place, BufferedReader(cast("Any", file), 1 << 20))
    except _UNREADABLE as error:
        raise ExportBroken(place, f"was truncated or changed ({error})") from None
    except OSError as error:
        raise ExportBroken(place, f"cannot be read ({error.strerror})") from None


def _bounded(place: str, file: BufferedReader) -> Iterator[bytes]:
    """The lines of a file. Stops inside a long line: a few bytes of gzip can unpack to any length."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        if len(line) > LINE_BYTES_MAX:
            raise ExportBroken(place, f"has a line of more than {LINE_BYTES_MAX:,} bytes, which no archive has")
        yield line


def _section(place: str, first: bytes, lines: Iterator[bytes]) -> bytes:
    """A run's lines, as many as its header says."""
    try:
        header = _header(first)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ExportBroken(place, "has no run where one should begin; it was changed") from None
    section, size = [first], 0
    for _ in range(header.events + header.messages + header.values):
        line = next(lines, b"")
        if not line:
            raise ExportBroken(place, f"ends in the middle of {header.run}; it was truncated")
        section.append(line)
        size += len(line)
        if size > RUN_BYTES_MAX:
            raise ExportBroken(place, f"has {header.run} with over {RUN_BYTES_MAX:,} bytes; this build reads no more")
    return b"".join(section)


def _check_end(place: str, line: bytes, found: End) -> None:
    try:
        fits = _end(line) == found
    except (msgspec.DecodeError, UnicodeDecodeError):
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
        made_at = self._header.at // 1_000_000
        self._packed = gzip.GzipFile("", "wb", _COMPRESSION, self._raw, mtime=made_at)
        self._opened.enter_context(contextlib.suppress(OSError))  # a full disk may refuse the end of an abandoned file
        self._opened.callback(self._packed.close)
        self._write(msgspec.json.encode(self._header) + b"\n")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._opened.close()

    def add(self, section: bytes) -> None:
        """Writes an exported run. Raises ExportBroken, and writes nothing, if its end cannot be verified."""
        found = Export(str(self.path), section)
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
            self._packed.close()
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
            self._packed.write(data)

    def _exists_error(self) -> ArchiveRefused:
        return ArchiveRefused(str(self.path), "exists, and is never overwritten; name another file")

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ArchiveRefused(str(self.path), f"could not be written ({error.strerror}); free some space") from error
