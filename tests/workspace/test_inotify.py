"""Whoever keeps to the rules of a watch misses no change, whatever is moved, replaced or made anew."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from killick.workspace.inotify import Watch, is_trusted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")

SEEDS: Final = random.Random(11).sample(range(1_000_000), 8)


class Folder(NamedTuple):
    """What one folder was when it was last looked at: its own mode and time, and its entries."""

    own: tuple[int, ...]
    entries: dict[bytes, tuple[int, ...]]


class Follower:
    """Knows a tree by looking only where the watch says, and keeps to the rules of `killick.workspace.inotify`."""

    def __init__(self, root: Path) -> None:
        watch = Watch.begin()
        assert watch is not None
        self.watch, self.root = watch, os.fsencode(root)
        self.known: dict[bytes, Folder] = {}
        self.unwatched: set[bytes] = set()
        self.scans = 0
        self.scan()

    def scan(self) -> None:
        self.scans += 1
        self.known.clear()
        self.unwatched.clear()
        self.look(self.root, all_below=True)

    def follow(self) -> set[bytes] | None:
        told = self.watch.changed()
        if told is None:
            self.scan()
        else:
            for folder in sorted(told | self.unwatched):
                if folder in self.known or os.path.dirname(folder) in self.known:
                    self.look(folder)
        return told

    def look(self, folder: bytes, *, all_below: bool = False) -> None:
        watched = self.watch.add(folder)
        (self.unwatched.discard if watched else self.unwatched.add)(folder)
        found = listed(folder)
        before = self.known.get(folder)
        if found is None:
            self.lose(folder)
            return
        self.known[folder] = found
        for name in before.entries if before is not None else ():
            if name not in found.entries:
                self.lose(folder + b"/" + name)
        for name, entry in found.entries.items():
            if stat.S_ISDIR(entry[0]):
                other = before is None or before.entries.get(name) != entry
                if all_below or other or folder + b"/" + name not in self.known:
                    self.look(folder + b"/" + name, all_below=True)
            elif folder + b"/" + name in self.known:
                self.lose(folder + b"/" + name)

    def lose(self, folder: bytes) -> None:
        self.watch.forget(folder)
        for path in [path for path in self.known if path == folder or path.startswith(folder + b"/")]:
            del self.known[path]
            self.unwatched.discard(path)


def listed(folder: bytes) -> Folder | None:
    entries = {}
    try:
        own = os.lstat(folder)
        if not stat.S_ISDIR(own.st_mode):
            return None
        for name in os.listdir(folder):
            try:
                entry = os.lstat(folder + b"/" + name)
            except FileNotFoundError:
                continue
            # A folder's own time is told in its own record: it changes when something in it does.
            is_folder = stat.S_ISDIR(entry.st_mode)
            about = (stat.S_IFDIR, entry.st_ino) if is_folder else (*entry[:3], entry.st_size, entry.st_mtime_ns)
            entries[name] = about
    except OSError:
        return None
    return Folder((own.st_mode, own.st_mtime_ns), entries)


def truth(folder: bytes) -> dict[bytes, Folder]:
    found = listed(folder)
    assert found is not None
    known = {folder: found}
    for name, entry in found.entries.items():
        if stat.S_ISDIR(entry[0]):
            known |= truth(folder + b"/" + name)
    return known


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "in" / "ws"
    for place in ("a", "a/deep/deeper", "b", "c"):
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / "file").write_text("there")
    (tmp_path / "out").mkdir()
    return folder


@pytest.fixture
def follower(root: Path) -> Iterator[Follower]:
    made = Follower(root)
    assert made.follow() == set()
    yield made
    made.watch.close()


def shell(root: Path, command: str) -> None:
    subprocess.run(["sh", "-ec", command], cwd=root, check=True)


TOLD: Final = {
    "echo more >> a/file": {"a"},
    "echo other > a/file": {"a"},
    "truncate -s 1 a/file": {"a"},
    "chmod 600 a/file": {"a"},
    "touch -d yesterday a/file": {"a"},
    "mv a/file a/other": {"a"},
    "mv a/file b/other": {"a", "b"},
    "echo new > c/t; mv c/t c/file": {"c"},
    "rm b/file": {"b"},
    "ln -s nowhere c/link": {"c"},
    "ln a/file c/second": {"c"},
    "mkfifo c/fifo": {"c"},
    "chmod 700 b": {"", "b"},
    "touch -d yesterday b": {"", "b"},
    "chmod 700 .": {""},
    "echo x > file": {""},
    "mkdir d": {"", "d"},
    "rm -r a/deep": {"a", "a/deep", "a/deep/deeper"},
    "cat a/file >/dev/null; ls -R . >/dev/null": set(),
    "cp -p a/file c/file": {"c"},
    "fallocate -l 10000 a/file": {"a"},
    "exec 3<> a/file; rm a/file; echo more >&3": {"a"},
}


@pytest.mark.parametrize("command", TOLD)
def test_a_change_is_told_by_its_folder(root: Path, follower: Follower, command: str) -> None:
    shell(root, command)
    told = follower.follow()
    assert told is not None
    assert {os.fsdecode(os.path.relpath(path, follower.root)).replace(".", "") for path in told} == TOLD[command]
    assert follower.known == truth(follower.root)
    assert follower.follow() == set(), "what was told is not told again"


MOVES: Final = {
    "moved inside": ("mv a c/moved", "c/moved/deep/deeper/file"),
    "moved inside and another put in its place": ("mv a c/moved; mkdir a; echo x > a/file", "a/file"),
    "moved out and another put in its place": ("mv a ../../out/; mkdir -p a/deep/deeper", "a/deep/deeper/file"),
    "moved out and back": ("mv a ../../out/; mkdir ../../out/a/deep/new; mv ../../out/a .", "a/deep/new/file"),
    "moved out, changed there and back": ("mv a ../../out; rm -r ../../out/a/deep; mv ../../out/a .", "a/file"),
    "deleted and made again": ("rm -r a; mkdir -p a/deep/deeper", "a/deep/deeper/file"),
    "replaced by a file": ("rm -r a; echo x > a; rm a; mkdir a", "a/file"),
    "replaced by a link": ("mv a ../../out/; ln -s ../../out/a a; rm a; mkdir a", "a/file"),
    "renamed over an empty one": (
        "mkdir d; mv -T d c/empty; rmdir c/empty; mv -T a c/empty",
        "c/empty/deep/deeper/file",
    ),
    "two that changed places": ("mv a t; mv b a; mv t b", "b/deep/deeper/file"),
    "three moves deep": ("mv a/deep b/; mv b c/; mv c d; mv d/b/deep e", "e/deeper/file"),
    "moved out and into another one": ("mv a/deep ../../out; mv ../../out/deep b/deep2", "b/deep2/deeper/file"),
}


@pytest.mark.parametrize("how", MOVES)
def test_what_is_written_in_a_folder_that_was_moved_is_not_missed(root: Path, follower: Follower, how: str) -> None:
    moves, then = MOVES[how]
    shell(root, moves)
    told = follower.follow()
    assert told
    assert follower.known == truth(follower.root)
    shell(root, f"echo later >> {then}")
    assert os.path.dirname(os.fsencode(root / then)) in (follower.follow() or ())
    assert follower.known == truth(follower.root)
    assert follower.scans == 1, "nothing of this needs everything to be looked at"


def test_two_folders_that_are_exchanged_at_once_are_both_told(root: Path, follower: Follower) -> None:
    libc = ctypes.CDLL(None)
    if libc.renameat2(-100, os.fsencode(root / "a"), -100, os.fsencode(root / "b"), 2) != 0:
        pytest.skip("this file system does not exchange")
    follower.follow()
    assert follower.known == truth(follower.root)
    shell(root, "echo x > b/deep/deeper/file; echo y > a/file")
    follower.follow()
    assert follower.known == truth(follower.root)


@pytest.mark.parametrize("what", [".", ".."], ids=["the workspace", "what it is in"])
def test_a_workspace_that_was_replaced_is_looked_at_anew(root: Path, follower: Follower, what: str) -> None:
    moved = (root / what).resolve()
    copy = moved.parent / "copy"
    shutil.copytree(moved, copy)
    moved.rename(moved.parent / "old")
    copy.rename(moved)
    assert follower.follow() is None
    (root / "b" / "file").write_text("in the new one")
    assert follower.follow() == {os.fsencode(root / "b")}
    assert follower.known == truth(follower.root)


CHURN: Final = """
import os, sys
for number in range(int(sys.argv[1])):
    name = f"b/{number % 50}"
    os.close(os.open(name, os.O_CREAT | os.O_WRONLY, 0o600))
    os.utime(name)
