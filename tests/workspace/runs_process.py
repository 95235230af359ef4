"""Kills processes whose agent patches and tests a folder by a shell, for real; prints JSON. Run as a program.

It forks from a process that holds no store and no thread, so that many deaths take seconds. Only the agent's process
is killed: the shell that it started lives on, and goes on patching.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import killick
from killick.model import events as e
from killick.store import SqliteStore, Store
from killick.workspace import tree
from killick.workspace.workspace import Workspace
from warm import load_client
from workspace.folders import told

ROUNDS: Final = 2
TELL: Final = 9
"""Whoever works tells here how far it is: a descriptor that the shell has too."""
OLD_NS: Final = 1_600_000_000_123_456_789
ORPHAN_SECONDS_MAX: Final = 300

PATCH: Final = r"""
set -eu
tell() { echo "$1" >&9; if kill -0 $PPID; then sleep 0.008; else sleep 0.2; fi 2>/dev/null; }
echo $(($(cat count) + 1)) > count
tell count
mkdir "build_$1"
tell folder
sed -i "s/total_$1/sum_$1/" src/one.py
tell replace
echo "def more_$1(): pass" >> src/two.py
tell append
mv "src/three_$(($1 - 1)).py" "src/three_$1.py"
tell move
ln -s ../src/one.py "build_$1/link"
chmod "7$1$1" src/run.sh
tell link
rm -r "old/part_$1"
tell remove
for part in 1 2 3; do
    echo "part $part of $1" >> "build_$1/log"
    tell "test $part"
done
truncate -s 300000 "build_$1/sparse"
test "$(cat count)" = "$1"
test ! -e "old/part_$1"
echo "passed $1" > result
tell passed
"""
"""Each line of it fails, or does something else, where any of it was done before.

An orphan takes its time, so that the next process meets it even on a busy machine.
"""


def _tell(what: str) -> None:
    os.write(TELL, f"{what}\n".encode())


@killick.tool(effect="workspace", retry=killick.Retry(attempts=1000))
def patch_and_test(number: int, folder: Path = killick.WORKSPACE) -> str:
    subprocess.run(["sh", "-c", PATCH, "sh", str(number)], cwd=folder, check=True, pass_fds=(TELL,))
    _tell("ended")
    return (folder / "result").read_text()


@killick.tool(name="patch_and_test", effect="workspace", retry=killick.Retry(attempts=1000))
async def patch_and_test_soon(number: int, folder: Path = killick.WORKSPACE) -> str:
    shell = await asyncio.create_subprocess_exec("sh", "-c", PATCH, "sh", str(number), cwd=folder, pass_fds=(TELL,))
    if await shell.wait():
        raise LookupError("the patch does not fit")
    _tell("ended")
    return (folder / "result").read_text()


def model(messages: list[str]) -> str:
    _tell("asked")
    time.sleep(0.004)
    _tell("answered")
    return "patch it"


@killick.agent(name="patching", workspace="work")
async def patching(run: killick.Run) -> str:
    said = "Go."
    for number in range(1, ROUNDS + 1):
        await run.model(model, messages=[said])
        said = await run.call(patch_and_test, number)
    return said


@killick.agent(name="patching_soon", workspace="work")
def patching_soon(run: killick.SyncRun) -> str:
    said = "Go."
    for number in range(1, ROUNDS + 1):
        run.model(model, messages=[said])
        said = run.call(patch_and_test_soon, number)
    return said


AGENTS: Final[list[killick.Agent[Any, Any]]] = [patching, patching_soon]


def make_folder(folder: Path) -> None:
    """The folder as it is at first, with times that are long ago."""
    for name in ("src", "old", "still/deep/empty"):
        (folder / name).mkdir(parents=True)
    (folder / "count").write_text("0\n")
    (folder / "src/one.py").write_text("".join(f"def f{n}(): return total_{n % 4}\n" for n in range(400)))
    (folder / "src/two.py").write_text("two = 2\n")
    (folder / "src/three_0.py").write_bytes(random.Random(3).randbytes(200_000))
    (folder / "src/run.sh").write_text("#!/bin/sh\n")
    (folder / "still/large").write_bytes(random.Random(4).randbytes(1_500_000))
    (folder / "still/link").symlink_to("../src")
    for number in range(1, ROUNDS + 1):
        (folder / f"old/part_{number}").mkdir()
        (folder / f"old/part_{number}/text").write_text(f"part {number}\n" * 1000)
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, ns=(OLD_NS, OLD_NS), follow_symlinks=False)


# one life -----------------------------------------------------------------------------------------


class Aim(NamedTuple):
    """When a process is killed: so long after it has told so many things, or at its so-many-th append."""

    told: int = 0
    seconds: float = 0.0
    append: int = 0


class Deadly:
    """A store whose process dies at its so-many-th append: before it is made when that is odd, after it when even."""

    def __init__(self, store: Store, at: int) -> None:
        self._store, self._at, self._count = store, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def append(self, *args: Any, **kwargs: Any) -> Any:
        self._dies()
        done = self._store.append(*args, **kwargs)
        self._dies()
        return done

    def _dies(self) -> None:
        self._count += 1
        if self._count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


class Life(NamedTuple):
    """One process: what it told before it was killed, or before its end; its pipe, which orphans may still hold."""

    pipe: int
    said: list[str]
    killed: bool


def live(place: Path, agent: killick.Agent[Any, Any], aim: Aim | None) -> Life:
    """In a child, run the agent or go on with it."""
    reading, writing = _pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            os.dup2(writing, TELL)
            os.close(writing)
            os.chdir(place)
            logging.disable()
            _work(agent, Aim() if aim is None else aim)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    said, rest = [], b""
    while aim is None or aim.append or len(said) < aim.told:
        data = os.read(reading, 4096)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        said += [line.decode() for line in lines]
    if aim is not None and not aim.append and len(said) >= aim.told:
        time.sleep(aim.seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status and not os.WIFSIGNALED(status):
        raise SystemExit(f"the process failed; it had said {said}")
    return Life(reading, said, killed=status != 0)


def _pipe() -> tuple[int, int]:
    """Both ends out of the way of the descriptor that the shell knows."""
    ends = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10 * TELL) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


def _work(agent: killick.Agent[Any, Any], aim: Aim) -> None:
    store = cast("Store", Deadly(SqliteStore("killick.db"), aim.append))
    with killick.Client(store) as kd:
        result = kd.run(agent, id="r")
        kinds = [recorded.event for recorded in kd.events("r")]
        back = [
            kd.runtime.log.data("r", each.seq) for each in kd.events("r") if isinstance(each.event, e.WorkspaceRestored)
        ]
        found = {
            "result": result,
            "asked_people": sum(isinstance(event, e.WaitOpened) for event in kinds),
            "attempts": sum(isinstance(event, e.Started) and "patch" in event.key for event in kinds),
            "models": sum(isinstance(event, e.AttemptEnded) and event.outcome == "returned" for event in kinds),
            "back": len(back),
            "ended": sum(len(data.get("ended", ())) for data in back),
            "boundaries": _boundaries(kd),
        }
    Path("story.json").write_text(json.dumps(found))


def _boundaries(kd: killick.Client) -> list[dict[str, list[Any]]]:
    """The files before and after each of the tool's steps, by path, as the record has them."""
    fold, ledger = kd.state("r").fold, kd.runtime.log.ledger("r")
    found = []
    with Workspace("work", vault="killick.files") as workspace:
        for step in (step for step in fold.steps if step.name == "patch_and_test"):
            for seq in (step.attempts[0].started - 1, step.ended):
                root = ledger.files_at(seq)
                held = {} if root is None else dict(workspace.files(e.from_text(root)))
                found.append({os.fsdecode(path): _plain(entry) for path, entry in held.items()})
    return found


