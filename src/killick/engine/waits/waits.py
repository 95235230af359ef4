"""Waits of a branch, and how messages, people and time end them. Deliverers never hold a lease."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import msgspec

from killick.clock import DOUBT_SECONDS, SET_BACK_US, doubt_seconds, meant_us
from killick.engine.approval.argument_edits import fits
from killick.engine.control.inbox import (
    ANSWER,
    CHILD,
    COMMAND,
    SAID,
    VOTE,
    answer_id,
    body_of,
    may_answer,
    message_taken,
    separated,
)
from killick.engine.execution import Execution
from killick.engine.waits.open_wait import Closed, Intervened, Waiter
from killick.errors import AnswerRefused, KillickError, ValueRefused
from killick.log.log import Log
from killick.log.slots import of_wait
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.codec import digest
from killick.sanitizer import visible, visible_line
from killick.store.records import ENDED, Message, is_own
from killick.store.slots import Slot

_READ_AT_ONCE: Final = 16
"""An inbox of fewer messages is read whole; a larger one by the names that the waits take."""

_NAMES: Final = {"": (COMMAND, ANSWER, VOTE, CHILD), "answer": (ANSWER, VOTE), "settlement": (ANSWER,)}
"""The messages of Killick's own that a wait takes; "": that any run takes."""


def refusal(verbs: Sequence[str], options: Sequence[Any], verb: str, value: Any) -> str | None:
    """Why a verb, with or without a value, is no answer to a wait; None where it is one."""
    if verb not in verbs:
        if options:
            return f"{verb!r} chooses none of {', '.join(map(repr, options))}; respond with one of them"
        if verb == "approve" and "respond" in verbs:
            return "'approve' gives no value, and this asks for one; respond with it"
        return f"{verb!r} is not an answer to this; give one of {', '.join(verbs)}"
    if verb == "approve" and value is not None:
        return "'approve' changes nothing, and a value came with it; use edit"
    if verb == "respond" and options and value not in options:
        return f"{value!r} is not one of {', '.join(map(repr, options))}"
    return None


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a person, or the default at a deadline.

    kind     the verb: "approve", "reject", "edit" or "respond"
    value    the response, the edited value or the default
    by       the name of the person
    comment  their comment
    expired  whether the deadline passed
    """

    kind: str
    value: Any = None
    by: str | None = None
    comment: str | None = None
    expired: bool = False

    @property
    def approved(self) -> bool:
        """Whether it may be done, perhaps with edits."""
        return self.kind in ("approve", "edit")


def refuse_own(id: str | None) -> None:  # noqa: A002
    """Refuse a run id that is reserved for Killick's own logs, or that has control characters."""
    refuse_controls(id)
    if id is not None and is_own(id):
        raise ValueRefused("id", f"{id!r} is reserved for Killick's internal logs; choose another")