"""


def test_more_changes_than_the_kernel_keeps_are_told_as_none_and_then_it_goes_on(
    root: Path, follower: Follower
) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    subprocess.run([sys.executable, "-c", CHURN, str(limit)], cwd=root, check=True)
    shell(root, "mv a c/moved; mkdir a")
    assert follower.follow() is None
    shell(root, "echo x > a/file; echo y > c/moved/deep/file")
    assert follower.follow() == {os.fsencode(root / "a"), os.fsencode(root / "c/moved/deep")}
    assert follower.known == truth(follower.root)


def test_a_forked_process_takes_nothing_from_its_parent(root: Path, follower: Follower) -> None:
    (root / "a" / "file").write_text("changed")
    child = os.fork()
    if child == 0:
        told = follower.watch.changed()
        refused = not follower.watch.add(follower.root)
        follower.watch.forget(follower.root)
        os._exit(0 if told is None and refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert follower.follow() == {os.fsencode(root / "a")}
    (root / "b" / "file").write_text("changed too")
    assert follower.follow() == {os.fsencode(root / "b")}


def test_what_is_forgotten_is_not_told_any_more(root: Path, follower: Follower) -> None:
    follower.watch.forget(os.fsencode(root / "a"))
    shell(root, "echo x > a/file; echo x > a/deep/file; echo x > b/file")
    assert follower.watch.changed() == {os.fsencode(root / "b")}


def test_what_was_below_a_folder_that_was_replaced_while_it_was_added_is_named(root: Path, follower: Follower) -> None:
    shell(root, "mkdir new; mv a/deep new/deep; mv a old; mv new a")
    assert follower.watch.add(os.fsencode(root / "a"))
    assert os.fsencode(root / "a" / "deep" / "deeper") in (follower.watch.changed() or ())


def test_a_folder_that_is_in_two_places_is_named_by_both(root: Path, follower: Follower) -> None:
    if subprocess.run(["mount", "--bind", "a", "c"], cwd=root, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        follower.scan()
        follower.follow()
        shell(root, "echo x > a/deep/file")
        assert follower.follow() == {os.fsencode(root / "a" / "deep"), os.fsencode(root / "c" / "deep")}
        assert follower.known == truth(follower.root)
    finally:
        subprocess.run(["umount", "c"], cwd=root, check=True)


def test_a_folder_that_went_just_before_it_was_added_is_named_the_next_time(root: Path, follower: Follower) -> None:
    for path in (root / "gone", root / "a" / "file"):
        assert follower.watch.add(os.fsencode(path))
        assert follower.watch.changed() == {os.fsencode(path)}
    assert follower.watch.changed() == set()


def test_a_folder_whose_attributes_changed_is_named_though_it_is_not_watched(root: Path, follower: Follower) -> None:
    follower.watch.forget(os.fsencode(root / "a"))
    (root / "a").chmod(0o711)
    assert follower.watch.changed() == {os.fsencode(root), os.fsencode(root / "a")}


def test_what_is_no_folder_of_a_local_file_system_is_not_watched(root: Path, follower: Follower) -> None:
    for path in (root / "no" / "such", root / "a" / "file" / "x", Path("/proc/self"), Path("/sys")):
        assert not follower.watch.add(os.fsencode(path)), path
    assert is_trusted(os.fsencode(root))
    assert not is_trusted(b"/proc")
    assert not is_trusted(b"/nowhere")


ADDING: Final = """
import os
from killick.workspace.inotify import Watch
watch = Watch.begin()
print([watch.add(os.path.abspath(b"%d" % number)) for number in range(6)])
"""


def test_folders_beyond_the_limit_are_said_not_to_be_watched(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / str(number)).mkdir()
    limited = f"echo 4 > /proc/sys/user/max_inotify_watches && exec {sys.executable} -c '{ADDING}'"
    words = ["unshare", "-Ur", "sh", "-c", limited]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.skip(f"no user namespace here: {ran.stderr.strip()[-100:]}")
    assert ran.stdout.strip() == str([True] * 4 + [False] * 2)


def test_a_closed_watch_tells_nothing(follower: Follower) -> None:
    follower.watch.close()
    assert follower.watch.changed() is None
    assert not follower.watch.add(follower.root)
    follower.watch.close()


STORM: Final = r"""
import ctypes, os, random, shutil, sys
chance = random.Random(int(sys.argv[1]))
root, out = sys.argv[2], sys.argv[3]
libc = ctypes.CDLL(None)

