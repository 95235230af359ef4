"""User callbacks on run events: `@killick.on`, delivered from a durable cursor.

Each hook has an internal log, `hook:NAME`, with its position in the outbox and its failed deliveries. Events are
delivered one at a time, in outbox order. A failed delivery is retried later and delays the following events of this
hook only. A hook never changes a run. If the worker dies during a call, the call is repeated under the same key.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, get_args

import msgspec

from killick.clock import SET_BACK_US
from killick.definitions.agents import AnyAgent
from killick.engine.control import inbox
from killick.engine.control.interventions import entries_of
from killick.engine.engine import Engine
from killick.engine.failures import describe, excluded_by, rate_limit_seconds
from killick.engine.views import RunInfo
from killick.errors import (
    DeclarationRefused,
    EpochStale,
    HeadMoved,
    LogError,
    RunExists,
    StoreError,
    WebhookFailed,
    WebhookGone,
)
from killick.fork_safety import cached_property
from killick.history.run_info import because_of, blocked_by, info
from killick.log.log import Log
from killick.log.writer import Entry, RunLog
from killick.logger import get_logger
from killick.model import event_codec, system_events
from killick.model import events as e
from killick.model.facts import Hook as Cursor
from killick.model.retry import Duration, Retry, retry_of, seconds
from killick.model.typed import convert
from killick.store.records import ENDED, OutboxItem, RunQuery
from killick.workers.background import TaskControl

logger: Final = get_logger("killick")

HOOK_KINDS: Final = frozenset(str(kind.__struct_config__.tag) for kind in event_codec.OUTBOX_EVENTS)
"""The event kinds that a hook can listen to."""

RETRY: Final = Retry(attempts=8, first=10, factor=4, max="3h")
"""How often a failed delivery is retried: for about seven hours."""

TIMEOUT_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0
"""How long a hook without new events rests, unless the store notifies."""
CALM_SECONDS: Final = 0.02
"""The shortest rest, however often the store notifies."""
OBEY_SECONDS: Final = 30.0
"""The longest rest of a failed hook before it checks for a pause command."""
ROWS_AT_ONCE: Final = 1_000
PASSED_MAX: Final = 1_000
"""How many undelivered positions a hook passes before its cursor is recorded."""
PASSED_IDLE_MAX: Final = 100
"""The same, while the hook is idle."""

RECEIPTS_MAX: Final = 10_000
"""How many events of a hook's log are searched for the receipt of an earlier delivery."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_RUN: Final = "hook:"
_AGENT: Final = "killick.hook:"
TAG: Final = "hook"
"""The tag that finds the logs of hooks."""


F = TypeVar("F", bound="Callable[[HookEvent], Any]")
T = TypeVar("T")


