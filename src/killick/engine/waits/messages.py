"""Messages of a run: reading its inbox, and sending to other runs."""

from __future__ import annotations

from typing import Any

from killick.engine.approval.approvals import intend
from killick.engine.approval.verdicts import PendingVerdict
from killick.engine.control.inbox import SAID, body_of, delivery, message_taken
from killick.engine.divergence import recorded_step, refuse_stopped, replay_outcome
from killick.engine.effects import dedupe
from killick.engine.execution import Branch, Execution
from killick.engine.failures import describe
from killick.engine.replay import OVER, RequestedStep
from killick.engine.steps.intention import Intent
from killick.errors import KillickError, RunUnknown, StepFailed, ValueRefused
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.codec import digest
from killick.model.ledger import SENDING


async def remarks(ex: Execution, branch: Branch) -> list[Any]:
    """The messages of people: on replay the recorded ones, live those in the inbox."""
    said: list[Any] = []
    while (seq := ex.record.take(branch.position, "message.taken", SAID)) is not None:
        said.append(ex.record.data(seq)["body"])
    if said or ex.record.has_more(branch.path, branch.count):
        return said
    for message in ex.engine.log.store.inbox(ex.run_id, name=SAID):
        if message.number in ex.taken:
            continue
        ex.taken.add(message.number)
        body = body_of(ex.engine.log, message)
        taken = message_taken(message, ex.now_us(), step=branch.position)
        ex.write_behind(Entry(taken, {"body": body}), takes=(message.number,))
        said.append(body)
    return said


async def send(ex: Execution, branch: Branch, run: str, name: str, body: Any) -> None:
    if name.startswith("killick."):
        raise ValueRefused("name", f"messages named {name!r} are Killick's own; choose another name")
    step = branch.number()
    message = {"run": run, "name": name, "body": body}
    bound = e.to_text(digest(message, at="body", secret_key=ex.log.secret_key))
    claim = RequestedStep("tool", "send", digest=bound, binding=True)
    past = await recorded_step(ex, branch, step, claim, message)
    if past is not None and past.status in OVER:
        await replay_outcome(ex, branch, past)
        return
    await ex.await_turn()
    wanted = PendingVerdict(ex, branch, step, Intent.of("tool", "send", message, bound))
    await intend(wanted, past, adopts=ex.has_outside_effects and dedupe.was_done(wanted, SENDING))
    refuse_stopped(ex, branch, step)
    if ex.has_outside_effects and await dedupe.sent_before(wanted):
        return
    generation = ex.log.fold.facts.generation
    message_id = f"{ex.run_id}:{step}{f'~{generation}' if generation else ''}"
    sent = delivery(ex.engine.log, run, name, body, id=message_id, by=ex.run_id, at_us=ex.now_us())
    [outcome] = ex.engine.log.store.deliver([sent])
    if isinstance(outcome, RunUnknown):
        failure = describe(outcome)
        await ex.recorded(ex.write_behind(ex.step_ended(step, "failed", failure=failure)))
        raise StepFailed(step, "send", failure)
    if isinstance(outcome, KillickError):
        raise outcome
    event = e.MessageSent(at=ex.now_us(), step=step, run=run, name=name, id=message_id)
    await ex.recorded(ex.write_behind(Entry(event, {"body": body})))
    ex.on_message(run)
