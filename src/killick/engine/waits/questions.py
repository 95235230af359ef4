"""Steps that wait: for an answer, for a message, for a time; and the remarks that people made meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NoReturn, cast

import msgspec

from killick.contracts.contract import Approval
from killick.definitions.policy import Duration
from killick.engine.approval.contracts_in_force import named
from killick.engine.approval.verdicts import failed
from killick.engine.control.inbox import SAID, STARTED, body_of, message_taken, question_verbs
from killick.engine.control.interventions import skip_failure
from killick.engine.divergence import recorded_step, refuse_after_end, replay_outcome
from killick.engine.execution import Branch, Execution
from killick.engine.replay import OVER, RequestedStep
from killick.engine.waits.open_wait import Closed, Escalation, Intervened, Waiter
from killick.engine.waits.waits import (
    Answer,
    binding,
    deadline_us,
    next_message,
    raise_if_intervened,
    schema_of,
    until,
)
from killick.errors import KillickError, ValueErased, ValueRefused, WaitExpired
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.codec import digest
from killick.model.facts import Step
from killick.model.retry import seconds
from killick.model.typed import convert

MISSING: Final[Any] = msgspec.UNSET
"""No default was given."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Question(msgspec.Struct, kw_only=True):
    """A wait that is a step of its own: its kind, its addressees, and its prompt."""

    waits_for: e.WaitFor
    name: str
    identity: Any = None
    """The fields on which code and record must agree."""
    wording: Any = None
    """The fields that may change in the code: the record keeps the old ones, and the drift is noted."""
    to: tuple[str, ...] = ()
    deadline: int | None = None
    is_date: bool = False
    """Whether the deadline is a date, and not a duration from when the wait began."""
    shown: dict[str, Any] = {}
    then: Any = None
    fits: Any = None
    need: int = 1
    rounds: tuple[Escalation, ...] = ()
    may: list[str] | None = None
    apart: Mapping[str, str] | None = None
    """The people who cannot answer, and what each of them did, if duties are separate."""

    def values(self, turn: int = 0) -> dict[str, Any]:
        """The recorded values. The addressees of escalation `turn` are no part of the question's identity."""
        may = self.rounds[turn - 1].may if turn else self.may
        people = {"may": None if may is None else list(may), "apart": self.apart}
        return {**self.shown, **{name: value for name, value in people.items() if value is not None}}

    skippable: bool = False
    """Whether the code can continue without the awaited event."""


async def wait_for(ex: Execution, branch: Branch, asked: Question) -> Closed:
    """A wait as a step; returns how it ended. Raises if a person skipped a wait without a default."""
    try:
        closed = await _until_over(ex, branch, asked)
    except Intervened as done:
        await ex.recorded(done.seq)
        closed = done.closed
    if closed.how == "skipped" and not asked.skippable:
        raise failed(branch.last, asked.name, skip_failure(closed.by, closed.comment))
    return closed


