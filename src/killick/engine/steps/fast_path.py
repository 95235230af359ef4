"""The common step: one coroutine from the call of an async tool to its recorded outcome.

It takes a step that nothing can come between: one branch, nothing left to replay, no limits, no workspace, no observer,
and every contract accepts it at once. Every other step goes through the pipeline, and so does what follows an attempt
that does not simply return. Both write the same events.
"""

from __future__ import annotations

from asyncio import current_task
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from killick.definitions.current import HERE
from killick.definitions.markers import InnerSteps, Key, ToolStep
from killick.definitions.tools import AnyTool
from killick.engine.execution import Branch, Execution
from killick.engine.steps.attempt import Applied, Untouched
from killick.engine.steps.intention import Intent, as_returned
from killick.engine.steps.pipeline import concluded, execute_step, run_step
from killick.engine.steps.step_execution import StepExecution
from killick.errors import LogError, StoreError, ValueRefused
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import STRING_BYTES_MAX
from killick.model.codec import digest, digest_of, flat_json, flat_value
from killick.model.hashing import action_key

if TYPE_CHECKING:
    from killick.engine.approval.contracts_in_force import Verdict

_NOT_PLAIN: Final = object()
_FLAT: Final = frozenset({str, int, bool, type(None)})
"""Types whose values come back from the record as they are."""

_FLAT_BYTES_MAX: Final = STRING_BYTES_MAX - 32
"""Longer values may be chunks."""

_encode: Final = msgspec.json.Encoder().encode


async def call_tool(
    ex: Execution, tool: AnyTool, arguments: dict[str, Any], given: dict[str, Any], *, thread: Branch | None = None
) -> Any:
    """Takes a step that calls a tool. `given` are the arguments that the caller named; the others are defaults.
    `thread` is the branch of blocking code, which waits for the step in its own thread."""
    branch: Any = thread or HERE.get()
    is_fast, verdict = tool.is_plain and is_common(branch, ex), None
    try:
        if is_fast and branch.count < ex.record.last.get("", 0):
            if (value := replayed_value(ex, branch, tool, given)) is not _NOT_PLAIN:
                return value
            is_fast = False
        if is_fast and ex.judge.bound and not ex.has_outside_effects:
            effect: Any = tool.policy.effect
            verdict = ex.judge.accepts(tool.name, effect, arguments, str(branch.count + 1))
            is_fast = verdict is not None
        if not is_fast or ex.has_outside_effects:
            return await run_step(ex, execute_step, intent_of(tool, arguments, given), branch=thread)
        ex.turns.computing -= 1
        if thread is not None:
            thread.applying = current_task()
        try:
            return await _take(ex, branch, tool, arguments, given, verdict)
        finally:
            branch.applying = None
            ex.turns.computing += 1
    except (StoreError, LogError) as failed:
        raise ex.interrupted(ex.log.failure or failed) from failed


async def _take(
    ex: Execution, branch: Branch, tool: AnyTool, arguments: dict[str, Any], given: dict[str, Any],
    verdict: Verdict | None,
) -> Any:  # fmt: skip
    """Intends, applies and records: the whole of a common step."""
    log, name = ex.log, tool.name
    effect: Any = tool.policy.effect
    # Intend: the intention and its attempt are durable before the tool is called.
    step, flat = str(branch.count + 1), flat_json(given)
    hash_ = _digest_of(ex, step, tool, arguments, given) if flat is None else digest_of(flat, log.secret_key)
    branch.count += 1
    now = ex.now_us() if verdict is None else verdict.at
    key = action_key(ex.run_id, step, name, hash_, generation=ex.generation)
    made = _Attempt(ex, branch, tool, arguments, given, hash_, step, key, now)
    started = e.StepStarted(
        at=now, step=step, sort="tool", name=name, digest=e.to_text(hash_), effect=effect, key=key, epoch=log.epoch,
        verdict=None if verdict is None else verdict.event,
    )  # fmt: skip
    ex.check_lease()
    if not ex.is_first_live() and effect == "reads":
        log.append_behind(made.entry(started, verdict))
    else:
        writing = None
        rests_on = verdict.rests_on if verdict is not None else None
        if flat is not None and arguments is given and not rests_on and len(flat) < _FLAT_BYTES_MAX:
            writing = log.begin_step(started, b'{"arguments":%b' % (flat if tool.shape.is_sorted else _encode(given)))
        writing = writing or log.append_begun(made.entry(started, verdict))
        if not writing.is_committed and await log.settled(writing):
            return await made.conclude(Applied(error=Untouched()))
    ex.check_lease()
    # Apply.
    place = ToolStep(ex.run_id, step, 1, Key(key), made.progress)
    inner = place.inner = branch.inner = InnerSteps(step, effect, None, None)
    inner.hosted = ex.hosted
    live = inner.live = None if effect == "reads" else ex.engine.live.begin(ex.run_id, step, name)
    ex.attempts += 1
    try:
        if (stand_in := ex.engine.stand_in) is None:
            applied = await made.touch(place)
        else:
            applied = await stand_in.apply(made.intent(), place, partial(made.touch, place))
    finally:
        if live is not None:
            live.end()
        branch.inner = None
        ex.inner_waits.close(inner)
        ex.attempts -= 1
    # Record: the outcome is committed with the next append, or soon.
    value: Any = applied.value
    kind: Any = value.__class__
    is_flat = applied.error is None and kind in _FLAT and tool.shape.returns in (Any, kind)
    if not is_flat or inner.is_refused or inner.waits or ex.signal or ex.parked:
        return await made.conclude(applied, inner)
    ended = e.AttemptEnded(at=ex.now_us(), step=step, attempt=1, outcome="returned")
    raw = flat_value(value)
    seq = None if raw is None else log.end_step(started, ended, b'{"output":%b' % raw)
    ex.context.see(seq or log.append_behind(Entry(ended, {"output": value})))
    if ex.after_death:
        await ex.barrier()
    branch.answer = None
    return value


