"""By what a conversation is known again, and by what it is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from killick.proxy.conversation_match import digests_of, print_of_messages, tip_of

CHAT: list[Any] = [
    {"role": "system", "content": "be good"},
    {"role": "user", "content": "read a"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "function": {"name": "read", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a is a"},
    {"role": "assistant", "content": "It is a."},
    {"role": "user", "content": "and b?"},
]
MESSAGES: list[Any] = [
    {"role": "user", "content": "read a"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a is a"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "It is a."}]},
    {"role": "user", "content": "and b?"},
]
BOTH = pytest.mark.parametrize(("shape", "said"), [("openai", CHAT), ("anthropic", MESSAGES)], ids=["chat", "messages"])


@BOTH
def test_a_history_goes_on_where_each_of_its_replies_stood(shape: str, said: list[Any]) -> None:
    whole = digests_of(said, shape)
    replies = [index for index, message in enumerate(said) if message["role"] == "assistant"]
    stood = [
        tip_of(digests_of(said[:index], shape).chain, print_of_messages(said[index : index + 1])) for index in replies
    ]
    assert whole.tips == tuple(reversed(stood))
    assert whole.root == digests_of(said[: replies[0]], shape).root


@BOTH
def test_what_is_said_otherwise_is_another_history(shape: str, said: list[Any]) -> None:
    courses = {digests_of(said, shape).asked, digests_of(said, "another").asked}
    for index in range(len(said)):
        if said[index]["role"] != "system":
            edited = copy.deepcopy(said)
            edited[index] = {"role": edited[index]["role"], "content": "something else"}
            courses |= {digests_of(edited, shape).asked, digests_of(said[:index], shape).asked}
    assert len(courses) == 2 + 2 * len([message for message in said if message["role"] != "system"])


def test_what_clients_do_on_the_way_makes_no_difference() -> None:
    marked = copy.deepcopy(MESSAGES)
    marked[0]["content"] = [{"type": "text", "text": "read a", "cache_control": {"type": "ephemeral"}}]
    marked[2]["content"][0]["cache_control"] = {"type": "ephemeral"}
    marked[3] = {"role": "assistant", "content": "It is a.\n"}
    assert digests_of(marked, "anthropic") == digests_of(MESSAGES, "anthropic")
    written = copy.deepcopy(CHAT)
    written[0]["content"] = "be good; it is noon"
    written[1]["name"] = None
    written[2] |= {"content": "", "refusal": None, "annotations": []}
    assert digests_of(written, "openai") == digests_of(CHAT, "openai")


@pytest.mark.parametrize("said", [[], ["no message"], [None, 3], [{"role": "user"}], [{"type": "reasoning"}]])
def test_whatever_a_request_holds_it_has_a_course(said: list[Any]) -> None:
    assert digests_of(said, "openai").asked
