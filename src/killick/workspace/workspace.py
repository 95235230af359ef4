"""A folder and its snapshots: taken, compared, brought back. Knows nothing of runs.

One thing at a time is done with a folder, in this process and in others. A restore that was interrupted is finished by
whoever does anything with the folder next.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, NamedTuple

import msgspec

from killick.clock import Clock, SystemClock
from killick.errors import KillickError, SnapshotBroken, WorkspaceRefused
from killick.logger import get_logger
from killick.permissions import make_folder
from killick.workspace import criu, processes, tree
from killick.workspace import restore as restoring
from killick.workspace.ignore import Rules, Scope
from killick.workspace.processes import MARK, Process
from killick.workspace.restore import Restored
from killick.workspace.scan import Scanner
from killick.workspace.tree import Change, Entry, Id
from killick.workspace.vault.vault import Vault

logger: Final = get_logger("killick")

Processes = Literal["noticed", "taken"]

CHECK_SHARE: Final = 0.05
"""How much of the time is spent on looking at everything, whatever the kernel told: small folders always are."""
SAVE_SECONDS: Final = 30.0
_SLICE_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 1.0
ROUNDS_MAX: Final = 3
RUN: Final = "{run}"
"""In a path: the id of the run, so that each has a folder of its own."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a folder at a moment. `changed` counts the paths that are other than the last time this process
    looked; `processes` were alive then, and only their files are here, unless `images` is a snapshot of themselves;
    `left_out` is what could not be taken, in words."""

    root: Id
    files: int
    size_bytes: int
    changed: int = 0
    processes: tuple[Process, ...] = ()
    left_out: tuple[str, ...] = ()
    images: Id | None = None

    @property
    def id(self) -> str:
        """Its root as people see it."""
        return self.root.hex()


class Capture(NamedTuple):
    """A snapshot that is being taken: from `quiet` on the files may change again."""

    quiet: Future[None]
    snapshot: Future[Snapshot]


def default_vault() -> Path:
    """Where the files of snapshots are kept where nobody says it and no store is at hand."""
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return Path(home, "killick", "files")


class Workspace:
    """A folder whose files are kept, as they were at moments, in a vault.

    path       the folder; `{run}` in it stands for the id of the run, so that each has its own
    exclude    what is never looked at, in the words of .gitignore files
    gitignore  whether .gitignore files count; .killickignore files always do
    vault      where content is kept; beside the store, unless it says otherwise
    processes  "taken": what is alive in the folder is dumped with its files, where CRIU may do that
    hidden     stores that may lie in the folder: no snapshot holds them, and no restore touches them
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        gitignore: bool = True,
        vault: str | os.PathLike[str] | Vault | None = None,
        processes: Processes = "noticed",
        hidden: Sequence[str | os.PathLike[str]] = (),
        clock: Clock | None = None,
    ) -> None:
        if isinstance(exclude, str):
            raise WorkspaceRefused(str(path), f"exclude is a list of patterns; write exclude=[{exclude!r}]")
        if processes not in ("noticed", "taken"):
            raise WorkspaceRefused(str(path), f"processes={processes!r} is not one of noticed, taken")
        self.declared = os.fspath(path)
        self.exclude = tuple(exclude)
        self.gitignore = gitignore
        self.processes: Processes = processes
        self._given_vault = vault
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<killick workspace {self.declared}>"

    @property
    def path(self) -> Path:
        """The folder itself, whatever links led to it."""
        if RUN in self.declared:
            raise WorkspaceRefused(self.declared, "is a folder for each run; ask a run for its own")
        return Path(os.path.realpath(os.path.expanduser(self.declared)))

    @property
    def given_vault(self) -> str | None:
        """Where content is kept, where somebody said so."""
        given = self._given_vault
        return None if given is None else str(given.path if isinstance(given, Vault) else os.path.abspath(given))

    @property
    def vault(self) -> Vault:
        """Where content is kept."""
        with self._mutex:
            if self._vault is None:
                given = self._given_vault
                assert not isinstance(given, Vault)
                self._vault = Vault(default_vault() if given is None else given, clock=self._clock)
            return self._vault

    def of(
        self,
        run: str,
        *,
        path: str | None = None,
        vault: str | os.PathLike[str] | Vault | None = None,
        hidden: Sequence[str | os.PathLike[str]] = (),
    ) -> Workspace:
        """The same, for one run: in its own folder, where the path says so, or in the one that is given."""
        own = self.declared.replace(RUN, run.replace("/", "_"))
        return Workspace(
            own if path is None else path, exclude=self.exclude, gitignore=self.gitignore,
            vault=vault or self._given_vault, processes=self.processes, hidden=(*self._hidden, *hidden),
            clock=self._clock,
        )  # fmt: skip

    # taking -----------------------------------------------------------------------------------

    def capture(self, owner: str | None = None) -> Snapshot:
        """Take a snapshot, here and now; it holds when this returns. `owner` is who it is kept for."""
        with self._alone():
            return self._captured(self._owner(owner))

    def begin(self, owner: str | None = None, *, check: bool = True) -> Capture:
        """Take a snapshot beside whatever is done meanwhile; the files must not change before it is quiet. Without
        `check` somebody waits for it: the kernel is believed, and nobody asks which processes are alive."""
        capture = Capture(Future(), Future())
        with self._mutex:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="killick-files")
            self._thread.submit(self._take, capture, self._owner(owner), check)
        return capture

    def _take(self, capture: Capture, owner: str, check: bool) -> None:
        quiet = _once(capture.quiet)
        try:
            with self._alone():
                found = self._captured(owner, quiet=quiet, check=check)
            capture.snapshot.set_result(found)
        except BaseException as error:
            capture.snapshot.set_exception(error)
        finally:
            quiet()

    def _owner(self, owner: str | None) -> str:
        return str(self.path) if owner is None else owner

    @contextlib.contextmanager
    def _alone(self) -> Generator[None]:
        """One at a time; what an interrupted restore left to do is done first."""
        with self._mutex, self.vault.lock(str(self.path)):
            pending = self.vault.restoring(str(self.path))
            if pending is not None:
                logger.warning("%s: a restore was interrupted here; it is finished first", self.path)
                self._restored(pending.target, pending.paths, str(self.path), pending.before)
            yield

    def _opened(self) -> Scanner:
        if self._scanner is None:
            path, home = self.path, Path(os.path.realpath(self.vault.path))
            if path.is_relative_to(home):
                raise WorkspaceRefused(str(path), f"lies in the vault ({home}) that would keep its files")
            self._scanner = Scanner(
                path, self.vault, exclude=self.exclude, gitignore=self.gitignore, hidden=(home,), stores=self._hidden,
                clock=self._clock,
            )  # fmt: skip
            self._scanner.remember(self._seen)
        return self._scanner

    @property
    def _seen(self) -> Path:
        """Where what is known of the folder is remembered."""
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
            raise WorkspaceRefused(str(self.path), "there is no such folder; make it, or bring it back from a snapshot")
        scanner, at_us = self._opened(), self._clock.now_us()
        thorough = thorough or (check and (at_us - scanner.looked_us) * CHECK_SHARE >= scanner.took_us)
        with contextlib.ExitStack() as stack:
            stopped = stack.enter_context(self._stopped()) if self.processes == "taken" else None
            with self.vault.writing() as writing, _doubting(scanner):
                top = scanner.look(writing, thorough=thorough, quick=not check, force=force, quiet=quiet)
                root = tree.store_root(top, writing.add)
                if self._published.get(owner) != root or writing.sweeps != self._sweeps:
                    writing.publish(root, owner, at_us)
                    self._published[owner], self._sweeps = root, writing.sweeps
            images = None if stopped is None else self._kept(stopped, owner)
        alive = self._alive() if check else ()
        self._save(at_us, always=not self._saved_us)
        if scanner.changed:
            self._compress()
        files, size = scanner.totals
        return Snapshot(
            root=root, files=files, size_bytes=size, changed=scanner.changed, processes=alive,
            left_out=tuple(scanner.left_out), images=images,
        )  # fmt: skip

    def _compress(self) -> None:
        """What came in bulk was stored as it is, so that nobody waits; now it is made small, beside everything else."""
        if self._packing is not None and self._packing.is_alive():
            return
        self._packing = threading.Thread(target=self._compressed, args=(self.vault,), name="killick-pack", daemon=True)
        self._packing.start()

    def _compressed(self, vault: Vault) -> None:
        with contextlib.suppress(KillickError):  # another time, or by whoever prunes
            while not self._closing and vault.compress(seconds=_SLICE_SECONDS):
                pass

    def _save(self, at_us: int, *, always: bool) -> None:
        """What is known is worth little: that it cannot be saved keeps nobody from anything."""
        if self._scanner is None or not (always or at_us - self._saved_us > SAVE_SECONDS * 1_000_000):
            return
        self._saved_us = at_us
        with contextlib.suppress(OSError, RecursionError):
            self._scanner.save(self._seen)

    def _alive(self) -> tuple[Process, ...]:
        return tuple(processes.alive(self.path, mark=os.environ.get(MARK, "")))

    @contextlib.contextmanager
    def _stopped(self) -> Generator[Path | None]:
        """Images of what is alive in the folder, which stands still meanwhile, so that its files fit them."""
        alive = self._alive()
        reason = criu.available() if alive else None
        if not alive or reason is not None:
            if reason is not None:
                logger.warning("%s: its processes are not taken: %s", self.path, reason)
            yield None
            return
        with criu.images_folder() as images:
            try:
                criu.dump(alive, images, leave_running=False)
            except KillickError as error:
                logger.warning("%s: its processes are not taken: %s", self.path, error)
                yield None
                return
            try:
                yield images
            finally:
                criu.go_on(images)

    def _kept(self, images: Path, owner: str) -> Id:
        """Images are files of a folder, and kept as such."""
        with Workspace(images, gitignore=False, vault=self.vault, clock=self._clock) as taken:
            return taken.capture(owner).root

    # bringing back ----------------------------------------------------------------------------

    def restore(
        self, root: Id | Snapshot, paths: Sequence[str | bytes] | None = None, owner: str | None = None
    ) -> Restored:
        """Bring the files back to a snapshot: all, or those at some paths and below. What is there now is taken first;
        its snapshot is the `before` of what comes back."""
        target = root.root if isinstance(root, Snapshot) else root
        wanted = None if paths is None else [os.fsencode(path).strip(b"/") for path in paths]
        with self._alone():
            return self._restored(target, wanted, self._owner(owner), None)

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
                tree.root(now.root, vault.load), top, vault.load, keeps=_Kept(top, self._rules(), vault.load),
                paths=paths, hidden=self._hidden_paths(), before=tree.root(before, vault.load) if before else None,
            )  # fmt: skip
            done = restoring.apply(plan, self.path, vault.load, resuming=is_resumed, captured_us=began_us)
            written, removed = written + done.written, removed + done.removed
            if not done.again:
                break
        vault.end_restoring(place)
        assert first is not None
        return Restored(written, removed, done.left, done.again, first)

    def _safe(self, target: Entry, paths: Sequence[bytes] | None, owner: str) -> Snapshot:
        """What is there, with whatever a rule ignores and the restore would write over."""
        found = self._captured(owner, thorough=True)
        now = tree.root(found.root, self.vault.load)
        hidden = self._hidden_paths()
        covered = [
            os.fsdecode(change.path)
            for change in tree.changes(now, target, self.vault.load)
            if change.before is None
            and (paths is None or any(_is_at(change.path, path) for path in paths))
            and not any(_is_at(change.path, path) for path in hidden)
            and os.path.lexists(os.path.join(os.fsencode(self.path), change.path))
        ]
        return found if not covered else self._captured(owner, thorough=True, force=covered)

    def _rules(self) -> Rules:
        return Rules(self.exclude, gitignore=self.gitignore)

    def _hidden_paths(self) -> list[bytes]:
        """What of the vault and the store lies in the folder, by path."""
        found: list[bytes] = []
        for each in (Path(os.path.realpath(self.vault.path)), *self._hidden):
            with contextlib.suppress(ValueError):
                found.append(os.fsencode(each.relative_to(self.path)))
        return found

    def restore_processes(self, images: Id) -> list[int]:
        """Bring processes back from a snapshot of their images, where CRIU may do that; returns their ids."""
        if (reason := criu.available()) is not None:
            raise WorkspaceRefused(str(self.path), f"its processes cannot be brought back: {reason}")
        with criu.images_folder() as folder:
            with Workspace(folder, gitignore=False, vault=self.vault, clock=self._clock) as place:
                place.restore(images)
            return criu.restore(folder)

    # looking ----------------------------------------------------------------------------------

    def files(self, root: Id) -> Iterator[tuple[bytes, Entry]]:
        """Everything in a snapshot, by path."""
        return tree.walk(tree.root(root, self.vault.load), self.vault.load)

    def read(self, root: Id, path: str | bytes) -> bytes:
        """What a file held."""
        entry = tree.find(tree.root(root, self.vault.load), os.fsencode(path), self.vault.load)
        if entry is None or entry.kind != tree.FILE:
            raise WorkspaceRefused(os.fsdecode(path), f"is no file of snapshot {root.hex()[:12]}")
        return content(entry, self.vault.load)

    def diff(self, before: Id, after: Id) -> list[Change]:
        """What differs between two snapshots."""
        load = self.vault.load
        return list(tree.changes(tree.root(before, load), tree.root(after, load), load))

    def close(self) -> None:
        """Finish what is being taken, and remember what is known."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=True)
        if self._packing is not None:
            self._packing.join(_CLOSE_SECONDS)  # most is done by then; the rest is left to the next
            self._closing = True
            self._packing.join()
            self._packing, self._closing = None, False
        with self._mutex:
            if self._scanner is not None:
                self._save(self._clock.now_us(), always=True)
                self._scanner.close()
                self._scanner = None
            if self._vault is not None and self._vault is not self._given_vault:
                self._vault.close()
                self._vault = None


@contextlib.contextmanager
def _doubting(scanner: Scanner) -> Generator[None]:
    """What was stored for a snapshot that is not published in the end is not stored."""
    try:
        yield
    except BaseException:
        scanner.doubt()
        raise


def content(entry: Entry, load: tree.Load) -> bytes:
    """What a file of a snapshot holds."""
    if not entry.is_long:
        return load(entry.ref)
    data = bytearray(entry.size)
    for block in tree.blocks(entry.ref, load):
        data[block.offset : block.offset + block.size] = load(block.ref)
    return bytes(data)


class _Kept:
    """What the rules of a snapshot ignore: that it does not hold such a file does not mean that there was none."""

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
            above = above + b"/" + name if above else name
            if above not in self._scopes:
                held = tree.folder(entry.ref, self._load) if entry is not None and entry.is_folder else []
                below = next((each for each in held if each.name == name), None)
                self._scopes[above] = self._scope(scope, above, below), below
            scope, entry = self._scopes[above]
        return False

    def _scope(self, above: Scope | None, path: bytes, entry: Entry | None) -> Scope:
        held = tree.folder(entry.ref, self._load) if entry is not None and entry.is_folder else []
        found = {each.name: each for each in held if each.kind == tree.FILE}

        def read(name: bytes) -> bytes | None:
            with contextlib.suppress(SnapshotBroken):
                return content(found[name], self._load) if name in found else None
            return None

        return self._rules.scope(above, path, read)


def _is_at(path: bytes, above: bytes) -> bool:
    return not above or path == above or path.startswith(above + b"/")


def _once(future: Future[None]) -> Callable[[], None]:
    def done() -> None:
        if not future.done():
            future.set_result(None)

    return done
