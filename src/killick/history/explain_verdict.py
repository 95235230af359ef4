"""Explains a contract evaluation in sentences: the verdict and its rule, the approvers, their answers and edits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from killick.history.phrasing import Prose, entries_of, lasted, listed, sentence, who
from killick.history.timeline_parts import Edit, Step, Wait
from killick.model import events as e

DIGEST_CHARS = 8
"""The length of a displayed contract hash."""


class VerdictNarrator(Prose):
    """Writes about the verdicts and approvals before a step began."""

    contracts: Mapping[e.Digest, str]
    """The names of the recorded contracts, by hash."""

    def judged(self, step: Step) -> list[str]:
        """Returns the verdict, the questions and answers in order, and the result."""
        asked = [wait for wait in step.waits if wait.rule is not None]
        told = [self.verdict(step, step.verdict)] if step.verdict is not None and not asked else []
        turns = [(wait.opened.seq, self.asking(wait, before)) for before, wait in pairwise([None, *asked]) if wait]
        turns += [(edit.values.seq, self.editing(edit)) for edit in step.edits]
        for _, said in sorted(turns, key=lambda turn: turn[0]):
            told += said
        if step.last_verdict is not None:
            told.append(f"after that, {self.verdict(step, step.last_verdict)}")
        if step.is_skipped and step.failure is not None:
            told.append(f"it was {step.failure.message}")
        return [sentence(each) for each in told]

    def verdict(self, step: Step, verdict: e.Verdict) -> str:
        """Returns the verdict, its rule, and what would have been allowed."""
        contract = self.contract(verdict.contract)
        if verdict.ruling == "accept":
            return f"{contract} accepted it"
        if verdict.ruling == "ask":
            return f"{contract} wanted people to be asked, by its rule {self.quoted(verdict.rule)}"
        rule = f" by its rule {self.quoted(verdict.rule)}" if verdict.rule else ""
        failure = step.failure
        said = f": {self.whole(failure.message)}" if failure is not None else ""
        allowed = failure.details.get("allowed") if failure is not None else None
        would = f". What it would allow is {self.value(allowed)}" if allowed else ""
        return f"{contract} rejected it{rule} ({verdict.code}){said}{would}"

    def contract(self, digest: Any) -> str:
        """Returns a contract's name and hash prefix."""
        if not isinstance(digest, str):
            return "the tool itself"
        name = self.contracts.get(digest)
        return f"the contract {name} ({digest[:DIGEST_CHARS]})" if name else f"the contract {digest[:DIGEST_CHARS]}"

    # people -----------------------------------------------------------------------------------

    def asking(self, wait: Wait, before: Wait | None) -> Iterator[str]:
        """Describes an approval request: its rule and reason, its approvers, and their answers."""
        if before is not None and before.votes and before.how != "expired":
            yield "what had been agreed to until then counted no more"
        if before is None or (wait.rule, wait.reason) != (before.rule, before.reason):
            by = f", by its rule {self.quoted(wait.rule)}" if wait.contract else ""
            why = f": {self.whole(wait.reason)}" if wait.reason else ""
            yield f"{self.contract(wait.contract)} wanted people to be asked{by}{why}"
        names = f" ({listed(wait.may)})" if wait.may and set(wait.may) != set(wait.to) else ""
        again = "so it was passed on to" if before is not None and wait.round > before.round else "it was put to"
        need = f"; {wait.need} of them had to agree" if wait.need > 1 else ""
        until = f", until {self.time(wait.deadline)}" if wait.deadline is not None else ""
        yield f"{again} {listed(wait.to) or 'people'}{names} {self.when(wait.opened_at)}{until}{need}"
        for vote in wait.votes if wait.need > 1 else ():
            comment = f", with the words {self.whole(vote.comment)}" if vote.comment else ""
            yield f"{vote.by} agreed {self.when(vote.at)}{comment}"
        if (said := self.replied(wait)) is not None:
            yield said

    def replied(self, wait: Wait) -> str | None:
        """Describes how an approval request ended; edits and votes are described separately."""
        if wait.how is None:
            return None
        when = f"{self.when(wait.closed_at or wait.opened_at)}"
        when += f", after {lasted((wait.closed_at or wait.opened_at) - wait.opened_at)}"
        comment = f", with the words {self.whole(wait.comment)}" if wait.comment else ""
        if wait.how == "expired":
            return f"{'not enough of them' if wait.votes else 'none of them'} had answered {when}"
        if wait.how != "answered":
            return f"the question was given up {when}"
        answer = entries_of(wait.answer)
        kind = answer.get("kind")
        if kind == "respond":
            return f"{who(wait.by)} answered instead {when}: {self.value(answer.get('value'))}{comment}"
        if kind == "reject":
            return f"{who(wait.by)} said no {when}{comment}"
        return f"{who(wait.by)} agreed {when}{comment}" if kind == "approve" and wait.need == 1 else None

    def editing(self, edit: Edit) -> Iterator[str]:
        """Describes a person's edit."""
        pairs = entries_of(edit.changed).items()
        changes = listed([f"{name} from {self.value(old)} to {self.value(new)}" for name, (old, new) in pairs])
        comment = f", with the words {self.whole(edit.comment)}" if edit.comment else ""
        yield f"{edit.by} changed {changes or 'nothing'} {self.when(edit.at)}{comment}"
        if not edit.stands and edit.verdict is not None and edit.failure is not None:
            rule = self.quoted(edit.verdict.rule)
            yield f"that was rejected by the rule {rule}: {self.whole(edit.failure.message)}, and the question stood"
        elif edit.verdict is not None and edit.verdict.ruling == "accept" and edit.verdict.contract is not None:
            yield f"{self.contract(edit.verdict.contract)} accepted the changed call"

    def lacking(self, wait: Wait) -> str:
        """Describes what an open approval request still needs."""
        left, of = wait.need - len(wait.votes), listed(wait.to) or "people"
        until = ", or until its time is up" if wait.deadline is not None else ""
        more = f"{left} {'more ' * bool(wait.votes)}of {of} {'agrees' if left == 1 else 'agree'}"
        return f"Nothing is done until {more if wait.need > 1 else f'there is an answer from {of}'}{until}."
