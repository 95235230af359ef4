"""The contracts in force for a run, and the facts that their rules may read.

Evaluation itself is pure and in `contracts`. Writes nothing, asks no person.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from msgspec.structs import replace

from killick.contracts.contract import ACCEPTED, Approval, Contract, Intention, Others, PolicyInput, Ruling
from killick.contracts.lookalikes import path_refused
from killick.contracts.policy_input import UPDATE, of_the_context, own_part, past_of, together
from killick.contracts.prices import Prices
from killick.definitions.agents import AGENTS, AnyAgent
from killick.engine.approval.budget_group import Family, first_of
from killick.engine.control.inbox import APPROVE
from killick.errors import AgentUnknown, ContractRefused, KillickError
from killick.log.writer import Entry, RunLog
from killick.model import events as e
from killick.model.codec import digest
from killick.model.facts import Facts
from killick.model.fold import Fold
from killick.model.ledger import Ledger
from killick.store.records import UniqueRight

if TYPE_CHECKING:
    from killick.engine.engine import Engine

FILES_MAX: Final = 1_000
"""How many files one argument may name; each is looked at."""

PLAIN_VALUES: Final = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values that code cannot change after they were judged."""

_PRICES: Final = Prices()


class BoundContract(NamedTuple):
    """A contract in force, and the run above whose it is; None: the agent's own."""

    contract: Contract
    of: str | None


class Verdict(NamedTuple):
    """A ruling, its contract, and its inputs besides the record."""

    ruling: Ruling
    contract: Contract | None
    rests_on: dict[str, Any]
    at: int
    asks: tuple[tuple[AskingRule, str | None], ...] = ()
    """Every rule that asks the same approvers, with its message."""

    @property
    def event(self) -> e.Verdict:
        ruling = self.ruling
        digest = None if self.contract is None else self.contract.digest
        return e.Verdict(ruling=ruling.ruling, rule=ruling.rule, code=ruling.code, contract=digest)


class AskingRule(NamedTuple):
    """A rule that asks, by its contract's hash; of a tool itself, by none."""

    contract: e.Digest | None
    rule: str


class ApprovalGiven(NamedTuple):
    """An approval: the approvers, the quorum, the rules that required it, the arguments,
    under which contracts and in which generation, and whether duties were separate."""

    who: tuple[str, ...]
    need: int
    covers: frozenset[AskingRule]
    digest: bytes
    under: e.Digest | None
    separate: bool


@dataclass(slots=True)
class Past:
    """The arguments of a tool's settled calls."""

    taken_back: int
    index: int = 0
    arguments: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])


class Looked(NamedTuple):
    """A read-only view of a run that another process may hold."""

    run: str
    fold: Fold
    ledger: Ledger
    base: int


RunView: TypeAlias = RunLog | Looked
"""The state of a run: an open log, or a read-only view of one."""


def _covers(given: Approval | ApprovalGiven, asked: Approval) -> bool:
    """Whether an approval is as strict as another one."""
    return given.need >= asked.need and given.separate >= asked.separate


