"""Operations on runs through a client: commands with their author and reason, and time travel.

A command on a run that a worker executes takes effect at its next step boundary; the client waits briefly for that.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from killick.blocking import Awaits, InThread, OnLoop
from killick.client import file_restore, time_travel
from killick.client.edits import send_command
from killick.client.external_runs import ClientRuntime
from killick.client.file_restore import Restoration
from killick.client.start import AnyHandle, AsyncHandle, Handle, handle_method
from killick.definitions.agents import AnyAgent
from killick.definitions.tools import TOOLS
from killick.engine.effects.fork import UNCHANGED, Conditions
from killick.history.undo_preview import UndoPreview, undoing
from killick.log import Log
from killick.model import events as e
from killick.store.protocol import Store

R = TypeVar("R")


class Operations:
    """The part of a client that changes runs."""

    def __init__(self, store: Store | ClientRuntime, **options: Any) -> None:
        self.runtime = store if isinstance(store, ClientRuntime) else ClientRuntime(store, **options)
        """The store, the log and the engine, for adapters."""

    @property
    def log(self) -> Log:
        """The event log, which the functions of `killick.history` read."""
        return self.runtime.log

    def __repr__(self) -> str:
        return f"<killick.{type(self).__name__} of {self.runtime.store.place}{', closed' * self.runtime.is_closed}>"

    def _blocking(self, work: Coroutine[Any, Any, R]) -> R:
        return self.runtime.blocking(work)

    def _handle(self, agent: AnyAgent | str, run: str) -> AnyHandle[Any]:
        return (AsyncHandle if isinstance(self, Awaits) else Handle)(self.runtime, agent, run)

    # commands ---------------------------------------------------------------------------------

    @InThread
    def pause(self, run: str, *, by: str | None = None, because: str | None = None) -> None:
        """Pauses a run at its next step, until it is resumed. Raises RunUnknown, AnswerRefused if it has ended."""
        send_command(self.runtime, run, by, command="pause", because=because)

    @InThread
    def cancel(self, run: str, *, compensate: bool = False, by: str | None = None, because: str | None = None) -> None:
        """Cancels a run; it ends when it is next advanced. With `compensate`, its effects are undone. Raises
        RunUnknown, AnswerRefused if it has ended."""
        send_command(self.runtime, run, by, command="cancel", compensate=compensate, because=because)

    @InThread
    def resume(self, run: str, *, by: str | None = None, because: str | None = None) -> str:
        """Resumes a paused, failed or abandoned run; a worker then advances it. Returns a description. Raises
        AnswerRefused if it completed or was cancelled, RunBusy if another process holds it."""
        return time_travel.resumed(self.runtime.engine, run, by=by, because=because)

    # time travel ------------------------------------------------------------------------------

    @InThread
    def rewind(self, run: str, to: str, *, by: str | None = None, because: str | None = None) -> str:
        """Rewinds a run to a position and returns a description. Its effects stay in its ledger, so that they are not
        repeated. Raises BoundaryUnknown, TimeRefused if the run cannot be rewound there.

        to  the position: `4:before`, `4:after`, `@17`, `start`

            kd.rewind("claim_17", "4:before", because="wrong rate")
        """
        result = time_travel.rewound(self.runtime.engine, run, to, by=by, because=because)
        self.runtime.notify(run)
        return result

    @InThread
    def restore(
        self,
        run: str,
        at: str | None = None,
        *,
        snapshot: str | None = None,
        paths: Sequence[str | os.PathLike[str]] = (),
        to: str | os.PathLike[str] | None = None,
        by: str | None = None,
        dry_run: bool = False,
    ) -> Restoration:
        """Restores files of a run's workspace. The run does not move. Raises WorkspaceRefused, BoundaryUnknown.

        at        the position whose files are restored; give this or `snapshot`
        snapshot  the id of a snapshot, in place of a position
        paths     only these paths
        to        another folder, new or empty; by default the run's own
        """
        return file_restore.restored(
            self.runtime.engine, run, at, snapshot=snapshot, paths=paths, to=to, by=by, dry_run=dry_run
        )

    @handle_method
    def fork(
        self,
        run: str,
        at: str = "now",
        *,
        id: str | None = None,  # noqa: A002
        output: Mapping[str, Any] | None = None,
        set: Mapping[str, Any] | None = None,  # noqa: A002
        unset: Sequence[str] = (),
        input: Any = UNCHANGED,  # noqa: A002
        model: str | None = None,
        effects: e.ForkEffects = "recorded",
        workspace: str | os.PathLike[str] | None = None,
        by: str | None = None,
        because: str | None = None,
    ) -> AnyHandle[Any]:
        """Creates a run that shares another run's history up to a position and continues under other conditions.

        at         the position: `6:before`, `6:after`, `@17`, `start`, `now`
        output     new outputs of steps that end at the position, by step
        set        new values of the context, by entry
        unset      entries of the context to remove
        input      the new input
        model      the model that replaces all models
        effects    new effects are asked ("recorded"), executed ("live") or refused ("none"); recorded ones are reused
        workspace  the folder of the fork's files; by default a sibling of the run's folder

        Models and reads are live in a fork. Raises BoundaryUnknown, RunExists if the id is taken, TimeRefused.

            kd.fork("claim_17", "6:before", set={"rate": 3}, effects="none")
        """
        conditions = Conditions(
            output=dict(output or {}),
            set=dict(set or {}),
            unset=tuple(unset),
            input=input,
            model=model,
            effects=effects,
        )
        folder = None if workspace is None else os.fspath(workspace)
        engine = self.runtime.engine
        fork, agent = time_travel.forked(engine, run, at, conditions, id=id, by=by, because=because, workspace=folder)
        self.runtime.notify(fork)
        return self._handle(agent, fork)

    @InThread
    def undoing(self, run: str, step: str) -> UndoPreview:
        """Returns a preview of `undo`: how the effect of a step can be undone, and which steps share it."""
        return undoing(self.runtime.log, run, step, TOOLS)

    @OnLoop
    async def undo(
        self,
        run: str,
        step: str,
        *,
        by: str | None = None,
        because: str | None = None,
        settled: Literal["happened", "not"] | None = None,
    ) -> str:
        """Undoes the effect of one step by its compensation and returns a description. Raises TimeRefused if there is
        nothing to undo, or the outcome is unknown.

        settled  "happened" or "not": the outcome of an unknown compensation, or of one by hand, as a person found out
        """
        return await self.runtime.executor().undo(run, step, by=by, because=because, settled=settled)
