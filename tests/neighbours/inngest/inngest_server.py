"""The part of an Inngest server that the SDK sees, on loopback: sync, events, memoized steps, sleeps, waits, retries.

It is ours: what the real server does beyond the SDK's protocol (queues, flow control, its UI) is not here. Like it, it
forgets an event that comes before the wait for it, and skips a singleton's start while one is active.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import fastapi
import httpx
import uvicorn

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
MATCHES = re.compile(r'async\.data\.(\w+) == (".*")$')
BACKOFF_SECONDS = 0.5


@dataclass(eq=False)
class FunctionRun:
    """One run of a function, with the outputs of its steps."""

    function: dict[str, Any]
    event: dict[str, Any]
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    steps: dict[str, Any] = field(default_factory=dict)
    requests: int = 0
    status: str = "running"
    output: Any = None
    waits: tuple[str, dict[str, Any], asyncio.Future[dict[str, Any]]] | None = None
    work: asyncio.Task[None] | None = None


class InngestServer:
    def __init__(self) -> None:
        self.port = free_port()
        self.runs: list[FunctionRun] = []
        self._functions: dict[str, dict[str, Any]] = {}
        self._seen: set[str] = set()
        app = fastapi.FastAPI()
        app.post("/fn/register")(self._register)
        app.post("/e/{key}")(self._received)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error"))
        self._http = httpx.AsyncClient(timeout=600)
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> InngestServer:
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for run in self.runs:
            if run.work is not None:
                run.work.cancel()
        self._server.should_exit = True
        assert self._serving is not None
        await self._serving
        await self._http.aclose()

    async def sync(self, url: str) -> None:
        """Ask an app for its functions, as soon as it answers."""
        async with asyncio.timeout(300):
            while True:
                try:
                    answer = await self._http.put(url)
                except httpx.HTTPError:
                    await asyncio.sleep(0.02)
                else:
                    assert answer.is_success, answer.text
                    return

    async def send(self, name: str, /, **data: Any) -> list[FunctionRun]:
        """An event from elsewhere, which may be any language; returns the runs that it starts."""
        return self._dispatch({"name": name, "data": data, "id": str(uuid.uuid4()), "ts": 0})

    async def ended(self, run: FunctionRun) -> FunctionRun:
        assert run.work is not None
        async with asyncio.timeout(300):
            await asyncio.shield(run.work)
        return run

    # the protocol -----------------------------------------------------------------------------

    async def _register(self, request: fastapi.Request) -> dict[str, Any]:
        for function in (await request.json())["functions"]:
            self._functions[function["id"]] = function
        return {"ok": True, "modified": True}

    async def _received(self, key: str, request: fastapi.Request) -> dict[str, Any]:
        ids = []
        for event in await request.json():
            event["id"] = event.get("id") or str(uuid.uuid4())
            ids.append(event["id"])
            if event["id"] not in self._seen:
                self._seen.add(event["id"])
                self._dispatch(event)
        return {"ids": ids, "status": 200}

    def _dispatch(self, event: dict[str, Any]) -> list[FunctionRun]:
        started = []
        for run in self.runs:
            if run.waits is not None and run.waits[0] == event["name"] and not run.waits[2].done():
                matched = MATCHES.match(run.waits[1]["if"])
                assert matched is not None
                if event["data"].get(matched[1]) == json.loads(matched[2]):
                    run.waits[2].set_result(event)
        for function in self._functions.values():
            if any(each.get("event") == event["name"] for each in function["triggers"]):
                run = FunctionRun(function, event)
                if not self._is_skipped(run):
                    self.runs.append(run)
                    run.work = asyncio.create_task(self._execute(run))
                    started.append(run)
        return started

    def _is_skipped(self, run: FunctionRun) -> bool:
        singleton = run.function.get("singleton")
        if singleton is None:
            return False
        assert singleton == {"key": "event.data.run", "mode": "skip"}
        key = run.event["data"].get("run")
        active = [each for each in self.runs if each.function is run.function and each.status == "running"]
        return any(each.event["data"].get("run") == key for each in active)

    async def _execute(self, run: FunctionRun) -> None:
        step = run.function["steps"]["step"]
        retries, attempt = step["retries"]["attempts"], 0
        while run.status == "running":
            context = {
                "attempt": attempt, "max_attempts": retries + 1, "run_id": run.id, "stack": {"stack": [*run.steps]},
                "disable_immediate_execution": False,
            }  # fmt: skip
            body = {"ctx": context, "event": run.event, "events": [run.event], "steps": run.steps, "use_api": False}
            run.requests += 1
            try:
                answer = await self._http.post(step["runtime"]["url"], json=body)
            except httpx.HTTPError:
                failed = "the app is away"
            else:
                failed = await self._took(run, answer)
            if failed is None:
                attempt = 0
            elif attempt == retries or failed.startswith("for good: "):
                run.status, run.output = "failed", failed
            else:
                attempt += 1
                await asyncio.sleep(BACKOFF_SECONDS * attempt)

    async def _took(self, run: FunctionRun, answer: httpx.Response) -> str | None:
        """Takes what the app answered; returns why it is to be asked again."""
        told = answer.json()
        if answer.status_code == 206:
            for op in told:
                if op["op"] == "StepError":
                    return str(op["error"]["message"])
                run.steps[op["id"]] = await self._step(run, op)
            return None
        if answer.status_code == 200:
            run.status, run.output = "completed", told
            return None
        final = "for good: " if answer.headers.get("x-inngest-no-retry") == "true" else ""
        return f"{final}{told['message']}"

    async def _step(self, run: FunctionRun, op: dict[str, Any]) -> Any:
        if op["op"] == "StepRun":
            return {"data": op.get("data")}
        if op["op"] == "StepFailed":
            return {"error": op["error"]}
        if op["op"] == "Sleep":
            await asyncio.sleep((datetime.fromisoformat(op["name"]) - datetime.now(UTC)).total_seconds())
            return None
        assert op["op"] == "WaitForEvent", op
        timeout = op["opts"]["timeout"]
        run.waits = (op["name"], op["opts"], asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(int(timeout[:-1]) * UNITS[timeout[-1]]):
                return await run.waits[2]
        except TimeoutError:
            return None
        finally:
            run.waits = None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
