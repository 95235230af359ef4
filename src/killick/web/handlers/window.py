"""The window of a run: the requests to its models, evictions and faults. Read-only."""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from killick.history.window_report import EvictedPage, ModelCall, Windows, grouped, windows
from killick.presenting.documents import Document
from killick.web.routes import Call, Nothing, RunAsked, get

POINTS_MAX: Final = 160
"""How many points the drawing has at the most."""
LISTED_MAX: Final = 100


class WindowPoint(Document, frozen=True):
    """One call, or a few consecutive ones: the largest of them, and the events of all."""

    first: int
    last: int
    step: str
    sent: int
    without: int
    evicted: int
    faulted: int


class RunWindow(Document, frozen=True):
    """The requests of a run's model calls.

    `report` is that of `killick show --window --json` without its calls; it lists evictions, faults and pins from the
    last, up to a limit, and these are counted here. It is null if the run called no model.
    """

    run: str
    calls: int
    batches: int = 0
    evicted: int = 0
    faulted: int = 0
    pinned: int = 0
    points: tuple[WindowPoint, ...] = ()
    report: Windows | None = None


@get("/runs/{run}/window", page="_window.html")
def window(call: Call[RunAsked, Nothing]) -> RunWindow:
    """The requests to a run's models: their contents by kind, evictions and faults."""
    run = call.asked.run
    found = windows(call.client.runtime.log, run)
    if found is None:
        return RunWindow(run=run, calls=0)
    if call.mask:
        found = _bare(found)
    latest = slice(None, -LISTED_MAX - 1, -1)
    report = replace(
        found, calls=(), fills=tuple(sorted(found.fills, key=lambda fill: -fill.tokens)),
        evictions=found.evictions[latest], faults=found.faults[latest], pins=found.pins[latest],
    )  # fmt: skip
    return RunWindow(
        run=run, calls=len(found.calls), batches=len(found.evictions),
        evicted=sum(len(each.pages) for each in found.evictions), faulted=len(found.faults), pinned=len(found.pins),
        points=tuple(_point(group) for group in grouped(found.calls, POINTS_MAX)), report=report,
    )  # fmt: skip


def _point(group: Any) -> WindowPoint:
    most: ModelCall = max(group, key=lambda call: call.sent)
    return WindowPoint(
        first=group[0].number, last=group[-1].number, step=most.step, sent=most.sent,
        without=max(call.without for call in group), evicted=sum(call.evicted for call in group),
        faulted=sum(call.faulted for call in group),
    )  # fmt: skip


def _bare(found: Windows) -> Windows:
    """The same for a redacted run: a page's source was shortened, so values in it could not be matched."""

    def gone(page: EvictedPage) -> EvictedPage:
        return replace(page, what=_tool(page.what))

    evictions = tuple(replace(each, pages=tuple(map(gone, each.pages))) for each in found.evictions)
    return replace(
        found, evictions=evictions, faults=tuple(replace(each, what=_tool(each.what)) for each in found.faults),
        pins=tuple(replace(each, what=_tool(each.what)) for each in found.pins),
    )  # fmt: skip


def _tool(what: str) -> str:
    return "" if what.startswith("“") else what.partition(" ")[0]
