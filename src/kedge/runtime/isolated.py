"""Runs a blocking tool in a process of its own, where it can be killed. Values pass through the codec."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kedge.errors import DeclarationRefused, KedgeError, NotDone
from kedge.model.failure import Failure
from kedge.model.typed import convert
from kedge.model.values import pack, unpack

if TYPE_CHECKING:
    from kedge.runtime.gate import Applied

_ERROR: Final = "error"


class IsolatedError(Exception):
    """What a tool raised in its own process, as far as it can be told."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


async def run_isolated(fn: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None) -> Applied:
    """Call a function in a fresh process; when its time is up the process is killed, and that is certain."""
    from kedge.runtime.gate import Applied

    name = f"{fn.__module__}:{fn.__qualname__}"
    if "<locals>" in name or fn.__module__ == "__main__":
        raise DeclarationRefused(fn.__name__, "isolate='process' needs a function at the top of an importable module")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kedge.runtime.isolated", name,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout):
            answer, _ = await process.communicate(_packed(dict(arguments)))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return Applied(error=error, timed_out=isinstance(error, TimeoutError))
    try:
        told: dict[str, Any] = _unpacked(answer)
    except (msgspec.DecodeError, KedgeError):
        return Applied(error=ChildProcessError(f"{fn.__name__} died with exit code {process.returncode}"))
    if _ERROR not in told:
        return Applied(told["output"])
    failure = convert(told[_ERROR], Failure, at="failure")
    return Applied(error=NotDone(str(failure)) if failure.is_a(NotDone) else IsolatedError(failure))


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
    from kedge.runtime.failures import describe
    from kedge.runtime.registry import Tool

    out, sys.stdout = sys.stdout.buffer, sys.stderr
    module, _, path = sys.argv[1].partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    arguments = _unpacked(sys.stdin.buffer.read())
    try:
        if isinstance(found, Tool):
            shape = found.shape
            output = shape.call(found.fn, shape.restore(arguments, arguments), {})
        else:
            output = found(**arguments)
        answer = _packed({"output": output})
    except Exception as error:
        answer = _packed({_ERROR: describe(error)})
    out.write(answer)
    out.flush()


if __name__ == "__main__":
    main()
