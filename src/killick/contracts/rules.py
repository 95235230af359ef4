"""The rule constructors of a contract. Rules are data; `evaluate` compiles them.

A rule has a kind and that kind's terms. Rules from Python, from TOML and from the log are equal: all three go through
`rule_of`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from hashlib import sha256
from inspect import getsource, iscoroutinefunction
from operator import attrgetter
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict, Unpack, cast, get_args

import msgspec

from killick.contracts import declarations
from killick.contracts.facts import Approval, Asking, Intention, PolicyInput, approval_of
from killick.contracts.lookalikes import path_refused, root_of
from killick.contracts.schema import Number, bounds_of, number_of, plain_number
from killick.contracts.schema_check import steps_of
from killick.errors import ContractRefused, DurationRefused
from killick.model.retry import Duration, seconds

__all__ = [
    "Ask", "Reject", "Rule", "after", "allow", "arguments", "budget", "check", "context", "deny", "once", "paths",
    "rule_of", "total",
]  # fmt: skip

Kind = Literal["allow", "deny", "arguments", "paths", "budget", "total", "after", "once", "context", "check"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Tools: TypeAlias = str | Sequence[str]
Check: TypeAlias = "Callable[[Intention, PolicyInput], str | Reject | Ask | None]"


class Reject(msgspec.Struct, frozen=True):
    """Returned by a custom check to reject an intention.

    message  the reason, which a model may see
    code     the reason in one word
    allowed  what would pass
    """

    message: str
    code: str | None = None
    allowed: Any = None


class Ask(msgspec.Struct, frozen=True):
    """Returned by a custom check to require approval.

    to       names, or an Approval
    message  the reason
    code     the reason in one word
    allowed  what would pass
    """

    to: Approval
    message: str | None = None
    code: str | None = None
    allowed: Any = None

    if TYPE_CHECKING:

        def __init__(
            self, to: Asking, message: str | None = None, code: str | None = None, allowed: Any = None
        ) -> None: ...

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "to", approval_of(self.to))


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule, as the functions of `killick.rules` make it."""

    kind: Kind
    terms: Any
    tools: tuple[str, ...] = ()
    """Name patterns; none means everything that the kind applies to."""
    name: str = ""
    ask: Approval | None = None
    code: str | None = None
    message: str | None = None
    scope: Literal["lineage", "run"] = "lineage"
    latest: bool = False
    function: Check | None = None

    @property
    def spec(self) -> dict[str, Any]:
        """Returns plain data without defaults."""
        spec: dict[str, Any] = {"name": self.name, self.kind: self.terms}
        if self.tools:
            spec["tools"] = list(self.tools)
        if self.ask is not None:
            spec["ask"] = self.ask.spec
        spec |= {name: value for name in ("code", "message") if (value := getattr(self, name)) is not None}
        if self.scope != "lineage":
            spec["scope"] = self.scope
        return spec | ({"latest": True} if self.latest else {})


# The rules ----------------------------------------------------------------------------------------


class RuleOptions(TypedDict, total=False):
    """The options of every rule.

    tools    names of tools, or patterns such as `delete_*`
    name     the name of the rule; by default made from its terms
    ask      who may approve a rejected call: names, or an Approval
    code     the reason of a rejection in one word
    message  the reason of a rejection
    scope    "lineage" counts forks, children and parents; "run" counts the run alone
    """

    name: str
    ask: Asking | None
    code: str | None
    message: str | None


def allow(*tools: str, **options: Unpack[RuleOptions]) -> Rule:
    """Allows only these tools, and rejects all others.

    tools  names or patterns such as `read_*`; `spawn:AGENT` is a child run, `send` a message
    """
    return _rule("allow", list(tools), (), **options)


def deny(*tools: str, **options: Unpack[RuleOptions]) -> Rule:
    """Rejects these tools.

    tools  names or patterns such as `delete_*`
    """
    return _rule("deny", list(tools), (), **options)


