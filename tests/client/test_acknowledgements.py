"""R37: what was acknowledged is obeyed, refused with a reason, or pending. The store decides, not an earlier look.

Each test lets something happen between the look of a caller and its delivery.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

import killick
from killick.client.answers import deliver
from killick.engine.control import inbox
from killick.errors import AlreadyAgreed, AlreadyAnswered, AnswerRefused, KeyRefused
from killick.log import verify
from killick.model import events as e
from killick.store import MemoryStore, SqliteStore, Store

DONE: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_done() -> None:
    DONE.clear()


class Before:
    """A store on which something happens once, just before a delivery."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.then: Callable[[], object] | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != "deliver":
            return found

        def deliver(deliveries: Any) -> Any:
            then, self.then = self.then, None
            if then is not None:
                then()
            return found(deliveries)

        return deliver

    def close(self) -> None:
        pass


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "k.db")
    yield made
    made.close()


@pytest.fixture
def clients(store: Store) -> Iterator[Callable[[], killick.Client]]:
    made: list[killick.Client] = []

    def new(of: Any = None) -> killick.Client:
        made.append(killick.Client(cast("Store", of if of is not None else Before(store)), behind=False))
        return made[-1]

    yield new
    for each in made:
        each.close()


Clients = Callable[..., killick.Client]


@killick.tool(effect="at_most_once", name="acknowledged_do")
async def do(what: Any) -> Any:
    DONE.append(what)
    return what


@killick.agent(name="acknowledged_box")
async def box(run: killick.Run, n: int) -> int:
    await run.call(do, await run.wait("order"))
    await run.renew(n + 1)
    return n


@killick.agent(name="acknowledged_box_of_three")
async def three(run: killick.Run, n: int) -> int:
    await run.call(do, await run.wait("order"))
    if n == 3:
        return n
    await run.renew(n + 1)
    return n


def work(kd: killick.Client) -> None:
    while kd.advance_due():
        pass


# messages -----------------------------------------------------------------------------------------


def test_r37_a_message_that_was_sent_while_its_run_renewed_reaches_the_run_that_continues(clients: Clients) -> None:
    kd, between = clients(), Before(clients().runtime.store)
    slow = clients(between)
    kd.start(box, 1, id="box")
    work(kd)

    def renews() -> None:
        kd.send("box", "order", "first")
        work(kd)

    between.then = renews
    slow.send("box", "order", "second")
    work(kd)
    kd.send("box", "order", "third")
    work(kd)
    assert DONE == ["first", "second", "third"]
    assert all(not kd.runtime.store.inbox(run) for run in ("box", "box+2", "box+3", "box+4"))


def test_r37_a_run_that_sends_to_a_renewed_run_reaches_the_run_that_continues(clients: Clients) -> None:
    @killick.agent(name="acknowledged_customer")
    async def customer(run: killick.Run) -> str:
        await run.send("box", "order", "by a run")
        return "sent"

    kd = clients()
    kd.start(box, 1, id="box")
    work(kd)
    kd.send("box", "order", "first")
    work(kd)
    assert kd.run(customer, id="c") == "sent"
    work(kd)
    assert DONE == ["first", "by a run"]
    [sent] = [each.event for each in kd.runtime.log.read("c") if isinstance(each.event, e.MessageSent)]
    assert sent.run == "box+2"


def test_r37_a_message_to_a_run_that_ended_since_it_was_looked_at_is_refused(clients: Clients) -> None:
    kd, between = clients(), Before(clients().runtime.store)
    slow = clients(between)
    kd.start(three, 3, id="box")
    work(kd)

    def ends() -> None:
        kd.send("box", "order", "last")
        work(kd)

    between.then = ends
    with pytest.raises(AnswerRefused, match="over"):
        slow.send("box", "order", "too late")
    assert [message.id for message in kd.runtime.store.inbox("box")] == []
    assert DONE == ["last"]


def test_r37_a_message_counts_once_across_renewals(clients: Clients) -> None:
    kd = clients()
    kd.start(box, 1, id="box")
    work(kd)
    kd.send("box", "order", "pay", id="order-7")
    work(kd)
    kd.send("box", "order", "pay", id="order-7")
    kd.send("box+2", "order", "pay", id="order-7")
    work(kd)
    assert DONE == ["pay"]


