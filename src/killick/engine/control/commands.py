"""Commands to a run, each with its actor and reason: recorded at once, or sent to the inbox of the run's holder.

A command takes effect at the next step boundary; its effects are in `interventions`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from killick.definitions.agents import AGENTS
from killick.engine.approval.contracts_in_force import ContractsInForce, RunView, judge_change
from killick.engine.approval.verdicts import failed, rejection
from killick.engine.control import inbox
from killick.engine.control.interventions import Body, entries_of
from killick.engine.engine import Engine
from killick.engine.execution import Execution
from killick.engine.renewals import latest, successor
from killick.engine.replay import Change
from killick.engine.signals import Cancelling, Paused, Rewinding
from killick.engine.waits import waits
from killick.engine.waits.open_wait import Closed, Intervened
from killick.errors import (
    AnswerRefused,
    ContextStale,
    DeliveryRefused,
    EpochStale,
    HeadMoved,
    KillickError,
    RunBusy,
    ValueRefused,
)
from killick.log.group_commit import current_loop
from killick.log.log import Log
from killick.log.writer import AppendExtras, Entry, RunLog
from killick.model import events as e
from killick.model.failure import Failure
from killick.model.fold import Fold
from killick.model.typed import convert
from killick.store.records import InboxRead, Message

COMMAND_SECONDS: Final = 30.0
LOOKS: Final = 100
"""How often a caller looks whether the holder has taken its command: for about two seconds."""

_LOOK_SECONDS: Final = 0.02

_OF_ONE_LOG: Final = ("override", "skip", "retry", "forked")
"""The commands about a step or an event of one log, which mean nothing in the log that continues it."""


# leasing or sending -------------------------------------------------------------------------------


@contextlib.contextmanager
def leased(log: Log, run: str, holder: str, *, seconds: float = COMMAND_SECONDS) -> Generator[RunLog]:
    """Lease a run for the block; RunBusy where another process holds it. An abandoned run stays abandoned."""
    head, left, _ = log.lease(run, holder, seconds=seconds)
    try:
        yield log.open(run, head=head)
    finally:
        with contextlib.suppress(KillickError):
            log.store.release(run, epoch=head.epoch, left=left is not None)


class Reached(NamedTuple):
    """The leased log, with the message that was sent before; or no log, and whether the holder took the message."""

    log: RunLog | None
    sent: Message | None
    is_taken: bool = False
    holder: str = ""


@contextlib.contextmanager
def lease_or_send(
    engine: Engine, run: str, send: Callable[[], Message], *, sent: Message | None = None, looks: int = LOOKS,
    notify: Callable[[], object] = lambda: None,
) -> Generator[Reached]:  # fmt: skip
    """Lease a run for the block; while another process holds it, send it the message once and wait a few looks."""
    log = engine.log
    with contextlib.ExitStack() as stack:
        while True:
            try:
                opened = stack.enter_context(leased(log, run, engine.ids.new("command")))
            except RunBusy as busy:
                sent = sent or send()
                notify()
                taken = False
                if looks > 0:
                    looks -= 1
                    time.sleep(engine.clock.nap_seconds(_LOOK_SECONDS))
                    sent, taken = _located(log, sent)
                run = sent.run
                if looks > 0 and not taken:
                    continue
                found = Reached(None, sent, taken, busy.holder)
            else:
                taken = False
                if sent is not None:
                    # The holder may have taken the message, or renewed the run, and released it meanwhile.
                    sent, taken = _located(log, sent)
                    if sent.run != run:
                        run = sent.run
                        stack.close()
                        continue
                found = Reached(None if taken else opened, sent, taken)
            yield found
            return


def _located(log: Log, message: Message) -> tuple[Message, bool]:
    """A message where it is now, as the store moves it when its run is renewed; and whether a run has taken it."""
    while True:
        waiting = log.store.inbox(message.run, name=message.name, after=message.number - 1, limit=1)
        if any(one.number == message.number for one in waiting):
            return message, False
        renewed = successor(log, message.run)
        moved = None if renewed is None else log.store.message(renewed, message.id)
        if moved is None:
            return message, True
        message = moved


# sending ------------------------------------------------------------------------------------------


def command(
    engine: Engine, run: str, body: Body, *, by: str | None, id: str | None = None, awaits_holder: bool = False,  # noqa: A002
    notify: Callable[[], object] = lambda: None,
) -> bool:  # fmt: skip
    """Append a command to a run that no process holds, or deliver it to the holder. True: it is on record.

    With `awaits_holder` the caller waits a while for the holder to take it; a refusal there is raised here. `notify` is
    called while the command is in the inbox.
    """
    by = waits.who(by, run)
    sent: Message | None = None
    if body["command"] in _OF_ONE_LOG:
        body = {**body, "of": run}
    looks = LOOKS if awaits_holder and current_loop() is None else 0  # the holder may need a running loop

    def send() -> Message:
        at_us, name = engine.clock.now_us(), id or engine.ids.new("command")
        message = inbox.delivery(engine.log, run, inbox.COMMAND, body, id=name, by=by, at_us=at_us)
        [outcome] = engine.store.deliver([replace(message, exact=body["command"] == "forked")])
        if isinstance(outcome, DeliveryRefused):
            raise AnswerRefused(outcome.run, f"the run is over ({outcome.found}); {body['command']} does nothing to it")
        if isinstance(outcome, KillickError):
            raise outcome
        return outcome.message

    is_exact, after = body["command"] == "forked", 0
    while True:
        if sent is None:
            run = run if is_exact else latest(engine.log, run)
            after = engine.log.head(run).seq
        with (
            contextlib.suppress(HeadMoved, EpochStale),
            lease_or_send(engine, run, send, sent=sent, looks=looks, notify=notify) as found,
        ):
            sent = found.sent
            if found.log is not None:
                facts = found.log.fold.facts
                if facts.ended and facts.renewed_as is not None and sent is None and not is_exact:
                    continue  # it was renewed since it was looked up
                _append(engine, found.log, body, by, sent)
                return True
            if not found.is_taken or sent is None:
                return False
            return _recorded_outcome(engine, sent, after if sent.run == run else 0)


def _append(engine: Engine, log: RunLog, body: Body, by: str | None, sent: Message | None) -> None:
    """Carry a command out on a run that is leased for it."""
    fold, at = log.fold, engine.clock.now_us()
    rights: AppendExtras = {} if sent is None else {"takes": (sent.number,)}
    first = [] if sent is None else [Entry(inbox.message_taken(sent, at))]
    if body["command"] == "forked":
        if body["fork"] not in log.ledger.facts.forks:
            log.append(*entries_of(fold, body, by=by, at=at))  # also to a run that is over: it may be rewound
        return
    try:
        _refuse_other(body, log.run)
        if fold.facts.ended:
            raise AnswerRefused(log.run, f"the run is over ({fold.facts.status}); {body['command']} does nothing to it")
        entries = _judged(entries_of(fold, body, by=by, at=at), lambda: contracts_of(engine, log))
    except (AnswerRefused, ContextStale) as refused:
        if first:
            log.append(*first, *_refusal(body, by, at, sent, refused), **rights)
        if isinstance(refused, ContextStale):
            raise stale(engine, log.run, refused.saw) from None
        raise
    log.append(*first, *entries, *_resumption(fold, body, by, at), **rights)
    _raise_rejected(log.run, entries)


def _resumption(fold: Fold, body: Body, by: str | None, at: int) -> list[Entry]:
    """A run is due after a person ended one of its steps, unless it is paused or diverged."""
    facts = fold.facts
    if body["command"] not in ("override", "skip") or not facts.taken or facts.paused or facts.mend:
        return []
    reason = body.get("because") or f"{body['command']} of step {body['step']}"
    return [Entry(e.RunResumed(at=at, by=by or "a person"), {"because": reason})]


def _recorded_outcome(engine: Engine, message: Message, after: int) -> bool:
    """The holder's result of a command, from the record; raises the refusal recorded there."""
    taken = False
    while rows := engine.log.read(message.run, after=after, limit=1_000):
        for seq, event, _ in rows:
            if not taken:
                taken = isinstance(event, e.MessageTaken) and event.message == message.number
                continue
            if isinstance(event, e.ContractBound):
                continue
            if isinstance(event, e.NoteMade) and event.by == "killick":
                note = str(engine.log.data(message.run, seq)["note"])
                raise AnswerRefused(message.run, note.partition(": ")[2])
            if isinstance(event, e.ContextRefused):
                if event.verdict is None:
                    raise stale(engine, message.run, event.saw)
                _raise_rejected(message.run, [Entry(event, engine.log.data(message.run, seq))])
            return True
        after = rows[-1][0]
    return True


