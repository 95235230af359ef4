"""Runs a blocking tool in a process of its own, where it can be killed. Values pass through the codec."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kedge.errors import KedgeError, RateLimited
from kedge.model.failure import Failure
from kedge.model.typed import convert
from kedge.model.values import pack, unpack
from kedge.runtime.failures import IsolatedError, describe

if TYPE_CHECKING:
    from kedge.runtime.applying import Applied
    from kedge.runtime.registry import ToolStep

_ERROR: Final = "error"


async def run_isolated(
    fn: Callable[..., Any], arguments: Mapping[str, Any], place: ToolStep, timeout: float | None
) -> Applied:
    """Call a function in a fresh process; when its time is up the process is killed, and that is certain."""
    from kedge.runtime.applying import Applied

    name = f"{fn.__module__}:{fn.__qualname__}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from kedge.runtime.isolated import main; main()", name,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout):
            told = {
                "arguments": dict(arguments),
                "place": [place.run, place.id, place.attempt, str(place.key)],
                "workspace": None if place.workspace is None else str(place.workspace),
            }
            answer, _ = await process.communicate(_packed(told))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return Applied(error=error, timed_out=isinstance(error, TimeoutError))
    try:
        outcome: dict[str, Any] = _unpacked(answer)
    except (msgspec.DecodeError, KedgeError):
        return Applied(error=ChildProcessError(f"{fn.__name__} died with exit code {process.returncode}"))
    if _ERROR not in outcome:
        return Applied(outcome["output"])
    failure = convert(outcome[_ERROR], Failure, at="failure")
    if failure.is_a(RateLimited):
        return Applied(error=RateLimited(failure.message, retry_after=outcome.get("retry_after")))
    return Applied(error=IsolatedError(failure))


def _packed(value: Any) -> bytes:
    packed = pack(value)
    return msgspec.msgpack.encode((packed.raw, packed.blobs))


def _unpacked(body: bytes) -> Any:
    from kedge.model.values import Blob

    raw, blobs = msgspec.msgpack.decode(body, type=tuple[bytes, list[Blob]])
    by_hash = {blob.hash: blob for blob in blobs}
    return unpack(raw, lambda hashes: {digest: by_hash[digest] for digest in hashes})


def main() -> None:
    """The other process: one call, read from stdin, answered on stdout. What the tool prints goes to stderr."""
    from kedge.runtime.registry import KEY, STEP, WORKSPACE, Key, Shape, Tool, ToolStep

    out, sys.stdout = sys.stdout.buffer, sys.stderr
    module, _, path = sys.argv[1].partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    told = _unpacked(sys.stdin.buffer.read())
    run, step, attempt, key = told["place"]
    folder = None if told["workspace"] is None else Path(told["workspace"])
    place = ToolStep(run, step, attempt, Key(key), lambda _: None, folder)
    injected = {KEY: place.key, STEP: place, WORKSPACE: folder}
    try:
        fn: Any = found.fn if isinstance(found, Tool) else found  # pyright: ignore[reportUnknownMemberType]
        shape = found.shape if isinstance(found, Tool) else Shape(fn, path)
        extra = {name: injected[marker] for name, marker in shape.injected.items()}
        output = shape.call(fn, shape.restore(told["arguments"], told["arguments"]), extra)
        answer = _packed({"output": output})
    except Exception as error:
        answer = _packed({_ERROR: describe(error), "retry_after": getattr(error, "retry_after", None)})
    out.write(answer)
    out.flush()
