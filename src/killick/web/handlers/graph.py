"""The workflow of a run, drawn: its steps, branches, children, forks and rewinds, with where it is. Changes nothing."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from starlette.responses import Response

from killick.presenting.graph.graph import Graph, Lane, run_graph
from killick.presenting.graph.svg import svg
from killick.web.routes import Call, Nothing, RunAsked, get

RUNS_MAX: Final = 24
"""The maximum number of drawn runs of a run tree; the others are counted."""


class PictureAsked(RunAsked, frozen=True, kw_only=True):
    whole: Annotated[bool, msgspec.Meta(description="With every step of a run of up to 400, none folded.")] = False


@get("/runs/{run}/graph")
def graph(call: Call[RunAsked, Nothing]) -> dict[str, Any]:
    """The run with its forks, children and rewound steps, as lanes; docs/file-formats.md describes them."""
    return _drawn(call).document()


@get("/runs/{run}/graph.svg", media="image/svg+xml")
def picture(call: Call[PictureAsked, Nothing]) -> Response:
    """The same as a picture, for a page that has its style: steps and runs are links to their pages."""

    def link_to(lane: Lane, step: str | None) -> str:
        if step is None:
            return call.url("/runs/{run}", run=lane.run)
        return f"{call.url('/runs/{run}', run=lane.run, step=step)}#step-{step}"

    drawn = svg(_drawn(call), link_to, whole=call.asked.whole)
    # It is a part of a page: opened by itself, it is saved.
    name = f"attachment; filename*=UTF-8''{quote(call.asked.run, safe='')}.svg"
    return Response(drawn, headers={"Content-Disposition": name}, media_type="image/svg+xml")


def _drawn(call: Call[Any, Nothing]) -> Graph:
    return run_graph(call.log, call.asked.run, runs_max=RUNS_MAX)
