"""Re-evaluates a run's intentions, by the contracts in force then or by another contract. Changes nothing.

The log is folded event by event, and each intention is evaluated with the facts known just before it. With the recorded
contracts this is an audit: every verdict must be equal. With another contract it shows what that would have stopped,
asked or allowed. Events after the first stopped intention are hypothetical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from killick.contracts.contract import ACCEPTED, Contract, Intention, Others, PolicyInput, Ruling
from killick.contracts.policy_input import of_change, of_edit, of_step, of_the_context, policy_input, together
from killick.errors import ValueErased
from killick.log.log import Log, Recorded
from killick.model import events as e
from killick.model.chunks import unpack
from killick.model.facts import ContractInForce, Step
from killick.model.fold import Fold, goes_back
from killick.model.ledger import Ledger
from killick.model.typed import convert

Change = Literal["same", "stopped", "asked", "passed", "differs", "unknown"]

JUDGED_SORTS: Final = frozenset({"tool", "model", "child"})
_PAGE: Final = 1_000


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One intention: its recorded verdict, and the new one.

    change     "same"; "stopped", "asked" or "passed", by another contract; "differs", if the recorded contract gives
               another verdict than the recorded one; "unknown", if values that the rules read were erased
    if_so      whether it follows a stopped intention, so that it might not have occurred
    """

    seq: int
    at: int
    step: str
    name: str = ""
    arguments: Mapping[str, Any] = {}
    by: str = "agent"
    then: e.Verdict | None = None
    now: Ruling | None = None
    contract: str | None = None
    change: Change = "same"
    if_so: bool = False


class Rejudged(msgspec.Struct, frozen=True, kw_only=True):
    """All intentions of a run, evaluated again. `contract` is the other contract's hash, if any."""

    run: str
    agent: str
    contract: str | None = None
    judged: tuple[Judged, ...] = ()
    changed: tuple[str, ...] = ()
    """Recorded contracts whose check functions have changed since, so that their verdicts may differ."""
    hypothetical_from: str | None = None
    """The first step that would have been stopped; later steps are hypothetical."""

    @property
    def changes(self) -> tuple[Judged, ...]:
        """The intentions with another verdict."""
        return tuple(each for each in self.judged if each.change != "same")

    @property
    def agrees(self) -> bool:
        """Whether every verdict equals the recorded one."""
        return not self.changes


def rejudge(log: Log, run: str, contract: Contract | None = None) -> Rejudged:
    """Evaluates every intention of a run again: by the recorded contracts, or with another one in place of its own.

    For a fork, only its own intentions; the rest are its parent's.
    """
    return _Backtester(log, run, contract).outcome()


