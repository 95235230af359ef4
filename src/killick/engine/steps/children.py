"""Other runs: spawning one, waiting for its result, and sending messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from killick.definitions.agents import AnyAgent
from killick.engine.approval.approvals import intend
from killick.engine.approval.verdicts import PendingVerdict
from killick.engine.context import initial_context
from killick.engine.control.inbox import delivery, sent_id
from killick.engine.divergence import recorded_step, refuse_stopped, replay_outcome
from killick.engine.effects import dedupe
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.observers import trace_here
from killick.engine.renewals import latest
from killick.engine.replay import OVER, RequestedStep
from killick.engine.steps.intention import Intent
from killick.engine.waits.open_wait import Closed
from killick.engine.waits.questions import Question, wait_for
from killick.engine.waits.waits import refuse_own
from killick.errors import ChildFailed, DeliveryRefused, KillickError, RunExists, RunUnknown, StepFailed, ValueRefused
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import digest
from killick.model.facts import Step
from killick.model.failure import Failure
from killick.model.ledger import SENDING
from killick.model.typed import convert
from killick.store.records import FAIR

O = TypeVar("O", covariant=True)  # noqa: E741


class Child(Generic[O]):
    """A run that this run spawned: its `id` and its `agent`."""

    def __init__(self, run: Any, id: str, agent: AnyAgent) -> None:  # noqa: A002
        self._run = run
        self.id = id
        self.agent = agent

    def result(self) -> Awaitable[O]:
        """Waits for the result of the child. Raises ChildFailed if it failed or was cancelled."""
        step: Awaitable[O] = self._run._steps(child_result, self)
        return step

    def __repr__(self) -> str:
        return f"<killick child {self.id}>"


async def spawn(
    ex: Execution, branch: Branch, run: Any, agent: AnyAgent, input: Any, id: str | None,  # noqa: A002
    on_parent_end: Any, priority: int | None,
) -> Child[Any]:  # fmt: skip
    refuse_own(id)
    input = agent.checked(through_codec(input, at="input"))  # noqa: A001
    bound = digest({"agent": agent.name, "input": input, "id": id}, at="input", secret_key=ex.log.secret_key)
    intent = Intent.of("child", agent.name, {"input": input}, bound)
    wanted, over = await _intended(ex, branch, intent, lambda wanted: dedupe.spawned(wanted) is not None)
    if over is not None:
        spawned: e.ChildSpawned = ex.record.event(over.output)
        ex.on_child(ex, spawned.run)
        return Child(run, spawned.run, agent)
    step, child = wanted.step, id or f"{ex.run_id}/{_within_generation(ex, wanted.step)}"
    if ex.has_outside_effects and (adopted := await dedupe.spawned_before(wanted)) is not None:
        child, on_parent_end = adopted.run, adopted.on_parent_end
    else:
        started = e.RunStarted(
            at=ex.now_us(), run=child, agent=agent.name, build=ex.engine.build(agent),
            priority=ex.log.fold.facts.priority if priority is None else priority, parent=ex.run_id, parent_step=step,
            tags=tuple(tag for tag in ex.log.fold.facts.tags if tag.startswith(FAIR)), trace=trace_here(),
            starters=ex.log.fold.facts.starters,
        )  # fmt: skip
        _create(ex, started, agent, input)
        if ex.has_outside_effects:
            ex.run_tree.has_child(child)
    event = e.ChildSpawned(at=ex.now_us(), step=step, run=child, agent=agent.name, on_parent_end=on_parent_end)
    await ex.recorded(ex.write_behind(Entry(event, {"input": input})))
    ex.on_child(ex, child)
    return Child(run, child, agent)


async def _intended(
    ex: Execution, branch: Branch, intent: Intent, was_done: Callable[[PendingVerdict], bool]
) -> tuple[PendingVerdict, Step | None]:
    """A step that is no call: judged, and its intention on record; or the recorded step, if it is over."""
    asked = RequestedStep(intent.sort, intent.name, digest=e.to_text(intent.digest), binding=True)
    wanted = PendingVerdict(ex, branch, branch.number(), intent)
    past = await recorded_step(ex, branch, wanted.step, asked, intent.recording)
    if past is not None and past.status in OVER:
        await replay_outcome(ex, branch, past)
        return wanted, past
    await ex.await_turn()
    await intend(wanted, past, adopts=ex.has_outside_effects and was_done(wanted))
    refuse_stopped(ex, branch, wanted.step)
    return wanted, None


def _within_generation(ex: Execution, step: e.StepId) -> str:
    """The number of a step that other runs know it by; a rewound run takes it again under another one."""
    generation = ex.log.fold.facts.generation
    return f"{step}~{generation}" if generation else step


def _create(ex: Execution, started: e.RunStarted, agent: AnyAgent, input: Any) -> None:  # noqa: A002
    """Create the child's log. An existing one is adopted if it names this step: another process may have created it."""
    log = ex.engine.log
    try:
        born = log.begin(started.run)
        born.append(*first_entries(started, agent, input))
    except RunExists:
        there = log.event(started.run, 1)
        if not isinstance(there, e.RunStarted) or (there.parent, there.parent_step) != (ex.run_id, started.parent_step):
            raise StepFailed(str(started.parent_step), agent.name, describe(RunExists(started.run))) from None


