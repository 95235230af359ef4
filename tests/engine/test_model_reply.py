"""What replies say, how they are stored and come back, and how clients are kept from retrying by themselves."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pydantic
import pytest
from anthropic.types import Message
from anthropic.types.beta import BetaMessage
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from killick.engine.steps import model_reply
from killick.engine.steps.model_reply import (
    ToolCall,
    assistant_messages,
    is_paused,
    join_chunks,
    provider_of,
    reasoning_of,
    rebuild,
    recordable,
    reply_kind,
    reply_type,
    text_of,
    tool_calls_of,
    usage_of,
    wire,
    without_sdk_retries,
)
from killick.errors import ValueRefused
from killick.model.events import Usage
from killick.model.typed import convert
from playing import (
    JSON,
    Provider,
    chat,
    events,
    message,
    playing,
    response,
    response_call,
    response_reasoning,
    response_text,
    stored,
    text_block,
    thinking_block,
    use_block,
)


class City(pydantic.BaseModel):
    """What a reply is parsed into."""

    name: str
    people: int


@pytest.fixture
def provider() -> Iterator[Provider]:
    with playing() as made:
        yield made


@pytest.fixture
def gpt(provider: Provider) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="key", base_url=f"{provider.url}/v1") as client:
        yield client


@pytest.fixture
def claude(provider: Provider) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key="key", base_url=provider.url) as client:
        yield client


def built(kind: str, body: JSON) -> Any:
    """A reply as a client builds it from what it was sent."""
    package = openai if kind.startswith("openai") else anthropic
    return package._models.construct_type(value=body, type_=reply_type(kind))


BLOCKS = [thinking_block("Berlin, surely."), text_block("Let me look."), use_block("t1", "look_up", {"city": "Berlin"})]
ITEMS = [
    response_reasoning("First.", "Then."),
    response_text("Let me look."),
    response_call("c1", "look_up", '{"city": "Berlin"}'),
]
CALL = ("c1", "look_up", '{"city": "Berlin"}')

REPLIES: list[tuple[str, Any, JSON]] = [
    ("openai.chat", ChatCompletion, chat("Hello.")),
    ("openai.chat", ChatCompletion, chat(None, CALL, reasoning_content="Hm.")),
    ("openai.chat", ChatCompletion, chat(None, refusal="I would rather not.")),
    ("openai.chat", ChatCompletion, chat("Two", choices_of_next_year=1) | {"choices": []}),
    (
        "openai.chat.chunk",
        ChatCompletionChunk,
        {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "gpt", "choices": [], "usage": None},
    ),
    (
        "openai.embeddings",
        CreateEmbeddingResponse,
        {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}],
            "model": "text-embedding-3-small",
            "usage": {"prompt_tokens": 8, "total_tokens": 8},
        },
    ),
    ("openai.response", Response, response(*ITEMS)),
    ("openai.response", Response, response({"type": "a_kind_of_next_year", "id": "x", "deep": {"a": [None]}})),
    ("anthropic.message", Message, message(*BLOCKS)),
    ("anthropic.message", Message, message({"type": "redacted_thinking", "data": "x"}, {"type": "next_year", "a": 1})),
    ("anthropic.beta.message", BetaMessage, message(*BLOCKS)),
]
IDS = [f"{kind}-{number}" for number, (kind, _, _) in enumerate(REPLIES)]


# Stored and brought back ---------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "cls", "body"), REPLIES, ids=IDS)
def test_a_reply_that_was_stored_comes_back_as_its_class_equal_in_all_that_was_sent(
    kind: str, cls: type, body: JSON
) -> None:
    reply = built(kind, body)
    assert type(reply) is cls
    assert reply_kind(reply) == kind
    back: Any = rebuild(kind, stored(wire(reply)))
    assert type(back) is cls
    assert back == reply
    assert wire(back) == wire(reply)
    assert back.to_dict(mode="json", warnings=False) == reply.to_dict(mode="json", warnings=False)


@pytest.mark.parametrize(("kind", "cls", "body"), REPLIES, ids=IDS)
def test_the_stored_form_is_what_the_provider_sent(kind: str, cls: type, body: JSON) -> None:
    timeless = {name: part for name, part in body.items() if name != "container"}  # clients read times
    assert wire(built(kind, timeless)) == timeless


def test_a_field_that_was_never_sent_is_not_sent_back_as_null() -> None:
    said = rebuild("openai.chat", stored(wire(built("openai.chat", chat(None, CALL))))).choices[0].message
    assert "audio" not in said.to_dict()
    assert said.audio is None
    # Through a declared type the objects are equal too, but there every default counts as sent.
    declared = convert(stored(built("openai.chat", chat(None, CALL))), ChatCompletion).choices[0].message
    assert declared == said
    assert "audio" in declared.to_dict()


def test_the_id_of_the_request_is_kept(gpt: openai.OpenAI, claude: anthropic.Anthropic, provider: Provider) -> None:
    provider.answers = [chat("Hello."), message(text_block("Hello."))]
    replies: list[Any] = [
        gpt.chat.completions.create(model="gpt-5", messages=[]),
        claude.messages.create(model="claude-opus-5", max_tokens=9, messages=[]),
    ]
    for reply in replies:
        kind = reply_kind(reply)
        assert kind is not None
        assert reply._request_id == "req_1"
        back = rebuild(kind, stored(wire(reply)))
        assert back == reply
        assert back._request_id == "req_1"


def test_a_name_that_no_package_here_knows_gives_the_plain_value(monkeypatch: pytest.MonkeyPatch) -> None:
    body = chat("Hello.")
    assert reply_type("mistral.chat") is None
    assert rebuild("mistral.chat", body) == body
    monkeypatch.setitem(sys.modules, "openai.types.chat", None)
    assert reply_type("openai.chat") is None
    assert rebuild("openai.chat", body) == body
    assert text_of(rebuild("openai.chat", body)) == "Hello."


def test_other_values_have_no_kind() -> None:
    class Response(pydantic.BaseModel):
        id: str

    for value in ("text", {"id": "x"}, None, City(name="Bonn", people=1), Response(id="x"), SimpleNamespace(id=1)):
        assert reply_kind(value) is None
        assert wire(value) == (value if not isinstance(value, pydantic.BaseModel) else value.model_dump())


def test_reading_a_reply_imports_no_client() -> None:
    code = (
        "import sys; from killick.engine.steps import model_reply as m;"
        "r = {'choices': [{'message': {'content': 'hi'}}], 'usage': {'prompt_tokens': 1}};"
        "assert m.text_of(r) == 'hi' and m.usage_of(r) and m.wire(r) == r and m.reply_kind(r) is None;"
        "assert m.without_sdk_retries(print) is print and m.provider_of(print) == 'openai';"
        "assert not {'openai', 'anthropic', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_credentials_of_a_call_are_not_stored() -> None:
    names = ("api_key", "azure_ad_token", "aws_secret_access_key", "client_secret", "auth_token", "vertex_credentials")
    headers = {"Authorization": "Bearer x", "x-api-key": "x", "x-team": "harbour"}
    said: dict[str, Any] = {"model": "m", "max_tokens": 7, "prompt_cache_key": "user-1", "extra_headers": headers}
    kept = recordable({**said, **dict.fromkeys(names, "x")})
    assert kept == {**said, "extra_headers": {"x-team": "harbour"}}


def test_the_arguments_of_a_model_call_can_be_stored() -> None:
    said = built("openai.chat", chat(None, CALL)).choices[0].message
    arguments = {
        "messages": [{"role": "user", "content": "?"}, said], "response_format": City, "timeout": openai.Timeout(5),
        "stop": openai.NOT_GIVEN, "tools": [openai.pydantic_function_tool(City)], "seed": 7, "user": None,
    }  # fmt: skip
    kept = stored(recordable(arguments))
    assert list(kept) == ["messages", "response_format", "timeout", "tools", "seed", "user"]
    assert kept["messages"][1] == said.to_dict()
    assert kept["response_format"] == {"type": "City", "schema": City.model_json_schema()}
    assert kept["timeout"] == "Timeout(timeout=5)"
    assert kept["tools"][0]["function"]["name"] == "City"
    assert arguments["messages"][1] is said  # type: ignore[index]


# Parsed replies ------------------------------------------------------------------------------------

BONN = '{"name": "Bonn", "people": 330000}'


def parsed_chat(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> tuple[Any, JSON]:
    tool = openai.pydantic_function_tool(City, name="found")
    asked: JSON = {"model": "gpt-5", "messages": [], "response_format": City, "tools": [tool]}
    return gpt.chat.completions.parse(**asked), asked


def parsed_response(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> tuple[Any, JSON]:
    asked: JSON = {"model": "gpt-5", "input": "?", "text_format": City}
    return gpt.responses.parse(**asked), asked


def parsed_message(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> tuple[Any, JSON]:
    asked: JSON = {"model": "claude-opus-5", "max_tokens": 9, "messages": [], "output_format": City}
    return claude.messages.parse(**asked), asked


PARSED: list[tuple[Any, JSON, str, Callable[[Any], Any]]] = [
    (parsed_chat, chat(BONN, ("c1", "found", BONN)), "openai.chat.parsed", lambda r: r.choices[0].message.parsed),
    (parsed_response, response(response_text(BONN)), "openai.response.parsed", lambda r: r.output_parsed),
    (parsed_message, message(text_block(BONN)), "anthropic.message.parsed", lambda r: r.parsed_output),
]


@pytest.mark.parametrize(("ask", "body", "kind", "parsed"), PARSED, ids=[each[2] for each in PARSED])
def test_a_parsed_reply_is_parsed_again_by_what_the_call_asks_for(
    ask: Any, body: JSON, kind: str, parsed: Callable[[Any], Any],
    gpt: openai.OpenAI, claude: anthropic.Anthropic, provider: Provider,
) -> None:  # fmt: skip
    provider.answers = [body]
    reply, asked = ask(gpt, claude)
    assert reply_kind(reply) == kind
    assert parsed(reply) == City(name="Bonn", people=330000)
    value = stored(wire(reply))
    assert json.dumps(value, default=str).count("330000") == json.dumps(body).count("330000")
    back = rebuild(kind, value, asked)
    assert back == reply
    assert parsed(back) == parsed(reply)
    assert type(back).__name__.partition("[")[0] == type(reply).__name__.partition("[")[0]
    if ask is parsed_chat:
        assert back.choices[0].message.tool_calls[0].function.parsed_arguments == City(name="Bonn", people=330000)
    bare = rebuild(kind, value)
    assert parsed(bare) is None
    assert text_of(bare) == BONN


def test_a_reply_that_does_not_fit_its_format_any_more_is_refused_by_name() -> None:
    with pytest.raises(ValueRefused, match=r"reply: does not fit .*City.* any more: .*people"):
        rebuild("openai.chat.parsed", chat('{"name": "Bonn"}'), {"response_format": City})


# What a reply says ---------------------------------------------------------------------------------

SPOKEN = [
    ("openai.chat", chat("Let me look.", CALL)),
    ("openai.response", response(*ITEMS)),
    ("anthropic.message", message(*BLOCKS)),
]


@pytest.mark.parametrize("as_object", [True, False], ids=["object", "dict"])
@pytest.mark.parametrize(("kind", "body"), SPOKEN, ids=[kind for kind, _ in SPOKEN])
def test_text_tool_calls_and_usage_are_read_alike_whoever_sent_them(kind: str, body: JSON, as_object: bool) -> None:
    reply = built(kind, body) if as_object else body
    assert text_of(reply) == "Let me look."
    [call] = tool_calls_of(reply)
    assert (call.name, call.arguments) == ("look_up", {"city": "Berlin"})
    assert call.id in ("c1", "t1")
    name = "claude-opus-5" if kind == "anthropic.message" else "gpt-5-2026-01-01"
    cached = 90 if kind == "anthropic.message" else 100
    assert usage_of(reply) == Usage(model=name, tokens_in=120, tokens_out=30, tokens_cached=cached)


def test_reasoning_is_read_where_the_provider_shows_it() -> None:
    assert reasoning_of(message(*BLOCKS)) == "Berlin, surely."
    assert reasoning_of(built("anthropic.message", message(*BLOCKS))) == "Berlin, surely."
    assert reasoning_of(built("openai.response", response(*ITEMS))) == "First.\n\nThen."
    assert reasoning_of(built("openai.chat", chat("Yes.", reasoning_content="Hm."))) == "Hm."
    assert reasoning_of(chat("Yes.", reasoning="Hm.", reasoning_content="")) == "Hm."
    assert reasoning_of(chat("Yes.")) is None
    shown = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]}
    assert reasoning_of(response(shown)) == "So."


def test_a_refusal_is_the_text_where_nothing_else_was_said() -> None:
    assert text_of(chat(None, refusal="I would rather not.")) == "I would rather not."
    refusal = {"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}
    assert text_of(response(refusal)) == "No."
    assert text_of(response(response_text("Yes."), refusal)) == "Yes."


@pytest.mark.parametrize("reply", [None, {}, {"choices": None}, {"content": "x"}, 5, [], object(), SimpleNamespace()])
def test_what_is_no_reply_says_nothing(reply: Any) -> None:
    assert text_of(reply) == ""
    assert tool_calls_of(reply) == []
    assert reasoning_of(reply) is None
    assert usage_of(reply) is None
    assert assistant_messages(reply) == []
    assert not is_paused(reply)


@pytest.mark.parametrize(
    ("written", "read"),
    [("", {}), ("  ", {}), (None, {}), ("{}", {}), ('{"a": 1', '{"a": 1'), ("[1]", "[1]"), ({"a": 1}, {"a": 1})],
)
def test_arguments_that_are_no_json_object_stay_the_text_they_are(written: Any, read: Any) -> None:
    [call] = tool_calls_of(chat(None, ("c1", "f", written)))
    assert call == ToolCall("c1", "f", read)


def test_a_text_is_a_reply_too_and_other_clients_may_send_content_in_parts() -> None:
    assert text_of("Hello.") == "Hello."
    assert assistant_messages("Hello.") == [{"role": "assistant", "content": "Hello."}]
    assert text_of(chat([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}])) == "Hello."  # type: ignore[arg-type]
    said = SimpleNamespace(content="Hello.", tool_calls=None)
    assert text_of(SimpleNamespace(choices=[SimpleNamespace(message=said)])) == "Hello."


def test_the_model_finds_its_own_reply_in_the_history_as_it_wrote_it() -> None:
    [said] = assistant_messages(built("openai.chat", chat(None, CALL, reasoning_content="Hm.")))
    calls = [{"id": "c1", "type": "function", "function": {"name": CALL[1], "arguments": CALL[2]}}]
    expected = {
        "role": "assistant",
        "content": None,
        "annotations": [],
        "reasoning_content": "Hm.",
        "tool_calls": calls,
    }
    assert said == expected
    assert assistant_messages(built("openai.response", response(*ITEMS))) == ITEMS
    assert assistant_messages(built("anthropic.message", message(*BLOCKS))) == [
        {"role": "assistant", "content": BLOCKS}
    ]


def test_a_history_holds_nothing_that_would_be_refused_when_sent() -> None:
    assert assistant_messages(message()) == []
    assert assistant_messages(chat(None))[0]["content"] == ""
    spoken = chat(None, audio={"id": "audio_1", "data": "UklGR", "expires_at": 1, "transcript": "Hi"})
    assert assistant_messages(spoken)[0]["audio"] == {"id": "audio_1"}
    parsed = rebuild("openai.chat.parsed", chat(BONN), {"response_format": City})
    assert "parsed" not in assistant_messages(parsed)[0]


def test_the_provider_is_told_from_the_method_or_from_the_reply(
    gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    assert provider_of(gpt.chat.completions.create) == "openai"
    assert provider_of(gpt.responses.create) == "openai-responses"
    assert provider_of(gpt.responses.parse) == "openai-responses"
    assert provider_of(claude.messages.create) == "anthropic"
    assert provider_of(partial(claude.beta.messages.create, model="claude-opus-5")) == "anthropic"
    assert provider_of(lambda **_: None) == "openai"
    assert [provider_of(body) for _, body in SPOKEN] == ["openai", "openai-responses", "anthropic"]
    assert provider_of({"role": "assistant", "content": BLOCKS}) == "anthropic"


# Streams -------------------------------------------------------------------------------------------


def chunk(delta: JSON, **choice: Any) -> JSON:
    return {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-5", "usage": None,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | choice],
    }  # fmt: skip


def called(index: int, arguments: str, **first: Any) -> JSON:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments} | first.pop("function", {})} | first]}


CHUNKS = [
    chunk({"role": "assistant", "content": "", "refusal": None}),
    chunk({"content": "Let me"}),
    chunk({"content": " look."}, logprobs={"content": [{"token": "look", "logprob": -0.5}], "refusal": None}),
    chunk(called(0, "", id="c1", type="function", function={"name": "look_up"})),
    chunk(called(0, '{"city": ')),
    chunk(called(0, '"Berlin"}')),
    chunk(called(1, "{}", id="c2", type="function", function={"name": "stop"})),
    chunk({}, finish_reason="tool_calls"),
    chunk({}) | {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}},
]


@pytest.mark.parametrize("as_object", [True, False], ids=["object", "dict"])
def test_chat_chunks_join_into_one_that_says_the_same(as_object: bool) -> None:
    chunks = [built("openai.chat.chunk", each) if as_object else each for each in CHUNKS]
    [joined] = join_chunks(chunks)
    assert isinstance(joined, ChatCompletionChunk if as_object else dict)
    assert text_of(joined) == "Let me look."
    assert tool_calls_of(joined) == [ToolCall("c1", "look_up", {"city": "Berlin"}), ToolCall("c2", "stop", {})]
    assert usage_of(joined) == usage_of(chunks) == Usage(model="gpt-5", tokens_in=5, tokens_out=7)
    choice = wire(joined)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["role"] == "assistant"
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["look"]
    assert CHUNKS[1] == chunk({"content": "Let me"})  # what was joined is as it was


def test_two_choices_of_a_stream_stay_apart() -> None:
    [joined] = join_chunks([chunk({"content": "a"}), chunk({"content": "x"}, index=1), chunk({"content": "b"})])
    assert [choice["delta"]["content"] for choice in joined["choices"]] == ["ab", "x"]


def test_a_provider_that_repeats_the_name_of_a_call_calls_it_once() -> None:
    again = chunk(called(0, "}", id="c1", type="function", function={"name": "stop"}))
    [joined] = join_chunks([chunk(called(0, "{", id="c1", type="function", function={"name": "stop"})), again])
    assert tool_calls_of(joined) == [ToolCall("c1", "stop", {})]


def test_texts_join_and_other_chunks_stay_as_they_came() -> None:
    assert join_chunks(["a", "", "b"]) == ["ab"]
    assert join_chunks([b"a", b"b"]) == [b"ab"]
    for chunks in ([], ["a", b"b"], ["a", 1], [1, 2], [{"a": 1}], [CHUNKS[0], "x"]):
        assert join_chunks(chunks) is chunks


def test_the_chunks_of_a_real_stream_are_stored_and_join(gpt: openai.OpenAI, provider: Provider) -> None:
    provider.answers = [events(*CHUNKS)]
    chunks = list(gpt.chat.completions.create(model="gpt-5", messages=[], stream=True))
    assert len(chunks) == len(CHUNKS)
    assert {reply_kind(each) for each in chunks} == {"openai.chat.chunk"}
    assert [rebuild("openai.chat.chunk", stored(wire(each))) for each in chunks] == chunks
    assert text_of(join_chunks(chunks)[0]) == "Let me look."


STARTED = message() | {"stop_reason": None, "usage": {"input_tokens": 20, "output_tokens": 1}}
MESSAGE_EVENTS: list[JSON] = [
    {"type": "message_start", "message": STARTED},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello."}},
    {"type": "content_block_stop", "index": 0},
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 15},
    },
    {"type": "message_stop"},
]
RESPONSE_EVENTS: list[JSON] = [
    {"type": "response.created", "sequence_number": 0, "response": response() | {"usage": None}},
    {"type": "response.output_text.delta", "sequence_number": 1, "item_id": "m", "output_index": 0, "content_index": 0,
     "delta": "Hello.", "logprobs": []},
    {"type": "response.completed", "sequence_number": 2, "response": response(response_text("Hello."))},
]  # fmt: skip


def test_the_events_of_other_streams_come_back_and_tell_the_usage(
    gpt: openai.OpenAI, claude: anthropic.Anthropic, provider: Provider
) -> None:
    provider.answers = [
        events(*MESSAGE_EVENTS, done=False),
        events(*MESSAGE_EVENTS, done=False),
        events(*RESPONSE_EVENTS),
    ]
    asked: JSON = {"model": "claude-opus-5", "max_tokens": 9, "messages": [], "stream": True}
    streams: dict[str, Any] = {
        "anthropic.message.event": list(claude.messages.create(**asked)),
        "anthropic.beta.message.event": list(claude.beta.messages.create(**asked)),
        "openai.response.event": list(gpt.responses.create(model="gpt-5", input="?", stream=True)),
    }
    for kind, chunks in streams.items():
        assert [reply_kind(each) for each in chunks] == [kind] * len(chunks)
        back = [rebuild(kind, stored(wire(each))) for each in chunks]
        assert back == chunks
        assert [type(each) for each in back] == [type(each) for each in chunks]
    expected = Usage(model="claude-opus-5", tokens_in=20, tokens_out=15)
    assert usage_of(streams["anthropic.message.event"]) == expected
    assert usage_of(streams["openai.response.event"]) == usage_of(response())


# Clients -------------------------------------------------------------------------------------------

Ask = Callable[[Any, Any], Callable[[], Any]]
ASKING: dict[str, Callable[[Any, Any], tuple[Any, JSON]]] = {
    "chat.completions.create": lambda gpt, _: (gpt.chat.completions.create, {"messages": []}),
    "chat.completions.parse": lambda gpt, _: (gpt.chat.completions.parse, {"messages": [], "response_format": City}),
    "responses.create": lambda gpt, _: (gpt.responses.create, {"input": "?"}),
    "embeddings.create": lambda gpt, _: (gpt.embeddings.create, {"input": "?"}),
    "messages.create": lambda _, claude: (claude.messages.create, {"max_tokens": 9, "messages": []}),
    "messages.parse": lambda _, claude: (claude.messages.parse, {"max_tokens": 9, "messages": []}),
    "beta.messages.create": lambda _, claude: (claude.beta.messages.create, {"max_tokens": 9, "messages": []}),
    "a partial": lambda _, claude: (partial(claude.messages.create, max_tokens=9), {"messages": []}),
}


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", ASKING)
def test_a_client_that_is_answered_500_asks_once(
    name: str, gpt: openai.OpenAI, claude: anthropic.Anthropic, provider: Provider
) -> None:
    method, asked = ASKING[name](gpt, claude)
    with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)):
        without_sdk_retries(method)(model="m", **asked)
    assert len(provider.requests) == 1
    assert gpt.max_retries == claude.max_retries == 2


def test_an_asynchronous_client_asks_once_too(provider: Provider) -> None:
    async def ask() -> None:
        async with (
            openai.AsyncOpenAI(api_key="key", base_url=f"{provider.url}/v1") as gpt,
            anthropic.AsyncAnthropic(api_key="key", base_url=provider.url) as claude,
        ):
            with pytest.raises(openai.InternalServerError):
                await without_sdk_retries(gpt.chat.completions.create)(model="m", messages=[])
            with pytest.raises(anthropic.InternalServerError):
                await without_sdk_retries(claude.messages.create)(model="m", max_tokens=9, messages=[])
            with pytest.raises(anthropic.InternalServerError):
                async with without_sdk_retries(claude.messages.stream)(model="m", max_tokens=9, messages=[]):
                    pass

    asyncio.run(ask())
    assert len(provider.requests) == 3


def test_anything_else_is_returned_as_it_is(
    gpt: openai.OpenAI, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bot:
        """Somebody's own, with a client in it."""

        def __init__(self, client: openai.OpenAI) -> None:
            self._client = client

        def ask(self) -> None: ...

    monkeypatch.setattr(openai, "api_key", "key")
    once = openai.OpenAI(api_key="key", max_retries=0)
    raw = gpt.chat.completions.with_raw_response.create
    ours, theirs = once.responses.create, openai.chat.completions.create
    others: list[Any] = [print, [].append, Bot, Bot(gpt).ask, raw, ours, theirs]
    for fn in others:
        assert without_sdk_retries(fn) == fn
    assert openai.max_retries == 2
    once.close()
    provider.answers = [chat("Hello.")]
    assert text_of(without_sdk_retries(raw)(model="gpt-5", messages=[]).parse()) == "Hello."


def test_the_copy_of_a_client_is_made_once_follows_a_new_key_and_goes_with_it(provider: Provider) -> None:
    client = openai.OpenAI(api_key="old", base_url=f"{provider.url}/v1")
    first = without_sdk_retries(client.responses.create).__self__._client  # type: ignore[attr-defined]
    assert without_sdk_retries(client.chat.completions.create).__self__._client is first  # type: ignore[attr-defined]
    client.api_key = "new"
    second = without_sdk_retries(client.responses.create).__self__._client  # type: ignore[attr-defined]
    assert (first.api_key, second.api_key) == ("old", "new")
    client.close()
    gone = weakref.ref(client)
    del client, first, second
    gc.collect()
    assert gone() is None
    assert not [each for each in model_reply._unretried if isinstance(each, openai.OpenAI) and each.api_key == "new"]
