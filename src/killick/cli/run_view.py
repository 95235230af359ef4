"""How a run looks as a page: where it is and what to do first, then its timeline, then why it failed. Decides nothing.

Every line is a Text that fits the width; what is longer is cut, or wrapped where the whole is asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.text import Text

from killick.cli import approval_view, moments, style
from killick.engine.inbox import ANSWER, CHILD, COMMAND, VOTE
from killick.engine.steps.model_reply import text_of
from killick.history.listing import asked_of_intention
from killick.history.narration import alike, is_answered, led_to
from killick.history.phrasing import NOT_RETRIED, chain, entries_of, scope_words
from killick.history.timeline import Timeline
from killick.history.timeline_parts import Attempt, Entry, Moment, Step, Wait
from killick.model import events as e
from killick.model.failure import Failure, Frame

HEAD_MAX: Final = 15
TAIL_MAX: Final = 35
"""How much of a long timeline is shown at its beginning and at its end."""

WIDE: Final = 160
"""Lines of text are not wider than this, however wide the terminal is."""

VALUE_CHARS: Final = 1_000
WHOLE: Final = 1_000_000_000

_QUIET: Final = frozenset({"fact.drawn", "page.pinned", "run.tagged"})
_OURS: Final = frozenset({COMMAND, ANSWER, VOTE, CHILD})
_FOREIGN: Final = (
    "site-packages", "dist-packages", "/lib/python3", "<frozen",
    "/killick/agents/", "/killick/definitions/", "/killick/engine/", "/killick/llm/",
)  # fmt: skip


class Row(NamedTuple):
    """An entry at its depth."""

    depth: int
    entry: Entry


class Page:
    """Writes the lines of one run."""

    def __init__(self, timeline: Timeline, *, width: int, now_us: int, full: bool = False) -> None:
        self.timeline = timeline
        self.now_us = now_us
        self.full = full
        self.digits = max([len(step.number) for step in timeline.steps()] or [1])
        self.width = width
        self._newcomers = newcomers(timeline.entries)
        self.room = max(min(width, WIDE) - self.indent, 20)

    @property
    def indent(self) -> int:
        """Where text begins: after the time, how long it took, the sign and the number."""
        return 8 + 2 + 7 + 2 + 2 + self.digits + 2

    @cached_property
    def _begun(self) -> list[tuple[int, str]]:
        return sorted((step.seq, step.number) for step in self.timeline.steps())

    def step_before(self, seq: int) -> str | None:
        """The last step that had begun at an event."""
        at = bisect_right(self._begun, (seq, "~"))
        return self._begun[at - 1][1] if at else None

    # lines ------------------------------------------------------------------------------------

    def line(
        self, at: int | None, took: str, sign: Text, number: str, body: Text, *, busy: bool = False, lines: int = 1
    ) -> list[Text]:
        head = Text().append(style.moment(at, date=False) if at is not None else " " * 8, style="dim")
        head.append("  ").append(f"{took:>7}", style="yellow" if busy else "dim")
        head.append("  ").append_text(sign).append(" ").append(f"{number:<{self.digits}}", style="bold").append("  ")
        return self.beside(head, body, lines)

    def more(self, body: Text, depth: int = 0, lines: int = 1) -> list[Text]:
        """Further lines of an entry, under its text."""
        return self.beside(Text(" " * (self.indent + 2 * depth)), body, lines)

    def beside(self, head: Text, body: Text, lines: int = 1) -> list[Text]:
        """A body beside its head, on so many lines at the most: cut where it is longer, unless the whole is wanted."""
        room = max(min(self.width, WIDE) - head.cell_len, 20)
        if lines == 1 and not self.full:
            body = Text(" ").join(body.split("\n", allow_blank=True))
            body.truncate(room, overflow="ellipsis")
            return [Text().append_text(head).append_text(body)]
        return style.wrapped(head, body, head.cell_len + room, lines=None if self.full else lines)

    def value(self, value: Any) -> str:
        """A value as text; of a very long one no more than can be shown, unless the whole is wanted."""
        text = value if isinstance(value, str) else style.inline(value)
        return text if self.full or len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}…"

    def arguments(self, given: Any) -> str:
        return style.arguments(given, WHOLE if self.full else VALUE_CHARS)

    # the timeline -----------------------------------------------------------------------------

    def rows(self, entries: Sequence[Entry] | None = None, depth: int = 0) -> Iterator[Row]:
        """What is shown of the timeline, flat."""
        for entry in self.timeline.entries if entries is None else entries:
            if isinstance(entry, Moment) and not self.full and self._is_quiet(entry):
                continue
            yield Row(depth, entry)
            if isinstance(entry, Step):
                yield from self.rows(entry.entries, depth + 1)

    def _is_quiet(self, moment: Moment) -> bool:
        event = moment.event
        if isinstance(event, e.RunTaken):
            return moment.seq not in self._newcomers
        if isinstance(event, e.MessageTaken):
            return event.name in _OURS
        return moment.kind in _QUIET

    def timeline_lines(self, *, everything: bool = False) -> Iterator[Text]:
        rows = list(self.rows())
        kept, left_out = rows, 0
        if not everything and len(rows) > HEAD_MAX + TAIL_MAX + 5:
            middle = rows[HEAD_MAX:-TAIL_MAX]
            kept = [
                row for row in middle if isinstance(row.entry, Step) and row.entry.status not in ("done", "cancelled")
            ]
            left_out = len(middle) - len(kept)
            kept = rows[:HEAD_MAX] + kept + rows[-TAIL_MAX:]
        day = ""
        for number, row in enumerate(kept):
            at = row.entry.intended_at if isinstance(row.entry, Step) else row.entry.at
            if left_out and number == HEAD_MAX:
                yield Text(f"{'⋮':>8}  {left_out} entries left out; --all shows them", style="dim")
            if (today := style.moment(at)[:10]) != day:
                day = today
                yield Text(day, style="dim bold")
            yield from (
                self.step(row.entry, row.depth) if isinstance(row.entry, Step) else self.moment(row.entry, row.depth)
            )

    # a step -----------------------------------------------------------------------------------

    def step(self, step: Step, depth: int = 0) -> Iterator[Text]:
        end = step.ended_at or (None if self.timeline.ended_at is not None else self.now_us)
        took = style.span(end - step.intended_at) if end is not None and step.sort != "decision" else ""
        sign = Text(style.SIGNS[step.status], style=style.STYLES[step.status])
        body = Text("  " * depth).append_text(self.what(step))
        output = self.came_to(step)
        room = self.room
        apart = output is not None and (self.full or body.cell_len + output.cell_len + 3 > room)
        if output is not None and not apart:
            body.append(" → ", style="dim").append_text(output)
        yield from self.line(step.intended_at, took, sign, step.number, body, busy=step.ended_at is None)
        if output is not None and apart:
            yield from self.more(Text.assemble(("→ ", "dim")).append_text(output), depth)
        for text in self.about(step):
            yield from self.more(text, depth, lines=3)

    def what(self, step: Step) -> Text:
        """The step as it would be written, in one line."""
        given, name = step.given, Text.assemble((step.name, "bold"))
        match step.sort:
            case "decision" if step.decision is not None:
                return Text(self.value(step.decision.question) or "decision", style="italic")
            case "model":
                usage = step.usage
                named = (usage.model if usage is not None else "") or entries_of(given).get("model") or step.name
                messages: Any = entries_of(given).get("messages") or entries_of(given).get("input")
                count = f" ({len(messages)} messages)" if isinstance(messages, list) else ""  # pyright: ignore
                return Text("model ").append(str(named), style="bold").append(count, style="dim")
            case "undo":
                return Text(f"undo {step.undoes} ").append_text(name)
            case "child":
                run = step.child.run if step.child is not None else ""
                given = entries_of(given).get("input")
                return Text("starts ").append(run, style="bold").append(f" {step.name}({self.value(given)})")
            case "scope" if step.name == "transition":
                return Text.assemble(("transition ", "bold")).append(
                    self.value(step.intended.get("state")), style="dim"
                )
            case "scope":
                return Text.assemble((f"{step.name} ", "bold")).append(scope_words(step.name, given))
            case "wait":
                return self.waits_for(step.waits[0]) if step.waits else name
            case _:
                inside = self.arguments(given) if given else ""
                return name.append(f"({inside})")

    def waits_for(self, wait: Wait) -> Text:
        match wait.waits_for:
            case "time":
                return Text(f"sleeps until {style.moment(wait.deadline or 0)}")
            case "event":
                return Text("waits for message ").append(wait.name, style="bold")
            case "child":
                return Text("waits for ").append(wait.name, style="bold")
            case "answer" | "settlement":
                who = f"asks {', '.join(wait.to)}: " if wait.to else "asks: "
                return Text.assemble((who, "bold")).append(asked_of(wait))
            case _:
                return Text(f"waits for {wait.waits_for} {wait.name}")

    def came_to(self, step: Step) -> Text | None:
        """What it returned, after an arrow; None where there is nothing to say."""
        if step.name == "transition" and step.status == "done":
            return Text(" ".join(f"{name} {self.value(value)}" for name, value in led_to(step).items()))
        if step.status != "done" or step.sort in ("child", "undo", "scope") or step.sent_to is not None:
            return None
        if step.decision is not None:
            return Text(self.value(step.decision.choice), style="bold")
        if step.sort == "wait":
            return self.answered(step.waits[-1]) if step.waits else None
        if step.sort == "model":
            said = reply_text(step.output)
            return Text(said or self.value(step.output))
        return Text(self.value(step.output)) if step.output is not None else None

    def answered(self, wait: Wait) -> Text | None:
        if wait.how is None or (wait.waits_for == "time" and wait.how == "expired"):
            return None
        if wait.how == "skipped":
            told = Text(f"skipped by {wait.by or 'somebody'}", style="magenta")
            return told.append(f" “{wait.comment}”", style="italic") if wait.comment else told
        if wait.how != "answered":
            counts = f", so {self.value(wait.default)}" if wait.how == "expired" and wait.default is not None else ""
            return Text.assemble(("nobody answered in time" if wait.how == "expired" else "given up", "yellow")).append(
                counts
            )
        answer = entries_of(wait.answer)
        if wait.waits_for == "child":
            failed = answer.get("status") != "completed"
            told = Text(str(answer.get("status")), style=style.STYLES.get(str(answer.get("status")), ""))
            return (
                told if failed or answer.get("result") is None else told.append(f" {self.value(answer.get('result'))}")
            )
        if wait.waits_for == "event":
            return Text(self.value(wait.answer)).append(f" from {wait.by}" if wait.by else "", style="dim")
        told = Text.assemble((f"{wait.by or 'somebody'}: ", "bold")).append(str(answer.get("kind")), style="bold")
        if answer.get("value") is not None:
            told.append(f" {self.value(answer['value'])}")
        return told.append(f" “{wait.comment}”", style="italic") if wait.comment else told

    def about(self, step: Step) -> Iterator[Text]:
        """What else there is to know of a step, a line each."""
        if step.decision is not None:
            options = [self.value(option) for option in step.decision.options]
            by = f"the {step.decision.by}" if step.decision.by in ("agent", "model") else step.decision.by
            yield Text(f"chosen by {by}{' from ' * bool(options)}{', '.join(options)}", style="dim")
        because = step.decision.because if step.decision is not None else step.because
        if because:
            yield Text.assemble(("because ", "dim")).append(self.value(because), style="italic")
        yield from self.tries(step)
        yield from approval_view.asked_lines(step)
        yield from approval_view.ended_lines(step)
        for wait in step.waits:
            if step.sort != "wait" and wait.rule is None:
                told = Text("asks: did it happen?", style="bold")
                yield told if wait.waits_for == "settlement" else self.waits_for(wait)
                if (answer := self.answered(wait)) is not None:
                    yield Text.assemble(("→ ", "dim")).append_text(answer)
            elif wait.how is None and wait.deadline is not None and wait.waits_for != "time":
                default = f", then {self.value(wait.default)}" if wait.default is not None else ""
                yield Text(
                    f"until {style.moment(wait.deadline)} ({style.ago(wait.deadline, self.now_us)}){default}",
                    style="dim",
                )
        if step.adopted is not None:
            yield Text(f"not done again: the result of {step.adopted.key} was taken", style="cyan")
        if step.overridden_by is not None:
            because = step.overriding.get("because")
            said = f" “{self.value(because)}”" if because else ""
            yield Text.assemble((f"result given by {step.overridden_by}", "magenta"), (said, "italic"))
        if step.confirmed is False:
            yield Text("returned, but the world does not show it", style="red")
        if step.undone_by is not None:
            yield Text(f"undone by step {step.undone_by}", style="magenta")
        if step.drifts:
            yield Text("the code's arguments have changed since; this result stands", style="yellow")
        for note in step.notes:
            yield Text.assemble(("note ", "dim")).append(self.value(note.note))

    def tries(self, step: Step) -> Iterator[Text]:
        """Attempts that did not return, those that failed alike on one line; how a doubt was settled."""
        for group in _grouped(step.attempts):
            first, last = group[0], group[-1]
            name = f"attempt {first.number}" if len(group) == 1 else f"attempts {first.number}–{last.number}"
            if last.died:
                yield Text(f"{name}: the process died while it was open", style="red")
            elif last.failure is not None:
                took = ", ".join(style.span((each.ended_at or 0) - each.started_at) for each in group[:4])
                yield (
                    Text.assemble((f"{name} ", "dim"))
                    .append(_short(last.failure), style="red")
                    .append(f" ({took})", style="dim")
                )
                if (said := _far_side(last.failure)) is not None:
                    yield Text.assemble(("  answered ", "dim")).append(said)
                if last.not_retried is not None and last.not_retried != "no_attempts_left":
                    yield Text(f"  not tried again: {NOT_RETRIED[last.not_retried]}", style="dim")
            if last.settled is not None and not is_answered(step, last.settled):
                how = {"happened": "it happened", "did_not_happen": "it did not happen", "stopped": "stop"}[
                    last.settled.how
                ]
                yield Text(f"settled by {last.settled.by or 'somebody'}: {how}", style="cyan")
        if step.status == "delayed" and step.delayed_until is not None:
            when = f"{style.moment(step.delayed_until, date=False)} ({style.ago(step.delayed_until, self.now_us)})"
            yield Text(f"again at {when}", style="yellow")

    # between steps ----------------------------------------------------------------------------

    def moment(self, moment: Moment, depth: int = 0) -> Iterator[Text]:
        told = moments.told(self, moment)
        body = Text("  " * depth).append_text(told)
        lines = 2 if isinstance(moment.event, e.WorkspaceEvent) else 1
        yield from self.line(moment.at, "", Text(" "), "", body, lines=lines)
        for step in moment.left:
            sign = Text(style.SIGNS[step.status], style=style.STYLES[step.status])
            left = (
                Text()
                .append("left behind ", style="dim")
                .append_text(sign)
                .append(f" {step.number} ")
                .append_text(self.what(step))
            )
            yield from self.more(left, depth + 1)

    # the failure ------------------------------------------------------------------------------

    def failure(self) -> Iterator[Text]:
        """Why it failed, and what it knew then."""
        failed = self.timeline.failed
        if failed is None:
            return
        step = self.timeline.step(failed.step) if failed.step is not None else None
        where = f" at step {step.number}, {step.name}" if step is not None else " in the agent's own code"
        yield Text.assemble(("failed", "bold red")).append(f"{where}, {style.moment(failed.at)}")
        yield from self.error(failed.failure)
        knew = {
            "input": step.arguments if step is not None else self.timeline.input,
            "progress": next((each.progress for each in reversed(step.attempts)), None) if step is not None else None,
            "context": self.timeline.context,
            "not undone": list(failed.not_undone),
        }
        for name, value in knew.items():
            if value not in (None, {}, [], ""):
                told = self.arguments(value) if name in ("input", "context") else self.value(value)
                yield from self.beside(Text(f"  {name:<11}", style="dim"), Text(told), lines=6)

    def error(self, failure: Failure) -> Iterator[Text]:
        """An error with what led to it: its words, the lines of people's own code, what the far side answered."""
        for number, each in enumerate(chain(failure)):
            if failure.type.endswith(".StepFailed") and number == 0 and failure.cause is not None:
                frames = own_frames(each.frames)
                yield from self.beside(
                    Text("  called at  ", style="dim"), Text(", ".join(map(place, frames[-1:])) or "?")
                )
                continue
            lead = "  " if number == 0 or (failure.type.endswith(".StepFailed") and number == 1) else "  because of "
            message = each.message if self.full else each.message.strip().partition("\n")[0]
            words = Text.assemble((f"{each.type}: ", "bold red")).append(message)
            yield from self.beside(Text(lead, style="dim"), words, lines=6)
            for frame in own_frames(each.frames):
                yield from self.beside(Text("    at "), Text(place(frame), style="cyan"), lines=6)
            for note in each.notes:
                yield from self.beside(Text("    note ", style="dim"), Text(note), lines=6)
            if "status" in each.details or "body" in each.details:
                told = f"{each.details.get('status', '')} {each.details.get('body', '')}".strip()
                yield from self.beside(Text("    the far side answered "), Text(told, style="bold"), lines=6)
            for member in each.members:
                yield from self.beside(Text("    inside: "), Text(_short(member), style="red"), lines=6)


