"""Evaluates each kind of rule. A rule is compiled to a function once; messages are built only for a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

from killick.contracts.counters import budget, once, total
from killick.contracts.facts import Decide, Finding, Intention, PolicyInput
from killick.contracts.lookalikes import WILD, Names, lies_inside, path_refused
from killick.contracts.prices import Prices
from killick.contracts.rules import Ask, Reject, Rule
from killick.contracts.schema import bound_of
from killick.contracts.schema_check import Test, as_test, at_path, shown


def applies_to(rule: Rule) -> Callable[[Intention], bool]:
    """Returns a predicate: does the rule apply to intentions of a name and a sort? A pattern that starts with a
    wildcard matches tools, children and messages. Models and context changes must be named."""
    if rule.kind == "allow":
        allowed = Names(rule.terms)
        return lambda intention: _is_act(intention) and not allowed.match(intention.name)
    if rule.kind == "deny":
        denied = Names(rule.terms)
        return lambda intention: denied.match(intention.name)
    patterns: Sequence[str] = rule.terms if rule.kind == "once" else rule.tools
    if rule.kind == "budget" and not patterns and _OF_MODELS.issuperset(rule.terms):
        return lambda intention: intention.sort in ("model", "child")
    if not patterns:
        is_check = rule.kind == "check"
        return lambda intention: is_check or intention.sort != "context"
    names, explicit = Names(patterns), Names(pattern for pattern in patterns if pattern[0] not in WILD)
    return lambda intention: (names if _is_act(intention) else explicit).match(intention.name)


_OF_MODELS: Final = frozenset({"tokens", "money"})
"""The measures of a budget that only models and children spend from, where it names no tools."""


def _is_act(intention: Intention) -> bool:
    return intention.sort not in ("model", "context")


def compiled_rule(rule: Rule, prices: Prices) -> Decide:
    """Compiles a rule to a function."""
    return budget(rule, prices) if rule.kind == "budget" else _MAKERS[rule.kind](rule)


def _allow(rule: Rule) -> Decide:
    names = list(rule.terms)
    return lambda intention, state: Finding(
        f"{intention.name} is not one of the allowed tools: {', '.join(names)}", {"tools": names}, "tool_not_allowed"
    )


def _deny(rule: Rule) -> Decide:
    return lambda intention, state: Finding(f"{intention.name} is not allowed", None, "tool_denied")


# Arguments and context ----------------------------------------------------------------------------


def jsonable(value: Any) -> Any:
    """Returns a term of a rule as JSON."""
    if isinstance(value, dict):
        return {str(name): jsonable(item) for name, item in value.items()}  # pyright: ignore
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]  # pyright: ignore
    if isinstance(value, date | datetime | Decimal | bytes):
        return value.hex() if isinstance(value, bytes) else str(value)
    return value


def _compiled(terms: Mapping[str, Any]) -> list[tuple[Test, dict[str, Any]]]:
    bounds = {name: bound_of(term) for name, term in terms.items()}
    return [
        (at_path(name, as_test(bound), bound.optional), {name: jsonable(bound.spec)}) for name, bound in bounds.items()
    ]


def _arguments(rule: Rule) -> Decide:
    tests = _compiled(rule.terms)

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        for test, allowed in tests:
            if (complaint := test(intention.arguments)) is not None:
                return Finding(complaint, allowed, "argument_refused")
        return None

    return decide


def _context(rule: Rule) -> Decide:
    tests, latest = _compiled(rule.terms), rule.latest

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        if latest and state.context_seen < state.context_version:
            seen, version = state.context_seen, state.context_version
            return Finding(
                f"the context changed: it is at version {version}, not {seen}; read it again",
                {"context_version": version},
                "context_stale",
            )
        context: Mapping[str, Any] = state.context() if tests else {}
        for test, allowed in tests:
            if (complaint := test(context)) is not None:
                return Finding(f"context.{complaint}", {"context": allowed}, "context_not_ready")
        return None

    return decide


def _paths(rule: Rule) -> Decide:
    terms = {argument: tuple(roots) for argument, roots in rule.terms.items()}

    def refused(name: str, text: Any, roots: tuple[str, ...], argument: str, of: Intention) -> Finding | None:
        complaint, real = path_refused(text), of.paths
        if complaint is None:
            if of.acts and name in real and any(real[name] == real.get(root) for root in roots):
                complaint = f"is {shown(text)}, the folder itself; name something in it"
            elif lies_inside(text, roots, real.get(name), real):
                return None
        if complaint is None:
            complaint = f"is {shown(text)}, which is not inside {' or '.join(roots)}"
        return Finding(f"{name} {complaint}", {argument: {"inside": list(roots)}}, "path_outside")

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        for argument, roots in terms.items():
            value: Any = intention.arguments.get(argument)
            kind = type(value)  # pyright: ignore[reportUnknownVariableType]
            if kind is list or kind is tuple:
                for number, item in enumerate(value):
                    finding = refused(f"{argument}[{number}]", item, roots, argument, intention)
                    if finding is not None:
                        return finding
            else:
                finding = refused(argument, value, roots, argument, intention)
                if finding is not None:
                    return finding
        return None

    return decide


# Order, and people's own functions ----------------------------------------------------------------


def _after(rule: Rule) -> Decide:
    needed = [(pattern, Names([pattern])) for pattern in rule.terms]

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        done = state.done
        for pattern, names in needed:
            if done.get(pattern, 0) > 0:
                continue
            if names.is_literal or not any(count > 0 and names.match(name) for name, count in done.items()):
                return Finding(
                    f"{intention.name} is allowed only after {pattern} has returned",
                    {"first": list(rule.terms)},
                    "too_early",
                )
        return None

    return decide


def _check(rule: Rule) -> Decide:
    function: Any = rule.function
    code = rule.code or "check_failed"

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        result = function(intention, state)
        if result is None:
            return None
        if isinstance(result, str):
            return Finding(result, None, "check_failed")
        # The function's own message takes precedence over the rule's.
        if isinstance(result, Reject):
            return Finding(result.message, result.allowed, result.code or code, final=True)
        if isinstance(result, Ask):
            message = result.message or rule.message or f"{intention.name} needs a person's approval"
            return Finding(message, result.allowed, result.code or code, result.to)
        message = f"{rule.terms['function']} returned {shown(result)}; it has to return None, text, Reject or Ask"
        return Finding(message, None, "check_failed", final=True)

    return decide


_MAKERS: Final[dict[str, Callable[[Rule], Decide]]] = {
    "allow": _allow, "deny": _deny, "arguments": _arguments, "paths": _paths, "once": once, "total": total,
    "after": _after, "context": _context, "check": _check,
}  # fmt: skip