class HookEvent:
    """An event as it is delivered to a hook. Its values are loaded on first access.

    kind   the kind of the event, such as "run.failed"
    run    the id of the run
    seq    the number of the event
    agent  the name of the agent
    hook   the name of the hook
    """

    def __init__(self, engine: Engine, item: OutboxItem, *, agent: str, hook: str, attempt: int, sent_at: int) -> None:
        self.engine = engine
        self.kind = item.kind
        self.run = item.run
        self.seq = item.seq
        self.agent = agent
        self.hook = hook
        self.attempt = attempt
        """The number of this delivery attempt, from 1."""
        self.sent_at = sent_at
        """The time of this delivery, in microseconds since the epoch."""
        self.is_unread = False
        """Whether the store failed to read it: then the hook did not fail, and the attempt does not count."""
        self.receipt: str | None = None
        """The receiver's name of the delivery, if the hook sets it: recorded with the delivery."""

    def _read(self, read: Callable[..., T], *args: Any) -> T:
        try:
            return read(*args)
        except StoreError:
            self.is_unread = True
            raise

    @property
    def key(self) -> str:
        """The idempotency key: equal for every delivery of this event to this hook."""
        return f"{self.run}:{self.seq}:{self.hook}"

    @property
    def at(self) -> int:
        """The time of the event, in microseconds since the epoch."""
        return int(self.event.at)

    @cached_property
    def event(self) -> Any:
        """The event itself, one of the types in `docs/events.md`."""
        return self._read(self.engine.log.event, self.run, self.seq)

    @property
    def hash(self) -> str:
        """Its link of the run's hash chain, in hex."""
        return self._read(lambda: self.engine.log.read(self.run, after=self.seq - 1, limit=1))[0].row.hash.hex()

    @cached_property
    def data(self) -> Mapping[str, Any]:
        """Its values, verbatim. Raises ValueErased if they were erased."""
        return self._read(self.engine.log.data, self.run, self.seq)

    @property
    def because(self) -> Any:
        """For `wait.opened`: why the agent, or the model that decided it, wants the step; None if it gave no reason."""
        opened, log = self.event, self.engine.log
        if not isinstance(opened, e.WaitOpened):
            return None
        return self._read(lambda: because_of(log.state(self.run, self.seq), opened.step))

    def info(self) -> RunInfo:
        """Returns the current state of the run, which may be later than this event."""
        return self._read(info, self.engine.log, self.run)

    def earlier_receipt(self, seq: int) -> str | None:
        """The `receipt` of another event of this run; None if it is not among this hook's last deliveries."""
        log, hook = self.engine.log, _RUN + self.hook
        after = max(log.head(hook).seq - RECEIPTS_MAX, 0)
        for at, called, _ in log.read(hook, after=after, limit=RECEIPTS_MAX):
            if isinstance(called, system_events.HookCalled) and (called.run, called.seq) == (self.run, seq):
                return log.data(hook, at).get("receipt")
        return None

    def __repr__(self) -> str:
        return f"<{self.kind} {self.key}>"


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """The events that a hook listens to, as its log records them."""

    kinds: frozenset[str]
    agents: frozenset[str] = frozenset()
    waits_for: frozenset[str] = frozenset()

    def wants_agent(self, agent: str) -> bool:
        """Whether it listens to runs of this agent; to internal logs only if the declaration names them."""
        return agent in self.agents if self.agents else not agent.startswith("killick.")

    def wants(self, event: e.Event) -> bool:
        """Whether it listens to this event of its kinds."""
        return not (self.waits_for and isinstance(event, e.WaitOpened) and event.waits_for not in self.waits_for)


class Hook(Subscription, frozen=True, kw_only=True):
    """A declared hook. `to` describes the receiver without secrets; `same` is equal for equal declarations."""

    name: str
    fn: Callable[[HookEvent], Any]
    retry: Retry = RETRY
    timeout: float = TIMEOUT_SECONDS
    to: str
    same: object
    lacks: Callable[[], str | None] = lambda: None
    """Returns what this process lacks to deliver, such as a secret."""

    @property
    def run(self) -> str:
        return _RUN + self.name

    @property
    def agent(self) -> str:
        return _AGENT + self.name

    @property
    def spec(self) -> dict[str, Any]:
        """The declaration as it is recorded."""
        named = {"kinds": self.kinds, "agents": self.agents, "waits_for": self.waits_for}
        return {"to": self.to, **{name: sorted(given) for name, given in named.items() if given}}


HOOKS: Final[dict[str, Hook]] = {}
"""The hooks declared in this process, by name."""


# declaring ----------------------------------------------------------------------------------------

Agents: TypeAlias = "str | AnyAgent | Sequence[str | AnyAgent]"


def on(
    *kinds: str,
    name: str | None = None,
    agent: Agents = (),
    waits_for: str | Sequence[str] = (),
    retry: Retry | int | None = None,
    timeout: Duration = TIMEOUT_SECONDS,
) -> Callable[[F], F]:
    """Declares a function, plain or `async`, as a callback for run events. Delivery is at least once and in order.
    Raises DeclarationRefused.

    kinds      the kinds of events, as in docs/events.md
    name       the name of the hook and of its log; by default the function's name
    agent      only runs of these agents
    waits_for  of `wait.opened`, only waits for these: "answer", "settlement", "event", …
    retry      the number of attempts of a delivery, or a Retry
    timeout    the time limit of one call

        @killick.on("run.failed", agent="settle")
        async def alert(event: HookEvent) -> None: ...
    """

    def declare(fn: F) -> F:
        called = name or str(getattr(fn, "__name__", "hook"))
        to = f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', called)}"
        try:
            inspect.signature(fn).bind(None)
        except TypeError:
            raise DeclarationRefused(called, "a hook takes one argument, the HookEvent") from None
        declare_hook(called, fn, kinds, to=to, same=to, agent=agent, waits_for=waits_for, retry=retry, timeout=timeout)
        return fn

    return declare


