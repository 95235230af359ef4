"""Reports on a run's model requests: their composition, and what a window evicted and brought back.

Reads any run with model calls, windowed or not; its cost is that of the new content of each call. Tokens are consistent
estimates, so that they are comparable; the provider's counts are listed too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from killick.log.boundaries import RunMoment
from killick.log.log import Log
from killick.model import event_codec, page_events
from killick.model import events as e
from killick.model.chunks import SharedReader
from killick.model.facts import Step
from killick.model.fold import Fold, timeline
from killick.store.records import Row
from killick.window.messages import is_list, is_map
from killick.window.pages import Tokens, estimate
from killick.window.usage import KINDS, EvictedPart, Kind, RequestUsage, UsageTracker, request_of

WINDOWS_VERSION: Final = 1
"""The version of the JSON form, which docs/file-formats.md describes."""

_AT_ONCE: Final = 256
"""The number of calls whose values are fetched together."""

_DECISIVE: Final = tuple(
    b'{"kind":"%s"' % str(kind.__struct_config__.tag).encode()
    for kind in (page_events.PageEvicted, page_events.PageFaulted, page_events.PagePinned, e.RunRewound, e.RunForked)
)
"""Prefixes of the events about evictions and faults, and of those that decide which count."""


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the document."""


class WindowShare(_Part, frozen=True):
    """The tokens of one kind in a request, and their number of parts."""

    kind: Kind
    tokens: int
    pieces: int


class ModelCall(_Part, frozen=True):
    """One call. `without` is its size without evictions; `counted` and `cached` are the provider's counts of read and
    cached tokens. `evicted` pages were evicted just before it, `faulted` were requested by its reply."""

    number: int
    step: str
    at_us: int
    model: str
    sent: int
    without: int
    counted: int | None
    cached: int
    evicted: int = 0
    faulted: int = 0


class EvictedPage(_Part, frozen=True):
    """An evicted page, and the reason."""

    page: str
    kind: str
    what: str
    tokens: int
    why: str


class _Decision(_Part, frozen=True):
    """A decision of the window: its event, and the call that it was made at."""

    seq: int
    at_us: int
    step: str | None
    call: int


class Eviction(_Decision, frozen=True):
    """Pages evicted together before call `call`; each later call saves `tokens`."""

    because: page_events.EvictedBecause
    tokens: int
    pages: tuple[EvictedPage, ...]


class Fault(_Decision, frozen=True):
    """A page that the reply of call `call` requested again, and how it returned."""

    page: str
    how: page_events.FaultedHow
    tokens: int
    what: str


class Pin(_Decision, frozen=True):
    """A page pinned until a turn."""

    page: str
    until: int
    because: page_events.PinnedBecause
    what: str


class Windows(_Part, frozen=True):
    """The model requests of a run. `at` is the displayed call: the last one."""

    version: int
    run: str
    at: ModelCall
    messages: int
    fills: tuple[WindowShare, ...]
    budget: int | None
    sent: int
    without: int
    counted: int
    cached: int
    largest: ModelCall
    evictions: tuple[Eviction, ...]
    faults: tuple[Fault, ...]
    pins: tuple[Pin, ...]
    left: int
    """The number of distinct evicted pages, without duplicates."""
    wanted: int
    """How often one of these was requested again."""
    thrashed: tuple[str, ...]
    """Pages that were requested again more than once."""
    calls: tuple[ModelCall, ...]


def grouped(calls: Sequence[ModelCall], columns: int) -> list[Sequence[ModelCall]]:
    """Groups the calls evenly into as many groups as fit."""
    count = min(columns, len(calls))
    edges = [round(at * len(calls) / count) for at in range(count + 1)]
    return [calls[start:end] for start, end in pairwise(edges)]


def windows(log: Log, run: str, place: RunMoment | None = None, *, tokens: Tokens = estimate) -> Windows | None:
    """Reports on a run's model requests, at its head or at a position; None if it called no model."""
    at = log.head(run).seq if place is None else place.seq
    keep = place.keep if place is not None else ()
    rows = {row.seq: row for row in log.rows(run) if row.seq <= at or row.seq in keep}
    fold = log.state(run, None if place is None else at, keep=keep).fold
    reading = _ReportBuilder(log, run, rows, fold, tokens)
    reading.read()
    return reading.document() if reading.calls else None


