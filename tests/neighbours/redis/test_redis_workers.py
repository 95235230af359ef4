"""Runs and workers on a store in Redis: real processes are killed, and the server too; every effect happens once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import killick
from killick.store import open_store
from killick.store.protocol import raw_store
from killick.store.redis.store import RedisStore
from neighbours.redis import valkeys
from store_contract.builders import creation, indexed

ROOT: Final = Path(__file__).parents[3]
LIMIT_SECONDS: Final = 60


@pytest.fixture
def url() -> str:
    return valkeys.emptied()


def run_until_it_ends(program: Path, *arguments: str) -> int:
    """How a process ended: negative where a signal ended it."""
    return subprocess.run([sys.executable, str(program), *arguments], timeout=LIMIT_SECONDS, check=False).returncode


# the same crash, with Redis alone and with Killick on it ---------------------------------------------

ALONE: Final = """
import os, signal, sys
from pathlib import Path
import redis

url, outbox = sys.argv[1], Path(sys.argv[2])
state = redis.Redis.from_url(url)

def send(what):
    dies = what == "mail 2" and not outbox.read_text().count(what)
    with outbox.open("a") as file:
        file.write(what + "\\n")
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)

outbox.touch()
for number in range(int(state.get("done") or 0) + 1, 4):
    send(f"mail {number}")
    state.set("done", number)
"""

WITH_KILLICK: Final = """
import os, signal, sys, time
from pathlib import Path
import killick

url, outbox = sys.argv[1], Path(sys.argv[2])

def look(effect):
    there = effect.arguments["what"] in outbox.read_text().splitlines()
    return killick.Happened(None) if there else killick.DidNotHappen()

@killick.tool(reconcile=look, timeout=1)
def send(what: str) -> None:
    dies = what == "mail 2" and not outbox.read_text().count(what)
    with outbox.open("a") as file:
        file.write(what + "\\n")
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)

@killick.agent
def mailing(run: killick.SyncRun, count: int) -> None:
    for number in range(1, count + 1):
        run.call(send, f"mail {number}")

outbox.touch()
with killick.open(url, grace_seconds=0.2, lease_seconds=1) as kd:
    while True:
        try:
            kd.run(mailing, 3, id="mailing")
            break
        except killick.errors.RunBusy:
            time.sleep(0.1)  # the lease of who died is not over yet
"""


def test_a_crash_between_an_effect_and_its_record_repeats_it_with_redis_alone_and_not_with_killick(
    url: str, tmp_path: Path
) -> None:
    sent: dict[str, list[str]] = {}
    for name, text in (("redis alone", ALONE), ("with killick", WITH_KILLICK)):
        program, outbox = tmp_path / f"{name.replace(' ', '_')}.py", tmp_path / name
        program.write_text(text)
        assert run_until_it_ends(program, url, str(outbox)) == -signal.SIGKILL
        assert run_until_it_ends(program, url, str(outbox)) == 0
        sent[name] = outbox.read_text().splitlines()
        print(f"{name}: mail 2 was sent {sent[name].count('mail 2')} times")
    assert sent["redis alone"] == ["mail 1", "mail 2", "mail 2", "mail 3"]
    assert sent["with killick"] == ["mail 1", "mail 2", "mail 3"]


# many processes -----------------------------------------------------------------------------------


def claiming(url: str, holder: str, start: int, told: Path) -> int:
    """A process that claims as soon as everybody is there, and writes down what it got. It is not us from here on."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        store, got = open_store(url), list[str]()
        os.read(start, 1)
        while claimed := store.claim(holder, now_us=2, seconds=60, limit=7):
            got += [f"{one.head.run} {one.head.epoch}" for one in claimed]
        told.write_text("\n".join(got))
        code = 0
    finally:
        os._exit(code)


def test_processes_that_claim_at_once_get_each_run_once(url: str, tmp_path: Path) -> None:
    store, runs = open_store(url), [f"many-{number}" for number in range(300)]
    store.append([creation(store, run, "one", index=indexed("waiting", wake_at_us=1)) for run in runs])
    store.close()
    start, go = os.pipe()
    children = [claiming(url, f"w{number}", start, tmp_path / str(number)) for number in range(3)]
    os.write(go, b"...")
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    for each in (start, go):
        os.close(each)
    told = [(tmp_path / str(number)).read_text().splitlines() for number in range(3)]
    assert sorted(line for lines in told for line in lines) == sorted(f"{run} 1" for run in runs)


