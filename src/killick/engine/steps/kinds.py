"""Every step that is no call: decisions, waits, children, messages, and what is drawn or noted between steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, NoReturn, TypeVar
from uuid import UUID

import msgspec

from killick.contracts.contract import Approval
from killick.contracts.policy_input import UPDATE
from killick.definitions.agents import AnyAgent
from killick.definitions.policy import Duration
from killick.engine.approval import approvals
from killick.engine.approval.contracts_in_force import judge_change, named
from killick.engine.approval.verdicts import PendingVerdict, failed, rejection, stop_looping
from killick.engine.context import initial_context
from killick.engine.divergence import agree, refuse_gap, until_cancelled
from killick.engine.effects import dedupe
from killick.engine.effects.dedupe import WantedStep
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.inbox import SAID, body_of, delivery
from killick.engine.interventions import skip_failure
from killick.engine.observers import trace_here
from killick.engine.replay import OVER, RequestedStep
from killick.engine.steps.intention import Intent, claim_text
from killick.engine.steps.waits import (
    Answer,
    binding,
    question_verbs,
    raise_if_intervened,
    refuse_controls,
    schema_of,
    until,
)
from killick.engine.waiter import Closed, Escalation, Intervened, Waiter
from killick.errors import ChildFailed, KillickError, RunExists, RunUnknown, StepFailed, ValueRefused, WaitExpired
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import digest
from killick.model.failure import Failure
from killick.model.fold import Step
from killick.model.retry import seconds
from killick.model.typed import convert

O = TypeVar("O", covariant=True)  # noqa: E741

MISSING: Final[Any] = msgspec.UNSET
"""No default was given."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


# decisions, and what is noted between steps -------------------------------------------------------


async def decided(
    ex: Execution,
    branch: Branch,
    question: str,
    choice: Any,
    options: Sequence[Any] | None,
    because: str | None,
    by: str,
) -> Any:
    step = branch.number()
    past = ex.record.step(step)
    told = through_codec({"question": question, "options": options, "choice": choice, "because": because})
    if past is None:
        await refuse_gap(ex, branch, step, f"decision {question!r}")
        await ex.turn()
        await ex.recorded(ex.behind(Entry(e.DecisionMade(at=ex.now_us(), step=step, by=by), told)))
        return choice if isinstance(choice, str | int | float | bool | None) else _as(choice, told["choice"])
    await agree(ex, branch, past, RequestedStep(sort="decision", name="decision"), told)
    recorded = ex.record.data(past.output)
    if recorded != told:
        _drift(ex, step, recorded, told)
    await _replayed(ex, branch, past)
    return _as(choice, recorded["choice"])


def _as(like: Any, value: Any) -> Any:
    """A recorded choice as the type that the code's own one has."""
    return value if type(like) in (dict, list, tuple, type(None)) else convert(value, type(like), at="choice")


def _drift(ex: Execution, step: e.StepId, recorded: Any, found: Any) -> None:
    text = e.to_text(digest(found))
    noted = ex.record.of(step, e.StepDrifted)
    if not noted or noted[-1][1].digest != text:
        event = e.StepDrifted(at=ex.now_us(), step=step, digest=text)
        ex.behind(Entry(event, {"recorded": recorded, "found": found}))


async def plan(ex: Execution, branch: Branch, stages: tuple[str, ...]) -> None:
    if ex.record.take(branch.position, "plan.made") is None:
        ex.behind(Entry(e.PlanMade(at=ex.now_us(), stages=stages, step=branch.position)))


async def at(ex: Execution, branch: Branch, stage: str) -> None:
    if ex.record.take(branch.position, "plan.reached") is None:
        ex.behind(Entry(e.PlanReached(at=ex.now_us(), stage=stage, step=branch.position)))


async def note(ex: Execution, branch: Branch, note: Any) -> None:
    if ex.record.take(branch.position, "note.made") is None:
        ex.behind(Entry(e.NoteMade(at=ex.now_us(), step=branch.position), {"note": note}))


