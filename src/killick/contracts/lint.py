"""Reports every problem of a contract's text at once: errors, and likely mistakes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from killick.contracts import declarations
from killick.contracts.contract import WORDS as CONTRACT_WORDS
from killick.contracts.contract import Contract, named
from killick.contracts.lookalikes import Names
from killick.contracts.prices import Prices
from killick.contracts.rules import KINDS, WORDS, Rule, dollars_of, rule_of
from killick.contracts.schema import bound_of, number_of
from killick.errors import ContractRefused, KillickError


class Problem(msgspec.Struct, frozen=True):
    """One error or likely mistake: its place and its correction."""

    severity: Literal["error", "warning"]
    message: str
    rule: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{self.severity}: {where}{'' if self.rule is None else f'rule {self.rule}: '}{self.message}"


class _Placed(NamedTuple):
    rule: Rule
    line: int | None

    def warn(self, message: str) -> Problem:
        return Problem("warning", message, self.rule.name, self.line)


def lint(text: str) -> list[Problem]:
    """Returns all problems of a contract in TOML. Without an error, `Contract.parse` accepts it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"at line (\d+)", str(error))
        return [Problem("error", f"is not valid TOML ({error}); correct the file", None, int(at[1]) if at else None)]
    problems = list(_of_contract(document, text))
    placed: list[_Placed] = []
    lines = [number for number, line in enumerate(text.splitlines(), 1) if _HEADER.match(line)]
    tables = declarations.items(document.get("rules", []))
    if tables is None:
        problems.append(Problem("error", "its rules are not a list of tables; write each under [[rules]]"))
    for number, each in enumerate(tables or []):
        line = lines[number] if number < len(lines) == len(tables or []) else None
        found = _of_rule(each, number + 1, line)
        problems += [problem for problem in found if isinstance(problem, Problem)]
        placed += [rule for rule in found if isinstance(rule, _Placed)]
    try:
        rules = named("", [each.rule for each in placed])
    except ContractRefused as refused:
        problems.append(Problem("error", refused.reason))
        return problems
    placed = [_Placed(rule, each.line) for rule, each in zip(rules, placed, strict=True)]
    problems += _together(placed, declarations.table(document.get("people")) or {}, document.get("prices"))
    if not any(problem.severity == "error" for problem in problems):
        # The parser decides last, so that lint never approves a contract that would be refused.
        try:
            Contract.parse(text)
        except KillickError as refused:
            problems.append(Problem("error", str(refused)))
    return problems


_HEADER: Final = re.compile(r"\s*\[\[\s*[\"']?rules[\"']?\s*\]\]")


def _line_of(text: str, word: str) -> int | None:
    start = re.compile(rf"\s*(?:\[+\s*)?[\"']?{re.escape(word)}\b")
    return next((number for number, line in enumerate(text.splitlines(), 1) if start.match(line)), None)


def _of_contract(document: Mapping[str, Any], text: str) -> Iterator[Problem]:
    known = {"name", "rules", *CONTRACT_WORDS}
    for word in document.keys() - known:
        yield Problem("error", declarations.unknown(word, known), None, _line_of(text, word))
    for word in sorted(CONTRACT_WORDS & document.keys()):
        try:
            Contract.from_spec({"name": "contract", word: document[word]})
        except KillickError as refused:
            reason = refused.reason if isinstance(refused, ContractRefused) else str(refused)
            where = refused.where if isinstance(refused, ContractRefused) and word in refused.where else word
            message = reason if reason.startswith(word) else f"{where}: {reason}"
            yield Problem("error", message, None, _line_of(text, word))
    if not isinstance(document.get("name"), str) or not document["name"].strip():
        yield Problem("error", 'has no name; begin with name = "…"', None, _line_of(text, "name"))
    if not document.get("rules"):
        yield Problem("warning", "has no rules, so everything is allowed; write some under [[rules]]")


def _of_rule(value: object, number: int, line: int | None) -> list[Problem | _Placed]:
    table = declarations.table(value)
    if table is None:
        return [Problem("error", "is not a table; write it under [[rules]]", str(number), line)]
    kinds = [kind for kind in KINDS if kind in table]
    label = table["name"] if isinstance(table.get("name"), str) else " ".join([str(number), *kinds[:1]])
    unknown = [declarations.unknown(word, WORDS) for word in table if word not in WORDS]
    found: list[Problem | _Placed] = [Problem("error", message, label, line) for message in unknown]
    bounds = declarations.table(table.get(kinds[0])) if kinds and kinds[0] in ("arguments", "context") else None
    for argument, bound in (bounds or {}).items():
        try:
            bound_of(bound)
        except ContractRefused as refused:
            found.append(Problem("error", f"{argument}: {refused.reason}", label, line))
    if not found:
        try:
            found.append(_Placed(rule_of(table), line))
        except ContractRefused as refused:
            found.append(Problem("error", refused.reason, label, line))
    return found


# Likely mistakes ----------------------------------------------------------------------------------


def _together(placed: list[_Placed], people: Mapping[str, Any], prices: object) -> Iterator[Problem]:
    for number, each in enumerate(placed):
        yield from _asks_nobody(each, people)
        yield from _hidden(each, placed)
        yield from _covered(each, placed[:number], placed)
        yield from _patterns(each)
    yield from _unpriced(placed, prices)


