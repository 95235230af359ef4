"""The inputs and results of contract evaluation. Data only, no rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from killick.contracts import declarations
from killick.errors import ContractRefused
from killick.model.ledger import Counts
from killick.model.retry import Duration, seconds

IntentionSort = Literal["tool", "model", "child", "send", "context"]


class Intention(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's intended action. Rules match its name: `pay`, `spawn:AGENT`, `send`, `update`, `model:NAME`."""

    name: str
    sort: IntentionSort = "tool"
    arguments: Mapping[str, Any] = {}
    """Plain values as recorded, with defaults filled in."""
    step: str = ""
    effect: str | None = None
    because: str | None = None
    by: str = "agent"
    model: str | None = None
    paths: Mapping[str, str] = {}
    """The resolved path arguments, by argument name or list item (`files[2]`): absolute, symlinks followed. Also each
    root, keyed with a trailing slash, which no argument name has."""

    @property
    def acts(self) -> bool:
        """Whether it has an effect on the world."""
        return self.sort in ("child", "send") or self.effect not in (None, "reads")


class Others(msgspec.Struct):
    """The effects of the rest of the budget group: forks, children, parents."""

    counts: Counts = msgspec.field(default_factory=Counts)
    past: dict[str, list[dict[str, Any]]] = {}
    """By tool, the arguments of effects that happened or may have, minus compensated ones."""


class PolicyInput(msgspec.Struct, kw_only=True):
    """The state of a run at the time of an evaluation."""

    now_us: int = 0
    started_us: int = 0
    own: Counts = msgspec.field(default_factory=Counts)
    others: Others | None = None
    done: Mapping[str, int] = {}
    """By name, the calls of this timeline that returned, minus compensated ones."""
    context: Callable[[], Mapping[str, Any]] = dict
    context_version: int = 0
    context_seen: int = 0
    past: Callable[[str], Sequence[Mapping[str, Any]]] = lambda name: ()
    """The arguments of this log's effects of a tool that happened or may have, minus compensated ones."""
    mine: int = 0
    """1 if `own` already counts this intention, because it began."""
    mine_acts: int | None = None
    """The same for the effects in `own` and in `past`, if different: 0 for an intention that began and was refused."""


class Escalation(NamedTuple):
    """The next approvers after a timeout, and their own timeout in seconds."""

    to: tuple[str, ...]
    timeout: float | None = None

    @property
    def spec(self) -> list[Any]:
        return [list(self.to)] if self.timeout is None else [list(self.to), _shortest(self.timeout)]


class Approval(msgspec.Struct, frozen=True):
    """An approval requirement. Raises ContractRefused.

    to        names or roles; by default anyone may approve
    need      the number of approvers that must agree
    timeout   the deadline, after which the next escalation is asked, or the call is rejected
    escalate  who is asked after the deadline, and for how long
    prompt    the question; by default made from the call
    separate  whether the people who started the run or edited the call cannot approve it

        @killick.tool(approve=killick.Approval("finance", need=2, timeout="2d"))
        async def pay(to: str, cents: int) -> str: ...
    """

    to: tuple[str, ...] = ()
    need: int = 1
    timeout: float | None = None
    escalate: tuple[Escalation, ...] = ()
    prompt: str | None = None
    separate: bool = False

    if TYPE_CHECKING:
        # The accepted types are wider than the stored ones.
        def __init__(
            self,
            to: str | Iterable[str] = (),
            need: int = 1,
            timeout: Duration | None = None,
            escalate: Sequence[tuple[str | Sequence[str], Duration | None]] = (),
            prompt: str | None = None,
            separate: bool = False,
        ) -> None: ...

    def __post_init__(self) -> None:
        if type(self.need) is not int or self.need < 1:
            raise ContractRefused("Approval", f"need={self.need!r}; give a whole number of people from 1")
        if self.prompt is not None and type(self.prompt) is not str:
            raise ContractRefused("Approval", f"prompt={self.prompt!r}; give text")
        if type(self.separate) is not bool:
            raise ContractRefused("Approval", f"separate={self.separate!r}; give true or false")
        normalized = {
            "to": _names(self.to) if self.to else (),
            "timeout": _timeout(self.timeout),
            "escalate": _escalations(self.escalate),
        }
        for name, value in normalized.items():
            msgspec.structs.force_setattr(self, name, value)
        if self.escalate and self.timeout is None:
            raise ContractRefused("Approval", "escalates, but has no timeout; give timeout=")

    @property
    def spec(self) -> dict[str, Any]:
        """Returns plain data without defaults."""
        spec: dict[str, Any] = {"to": list(self.to)} if self.to else {}
        if self.need != 1:
            spec["need"] = self.need
        if self.timeout is not None:
            spec["timeout"] = _shortest(self.timeout)
        if self.escalate:
            spec["escalate"] = [each.spec for each in self.escalate]
        if self.prompt is not None:
            spec["prompt"] = self.prompt
        if self.separate:
            spec["separate"] = True
        return spec


Asking: TypeAlias = "str | Sequence[str] | Approval | Mapping[str, Any]"


def approval_of(ask: object) -> Approval:
    """Parses an approval requirement: a name, names, or a full table."""
    if isinstance(ask, Approval):
        return ask
    table = declarations.table(ask)
    if table is None:
        return Approval(_names(ask))
    declarations.refuse_unknown("ask", table, Approval.__struct_fields__)
    return Approval(**table)


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """A contract's verdict on an intention: the deciding rule, and what would be allowed."""

    ruling: Literal["accept", "reject", "ask"] = "accept"
    rule: str | None = None
    code: str | None = None
    message: str | None = None
    allowed: Any = None
    approval: Approval | None = None


class Finding(NamedTuple):
    """One rule's objection to an intention."""

    message: str
    allowed: Any = None
    code: str = ""
    approval: Approval | None = None
    """The approval requirement, if a check function returns one."""
    final: bool = False
    """Whether the objection is final, even under a rule that requires approval."""


Decide: TypeAlias = Callable[[Intention, PolicyInput], "Finding | None"]
"""A compiled rule."""


def _escalations(value: object) -> tuple[Escalation, ...]:
    """Parses pairs of names and their timeout, which may be missing."""
    found: list[Escalation] = []
    several = declarations.items(value)
    for each in [value] if several is None else several:
        pair = declarations.items(each) or []
        if len(pair) not in (1, 2):
            raise ContractRefused("Approval", f"escalate={each!r}; give names and a time, as in ('directors', '48h')")
        found.append(Escalation(_names(pair[0]), *map(_timeout, pair[1:])))
    return tuple(found)


def _timeout(value: Any) -> float | None:
    return None if value is None else seconds(value)


def _shortest(count: float) -> float:
    """Returns one number for one duration, in any spelling."""
    return int(count) if count == int(count) else count


def _names(value: object) -> tuple[str, ...]:
    names = declarations.texts(value)
    if not names:
        raise ContractRefused("ask", f"{value!r} names no person; give a person, a role, or a list of them")
    return names
