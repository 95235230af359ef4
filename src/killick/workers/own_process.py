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
import threading
import time
from typing import BinaryIO, Final, TextIO, cast

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
from killick.type_init import ready

logger: Final = get_logger("killick")

ORPHAN_SECONDS: Final = 5.0
"""How long the child process may stay in its step after the worker died."""

_MAIN: Final = "__killick_main__"
"""The module name under which a script that declares agents is imported, so its `__main__` block does not run again."""


class _Order(msgspec.Struct, frozen=True):
    """The instructions for the child process: the run, its store, and the module that declares its agent."""

    url: str
    run: str
    module: str
    file: str | None
    epoch: int
    lease_seconds: float


class OwnProcess:
    """A child process that advances one run. `start` hands the run over, `wait` waits for its exit."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, runtime: Runtime, head: Head, agent: str, *, lease_seconds: float) -> OwnProcess | None:
        """Starts the process and waits until it holds the run's lease. Returns None if the run stays here, because no
        other process can import its agent or open the store."""
        declared = AGENTS.get(agent).fn
        if runtime.url is None or not isinstance(runtime.clock, SystemClock) or "<locals>" in declared.__qualname__:
            return None
        file = getattr(sys.modules.get(declared.__module__), "__file__", None)
        order = _Order(runtime.url, head.run, declared.__module__, file, head.epoch, lease_seconds)
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
            if await process.stdout.readline() == b"taken\n":
                return own
            await process.wait()
            return None
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
    out, sys.stdout = sys.stdout, sys.stderr
    # Unbuffered: a thread may still be reading a line when the interpreter exits.
    orders = cast("BinaryIO", open(0, "rb", buffering=0, closefd=False))  # noqa: SIM115
    order = msgspec.json.decode(orders.readline(), type=ready(_Order))
    _import(order)
    with contextlib.closing(Runtime(decrypting(open_store(order.url)), url=order.url)) as runtime:
        asyncio.run(_advance(runtime, order, orders, out))


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


async def _advance(runtime: Runtime, order: _Order, orders: BinaryIO, out: TextIO) -> None:
    loop, executor, leaves = asyncio.get_running_loop(), runtime.executor(), asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, leaves.set)
    threading.Thread(target=_listen, args=(loop, orders, leaves), daemon=True).start()
    since, seconds = runtime.clock.monotonic(), order.lease_seconds
    head = runtime.store.lease(order.run, runtime.engine.holder, seconds=seconds, handed=order.epoch)
    out.write("taken\n")
    out.flush()
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
