"""Snapshots of real folders, beside what else keeps a folder at every boundary: git, rsync and cp.

All look at the same tree, in turn, with everything in memory. Ours holds when it returns: synced, and on the index. Git
has an index and a store of its own outside the tree, as people do who keep an agent's steps with it; it syncs neither.
The first snapshot is the best of a few rounds, for a copy of so many files takes twice as long when the disk is busy
with what it has to forget; nothing is deleted between rounds for the same reason. It stores what is much as it is, and
compresses it afterwards, beside whatever comes: how long that takes stands in its row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from hashlib import sha256
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import msgspec

from bench import trees
from bench.measure import Measure, interleaved, ratio, seconds
from bench.peers import ask, say
from killick.workspace.vault.vault import Vault
from killick.workspace.workspace import Workspace

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FIRST_ROUNDS: Final = 3
ROUNDS: Final = 11
FRESH_ROUNDS: Final = 3
BOUNDARIES: Final = 200
ZSTD_LEVEL: Final = 1
"""As the vault compresses."""
ZLIB_LEVEL: Final = 6
"""As git does."""

_AT_ONCE: Final = 400


def measure(folder: Path) -> Iterator[Measure]:
    """Tree by tree."""
    mover = trees.rsync()
    if mover is None:
        yield Measure(name="workspace", what="rsync: not at hand", figure=None)
    source = trees.source()
    home = folder / "workspace"
    home.mkdir()
    yield from Measured("virtual environment", trees.environment(home / "environment"), home, mover).rows()
    if source is None:
        yield Measure(name="workspace", what="a large source tree: not to be had here, from Debian", figure=None)
        trees.remove(home)
        return
    trees.copy(source, home / "source")
    yield from Measured(f"Debian's {source.name}", home / "source", home, mover).rows()
    trees.remove(home)


class Took(msgspec.Struct, frozen=True):
    """How long something took in a process of its own."""

    seconds: float


class Git:
    """A shadow of a tree in git: its own store, its own index, nothing in the tree."""

    def __init__(self, tree: Path, home: Path) -> None:
        self._tree = tree
        self.home = home
        self._environment = os.environ | {
            "GIT_DIR": str(home),
            "GIT_WORK_TREE": str(tree),
            "GIT_INDEX_FILE": str(home / "shadow"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
        }
        self._run("git init -q")

    def boundary(self) -> str:
        """Everything that is there; the id of its tree."""
        return self._run("git add -A && git write-tree").strip()

    def for_many_files(self, home: Path) -> Git:
        """Another one that knows the same, set up as git advises for large trees."""
        shutil.copytree(self.home, home, ignore=shutil.ignore_patterns("objects"))
        (home / "objects").symlink_to(self.home / "objects")
        other = Git(self._tree, home)
        other._run("git config feature.manyFiles true && git update-index --untracked-cache --index-version 4")
        return other

    def _run(self, command: str) -> str:
        return subprocess.run(
            ["sh", "-c", command], cwd=self._tree, env=self._environment, check=True, capture_output=True, text=True
        ).stdout


class Measured:
    """One tree, and all that is measured on it."""

    def __init__(self, name: str, tree: Path, home: Path, mover: str | None) -> None:
        self._tree = tree
        self._home = home / f"{tree.name}-kept"
        self._home.mkdir()
        self._mover = mover
        files, size = trees.warm(tree)
        self._name = f"{name} ({files:,} files, {size / 1e6:,.0f} MB)"
        self._agent = trees.Agent(tree)
        self._git = Git(tree, self._home / "git")
        self._places = count()
        self._vault = self._linked = self._home
        self._copied = 0.0
        self._kept: dict[bytes, Compressed] = {}

    def rows(self) -> Iterator[Measure]:
        """From the first snapshot to what all of them take."""
        yield from self._first()
        with Workspace(self._tree, vault=self._vault) as workspace:
            first = workspace.capture()
            files = [path for path, each in workspace.files(first.root) if each.sort == "file"]
            self._kept = _compressed(self._tree / os.fsdecode(path) for path in files)
            yield from self._unchanged(workspace)
            yield from self._changed(workspace)
        yield from self._stored(dict(self._kept))

    # the first --------------------------------------------------------------------------------

    def _first(self) -> Iterator[Measure]:
        def ours() -> float:
            with Workspace(self._tree, vault=self._place("vault")) as workspace:
                return _settled(workspace.capture)

        def copied() -> float:
            self._linked = self._place("copy")
            return _settled(lambda: trees.copy(self._tree, self._linked))

        took, copies = interleaved(FIRST_ROUNDS, ours, copied)
        self._copied = min(copies)
        git = _settled(self._git.boundary)
        with closing(Vault(self._vault)) as vault:
            packing = seconds(vault.compress)
        yield self._row(
            f"the first snapshot, to `cp -a`, best of {FIRST_ROUNDS} rounds", min(took) / min(copies),
            f"{_told(min(took))} to {_told(min(copies))}, medians {_told(median(took))} to {_told(median(copies))}; "
            f"compressing it afterwards {_told(packing)}; git add -A && git write-tree {_told(git)}",
            at_most=1.5,
        )  # fmt: skip

    # boundaries -------------------------------------------------------------------------------

    def _unchanged(self, workspace: Workspace) -> Iterator[Measure]:
        many = self._git.for_many_files(self._home / "git-many")
        for each in (self._git.boundary, many.boundary, workspace.capture):
            each()

        def ours() -> float:
            return _boundary(workspace, changed=False)

        took, git, tuned = interleaved(
            ROUNDS, ours, lambda: seconds(self._git.boundary), lambda: seconds(many.boundary)
        )
        yield self._row(
            "a boundary where nothing changed, to `git add -A && git write-tree`", ratio(took, git),
            f"{_told(median(took))} to {_told(median(git))}, with feature.manyFiles {_told(median(tuned))}; "
            f"slowest {_told(max(took))}",
            at_most=1,
        )  # fmt: skip
        anew = [ask(__spec__.name, self._tree, self._vault, answer=Took).seconds for _ in range(FRESH_ROUNDS)]
        yield self._row(
            "the same in a process that has only just started, which looks at every file, to git's",
            median(anew) / median(git), _told(median(anew)),
        )  # fmt: skip
        yield from self._others("nothing changed", median(took))

    def _changed(self, workspace: Workspace) -> Iterator[Measure]:
        took, git = list[float](), list[float]()
        for number in range(ROUNDS):
            self._keep(self._agent.small_change())
            for is_ours in (True, False) if number % 2 == 0 else (False, True):
                if is_ours:
                    took.append(_boundary(workspace, changed=True))
                else:
                    git.append(seconds(self._git.boundary))
        yield self._row(
            "a boundary after a small change (3 files edited, 1 added, 1 deleted), to git's", ratio(took, git),
            f"{_told(median(took))} to {_told(median(git))}; slowest {_told(max(took))} to {_told(max(git))}",
            at_most=1.2,
        )  # fmt: skip
        yield from self._others("a small change", median(took))

    def _others(self, what: str, ours: float) -> Iterator[Measure]:
        """Those that hold a whole copy at every boundary."""
        if self._mover is not None:
            linked = _settled(self._moved)
            yield self._row(
                f"a boundary by `rsync -a --link-dest`, {what}, to ours", linked / ours, _told(linked), form="{:,.0f} ×"
            )
        yield self._row(
            f"a boundary by `cp -a`, {what}, to ours", self._copied / ours, _told(self._copied), form="{:,.0f} ×"
        )

    # what it takes ----------------------------------------------------------------------------

    def _stored(self, before: Mapping[bytes, Compressed]) -> Iterator[Measure]:
        began, took = trees.size_bytes(self._vault), list[float]()
        with Workspace(self._tree, vault=self._vault) as workspace:
            workspace.capture()
            for _ in range(BOUNDARIES):
                self._keep(self._agent.work())
                took.append(_boundary(workspace, changed=True))
        parts = {name: trees.size_bytes(self._vault / name) for name in ("packs", "seen")}
        total = trees.size_bytes(self._vault)
        unique = sum(each.zstd for each in self._kept.values())
        added = unique - sum(each.zstd for each in before.values())
        yield self._row(
            f"what the vault takes after {BOUNDARIES} boundaries with changes, to its unique files compressed one by "
            f"one by zstd -{ZSTD_LEVEL}",
            total / unique,
            f"{total / 1e6:,.1f} MB (packs {parts['packs'] / 1e6:,.1f}, what is known of the folder "
            f"{parts['seen'] / 1e6:,.1f}, index {(total - sum(parts.values())) / 1e6:,.1f}) to {unique / 1e6:,.1f} MB; "
            f"by zlib -{ZLIB_LEVEL} {sum(each.zlib for each in self._kept.values()) / 1e6:,.1f} MB, as they are "
            f"{sum(each.size for each in self._kept.values()) / 1e6:,.1f} MB",
            at_most=1.2,
        )  # fmt: skip
        yield self._row(
            "what those boundaries alone added, to the new files compressed", (total - began) / added,
            f"{(total - began) / 1e3:,.0f} KB to {added / 1e3:,.0f} KB; a boundary took {_told(median(took))}, "
            f"the 95th of a hundred {_told(quantiles(took, n=100)[94])}",
        )  # fmt: skip

    def _keep(self, written: Sequence[Path]) -> None:
        self._kept.update(_sizes([path for path in written if path.exists()]))

    # inside -----------------------------------------------------------------------------------

    def _row(
        self, what: str, figure: float, beside: str, *, form: str = "{:.2f} ×", at_most: float | None = None
    ) -> Measure:
        what = f"{what}: {self._name}"
        return Measure(name="workspace", what=what, figure=figure, form=form, at_most=at_most, beside=beside)

    def _place(self, what: str) -> Path:
        """A place where nothing is. Whichever vault was filled last is the one that is gone on with."""
        place = self._home / f"{what}-{next(self._places)}"
        if what == "vault":
            self._vault = place
        return place

    def _moved(self) -> None:
        """What has not changed since the last copy is a link to it."""
        place, before = self._place("moved"), self._linked
        assert self._mover is not None
        subprocess.run([self._mover, "-a", f"--link-dest={before}", f"{self._tree}/", f"{place}/"], check=True)
        self._linked = place


def _boundary(workspace: Workspace, *, changed: bool) -> float:
    """How long ours takes, in line."""
    began = time.perf_counter()
    found = workspace.capture()
    took = time.perf_counter() - began
    assert bool(found.changed) == changed
    return took


def _settled(work: Callable[[], object]) -> float:
    """How long it takes, once nothing that came before still waits for the disk."""
    os.sync()
    return seconds(work)


def _told(took: float) -> str:
    return f"{took:.2f} s" if took >= 1 else f"{took * 1e3:,.1f} ms"


# what compression makes of it ---------------------------------------------------------------------


class Compressed(msgspec.Struct, frozen=True):
    """One file's content, and what is left of it."""

    size: int
    zstd: int
    zlib: int


def _compressed(paths: Iterable[Path]) -> dict[bytes, Compressed]:
    """Unique contents by their hash, by several processes."""
    every = list(paths)
    parts = [every[first : first + _AT_ONCE] for first in range(0, len(every), _AT_ONCE)]
    found: dict[bytes, Compressed] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for part in pool.map(_sizes, parts):
            found |= part
    return found


def _sizes(paths: Sequence[Path]) -> dict[bytes, Compressed]:
    found: dict[bytes, Compressed] = {}
    for path in paths:
        data = path.read_bytes()
        digest = sha256(data).digest()
        if digest not in found:
            small = min(len(data), len(zstd.compress(data, ZSTD_LEVEL)))
            found[digest] = Compressed(len(data), small, len(zlib.compress(data, ZLIB_LEVEL)))
    return found


def _fresh(tree: Path, vault: Path) -> None:
    """One boundary in this process, which has never seen the tree."""
    with Workspace(tree, vault=vault) as workspace:
        say(Took(seconds(workspace.capture)))


if __name__ == "__main__":
    _fresh(Path(sys.argv[1]), Path(sys.argv[2]))