def _asks_nobody(each: _Placed, people: Mapping[str, Any]) -> Iterator[Problem]:
    approval = each.rule.ask
    if approval is None:
        return
    known = {*people, *(name for names in people.values() for name in declarations.texts(names))}
    for name in (*approval.to, *(name for escalation in approval.escalate for name in escalation.to)):
        if name not in known:
            yield each.warn(f"asks {name}, who is not in [people]; add {name} = […] there, or correct the name")
    asked = {person for name in approval.to for person in declarations.texts(people.get(name, name))}
    if approval.to and approval.need > len(asked):
        yield each.warn(f"needs {approval.need} people and asks {len(asked)}; ask more, or need fewer")


def _tools(rule: Rule) -> list[str]:
    named = rule.terms if rule.kind == "once" else rule.tools
    return [tool for tool in named if tool != "update" and not tool.startswith("model:")]


def _hidden(each: _Placed, placed: list[_Placed]) -> Iterator[Problem]:
    """Finds rules about a tool that no rule allows."""
    tools = _tools(each.rule)
    for other in placed:
        rule = other.rule
        if rule.ask is not None or other is each or not tools:
            continue
        if rule.kind == "allow" and not any(_may_share(tool, rule.terms) for tool in tools):
            yield each.warn(f"never fires: {rule.name} does not allow {', '.join(tools)}; allow it, or drop this rule")
        if rule.kind == "deny" and all(Names(rule.terms).match(tool) for tool in tools):
            yield each.warn(f"never fires: {rule.name} denies {', '.join(tools)}; drop one of the two")
    if each.rule.kind == "allow":
        for tool in each.rule.terms:
            denied = [o.rule.name for o in placed if o.rule.kind == "deny" and Names(o.rule.terms).match(tool)]
            barred = [
                o.rule.name for o in placed
                if o.rule.kind == "allow" and o is not each and not _may_share(tool, o.rule.terms)
            ]  # fmt: skip
            if denied or barred:
                yield each.warn(
                    f"allows {tool}, which {(denied + barred)[0]} does not; both have to; say it in one place"
                )


def _may_share(pattern: str, others: list[str]) -> bool:
    """Returns whether the pattern and one of the others may match a common name. Two wildcards always may."""
    mine = Names([pattern])
    return any(
        Names([other]).match(pattern) or mine.match(other) or not (mine.is_literal or Names([other]).is_literal)
        for other in others
    )


def _covered(each: _Placed, before: list[_Placed], placed: list[_Placed]) -> Iterator[Problem]:
    """Finds rules that others always shadow."""
    rule = each.rule
    for other in before:
        same = (other.rule.kind, other.rule.tools, other.rule.terms) == (rule.kind, rule.tools, rule.terms)
        if same and other.rule.scope == rule.scope and other.rule.latest == rule.latest:
            yield each.warn(f"says what {other.rule.name} says; drop one of the two")
            return
    for other in placed:
        stricter = other.rule
        if other is each or stricter.ask is not None or stricter.kind != rule.kind or stricter.scope != rule.scope:
            continue
        if not all(Names(stricter.tools).match(tool) for tool in rule.tools) or not (rule.tools or not stricter.tools):
            continue
        if (rule.kind == "arguments" and _within(rule.terms, stricter.terms)) or (
            rule.kind == "budget" and _spends_less(rule.terms, stricter.terms)
        ):
            yield each.warn(f"never fires: {stricter.name} is stricter and rejects; drop it, or correct its bounds")
            return


def _within(wide: Mapping[str, Any], strict: Mapping[str, Any]) -> bool:
    """Returns whether the strict bounds imply the wide ones, as far as numbers show."""
    for argument, bound in wide.items():
        other = strict.get(argument, {})
        if not bound.keys() <= {"min", "max", "type"} or bound.get("type", other.get("type")) != other.get("type"):
            return False
        for word, sign in (("min", -1), ("max", 1)):
            if word in bound and (word not in other or sign * (number_of(other[word]) - number_of(bound[word])) > 0):
                return False
    return wide != strict


def _spends_less(wide: Mapping[str, Any], strict: Mapping[str, Any]) -> bool:
    def limit(terms: Mapping[str, Any], measure: str) -> Any:
        return dollars_of(terms[measure]) if measure == "money" else number_of(terms[measure])

    return wide != strict and all(
        measure in strict and limit(strict, measure) <= limit(wide, measure) for measure in wide
    )


def _patterns(each: _Placed) -> Iterator[Problem]:
    if each.rule.kind not in ("arguments", "context"):
        return
    for argument, bound in each.rule.terms.items():
        for pattern in _matches(bound):
            has_start, has_end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
            if has_start != has_end:
                edge = "begins with ^" if has_start else "ends with $"
                yield each.warn(
                    f"{argument}: {pattern} {edge}, but the whole text is matched; add .* if more may follow"
                )
            elif pattern.startswith(".*") and pattern.endswith(".*"):
                yield each.warn(f"{argument}: {pattern} matches anything around it; anchor it")


def _matches(bound: Mapping[str, Any]) -> Iterator[str]:
    if "matches" in bound:
        yield bound["matches"]
    for inner in (*bound.get("fields", {}).values(), *([bound["each"]] if "each" in bound else [])):
        yield from _matches(inner)


def _unpriced(placed: list[_Placed], prices: object) -> Iterator[Problem]:
    """Finds models without a price under a money budget."""
    if not any(each.rule.kind == "budget" and "money" in each.rule.terms for each in placed):
        return
    try:
        known = Prices(declarations.table(prices) or {})
    except ContractRefused:
        return
    for each in placed:
        for name in (*each.rule.tools, *(each.rule.terms if each.rule.kind == "once" else ())):
            model = name.removeprefix("model:")
            if model != name and Names([model]).is_literal and known.latest(model) is None:
                yield each.warn(f'{model} has no price, and money is budgeted; add [prices."{model}"]')