def stale(engine: Engine, run: str, saw: int) -> ContextStale:
    """The refusal of a change that is based on an older version: who changed which entries since."""
    log, facts = engine.log, engine.log.state(run).fold.facts
    changes: dict[str, str] = {}
    for seq in facts.context_parts:
        event: Any = log.event(run, seq)
        if event.version > saw:
            data = log.data(run, seq)
            given = (*(data.get("document") or ()), *data.get("set", ()), *data.get("unset", ()))
            changes |= dict.fromkeys(given, str(event.by))
    return ContextStale(run, saw=saw, version=facts.context_version, changes=changes)


# taking, by the holder of the run -----------------------------------------------------------------


def receive(ex: Execution, message: Message) -> None:
    """Take a command from the inbox of a held run; it takes effect between steps."""
    body: Body = inbox.body_of(ex.engine.log, message)
    ex.taken.add(message.number)
    if body["command"] == "rewind" and body.get("of", ex.run_id) == ex.run_id:
        # It is taken with the event that carries it out, when the code has come to rest.
        ex.close(Rewinding(message, body["to"], body.get("because")))
        return
    fold, at, by = ex.log.fold, ex.now_us(), message.by
    if fold.facts.ended and not ex.is_after_end:
        return  # with its end the store releases a run: another process may lease it before a later append
    try:
        _refuse_other(body, ex.run_id)
        _refuse_misfit(ex, body)
        entries = _judged(entries_of(fold, body, by=by, at=at), lambda: ex.judge, message.number)
        if fold.facts.cancelling and body["command"] in ("cancel", "pause"):
            entries = []  # it is being cancelled already
    except (AnswerRefused, ContextStale) as refused:
        entries = _refusal(body, by, at, message, refused)
    seq = ex.write_behind(Entry(inbox.message_taken(message, at)), *entries, takes=(message.number,))
    obey(ex, entries, seq)


