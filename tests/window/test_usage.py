"""What fills a request is told by kind, for every provider's form; and what it would have been without the window is
what the window itself says."""

from __future__ import annotations

import random
from typing import Any

import pytest

from killick.window import Decision, Shape, Window, estimate
from killick.window.messages import as_json, size_of
from killick.window.usage import EvictedPart, RequestUsage, UsageTracker, request_of

SHAPES: tuple[Shape, ...] = ("openai", "openai-responses", "anthropic")


def called(shape: Shape, number: int, name: str, given: dict[str, Any], result: str) -> list[Any]:
    """A turn: the model calls a tool, and is told the result."""
    known_as = f"call_{number}"
    match shape:
        case "openai":
            function = {"name": name, "arguments": as_json(given)}
            said = {"role": "assistant", "content": None, "tool_calls": [
                {"id": known_as, "type": "function", "function": function}]}  # fmt: skip
            return [said, {"role": "tool", "tool_call_id": known_as, "content": result}]
        case "openai-responses":
            return [
                {"type": "function_call", "call_id": known_as, "name": name, "arguments": as_json(given)},
                {"type": "function_call_output", "call_id": known_as, "output": result},
            ]
        case "anthropic":
            block = {"type": "tool_result", "tool_use_id": known_as, "content": result}
            return [
                {"role": "assistant", "content": [{"type": "tool_use", "id": known_as, "name": name, "input": given}]},
                {"role": "user", "content": [block]},
            ]


def tool(shape: Shape, name: str, about: str) -> dict[str, Any]:
    takes = {"type": "object", "properties": {"path": {"type": "string"}}}
    match shape:
        case "openai":
            return {"type": "function", "function": {"name": name, "description": about, "parameters": takes}}
        case "openai-responses":
            return {"type": "function", "name": name, "description": about, "parameters": takes}
        case "anthropic":
            return {"name": name, "description": about, "input_schema": takes}


def words(chance: random.Random, count: int) -> str:
    return " ".join(f"w{chance.randrange(10_000)}" for _ in range(count))


def one(messages: list[Any], tools: list[Any] | None = None, system: Any = None) -> RequestUsage:
    return UsageTracker().fill(messages, tools or [], system)


USER = {"role": "user", "content": "Mend the parser."}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_of_a_request_is_of_one_kind(shape: Shape) -> None:
    chance = random.Random(1)
    messages = [USER, {"role": "user", "content": words(chance, 900)}]
    messages += called(shape, 1, "read_file", {"path": "a.py"}, words(chance, 300))
    messages += called(shape, 2, "run_tests", {"where": "all"}, words(chance, 200))
    messages += called(shape, 3, "fetch_page", {"url": "http://x"}, words(chance, 150))
    tools = [tool(shape, name, f"does {name}") for name in ("read_file", "run_tests", "fetch_page")]
    filled = one(messages, tools, "Be careful.")
    whole = sum(size_of(each, estimate) for each in (*messages, *tools)) + estimate("Be careful.")
    assert filled.tokens == sum(filled.kinds.values()) == whole
    assert filled.without == whole
    found = {kind: filled.counts[kind] for kind in filled.counts if filled.counts[kind]}
    assert found == {
        "system": 1, "schemas": 3, "files": 1, "results": 1, "documents": 2, "user": 1, "assistant": 3,
    }  # fmt: skip
    assert filled.kinds["files"] > filled.kinds["results"] > filled.kinds["user"] > 0


@pytest.mark.gate(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES)
def test_following_requests_gives_what_each_gives_alone(shape: Shape, seed: int) -> None:
    """Whatever is cut off, changed or added between two requests."""
    chance = random.Random(seed)
    texts = [words(chance, chance.choice((5, 60, 300))) for _ in range(6)]
    following, messages = UsageTracker(), [USER]
    for number in range(60):
        match chance.randrange(10):
            case 0:
                messages = messages[: chance.randrange(len(messages) + 1)] or [USER]
            case 1 if len(messages) > 2:
                at = chance.randrange(1, len(messages))
                messages = [*messages[:at], {"role": "user", "content": chance.choice(texts)}, *messages[at:]]
            case _:
                name = chance.choice(("read_file", "edit_file", "search"))
                path = {"path": chance.choice(("a.py", "b.py", "c.py"))}
                messages = [*messages, *called(shape, number, name, path, chance.choice(texts))]
        alone = UsageTracker()
        assert following.fill(messages) == alone.fill(messages)


@pytest.mark.gate(3)
@pytest.mark.parametrize("budget", [1_000_000, 12_000, 4_000])
@pytest.mark.parametrize("shape", SHAPES)
def test_sent_and_without_are_what_the_window_says(shape: Shape, budget: int) -> None:
    chance = random.Random(5)
    made: list[Decision] = []
    window, filling = Window(budget, shape=shape, record=made.append), UsageTracker()
    files = {f"src/{at}.py": words(chance, chance.choice((50, 200, 600))) for at in range(12)}
    messages: list[Any] = [USER, *([{"role": "system", "content": words(chance, 60)}] if shape == "openai" else [])][
        ::-1
    ]
    tools = [tool(shape, "read_file", "reads"), *(tool(shape, f"extra_{at}", words(chance, 300)) for at in range(4))]
    left = 0
    for number in range(90):
        sent = window.fit(messages, tools, system=None if shape == "openai" else "Be careful.")
        for decision in made:
            pages = decision.data.get("pages", ())
            filling.left |= {
                each["page"]: EvictedPart(*(each[name] for name in EvictedPart.__struct_fields__)) for each in pages
            }
            left += len(pages)
        made.clear()
        filled = filling.fill(sent.messages, sent.tools, None if shape == "openai" else "Be careful.")
        assert filled.tokens == sent.tokens
        assert filled.without == pytest.approx(sent.without, rel=0.02, abs=40)
        path = chance.choice(sorted(files))
        if chance.random() < 0.2:
            files[path] = words(chance, 300)
        messages += called(shape, number, "read_file", {"path": path}, files[path])
    assert left > 4
    assert filled.counts["left"] > 0


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ({"messages": [USER], "tools": None}, [USER]),
        ({"input": "Hello", "instructions": "Be brief."}, [{"role": "user", "content": "Hello"}]),
        ({"input": [USER]}, [USER]),
        ({"prompt": "Hello"}, None),
        ("Hello", None),
        (None, None),
    ],
)
def test_a_request_is_found_in_the_arguments_of_a_call(arguments: Any, messages: list[Any] | None) -> None:
    found = request_of(arguments)
    assert (None if found is None else found[0]) == messages


def test_messages_that_say_nothing_known_are_counted_and_no_more() -> None:
    odd: list[Any] = [None, 17, "Hello", {}, {"role": "critic", "content": 3}, {"role": "user", "content": [None, 4]}]
    filled = one(odd, [None, {}, {"type": "web_search"}])
    assert filled.messages == 6
    assert filled.tokens == sum(filled.kinds.values()) > 0
