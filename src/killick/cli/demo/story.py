"""The output of the demo: short lines, read from the record as it grows. Starts and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from killick.cli.style import span
from killick.client.client import Client
from killick.model import events as e

DIM, GOOD, WARN, BAD = "dim", "green", "yellow", "red"
MARGIN: Final = 18
"""Where the text of a line begins: after the step and the name."""


class Narrator:
    """Prints the story of one run."""

    def __init__(self, out: Console, run: str) -> None:
        self.out = out
        self.run = run
        self._seq = 0
        self._shown = ""
        self._names: dict[str, str] = {}
        self._to = ""
        self._started_at = 0

    def heading(self, text: str) -> None:
        self.out.print()
        self.out.print(Text(text, "bold"))

    def row(self, left: str, name: str, text: str | Text, *, style: str = DIM) -> None:
        """One line, or several with the text under itself. `style` is that of the first column."""
        content = text if isinstance(text, Text) else Text(text)
        first = Text.assemble((f"{left:>3}", style), f"  {name:<{MARGIN - 5}}")
        for number, line in enumerate(content.wrap(self.out, max(self.out.width - MARGIN, 20))):
            line.rstrip()
            self.out.print(Text.assemble(" " * MARGIN if number else first, line), soft_wrap=True)

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
                to = data["arguments"].get("to")
                self._names[event.step], self._to, self._started_at = event.name, f"to {to}: " if to else "", event.at
            case e.AttemptStarted():
                self._started_at = event.at
            case e.AttemptEnded(outcome="returned"):
                attempt = f"   attempt {event.attempt}" if event.attempt > 1 else ""
                self.step(event.step, Text.assemble(self._to, _brief(data["output"]), (attempt, GOOD)))
            case e.AttemptEnded():
                again = f"   again in {span((event.retry_at or event.at) - event.at)}"
                if data["failure"]["kind"] == "timeout":
                    said, again = f"no answer in {span(event.at - self._started_at)}", f"{again}, under the same key"
                else:
                    said = "{status} {body}".format_map(data["failure"]["details"])
                self.step(event.step, Text.assemble((said, WARN), (again, DIM)))
            case e.DecisionMade():
                self._names[event.step] = "decision"
                self.step(event.step, f"{data['choice']}, because {data['because']}")
            case e.AttemptSettled():
                text = f"in doubt, so reconcile looks first: {data['output']} was sent; not sent again"
                self.step(event.step, Text(text, GOOD))
            case _:
                pass

    def step(self, step: str, text: str | Text) -> None:
        """One line about a step; its first line has its number and name."""
        is_first, self._shown = step != self._shown, step
        self.row(step if is_first else "", self._names[step] if is_first else "", text)

    def killed(self, pid: int, step: str) -> None:
        self.step(step, Text(f"{self._to}the API sends it, but no answer arrives", WARN))
        message = f"{pid} is dead: the invite was sent, and the agent does not know"
        self.row("✗", "SIGKILL", Text(message, BAD), style=BAD)
        self._shown = ""


def _brief(value: Any) -> str:
    """A result, in few words."""
    if isinstance(value, Mapping):
        return ": ".join(map(str, value.values()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore[reportUnknownArgumentType]
