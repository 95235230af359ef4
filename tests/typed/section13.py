"""The surface as people write it, complete and typed. Checked by mypy and pyright, both strict; never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, assert_type
from uuid import UUID

import killick
from killick.engine.outcome import RunOutcome
from killick.llm.loop import LoopResult
from killick.log import Report
from killick.triggers import TriggerInfo


@dataclass
class Receipt:
    id: str


@dataclass
class Claim:
    id: int
    mail: str
    amount: float = 0.0


@dataclass
class Verdict:
    paid: bool
    why: str


@dataclass
class ClaimContext:
    route: str | None = None
    seen: list[str] = field(default_factory=list[str])


@dataclass
class Reply:
    why: str


class Mailbox:
    def recall(self, receipt: str) -> None: ...

    def close(self) -> None: ...


class Models:
    """A client of somebody's models."""

    async def create(self, *, model: str, messages: list[dict[str, str]]) -> Reply:
        return Reply("because")

    def ask(self, prompt: str) -> Reply:
        return Reply(prompt)


client = Models()
mailbox = killick.Resource(Mailbox, Mailbox.close)
crm = killick.Limit("crm", "10/min", by="to")


# tools --------------------------------------------------------------------------------------------


def recall(effect: killick.Effect) -> None:
    assert_type(effect.key, str)


