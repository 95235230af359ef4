"""The policy of a tool: its effect class, retries, limits, and the hooks that reconcile, confirm and compensate it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_overloads

import msgspec

from killick.contracts.contract import Approval
from killick.contracts.facts import approval_of
from killick.definitions.rate_limit import Limit
from killick.errors import ContractRefused, DeclarationRefused
from killick.model.events import EffectClass
from killick.model.retry import Retry, exception_types, retry_of, seconds
from killick.text import meant

Repeat = Literal["allow", "recorded", "ask"]
Isolation = Literal["thread", "process"]
Duration: TypeAlias = float | int | str


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One action on the world, as `reconcile`, `compensate` and `confirm` receive it.

    tool       the name of the tool
    step       the number of the step
    key        the idempotency key of the action
    arguments  the recorded arguments, by name
    result     the recorded result, if there is one
    progress   the last progress that the tool recorded
    failure    the recorded failure, if the attempt failed
    """

    tool: str
    step: str
    key: str
    arguments: Mapping[str, Any]
    result: Any = None
    progress: Any = None
    failure: Any = None


class Happened(msgspec.Struct, frozen=True):
    """Returned by a reconciler: the effect happened, and the tool would have returned `result`."""

    result: Any = None


class DidNotHappen(msgspec.Struct, frozen=True):
    """Returned by a reconciler: the effect did not happen, and cannot happen later."""


class Unknown(msgspec.Struct, frozen=True):
    """Returned by a reconciler that cannot find out. A person is asked."""


Reconciled: TypeAlias = Happened | DidNotHappen | Unknown
Reconciler: TypeAlias = Callable[[Effect], Any]

Approve: TypeAlias = str | Sequence[str] | Approval | Callable[..., Any]
"""The approvers of a call: names or roles, an Approval, or a function of the arguments that returns one."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How a step is carried out."""

    effect: EffectClass | Callable[..., EffectClass] = "at_most_once"
    retry: Retry | None = None
    timeout: float | None = None
    identity: tuple[str, ...] | None = None
    repeat: Repeat = "allow"
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
    """False if the declaration names no effect, so that the default applies."""


OPTIONS: Final = {*Policy.__struct_fields__, "limit"} - {"limits", "says_effect"}
"""The options of `killick.tool` besides its name."""
DEFAULT_RETRY: Final = Retry()
ONCE: Final = Retry(attempts=1)
EFFECTS: Final = ("reads", "idempotent", "workspace", "transaction", "at_most_once")


def policy_of(name: str, options: dict[str, Any]) -> Policy:
    """The policy from a tool's options, validated."""
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
        try:
            options["approve"] = approval_of(approve)
        except ContractRefused as refused:
            raise DeclarationRefused(name, f"approve={approve!r}: {refused}") from None
    if options.get("identity") is not None:
        options["identity"] = names_of(options["identity"])
    options["consumes"] = names_of(options.get("consumes", ()))
    return Policy(**options)


def refuse_unknown(what: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse an option that does not exist, and name the one that was probably meant."""
    for option in set(given) - set(known):
        hint = meant(option, known, otherwise=f"it takes {', '.join(sorted(known))}", sign="=")
        raise DeclarationRefused(what, f"{option}= is not an option; {hint}")


def signed(like: Callable[..., Any] | None = None) -> Callable[[Any], Any]:
    """Shows at run time the options of a decorator's last overload, or of another's."""

    def sign(fn: Any) -> Any:
        own, options = inspect.signature(fn), inspect.signature(get_overloads(like or fn)[-1])
        fn.__signature__ = own.replace(parameters=[*[*own.parameters.values()][:1], *options.parameters.values()])
        return fn

    return sign


def names_of(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def refuse_on_misfit(name: str, policy: Policy) -> None:
    """Refuse errors to retry on for a tool that may have acted when it raises them."""
    if policy.effect == "at_most_once" and policy.retry is not None and policy.retry.on:
        named = ", ".join(kind.__name__ for kind in policy.retry.on)
        raise DeclarationRefused(
            name,
            f"Retry(on=({named},)) would repeat an effect that may happen only once; give nothing_happened=({named},) "
            "if that error proves that nothing happened, or effect='idempotent' and pass the key on",
        )
