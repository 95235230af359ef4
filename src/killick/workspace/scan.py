"""Finds and stores the changes of a folder since its last scan. Trusts stat data and the kernel only.

A file is recognized by its stat data. A file that changed just before it was read is read again the next time, because
a later change could leave the same data. Where the kernel reports changed folders, only those are scanned, and those
that it cannot watch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from killick.clock import Clock
from killick.logger import get_logger
from killick.permissions import Inode, inode_of, open_databases
from killick.workspace import scan_cache, tree
from killick.workspace.batch_reader import BatchReader, FileRequest, Found
from killick.workspace.file_reader import CapturedFile, UnstableFile, closing, encoded, key_of, opened
from killick.workspace.ignore import IGNORE_FILES, Rules
from killick.workspace.inotify import Watch, is_trusted
from killick.workspace.restore import PREFIX
from killick.workspace.scan_cache import Folder, every, refs_of
from killick.workspace.tree import Entry, Id
from killick.workspace.vault.vault import SnapshotWriter, Vault

logger: Final = get_logger("killick")

ROUNDS_MAX: Final = 6
"""How often entries that change during a scan are scanned again."""

_DEPTH_MAX: Final = 100
_LEFT_OUT_MAX: Final = 100
_UNWATCHED_MAX: Final = 200
"""Up to this many unwatchable folders are scanned every time; with more, watching is given up."""
_OWN: Final = os.fsdecode(PREFIX)


@dataclass(slots=True, eq=False)
class _Listing:
    """A folder's entries: known files, files to read, folders, and the new ones among them."""

    files: dict[str, CapturedFile] = field(default_factory=dict[str, CapturedFile])
    folders: dict[str, Folder] = field(default_factory=dict[str, Folder])
    ignored: set[str] = field(default_factory=set[str])
    to_read: dict[str, bool] = field(default_factory=dict[str, bool])
    new: list[str] = field(default_factory=list[str])
    is_linked: bool = False