def test_r37_a_run_that_sends_to_an_ended_run_is_told(clients: Clients) -> None:
    @killick.agent(name="acknowledged_late_customer")
    async def customer(run: killick.Run) -> str:
        try:
            await run.send("box", "order", "too late")
        except killick.StepFailed as failed:
            return str(failed)
        return "sent"

    kd = clients()
    kd.start(three, 3, id="box")
    work(kd)
    kd.send("box", "order", "last")
    work(kd)
    assert "over" in kd.run(customer, id="c")
    assert DONE == ["last"]


# commands -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["cancel", "pause"])
def test_r37_a_command_to_a_run_that_renews_meanwhile_is_obeyed_by_the_run_that_continues(
    clients: Clients, verb: str
) -> None:
    kd = clients()
    kd.start(box, 1, id="box")
    work(kd)
    holder, other = clients(), clients()
    sent: list[object] = []

    @killick.tool(effect="idempotent", name=f"acknowledged_{verb}")
    async def commands() -> None:
        getattr(other, verb)("loop", by="ann")
        sent.append(verb)

    @killick.agent(name=f"acknowledged_loop_{verb}")
    async def loop(run: killick.Run, n: int) -> int:
        if n == 2 and not sent:
            await run.call(commands)
        await run.renew(n + 1)
        return n

    holder.start(loop, 1, id="loop")
    for _ in range(20):
        holder.advance_due()
    rows = {row.id: row.status for row in kd.list(limit=100) if row.id.startswith("loop")}
    expected = "cancelled" if verb == "cancel" else "paused"
    assert list(rows.values()).count(expected) == 1
    assert len(rows) <= 4


def test_r37_a_command_about_a_step_of_a_log_that_was_renewed_is_refused_on_record(clients: Clients) -> None:
    kd = clients()
    kd.start(box, 1, id="box")
    work(kd)
    engine = kd.runtime.engine
    from killick.engine.control import inbox

    body = {"command": "override", "step": "1", "output": "forged", "of": "box"}
    kd.send("box", "order", "first")
    work(kd)
    message = inbox.delivery(engine.log, "box", inbox.COMMAND, body, id="c1", by="ann", at_us=1)
    [delivered] = kd.runtime.store.deliver([message])
    assert cast("Any", delivered).message.run == "box+2"
    work(kd)
    read = kd.runtime.log.read("box+2")
    notes = [kd.runtime.log.data("box+2", each.seq)["note"] for each in read if isinstance(each.event, e.NoteMade)]
    assert any("box" in note and "override" in note for note in notes)
    assert DONE == ["first"]


# answers and votes --------------------------------------------------------------------------------


@killick.agent(name="acknowledged_payment")
async def payment(run: killick.Run) -> str:
    answer = await run.ask("Pay 100?", need=2)
    if answer.approved:
        await run.call(do, "paid")
    return answer.kind


def asked(kd: killick.Client) -> killick.Wait:
    kd.start(payment, id="p")
    work(kd)
    [wait] = kd.inbox()
    return wait


def test_r37_a_rejection_is_refused_once_enough_people_agreed(clients: Clients) -> None:
    kd, between = clients(), Before(clients().runtime.store)
    slow, wait = clients(between), asked(kd)

    def both_agree() -> None:
        kd.answer(wait, "approve", by="ann")
        kd.answer(wait, "approve", by="bob")

    between.then = both_agree
    with pytest.raises(AlreadyAnswered):
        slow.answer(wait, "reject", by="cyd")
    work(kd)
    assert DONE == ["paid"]


def test_r37_a_vote_is_refused_once_a_person_rejected(clients: Clients) -> None:
    kd, between = clients(), Before(clients().runtime.store)
    slow, wait = clients(between), asked(kd)
    kd.answer(wait, "approve", by="ann")
    between.then = lambda: kd.answer(wait, "reject", by="cyd")
    with pytest.raises(AlreadyAnswered, match="cyd"):
        slow.answer(wait, "approve", by="bob")
    work(kd)
    assert DONE == []
    assert kd.info("p").status == "completed"


