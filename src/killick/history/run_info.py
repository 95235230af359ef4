"""The position of a run, and its waits, for display."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from killick.engine.control import inbox
from killick.engine.views import RunInfo, Wait
from killick.log.log import Log
from killick.model import events as e
from killick.model import facts
from killick.model.codec import Erased
from killick.model.state import State
from killick.store.protocol import Store
from killick.store.records import Head


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


def _votes(store: Store, run: str, wait: facts.Wait) -> tuple[str, ...]:
    """The approvers so far, with those whose votes are still in the inbox."""
    if wait.need <= 1:
        return wait.votes
    answer = inbox.answer_id(run, wait.step, wait.opened)
    there = store.inbox(run, name=inbox.VOTE)
    late = [str(message.by) for message in there if message.id.startswith(f"{answer}#")]
    return tuple(dict.fromkeys((*wait.votes, *late)))
