"""Plans a restore: the changes that turn a folder into a snapshot. Pure; touches no file."""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from killick.errors import WorkspaceRefused
from killick.workspace import tree
from killick.workspace.tree import FILE, KEPT, LINK, Entry, Load

Keeps = Callable[[bytes, bool], bool]
"""Whether the entry at a path (and whether it is a folder) must not be removed."""

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""A generator that yields its recursive calls and receives their results, so that depth is not limited by the stack."""

_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID
HOLDS_MORE: Final = "stays, because it has ignored or unreadable files"


class Task(msgspec.Struct, frozen=True):
    """The change of one name from `now` to `target`; None: absent. `below` are the changes inside the folder. A folder
    on the way to a path keeps its own mode and time."""

    name: bytes
    now: Entry | None
    target: Entry | None
    below: tuple[Task, ...] = ()
    passes: bool = False


class Plan(msgspec.Struct, frozen=True):
    """The changes of a folder from its top; None: none. `left` lists impossible ones, in words."""

    root: Task | None
    count: int
    left: tuple[str, ...] = ()


def plan(
    now: Entry,
    target: Entry,
    load: Load,
    *,
    keeps: Keeps,
    paths: Sequence[bytes] | None = None,
    hidden: Collection[bytes] = (),
    before: Entry | None = None,
    drops_ids: bool = False,
) -> Plan:
    """Plans the changes that turn `now` into `target`: all of them, or only those at some paths.

    `hidden` paths are skipped. `before` is the folder at the start of the same, interrupted restore: folders that were
    opened on the way to a path get their modes from it. `drops_ids` clears set-user-ID and set-group-ID bits of files:
    what another person sent must not run as this user.
    """
    planner = _Planner(load, keeps, frozenset(hidden), drops_ids=drops_ids)
    root = run_steps(planner.pair(b"", now, target, _trie_of(paths), before))
    return Plan(root, planner.count, tuple(planner.left))


_Trie = dict[bytes, "_Trie | None"]
"""The requested names of a folder: None means everything below."""


def _trie_of(paths: Sequence[bytes] | None) -> _Trie | None:
    if paths is None:
        return None
    top: _Trie = {}
    for path in paths:
        names = [name for name in path.split(b"/") if name not in (b"", b".")]
        if b".." in names or path.startswith(b"/"):
            raise WorkspaceRefused(shown(path), "is not a path inside the workspace; give it relative to the folder")
        if not names:
            return None
        level = top
        for name in names[:-1]:
            deeper = level.setdefault(name, {})
            if deeper is None:
                break
            level = deeper
        else:
            level[names[-1]] = None
    return top


class _Planner:
    """Compares two folders, name by name."""

    def __init__(self, load: Load, keeps: Keeps, hidden: frozenset[bytes], *, drops_ids: bool) -> None:
        self._drops_ids = drops_ids
        self._load = load
        self._keeps = keeps
        self._hidden = hidden
        self.left: list[str] = []
        self.count = 0

    def pair(
        self, path: bytes, now: Entry | None, target: Entry | None, trie: _Trie | None, before: Entry | None = None
    ) -> Steps[Task | None]:
        """Returns the change of the name at a path; None: none."""
        if path in self._hidden:
            return None
        if trie is not None:
            partial: Task | None = yield self._partial_folder(path, now, target, trie, before)
            return partial
        if now == target:
            return None
        if self._drops_ids and target is not None and target.kind == FILE and target.mode & _SET_IDS:
            target = msgspec.structs.replace(target, mode=target.mode & ~_SET_IDS)
            self.left.append(f"{shown(path)}: its set-user-ID and set-group-ID bits are not restored")
        if target is not None and target.sort not in KEPT:
            if now is not None and now.kind == target.kind:
                return None
            self.left.append(f"{shown(path)}: was a {target.sort}, which is not brought back")
            target = None
        if now is not None and now.sort not in KEPT:
            if target is not None:
                self.left.append(f"{shown(path)}: a {now.sort} is there, and is not replaced")
            return None
        if target is None:
            return (yield self._removal(path, now)) if now is not None else None
        if target.is_folder:
            task: Task | None = yield self._folder(path, now, target)
            return task
        if now is None or not now.is_folder:
            same = now is not None and same_content(now, target) and same_metadata(now, target)
            return None if same else self._task(path, now, target)
        if self._keeps(path, True):
            self.left.append(f"{shown(path)}: {HOLDS_MORE}")
            return None
        return self._task(path, now, target, (yield self._removals(path, now)))

    def _folder(self, path: bytes, now: Entry | None, target: Entry) -> Steps[Task | None]:
        if now is None or not now.is_folder:
            return self._task(path, now, target, (yield self._pairs(path, {}, self._entries(target), None)))
        below: tuple[Task, ...] = ()
        if now.ref != target.ref:
            below = yield self._pairs(path, self._entries(now), self._entries(target), None)
        return self._task(path, now, target, below) if below or not same_metadata(now, target) else None

    def _partial_folder(
        self, path: bytes, now: Entry | None, target: Entry | None, trie: _Trie, before: Entry | None
    ) -> Steps[Task | None]:
        """Plans a folder of which only some contents are requested."""
        new = self._entries(target) if target is not None and target.is_folder else {}
        if now is not None and now.is_folder:
            was = self._entries(before) if before is not None and before.is_folder else {}
            below: tuple[Task, ...] = yield self._pairs(path, self._entries(now), new, trie, was)
            mode = before.mode if before is not None and now.mode == before.mode | stat.S_IRWXU else now.mode
            to = msgspec.structs.replace(now, mode=mode)
            return self._task(path, now, to, below, passes=True) if below or mode != now.mode else None
        below = yield self._pairs(path, {}, new, trie)
        if not below or target is None:
            return None
        if now is not None:
            self.left.append(f"{shown(path)}: a {now.sort} is where a folder is needed, and was not requested")
            return None
        return self._task(path, None, target, below)

    def _pairs(
        self,
        path: bytes,
        old: Mapping[bytes, Entry],
        new: Mapping[bytes, Entry],
        trie: _Trie | None,
        was: Mapping[bytes, Entry] | None = None,
    ) -> Steps[tuple[Task, ...]]:
        names = old.keys() | new.keys() if trie is None else trie.keys() & (old.keys() | new.keys())
        found: list[Task] = []
        for name in sorted(names):
            deeper, before = trie[name] if trie is not None else None, was.get(name) if was else None
            task = yield self.pair(tree.joined(path, name), old.get(name), new.get(name), deeper, before)
            if task is not None:
                found.append(task)
        return tuple(found)

    def _removal(self, path: bytes, now: Entry) -> Steps[Task | None]:
        if path in self._hidden or now.sort not in KEPT or self._keeps(path, now.is_folder):
            return None
        return self._task(path, now, None, (yield self._removals(path, now)) if now.is_folder else ())

    def _removals(self, path: bytes, now: Entry) -> Steps[tuple[Task, ...]]:
        found: list[Task] = []
        for name, entry in self._entries(now).items():
            task = yield self._removal(tree.joined(path, name), entry)
            if task is not None:
                found.append(task)
        return tuple(found)

    def _task(
        self,
        path: bytes,
        now: Entry | None,
        target: Entry | None,
        below: tuple[Task, ...] = (),
        *,
        passes: bool = False,
    ) -> Task:
        self.count += 1
        return Task(path.rpartition(b"/")[2], now, target, below, passes)

    def _entries(self, entry: Entry) -> dict[bytes, Entry]:
        return {each.name: each for each in tree.folder(entry.ref, self._load)}


def run_steps(steps: Steps[T]) -> T:
    """Runs a generator of recursive calls."""
    stack: list[Steps[Any]] = [steps]
    value: Any = None
    error: BaseException | None = None
    while stack:
        try:
            call = stack[-1].send(value) if error is None else stack[-1].throw(error)
        except StopIteration as ended:
            stack.pop()
            value, error = ended.value, None
        except BaseException as raised:
            stack.pop()
            value, error = None, raised
        else:
            stack.append(call)
            value, error = None, None
    if error is not None:
        raise error
    found: T = value
    return found


def same_content(one: Entry, other: Entry) -> bool:
    return one.kind == other.kind and one.ref == other.ref and (one.size == other.size or one.kind != FILE)


def same_metadata(one: Entry, other: Entry) -> bool:
    """Returns whether mode and time are equal. A link's mode is ignored."""
    return one.mtime_ns == other.mtime_ns and (one.mode == other.mode or one.kind == other.kind == LINK)


def shown(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace") or "."
