"""Time travel: rewinds a run, forks it, or undoes one effect. Resolves positions, and describes the result in words.

A run that a worker holds is rewound by that worker at its next boundary; a fork does not touch its parent.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from killick.client.answers import deliver
from killick.definitions.agents import AGENTS
from killick.definitions.tools import TOOLS
from killick.engine import renewals
from killick.engine.approval.contracts_in_force import Looked, judge_change
from killick.engine.context import Context
from killick.engine.control import inbox
from killick.engine.control.commands import contracts_of, lease_or_send, leased
from killick.engine.control.inbox import delivery
from killick.engine.control.interventions import person_ended, refuse_model
from killick.engine.effects.branch_point import cut
from killick.engine.effects.fork import UNCHANGED, Conditions, Fork, fork
from killick.engine.effects.rewind import rewind
from killick.engine.engine import Engine
from killick.engine.steps.workspace_folders import owner_of, workspace_of
from killick.engine.steps.workspace_grants import grant, is_granted
from killick.engine.steps.workspace_hook import captured, describe_restore, restored
from killick.engine.waits import waits
from killick.errors import (
    AgentUnknown,
    AnswerRefused,
    EpochStale,
    HeadMoved,
    KillickError,
    RunExists,
    RunUnknown,
    TimeRefused,
)
from killick.log.log import Log
from killick.log.writer import AppendExtras, Entry, RunLog
from killick.logger import get_logger
from killick.model import event_codec
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.cipher import Place
from killick.model.codec import Erased
from killick.model.facts import OUT_OF_BAND, Facts, Step, is_model
from killick.model.failure import Failure
from killick.model.fold import Fold
from killick.model.ledger import Capture, Ledger
from killick.model.typed import convert
from killick.store.protocol import Store
from killick.store.records import Append, Message, Row
from killick.workspace.workspace import Snapshot

PAUSE_SECONDS_MAX: Final = 30.0
"""How long a resume waits for a pause that a running tool delays."""

logger: Final = get_logger("killick")


def rewound(engine: Engine, run: str, to: str, *, by: str | None, because: str | None) -> str:
    """Rewinds a run to a position, or sends the command to its holder. Returns the result in words."""
    log, clock, label = engine.log, engine.clock, cut(engine.log, run, to).label

    def send() -> Message:
        body = {"command": "rewind", "to": to, "because": because, "of": run}
        return deliver(engine, run, inbox.COMMAND, body, id=engine.ids.new("command"), by=by, exact=True).message

    with lease_or_send(engine, run, send) as reached:
        handle, sent = reached.log, reached.sent
        if handle is None:
            holder = f", by {reached.holder}, which holds it" if reached.holder else ""
            return f"{'' if reached.is_taken else 'will be '}rewound to {label}{holder}"
        if (taken := _uncaptured(engine, run, handle.ledger, handle.key)) is not None:
            handle.append(captured(taken, handle.ledger.uncaptured(), at=clock.now_us()))
        found = rewind(log, handle, to, at=clock.now_us(), by=by, because=because)
        if sent is None:
            handle.append(found.entry, **found.rights)
        else:
            took = Entry(inbox.message_taken(sent, clock.now_us()))
            handle.append(took, found.entry, **found.rights, takes=(sent.number,))
        return f"rewound to {found.label}{_files_back(engine, handle, by)}"


def _uncaptured(engine: Engine, run: str, ledger: Ledger, key: str | None) -> Snapshot | None:
    """Snapshots the files of a run whose last process changed them and died before it recorded a snapshot."""
    if not ledger.uncaptured():
        return None
    try:
        with workspace_of(key, ledger, engine.store) as workspace:
            return workspace.capture(owner_of(engine.store, run))
    except (KillickError, OSError) as error:
        logger.warning("%s: its files are those of its last snapshot: %s", run, error)
        return None


def _files_back(engine: Engine, run: RunLog, by: str | None) -> str:
    """Restores the files with the run if its vault is here; otherwise the worker that resumes the run does so first."""
    facts = run.ledger.facts
    due = facts.files_due
    if due is None or facts.workspace is None:
        return ""
    try:
        with workspace_of(run.key, run.ledger, engine.store) as workspace:
            done = workspace.restore(e.from_text(due), None, owner_of(engine.store, run.run))
    except (KillickError, OSError) as error:
        return f"; its files are restored when it is resumed ({error})"
    if done.again:
        return f"; its files are restored when it is resumed (a process writes to them; {describe_restore(done)})"
    run.append(restored(done, due, "rewound", at=engine.clock.now_us(), by=by))
    return f", and its files with it ({describe_restore(done)})"


def forked(
    engine: Engine,
    run: str,
    at: str,
    conditions: Conditions,
    *,
    id: str | None,  # noqa: A002
    by: str | None,
    because: str | None,
    workspace: str | None = None,
) -> tuple[str, str]:
    """Forks a run at a position; returns the fork's id and agent. It is due at once, its files in its own folder."""
    waits.refuse_own(id)
    row = engine.store.index(run)
    if row is None:
        raise RunUnknown(run)
    conditions = checked(engine, run, row.agent, conditions, by)
    while True:
        name, log = id or free_name(engine.store, run), engine.log.reading_once()
        try:
            if engine.store.head(name) is not None:
                raise RunExists(name)
            parent = log.ledger_of_files(run)
            folder = _folder_of_fork(engine.store, run, parent.facts.workspace, name, workspace)
            taken = _uncaptured(engine, run, parent, log.key_of(run)) if folder is not None else None
            made = fork(
                log, run, at, name, conditions, at=engine.clock.now_us(), by=by, because=because, workspace=folder,
                captured=None if taken is None else Capture(parent.uncaptured(), e.to_text(taken.root), 0),
                unrecorded=parent.uncaptured(),
            )  # fmt: skip
            _create_fork(engine, made)
            if made.forked.files is not None:
                _files_forked(engine, name)
            return name, row.agent
        except RunExists:
            if id is not None:
                raise
        except (HeadMoved, EpochStale):
            continue  # its parent continued meanwhile


