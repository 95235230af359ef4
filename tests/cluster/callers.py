"""Callers of a simulated cluster: runs renew while they are sent orders and commands, and people vote at once.

Every call is entered with what its caller was told; `soak.acknowledgements` judges the entries at the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple

import killick
from cluster.fibers import here, hub
from killick.archive.export import export
from killick.engine.renewals import latest
from killick.errors import AnswerRefused, KillickError, RunUnknown, StoreError
from killick.log import Log
from killick.store import MemoryStore
from killick.store.records import RunQuery
from soak.acknowledgements import Call, Entries, Record, judge

REFUSALS: Final = (AnswerRefused, RunUnknown)
COMMANDS: Final = ("note", "note", "note", "prioritize", "pause", "resume", "resume")
CLOSE: Final = (0.0, 0.001, 0.005, 0.02)
"""How soon after another an order is sent: while the run that got the first is renewed."""

RUNS_MAX: Final = 100_000


class Asked(NamedTuple):
    """What the callers of a story do: the runs, and when they are sent how many orders and which commands."""

    boxes: dict[str, list[float]]
    customers: dict[str, tuple[float, list[str]]]
    pollers: dict[str, list[tuple[float, str]]]
    refunds: dict[str, float]

    @property
    def orders(self) -> dict[str, int]:
        """How many orders each box gets: a box is over when it has performed all of them."""
        sent = Counter(to for _, boxes in self.customers.values() for to in boxes)
        return {box: len(times) + sent[box] for box, times in self.boxes.items()}


NOTHING: Final = Asked({}, {}, {}, {})


def drawn_callers(chance: Random, seconds: float) -> Asked:
    boxes = {
        f"box{number}": [
            at + chance.choice(CLOSE) for at in (chance.uniform(0, seconds) for _ in range(3)) for _ in range(3)
        ]
        for number in range(chance.randint(1, 2))
    }
    customers = {
        f"customer{number}": (chance.uniform(0, seconds), chance.choices([*boxes], k=chance.randint(1, 3)))
        for number in range(chance.randint(1, 3))
    }
    pollers = {
        f"poller{number}": [
            *((chance.uniform(0, 10), chance.choice(COMMANDS)) for _ in range(15)),
            (chance.uniform(5, 15), chance.choice(("cancel", "pause"))),
        ]
        for number in range(chance.randint(1, 3))
    }
    refunds = {f"refund{number}": chance.uniform(0, seconds) for number in range(chance.randint(1, 3))}
    return Asked(boxes, customers, pollers, refunds)


class Callers:
    """The callers of one story, and their entries."""

    def __init__(self, kd: killick.AsyncClient, chance: Random, agents: dict[str, Any]) -> None:
        self.kd = kd
        self.calls: list[Call] = []
        self.busy = 0
        self._chance = chance
        self._agents = agents

    def begin(self, asked: Asked) -> None:
        for box, times in asked.boxes.items():
            self._soon(self._box(box, asked.orders[box], times))
        for run, (at, boxes) in asked.customers.items():
            self._soon(self._started(at, self._agents["customer"], boxes, run))
        for run, commands in asked.pollers.items():
            self._soon(self._poller(run, commands))
        for run, at in asked.refunds.items():
            self._soon(self._started(at, self._agents["refund"], run, run))

    def _soon(self, work: Any) -> None:
        self.busy += 1

        def ended(task: asyncio.Task[None]) -> None:
            self.busy -= 1
            if not task.cancelled() and (error := task.exception()) is not None:
                hub().fail(error)

        asyncio.get_running_loop().create_task(work).add_done_callback(ended)

    async def enter(
        self, kind: str, run: str, verb: str, call: Callable[[str], Awaitable[Any]], **more: Any
    ) -> str:  # fmt: skip
        """Make a call until the store says what became of it; returns the outcome."""
        ticket, at = f"{kind[0]}{len(self.calls)}", len(self.calls)
        self.calls.append(Call(ticket, kind, run, verb, more, hub().now_us))
        outcome, said, is_unsure = "maybe", "", False
        while outcome == "maybe":
            try:
                outcome, said = "accepted", repr(await call(ticket))
            except REFUSALS as refused:
                said = str(refused)
                if is_unsure:
                    break  # what was refused may be a repetition
                outcome = "refused"
            except StoreError:
                is_unsure = True
                await asyncio.sleep(self._chance.uniform(0.5, 5))
            except KillickError as error:
                said = str(error)
                break
        self.calls[at] = self.calls[at]._replace(outcome=outcome, said=said, done_ns=hub().now_us)
        return outcome

    # what they do -----------------------------------------------------------------------------------

    async def _started(self, at: float, agent: Any, value: Any, run: str) -> None:
        await asyncio.sleep(at)
        await self.enter("start", run, "start", lambda _: self.kd.start(agent, value, id=run))

    async def _box(self, run: str, orders: int, times: list[float]) -> None:
        await self._started(0, self._agents["box"], [0, orders, 1], run)
        for at in times:
            self._soon(self._order(run, at))

    async def _order(self, run: str, at: float) -> None:
        await asyncio.sleep(at)
        name = f"{run}-{len(self.calls)}"
        for _ in range(self._chance.choice((1, 2))):  # one that is sent again counts once, though the run was renewed
            send = partial(self.kd.send, run, "order", name, id=name)
            await self.enter("message", run, "send", lambda _, send=send: send(), id=name)
            await asyncio.sleep(self._chance.uniform(0, 5))

    async def _poller(self, run: str, commands: list[tuple[float, str]]) -> None:
        await self._started(0, self._agents["poller"], 1, run)
        for at, verb in commands:
            self._soon(self._command(run, at, verb))
        # A poller that was paused is resumed in the end.
        await asyncio.sleep(max(at for at, _ in commands) + 200)
        while True:
            try:
                paused = [row.id for row in await self.kd.list(status="paused") if row.id.partition("+")[0] == run]
            except StoreError:
                await asyncio.sleep(1)
                continue
            if not paused:
                return
            await self.enter("command", paused[0], "resume", lambda by: self.kd.resume(paused[0], by=by))
            await asyncio.sleep(5)

    async def _command(self, run: str, at: float, verb: str) -> None:
        await asyncio.sleep(at)
        kd = self.kd
        calls: dict[str, Callable[[str], Any]] = {
            "pause": lambda by: kd.pause(run, by=by),
            "resume": lambda by: kd.resume(run, by=by),
            "cancel": lambda by: kd.cancel(run, by=by),
            "note": lambda by: kd.edit.note(run, by, by=by),
            "prioritize": lambda by: kd.edit.prioritize(run, 3, by=by),
        }
        await self.enter("command", run, verb, calls[verb])

    async def vote(self, wait: Any) -> None:
        """Three people answer a question at once: each has read the same. A fourth may cancel its run meanwhile."""
        verbs = ["approve", "approve", self._chance.choice(("approve", "reject"))]
        self._chance.shuffle(verbs)
        cancels = [self._command(wait.run, 0, "cancel")] if self._chance.random() < 0.3 else []
        await asyncio.gather(*(self.answer(wait, verb) for verb in verbs), *cancels)

    async def answer(self, wait: Any, verb: Any) -> None:
        await asyncio.sleep(self._chance.choice((0, 0, 0.001, 0.01)))
        await self.enter(
            "answer", wait.run, verb, lambda by: self.kd.answer(wait, verb, by=by), step=wait.step,
            digest=wait.digest, need=wait.need,
        )  # fmt: skip


def outrun(log: Log, run: str) -> str:
    """The last renewal of a run, as a caller knows it: as often as not the run was renewed after the caller looked."""
    return run if here().chance.random() < 0.5 else latest(log, run)


# the end --------------------------------------------------------------------------------------------


def lost(calls: list[Call], store: MemoryStore, log: Log) -> list[str]:
    """What was accepted, and is on record neither as obeyed nor as refused. Nothing moves any more."""
    runs = [row.run for row in store.runs(RunQuery(), limit=RUNS_MAX)]
    record = Record(map(partial(export, log), runs))
    return judge(Entries(calls, Counter()), record, is_calm=True).wrong