def overtaken(ex: Execution, last: e.Event, *names: str) -> tuple[list[Entry], tuple[int, ...], InboxRead]:
    """The refusals of the messages that the end of a run overtakes, and what its last append takes and expects of the
    inbox. A message that comes later refuses that append, as does a rewind that the run can take, and the run looks
    again. A fork is announced to an ended run as well."""
    entries, taken, at, store = list[Entry](), list[int](), ex.now_us(), ex.engine.log.store
    row = store.index(ex.run_id)
    known = ex.log.seen if row is None else max(row.delivered, ex.log.seen)
    is_read = known == ex.log.seen and not ex.has_unread
    how = inbox.OVERTAKEN[type(last)]
    for message in (each for name in names if not is_read for each in store.inbox(ex.run_id, name=name)):
        if message.number in ex.taken:
            continue
        if message.name == inbox.COMMAND:
            body: Body = inbox.body_of(ex.engine.log, message)
            if body["command"] == "rewind" and not ex.log.fold.facts.cancelling:  # a run that is cancelled takes none
                known = min(known, message.number - 1)
                continue
            if body["command"] in ("forked", "permit"):
                continue
            refusal = _refusal(body, message.by, at, message, AnswerRefused(ex.run_id, "the run ended first"))
        else:
            who = message.by or "a person"
            refusal = [ex.noted(f"the answer of {who} came too late: the run {how} before it took it")]
        entries += [Entry(inbox.message_taken(message, at)), *refusal]
        taken.append(message.number)
    ex.taken.update(taken)
    return entries, tuple(taken), InboxRead(known, names)


def _refusal(
    body: Body, by: str | None, at: int, message: Message | None, refused: AnswerRefused | ContextStale
) -> list[Entry]:
    """The record of a command that was refused, with the reason."""
    if isinstance(refused, ContextStale):
        event = e.ContextRefused(
            at=at, version=refused.version, saw=refused.saw, by=by or "a person",
            message=None if message is None else message.number,
        )  # fmt: skip
        failure = Failure.of("killick.ContextStale", f"version {refused.saw} was seen, and it is at {refused.version}")
        return [Entry(event, {"set": body["set"], "unset": body.get("unset", []), "failure": failure})]
    step = f" step {body['step']}" if body.get("step") else ""
    note = f"{by or 'a person'} wanted to {body['command']}{step}: {refused.reason}"
    return [Entry(e.NoteMade(at=at, by="killick"), {"note": note})]


