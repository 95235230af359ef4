"""Several worker processes on one machine: starts them, restarts one that died, and passes on the signals to stop.

Each process has a session of its own, so that Ctrl-C in a terminal reaches it once, through here. Its stdin is a pipe
that nothing is written to: it ends when this process dies, and the worker then drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from killick.workers.worker import log_transition

BACKOFF_SECONDS: Final = (1.0, 60.0)
"""The time before a process that died is started again, at first and at most."""

STABLE_SECONDS: Final = 60.0
"""A process that lived this long starts its backoff anew."""


class Supervisor:
    """Keeps worker processes running until `stop`, or until each has exited with 0 if they are to end by themselves."""

    def __init__(self, commands: Sequence[Sequence[str]], env: Mapping[str, str], *, until_idle: bool) -> None:
        self._commands = commands
        self._env = env
        self._until_idle = until_idle
        self._live: set[asyncio.subprocess.Process] = set()
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Starts the processes and returns when all have exited."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self.stop)
        async with asyncio.TaskGroup() as group:
            for number, command in enumerate(self._commands, start=1):
                group.create_task(self._keep(number, command))

    def stop(self) -> None:
        """Sends SIGTERM: the first drains each worker, a second one stops it at once."""
        self._stopped.set()
        for process in self._live:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def _keep(self, number: int, command: Sequence[str]) -> None:
        least, most = backoff = BACKOFF_SECONDS
        loop = asyncio.get_running_loop()
        while not self._stopped.is_set():
            began = loop.time()
            code = await self._run(command)
            if self._stopped.is_set() or (self._until_idle and code == 0):
                return
            least = backoff[0] if loop.time() - began > STABLE_SECONDS else least
            log_transition("died", process=number, by=_cause(code), again_in_seconds=least)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), least)
            least = min(least * 2, most)

    async def _run(self, command: Sequence[str]) -> int:
        """Starts one process and waits for its exit. Returns its code, or a signal as a negative number."""
        process = await asyncio.create_subprocess_exec(
            *command, env=dict(self._env), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._live.add(process)
        try:
            if self._stopped.is_set():
                process.terminate()  # the signal came while it was being started
            return await process.wait()
        finally:
            self._live.discard(process)


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
