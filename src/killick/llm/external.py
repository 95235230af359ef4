"""Hosts: the steps of code that Killick did not start, such as a framework's own loop. Each is identified by its key.

An agent's own code takes its steps in order, and replays in that order. A framework has its own tasks and threads, and
repeats calls in any order, or never. So a host has a branch for every key, without an order between them.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from killick.definitions.markers import InnerSteps, ToolStep
from killick.definitions.policy import Duration
from killick.definitions.tools import AnyTool, Tool
from killick.engine.divergence import recorded_step
from killick.engine.execution import Branch, Execution, Scope
from killick.engine.replay import OVER, RequestedStep
from killick.engine.signals import Cancelling, Interrupted, Signal
from killick.engine.steps.intention import Intent, is_async, model_intent
from killick.engine.steps.pipeline import execute_step, run_step
from killick.engine.waits import questions
from killick.engine.waits.open_wait import InnerCaller
from killick.engine.waits.waits import Answer
from killick.errors import KillickError
from killick.log.writer import Entry
from killick.model import events as e

P = ParamSpec("P")
T = TypeVar("T")

HOSTED: Final = "hosted"
"""The scope of a framework's loop inside an agent: it runs again from the top, and recorded calls return their
outcomes."""

GUESTS: Final = "guests"
"""The scope of calls from outside any agent: callers come and go, and the run waits in between."""

HOST: Final[ContextVar[Host | None]] = ContextVar("killick_host", default=None)


class CallScope:
    """Numbers calls without a key: the nth of a name. In another scope they are other calls."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._nth: Counter[str] = Counter()

    def named(self, name: str) -> str:
        """Returns the key of the next call of this name."""
        self._nth[name] += 1
        return f"{self._name}{name}#{self._nth[name]}"


SCOPE: Final[ContextVar[CallScope | None]] = ContextVar("killick_call_scope", default=None)
"""The scope of this code; by default that of its host."""


def here() -> Host | None:
    """The active host of this code, or None."""
    return HOST.get()


def attempt() -> ToolStep | None:
    """The current attempt of a tool: its step, and the idempotency key for the remote service."""
    return ToolStep.here()


