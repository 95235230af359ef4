"""What passes through the proxy: replies, streams, errors, headers and bodies, by the official clients."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from killick.model import events as e
from processes import told
from proxy.agents import KEY, Loop, each_form, only_run
from proxy.provider import Desk, Fails, Says, desk, hanging_up

HELLO = [{"role": "user", "content": "hällo"}]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        yield made


def clients(url: str, **options: Any) -> tuple[openai.OpenAI, anthropic.Anthropic]:
    given = {"api_key": KEY, "max_retries": 0, "timeout": 20, **options}
    return openai.OpenAI(base_url=f"{url}/v1", **given), anthropic.Anthropic(base_url=url, **given)


def ask(url: str, shape: str, streams: bool, **options: Any) -> Any:
    chat, messages = clients(url, **options)
    with chat, messages:
        if shape == "anthropic":
            asked: dict[str, Any] = {"model": "claude-sonnet-5", "max_tokens": 9, "messages": HELLO}
            if not streams:
                return messages.messages.create(**asked)
            with messages.messages.stream(**asked) as stream:
                return stream.get_final_message()
        if not streams:
            return chat.chat.completions.create(model="gpt-5", messages=HELLO)  # type: ignore[arg-type]
        return list(chat.chat.completions.create(model="gpt-5", messages=HELLO, stream=True))  # type: ignore[call-overload]


# replies ------------------------------------------------------------------------------------------


@pytest.mark.gate(2)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_reply_reaches_the_client_byte_for_byte(here: Desk, path: str, streams: bool) -> None:
    here.provider.script = lambda body: Says("Grüße, 世界 🌍", [("look", {"at": "ö"})], thinking="hm")
    body = {"model": "m", "messages": HELLO, "input": "hällo", "stream": streams}
    straight = httpx.post(here.upstream + path, json=body)
    here.provider._replies = here.provider._calls = 0
    with here.proxied() as url:
        passed = httpx.post(url + path, json=body)
    assert passed.content == straight.content
    assert passed.headers["content-type"] == straight.headers["content-type"]
    assert here.provider.requests[1].raw == here.provider.requests[0].raw, "and so does the request"


@pytest.mark.slow
def test_async_clients_stream_side_by_side(here: Desk) -> None:
    here.provider.script = lambda body: Says(f"You said {body['messages'][0]['content']}")

    async def one(client: Any, number: int) -> str:
        messages = [{"role": "user", "content": f"number {number}"}]
        if isinstance(client, openai.AsyncOpenAI):
            stream = await client.chat.completions.create(model="gpt-5", messages=messages, stream=True)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        async with client.messages.stream(model="claude-sonnet-5", max_tokens=9, messages=messages) as stream:
            return "".join([text async for text in stream.text_stream])

    async def all_at_once(url: str) -> list[str]:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as chat,
            anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as messages,
        ):
            return await asyncio.gather(*(one(client, n) for n in range(10) for client in (chat, messages)))

    with here.proxied() as url:
        said = asyncio.run(all_at_once(url))
    assert said == [f"You said number {n}" for n in range(10) for _ in range(2)]
    with here.record() as kd:
        runs = kd.list()
        assert len(runs) == 20
        for row in runs:
            [(_, _, sent)] = told(kd, row.id, e.StepIntended)
            [(_, ended, _)] = told(kd, row.id, e.AttemptEnded)
            asked = sent["arguments"]["messages"][0]["content"]
            [(_, _, over)] = told(kd, row.id, e.RunCompleted)
            assert (ended.outcome, over["result"]) == ("returned", f"You said {asked}")


@pytest.mark.slow
def test_responses_are_recorded_and_passed_as_they_are(here: Desk) -> None:
    with here.proxied() as url:
        chat, messages = clients(url)
        with chat, messages:
            assert chat.responses.create(model="gpt-5", input="hällo").output_text == "hello"
            with chat.responses.stream(model="gpt-5", input=[{"role": "user", "content": "again"}]) as stream:
                assert stream.get_final_response().output_text == "hello"
    with here.record() as kd:
        for row in kd.list():
            [(_, ended, data)] = told(kd, row.id, e.AttemptEnded)
            assert ended.usage is not None
            assert data["output"]["output"][0]["content"][0]["text"] == "hello"


@pytest.mark.gate(2)
@each_form
def test_a_reply_is_recorded_whole_with_its_usage_and_thoughts(here: Desk, shape: str, streams: bool) -> None:
    here.provider.script = lambda body: Says(
        "Found.", [("look", {"at": "x"}), ("look", {"at": "y"})], thinking="I look."
    )
    with here.proxied() as url:
        ask(url, shape, streams)
        whole = here.provider.requests[0]
    with here.record() as kd:
        [(_, _, sent)] = told(kd, only_run(kd), e.StepIntended)
        assert sent["arguments"] == whole.body
        [(_, ended, data)] = told(kd, only_run(kd), e.AttemptEnded)
        reply = data["output"]
        if shape == "anthropic":
            assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use", "tool_use"]
            assert reply["content"][3]["input"] == {"at": "y"}
            assert data["reasoning"] == "I look."
            assert ended.usage.tokens_out == 10
            assert ended.usage.cost_micros > 0
        else:
            message = reply["choices"][0]["message"]
            assert message["content"] == "Found."
            assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"at": "x"}', '{"at": "y"}']
            assert (reply["object"], reply["choices"][0]["finish_reason"]) == ("chat.completion", "tool_calls")


# errors -------------------------------------------------------------------------------------------


@pytest.mark.gate(2)
@each_form
def test_an_error_of_the_provider_is_the_clients_own(here: Desk, shape: str, streams: bool) -> None:
    body = {"type": "error", "error": {"type": "rate_limit_error", "message": "slow down"}}
    here.provider.replies(Fails(429, body, {"retry-after": "7", "x-request-id": "req_9"}))
    kind = anthropic.RateLimitError if shape == "anthropic" else openai.RateLimitError
    with here.proxied() as url, pytest.raises(kind) as caught:
        ask(url, shape, streams)
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.response.json() == body
    with here.record() as kd:
        [(_, ended, data)] = told(kd, only_run(kd), e.AttemptEnded)
        assert ended.outcome == "refused"
        assert data["failure"]["details"]["status"] == 429
        assert "slow down" in json.dumps(data["failure"])


@pytest.mark.gate(1)
@each_form
def test_a_client_that_tries_again_goes_on_with_its_run(here: Desk, shape: str, streams: bool) -> None:
    here.provider.replies(
        Fails(500, {"error": {"message": "oh"}}), Fails(529, {"error": {"message": "no"}}), Says("now")
    )
    with here.proxied() as url, Loop(url, shape, streams=streams, retries=3) as agent:
        assert agent.tell("hello") == "now"
    with here.record() as kd:
        run = only_run(kd)
        assert [event.outcome for _, event, _ in told(kd, run, e.AttemptEnded)] == ["unknown", "unknown", "returned"]


@pytest.mark.gate(1)
@each_form
def test_a_dead_provider_is_one_clear_line_in_the_providers_form(here: Desk, shape: str, streams: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        here.upstream = f"http://127.0.0.1:{closed.getsockname()[1]}"
    kind = anthropic.InternalServerError if shape == "anthropic" else openai.InternalServerError
    with here.proxied() as url, pytest.raises(kind) as caught:
        ask(url, shape, streams)
    error = caught.value.response.json()["error"]
    assert caught.value.response.status_code == 502
    assert error["type"] == "api_error"
    assert error["message"].startswith("killick proxy: 127.0.0.1 cannot be reached")
    assert "\n" not in error["message"]
    with here.record() as kd:
        [(_, ended, data)] = told(kd, only_run(kd), e.AttemptEnded)
        assert (ended.outcome, data["failure"]["type"]) == ("unknown", "httpx.ConnectError")


def test_a_provider_that_is_silent_is_a_timeout(here: Desk) -> None:
    here.provider.script = lambda body: Says("never", hangs=True)
    with here.proxied(timeout_seconds=0.3) as url, pytest.raises(anthropic.APIStatusError) as caught:
        ask(url, "anthropic", False)
    assert caught.value.status_code == 504
    assert caught.value.response.json()["error"]["type"] == "timeout_error"
    with here.record() as kd:
        [(_, _, data)] = told(kd, only_run(kd), e.AttemptEnded)
        assert data["failure"]["kind"] == "timeout"


@pytest.mark.parametrize("shape", ["openai", "anthropic"])
def test_a_stream_that_is_cut_is_cut_for_the_client_and_on_record(here: Desk, shape: str) -> None:
    here.provider.script = lambda body: Says("A long story, of which not all is told.", cut=700)
    with here.proxied() as url, pytest.raises(Exception, match=r"incomplete chunked read|Connection error"):
        ask(url, shape, True)
    with here.record() as kd:
        [(_, ended, data)] = told(kd, only_run(kd), e.AttemptEnded)
        assert ended.outcome == "unknown"
        assert data["failure"]["type"] == "httpx.RemoteProtocolError"
        assert "A lo" in json.dumps(data["progress"]), "what came so far is there"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_ends_the_call_upstream(here: Desk, streams: bool) -> None:
    here.provider.script = lambda body: Says("A long story", cut=300, hangs=True)
    with here.proxied() as url:
        body = {"model": "m", "messages": HELLO, "stream": streams}
        with hanging_up(url, "/v1/chat/completions", body) as line:
            assert here.provider.asked.wait(300)
            if streams:
                assert line.getresponse().read(1) == b"d"
        assert here.provider.left.wait(300)
    with here.record() as kd:
        [(_, ended, data)] = told(kd, only_run(kd), e.AttemptEnded)
        assert (ended.outcome, data["failure"]["kind"]) == ("unknown", "cancelled")
        assert data["failure"]["message"] == "the client went away before the reply was over"


def test_a_client_that_leaves_what_only_passes_ends_it_upstream_too(here: Desk) -> None:
    async def hang(asked: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await here.provider._hang(receive)

    here.provider._answer = hang  # type: ignore[method-assign,assignment]
    with here.proxied() as url:
        with hanging_up(url, "/v1/audio/speech", {"say": "it"}) as line:
            assert line.getresponse().read(1) == b"x"
        assert here.provider.left.wait(300)


def test_an_error_inside_a_stream_reaches_the_client_and_the_record(here: Desk) -> None:
    here.provider.script = lambda body: Says("x" * 40)
    error = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"too busy"}}\n\n'

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        message = {"id": "m", "role": "assistant", "content": [], "type": "message", "model": "m",
                   "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip
        start = {"type": "message_start", "message": message}
        await send({"type": "http.response.body", "body": f"data: {json.dumps(start)}\n\n".encode() + error})

    here.provider._answer = lambda asked, receive, send: stream({}, receive, send)  # type: ignore[method-assign,assignment]
    with here.proxied() as url, pytest.raises(anthropic.APIStatusError, match="too busy"):
        ask(url, "anthropic", True)
    with here.record() as kd:
        [(_, _, data)] = told(kd, only_run(kd), e.AttemptEnded)
        assert data["failure"]["message"] == "the stream ended before the reply did: too busy"


# headers, bodies, other paths ---------------------------------------------------------------------


def test_credentials_go_upstream_and_are_nowhere_on_record(here: Desk, tmp_path: Path) -> None:
    with here.proxied() as url:
        ask(url, "openai", False)
        ask(url, "anthropic", True)
        here.provider.replies(Fails(401, {"error": {"message": "no"}}))
        with pytest.raises(openai.AuthenticationError):
            ask(url, "openai", False, default_headers={"x-custom-auth": f"token {KEY}"})
    sent = [request.headers for request in here.provider.requests]
    assert sent[0]["authorization"] == f"Bearer {KEY}"
    assert KEY in (sent[1].get("x-api-key"), sent[1].get("authorization", "").removeprefix("Bearer "))
    assert sent[2]["x-custom-auth"] == f"token {KEY}"
    found = [file.name for file in tmp_path.iterdir() if file.is_file() and KEY.encode() in file.read_bytes()]
    assert found == []


def test_headers_of_one_hop_go_no_further(here: Desk) -> None:
    with here.proxied() as url:
        host = url.removeprefix("http://")
        line = http.client.HTTPConnection(host)
        body = json.dumps({"model": "m", "messages": HELLO}).encode()
        headers = {"Connection": "keep-alive, X-Mine", "X-Mine": "1", "TE": "trailers",
                   "Proxy-Authorization": "Basic x", "X-Killick-Run": "mine", "X-Theirs": "2",
                   "User-Agent": "me/1"}  # fmt: skip
        line.request("POST", "/v1/chat/completions?beta=1", body, headers)
        answer = line.getresponse()
        answer.read()
        line.close()
    [asked] = here.provider.requests
    assert asked.query == "beta=1"
    assert asked.headers["host"] == here.upstream.removeprefix("http://")
    assert (asked.headers["x-theirs"], asked.headers["user-agent"]) == ("2", "me/1")
    assert not asked.headers.keys() & {"x-mine", "te", "proxy-authorization", "x-killick-run"}
    assert answer.headers["x-ratelimit-remaining-requests"] == "41"
    assert "x-hop" not in answer.headers


def test_packed_bodies_are_read_both_ways(here: Desk) -> None:
    here.provider.zipped = True
    body = gzip.compress(json.dumps({"model": "m", "messages": HELLO}).encode())
    with here.proxied() as url:
        answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-encoding": "gzip"})
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert here.provider.requests[0].raw == body
    with here.record() as kd:
        [(_, _, data)] = told(kd, only_run(kd), e.StepIntended)
        assert data["arguments"]["messages"] == HELLO


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models?limit=3"), ("POST", "/v1/embeddings"), ("DELETE", "/v1/files/f%2F1")]
)
def test_everything_else_is_passed_on_untouched(here: Desk, method: str, path: str) -> None:
    with here.proxied() as url:
        answer = httpx.request(method, url + path, content=b"x" * 100_000 if method == "POST" else None)
    assert answer.json()["method"] == method
    assert answer.json()["size"] == (100_000 if method == "POST" else 0)
    assert answer.headers["x-request-id"] == "r1"
    with here.record() as kd:
        assert kd.list() == []


@pytest.mark.parametrize("path", ["/chat/completions", "/openai/deployments/mine/chat/completions"])
def test_a_provider_may_have_its_paths_elsewhere(here: Desk, path: str) -> None:
    async def at(asked: Any, receive: Any, send: Any) -> None:
        assert asked.path == path
        asked.path = "/v1/chat/completions"
        await real(asked, receive, send)

    real = here.provider._answer
    here.provider._answer = at  # type: ignore[method-assign]
    with here.proxied() as url:
        assert httpx.post(url + path, json={"model": "m", "messages": HELLO}).json()["choices"]
    with here.record() as kd:
        assert len(kd.list()) == 1


@pytest.mark.gate(2)
@pytest.mark.parametrize("body", [b"no json", b"[1]", b'{"model": "m"', b'{"a": "\xff"}'])
def test_what_is_not_understood_is_passed_on_whole(here: Desk, body: bytes) -> None:
    async def echo(asked: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": asked.raw})

    here.provider._answer = echo  # type: ignore[method-assign,assignment]
    with here.proxied() as url:
        answer = httpx.post(f"{url}/v1/chat/completions", content=body)
    assert (answer.status_code, answer.content) == (400, body)


def test_a_request_that_is_too_large_to_read_is_passed_on_unread(here: Desk) -> None:
    with here.proxied(body_bytes_max=10_000) as url:
        asked = {"model": "m", "messages": [{"role": "user", "content": "x" * 50_000}]}
        assert httpx.post(f"{url}/v1/chat/completions", json=asked).json()["choices"]
        assert httpx.post(f"{url}/v1/chat/completions", json={"model": "m", "messages": HELLO}).json()["choices"]
    assert here.provider.bodies[0] == asked
    with here.record() as kd:
        assert len(kd.list()) == 1


def test_a_base_that_ends_in_v1_does_not_have_it_twice(here: Desk) -> None:
    here.upstream += "/v1"
    with here.proxied() as url:
        assert httpx.get(f"{url}/v1/models").json()["path"] == "/v1/models"
        ask(url, "openai", False)
    assert here.provider.requests[-1].path == "/v1/chat/completions"


# strangers ----------------------------------------------------------------------------------------


def asked_by(url: str, path: str, headers: dict[str, str]) -> int:
    """The status of a request whose path and headers no client tidies up."""
    line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    line.putrequest("POST", path, skip_host="Host" in headers)
    for name, value in headers.items():
        line.putheader(name, value)
    line.endheaders()
    status = line.getresponse().status
    line.close()
    return status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost.evil.example:80"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]"}, 200),
        ({"Host": "192.168.1.7:8787"}, 200),
        ({"Host": "Box.lan"}, 200),
    ],
)
def test_a_page_of_another_site_reaches_no_provider(here: Desk, headers: dict[str, str], status: int) -> None:
    with here.proxied(host_names=["box.LAN"]) as url:
        assert asked_by(url, "/v1/embeddings", headers) == status
    assert len(here.provider.requests) == (status == 200)


@pytest.mark.parametrize("path", ["/v1/../secret", "/v1/%2e%2e/%2e%2e/secret", "/v1/..%2fsecret", "/v1/.%2e\\secret"])
def test_a_path_leads_out_of_no_base(here: Desk, path: str) -> None:
    here.upstream += "/base"
    with here.proxied() as url:
        assert asked_by(url, path, {}) == 400
    assert here.provider.requests == []


@pytest.mark.parametrize("depth", [200, 500, 900, 5_000])
def test_a_body_of_any_depth_is_passed_on(here: Desk, depth: int) -> None:
    async def echo(asked: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": asked.raw})

    here.provider._answer = echo  # type: ignore[method-assign,assignment]
    body = b'{"messages":[{"role":"user","name":null,"content":%s}]}' % (b"[" * depth + b"]" * depth)
    with here.proxied() as url:
        answer = httpx.post(f"{url}/v1/chat/completions", content=body)
    assert (answer.status_code, answer.content) == (200, body)


@pytest.mark.slow
def test_a_store_that_cannot_be_written_stops_no_agent(here: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from killick.errors import StoreFull
    from killick.store import SqliteStore

    def full(*_: Any, **__: Any) -> Any:
        raise StoreFull("killick.db")

    async def fill() -> bool:
        monkeypatch.setattr(SqliteStore, "append", full)
        return True

    with here.proxied() as url:
        here.provider.before = fill
        for shape in ("openai", "anthropic"):
            for streams in (False, True):
                # In the middle of the first, before each of the others.
                reply = ask(url, shape, streams)
                words = reply.content[0].text if shape == "anthropic" else None
                chunks = reply if isinstance(reply, list) else []
                words = words or "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                assert (words or reply.choices[0].message.content) == "hello"
        monkeypatch.undo()
