"""The client: starts runs, reads them, and acts on them. Its methods block, or are awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from killick.blocking import Awaits, Blocks, InThread, OnLoop
from killick.client import answers, inbox
from killick.client.external_runs import ClientRuntime, ExternalSession
from killick.client.maintenance import Maintenance
from killick.client.operations import Editor, Operations
from killick.client.start import AnyHandle, create_run, named, run_method, run_to_outcome, start_method
from killick.clock import Clock
from killick.definitions.agents import AGENTS, AnyAgent, read_contract
from killick.encryption.store import decrypting
from killick.engine import renewals
from killick.engine.control.inbox import SAID, Verb, refuse_own
from killick.engine.leases import LEASE_SECONDS
from killick.engine.outcome import RunOutcome, ended
from killick.engine.views import Listed, RunInfo, Wait
from killick.engine.waits import waits
from killick.errors import BoundaryUnknown, KillickError, StoreUnavailable
from killick.history.diff import Diff, across, between
from killick.history.run_info import info
from killick.history.search.query import Finder
from killick.ids import Ids
from killick.log import Recorded
from killick.model.state import State
from killick.store import MemoryStore, open_store
from killick.store.records import ENDED, RunQuery
from killick.workers import set_back
from killick.workers.trigger_runner import TriggerControl
from killick.workers.worker import SLICE_SECONDS, Worker

if TYPE_CHECKING:
    from killick.contracts.contract import Contract
    from killick.history.backtest import Rejudged
    from killick.replay.result import Replayed


class AnyClient(Operations):
    """The methods of both kinds of client. Each is written once: `Client` blocks in it, `AsyncClient` awaits it."""

    def as_sync(self) -> Client:
        """Returns the blocking client of the same store and runs. Close one of the two."""
        return self if isinstance(self, Client) else Client(self.runtime)

    def as_async(self) -> AsyncClient:
        """Returns the async client of the same store and runs. Close one of the two."""
        return self if isinstance(self, AsyncClient) else AsyncClient(self.runtime)

    @property
    def find(self) -> Finder[Self]:
        """Queries across runs and time, from an index: `kd.find.calls("send_email", where={"to": …})`."""
        return Finder(self.runtime.log, self)

    @property
    def edit(self) -> Editor[Self]:
        """Changes a run by hand, as `killick edit` does: `kd.edit.set("claim_17", limit=500)`."""
        return Editor(self.runtime, self)

    @property
    def store(self) -> Maintenance[Self]:
        """Maintains the store, as `killick store` does: `kd.store.verify()`."""
        return Maintenance(self.runtime, self)

    @property
    def triggers(self) -> TriggerControl[Self]:
        """Lists and fires triggers, and publishes events, as `killick trigger` does: `kd.triggers.fire("nightly")`."""
        return TriggerControl(self.runtime.engine, self)

    # running ----------------------------------------------------------------------------------

    @run_method
    async def run(
        self, agent: AnyAgent, input: Any = None, *, id: str | None = None, priority: int | None = None,  # noqa: A002
        tags: Sequence[str] = (), resume: bool = False, subject: str | None = None, by: str | None = None,
    ) -> Any:  # fmt: skip
        """Runs an agent in this process and returns its result. Waits for timers, backoffs and rate limits. Raises
        RunWaiting if only a person or an event can wake the run, RunFailed if it fails, RunCancelled, RunPaused,
        RunDiverged if the code does not match the log, RunMismatch if the id has another agent or input.

        id       the run's id; a known id resumes that run, and needs no input; an ended run returns its result
        resume   without an id: continue an unfinished run of the same agent and input that no process holds
        subject  in an encrypted store, the person whose data it is; `store.erase` destroys their key
        by       the person who starts it, for the record

            total = kd.run(settle, {"claim": 17}, id="claim_17")
        """
        return await run_to_outcome(self.runtime, agent, input, id, priority, tags, resume, subject, by)

    @start_method
    def start(
        self, agent: AnyAgent, input: Any = None, *, id: str | None = None, priority: int | None = None,  # noqa: A002
        tags: Sequence[str] = (), by: str | None = None, tx: Any = None, subject: str | None = None,
    ) -> AnyHandle[Any]:  # fmt: skip
        """Creates a run durably and returns its handle. A worker, or `advance`, executes it. Raises RunMismatch if the
        id has another agent or input.

        id       the run's id; the same id again returns the same run
        subject  in an encrypted store, the person whose data it is; `store.erase` destroys their key
        by       the person who starts it, for the record

            handle = kd.start(settle, {"claim": 17}, id="claim_17", tags=["eu"])
        """
        agent = named(agent)
        return self._handle(agent, create_run(self.runtime, agent, input, id, priority, tags, by, tx, subject))

    @OnLoop
    async def advance(self, run: str) -> RunOutcome:
        """Executes one run until it ends or waits; returns which, and until when. For adapters of other engines."""
        row = self.runtime.store.index(run)
        if row is not None and row.status in ENDED:
            return ended(self.runtime.engine, run)
        return await self.runtime.executor().advance(run)

    @OnLoop
    async def advance_due(self, limit: int = 100) -> Sequence[RunOutcome]:
        """Advances every due run once, concurrently."""
        executor = self.runtime.executor()
        set_back.wake_soon(self.runtime.engine, AGENTS.names())
        rows = self.runtime.store.due(self.runtime.clock.now_us(), limit=limit)
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
        verify_seconds: float | None = None,
    ) -> Worker:
        """Executes due runs while its `async with` block lasts; at the end of the block the worker drains.

        agents         the names of the agents whose runs it claims; by default all that this process declares
        concurrency    the number of runs that it executes at once
        per_agent      the same for single agents, by name
        lease_seconds  how long a frozen worker keeps a run before another takes it over
        slice_seconds  the shortest time slice of a run before a more urgent run may take its slot
        verify_seconds verify the store when its last complete verification is older; by default never
        """
        return Worker(
            self.runtime,
            agents=agents,
            concurrency=concurrency,
            per_agent=per_agent,
            lease_seconds=lease_seconds,
            slice_seconds=slice_seconds,
            verify_seconds=verify_seconds,
        )

    def host(
        self,
        run: str,
        *,
        agent: str = "host",
        contract: Contract | str | os.PathLike[str] | None = None,
        tags: Sequence[str] = (),
    ) -> ExternalSession:
        """Holds a run for calls from outside any agent, such as a framework's own loop. `with` or `async with` gives a
        `Host`. The run is created if it does not exist, and waits after the block. Raises RunBusy if another process
        holds the run.

        run       the id of the conversation or thread to which the calls belong
        agent     the name under which such runs are listed
        contract  the contract that evaluates the calls: a Contract, or the path of its TOML file
        """
        waits.refuse_own(run)
        rules = read_contract(contract) if isinstance(contract, str | os.PathLike) else contract
        return ExternalSession(self.runtime.external, run, agent=agent, contract=rules, tags=tags)

    # reading ----------------------------------------------------------------------------------

    @InThread
    def info(self, run: str) -> RunInfo:
        """Returns the current state of a run, in short; of a renewed run that was pruned, that of its last renewal.
        Raises RunUnknown."""
        log = self.runtime.log
        return info(log, run if log.store.head(run) is not None else renewals.latest(log, run))

    @InThread
    def state(self, run: str, at: int | None = None) -> State:
        """Returns the complete state of a run, at its last event or at any other. Raises RunUnknown."""
        return self.runtime.log.state(run, at)

    @InThread
    def events(self, run: str, after: int = 0, limit: int = 1_000) -> Sequence[Recorded]:
        """Returns events of a run, in order. Raises RunUnknown."""
        return self.runtime.log.read(run, after=after, limit=limit)

    @InThread
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
        """Returns runs, newest first.

        status              one status or several: "running", "waiting", "paused", "failed", …
        agent, tag          only runs of this agent, or with this tag
        since_us, until_us  only runs whose last change is in this time, in microseconds since the epoch
        before              the `number` of the last run of the previous page
        """
        statuses = (status,) if isinstance(status, str) else tuple(status)
        query = RunQuery(status=statuses, agent=agent, tag=tag, since_us=since_us, until_us=until_us)
        return [Listed.of(row) for row in self.runtime.store.runs(query, before=before, limit=limit)]

    @InThread
    def inbox(self, *, to: str | None = None, answered: bool = False, limit: int = 100) -> Sequence[Wait]:
        """Returns every open wait that needs a person: by deadline, then by priority, then by age.

        to        only waits for this person or role
        answered  the answered waits instead, whose answer the run has not consumed
        """
        log, now_us = self.runtime.log, self.runtime.clock.now_us()
        return inbox.everything(log, inbox.addressed(to), now_us=now_us, answered=answered, limit=limit)

    @InThread
    def diff(self, run: str, *places: str, against: str | None = None) -> Diff:
        """Returns the changes between two positions of a run, or at one step; or the differences from another run.
        Raises BoundaryUnknown.

        places   one step, or two positions: `6:before`, `6:after`, `@17`, `start`, `now`
        against  another run; one position then applies to both
        """
        if len(places) > (2 if against is None else 1):
            raise BoundaryUnknown(run, places[-1], "too many places; give one step or two places, or one with against=")
        if against is not None:
            return across(self.runtime.log, run, against, *places)
        return between(self.runtime.log, run, *places)

    @InThread
    def replay(
        self,
        run: str | os.PathLike[str],
        agent: AnyAgent | str | None = None,
        *,
        to: str | None = None,
        check: bool = False,
        seconds: float = 60.0,
    ) -> Replayed:
        """Replays an agent's code against a run, or an export of one, without I/O, on a copy in memory. Raises
        ReplayDiverged if the code diverges from the log and `check` is set.

        run      the id of a run, or the path of an export
        agent    the code; by default the agent that the run names
        to       stop when a step has its outcome, or before it: `6`, `6:before`
        check    raise at a divergence; otherwise return it
        seconds  the time limit
        """
        from killick.replay.replay import replayed
        from killick.replay.result import ReplayRequest

        return replayed(self.runtime.log, run, agent, ReplayRequest(to=to, seconds=seconds), check=check)

    @InThread
    def rejudge(self, run: str, contract: Contract | None = None) -> Rejudged:
        """Evaluates the intentions of a run again: by the recorded contracts, as an audit, or by another contract.
        Calls no tool and changes nothing."""
        from killick.history.backtest import rejudge

        return rejudge(self.runtime.log, run, contract)

    # people -----------------------------------------------------------------------------------

    @InThread
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
        """Answers an open wait. Raises AnswerRefused if the answer does not fit, AlreadyAnswered, NotAsked if this
        person may not answer.

        wait     the Wait, its id, or the id of a run with one open wait
        verb     one of the wait's `verbs`: "approve", "reject", "edit", "respond", "happened", …
        value    the response, or the edited arguments
        comment  text for the record
        saw      with an id: the `digest` of the wait that the person saw, to refuse the answer if the question changed

            kd.answer("claim_17", "approve", by="ada")
        """
        engine = self.runtime.engine
        self.runtime.notify(answers.answer(engine, wait, verb, value, by=by, comment=comment, saw=saw, tx=tx))

    @InThread
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
        """Sends a message to a run. It stays in the inbox until the run waits for that name. Raises RunUnknown,
        AnswerRefused if the run has ended.

        name  the name that the run waits for
        body  the content
        id    deduplicates the message
        """
        self.runtime.notify(answers.send(self.runtime.engine, self._sending(run, name, body, id=id, by=by), tx=tx))

    @send.awaits
    async def _send_soon(self, *args: Any, tx: Any = None, **named: Any) -> None:
        sending, engine = self._sending(*args, **named), self.runtime.engine
        if tx is None:
            self.runtime.notify(await answers.outgoing(engine).send_soon(engine, sending))
        else:
            self.runtime.notify(await asyncio.to_thread(answers.send, engine, sending, tx=tx))

    def _sending(
        self, run: str, name: str, body: Any = None, *, id: str | None = None, by: str | None = None  # noqa: A002
    ) -> answers.Sending:  # fmt: skip
        refuse_own(run, name, None if id is None else str(id))
        return answers.Sending(run, name, body, str(id or self.runtime.ids.new("msg")), by)

    @InThread
    def say(self, run: str, text: str, *, by: str | None = None) -> None:
        """Sends text to a run; its loop adds the text before the next model call. Raises RunUnknown, AnswerRefused if
        the run has ended."""
        sending = answers.Sending(run, SAID, text, self.runtime.ids.new("said"), by)
        self.runtime.notify(answers.send(self.runtime.engine, sending))


class Client(AnyClient, Blocks):
    """A store with its runs. Its methods block. Close it, or use it in a `with` block."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Parks the runs that are live here and closes the store. Waits up to 30 s for a blocking tool."""
        self.runtime.close()


