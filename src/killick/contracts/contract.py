"""A contract: named rules in order, and their evaluation against an intention. Pure and deterministic.

The rules' inputs are a `PolicyInput` and the intention's resolved `paths`. This module reads nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from traceback import extract_tb
from typing import Any, Final, cast

import msgspec

from killick.contracts import declarations
from killick.contracts.evaluate import applies_to, compiled_rule
from killick.contracts.facts import Approval, Decide, Escalation, Finding, Intention, Others, PolicyInput, Ruling
from killick.contracts.prices import Prices, PricesLike
from killick.contracts.rules import Rule, rule_of
from killick.errors import ContractRefused
from killick.model import codec
from killick.model.events import Digest, to_text
from killick.text import LONE_SURROGATE, printable

__all__ = ["ACCEPTED", "Approval", "Contract", "Escalation", "Intention", "Others", "PolicyInput", "Ruling"]

ARGUMENTS_BYTES_MAX: Final = 1_000_000
ARGUMENTS_DEPTH_MAX: Final = 32
REJECTIONS: Final = 10
_USUAL: Final = {
    "rejections": REJECTIONS, "arguments_bytes_max": ARGUMENTS_BYTES_MAX, "arguments_depth_max": ARGUMENTS_DEPTH_MAX,
}  # fmt: skip

ACCEPTED: Final = Ruling()

_NAMES_MAX: Final = 2048
"""The number of names for which a contract caches the governing rules."""


class Contract:
    """The rules that evaluate every intention of an agent, the approvers, and the model prices. Raises ContractRefused.

    name                 the name in the log
    rules                rules made by `killick.rules`, in order
    people               the people of each role
    rejections           the number of consecutive rejections that pauses a run
    prices               model prices, in addition to the built-in ones
    arguments_bytes_max  larger arguments are rejected before any rule sees them
    arguments_depth_max  deeper arguments are rejected before any rule sees them

        contract = killick.Contract("claims", [killick.rules.deny("delete_*"), killick.rules.budget(money="5 USD")])
    """

    __slots__ = (
        "_decides", "_plans", "arguments_bytes_max", "arguments_depth_max", "digest", "name", "people",
        "prices", "rejections", "rules", "spec",
    )  # fmt: skip

    name: str
    rules: tuple[Rule, ...]
    people: Mapping[str, tuple[str, ...]]
    rejections: int
    arguments_bytes_max: int
    arguments_depth_max: int
    prices: Prices
    digest: Digest
    spec: dict[str, Any]
    """The contract as plain data in canonical form."""

    def __init__(
        self,
        name: str,
        rules: Iterable[Rule] = (),
        *,
        people: Mapping[str, str | Sequence[str]] | None = None,
        rejections: int = REJECTIONS,
        prices: PricesLike | None = None,
        arguments_bytes_max: int = ARGUMENTS_BYTES_MAX,
        arguments_depth_max: int = ARGUMENTS_DEPTH_MAX,
    ) -> None:
        if not isinstance(name, str) or not name.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ContractRefused("contract", f"its name is {name!r}; give it a name")
        self.name = name
        for word, number in zip(_USUAL, (rejections, arguments_bytes_max, arguments_depth_max), strict=True):
            if type(number) is not int or number < 1:
                raise ContractRefused(f"contract {name}", f"{word}={number!r}; give a whole number from 1")
            setattr(self, word, number)
        self.rules = named(name, rules)
        self.people = {role: _people(role, names) for role, names in sorted((people or {}).items())}
        self.prices = Prices(prices)
        self.spec = self._spec()
        self.digest = to_text(codec.digest(self.spec))
        self._decides = tuple((applies_to(rule), rule, compiled_rule(rule, self.prices)) for rule in self.rules)
        self._plans: dict[tuple[str, str], tuple[tuple[Rule, Decide], ...]] = {}

    def judge(self, intention: Intention, state: PolicyInput, granted: Collection[str] = frozenset()) -> Ruling:
        """Returns the verdict on an intention. A rejecting rule takes precedence over a rule that requires approval.

        intention  the call
        state      what rules may know of the run
        granted    the names of rules whose approval was given
        """
        plan = self._plans.get((intention.sort, intention.name))
        if plan is None:
            plan = self._plan(intention)
        if intention.sort != "model":
            refused = unreadable(intention.arguments, self.arguments_bytes_max, self.arguments_depth_max)
            if refused is not None:
                return Ruling(ruling="reject", code=refused[0], message=refused[1])
        pending: Ruling | None = None
        for rule, decide in plan:
            try:
                finding = decide(intention, state)
            except Exception as error:
                finding = _failed(rule, error)
            if finding is None:
                continue
            approval = None if finding.final else finding.approval or rule.ask
            if approval is None:
                return _ruling("reject", rule, finding)
            if pending is None and rule.name not in granted:
                pending = _ruling("ask", rule, finding, approval)
        return ACCEPTED if pending is None else pending

    def path_arguments(self, name: str) -> Mapping[str, tuple[str, ...]]:
        """Returns a tool's path arguments, with their permitted roots."""
        found: dict[str, tuple[str, ...]] = {}
        for rule, _ in self._plan(Intention(name=name)):
            for argument, roots in rule.terms.items() if rule.kind == "paths" else ():
                found[argument] = tuple(dict.fromkeys((*found.get(argument, ()), *roots)))
        return found

    @property
    def counts_family(self) -> bool:
        """Whether a rule counts the effects of the budget group: forks, children and parents."""
        return any(
            rule.scope == "lineage"
            and (rule.kind in ("total", "once") or (rule.kind == "budget" and {*rule.terms} - {"time"}))
            for rule in self.rules
        )

    @property
    def totals(self) -> frozenset[str]:
        """Returns the tool patterns whose past arguments a rule sums."""
        return frozenset(pattern for rule in self.rules if rule.kind == "total" for pattern in rule.tools)

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Contract:
        """Returns a contract from plain data, as recorded or read from a file. Raises ContractRefused."""
        options = dict(spec)
        name = options.pop("name", None)
        label = f"contract {name}" if isinstance(name, str) else "contract"
        rules = options.pop("rules", [])
        declarations.refuse_unknown(label, options, {"name", "rules", *WORDS})
        if not isinstance(rules, list | tuple) or not all(isinstance(rule, Mapping) for rule in cast(Any, rules)):
            raise ContractRefused(label, "its rules are not a list of tables; write each under [[rules]]")
        for word in ("people", "prices"):
            if word in options and not isinstance(options[word], Mapping):
                raise ContractRefused(label, f"{word} is not a table; write [{word}] and its keys below")
        return cls(cast(str, name), [rule_of(rule) for rule in cast(Any, rules)], **options)

    @classmethod
    def parse(cls, text: str) -> Contract:
        """Returns a contract from TOML text. Raises ContractRefused."""
        import tomllib

        try:
            return cls.from_spec(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ContractRefused("contract", f"is not valid TOML ({error}); correct the file") from None
        except RecursionError:
            raise ContractRefused("contract", "is nested too deeply; flatten it") from None

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Contract) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<Contract {self.name}: {len(self.rules)} rules, {self.digest[:12]}>"

    def _plan(self, intention: Intention) -> tuple[tuple[Rule, Decide], ...]:
        key = (intention.sort, intention.name)
        plan = self._plans.get(key)
        if plan is None:
            plan = tuple((rule, decide) for governs, rule, decide in self._decides if governs(intention))
            if len(self._plans) < _NAMES_MAX:
                self._plans[key] = plan
        return plan

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {"name": self.name, "rules": [rule.spec for rule in self.rules]}
        if self.people:
            spec["people"] = {role: list(names) for role, names in self.people.items()}
        if self.prices.own:
            spec["prices"] = self.prices.spec
        return spec | {word: value for word, usual in _USUAL.items() if (value := getattr(self, word)) != usual}


