"""Restoring: a folder becomes what a snapshot holds, whatever stood there, and nothing outside of it is touched."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from killick.clock import SystemClock
from killick.errors import SnapshotBroken, WorkspaceRefused
from killick.workspace import restore as restoring
from killick.workspace import tree
from killick.workspace.restore import PREFIX, Restored, apply, plan
from killick.workspace.tree import BLOCK_BYTES, FILE, Entry
from seeds import draw_seed, repeats
from workspace.folders import Objects, Told, differing, told

OLD_NS = 1_500_000_000_123_456_789


def nothing(path: bytes, is_folder: bool) -> bool:
    return False


class Place:
    """A folder, and what is kept of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = Objects()
        folder.mkdir()

    def write(self, name: str | bytes, data: bytes | str = b"", *, mode: int = 0o644, mtime_ns: int = OLD_NS) -> Path:
        path = Path(os.fsdecode(os.path.join(os.fsencode(self.folder), os.fsencode(name))))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.chmod(mode)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        return path

    def keep(self) -> tuple[Entry, Told]:
        return self.objects.keep(self.folder), told(self.folder)

    def restore(
        self,
        target: Entry,
        *,
        now: Entry | None = None,
        paths: Sequence[bytes] | None = None,
        keeps: Callable[[bytes, bool], bool] = nothing,
        into: Path | None = None,
        hidden: Sequence[bytes] = (),
        before: Entry | None = None,
        captured_us: int | None = None,
    ) -> Restored:
        folder = into or self.folder
        load = self.objects.load
        found = now if now is not None else self.objects.keep(folder)
        made = plan(found, target, load, keeps=keeps, paths=paths, hidden=hidden, before=before)
        return apply(made, folder, load, captured_us=captured_us)

    def same(self, expected: Told) -> None:
        assert differing(told(self.folder), expected) == []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "work")


@pytest.fixture
def outside(tmp_path: Path) -> Place:
    return Place(tmp_path / "outside")


# What comes back ----------------------------------------------------------------------------------


def test_content_modes_times_links_fifos_and_empty_folders_come_back(place: Place) -> None:
    place.write("a.txt", "one")
    place.write("deep/er/b.txt", "two", mode=0o755)
    place.write("secret", "three", mode=0o000)
    place.write("strong", "four", mode=0o6755)
    (place.folder / "empty").mkdir(mode=0o711)
    (place.folder / "link").symlink_to("deep/er/b.txt")
    (place.folder / "dangling").symlink_to("/nowhere/at/all")
    os.utime(place.folder / "link", ns=(OLD_NS, OLD_NS), follow_symlinks=False)
    os.mkfifo(place.folder / "pipe", 0o640)
    os.utime(place.folder / "pipe", ns=(OLD_NS, OLD_NS))
    os.utime(place.folder / "empty", ns=(OLD_NS, OLD_NS))
    target, before = place.keep()
    for path in place.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    place.write("other", "new")
    done = place.restore(target)
    place.same(before)
    assert (done.left, done.again, done.removed) == ((), False, 1)


def test_names_in_any_bytes_come_back(place: Place) -> None:
    names = [
        b"\xff\xfe\x80",
        b"caf\xe9",
        "café".encode(),
        b"new\nline",
        b" ",
        b"-rf",
        b"\x01\x7f",
        b"a" * 255,
        b"\\",
        b"*",
    ]
    for number, name in enumerate(names):
        place.write(name, str(number))
    (place.folder / os.fsdecode(b"d\xff")).mkdir()
    place.write(b"d\xff/in\xfe", "inside")
    target, before = place.keep()
    shutil.rmtree(os.fsencode(place.folder))
    place.folder.mkdir()
    assert place.restore(target).left == ()
    place.same(before)


def test_only_what_differs_is_written(place: Place) -> None:
    kept = place.write("kept", "same")
    changed = place.write("changed", "old")
    target, before = place.keep()
    inode = kept.stat().st_ino
    changed.write_text("new")
    done = place.restore(target)
    place.same(before)
    assert kept.stat().st_ino == inode
    assert (done.written, done.removed) == (1, 0)
    again = place.restore(target)
    assert (again.written, again.removed, again.left) == (0, 0, ())


