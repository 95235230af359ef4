"""A tool that no rehearsal called is part of the verdict."""

from __future__ import annotations

from typing import Any

import killick
from killick.check.checker import check


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
    amount = await run.call(look, order)
    if amount > 5:
        await run.call(refund, order)
        order = order.upper()
    if amount:
        order += "!"
    try:
        return await _shipped(run, order)
    except killick.StepFailed:  # a failing tool leads here
        return "not shipped"
    except ValueError:
        return await run.call(
            look,
            order,
        )


async def _shipped(run: killick.Run, order: str) -> str:
    for day in ("Mon", "Tue"):
        match day:
            case "Mon":
                await run.call(ship, order)
            case "Sun":
                return "closed"
    return order


def test_a_tool_that_was_never_called_is_a_warning_and_no_green() -> None:
    report = check(branchy)
    [found] = report.findings
    assert (found.kind, found.weight) == ("unreached", "advice")
    assert found.title == "2 of 3 tools called; never: covered_refund"
    assert found.where.endswith(f"test_coverage.py:{branchy.fn.__code__.co_firstlineno + 4}")
    assert report.holds


def test_every_tool_called_is_green() -> None:
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