def _plain(entry: tree.Entry) -> list[Any]:
    return [
        entry.sort,
        0 if entry.kind == tree.LINK else entry.mode,
        entry.size,
        entry.ref.hex() * (not entry.is_folder),
    ]


# stories ------------------------------------------------------------------------------------------


def story(place: Path, agent: killick.Agent[Any, Any], aims: Callable[[int], Aim | None]) -> dict[str, Any]:
    """A run, in as many processes as it takes: what came of it, and of the folder."""
    (place / "work").mkdir(parents=True)
    make_folder(place / "work")
    lives: list[Life] = []
    while not lives or lives[-1].killed:
        lives.append(live(place, agent, aims(len(lives))))
    for each in lives:
        _until_alone(each.pipe)
    seen: dict[str, Any] = json.loads((place / "story.json").read_text())
    seen["tree"] = [[os.fsdecode(path), *what] for path, what in sorted(told(place / "work").items())]
    seen["died_at"] = [(each.said or ["nothing"])[-1] for each in lives[:-1]]
    shutil.rmtree(place)
    return seen


def _until_alone(pipe: int) -> None:
    """Until nobody holds the other end: what a killed process left running has come to its end, by whatever hand."""
    until = time.monotonic() + ORPHAN_SECONDS_MAX
    while select.select([pipe], [], [], max(until - time.monotonic(), 0))[0]:
        if not os.read(pipe, 4096):
            os.close(pipe)
            return
    raise SystemExit("a shell outlived the run")


def aimed(chance: random.Random) -> Aim:
    """Inside of the shell, mostly; at an append; while it is being opened, or the files go back."""
    sort = chance.random()
    if sort < 0.7:
        return Aim(
            told=chance.randint(1, 16), seconds=chance.choice([0.0, chance.uniform(0, 0.003), chance.uniform(0, 0.02)])
        )
    if sort < 0.85:
        return Aim(append=chance.randint(1, 14))
    return Aim(seconds=chance.uniform(0, 0.15))


IN_TOOL: Final = frozenset(
    {
        "count",
        "folder",
        "replace",
        "append",
        "move",
        "link",
        "remove",
        "test 1",
        "test 2",
        "test 3",
        "passed",
        "answered",
    }
)


def main(path: str, seed: int, kills: int, say: Callable[[str], object]) -> None:
    load_client()
    chance = random.Random(seed)
    whole = story(Path(path) / "whole", patching, lambda _: None)
    stories: list[dict[str, Any]] = []
    while sum(at in IN_TOOL for each in stories for at in each["died_at"]) < kills:
        lives, agent = chance.randint(4, 12), AGENTS[len(stories) % len(AGENTS)]
        stories.append(story(Path(path) / "killed", agent, lambda at: aimed(chance) if at < lives else None))
    say(json.dumps({"whole": whole, "stories": stories}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.stdout.write)
