"""An agent that uses Anthropic's own client, made durable: killed or parked, it never asks the model twice.

    pip install killick anthropic
    python examples/neighbours/durable_client.py

The model is a script on this machine; leave `base_url` out, and it is the real one.
"""

import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

import killick

asked = []


class Model(BaseHTTPRequestHandler):
    """Answers every message the same, and counts."""

    def do_POST(self) -> None:
        asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        said = {"type": "message", "id": "m1", "role": "assistant", "model": "script", "stop_reason": "end_turn",
                "content": [{"type": "text", "text": "tea at four"}],
                "usage": {"input_tokens": 20, "output_tokens": 5}}  # fmt: skip
        body = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


server = HTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()

client = killick.durable(anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none"))


def plan(topic: str) -> str:
    """Anybody's code, which knows nothing of Killick."""
    ask = [{"role": "user", "content": f"When is {topic}?"}]
    reply = client.messages.create(model="script", max_tokens=50, messages=ask)
    return "".join(block.text for block in reply.content if block.type == "text")


@killick.agent
def planner(run: killick.SyncRun, topic: str) -> str:
    when = plan(topic)  # a step of the run, for it is called inside of it
    run.ask(f"{when}?", to="people")
    return when


with tempfile.TemporaryDirectory() as folder:
    with killick.open(f"{folder}/killick.db") as kd:
        try:
            kd.run(planner, "tea", id="p1")
        except killick.RunWaiting as waiting:
            print(waiting)
    with killick.open(f"{folder}/killick.db") as kd:  # another process, say, and days later: its code runs from the top
        kd.answer("p1", "approve", by="ann")
        print(kd.run(planner, "tea", id="p1"))
        print(f"asked {len(asked)} time, {kd.state('p1').trace[0].usage.tokens_out} tokens")
server.shutdown()
server.server_close()
client.close()
