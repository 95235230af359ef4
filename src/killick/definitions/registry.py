"""Tools and agents as people declare them, and the registry that finds agents by name. Runs nothing."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import types
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, Literal, ParamSpec, Protocol, TypeAlias, get_args, overload

import msgspec
from typing_extensions import TypeVar

from killick.contracts.contract import Approval, Contract
from killick.contracts.facts import approval_of
from killick.definitions.current import HERE, in_agent
from killick.definitions.rate_limit import Limit
from killick.engine.steps.live_calls import LiveCall
from killick.errors import AgentUnknown, CalledDirectly, ContractRefused, DeclarationRefused, NotDone
from killick.model.codec import Secret, digest
from killick.model.events import EffectClass
from killick.model.retry import ExceptionTypes, Retry, exception_types, retry_of, seconds
from killick.model.typed import convert
from killick.workspace.workspace import Workspace

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
I = TypeVar("I")  # noqa: E741
O = TypeVar("O")  # noqa: E741
T = TypeVar("T")


class Key(str):
    """The idempotency key of the action that a tool performs."""

    __slots__ = ()


KEY: Final = Key()
"""As the default of a parameter: the tool is given its key there, and callers leave it out."""

Repeat = Literal["allow", "recorded", "ask"]
Isolation = Literal["thread", "process"]
Changes = Literal["never", "by effects", "any time"]
Duration: TypeAlias = float | int | str


class InnerSteps:
    """The steps that the code of one attempt takes, of the same run. While one is under way, the attempt waits for it.

    Owns what is counted; the execution counts.
    """

    __slots__ = (
        "effect",
        "guest",
        "hosted",
        "inflight",
        "is_open",
        "is_refused",
        "live",
        "nth",
        "outer",
        "running",
        "step",
        "told",
    )

    def __init__(self, step: str, effect: str | None, guest: str | None, outer: InnerSteps | None) -> None:
        self.step = step
        self.effect = effect
        self.guest = guest
        self.outer = outer
        """Those of the attempt that took this attempt's own step."""
        self.inflight: tuple[str, str] | None = None
        """The action that this attempt is, where the same action elsewhere waits for it."""
        self.hosted: Any = None
        """Where they are taken, also while the run is being let go."""
        self.live: LiveCall | None = None
        """The attempt among the calls that may touch the world. It rests while it awaits these steps."""
        self.running = 0
        self.is_open = True
        self.is_refused = False
        """Whether its code met what closed the run's handle."""
        self.told: set[str] = set()
        """Steps that wait, of which its code was told."""
        self.nth: Counter[str] = Counter()
        """How often each call without a key was made, since the attempt began."""

    def named(self, name: str) -> str:
        """The key of the nth call of a name since the attempt began, which begins from its top each time."""
        self.nth[name] += 1
        return f"{self.guest}/{name}#{self.nth[name]}"

    def around(self) -> Iterator[InnerSteps]:
        """These, and those of all attempts around."""
        found: InnerSteps | None = self
        while found is not None:
            yield found
            found = found.outer


class ToolStep:
    """What a tool may know of the attempt it is, and how it says how far it got."""

    def __init__(
        self,
        run: str,
        id: str,  # noqa: A002
        attempt: int,
        key: Key,
        progress: Callable[[Any], None],
        workspace: Path | None = None,
    ) -> None:
        self.run = run
        self.workspace = workspace
        """The folder of the run, where its agent declares one."""
        self.id = id
        self.attempt = attempt
        self.key = key
        self.progress = progress
        """Record how far a long tool got, so that half-done work can be undone or gone on with."""
        self.inner: InnerSteps | None = None

    @staticmethod
    def here() -> ToolStep | None:
        """The attempt that this code is, for tools that are declared elsewhere and take no parameter for it."""
        place = HERE.get()
        return place if isinstance(place, ToolStep) else None

    @property
    def in_agent(self) -> bool:
        return False

    @property
    def replaying(self) -> bool:
        return False

    def tell(self) -> tuple[str, str | None, int | None]:
        return self.run, self.id, self.attempt


