"""Tools: the declared function, its signature, and the registry of tools by name. Runs nothing."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Final, Generic, ParamSpec, Protocol, Self, TypeAlias, overload

import msgspec
from typing_extensions import TypeVar

from killick.contracts.facts import approval_of
from killick.definitions.current import in_agent
from killick.definitions.markers import KEY, TX, Injected, is_marker
from killick.definitions.policy import (
    DEFAULT_RETRY,
    EFFECTS,
    OPTIONS,
    Approve,
    Duration,
    Effect,
    Isolation,
    Policy,
    Reconciler,
    Repeat,
    policy_of,
    refuse_on_misfit,
    refuse_unknown,
    signed,
)
from killick.definitions.rate_limit import Limit
from killick.errors import CalledDirectly, DeclarationRefused, ValueRefused
from killick.model.chunks import through_codec
from killick.model.codec import Secret
from killick.model.events import EffectClass
from killick.model.retry import ExceptionTypes, Retry, retry_of, seconds
from killick.model.typed import convert, fit

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Tool(Generic[P, R]):
    """A declared tool. Agents call it by `run.call`; outside an agent it is the plain function."""

    def __init__(self, fn: Callable[..., Any], name: str, policy: Policy, shape: Shape | None = None) -> None:
        self.fn = fn
        self.name = name
        self.policy = policy
        self.shape = shape or Shape(fn, name)
        self.is_plain = _is_plain(policy, self.shape)
        """Whether a call needs nothing besides its arguments and its key: no limit, right, approval or timeout."""
        self.__name__ = name
        self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"<killick.Tool {self.name}, {self.policy.effect}>"

    def options(
        self, *, because: str | None = None, retry: Retry | int | None = None, timeout: Duration | None = None,
        approve: Approve | None = None,
    ) -> Self:  # fmt: skip
        """The same tool, for one call, with a reason or another policy.

        retry    the number of attempts, or a Retry with its errors and backoff
        timeout  the time limit of one attempt
        approve  who must approve the call: names or roles, an Approval, or a function of the arguments
        """
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


class SyncTool(Tool[P, R]):
    """A tool written as `def`: it runs in a thread, so that it does not block the loop."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._refuse_in_agent()
        result: R = self.fn(*args, **kwargs)
        return result