async def update(ex: Execution, branch: Branch, changes: Mapping[str, Any]) -> None:
    seen = ex.record.take_first(branch.position, "context.changed", "context.refused")
    saw = ex.context.version
    if seen is not None:
        recorded = ex.record.event(seen)
        if isinstance(recorded, e.ContextRefused):
            raise _refused(branch, ex.record.data(seen))
        ex.context.update(changes)
        ex.context.version = recorded.version
        return
    version = ex.log.fold.facts.context_version
    verdict = judge_change(ex.judge, through_codec(dict(changes)), (), by="agent", step=branch.position)
    if verdict is not None and verdict.ruling.ruling == "reject":
        told = {"set": through_codec(dict(changes)), "failure": rejection(verdict.ruling, verdict.contract)}
        refused = e.ContextRefused(
            at=ex.now_us(), version=version, saw=saw, step=branch.position, verdict=verdict.event
        )
        ex.behind(*ex.judge.unbound(), Entry(refused, {**told, **verdict.rests_on}))
        stop_looping(ex)
        raise _refused(branch, told)
    kept = ex.context.update(changes)
    event = e.ContextChanged(at=ex.now_us(), version=version + 1, saw=saw, step=branch.position)
    if verdict is None:
        ex.behind(Entry(event, {"set": kept, "unset": []}))
    else:
        event = msgspec.structs.replace(event, verdict=verdict.event)
        ex.behind(*ex.judge.unbound(), Entry(event, {"set": kept, "unset": [], **verdict.rests_on}))
    ex.context.version = version + 1


def _refused(branch: Branch, data: Mapping[str, Any]) -> StepFailed:
    return failed(branch.position, UPDATE, convert(data["failure"], Failure, at="failure"))


async def heard(ex: Execution, branch: Branch) -> list[Any]:
    """On replay what was heard here then; live what waits in the inbox now."""
    said: list[Any] = []
    while (seq := ex.record.take(branch.position, "message.taken", SAID)) is not None:
        said.append(ex.record.data(seq)["body"])
    if said or ex.record.goes_on(branch.path, branch.count):
        return said
    for message in ex.engine.log.store.inbox(ex.run_id, name=SAID):
        if message.number in ex.took:
            continue
        ex.took.add(message.number)
        body = body_of(ex.engine.log, message)
        taken = e.MessageTaken(
            at=ex.now_us(), message=message.number, name=SAID, id=message.id, step=branch.position, by=message.by
        )
        ex.behind(Entry(taken, {"body": body}), takes=(message.number,))
        said.append(body)
    return said


# what is drawn ------------------------------------------------------------------------------------


def _drawn(ex: Execution, branch: Branch, name: str, draw: Callable[[], Any]) -> Any:
    seq = ex.record.take(branch.position, "fact.drawn", name)
    if seq is not None:
        return ex.record.data(seq)["value"]
    value = draw()
    ex.behind(Entry(e.FactDrawn(at=ex.now_us(), name=name, step=branch.position), {"value": value}))
    return value


def now(ex: Execution, branch: Branch) -> datetime:
    us: int = _drawn(ex, branch, "now", ex.now_us)
    return _EPOCH + timedelta(microseconds=us)


def uuid(ex: Execution, branch: Branch) -> UUID:
    drawn: UUID = _drawn(ex, branch, "uuid", lambda: UUID(bytes=ex.engine.ids.key()[:16], version=4))
    return drawn


def random(ex: Execution, branch: Branch) -> float:
    drawn: float = _drawn(ex, branch, "random", ex.engine.ids.fraction)
    return drawn


def patched(ex: Execution, branch: Branch, name: str) -> bool:
    """The first answer counts for the whole run: code before and after must agree on which way it went."""
    known = ex.patches.get(name)
    if known is None:
        marked = ex.record.take(branch.position, "fact.drawn", f"patched:{name}") is not None
        if not marked and not ex.record.goes_on(branch.path, branch.count):
            ex.behind(Entry(e.FactDrawn(at=ex.now_us(), name=f"patched:{name}", step=branch.position)))
            marked = True
        known = ex.patches[name] = marked
    return known


# waits --------------------------------------------------------------------------------------------