def folder():
    path = root
    while chance.random() < 0.7:
        below = [e.path for e in os.scandir(path) if e.is_dir(follow_symlinks=False)]
        if not below:
            break
        path = chance.choice(below)
    return path

def entry():
    found = [e.path for e in os.scandir(folder())]
    return chance.choice(found) if found else folder()

def name():
    return "n%d" % chance.randrange(6)

def write():
    with open(os.path.join(folder(), name()), chance.choice(["w", "a"])) as file:
        file.write("x" * chance.randrange(1, 50))

def replace():
    at = os.path.join(folder(), "tmp%d" % os.getpid())
    with open(at, "w") as file:
        file.write("y" * chance.randrange(50))
    os.rename(at, os.path.join(folder(), name()))

def remove():
    at = entry()
    if at != root:
        shutil.rmtree(at) if os.path.isdir(at) and not os.path.islink(at) else os.unlink(at)

def away():
    at = entry()
    if at != root:
        os.rename(at, os.path.join(out, name()))

def back():
    os.rename(os.path.join(out, name()), os.path.join(folder(), name()))

def rename():
    at = entry()
    if at != root:
        os.rename(at, os.path.join(folder(), name()))

def exchange():
    a, b = entry(), entry()
    if root not in (a, b):
        libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2)

