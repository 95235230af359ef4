"""Whatever several processes do to a folder, in whatever order: snapshots hold what was there, and bring it back."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

from killick.workspace import Workspace
from killick.workspace.inotify import Watch
from killick.workspace.restore_plan import shown
from killick.workspace.tree import FILE, Id, content
from seeds import draw_seed, repeats
from workspace.changing import IGNORES
from workspace.folders import Told, differing, held, told

PROGRAM = Path(__file__).with_name("changing.py")
PROCESSES = 3


class Boundary(NamedTuple):
    root: Id
    there: Told
    """What was there and is not ignored."""


def visible(folder: Path) -> tuple[Told, set[bytes]]:
    """What is in a folder less what its rules ignore, and what they ignore: the few rules that the changers write, each
    as plain as can be."""
    everything = told(folder)
    rules: dict[bytes, set[bytes]] = {}
    ignored: set[bytes] = set()
    for path, (kind, *_) in sorted(everything.items()):
        above, _, name = path.rpartition(b"/")
        if path and (above in ignored or is_ignored(above, name, kind, rules)):
            ignored.add(path)
        elif kind == "folder":
            read = [os.path.join(os.fsencode(folder), path, each) for each in IGNORES]
            rules[path] = {
                line
                for each in read
                if os.path.isfile(each) and not os.path.islink(each)
                for line in Path(os.fsdecode(each)).read_bytes().splitlines()
            }
    return {path: each for path, each in everything.items() if path not in ignored}, ignored


def is_ignored(above: bytes, name: bytes, kind: str, rules: dict[bytes, set[bytes]]) -> bool:
    if b"/" + name in rules[above]:
        return True
    while True:
        for rule in rules[above]:
            if (rule == b"skipped/" and name == b"skipped" and kind == "folder") or (
                rule.startswith(b"*") and name.endswith(rule[1:])
            ):
                return True
        if not above:
            return False
        above = above.rpartition(b"/")[0]


class Changers:
    """Several processes that change one folder, and what they told of it."""

    def __init__(self, folder: Path, beside: Path) -> None:
        outside = beside / "outside"
        outside.mkdir()
        self.logs = [beside / f"log{number}" for number in range(PROCESSES)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), str(outside), str(log), str(beside / "lock")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for log in self.logs
        ]

    def go(self, chance: random.Random, count: int) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"go {chance.randrange(10**9)} {count}\n")
            process.stdin.flush()

    def wait(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"

    def told(self) -> Iterator[list[bytes]]:
        """What was told since this was last asked: what, and the words with it."""
        for log in self.logs:
            if log.exists():
                lines = log.read_text().splitlines()
                os.truncate(log, 0)
                for line in lines:
                    what, *words = line.split(" ")
                    yield [what.encode(), *map(unhexed, words)]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def unhexed(word: str) -> bytes:
    return b"" if word == "-" else bytes.fromhex(word)


class Possible:
    """What each file may have held at any moment of a time, by its name: the folder that it is in may have moved."""

    def __init__(self, before: Told) -> None:
        self.by_name: dict[bytes, set[bytes]] = defaultdict(set)
        self.anywhere: set[bytes] = set()
        for path, (kind, _, _, holds) in before.items():
            if kind == "file":
                self.by_name[os.path.basename(path)].add(bytes.fromhex(holds.split()[1]))

    def take(self, lines: Iterator[list[bytes]]) -> None:
        moves: set[tuple[bytes, bytes]] = set()
        for what, *words in lines:
            if what == b"had":
                self.by_name[os.path.basename(words[0])].add(words[1])
            elif what == b"any":
                self.anywhere.add(words[0])
            else:
                moves.add((os.path.basename(words[0]), os.path.basename(words[1])))
        for _ in moves:
            for old, new in moves:
                self.by_name[new] |= self.by_name[old]

    def could_hold(self, path: bytes, digest: bytes) -> bool:
        return digest in self.anywhere or digest in self.by_name[os.path.basename(path)]


@pytest.fixture(params=["watched", "scanned"])
def _watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the kernel tells, and where it tells nothing."""
    if request.param == "scanned":
        monkeypatch.setattr(Watch, "begin", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("_watched")
@pytest.mark.parametrize("_", range(repeats(1, 2)))
def test_every_boundary_brings_back_what_was_there(tmp_path: Path, _: int) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    folder = tmp_path / "work"
    folder.mkdir()
    changers = Changers(folder, tmp_path)
    workspace = Workspace(folder, vault=tmp_path / "vault")
    kept: list[Boundary] = []
    try:
        for number in range(14):
            place = f"seed {seed}, boundary {number}"
            before = told(folder)
            changers.go(chance, chance.choice([3, 15, 40]))
            during = [workspace.capture() for _ in range(chance.randrange(4))]
            changers.wait()
            possible = Possible(before)
            possible.take(changers.told())
            for taken in during:
                assert impossible(workspace, taken.root, taken.left_out, possible) == [], place
            there, _ignored = visible(folder)
            snapshot = workspace.capture() if chance.random() < 0.5 else workspace.begin().snapshot.result()
            assert differing(visible(folder)[0], there) == [], place
            assert snapshot.left_out == (), place
            assert differing(held(snapshot.root, workspace.vault.load), there) == [], place
            kept.append(Boundary(snapshot.root, there))
            if chance.random() < 0.3:
                back = chance.choice(kept)
                go_back(workspace, back, place)
            if chance.random() < 0.2:
                workspace.close()
                workspace = Workspace(folder, vault=tmp_path / "vault")
            if chance.random() < 0.2:
                workspace.vault.sweep()
        chance.shuffle(kept)
        changers.end()
        for number, each in enumerate(kept):
            elsewhere = tmp_path / f"elsewhere{number}"
            with Workspace(elsewhere, vault=tmp_path / "vault") as other:
                done = other.restore(each.root)
                assert done.left == (), seed
            assert differing(told(elsewhere), each.there) == [], seed
            go_back(workspace, each, f"seed {seed}, at the end")
    finally:
        changers.end()
        workspace.close()


def impossible(workspace: Workspace, root: Id, left_out: tuple[str, ...], possible: Possible) -> list[str]:
    """Files of a snapshot that hold what they never held, and of which it does not say that they moved."""
    moved = {line.rpartition(":")[0] for line in left_out}
    return [
        repr(path)
        for path, entry in workspace.files(root)
        if entry.kind == FILE
        and os.fsdecode(path) not in moved
        and not possible.could_hold(path, sha256(b"".join(content(entry, workspace.vault.load))).digest())
    ]


def go_back(workspace: Workspace, to: Boundary, place: str) -> None:
    """Restore in place: what was there then is there; besides it only what the rules of now or of then ignore."""
    before, ignored = visible(workspace.path)
    done = workspace.restore(to.root)
    assert not done.again, (place, done.left)
    safe = {path: each for path, each in held(done.before, workspace.vault.load).items() if path not in ignored}
    assert differing(safe, before) == [], place
    found = told(workspace.path)
    ignored |= visible(workspace.path)[1]
    ignored |= {above for path in ignored for above in upwards(path)}
    left = {line.rpartition(":")[0] for line in done.left}
    there = {path: each for path, each in to.there.items() if not left & {shown(above) for above in upwards(path)}}
    assert differing({path: each for path, each in found.items() if path in there}, there) == [], (place, done.left)
    assert found.keys() - to.there.keys() - ignored == set(), (place, done.left)


def upwards(path: bytes) -> Iterator[bytes]:
    """A path and all that is above it."""
    while path:
        yield path
        path = path.rpartition(b"/")[0]
    yield path


# One by one ---------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    folder = tmp_path / "work"
    folder.mkdir()
    with Workspace(folder, vault=tmp_path / "vault") as made:
        yield made


@pytest.mark.usefixtures("_watched")
def test_a_file_of_the_same_size_and_time_is_seen_to_hold_something_else(workspace: Workspace) -> None:
    path = workspace.path / "a"
    for data in (b"one", b"two", b"one", b"six"):
        path.write_bytes(data)
        os.utime(path, ns=(7, 7))
        assert workspace.read(workspace.capture().root, "a") == data


@pytest.mark.usefixtures("_watched")
def test_a_folder_made_anew_under_its_name_is_looked_into(workspace: Workspace) -> None:
    folder = workspace.path / "d"
    for number in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / str(number)).write_text("new")
        assert [path for path, _ in workspace.files(workspace.capture().root)] == [b"d", b"d/%d" % number]


@pytest.mark.usefixtures("_watched")
def test_what_is_written_through_another_name_outside_is_seen(workspace: Workspace, tmp_path: Path) -> None:
    inside, outside = workspace.path / "a", tmp_path / "other"
    outside.write_text("0")
    os.link(outside, inside)
    for number in range(4):
        outside.write_text(str(number))
        assert workspace.read(workspace.capture().root, "a") == str(number).encode()


@pytest.mark.slow
def test_a_file_that_is_replaced_without_a_pause_is_one_of_those_it_was_or_told(workspace: Workspace) -> None:
    path, new, stop = workspace.path / "a", workspace.path / "new", threading.Event()
    written = [bytes([number]) * 3000 for number in range(256)]
    path.write_bytes(written[0])

    def replace() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            new.write_bytes(written[number % 256])
            new.replace(path)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        snapshots = [workspace.capture() for _ in range(20)]
    finally:
        stop.set()
        thread.join()
    for snapshot in snapshots:
        if not any(line.startswith("a: ") for line in snapshot.left_out):
            assert workspace.read(snapshot.root, "a") in written
