"""The messages of a request are shown in OpenTelemetry's form, whichever API they are for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from killick.adapters.otel_conventions import asked_with

CALL: Any = {"type": "tool_call", "id": "c1", "name": "pay", "arguments": {"amount": 5}}
SHOWN: Any = [
    {"role": "user", "parts": [{"type": "text", "content": "pay 5"}]},
    {"role": "assistant", "parts": [CALL]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "result": "paid"}]},
]
WANTED: Any = {"id": "c1", "type": "function", "function": {"name": "pay", "arguments": '{"amount":5}'}}
CHAT: Any = [
    {"role": "user", "content": "pay 5"},
    {"role": "assistant", "content": None, "tool_calls": [WANTED]},
    {"role": "tool", "tool_call_id": "c1", "content": "paid"},
]
RESPONSES: Any = [
    {"role": "user", "content": "pay 5"},
    {"type": "function_call", "call_id": "c1", "name": "pay", "arguments": '{"amount":5}'},
    {"type": "function_call_output", "call_id": "c1", "output": "paid"},
]
ANTHROPIC: Any = [
    {"role": "user", "content": "pay 5"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "pay", "input": {"amount": 5}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "paid"}]},
]


def shown(**arguments: Any) -> dict[str, Any]:
    attempt: Any = SimpleNamespace(arguments=arguments)
    return {name: json.loads(value) for name, value in asked_with(attempt).items()}


@pytest.mark.parametrize("arguments", [{"messages": CHAT}, {"input": RESPONSES}, {"messages": ANTHROPIC}])
def test_calls_and_results_are_shown_for_every_provider(arguments: dict[str, Any]) -> None:
    assert shown(**arguments)["gen_ai.input.messages"] == SHOWN


def test_a_prompt_alone_and_its_instructions_are_texts() -> None:
    said = shown(input="pay 5", instructions="Be kind.")
    assert said["gen_ai.input.messages"] == SHOWN[:1]
    assert said["gen_ai.system_instructions"] == [{"type": "text", "content": "Be kind."}]
    assert shown(args=["pay 5"])["gen_ai.input.messages"] == SHOWN[:1]
