"""Counting rules: budgets, once, and sums over an argument. A rule blocks the call that would exceed its limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from killick.contracts.facts import Decide, Finding, Intention, PolicyInput
from killick.contracts.lookalikes import Names, folded
from killick.contracts.prices import MICROS, Prices
from killick.contracts.rules import Rule
from killick.contracts.schema import decimal_of, number_of, plain_number
from killick.contracts.schema_check import key_of, shown, values_at
from killick.model.ledger import Counts

Count = Callable[[Counts], int]


def budget(rule: Rule, prices: Prices) -> Decide:
    """Without tools, a budget blocks every call that would spend from it: for tokens and money, models and children;
    for effects, calls with an effect. With tools it blocks only these."""
    terms, names = rule.terms, Names(rule.tools) if rule.tools else None
    whose = f" of {', '.join(rule.tools)}" if rule.tools else ""
    limits: list[Decide] = []
    if "time" in terms:
        limits.append(_time(terms["time"]))
    if "calls" in terms:
        limits.append(_counted(rule, f"calls{whose}", terms["calls"], _called(names)))
    if "effects" in terms:
        limits.append(_counted(rule, f"effects{whose}", terms["effects"], _acted(names), acting=True))
    if "tokens" in terms:
        limits.append(_spent(rule, "tokens", terms["tokens"], lambda c: c.spend.tokens_in + c.spend.tokens_out))
    if "money" in terms:
        micros = int(Fraction(number_of(terms["money"].removesuffix(" USD"))) * MICROS)
        limits.append(_spent(rule, "money", micros, lambda counts: counts.spend.cost_micros))
        limits.append(_priced(prices))

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        for limit in limits:
            message = limit(intention, state)
            if message is not None:
                return message
        return None

    return limits[0] if len(limits) == 1 else decide


def _over(message: str, **allowed: Any) -> Finding:
    return Finding(message, {"budget": allowed}, "budget_spent")


def _time(lasts: Any) -> Decide:
    lasts_us = int(Fraction(number_of(lasts)) * MICROS)

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        passed_us = state.now_us - state.started_us
        if passed_us < lasts_us:
            return None
        return _over(f"the time is used up: {passed_us // MICROS} of {lasts} seconds have passed", time=lasts)

    return decide


def _counted(rule: Rule, what: str, limit: int, count: Count, *, acting: bool = False) -> Decide:
    """Counts calls, or only those with effects."""
    measure = "effects" if acting else "calls"

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        if acting and not intention.acts:
            return None
        used = _used(rule, state, count) - (_mine(state) if acting else state.mine)
        if used < limit:
            return None
        return _over(f"the {what} are used up: {used} of {limit} were made", **{measure: limit})

    return decide


def _spent(rule: Rule, what: str, limit: int, count: Count) -> Decide:
    is_for_all = not rule.tools

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        if is_for_all and intention.sort != "model" and intention.sort != "child":
            return None
        used = _used(rule, state, count)
        if used < limit:
            return None
        if what == "money":
            money = rule.terms["money"]
            return _over(f"the money is used up: {_text(Fraction(used, MICROS))} of {money} were spent", money=money)
        return _over(f"the tokens are used up: {used} of {limit} were spent", tokens=limit)

    return decide


def _priced(prices: Prices) -> Decide:
    """Refuses a money budget for a model without a known price."""

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        if intention.sort != "model":
            return None
        model = intention.model or intention.name.removeprefix("model:")
        if prices.of(model) is not None:
            return None
        table = f'[prices."{model}"]'
        return _over(f"{model} has no price, so its cost is unknown; add {table} to the contract")

    return decide


# Counts of past calls -----------------------------------------------------------------------------


def _used(rule: Rule, state: PolicyInput, count: Count) -> int:
    """Returns a count of this run, and with it that of its budget group unless the rule is for the run alone."""
    others = state.others if rule.scope == "lineage" else None
    return count(state.own) + (0 if others is None else count(others.counts))


def _mine(state: PolicyInput) -> int:
    """Returns how many of the counted effects are this intention itself."""
    return state.mine if state.mine_acts is None else state.mine_acts


def _counts_as_call(name: str) -> bool:
    """Children and messages are effects too, but the ledger counts them as calls."""
    return name == "send" or name.startswith("spawn:")


def _done(counts: Counts, name: str) -> int:
    return counts.calls.get(name, 0) if _counts_as_call(name) else counts.effects.get(name, 0)


def _called(names: Names | None) -> Count:
    if names is None:
        return lambda counts: sum(counts.calls.values())
    if names.is_literal:
        return lambda counts: sum([counts.calls.get(name, 0) for name in names.literal])
    return lambda counts: sum([count for name, count in counts.calls.items() if names.match(name)])


def _acted(names: Names | None) -> Count:
    if names is not None and names.is_literal:
        return lambda counts: sum([_done(counts, name) for name in names.literal])

    def count(counts: Counts) -> int:
        messages = [name for name in counts.calls if _counts_as_call(name)]
        return sum([_done(counts, name) for name in (*messages, *counts.effects) if names is None or names.match(name)])

    return count


def once(rule: Rule) -> Decide:
    """Counts each name separately."""

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        if not intention.acts:
            return None
        name = intention.name
        done = _used(rule, state, lambda counts: _done(counts, name)) - _mine(state)
        return None if done < 1 else Finding(f"{name} was done already; it is allowed once", None, "budget_spent")

    return decide


# Sums of an argument ------------------------------------------------------------------------------

_ADDED_MAX: Final = 10**30
_DIGITS_MAX: Final = 400


def total(rule: Rule) -> Decide:
    names, family = Names(rule.tools), rule.scope == "lineage"
    argument, by, most = rule.terms["argument"], rule.terms.get("by"), number_of(rule.terms["max"])
    amount_of = _amount(argument, by)

    def decide(intention: Intention, state: PolicyInput) -> Finding | None:
        complaint, requested, group = amount_of(intention.arguments)
        if complaint is not None:
            return Finding(complaint, {argument: {"type": "number", "min": 0}}, "total_exceeded")
        before: int | Fraction = 0
        mine = _mine(state)
        for arguments in _earlier(names, intention, state, family):
            complaint, amount, its_group = amount_of(arguments)
            if complaint is not None:
                return Finding(f"the total is not known: of an earlier call, {complaint}", None, "total_exceeded")
            if its_group != group:
                continue
            if mine and amount == requested:
                # This is the intention itself, which began before.
                mine -= 1
            else:
                before += amount
        if before + requested <= most:
            return None
        left = plain_number(decimal_of(max(Fraction(most) - before, Fraction(0))))
        whose = "" if by is None else f" for this {by}"
        sum_, at_most = _text(before + requested), rule.terms["max"]
        message = f"{argument} would add up to {sum_}{whose}; at most {at_most} is allowed"
        return Finding(message, {argument: {"max": left}}, "total_exceeded")

    return decide


def _earlier(names: Names, intention: Intention, state: PolicyInput, family: bool) -> Iterable[Mapping[str, Any]]:
    others = state.others.past if family and state.others is not None else {}
    known: Iterable[str] = names.literal
    if not names.is_literal:
        known = {*names.literal, *filter(names.match, (intention.name, *state.own.effects, *others))}
    for name in sorted(known):
        yield from state.past(name)
        yield from others.get(name, ())


def _amount(argument: str, by: str | None) -> Callable[[Mapping[str, Any]], tuple[str | None, int | Fraction, Any]]:
    """Returns the amount of a call, and its group."""
    amounts, groups = values_at(argument), None if by is None else values_at(by)

    def amount(arguments: Mapping[str, Any]) -> tuple[str | None, int | Fraction, Any]:
        complaint, values = amounts(arguments)
        added: int | Fraction = 0
        for value in values if complaint is None else ():
            one = _added(value)
            if one is None:
                return f"{argument} is {shown(value)}; a number from 0 is needed, for it is added up", 0, None
            added += one
        if complaint is not None or groups is None:
            return complaint, added, None
        complaint, values = groups(arguments)
        return complaint, added, _grouped(values[0]) if values else None

    return amount


def _grouped(value: Any) -> Any:
    """Normalizes a group key, so that spelling variants of one name share a total."""
    return folded(value) if type(value) is str else key_of(value)


def _added(value: Any) -> int | Fraction | None:
    """Returns a value as an exact number to add."""
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is int:
        return value if 0 <= value <= _ADDED_MAX else None
    if kind is not float and kind is not Decimal:
        return None
    exact = Decimal(repr(value)) if kind is float else Decimal(value)
    if not exact.is_finite() or not 0 <= exact <= _ADDED_MAX or exact.adjusted() < -_DIGITS_MAX:
        return None
    return Fraction(exact) if len(exact.as_tuple().digits) <= _DIGITS_MAX else None


def _text(number: int | Fraction) -> str:
    text = format(decimal_of(number), "f")
    return text.rstrip("0").rstrip(".") if "." in text else text