def _refuse_other(body: Body, run: str) -> None:
    """Refuses a command about a step or a position of a log that was renewed meanwhile."""
    if (of := body.get("of", run)) != run:
        raise AnswerRefused(run, f"it was about {of}, which {run} continues; look at it again")


def _refuse_misfit(ex: Execution, body: Body) -> None:
    """A branch that waits in memory checks the value itself."""
    waiter = ex.waiters.get(str(body.get("step")))
    if body["command"] == "override" and waiter is not None and waiter.waits_for == "answer" and waiter.fits:
        if waiter.name != "ask":
            return
        try:
            waiter.fits("respond", body["output"])
        except ValueRefused as misfit:
            raise AnswerRefused(ex.run_id, f"step {body['step']}: {misfit}") from None


def obey(ex: Execution, entries: Sequence[Entry], seq: int) -> None:
    """Applies recorded events to the state in memory. `seq` is of the last of the events."""
    for number, (event, values) in enumerate(entries, seq - len(entries) + 1):
        match event:
            case e.RunPaused():
                ex.close(Paused())
            case e.CancelRequested():
                ex.close(Cancelling(), cut=True)
            case e.ForkMade():
                ex.has_outside_effects = True
            case e.ContextChanged():
                ex.context.from_outside(Change(number, event.version, values or {}))
            case e.StepDelayed():
                waiter = ex.waiters.get(event.step)
                if waiter is not None and waiter.waits_for == "delay":
                    waits.end(ex, waiter, Closed(0, "expired"))
            case e.StepOverridden() | e.StepEnded():
                waits.intervene(ex, event.step, Intervened(number, event, values or {}))
            case e.WaitClosed() if event.how == "skipped":
                waits.intervene(ex, event.step, Intervened(number, event, values or {}))
            case _:
                pass


# the contract -------------------------------------------------------------------------------------


def contracts_of(engine: Engine, run: RunView) -> ContractsInForce:
    """The contracts in force for changes of a run from outside; its agent may not be declared here."""
    facts = run.fold.facts
    agent = AGENTS.get(facts.agent) if facts.agent in AGENTS.names() else None

    def document() -> Mapping[str, Any]:
        return engine.log.state(run.run).context.document or {}

    return ContractsInForce(engine, agent, run, document, lambda: facts.context_version)


def _judged(entries: list[Entry], judge_of: Callable[[], ContractsInForce], message: int | None = None) -> list[Entry]:
    """Evaluate a person's change of the context as an intention: accepted or refused, with the verdict on record."""
    event, values = entries[0] if entries else (None, None)
    if not isinstance(event, e.ContextChanged) or values is None:
        return entries
    judge = judge_of()
    verdict = judge_change(judge, values["set"], values["unset"], by=event.by)
    if verdict is None:
        return entries
    if verdict.ruling.ruling == "accept":
        judged = Entry(replace(event, verdict=verdict.event), {**values, **verdict.rests_on})
    else:
        refused = e.ContextRefused(
            at=event.at, version=event.version - 1, saw=event.saw, by=event.by, verdict=verdict.event, message=message
        )
        failure = rejection(verdict.ruling, verdict.contract)
        judged = Entry(refused, {**values, "failure": failure, **verdict.rests_on})
    return [*judge.unbound(), judged]


def _raise_rejected(run: str, entries: Sequence[Entry]) -> None:
    """The contract said no, and that is on record."""
    for event, values in entries:
        if isinstance(event, e.ContextRefused) and values is not None:
            recorded = values["failure"]
            failure: Failure = recorded if isinstance(recorded, Failure) else convert(recorded, Failure, at="failure")
            raise AnswerRefused(run, f"the contract refuses it ({failure.details.get('rule')}): {failure.message}")


# for the code -------------------------------------------------------------------------------------


async def overridden(ex: Execution, name: str, done: Intervened) -> Any:
    """The outcome that a person gave a step, when its turn comes; raises it if it is an error."""
    await ex.recorded(done.seq)
    if isinstance(done.event, e.StepOverridden):
        return done.values["output"]
    raise failed(done.event.step, name, done.values["failure"])
