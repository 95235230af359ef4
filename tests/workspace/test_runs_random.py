"""Random runs on files, whose processes die and whose tools fail half way: at every boundary a folder is as it must be.

What it must be is told by a dict that the same orders were done to, each once and whole.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import killick
from killick.errors import StoreUnavailable
from killick.store import SqliteStore
from seeds import draw_seed, repeats
from world import World

Order = list[str]
Files = dict[str, str]
NAMES = [f"{folder}{name}" for folder in ("", "a/", "a/b/", "c/") for name in "xyz"]


class Fate:
    """What goes wrong in tools: an error after which they are tried again, or the end of the process."""

    def __init__(self, chance: random.Random, world: World) -> None:
        self.chance, self.world = chance, world
        self.errors = 0.07
        self.deaths = 0.05

    def strikes(self) -> None:
        drawn = self.chance.random()
        if drawn < self.errors:
            raise ConnectionError("half way")
        if drawn < self.errors + self.deaths:
            self.world.die()


FATE: dict[str, Fate] = {}


@killick.tool(effect="workspace", retry=killick.Retry(attempts=1000, first=0.001, max=0.002))
def do(order: Order, folder: Path = killick.WORKSPACE) -> None:
    """Half of an order, then whatever fate has, then the rest. Nothing of it may be done twice."""
    verb, name, *more = order
    path = folder / name
    fate = FATE["now"]
    fate.strikes()
    match verb:
        case "add":
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(more[0])
                file.flush()
                fate.strikes()
                file.write(more[0])
        case "move":
            target = folder / more[0]
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
            fate.strikes()
            with target.open("a") as file:
                file.write("m")
        case "remove":
            path.unlink()
            fate.strikes()
    fate.strikes()


@killick.agent(workspace="work")
async def doing(run: killick.Run, orders: list[Any]) -> int:
    for order in orders:
        if isinstance(order[0], list):
            await run.gather(*(one_by_one(run, branch) for branch in order))
        else:
            await run.call(do, order)
    return len(orders)


async def one_by_one(run: killick.Run, orders: list[Order]) -> None:
    for order in orders:
        await run.call(do, order)


def done(files: Files, order: Any) -> Files:
    """The same, to a dict."""
    if isinstance(order[0], list):
        for branch in order:
            for each in branch:
                files = done(files, each)
        return files
    verb, name, *more = order
    files = dict(files)
    match verb:
        case "add":
            files[name] = files.get(name, "") + more[0] * 2
        case "move":
            files[more[0]] = files.pop(name) + "m"
        case "remove":
            del files[name]
    return files


def drawn(chance: random.Random, files: Files, names: list[str]) -> Order:
    """An order that can be done to these files, with these names alone."""
    there = [name for name in names if name in files]
    sort = chance.random()
    if there and sort < 0.2:
        return ["remove", chance.choice(there)]
    if there and sort < 0.4 and (free := [name for name in names if name not in files]):
        return ["move", chance.choice(there), chance.choice(free)]
    return ["add", chance.choice(names), chance.choice("01234567")]


def drawn_orders(chance: random.Random, files: Files, count: int) -> tuple[list[Any], list[Files]]:
    """Orders, some of them side by side on names of their own, and the files before each and after the last."""
    orders: list[Any] = []
    states = [files]
    while len(orders) < count:
        order: Any = drawn(chance, states[-1], NAMES)
        if chance.random() < 0.3:
            names = chance.sample(NAMES, len(NAMES))
            order = [branch(chance, states[-1], names[at::3]) for at in range(3)]
        orders.append(order)
        states.append(done(states[-1], order))
    return orders, states


def branch(chance: random.Random, files: Files, names: list[str]) -> list[Order]:
    found: list[Order] = []
    for _ in range(chance.randint(1, 3)):
        found.append(drawn(chance, files, names))
        files = done(files, found[-1])
    return found


def told(folder: Path) -> Files:
    return {str(each.relative_to(folder)): each.read_text() for each in folder.rglob("*") if each.is_file()}


def outlived(world: World, orders: list[Any], run: str) -> None:
    """Run to its end, in another process whenever one dies."""
    for _ in range(200):
        try:
            world.kd.run(doing, orders, id=run)
        except StoreUnavailable:
            world.bury(run)
        else:
            return
    raise AssertionError(f"{run} did not end")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(repeats(2, 5)))
def test_a_folder_is_as_it_must_be_at_every_boundary(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = draw_seed() + number
    chance = random.Random(seed)
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    files = {name: name for name in chance.sample(NAMES, 4)}
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    orders, states = drawn_orders(chance, files, 6)
    clock = killick.clock.LeapingClock()
    world = World(SqliteStore(tmp_path / "killick.db", clock=clock), clock)
    with contextlib.closing(world):
        FATE["now"] = Fate(chance, world)
        outlived(world, orders, "r")
        assert told(work) == states[-1], f"seed {seed}"
        for turn in range(2):
            at = chance.randint(1, len(orders))
            world.kd.rewind("r", f"{at}:before")
            assert told(work) == states[at - 1], f"seed {seed}, rewound to {at}"
            if chance.random() < 0.5:
                (work / "by_hand").write_text("while nobody looked")
                world.kd.rewind("r", f"{chance.randint(1, at - 1)}:before" if at > 1 else "start")
                assert "by_hand" not in told(work)
            outlived(world, orders, "r")
            assert told(work) == states[-1], f"seed {seed}, gone on from {at}"

            at = chance.randint(1, len(orders))
            own = tmp_path / f"fork_{turn}"
            fork = world.kd.fork("r", f"{at}:before", workspace=own)
            assert told(own) == states[at - 1], f"seed {seed}, forked at {at}"
            outlived(world, orders, fork.id)
            assert (told(own), told(work)) == (states[-1], states[-1]), f"seed {seed}, forked at {at}"
            shutil.rmtree(own)
        last = len(orders)
        while last and not isinstance(orders[last - 1][0], list):
            world.kd.undo("r", str(last))
            last -= 1
            assert told(work) == states[last], f"seed {seed}, undone down to {last}"