def refuse_controls(id: str | None) -> None:  # noqa: A002
    """Refuse an empty id, and one that would forge lines of logs and tables, or command a terminal."""
    if id == "":  # an empty order number must not start a new run each time
        raise ValueRefused("id", "is empty; leave it out or give one")
    if id is not None and not isinstance(id, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueRefused("id", f"{id!r} is not text; give id={str(id)!r}")
    if id is not None and (visible(id) != id or not {"\t", "\n"}.isdisjoint(id)):
        written = visible_line(id)
        raise ValueRefused("id", f"{written} has control, bidirectional or invisible characters; remove them")


def who(by: object, about: str) -> str | None:
    """The name of a person for the record, or None. AnswerRefused for text that is no name."""
    if by is not None and not isinstance(by, str):
        raise AnswerRefused(about, f"by={by!r} is not a name; give a string")
    return (by or "").strip() or None


def schema_of(kind: Any) -> Any:
    """The JSON schema of the type of an answer; None where there is none."""
    import pydantic

    try:
        return pydantic.TypeAdapter(kind).json_schema()
    except (pydantic.PydanticUserError, pydantic.errors.PydanticInvalidForJsonSchema):
        return None


def misfit(schema: Any, value: Any) -> str | None:
    """Why a value certainly violates the schema; the run itself makes the remaining checks."""
    wanted = schema.get("type") if isinstance(schema, dict) else None  # pyright: ignore
    if not isinstance(wanted, str) or fits({"type": wanted}, value):
        return None
    return f"{value!r} is not of type {wanted}"


def binding(key: bytes, run: str, generation: int, step: e.StepId, waits_for: str, **asked: Any) -> e.Digest:
    """The subject that an answer is bound to: an approval authorises nothing else."""
    return e.to_text(digest([run, generation, step, waits_for, asked], secret_key=key))


# waiting ------------------------------------------------------------------------------------------


async def until(ex: Execution, waiter: Waiter) -> Closed:
    """Wait. The branch is idle, and the run may leave memory. Raises Intervened if a person ended the step."""
    if ex.signal is not None:
        raise ex.signal
    raise_if_intervened(ex, waiter.step)
    ex.waiters[waiter.step] = waiter
    try:
        look(ex, only=waiter)
        if waiter.future.done():
            return waiter.future.result()
        waiter.resting = True
        ex.mark_idle()
        closed = await waiter.future
        if ex.files is not None:
            ex.files.ended()
        return closed
    except asyncio.CancelledError:
        if not waiter.future.done() or waiter.future.cancelled():
            ex.mark_busy()
        raise
    finally:
        ex.waiters.pop(waiter.step, None)


def intervene(ex: Execution, step: e.StepId, done: Intervened) -> None:
    """End the wait of a step that a person ended, with the recorded outcome; other code gets it at its next step."""
    ex.interventions[step] = done
    waiter = ex.waiters.get(step)
    if waiter is not None and not waiter.future.done():
        if waiter.resting:
            ex.mark_busy()
        waiter.future.set_exception(done)
        waiter.future.exception()


def raise_if_intervened(ex: Execution, step: e.StepId) -> None:
    """Raise Intervened for a step that a person ended."""
    if step in ex.interventions:
        raise ex.interventions[step]


async def until_time(ex: Execution, step: e.StepId, at_us: int) -> None:
    """Wait until a recorded time, or until a recorded command ends that wait."""
    if at_us > (now := ex.now_us()):
        found = ex.log.fold.step(step)
        at_us = min(at_us, (found.delayed_until if found is not None else None) or at_us)
        since = next((event.at for _, event in ex.record.of(step, e.StepDelayed) if event.until == at_us), None)
        if since is None and found is not None and found.attempts and (ended := found.attempts[-1].ended):
            since = ex.record.event(ended).at if ex.record.has(ended) else None
        await until(ex, Waiter(step, "delay", deadline=at_us, since=since or now))


def end(
    ex: Execution, waiter: Waiter, closed: Closed, message: Message | None = None, *, before: Sequence[Entry] = ()
) -> None:
    """A wait is over: on record first, then for the code."""
    if waiter.future.done():
        return
    if waiter.waits_for != "delay":
        event = e.WaitClosed(
            at=ex.now_us(), step=waiter.step, how=closed.how, by=closed.by,
            message=message.number if message is not None else None,
        )  # fmt: skip
        values = {"answer": closed.answer, **({"comment": closed.comment} if closed.comment else {})}
        then, rights = waiter.then(closed) if waiter.then is not None else ((), {})
        if message is not None:
            ex.taken.add(message.number)
            ex.last_taken[message.name] = message.number
            rights = {**rights, "takes": (message.number,)}
        seq = ex.write_behind(*before, Entry(event, values), *then, **rights)
        closed = closed._replace(seq=seq)
    if waiter.resting:
        ex.mark_busy()
    waiter.future.set_result(closed)


def deadline_us(now_us: int, seconds: float | None) -> int | None:
    """When a time that begins now is over; None for an unlimited one."""
    return None if seconds is None else now_us + round(seconds * 1_000_000)


def next_deadline(ex: Execution) -> int | None:
    """When time alone wakes a branch: a wait whose deadline is past, once that is certain."""
    now, timed = ex.now_us(), [(w.deadline, w) for w in ex.waiters.values() if w.deadline is not None]
    return min((now + _doubt_us(ex, w) if when <= now else when for when, w in timed), default=None)


def in_doubt(ex: Execution, waiter: Waiter) -> bool:
    """Whether its deadline is past by a clock that nobody watched passing it. The record of an end is final."""
    return waiter.deadline is not None and waiter.deadline <= ex.now_us() and _doubt_us(ex, waiter) > 0


def _doubt_us(ex: Execution, waiter: Waiter) -> int:
    """How long a deadline that is past may not end the wait yet. A backoff that ends early does no harm."""
    if waiter.deadline is None or waiter.waits_for == "delay":
        return 0
    clock, store = ex.engine.clock, ex.engine.log.store
    length = (waiter.deadline - waiter.since) / 1_000_000
    if seconds := doubt_seconds(clock, waiter.deadline, length):
        return math.ceil(seconds * 1_000_000)
    if store.proves_life or length < DOUBT_SECONDS or waiter.deadline >= clock.watch.look(clock)[1]:
        return 0
    return min(max(waiter.deadline - store.now_us(), 0), round(DOUBT_SECONDS * 1_000_000))  # the server's own clock


def _begin_anew(ex: Execution, waiter: Waiter, now: int) -> None:
    """The clock was ahead when the wait began, and was set back: its time begins now, on record too. A date stays."""
    assert waiter.deadline is not None
    if not waiter.is_date:
        waiter.deadline = meant_us(waiter.deadline, waiter.since, now)
    waiter.since = now
    if waiter.asked is None:
        because = "the clock was set back"
        ex.write_behind(Entry(e.StepDelayed(at=now, step=waiter.step, until=waiter.deadline, because=because)))
        return
    event, values = waiter.asked
    waiter.asked = Entry(msgspec.structs.replace(event, at=now, data=None, deadline=waiter.deadline), values)
    _open_again(ex, waiter, waiter.asked)


# the inbox ----------------------------------------------------------------------------------------


def look(ex: Execution, *, only: Waiter | None = None, opening: bool = False) -> None:
    """Takes the run's messages in their order, then its expired timers."""
    if ex.signal is not None:
        return
    for message in _waiting_messages(ex, only, opening):
        if message.number not in ex.taken:
            _take(ex, message)
            ex.has_unread = ex.has_unread or message.number not in ex.taken
        if ex.signal is not None:
            ex.has_unread = True
            return
    now = ex.now_us()
    for waiter in [only] if only is not None else list(ex.waiters.values()):
        if waiter.waits_for == "child":
            if (outcome := child_outcome(ex.engine.log, waiter.name)) is not None:
                end(ex, waiter, Closed(0, "answered", by=waiter.name, answer=outcome))
        elif waiter.deadline is not None and waiter.since > now + SET_BACK_US:
            _begin_anew(ex, waiter, now)
        elif waiter.deadline is not None and waiter.deadline <= now and not _doubt_us(ex, waiter):
            if waiter.rounds:
                _pass_on(ex, waiter, now)
            else:
                end(ex, waiter, Closed(0, "expired"))


def _waiting_messages(ex: Execution, only: Waiter | None, opening: bool) -> Sequence[Message]:
    """The messages that the waits of this run may take, in order. The inbox may hold very many others."""
    store, log = ex.engine.log.store, ex.log
    few: Sequence[Message] | None = store.inbox(ex.run_id, limit=_READ_AT_ONCE) if opening else None
    if few is not None and len(few) < _READ_AT_ONCE:
        ex.inbox, log.seen = few, few[-1].number if few else 0
    elif only is None:
        if (row := store.index(ex.run_id)) is None or row.delivered == log.seen:
            return ()
        log.seen = row.delivered
    elif only.message is not None:
        return (only.message,)
    elif ex.inbox and log.seen == ex.inbox[-1].number:
        few = ex.inbox  # the look before the run parks finds what came later
    names = _NAMES.get("" if only is None else only.waits_for, ())
    waiting = [w.name for w in ([only] if only else ex.waiters.values()) if w.waits_for == "event"]
    if few is None and len(names) + len(waiting) > 1:
        few = store.inbox(ex.run_id, limit=_READ_AT_ONCE)
    if few is not None and len(few) < _READ_AT_ONCE:
        return [message for message in few if message.name in names or message.name in waiting]
    # Waits take the messages of a name in their order, one each: no others are read.
    wanted = Counter(waiting).items()
    found = [store.inbox(ex.run_id, name=n, after=ex.last_taken.get(n, 0), limit=count) for n, count in wanted]
    found += [store.inbox(ex.run_id, name=name) for name in names]
    return sorted(chain.from_iterable(found), key=lambda message: message.number)


def next_message(ex: Execution, name: str) -> Message | None:
    """The oldest message of a name that no wait took."""
    return next(iter(ex.engine.log.store.inbox(ex.run_id, name=name, after=ex.last_taken.get(name, 0), limit=1)), None)


def _take(ex: Execution, message: Message) -> None:
    if message.name == COMMAND:
        ex.on_command(ex, message)
    elif message.name in (ANSWER, VOTE):
        _answered(ex, message)
    elif message.name == CHILD:
        _drop(ex, message)
    elif message.name != SAID:
        for waiter in sorted(ex.waiters.values(), key=lambda waiter: waiter.opened):
            if waiter.waits_for == "event" and waiter.name == message.name and not waiter.future.done():
                end(ex, waiter, Closed(0, "answered", by=message.by, answer=body_of(ex.engine.log, message)), message)
                return


def _drop(ex: Execution, message: Message, *entries: Entry, gives: tuple[Slot, ...] = ()) -> None:
    ex.taken.add(message.number)
    taken = Entry(message_taken(message, ex.now_us()))
    ex.write_behind(taken, *entries, takes=(message.number,), gives=gives)


def _answered(ex: Execution, message: Message) -> None:
    waiter = next((w for w in ex.waiters.values() if w.opened and _is_for(message, w.answer_id(ex.run_id))), None)
    if waiter is None or waiter.future.done():
        if not _may_come(ex, message):
            _drop(ex, message, ex.noted(_too_late(message)))
        return
    body: Any = body_of(ex.engine.log, message)
    if (why := _unfit(ex, waiter, message, body)) is not None:
        _ignore(ex, waiter, message, why)
        return
    said: dict[str, Any] = {"kind": body["kind"], "value": body.get("value")}
    closed = Closed(0, "answered", by=message.by, answer=said, comment=body.get("comment"), channel=body.get("channel"))
    if waiter.need > 1 and said["kind"] == "approve":
        _voted(ex, waiter, closed, message)
    else:
        end(ex, waiter, closed, message)


def _unfit(ex: Execution, waiter: Waiter, message: Message, body: Any) -> object:
    """Why an answer does not count: another question, a person who is no addressee, or no valid answer."""
    fields: dict[str, Any] = {**body} if isinstance(body, dict) else {}
    event: Any = None if waiter.asked is None else waiter.asked.event
    asked: dict[str, Any] = {} if waiter.asked is None else dict(waiter.asked.values or {})
    kind = fields.get("kind")
    if not isinstance(kind, str):
        return "it is not an answer to this"
    if (why := refusal(asked.get("verbs", (kind,)), asked.get("options") or (), kind, fields.get("value"))) is not None:
        return why
    if waiter.digest is not None and fields.get("digest") != waiter.digest:
        return "it answers another question"
    try:
        if event is not None and not may_answer(message.by, event, asked.get("may"), ex.engine.roles):
            return "it was asked of others"
    except Exception as error:
        # The caller's function of roles failed: the run is interrupted, and resumes later.
        raise ex.interrupted(KillickError(f"the roles of {message.by} cannot be determined ({error})")) from error
    is_call = event is not None and event.rule is not None
    if (why := separated(asked.get("apart"), message.by, kind, is_call=is_call)) is not None:
        return why
    try:
        if waiter.fits is not None and kind in ("edit", "respond", "happened"):
            waiter.fits(kind, fields.get("value"))
    except ValueRefused as misfit:
        return misfit
    return None


def _voted(ex: Execution, waiter: Waiter, closed: Closed, message: Message) -> None:
    """One of several who have to agree did; the last one of them ends the wait."""
    if (by := closed.by) is None:
        _ignore(ex, waiter, message, "several people have to agree, each by name")
        return
    if by in waiter.votes and message.name == VOTE:
        _ignore(ex, waiter, message, f"{by} agreed already")
        return
    if (other := same_channel(waiter.channels, by, closed.channel)) is not None:
        _ignore(ex, waiter, message, f"{other} answered by a link of the same channel, which counts once")
        return
    last = len({*waiter.votes, by}) >= waiter.need
    event = e.WaitVoted(
        at=ex.now_us(), step=waiter.step, by=by, message=None if last else message.number, channel=closed.channel
    )
    voted = Entry(event, {"answer": closed.answer, **({"comment": closed.comment} if closed.comment else {})})
    if by not in waiter.votes:
        waiter.votes += (by,)
        waiter.channels = waiter.channels if closed.channel is None else {**waiter.channels, by: closed.channel}
    if last:
        end(ex, waiter, closed, message, before=(voted,))
    else:
        ex.taken.add(message.number)
        ex.write_behind(voted, takes=(message.number,))
        _ask_again(ex, waiter, message)


def same_channel(channels: Mapping[str, str], by: str | None, channel: str | None) -> str | None:
    """The other approver who answered by a link of the same channel, whose reader could give both answers."""
    return next((name for name, taken in channels.items() if taken == channel and name != by), None)


def _pass_on(ex: Execution, waiter: Waiter, now: int) -> None:
    """Escalate a question that was not answered in time to the next addressees, with their own deadline."""
    assert waiter.asked is not None
    event: Any = waiter.asked.event
    values = {name: value for name, value in (waiter.asked.values or {}).items() if name != "may"}
    following, *rest = waiter.rounds
    deadline = deadline_us(now, following.timeout)
    opened = msgspec.structs.replace(
        event, at=now, data=None, to=following.to, deadline=deadline, round=event.round + 1
    )
    waiter.asked = Entry(opened, values if following.may is None else {**values, "may": list(following.may)})
    waiter.opened = ex.write_behind(waiter.asked)
    waiter.deadline, waiter.since, waiter.rounds, waiter.votes, waiter.channels = deadline, now, tuple(rest), (), {}


def dismiss(ex: Execution, step: e.StepId, opened: int) -> None:
    """Take and note the answers to a question that is closed. They do not count."""
    answer = answer_id(ex.run_id, step, opened)
    for name in (ANSWER, VOTE):
        for message in ex.engine.log.store.inbox(ex.run_id, name=name):
            if message.number not in ex.taken and _is_for(message, answer):
                _drop(ex, message, ex.noted(_too_late(message), step))


def _too_late(message: Message) -> str:
    return f"the answer of {message.by or 'a person'} came to a question that is no longer open"


def _ignore(ex: Execution, waiter: Waiter, message: Message, misfit: object) -> None:
    """An answer that does not fit counts as none: the same is asked again, under an id that is free. A vote gives its
    place back."""
    note = f"the answer of {message.by or 'a person'} does not fit and was ignored: {misfit}"
    slot = of_wait(ex.run_id, waiter.step, waiter.opened, 1, ex.engine.store.secret_key)
    _drop(ex, message, ex.noted(note, waiter.step), gives=() if message.name == ANSWER else (slot,))
    _ask_again(ex, waiter, message)


def _ask_again(ex: Execution, waiter: Waiter, message: Message) -> None:
    """The same question, under an id that is free, where an answer closed its slot and did not end it."""
    if waiter.asked is not None and message.name == ANSWER:
        event, values = waiter.asked
        _open_again(ex, waiter, Entry(msgspec.structs.replace(event, at=ex.now_us(), data=None), values))


def _open_again(ex: Execution, waiter: Waiter, opened: Entry) -> None:
    """Opens a question again, with the votes that it has: in one append, which writes how many are missing."""
    votes = [
        Entry(e.WaitVoted(at=opened.event.at, step=waiter.step, by=by, channel=waiter.channels.get(by)))
        for by in waiter.votes
    ]
    waiter.opened = ex.write_behind(opened, *votes) - len(votes)


def _may_come(ex: Execution, message: Message) -> bool:
    """Whether an answer belongs to a wait that is open on record and that the code has not reached yet."""
    waits = ex.log.fold.facts.waits.values()
    return any(_is_for(message, answer_id(ex.run_id, wait.step, wait.opened)) for wait in waits)


def _is_for(message: Message, answer: str) -> bool:
    """Whether a message answers, or votes on, the wait of this id."""
    return message.id == answer if message.name == ANSWER else message.id.startswith(f"{answer}#")


def child_outcome(log: Log, run: str) -> dict[str, Any] | None:
    """How a run ended, followed through renewals; None while it has not."""
    row = log.store.index(run)
    if row is None or row.status not in ENDED:
        return None
    state = log.state(run)
    facts = state.fold.facts
    if facts.renewed_as is not None:
        return child_outcome(log, facts.renewed_as)
    data = state.data(facts.ended)
    return {"status": facts.status, "result": data.get("result"), "failure": data.get("failure")}
