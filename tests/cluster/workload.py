"""What the simulated cluster does: agents, their tools against an external system, triggers, a hook, and people."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

import killick
from cluster.callers import NOTHING, Asked, Callers
from cluster.fibers import Process, here, hub
from cluster.invariants import AT_ONCE, LIMITED, Books, Invariants
from killick.errors import AlreadyAnswered, AnswerRefused, KillickError, RunUnknown, StoreError
from killick.triggers import TRIGGERS
from killick.workers.hooks import HOOKS

Op = dict[str, Any]
Program = list[Op]

ARRIVES_SECONDS_MAX: Final = 4.5
"""How long a request to the external system is on its way: less than the grace for which a new holder waits."""

POLLS: Final = 40
"""How many logs a poller has."""

THINKS_SECONDS: Final = 15.0
"""How long a person takes to look into the books."""


@dataclass
class World:
    """What one story shares beside its store."""

    books: Books
    chance: Random
    lost_answers: float = 0.0
    """How often the external system does what it was asked to, and its answer is lost."""
    unanswered: set[str] = field(default_factory=set)
    heard: Counter[str] = field(default_factory=Counter)
    """The deliveries to the hook, by key."""
    answered: dict[str, Any] = field(default_factory=dict)
    """The answers that the store acknowledged, by run and step."""
    published: set[str] = field(default_factory=set)
    starts: dict[str, Program] = field(default_factory=dict)


_world: World | None = None


def world() -> World:
    assert _world is not None
    return _world


# tools ----------------------------------------------------------------------------------------------


async def act(tool: str, label: str, key: str) -> str:
    """One request to the external system. It is sent at once; it arrives though its sender dies."""
    told, process, loop = world(), here(), asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    there = round(process.chance.choice((0, 0, 0.02, ARRIVES_SECONDS_MAX)) * 1e6)
    back = round(process.chance.choice((0, 1.0, 10.0, 30.0)) * 1e6)
    # A retry is answered: a run fails when its last attempt is not.
    is_lost = label not in told.unanswered and process.chance.random() < told.lost_answers
    told.unanswered |= {label} if is_lost else set()

    def arrive() -> None:
        answer = told.books.do(tool, label, key)
        hub().after(back, partial(loop.call_soon_threadsafe, give, answer))

    def give(answer: str) -> None:
        if not future.done():
            if is_lost:
                future.set_exception(TimeoutError("the external system does not answer"))
            else:
                future.set_result(answer)

    if there:
        hub().after(there, arrive)
    else:
        arrive()
    return await future


async def seen(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    """A reconciler: looks into the books."""
    await asyncio.sleep(0.01)
    label = world().books.keys.get(effect.key)
    return killick.DidNotHappen() if label is None else killick.Happened(f"{label} done")


@killick.tool(name="cluster_pay")
async def pay(label: str, key: killick.Key = killick.KEY) -> str:
    """At most once. Only a person can tell whether it happened."""
    return await act("pay", label, key)


@killick.tool(name="cluster_book", reconcile=seen)
async def book(label: str, key: killick.Key = killick.KEY) -> str:
    return await act("book", label, key)


@killick.tool(name=LIMITED, effect="idempotent", limit=killick.Limit("mail", at_once=AT_ONCE))
async def mail(label: str, key: killick.Key = killick.KEY) -> str:
    return await act("mail", label, key)


@killick.tool(name="cluster_look", effect="reads")
async def look(label: str) -> str:
    await asyncio.sleep(here().chance.choice((0, 1.0, 20.0)))
    return label


TOOLS: Final[dict[str, Any]] = {"pay": pay, "book": book, "mail": mail, "look": look}


# agents ---------------------------------------------------------------------------------------------


async def course(run: killick.Run, program: Program) -> list[Any]:
    return [await one(run, op) for op in program]


async def one(run: killick.Run, op: Op) -> Any:
    match op["do"]:
        case "ask":
            return (await run.ask(f"{op['label']}?")).value
        case "hear":
            return await run.wait("word")
        case "sleep":
            return await run.sleep(op["seconds"])
        case "gather":
            return list(await run.gather(*(course(run, each) for each in op["programs"])))
        case "child":
            child = await run.spawn(errand, op["program"])
            return await child.result()
        case tool:
            return await run.call(TOOLS[tool], op["label"])


@killick.agent(name="cluster_errand")
async def errand(run: killick.Run, program: Program) -> list[Any]:
    """A program, step by step. A newer version of it looks twice."""
    first = [await run.call(look, "first")] if here().version >= 2 and run.patched("looks first") else []  # type: ignore[attr-defined]
    return [*first, *(await course(run, program))]


@killick.agent(name="cluster_tick")
async def tick(run: killick.Run) -> str:
    return await run.call(book, run.id)


@killick.agent(name="cluster_order")
async def order(run: killick.Run, label: str) -> str:
    return await run.call(book, label)


# runs that renew, and people who agree -----------------------------------------------------------------


@killick.tool(name="cluster_refund", reconcile=seen, approve=killick.Approval(to=["callers"], need=2))
async def give_back(label: str, key: killick.Key = killick.KEY) -> str:
    return await act("book", label, key)


@killick.tool(name="cluster_poll", effect="reads")
async def polled(number: int) -> int:
    await asyncio.sleep(here().chance.choice((0, 0, 0.01, 1.0)))
    return number


@killick.agent(name="cluster_box")
async def box(run: killick.Run, state: list[int]) -> int:
    """Performs orders, and renews after each one or two, until it has performed all that will come."""
    performed, orders, each = state
    for _ in range(min(each, orders - performed)):
        await run.call(book, await run.wait("order"))
        performed += 1
    if performed == orders:
        return performed
    return await run.renew([performed, orders, 3 - each])


@killick.agent(name="cluster_customer")
async def customer(run: killick.Run, boxes: list[str]) -> None:
    for number, to in enumerate(boxes):
        await run.send(to, "order", f"{run.id}/{number}")
        await run.call(polled, number)


@killick.agent(name="cluster_poller")
async def poller(run: killick.Run, number: int) -> int:
    await run.call(polled, number)
    if number >= POLLS:
        return number
    return await run.renew(number + 1)


@killick.agent(name="cluster_refunds")
async def refund(run: killick.Run, label: str) -> str:
    try:
        return await run.call(give_back, label)
    except killick.Rejected:
        return "kept"


CALLED: Final = {"box": box, "customer": customer, "poller": poller, "refund": refund}


async def hear(event: Any) -> None:
    await asyncio.sleep(0.01)
    world().heard[event.key] += 1


AGENTS: Final = tuple(agent.name for agent in (errand, tick, order, *CALLED.values()))


@contextlib.contextmanager
def declared(told: World, tick_minutes: int) -> Iterator[None]:
    """Declares the triggers and the hook of a story, and no others."""
    global _world
    triggers, hooks = TRIGGERS.copy(), dict(HOOKS)
    TRIGGERS.clear()
    HOOKS.clear()
    _world = told
    try:
        killick.triggers.every(tick_minutes * 90, tick, name="cluster-tick", overlap="allow")
        killick.triggers.cron(f"*/{tick_minutes * 2} * * * *", tick, name="cluster-cron", overlap="queue")
        killick.triggers.on_event("order.placed", order, name="cluster-order")
        killick.on("run.completed", "run.failed", name="cluster-hook")(hear)
        yield
    finally:
        _world = None
        TRIGGERS.clear()
        TRIGGERS.update(triggers)
        HOOKS.clear()
        HOOKS.update(hooks)


# programs -------------------------------------------------------------------------------------------

_PLAIN: Final = ("pay", "pay", "book", "book", "mail", "mail", "look")
_WAITS: Final = ("ask", "hear", "sleep")


def drawn(chance: Random, label: str, depth: int = 1) -> Program:
    """A program. Every effect in it has a label of its own."""
    return [_op(chance, f"{label}.{number}", depth) for number in range(chance.randint(1, 4))]


def _op(chance: Random, label: str, depth: int) -> Op:
    kind = chance.random()
    if kind < 0.55 or not depth:
        return {"do": chance.choice(_PLAIN), "label": label}
    if kind < 0.85:
        return {"do": chance.choice(_WAITS), "label": label, "seconds": chance.choice((1, 20, 90))}
    if kind < 0.93:
        return {"do": "child", "program": drawn(chance, label, depth - 1)}
    return {"do": "gather", "programs": [drawn(chance, f"{label}.{branch}", depth - 1) for branch in range(2)]}


def ops(program: Program) -> Iterator[Op]:
    """Every operation of a program, but those of children."""
    for op in program:
        yield op
        for inner in op.get("programs", ()):
            yield from ops(inner)


def labels(program: Program) -> Iterator[tuple[str, str]]:
    """The tool and the label of every effect, children's too."""
    for op in program:
        if op["do"] in ("pay", "book", "mail"):
            yield op["do"], op["label"]
        for inner in (*op.get("programs", ()), *([op["program"]] if "program" in op else ())):
            yield from labels(inner)