class _ReportBuilder:
    """Processes a run's calls in order, and the decisions between them."""

    def __init__(self, log: Log, run: str, rows: Mapping[int, Row], fold: Fold, tokens: Tokens) -> None:
        self._run, self._rows, self._tokens = run, rows, tokens
        steps = [fold.steps[index] for index in fold.trace]
        self._steps = [step for step in steps if step.sort == "model" and (step.edited or step.intended) in rows]
        self._sharing = SharedReader(log.store.pieces)
        self._fillings: dict[str, UsageTracker] = {}
        self._filled: RequestUsage | None = None
        self._scopes = {step.id.rpartition(".")[0] for step in self._steps}
        self._latest: dict[str, int] = {}
        """For each branch, the number of its last call, and the evictions before its next one."""
        self._waiting: dict[str, list[int]] = {}
        self.calls: list[ModelCall] = []
        self.budget: int | None = None
        self.evictions: list[Eviction] = []
        self.faults: list[Fault] = []
        self.pins: list[Pin] = []

    def read(self) -> None:
        bodies = ((row.seq, row.body) for row in self._rows.values())
        decisive = [(seq, event_codec.decode(body)) for seq, body in bodies if body.startswith(_DECISIVE)]
        decided = [(seq, event) for seq, event in timeline(decisive) if isinstance(event, page_events.PageEvent)]
        decided.reverse()
        for start in range(0, len(self._steps), _AT_ONCE):
            raws = (self._rows[step.edited or step.intended].data for step in self._steps[start : start + _AT_ONCE])
            self._sharing.expect(raw for raw in raws if raw is not None)
        for step in self._steps:
            while decided and decided[-1][0] < step.intended:
                self._decided(*decided.pop())
            self._call(step)
        while decided:
            self._decided(*decided.pop())

    # decisions ------------------------------------------------------------------------------------

    def _decided(self, seq: int, event: page_events.PageEvent) -> None:
        data = self._data(seq, whole=isinstance(event, page_events.PageEvicted))
        budget = data.get("budget")
        self.budget = budget if isinstance(budget, int) else self.budget
        scope = self._scope(event.step or "")
        before = self._latest.get(scope, 0)
        where: dict[str, Any] = {"seq": seq, "at_us": event.at, "step": event.step}
        source = source if isinstance(source := data.get("source"), str) else ""
        match event:
            case page_events.PageFaulted(page=page, how=how, tokens=tokens):
                self.faults.append(Fault(**where, call=before, page=page, how=how, tokens=tokens, what=source))
                if before:
                    call = self.calls[before - 1]
                    self.calls[before - 1] = replace(call, faulted=call.faulted + 1)
            case page_events.PagePinned(page=page, until=until, because=why):
                self.pins.append(Pin(**where, call=before, page=page, until=until, because=why, what=source))
            case page_events.PageEvicted(because=because, tokens=tokens):
                listed = data.get("pages")  # it, or a part of it, may be erased
                pages = {each.get("page"): each for each in listed if is_map(each)} if is_list(listed) else {}
                gone = tuple(_evicted_page(page, pages.get(page, {}), because) for page in event.pages)
                self._waiting.setdefault(scope, []).append(len(self.evictions))
                self.evictions.append(Eviction(**where, call=before + 1, because=because, tokens=tokens, pages=gone))
                left = self._filling(scope).left
                left |= {each.page: EvictedPart(each.page, each.kind, each.tokens) for each in gone}

    def _scope(self, step: str) -> str:
        """Returns the branch of a decision's conversation: parallel tool calls are answered in separate branches."""
        scope = step.rpartition(".")[0]
        while scope and scope not in self._scopes:
            scope = scope.rpartition(".")[0]
        return scope

    def _data(self, seq: int, *, whole: bool) -> Mapping[str, Any]:
        """Returns a decision's values, without a faulted page's text, which is long."""
        raw = self._rows[seq].data
        if raw is None:
            return {}
        found: dict[str, Any] = self._sharing.unpack(raw) if whole else msgspec.json.decode(raw)
        return found

    def _filling(self, scope: str) -> UsageTracker:
        return self._fillings.setdefault(scope, UsageTracker(self._tokens))

    # one call ---------------------------------------------------------------------------------------

    def _call(self, step: Step) -> None:
        raw = self._rows[step.edited or step.intended].data
        arguments: Any = self._sharing.unpack(raw).get("arguments") if raw is not None else None
        if (request := request_of(arguments)) is None:
            return
        scope = step.id.rpartition(".")[0]
        usage, named = self._usage(step), arguments.get("model")
        model = usage.model or (named if isinstance(named, str) else "")
        filled = self._filled = self._filling(scope).fill(*request)
        number = self._latest[scope] = len(self.calls) + 1
        evicted = 0
        for at in self._waiting.pop(scope, ()):
            self.evictions[at] = replace(self.evictions[at], call=number)
            evicted += len(self.evictions[at].pages)
        self.calls.append(
            ModelCall(
                number=number, step=step.id, at_us=step.at, model=model, sent=filled.tokens, without=filled.without,
                counted=usage.tokens_in or None, cached=usage.tokens_cached, evicted=evicted,
            )
        )  # fmt: skip

    def _usage(self, step: Step) -> e.Usage:
        row = self._rows.get(step.output)
        event = event_codec.decode(row.body) if row is not None else None
        return event.usage or e.Usage() if isinstance(event, e.AttemptEnded) else e.Usage()

    # the report -------------------------------------------------------------------------------------

    def document(self) -> Windows:
        filled, calls = self._filled, tuple(self.calls)
        assert filled is not None
        fills = (WindowShare(kind=kind, tokens=filled.kinds[kind], pieces=filled.counts[kind]) for kind in KINDS)
        batches = [each for each in self.evictions if each.because in ("pays", "budget")]
        wanted = [fault.page for fault in self.faults]
        return Windows(
            version=WINDOWS_VERSION, run=self._run, at=calls[-1], messages=filled.messages, budget=self.budget,
            fills=tuple(fill for fill in fills if fill.pieces), largest=max(calls, key=lambda call: call.sent),
            sent=sum(call.sent for call in calls), without=sum(call.without for call in calls),
            counted=sum(call.counted or 0 for call in calls), cached=sum(call.cached for call in calls),
            evictions=tuple(self.evictions), faults=tuple(self.faults), pins=tuple(self.pins),
            left=len({gone.page for each in batches for gone in each.pages}), wanted=len(wanted),
            thrashed=tuple(page for page, times in Counter(wanted).items() if times > 1), calls=calls,
        )  # fmt: skip


def _evicted_page(page: str, recorded: Mapping[str, Any], because: str) -> EvictedPage:
    tokens = recorded.get("tokens")
    return EvictedPage(
        page=page, kind=str(recorded.get("kind") or "page"), what=str(recorded.get("source") or ""),
        tokens=tokens if isinstance(tokens, int) else 0, why=str(recorded.get("why") or because),
    )  # fmt: skip