def _blocking(method: Callable[Concatenate[Host, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Host, P], T]:
    """Returns a method's form for blocking code, in any thread but the host's own."""

    @functools.wraps(method)
    def blocking(self: Host, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            caller: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            caller = None
        if caller is self.loop:
            raise KillickError(f"{self.run}: a blocking call here would block the host; await host.call instead")
        work: Future[T] = asyncio.run_coroutine_threadsafe(method(self, *args, **kwargs), self.loop)
        try:
            return work.result()
        except BaseException:
            work.cancel()
            raise

    return blocking


class Host:
    """Records the calls of code that Killick did not start, from any task or thread, each once by its key.

    run  the id of the run

    A call with a recorded key returns the recorded outcome. Without a key, the nth call of the same name with the same
    arguments is the same call. `call_sync`, `model_sync` and `ask_sync` are the same for blocking code, in any thread
    but the host's own.
    """

    def __init__(
        self, run: str, loop: asyncio.AbstractEventLoop, reach: Callable[[], Awaitable[ExternalBranches]]
    ) -> None:
        self.run = run
        self.loop = loop
        self.reach = reach
        self._scope = CallScope()
        self._mutex = threading.Lock()

    def __repr__(self) -> str:
        return f"<killick host of {self.run}>"

    @staticmethod
    def here() -> Host | None:
        """The active host of this code, or None."""
        return HOST.get()

    async def call(
        self,
        tool: AnyTool,
        arguments: Mapping[str, Any],
        *,
        key: str | None = None,
        fn: Callable[..., Any] | None = None,
        bubbles: tuple[type[BaseException], ...] = (),
    ) -> Any:
        """Calls a tool as a step. Raises StepFailed, Rejected, RunWaiting if the call waits for a person.

        arguments  the arguments, by name
        key        identifies the call: the framework's own id
        fn         called with the arguments, in place of the tool's own function
        bubbles    errors by which a framework leaves a tool before any effect: no attempt is counted, the step stays
                   open, and the error reaches the caller unchanged
        """
        if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a host calls tools; declare {getattr(tool, '__name__', tool)!r} with killick.tool")
        shape = tool.shape.given(arguments)
        bound, given = shape.bind((), arguments)
        intent = Intent("tool", tool.name, tool.fn, shape, bound, tool.policy, returns=tool.shape.returns, given=given)
        intent.bubbles = bubbles
        self._called(intent, fn or tool.fn)
        return await self._awaited(partial(self._performed, intent, key))

    async def model(self, fn: Callable[..., Any], /, *args: Any, key: str | None = None, **kwargs: Any) -> Any:
        """Calls a model: recorded verbatim, with usage and reasoning, and never called again under the same key. Raises
        StepFailed."""
        intent = model_intent(fn, args, kwargs)
        self._called(intent, intent.fn)
        return await self._awaited(partial(self._performed, intent, key))

    async def ask(
        self,
        prompt: str,
        *,
        key: str,
        to: str | Sequence[str] = (),
        options: Sequence[Any] | None = None,
        timeout: Duration | None = None,
        default: Any = questions.MISSING,
    ) -> Answer:
        """Asks a person and waits for the answer. The options are those of `run.ask`. Raises WaitExpired at the
        deadline if there is no default."""
        asked = partial(
            questions.ask, prompt=prompt, to=to, timeout=timeout, default=default, options=options, returns=Any
        )
        answer: Answer = await self._awaited(lambda hosted: hosted.take(key, None, asked))
        return answer

    call_sync, model_sync, ask_sync = _blocking(call), _blocking(model), _blocking(ask)

    # inside -----------------------------------------------------------------------------------

    def _called(self, intent: Intent, fn: Callable[..., Any]) -> None:
        """Calls a function on the loop that it belongs to, whichever loop the host uses."""
        intent.is_async = is_async(fn)
        try:
            caller = asyncio.get_running_loop()
        except RuntimeError:
            caller = self.loop
        if not intent.is_async or caller is self.loop:
            intent.fn = fn
            return

        @functools.wraps(fn)
        async def there(*args: Any, **kwargs: Any) -> Any:
            return await _on_loop(caller, partial(fn, *args, **kwargs))

        intent.fn = there

    async def _performed(self, intent: Intent, key: str | None, hosted: ExternalBranches) -> Any:
        if key is None:
            intent.classify("of a guest", hosted.ex.log.secret_key)
            named = f"{intent.name}#{e.to_text(intent.digest)[:22]}"
            with self._mutex:
                key = (_inner(self.run) or SCOPE.get() or self._scope).named(named)
        return await hosted.take(key, intent, partial(execute_step, intent=intent))

    async def _reached(self, do: Callable[[ExternalBranches], Coroutine[Any, Any, T]]) -> T:
        inner = _inner(self.run)
        if inner is not None:
            return await do(inner.hosted)  # also during the release, which waits for the attempt that runs this code
        while True:
            hosted = await self.reach()
            if hosted.is_reached:
                return await do(hosted)

    async def _awaited(self, do: Callable[[ExternalBranches], Coroutine[Any, Any, T]]) -> T:
        if asyncio.get_running_loop() is self.loop:
            return await self._reached(do)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._reached(do), self.loop))


