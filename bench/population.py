"""A store full of believable runs, as a busy year would leave them: written through the real log, event by event.

Every run is made of the same few acts (look something up, ask a model, decide, ask a person, act on the world), and
ends or stands where its fate says. Two stores made with the same seed hold the same runs.
"""

from __future__ import annotations

import argparse
import random
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Final

from msgspec.structs import replace

import killick
from killick.client.client import Client
from killick.log import Entry, Log
from killick.log.writer import RunLog
from killick.model import events as e
from killick.model.codec import canonical
from killick.store.records import Append

SEED: Final = 20_261_115
BATCH: Final = 500
SECOND: Final = 1_000_000
HOUR: Final = 3_600 * SECOND
DAY: Final = 24 * HOUR
SPAN_DAYS: Final = 120
LONG_RUN: Final = "research-archive-2026"
BUILDS: Final = (e.Build("2026.10.2", "9f1c3ab"), e.Build("2026.11.0", "c07d1e4"), e.Build("2026.11.1", "e52b7f0"))

AGENTS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    "claims.review": ("claim", ("fetch", "assess", "approve", "pay", "notify"), "pay_claim"),
    "invoices.match": ("invoice", ("read", "match", "approve", "book"), "book_invoice"),
    "people.onboard": ("hire", ("accounts", "laptop", "calendar", "welcome"), "create_account"),
    "support.triage": ("ticket", (), "reply"),
    "research.digest": ("digest", ("search", "read", "write"), "publish"),
    "orders.refund": ("refund", ("check", "approve", "refund"), "refund_card"),
    "nightly.report": ("report", (), "send_email"),
}
"""By agent: how its runs' ids begin, the plan it gives, and the tool that touches the world."""

FATES: Final[dict[str, float]] = {
    "completed": 62, "answer": 10, "settlement": 1, "time": 4, "event": 3, "child": 1, "backoff": 2, "failed": 7,
    "queued": 3, "paused": 2, "cancelled": 3, "running": 1, "diverged": 1,
}  # fmt: skip
NAMES: Final = ("ada", "grace", "edsger", "barbara", "alan", "margaret", "donald", "radia")
GROUPS: Final = ("managers", "finance", "legal", "people-team", "on-call")
REGIONS: Final = ("eu", "us", "apac")
ERRORS: Final = (
    ("ConnectionError", "connection refused by api.payments.example:443"),
    ("TimeoutError", "no answer in 30 s"),
    ("app.clients.QuotaExceeded", "daily quota of 10000 calls is used up"),
    ("ValueError", "claim has no policy number"),
    ("PermissionError", "403: this account may not do that"),
)
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "amount": {"type": "number", "minimum": 0, "title": "Amount"},
        "reason": {"type": "string", "title": "Why"},
        "method": {"enum": ["bank", "card", "cheque"], "title": "How"},
    },
    "required": ["amount"],
}


