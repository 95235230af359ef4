"""Kills processes that take snapshots and bring them back, for real, and looks at what they leave. Run as a program;
prints JSON.

It forks from a process that holds no vault and no thread, so that hundreds of deaths take seconds. What the folder
holds is told in a file before anything is done with it, so that whatever was published can be held against it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from killick.workspace import Workspace, tree
from killick.workspace.restore import PREFIX
from killick.workspace.tree import Id
from workspace.folders import Told, differing, held, told

NAMES = ["a", "b", "c", "d/e", "d/f", "d/g/h", "i/j", "i/k", "l", "m"]
LONG = (1 << 20) + 100


class Scene:
    """A folder with its vault, and what is told of both."""

    def __init__(self, beside: Path) -> None:
        self.folder = beside / "work"
        self.vault = beside / "vault"
        self.states = beside / "states"
        self.moves = beside / "moves"
        self.elsewhere = beside / "elsewhere"

    def workspace(self) -> Workspace:
        return Workspace(self.folder, vault=self.vault)

    def state(self) -> str:
        """Tell what is in the folder, for whoever comes later; returns the name of that. What a restore was writing
        when it died is no part of it."""
        found = {path: each for path, each in told(self.folder).items() if PREFIX not in path}
        text = written(found)
        name = sha256(text.encode()).hexdigest()
        place = self.states / name
        if not place.exists():
            new = place.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(place)
        return name

    def known(self, name: str) -> Told:
        return {bytes.fromhex(path): tuple(each) for path, each in json.loads((self.states / name).read_text()).items()}


def written(found: Told) -> str:
    return json.dumps({path.hex(): each for path, each in found.items()}, sort_keys=True)


def change(folder: Path, chance: random.Random) -> None:
    """What a tool might do."""
    for _ in range(chance.randrange(1, 5)):
        path = folder / chance.choice(NAMES)
        what = chance.randrange(6)
        if what == 0 and path.is_file() and not path.is_symlink():
            path.unlink()
        elif what == 1 and path.is_file() and not path.is_symlink():
            path.chmod(chance.choice([0o600, 0o644, 0o755]))
        elif what == 2:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(chance.choice(["a", "..", "/nowhere"]))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(chance.randbytes(chance.choice([0, 10, 5000, LONG])))


def live(scene: Scene, seed: int, ready: int) -> None:
    """Change, take, bring back, for ever; each move is told before it is made, and its outcome after."""
    chance = random.Random(seed)
    moves = os.open(scene.moves, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    workspace = scene.workspace()
    roots = [reference.root for reference in workspace.vault.references(str(workspace.path))]
    os.write(ready, b"!")
    while True:
        if not roots or chance.random() < 0.4:
            change(scene.folder, chance)
            state = scene.state()
            begun = workspace.begin() if chance.random() < 0.3 else None
            root = workspace.capture().root if begun is None else begun.snapshot.result().root
            roots.append(root)
            os.write(moves, f"taken {root.hex()} {state}\n".encode())
        else:
            scene.state()
            target = chance.choice(roots)
            os.write(moves, f"restoring {target.hex()}\n".encode())
            done = workspace.restore(target)
            os.write(moves, f"restored {target.hex()} {scene.state()} {len(done.left)}\n".encode())


def die(scene: Scene, chance: random.Random) -> int:
    """Let a process live until it is killed: at some moment, at its nth call that changes or opens a file, or at the
    nth of those for files that are being put back; returns how it ended."""
    seed, how = chance.randrange(10**9), chance.choice(["moment", "call", "putting"])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            if how != "moment":
                sys.addaudithook(deadly(chance.randrange(1000 if how == "call" else 60), putting=how == "putting"))
            live(scene, seed, writing)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        # At the end of a pipe nobody writes any more: it is dead before it was ready.
        if pipe.read(1) and how == "moment":
            time.sleep(chance.random() * 0.15)
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return status


def deadly(calls: int, *, putting: bool) -> Callable[[str, tuple[object, ...]], None]:
    left = [calls]

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.kill" or not event.startswith(("os.", "open")):
            return
        if not putting or any(isinstance(each, bytes) and PREFIX in each for each in arguments):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return watch


class Judge:
    """Looks at what the dead left, and opens the folder as whoever comes next would."""

    def __init__(self, scene: Scene, chance: random.Random) -> None:
        self.scene = scene
        self.chance = chance
        self.seen: dict[Id, str] = {}
        """The snapshots that were found, and what each held."""
        self.counts = {"kills": 0, "finished": 0, "by_hand": 0, "snapshots": 0, "acknowledged": 0, "elsewhere": 0}

    def look(self) -> None:
        scene = self.scene
        with scene.workspace() as workspace:
            pending = workspace.vault.restoring(str(workspace.path))
            by_hand = self.change_by_hand() if self.chance.random() < 0.5 else None
            before = scene.state()
            workspace.capture()
            after = scene.state()
            roots = self.published(workspace)
            if pending is not None:
                self.counts["finished"] += 1
                assert workspace.vault.restoring(str(workspace.path)) is None
                assert after == self.seen[pending.target], "a restore was not finished"
            else:
                assert after == before, "something changed that nobody asked for"
            if by_hand is not None:
                self.counts["by_hand"] += 1
                assert any(self.has(workspace, root, by_hand) for root in roots), "what was done by hand is lost"
        assert [path for path in told(scene.folder) if PREFIX in path] == []
        if self.chance.random() < 0.5:
            self.bring_back(self.chance.choice(list(self.seen)))

    def change_by_hand(self) -> tuple[bytes, bytes]:
        name, data = self.chance.choice([*NAMES, "new"]), self.chance.randbytes(20)
        path = self.scene.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        return name.encode(), data

    def has(self, workspace: Workspace, root: Id, by_hand: tuple[bytes, bytes]) -> bool:
        entry = tree.find(tree.root(root, workspace.vault.load), by_hand[0], workspace.vault.load)
        return entry is not None and entry.ref == tree.id_of(by_hand[1])

    def published(self, workspace: Workspace) -> set[Id]:
        """The snapshots that are there, each what the folder was at some moment; returns those that are new."""
        found = {each.root for each in workspace.vault.references(str(workspace.path))}
        assert self.seen.keys() <= found, "a snapshot is gone"
        new = found - self.seen.keys()
        for root in new:
            name = sha256(written(held(root, workspace.vault.load)).encode()).hexdigest()
            assert (self.scene.states / name).exists(), "a snapshot holds what was never there"
            self.seen[root] = name
        return new

    def bring_back(self, root: Id) -> None:
        with Workspace(self.scene.elsewhere, vault=self.scene.vault) as workspace:
            assert workspace.restore(root).left == ()
        assert differing(told(self.scene.elsewhere), self.scene.known(self.seen[root])) == []
        self.counts["elsewhere"] += 1

    def conclude(self) -> None:
        """Whoever was told that a snapshot was taken, or files brought back, was told the truth."""
        with self.scene.workspace() as workspace:
            self.published(workspace)
            assert workspace.vault.verify() == []
            for root, state in self.seen.items():
                found = held(root, workspace.vault.load)
                assert differing(found, self.scene.known(state)) == []
        for line in self.scene.moves.read_text().splitlines():
            what, snapshot, *rest = line.split(" ")
            if what != "restoring":
                self.counts["acknowledged"] += 1
                assert self.seen[bytes.fromhex(snapshot)] == rest[0], line
                assert rest[1:] in ([], ["0"]), line
        self.counts["snapshots"] = len(self.seen)


def main() -> None:
    scene, kills, seed = Scene(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    scene.folder.mkdir()
    scene.states.mkdir()
    judge = Judge(scene, chance)
    change(scene.folder, chance)
    while judge.counts["kills"] < kills:
        status = die(scene, chance)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "it ended by itself"
        judge.counts["kills"] += 1
        judge.look()
    judge.conclude()
    sys.stdout.write(json.dumps(judge.counts))


if __name__ == "__main__":
    main()