def _inner(run: str) -> InnerSteps | None:
    """The steps of the attempt whose code this is, of the same run, while it is open."""
    place = ToolStep.here()
    inner = None if place is None or place.run != run else place.inner
    return inner if inner is not None and inner.is_open else None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def _on_loop(loop: asyncio.AbstractEventLoop, code: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Awaits a coroutine on another loop. A cancellation is passed on, and has completed when this returns."""
    ended: Future[T] = Future()
    begun: list[asyncio.Task[T]] = []

    def begin() -> None:
        begun.append(loop.create_task(code()))
        begun[0].add_done_callback(partial(_settled, ended))

    loop.call_soon_threadsafe(begin)
    here = asyncio.wrap_future(ended)
    while not ended.done():
        try:
            await asyncio.shield(here)
        except asyncio.CancelledError:
            if ended.done():
                break
            loop.call_soon_threadsafe(lambda: begun[0].cancel())
    return await here


def _settled(ended: Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        ended.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        ended.set_exception(error)
    else:
        ended.set_result(task.result())


# the external steps of an execution ---------------------------------------------------------------


class ExternalBranches:
    """The external branches of one execution: a branch for every key."""

    def __init__(self, ex: Execution, branch: Branch, step: e.StepId, *, over_at: int, outside: bool) -> None:
        self.ex = ex
        ex.hosted = self
        self.outside = outside
        self._scope = Scope(step, branch, over_at=over_at)
        self._known = ex.record.guests(step)
        self._last = max(self._known.values(), default=0)
        self._begun: dict[str, asyncio.Future[Any]] = {}
        self._branches: dict[str, Branch] = {}
        self._waiting: Counter[str] = Counter()
        self._identity: dict[str, tuple[str, str, e.Digest | None]] = {}
        self._left: set[str] = set()
        """Keys of steps that were started here and left open."""
        self.is_open = True
        self.why: Callable[[], Awaitable[BaseException]] | None = None
        """Outside an agent: the state of the run after its release, as an error."""
        self.how: Callable[[], BaseException] | None = None
        """The current state, for code inside an attempt, which must end before the run can be released."""

    @property
    def is_reached(self) -> bool:
        """Whether a call can start here. An outside call that arrives during the release leases the run again."""
        return not self.outside or self.ex.signal is None

    async def take(self, key: str, intent: Intent | None, do: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
        """The step of a key: in progress, recorded, or started now."""
        ex = self.ex
        await ex.until_taken()  # the run may have been released while all else waited
        inner = _inner(ex.run_id)
        if inner is not None and inner.effect == "transaction":
            reason = "is a transaction, which takes no steps inside; take them before or after it"
            raise KillickError(f"{ex.run_id}: step {inner.step} {reason}")
        if ex.signal is not None:
            raise await self._exception_for(ex.signal, inner)
        if not self.is_open:
            raise KillickError(f"{ex.run_id}: its host has ended; call inside the block")
        if key in self._left:
            await ex.barrier()  # its recorded events are read again
        work = self._begun.get(key)
        if work is None:
            work = self._begun[key] = self._start(key, intent, do, inner)
        elif self.outside and intent is not None:
            self._refuse_other(key, intent, self._identity[key])
        self._waiting[key] += 1
        try:
            if inner is not None:
                await self._awaited_inside(self._branches[key], work, inner)
            value = await asyncio.shield(work)
            if self.outside:
                await ex.barrier()  # durable before the caller uses it: no later barrier covers that
            return value
        except asyncio.CancelledError:
            if not work.done() and self._waiting[key] == 1:
                work.cancel()  # its only caller was cancelled
                await asyncio.wait({work})
                self._leave(key)
            elif work.cancelled() and not _is_cancelled():
                self._leave(key)  # another caller was cancelled as this one arrived
                return await self.take(key, intent, do)
            raise
        except Signal as signal:
            raise await self._exception_for(signal, inner) from None
        except BaseException as error:
            if intent is not None and isinstance(error, intent.bubbles):
                self._leave(key)
            raise
        finally:
            self._waiting[key] -= 1

    def _leave(self, key: str) -> None:
        """Leaves a step as it is recorded: the next caller continues from there."""
        if self._begun.pop(key, None) is not None:
            self._left.add(key)

    async def _exception_for(self, signal: Signal, inner: InnerSteps | None) -> BaseException:
        if inner is not None:
            inner.is_refused = True
        if inner is not None and self.how is not None and not isinstance(signal, Interrupted | Cancelling):
            return self.how()  # open attempts end before the release, and this code belongs to one
        return signal if self.why is None else await self.why()

    async def _awaited_inside(self, branch: Branch, work: asyncio.Future[Any], inner: InnerSteps) -> None:
        """Awaits a step inside an attempt until it ends; outside an agent, also until everything waits. The code of an
        attempt cannot wait for people, so it receives the state of the run, and the step keeps waiting."""
        ex = self.ex
        if work.done():
            return
        caller = InnerCaller(inner, branch, ex.loop.create_future())
        ex.inner_waits.begin(inner, branch)
        if self.how is not None:
            ex.inner_waits.callers.append(caller)
        try:
            await asyncio.wait({work, caller.notified}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self.how is not None:
                ex.inner_waits.callers.remove(caller)
            ex.inner_waits.end(inner, branch)
        if not work.done() and self.how is not None:
            inner.waits.add(f"{branch.path}.1")
            raise self.how()

    def _start(
        self, key: str, intent: Intent | None, do: Callable[..., Coroutine[Any, Any, Any]], inner: InnerSteps | None
    ) -> Any:
        ex, scope = self.ex, self._scope
        branch = self._branches[key] = Branch(ex, f"{scope.step}.{self._number(key, intent)}", scope)
        branch.guest, branch.outer = key, inner
        past = ex.record.steps.get(f"{branch.path}.1")
        if intent is not None and self.outside:
            if past is not None:
                self._refuse_other(key, intent, _identity(past.sort, past.name, ex.record.event(past.intended)))
            self._identity[key] = _identity(intent.sort, intent.name, self._asked(intent))
        branch.stopped = scope.branch.stopped
        scope.branches.append(branch)
        if not scope.running:
            ex.busy -= 1
            ex.turns.computing -= 1
        scope.running += 1
        return ex.start(branch, partial(run_step, ex, do), on_loop=True)

    def _number(self, key: str, intent: Intent | None) -> int:
        """The branch of a key. A model call with another wording than the recorded one counts as drift."""
        number = self._known.get(key)
        if number is None and intent is not None and intent.sort == "model" and not self.outside:
            number = self._drifted(intent.name)
        if number is None:
            self._last += 1
            number = self._known[key] = self._last
        elif key in self._left:
            self._left.discard(key)
            self.ex.record.learn(self.ex.log.fold, f"{self._scope.step}.{number}.1")
        return number

    def _drifted(self, name: str) -> int | None:
        for key, number in self._known.items():
            past = self.ex.record.steps.get(f"{self._scope.step}.{number}.1")
            if past is not None and (past.sort, past.name) == ("model", name) and key not in self._begun:
                return number
        return None

    def _asked(self, intent: Intent) -> RequestedStep:
        intent.classify("of a guest", self.ex.log.secret_key)
        return intent.asked()

    def _refuse_other(self, key: str, intent: Intent, known: tuple[str, str, e.Digest | None]) -> None:
        """Outside an agent, a key identifies one call: another call under it is refused."""
        asked = self._asked(intent)
        now = _identity(intent.sort, intent.name, asked)
        if now[:2] != known[:2] or (asked.binding and now != known):
            reason = f"{key} is on record as {known[0]} {known[1]} with other arguments; give this call another key"
            raise KillickError(f"{self.ex.run_id}: {reason}")

    async def close(self) -> None:
        """Ends the steps in progress."""
        under_way = {work for work in self._begun.values() if not work.done()}
        if under_way:
            await asyncio.wait(under_way)


def _identity(sort: str, name: str, said: Any) -> tuple[str, str, e.Digest | None]:
    """The identity of a call under a key."""
    return sort, name, said.identity or said.digest


class ExternalSteps:
    """`async with run.hosting() as host`, or `with` in a plain def agent: a framework's own loop runs in the block."""

    def __init__(self, execution: Execution, begin: Callable[..., Any], *, outside: bool = False) -> None:
        self._ex = execution
        self._begin = begin
        self._outside = outside
        self._hosted: ExternalBranches | None = None
        self._before: Host | None = None

    async def __aenter__(self) -> Host:
        self._hosted = await self._begin(_opened, self._outside)
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave(error):
            await self._begin(_closed, self._hosted, error)

    def __enter__(self) -> Host:
        self._hosted = self._begin(_opened, self._outside)
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leave(error):
            self._begin(_closed, self._hosted, error)

    def _enter(self) -> Host:
        hosted = self._hosted
        assert hosted is not None

        async def reach() -> ExternalBranches:
            return hosted

        host = Host(self._ex.run_id, self._ex.loop, reach)
        self._before = HOST.get()
        HOST.set(host)
        return host

    def _leave(self, error: BaseException | None) -> bool:
        """Whether to record the end of the block: not if the run only leaves memory."""
        assert self._hosted is not None
        HOST.set(self._before)
        self._hosted.is_open = self._ex.hosting = False
        return not isinstance(error, Signal) and self._ex.signal is None


async def _opened(ex: Execution, branch: Branch, outside: bool) -> ExternalBranches:
    if branch.scope is not None or ex.hosting:
        raise KillickError(f"{ex.run_id}: run.hosting works only in the agent's main branch, one block at a time")
    name = GUESTS if outside else HOSTED
    step = branch.number()
    past = await recorded_step(ex, branch, step, RequestedStep("scope", name), {})
    if past is None:
        ex.write_behind(Entry(e.StepIntended(at=ex.now_us(), step=step, sort="scope", name=name)))
    ex.hosting = True
    over_at = past.ended if past is not None and past.status in OVER else 0
    return ExternalBranches(ex, branch, step, over_at=over_at, outside=outside)


async def _closed(ex: Execution, branch: Branch, hosted: ExternalBranches, error: BaseException | None) -> None:
    ex.hosting = True  # steps in progress still end in any order
    await hosted.close()
    ex.hosting = False
    ex.refuse(branch)
    step = f"{branch.path}.{branch.count}" if branch.path else str(branch.count)
    past = ex.record.steps.get(step)
    if past is not None and past.status in OVER:
        ex.context.see(past.ended)
        return
    outcome: Any = "returned" if error is None else "failed"
    await ex.recorded(ex.write_behind(Entry(e.StepEnded(at=ex.now_us(), step=step, outcome=outcome))))
