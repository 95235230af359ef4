"""Forks, rewinds and undoing as people use them: what stands, what stays on the ledger, and what is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import killick
from killick.engine.control import inbox
from killick.engine.control.inbox import delivery
from killick.errors import BoundaryUnknown, RunExists, StoreUnavailable, TimeRefused, ValueRefused
from killick.log import Log
from killick.log.group_commit import Committer
from killick.model import events as e
from killick.model.state import State
from killick.store import SqliteStore, Store
from world import World

BOOKS: list[str] = []
WORDS: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _clean() -> None:
    BOOKS.clear()
    WORDS.clear()


def refund(effect: killick.Effect) -> str:
    BOOKS.append(f"refund {effect.arguments['to']}")
    if WORDS.get("refund") == "breaks":
        raise OSError("the line is dead")
    return "refunded"


@killick.tool(effect="reads", name="travel_rate")
async def rate(of: str) -> int:
    return int(WORDS.get("rate", 3))


@killick.tool(name="travel_pay", identity=("to",), compensate=refund)
async def pay(to: str, note: str = "") -> str:
    if (block := WORDS.get("block")) is not None:
        block(to)
    BOOKS.append(f"pay {to}")
    return f"{to} was paid"


@killick.tool(name="travel_ship")
async def ship(to: str) -> str:
    BOOKS.append(f"ship {to}")
    return "shipped"


async def think(model: str, prompt: str) -> str:
    BOOKS.append(f"ask {model}")
    return f"{model} says {prompt}"


@killick.agent(name="travelling")
async def travelling(run: killick.Run, to: str) -> list[Any]:
    found = await run.call(rate, to)
    said = await run.model(think, model="small", prompt="well?")
    paid = await run.call(pay, to, note=WORDS.get("note", ""))
    route = await run.decided("How?", "by sea" if found < 5 else "by air")
    shipped = await run.call(ship, to) if WORDS.get("ships") else None
    return [found, said, paid, route, run.context.get("colour") if run.context else None, shipped]


def worldly(kd: killick.Client, run: str = "r") -> list[Any]:
    return cast("list[Any]", kd.advance(run).result)


# forks --------------------------------------------------------------------------------------------


def test_a_fork_goes_on_from_its_place_and_leaves_its_parent_alone(world: World) -> None:
    first = world.kd.run(travelling, "ann", id="r")
    before = world.kd.state("r").to_json()
    fork = world.kd.fork("r", "3:after", by="ann", because="to see")
    assert fork.id == "r-fork"
    assert worldly(world.kd, fork.id) == first
    assert BOOKS == ["ask small", "pay ann"]
    assert [event.run for event in world.told("r", e.ForkMade)] == ["r-fork"]
    assert world.kd.state("r", at=world.kd.runtime.log.head("r").seq - 1).to_json() == before
    assert world.kd.store.verify().holds


def test_a_fork_is_made_without_being_folded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.kd.run(travelling, "ann", id="r")
    folded: list[str] = []
    real = Log.state

    def noted(log: Log, run: str, *args: Any, **kwargs: Any) -> State:
        folded.append(run)
        return real(log, run, *args, **kwargs)

    monkeypatch.setattr(Log, "state", noted)
    assert world.kd.fork("r", "3:after").id == "r-fork"
    assert set(folded) == {"r"}


def test_forks_are_numbered_and_an_id_of_ones_own_is_taken_once(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    assert [world.kd.fork("r").id for _ in range(3)] == ["r-fork", "r-fork-2", "r-fork-3"]
    assert world.kd.fork("r", id="mine").id == "mine"
    with pytest.raises(RunExists, match="mine"):
        world.kd.fork("r", id="mine")


def test_a_step_that_had_just_ended_can_have_another_output(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    fork = world.kd.fork("r", "1:after", output={"1": 7})
    assert worldly(world.kd, fork.id)[:4] == [7, "small says well?", "ann was paid", "by air"]
    assert BOOKS == ["ask small", "pay ann", "ask small"]


def test_a_models_reply_and_a_decision_can_be_others(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    replied = world.kd.fork("r", "2:after", output={"2": "other"})
    assert worldly(world.kd, replied.id)[1] == "other"
    decided = world.kd.fork("r", "4:after", output={"4": "by train"}, by="bob")
    assert worldly(world.kd, decided.id)[3] == "by train"
    assert world.kd.state(decided.id).decisions[0].by == "bob"


@pytest.mark.parametrize(
    ("at", "output", "told"),
    [
        ("3:after", {"1": 7}, "step 1 did not end at 3:after; fork at 1:after"),
        ("1:before", {"1": 7}, "step 1 did not end"),
        ("1:after", {"9": 7}, "step 9 did not end"),
    ],
)
def test_an_output_is_changed_only_where_nothing_came_of_it_yet(
    world: World, at: str, output: dict[str, Any], told: str
) -> None:
    world.kd.run(travelling, "ann", id="r")
    with pytest.raises(TimeRefused, match=told):
        world.kd.fork("r", at, output=output)
    assert world.kd.runtime.store.head("r-fork") is None


def test_an_answer_that_is_a_misspelt_verb_is_refused_and_an_option_like_one_is_not(world: World) -> None:
    @killick.agent(name="asks_both")
    async def asks_both(run: killick.Run) -> list[Any]:
        plain = await run.ask("Pay?")
        chosen = await run.ask("And then?", options=["rejected", "approved"])
        return [plain.approved, chosen.value]

    for verb, value in (("approve", None), ("respond", "approved")):
        with pytest.raises(killick.RunWaiting):
            world.kd.run(asks_both, id="r")
        world.kd.answer("r", verb, value=value)
    assert world.kd.run(asks_both, id="r") == [True, "approved"]
    with pytest.raises(TimeRefused, match=r"'rejekt' is no answer to step 1; did you mean reject\?"):
        world.kd.fork("r", "1:after", output={"1": "rejekt"})
    world.kd.fork("r", "1:after", id="no", output={"1": "reject"})
    with pytest.raises(killick.RunWaiting):
        world.kd.run(asks_both, id="no")
    world.kd.answer("no", "respond", value="approved")
    assert world.kd.run(asks_both, id="no") == [False, "approved"]
    world.kd.fork("r", "2:after", id="chosen", output={"2": "rejected"})
    assert world.kd.run(asks_both, id="chosen") == [True, "rejected"]


def test_an_output_that_the_tool_could_not_have_returned_is_refused(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    with pytest.raises(ValueRefused, match="travel_rate"):
        world.kd.fork("r", "1:after", output={"1": "many"})


def test_another_input_another_model_and_another_context(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    fork = world.kd.fork("r", "start", input="bob", model="large", set={"colour": "red"}, effects="live")
    assert worldly(world.kd, fork.id) == [3, "large says well?", "bob was paid", "by sea", "red", None]
    assert BOOKS == ["ask small", "pay ann", "ask large", "pay bob"]
    assert world.kd.state(fork.id).input == "bob"
    again = world.kd.fork(fork.id, "now")
    assert world.kd.state(again.id).input == "bob"


def test_what_a_fork_is_made_with_is_there_from_its_first_step_on(world: World) -> None:
    @killick.agent(name="reads_its_context")
    async def agent(run: killick.Run) -> list[Any]:
        seen = [run.context.get("colour")]
        for number in range(3):
            await run.call(rate, str(number))
            seen.append(run.context.get("colour"))
        return seen

    world.kd.run(agent, id="r")
    for at, seen in (
        ("start", ["red"] * 4),
        ("1:after", [None, *["red"] * 3]),
        ("3:before", [None, None, "red", "red"]),
    ):
        fork = world.kd.fork("r", at, set={"colour": "red"})
        assert worldly(world.kd, fork.id) == seen
        world.process()
        assert worldly(world.kd, fork.id) == seen
    fork = world.kd.fork("r", "2:after", output={"2": 9}, set={"colour": "red"})
    assert worldly(world.kd, fork.id) == [None, None, "red", "red"]


@pytest.mark.parametrize(("mode", "books"), [("recorded", []), ("live", ["ship ann"]), ("none", [])])
def test_r34_what_was_not_done_before_is_asked_done_or_refused(world: World, mode: Any, books: list[str]) -> None:
    world.kd.run(travelling, "ann", id="r")
    WORDS["ships"] = True
    fork = world.kd.fork("r", "4:after", effects=mode)
    BOOKS.clear()
    advanced = world.kd.advance(fork.id)
    assert books == BOOKS
    if mode == "recorded":
        [wait] = world.kd.inbox()
        assert "r-fork, a fork of r, wants to do it" in str(wait.prompt)
        world.kd.answer(fork.id, "approve")
        assert worldly(world.kd, fork.id)[-1] == "shipped"
        assert BOOKS == ["ship ann"]
    elif mode == "none":
        assert advanced.status == "failed"
        assert "this fork does nothing to the world" in str(advanced.failure)
    else:
        assert advanced.result[-1] == "shipped"


def test_a_person_may_say_no_to_what_a_fork_wants(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    WORDS["ships"] = True
    fork = world.kd.fork("r", "4:after")
    world.kd.advance(fork.id)
    world.kd.answer(fork.id, "reject")
    advanced = world.kd.advance(fork.id)
    assert advanced.status == "failed"
    assert advanced.failure is not None
    assert advanced.failure.type == "killick.errors.Rejected", "as a replay raises it"
    assert BOOKS == ["ask small", "pay ann"]


def test_a_parent_that_is_running_learns_of_its_fork_before_the_fork_acts(world: World) -> None:
    at_it, go_on = threading.Event(), threading.Event()

    @killick.tool(effect="reads", name="travel_long")
    def long() -> int:
        at_it.set()
        go_on.wait(300)
        return 1

    @killick.agent(name="goes_slowly")
    async def slowly(run: killick.Run) -> str:
        await run.call(rate, "x")
        if run.id == "r":
            await run.call(long)
        else:
            await run.call(rate, "y")
        return await run.call(pay, "ann", note=run.id)

    outcomes: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda: outcomes.update(r=world.kd.run(slowly, id="r")))]
    threads[0].start()
    assert at_it.wait(300)
    other = world.beside()
    fork = other.fork("r", "1:after", effects="live")
    threads.append(threading.Thread(target=lambda: outcomes.update(f=other.advance(fork.id).result)))
    threads[1].start()
    threads[1].join(300)
    go_on.set()
    threads[0].join(300)
    assert outcomes == {"r": "ann was paid", "f": "ann was paid"}
    assert BOOKS == ["pay ann"]
    made = [recorded.seq for recorded in world.kd.events("r") if isinstance(recorded.event, e.ForkMade)]
    [adopted] = [recorded for recorded in world.kd.events("r") if isinstance(recorded.event, e.StepAdopted)]
    assert made[0] < adopted.seq


def test_a_fork_pays_first_and_its_parent_adopts_that(world: World) -> None:
    @killick.agent(name="waits_before_it_pays")
    async def agent(run: killick.Run) -> str:
        await run.call(rate, "x")
        await run.wait("go")
        return await run.call(pay, "ann", note=WORDS.get("note", ""))

    assert world.kd.advance(world.kd.start(agent, id="r").id).status == "waiting"
    fork = world.kd.fork("r", "1:after", effects="live")
    world.kd.send(fork.id, "go")
    assert worldly(world.kd, fork.id) == "ann was paid"
    WORDS["note"] = "in other words"
    world.kd.send("r", "go")
    assert worldly(world.kd) == "ann was paid"
    assert BOOKS == ["pay ann"]
    [adopted] = world.told("r", e.StepAdopted)
    assert (adopted.run, adopted.step) == ("r-fork", "3")
    assert world.kd.store.verify().holds


def test_a_fork_gets_the_messages_that_its_parent_had_not_taken_at_the_cut(world: World) -> None:
    @killick.agent(name="listens_twice")
    async def agent(run: killick.Run) -> list[Any]:
        return [await run.wait("news"), await run.wait("news")]

    world.kd.start(agent, id="r")
    for number in (1, 2, 3):
        world.kd.send("r", "news", number)
    assert worldly(world.kd) == [1, 2]
    assert worldly(world.kd, world.kd.fork("r", "1:after").id) == [1, 2]
    assert worldly(world.kd, world.kd.fork("r", "start").id) == [1, 2]
    assert [message.body for message in world.store.inbox("r-fork")] == [
        message.body for message in world.store.inbox("r")
    ]


def test_a_fork_asks_anew_what_its_parent_was_answered(world: World) -> None:
    @killick.agent(name="asks_once")
    async def agent(run: killick.Run) -> bool:
        answer = await run.ask("Really?")
        return answer.approved

    world.kd.advance(world.kd.start(agent, id="r").id)
    open_one = world.kd.fork("r")
    world.kd.answer("r", "approve")
    assert worldly(world.kd) is True
    assert world.kd.advance(open_one.id).status == "waiting"
    world.kd.answer(open_one.id, "reject")
    assert worldly(world.kd, open_one.id) is False
    told = world.kd.fork("r", "1:after", output={"1": "reject"})
    assert worldly(world.kd, told.id) is False


def test_a_fork_of_a_fork_and_a_fork_of_a_rewound_run(world: World) -> None:
    first = world.kd.run(travelling, "ann", id="r")
    world.kd.rewind("r", "2:before")
    assert worldly(world.kd) == first
    fork = world.kd.fork("r", "3:before", effects="live")
    assert worldly(world.kd, fork.id) == first
    inner = world.kd.fork(fork.id, "1:after", effects="live")
    assert worldly(world.kd, inner.id) == first
    left = world.kd.fork("r", "3~0:after", effects="live")
    assert worldly(world.kd, left.id) == first
    assert BOOKS.count("pay ann") == 1
    assert world.kd.store.verify().holds


def test_what_a_fork_shares_with_its_parent_is_not_its_own_to_undo(world: World) -> None:
    @killick.agent(name="fails_and_undoes", on_failure="compensate")
    async def agent(run: killick.Run) -> None:
        await run.call(pay, "ann")
        await run.call(pay, "bob")
        if WORDS.get("fails"):
            raise LookupError("no")

    world.kd.run(agent, id="r")
    WORDS["fails"] = True
    fork = world.kd.fork("r", "1:after", effects="live")
    assert world.kd.advance(fork.id).status == "failed"
    assert BOOKS == ["pay ann", "pay bob"]
    with pytest.raises(TimeRefused, match="step 1: it was done by r; undo it there"):
        world.kd.undo(fork.id, "1")


# rewinds ------------------------------------------------------------------------------------------


def test_a_rewind_says_what_it_did_and_the_run_is_due(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    assert world.kd.rewind("r", "3:before", by="ann", because="wrong rate") == "rewound to 3:before"
    assert world.kd.info("r").status == "queued"
    WORDS["note"] = "re-worded"
    assert worldly(world.kd)[2] == "ann was paid"
    assert BOOKS == ["ask small", "pay ann"]
    [rewound] = world.told("r", e.RunRewound)
    assert (rewound.by, rewound.generation) == ("ann", 1)


def test_what_names_no_place_changes_nothing(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    head = world.kd.runtime.log.head("r").seq
    with pytest.raises(BoundaryUnknown, match="there is no step 9"):
        world.kd.rewind("r", "9:before")
    assert world.kd.runtime.log.head("r").seq == head


def test_r33_messages_go_back_to_the_inbox_and_answers_do_not(world: World) -> None:
    @killick.agent(name="hears_and_asks")
    async def agent(run: killick.Run) -> list[Any]:
        news = await run.wait("news")
        answer = await run.ask("Well?")
        return [news, answer.kind]

    world.kd.start(agent, id="r")
    world.kd.send("r", "news", "first")
    world.kd.advance("r")
    world.kd.answer("r", "approve")
    assert worldly(world.kd) == ["first", "approve"]
    world.kd.rewind("r", "1:before")
    assert world.kd.advance("r").status == "waiting"
    world.kd.answer("r", "reject")
    assert worldly(world.kd) == ["first", "reject"]
    assert world.kd.store.verify().holds


def test_r33_a_child_that_was_spawned_before_is_the_one_that_is_waited_for(world: World) -> None:
    @killick.agent(name="travelling_child")
    async def child(run: killick.Run, to: str) -> str:
        return await run.call(pay, to)

    @killick.agent(name="travelling_parent")
    async def parent(run: killick.Run) -> list[str]:
        one = await run.spawn(child, "ann")
        two = await run.spawn(child, "ann")
        return [await one.result(), await two.result()]

    world.kd.run(parent, id="r")
    world.kd.rewind("r", "start")
    assert worldly(world.kd) == ["ann was paid"] * 2
    assert BOOKS == ["pay ann"] * 2
    assert [child.run for child in world.kd.runtime.log.ledger("r").children] == ["r/1", "r/2"] * 2
    fork = world.kd.fork("r", "start")
    assert worldly(world.kd, fork.id) == ["ann was paid"] * 2
    assert BOOKS == ["pay ann"] * 2


def test_two_equal_children_that_are_new_after_a_rewind_are_two(world: World) -> None:
    @killick.agent(name="late_child")
    async def child(run: killick.Run, to: str) -> str:
        return await run.call(pay, to)

    @killick.agent(name="late_parent")
    async def parent(run: killick.Run) -> list[str]:
        await run.call(rate, "x")
        made = [await run.spawn(child, "ann") for _ in range(WORDS.get("children", 0))]
        return [await one.result() for one in made]

    world.kd.run(parent, id="r")
    world.kd.rewind("r", "start")
    WORDS["children"] = 2
    assert worldly(world.kd) == ["ann was paid"] * 2
    assert BOOKS == ["pay ann"] * 2


def test_a_child_that_is_asked_for_in_other_words_is_asked_about(world: World) -> None:
    @killick.agent(name="reworded_child")
    async def child(run: killick.Run, words: str) -> str:
        return await run.call(pay, "ann", note=words)

    @killick.agent(name="rewording_parent")
    async def parent(run: killick.Run) -> str:
        return await (await run.spawn(child, WORDS["note"])).result()

    WORDS["note"] = "please"
    world.kd.run(parent, id="r")
    world.kd.rewind("r", "start")
    WORDS["note"] = "would you"
    assert world.kd.advance("r").status == "waiting"
    [wait] = world.kd.inbox()
    assert "before the rewind it did r/1 at step 1" in str(wait.prompt)
    world.kd.answer("r", "reject")
    assert world.kd.advance("r").status == "failed"
    assert world.kd.advance("r").status == "failed"
    assert BOOKS == ["pay ann"]


def test_a_message_to_another_run_is_sent_once_whatever_is_rewound(world: World) -> None:
    @killick.agent(name="hears_all")
    async def listener(run: killick.Run) -> list[Any]:
        return [await run.wait("news"), await run.wait("news")]

    @killick.agent(name="tells_twice")
    async def teller(run: killick.Run) -> None:
        await run.send("ears", "news", "the same")
        await run.send("ears", "news", "the same")

    world.kd.start(listener, id="ears")
    world.kd.run(teller, id="r")
    world.kd.rewind("r", "start")
    world.kd.run(teller, id="r")
    world.kd.advance(world.kd.fork("r", "start").id)
    assert len(world.store.messages("ears")) == 2
    assert worldly(world.kd, "ears") == ["the same", "the same"]


def test_a_run_that_somebody_is_at_is_taken_back_by_them(world: World) -> None:
    at_it, go_on = threading.Event(), threading.Event()

    @killick.tool(effect="reads", name="travel_slow")
    def slow() -> int:
        at_it.set()
        go_on.wait(300)
        return len(BOOKS)

    @killick.agent(name="is_held")
    async def agent(run: killick.Run) -> list[Any]:
        await run.call(pay, "ann")
        return [await run.call(slow), await run.call(rate, "x")]

    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.append(world.kd.run(agent, id="r")))
    thread.start()
    assert at_it.wait(300)
    other = world.beside()
    told: list[str] = []
    rewinding = threading.Thread(target=lambda: told.append(other.rewind("r", "1:before", by="bob")))
    rewinding.start()
    while not world.store.inbox("r"):
        time.sleep(0.005)
    go_on.set()
    rewinding.join(300)
    thread.join(300)
    assert told[0].startswith(("rewound to 1:before", "will be rewound to 1:before"))
    if world.kd.info("r").status == "queued":
        outcome[:] = [worldly(world.kd)]
    assert outcome == [[1, 3]]
    assert BOOKS == ["pay ann"]
    [rewound] = world.told("r", e.RunRewound)
    assert rewound.by == "bob"
    assert world.kd.store.verify().holds


def test_a_fork_is_not_taken_back_to_before_it_was_forked(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    fork = world.kd.fork("r", "3:before", effects="none")
    first = worldly(world.kd, fork.id)
    with pytest.raises(TimeRefused, match="belong to r, its fork parent; fork that at 2:before"):
        world.kd.rewind(fork.id, "2:before")
    world.kd.rewind(fork.id, "start")
    assert worldly(world.kd, fork.id) == first
    assert world.kd.state(fork.id).fold.facts.fork_effects == "none"


def test_killicks_own_logs_are_not_taken_back(world: World) -> None:
    log = world.kd.runtime.log.create(e.RunStarted(at=1, run="trigger:x", agent="killick.trigger:x"), {"input": None})
    world.store.release("trigger:x", epoch=log.epoch)
    with pytest.raises(TimeRefused, match="an internal log of Killick"):
        world.kd.rewind("trigger:x", "start")
    with pytest.raises(TimeRefused, match="an internal log of Killick"):
        world.kd.fork("trigger:x", "start")


# undoing ------------------------------------------------------------------------------------------


def test_one_effect_is_undone_and_nothing_else(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    assert world.kd.undo("r", "3", by="bob", because="a mistake") == "undid step 3, travel_pay"
    assert BOOKS == ["ask small", "pay ann", "refund ann"]
    state = world.kd.state("r")
    assert state.status == "completed"
    assert (state.effects[0].step, state.effects[0].undone) == ("3", True)
    [step] = [step for step in state.fold.steps if step.sort == "undo"]
    assert (step.id, step.undoes, step.status) == ("0.1", "3", "done")
    with pytest.raises(TimeRefused, match="undone already"):
        world.kd.undo("r", "3")
    assert world.kd.store.verify().holds


def test_after_an_undo_the_run_goes_on_and_a_rewind_does_it_again_with_a_fresh_key(world: World) -> None:
    keys: list[str] = []

    @killick.tool(name="travel_keyed", identity=("to",), compensate=refund)
    async def keyed(to: str, key: killick.Key = killick.KEY) -> str:
        keys.append(str(key))
        return to

    @killick.agent(name="undone_midway")
    async def agent(run: killick.Run) -> str:
        await run.call(keyed, "ann")
        await run.wait("go")
        await run.call(rate, "x")
        return "done"

    world.kd.advance(world.kd.start(agent, id="r").id)
    world.kd.undo("r", "1")
    assert world.kd.info("r").status == "waiting"
    world.process()
    world.kd.send("r", "go")
    assert worldly(world.kd) == "done"
    world.kd.rewind("r", "1:before")
    assert worldly(world.kd) == "done"
    assert BOOKS == ["refund ann"]
    assert [key.split(":")[1] for key in keys] == ["step_1", "step_1~1"]
    world.kd.rewind("r", "1:before")
    worldly(world.kd)
    assert len(keys) == 2


@pytest.mark.parametrize(("settled", "undone"), [("happened", True), ("not", False)])
def test_an_undoing_whose_outcome_is_not_known_is_settled_by_whoever_undoes(
    world: World, settled: Any, undone: bool
) -> None:
    world.kd.run(travelling, "ann", id="r")
    WORDS["refund"] = "breaks"
    with pytest.raises(TimeRefused, match=r"its outcome is not known .*give settled='happened' or 'not'"):
        world.kd.undo("r", "3")
    with pytest.raises(TimeRefused, match="its outcome is not known"):
        world.kd.undo("r", "3")
    assert BOOKS.count("refund ann") == 1
    WORDS.pop("refund")
    world.kd.undo("r", "3", settled=settled)
    assert world.kd.state("r").effects[0].undone is undone
    if not undone:
        world.kd.undo("r", "3")
        assert world.kd.state("r").effects[0].undone
    assert world.kd.store.verify().holds


@pytest.mark.parametrize("act", ["pause", "cancel", "rewind"])
def test_an_undoing_that_another_command_stopped_is_told_as_such_and_done_once(world: World, act: str) -> None:
    commands: dict[str, Callable[[], object]] = {
        "pause": lambda: world.kd.pause("r"),
        "cancel": lambda: world.kd.cancel("r"),
        "rewind": lambda: world.kd.rewind("r", "2:before"),
    }
    telling = threading.Thread(target=commands[act])

    def undo(effect: killick.Effect) -> None:
        telling.start()
        while not world.store.index("r").delivered:
            time.sleep(0.01)
        BOOKS.append("undone")

    @killick.tool(name=f"undone_during_{act}", compensate=undo)
    async def done(to: str) -> str:
        return to

    @killick.agent(name=f"undoing_beside_{act}")
    async def agent(run: killick.Run) -> None:
        await run.call(done, "ann")
        await run.wait("go")

    world.kd.advance(world.kd.start(agent, id="r").id)
    try:
        told = world.kd.undo("r", "1")
    except TimeRefused as refused:
        told = refused.reason
    assert told in (f"undid step 1, undone_during_{act}", "step 1: undoing it was stopped on the way; undo it again")
    telling.join()
    assert world.kd.runtime.engine.live.wait(300)  # a cancel does not wait for the thread
    assert world.kd.state("r").effects[0].undone
    with pytest.raises(TimeRefused, match="undone already"):
        world.kd.undo("r", "1")
    assert BOOKS == ["undone"]


def test_what_was_undone_by_hand_is_on_the_ledger(world: World) -> None:
    WORDS["ships"] = True
    world.kd.run(travelling, "ann", id="r")
    with pytest.raises(TimeRefused, match="travel_ship has no compensate"):
        world.kd.undo("r", "5")
    assert "by hand" in world.kd.undo("r", "5", settled="happened", by="bob")
    world.kd.rewind("r", "5:before")
    worldly(world.kd)
    assert BOOKS == ["ask small", "pay ann", "ship ann", "ship ann"]


@pytest.mark.parametrize(
    ("step", "told"),
    [("1", "did nothing to the world"), ("4", "did nothing"), ("9", "there is no step 9")],
)
def test_what_cannot_be_undone_is_told(world: World, step: str, told: str) -> None:
    world.kd.run(travelling, "ann", id="r")
    with pytest.raises((TimeRefused, BoundaryUnknown), match=told):
        world.kd.undo("r", step)


def test_an_effect_that_was_adopted_is_undone_where_it_was_done(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    world.kd.rewind("r", "3:before")
    worldly(world.kd)
    assert world.kd.undo("r", "3") == "undid step 3, travel_pay"
    fork = world.kd.fork("r", "2:after", effects="live")
    assert worldly(world.kd, fork.id)[2] == "ann was paid"
    assert BOOKS == ["ask small", "pay ann", "refund ann", "pay ann"]


def test_what_was_undone_stays_so_after_a_rewind_that_keeps_it(world: World) -> None:
    world.kd.run(travelling, "ann", id="r")
    world.kd.undo("r", "3")
    world.kd.rewind("r", "4:before")
    assert world.kd.state("r").effects[0].undone
    worldly(world.kd)
    assert world.kd.state("r").effects[0].undone
    assert BOOKS == ["ask small", "pay ann", "refund ann"]
    world.kd.rewind("r", "3:before")
    assert len(world.kd.state("r").effects) == 0
    worldly(world.kd)
    assert BOOKS == ["ask small", "pay ann", "refund ann", "pay ann"]
    assert world.kd.store.verify().holds


def test_what_was_undone_stays_so_when_a_failed_run_is_resumed(world: World) -> None:
    @killick.tool(effect="reads", retry=killick.Retry(attempts=1), name="travel_fails")
    async def fails() -> str:
        if not WORDS.get("mended"):
            raise LookupError("no")
        return "well"

    @killick.agent(name="fails_after_it_paid")
    async def agent(run: killick.Run) -> str:
        await run.call(pay, "ann")
        return await run.call(fails)

    with pytest.raises(killick.RunFailed):
        world.kd.run(agent, id="r")
    world.kd.undo("r", "1")
    WORDS["mended"] = True
    assert world.kd.resume("r") == "rewound to step 2, which failed"
    assert worldly(world.kd) == "well"
    assert world.kd.state("r").effects[0].undone
    assert BOOKS == ["pay ann", "refund ann"]


# every point of death -----------------------------------------------------------------------------


Act = Callable[[killick.Client], Any]


def _paid_once_more(kd: killick.Client) -> None:
    kd.rewind("r", "2:before")


def _forked(kd: killick.Client) -> None:
    kd.fork("r", "2:after", id="f", effects="live", output={"2": "other"}, set={"colour": "red"})


def _undone(kd: killick.Client) -> None:
    kd.undo("r", "3")


@pytest.mark.parametrize("act", [_paid_once_more, _forked, _undone])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_write_it_is_there_as_a_whole_or_not_at_all(world: World, act: Act, when: str) -> None:
    for number in range(1, 9):
        BOOKS.clear()
        run = f"r{number}"
        renamed = world.process()
        renamed.run(travelling, "ann", id=run)
        client = world.process()
        line = world.line
        line.cut_at = (number, when)
        died = False
        try:
            _renamed(act, client, run)
        except StoreUnavailable:
            died = True
        world.bury(run)
        if died and act is _undone:
            try:
                _renamed(act, world.kd, run)
            except TimeRefused as refused:
                if "not known" in refused.reason:
                    happened = "refund ann" in BOOKS
                    world.kd.undo(run, "3", settled="happened" if happened else "not")
                    if not happened:
                        world.kd.undo(run, "3")
            assert BOOKS.count("refund ann") == 1
            assert world.kd.state(run).effects[0].undone
        elif act is _forked and world.store.head(f"f{number}") is not None:
            assert worldly(world.kd, f"f{number}")[1] == "other"
        else:
            worldly(world.kd, run)
        assert BOOKS.count("pay ann") == 1
        assert world.kd.store.verify().holds
        if not died:
            return
    raise AssertionError("it never came to its end")


def _renamed(act: Act, kd: killick.Client, run: str) -> None:
    number = run[1:]
    if act is _paid_once_more:
        kd.rewind(run, "2:before")
    elif act is _forked:
        kd.fork(run, "2:after", id=f"f{number}", effects="live", output={"2": "other"}, set={"colour": "red"})
    else:
        kd.undo(run, "3")


# a run that ends meanwhile ------------------------------------------------------------------------


class Ending:
    """A store that says when a run's end is about to be committed, and when it is, before its process hears of it."""

    def __init__(self, store: SqliteStore, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._store, self._before, self._after = store, before, after
        self._over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, items: Sequence[Any]) -> Any:
        ends = not self._over and any(b'"run.completed"' in row.body for item in items for row in item.rows)
        self._over |= ends
        if ends:
            self._before()
        done = self._store.append(items)
        if ends:
            self._after()
        return done


