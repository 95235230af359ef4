"""The output of the demo: short lines, read from the record as it grows. Starts and decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from killick.cli.style import brief, span
from killick.client.client import Client
from killick.history.diff import Diff
from killick.log import Report
from killick.model import events as e
from killick.model.facts import Step
from killick.model.state import State

DIM, GOOD, WARN, BAD = "dim", "green", "yellow", "red"
MARGIN: Final = 18
"""Where the text of a line begins: after the step and the name."""


class Narrator:
    """Prints the story of one run."""

    def __init__(self, out: Console, run: str) -> None:
        self.out = out
        self.run = run
        self._seq = 0
        self._last = ""
        self._names: dict[str, str] = {}
        self._arguments: Mapping[str, Any] = {}
        self._started_at = 0

    # lines ------------------------------------------------------------------------------------

    def heading(self, text: str, aside: str = "") -> None:
        self.out.print()
        self.out.print(Text.assemble((text, "bold"), f"   {aside}" if aside else ""), no_wrap=True, overflow="ellipsis")

    def row(self, left: str, name: str, text: str | Text, *, style: str = "", left_style: str = DIM) -> None:
        """One line, or several with the text under itself."""
        content = text if isinstance(text, Text) else Text(text, style)
        first = Text.assemble((f"{left:>3}", left_style), f"  {name:<{MARGIN - 5}}")
        for number, line in enumerate(content.wrap(self.out, max(self.out.width - MARGIN, 20))):
            line.rstrip()
            self.out.print(Text.assemble(" " * MARGIN if number else first, line), soft_wrap=True)

    # before the play --------------------------------------------------------------------------

    def begins(self, folder: Path, *, is_again: bool) -> None:
        if is_again:
            self.out.print(Text(f"{folder} is there from an earlier demo: made anew", DIM))

    def stage(self, folder: Path, address: str) -> None:
        self.heading("An agent with nine steps, four tools and a flaky API")
        self.row("", "the agent", f"{folder}/meeting.py")
        self.row("", "the API", f"calendar_api.py, a separate process at {address}")
        self.row("", "the log", "killick.db; the lines below are read from it")

    def runs(self, pid: int) -> None:
        self.heading(f"Process {pid} runs the agent")

    # the record, as it grows ------------------------------------------------------------------

    def follow(self, kd: Client) -> None:
        """Prints the events recorded since the last call."""
        if kd.runtime.store.head(self.run) is None:
            return
        for recorded in kd.events(self.run, after=self._seq):
            self._seq = recorded.seq
            self._print(recorded.event, kd.runtime.log.data(self.run, recorded.seq) if recorded.event.data else {})

    def _print(self, event: e.Event, data: Mapping[str, Any]) -> None:
        match event:
            case e.StepIntended():
                self._names[event.step] = event.name
                self._arguments, self._started_at = data["arguments"], event.at
            case e.AttemptStarted():
                self._started_at = event.at
            case e.AttemptEnded(outcome="returned"):
                attempt = f"   attempt {event.attempt}" if event.attempt > 1 else ""
                self._step(event.step, Text.assemble(self._to(), _brief(data["output"]), (attempt, GOOD)))
            case e.AttemptEnded():
                self._step(event.step, self._failed(event, data["failure"]))
            case e.DecisionMade():
                self._names[event.step] = "decision"
                self._step(event.step, Text(f"{data['choice']}, because {data['because']}"))
            case e.AttemptSettled():
                text = f"in doubt, so reconcile looks first: {data['output']} was sent; not sent again"
                self._step(event.step, Text(text, GOOD))
            case _:
                pass

    def _failed(self, event: e.AttemptEnded, failure: Mapping[str, Any]) -> Text:
        is_silence = failure["kind"] == "timeout"
        said = f"no answer in {span(event.at - self._started_at)}" if is_silence else _answered(failure)
        again = f"   again in {span(event.retry_at - event.at)}" if event.retry_at else ""
        return Text.assemble((said, WARN), (again, DIM), (", under the same key" if is_silence else "", DIM))

    def _to(self) -> str:
        return f"to {self._arguments['to']}: " if "to" in self._arguments else ""

    def _step(self, step: str, text: Text) -> None:
        is_first, self._last = step != self._last, step
        self.row(step if is_first else "", self._names[step] if is_first else "", text)

    def killed(self, pid: int, step: str) -> None:
        self._step(step, Text(f"{self._to()}the API sends it, but no answer arrives", WARN))
        message = f"{pid} is dead: the invite was sent, and the agent does not know"
        self.row("✗", "SIGKILL", message, style=BAD, left_style=BAD)

    def resumed(self, pid: int) -> None:
        self.heading(f"Process {pid} resumes the run")
        self.row("1-5", "replayed", "recorded steps return their outcomes: no tool and no model is called again")
        self._last = ""

    # after the play ---------------------------------------------------------------------------

    def counts(self, calendar: Mapping[str, Any]) -> None:
        self.heading("What the API received")
        asked = calendar["asked"]
        people = Counter(invite["to"] for invite in calendar["invites"])
        each = ", ".join(f"{person} {count}" for person, count in people.items())
        self.row("✓", "invites", f"{each}: one each", left_style=GOOD)
        rooms = f"{len(calendar['rooms'])}, asked for {asked['POST /rooms']} times under one key"
        self.row("✓", "rooms", rooms, left_style=GOOD)
        self.row("", "requests", ", ".join(f"{name} {count}" for name, count in asked.items() if count))

    def before_and_after(self, changed: Diff) -> None:
        self.heading(f"The state at {changed.before.label} and at {changed.after.label}")
        styles = {"+": GOOD, "-": BAD, "~": WARN}
        for line in changed.lines(self.out.width - MARGIN):
            self.row(line.sign, line.part, line.text, left_style=styles[line.sign])

    def reasons(self, kd: Client) -> None:
        self.heading("Retries, the decision, and the step in doubt")
        state = kd.state(self.run)
        retries = {retry.step: retry for retry in state.retries}
        decisions = {decision.step: decision for decision in state.decisions}
        for step in state.fold.steps:
            if made := decisions.get(step.id):
                others = ", ".join(str(option) for option in made.options if option != made.choice)
                self.row(step.id, "decision", f"{made.question} {made.choice}, not {others}")
                self.row("", "", f"“{made.because}”, says the {made.by}")
            elif retry := retries.get(step.id):
                self.row(step.id, step.name, f"{retry.attempts} attempts")
                for error in retry.errors:
                    self.row("", "", _answered(error), style=WARN)
                self.row("", "", brief(state.outputs[step.id]))
            elif settled := _settled(state, step):
                self.row(step.id, step.name, settled)

    def verified(self, report: Report) -> None:
        self.heading("The event log")
        self.row("✓", "verified", f"{report.events} events; every hash matches", left_style=GOOD)

    def next(self, commands: Sequence[tuple[str, str]]) -> None:
        self.heading("Try next")
        width = max(len(command) for command, _ in commands if command.startswith("killick"))
        for command, purpose in commands:
            line = f"  {command:<{width}}"
            aside = f"   {purpose}" if purpose and len(line) + 3 + len(purpose) <= self.out.width else ""
            self.out.print(Text.assemble(line if aside else line.rstrip(), (aside, DIM)), soft_wrap=True)
        self.out.print()


def _brief(value: Any) -> str:
    """A result, in few words."""
    if isinstance(value, Mapping):
        return ": ".join(map(str, value.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType]


def _answered(failure: Mapping[str, Any]) -> str:
    """The remote service's response, unchanged, or the connection error."""
    details = failure["details"]
    return f"{details['status']} {details['body']}" if "body" in details else f"{failure['type']}: {failure['message']}"


def _settled(state: State, step: Step) -> str | None:
    """How a step came out that was in doubt."""
    event = state.event(step.output) if step.output else None
    if not isinstance(event, e.AttemptSettled):
        return None
    return f"{len(step.attempts)} attempt, in doubt; {event.by} found that it {event.settlement}"
