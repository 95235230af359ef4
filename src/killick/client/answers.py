"""Answers and messages to runs: checked against the run's question, then delivered to its inbox."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from contextvars import copy_context
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from killick.clock import doubt_seconds
from killick.engine import renewals
from killick.engine.approval import approvals
from killick.engine.control import inbox
from killick.engine.control.inbox import delivery
from killick.engine.engine import Engine
from killick.engine.steps.transaction import joining
from killick.engine.views import Wait, needs_value
from killick.engine.waits import waits
from killick.errors import (
    AlreadyAgreed,
    AlreadyAnswered,
    AnswerRefused,
    DeliveryRefused,
    NotAsked,
    RunUnknown,
    StoreBusy,
    ValueErased,
)
from killick.history.run_info import waits_of
from killick.log.group_commit import GROUP_MAX
from killick.log.slots import asked_at, of_wait
from killick.model import events as e
from killick.store.protocol import Store
from killick.store.records import ENDED, Delivered, Delivery, Message
from killick.store.slots import ALL_PLACES, ENDED_SLOT, Slot


def answer(
    engine: Engine, wait: str | Wait, verb: str, value: Any, *, by: str | None, comment: str | None, saw: str | None,
    tx: Any, via: str | None = None, channel: str | None = None,
) -> str:  # fmt: skip
    """Answer an open wait; returns the run that has it. An approval of a quorum is a vote. Votes by links of one
    `channel` have one message id, so that the store accepts one of them."""
    found = _open_wait(engine, wait, by)
    if saw is not None and saw != found.digest:
        raise AnswerRefused(found.id, "the question has changed; read it again")
    by, run = waits.who(by, found.id), found.run
    if found.deadline_us is not None and _is_past(engine, found.deadline_us):
        raise AnswerRefused(found.id, f"expired at {_moment(found.deadline_us)}; the run continues without an answer")
    _refuse_misfit(engine, found, verb, value, by)
    body = {"kind": verb, "value": value, "comment": comment, "digest": found.digest}
    body |= {name: given for name, given in (("via", via), ("channel", channel)) if given}
    message_id, name, places = inbox.answer_id(run, found.step, found.opened), inbox.ANSWER, ALL_PLACES
    if found.need > 1 and verb == "approve":  # one vote a person, however often they click
        name, places = inbox.VOTE, 1
        message_id = f"{message_id}#{by}" if channel is None else inbox.link_vote_id(message_id, channel)
        _refuse_voted(engine, found, by, channel)
    slot = of_wait(run, found.step, found.opened, places, engine.store.secret_key)
    first_id = message_id
    try:
        delivered = deliver(engine, run, name, body, id=message_id, by=by, tx=tx, slot=slot)
        while name == inbox.VOTE and not delivered.fresh and _refused(engine, delivered.message) is not None:
            message_id = f"{first_id}~{delivered.message.taken}"  # a vote that did not count can be given again
            delivered = deliver(engine, run, name, body, id=message_id, by=by, tx=tx, slot=slot)
    except DeliveryRefused as refused:
        _refuse_closed(engine, found.id, run, found.step, opened=found.opened, by=by, need=found.need)
        raise AnswerRefused(found.id, "the question is no longer open; read the inbox again") from refused
    if not delivered.fresh:
        first = delivered.message
        if name == inbox.VOTE:
            _refuse_channel(found, first.by, by)
            raise AlreadyAgreed(found.id, by=by, votes=found.votes or (str(by),), need=found.need)
        raise AlreadyAnswered(found.id, by=first.by, at=_moment(first.at_us))
    return run


def _refuse_voted(engine: Engine, found: Wait, by: str | None, channel: str | None) -> None:
    """Refuse a vote of a person who agreed already, or of a channel whose vote an earlier question kept."""
    if by in found.votes:
        raise AlreadyAgreed(found.id, by=by, votes=found.votes, need=found.need)
    wait = engine.log.state(found.run).fold.facts.waits.get(found.step) if channel is not None else None
    _refuse_channel(found, None if wait is None else waits.same_channel(dict(wait.channels), by, channel), by)


def _refuse_channel(found: Wait, first: str | None, by: str | None) -> None:
    if first is not None and first != by:
        why = f"{first} answered by a link of the same channel, which counts once; sign in to answer as {by}"
        raise AnswerRefused(found.id, why)


def _is_past(engine: Engine, deadline_us: int) -> bool:
    """Whether a deadline is certainly past. By a clock that may be wrong it is not: the run decides, as it is asked."""
    return engine.clock.now_us() > deadline_us and not doubt_seconds(engine.clock, deadline_us)


def _refuse_misfit(engine: Engine, found: Wait, verb: str, value: Any, by: str | None) -> None:
    """Refuse a verb or a value that the wait does not take, and an approver who was not asked."""
    if (why := waits.refusal(found.verbs, found.options, verb, value)) is not None:
        raise AnswerRefused(found.id, why)
    if value is None and (verb in ("edit", "respond") or (verb == "happened" and needs_value(found))):
        raise AnswerRefused(found.id, f"{verb!r} needs a value")
    if not inbox.may_answer(by, found, found.may, engine.roles) or (found.need > 1 and by is None):
        raise NotAsked(found.id, by=by, may=found.may if found.may is not None else found.to)
    if (why := inbox.separated(found.apart, by, verb, is_call=found.rule is not None)) is not None:
        raise AnswerRefused(found.id, why)
    if found.rule is not None and verb == "edit":
        approvals.refuse_misfit(found, value)
    elif found.rule is None and verb in ("edit", "respond") and (misfit := waits.misfit(found.schema, value)):
        raise AnswerRefused(found.id, misfit)


def _open_wait(engine: Engine, wait: str | Wait, by: str | None) -> Wait:
    """The open wait that is meant: the wait itself, its id, or the id of a run with one open wait."""
    log, store = engine.log, engine.store
    if isinstance(wait, Wait):
        now = [each for each in waits_of(store, log.state(wait.run)) if each.verbs and each.step == wait.step]
        if now and now[0].digest != wait.digest:
            raise AnswerRefused(wait.id, "the question has changed; read it again")
        if now:
            return now[0]
        wait = wait.id
    run, _, step = wait.rpartition(":")
    both = bool(run) and store.head(wait) is not None and store.head(run) is not None
    if both and any(each.id == wait and each.verbs for each in waits_of(store, log.state(run))):
        raise AnswerRefused(wait, f"is a question of {run} and of another run; give the Wait from inbox()")
    wait = renewals.latest(log, wait)
    if store.head(wait) is not None:
        run, step = wait, ""
    elif not run or store.head(run) is None:
        raise RunUnknown(run or wait)
    run = renewals.latest(log, run)
    state = log.state(run)
    found = [each for each in waits_of(store, state) if each.verbs and (not step or each.step == step)]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(each.id for each in found)
        raise AnswerRefused(wait, f"several waits are open; name one of {ids}")
    _refuse_closed(engine, wait, run, step, by=by)
    over = state.fold.step(step) if step else None
    failure = state.data(over.ended).get("failure") if over is not None and over.ended else None
    why = f"the run is {state.status}" if not isinstance(failure, dict) else f"step {step} ended: {failure['message']}"
    raise AnswerRefused(wait, f"nothing to answer here; {why}")


def _refuse_closed(
    engine: Engine, wait: str, run: str, step: str, *, opened: int = 0, by: str | None = None, need: int = 1,
) -> None:  # fmt: skip
    """Raises AlreadyAnswered, with the first approver, or AlreadyAgreed, if the wait has its answer or its votes; the
    recorded reason, if the run refused them."""
    meant = f":{step}@{opened or ''}" if step else ":"
    there = [
        each
        for each in engine.store.messages(run)
        if each.name in (inbox.ANSWER, inbox.VOTE) and each.id.startswith("answer:") and meant in each.id
    ]
    refused = {each.number: why for each in there if (why := _refused(engine, each)) is not None}
    for message in reversed(there):
        if message.name == inbox.ANSWER and message.number not in refused:
            raise AlreadyAnswered(wait, by=message.by, at=_moment(message.at_us))
    votes = [message for message in there if message.name == inbox.VOTE and message.number not in refused]
    if votes and opened:
        if by in (names := [str(message.by) for message in votes]):
            raise AlreadyAgreed(wait, by=by, votes=names, need=need)
        raise AlreadyAnswered(wait, by=", ".join(names), at=_moment(votes[-1].at_us))
    own = [refused[message.number] for message in there if message.number in refused and message.by == by]
    if refused:
        raise AnswerRefused(wait, (own or [*refused.values()])[-1])


def _refused(engine: Engine, message: Message) -> str | None:
    """The recorded reason for which a run refused an answer; None where it took it, or has not yet."""
    if message.taken is None:
        return None
    is_taken, after = False, asked_at(message.run, message.id)
    while after < message.taken:
        for after, event, _ in engine.log.read(message.run, after=after, limit=1_000):  # noqa: B020
            if is_taken and isinstance(event, e.NoteMade):
                with suppress(ValueErased):
                    return str(engine.log.data(message.run, after)["note"])
                return "it was not taken"
            is_taken = is_taken or (isinstance(event, e.MessageTaken) and event.message == message.number)
    return None


class Sending(NamedTuple):
    """A message that a caller sends: to a run, under the name that it waits for."""

    run: str
    name: str
    body: Any
    id: str
    by: str | None


def send(engine: Engine, sending: Sending, *, tx: Any = None) -> str:
    """Deliver a message to the latest log of a run; returns that log's id."""
    return _accepted(engine, _message(engine, sending), tx).message.run


