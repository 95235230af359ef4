"""The trigger runner: maintains the logs of triggers and fires those that are due.

A trigger's log is its only state: its declaration, its next due time, its firings, the skipped ones and the queued
ones. A firing and the run that it starts are one commit, so a crash leaves both or neither.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from killick.blocking import C, Group, InThread, OnLoop
from killick.clock import doubt_seconds
from killick.definitions.agents import AGENTS, AnyAgent
from killick.definitions.schedules import LATE_US, decide, moment, stamp
from killick.engine import renewals
from killick.engine.control import inbox
from killick.engine.control.commands import command, leased
from killick.engine.control.inbox import delivery, refuse_own
from killick.engine.control.interventions import entries_of
from killick.engine.engine import Engine
from killick.engine.failures import describe
from killick.engine.outcome import ended
from killick.engine.steps.children import first_entries
from killick.engine.steps.workspace_folders import refuse_shared
from killick.engine.waits import waits
from killick.errors import (
    AnswerRefused,
    EpochStale,
    HeadMoved,
    KillickError,
    RunBroken,
    RunBusy,
    RunExists,
    RunUnknown,
)
from killick.log.log import Log
from killick.log.writer import Entry, RunLog
from killick.logger import get_logger
from killick.model import events as e
from killick.model import facts, system_events
from killick.model.chunks import through_codec
from killick.model.typed import convert
from killick.store.protocol import Store
from killick.store.records import ENDED, Append, Message, RunQuery, RunRow
from killick.triggers import EVENT, LOG, OWN, TAG, TRIGGERS, Firing, Previous, Spec, Trigger, TriggerInfo
from killick.workers.background import TaskControl

logger: Final = get_logger("killick")

FIRE: Final = "killick.fire"
"""The message name of a manual firing, for a trigger that is leased or declared elsewhere."""

QUEUED_MAX: Final = 100
"""How many firings of a schedule may queue behind a running one; events queue without limit."""

LOOK_SECONDS: Final = 1.0
"""How often a queued firing checks whether the run before it has ended."""

HEAR_SECONDS: Final = 10.0
"""The longest pause between checks for messages, for a trigger with a condition."""

_TRIES: Final = 100
_AGAIN: Final = (RunExists, HeadMoved, EpochStale)


# a worker's duty ----------------------------------------------------------------------------------


def ensure(engine: Engine) -> list[str]:
    """Creates or updates the log of every trigger declared here; returns the agents of these logs."""
    seen_to: list[str] = []
    for trigger in list(TRIGGERS.values()):
        try:
            _ensure(engine, trigger)
            seen_to.append(trigger.own_agent)
        except RunBroken as error:
            logger.warning("%s: this trigger is out of order: %s", trigger.name, error)
    return seen_to


def _ensure(engine: Engine, trigger: Trigger) -> None:
    """Conditional, without a lease: a concurrent writer appends the same, or the append conflicts."""
    for _ in range(_TRIES):
        with contextlib.suppress(*_AGAIN):
            if engine.store.head(trigger.log) is None:
                at, build = engine.clock.now_us(), engine.build(trigger.agent)
                started = e.RunStarted(at=at, run=trigger.log, agent=trigger.own_agent, build=build, tags=trigger.tags)
                engine.log.begin(trigger.log).append(Entry(started), _set(engine, trigger, after_us=0))
                return
            log = engine.log.open(trigger.log)
            if entries := _changes(engine, trigger, log.fold.facts):
                log.append(*entries)
            return
    raise RunBusy(trigger.log, holder="others that declare it")


def _changes(engine: Engine, trigger: Trigger, facts: facts.Facts) -> list[Entry]:
    """The events that an existing log needs to match the declaration."""
    known = facts.trigger
    at = engine.clock.now_us()
    if known is not None and known.digest == trigger.spec.digest and not facts.ended:
        if known.next is None or trigger.spec.can_be_due(known.next, at):
            return []
        return [_set(engine, trigger, after_us=known.last)]  # it was computed while the clock was ahead
    entries: list[Entry] = []
    if facts.ended:
        entries.append(Entry(e.RunResumed(at=at, by="killick")))
    if set(facts.tags) != set(trigger.tags):
        entries.append(Entry(e.RunTagged(at=at, tags=trigger.tags, by="killick")))
    return [*entries, _set(engine, trigger, after_us=known.last if known is not None else 0)]


def _set(engine: Engine, trigger: Trigger, *, after_us: int) -> Entry:
    """The declaration as an event. A time that fired before does not fire again, even if the clock went back."""
    at, spec = engine.clock.now_us(), trigger.spec
    due = spec.next_due(at, after_us)
    event = system_events.TriggerSet(at=at, digest=spec.digest, sort=spec.sort, agent=spec.agent, next=due)
    return Entry(event, {"spec": msgspec.structs.asdict(spec)})


async def attend(engine: Engine, log: RunLog, control: TaskControl) -> None:
    """Does everything that is due. Continues while a condition must be polled, or a firing waits for a run to end."""
    trigger = TRIGGERS.get(log.run.removeprefix(LOG))
    if trigger is None:
        return
    at_work = _LeasedTrigger(engine, log, trigger)
    if at_work.spec.sort != trigger.spec.sort:
        raise KillickError(f"{log.run}: other workers declare it {str(at_work.spec)!r}; restart this worker")
    look_at = engine.clock.monotonic()
    while True:
        await at_work.consume_messages()
        facts = log.fold.facts
        if facts.paused or facts.ended or control.stopping:
            return
        doubt = await at_work.do_due()
        await at_work.do_queued()
        rest = [LOOK_SECONDS] if at_work.known.queued else []
        rest += [doubt] if doubt else []
        if at_work.spec.sort == "when":
            now = engine.clock.monotonic()
            if now >= look_at:
                look_at = now + (at_work.spec.seconds or 0.0)
                await at_work.look()
            rest += [look_at - now, HEAR_SECONDS]
        if not rest:
            return
        await control.rest(min(rest))
        head = engine.store.head(log.run)
        if head is None or head.seq != log.seq:
            return  # another process changed the declaration: the log is due, and is opened again


class _Cause(NamedTuple):
    """The cause of a firing: a due time, a message, a condition's value, or a queued firing."""

    at: int
    next: int | None
    due: int | None = None
    number: int = 0
    data: Mapping[str, Any] = MappingProxyType({})
    message: Message | None = None
    by: str | None = None
    run: str | None = None
    """The run id that was returned for a manual firing."""
    given: Any = msgspec.UNSET
    """The input of a manual firing."""