@pytest.mark.parametrize("was", ["file", "folder", "link", "fifo", "nothing"])
@pytest.mark.parametrize("now", ["file", "folder", "link", "fifo", "nothing"])
def test_every_kind_becomes_every_other(place: Place, outside: Place, was: str, now: str) -> None:
    far = outside.write("far/away", "untouched")
    untouched = told(outside.folder)
    path = place.folder / "x"

    def make(kind: str, word: str) -> None:
        if kind == "file":
            place.write("x", word)
        elif kind == "folder":
            place.write("x/inside", word)
            place.write("x/below/deep", word)
        elif kind == "link":
            path.symlink_to(far.parent if word == "after" else far)
        elif kind == "fifo":
            os.mkfifo(path)

    make(was, "before")
    target, before = place.keep()
    if was == "folder":
        shutil.rmtree(path)
    elif was != "nothing":
        path.unlink()
    make(now, "after")
    assert place.restore(target).left == ()
    place.same(before)
    assert told(outside.folder) == untouched


@pytest.mark.slow
def test_holes_stay_holes_and_long_files_come_back_whole(place: Place) -> None:
    path = place.write("sparse", b"")
    with path.open("r+b") as file:
        file.truncate(64 * BLOCK_BYTES + 17)
        file.seek(20 * BLOCK_BYTES - 5)
        file.write(b"across a block")
        file.seek(64 * BLOCK_BYTES + 10)
        file.write(b"end")
    long = place.write("long", random.Random(1).randbytes(3 * BLOCK_BYTES + 1))
    place.write("exact", random.Random(2).randbytes(BLOCK_BYTES))
    place.write("all_hole", b"")
    os.truncate(place.folder / "all_hole", 5 * BLOCK_BYTES)
    target, before = place.keep()
    for name in ("sparse", "all_hole"):
        (place.folder / name).write_bytes(b"short")
    with long.open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"changed in place")
    assert place.restore(target).left == ()
    place.same(before)
    assert path.stat().st_blocks * 512 <= 8 * BLOCK_BYTES
    assert (place.folder / "all_hole").stat().st_blocks * 512 <= 64 * 1024


def test_a_snapshot_comes_back_in_an_empty_folder_elsewhere(place: Place, tmp_path: Path) -> None:
    place.write("a/b/c", "deep", mode=0o400)
    (place.folder / "a").chmod(0o700)
    place.folder.chmod(0o750)
    target, before = place.keep()
    other = tmp_path / "other"
    other.mkdir()
    place.restore(target, into=other)
    assert differing(told(other), before) == []


@pytest.mark.slow
def test_a_folder_with_thousands_of_names_comes_back(place: Place) -> None:
    for number in range(3000):
        place.write(f"many/{number}", str(number))
    target, before = place.keep()
    for number in range(0, 3000, 3):
        (place.folder / f"many/{number}").unlink()
    place.write("many/more", "new")
    done = place.restore(target)
    place.same(before)
    assert done.removed == 1


def test_folders_come_back_however_deep_they_are(place: Place, tmp_path: Path) -> None:
    names, depth = [b"a", b"b"], 600
    inside = tree.store_folder([Entry(b"x", FILE, 0o644, OLD_NS, 2, place.objects.add(b"hi"))], place.objects.add)
    for number in range(depth):
        folder = Entry(names[number % 2], tree.FOLDER, 0o755, OLD_NS, 0, inside)
        inside = tree.store_folder([folder], place.objects.add)
    target = Entry(b"", tree.FOLDER, 0o755, OLD_NS, 0, inside)
    empty = place.objects.keep(place.folder)
    done = place.restore(target, now=empty)
    assert (done.written, done.left) == (depth + 1, ())
    assert place.restore(empty, now=target).removed == depth + 1
    assert list(place.folder.iterdir()) == []


