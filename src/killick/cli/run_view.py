"""The page of a run: its position and the next command first, then its timeline and its failure. Decides nothing.

Every line is a Text that fits the width; longer ones are cut, or wrapped with `--full`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from rich.text import Text

from killick.cli import style
from killick.cli.context import Shell
from killick.history.page import STEPS_MAX
from killick.history.phrasing import chain, entries_of, short
from killick.history.timeline import Timeline, part_of
from killick.history.timeline_parts import Entry, Moment, Step, Wait
from killick.model import events as e
from killick.model.failure import Failure
from killick.presenting import moments, steps

HEAD_MAX: Final = 15
TAIL_MAX: Final = 35
"""How much of a long timeline is shown at its beginning and at its end."""

WIDE: Final = 160
"""Lines of text are not wider than this, however wide the terminal is."""

LONG_US: Final = 1_000_000
"""A step that takes longer than this is shown before it ends."""

VALUE_CHARS: Final = 1_000
WHOLE: Final = 1_000_000_000


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
        self._is_quiet = moments.trivial(timeline.entries)
        self.room = max(min(width, WIDE) - self.indent, 20)

    @classmethod
    def of(cls, shell: Shell, timeline: Timeline, *, full: bool = False, err: bool = False) -> Page:
        """The page of a run as it is now, for one of the consoles."""
        width = (shell.err if err else shell.out).width
        return cls(timeline, width=width, now_us=shell.clock.now_us(), full=full)

    @property
    def indent(self) -> int:
        """Where text begins: after the time, how long it took, the sign and the number."""
        return 8 + 2 + 7 + 2 + 2 + self.digits + 2

    @cached_property
    def _refused(self) -> dict[str, str]:
        return steps.refused_calls(self.timeline.steps())

    @cached_property
    def _begun(self) -> list[tuple[int, str]]:
        return sorted((step.seq, step.number) for step in self.timeline.steps())

    def after(self, seq: int) -> str:
        """The last step that had begun at an event."""
        at = bisect_right(self._begun, (seq, "~"))
        return f" after step {self._begun[at - 1][1]}" if at else " at the start"

    # lines ------------------------------------------------------------------------------------

    def line(
        self, at: int | None, took: str, sign: Text, number: str, body: Text, *, busy: bool = False, lines: int = 1
    ) -> list[Text]:
        head = Text().append(style.moment(at, date=False) if at is not None else " " * 8, style="dim")
        head.append("  ").append(f"{took:>7}", style="yellow" if busy else "dim")
        head.append("  ").append_text(sign).append(" ").append(f"{number:<{self.digits}}", style="bold").append("  ")
        return self.hanging(head, body, lines)

    def more(self, body: Text, depth: int = 0, lines: int = 1) -> list[Text]:
        """Further lines of an entry, under its text."""
        return self.hanging(Text(" " * (self.indent + 2 * depth)), body, lines)

    def hanging(self, head: Text, body: Text, lines: int = 1) -> list[Text]:
        """A body next to its head, on a limited number of lines: cut where it is longer, unless all is wanted."""
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
        """The displayed part of the timeline, flat."""
        for entry in self.timeline.entries if entries is None else entries:
            if isinstance(entry, Moment) and not self.full and self._is_quiet(entry):
                continue
            yield Row(depth, entry)
            if isinstance(entry, Step):
                yield from self.rows(entry.entries, depth + 1)

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
        came = steps.outcome(step, self)
        output = style.text(came) if came is not None else None
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
        """The step as code would have it, in one line."""
        given, name = steps.given(step, self), Text(step.name, style="bold")
        match step.sort:
            case "decision" if step.decision is not None:
                return Text(given or "decision", style="italic")
            case "model":
                messages: Any = entries_of(step.given).get("messages") or entries_of(step.given).get("input")
                count = f" ({len(messages)} messages)" if isinstance(messages, list) else ""  # pyright: ignore
                return Text("model ").append(given or step.name, style="bold").append(count, style="dim")
            case "undo":
                return Text(f"undo {step.undoes} ").append_text(name)
            case "child":
                run = step.child.run if step.child is not None else ""
                return Text("starts ").append(run, style="bold").append(f" {step.name}({given})")
            case "scope":
                return name.append(" ").append(given, style="dim" if step.name == "transition" else "not bold")
            case "wait":
                return self.waits_for(step.waits[0]) if step.waits else name
            case _:
                return name.append(f"({given})", style="not bold")

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
                return Text.assemble((who, "bold")).append(steps.asked_of(wait))
            case _:
                return Text(f"waits for {wait.waits_for} {wait.name}")

    def about(self, step: Step) -> Iterator[Text]:
        """The other records of a step, a line each."""
        yield from map(style.text, steps.about(step, self))
        if (why := self._refused.get(step.number)) is not None:
            yield Text(f"refused: {why}", style="red")
        if step.status == "delayed" and step.delayed_until is not None:
            when = f"{style.moment(step.delayed_until, date=False)} ({style.ago(step.delayed_until, self.now_us)})"
            yield Text(f"again at {when}", style="yellow")
        for wait in step.waits:
            if step.sort != "wait" and wait.rule is None:
                question = Text("asks: did it happen?", style="bold")
                yield question if wait.waits_for == "settlement" else self.waits_for(wait)
                if (answer := steps.answered(wait, self)) is not None:
                    yield Text.assemble(("→ ", "dim")).append_text(style.text(answer))
            elif wait.how is None and wait.deadline is not None and wait.waits_for != "time":
                default = f", then {self.value(wait.default)}" if wait.default is not None else ""
                until = f"until {style.moment(wait.deadline)} ({style.ago(wait.deadline, self.now_us)}){default}"
                yield Text(until, style="dim")
        yield from map(style.text, steps.afterwards(step, self))

    # between steps ----------------------------------------------------------------------------

    def moment(self, moment: Moment, depth: int = 0) -> Iterator[Text]:
        lead = "── " if isinstance(moment.event, e.PlanReached) else ""
        body = Text("  " * depth + lead).append_text(style.text(moments.line(moment, self)))
        lines = 2 if isinstance(moment.event, e.WorkspaceEvent) else 1
        yield from self.line(moment.at, "", Text(" "), "", body, lines=lines)
        for step in moment.left:
            sign = Text(style.SIGNS[step.status], style=style.STYLES[step.status])
            left = Text.assemble(("rewound ", "dim"), sign, f" {step.number} ", self.what(step))
            yield from self.more(left, depth + 1)

    # the failure ------------------------------------------------------------------------------

    def failure(self) -> Iterator[Text]:
        """The failure, and the state at that time."""
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
                text = self.arguments(value) if name in ("input", "context") else self.value(value)
                yield from self.hanging(Text(f"  {name:<11}", style="dim"), Text(text), lines=6)

    def error(self, failure: Failure) -> Iterator[Text]:
        """An error with its causes: its message, the frames of user code, the remote service's response."""
        for number, each in enumerate(chain(failure)):
            if failure.type.endswith(".StepFailed") and number == 0 and failure.cause is not None:
                frames = steps.own_frames(each.frames) or each.frames
                yield from self.hanging(
                    Text("  called at  ", style="dim"), Text(", ".join(map(steps.place, frames[-1:])) or "?")
                )
                continue
            lead = "  " if number == 0 or (failure.type.endswith(".StepFailed") and number == 1) else "  because of "
            message = each.message if self.full else each.message.strip().partition("\n")[0]
            words = Text.assemble((f"{each.type}: ", "bold red")).append(message)
            yield from self.hanging(Text(lead, style="dim"), words, lines=6)
            for frame in steps.own_frames(each.frames) or each.frames[-1:]:
                yield from self.hanging(Text("    at "), Text(steps.place(frame), style="cyan"), lines=6)
            for note in each.notes:
                yield from self.hanging(Text("    note ", style="dim"), Text(note), lines=6)
            if (answered := steps.response(each)) is not None:
                yield from self.hanging(Text("    the service answered "), Text(answered, style="bold"), lines=6)
            for member in each.members:
                yield from self.hanging(Text("    inside: "), Text(short(member), style="red"), lines=6)


