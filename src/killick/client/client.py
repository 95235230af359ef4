"""The client: starts runs, looks at them, acts on them. Each method has an awaitable form, `.soon`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from weakref import WeakMethod

import msgspec

from killick.archive import bundle
from killick.archive.export import export
from killick.archive.prune import Pruned, choose, prune
from killick.archive.redact import Redaction
from killick.audit import seal as sealing
from killick.audit import seal_check
from killick.audit.proof import Proof, prove
from killick.blocking import Both, OnLoop, OwnLoop
from killick.client import inbox as asked
from killick.client.operations import Acting
from killick.client.start import RunMethod, StartMethod
from killick.clock import Clock, SystemClock
from killick.definitions.current import mark_log_records
from killick.definitions.registry import AGENTS, AnyAgent, read_contract
from killick.definitions.triggers import TriggerInfo
from killick.engine.approval import approvals
from killick.engine.build import build_of
from killick.engine.context import through_codec
from killick.engine.execution import Engine
from killick.engine.executor import Executor, Start
from killick.engine.leases import LEASE_SECONDS
from killick.engine.observers import trace_here
from killick.engine.outcome import RunOutcome, ended, paused_because
from killick.engine.steps import live_calls, waits
from killick.engine.steps.attempt import ToolInterceptor
from killick.engine.steps.kinds import delivery
from killick.engine.steps.transaction import joining
from killick.engine.steps.waits import Verb
from killick.engine.views import Listed, RunInfo, Wait
from killick.errors import (
    AlreadyAgreed,
    AlreadyAnswered,
    AnswerRefused,
    KillickError,
    NotAsked,
    RunCancelled,
    RunDiverged,
    RunFailed,
    RunMismatch,
    RunPaused,
    RunUnknown,
    RunWaiting,
)
from killick.fork_safety import hears_of_forks, keep_inherited
from killick.history.diff import Diff, across, between
from killick.history.search.query import Finder
from killick.ids import Ids, RandomIds
from killick.llm.external_runs import ExternalRuns, ExternalSession
from killick.log import Log, Recorded, Report
from killick.log.verify import Progress
from killick.logger import get_logger
from killick.model import events as e
from killick.model.retry import Duration, seconds
from killick.model.state import State
from killick.model.typed import convert
from killick.store import MemoryStore, Store, open_store
from killick.store.protocol import ENDED, Delivered, RunQuery, is_held, shown_tags
from killick.workers import trigger_runner
from killick.workers.worker import SLICE_SECONDS, Worker

if TYPE_CHECKING:
    from killick.contracts.contract import Contract
    from killick.history.backtest import Rejudged
    from killick.replay.result import Replayed

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741

logger: Final = get_logger("killick")
_FOLLOW_SECONDS: Final = 0.1


class _Forked:
    """Gives a client its own of everything in a forked child."""

    def __init__(self, client: Client) -> None:
        self._begin_in_child = WeakMethod(client._begin_in_child)  # pyright: ignore[reportPrivateUsage]
        hears_of_forks(self)

    def before_fork(self) -> None:
        """The store closes what must not be inherited."""

    def after_fork_in_parent(self) -> None:
        """The parent goes on as it was."""

    def after_fork_in_child(self) -> None:
        """Begin anew."""
        if (begin := self._begin_in_child()) is not None:
            begin()


class Client(Acting):
    """A store with its runs. Close it, or use it in a `with` block."""

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        build: Callable[[AnyAgent], e.Build] = build_of,
        lease_seconds: float | None = None,
        grace_seconds: float = 5.0,
        behind: bool = True,
        stand_in: ToolInterceptor | None = None,
        roles: Callable[[str], Iterable[str]] | None = None,
        url: str | None = None,
    ) -> None:
        self.store = store
        self.url = url
        """Where another process may open the same store; None where that is not known, or not possible."""
        self.clock = clock or SystemClock()
        self.ids = ids or RandomIds()
        self._behind = behind
        self._options: dict[str, Any] = {
            "build": build,
            "lease_seconds": _lease_seconds(store) if lease_seconds is None else lease_seconds,
            "grace_seconds": grace_seconds,
            "stand_in": stand_in,
            "roles": roles,
        }
        self._closed = False
        self._begin()
        mark_log_records()
        self._forked = _Forked(self)

    def _begin(self) -> None:
        """What belongs to one process: its name as a holder, its log, its loops and threads."""
        holder = f"{os.getpid()}-{self.ids.new('h')}"
        self.log = Log(self.store, clock=self.clock, behind=self._behind)
        self.engine = Engine(self.log, clock=self.clock, ids=self.ids, holder=holder, **self._options)
        self._own: OwnLoop | None = None
        self.desks = ExternalRuns(self)
        self._executors: dict[asyncio.AbstractEventLoop, Executor] = {}
        self._mutex = threading.Lock()

    def _begin_in_child(self) -> None:
        """A child has its own of everything. What runs in the parent is the parent's, and is let alone."""
        keep_inherited(self.log, self.engine, self._own, self.desks, self._executors)
        self._begin()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Park what runs here, commit what waits, and let the store go.

        A blocking tool that is at work is waited for, up to 30 s. One that takes longer keeps its run leased, and the
        store open, until it ends.
        """
        if self._closed:
            return
        self._closed = True
        if self._own is None and self.engine.resources:
            self._own = OwnLoop()
        until = self.clock.monotonic() + live_calls.ABANDON_SECONDS
        if self._own is not None:
            self._own.close(self._finish())
        self._abandon_closed()
        self.engine.threads.close()
        if self.engine.live.of():
            self.engine.live.wait(until - self.clock.monotonic())
        self.engine.live.then(None, self._let_store_go)

    def _let_store_go(self) -> None:
        """When nothing that was begun here can act any more: until then this process is known to live."""
        self.engine.folders.close()
        self.engine.leases.close()
        self.log.close()
        self.store.close()

    def _abandon_closed(self) -> None:
        """What loops that are closed left behind is let go."""
        for loop in [known for known in self._executors if known.is_closed()]:
            self._executors.pop(loop).abandon()

    async def _finish(self) -> None:
        executor = self._executors.get(asyncio.get_running_loop())
        if executor is not None:
            await executor.close()
        await self.engine.resources.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._finish()
        await asyncio.to_thread(self.close)

    # running ----------------------------------------------------------------------------------

    @property
    def run(self) -> RunMethod:
        """Run an agent here and now: starts it, or goes on with it. See `RunMethod`."""
        return RunMethod(self)

    @property
    def start(self) -> StartMethod:
        """Create a run for a worker, or for somebody who advances it. See `StartMethod`."""
        return StartMethod(self)

    @OnLoop
    async def advance(self, run: str) -> RunOutcome:
        """Drive one run until it has ended or waits; says which, and until when. What engines call."""
        row = self.store.index(run)
        if row is not None and row.status in ENDED:
            return ended(self.engine, run)
        return await self.executor().advance(run)

    @OnLoop
    async def advance_due(self, limit: int = 100) -> Sequence[RunOutcome]:
        """Advance every run whose time has come, side by side."""
        executor = self.executor()
        rows = self.store.due(self.clock.now_us(), limit=limit)
        outcomes = await asyncio.gather(*(executor.advance(row.run) for row in rows), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, KillickError):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, RunOutcome)]

    def worker(
        self,
        *,
        agents: Collection[str] | None = None,
        concurrency: int = 10,
        per_agent: Mapping[str, int] | None = None,
        lease_seconds: float = LEASE_SECONDS,
        slice_seconds: float = SLICE_SECONDS,
    ) -> Worker:
        """Serve runs that are due, here, for as long as the `async with` block lasts; at its end the worker drains.

        agents         whose runs it takes, by name; all that are declared in this process, unless it says otherwise
        concurrency    how many runs it has in hand at once; `per_agent` says it of some agents by themselves
        lease_seconds  how long a run stays with a worker that froze before another takes it
        slice_seconds  what a run is given at the least before a more urgent one may have its slot
        """
        return Worker(
            self,
            agents=agents,
            concurrency=concurrency,
            per_agent=per_agent,
            lease_seconds=lease_seconds,
            slice_seconds=slice_seconds,
        )

    def host(
        self,
        run: str,
        *,
        agent: str = "host",
        contract: Contract | str | os.PathLike[str] | None = None,
        tags: Sequence[str] = (),
    ) -> ExternalSession:
        """Hold a run for calls that come from outside of any agent, as a framework's own loop makes them: `with`, or
        `async with`, gives a `killick.Host`. The run is made when it is not there, and waits when the block is over.

        run        the conversation, the thread, or whatever the calls belong to
        agent      the name under which such runs are listed
        contract   what its calls are judged by
        """
        waits.refuse_own(run)
        rules = read_contract(contract) if isinstance(contract, str | os.PathLike) else contract
        return ExternalSession(self, run, agent=agent, contract=rules, tags=tags)

    def asgi(
        self,
        identify: Callable[[Any], Any] | None = None,
        *,
        redact: Sequence[str] = (),
        webhooks: Mapping[str, str | Sequence[str]] | None = None,
        **options: Any,
    ) -> Any:
        """The dashboard and the HTTP API over this client, as an ASGI app: to be mounted in one's own.

        identify   who a request is from: a function of the request that gives a `killick.Person`, or None for nobody.
                   Without it everybody needs a token, of those that `killick token create` makes
        redact     the names of fields whose values nobody is shown
        webhooks   the secrets of webhooks that may come in, by the name of the event that each becomes
        """
        # The web is a surface: it stands on this, and this knows it only when somebody asks for it.
        bridge = importlib.import_module("killick.web.app")
        return bridge.asgi(self, identify=identify, redact=redact, webhooks=webhooks, **options)

    def executor(self) -> Executor:
        """The executor of the running loop."""
        loop = asyncio.get_running_loop()
        executor = self._executors.get(loop)
        if executor is None:
            self._abandon_closed()
            executor = self._executors[loop] = Executor(self.engine)
        return executor

    def blocking(self, work: Coroutine[Any, Any, R]) -> R:
        """Run something on the client's own loop, in a thread of its own, and wait for it."""
        try:
            own = self._own_loop()
        except KillickError:
            work.close()
            raise
        return own.run(work)

    @property
    def own_loop(self) -> asyncio.AbstractEventLoop:
        """The client's own loop, in a thread of its own."""
        return self._own_loop().loop

    def _own_loop(self) -> OwnLoop:
        with self._mutex:
            if self._closed:
                raise KillickError("this client is closed; open the store again")
            if self._own is None:
                self._own = OwnLoop()
            return self._own

    def _notify(self, run: str) -> None:
        for loop, executor in list(self._executors.items()):
            if not loop.is_closed():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(executor.notify, run)

    # looking ----------------------------------------------------------------------------------

    @Both
    def info(self, run: str) -> RunInfo:
        """Where a run is."""
        return self._info(run)

    def _info(self, run: str) -> RunInfo:
        head = self.log.head(run)
        state = self.log.state(run)
        facts = state.fold.facts
        return RunInfo(
            run=run,
            agent=facts.agent,
            status=facts.status,
            step=facts.current,
            stage=facts.stage,
            plan=facts.plan,
            waits=tuple(self._waits(state)),
            wake_at_us=state.fold.wake_at,
            priority=facts.priority,
            tags=facts.tags,
            parent=facts.parent,
            started_at_us=facts.started_at,
            changed_at_us=facts.changed_at,
            build=facts.build,
            holder=head.holder,
        )

    @Both
    def state(self, run: str, at: int | None = None) -> State:
        """The state of a run at its head, or at any event."""
        return self.log.state(run, at)

    @Both
    def events(self, run: str, after: int = 0, limit: int = 1_000) -> Sequence[Recorded]:
        """Events of a run, in order."""
        return self.log.read(run, after=after, limit=limit)

    @Both
    def list(
        self,
        *,
        status: str | Sequence[str] = (),
        agent: str | None = None,
        tag: str | None = None,
        since_us: int | None = None,
        until_us: int | None = None,
        before: int | None = None,
        limit: int = 100,
    ) -> Sequence[Listed]:
        """Runs, newest first. The times are of their last change: from `since_us` on, and before `until_us`."""
        statuses = (status,) if isinstance(status, str) else tuple(status)
        query = RunQuery(status=statuses, agent=agent, tag=tag, since_us=since_us, until_us=until_us)
        rows = self.store.runs(query, before=before, limit=limit)
        names = Listed.__struct_fields__
        rows = [msgspec.structs.replace(row, tags=shown_tags(row.tags)) for row in rows]
        return [Listed(**{name: getattr(row, name) for name in names}) for row in rows]

    @property
    def find(self) -> Finder:
        """Ask across runs and time, from an index: `kd.find.calls("send_email", where={"to": …})`. See `Finder`."""
        return Finder(self.log)

    @Both
    def inbox(self, *, to: str | None = None, answered: bool = False, limit: int = 100) -> Sequence[Wait]:
        """Everything that waits for a person, the most urgent first: what is due soonest, then what has priority, then
        what waits longest. With `answered`, what was answered and a run is yet to take."""

        def chosen(wait: Wait) -> bool:
            return to is None or to in wait.to or to in (wait.may or ())

        return asked.everything(self.log, chosen, now_us=self.clock.now_us(), answered=answered, limit=limit)

    @Both
    def diff(self, run: str, *places: str, against: str | None = None) -> Diff:
        """What changed from one place of a run to another, or at one step; or what is different in another run.

        Places are written `6:before`, `6:after`, `@17`, `start`, `now`; against another run, one names both.
        """
        if against is not None:
            return across(self.log, run, against, *places)
        return between(self.log, run, *places)

    @Both
    def export(self, run: str, *, children: bool = False, redact: bool | Sequence[str] = False) -> bytes:
        """A run as one file that can be loaded, verified and replayed anywhere.

        children   with the runs that it spawned, and theirs
        redact     stand-ins in the place of all values, or of the fields of these names
        """
        fields = () if isinstance(redact, bool) else tuple(redact)
        redaction = Redaction(self.ids.key(), fields) if redact else None
        return export(self.log, run, children=children, redaction=redaction)

    @Both
    def replay(
        self,
        run: str | os.PathLike[str],
        agent: AnyAgent | str | None = None,
        *,
        to: str | None = None,
        check: bool = False,
        seconds: float = 60.0,
    ) -> Replayed:
        """Run an agent's code again against a run, or a file of one, with the world shut off; on a copy in memory.

        agent      the code; unless it is given, the agent that the run names
        to         a step to stop at when it has its outcome, or before it: `6`, `6:before`
        check      raise ReplayParted where the code parts from the record
        """
        from killick.replay.replay import replayed
        from killick.replay.result import ReplayRequest

        return replayed(self, run, agent, ReplayRequest(to=to, seconds=seconds), check=check)

    @Both
    def rejudge(self, run: str, contract: Contract | None = None) -> Rejudged:
        """Judge what a run intended once more: by the contracts on record, as an audit; or by another one, to see what
        that would have stopped. Calls nothing and changes nothing."""
        from killick.history.backtest import rejudge

        return rejudge(self.log, run, contract)

    @Both
    def verify(
        self,
        run: str | None = None,
        *,
        checkpoint: str | bytes | None = None,
        key: str | bytes | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Re-read the whole record, or one run's, and prove it, or say where it breaks; and hold it against its seals.

        checkpoint   what `seal` gave and somebody kept outside the store: the record must be what it signs
        key          the public key, as PEM, that the last seal and the checkpoint are to be signed with
        """
        return seal_check.verify(self.log, run, checkpoint=checkpoint, key=key, progress=progress)

    @Both
    def seal(self, key: bytes, *, by: str | None = None, progress: bundle.Progress = bundle.untold) -> sealing.Sealed:
        """Seal what changed since the last seal, with a private key as PEM; keep what `file` says outside the store."""
        return sealing.seal(self.log, key, at_us=self.clock.now_us(), by=by, progress=progress)

    @Both
    def prove(self, run: str, seq: int, *, values: bool = False, since: str | bytes | None = None) -> Proof:
        """A proof of one sealed event, for whoever has the public key; with `since`, a checkpoint that they keep."""
        return prove(self.log, run, seq, values=values, since=since)

    @Both
    def prune(
        self,
        *,
        older: Duration,
        to: str | os.PathLike[str],
        status: Sequence[str] = ENDED,
        agent: str | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        """Move runs that ended, and did not change for so long, into a new archive; see docs/keeping.md."""
        now_us = self.clock.now_us()
        chosen = choose(self.log, until_us=now_us - round(seconds(older) * 1_000_000), status=status, agent=agent)
        if dry_run:
            return chosen.untouched(self.log)
        return prune(self.log, chosen, to, holder=self.ids.new("prune"), now_us=now_us)

    def _waits(self, state: State) -> Iterator[Wait]:
        return asked.waits_of(self.store, state)

    # people -----------------------------------------------------------------------------------

    @Both
    def answer(
        self,
        wait: str | Wait,
        verb: Verb,
        *,
        value: Any = None,
        by: str | None = None,
        comment: str | None = None,
        saw: str | None = None,
        tx: Any = None,
    ) -> None:
        """Answer what a run waits for. The wait itself, or its id, or the run's where only one is open.

        saw   the `digest` of the question that the person saw, where only its id is at hand: an answer to another
              question is refused, as it is with the wait itself
        tx    the caller's own connection to the store's database: it counts when they commit
        """
        found = self._open_wait(wait)
        if saw is not None and saw != found.digest:
            raise AnswerRefused(found.id, "it is another question now; look at it again")
        self._answer(found, verb, value, by, comment, tx)

    def _answer(self, found: Wait, verb: str, value: Any, by: str | None, comment: str | None, tx: Any) -> None:
        by = waits.who(by, found.id)
        run = found.run
        if found.deadline_us is not None and self.clock.now_us() > found.deadline_us:
            raise AnswerRefused(found.id, f"its time was up at {_moment(found.deadline_us)}; it goes on without it")
        opened = self.log.state(run).fold.facts.waits[found.step].opened
        if (why := waits.refusal(found.verbs, found.options, verb, value)) is not None:
            raise AnswerRefused(found.id, why)
        if verb in ("edit", "respond") and value is None:
            raise AnswerRefused(found.id, f"{verb!r} needs a value")
        if not waits.may_answer(by, found.to, found.may, self.engine.roles) or (found.need > 1 and by is None):
            raise NotAsked(found.id, by=by, may=found.may if found.may is not None else found.to)
        if found.rule is not None and verb == "edit":
            approvals.refuse_misfit(found, value)
        elif found.rule is None and verb in ("edit", "respond") and (misfit := waits.misfit(found.schema, value)):
            raise AnswerRefused(found.id, misfit)
        event: Any = self.log.event(run, opened)
        if event.digest != found.digest:
            raise AnswerRefused(found.id, "it is another question now; look at it again")
        body = {"kind": verb, "value": value, "comment": comment, "digest": event.digest}
        message_id = waits.answer_id(run, found.step, opened)
        if found.need > 1 and (found.is_agreed or (verb == "approve" and by in found.votes)):
            self._refuse_closed(found.id, run, found.step, only=message_id)
            raise AlreadyAgreed(found.id, by=by, votes=found.votes, need=found.need)
        name = waits.ANSWER
        if verb == "approve" and len(found.votes) + 1 < found.need:
            self._refuse_closed(found.id, run, found.step, only=message_id)
            name, message_id = waits.VOTE, waits.vote_id(message_id, str(by))
        delivered = self._deliver(run, name, body, id=message_id, by=by, tx=tx)
        if not delivered.fresh:
            first = delivered.message
            raise AlreadyAnswered(found.id, by=first.by, at=_moment(first.at_us))

    def _open_wait(self, wait: str | Wait) -> Wait:
        if isinstance(wait, Wait):
            now = [each for each in self._waits(self.log.state(wait.run)) if each.verbs and each.step == wait.step]
            if now and now[0].digest != wait.digest:
                raise AnswerRefused(wait.id, "it is another question now; look at it again")
            if now:
                return now[0]
            wait = wait.id
        run, _, step = wait.rpartition(":")
        both = bool(run) and self.store.head(wait) is not None and self.store.head(run) is not None
        if both and any(each.id == wait and each.verbs for each in self._waits(self.log.state(run))):
            raise AnswerRefused(wait, f"is a question of {run}, and another run; give the Wait itself, from inbox()")
        wait = waits.latest(self.log, wait)
        if self.store.head(wait) is not None:
            run, step = wait, ""
        elif not run or self.store.head(run) is None:
            raise RunUnknown(run or wait)
        run = waits.latest(self.log, run)
        state = self.log.state(run)
        found = [each for each in self._waits(state) if each.verbs and (not step or each.step == step)]
        if len(found) == 1:
            return found[0]
        if found:
            ids = ", ".join(each.id for each in found)
            raise AnswerRefused(wait, f"several waits are open; name one of {ids}")
        self._refuse_closed(wait, run, step)
        raise AnswerRefused(wait, f"nothing to answer here; the run is {state.status}")

    def _refuse_closed(self, wait: str, run: str, step: str, *, only: str | None = None) -> None:
        """Tell who answered first, if somebody did."""
        for message in reversed(self.store.messages(run)):
            meant = message.id == only if only is not None else not step or f":{step}@" in message.id
            if message.name == waits.ANSWER and meant:
                raise AlreadyAnswered(wait, by=message.by, at=_moment(message.at_us))

    @Both
    def send(
        self,
        run: str,
        name: str,
        body: Any = None,
        *,
        id: str | None = None,  # noqa: A002
        by: str | None = None,
        tx: Any = None,
    ) -> None:
        """Send a message to a run; it waits there until the run asks for its name. The id makes it count once.

        With `tx`, the caller's own connection to the store's database, it is sent when they commit.
        """
        if name.startswith("killick."):
            raise AnswerRefused(run, f"messages named {name!r} are Killick's own; choose another name")
        message = str(id or self.ids.new("msg"))
        run = waits.latest(self.log, run)
        self._refuse_unheard(run, message)
        self._deliver(run, name, body, id=message, by=by, tx=tx)

    @Both
    def say(self, run: str, text: str, *, by: str | None = None) -> None:
        """Say something to a run; its loop hears it before it asks its model again."""
        message = self.ids.new("said")
        run = waits.latest(self.log, run)
        self._refuse_unheard(run, message)
        self._deliver(run, waits.SAID, text, id=message, by=by)

    def _refuse_unheard(self, run: str, message: str) -> None:
        """A run that is over hears nothing any more. Whoever only sends again what it had is not told off."""
        row = self.store.index(run)
        if row is not None and row.status in ENDED and all(known.id != message for known in self.store.messages(run)):
            raise AnswerRefused(run, f"the run is over ({row.status}) and hears nothing any more; start another")

    def _deliver(
        self, run: str, name: str, body: Any, *, id: str, by: str | None, tx: Any = None,  # noqa: A002
    ) -> Delivered:  # fmt: skip
        by = waits.who(by, run)
        deliverer = self.store if tx is None else joining(self.store, tx)
        [outcome] = deliverer.deliver([delivery(run, name, body, id=id, by=by, at_us=self.clock.now_us())])
        if isinstance(outcome, KillickError):
            raise outcome
        self._notify(run)
        return outcome

    # triggers ---------------------------------------------------------------------------------

    @Both
    def publish(self, name: str, body: Any = None, *, id: str | None = None, by: str | None = None) -> int:  # noqa: A002
        """Publish an event: every trigger that listens to it fires. The id makes it count once. Says how many heard."""
        if not name or name.startswith("killick."):
            raise AnswerRefused(name, "is no name for an event; take one such as 'order.created'")
        return trigger_runner.publish(self, name, body, id=id, by=by)

    @Both
    def triggers(self) -> Sequence[TriggerInfo]:
        """Every trigger that is declared here or on record, by name."""
        return trigger_runner.triggers(self)

    @OnLoop
    async def fire(self, trigger: str, *, by: str | None = None, input: Any = msgspec.UNSET) -> str:  # noqa: A002
        """Fire a trigger by hand, whatever its policies say; returns the id of the run that it starts."""
        return await trigger_runner.fire(self, trigger, by=by, given=input)

    # inside -----------------------------------------------------------------------------------

    def named(self, agent: AnyAgent | str) -> AnyAgent:
        """An agent, by itself or by its name."""
        return AGENTS.get(agent) if isinstance(agent, str) else agent

    def begin(
        self,
        agent: AnyAgent,
        input: Any,  # noqa: A002
        id: str | None,  # noqa: A002
        priority: int | None,
        tags: Sequence[str],
        fresh: bool,
        by: str | None = None,
    ) -> tuple[str, Start | None]:
        """The run's id, and how to create it if it is not there."""
        waits.refuse_own(id)
        value = self._checked(agent, input)
        if id is None and not fresh:
            id = self._unfinished(agent, value)  # noqa: A001
        run = id or self.ids.new(agent.name)
        if self.store.head(run) is not None:
            self._same(run, agent, value)
            return waits.latest(self.log, run), None
        if id is not None and (goes_on := waits.latest(self.log, run)) != run:
            return goes_on, None  # its first logs are archived
        started = e.RunStarted(
            at=self.clock.now_us(),
            run=run,
            agent=agent.name,
            build=self.engine.build(agent),
            priority=agent.options.priority if priority is None else priority,
            tags=tuple(tags) if id is not None else (*tags, _input_tag(agent, value)),
            by=waits.who(by, run),
            trace=trace_here(),
        )
        return run, Start(started, agent, value)

    def _checked(self, agent: AnyAgent, input: Any) -> Any:  # noqa: A002
        """The input as the agent will see it, now and on replay."""
        return agent.checked(through_codec(input, at="input"))

    def _same(self, run: str, agent: AnyAgent, value: Any) -> None:
        first = self.log.event(run, 1)
        named = first.agent if isinstance(first, e.RunStarted) else ""
        if named != agent.name and named not in agent.options.aliases:
            raise RunMismatch(run, f"agent ({named})")
        forked = self.log.head(run).parent is not None
        seq = self.log.state(run).fold.facts.input if forked else 1  # a fork may have an input of its own
        recorded = agent.checked(self.log.data(run, seq).get("input"))
        if agent.digest_of(recorded) != agent.digest_of(value):
            raise RunMismatch(run, "input")

    def _unfinished(self, agent: AnyAgent, value: Any) -> str | None:
        """A run of the same agent and input that did not come to its end, and that nobody has."""
        statuses = ("queued", "running", "waiting", "paused")
        for row in self.store.runs(RunQuery(agent=agent.name, tag=_input_tag(agent, value), status=statuses), limit=10):
            head = self.store.head(row.run)
            if head is not None and not is_held(self.store, head):
                logger.warning("%s: goes on with this run, which was not finished (fresh=True starts another)", row.run)
                return row.run
        return None

    def outcome(self, agent: AnyAgent, advanced: RunOutcome) -> Any:
        """What `run` gives back or raises for where a run stands."""
        run = advanced.run
        if advanced.status == "completed":
            returns = Any if agent.is_machine else agent.returns
            return advanced.result if returns is Any else convert(advanced.result, returns, at="result")
        if advanced.status == "failed":
            raise RunFailed(run, advanced.failure, step=advanced.step, not_undone=advanced.not_undone)
        if advanced.status == "cancelled":
            raise RunCancelled(run, not_undone=advanced.not_undone)
        if advanced.status == "paused":
            raise RunPaused(run, because=paused_because(self.log, run))
        if advanced.diverged is not None:
            step, recorded, found, builds = advanced.diverged
            raise RunDiverged(run, step, recorded=recorded, found=found, builds=builds)
        crashes = self.log.state(run).fold.facts.crashes
        if crashes is not None and crashes.quarantined:
            told = f"quarantined, for its process died {crashes.deaths} times in a row"
            raise RunWaiting(run, (), why=f"a person; it is {told}: `killick show {run}`, then `killick resume {run}`")
        raise RunWaiting(run, self._waits_below(run))

    def _waits_below(self, run: str) -> Sequence[Wait]:
        """What a run waits for; for children, what they wait for."""
        found: list[Wait] = []
        for wait in self._waits(self.log.state(run)):
            below: Sequence[Wait] = self._waits_below(wait.name) if wait.waits_for == "child" else ()
            if wait.waits_for == "child" and self.log.state(wait.name).fold.facts.paused:
                why = paused_because(self.log, wait.name)
                told = f"{wait.name}, which is paused{f' ({why})' if why else ''}; resume it"
                wait = msgspec.structs.replace(wait, prompt=told)
            found += below or [wait]
        return found


def open(url: str = "killick.db", *, clock: Clock | None = None, ids: Ids | None = None, **options: Any) -> Client:  # noqa: A001
    """Open a store for runs: a path, `sqlite:///path` or `memory:`. Made if it is not there.

    durability   "power" (the default) or "process": what a commit survives
    roles        a function from a person's name to the roles that they have: who may answer what is asked of a role
    """
    given: Mapping[str, Any] = {"clock": clock} if clock is not None else {}
    ours = ("build", "lease_seconds", "grace_seconds", "behind", "roles")
    own = {name: options.pop(name) for name in ours if name in options}
    store = open_store(str(url), **given, **options)
    return Client(store, clock=clock, ids=ids, url=None if isinstance(store, MemoryStore) else str(url), **own)


def _lease_seconds(store: Store) -> float:
    """A lease may be endless where a dead holder is noticed at once; elsewhere it has to end."""
    return math.inf if store.proves_life else LEASE_SECONDS


def _input_tag(agent: AnyAgent, value: Any) -> str:
    """How an unfinished run of the same input is found again."""
    return f"input:{agent.digest_of(value).hex()[:16]}"


def _moment(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).isoformat(timespec="seconds")
