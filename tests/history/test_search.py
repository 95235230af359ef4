"""Questions across runs: what is asked for is found, all of it, whoever marked it and whatever happened since."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from stories import START_US, Story, started

import killick
from families import fork_of
from killick.errors import RunUnknown, StoreReadOnly
from killick.history.search.query import Finder
from killick.history.search.results import Findings
from killick.history.search.terms import term
from killick.log import Entry, Log, RunLog, repair, verify
from killick.model import events as e
from killick.store import MemoryStore, SqliteStore, Store
from killick.store.records import IndexQuery

TESTS = Path(__file__).parent.parent


def seqs(found: Findings[Any]) -> list[tuple[str, int]]:
    return [(hit.run, hit.seq) for hit in found]


class Teller:
    """A run that is told event by event, a second apart, each step with a number of its own."""

    def __init__(self, log: Log, run: str = "run_1", *, at: int = START_US, agent: str = "clerk") -> None:
        self.log, self.run, self.at, self.steps = log, run, at, 0
        first = e.RunStarted(at=at, run=run, agent=agent)
        self.handle: RunLog = log.create(first, {"input": None})

    def tell(self, event: e.Event, **values: Any) -> int:
        self.at += 1_000_000
        self.handle.append(Entry(cast("Any", type(event))(**{**_fields(event), "at": self.at}), values or None))
        return self.handle.seq

    def call(self, tool: str = "pay", *, ends: str = "returned", effect: str = "at_most_once", **arguments: Any) -> int:
        self.steps += 1
        step = str(self.steps)
        intended = e.StepIntended(at=0, step=step, sort="tool", name=tool, effect=cast("Any", effect))
        seq = self.tell(intended, arguments=arguments)
        generation = self.handle.fold.facts.generation
        self.tell(e.AttemptStarted(at=0, step=step, attempt=1, key=f"{self.run}:{step}~{generation}:{tool}:0", epoch=0))
        if ends == "returned":
            self.tell(e.AttemptEnded(at=0, step=step, attempt=1, outcome="returned"), output="ok")
        elif ends:
            failed = e.AttemptEnded(at=0, step=step, attempt=1, outcome=cast("Any", ends))
            failure = {
                "kind": "timeout",
                "type": "TimeoutError",
                "types": ["TimeoutError", "OSError"],
                "message": "late",
            }
            self.tell(failed, failure=failure)
        return seq

    def decide(self, choice: Any, *, by: str = "agent", because: str = "so", question: str = "Which way?") -> int:
        self.steps += 1
        told = {"question": question, "options": ["a", "b"], "choice": choice, "because": because}
        return self.tell(e.DecisionMade(at=0, step=str(self.steps), by=by), **told)

    def undo(self, started: int, tool: str = "pay") -> None:
        self.steps += 1
        step = str(self.steps)
        undo = e.StepIntended(
            at=0, step=step, sort="undo", name=tool, effect="at_most_once", undoes="1", undoes_seq=started
        )
        self.tell(undo, arguments={"key": "k"})
        self.tell(e.AttemptStarted(at=0, step=step, attempt=1, key=f"{self.run}:{step}:undo", epoch=0))
        self.tell(e.AttemptEnded(at=0, step=step, attempt=1, outcome="returned"), output=None)

    def rewind(self, cut: int) -> None:
        generation = self.handle.fold.facts.generation + 1
        self.tell(e.RunRewound(at=0, cut=cut, generation=generation))


def _fields(event: e.Event) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


@pytest.fixture
def find(log: Log) -> Finder:
    return Finder(log)


# what is found ------------------------------------------------------------------------------------


def test_a_call_is_found_across_runs_by_its_arguments_newest_first(log: Log, find: Finder) -> None:
    first, second = Teller(log, "a"), Teller(log, "b", at=START_US + 60_000_000)
    one = first.call("send_email", to="ada@x.org", body="x" * 3_000)
    first.call("send_email", to="bob@x.org")
    two = second.call("send_email", to=["bob@x.org", "ada@x.org"])
    second.call("post", to="ada@x.org", ends="unknown")
    found = find.calls("send_email", where={"to": "ada@x.org"})
    assert seqs(found) == [("b", two), ("a", one)]
    assert (found[1].tool, found[1].arguments["body"], found[1].output) == ("send_email", "x" * 3_000, "ok")
    assert (found[1].status, found[1].attempts, found[1].step, found[1].agent) == ("done", 1, "1", "clerk")
    assert [hit.tool for hit in find.calls(where={"to": "ada@x.org"})] == ["post", "send_email", "send_email"]
    assert find.calls("post")[0].status == "in_doubt"
    assert not find.calls("send_email", where={"to": "ada@x.org", "body": "y"})
    assert seqs(find.calls("send_email", where={"to": "ada@x.org", "body": "x" * 3_000})) == [("a", one)]
    assert seqs(find.calls("send_email", where={"body": None})) == seqs(find.calls("send_email"))[:2]


def test_arguments_that_are_many_or_lie_apart_are_found_all_the_same(log: Log, find: Finder) -> None:
    teller = Teller(log)
    many = teller.call(**{f"n{number}": f"value {number}" for number in range(200)})
    deep = teller.call(items=[{"name": f"item {number}", "note": "y" * 400} for number in range(30)])
    assert seqs(find.calls(where={"n180": "value 180"})) == [("run_1", many)]
    assert seqs(find.calls(where={"items.name": "item 29"})) == [("run_1", deep)]
    assert not find.calls(where={"items.name": "item 30"})


def test_decisions_are_found_by_what_they_say(log: Log, find: Finder) -> None:
    teller = Teller(log)
    auto = teller.decide("Auto", because="It is SMALL\n and known")
    model = teller.decide("refund", by="model", question="Which tool?")
    both = teller.decide({"way": "auto", "sum": 12}, by="ann")
    assert seqs(find.decisions(choice="auto")) == [("run_1", both), ("run_1", auto)]
    assert seqs(find.decisions(choice=12)) == [("run_1", both)]
    assert seqs(find.decisions(question="which tool?", by="Model")) == [("run_1", model)]
    assert seqs(find.decisions(because="small and")) == [("run_1", auto)]
    hit = find.decisions(by="model")[0]
    assert (hit.question, hit.options, hit.choice, hit.because) == ("Which tool?", ["a", "b"], "refund", "so")


def test_failures_are_found_by_type_base_kind_and_tool(log: Log, find: Finder) -> None:
    teller = Teller(log)
    teller.call("fetch", ends="refused")
    teller.call("fetch")
    teller.call("post", ends="unknown")
    teller.tell(
        e.RunFailed(at=0, step="3"), failure={"kind": "error", "type": "app.Broke", "types": [], "message": "no"}
    )
    assert [(hit.of, hit.tool, hit.type, hit.attempt) for hit in find.failures()] == [
        ("run", None, "app.Broke", None),
        ("attempt", "post", "TimeoutError", 1),
        ("attempt", "fetch", "TimeoutError", 1),
    ]
    for name in ("TimeoutError", "oserror", "timeout"):
        assert [hit.tool for hit in find.failures(name)] == ["post", "fetch"]
    assert [hit.message for hit in find.failures("Broke")] == ["no"]
    assert [hit.step for hit in find.failures("OSError", tool="fetch")] == ["1"]
    assert not find.failures("ValueError")


def test_answers_are_found_by_who_gave_them_with_what_was_asked(log: Log, find: Finder) -> None:
    teller = Teller(log)
    for number, (by, verb) in enumerate((("ann", "approve"), ("bob", "reject")), 1):
        step = str(number)
        teller.tell(e.StepIntended(at=0, step=step, sort="wait", name="ask"))
        teller.tell(e.WaitOpened(at=0, step=step, waits_for="answer", to=("managers",)), prompt=f"Pay {number}?")
        find.catch_up()  # the question and its answer need not be marked together
        closed = e.WaitClosed(at=0, step=step, how="answered", by=by)
        teller.tell(closed, answer={"kind": verb, "value": number}, comment="fine")
    [hit] = find.answers(by="Bob")
    assert (hit.prompt, hit.to, hit.verb, hit.value, hit.by) == ("Pay 2?", ("managers",), "reject", 2, "bob")
    assert (hit.comment, hit.answered_at_us, hit.step) == ("fine", hit.at_us, "2")
    assert [each.by for each in find.answers(verb="approve", to="Managers")] == ["ann"]
    assert not find.answers(to="ann")


def test_a_question_may_be_narrowed_to_an_agent_a_run_and_a_span_of_time(log: Log, find: Finder) -> None:
    one, two = Teller(log, "a"), Teller(log, "b", agent="other", at=START_US + 100_000_000)
    early, late = one.call(), one.call()
    other = two.call()
    times = {hit.seq: hit.at_us for hit in find.calls(run="a")}
    assert seqs(find.calls(agent="other")) == [("b", other)]
    assert seqs(find.calls(run="a")) == [("a", late), ("a", early)]
    assert seqs(find.calls(since_us=times[late])) == [("b", other), ("a", late)]
    assert seqs(find.calls(until_us=times[late])) == [("a", early)]
    assert seqs(find.calls(run="a", since_us=times[late])) == [("a", late)]
    assert not find.calls(agent="nobody")
    with pytest.raises(RunUnknown):
        find.calls(run="c")


def test_a_limit_says_whether_there_is_more(log: Log, find: Finder) -> None:
    teller = Teller(log)
    made = [("run_1", teller.call()) for _ in range(90)][::-1]
    assert (seqs(find.calls(limit=2)), find.calls(limit=2).more) == (made[:2], True)
    assert (seqs(find.calls(limit=90)), find.calls(limit=90).more) == (made, False)
    assert seqs(find.calls(limit=None)) == made
    assert len(find.calls(where={"to": "nobody"})) == 0


# effects ------------------------------------------------------------------------------------------


def status(find: Finder, **asked: Any) -> dict[int, str]:
    return {hit.seq: hit.status for hit in find.effects(**asked)}


def test_an_effect_stands_until_it_is_undone_and_is_in_doubt_until_it_is_settled(log: Log, find: Finder) -> None:
    teller = Teller(log)
    paid, doubted = teller.call(amount=5), teller.call(ends="unknown", amount=6)
    refused, read = teller.call(ends="refused"), teller.call("look", effect="reads")
    assert status(find) == {paid: "stands", doubted: "in_doubt"}
    assert status(find, status="in_doubt") == {doubted: "in_doubt"}
    settled = e.AttemptSettled(at=0, step="2", attempt=1, key="run_1:2~0:pay:0", settlement="happened", by="ann")
    teller.tell(settled, output=None)
    assert (status(find, status="in_doubt"), status(find, status="stands").keys()) == ({}, {paid, doubted})
    teller.undo(paid + 1)
    assert status(find, status="undone") == {paid: "undone"}
    assert status(find, status="undone", where={"amount": 5}) == {paid: "undone"}
    assert status(find, status="stands") == {doubted: "stands"}
    assert not {refused, read} & status(find).keys()


def test_an_effect_still_stands_when_its_step_was_rewound(log: Log, find: Finder) -> None:
    teller = Teller(log)
    before = teller.call(amount=1)
    cut = teller.handle.seq
    gone = teller.call(amount=2)
    choice = teller.decide("left")
    teller.rewind(cut)
    again = teller.call(amount=3)
    assert status(find, status="stands") == {before: "stands", gone: "stands", again: "stands"}
    assert {hit.seq: hit.rewound for hit in find.calls()} == {before: False, gone: True, again: False}
    assert [(hit.seq, hit.rewound) for hit in find.decisions()] == [(choice, True)]
    assert {hit.seq: hit.status for hit in find.calls()}[gone] == "done"


def test_what_a_fork_undid_of_its_parent_is_undone_and_told_once(log: Log, find: Finder) -> None:
    parent = Teller(log, "a")
    paid = parent.call(amount=5)
    cut = parent.handle.seq
    later = parent.call(amount=6)
    fork = Teller.__new__(Teller)
    fork.log, fork.run, fork.at, fork.steps = log, "b", parent.at, 1
    fork.handle = fork_of(log, e.RunForked(at=parent.at, run="b", parent="a", cut=cut, generation=1))
    own = fork.call(amount=7)
    assert status(find).keys() == {paid, later, own}
    assert status(find, run="b").keys() == {paid, own}
    fork.undo(paid + 1)
    assert [(hit.run, hit.seq, hit.status) for hit in find.effects(where={"amount": 5})] == [("a", paid, "undone")]
    assert [(hit.run, hit.seq) for hit in find.effects(status="undone")] == [("a", paid)]
    assert not status(find, status="stands", where={"amount": 5})
    assert len(find.calls(where={"amount": 5})) == 1


def test_attempts_that_a_repair_set_aside_are_in_doubt(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    store = SqliteStore(path)
    log = Log(store)
    teller = Teller(log)
    broken = teller.decide("left")
    teller.call(amount=5)
    find = Finder(log)
    assert len(find.calls()) == 1
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE events SET body = x'00' WHERE id = (1 << 32) + ?", (broken,))
    db.close()
    assert not verify(log).holds
    repair(log, "run_1", at=START_US, reason="a test", by="ops")
    assert [(hit.tool, hit.status, hit.arguments) for hit in find.effects()] == [("pay", "in_doubt", None)]
    assert [hit.seq for hit in find.effects("pay", status="in_doubt")] == [log.head("run_1").seq]
    assert (len(find.calls()), len(find.decisions()), find.calls().unread) == (0, 0, ())
    log.close()
    store.close()


# the index ----------------------------------------------------------------------------------------


def told(log: Log, runs: int, events: int = 120) -> dict[str, RunLog]:
    handles: dict[str, RunLog] = {}
    for seed in range(runs):
        first = started(f"run_{seed}", at=START_US)
        handles[f"run_{seed}"] = handle = log.create(first.event, first.values or {})
        for batch in Story(seed).entries(events):
            handle.append(*batch)
    return handles


def naive(log: Log, run: str, kind: type[e.Event]) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    for recorded in log.read(run):
        if isinstance(recorded.event, kind):
            yield recorded.seq, recorded.event, log.data(run, recorded.seq)


def expected(log: Log, runs: list[str]) -> dict[str, set[tuple[str, int]]]:
    """What plain reading of every log finds."""
    found: dict[str, set[tuple[str, int]]] = {name: set() for name in ("calls", "decisions", "failures", "answers")}
    for run in runs:
        for seq, event, data in naive(log, run, e.StepIntended):
            if event.name == "pay" and data["arguments"]["amount"] == 3:
                found["calls"].add((run, seq))
        found["decisions"] |= {
            (run, seq) for seq, _, data in naive(log, run, e.DecisionMade) if data["choice"] == "auto"
        }
        for seq, _, data in naive(log, run, e.AttemptEnded):
            if data.get("failure", {}).get("type") == "TimeoutError":
                found["failures"].add((run, seq))
        found["answers"] |= {(run, seq) for seq, event, _ in naive(log, run, e.WaitClosed) if event.by == "ann"}
    return found


def asked(find: Finder, **within: Any) -> dict[str, set[tuple[str, int]]]:
    within = {"limit": None, **within}
    return {
        "calls": set(seqs(find.calls("pay", where={"amount": 3}, **within))),
        "decisions": set(seqs(find.decisions(choice="auto", **within))),
        "failures": set(seqs(find.failures("TimeoutError", **within))),
        "answers": set(seqs(find.answers(by="ann", **within))),
    }


def test_the_index_finds_exactly_what_reading_every_log_finds(log: Log, find: Finder) -> None:
    runs = list(told(log, 6))
    assert asked(find) == expected(log, runs)
    assert asked(find, run="run_3") == expected(log, ["run_3"])
    effects = {(hit.run, hit.seq, hit.status) for hit in find.effects(limit=None)}
    names = {"happened": "stands", "open": "in_doubt", "in_doubt": "in_doubt", "undone": "undone"}
    assert effects == {
        (run, effect.intended, names[effect.status])
        for run in runs
        for effect in log.ledger(run).effects
        if effect.status in names
    }


def test_marking_bit_by_bit_is_marking_at_once() -> None:
    marks: list[dict[str, set[Any]]] = []
    for often in (True, False):
        store = MemoryStore()
        log = Log(store, snapshot_every=16)
        for seed in range(4):
            first = started(f"run_{seed}")
            handle = log.create(first.event, first.values or {})
            for number, batch in enumerate(Story(seed).entries(150)):
                for entry in batch:
                    handle.append(entry)
                    if often and number % 3 == 0:
                        Finder(log).catch_up()
        Finder(log).catch_up()
        doubt = term("in doubt")
        marks.append({run: {m for m in kept.terms if m.term != doubt} for run, kept in store._runs.items()})
    assert marks[0] == marks[1]


def test_a_second_question_marks_only_what_is_new(log: Log, find: Finder) -> None:
    handles = told(log, 3)
    events = sum(handle.seq for handle in handles.values())
    progress: list[int] = []
    assert find.catch_up(progress.append) == events
    assert find.catch_up() == 0
    handles["run_1"].append(Entry(e.NoteMade(at=START_US), {"note": "more"}))
    assert find.catch_up() == 1


def test_a_long_catch_up_tells_how_far_it_is(store: Store) -> None:
    log = Log(store)
    teller = Teller(log)
    entries: list[Entry] = []
    for number in range(2_500):
        made = e.DecisionMade(at=START_US, step=str(number))
        entries.append(Entry(made, {"question": "?", "options": None, "choice": number, "because": None}))
    teller.handle.append(*entries)
    progress: list[int] = []
    assert Finder(log).catch_up(progress.append) == 2_501
    assert progress == sorted(progress)
    assert 0 < progress[0] < 2_501
    assert len(Finder(log).decisions(choice=1_234)) == 1
    log.close()


def test_what_was_erased_is_found_no_more_and_leaves_no_mark(log: Log, find: Finder, store: Store) -> None:
    teller, other = Teller(log, "a"), Teller(log, "b")
    seq = teller.call("send_email", to="ada@x.org")
    other.call("send_email", to="ada@x.org")
    assert len(find.calls(where={"to": "ada@x.org"})) == 2
    log.erase(teller.handle, at=START_US, reason="she asked", seqs=[seq])
    assert [hit.run for hit in find.calls(where={"to": "ada@x.org"})] == ["b"]
    [place] = store.search(IndexQuery([[term("argument", "is", "to", "ada@x.org")]]))
    assert place.run == "b"
    assert [hit.run for hit in find.calls("send_email")] == ["b", "a"]
    assert store.inspect() == []
    log.erase(teller.handle, at=START_US, reason="again", seqs=[1])
    assert len(find.calls("send_email")) == 2


def test_what_is_erased_while_it_is_being_marked_leaves_no_mark(store: Store) -> None:
    log = Log(store)
    teller = Teller(log)
    seq = teller.call(to="ada@x.org")

    class Erasing:
        """Erases the moment the rows were read."""

        done = False

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def read(self, run: str, **options: Any) -> Any:
            rows = store.read(run, **options)
            if not self.done and options.get("data", True):
                self.done = True
                log.erase(teller.handle, at=START_US, reason="she asked", seqs=[seq])
            return rows

    racing = Log(cast("Store", Erasing()))
    Finder(racing).catch_up()
    assert not Finder(log).calls(where={"to": "ada@x.org"})
    assert store.search(IndexQuery([[term("argument", "is", "to", "ada@x.org")]])) == []
    racing.close()
    log.close()


def test_a_store_that_cannot_be_written_is_read_and_says_so(log: Log, store: Store) -> None:
    runs = list(told(log, 3))

    class ReadOnly:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def index_terms(self, items: Any) -> None:
            raise StoreReadOnly(store.place)

    other = Log(cast("Store", ReadOnly()))
    find = Finder(other)
    assert asked(find) == expected(log, runs)
    assert asked(find, run="run_1") == expected(log, ["run_1"])
    found = find.decisions()
    assert found.scanned is not None
    assert "cannot be written" in found.scanned
    indexed = Finder(log)
    assert indexed.decisions().scanned is None
    for question in ("calls", "effects", "decisions", "failures", "answers"):
        ours, theirs = getattr(find, question)(limit=None), getattr(indexed, question)(limit=None)
        assert list(ours) == list(theirs)
    other.close()


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db")
    log = Log(store)
    one, two = Teller(log, "a"), Teller(log, "b")
    first = one.decide("left")
    broken = one.call()
    one.decide("left")
    second = two.decide("left")
    with closing(sqlite3.connect(tmp_path / "killick.db")) as db, db:
        db.execute("UPDATE events SET body = x'00' WHERE id = (1 << 32) + ?", (broken,))
    db.close()
    for _ in range(2):
        found = Finder(log).decisions(choice="left")
        assert ("b", second) in seqs(found)
        assert set(seqs(found)) <= {("a", first), ("b", second)}
        assert found.unread == ("a",)
    log.close()
    store.close()


CATCHING = """
import sys
from killick.history.search.query import Finder
from killick.log import Log
from killick.store import SqliteStore
store = SqliteStore(sys.argv[1])
log = Log(store)
print("ready", flush=True)
sys.stdin.readline()
Finder(log).catch_up()
log.close(); store.close()
"""


@pytest.mark.slow
def test_processes_that_catch_up_at_once_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "killick.db"
    store = SqliteStore(path, durability="process")
    log = Log(store)
    handles = told(log, 12, 200)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CATCHING, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "ready"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    handles["run_3"].append(*[Entry(e.NoteMade(at=START_US), {"note": n}) for n in range(50)])
    for child in children:
        child.communicate(timeout=300)
        assert child.returncode == 0
    find = Finder(log)
    assert asked(find) == expected(log, list(handles))
    assert verify(log).problems == []
    log.close()
    store.close()


@pytest.mark.slow
def test_writers_go_on_while_others_catch_up(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "killick.db", durability="process", busy_seconds=5)
    log = Log(store)
    told(log, 8, 400)
    other = SqliteStore(tmp_path / "killick.db", durability="process", busy_seconds=5)
    writing = Log(other)
    done = threading.Event()
    marking = threading.Thread(target=lambda: (Finder(log).catch_up(), done.set()))
    teller = Teller(writing, "busy")
    marking.start()
    while not done.is_set():
        teller.call()
    marking.join()
    teller.call(to="the last")
    assert len(Finder(log).calls(where={"to": "the last"})) == 1
    assert verify(log).problems == []
    for each in (log, writing, store, other):
        each.close()


# the client ---------------------------------------------------------------------------------------


@killick.tool
async def mail(to: str) -> str:
    return f"sent to {to}"


@killick.agent
async def mailing(run: killick.Run, to: str) -> str:
    await run.decided("Send it?", "yes", options=["yes", "no"], because="They asked")
    return await run.call(mail, to=to)


def test_the_client_asks_and_so_it_does_soon() -> None:
    with killick.open("memory:") as kd:
        kd.run(mailing, "ada@x.org", id="m1")
        [hit] = kd.find.calls("mail", where={"to": "ada@x.org"})
        assert (hit.run, hit.output, hit.status) == ("m1", "sent to ada@x.org", "done")
        assert list(asyncio.run(kd.as_async().find.calls("mail", where={"to": "ada@x.org"}))) == [hit]
        [choice] = asyncio.run(kd.as_async().find.decisions(agent="mailing"))
        assert (choice.choice, choice.because) == ("yes", "They asked")
        assert [row.id for row in kd.list(since_us=hit.at_us)] == ["m1"]
        assert not kd.list(until_us=hit.at_us - 10_000_000)