class _LeasedTrigger:
    """A trigger's log, held under a lease."""

    def __init__(self, engine: Engine, log: RunLog, trigger: Trigger) -> None:
        self.engine = engine
        self.log = log
        self.trigger = trigger
        self.spec = spec_of(engine.log, log.run, self.known)
        self._noted = False

    @property
    def known(self) -> facts.Trigger:
        """The recorded state of the trigger."""
        known = self.log.fold.facts.trigger
        assert known is not None, "a trigger's log must begin with its declaration"
        return known

    def _now_us(self) -> int:
        return self.engine.clock.now_us()

    async def _call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Calls user code, plain or async, without blocking the loop."""
        return await self.engine.threads.call(partial(fn, *args))

    # messages ---------------------------------------------------------------------------------

    async def consume_messages(self) -> None:
        """Consumes every message: an event, a manual firing, a command, or one that does not concern a trigger."""
        store = self.engine.store
        while messages := store.inbox(self.log.run, limit=100):
            for message in messages:
                await self._take(message)

    async def _take(self, message: Message) -> None:
        self.log.seen = message.number
        at, due = self._now_us(), self.known.next
        is_event = self.spec.sort == "event" and message.name == self.spec.what
        body: Any = inbox.body_of(self.engine.log, message)
        if is_event:
            await self.set_off(_Cause(message.at_us, due, data={"body": body}, message=message, by=message.by))
        elif message.name == FIRE:
            given = body.get("input", msgspec.UNSET)
            await self.set_off(_Cause(at, due, run=body["run"], given=given, message=message, by=message.by))
        else:
            entries: list[Entry] = []
            if message.name == inbox.COMMAND and not self.log.fold.facts.ended:
                entries = entries_of(self.log.fold, body, by=message.by, at=at)
            await self._append(_Cause(at, due, message=message), *entries)

    async def do_due(self) -> float:
        """Fires what the schedule has due by now. Returns for how long to make up for nothing, because the clock may
        be ahead."""
        now, due, schedule = self._now_us(), self.known.next, self.spec.schedule
        if schedule is None or due is None or due > now:
            return 0.0
        if now - due > LATE_US and (doubt := doubt_seconds(self.engine.clock, due)):
            return doubt
        dues = schedule.dues(due, now)
        decision = decide(dues, now, self.spec.missed)
        if decision.passed is not None:
            first, last, count = decision.passed
            because: system_events.PassedBecause = "paused" if last <= self.known.resumed else "missed"
            upcoming = decision.fires[0] if decision.fires else dues.next
            passed = system_events.TriggerPassed(
                at=now, first=first, last=last, count=count, because=because, next=upcoming
            )
            await self.log.append_soon(Entry(passed))
        for due, upcoming in zip(decision.fires, (*decision.fires[1:], dues.next), strict=False):
            cause, run = _Cause(due, upcoming, due=due), self._run_of(due)
            if due <= self.known.last and self.engine.store.head(run) is not None and self._has_started(run):
                await self._pass(cause, "duplicate", run=run)  # it fired while the clock was ahead
            else:
                await self.set_off(cause)
        return 0.0

    def _run_of(self, due: int) -> str:
        """The id of the run that a due time starts."""
        return f"{self.trigger.name}@{stamp(due)}"

    async def do_queued(self) -> None:
        """Fires queued causes in order, as far as the run before allows."""
        for queued in self.known.queued:
            if self.spec.overlap == "queue" and self._busy() is not None:
                return
            event: Any = self.engine.log.event(self.log.run, queued.seq)
            data = self.engine.log.data(self.log.run, queued.seq)
            at = queued.at if queued.due is None else queued.due
            cause = _Cause(at, self.known.next, due=queued.due, number=queued.number, data=data, by=event.by)
            await self.set_off(cause)

    async def look(self) -> None:
        """Polls the condition. Only a change is recorded; a condition that raises counts as no change."""
        assert self.trigger.condition is not None
        try:
            value = through_codec(await self._call(self.trigger.condition), at="value")
            holds = bool(value)
        except Exception as error:
            if not self._noted:
                note = {"note": f"the condition gave no answer: {describe(error)}"}
                await self.log.append_soon(Entry(e.NoteMade(at=self._now_us(), by="killick"), note))
            self._noted = True
            return
        self._noted = False
        if holds == self.known.holds:
            return
        at = self._now_us()
        turned = Entry(system_events.TriggerTurned(at=at, holds=holds, next=self.known.next))
        if holds:
            await self.set_off(_Cause(at, self.known.next, data={"value": value}), turned)
        else:
            await self.log.append_soon(turned)

    # firings ----------------------------------------------------------------------------------

    async def set_off(self, cause: _Cause, *first: Entry) -> BaseException | None:
        """Fires, skips or queues, in one commit with the entries given. Returns the error if no input could be made."""
        if cause.run is None:
            overlap = self.spec.overlap
            busy = None if overlap == "allow" else self._busy()
            waits_ahead = bool(self.known.queued) and not cause.number
            if self.log.fold.facts.paused or (overlap == "queue" and (busy is not None or waits_ahead)):
                await self._queue(cause, *first)
                return None
            if busy is not None and overlap == "skip":
                await self._pass(cause, "overlap", *first)
                return None
            if busy is not None and overlap == "cancel":
                # Before the firing, which stays due until it is made.
                body = {"command": "cancel", "compensate": False, "because": f"{self.trigger.name} fires again"}
                command(self.engine, busy, body, by=self.log.run)
        return await self._fire(cause, *first)

    async def _fire(self, cause: _Cause, *first: Entry) -> BaseException | None:
        now, name = self._now_us(), self.trigger.name
        number = cause.number or self.known.number + 1
        run = cause.run or self._own_id(f"{name}@{number}" if cause.due is None else self._run_of(cause.due))
        due, at = moment(cause.at, self.spec.tz), moment(now, self.spec.tz)
        body, value = cause.data.get("body"), cause.data.get("value")
        firing = Firing(trigger=name, number=number, due=due, at=at, run=run, body=body, value=value)
        agent = self.trigger.agent if self.trigger.agent.name == self.spec.agent else AGENTS.get(self.spec.agent)
        previous = _previous(self.engine, self.known.run) if self.trigger.wants_previous else None
        try:
            if self.trigger.make_id is not None and cause.run is None:
                made = await self._call(self.trigger.make_id, firing)
                waits.refuse_own(run := run if made is None else made)
                if self.engine.store.head(run) is not None:
                    await self._pass(cause, "duplicate", *first, run=run)
                    return None
                firing = msgspec.structs.replace(firing, run=run)
            birth = await self._new_run(agent, firing, previous, cause)
        except Exception as error:
            await self._pass(cause, "input failed", *first, failure=describe(error))
            return error
        fired = system_events.TriggerFired(at=now, number=number, run=run, due=cause.due, next=cause.next, by=cause.by)
        # A run of this trigger with that id is this very firing, started earlier under the same name.
        also = () if self.engine.store.head(run) is not None else (birth,)
        await self._append(cause, *first, Entry(fired, cause.data), also=also)
        return None

    def _own_id(self, run: str) -> str:
        """The id itself, or with a number if a run has it that this trigger did not start."""
        ids = chain([run], (f"{run}.{number}" for number in count(2)))
        return next(id_ for id_ in ids if self.engine.store.head(id_) is None or self._has_started(id_))

    def _has_started(self, run: str) -> bool:
        started: Any = self.engine.log.event(run, 1)  # of a fork, its parent's
        return started.run == run and self.trigger.log in started.tags

    async def _new_run(self, agent: AnyAgent, firing: Firing, previous: Previous | None, cause: _Cause) -> Append:
        """The new run, to be committed with the firing."""
        engine, trigger, spec, given = self.engine, self.trigger, self.spec, cause.given
        if given is msgspec.UNSET:
            given = trigger.spec.input
            if trigger.make_input is not None:
                given = await self._call(trigger.make_input, firing, *((previous,) if trigger.wants_previous else ()))
        subject = None if trigger.make_subject is None else await self._call(trigger.make_subject, firing)
        refuse_shared(agent.options.workspace, subject)
        started = e.RunStarted(
            at=self._now_us(),
            run=firing.run,
            agent=agent.name,
            build=engine.build(agent),
            priority=agent.options.priority if spec.priority is None else spec.priority,
            tags=(trigger.log, *spec.tags),
            by=cause.by,
            key=None if subject is None else engine.log.key_for(subject, firing.run),
        )
        return engine.log.begin(firing.run).built(first_entries(started, agent, _taken(agent, given)))

    async def _queue(self, cause: _Cause, *first: Entry) -> None:
        if cause.number:
            return  # it waits already
        if cause.due is not None and len(self.known.queued) >= QUEUED_MAX:
            await self._pass(cause, "overlap", *first)
            return
        event = system_events.TriggerQueued(
            at=self._now_us(), number=self.known.number + 1, due=cause.due, next=cause.next, by=cause.by
        )
        await self._append(cause, *first, Entry(event, cause.data))

    async def _pass(self, cause: _Cause, because: system_events.PassedBecause, *first: Entry, **why: Any) -> None:
        event = system_events.TriggerPassed(
            at=self._now_us(), first=cause.at, last=cause.at, because=because, number=cause.number, next=cause.next,
            by=cause.by,
        )  # fmt: skip
        await self._append(cause, *first, Entry(event, {**cause.data, **why}))

    async def _append(self, cause: _Cause, *entries: Entry, also: tuple[Append, ...] = ()) -> None:
        """One commit; the message that caused it is consumed with it."""
        message = cause.message
        if message is None:
            await self.log.append_soon(*entries, also=also)
            return
        taken = Entry(inbox.message_taken(message, self._now_us()))
        await self.log.append_soon(taken, *entries, takes=(message.number,), also=also)

    def _busy(self) -> str | None:
        """The run of the previous firing, if it has not ended; follows renewals."""
        if self.known.run is None:
            return None
        run = renewals.latest(self.engine.log, self.known.run)
        row = self.engine.store.index(run)
        return None if row is None or row.status in ENDED else run


def _taken(agent: AnyAgent, given: Any) -> Any:
    """An input as the agent sees it, live and on replay."""
    return agent.checked(through_codec(given, at="input")) if agent.takes_input else None


def _previous(engine: Engine, run: str | None) -> Previous | None:
    if run is None:
        return None
    run = renewals.latest(engine.log, run)
    row = engine.store.index(run)
    if row is None:
        return None
    result = ended(engine, run).result if row.status == "completed" else None
    return Previous(id=run, status=row.status, result=result)


def spec_of(log: Log, run: str, known: facts.Trigger) -> Spec:
    """The declaration of a trigger as it is recorded."""
    spec: Spec = convert(log.data(run, known.set)["spec"], Spec, at="spec")
    return spec


# operations of clients ----------------------------------------------------------------------------


class TriggerControl(Group[C]):
    """The triggers of a store: lists them, fires one manually, and publishes the events that they listen to."""

    def __init__(self, engine: Engine, client: C) -> None:
        super().__init__(client)
        self._engine = engine

    @InThread
    def list(self) -> Sequence[TriggerInfo]:
        """Returns every trigger that is declared here or recorded, by name."""
        found = [_info(self._engine, row) for row in _rows(self._engine.store, TAG)]
        known = {each.name for each in found}
        for name, spec in ((name, each.spec) for name, each in list(TRIGGERS.items()) if name not in known):
            made = TriggerInfo(name=name, sort=spec.sort, what=str(spec), agent=spec.agent, declared=True, is_set=False)
            found.append(made)
        return sorted(found, key=lambda each: each.name)

    @OnLoop
    async def fire(self, trigger: str, *, by: str | None = None, input: Any = msgspec.UNSET) -> str:  # noqa: A002
        """Fires a trigger manually, regardless of its policies: here, or by the worker that holds its log. Returns the
        id of the run that it starts. Raises RunUnknown if there is no such trigger.

        trigger  the name of the trigger
        input    the input, in place of the trigger's own
        """
        engine, declared = self._engine, TRIGGERS.get(trigger)
        run, log_id = f"{trigger}@{engine.ids.new('hand')}", LOG + trigger
        if declared is not None:
            _ensure(engine, declared)
            if input is not msgspec.UNSET:
                _taken(declared.agent, input)
        if engine.store.head(log_id) is None:
            raise RunUnknown(log_id)
        if declared is not None:
            with contextlib.suppress(RunBusy):
                with leased(engine.log, log_id, engine.ids.new("command")) as log:
                    at_work = _LeasedTrigger(engine, log, declared)
                    cause = _Cause(engine.clock.now_us(), at_work.known.next, run=run, given=input, by=by)
                    failed = await at_work.set_off(cause)
                if failed is not None:
                    raise AnswerRefused(trigger, f"no input could be made for it: {describe(failed)}") from failed
                return run
        wish = {"run": run} if input is msgspec.UNSET else {"run": run, "input": input}
        message = delivery(engine.log, log_id, FIRE, wish, id=run, by=by, at_us=engine.clock.now_us())
        [outcome] = engine.store.deliver([message])
        if isinstance(outcome, KillickError):
            raise outcome
        return run

    @InThread
    def publish(self, name: str, body: Any = None, *, id: str | None = None, by: str | None = None) -> int:  # noqa: A002
        """Publishes an event: every trigger that listens to it fires. Returns the number of triggers. A declared one
        that no worker has served yet keeps the event. Raises AnswerRefused if the name is not valid.

        name  the name of the event, such as "order.created"
        body  the content, which is the input of the agents
        id    deduplicates the event
        """
        if not name or name.startswith("killick."):
            raise AnswerRefused(name, "is not a valid event name; use one such as 'order.created'")
        refuse_own(name, name, id)
        engine = self._engine
        message, at = id or engine.ids.new("event"), engine.clock.now_us()
        for trigger in list(TRIGGERS.values()):
            if EVENT + name in trigger.tags and engine.store.head(trigger.log) is None:
                _ensure(engine, trigger)
        there = [row.run for row in _rows(engine.store, EVENT + name) if row.status not in ENDED]
        events = [delivery(engine.log, run, name, body, id=message, by=by, at_us=at) for run in there]
        outcomes = engine.store.deliver(events)
        return sum(not isinstance(outcome, KillickError) for outcome in outcomes)


def _info(engine: Engine, row: RunRow) -> TriggerInfo:
    name = row.run.removeprefix(LOG)
    facts = engine.log.state(row.run).fold.facts
    known = facts.trigger
    assert known is not None
    spec = spec_of(engine.log, row.run, known)
    last = engine.store.index(renewals.latest(engine.log, known.run)) if known.run is not None else None
    return TriggerInfo(
        name=name,
        sort=spec.sort,
        what=str(spec),
        agent=spec.agent,
        next_us=known.next if spec.schedule is not None else None,
        last_us=known.last or None,
        fired=known.fired,
        queued=len(known.queued),
        holds=known.holds,
        paused=bool(facts.paused),
        run=known.run,
        status=last.status if last is not None else None,
        declared=name in TRIGGERS,
    )


def _rows(store: Store, tag: str) -> Iterable[RunRow]:
    """The logs of triggers with a tag."""
    return [row for row in store.runs(RunQuery(tag=tag), limit=10_000) if row.agent.startswith(OWN)]
