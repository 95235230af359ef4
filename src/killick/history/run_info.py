"""The position of a run, and its waits, for display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from killick.engine.control import inbox
from killick.engine.views import RunInfo, Wait
from killick.errors import ValueErased
from killick.history.phrasing import arguments, entries_of
from killick.log.log import Log
from killick.model import events as e
from killick.model import facts
from killick.model.codec import Erased
from killick.model.state import State
from killick.store.protocol import Store
from killick.store.records import Head, Message


def info(log: Log, run: str) -> RunInfo:
    """Where a run is."""
    head, state = log.head(run), log.state(run)
    facts = state.fold.facts
    return RunInfo(
        id=run, agent=facts.agent, status=facts.status, step=facts.current, stage=facts.stage, plan=facts.plan,
        waits=tuple(waits_of(log.store, state)), wake_at_us=state.fold.wake_at, priority=facts.priority,
        tags=facts.tags, parent=facts.parent, started_at_us=facts.started_at, changed_at_us=facts.changed_at,
        build=facts.build, holder=head.holder,
    )  # fmt: skip


def waits_of(store: Store, state: State) -> Iterator[Wait]:
    """The open waits of a run."""
    for wait in state.fold.facts.waits.values():
        data = state.data(wait.opened)
        erased = isinstance(data.get("prompt"), Erased)
        yield Wait(
            id=f"{state.run}:{wait.step}", run=state.run, step=wait.step, waits_for=wait.waits_for, name=wait.name,
            prompt="(what was asked is erased)" if erased else data.get("prompt"), to=wait.to,
            deadline_us=wait.deadline, since_us=wait.at,
            verbs=inbox.verbs_of(wait.waits_for) if erased else tuple(data.get("verbs") or ()),
            options=() if erased else tuple(data.get("options") or ()), schema=None if erased else data.get("schema"),
            intention=None if erased else data.get("intention"), need=wait.need, votes=_votes(store, state.run, wait),
            may=None if erased or data.get("may") is None else tuple(data["may"]), rule=wait.rule,
            reason=None if erased else data.get("reason"), because=because_of(state, wait.step),
            digest=getattr(state.event(wait.opened), "digest", None), round=wait.round, opened=wait.opened,
            apart=None if erased else data.get("apart"),
        )  # fmt: skip


def because_of(state: State, step: str) -> Any:
    """The agent's reason for a step: given with the call, or with the decision right before it."""
    path, _, number = step.rpartition(".")
    before = f"{path}." * bool(path) + str(int(number) - 1) if number.isdigit() else ""
    for each in map(state.fold.step, (step, before)):
        because = None if each is None else state.data(each.output if each.sort == "decision" else each.intended)
        if because is not None and (found := because.get("because")) is not None:
            return None if isinstance(found, Erased) else found
    return None


def blocked_by(log: Log, head: Head) -> str | None:
    """The requirement that the last worker lacked to serve an idle hook, such as a secret."""
    last = log.event(head.run, head.seq) if head.holder is None else None
    return log.data(head.run, head.seq).get("note") if isinstance(last, e.NoteMade) and last.by == "killick" else None


class PendingAnswer(NamedTuple):
    """An answer in a run's inbox that the run has not taken yet."""

    by: str
    at_us: int
    verb: str
    value: Any

    def text(self, state: State) -> str:
        """The answer, and who takes it: answered by mia: edit euros=700; a worker takes it next."""
        if state.status == "code_mismatch":
            return f"answered by {self.by}; held by the code"
        value = "" if self.value is None else f" {arguments(self.value, 200)}"
        then = "it is taken when the run is resumed" if state.status == "paused" else "a worker takes it next"
        then = "your program's next call takes it" if state.fold.facts.hosted else then
        return f"answered by {self.by}: {self.verb}{value}; {then}"


def pending_answer(log: Log, run: str, wait: Wait | facts.Wait) -> PendingAnswer | None:
    """The answer to a wait that its run has not taken; None where people still have to answer."""
    answer = inbox.answer_id(run, wait.step, wait.opened)
    for message in log.store.inbox(run, name=inbox.ANSWER):
        if message.id == answer:
            body = entries_of(inbox.body_of(log, message))
            return PendingAnswer(message.by or "a person", message.at_us, str(body.get("kind")), body.get("value"))
    voters = _votes(log.store, run, wait)
    if wait.need <= 1 or len(voters) < wait.need:
        return None
    voted = [message.at_us for message in log.store.inbox(run, name=inbox.VOTE)]
    return PendingAnswer(", ".join(voters), max(voted, default=log.state(run).fold.facts.changed_at), "approve", None)


def untaken_answers(log: Log, run: str) -> Iterator[tuple[Wait, Message, Mapping[str, Any]]]:
    """The answers and votes in a run's inbox: the wait that each is for, the message, and its body."""
    there = [each for each in log.store.inbox(run) if each.name in (inbox.ANSWER, inbox.VOTE)]
    for wait in waits_of(log.store, log.state(run)) if there else ():
        answer = inbox.answer_id(run, wait.step, wait.opened)
        for message in there:
            if message.id == answer or message.id.startswith(f"{answer}#"):
                yield wait, message, entries_of(inbox.body_of(log, message))


def pending_answers(log: Log, run: str) -> dict[str, str]:
    """The answers that a run has not taken, in words, by the steps that asked."""
    state = log.state(run)
    found = ((step, pending_answer(log, run, wait)) for step, wait in state.fold.facts.waits.items())
    return {step: answer.text(state) for step, answer in found if answer is not None}


def _votes(store: Store, run: str, wait: Wait | facts.Wait) -> tuple[str, ...]:
    """The approvers so far, with those whose votes are still in the inbox."""
    if wait.need <= 1:
        return wait.votes
    answer = inbox.answer_id(run, wait.step, wait.opened)
    there = store.inbox(run, name=inbox.VOTE)
    late = [str(message.by) for message in there if message.id.startswith(f"{answer}#")]
    return tuple(dict.fromkeys((*wait.votes, *late)))


def paused_because(log: Log, run: str) -> str | None:
    """The reason that was given for a pause, if any."""
    state = log.state(run)
    if not state.fold.facts.paused:
        return None
    for seq in range(state.seq, 0, -1):
        if isinstance(log.event(run, seq), e.RunPaused):
            with suppress(ValueErased):
                return str(log.data(run, seq).get("because") or "") or None
    return None
