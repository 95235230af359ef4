"""The words of a graph. Pure functions of its lanes and nodes; prints nothing."""

from __future__ import annotations

from typing import Final
from unicodedata import combining, east_asian_width

from killick.history.phrasing import counted, short
from killick.history.timeline_parts import Step
from killick.presenting import steps
from killick.presenting.graph.graph import Lane, Node
from killick.presenting.phrase import Briefly

_VALUES: Final = Briefly(200)


def cells(text: str) -> int:
    """Returns a text's width in terminal columns."""
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def cut(text: str, room: int) -> str:
    """Cuts a text to one line of that width."""
    text = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    if cells(text) <= room:
        return text
    while text and cells(text) > room - 1:
        text = text[: min(len(text) - 1, room)]
    return f"{text}…"


def what(node: Node) -> str:
    """Returns a step in a few words."""
    step, given = node.step, steps.given(node.step, _VALUES)
    match node.sort:
        case "decision":
            return given or node.name
        case "wait" if step.waits:
            wait = step.waits[0]
            if wait.waits_for in ("answer", "settlement"):
                return f"asks{' ' * bool(wait.to)}{', '.join(wait.to)}: {given}"
            return "sleeps" if wait.waits_for == "time" else f"waits for {wait.name}"
        case "model":
            return f"model {given or node.name}"
        case "undo":
            return f"undo {node.undoes} {node.name}"
        case "child":
            return f"starts {node.child or node.name}"
        case "scope" if node.name in ("gather", "hosted", "guests"):
            return f"{node.name} {given}"
        case _:
            return node.name


def outcome(step: Step) -> str:
    """Returns a step's result or failure; empty if none."""
    return short(step.failure) if step.failure is not None else str(steps.outcome(step, _VALUES) or "")


def notes(node: Node, lane: Lane) -> list[str]:
    """Returns remarks on a step beyond its outcome."""
    found: list[str] = []
    if node.adopted is not None:
        source = node.adopted
        found.append(f"↩ from {f'{source.run} ' * (source.run != lane.run)}step {source.step}")
    if node.given_by is not None:
        found.append("output given" if node.given_by == "a person" else f"output given by {node.given_by}")
    if node.undone:
        found.append(f"undone by {node.step.undone_by}" if node.step.undone_by else "undone")
    if node.in_doubt:
        found.append("in doubt")
    elif lane.sort == "left" and node.stands == "happened":
        found.append("happened")
    if node.attempts > 1:
        found.append(counted(node.attempts, "attempt"))
    return found


def heading(lane: Lane) -> list[str]:
    """Returns a lane's heading: the run, its origin, and its changes."""
    by = f" by {lane.by}" if lane.by else ""
    because = [f"“{lane.because}”"] if lane.because else []
    match lane.sort:
        case "left":
            return [f"rewound, generation {lane.generation}", f"rewound to {lane.cut}{by}", *because]
        case "fork":
            changed = [condition.line(48) for condition in lane.conditions]
            return [lane.run, f"fork at {lane.cut}{by}", *changed, *because]
        case "child":
            return [lane.run, f"{lane.agent}, child of step {(lane.cut or '').partition(':')[0]}"]
        case _:
            return [lane.run, lane.agent, *([f"child of {lane.child_of}"] if lane.child_of else [])]


def ending(lane: Lane) -> str:
    """Returns a lane's ending."""
    if lane.sort == "left":
        return "left"
    status = f"{lane.status}: {lane.failed}" if lane.failed else lane.status
    return f"{status}, continues as {lane.renewed_as}" if lane.renewed_as else status
