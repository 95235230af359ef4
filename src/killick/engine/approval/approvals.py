"""Approvals: asks the approvers of an intention, and applies their answer: approve, reject, edit, or respond instead.

An approval covers these arguments under this contract only. After every answer the other rules are evaluated again, on
the current state. Every answer is recorded before it takes effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final, TypeVar

import msgspec

from killick.contracts.contract import Approval
from killick.definitions.parameters import Parameters, untag
from killick.definitions.tools import TOOLS, AnyTool, Shape
from killick.engine.approval.argument_edits import seen
from killick.engine.approval.call_answer import EXPIRED, INSTEAD, PERSON, CallAnswer, after_approval, after_edit
from killick.engine.approval.contracts_in_force import ApprovalGiven, AskingRule, Verdict, named, who_of
from killick.engine.approval.verdicts import PendingVerdict, approval_of, failed_by, rejection
from killick.engine.control.inbox import APPROVE, EDITED, STARTED
from killick.engine.execution import Branch, Execution
from killick.engine.replay import Record
from killick.engine.steps.intention import claim_text
from killick.engine.views import Wait
from killick.engine.waits.open_wait import Closed, Escalation, Waiter
from killick.engine.waits.waits import binding, deadline_us, dismiss, raise_if_intervened, until
from killick.errors import AnswerRefused, DeclarationRefused, Rejected, ValueRefused
from killick.log.writer import Entry
from killick.model import events as e
from killick.model.chunks import through_codec
from killick.model.codec import plain
from killick.model.facts import Step, intended_name

T = TypeVar("T")

VALUE_CHARS_MAX: Final = 80


# judging, with people ------------------------------------------------------------------------------


async def agreed(j: PendingVerdict, *, adopts: bool = False) -> None:
    """Judge a step that is not begun; where that says so, ask until everybody who has to agreed. Raises Rejected."""
    while True:
        verdict = j.judge(adopts=adopts)
        ruling = verdict.ruling.ruling
        if ruling != "ask":
            void(j)
        if ruling == "reject":
            await j.reject(verdict)
        if ruling == "accept":
            if not any(isinstance(entry.event, e.ContractBound) for entry in j.unwritten):
                j.unwritten[:0] = j.ex.judge.unbound()
            return
        await ApprovalQuestion(j, verdict).ask()


def void(j: PendingVerdict) -> None:
    """Close a question that the current rules no longer ask. Later answers to it do not count."""
    wait = j.ex.log.fold.facts.waits.get(j.step)
    if wait is not None and wait.rule is not None:
        j.ex.write_behind(j.ex.wait_closed(j.step, "voided"))
        dismiss(j.ex, j.step, wait.opened)


class ApprovalQuestion:
    """One question about one intention, until it is answered or everybody's time was up."""

    def __init__(self, j: PendingVerdict, verdict: Verdict) -> None:
        self.j = j
        self.ex = j.ex
        self.verdict = verdict
        self.approval = verdict.ruling.approval or Approval()
        self.waiter: Waiter | None = None
        self.is_cancelled = False
        """Whether the code gave up while the question was written."""
        self.failure: Any = None

    async def ask(self) -> None:
        j, ex = self.j, self.ex
        waiter = self.waiter = await self._opened()
        try:
            if self.is_cancelled:
                raise asyncio.CancelledError
            closed = await until(ex, waiter)
        except asyncio.CancelledError:
            await ex.raise_if_closing()
            ex.refuse(j.branch)
            if ex.is_outside:
                raise  # the question stays open: the external caller may repeat the call
            await ex.recorded(ex.write_behind(ex.wait_closed(j.step, "cancelled"), ex.step_ended(j.step, "cancelled")))
            raise
        if closed.how == "cancelled":
            ex.write_behind(ex.step_ended(j.step, "cancelled"))
            ex.refuse(j.branch)
        if self.failure is not None:
            await ex.recorded(closed.seq)
            raise Rejected(j.step, j.intent.name, self.failure)
        if closed.answer["kind"] == "approve":
            # They approved the rules of that time, though more rules may require approval by now.
            shown: dict[str, Any] = dict(waiter.asked.values or {}) if waiter.asked is not None else {}
            j.agreements.add(self._agreement(covered(shown)))
            j.answer = after_approval(j.answer, closed.by, closed.comment)

    def _asked_now(self) -> e.WaitOpened | None:
        """The latest form of the question, which may have been escalated."""
        asked = None if self.waiter is None or self.waiter.asked is None else self.waiter.asked.event
        return asked if isinstance(asked, e.WaitOpened) else None

    def _agreement(self, covers: frozenset[AskingRule]) -> ApprovalGiven:
        j, judge, asked = self.j, self.ex.judge, self._asked_now()
        who = who_of(judge.people(self.verdict.contract), self.approval.to if asked is None else asked.to)
        need = self.approval.need if asked is None else asked.need
        return ApprovalGiven(who, need, covers, j.bound, judge.mark, self.approval.separate)

    # asking -----------------------------------------------------------------------------------

    async def _opened(self) -> Waiter:
        """The wait, as it is on record or as it is put there now."""
        j, ex = self.j, self.ex
        raise_if_intervened(ex, j.step)
        wait = ex.log.fold.facts.waits.get(j.step)
        if wait is not None:
            await ex.barrier()
            event: Any = ex.engine.log.event(ex.run_id, wait.opened)
            values = dict(ex.engine.log.data(ex.run_id, wait.opened))
            if event.digest == self._binding(values["prompt"], event.rule):
                return self._waiter(event, values, wait.opened, votes=wait.votes, channels=dict(wait.channels))
            # The contract or its requirement has changed: earlier votes do not count.
            void(j)
        entries = [*ex.judge.unbound(), *j.written(), *self._asked(self._prompt())]
        at, self.is_cancelled = await ex.write(*entries)
        opened: Any = entries[-1].event
        return self._waiter(opened, dict(entries[-1].values or {}), at)

    def _prompt(self) -> str:
        ruling, intent = self.verdict.ruling, self.j.intent
        given = ", ".join(f"{name}={short_value(value)}" for name, value in intent.recording.items())
        call = f"{self.name}({given})"
        reason = self._reason or ruling.message or f"{self.ex.run_id} wants to do this"
        because = f" The agent's reason: {intent.policy.because}." if intent.policy.because else ""
        return f"{call}: {reason}.{because} Do it?"

    @property
    def _reason(self) -> str:
        """Why it is asked, in the words of the approval or of the rules that require it."""
        why = dict.fromkeys(message for _, message in self.verdict.asks if message)
        return self.approval.prompt or "; ".join(why)

    @property
    def name(self) -> str:
        """The intention in question, as rules see it."""
        return intended_name(self.j.intent.sort, self.j.intent.name)

    def _asked(self, prompt: str, turn: int = 0) -> list[Entry]:
        """The question for the record: to its first addressees, or to those of escalation `turn`."""
        j, ex, approval = self.j, self.ex, self.approval
        now = ex.now_us()
        rule = str(self.verdict.ruling.rule)
        to, timeout = approval.to, approval.timeout
        if turn:
            to, timeout = approval.escalate[turn - 1].to, approval.escalate[turn - 1].timeout
        opened = e.WaitOpened(
            at=now, step=j.step, waits_for="answer", name=APPROVE, to=to, need=approval.need, rule=rule, round=turn,
            deadline=deadline_us(now, timeout), digest=self._binding(prompt, rule),
        )  # fmt: skip
        values: dict[str, Any] = {
            "prompt": prompt,
            "intention": {"tool": self.name, "arguments": j.intent.recording},
            "verbs": ["approve", "reject", *(("edit",) if j.intent.shape is not None else ()), "respond"],
            "contract": None if self.verdict.contract is None else self.verdict.contract.digest,
            "under": ex.judge.mark,
            "generation": ex.generation,
            "covers": [list(rule) for rule, _ in self.verdict.asks],
            **({"paths": dict(j.paths)} if j.paths else {}),
        }
        if j.intent.shape is not None and (parameters := _parameters(TOOLS.get(j.intent.name))) is not None:
            values["schema"] = parameters.schema
        if (may := self._may(to)) is not None:
            values["may"] = may
        if approval.separate:
            values["apart"] = dict.fromkeys(ex.log.fold.facts.starters, STARTED) | dict.fromkeys(j.editors, EDITED)
        if self._reason:
            values["reason"] = self._reason
        return [Entry(opened, values)]

    def _may(self, to: Sequence[str]) -> list[str] | None:
        """Who may answer, by name, where a contract says who is who."""
        return named(self.ex.judge.people(self.verdict.contract), to)

    def _binding(self, prompt: Any, rule: str | None) -> e.Digest:
        j, ex = self.j, self.ex
        same = rule == self.verdict.ruling.rule
        return binding(
            ex.log.secret_key, ex.run_id, ex.generation, j.step, "answer",
            tool=j.intent.name, arguments=e.to_text(j.bound), prompt=prompt, contract=ex.judge.mark,
            rule=rule if same else None, to=list(self.approval.to), need=self.approval.need,
            **({"separate": True} if self.approval.separate else {}),
        )  # fmt: skip

    def _waiter(self, event: e.WaitOpened, values: Mapping[str, Any], opened: int, **more: Any) -> Waiter:
        self.ex.asked_of[self.j.step] = event.to, values.get("may")
        rounds = [Escalation(each.to, each.timeout, self._may(each.to)) for each in self.approval.escalate]
        return Waiter.of(
            Entry(event, dict(values)), opened, then=self._then, fits=self._fits,
            rounds=tuple(rounds[event.round :]), **more,
        )  # fmt: skip

    # their answers ----------------------------------------------------------------------------

    def _fits(self, kind: str, value: Any) -> Any:
        """Check an edit: arguments by name, as the tool accepts them, under the same rules."""
        if kind != "edit":
            return value
        try:
            twin = copy(self.j.intent)
            twin.edit(edited(self.j, value), self.j.step, self.ex.log.secret_key)
            approval_of(twin)
        except ValueRefused:
            raise
        except Exception as error:
            raise ValueRefused("edit", f"the tool cannot take it ({type(error).__name__}: {error})") from error

    def _then(self, closed: Closed) -> tuple[list[Entry], dict[str, Any]]:
        """The events that follow from an answer, in the same commit."""
        j, ex = self.j, self.ex
        answer: dict[str, Any] = closed.answer or {}
        kind = "expired" if closed.how == "expired" else answer.get("kind")
        if closed.how in ("cancelled", "voided") or kind == "approve":
            return [], {}
        if kind == "edit":
            return self._edited(closed), {}
        by, details = closed.by, {"by": closed.by, "comment": closed.comment, "rule": self.verdict.ruling.rule}
        details["name"] = self.name if self.name != j.intent.name else None
        if kind == "expired":
            self.failure = failed_by("it was not approved in time", code=EXPIRED, **details)
        elif kind == "respond":
            value = answer.get("value")
            said = f" ({closed.comment})" if closed.comment else ""
            words = value if isinstance(value, str) else json.dumps(untag(plain(value)), ensure_ascii=False)
            text = f"{by or 'a person'} answered instead: {words}{said}"
            self.failure = failed_by(text, code=INSTEAD, response=value, **details)
        else:
            said = f": {closed.comment}" if closed.comment else ""
            self.failure = failed_by(f"{by or 'a person'} said no{said}", code=PERSON, **details)
        event = e.StepEnded(at=ex.now_us(), step=j.step, outcome="failed", by=by or "killick")
        return [Entry(event, {"failure": self.failure})], {}

    def _edited(self, closed: Closed) -> list[Entry]:
        """A person's edit is their own intention: judged as any other, and it replaces the original."""
        j, ex, by = self.j, self.ex, closed.by or "a person"
        before = copy(j.intent)
        changed = j.intent.edit(edited(j, closed.answer["value"]), j.step, ex.log.secret_key)
        verdict = j.judge(by=by)
        event = e.StepEdited(
            at=verdict.at, step=j.step, by=by, digest=e.to_text(j.intent.digest),
            identity=j.intent.identity_text, effect=j.intent.effect, verdict=verdict.event,
        )  # fmt: skip
        values: dict[str, Any] = {"arguments": j.intent.recording, "changed": changed, **verdict.rests_on}
        if closed.comment:
            values["comment"] = closed.comment
        if verdict.ruling.ruling == "reject":
            failure = rejection(verdict.ruling, verdict.contract)
            j.intent.restore(before)
            note = f"{by}'s edit was rejected by rule {verdict.ruling.rule!r} ({failure.message}); it stays open"
            return [Entry(event, {**values, "failure": failure}), ex.noted(note, j.step), *self._again()]
        j.answer = after_edit(j.answer, by, closed.comment, changed)
        j.editors[by] = None
        if not self._asks_the_same(verdict):
            return [Entry(event, values)]
        # Earlier votes were for other arguments. Unless duties are separate, an edit is an approval by its author.
        self.verdict = verdict
        if self.approval.separate:
            asked = self._asked_now()
            return [Entry(event, values), *self._asked(self._prompt(), 0 if asked is None else asked.round)]
        if self.approval.need <= 1:
            j.agreements.add(self._agreement(frozenset(rule for rule, _ in verdict.asks)))
            return [Entry(event, {**values, "grants": verdict.ruling.rule})]
        voted = Entry(e.WaitVoted(at=ex.now_us(), step=j.step, by=by, channel=closed.channel))
        asked = self._asked_now()
        return [Entry(event, values), *self._asked(self._prompt(), 0 if asked is None else asked.round), voted]

    def _again(self) -> list[Entry]:
        """The latest question again, with the same addressees and deadline."""
        asked = self._asked_now()
        if asked is None or self.waiter is None or self.waiter.asked is None:
            return []
        return [Entry(msgspec.structs.replace(asked, at=self.ex.now_us(), data=None), self.waiter.asked.values)]

    def _asks_the_same(self, verdict: Verdict) -> bool:
        """Whether the same rule asks the same approvers about the edited call."""
        approval = verdict.ruling.approval
        if verdict.ruling.ruling != "ask" or approval is None:
            return False
        same = (verdict.contract, verdict.ruling.rule) == (self.verdict.contract, self.verdict.ruling.rule)
        nobody = not approval.to and approval.need <= self.approval.need
        same = same and approval.separate == self.approval.separate
        return same and (nobody or (approval.to, approval.need) == (self.approval.to, self.approval.need))


