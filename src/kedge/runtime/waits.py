"""Waits: what a branch waits for, and how messages, people and time end it. Deliverers never hold a lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from kedge.errors import ValueRefused
from kedge.log.handle import Entry
from kedge.log.log import Log
from kedge.model import events as e
from kedge.model.codec import digest
from kedge.model.values import unpack
from kedge.runtime.context import Change
from kedge.runtime.signals import Cancelling, Paused, Rewinding
from kedge.store.base import ENDED, Delivery, Message, RunQuery

if TYPE_CHECKING:
    from kedge.runtime.execution import Branch, Execution

COMMAND: Final = "kedge.command"
"""The name under which commands reach a run that somebody holds."""

ANSWER: Final = "kedge.answer"
CHILD: Final = "kedge.child"
SAID: Final = "kedge.said"

Verb = Literal["approve", "reject", "edit", "respond", "happened", "not", "stop"]
QUESTION_VERBS: Final[tuple[Verb, ...]] = ("approve", "reject", "edit", "respond")
SETTLEMENT_VERBS: Final[tuple[Verb, ...]] = ("happened", "not", "stop")


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back from a person, or from a deadline."""

    kind: str
    value: Any = None
    by: str | None = None
    comment: str | None = None
    expired: bool = False

    @property
    def approved(self) -> bool:
        """Whether what was asked may be done, perhaps with edits."""
        return self.kind in ("approve", "edit")


class Closed(NamedTuple):
    """How a wait ended."""

    seq: int
    how: e.WaitEnd
    by: str | None = None
    answer: Any = None
    comment: str | None = None


Then = Callable[[Closed], tuple[Sequence[Entry], dict[str, Any]]]
"""What else is written when a wait ends, in the same commit: events, and rights."""


class Waiter:
    """A branch that waits. Without `opened` it only waits for time, and no event says so."""

    __slots__ = (
        "asked",
        "deadline",
        "digest",
        "fits",
        "future",
        "name",
        "opened",
        "resting",
        "step",
        "then",
        "waits_for",
    )

    def __init__(
        self,
        step: e.StepId,
        waits_for: str,
        *,
        name: str = "",
        deadline: int | None = None,
        digest: e.Digest | None = None,
        opened: int = 0,
        then: Then | None = None,
        fits: Callable[[Any], Any] | None = None,
        asked: Entry | None = None,
    ) -> None:
        self.step = step
        self.waits_for = waits_for
        self.name = name
        self.deadline = deadline
        self.digest = digest
        self.opened = opened
        self.then = then
        self.fits = fits
        self.asked = asked
        self.resting = False
        self.future: asyncio.Future[Closed] = asyncio.get_running_loop().create_future()

    def answer_id(self, run: str) -> str:
        return answer_id(run, self.step, self.opened)


def verbs_of(waits_for: str) -> tuple[Verb, ...]:
    """The answers that a wait takes of which nothing else is known."""
    return {"answer": QUESTION_VERBS, "settlement": SETTLEMENT_VERBS}.get(waits_for, ())


def answer_id(run: str, step: e.StepId, opened: int) -> str:
    """The id that answers to a wait carry, so that the first one wins."""
    return f"answer:{run}:{step}@{opened}"


def child_id(run: str) -> str:
    return f"child:{run}"


def schema_of(kind: Any) -> Any:
    """The JSON schema of a type that an answer is to have; None where none can be told."""
    import pydantic

    try:
        return pydantic.TypeAdapter(kind).json_schema()
    except (pydantic.PydanticUserError, pydantic.errors.PydanticInvalidForJsonSchema):
        return None


_JSON_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list, tuple),
    "object": (dict,), "null": (type(None),),
}  # fmt: skip


