"""killick.durable: the real clients of openai and anthropic, over real HTTP to a provider that follows a script."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

import killick
from killick.agents.recording_client import durable
from killick.errors import DeclarationRefused, OutsideBranch
from killick.model import events as e
from killick.testing import check, play, scripted
from provider import Fails, Provider, Says, Serving
from world import World

ASK: list[Any] = [{"role": "user", "content": "greet me"}]
BUSY = Fails(429, {"error": {"message": "slow down", "type": "rate_limit_error"}}, {"retry-after": "2"})
BROKEN = Fails(500, {"error": {"message": "broken", "type": "api_error"}})
WRONG = Fails(400, {"type": "error", "error": {"message": "no such model", "type": "invalid_request_error"}})


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def url(provider: Provider) -> Iterator[str]:
    with Serving(provider) as serving:
        yield serving.url


class Clients:
    """The four clients, each durable, to one provider."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Loops come and go here, and no connection is to outlive its own.
        self.own: dict[str, Any] = {"api_key": "sk-secret", "default_headers": {"connection": "close"}}

    @cached_property
    def openai(self) -> openai.AsyncOpenAI:
        return durable(openai.AsyncOpenAI(base_url=f"{self.url}/v1", **self.own))

    @cached_property
    def openai_sync(self) -> openai.OpenAI:
        return durable(openai.OpenAI(base_url=f"{self.url}/v1", **self.own))

    @cached_property
    def anthropic(self) -> anthropic.AsyncAnthropic:
        return durable(anthropic.AsyncAnthropic(base_url=self.url, **self.own))

    @cached_property
    def anthropic_sync(self) -> anthropic.Anthropic:
        return durable(anthropic.Anthropic(base_url=self.url, **self.own))


@pytest.fixture
def clients(url: str) -> Clients:
    return Clients(url)


class Greeting(BaseModel):
    words: str


# Each way to ask, as an async agent's code and as a def agent's; each gives what was said.


async def chat(clients: Clients) -> str:
    reply = await clients.openai.chat.completions.create(model="m", messages=ASK)
    assert isinstance(reply, openai.types.chat.ChatCompletion)
    return str(reply.choices[0].message.content)


async def chat_stream(clients: Clients) -> str:
    said = ""
    stream = await clients.openai.chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    return said


async def chat_raw(clients: Clients) -> str:
    raw = await clients.openai.chat.completions.with_raw_response.create(model="m", messages=ASK)
    return str(raw.parse().choices[0].message.content)


async def response(clients: Clients) -> str:
    reply = await clients.openai.responses.create(model="m", input="greet me")
    return reply.output_text


async def response_stream(clients: Clients) -> str:
    async with clients.openai.responses.stream(model="m", input="greet me") as stream:
        return (await stream.get_final_response()).output_text


async def message(clients: Clients) -> str:
    reply = await clients.anthropic.messages.create(model="m", max_tokens=9, messages=ASK)
    assert isinstance(reply, anthropic.types.Message)
    return "".join(block.text for block in reply.content if block.type == "text")


async def message_stream(clients: Clients) -> str:
    async with clients.anthropic.messages.stream(model="m", max_tokens=9, messages=ASK) as stream:
        return "".join([text async for text in stream.text_stream])


async def message_events(clients: Clients) -> str:
    said = ""
    async for event in await clients.anthropic.messages.create(model="m", max_tokens=9, messages=ASK, stream=True):
        if event.type == "content_block_delta" and event.delta.type == "text_delta":
            said += event.delta.text
    return said


def chat_now(clients: Clients) -> str:
    return str(clients.openai_sync.chat.completions.create(model="m", messages=ASK).choices[0].message.content)