async def _until_over(ex: Execution, branch: Branch, asked: Question) -> Closed:
    """Record the wait before it can be answered, and its end before the code sees it."""
    step = branch.number()
    bound = identity = (
        e.to_text(digest(asked.identity, secret_key=ex.log.secret_key)) if asked.identity is not None else None
    )
    if asked.wording is not None:
        bound = e.to_text(digest([asked.identity, asked.wording], secret_key=ex.log.secret_key))
    claim = RequestedStep("wait", asked.name, bound, identity, binding=bound is not None)
    past = await recorded_step(ex, branch, step, claim, asked.shown)
    if past is not None and past.status in OVER:
        return await _closed(ex, branch, past)
    if asked.waits_for == "event":
        await asyncio.sleep(0)  # a run with a long inbox waits for nothing else
    await ex.await_turn()
    raise_if_intervened(ex, step)
    facts = ex.log.fold.facts
    wait = facts.waits.get(step) if past is not None else None
    if branch.stopped is not None:
        if past is not None and not branch.over_at:
            ex.write_behind(ex.wait_closed(step, "cancelled"))
        raise branch.stopped
    if wait is None:
        now_us = ex.now_us()
        place = (ex.log.secret_key, ex.run_id, facts.generation, step, asked.waits_for)
        answer = binding(*place, identity=asked.identity, **asked.shown)
        intended = e.StepIntended(
            at=now_us, step=step, sort="wait", name=asked.name, digest=bound, identity=identity, guest=branch.guest,
            within=branch.within,
        )  # fmt: skip
        opened = e.WaitOpened(
            at=now_us, step=step, waits_for=asked.waits_for, name=asked.name, to=asked.to, deadline=asked.deadline,
            digest=answer if asked.waits_for == "answer" else None, need=asked.need,
        )  # fmt: skip
        question = Entry(opened, asked.values())
        entries = [question] if past is not None else [Entry(intended), question]
        is_cancelled = False
        if message := next_message(ex, asked.name) if asked.waits_for == "event" else None:
            seq = ex.write_behind(*entries)  # it ends at once: a process that dies before the commit does it again
        else:
            seq, is_cancelled = await ex.write(*entries)
        waiter = _waiter(asked, opened, seq, message=message)
        if is_cancelled:
            await ex.raise_if_closing()
            await _cancelled(ex, waiter)
        if branch.stopped is not None and ex.signal is None:
            ex.write_behind(ex.wait_closed(step, "cancelled"))
    else:
        with suppress(ValueErased):
            asked.shown = {k: value for k, value in ex.record.data(wait.opened).items() if k not in ("may", "apart")}
        waiter = _waiter(
            asked, ex.record.event(wait.opened), wait.opened, votes=wait.votes, channels=dict(wait.channels)
        )
    ex.refuse(branch)
    closed = await _closing(ex, branch, waiter)
    if closed.how == "cancelled":
        ex.refuse(branch)
    await ex.recorded(closed.seq)
    return closed


async def _closing(ex: Execution, branch: Branch, waiter: Waiter) -> Closed:
    try:
        return await until(ex, waiter)
    except asyncio.CancelledError:
        await ex.raise_if_closing()
        ex.refuse(branch)
        if ex.is_outside:
            raise  # the question stays open: the external caller may ask for its answer again
        return await _cancelled(ex, waiter)


def _waiter(asked: Question, opened: e.WaitOpened, at: int, **more: Any) -> Waiter:
    question = Entry(opened, asked.values(opened.round))
    return Waiter.of(question, at, then=asked.then, fits=asked.fits, rounds=asked.rounds[opened.round :],
        is_date=asked.is_date, **more,
    )  # fmt: skip


async def _cancelled(ex: Execution, waiter: Waiter) -> NoReturn:
    """The agent's own code gave up waiting."""
    await ex.recorded(ex.write_behind(ex.wait_closed(waiter.step, "cancelled")))
    raise asyncio.CancelledError


async def _closed(ex: Execution, branch: Branch, past: Step) -> Closed:
    await replay_outcome(ex, branch, past)
    event = ex.record.event(past.output)
    data = ex.record.data(past.output)
    if isinstance(event, e.StepOverridden):
        return Closed(past.output, "answered", event.by, data.get("output"))
    return Closed(past.output, event.how, event.by, data.get("answer"), data.get("comment"))