def test_a_mode_or_a_time_alone_is_set_where_the_file_stands(place: Place) -> None:
    path = place.write("a", "same", mode=0o640)
    link = place.folder / "link"
    link.symlink_to("a")
    target, before = place.keep()
    inode = path.stat().st_ino
    path.chmod(0o4711)
    os.utime(path, ns=(5, 5))
    os.utime(link, ns=(5, 5), follow_symlinks=False)
    assert place.restore(target).left == ()
    place.same(before)
    assert path.stat().st_ino == inode


# What is never touched ----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["content", "mode", "time", "gone", "removed"])
def test_an_inode_with_other_names_is_never_written_to(place: Place, outside: Place, change: str) -> None:
    cached = outside.write("cached", "as it was", mode=0o644)
    path = place.folder / "a"
    if change == "removed":
        target, before = place.keep()
    else:
        place.write("a", "as it was" if change != "content" else "was other", mode=0o600)
        target, before = place.keep()
        path.unlink()
    os.link(cached, path)
    if change == "time":
        cached.chmod(0o600)
        os.utime(cached, ns=(7, 7))
    elif change == "mode":
        os.utime(cached, ns=(OLD_NS, OLD_NS))
    elif change == "gone":
        path.unlink()
    untouched = told(outside.folder)
    assert place.restore(target).left == ()
    place.same(before)
    assert differing(told(outside.folder), untouched) == []
    assert cached.stat().st_nlink == 1


def test_a_link_that_took_a_folders_place_is_replaced_and_not_followed(place: Place, outside: Place) -> None:
    outside.write("b", "not ours")
    outside.write("c", "not ours either")
    untouched = told(outside.folder)
    place.write("a/b", "ours")
    target, before = place.keep()
    shutil.rmtree(place.folder / "a")
    (place.folder / "a").symlink_to(outside.folder)
    assert place.restore(target).left == ()
    place.same(before)
    assert told(outside.folder) == untouched


def test_a_folder_swapped_for_a_link_after_the_look_is_told_and_not_followed(place: Place, outside: Place) -> None:
    outside.write("b", "not ours")
    untouched = told(outside.folder)
    place.write("a/b", "ours")
    target = place.objects.keep(place.folder)
    place.write("a/b", "changed")
    place.write("a/new", "new")
    now = place.objects.keep(place.folder)
    (place.folder / "a").rename(place.folder / "moved")
    (place.folder / "a").symlink_to(outside.folder)
    done = place.restore(target, now=now)
    assert done.again
    assert [line.partition(":")[0] for line in done.left] == ["a"]
    assert told(outside.folder) == untouched
    assert (place.folder / "moved/new").read_text() == "new"


def test_the_workspace_itself_may_be_reached_by_a_link(place: Place, tmp_path: Path) -> None:
    place.write("a", "one")
    target, before = place.keep()
    place.write("a", "two")
    way = tmp_path / "way"
    way.symlink_to(place.folder)
    assert place.restore(target, now=place.objects.keep(place.folder), into=way).left == ()
    place.same(before)


@pytest.mark.parametrize("name", [b"..", b".", b"", b"a/b", b"a\0b"])
def test_a_snapshot_with_a_name_that_leads_out_is_refused(place: Place, name: bytes) -> None:
    ref = place.objects.add(b"bad")
    inside = tree.store_folder([Entry(name, FILE, 0o644, 0, 3, ref)], place.objects.add)
    target = Entry(b"", tree.FOLDER, 0o755, 0, 0, inside)
    with pytest.raises(SnapshotBroken, match="not a valid file name"):
        place.restore(target)


def test_what_came_or_changed_after_the_look_is_left_and_told(place: Place) -> None:
    place.write("changed", "one")
    place.write("gone", "one")
    target = place.objects.keep(place.folder)
    place.write("changed", "two!")
    place.write("extra", "seen")
    (place.folder / "gone").unlink()
    now = place.objects.keep(place.folder)
    place.write("changed", "three, by hand", mtime_ns=OLD_NS + 1)
    place.write("extra", "other, by hand", mtime_ns=OLD_NS + 1)
    place.write("gone", "back, by hand", mtime_ns=OLD_NS + 1)
    place.write("unseen", "by hand")
    done = place.restore(target, now=now)
    assert done.again
    assert sorted(line.partition(":")[0] for line in done.left) == ["changed", "extra", "gone"]
    contents = {path.name: path.read_text() for path in place.folder.iterdir()}
    assert contents == {
        "changed": "three, by hand",
        "extra": "other, by hand",
        "gone": "back, by hand",
        "unseen": "by hand",
    }


