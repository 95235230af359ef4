"""The far side: what was really done, by books of its own, and what the kernel saw. It knows nothing of Killick.

The books are one file that every process appends to; an effect whose key was seen before is not done again. Files are
noted by what the kernel says was opened, whatever path it was asked for by.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

CANARY: Final = f"canary-{secrets.token_hex(8)}"
"""What every file outside of the roots says: whoever returns it has read one."""


class Books:
    """Everything that was done, in order."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.touch()

    def enter(self, what: str, *, key: str | None = None, **told: Any) -> bool:
        """Do something, once for each key. Tells whether it is new."""
        with self.file.open("r+") as book:
            fcntl.flock(book, fcntl.LOCK_EX)
            if key is not None and any(line["key"] == key for line in map(json.loads, book)):
                return False
            book.seek(0, os.SEEK_END)
            book.write(json.dumps({"what": what, "key": key, **told}) + "\n")
            return True

    def lines(self, *what: str) -> list[dict[str, Any]]:
        """What was done, of some kinds or of all."""
        with self.file.open() as book:
            lines: list[dict[str, Any]] = [json.loads(line) for line in book]
        return [line for line in lines if not what or line["what"] in what]


class Grounds:
    """A folder with a root that an agent may use, and beside it what it may not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.outside = folder / "outside"
        self.beside = folder / "root2"
        folder.mkdir(exist_ok=True)
        self.books = Books(folder / "books")
        for place in (self.root / "sub", self.root / "deep" / "er", self.outside / "inner", self.beside):
            place.mkdir(parents=True)
        for place in (self.root, self.root / "sub", self.root / "deep" / "er"):
            (place / "file.txt").write_text("inside")
        for place in (self.outside, self.outside / "inner", self.beside):
            (place / "file.txt").write_text(CANARY)
        self.real_root = os.path.realpath(self.root)
        self.links()

    def links(self) -> None:
        """The links that were there before anybody came."""
        for name, target in {
            "to_outside": self.outside, "to_file": self.outside / "file.txt", "up": "..", "to_slash": "/",
            "to_proc": "/proc/self/root", "to_nothing": self.outside / "new.txt", "round": "round",
            "chain": "sub/chain", "sub/chain": "../to_outside", "honest": "sub/file.txt",
        }.items():  # fmt: skip
            os.symlink(str(target), self.root / name)

    # what tools do ------------------------------------------------------------------------------

    def read(self, path: str) -> str:
        """Read a file, and note which it really was."""
        with open(path, encoding="utf-8", errors="replace") as file:
            self._note("read", file.fileno())
            return file.read(200)

    def write(self, path: str, text: str) -> None:
        """Write a file, and note which it really was."""
        with open(path, "a", encoding="utf-8") as file:
            self._note("write", file.fileno())
            file.write(text)

    def _note(self, how: str, number: int) -> None:
        self.books.enter(how, file=os.readlink(f"/proc/self/fd/{number}"))

    # what is found afterwards -------------------------------------------------------------------

    def escaped(self) -> list[str]:
        """The files outside of the root that were opened."""
        files = [str(line["file"]) for line in self.books.lines("read", "write")]
        return [file for file in files if not (file + "/").startswith(self.real_root + "/")]

    def picture(self) -> dict[str, Any]:
        """Everything that lies outside of the root, as it is."""
        found: dict[str, Any] = {}
        for top in (self.outside, self.beside):
            for place, folders, files in os.walk(top):
                found |= {os.path.join(place, name): "folder" for name in folders}
                found |= {os.path.join(place, name): Path(place, name).read_text() for name in files}
        return found | {"here": sorted(os.listdir(self.folder))}


class Watcher:
    """The kernel's own word on a folder and those below it: who opened, read, changed or made anything there."""

    _MASK: Final = 0x3FF & ~0x4  # everything that happens to files, but for their times and rights

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for folder in folders:
            for place, _, _ in os.walk(folder):
                assert libc.inotify_add_watch(self._fd, os.fsencode(place), self._MASK) >= 0, os.strerror(
                    ctypes.get_errno()
                )
        self.seen()

    def seen(self) -> list[str]:
        """What happened since it was last asked."""
        return list(self._events())

    def _events(self) -> Iterator[str]:
        while True:
            try:
                raw = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            while raw:
                _, mask, _, length = struct.unpack_from("iIII", raw)
                name = raw[16 : 16 + length].rstrip(b"\0").decode(errors="replace")
                yield f"{name or '.'} ({mask:#x})"
                raw = raw[16 + length :]

    def close(self) -> None:
        os.close(self._fd)