def test_r37_two_votes_at_once_decide_and_a_third_is_told_who_agreed(clients: Clients) -> None:
    kd, between = clients(), Before(clients().runtime.store)
    slow, wait = clients(between), asked(kd)
    between.then = lambda: kd.answer(wait, "approve", by="ann")
    slow.answer(wait, "approve", by="bob")
    with pytest.raises(AlreadyAnswered, match="ann"):
        kd.answer(wait, "approve", by="cyd")
    with pytest.raises(AlreadyAgreed):
        kd.answer(wait, "approve", by="ann")
    work(kd)
    assert DONE == ["paid"]


def test_r37_a_vote_that_does_not_count_leaves_its_place_to_another_person(store: Store) -> None:
    may = {"ann": "managers", "bob": "managers", "cyd": "managers"}
    kd = killick.Client(store, behind=False, roles=lambda name: may.get(name))

    @killick.agent(name="acknowledged_roles")
    async def agent(run: killick.Run) -> str:
        answer = await run.ask("Pay 100?", to="managers", need=2)
        return answer.kind

    kd.start(agent, id="p")
    work(kd)
    [wait] = kd.inbox()
    kd.answer(wait, "approve", by="ann")
    del may["ann"]  # she left the team before the run took her vote
    work(kd)
    kd.answer("p", "approve", by="bob")
    work(kd)
    assert kd.info("p").status == "waiting"
    kd.answer("p", "approve", by="cyd")
    work(kd)
    assert kd.info("p").status == "completed"
    assert verify(kd.runtime.log).problems == []


def test_r37_an_answer_that_came_after_the_deadline_passed_is_refused_on_record(clients: Clients) -> None:
    kd = clients()
    kd.start(payment, id="p")
    work(kd)
    [wait] = kd.inbox()
    kd.answer(wait, "approve", by="ann")
    kd.cancel("p")
    work(kd)
    assert kd.info("p").status == "cancelled"
    with pytest.raises(AnswerRefused):
        kd.answer(wait, "approve", by="bob")


# subjects -----------------------------------------------------------------------------------------


def test_r37_a_run_is_not_accepted_while_its_subject_is_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from killick.encryption.keyring import Keyring

    @killick.agent(name="acknowledged_job")
    async def job(run: killick.Run, n: int) -> int:
        return n

    url, keys = str(tmp_path / "k.db"), bytes(range(32))
    kd, other = killick.open(url, keys=keys), killick.open(url, keys=keys)
    kd.run(job, 1, id="a", subject="ann")
    seen: list[Any] = []
    real = Keyring._destroyed_outside

    def slow(self: Keyring, wrapped: bytes) -> bool:
        with pytest.raises(KeyRefused) as refused:
            other.start(job, 2, id="b", subject="ann")
        seen.append(refused.value)
        return real(self, wrapped)

    monkeypatch.setattr(Keyring, "_destroyed_outside", slow)
    kd.store.erase("ann")
    monkeypatch.undo()
    assert seen
    assert kd.runtime.store.head("b") is None
    fresh = killick.open(url, keys=keys)
    assert fresh.run(job, 2, id="b", subject="ann") == 2  # under a new key
    assert fresh.store.verify().holds
    for each in (kd, other, fresh):
        each.close()


@pytest.mark.parametrize("how", ["start", "resume"])
def test_r37_a_run_that_got_its_key_before_an_erasure_is_refused_after_it(tmp_path: Path, how: str) -> None:
    @killick.agent(name="acknowledged_fails")
    async def fails(run: killick.Run, n: int) -> int:
        raise LookupError("no")

    url, keys = str(tmp_path / "k.db"), bytes(range(32))
    kd, other = killick.open(url, keys=keys), killick.open(url, keys=keys)
    with pytest.raises(killick.RunFailed):
        kd.run(fails, 1, id="a", subject="ann")
    assert other.state("a") is not None  # it has read the key, and keeps it for a while
    kd.store.erase("ann")
    with pytest.raises(killick.KillickError):
        if how == "start":
            other.runtime.log.begin("c").append(*_born(other, "a"))
        else:
            other.resume("a")
    assert not [row for row in kd.list(limit=10) if row.status not in ("failed", "completed")]
    kd.close()
    other.close()