def test_a_rewind_that_comes_as_its_run_ends_interrupts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A commit in line would hold up the loop that is to see the rewind before the commit returns.
    monkeypatch.setattr(Committer, "_is_slow", True)
    here: list[Any] = []
    holders: list[str | None] = []
    path = tmp_path / "killick.db"

    @killick.tool(effect="reads", name="looks_who_holds")
    def looks_who_holds() -> int:
        holders.append(other.runtime.log.head("r").holder)
        return len(holders)

    @killick.agent(name="ends_as_it_is_rewound")
    async def agent(run: killick.Run) -> int:
        here.append(kd.runtime.executor())
        return await run.call(looks_who_holds)

    def rewinds() -> None:
        command = {"command": "rewind", "to": "1:before", "because": None}
        [sent] = other.runtime.store.deliver(
            [delivery(other.runtime.log, "r", inbox.COMMAND, command, id="c", by="ann", at_us=1)]
        )
        assert not isinstance(sent, killick.KillickError)

    def takes() -> None:
        """The process of the run sees that it is to be rewound."""
        while here[0]._live["r"].signal is None:
            time.sleep(0.01)

    store = cast("Store", Ending(SqliteStore(path), rewinds, takes))
    with killick.open(path) as other, killick.Client(store) as kd:
        assert kd.run(agent, id="r") == 2
        assert None not in holders, "whoever runs it holds it"