WORKER: Final = """
import asyncio, os, sys, time
from pathlib import Path
import killick

url, book = sys.argv[1], Path(sys.argv[2])

@killick.tool(effect="idempotent", timeout=1, retry=killick.Retry(attempts=50, first="10ms"))
def pay(order: int, part: int, key: killick.Key = killick.KEY) -> str:
    # The bank pays once for a key: a file of that name is there, or it is made.
    (book / key.replace("/", "_")).open("a").close()
    time.sleep(0.02)
    return key

@killick.agent
async def order(run: killick.Run, number: int) -> int:
    for part in range(4):
        await run.call(pay, number, part)
        await run.sleep(0.02)
    return number

async def work():
    async with killick.open_async(url, grace_seconds=0.2) as kd:
        await kd.worker(concurrency=6, lease_seconds=1).serve()

if __name__ == "__main__":
    asyncio.run(work())
"""


@pytest.fixture
def server() -> Iterator[valkeys.Server]:
    with valkeys.Server() as made:
        yield made


def test_every_run_ends_and_every_effect_happens_once_though_workers_and_the_server_are_killed(
    server: valkeys.Server, tmp_path: Path
) -> None:
    (program := tmp_path / "worker.py").write_text(WORKER)
    (book := tmp_path / "book").mkdir()

    def worker() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(program), server.url, str(book)])

    def paid(many: int) -> None:
        while len(os.listdir(book)) < many:
            waiting.wait(0.02)

    @killick.agent(name="order")
    async def order(run: killick.Run, number: int) -> int:
        raise AssertionError("only workers do it")

    waiting, workers = threading.Event(), [worker(), worker()]
    try:
        with killick.open(server.url) as kd:
            orders = [kd.start(order, number, id=f"order-{number}") for number in range(12)]
            paid(6)
            workers[0].kill()
            workers.append(worker())
            paid(20)
            server.kill()
            server.start()
            assert [handle.result(timeout=LIMIT_SECONDS) for handle in orders] == list(range(12))
            counted = Counter(key.split(":")[0] for key in os.listdir(book))
            assert counted == {f"order-{number}": 4 for number in range(12)}
            assert not kd.store.verify().problems
    finally:
        for each in workers:
            each.kill()
            each.wait()


def test_a_worker_is_woken_by_who_starts_a_run_elsewhere(url: str) -> None:
    @killick.agent(name="greeting")
    async def greeting(run: killick.Run, who: str) -> str:
        return f"hello {who}"

    async def served() -> str:
        async with killick.open_async(url) as kd, kd.worker():
            # A store that somebody else has open rings; nobody looks by the clock for as long as this takes.
            with killick.open(url) as other:
                handle = await asyncio.to_thread(other.start, greeting, "Ann")
                return str(await asyncio.to_thread(handle.result, 300))

    assert asyncio.run(served()) == "hello Ann"


def test_a_run_waits_for_a_person_and_goes_on_from_what_is_kept(url: str) -> None:
    @killick.agent(name="asking")
    def asking(run: killick.SyncRun, amount: int) -> str:
        answer = run.ask(f"Pay {amount}?")
        return "paid" if answer.approved else "kept"

    with killick.open(url) as kd, pytest.raises(killick.RunWaiting):
        kd.run(asking, 5, id="a1")
    with killick.open(url) as kd:
        kd.answer("a1", "approve", by="ann")
        assert kd.run(asking, 5, id="a1") == "paid"
        assert not kd.store.verify().problems
        assert isinstance(raw_store(kd.runtime.store), RedisStore)


# what is shown to people --------------------------------------------------------------------------


def test_the_example_runs(url: str) -> None:
    program = ROOT / "examples" / "neighbours" / "redis_workers.py"
    done = subprocess.run(
        [sys.executable, str(program), url], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "payments made: 1" in done.stdout


def test_what_the_page_shows_is_so(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "neighbours" / "redis.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    told: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(block.replace("redis://localhost:6379/0", url), told)