def _born(kd: killick.Client, of: str) -> list[Any]:
    from msgspec.structs import replace

    from killick.log.writer import Entry

    first = cast("Any", kd.runtime.log.event(of, 1))
    return [Entry(replace(first, run="c", data=None), {"input": 1})]


# the record of slots ------------------------------------------------------------------------------


def test_a_changed_or_lost_slot_is_found_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    kd = killick.open(str(path))
    wait = asked(kd)
    kd.answer(wait, "approve", by="ann")
    slots = kd.runtime.store.slots("p")
    assert [slot.places for slot in slots] == [1]
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM slots")
    report = verify(kd.runtime.log)
    assert [problem.where for problem in report.problems] == ["slots"]
    assert not report.holds  # a delivery may have trusted it
    assert kd.runtime.store.slots("p") == slots
    assert verify(kd.runtime.log).problems == []
    kd.close()


def test_slots_are_what_the_fold_says_after_every_kind_of_change(clients: Clients) -> None:
    kd = clients()
    wait = asked(kd)
    kd.answer(wait, "approve", by="ann")
    assert verify(kd.runtime.log).problems == []
    work(kd)
    assert verify(kd.runtime.log).problems == []
    kd.fork("p", id="fork")
    assert verify(kd.runtime.log).problems == []
    kd.rewind("p", "start")
    assert kd.runtime.store.slots("p") == []
    work(kd)
    kd.cancel("p")
    work(kd)
    assert [slot.name for slot in kd.runtime.store.slots("p")] == ["ended"]
    kd.rewind("p", "start")
    work(kd)
    assert [slot.name.partition(":")[0] for slot in kd.runtime.store.slots("p")] == ["wait"]
    kd.start(box, 1, id="box")
    work(kd)
    kd.send("box", "order", "first")
    kd.send("box", "order", "second")
    work(kd)
    assert verify(kd.runtime.log).problems == []


def test_r37_a_renewed_run_is_resumed_by_its_first_id(clients: Clients) -> None:
    kd = clients()
    kd.start(box, 1, id="box")
    work(kd)
    kd.send("box", "order", "first")
    work(kd)
    kd.pause("box", by="ann")
    kd.resume("box", by="ann")
    kd.send("box", "order", "second")
    work(kd)
    assert DONE == ["first", "second"]


def test_a_fork_of_a_renewed_log_is_announced_to_that_log(clients: Clients) -> None:
    kd = clients()
    kd.start(box, 1, id="box")
    work(kd)
    kd.send("box", "order", "first")
    work(kd)
    kd.fork("box", "1:before", id="fork")
    assert [each.event.run for each in kd.runtime.log.read("box") if isinstance(each.event, e.ForkMade)] == ["fork"]
    assert verify(kd.runtime.log).problems == []


@pytest.mark.parametrize("verb", ["cancel", "pause", "note"])
def test_r37_a_command_that_the_end_of_its_run_overtakes_is_refused_on_record(clients: Clients, verb: str) -> None:
    kd, other = clients(), clients()

    @killick.agent(name=f"acknowledged_last_stretch_{verb}")
    async def agent(run: killick.Run) -> str:
        await run.call(do, "paid")
        if verb == "note":
            other.edit.note("r", "look", by="ann")
        else:
            getattr(other, verb)("r", by="ann")
        return "done"

    assert kd.run(agent, id="r") == "done"
    assert kd.runtime.store.inbox("r") == []
    read = kd.runtime.log.read("r")
    notes = [kd.runtime.log.data("r", each.seq)["note"] for each in read if isinstance(each.event, e.NoteMade)]
    assert any("ann" in note and verb in note for note in notes)
    kd.rewind("r", "start")
    work(kd)
    assert kd.info("r").status == "completed"
    assert verify(kd.runtime.log).problems == []


