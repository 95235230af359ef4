"""One run: its position, its wait and what ends it; its relatives, its usage, its seal, and its last steps.

Reads the head, a section of the steps and the ledger's sums, however long the run is. Verifies and exports when asked.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Final

from msgspec import Meta
from starlette.responses import Response

from killick.client.client import Client
from killick.errors import RunUnknown
from killick.history.page import STEPS_MAX
from killick.history.phrasing import process
from killick.history.run_info import pending_answers, waits_of
from killick.history.timeline import part_of
from killick.model.fold import Fold
from killick.model.ledger import Ledger
from killick.presenting.documents import Document
from killick.presenting.runs import Run, display_status, run_fields
from killick.store.protocol import is_held
from killick.store.records import Head
from killick.web.handlers.status import last_seal
from killick.web.handlers.step_detail import StepId
from killick.web.handlers.step_list import StepPage, step_page
from killick.web.problems import Problem
from killick.web.routes import Call, Nothing, RunAsked, get, post
from killick.web.tallies import RunUsage

TAIL_STEPS: Final = 12
"""How many of the last steps are read to say where a run is."""

CHILDREN_MAX: Final = 50


class RunPageAsked(RunAsked, frozen=True, kw_only=True):
    """`cursor` and `step` select the displayed steps; `tab` is the open tab of the page."""

    cursor: Annotated[str, Meta(pattern=r"^\d{1,9}$")] | None = None
    step: StepId | None = None
    tab: Annotated[str, Meta(max_length=20)] = "timeline"


class RunWorker(Document, frozen=True):
    """The process that holds the run, and whether it is alive; `until` is the end of its lease."""

    holder: str
    name: str
    alive: bool
    until_us: int | None


WAITS_MAX: Final = 50
"""The maximum number of a run's waits on its page."""


class RunCounts(Document, frozen=True):
    """Totals. `all_steps` includes those inside scopes; `crashes` are process deaths after which the run resumed;
    `repeated` are effects with several attempts."""

    steps: int
    all_steps: int
    done: int
    attempts: int
    retried: int
    waits: int
    decisions: int
    failures: int
    effects: int
    traced: int
    children: int
    events: int
    crashes: int
    repeated: int


class ChildRun(Document, frozen=True):
    """A child run, the step that started it, and its status."""

    run: str
    agent: str
    step: str
    status: str


class RunSeal(Document, frozen=True):
    """The last seal of the store; `covers`: the run's last event is older."""

    number: int
    at_us: int
    covers: bool


class RunDetail(Run, frozen=True):
    """A run, its relations and totals, and a page of its steps."""

    worker: RunWorker | None
    forks: tuple[str, ...]
    children: tuple[ChildRun, ...]
    broken: str | None
    usage: RunUsage
    counts: RunCounts
    seal: RunSeal | None
    steps: StepPage


@get("/runs/{run}", page="run.html", personal=False)
def run_page(call: Call[RunPageAsked, Nothing]) -> RunDetail:
    """A run: its position, its open waits, and its last steps."""
    asked, client, log = call.asked, call.client, call.log
    run, head = asked.run, log.head(asked.run)
    state = log.state(run)
    fold, ledger = state.fold, log.ledger(run)
    broken = client.runtime.store.quarantined(run)
    status = display_status(log, run, fold.facts.status)
    tail = part_of(log, run, limit=TAIL_STEPS, fold=fold, known=False)
    last = last_seal(client)
    seal = None if last is None else RunSeal.of(last, covers=tail.last_at <= last.at_us)
    waits = islice(waits_of(client.runtime.store, state), WAITS_MAX)
    return RunDetail.of(
        tail, **run_fields(tail, status=status, broken=broken, waits=waits, answers=pending_answers(log, run)),
        worker=_worker(client, head), forks=ledger.facts.forks,
        children=tuple(map(ChildRun.of, ledger.children[-CHILDREN_MAX:])), broken=broken,
        usage=RunUsage.of(ledger.spend), counts=_counts(fold, ledger), seal=seal,
        steps=step_page(call, run, before=_before(asked, fold), around=asked.step, fold=fold),
    )  # fmt: skip


def _before(asked: RunPageAsked, fold: Fold) -> int | None:
    """The end of the section to show. A requested step is in its middle."""
    if asked.step is None:
        return int(asked.cursor) if asked.cursor is not None else None
    own = int(asked.step.partition(".")[0])
    return None if own + STEPS_MAX // 2 >= len(fold.tops) else own + STEPS_MAX // 2


def _worker(client: Client, head: Head) -> RunWorker | None:
    if head.holder is None:
        return None
    alive = is_held(client.runtime.store, head)
    return RunWorker(holder=head.holder, name=process(head.holder), alive=alive, until_us=head.lease_until_us)


def _counts(fold: Fold, ledger: Ledger) -> RunCounts:
    crashes = None if fold.facts.ended else fold.facts.crashes
    survived = fold.facts.deaths - (0 if crashes is None else crashes.deaths)
    return RunCounts(
        steps=len(fold.tops), all_steps=len(fold.steps), done=fold.facts.committed, attempts=ledger.spend.attempts,
        retried=len(fold.retried), decisions=len(fold.decisions), failures=len(fold.failures),
        waits=len(fold.facts.waits), effects=len(ledger.effects), traced=len(fold.trace),
        children=len(ledger.children), events=fold.facts.seq, crashes=survived,
        repeated=sum(each.attempts > 1 for each in ledger.effects) if survived else 0,
    )  # fmt: skip


# asked for ----------------------------------------------------------------------------------------


class VerificationProblem(Document, frozen=True):
    where: str
    what: str
    seq: int | None
    healed: bool


class Verification(Document, frozen=True):
    """The result of a verification. `explained` lists harmless differences from the seals, with their reasons."""

    run: str
    at_us: int
    holds: bool
    events: int
    erased: int
    repaired: int
    seals: int
    problems: tuple[VerificationProblem, ...]
    explained: tuple[VerificationProblem, ...]


@post("/runs/{run}/verify", scope="operator", natural=True)
def verify(call: Call[RunAsked, Nothing]) -> Verification:
    """Read a run's whole record again, prove it, and say where it breaks if it does."""
    report = call.client.store.verify(call.asked.run)
    problems, harmless = (tuple(map(VerificationProblem.of, each)) for each in (report.problems, report.explained))
    return Verification.of(report, run=call.asked.run, at_us=call.now_us, problems=problems, explained=harmless)


@get("/runs/{run}/export", media="application/octet-stream")
def export(call: Call[RunAsked, Nothing]) -> Response:
    """A run as one file that can be loaded, verified and replayed anywhere. It has all values, so a server that hides
    some does not serve it."""
    run = call.asked.run
    if call.client.runtime.store.head(run) is None:
        raise RunUnknown(run)
    if call.mask:
        reason = "an export has the values that this server redacts; make it with `killick store export`"
        raise Problem(403, f"{run}: {reason}", code="redacted")
    body = call.client.store.export(run)
    name = "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "_" for each in run)[:80]
    headers = {"Content-Disposition": f'attachment; filename="{name}.killick"'}
    return Response(body, headers=headers, media_type="application/octet-stream")