def newcomers(entries: Sequence[Entry]) -> set[int]:
    """Where another process, or another build of the code, took the run up than the one before."""
    taken = [(entry.seq, entry.event) for entry in entries if isinstance(entry, Moment)]
    by = [(seq, event.holder, event.build) for seq, event in taken if isinstance(event, e.RunTaken)]
    return {after[0] for before, after in pairwise(by) if before[1:] != after[1:]}


def asked_of(wait: Wait) -> str:
    """What a person is asked."""
    asked = wait.prompt or wait.name
    return asked_of_intention(wait.waits_for, wait.intention) or (
        asked if isinstance(asked, str) else style.inline(asked)
    )


def _grouped(attempts: Iterable[Attempt]) -> list[list[Attempt]]:
    """Attempts that did not return, those in a row that failed alike together."""
    groups: list[list[Attempt]] = []
    for attempt in attempts:
        if attempt.outcome == "returned" or (attempt.ended_at is None and not attempt.died):
            continue
        last = groups[-1][-1] if groups else None
        if last is not None and last.settled is None and alike(last.failure, attempt.failure):
            groups[-1].append(attempt)
        else:
            groups.append([attempt])
    return groups


def _short(failure: Failure) -> str:
    return f"{failure.type.rpartition('.')[2]}: {failure.message.strip().partition(chr(10))[0]}"


def _far_side(failure: Failure) -> str | None:
    for each in chain(failure):
        if "status" in each.details or "body" in each.details:
            return f"{each.details.get('status', '')} {each.details.get('body', '')}".strip()
    return None


def own_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The lines of people's own code; the innermost one where there is none."""
    own = [frame for frame in frames if not any(part in frame.file for part in _FOREIGN)]
    return own or list(frames[-1:])


def place(frame: Frame) -> str:
    """file:line in function, as short as it can be from here."""
    file = Path(frame.file)
    short = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{short}:{frame.line} in {frame.function}"


def reply_text(reply: Any) -> str | None:
    """The text of a model's reply; None where it has none, or no known shape."""
    try:
        return text_of(reply) or None
    except Exception:  # a reply may be anything
        return None