def short_value(value: Any) -> str:
    """An argument in a prompt, shortened by itself, so that none hides another."""
    text = seen(ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value))
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}… ({len(text)} characters)"


def edited(j: PendingVerdict, value: Any) -> dict[str, Any]:
    """A person's edit as the tool's arguments: all of them, with those that it names changed."""
    changes = _changes(TOOLS.get(j.intent.name), j.intent.name, j.intent.shape, value)
    assert j.intent.shape is not None
    return j.intent.shape.restore({**j.intent.recording, **changes}, j.intent.arguments)


def _changes(tool: AnyTool | None, name: str, shape: Shape | None, value: Any) -> dict[str, Any]:
    """The arguments that an edit names, as the tool takes them."""
    if shape is None or not isinstance(value, dict):
        raise ValueRefused("edit", 'must give arguments by name, such as {"amount": 100}')
    changes: dict[str, Any] = {**value}
    if unknown := shape.unknown_parameters(changes.keys()):
        raise ValueRefused(f"edit.{unknown[0]}", f"is not an argument of {name} ({', '.join(shape.hints)})")
    changes, parameters = through_codec(changes, at="edit"), _parameters(tool)
    # An approver's text becomes a value of a type that JSON lacks, such as a date.
    return changes if parameters is None else {name: parameters.fitted(name, changes[name]) for name in changes}