def arguments(
    tools: Tools,
    bounds: Mapping[str, Mapping[str, Any]] | None = None,
    /,
    *,
    name: str = "",
    ask: Asking | None = None,
    code: str | None = None,
    message: str | None = None,
    **more: Mapping[str, Any],
) -> Rule:
    """Bounds the arguments of tools.

    bounds  bounds by argument, for nested names and names that this function uses itself
    more    the same, as keyword arguments
    """
    return _rule("arguments", {**(bounds or {}), **more}, tools, name=name, ask=ask, code=code, message=message)


def paths(
    tools: Tools,
    roots: Mapping[str, Tools] | None = None,
    /,
    *,
    name: str = "",
    ask: Asking | None = None,
    code: str | None = None,
    message: str | None = None,
    **more: Tools,
) -> Rule:
    """Restricts path arguments of tools to folders. A relative path is resolved against the first folder.

    roots  the folders by argument, for names that this function uses itself
    more   the same, as keyword arguments
    """
    return _rule("paths", {**(roots or {}), **more}, tools, name=name, ask=ask, code=code, message=message)


def budget(
    *tools: str,
    calls: int | None = None,
    effects: int | None = None,
    tokens: int | None = None,
    money: str | Decimal | int | None = None,
    time: Duration | None = None,
    scope: Literal["lineage", "run"] = "lineage",
    **options: Unpack[RuleOptions],
) -> Rule:
    """Limits the use of these tools, or of all.

    calls    the number of calls
    effects  the number of effects
    tokens   the number of model tokens
    money    the price of model calls, such as "5 USD"
    time     the time since the start
    """
    limits = {"calls": calls, "effects": effects, "tokens": tokens, "money": money, "time": time}
    terms = {measure: limit for measure, limit in limits.items() if limit is not None}
    return _rule("budget", terms, tools, scope=scope, **options)


def once(*tools: str, scope: Literal["lineage", "run"] = "lineage", **options: Unpack[RuleOptions]) -> Rule:
    """Allows each of these tools once, unless the call was compensated."""
    return _rule("once", list(tools), (), scope=scope, **options)


def total(
    tools: Tools,
    argument: str,
    /,
    *,
    max: Number | str,  # noqa: A002
    by: str | None = None,
    scope: Literal["lineage", "run"] = "lineage",
    **options: Unpack[RuleOptions],
) -> Rule:
    """Limits the sum of an argument over all effects, so that a split call gains nothing.

    argument  the argument that is summed
    max       the limit of the sum
    by        another argument: each of its values has its own sum
    """
    terms = {"argument": argument, "max": max} | ({} if by is None else {"by": by})
    return _rule("total", terms, tools, scope=scope, **options)


def after(tools: Tools, /, *needed: str, **options: Unpack[RuleOptions]) -> Rule:
    """Allows tools only after all of the needed tools have returned.

    needed  names of tools
    """
    return _rule("after", list(needed), tools, **options)


def context(
    tools: Tools,
    conditions: Mapping[str, Mapping[str, Any]] | None = None,
    /,
    *,
    latest: bool = False,
    name: str = "",
    ask: Asking | None = None,
    code: str | None = None,
    message: str | None = None,
    **more: Mapping[str, Any],
) -> Rule:
    """Allows tools only if entries of the context fit.

    conditions  bounds by entry, for nested names and names that this function uses itself
    latest      whether the agent must have seen the last change of its context
    more        the same as `conditions`, as keyword arguments
    """
    terms = {**(conditions or {}), **more}
    return _rule("context", terms, tools, latest=latest, name=name, ask=ask, code=code, message=message)


def check(function: Check | str, /, *, tools: Tools = (), **options: Unpack[RuleOptions]) -> Rule:
    """Calls a pure function of the intention and the `PolicyInput`. It returns None, text to reject, `Reject` or `Ask`.
    An exception rejects.

    function  the function, or its place: `module:function`
    """
    return _rule("check", function, tools, **options)


