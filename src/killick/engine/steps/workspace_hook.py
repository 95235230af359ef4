"""The workspace of a run: when its files are captured, which steps wait for that, and when they are restored.

After every tool the files are captured in the background, by changes on disk and not by the kind of tool; the next
tool waits until they were read. A tool that says it changes only the workspace has it for itself, begins when its
before is on record, and finds that before again whenever it is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from killick.definitions.policy import Effect
from killick.engine.execution import Execution
from killick.engine.signals import Interrupted
from killick.engine.steps.attempt import call_on
from killick.engine.steps.step_state import StepState
from killick.engine.steps.workspace_folders import owner_of
from killick.engine.steps.workspace_grants import grant, refuse_ungranted
from killick.errors import KillickError, NotDone, WorkspaceRefused
from killick.log.writer import Entry
from killick.logger import get_logger
from killick.model import events as e
from killick.model.facts import Step
from killick.permissions import make_folder
from killick.workspace import processes, tree
from killick.workspace.processes import HOLDER_ENV, Process
from killick.workspace.restore import Restored
from killick.workspace.tree import Id
from killick.workspace.workspace import RUN, Capture, Snapshot, Workspace

logger: Final = get_logger("killick")

_TOLD_MAX: Final = 20
_ROUNDS_MAX: Final = 5


class Files:
    """The workspace of one run while it is in memory."""

    def __init__(self, ex: Execution, workspace: Workspace) -> None:
        self.ex = ex
        self.workspace = workspace
        self.owner = owner_of(ex.engine.log.store, ex.run_id)
        self._last = ex.log.ledger.files_at(ex.log.seq)
        self._alive: frozenset[int] = frozenset()
        self._taking = 0
        self._unread: Capture | None = None
        self._moved = asyncio.Event()
        self._is_exclusive = False
        self._running = 0
        self._back_since: dict[e.StepId, int] = {}
        """Steps whose files went back and that were not tried again yet."""

    @property
    def path(self) -> Path:
        return self.workspace.path

    # opening ----------------------------------------------------------------------------------

    async def opened(self) -> None:
        """Before the code of a run continues: restore its files to the record, or record how they are.

        Files that are missing or cannot be restored interrupt the run; it does not fail.
        """
        with self._interrupting():
            await self._open()

    @contextlib.contextmanager
    def _interrupting(self) -> Generator[None]:
        try:
            yield
        except KillickError as error:
            raise self.ex.interrupted(error) from error
        except OSError as error:
            raise self.ex.interrupted(WorkspaceRefused(str(self.path), str(error))) from error

    async def restore_due(self) -> None:
        """Before a compensation: restore the files that a rewind left to the next holder."""
        facts = self.ex.log.ledger.facts
        with self._interrupting():
            refuse_ungranted(self.ex.engine.store, self.path)
            if facts.files_due is not None:
                make_folder(self.path)
                await self._restore(e.from_text(facts.files_due), facts.due_because)

    async def _open(self) -> None:
        ex = self.ex
        facts = ex.log.ledger.facts
        path, vault, declared = str(self.path), str(self.workspace.vault.path), ex.agent.options.workspace
        if facts.workspace is None and declared is not None:
            grant(ex.engine.store, declared.declared, vault)
        refuse_ungranted(ex.engine.store, path)
        due, because = facts.files_due, facts.due_because
        if not self.path.is_dir():
            for_each = declared is not None and RUN in declared.declared
            if due is None and not for_each and not facts.workspace:
                raise WorkspaceRefused(path, f"the workspace folder of {ex.run_id} does not exist; create it")
            make_folder(self.path)
            if due is None and self._last is not None:
                due, because = self._last, "gone"  # the folder was removed, and the run needs it
        bound = e.WorkspaceBound(
            at=ex.now_us(), path=path, vault=vault, exclude=self.workspace.exclude, gitignore=self.workspace.gitignore
        )
        known = facts.workspace, facts.vault, facts.exclude, facts.gitignore
        if known != (bound.path, bound.vault, bound.exclude, bound.gitignore):
            ex.write_behind(Entry(bound))
        os.environ[HOLDER_ENV] = ex.engine.holder
        left = self._left_open()
        if due is not None:
            await self._restore(e.from_text(due), because)
        elif doubtful := [step for step in left if step.effect == "workspace" and not self._went_back(step)]:
            # Only one was at it; the others were begun before and had their files brought back, or never touched them.
            await self._left_in_doubt(max(doubtful, key=lambda step: step.attempts[-1].started))
        elif (is_lost := ex.log.ledger.uncaptured() > 0) or not left:
            self.begin(self._since() if ex.was_abandoned and not is_lost else None)

    def _left_open(self) -> list[Step]:
        """The tools that were running when the run was released: the current files are no boundary."""
        fold = self.ex.log.fold
        steps = (fold.steps[index] for index in fold.facts.pending.values())
        return [step for step in steps if step.sort == "tool" and step.attempts and not step.attempts[-1].ended]

    async def _left_in_doubt(self, step: Step) -> None:
        """After a process died in a tool that changes the workspace: restore the files before any other tool runs.

        A worker that may only be frozen gets its grace period.
        """
        ex = self.ex
        while ex.signal is None and (left := ex.touch_after_us - ex.now_us()) > 0:
            await asyncio.sleep(ex.engine.clock.nap_seconds(min(left / 1_000_000, 1.0)))
        if ex.signal is None:
            started: e.Started = ex.record.event(step.attempts[-1].started)
            await self._back(step.id, step.attempts[-1].started, started.at, ex.record.holder_of(started.epoch))

    def _since(self) -> int | None:
        """From where on nothing was done to the files by this run, where its last process died before it had looked."""
        log = self.ex.log
        ended = next((step.ended for step in reversed(log.fold.steps) if step.sort == "tool" and step.ended), 0)
        is_known = any(capture.after >= ended for capture in log.ledger.captures)
        return None if not ended or is_known else ended

    # taking -----------------------------------------------------------------------------------

    def begin(self, after: int | None = None, *, check: bool = True) -> Capture:
        """Take the files in the background, as they are at this point of the log; or, where the snapshot of the last
        change was lost, since that."""
        capture, log = self.workspace.begin(self.owner, check=check), self.ex.log
        after = after or (0 if self._taking else log.ledger.uncaptured()) or log.seq
        self._taking += 1
        self._unread = capture
        capture.quiet.add_done_callback(lambda _: call_on(self.ex.loop, self._moved.set))
        capture.snapshot.add_done_callback(lambda _: call_on(self.ex.loop, self._taken, capture, after, check))
        return capture

    def _taken(self, capture: Capture, after: int, check: bool) -> None:
        """A snapshot holds, or could not be taken: either is put on record, unless nothing changed."""
        self._taking -= 1
        self._moved.set()
        ex = self.ex
        if isinstance(ex.signal, Interrupted):
            return
        error = capture.snapshot.exception()
        try:
            if error is not None:
                logger.warning("%s: its files could not be taken: %s", ex.run_id, error)
                ex.write_behind(ex.noted(f"the files could not be taken: {error}"))
            else:
                self._record(capture.snapshot.result(), after, check)
        except BaseException as failed:  # the handle is closed, which the executor sees
            logger.debug("%s: a snapshot is not on record: %s", ex.run_id, failed)

    def _record(self, snapshot: Snapshot, after: int, check: bool) -> None:
        ex, root = self.ex, e.to_text(snapshot.root)
        alive = frozenset(each.pid for each in snapshot.processes) if check else self._alive
        if root == self._last and alive == self._alive and not ex.log.ledger.uncaptured():
            return
        self._alive = alive
        ex.write_behind(captured(snapshot, after, at=ex.now_us(), processes=len(alive)))
        self._last = root

    async def settle(self) -> None:
        """Until what was being taken is on record, and the last change, whose process may have died before that."""
        if not self._taking and self.ex.log.ledger.uncaptured():
            self.begin(check=False)
        while self._taking:
            await self._until_moved()

    async def _until_moved(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _quieted(self) -> None:
        """Until the files may change again."""
        while self._unread is not None and not self._unread.quiet.done():
            await self._until_moved()

    async def _current(self) -> None:
        """The files as they are now are on record."""
        await self.settle()
        capture = self.begin(check=False)
        await self.settle()
        if (error := capture.snapshot.exception()) is not None:
            raise error

    # around a tool ----------------------------------------------------------------------------

    @asynccontextmanager
    async def around(self, a: StepState) -> AsyncGenerator[None]:
        """While a tool is applied. One that changes the workspace has it for itself, from its before on."""
        effect = a.intent.effect
        if effect == "reads":
            yield
            return
        alone = effect == "workspace"
        while self._is_exclusive or (alone and self._running):
            await self._until_moved()
            self.ex.refuse(a.branch)
        self._is_exclusive, self._running = alone, self._running + 1
        try:
            await self._ready(a)
            yield
        finally:
            self._is_exclusive, self._running = False, self._running - 1
            self._moved.set()

    async def _ready(self, a: StepState) -> None:
        with self._interrupting():
            if a.intent.effect != "workspace":
                await self._quieted()
            elif a.is_open and not self._is_back(a):
                await self._back(a.step, *self._last_attempt(a))
            else:
                await self._current()
            self._back_since.pop(a.step, None)

    def _last_attempt(self, a: StepState) -> tuple[int, int, str | None]:
        """Where it started, when, and who made it: we, or a process before."""
        record = self.ex.record
        if a.started:
            return a.started, a.began_us, self.ex.engine.holder
        assert a.past is not None
        seq = a.past.attempts[-1].started
        event: e.Started = record.event(seq)
        return seq, event.at, record.holder_of(event.epoch)

    def _is_back(self, a: StepState) -> bool:
        """Whether the files were restored since the last attempt: later changes of other processes stay."""
        return a.step in self._back_since or (not a.started and a.past is not None and self._went_back(a.past))

    def _went_back(self, step: Step) -> bool:
        """Whether the files went back since the last attempt of a step that is on record."""
        restores = self.ex.record.of(step.id, e.WorkspaceRestored)
        return bool(step.attempts) and any(seq > step.attempts[-1].started for seq, _ in restores)

    async def failed(self, a: StepState) -> None:
        """An attempt failed and will be repeated: restore the files before any other tool runs."""
        await self._back(a.step, a.started, a.began_us, self.ex.engine.holder)

    def ended(self) -> None:
        """Snapshot the files after an outcome or a wait, if no tool is running."""
        if not self._running and not isinstance(self.ex.signal, Interrupted):
            self.begin()

    async def _back(self, step: e.StepId, started: int, since_us: int, holder: str | None) -> None:
        """An attempt is in doubt: ends its leftover processes, and restores the files from before it."""
        ex = self.ex
        await self.settle()
        root = ex.log.ledger.files_at(started - 1)
        if root is None:
            problem = f"there is no snapshot from before step {step}; correct its files and settle the step by hand"
            raise WorkspaceRefused(str(self.path), problem)
        await self._restore(e.from_text(root), "in doubt", step=step, left=(since_us, holder))
        self._back_since[step] = ex.log.seq

    def _end_left_over(self, since_us: int, holder: str | None) -> list[Process]:
        """End the processes that an attempt left running, or that a dead worker left."""
        ended: list[Process] = []
        for _ in range(_ROUNDS_MAX):
            if holder is None:
                break
            if holder == self.ex.engine.holder:
                found = [
                    each
                    for each in processes.started_since(self.path, holder=holder, since_us=since_us)
                    # The kernel's clock is coarse. Changes noticed before the attempt are not the attempt's.
                    if each.pid not in self._alive or each.started_us > since_us
                ]
            else:
                found = processes.started_by(holder, since_us=since_us)
            if not found:
                break
            ended += processes.end(found)
        return ended

    async def _restore(
        self, root: Id, because: e.RestoredBecause, *, step: e.StepId | None = None,
        left: tuple[int, str | None] = (0, None),
    ) -> None:  # fmt: skip
        """Bring the files back, all of them: a tool is let at nothing less. `left` is since when, and whose, processes
        may still write."""
        ex = self.ex
        ex.check_lease()  # after a freeze another process may work in the folder
        done, ended = await asyncio.to_thread(self._restored, root, left)
        self._last = e.to_text(root)
        await ex.write(restored(done, self._last, because, at=ex.now_us(), step=step, ended=ended))

    def _restored(self, root: Id, left: tuple[int, str | None]) -> tuple[Restored, list[Process]]:
        ended: list[Process] = []
        done: Restored | None = None
        for _ in range(_ROUNDS_MAX):
            ended += self._end_left_over(*left)
            again = self.workspace.restore(root, None, self.owner)
            first = again.before if done is None else done.before
            written, removed = (0, 0) if done is None else (done.written, done.removed)
            done = Restored(written + again.written, removed + again.removed, again.left, again.again, first)
            later = self._end_left_over(*left)
            ended += later
            if not again.again and not later:
                return done, ended
        assert done is not None
        writer = done.left[0] if done.left else "another process writes to it"
        raise WorkspaceRefused(str(self.path), f"cannot be restored while it is written to ({writer})")

    # undoing ----------------------------------------------------------------------------------

    async def revert(self, step: e.StepId, started: int, ended: int) -> int:
        """Revert the file changes of one step, where the files have not changed since; returns how many paths."""
        await self.settle()
        if self.ex.log.ledger.uncaptured():
            await self._current()
        ledger = self.ex.log.ledger
        before, after = ledger.files_at(started - 1), ledger.files_at(ended) if ended else None
        if before is None:
            raise NotDone(f"{self.path}: there is no snapshot from before the step")
        was = e.from_text(after) if after else None
        paths, done = await asyncio.to_thread(self._reverted, e.from_text(before), was)
        if done is not None:
            entry = restored(done, before, "undone", at=self.ex.now_us(), step=step, paths=paths)
            self.ex.write_behind(entry)
        return len(paths)

    def _reverted(self, before: Id, after: Id | None) -> tuple[list[str], Restored | None]:
        """Without an `after` the step never ended, and the current files are its leftovers."""
        workspace, load = self.workspace, self.workspace.vault.load
        found = workspace.capture(self.owner).root
        now, after = tree.root(found, load), after or found
        wanted = [change for change in workspace.diff(before, after) if not change.is_time_only]
        held = {change.path: tree.find(now, change.path, load) for change in wanted}
        done = [change for change in wanted if not _same(held[change.path], change.before)]
        others = [os.fsdecode(change.path) for change in done if not _same(held[change.path], change.after)]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise NotDone(f"{', '.join(others[:3])}{more}: changed since; correct those files by hand, or rewind")
        paths = [change.path for change in done]
        names = [os.fsencode(path).decode(errors="replace") for path in paths]
        return names, workspace.restore(before, paths, self.owner) if paths else None


def _same(one: tree.Entry | None, other: tree.Entry | None) -> bool:
    """Whether two entries hold the same, whenever they were written."""
    if one is None or other is None or one.is_folder or other.is_folder:
        return (one is None) == (other is None) and (one is None or other is None or one.kind == other.kind)
    return (one.kind, one.mode, one.size, one.ref) == (other.kind, other.mode, other.size, other.ref)


def _named(found: Sequence[Process]) -> list[dict[str, Any]]:
    return [{"pid": each.pid, "command": each.command} for each in found[:_TOLD_MAX]]


def captured(
    found: Snapshot, after: int, *, at: int, processes: int | None = None, changed: int | None = None
) -> Entry:  # fmt: skip
    """A snapshot as it is put on record."""
    event = e.WorkspaceCaptured(
        at=at, after=after, root=e.to_text(found.root), files=found.files, size_bytes=found.size_bytes,
        changed=found.changed if changed is None else changed,
        processes=len(found.processes) if processes is None else processes,
    )  # fmt: skip
    values: dict[str, Any] = {"processes": _named(found.processes)} if found.processes else {}
    if found.left_out:
        values["left_out"] = list(found.left_out[:_TOLD_MAX])
    return Entry(event, values or None)


def restored(
    done: Restored, root: e.Digest, because: e.RestoredBecause, *, at: int, step: e.StepId | None = None,
    by: str | None = None, paths: Sequence[str] | None = None, ended: Sequence[Process] = (),
) -> Entry:  # fmt: skip
    """A restore as it is put on record."""
    values: dict[str, Any] = {"written": done.written, "removed": done.removed}
    if done.left:
        values["left"] = list(done.left[:_TOLD_MAX])
    if paths is not None:
        values["paths"] = list(paths)
    if ended:
        values["ended"] = _named(ended)
    before = e.to_text(done.before) if done.before else None
    return Entry(e.WorkspaceRestored(at=at, root=root, because=because, before=before, step=step, by=by), values)


def reverting(ex: Execution) -> Callable[[Effect], Any]:
    """How an effect on the workspace is undone, where its tool does not say."""

    async def revert(effect: Effect) -> int:
        if ex.files is None:
            raise NotDone(f"{ex.run_id}: has no workspace here")
        found = next(each for each in ex.log.ledger.effects if each.key == effect.key and not each.undoes)
        return await ex.files.revert(effect.step, found.started, found.ended if found.status == "happened" else 0)

    return revert


def describe_restore(done: Restored) -> str:
    """The result of a restore, in words."""
    parts = [f"{done.written} written", f"{done.removed} removed"]
    parts += [f"{len(done.left)} left as they are"] if done.left else []
    return f"{', '.join(parts)}; what was there is snapshot {done.before.hex()[:12]}"
