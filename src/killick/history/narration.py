"""Describes a step's course in sentences: verdicts, approvals, attempts, unknown outcomes, questions, answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import tzinfo
from itertools import pairwise
from typing import Any, Final

from killick.history.phrasing import NOT_RETRIED, Prose, counted, entries_of, listed, ordinal, period, sentence, who
from killick.history.timeline_parts import Attempt, Edit, Settled, Step, Wait
from killick.model import events as e
from killick.model.failure import Failure

DIGEST_CHARS = 8
"""The length of a displayed contract hash."""


class VerdictNarrator(Prose):
    """Writes about the verdicts and approvals before a step began."""

    contracts: Mapping[e.Digest, str]
    """The names of the recorded contracts, by hash."""

    def judged(self, step: Step) -> list[str]:
        """Returns the verdict, the questions and answers in order, and the result."""
        asked = [wait for wait in step.waits if wait.rule is not None]
        sentences = [self.verdict(step, step.verdict)] if step.verdict is not None and not asked else []
        turns = [(wait.opened.seq, self.asking(wait, before)) for before, wait in pairwise([None, *asked]) if wait]
        turns += [(edit.values.seq, self.editing(edit)) for edit in step.edits]
        for _, said in sorted(turns, key=lambda turn: turn[0]):
            sentences += said
        if step.last_verdict is not None:
            sentences.append(f"after that, {self.verdict(step, step.last_verdict)}")
        if step.is_skipped and step.failure is not None:
            sentences.append(f"it was {step.failure.message}")
        return [sentence(each) for each in sentences]

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
            yield "the earlier approvals no longer counted"
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
        when += f", after {period((wait.closed_at or wait.opened_at) - wait.opened_at)}"
        comment = f", with the words {self.whole(wait.comment)}" if wait.comment else ""
        if wait.how == "expired":
            return f"{'not enough of them' if wait.votes else 'none of them'} had answered {when}"
        if wait.how != "answered":
            return f"the question was cancelled {when}"
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
            yield f"that was rejected by the rule {rule}: {self.whole(edit.failure.message)}; the question is open"
        elif edit.verdict is not None and edit.verdict.ruling == "accept" and edit.verdict.contract is not None:
            yield f"{self.contract(edit.verdict.contract)} accepted the changed call"

    def missing_approvals(self, wait: Wait) -> str:
        """Describes what an open approval request still needs."""
        left, of = wait.need - len(wait.votes), listed(wait.to) or "people"
        until = ", or until its time is up" if wait.deadline is not None else ""
        more = f"{left} {'more ' * bool(wait.votes)}of {of} {'agrees' if left == 1 else 'agree'}"
        return f"Nothing is done until {more if wait.need > 1 else f'there is an answer from {of}'}{until}."


ATTEMPTS_MAX: Final = 6
"""Of more attempts, only the first two and the last two are described."""

_VERBS: Final = {
    "approve": "approved it", "reject": "rejected it", "happened": "said that it had happened",
    "not": "said that it had not happened", "stop": "said to stop",
}  # fmt: skip


class StepNarrator(VerdictNarrator):
    """Describes how steps went."""

    def __init__(self, zone: tzinfo | None, chars: int, text_of: Callable[[Any], str | None]) -> None:
        super().__init__(zone, chars)
        self.text_of = text_of

    def narrate(self, step: Step) -> list[str]:
        out = [f"It was delayed until {self.time(delay.until)}: {delay.because}" for delay in step.delays[:3]]
        out += self.tried(step)
        for wait in (wait for wait in step.waits if wait.rule is None):
            if step.sort != "wait":
                out.append(self.asked(wait))
            if wait.how is not None:
                out.append(f"{'It' if step.sort == 'wait' else 'This'} {self.answered(wait)}")
        if step.sort == "scope":
            out += self.branches(step)
        if step.adopted is not None:
            out.append(f"It was not done again, because the run {step.adopted.run} had done the same before")
            out.append(f"What that had returned was taken: {self.value(step.output)}")
        if step.overridden_by is not None:
            because = step.overriding.get("because")
            words = f", with the words {self.whole(because)}" if because else ""
            out.append(f"Its result was given by hand, by {step.overridden_by}: {self.value(step.output)}{words}")
        if step.confirmed is not None:
            out.append(f"The world was looked at afterwards, and {'showed' if step.confirmed else 'did not show'} it")
        if step.drifts:
            out.append("Later the code asked for this step with other arguments; the result on record was kept")
        out += [f"A note of {who(note.by)} says: {self.value(note.note)}" for note in step.notes]
        return [sentence(each) for each in out]

    # attempts ---------------------------------------------------------------------------------

    def tried(self, step: Step) -> list[str]:
        sentences: list[str] = []
        last = len(step.attempts) - 1
        for index, attempt in enumerate(step.attempts):
            if last >= ATTEMPTS_MAX and 2 <= index < last - 1:
                left_out = counted(last - 3, "more attempt")
                sentences += [f"After that, {left_out} did not succeed either"] if index == 2 else []
            else:
                sentences += self.attempt(step, attempt, step.attempts[index - 1] if index else None)
        return sentences

    def attempt(self, step: Step, attempt: Attempt, before: Attempt | None) -> list[str]:
        name = (
            "it" if len(step.attempts) == 1 else f"{ordinal(attempt.number)} began {self.when(attempt.started_at)} and"
        )
        if before is not None and before.ended_at is not None and attempt.started_at - before.ended_at >= 1_000:
            name = f"after a pause of {period(attempt.started_at - before.ended_at)}, {name}"
        if attempt.ended_at is None:
            return self.interrupted(step, attempt, name)
        took = period(attempt.ended_at - attempt.started_at)
        if attempt.outcome == "returned":
            sentences = [f"{name} {self.returned(step)} after {took}"]
            return sentences + (
                [f"The model's own reasoning was {self.quoted(attempt.reasoning)}"] if attempt.reasoning else []
            )
        failure = attempt.failure
        again = before is not None and failure is not None and alike(before.failure, failure)
        error = " in the same way" if again else f" with {self.named(failure)}" if failure is not None else ""
        sentences = [f"{name} {self.ended(attempt, took)}{error}"]
        sentences += self.error(failure) if failure is not None and not again else []
        if attempt.progress is not None:
            sentences.append(f"It had got as far as {self.value(attempt.progress)}")
        if attempt.outcome == "refused" and not attempt.limited and step.effect not in ("reads", None):
            sentences.append("Nothing had been done by it")
        if attempt.outcome == "unknown" and step.effect in ("at_most_once", "transaction"):
            sentences.append("Whether it had happened was not known")
        if attempt.not_retried is not None:
            sentences.append(f"It was not retried automatically: {NOT_RETRIED[attempt.not_retried]}")
        return sentences + self.settled(step, attempt.settled)

    def interrupted(self, step: Step, attempt: Attempt, name: str) -> list[str]:
        """Describes an attempt without a recorded end."""
        begun = f"it was begun {self.when(attempt.started_at)}" if name == "it" else name.removesuffix(" and")
        if not attempt.died:
            return [begun]
        sentences = [f"{begun}, and its process died before it ended"]
        if step.effect == "transaction":
            sentences.append("Nothing of it had happened, for its rows are kept together with its outcome")
        elif step.effect not in ("reads", None):
            sentences.append("Whether it had happened was not known")
        return sentences + self.settled(step, attempt.settled)

    def ended(self, attempt: Attempt, took: str) -> str:
        if attempt.limited:
            return f"was turned away by a rate limit after {took}"
        if attempt.failure is not None and attempt.failure.kind == "timeout":
            return f"ran out of time after {took}"
        return f"{'was refused' if attempt.outcome == 'refused' else 'failed'} after {took}"

    def returned(self, step: Step) -> str:
        if step.sort == "model":
            return f"answered {self.reply(step)}"
        return "was done" if step.sort == "undo" else f"returned {self.value(step.output)}"

    def reply(self, step: Step) -> str:
        try:
            text = self.text_of(step.output)
        except Exception:  # a reply may have any shape; one that cannot be parsed is shown as it is
            text = None
        return self.quoted(text) if text else self.value(step.output)

    def settled(self, step: Step, settled: Settled | None) -> list[str]:
        """Describes how an unknown outcome was resolved, unless an answer says so itself."""
        if settled is None or is_answered(step, settled):
            return []
        known = {"happened": "that it had happened", "did_not_happen": "that it had not happened", "stopped": "to stop"}
        words = f", with the words {self.whole(settled.because)}" if settled.because else ""
        by = "its result came late" if settled.by == "late result" else f"{who(settled.by)} said so{words}"
        return [f"It was settled {self.when(settled.at)} {known[settled.how]}: {by}"]

    # waits ------------------------------------------------------------------------------------

    def asked(self, wait: Wait) -> str:
        """Describes a question within another kind of step."""
        if wait.waits_for == "settlement":
            return f"People were asked {self.when(wait.opened_at)} whether it had happened"
        return f"People were asked {self.when(wait.opened_at)}: {self.whole(wait.prompt or wait.name)}"

    def answered(self, wait: Wait) -> str:
        """Describes how a wait ended, after its name."""
        when = self.when(wait.closed_at or wait.opened_at)
        after = f"{when}, after {period((wait.closed_at or wait.opened_at) - wait.opened_at)}"
        if wait.how == "expired":
            counts = f", so {self.value(wait.default)} counted" if wait.default is not None else ""
            return f"was over {when}" if wait.waits_for == "time" else f"ran out unanswered {after}{counts}"
        if wait.how == "skipped":
            said = f", with the words {self.whole(wait.comment)}" if wait.comment else ""
            return f"was skipped by {who(wait.by)} {after}{said}"
        if wait.how in ("cancelled", "voided"):
            return f"was cancelled {after}"
        answer = entries_of(wait.answer)
        if wait.waits_for == "child":
            return f"was over {after}: the run {wait.name} ended as {answer.get('status')}"
        if wait.waits_for == "event":
            return f"was over {after}: {who(wait.by)} sent {self.value(wait.answer)}"
        verb, value = str(answer.get("kind")), self.value(answer.get("value"))
        said = _VERBS.get(verb, f"answered {value}" if verb == "respond" else f"changed it to {value}")
        comment = f" and added {self.whole(wait.comment)}" if wait.comment else ""
        return f"was answered {after}: {who(wait.by)} {said}{comment}"

    # scopes -----------------------------------------------------------------------------------

    def branches(self, step: Step) -> list[str]:
        """Describes the outcomes of a scope, branch by branch."""
        last: dict[str, Step] = {}
        for entry in step.entries:
            if isinstance(entry, Step):
                last[entry.number.rpartition(".")[0]] = entry
        return [
            f"{'branch ' + branch.rpartition('.')[2] if branch != step.number else 'it'} got to step {each.number} "
            f"({self.short(each)}), which {self.outcome(each)}"
            for branch, each in sorted(last.items(), key=lambda item: [int(part) for part in item[0].split(".")])
        ]

    def short(self, step: Step) -> str:
        """Returns a step in a few words."""
        match step.sort:
            case "decision" if step.decision is not None:
                return f"the decision {self.quoted(step.decision.question)}"
            case "wait" if step.waits:
                wait = step.waits[0]
                return f"the question {self.quoted(wait.prompt)}" if wait.prompt else f"the wait for {wait.name}"
            case "model":
                return self.model(step)
            case "undo":
                return f"undoing step {step.undoes}"
            case "child":
                return f"a run of {step.name}"
            case _:
                return step.name

    def model(self, step: Step) -> str:
        named: Any = step.usage.model if step.usage is not None else ""
        asked = entries_of(step.arguments).get("model")
        return f"the model {named or asked}" if named or isinstance(asked, str) else f"a model ({step.name})"

    def outcome(self, step: Step) -> str:
        """Describes a step's outcome, after its name."""
        if not step.is_over:
            return "is not over yet"
        if step.status == "cancelled":
            return "was cancelled"
        if step.status == "failed" and step.failure is not None and not step.attempts:
            if step.failure.type == "killick.Rejected":
                return f"was rejected: {self.quoted(step.failure.message)}"
            if step.is_skipped:
                return f"was {step.failure.message}"
        if step.status == "failed":
            return f"failed with {self.named(step.failure)}" if step.failure is not None else "failed"
        if step.sort == "wait" and step.waits:
            return self.answered(step.waits[-1])
        if step.decision is not None:
            return f"chose {self.value(step.decision.choice)}"
        if step.child is not None:
            return f"was started as {step.child.run}"
        if step.sort == "scope" and step.name == "transition":
            led = transition(step)
            after = f" when the message {led['after']} comes" if "after" in led else ""
            return (
                f"was the last, with {self.value(led['done'])}"
                if "done" in led
                else f"led to {self.value(led.get('state'))}{after}"
            )
        if step.sort in ("undo", "scope") or step.sent_to is not None:
            return "was done"
        return self.returned(step)


def is_answered(step: Step, settled: Settled) -> bool:
    """Returns whether an answer resolved it, and so describes it already."""
    return any(
        wait.how == "answered" and wait.by == settled.by for wait in step.waits if wait.waits_for == "settlement"
    )


def transition(step: Step) -> dict[str, Any]:
    """Describes a state machine's transition: the next state and its wait, or the end."""
    output = entries_of(step.output)
    waits = entries_of(output.get("waits")).get("name")
    found = {name: output[name] for name in ("state", "done") if name in output}
    return found if waits is None else {**found, "after": waits}


def alike(one: Failure | None, other: Failure | None) -> bool:
    """Returns whether two attempts failed alike, for a reader."""
    if one is None or other is None:
        return False
    return (one.type, one.message, one.details) == (other.type, other.message, other.details)