def look_up(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen | killick.Unknown:
    return killick.Happened(Receipt("17")) if effect.progress else killick.DidNotHappen()


@killick.tool(
    effect="idempotent",
    compensate=recall,
    reconcile=look_up,
    identity=("to", "subject"),
    retry=killick.Retry(attempts=4, on=(ConnectionRefusedError,)),
    timeout=30,
    limit=crm,
)
async def send_email(
    to: str,
    subject: str,
    body: str,
    key: killick.Key = killick.KEY,
    step: killick.ToolStep = killick.STEP,
    box: Mailbox = mailbox.inject(),  # noqa: B008
) -> Receipt:
    step.progress({"attempt": step.attempt})
    return Receipt(f"{to} {subject} {body} {key}")


@killick.tool(effect="reads")
async def fetch_docs(claim: int, limit: int = 10) -> list[str]:
    return [str(claim)] * limit


@killick.tool
def count_words(text: str) -> int:
    return len(text.split())


assert_type(count_words("outside an agent it is the plain function"), int)
tools = killick.Toolset(send_email, fetch_docs, count_words)
assert_type(tools.schemas("anthropic"), list[dict[str, Any]])


# agents -------------------------------------------------------------------------------------------


@killick.agent
async def assess(run: killick.Run, claim: Claim) -> float:
    return claim.amount


@killick.agent(name="review", context=ClaimContext, on_failure="compensate", aliases=["review_claims"])
async def review(run: killick.Run[ClaimContext], claim: Claim) -> Verdict:
    assert_type(run.id, str)
    assert_type(run.context, ClaimContext)
    await run.plan(["fetch", "assess", "approve", "pay"])
    await run.at("fetch")
    docs = await run.call(fetch_docs, claim.id)
    assert_type(docs, list[str])
    reply = await run.model(client.create, model="m", messages=[{"role": "user", "content": docs[0]}])
    assert_type(reply, Reply)
    assert_type(await run.model(client.ask, "Why?"), Reply)
    route = await run.decided("Who decides?", "manager", options=["auto", "manager"], because=reply.why)
    assert_type(route, str)
    await run.update(route=route)
    await run.note({"route": run.context.route})
    answer = await run.ask("Pay 1250 to claim 17?", to="managers", timeout="72h", default="reject")
    assert_type(answer, killick.Answer)
    assert_type(answer.approved, bool)
    if answer.approved:
        receipt = await run.call(send_email.options(because="approved"), claim.mail, "Approved", "…")
        assert_type(receipt, Receipt)
    return Verdict(answer.approved, route)


@killick.agent
async def side_by_side(run: killick.Run, claims: list[Claim]) -> float:
    count, docs = await run.gather(run.call(count_words, "one two"), run.call(fetch_docs, 17))
    assert_type(count, int)
    assert_type(docs, list[str])
    counts = await run.gather(*(run.call(count_words, claim.mail) for claim in claims))
    assert_type(counts, tuple[int, ...])
    child = await run.spawn(assess, claims[0], on_parent_end="wait", priority=3)
    assert_type(child, killick.Child[float])
    assert_type(child.id, str)
    amount = await child.result()
    assert_type(amount, float)
    quickest = await run.first(run.call(count_words, "a"), run.call(count_words, "b"))
    assert_type(quickest.index, int)
    assert_type(quickest.value, int)
    paid = await run.wait("paid", returns=Receipt)
    assert_type(paid, Receipt)
    perhaps = await run.wait("paid", timeout="1h", default=None, returns=Receipt)
    assert_type(perhaps, Receipt | None)
    await run.send("another_run", "paid", paid)
    await run.sleep("3d")
    await run.sleep_until(run.now() + timedelta(days=1))
    assert_type(run.now(), datetime)
    assert_type(run.uuid(), UUID)
    assert_type(run.random(), float)
    assert_type(run.patched("count first"), bool)
    assert_type(run.parent, str | None)
    async for chunk in run.stream(client.create, model="m", messages=[]):
        print(chunk)  # noqa: T201
    sent = await run.fit(killick.Window(60_000), [], tools.schemas())
    assert_type(sent.messages, list[Any])
    answers = await run.dispatch(tools, Reply("…"), window=killick.Window(60_000))
    assert_type(answers, list[dict[str, Any]])
    return amount


@killick.agent
async def converses(run: killick.Run, question: str) -> str:
    outcome = await killick.loop(run, client.create, tools, messages=question, provider="openai", model="m")
    assert_type(outcome, LoopResult)
    assert_type(outcome.text, str)
    return outcome.text


@killick.agent
async def needs_nothing(run: killick.Run) -> int:
    return 1


@killick.agent
def blocks(run: killick.SyncRun[Any], claim: Claim) -> Verdict:
    assert_type(run.call(fetch_docs, claim.id), list[str])
    assert_type(run.call(count_words, "one two"), int)
    reply = run.model(client.ask, "Why?")
    assert_type(reply, Reply)
    assert_type(run.decided("Who?", "manager"), str)
    answer = run.ask("Pay?")
    assert_type(answer, killick.Answer)
    counts = run.gather(lambda: run.call(count_words, "a"), lambda: run.call(count_words, "b"))
    assert_type(counts, tuple[int, ...])
    child = run.spawn(assess, claim)
    assert_type(run.result(child), float)
    run.sleep("3d")
    assert_type(run.wait("paid", returns=Receipt), Receipt)
    assert_type(run.fit(killick.Window(60_000), []).tokens, int)
    outcome = killick.loop_sync(run, client.ask, tools, messages="hi", budget=60_000)
    assert_type(outcome.turns, int)
    return Verdict(answer.approved, reply.why)


@killick.machine
async def ticket(run: killick.Run, state: ClaimContext) -> killick.Next[ClaimContext] | killick.Done:
    await run.call(count_words, state.route or "")
    return killick.Done("over") if state.route else killick.Next(ClaimContext("auto"))


@killick.machine(name="subscription")
def subscription(run: killick.SyncRun[Any], state: int) -> killick.WaitFor[int] | killick.Done:
    return killick.Done(state) if run.received else killick.WaitFor("paid", state + 1, timeout="30d", default="unpaid")


# the client ---------------------------------------------------------------------------------------


def main(claim: Claim) -> Iterator[str]:
    with killick.open("killick.db") as kd:
        assert_type(kd.run(review, claim, id="claim_review_001"), Verdict)
        assert_type(kd.run(review, id="claim_review_001"), Verdict)
        assert_type(kd.run(needs_nothing), int)
        assert_type(kd.run(blocks, claim, resume=True), Verdict)
        kd.run(ticket, ClaimContext())
        kd.run(subscription, 1, id="subscription_17")
        handle = kd.start(review, claim, id="claim_review_002", priority=5)
        assert_type(handle, killick.Handle[Verdict])
        assert_type(handle.info(), killick.RunInfo)
        assert_type(handle.state(), killick.State)
        assert_type(handle.result(timeout=5), Verdict)
        assert_type(kd.find.calls("send_email")[0].tool, str)
        assert_type(kd.fork(handle.id, "1:before"), killick.Handle[Any])
        for recorded in handle.follow():
            yield str(recorded.event)
        try:
            kd.run(review, claim)
        except killick.RunWaiting as waiting:
            kd.answer(waiting.run, "approve", by="ann", comment="fine")
        except killick.RunFailed as failed:
            assert_type(kd.resume(failed.run), str)
        assert_type(kd.info("claim_review_001"), killick.RunInfo)
        assert_type(kd.state("claim_review_001"), killick.State)
        assert_type(kd.inbox(to="managers"), Sequence[killick.Wait])
        for listed in kd.list(status="waiting", agent="review"):
            yield listed.id
        kd.send("claim_review_001", "paid", Receipt("17"), id="order-17")
        kd.say("claim_review_001", "hurry")
        kd.pause("claim_review_001", because="lunch")
        assert_type(kd.edit.set("claim_review_001", route="auto", by="ann"), str)
        assert_type(kd.store.verify(), Report)
        assert_type(kd.triggers.fire("nightly", input=17), str)
        kd.cancel("claim_review_001", compensate=True)
        assert_type(kd.advance("claim_review_001"), RunOutcome)


async def serve(claim: Claim) -> Verdict:
    async with killick.open_async("killick.db") as kd:
        assert_type(await kd.info("claim_review_001"), killick.RunInfo)
        await kd.answer("claim_review_001", "respond", value=17)
        handle = await kd.start(review, claim)
        assert_type(handle, killick.AsyncHandle[Verdict])
        assert_type(await handle.info(), killick.RunInfo)
        assert_type(await handle.result(timeout=5), Verdict)
        async for recorded in handle.follow():
            assert_type(recorded.seq, int)
        forked = await kd.fork(handle.id, "1:before")
        assert_type(forked, killick.AsyncHandle[Any])
        assert_type((await kd.find.calls("send_email"))[0].tool, str)
        assert_type(await kd.edit.skip("claim_review_001", "6"), str)
        assert_type(await kd.store.verify(), Report)
        assert_type(await kd.triggers.list(), Sequence[TriggerInfo])
        verdict = await kd.run(review, claim)
        assert_type(verdict, Verdict)
        return verdict
