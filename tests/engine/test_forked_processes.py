"""A process made by fork shares no lock, connection or thread with its parent: both go on, each on its own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import killick
from killick.fork_safety import Forked, ForkedMutex, register_for_forks

APP = '''
import multiprocessing, os, signal, sys, time
import killick

@killick.tool(name="forked_pay", effect="idempotent")
def pay(who: str) -> str:
    return f"paid {who} in {os.getpid()}"

@killick.agent(name="forked_agent")
async def agent(run: killick.Run, who: str) -> str:
    return await run.call(pay, who)

@killick.agent(name="forked_blocking")
def blocking(run: killick.SyncRun, who: str) -> str:
    return run.call(pay, who)

def helper(ready):
    os.write(ready, b"up")
    signal.pause()

@killick.tool(name="forked_dies")
def dies(method: str) -> str:
    """Makes a helper that outlives this process, then dies."""
    reads, writes = os.pipe()
    os.set_inheritable(writes, True)
    if method == "os.fork":
        pid = os.fork()
        if not pid:
            helper(writes)
    else:
        made = multiprocessing.get_context("fork").Process(target=helper, args=(writes,))
        made.start()
        pid = made.pid
    assert os.read(reads, 2) == b"up"
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

@killick.tool(name="forked_forks", effect="idempotent")
def forks(how: str) -> int:
    """Forks a child that comes back from the tool in its own way; returns its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if how == "exits":
        sys.exit(7)
    if how == "raises":
        raise ValueError("in the child")
    return 0

@killick.agent(name="forked_forking")
async def forking(run: killick.Run, how: str) -> int:
    code = await run.call(forks, how)
    await run.call(pay, "ann")
    return code

@killick.agent(name="forked_dying")
async def dying(run: killick.Run, method: str) -> str:
    return await run.call(dies, method)
'''

PREFORK = '''
from app import *

def serve(kd, name):
    """What a child of the server does: it runs agents with the client that its parent opened."""
    code = 1
    try:
        one = kd.run(agent, "ann", id=f"{name}_async")
        two = kd.run(blocking, "bob", id=f"{name}_blocking")
        assert str(os.getpid()) in one and str(os.getpid()) in two
        assert kd.run(agent, "ann", id="master") == first
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)

kd = killick.open(sys.argv[1])
first = kd.run(agent, "ann", id="master")
children = []
for name in ("one", "two"):
    pid = os.fork()
    if not pid:
        serve(kd, name)
    children.append(pid)
    assert str(os.getpid()) in kd.run(agent, "ann", id=f"master_{name}")
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
kd.run(blocking, "ann", id="master_last")
assert kd.store.verify().problems == []
kd.close()
print("served", flush=True)
'''

BUSY = """
from app import *
import asyncio, threading, traceback

kd = killick.open(sys.argv[1])
stop = threading.Event()

async def work():
    async with kd.worker():
        while not stop.is_set():
            await asyncio.sleep(0.01)

async def serve(name):
    assert str(os.getpid()) in await kd.as_async().run(agent, "ann", id=name)
    async with kd.worker() as worker:
        await worker.until_idle()

worker = threading.Thread(target=asyncio.run, args=(work(),), daemon=True)
worker.start()
children = []
for number in range(4):
    kd.start(agent, "ann", id=f"worker_{number}")
    pid = os.fork()
    if not pid:
        try:
            kd.run(agent, "ann", id=f"child_{number}")
            asyncio.run(serve(f"async_{number}"))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    children.append(pid)
for pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
for number in range(4):
    kd.start(agent, "ann", id=f"worker_{number}").result(60)
stop.set()
worker.join()
assert kd.store.verify().problems == []
assert {listed.status for listed in kd.list()} == {"completed"}
kd.close()
print("served", flush=True)
"""

POOLS = """
from app import *
import concurrent.futures

def work(number):
    with killick.open(sys.argv[1]) as kd:
        return kd.run(agent, "ann", id=f"{sys.argv[2]}_{number}")

def inherited(number):
    return kd.run(agent, "ann", id=f"inherited_{number}")

if __name__ == "__main__":
    method = sys.argv[2]
    kd = killick.open(sys.argv[1])
    kd.run(agent, "ann", id="master")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        assert len(set(pool.map(work, range(4)))) >= 1
        if method == "fork":
            assert len(list(pool.map(inherited, range(4)))) == 4
    kd.run(agent, "ann", id="master_last")
    assert kd.store.verify().problems == []
    kd.close()
    print("served", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in (("app", APP), ("prefork", PREFORK), ("pools", POOLS), ("busy", BUSY)):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=1_000, check=False
    )


@pytest.mark.gate(1)
@pytest.mark.parametrize("method", ["os.fork", "multiprocessing"])
def test_a_helper_that_outlives_its_process_keeps_no_run_of_it_busy(folder: Path, method: str) -> None:
    code = f"from app import *\nwith killick.open('killick.db') as kd: kd.run(dying, {method!r}, id='r')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as died:
        assert died.stdout is not None
        helper = int(died.stdout.readline())
        assert died.wait(300) == -9
    try:
        with killick.open(str(folder / "killick.db")) as kd:
            head = kd.runtime.store.head("r")
            assert head is not None
            assert head.holder is not None
            assert not kd.runtime.store.lives(head.holder)
            assert kd.runtime.store.lease("r", "another", seconds=1).holder == "another"
    finally:
        import os

        os.kill(helper, 9)


@pytest.mark.slow
def test_a_preforking_server_runs_agents_in_every_child_and_in_its_master(folder: Path) -> None:
    done = run(folder, "prefork.py", "killick.db")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("exits", 7), ("raises", 1), ("returns", 0)])
def test_a_child_that_comes_back_from_a_tool_ends_and_only_its_parent_continues_the_run(
    folder: Path, how: str, code: int
) -> None:
    asks = f"from app import *\nwith killick.open('killick.db') as kd: print(kd.run(forking, {how!r}, id='r'))"
    done = run(folder, "-c", asks)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{code}\n"
    with killick.open(str(folder / "killick.db")) as kd:
        assert kd.store.verify().problems == []


@pytest.mark.slow
def test_children_that_are_forked_while_a_worker_reads_and_writes_run_agents_and_workers(folder: Path) -> None:
    done = run(folder, "busy.py", "killick.db")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"


def test_a_client_that_is_sent_to_another_process_is_refused_with_the_way_out(folder: Path) -> None:
    with killick.open(str(folder / "killick.db")) as kd:
        for each in (kd, kd.as_async(), kd.runtime):
            with pytest.raises(killick.KillickError, match="another process; call"):
                pickle.dumps(each)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_pools_of_processes_work_beside_an_open_client(folder: Path, method: str) -> None:
    done = run(folder, "pools.py", "killick.db", method)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"


def test_a_child_forks_again_though_an_owner_failed_in_it() -> None:
    class Failing(Forked):
        def after_fork_in_child(self) -> None:
            raise OSError("closed already")

    class Paused(ForkedMutex):
        def __init__(self) -> None:
            self._mutex = threading.Lock()

    owners = [Failing(), Paused()]
    for owner in owners:
        register_for_forks(owner)
    child = os.fork()
    if child == 0:
        sys.unraisablehook = lambda _: None
        signal.alarm(300)
        grandchild = os.fork()
        os._exit(0 if grandchild == 0 else os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