def _message(engine: Engine, sending: Sending) -> Delivery:
    """The message, addressed to the latest log of its run, as far as that is known: the store decides."""
    run, name, body, id, by = sending  # noqa: A001
    row = engine.store.index(run)
    if row is None or row.status in ENDED:
        run = renewals.latest(engine.log, run)
    return delivery(engine.log, run, name, body, id=id, by=waits.who(by, run), at_us=engine.clock.now_us())


def deliver(
    engine: Engine, run: str, name: str, body: Any, *, id: str, by: str | None, tx: Any = None,  # noqa: A002
    slot: Slot | None = None, exact: bool = False,
) -> Delivered:  # fmt: skip
    """Put a message into a run's inbox, in the caller's own transaction where `tx` is given."""
    message = delivery(engine.log, run, name, body, id=id, by=waits.who(by, run), at_us=engine.clock.now_us())
    return _accepted(engine, replace(message, slot=slot, exact=exact), tx)


def _accepted(engine: Engine, message: Delivery, tx: Any) -> Delivered:
    if tx is None:
        [outcome] = outgoing(engine).deliver([message])
    else:
        [outcome] = joining(engine.store, tx).deliver([message])
    if isinstance(outcome, Exception):
        raise _explained(outcome)
    return outcome


def _explained(error: Exception) -> Exception:
    """A refusal by the store as the refusal of an answer, which callers expect."""
    if isinstance(error, DeliveryRefused) and error.slot == ENDED_SLOT:
        return AnswerRefused(error.run, error.why)
    return error


