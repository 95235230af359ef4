"""Claims as a web service: runs are started, looked at and answered over HTTP, and go on in the background.

    pip install fastapi uvicorn
    cd examples && uvicorn service:app

  POST /claims               starts a run; the same claim again is the same run
  GET  /claims/{id}          where it is, and what it waits for
  POST /claims/{id}/answer   {"verb": "approve", "by": "mia"}

The service keeps nothing in memory that matters: kill it whenever you like. Run as a script, it sends itself a few
requests and stops.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse

import killick
from killick.errors import RunUnknown


@dataclass
class Claim:
    number: int
    name: str
    amount: int


@killick.tool(effect="idempotent")
async def pay(to: str, amount: int, key: killick.Key = killick.KEY) -> str:
    return f"paid {amount} to {to}"


@killick.agent
async def review(run: killick.Run, claim: Claim) -> str:
    if claim.amount > 500:
        answer = await run.ask(f"Pay {claim.amount} to {claim.name}?", to="managers", timeout="72h", default="reject")
        if not answer.approved:
            return "rejected"
    return await run.call(pay, claim.name, claim.amount)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """A worker moves the runs for as long as the service is up; a run that is left goes on when it is back."""
    async with killick.open_async(os.environ.get("CLAIMS_STORE", "claims.db")) as kd, kd.worker():
        app.state.kd = kd
        yield


app = FastAPI(title="Claims", lifespan=lifespan)


@app.post("/claims", status_code=202)
async def start(claim: Claim, request: Request) -> dict[str, str]:
    handle = await request.app.state.kd.start(review, claim, id=f"claim_{claim.number}")
    return {"id": handle.id}


@app.get("/claims/{run}")
async def look(run: str, request: Request) -> dict[str, Any]:
    kd: killick.AsyncClient = request.app.state.kd
    info, state = await kd.info(run), await kd.state(run)
    return {"status": info.status, "waits_for": [wait.prompt for wait in info.waits], "result": state.result}


@app.post("/claims/{run}/answer", status_code=202)
async def answer(
    run: str, verb: Annotated[Literal["approve", "reject"], Body()], by: Annotated[str, Body()], request: Request
) -> None:
    await request.app.state.kd.answer(run, verb, by=by)


@app.exception_handler(killick.KillickError)
async def tell(request: Request, error: killick.KillickError) -> JSONResponse:
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, RunUnknown) else 409)


async def try_it() -> None:
    import httpx

    transport = httpx.ASGITransport(app)
    async with lifespan(app), httpx.AsyncClient(transport=transport, base_url="http://claims") as http:

        async def send(method: str, path: str, body: Any = None, *, until: str = "") -> Any:
            reply = await http.request(method, path, json=body)
            while until and reply.json()["status"] != until:
                await asyncio.sleep(0.02)
                reply = await http.request(method, path, json=body)
            print(f"{method:<5} {path:<25} {reply.status_code}  {reply.text}")
            return reply.json()

        await send("POST", "/claims", {"number": 17, "name": "ann", "amount": 1250})
        await send("GET", "/claims/claim_17", until="waiting")
        await send("POST", "/claims/claim_17/answer", {"verb": "approve", "by": "mia"})
        paid = await send("GET", "/claims/claim_17", until="completed")
        assert paid["result"] == "paid 1250 to ann"
        await send("POST", "/claims/claim_17/answer", {"verb": "reject", "by": "max"})
        await send("GET", "/claims/claim_18")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="killick-") as folder:
        os.environ["CLAIMS_STORE"] = str(Path(folder) / "claims.db")
        asyncio.run(try_it())