def _parameters(tool: AnyTool | None) -> Parameters | None:
    """The parameters of a tool, as a form shows them; None if they cannot be described."""
    try:
        return None if tool is None else Parameters(tool)
    except DeclarationRefused:
        return None


def refuse_misfit(wait: Wait, value: Any) -> None:
    """Refuse an edit that the tool would not accept, while the approver can still correct it."""
    intention: dict[str, Any] = wait.intention or {}
    tool = TOOLS.get(intention.get("tool", ""))
    if tool is not None or not isinstance(value, dict):
        try:
            shape = None if tool is None else tool.shape
            changes = _changes(tool, wait.name if tool is None else tool.name, shape, value)
            assert shape is not None
            shape.restore(changes, {})
        except (ValueRefused, UnicodeError) as refused:
            raise AnswerRefused(wait.id, str(refused)) from None


# from the record -----------------------------------------------------------------------------------


def restore_answers(j: PendingVerdict, past: Step) -> None:
    """Restore the recorded approvals and edits of a step after a crash."""
    record, intent = j.ex.record, j.intent
    asked: e.WaitOpened | None = None
    data: dict[str, Any] = {}
    for seq, event in record.of_all(past.id):
        if isinstance(event, e.WaitOpened):
            asked, data = event, record.data(seq)
            if event.rule is not None:
                j.ex.asked_of[past.id] = event.to, data.get("may")
        elif (answer := _after(j.answer, record, seq, event)) is not None:
            j.answer, values = answer, record.data(seq)
            if isinstance(event, e.StepEdited):
                j.editors[event.by] = None
            if isinstance(event, e.StepEdited) and intent.shape is not None:
                intent.edit(intent.shape.restore(values["arguments"], intent.arguments), past.id, j.ex.log.secret_key)
            if asked is not None and (isinstance(event, e.WaitClosed) or values.get("grants")):
                _restore_approval(j, asked, data)