class ContractsInForce:
    """The contracts that judge the intentions of one run."""

    def __init__(
        self, engine: Engine, agent: AnyAgent | None, log: RunView, context: Callable[[], Mapping[str, Any]],
        seen: Callable[[], int],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._log = log
        self._context = context
        self._seen = seen
        self._arguments: dict[e.StepId, Mapping[str, Any]] = {}
        self._data: dict[int, Mapping[str, Any]] = {}
        self.bound = _in_force(engine, agent, log)
        self.mark = e.to_text(digest([bound.contract.digest for bound in self.bound])) if self.bound else None
        """The digest of all contracts in force; an approval under another digest does not count."""
        self._roots = {bound.of: self._pinned(bound) for bound in self.bound}
        """By contract, the folders that paths may lead into, resolved when it came into force."""
        self._said: tuple[object, ...] | None = None
        """The recorded contracts in force, once recorded."""
        self._pasts: dict[str, Past] = {}
        self._began: dict[str | None, int] = {}
        self._files: dict[str, list[tuple[str, Sequence[str]]]] = {}
        self._families = {
            bound.of: Family(engine.log, log.run, bound.of or log.run, bound.contract.totals)
            for bound in self.bound
            if bound.contract.counts_family
        }

    def unbound(self) -> list[Entry]:
        """The events to write first: the contracts in force that are not recorded yet."""
        facts = self._log.fold.facts
        if facts.contracts is self._said:
            return []
        now = self._engine.clock.now_us()
        known = {bound.of: bound.digest for bound in facts.contracts}
        wanted = {bound.of: bound.contract for bound in self.bound}
        entries = [
            Entry(
                e.ContractBound(at=now, digest=contract.digest, name=contract.name, of=of),
                {"contract": contract.spec, **({"roots": roots} if (roots := self._roots[of]) else {})},
            )
            for of, contract in wanted.items()
            if known.get(of) != contract.digest
        ]
        gone = [of for of in known if of not in wanted]
        if not entries and not gone:
            self._said = facts.contracts
        return entries + [Entry(e.ContractBound(at=now, digest="", name="", of=of)) for of in gone]

    @property
    def rejections(self) -> int:
        """How many rejections in a row a run may have."""
        return min((bound.contract.rejections for bound in self.bound), default=0)

    def judge(
        self, intention: Intention, *, agreements: Collection[ApprovalGiven] = (), asks: Approval | None = None,
        begun: bool = False, is_open: bool = False, adopts: bool = False,
    ) -> Verdict:  # fmt: skip
        """The joint verdict of the contracts of a run and its ancestors: a rejection by any before a question by any.

        agreements   the approvals that this intention has already
        asks         the approval that the tool itself, or the proposing code, requires
        begun        whether the totals already count this very intention, and as an effect if it is open
        adopts       whether an earlier effect is about to be reused, so that no new one happens
        """
        rests_on: dict[str, Any] = {"paths": intention.paths} if intention.paths else {}
        if adopts:
            rests_on["adopts"] = True
        now = self._engine.clock.now_us()
        asking: list[tuple[Ruling, Contract | None]] = []
        if asks is not None and not self._is_agreed(asks, AskingRule(None, APPROVE), agreements):
            code = "approval_needed"
            asking.append((Ruling(ruling="ask", rule=APPROVE, code=code, message=asks.prompt, approval=asks), None))
        for bound in self.bound:
            contract = bound.contract
            mine = int(begun or adopts), int(is_open or adopts)
            standing = self._standing(bound, now, mine, rests_on)
            ruling = contract.judge(intention, standing)
            seen: list[str] = []
            while ruling.ruling == "ask":
                seen.append(str(ruling.rule))
                if not self._is_agreed(ruling.approval, AskingRule(contract.digest, seen[-1]), agreements):
                    asking.append((ruling, contract))
                ruling = contract.judge(intention, standing, seen)
            if ruling.ruling == "reject":
                return Verdict(ruling, contract, rests_on, now)
        if asking:
            ruling, asker = asking[0]
            return Verdict(ruling, asker, rests_on, now, self._together(asking))
        first = self.bound[0].contract if self.bound else None
        return Verdict(ACCEPTED, first, rests_on, now)

    def accepts(self, name: str, effect: e.EffectClass, arguments: Mapping[str, Any], step: e.StepId) -> Verdict | None:
        """The verdict on a first call with plain values that every contract in force accepts by this run's own record.

        None: something else is to be said or looked at first, or a contract asks or rejects.
        """
        if self.is_shared or self.unbound() or self.looked(name, arguments):
            return None
        for value in arguments.values():
            if type(value) not in PLAIN_VALUES:
                return None
        verdict = self.judge(
            Intention(name=name, sort="tool", arguments=arguments, step=step, effect=effect, by="agent")
        )
        if verdict.ruling.ruling != "accept":
            return None
        self.remember(step, arguments)
        return verdict

    def _together(self, asking: Sequence[tuple[Ruling, Contract | None]]) -> tuple[tuple[AskingRule, str | None], ...]:
        """The rules that ask the same approvers as the first one, as one question."""
        first = self._rounds(asking[0][0].approval, asking[0][1])
        question = asking[0][0].approval or Approval()
        return tuple(
            (AskingRule(None if contract is None else contract.digest, str(ruling.rule)), ruling.message)
            for ruling, contract in asking
            if self._rounds(ruling.approval, contract) == first and _covers(question, ruling.approval or Approval())
        )

    def _rounds(self, approval: Approval | None, contract: Contract | None) -> tuple[tuple[str, ...], ...]:
        """Who is asked, and who after them."""
        asked, people = approval or Approval(), self.people(contract)
        return tuple(who_of(people, to) for to in (asked.to, *(each.to for each in asked.escalate)))

    def _is_agreed(self, approval: Approval | None, rule: AskingRule, agreements: Collection[ApprovalGiven]) -> bool:
        """Whether those who are to be asked by a rule agreed already, or those to whom it would be passed on."""
        if not agreements:
            return False
        asked = approval or Approval()
        contract = next((bound.contract for bound in self.bound if bound.contract.digest == rule.contract), None)
        rounds = self._rounds(approval, contract)
        return any(
            _covers(agreed, asked) and rule in agreed.covers and (agreed.who in rounds or not asked.to)
            for agreed in agreements
        )

    def people(self, contract: Contract | None) -> Mapping[str, Sequence[str]]:
        """Who is who, by the contract that asks; where the tool itself asks, by the uppermost that says it."""
        if contract is not None:
            return contract.people
        return {role: names for bound in self.bound for role, names in bound.contract.people.items()}

    def looked(self, name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
        """The real paths of the files that an intention names, links resolved, for the record."""
        files = self._files.get(name)
        if files is None:
            named = [bound.contract.path_arguments(name) for bound in self.bound]
            files = self._files[name] = [pair for each in named for pair in each.items()]
        if not files:
            return {}
        paths: dict[str, str] = {}
        for argument, roots in files:
            paths = real_paths(arguments.get(argument), argument, roots) | paths
        for pinned in self._roots.values():
            paths |= {root: real for root, real in pinned.items() if root in paths}
        return paths

    def _pinned(self, bound: BoundContract) -> dict[str, str]:
        """Where the folders of a contract really are: as it is on record, or as it is now."""
        folders = {
            root
            for rule in bound.contract.rules
            if rule.kind == "paths"
            for each in rule.terms.values()
            for root in each
        }
        if not folders:
            return {}
        log, facts = self._engine.log, self._log.fold.facts
        records = [(self._log.run, bound.of, facts.contracts)]
        before = bound.of or facts.follows
        if before is not None and log.store.head(before) is not None:
            # As they were for the run that it comes from.
            records.append((before, None, log.state(before).fold.facts.contracts))
        for run, of, contracts in records:
            for each in contracts:
                if (each.of, each.digest) == (of, bound.contract.digest):
                    return dict(log.data(run, each.seq).get("roots") or {})
        return {root: os.path.realpath(root) for root in folders}

    def _standing(self, bound: BoundContract, now: int, mine: tuple[int, int], rests_on: dict[str, Any]) -> PolicyInput:
        facts, ledger = self._log.fold.facts, self._log.ledger
        others = None
        family = self._families.get(bound.of)
        if family is not None and (self._has_relatives or bound.of is not None):
            others = family.others(ledger)
            rests_on.setdefault("others", {})[bound.of or ""] = others
        done, context, version, seen = facts.done, self._context, facts.context_version, self._seen()
        if bound.of is not None and any(rule.kind in ("after", "context") for rule in bound.contract.rules):
            # A parent's rules concern the parent: its state, its effects and those of its children.
            above = self._above(bound.of)
            rests_on.setdefault("above", {})[bound.of] = above
            done, context = together(done, above), lambda: above["document"]
            version = seen = above["version"]
        since = self._since(bound.of)
        if since != facts.started_at:
            rests_on.setdefault("since", {})[bound.of or ""] = since
        return PolicyInput(
            now_us=now, started_us=since, own=own_part(ledger), others=others, done=done, context=context,
            context_version=version, context_seen=seen, past=self._past, mine=mine[0], mine_acts=mine[1],
        )  # fmt: skip

    def _above(self, of: str) -> dict[str, Any]:
        """The current state and effects of a parent run."""
        state = self._engine.log.state(of)
        context = state.context
        return {"done": dict(state.fold.facts.done), "document": context.document or {}, "version": context.version}

    def _since(self, of: str | None) -> int:
        """When the run began whose contract it is: the first one, where it was renewed or forked."""
        facts = self._log.fold.facts
        if of is None and facts.follows is None and facts.forked_from is None:
            return facts.started_at
        if of not in self._began:
            root = first_of(self._engine.log, of or self._log.run)
            known = self._engine.log.store.head(root) is not None
            self._began[of] = self._engine.log.state(root).fold.facts.started_at if known else facts.started_at
        return self._began[of]

    @property
    def _has_relatives(self) -> bool:
        """Whether the run has forks or children, is a fork, or continues another run."""
        facts, ledger = self._log.fold.facts, self._log.ledger
        return bool(facts.forked_from or facts.follows or ledger.facts.forks or ledger.children)

    @property
    def is_shared(self) -> bool:
        """Whether runs with other logs count too."""
        return bool(self._families) and (self._has_relatives or any(of is not None for of in self._families))

    def slots(self, rests_on: Mapping[str, Any]) -> tuple[UniqueRight, ...]:
        """The rights to act next, where runs count together in a budget group. They belong to the read on which the
        verdict is based; a run that acted since has consumed them."""
        looked: Mapping[str, Others] = rests_on.get("others") or {}
        ledger = self._log.ledger
        found = [self._families[of or None].slot(ledger, others) for of, others in looked.items()]
        return tuple(dict.fromkeys(found))

    def priced(self, usage: e.Usage | None, model: str | None) -> e.Usage | None:
        """The usage of a model call, with its cost if a price is known; else with the cost that its client computed."""
        if usage is None:
            return None
        named = usage if usage.model or model is None else replace(usage, model=model)
        asked = usage if model is None else replace(usage, model=model)
        # By the dearest, so that no contract makes it cheaper for another.
        tables = [bound.contract.prices for bound in self.bound] or [_PRICES]
        costs = [cost for prices in tables if (cost := prices.cost(named) or prices.cost(asked))]
        return replace(usage, cost_micros=max(costs)) if costs else usage

    def remember(self, step: e.StepId, arguments: Mapping[str, Any]) -> None:
        """Keeps judged arguments that are needed again before the store has them."""
        self._arguments[step] = arguments

    def _past(self, tool: str) -> Sequence[Mapping[str, Any]]:
        """The arguments of a tool's effects, read once and again after a compensation."""
        ledger, base = self._log.ledger, self._log.base
        known = self._pasts.get(tool)
        if known is None or known.taken_back != ledger.facts.taken_back:
            known = self._pasts[tool] = Past(ledger.facts.taken_back)
        effects = ledger.effects
        while known.index < len(effects) and effects[known.index].status == "happened":
            effect = effects[known.index]
            if effect.tool == tool and effect.started > base and not effect.undoes:
                known.arguments.append(self.data(effect.intended).get("arguments") or {})
            known.index += 1
        return [*known.arguments, *past_of(ledger, self, tool, after=base, first=known.index)]

    def event(self, seq: int) -> e.Event:
        return self._engine.log.event(self._log.run, seq)

    def data(self, seq: int) -> Mapping[str, Any]:
        """The values of an intention: of one that is open the store may not have them yet."""
        known = self._data.get(seq)
        if known is None:
            intentions = self._log.ledger.facts.intentions.items()
            step = next((step for step, intention in intentions if intention.intended == seq), None)
            arguments = None if step is None else self._arguments.get(step)
            if arguments is not None:
                return {"arguments": arguments}
            known = self._data[seq] = self._engine.log.data(self._log.run, seq)
        return known


def _in_force(engine: Engine, agent: AnyAgent | None, log: RunView) -> list[BoundContract]:
    """The agent's own contract, and those of the runs that spawned it, and so on up."""
    facts = log.fold.facts
    found: list[BoundContract] = []
    if agent is not None and agent.options.contract is not None:
        found.append(BoundContract(agent.options.contract, None))
    elif agent is None:
        found += [
            BoundContract(_recorded(engine, log.run, bound.seq), None) for bound in facts.contracts if bound.of is None
        ]
    while (parent := _spawner(engine, facts)) is not None:
        facts = engine.log.state(parent).fold.facts
        try:
            contract = AGENTS.get(facts.agent).options.contract
            if contract is not None:
                found.append(BoundContract(contract, parent))
        except AgentUnknown:
            # It is declared elsewhere: its recorded contract applies here, too.
            own = [bound for bound in facts.contracts if bound.of is None]
            found += [BoundContract(_recorded(engine, parent, bound.seq), parent) for bound in own]
    return found


def _spawner(engine: Engine, facts: Facts) -> str | None:
    """The run that spawned a run, or the run that it is a fork of; None without one on record."""
    while (origin := facts.forked_from) is not None:
        if engine.store.head(origin) is None:
            return None
        facts = engine.log.state(origin).fold.facts
    return facts.parent if facts.parent is not None and engine.store.head(facts.parent) is not None else None


def _recorded(engine: Engine, run: str, seq: int) -> Contract:
    """A contract from the record. One whose functions are not here cannot be judged by, and nothing passes."""
    try:
        return Contract.from_spec(engine.log.data(run, seq)["contract"])
    except ContractRefused as refused:
        problem = f"the contract of {run}, which holds here too, cannot be judged by in this process: {refused}"
        raise KillickError(problem) from refused


def named(people: Mapping[str, Sequence[str]], to: Sequence[str]) -> list[str] | None:
    """People by name; None without a declaration of people, so that a name may be a role."""
    if not people or not to:
        return None
    return sorted({name for each in to for name in people.get(each, (each,))})


def who_of(people: Mapping[str, Sequence[str]], to: Sequence[str]) -> tuple[str, ...]:
    """The addressees: names where they are known, else the roles."""
    return tuple(named(people, to) or sorted(to))


def real_paths(value: Any, argument: str, roots: Sequence[str]) -> dict[str, str]:
    """Where a file argument really leads, and its roots, with every link followed."""
    found = {root: os.path.realpath(root) for root in roots}
    named = {argument: value} if isinstance(value, str) else {}
    if isinstance(value, list | tuple):
        named = {f"{argument}[{index}]": each for index, each in enumerate(value)}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    for name, path in cast("dict[str, Any]", named).items():
        if isinstance(path, str) and roots and path_refused(path) is None:
            found[name] = ""  # an unreadable path resolves to nothing
            if len(found) <= FILES_MAX:
                with contextlib.suppress(OSError, ValueError):
                    found[name] = os.path.realpath(os.path.join(found[roots[0]], path))
    return found


def with_paths(arguments: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Arguments as a tool is given them: a file is the one that was judged, wherever the tool would look for it."""
    given = dict(arguments)
    for name, value in arguments.items():
        if name in paths:
            given[name] = type(value)(paths[name])
        elif isinstance(value, list | tuple) and f"{name}[0]" in paths:
            each = [type(one)(paths.get(f"{name}[{at}]", one)) for at, one in enumerate(value)]  # pyright: ignore
            given[name] = type(value)(each)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return given


# changes of the context ----------------------------------------------------------------------------


def judge_change(
    judge: ContractsInForce, changes: Mapping[str, Any], unset: Sequence[str], *, by: str, step: str = ""
) -> Verdict | None:
    """The verdict on a change of the context; None where there is nothing to judge it by."""
    if not judge.bound:
        return None
    arguments = {**changes, **dict.fromkeys(unset)}
    intention = Intention(name=UPDATE, sort="context", arguments=arguments, step=step, by=by)
    verdict = judge.judge(intention)
    people = None if verdict.contract is None else verdict.contract.people
    return verdict._replace(ruling=of_the_context(verdict.ruling, by, people))