def declare_hook(
    name: str,
    fn: Callable[[HookEvent], Any],
    kinds: Sequence[str],
    *,
    agent: Agents = (),
    waits_for: str | Sequence[str] = (),
    retry: Retry | int | None = None,
    timeout: Duration = TIMEOUT_SECONDS,
    **own: Any,
) -> Hook:
    """Checks a declaration and registers it. `own` are further fields of the Hook."""
    listed = [agent] if isinstance(agent, str) or not isinstance(agent, Sequence) else agent
    hook = Hook(
        name=name,
        fn=fn,
        kinds=frozenset(kinds),
        agents=frozenset(each if isinstance(each, str) else each.name for each in listed),
        waits_for=frozenset([waits_for] if isinstance(waits_for, str) else waits_for),
        retry=RETRY if retry is None else retry_of(name, retry, RETRY),
        timeout=seconds(timeout),
        **own,
    )
    _check(hook)
    HOOKS[name] = hook
    return hook


def _check(hook: Hook) -> None:
    kinds = ", ".join(sorted(HOOK_KINDS))
    if _NAME.fullmatch(hook.name) is None:
        raise DeclarationRefused(hook.name, "is not a valid hook name; give name= of letters, digits and . _ -")
    if not hook.kinds:
        raise DeclarationRefused(hook.name, f"a hook needs the event kinds it listens to; give some of {kinds}")
    for kind in sorted(hook.kinds - HOOK_KINDS):
        raise DeclarationRefused(hook.name, f"hooks cannot listen to {kind!r}; give some of {kinds}")
    for wait in sorted(hook.waits_for - set(get_args(e.WaitFor))):
        raise DeclarationRefused(hook.name, f"waits_for={wait!r}; give some of {', '.join(get_args(e.WaitFor))}")
    if hook.waits_for and "wait.opened" not in hook.kinds:
        raise DeclarationRefused(hook.name, "waits_for= is about 'wait.opened', which it does not listen to")
    if not hook.timeout:
        raise DeclarationRefused(hook.name, "timeout=0 leaves no time; give a number of seconds")
    before = HOOKS.get(hook.name)
    # A nested function is a new object on each call of the outer function.
    if before is not None and before.same != hook.same and "<locals>" not in before.to:
        raise DeclarationRefused(hook.name, f"is a hook already, {before.to}; give one of them another name=")


# their logs ---------------------------------------------------------------------------------------


def ensure(engine: Engine) -> list[str]:
    """Creates the log of every hook declared here, if it is missing; returns the agents of those that this process can
    serve. Events of the others wait for a worker that can.

    A new hook receives events from now on. A hook that was ended and is declared again continues at its cursor.
    """
    served: list[str] = []
    for hook in list(HOOKS.values()):
        # Without a lease: a concurrent writer appends the same.
        with contextlib.suppress(RunExists, HeadMoved, EpochStale):
            row, at = engine.store.index(hook.run), engine.clock.now_us()
            if row is None:
                started = e.RunStarted(at=at, run=hook.run, agent=hook.agent, tags=(TAG,))
                first = system_events.HookSet(at=at, position=engine.store.outbox_end())
                engine.log.begin(hook.run).append(Entry(started), Entry(first, {"spec": hook.spec}))
            elif row.status in ENDED:
                engine.log.open(hook.run).append(Entry(e.RunResumed(at=at, by="killick")))
        if (lack := hook.lacks()) is None:
            served.append(hook.agent)
        else:
            logger.warning("hook %s: this worker delivers none of its events: %s", hook.name, lack)
            _note(engine, hook, lack)
    return served


