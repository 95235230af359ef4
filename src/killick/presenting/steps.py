"""A step's request, its outcome, and its other records, one line each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from killick.engine.steps.model_reply import text_of
from killick.history.listing import asked_of_intention
from killick.history.phrasing import NOT_RETRIED, chain, entries_of, inline, scope_words, short, span
from killick.history.timeline_parts import Attempt, Step, Wait, transition
from killick.model.codec import Erased
from killick.model.failure import Failure, Frame
from killick.presenting import approvals
from killick.presenting.phrase import Phrase, Shows, remark

_SETTLED: Final = {"happened": "it happened", "did_not_happen": "it did not happen", "stopped": "stop"}
_FOREIGN: Final = (
    "site-packages", "dist-packages", "/lib/python3", "<frozen",
    "/killick/agents/", "/killick/definitions/", "/killick/engine/", "/killick/llm/",
)  # fmt: skip
_OUTCOMES: Final = {"completed": "good", "failed": "bad", "cancelled": "quiet"}


def given(step: Step, shows: Shows) -> str:
    """The input of a step, without its name: arguments, a question, a state."""
    match step.sort:
        case "decision" if step.decision is not None:
            return shows.value(step.decision.question or "")
        case "model":
            named = step.usage.model if step.usage is not None else ""
            return str(named or entries_of(step.given).get("model") or "")
        case "scope" if step.name == "transition":
            return shows.value(step.intended.get("state"))
        case "scope":
            return scope_words(step.name, step.given)
        case "wait" if step.waits:
            return asked_of(step.waits[0])
        case "child":
            return shows.value(entries_of(step.given).get("input"))
        case _:
            return shows.arguments(step.given) if step.given else ""


def asked_of(wait: Wait) -> str:
    """The question of a wait, or the event that it waits for."""
    asked = wait.prompt or wait.name
    return asked_of_intention(wait.waits_for, wait.intention) or (asked if isinstance(asked, str) else inline(asked))


def outcome(step: Step, shows: Shows) -> Phrase | None:
    """The result of a step; None if there is none to show."""
    if step.name == "transition" and step.status == "done":
        return Phrase(" ".join(f"{name} {shows.value(value)}" for name, value in transition(step).items()))
    if step.status != "done" or step.sort in ("undo", "scope", "child") or step.sent_to is not None:
        return None
    if step.decision is not None:
        return Phrase(shows.value(step.decision.choice), "strong")
    if step.sort == "wait" and step.waits:
        return answered(step.waits[-1], shows)
    if step.sort == "model":
        return Phrase(shows.value(reply_text(step.output) or step.output))
    return Phrase(shows.value(step.output)) if step.output is not None else None


def answered(wait: Wait, shows: Shows) -> Phrase | None:
    """How a wait ended; None where it has not, and where a sleep is over."""
    if wait.how is None or (wait.waits_for == "time" and wait.how == "expired"):
        return None
    by, answer = wait.by or "a person", entries_of(wait.answer)
    if wait.how == "skipped":
        return Phrase(f"skipped by {by}", "change").add(remark(wait.comment), "quote")
    if wait.how == "expired":
        default = f", so {shows.value(wait.default)}" if wait.default is not None else ""
        return Phrase("no answer in time", "warning").add(default)
    if wait.how != "answered":
        return Phrase("withdrawn", "warning")
    if wait.waits_for == "child":
        status, result = str(answer.get("status")), answer.get("result")
        shown = f" {shows.value(result)}" if status == "completed" and result is not None else ""
        return Phrase(status, _OUTCOMES.get(status, "")).add(shown)
    if wait.waits_for == "event":
        return Phrase(shows.value(wait.answer)).add(f" from {wait.by}" if wait.by else "", "quiet")
    if isinstance(wait.answer, Erased):
        return Phrase(f"{by}: {wait.answer}", "strong")
    phrase = Phrase(f"{by}: {answer.get('kind')}", "strong")
    phrase.add(f" {shows.value(answer['value'])}" if answer.get("value") is not None else "")
    return phrase.add(remark(wait.comment), "quote")


def about(step: Step, shows: Shows) -> Iterator[Phrase]:
    """The other records of a step, without its waits: its decision, its reason, its attempts, and its effect."""
    if step.decision is not None:
        options = [shows.value(option) for option in step.decision.options]
        by = f"the {step.decision.by}" if step.decision.by in ("agent", "model") else step.decision.by
        yield Phrase(f"chosen by {by}{' from ' * bool(options)}{', '.join(options)}", "quiet")
    because = step.decision.because if step.decision is not None else step.because
    if because:
        yield Phrase("because ", "quiet").add(shows.value(because), "quote")
    yield from approvals.asked_lines(step)
    yield from attempts(step)
    yield from approvals.ended_lines(step)


def refused_calls(steps: Iterable[Step]) -> dict[str, str]:
    """Why calls that a model chose never became steps, by the numbers of their decisions. The next model call of the
    same branch has the reasons: its last results answer the decisions, in their order."""
    refused: dict[str, str] = {}
    chosen: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for step in steps:
        branch = step.number.rpartition(".")[0]
        if step.decision is not None and step.decision.by == "model":
            chosen[branch][step.number] = step.decision.choice
        elif step.sort == "model":
            waiting = chosen.pop(branch, {})
            results = _results(step)[-len(waiting) :] if any(choice is not None for choice in waiting.values()) else []
            pairs = zip(waiting.items(), results, strict=False) if len(results) == len(waiting) else ()
            refused |= {number: text for (number, choice), text in pairs if choice is not None}
        elif (last := next(reversed(chosen[branch]), None)) is not None and chosen[branch][last] == step.name:
            chosen[branch][last] = None  # the call became this step
    return {number: " ".join(text.split()[1:]) for number, text in refused.items() if text.startswith("error: ")}


def _results(step: Step) -> list[str]:
    """The results of tools that were sent to a model."""
    sent = entries_of(step.given).get("messages") or entries_of(step.given).get("input")
    from killick.window.messages import is_list, read, shape_of  # most runs have no such call

    shape = shape_of(sent) if is_list(sent) else None
    if shape is None or not is_list(sent):
        return []
    return [part.text for message in sent for part in read(message, shape).parts if part.is_result]


def afterwards(step: Step, shows: Shows) -> Iterator[Phrase]:
    """The later fate of a step's result."""
    if step.adopted is not None:
        yield Phrase(f"deduplicated: has the result of {step.adopted.key}", "notice")
    if step.overridden_by is not None:
        because = step.overriding.get("because")
        said = remark(shows.value(because)) if because else ""
        yield Phrase(f"result given by {step.overridden_by}", "change").add(said, "quote")
    if step.confirmed is False:
        yield Phrase("returned, but its check does not find the effect", "bad")
    if step.undone_by is not None:
        yield Phrase(f"undone by step {step.undone_by}", "change")
    if step.drifts:
        yield Phrase("the code's arguments have changed since; the recorded result is kept", "warning")
    for note in step.notes:
        yield Phrase("note ", "quiet").add(shows.value(note.note))


