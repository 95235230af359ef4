"""The workflow of a run, in Temporal's sandbox: it decides from what activities returned, and touches nothing else.

It knows a run's outcome and its open waits: a turn of the run is an activity, a wait is a timer. So its history grows
with the number of waits, not with the data.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from killick.adapters.engines.commands import refusal_of
    from killick.adapters.engines.turns import TurnOutcome
    from killick.engine.waits.waits import misfit, refusal

CREATE: Final = "killick.create"
ADVANCE: Final = "killick.advance"
COMMAND: Final = "killick.command"
WAKE: Final = "killick.wake"

AGENT: Final = SearchAttributeKey.for_keyword("KillickAgent")
STATUS: Final = SearchAttributeKey.for_keyword("KillickStatus")
WAITING_FOR: Final = SearchAttributeKey.for_keyword_list("KillickWaitingFor")
"""For each open wait its kind, its name, and the people and roles that are asked."""

SEARCH: Final = (AGENT, STATUS, WAITING_FOR)
_LONGEST: Final = timedelta(days=365)
"""The maximum length of a turn. A lost one is detected by its missing heartbeat, long before."""

_SHORT: Final = timedelta(seconds=10)
"""The maximum length of a command. One whose worker died is detected then; a repetition counts once."""
_AGAIN: Final = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=60))


@dataclass(frozen=True)
class EngineSettings:
    """The settings of the worker that created a workflow's run."""

    heartbeat_seconds: float
    is_searchable: bool
    """Whether the namespace has Killick's search attributes."""