def _note(engine: Engine, hook: Hook, lack: str) -> None:
    """Records, once, what a worker lacks to serve a hook that no other worker serves."""
    with contextlib.suppress(LogError):
        head = engine.log.head(hook.run)
        if head.holder is None and blocked_by(engine.log, head) != lack:
            engine.log.open(hook.run).append(Entry(e.NoteMade(at=engine.clock.now_us(), by="killick"), {"note": lack}))


def trim(engine: Engine) -> int:
    """Deletes outbox entries that every hook of the store has passed; returns their number."""
    # Read before the hooks: a hook created meanwhile starts no earlier than this.
    end = engine.store.outbox_end()
    return engine.store.trim_outbox(min([end, *(cursor.cursor for cursor in _cursors(engine.log).values())]))


def _cursors(log: Log) -> dict[str, Cursor]:
    """Returns the position of every hook of the store that was not ended, declared here or elsewhere, by its run."""
    rows = log.store.runs(RunQuery(tag=TAG), limit=10_000)
    runs = (row.run for row in rows if row.agent.startswith(_AGENT) and row.status not in ENDED)
    return {run: log.state(run).fold.facts.hook or Cursor(0, 0) for run in runs}


def unreceived(log: Log, agents: Mapping[str, str]) -> dict[str, str]:
    """Returns the runs, of those given with their agents, that have an event which a hook listens to and has not
    received, each with that hook's run. The position of a hook only advances."""
    found: dict[str, str] = {}
    for hook, cursor in _cursors(log).items():
        spec = log.data(hook, cursor.set).get("spec") if cursor.set else None
        wanted = convert(spec, Subscription) if spec is not None else Subscription(kinds=HOOK_KINDS)
        after = cursor.cursor
        while items := log.store.outbox(after=after, kinds=wanted.kinds):
            after = items[-1].position
            for item in items:
                agent = agents.get(item.run)
                if agent is None or item.run in found or not wanted.wants_agent(agent):
                    continue
                with contextlib.suppress(LogError):
                    if wanted.waits_for and not wanted.wants(log.event(item.run, item.seq)):
                        continue
                found[item.run] = hook
    return found


# attending ----------------------------------------------------------------------------------------


async def attend(engine: Engine, log: RunLog, control: TaskControl) -> None:
    """Delivers events to one hook until the worker stops, or a person pauses or ends the hook."""
    hook = HOOKS.get(log.run.removeprefix(_RUN))
    if hook is not None:
        await _Following(engine, log, hook).follow(control)


