"""The SDK's own models, talking to a scripted server on this machine: on record whichever API they speak."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agents
import killick
from agents import Agent, Model, OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool
from killick.adapters.openai_agents import KillickRunner

agents.set_tracing_disabled(True)

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "pay", "arguments": '{"amount":5}'}
SAID = {"type": "output_text", "text": "Paid.", "annotations": [], "logprobs": []}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [SAID]}


class Api(ThreadingHTTPServer):
    """Wants to pay, and is done when it hears what came of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.count = 0


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Api

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.count += 1
        chat = self.path.endswith("/chat/completions")
        answer = _chat(request) if chat else _response(request)
        kind, body = "application/json", json.dumps(answer)
        if request.get("stream"):
            events = [
                ("response.created", {"response": {**answer, "output": []}}),
                ("response.completed", {"response": answer}),
            ]
            told = [{"type": name, "sequence_number": n, **data} for n, (name, data) in enumerate(events)]
            kind, body = "text/event-stream", "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in told)
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


def _response(request: dict[str, Any]) -> dict[str, Any]:
    done = any(item.get("type") == "function_call_output" for item in request["input"])
    used = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    used |= {"input_tokens_details": {"cached_tokens": 2}, "output_tokens_details": {"reasoning_tokens": 0}}
    told = {"id": "resp_1", "object": "response", "created_at": 1, "model": request["model"], "status": "completed"}
    rest = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": used}
    return {**told, "output": [MESSAGE if done else CALL], **rest}


def _chat(request: dict[str, Any]) -> dict[str, Any]:
    done = request["messages"][-1]["role"] == "tool"
    function = {"name": "pay", "arguments": '{"amount":5}'}
    wanted = {"tool_calls": [{"id": "call_1", "type": "function", "function": function}], "content": None}
    message = {"role": "assistant", **({"content": "Paid."} if done else wanted)}
    used = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    choice = {"index": 0, "finish_reason": "stop" if done else "tool_calls", "message": message}
    told = {"id": "c_1", "object": "chat.completion", "created": 1, "model": request["model"]}
    return {**told, "choices": [choice], "usage": used}


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    thread = threading.Thread(target=api.serve_forever)
    thread.start()
    yield api
    api.shutdown()
    api.server_close()
    thread.join()


@pytest.mark.parametrize("kind", ["responses", "streamed responses", "chat completions"])
def test_a_turn_is_asked_for_once_whichever_api_the_model_speaks(kind: str, api: Api, tmp_path: Path) -> None:
    paid: list[int] = []

    @function_tool
    async def pay(amount: int) -> str:
        """Pay."""
        paid.append(amount)
        return "paid"

    async def turn(kd: killick.Client) -> Any:
        async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.server_address[1]}/v1", api_key="none") as client:
            speaks: Any = OpenAIChatCompletionsModel if kind == "chat completions" else OpenAIResponsesModel
            model: Model = speaks("gpt-scripted", client)
            agent = Agent(name="clerk", tools=[pay], model=model)
            if kind != "streamed responses":
                return await KillickRunner(kd).run(agent, "pay 5", turn="m1")
            async with KillickRunner(kd).streamed(agent, "pay 5", turn="m1") as result:
                async for _ in result.stream_events():
                    pass
            return result

    with killick.open(tmp_path / "killick.db") as kd:
        first, again = asyncio.run(turn(kd)), asyncio.run(turn(kd))
        assert first.final_output == again.final_output == "Paid."
        assert first.to_input_list() == again.to_input_list()
        assert (paid, api.count) == ([5], 2)
        used = [step.usage for step in kd.state("m1").trace if step.usage is not None]
        assert [(each.model, each.tokens_in, each.tokens_out) for each in used] == [("gpt-scripted", 7, 3)] * 2
        assert first.context_wrapper.usage.input_tokens == again.context_wrapper.usage.input_tokens == 14