STEP: Final = ToolStep("", "", 0, KEY, lambda _: None)
"""As the default of a parameter: the tool is given its step there, and callers leave it out."""


WORKSPACE: Final = Path()
"""As the default of a parameter: the tool is given the run's folder there, and callers leave it out."""


class Tx:
    """The transaction in which a tool with `effect="transaction"` writes, together with the record of its outcome.

    Rows that were written and outcome commit together when the tool returns; when it raises, nothing happened.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._over = ""

    @property
    def connection(self) -> Any:
        """The database's own: a `sqlite3.Connection` or a `psycopg.Connection`. Leave its commit and rollback alone."""
        if self._over or self._connection is None:
            raise NotDone(self._over or "there is a transaction only while a tool that declares one runs in an agent")
        return self._connection

    def execute(self, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Execute a statement; returns the database's own cursor."""
        return self.connection.execute(sql, params)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Any:
        """Execute a statement once for each row of parameters."""
        cursor = self.connection.cursor()
        cursor.executemany(sql, rows)
        return cursor

    def end(self, because: str) -> None:
        """Give out no connection any more: the transaction has ended, or nobody waits for it."""
        self._over = because


TX: Final = Tx(None)
"""As the default of a parameter: the tool is given its transaction there, and callers leave it out."""


def is_marker(default: object) -> bool:
    """Whether a default stands for what each attempt is given anew."""
    return default is KEY or default is STEP or default is TX or default is WORKSPACE


class Resource(Generic[T]):
    """A pool or a client that tools share: opened when first needed, closed with the client.

    crm = killick.Resource(open_crm)

    @killick.tool
    async def look_up(name: str, crm: Crm = crm.inject()) -> Person: ...
    """

    def __init__(
        self,
        open: Callable[[], T] | Callable[[], Awaitable[T]],  # noqa: A002
        close: Callable[[T], object] | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.open = open
        self.close = close
        self.name = name or getattr(open, "__name__", "resource")

    def inject(self) -> T:
        """As the default of a tool's parameter: the tool is given the open resource there."""
        return _Injected(self)  # type: ignore[return-value]  # pyright: ignore[reportReturnType]


class _Injected:
    def __init__(self, resource: Resource[Any]) -> None:
        self.resource = resource


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One action on the world, as `reconcile`, `compensate` and `confirm` are told of it."""

    tool: str
    step: str
    key: str
    arguments: Mapping[str, Any]
    result: Any = None
    progress: Any = None
    failure: Any = None


class Happened(msgspec.Struct, frozen=True):
    """A reconciler found the effect in the world; the tool would have returned this."""

    result: Any = None


class DidNotHappen(msgspec.Struct, frozen=True):
    """A reconciler found that it did not happen, and never will."""


class Unknown(msgspec.Struct, frozen=True):
    """A reconciler could not find out."""


Reconciled: TypeAlias = Happened | DidNotHappen | Unknown
Reconciler: TypeAlias = Callable[[Effect], Any]


Approve: TypeAlias = str | Sequence[str] | Approval | Callable[..., Any]
"""Whom to ask before something is done: names or roles, how, or a function of the arguments that says so."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is carried out."""

    effect: EffectClass | Callable[..., EffectClass] = "at_most_once"
    retry: Retry | None = None
    timeout: float | None = None
    identity: tuple[str, ...] | None = None
    repeat: Repeat = "allow"
    changes: Changes = "any time"
    consumes: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    compensate: Callable[..., Any] | None = None
    reconcile: Reconciler | None = None
    confirm: Callable[[Effect], Any] | None = None
    isolate: Isolation = "thread"
    patience: float = 3600.0
    nothing_happened: tuple[type[BaseException], ...] = ()
    approve: Approve | None = None
    because: str | None = None
    says_effect: bool = True
    """False where nothing was said of the effect, and the default holds."""


DEFAULT_RETRY: Final = Retry()
ONCE: Final = Retry(attempts=1)
EFFECTS: Final = ("reads", "idempotent", "workspace", "transaction", "at_most_once")
CHANGES: Final = get_args(Changes)


class Tool(Generic[P, R]):
    """A declared function. Agents call it through `run.call`; outside an agent it is the plain function."""

    def __init__(self, fn: Callable[..., Any], name: str, policy: Policy, shape: Shape | None = None) -> None:
        self.fn = fn
        self.name = name
        self.policy = policy
        self.shape = shape or Shape(fn, name)
        self.__name__ = name
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    @property
    def doc(self) -> str:
        return self.shape.doc

    @property
    def signature(self) -> inspect.Signature:
        """What callers give; injected parameters are left out."""
        return self.shape.signature

    @property
    def hints(self) -> Mapping[str, Any]:
        return self.shape.hints

    @property
    def returns(self) -> Any:
        return self.shape.returns

    @property
    def is_async(self) -> bool:
        return self.shape.is_async

    def __repr__(self) -> str:
        return f"<killick tool {self.name}>"

    def _options(
        self, because: str | None, retry: Retry | int | None, timeout: Duration | None, approve: Approve | None
    ) -> Any:
        policy = self.policy
        changed = msgspec.structs.replace(
            policy,
            because=because if because is not None else policy.because,
            retry=policy.retry if retry is None else retry_of(self.name, retry, DEFAULT_RETRY),
            timeout=seconds(timeout) if timeout is not None else policy.timeout,
            approve=policy.approve if approve is None else approve if callable(approve) else approval_of(approve),
        )
        refuse_on_misfit(self.name, changed)
        return type(self)(self.fn, self.name, changed, self.shape)

    def _refuse_in_agent(self) -> None:
        if in_agent():
            raise CalledDirectly(self.name)


class AsyncTool(Tool[P, R]):
    """A tool written as `async def`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        self._refuse_in_agent()
        called: Coroutine[Any, Any, R] = self.fn(*args, **kwargs)
        return called

    def options(
        self, *, because: str | None = None, retry: Retry | int | None = None, timeout: Duration | None = None,
        approve: Approve | None = None,
    ) -> AsyncTool[P, R]:  # fmt: skip
        """The same tool, for one call, with a reason or another policy."""
        changed: AsyncTool[P, R] = self._options(because, retry, timeout, approve)
        return changed


class SyncTool(Tool[P, R]):
    """A tool written as `def`: it runs in a thread, so that it holds up nobody else."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._refuse_in_agent()
        result: R = self.fn(*args, **kwargs)
        return result

    def options(
        self, *, because: str | None = None, retry: Retry | int | None = None, timeout: Duration | None = None,
        approve: Approve | None = None,
    ) -> SyncTool[P, R]:  # fmt: skip
        """The same tool, for one call, with a reason or another policy."""
        changed: SyncTool[P, R] = self._options(because, retry, timeout, approve)
        return changed


class Shape:
    """What a function takes and returns: how calls are bound, digested and brought back from the record."""

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.is_async = inspect.iscoroutinefunction(fn)
        self.doc = inspect.getdoc(fn) or ""
        whole = inspect.signature(fn)
        hints = resolved_hints(fn)
        self.injected: dict[str, Any] = {
            parameter.name: parameter.default
            for parameter in whole.parameters.values()
            if is_marker(parameter.default) or isinstance(parameter.default, _Injected)
        }
        given = [p for p in whole.parameters.values() if p.name not in self.injected]
        self.takes_tx = any(marker is TX for marker in self.injected.values())
        self.signature = whole.replace(parameters=given, return_annotation=inspect.Signature.empty)
        self.hints: dict[str, Any] = {p.name: hints.get(p.name, Any) for p in given}
        self.returns: Any = hints.get("return", Any)
        self._plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in given)
        self._names = tuple(p.name for p in given)
        self._defaults = {p.name: p.default for p in given if p.default is not p.empty}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments by name: all of them, and those that were given. TypeError, as for any call, if they misfit.

        Digests are of those given, so that neither a new default parameter nor another default changes one.
        """
        if self._plain and not kwargs and len(args) == len(self._names):
            given = dict(zip(self._names, args, strict=True))
            return given, given
        bound = self.signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        bound.apply_defaults()
        return dict(bound.arguments), given

    def given(self, arguments: Mapping[str, Any]) -> Shape:
        """The shape of one call."""
        return self

    def strangers(self, names: Collection[str]) -> list[str]:
        """Those that are no parameters of it."""
        return sorted(set(names) - self.hints.keys())

    def restore(self, recorded: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
        """Recorded arguments as the types they are declared with; what only this process knows comes from the call."""
        restored = dict(live)
        for name in self._names:
            if name in recorded and not holds_secret(recorded[name]):
                restored[name] = convert(recorded[name], self._hint(name), at=name)
        return restored

    def _hint(self, name: str) -> Any:
        kind, hint = self.signature.parameters[name].kind, self.hints[name]
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple[hint, ...]  # type: ignore[valid-type]
        return dict[str, hint] if kind is inspect.Parameter.VAR_KEYWORD else hint  # type: ignore[valid-type]

    def call(self, fn: Callable[..., Any], arguments: Mapping[str, Any], injected: Mapping[str, Any]) -> Any:
        """Call the function with arguments by name."""
        if self._plain:
            return fn(**arguments, **injected)
        bound = inspect.BoundArguments(self.signature, dict(arguments))  # type: ignore[arg-type,unused-ignore]
        return fn(*bound.args, **bound.kwargs, **injected)


def holds_secret(value: Any) -> bool:
    """Whether a recorded value has a secret in it, of which only the digest is on record."""
    if isinstance(value, Mapping):
        return any(map(holds_secret, value.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(holds_secret, value))  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, Secret)


def resolved_hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """A function's annotations; one that cannot be resolved counts as Any."""
    written: dict[str, Any] = dict(getattr(inspect.unwrap(fn), "__annotations__", {}))
    resolved = dict.fromkeys(written, Any)
    seen = {**_locals_around(fn), **_closure(fn)}
    for name, hint in written.items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        with contextlib.suppress(NameError, TypeError, AttributeError, SyntaxError):
            found = typing.get_type_hints(one, getattr(fn, "__globals__", {}), seen, include_extras=True)
            resolved[name] = found[name]
    return resolved


def _closure(fn: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, as far as it is there already."""
    found: dict[str, Any] = {}
    if inspect.isfunction(fn):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                found[name] = cell.cell_contents
    return found


def _locals_around(fn: Callable[..., Any]) -> dict[str, Any]:
    """What was in sight where a function inside a function was declared: classes may be local to it, too."""
    if "<locals>" not in getattr(fn, "__qualname__", ""):
        return {}
    frame: types.FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return dict(frame.f_locals) if frame is not None else {}


# declaring tools ----------------------------------------------------------------------------------


class _ToolDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTool[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
    @overload
    def __call__(self, fn: Callable[P, R], /) -> SyncTool[P, R]: ...


@overload
def tool(fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTool[P, R]: ...  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
@overload
def tool(fn: Callable[P, R], /) -> SyncTool[P, R]: ...
@overload
def tool(
    *,
    effect: EffectClass | Callable[..., EffectClass] = "at_most_once",
    name: str | None = None,
    retry: Retry | int | None = None,
    timeout: Duration | None = None,
    identity: Sequence[str] | None = None,
    repeat: Repeat = "allow",
    changes: Changes = "any time",
    consumes: Sequence[str] = (),
    limit: Limit | Sequence[Limit] = (),
    compensate: Callable[..., Any] | None = None,
    reconcile: Reconciler | None = None,
    confirm: Callable[[Effect], Any] | None = None,
    isolate: Isolation = "thread",
    patience: Duration = "1h",
    nothing_happened: ExceptionTypes = (),
    approve: Approve | None = None,
) -> _ToolDecorator: ...


def tool(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Declare a tool: what it does to the world, and what to do when that is in doubt.

    effect      "reads", "idempotent", "workspace", "transaction" or "at_most_once" (the default), or a function of the
                arguments
    retry       how often it is tried, or Retry(…): also after which errors and how long apart
    timeout     for one attempt
    identity    the arguments that make two calls the same action; all of them by default
    repeat      what the same action twice does: "allow", give the "recorded" result, or "ask"
    changes     when what it reads changes: "never", "by effects" of its own run alone, or at "any time" (the default);
                a model that wants it back is answered from the record where it cannot have changed
    consumes    arguments that can be used once in the whole store, such as a token
    limit       Limit(…), shared between tools
    compensate  undoes it, given the Effect; reconcile finds out whether it happened; confirm looks afterwards
    isolate     "process" runs it where it can be killed when its time is up
    patience    how long rate limits may hold it up, in all
    nothing_happened  the errors by which it proves that nothing happened: only then is an at_most_once tool tried again
    approve     whom to ask before it is done: a name, names, Approval(…), or a function of the arguments giving one
    """

    def declare(fn: Callable[..., Any]) -> Tool[..., Any]:
        called = name or str(getattr(fn, "__name__", "tool"))
        kind: Any = AsyncTool if inspect.iscoroutinefunction(fn) else SyncTool
        declared: Tool[..., Any] = kind(fn, called, policy_of(called, options))
        checked_tool(declared)
        TOOLS[called] = declared
        return declared

    return declare if fn is None else declare(fn)


def policy_of(name: str, options: dict[str, Any]) -> Policy:
    """What the options of a tool say, checked."""
    try:
        return _policy(name, options)
    except ContractRefused as refused:
        raise DeclarationRefused(name, f"approve={options.get('approve')!r}: {refused}") from None


def _policy(name: str, options: dict[str, Any]) -> Policy:
    options = {**options, "says_effect": "effect" in options}
    limit = options.pop("limit", ())
    options["limits"] = (limit,) if isinstance(limit, Limit) else tuple(limit)
    if options.get("timeout") is not None:
        options["timeout"] = seconds(options["timeout"])
    if options.get("retry") is not None:
        options["retry"] = retry_of(name, options["retry"], DEFAULT_RETRY)
    options["nothing_happened"] = exception_types(name, "nothing_happened", options.get("nothing_happened", ()))
    options["patience"] = seconds(options.pop("patience", "1h"))
    approve = options.get("approve")
    if approve is not None and not callable(approve):
        options["approve"] = approval_of(approve)
    if options.get("identity") is not None:
        options["identity"] = _names(options["identity"])
    options["consumes"] = _names(options.get("consumes", ()))
    return Policy(**options)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def checked_tool(declared: Tool[..., Any]) -> None:
    """Refuse a declaration that contradicts itself."""
    policy, name = declared.policy, declared.name
    if not callable(policy.effect) and policy.effect not in EFFECTS:
        raise DeclarationRefused(name, f"effect={policy.effect!r} is not one of {', '.join(EFFECTS)}")
    if policy.changes not in CHANGES:
        raise DeclarationRefused(name, f"changes={policy.changes!r} is not one of {', '.join(CHANGES)}")
    if policy.changes != "any time" and not callable(policy.effect) and policy.effect != "reads":
        raise DeclarationRefused(name, f"changes={policy.changes!r} is of what a tool reads; say effect='reads'")
    for option, named in (("identity", policy.identity or ()), ("consumes", policy.consumes)):
        for parameter in named:
            if parameter not in declared.hints:
                raise DeclarationRefused(name, f"{option} names {parameter!r}, which is none of its parameters")
    for limit in policy.limits:
        if limit.by is not None and limit.by not in declared.hints:
            raise DeclarationRefused(
                name, f"limit {limit.name!r} goes by {limit.by!r}, which is none of its parameters"
            )
    refuse_on_misfit(name, policy)
    if not callable(policy.effect):
        refuse_tx_misfit(name, policy.effect, declared.shape)
    if declared.shape.takes_tx and declared.is_async:
        raise DeclarationRefused(name, "a transaction is for plain def tools; an async one would keep it open too long")
    if policy.isolate == "process" and declared.shape.takes_tx:
        raise DeclarationRefused(name, "a transaction cannot reach into another process; take out isolate='process'")
    if policy.isolate == "process" and declared.is_async:
        raise DeclarationRefused(name, "isolate='process' is for plain def tools; an async one is cancelled")
    if policy.isolate == "process" and ("<locals>" in declared.fn.__qualname__ or declared.fn.__module__ == "__main__"):
        raise DeclarationRefused(name, "isolate='process' needs a function at the top of an importable module")


def refuse_on_misfit(name: str, policy: Policy) -> None:
    """Refuse errors to retry on for a tool that may have acted when it raises them."""
    if policy.effect == "at_most_once" and policy.retry is not None and policy.retry.on:
        named = ", ".join(kind.__name__ for kind in policy.retry.on)
        raise DeclarationRefused(
            name,
            f"Retry(on=({named},)) would repeat what is to happen at most once; say nothing_happened=({named},) if "
            "that error proves that nothing happened, or effect='idempotent' and send its key along",
        )


def refuse_tx_misfit(name: str, effect: EffectClass, shape: Shape | None) -> None:
    """Who writes in a transaction is given it, and nobody else is."""
    takes_tx = shape is not None and shape.takes_tx
    if effect == "transaction" and not takes_tx:
        raise DeclarationRefused(
            name, "effect='transaction' needs a parameter `tx: killick.Tx = killick.TX` to write with"
        )
    if takes_tx and effect != "transaction":
        raise DeclarationRefused(name, f"it takes a killick.Tx, but its effect is {effect!r}; say effect='transaction'")


# declaring agents ---------------------------------------------------------------------------------

OnFailure = Literal["stop", "compensate"]


class Agent(Generic[I, O]):
    """A function that people write, taking a Run and an input; found by name when a run goes on."""

    def __init__(self, fn: Callable[..., Any], name: str, options: AgentOptions, *, is_machine: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.options = options
        self.is_machine = is_machine
        self.is_async = inspect.iscoroutinefunction(fn)
        self.__name__ = name
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        parameters = list(inspect.signature(fn).parameters.values())
        if not 1 <= len(parameters) <= 2:
            raise DeclarationRefused(name, "an agent takes a Run and, if it needs one, a single input")
        hints = resolved_hints(fn)
        self.takes_input = len(parameters) == 2
        self.input_type: Any = hints.get(parameters[1].name, Any) if self.takes_input else None
        self.returns: Any = hints.get("return", Any)

    def __repr__(self) -> str:
        return f"<killick agent {self.name}>"

    def digest_of(self, input: Any) -> bytes:  # noqa: A002
        """What tells two inputs apart."""
        return digest(input, at="input")

    def checked(self, value: Any) -> Any:
        """An input as the type that the agent takes. ValueRefused when it does not fit."""
        return convert(value, self.input_type, at="input") if self.takes_input else value

    def first_context(self) -> Any:
        """The context that a run starts with; None without one."""
        return None if self.options.context is None else self.options.context()


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent declares besides its code."""

    context: type[Any] | None = None
    migrations: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = ()
    on_failure: OnFailure = "stop"
    aliases: tuple[str, ...] = ()
    priority: int = 0
    contract: Contract | None = None
    workspace: Workspace | None = None

    @property
    def form(self) -> int:
        """The version of the context's form: one more for every migration."""
        return len(self.migrations) + 1


class _AgentDecorator(Protocol):
    @overload
    def __call__(self, fn: Callable[[Any, I], Coroutine[Any, Any, O]], /) -> Agent[I, O]: ...
    @overload
    def __call__(self, fn: Callable[[Any], Coroutine[Any, Any, O]], /) -> Agent[None, O]: ...
    @overload
    def __call__(self, fn: Callable[[Any, I], O], /) -> Agent[I, O]: ...
    @overload
    def __call__(self, fn: Callable[[Any], O], /) -> Agent[None, O]: ...


@overload
def agent(fn: Callable[[Any, I], Coroutine[Any, Any, O]], /) -> Agent[I, O]: ...
@overload
def agent(fn: Callable[[Any], Coroutine[Any, Any, O]], /) -> Agent[None, O]: ...
@overload
def agent(fn: Callable[[Any, I], O], /) -> Agent[I, O]: ...
@overload
def agent(fn: Callable[[Any], O], /) -> Agent[None, O]: ...
@overload
def agent(
    *,
    name: str | None = None,
    context: type[Any] | None = None,
    migrations: Sequence[Callable[[dict[str, Any]], dict[str, Any]]] = (),
    on_failure: OnFailure = "stop",
    aliases: Sequence[str] = (),
    priority: int = 0,
    contract: Contract | str | os.PathLike[str] | None = None,
    workspace: Workspace | str | os.PathLike[str] | None = None,
) -> _AgentDecorator: ...


def agent(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Declare an agent: an `async def` taking a Run, or a plain `def` taking a SyncRun, and an input.

    name, aliases  how its runs find it again; an alias keeps runs of an older name going
    context        the type of its document; migrations bring older documents up to date, one function a version
    on_failure     "compensate" undoes what was done when it fails
    priority       of its runs, unless they are given another
    contract       what everything that it intends is judged by: a Contract, or a TOML file beside the agent's own
    workspace      the folder that it works in, whose files are kept as they were before and after every step
    """
    return declared(fn, options, is_machine=False)


def declared(fn: Callable[..., Any] | None, options: dict[str, Any], *, is_machine: bool) -> Any:
    """An agent of either style, with its options, entered in the registry."""
    name = options.pop("name", None)
    for field in ("migrations", "aliases"):
        options[field] = _names(options.get(field, ()))

    def declare(fn: Callable[..., Any]) -> Agent[Any, Any]:
        called = name or getattr(fn, "__name__", "agent")
        if isinstance(options.get("contract"), str | os.PathLike):
            beside = os.path.dirname(inspect.getsourcefile(inspect.unwrap(fn)) or "")
            options["contract"] = read_contract(os.path.join(beside, options["contract"]))
        if isinstance(options.get("workspace"), str | os.PathLike):
            options["workspace"] = Workspace(options["workspace"])
        made: Agent[Any, Any] = Agent(fn, called, AgentOptions(**options), is_machine=is_machine)
        AGENTS.add(made)
        return made

    return declare if fn is None else declare(fn)


def read_contract(path: str | os.PathLike[str]) -> Contract:
    """A contract from a TOML file. ContractRefused, naming the rule, where it does not hold together."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractRefused(os.fspath(path), f"cannot be read ({error})") from None
    return Contract.parse(text)


class Registry:
    """The agents declared in this process, by name and alias. The last one declared under a name counts."""

    def __init__(self) -> None:
        self._agents: dict[str, Agent[Any, Any]] = {}
        self._aliases: dict[str, str] = {}

    def add(self, declared: Agent[Any, Any]) -> None:
        self._agents[declared.name] = declared
        for alias in declared.options.aliases:
            self._aliases[alias] = declared.name

    def get(self, name: str) -> Agent[Any, Any]:
        found = self._agents.get(name) or self._agents.get(self._aliases.get(name, ""))
        if found is None:
            raise AgentUnknown(name, known=self._agents)
        return found

    def names(self) -> tuple[str, ...]:
        """Every name and alias by which runs find an agent here."""
        return (*self._agents, *self._aliases)

    def copy(self) -> tuple[dict[str, Agent[Any, Any]], dict[str, str]]:
        """What is declared now, to be restored later."""
        return dict(self._agents), dict(self._aliases)

    def restore(self, declared: tuple[dict[str, Agent[Any, Any]], dict[str, str]]) -> None:
        """Go back to what was declared when it was copied."""
        self._agents, self._aliases = dict(declared[0]), dict(declared[1])


AGENTS: Final = Registry()

TOOLS: Final[dict[str, Tool[..., Any]]] = {}
"""The tools declared in this process, so that what a run did can be undone by another process."""

AnyTool: TypeAlias = Tool[..., Any]
AnyAgent: TypeAlias = Agent[Any, Any]