async def ask(
    ex: Execution, branch: Branch, prompt: str, to: str | Sequence[str], timeout: Duration | None, default: Any,
    options: Sequence[Any] | None, returns: Any, need: int = 1,
    escalate: Sequence[tuple[str | Sequence[str], Duration | None]] = (), separate: bool = False,
) -> Answer:  # fmt: skip
    verbs = question_verbs(options is not None, returns is not Any)
    shown: dict[str, Any] = {"prompt": prompt, "verbs": verbs}
    if options is not None:
        shown["options"] = list(options)
    if default is not MISSING:
        shown["default"] = default
        if options is not None and default not in (*options, *verbs):
            raise ValueRefused("default", f"{default!r} is not one of the options {', '.join(map(repr, options))}")
    if returns is not Any:
        shown["schema"] = schema_of(returns)
    people = ex.judge.people(None)
    to = (to,) if isinstance(to, str) else to
    asked = Approval(to, need=need, timeout=timeout, escalate=escalate, separate=separate)

    def fits(kind: str, value: Any) -> Any:
        return convert(value, returns, at="answer")

    question = Question(
        waits_for="answer", name="ask", identity=[verbs, _form(shown.get("schema"))],
        wording=[prompt, shown.get("options")], to=asked.to, deadline=deadline_us(ex.now_us(), asked.timeout),
        shown=shown, fits=None if returns is Any else fits,
        need=asked.need, may=named(people, asked.to), skippable=default is not MISSING,
        apart=dict.fromkeys(ex.log.fold.facts.starters, STARTED) if asked.separate else None,
        rounds=tuple(Escalation(each.to, each.timeout, named(people, each.to)) for each in asked.escalate),
    )  # fmt: skip
    closed = await wait_for(ex, branch, question)
    if closed.how in ("expired", "skipped"):
        if default is MISSING:
            raise WaitExpired(ex.run_id, branch.last, prompt)
        kind = default if default in verbs else "respond"
        return Answer(kind=kind, value=None if kind == default else default, expired=True)
    value = closed.answer.get("value")
    if returns is not Any and closed.answer["kind"] in ("edit", "respond"):
        value = convert(value, returns, at="answer")
    return Answer(kind=closed.answer["kind"], value=value, by=closed.by, comment=closed.comment)


def _form(schema: Any) -> Any:
    """A JSON schema without its texts."""
    if isinstance(schema, list):
        return [_form(each) for each in schema]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(schema, dict):
        return schema
    entries = cast("dict[str, Any]", schema)
    texts = {name for name in ("title", "description") if isinstance(entries.get(name), str)}
    return {name: _form(entry) for name, entry in entries.items() if name not in texts}


async def wait(ex: Execution, branch: Branch, name: str, timeout: Duration | None, default: Any, returns: Any) -> Any:
    limit = None if timeout is None else seconds(timeout)
    question = Question(
        waits_for="event", name=name, identity={"event": name}, deadline=deadline_us(ex.now_us(), limit),
        skippable=default is not MISSING,
    )  # fmt: skip
    closed = await wait_for(ex, branch, question)
    if closed.how in ("expired", "skipped"):
        if default is MISSING:
            raise WaitExpired(ex.run_id, branch.last, name)
        return default
    return convert(closed.answer, returns, at=name) if returns is not Any else closed.answer


async def sleep(ex: Execution, branch: Branch, for_seconds: float | None, until_moment: datetime | None) -> None:
    if until_moment is not None:
        if until_moment.tzinfo is None:
            raise KillickError("run.sleep_until needs a datetime with a time zone, such as datetime(…, tzinfo=UTC)")
        deadline = (until_moment - EPOCH) // timedelta(microseconds=1)
    else:
        deadline = ex.now_us() + round((for_seconds or 0) * 1_000_000)
    is_date = until_moment is not None
    asked = Question(waits_for="time", name="sleep", deadline=deadline, is_date=is_date, skippable=True)
    await wait_for(ex, branch, asked)


async def remarks(ex: Execution, branch: Branch) -> list[Any]:
    """The messages of people: on replay the recorded ones, live those in the inbox."""
    said: list[Any] = []
    while (seq := ex.record.take(branch.position, f"message.taken:{SAID}")) is not None:
        said.append(ex.record.data(seq)["body"])
    if said or branch.replaying:
        return said
    await refuse_after_end(ex, branch)
    for message in ex.engine.log.store.inbox(ex.run_id, name=SAID):
        if message.number in ex.taken:
            continue
        ex.taken.add(message.number)
        body = body_of(ex.engine.log, message)
        taken = message_taken(message, ex.now_us(), step=branch.position)
        ex.write_behind(Entry(taken, {"body": body}), takes=(message.number,))
        said.append(body)
    return said