# following ----------------------------------------------------------------------------------------


class Following:
    """Prints what is committed after an event: moments, and each step when it ends, begins to wait or takes long.

    With `err`, steps alone, as remarks.
    """

    def __init__(self, shell: Shell, run: str, *, seen: int = 0, full: bool = False, err: bool = False) -> None:
        self.shell, self.run, self.seen, self.full, self.err = shell, run, seen, full, err
        self.shown = {step.number: _change(step) for step in part_of(shell.log, run).steps()} if seen else {}

    def look(self) -> None:
        """Prints the news. Reads as many steps as there are new events, and a page before them."""
        head = self.shell.log.head(self.run).seq
        found = part_of(self.shell.log, self.run, limit=STEPS_MAX + head - self.seen, known=False)
        page = Page.of(self.shell, found, full=self.full, err=self.err)
        for depth, entry in page.rows():
            if isinstance(entry, Moment):
                lines = page.moment(entry, depth) if entry.seq > self.seen and not self.err else ()
            else:
                lines = page.step(entry, depth) if self._is_news(entry, page.now_us) else ()
            self.shell.print(*lines, err=self.err)
        self.seen = head

    def _is_news(self, step: Step, now_us: int) -> bool:
        is_quick = step.status in ("intended", "running") and now_us - step.intended_at < LONG_US
        if is_quick or self.shown.get(step.number) == _change(step):
            return False
        self.shown[step.number] = _change(step)
        return True


def _change(step: Step) -> tuple[str, int]:
    return step.status, len(step.attempts)