class Shape:
    """A function's parameters and result: how calls are bound, digested and restored from the record."""

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.name = name
        self.is_async = inspect.iscoroutinefunction(fn)
        self.doc = inspect.getdoc(fn) or ""
        whole = inspect.signature(fn)
        hints = resolved_hints(fn)
        self.injected: dict[str, Any] = {
            parameter.name: parameter.default
            for parameter in whole.parameters.values()
            if is_marker(parameter.default) or isinstance(parameter.default, Injected)
        }
        given = [
            p.replace(annotation=hints.get(p.name, p.annotation))
            for p in whole.parameters.values() if p.name not in self.injected
        ]  # fmt: skip
        self.takes_tx = any(marker is TX for marker in self.injected.values())
        self.signature = whole.replace(parameters=given, return_annotation=inspect.Signature.empty)
        self.hints: dict[str, Any] = {p.name: hints.get(p.name, Any) for p in given}
        self.returns: Any = hints.get("return", Any)
        self.is_plain: bool = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in given)
        self.is_sorted = list(self.hints) == sorted(self.hints)
        self._defaults: dict[str, Any] = {p.name: p.default for p in given}
        self._required = {p.name for p in given if p.default is p.empty}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments by name: all of them, as their declared types, and those that were given, as they are.

        Raises TypeError on a misfit, as any call does. Digests cover only the given arguments, so new or changed
        defaults do not change them.
        """
        given = dict(zip(self._defaults, args, strict=False), **kwargs)
        is_complete = len(given) == len(args) + len(kwargs)
        if is_complete and self.is_plain and given.keys() == self.hints.keys():
            arguments = given
        elif is_complete and self.is_plain and self._required <= given.keys() <= self.hints.keys():
            arguments = {**self._defaults, **given}
        else:
            try:
                bound = self.signature.bind(*args, **kwargs)
            except TypeError as misfit:
                raise TypeError(f"{self.name}{self.signature}: {misfit}") from None
            given = dict(bound.arguments)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
        for name, value in given.items():
            hint = self.hints[name]
            if hint is not Any and value.__class__ is not hint:
                fitted = self._fitted(name, value)
                if fitted is not value:
                    arguments = {**arguments, name: fitted}
        return arguments, given

    def _fitted(self, name: str, value: Any) -> Any:
        """An argument as the declared type. Raises ValueRefused if the conversion would lose data."""
        hint = self._hint(name)
        if hint in type(value).__mro__:
            return value
        try:
            fitted = fit(value, hint, at=name)
            return value if type(fitted) is type(value) else fitted
        except ValueRefused as misfit:
            try:
                # Only the codec knows some types; it refuses values that cannot be stored.
                if not holds_secret(value):
                    convert(through_codec(value), hint, at=name)
            except ValueRefused as refused:
                if refused.path.startswith(name):
                    takes = f"{name} takes {inspect.formatannotation(hint)}, and got {value!r:.100}"
                    raise ValueRefused(f"{self.name}: {misfit.path}", f"{misfit.reason}; {takes}") from None
            return value

    def given(self, arguments: Mapping[str, Any]) -> Shape:
        """The shape of one call."""
        return self

    def unknown_parameters(self, names: Collection[str]) -> list[str]:
        """Returns the names that are not its parameters."""
        return sorted(set(names) - self.hints.keys())

    def restore(self, recorded: Mapping[str, Any], live: Mapping[str, Any]) -> dict[str, Any]:
        """Recorded arguments as their declared types; process-local values come from the call."""
        restored = dict(live)
        for name in self.hints:
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
        if self.is_plain:
            return fn(**arguments, **injected)
        bound = inspect.BoundArguments(self.signature, dict(arguments))  # type: ignore[arg-type,unused-ignore]
        return fn(*bound.args, **bound.kwargs, **injected)


def _is_plain(policy: Policy, shape: Shape) -> bool:
    usual = Policy(
        effect=policy.effect, retry=policy.retry, compensate=policy.compensate, reconcile=policy.reconcile,
        patience=policy.patience, nothing_happened=policy.nothing_happened, says_effect=policy.says_effect,
    )  # fmt: skip
    keyed = all(marker is KEY for marker in shape.injected.values())
    fits = keyed and type(shape) is Shape and shape.is_async and shape.is_plain
    return fits and policy.effect in ("reads", "idempotent", "at_most_once") and policy == usual


def holds_secret(value: Any) -> bool:
    """Whether a recorded value contains a secret, of which the log has only the digest."""
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
    """The closure variables of a function that are already bound."""
    found: dict[str, Any] = {}
    if inspect.isfunction(fn):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                found[name] = cell.cell_contents
    return found


def _locals_around(fn: Callable[..., Any]) -> dict[str, Any]:
    """The names visible at a nested function's declaration: classes may be local to it, too."""
    if "<locals>" not in getattr(fn, "__qualname__", ""):
        return {}
    frame: types.FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return dict(frame.f_locals) if frame is not None else {}


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
    *, effect: EffectClass | Callable[..., EffectClass] = "at_most_once", name: str | None = None,
    retry: Retry | int | None = None, timeout: Duration | None = None, identity: Sequence[str] | None = None,
    repeat: Repeat = "allow", consumes: Sequence[str] = (),
    limit: Limit | Sequence[Limit] = (), compensate: Callable[..., Any] | None = None,
    reconcile: Reconciler | None = None, confirm: Callable[[Effect], Any] | None = None,
    isolate: Isolation = "thread", patience: Duration = "1h", nothing_happened: ExceptionTypes = (),
    approve: Approve | None = None,
) -> _ToolDecorator: ...  # fmt: skip


