"""Approvals in LangChain's shape: what waits here is answered there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.adapters import langchain_approvals as approvals
from killick.errors import AnswerRefused

ALL = ["approve", "edit", "reject", "respond"]


@killick.tool(approve="ann")
async def pay(amount: int) -> str:
    return f"paid {amount}"


@killick.tool
async def ring(bell: str) -> str:
    raise ConnectionError("the line went dead")


@killick.agent
async def paying(run: killick.Run, amount: int) -> str:
    try:
        return await run.call(pay, amount)
    except killick.Rejected as no:
        return str(no.response or no.message)


@killick.agent
async def ringing(run: killick.Run, bell: str) -> str:
    return await run.call(ring, bell)


@killick.agent
async def asking(run: killick.Run, _: None) -> Any:
    answer = await run.ask("Which way?", options=["left", "right"])
    return [answer.kind, answer.value]


@pytest.fixture
def kd(tmp_path: Path) -> Iterator[killick.Client]:
    with killick.open(str(tmp_path / "killick.db")) as made:
        yield made


def waiting(kd: killick.Client, agent: Any, given: Any) -> Any:
    with pytest.raises(killick.RunWaiting) as found:
        kd.run(agent, given, id="r")
    return found.value.waits


@pytest.mark.parametrize(
    ("response", "result"),
    [
        ({"decisions": [{"type": "approve"}]}, "paid 5"),
        ({"decisions": [{"type": "edit", "edited_action": {"name": "pay", "args": {"amount": 3}}}]}, "paid 3"),
        ({"decisions": [{"type": "reject", "message": "too much"}]}, "ann said no: too much"),
        ({"decisions": [{"type": "respond", "message": "done by hand"}]}, "done by hand"),
        ({"type": "approve"}, "paid 5"),
        ([{"type": "approve"}], "paid 5"),
    ],
)
def test_what_waits_here_is_asked_and_answered_in_its_shape(kd: killick.Client, response: Any, result: str) -> None:
    waits = waiting(kd, paying, 5)
    request = approvals.hitl_request(waits)
    assert request["action_requests"][0]["name"] == "pay"
    assert request["action_requests"][0]["args"] == {"amount": 5}
    assert request["review_configs"] == [{"action_name": "pay", "allowed_decisions": ALL}]
    approvals.answer(kd, waits, response, by="ann")
    assert result in kd.run(paying, 5, id="r")


@pytest.mark.parametrize(
    "response", ["yes", {"decisions": []}, [{"type": "shrug"}], {"decisions": [{"type": "approve"}] * 2}]
)
def test_an_answer_of_no_shape_is_refused_and_nothing_is_done(kd: killick.Client, response: Any) -> None:
    waits = waiting(kd, paying, 5)
    with pytest.raises(AnswerRefused):
        approvals.answer(kd, waits, response, by="ann")
    assert len(kd.inbox()) == 1


def test_an_effect_in_doubt_is_settled_by_a_decision(kd: killick.Client) -> None:
    waits = waiting(kd, ringing, "front door")
    request = approvals.hitl_request(waits)
    assert request["review_configs"][0]["allowed_decisions"] == ["approve", "reject", "respond"]
    description = request["action_requests"][0]["description"]
    assert "Do it again? (Check first, then choose. approve: it did not happen, do it again" in description
    assert "Did it happen?" not in description
    approvals.answer(kd, waits, {"decisions": [{"type": "respond", "message": "it rang"}]})
    assert kd.run(ringing, "front door", id="r") == "it rang"


def test_a_question_is_an_action_that_is_answered(kd: killick.Client) -> None:
    waits = waiting(kd, asking, None)
    assert approvals.hitl_request(waits)["action_requests"][0]["args"] == {"options": ["left", "right"]}
    assert approvals.hitl_request(waits)["review_configs"][0]["allowed_decisions"] == ["reject", "respond"]
    with pytest.raises(AnswerRefused, match="'left', 'right'"):
        approvals.answer(kd, waits, {"decisions": [{"type": "approve"}]})
    approvals.answer(kd, waits, {"decisions": [{"type": "respond", "message": "left"}]})
    assert kd.run(asking, None, id="r") == ["respond", "left"]
