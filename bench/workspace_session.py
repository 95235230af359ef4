"""A long session of a coding agent on a large tree: how much longer it takes when its files are kept at every boundary.

Each turn is a call of a model that takes two seconds and a small shell command, every fourth of which changes a file.
The same session is held three times, each in a process and on a copy of the tree of its own, side by side: with no
workspace, with one as agents declare it, and with one whose snapshots the agent waits for after every command. The last
begins a little later, so that no two first snapshots are taken at once. Where fewer turns are held than make a session,
the first turn, which waits for the first snapshot, counts once, and the others as often as it takes; the row says so.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

import killick
from bench import trees
from bench.measure import Measure
from bench.peers import ROOT, say
from killick.model.events import WorkspaceCaptured
from killick.workspace.workspace import Workspace

MODEL_SECONDS: Final = 2.0
SESSION: Final = 300
"""So many turns make a session."""
TURNS: Final = int(os.environ.get("KILLICK_BENCH_TURNS") or 60)
"""So many are held: what `make bench` has time for."""
LATER_SECONDS: Final = 15
CHANGES_EVERY: Final = 4
MODES: Final = ("none", "beside", "in line")
RUN: Final = "session"


class Session(msgspec.Struct, frozen=True):
    """How long a session took up to the end of its first turn, and from there on; how long its commands took after
    that, waiting included; and how many snapshots are on record."""

    first: float
    rest: float
    commands: float
    snapshots: int

    @property
    def seconds(self) -> float:
        """As long as a whole session takes."""
        return self.first + self.rest * (max(SESSION, TURNS) - 1) / (TURNS - 1)


def measure(folder: Path) -> Iterator[Measure]:
    """All three, side by side."""
    home = folder / "workspace_session"
    source = trees.source()
    copies = {mode: home / mode.replace(" ", "-") / "tree" for mode in MODES}
    first, *others = copies.values()
    first.mkdir(parents=True)
    trees.some(source, first)
    for each in others:
        each.parent.mkdir()
        trees.copy(first, each)
    files = [trees.warm(each)[0] for each in copies.values()]
    os.sync()
    found = _held(copies)
    bare, beside, in_line = (found[mode] for mode in MODES)
    turns = f"{TURNS} turns" if TURNS >= SESSION else f"{SESSION} turns, reckoned from {TURNS} that were held,"
    of = "a part of Linux" if source is not None else "made up"
    where = f"a session of {turns} with a model that takes {MODEL_SECONDS:.0f} s, {files[0]:,} files ({of})"
    for how, mine, at_most in (
        ("with a snapshot at every boundary", beside, 2.0),
        ("with snapshots in line", in_line, None),
    ):
        yield Measure(
            name="workspace_session",
            what=f"how much longer {how}: {where}",
            figure=100 * (mine.seconds / bare.seconds - 1),
            form="{:.2f} %",
            at_most=at_most,
            beside=f"{mine.seconds:.1f} s to {bare.seconds:.1f} s; the first turn {mine.first:.1f} s to "
            f"{bare.first:.1f} s, a later command with what it waits for {mine.commands / (TURNS - 1) * 1e3:.0f} ms to "
            f"{bare.commands / (TURNS - 1) * 1e3:.0f} ms; {mine.snapshots} snapshots on record",
        )
    trees.remove(home)


def _held(copies: dict[str, Path]) -> dict[str, Session]:
    """Each session in a process of its own."""
    started = dict[str, subprocess.Popen[bytes]]()
    for mode, tree in copies.items():
        if mode == "in line":
            time.sleep(LATER_SECONDS)
        command = [sys.executable, "-m", __spec__.name, mode, str(tree), str(TURNS)]
        started[mode] = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    found: dict[str, Session] = {}
    for mode, process in started.items():
        told, _ = process.communicate()
        if process.returncode:
            sys.exit(f"bench: the session {mode!r} failed")
        found[mode] = msgspec.json.decode(told, type=Session)
    return found


# the processes ------------------------------------------------------------------------------------


async def _sh(command: str, folder: Path) -> str:
    shell = await asyncio.create_subprocess_shell(command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    said, _ = await shell.communicate()
    assert shell.returncode == 0, command
    return said.decode(errors="replace")


@killick.tool(effect="workspace")
async def shell(command: str, folder: Path = killick.WORKSPACE) -> str:
    """Any command, in the run's own folder."""
    return await _sh(command, folder)


@killick.tool(effect="idempotent")
async def bare_shell(command: str, folder: str) -> str:
    """Any command, in a folder of which nobody keeps anything."""
    return await _sh(command, Path(folder))


async def think(turn: int, path: str) -> str:
    """A model: it takes its time, and knows what it wants."""
    await asyncio.sleep(MODEL_SECONDS)
    look = f"wc -l '{path}' && tail -n 5 '{path}'"
    return f"{look} && echo '/* turn {turn} */' >> '{path}'" if turn % CHANGES_EVERY == 0 else look


def play(mode: str, tree: Path, turns: int) -> Session:
    """One session, from its beginning to its end."""
    paths = [str(path.relative_to(tree)) for path in trees.files(tree) if path.suffix in {".c", ".h", ".py"}]
    commands, ends = list[float](), list[float]()

    async def call(run: killick.Run, command: str) -> None:
        began = time.perf_counter()
        if mode == "none":
            await run.call(bare_shell, command, str(tree))
        else:
            await run.call(shell, command)
        if mode == "in line":
            await _settled(run)
        ends.append(time.perf_counter())
        commands.append(ends[-1] - began)

    async def session(run: killick.Run) -> int:
        if mode == "in line":
            await _settled(run)
        for turn in range(turns):
            await call(run, await run.model(think, turn, paths[turn * 7 % len(paths)]))
        return turns

    agent = killick.agent(name=RUN, workspace=None if mode == "none" else Workspace(tree))(session)
    with killick.open(str(tree.parent / "killick.db")) as kd:
        began = time.perf_counter()
        kd.run(agent, id=RUN)
        ended = time.perf_counter()
        events = kd.events(RUN, limit=100 * turns)
    snapshots = sum(isinstance(each.event, WorkspaceCaptured) for each in events)
    return Session(ends[0] - began, ended - ends[0], sum(commands[1:]), snapshots)


async def _settled(run: killick.Run) -> None:
    """Until what is being taken beside the run is published and on record."""
    files = run._execution.files
    assert files is not None
    await files.settle()


if __name__ == "__main__":
    say(play(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