def words(program: Program) -> int:
    return sum(op["do"] == "hear" for op in ops(program))


# people ---------------------------------------------------------------------------------------------


class People:
    """A process whose client starts runs, publishes events, sends messages and answers."""

    def __init__(self, client: killick.AsyncClient, process: Process, invariants: Invariants) -> None:
        self.kd = client
        self._process = process
        self._chance = process.chance
        self._invariants = invariants
        self.callers = Callers(client, process.chance, CALLED)
        self._own = 0

    @property
    def busy(self) -> int:
        """How much of what they are to do is not done yet."""
        return self._own + self.callers.busy

    async def live(
        self, starts: dict[str, tuple[float, Program]], events: dict[str, float], asked: Asked = NOTHING
    ) -> None:
        self._own += len(starts) + len(events)
        self.callers.begin(asked)
        for run, (at, program) in starts.items():
            self._begin(self._started(run, at, program))
        for event, at in events.items():
            self._begin(self._published(event, at))
        while True:
            await asyncio.sleep(self._chance.uniform(2, 20))
            with contextlib.suppress(StoreError):
                for wait in await self.kd.inbox():
                    await self._answered(wait)
            with contextlib.suppress(StoreError):
                for listed in await self.kd.list(tag="killick:crashing"):
                    if "quarantined" in str(listed):
                        with contextlib.suppress(KillickError):
                            await self.kd.resume(listed.id, by="people")

    def repeat(self) -> None:
        """Does everything again that the store acknowledged: it failed over, and may have lost it."""
        self._own += len(world().starts) + len(world().published)
        for run, program in world().starts.items():
            self._begin(self._started(run, 0, program))
        for event in sorted(world().published):
            self._begin(self._published(event, 0))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                hub().fail(error)

        asyncio.get_running_loop().create_task(work).add_done_callback(ended)

    async def _again(self, do: Callable[[], Any]) -> Any:
        """Until the store acknowledges it."""
        while True:
            try:
                return await do()
            except StoreError:
                await asyncio.sleep(self._chance.uniform(0.5, 5))

    async def _started(self, run: str, at: float, program: Program) -> None:
        await asyncio.sleep(at)
        early = self._chance.random() < 0.5
        await self._again(lambda: self.kd.start(errand, program, id=run))
        world().starts[run] = program
        for number in range(words(program)):
            await asyncio.sleep(0 if early else self._chance.uniform(0, 60))
            message = f"{run}-{number}"
            try:
                await self._again(partial(self.kd.send, run, "word", message, id=message))
            except AnswerRefused:  # the store failed over, and the run ended without it
                pass
            except RunUnknown:  # the store failed over, and its replica has not heard of the run
                await self._started(run, 0, program)
                return
        self._own -= 1

    async def _published(self, event: str, at: float) -> None:
        await asyncio.sleep(at)
        if await self._again(lambda: self.kd.triggers.publish("order.placed", event, id=event)) < 1:
            self._invariants.broken("no acknowledged event is lost", f"{event} was published to no trigger")
        world().published.add(event)
        self._own -= 1

    async def _answered(self, wait: Any) -> None:
        if wait.waits_for == "settlement":
            await asyncio.sleep(THINKS_SECONDS)
            label = wait.intention["arguments"]["label"]
            happened = world().books.done[label] > 0
            verb, value = ("happened", f"{label} done") if happened else ("not", None)
        elif wait.need > 1:
            await self.callers.vote(wait)
            return
        elif wait.verbs:
            verb, value = "respond", f"{wait.run}:{wait.step} said {self._chance.randrange(1000)}"
        else:
            return
        # It was closed meanwhile, or an answer of which no acknowledgement came is there.
        with contextlib.suppress(AlreadyAnswered, AnswerRefused, RunUnknown):
            await self.kd.answer(wait, verb, value=value, by="people")
            if verb == "respond":
                self._acknowledged(f"{wait.run}:{wait.step}", value)

    def _acknowledged(self, place: str, value: Any) -> None:
        if place in world().answered:
            self._invariants.broken("every wait is answered at most once", f"{place} took two answers")
        world().answered[place] = value
