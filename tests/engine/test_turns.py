"""The order in which branches continue: that of the record, also in a process that gets no time."""

from __future__ import annotations

import asyncio

import pytest

from killick.engine.steps import turns
from killick.engine.steps.turns import Turns


def test_a_timer_that_is_due_after_a_pause_takes_no_turn_from_a_branch_that_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_RELUCTANT_SECONDS", 0)  # due at once, as after a long pause of the process
    order: list[int] = []

    async def branch(order_of_turns: Turns, *seqs: int, late: bool = False) -> None:
        if late:
            await asyncio.sleep(0)
        for seq in seqs:
            order_of_turns.computing -= 1  # it reaches a step
            await order_of_turns.wait(seq)
            order_of_turns.computing += 1
            order.append(seq)
        order_of_turns.computing -= 1
        order_of_turns.pass_on()

    async def play() -> None:
        order_of_turns = Turns(is_threaded=False)
        order_of_turns.computing = 3
        waiting = branch(order_of_turns, 24), branch(order_of_turns, 22, 23)
        await asyncio.gather(*waiting, branch(order_of_turns, late=True))

    asyncio.run(asyncio.wait_for(play(), 300))
    assert order == [22, 23, 24]


def test_a_branch_that_awaits_something_of_its_own_gives_its_turn_up() -> None:
    async def play() -> None:
        order_of_turns = Turns(is_threaded=False)
        order_of_turns.computing = 1  # a branch that awaits something else for ever
        await order_of_turns.wait(7)
        assert order_of_turns.computing == 1

    asyncio.run(asyncio.wait_for(play(), 300))
