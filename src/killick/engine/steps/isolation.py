"""Runs a blocking tool in a process of its own, where it can be killed. Values pass through the codec.

The tool's process and its children are one process group. The group dies with the agent's process, however that dies:
the kernel signals the tool's process, and a guard process kills the group when the pipe from the agent breaks.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from killick.engine.failures import IsolatedError, describe
from killick.errors import KillickError, RateLimited
from killick.model.chunks import Blob, pack, unpack
from killick.model.failure import Failure
from killick.model.typed import convert
from killick.type_init import ready

if TYPE_CHECKING:
    from killick.definitions.markers import ToolStep
    from killick.engine.steps.attempt import Applied

_ERROR: Final = "error"
_LENGTH: Final = struct.Struct("<Q")
_PR_SET_PDEATHSIG: Final = 1
_OVER: Final = b"."
"""The message to the guard when the tool's process ends by itself: its own child processes stay."""


async def run_isolated(
    fn: Callable[..., Any], arguments: Mapping[str, Any], place: ToolStep, timeout: float | None
) -> Applied:
    """Call a function in a fresh process; when its time is up the process is killed, and that is certain."""
    from killick.engine.steps.attempt import Applied

    name = f"{fn.__module__}:{fn.__qualname__}"
    request = {
        "arguments": dict(arguments),
        "place": [place.run, place.id, place.attempt, str(place.key)],
        "workspace": None if place.workspace is None else str(place.workspace),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from killick.engine.steps.isolation import main; main()", name, str(os.getpid()),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout):
            answer = await _answered(process, _packed(request))
            await process.wait()
    except BaseException as error:
        _kill_group(process.pid)
        if isinstance(error, GeneratorExit):
            raise
        await process.wait()
        return Applied(error=error, timed_out=isinstance(error, TimeoutError))
    try:
        outcome: dict[str, Any] = _unpacked(answer)
    except (msgspec.DecodeError, KillickError):
        return Applied(error=ChildProcessError(f"{fn.__name__} died with exit code {process.returncode}"))
    if _ERROR not in outcome:
        return Applied(outcome["output"])
    failure = convert(outcome[_ERROR], Failure, at="failure")
    if failure.is_a(RateLimited):
        return Applied(error=RateLimited(failure.message, retry_after=outcome.get("retry_after")))
    return Applied(error=IsolatedError(failure))


async def _answered(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    """The answer to a request. The pipe stays open meanwhile: where it breaks, the agent's process is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(_LENGTH.pack(len(request)) + request)
        await process.stdin.drain()
    try:
        return await process.stdout.read()
    finally:
        process.stdin.close()


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _packed(value: Any) -> bytes:
    packed = pack(value)
    return msgspec.msgpack.encode((packed.raw, packed.blobs))


def _unpacked(body: bytes) -> Any:
    raw, blobs = msgspec.msgpack.decode(body, type=ready(tuple[bytes, list[Blob]]))
    by_hash = {blob.hash: blob for blob in blobs}
    return unpack(raw, lambda hashes: {digest: by_hash[digest] for digest in hashes})


def main() -> None:
    """The other process: one call, read from stdin, answered on stdout. The tool's output goes to stderr."""
    agent, answers = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # also for programs that the tool starts
    over = _tied_to(int(sys.argv[2]), agent)
    with open(agent, "rb", closefd=False) as requests:
        length = requests.read(_LENGTH.size)
        size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else 0
        body = requests.read(size)
    if size and len(body) == size:
        answer = _called(sys.argv[1], body)
        os.write(over, _OVER)
        with open(answers, "wb") as out:
            out.write(answer)


def _tied_to(parent: int, pipe: int) -> int:
    """End this process with its parent, which holds the other end of a pipe. Returns where to say that it is over.

    The kernel's signal follows the thread that made this process: an agent's loop that ends takes its tools along.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked to signal that
    reader, tell = os.pipe()
    leader = os.getpid()
    if os.fork() == 0:
        _guard(leader, pipe, reader)
    os.close(reader)
    return tell


def _guard(leader: int, pipe: int, reader: int) -> None:
    """Kill a process group when the agent's end of a pipe closes, or when its leader dies without a word."""
    os.setsid()
    os.chdir("/")
    kept = sorted((pipe, reader))
    os.closerange(0, kept[0])
    os.closerange(kept[0] + 1, kept[1])
    os.closerange(kept[1] + 1, os.sysconf("SC_OPEN_MAX"))
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    poll.register(pipe, 0)
    ready = dict(poll.poll())
    if reader not in ready or os.read(reader, 1) != _OVER:
        _kill_group(leader)
    os._exit(0)


def _called(name: str, request: bytes) -> bytes:
    """Call the function that a request is for: the answer, with its result or its error."""
    from killick.definitions.markers import KEY, STEP, WORKSPACE, Key, ToolStep
    from killick.definitions.tools import Shape, Tool

    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    call = _unpacked(request)
    run, step, attempt, key = call["place"]
    folder = None if call["workspace"] is None else Path(call["workspace"])
    place = ToolStep(run, step, attempt, Key(key), lambda _: None, folder)
    injected = {KEY: place.key, STEP: place, WORKSPACE: folder}
    try:
        fn: Any = found.fn if isinstance(found, Tool) else found  # pyright: ignore[reportUnknownMemberType]
        shape = found.shape if isinstance(found, Tool) else Shape(fn, path)
        extra = {name: injected[marker] for name, marker in shape.injected.items()}
        output = shape.call(fn, shape.restore(call["arguments"], call["arguments"]), extra)
        return _packed({"output": output})
    except Exception as error:
        return _packed({_ERROR: describe(error), "retry_after": getattr(error, "retry_after", None)})