class Outgoing:
    """Group commit of the messages of concurrent callers: one caller delivers all that wait. The tasks of a loop that
    send in one turn share a thread as well."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._turn = threading.Lock()
        self._waiting: deque[_Sent] = deque()
        self._tasks: dict[asyncio.AbstractEventLoop, list[tuple[Sending, asyncio.Future[str]]]] = {}

    def deliver(self, messages: Sequence[Delivery]) -> list[Delivered | Exception]:
        """Delivers messages, together with those of callers that wait; returns the result or error of each."""
        mine = [_Sent(message) for message in messages]
        self._waiting += mine
        with self._turn:
            if any(each.outcome is None for each in mine):
                batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
                # An interrupted caller took these messages into its batch. Delivered again, they count once.
                self._deliver(batch if mine[0] in batch else [*mine, *batch])
        return [each.outcome for each in mine if each.outcome is not None]

    def _deliver(self, batch: list[_Sent]) -> None:
        try:
            outcomes: Sequence[Delivered | Exception] = self._store.deliver([each.message for each in batch])
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, StoreBusy):
                for each in batch:  # an error that concerns one message refuses that one alone
                    self._deliver([each])
                return
            outcomes = [error] * len(batch)
        for each, outcome in zip(batch, outcomes, strict=True):
            each.outcome = outcome

    async def send_soon(self, engine: Engine, sending: Sending) -> str:
        """As `send`, from a loop, in one thread and one commit with the other tasks of this turn."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        tasks = self._tasks.setdefault(loop, [])
        if not tasks:
            loop.call_soon(self._send_all_soon, engine, loop)
        tasks.append((sending, future))
        return await future

    def _send_all_soon(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        tasks = self._tasks.pop(loop)
        for first in range(0, len(tasks), GROUP_MAX):
            group = tasks[first : first + GROUP_MAX]
            sendings, futures = [sending for sending, _ in group], [future for _, future in group]
            # Any, because a partial of Context.run loses its types.
            work: Any = partial(copy_context().run, _send_all, engine, sendings)
            loop.run_in_executor(None, work).add_done_callback(partial(_resolve, futures))


def outgoing(engine: Engine) -> Outgoing:
    """The outgoing messages of a client."""
    return _OUTGOING.get(engine) or _OUTGOING.setdefault(engine, Outgoing(engine.store))


def _send_all(engine: Engine, sendings: Sequence[Sending]) -> list[str | Exception]:
    """Sends messages in one commit; returns the run or the error of each."""
    outcomes = list[str | Exception]()
    messages = list[Delivery]()
    for sending in sendings:
        try:
            messages.append(_message(engine, sending))
            outcomes.append(messages[-1].run)
        except Exception as error:
            outcomes.append(error)
    delivered = iter(outgoing(engine).deliver(messages) if messages else [])
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, str):
            answer = next(delivered)
            outcomes[place] = _explained(answer) if isinstance(answer, Exception) else answer.message.run
    return outcomes


def _resolve(futures: Sequence[asyncio.Future[str]], done: asyncio.Future[list[str | Exception]]) -> None:
    """Ends the waits of the tasks that sent messages."""
    error = done.exception()
    outcomes = [error] * len(futures) if error is not None else done.result()
    for future, outcome in zip(futures, outcomes, strict=True):
        if future.done():
            continue  # its task was cancelled
        if isinstance(outcome, str):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


class _Sent(msgspec.Struct, eq=False):
    """A message in transit, and its result."""

    message: Delivery
    outcome: Delivered | Exception | None = None


_OUTGOING: Final[WeakKeyDictionary[Engine, Outgoing]] = WeakKeyDictionary()


def _moment(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).isoformat(timespec="seconds")