WORDS: Final = frozenset({"people", "prices", *_USUAL})
"""The permitted keys of a contract besides its name and its rules."""


def _ruling(ruling: Any, rule: Rule, finding: Finding, approval: Approval | None = None) -> Ruling:
    code, message = finding.code, finding.message
    if not finding.final and finding.approval is None:
        code, message = rule.code or code, rule.message or message
    return Ruling(ruling=ruling, rule=rule.name, code=code, message=message, allowed=finding.allowed, approval=approval)


def _failed(rule: Rule, error: Exception) -> Finding:
    """Rejects, because a rule raised an error."""
    [at] = extract_tb(error.__traceback__)[-1:]
    text, place = str(error).partition("\n")[0][:200], f"{at.filename.rpartition('/')[2]}:{at.lineno}"
    message = f"{rule.name} failed: {type(error).__name__}: {text} ({place})"
    return Finding(message, None, "check_failed", final=True)


def named(contract: str, rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Gives each rule a name: its own, or one derived from its terms."""
    taken: dict[str, None] = {}
    result: list[Rule] = []
    listed = list(rules)
    for rule in listed:
        if not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ContractRefused(
                f"contract {contract}", f"{rule!r} is not a rule; make one with a function of killick.rules"
            )
        if rule.name and sum(rule.name == other.name for other in listed) > 1:
            raise ContractRefused(f"contract {contract}", f"two rules are called {rule.name}; give one another name")
    chosen = {rule.name for rule in listed if rule.name}
    for rule in listed:
        name = rule.name
        if not name:
            base = " ".join((rule.kind, *rule.tools[:3]))
            name, number = base, 2
            while name in taken or name in chosen:
                name, number = f"{base} {number}", number + 1
        taken[name] = None
        result.append(rule if rule.name else msgspec.structs.replace(rule, name=name))
    return tuple(result)


def _people(role: str, value: object) -> tuple[str, ...]:
    names = declarations.texts(value)
    if not names:
        raise ContractRefused("people", f"{role}={value!r} names no person; give the names of people")
    return names


# What no rule reads ---------------------------------------------------------------------------------


def unreadable(arguments: Mapping[str, Any], bytes_max: int, depth_max: int) -> tuple[str, str] | None:
    """Returns the code and the reason of arguments that no rule may see: they are too large, too deep, or have text
    that UTF-8 cannot hold, which a rule and a tool might read differently."""
    left = bytes_max
    for name, value in arguments.items():
        kind = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is str and value.isascii() and name.isascii():
            left -= len(name) + len(value)
        elif (kind is int or kind is bool) and name.isascii():
            left -= len(name) + 8 + (value.bit_length() >> 3)
        else:
            try:
                left, is_deep = _remaining((name, value), left + 16, depth_max + 1)
            except UnicodeEncodeError:
                return "argument_refused", f"{printable(name)} {LONE_SURROGATE}"
            if is_deep:
                return _TOO_LARGE, f"{name} is nested deeper than {depth_max} levels; send less of it, or flatten it"
        if left < 0:
            return _TOO_LARGE, f"the arguments are larger than {bytes_max} bytes; send less, or send a reference"
    return None


_TOO_LARGE: Final = "arguments_too_large"


def _remaining(value: Any, left: int, depth_max: int) -> tuple[int, bool]:
    """Returns the remaining byte budget after a value, and whether it is too deep. Stops at the first excess. Raises
    UnicodeEncodeError."""
    level: list[Any] = [value]
    for _ in range(depth_max + 1):
        inside: list[Any] = []
        for item in level:
            kind = type(item)  # pyright: ignore[reportUnknownVariableType]
            left -= 8
            if kind is str:
                left -= len(item) if item.isascii() or len(item) > left else len(item.encode())
            elif kind is bytes or kind is bytearray:
                left -= len(item)
            elif kind is dict:
                inside.extend(item.keys())
                inside.extend(item.values())
            elif kind in _LISTS:
                inside.extend(item)
            elif kind is int:
                left -= item.bit_length() >> 3
            elif kind is Decimal:
                left -= len(item.as_tuple().digits)
            if left < 8 * len(inside):
                return -1, False
        if not inside:
            return left, False
        level = inside
    return left, True


_LISTS: Final = frozenset({list, tuple, set, frozenset})
