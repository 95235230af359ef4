"""Child runs: spawning one, and waiting for its result."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Generic, TypeVar

from killick.definitions.agents import AnyAgent
from killick.engine.approval.approvals import intend
from killick.engine.approval.verdicts import PendingVerdict
from killick.engine.context import initial_context
from killick.engine.divergence import recorded_step, refuse_stopped, replay_outcome
from killick.engine.effects import dedupe
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.observers import trace_here
from killick.engine.replay import OVER, RequestedStep
from killick.engine.steps.intention import Intent
from killick.engine.waits.open_wait import Closed
from killick.engine.waits.questions import Question, wait_for
from killick.engine.waits.waits import refuse_controls
from killick.errors import ChildFailed, RunExists, StepFailed
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import digest
from killick.model.failure import Failure
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
    refuse_controls(id)
    input = agent.checked(through_codec(input, at="input"))  # noqa: A001
    step = branch.number()
    bound = e.to_text(digest({"agent": agent.name, "input": input, "id": id}, at="input", secret_key=ex.log.secret_key))
    claim = RequestedStep("child", agent.name, digest=bound, binding=True)
    past = await recorded_step(ex, branch, step, claim, {"input": input})
    generation = ex.log.fold.facts.generation
    child = id or f"{ex.run_id}/{step}{f'~{generation}' if generation else ''}"
    if past is not None and past.status in OVER:
        await replay_outcome(ex, branch, past)
        spawned: e.ChildSpawned = ex.record.event(past.output)
        ex.on_child(spawned.run)
        return Child(run, spawned.run, agent)
    await ex.await_turn()
    wanted = PendingVerdict(ex, branch, step, Intent.of("child", agent.name, {"input": input}, bound))
    await intend(wanted, past, adopts=ex.has_outside_effects and dedupe.spawned(wanted) is not None)
    refuse_stopped(ex, branch, step)
    if ex.has_outside_effects and (adopted := await dedupe.spawned_before(wanted)) is not None:
        child, on_parent_end = adopted.run, adopted.on_parent_end
    else:
        started = e.RunStarted(
            at=ex.now_us(), run=child, agent=agent.name, build=ex.engine.build(agent),
            priority=ex.log.fold.facts.priority if priority is None else priority, parent=ex.run_id, parent_step=step,
            tags=tuple(tag for tag in ex.log.fold.facts.tags if tag.startswith(FAIR)), trace=trace_here(),
        )  # fmt: skip
        _create(ex, started, agent, input)
        if ex.has_outside_effects:
            ex.run_tree.has_child(child)
    event = e.ChildSpawned(at=ex.now_us(), step=step, run=child, agent=agent.name, on_parent_end=on_parent_end)
    await ex.recorded(ex.write_behind(Entry(event, {"input": input})))
    ex.on_child(child)
    return Child(run, child, agent)


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
    """How a run's log begins; with a document, where its context comes from another run."""
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
    ex.on_child(child.id)
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
