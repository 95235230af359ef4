"""The words of a graph. Pure functions of its lanes and nodes; prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unicodedata import combining, east_asian_width

import msgspec

from killick.history.graph.graph import Lane, Node
from killick.history.phrasing import counted, entries_of, scope_words, short
from killick.history.timeline_parts import Step
from killick.model.codec import plain

TextOf = Callable[[Any], str | None]


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


def brief(value: Any) -> str:
    """Returns a value as text: strings unchanged, the rest as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(plain(value)).decode()


def what(node: Node) -> str:
    """Returns a step in a few words."""
    step = node.step
    match node.sort:
        case "decision" if step.decision is not None:
            return brief(step.decision.question)
        case "wait" if step.waits:
            wait = step.waits[0]
            if wait.waits_for in ("answer", "settlement"):
                return f"asks{' ' * bool(wait.to)}{', '.join(wait.to)}: {brief(wait.prompt or wait.name)}"
            return "sleeps" if wait.waits_for == "time" else f"waits for {wait.name}"
        case "model":
            usage = step.usage
            named = (usage.model if usage is not None else "") or entries_of(step.arguments).get("model")
            return f"model {named or node.name}"
        case "undo":
            return f"undo {node.undoes} {node.name}"
        case "child":
            return f"starts {node.child or node.name}"
        case "scope" if node.name in ("gather", "hosted", "guests"):
            return f"{node.name} {scope_words(node.name, step.arguments)}"
        case _:
            return node.name


def outcome(step: Step, text_of: TextOf) -> str:
    """Returns a step's result or failure; empty if none."""
    if step.failure is not None:
        return short(step.failure)
    if step.status != "done" or step.sort in ("child", "undo", "scope") or step.output is None:
        return ""
    if step.decision is not None:
        return brief(step.decision.choice)
    if step.sort == "wait":
        answer = entries_of(step.output)
        by = step.waits[-1].by if step.waits and step.waits[-1].waits_for != "child" else None
        text = " ".join(brief(answer[name]) for name in ("kind", "status", "value", "result") if answer.get(name))
        return f"{by}: {text}" if by else text
    return (text_of(step.output) if step.sort == "model" else None) or brief(step.output)


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
