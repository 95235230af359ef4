"""What is judged, what a rule may know when it judges, and what it says. Data alone: no rule lives here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec

from killick.contracts import declarations
from killick.errors import ContractRefused, DurationRefused
from killick.model.ledger import Counts
from killick.model.retry import Duration, seconds

IntentionSort = Literal["tool", "model", "child", "send", "context"]


class Intention(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent wants to do, as data. Rules know it by its name: `pay`, `spawn:AGENT`, `send`, `update`,
    `model:NAME`."""

    name: str
    sort: IntentionSort = "tool"
    arguments: Mapping[str, Any] = {}
    """Plain values, as they are recorded; an argument that was left out has its default here."""
    step: str = ""
    effect: str | None = None
    because: str | None = None
    by: str = "agent"
    model: str | None = None
    paths: Mapping[str, str] = {}
    """What the paths among the arguments really are, links resolved: an argument, or one of a list (`files[2]`), to an
    absolute path; and so every root, which ends in a slash, as no argument's name does."""

    @property
    def acts(self) -> bool:
        """Whether it does something to the world."""
        return self.sort in ("child", "send") or self.effect not in (None, "reads")


class Others(msgspec.Struct):
    """What the rest of the family (forks, children, parents) has done."""

    counts: Counts = msgspec.field(default_factory=Counts)
    past: dict[str, list[dict[str, Any]]] = {}
    """By tool, the arguments of effects that happened or may have, less what was undone."""


def _nothing(name: str) -> Sequence[Mapping[str, Any]]:
    return ()


class PolicyInput(msgspec.Struct, kw_only=True):
    """How things stand when an intention is judged."""

    now_us: int = 0
    started_us: int = 0
    own: Counts = msgspec.field(default_factory=Counts)
    others: Others | None = None
    done: Mapping[str, int] = {}
    """By name, the calls that returned, on this timeline, less what was undone."""
    context: Callable[[], Mapping[str, Any]] = dict
    context_version: int = 0
    context_seen: int = 0
    past: Callable[[str], Sequence[Mapping[str, Any]]] = _nothing
    """The arguments of this log's effects of a tool that happened or may have, less undone."""
    mine: int = 0
    """1 where `own` counts this very intention already, because it was begun."""
    mine_acts: int | None = None
    """The same of the effects in `own` and in `past`, where it differs: of one that was begun and then refused, 0."""


class Escalation(msgspec.Struct, frozen=True):
    """Who is asked next when nobody answered, and for how many seconds."""

    to: tuple[str, ...]
    timeout: float | None = None

    if TYPE_CHECKING:

        def __init__(self, to: str | Iterable[str], timeout: Duration | None = None) -> None: ...

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "to", _names(self.to))
        msgspec.structs.force_setattr(self, "timeout", _timeout(self.timeout))

    @property
    def spec(self) -> dict[str, Any]:
        return {"to": list(self.to)} | ({} if self.timeout is None else {"timeout": _whole(self.timeout)})


EscalationLike: TypeAlias = "Escalation | str | tuple[str | Sequence[str], Duration | None] | Mapping[str, Any]"


class Approval(msgspec.Struct, frozen=True):
    """Who has to agree (nobody named: anybody), how many of them, by when, and who is asked after that."""

    to: tuple[str, ...] = ()
    need: int = 1
    timeout: float | None = None
    escalate: tuple[Escalation, ...] = ()
    prompt: str | None = None

    if TYPE_CHECKING:
        # What may be given is wider than what is kept.
        def __init__(
            self,
            to: str | Iterable[str] = (),
            need: int = 1,
            timeout: Duration | None = None,
            escalate: Iterable[EscalationLike] = (),
            prompt: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if type(self.need) is not int or self.need < 1:
            raise ContractRefused("Approval", f"need={self.need!r}; give a whole number of people from 1")
        if self.prompt is not None and type(self.prompt) is not str:
            raise ContractRefused("Approval", f"prompt={self.prompt!r}; give text")
        kept = {
            "to": _names(self.to) if self.to else (),
            "timeout": _timeout(self.timeout),
            "escalate": _escalations(self.escalate),
        }
        for name, value in kept.items():
            msgspec.structs.force_setattr(self, name, value)
        if self.escalate and self.timeout is None:
            raise ContractRefused("Approval", "escalates, but waits without end; give timeout=, after which it does")

    @property
    def spec(self) -> dict[str, Any]:
        """It as plain data, without what is left at its default."""
        kept: dict[str, Any] = {"to": list(self.to)} if self.to else {}
        if self.need != 1:
            kept["need"] = self.need
        if self.timeout is not None:
            kept["timeout"] = _whole(self.timeout)
        if self.escalate:
            kept["escalate"] = [each.spec for each in self.escalate]
        if self.prompt is not None:
            kept["prompt"] = self.prompt
        return kept


Asking: TypeAlias = "str | Sequence[str] | Approval | Mapping[str, Any]"


def approval_of(ask: object) -> Approval:
    """What people write where somebody is to be asked: a name, names, or everything about it."""
    if isinstance(ask, Approval):
        return ask
    said = declarations.table(ask)
    if said is None:
        return Approval(_names(ask))
    for word in said:
        if word not in Approval.__struct_fields__:
            raise ContractRefused("ask", declarations.unknown(word, Approval.__struct_fields__))
    return Approval(**said)


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """What a contract says of an intention, by which rule, and what would be allowed."""

    ruling: Literal["accept", "reject", "ask"] = "accept"
    rule: str | None = None
    code: str | None = None
    message: str | None = None
    allowed: Any = None
    approval: Approval | None = None


class Finding(NamedTuple):
    """What one rule has against an intention."""

    message: str
    allowed: Any = None
    code: str = ""
    approval: Approval | None = None
    """Who is to be asked, where a function says so itself."""
    final: bool = False
    """Whether nobody is asked, even by a rule that asks."""


Decide: TypeAlias = Callable[[Intention, PolicyInput], "Finding | None"]
"""A rule that is ready to be followed."""


def _escalations(given: object) -> tuple[Escalation, ...]:
    """One or several: a name, names with a time, or a table."""
    one = _escalation(given)
    if one is not None:
        return (one,)
    found: list[Escalation] = []
    several = declarations.items(given)
    for each in [given] if several is None else several:
        escalation = _escalation(each)
        if escalation is None:
            raise ContractRefused("Approval", f"escalate={each!r}; give a name and a time, as in ('directors', '48h')")
        found.append(escalation)
    return tuple(found)


def _escalation(given: object) -> Escalation | None:
    if isinstance(given, Escalation):
        return given
    if isinstance(given, str):
        return Escalation(given)
    said = declarations.table(given)
    if said is not None:
        return Escalation(**said) if {"to"} <= said.keys() <= {"to", "timeout"} else None
    pair = declarations.items(given) or []
    # Two names are two, and a name with a time is one.
    return Escalation(pair[0], pair[1]) if len(pair) == 2 and _is_duration(pair[1]) else None


def _is_duration(given: Any) -> bool:
    try:
        _timeout(given)
    except DurationRefused:
        return False
    return True


def _timeout(given: Any) -> float | None:
    return None if given is None else seconds(given)


def _whole(count: float) -> float:
    """The same number for the same time, however it was written."""
    return int(count) if count == int(count) else count


def _names(given: object) -> tuple[str, ...]:
    names = declarations.texts(given)
    if not names:
        raise ContractRefused("ask", f"{given!r} names nobody; give a person, a role, or a list of them")
    return names
