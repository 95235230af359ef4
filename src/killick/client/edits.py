"""`kd.edit`: changes of a run by hand, each a command with its author and reason.

A command on a run that a worker executes takes effect at its next step boundary; the client waits briefly for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from killick.agents.runtime import Runtime
from killick.blocking import C, Group, InThread
from killick.client import time_travel
from killick.engine import renewals
from killick.engine.control.commands import command
from killick.engine.waits import waits
from killick.errors import AnswerRefused, RunUnknown
from killick.log.log import Log
from killick.model.chunks import through_codec
from killick.model.codec import Erased
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
    """The latest renewal of a run; refuses one that has ended."""
    run = renewals.latest(runtime.log, run)
    row = runtime.store.index(run)
    if row is None:
        raise RunUnknown(run)
    if row.status in ENDED:
        raise AnswerRefused(run, f"the run is over ({row.status}); {verb} does nothing to it")
    return run


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
