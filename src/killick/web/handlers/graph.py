"""The workflow of a run: its steps, branches, children, forks and rewinds, as data and as an outline. Changes nothing."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from killick.history.graph.graph import Lane, run_graph
from killick.history.graph.text import outline
from killick.history.page import RedactData
from killick.presenting.steps import reply_text
from killick.web.handlers.step_list import through_of
from killick.web.routes import Call, Nothing, Route, RunAsked, get

RUNS_MAX: Final = 24
"""So many runs of a family are drawn on a page; the others are counted."""


class OutlinePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a line, in its style; `run`, and `step` of it, are what it names."""

    text: str
    style: str
    run: str
    step: str


class RunGraph(msgspec.Struct, frozen=True, kw_only=True):
    """The family of a run as lanes, each with its steps; docs/file-formats.md describes them. `outline` is the same in
    lines for people."""

    version: int
    run: str
    root: str
    lanes: tuple[Any, ...]
    left_out: int
    outline: tuple[tuple[OutlinePart, ...], ...]


def graph(call: Call[RunAsked, Nothing]) -> RunGraph:
    """The run with its forks, children and rewound steps, as lanes of a drawing."""
    run, mask = call.asked.run, through_of(call, call.asked.run)
    found = run_graph(call.client.runtime.log, run, runs_max=RUNS_MAX, through=mask)
    if mask is not None:
        found = replace(found, lanes=tuple(_masked(lane, mask) for lane in found.lanes))
    lines = (tuple(OutlinePart(**part._asdict()) for part in line) for line in outline(found, text_of=reply_text))
    return RunGraph(**found.document(), outline=tuple(lines))


def _masked(lane: Lane, mask: RedactData) -> Lane:
    """The conditions of a fork, redacted for the caller."""
    given = tuple(replace(each, **mask({"value": each.value, "was": each.was})) for each in lane.conditions)
    return replace(lane, conditions=given)


ROUTES: Final[tuple[Route, ...]] = (
    get("/runs/{run}/graph", graph, asks=RunAsked, gives=RunGraph, page="_graph.html"),
)