@signed()
def tool(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Declares a tool: its effect on the world, and how it is retried, reconciled and compensated. Raises
    DeclarationRefused.

    effect            "reads", "idempotent", "workspace", "transaction", "at_most_once", or a function of the arguments
    name              the name in the log; by default the function's name
    retry             the number of attempts, or a Retry with its errors and backoff
    timeout           the time limit of one attempt
    identity          the parameters that make two calls the same action; by default all
    repeat            for the same action again: "allow" it, return the "recorded" result, or "ask" a person
    consumes          parameters whose values can be used once in the whole store, such as a token
    limit             one Limit or several
    compensate        a function of the Effect that undoes it
    reconcile         a function of the Effect that returns Happened, DidNotHappen or Unknown after a lost attempt
    confirm           a function of the Effect that checks it afterwards
    isolate           "process" runs a plain function in a process that can be killed at the timeout
    patience          how long rate limits may delay a call in total
    nothing_happened  errors that prove that nothing happened; only after these an at_most_once tool is retried
    approve           who must approve a call: names or roles, an Approval, or a function of the arguments

        @killick.tool(effect="idempotent", retry=5)
        async def charge(card: str, cents: int, key: killick.Key = killick.KEY) -> str: ...
    """

    refuse_unknown("killick.tool", options, OPTIONS)

    def declare(fn: Callable[..., Any]) -> Tool[..., Any]:
        called = name or str(getattr(fn, "__name__", "tool"))
        kind: Any = AsyncTool if inspect.iscoroutinefunction(fn) else SyncTool
        declared: Tool[..., Any] = kind(fn, called, policy_of(called, options))
        checked_tool(declared)
        TOOLS[called] = declared
        return declared

    return declare if fn is None else declare(fn)


def checked_tool(declared: Tool[..., Any]) -> None:
    """Refuse a declaration that contradicts itself."""
    policy, name = declared.policy, declared.name
    if next(iter(inspect.signature(declared.fn).parameters), "") in ("self", "cls"):
        reason = "is a method, whose object the log does not have; declare a function that takes what it needs"
        raise DeclarationRefused(name, f"{reason}, or declare killick.tool(name=…)(thing.{name}) for one object")
    if not callable(policy.effect) and policy.effect not in EFFECTS:
        raise DeclarationRefused(name, f"effect={policy.effect!r} is not one of {', '.join(EFFECTS)}")
    for option, named in (("identity", policy.identity or ()), ("consumes", policy.consumes)):
        for parameter in named:
            if parameter not in declared.shape.hints:
                raise DeclarationRefused(name, f"{option} names {parameter!r}, which is not one of its parameters")
    for limit in policy.limits:
        if limit.by is not None and limit.by not in declared.shape.hints:
            raise DeclarationRefused(
                name, f"limit {limit.name!r} is keyed by {limit.by!r}, which is not one of its parameters"
            )
    refuse_on_misfit(name, policy)
    if not callable(policy.effect):
        refuse_tx_misfit(name, policy.effect, declared.shape)
    if declared.shape.takes_tx and declared.shape.is_async:
        raise DeclarationRefused(name, "effect='transaction' needs a plain def tool; write def in place of async def")
    if policy.isolate == "process" and declared.shape.takes_tx:
        raise DeclarationRefused(name, "a transaction cannot span processes; remove isolate='process'")
    if policy.isolate == "process" and declared.shape.is_async:
        raise DeclarationRefused(name, "isolate='process' needs a plain def tool; timeout= alone stops an async one")
    if policy.isolate == "process" and ("<locals>" in declared.fn.__qualname__ or declared.fn.__module__ == "__main__"):
        raise DeclarationRefused(name, "isolate='process' needs a function at the top level of an importable module")


def refuse_tx_misfit(name: str, effect: EffectClass, shape: Shape | None) -> None:
    """A tool takes a transaction if and only if its effect is one."""
    takes_tx = shape is not None and shape.takes_tx
    if effect == "transaction" and not takes_tx:
        raise DeclarationRefused(
            name, "effect='transaction' needs a parameter `tx: killick.Tx = killick.TX` to write with"
        )
    if takes_tx and effect != "transaction":
        raise DeclarationRefused(name, f"takes a killick.Tx, but its effect is {effect!r}; give effect='transaction'")


TOOLS: Final[dict[str, Tool[..., Any]]] = {}
"""The tools declared in this process, so that another process can undo a run's effects."""

AnyTool: TypeAlias = Tool[..., Any]
