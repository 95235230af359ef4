"""Agents that know nothing of a proxy: loops over the official clients, in both forms, streaming or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

import anthropic
import openai
import pytest

import killick

KEY = "sk-killick-test-0123456789abcdef"


def tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    """A tool as both forms have it, under the names of neither."""
    given = {each: value if isinstance(value, dict) else {"type": value} for each, value in properties.items()}
    schema = {"type": "object", "properties": given, "required": list(properties)}
    return {"name": name, "description": description or f"The tool {name}.", "schema": schema}


READ = tool("read_file", "Reads a file.", path="string")


def text_of(path: str, lines: int = 120) -> str:
    return f"# {path}\n" + "".join(f"{path} line {number} says something of its own\n" for number in range(lines))


FORMS = [("openai", False), ("openai", True), ("anthropic", False), ("anthropic", True)]
each_form = pytest.mark.parametrize(
    ("shape", "streams"), FORMS, ids=["chat", "chat-stream", "messages", "messages-stream"]
)


def only_run(kd: killick.Client) -> str:
    [row] = kd.list()
    return row.id


class Loop:
    """One conversation of an agent: what it holds of it, and how it goes on."""

    def __init__(
        self, url: str, shape: str, *, streams: bool = False, tools: list[dict[str, Any]] | None = None,
        run: Callable[[str, dict[str, Any]], str] = lambda name, given: text_of(str(given.get("path", name))),
        headers: dict[str, str] | None = None, system: str = "You mend files.", retries: int = 0, timeout: float = 30,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.streams = streams
        self.messages: list[Any] = []
        self.system = system
        self.replies: list[Any] = []
        self._tools = [READ] if tools is None else tools
        self._run = run
        options: dict[str, Any] = {"api_key": KEY, "max_retries": retries, "timeout": timeout}
        options["default_headers"] = headers or {}
        self.client: Any = (
            anthropic.Anthropic(base_url=url, **options)
            if shape == "anthropic"
            else openai.OpenAI(base_url=f"{url}/v1", **options)
        )

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def tell(self, words: str) -> str:
        """Say something, run what the model wants run, and return what it says in the end."""
        self.messages.append({"role": "user", "content": words})
        while True:
            calls = self.step()
            if not calls:
                return self.said
            self.answer(calls)

    def step(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Ask the model once; the calls that it wants made."""
        return self._messages() if self.shape == "anthropic" else self._chat()

    def answer(self, calls: list[tuple[str, str, dict[str, Any]]]) -> None:
        results = [(id, self._run(name, given)) for id, name, given in calls]  # noqa: A001
        if self.shape == "anthropic":
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]  # noqa: A001
            self.messages.append({"role": "user", "content": blocks})
        else:
            self.messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]  # noqa: A001

    @property
    def said(self) -> str:
        last = self.messages[-1]["content"]
        return last or "" if isinstance(last, str | None) else "".join(block.get("text", "") for block in last)

    def _chat(self) -> list[tuple[str, str, dict[str, Any]]]:
        tools = [
            {"type": "function", "function": {"name": each["name"], "description": each["description"],
                                              "parameters": each["schema"]}}
            for each in self._tools
        ]  # fmt: skip
        messages = [{"role": "system", "content": self.system}, *self.messages]
        asked: dict[str, Any] = {"model": "gpt-5", "messages": messages} | ({"tools": tools} if tools else {})
        if self.streams:
            with self.client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                reply = stream.get_final_completion()
        else:
            reply = self.client.chat.completions.create(**asked)
        self.replies.append(reply)
        message = reply.choices[0].message
        self.messages.append(
            {name: value for name, value in message.to_dict().items() if name not in ("parsed", "annotations")}
        )
        for call in self.messages[-1].get("tool_calls") or []:
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        return [(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]

    def _messages(self) -> list[tuple[str, str, dict[str, Any]]]:
        tools = [
            {"name": each["name"], "description": each["description"], "input_schema": each["schema"]}
            for each in self._tools
        ]
        asked: dict[str, Any] = {"model": "claude-sonnet-5", "max_tokens": 1000, "messages": self.messages,
                                 "system": self.system}  # fmt: skip
        asked |= {"tools": tools} if tools else {}
        if self.streams:
            with self.client.messages.stream(**asked) as stream:
                reply = stream.get_final_message()
        else:
            reply = self.client.messages.create(**asked)
        self.replies.append(reply)
        blocks = [block.to_dict() for block in reply.content]
        for block in blocks:
            block.pop("parsed_output", None)
        self.messages.append({"role": "assistant", "content": blocks})
        return [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
