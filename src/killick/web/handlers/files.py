"""The files of a run: its snapshots, and the changes from one to the next. Read-only.

The contents of files are not values of the record, so redaction rules cannot search them: with redaction, only the
names of files are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from killick.errors import SnapshotBroken, StoreError, WorkspaceRefused
from killick.history import workspace_files as files
from killick.history.workspace_files import FileChange
from killick.log.log import Log
from killick.model import events as e
from killick.model.ledger import Capture
from killick.presenting.documents import Document
from killick.web.handlers.boundary import PlaceText
from killick.web.handlers.step_list import state_of
from killick.web.routes import Call, Nothing, Route, RunAsked, get

SNAPSHOTS_MAX: Final = 200
CHANGES_MAX: Final = 200
LINES_MAX: Final = 400
"""The maximum number of lines of one file."""


class FilesAsked(RunAsked, frozen=True, kw_only=True):
    """`at` is the place whose files are shown; the last snapshot by default."""

    at: PlaceText | None = None


class FileSnapshot(Document, frozen=True):
    """A recorded snapshot: its step, and how much of it differs from the one before."""

    place: str
    seq: int
    at_us: int
    because: str
    snapshot: str
    changed: int
    files: int
    size_bytes: int
    processes: int = 0


class RunFiles(Document, frozen=True):
    """The snapshots of a run, the last first, and the changes from `since` to `at`; `problem` is why the changes
    cannot be shown."""

    run: str
    folder: str | None = None
    total: int = 0
    snapshots: tuple[FileSnapshot, ...] = ()
    at: str | None = None
    since: str | None = None
    snapshot: str | None = None
    counts: Mapping[files.How, int] = {}
    changes: tuple[FileChange, ...] = ()
    left_out: int = 0
    problem: str | None = None


def seen(call: Call[FilesAsked, Nothing]) -> RunFiles:
    """The files of a run at a position: the changes there, line by line, and the snapshots."""
    run, log = call.asked.run, call.client.runtime.log
    state = state_of(call, run)
    ledger = log.ledger(run)
    if ledger.facts.workspace is None:
        return RunFiles(run=run)
    taken = list(ledger.captures)
    ended = {step.ended: step.id for step in state.fold.steps if step.ended}
    view = RunFiles(
        run=run, folder=ledger.facts.workspace, total=len(taken),
        snapshots=tuple(_snapshot(log, run, ended, each) for each in reversed(taken[-SNAPSHOTS_MAX:])),
    )  # fmt: skip
    try:
        with files.at(log, run, call.asked.at or "now") as found:
            diff = found.diff()
            view = replace(view, at=found.at, snapshot=found.root.hex(), since=found.since[0] if found.since else None)
            if diff is None:
                return view
            lines_max = 0 if call.mask else LINES_MAX
            changes = (replace(each, lines=each.lines[:lines_max]) for each in diff.changes[:CHANGES_MAX])
            left_out = diff.left_out + max(len(diff.changes) - CHANGES_MAX, 0)
            return replace(view, counts=diff.counts, changes=tuple(changes), left_out=left_out)
    except (WorkspaceRefused, SnapshotBroken, StoreError) as refused:
        return replace(view, at=call.asked.at, problem=str(refused))


_WHY: Final[Mapping[type[e.Event], str]] = {e.RunForked: "forked", e.RunRewound: "taken back"}


def _snapshot(log: Log, run: str, ended: Mapping[int, str], capture: Capture) -> FileSnapshot:
    event = log.event(run, capture.seq)
    captured = event if isinstance(event, e.WorkspaceCaptured) else None
    step = ended.get(capture.after)
    return FileSnapshot(
        place=f"@{capture.after}" if step is None else f"{step}:after", seq=capture.after, at_us=event.at,
        because=_WHY.get(type(event), "taken"), snapshot=e.from_text(capture.root).hex(),
        changed=captured.changed if captured else 0, files=captured.files if captured else 0,
        size_bytes=captured.size_bytes if captured else 0, processes=captured.processes if captured else 0,
    )  # fmt: skip


ROUTES: Final[tuple[Route, ...]] = (
    get("/runs/{run}/files", seen, asks=FilesAsked, gives=RunFiles, page="_files.html"),
)
