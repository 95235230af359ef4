"""A process made by fork shares no lock, connection or thread with its parent: both go on, each on its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import killick

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
assert kd.verify().problems == []
kd.close()
print("served", flush=True)
'''

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
    assert kd.verify().problems == []
    kd.close()
    print("served", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in (("app", APP), ("prefork", PREFORK), ("pools", POOLS)):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.gate(1)
@pytest.mark.parametrize("method", ["os.fork", "multiprocessing"])
def test_a_helper_that_outlives_its_process_keeps_no_run_of_it_busy(folder: Path, method: str) -> None:
    code = f"from app import *\nwith killick.open('killick.db') as kd: kd.run(dying, {method!r}, id='r')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as died:
        assert died.stdout is not None
        helper = int(died.stdout.readline())
        assert died.wait(60) == -9
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
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_pools_of_processes_work_beside_an_open_client(folder: Path, method: str) -> None:
    done = run(folder, "pools.py", "killick.db", method)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"
