"""A run in its own process: the worker's side, and the child process, which advances this run and exits.

The child process holds the run's lease. It releases the run at the next step when the worker asks, and exits soon after
the worker dies. It must never take another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import time
from functools import partial
from typing import BinaryIO, Final, cast

import msgspec

from killick.agents.runtime import Runtime
from killick.clock import SystemClock
from killick.definitions.agents import AGENTS
from killick.encryption.master_key import VARIABLE
from killick.encryption.store import decrypting
from killick.engine.claims import ClaimedRun
from killick.engine.steps.attempt import call_on
from killick.errors import KillickError
from killick.logger import get_logger
from killick.store import open_store
from killick.store.records import Head
from killick.threads import start_thread
from killick.type_init import ready

logger: Final = get_logger("killick")

ORPHAN_SECONDS: Final = 5.0
"""How long the child process may stay in its step after the worker died."""

_TAKEN, _UNABLE, _FAILED = "taken", "unable", "failed"
"""How the line of the child process begins: it holds the run; it can never run it; it could not now."""

_MAIN: Final = "__killick_main__"
"""The module name under which a script that declares agents is imported, so its `__main__` block does not run again."""


class _Order(msgspec.Struct, frozen=True):
    """The instructions for the child process: the run, its store, and the module that declares its agent."""

    url: str
    run: str
    agent: str
    module: str
    file: str | None
    epoch: int
    lease_seconds: float


class OwnProcess:
    """A child process that advances one run. `start` hands the run over, `wait` waits for its exit."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, runtime: Runtime, head: Head, agent: str, *, lease_seconds: float) -> OwnProcess | str:
        """Starts the process and waits until it holds the run's lease. Returns the reason if the run stays here:
        another process can never run it. Raises KillickError if that process could not take the run now."""
        declared = AGENTS.get(agent).fn
        if runtime.url is None or not isinstance(runtime.clock, SystemClock):
            return "no other process can open its store"
        if "<locals>" in declared.__qualname__:
            return "its agent is declared in a function, which no other process can import"
        file = getattr(sys.modules.get(declared.__module__), "__file__", None)
        order = _Order(runtime.url, head.run, agent, declared.__module__, file, head.epoch, lease_seconds)
        # The variable that names the master keys; without it, the process reads the same as this one.
        described: str | None = getattr(runtime.store, "described", None)
        keys = {} if described is None else {VARIABLE: described}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from killick.workers.own_process import main; main()",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **keys, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        own = cls(process)
        try:
            own._tell(msgspec.json.encode(order))
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode(errors="replace").rstrip()
            if line == _TAKEN:
                return own
            code = await process.wait()
            what, _, reason = line.partition(" ")
            if what != _UNABLE:
                raise KillickError(f"its own process could not take it: {reason or f'it exited with {code}'}")
            return reason
        except BaseException:
            own.kill()
            raise

    def leave(self) -> None:
        """Asks it to release the run at its next step."""
        self._tell(b"leave")

    def kill(self) -> None:
        """Kills it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Waits for its exit; returns 0, an exit code, or a signal as a negative number."""
        try:
            assert self._process.stdout is not None
            while await self._process.stdout.read(65_536):
                pass  # the output of the agent's code is discarded, and must not fill the pipe
            return await self._process.wait()
        except BaseException:
            self.kill()
            raise

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")


# the other process --------------------------------------------------------------------------------


def main() -> None:
    """Advances one run, as the worker instructs on stdin. The agent's output goes to stderr."""
    out, sys.stdout = os.fdopen(os.dup(1), "wb", buffering=0), sys.stderr
    # Unbuffered: a thread may still be reading a line when the interpreter exits.
    orders = cast("BinaryIO", open(0, "rb", buffering=0, closefd=False))  # noqa: SIM115
    order = msgspec.json.decode(orders.readline(), type=ready(_Order))
    try:
        _import(order)
        AGENTS.get(order.agent)
    except BaseException as error:
        sys.exit(_report(out, order, _UNABLE, f"its module {order.module} cannot be imported", error))
    try:
        with contextlib.closing(Runtime(decrypting(open_store(order.url)), url=order.url)) as runtime:
            asyncio.run(_advance(runtime, order, orders, out))
    except (KillickError, OSError) as error:
        sys.exit(_report(out, order, _FAILED, "it stopped", error))


def _report(out: BinaryIO, order: _Order, what: str, why: str, error: BaseException) -> int:
    """Writes one line: to the worker, as long as it reads, and to the log. Returns the exit code."""
    reason = " ".join(f"{why}: {type(error).__name__}: {error}".split())
    logger.warning("%s: its own process: %s", order.run, reason)
    with contextlib.suppress(OSError):  # the worker is gone
        out.write(f"{what} {reason}\n".encode())
    return 1


def _import(order: _Order) -> None:
    """Imports the module that declares the agent; a file outside a package is loaded by its path."""
    if order.file is None or ("." in order.module and order.module != "__main__"):
        importlib.import_module(order.module)
        return
    name = _MAIN if order.module == "__main__" else order.module
    spec = importlib.util.spec_from_file_location(name, order.file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


async def _advance(runtime: Runtime, order: _Order, orders: BinaryIO, out: BinaryIO) -> None:
    loop, executor, leaves = asyncio.get_running_loop(), runtime.executor(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, leaves.set)
    start_thread("killick-orders", partial(_listen, loop, orders, leaves), died=lambda _: os._exit(1))
    since, seconds = runtime.clock.monotonic(), order.lease_seconds
    head = runtime.store.lease(order.run, runtime.engine.holder, seconds=seconds, handed=order.epoch)
    out.write(f"{_TAKEN}\n".encode())
    advancing = loop.create_task(executor.advance(order.run, claim=ClaimedRun(head, since, seconds, alone=True)))
    leaving = loop.create_task(leaves.wait())
    await asyncio.wait({advancing, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    executor.leave(order.run)
    try:
        await advancing
    except KillickError as error:
        logger.warning("%s: stopped being run alone: %s", order.run, error)


def _listen(loop: asyncio.AbstractEventLoop, orders: BinaryIO, leaves: asyncio.Event) -> None:
    """Releases the run when the worker asks. If the worker dies, abandons the run once its step takes too long."""
    has_order = bool(orders.readline())
    call_on(loop, leaves.set)
    if has_order:
        orders.readline()
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
