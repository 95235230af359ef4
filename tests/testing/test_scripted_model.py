"""A scripted model says its turns in order, in any provider's form, and remembers what it was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest

import killick
from killick.engine.steps.model_reply import Provider, reasoning_of, reply_kind, text_of, tool_calls_of, usage_of
from killick.errors import FakeRefused
from killick.testing import call, interrupt_everywhere, play, refusal, scripted, turn
from playing import playing

PROVIDERS: tuple[Provider, ...] = ("openai", "openai-responses", "anthropic")


@killick.tool(effect="reads")
async def scripted_search(q: str) -> list[str]:
    """Looks something up."""
    return [f"{q} found"]


@killick.tool
async def scripted_send(to: str) -> str:
    """Sends something."""
    return f"sent to {to}"


TOOLS = killick.Toolset(scripted_search, scripted_send)


# replies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_turn_reads_the_same_in_every_form(provider: Provider, objects: bool) -> None:
    said = turn("Let me look.", call("a", q="x"), call("b", n=[1]), reasoning="hm", usage=(120, 30))
    reply = scripted(said, provider=provider, objects=objects)(model="m-1")
    assert (reply_kind(reply) is not None) == objects
    assert (text_of(reply), reasoning_of(reply)) == ("Let me look.", "hm")
    assert [(each.name, each.arguments) for each in tool_calls_of(reply)] == [("a", {"q": "x"}), ("b", {"n": [1]})]
    assert len({each.id for each in tool_calls_of(reply)}) == 2
    usage = usage_of(reply)
    assert usage is not None
    assert (usage.model, usage.tokens_in, usage.tokens_out) == ("m-1", 120, 30)


def test_a_text_before_a_call_is_said_with_it() -> None:
    model = scripted("Let me look.", call("a"), "Done.")
    first, second = model(messages=[]), model(messages=[])
    assert (text_of(first), len(tool_calls_of(first))) == ("Let me look.", 1)
    assert (text_of(second), len(tool_calls_of(second))) == ("Done.", 0)
    apart = scripted(turn("Let me look."), call("a"))
    assert tool_calls_of(apart(messages=[])) == []


def test_the_request_tells_whose_form_a_reply_has() -> None:
    def form(**request: Any) -> str:
        reply = scripted("x")(**request)
        return "openai" if "choices" in reply else "openai-responses" if "output" in reply else "anthropic"

    assert form(messages=[]) == "openai"
    assert form(input="hello") == "openai-responses"
    assert form(messages=[], system="be kind") == "anthropic"
    for provider in PROVIDERS:
        name = "input" if provider == "openai-responses" else "messages"
        assert form(**{name: [], "tools": TOOLS.schemas(provider)}) == provider


def test_it_remembers_what_it_was_sent_as_it_was_sent() -> None:
    model = scripted("one", "two")
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    model(messages=messages, model="m")
    messages.append("more")
    model(messages=messages)
    assert model.requests[0] == {"messages": [{"role": "user", "content": "hello"}], "model": "m"}
    assert len(model.requests[1]["messages"]) == 2
    assert model.left == 0


def test_asked_more_often_than_it_was_scripted_it_says_so() -> None:
    model = scripted("one")
    model(messages=[])
    with pytest.raises(FakeRefused, match=r"its script has 1 turn, and it was asked 2 times; .*ends with 'and now\?'"):
        model(messages=["hello", "and now?"])


def test_the_last_turn_may_be_given_for_ever() -> None:
    model = scripted("one", "two", forever=True)
    assert [text_of(model()) for _ in range(4)] == ["one", "two", "two", "two"]


def test_a_function_chooses_by_looking_at_the_request() -> None:
    def by_last(messages: list[Any]) -> Any:
        return call("a", q=messages[-1]["content"]) if messages else "nobody said anything"

    model = scripted(by_last, by_last, lambda model, **request: f"{model}, {sorted(request)}")
    assert tool_calls_of(model(messages=[{"content": "x"}]))[0].arguments == {"q": "x"}
    assert text_of(model(input=[])) == "nobody said anything"
    assert text_of(model(messages=[], model="m")) == "m, ['messages']"


def test_it_can_be_awaited() -> None:
    assert text_of(asyncio.run(scripted("hello").async_call(messages=[]))) == "hello"


def test_a_stream_is_refused_with_what_to_do() -> None:
    with pytest.raises(FakeRefused, match="does not stream"):
        scripted("hello")(messages=[], stream=True)


# in a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", PROVIDERS)
def test_it_plays_the_model_of_a_loop(provider: Provider) -> None:
    model = scripted("Let me look.", call("scripted_search", q="x"), call("scripted_send", to="ann"), "Done.")

    @killick.agent
    async def looks(run: killick.Run) -> str:
        result = await killick.loop(run, model, TOOLS, messages="Find x.", provider=provider, system="Be kind.")
        return result.text

    with play(looks) as t:
        assert t.result() == "Done."
        assert t.calls(scripted_search) == [{"q": "x"}]
        assert t.calls(scripted_send) == [{"to": "ann"}]
        assert [decision.choice for decision in t.state.decisions] == ["scripted_search", "scripted_send"]
        assert t.state.decisions[0].because == "Let me look."
    assert len(model.requests) == 3
    assert "x found" in str(model.requests[1])


def test_it_plays_the_model_of_a_blocking_loop() -> None:
    model = scripted(turn(call("scripted_search", q="x"), call("scripted_search", q="y")), "Done.")

    @killick.agent
    def looks(run: killick.SyncRun) -> str:
        return killick.loop_sync(run, model, TOOLS, messages="Find x and y.").text

    with play(looks) as t:
        assert t.result() == "Done."
        assert t.calls(scripted_search) == [{"q": "x"}, {"q": "y"}]


def test_without_a_play_it_is_a_model_like_any_other() -> None:
    model = scripted(call("scripted_search", q="x"), "Done.")

    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await run.model(model, messages=["Find x."])
        answers = await run.dispatch(TOOLS, reply)
        return text_of(await run.model(model, messages=answers))

    with killick.open("memory:") as kd:
        assert kd.run(asks, id="r") == "Done."
        assert kd.run(asks, id="r") == "Done."
        assert [call.usage.tokens_out for call in kd.state("r").trace if call.usage] == [5, 5]
    assert len(model.requests) == 2


def test_what_is_replayed_after_a_crash_costs_no_turn() -> None:
    model = scripted("Let me look.", call("scripted_search", q="x"), call("scripted_send", to="ann"), "Done.")

    @killick.agent
    async def looks(run: killick.Run) -> str:
        return (await killick.loop(run, model, TOOLS, messages="Find x.")).text

    with play(looks) as t:
        t.until(scripted_search)
        t.crash()
        t.until("scripted")
        t.crash()
        t.until("scripted", returned=True)
        assert t.result() == "Done."
    assert len(model.requests) == 3
    assert model.left == 0


def test_a_rate_limit_and_an_overload_are_waited_for() -> None:
    model = scripted(refusal(429, retry_after=30), refusal(529), ConnectionError("reset"), "Done.")

    @killick.agent
    async def asks(run: killick.Run) -> str:
        return text_of(await run.model(model, messages=[]))

    with play(asks) as t:
        before = t.clock.now_us()
        t.until_waiting()
        assert t.waits_for == {"time"}
        t.advance(29)
        t.until_waiting()
        assert len(model.requests) == 1
        assert t.result() == "Done."
        assert t.clock.now_us() - before > 30_000_000
        assert len(t.state.retries[0].errors) == 3


def test_a_wrong_key_fails_the_run() -> None:
    model = scripted(refusal(401, "wrong key"))

    @killick.agent
    async def asks(run: killick.Run) -> None:
        await run.model(model, messages=[])

    with play(asks) as t, pytest.raises(killick.RunFailed, match="401: wrong key"):
        t.result()


def test_out_of_turns_it_ends_the_test_whatever_the_agent_catches() -> None:
    model = scripted("one")

    @killick.agent
    async def insists(run: killick.Run) -> None:
        for _ in range(3):
            try:
                await run.model(model, messages=["again"])
            except killick.StepFailed:
                return

    with play(insists) as t, pytest.raises(FakeRefused, match="1 turn, and it was asked 2 times"):
        t.result()


# in place of official clients -----------------------------------------------------------------------

CLIENT = anthropic.AsyncAnthropic(api_key="k", base_url="http://127.0.0.1:9")
OTHER = anthropic.AsyncAnthropic(api_key="other", base_url="http://127.0.0.1:9")
OPENAI = openai.OpenAI(api_key="k", base_url="http://127.0.0.1:9")


def test_it_stands_for_the_method_of_a_client_with_that_clients_classes() -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await run.model(CLIENT.messages.create, model="claude", max_tokens=100, messages=[])
        assert isinstance(reply, anthropic.types.Message)
        return reply.content[0].text  # type: ignore[union-attr]

    model = scripted("Hello.")
    with play(asks, fakes={CLIENT.messages.create: model}) as t:
        assert t.result() == "Hello."
        assert t.calls(CLIENT.messages.create) == [{"model": "claude", "max_tokens": 100, "messages": []}]
        assert t.calls(OTHER.messages.create) == []
    assert model.requests == [{"model": "claude", "max_tokens": 100, "messages": []}]


@pytest.mark.parametrize("method", [OPENAI.chat.completions.create, OPENAI.responses.create, CLIENT.messages.create])
def test_it_plays_a_loop_in_place_of_any_client(method: Any) -> None:
    @killick.agent
    async def looks(run: killick.Run) -> str:
        return (await killick.loop(run, method, TOOLS, messages="Find x.", model="m")).text

    model = scripted("Let me look.", call("scripted_search", q="x"), "Done.")
    with play(looks, fakes={method: model}) as t:
        t.until(method)
        t.crash()
        assert t.result() == "Done."
        assert len(t.calls(scripted_search)) == 1
    assert len(model.requests) == 2


def test_a_client_refuses_with_its_own_errors() -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await run.model(OPENAI.chat.completions.create, model="m", messages=[])
        return str(reply.choices[0].message.content)

    model = scripted(refusal(429, retry_after=7), refusal(500), "Hello.")
    with play(asks, fakes={OPENAI.chat.completions.create: model}) as t:
        assert t.result() == "Hello."
        kinds = [error["type"] for error in t.state.retries[0].errors]
        assert kinds == ["openai.RateLimitError", "openai.InternalServerError"]


def test_what_stands_for_one_client_stands_for_no_other() -> None:
    @killick.agent
    async def asks(run: killick.Run) -> str:
        reply = await run.model(OTHER.messages.create, model="claude", max_tokens=100, messages=[])
        return text_of(reply)

    with playing() as provider:
        there = OTHER.with_options(base_url=provider.url)
        provider.answers.append({"type": "message", "content": [{"type": "text", "text": "real"}], "usage": None})

        @killick.agent
        async def asks_there(run: killick.Run) -> str:
            return text_of(await run.model(there.messages.create, model="claude", max_tokens=100, messages=[]))

        with play(asks_there, fakes={CLIENT.messages.create: scripted("faked")}) as t:
            assert t.result() == "real"
    with play(asks, fakes={OTHER.messages.create: scripted("faked")}) as t:
        assert t.result() == "faked"


# in rehearsals ------------------------------------------------------------------------------------


def test_every_rehearsal_of_an_agent_begins_its_script_anew() -> None:
    model = scripted("Let me look.", call("scripted_search", q="x"), "Done.")

    @killick.agent
    async def looks(run: killick.Run, question: str) -> str:
        return (await killick.loop(run, model, TOOLS, messages=question)).text

    report = interrupt_everywhere(looks, input="Find x.")
    assert report.stories > 20


def test_a_turn_that_is_none_is_refused_when_the_script_is_written() -> None:
    with pytest.raises(FakeRefused, match=r"\('get', \{'n': 1\}\) is not a turn; give a text, call\(name, …\)"):
        scripted(("get", {"n": 1}), "Done.")  # type: ignore[arg-type]