class _Following:
    def __init__(self, engine: Engine, log: RunLog, hook: Hook) -> None:
        self.engine = engine
        self.store = engine.store
        self.log = log
        self.hook = hook
        self.passed = self.cursor.cursor
        self._agents: dict[str, str | None] = {}

    @property
    def cursor(self) -> Cursor:
        """The recorded position of the hook."""
        return self.log.fold.facts.hook or Cursor(0, 0)

    @property
    def now(self) -> int:
        return self.engine.clock.now_us()

    async def follow(self, control: TaskControl) -> None:
        await self._record_declaration()
        while not control.stopping and await self._is_active():
            backoff = ((self.cursor.retry_at or 0) - self.now) / 1_000_000
            was_ahead = self.cursor.failed_at > self.now + SET_BACK_US  # the clock, when the retry was put off
            if backoff > 0 and not was_ahead:
                await control.rest(min(backoff, OBEY_SECONDS))
                continue
            rows = await asyncio.to_thread(self.store.outbox, after=self.passed, limit=ROWS_AT_ONCE)
            for row in rows:
                if control.stopping or not await self._deliver(row):
                    break
                self.passed = row.position
                await self._move(PASSED_MAX)
            if not rows:
                await self._move(PASSED_IDLE_MAX)
                await control.rest(LOOK_SECONDS)
                await asyncio.sleep(self.engine.clock.nap_seconds(CALM_SECONDS))

    async def _record_declaration(self) -> None:
        """Records the declaration of the hook if it changed."""
        spec, seq = self.hook.spec, self.cursor.set
        recorded = await asyncio.to_thread(self.engine.log.data, self.log.run, seq)
        if recorded.get("spec") != spec:
            changed = system_events.HookSet(at=self.now, position=self.passed)
            await self.log.append_soon(Entry(changed, {"spec": spec}))

    async def _is_active(self) -> bool:
        """Executes commands that arrived for the hook. Returns False if it was paused or ended."""
        for message in await asyncio.to_thread(self.store.inbox, self.log.run, name=inbox.COMMAND):
            body = inbox.body_of(self.engine.log, message)
            entries = entries_of(self.log.fold, body, by=message.by, at=self.now)
            taken = Entry(inbox.message_taken(message, self.now))
            await self.log.append_soon(taken, *entries, takes=(message.number,))
        facts = self.log.fold.facts
        return not (facts.paused or facts.ended)

    async def _move(self, passed_max: int) -> None:
        """Records the cursor from time to time, so that the outbox can be trimmed."""
        if self.passed - self.cursor.cursor >= passed_max:
            await self.log.append_soon(Entry(system_events.HookMoved(at=self.now, position=self.passed)))

    async def _deliver(self, row: OutboxItem) -> bool:
        """Delivers an event if the hook listens to it. Returns False if it must be retried."""
        if row.kind not in self.hook.kinds:
            return True
        cursor = self.cursor
        attempt = cursor.attempts + 1 if cursor.failing == row.position else 1
        try:
            event = await asyncio.to_thread(self._loaded, row, attempt)
        except LogError as error:
            return await self._failed(row, attempt, error)
        if event is None:
            return True
        if not await self._is_active():
            return False
        try:
            await self._call(event)
        except Exception as error:
            if event.is_unread:
                raise
            return await self._failed(row, attempt, error)
        called = system_events.HookCalled(at=self.now, position=row.position, run=row.run, seq=row.seq, attempt=attempt)
        await self.log.append_soon(Entry(called, {} if event.receipt is None else {"receipt": event.receipt}))
        return True

    def _loaded(self, row: OutboxItem, attempt: int) -> HookEvent | None:
        """The event as it is delivered; None if the hook does not listen to it, or the run was removed."""
        agent = self._agent_of(row.run)
        if agent is None or not self.hook.wants_agent(agent):
            return None
        event = HookEvent(self.engine, row, agent=agent, hook=self.hook.name, attempt=attempt, sent_at=self.now)
        return event if self.hook.wants(event.event) else None

    def _agent_of(self, run: str) -> str | None:
        if run not in self._agents:
            if len(self._agents) >= ROWS_AT_ONCE:
                self._agents.clear()
            row = self.store.index(run)
            self._agents[run] = None if row is None else row.agent
        return self._agents[run]

    async def _call(self, event: HookEvent) -> None:
        """One call, in a thread unless it is `async`, so that a hanging hook blocks no other task."""
        fn, timeout = self.hook.fn, self.hook.timeout
        try:
            if inspect.iscoroutinefunction(fn):
                async with asyncio.timeout(timeout):
                    await fn(event)
                return
            await self.engine.threads.call(lambda: fn(event), timeout=timeout)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Our own task was not cancelled: the hook itself raised CancelledError.
            raise RuntimeError(f"the hook raised {type(error).__name__}") from error

    async def _failed(self, row: OutboxItem, attempt: int, error: Exception) -> bool:
        """Records the failed delivery and the time of its retry, if there is one."""
        now, values, retry = self.now, {"failure": describe(error)}, self.hook.retry
        of: dict[str, Any] = {"at": now, "position": row.position, "run": row.run, "seq": row.seq, "attempt": attempt}
        if attempt >= retry.attempts or excluded_by(error, retry) or isinstance(error, WebhookGone):
            await self.log.append_soon(Entry(system_events.HookDropped(**of), values))
            return True
        asked = error.retry_after if isinstance(error, WebhookFailed) else rate_limit_seconds(error, now_us=now)
        delay = max(retry.delay_seconds(attempt, self.engine.ids.fraction()), asked or 0.0)
        retry_at = now + round(delay * 1_000_000)
        await self.log.append_soon(Entry(system_events.HookFailed(**of, retry_at=retry_at), values))
        return False
