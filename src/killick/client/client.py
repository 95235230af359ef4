"""The client: starts runs, reads them, and acts on them. Each method has an awaitable form, `.soon`."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import msgspec

from killick.archive.export import export
from killick.archive.prune import Pruned, choose, prune
from killick.archive.redact import Redaction
from killick.audit import seal as sealing
from killick.audit import seal_check
from killick.audit.proof import Proof, prove
from killick.blocking import Both, OnLoop
from killick.client import answers, inbox
from killick.client.external_runs import ExternalRuns, ExternalSession
from killick.client.operations import Operations
from killick.client.start import RunMethod, StartMethod
from killick.clock import Clock
from killick.definitions.agents import AnyAgent, read_contract
from killick.definitions.triggers import TriggerInfo
from killick.engine.inbox import SAID
from killick.engine.leases import LEASE_SECONDS
from killick.engine.outcome import RunOutcome, ended
from killick.engine.steps import waits
from killick.engine.steps.waits import Verb
from killick.engine.views import Listed, RunInfo, Wait
from killick.errors import (
    AnswerRefused,
    KillickError,
)
from killick.fork_safety import keep_inherited
from killick.history.diff import Diff, across, between
from killick.history.run_info import info
from killick.history.search.query import Finder
from killick.ids import Ids
from killick.log import Recorded, Report
from killick.log.progress import Progress as SealProgress
from killick.log.progress import untold
from killick.log.verify import Progress
from killick.logger import get_logger
from killick.model.retry import Duration, seconds
from killick.model.state import State
from killick.store import MemoryStore, open_store
from killick.store.records import ENDED, RunQuery, shown_tags
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


class Client(Operations):
    """A store with its runs. Close it, or use it in a `with` block."""

    def _begin(self) -> None:
        super()._begin()
        self.external = ExternalRuns(self)

    def _begin_in_child(self) -> None:
        keep_inherited(self.external)
        super()._begin_in_child()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        """Runs an agent here and now: starts or resumes the run. See `RunMethod`."""
        return RunMethod(self)

    @property
    def start(self) -> StartMethod:
        """Creates a run for a worker or a later `advance`. See `StartMethod`."""
        return StartMethod(self)

    @OnLoop
    async def advance(self, run: str) -> RunOutcome:
        """Executes one run until it has ended or waits; returns which, and until when. For engine adapters."""
        row = self.store.index(run)
        if row is not None and row.status in ENDED:
            return ended(self.engine, run)
        return await self.executor().advance(run)

    @OnLoop
    async def advance_due(self, limit: int = 100) -> Sequence[RunOutcome]:
        """Advances every due run, concurrently."""
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
        """Executes due runs here while the `async with` block lasts; at its end the worker drains.

        agents         the names of the agents whose runs it claims; by default all that are declared in this process
        concurrency    how many runs it executes at once; `per_agent` limits single agents lease_seconds  how long a
        frozen worker keeps a run before another takes it over slice_seconds  the shortest time slice of a run before a
        more urgent one may take its slot
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
        """Holds a run for calls from outside any agent, such as a framework's own loop: `with` or `async with` gives a
        `killick.Host`. The run is created if it does not exist, and waits after the block.

        run        the id of the conversation or thread to which the calls belong agent      the name under which such
        runs are listed contract   the contract that evaluates its calls
        """
        waits.refuse_own(run)
        rules = read_contract(contract) if isinstance(contract, str | os.PathLike) else contract
        return ExternalSession(self.external, run, agent=agent, contract=rules, tags=tags)

    def asgi(
        self,
        identify: Callable[[Any], Any] | None = None,
        *,
        redact: Sequence[str] = (),
        webhooks: Mapping[str, str | Sequence[str]] | None = None,
        **options: Any,
    ) -> Any:
        """The dashboard and the HTTP API of this client, as an ASGI app to mount in another app.

        identify   a function from a request to a `killick.Person`, or to None for an unknown caller. Without it, each
        caller needs a token made by `killick token create` redact     the names of fields whose values are never shown
        webhooks   the secrets of incoming webhooks, by the name of the event that each becomes
        """
        bridge = importlib.import_module("killick.web.app")
        return bridge.asgi(self, identify=identify, redact=redact, webhooks=webhooks, **options)

    # looking ----------------------------------------------------------------------------------

    @Both
    def info(self, run: str) -> RunInfo:
        """The current state of a run, in short."""
        return info(self.log, run)

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
        """Every open wait that needs a person, the most urgent first: by deadline, then by priority, then by age. With
        `answered`, the answered waits whose answer the run has not consumed."""

        def chosen(wait: Wait) -> bool:
            return to is None or to in wait.to or to in (wait.may or ())

        return inbox.everything(self.log, chosen, now_us=self.clock.now_us(), answered=answered, limit=limit)

    @Both
    def diff(self, run: str, *places: str, against: str | None = None) -> Diff:
        """The changes between two positions of a run, or at one step; or the differences from another run.

        Positions are written `6:before`, `6:after`, `@17`, `start`, `now`; against another run, one is for both.
        """
        if against is not None:
            return across(self.log, run, against, *places)
        return between(self.log, run, *places)

    @Both
    def export(self, run: str, *, children: bool = False, redact: bool | Sequence[str] = False) -> bytes:
        """Exports a run as one file that can be loaded, verified and replayed anywhere.

        children   include the runs that it spawned, and theirs redact     pseudonyms in place of all values, or of the
        fields with these names
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
        """Replays an agent's code against a run, or an export of one, without I/O, on a copy in memory.

        agent      the code; by default the agent that the run names to         stop at a step when it has its outcome,
        or before it: `6`, `6:before` check      raise ReplayParted where the code diverges from the log
        """
        from killick.replay.replay import replayed
        from killick.replay.result import ReplayRequest

        return replayed(self.log, run, agent, ReplayRequest(to=to, seconds=seconds), check=check)

    @Both
    def rejudge(self, run: str, contract: Contract | None = None) -> Rejudged:
        """Evaluates the intentions of a run again: by the recorded contracts, as an audit; or by another one, to see
        what it would have rejected. Calls no tool and changes nothing."""
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
        """Verifies the whole store, or one run, against its hashes and its seals, and locates any damage.

        checkpoint   a checkpoint from `seal`, kept outside the store: the log must match it key          the public
        key, as PEM, of the last seal and of the checkpoint
        """
        return seal_check.verify(self.log, run, checkpoint=checkpoint, key=key, progress=progress)

    @Both
    def seal(self, key: bytes, *, by: str | None = None, progress: SealProgress = untold) -> sealing.Sealed:
        """Seals the changes since the last seal, with a private key as PEM; keep its `file` outside the store."""
        return sealing.seal(self.log, key, at_us=self.clock.now_us(), by=by, progress=progress)

    @Both
    def prove(self, run: str, seq: int, *, values: bool = False, since: str | bytes | None = None) -> Proof:
        """A proof of one sealed event, verified by the public key; `since` is an older checkpoint of the verifier."""
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
        """Moves runs that ended, and did not change for this long, into a new archive; see docs/keeping.md."""
        now_us = self.clock.now_us()
        chosen = choose(self.log, until_us=now_us - round(seconds(older) * 1_000_000), status=status, agent=agent)
        if dry_run:
            return chosen.untouched(self.log)
        return prune(self.log, chosen, to, holder=self.ids.new("prune"), now_us=now_us)

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
        """Answers an open wait: given as the wait itself, its id, or the id of a run with one open wait.

        saw   the `digest` of the question that the person saw, when only its id is given: if the question changed
        since, the answer is refused, as it is with the wait itself tx    the caller's own connection to the store's
        database: the answer counts once they commit
        """
        self._notify(answers.answer(self.engine, wait, verb, value, by=by, comment=comment, saw=saw, tx=tx))

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
        """Sends a message to a run; it stays in the inbox until the run receives that name. The id deduplicates it.

        With `tx`, the caller's own connection to the store's database, it is sent when they commit.
        """
        if name.startswith("killick."):
            raise AnswerRefused(run, f"messages named {name!r} are Killick's own; choose another name")
        message = str(id or self.ids.new("msg"))
        self._notify(answers.send(self.engine, run, name, body, id=message, by=by, tx=tx))

    @Both
    def say(self, run: str, text: str, *, by: str | None = None) -> None:
        """Sends text to a run; its loop adds it before the next model call."""
        self._notify(answers.send(self.engine, run, SAID, text, id=self.ids.new("said"), by=by))

    # triggers ---------------------------------------------------------------------------------

    @Both
    def publish(self, name: str, body: Any = None, *, id: str | None = None, by: str | None = None) -> int:  # noqa: A002
        """Publishes an event: every trigger that listens to it fires. The id deduplicates it. Returns their number."""
        if not name or name.startswith("killick."):
            raise AnswerRefused(name, "is not a valid event name; use one such as 'order.created'")
        return trigger_runner.publish(self.engine, name, body, id=id, by=by)

    @Both
    def triggers(self) -> Sequence[TriggerInfo]:
        """Every trigger that is declared here or recorded, by name."""
        return trigger_runner.triggers(self.engine)

    @OnLoop
    async def fire(self, trigger: str, *, by: str | None = None, input: Any = msgspec.UNSET) -> str:  # noqa: A002
        """Fires a trigger manually, regardless of its policies; returns the id of the run that it starts."""
        return await trigger_runner.fire(self.engine, trigger, by=by, given=input)


def open(url: str = "killick.db", *, clock: Clock | None = None, ids: Ids | None = None, **options: Any) -> Client:  # noqa: A001
    """Opens a store: a path, `sqlite:///path` or `memory:`. It is created if it does not exist.

    durability   "power" (the default) or "process": what a commit survives roles        a function from a person's name
    to their roles, which decide what they may answer
    """
    given: Mapping[str, Any] = {"clock": clock} if clock is not None else {}
    ours = ("build", "lease_seconds", "grace_seconds", "behind", "roles")
    own = {name: options.pop(name) for name in ours if name in options}
    store = open_store(str(url), **given, **options)
    return Client(store, clock=clock, ids=ids, url=None if isinstance(store, MemoryStore) else str(url), **own)
