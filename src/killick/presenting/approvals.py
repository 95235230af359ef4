"""Approvals: the call that is to be approved, the rule and the approvers, their votes, and their edits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from killick.client.inbox import addressees, agreement, missing_approvals
from killick.engine import views
from killick.engine.approval.argument_edits import ARGUMENT_CHARS, call, seen, shown
from killick.engine.control.inbox import APPROVE, may_answer, separated
from killick.history.phrasing import entries_of, inline, listed, process
from killick.history.timeline_parts import Edit, Step, Wait
from killick.model.codec import Erased
from killick.presenting.phrase import Phrase, remark
from killick.store.protocol import is_held

if TYPE_CHECKING:
    from killick.client.client import Client


def by_rule(rule: str | None) -> str:
    """The rule that requires an approval; nothing where the tool itself requires it."""
    return f"rule {rule}" if rule is not None and rule != APPROVE else ""


def asked_lines(step: Step) -> Iterator[Phrase]:
    """The approvals that were asked for before a step was executed, and the edits made to its call, in order."""
    asked = [wait for wait in step.waits if wait.rule is not None]
    entries = [(wait.opened.seq, _asked(wait, before)) for before, wait in pairwise([None, *asked]) if wait is not None]
    entries += [(edit.values.seq, edited(edit)) for edit in step.edits if edit.stands]
    yield from (line for _, line in sorted(entries, key=lambda each: each[0]))


def _asked(wait: Wait, before: Wait | None) -> Phrase:
    then = "then " * (before is not None and wait.round > before.round)
    verb = f"{then}{'asks' if wait.how is None else 'asked'}"
    rule = f" by {by_rule(wait.rule)}" if by_rule(wait.rule) and not then else ""
    said = Phrase(f"{verb} {', '.join(wait.to) or 'people'}{rule}", "strong" if wait.how is None else "")
    outcome = _outcome(wait)
    return said.add(": ", "quiet").join(outcome) if outcome is not None else said


def _outcome(wait: Wait) -> Phrase | None:
    """How an approval ended, in a few words; an edit has a line of its own."""
    voters, answer = [vote.by for vote in wait.votes], entries_of(wait.answer)
    kind, by = str(answer.get("kind")), wait.by or "a person"
    if wait.how is None:
        return Phrase(agreement(wait.need, voters)) if voters else None
    if wait.how == "expired":
        return Phrase(f"{agreement(wait.need, voters)}, then " * bool(voters) + "no answer in time", "warning")
    if wait.how != "answered":
        return Phrase("withdrawn", "quiet")
    if isinstance(wait.answer, Erased):
        return Phrase(f"{by}: {wait.answer}", "quiet")
    if kind == "approve":
        names = voters if wait.need > 1 else [by]
        return Phrase(f"{', '.join(names)} approved", "good").add(remark(wait.comment), "quote")
    if kind == "edit":
        return Phrase(f"{', '.join(voters)} approved", "quiet") if voters else None
    before = f"{', '.join(voters)} approved, " if voters else ""
    if kind == "respond":
        value = answer.get("value")
        text = value if isinstance(value, str) else inline(value)
        return Phrase(f"{before}{by} answered instead: ", "warning").add(f"{text}{remark(wait.comment)}", "quote")
    return Phrase(f"{before}{by} rejected it", "bad").add(remark(wait.comment), "quote")


def edited(edit: Edit) -> Phrase:
    """An edit of a call: edited by mia: amount 5000 → 1000."""
    return Phrase(f"edited by {edit.by}: ", "change").add(changes(edit.changed)).add(remark(edit.comment), "quote")


def changes(changed: Any) -> str:
    """Each argument with its old and its new value."""
    pairs: Mapping[str, Any] = entries_of(changed)
    texts = (f"{name} {_value(old)} → {_value(new)}" for name, (old, new) in pairs.items())
    return ", ".join(texts) or "nothing"


def _value(value: Any) -> str:
    return seen(value) if isinstance(value, str) and len(value) <= ARGUMENT_CHARS else shown(value)


def ended_lines(step: Step) -> Iterator[Phrase]:
    """Why a step ended before its first attempt: a rule rejected it, or a person skipped it."""
    failure = step.failure
    if step.rejected is not None and failure is not None:
        rule = f"rule {step.rejected.rule}" if step.rejected.rule else "the contract"
        yield Phrase(f"rejected by {rule}: ", "bad").add(failure.message)
    elif step.is_skipped and failure is not None:
        yield Phrase(failure.message, "change")


def passed_on(step: Step | None) -> str:
    """The people whose time to answer ran out before an open question was escalated."""
    asked = step.waits if step is not None else ()
    before = [name for wait in asked if wait.how == "expired" and wait.rule is not None for name in wait.to]
    return f"escalated from {listed(list(dict.fromkeys(before)))}" if before else ""


def why_not(client: Client, wait: views.Wait, person: str | None) -> str | None:
    """Why a person cannot answer a wait; None where they can. Where several approvals are needed, each counts once."""
    if not may_answer(person, wait, wait.may, client.runtime.engine.roles):
        return f"it is asked of {addressees(wait.to, wait.may)}"
    if (why := separated(wait.apart, person, "approve", is_call=wait.rule is not None)) is not None:
        return why
    if person is not None and person in wait.votes:
        return f"{person} approved it already"
    if wait.is_agreed:
        return "it has all the approvals it needs"
    if person is None and wait.need > 1:
        return "it needs approvals from several people; say who you are"
    if wait.deadline_us is not None and wait.deadline_us < client.runtime.clock.now_us():
        return "its deadline is over; the run continues without an answer"
    return None


def voters(wait: views.Wait, by: str | None, verb: str) -> tuple[str, ...]:
    """The people who approved a call that needs several approvals, after an answer; none after any other answer."""
    return tuple(dict.fromkeys((*wait.votes, str(by)))) if wait.need > 1 and verb == "approve" else ()


def lacks(wait: views.Wait, by: str | None, verb: str) -> str | None:
    """The approvals that are missing after an answer; None where it has all that it needs."""
    found = voters(wait, by, verb)
    return missing_approvals(wait, found) if found and len(found) < wait.need else None


def continues(client: Client, run: str, otherwise: str) -> str:
    """The process that has a run and continues it; `otherwise` where none has it."""
    head = client.runtime.store.head(run)
    if head is None or not is_held(client.runtime.store, head):
        return otherwise
    return f"{process(head.holder or '')} has {run}, and continues it"


def answered(wait: views.Wait, verb: str, value: Any) -> str:
    """The call that was answered, and how an edit changed it; nothing where a question is no call."""
    if wait.rule is None:
        return f" {shown(value, 60)}" if verb == "respond" else ""
    edit = ", ".join(f"{name}={shown(each, 60)}" for name, each in value.items()) if verb == "edit" else ""
    return f" {call(wait.intention)}" + (f" with {edit}" if edit else "")