def misfit(schema: Any, value: Any) -> str | None:
    """Why a value is plainly not what was asked for; what only the run can judge is left to it."""
    wanted = schema.get("type") if isinstance(schema, dict) else None  # pyright: ignore
    if not isinstance(wanted, str) or wanted not in _JSON_TYPES:
        return None
    fits = isinstance(value, _JSON_TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
    return None if fits else f"{value!r} is no {wanted}, which was asked for"


def binding(run: str, generation: int, step: e.StepId, waits_for: str, **asked: Any) -> e.Digest:
    """What an answer is bound to: an approval authorises nothing else."""
    return e.to_text(digest([run, generation, step, waits_for, asked]))


# waiting ------------------------------------------------------------------------------------------


async def until(ex: Execution, branch: Branch, waiter: Waiter) -> Closed:
    """Wait: the branch rests, and the run may leave memory meanwhile."""
    if ex.signal is not None:
        raise ex.signal
    ex.waiters[waiter.step] = waiter
    look(ex, only=waiter)
    if waiter.future.done():
        ex.waiters.pop(waiter.step, None)
        return waiter.future.result()
    waiter.resting = True
    ex.rests()
    try:
        return await waiter.future
    except asyncio.CancelledError:
        if not waiter.future.done() or waiter.future.cancelled():
            ex.wakes()
        raise
    finally:
        ex.waiters.pop(waiter.step, None)


async def until_time(ex: Execution, branch: Branch, step: e.StepId, at_us: int) -> None:
    """Sit out a time that is on record already."""
    if at_us > ex.now_us():
        await until(ex, branch, Waiter(step, "delay", deadline=at_us))


def end(ex: Execution, waiter: Waiter, closed: Closed, message: Message | None = None) -> None:
    """A wait is over: on record first, then for the code."""
    if waiter.future.done():
        return
    if waiter.waits_for != "delay":
        event = e.WaitClosed(
            at=ex.now_us(),
            step=waiter.step,
            how=closed.how,
            by=closed.by,
            message=message.number if message is not None else None,
        )
        values = {"answer": closed.answer, **({"comment": closed.comment} if closed.comment else {})}
        then, rights = waiter.then(closed) if waiter.then is not None else ((), {})
        if message is not None:
            ex.took.add(message.number)
            rights = {**rights, "takes": (message.number,)}
        seq = ex.behind(Entry(event, values), *then, **rights)
        closed = closed._replace(seq=seq)
    if waiter.resting:
        ex.wakes()
    waiter.future.set_result(closed)


def next_deadline(ex: Execution) -> int | None:
    """When time alone wakes a branch."""
    return min((w.deadline for w in ex.waiters.values() if w.deadline is not None), default=None)


# looking at what came -----------------------------------------------------------------------------


def look(ex: Execution, *, only: Waiter | None = None) -> None:
    """Take what came for the run: messages in their order, then what time brought."""
    if ex.signal is not None:
        return
    for message in _waiting_messages(ex, only):
        if message.number not in ex.took:
            _take(ex, message)
        if ex.signal is not None:
            return
    now = ex.now_us()
    for waiter in [only] if only is not None else list(ex.waiters.values()):
        if waiter.waits_for == "child":
            _look_at_child(ex, waiter)
        elif waiter.deadline is not None and waiter.deadline <= now:
            end(ex, waiter, Closed(0, "expired"))


def _waiting_messages(ex: Execution, only: Waiter | None) -> list[Message]:
    """Messages that somebody here may want, in their order; of those that nobody asks for there may be very many."""
    store = ex.engine.log.store
    if only is not None:
        names = {"event": {only.name}, "answer": {ANSWER}, "settlement": {ANSWER}}.get(only.waits_for, set[str]())
    else:
        row = store.index(ex.run_id)
        if row is None or row.delivered == ex.log.seen:
            return []
        ex.log.seen = row.delivered
        names = {waiter.name for waiter in ex.waiters.values() if waiter.waits_for == "event"}
        names |= {COMMAND, ANSWER, CHILD}
    found = [message for name in names for message in store.inbox(ex.run_id, name=name)]
    return sorted(found, key=lambda message: message.number)


def body_of(log: Log, message: Message) -> Any:
    return unpack(message.body, log.store.pieces)


def _take(ex: Execution, message: Message) -> None:
    if message.name == COMMAND:
        _command(ex, message)
    elif message.name == ANSWER:
        _answered(ex, message)
    elif message.name == CHILD:
        _drop(ex, message)
    elif message.name != SAID:
        for waiter in sorted(ex.waiters.values(), key=lambda waiter: waiter.opened):
            if waiter.waits_for == "event" and waiter.name == message.name and not waiter.future.done():
                body = body_of(ex.engine.log, message)
                end(ex, waiter, Closed(0, "answered", by=message.by, answer=body), message)
                return


def _drop(ex: Execution, message: Message) -> None:
    """Take a message that nobody waits for any more."""
    taken = e.MessageTaken(at=ex.now_us(), message=message.number, name=message.name, id=message.id, by=message.by)
    ex.took.add(message.number)
    ex.behind(Entry(taken), takes=(message.number,))


def _answered(ex: Execution, message: Message) -> None:
    waiter = next((w for w in ex.waiters.values() if w.opened and w.answer_id(ex.run_id) == message.id), None)
    if waiter is None or waiter.future.done():
        if not _may_come(ex, message):
            _drop(ex, message)
        return
    body: dict[str, Any] = body_of(ex.engine.log, message)
    if waiter.digest is not None and body.get("digest") != waiter.digest:
        _set_aside(ex, waiter, message, "it answers another question")
        return
    answer = Answer(kind=body["kind"], value=body.get("value"), by=message.by, comment=body.get("comment"))
    try:
        if waiter.fits is not None and answer.kind in ("edit", "respond", "happened"):
            waiter.fits(answer.value)
    except ValueRefused as misfit:
        _set_aside(ex, waiter, message, misfit)
        return
    told = {"kind": answer.kind, "value": answer.value}
    end(ex, waiter, Closed(0, "answered", by=message.by, answer=told, comment=answer.comment), message)


def _set_aside(ex: Execution, waiter: Waiter, message: Message, misfit: object) -> None:
    """An answer that does not fit counts as none: the same is asked again, under an id that is free."""
    _drop(ex, message)
    note = f"the answer of {message.by or 'somebody'} does not fit and was set aside: {misfit}"
    ex.behind(Entry(e.NoteMade(at=ex.now_us(), step=waiter.step, by="kedge"), {"note": note}))
    if waiter.asked is not None:
        event, values = waiter.asked
        waiter.opened = ex.behind(Entry(msgspec.structs.replace(event, at=ex.now_us(), data=None), values))


def _may_come(ex: Execution, message: Message) -> bool:
    """Whether an answer belongs to a wait that is open on record and that the code has not come to yet."""
    waits = ex.log.fold.facts.waits.values()
    return any(answer_id(ex.run_id, wait.step, wait.opened) == message.id for wait in waits)


def _look_at_child(ex: Execution, waiter: Waiter) -> None:
    outcome = child_outcome(ex.engine.log, waiter.name)
    if outcome is not None:
        end(ex, waiter, Closed(0, "answered", by=waiter.name, answer=outcome))


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


# renewals -----------------------------------------------------------------------------------------


def renewals(root: str) -> str:
    """The tag of every log as which a run went on, so that the last is found when those between are archived."""
    return f"renews:{root}"


def root_of(run: str) -> tuple[str, int]:
    """What a run was called before it was renewed, and the how manyth of its logs this is: `name+3`."""
    root, plus, number = run.rpartition("+")
    return (root, int(number)) if plus and number.isdigit() else (run, 1)


def latest(log: Log, run: str) -> str:
    """The run as which a run goes on, followed through renewals, also where logs on the way are gone."""
    row = log.store.index(run)
    if row is None:
        later = log.store.runs(RunQuery(tag=renewals(root_of(run)[0])), limit=1)
        run, row = (later[0].run, later[0]) if later else (run, None)
    while row is not None and row.status == "completed":
        last = log.event(run, log.head(run).seq)
        if not isinstance(last, e.RunRenewed):
            break
        run = last.run
        row = log.store.index(run)
    return run


def goes_along(message: Message) -> bool:
    """Whether a message that was not taken belongs to whoever the run goes on as."""
    return not message.name.startswith("kedge.") or message.name == SAID


def forwarded(log: Log, message: Message, run: str) -> Delivery:
    """A message that was sent to a run, for the one as which it goes on. Its id stays, so that it counts once."""
    pieces = tuple(log.blobs(message.body).values())
    return Delivery(
        run=run, id=message.id, name=message.name, body=message.body, by=message.by, at_us=message.at_us, pieces=pieces
    )


def bring_along(log: Log, run: str, follows: str) -> None:
    """What reached a run's inbox while it was being renewed, and was therefore left behind there."""
    late = [forwarded(log, message, run) for message in log.store.inbox(follows) if goes_along(message)]
    if late:
        log.store.deliver(late)


# commands -----------------------------------------------------------------------------------------


def _command(ex: Execution, message: Message) -> None:
    """What people do to a run that is held: it comes through the inbox, and is obeyed between steps."""
    body: dict[str, Any] = body_of(ex.engine.log, message)
    ex.took.add(message.number)
    if body["command"] == "rewind":
        # It is taken with the event that carries it out, when the code has come to rest.
        ex.close(Rewinding(message.number, message.id, body["to"], message.by, body.get("because")))
        return
    taken = e.MessageTaken(at=ex.now_us(), message=message.number, name=COMMAND, id=message.id, by=message.by)
    facts = ex.log.fold.facts
    entries = command_entries(body, by=message.by, at=ex.now_us(), version=facts.context_version)
    if facts.cancelling and body["command"] in ("cancel", "pause"):
        entries = []  # it is being cancelled already
    seq = ex.behind(Entry(taken), *entries, takes=(message.number,))
    obey(ex, entries, seq)


def obey(ex: Execution, entries: Sequence[Entry], seq: int) -> None:
    for event, values in entries:
        if isinstance(event, e.RunPaused):
            ex.close(Paused())
        elif isinstance(event, e.CancelRequested):
            ex.close(Cancelling(), cut=True)
        elif isinstance(event, e.ForkMade):
            ex.left_behind = True
        elif isinstance(event, e.ContextChanged):
            ex.context.from_outside(Change(seq, event.version, values or {}))


def command_entries(body: dict[str, Any], *, by: str | None, at: int, version: int) -> list[Entry]:
    """A command as the events that carry it out."""
    because = {"because": body["because"]} if body.get("because") else None
    match body["command"]:
        case "pause":
            return [Entry(e.RunPaused(at=at, by=by), because)]
        case "cancel":
            return [Entry(e.CancelRequested(at=at, by=by, compensate=bool(body.get("compensate"))), because)]
        case "prioritize":
            return [Entry(e.RunPrioritized(at=at, by=by, priority=body["priority"]))]
        case "set":
            changed = e.ContextChanged(at=at, version=version + 1, saw=version, by=by or "somebody")
            return [Entry(changed, {"set": body["set"], "unset": body.get("unset", [])})]
        case "forked":
            return [Entry(e.ForkMade(at=at, run=body["fork"], cut=body["cut"], by=by))]
        case _:
            return []