def test_ids_that_look_like_renewals_are_other_runs(clients: Clients) -> None:
    kd = clients()
    for run in ("job", "job+7"):
        kd.start(box, 1, id=run)
        work(kd)
        kd.send(run, "order", f"first of {run}")
        work(kd)
    kd.send("job", "order", "for job")
    kd.send("job+7", "order", "for job+7")
    work(kd)
    assert DONE == ["first of job", "first of job+7", "for job", "for job+7"]
    status = {row.id: row.status for row in kd.list(limit=20)}
    assert sorted(run for run, each in status.items() if each == "waiting") == ["job+3", "job+7+3"]
    kd.start(three, 3, id="job+9")
    assert kd.runtime.store.index("job+9").agent == three.name  # type: ignore[union-attr]
    with pytest.raises(killick.errors.RunUnknown):
        kd.send("job+77", "order", "to none")


def test_a_vote_that_did_not_count_can_be_given_again(store: Store) -> None:
    may = {"ann": "managers", "bob": "managers"}
    kd = killick.Client(store, behind=False, roles=lambda name: may.get(name))

    @killick.agent(name="acknowledged_votes_again")
    async def agent(run: killick.Run) -> str:
        return (await run.ask("Pay 100?", to="managers", need=2)).kind

    kd.start(agent, id="p")
    work(kd)
    kd.answer("p", "approve", by="ann")
    del may["ann"]
    work(kd)
    may["ann"] = "managers"
    kd.answer("p", "approve", by="ann")
    work(kd)
    with pytest.raises(AlreadyAgreed):
        kd.answer("p", "approve", by="ann")
    kd.answer("p", "approve", by="bob")
    work(kd)
    assert kd.info("p").status == "completed"
    assert verify(kd.runtime.log).problems == []


def test_an_id_whose_run_was_pruned_is_not_started_again(clients: Clients) -> None:
    kd = clients()
    kd.start(three, 3, id="a")
    work(kd)
    kd.send("a", "order", "last")
    work(kd)
    kd.runtime.store.remove("a")
    with pytest.raises(killick.KillickError):
        kd.start(three, 3, id="a")


# what ends before it looks ------------------------------------------------------------------------


@killick.agent(name="acknowledged_question")
async def question(run: killick.Run) -> str:
    return (await run.ask("Pay?")).kind


@killick.agent(name="acknowledged_quorum")
async def quorum(run: killick.Run) -> str:
    return (await run.ask("Pay?", need=2)).kind


@killick.tool(effect="reads", name="acknowledged_hears")
async def hears() -> None:
    DONE.pop()()
    await asyncio.sleep(0)


@killick.agent(name="acknowledged_first")
async def first(run: killick.Run) -> int:
    return (await run.first(run.ask("Pay?"), run.call(hears))).index


@killick.agent(name="acknowledged_gathered")
async def gathered(run: killick.Run) -> None:
    async def fails(branch: killick.Run) -> None:
        await branch.call(hears)
        raise ValueError("the other branch")

    await run.gather(run.ask("Pay?"), fails(run))


@killick.agent(name="acknowledged_renews")
async def renews(run: killick.Run, n: int) -> str:
    if n:
        return "over"
    await run.first(run.ask("Pay?"), run.call(hears))
    return await run.renew(n + 1)


def answered(kd: killick.Client, run: str, *people: str) -> None:
    """Each of these people answers the question of the run, and the store acknowledges it."""
    [wait] = [each for each in kd.info(run).waits if each.verbs]
    for each in people:
        kd.answer(wait, "approve", by=each)


def unread(kd: killick.Client, run: str) -> list[str | None]:
    return [message.by for message in kd.runtime.store.inbox(run)]


def refusals(kd: killick.Client, run: str) -> list[str]:
    """Every acknowledged answer that was not taken is on record: its message, then a note."""
    read = kd.runtime.log.read(run)
    return [
        str(kd.runtime.log.data(run, then.seq)["note"])
        for each, then in pairwise(read)
        if isinstance(each.event, e.MessageTaken) and isinstance(then.event, e.NoteMade)
    ]