def test_a_file_of_the_same_size_and_time_is_compared_when_it_was_touched_after_the_look(place: Place) -> None:
    place.write("a", "one")
    target = place.objects.keep(place.folder)
    place.write("a", "two")
    captured_us = SystemClock().now_us()
    now = place.objects.keep(place.folder)
    place.write("a", "six")
    done = place.restore(target, now=now, captured_us=captured_us)
    assert done.again
    assert (place.folder / "a").read_text() == "six"
    assert place.restore(target, captured_us=SystemClock().now_us()).left == ()
    assert (place.folder / "a").read_text() == "one"


def test_what_is_not_ours_to_remove_stays_with_the_folder_that_holds_it(place: Place) -> None:
    place.write("a", "one")
    target, _ = place.keep()
    place.write("build/out.o", "made")
    place.write("build/main.c", "source")
    place.write("cache/x", "kept whole")
    done = place.restore(target, keeps=lambda path, is_folder: path in (b"build/out.o", b"cache"))
    assert sorted(told(place.folder)) == [b"", b"a", b"build", b"build/out.o", b"cache", b"cache/x"]
    assert [line.partition(":")[0] for line in done.left] == ["build"]


def test_a_folder_with_files_that_nobody_saw_stays_and_is_told(place: Place) -> None:
    place.write("a", "one")
    target, _ = place.keep()
    (place.folder / "a").unlink()
    place.write("a/main.c", "source")
    place.write("d/e/f", "source")
    now = place.objects.keep(place.folder)
    place.write("a/ignored.o", "nobody saw it")
    place.write("d/e/ignored.o", "nobody saw it")
    done = place.restore(target, now=now)
    assert sorted(told(place.folder)) == [b"", b"a", b"a/ignored.o", b"d", b"d/e", b"d/e/ignored.o"]
    assert sorted(line.partition(":")[0] for line in done.left) == ["a", "d", "d/e"]


def test_what_is_hidden_is_neither_written_nor_removed(place: Place) -> None:
    place.write("vault/index.db", "of then")
    place.write("a", "one")
    target, _ = place.keep()
    place.write("vault/index.db", "of now")
    place.write("vault/more", "of now")
    place.write("a", "two")
    assert place.restore(target, hidden=[b"vault"]).left == ()
    assert (place.folder / "vault/index.db").read_text() == "of now"
    assert (place.folder / "vault/more").read_text() == "of now"
    assert (place.folder / "a").read_text() == "one"


def test_sockets_are_left_alone_and_told(place: Place) -> None:
    place.write("a", "one")
    empty, _ = place.keep()
    os.mknod(place.folder / "sock", stat.S_IFSOCK | 0o600)
    target, before = place.keep()
    assert place.restore(empty).left == ()
    assert (place.folder / "sock").is_socket()
    (place.folder / "sock").unlink()
    done = place.restore(target)
    assert done.left == ("sock: was a socket, which is not brought back",)


# By path ------------------------------------------------------------------------------------------


def test_only_the_paths_that_are_asked_for_are_restored(place: Place) -> None:
    for name in ("a/one", "a/two", "b/three", "c", "gone/in/here"):
        place.write(name, "old")
    target, before = place.keep()
    for name in ("a/one", "a/two", "b/three", "c", "b/new", "a/new"):
        place.write(name, "new!")
    shutil.rmtree(place.folder / "gone")
    now = told(place.folder)
    done = place.restore(target, paths=[b"a/one", b"b", b"./gone/in/", b"never", b"a/never/was"])
    assert done.left == ()
    found = told(place.folder)
    for path in (b"a/one", b"b", b"b/three", b"gone", b"gone/in", b"gone/in/here"):
        assert found[path] == before[path]
    for path in (b"a/two", b"a/new", b"c"):
        assert found[path] == now[path]
    assert b"b/new" not in found