def first_entries(
    started: e.RunStarted, agent: AnyAgent, input: Any, *, document: dict[str, Any] | None = None,  # noqa: A002
) -> list[Entry]:  # fmt: skip
    """How a run's log begins. The document of its context is made here, unless the caller has one."""
    entries = [Entry(started, {"input": input})]
    if document is None:
        document = initial_context(agent)
    if document is not None:
        changed = e.ContextChanged(at=started.at, version=1, whole=True)
        entries.append(Entry(changed, {"document": document, "form": agent.options.form}))
    return entries


async def child_result(ex: Execution, branch: Branch, child: Child[Any]) -> Any:
    def then(closed: Closed) -> tuple[list[Entry], dict[str, Any]]:
        if closed.how != "answered":
            return [], {}
        status = closed.answer["status"]
        values = {"result": closed.answer["result"]} if status == "completed" else {"failure": closed.answer["failure"]}
        return [Entry(e.ChildEnded(at=ex.now_us(), step=step, run=child.id, status=status), values)], {}

    step = branch.position
    ex.on_child(ex, child.id)
    closed = await wait_for(
        ex, branch, Question(waits_for="child", name=child.id, identity={"child": child.id}, then=then)
    )
    answer = closed.answer
    if answer["status"] == "completed":
        returns = child.agent.returns
        return answer["result"] if returns is Any else convert(answer["result"], returns, at=child.id)
    recorded = answer["failure"]
    failure = (
        convert(recorded, Failure, at="failure")
        if recorded is not None
        else Failure.of("killick.errors.RunCancelled", f"{child.id} was cancelled", kind="cancelled")
    )
    raise ChildFailed(step, child.id, failure, run=child.id)


async def send(ex: Execution, branch: Branch, run: str, name: str, body: Any) -> None:
    if name.startswith("killick."):
        raise ValueRefused("name", f"messages named {name!r} are Killick's own; choose another name")
    message = {"run": run, "name": name, "body": body}
    intent = Intent.of("tool", "send", message, digest(message, at="body", secret_key=ex.log.secret_key))
    wanted, over = await _intended(ex, branch, intent, lambda wanted: dedupe.was_done(wanted, SENDING))
    if over is not None or (ex.has_outside_effects and await dedupe.sent_before(wanted)):
        return
    message_id = sent_id(ex.run_id, _within_generation(ex, wanted.step))
    run = latest(ex.engine.log, run)
    sent = delivery(ex.engine.log, run, name, body, id=message_id, by=ex.run_id, at_us=ex.now_us())
    [outcome] = ex.engine.log.store.deliver([sent])
    if isinstance(outcome, RunUnknown | DeliveryRefused):
        await wanted.fail(describe(outcome))
    if isinstance(outcome, KillickError):
        raise outcome
    run = outcome.message.run
    event = e.MessageSent(at=ex.now_us(), step=wanted.step, run=run, name=name, id=message_id)
    await ex.recorded(ex.write_behind(Entry(event, {"body": body})))
    ex.on_message(run)