@workflow.defn(dynamic=True)
class RunWorkflow:
    """A run as Temporal sees it: the type is the agent's name, the id is the run's, the argument is the input."""

    def __init__(self) -> None:
        self._woken = 0
        self._settings: EngineSettings | None = None
        self._outcome: TurnOutcome | None = None
        self._is_turning = False
        self._shown: tuple[str, tuple[str, ...]] | None = None
        self._commands = asyncio.Lock()

    @workflow.run
    async def run(self, args: Sequence[RawValue]) -> Any:
        """Runs until the run has ended. Cancelling the workflow cancels its run, which then ends in its own way."""
        if len(args) > 1:
            raise ApplicationError("an agent takes one input; put several into an object", non_retryable=True)
        given = workflow.payload_converter().from_payload(args[0].payload) if args else None
        cancelled = False
        work = asyncio.create_task(self._until_ended(given))
        while True:
            try:
                ended = await asyncio.shield(work)
                break
            except asyncio.CancelledError:
                if self._settings is None:
                    work.cancel()
                    raise
                cancelled = True
                await self._obey("cancel", {"because": "its workflow was cancelled"})
        await workflow.wait_condition(workflow.all_handlers_finished)
        if ended.status == "cancelled" and cancelled:
            raise asyncio.CancelledError
        if ended.error is not None:
            kind, message = ended.error
            raise ApplicationError(message, type=kind, non_retryable=True)
        return ended.result

    # messages ---------------------------------------------------------------------------------

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        """Signals an outside event. The run finds it in its inbox."""
        self._woken += 1

    @workflow.signal(dynamic=True)
    async def send(self, name: str, args: Sequence[RawValue]) -> None:
        """A message to the run: `run.wait(name)` returns the signal's argument."""
        body = workflow.payload_converter().from_payload(args[0].payload) if args else None
        try:
            await self._obey("send", {"name": name, "body": body})
        except ApplicationError as refused:  # a signal has no caller to tell
            workflow.logger.warning("signal %s: %s", name, refused.message)

    @workflow.update
    async def answer(self, given: dict[str, Any]) -> None:
        """Answers an open question: `verb`, and where they apply `value`, `step`, `by` and `comment`."""
        await self._obey("answer", given)

    @workflow.update
    async def pause(self, given: dict[str, Any]) -> None:
        """Pauses the run at its next step: `by`, `because`."""
        await self._obey("pause", given)

    @workflow.update
    async def resume(self, given: dict[str, Any]) -> None:
        """Resumes a paused run: `by`, `because`."""
        await self._obey("resume", given)

    @answer.validator
    def _check_answer(self, given: dict[str, Any]) -> None:
        # While a turn is under way, the store alone knows the open questions.
        waits = None if self._is_turning or self._outcome is None else self._outcome.waits
        why = refusal_of("answer", given) or (None if waits is None else refused_answer(waits, given))
        if why is not None:
            raise ApplicationError(why, type="AnswerRefused", non_retryable=True)

    @workflow.query
    def state(self) -> TurnOutcome | None:
        """Returns the run's outcome after its last turn."""
        return self._outcome

    async def _obey(self, command: str, given: Mapping[str, Any]) -> None:
        """Carries out a command in the store, one at a time: messages keep their order."""
        request = str(workflow.uuid4())
        async with self._commands:
            await workflow.wait_condition(lambda: self._settings is not None)
            try:
                await workflow.execute_activity(
                    COMMAND,
                    args=[workflow.info().workflow_id, command, given, request],
                    start_to_close_timeout=_SHORT,
                    retry_policy=_AGAIN,
                    summary=command,
                )
            except ActivityError as failed:
                raise failed.cause or failed from None

    # turns ------------------------------------------------------------------------------------

    async def _until_ended(self, given: Any) -> TurnOutcome:
        info = workflow.info()
        settings = await workflow.execute_activity(
            CREATE,
            args=[info.workflow_type, info.workflow_id, given],
            result_type=EngineSettings,
            start_to_close_timeout=_SHORT,
            retry_policy=_AGAIN,
        )
        self._settings = settings
        while True:
            seen = self._woken
            self._show("running", ())
            outcome = await self._turn(settings)
            self._show(outcome.status, waiting_for(outcome.waits))
            if outcome.has_ended:
                return outcome
            if outcome.wait_seconds != 0.0:
                workflow.set_current_details(details(outcome))
                seconds = outcome.wait_seconds
                with contextlib.suppress(TimeoutError):
                    await workflow.wait_condition(
                        partial(self._is_woken, seen), timeout=None if seconds is None else timedelta(seconds=seconds)
                    )
            if workflow.info().is_continue_as_new_suggested():
                await workflow.wait_condition(workflow.all_handlers_finished)
                workflow.continue_as_new(args=[])  # the store has the input

    async def _turn(self, settings: EngineSettings) -> TurnOutcome:
        at = "" if self._outcome is None or self._outcome.step is None else f"from step {self._outcome.step}"
        self._is_turning = True
        try:
            self._outcome = await workflow.execute_activity(
                ADVANCE,
                workflow.info().workflow_id,
                task_queue=None if self._outcome is None else self._outcome.queue,
                result_type=TurnOutcome,
                start_to_close_timeout=_LONGEST,
                heartbeat_timeout=timedelta(seconds=settings.heartbeat_seconds),
                retry_policy=_AGAIN,
                summary=at,
            )
        finally:
            self._is_turning = False
        return self._outcome

    def _is_woken(self, seen: int) -> bool:
        return self._woken != seen

    def _show(self, status: str, waits: tuple[str, ...]) -> None:
        """Updates the search attributes that changed."""
        before, self._shown = self._shown, (status, waits)
        if self._settings is None or not self._settings.is_searchable or before == self._shown:
            return
        made = [] if before else [AGENT.value_set(workflow.info().workflow_type)]
        workflow.upsert_search_attributes([*made, STATUS.value_set(status), WAITING_FOR.value_set(waits)])


def waiting_for(waits: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the words by which the waits of a run are searched."""
    return tuple(sorted({word for each in waits for word in (each["kind"], each["name"], *each["to"]) if word}))


def details(outcome: TurnOutcome) -> str:
    """Returns the text for Temporal's UI about a run that waits."""
    lines = [f"{outcome.status} at step {outcome.step}"]
    for each in outcome.waits:
        asked = f", asked of {', '.join(each['to'])}" if each["to"] else ""
        how = f"; update `answer` with a `verb`: {', '.join(each['verbs'])}" if each["verbs"] else ""
        lines.append(f"- step {each['step']}, {each['kind']}{asked}: {each.get('prompt') or each['name']}{how}")
    return "\n".join(lines)


def refused_answer(waits: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str | None:
    """Returns why an answer fits no open question, or None. The store checks who answers."""
    asked = [each for each in waits if each["verbs"] and given.get("step") in (None, each["step"])]
    if len(asked) != 1:
        steps = ", ".join(str(each["step"]) for each in asked)
        return f"several questions are open; name the step: {steps}" if asked else "there is no such question"
    [wait] = asked
    verb, value = given["verb"], given.get("value")
    if (why := refusal(wait["verbs"], wait.get("options") or (), verb, value)) is not None:
        return why
    if verb in ("edit", "respond") and value is None:
        return f"{verb!r} needs a value"
    return misfit(wait.get("schema"), value) if verb == "respond" else None