class Scanner:
    """Scans one folder repeatedly. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        vault: Vault,
        *,
        exclude: tuple[str, ...] = (),
        gitignore: bool = True,
        hidden: Iterable[Path] = (),
        stores: Iterable[Path] = (),
        clock: Clock,
    ) -> None:
        self.path = path
        self.vault = vault
        self.changed = 0
        """The number of changed paths since the last reset."""
        self.left_out: list[str] = []
        self.full_scan_us = 0
        """When the last full scan was made; 0: never."""
        self.full_scan_took_us = 0
        """How long it took."""
        self._clock = clock
        self._root = os.fsencode(path)
        self._rules = Rules(exclude, gitignore=gitignore)
        self._rules_digest = sha256(msgspec.msgpack.encode((exclude, gitignore))).hexdigest()
        self._hidden = _below(path, [*hidden, *stores])
        self._stores = frozenset(each.name for each in stores)
        """A store's companion files share its name as a prefix."""
        self._databases: frozenset[Inode] = frozenset()
        self._top: Folder | None = None
        self._generation = -1
        self._watch: Watch | None = None
        self._may_watch = is_trusted(self._root)
        self._saved: Id | None = None
        self._deep: list[str] = []
        self._reader = BatchReader(self._open, clock)
        self._force: Collection[str] = ()
        self._was_forced = False
        self._unwatched: set[str] = set()
        self._always_scanned: set[str] = set()
        """Folders that are scanned every time: a file in them was read too soon after a change, or has hard links,
        through which it may change unnoticed."""

    # scanning ---------------------------------------------------------------------------------

    def scan(
        self,
        writing: SnapshotWriter,
        *,
        thorough: bool = False,
        force: Collection[str] = (),
        quiet: Callable[[], None] = lambda: None,
    ) -> Entry:
        """Scans and stores the folder, and returns its root entry. `thorough`: scan everything, not only the kernel's
        reports. `force`: paths to include despite ignore rules. `quiet`: called once the files may change again. After
        an error, call `invalidate`."""
        self.changed, self.left_out, self._databases = 0, [], frozenset(open_databases())
        self._force = frozenset(part for path in force for part in _upwards(path))
        self._check_generation(writing)
        reported = self._reported() if self._top is not None and not self._force and not self._was_forced else None
        known = None if reported is None else {path for path in reported if self._find(path) is not None}
        self._always_scanned &= known or set()
        if self._top is None:
            self._top = Folder()
        if self._watch is None and self._may_watch:
            self._watch, reported, known = Watch.begin(), None, None
            self._may_watch = self._watch is not None
        if known is None or thorough:
            self._scan_all(writing, reported)
        else:
            self._scan_some(known, writing)
        self._rescan_changed(writing)
        self._was_forced = bool(self._force)
        quiet()
        self._store(self._top, writing)
        return self._top.entry(b"")

    def invalidate(self) -> None:
        """A scan failed, or its snapshot was not published. The next one scans everything, because the kernel's reports
        are consumed, and assumes nothing to be stored."""
        self._reader.clear()
        self._was_forced = True
        self._generation = -1

    @property
    def totals(self) -> tuple[int, int]:
        """Returns the number of files, and their total bytes."""
        return self._top.totals if self._top is not None else (0, 0)

    def _check_generation(self, writing: SnapshotWriter) -> None:
        """A sweep may have deleted stored objects that no snapshot references."""
        generation = writing.sweeps
        if generation == self._generation:
            return
        if self._top is not None:
            refs = dict.fromkeys(ref for folder in every(self._top) for ref in refs_of(folder))
            missing = refs.keys() - self.vault.has(refs.keys())
            self._was_forced = self._was_forced or bool(missing)
            for folder in every(self._top):
                folder.files = {name: each for name, each in folder.files.items() if each.entry.ref not in missing}
                folder.ref = None
        self._generation = generation

    def _reported(self) -> set[str] | None:
        """Returns the folders that may have changed; None if only a full scan can tell."""
        changed = None if self._watch is None else self._kernel_changes(self._watch)
        if changed is None:
            return None
        return changed | self._always_scanned | self._unwatched

    def _kernel_changes(self, watch: Watch) -> set[str] | None:
        """Returns the folders in which the kernel saw changes; None if it does not know."""
        below, changed = len(self._root) + 1, watch.changed()
        if changed is None:
            return None
        return {os.fsdecode(path[below:]) for path in changed if path[: below - 1] == self._root}

    def _scan_all(self, writing: SnapshotWriter, reported: set[str] | None) -> None:
        """Scans every folder. If the kernel should have reported and did not, stops watching."""
        assert self._top is not None
        first, missed = self.full_scan_us == 0, set[str]()
        self.full_scan_us = self._clock.now_us()
        with closing(self._open("")) as fd:
            self._scan(fd, "", self._top, writing, deep=True, changed=missed)
        while self._deep:
            self._scan_at(self._deep.pop(), writing, deep=True, changed=missed)
        self._read_files(writing)
        self.full_scan_took_us = self._clock.now_us() - self.full_scan_us
        again = self._reported() if reported is not None and not first else None
        if reported is None or again is None:
            return
        missed -= reported | again
        if missed:
            logger.warning("%s: the kernel did not report changes in %s; it is scanned from now on",
                           self.path, ", ".join(sorted(missed)[:3]) or ".")  # fmt: skip
            self._drop_watch()
        self._scan_some(again, writing)  # changed during the scan

    def _scan_some(self, paths: Iterable[str], writing: SnapshotWriter) -> None:
        """Scans some folders, and the new ones in them."""
        for path in sorted(paths):
            self._scan_at(path, writing, deep=False, changed=set())
        while self._deep:
            self._scan_at(self._deep.pop(), writing, deep=True, changed=set())
        self._read_files(writing)

    def _rescan_changed(self, writing: SnapshotWriter) -> None:
        """Scans entries again that changed during the scan, for as long as they seem to settle."""
        for _ in range(ROUNDS_MAX):
            if self._watch is None:
                return
            changed = self._kernel_changes(self._watch)
            if changed is None:
                self._scan_all(writing, None)
            elif changed:
                self._scan_some(changed, writing)
            else:
                return

    # folders ----------------------------------------------------------------------------------

    def _find(self, path: str) -> Folder | None:
        found = self._top
        for name in filter(None, path.split("/")):
            found = None if found is None else found.folders.get(name)
        return found

    def _open(self, path: str) -> int:
        """Opens a folder by its path, never through a link."""
        fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        for name in filter(None, path.split("/")):
            with closing(fd):
                fd = opened(name, fd)
        return fd

    def _scan_at(self, path: str, writing: SnapshotWriter, *, deep: bool, changed: set[str]) -> None:
        folder = self._find(path)
        if folder is None:
            return  # removed with its parent
        try:
            fd = self._open(path)
        except FileNotFoundError:
            return  # replaced or removed: its parent is reported too
        except PermissionError:
            self._always_scanned.add(path)
            self._leave_out(path, "cannot be opened")
            return
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                return
            raise
        with closing(fd):
            self._scan(fd, path, folder, writing, deep=deep, changed=changed)

    def _scan(
        self, fd: int, path: str, folder: Folder, writing: SnapshotWriter, *, deep: bool, changed: set[str]
    ) -> None:  # fmt: skip
        """Lists a folder and its new or changed entries. With `deep`, also its known subfolders."""
        place = self._root + b"/" + os.fsencode(path) if path else self._root
        if self._watch is not None:
            (self._unwatched.discard if self._watch.add(place) else self._unwatched.add)(path)
            if len(self._unwatched) > _UNWATCHED_MAX:
                self._drop_watch()
        deep = deep or path in self._unwatched
        own, listed = self._listed(fd)
        rules_changed = self._reread_rules(fd, path, folder, listed)
        if rules_changed:
            deep, changed = True, set()  # changes of ignored entries were not reported
        if (own.st_mode, own.st_mtime_ns) != (folder.mode, folder.mtime_ns):
            folder.mode, folder.mtime_ns = own.st_mode, own.st_mtime_ns
            self._touched(path, folder, changed)
        found = self._compared(path, folder, listed, rules_changed=rules_changed)
        removed = folder.files.keys() - found.files.keys() - found.to_read.keys()
        removed_folders = folder.folders.keys() - found.folders.keys()
        count = len(removed) + len(removed_folders) + len(found.new)
        if count:
            self.changed += count
            self._touched(path, folder, changed)
        if self._watch is not None:
            for name in removed_folders:
                self._watch.forget(os.fsencode(os.path.join(self.path, path, name)))
        folder.files, folder.folders, folder.ignored = found.files, found.folders, found.ignored
        (self._always_scanned.add if found.is_linked else self._always_scanned.discard)(path)
        if found.to_read:
            sizes = {name: listed[name].st_size for name in found.to_read}
            self._reader.add(FileRequest(path, folder, found.to_read, changed), sizes, writing)
        for name in found.folders if deep else found.new:
            below = f"{path}/{name}" if path else name
            self._scan_below(fd, below, found.folders[name], writing, set() if name in found.new else changed)

    def _compared(
        self, path: str, folder: Folder, listed: Mapping[str, os.stat_result], *, rules_changed: bool
    ) -> _Listing:  # fmt: skip
        found = _Listing()
        files, folders, to_read = found.files, found.folders, found.to_read
        hidden = self._hidden.get(path, ())
        own = (_OWN, *(f"{each}-" for each in hidden if each in self._stores))
        for name, status in listed.items():
            known = folder.files.get(name)
            is_known = known is not None and known.key == key_of(status)
            if not is_known or rules_changed:
                is_folder = stat.S_ISDIR(status.st_mode)
                is_own = name in hidden or name.startswith(own) or inode_of(status) in self._databases
                if is_own or self._ignores(folder, path, name, is_folder=is_folder):
                    found.ignored.add(name)
                    continue
                if is_folder:
                    below = folder.folders.get(name)
                    if below is None or below.inode != status.st_ino:
                        below = Folder(status.st_ino)
                        found.new.append(name)
                    folders[name] = below
                    if (status.st_mode, status.st_mtime_ns) != (below.mode, below.mtime_ns):
                        below.mode, below.mtime_ns = status.st_mode, status.st_mtime_ns
                        self._touched(path, folder, set())
                    continue
            if known is not None:
                files[name] = known
            if not is_known or (known is not None and known.racy):
                to_read[name] = stat.S_ISREG(status.st_mode)
            found.is_linked |= status.st_nlink > 1
        return found

    def _scan_below(self, fd: int, path: str, folder: Folder, writing: SnapshotWriter, changed: set[str]) -> None:
        if path.count("/") % _DEPTH_MAX == _DEPTH_MAX - 1:
            self._deep.append(path)  # limits the open descriptors
            return
        try:
            below = opened(path.rpartition("/")[2], fd)
        except PermissionError:
            self._leave_out(path, "cannot be opened")
            return
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return  # removed meanwhile
            raise
        with closing(below):
            self._scan(below, path, folder, writing, deep=True, changed=changed)

    def _listed(self, fd: int) -> tuple[os.stat_result, dict[str, os.stat_result]]:
        """Lists a folder and stats the folder itself, as consistently as possible."""
        listed: dict[str, os.stat_result] = {}
        own = os.fstat(fd)
        for _ in range(ROUNDS_MAX):
            listed.clear()
            with os.scandir(fd) as entries:
                for each in entries:
                    with contextlib.suppress(FileNotFoundError):
                        listed[each.name] = each.stat(follow_symlinks=False)
            later = os.fstat(fd)
            if (own.st_mtime_ns, own.st_ctime_ns) == (later.st_mtime_ns, later.st_ctime_ns):
                break
            own = later
        return own, listed

    def _reread_rules(self, fd: int, path: str, folder: Folder, listed: Mapping[str, os.stat_result]) -> bool:
        """Returns whether the ignore rules from here on may have changed."""
        read = {name: _small(fd, name) if os.fsdecode(name) in listed else None for name in IGNORE_FILES}
        rules = tuple(read.values())
        if folder.scope is not None and rules == folder.rules and not self._force and not self._was_forced:
            return False
        above = self._find(path.rpartition("/")[0]) if path else None
        folder.scope = self._rules.scope(above.scope if above is not None else None, os.fsencode(path), read.get)
        is_same = folder.is_same and rules == folder.rules and (above is None or above.is_same)
        folder.rules, folder.is_same = rules, is_same and not self._force
        for below in folder.folders.values():
            below.scope = None
        folder.ignored.clear()
        return not folder.is_same

    def _ignores(self, folder: Folder, path: str, name: str, *, is_folder: bool) -> bool:
        if name in folder.ignored:
            return True
        if self._force and (f"{path}/{name}" if path else name) in self._force:
            return False
        assert folder.scope is not None
        return folder.scope.ignores(encoded(name), is_folder=is_folder)

    def _touched(self, path: str, folder: Folder, changed: set[str]) -> None:
        """Marks a folder and its parents as changed."""
        if folder.ref is None and path in changed:
            return
        changed.add(path)
        found = self._top
        assert found is not None
        found.ref = folder.ref = None
        for name in filter(None, path.split("/")):
            found = found.folders.get(name)
            if found is None:
                return
            found.ref = None

    # files ------------------------------------------------------------------------------------

    def _read_files(self, writing: SnapshotWriter) -> None:
        for to_read, found in self._reader.read_all(writing):
            self._record(to_read.path, to_read.folder, found, to_read.changed)

    def _record(self, path: str, folder: Folder, found: Found, changed: set[str]) -> None:
        for name, each in found.items():
            known = folder.files.get(name)
            if isinstance(each, UnstableFile):
                self._leave_out(f"{path}/{name}" if path else name, each.reason)
                each = each.last
            if each is None:
                folder.files.pop(name, None)
                if known is None:
                    continue
            else:
                folder.files[name] = each
                if each.racy:
                    self._always_scanned.add(path)
                if known is not None and known.entry == each.entry:
                    continue
            self.changed += 1
            self._touched(path, folder, changed)

    def _leave_out(self, path: str, reason: str) -> None:
        if len(self.left_out) < _LEFT_OUT_MAX:
            self.left_out.append(f"{path}: {reason}")

    # storing ----------------------------------------------------------------------------------

    def _store(self, top: Folder, writing: SnapshotWriter) -> None:
        waiting: list[tuple[Folder, bool]] = [(top, False)]
        while waiting:
            folder, is_ready = waiting.pop()
            if folder.ref is not None:
                continue
            if not is_ready:
                waiting.append((folder, True))
                waiting += [(below, False) for below in folder.folders.values()]
                continue
            entries = [each.entry for each in folder.files.values()]
            entries += [below.entry(os.fsencode(name)) for name, below in folder.folders.items()]
            folder.ref = tree.store_folder(entries, writing.add)
            count = sum(each.kind == tree.FILE for each in entries)
            size = sum(each.size for each in entries)
            below_it = [below.totals for below in folder.folders.values()]
            folder.totals = count + sum(each[0] for each in below_it), size + sum(each[1] for each in below_it)

    # caching ----------------------------------------------------------------------------------

    def save(self, place: Path) -> None:
        """Saves the scan cache to disk, if changed."""
        top = self._top
        if top is not None and top.ref is not None and self._saved != top.ref:
            scan_cache.save(place, top, sweeps=self._generation, rules=self._rules_digest, cipher=self.vault.cipher)
            self._saved = top.ref

    def load_cache(self, place: Path) -> None:
        """Loads another process's scan cache; if it is wrong, everything is scanned again."""
        found = scan_cache.saved(place, rules=self._rules_digest, cipher=self.vault.cipher)
        if found is not None:
            self._top, self._generation = found

    def _drop_watch(self) -> None:
        self.close()
        self._may_watch = False

    def close(self) -> None:
        """Closes the kernel watch."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def _below(path: Path, hidden: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """Returns never scanned names, by folder."""
    found: dict[str, tuple[str, ...]] = {}
    for each in hidden:
        with contextlib.suppress(ValueError):
            place = each.relative_to(path)
            above = "" if str(place.parent) == "." else str(place.parent)
            found[above] = (*found.get(above, ()), place.name)
    return found


def _upwards(path: str) -> Iterable[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]


def _small(fd: int, name: bytes) -> bytes | None:
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        return stream.read(tree.BLOCK_BYTES) if stat.S_ISREG(os.fstat(file).st_mode) else None