def _rule(kind: Kind, terms: Any, tools: Tools, **options: Any) -> Rule:
    named = {} if not tools else {"tools": tools}
    return rule_of({kind: terms} | named | {name: value for name, value in options.items() if value not in (None, "")})


# One rule from plain data -------------------------------------------------------------------------

WORDS: Final = frozenset({"name", "tools", "ask", "code", "message", "scope", "latest", *KINDS})
"""The permitted keys in a rule's table."""


def rule_of(spec: Mapping[str, Any]) -> Rule:
    """Returns a rule from a table, as in TOML. Raises ContractRefused, with the rule's name."""
    kinds: list[Kind] = [kind for kind in KINDS if kind in spec]
    label = spec.get("name") or (kinds[0] if kinds else "rule")
    where = f"rule {label}"
    declarations.refuse_unknown(where, spec, WORDS)
    if len(kinds) != 1:
        raise ContractRefused(where, f"says {' and '.join(kinds) or 'nothing'}; give exactly one of {', '.join(KINDS)}")
    kind = kinds[0]
    try:
        return _parsed(kind, spec)
    except DurationRefused as refused:
        raise ContractRefused(where, str(refused)) from None
    except ContractRefused as refused:
        raise ContractRefused(where, refused.reason if refused.subject in ("bound", "rule") else str(refused)) from None


def _parsed(kind: Kind, spec: Mapping[str, Any]) -> Rule:
    for word in ("name", "code", "message"):
        if word in spec and (not isinstance(spec[word], str) or not spec[word].strip()):
            raise ContractRefused("rule", f"{word}={spec[word]!r}; give text")
    tools = _patterns("tools", spec["tools"]) if "tools" in spec else ()
    terms, function = spec[kind], None
    if kind in ("allow", "deny", "once"):
        if tools:
            raise ContractRefused("rule", f"{kind} names its tools itself; leave tools out")
        terms = list(_patterns(kind, terms))
    elif kind == "check":
        terms, function = _checked(terms)
    else:
        terms = _TERMS[kind](terms)
    if kind in ("arguments", "paths", "total", "after", "context") and not tools:
        raise ContractRefused("rule", f'{kind} of which tools? give tools, as in tools = "pay"')
    scope, latest = spec.get("scope", "lineage"), spec.get("latest", False)
    if scope not in ("lineage", "run") or (scope == "run" and kind not in ("budget", "total", "once")):
        raise ContractRefused("rule", f"scope={scope!r}; give lineage or run, to a budget, a total or once")
    if type(latest) is not bool or (latest and kind != "context"):
        raise ContractRefused("rule", f"latest={latest!r}; give true or false, to a rule of the context")
    if kind == "context" and not terms and not latest:
        raise ContractRefused("rule", "has no condition on the context; give one, or latest = true")
    return Rule(
        kind=kind, terms=terms, tools=tools, name=spec.get("name", ""),
        ask=None if spec.get("ask") is None else approval_of(spec["ask"]),
        code=spec.get("code"), message=spec.get("message"), scope=scope, latest=latest, function=function,
    )  # fmt: skip


def _patterns(what: str, value: object) -> tuple[str, ...]:
    names = declarations.texts(value)
    if not names:
        raise ContractRefused("rule", f"{what}={value!r}; give the names of tools, or patterns such as delete_*")
    return names


def _bounds(value: object) -> dict[str, Any]:
    for argument in declarations.table(value) or ():
        steps_of(argument)
    return {argument: bound.spec for argument, bound in bounds_of(value).items()}


def _arguments(value: object) -> dict[str, Any]:
    terms = _bounds(value)
    if not terms:
        raise ContractRefused("rule", "bounds no argument; give at least one")
    return terms


def _paths(value: object) -> dict[str, Any]:
    table = declarations.table(value)
    if not table:
        raise ContractRefused("rule", f"paths={value!r}; give a table of arguments and their roots")
    for argument, roots in table.items():
        if not argument.isidentifier():
            raise ContractRefused(
                "rule", f"{argument!r} is not an argument; name one that is a path or a list of paths"
            )
        for root in declarations.texts(roots) or [""]:
            # The contract's author chose the root, so it may contain "..".
            complaint = path_refused("/".join(part for part in root.split("/") if part != "..") or root[:1])
            if complaint is not None:
                raise ContractRefused("rule", f"{argument}: the root {root!r} {complaint}")
    return {argument: [root_of(root) for root in declarations.texts(roots)] for argument, roots in table.items()}


