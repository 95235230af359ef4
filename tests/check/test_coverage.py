"""What no rehearsal reached is part of the verdict: tools and lines of the agent."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import killick
from killick.check.checker import check
from killick.check.findings import Reached

measured = pytest.mark.skipif(sys.gettrace() is not None, reason="another tracer is active")


@killick.tool(effect="reads", name="covered_look")
async def look(order: str) -> int:
    return 1


@killick.tool(effect="idempotent", name="covered_refund")
async def refund(order: str, key: killick.Key = killick.KEY) -> str:
    return order


@killick.tool(effect="idempotent", name="covered_ship")
async def ship(order: str, key: killick.Key = killick.KEY) -> str:
    return order


@killick.agent(name="covered_branchy")
async def branchy(run: killick.Run, order: str) -> Any:
    amount = await run.call(look, order)  # line 2
    if amount > 5:  # 3
        await run.call(refund, order)
        order = order.upper()  # 5
    if amount:  # 6: never false
        order += "!"
    try:
        return await _shipped(run, order)
    except killick.StepFailed:  # a failing tool leads here
        return "not shipped"
    except ValueError:  # 12
        return await run.call(
            look,
            order,
        )  # 16


async def _shipped(run: killick.Run, order: str) -> str:
    for day in ("Mon", "Tue"):
        match day:
            case "Mon":
                await run.call(ship, order)
            case "Sun":
                return "closed"
    return order


@measured
def test_lines_that_no_rehearsal_reached_are_named() -> None:
    first = branchy.fn.__code__.co_firstlineno - 1
    helper = _shipped.__code__.co_firstlineno - 1
    reached = check(branchy).reached
    file = "tests/check/test_coverage.py"
    assert reached.lines_never == (
        f"{file}:{first + 5}-{first + 6}", f"{file}:{first + 14}-{first + 17}", f"{file}:{helper + 7}",
    )  # fmt: skip
    assert reached.lines == 14


def test_a_tool_that_was_never_called_is_a_warning_and_no_green() -> None:
    report = check(branchy)
    [found] = report.findings
    assert (found.kind, found.weight) == ("unreached", "advice")
    assert found.title == "2 of 3 tools called; never: covered_refund"
    assert found.where.endswith(f"test_coverage.py:{branchy.fn.__code__.co_firstlineno + 4}")
    assert report.holds


@measured
def test_every_tool_called_is_green_and_every_line_is_counted() -> None:
    report = check(branchy, fakes={look: 9})
    assert not report.findings, str(report)
    assert report.reached.tools == 3
    assert report.reached.tools_never == ()


def test_tools_that_only_a_model_is_offered_count_and_say_why_they_were_not_called() -> None:
    async def model(**request: Any) -> dict[str, Any]:
        return {}

    @killick.agent(name="covered_loop")
    async def loops(run: killick.Run, question: str) -> str:
        return (await killick.loop(run, model, [look, ship], messages=question, turns_max=1)).text

    [found] = check(loops).findings
    assert found.title == "0 of 2 tools called; never: covered_look, covered_ship"
    assert "after 1 turns the model still calls tools" in found.why


@measured
def test_blocking_code_in_a_thread_is_measured_too() -> None:
    @killick.agent(name="covered_blocking")
    def blocking(run: killick.SyncRun, order: str) -> str:
        if not run.call(look, order):
            return "nothing"
        return order

    reached = check(blocking, stories_max=3).reached
    assert (reached.lines, len(reached.lines_never)) == (3, 1)


def test_an_active_tracer_is_not_replaced() -> None:
    def trace(frame: Any, event: str, arg: Any) -> Any:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = check(branchy, stories_max=2).reached
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert found == Reached(tools=3, tools_never=found.tools_never)