def free_name(store: Store, run: str) -> str:
    """The default id of a fork: the first that no run has."""
    names = chain((f"{run}-fork",), (f"{run}-fork-{number}" for number in count(2)))
    return next(name for name in names if store.head(name) is None)


def _folder_of_fork(store: Store, run: str, own: str | None, name: str, workspace: str | None) -> str | None:
    """The folder of a fork: new or empty, because existing files are kept. It is granted, but not next to a
    folder that only the record names."""
    if own is None:
        if workspace is not None:
            raise TimeRefused(run, "has no workspace; fork it without workspace=")
        return None
    default = Path(own).with_name(f"{Path(own).name}-{name.replace('/', '_')}")
    folder = Path(os.path.realpath(workspace)) if workspace is not None else default
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TimeRefused(run, f"{folder} is not empty; give the fork a new folder, with workspace=")
    if folder.is_relative_to(own):
        raise TimeRefused(run, f"{folder} is inside the run's own workspace; give the fork a folder outside")
    if workspace is None and not is_granted(store, own):
        raise TimeRefused(run, f"no agent loaded here declares {own}; name the fork's folder, with workspace=")
    grant(store, folder)
    return str(folder)


def _files_forked(engine: Engine, fork: str) -> None:
    """Fills the folder of a fork at once, unless a worker has it already. If that fails, it is filled when the fork is
    executed."""
    try:
        with leased(engine.log, fork, engine.ids.new("command")) as handle:
            if (due := handle.ledger.facts.files_due) is not None:
                with workspace_of(handle.key, handle.ledger, engine.store) as workspace:
                    workspace.restore(e.from_text(due), None, owner_of(engine.store, fork))
    except (KillickError, OSError) as error:
        logger.warning("%s: its files are restored when it is resumed: %s", fork, error)


def _create_fork(engine: Engine, found: Fork) -> None:
    """Creates a fork and notifies its parent in the same write: by an event, or by its inbox if a worker holds it.

    The sums of the fork's ledger are not needed for that, so they are not read.
    """
    log, forked = engine.log, found.forked
    made = e.ForkMade(at=forked.at, run=forked.run, cut=forked.cut, by=forked.by)
    parent = log.head(forked.parent)
    rights: AppendExtras = {"sends": found.sends}
    refuse_model(log.state(parent.run, parent.seq).fold.facts, forked.by, "fork")
    if parent.holder is None:
        place = Place(parent.run, parent.seq + 1, parent.hash)
        row = Row(place.seq, *event_codec.chained(place, made, None, log.cipher(parent.run)))
        rights["also"] = (
            Append(run=parent.run, after=parent.seq, before=parent.hash, epoch=parent.epoch, rows=(row,)),
        )
    else:
        command = {"command": "forked", "fork": forked.run, "cut": forked.cut, "of": parent.run}
        name = inbox.FORKED + forked.run
        message = delivery(log, parent.run, inbox.COMMAND, command, id=name, by=forked.by, at_us=forked.at)
        rights["sends"] = (*found.sends, replace(message, exact=True))
    log.fork(forked, found.fold, Ledger()).append(*found.entries, **rights)


def _refuse_rejected(engine: Engine, run: str, conditions: Conditions, by: str) -> None:
    """Evaluates a changed context by the contract, as for any change by a person."""
    log = engine.log
    judge = contracts_of(engine, Looked(run, log.state(run).fold, log.ledger(run), log.head(run).base))
    verdict = judge_change(judge, through_codec(dict(conditions.set)), tuple(conditions.unset), by=by)
    if verdict is not None and verdict.ruling.ruling == "reject":
        reason = f"the contract rejects that context, by rule {verdict.ruling.rule!r}: {verdict.ruling.message}"
        raise TimeRefused(run, reason)