class Question(msgspec.Struct, kw_only=True):
    """A wait that is a step of its own: what it is for, and what it tells people."""

    waits_for: e.WaitFor
    name: str
    identity: Any = None
    to: tuple[str, ...] = ()
    deadline: int | None = None
    told: dict[str, Any] = {}
    then: Any = None
    fits: Any = None
    need: int = 1
    rounds: tuple[Escalation, ...] = ()
    may: list[str] | None = None

    def values(self, turn: int = 0) -> dict[str, Any]:
        """What is put on record of it: who may answer, after `turn` others did not, is no part of what is asked."""
        may = self.rounds[turn - 1].may if turn else self.may
        return self.told if may is None else {**self.told, "may": list(may)}

    skippable: bool = False
    """Whether the code can do without what it waits for."""


async def _waited(ex: Execution, branch: Branch, asked: Question) -> Closed:
    """A wait as a step, and how it ended. Skipped: somebody did not want it waited for, and it has no default."""
    try:
        closed = await _until_over(ex, branch, asked)
    except Intervened as done:
        await ex.recorded(done.seq)
        closed = done.closed
    if closed.how == "skipped" and not asked.skippable:
        raise failed(branch_step(branch), asked.name, skip_failure(closed.by, closed.comment))
    return closed


async def _until_over(ex: Execution, branch: Branch, asked: Question) -> Closed:
    """On record before anybody can answer it, and over by what is on record."""
    step = branch.number()
    bound = e.to_text(digest(asked.identity)) if asked.identity is not None else None
    claim = RequestedStep(sort="wait", name=asked.name, digest=bound, binding=bound is not None)
    past = ex.record.step(step)
    if past is not None:
        await agree(ex, branch, past, claim, asked.told)
        if past.status in OVER:
            return await _closed(ex, branch, past)
    else:
        await refuse_gap(ex, branch, step, str(claim))
    await ex.turn()
    raise_if_intervened(ex, step)
    facts = ex.log.fold.facts
    wait = facts.waits.get(step) if past is not None else None
    if branch.stopped is not None:
        if past is not None:
            ex.behind(Entry(e.WaitClosed(at=ex.now_us(), step=step, how="cancelled")))
        raise branch.stopped
    if wait is None:
        now_us = ex.now_us()
        answer = binding(ex.run_id, facts.generation, step, asked.waits_for, identity=asked.identity, **asked.told)
        intended = e.StepIntended(
            at=now_us, step=step, sort="wait", name=asked.name, digest=bound, guest=branch.guest, within=branch.within,
        )  # fmt: skip
        opened = e.WaitOpened(
            at=now_us, step=step, waits_for=asked.waits_for, name=asked.name, to=asked.to, deadline=asked.deadline,
            digest=answer if asked.waits_for == "answer" else None, need=asked.need,
        )  # fmt: skip
        question = Entry(opened, asked.values())
        entries = [question] if past is not None else [Entry(intended), question]
        written = await ex.write(*entries)
        waiter = _waiter(step, asked, opened, written.seq)
        if written.cancelled:
            await ex.still_wanted()
            await _cancelled(ex, waiter)
        if branch.stopped is not None and ex.signal is None:
            ex.behind(Entry(e.WaitClosed(at=ex.now_us(), step=step, how="cancelled")))
    else:
        waiter = _waiter(step, asked, ex.record.event(wait.opened), wait.opened, wait.votes)
    ex.refuse(branch)
    closed = await _closing(ex, branch, waiter)
    if closed.how == "cancelled":
        ex.refuse(branch)
    await ex.recorded(closed.seq)
    return closed


async def _closing(ex: Execution, branch: Branch, waiter: Waiter) -> Closed:
    try:
        return await until(ex, branch, waiter)
    except asyncio.CancelledError:
        await ex.still_wanted()
        ex.refuse(branch)
        if ex.is_outside:
            raise  # what was asked is asked still, and answered when somebody comes for it again
        return await _cancelled(ex, waiter)


def _waiter(step: e.StepId, asked: Question, opened: e.WaitOpened, at: int, votes: tuple[str, ...] = ()) -> Waiter:
    return Waiter(
        step, asked.waits_for, name=asked.name, deadline=opened.deadline, digest=opened.digest, opened=at,
        then=asked.then, fits=asked.fits, asked=Entry(opened, asked.values(opened.round)), need=opened.need,
        votes=votes, rounds=asked.rounds[opened.round :],
    )  # fmt: skip