@pytest.mark.parametrize(("agent", "people"), [(question, ["ann"]), (quorum, ["ann", "bob"])])
def test_r37_answers_that_a_cancelled_run_did_not_take_are_refused_on_record(
    clients: Clients, agent: Any, people: list[str]
) -> None:
    kd = clients()
    kd.start(agent, id="r")
    work(kd)
    answered(kd, "r", *people)
    kd.cancel("r", by="dan")
    work(kd)
    assert kd.info("r").status == "cancelled"
    assert unread(kd, "r") == []
    assert [next(name for name in people if name in note) for note in refusals(kd, "r")] == people
    for person in (*people, "cyd"):
        with pytest.raises(AnswerRefused, match="cancelled") as refused:
            kd.answer("r", "approve", by=person)
        assert not isinstance(refused.value, AlreadyAnswered | AlreadyAgreed)
    assert verify(kd.runtime.log).problems == []


def test_r37_a_rewind_that_came_after_the_request_to_cancel_is_refused_on_record(clients: Clients) -> None:
    kd = clients()
    kd.start(question, id="r")
    work(kd)
    kd.cancel("r", by="dan")
    # As a process sends it that finds the run held.
    body = {"command": "rewind", "to": "1:before", "because": None, "of": "r"}
    deliver(kd.runtime.engine, "r", inbox.COMMAND, body, id="late", by="ann")
    work(kd)
    assert kd.info("r").status == "cancelled"
    assert unread(kd, "r") == []
    [note] = refusals(kd, "r")
    assert "rewind" in note
    kd.rewind("r", "1:before", by="ann")
    assert kd.info("r").status != "cancelled"


@pytest.mark.parametrize("agent", [first, gathered, renews])
def test_r37_an_answer_that_came_while_another_branch_ended_the_run_is_refused_on_record(
    clients: Clients, agent: Any
) -> None:
    kd, other = clients(), clients()

    def answers() -> None:
        while not (waits := [each for each in other.info("r").waits if each.verbs]):
            time.sleep(0.001)
        other.answer(waits[0], "approve", by="ann")

    DONE.append(answers)
    kd.start(agent, **({"input": 0} if agent is renews else {}), id="r")
    work(kd)
    assert kd.runtime.store.index("r").status in ("completed", "failed")  # type: ignore[union-attr]
    assert unread(kd, "r") == []
    [note] = refusals(kd, "r")
    assert "ann" in note
    assert verify(kd.runtime.log).problems == []