class SimulatedClient(Client):
    """A client of a simulated process. Its store is in memory, so it may be called on a running loop."""

    _is_warned = True


class AsyncClient(AnyClient, Awaits):
    """A store with its runs. Its methods are awaited. Close it, or use it in an `async with` block."""

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Parks the runs that are live here and closes the store. Waits up to 30 s for a blocking tool."""
        await self.runtime.finish()
        await asyncio.to_thread(self.runtime.close)


def open(url: str = "killick.db", *, clock: Clock | None = None, ids: Ids | None = None, **options: Any) -> Client:  # noqa: A001
    """Opens a store and returns its client. The store is created if it does not exist. Raises StoreUnavailable,
    StoreFormat if a newer version wrote the store.

    url            a path, or a URL: `sqlite:///path`, `postgresql://…`, `redis://…` or `memory:`
    keys           the master key of an encrypted store: a file, `env:NAME`, 32 bytes, or an object with `wrap` and
                   `unwrap`; or several, of which the first wraps. By default those that `KILLICK_KEYS` names
    durability     "power" (the default): a commit survives a power failure; "process": only the end of the process
    busy_seconds   how long to wait for the write lock, or for an unreachable server; 60 by default
    create         whether to create a missing store; True by default
    roles          a function from a person's name to their roles, which decide what they may answer
    lease_seconds  how long a frozen process keeps a run; by default until it ends, with a local store
    grace_seconds  how long a closing client waits for open steps; 5 by default
    build          a function from an agent to its `Build`, which runs record

        with killick.open("killick.db") as kd:
            print(kd.run(settle, {"claim": 17}))
    """
    return Client(_runtime(url, clock, ids, options))


def open_async(
    url: str = "killick.db", *, clock: Clock | None = None, ids: Ids | None = None, **options: Any
) -> AsyncClient:  # fmt: skip
    """Opens a store as `open` does, for code that awaits: `async with killick.open_async("killick.db") as kd`."""
    return AsyncClient(_runtime(url, clock, ids, options))


def _runtime(
    url: str | os.PathLike[str], clock: Clock | None, ids: Ids | None, options: dict[str, Any]
) -> ClientRuntime:
    if not isinstance(url, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreUnavailable(repr(url), "is neither a path nor a URL; give one, such as 'killick.db'")
    keys = options.pop("keys", None)
    given: Mapping[str, Any] = {"clock": clock} if clock is not None else {}
    ours = ("build", "lease_seconds", "grace_seconds", "behind", "roles")
    own = {name: options.pop(name) for name in ours if name in options}
    raw = open_store(str(url), **given, **options)
    store = decrypting(raw, keys, clock=clock)
    return ClientRuntime(store, clock=clock, ids=ids, url=None if isinstance(raw, MemoryStore) else str(url), **own)