_MEASURES: Final = ("calls", "effects", "tokens", "money", "time")


def _budget(value: object) -> dict[str, Any]:
    table = declarations.table(value)
    if not table:
        raise ContractRefused("rule", f"budget={value!r}; give one or more of {', '.join(_MEASURES)}")
    declarations.refuse_unknown("rule", table, _MEASURES)
    terms: dict[str, Any] = {}
    for measure, limit in table.items():
        if measure == "money":
            terms[measure] = f"{plain_number(dollars_of(limit))} USD"
        elif measure == "time":
            terms[measure] = plain_number(seconds(limit))
        elif type(limit) is int and limit >= 0:
            terms[measure] = limit
        else:
            raise ContractRefused("rule", f"{measure}={limit!r}; give a whole number from 0")
    return terms


def dollars_of(value: object) -> int | Decimal:
    """Parses an amount of US dollars: "5 USD", or a number."""
    amount: object = value
    if isinstance(value, str):
        number, _, currency = value.strip().partition(" ")
        if currency.strip() not in ("USD", ""):
            raise ContractRefused("rule", f"money={value!r}; prices are in US dollars, so give USD")
        amount = number
    try:
        found = number_of(amount)
    except ContractRefused:
        raise ContractRefused("rule", f"money={value!r}; give an amount such as 5 USD") from None
    if found < 0 or isinstance(value, bool):
        raise ContractRefused("rule", f"money={value!r}; give an amount from 0")
    return found


def _total(value: object) -> dict[str, Any]:
    table = declarations.table(value) or {}
    if not {"argument", "max"} <= table.keys() <= {"argument", "max", "by"}:
        raise ContractRefused("rule", f"total={value!r}; give argument and max, and optionally by")
    steps_of(table["argument"])
    if "by" in table and "[]" in steps_of(table["by"]):
        raise ContractRefused("rule", f"by={table['by']!r}; a total is kept by one value, not by those of a list")
    return table | {"max": plain_number(table["max"])}


_TERMS: Final[dict[str, Callable[[Any], Any]]] = {
    "arguments": _arguments, "paths": _paths, "budget": _budget, "total": _total, "context": _bounds,
    "after": lambda value: list(_patterns("after", value)),
}  # fmt: skip


# Functions ----------------------------------------------------------------------------------------


def _checked(value: object) -> tuple[dict[str, Any], Check]:
    """Returns a function and its identity: its location and its source, so that a changed function is another rule."""
    named: object = value if (recorded := declarations.table(value)) is None else recorded.get("function")
    function: Any = function_at(named, is_recorded=recorded is not None) if isinstance(named, str) else named
    if not callable(function) or iscoroutinefunction(function):
        raise ContractRefused("rule", f"check={named!r}; give a plain function of an intention and a PolicyInput")
    place = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    terms = {"function": place}
    try:
        lines = "\n".join(line.rstrip() for line in dedent(getsource(cast(Any, function))).strip().splitlines())
    except (OSError, TypeError):
        return terms, cast("Check", function)
    return terms | {"source": sha256(lines.encode()).hexdigest()[:32]}, cast("Check", function)


def function_at(place: str, *, is_recorded: bool) -> Any:
    """Imports `module:function`. A record imports nothing: its writer may not choose the code that runs here."""
    module, _, names = place.partition(":")
    try:
        return attrgetter(names)(sys.modules[module] if is_recorded else importlib.import_module(module))
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        if is_recorded:
            raise ContractRefused("rule", f"check: {place} is on record; import its module first") from None
        raise ContractRefused("rule", f"check: {place} cannot be imported ({error}); give module:function") from None