async def _cancelled(ex: Execution, waiter: Waiter) -> NoReturn:
    """The agent's own code gave up waiting."""
    event = e.WaitClosed(at=ex.now_us(), step=waiter.step, how="cancelled")
    await ex.recorded(ex.behind(Entry(event)))
    raise asyncio.CancelledError


async def _closed(ex: Execution, branch: Branch, past: Step) -> Closed:
    await _replayed(ex, branch, past)
    event = ex.record.event(past.output)
    data = ex.record.data(past.output)
    if isinstance(event, e.StepOverridden):
        return Closed(past.output, "answered", event.by, data.get("output"))
    return Closed(past.output, event.how, event.by, data.get("answer"), data.get("comment"))


async def _replayed(ex: Execution, branch: Branch, past: Step) -> None:
    """A recorded outcome, when its turn comes."""
    await ex.turn(past.ended)
    if past.status == "cancelled":
        if branch.stopped is not None:
            ex.played(past.ended)
            raise branch.stopped
        await until_cancelled(ex, past)
    ex.played(past.ended)


def _deadline(ex: Execution, timeout: Duration | None) -> int | None:
    return None if timeout is None else ex.now_us() + round(seconds(timeout) * 1_000_000)


async def ask(
    ex: Execution,
    branch: Branch,
    prompt: str,
    to: str | Sequence[str],
    timeout: Duration | None,
    default: Any,
    options: Sequence[Any] | None,
    returns: Any,
    need: int = 1,
    escalate: Sequence[tuple[str | Sequence[str], Duration | None]] = (),
) -> Answer:
    verbs = question_verbs(options is not None, returns is not Any)
    told: dict[str, Any] = {"prompt": prompt, "verbs": verbs}
    if options is not None:
        told["options"] = list(options)
    if default is not MISSING:
        told["default"] = default
    if returns is not Any:
        told["schema"] = schema_of(returns)
    people = ex.judge.people(None)
    asked = Approval((to,) if isinstance(to, str) else to, need=need, timeout=timeout, escalate=escalate)

    def fits(kind: str, value: Any) -> Any:
        return convert(value, returns, at="answer")

    question = Question(
        waits_for="answer",
        name="ask",
        identity={"prompt": prompt},
        to=asked.to,
        deadline=_deadline(ex, asked.timeout),
        told=told,
        fits=None if returns is Any else fits,
        need=asked.need,
        may=named(people, asked.to),
        rounds=tuple(Escalation(each.to, each.timeout, named(people, each.to)) for each in asked.escalate),
        skippable=default is not MISSING,
    )
    closed = await _waited(ex, branch, question)
    if closed.how in ("expired", "skipped"):
        if default is MISSING:
            raise WaitExpired(ex.run_id, branch_step(branch), prompt)
        kind = default if default in verbs else "respond"
        return Answer(kind=kind, value=None if kind == default else default, expired=True)
    value = closed.answer.get("value")
    if returns is not Any and closed.answer["kind"] in ("edit", "respond"):
        value = convert(value, returns, at="answer")
    return Answer(kind=closed.answer["kind"], value=value, by=closed.by, comment=closed.comment)


def branch_step(branch: Branch) -> str:
    """The step that a branch took last."""
    return f"{branch.path}.{branch.count}" if branch.path else str(branch.count)


async def wait(ex: Execution, branch: Branch, name: str, timeout: Duration | None, default: Any, returns: Any) -> Any:
    question = Question(
        waits_for="event", name=name, identity={"event": name}, deadline=_deadline(ex, timeout),
        skippable=default is not MISSING,
    )  # fmt: skip
    closed = await _waited(ex, branch, question)
    if closed.how in ("expired", "skipped"):
        if default is MISSING:
            raise WaitExpired(ex.run_id, branch_step(branch), name)
        return default
    return convert(closed.answer, returns, at=name) if returns is not Any else closed.answer


async def sleep(ex: Execution, branch: Branch, for_seconds: float | None, until_moment: datetime | None) -> None:
    if until_moment is not None:
        if until_moment.tzinfo is None:
            raise KillickError("run.sleep_until needs a moment with a time zone, such as datetime(…, tzinfo=UTC)")
        deadline = (until_moment - _EPOCH) // timedelta(microseconds=1)
    else:
        deadline = ex.now_us() + round((for_seconds or 0) * 1_000_000)
    await _waited(ex, branch, Question(waits_for="time", name="sleep", deadline=deadline, skippable=True))