def _digest_of(ex: Execution, step: str, tool: AnyTool, arguments: dict[str, Any], given: dict[str, Any]) -> bytes:
    """Returns the digest of the arguments. Raises ValueRefused with the name of the step."""
    try:
        return digest(given, secret_key=ex.log.secret_key)
    except ValueRefused:
        intent_of(tool, arguments, given).classify(step, ex.log.secret_key)
        raise


def is_common(branch: object, ex: Execution) -> bool:
    """Whether the next step of this code can be taken in one way only."""
    return (
        type(branch) is Branch
        and branch.execution is ex
        and not (branch.path or branch.streaming)  # the branches of a gather, and of external code, have a path
        and len(ex.branches) == 1
        and ex.is_unguarded
        and not (ex.signal or ex.parked or ex.hosting or ex.interventions or ex.diverged_at)
        and ex.log.listener is None
        and (branch.thread is not None or current_task() is branch.task)
    )


def replayed_value(ex: Execution, branch: Branch, tool: AnyTool, given: dict[str, Any]) -> Any:
    """Replays a step: returns its recorded value.

    Or _NOT_PLAIN: the pipeline takes a step that did not simply return, and one that differs from its record.
    """
    step = str(branch.count + 1)
    found = ex.record.returned(step)
    if found is None:
        return _NOT_PLAIN
    past, intended, output = found
    try:
        given_digest = e.to_text(digest(given, secret_key=ex.log.secret_key))
    except ValueRefused:
        return _NOT_PLAIN
    if past.name != tool.name or intended.digest != given_digest or intended.identity is not None:
        return _NOT_PLAIN
    value = ex.engine.log.unpacked(ex.run_id, output, at=past.output).get("output")
    branch.count += 1
    branch.answer = None
    ex.mark_replayed(past.ended)
    return as_returned(value, tool.shape.returns, step, tool.name)


def intent_of(tool: AnyTool, arguments: dict[str, Any], given: dict[str, Any]) -> Intent:
    """Returns the call as the pipeline takes it."""
    shape = tool.shape
    return Intent("tool", tool.name, tool.fn, shape, arguments, tool.policy, returns=shape.returns, given=given)


class _Attempt(msgspec.Struct, frozen=True):
    """The first attempt of a step, for the pipeline to continue."""

    ex: Execution
    branch: Branch
    tool: AnyTool
    arguments: dict[str, Any]
    given: dict[str, Any]
    digest: bytes
    step: e.StepId
    key: str
    began_us: int

    def entry(self, started: e.StepStarted, verdict: Verdict | None) -> Entry:
        """The event of its intention, with all that the verdict rests on."""
        return Entry(started, {"arguments": self.arguments, **(verdict.rests_on if verdict is not None else {})})

    async def touch(self, place: ToolStep) -> Applied:
        token = HERE.set(place)
        try:
            return Applied(await self.tool.fn(**self.arguments, **dict.fromkeys(self.tool.shape.injected, place.key)))
        except BaseException as error:
            return Applied(error=error)
        finally:
            HERE.reset(token)

    def intent(self) -> Intent:
        intent = intent_of(self.tool, self.arguments, self.given)
        effect: Any = self.tool.policy.effect
        intent.digest, intent.effect = self.digest, effect
        return intent

    async def conclude(self, applied: Applied, inner: InnerSteps | None = None) -> Any:
        """Lets the pipeline record the attempt's outcome and decide the next step."""
        if self.ex.signal is not None:
            self.ex.stirred.set()  # the executor waits for open attempts to end
        execution = self.execution()
        return await concluded(execution, execution.continue_after(applied, inner))

    def execution(self) -> StepExecution:
        execution = StepExecution(self.ex, self.branch, self.step, self.intent(), None)
        execution.written()
        execution.made, execution.key, execution.began_us = 1, self.key, self.began_us
        execution.progress = self.ex.progress.get(self.step)
        return execution

    def progress(self, value: Any) -> None:
        self.execution().record_progress(value)
