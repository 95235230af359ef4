"""Histories that real agents have, and that are easily forgotten."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from killick.model.page_events import PageEvicted, PageFaulted
from killick.window import Decision, Page, Situation, Window


def reading(number: int, path: str, text: str) -> list[Any]:
    function = {"name": "read_file", "arguments": json.dumps({"path": path})}
    call = {"id": f"c{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": text},
    ]


def test_an_agent_that_polls_stays_within_its_budget() -> None:
    window = Window(6_000)
    messages: list[Any] = [{"role": "user", "content": "Wait until it is done."}]
    for number in range(400):
        assert window.fit(messages).over == 0
        messages += reading(number, "status", "pending: " + "all is as it was before. " * 20)
    assert Window(6_000).fit(messages).over == 0


def test_half_a_letter_in_a_call_stops_nothing() -> None:
    window = Window(6_000)
    messages = [{"role": "user", "content": "Go."}, *reading(1, "half \ud83d", "text " * 200)]
    assert window.fit(messages).messages


def test_a_call_whose_answer_comes_late_does_not_leave_without_it() -> None:
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    messages.append({"type": "function_call", "call_id": "bg", "name": "build", "arguments": "{}"})
    for number in range(30):
        messages.append({"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"})
        messages.append({"type": "function_call_output", "call_id": f"c{number}", "output": f"seen {number} " * 200})
        if number == 10:
            messages.append({"type": "function_call_output", "call_id": "bg", "output": "built"})
    sent = Window(3_000, shape="openai-responses").fit(messages).messages
    called = {item["call_id"] for item in sent if item.get("type") == "function_call"}
    assert {item["call_id"] for item in sent if item.get("type") == "function_call_output"} <= called


def test_what_was_decided_of_a_place_that_holds_something_else_now_is_dropped() -> None:
    made: list[Decision] = []
    window = Window(3_000, record=made.append)
    messages: list[Any] = [{"role": "user", "content": "Read them."}]
    for number in range(12):
        window.fit(messages)
        messages += reading(number, f"f{number}.py", f"file {number} " * 150)
    window.fit(messages)
    assert any(isinstance(each.event, PageEvicted) for each in made)
    other: list[Any] = [{"role": "user", "content": "Read others."}]
    for number in range(3):
        other += reading(number, f"g{number}.py", f"other {number} " * 150)
    again = Window(30_000)
    again.apply(made)
    assert again.render(other).messages == other


def test_pages_leave_in_batches_and_not_one_at_a_time_each_turn() -> None:
    made: list[Decision] = []
    window = Window(20_000, record=made.append)
    messages: list[Any] = [{"role": "user", "content": "Read them all."}]
    for number in range(150):
        assert window.fit(messages).over == 0
        messages += reading(number, f"f{number}.py", f"file {number} " * 300)
    turns = [each.event.turn for each in made if isinstance(each.event, PageEvicted)]
    assert turns
    assert len(turns) <= 150 / 5
    assert all(later - earlier > 1 for earlier, later in pairwise(turns))


def test_the_working_set_is_held_wider_while_pages_are_wanted_back_and_no_longer() -> None:
    seen: list[float] = []

    class Watching:
        def choose(self, pages: list[Page], now: Situation) -> list[Page]:
            seen.append(now.widened)
            return []

    window = Window(1_000_000, policy=Watching())  # type: ignore[arg-type]
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    window.fit(messages)
    window.apply([PageFaulted(at=0, page=f"m{number}", how="recalled", tokens=9, turn=0) for number in range(4)])
    for number in range(60):
        window.fit(messages)
        messages += reading(number, f"f{number}.py", f"file {number}")
    assert (seen[0], seen[-1]) == (1.0, 1.0)
    assert max(seen) > 1.5
