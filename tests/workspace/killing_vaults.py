"""Kills processes that publish and sweep, for real, and looks at what they leave. Run as a program; prints JSON.

It forks from a process that has no vault open and no thread, so that hundreds of deaths take seconds.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from killick.store.sqlite import file as sqlite_file
from killick.workspace.tree import Id
from killick.workspace.vault import pack_writer
from killick.workspace.vault import snapshot_writer as writing
from killick.workspace.vault import vault as module
from killick.workspace.vault.vault import Vault
from workspace.vaults import Files, add, packed_bytes, publish, read, some_files

WATCHED = (str(Path(module.__file__).parents[1]), str(sqlite_file.__file__))
PACK_BYTES_MAX = 30_000
LOOSE_BYTES_MAX = 8_000


def opened(path: Path) -> Vault:
    vault = Vault(path)
    vault._packs.pack_bytes_max = PACK_BYTES_MAX
    vault._packs.loose_bytes_max = LOOSE_BYTES_MAX
    return vault


def fork(task: Callable[[int], object]) -> tuple[int, int]:
    """Run a task in a child; returns its pid and the end of a pipe it writes to."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            task(writing)
            code = 0
        except BaseException as error:
            os.write(writing, f"error {error!r}\n".encode())
        finally:
            os._exit(code)
    os.close(writing)
    return child, reading


def finish(child: int, reading: int) -> tuple[int, list[str]]:
    chunks = []
    while chunk := os.read(reading, 1 << 16):
        chunks.append(chunk)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    return status, b"".join(chunks).decode().splitlines()


# at every point -----------------------------------------------------------------------------------


def template(path: Path, chance: random.Random) -> dict[Id, Files]:
    """A vault with snapshots that are wanted, garbage all around them, and what the dead left behind."""
    vault, kept = opened(path), dict[Id, Files]()
    for number in range(6):
        files = some_files(chance, 6)
        kept[publish(vault, files, f"kept/{number}")] = files
        publish(vault, {**files, **some_files(chance, 9)}, "gone")
    vault.forget("gone")
    vault.close()
    with sorted((path / "packs").iterdir())[-1].open("ab") as last:
        last.write(b"torn" * 500)
    (path / "packs" / "0099.pack").write_bytes(b"torn" * 500)
    return kept