class Story:
    """The events of one run, in order, and what time it is in it."""

    def __init__(self, run: str, agent: str, chance: random.Random, at: int) -> None:
        self.run, self.agent, self.chance, self.at = run, agent, chance, at
        self.entries: list[Entry] = []
        self.step = 0
        self.version = 0
        self.build = chance.choice(BUILDS)

    def say(self, event: e.Event, **values: Any) -> None:
        self.entries.append(Entry(event, values or None))

    def later(self, least: int, most: int) -> int:
        self.at += self.chance.randrange(least, most)
        return self.at

    def started(self, **more: Any) -> None:
        chance = self.chance
        tags = tuple(tag for tag in (chance.choice(REGIONS), "vip" if chance.random() < 0.05 else "") if tag)
        priority = chance.choices((0, 5, 9), (90, 8, 2))[0]
        self.say(
            e.RunStarted(
                at=self.at, run=self.run, agent=self.agent, build=self.build, priority=priority, tags=tags, **more
            ),
            input={"id": self.run, "customer": chance.choice(NAMES), "amount": chance.randrange(20, 9_000)},
        )

    def taken(self, holder: str) -> None:
        self.say(e.RunTaken(at=self.later(1_000, 90_000), epoch=1, holder=holder, build=self.build))

    def plan(self, stages: tuple[str, ...]) -> None:
        if stages:
            self.say(e.PlanMade(at=self.at, stages=stages, step=str(self.step + 1)))

    def reach(self, stage: str) -> None:
        self.say(e.PlanReached(at=self.at, stage=stage, step=str(self.step + 1)))

    # steps --------------------------------------------------------------------------------------

    def intend(self, sort: e.Sort, name: str, effect: e.EffectClass | None = None, **arguments: Any) -> str:
        self.step += 1
        number = str(self.step)
        digest = sha256(canonical(arguments)).digest() if sort != "wait" else None
        event = e.StepIntended(
            at=self.later(500, 4_000), step=number, sort=sort, name=name, effect=effect,
            digest=None if digest is None else _text(digest),
        )  # fmt: skip
        self.say(event, **({"arguments": arguments} if arguments else {}))
        self.key = f"{self.run}:step_{number}:{name}:{(digest or b'').hex()[:8]}"
        return number

    def attempt(self, number: str, attempt: int = 1) -> None:
        self.say(e.AttemptStarted(at=self.at, step=number, attempt=attempt, key=self.key, epoch=1))

    def returned(self, number: str, output: Any, attempt: int = 1, usage: e.Usage | None = None) -> None:
        at = self.later(20_000, 4 * SECOND)
        self.say(e.AttemptEnded(at=at, step=number, attempt=attempt, outcome="returned", usage=usage), output=output)

    def failed(self, number: str, attempt: int, outcome: e.Outcome = "refused", retry_at: int | None = None) -> Any:
        failure = self.failure()
        at = self.later(20_000, 30 * SECOND)
        self.say(
            e.AttemptEnded(at=at, step=number, attempt=attempt, outcome=outcome, retry_at=retry_at), failure=failure
        )
        return failure

    def failure(self) -> dict[str, Any]:
        kind, message = self.chance.choice(ERRORS)
        frames = ({"file": "app/agents.py", "line": self.chance.randrange(20, 300), "function": "act"},)
        return {"kind": "error", "type": kind, "types": (kind, "Exception", "BaseException"), "message": message,
                "notes": (), "frames": frames, "cause": None, "members": (), "details": {}}  # fmt: skip

    def call(self, name: str, effect: e.EffectClass = "idempotent", **arguments: Any) -> None:
        """A tool that returns, now and then at the second try."""
        number = self.intend("tool", name, effect, **arguments)
        self.attempt(number)
        attempt = 1
        if self.chance.random() < 0.06:
            self.failed(number, 1, retry_at=self.at + 31 * SECOND)
            self.at += 31 * SECOND
            attempt = 2
            self.attempt(number, attempt)
        output = {"ok": True, "reference": f"{name}-{self.chance.randrange(10**6):06d}", "for": arguments}
        self.returned(number, output, attempt)

    def think(self, about: str) -> None:
        messages = [
            {"role": "system", "content": f"You are {self.agent}. Be brief, and give reasons."},
            {"role": "user", "content": f"{about} of {self.run}?"},
        ]
        number = self.intend("model", "reasoner-large", None, model="reasoner-large", messages=messages)
        self.attempt(number)
        tokens = self.chance.randrange(300, 4_000)
        usage = e.Usage("reasoner-large", tokens, tokens // 6, tokens // 3, tokens * 3)
        said = f"For {self.run} I would go on: the documents agree, and the amount is within what was insured."
        self.returned(number, {"role": "assistant", "content": said}, usage=usage)

    def decide(self, question: str, options: Sequence[str]) -> None:
        self.step += 1
        choice = self.chance.choice(options)
        self.say(
            e.DecisionMade(at=self.later(500, 3_000), step=str(self.step)),
            question=question, options=list(options), choice=choice, because=f"{choice} is what the policy asks for",
        )  # fmt: skip

    def update(self, **set_: Any) -> None:
        self.version += 1
        event = e.ContextChanged(at=self.at, version=self.version, saw=self.version - 1, step=str(self.step + 1))
        self.say(event, set=set_, unset=[])

    def ask(self) -> str:
        """A question to people, as it stands while nobody answered."""
        chance = self.chance
        number = self.intend("wait", "ask")
        amount = chance.randrange(20, 9_000)
        prompt = chance.choice(
            (f"Pay {amount} to {chance.choice(NAMES)}?", f"Is {self.run} complete?", f"Send this to {amount} people?")
        )
        deadline = self.at + chance.randrange(1, 240) * HOUR if chance.random() < 0.6 else None
        event = e.WaitOpened(
            at=self.at, step=number, waits_for="answer", name="ask", to=(chance.choice(GROUPS),), deadline=deadline,
            digest=_text(sha256(f"{self.run}{number}".encode()).digest()),
        )  # fmt: skip
        values: dict[str, Any] = {"prompt": prompt, "verbs": ["approve", "reject", "edit", "respond"]}
        if chance.random() < 0.5:
            values["schema"] = SCHEMA
        self.say(event, **values)
        return number

    def answered(self, within: int = 20 * HOUR) -> None:
        number = self.ask()
        at = self.later(60 * SECOND, within)
        by = self.chance.choice(NAMES)
        answer = {"verb": "approve", "value": None, "by": by}
        self.say(e.WaitClosed(at=at, step=number, how="answered", by=by), answer=answer, comment="fine")

    # ends ---------------------------------------------------------------------------------------

    def end(self, fate: str, tool: str) -> None:
        ends: dict[str, Callable[[str], None]] = {
            "completed": self._complete, "failed": self._fail, "cancelled": self._cancel, "settlement": self._doubt,
            "backoff": self._back_off, "paused": self._pause, "running": self._run, "diverged": self._diverge,
        }  # fmt: skip
        if fate == "answer":
            self.ask()
        elif fate in ("time", "event", "child"):
            self._wait(fate)
        else:
            ends[fate](tool)

    def _complete(self, tool: str) -> None:
        self.call(tool, "at_most_once", to=self.chance.choice(NAMES), amount=self.chance.randrange(20, 9_000))
        self.say(e.RunCompleted(at=self.later(500, 9_000)), result={"verdict": "done", "run": self.run})

    def _fail(self, tool: str) -> None:
        number = self.intend("tool", tool, "idempotent", to=self.chance.choice(NAMES))
        tries = self.chance.randrange(1, 5)
        failure: Any = None
        for attempt in range(1, tries + 1):
            self.attempt(number, attempt)
            failure = self.failed(number, attempt, retry_at=self.at + 60 * SECOND if attempt < tries else None)
            self.at += 60 * SECOND
        name = failure["type"].rpartition(".")[2]
        message = f"step {number} ({tool}): {name}: {failure['message']}"
        whole = {**failure, "type": "killick.errors.StepFailed", "types": ("killick.errors.StepFailed", "Exception"),
                 "message": message, "cause": failure}  # fmt: skip
        self.say(e.RunFailed(at=self.at, step=number), failure=whole)

    def _cancel(self, tool: str) -> None:
        self.say(e.CancelRequested(at=self.later(SECOND, HOUR), by=self.chance.choice(NAMES)), because="a duplicate")
        self.say(e.RunCancelled(at=self.later(500, 9_000)))

    def _doubt(self, tool: str) -> None:
        arguments = {"to": self.chance.choice(NAMES), "amount": self.chance.randrange(20, 9_000)}
        number = self.intend("tool", tool, "at_most_once", **arguments)
        self.attempt(number)
        self.failed(number, 1, "unknown")
        event = e.WaitOpened(at=self.at, step=number, waits_for="settlement", name="settlement",
                             digest=_text(sha256(self.key.encode()).digest()))  # fmt: skip
        told = {"tool": tool, "arguments": arguments}
        self.say(event, prompt=f"{tool} was started and its outcome is not known. Did it happen?", intention=told,
                 verbs=["happened", "not", "stop"])  # fmt: skip

    def _back_off(self, tool: str) -> None:
        number = self.intend("tool", tool, "idempotent", to=self.chance.choice(NAMES))
        for attempt in range(1, self.chance.randrange(2, 4)):
            self.attempt(number, attempt)
            self.failed(number, attempt, retry_at=self.at + self.chance.randrange(1, 30) * DAY)

    def _pause(self, tool: str) -> None:
        self.ask()
        self.say(e.RunPaused(at=self.later(SECOND, HOUR), by=self.chance.choice(NAMES)), because="until the audit")

    def _run(self, tool: str) -> None:
        self.attempt(self.intend("tool", tool, "idempotent", to=self.chance.choice(NAMES)))

    def _diverge(self, tool: str) -> None:
        builds = [{"version": each.version, "commit": each.commit} for each in BUILDS[:2]]
        event = e.RunDiverged(at=self.later(SECOND, HOUR), step=str(self.step))
        self.say(event, recorded={"sort": "tool", "name": tool}, found={"sort": "tool", "name": "check"}, builds=builds)

    def _wait(self, fate: str) -> None:
        deadline = self.at + self.chance.randrange(1, 60) * DAY
        if fate == "time":
            number, name = self.intend("wait", "sleep"), "sleep"
            event = e.WaitOpened(at=self.at, step=number, waits_for="time", name=name, deadline=deadline)
        elif fate == "event":
            name = self.chance.choice(("payment_received", "documents_uploaded", "shipment_left"))
            number = self.intend("wait", name)
            event = e.WaitOpened(at=self.at, step=number, waits_for="event", name=name, deadline=deadline)
        else:
            number = self.intend("child", "research.digest", None, input={"topic": self.run})
            self.say(
                e.ChildSpawned(at=self.at, step=number, run=f"{self.run}/{number}", agent="research.digest"),
                input={"topic": self.run},
            )
            child, number = f"{self.run}/{number}", self.intend("wait", "result")
            event = e.WaitOpened(at=self.at, step=number, waits_for="child", name=child)
        self.say(event)


# filling a store ----------------------------------------------------------------------------------


class Filling:
    """Writes runs into a store, many in a commit."""

    def __init__(self, client: Client, *, holder: str, now_us: int, runs: int, seed: int) -> None:
        self.client, self.log, self.holder = client, client.runtime.log, holder
        self.now_us, self.runs, self.chance = now_us, runs, random.Random(seed)
        self.waiting: list[Append] = []
        self.parked: list[str] = []
        self.names = list(AGENTS)

    def fill(self, told: Callable[[int], None]) -> None:
        for number in range(self.runs):
            self.one(number)
            if len(self.waiting) >= BATCH:
                self.flush()
                told(number + 1)
        self.flush()
        told(self.runs)

    def one(self, number: int) -> None:
        chance = self.chance
        agent = chance.choices(self.names, (30, 20, 8, 20, 7, 10, 5))[0]
        prefix, plan, tool = AGENTS[agent]
        run = f"{prefix}-2026-{number:06d}"
        age = SPAN_DAYS * DAY * (self.runs - number) // max(self.runs, 1) + 2 * HOUR
        story = Story(run, agent, chance, self.now_us - age)
        [fate] = chance.choices(list(FATES), list(FATES.values()))
        story.started()
        if fate != "queued":
            story.taken(self.holder)
            self._acts(story, plan)
            story.end(fate, tool)
        # Nothing happened after now, however long it took.
        late = max(story.at - self.now_us, 0)
        entries = (
            [Entry(_earlier(entry.event, late), entry.values) for entry in story.entries] if late else story.entries
        )
        self._put(run, entries, held=fate != "queued", parks=fate not in ("running", "queued"))
        if fate == "child":
            self._child(f"{run}/{story.step - 1}", run, str(story.step - 1), story.at - late)

    def _acts(self, story: Story, plan: tuple[str, ...]) -> None:
        chance = story.chance
        story.plan(plan)
        reached = plan[: chance.randrange(1, len(plan) + 1)] if plan else ()
        for stage in reached or ("",):
            if stage:
                story.reach(stage)
            story.call("look_up", "reads", id=story.run)
            if chance.random() < 0.3:
                story.think(stage or "What to do")
        if chance.random() < 0.4:
            story.decide("Who decides?", ("auto", "manager"))
        if chance.random() < 0.3:
            story.update(route="manager", amount=chance.randrange(20, 9_000))
        if chance.random() < 0.1:
            story.answered()

    def _child(self, run: str, parent: str, step: str, at: int) -> None:
        story = Story(run, "research.digest", self.chance, at)
        story.started(parent=parent, parent_step=step)
        story.taken(self.holder)
        story.call("look_up", "reads", id=parent)
        story.end("event", "publish")
        self._put(run, story.entries, held=True, parks=True)

    def _put(self, run: str, entries: Sequence[Entry], *, held: bool, parks: bool) -> None:
        handle = self.log.begin(run, holder=self.holder if held else None)
        self.waiting.append(handle.built(entries))
        if parks:
            self.parked.append(run)

    def flush(self) -> None:
        items, self.waiting = self.waiting, []
        heads, parked = self.log.store.append(items), set(self.parked)
        for head in heads:
            if isinstance(head, Exception):
                raise head
            if head.run in parked and head.holder is not None:
                self.log.store.release(head.run, epoch=head.epoch, holder=self.holder)
        ended = [item.run for item in items if item.index is not None and item.index.status == "failed"]
        self.parked = []
        if ended:
            run = self.chance.choice(ended)
            self.client.fork(run, at="1:after", id=f"{run}-again", by=self.chance.choice(NAMES))


def _earlier(event: e.Event, late: int) -> e.Event:
    return replace(event, at=event.at - late)


def _text(digest: bytes) -> str:
    """A digest as events have it."""
    return urlsafe_b64encode(digest).decode().rstrip("=")


def long_run(log: Log, *, holder: str, steps: int, now_us: int, seed: int = SEED, run: str = LONG_RUN) -> RunLog:
    """One run of very many steps that now waits for a person."""
    chance = random.Random(seed)
    story = Story(run, "research.digest", chance, now_us - 3 * DAY)
    story.started()
    story.taken(holder)
    story.plan(AGENTS["research.digest"][1])
    handle = log.begin(run, holder=holder)
    plan = AGENTS["research.digest"][1]
    for number, stage in enumerate(plan, 1):
        story.reach(stage)
        while story.step < (steps - 1) * number // len(plan):
            _another(story)
            if len(story.entries) >= BATCH:
                handle.append(*story.entries)
                story.entries = []
    story.ask()
    handle.append(*story.entries)
    log.store.release(run, epoch=handle.epoch, holder=holder)
    return handle


def _another(story: Story) -> None:
    kind = story.step % 50
    if kind == 7:
        story.decide("Is this source worth reading?", ("read", "skip"))
    elif kind == 31:
        story.update(read=story.step, last=f"source-{story.step}")
    if kind == 43 and story.step % 1_000 == 43:
        story.answered(within=HOUR)
    elif kind % 5 == 2:
        story.think(f"Source {story.step}")
    elif kind % 10 == 9:
        story.call("save_note", "idempotent", source=f"source-{story.step}", text="What it says, in a line or two.")
    else:
        story.call("fetch_page", "reads", url=f"https://example.org/archive/{story.step}")


def fill(
    client: Client, *, runs: int, steps: int, seed: int = SEED, told: Callable[[int], None] = lambda _: None
) -> None:
    """Put a crowd into a store, and among its newest runs a very long one."""
    now_us = client.runtime.clock.now_us()
    holder = client.runtime.ids.new("worker")
    Filling(client, holder=holder, now_us=now_us, runs=runs, seed=seed).fill(told)
    if steps:
        long_run(client.runtime.log, holder=holder, steps=steps, now_us=now_us, seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m bench.crowd STORE`: make a store full of runs, to look at."""
    parser = argparse.ArgumentParser(prog="python -m bench.crowd", description=main.__doc__)
    parser.add_argument("store")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=20_000, help="of one long run; 0: none")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args(arguments)
    began = time.monotonic()

    def told(done: int) -> None:
        if done % 10_000 < BATCH:
            print(f"{done:,} runs, {time.monotonic() - began:.0f} s", flush=True)

    with killick.open(given.store, durability="process") as client:
        fill(client, runs=given.runs, steps=given.steps, seed=given.seed, told=told)
    print(f"{given.store}: {given.runs:,} runs and one of {given.steps:,} steps, {time.monotonic() - began:.0f} s")
    return 0
