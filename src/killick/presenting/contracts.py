"""The rules of a contract, each in one plain sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from killick.contracts.contract import Approval
from killick.contracts.rules import Rule
from killick.contracts.schema_check import NEEDED
from killick.history.phrasing import inline, listed, span


def words(rule: Rule) -> str:
    """A rule in one sentence, with the approval that it asks for where it does not hold."""
    said = _SAYS[rule.kind](rule)
    if rule.scope == "run":
        said += ", in the run alone"
    return f"{said}; otherwise {asking(rule.ask)}" if rule.ask is not None else said


def asking(approval: Approval) -> str:
    """Who is asked for an approval, and how long."""
    several = f"{listed(approval.to)}, {approval.need} approve"
    text = f"ask {listed(approval.to, 'or') if approval.need == 1 else several}"
    if approval.timeout is not None:
        text += f", for {lasting(approval.timeout)}"
    for each in approval.escalate:
        text += f", then {listed(each.to, 'or')}" + ("" if each.timeout is None else f" for {lasting(each.timeout)}")
    return text


def lasting(seconds: float) -> str:
    """A duration without fractions that the contract does not have."""
    return span(seconds * 1_000_000).removesuffix(".0 s") + (" s" if seconds < 59.95 and seconds % 1 == 0 else "")


def _tools(rule: Rule) -> str:
    return f"{listed(rule.tools)}: " if rule.tools else ""


def _budget(rule: Rule) -> str:
    terms: Mapping[str, Any] = rule.terms
    counted = [(name, terms[name]) for name in ("calls", "effects", "tokens") if name in terms]
    said = [f"{count:,} {name if count != 1 else name.removesuffix('s')}" for name, count in counted]
    said += [str(terms["money"])] if "money" in terms else []
    said += [lasting(float(terms["time"]))] if "time" in terms else []
    return f"{_tools(rule)}no more than {listed(said)}"


def _total(rule: Rule) -> str:
    by = f" for each {rule.terms['by']}" if "by" in rule.terms else ""
    return f"{_tools(rule)}{rule.terms['argument']} adds up to at most {rule.terms['max']}{by}"


def _paths(rule: Rule) -> str:
    said = [f"{argument} leads into {listed(roots, 'or')}" for argument, roots in rule.terms.items()]
    return f"{_tools(rule)}{'; '.join(said)}"


def _context(rule: Rule) -> str:
    said = [f"context.{bound}" for bound in _bounds(rule.terms)]
    said += ["the code has seen its last change"] if rule.latest else []
    return f"{listed(rule.tools)} only while {listed(said)}"


_SAYS: Final[dict[str, Callable[[Rule], str]]] = {
    "allow": lambda rule: f"only {listed(rule.terms)}",
    "deny": lambda rule: f"never {listed(rule.terms, 'or')}",
    "arguments": lambda rule: f"{_tools(rule)}{'; '.join(_bounds(rule.terms))}",
    "paths": _paths,
    "budget": _budget,
    "total": _total,
    "after": lambda rule: f"{listed(rule.tools)} only after {listed(rule.terms)}",
    "once": lambda rule: f"{listed(rule.terms)} no more than once{' each' if len(rule.terms) > 1 else ''}",
    "context": _context,
    "check": lambda rule: f"{_tools(rule)}what {rule.terms['function']} says",
}  # fmt: skip


def _bounds(terms: Mapping[str, Any]) -> Iterator[str]:
    for name, bound in terms.items():
        yield f"{name} {'may be missing, or ' * bool(bound.get('optional'))}is {bounded(bound)}"


def bounded(bound: Mapping[str, Any]) -> str:
    """The permitted values, after "is"."""
    types: Sequence[str] = [bound["type"]] if isinstance(bound.get("type"), str) else bound.get("type", ())
    limits = ""
    if "min" in bound and "max" in bound:
        limits = f"from {bound['min']} to {bound['max']}"
    elif "min" in bound or "max" in bound:
        limits = f"at least {bound['min']}" if "min" in bound else f"at most {bound['max']}"
    kind = listed([NEEDED[name] for name in types], "or") if types else ""
    said = [f"{kind} {limits}".strip()] if kind or limits else []
    if "length" in bound:
        least, most = (0, bound["length"]) if isinstance(bound["length"], int) else bound["length"]
        said.append(f"at most {most} long" if not least else f"{least} to {most or 'any'} long")
    said += [f"like {bound['matches']}"] if "matches" in bound else []
    said += [f"without {bound['excludes']}"] if "excludes" in bound else []
    said += [listed([inline(each) for each in bound["one_of"]], "or")] if "one_of" in bound else []
    said += [f"not {listed([inline(each) for each in bound['none_of']], 'or')}"] if "none_of" in bound else []
    said += [f"each {bounded(bound['each'])}"] if "each" in bound else []
    if "fields" in bound:
        more = " and more" if bound.get("others") else ""
        said.append(f"with {listed(_bounds(bound['fields']))}{more}")
    return ", ".join(said) or "there"