# children and messages ----------------------------------------------------------------------------


class Child(Generic[O]):
    """A run that this one spawned."""

    def __init__(self, run: Any, id: str, agent: AnyAgent) -> None:  # noqa: A002
        self._run = run
        self.id = id
        self.agent = agent

    def result(self) -> Awaitable[O]:
        """What it returns, when it has: a step that waits. Raises ChildFailed if it failed or was cancelled."""
        step: Awaitable[O] = self._run._steps(child_result, self)
        return step

    def __repr__(self) -> str:
        return f"<killick child {self.id}>"


async def spawn(
    ex: Execution,
    branch: Branch,
    run: Any,
    agent: AnyAgent,
    input: Any,  # noqa: A002
    id: str | None,  # noqa: A002
    on_parent_end: Any,
    priority: int | None,
) -> Child[Any]:
    refuse_controls(id)
    input = agent.checked(through_codec(input, at="input"))  # noqa: A001
    step = branch.number()
    bound = e.to_text(digest({"agent": agent.name, "input": input, "id": id}, at="input"))
    claim = RequestedStep(sort="child", name=agent.name, digest=bound, binding=True)
    past = ex.record.step(step)
    generation = ex.log.fold.facts.generation
    child = id or f"{ex.run_id}/{step}{f'~{generation}' if generation else ''}"
    if past is not None:
        await agree(ex, branch, past, claim, {"input": input})
        if past.status in OVER:
            await _replayed(ex, branch, past)
            if past.status == "failed":
                raise _failed(ex, past)
            spawned: e.ChildSpawned = ex.record.event(past.output)
            ex.on_child(spawned.run)
            return Child(run, spawned.run, agent)
    else:
        await refuse_gap(ex, branch, step, str(claim))
    await ex.turn()
    wanted = WantedStep(ex, branch, step, agent.name, {"input": input}, bound)
    adopts = ex.left_behind and dedupe.is_spawned(wanted)
    await _agreed(ex, branch, step, past, Intent.of("child", agent.name, {"input": input}, bound), adopts=adopts)
    _refuse(ex, branch, step)
    facts = ex.log.fold.facts
    if ex.left_behind and (adopted := await dedupe.spawned_before(wanted)) is not None:
        event = e.ChildSpawned(at=ex.now_us(), step=step, run=adopted.run, agent=agent.name,
                               on_parent_end=adopted.on_parent_end)  # fmt: skip
        await ex.recorded(ex.behind(Entry(event, {"input": input})))
        ex.on_child(adopted.run)
        return Child(run, adopted.run, agent)
    started = e.RunStarted(
        at=ex.now_us(),
        run=child,
        agent=agent.name,
        build=ex.engine.build(agent),
        priority=facts.priority if priority is None else priority,
        parent=ex.run_id,
        parent_step=step,
        trace=trace_here(),
    )
    _create(ex, started, agent, input)
    if ex.left_behind:
        ex.lineage.has_child(child)
    event = e.ChildSpawned(at=ex.now_us(), step=step, run=child, agent=agent.name, on_parent_end=on_parent_end)
    await ex.recorded(ex.behind(Entry(event, {"input": input})))
    ex.on_child(child)
    return Child(run, child, agent)


def _refuse(ex: Execution, branch: Branch, step: e.StepId) -> None:
    """A branch that was stopped begins nothing: a step of it that is on record already ends with that."""
    if branch.stopped is not None and ex.signal is None:
        ex.behind(Entry(e.StepEnded(at=ex.now_us(), step=step, outcome="cancelled")))
    ex.refuse(branch)


def _failed(ex: Execution, past: Step) -> StepFailed:
    return failed(past.id, past.name, convert(ex.record.data(past.output)["failure"], Failure, at="failure"))


