"""Operations on runs through a client: commands with their author and reason, and time travel.

A command on a run that a worker executes takes effect at its next step boundary; the client waits briefly for that.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeVar

from killick.agents.runtime import Runtime
from killick.blocking import Awaits, C, Group, InThread, OnLoop
from killick.client import file_restore, time_travel
from killick.client.external_runs import ClientRuntime
from killick.client.file_restore import Restoration
from killick.client.start import AnyHandle, AsyncHandle, Handle, handle_method
from killick.definitions.agents import AnyAgent
from killick.definitions.tools import TOOLS
from killick.engine import renewals
from killick.engine.control.commands import command
from killick.engine.effects.fork import UNCHANGED, Conditions
from killick.engine.waits import waits
from killick.errors import AnswerRefused, RunUnknown
from killick.history.undo_preview import UndoPreview, undoing
from killick.log.log import Log
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import Erased
from killick.store.protocol import Store
from killick.store.records import ENDED

_LATER: Final = "will be, at its next step boundary, by the worker that holds it"


class Editor(Group[C]):
    """Changes of a run by hand: its context, its unfinished steps, its priority and its notes."""

    def __init__(self, runtime: Runtime, client: C) -> None:
        super().__init__(client)
        self._runtime = runtime

    @InThread
    def set(
        self,
        run: str,
        /,
        *,
        saw: int | None = None,
        by: str | None = None,
        because: str | None = None,
        unset: Sequence[str] = (),
        **changes: Any,
    ) -> str:
        """Changes entries of a run's context; its code sees them when its next step returns. Returns a description.
        Raises ContextStale if the context changed since `saw`, AnswerRefused if the run has ended or its contract
        rejects the change.

        saw      the version of the context that the change is based on
        unset    entries to remove
        changes  the new values, by entry
        """
        if by == "agent":
            raise AnswerRefused(run, "by='agent' is the run itself; give your own name")
        run = alive(self._runtime, run, "set")
        time_travel.refuse_misfit(self._runtime.log, run, changes)
        body = {"command": "set", "set": changes, "unset": list(unset), "saw": saw, "because": because}
        held = send_command(self._runtime, run, by, awaits_holder=True, **body)
        return "changed" if held else "will be changed at its next step boundary, by the worker that holds it"

    @InThread
    def override(self, run: str, step: str, output: Any, *, by: str | None = None, because: str | None = None) -> str:
        """Gives an unfinished step without an open attempt its result, in place of executing it. Returns a description.

        output  the result; for a question, the response

        Finished steps are changed by `rewind` or `fork`. Raises AnswerRefused if the output does not fit the question.
        """
        value = through_codec(output, at="output")
        refuse_answer(self._runtime.log, alive(self._runtime, run, "override"), step, value)
        body = {"command": "override", "step": step, "output": value, "because": because}
        held = send_command(self._runtime, run, by, awaits_holder=True, **body)
        return f"step {step} is given this result" if held else f"step {step} {_LATER}"

    @InThread
    def skip(self, run: str, step: str, *, by: str | None = None, because: str | None = None) -> str:
        """Ends an unfinished step without an open attempt, in place of executing it. Returns a description.

        A sleep ends. A wait with a default takes it. Any other step raises `Skipped` in the agent's code.
        """
        held = send_command(self._runtime, run, by, awaits_holder=True, command="skip", step=step, because=because)
        return f"step {step} is skipped" if held else f"step {step} {_LATER}"

    @InThread
    def retry(self, run: str, step: str | None = None, *, by: str | None = None, because: str | None = None) -> str:
        """Ends the backoff or rate limit of a step now; name the step if several wait. Returns a description."""
        held = send_command(self._runtime, run, by, awaits_holder=True, command="retry", step=step, because=because)
        named = f"step {step}" if step else "the step that waits"
        return f"{named} continues now" if held else f"{named} {_LATER}"

    @InThread
    def note(self, run: str, note: Any, *, by: str | None = None) -> None:
        """Adds a note, any value, to a run's log. Raises RunUnknown, AnswerRefused if it has ended."""
        send_command(self._runtime, run, by, command="note", note=note)

    @InThread
    def prioritize(self, run: str, priority: int, *, by: str | None = None, because: str | None = None) -> None:
        """Changes the priority of a run. Raises RunUnknown, AnswerRefused if it has ended."""
        send_command(self._runtime, run, by, command="prioritize", priority=priority, because=because)


def send_command(runtime: Runtime, run: str, by: str | None, *, awaits_holder: bool = False, **body: Any) -> bool:
    """Returns True if the command is recorded, False if it is in the inbox of a run that a worker holds."""
    run = alive(runtime, run, body["command"])
    notify = partial(runtime.notify, run)
    held = command(runtime.engine, run, body, by=by, awaits_holder=awaits_holder, notify=notify)
    notify()
    return held


def alive(runtime: Runtime, run: str, verb: str) -> str:
    """Returns the latest renewal of a run. Raises AnswerRefused if it has ended."""
    while True:
        run = renewals.latest(runtime.log, run)
        row = runtime.store.index(run)
        if row is None:
            raise RunUnknown(run)
        if row.status not in ENDED:
            return run
        if renewals.successor(runtime.log, run) is None:  # else it was renewed since it was looked up
            raise AnswerRefused(run, f"the run is over ({row.status}); {verb} does nothing to it")


def refuse_answer(log: Log, run: str, step: str, value: Any) -> None:
    """Refuses a response that does not fit the question."""
    state = log.state(run)
    wait = state.fold.facts.waits.get(step)
    if wait is None or wait.name != "ask":
        return
    data = state.data(wait.opened)
    if isinstance(data.get("prompt"), Erased):
        return
    options = data.get("options") or ()
    misfit = waits.misfit(data.get("schema"), value)
    if misfit is None and options and value not in options:
        misfit = f"{value!r} is not one of {', '.join(map(repr, options))}"
    if misfit is not None:
        raise AnswerRefused(run, f"step {step}: {misfit}")


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
        to        another folder, new or empty; by default the run's own, which an agent loaded here must declare, or
                  which you name here
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
