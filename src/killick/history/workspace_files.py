"""The files of a run's workspace at a position, and the changes between two. Read-only.

File names are bytes; users see and type them as text, with undecodable bytes and control characters escaped. Large
results are limited, and the omitted number is reported.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from killick.errors import KillickError, WorkspaceRefused
from killick.history.vaults import Vaults, on_record, vault_of
from killick.log.boundaries import RunMoment
from killick.log.boundaries import at as place_at
from killick.log.log import Log
from killick.model import events as e
from killick.model.ledger import Ledger
from killick.text import size_text
from killick.workspace import tree
from killick.workspace.tree import Entry, Id, Load
from killick.workspace.vault.vault import Vault

How = Literal["added", "removed", "changed", "touched"]

LISTED_MAX: Final = 100_000
"""The maximum number of listed entries and changes; the others are counted."""

TEXT_BYTES_MAX: Final = 256 << 10
LINES_MAX: Final = 4_000
"""Longer files are not compared line by line."""

DIFFED_MAX: Final = 200
DIFF_LINES_MAX: Final = 5_000
"""The maximum number of files and lines shown with their lines; for the others only the kind of change."""

ID_DIGITS: Final = 12
"""The length of a displayed snapshot id; users may type less."""

_PREFIX_MIN: Final = 4
_AFTER: Final = re.compile(r"(?P<step>\d+(?:\.\d+)*(?:~\d+)?):after\b")
_ESCAPED: Final = re.compile(rb"\\x([0-9a-f]{2})")


# names ----------------------------------------------------------------------------------------------


def shown(path: bytes) -> str:
    """Returns a path for display: undecodable bytes and control characters as `\\xNN`."""
    text = path.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    return char if char.isprintable() else "".join(f"\\x{byte:02x}" for byte in char.encode())


def typed(path: str, folder: str | None = None) -> bytes:
    """Parses a path below the folder, relative or absolute; the folder itself is empty."""
    found = os.path.normpath(path)
    if folder is not None and os.path.isabs(found):
        found = os.path.relpath(found, folder)
    if os.path.isabs(found) or found == ".." or found.startswith("../"):
        raise WorkspaceRefused(shown(os.fsencode(path)), "is not inside the run's folder; give it relative to that")
    return b"" if found == "." else os.fsencode(found)


def id_of(root: Id) -> str:
    """Returns a snapshot's displayed id."""
    return root.hex()[:ID_DIGITS]


# a place --------------------------------------------------------------------------------------------


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One path of a snapshot. `target` is a link's target; `how` is its change since the previous snapshot."""

    path: str
    kind: tree.Kind
    mode: int
    size: int
    mtime_ns: int
    target: str | None = None
    how: How | None = None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot's entries below a path, and their changes since `since`; counts are totals."""

    run: str
    at: str
    seq: int
    snapshot: str
    folder: str
    since: str | None
    path: str
    entries: tuple[FileEntry, ...]
    left_out: int
    files: int
    folders: int
    size_bytes: int
    changed: dict[How, int]


