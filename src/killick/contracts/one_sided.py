"""Finds numeric limits that hold in one direction only: `max` alone lets every negative number pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from killick.contracts.lookalikes import Names
from killick.contracts.rules import Rule


class OpenEnd(NamedTuple):
    """A limit of an argument that no rule for the same tools completes."""

    rule: str
    argument: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.argument} {self.why}; write {self.fix}"


def open_ends(rules: Iterable[Rule]) -> list[OpenEnd]:
    """Returns the limits of arguments that have a minimum and no maximum, or the reverse."""
    limits = [(rule, *limit) for rule in rules for limit in _limits_of(rule)]
    found: list[OpenEnd] = []
    for rule, name, bound in limits:
        ends = bound.keys() & {"min", "max"}
        for other, other_name, other_bound in limits:
            if other_name == name and all(map(Names(other.tools).match, rule.tools)):
                ends |= {"min", "max"} if "one_of" in other_bound else other_bound.keys() & {"min", "max"}
        if len(ends) == 1 and not ends.isdisjoint(bound):
            [end] = ends
            is_low = end == "min"
            why = f"has {end} {bound[end]} and no {'max' if is_low else 'min'}, so "
            why += "numbers of any size pass" if is_low else "every negative number passes"
            fix = f"{{min = {bound[end]}, max = …}}" if is_low else f"{{min = 0, max = {bound[end]}}}"
            found.append(OpenEnd(rule.name, name, why, fix))
    return found


def _limits_of(rule: Rule) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if rule.kind == "arguments":
        for name, bound in rule.terms.items():
            yield from _limits(name, bound)
    elif rule.kind == "total":
        # What is added up has to be from 0.
        yield rule.terms["argument"], {"min": 0, "max": rule.terms["max"]}


def _limits(name: str, bound: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield name, bound
    if "each" in bound:
        yield from _limits(f"{name}[]", bound["each"])
    for field, inner in bound.get("fields", {}).items():
        yield from _limits(f"{name}.{field}", inner)