def outside():
    found = [os.path.join(at, n) for at, ds, fs in os.walk(out) for n in ds] or [out]
    os.mkdir(os.path.join(chance.choice(found), name()))

acts = [write, write, write, replace, replace, remove, away, back, back, rename, rename, exchange, outside,
        lambda: os.mkdir(os.path.join(folder(), name())), lambda: os.makedirs(os.path.join(folder(), name(), name())),
        lambda: os.chmod(entry(), chance.choice([0o700, 0o755, 0o711])),
        lambda: os.utime(entry(), ns=(0, chance.randrange(10**18))),
        lambda: os.symlink(root, os.path.join(folder(), name())), lambda: os.truncate(entry(), chance.randrange(99))]
for _ in range(int(sys.argv[4])):
    try:
        chance.choice(acts)()
    except (OSError, shutil.Error):
        pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_missed_while_processes_move_everything_about(root: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    follower = Follower(root)
    for _ in range(3):
        words = [sys.executable, "-c", STORM]
        storms = [
            subprocess.Popen([*words, str(chance.random())[2:], root, tmp_path / "out", str(chance.randint(50, 800))])
            for _ in range(3)
        ]
        while any(storm.poll() is None for storm in storms):
            follower.follow()
        assert [storm.wait() for storm in storms] == [0, 0, 0]
        follower.follow()
        assert follower.known == truth(follower.root)
    follower.watch.close()