def _after(before: CallAnswer | None, record: Record, seq: int, event: e.Event) -> CallAnswer | None:
    """The answer after an approval or an edit that is on record; None for any other event."""
    if isinstance(event, e.StepEdited) and (event.verdict is None or event.verdict.ruling != "reject"):
        data = record.data(seq)
        return after_edit(before, event.by, data.get("comment"), data.get("changed") or {})
    if isinstance(event, e.WaitClosed) and kind_of(data := record.data(seq)) == "approve":
        return after_approval(before, event.by, data.get("comment"))
    return None


def _restore_approval(j: PendingVerdict, asked: e.WaitOpened, data: Mapping[str, Any]) -> None:
    if asked.rule is not None and data.get("generation", 0) == j.ex.generation:
        who = tuple(data.get("may") or sorted(asked.to))
        j.paths = data.get("paths") or {}
        j.agreements.add(ApprovalGiven(who, asked.need, covered(data), j.bound, data.get("under"), "apart" in data))


def covered(data: Mapping[str, Any]) -> frozenset[AskingRule]:
    """The rules that a question was put for, as it is on record."""
    return frozenset(AskingRule(contract, rule) for contract, rule in data.get("covers") or ())


def kind_of(data: Mapping[str, Any]) -> str | None:
    """The kind of answer that ended a wait; None if no person ended it."""
    answer: Any = data.get("answer")
    return answer.get("kind") if isinstance(answer, dict) else None  # pyright: ignore


def replayed(ex: Execution, branch: Branch, past: Step) -> None:
    """Give the agent the recorded answers to a step that is over."""
    branch.answer = None
    for seq, event in ex.record.of_all(past.id) if past.sort != "wait" else ():
        branch.answer = _after(branch.answer, ex.record, seq, event) or branch.answer


async def intend(judged: PendingVerdict, past: Step | None, *, adopts: bool) -> None:
    """The intention of a step that is no call: judged, and durable before anything is done."""
    if past is None:
        judged.intended()
    else:
        restore_answers(judged, past)
    if judged.concerns_rules:
        await agreed(judged, adopts=adopts)
    if judged.unwritten and isinstance(judged.unwritten[-1].event, e.StepIntended):
        *before, (event, values) = judged.written()
        claims = () if adopts else judged.slots
        intended = msgspec.structs.replace(event, claims=tuple(map(claim_text, claims)))
        await judged.ex.write(*before, Entry(intended, values), claims=claims)