class _Backtester:
    """One pass over a log, from its first event."""

    def __init__(self, log: Log, run: str, contract: Contract | None) -> None:
        self._log = log
        self._run = run
        self._head = log.head(run)
        self._new = contract
        self._known: dict[str, Contract] = {}
        self._seen = 0
        self._is_new_fork = False
        self._agreed: set[tuple[str, str | None]] = set()
        """The approved steps, and their approved arguments."""
        self._dearer = 0
        """How much more the run would have spent by the other contract's prices."""
        self._stopped: str | None = None
        self._is_erased = False
        self._recorded: Recorded
        self._data: dict[int, Mapping[str, Any]] = {}

    def event(self, seq: int) -> e.Event:
        return self._log.event(self._run, seq)

    def data(self, seq: int) -> Mapping[str, Any]:
        known = self._data.get(seq)
        if known is not None:
            return known
        row = self._recorded.row
        try:
            is_here = seq == row.seq and row.data is not None
            found = unpack(row.data or b"", self._log.store.pieces) if is_here else self._log.data(self._run, seq)
        except ValueErased:
            self._is_erased = True  # a rule takes it for a fault of its own
            raise
        self._data[seq] = found
        return found

    def outcome(self) -> Rejudged:
        judged: list[Judged] = []
        fold, ledger = self._log.at_base(self._run)
        for recorded in self._events():
            self._recorded = recorded
            found = self._judged(fold, ledger)
            if found is not None:
                judged.append(found)
            fold = self._log.applied(self._run, fold, ledger, [(recorded.seq, recorded.event)])
            self._track(recorded.seq, recorded.event, fold)
            if found is None or found.name.startswith("model:"):
                self._data.pop(recorded.seq, None)  # only effects are read again
        return Rejudged(
            run=self._run,
            agent=fold.facts.agent,
            contract=None if self._new is None else self._new.digest,
            judged=tuple(judged),
            hypothetical_from=self._stopped,
            changed=tuple(known.name for digest, known in self._known.items() if known.digest != digest),
        )

    def _events(self) -> Iterator[Recorded]:
        after = self._head.base
        while after < self._head.seq:
            page = self._log.read(self._run, after=after, limit=min(_PAGE, self._head.seq - after))
            if not page:
                return
            yield from page
            after = page[-1].seq

    # one intention ----------------------------------------------------------------------------

    def _judged(self, fold: Fold, ledger: Ledger) -> Judged | None:
        """Returns the new verdict on an event's intention; None for other events."""
        seq, event, _ = self._recorded
        then: e.Verdict | None = getattr(event, "verdict", None)
        fields: dict[str, Any] = {
            "seq": seq, "at": event.at, "step": getattr(event, "step", None) or "", "then": then,
            "if_so": self._stopped is not None,
        }  # fmt: skip
        self._is_erased = False
        try:
            intention = self._intended(fold, event)
            if intention is None:
                return None
            fields |= {"name": intention.name, "arguments": intention.arguments, "by": intention.by}
            said = self._judge(intention, event, fold, ledger)
        except ValueErased:
            return Judged(**fields, change="unknown")
        if said is None:
            own = then is None or then.contract is None
            return Judged(**fields, change="same" if own else "differs")
        ruling, digest = said
        change: Change = "unknown" if self._is_erased else self._change(then, ruling, digest)
        if change == "stopped" and self._stopped is None:
            self._stopped = fields["step"]
        return Judged(**fields, now=None if self._is_erased else ruling, contract=digest, change=change)

    def _intended(self, fold: Fold, event: e.Event) -> Intention | None:
        seq = self._recorded.seq
        match event:
            case e.StepIntended(sort=sort, undoes=None) if sort in JUDGED_SORTS:
                return of_step(event, self.data(seq))
            case e.StepEdited() if (step := fold.step(event.step)) is not None:
                return of_edit(step, event, {**self._why(step), **self.data(seq)})
            case e.StepEnded(verdict=e.Verdict()) if (step := fold.step(event.step)) is not None:
                last: Any = self.event(step.edited or step.intended)
                values = {**self._why(step), **self.data(step.edited or step.intended), **self.data(seq)}
                made = of_edit(step, last, values) if step.edited else of_step(last, values)
                return replace(made, by="agent")
            case e.ContextChanged(whole=False):
                return of_change(event, self.data(seq))
            case e.ContextRefused(verdict=e.Verdict()):
                return of_change(event, self.data(seq))
            case _:
                return None

    def _why(self, step: Step) -> dict[str, Any]:
        return {"because": self.data(step.intended).get("because")}

    def _judge(self, intention: Intention, event: e.Event, fold: Fold, ledger: Ledger) -> tuple[Ruling, str] | None:
        """Combines the verdicts of the contracts in force, the run's own first, and names the deciding one; None if
        there are none. A rejection takes precedence over an approval request."""
        asks: tuple[Ruling, str] | None = None
        people: Mapping[str, Sequence[str]] = {}
        accepts: tuple[Ruling, str] | None = None
        for of, digest, contract in self._in_force(fold):
            known = self._policy_input(of, intention, event, fold, ledger)
            ruling = contract.judge(intention, known)
            if ruling.ruling == "reject":
                return ruling, digest
            if ruling.ruling == "ask" and asks is None:
                asks, people = (ruling, digest), contract.people
            accepts = accepts or (ACCEPTED, digest)
        if asks is not None and intention.sort == "context":
            return of_the_context(asks[0], intention.by, people), asks[1]
        return asks or accepts

    def _in_force(self, fold: Fold) -> Iterator[tuple[str | None, str, Contract]]:
        """Returns the recorded contracts, the run's own first, or replaced by the other one."""
        bound = fold.facts.contracts
        if self._new is not None:
            yield None, self._new.digest, self._new
        for each in sorted(bound, key=lambda each: each.of is not None):
            if each.of is not None or self._new is None:
                yield each.of, each.digest, self._contract(each)

    def _contract(self, bound: ContractInForce) -> Contract:
        known = self._known.get(bound.digest)
        if known is None:
            known = self._known[bound.digest] = Contract.from_spec(self.data(bound.seq)["contract"])
        return known

    def _policy_input(
        self, of: str | None, intention: Intention, event: e.Event, fold: Fold, ledger: Ledger
    ) -> PolicyInput:
        data = self.data(self._recorded.seq)
        families: Mapping[str, Any] = data.get("others") or {}
        others = families.get(of or "")
        begins: Mapping[str, int] = data.get("since") or {}
        if isinstance(event, e.ContextChanged | e.ContextRefused):
            seen = event.saw if event.by == "agent" else fold.facts.context_version
        else:
            seen = self._seen
        known = policy_input(
            fold,
            ledger,
            self,
            now_us=event.at,
            seen=seen,
            base=self._head.base,
            others=None if others is None else convert(others, Others, at="others"),
            since_us=begins.get(of or ""),
            mine=(1, 1) if data.get("adopts") else self._own_counts(event, fold),
        )
        uppers: dict[str | None, dict[str, Any]] = data.get("above") or {}
        above = uppers.get(of)
        if above is not None:
            document: dict[str, Any] = above["document"]
            known.done, known.context = together(known.done, above), lambda: document
            known.context_version = known.context_seen = above["version"]
        if self._dearer and of is None:
            spend = replace(known.own.spend, cost_micros=known.own.spend.cost_micros + self._dearer)
            known.own = replace(known.own, spend=spend)
        return known

    def _own_counts(self, event: e.Event, fold: Fold) -> tuple[int, int]:
        """Returns how often an intention is already counted: as a call, and as an effect."""
        step = fold.step(event.step) if isinstance(event, e.StepEnded) else None
        if step is None:
            return 0, 0
        if step.sort == "child" or (step.sort == "tool" and step.effect is None):
            return 1, 1  # children and messages count as soon as they are intended
        is_open = step.status == "running" or (bool(step.attempts) and step.attempts[-1].outcome == "unknown")
        return int(bool(step.attempts)), int(is_open)

    def _change(self, then: e.Verdict | None, now: Ruling, contract: str) -> Change:
        event = self._recorded.event
        # A contract cannot waive an approval that the tool itself requires; a given approval is not requested again.
        is_asked = then is not None and then.ruling == "ask" and then.contract is None
        is_asked |= isinstance(event, e.StepEdited) and (event.step, event.digest) in self._agreed
        if is_asked and "reject" not in (now.ruling, then and then.ruling):
            return "same"
        if self._new is None:
            found = e.Verdict(ruling=now.ruling, rule=now.rule, code=now.code, contract=contract)
            return "same" if found == then else "differs"
        before = "accept" if then is None else then.ruling
        if before == now.ruling:
            return "same"
        return "stopped" if now.ruling == "reject" else "asked" if now.ruling == "ask" else "passed"

    # tracked state ----------------------------------------------------------------------------

    def _track(self, seq: int, event: e.Event, fold: Fold) -> None:
        """Tracks the context version that the code had seen, and the approvals so far."""
        if goes_back(event) or isinstance(event, e.RunForked):
            self._agreed.clear()
            self._seen = self._seen_in(fold)
        match event:
            case e.AttemptEnded(usage=e.Usage() as usage) if self._new is not None:
                self._dearer += self._cost(self._new, event, usage, fold) - usage.cost_micros
            case e.WaitClosed(how="answered") if (step := fold.step(event.step)) is not None and step.sort != "wait":
                last: Any = self.event(step.edited or step.intended)
                self._agreed.add((step.id, last.digest))
            case e.ContextChanged() if event.by == "agent" or event.whole or self._is_new_fork:
                self._seen = event.version
            case _:
                pass
        if self._seen != fold.facts.context_version and _is_end(seq, event, fold):
            # The code sees outside changes when its next step returns.
            self._seen = fold.facts.context_version
        # A fork's changes are visible before its code continues.
        made = (e.ContextChanged, e.StepOverridden, e.DecisionMade)
        self._is_new_fork = isinstance(event, e.RunForked) or (self._is_new_fork and isinstance(event, made))

    def _cost(self, contract: Contract, event: e.AttemptEnded, usage: e.Usage, fold: Fold) -> int:
        """Returns a model call's cost by a contract's prices: for the reported model, or the requested one."""
        cost = contract.prices.cost(usage)
        step = fold.step(event.step)
        if cost is None and step is not None:
            asked: Mapping[str, Any] = self.data(step.intended).get("arguments") or {}
            cost = contract.prices.cost(replace(usage, model=str(asked.get("model") or "")))
        return usage.cost_micros if cost is None else cost

    def _seen_in(self, fold: Fold) -> int:
        """Returns the context version that the code has seen where a timeline continues."""
        last = max((step.ended for step in fold.steps if step.sort != "scope"), default=0)
        for seq in reversed(fold.facts.context_parts):
            event = self.event(seq)
            if isinstance(event, e.ContextChanged) and (seq < last or event.by == "agent" or event.whole):
                return event.version
        return 0


def _is_end(seq: int, event: e.Event, fold: Fold) -> bool:
    """Returns whether a step of the agent returned with an event."""
    name: str | None = getattr(event, "step", None)
    step = None if name is None else fold.step(name)
    return step is not None and step.sort != "scope" and step.ended == seq
