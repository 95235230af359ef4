"""Explains a step or a run: what was known, the reason, what happened, and what comes next, one recorded fact a line.

A pure function of a timeline. What happened to a step is shown by the same lines as in `killick show`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

from killick.history.phrasing import (
    YEAR_10_000_US,
    counted,
    cut,
    entries_of,
    inline,
    listed,
    scope_words,
    short,
    span,
    who,
)
from killick.history.timeline import Timeline
from killick.history.timeline_parts import Decision, Moment, Step, Wait
from killick.model import events as e
from killick.model.codec import Damaged, Erased, Secret
from killick.presenting import approvals, steps
from killick.presenting.moments import all_moments

BEFORE_MAX: Final = 5
"""How many earlier steps are named with their outcomes."""

LINES: Final = {
    "run": "Run {run} of the agent {agent}, started {at}[, with the input {input}].",
    "fork": "It is a fork of the run {run}.",
    "parent": "The run {run} started it, in its step {step}.",
    "plan": "In its plan it is at {place}.",
    "step": "Step {number}, {at}: {call}[, effect {effect}][, stage {stage}].",
    "input": "Known before: the input {input}.",
    "count": "Known before: {count} steps, of which these are the last {shown}.",
    "before": "Known before: step {number}, {name}, {outcome}.",
    "context": "Known before: the context {context}.",
    "decided": "Decided by {by}[ in step {number}][ on {question}]: {choice}[, out of {options}][, because {because}].",
    "because": "The agent's code gave this reason: {because}.",
    "undoing": "{by} cancelled the run and had it undone[, and said {because}].",
    "verdict": "The contract {contract} said {ruling}[, by its rule {rule}][ ({code})][; it would allow {allowed}].",
    "approval": "An approval was needed, because {reason}.",
    "edit": "{by} changed {changes} {at}, and the rule {rule} rejected that.",
    "attempt": "Attempt {number} began {at}[ and {ended}].",
    "doubt": "Whether attempt {number} had happened was not known.",
    "delayed": "It was delayed until {until}: {cause}.",
    "progress": "Attempt {number} had got as far as {progress}.",
    "reasoning": "The model's own reasoning was {reasoning}.",
    "asked": "Asked {at}[ of {to}]: {prompt}[, with the options {options}][, until {until}].",
    "answered": "Its end {at}: {answer}.",
    "branch": "Branch {branch} got to step {number}, {name}, {outcome}.",
    "over": "The step {status}.",
    "continued": "The run continued with step {step}.",
    "completed": "The run completed {at} with {result}.",
    "failed": "The run failed {at} with {failure}[; undone: {undone}][; not undone: {left}].",
    "cancelled": "The run was cancelled {at}.",
    "resume": "Nothing more happens until a person resumes the run.",
    "RunPaused": "The run was paused at {at} by {by}[: {because}]. Nothing happens until a person resumes it.",
    "RunDiverged": "The code diverged {at} at step {step}: the log has {recorded}, and the code has {found}. "
    "Nothing happens until the code is fixed and a person resumes the run.",
    "RunQuarantined": "Its process died {deaths} in a row. Nothing happens until a person resumes or cancels the run.",
    "RunRepaired": "Its record was repaired. Nothing happens until a person has looked at it and resumes the run.",
    "abandoned": "The run's process died. Nothing happens until a worker takes the run or a person resumes it.",
    "cancelling": "The run is being cancelled.",
    "queued": "No worker has taken the run yet.",
    "no step": "It has taken no step yet.",
    "open": "It is not over yet.",
    "retry": "It is to be tried again {at}.",
    "settlement": "Nothing happens until a person says whether it happened.",
    "votes": "Nothing is done until {count} of {to} agree[, or until {until}].",
    "answer": "Nothing happens until there is an answer[ from {to}][, or until {until}].",
    "time": "It continues {at}.",
    "child": "It continues when the run {name} has ended.",
    "event": "It continues when a caller sends the message {name}[, or at {until}].",
}  # fmt: skip
"""The line of each kind of fact. A part in brackets is left out where a field of it has no value."""

DELAYS_MAX: Final = 3
_ENDED: Final = {"returned": "returned", "refused": "was refused", "unknown": "failed"}
_PART: Final = re.compile(r"\[([^\[\]]*)\]")
_TIMES: Final = ("at", "until")
_VALUES: Final = ("input", "context", "choice", "result", "allowed", "progress")
_WORDS: Final = ("because", "prompt", "question", "reasoning", "reason", "rule")
"""Recorded words: in quotes, and never shortened."""


def why(
    timeline: Timeline,
    number: str | None = None,
    *,
    zone: tzinfo | None = UTC,
    chars: int = 160,
    abandoned: bool = False,
    answers: Mapping[str, str] | None = None,
) -> list[str]:
    """Returns lines about a step; without a number, about the run and its current step. Unknown number: none.

    zone       the time zone of displayed times; None: UTC, and each says so
    chars      the maximum length of a displayed value
    abandoned  whether the run's process is known to be dead
    answers    the answers that the run has not taken yet, by step
    """
    facts = _Facts(timeline, zone, chars, answers or {}, abandoned=abandoned)
    step = timeline.at_work if number is None else timeline.step(number)
    if number is None:
        return list(facts.run(step))
    return list(facts.step(step)) if step is not None else []


class _Facts:
    """The facts of one timeline. Shows values for the lines of `steps`."""

    def __init__(
        self, timeline: Timeline, zone: tzinfo | None, chars: int, answers: Mapping[str, str], *, abandoned: bool
    ) -> None:
        self.timeline, self.zone, self.chars, self.abandoned, self.answers = timeline, zone, chars, abandoned, answers
        self.all = list(timeline.steps())
        bound = (moment.event for moment in self.moments(e.ContractBound))
        self.contracts = {event.digest: event.name for event in bound if isinstance(event, e.ContractBound)}

    # lines ------------------------------------------------------------------------------------

    def line(self, kind: str, **fields: Any) -> str:
        missing = {name for name, value in fields.items() if value is None or value in ("", ())}

        def part(found: re.Match[str]) -> str:
            return "" if missing.intersection(re.findall(r"{(\w+)}", found[1])) else found[1]

        shown = {name: self._shown(name, value) for name, value in fields.items()}
        return _sentence(_PART.sub(part, LINES[kind]).format_map(shown))

    def _shown(self, name: str, value: Any) -> str:
        if name in _TIMES:
            return self.time(value or 0)
        if name in _WORDS and isinstance(value, str):
            return f"“{' '.join(value.split())}”"
        if name in (*_VALUES, *_WORDS):
            return self.value(value)
        return listed(value) if isinstance(value, tuple) else str(value)  # pyright: ignore[reportUnknownArgumentType]

    def time(self, at_us: int) -> str:
        if not 0 <= at_us < YEAR_10_000_US:
            return f"{at_us} µs"
        local = datetime.fromtimestamp(at_us / 1_000_000, UTC).astimezone(self.zone or UTC)
        return f"{local:%Y-%m-%d %H:%M:%S}{' UTC' if self.zone is None else ''}"

    def value(self, value: Any) -> str:
        """Text in quotes, the rest as JSON; cut if long."""
        if isinstance(value, Damaged):
            return "a damaged value"
        if isinstance(value, Erased | Secret):
            return "a secret" if isinstance(value, Secret) else "a value that was erased on purpose"
        if value is None:
            return "nothing"
        return f"“{cut(value, self.chars)}”" if isinstance(value, str) else cut(inline(value), self.chars)

    def arguments(self, given: Any) -> str:
        return ", ".join(f"{name}={self.value(value)}" for name, value in entries_of(given).items())

    def after(self, seq: int) -> str:
        return ""

    def moments(self, kind: type[e.Event]) -> list[Moment]:
        found = (moment for moment in all_moments(self.timeline.entries) if isinstance(moment.event, kind))
        return sorted(found, key=lambda moment: moment.seq)

    # the run ----------------------------------------------------------------------------------

    def run(self, step: Step | None) -> Iterator[str]:
        tl = self.timeline
        yield self.line("run", run=tl.run, agent=tl.agent, at=tl.started_at, input=tl.input)
        if tl.forked_from is not None:
            yield self.line("fork", run=tl.forked_from)
        if tl.parent is not None:
            yield self.line("parent", run=tl.parent, step=tl.parent_step)
        if tl.place is not None and tl.ended_at is None:
            yield self.line("plan", place=tl.place)
        if tl.failed is not None and tl.failed.step is None:
            yield from self.failure()
        elif step is not None:
            yield from self.step(step, with_input=False)
        else:
            yield from self.held_up() or ([self.line("no step")] if tl.ended_at is None else [])

    def failure(self) -> Iterator[str]:
        """How the run failed, and what was undone."""
        if (failed := self.timeline.failed) is not None:
            undone = tuple(f"step {step.undoes}" for step in self.all if step.sort == "undo" and step.status == "done")
            left = tuple(failed.not_undone)
            yield self.line("failed", at=failed.at, failure=short(failed.failure), undone=undone, left=left)
            if (said := steps.service_response(failed.failure)) is not None:
                yield f"The remote service answered {said}."
            yield self.line("resume")

    def held_up(self) -> list[str]:
        """What blocks the whole run."""
        tl = self.timeline
        if (held := tl.held_back) is not None:
            event: Any = held.event
            fields = {name: held.data.get(name) for name in ("because", "recorded", "found")}
            fields |= {"step": getattr(event, "step", ""), "by": who(getattr(event, "by", None))}
            deaths = counted(getattr(event, "deaths", 0), "time")
            return [self.line(type(event).__name__, at=held.at, deaths=deaths, **fields)]
        kinds = {"abandoned": self.abandoned, "cancelling": tl.cancelling, "queued": tl.status == "queued"}
        return [self.line(kind) for kind, is_so in kinds.items() if is_so and tl.ended_at is None][:1]

    # a step -----------------------------------------------------------------------------------

    def step(self, step: Step, *, with_input: bool = True) -> Iterator[str]:
        effect = step.effect if step.sort == "tool" else None
        fields = {"call": self.call(step), "effect": effect, "stage": step.stage}
        yield self.line("step", number=step.number, at=step.intended_at, **fields)
        yield from self.known(step, with_input=with_input)
        yield from self.reason(step)
        yield from self.course(step)
        if (answer := self.answers.get(step.number)) is not None:
            yield _sentence(f"{answer}.")
        yield from self.next(step)

    def call(self, step: Step) -> str:
        undone = self.timeline.step(step.undoes) if step.undoes is not None else None
        match step.sort:
            case "scope" if step.name != "transition":
                return scope_words(step.name, step.arguments)
            case "wait" | "decision":
                return self.name(step)
            case _:
                return f"{self.name(step)}({self.arguments((undone or step).arguments)})"

    def name(self, step: Step) -> str:
        """A step in a few words."""
        asked = self._shown("prompt", steps.asked_of(step.waits[0])) if step.waits else ""
        names = {
            "model": f"the model {steps.given(step, self) or step.name}", "wait": f"the wait for {asked}",
            "undo": f"undoing step {step.undoes}, {step.name}", "child": f"a run of {step.name}",
            "decision": "a decision",
        }  # fmt: skip
        return names.get(step.sort, step.name)

    def outcome(self, step: Step) -> str:
        if step.status == "failed":
            return f"failed with {short(step.failure)}" if step.failure is not None else "failed"
        if step.status != "done":
            return "was cancelled" if step.status == "cancelled" else "is not over yet"
        if step.child is not None and step.sort == "child":
            return f"was started as {step.child.run}"
        found = steps.outcome(step, self)
        return f"returned {found}" if found is not None else "was done"

    def known(self, step: Step, *, with_input: bool) -> Iterator[str]:
        if with_input and self.timeline.input is not None:
            yield self.line("input", input=self.timeline.input)
        ended = ((each, each.ended_at) for each in self.all if _precedes(each, step))
        before = [each for each, at in ended if at is not None and at <= step.intended_at]
        if (count := len(before) + self.timeline.skipped) > BEFORE_MAX:
            yield self.line("count", count=count, shown=BEFORE_MAX)
        for each in before[-BEFORE_MAX:]:
            yield self.line("before", number=each.number, name=self.name(each), outcome=self.outcome(each))
        if context := self.context_before(step):
            yield self.line("context", context=context)

    def context_before(self, step: Step) -> dict[str, Any]:
        """The agent's context at that time."""
        document: dict[str, Any] = {}
        for moment in self.moments(e.ContextChanged):
            if moment.seq > step.seq:
                break
            data = moment.data
            document = dict(entries_of(data.get("document", {**document, **entries_of(data.get("set"))})))
            for name in data.get("unset") or ():
                document.pop(name, None)
        return document

    def reason(self, step: Step) -> Iterator[str]:
        before = [each for each in self.all if _precedes(each, step)]
        chosen = before[-1] if before and step.sort == "tool" else None
        if step.decision is not None:
            yield self.decided(step.decision)
        elif chosen is not None and chosen.decision is not None and chosen.decision.choice == step.name:
            yield self.decided(chosen.decision, chosen.number)
        if step.because and step.decision is None:
            yield self.line("because", because=step.because)
        for moment in self.moments(e.CancelRequested)[-1:] if step.sort == "undo" else ():
            by = who(getattr(moment.event, "by", None))
            yield self.line("undoing", by=by, because=moment.data.get("because"))

    def decided(self, made: Decision, number: str | None = None) -> str:
        options = tuple(self.value(option) for option in made.options)
        fields = {"question": made.question, "choice": made.choice, "because": made.because}
        return self.line("decided", by=who(made.by), number=number, options=options, **fields)

    def course(self, step: Step) -> Iterator[str]:
        """Verdicts, attempts, questions, and all else that happened to a step."""
        for verdict in filter(None, (step.verdict, step.last_verdict)):
            contract = f"{self.contracts.get(verdict.contract or '', 'of its tool')} {(verdict.contract or '')[:8]}"
            allowed = step.failure.details.get("allowed") if step.failure is not None else None
            fields = {"ruling": verdict.ruling, "rule": verdict.rule, "code": verdict.code, "allowed": allowed}
            yield self.line("verdict", contract=contract.strip(), **fields)
        for reason in dict.fromkeys(wait.reason for wait in step.waits if wait.rule is not None and wait.reason):
            yield self.line("approval", reason=reason)
        yield from (_sentence(f"{phrase}.") for phrase in approvals.asked_lines(step))
        for edit in step.edits:
            if not edit.stands and edit.verdict is not None:
                changes, rule = approvals.changes(edit.changed), edit.verdict.rule
                yield self.line("edit", by=edit.by, changes=changes, at=edit.at, rule=rule)
        for delay in step.delays[:DELAYS_MAX]:
            yield self.line("delayed", until=delay.until, cause=delay.because)
        for attempt in (*step.attempts[:2], *step.attempts[2:][-2:]):
            took = span((attempt.ended_at or 0) - attempt.started_at)
            ended = f"{_ENDED[attempt.outcome or 'unknown']} after {took}" if attempt.ended_at is not None else None
            yield self.line("attempt", number=attempt.number, at=attempt.started_at, ended=ended)
            if (attempt.died or attempt.outcome == "unknown") and step.effect == "at_most_once":
                yield self.line("doubt", number=attempt.number)
            if attempt.progress is not None:
                yield self.line("progress", number=attempt.number, progress=attempt.progress)
            if attempt.reasoning:
                yield self.line("reasoning", reasoning=attempt.reasoning)
        yield from (_sentence(f"{phrase}.") for phrase in (*steps.attempts(step), *approvals.ended_lines(step)))
        for wait in step.waits:
            if wait.rule is None:
                yield from self.asked(wait)
        if step.status == "done" and (step.attempts or step.adopted is not None or step.overridden_by is not None):
            yield f"It {self.outcome(step)}."
        last: dict[str, Step] = {}
        for entry in step.entries:
            if isinstance(entry, Step):
                last[entry.number.rpartition(".")[0]] = entry
        for path, each in sorted(last.items(), key=lambda item: [int(part) for part in item[0].split(".")]):
            fields = {"branch": path.rpartition(".")[2], "name": self.name(each), "outcome": self.outcome(each)}
            yield self.line("branch", number=each.number, **fields)
        yield from (_sentence(f"{phrase}.") for phrase in steps.afterwards(step, self))

    def asked(self, wait: Wait) -> Iterator[str]:
        options = tuple(self.value(option) for option in wait.options)
        fields = {"to": tuple(wait.to), "prompt": steps.asked_of(wait), "options": options, "until": wait.deadline}
        if wait.waits_for in ("answer", "settlement"):
            yield self.line("asked", at=wait.opened_at, **fields)
        if (answer := steps.answered(wait, self)) is not None:
            yield self.line("answered", at=wait.closed_at, answer=answer)

    # what comes next --------------------------------------------------------------------------

    def next(self, step: Step) -> Iterator[str]:
        tl = self.timeline
        if step.is_over:
            status = {"done": "is done", "failed": "failed", "cancelled": "was cancelled"}[step.status]
            yield self.line("over", status=status)
            yield from self.following(step)
            return
        if step.status == "delayed":
            yield self.line("retry", at=step.delayed_until)
        elif step.status in ("waiting", "in_doubt") and tl.held_back is None and step.number not in self.answers:
            yield self.waits_on(step)
        elif step.number not in self.answers and not self.abandoned and tl.ended_at is None and tl.held_back is None:
            yield self.line("open")
        yield from self.held_up()

    def waits_on(self, step: Step) -> str:
        wait = next((wait for wait in reversed(step.waits) if wait.how is None), None)
        if wait is None:
            return self.line("settlement")
        fields = {"name": wait.name, "to": tuple(wait.to), "until": wait.deadline, "at": wait.deadline}
        kind = "votes" if wait.rule is not None and wait.need > 1 else wait.waits_for
        return self.line(kind, count=wait.need - len(wait.votes), **fields)

    def following(self, step: Step) -> Iterator[str]:
        """The run's course after an ended step."""
        tl = self.timeline
        later = [each.number for each in self.all if each.seq > step.seq and "." not in each.number]
        if tl.failed is not None and (tl.failed.step == step.number or not later):
            yield from self.failure()
        elif later:
            yield self.line("continued", step=later[0])
        elif tl.status in ("completed", "cancelled"):
            yield self.line(tl.status, at=tl.last_at, result=tl.result)
        else:
            yield from self.held_up()


def _sentence(text: str) -> str:
    """Begins with a capital letter; a quotation that ends with a full stop gets no other."""
    text = re.sub(r"([.!?])”\.$", r"\1”", text.strip())
    return f"{text[:1].upper()}{text[1:]}"


def _precedes(each: Step, step: Step) -> bool:
    """Returns whether a step came before, at the top level or in the same branch."""
    path = each.number.rpartition(".")[0]
    return each.seq < step.seq and (not path or step.number.startswith(f"{path}."))
