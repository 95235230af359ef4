"""Describes a step's course in sentences: attempts, unknown outcomes and their resolution, questions, answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import tzinfo
from typing import Any, Final

from killick.history.explain_verdict import VerdictNarrator
from killick.history.phrasing import NOT_RETRIED, counted, entries_of, lasted, ordinal, sentence, who
from killick.history.timeline_parts import Attempt, Settled, Step, Wait
from killick.model.failure import Failure

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

    def course(self, step: Step) -> list[str]:
        told = [f"It was put off until {self.time(delay.until)}: {delay.because}" for delay in step.delays[:3]]
        told += self.tried(step)
        for wait in (wait for wait in step.waits if wait.rule is None):
            if step.sort != "wait":
                told.append(self.asked(wait))
            if wait.how is not None:
                told.append(f"{'It' if step.sort == 'wait' else 'This'} {self.answered(wait)}")
        if step.sort == "scope":
            told += self.branches(step)
        if step.adopted is not None:
            told.append(f"It was not done again, because the run {step.adopted.run} had done the same before")
            told.append(f"What that had returned was taken: {self.value(step.output)}")
        if step.overridden_by is not None:
            because = step.overriding.get("because")
            words = f", with the words {self.whole(because)}" if because else ""
            told.append(f"Its result was given by hand, by {step.overridden_by}: {self.value(step.output)}{words}")
        if step.confirmed is not None:
            told.append(f"The world was looked at afterwards, and {'showed' if step.confirmed else 'did not show'} it")
        if step.drifts:
            told.append("Later the code asked for this step with other arguments; the result on record was kept")
        told += [f"A note of {who(note.by)} says: {self.value(note.note)}" for note in step.notes]
        return [sentence(each) for each in told]

    # attempts ---------------------------------------------------------------------------------

    def tried(self, step: Step) -> list[str]:
        told: list[str] = []
        last = len(step.attempts) - 1
        for index, attempt in enumerate(step.attempts):
            if last >= ATTEMPTS_MAX and 2 <= index < last - 1:
                left_out = counted(last - 3, "more attempt")
                told += [f"After that, {left_out} did not succeed either"] if index == 2 else []
            else:
                told += self.attempt(step, attempt, step.attempts[index - 1] if index else None)
        return told

    def attempt(self, step: Step, attempt: Attempt, before: Attempt | None) -> list[str]:
        name = (
            "it" if len(step.attempts) == 1 else f"{ordinal(attempt.number)} began {self.when(attempt.started_at)} and"
        )
        if before is not None and before.ended_at is not None and attempt.started_at - before.ended_at >= 1_000:
            name = f"after a pause of {lasted(attempt.started_at - before.ended_at)}, {name}"
        if attempt.ended_at is None:
            return self.unended(step, attempt, name)
        took = lasted(attempt.ended_at - attempt.started_at)
        if attempt.outcome == "returned":
            told = [f"{name} {self.returned(step)} after {took}"]
            return told + (
                [f"The model's own reasoning was {self.quoted(attempt.reasoning)}"] if attempt.reasoning else []
            )
        failure = attempt.failure
        again = before is not None and failure is not None and alike(before.failure, failure)
        error = " in the same way" if again else f" with {self.named(failure)}" if failure is not None else ""
        told = [f"{name} {self.ended(attempt, took)}{error}"]
        told += self.error(failure) if failure is not None and not again else []
        if attempt.progress is not None:
            told.append(f"It had got as far as {self.value(attempt.progress)}")
        if attempt.outcome == "refused" and not attempt.limited and step.effect not in ("reads", None):
            told.append("Nothing had been done by it")
        if attempt.outcome == "unknown" and step.effect in ("at_most_once", "transaction"):
            told.append("Whether it had happened was not known")
        if attempt.not_retried is not None:
            told.append(f"It was not tried again by itself: {NOT_RETRIED[attempt.not_retried]}")
        return told + self.settled(step, attempt.settled)

    def unended(self, step: Step, attempt: Attempt, name: str) -> list[str]:
        """Describes an attempt without a recorded end."""
        begun = f"it was begun {self.when(attempt.started_at)}" if name == "it" else name.removesuffix(" and")
        if not attempt.died:
            return [begun]
        told = [f"{begun}, and its process was gone before it was over"]
        if step.effect == "transaction":
            told.append("Nothing of it had happened, for its rows are kept together with its outcome")
        elif step.effect not in ("reads", None):
            told.append("Whether it had happened was not known")
        return told + self.settled(step, attempt.settled)

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
        except Exception:  # a reply may have any shape; one that cannot be read is told as it is
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
        after = f"{when}, after {lasted((wait.closed_at or wait.opened_at) - wait.opened_at)}"
        if wait.how == "expired":
            counts = f", so {self.value(wait.default)} counted" if wait.default is not None else ""
            return f"was over {when}" if wait.waits_for == "time" else f"ran out unanswered {after}{counts}"
        if wait.how == "skipped":
            said = f", with the words {self.whole(wait.comment)}" if wait.comment else ""
            return f"was skipped by {who(wait.by)} {after}{said}"
        if wait.how in ("cancelled", "voided"):
            return f"was given up {after}"
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
            f"({self.short(each)}), which {self.came_to(each)}"
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

    def came_to(self, step: Step) -> str:
        """Describes a step's outcome, after its name."""
        if not step.is_over:
            return "is not over yet"
        if step.status == "cancelled":
            return "was given up"
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
            led = led_to(step)
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


def led_to(step: Step) -> dict[str, Any]:
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
