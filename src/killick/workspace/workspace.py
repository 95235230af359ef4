"""A folder and its snapshots: capture, compare, restore. Knows nothing of runs.

A lock serializes operations on a folder, across processes. The next operation finishes an interrupted restore.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from killick.clock import Clock, SystemClock
from killick.errors import KillickError, SnapshotBroken, WorkspaceRefused
from killick.logger import get_logger
from killick.permissions import make_folder
from killick.workspace import processes, tree
from killick.workspace import restore as restoring
from killick.workspace.ignore import Rules, Scope
from killick.workspace.processes import HOLDER_ENV, Process
from killick.workspace.restore import Restored
from killick.workspace.scan import Scanner
from killick.workspace.tree import Change, Entry, Id
from killick.workspace.vault.vault import Vault

logger: Final = get_logger("killick")

CHECK_SHARE: Final = 0.05
"""The fraction of time spent on full scans, despite the kernel's reports; small folders always get them."""
SAVE_SECONDS: Final = 30.0
_SLICE_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 1.0
ROUNDS_MAX: Final = 3
RUN: Final = "{run}"
"""Replaced by the run's id in a path, so that each run has its own folder."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a folder at a moment. `changed` counts the paths that differ from this process's last scan;
    `processes` were alive, and only their files are included; `left_out` lists unreadable entries, in words."""

    root: Id
    files: int
    size_bytes: int
    changed: int = 0
    processes: tuple[Process, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Its root, for people."""
        return self.root.hex()


class Capture(NamedTuple):
    """A snapshot in progress: once `quiet`, the files may change again."""

    quiet: Future[None]
    snapshot: Future[Snapshot]


def default_vault() -> Path:
    """Returns the vault's default folder, without a setting or a store."""
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(home, "killick", "files")


class Workspace:
    """A folder whose files are captured, at several moments, in a vault. Raises WorkspaceRefused.

    path       the folder; `{run}` in it is replaced by the run's id, so that each run has its own
    exclude    paths that are never captured, in .gitignore syntax
    gitignore  whether .gitignore files count; .killickignore files always do
    vault      the folder of the vault; by default next to the store
    hidden     stores that may be in the folder: snapshots omit them, and restores do not touch them
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        gitignore: bool = True,
        vault: str | os.PathLike[str] | Vault | None = None,
        hidden: Sequence[str | os.PathLike[str]] = (),
        clock: Clock | None = None,
    ) -> None:
        if isinstance(exclude, str):
            raise WorkspaceRefused(str(path), f"exclude is a list of patterns; write exclude=[{exclude!r}]")
        self.declared = os.fspath(path)
        self.exclude = tuple(exclude)
        self.gitignore = gitignore
        self._configured_vault = vault
        self._hidden = tuple(Path(os.path.realpath(each)) for each in hidden)
        self._clock = clock or SystemClock()
        self._mutex = threading.RLock()
        self._scanner: Scanner | None = None
        self._vault: Vault | None = vault if isinstance(vault, Vault) else None
        self._thread: ThreadPoolExecutor | None = None
        self._published: dict[str, Id] = {}
        self._sweeps = -1
        self._saved_us = 0
        self._packing: threading.Thread | None = None
        self._closing = False

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<killick workspace {self.declared}>"

    @property
    def path(self) -> Path:
        """The folder itself, with links resolved."""
        if RUN in self.declared:
            raise WorkspaceRefused(self.declared, "is a template for one folder per run; use the workspace of a run")
        return Path(os.path.realpath(os.path.expanduser(self.declared)))

    @property
    def configured_vault(self) -> str | None:
        """The configured vault folder, if any."""
        vault = self._configured_vault
        return None if vault is None else str(vault.path if isinstance(vault, Vault) else os.path.abspath(vault))

    @property
    def vault(self) -> Vault:
        """The vault."""
        with self._mutex:
            if self._vault is None:
                configured = self._configured_vault
                assert not isinstance(configured, Vault)
                self._vault = Vault(default_vault() if configured is None else configured, clock=self._clock)
            return self._vault

    def of(
        self,
        run: str,
        *,
        path: str | None = None,
        vault: str | os.PathLike[str] | Vault | None = None,
        hidden: Sequence[str | os.PathLike[str]] = (),
    ) -> Workspace:
        """Returns the workspace for one run: in its own folder, if the path has `{run}`, or in the given one."""
        own = self.declared.replace(RUN, name := run.replace("/", "_"))
        if name in (".", "..") and RUN in self.declared:
            raise WorkspaceRefused(run, "names no folder; give the run another id")
        return Workspace(
            own if path is None else path, exclude=self.exclude, gitignore=self.gitignore,
            vault=vault or self._configured_vault, hidden=(*self._hidden, *hidden), clock=self._clock,
        )  # fmt: skip

    # capture ----------------------------------------------------------------------------------

    def capture(self, owner: str | None = None) -> Snapshot:
        """Captures a snapshot, which is durable on return. `owner` keeps the snapshot from being pruned."""
        with self._locked():
            return self._captured(self._owner(owner))

    def begin(self, owner: str | None = None, *, check: bool = True) -> Capture:
        """Starts a snapshot in the background; the files must not change before it is quiet. Without `check` a caller
        waits for it: it trusts the kernel's reports, and does not look for live processes."""
        capture = Capture(Future(), Future())
        with self._mutex:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="killick-files")
            self._thread.submit(self._take, capture, self._owner(owner), check)
        return capture

    def _take(self, capture: Capture, owner: str, check: bool) -> None:
        def quiet() -> None:
            if not capture.quiet.done():
                capture.quiet.set_result(None)

        try:
            with self._locked():
                found = self._captured(owner, quiet=quiet, check=check)
            capture.snapshot.set_result(found)
        except BaseException as error:
            capture.snapshot.set_exception(error)
        finally:
            quiet()

    def _owner(self, owner: str | None) -> str:
        return str(self.path) if owner is None else owner

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """Locks the folder, and finishes an interrupted restore first."""
        with self._mutex, self.vault.lock(str(self.path)):
            pending = self.vault.restoring(str(self.path))
            if pending is not None:
                logger.warning("%s: a restore was interrupted here; it is finished first", self.path)
                self._restored(pending.target, pending.paths, str(self.path), pending.before)
            yield

    def _opened(self) -> Scanner:
        if self._scanner is None:
            path, home = self.path, Path(os.path.realpath(self.vault.home))
            if path.is_relative_to(home):
                raise WorkspaceRefused(str(path), f"lies in the vault ({home}) of its files; choose another folder")
            self._scanner = Scanner(
                path, self.vault, exclude=self.exclude, gitignore=self.gitignore, hidden=(home,), stores=self._hidden,
                clock=self._clock,
            )  # fmt: skip
            self._scanner.load_cache(self._cache_path)
        return self._scanner

    @property
    def _cache_path(self) -> Path:
        return self.vault.path / "seen" / sha256(os.fsencode(self.path)).hexdigest()[:32]

    def _captured(
        self,
        owner: str,
        *,
        quiet: Callable[[], None] = lambda: None,
        check: bool = True,
        thorough: bool = False,
        force: Sequence[str] = (),
    ) -> Snapshot:
        if not self.path.is_dir():
            raise WorkspaceRefused(str(self.path), "there is no such folder; create it, or restore it from a snapshot")
        scanner, at_us = self._opened(), self._clock.now_us()
        thorough = thorough or (check and (at_us - scanner.full_scan_us) * CHECK_SHARE >= scanner.full_scan_took_us)
        with self.vault.writing() as writing:
            try:
                top = scanner.scan(writing, thorough=thorough, force=force, quiet=quiet)
                root = tree.store_root(top, writing.add)
                if self._published.get(owner) != root or writing.sweeps != self._sweeps:
                    writing.publish(root, owner, at_us)
                    self._published[owner], self._sweeps = root, writing.sweeps
            except BaseException:
                scanner.invalidate()  # without a published snapshot, its objects do not count as stored
                raise
        alive = tuple(processes.alive(self.path, holder=os.environ.get(HOLDER_ENV, ""))) if check else ()
        self._save(at_us, always=not self._saved_us)
        if scanner.changed:
            self._compress()
        files, size = scanner.totals
        return Snapshot(
            root=root, files=files, size_bytes=size, changed=scanner.changed, processes=alive,
            left_out=tuple(scanner.left_out),
        )  # fmt: skip

    def _compress(self) -> None:
        """Compresses in the background what was stored uncompressed to save time."""
        if self._packing is not None and self._packing.is_alive():
            return
        self._packing = threading.Thread(target=self._compressed, args=(self.vault,), name="killick-pack", daemon=True)
        self._packing.start()

    def _compressed(self, vault: Vault) -> None:
        with contextlib.suppress(KillickError):  # the next capture or prune compresses it
            while not self._closing and vault.compress(seconds=_SLICE_SECONDS):
                pass

    def _save(self, at_us: int, *, always: bool) -> None:
        """Saves the scan cache. A failure is harmless: it is only a cache."""
        if self._scanner is None or not (always or at_us - self._saved_us > SAVE_SECONDS * 1_000_000):
            return
        self._saved_us = at_us
        with contextlib.suppress(OSError, RecursionError):
            self._scanner.save(self._cache_path)

    # restore ----------------------------------------------------------------------------------

    def restore(
        self, root: Id | Snapshot, paths: Sequence[str | bytes] | None = None, owner: str | None = None
    ) -> Restored:
        """Restores the files to a snapshot: all, or those at some paths and below. Captures the current files first;
        that snapshot is the result's `before`."""
        target = root.root if isinstance(root, Snapshot) else root
        requested = None if paths is None else [os.fsencode(path).strip(b"/") for path in paths]
        with self._locked():
            return self._restored(target, requested, self._owner(owner), None)

    def _restored(self, target: Id, paths: Sequence[bytes] | None, owner: str, before: Id | None) -> Restored:
        vault, place = self.vault, str(self.path)
        top = tree.root(target, vault.load)
        is_resumed, first = before is not None, None
        make_folder(self.path)
        written = removed = 0
        done = Restored(0, 0)
        for _ in range(ROUNDS_MAX):
            began_us = self._clock.now_us()
            now = self._safe(top, paths, owner)
            if first is None:
                first = now.root
                vault.begin_restoring(place, target, first, paths)
            plan = restoring.plan(
                tree.root(now.root, vault.load), top, vault.load, keeps=_Ignored(top, self._rules(), vault.load),
                paths=paths, hidden=self._hidden_paths(), before=tree.root(before, vault.load) if before else None,
                drops_ids=vault.is_foreign,
            )  # fmt: skip
            done = restoring.apply(plan, self.path, vault.load, resuming=is_resumed, captured_us=began_us)
            written, removed = written + done.written, removed + done.removed
            if not done.again:
                break
        vault.end_restoring(place)
        assert first is not None
        return Restored(written, removed, done.left, done.again, first)

    def _safe(self, target: Entry, paths: Sequence[bytes] | None, owner: str) -> Snapshot:
        """Captures the current files, including ignored ones that the restore would overwrite."""
        found = self._captured(owner, thorough=True)
        now = tree.root(found.root, self.vault.load)
        hidden = self._hidden_paths()
        covered = [
            os.fsdecode(change.path)
            for change in tree.changes(now, target, self.vault.load)
            if change.before is None
            and (paths is None or any(tree.is_at(change.path, path) for path in paths))
            and not any(tree.is_at(change.path, path) for path in hidden)
            and os.path.lexists(os.path.join(os.fsencode(self.path), change.path))
        ]
        return found if not covered else self._captured(owner, thorough=True, force=covered)

    def _rules(self) -> Rules:
        return Rules(self.exclude, gitignore=self.gitignore)

    def _hidden_paths(self) -> list[bytes]:
        """Returns the paths of the vault and the store that are inside the folder."""
        found: list[bytes] = []
        for each in (Path(os.path.realpath(self.vault.home)), *self._hidden):
            with contextlib.suppress(ValueError):
                found.append(os.fsencode(each.relative_to(self.path)))
        return found

    # reading ----------------------------------------------------------------------------------

    def files(self, root: Id) -> Iterator[tuple[bytes, Entry]]:
        """Returns everything in a snapshot, by path."""
        return tree.walk(tree.root(root, self.vault.load), self.vault.load)

    def read(self, root: Id, path: str | bytes) -> bytes:
        """Returns a file's content."""
        entry = tree.find(tree.root(root, self.vault.load), os.fsencode(path), self.vault.load)
        if entry is None or entry.kind != tree.FILE:
            raise WorkspaceRefused(os.fsdecode(path), f"is not a file of snapshot {root.hex()[:12]}")
        return b"".join(tree.content(entry, self.vault.load))

    def diff(self, before: Id, after: Id) -> list[Change]:
        """Returns the differences between two snapshots."""
        load = self.vault.load
        return list(tree.changes(tree.root(before, load), tree.root(after, load), load))

    def close(self) -> None:
        """Finishes the current snapshot, and saves the scan cache."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        if self._packing is not None:
            self._packing.join(_CLOSE_SECONDS)  # the next capture finishes the rest
            self._closing = True
            self._packing.join()
            self._packing, self._closing = None, False
        with self._mutex:
            if self._scanner is not None:
                self._save(self._clock.now_us(), always=True)
                self._scanner.close()
                self._scanner = None
            if self._vault is not None and self._vault is not self._configured_vault:
                self._vault.close()
                self._vault = None


class _Ignored:
    """Applies a snapshot's ignore rules: an ignored file may have existed although the snapshot omits it."""

    def __init__(self, top: Entry, rules: Rules, load: tree.Load) -> None:
        self._rules, self._load = rules, load
        self._scopes: dict[bytes, tuple[Scope, Entry | None]] = {b"": (self._scope(None, b"", top), top)}

    def __call__(self, path: bytes, is_folder: bool) -> bool:
        above, scope, entry = b"", *self._scopes[b""]
        parts = path.split(b"/")
        for depth, name in enumerate(parts):
            if scope.ignores(name, is_folder=is_folder or depth < len(parts) - 1):
                return True
            if depth == len(parts) - 1:
                return False
            above = tree.joined(above, name)
            if above not in self._scopes:
                below = None if entry is None else tree.find(entry, name, self._load)
                self._scopes[above] = self._scope(scope, above, below), below
            scope, entry = self._scopes[above]
        return False

    def _scope(self, above: Scope | None, path: bytes, entry: Entry | None) -> Scope:
        entries = tree.folder(entry.ref, self._load) if entry is not None and entry.is_folder else []
        found = {each.name: each for each in entries if each.kind == tree.FILE}

        def read(name: bytes) -> bytes | None:
            with contextlib.suppress(SnapshotBroken):
                return b"".join(tree.content(found[name], self._load)) if name in found else None
            return None

        return self._rules.scope(above, path, read)
