"""What people read when their own code is wrong: their lines, their names, and the next move."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

import killick
from killick.engine.failures import describe
from killick.model.failure import Failure, Frame


def amount_of(order: dict[str, int]) -> int:
    return order["amount"]


@killick.tool(effect="reads", name="looks_up")
async def looks_up(order: dict[str, int]) -> int:
    return amount_of(order)


@killick.agent(name="asks_for_it")
async def asks_for_it(run: killick.Run) -> int:
    return await run.call(looks_up, {"total": 3})


def printed(call: Any) -> str:
    with pytest.raises(killick.RunFailed) as failed:
        call()
    return "".join(traceback.format_exception(failed.value))


# frames --------------------------------------------------------------------------------------------


def test_the_first_frames_of_a_failed_run_are_those_of_the_users_code_live_and_from_the_record(world: Any) -> None:
    live = printed(lambda: world.kd.run(asks_for_it, id="r"))
    world.process()
    again = printed(lambda: world.kd.run(asks_for_it, id="r"))
    chain = "\n    return amount_of(order)\n"
    for text in (live, again):
        first, *others = text.split("The above exception was the direct cause of the following exception")
        assert first.count("File ") == 2, text
        assert chain in first
        assert 'return order["amount"]' in first
        assert first.strip().endswith("KeyError: 'amount'")
        assert "await run.call(looks_up" in others[0]
        assert others[0].count("File ") == 1
    assert live.partition("RunFailed")[0].count("src/killick") <= 2, "not the frames of our own loop"


def test_a_failed_run_names_its_step_once(world: Any) -> None:
    with pytest.raises(killick.RunFailed, match=r"^r: failed at step 1 \(looks_up\): KeyError: 'amount'; resume"):
        world.kd.run(asks_for_it, id="r")


def test_an_error_of_any_record_can_be_printed() -> None:
    odd = Failure("error", "a.\0b", (), "\0", ("note",), (Frame("…", 0, ""), Frame("\0", 2**40, "f.<locals>.g")))
    failure = describe(ValueError("outer"))
    for each in (odd, failure, Failure("error", "", (), "", cause=odd, context=failure)):
        assert traceback.format_exception(each.error())