def chat_stream_now(clients: Clients) -> str:
    stream = clients.openai_sync.chat.completions.create(model="m", messages=ASK, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def message_now(clients: Clients) -> str:
    reply = clients.anthropic_sync.messages.create(model="m", max_tokens=9, messages=ASK)
    return "".join(block.text for block in reply.content if block.type == "text")


def message_stream_now(clients: Clients) -> str:
    with clients.anthropic_sync.messages.stream(model="m", max_tokens=9, messages=ASK) as stream:
        return "".join(stream.text_stream)


WAYS = [chat, chat_stream, chat_raw, response, response_stream, message, message_stream, message_events]
WAYS_NOW = [chat_now, chat_stream_now, message_now, message_stream_now]


def agent_of(way: Callable[[Clients], Any], clients: Clients) -> Any:
    """Asks, waits for a person, and gives what was said."""

    async def asks(run: killick.Run) -> str:
        said = str(await way(clients))
        await run.ask("send it?")
        return said

    def asks_now(run: killick.SyncRun) -> str:
        said = str(way(clients))
        run.ask("send it?")
        return said

    return killick.agent(name="asks")(asks if asyncio.iscoroutinefunction(way) else asks_now)


@pytest.mark.gate(4)
@pytest.mark.parametrize("way", [*WAYS, *WAYS_NOW], ids=lambda way: way.__name__)
def test_a_call_inside_a_run_is_on_record_and_never_made_again(
    world: World, provider: Provider, clients: Clients, way: Any
) -> None:
    provider.replies(Says("Good morning, Ann."))
    agent = agent_of(way, clients)
    with pytest.raises(killick.RunWaiting):
        world.kd.run(agent, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(agent, id="r") == "Good morning, Ann."
    assert len(provider.requests) == 1
    [intended] = [each for each in world.told("r", e.StepIntended) if each.sort == "model"]
    [ended] = world.told("r", e.AttemptEnded)
    assert ended.outcome == "returned"
    if way is not chat_stream_now:  # that stream says nothing of what it used
        assert ended.usage is not None
        assert ended.usage.tokens_out == 10
    recorded = kd.runtime.log.data("r", next(r.seq for r in kd.events("r") if r.event == intended))
    assert recorded["arguments"]["model"] == "m"
    assert "sk-secret" not in str([r.row for r in kd.events("r")])


@pytest.mark.gate(4)
@pytest.mark.parametrize("way", [*WAYS, *WAYS_NOW], ids=lambda way: way.__name__)
def test_outside_of_a_run_nothing_changes(provider: Provider, clients: Clients, way: Any) -> None:
    provider.replies(BROKEN, Says("Good morning, Ann."))
    made = way(clients)
    assert (asyncio.run(made) if asyncio.iscoroutine(made) else made) == "Good morning, Ann."
    assert len(provider.requests) == 2, "the client's own retries are its own"


def test_it_stays_the_client_that_it_was(url: str) -> None:
    given = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk", max_retries=7)
    made = durable(given)
    assert isinstance(made, openai.AsyncOpenAI)
    assert made is not given
    assert (made.max_retries, str(made.base_url), made.api_key) == (7, f"{url}/v1/", "sk")
    assert durable(made) is made
    assert isinstance(durable(anthropic.Anthropic(api_key="sk")), anthropic.Anthropic)


def test_what_is_no_client_is_refused_in_one_line() -> None:
    with pytest.raises(DeclarationRefused, match=r"dict: is not a client that sends requests.*AsyncOpenAI"):
        durable({})


def test_the_given_client_may_be_collected_and_options_may_be_changed(
    world: World, provider: Provider, url: str
) -> None:
    closing = {"connection": "close"}
    client = durable(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk", default_headers=closing)).with_options(
        timeout=5
    )
    gc.collect()

    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await client.with_options(max_retries=1).chat.completions.create(model="m", messages=ASK)
        return str(reply.choices[0].message.content)

    assert world.kd.run(asks, id="r") == "hello"
    assert [step.sort for step in world.kd.state("r").fold.steps] == ["model"]


def test_a_parsed_reply_is_parsed_on_replay_too(world: World, provider: Provider, clients: Clients) -> None:
    provider.replies(Says('{"words": "good day"}'))

    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await clients.openai.chat.completions.parse(model="m", messages=ASK, response_format=Greeting)
        found = reply.choices[0].message.parsed
        assert isinstance(found, Greeting)
        await run.ask("go on?")
        return found.words

    with pytest.raises(killick.RunWaiting):
        world.kd.run(asks, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(asks, id="r") == "good day"
    assert len(provider.requests) == 1


def test_the_run_tries_again_and_every_attempt_is_on_record(world: World, provider: Provider, clients: Clients) -> None:
    provider.replies(BUSY, BROKEN, Says("at last"))

    @killick.agent
    async def asks(run: killick.Run) -> str:
        return await message(clients)

    assert world.kd.run(asks, id="r") == "at last"
    ended = world.told("r", e.AttemptEnded)
    assert [(each.outcome, each.limited) for each in ended] == [
        ("unknown", True),
        ("unknown", False),
        ("returned", False),
    ]
    assert len(provider.requests) == 3


@pytest.mark.parametrize("way", [chat, chat_stream, message, message_stream, chat_now, message_stream_now],
                         ids=lambda way: way.__name__)  # fmt: skip
def test_an_error_is_the_client_s_own_live_and_on_replay(
    world: World, provider: Provider, clients: Clients, way: Any
) -> None:
    provider.replies(WRONG)

    def told(error: Exception) -> str:
        assert isinstance(error, openai.BadRequestError | anthropic.BadRequestError)
        return f"{error.status_code} {'no such model' in str(error)}"

    async def asks(run: killick.Run) -> str:
        try:
            return str(await way(clients))
        except (openai.APIError, anthropic.APIError) as error:
            said = told(error)
        await run.ask("go on?")
        return said

    def asks_now(run: killick.SyncRun) -> str:
        try:
            return str(way(clients))
        except (openai.APIError, anthropic.APIError) as error:
            said = told(error)
        run.ask("go on?")
        return said

    agent: Any = killick.agent(name="asks")(asks if asyncio.iscoroutinefunction(way) else asks_now)
    with pytest.raises(killick.RunWaiting):
        world.kd.run(agent, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(agent, id="r") == "400 True"
    assert len(provider.requests) == 1


def test_a_far_side_that_is_not_there_is_the_client_s_own_connection_error(world: World) -> None:
    clients = Clients("http://127.0.0.1:9")

    @killick.agent
    async def asks(run: killick.Run) -> str:
        try:
            return await chat(clients)
        except openai.APIConnectionError:
            try:
                return await message(clients)
            except anthropic.APIConnectionError:
                return "nobody there"

    assert world.kd.run(asks, id="r") == "nobody there"
    assert [each.attempt for each in world.told("r", e.AttemptEnded)] == [1, 2, 3, 1, 2, 3], "tried by the run alone"


def test_what_a_contract_rejects_is_not_sent(world: World, provider: Provider, clients: Clients) -> None:
    @killick.agent(contract=killick.Contract("poor", [killick.rules.budget(calls=1)]))
    async def asks(run: killick.Run) -> str:
        await message(clients)
        try:
            return await message(clients)
        except killick.Rejected as rejected:
            return str(rejected.code)

    assert "budget" in world.kd.run(asks, id="r")
    assert len(provider.requests) == 1


def test_inside_a_tool_it_is_part_of_the_tool(world: World, provider: Provider, clients: Clients) -> None:
    @killick.tool(effect="reads")
    async def translate(text: str) -> str:
        return await chat(clients)

    @killick.agent
    async def asks(run: killick.Run) -> str:
        return await run.call(translate, "x")

    assert world.kd.run(asks, id="r") == "hello"
    assert [step.sort for step in world.kd.state("r").fold.steps] == ["tool"]


def test_run_model_with_it_is_one_step(world: World, provider: Provider, clients: Clients) -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await run.model(clients.anthropic.messages.create, model="m", max_tokens=9, messages=ASK)
        return str(reply.content[0].text)

    assert world.kd.run(asks, id="r") == "hello"
    assert [step.sort for step in world.kd.state("r").fold.steps] == ["model"]
    assert len(provider.requests) == 1


def test_whatever_asks_no_model_is_no_step(world: World, provider: Provider, clients: Clients) -> None:
    @killick.agent
    async def lists(run: killick.Run) -> int:
        await clients.openai.models.list()
        return 1

    world.kd.run(lists, id="r")
    assert not world.kd.state("r").fold.steps
    assert provider.requests[0].path == "/v1/models"


def test_the_wrong_kind_of_client_is_named(world: World, provider: Provider, clients: Clients) -> None:
    @killick.agent
    async def blocks(run: killick.Run) -> str:
        return chat_now(clients)

    with pytest.raises(killick.RunFailed, match="give an async agent the async client"):
        world.kd.run(blocks, id="r1")

    @killick.agent
    def awaits(run: killick.SyncRun) -> str:
        return asyncio.run(chat(clients))

    with pytest.raises(killick.RunFailed, match="give it the blocking client"):
        world.kd.run(awaits, id="r2")
    assert not provider.requests


def test_a_task_that_killick_did_not_start_is_told_of_gather(
    world: World, provider: Provider, clients: Clients
) -> None:
    @killick.agent
    async def both(run: killick.Run) -> Any:
        try:
            return await asyncio.gather(chat(clients), chat(clients))
        except OutsideBranch as error:
            return str(error)

    assert "run.gather" in world.kd.run(both, id="r1")

    @killick.agent
    async def apart(run: killick.Run) -> Any:
        return await run.gather(chat(clients), message(clients))

    assert list(world.kd.run(apart, id="r2")) == ["hello", "hello"]
    assert len(provider.requests) == 2


def test_a_stream_that_is_left_early_is_the_same_on_replay(world: World, provider: Provider, clients: Clients) -> None:
    provider.replies(Says("one two three four five six"))

    @killick.agent
    async def hears(run: killick.Run) -> str:
        said = ""
        async with clients.anthropic.messages.stream(model="m", max_tokens=9, messages=ASK) as stream:
            async for text in stream.text_stream:
                said += text
                if len(said) >= 10:
                    break
        await run.ask("go on?")
        return said

    with pytest.raises(killick.RunWaiting):
        world.kd.run(hears, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(hears, id="r") == "one two th"
    assert len(provider.requests) == 1


def test_a_blocking_stream_that_is_left_early_is_the_same_on_replay(
    world: World, provider: Provider, clients: Clients
) -> None:
    provider.replies(Says("one two three four five six"))

    @killick.agent
    def hears(run: killick.SyncRun) -> str:
        said = ""
        with clients.anthropic_sync.messages.stream(model="m", max_tokens=9, messages=ASK) as stream:
            for text in stream.text_stream:
                said += text
                if len(said) >= 10:
                    break
        run.ask("go on?")
        return said

    with pytest.raises(killick.RunWaiting):
        world.kd.run(hears, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(hears, id="r") == "one two th"
    assert len(provider.requests) == 1


def test_a_stream_that_breaks_off_is_an_error_and_not_asked_again(
    world: World, provider: Provider, clients: Clients
) -> None:
    provider.replies(Says("one two three four five six", cut=600))

    @killick.agent
    async def hears(run: killick.Run) -> str:
        try:
            return await message_stream(clients)
        except Exception as error:
            said = type(error).__module__.partition(".")[0]
        await run.ask("go on?")
        return said

    with pytest.raises(killick.RunWaiting):
        world.kd.run(hears, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(hears, id="r") in ("httpx", "httpx2", "anthropic")
    assert len(provider.requests) == 1


def test_a_fork_may_ask_another_model(world: World, provider: Provider, clients: Clients) -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        return await chat(clients)

    world.kd.run(asks, id="r")
    forked = world.kd.fork("r", "1:before", model="m2")
    world.kd.advance(forked.id)
    assert [body["model"] for body in provider.bodies] == ["m", "m2"]


# in a host ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [chat, chat_stream, message, message_stream], ids=lambda way: way.__name__)
def test_within_a_host_a_call_is_the_host_s(tmp_path: Path, provider: Provider, clients: Clients, way: Any) -> None:
    async def work() -> list[str]:
        async with killick.open_async(tmp_path / "k.db") as kd, kd.host("t", agent="frame"):
            return [await asyncio.create_task(way(clients)), await way(clients)]

    provider.replies(Says("first"), Says("second"))
    assert asyncio.run(work()) == ["first", "second"]
    assert asyncio.run(work()) == ["first", "second"], "the nth call with the same words is the same call"
    assert len(provider.requests) == 2


@pytest.mark.parametrize("way", [chat_now, message_stream_now], ids=lambda way: way.__name__)
def test_within_a_blocking_host_too(tmp_path: Path, provider: Provider, clients: Clients, way: Any) -> None:
    provider.replies(Says("first"))
    for _ in range(2):
        with killick.open(tmp_path / "k.db") as kd, kd.host("t", agent="frame"):
            assert way(clients) == "first"
    assert len(provider.requests) == 1


def test_in_an_agent_a_framework_s_own_tasks_ask_through_the_host(
    world: World, provider: Provider, clients: Clients
) -> None:
    @killick.agent
    async def frames(run: killick.Run) -> list[str]:
        async with run.hosting():
            said = await asyncio.gather(chat(clients), message(clients))
        await run.ask("go on?")
        return list(said)

    with pytest.raises(killick.RunWaiting):
        world.kd.run(frames, id="r")
    kd = world.process()
    kd.answer("r", "approve", by="ann")
    assert kd.run(frames, id="r") == ["hello", "hello"]
    assert len(provider.requests) == 2


# rehearsed ----------------------------------------------------------------------------------------


@pytest.mark.gate(2)
@pytest.mark.parametrize("way", [*WAYS, *WAYS_NOW], ids=lambda way: way.__name__)
def test_a_rehearsal_asks_nobody_and_finds_nothing(provider: Provider, clients: Clients, way: Any) -> None:
    report = check(agent_of(way, clients), stories_max=12)
    assert [str(finding) for finding in report.findings] == []
    assert not provider.requests


def test_a_scripted_model_stands_for_the_client(provider: Provider, clients: Clients) -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        return await message(clients) + await message(clients)

    with play(asks, fakes={"messages": scripted("one ", "two", provider="anthropic")}) as t:
        assert t.result() == "one two"
    assert not provider.requests