def test_a_path_that_was_not_there_is_removed_and_its_siblings_stay(place: Place) -> None:
    place.write("a/one", "old")
    target, _ = place.keep()
    place.write("a/made/deep", "new")
    place.write("a/other", "new")
    done = place.restore(target, paths=[b"a/made"])
    assert (done.removed, done.left) == (2, ())
    assert sorted(told(place.folder)) == [b"", b"a", b"a/one", b"a/other"]


def test_a_file_in_the_way_of_a_path_is_told_and_stays(place: Place) -> None:
    place.write("a/b", "old")
    target, _ = place.keep()
    shutil.rmtree(place.folder / "a")
    place.write("a", "in the way")
    done = place.restore(target, paths=[b"a/b"])
    assert len(done.left) == 1
    assert (place.folder / "a").read_text() == "in the way"


@pytest.mark.parametrize("path", [b"../x", b"/etc/passwd", b"a/../../x"])
def test_a_path_that_leads_out_is_refused(place: Place, path: bytes) -> None:
    target, _ = place.keep()
    with pytest.raises(WorkspaceRefused, match="inside the workspace"):
        place.restore(target, paths=[path])


def test_the_top_as_a_path_is_everything(place: Place) -> None:
    place.write("a", "old")
    target, before = place.keep()
    place.write("a", "new!")
    place.write("b", "new!")
    place.restore(target, paths=[b"", b"a"])
    place.same(before)


# By somebody who is not root ----------------------------------------------------------------------