async def _agreed(
    ex: Execution, branch: Branch, step: e.StepId, past: Step | None, intent: Intent, *, adopts: bool
) -> None:
    """The intention of a step that is no call: judged, and durable before anything is done."""
    judged = PendingVerdict(ex, branch, step, intent)
    if past is None:
        judged.intended()
    else:
        approvals.taken_up(judged, past)
    if judged.concerns_rules:
        await approvals.agreed(judged, adopts=adopts)
    if judged.unwritten and isinstance(judged.unwritten[-1].event, e.StepIntended):
        *before, (event, values) = judged.written()
        claims = () if adopts else judged.slots
        intended = msgspec.structs.replace(event, claims=tuple(map(claim_text, claims)))
        await ex.write(*before, Entry(intended, values), **({"claims": claims} if claims else {}))


def _create(ex: Execution, started: e.RunStarted, agent: AnyAgent, input: Any) -> None:  # noqa: A002
    """The child's log. One that is there already is ours if it says so: another process may have come this far."""
    log = ex.engine.log
    try:
        born = log.begin(started.run)
        born.append(*first_entries(started, agent, input))
    except RunExists:
        there = log.event(started.run, 1)
        if not isinstance(there, e.RunStarted) or (there.parent, there.parent_step) != (ex.run_id, started.parent_step):
            raise StepFailed(str(started.parent_step), agent.name, describe(RunExists(started.run))) from None


def first_entries(
    started: e.RunStarted,
    agent: AnyAgent,
    input: Any,  # noqa: A002
    *,
    document: dict[str, Any] | None = None,
) -> list[Entry]:
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
        told = {"result": closed.answer["result"]} if status == "completed" else {"failure": closed.answer["failure"]}
        return [Entry(e.ChildEnded(at=ex.now_us(), step=step, run=child.id, status=status), told)], {}

    step = branch.position
    ex.on_child(child.id)
    closed = await _waited(
        ex, branch, Question(waits_for="child", name=child.id, identity={"child": child.id}, then=then)
    )
    answer = closed.answer
    if answer["status"] == "completed":
        returns = child.agent.returns
        return answer["result"] if returns is Any else convert(answer["result"], returns, at=child.id)
    told = answer["failure"]
    failure = (
        convert(told, Failure, at="failure")
        if told is not None
        else Failure.told("killick.errors.RunCancelled", f"{child.id} was cancelled", kind="cancelled")
    )
    raise ChildFailed(step, child.id, failure, run=child.id)


async def send(ex: Execution, branch: Branch, run: str, name: str, body: Any) -> None:
    if name.startswith("killick."):
        raise ValueRefused("name", f"messages named {name!r} are Killick's own; choose another name")
    step = branch.number()
    bound = e.to_text(digest({"run": run, "name": name, "body": body}, at="body"))
    claim = RequestedStep(sort="tool", name="send", digest=bound, binding=True)
    past = ex.record.step(step)
    if past is not None:
        await agree(ex, branch, past, claim, {"run": run, "name": name, "body": body})
        if past.status in OVER:
            await _replayed(ex, branch, past)
            if past.status == "failed":
                raise _failed(ex, past)
            return
    else:
        await refuse_gap(ex, branch, step, str(claim))
    await ex.turn()
    told = {"run": run, "name": name, "body": body}
    wanted = WantedStep(ex, branch, step, "send", told, bound)
    adopts = ex.left_behind and dedupe.is_sent(wanted)
    await _agreed(ex, branch, step, past, Intent.of("tool", "send", told, bound), adopts=adopts)
    _refuse(ex, branch, step)
    if ex.left_behind and await dedupe.sent_before(wanted):
        return
    generation = ex.log.fold.facts.generation
    message_id = f"{ex.run_id}:{step}{f'~{generation}' if generation else ''}"
    [outcome] = ex.engine.log.store.deliver([delivery(run, name, body, id=message_id, by=ex.run_id, at_us=ex.now_us())])
    if isinstance(outcome, RunUnknown):
        ended = e.StepEnded(at=ex.now_us(), step=step, outcome="failed")
        await ex.recorded(ex.behind(Entry(ended, {"failure": describe(outcome)})))
        raise StepFailed(step, "send", describe(outcome))
    if isinstance(outcome, KillickError):
        raise outcome
    event = e.MessageSent(at=ex.now_us(), step=step, run=run, name=name, id=message_id)
    await ex.recorded(ex.behind(Entry(event, {"body": body})))
    ex.on_message(run)