def dying_at(count: int) -> Callable[[FrameType, str, Any], None]:
    """Dies before the nth call that the vault makes of the system, of SQLite, or of anything that is not Python."""
    left = count

    def look(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and frame.f_code.co_filename.startswith(WATCHED[0]):
            pass
        elif event != "c_call" or not frame.f_code.co_filename.endswith(WATCHED[1]):
            return
        if called.__module__ == "builtins":
            return  # len, isinstance: nothing outside can tell the difference
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return look


def publishing(vault: Vault, files: Files) -> None:
    publish(vault, files, "new")


def abandoning(vault: Vault, files: Files) -> None:
    with vault.writing() as writing:
        add(writing, files)


def sweeping(vault: Vault, files: Files) -> None:
    vault.sweep()


def compressing(vault: Vault, files: Files) -> None:
    vault.compress()


def restoring(vault: Vault, files: Files) -> None:
    with vault.lock("/w"):
        (first, *_) = vault.references()
        vault.begin_restoring("/w", first.root, None, [b"a"])
        vault.end_restoring("/w")


SCENES: dict[str, Callable[[Vault, Files], None]] = {
    "publishing": publishing, "abandoning": abandoning, "sweeping": sweeping, "restoring": restoring,
    "compressing": compressing,
}  # fmt: skip


def look(path: Path, kept: dict[Id, Files], files: Files) -> Callable[[int], None]:
    """In a child: whatever is referred to is whole, nothing else is there, and everything goes on."""

    def task(out: int) -> None:
        vault = opened(path)
        assert vault.verify() == [], vault.verify()
        found = {reference.root: reference.owner for reference in vault.references()}
        assert kept.keys() <= found.keys(), "a snapshot is gone"
        for root, owner in found.items():
            assert read(vault, root) == (files if owner == "new" else kept[root]), owner
        os.write(out, b"new\n" if "new" in found.values() else b"old\n")
        # The next one goes on at once, and what was left behind is no more after a sweep.
        root = publish(vault, files, "new")
        vault.sweep()
        assert read(vault, root) == files
        assert vault.verify() == []
        live = sum(placed.stored for placed in vault._opened().objects())  # type: ignore[union-attr]
        assert packed_bytes(vault) <= 2 * live, (packed_bytes(vault), live)
        assert len(list((path / "packs").iterdir())) < 20
        vault.close()

    return task


def at_every_point(folder: Path, scene: str, step: int, seed: int) -> dict[str, object]:
    """Die before the nth call, for every nth n, until one life is long enough to finish."""
    chance = random.Random(seed)
    kept = template(folder / "template", chance)
    files = some_files(chance, 12)
    outcomes: list[str] = []
    for count in range(1 + seed % step, 100_000, step):
        path = folder / "vault"
        shutil.copytree(folder / "template", path)

        def live(out: int, path: Path = path, count: int = count) -> None:
            vault = opened(path)
            sys.setprofile(dying_at(count))
            SCENES[scene](vault, files)
            sys.setprofile(None)

        status, lines = finish(*fork(live))
        assert status == 0 or os.WIFSIGNALED(status), (seed, count, lines)
        code, lines = finish(*fork(look(path, kept, files)))
        assert code == 0, (seed, count, lines)
        outcomes += lines
        shutil.rmtree(path)
        if status == 0:
            return {"points": len(outcomes) - 1, "new": outcomes.count("new")}
    raise AssertionError("no life was long enough")


# at random moments --------------------------------------------------------------------------------

Wanted = dict[str, dict[str, int]]
"""By owner: the snapshots it was told it has, and the seeds of their files."""


def live_for_ever(path: Path, told: int, name: str, seed: int) -> None:
    """Threads that publish, forget and sweep, each for owners of its own; what is done is told before what is next."""
    vault = opened(path)

    def work(number: int) -> None:
        chance = random.Random(f"{seed} {name} {number}")
        while True:
            owner, own = f"{name}.{number}/{chance.randrange(3)}", chance.randrange(10**9)
            what = chance.random()
            if what < 0.75:
                root = publish(vault, some_files(random.Random(own)), owner)
                os.write(told, f"{owner} {root.hex()} {own}\n".encode())
            elif what < 0.8:
                vault.compress()
            elif what < 0.9:
                os.write(told, f"{owner} forgets\n".encode())
                vault.forget(owner)
            else:
                vault.sweep()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def at_random_moments(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Two processes live at once and are killed one after the other; the next come at once."""
    chance, path, wanted = random.Random(seed), folder / "vault", Wanted()
    published = 0
    for kill in range(0, kills, 2):
        lives = [fork(lambda out, n=n, kill=kill: live_for_ever(path, out, f"{kill + n}", seed)) for n in range(2)]
        if not kill % 4:
            select.select([lives[0][1]], [], [])  # half of the pairs live until one has published or forgotten
        for child, _ in lives:
            time.sleep(chance.uniform(0.005, 0.15))
            os.kill(child, signal.SIGKILL)
        for child, reading in lives:
            status, lines = finish(child, reading)
            assert os.WIFSIGNALED(status), (seed, kill, lines[-1:])
            for line in lines:
                owner, what, *own = line.split()
                if own:
                    wanted.setdefault(owner, {})[what] = int(own[0])
                    published += 1
                else:
                    # Perhaps it did not come to it: what it had may be there or not, and is whole if it is.
                    wanted.pop(owner, None)
        status, lines = finish(*fork(look_at_all(path, wanted, chance.randrange(10**9))))
        assert status == 0, (seed, kill, lines)
        for owner in lines:
            wanted.pop(owner, None)
    return {"kills": kills, "published": published}


def look_at_all(path: Path, wanted: Wanted, seed: int) -> Callable[[int], None]:
    """In a child: everything that was told is there, and whatever is there is whole. Some owners are then forgotten."""

    def task(out: int) -> None:
        chance, vault = random.Random(seed), opened(path)
        problems = vault.verify()
        assert problems == [], problems
        for owner, roots in wanted.items():
            found = {reference.root.hex() for reference in vault.references(owner)}
            assert roots.keys() <= found, f"{owner} lost {roots.keys() - found}"
        pairs = [pair for roots in wanted.values() for pair in roots.items()]
        for root, own in chance.sample(pairs, min(5, len(pairs))):
            assert read(vault, bytes.fromhex(root)) == some_files(random.Random(own))
        for owner in {reference.owner for reference in vault.references()}:
            if chance.random() < 0.3:
                vault.forget(owner)
                os.write(out, f"{owner}\n".encode())
        vault.close()

    return task


def main() -> None:
    mode, folder, *numbers = sys.argv[1:]
    # Little is much here.
    writing._COMPRESSED_BYTES_MAX = 15_000
    pack_writer._BUFFER_BYTES = 3_000
    if mode in SCENES:
        found = at_every_point(Path(folder), mode, *map(int, numbers))
    else:
        found = at_random_moments(Path(folder), *map(int, numbers))
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