@pytest.fixture
def open_place() -> Iterator[Place]:
    """A place that everybody can reach."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield Place(Path(name) / "work")


def as_somebody(do: Callable[[], object], folder: Path) -> None:
    """Do something as a user for whom modes count, in a process of its own."""
    if os.geteuid() == 0:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, 65534, 65534, follow_symlinks=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            do()
            code = 0
        except BaseException as error:
            sys.stderr.write(repr(error))
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0


def test_folders_that_may_not_be_written_or_read_are_restored_and_get_their_modes_back(open_place: Place) -> None:
    place = open_place
    place.write("fixed/in/a", "old", mode=0o400)
    place.write("fixed/b", "old", mode=0o000)
    place.write("shut/c", "old")
    for name, mode in (("fixed/in", 0o555), ("fixed", 0o500), ("shut", 0o000)):
        os.utime(place.folder / name, ns=(OLD_NS, OLD_NS))
        (place.folder / name).chmod(mode)
    os.utime(place.folder, ns=(OLD_NS, OLD_NS))
    place.folder.chmod(0o555)
    if os.geteuid() != 0:
        pytest.skip("only root can look at all of it")
    target, before = place.keep()
    for name in ("fixed", "shut", "fixed/in"):
        (place.folder / name).chmod(0o700)
    (place.folder / "fixed/in/a").unlink()
    place.write("fixed/in/new", "new")
    place.write("fixed/b", "new!", mode=0o000)
    place.write("shut/d", "new!")
    place.write("more/e", "new!")
    for name, mode in (("fixed/in", 0o555), ("fixed", 0o555), ("shut", 0o000), ("more", 0o555)):
        (place.folder / name).chmod(mode)
    now = place.objects.keep(place.folder)
    objects = place.objects

    def restore() -> None:
        done = apply(plan(now, target, objects.load, keeps=nothing), place.folder, objects.load)
        assert done.left == (), done.left

    as_somebody(restore, place.folder)
    place.same(before)


def test_a_folder_passed_through_on_the_way_to_a_path_keeps_its_mode(open_place: Place) -> None:
    place = open_place
    place.write("fixed/a", "old")
    place.write("fixed/b", "old")
    target, before = place.keep()
    place.write("fixed/a", "new!")
    place.write("fixed/b", "new!")
    (place.folder / "fixed").chmod(0o555)
    now = place.objects.keep(place.folder)
    objects = place.objects

    def restore() -> None:
        done = apply(plan(now, target, objects.load, keeps=nothing, paths=[b"fixed/a"]), place.folder, objects.load)
        assert done.left == (), done.left

    as_somebody(restore, place.folder)
    found = told(place.folder)
    assert found[b"fixed/a"] == before[b"fixed/a"]
    assert found[b"fixed"][1] == 0o555
    assert (place.folder / "fixed/b").read_text() == "new!"


def test_a_mode_that_an_interrupted_restore_opened_on_its_way_is_set_back(place: Place) -> None:
    place.write("fixed/a", "old")
    target = place.objects.keep(place.folder)
    place.write("fixed/a", "new!")
    (place.folder / "fixed").chmod(0o555)
    before = place.objects.keep(place.folder)
    (place.folder / "fixed").chmod(0o755)
    assert place.restore(target, paths=[b"fixed/a"], before=before).left == ()
    assert stat.S_IMODE((place.folder / "fixed").stat().st_mode) == 0o555


def test_what_root_puts_back_belongs_to_whom_it_belonged(place: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    place.write("d/a", "old", mode=0o4755)
    place.write("e/b", "old")
    (place.folder / "e/l").symlink_to("b")
    target, before = place.keep()
    place.write("d/a", "new!")
    shutil.rmtree(place.folder / "e")
    os.chown(place.folder / "d/a", 1234, 1235)
    os.chown(place.folder, 2345, 2346)
    assert place.restore(target).left == ()
    place.same(before)
    owners = {name: os.lstat(place.folder / name).st_uid for name in ("d/a", "e", "e/b", "e/l")}
    assert owners == {"d/a": 1234, "e": 2345, "e/b": 2345, "e/l": 2345}


# Again and again ----------------------------------------------------------------------------------


def scramble(place: Place, chance: random.Random) -> None:
    """Some change or other, of every sort."""
    for _ in range(chance.randrange(1, 12)):
        names = [path for path in told(place.folder) if path]
        path = os.fsencode(place.folder) + b"/" + (chance.choice(names) if names else b"first")
        what = chance.randrange(8)
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if what == 0 and os.path.lexists(path):
            shutil.rmtree(path) if is_folder else os.unlink(path)
        elif what == 1 and not os.path.lexists(path + b"+"):
            os.symlink(chance.choice([b"a", b"/etc", b"..", path]), path + b"+")
        elif what == 2 and is_folder:
            os.mkdir(path + b"/d%d" % chance.randrange(10**9))
        elif what == 3 and os.path.lexists(path) and not os.path.islink(path):
            os.chmod(path, chance.choice([0o755, 0o700, 0o644, 0o555, 0o4711]) | (0o700 if is_folder else 0))
        elif what == 4 and os.path.lexists(path):
            os.utime(path, ns=(1, chance.randrange(2**60)), follow_symlinks=False)
        elif what == 5 and os.path.isfile(path) and not os.path.islink(path):
            with open(path, "r+b") as file:
                file.write(chance.randbytes(3))
        elif what == 6 and os.path.lexists(path) and len(path) < 200 and not os.path.lexists(path + b"~"):
            os.rename(path, path + b"~")
        else:
            into = path if is_folder else os.path.dirname(path)
            with open(into + b"/f%d" % chance.randrange(10**9), "wb") as file:
                file.write(chance.randbytes(chance.choice([0, 1, 1000, BLOCK_BYTES + 5])))


@pytest.mark.slow
def test_any_tree_becomes_any_other_and_a_plan_may_be_done_twice(place: Place) -> None:
    seed = draw_seed()
    chance = random.Random(seed)
    kept = [place.keep()]
    for _ in range(repeats(15, 40)):
        scramble(place, chance)
        kept.append(place.keep())
    for number in range(repeats(25, 60)):
        target, expected = chance.choice(kept)
        now = place.objects.keep(place.folder)
        made = plan(now, target, place.objects.load, keeps=nothing)
        done = apply(made, place.folder, place.objects.load)
        assert (done.left, done.again) == ((), False), (seed, number)
        assert differing(told(place.folder), expected) == [], (seed, number)
        twice = apply(made, place.folder, place.objects.load)
        assert twice.left == (), (seed, number)
        assert differing(told(place.folder), expected) == [], (seed, number)


@pytest.mark.slow
def test_a_plan_that_was_cut_off_anywhere_is_finished_by_doing_it_again(place: Place) -> None:
    """Dies before the nth change of a file, for every n, and is done again, by the same plan or a fresh one."""
    seed = draw_seed()
    chance = random.Random(seed)
    for _ in range(4):
        scramble(place, chance)
    place.write("f/g", "file")
    target, expected = place.keep()
    for _ in range(4):
        scramble(place, chance)
    shutil.rmtree(place.folder / "f", ignore_errors=True)
    place.write("f", "was a folder") if not os.path.lexists(place.folder / "f") else None
    start = place.objects.keep(place.folder)
    objects = place.objects
    number, died = 0, 0
    while True:
        now = objects.keep(place.folder)
        made = plan(now, target, objects.load, keeps=nothing)
        if not dies_at(number, lambda: apply(made, place.folder, objects.load)):
            break
        died += 1
        if number % 2:
            again = plan(unfinished(place), target, objects.load, keeps=nothing)
            apply(again, place.folder, objects.load, resuming=True)
        else:
            done = apply(made, place.folder, objects.load, resuming=True)
            assert done.left == (), (seed, number, done.left)
        assert differing(told(place.folder), expected) == [], (seed, number)
        back = plan(objects.keep(place.folder), start, objects.load, keeps=nothing)
        assert apply(back, place.folder, objects.load).left == ()
        number += 1
    assert died > 10, seed
    assert differing(told(place.folder), expected) == [], seed


def unfinished(place: Place) -> Entry:
    """The folder as a scan sees it, which looks past what is being written."""
    restoring.clear(place.folder)
    return place.objects.keep(place.folder)


CHANGES = {"os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.utime", "open"}


def dies_at(number: int, do: Callable[[], object]) -> bool:
    """Do something in a process that is killed at its nth change; says whether there were so many."""
    child = os.fork()
    if child == 0:
        left = [number]

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if event in CHANGES:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        do()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_what_a_dead_restore_was_writing_is_removed(place: Place) -> None:
    place.write("a/b/c", "one")
    target, before = place.keep()
    place.write("n/deep/x", "new")
    now = place.objects.keep(place.folder)
    for where in ("", "a/b", "n/deep"):
        (place.folder / where / os.fsdecode(PREFIX + b"w_dead")).write_text("half")
    made = plan(now, target, place.objects.load, keeps=nothing)
    done = apply(made, place.folder, place.objects.load, resuming=True)
    assert done.left == ()
    os.utime(place.folder / "a/b", ns=(1, before[b"a/b"][2]))
    place.same(before)


def test_a_folder_that_holds_nothing_but_a_dead_restores_file_is_removed(place: Place) -> None:
    target, before = place.keep()
    (place.folder / "n").mkdir()
    now = place.objects.keep(place.folder)
    (place.folder / "n" / os.fsdecode(PREFIX + b"w_dead")).write_text("half")
    assert place.restore(target, now=now).left == ()
    place.same(before)


def test_a_full_device_ends_the_restore_and_leaves_no_half_file(place: Place) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small device")
    place.write("big", random.Random(3).randbytes(3 * BLOCK_BYTES))
    place.write("small", "old")
    target, before = place.keep()
    small = place.folder.parent / "device"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting is not permitted")
    try:
        now = place.objects.keep(small)
        made = plan(now, target, place.objects.load, keeps=nothing)
        with pytest.raises(OSError, match="No space left"):
            apply(made, small, place.objects.load)
        assert [path for path in told(small) if path] == []
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        assert apply(made, small, place.objects.load).left == ()
        assert differing(told(small), before) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