@pytest.mark.parametrize("place", ["2:after", "3:before", "3:after", "now"])
def test_a_run_that_was_compensated_is_cut_only_before_its_compensation(world: World, place: str) -> None:
    @killick.agent(name="cancelled_midway")
    async def agent(run: killick.Run) -> str:
        await run.call(pay, "ann")
        return (await run.ask("go on?")).kind

    world.kd.start(agent, id="r")
    world.kd.advance("r")
    world.kd.cancel("r", compensate=True)
    world.kd.advance("r")
    assert [step.sort for step in world.kd.state("r").fold.steps] == ["tool", "wait", "undo"]
    if place in ("3:after", "now"):
        for act in (world.kd.fork, world.kd.rewind):
            with pytest.raises(TimeRefused, match="choose 3:before"):
                act("r", place)
        return
    fork = world.kd.fork("r", place, effects="live")
    world.kd.advance(fork.id)
    world.kd.answer(fork.id, "approve")
    world.kd.advance(fork.id)
    assert fork.result(timeout=0) == "approve"


def test_a_run_is_not_cut_among_the_steps_of_its_cancellation(world: World) -> None:
    @killick.agent(name="cancelled_with_child")
    async def agent(run: killick.Run) -> Any:
        return await (await run.spawn(cancelled_late)).result()

    @killick.agent(name="cancelled_late")
    async def cancelled_late(run: killick.Run) -> None:
        await run.ask("well?")

    world.kd.start(agent, id="r")
    world.kd.advance("r")
    world.kd.cancel("r", compensate=True)
    for _ in range(3):
        world.kd.advance_due()
    assert [step.sort for step in world.kd.state("r").fold.steps] == ["child", "wait", "wait"]
    for place in ("3:after", "now"):
        with pytest.raises(TimeRefused, match="choose 3:before"):
            world.kd.fork("r", place)


def test_a_fork_of_a_long_run_reads_a_small_part_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @killick.tool(effect="reads", name="counted_travel")
    async def counted(number: int) -> int:
        return number

    @killick.agent(name="travels_far")
    async def agent(run: killick.Run) -> int:
        return sum([await run.call(counted, number) for number in range(1_100)])

    with killick.open(tmp_path / "killick.db", durability="process") as kd:
        kd.run(agent, id="r")
        read: list[int] = []
        pieces = kd.runtime.store.pieces
        monkeypatch.setattr(kd.runtime.store, "pieces", lambda hashes: (read.append(len(hashes)), pieces(hashes))[1])
        kd.fork("r", "now", id="f")
    assert sum(read) < 30
