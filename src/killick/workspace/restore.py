"""Restores a folder to a snapshot: computes a plan as a value, then applies it.

Each file is written under a temporary name and renamed into place, so that no file is ever partial and no inode with
other names is written. Every step opens one folder relative to the last, and follows no link. It removes or replaces
only what the plan saw: entries that changed since are left, and reported.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from killick.ids import RandomIds
from killick.workspace import tree
from killick.workspace.file_reader import closing
from killick.workspace.restore_plan import HOLDS_MORE, Plan, Steps, Task, plan, run_steps, same_content, shown
from killick.workspace.tree import BLOCK_BYTES, FIFO, FILE, FOLDER, LINK, Entry, Id, Load

__all__ = ["PREFIX", "Plan", "Restored", "Task", "apply", "clear", "plan"]

PREFIX: Final = b".killick-restoring-"
"""The prefix of temporary names, which no snapshot contains."""

_FEW: Final = 64
"""Up to this many changes are synced one by one; beyond it, syncing the file system is faster."""

_FATAL: Final = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE,
})  # fmt: skip
"""Errors that concern everything, not one name: the restore stops, and is finished later."""

_CHANGED: Final = "changed while the files were being restored, and was left as it is"
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_ENTER: Final = _READ | os.O_DIRECTORY
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_PATH_ONLY: Final = getattr(os, "O_PATH", 0) | os.O_CLOEXEC | os.O_NOFOLLOW
_FDS: Final = "/proc/self/fd"
"""Addresses an inode by its descriptor, to set its mode under any name."""


class Restored(msgspec.Struct, frozen=True):
    """The result: how many names were written (or changed in mode or time) and removed, and the failures, in words.
    `again`: something changed meanwhile, so that another scan may achieve more."""

    written: int
    removed: int
    left: tuple[str, ...] = ()
    again: bool = False
    before: Id = b""


def apply(plan: Plan, folder: Path, load: Load, *, resuming: bool = False, captured_us: int | None = None) -> Restored:
    """Applies a plan. Idempotent: an interrupted one can be repeated from the start; `resuming` searches all folders
    for temporary files. On return everything is synced.

    `captured_us` is when the reading of the plan's `now` began. A file that changed since, or just before, is compared
    byte by byte before it is removed or replaced, because equal sizes and times can be a coincidence.
    """
    if resuming:
        clear(folder)
    restorer = _Restorer(load, inline=plan.count <= _FEW or _syncfs is None, captured_us=captured_us)
    if plan.root is not None:
        place = os.fsencode(os.path.realpath(folder))
        with restorer.opened(None, place) as top:
            run_steps(restorer.fill(top, plan.root, b""))
            if not restorer.inline and _syncfs is not None:
                _syncfs(top)
    return Restored(restorer.written, restorer.removed, (*plan.left, *restorer.left), restorer.again)


def clear(folder: Path) -> int:
    """Removes the temporary files of interrupted restores in all folders; returns their number."""
    removed = 0
    for _, folders, names, fd in os.fwalk(os.fsencode(folder), follow_symlinks=False):
        for name in (*names, *folders):  # A link to a folder is listed among the folders.
            if name.startswith(PREFIX):
                with suppress(OSError):
                    os.unlink(name, dir_fd=fd)
                    removed += 1
    return removed


class _Changed(Exception):
    """The entry is not the one that the plan saw."""


class _Restorer:
    """Applies a plan to a folder."""

    def __init__(self, load: Load, *, inline: bool, captured_us: int | None) -> None:
        self._load = load
        self.inline = inline
        self._captured_us = captured_us
        self._temporary = PREFIX + RandomIds().new("w").encode()
        self.written = 0
        self.removed = 0
        self.left: list[str] = []
        self.again = False

    def fill(self, fd: int, task: Task, path: bytes) -> Steps[None]:
        """Applies the tasks of an open folder, removals first, then its own mode and time."""
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if task.below and not _may_write(fd):
            os.fchmod(fd, mode | stat.S_IRWXU)
        try:
            for each in task.below:
                if each.target is None:
                    yield self._try(self._remove, fd, each, path)
            for each in task.below:
                if each.target is not None:
                    yield self._try(self._put, fd, each, path)
        finally:
            last = task.target or task.now
            mode = last.mode if last is not None and last.is_folder else mode
            if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
                os.fchmod(fd, mode)
        if task.target is not None and task.target.is_folder and not task.passes:
            _set_time(fd, task.target.mtime_ns)
        if self.inline and task.target is not None:
            os.fsync(fd)

    @contextmanager
    def opened(self, parent: int | None, name: bytes) -> Generator[int]:
        """Opens a folder; never through a link."""
        try:
            fd = os.open(name, _ENTER, dir_fd=parent)
        except PermissionError:
            _set_mode(parent, name, stat.S_IRWXU, only=FOLDER)
            fd = os.open(name, _ENTER, dir_fd=parent)
        with closing(fd):
            yield fd

    def _try(self, do: Callable[[int, Task, bytes], Steps[None]], fd: int, task: Task, above: bytes) -> Steps[None]:
        """Applies one task; a failure is reported and does not stop the others."""
        path = tree.joined(above, task.name)
        try:
            yield do(fd, task, path)
        except _Changed:
            self.again = True
            self.left.append(f"{shown(path)}: {_CHANGED}")
        except OSError as error:
            if error.errno in _FATAL:
                raise
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                self.left.append(f"{shown(path)}: {HOLDS_MORE}")
                return
            self.again |= error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR)
            self.left.append(f"{shown(path)}: {(error.strerror or str(error)).lower()}")

    # removing

    def _remove(self, fd: int, task: Task, path: bytes) -> Steps[None]:
        found = _stat(fd, task.name)
        if found is None:
            return
        if task.now is None or not self._is_known(fd, task, found):
            raise _Changed
        if task.now.is_folder:
            yield self._remove_folder(fd, task, path)
        else:
            os.unlink(task.name, dir_fd=fd)
        self.removed += 1

    def _remove_folder(self, fd: int, task: Task, path: bytes) -> Steps[None]:
        if task.below:
            with self.opened(fd, task.name) as inside:
                yield self.fill(inside, msgspec.structs.replace(task, target=None), path)
        try:
            os.rmdir(task.name, dir_fd=fd)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            with self.opened(fd, task.name) as inside:
                if not _clear_one(inside):
                    raise
            os.rmdir(task.name, dir_fd=fd)

    # writing

    def _put(self, fd: int, task: Task, path: bytes) -> Steps[None]:
        assert task.target is not None
        found = _stat(fd, task.name)
        if task.target.is_folder:
            yield self._put_folder(fd, task, path, found)
        elif found is not None and stat.S_ISDIR(found.st_mode):
            if task.now is None or not task.now.is_folder:
                raise _Changed
            yield self._remove_folder(fd, task, path)
            self.removed += 1
            self._place(fd, task, None)
        elif found is None or self._is_known(fd, task, found):
            if found is not None and task.now is not None and same_content(task.now, task.target):
                self._set_metadata(fd, task, found)
            else:
                self._place(fd, task, found)
        elif not self._is_written(fd, task.name, found, task.target):
            raise _Changed

    def _put_folder(self, fd: int, task: Task, path: bytes, found: os.stat_result | None) -> Steps[None]:
        if found is None or not stat.S_ISDIR(found.st_mode):
            if task.now is not None and task.now.is_folder:
                raise _Changed  # What is the same in both would be missing.
            if found is not None:
                if not self._is_known(fd, task, found):
                    raise _Changed
                os.unlink(task.name, dir_fd=fd)
                self.removed += 1
            os.mkdir(task.name, stat.S_IRWXU, dir_fd=fd)
        with self.opened(fd, task.name) as inside:
            if found is None or not stat.S_ISDIR(found.st_mode):
                _set_owner(inside, found or os.fstat(fd))
            yield self.fill(inside, task, path)
        self.written += not task.passes

    def _place(self, fd: int, task: Task, found: os.stat_result | None) -> None:
        """Writes under a temporary name, and renames into place."""
        assert task.target is not None
        try:
            self._make(fd, task.target, found or os.fstat(fd))
            if _identity(_stat(fd, task.name)) != _identity(found):
                raise _Changed
            os.rename(self._temporary, task.name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=fd)
            raise
        self.written += 1

    def _make(self, fd: int, entry: Entry, like: os.stat_result) -> None:
        times = (entry.mtime_ns, entry.mtime_ns)
        if entry.kind == LINK:
            os.symlink(entry.ref, self._temporary, dir_fd=fd)
            if os.geteuid() == 0:
                os.chown(self._temporary, like.st_uid, like.st_gid, dir_fd=fd, follow_symlinks=False)
            os.utime(self._temporary, ns=times, dir_fd=fd, follow_symlinks=False)
            return
        if entry.kind == FIFO:
            os.mkfifo(self._temporary, stat.S_IRUSR | stat.S_IWUSR, dir_fd=fd)
            made = os.open(self._temporary, _READ | os.O_NONBLOCK, dir_fd=fd)
        else:
            made = os.open(self._temporary, _CREATE, stat.S_IRUSR | stat.S_IWUSR, dir_fd=fd)
        with closing(made):
            if entry.kind == FILE:
                self._write(made, entry)
            _set_owner(made, like)
            os.fchmod(made, entry.mode)
            os.utime(made, ns=times)
            if self.inline and entry.kind == FILE:
                os.fsync(made)

    def _write(self, made: int, entry: Entry) -> None:
        if entry.is_long:
            os.ftruncate(made, entry.size)
        for offset, data in tree.ranges(entry, self._load):
            view = memoryview(data)
            while view:
                done = os.pwrite(made, view, offset)
                view, offset = view[done:], offset + done

    def _set_metadata(self, fd: int, task: Task, found: os.stat_result) -> None:
        """Sets mode and time in place, unless the file has other names too."""
        assert task.now is not None
        assert task.target is not None
        entry = task.target
        shared = found.st_nlink > 1
        if shared or (stat.S_IMODE(found.st_mode) != entry.mode and entry.kind != LINK and not _can_set_modes()):
            self._place(fd, task, found)
            return
        if entry.kind != LINK and stat.S_IMODE(found.st_mode) != entry.mode:
            _set_mode(fd, task.name, entry.mode, only=entry.kind)
        os.utime(task.name, ns=(found.st_atime_ns, entry.mtime_ns), dir_fd=fd, follow_symlinks=False)
        if self.inline and entry.kind == FILE:
            with suppress(OSError), closing(os.open(task.name, _READ | os.O_NONBLOCK, dir_fd=fd)) as file:
                os.fsync(file)
        self.written += 1

    # what is there

    def _is_known(self, fd: int, task: Task, found: os.stat_result) -> bool:
        """Returns whether a file is as planned, or partly changed towards its target."""
        now = task.now
        if now is None or tree.kind_of(found.st_mode) != now.kind:
            return False
        if now.is_folder:
            return True
        ends = [now, task.target] if task.target is not None and same_content(now, task.target) else [now]
        if found.st_mtime_ns not in [end.mtime_ns for end in ends]:
            return False
        if now.kind == LINK:
            return os.readlink(task.name, dir_fd=fd) == now.ref
        if stat.S_IMODE(found.st_mode) not in [end.mode for end in ends]:
            return False
        if now.kind != FILE:
            return True
        return found.st_size == now.size and (not self._is_fresh(found) or self._holds(fd, task.name, now))

    def _is_fresh(self, found: os.stat_result) -> bool:
        grain_us = 50_000 if found.st_ctime_ns % 1_000_000_000 else 2_100_000
        return self._captured_us is not None and found.st_ctime_ns // 1000 >= self._captured_us - grain_us

    def _is_written(self, fd: int, name: bytes, found: os.stat_result, entry: Entry) -> bool:
        """Returns whether it already equals its target, byte by byte: an earlier attempt wrote it."""
        if tree.kind_of(found.st_mode) != entry.kind or found.st_mtime_ns != entry.mtime_ns:
            return False
        if entry.kind == LINK:
            return os.readlink(name, dir_fd=fd) == entry.ref
        if stat.S_IMODE(found.st_mode) != entry.mode:
            return False
        return entry.kind == FIFO or (found.st_size == entry.size and self._holds(fd, name, entry))

    def _holds(self, fd: int, name: bytes, entry: Entry) -> bool:
        """Returns whether a file's content equals an entry's, byte by byte."""
        with closing(os.open(name, _READ | os.O_NONBLOCK, dir_fd=fd)) as file:
            at = 0
            for offset, data in tree.ranges(entry, self._load):
                if not _is_zero(file, at, offset) or os.pread(file, len(data), offset) != data:
                    return False
                at = offset + len(data)
            return _is_zero(file, at, entry.size)


def _identity(found: os.stat_result | None) -> tuple[int, ...] | None:
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns) if found is not None else None


def _stat(fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _may_write(fd: int) -> bool:
    return os.access(b".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=os.access in os.supports_effective_ids)


def _can_set_modes() -> bool:
    return os.chmod in os.supports_follow_symlinks or os.path.isdir(_FDS)


def _set_mode(parent: int | None, name: bytes, mode: int, *, only: int) -> None:
    """Sets the mode of a name of one kind, even if it is replaced meanwhile."""
    if os.chmod in os.supports_follow_symlinks:
        os.chmod(name, mode, dir_fd=parent, follow_symlinks=False)
        return
    with closing(os.open(name, _PATH_ONLY, dir_fd=parent)) as opened:
        if tree.kind_of(os.fstat(opened).st_mode) != only:
            raise _Changed
        os.chmod(f"{_FDS}/{opened}", mode)


def _set_owner(fd: int, like: os.stat_result) -> None:
    """As root, restores the former owner, or else the folder's owner: never gives root more than before. Other users
    own what they write."""
    if os.geteuid() == 0:
        os.fchown(fd, like.st_uid, like.st_gid)


def _set_time(fd: int, mtime_ns: int) -> None:
    found = os.fstat(fd)
    if found.st_mtime_ns != mtime_ns:
        os.utime(fd, ns=(found.st_atime_ns, mtime_ns))


def _clear_one(fd: int) -> bool:
    """Removes an interrupted restore's temporary files from one folder; returns whether the folder is empty now."""
    names = [os.fsencode(name) for name in os.listdir(fd)]
    for name in names:
        if name.startswith(PREFIX):
            os.unlink(name, dir_fd=fd)
    return all(name.startswith(PREFIX) for name in names)


def _is_zero(fd: int, start: int, end: int) -> bool:
    for offset in range(start, end, BLOCK_BYTES):
        data = os.pread(fd, min(BLOCK_BYTES, end - offset), offset)
        if data.count(0) != len(data) or not data:
            return False
    return True


def _find_syncfs() -> Callable[[int], None] | None:
    try:
        found = ctypes.CDLL(None, use_errno=True).syncfs
    except (OSError, AttributeError):
        return None

    def syncfs(fd: int) -> None:
        if found(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    return syncfs


_syncfs: Final = _find_syncfs()
