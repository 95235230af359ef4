"""The window of a run: the requests to its models, waste, evictions, faults; and one call by itself. Read-only."""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta
from msgspec.structs import replace

from killick.history.window_report import (
    EvictedPage,
    Eviction,
    Fault,
    ModelCall,
    Pin,
    Waste,
    WindowCost,
    WindowPage,
    Windows,
    WindowShare,
    grouped,
    windows,
)
from killick.presenting.documents import Document
from killick.web.handlers.step_detail import StepId, unknown
from killick.web.handlers.step_list import state_of
from killick.web.routes import Call, Nothing, Route, RunAsked, get
from killick.window.usage import Kind, UsageTracker, request_of

POINTS_MAX: Final = 160
"""How many points the drawing has at the most."""
LISTED_MAX: Final = 100
PAGES_MAX: Final = 200
MESSAGES_MAX: Final = 40


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
    """The requests of a run's model calls; `at` is the last of them, whose contents and pages are returned.

    Evictions, faults and pins are listed from the last, and counted; `left` are the different pages that left, and
    `wanted` is how often one was wanted back.
    """

    run: str
    calls: int
    budget: int | None = None
    at: ModelCall | None = None
    largest: ModelCall | None = None
    messages: int = 0
    fills: tuple[WindowShare, ...] = ()
    pages: tuple[WindowPage, ...] = ()
    sent: int = 0
    without: int = 0
    counted: int = 0
    cached: int = 0
    waste: tuple[Waste, ...] = ()
    money: WindowCost | None = None
    batches: int = 0
    evicted: int = 0
    faulted: int = 0
    pinned: int = 0
    left: int = 0
    wanted: int = 0
    thrashed: tuple[str, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    faults: tuple[Fault, ...] = ()
    pins: tuple[Pin, ...] = ()
    points: tuple[WindowPoint, ...] = ()


def window(call: Call[RunAsked, Nothing]) -> RunWindow:
    """The requests to a run's models: their contents by kind, waste, evictions, faults and cost."""
    run = call.asked.run
    found = windows(call.client.runtime.log, run)
    if found is None:
        return RunWindow(run=run, calls=0)
    if call.mask:
        found = _bare(found)
    return RunWindow.of(
        found, run=run, calls=len(found.calls), fills=tuple(sorted(found.fills, key=lambda fill: -fill.tokens)),
        pages=tuple(sorted(found.pages, key=lambda page: -page.tokens)[:PAGES_MAX]), batches=len(found.evictions),
        evicted=sum(len(each.pages) for each in found.evictions), faulted=len(found.faults), pinned=len(found.pins),
        evictions=found.evictions[: -LISTED_MAX - 1 : -1],
        faults=found.faults[: -LISTED_MAX - 1 : -1], pins=found.pins[: -LISTED_MAX - 1 : -1],
        points=tuple(_point(group) for group in grouped(found.calls, POINTS_MAX)),
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
        pages=tuple(replace(each, what=_tool(each.what)) for each in found.pages),
    )  # fmt: skip


def _tool(what: str) -> str:
    return "" if what.startswith("“") else what.partition(" ")[0]


# one call -----------------------------------------------------------------------------------------


class CallAsked(RunAsked, frozen=True, kw_only=True):
    """`cursor` is `next` of the page after."""

    step: StepId
    cursor: Annotated[str, Meta(pattern=r"^\d{1,9}$")] | None = None


class WindowPiece(Document, frozen=True):
    """A piece of a request: its message, its kind and its size. `left` is the page that was evicted from here."""

    message: int
    role: str
    kind: Kind
    tokens: int
    page: str
    left: str | None
    text: str
    calls: tuple[Any, ...]


class CallWindow(Document, frozen=True):
    """The request of one call, from its end: `next` is the cursor of earlier pieces. Empty if the step is no call."""

    run: str
    step: str
    messages: int = 0
    tokens: int = 0
    fills: tuple[WindowShare, ...] = ()
    system: Any = None
    tools: tuple[str, ...] = ()
    pieces: tuple[WindowPiece, ...] = ()
    first: int = 0
    next: str | None = None


def called(call: Call[CallAsked, Nothing]) -> CallWindow:
    """The request of one model call, message by message, with the tombstones of evicted pages."""
    run, number = call.asked.run, call.asked.step
    state = state_of(call, run)
    step = state.fold.step(number)
    if step is None:
        raise unknown(run, state.fold, number)
    request = request_of(state.data(step.edited or step.intended).get("arguments")) if step.sort == "model" else None
    if request is None:
        return CallWindow(run=run, step=number)
    filling = UsageTracker()
    filled = filling.fill(*request)
    end = filled.messages if call.asked.cursor is None else min(int(call.asked.cursor), filled.messages)
    start = max(end - MESSAGES_MAX, 0)
    return CallWindow(
        run=run, step=number, messages=filled.messages, tokens=filled.tokens,
        fills=tuple(
            WindowShare(kind=kind, tokens=tokens, pieces=filled.counts[kind])
            for kind, tokens in sorted(filled.kinds.items(), key=lambda each: -each[1]) if filled.counts[kind]
        ),
        system=request[2], tools=tuple(schema.name for schema in filling.schemas(request[1])),
        pieces=tuple(
            WindowPiece(
                message=seen.at, role=seen.role, kind=seen.piece.kind, tokens=seen.piece.tokens,
                page=seen.piece.handle, left=seen.piece.left, text=seen.text,
                calls=tuple({"name": each.name, "arguments": each.arguments} for each in seen.calls),
            )
            for seen in filling.pieces() if start <= seen.at < end
        ),
        first=start, next=str(start) if start else None,
    )  # fmt: skip


ROUTES: Final[tuple[Route, ...]] = (
    get("/runs/{run}/window", window, asks=RunAsked, gives=RunWindow, page="_window.html"),
    get("/runs/{run}/window/{step}", called, asks=CallAsked, gives=CallWindow, page="_window_call.html"),
)
