"""Real folders to take snapshots of, and the small changes that an agent makes in them. Measures nothing.

The environment that the bench runs in, and the source of Linux as Debian packs it: fetched once, from Debian alone, and
kept outside the repository. Where it cannot be had, nobody gets it.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

TEXT: Final = frozenset({".py", ".pyi", ".c", ".h", ".rst", ".txt", ".md", ".json", ".S", ".dts"})
TEXT_BYTES: Final = range(400, 200_000)
FETCH_SECONDS: Final = 600
_SOURCE_FILES: Final = 50_000


# having -------------------------------------------------------------------------------------------


def environment(to: Path) -> Path:
    """A copy of the virtual environment that this runs in."""
    copy(Path(sys.prefix), to)
    # Newer Pythons have an environment ignore itself, and then there would be nothing to keep.
    (to / ".gitignore").unlink(missing_ok=True)
    return to


def source() -> Path | None:
    """The source of Linux, to be copied; None where there is no Debian to have it from."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "killick-bench"
    if found := next(iter(sorted(home.glob("linux-source-*"))), None):
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    home.mkdir(parents=True, exist_ok=True)
    try:
        return _fetched(home)
    except (OSError, subprocess.SubprocessError, LookupError) as error:
        print(f"bench: the source of Linux cannot be had: {error}", file=sys.stderr)
        return None


def _fetched(home: Path) -> Path:
    making = home / f"making-{os.getpid()}"
    making.mkdir()
    try:
        if os.geteuid() == 0:
            _run("apt-get", "update", "-qq", at=making)
        depends = _run("apt-cache", "depends", "linux-source", at=making)
        package = next(word for word in depends.split() if word.startswith("linux-source-"))
        _run("apt-get", "download", "-qq", package, at=making)
        _run("dpkg-deb", "-x", str(next(making.glob("*.deb"))), "package", at=making)
        packed = next((making / "package/usr/src").glob("linux-source-*.tar.*"))
        _run("tar", "-xf", str(packed), at=making)
        made = next(path for path in making.glob("linux-source-*") if path.is_dir())
        _unhide(made / ".gitignore")
        made.rename(home / package)
    except StopIteration:
        raise LookupError("Debian's package linux-source is not as it was") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return home / package


def _unhide(rules: Path) -> None:
    """Take away what Debian added for itself: a last rule that ignores the whole source."""
    lines = rules.read_text(encoding="utf-8").splitlines(keepends=True)
    if "/*\n" in lines:
        rules.write_text("".join(lines[: lines.index("/*\n")]), encoding="utf-8")


def rsync() -> str | None:
    """Where rsync is; whoever may install it gets it here."""
    if shutil.which("rsync") is None and shutil.which("apt-get") is not None and os.geteuid() == 0:
        with suppress(OSError, subprocess.SubprocessError):
            _run("apt-get", "install", "-y", "-qq", "rsync", at=Path("/"))
    return shutil.which("rsync")


def _run(*command: str, at: Path) -> str:
    done = subprocess.run(
        command, cwd=at, capture_output=True, text=True, timeout=FETCH_SECONDS,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    if done.returncode:
        raise LookupError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# holding ------------------------------------------------------------------------------------------


def copy(tree: Path, to: Path) -> None:
    """As `cp -a` does it."""
    subprocess.run(["cp", "-a", str(tree), str(to)], check=True)


def remove(folder: Path) -> None:
    """A folder with all that is in it; whoever measures next need not wait for a disk that still forgets it."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    os.sync()


def files(tree: Path) -> Iterator[Path]:
    """Every regular file, in order."""
    for folder, names, found in os.walk(tree):
        names.sort()
        for name in sorted(found):
            path = Path(folder, name)
            if not path.is_symlink() and path.is_file():
                yield path


def some(tree: Path | None, to: Path, count: int = _SOURCE_FILES) -> None:
    """So many files of a tree; made up where there is none."""
    if tree is None:
        for number in range(count):
            path = to / f"part_{number % 50}" / f"of_{number % 1_250}" / f"file_{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"value_{number}_{line} = {line}\n" for line in range(number % 400)))
        return
    for number, path in enumerate(files(tree)):
        if number == count:
            break
        place = to / path.relative_to(tree)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)


def warm(tree: Path) -> tuple[int, int]:
    """Read everything once, so that it is in memory for whoever comes; how many files, how many bytes."""
    count = size = 0
    for path in files(tree):
        count, size = count + 1, size + len(path.read_bytes())
    return count, size


def size_bytes(folder: Path) -> int:
    """What the files below a folder hold together."""
    return sum(path.stat().st_size for path in files(folder))


# changing -----------------------------------------------------------------------------------------


class Agent:
    """Whoever changes files: always in the same way in the same tree."""

    def __init__(self, tree: Path, seed: int = 7) -> None:
        self._tree = tree
        self._chance = random.Random(seed)
        self._number = 0
        self._texts = [
            path for path in files(tree)
            if path.suffix in TEXT and path.stat().st_size in TEXT_BYTES and not path.name.startswith(".")
        ]  # fmt: skip

    def small_change(self) -> list[Path]:
        """Three files edited, one added, one deleted; those that are there now."""
        written = [self._edit() for _ in range(3)]
        written.append(self._add())
        self._delete()
        return written

    def work(self) -> list[Path]:
        """What one call of a tool changes: a file or two, at times one more, seldom one less."""
        self._number += 1
        written = [self._edit() for _ in range(self._chance.choice((1, 1, 1, 2, 2, 3)))]
        if self._number % 5 == 0:
            written.append(self._add())
        if self._number % 20 == 0:
            self._delete()
        return [path for path in written if path.exists()]

    def _edit(self) -> Path:
        """A few lines are other, in place or by a new file that takes the old one's name, as editors do both."""
        path = self._chance.choice(self._texts)
        lines = path.read_bytes().splitlines(keepends=True)
        at = self._chance.randrange(len(lines) + 1)
        words = b" ".join(lines[self._chance.randrange(len(lines))].split()[:6])
        lines[at : at + self._chance.randrange(3)] = [
            b"    %s (%d)\n" % (words, self._chance.randrange(10_000)) for _ in range(self._chance.randint(1, 6))
        ]
        if self._chance.random() < 0.5:
            path.write_bytes(b"".join(lines))
        else:
            new = path.with_name(f"{path.name}~new")
            new.write_bytes(b"".join(lines))
            new.chmod(path.stat().st_mode & 0o7777)
            new.replace(path)
        return path

    def _add(self) -> Path:
        """A new file like one that is there."""
        like = self._chance.choice(self._texts)
        path = like.with_name(f"added_{self._chance.randrange(1 << 40):x}{like.suffix}")
        lines = like.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"# Written by an agent.\n" + b"".join(lines[: 10 + self._chance.randrange(90)]))
        self._texts.append(path)
        return path

    def _delete(self) -> None:
        path = self._texts.pop(self._chance.randrange(len(self._texts)))
        path.unlink()