class BeforeEnd(Before):
    """A store on which something happens once, just before the end of a run is appended."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != "append":
            return found

        def append(items: Any) -> Any:
            if self.then is not None and any(b'"run.completed"' in row.body for item in items for row in item.rows):
                then, self.then = self.then, None
                then()
            return found(items)

        return append


@pytest.mark.parametrize("what", ["answer", "note", "message"])
def test_r37_what_slips_in_before_the_last_append_of_a_run_is_seen_by_it(
    clients: Clients, store: Store, what: str
) -> None:
    @killick.agent(name=f"acknowledged_slips_in_{what}")
    async def agent(run: killick.Run) -> str:
        asked, _ = await run.gather(run.ask("Pay?", timeout="72h"), run.wait("go"))
        return str(asked.kind)

    other, between = clients(), BeforeEnd(store)
    kd = clients(between)
    kd.start(agent, id="r")
    work(kd)
    answered(other, "r", "ann")
    other.send("r", "go", 1)
    tells: dict[str, Callable[[], Any]] = {
        "note": lambda: other.edit.note("r", "look", by="bob"),
        "message": lambda: other.send("r", "late", 1),
        "answer": lambda: deliver(
            other.runtime.engine, "r", inbox.ANSWER, {"kind": "approve"}, id="answer:r:9@9", by="bob"
        ),
    }
    between.then = tells[what]
    work(kd)
    assert kd.info("r").status == "completed"
    assert unread(kd, "r") == ([None] if what == "message" else [])
    assert len([note for note in refusals(kd, "r") if "bob" in note]) == (what == "answer")
    assert verify(kd.runtime.log).problems == []


# ids of callers ---------------------------------------------------------------------------------------


@killick.agent(name="acknowledged_sender")
async def sender(run: killick.Run, to: str) -> None:
    await run.send(to, "order", "from the run")


@pytest.mark.parametrize("prefix", ["answer:r:1@", "child:r@", "forked:", "permit:r@", "sent:s:"])
def test_a_caller_cannot_take_an_id_that_the_engine_derives(clients: Clients, prefix: str) -> None:
    kd = clients()
    kd.start(question, id="r")
    work(kd)
    for number in range(9):
        with pytest.raises(AnswerRefused, match="id"):
            kd.send("r", "order", "taken", id=f"{prefix}{number}")
        with pytest.raises(AnswerRefused, match="id"):
            kd.triggers.publish("order.created", "taken", id=f"{prefix}{number}")
    answered(kd, "r", "ann")
    work(kd)
    assert kd.info("r").status == "completed"


def test_a_message_of_a_run_arrives_though_a_caller_gave_the_id_of_its_step(clients: Clients) -> None:
    kd = clients()
    kd.start(three, 3, id="box")
    work(kd)
    kd.send("box", "other", "not an order", id="s:1")
    kd.start(sender, "box", id="s")
    work(kd)
    assert DONE == ["from the run"]


def test_a_child_cannot_take_the_id_of_an_internal_log(clients: Clients) -> None:
    kd = clients()

    @killick.agent(name="acknowledged_spawns_a_hook")
    async def agent(run: killick.Run) -> None:
        await run.spawn(question, id="hook:mine")

    kd.start(agent, id="r")
    work(kd)
    assert kd.info("r").status == "failed"
    assert kd.runtime.store.head("hook:mine") is None


# votes that cannot count ------------------------------------------------------------------------------


@killick.tool(effect="idempotent", name="acknowledged_pay", approve=killick.Approval(to=["ann", "bob", "cyd"], need=3))
async def pay(amount: int) -> int:
    return amount


@killick.agent(name="acknowledged_three_agree")
async def three_agree(run: killick.Run) -> int:
    return await run.call(pay, 5)


def test_r37_a_vote_of_a_person_whose_edit_counts_takes_the_place_of_nobody(clients: Clients) -> None:
    kd = clients()
    kd.start(three_agree, id="r")
    work(kd)
    kd.answer("r", "edit", value={"amount": 7}, by="cyd")
    work(kd)
    with pytest.raises(AlreadyAgreed):
        kd.answer("r", "approve", by="cyd")
    kd.answer("r", "approve", by="ann")
    kd.answer("r", "approve", by="bob")
    work(kd)
    assert kd.info("r").status == "completed"
    assert verify(kd.runtime.log).problems == []


def test_r37_a_vote_that_is_counted_between_look_and_delivery_takes_one_place(clients: Clients, store: Store) -> None:
    between = Before(store)
    kd, slow = clients(), clients(between)
    kd.start(three_agree, id="r")
    work(kd)

    def votes() -> None:
        kd.answer("r", "approve", by="ann")
        work(kd)

    between.then = votes
    with pytest.raises(AlreadyAgreed):
        slow.answer("r", "approve", by="ann")
    for each in ("bob", "cyd"):
        kd.answer("r", "approve", by=each)
    work(kd)
    assert kd.info("r").status == "completed"


def test_r37_a_vote_that_is_given_again_to_a_closed_question_is_refused_in_words(store: Store) -> None:
    may = {"ann": "managers", "bob": "managers", "cyd": "managers"}
    between = Before(store)
    kd = killick.Client(cast("Store", between), behind=False, roles=may.get)
    other = killick.Client(store, behind=False, roles=may.get)

    @killick.agent(name="acknowledged_votes_again_too_late")
    async def agent(run: killick.Run) -> str:
        return (await run.ask("Pay 100?", to="managers", need=2)).kind

    kd.start(agent, id="p")
    work(kd)
    kd.answer("p", "approve", by="ann")
    del may["ann"]
    work(kd)
    may["ann"] = "managers"

    def others() -> None:
        other.answer("p", "approve", by="bob")
        other.answer("p", "approve", by="cyd")

    between.then = others
    with pytest.raises(AnswerRefused):
        kd.answer("p", "approve", by="ann")
    work(kd)
    assert kd.info("p").status == "completed"
