"""What people do to runs through a client: commands, each with who and why, and what is done to a run's time.

A command on a run that somebody is at lands at its next step boundary; the client waits a moment to see it land.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from killick.agents.runtime import Runtime
from killick.blocking import Both, OnLoop
from killick.client import file_restore, time_travel
from killick.client.file_restore import Restoration
from killick.client.start import Handle
from killick.definitions.tools import TOOLS
from killick.engine import renewals
from killick.engine.commands import command
from killick.engine.effects.fork import UNCHANGED, Conditions
from killick.engine.steps import waits
from killick.errors import AnswerRefused, RunUnknown
from killick.history.undo_preview import Undoing, undoing
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import Erased
from killick.store.protocol import ENDED

_LATER: Final = "will be, at its next step boundary, by whoever is at it"


class Operations(Runtime):
    """The part of a client that changes runs."""

    # commands ---------------------------------------------------------------------------------

    @Both
    def pause(self, run: str, *, by: str | None = None, because: str | None = None) -> None:
        """Stop a run at its next step, until somebody resumes it."""
        self._command(run, {"command": "pause", "because": because}, by)

    @Both
    def cancel(self, run: str, *, compensate: bool = False, by: str | None = None, because: str | None = None) -> None:
        """End a run; with `compensate`, undo what it did. It ends when it is advanced next."""
        self._command(run, {"command": "cancel", "compensate": compensate, "because": because}, by)

    @Both
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
        """Change entries of a run's context; its code sees that when its next step returns. Says what it did.

        With `saw`, the version that the change rests on: ContextStale when somebody changed it since.
        """
        if by == "agent":
            raise AnswerRefused(run, "by='agent' is the run itself; say who you are")
        run = self._alive(run, "set")
        time_travel.refuse_misfit(self.log, run, changes)
        body = {"command": "set", "set": changes, "unset": list(unset), "saw": saw, "because": because}
        held = self._command(run, body, by, patient=True)
        return "changed" if held else "will be changed at its next step boundary, by whoever is at it"

    @Both
    def prioritize(self, run: str, priority: int, *, by: str | None = None, because: str | None = None) -> None:
        """Give a run another priority."""
        self._command(run, {"command": "prioritize", "priority": priority, "because": because}, by)

    @Both
    def note(self, run: str, note: Any, *, by: str | None = None) -> None:
        """Put a remark into a run's record, for whoever reads it."""
        self._command(run, {"command": "note", "note": note}, by)

    @Both
    def override(self, run: str, step: str, output: Any, *, by: str | None = None, because: str | None = None) -> str:
        """Give a step that is not over, and of which nothing is open, its result instead of doing it. Says what it did.

        To a question it is a response. What is over is changed by `rewind` or `fork`.
        """
        value = through_codec(output, at="output")
        self._refuse_answer(self._alive(run, "override"), step, value)
        body = {"command": "override", "step": step, "output": value, "because": because}
        held = self._command(run, body, by, patient=True)
        return f"step {step} is given this result" if held else f"step {step} {_LATER}"

    def _refuse_answer(self, run: str, step: str, value: Any) -> None:
        """A response that a question plainly does not take."""
        state = self.log.state(run)
        wait = state.fold.facts.waits.get(step)
        if wait is None or wait.name != "ask":
            return
        told = state.data(wait.opened)
        if isinstance(told.get("prompt"), Erased):
            return
        options = told.get("options") or ()
        misfit = waits.misfit(told.get("schema"), value)
        if misfit is None and options and value not in options:
            misfit = f"{value!r} is not one of {', '.join(map(repr, options))}"
        if misfit is not None:
            raise AnswerRefused(run, f"step {step}: {misfit}")

    @Both
    def skip(self, run: str, step: str, *, by: str | None = None, because: str | None = None) -> str:
        """End a step that is not over, and of which nothing is open, without doing it. Says what it did.

        A sleep is over, a wait with a default takes that; the code of any other step meets `killick.Skipped`.
        """
        held = self._command(run, {"command": "skip", "step": step, "because": because}, by, patient=True)
        return f"step {step} is skipped" if held else f"step {step} {_LATER}"

    @Both
    def retry(self, run: str, step: str | None = None, *, by: str | None = None, because: str | None = None) -> str:
        """Let a step that sits out a backoff or a rate limit go on now; several must be named. Says what it did."""
        held = self._command(run, {"command": "retry", "step": step, "because": because}, by, patient=True)
        named = f"step {step}" if step else "the step that waits"
        return f"{named} goes on now" if held else f"{named} {_LATER}"

    def _command(self, run: str, body: dict[str, Any], by: str | None, *, patient: bool = False) -> bool:
        """True: it is on record. False: it is on its way to whoever is at the run."""
        run = self._alive(run, body["command"])
        held = command(self.engine, run, body, by=by, patient=patient, tell=lambda: self._notify(run))
        self._notify(run)
        return held

    def _alive(self, run: str, verb: str) -> str:
        """The run as which a run goes on; one that is over is let be."""
        run = renewals.latest(self.log, run)
        row = self.store.index(run)
        if row is None:
            raise RunUnknown(run)
        if row.status in ENDED:
            raise AnswerRefused(run, f"the run is over ({row.status}); {verb} does nothing to it")
        return run

    @Both
    def resume(self, run: str, *, by: str | None = None, because: str | None = None) -> str:
        """Let a paused, failed or orphaned run go on; says what it did. It is due then: advance it to see it go."""
        return time_travel.resumed(self.engine, run, by=by, because=because)

    # time -------------------------------------------------------------------------------------

    @Both
    def rewind(self, run: str, to: str, *, by: str | None = None, because: str | None = None) -> str:
        """Take a run back to a place, such as `4:before`; says what it did. What it did to the world stays on its
        ledger: the same action is not done again, whatever its new wording."""
        told = time_travel.rewound(self.engine, run, to, by=by, because=because)
        self._notify(run)
        return told

    @Both
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
        """Bring the files of a run's workspace back to a place, or to a snapshot by its id: all, or those at some
        paths; into its own folder, or into another. The run stays where it is."""
        return file_restore.restored(
            self.engine, run, at, snapshot=snapshot, paths=paths, to=to, by=by, dry_run=dry_run
        )

    @Both
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
    ) -> Handle[Any]:
        """A new run that shares another one's time up to a place, and goes on from there under other conditions.

        `output` gives steps that had just ended another output, `set` and `unset` change the context, `input` is
        another input, `model` is asked instead of others. Models and reads are real in a fork; what it would do to the
        world is adopted from what was done, else asked ("recorded"), done ("live") or refused ("none"). Where the run
        has a workspace, the fork has its files as they were, in a folder of its own: `workspace`, or one beside it.
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
        fork = time_travel.forked(self.engine, run, at, conditions, id=id, by=by, because=because, workspace=folder)
        self._notify(fork)
        return Handle(self, self.log.state(fork).agent, fork)

    @Both
    def undoing(self, run: str, step: str) -> Undoing:
        """What undoing the effect of one step would mean: how it can be undone, and which steps share it."""
        return undoing(self.log, run, step, TOOLS)

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
        """Undo the effect of one step by its compensation, and nothing else; says what it did.

        `settled` is for an undoing that began and whose outcome is not known, and for what was undone by hand.
        """
        return await self.executor().undo(run, step, by=by, because=because, settled=settled)
