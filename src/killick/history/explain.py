"""Explains why a step happened and how it went, in plain sentences for the agent's user.

A pure function of a timeline: states only recorded facts. Reads no clock; prints nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, tzinfo
from typing import Any, Final

from killick.history.narration import StepNarrator
from killick.history.phrasing import counted, entries_of, listed, scope_words, sentence, who
from killick.history.timeline import Timeline
from killick.history.timeline_parts import Decision, Entry, Moment, Step, Wait
from killick.model import events as e

BEFORE_MAX: Final = 5
"""How many earlier steps are named with their outcomes."""

_EFFECTS: Final = {
    "reads": "It only reads, so it may be done as often as needed.",
    "idempotent": "It may be repeated safely: the remote service counts it once.",
    "workspace": "It changes only the run's own files, which can be put back.",
    "transaction": "What it writes is kept together with this record, or not at all.",
    "at_most_once": "It must not happen twice, so it is repeated only when it is known not to have happened.",
}
_TWO_STOPS: Final = re.compile(r"([.!?])”\.")


def why(
    timeline: Timeline,
    number: str | None = None,
    *,
    zone: tzinfo | None = UTC,
    chars: int = 160,
    text_of: Callable[[Any], str | None] = lambda _: None,
    abandoned: bool = False,
) -> list[str]:
    """Returns paragraphs about a step; without a number, about the run and its current step. Unknown number: none.

    zone       the time zone of displayed times; None: each with its date, in UTC
    chars      the maximum length of a displayed value
    text_of    extracts the text of a model's reply
    abandoned  whether the run's process is known to be dead
    """
    narrator = _Explainer(timeline, zone, chars, text_of, abandoned=abandoned)
    if number is None:
        return narrator.run(timeline.at_work)
    step = timeline.step(number)
    return narrator.about(step) if step is not None else []


def _paragraphs(*paragraphs: Iterable[str]) -> list[str]:
    """Joins sentences; a quotation that ends with a full stop gets no other."""
    joined = (" ".join(filter(None, sentences)) for sentences in paragraphs)
    return [_TWO_STOPS.sub(r"\1”", paragraph) for paragraph in joined if paragraph]


class _Explainer(StepNarrator):
    """Writes about one timeline."""

    def __init__(
        self,
        timeline: Timeline,
        zone: tzinfo | None,
        chars: int,
        text_of: Callable[[Any], str | None],
        *,
        abandoned: bool,
    ) -> None:
        super().__init__(zone, chars, text_of)
        self.timeline = timeline
        self.abandoned = abandoned
        self.steps = list(timeline.steps())
        bound = (moment.event for moment in self.moments(e.ContractBound))
        self.contracts = {event.digest: event.name for event in bound if isinstance(event, e.ContractBound)}

    # the run ----------------------------------------------------------------------------------

    def run(self, step: Step | None) -> list[str]:
        """Explains the run as a whole, and its current or failed step."""
        tl = self.timeline
        given = "" if tl.input is None else f" with the input {self.value(tl.input)}"
        sentences = [f"The run {tl.run} of the agent {tl.agent} was started {self.when(tl.started_at)}{given}."]
        if tl.forked_from is not None:
            sentences.append(f"It is a fork of the run {tl.forked_from}.")
        if tl.parent is not None:
            sentences.append(f"The run {tl.parent} started it, in its step {tl.parent_step}.")
        if tl.place is not None and tl.ended_at is None:
            sentences.append(f"In its plan it is at {tl.place}.")
        if tl.failed is not None and tl.failed.step is None:
            sentences.append(f"It failed {self.when(tl.failed.at)}, in the agent's own code, with")
            sentences.append(sentence(self.named(tl.failed.failure)))
            return _paragraphs([*sentences, *self.error(tl.failed.failure)], self.after_failure())
        if step is None:
            sentences += self.held_up() or (["It has taken no step yet."] if tl.ended_at is None else [])
            return _paragraphs(sentences)
        return [*_paragraphs(sentences), *self.about(step, with_input=False)]

    def after_failure(self) -> list[str]:
        """Explains the compensations of a failed run, and its next step."""
        failed = self.timeline.failed
        undone = [str(step.undoes) for step in self.steps if step.sort == "undo" and step.status == "done"]
        out: list[str] = []
        if undone:
            out.append(f"What had been done in {'steps' if len(undone) > 1 else 'step'} {listed(undone)} was undone.")
        if failed is not None and failed.not_undone:
            out.append(f"This could not be undone: {listed(failed.not_undone)}.")
        return [*out, "Nothing more happens until a person resumes the run."]

    def held_up(self) -> list[str]:
        """Explains what blocks the whole run."""
        tl = self.timeline
        held = tl.held_back
        if held is not None and isinstance(held.event, e.RunPaused):
            words = ", because" if held.event.by == "contract" else ", who said"
            said = f"{words} {self.whole(held.data['because'])}" if held.data.get("because") else ""
            paused = f"The run was paused {self.when(held.at)} by {who(held.event.by)}{said}."
            return [paused, "Nothing happens until a person resumes it."]
        if held is not None and isinstance(held.event, e.RunDiverged):
            recorded, found = held.data.get("recorded"), held.data.get("found")
            return [
                f"The code no longer fits the record, as was found {self.when(held.at)}.",
                f"At step {held.event.step} the log has {recorded}, and the code has {found}.",
                "Nothing happens until the code is fixed and a person resumes the run.",
            ]
        if held is not None and isinstance(held.event, e.RunQuarantined):
            died = f"The process that ran it died {counted(held.event.deaths, 'time')} in a row."
            return [died, "Nothing happens until a person resumes or cancels the run."]
        if held is not None:
            return ["Its record was repaired.", "Nothing happens until a person has looked at it and resumes the run."]
        if tl.ended_at is not None:
            return []
        if self.abandoned:
            return ["The run's process died.", "Nothing happens until a worker takes the run or a person resumes it."]
        if tl.cancelling:
            return ["The run is being cancelled."]
        return ["No worker has taken the run yet."] if tl.status == "queued" else []

    # a step -----------------------------------------------------------------------------------

    def about(self, step: Step, *, with_input: bool = True) -> list[str]:
        """Explains the call, its inputs, its reason, its course, and the next step."""
        what = self.what(step)
        known = self.known(step, with_input=with_input)
        return _paragraphs(what, known, self.reason(step), self.judged(step), self.narrate(step), self.next(step))

    def what(self, step: Step) -> list[str]:
        when, given = self.when(step.intended_at), self.given(step.arguments)
        given = f" with {given}" if given else ""
        match step.sort:
            case "decision":
                clause = f"was a decision, made {when}."
            case "model":
                clause = f"asked {self.model(step)} {when}.{self.sent(step)}"
            case "undo":
                undone = self.timeline.step(str(step.undoes))
                given = self.given(undone.arguments) if undone is not None else ""
                clause = f"began {when} to undo step {step.undoes}, {step.name}{' with ' * bool(given)}{given}."
            case "child":
                run = f" as {step.child.run}" if step.child is not None else ""
                clause = f"started a run of the agent {step.name}{run} {when},{given}."
            case "scope":
                clause = self.scope(step, when)
            case "wait":
                clause = self.waiting(step, when)
            case _ if step.name == "send" and step.effect is None:
                clause = f"sent a message {when},{given}."
            case _:
                is_its_own = not step.edits and (step.attempts or not self.judged_first(step))
                called = "called" if is_its_own else "was to call"
                clause = f"{called} {step.name} {when}{',' * bool(given)}{given}."
        stage = f"It belongs to the stage {step.stage} of the plan." if step.stage else ""
        return [f"Step {step.number} {clause}", stage, _EFFECTS.get(step.effect or "", "") * (step.sort == "tool")]

    def judged_first(self, step: Step) -> bool:
        """Returns whether the step needed an approval, or was rejected, before it began."""
        return step.ended_by is not None or step.rejected is not None or any(wait.rule for wait in step.waits)

    def sent(self, step: Step) -> str:
        """Describes a model's request by its last message."""
        arguments = entries_of(step.arguments)
        messages: Any = arguments.get("messages") or arguments.get("input")
        if isinstance(messages, str):
            return f" It was asked {self.quoted(messages)}."
        if not isinstance(messages, list) or not messages:
            return ""
        last: Any = messages[-1]  # pyright: ignore[reportUnknownVariableType]
        role = f" from the {last['role']}" if isinstance(last, dict) and "role" in last else ""
        content: Any = last.get("content") if isinstance(last, dict) else last  # pyright: ignore
        count = counted(len(messages), "message")  # pyright: ignore[reportUnknownArgumentType]
        return f" It was sent {count}, the last{role}: {self.quoted(content)}."

    def scope(self, step: Step, when: str) -> str:
        if step.name == "transition":
            state = self.value(step.intended.get("state"))
            return f"was a transition of the state machine, begun {when} in the state {state}."
        if step.name in ("hosted", "guests"):
            return f"was opened {when} for {scope_words(step.name, None)}, each found again by its key."
        branches = entries_of(step.arguments).get("branches", 0)
        until = ", until one of them was done" if step.name == "first" else ""
        return f"began {counted(branches, 'branch', 'branches')} of work side by side {when}{until}."

    def waiting(self, step: Step, when: str) -> str:
        wait = step.waits[0] if step.waits else None
        if wait is None:
            return f"began to wait {when}."
        if wait.waits_for == "time":
            return f"began to wait {when}, until {self.time(wait.deadline or 0)}."
        if wait.waits_for == "child":
            return f"began to wait {when} for the run {wait.name} to end."
        if wait.waits_for == "event":
            until = f", until {self.time(wait.deadline)} at the latest" if wait.deadline is not None else ""
            return f"began to wait {when} for a message named {wait.name}{until}."
        return f"put a question to {listed(wait.to) or 'people'} {when}: {self.question(wait)}"

    def question(self, wait: Wait) -> str:
        """Describes the question, its deadline, and its default answer."""
        sentences = [f"{self.whole(wait.prompt or wait.name)}."]
        if wait.options:
            sentences.append(f"The options were {listed([self.value(option) for option in wait.options])}.")
        if wait.deadline is not None:
            can, counts = ("can", "counts") if wait.how is None else ("could", "was to count")
            default = f"; after that, {self.value(wait.default)} {counts}" if wait.default is not None else ""
            sentences.append(f"It {can} be answered until {self.time(wait.deadline)}{default}.")
        return " ".join(sentences)

    # the state before -------------------------------------------------------------------------

    def known(self, step: Step, *, with_input: bool) -> list[str]:
        tl = self.timeline
        has_input = with_input and tl.input is not None
        sentences = [f"The run had been started with the input {self.value(tl.input)}."] if has_input else []
        before = [each for each in self.steps if self.was_over(each, step)]
        count = len(before) + tl.skipped
        if count > BEFORE_MAX:
            sentences.append(f"Of the {count} steps before it, these were the last {BEFORE_MAX}.")
        sentences += [
            sentence(f"Step {each.number} ({self.short(each)}) {self.outcome(each)}") for each in before[-BEFORE_MAX:]
        ]
        context = self.context_before(step)
        if context:
            sentences.append(f"The agent's own notes, its context, were {self.value(context)}.")
        return ["This was known at that time.", *sentences] if sentences else []

    def was_over(self, each: Step, step: Step) -> bool:
        """Returns whether a step preceded this one and had ended by then."""
        return _precedes(each, step) and each.ended_at is not None and each.ended_at <= step.intended_at

    def context_before(self, step: Step) -> dict[str, Any]:
        """Returns the agent's context at that time."""
        document: dict[str, Any] = {}
        for moment in self.moments(e.ContextChanged):
            if moment.seq > step.seq:
                break
            data = moment.data
            document = dict(entries_of(data.get("document", {**document, **entries_of(data.get("set"))})))
            for name in data.get("unset") or ():
                document.pop(name, None)
        return document

    def moments(self, kind: type[e.Event]) -> list[Moment]:
        return sorted(_found(self.timeline.entries, kind), key=lambda moment: moment.seq)

    # why --------------------------------------------------------------------------------------

    def reason(self, step: Step) -> list[str]:
        if step.decision is not None:
            return self.decided(step, step.decision)
        sentences: list[str] = []
        chosen = self.chosen_in(step)
        if chosen is not None and chosen.decision is not None:
            sentences += [f"It was chosen in step {chosen.number}.", *self.decided(chosen, chosen.decision)]
        if step.because:
            sentences.append(f"The agent's code gave this reason: {self.whole(step.because)}.")
        if step.sort == "undo":
            sentences += self.why_undone()
        elif not sentences and step.sort in ("tool", "child"):
            sentences.append("The agent's code took this step, and gave no reason for it.")
        return sentences

    def chosen_in(self, step: Step) -> Step | None:
        """Returns the preceding step, if it decided for this tool."""
        before = [each for each in self.steps if _precedes(each, step)]
        decision = before[-1].decision if before and step.sort == "tool" else None
        return before[-1] if decision is not None and decision.choice == step.name else None

    def decided(self, step: Step, decision: Decision) -> list[str]:
        out = [f"The question was {self.whole(decision.question)}."] if decision.question else []
        options = [self.value(option) for option in decision.options]
        among = f", out of {listed(options)}" if options else ""
        out.append(f"The choice was {self.value(decision.choice)}{among}; it was made by {who(decision.by)}.")
        models = [each for each in self.steps if each.sort == "model" and _precedes(each, step)]
        if decision.by == "model" and models:
            out.append(sentence(f"{self.model(models[-1])} had been asked just before, in step {models[-1].number}"))
        because = f"The reason given was: {self.whole(decision.because)}."
        return [*out, because if decision.because else "No reason is on record."]

    def why_undone(self) -> list[str]:
        asked = [moment for moment in self.moments(e.CancelRequested) if getattr(moment.event, "compensate", False)]
        if asked:
            by, because = getattr(asked[-1].event, "by", None), asked[-1].data.get("because")
            said = f", who said {self.whole(because)}" if because else ""
            return [f"That the run be cancelled and what it did be undone was the wish of {who(by)}{said}."]
        failed = self.timeline.failed
        return [] if failed is None else [f"The run had failed with {self.named(failed.failure)}."]

    # the next step ----------------------------------------------------------------------------

    def next(self, step: Step) -> list[str]:
        if step.is_over:
            over = {"done": "The step is done.", "failed": "The step failed.", "cancelled": "The step was cancelled."}
            nothing = step.status == "failed" and not step.attempts and self.judged_first(step)
            sentences = ["Nothing was done." if nothing else over[step.status], *self.after(step)]
            undoing = self.timeline.step(step.undone_by) if step.undone_by is not None else None
            if undoing is not None and undoing.ended_at is not None:
                sentences.insert(1, f"It was undone by step {undoing.number}, {self.when(undoing.ended_at)}.")
            return sentences
        if step.status == "delayed":
            sentences = [f"It is to be tried again {self.when(step.delayed_until or 0)}."]
        elif step.status in ("waiting", "in_doubt") and self.timeline.held_back is None:
            sentences = self.waits_on(step)
        else:
            stays = self.abandoned or self.timeline.ended_at is not None or self.timeline.held_back is not None
            sentences = [] if stays else ["It is not over yet."]
        return sentences + self.held_up()

    def waits_on(self, step: Step) -> list[str]:
        wait = next((wait for wait in reversed(step.waits) if wait.how is None), None)
        if wait is None or wait.waits_for == "settlement":
            return ["Nothing happens until a person says whether it happened."]
        if wait.rule is not None:
            return [self.missing_approvals(wait)]
        match wait.waits_for:
            case "time":
                return [f"It continues {self.when(wait.deadline or 0)}."]
            case "child":
                return [f"It continues when the run {wait.name} has ended."]
            case "event":
                return [f"It continues when a caller sends the message {wait.name}."]
            case _:
                until = ", or until its time is up" if wait.deadline is not None else ""
                by = f" from {listed(wait.to)}" if wait.to else ""
                return [f"Nothing happens until there is an answer{by}{until}."]

    def after(self, step: Step) -> list[str]:
        """Explains the run's course after an ended step."""
        tl = self.timeline
        if tl.failed is not None and tl.failed.step == step.number:
            return [f"The run failed with it {self.when(tl.failed.at)}.", *self.after_failure()]
        later = [each.number for each in self.steps if each.seq > step.seq and "." not in each.number]
        if later:
            return [f"The run continued with step {later[0]}."]
        if tl.status == "completed":
            return [f"It was the last step: the run completed {self.when(tl.last_at)} with {self.value(tl.result)}."]
        if tl.failed is not None:
            failed = self.named(tl.failed.failure)
            return [
                f"It was the last step: the run failed {self.when(tl.failed.at)} with {failed}.",
                *self.after_failure(),
            ]
        if tl.status == "cancelled":
            return [f"It was the last step: the run was cancelled {self.when(tl.last_at)}."]
        return self.held_up()


def _precedes(each: Step, step: Step) -> bool:
    """Returns whether a step came before, at the top level or in the same branch."""
    path = each.number.rpartition(".")[0]
    return each.seq < step.seq and (not path or step.number.startswith(f"{path}."))


def _found(entries: Sequence[Entry], kind: type[e.Event]) -> Iterator[Moment]:
    for entry in entries:
        if isinstance(entry, Step):
            yield from _found(entry.entries, kind)
        elif isinstance(entry.event, kind):
            yield entry