def attempts(step: Step) -> Iterator[Phrase]:
    """Attempts that did not return, those that failed alike on one line; and how a doubt was settled."""
    for group in _grouped(step.attempts):
        first, last = group[0], group[-1]
        name = f"attempt {first.number}" if len(group) == 1 else f"attempts {first.number}–{last.number}"
        if last.died:
            yield Phrase(f"{name}: the process died while it was open", "bad")
        elif last.failure is not None:
            took = ", ".join(span((each.ended_at or 0) - each.started_at) for each in group[:4])
            yield Phrase(f"{name} ", "quiet").add(short(last.failure), "bad").add(f" ({took})", "quiet")
            if own := own_frames(last.failure.frames):
                yield Phrase("  at ", "quiet").add(", ".join(map(place, reversed(own))))
            if (said := service_response(last.failure)) is not None:
                yield Phrase("  answered ", "quiet").add(said)
            if last.not_retried is not None and last.not_retried != "no_attempts_left":
                yield Phrase(f"  not tried again: {NOT_RETRIED[last.not_retried]}", "quiet")
        asked = (wait for wait in step.waits if wait.waits_for == "settlement" and wait.how == "answered")
        if last.settled is not None and last.settled.by not in [wait.by for wait in asked]:
            yield Phrase(f"settled by {last.settled.by or 'a person'}: {_SETTLED[last.settled.how]}", "notice")


def _grouped(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Attempts that did not return; those in a row that failed alike are one group."""
    groups: list[list[Attempt]] = []
    for attempt in attempts:
        if attempt.outcome == "returned" or (attempt.ended_at is None and not attempt.died):
            continue
        last = groups[-1][-1] if groups else None
        if last is not None and last.settled is None and _alike(last.failure, attempt.failure):
            groups[-1].append(attempt)
        else:
            groups.append([attempt])
    return groups


def _alike(one: Failure | None, other: Failure | None) -> bool:
    """Whether two attempts failed alike, for a reader."""
    if one is None or other is None:
        return False
    return (one.type, one.message, one.details) == (other.type, other.message, other.details)


def service_response(failure: Failure) -> str | None:
    """The remote service's response, from the first error of a chain that has one."""
    return next(filter(None, map(response, chain(failure))), None)


def response(failure: Failure) -> str | None:
    """The remote service's response in one error; None if it was not recorded."""
    if "status" not in failure.details and "body" not in failure.details:
        return None
    return f"{failure.details.get('status', '')} {failure.details.get('body', '')}".strip()


def reply_text(reply: Any) -> str | None:
    """The text of a model's reply; None where it has none, or no known shape."""
    try:
        return text_of(reply) or None
    except Exception:  # a reply may be anything
        return None


def own_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The lines of people's own code, the innermost last."""
    return [frame for frame in frames if not any(part in frame.file for part in _FOREIGN)]


def place(frame: Frame) -> str:
    """file:line in function, as short as it can be from here."""
    file = Path(frame.file)
    short = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{short}:{frame.line} in {frame.function}"