@dataclass(slots=True, kw_only=True, eq=False)
class Files:
    """The files of a run at a position. Close it, or use it in a `with` block."""

    run: str
    at: str
    seq: int
    root: Id
    folder: str
    vault: Vault
    since: tuple[str, Id] | None = None
    """The snapshot that a listing compares with: the one before the step, or the previous one."""

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.vault.close()

    @property
    def top(self) -> Entry:
        """The folder itself."""
        return tree.root(self.root, self.vault.load)

    def find(self, path: str) -> tuple[bytes, Entry]:
        """Returns the entry at a path, and its path in the snapshot; refuses an unknown path."""
        name = typed(path, self.folder)
        for each in (name, _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), name)):
            found = tree.find(self.top, each, self.vault.load)
            if found is not None:
                return each, found
        raise WorkspaceRefused(self.run, f"there was no {shown(name)} at {self.at}; {self._near(name)}")

    def _near(self, path: bytes) -> str:
        above = os.path.dirname(path)
        while above and tree.find(self.top, above, self.vault.load) is None:
            above = os.path.dirname(above)
        here = tree.find(self.top, above, self.vault.load)
        names = [shown(each.name) for each in tree.folder(here.ref, self.vault.load)] if here and here.is_folder else []
        where = shown(above) or "the folder"
        listed_names = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        return f"{where} had {listed_names or 'nothing'}"

    def listing(self, path: str = "", *, limit: int = LISTED_MAX) -> Listing:
        """Lists the entries below a path, and their changes."""
        name, entry = self.find(path) if path else (b"", self.top)
        load, before = self.vault.load, self.root if self.since is None else self.since[1]
        found = () if before == self.root else tree.changes(tree.root(before, load), self.top, load)
        changed = {each.path: each for each in found if each.path and tree.is_at(each.path, name)}
        changes: dict[bytes, How] = {place: each.how for place, each in changed.items() if not each.is_time_only}
        entries: dict[bytes, FileEntry] = {}
        files = folders = size = left_out = 0
        for place, each in tree.walk(entry, self.vault.load, name) if entry.is_folder else [(name, entry)]:
            folders += each.is_folder
            files += not each.is_folder
            size += each.size if each.kind == tree.FILE else 0
            if len(entries) < limit:
                entries[place] = listed(place, each, changes.get(place))
            else:
                left_out += 1
        for place, change in changed.items():
            if change.before is not None and change.after is None:
                entries[place] = listed(place, change.before, "removed")
        return Listing(
            run=self.run, at=self.at, seq=self.seq, snapshot=self.root.hex(), folder=self.folder,
            since=self.since[0] if self.since else None, path=shown(name),
            entries=tuple(entries[place] for place in sorted(entries, key=lambda each: each.split(b"/"))),
            left_out=left_out, files=files, folders=folders, size_bytes=size, changed=dict(Counter(changes.values())),
        )  # fmt: skip

    def pieces(self, path: str, entry: Entry, limit: int | None = None) -> Iterator[bytes]:
        """Yields a file's content in chunks, also for one larger than memory."""
        if entry.kind not in (tree.FILE, tree.LINK):
            raise WorkspaceRefused(path, f"is a {entry.sort} in the snapshot, which has no content")
        return tree.content(entry, self.vault.load, limit)


def listed(path: bytes, entry: Entry, how: How | None = None) -> FileEntry:
    """Returns an entry for a listing."""
    return FileEntry(
        path=shown(path), kind=entry.sort, mode=entry.mode, size=0 if entry.is_folder else entry.size,
        mtime_ns=entry.mtime_ns, target=shown(entry.ref) if entry.kind == tree.LINK else None, how=how,
    )  # fmt: skip


# from the record ------------------------------------------------------------------------------------


def at(log: Log, run: str, text: str = "now") -> Files:
    """Returns a run's files at a position. WorkspaceRefused without a workspace, or without a snapshot that early."""
    place = place_at(log, run, text)
    ledger = log.ledger(run)
    root = root_at(ledger, place)
    if root is None:
        raise _too_early(log, run, ledger, place)
    found = _files(log, run, ledger, place.label, place.seq, root)
    found.since = _before(log, run, ledger, place, root)
    return found


def by_id(log: Log, run: str, text: str) -> Files:
    """Returns a run's snapshot by its id, or a prefix."""
    ledger = log.ledger(run)
    if not re.fullmatch(r"[0-9a-f]+", text := text.lower().rstrip("…")) or len(text) < _PREFIX_MIN:
        raise WorkspaceRefused(run, f"{text!r} is not a snapshot id; killick show {run} --log has them")
    found = [root for root in dict.fromkeys(on_record(log, run)) if root.hex().startswith(text)]
    if not found:
        raise WorkspaceRefused(run, f"has no snapshot {text} on record; killick show {run} lists them")
    if len(found) > 1:
        named = ", ".join(map(id_of, found[:4]))
        raise WorkspaceRefused(run, f"snapshot {text} is ambiguous between {named}; give more characters")
    label = f"snapshot {id_of(found[0])}"
    return _files(log, run, ledger, label, log.head(run).seq, found[0])


