"""The words of a graph, and its outline for a terminal. Pure functions of a graph; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple
from unicodedata import combining, east_asian_width

import msgspec

from killick.history.graph.graph import Graph, Lane, Node, kept
from killick.history.phrasing import SIGNS, counted, entries_of, scope_words, short
from killick.history.timeline_parts import Step
from killick.model.codec import plain

INSIDE_MAX: Final = 8
"""The maximum number of drawn steps of a scope; the others are counted."""

_TEXT_MAX: Final = 200
"""The maximum width of a text in an outline; the terminal may show less."""

TextOf = Callable[[Any], str | None]


class Span(NamedTuple):
    """A part of a line. Its style is the status of a step or a run, or one of: run, name, quiet, cut, note, left."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


# words --------------------------------------------------------------------------------------------


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


# outline ------------------------------------------------------------------------------------------


def outline(graph: Graph, *, text_of: TextOf = lambda _: None) -> Iterator[Line]:
    """Returns the graph as lines: each lane under its heading, and each branch indented below its step."""
    for index, lane in enumerate(graph.lanes):
        if lane.parent is None:
            yield from _lane(graph, index, 0, text_of)
    if graph.left_out:
        yield (Span(f"{counted(graph.left_out, 'more lane')} left out", "quiet"),)


def _lane(graph: Graph, index: int, depth: int, text_of: TextOf) -> Iterator[Line]:
    lane, branches = graph.lanes[index], graph.branches(index)
    dim = "left" if lane.sort == "left" else ""
    inside = _indent(depth + 1)
    first, *others = (cut(line, _TEXT_MAX) for line in heading(lane))
    yield _indent(depth), Span(first, dim or "run"), Span("  ◀ this one" if lane.asked else "", "asked")
    yield from ((inside, Span(line, dim or "cut")) for line in others)
    for branch in branches.get(-1, ()):
        yield from _lane(graph, branch, depth + 2, text_of)
    notable = [place for place, node in enumerate(lane.nodes) if node.notable]
    anchors = [place for place, node in enumerate(lane.nodes) if node.folded or place in branches]
    for item in kept(len(lane.nodes), notable, anchors):
        hidden = len(item) if isinstance(item, range) else lane.nodes[item].folded
        if hidden or isinstance(item, range):
            yield inside, Span(f"… {counted(hidden, 'step')} …", "quiet")
            continue
        yield from _node(lane.nodes[item], lane, depth + 1, text_of)
        for branch in branches.get(item, ()):
            yield from _lane(graph, branch, depth + 2, text_of)
    yield inside, Span(cut(ending(lane), _TEXT_MAX), dim or lane.status)


def _node(node: Node, lane: Lane, depth: int, text_of: TextOf) -> Iterator[Line]:
    dim = "left" if lane.sort == "left" else ""
    status = "in_doubt" if node.in_doubt else node.status
    sign = Span(f"{SIGNS[status]} ", dim if dim and status == "done" else status)
    called = Span(f"{node.number}  ", dim or "name"), Span(cut(what(node), _TEXT_MAX), "undone" if node.undone else dim)
    marks = [Span(f"  {note}", "note") for note in notes(node, lane)]
    output = cut(outcome(node.step, text_of), _TEXT_MAX)
    arrow = (Span(" → ", "quiet"), Span(output, "failed" if node.status == "failed" else "quiet")) if output else ()
    yield (_indent(depth), sign, *called, *marks, *arrow)
    inside = node.inside if len(node.inside) <= INSIDE_MAX else node.inside[: INSIDE_MAX - 1]
    for each in inside:
        yield from _node(each, lane, depth + 1, text_of)
    if len(inside) < len(node.inside):
        more = f"… {counted(len(node.inside) - len(inside), 'step')} inside …"
        yield _indent(depth + 1), Span(more, "quiet")


def _indent(depth: int) -> Span:
    return Span("  " * depth)