def checked(engine: Engine, run: str, agent: str, conditions: Conditions, by: str | None) -> Conditions:
    """Validates the conditions of a fork as its code will see them, so that errors reach the caller here."""
    if conditions.effects not in ("recorded", "live", "none"):
        raise TimeRefused(run, f"effects={conditions.effects!r} is not one of recorded, live, none")
    changed: dict[str, Any] = {}
    if conditions.input is not UNCHANGED:
        value = through_codec(conditions.input, at="input")
        with contextlib.suppress(AgentUnknown):
            value = AGENTS.get(agent).checked(value)
        changed["input"] = value
    if conditions.set:
        refuse_misfit(engine.log, run, dict(conditions.set))
    if conditions.set or conditions.unset:
        _refuse_rejected(engine, run, conditions, by or "a person")
    fold = engine.log.state(run).fold if conditions.output else Fold()
    for name, output in conditions.output.items():
        step = fold.step(name)
        tool = TOOLS.get(step.name) if step is not None and step.sort == "tool" and step.effect is not None else None
        if tool is not None and tool.shape.returns is not Any:
            convert(through_codec(output, at=f"step {name}"), tool.shape.returns, at=f"step {name} ({tool.name})")
    return conditions if not changed else replace(conditions, **changed)


def refuse_misfit(log: Log, run: str, changes: dict[str, Any]) -> None:
    """Refuses an edit that does not fit the context type of the agent, if that is declared here."""
    state = log.state(run)
    with contextlib.suppress(AgentUnknown):
        agent = AGENTS.get(state.agent)
        if agent.options.context is not None:
            Context(agent, state.context.document, 0).update(changes)


def resumed(engine: Engine, run: str, *, by: str | None, because: str | None) -> str:
    """Resumes a paused, failed or abandoned run, or its last renewal. Returns the result in words."""
    while (done := _resumed(engine, renewals.latest(engine.log, run), by=by, because=because)) is None:
        pass  # it was renewed since it was looked up
    return done


def _resumed(engine: Engine, run: str, *, by: str | None, because: str | None) -> str | None:
    log = engine.log
    data = {"because": because} if because else None
    at = engine.clock.now_us()
    _await_pause(engine, run)
    with leased(log, run, engine.ids.new("command")) as handle:
        facts = handle.fold.facts
        if facts.ended and facts.renewed_as is not None:
            return None
        if facts.status in ("completed", "cancelled"):
            raise AnswerRefused(run, f"the run is over ({facts.status}); start another")
        late = [
            message for message in log.store.inbox(run, name=inbox.COMMAND)
            if inbox.body_of(log, message)["command"] == "pause"
        ]  # fmt: skip
        if is_model(by):
            refuse_model(facts, by, "resume", also=_not_a_models(log, facts, late))
        is_held_back = facts.paused or facts.mend
        if is_held_back or facts.status == "running":
            # A running run with a free lease: its holder died, and the run is due. Pauses sent before are dropped.
            taken = [Entry(inbox.message_taken(message, at)) for message in late]
            handle.append(*taken, Entry(e.RunResumed(at=at, by=by), data), takes=tuple(each.number for each in late))
            return "resumed" if is_held_back else "taken over from a dead process"
        if facts.status != "failed":
            return f"already {facts.status}; nothing to resume"
        failed: Any = log.event(run, facts.ended)
        undone = _first_undone(handle.fold)
        step = undone or (handle.fold.step(failed.step) if failed.step else None)
        if step is None:
            handle.append(Entry(e.RunResumed(at=at, by=by), data))
            return "resumed where its code failed"
        found = rewind(log, handle, f"{step.id}:before", at=at, by=by, because=because)
        handle.append(found.entry, **found.rights)
        return f"rewound to step {step.id}, which {'was undone' if undone is not None else 'failed'}"


def _not_a_models(log: Log, facts: Facts, late: Sequence[Message]) -> str | None:
    """Returns why a model may not resume a run, apart from what holds it: a person's pause is on its way or a person
    ended the step that failed; or a worker takes it over, and counts the death of its process."""
    if paused_by := [each.by or "a person" for each in late if not is_model(each.by)]:
        return f"it is being paused by {paused_by[0]}"
    if facts.status == "failed":
        failure = log.data(facts.run, facts.ended).get("failure")
        return None if isinstance(failure, Erased) else person_ended(convert(failure, Failure, at="failure"))
    return "its process died, and a worker takes it over by itself" if facts.status == "running" else None


def _await_pause(engine: Engine, run: str) -> None:
    """Waits, up to a limit, until the holder of a run that is being paused releases it: its tool ends first."""
    end = engine.clock.monotonic() + PAUSE_SECONDS_MAX
    while engine.clock.monotonic() < end:
        head, row = engine.store.head(run), engine.store.index(run)
        is_held = head is not None and head.holder is not None and engine.store.lives(head.holder)
        asked = row is not None and (row.status == "paused" or engine.store.inbox(run, name=inbox.COMMAND, limit=1))
        if not is_held or not asked:
            return
        time.sleep(engine.clock.nap_seconds(0.02))


def _first_undone(fold: Fold) -> Step | None:
    """The first step that was undone because the run failed; effects undone by a person do not count."""
    undone = {step.undoes for step in fold.steps if step.sort == "undo" and not step.id.startswith(OUT_OF_BAND)}
    return next((step for step in fold.steps if step.undone and step.id in undone), None)