def root_at(ledger: Ledger, place: RunMoment) -> Id | None:
    """Returns the snapshot at a position. For steps that a rewind kept, the one at their end."""
    root = ledger.files_at(max((place.seq, *place.keep)))
    return None if root is None else e.from_text(root)


def _files(log: Log, run: str, ledger: Ledger, label: str, seq: int, root: Id) -> Files:
    vault = vault_of(log, run, ledger)
    return Files(run=run, at=label, seq=seq, root=root, folder=str(ledger.facts.workspace), vault=vault)


def _too_early(log: Log, run: str, ledger: Ledger, place: RunMoment) -> WorkspaceRefused:
    if ledger.facts.workspace is None:
        return WorkspaceRefused(run, "has no workspace, so no files were recorded")
    first = min((capture.after for capture in ledger.captures), default=None)
    since = "none was made yet" if first is None else f"the first is at @{first}"
    return WorkspaceRefused(run, f"there is no snapshot of its files as early as {place.label}; {since}")


def _before(log: Log, run: str, ledger: Ledger, place: RunMoment, root: Id) -> tuple[str, Id] | None:
    """Returns the snapshot to compare with: after a step, the one before it; elsewhere the previous one."""
    if written := _AFTER.match(place.label):
        label = f"{written['step']}:before"
        found = root_at(ledger, place_at(log, run, label))
        return None if found is None else (label, found)
    seq = max((place.seq, *place.keep))
    ended = {step.ended: step.id for step in log.state(run).fold.steps if step.ended}
    taken = sorted((capture.after, capture.seq, capture.root) for capture in ledger.captures if capture.after <= seq)
    for after, _, other in reversed(taken):
        if e.from_text(other) != root:
            return f"{ended[after]}:after" if after in ended else f"@{after}", e.from_text(other)
    return None


# changes --------------------------------------------------------------------------------------------


class FilesSide(msgspec.Struct, frozen=True):
    """One of two snapshots: its run and position."""

    run: str
    seq: int
    label: str
    snapshot: str


class FileChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change of one path. `lines` is a unified diff if both sides are text, or only one exists; `about` has the
    rest: binary, size, link target, new mode."""

    path: str
    how: How
    before: FileEntry | None = None
    after: FileEntry | None = None
    plus: int | None = None
    minus: int | None = None
    lines: tuple[str, ...] = ()
    about: str = ""


class FilesDiff(msgspec.Struct, frozen=True, kw_only=True):
    """All changes between two snapshots, by path. False: none."""

    before: FilesSide
    after: FilesSide
    changes: tuple[FileChange, ...]
    counts: dict[How, int]
    left_out: int = 0

    def __bool__(self) -> bool:
        return bool(self.changes)


def between(log: Log, one: tuple[str, RunMoment], two: tuple[str, RunMoment]) -> FilesDiff | str | None:
    """Returns the changes between two positions; or why they are unknown; None without a workspace."""
    ledgers = [log.ledger(run) for run, _ in (one, two)]
    bound = [ledger.facts.workspace is not None for ledger in ledgers]
    if not all(bound):
        return None if not any(bound) else f"{(one, two)[bound.index(False)][0]} has no workspace"
    sides: list[FilesSide] = []
    roots: list[Id] = []
    for (run, place), ledger in zip((one, two), ledgers, strict=True):
        root, label = root_at(ledger, place), place.label
        if root is None:
            # Before the first snapshot the run had changed nothing.
            first = min(ledger.captures, key=lambda capture: capture.after, default=None)
            if first is None:
                return f"no snapshot of the files of {run} was made yet"
            root, label = e.from_text(first.root), f"@{first.after}"
        roots.append(root)
        sides.append(FilesSide(run, place.seq, label, root.hex()))
    if roots[0] == roots[1]:
        return FilesDiff(before=sides[0], after=sides[1], changes=(), counts={})
    try:
        with Vaults(vault_of(log, run, ledger) for (run, _), ledger in zip((one, two), ledgers, strict=True)) as vaults:
            return compared(sides[0], sides[1], roots[0], roots[1], vaults.load)
    except KillickError as error:
        return str(error)


def compared(before: FilesSide, after: FilesSide, one: Id, two: Id, load: Load) -> FilesDiff:
    """Returns the changes between two snapshots, with the lines of small texts."""
    counts: Counter[How] = Counter()
    changes: list[FileChange] = []
    left_out, diffed, lines = 0, 0, 0
    for change in tree.changes(tree.root(one, load), tree.root(two, load), load):
        if not change.path or change.is_time_only:
            continue
        counts[change.how] += 1
        if len(changes) >= LISTED_MAX:
            left_out += 1
            continue
        wanted = diffed < DIFFED_MAX and lines < DIFF_LINES_MAX
        found = _file_change(change, load, with_lines=wanted)
        diffed, lines = diffed + bool(found.lines), lines + len(found.lines)
        changes.append(found)
    return FilesDiff(before=before, after=after, changes=tuple(changes), counts=dict(counts), left_out=left_out)


def _file_change(change: tree.Change, load: Load, *, with_lines: bool) -> FileChange:
    before, after = change.before, change.after
    made = FileChange(
        path=shown(change.path), how=change.how, before=None if before is None else listed(change.path, before),
        after=None if after is None else listed(change.path, after),
    )  # fmt: skip
    other = _other(before, after)
    if change.how == "touched":
        return replace(made, about=other or "only its time is other")
    if not any(each is not None and each.kind == tree.FILE for each in (before, after)):
        return replace(made, about=other)
    texts = [_text(each, load) if with_lines else _NotDiffed("") for each in (before, after)]
    why = next((text.why for text in texts if isinstance(text, _NotDiffed)), None)
    lines = () if why is not None else tuple(_unified(*map(str, texts)))
    if lines:
        plus, minus = (sum(line[:1] == sign for line in lines) for sign in "+-")
        return replace(made, lines=lines, plus=plus, minus=minus, about=other)
    sizes = [size_text(each.size) for each in (before, after) if each is not None and each.kind == tree.FILE]
    return replace(made, about=", ".join(filter(None, (why, " → ".join(dict.fromkeys(sizes)), other))))


def _other(before: Entry | None, after: Entry | None) -> str:
    """Describes changes beyond the content."""
    if before is None or after is None:
        only = before or after
        return "" if only is None or only.kind == tree.FILE else f"{only.sort}{_leads(only)}"
    if before.kind != after.kind:
        return f"{before.sort}{_leads(before)}, now a {after.sort}{_leads(after)}"
    if before.kind == tree.LINK and before.ref != after.ref:
        return f"link{_leads(before)}, now{_leads(after)}"
    return f"mode {before.mode:03o} → {after.mode:03o}" if before.mode != after.mode else ""


def _leads(entry: Entry) -> str:
    return f" → {shown(entry.ref)}" if entry.kind == tree.LINK else ""


class _NotDiffed(msgspec.Struct, frozen=True):
    """Why a file is not compared line by line."""

    why: str


def _text(entry: Entry | None, load: Load) -> str | _NotDiffed:
    if entry is None or entry.kind != tree.FILE:
        return ""
    if entry.size > TEXT_BYTES_MAX:
        begins = b"".join(tree.content(entry, load, 8_192))
        return _NotDiffed("binary" if b"\0" in begins else "too long to compare")
    data = load(entry.ref) if entry.size else b""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return _NotDiffed("binary")
    if "\0" in text:
        return _NotDiffed("binary")
    return text if text.count("\n") <= LINES_MAX else _NotDiffed("too long to compare")


def _unified(before: str, after: str) -> Iterator[str]:
    """Returns the lines of a unified diff without its header; marks a missing final newline."""
    made = unified_diff(_lines(before), _lines(after), lineterm="\n")
    for number, line in enumerate(made):
        if number < 2:
            continue
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)
