"""Deliveries by a run and its forks, in processes that die: what arrived is counted where no death undoes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import count
from typing import Final, NamedTuple

import killick
from killick.errors import StoreUnavailable, TimeRefused
from processes import Processes

RUN: Final = "run"

# a far side that is asked --------------------------------------------------------------------------


class Asked(NamedTuple):
    """A request that reached the far side."""

    tool: str
    what: str


class Far:
    """A far side without a simulation: what it was asked, and what it did."""

    def __init__(self) -> None:
        self.requests: list[Asked] = []

    def done(self, tool: str = "send") -> list[str]:
        return [each.what for each in self.requests if each.tool == tool]


FAR: Final = Far()


def asked(tool: str, what: str) -> str:
    FAR.requests.append(Asked(tool, what))
    return f"{tool} {what}: {len(what)}"


@killick.tool(effect="reads")
async def ask_far(what: str) -> str:
    return asked("read", what)


@killick.tool
async def send(what: str) -> str:
    return asked("send", what)


@killick.agent(name="letters")
async def letters(run: killick.Run, names: list[str]) -> list[str]:
    """Reads, thinks, sends; for each name. Its model answers by what it is asked."""
    told: list[str] = []
    for name in names:
        address = await run.call(ask_far, f"{name} at {run.context.get('town', 'home')}")
        text = await run.model(_worded, name, address)
        told.append(await run.call(send, text))
        await run.update(last=name)
    return told


def _worded(name: str, address: str) -> str:
    FAR.requests.append(Asked("model", name))
    return f"Dear {name}, {address}"


# deliveries in processes that die ------------------------------------------------------------------

DELIVERED: Final[list[tuple[str, str]]] = []
"""What arrived: under which key, and what."""

DYING: Final[list[Callable[[], None]]] = []
"""What ends the process the next time that a tool is called: before it acts, or after."""


def _arrived(effect: killick.Effect) -> killick.Happened | killick.DidNotHappen:
    found = [number for number, (key, _) in enumerate(DELIVERED) if key == effect.key]
    return killick.Happened(found[0]) if found else killick.DidNotHappen()


@killick.tool(identity=("what",), reconcile=_arrived, retry=killick.Retry(attempts=20))
async def deliver(what: str, words: str, key: killick.Key = killick.KEY) -> int:
    dies = DYING.pop() if DYING else None
    if dies is not None and len(DELIVERED) % 2:
        dies()
    DELIVERED.append((str(key), what))
    if dies is not None:
        dies()
    return len(DELIVERED) - 1


def _phrased(what: str) -> str:
    return f"{what}, with kind regards ({next(_PHRASES)})"


_PHRASES: Final = count(1)


@killick.agent(name="deliverer")
async def deliverer(run: killick.Run) -> list[int]:
    """Two equal deliveries and another one, each in words that nobody found before."""
    return [
        await run.call(deliver, what, await run.model(_phrased, what)) for what in ("a letter", "a letter", "a parcel")
    ]


class Dead(Exception):
    """The end of a process."""


class Lineage:
    """A run and its forks, and the processes that go on with them until they die."""

    def __init__(self, processes: Processes, agent: killick.Agent[None, list[int]]) -> None:
        self._processes = processes
        self._kd, self._view = processes.mortal()
        self._kd.start(agent, id=RUN)
        self._runs = [RUN]

    def go(self, move: str, number: int) -> None:
        """One of its runs is forked or taken back, somewhere; and one goes on, in a process that may die."""
        run = self._runs[number % len(self._runs)]
        steps = self._kd.state(run).fold.steps
        place = f"{steps[number % len(steps)].id}:before" if steps else "now"
        if move == "forked":
            self._runs.append(self._kd.fork(run, place, effects="live").id)
        elif move == "rewound" and steps:
            with contextlib.suppress(TimeRefused):  # a fork is not taken back to before it was one
                self._kd.rewind(run, place)
        if number % 3 == 0:
            DYING.append(self._die)
        self._advance(self._runs[-1] if number % 2 else run)

    def to_its_end(self) -> None:
        """Everybody goes on until all have what they want."""
        DYING.clear()
        for _ in range(40):
            if {self._advance(run) for run in self._runs} == {"completed"}:
                return
            self._processes.clock.advance(61)
        raise AssertionError([self._kd.info(run) for run in self._runs])

    def _advance(self, run: str) -> str:
        try:
            return self._kd.advance(run).status
        except StoreUnavailable:
            self._processes.mourn()
            self._kd, self._view = self._processes.mortal()
            return "dead"

    def _die(self) -> None:
        self._view.die()
        raise Dead
