"""Builds a rehearsal from a recorded run: the same input, replies and answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from killick.check.checker import Case
from killick.check.fakes import always, in_order
from killick.definitions.agents import AnyAgent
from killick.engine.steps.model_reply import rebuild
from killick.errors import KillickError
from killick.log import Log
from killick.model import events as e

MORE_CALLS: Final = 64
"""How often a tool's last value is repeated, if a rehearsal calls it more often than the run did."""


def case_like(log: Log, run: str, agent: AnyAgent) -> Case:
    """Returns a case with everything that an agent met in a run, and in its children."""
    state = log.state(run)
    outputs: dict[str, list[Any]] = {}
    answers: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    for each in _family(log, run):
        found = log.state(each)
        for step in found.fold.steps:
            if step.sort in ("tool", "model") and step.status == "done" and step.output:
                data = found.data(step.output)
                value = data.get("output")
                reply = data.get("reply")
                outputs.setdefault(step.name, []).append(rebuild(reply, value) if reply else value)
        for recorded in log.read(each):
            if isinstance(recorded.event, e.WaitClosed) and recorded.event.how == "answered":
                match log.data(each, recorded.seq).get("answer"):
                    case {"kind": "approve" | "reject" | "respond" | "edit" as verb, **rest}:
                        answers[recorded.event.step] = (verb, rest.get("value"))
                    case _:
                        pass
            elif isinstance(recorded.event, e.MessageTaken) and not recorded.event.name.startswith("killick."):
                messages[recorded.event.name] = log.data(each, recorded.seq).get("body")
    fakes = {
        name: always(values[0]) if len(values) == 1 else in_order(*values, *values[-1:] * MORE_CALLS)
        for name, values in outputs.items()
    }
    return Case(agent=agent, input=state.input, fakes=fakes, answers=answers, messages=messages)


def _family(log: Log, run: str) -> Iterator[str]:
    yield run
    for child in log.ledger(run).children:
        try:
            yield from _family(log, child.run)
        except KillickError:
            continue
