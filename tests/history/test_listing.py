"""Runs in lines: each says where it is and what it waits for; what did not go on is not read again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import killick
from killick.client.client import Client
from killick.clock import ManualClock
from killick.history import listing
from killick.history.listing import Listing, RunReason, RunSummary
from killick.log import Entry
from killick.model import events as e
from killick.store.records import ASKS, RunQuery
from leasing import leased_by


@killick.tool(name="line_look", effect="reads", retry=killick.Retry(attempts=3, on=(ConnectionError,), first="1h"))
async def look(place: str) -> str:
    if place == "away":
        raise ConnectionError("nobody is there")
    return place


@killick.tool(name="line_pay")
async def pay(to: str, amount: int) -> None:
    raise ValueError("half of it")


@killick.agent(name="line_child")
async def child(run: killick.Run, what: str) -> str:
    await run.wait("paper", timeout="3d")
    return what


@killick.agent(name="line_agent")
async def agent(run: killick.Run, what: str) -> str:
    await run.plan(["look", "ask", "act"])
    await run.at("look")
    await run.call(look, what)
    await run.at("ask")
    if what == "sleep":
        await run.sleep("2h")
    elif what == "child":
        return str(await (await run.spawn(child, "x")).result())
    elif what == "doubt":
        await run.call(pay, "ada", 5)
    elif what == "fail":
        raise LookupError("no such claim")
    elif what != "done":
        await run.ask(f"Pay {what}?", to="managers")
    return what


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def kd(clock: ManualClock) -> Iterator[Client]:
    with killick.open("memory:", clock=clock) as made:
        yield made


def begin(kd: Client, what: str, **options: Any) -> None:
    kd.start(agent, what, id=what, **options)
    kd.advance(what)


def line_of(kd: Client, run: str, *, whole: bool = True) -> RunSummary:
    row = kd.runtime.store.index(run)
    assert row is not None
    [line] = Listing(kd.runtime.log, whole=whole).lines([row], kd.runtime.clock.now_us())
    return line


def test_a_line_says_where_a_run_is_and_whom_it_asks(kd: Client, clock: ManualClock) -> None:
    begin(kd, "ada", priority=5, tags=("vip",))
    line = line_of(kd, "ada")
    assert (line.stage, line.stage_number, line.stages, line.where) == ("ask", 2, 3, "ask 2/3")
    assert (line.status, line.step, line.priority, line.tags) == ("waiting", "2", 5, ("vip",))
    assert line.about == (RunReason(kind="person", text="managers: Pay ada?"),)
    assert line.since_us == clock.now_us()
    assert not line.due


@pytest.mark.parametrize(
    ("what", "about"),
    [
        ("child", [("child", "child/2")]),
        ("doubt", [("doubt", 'Did line_pay(to="ada", amount=5) happen?')]),
        ("fail", [("failure", "LookupError: no such claim")]),
        ("done", [("result", "done")]),
    ],
)
def test_what_a_run_waits_for_or_what_went_wrong_is_told_with_its_kind(
    kd: Client, what: str, about: list[tuple[str, str]]
) -> None:
    begin(kd, what)
    assert [(one.kind, one.text) for one in line_of(kd, what).about] == about


def test_times_are_left_to_whoever_shows_them(kd: Client, clock: ManualClock) -> None:
    begin(kd, "sleep")
    begin(kd, "away")
    assert line_of(kd, "sleep").about == (RunReason(kind="time", text="", at_us=clock.now_us() + 7_200_000_000),)
    [backoff] = line_of(kd, "away").about
    assert (backoff.kind, backoff.text) == ("backoff", "attempt 2 of line_look")
    assert backoff.at_us is not None
    clock.advance(7_300)
    assert line_of(kd, "sleep").due


def test_a_child_names_its_parent_and_a_fork_what_it_left(kd: Client) -> None:
    begin(kd, "child")
    kd.advance("child/2")
    kd.fork("child", at="1:after", id="other")
    assert line_of(kd, "child/2").parent == "child"
    assert line_of(kd, "child/2").about[0] == RunReason(kind="message", text="message paper")
    assert line_of(kd, "other").forked_from == "child"


def test_a_run_whose_code_diverged_is_a_code_mismatch_and_asks_nobody(kd: Client) -> None:
    begin(kd, "ada")
    log = leased_by("w1", kd.runtime.log, "ada", seconds=30)
    differ = {"recorded": "tool line_look", "found": "tool line_pay", "builds": []}
    log.append(Entry(e.RunDiverged(at=kd.runtime.clock.now_us(), step="1"), differ))
    kd.runtime.store.release("ada", epoch=log.epoch)
    line = line_of(kd, "ada")
    assert (line.status, line.step, line.step_name) == ("code_mismatch", "1", "line_look")
    [about] = line.about
    assert about.kind == "code"
    assert "the log has tool line_look" in about.text
    assert "the code has tool line_pay" in about.text
    assert kd.inbox() == []
    assert listing.counted(kd.runtime.store, RunQuery())["code_mismatch"] == 1
    kd.resume("ada", by="max")
    kd.advance("ada")
    assert line_of(kd, "ada").status == "waiting"


def test_a_failed_run_is_shown_at_the_step_that_failed_by_its_own_name(kd: Client) -> None:
    @killick.agent(name="line_branches")
    async def branches(run: killick.Run) -> None:
        await run.gather(run.call(look, "here"), run.call(look.options(retry=killick.Retry(attempts=1)), "away"),
                         run.call(look, "there"))  # fmt: skip

    with pytest.raises(killick.RunFailed):
        kd.run(branches, id="r")
    line = line_of(kd, "r")
    known = kd.state("r").fold.step(str(line.step))
    assert known is not None
    assert (known.status, line.step_name) == ("failed", known.name)
    begin(kd, "fail")
    assert (line_of(kd, "fail").step, line_of(kd, "fail").step_name) == (None, None)


def test_running_and_abandoned_runs_are_listed_apart_as_they_are_counted(kd: Client, clock: ManualClock) -> None:
    for run in ("held", "left"):
        kd.start(agent, "done", id=run)
        leased_by(f"w-{run}", kd.runtime.log, run, seconds=30).append(killick_taken(clock))
    clock.advance(20)
    kd.runtime.store.renew("w-held", ["held"], seconds=300)
    clock.advance(20)
    store = kd.runtime.store
    counts = listing.counted(store, RunQuery())
    for status, runs in (("running", ["held"]), ("abandoned", ["left"])):
        rows = listing.selected(store, RunQuery(status=(status,)), limit=10)
        assert [row.run for row in rows] == runs
        assert len(rows) == counts[status]
    both = listing.selected(store, RunQuery(status=("abandoned", "running", "queued")), limit=10)
    assert [row.run for row in both] == ["left", "held"]


def test_a_paused_run_waits_for_somebody_first(kd: Client) -> None:
    begin(kd, "ada")
    kd.pause("ada", by="max")
    assert [one.text for one in line_of(kd, "ada").about] == ["a person to resume it", "managers: Pay ada?"]


def test_a_run_that_nobody_is_at_is_abandoned_and_one_set_apart_is_broken(kd: Client, clock: ManualClock) -> None:
    kd.start(agent, "done", id="done")
    started = leased_by("w1", kd.runtime.log, "done", seconds=30)
    started.append(killick_taken(clock))
    assert line_of(kd, "done").status == "running"
    assert line_of(kd, "done").worker == "w1"
    clock.advance(31)
    line = line_of(kd, "done")
    assert (line.status, line.about[0].kind) == ("abandoned", "worker")
    kd.runtime.store.quarantine("done", "torn")
    line = line_of(kd, "done")
    assert (line.status, [one.kind for one in line.about]) == ("broken", ["record"])


def killick_taken(clock: ManualClock) -> Any:
    return Entry(e.RunTaken(at=clock.now_us(), epoch=1, holder="w1"))


def test_tags_that_nobody_gave_are_not_shown(kd: Client) -> None:
    with contextlib.suppress(killick.RunWaiting):
        kd.run(agent, "ada")
    [row] = kd.runtime.store.runs(RunQuery(tag=ASKS))
    assert len(row.tags) > 1
    assert line_of(kd, row.run).tags == ()
    assert [each.tags for each in kd.list()] == [()]


def test_only_a_run_that_went_on_is_read_again(kd: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for what in ("ada", "bob"):
        begin(kd, what)
    lines = Listing(kd.runtime.log, whole=True)
    opened: list[str] = []
    state = kd.runtime.log.state

    def seen(run: str, *given: Any, **more: Any) -> Any:
        opened.append(run)
        return state(run, *given, **more)

    monkeypatch.setattr(kd.runtime.log, "state", seen)
    rows = kd.runtime.store.runs(RunQuery())
    first = lines.lines(rows, kd.runtime.clock.now_us())
    assert lines.lines(rows, kd.runtime.clock.now_us()) == first
    assert sorted(opened) == ["ada", "bob"]
    kd.edit.note("bob", "look here", by="max")
    lines.lines(kd.runtime.store.runs(RunQuery()), kd.runtime.clock.now_us())
    assert sorted(opened) == ["ada", "bob", "bob"]


def test_runs_that_are_over_are_read_only_for_a_whole_line(kd: Client) -> None:
    begin(kd, "done")
    assert line_of(kd, "done", whole=False).step is None
    assert line_of(kd, "done").step == "1"


def test_what_is_kept_has_an_end_and_any_thread_may_ask(kd: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "KEPT_MAX", 3)
    for number in range(8):
        kd.start(agent, f"p{number}", id=f"p{number}")
    lines = Listing(kd.runtime.log, whole=True)
    rows = kd.runtime.store.runs(RunQuery())
    found: list[list[RunSummary]] = []
    threads = [threading.Thread(target=lambda: found.append(lines.lines(rows, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[line.run for line in each] for each in found] == [[row.run for row in rows]] * 4
    assert len(lines._kept) == 3


def test_values_of_a_redacted_log_are_hidden_before_they_are_cut(kd: Client) -> None:
    begin(kd, "ada")
    row = kd.runtime.store.index("ada")
    assert row is not None
    lines = Listing(kd.runtime.log.redacted(lambda run, values: {**values, "prompt": f"(of {run})"}))
    assert lines.lines([row], 0)[0].about[0].text == "managers: (of ada)"


def test_a_run_that_is_gone_meanwhile_is_left_out(kd: Client) -> None:
    begin(kd, "done")
    rows = kd.runtime.store.runs(RunQuery())
    kd.runtime.store.remove("done")
    assert Listing(kd.runtime.log).lines(rows, 0) == []


def test_a_very_long_question_is_cut(kd: Client) -> None:
    begin(kd, "x" * 900)
    text = line_of(kd, "x" * 900).about[0].text
    assert (len(text), text[-1]) == (listing.CHARS_MAX, "…")


def test_a_run_is_found_by_the_tag_while_it_asks_somebody_and_no_longer(kd: Client, clock: ManualClock) -> None:
    def asking() -> list[str]:
        return [row.run for row in kd.runtime.store.runs(RunQuery(tag=ASKS))]

    for what in ("sleep", "done", "fail", "child", "doubt", "bob", "ada"):
        begin(kd, what)
    assert asking() == ["ada", "bob", "doubt"]
    kd.pause("bob", by="max")
    kd.answer("ada", "approve", by="max")
    assert asking() == ["ada", "bob", "doubt"]
    kd.advance("ada")
    kd.answer("doubt", "not", by="max")
    kd.cancel("bob", by="max")
    kd.advance("bob")
    assert asking() == ["doubt"]
    assert [kd.info(run).tags for run in ("doubt", "ada")] == [(), ()]
    assert [problem.what for problem in kd.store.verify().problems] == []


def test_a_run_that_was_rewound_to_before_it_asked_asks_nobody(kd: Client) -> None:
    begin(kd, "ada")
    kd.rewind("ada", to="1:after", by="max")
    assert kd.runtime.store.runs(RunQuery(tag=ASKS)) == []
    kd.fork("ada", at="1:after", id="fork")
    kd.advance("ada")
    assert [row.run for row in kd.runtime.store.runs(RunQuery(tag=ASKS))] == ["ada"]
