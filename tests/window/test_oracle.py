"""The measures of the window: that the meter hides nothing, that the player sees what is missing, and that the oracle
knows what it claims to know."""

from __future__ import annotations

from typing import Any

import pytest
from bench.session.desk import Desk, Future, Plan, Turn
from bench.session.meter import ANTHROPIC, OPENAI, Meter
from bench.session.oracle import Oracle, Search, floor, played
from bench.session.play import Outcome, Player
from bench.session.script import Move, Need, Session
from bench.session.strategies import MASK, Everything, Killick, Masking

BUDGET = 6_000


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"The tool {name}.", "parameters": parameters},
    }


def text(name: str) -> str:
    return "\n".join(f"{name} line {number}: something to keep before one's eyes" for number in range(60))


def read(name: str, *needs: Need) -> Move:
    return Move(f"Let me read {name}.", "read_file", {"path": name}, text(name), needs)


def need(name: str) -> Need:
    return Need("read_file", {"path": name}, text(name))


def session(*moves: Move) -> Session:
    return Session("small", 1, "You help.", [tool("read_file"), tool("edit_file")], list(moves))


def long(count: int = 40) -> Session:
    """Reads one file after the other, and comes back to the first in the end."""
    moves = [read(f"file_{number}.py") for number in range(count)]
    return session(*moves, Move("As the first file says.", needs=(need("file_0.py"),)))


def play(made: Session, strategy: Any, budget: int | None = None) -> Outcome:
    return Player(made, strategy, budget).play()


def test_what_was_sent_before_is_read_from_the_cache_and_the_rest_is_written() -> None:
    meter = Meter()
    first, second = {"role": "user", "content": "a" * 400}, {"role": "user", "content": "b" * 800}
    one = meter.request([], [first])
    both = meter.request([], [first, second])
    assert (meter.bill.cached, meter.bill.written) == (one, one + (both - one))
    assert meter.bill.breaks == 0


def test_a_change_in_front_is_paid_for_by_all_that_follows() -> None:
    meter = Meter()
    messages = [{"role": "user", "content": letter * 400} for letter in "abc"]
    meter.request([], messages)
    changed = [messages[0], {"role": "user", "content": "-"}, messages[2]]
    before = meter.bill.cached
    total = meter.request([], changed)
    same = meter.bill.cached - before
    assert same < total / 2
    assert meter.bill.breaks == 1
    assert meter.bill.cost(ANTHROPIC) > meter.bill.cost(OPENAI)


def test_a_change_of_the_tools_empties_the_cache() -> None:
    meter = Meter()
    message = {"role": "user", "content": "a" * 400}
    meter.request([tool("a")], [message])
    meter.request([tool("b")], [message])
    assert meter.bill.cached == 0


def test_sending_everything_misses_nothing() -> None:
    outcome = play(long(), Everything())
    assert (len(outcome.faults), outcome.evicted, outcome.bill.calls) == (0, 0, 41)


def test_what_is_masked_is_fetched_again_before_it_is_used() -> None:
    outcome = play(long(), Masking(3))
    assert [fault.key for fault in outcome.faults] == [need("file_0.py").key]
    assert outcome.bill.calls == 42
    assert outcome.evicted == 38
    assert outcome.lost == 0


def test_a_page_that_left_the_window_is_missed_and_comes_back() -> None:
    outcome = play(long(), Killick(BUDGET), BUDGET)
    assert [fault.key for fault in outcome.faults] == [need("file_0.py").key]
    assert outcome.lost == 0
    assert outcome.bill.over == 0


def test_a_change_whose_call_is_gone_makes_the_read_before_it_worthless() -> None:
    class Forgetting(Everything):
        """Leaves the change out, and keeps what was read before it."""

        def fit(self, history: list[Any], tools: list[Any]) -> tuple[list[Any], list[Any]]:
            is_change = [bool(m.get("tool_calls")) and "edit_file" in str(m["tool_calls"]) for m in history]
            return [
                message
                for at, message in enumerate(history)
                if not is_change[at] and not (message["role"] == "tool" and is_change[at - 1])
            ], tools

    change = Move("I change it.", "edit_file", {"path": "a.py", "old": "1", "new": "2"}, "changed")
    again = Move("And once more.", needs=(need("a.py"),))
    assert not play(session(read("a.py"), change, again), Everything()).faults
    assert len(play(session(read("a.py"), change, again), Forgetting()).faults) == 1


def test_a_mask_is_never_longer_than_what_it_hides() -> None:
    short = Move("A short one.", "read_file", {"path": "short"}, "x" * (len(MASK) - 1))
    outcome = play(
        session(short, read("a.py"), Move("Done.", needs=(Need("read_file", {"path": "short"}, "x"),))), Masking(1)
    )
    assert not outcome.faults


def test_the_future_knows_when_a_result_is_wanted_and_when_never_more() -> None:
    made = session(read("a.py"), read("b.py"), read("c.py", need("a.py")), read("d.py"))
    future = Future(made)
    assert future.next(need("a.py").key, text("a.py"), 1) == (2, True)
    assert future.next(need("a.py").key, text("a.py"), 3) is None
    assert future.next(need("b.py").key, text("b.py"), 2) is None


def test_a_result_that_will_be_read_anew_and_differs_is_of_no_more_use() -> None:
    newer = Move("Again.", "read_file", {"path": "a.py"}, "another text")
    future = Future(session(read("a.py"), newer, Move("So.", needs=(need("a.py"),))))
    assert future.next(need("a.py").key, text("a.py"), 1) is None


def test_at_a_batch_all_leaves_that_nothing_to_come_refers_to_and_nothing_else() -> None:
    made = session(*(read(f"{number}.py") for number in range(8)), Move("So.", needs=(need("2.py"),)))
    desk = Desk(Future(made), Plan({8: 0}), budget=100_000, fixed=0)
    for at, move in enumerate(made.moves[:8]):
        desk.add(Turn(at, move.key, move.result, 20, 900, 40, can_fold=True))
    assert desk.decide(8)
    assert [at for at, turn in enumerate(desk.turns) if turn.is_out] == [0, 1, 3, 4]


def test_a_cut_spares_what_stands_before_it() -> None:
    made = session(*(read(f"{number}.py") for number in range(8)))
    desk = Desk(Future(made), Plan({7: 2}), budget=100_000, fixed=0)
    for at, move in enumerate(made.moves[:7]):
        desk.add(Turn(at, move.key, move.result, 20, 900, 40, can_fold=True))
    desk.decide(7)
    assert [at for at, turn in enumerate(desk.turns) if turn.is_out] == [2, 3]
    assert desk.changed == 2


@pytest.mark.slow
def test_the_simulation_foretells_what_the_meter_will_count() -> None:
    made = long()
    search = Search(made, BUDGET)
    plan = search.best()
    oracle = Oracle(made, BUDGET, plan)
    player = Player(made, oracle, BUDGET)
    oracle.player = player
    assert abs(player.play().bill.cost() / search.cost(plan) - 1) < 0.05


def test_knowing_the_future_is_not_dearer_and_nothing_goes_below_the_floor() -> None:
    made = long()
    oracle, window = played(made, BUDGET), play(made, Killick(BUDGET), BUDGET)
    # A session without anything to foresee: both do the same, but for a few words of a tombstone.
    assert floor(made) < oracle.bill.cost() <= window.bill.cost() * 1.01
    assert oracle.lost == 0
    assert oracle.bill.over == 0
